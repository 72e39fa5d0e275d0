"""The interface of observation models: the loss `ℓ(y, f)`, its curvature `B` and a root of `B`.

Outputs are flattened to `[..., N, C]` here, and so are targets. Losses are negative log-likelihoods, normalised, one
per datum. `B = ∂²ℓ/∂f²`, or its mean over `y ~ p(y | f)` where that differs (Fisher). `B` is never formed: each
likelihood applies it, and a root `L` with `L Lᵀ = B`, in closed form.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.data.batches import Layout


class Likelihood(ABC):
    """`p(y | f)` for outputs `f` of a network; to write one, give the six abstract methods below.

    The curvature and its roots also get the targets, for labels that are ignored, for weights, and for Hessians that
    depend on the target. If the Hessian of the loss is positive semi-definite, give it; otherwise give its mean over
    `y` (Fisher).

    Attributes:
        name: the name in messages, `repr` and saved files.
        fill: the label that is ignored; targets of different length are padded with it. `None`: there is none.
        takes_missing: whether a target of NaN is missing. Such an output has neither loss, gradient nor curvature.
        quadratic: whether the loss is `½ Σ_c b_c (y_c − f_c)²` with `b` from `noise_precisions`. Then `B = diag(b)` is
            the same for all outputs, and the posterior of a linear model is exactly Gaussian.
        learns_noise: whether `fit_hyperparameters` updates `b`.
    """

    name: str
    fill: int | None = None
    takes_missing: bool = False
    quadratic: bool = False

    @property
    def learns_noise(self) -> bool:
        return False

    def noise_precisions(self) -> Tensor | None:
        """`b`, a scalar or one for each output, `[C]`; `None` for a likelihood without noise of its own."""
        return None

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

    def diagonal_and_vector(
        self, f: Float[Tensor, "N C"], y: Tensor | None = None
    ) -> tuple[Float[Tensor, "N C"], Float[Tensor, "N C"]] | None:
        """`d` and `v` with `B = diag(d) − v vᵀ` for each datum, so that sums over data need no `[N, C, C]` tensors.

        Returns `None`, as it does by default, if the likelihood has no such form.
        """
        return None

    @abstractmethod
    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        """Raise if targets `y` of a batch do not fit outputs of shape `[N, ...]`."""

    def settings(self) -> dict[str, Any]:
        """Arguments of the constructor that make an equal likelihood, for saved files.

        Values are numbers, strings, lists and dictionaries of these. By default they are the fields of a dataclass.
        """
        if not is_dataclass(self):
            return {}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.init and field.compare}

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

    def prepare(self, layout: Layout, y: Any, *, some_given: bool = True) -> "tuple[Likelihood, Tensor]":
        """The likelihood of flattened outputs, and the targets in the form that it takes.

        Args:
            layout: of the outputs.
            y: targets.
            some_given: whether there must be a target.

        Raises:
            TypeError, ValueError: if targets do not fit.
        """
        # Heads first: targets of a dictionary would otherwise be blamed for a likelihood that is missing.
        bound = self.bind(layout)
        if not isinstance(y, Tensor):
            raise TypeError(
                f"Targets must be a tensor, but are a {type(y).__name__}; a dictionary of targets is for a network "
                "that returns a dictionary, with `likelihood={head: likelihood, ...}`."
            )
        if y.dim() == 0 or y.is_complex():
            kind = f"complex numbers, in {y.dtype}" if y.is_complex() else "a single number without an axis"
            raise TypeError(f"Targets must be a tensor [N, ...] of real numbers, but are {kind}.")
        if not self.takes_missing and bool(y.isnan().any()):
            raise ValueError(
                f"Targets contain NaN, but the likelihood {self.name!r} has no missing targets: clean the data first. "
                "A loss of your own takes another mark, as `torch.where(y == mark, 0, loss)`."
            )
        self.check_targets(torch.Size((len(y), *layout.shape)), y)
        if some_given:
            check_some_given(bound, y, layout.size)
        return bound, y

    def check_curvature(self, f: Float[Tensor, "N C"], y: Tensor) -> None:  # noqa: B027
        """Raise if `B` is not positive semi-definite, for likelihoods where that depends on the outputs."""

    def observed(self, y: Tensor, num_outputs: int) -> Bool[Tensor, "N C"]:
        """Marks the outputs that have a target."""
        if not self.takes_missing:
            return torch.ones(len(y), num_outputs, dtype=torch.bool, device=y.device)
        return has_targets(y)

    def mean_log_prob(self, f: Float[Tensor, "K N C"], y: Tensor) -> Float[Tensor, " N"]:
        """`log (1/K) Σ_k p(y_n | f_kn)`, joint over the outputs of a datum."""
        return (-self.loss(f, y)).logsumexp(0) - math.log(len(f))

    def rank(self, num_outputs: int) -> int:
        """An upper bound on the rank of the `[C, C]` curvature `B` of a datum, for `C` outputs."""
        return num_outputs

    @property
    def unweighted(self) -> "Likelihood":
        """The likelihood of a datum of weight 1."""
        return self

    def unweighted_targets(self, y: Tensor) -> Tensor:
        """The targets of `unweighted`."""
        return y

    def weights(self, y: Tensor) -> Float[Tensor, " N"]:
        """How often each datum counts."""
        # In float64, in which weighted sums over many data keep their digits.
        return torch.ones(len(y), dtype=torch.float64, device=y.device)


class DiagonalLikelihood(Likelihood):
    """A likelihood of outputs that are independent given the network: its curvature is `B = diag(b(f))`."""

    @abstractmethod
    def diagonal(self, f: Float[Tensor, "N C"]) -> Float[Tensor, "*N C"]:
        """`b(f)`, in the dtype of the outputs."""

    def _observed_diagonal(self, f: Tensor, u: Tensor, y: Tensor | None) -> Tensor:
        # Not a product: where a rate overflows it would be NaN.
        diagonal = self.diagonal(f.to(u))
        return diagonal if y is None else diagonal.where(self.observed(y, f.shape[-1]), 0)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return self._observed_diagonal(f, u, y) * u

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return self._observed_diagonal(f, u, y).sqrt() * u

    def root_transpose(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        return self.root(f, u, y)


def has_targets(y: Tensor) -> Bool[Tensor, "N C"]:
    """Marks the targets that are not NaN."""
    return ~y.reshape(len(y), y.shape[1:].numel()).isnan()


def residuals(f: Float[Tensor, "*K N C"], y: Tensor) -> tuple[Float[Tensor, "*K N C"], Bool[Tensor, "N C"]]:
    """`f − y`, zero where there is no target, and where there is one."""
    y = y.reshape(f.shape[-2:]).to(f)
    given = ~y.isnan()
    return (f - y).where(given, 0), given


def check_some_given(likelihood: Likelihood, y: Tensor, num_outputs: int) -> None:
    """Raise if all targets are missing."""
    if not bool(likelihood.observed(y, num_outputs).any()):
        mark = "" if likelihood.fill is None else f" or ignore_index={likelihood.fill}"
        raise ValueError(
            f"All targets are NaN{mark}, which says that they are missing: there is nothing to learn from."
        )


def check_target_shape(kind: str, output_shape: torch.Size, y: Tensor, what: str = "the model's output") -> None:
    """Raise if targets have another shape than the outputs: torch would broadcast them without a word."""
    if y.shape != output_shape:
        raise ValueError(
            f"{kind} targets must have the shape of {what}, {list(output_shape)}, but have "
            f"{list(y.shape)}; they would be broadcast against each other. Reshape the targets, "
            "for instance by `y.unsqueeze(-1)`, or the output."
        )
