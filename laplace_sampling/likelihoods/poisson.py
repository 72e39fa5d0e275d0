"""Counts, whose rates are exponentials of the outputs."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import DiagonalLikelihood, check_target_shape, residuals


@dataclass(frozen=True)
class Poisson(DiagonalLikelihood):
    r"""Counts `y_c ~ Poisson(exp f_c)`, outputs the logarithms of rates: `ℓ = eᶠ − y f + log y!`, `B = diag(eᶠ)`.

    A count of NaN is missing: its output counts nowhere.
    """

    name: str = field(default="poisson", init=False)

    takes_missing = True

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        y = y.reshape(f.shape[-2:]).to(f)
        # `log y!` does not depend on `f`, but densities of predictions need it.
        given, y = ~y.isnan(), y.nan_to_num()
        return (f.exp() - y * f + torch.lgamma(y + 1)).where(given, 0).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return residuals(f.exp(), y)[0]

    def diagonal(self, f: Tensor) -> Tensor:
        return f.exp()

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        check_target_shape("Count", output_shape, y)
        y = y[~y.isnan()]
        if bool((y < 0).any()) or (y.is_floating_point() and bool((y != y.round()).any())):
            raise ValueError(
                f"Counts must be whole numbers of at least 0, but range from {float(y.min()):g} to {float(y.max()):g}"
                f"{'' if bool((y < 0).any()) else ', not all of them whole'}."
            )
