r"""Tests of the energies of posterior samples, which show whether the samples are right.

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

The functions take numbers only: nothing in this file runs a network.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "Distribution",
    "TestResult",
    "chi_squared_test",
    "data_energy_distribution",
    "data_energy_test",
]

# A test rejects below the first; a rejection matters from the second (a share of γ) or the third (a KS statistic) on.
SIGNIFICANT, SHIFT, _VISIBLE = 0.01, 0.01, 0.2

# Means are searched within so many standard errors of a reference; the true mean is outside with the probability given.
_INTERVAL, _OUTSIDE = 3.29, 1e-3
# Means in that interval. The p-value is a smooth function of the mean, so that a grid of this size finds its maximum.
_GRID = 21
# Simulated tests, and numbers in all of them at most: 999 give p-values to 0.001, the numbers bound the time.
_SIMULATIONS, _SIMULATED_NUMBERS = 999, 2_000_000


class Distribution(Protocol):
    """The part of a distribution that is used; frozen distributions of `scipy.stats` have it."""

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
        """The deviation of the mean from the expected one, in standard deviations of one energy."""
        return (self.mean - self.expected_mean) / self.expected_sd

    @property
    def rejects(self) -> bool:
        """Whether the p-value is below 0.01 (or is not a number)."""
        return not self.p_value >= SIGNIFICANT

    def matters(self, scale: float) -> bool:
        """Whether the mean is off by more than 1 % of `scale`, or the statistic above 0.2 (see the module)."""
        shift = abs(self.mean - self.expected_mean)
        return not (shift <= SHIFT * scale and self.statistic <= _VISIBLE)


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
    from scipy import stats  # half a second to import

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
    from scipy import stats  # half a second to import

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
    statistic, least, outside = _smallest_statistic(np.sort(values), mean, variance, mean_se)
    from scipy import stats  # half a second to import

    return TestResult(
        "data energy",
        statistic,
        min(1.0, float(stats.kstwo.sf(max(least, 0.0), len(values))) + outside),
        float(values.mean()),
        mean,
        math.sqrt(variance),
    )


def _smallest_statistic(
    ordered: np.ndarray, mean: float, variance: float, mean_se: float
) -> tuple[float, float, float]:
    """The smallest statistic over means near a reference, with and without allowance, and `P(mean is farther)`."""
    means, outside = [mean], 0.0
    if mean_se > 0:
        low, high = max(mean - _INTERVAL * mean_se, 1e-3 * mean), mean + _INTERVAL * mean_se
        nearest = min(max(float(ordered.mean()), low), high)  # about where the p-value is largest
        means += [nearest, *np.linspace(low, high, _GRID).tolist()]
        outside = _OUTSIDE
    statistics = [float(_distance(_gamma_cdf(ordered, m, variance)[None])[0]) for m in means]
    # The p-value goes down with the statistic: the largest one is that of the smallest.
    least = min(statistic - _allowance(m, variance) for statistic, m in zip(statistics, means, strict=True))
    return min(statistics), least, outside


@lru_cache(maxsize=256)
def _allowance(mean: float, variance: float) -> float:
    """`Δ`: how far the distribution of the energy may be from the gamma distribution of its mean and variance."""
    from scipy import special  # slow to import

    strong = variance / 2  # number of directions of weight 1
    # Weights of at most 1 cannot have such moments, but noisy estimates can: they are taken as those of equal weights,
    # for which the gamma distribution is exact.
    if strong >= mean:
        return 0.0
    # The extreme sum starts at `mean − strong`, steeply if `strong` is small: points are dense there.
    above = np.geomspace(1e-6, mean + 10 * math.sqrt(variance), 1000)
    points = np.concatenate([above, mean - strong + above])
    extreme = special.gammainc(strong / 2, np.maximum(points - (mean - strong), 0) / 2)
    return float(np.abs(_gamma_cdf(points, mean, variance) - extreme).max())


def _gamma_cdf(x: np.ndarray, mean: np.ndarray | float, variance: np.ndarray | float) -> np.ndarray:
    """The distribution function of `data_energy_distribution`, without the overhead of `scipy.stats`."""
    from scipy import special  # slow to import

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
    # Moments from the same energies make the distance smaller than for a known reference, and tables do not apply.
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
    """The distance of each row `[R, K]` to the gamma distribution with the mean and the variance of that row."""
    mean, variance = rows.mean(1, keepdims=True), rows.var(1, ddof=1, keepdims=True)
    # A row of one repeated value (or of zeros, where the shape is tiny) fits no gamma distribution: its distance is one.
    has_fit = (mean > 0) & (variance > 0)
    mean, variance = np.where(has_fit, mean, 1), np.where(has_fit, variance, 1)
    statistic = _distance(_gamma_cdf(np.sort(rows, axis=1), mean, variance))
    return np.where(has_fit[:, 0], statistic, 1.0)


def _values(energies: Tensor, call: str, fewest: int) -> np.ndarray:
    values = energies.detach().double().cpu().numpy()
    if values.ndim != 1 or len(values) < fewest:
        raise ValueError(f"`{call}` needs at least {fewest} energies [K], got shape {list(values.shape)}.")
    if not np.isfinite(values).all():
        raise ValueError(f"`{call}`: the energies contain NaN or infinity.")
    return values
