"""One page about a fitted posterior that says what is wrong, why it matters and what to do.

The page describes what other modules computed: nothing in this file runs a network or a test.
"""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.predictions.accuracy import FEW_SAMPLES, Accuracy
from laplace_sampling.predictions.diagnosis_page import Problem, Row, listed, number, page, percent, plus_minus
from laplace_sampling.predictions.energy_tests import SHIFT, SIGNIFICANT, TestResult

__all__ = ["NEARLY_ALL", "Diagnosis"]

# Definitions of what deserves a word: differences in standard errors, samples, and shares of the whole.
_STANDARD_ERRORS = 3.0
NEARLY_ALL = 0.9
_MANY_FLOORED = 0.2
_FAR_OFFSET = 0.5

_HYPERPARAMETERS = {True: "converged", False: "not converged", None: "as given"}
_GROUPS_SHOWN = 4


@dataclass(frozen=True)
class Diagnosis:
    r"""All that is known about how good a set of posterior samples is; `print` it for a page in plain words.

    Attributes:
        num_samples: `K`.
        num_parameters: `P`.
        num_data: `N`.
        num_outputs: `C`.
        linear_model: `"affine"` or `"homogeneous"`.
        method: of the solver.
        reason: why this method was taken.
        residuals: of the samples, `[K]`, as the solver defines them.
        tolerance: below which a residual counts as converged.
        solver_converged: whether the solver says that the samples have converged.
        mode_residual: of the mode, if it was needed; `mode_converged` likewise.
        hyperparameters_converged: of the fit of `α` and the noise; `None` if they were given.
        prior_precision: `α` of each group of weights.
        at_bounds: names of the groups whose `α` ended at a bound; `"noise"` if the noise precision did.
        effective_dimension: `γ` of the posterior, summed over groups, with its standard error (0 if exact).
        gamma_reference: an estimate of `γ` that is independent of the samples, with its standard error, or `None`.
        total_test: of `ζᵀHζ`.
        data_test: of `ζᵀMζ`, or `None`.
        offset: `‖φw̄ − f‖ / ‖f‖` on the training data: how far the homogeneous linear model at the trained weights is
            from the network.
        num_floored: weights whose curvature the g-prior's floor replaced.
        passes: Jacobian products spent, in units of all data and one vector.
        epochs: what the fit has cost in training epochs, counted in operations; NaN if that was not counted.
        accuracy: of predicted standard deviations (`Accuracy`).
        tolerable: whether samples that miss their tolerance are off by no more than matters little.
        max_rank: the rank that `M` can have where it is below `N·C`: `N(C − 1)` for class labels, less where
            targets are missing.
        advice: what to do about a solve that did not converge, a sentence or two.
        residual_kind: what the residuals of the samples measure.
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
    mode_residual: float | None
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
    advice: str = "Float64 weights help where the problem is badly conditioned, a larger prior precision too."
    residual_kind: str = "relative gradient"
    epochs: float = math.nan
    accuracy: Accuracy | None = None
    tolerable: bool = False

    @property
    def problems(self) -> list[Problem]:
        """The problems of the posterior, serious ones first."""
        checks = (
            self._not_finite(),
            self._samples_unconverged(),
            self._mode_unconverged(),
            self._hyperparameters_unconverged(),
            self._at_bound(),
            self._few_samples(),
            self._energies_off(
                self.total_test, "The energies ζᵀHζ are not those of N(0, H⁻¹) in all directions together"
            ),
            self._energies_off(self.data_test, "The energies ζᵀMζ are wrong in the directions that the data determine"),
            self._dimensions_differ(),
            self._nothing_determined(),
            self._everything_determined(),
            self._many_floored(),
            self._far_offset(),
        )
        return sorted((p for p in checks if p is not None), key=lambda problem: not problem.serious)

    @property
    def ok(self) -> bool:
        """Whether there is no serious problem."""
        return not any(problem.serious for problem in self.problems)

    def _not_finite(self) -> Problem | None:
        # First of all: other checks compare numbers, and comparisons with NaN are false.
        numbers = [
            self.effective_dimension,
            self.mode_residual or 0.0,
            *self.residuals.tolist(),
            *self.prior_precision.values(),
        ]
        if all(map(math.isfinite, numbers)):
            return None
        return Problem(
            "Something is not finite: a residual, the effective dimension or the prior precision.",
            "Jacobian products overflowed, or the fit of the hyperparameters ran away.",
            "Check weights and data for extreme values; use `model.double()`.",
        )

    def _samples_unconverged(self) -> Problem | None:
        # Both are asked: a solver may stop at its limit of steps with residuals that happen to be small.
        above = int((self.residuals > self.tolerance).sum())
        if not above and self.solver_converged:
            return None
        what = "The samples have not converged, says the solver, though their residuals are small."
        if above:
            what = (
                f"The samples have not converged: {above} of {self.num_samples} residuals are above "
                f"{number(self.tolerance)}, the largest is {number(float(self.residuals.max()))}."
            )
        if self.tolerable and self.accuracy is not None:
            why = f"Standard deviations are off by about {percent(self.accuracy.unfinished)}, which matters little."
            return Problem(what, why, self.advice, serious=False)
        return Problem(
            what,
            "Directions that the data determine weakly keep part of the prior's variance, and error bars "
            "there are too large.",
            f'{self.advice} Or use `method="exact"` where it fits.',
        )

    def _mode_unconverged(self) -> Problem | None:
        if self.mode_converged or self.mode_residual is None:
            return None
        return Problem(
            f"The mode of the linear model has not converged: its residual is {number(self.mode_residual)}.",
            "α and the noise are tuned to the mode, and the curvature of the loss may be taken there.",
            self.advice,
        )

    def _hyperparameters_unconverged(self) -> Problem | None:
        if self.hyperparameters_converged is not False or self.at_bounds:
            return None
        return Problem(
            "The prior precision α still moved when its fit stopped.",
            "The size of all error bars follows α.",
            "Raise `max_steps` of `fit_hyperparameters`, and look at `history_`.",
        )

    def _at_bound(self) -> Problem | None:
        if not self.at_bounds:
            return None
        return Problem(
            f"The precision is at a bound for {listed(list(self.at_bounds))}.",
            "At the upper one of a prior precision the data show no effect of these weights, at the lower one the "
            "prior fades out; at the upper one of the noise precision the linear model fits the targets exactly.",
            "Check the data and the choice of weights, use a prior with fewer groups, or give other "
            "`precision_bounds` or `noise_bounds`.",
        )

    def _few_samples(self) -> Problem | None:
        if self.num_samples >= FEW_SAMPLES:
            return None
        return Problem(
            f"There are fewer than {FEW_SAMPLES} samples: {self.num_samples}.",
            f"An error bar has a relative standard error of {percent(1 / math.sqrt(2 * self.num_samples))}, "
            "and the tests can find gross errors only.",
            "Raise `num_samples`.",
        )

    def _energies_off(self, test: TestResult | None, meaning: str) -> Problem | None:
        if test is None or not test.rejects:
            return None
        numbers = (
            f"Kolmogorov–Smirnov p-value {test.p_value:.2g}, below {SIGNIFICANT}: the mean is "
            f"{number(test.mean)}, expected {number(test.expected_mean)}."
        )
        # With many samples the test finds deviations that no error bar shows: these are noted only.
        if test.matters(self._scale):
            return Problem(
                f"The samples fail the test of the {test.name}.",
                f"{meaning}. {numbers}",
                "If they have not converged, give the solver more passes; else check that curvature, α and "
                "noise are those the samples were drawn for, and the precision (`model.double()`).",
            )
        return Problem(
            f"The test of the {test.name} rejects, but the deviation is too small to matter.",
            f"{numbers} That is {percent(abs(test.mean - test.expected_mean) / self._scale)} of γ; with "
            f"{self.num_samples:,} samples the test finds what no error bar shows.",
            "Nothing.",
            serious=False,
        )

    def _dimensions_differ(self) -> Problem | None:
        if self.gamma_reference is None:
            return None
        # Exact estimates have no standard error, so that a share of γ is asked for as well: rounding is no difference.
        difference = abs(self.effective_dimension - self.gamma_reference)
        error = math.hypot(self.effective_dimension_se, self.gamma_reference_se or 0.0)
        if not (difference > _STANDARD_ERRORS * error and difference > SHIFT * abs(self.gamma_reference)):
            return None
        return Problem(
            f"γ from samples and from the evidence differ: {number(self.effective_dimension)} and "
            f"{number(self.gamma_reference)}, by more than {_STANDARD_ERRORS:g} standard errors "
            f"({number(error)}).",
            "Both estimate Tr(H⁻¹M). Samples that have not converged give too large a γ, an iteration of "
            "the evidence that was cut short too small a one.",
            "Give the solver more passes, then the evidence more probes and iterations, and see which of "
            "the two moves.",
        )

    def _nothing_determined(self) -> Problem | None:
        gamma = self.effective_dimension
        if not gamma < 1:
            return None
        return Problem(
            f"The data determine almost nothing: γ = {number(gamma)} is below 1.",
            "The posterior is nearly the prior. Either α is far too large, or the loss has no curvature at "
            "the outputs where it is taken, as for a network that is certain of its labels.",
            "Pass `val_loader`, some 500 data that the network was not trained on, which choose another α.",
        )

    def _everything_determined(self) -> Problem | None:
        gamma, rank = self.effective_dimension, self._rank
        if not gamma > NEARLY_ALL * min(self.num_parameters, rank):
            return None
        # Near the rank of the data the model interpolates, and noise and α are not identified; near the number of
        # weights it is a classical regression, which is no fault.
        if rank <= self.num_parameters:
            return Problem(
                f"The effective dimension is above {percent(NEARLY_ALL)} of the rank that the data can "
                f"give: γ = {number(gamma)} of {number(rank)}.",
                "The linear model can fit any targets, so neither the noise nor α is well determined.",
                "Give more data or fewer random weights (`parameters=`), or fix the noise "
                "(`Gaussian(b, learn=False)`).",
            )
        return Problem(
            f"The effective dimension is above {percent(NEARLY_ALL)} of the number of weights: "
            f"γ = {number(gamma)} of {number(self.num_parameters)}.",
            "The data determine nearly every weight and the prior hardly matters, as for a small model with many data.",
            "Nothing, if the model is small; else see whether α went far too low.",
            serious=False,
        )

    def _many_floored(self) -> Problem | None:
        if not self.num_floored > _MANY_FLOORED * self.num_parameters:
            return None
        return Problem(
            f"Weights without curvature were floored: {percent(self.num_floored / self.num_parameters)} of "
            "them, by the g-prior.",
            "Dead units, or inputs that are constant. Their prior variance is set by the floor, "
            "and shows in error bars away from the data.",
            'Compare with a larger `GPrior(floor=...)` or with `prior="isotropic"`.',
            serious=False,
        )

    def _far_offset(self) -> Problem | None:
        # The affine model agrees with the network at its weights by definition, so that it has no such distance.
        if not (self.linear_model == "homogeneous" and self.offset > _FAR_OFFSET):
            return None
        return Problem(
            f"The homogeneous linear model is far from the network: ‖φw̄ − f‖ is {percent(self.offset)} of ‖f‖.",
            "α, and the curvature where it is taken at the mode, are those of another model. Usual in "
            "networks without normalisation layers.",
            'Compare `log_prob` on held-out data with that of `linear_model="affine"`.',
            serious=False,
        )

    @property
    def _rank(self) -> int:
        """The largest rank that the data can give."""
        return self.num_data * self.num_outputs if self.max_rank is None else self.max_rank

    @property
    def _scale(self) -> float:
        """`γ`, which deviations are compared with: the smaller estimate, since wrong samples inflate their own."""
        gammas = [self.effective_dimension] + ([] if self.gamma_reference is None else [self.gamma_reference])
        return max(min(gammas), 1e-300)

    def __str__(self) -> str:
        title = [
            ("", f"Diagnosis of {self.num_samples:,} posterior samples of {self.num_parameters:,} weights", 1),
            ("", f"{self.num_data:,} data of {self.num_outputs:,} outputs, {self.linear_model} model", 1),
            ("method: ", f"{self.method}. {self.reason}", 3),
        ]
        return page(title, [*self._fit_rows(), *self._sample_rows()], self.problems)

    def _mode_row(self) -> list[Row]:
        if self.mode_residual is None:
            return [("mode", "not needed", "", "")]
        return [("residual of the mode", number(self.mode_residual), "", "relative gradient")]

    def _fit_rows(self) -> list[Row]:
        largest, tolerance = number(float(self.residuals.max())), f"< {number(self.tolerance)}"
        median = number(float(self.residuals.median()))
        rows = [
            ("residual of the samples, median", median, "", self.residual_kind),
            ("residual of the samples, largest", largest, tolerance, self.residual_kind),
            *self._mode_row(),
            ("hyperparameters", _HYPERPARAMETERS[self.hyperparameters_converged], "", ""),
        ]
        precisions = list(self.prior_precision.items())
        # One more group than the limit is shown, since a line for "1 other group" would save no line.
        shown = len(precisions) if len(precisions) <= _GROUPS_SHOWN + 1 else _GROUPS_SHOWN
        for name, value in precisions[:shown]:
            label = "prior precision α" if len(precisions) == 1 else f"prior precision α of {name}"
            rows.append((label, number(value), "", "1/weight², scaled"))
        if others := [value for _, value in precisions[shown:]]:
            label = f"prior precision α, {len(others)} other groups"
            rows.append((label, f"{number(min(others))} to {number(max(others))}", "", "1/weight², scaled"))
        return rows

    def _sample_rows(self) -> list[Row]:
        test, reference, expected = self.data_test, self.gamma_reference, ""
        gamma = number(self.effective_dimension) + plus_minus(self.effective_dimension_se)
        if reference is not None:
            expected = number(reference) + plus_minus(self.gamma_reference_se or 0.0)
        directions = f"directions, of {number(min(self.num_parameters, self._rank))}"
        rows = [("effective dimension γ", gamma, expected, directions), *_energy_rows("ζᵀHζ", self.total_test)]
        if test is not None:
            rows += _energy_rows("ζᵀMζ" if test.independent else "ζᵀMζ, shape only", test)
        return [
            *rows,
            ("‖φw̄ − f‖ / ‖f‖", percent(self.offset), "", "of the outputs"),
            ("weights floored", f"{self.num_floored:,}", "", f"of {self.num_parameters:,}"),
            ("Jacobian products", number(self.passes), "", "passes over the data"),
            *self._cost_rows(),
        ]

    def _cost_rows(self) -> list[Row]:
        rows = [] if math.isnan(self.epochs) else [("cost of the fit", f"{self.epochs:.2g}", "", "training epochs")]
        if (accuracy := self.accuracy) is None:
            return rows
        parts = [("  of the samples", accuracy.samples), ("  of solves", accuracy.solves)]
        parts += [("  of data left out", accuracy.left_out)] if accuracy.left_out != 0 else []
        errors = [("error of standard deviations", accuracy.total), *parts]
        return [*rows, *((name, percent(error), "", "") for name, error in errors)]


def _energy_rows(name: str, test: TestResult) -> list[Row]:
    expected = number(test.expected_mean) if test.independent else ""
    return [
        (f"energy {name}, mean", number(test.mean), expected, f"sd {number(test.expected_sd)} a sample"),
        ("  p-value", f"{test.p_value:.2g}", f"> {SIGNIFICANT}", f"statistic {test.statistic:.2f}"),
    ]
