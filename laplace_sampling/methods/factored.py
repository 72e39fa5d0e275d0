"""`Factored`: diagonal and Kronecker-factored posteriors, of which samples, evidence and covariances are closed forms.

The posterior is `N(θ̄, (M̂ + A)⁻¹)`: the mode is that of the linear model itself, whatever `M̂` leaves out, found by
conjugate gradients on `M`.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import Traces
from laplace_sampling.evidence.network_evidence import ByNetworkEvidence
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.factored import (
    PROBES,
    FactoredSampler,
    KroneckerFit,
    factored_curvature,
    kronecker_operations,
    prior_of_factored,
)
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.head_curvature import head_operations
from laplace_sampling.linear_model.kronecker import CURVATURE, Inverse
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.network_features import NetworkFeatures
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import PosteriorSamples, draw_closed_form
from laplace_sampling.methods.budget import Estimate
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.method import Choice, Tuning, has_path
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.methods.solver_method import SolverFit, SolverMethod
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.predictions.covariance_path import CovariancePath, FactoredPath
from laplace_sampling.predictions.diagnosis import Accuracy
from laplace_sampling.predictions.function_covariance import DenseCovariance, FunctionCovariance
from laplace_sampling.predictions.selection import Selection
from laplace_sampling.solvers.checks import check_whole
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.preconditioners import Factored as FactoredCurvature
from laplace_sampling.solvers.solver import Solver

_KINDS = ("kfac", "diagonal", "last_layer")
# Residual of samples, which have none but rounding.
_RESIDUAL = 1e-6
# Gradients that Kronecker factors are from at least, where the budget pays for no more: see `BASIS_DATA`.
_FEWEST_GRADIENTS = 250
# Passes of the mode in five steps of EM, typically: 10 each by conjugate gradients.
MODE_PASSES = 50


@dataclass(frozen=True, kw_only=True)
class Factored(SolverMethod):
    """A posterior that leaves out correlations, and takes no solves but for the mode.

    Args:
        kind: `"kfac"`, eigenvalue-corrected Kronecker factors of each layer, or `"diagonal"`.
        outputs: for `"kfac"`, how many random combinations of the outputs of a datum stand for all of them, or all
            themselves where they are no more. Each takes a VJP. By default as many as make 2,000 gradients: one of
            2,000 data or more.
        num_data: for `"kfac"`, the number of random data that stand for all.

    Raises:
        ValueError: for another kind, or numbers below one.
    """

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
        return prior_of_factored(problem.prior, ggn, problem.layers(), problem.seed, self._kronecker)

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
        return Estimate(operations, problem.num_samples * memory.vector, dense)

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
            if data * outputs < 2 * _FEWEST_GRADIENTS:
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

    def _by_network(self, likelihood: Likelihood, criterion: str) -> bool:
        """Whether the evidence is that of the network itself, since a search for the mode is most of its cost."""
        return criterion == "auto" and self.kind != "last_layer" and isinstance(likelihood, Gaussian)

    def tune(self, task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
        by_network = self._by_network(task.model.likelihood, tuning.criterion)
        if task.selection is None and by_network and has_path(task):
            task = replace(task, selection=ByNetworkEvidence(task.trained_weights, tuning.noise_bounds))
        return super().tune(task, tuning)

    def covariance_path(self, task: Task) -> CovariancePath:
        return FactoredPath(self.curvature_at(task), task.prior)

    def curvature_at(self, task: Task) -> FactoredCurvature:
        """`M̂` at the network's outputs, in the scaled coordinates of the prior."""
        return factored_curvature(self.kind, task.ggn(), task.seed, task.prior.scale, self._kronecker)

    def make_solver(self, task: Task, tolerance: float, shift: float | None) -> Solver:
        return FactoredSampler(self.kind, CG(min(2 * tolerance, 0.5)), task.seed, self._kronecker)

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        return sampled.residual, _RESIDUAL

    def fit_of(self, *parts: Any) -> "FactoredFit":
        return FactoredFit(*parts)

    def fit(self, task: Task, tuned: Tuned, tolerance: float) -> Fit:
        task.budget.add(dense=self._dense_spent(task))
        if not isinstance(tuned.work, FactoredCurvature):
            return super().fit(task, tuned, tolerance)
        solver = self.make_solver(task, tolerance, None)
        assert isinstance(solver, FactoredSampler)
        held = _at_noise(tuned.work, tuned.noise_before, task.model)
        return super().fit(task, replace(tuned, work=replace(solver, held=held)), tolerance)


def _at_noise(curvature: FactoredCurvature, before: Tensor | None, model: LinearModel) -> FactoredCurvature | None:
    """`M̂` with the noise of the model, which that of a regression is proportional to; `None` for noises by output."""
    noise = model.likelihood.noise_precisions()
    if noise is None or before is None:
        return curvature
    if noise.numel() > 1 or before.numel() > 1:
        return None
    root = float(noise / before) ** 0.5
    return curvature.congruent(torch.full((model.features.size,), root, device=model.features.device))


@dataclass(frozen=True)
class FactoredFit(SolverFit):
    """A posterior of precision `M̂ + A`, and the mode of the linear model itself."""

    # `M̂` once it is known, also in copies without samples.
    _held: list[FactoredCurvature] = field(default_factory=list, repr=False)

    @property
    def curvature(self) -> FactoredCurvature:
        """`M̂` in the scaled coordinates of the prior."""
        if not self._held:
            assert isinstance(self.solver, FactoredSampler)
            known = self.solver.held
            self._held.append(self.solver.curvature(self.ggn, self.prior) if known is None else known)
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
        return {f"{CURVATURE}{name}": tensor for name, tensor in self.curvature.tensors().items()}

    def covariance_at(self, features: Features) -> FunctionCovariance:
        return DenseCovariance(features, self.prior, Inverse(self.curvature, self.prior.spread()))

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
