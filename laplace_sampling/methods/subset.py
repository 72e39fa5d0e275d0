"""`Subset`: the full covariance, from a random part of the data that grows until predictions stay where they are."""

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Stream
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.low_rank import LowRank
from laplace_sampling.linear_model.priors.prior import overall_precision
from laplace_sampling.linear_model.random_rows import RandomRows
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.linear_model.sketch import Sketch
from laplace_sampling.linear_model.sketch_growth import NUM_PROBES, Growth, bytes_of_rows, grow
from laplace_sampling.linear_model.sketch_sampler import Part, SketchSampler
from laplace_sampling.methods.budget import Estimate
from laplace_sampling.methods.factored import MODE_PASSES, FactoredFit
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.method import Choice, Tuning, has_path, tuned_by_selection
from laplace_sampling.methods.problem import Problem
from laplace_sampling.methods.solver_method import SolverMethod
from laplace_sampling.methods.start import Start
from laplace_sampling.predictions.covariance_path import CovariancePath, FactoredPath
from laplace_sampling.predictions.diagnosis import Accuracy
from laplace_sampling.predictions.selection import Selection
from laplace_sampling.solvers.checks import check_whole
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.solver import Solver

# Where no precision is known yet, a part of so many rows chooses one by the rule, at which larger ones are compared. On
# 10,000 images of Fashion-MNIST and a network of 26,178 weights self-consistency gives 840, with half of them 770, with
# twice 730.
_PILOT = 512
# Rows, or weights, of the largest matrix by default: its eigenvectors take about a minute.
_MOST = 4096


@dataclass(frozen=True, kw_only=True)
class Subset(SolverMethod):
    """The full covariance, all correlations between weights, of random rows of a random part of the data.

    A row is one column `φ_iᵀL_i e_k` of a root of the curvature of one datum, drawn by its size, and counts for those
    that are not drawn (`linear_model.random_rows`). The part doubles until predicted standard deviations change by less
    than the tolerance (`linear_model.sketch_growth`); with the rows of all outputs of all data it is exact. The mode is
    that of all data, by conjugate gradients that the part preconditions.

    Args:
        max_rows: at most so many rows. A row takes one VJP of a datum, `P` numbers of memory, and `m` rows about
            `mP min(m, P)` multiplications and `9 min(m, P)³` operations. By default 4,096, and all rows of a network of
            no more weights, whose matrix does not grow with them; fewer where the budget does not pay for these.
    """

    max_rows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_rows is not None:
            check_whole("`Subset(max_rows=...)`", self.max_rows, 2)

    def most_rows(self, features: Features) -> int:
        """The largest part."""
        of_all = features.num_data * features.num_outputs
        if self.max_rows is not None:
            return min(self.max_rows, of_all)
        return of_all if features.size <= _MOST else min(_MOST, of_all)

    @property
    def name(self) -> str:
        return "subset"

    @property
    def residual_kind(self) -> str:
        return "change of standard deviations from half of the part"

    @property
    def advice(self) -> str:
        return "Raise `Subset(max_rows=...)`, `max_memory`, or `tolerance`: a larger part of the data is more accurate."

    def needs(self, problem: Problem) -> float:
        # Samples, the smallest part, and what compares it with its half.
        return problem.num_samples + 8

    def predicted(self, problem: Problem, cost: Cost) -> Estimate:
        """As if the part grew to its most rows."""
        features, rows = problem.features, self.most_rows(problem.features)
        memory = problem.memory_of(self.max_memory)
        of_samples = problem.num_samples * memory.vector
        bytes_ = min(of_samples + bytes_of_rows(rows, features.size, features.dtype.itemsize), memory.bytes)
        # Rows of the part, and those at which it is compared with its half.
        vjps = rows + min(NUM_PROBES, features.num_data)
        products = vjps * cost.vjp + (MODE_PASSES * features.num_data * cost.passes if problem.by_evidence else 0)
        # A small part chooses the precision, and a larger one again, near that.
        products += problem.of_rule(cost) + (problem.of_rule(cost, rough=False) if rows > _PILOT else 0)
        dense = self._dense_operations(features, rows, problem.num_samples, problem.selection)
        return Estimate(products, bytes_, dense)

    @staticmethod
    def _dense_operations(
        features: Features, rows: int, num_samples: int, selection: Selection | None, at_once: bool = False
    ) -> float:
        """A Gram matrix, its eigenvectors and, unless made at once, those of smaller parts, samples, and a rule."""
        # With more rows than weights the matrix is that of the weights.
        of_rule, order = 0.0, min(rows, features.size)
        if selection is not None:
            of_rule = 0.0 if at_once else min(_PILOT, rows, features.size) * selection.cost(features).vectors
            if rows > _PILOT or at_once:
                of_rule += min(rows, features.size) * selection.cost(features, rough=False).vectors
        # With more rows than weights the matrix is that of the weights.
        order = min(rows, features.size)
        products = 2.0 * features.size * (rows * order + 2 * order * num_samples + of_rule)
        return products + (9.0 if at_once else 10.3) * order**3

    def paid_for(self, problem: Problem, choice: Choice) -> Choice:
        """The choice, with as many rows as the budget pays for."""
        if problem.cost is None:
            return choice
        method, budget = self.within(problem, problem.cost), problem.budget
        rows = method.most_rows(problem.features)
        asked = choice.asked if isinstance(choice.asked, Subset) else Subset()
        if rows >= asked.most_rows(problem.features):
            return replace(choice, method=method)
        limit = f"The budget of {budget.epochs:g} training epochs pays for {rows:,} rows"
        return replace(choice, method=method, limit=limit)

    def within(self, problem: Problem, cost: Cost) -> "Subset":
        """Limits the rows to what the budget pays for: a power of two or the most, and a few at least."""
        method, rows = self, self.most_rows(problem.features)
        while rows > _PILOT and not problem.budget.affords(method.predicted(problem, cost).total):
            rows = 2 ** ((rows - 1).bit_length() - 1)
            method = replace(method, max_rows=rows)
        return method

    def is_held(self, problem: Problem, cost: Cost) -> bool:
        """Whether memory holds a part that is large enough to choose a precision by."""
        features, memory = problem.features, problem.memory_of(self.max_memory)
        few = min(_PILOT, self.most_rows(features))
        needed = bytes_of_rows(few, features.size, features.dtype.itemsize)
        return problem.num_samples * memory.vector + needed <= memory.bytes

    def _growth(self, task: Task, bytes_: float | None = None) -> Growth:
        beside_samples = task.memory.bytes - task.num_samples * task.memory.vector
        return Growth(
            RandomRows(task.scaled_ggn(), task.seed, Stream.SUBSET), beside_samples if bytes_ is None else bytes_
        )

    def _grown(self, task: Task, growth: Growth, tolerance: float, alpha: float) -> Sketch:
        """The part that is accurate at a precision, by what an earlier fit found out if there was one."""
        most = self.most_rows(task.model.features)
        if task.start is not None and len(growth.made) < 2 and (earlier := _part_of(task.start)) is not None:
            sketch = earlier.continued(growth, task.start.prior, task.start.likelihood, alpha, most)
            following = growth.following(most)
            if sketch.change <= tolerance or following <= sketch.num_rows:
                return sketch
            growth.sketch(following)
        shift = torch.tensor([alpha], dtype=torch.float64)
        return grow(growth, lambda _: shift, tolerance, max_rows=most)

    def covariance_path(self, task: Task) -> CovariancePath:
        """Returns the path of a small part, which chooses a precision for other methods, before there are samples."""
        # A half for the part, the other half for the rows at which a rule looks.
        half = task.memory.bytes / 2
        pilot = self._pilot(self._growth(task, half))
        return FactoredPath(pilot, task.prior, min(half, BLOCK_BYTES), for_fit=False)

    def _pilot(self, growth: Growth) -> Sketch:
        """A small part, enough to know where precisions will be; and its half, with which it can be compared."""
        most = self.most_rows(growth.sequence.ggn.features)
        if not growth.made:
            growth.sketch(growth.starting(_PILOT // 2, most))
        if growth.num_rows < _PILOT and (more := growth.following(most)) > growth.num_rows:
            growth.sketch(more)
        return growth.made[-1]

    def tune(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        if task.selection is None or not has_path(task):
            return super().tune(task, tuning)
        return self._tune_by_selection(task, tuning, task.selection)

    def _tune_by_selection(self, task: Task, tuning: Tuning, selection: Selection) -> tuple[Task, Tuned]:
        growth, silent = self._growth(task), replace(tuning, callback=None)
        alpha = None if task.start is None else task.start.alpha
        found, rows, of_rule = None, 0, 0.0
        # By a part that is large enough at the precision before, and again if it has to be larger at the one after.
        for _ in range(2):
            sketch = self._pilot(growth) if alpha is None else self._grown(task, growth, tuning.tolerance, alpha)
            if sketch.num_rows == rows:
                break
            found = tuned_by_selection(task, silent, selection, FactoredPath(sketch, task.prior), alpha)
            alpha, rows = overall_precision(found[0].prior), sketch.num_rows
            of_rule += found[1].history[0].passes - sketch.passes
        assert found is not None
        task, tuned = found
        # The precision has moved after the part was last judged: it grows if it is not accurate at the new one.
        sketch = self._grown(task, growth, tuning.tolerance, overall_precision(task.prior))
        step = replace(tuned.history[0], passes=sketch.passes + of_rule)
        if tuning.callback is not None:
            tuning.callback(step)
        sketch.passes = 0.0  # they are in the history
        work = self._solver(growth, sketch, task, tuning.tolerance)
        return task, replace(tuned, history=[step], work=work)

    def tune_by_evidence(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        solver = self.make_solver(task, tuning.tolerance, None)
        assert isinstance(solver, SketchSampler)
        part, history = solver.part, []
        while True:
            rows = part.sketch.num_rows
            task, tuned = self.tune_by_em(task, tuning, solver)
            history += tuned.history
            # The part has grown at the precision that the search began with.
            part.grow(task.ggn(), task.prior, self.most_rows(task.model.features))
            if part.sketch.num_rows == rows:
                return task, replace(tuned, history=history)

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        growth = self._growth(task)
        alpha = float(task.prior.precision.mean()) if shift is None else shift
        return self._solver(growth, self._grown(task, growth, tolerance, alpha), task, tolerance)

    def _solver(self, growth: Growth, sketch: Sketch, task: Task, tolerance: float) -> SketchSampler:
        part = Part(growth, sketch, tolerance, task.num_samples)
        return SketchSampler(self.name, CG(min(2 * tolerance, 0.5)), task.seed, part=part)

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        assert isinstance(solver, SketchSampler)
        return sampled.error, solver.part.tolerance

    def fit(self, task: Task, tuned: Tuned, tolerance: float) -> Fit:
        if not isinstance(tuned.work, SketchSampler):
            tuned = replace(tuned, work=self.make_solver(task, tolerance, float(task.prior.precision.mean())))
        part = tuned.work.part
        sketch, features = part.sketch, task.model.features
        rows, num_data, at_once = sketch.num_rows, features.num_data, len(part.growth.made) == 1
        task.budget.add(dense=self._dense_operations(features, rows, task.num_samples, task.selection, at_once))
        reason = (
            f"{task.reason}; {rows} random rows of {part.growth.sequence.num_seen(rows)} of {num_data} data, "
            f"half of which change predicted standard deviations by {100 * sketch.change:.2g} %"
        )
        if at_once and task.start is not None:
            reason += ", judging by the fit before"
        return super().fit(replace(task, reason=reason), tuned, tolerance)

    def fit_of(self, *parts: Any) -> "SubsetFit":
        return SubsetFit(*parts)


def _part_of(start: Start) -> Part | None:
    """The part of the data of an earlier fit, if it was by one."""
    return start.solver.part if isinstance(start.solver, SketchSampler) else None


@dataclass(frozen=True)
class SubsetFit(FactoredFit):
    """A posterior of precision `M̂ + A`, with `M̂` from a part of the data."""

    @property
    def accuracy(self) -> Accuracy:
        assert isinstance(self.solver, SketchSampler)
        assert self.sampled is not None
        curvature = self.curvature
        assert isinstance(curvature, LowRank)
        return Accuracy(len(self.sampled.error), left_out=self.solver.part.sketch.change + curvature.error)

    @property
    def tolerable(self) -> bool:
        return not self.accuracy.matters

    @property
    def advice(self) -> str:
        assert isinstance(self.solver, SketchSampler)
        if told := self.task.budget.advice:
            return told
        growth, rows = self.solver.part.growth, self.solver.part.sketch.num_rows
        if growth.reachable(2 * rows) <= rows:
            return f"Memory holds {rows:,} rows: raise `max_memory`."
        if self.task.limit:
            return f"{self.task.limit}: raise `budget`, or give `budget=None`."
        return f"For a larger part of the data give `method=Subset(max_rows={2 * rows})`."

    @property
    def approximate(self) -> bool:
        # With the rows of all outputs of all data `M̂` is `M`.
        assert isinstance(self.solver, SketchSampler)
        part = self.solver.part
        return part.sketch.num_rows < part.growth.sequence.most

    def without_samples(self) -> "SubsetFit":
        solver = self.solver
        assert isinstance(solver, SketchSampler)
        held = replace(solver, part=solver.part.without_rows(), held=self.curvature)
        return replace(cast("SubsetFit", super().without_samples()), solver=held)

    def judged(self, num: int, samples: Tensor, data_energies: Tensor, energies: Tensor) -> PosteriorSamples:
        sampled, solver = super().judged(num, samples, data_energies, energies), self.solver
        assert isinstance(solver, SketchSampler)
        change = solver.part.sketch.change
        error = torch.full_like(sampled.error, change)
        return replace(sampled, error=error, converged=change <= solver.part.tolerance)
