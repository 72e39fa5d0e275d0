"""`Auto`: chooses a method by the sizes of the problem; where operations differ much, by counting these.

Costs are floating-point operations, for a choice by the clock would not be the same in two runs.
"""

from dataclasses import dataclass, fields, replace

from laplace_sampling.linear_model.cost import Cost, measure
from laplace_sampling.linear_model.head_curvature import head_of
from laplace_sampling.methods import as_method
from laplace_sampling.methods.dual import Dual
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.krylov import Krylov
from laplace_sampling.methods.method import Choice, Method, Tuning
from laplace_sampling.methods.plan import Rung, rung_of
from laplace_sampling.methods.problem import MOST_BYTES, Problem, exact_bytes, exact_operations, space_of
from laplace_sampling.methods.solver_method import basis_that_fits
from laplace_sampling.methods.stochastic import Stochastic
from laplace_sampling.predictions.covariance_path import CovariancePath

# The exact method is taken up to this size of its matrix, and of the Jacobian that it holds (in numbers), for the sake
# of exactness: 500 digits take it 5 s of processor time with 1,060 weights, 20 s with 2,035 and 117 s with 4,060, where
# Krylov methods take 1.3, 1.7 and 2.7 s.
_EXACT_SIZE, _EXACT_JACOBIAN = 2000, 5e7
# Full-batch Krylov methods need a few passes whatever N is, stochastic ones a number of steps: up to this many data. It
# is a round number in between; half or twice moves the choice by as much.
_KRYLOV_DATA = 20_000
# Counts of operations overrule sizes if they differ by this factor, and by more than so many (a minute or so): counts
# are good to a factor of two or so, which half of it would not allow for.
_CHEAPER, _WORTH = 3.0, 1e12
# Typical of `fit_hyperparameters`: passes of one vector with Krylov methods.
_PASSES = 400


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """The closed form of a linear last layer; dense algebra where it is cheap, else Krylov methods up to 20,000 data,
    mini-batches beyond; `print` tells why.

    For a regression whose weights are too many for a Krylov basis, conjugate gradients in observation space.
    """

    @property
    def name(self) -> str:
        return "auto"

    def choose(self, problem: Problem) -> Choice:
        if head_of(problem.features) is not None:
            return Choice(self._named("last_layer"), self, "the posterior of a linear last layer has a closed form")
        cost = measure(problem.features) if problem.cost is None else problem.cost
        if problem.budget.epochs is None:
            return self._unlimited(problem, cost)
        rungs = self.rungs(problem, cost)
        rung = next((rung for rung in rungs if rung.affordable), rungs[-1])
        best = self._unlimited(problem, cost)
        return best if best.method == rung.method else Choice(rung.method, self, f"{rung.name}: {rung.reason}", cost)

    def rungs(self, problem: Problem, cost: Cost) -> list[Rung]:
        """The ladder from the best posterior down; the last one is taken where the budget pays for no other."""
        return [rung_of(name, self._rung(method, problem, cost), problem, cost) for name, method in LADDER]

    def _rung(self, method: str | None, problem: Problem, cost: Cost) -> Method:
        if method is None:
            return self._solves(problem, cost).method
        return self._named(method).within(problem, cost)

    def _named(self, method: str) -> Method:
        return replace(as_method(method), **self._settings())

    def _unlimited(self, problem: Problem, cost: Cost) -> Choice:
        """The method that is best where any number of operations is allowed."""
        exact = self._exact(problem, cost)
        return self._solves(problem, cost) if exact is None else exact

    def _solves(self, problem: Problem, cost: Cost) -> Choice:
        """The method that draws samples of the full covariance by solves."""
        num_data = problem.features.num_data
        if num_data <= _KRYLOV_DATA:
            return self._krylov(problem, cost)
        if problem.tangent.in_order:
            return self._choice(Krylov, "a stream of data is read in its order, in full passes", cost)
        stochastic = Stochastic(**self._settings())
        choice = stochastic.decide(
            problem, cost, f"{num_data} data: steps on few of them cost less than passes over all"
        )
        return Choice(choice.method, self, choice.reason, cost)

    def covariance_path(self, task: Task) -> CovariancePath:
        raise NotImplementedError("`Auto` chooses a method, which fits.")

    def tune_by_evidence(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        raise NotImplementedError("`Auto` chooses a method, which fits.")

    def fit(self, task: Task, tuned: Tuned, tolerance: float) -> Fit:
        raise NotImplementedError("`Auto` chooses a method, which fits.")

    def _settings(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(Method)}

    def _choice(self, method: type[Method], reason: str, cost: Cost) -> Choice:
        return Choice(method(**self._settings()), self, reason, cost)

    def _exact(self, problem: Problem, cost: Cost) -> Choice | None:
        """Dense algebra, where its matrix is small, or where products of the network are much more expensive."""
        memory, size, rows = problem.memory_of(self.max_memory), problem.features.size, problem.num_observations
        space = space_of(problem)
        if exact_bytes(space, rows, size) > min(MOST_BYTES, memory.bytes):
            return None
        dense, passes = exact_operations(problem, space, cost), _krylov_operations(problem, cost)
        if space == "weights" and rows >= size and problem.tangent.model.likelihood.quadratic and dense <= _WORTH:
            return Choice(
                self._named("exact"), self, f"the curvature of {size} weights is one sum over {rows} rows", cost
            )
        holds_jacobian = space == "weights"
        # A small matrix is decomposed in seconds, whatever the network costs, unless passes take a minute less.
        if self._is_small(problem):
            if passes * _CHEAPER < dense - _WORTH:
                return None
            also = f", and a Jacobian of {rows * size:.2g} numbers," if holds_jacobian else ""
            verb = "are" if holds_jacobian else "is"
            return Choice(self._named("exact"), self, f"a matrix of {min(rows, size)} rows{also} {verb} cheap", cost)
        if dense * _CHEAPER < passes - _WORTH:
            reason = f"products of this network are expensive: {_counts(dense, passes)}"
            return Choice(self._named("exact"), self, reason, cost)
        return None

    @staticmethod
    def _is_small(problem: Problem) -> bool:
        size, rows = problem.features.size, problem.num_observations
        small_jacobian = rows * size <= _EXACT_JACOBIAN or space_of(problem) == "observations"
        return min(rows, size) <= _EXACT_SIZE and small_jacobian

    def _krylov(self, problem: Problem, cost: Cost) -> Choice:
        """Krylov methods; the dual one for a regression where memory holds no basis of weights."""
        memory, features, rows = problem.memory_of(self.max_memory), problem.features, problem.num_observations
        krylov, dual = Krylov(**self._settings()), Dual(**self._settings())
        short = krylov.short(memory, problem.num_samples)
        quadratic = problem.tangent.model.likelihood.quadratic
        if quadratic and short and rows < features.size and memory.vectors >= dual.needs(problem):
            reason = f"memory holds no Krylov basis of weights, but vectors of N·C = {rows} observations"
            return Choice(dual, self, reason, cost)
        reason = f"{features.num_data} data: a few passes over all are cheap"
        space = space_of(problem)
        if self._is_small(problem) and exact_bytes(space, rows, features.size) <= min(MOST_BYTES, memory.bytes):
            counts = _counts(exact_operations(problem, space, cost), _krylov_operations(problem, cost))
            reason += f", dense algebra would take {counts}"
        if not short:
            reason += f", and memory holds {basis_that_fits(memory, problem.num_samples)} vectors"
        return Choice(krylov, self, reason, cost)


# The ladder of posteriors, from the best down: what each is called, and its method; none stands for solves.
LADDER = (
    ("exact", "exact"),
    ("samples by solves", None),
    ("all correlations, part of the data", "subset"),
    ("Kronecker factors", "kfac"),
)


def _counts(dense: float, passes: float) -> str:
    return f"about {dense:.1g} operations, against {passes:.1g} of a few hundred passes"


def _krylov_operations(problem: Problem, cost: Cost) -> float:
    return _PASSES * problem.features.num_data * (cost.jvp + cost.vjp)
