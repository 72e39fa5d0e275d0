"""The fit of the exact method in observation space: closed forms of a decomposition of the Gram matrix."""

import math
import time
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath, ModeCurve, Traces
from laplace_sampling.gp.evidence import HyperparameterBounds
from laplace_sampling.gp.posterior import GramCovariance, GramPosterior, of_largest_evidence
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, Features
from laplace_sampling.linear_model.linear_model import Mode
from laplace_sampling.linear_model.sampling import PosteriorSamples
from laplace_sampling.methods.fit import Fit, Task, Tuned
from laplace_sampling.methods.method import Tuning, tuned_at
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.solver import Minimum

# Samples that go through the features together, and the residual that exact samples have at most, of rounding.
_FEW, _RESIDUAL = 16, 1e-6
# The part of the function, or of its standard deviation, that rounding may take, as the default tolerance of a fit.
MOST_LOST = 0.015
# Error of a row in units of the rounding of a number: 2.4 for a LeNet and 4.5 for ConvNeXt-atto, whose predicted
# standard deviations are off by what the formula gives with 0.4 and 4.4 (docs/decisions.md). With
# half of it fits are repeated in float64 for ratios that are four times as large.
_ROUNDINGS = 8
# Columns of samples that are copied to float64 together: 4 MiB of 64 samples. It is not tuned.
_COLUMNS = 2**13


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
    for part, weights in zip(samples.split(_COLUMNS, dim=1), diagonal.split(_COLUMNS), strict=True):
        total += part.double().square() @ weights
    return total


def tuned_by_gram_matrix(task: Task, tuning: Tuning) -> tuple[Task, Tuned]:
    """The task at the hyperparameters of largest evidence, found to rounding in one step."""
    started = time.perf_counter()
    bounds = HyperparameterBounds(tuning.precision_bounds, tuning.noise_bounds)
    posterior, optimum = of_largest_evidence(task.model, task.prior, bounds)
    fitted, likelihood = posterior.model, posterior.model.likelihood
    # A search that ends at a bound has done its work, and a mode that has not converged has a warning of its own.
    problem = (
        "`fit_hyperparameters` found no maximum of the evidence to rounding: its gradient in log α and log b is "
        f"{optimum.gradient[0]:.2g}, {optimum.gradient[1]:.2g}. Check the data, or use `model.double()`."
    )
    task, tuned = tuned_at(
        task,
        tuning,
        posterior.precisions[0],
        likelihood,
        started=started,
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
    return replace(task, model=fitted, prior=posterior.prior), tuned


def observation_space_fit(task: Task, tuned: Tuned, posterior: GramPosterior) -> "ObservationSpaceFit":
    return ObservationSpaceFit(task, tuned, posterior).with_mode()


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
            f"float64 carries: standard deviations at the training data are off by about "
            f"{min(100 * self._lost, 100):.0f} %. Raise the prior precision, or lower that of the noise.",
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
