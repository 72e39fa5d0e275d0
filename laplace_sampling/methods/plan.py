"""`Plan`: what a fit will do and cost, said before it runs; and `Auto`, which chooses the method by that.

Costs are counted operations, for a choice by the clock would not be the same in two runs.
"""

import math
import warnings
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from laplace_sampling.curvature.head import head_of
from laplace_sampling.curvature.kronecker import has_factors
from laplace_sampling.hyperparameters.covariance_path import CovariancePath
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost, measure
from laplace_sampling.linear_model.features import NetworkFeatures
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.closed_form import Exact, Factored, Head, Subset
from laplace_sampling.methods.expected import columns, expected, in_words
from laplace_sampling.methods.method import Choice, Method, Task, basis_that_fits
from laplace_sampling.methods.problem import Problem, counted_in, exact_operations, space_of
from laplace_sampling.methods.solves import Dual, Krylov, Stochastic
from laplace_sampling.networks.filters import FilterNetwork
from laplace_sampling.networks.last_layer import LastLayer, LinearLayer
from laplace_sampling.networks.random_weights import of_some_weights
from laplace_sampling.solvers.solver import Solver


@dataclass(frozen=True)
class Candidate:
    """A method, what it is predicted to take, and whether budget and memory are enough for it.

    Attributes:
        name: of the kind of posterior.
        method: that finds it.
        epochs: predicted, in training epochs.
        bytes: predicted, of memory.
        affordable: whether both are there.
        reason: in words.
        dense: whether dense algebra is counted, too.
    """

    name: str
    method: Method
    epochs: float
    bytes: float
    affordable: bool
    reason: str
    dense: bool

    @classmethod
    def of(cls, name: str, method: Method, problem: Problem, cost: Cost) -> "Candidate":
        """What a method is predicted to take of a problem."""
        estimate = method.predicted(problem, cost)
        try:
            method.check_likelihood(problem.tangent.model.likelihood)
            method.check(problem)
            fits = method.is_held(problem, cost)
        except ValueError:
            fits = False
        pays = problem.budget.affords(estimate.total)
        epochs = estimate.total / cost.epoch(problem.features.num_data)
        reason = _reason(fits, pays, epochs, problem.budget.epochs)
        return cls(name, method, epochs, estimate.bytes, fits and pays, reason, estimate.dense > 0)


def _reason(fits: bool, pays: bool, epochs: float, budget: float | None) -> str:
    if not fits:
        return "more than memory holds, or not possible for these data"
    if budget is None:
        return "as there is no limit"
    if not pays:
        return f"more than the budget of {budget:g} epochs"
    return f"within the budget of {budget:g} epochs" if epochs <= budget else "a second or so of operations"


@dataclass(frozen=True, kw_only=True)
class Auto(Method):
    """The most accurate method that budget and memory pay for; `print` says which one it took, and why.

    For a linear last layer it is the closed form. Otherwise it tries, in this order: exact, samples by solves (of
    measurements in observation space), all correlations of a part of the data, Kronecker factors where there are any.
    """

    # Full-batch Krylov methods need a few passes whatever N is, stochastic ones a number of steps: up to this many
    # data. It is a round number in between; half or twice moves the choice by as much.
    _KRYLOV_DATA = 20_000
    # The fewest vectors of a Krylov basis that are worth having. A linear layer of 9,003 weights with 16 samples and
    # 500 vectors of memory takes 24 passes with a basis, at half the same, and without one 69.
    _LEAST_BASIS = 64
    # Passes of one vector that samples by solves take, typically. Without a budget, dense algebra that takes more than
    # a minute (10¹² operations) may take this many times as many operations as these, for the sake of exactness: counts
    # are good to a factor of two or so.
    _PASSES, _WORTH, _DEARER = 400, 1e12, 3.0

    @property
    def name(self) -> str:
        return "auto"

    def choose(self, problem: Problem) -> Choice:
        if head_of(problem.features) is not None:
            return Choice(Head(**self._shared), self, "the posterior of a linear last layer has a closed form")
        candidates = self.candidates(problem, measure(problem.features) if problem.cost is None else problem.cost)
        chosen = next((candidate for candidate in candidates if candidate.affordable), candidates[-1])
        return Choice(chosen.method, self, f"{chosen.name}: {chosen.reason}")

    def candidates(self, problem: Problem, cost: Cost) -> list[Candidate]:
        """The methods from the best posterior down; the last one is taken where the budget pays for no other."""
        solves = Candidate.of("samples by solves", self._solves(problem), problem, cost)
        exact = Candidate.of("exact", Exact(**self._shared), problem, cost)
        if problem.budget.epochs is None and exact.affordable and solves.affordable:
            dense = exact_operations(problem, space_of(problem), cost)
            if dense > max(self._WORTH, self._DEARER * self._PASSES * problem.features.num_data * cost.passes):
                exact = replace(exact, affordable=False, reason="many more operations than samples by solves")
        approximations: dict[str, Method] = {"all correlations, part of the data": Subset(**self._shared)}
        if has_factors(problem.features):
            approximations["Kronecker factors"] = Factored(**self._shared)
        others = [Candidate.of(n, m.within(problem, cost), problem, cost) for n, m in approximations.items()]
        return [exact, solves, *others]

    def _solves(self, problem: Problem) -> Method:
        """The method that draws samples of the full covariance by solves."""
        features, memory = problem.features, problem.memory_of(self.max_memory)
        if features.num_data > self._KRYLOV_DATA and not problem.tangent.in_order:
            return Stochastic(**self._shared).choose(problem).method
        krylov, dual = Krylov(**self._shared), Dual(**self._shared)
        if (
            problem.tangent.model.likelihood.quadratic
            and (problem.measured or basis_that_fits(memory, problem.num_samples) < self._LEAST_BASIS)
            and problem.num_observations < features.size
            and memory.vectors >= dual.needs(problem)
        ):
            # Memory holds few vectors of weights, but many of observations; or the data are measurements.
            return dual
        return krylov

    @property
    def _shared(self) -> dict[str, Any]:
        """The settings that all methods have."""
        return {field.name: getattr(self, field.name) for field in fields(Method)}

    def covariance_path(self, task: Task) -> CovariancePath:
        raise NotImplementedError("`Auto` chooses a method, which fits.")

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        raise NotImplementedError("`Auto` chooses a method, which fits.")

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        raise NotImplementedError("`Auto` chooses a method, which fits.")


@dataclass(frozen=True)
class Plan:
    """What `fit_hyperparameters` will do; `print` it.

    Attributes:
        method: name of the method.
        epochs: predicted cost, in training epochs.
        bytes: predicted memory.
        reason: why this method, in words.
        budget: training epochs that are allowed; `None` for no limit.
        epoch: operations of a training epoch.
        candidates: the methods that were compared, from the best posterior down, and the last layer alone.
        likelihood: of the data; what posteriors gave others like it is printed, if all weights are random.
        remark: which operations are counted, and why they may be more than the budget.
    """

    method: str
    epochs: float
    bytes: float
    reason: str
    budget: float | None
    epoch: float
    candidates: tuple[Candidate, ...]
    likelihood: Likelihood | None = None
    remark: str = ""

    @classmethod
    def of(cls, problem: Problem, asked: Method, alone: Problem | None = None) -> "Plan":
        """What a method makes of a problem, whose products have been counted, without a fit.

        Args:
            problem: with its criterion.
            asked: the method, or `Auto`.
            alone: the problem of the last layer, to compare with.
        """
        budget, cost = problem.budget, problem.cost
        assert cost is not None
        choice = asked.choose(problem)
        choice = choice.method.paid_for(problem, choice)
        choice.method.check(problem)
        head = isinstance(choice.method, Head)
        chosen = Candidate.of("last layer" if head else choice.method.name, choice.method, problem, cost)
        candidates = asked.candidates(problem, cost) if isinstance(asked, Auto) and not head else [chosen]
        if alone is not None and alone.cost is not None:
            last = Candidate.of("last layer", Head(), alone, alone.cost)
            candidates.append(replace(last, reason='`parameters="last_layer"`') if last.affordable else last)
        all_or_last = head or not (of_some_weights(problem.tangent.network) or problem.measured)
        # Iterations stop where the budget ends, closed forms do not.
        stops = budget.epochs is not None and choice.method.predicted(problem, cost).least is not None
        epochs = min(chosen.epochs, budget.allowed / budget.epoch) if stops else chosen.epochs
        return cls(
            choice.method.name,
            epochs,
            chosen.bytes,
            choice.shortfall or choice.reason,
            budget.epochs,
            budget.epoch,
            tuple(candidates),
            problem.tangent.model.likelihood if all_or_last else None,
            counted_in(chosen.dense) + budget.excess(epochs * budget.epoch),
        )

    def __str__(self) -> str:
        allowed = "no limit" if self.budget is None else f"a budget of {self.budget:g}"
        head = (
            f'method="{self.method}": about {_epochs(self.epochs)} training epochs ({allowed}; one takes '
            f"{self.epoch:.2g} operations) and {_size(self.bytes)}, {self.reason}"
        )
        head += f"\nEpochs are {self.remark}." if self.remark else ""
        rows = [("posterior", "method", "epochs", "memory", *columns(self.likelihood), "")]
        rows += [
            (
                other.name,
                f'"{other.method.name}"',
                _epochs(other.epochs),
                _size(other.bytes),
                *expected(self.likelihood, other.method.name),
                other.reason,
            )
            for other in self.candidates
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([head, "", *(line.rstrip() for line in lines), in_words(self.likelihood)]).rstrip()


def of_last_layer(problem: Problem) -> Problem | None:
    """Returns the problem of the last layer alone; `None` where that has no closed form of its own."""
    tangent, cost = problem.tangent, problem.cost
    assert cost is not None
    whole = not (of_some_weights(tangent.network) or isinstance(tangent.network, FilterNetwork))
    if head_of(problem.features) is not None or not whole or problem.measured:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are for users who ask for the last layer
            network = LastLayer(tangent.network.source)
            with network.keep_inputs(tangent.data):
                pass
    except (TypeError, ValueError, RuntimeError):
        return None
    if not isinstance(network.head, LinearLayer):
        return None
    features = NetworkFeatures(network.head, tangent.data, tangent.layout)
    tangent = replace(tangent, network=network, model=replace(tangent.model, features=features))
    # A product with the matrix of the layer takes twice as many operations as it has weights.
    return replace(problem, tangent=tangent, cost=Cost(2.0 * features.size, 2.0 * features.size, cost.gradient))


def _epochs(epochs: float) -> str:
    return f"{epochs:.2g}" if epochs < 100 or not math.isfinite(epochs) else f"{epochs:.0f}"


def _size(bytes_: float) -> str:
    unit = min(3, max(0, int(math.log2(max(bytes_, 1)) // 10)))
    return f"{bytes_ / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"
