r"""Are the posterior samples right? Tests of their energies, and one page that says what is wrong and what to do.

For `ζ ~ N(0, H⁻¹)`, `H = M + A`, the energy `ζᵀHζ` has a `χ²(P)` distribution, whatever `H` is (Brack 2023, §4.4): it
takes a product with `H` a sample and no covariance. But the directions that the prior determines, `P − γ` of them,
dominate it. The energy of the data, `ζᵀMζ`, is `Σ_p s_p χ²(1)` with `s` the eigenvalues of `H⁻¹M`, so of mean
`γ = Tr(H⁻¹M)` and variance `2 Tr((H⁻¹M)²)`, and sees only directions that the data determine. Errors that one of them
misses, the other sees:

- samples that are right but for too large (or small) an `α` change `ζᵀHζ` by a share of `P`, and `ζᵀMζ` by little;
- an error in a few directions that the data determine is lost in the spread `√(2P)` of `ζᵀHζ`, not in that of `ζᵀMζ`.

Neither sees a wrong direction of a sample whose energies are right: they are necessary conditions only.

**What counts as wrong.** A test rejects when its p-value is below 0.01. A `Diagnosis` makes at most three
comparisons that are random for right samples (two tests, and `γ` against its reference at three standard errors), so
at most about 2.3 % of right sets of samples are called wrong (Bonferroni). A large enough `K` finds any deviation,
also a harmless one. So a rejection counts only if the deviation matters: the mean energy is off by more than 1 % *of
γ*, or the statistic (the largest difference between the two distribution functions) is above 0.2. One percent of `γ`
is one percent in the variances that the data determine and half of that in error bars, where `K = 64` samples have a
standard error of 9 %. With up to 60 samples every rejection is above 0.2. What does not matter is noted, no more.

Functions of numbers only: nothing here runs a network.
"""

import math
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
from jaxtyping import Float
from scipy import special, stats
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Diagnosis",
    "Distribution",
    "Problem",
    "TestResult",
    "chi_squared_test",
    "data_energy_distribution",
    "data_energy_test",
    "quantile_plot",
]

# A test rejects below the first; a rejection matters from the second (a share of γ) or the third (a KS statistic) on.
_SIGNIFICANT, _SHIFT, _VISIBLE = 0.01, 0.01, 0.2
_STANDARD_ERRORS = 3.0
_FEW_SAMPLES = 16
_NEARLY_ALL = 0.9
_MANY_FLOORED = 0.2
_FAR_OFFSET = 0.5

# The mean of a reference is searched within so many standard errors, outside which it is with the probability given.
_INTERVAL, _OUTSIDE = 3.29, 1e-3
_GRID = 21
_SIMULATIONS, _SIMULATED_NUMBERS = 999, 2_000_000

_LINES, _COLUMNS = 60, 100


class Distribution(Protocol):
    """What is needed of a distribution: a frozen one of `scipy.stats` will do."""

    def cdf(self, x: np.ndarray, /) -> np.ndarray: ...

    def ppf(self, q: np.ndarray, /) -> np.ndarray: ...


@dataclass(frozen=True)
class TestResult:
    """A Kolmogorov–Smirnov test of energies.

    Attributes:
        name: of the energy.
        statistic: the largest difference between the distribution function of the samples and the expected one.
        p_value: the probability of at least this statistic if the samples are right.
        mean: of the energies.
        expected_mean: of the reference; that of the energies themselves if `independent` is false.
        expected_sd: standard deviation of one energy under the reference.
        independent: whether the reference is known apart from these samples; else only the shape is tested.
    """

    __test__ = False  # not a class of tests, whatever its name says to pytest

    name: str
    statistic: float
    p_value: float
    mean: float
    expected_mean: float
    expected_sd: float
    independent: bool = True

    @property
    def deviation(self) -> float:
        """Of the mean from the expected one, in units of the standard deviation of one energy."""
        return (self.mean - self.expected_mean) / self.expected_sd

    @property
    def rejects(self) -> bool:
        """Whether the p-value is below 0.01 (or is not a number)."""
        return not self.p_value >= _SIGNIFICANT

    def matters(self, scale: float) -> bool:
        """Whether the mean is off by more than 1 % of `scale`, or the statistic above 0.2 (see the module)."""
        shift = abs(self.mean - self.expected_mean)
        return not (shift <= _SHIFT * scale and self.statistic <= _VISIBLE)


def chi_squared_test(energies: Float[Tensor, " K"], degrees: float) -> TestResult:
    r"""Kolmogorov–Smirnov test of `ζᵀHζ` against `χ²(P)` (Brack 2023, §4.4).

    Args:
        energies: `ζ_kᵀHζ_k`, best summed in float64: at `P = 10⁸` a relative error of 10⁻⁴ moves them by `0.7 √(2P)`.
        degrees: `P`.

    Example:
        >>> import torch
        >>> zeta = torch.randn(64, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> chi_squared_test((zeta**2).sum(1), 1000).rejects
        False
        >>> chi_squared_test((1.1 * zeta**2).sum(1), 1000).rejects
        True
    """
    if not degrees > 0:
        raise ValueError(f"`chi_squared_test` needs degrees above 0, got {degrees}.")
    values = _values(energies, "chi_squared_test", 1)
    result = stats.kstest(values, stats.chi2(degrees).cdf)
    return TestResult(
        "total energy",
        float(result.statistic),
        float(result.pvalue),
        float(values.mean()),
        float(degrees),
        math.sqrt(2 * degrees),
    )


def data_energy_distribution(mean: float, variance: float) -> Distribution:
    r"""The gamma distribution with a given mean `μ` and variance `v`, which stands for a weighted sum of `χ²(1)`.

    This is `c χ²(ν)` with `c = v/(2μ)` and `ν = 2μ²/v`, the two-moment approximation of Satterthwaite (1946) and
    Welch (1938): exact for equal weights, close for many. For few strong directions beside many weak ones it
    is poor: for weights 1 and a hundred of 0.01 the distribution functions differ by 0.19.
    """
    return stats.gamma(mean**2 / variance, scale=variance / mean)


def data_energy_test(
    energies: Float[Tensor, " K"], mean: float | None = None, variance: float | None = None, mean_se: float = 0.0
) -> TestResult:
    r"""Kolmogorov–Smirnov test of the energy of the data, `ζᵀMζ`, of mean `γ` and variance `2 Tr((H⁻¹M)²)`.

    The reference is the gamma distribution of that mean and variance (`data_energy_distribution`), an approximation.
    It gets an allowance: the p-value is that of the statistic less `Δ`, the distance of the gamma distribution to
    `γ − r + χ²(r)`, `r = Tr((H⁻¹M)²)`. This is the sum with the same mean and variance, weights of at most 1, and
    the largest third moment: `r` weights of 1, the others tiny. `Δ` is 0 if all weights are 1, 0.03 for weights
    `1/(1 + j/20)` (`γ = 92`), 0.2 for `2^{-j}` (`γ = 2`, where little power is left). That this sum is the farthest
    one is not proven; of eleven spectra that were tried none is farther.

    *With an independent estimate of the mean* of standard error `e`, the hypothesis is that *some* mean near it
    is right: the p-value is the largest one over means within 3.29 `e`, plus the probability 0.001 that the true
    mean lies outside (Berger and Boos 1994). It is conservative for a normal error of known `e`; `e` estimated from
    few probes is an approximation. The variance enters as it is given: a relative error `r` of it moves the
    statistic by about `0.12 r` at most.

    *Without one*, mean and variance are taken from the same samples and only the shape is tested. That would make
    the usual p-value far too large, so it is simulated as Lilliefors (1967) did: gamma samples with the fitted
    moments, moments fitted anew, seed fixed. Samples all of which have too large an energy by the same factor pass this
    test; it finds outliers, repeated samples and mixtures, no more.

    Args:
        energies: `ζ_kᵀMζ_k`.
        mean: `γ`, from other samples or by other means than these energies.
        variance: `2 Tr((H⁻¹M)²)`; to be given if, and only if, `mean` is.
        mean_se: the standard error of `mean`.
    """
    if (mean is None) != (variance is None):
        raise ValueError("`data_energy_test` needs both the mean and the variance of a reference, or neither.")
    if mean is None or variance is None:
        return _shape_test(_values(energies, "data_energy_test", 3))
    values = _values(energies, "data_energy_test", 1)
    if not (0 < mean < math.inf and 0 < variance < math.inf and 0 <= mean_se < math.inf):
        raise ValueError(
            f"`data_energy_test` needs a positive mean and variance and a finite standard error, got {mean}, "
            f"{variance}, {mean_se}."
        )
    means, outside = [mean], 0.0
    if mean_se > 0:
        low, high = max(mean - _INTERVAL * mean_se, 1e-3 * mean), mean + _INTERVAL * mean_se
        nearest = min(max(float(values.mean()), low), high)  # about where the p-value is largest
        means += [nearest, *np.linspace(low, high, _GRID).tolist()]
        outside = _OUTSIDE
    ordered = np.sort(values)
    statistics = [float(_distance(_gamma_cdf(ordered, m, variance)[None])[0]) for m in means]
    # The p-value goes down with the statistic: the largest one is that of the smallest.
    least = min(statistic - _allowance(m, variance) for statistic, m in zip(statistics, means, strict=True))
    return TestResult(
        "data energy",
        min(statistics),
        min(1.0, float(stats.kstwo.sf(max(least, 0.0), len(values))) + outside),
        float(values.mean()),
        mean,
        math.sqrt(variance),
    )


@lru_cache(maxsize=256)
def _allowance(mean: float, variance: float) -> float:
    """`Δ`: how far the distribution of the energy may be from the gamma distribution of its mean and variance."""
    strong = variance / 2  # directions of weight 1
    if strong >= mean:  # no weights of at most 1 have these moments, but noisy estimates may: those of equal ones
        return 0.0
    # The extreme sum starts at `mean − strong`, steeply if `strong` is small: points are dense there.
    above = np.geomspace(1e-6, mean + 10 * math.sqrt(variance), 1000)
    points = np.concatenate([above, mean - strong + above])
    extreme = special.gammainc(strong / 2, np.maximum(points - (mean - strong), 0) / 2)
    return float(np.abs(_gamma_cdf(points, mean, variance) - extreme).max())


def _gamma_cdf(x: np.ndarray, mean: np.ndarray | float, variance: np.ndarray | float) -> np.ndarray:
    """That of `data_energy_distribution`, without the overhead of `scipy.stats`."""
    return special.gammainc(mean**2 / variance, np.maximum(x, 0) * mean / variance)


def _distance(heights: np.ndarray) -> np.ndarray:
    """The Kolmogorov–Smirnov statistics of rows `[R, K]` of sorted energies at which the expected cdf is `heights`."""
    steps = np.arange(heights.shape[1] + 1) / heights.shape[1]
    return np.maximum(steps[1:] - heights, heights - steps[:-1]).max(1)


def _shape_test(values: np.ndarray) -> TestResult:
    mean, sd = float(values.mean()), float(values.std(ddof=1))
    if not (mean > 0 and sd > 0):
        raise ValueError(f"`data_energy_test` needs energies that are positive and differ, got mean {mean}, sd {sd}.")
    shape, statistic = mean**2 / sd**2, float(_gamma_statistic(values[None])[0])
    allowed = statistic - _allowance(mean, sd**2)
    simulations = max(199, min(_SIMULATIONS, _SIMULATED_NUMBERS // len(values)))
    rng = np.random.default_rng(0)
    # The statistic does not depend on the scale, so that of the simulations is free.
    as_large = sum(
        int((_gamma_statistic(rng.gamma(shape, size=(part, len(values)))) >= allowed).sum())
        for part in [100] * (simulations // 100) + [simulations % 100]
        if part
    )
    p_value = (1 + as_large) / (1 + simulations)
    return TestResult("data energy, shape only", statistic, p_value, mean, mean, sd, independent=False)


def _gamma_statistic(rows: np.ndarray) -> np.ndarray:
    """Of each row `[R, K]`, the distance to the gamma distribution with the mean and the variance of that row."""
    mean, variance = rows.mean(1, keepdims=True), rows.var(1, ddof=1, keepdims=True)
    # A row of one value repeated (or of zeros, where the shape is tiny) has no gamma distribution: it is far from any.
    fitted = (mean > 0) & (variance > 0)
    mean, variance = np.where(fitted, mean, 1), np.where(fitted, variance, 1)
    statistic = _distance(_gamma_cdf(np.sort(rows, axis=1), mean, variance))
    return np.where(fitted[:, 0], statistic, 1.0)


def _values(energies: Tensor, call: str, fewest: int) -> np.ndarray:
    values = energies.detach().double().cpu().numpy()
    if values.ndim != 1 or len(values) < fewest:
        raise ValueError(f"`{call}` needs at least {fewest} energies [K], got shape {list(values.shape)}.")
    if not np.isfinite(values).all():
        raise ValueError(f"`{call}`: the energies contain NaN or infinity.")
    return values


def quantile_plot(energies: Float[Tensor, " K"], distribution: Distribution, ax: "Axes | None" = None) -> "Axes":
    r"""Sorted energies against the quantiles at `(k − ½)/K` of the distribution that they should have.

    The band holds all points *together* for 95 % of right sets of samples: each order statistic has its own interval
    from its Beta distribution, all at one level, which is found by simulation with a fixed seed. So a single point
    outside is a finding. With a band of 95 % for each point by itself, right samples often have some outside.

    Args:
        energies: of the samples.
        distribution: `scipy.stats.chi2(P)` for `ζᵀHζ`, `data_energy_distribution(γ, v)` for `ζᵀMζ`.
        ax: where to draw; new axes by default.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('`quantile_plot` needs matplotlib: pip install "laplace_sampling[demo]"') from error
    values = np.sort(_values(energies, "quantile_plot", 1))
    ranks = np.arange(1, len(values) + 1)
    expected = distribution.ppf((ranks - 0.5) / len(values))
    order = stats.beta(ranks, len(values) + 1 - ranks)
    level = _joint_level(len(values))
    low, high = (distribution.ppf(order.ppf(np.full(len(values), q))) for q in (level / 2, 1 - level / 2))
    if ax is None:
        _, ax = plt.subplots(figsize=(4, 4), layout="constrained")
    ax.fill_between(expected, low, high, color="C0", alpha=0.2, linewidth=0, label="95 % of right sets, all points")
    ends = expected[[0, -1]]
    ax.plot(ends, ends, color="C0", linewidth=1, label="expected")
    ax.plot(expected, values, "k.", markersize=4, label="samples")
    ax.set(xlabel="expected quantile", ylabel="energy of a sample")
    ax.legend(frameon=False)
    return ax


def _joint_level(size: int, coverage: float = 0.95) -> float:
    """The level of each order statistic of `size` uniform numbers at which all are inside with the given coverage."""
    ranks = np.arange(1, size + 1)
    simulations = max(200, min(1000, _SIMULATED_NUMBERS // size))
    uniform = np.sort(np.random.default_rng(0).random((simulations, size)), axis=1)
    heights = np.asarray(stats.beta.cdf(uniform, ranks, size + 1 - ranks))
    smallest = 2 * np.minimum(heights, 1 - heights).min(1)
    return float(np.quantile(smallest, 1 - coverage))


@dataclass(frozen=True)
class Problem:
    """In plain words: what is the matter, why it matters, and what to do.

    `serious` is false for what deserves a look but leaves the error bars valid.
    """

    what: str
    why: str
    do: str
    serious: bool = True


def advice(method: str) -> str:
    """What to do about a solve that did not converge."""
    if method == "sgd":
        return "Give more passes with `solver=SGD(epochs=..., mode_epochs=...)`."
    if method == "svrg":
        return 'Raise `tolerance`, or use `method="cg"`, which goes on for longer.'
    if method == "dual":
        return "Give `solver=DualCG(rank=..., max_iterations=...)` more of either; float64 weights help, too."
    return "Float64 weights help where the problem is badly conditioned, a larger prior precision too."


@dataclass(frozen=True)
class Diagnosis:
    r"""All that is known about how good a set of posterior samples is; `print` it for a page in plain words.

    Attributes:
        num_samples: `K`.
        num_parameters: `P`.
        num_data: `N`.
        num_outputs: `C`.
        linear_model: `"affine"` or `"homogeneous"`.
        method: of the solver; `reason`, why this one.
        residuals: of the samples, `[K]`, as the solver defines them.
        tolerance: below which a residual counts as converged.
        solver_converged: whether the solver says that the samples have converged.
        mode_residual: of the mode; `mode_converged` likewise.
        hyperparameters_converged: of the fit of `α` and the noise; `None` if they were given.
        prior_precision: `α` of each group of weights.
        at_bounds: names of the groups whose `α` ended at a bound.
        effective_dimension: `γ` of the posterior, summed over groups, with its standard error (0 if exact).
        gamma_reference: an estimate of `γ` that is independent of the samples, with its standard error, or `None`.
        total_test: of `ζᵀHζ`.
        data_test: of `ζᵀMζ`, or `None`.
        offset: `‖φw̄ − f‖ / ‖f‖` on the training data: how far the homogeneous linear model at the trained weights is
            from the network.
        num_floored: weights whose curvature the g-prior's floor replaced.
        passes: Jacobian products spent, in units of all data and one vector.
        max_rank: the rank that `M` can have where it is below `N·C`: `N(C − 1)` for class labels.
    """

    num_samples: int
    num_parameters: int
    num_data: int
    num_outputs: int
    linear_model: str
    method: str
    reason: str
    residuals: Float[Tensor, " K"]
    tolerance: float
    solver_converged: bool
    mode_residual: float
    mode_converged: bool
    hyperparameters_converged: bool | None
    prior_precision: dict[str, float]
    at_bounds: tuple[str, ...]
    effective_dimension: float
    effective_dimension_se: float
    gamma_reference: float | None
    gamma_reference_se: float | None
    total_test: TestResult
    data_test: TestResult | None
    offset: float
    num_floored: int
    passes: float
    max_rank: int | None = None

    @property
    def problems(self) -> list[Problem]:
        """What is the matter, serious matters first."""
        found = [*self._solve_problems(), *self._fit_problems(), *self._sample_problems(), *self._model_problems()]
        return sorted(found, key=lambda problem: not problem.serious)

    @property
    def ok(self) -> bool:
        """Whether there is no serious problem."""
        return not any(problem.serious for problem in self.problems)

    def _solve_problems(self) -> list[Problem]:
        found = []
        numbers = [
            self.effective_dimension,
            self.mode_residual,
            *self.residuals.tolist(),
            *self.prior_precision.values(),
        ]
        if not all(map(math.isfinite, numbers)):
            found.append(
                Problem(
                    "Something is not finite: a residual, the effective dimension or the prior precision.",
                    "Jacobian products overflowed, or the fit of the hyperparameters ran away.",
                    "Check weights and data for extreme values; use `model.double()`.",
                )
            )
        missed = int((self.residuals > self.tolerance).sum())
        if missed or not self.solver_converged:
            worst = float(self.residuals.max())
            found.append(
                Problem(
                    f"The samples have not converged: {missed} of {self.num_samples} residuals are above "
                    f"{_number(self.tolerance)}, the largest is {_number(worst)}."
                    if missed
                    else "The samples have not converged, says the solver, though their residuals are small.",
                    "Directions that the data determine weakly keep part of the prior's variance, and error bars "
                    "there are too large.",
                    f'{advice(self.method)} Or use `method="exact"` where it fits.',
                )
            )
        if not self.mode_converged:
            found.append(
                Problem(
                    f"The mode of the linear model has not converged: its residual is {_number(self.mode_residual)}.",
                    "α and the noise are tuned to the mode, and the curvature of the loss may be taken there.",
                    advice(self.method),
                )
            )
        return found

    def _fit_problems(self) -> list[Problem]:
        found = []
        if self.hyperparameters_converged is False:
            found.append(
                Problem(
                    "The prior precision α still moved when its fit stopped.",
                    "The size of all error bars follows α.",
                    "Raise `max_steps` of `fit_hyperparameters`, and look at `history_`.",
                )
            )
        if self.at_bounds:
            found.append(
                Problem(
                    f"The prior precision α is at a bound for {_listed(list(self.at_bounds))}.",
                    "At the upper one the data show no effect of these weights; at the lower one the prior fades out.",
                    "Check the data and the choice of weights, use a prior with fewer groups, or give other "
                    "`precision_bounds`.",
                )
            )
        return found

    def _sample_problems(self) -> list[Problem]:
        found = []
        if self.num_samples < _FEW_SAMPLES:
            found.append(
                Problem(
                    f"There are fewer than {_FEW_SAMPLES} samples: {self.num_samples}.",
                    f"An error bar has a relative standard error of {_percent(1 / math.sqrt(2 * self.num_samples))}, "
                    "and the tests can find gross errors only.",
                    "Raise `num_samples`.",
                )
            )
        for test, means in (
            (self.total_test, "The energies ζᵀHζ are not those of N(0, H⁻¹) in all directions together"),
            (self.data_test, "The energies ζᵀMζ are wrong in the directions that the data determine"),
        ):
            if test is None or not test.rejects:
                continue
            numbers = (
                f"Kolmogorov–Smirnov p-value {test.p_value:.2g}, below {_SIGNIFICANT}: the mean is "
                f"{_number(test.mean)}, expected {_number(test.expected_mean)}."
            )
            if test.matters(self._scale):
                found.append(
                    Problem(
                        f"The samples fail the test of the {test.name}.",
                        f"{means}. {numbers}",
                        "If they have not converged, give the solver more passes; else check that curvature, α and "
                        "noise are those the samples were drawn for, and the precision (`model.double()`).",
                    )
                )
            else:
                found.append(
                    Problem(
                        f"The test of the {test.name} rejects, but the deviation is too small to matter.",
                        f"{numbers} That is {_percent(abs(test.mean - test.expected_mean) / self._scale)} of γ; with "
                        f"{self.num_samples:,} samples the test finds what no error bar shows.",
                        "Nothing.",
                        serious=False,
                    )
                )
        if self.gamma_reference is not None:
            difference = abs(self.effective_dimension - self.gamma_reference)
            error = math.hypot(self.effective_dimension_se, self.gamma_reference_se or 0.0)
            if difference > _STANDARD_ERRORS * error and difference > _SHIFT * abs(self.gamma_reference):
                found.append(
                    Problem(
                        f"γ from samples and from the evidence differ: {_number(self.effective_dimension)} and "
                        f"{_number(self.gamma_reference)}, by more than {_STANDARD_ERRORS:g} standard errors "
                        f"({_number(error)}).",
                        "Both estimate Tr(H⁻¹M). Samples that have not converged give too large a γ, an iteration of "
                        "the evidence that was cut short too small a one.",
                        "Give the solver more passes, then the evidence more probes and iterations, and see which of "
                        "the two moves.",
                    )
                )
        return found

    def _model_problems(self) -> list[Problem]:
        found = []
        gamma, rows = self.effective_dimension, self._rows
        if gamma < 1:
            found.append(
                Problem(
                    f"The data determine almost nothing: γ = {_number(gamma)} is below 1.",
                    "The posterior is nearly the prior. Either α is far too large, or the loss has no curvature at "
                    "the outputs where it is taken, as for a network that is certain of its labels.",
                    'Use `hessian_at="mode"`, or start the fit from a smaller `prior_precision`.',
                )
            )
        if gamma > _NEARLY_ALL * min(self.num_parameters, rows):
            if rows <= self.num_parameters:
                found.append(
                    Problem(
                        f"The effective dimension is above {_percent(_NEARLY_ALL)} of the rank that the data can "
                        f"give: γ = {_number(gamma)} of {_number(rows)}.",
                        "The linear model can fit any targets, so neither the noise nor α is well determined.",
                        "Give more data or fewer random weights (`parameters=`), or fix the noise "
                        "(`Gaussian(b, learn=False)`).",
                    )
                )
            else:
                found.append(
                    Problem(
                        f"The effective dimension is above {_percent(_NEARLY_ALL)} of the number of weights: "
                        f"γ = {_number(gamma)} of {_number(self.num_parameters)}.",
                        "The data determine nearly every weight and the prior hardly matters, as for a small model "
                        "with many data.",
                        "Nothing, if the model is small; else see whether α went far too low.",
                        serious=False,
                    )
                )
        if self.num_floored > _MANY_FLOORED * self.num_parameters:
            found.append(
                Problem(
                    f"Weights without curvature were floored: {_percent(self.num_floored / self.num_parameters)} of "
                    "them, by the g-prior.",
                    "Dead units, or inputs that are constant. Their prior variance is set by the floor, "
                    "and shows in error bars away from the data.",
                    'Compare with a larger `GPrior(floor=...)` or with `prior="isotropic"`.',
                    serious=False,
                )
            )
        if self.linear_model == "homogeneous" and self.offset > _FAR_OFFSET:
            found.append(
                Problem(
                    "The homogeneous linear model is far from the network: ‖φw̄ − f‖ is "
                    f"{_percent(self.offset)} of ‖f‖.",
                    "α, and the curvature where it is taken at the mode, are those of another model. Usual in "
                    "networks without normalisation layers.",
                    'Compare `log_prob` on held-out data with that of `linear_model="affine"`.',
                    serious=False,
                )
            )
        return found

    @property
    def _rows(self) -> int:
        """The largest rank that the data can give."""
        return self.num_data * self.num_outputs if self.max_rank is None else self.max_rank

    @property
    def _scale(self) -> float:
        """What deviations are compared with: `γ`, and the smaller of the two, since wrong samples inflate their own."""
        gammas = [self.effective_dimension] + ([] if self.gamma_reference is None else [self.gamma_reference])
        return max(min(gammas), 1e-300)

    def __str__(self) -> str:
        head = [
            *_wrapped("", f"Diagnosis of {self.num_samples:,} posterior samples of {self.num_parameters:,} weights", 1),
            *_wrapped("", f"{self.num_data:,} data of {self.num_outputs:,} outputs, {self.linear_model} model", 1),
            *_wrapped("method: ", f"{self.method}. {self.reason}", 3),
            "",
            *_table(self._entries()),
            "",
        ]
        problems = self.problems
        serious = sum(problem.serious for problem in problems)
        verdict = "Verdict: nothing is wrong." if not serious else f"Verdict: {serious} {_things(serious)} wrong."
        if len(problems) > serious:
            verdict += f" {len(problems) - serious} worth a look."
        head.append(verdict)
        # One page: all sentences of all problems, or fewer of them.
        for detail in ("all", "what and do", "what"):
            body = [line for number, problem in enumerate(problems, 1) for line in _told(number, problem, detail)]
            if len(head) + len(body) <= _LINES:
                break
        return "\n".join(head + body)

    def _entries(self) -> list[tuple[str, str, str, str]]:
        """Rows of the table: quantity, value, what it should be, unit."""
        test, gamma = self.data_test, _number(self.effective_dimension)
        reference = self.gamma_reference
        gradient, error = "relative gradient", "relative error of the function"
        residual = error if self.method in ("cg", "dual", "svrg") else gradient
        rows = [
            ("residual of the samples, median", _number(float(self.residuals.median())), "", residual),
            (
                "residual of the samples, largest",
                _number(float(self.residuals.max())),
                f"< {_number(self.tolerance)}",
                residual,
            ),
            ("residual of the mode", _number(self.mode_residual), "", gradient),
            ("hyperparameters", _HYPERPARAMETERS[self.hyperparameters_converged], "", ""),
        ]
        for number, (name, value) in enumerate(self.prior_precision.items()):
            if number == _GROUPS_SHOWN and len(self.prior_precision) > number + 1:
                rest = list(self.prior_precision.values())[number:]
                value_range = f"{_number(min(rest))} to {_number(max(rest))}"
                rows.append((f"prior precision α, {len(rest)} other groups", value_range, "", "1/weight², scaled"))
                break
            label = "prior precision α" if len(self.prior_precision) == 1 else f"prior precision α of {name}"
            rows.append((label, _number(value), "", "1/weight², scaled"))
        rows += [
            (
                "effective dimension γ",
                gamma + _plus_minus(self.effective_dimension_se),
                "" if reference is None else _number(reference) + _plus_minus(self.gamma_reference_se or 0.0),
                f"directions, of {_number(min(self.num_parameters, self._rows))}",
            ),
            *_energy_rows("ζᵀHζ", self.total_test),
            *([] if test is None else _energy_rows("ζᵀMζ" if test.independent else "ζᵀMζ, shape only", test)),
            ("‖φw̄ − f‖ / ‖f‖", _percent(self.offset), "", "of the outputs"),
            ("weights floored", f"{self.num_floored:,}", "", f"of {self.num_parameters:,}"),
            ("Jacobian products", _number(self.passes), "", "passes over the data"),
        ]
        return rows


_HYPERPARAMETERS = {True: "converged", False: "not converged", None: "as given"}
_GROUPS_SHOWN = 4


def _energy_rows(name: str, test: TestResult) -> list[tuple[str, str, str, str]]:
    expected = _number(test.expected_mean) if test.independent else ""
    return [
        (f"energy {name}, mean", _number(test.mean), expected, f"sd {_number(test.expected_sd)} a sample"),
        ("  p-value", f"{test.p_value:.2g}", f"> {_SIGNIFICANT}", f"statistic {test.statistic:.2f}"),
    ]


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    rows = [("", "value", "should be", ""), *rows]
    cells = [[_short(cell, width) for cell, width in zip(row, (38, 22, 22, 26), strict=True)] for row in rows]
    first, second, third = (max(len(row[i]) for row in cells) for i in range(3))
    lines = [f"{a:<{first}}{b:>{second + 2}}{c:>{third + 2}}  {d}" for a, b, c, d in cells]
    return [_short(line.rstrip(), _COLUMNS) for line in lines]


def _told(number: int, problem: Problem, detail: str) -> list[str]:
    mark = f"{number:2}. " if problem.serious else f"{number:2}. (a look) "
    if detail == "what":
        return _wrapped(mark, problem.what, 1)
    parts = [problem.what, *([f"Why: {problem.why}"] if detail == "all" else []), f"Do: {problem.do}"]
    return [line for i, part in enumerate(parts) for line in _wrapped("    " if i else mark, part, 4)]


def _wrapped(mark: str, text: str, lines: int) -> list[str]:
    """The text after a mark, later lines indented, in so many lines at most."""
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=mark,
        subsequent_indent=" " * (4 if mark else 0),
        max_lines=lines,
        placeholder=" …",
    )


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _listed(names: list[str]) -> str:
    """A few names, and how many others there are."""
    shown = ", ".join(_short(name, 30) for name in names[:3])
    return shown + (f" and {len(names) - 3} other groups" if len(names) > 3 else "")


def _things(number: int) -> str:
    return "thing is" if number == 1 else "things are"


def _number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _plus_minus(error: float) -> str:
    return f" ± {_number(error)}" if error > 0 else ""


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
