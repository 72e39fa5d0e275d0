"""Regression with a noise variance that the network predicts for each input."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import DiagonalLikelihood, check_target_shape, has_targets, residuals


@dataclass(frozen=True)
class HeteroscedasticGaussian(DiagonalLikelihood):
    r"""`y ~ N(m, diag(eˢ))` for outputs `f = (m, s)`: axis 1 of `[N, 2D, ...]` holds `D` means, then `D` log variances.

    `ℓ = ½ (y − m)² e⁻ˢ + ½ s + ½ log 2π`, summed over `D`. Its Hessian is indefinite; `B` is its mean over `y`, the
    Fisher matrix `diag(e⁻ˢ, ½)`. A target of NaN is missing: its mean and its log variance count nowhere.
    """

    name: str = field(default="heteroscedastic", init=False)

    takes_missing = True

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = f.chunk(2, -1)
        error, given = residuals(m, y)
        return 0.5 * (error**2 * (-s).exp() + s + math.log(2 * math.pi)).where(given, 0).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = f.chunk(2, -1)
        # `e⁻ˢ`, not `1 / eˢ`: no overflow for large log variances.
        (error, given), precision = residuals(m, y), (-s).exp()
        return torch.cat([error * precision, (0.5 - 0.5 * error**2 * precision).where(given, 0)], dim=-1)

    # The Fisher matrix is diagonal: mean and log variance are orthogonal parameters of a normal distribution.
    def diagonal(self, f: Tensor) -> Tensor:
        s = f.chunk(2, -1)[1]
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], dim=-1)

    def observed(self, y: Tensor, num_outputs: int) -> Bool[Tensor, "N C"]:
        given = has_targets(y)
        return torch.cat([given, given], 1)

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        if len(output_shape) < 2 or output_shape[1] % 2:
            raise ValueError(
                "A heteroscedastic regression needs outputs [N, 2D, ...], D means and then D log variances, but the "
                f"model gives {list(output_shape)}."
            )
        if not y.is_floating_point():
            raise TypeError(f"Regression targets must be floating point, but have dtype {y.dtype}; call `y.float()`.")
        check_target_shape(
            "Regression", torch.Size((output_shape[0], output_shape[1] // 2, *output_shape[2:])), y, "the means"
        )
