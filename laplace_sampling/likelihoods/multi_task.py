"""A likelihood for each head of a network.

The targets of all heads are columns of one float64 matrix, in which labels are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.likelihood import Likelihood


@dataclass(frozen=True)
class MultiTask(Likelihood):
    """A likelihood for each head of a network that returns a dictionary, independent given the outputs.

    Targets are a dictionary of the same names.

    Args:
        heads: likelihood of each head by name. The noise precision of a Gaussian head is given, not learnt:
            `Gaussian(b, learn=False)`.
        layout: layout of the outputs; `bind` sets it.
        widths: number of target columns of each head; `prepare` sets them.
    """

    heads: Mapping[str, Likelihood]
    layout: Layout | None = field(default=None, repr=False, compare=False)
    widths: tuple[int, ...] = field(default=(), repr=False, compare=False)
    name: str = field(default="multitask", init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.heads, Mapping) or not self.heads:
            raise ValueError(f"`MultiTask(...)` needs at least one head, in a dictionary, but got {self.heads!r:.80}.")
        names = [name for name, head in self.heads.items() if not isinstance(head, Likelihood)]
        if names:
            raise TypeError(
                f"`MultiTask(...)` needs a Likelihood for each head, but has none for {names}: give `Poisson()` in "
                'place of "poisson", or give the model its likelihoods as `likelihood={head: "poisson", ...}`.'
            )
        learnt = [name for name, head in self.heads.items() if head.learns_noise]
        if learnt:
            raise ValueError(
                f"`MultiTask` does not learn the noise precision of a head, but {learnt} ask for it: give, in place of "
                '"regression", `Gaussian(b, learn=False)`, where `b` is one over the mean squared error on data that '
                "the network was not trained on."
            )

    @property
    def likelihoods(self) -> dict[str, Likelihood]:
        """The likelihoods by head, in the order of the outputs once that is known."""
        # The network's order, in which outputs are flattened, need not be that of the user's dictionary.
        order = self.heads if self.layout is None else self.layout.names
        return {name: self.heads[name] for name in order}

    @property
    def takes_missing(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(head.takes_missing for head in self.heads.values())

    def settings(self) -> dict[str, Any]:
        return {"heads": self.likelihoods}

    def bind(self, layout: Layout) -> "MultiTask":
        if set(layout.names) != set(self.heads):
            returned = f"the heads {layout.names}" if layout.names else "one tensor, not a dictionary"
            raise ValueError(
                f"The likelihood has the heads {list(self.heads)}, but the model returns {returned}. Give a likelihood "
                "for each head; to leave some out, wrap the model in a module that returns the others only."
            )
        bound = {name: self.heads[name].bind(Layout.single(shape)) for name, shape in layout.heads}
        return replace(self, heads=bound, layout=layout)

    def prepare(self, layout: Layout, y: Any, silent: list[str] | None = None) -> "tuple[MultiTask, Tensor]":
        bound = self.bind(layout)
        if not isinstance(y, Mapping) or set(y) != set(self.heads):
            given = list(y) if isinstance(y, Mapping) else f"a {type(y).__name__}"
            raise ValueError(f"Targets must be a dictionary with the heads {layout.names}, but are {given}.")
        # Each head checks its own targets, so that an error names the head.
        columns = [
            _columns(name, bound.heads[name], Layout.single(shape), y[name], silent) for name, shape in layout.heads
        ]
        return replace(bound, widths=tuple(part.shape[1] for part in columns)), torch.cat(columns, dim=1)

    def _parts(self, *flat: Tensor, y: Tensor | None) -> list[tuple[Any, ...]]:
        """Likelihood, outputs and targets of each head, as views of the flattened ones."""
        assert self.layout is not None
        columns = [tensor.split(self.layout.sizes, dim=-1) for tensor in flat]
        targets = [None] * len(self.heads) if y is None else y.split(self.widths, dim=-1)
        return list(zip(self.likelihoods.values(), *columns, targets, strict=True))

    # Heads are independent given the outputs: losses add up, and `B` and its root are block diagonal.
    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.stack([head.loss(g, t) for head, g, t in self._parts(f, y=y)]).sum(0)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.cat([head.gradient(g, t) for head, g, t in self._parts(f, y=y)], dim=-1)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.cat([head.curvature(g, v, t) for head, g, v, t in self._parts(f, u, y=y)], dim=-1)

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.cat([head.root(g, v, t) for head, g, v, t in self._parts(f, u, y=y)], dim=-1)

    def root_transpose(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.cat([head.root_transpose(g, v, t) for head, g, v, t in self._parts(f, u, y=y)], dim=-1)

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        """Does nothing: `prepare` checks the targets of each head."""

    def check_curvature(self, f: Tensor, y: Tensor) -> None:
        for head, g, t in self._parts(f, y=y):
            head.check_curvature(g, t)

    def observed(self, y: Tensor, num_outputs: int) -> Bool[Tensor, "N C"]:
        assert self.layout is not None
        parts = zip(self.likelihoods.values(), y.split(self.widths, dim=-1), self.layout.sizes, strict=True)
        return torch.cat([head.observed(t, size) for head, t, size in parts], dim=1)

    def rank(self, num_outputs: int) -> int:
        assert self.layout is not None
        return sum(head.rank(size) for head, size in zip(self.likelihoods.values(), self.layout.sizes, strict=True))


def _columns(name: str, head: Likelihood, layout: Layout, y: Any, silent: list[str] | None) -> Tensor:
    """The targets of one head as columns."""
    reasons: list[str] | None = None if silent is None else []
    try:
        targets = head.prepare(layout, y, reasons)[1]
    except (TypeError, ValueError) as error:
        raise type(error)(f"Head {name!r}: {error}") from None
    if silent is not None and reasons:
        silent.extend(f"Head {name!r}: {reason}" for reason in reasons)
    return targets.reshape(len(targets), targets.shape[1:].numel()).double()
