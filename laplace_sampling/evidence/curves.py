r"""Evidence, effective dimension and mode as functions of the prior precision, from one Krylov run.

While `B` is fixed, `M` does not depend on `α`. With `T = V M Vᵀ` on a block Krylov basis `V` of a few random probes `z`
and of the right-hand side `b` of the mode, Gauss quadrature (Golub and Meurant) gives for *every* `α`

    γ(α) = Tr M(M + α)⁻¹,    log|I + M/α|,    ‖θ̄(α)‖² = bᵀ(M + α)⁻²b,

the traces as means over the probes (stochastic Lanczos quadrature), and so the log marginal likelihood

    log p(y | α) = −Σ_i ℓ(y_i, h(θ̄, x_i)) − ½ α‖θ̄‖² − ½ log|I + M/α|.

For a loss that is not quadratic, it is that of its quadratic expansion at the mode where the run was made, with
`b = Mθ̄ − ∇ℓ`: exact there, and to first order in `log α` around it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.quadrature import Quadrature

__all__ = ["EvidenceCurves", "EvidencePath", "FixedPoint", "MarginalLikelihood", "bai_golub_bound"]

# Points at which the sign of MacKay's update is computed, over all of the bounds: a factor of 1.06 apart by default,
# much closer than the curves bend. Half and twice have no effect on the problems of `fixed_point`.
_GRID = 800
# How much larger the bound of a change by further Lanczos steps may be than the change that is predicted. Twelve fits
# of networks with 61 to 1,210 weights take 2,275 passes in all, and 2,241 at one; without a bound one of these ends
# after two steps at an `α` of 2.3 times the best.
_BOUND_OVER_CHANGE = 10.0


def bai_golub_bound(trace: Tensor, squares: Tensor, largest: Tensor, rank: int, size: int, alpha: Tensor) -> Tensor:
    r"""Upper bound of `log|M + αI|` from two traces and the largest eigenvalue (Bai and Golub 1996; Brack 2023, §3.2).

    With `K` eigenvalues at most `β = λ_max + α` on the range of `M`, `μ₁ = Tr M + Kα`, `μ₂ = Tr M² + 2α Tr M + Kα²`,
    and `α` on the other `P − K`.

    Args:
        trace: `Tr M`.
        squares: `Tr M²`.
        largest: at least the largest eigenvalue of `M`.
        rank: `K`, at least the rank of `M`.
        size: `P`.
        alpha: `[n]`.
    """
    beta = largest + alpha
    first = trace + rank * alpha
    second = squares + 2 * alpha * trace + rank * alpha**2
    t = (beta * first - second) / (beta * rank - first)
    # [log β, log t] [[β, t], [β², t²]]⁻¹ [μ₁, μ₂]ᵀ, the inverse written out
    a = (first * t - second) / (beta * (t - beta))
    b = (second - beta * first) / (t * (t - beta))
    return a * beta.log() + b * t.log() + (size - rank) * alpha.log()


@dataclass(frozen=True)
class FixedPoint:
    """A fixed point of MacKay's update.

    Attributes:
        precision: `α`, before the factor of the noise.
        noise_factor: the factor by which the noise precision grows.
        error: standard error of `log α` by the probes, infinite at a bound.
        slope: ratio of an error of `log γ` or `log ‖θ̄‖²` to the error of `log α` that it causes, from 0.05 to 1.
    """

    precision: float
    noise_factor: float
    error: float
    slope: float


@dataclass(frozen=True)
class EvidencePath:
    r"""Functions of the prior precision `α` (a tensor `[n]`), at the curvature of one Krylov run.

    For several groups of weights, `α` is the geometric mean of their precisions over the weights; all are multiplied
    by the same factor.

    Attributes:
        traces: quadrature of the probes.
        fit: quadrature of `b`, one row.
        loss: the quadratic expansion of the sum of losses at `θ = 0`.
        num_outputs: `N·C`.
        size: `P`.
        noise_precision: of a Gaussian likelihood with one, else `None`.
        at: `α` at which the run was made.
        exact: no probes, but all eigenvalues: `traces` has one row of unit weights.
        passes: products spent, in units of all data and one vector.
        network_errors: `b Σ(y − f)²` of the network, if the noise is learnt from it (`Gaussian.noise_at`).
        full: whether the run ended because memory was full, and not because it was accurate. The change that more
            steps would make of the traces is then bounded, because few steps do not predict it.
    """

    traces: Quadrature
    fit: Quadrature
    loss: float
    num_outputs: int
    size: int
    noise_precision: float | None
    at: float
    exact: bool
    passes: float
    network_errors: float | None = None
    full: bool = False

    def rescaled(self, factor: float) -> "EvidencePath":
        """The curves for a noise precision that is larger by a factor, to which `M` and `b` are proportional."""
        assert self.noise_precision is not None

        def constant(noise_precision: float) -> float:
            return 0.5 * self.num_outputs * math.log(2 * math.pi / noise_precision)

        noise_precision = self.noise_precision * factor
        return replace(
            self,
            traces=self.traces.rescaled(factor, 1.0),
            fit=self.fit.rescaled(factor, factor**2),
            loss=factor * (self.loss - constant(self.noise_precision)) + constant(noise_precision),
            noise_precision=noise_precision,
            at=self.at * factor,
            network_errors=None if self.network_errors is None else self.network_errors * factor,
        )

    def _trace(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """`Tr f(M)` and its standard error, which has a part of the probes and one of the Lanczos steps not made."""
        value = self.traces(f).mean(0)
        return value, (self._probe_variance(f) + self._missing(f) ** 2).sqrt()

    def _missing(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """The change of a trace by further Lanczos steps: predicted, or bounded where memory is full."""
        return self.traces.bound(f) if self.full else self.traces.remaining(f)

    def _probe_variance(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.zeros_like(self.traces(f).mean(0)) if self.exact else self.traces.variance(f)

    def effective_dimension(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`γ(α) = Tr M(M + α)⁻¹`, and its standard error."""
        # A column of `α` against the row of nodes, here and below.
        a = alpha.double()[:, None]
        return self._trace(lambda t: t / (t + a))

    def squared_dimension(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`Tr (M(M + α)⁻¹)²`: half the variance of `ζᵀMζ` for a posterior sample `ζ`."""
        a = alpha.double()[:, None]
        return self._trace(lambda t: (t / (t + a)) ** 2)[0]

    def log_determinant(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`log|I + M/α|`, and its standard error."""
        a = alpha.double()[:, None]
        return self._trace(lambda t: torch.log1p(t / a))

    def log_determinant_and_change(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`log|I + M/α|`, and the size of its change by further Lanczos steps."""
        a = alpha.double()[:, None]
        return self._trace(lambda t: torch.log1p(t / a))[0], self._missing(lambda t: torch.log1p(t / a)).abs()

    def log_determinant_bound(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Bai and Golub's upper bound of `log|I + M/α|`; its traces are estimates themselves."""
        # The formula is for M + α, with α on the null space; log|α I| is subtracted.
        one = torch.ones(1, 1, dtype=torch.float64)
        trace, square = (self._trace(lambda t, k=k: t**k * one)[0] for k in (1, 2))
        rank = min(self.size, self.num_outputs)
        a = alpha.double()
        return bai_golub_bound(trace, square, self.traces.nodes.max(), rank, self.size, a) - self.size * a.log()

    def mode_norm(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`‖θ̄(α)‖²`, in scaled coordinates."""
        a = alpha.double()[:, None]
        return self.fit(lambda t: (t + a) ** -2)[0]

    def data_fit(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`Σ_i ℓ(y_i, h(θ̄(α), x_i))`, a sum over the data."""
        a = alpha.double()[:, None]
        return self.loss + self.fit(lambda t: 0.5 * t * (t + a) ** -2 - 1 / (t + a))[0]

    def complexity(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`½ α‖θ̄‖² + ½ log|I + M/α|`."""
        return 0.5 * alpha.double() * self.mode_norm(alpha) + 0.5 * self.log_determinant(alpha)[0]

    def log_marginal_likelihood(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`log p(y | α)`, and its standard error (of probes, and of the Lanczos steps not made)."""
        a = alpha.double()[:, None]
        # The data fit and ½ α‖θ̄‖² have the sum −½ bᵀ(M + α)⁻¹b, which converges faster than either.
        change = 0.5 * self.fit.remaining(lambda t: 1 / (t + a))
        error = (0.25 * self.log_determinant(alpha)[1] ** 2 + change**2).sqrt()
        return -self.data_fit(alpha) - self.complexity(alpha), error

    def remaining(self, alpha: float) -> tuple[float, float]:
        """The relative changes of `γ` and `‖θ̄‖²` by further steps, that of `γ` no less than a tenth of its bound."""
        a = torch.tensor([[alpha]], dtype=torch.float64)
        missing = self._missing(lambda t: t / (t + a)).abs()
        if self.traces.truncated is not None:  # else there are all eigenvalues
            # Few steps see no small eigenvalues, and predict no change: its bound has to be small as well.
            missing = torch.maximum(missing, self.traces.bound(lambda t: t / (t + a)) / _BOUND_OVER_CHANGE)
        gamma = missing / self.traces(lambda t: t / (t + a)).mean()
        norm = self.fit.remaining(lambda t: (t + a) ** -2) / self.fit(lambda t: (t + a) ** -2).clamp_min(1e-300)
        return float(gamma.abs()), float(norm.abs())

    def remaining_of_evidence(self, alpha: Float[Tensor, " n"]) -> tuple[float, float]:
        """The changes of the two terms of the log marginal likelihood, relative to it, the largest over some `α`."""
        a = alpha.double()[:, None]
        value = self.log_marginal_likelihood(alpha)[0].abs()
        traces = 0.5 * self._missing(lambda t: torch.log1p(t / a)).abs() / value
        fit = 0.5 * self.fit.remaining(lambda t: 1 / (t + a)).abs() / value
        return float(traces.max()), float(fit.max())

    def mackay(
        self, alpha: Float[Tensor, " n"], learn_noise: bool = False
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        r"""`log` of the ratio of `α` to MacKay's update of it, zero at a fixed point, and the factor of the noise.

        If the noise precision is learnt, `M` and `b` scale with it: `α` is then the ratio of the prior precision to the
        factor `κ` by which the noise precision grows. `κ = N·C / Q`, `Q = b·SSE + α‖θ̄‖²`, maximises the evidence; if
        the noise is learnt from the network, `κ = (N·C − γ) / b Σ(y − f)²`.
        """
        gamma = self.effective_dimension(alpha)[0]
        factor = self.noise_factor(alpha) if learn_noise else torch.ones_like(gamma)
        return (alpha.double() * self.mode_norm(alpha) * factor / gamma.clamp_min(1e-30)).log(), factor

    def noise_factor(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`κ` of `mackay`, the factor by which the noise precision of a Gaussian likelihood should grow."""
        if self.network_errors is None:
            return 1 / self.balance(alpha)
        # A noisy estimate of γ may exceed the number of observations.
        free = self.num_outputs - self.effective_dimension(alpha)[0]
        return free.clamp_min(1e-3 * self.num_outputs) / max(self.network_errors, 1e-30)

    def balance(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`(b·SSE + α‖θ̄‖²) / (N·C)` of a Gaussian likelihood, one at the noise of most evidence."""
        assert self.noise_precision is not None
        # The data fit of a Gaussian likelihood is ½ b·SSE and the constant of its density.
        constant = 0.5 * self.num_outputs * math.log(2 * math.pi / self.noise_precision)
        q = 2 * (self.data_fit(alpha) - constant) + alpha.double() * self.mode_norm(alpha)
        return q.clamp_min(1e-30) / self.num_outputs

    def profile(self, alpha: Tensor, learn_noise: bool) -> Tensor:
        """Evidence, maximised over the noise precision if it is learnt, up to a constant."""
        if not learn_noise:
            return self.log_marginal_likelihood(alpha)[0]
        factor = self.noise_factor(alpha)
        fit = factor.log() - factor * self.balance(alpha)
        return 0.5 * self.num_outputs * fit - 0.5 * self.log_determinant(alpha)[0]

    def fixed_point(self, bounds: tuple[float, float], learn_noise: bool = False, follow: bool = False) -> FixedPoint:
        """MacKay's fixed point.

        Args:
            bounds: within which it is sought; a bound is returned if there is none between, or less evidence.
            learn_noise: joint with the noise precision.
            follow: the fixed point that the update leads to from `at`; else the one of most evidence.
        """
        grid = torch.logspace(math.log10(bounds[0]), math.log10(bounds[1]), _GRID, dtype=torch.float64)
        value, factor = self.mackay(grid, learn_noise)
        # Where the ratio rises through zero the update is stable: it raises an α below and lowers one above.
        stable = ((value[:-1] < 0) & (value[1:] >= 0)).nonzero()[:, 0]
        if len(stable) == 0:
            end = 0 if value[0] > 0 else -1
            return FixedPoint(float(grid[end]), float(factor[end]), math.inf, 1.0)
        if follow:
            cell = self._followed(grid, value, stable)
        else:
            profile = self.profile(grid[stable], learn_noise)
            cell, best = int(stable[profile.argmax()]), float(profile.max())
            # The evidence may go on to rise to a bound. At a small `α` the curves of few products say nothing of it.
            rising = [-1] * bool(value[-1] < 0) + [0] * bool(self.exact and value[0] > 0)
            higher = [end for end in rising if float(self.profile(grid[end][None], learn_noise)) > best]
            if higher:
                return FixedPoint(float(grid[higher[0]]), float(factor[higher[0]]), math.inf, 1.0)
        return self._within_cell(grid[cell : cell + 2].log(), value[cell : cell + 2], learn_noise)

    def _followed(self, grid: Float[Tensor, " n"], value: Float[Tensor, " n"], stable: Tensor) -> int:
        """The cell of the grid with the fixed point that the update leads to from `at`."""
        start = int(torch.searchsorted(grid, torch.tensor(self.at, dtype=torch.float64)).clamp(0, len(grid) - 1))
        ahead = stable[stable >= start - 1] if value[start] < 0 else stable[stable < start].flip(0)
        return int(ahead[0]) if len(ahead) else int(stable[(stable - start).abs().argmin()])

    def _within_cell(self, logs: Float[Tensor, " 2"], values: Float[Tensor, " 2"], learn_noise: bool) -> FixedPoint:
        """The fixed point between two neighbours of the grid."""
        rise = (values[1] - values[0]) / (logs[1] - logs[0])
        # The curves are smooth on the scale of the grid, and the probes' error is larger than that of a chord.
        log_alpha = self._bisected(logs, learn_noise) if self.exact else logs[0] - values[0] / rise
        alpha = log_alpha.exp()[None]
        gamma = self.effective_dimension(alpha)[0]
        error = self._probe_variance(lambda t: t / (t + alpha[:, None])).sqrt()
        slope = min(max(float(rise), 0.05), 1.0)
        factor = self.mackay(alpha, learn_noise)[1]
        return FixedPoint(float(alpha), float(factor), float(error / gamma) / slope, slope)

    def _bisected(self, logs: Float[Tensor, " 2"], learn_noise: bool) -> Tensor:
        """`log α` of the fixed point between two values of it, to rounding."""
        log_alpha, (below, above) = logs[0], logs.tolist()
        while below < (middle := 0.5 * (below + above)) < above:
            log_alpha = torch.tensor(middle, dtype=torch.float64)
            rising = bool(self.mackay(log_alpha.exp()[None], learn_noise)[0] < 0)
            below, above = (middle, above) if rising else (below, middle)
        return log_alpha


@dataclass(frozen=True)
class EvidenceCurves:
    """Curves over the prior precision, all `[n]`, in float64 on the CPU; logarithms are natural, sums over the data.

    Attributes:
        prior_precision: `α`.
        effective_dimension: `γ(α)`, and its standard error.
        mode_norm: `‖θ̄(α)‖²` in the scaled coordinates of the prior.
        log_determinant: `log|I + M/α|`, and its standard error.
        data_fit: `Σ_i ℓ(y_i, h(θ̄(α), x_i))`.
        log_marginal_likelihood: `log p(y | α)`, and its standard error.
        at: the fitted `α`, where the curvature is taken.
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
        return cls(
            alpha,
            *path.effective_dimension(alpha),
            path.mode_norm(alpha),
            *path.log_determinant(alpha),
            path.data_fit(alpha),
            *path.log_marginal_likelihood(alpha),
            path.at,
        )

    def shifted(self, loss: float) -> "EvidenceCurves":
        """The curves with a constant added to the losses."""
        return replace(self, data_fit=self.data_fit + loss, log_marginal_likelihood=self.log_marginal_likelihood - loss)


@dataclass(frozen=True)
class MarginalLikelihood:
    """`log p(y)` at some hyperparameters, by Laplace's approximation at some weights; `float()` of it is the value.

    Attributes:
        value: `−data_fit − complexity`, a sum over the data.
        standard_error: of it; 0 if exact.
        lower_bound: with Bai and Golub's bound of the log determinant.
        data_fit: `Σ_i ℓ(y_i, h(θ̄, x_i))`, or at the network `Σ_i ℓ(y_i, f(w̄, x_i))`.
        complexity: `½ θ̄ᵀAθ̄ + ½ log|I + A⁻¹M|`, at the network with `w̄` in place of `θ̄`.
        balance: for a Gaussian likelihood with one noise precision `(b·SSE + θ̄ᵀAθ̄) / (N·C)`, which is 1 where
            evidence is largest; else `None`.
        exact: whether all eigenvalues were at hand.
        at: where the approximation is made: `"mode"`, the mode of the linear model, or `"network"`, the weights of the
            network. Only the second ranks networks (`docs/decisions.md`).
    """

    value: float
    standard_error: float
    lower_bound: float
    data_fit: float
    complexity: float
    balance: float | None
    exact: bool
    at: str = "mode"

    def __float__(self) -> float:
        return self.value

    @classmethod
    def of(cls, path: EvidencePath, alpha: float) -> "MarginalLikelihood":
        a = torch.tensor([alpha], dtype=torch.float64)
        value, error = path.log_marginal_likelihood(a)
        bound = -path.data_fit(a) - 0.5 * a * path.mode_norm(a) - 0.5 * path.log_determinant_bound(a)
        balance = None if path.noise_precision is None else float(path.balance(a))
        return cls(
            float(value),
            0.0 if path.exact else float(error),
            float(bound),
            float(path.data_fit(a)),
            float(path.complexity(a)),
            balance,
            path.exact,
        )

    def shifted(self, loss: float) -> "MarginalLikelihood":
        """The same with a constant added to the losses."""
        return replace(
            self, value=self.value - loss, lower_bound=self.lower_bound - loss, data_fit=self.data_fit + loss
        )
