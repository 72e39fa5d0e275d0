"""One page about a fitted posterior that says what is wrong, why it matters and what to do.

It tells what other modules found, in words: nothing here runs a network or a test.
"""

import math
import textwrap
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.predictions.energy_tests import SHIFT, SIGNIFICANT, TestResult

__all__ = ["Diagnosis", "Problem", "advice"]

_STANDARD_ERRORS = 3.0
_FEW_SAMPLES = 16
_NEARLY_ALL = 0.9
_MANY_FLOORED = 0.2
_FAR_OFFSET = 0.5

_LINES, _COLUMNS = 60, 100


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
                f"Kolmogorov–Smirnov p-value {test.p_value:.2g}, below {SIGNIFICANT}: the mean is "
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
            if difference > _STANDARD_ERRORS * error and difference > SHIFT * abs(self.gamma_reference):
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
        ("  p-value", f"{test.p_value:.2g}", f"> {SIGNIFICANT}", f"statistic {test.statistic:.2f}"),
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
