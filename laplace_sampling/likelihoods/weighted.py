"""A likelihood whose data have weights: a datum of weight 2 counts as two."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood


@dataclass(frozen=True)
class Weighted(Likelihood):
    """`w_n ℓ(y_n, f_n)`: a datum of weight 2 counts as two.

    Targets are those of `base`, with the weights as a last column: so they stay with their data in mini-batches.
    """

    base: Likelihood

    @property
    def takes_missing(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.takes_missing

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.name

    @property
    def unweighted(self) -> Likelihood:
        return self.base

    def unweighted_targets(self, y: Tensor) -> Tensor:
        return y[:, :-1]

    def weights(self, y: Tensor) -> Float[Tensor, " N"]:
        """`w`, the last column of the targets."""
        return y[:, -1]

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return self.base.loss(f, y[:, :-1]) * y[:, -1].to(f)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.base.gradient(f, y[:, :-1]) * y[:, -1:].to(f)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return self.base.curvature(f, u, y[:, :-1]) * y[:, -1:].to(u)

    def diagonal_and_vector(self, f: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        assert y is not None
        parts, w = self.base.diagonal_and_vector(f, y[:, :-1]), y[:, -1:].to(f)
        return None if parts is None else (parts[0] * w, parts[1] * w.sqrt())

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        # A root of `w B` is `√w L`.
        return self.base.root(f, u, y[:, :-1]) * y[:, -1:].sqrt().to(u)

    def root_transpose(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return self.base.root_transpose(f, u, y[:, :-1]) * y[:, -1:].sqrt().to(u)

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        self.base.check_targets(output_shape, y)

    def check_curvature(self, f: Tensor, y: Tensor) -> None:
        self.base.check_curvature(f, y[:, :-1])

    def observed(self, y: Tensor, num_outputs: int) -> Bool[Tensor, "N C"]:
        return self.base.observed(y[:, :-1], num_outputs)

    def rank(self, num_outputs: int) -> int:
        return self.base.rank(num_outputs)


def weighted(likelihood: Likelihood, y: Tensor, weights: Tensor) -> tuple[Weighted, Tensor]:
    """The likelihood of weighted data, and their targets.

    Args:
        likelihood: likelihood of a datum, bound to the outputs.
        y: targets in the form that it takes.
        weights: `[N]`, as `check_weights` takes them; those of a part of the data may all be 0.
    """
    # One float64 matrix: labels up to 2⁵³ are exact in it.
    columns = [y.reshape(len(y), y.shape[1:].numel()).double(), weights.detach().to(y.device).double()[:, None]]
    return Weighted(likelihood), torch.cat(columns, dim=1)


def check_weights(weights: Tensor, num_data: int) -> None:
    """Raise if there is not one valid weight for each datum."""
    if weights.shape != (num_data,):
        raise ValueError(
            f"`weights` must have one entry a datum, [{num_data}], in the order of the dataset, but have shape "
            f"{list(weights.shape)}."
        )
    if not bool(weights.isfinite().all()) or bool((weights < 0).any()) or not bool((weights > 0).any()):
        raise ValueError("`weights` must be finite and at least 0, and not all 0.")
