r"""Whether a posterior is right: a table of checks, and how accurate its error bars are.

For `ζ ~ N(0, H⁻¹)`, `H = M + A`, the energy `ζᵀHζ` has a `χ²(P)` distribution, whatever `H` is (Brack 2023, §4.4), and
the sum over `K` samples a `χ²(KP)` distribution. The energy of the data, `ζᵀMζ`, has the mean `γ = Tr(H⁻¹M)`. The first
sees errors in all directions together, the second those in the few directions that the data determine. Neither sees a
wrong direction of a sample whose energies are right.
"""

import math
import textwrap
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

# With fewer samples than this the error of a standard deviation, `1/√(2K)`, is above 18 %.
FEW_SAMPLES = 16
# The share of what the data determine by which a sum may be off: twice the default tolerance of standard deviations.
# Many samples find what no error bar shows.
_HARMLESS = 0.03


@dataclass(frozen=True)
class Check:
    """A number that lies within bounds if the posterior is right.

    Attributes:
        name: what the number is.
        value: the number; True or False for a question.
        bounds: the smallest and the largest right value.
        sentence: what a value outside of them means, and what to do.
        serious: whether error bars are then wrong; otherwise it only deserves a look.
    """

    name: str
    value: float
    bounds: tuple[float, float]
    sentence: str
    serious: bool = True

    @property
    def holds(self) -> bool:
        """Whether the value is within its bounds; NaN is not."""
        return self.bounds[0] <= self.value <= self.bounds[1]

    @classmethod
    def question(cls, name: str, answer: bool, sentence: str) -> "Check":
        """A check of something that is true if the posterior is right."""
        return cls(name, answer, (True, True), sentence)

    def row(self) -> tuple[str, str, str, str]:
        """Name, value and bounds in words, and a mark if the check does not hold."""
        mark = "" if self.holds else "wrong" if self.serious else "a look"
        if isinstance(self.value, bool):
            return self.name, "yes" if self.value else "no", "yes", mark
        low, high = self.bounds
        within = f"{_number(low)} to {_number(high)}"
        if math.isinf(low) or math.isinf(high):
            within = f"at most {_number(high)}" if math.isinf(low) else f"at least {_number(low)}"
        return self.name, _number(self.value), within, mark


@dataclass(frozen=True)
class Accuracy:
    """Relative errors of predicted standard deviations, by where they come from.

    Attributes:
        num_samples: `K`.
        solves: the error of solves. An error `ε` of the function of a sample, independent of the sample, adds to its
            variance, so that standard deviations grow by `ε²/2`; its product with `K` samples moves them by `ε/√K`.
        left_out: the error of a random part of the data, from a comparison with half of the part; zero if all data are
            used.
        approximate: whether the covariance leaves out correlations. The error of that is not known.
    """

    num_samples: int
    solves: float = 0.0
    left_out: float = 0.0
    approximate: bool = False

    @classmethod
    def of(cls, errors: Float[Tensor, " K"]) -> "Accuracy":
        """Computes the errors from the error `ε` of the function of each sample, a root mean square."""
        squared = float(errors.double().square().mean())
        return cls(len(errors), squared / 2 + math.sqrt(squared / len(errors)))

    @property
    def samples(self) -> float:
        """`1/√(2K)`, the standard error of a standard deviation from `K` samples."""
        return 1 / math.sqrt(2 * self.num_samples)

    @property
    def unfinished(self) -> float:
        """The error of solves and of data outside of the part, together."""
        return math.hypot(self.solves, self.left_out)

    @property
    def matters(self) -> bool:
        """Whether `unfinished` is above the standard error of 16 samples, or NaN."""
        return not self.unfinished <= 1 / math.sqrt(2 * FEW_SAMPLES)

    @property
    def total(self) -> float:
        """All errors together, which are independent."""
        return math.hypot(self.samples, self.solves, self.left_out)

    def __str__(self) -> str:
        parts = [f"{self.num_samples} samples {100 * self.samples:.2g} %"]
        parts += [f"solves {100 * self.solves:.2g} %"] if self.solves > 0 else []
        parts += [f"data left out {100 * self.left_out:.2g} %"] if self.left_out != 0 else []
        also = ", besides the correlations that the method leaves out" if self.approximate else ""
        return f"standard deviations of samples are good to about {100 * self.total:.2g} % ({', '.join(parts)}){also}"


@dataclass(frozen=True)
class Diagnosis:
    """A table of checks of a posterior; `print` it. `diagnosis["effective dimension"]` is one of the checks.

    Attributes:
        checks: numbers with the bounds in which they should be.
        method: the method of the fit.
        reason: why this method was taken.
        num_samples: `K`.
        num_parameters: `P`.
        num_data: `N`.
        num_outputs: `C`.
        passes: Jacobian products of the fit, in units of all data and one vector.
        epochs: cost of the fit in training epochs, counted in operations; NaN if that was not counted.
        accuracy: relative errors of predicted standard deviations.
    """

    checks: list[Check]
    method: str
    reason: str
    num_samples: int
    num_parameters: int
    num_data: int
    num_outputs: int
    passes: float
    epochs: float
    accuracy: Accuracy

    @property
    def problems(self) -> list[Check]:
        """The checks that do not hold, serious ones first."""
        return sorted((check for check in self.checks if not check.holds), key=lambda check: not check.serious)

    @property
    def ok(self) -> bool:
        """Whether all serious checks hold."""
        return not any(check.serious for check in self.problems)

    def __getitem__(self, name: str) -> Check:
        """The first check whose name begins with these words."""
        found = next((check for check in self.checks if check.name.startswith(name)), None)
        if found is None:
            raise KeyError(f"{name!r} is no check of this fit: {[check.name for check in self.checks]}.")
        return found

    def __str__(self) -> str:
        serious = sum(check.serious for check in self.problems)
        verdict = (
            f"Verdict: {serious} of {len(self.checks)} checks failed." if serious else "Verdict: nothing is wrong."
        )
        if len(self.problems) > serious:
            verdict += f" {len(self.problems) - serious} worth a look."
        cost = "" if math.isnan(self.epochs) else f"{self.epochs:.2g} training epochs, "
        head = [
            f"Diagnosis of {self.num_samples:,} posterior samples of {self.num_parameters:,} weights, "
            f"{self.num_data:,} data of {self.num_outputs:,} outputs",
            f"{self.method}: {self.reason}",
            f"Cost: {cost}{_number(self.passes)} Jacobian products. Accuracy: {self.accuracy}.",
        ]
        rows = [("", "value", "should be", ""), *(check.row() for check in self.checks)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
        said = [f"{number}. {check.sentence}" for number, check in enumerate(self.problems, 1)]
        wrapped = [line for text in (*head, "", *table, "", verdict, *said) for line in _wrapped(text)]
        return "\n".join(wrapped)


def energy_checks(energies: Float[Tensor, " K"], num_parameters: int, gamma: float, level: float = 0.01) -> list[Check]:
    r"""Tests of `ζᵀHζ` against `χ²(P)`: of the mean by `χ²(KP)`, and of the distribution by Kolmogorov and Smirnov.

    Args:
        energies: `ζ_kᵀHζ_k`.
        num_parameters: `P`.
        gamma: `γ`; a deviation of the mean by less than 3 % of it is harmless.
        level: the p-value below which a test fails.

    Example:
        >>> import torch
        >>> zeta = torch.randn(64, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> [check.holds for check in energy_checks((zeta**2).sum(1), 1000, 10.0)]
        [True, True]
        >>> [check.holds for check in energy_checks((1.1 * zeta**2).sum(1), 1000, 10.0)]
        [False, False]
    """
    from scipy import stats  # half a second to import

    values, num = energies.detach().double().cpu().numpy(), len(energies)
    of_sum, harmless = stats.chi2(num * num_parameters), _HARMLESS * gamma
    low, high = (float(of_sum.ppf(q)) / num for q in (level / 2, 1 - level / 2))
    statistic = math.nan
    if math.isfinite(values.sum()):
        statistic = float(stats.kstest(values, stats.chi2(num_parameters).cdf).statistic)
    # A difference of two distribution functions of a fifth is harmless, too.
    largest = max(float(stats.kstwo.isf(level, num)), 0.2)
    sentence = (
        "The energies ζᵀHζ of the samples are not those of N(0, H⁻¹) in all directions together. If solves have not "
        "converged, give them more passes; else check the precision (`model.double()`)."
    )
    return [
        Check("energy ζᵀHζ, mean", float(values.mean()), (low - harmless, high + harmless), sentence),
        Check("energy ζᵀHζ, Kolmogorov–Smirnov", statistic, (0.0, largest), sentence),
    ]


def dimension_check(gamma: tuple[float, float], reference: tuple[float, float]) -> Check:
    """Compares `γ` of the samples, with its standard error, with another estimate: they may differ by three errors."""
    error = 3 * math.hypot(gamma[1], reference[1])
    allowed = max(error, _HARMLESS * abs(reference[0]))
    return Check(
        "γ of the samples beside that of the evidence",
        gamma[0],
        (reference[0] - allowed, reference[0] + allowed),
        "Samples and evidence give different γ = Tr(H⁻¹M). Samples that have not converged give too large a one, an "
        "iteration of the evidence that was cut short too small a one. Give the solver more passes, then the evidence "
        "more probes, and see which of the two moves.",
    )


def _number(value: float) -> str:
    """Three digits, or all digits before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent="   ") or [""]
