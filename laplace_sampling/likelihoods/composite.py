"""Likelihoods made of others: one for each head of a network, and one with a weight for each datum.

Their targets are those of the others as columns of one float64 matrix, in which labels are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.likelihood import Gaussian, Likelihood, as_likelihood

__all__ = ["MultiTask", "Weighted", "check_weights", "weighted"]


@dataclass(frozen=True)
class MultiTask(Likelihood):
    """A likelihood for each head of a network that returns a dictionary, independent given the outputs.

    Targets are a dictionary of the same names.

    Args:
        heads: name to likelihood, or its name. The noise precision of a Gaussian head is given, not learnt:
            `Gaussian(b, learn=False)`.
        layout: of the outputs; `bind` sets it.
        widths: columns of the targets of each head; `prepare` sets them.
    """

    heads: Mapping[str, Likelihood | str]
    layout: Layout | None = field(default=None, repr=False, compare=False)
    widths: tuple[int, ...] = field(default=(), repr=False, compare=False)
    name: str = field(default="multitask", init=False)

    def __post_init__(self) -> None:
        heads = {name: as_likelihood(likelihood) for name, likelihood in self.heads.items()}
        learnt = [name for name, head in heads.items() if isinstance(head, Gaussian) and head.learn]
        if not heads or learnt:
            raise ValueError(
                f"The noise precision of a head is not learnt, but of {learnt} it is to be: give it, in place of "
                '"regression", as `Gaussian(b, learn=False)`, `b` being one over the mean squared error on data that '
                "the network was not trained on."
                if learnt
                else "`MultiTask({})` needs at least one head."
            )
        object.__setattr__(self, "heads", heads)

    @property
    def likelihoods(self) -> dict[str, Likelihood]:
        """Of the heads, in the order of the outputs once they are known."""
        order = self.heads if self.layout is None else self.layout.names
        return {name: as_likelihood(self.heads[name]) for name in order}

    def bind(self, layout: Layout) -> "MultiTask":
        if set(layout.names) != set(self.heads):
            found = f"the heads {layout.names}" if layout.names else "one tensor, not a dictionary"
            raise ValueError(
                f"The likelihood has the heads {list(self.heads)}, but the model returns {found}. Give one for each "
                "head; for some of them wrap the model in a module that returns these only."
            )
        bound = {name: as_likelihood(self.heads[name]).bind(Layout.single(shape)) for name, shape in layout.heads}
        return replace(self, heads=bound, layout=layout)

    def prepare(self, layout: Layout, y: Any) -> "tuple[MultiTask, Tensor]":
        bound = self.bind(layout)
        if not isinstance(y, Mapping) or set(y) != set(self.heads):
            found = list(y) if isinstance(y, Mapping) else f"a {type(y).__name__}"
            raise ValueError(f"Targets must be a dictionary with the heads {layout.names}, but are {found}.")
        parts = []
        for name, shape in layout.heads:
            try:
                targets = bound.likelihoods[name].prepare(Layout.single(shape), y[name])[1]
            except (TypeError, ValueError) as error:
                raise type(error)(f"Head {name!r}: {error}") from None
            parts.append(targets.reshape(len(targets), -1).double())
        return replace(bound, widths=tuple(part.shape[1] for part in parts)), torch.cat(parts, dim=1)

    def _parts(self, *flat: Tensor, y: Tensor | None) -> list[tuple[Any, ...]]:
        """Likelihood, outputs and targets of each head."""
        assert self.layout is not None
        columns = [tensor.split(self.layout.sizes, dim=-1) for tensor in flat]
        targets = [None] * len(self.heads) if y is None else y.split(self.widths, dim=-1)
        return list(zip(self.likelihoods.values(), *columns, targets, strict=True))

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
        """Nothing: `prepare` checks the targets of each head."""

    def check_curvature(self, f: Tensor, y: Tensor) -> None:
        for head, g, t in self._parts(f, y=y):
            head.check_curvature(g, t)

    def rank(self, num_outputs: int) -> int:
        assert self.layout is not None
        return sum(head.rank(size) for head, size in zip(self.likelihoods.values(), self.layout.sizes, strict=True))


@dataclass(frozen=True)
class Weighted(Likelihood):
    """`w_n ℓ(y_n, f_n)`: a datum of weight 2 counts as two. Targets are those of `base` with the weight behind them."""

    base: Likelihood

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.name

    @property
    def unweighted(self) -> Likelihood:
        return self.base

    def unweighted_targets(self, y: Tensor) -> Tensor:
        return y[:, :-1]

    def weights(self, y: Tensor) -> Float[Tensor, " N"]:
        """`w`, behind the targets."""
        return y[:, -1]

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return self.base.loss(f, y[:, :-1]) * y[:, -1].to(f)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.base.gradient(f, y[:, :-1]) * y[:, -1:].to(f)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return self.base.curvature(f, u, y[:, :-1]) * y[:, -1:].to(u)

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return self.base.root(f, u, y[:, :-1]) * y[:, -1:].sqrt().to(u)

    def root_transpose(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return self.base.root_transpose(f, u, y[:, :-1]) * y[:, -1:].sqrt().to(u)

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        self.base.check_targets(output_shape, y)

    def check_curvature(self, f: Tensor, y: Tensor) -> None:
        self.base.check_curvature(f, y[:, :-1])

    def rank(self, num_outputs: int) -> int:
        return self.base.rank(num_outputs)


def weighted(likelihood: Likelihood, y: Tensor, weights: Tensor) -> tuple[Weighted, Tensor]:
    """The likelihood of weighted data, and their targets.

    Args:
        likelihood: of a datum, bound to the outputs.
        y: targets as it takes them.
        weights: `[N]`.

    Raises:
        ValueError: if weights are of another shape, or negative, or not finite.
    """
    check_weights(weights, len(y))
    columns = [y.reshape(len(y), -1).double(), weights.detach().to(y.device).double()[:, None]]
    return Weighted(likelihood), torch.cat(columns, dim=1)


def check_weights(weights: Tensor, num_data: int) -> None:
    """Raise if weights are not one for each datum."""
    if weights.shape != (num_data,):
        raise ValueError(
            f"`weights` must have one entry a datum, [{num_data}], in the order of the dataset, but have shape "
            f"{list(weights.shape)}."
        )
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()) or not bool((weights > 0).any()):
        raise ValueError("`weights` must be finite and at least 0, and not all 0.")
