"""`Auto`: chooses a method by the sizes of the problem; where operations differ much, by counting these.

Costs are floating-point operations, for a choice by the clock would not be the same in two runs.
"""

from dataclasses import dataclass, fields

from laplace_sampling.linear_model.cost import Cost, measure
from laplace_sampling.linear_model.features import BLOCK_BYTES
from laplace_sampling.methods.dual import Dual
from laplace_sampling.methods.exact import Exact
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.krylov import Krylov
from laplace_sampling.methods.method import Choice, Method, Tuning
from laplace_sampling.methods.problem import MOST_BYTES, Problem, exact_bytes, space_of
from laplace_sampling.methods.solver_method import basis_that_fits
from laplace_sampling.methods.stochastic import Stochastic

__all__ = ["Auto"]

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
# Typical of `fit_hyperparameters`: passes of one vector with Krylov methods, factorisations with dense algebra.
_PASSES, _FACTORISATIONS = 400, 50
# In observation space: one eigendecomposition, in units of `(N·C)³`.
_EIGEN = 9


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """Dense algebra where it is cheap, else Krylov methods up to 20,000 data, mini-batches beyond; `print` tells why.

    For a regression whose weights are too many for a Krylov basis, conjugate gradients in observation space.
    """

    @property
    def name(self) -> str:
        return "auto"

    def choose(self, problem: Problem) -> Choice:
        cost = measure(problem.features)
        exact = self._exact(problem, cost)
        if exact is not None:
            return exact
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

    def tune(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
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
        dense, passes = _exact_operations(problem, space, cost), _krylov_operations(problem, cost)
        holds_jacobian = space == "weights"
        # A small matrix is decomposed in seconds, whatever the network costs, unless passes take a minute less.
        if self._is_small(problem):
            if passes * _CHEAPER < dense - _WORTH:
                return None
            also = f", and a Jacobian of {rows * size:.2g} numbers," if holds_jacobian else ""
            verb = "are" if holds_jacobian else "is"
            return self._choice(Exact, f"a matrix of {min(rows, size)} rows{also} {verb} cheap", cost)
        if dense * _CHEAPER < passes - _WORTH:
            reason = f"products of this network are expensive: {_counts(dense, passes)}"
            return self._choice(Exact, reason, cost)
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
            counts = _counts(_exact_operations(problem, space, cost), _krylov_operations(problem, cost))
            reason += f", dense algebra would take {counts}"
        if not short:
            reason += f", and memory holds {basis_that_fits(memory, problem.num_samples)} vectors"
        return Choice(krylov, self, reason, cost)


def _counts(dense: float, passes: float) -> str:
    return f"about {dense:.1g} operations, against {passes:.1g} of a few hundred passes"


def _krylov_operations(problem: Problem, cost: Cost) -> float:
    return _PASSES * problem.features.num_data * (cost.jvp + cost.vjp)


def _exact_operations(problem: Problem, space: str, cost: Cost) -> float:
    """Operations of products and of dense algebra in one of the spaces."""
    num_data, rows, size = problem.features.num_data, problem.num_observations, problem.features.size
    if space == "observations":
        # Pairs of blocks of rows of the Jacobian are multiplied; each is computed again for every other block.
        blocks = max(1.0, 16 * rows * size / BLOCK_BYTES)
        quadratic = problem.tangent.model.likelihood.quadratic
        # One decomposition; but for a Gaussian likelihood, Newton's steps to the mode at each precision as well.
        dense = _EIGEN if quadratic else _EIGEN + _FACTORISATIONS / 3
        return rows * cost.vjp * (1 + blocks) / 2 + 2 * rows**2 * size + dense * rows**3
    smaller, larger = min(rows, size), max(rows, size)
    factorisation = 2 * smaller**2 * larger + smaller**3 / 3
    return num_data * min(rows // num_data * cost.vjp, size * cost.jvp) + _FACTORISATIONS * factorisation
