r"""`Exact`: dense algebra in float64, in the smaller of two spaces.

In the space of the weights it accumulates `M`, `[P, P]`, in one pass over the rows of the Jacobian, which are held
only where they are few; or it holds the Jacobian and a matrix `[N·C, N·C]`. In that of the observations it decomposes
the Gram matrix `[N·C, N·C]` of the tangent kernel. The second is taken where `N·C < P` and the prior has one precision,
since the decomposition is for one.
"""

import math
import time
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.arguments import check_whole
from laplace_sampling.curvature.closed_form import (
    PROBES,
    FactoredSampler,
    KroneckerFit,
    factored_curvature,
    kronecker_bytes,
    kronecker_operations,
    prior_of_factored,
)
from laplace_sampling.curvature.head import head_of, head_operations, is_exact
from laplace_sampling.curvature.kronecker import CURVATURE, CURVATURES, Kronecker
from laplace_sampling.curvature.low_rank import LowRank, Sketch
from laplace_sampling.curvature.part import NUM_PROBES, Growth, Part, RandomRows, SketchSampler, bytes_of_rows
from laplace_sampling.gp.evidence import HyperparameterBounds
from laplace_sampling.gp.posterior import GramCovariance, GramPath, GramPosterior, of_largest_evidence, size_of
from laplace_sampling.hyperparameters.covariance_path import CovariancePath, FactoredPath, HeadPath
from laplace_sampling.hyperparameters.criterion import Criterion
from laplace_sampling.hyperparameters.curves import EvidencePath, ModeCurve, Traces
from laplace_sampling.hyperparameters.hyperparameters import Hyperparameters, in_one_step
from laplace_sampling.hyperparameters.network_evidence import ByNetworkEvidence
from laplace_sampling.hyperparameters.rules import Selection
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import BLOCK_BYTES, DenseFeatures, Features, NetworkFeatures, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel, Mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import PosteriorSamples, draw_closed_form
from laplace_sampling.methods.method import (
    Choice,
    Fit,
    Method,
    Task,
    by_selection,
    by_spectrum,
    has_path,
)
from laplace_sampling.methods.problem import (
    MOST_BYTES,
    Estimate,
    Memory,
    Problem,
    dense_operations,
    exact_bytes,
    exact_products,
    holds_rows,
    space_of,
)
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.predictions.diagnosis import Accuracy
from laplace_sampling.predictions.function_covariance import (
    DenseCovariance,
    FunctionCovariance,
    factored_covariance,
)
from laplace_sampling.predictions.leave_one_out import LeaveOneOut, leave_one_out
from laplace_sampling.solvers.dense import Dense, DenseCurvature
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.lapack import sum_of_squares, symmetric_eigen
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.preconditioners import Curvature
from laplace_sampling.solvers.solver import Minimum, Solver

# Samples that go through the features together, and the residual that exact samples have at most, of rounding.
_FEW, _RESIDUAL = 16, 1e-6


# The part of the function, or of its standard deviation, that rounding may take, as the default tolerance of a fit.
MOST_LOST = 0.015


# Error of a row in units of the rounding of a number: 2.4 for a LeNet and 4.5 for ConvNeXt-atto, whose predicted
# standard deviations are off by what the formula gives with 0.4 and 4.4.
_ROUNDINGS = 8
# How much better measurements may determine a function than the prior does, `λ₁b/α`, relative to `b‖y‖²`, before a fit
# knows: on a tooth of 64 × 64 pixels it was 0.06 (g-prior) and 1.6 (isotropic).
_MEASURED_RATIO = 100


# Samples whose rounding is looked at.
_ROUNDED = 4


_KINDS = ("kfac", "diagonal", "last_layer")


# Passes of the mode in five steps of EM, typically: 10 each by conjugate gradients.
MODE_PASSES = 50


# Where no precision is known yet, a part of so many rows chooses one by the rule, at which larger ones are compared. On
# 10,000 images of Fashion-MNIST and a network of 26,178 weights self-consistency gives 840, with half of them 770, with
# twice 730.
_PILOT = 512


def _leave_one_out(fit: Fit, covariance: FunctionCovariance) -> LeaveOneOut:
    """Each training datum predicted from the others, by the posterior covariance of the function at the data."""
    model, mode_outputs, outputs = fit.model, fit.mode.outputs.double(), fit.ggn.outputs.double()
    return leave_one_out(model.likelihood, model.targets, mode_outputs, outputs, covariance.blocks())


@dataclass(frozen=True, kw_only=True)
class Factored(Method):
    """A posterior that leaves out correlations, and solves for the mode only.

    Args:
        kind: `"kfac"`, eigenvalue-corrected Kronecker factors of each layer, or `"diagonal"`.
        outputs: for `"kfac"`, the number of random combinations of the outputs of a datum that represent all of them.
            If there are no more outputs, these are used themselves. Each takes a VJP. By default as many as make about
            2,000 gradients of the eigenvalues: one of 2,000 data or more.
        num_data: for `"kfac"`, the number of random data that represent all.

    Raises:
        ValueError: for another kind, or numbers below one.
    """

    # Gradients that Kronecker factors are from at least, where the budget pays for no more: see `BASIS_DATA`.
    _FEWEST_GRADIENTS = 250

    kind: str = "kfac"
    outputs: int | None = None
    num_data: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in _KINDS:
            raise ValueError(f"`Factored(kind={self.kind!r})` is not known; use one of {list(_KINDS)}.")
        check_whole("`Factored(num_data=...)`", self.num_data, 1)
        if self.outputs is not None:
            check_whole("`Factored(outputs=...)`", self.outputs, 1)

    @property
    def _kronecker(self) -> KroneckerFit:
        return KroneckerFit(self.outputs, self.num_data)

    @property
    def name(self) -> str:
        return self.kind

    @property
    def minimises(self) -> bool:
        return False

    def build_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GaussianPrior:
        if self.kind == "diagonal":
            return super().build_prior(problem, model, memory)
        # `M̂ + A` has a closed form only if the scales of a g-prior are products of two factors in each layer.
        ggn = self.ggn_of_prior(problem, model, memory)
        return prior_of_factored(problem.family, ggn, problem.layers(), problem.seed, self._kronecker)

    def predicted(self, problem: Problem, cost: Cost) -> Estimate:
        features, C = problem.features, problem.features.num_outputs
        # Eigenvectors of some gradients, eigenvalues of more.
        vjps = self._kronecker.num_gradients(features.num_data, C) if self.kind == "kfac" else 0
        vjps += min(C, PROBES) * features.num_data if self.kind == "diagonal" else 0
        searches = problem.by_evidence and not self._by_network(problem.tangent.model.likelihood, problem.criterion)
        passes = MODE_PASSES * features.num_data * cost.passes if searches else 0.0
        network = problem.tangent.network
        dense = self._dense_operations(network, features, problem.num_samples, problem.selection)
        memory = problem.memory_of(self.max_memory)
        operations = vjps * cost.vjp + problem.of_rule(cost) + passes
        of_factors = kronecker_bytes(network) if self.kind == "kfac" else 0.0
        return Estimate(operations, problem.num_samples * memory.vector + of_factors, dense)

    def choose(self, problem: Problem) -> Choice:
        choice = super().choose(problem)
        return choice if problem.cost is None else replace(choice, method=self.within(problem, problem.cost))

    def within(self, problem: Problem, cost: Cost) -> "Factored":
        """Kronecker factors of as many gradients as the budget pays for, in powers of two, and of a few at least."""
        method, affords = self, problem.budget.affords
        while self.kind == "kfac" and not affords(method.predicted(problem, cost).total):
            features = problem.features
            data = min(method.num_data, features.num_data)
            outputs = min(features.num_outputs, method._kronecker.num_outputs(data))
            if data * outputs < 2 * self._FEWEST_GRADIENTS:
                break
            fewer = {"outputs": outputs // 2} if outputs > 1 else {"outputs": 1, "num_data": data // 2}
            method = replace(method, **fewer)
        return method

    def _dense_operations(
        self,
        network: Linearisation,
        features: Features,
        num_samples: int,
        selection: Selection | None,
        rough: bool = True,
    ) -> float:
        """Eigenvectors of factors; gradients, samples and what a rule looks at, turned by them."""
        if self.kind == "diagonal":
            return 0.0
        looks = 0 if selection is None else selection.cost(features, rough=rough).vectors
        num_vectors = num_samples + looks
        if self.kind == "last_layer":
            return head_operations(features, num_vectors)
        num_gradients = self._kronecker.num_gradients(features.num_data, features.num_outputs)
        return kronecker_operations(network, num_vectors, num_gradients)

    def _dense_spent(self, task: Task) -> float:
        """Operations of dense algebra of a fit."""
        features = task.ggn().features
        if not isinstance(features, NetworkFeatures):
            return 0.0
        # From an earlier posterior a rule knows where to look.
        rough = task.start is None
        return self._dense_operations(features.network, features, task.num_samples, task.selection, rough)

    def paid_for(self, problem: Problem, choice: Choice) -> Choice:
        return choice

    def _by_network(self, likelihood: Likelihood, criterion: Criterion) -> bool:
        """Whether the evidence is that of the network itself, since a search for the mode is most of its cost."""
        return criterion.name == "auto" and self.kind != "last_layer" and isinstance(likelihood, Gaussian)

    def tune(self, task: Task) -> Hyperparameters:
        by_network = self._by_network(task.model.likelihood, task.criterion)
        if task.selection is None and by_network and has_path(task):
            task = replace(task, selection=ByNetworkEvidence(task.trained_weights, task.criterion.noise_bounds))
        return super().tune(task)

    def covariance_path(self, task: Task) -> CovariancePath:
        return FactoredPath(self.curvature_at(task), task.prior)

    def curvature_of(self, ggn: GGN, prior: GaussianPrior, seed: int) -> Curvature:
        """`M̂` of a GGN, in the scaled coordinates of a prior; another closed form overrides this, and `name`."""
        return factored_curvature(self.kind, ggn, seed, prior.scale, self._kronecker)

    def curvature_at(self, task: Task) -> Curvature:
        """`M̂` at the network's outputs."""
        return self.curvature_of(task.ggn(), task.prior, task.seed)

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        return FactoredSampler(CG(min(2 * tolerance, 0.5)), partial(self.curvature_of, seed=task.seed))

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        return sampled.residual, _RESIDUAL

    def fit_of(self, *parts: Any) -> "FactoredFit":
        return FactoredFit(*parts)

    def fit(self, task: Task, found: Hyperparameters) -> Fit:
        task.budget.add(dense=self._dense_spent(task))
        if not isinstance(found.work, Curvature):
            return super().fit(task, found)
        solver = self.make_solver(task, task.tolerance, None)
        assert isinstance(solver, FactoredSampler)
        # The curvature is that of the noise from which the search started.
        held = _at_noise(found.work, task.model, found.likelihood)
        return super().fit(task, replace(found, work=replace(solver, held=held)))


def _at_noise(curvature: Curvature, model: LinearModel, likelihood: Likelihood) -> Curvature | None:
    """`M̂` of a model at another noise precision, to which it is proportional; `None` for noises by output."""
    old, new = model.likelihood.noise_precisions(), likelihood.noise_precisions()
    if old is None or new is None:
        return curvature
    if old.numel() > 1 or new.numel() > 1:
        return None
    root = float(new / old) ** 0.5
    return curvature.congruent(torch.full((model.features.size,), root, device=model.features.device))


@dataclass(frozen=True)
class FactoredFit(Fit):
    """A posterior of precision `M̂ + A`, and the mode of the linear model itself."""

    # `M̂` once it is known, also in copies without samples.
    _held: list[Curvature] = field(default_factory=list, repr=False)

    @property
    def curvature(self) -> Curvature:
        """`M̂` in the scaled coordinates of the prior."""
        if not self._held:
            assert isinstance(self.solver, FactoredSampler)
            known = self.solver.held
            self._held.append(self.solver.curvature_of(self.ggn, self.prior) if known is None else known)
        return self._held[0]

    def marginal_variance(self) -> Float[Tensor, " P"]:
        """The variance of each weight, unscaled: the diagonal of `(M̂ + A)⁻¹`."""
        return self.curvature.variance(self.prior.spread()) * self.prior.scale**2

    @property
    def draws_later(self) -> bool:
        return True

    def draw(self, draws: Draws, description: str | None = None) -> PosteriorSamples:
        found = draw_closed_form(self.curvature, self.prior, draws, self.ggn.device, self.task.dtype)
        return self.judged(draws.num_samples, *found)

    def judged(self, num: int, samples: Tensor, data_energies: Tensor, energies: Tensor) -> PosteriorSamples:
        zeros = torch.zeros(num, dtype=torch.float64, device=self.ggn.device)
        leverage, passes = self._leverages()[None], self.curvature.passes
        return PosteriorSamples(samples, leverage, data_energies, energies, zeros, zeros, passes, True, True)

    def _leverages(self) -> Float[Tensor, " G"]:
        """`γ` of each group; that of a single one takes no diagonal."""
        if len(self.prior.names) > 1:
            return self.prior.grouped(self.curvature.leverage(self.prior.spread()))
        gamma = self.curvature.dimension(self.alpha)
        return torch.tensor([gamma], dtype=torch.float64, device=self.ggn.device)

    def tensors(self) -> dict[str, Tensor]:
        if type(self.curvature) not in CURVATURES.values():
            return {}  # `load` would not know it: the posterior is saved by its samples
        return {f"{CURVATURE}{name}": tensor for name, tensor in self.curvature.tensors().items()}

    def covariance_at(self, features: Features) -> FunctionCovariance:
        return factored_covariance(features, self.prior, self.curvature)

    @property
    def accuracy(self) -> Accuracy:
        assert self.sampled is not None
        return Accuracy(len(self.sampled.error), approximate=True)

    @property
    def approximate(self) -> bool:
        return True

    @property
    def eigenvalues(self) -> Float[Tensor, " P"]:
        """All of `M̂`, in coordinates in which the prior has one precision."""
        even = (self.alpha / self.prior.spread()).sqrt()
        return self.curvature.congruent(even).eigenvalues()

    def traces(self, decades: float) -> Traces:
        return Traces.of_eigenvalues(self.eigenvalues, self.alpha)

    @property
    def known_traces(self) -> Traces:
        return self.traces(0.0)


@dataclass(frozen=True, kw_only=True)
class Head(Factored):
    """The posterior of the weights of a linear last layer, `parameters="last_layer"`, in closed form."""

    # Tolerance of the mode in a search for the largest evidence, a definition; and in units of rounding: 100 were too
    # few.
    _MODE_ACCURACY, _MODE_ROUNDINGS = 1e-6, 3000

    kind: str = "last_layer"

    def check(self, problem: Problem) -> None:
        if head_of(problem.features) is None:
            raise ValueError(
                'method="last_layer" is for `parameters="last_layer"` of a network whose outputs are those of an '
                "`nn.Linear` of one vector a datum, and for data of equal noise without `observe`. Use "
                'method="auto".'
            )
        super().check(problem)

    def covariance_path(self, task: Task) -> CovariancePath:
        return HeadPath(self.curvature_at(task), task.prior)

    def tune_by_evidence(self, task: Task) -> Hyperparameters:
        if not (has_path(task) and is_exact(task.ggn())):
            return super().tune_by_evidence(task)
        # The mode to rounding, nearly, as the other numbers are.
        solver = self.make_solver(
            task, max(self._MODE_ACCURACY, self._MODE_ROUNDINGS * torch.finfo(task.dtype).eps), None
        )
        curvature = self.curvature_at(task)
        if isinstance(curvature, Kronecker):
            (block,) = curvature.blocks
            return by_spectrum(task, solver, block.eigenvalues.flatten(), lambda v: block.turned(v).flatten(1))
        assert isinstance(curvature, DenseCurvature)
        return by_spectrum(task, solver, curvature.spectrum, lambda v: v @ curvature.vectors)

    def fit_of(self, *parts: object) -> "HeadFit":
        return HeadFit(*parts)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class HeadFit(FactoredFit):
    """A posterior of a linear last layer."""

    @property
    def accuracy(self) -> Accuracy:
        return replace(super().accuracy, approximate=self.approximate)

    @property
    def approximate(self) -> bool:
        return not is_exact(self.ggn)

    def leave_one_out(self) -> LeaveOneOut:
        if self.approximate:
            return super().leave_one_out()
        return _leave_one_out(self, self.covariance_at(self.model.features))

    def known_leave_one_out(self) -> LeaveOneOut | None:
        return None if self.approximate else self.leave_one_out()


@dataclass(frozen=True, kw_only=True)
class Subset(Method):
    """The full covariance, all correlations between weights, of random rows of a random part of the data.

    A row is one column `φ_iᵀL_i e_k` of a root of the curvature of one datum. It is drawn by its size, and weighted so
    that it represents those that are not drawn. The part doubles until predicted standard deviations change by less
    than the tolerance (`curvature.part`). With the rows of all outputs of all data it is exact. The mode is that of all
    data, by conjugate gradients with the part as preconditioner.

    Args:
        max_rows: the largest number of rows. A row takes one VJP of a datum and `P` numbers of memory; `m` rows take
            about `mP min(m, P)` multiplications and `9 min(m, P)³` operations. By default 4,096, and all rows of a
            network of no more weights, whose matrix does not grow with them; fewer where budget or memory are not
            enough.
    """

    # Rows, or weights, of the largest matrix by default: its eigenvectors take about a minute.
    _MOST = 4096

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
        return of_all if features.size <= self._MOST else min(self._MOST, of_all)

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
    def _dense_operations(features: Features, rows: int, num_samples: int, selection: Selection | None) -> float:
        """A Gram matrix, its eigenvectors and those of smaller parts, samples, and a rule."""
        of_rule = 0.0
        if selection is not None:
            of_rule = min(_PILOT, rows, features.size) * selection.cost(features).vectors
            if rows > _PILOT:
                of_rule += min(rows, features.size) * selection.cost(features, rough=False).vectors
        # With more rows than weights the matrix is that of the weights.
        order = min(rows, features.size)
        products = 2.0 * features.size * (rows * order + 2 * order * num_samples + of_rule)
        return products + 10.3 * order**3

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
        """Whether memory holds the samples and enough rows of the data to choose a prior precision by."""
        features, memory = problem.features, problem.memory_of(self.max_memory)
        few = min(_PILOT, self.most_rows(features))
        needed = bytes_of_rows(few, features.size, features.dtype.itemsize)
        return problem.num_samples * memory.vector + needed <= memory.bytes

    def _growth(self, task: Task, bytes_: float | None = None) -> Growth:
        beside_samples = task.memory.bytes - task.num_samples * task.memory.vector
        return Growth(
            RandomRows(task.scaled_ggn(), task.seed, Stream.SUBSET), beside_samples if bytes_ is None else bytes_
        )

    def _grown(self, task: Task, growth: Growth, alpha: float) -> Sketch:
        """The part that is accurate at a precision."""
        return growth.grow(alpha, task.tolerance, self.most_rows(task.model.features))

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

    def tune(self, task: Task) -> Hyperparameters:
        if task.selection is None or not has_path(task):
            return super().tune(task)
        return self._tune_by_selection(task, task.selection)

    def _tune_by_selection(self, task: Task, selection: Selection) -> Hyperparameters:
        started, growth = time.perf_counter(), self._growth(task)
        alpha = None if task.start is None else task.start.alpha
        found, rows, of_rule = None, 0, 0.0
        # By a part that is large enough at the precision before, and again if it has to be larger at the one after.
        for _ in range(2):
            sketch = self._pilot(growth) if alpha is None else self._grown(task, growth, alpha)
            if sketch.num_rows == rows:
                break
            of_rule += 0.0 if found is None else found.history[0].passes
            found = by_selection(task, selection, FactoredPath(sketch, task.prior), alpha)
            alpha, rows = found.alpha, sketch.num_rows
        assert found is not None
        # The precision has moved after the part was last judged: it grows if it is not accurate at the new one.
        sketch = self._grown(task, growth, found.alpha)
        found = task.ended(found, started, sketch.passes + of_rule)
        sketch.passes = 0.0  # they are in the history
        return replace(found, work=self._solver(growth, task))

    def tune_by_evidence(self, task: Task) -> Hyperparameters:
        solver = self.make_solver(task, task.tolerance, None)
        assert isinstance(solver, SketchSampler)
        part, history = solver.part, []
        while True:
            rows = part.growth.num_rows
            found = self.tune_by_em(task, solver)
            history += found.history
            task = task.at(found)
            # The part has grown at the precision that the search began with.
            part.grow(task.ggn(), task.prior, self.most_rows(task.model.features))
            if part.growth.num_rows <= rows:
                return replace(found, history=history)

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        growth = self._growth(task)
        self._grown(task, growth, float(task.prior.precision.mean()) if shift is None else shift)
        return self._solver(growth, task)

    def _solver(self, growth: Growth, task: Task) -> SketchSampler:
        part = Part(growth, task.tolerance)
        return SketchSampler(CG(min(2 * task.tolerance, 0.5)), part.of, part=part)

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        assert isinstance(solver, SketchSampler)
        return sampled.error, solver.part.tolerance

    def fit(self, task: Task, found: Hyperparameters) -> Fit:
        if not isinstance(found.work, SketchSampler):
            task = task.at(found)
            work = self.make_solver(task, task.tolerance, float(task.prior.precision.mean()))
            found = replace(found, work=work)
        growth, features = found.work.part.growth, task.model.features
        rows = growth.num_rows
        task.budget.add(dense=self._dense_operations(features, rows, task.num_samples, task.selection))
        reason = (
            f"{task.reason}; {rows} random rows of {growth.sequence.num_seen(rows)} of {features.num_data} data, "
            f"half of which change predicted standard deviations by {100 * growth.change:.2g} %"
        )
        return super().fit(replace(task, reason=reason), found)

    def fit_of(self, *parts: Any) -> "SubsetFit":
        return SubsetFit(*parts)


@dataclass(frozen=True)
class SubsetFit(FactoredFit):
    """A posterior of precision `M̂ + A`, with `M̂` from a part of the data."""

    @property
    def part(self) -> Part:
        assert isinstance(self.solver, SketchSampler)
        return self.solver.part

    @property
    def accuracy(self) -> Accuracy:
        assert self.sampled is not None
        curvature = self.curvature
        assert isinstance(curvature, LowRank)
        return Accuracy(len(self.sampled.error), left_out=math.hypot(self.part.change, curvature.error))

    @property
    def tolerable(self) -> bool:
        return not self.accuracy.matters

    @property
    def advice(self) -> str:
        if told := self.task.budget.advice:
            return told
        growth = self.part.growth
        if growth.reachable(2 * growth.num_rows) <= growth.num_rows:
            return f"Memory holds {growth.num_rows:,} rows: raise `max_memory`."
        if self.task.limit:
            return f"{self.task.limit}: raise `budget`, or give `budget=None`."
        return f"For a larger part of the data give `method=Subset(max_rows={2 * growth.num_rows})`."

    @property
    def approximate(self) -> bool:
        # With the rows of all outputs of all data `M̂` is `M`.
        return self.part.growth.num_rows < self.part.growth.sequence.most

    def without_samples(self) -> "SubsetFit":
        fit, part = cast("SubsetFit", super().without_samples()), self.part
        assert isinstance(self.solver, SketchSampler)
        part = replace(part, growth=part.growth.without_rows())
        return replace(fit, solver=replace(self.solver, part=part, curvature_of=part.of, held=self.curvature))

    def judged(self, num: int, samples: Tensor, data_energies: Tensor, energies: Tensor) -> PosteriorSamples:
        sampled, part = super().judged(num, samples, data_energies, energies), self.part
        error = torch.full_like(sampled.error, part.change)
        return replace(sampled, error=error, converged=part.change <= part.tolerance)


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Dense algebra in float64, for small problems; only its samples have sampling noise."""

    # Of a mode that conjugate gradients find, as by dense algebra.
    _MODE_TOLERANCE = 1e-10

    @property
    def name(self) -> str:
        return "exact"

    def check(self, problem: Problem) -> None:
        memory, features = problem.memory_of(self.max_memory), problem.features
        needed = exact_bytes(space_of(problem), problem.num_observations, features.size)
        # By default the exact method may take all that is free, as nothing else is held.
        allowed = memory.bytes if memory.given else min(MOST_BYTES, 2 * memory.bytes)
        if needed <= allowed:
            return
        quadratic = problem.tangent.model.likelihood.quadratic
        others = '"dual" (conjugate gradients in observation space), "krylov"' if quadratic else '"krylov"'
        raise ValueError(
            f'method="exact" would need about {size_of(needed)} for {features.num_data} data, '
            f"{features.num_outputs} outputs and {features.size} weights, more than the {size_of(allowed)} that it may "
            f'take; give more as `max_memory=`, or use method={others} or "stochastic".'
        )

    def take(self, problem: Problem, choice: Choice) -> Task:
        if space_of(problem) == "weights":
            return _in_float64(self.task(problem, choice, problem.tangent.dense()), "weights")
        task = self.task(problem, choice, self._in_observation_space(problem))
        if len(task.prior.names) > 1:
            # The decomposition is for one precision: several are tuned in the space of the weights.
            return choice.asked.prepare(replace(problem, in_observation_space=False))
        return _in_float64(task, "observations")

    def _in_observation_space(self, problem: Problem) -> LinearModel:
        """The linear model in float64, with its rows in memory where they fit.

        Covariances in observation space are differences of nearly equal numbers, so that rows that are computed again
        must hardly differ, as they do in float64. Of measurements a row takes a pullback of a whole image, which a
        network in float32 has in a quarter of the time: it does where the noise is large enough.
        """
        model = problem.tangent.in_float64()
        if not holds_rows(problem.features, problem.memory_of(self.max_memory)):
            return model
        if problem.measured:
            assert isinstance(model.likelihood, Gaussian)
            precisions = model.likelihood.noise_precisions().double().to(model.features.device)
            energy = float((model.residuals(model.offset).square() * precisions).nansum())
            if lost_by_rows(problem.features, _MEASURED_RATIO * energy) <= MOST_LOST:
                return replace(model, features=DenseFeatures.of(problem.features))
        return replace(model, features=DenseFeatures.of(model.features))

    def remark(self, problem: Problem, memory: Memory) -> str:
        size, rows = problem.features.size, problem.num_observations
        space = space_of(problem)
        held = space == "observations" and holds_rows(problem.features, memory)
        name = "TΦ" if problem.measured else "Φ"
        held = f"; the rows of {name} are held" if held else ""
        return f", in the space of the {space} (P = {size} weights, N·C = {rows} observations{held})"

    def build_prior(self, problem: Problem, model: LinearModel, memory: Memory) -> GaussianPrior:
        if space_of(problem) == "observations":
            return super().build_prior(problem, model, memory)
        # The rows of the Jacobian are there.
        return super().build_prior(problem, model, replace(memory, bytes=float("inf")))

    def predicted(self, problem: Problem, cost: Cost) -> Estimate:
        space, features, rows = space_of(problem), problem.features, problem.num_observations
        products = exact_products(problem, space, cost) + problem.of_rule(cost)
        if space == "observations":
            products += problem.num_samples * features.num_data * cost.passes
        dense = dense_operations(space, rows, features.size)
        return Estimate(products, exact_bytes(space, rows, features.size), dense)

    def paid_for(self, problem: Problem, choice: Choice) -> Choice:
        return choice

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        return Dense()

    def mode(self, task: Task, solver: Solver, near: Float[Tensor, " P"] | None) -> Minimum:
        features = task.model.features
        if (
            task.model.held is not None
            and not isinstance(features, DenseFeatures)
            and not task.model.likelihood.quadratic
        ):
            # Each step of Newton's method would accumulate another `M`: the one at the network's outputs is close to
            # all of them, so that a few passes are enough.
            solver = CG(self._MODE_TOLERANCE, preconditioner=task.scaled_ggn().dense())
        return super().mode(task, solver, near)

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        return sampled.residual, _RESIDUAL

    def covariance_path(self, task: Task) -> CovariancePath:
        if _in_weight_space(task):
            ggn = task.scaled_ggn()
            return FactoredPath(ggn.dense() or ggn.dense_curvature(), task.prior)
        return GramPath(GramPosterior.of(task.model, task.prior))

    def tune_by_evidence(self, task: Task) -> Hyperparameters:
        if not _in_weight_space(task):
            return by_gram_matrix(task)
        if not has_path(task):
            return super().tune_by_evidence(task)
        ggn = task.scaled_ggn()
        curvature = ggn.dense() or ggn.dense_curvature()
        return by_spectrum(task, Dense(), curvature.spectrum, lambda v: v @ curvature.vectors)

    def fit(self, task: Task, found: Hyperparameters) -> Fit:
        features = task.model.features
        space, rows = "weights" if _in_weight_space(task) else "observations", features.num_data * features.num_outputs
        task.budget.add(dense=dense_operations(space, rows, features.size))
        if _in_weight_space(task):
            fit = super().fit(task, found)
            return _rounded(fit, _cancellation(fit))
        task, posterior = task.at(found), found.work
        if posterior is None:
            posterior = GramPosterior.of(task.model, task.prior)
        elif found.criterion != "evidence":
            posterior = posterior.at(task.model, task.prior)
        fit = observation_space_fit(task, replace(found, work=None), posterior)
        return _rounded(fit.ready(), fit.cancellation)

    def fit_of(self, *parts: Any) -> "WeightSpaceFit":
        return WeightSpaceFit(*parts)

    def restore(self, problem: Problem, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "ObservationSpaceFit":
        model = self._in_observation_space(problem)
        task = _in_float64(self.task(problem, Choice(self, self, "as saved"), model, prior), "observations")
        return ObservationSpaceFit(task, task.given, Dense(), GramPosterior.restore(task.model, task.prior, tensors))


def _cancellation(fit: Fit) -> float:
    """How much larger the function is of samples whose weights have random signs than of the samples."""
    assert fit.sampled is not None
    few = fit.sampled.samples[:_ROUNDED]
    signs = torch.randint(2, few.shape, generator=torch.Generator().manual_seed(fit.task.seed)).to(few) * 2 - 1
    outputs, independent = (fit.model.features.outputs(v.to(fit.model.features.dtype)) for v in (few, few * signs))
    return float(independent.double().norm() / outputs.double().norm().clamp_min(1e-300))


def _rounded(fit: Fit, cancellation: float) -> Fit:
    """The fit, with a problem if predictions from its samples are inaccurate because the network rounds."""
    # Roundings of the weights of a sample are independent, where the function is a sum in which they cancel.
    dtype = fit.task.dtype
    lost = torch.finfo(dtype).eps * cancellation
    if lost <= MOST_LOST:
        return fit
    problem = (
        f"In {dtype} the samples of the posterior are off by about {min(100 * lost, 100):.0f} % at the training data, "
        "where the function is a difference of much larger numbers; variances of predictions, which take no samples, "
        "do not have this error. Use `model.double()`."
    )
    return replace(fit, found=replace(fit.found, problems=[*fit.found.problems, problem]))


def _in_float64(task: Task, space: str) -> Task:
    return replace(task, prior=task.prior.to(task.model.features.device, torch.float64), space=space)


def _in_weight_space(task: Task) -> bool:
    """Whether a task is one in the space of the weights."""
    return task.space == "weights"


@dataclass(frozen=True)
class WeightSpaceFit(Fit):
    """A fit with `M` or the Jacobian in memory."""

    @cached_property
    def _factor(self) -> dict[str, Tensor]:
        ggn = self.ggn
        return DenseCovariance.tensors(
            replace(ggn, features=ScaledFeatures(ggn.features, self.prior.scale)), self.prior
        )

    def tensors(self) -> dict[str, Tensor]:
        return self._factor

    def leave_one_out(self) -> LeaveOneOut:
        return _leave_one_out(self, DenseCovariance.of(self.model.features, self.prior, self._factor))

    def traces(self, decades: float) -> Traces:
        return Traces.of_eigenvalues(_eigenvalues(self.task.whitened_ggn()), self.alpha)

    @property
    def known_traces(self) -> Traces | None:
        return self.traces(0.0) if self.found.criterion == "evidence" else None

    @property
    def curve_solver(self) -> Solver:
        return self.solver


def _eigenvalues(ggn: GGN) -> Tensor:
    """All eigenvalues of `M` that may not be zero: of `M` where it is held, else of the smaller of `RRᵀ` and `RᵀR`."""
    if (held := ggn.dense()) is not None:
        return held.spectrum
    blocks = [block.double() for block in ggn.root_rows()]
    if sum(map(len, blocks)) >= ggn.size:
        return symmetric_eigen(sum_of_squares(blocks, ggn.size, blocks[0].device))[0]
    root = torch.cat(blocks)
    return symmetric_eigen(root @ root.T)[0]


def determination(posterior: GramPosterior) -> float:
    """How much better the data determine the function than the prior."""
    alpha, noise = posterior.precisions
    return noise / alpha * float(posterior.eigenvalues[-1])


def lost_by_rows(features: Features, ratio: float) -> float:
    """The relative error of standard deviations that rounding of the rows makes.

    Rows of a relative error `ε` are those of a Jacobian of their own. An input whose row is computed elsewhere has a
    function that is off by `ε|φ|/√α` at most, in directions that the data do not determine, where the data leave a
    standard deviation of about `b^{-1/2}`: with `r = λ₁b/α` standard deviations grow by `(1 + ε²r)^{1/2}`.
    """
    rounding = torch.finfo(features.precision if isinstance(features, DenseFeatures) else features.dtype).eps
    return math.sqrt(1 + (_ROUNDINGS * rounding) ** 2 * ratio) - 1


def _energies(samples: Float[Tensor, "K P"], diagonal: Float[Tensor, " P"]) -> Float[Tensor, " K"]:
    """`ζᵀ diag(d) ζ` in float64, in blocks of columns that caches hold."""
    total = torch.zeros(len(samples), dtype=torch.float64, device=samples.device)
    width = max(1, NUMBERS_TOGETHER // max(1, len(samples)))
    for part, weights in zip(samples.split(width, dim=1), diagonal.split(width), strict=True):
        total += part.double().square() @ weights
    return total


def by_gram_matrix(task: Task) -> Hyperparameters:
    """The hyperparameters of largest evidence, found to rounding in one step; `work` is the posterior."""
    started = time.perf_counter()
    bounds = HyperparameterBounds(task.criterion.precision_bounds, task.criterion.noise_bounds)
    posterior, optimum = of_largest_evidence(task.model, task.prior, bounds)
    fitted, likelihood = posterior.model, posterior.model.likelihood
    # A search that ends at a bound has done its work, and a mode that has not converged has a warning of its own.
    problem = (
        "`fit_hyperparameters` found no maximum of the evidence to rounding: its gradient in log α and log b is "
        f"{optimum.gradient[0]:.2g}, {optimum.gradient[1]:.2g}. Check the data, or use `model.double()`."
    )
    found = in_one_step(
        task.model,
        task.prior,
        posterior.precisions[0],
        likelihood,
        effective_dimension=posterior.effective_dimension(),
        mode_norm=posterior.mode.norm,
        loss=fitted.total_loss(posterior.mode.outputs),
        mode_residual=None if likelihood.quadratic else posterior.mode.residual,
        passes=float(fitted.features.num_outputs),
        converged=optimum.converged,
        problems=[] if optimum.converged or optimum.at_bounds else [problem],
        work=posterior,
        criterion="evidence",
    )
    return task.ended(found, started)


def observation_space_fit(task: Task, found: Hyperparameters, posterior: GramPosterior) -> "ObservationSpaceFit":
    return ObservationSpaceFit(task, found, Dense(), posterior).with_mode()


@dataclass(frozen=True)
class ObservationSpaceFit(Fit):
    """A fit of which everything is known in closed form, without the Jacobian."""

    posterior: GramPosterior

    def find_mode(self) -> Mode:
        mode, weights = self.posterior.mode, self.posterior.mode_weights()
        minimum = Minimum(weights.new_zeros(0, len(weights)), mode.residual, 1.0, mode.converged)
        return Mode(weights, mode.outputs, minimum)

    @property
    def _ratio(self) -> float:
        return determination(self.posterior)

    @property
    def _lost(self) -> float:
        """The relative error of standard deviations by rounding."""
        # Variances are differences of that of the prior and of what the data explain.
        return max(torch.finfo(torch.float64).eps * self._ratio / 2, lost_by_rows(self.model.features, self._ratio))

    @property
    def _precision(self) -> torch.dtype:
        features = self.model.features
        return features.precision if isinstance(features, DenseFeatures) else features.dtype

    @property
    def cancellation(self) -> float:
        r"""How much larger the function is of samples whose weights have random signs than of the samples: a norm.

        `E‖Φ(s ⊙ ζ)‖² = Σ_p ‖φ_p‖² (H⁻¹)_pp` is at most `Tr ΦA⁻¹Φᵀ`, and hardly less where the data leave most
        directions of the weights as the prior has them; `E‖Φζ‖² = Tr ΦH⁻¹Φᵀ`. With the noise white these are `Σ λ/α`
        and `γ/b`.
        """
        alpha, noise = self.posterior.precisions
        total = float(self.posterior.eigenvalues.clamp_min(0).sum()) * noise / alpha
        return math.sqrt(total / max(self.posterior.effective_dimension(), 1e-300))

    @property
    def converged(self) -> bool:
        return super().converged and self._lost <= MOST_LOST

    @property
    def problems(self) -> list[str]:
        if self._lost <= MOST_LOST:
            return super().problems
        return [
            *super().problems,
            f"The data determine the function {self._ratio:.1g} times better than the prior, which is more than "
            f"rows in {self._precision} can represent: standard deviations at the training data are off by about "
            f"{min(100 * self._lost, 100):.0f} %. Raise the prior precision, or lower that of the noise"
            + ("." if self._precision == torch.float64 else ", or use `model.double()`."),
        ]

    def traces(self, decades: float) -> Traces:
        return Traces.of_eigenvalues(self.posterior.precisions[1] * self.posterior.eigenvalues, self.alpha)

    @property
    def known_traces(self) -> Traces:
        return self.traces(0.0)

    def mode_curve(self, alphas: Float[Tensor, " k"]) -> ModeCurve:
        return self.posterior.mode_curve(alphas)

    @property
    def saves_data(self) -> bool:
        return True

    def tensors(self) -> dict[str, Tensor]:
        return self.posterior.tensors()

    @property
    def draws_later(self) -> bool:
        """Whether samples are drawn when they are asked for: error bars of a regression need none.

        They take rows in memory, since the network may have changed until then.
        """
        return isinstance(self.model.features, DenseFeatures) and isinstance(self.model.likelihood, Gaussian)

    def judged(self, num: int, samples: Tensor, data_energies: Tensor, energies: Tensor) -> PosteriorSamples:
        """Exact samples, of which everything but the energies is known beforehand."""
        zeros = torch.zeros(num, dtype=torch.float64, device=self.model.features.device)
        leverage = zeros.new_tensor([[self.posterior.effective_dimension()]])
        passes = 1.5 * num
        return PosteriorSamples(samples, leverage, data_energies, energies, zeros, zeros, passes, True, True)

    def draw(self, draws: Draws, description: str | None = None) -> PosteriorSamples:
        model, samples = self.model, self.posterior.sample(draws)
        curved_at = self.ggn.outputs.double()
        # Energies tell whether samples are right: `ζᵀMζ = ‖LᵀΦζ‖²`, by products with the network in few rows at a time.
        outputs = torch.cat([model.features.outputs(part.to(model.features.dtype)) for part in samples.split(_FEW)])
        roots = model.likelihood.root_transpose(curved_at, outputs.double(), model.targets)
        energies = roots.flatten(1).square().sum(1)
        of_prior = _energies(samples, self.prior.diagonal().double())
        return self.judged(draws.num_samples, samples.to(self.task.dtype), energies, energies + of_prior)

    def judge(self, sampled: PosteriorSamples) -> tuple[Tensor, float]:
        return sampled.residual, _RESIDUAL

    def evidence(self, decades: float) -> tuple[EvidencePath, list[str]]:
        path, problems = super().evidence(decades)
        if self._lost > MOST_LOST:
            problems.append("the data determine the function better than float64 carries")
        return path, problems

    def leave_one_out(self) -> LeaveOneOut:
        return self.posterior.leave_one_out()

    def known_leave_one_out(self) -> LeaveOneOut:
        return self.leave_one_out()

    def covariance_at(self, features: Features) -> FunctionCovariance:
        # As accurate as the rows of the training data.
        return GramCovariance(self.posterior, features.in_float64())
