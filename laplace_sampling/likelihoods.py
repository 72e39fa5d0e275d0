"""Observation models: the loss `ℓ(y, f)`, its curvature `B = ∂²ℓ/∂f²`, a root of `B`, and links to probabilities.

Outputs are flattened to `[..., N, C]` here. Losses are negative log-likelihoods, normalised, one per datum.
`B` never exceeds `C` numbers: each likelihood applies it, and a root `L` with `L Lᵀ = B`, in closed form.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "as_likelihood"]


class Likelihood(ABC):
    """`p(y | f)` for outputs `f` of a network; to write one, give the six methods below."""

    name: str

    @abstractmethod
    def loss(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N"]:
        """`−log p(y_n | f_n)` of each datum."""

    @abstractmethod
    def gradient(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N C"]:
        """`∂ℓ/∂f`."""

    @abstractmethod
    def curvature(self, f: Float[Tensor, "N C"], u: Float[Tensor, "*K N C"]) -> Float[Tensor, "*K N C"]:
        """`B(f) u`."""

    @abstractmethod
    def root(self, f: Float[Tensor, "N C"], u: Float[Tensor, "*K N C"]) -> Float[Tensor, "*K N C"]:
        """`L u` with `L Lᵀ = B(f)`: for `u ~ N(0, I)` it is exact Gaussian noise of covariance `B`."""

    @abstractmethod
    def root_transpose(self, f: Float[Tensor, "N C"], u: Float[Tensor, "*K N C"]) -> Float[Tensor, "*K N C"]:
        """`Lᵀ u`, so that `‖Lᵀu‖² = uᵀB u`."""

    @abstractmethod
    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        """Raise if targets `y` of a batch do not fit outputs of shape `[N, ...]`."""

    def noise(self, f: Float[Tensor, "N C"], num: int, generator: torch.Generator) -> Float[Tensor, "K N C"]:
        """`num` draws of `N(0, B(f_n))` for each datum."""
        white = torch.randn(num, *f.shape, generator=generator, dtype=f.dtype)
        return self.root(f, white.to(f.device))


@dataclass(frozen=True)
class Gaussian(Likelihood):
    r"""`y ~ N(f, diag(b)⁻¹)`: `ℓ = ½ b‖y − f‖² − ½ log b + ½ log 2π`, `B = diag(b)`.

    Args:
        noise_precision: `b = 1/σ²`, a number, or a tensor `[C]` of one precision an output (of the flattened output).
        learn: whether `fit_hyperparameters` updates it (from this starting value).
        noise_at: what the noise that is learnt explains: `"mode"`, what the linear model leaves of the targets at its
            mode, as evidence has it; `"network"`, what the network leaves, `b = (N·C − γ)/Σ(y − f)²`. A
            `LinearisedLaplace` sets it by its own argument.
    """

    noise_precision: Tensor | float = 1.0
    learn: bool = True
    noise_at: str = "mode"
    name: str = field(default="regression", init=False)

    def __post_init__(self) -> None:
        precision = torch.as_tensor(self.noise_precision, dtype=torch.float64).detach().cpu()
        if precision.dim() > 1 or not bool(torch.all(precision > 0)) or not bool(precision.isfinite().all()):
            raise ValueError(
                f"`Gaussian(noise_precision=...)` needs a positive number or a tensor [C] of them, got {precision}."
            )
        if self.noise_at not in ("mode", "network"):
            raise ValueError(f'`Gaussian(noise_at={self.noise_at!r})` is not known; use "mode" or "network".')
        # One entry is a scalar, also in a vector.
        object.__setattr__(self, "noise_precision", precision.squeeze() if precision.numel() == 1 else precision)

    def precision(self, like: Tensor) -> Tensor:
        """`b` on the device and in the dtype of `like`."""
        assert isinstance(self.noise_precision, Tensor)
        return self.noise_precision.to(like)

    def with_precision(self, noise_precision: Tensor | float) -> "Gaussian":
        return replace(self, noise_precision=noise_precision)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        b = self.precision(f)
        return 0.5 * (b * (f - y.reshape(f.shape[-2:])) ** 2 - b.log() + math.log(2 * math.pi)).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.precision(f) * (f - y.reshape(f.shape[-2:]))

    def curvature(self, f: Tensor, u: Tensor) -> Tensor:
        return self.precision(u) * u

    def root(self, f: Tensor, u: Tensor) -> Tensor:
        return self.precision(u).sqrt() * u

    root_transpose = root

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        if not y.is_floating_point():
            raise TypeError(f"Regression targets must be floating point, but have dtype {y.dtype}; call `y.float()`.")
        _check_shape("Regression", output_shape, y)
        b = self.noise_precision
        assert isinstance(b, Tensor)
        if b.dim() == 1 and len(b) != output_shape[1:].numel():
            raise ValueError(
                f"`noise_precision` has {len(b)} entries, but the model has {output_shape[1:].numel()} outputs."
            )


@dataclass(frozen=True)
class Categorical(Likelihood):
    r"""`y ~ softmax(f)` over `C` classes; `B = diag(p) − p pᵀ`, `L u = √p ⊙ (u − √p ⟨√p, u⟩)`."""

    name: str = field(default="classification", init=False)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return -f.log_softmax(-1).gather(-1, y.long().expand(f.shape[:-1])[..., None])[..., 0]

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.softmax(-1) - F.one_hot(y.long(), f.shape[-1]).to(f)

    def curvature(self, f: Tensor, u: Tensor) -> Tensor:
        p = f.softmax(-1).to(u)
        return p * (u - (p * u).sum(-1, keepdim=True))

    def root(self, f: Tensor, u: Tensor) -> Tensor:
        q = f.softmax(-1).to(u).sqrt()
        return q * (u - q * (q * u).sum(-1, keepdim=True))

    def root_transpose(self, f: Tensor, u: Tensor) -> Tensor:
        q = f.softmax(-1).to(u).sqrt()
        return q * u - q * (q * (q * u)).sum(-1, keepdim=True)

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        if len(output_shape) != 2 or output_shape[1] < 2:
            raise ValueError(
                f"Classification needs outputs [N, C] with C of at least 2 classes, but the model gives "
                f'{list(output_shape)}. For one logit a datum use likelihood="binary".'
            )
        if y.is_floating_point() or y.dtype == torch.bool:
            raise TypeError(f"Class labels must be integers, but have dtype {y.dtype}; call `y.long()`.")
        if y.shape != output_shape[:1]:
            raise ValueError(f"Class labels must have shape {list(output_shape[:1])}, but have {list(y.shape)}.")
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= output_shape[1]:
            raise ValueError(
                f"Class labels must lie between 0 and {output_shape[1] - 1} for {output_shape[1]} outputs, "
                f"but range from {low} to {high}."
            )


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""`y_c ~ sigmoid(f_c)`, each output by itself: binary (`C = 1`) or multi-label; `B = diag(p(1 − p))`."""

    name: str = field(default="binary", init=False)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        target = y.reshape(f.shape[-2:]).to(f).expand(f.shape)
        return F.binary_cross_entropy_with_logits(f, target, reduction="none").sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.sigmoid() - y.reshape(f.shape[-2:]).to(f)

    def curvature(self, f: Tensor, u: Tensor) -> Tensor:
        return (f.sigmoid() * (-f).sigmoid()).to(u) * u

    def root(self, f: Tensor, u: Tensor) -> Tensor:
        return (f.sigmoid() * (-f).sigmoid()).sqrt().to(u) * u

    root_transpose = root

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        _check_shape("Binary", output_shape, y)
        if bool(((y != 0) & (y != 1)).any()):
            raise ValueError(
                f"Binary targets must be 0 or 1, but range from {float(y.min()):g} to {float(y.max()):g}. "
                "Labels -1 and 1 become `(y + 1) / 2`."
            )


def as_likelihood(likelihood: str | Likelihood, noise_precision: float | Tensor = 1.0) -> Likelihood:
    """The likelihood named `"regression"`, `"classification"` or `"binary"`; a `Likelihood` is returned as it is."""
    given = isinstance(noise_precision, Tensor) or noise_precision != 1.0
    if given and likelihood != "regression":
        raise ValueError(
            f'`noise_precision` goes with likelihood="regression" only, but the likelihood is {likelihood!r}; '
            "give it as `Gaussian(noise_precision=...)`, or leave it out."
        )
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood == "regression":
        return Gaussian(noise_precision)
    if likelihood == "classification":
        return Categorical()
    if likelihood == "binary":
        return Bernoulli()
    raise ValueError(
        f'`likelihood={likelihood!r}` is not known; use "regression", "classification", "binary" or a Likelihood.'
    )


def _check_shape(kind: str, output_shape: torch.Size, y: Tensor) -> None:
    if y.shape != output_shape:
        raise ValueError(
            f"{kind} targets must have the shape of the model's output, {list(output_shape)}, but have "
            f"{list(y.shape)}; they would be broadcast against each other. Reshape the targets, "
            "for instance by `y.unsqueeze(-1)`, or the output."
        )
