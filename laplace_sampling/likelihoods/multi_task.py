"""A likelihood for each head of a network.

The targets of all heads are columns of one float64 matrix, in which labels are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from laplace_sampling.data.batches import Layout, flattened
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
    def takes_missing(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(head.takes_missing for head in self.heads.values())

    def bind(self, layout: Layout) -> "MultiTask":
        if set(layout.names) != set(self.heads):
            returned = f"the heads {layout.names}" if layout.names else "one tensor, not a dictionary"
            raise ValueError(
                f"The likelihood has the heads {list(self.heads)}, but the model returns {returned}. Give a likelihood "
                "for each head; to leave some out, wrap the model in a module that returns the others only."
            )
        # The network's order, in which outputs are flattened, need not be that of the user's dictionary.
        bound = {name: self.heads[name].bind(Layout.single(shape)) for name, shape in layout.heads}
        return replace(self, heads=bound, layout=layout)

    def prepare(self, layout: Layout, y: Any, *, some_given: bool = True) -> "tuple[MultiTask, Tensor]":
        bound = self.bind(layout)
        if not isinstance(y, Mapping) or set(y) != set(self.heads):
            given = list(y) if isinstance(y, Mapping) else f"a {type(y).__name__}"
            raise ValueError(f"Targets must be a dictionary with the heads {layout.names}, but are {given}.")
        # Each head checks its own targets, so that an error names the head.
        columns: list[Tensor] = []
        for name, shape in layout.heads:
            try:
                targets = self.heads[name].prepare(Layout.single(shape), y[name], some_given=some_given)[1]
            except (TypeError, ValueError) as error:
                raise type(error)(f"Head {name!r}: {error}") from None
            columns.append(flattened(targets).double())
        return replace(bound, widths=tuple(part.shape[1] for part in columns)), torch.cat(columns, dim=1)

    def _parts(self, *flat: Tensor, y: Tensor | None) -> list[tuple[Any, ...]]:
        """Likelihood, outputs and targets of each head, as views of the flattened ones."""
        assert self.layout is not None
        columns = [tensor.split(self.layout.sizes, dim=-1) for tensor in flat]
        targets = [None] * len(self.heads) if y is None else y.split(self.widths, dim=-1)
        return list(zip(self.heads.values(), *columns, targets, strict=True))

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
        parts = zip(self.heads.values(), y.split(self.widths, dim=-1), self.layout.sizes, strict=True)
        return torch.cat([head.observed(t, size) for head, t, size in parts], dim=1)

    def rank(self, num_outputs: int) -> int:
        assert self.layout is not None
        return sum(head.rank(size) for head, size in zip(self.heads.values(), self.layout.sizes, strict=True))
