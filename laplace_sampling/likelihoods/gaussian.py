"""Regression with Gaussian noise of one precision, or one for each output."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import MultivariateNormal

from laplace_sampling.arguments import as_numbers, check_flag
from laplace_sampling.likelihoods.likelihood import DiagonalLikelihood, check_target_shape, residuals
from laplace_sampling.likelihoods.measurement import Observation, check_observation

_ONE = torch.ones((), dtype=torch.float64)


@dataclass(frozen=True)
class Gaussian(DiagonalLikelihood):
    r"""`y ~ N(f, diag(b)⁻¹)`: `ℓ = ½ b‖y − f‖² − ½ log b + ½ log 2π`, `B = diag(b)`.

    A target of NaN is missing: its output, or its measurement, does not count.

    Args:
        noise_precision: `b = 1/σ²`, a number, or a tensor `[C]` of one precision for each (flattened) output. By
            default 1; measurements have no default, as their noise has units: a fit asks for it.
        learn: whether `fit_hyperparameters` updates `b` from this starting value, so that it explains the residuals of
            the network, `b = (N·C − γ)/Σ(y − f)²`. By default it does, but not for measurements, of which a network can
            explain nearly all: `N·C − γ` is what is left then, and says little. See `residual_precision`.
        observe: `T` of measurements `y = T f(x) + noise`, `[m, C]` for the (flattened) outputs of a datum:

            - a matrix, dense or sparse, of torch or scipy, or a `LinearOperator`;
            - an object with functions `A` and `A_adjoint` of stacks of outputs `[B, ...]`, as the physics of deepinv
              (`Tomography`, `Blur`, `Inpainting`, `MRI`). It computes where its buffers are, and in their dtype;
            - a pair of functions `(T, Tᵀ)` of flat vectors, which are given stacks of them if they take these.

            Targets have the shape that `T` gives them, or are flat. A fit checks that `T` is linear and real, and that
            its adjoint is one, on random vectors. Measurements that are zero for all outputs do not count. Saved files
            do not contain `T`: give it to `load`.
    """

    noise_precision: Tensor | float | None = None
    learn: bool | None = None
    observe: Observation = field(default=None, repr=False, compare=False, kw_only=True)
    # Whether some data have targets at some of their outputs only, so that `B` differs between data; fits set it.
    partly: bool = field(default=False, repr=False, compare=False, kw_only=True)
    name: str = field(default="regression", init=False)

    quadratic = True
    takes_missing = True

    def __post_init__(self) -> None:
        check_observation(self.observe)
        if self.learn is None:
            object.__setattr__(self, "learn", self.observe is None)
        check_flag("`Gaussian(learn=...)`", self.learn)
        if self.noise_precision is None:
            # Measurements keep none: files have theirs, and fits ask for it.
            object.__setattr__(self, "noise_precision", None if self.observe is not None else _ONE)
            return
        # Hyperparameters are kept in float64 on the CPU, whatever the network computes in.
        precision = as_numbers("`Gaussian(noise_precision=...)`", self.noise_precision).double().cpu()
        valid = bool(torch.all(precision > 0)) and bool(precision.isfinite().all())
        if precision.dim() > 1 or not precision.numel() or not valid:
            raise ValueError(
                f"`Gaussian(noise_precision=...)` needs a positive number or a tensor [C] of them, got {precision}."
            )
        # A vector of one entry becomes a scalar, so that "one noise for all outputs" has one form only.
        object.__setattr__(self, "noise_precision", precision.squeeze() if precision.numel() == 1 else precision)

    @property
    def learns_noise(self) -> bool:
        return bool(self.learn)

    def noise_precisions(self) -> Tensor:
        if not isinstance(self.noise_precision, Tensor):
            raise ValueError(
                "`Gaussian(observe=T)` has no noise: give `Gaussian(1 / sigma**2, observe=T)`, with the standard "
                "deviation of a measurement, in its units, if it is known. Else "
                "`b = residual_precision(model, loader, observe=T)` takes it from the residuals of measurements, "
                "better of some that the network was not trained on, and `Gaussian(b, observe=T)` has it."
            )
        return self.noise_precision

    def settings(self) -> dict[str, Any]:
        b = self.noise_precision
        return {"noise_precision": b.tolist() if isinstance(b, Tensor) else b, "learn": self.learn}

    def precision(self, like: Tensor) -> Tensor:
        """`b` on the device and in the dtype of `like`."""
        return self.noise_precisions().to(like)

    def with_precision(self, noise_precision: Tensor | float) -> "Gaussian":
        """Returns the likelihood with another `b`."""
        return replace(self, noise_precision=noise_precision)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        # Normalised, so that losses of different `b` compare: the evidence of the noise precision needs `log b`.
        b = self.precision(f)
        error, given = residuals(f, y)
        return 0.5 * (b * error**2 + (math.log(2 * math.pi) - b.log()).where(given, 0)).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.precision(f) * residuals(f, y)[0]

    def diagonal(self, f: Tensor) -> Tensor:
        return self.precision(f)

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        if not y.is_floating_point():
            raise TypeError(f"Regression targets must be floating point, but have dtype {y.dtype}; call `y.float()`.")
        check_target_shape("Regression", output_shape, y)
        b = self.noise_precisions()
        if b.dim() == 1 and len(b) != output_shape[1:].numel():
            raise ValueError(
                f"`noise_precision` has {len(b)} entries, but the model has {output_shape[1:].numel()} outputs."
            )


def log_density(error: Float[Tensor, "N C"], covariance: Float[Tensor, "N C C"]) -> Float[Tensor, " N"]:
    """`log N(e | 0, S)` of each datum, joint over the outputs whose error is not NaN."""
    given = ~error.isnan()
    # Outputs without a target are independent, with an error of zero and a variance of one, which is taken away again.
    eye = torch.eye(error.shape[-1], dtype=covariance.dtype, device=covariance.device)
    covariance = covariance.where(given[:, :, None] & given[:, None], eye)
    error = error.where(given, 0)
    joint = MultivariateNormal(torch.zeros_like(error), covariance).log_prob(error)
    return joint + 0.5 * math.log(2 * math.pi) * (~given).sum(-1).to(joint)
