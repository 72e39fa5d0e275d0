"""Observation models: the loss `ℓ(y, f)`, its curvature `B`, a root of `B`, and links to probabilities.

Outputs are flattened to `[..., N, C]` here, and so are targets. Losses are negative log-likelihoods, normalised, one
per datum. `B = ∂²ℓ/∂f²`, or its mean over `y ~ p(y | f)` where that is another (Fisher). `B` never exceeds `C` numbers:
each likelihood applies it, and a root `L` with `L Lᵀ = B`, in closed form.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.data.batches import Layout

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "as_likelihood",
]


class Likelihood(ABC):
    """`p(y | f)` for outputs `f` of a network; to write one, give the six methods below.

    The curvature and its roots get the targets, too, for likelihoods that ignore some of them; others do not look.
    Attributes: `name`, and `fill`, the label that is ignored, with which targets of different length are padded.
    """

    name: str
    fill: int | None = None

    @abstractmethod
    def loss(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N"]:
        """`−log p(y_n | f_n)` of each datum."""

    @abstractmethod
    def gradient(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N C"]:
        """`∂ℓ/∂f`."""

    @abstractmethod
    def curvature(
        self, f: Float[Tensor, "N C"], u: Float[Tensor, "*K N C"], y: Tensor | None = None
    ) -> Float[Tensor, "*K N C"]:
        """`B(f) u`."""

    @abstractmethod
    def root(
        self, f: Float[Tensor, "N C"], u: Float[Tensor, "*K N C"], y: Tensor | None = None
    ) -> Float[Tensor, "*K N C"]:
        """`L u` with `L Lᵀ = B(f)`: for `u ~ N(0, I)` it is exact Gaussian noise of covariance `B`."""

    @abstractmethod
    def root_transpose(
        self, f: Float[Tensor, "N C"], u: Float[Tensor, "*K N C"], y: Tensor | None = None
    ) -> Float[Tensor, "*K N C"]:
        """`Lᵀ u`, so that `‖Lᵀu‖² = uᵀB u`."""

    @abstractmethod
    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        """Raise if targets `y` of a batch do not fit outputs of shape `[N, ...]`."""

    def bind(self, layout: Layout) -> "Likelihood":
        """The likelihood of outputs of this layout, flattened.

        Raises:
            ValueError: if the network has several heads.
        """
        if layout.names:
            raise ValueError(
                f"The model returns a dictionary of outputs, {layout.names}: give a likelihood for each, as "
                "`likelihood={head: likelihood, ...}`, or wrap it in a module that returns one tensor."
            )
        return self

    def prepare(self, layout: Layout, y: Any) -> "tuple[Likelihood, Tensor]":
        """The likelihood of flattened outputs, and targets as it takes them.

        Raises:
            TypeError, ValueError: if targets do not fit.
        """
        bound = self.bind(layout)
        if not isinstance(y, Tensor):
            raise TypeError(
                f"Targets must be a tensor, but are a {type(y).__name__}; targets by head are of a network that "
                "returns a dictionary, with `likelihood={head: likelihood, ...}`."
            )
        self.check_targets(torch.Size((len(y), *layout.shape)), y)
        return bound, y

    def check_curvature(self, f: Float[Tensor, "N C"], y: Tensor) -> None:  # noqa: B027
        """Raise if `B` is not positive semi-definite, where that is not known."""

    def rank(self, num_outputs: int) -> int:
        """Of `B`, at most."""
        return num_outputs

    @property
    def unweighted(self) -> "Likelihood":
        """That of a datum, whatever its weight."""
        return self

    def unweighted_targets(self, y: Tensor) -> Tensor:
        """The targets of `unweighted`."""
        return y

    def weights(self, y: Tensor) -> Float[Tensor, " N"]:
        """How often each datum counts."""
        return torch.ones(len(y), dtype=torch.float64, device=y.device)

    def noise(
        self, f: Float[Tensor, "N C"], num: int, generator: torch.Generator, y: Tensor | None = None
    ) -> Float[Tensor, "K N C"]:
        """`num` draws of `N(0, B(f_n))` for each datum."""
        white = torch.randn(num, *f.shape, generator=generator, dtype=f.dtype)
        return self.root(f, white.to(f.device), y)


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

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return self.precision(u) * u

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
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


# Classes that fill a register of a CPU: torch's softmax of fewer takes them one by one.
_REGISTER = 16


def _softmax(f: Float[Tensor, "*K c"]) -> Float[Tensor, "*K c"]:
    """Along the last axis; of a few classes on a CPU five times as fast as torch's."""
    if f.shape[-1] >= _REGISTER or f.device.type != "cpu":
        return f.softmax(-1)
    weights = (f - f.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Categorical(Likelihood):
    r"""`y ~ softmax(f)` over `C` classes, at each of some positions.

    `B = diag(p) − p pᵀ`, `L u = √p ⊙ (u − √p ⟨√p, u⟩)`.

    Args:
        class_dim: the axis of the outputs that is the classes: 1 for `[N, C]` and segmentation, `[N, C, H, W]`; -1 for
            labels of tokens, `[N, T, C]`. Targets have the other axes.
        ignore_index: a label that says nothing, as that of padding: its position has neither loss nor curvature.
        shape: of the outputs of a datum; `bind` sets it. One axis, the classes, by default.
    """

    class_dim: int = 1
    ignore_index: int = -100
    shape: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    name: str = field(default="classification", init=False)

    def __post_init__(self) -> None:
        if self.class_dim == 0:
            raise ValueError(
                "`Categorical(class_dim=0)`: the first axis of the outputs is the data; classes are another."
            )

    @property
    def fill(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ignore_index

    def bind(self, layout: Layout) -> Self:
        super().bind(layout)
        return replace(self, shape=layout.shape)

    def rank(self, num_outputs: int) -> int:
        return num_outputs - num_outputs // (num_outputs if self.shape is None else self.shape[self._axis])

    @property
    def _axis(self) -> int:
        """Of the classes, from the end."""
        assert self.shape is not None
        return self.class_dim if self.class_dim < 0 else self.class_dim - 1 - len(self.shape)

    def positions(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K S c"]:
        """Flattened outputs with the classes last."""
        if self.shape is None:
            return f[..., None, :]
        moved = f.reshape(*f.shape[:-1], *self.shape).movedim(self._axis, -1)
        return moved.reshape(*f.shape[:-1], -1, self.shape[self._axis])

    def flat(self, g: Float[Tensor, "*K S c"]) -> Float[Tensor, "*K C"]:
        """The inverse of `positions`."""
        if self.shape is None:
            return g[..., 0, :]
        others = list(self.shape)
        classes = others.pop(self._axis)
        return g.reshape(*g.shape[:-2], *others, classes).movedim(-1, self._axis).reshape(*g.shape[:-2], -1)

    def link(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K C"]:
        """Probabilities."""
        return self.flat(_softmax(self.positions(f)))

    def _labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Labels `[N, S]`, of those that count, which are 1 in the second."""
        labels = y.reshape(len(y), -1).long()
        counts = labels != self.ignore_index
        return labels.where(counts, 0), counts

    def _probabilities(self, f: Tensor, u: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """`p`, zero where labels are ignored, so that all that is made of it is; and `u`, by positions."""
        p = self.positions(f).softmax(-1).to(u)
        return p if y is None else p * self._labels(y)[1][..., None], self.positions(u)

    def given(self, y: Tensor) -> Bool[Tensor, "N S"]:
        """Which labels are not ignored."""
        return self._labels(y)[1]

    def losses(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N S"]:
        """`−log p` of each label, 0 where it is ignored."""
        labels, counts = self._labels(y)
        log_p = self.positions(f).log_softmax(-1)
        chosen = log_p.gather(-1, labels.expand(log_p.shape[:-1])[..., None])[..., 0]
        return -chosen.where(counts, 0)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return self.losses(f, y).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        labels, counts = self._labels(y)
        p = self.positions(f).softmax(-1)
        index = labels.expand(p.shape[:-1])[..., None]
        return self.flat(p.scatter_add(-1, index, torch.full_like(p[..., :1], -1)) * counts[..., None])

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        p, u = self._probabilities(f, u, y)
        return self.flat(p * (u - (p * u).sum(-1, keepdim=True)))

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        p, u = self._probabilities(f, u, y)
        q = p.sqrt()
        return self.flat(q * (u - q * (q * u).sum(-1, keepdim=True)))

    def root_transpose(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        p, u = self._probabilities(f, u, y)
        q = p.sqrt()
        return self.flat(q * u - q * (q * (q * u)).sum(-1, keepdim=True))

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        axis = self.class_dim if self.class_dim > 0 else self.class_dim + len(output_shape)
        if not 0 < axis < len(output_shape) or output_shape[axis] < 2:
            raise ValueError(
                f"Classification needs outputs [N, C] with C of at least 2 classes, or those of several positions with "
                f"`Categorical(class_dim=...)`, but the model gives {list(output_shape)} and class_dim is "
                f'{self.class_dim}. For one logit a datum use likelihood="binary".'
            )
        if y.is_floating_point() or y.dtype == torch.bool:
            raise TypeError(f"Class labels must be integers, but have dtype {y.dtype}; call `y.long()`.")
        classes, shape = output_shape[axis], _without(output_shape, axis)
        if list(y.shape) != shape:
            fitting = [n for n in range(1, len(output_shape)) if _without(output_shape, n) == list(y.shape)]
            cure = f" They fit classes on axis {fitting[0]}: `Categorical(class_dim={fitting[0]})`." if fitting else ""
            raise ValueError(
                f"Class labels must have shape {shape} for outputs {list(output_shape)} with the classes on axis "
                f"{axis}, but have {list(y.shape)}.{cure}"
            )
        given = y[y != self.ignore_index]
        if not given.numel():
            raise ValueError(f"All labels are ignore_index={self.ignore_index}: there is nothing to learn from.")
        low, high = int(given.min()), int(given.max())
        if low < 0 or high >= classes:
            raise ValueError(
                f"Class labels must lie between 0 and {classes - 1} for {classes} outputs, "
                f"but range from {low} to {high}; {self.ignore_index} is a label that is ignored."
            )


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""`y_c ~ sigmoid(f_c)`, each output by itself: binary (`C = 1`) or multi-label; `B = diag(p(1 − p))`."""

    name: str = field(default="binary", init=False)

    def positions(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K C 1"]:
        """Each output by itself."""
        return f[..., None]

    def flat(self, g: Float[Tensor, "*K C 1"]) -> Float[Tensor, "*K C"]:
        """The inverse of `positions`."""
        return g[..., 0]

    def given(self, y: Tensor) -> Bool[Tensor, "N C"]:
        """All of them."""
        return torch.ones_like(y.reshape(len(y), -1), dtype=torch.bool)

    def losses(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N C"]:
        """`−log p` of each target."""
        target = y.reshape(f.shape[-2:]).to(f).expand(f.shape)
        return F.binary_cross_entropy_with_logits(f, target, reduction="none")

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return self.losses(f, y).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.sigmoid() - y.reshape(f.shape[-2:]).to(f)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return (f.sigmoid() * (-f).sigmoid()).to(u) * u

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return (f.sigmoid() * (-f).sigmoid()).sqrt().to(u) * u

    root_transpose = root

    def link(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K C"]:
        """Probabilities."""
        return f.sigmoid()

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        _check_shape("Binary", output_shape, y)
        if bool(((y != 0) & (y != 1)).any()):
            raise ValueError(
                f"Binary targets must be 0 or 1, but range from {float(y.min()):g} to {float(y.max()):g}. "
                "Labels -1 and 1 become `(y + 1) / 2`."
            )


@dataclass(frozen=True)
class Poisson(Likelihood):
    r"""Counts `y_c ~ Poisson(exp f_c)`, outputs the logarithms of rates: `ℓ = eᶠ − y f + log y!`, `B = diag(eᶠ)`."""

    name: str = field(default="poisson", init=False)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        y = y.reshape(f.shape[-2:]).to(f)
        return (f.exp() - y * f + torch.lgamma(y + 1)).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return f.exp() - y.reshape(f.shape[-2:]).to(f)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return f.exp().to(u) * u

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return (f / 2).exp().to(u) * u

    root_transpose = root

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        _check_shape("Count", output_shape, y)
        if bool((y < 0).any()) or (y.is_floating_point() and bool((y != y.round()).any())):
            raise ValueError(
                f"Counts must be whole numbers of at least 0, but range from {float(y.min()):g} to {float(y.max()):g}"
                f"{'' if bool((y < 0).any()) else ', not all of them whole'}."
            )


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    r"""`y ~ N(m, diag(eˢ))` of outputs `f = (m, s)`, means and log variances: the halves of axis 1 of `[N, 2D, ...]`.

    `ℓ = ½ (y − m)² e⁻ˢ + ½ s + ½ log 2π`, summed over `D`. Its Hessian is indefinite; `B` is the Fisher matrix, its
    mean over `y`: `diag(e⁻ˢ, ½)`.
    """

    name: str = field(default="heteroscedastic", init=False)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = f.chunk(2, -1)
        return 0.5 * ((y.reshape(m.shape[-2:]).to(f) - m) ** 2 * (-s).exp() + s + math.log(2 * math.pi)).sum(-1)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        m, s = f.chunk(2, -1)
        error, precision = m - y.reshape(m.shape[-2:]).to(f), (-s).exp()
        return torch.cat([error * precision, 0.5 - 0.5 * error**2 * precision], dim=-1)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        s = f.chunk(2, -1)[1].to(u)
        return torch.cat([(-s).exp(), torch.full_like(s, 0.5)], dim=-1) * u

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        s = f.chunk(2, -1)[1].to(u)
        return torch.cat([(-s / 2).exp(), torch.full_like(s, 0.5**0.5)], dim=-1) * u

    root_transpose = root

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        if len(output_shape) < 2 or output_shape[1] % 2:
            raise ValueError(
                "A heteroscedastic regression needs outputs [N, 2D, ...], D means and then D log variances, but the "
                f"model gives {list(output_shape)}."
            )
        if not y.is_floating_point():
            raise TypeError(f"Regression targets must be floating point, but have dtype {y.dtype}; call `y.float()`.")
        _check_shape(
            "Regression", torch.Size((output_shape[0], output_shape[1] // 2, *output_shape[2:])), y, "the means"
        )


_NAMES = {
    "regression": Gaussian,
    "classification": Categorical,
    "binary": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
}


def as_likelihood(likelihood: str | Likelihood, noise_precision: float | Tensor = 1.0) -> Likelihood:
    """The likelihood of a name, `"regression"` for instance; a `Likelihood` is returned as it is."""
    given = isinstance(noise_precision, Tensor) or noise_precision != 1.0
    if given and likelihood != "regression":
        raise ValueError(
            f'`noise_precision` goes with likelihood="regression" only, but the likelihood is {likelihood!r}; '
            "give it as `Gaussian(noise_precision=...)`, or leave it out."
        )
    if isinstance(likelihood, Likelihood):
        return likelihood
    if not isinstance(likelihood, str) or likelihood not in _NAMES:
        names = ", ".join(f'"{name}"' for name in _NAMES)
        raise ValueError(f"`likelihood={likelihood!r}` is not known; use {names} or a Likelihood.")
    return Gaussian(noise_precision) if likelihood == "regression" else _NAMES[likelihood]()


def _without(shape: torch.Size, axis: int) -> list[int]:
    return [*shape[:axis], *shape[axis + 1 :]]


def _check_shape(kind: str, output_shape: torch.Size, y: Tensor, what: str = "the model's output") -> None:
    if y.shape != output_shape:
        raise ValueError(
            f"{kind} targets must have the shape of {what}, {list(output_shape)}, but have "
            f"{list(y.shape)}; they would be broadcast against each other. Reshape the targets, "
            "for instance by `y.unsqueeze(-1)`, or the output."
        )
