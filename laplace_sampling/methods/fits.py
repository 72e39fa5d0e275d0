"""What a fit is asked, and what it leaves behind, whichever method made it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.em import EMStep
from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.likelihoods.likelihood import Gaussian, Likelihood
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.posterior_samples import Sampled
from laplace_sampling.linear_model.priors import GaussianPrior
from laplace_sampling.linear_model.sampling import Draws, LinearModel
from laplace_sampling.methods.plan import Plan
from laplace_sampling.predictions.diagnosis import Diagnosis, advice, residual_kind
from laplace_sampling.predictions.energy_tests import TestResult, chi_squared_test, data_energy_test
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Minimum

__all__ = ["PATH_STREAM", "SAMPLE_STREAM", "Fit", "Task", "Tuned", "Tuning", "noise_at_bound", "problems_at_bounds"]

# Streams of one seed: what each set of draws is for. Those of samples count up from the third.
SAMPLE_STREAM, PATH_STREAM = 2, 2**20
# Of rows that have not converged, how many a message names.
_NAMED = 8


@dataclass(frozen=True)
class Task:
    """A linear model, and how its posterior is to be found.

    Attributes:
        model: on the training data.
        prior: with the precisions to start from.
        plan: method and memory.
        hessian_at: `"network"` or `"mode"`.
        num_samples: `K`.
        seed: of all draws.
        dtype: of samples and mode.
        given: settings of a solver.
        progress: whether bars are shown.
    """

    model: LinearModel
    prior: GaussianPrior
    plan: Plan
    hessian_at: str
    num_samples: int
    seed: int
    dtype: torch.dtype
    given: SGD | DualCG | None
    progress: bool

    @property
    def draws(self) -> Draws:
        """Of the samples that are kept."""
        return Draws(self.num_samples, self.seed, SAMPLE_STREAM)


@dataclass(frozen=True)
class Tuning:
    """Arguments of `LinearisedLaplace.fit_hyperparameters`."""

    max_steps: int
    tolerance: float
    num_samples: int
    precision_bounds: tuple[float, float]
    noise_bounds: tuple[float, float]
    callback: Callable[[EMStep], object] | None = None


@dataclass(frozen=True)
class Tuned:
    """How a fit of hyperparameters ended; by default there was none.

    Attributes:
        history: a record of each step.
        converged: `None` if the hyperparameters were given.
        at_bounds: groups, or `"noise"`, whose precision ended at a bound.
        problems: in words.
        path: curves of the evidence at the end.
        mode: where the search for the mode may start, `[P]`, unscaled.
    """

    history: list[EMStep] = field(default_factory=list)
    converged: bool | None = None
    at_bounds: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    path: EvidencePath | None = None
    mode: Float[Tensor, " P"] | None = None


@dataclass(frozen=True)
class Fit(ABC):
    """A posterior with the training data, of which a saved one has the samples only.

    Attributes:
        task: with the model and the prior at the hyperparameters of the posterior.
        tuned: how these were found.
        mode: `θ̄`, `[P]`, unscaled.
        mode_outputs: `h(θ̄, x_i)`, `[N, C]`.
        sampled: the samples that are kept; without them in what `LinearisedLaplace` holds.
        minimum: of the mode's objective, without its value.
    """

    task: Task
    tuned: Tuned
    mode: Float[Tensor, " P"]
    mode_outputs: Float[Tensor, "N C"]
    sampled: Sampled | None
    minimum: Minimum

    @property
    def model(self) -> LinearModel:
        return self.task.model

    @property
    def prior(self) -> GaussianPrior:
        return self.task.prior

    @property
    def plan(self) -> Plan:
        return self.task.plan

    @property
    def alpha(self) -> float:
        """`α`, the geometric mean over the weights."""
        return float(self.prior.spread().double().log().mean().exp())

    @property
    def path(self) -> EvidencePath | None:
        """Curves of the evidence that are known already."""
        return self.tuned.path

    @abstractmethod
    def draw(self, draws: Draws, description: str | None = None) -> Sampled:
        """Posterior samples."""

    @abstractmethod
    def judge(self, sampled: Sampled) -> tuple[Float[Tensor, " K"], float]:
        """Residuals of samples, and the tolerance they should be below."""

    @abstractmethod
    def evidence(self, decades: float | None) -> tuple[EvidencePath, list[str]]:
        """Curves of the evidence, so far to both sides of `α` (`None`: there only), and what is inaccurate."""

    def covariance_at(self, features: Features) -> FunctionCovariance | None:
        """Of the function at other inputs, where it takes the training data."""
        return None

    def leave_one_out(self) -> LeaveOneOut:
        """Of each datum, in the units of the model's targets."""
        raise ValueError(
            "`leave_one_out` needs the covariances of the exact method, but the fit is by "
            f'method="{self.plan.method}": use method="exact".'
        )

    def tensors(self) -> dict[str, Tensor]:
        """What a saved posterior keeps besides samples."""
        return {}

    def light(self) -> "Fit":
        """The same without its samples and the scaled mode."""
        assert self.sampled is not None
        return replace(
            self,
            sampled=replace(self.sampled, samples=self.sampled.samples[:0].clone()),
            minimum=replace(self.minimum, value=self.minimum.value[:0].clone()),
        )

    @property
    def converged(self) -> bool:
        solved = self.sampled is None or self.sampled.converged
        return solved and self.minimum.converged and self.tuned.converged is not False

    @property
    def problems(self) -> list[str]:
        """All that is wrong with the fit, in words."""
        found = list(self.tuned.problems)
        if not self.minimum.converged:
            found.append(f"The mode of the linear model has not converged: residual {self.minimum.residual:.2g}.")
        if self.sampled is not None and not self.sampled.converged:
            found.append(self.unconverged(self.sampled))
        if len(found) > len(self.tuned.problems):
            found.append(advice(self.plan.method))
        return found

    def unconverged(self, sampled: Sampled) -> str:
        """What is wrong with samples that have not converged: which ones, and how far they are off."""
        residuals, tolerance = self.judge(sampled)
        rows = (~(residuals <= tolerance)).nonzero()[:, 0].tolist()  # also those that are NaN
        if not rows:
            return f"The samples have not converged, says the solver, though no residual is above {tolerance:.2g}."
        named = ", ".join(map(str, rows[:_NAMED])) + (", …" if len(rows) > _NAMED else "")
        which = "all" if len(rows) == len(residuals) > 1 else f"{len(rows)} ({named})"
        return (
            f"The samples have not converged: residual {float(residuals.max()):.2g} at most, above the tolerance "
            f"{tolerance:.2g} for {which} of {len(residuals)}."
        )

    def diagnosis(self, weights: Float[Tensor, " P"], linear_model: str) -> Diagnosis:
        """See `LinearisedLaplace.diagnose`.

        Args:
            weights: `w̄`.
            linear_model: its name.
        """
        sampled, model, prior = self.sampled, self.model, self.prior
        assert sampled is not None
        residuals, tolerance = self.judge(sampled)
        gamma, gamma_se = sampled.effective_dimension()
        path, moments = self.path, None
        if path is not None:
            at = torch.tensor([self.alpha], dtype=torch.float64)
            mean, error = path.effective_dimension(at)
            moments = float(mean), 2 * float(path.squared_dimension(at)), float(error)
        f = model.network_outputs
        linear = model.features.outputs(weights[None].to(model.features.dtype))[0]
        spent = sampled.passes + self.minimum.passes + sum(step.passes for step in self.tuned.history)
        return Diagnosis(
            num_samples=len(sampled.energies),
            num_parameters=len(weights),
            num_data=model.features.num_data,
            num_outputs=model.features.num_outputs,
            linear_model=linear_model,
            method=self.plan.method,
            reason=self.plan.reason,
            residuals=residuals.cpu(),
            tolerance=tolerance,
            solver_converged=sampled.converged,
            mode_residual=self.minimum.residual,
            mode_converged=self.minimum.converged,
            hyperparameters_converged=self.tuned.converged,
            prior_precision=dict(zip(prior.names, prior.precision.tolist(), strict=True)),
            at_bounds=self.tuned.at_bounds,
            effective_dimension=float(gamma.sum()),
            effective_dimension_se=float(gamma_se.square().sum().sqrt()),
            gamma_reference=None if moments is None else moments[0],
            gamma_reference_se=None if moments is None else moments[2],
            total_test=chi_squared_test(sampled.energies.cpu(), len(weights)),
            data_test=_data_test(sampled.data_energies.cpu(), moments),
            offset=float((linear - f).norm() / f.norm()),
            num_floored=prior.num_floored,
            passes=spent,
            max_rank=len(f) * rank if (rank := model.likelihood.rank(f.shape[1])) < f.shape[1] else None,
            advice=advice(self.plan.method),
            residual_kind=residual_kind(self.plan.method),
        )


def _data_test(energies: Tensor, moments: tuple[float, float, float] | None) -> TestResult | None:
    if moments is not None and moments[0] > 0:
        return data_energy_test(energies, *moments)
    # Two numbers have no shape, nor have energies that are all alike, as zero where the curvature vanishes.
    return None if len(energies) <= 2 or float(energies.std()) == 0 else data_energy_test(energies)


def problems_at_bounds(groups: list[str], noise: bool, tuning: Tuning) -> list[str]:
    """What to say of precisions that ended at a bound.

    Args:
        groups: whose `α` did.
        noise: whether the noise precision did.
        tuning: has the bounds.
    """
    problems = []
    if groups:
        problems.append(
            f"`fit_hyperparameters` ended at one of precision_bounds={tuning.precision_bounds} for the groups "
            f"{groups}: at the upper one the data show no effect of these weights, at the lower one the prior fades "
            "out. Check the data, or give other bounds."
        )
    if noise:
        problems.append(
            f"`fit_hyperparameters` ended at one of noise_bounds={tuning.noise_bounds} for the noise precision: at the "
            "upper one the linear model fits the targets exactly, at the lower one not at all. Check the units of "
            "the targets, give other bounds, or fix the noise (`Gaussian(b, learn=False)`)."
        )
    return problems


def noise_at_bound(likelihood: Likelihood, bounds: tuple[float, float]) -> bool:
    """Whether a noise precision that was learnt is at one of its bounds."""
    if not (isinstance(likelihood, Gaussian) and likelihood.learn):
        return False
    return any(b in bounds for b in torch.as_tensor(likelihood.noise_precision).reshape(-1).tolist())
