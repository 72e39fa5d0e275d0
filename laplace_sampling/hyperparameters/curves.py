r"""Evidence and effective dimension as functions of the prior precision `α`.

The curvature `M` is taken at the network's outputs, and is the same for every `α`. In coordinates in which the prior
has one precision, traces of functions of `M` come from its eigenvalues, or from a few Krylov steps (`lanczos`):

    γ(α) = Tr M(M + α)⁻¹,    log|I + M/α|.

With the mode `θ̄(α)` of the linear model, Laplace's approximation of the log marginal likelihood is

    log p(y | α) = −F(α) − ½ log|I + M/α|,    F(α) = Σ_i ℓ(y_i, h(θ̄, x_i)) + ½ α‖θ̄‖²,

where `F` has the derivative `½‖θ̄‖²` in `α`, since it is a minimum over `θ`.

Traces of functions of the curvature by block Lanczos on random probes (`solvers.quadrature`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.quadrature import Quadrature, TraceEstimator

# Modes that are found for each decade of a curve: with their slopes, cubic splines between them are off by less than
# 1e-5 of the objective.
KNOTS_A_DECADE = 4


@dataclass(frozen=True)
class Traces:
    """Traces of functions of the curvature `M`; `α` is a tensor `[n]`.

    For several groups of weights, `α` is the geometric mean of their precisions over the weights; all are multiplied
    by one factor.

    Attributes:
        quadrature: eigenvalues of `M`, or nodes and weights for probes.
        at: `α` of the prior that the coordinates belong to.
        exact: whether all eigenvalues are known.
        passes: products spent, in units of all data and one vector.
        full: whether the Krylov run ended because memory was full. The change that more steps would make of the traces
            is then bounded, because few steps do not predict it.
        rounding: how far eigenvalues lie below zero, where none of `M` does: products are not more accurate.
    """

    quadrature: Quadrature
    at: float
    exact: bool = True
    passes: float = 0.0
    full: bool = False
    rounding: float = 0.0

    @classmethod
    def of_eigenvalues(cls, values: Float[Tensor, " m"], at: float) -> "Traces":
        """The traces of a matrix whose other eigenvalues are zero."""
        return cls(Quadrature.of_eigenvalues(values.clamp_min(0)), at)

    def effective_dimension(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`γ(α) = Tr M(M + α)⁻¹`, and its standard error."""
        # A column of `α` against the row of nodes, here and below.
        a = alpha.double()[:, None]
        return self._trace(lambda t: t / (t + a))

    def log_determinant(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`log|I + M/α|`, and its standard error."""
        a = alpha.double()[:, None]
        return self._trace(lambda t: torch.log1p(t / a))

    def missing(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """The change of `log|I + M/α|` by further Lanczos steps, relative to it."""
        a = alpha.double()[:, None]
        return self._missing(lambda t: torch.log1p(t / a)).abs() / self.log_determinant(alpha)[0]

    def _trace(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """`Tr f(M)` and its standard error, which has a part of the probes and one of the Lanczos steps not made."""
        value = self.quadrature(f).mean(0)
        if self.exact:
            return value, torch.zeros_like(value)
        return value, (self.quadrature.variance(f) + self._missing(f) ** 2).sqrt()

    def _missing(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        return self.quadrature.bound(f) if self.full else self.quadrature.remaining(f)


Mode = TypeVar("Mode")


# From `α`, `[n]`, to the objective `F` and to `‖θ̄‖²` at the mode.
ModeCurve = Callable[[Tensor], tuple[Tensor, Tensor]]


def interpolated(alphas: Float[Tensor, " k"], objectives: Float[Tensor, " k"], norms: Float[Tensor, " k"]) -> ModeCurve:
    """Interpolates `F` and `‖θ̄‖²` between modes at rising precisions, by a cubic Hermite spline of `F` in `log α`.

    The slope of `F` in `log α` is `½ α‖θ̄‖²`. The curve of one mode is constant. Precisions must be within the range of
    `alphas`, up to rounding: outside of it `F` stays at its value at the end.
    """
    if len(alphas) == 1:
        return lambda alpha: (objectives.expand(len(alpha)), norms.expand(len(alpha)))
    # It takes a while to import, and only curves need it.
    from scipy.interpolate import CubicHermiteSpline

    logs = alphas.log()
    # In units of the first and last, which a grid of theirs may exceed by rounding.
    spline = CubicHermiteSpline(logs, objectives, 0.5 * alphas * norms)
    slope = spline.derivative()

    def curve(alpha: Tensor) -> tuple[Tensor, Tensor]:
        log = alpha.double().log().clamp(float(logs[0]), float(logs[-1]))
        return torch.from_numpy(spline(log)), torch.from_numpy(slope(log)) * 2 / alpha.double()

    return curve


def modes_along(
    alphas: Float[Tensor, " k"], known: Mode, find: Callable[[float, Mode], tuple[Mode, float, float]]
) -> ModeCurve:
    """The curves of modes that are found one from the other, outwards from the middle precision.

    Args:
        alphas: rising.
        known: the mode at the middle one.
        find: from a precision and a mode near by to the mode, `F`, and `‖θ̄‖²`.
    """
    middle, found = len(alphas) // 2, torch.zeros(2, len(alphas), dtype=torch.float64)
    for outwards in (range(middle, len(alphas)), range(middle - 1, -1, -1)):
        mode = known
        for i in outwards:
            mode, objective, norm = find(float(alphas[i]), mode)
            found[:, i] = torch.tensor([objective, norm], dtype=torch.float64)
    return interpolated(alphas, *found)


def knots(alpha: float, decades: float) -> Float[Tensor, " k"]:
    """Precisions at which modes are found, so far to both sides of one."""
    half = math.ceil(KNOTS_A_DECADE * decades)
    return alpha * torch.logspace(-decades, decades, 2 * half + 1, dtype=torch.float64)


@dataclass(frozen=True)
class EvidencePath:
    """The evidence of the linear model as a function of the prior precision.

    Attributes:
        traces: of the curvature.
        mode: the objective and the norm of the mode.
    """

    traces: Traces
    mode: ModeCurve

    def log_marginal_likelihood(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`log p(y | α)`, and its standard error."""
        determinant, error = self.traces.log_determinant(alpha)
        return -self.mode(alpha)[0] - 0.5 * determinant, 0.5 * error

    def at(self, alpha: float) -> "MarginalLikelihood":
        """The evidence at one precision, with its parts."""
        objective, norm = (float(v) for v in self.mode(torch.tensor([alpha], dtype=torch.float64)))
        return MarginalLikelihood.of(self.traces, alpha, objective - 0.5 * alpha * norm, alpha * norm, "mode")


@dataclass(frozen=True)
class EvidenceCurves:
    """Curves over the prior precision, each `[n]`, in float64 on the CPU; logarithms are natural, sums over the data.

    The standard errors are in the fields of the same names with `_se` behind them.

    Attributes:
        prior_precision: `α`.
        effective_dimension: `γ(α)`.
        mode_norm: `‖θ̄(α)‖²` in coordinates in which the prior has the one precision `α`.
        log_determinant: `log|I + M/α|`, with the curvature `M` of the losses in the same coordinates.
        data_fit: `Σ_i ℓ(y_i, h(θ̄(α), x_i))`, the negative log-likelihood of the targets: smaller is better.
        log_marginal_likelihood: `log p(y | α)`.
        at: the fitted `α`.
    """

    prior_precision: Float[Tensor, " n"]
    effective_dimension: Float[Tensor, " n"]
    effective_dimension_se: Float[Tensor, " n"]
    mode_norm: Float[Tensor, " n"]
    log_determinant: Float[Tensor, " n"]
    log_determinant_se: Float[Tensor, " n"]
    data_fit: Float[Tensor, " n"]
    log_marginal_likelihood: Float[Tensor, " n"]
    log_marginal_likelihood_se: Float[Tensor, " n"]
    at: float

    @classmethod
    def of(cls, path: EvidencePath, alpha: Float[Tensor, " n"]) -> "EvidenceCurves":
        objective, norm = path.mode(alpha)
        return cls(
            alpha,
            *path.traces.effective_dimension(alpha),
            norm,
            *path.traces.log_determinant(alpha),
            objective - 0.5 * alpha * norm,
            *path.log_marginal_likelihood(alpha),
            path.traces.at,
        )

    def shifted(self, loss: float) -> "EvidenceCurves":
        """The curves with a constant added to the losses."""
        return replace(self, data_fit=self.data_fit + loss, log_marginal_likelihood=self.log_marginal_likelihood - loss)


@dataclass(frozen=True)
class MarginalLikelihood:
    """`log p(y)` at some hyperparameters, by Laplace's approximation at some weights; `float()` returns its value.

    Attributes:
        value: `−data_fit − complexity`, a sum over the data.
        standard_error: the standard error of the value; 0 if it is exact.
        data_fit: `Σ_i ℓ(y_i, h(θ̄, x_i))`, or at the network `Σ_i ℓ(y_i, f(w̄, x_i))`.
        complexity: `½ θ̄ᵀAθ̄ + ½ log|I + A⁻¹M|`; at the network `w̄` takes the place of `θ̄`.
        exact: whether all eigenvalues were known.
        at: the weights of the approximation: `"mode"`, the mode of the linear model, or `"network"`, the weights of the
            network. Only the second ranks networks (`docs/design.md`).
    """

    value: float
    standard_error: float
    data_fit: float
    complexity: float
    exact: bool
    at: str

    def __float__(self) -> float:
        return self.value

    @classmethod
    def of(cls, traces: Traces, alpha: float, data_fit: float, energy: float, at: str) -> "MarginalLikelihood":
        """The evidence at weights with a sum of losses, and an energy `θᵀAθ`; `alpha` is where the traces are taken."""
        determinant, error = (float(v) for v in traces.log_determinant(torch.tensor([alpha], dtype=torch.float64)))
        complexity = 0.5 * energy + 0.5 * determinant
        return cls(-data_fit - complexity, 0.5 * error, data_fit, complexity, traces.exact, at)

    def shifted(self, loss: float) -> "MarginalLikelihood":
        """The evidence with a constant added to the losses."""
        return replace(self, value=self.value - loss, data_fit=self.data_fit + loss)


# `Tr M` takes `C/2` products, and is computed for at most so many outputs: no more than a few steps of the probes.
_TRACE_OUTPUTS = 64


def krylov_traces(
    ggn: GGN,
    at: float,
    draws: Draws,
    accurate: Callable[[Traces], bool],
    max_basis: int | None = None,
) -> Traces:
    """The traces of `M`, from a run that ends where they are accurate, or complete.

    Args:
        ggn: `M`, in coordinates in which the prior has one precision.
        at: that precision.
        draws: of the probes.
        accurate: whether traces are accurate enough, so that the run ends.
        max_basis: largest number of vectors in memory.
    """
    probes = draws.prior(ggn.size).to(ggn.device, ggn.dtype)
    # Of equal norms: the variance of an estimate is then that of directions alone.
    probes = probes * (math.sqrt(ggn.size) / probes.norm(dim=1, keepdim=True))
    known = ggn.features.num_outputs <= _TRACE_OUTPUTS
    estimator = TraceEstimator(ggn, probes, ggn.trace() if known else None)
    basis = estimator.basis
    while True:
        full = max_basis is not None and basis.size + estimator.width > max_basis and estimator.steps > 0
        exhausted = full or not estimator.step()
        assert estimator.quadrature is not None
        passes = basis.passes + (ggn.features.num_outputs / 2 if known else 0.0)
        traces = Traces(estimator.quadrature, at, exact=False, passes=passes, full=full, rounding=basis.indefiniteness)
        # A step that has added less than a block says that few more products make the traces exact. The change of the
        # last step is known after two.
        settled = estimator.steps > 1 and estimator.width == len(probes)
        if exhausted or (settled and accurate(traces)):
            return traces
