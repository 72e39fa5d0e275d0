r"""Hyperparameters by expectation maximisation on samples (thesis §6.2, Alg. 3–4, with their errata).

One step: samples and mode at the current `(α, b)`; the effective dimension `γ = Tr(H⁻¹M)`; then MacKay's update
`α ← γ/‖θ̄‖²` and, for a Gaussian likelihood, `b ← (N·C − γ)/‖y − h(θ̄)‖²`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.bounds import NOISE_BOUNDS, PRECISION_BOUNDS, Bounds, check_bounds
from laplace_sampling.evidence.damping import DampedSteps
from laplace_sampling.evidence.step import Step
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.progress import progress_bar
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.solver import Afford, Minimum, Solution, Solver, unlimited

__all__ = ["EMResult", "effective_dimension", "fit_em", "noise_update"]

# The largest factor by which samples may move α in one step. From α off by 1e4 to 1e6, 500, 2,000 and
# 1e9 take the same steps on the problems of `fixed_point`; 10 takes a tenth more.
_FARTHEST = 1e3


@dataclass(frozen=True)
class EMResult:
    """What `fit_em` ends with; `mode`, `[P]`, is that of the last step, unscaled."""

    prior: GaussianPrior
    likelihood: Likelihood
    mode: Float[Tensor, " P"]
    mode_outputs: Float[Tensor, "N C"]
    effective_dimension: Float[Tensor, " G"]
    effective_dimension_se: Float[Tensor, " G"]
    converged: bool
    history: list[Step] = field(default_factory=list)


def effective_dimension(
    solution: Solution, prior: GaussianPrior, of_all: Callable[[Tensor], Tensor] = lambda rows: rows
) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
    r"""`γ_g = Tr_g(H⁻¹M)` and its standard error, in prediction space: `(1/K) Σ_k ζ_kᵀ(Mζ_k)`, split by group.

    Summed over groups it is `(1/K) Σ_k Σ_i ‖φ_iζ_k‖²_B` (thesis eq. 6.9): unbiased, never negative, of variance
    `2 Tr((H⁻¹M)²)/K`. A solver may give estimates of less variance for the sum (`Solution.traces`); one that knows the
    diagonal of `H⁻¹M` gives it exactly, with standard error 0.

    Args:
        solution: some of the samples, or all.
        prior: `A`.
        of_all: the rows of all samples from those of the solution.
    """
    # Not by the weights, `P − (1/K) Σ_k ζ_kᵀAζ_k` (thesis eq. 6.10): that costs nothing, but its variance is about
    # `2(P − 2γ)/K`, which is larger by the ratio of the weights to the effective dimension.
    traces = solution.traces
    rows = prior.grouped(solution.leverage) if traces is None or len(prior.names) > 1 else traces[:, None]
    if solution.exact:
        return rows[0], torch.zeros_like(rows[0])
    rows = of_all(rows)
    error = rows.std(0) / math.sqrt(len(rows)) if len(rows) > 1 else torch.full_like(rows[0], math.nan)
    return rows.mean(0), error


def noise_update(
    model: LinearModel,
    ggn: GGN,
    samples: Float[Tensor, "K P"],
    gamma: Tensor,
    mode_outputs: Float[Tensor, "N C"],
    of_all: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    r"""MacKay's update of the noise precision, `b ← (N·C − γ)/Σ‖y − h(θ̄)‖²`; one an output if `b` is a vector.

    `N·C` is the number of targets.

    Per output `c`, `γ_c = (1/K) Σ_k Σ_i b_c (φ_ic ζ_k)²`, which takes a pass of JVPs; `of_all` as in
    `effective_dimension`.
    """
    likelihood = model.likelihood
    assert isinstance(likelihood, Gaussian)
    outputs = mode_outputs if likelihood.noise_at == "mode" else model.network_outputs
    errors = model.squared_errors(outputs)
    # γ of samples that have not converged may exceed the number of observations: a hundredth of them stays free.
    if torch.as_tensor(likelihood.noise_precision).dim() == 0:
        num = model.num_observations
        return (num - gamma.sum()).clamp_min(0.01 * num).cpu() / errors.sum()
    used = of_all(_dimensions_by_output(model, ggn, samples, mode_outputs)).mean(0)
    num = model.num_targets()
    return (num - used.cpu().minimum(0.99 * num)) / errors


@recorded
def _dimensions_by_output(
    model: LinearModel, ggn: GGN, samples: Float[Tensor, "K P"], mode_outputs: Float[Tensor, "N C"]
) -> Float[Tensor, "K C"]:
    """`Σ_i b_c (φ_ic ζ_k)²` of each sample."""
    used = mode_outputs.new_zeros(len(samples), mode_outputs.shape[1], dtype=torch.float64)
    with ggn.features.summing(used):
        for batch in ggn.features.own_chunks():
            changes = ggn.features.jvp(samples, batch)
            at = model.features.pick(mode_outputs, batch)
            roots = model.likelihood.root_transpose(at, changes, model.targets_of(batch))
            used += (roots.double() ** 2).sum(1)
    return used


@dataclass(frozen=True)
class _Expectation:
    """Mode and samples at the hyperparameters of a step, and the moments that the update takes of them.

    `samples` are unscaled, those of this process; `gamma` and `mode_norm` are one a group, `residual`, the largest of a
    sample, and `passes`, of samples and mode, those of all processes.
    """

    minimum: Minimum
    mode_outputs: Tensor
    ggn: GGN
    solution: Solution
    samples: Tensor
    gamma: Tensor
    gamma_se: Tensor
    mode_norm: Tensor
    residual: float
    passes: float


@dataclass
class _Iteration:
    """The state between steps of expectation maximisation."""

    model: LinearModel
    prior: GaussianPrior
    draws: Draws
    solver: Solver
    hessian_at: str
    tolerance: float
    precision_bounds: Bounds
    noise_bounds: Bounds
    progress: bool
    mode: Tensor | None = None
    delta: Tensor | None = None
    converged: bool = False
    history: list[Step] = field(default_factory=list)
    steps: DampedSteps = field(default_factory=DampedSteps)

    def step(self) -> _Expectation:
        """Moves to the next hyperparameters; what they were computed from is returned."""
        started = time.perf_counter()
        expectation = self._expect()
        prior, likelihood = self._damped(self._updated_prior(expectation), self._updated_likelihood(expectation))
        self._record(expectation, prior, started)
        # δ is nearly −θ⁰ where the data determine the weights, and zero where they do not: it scales with θ⁰.
        self.delta = expectation.solution.delta * (self.prior.spread() / prior.spread()).sqrt()
        self.prior, self.model = prior, self.model.with_likelihood(likelihood)
        return expectation

    def _damped(self, prior: GaussianPrior, likelihood: Likelihood) -> tuple[GaussianPrior, Likelihood]:
        """The updates themselves, or part of the way to them where updates oscillate; and whether they are small."""
        before, after = (
            torch.tensor([*_floats(alphas.precision), *(_noise(family) or [])], dtype=torch.float64)
            for alphas, family in ((self.prior, self.model.likelihood), (prior, likelihood))
        )
        change = (after / before).log()
        self.converged = float(change.abs().max()) < self.tolerance
        step = self.steps.step(change)
        if self.steps.length == 1:
            return prior, likelihood
        updated = before * step.exp()
        num = len(prior.precision)
        if isinstance(likelihood, Gaussian) and likelihood.learn:
            likelihood = likelihood.with_precision(updated[num:].reshape(likelihood.noise_precisions().shape))
        return prior.with_precision(updated[:num]), likelihood

    def _expect(self) -> _Expectation:
        model, prior = self.model, self.prior
        minimum = linear_model_mode(model, prior, self.solver, self.mode, description=self._label("mode"))
        self.mode = minimum.value
        mode_outputs = model.outputs(self.mode * prior.scale)[0]
        ggn = model.ggn(mode_outputs if self.hessian_at == "mode" else model.network_outputs)
        processes, num = ggn.features.processes, self.draws.num_samples
        own = self.draws.part(processes.samples_of(num))
        with processes.counting_samples(ggn.features.counts, num):
            solution = sample_posterior(
                ggn, prior, own, self.solver, init=self.delta, description=self._label("samples")
            )
        gamma, gamma_se = (t.cpu() for t in effective_dimension(solution, prior, self._of_all))
        if not solution.exact:
            sizes = torch.bincount(prior.groups, minlength=len(prior.names)).cpu()
            gamma = _possible(gamma, gamma_se, sizes, 0.99 * model.num_observations)
        mode_norm = prior.grouped(self.mode[0].double() ** 2).cpu()
        samples = solution.value * prior.scale
        residual, passes = float(self._of_all(solution.residual).max()), solution.passes
        if processes.shares_samples(num):
            passes = sum(processes.gathered_samples(lambda: solution.passes))
        passes += minimum.passes
        return _Expectation(minimum, mode_outputs, ggn, solution, samples, gamma, gamma_se, mode_norm, residual, passes)

    def _of_all(self, rows: Tensor) -> Tensor:
        """The rows of all samples, from those of this process."""
        return self.model.features.processes.samples_of_all(rows, self.draws.num_samples)

    def _label(self, what: str) -> str | None:
        return f"step {len(self.history) + 1}: {what}" if self.progress else None

    def _updated_prior(self, expectation: _Expectation) -> GaussianPrior:
        prior, bounds = self.prior, self.precision_bounds
        updated = prior.mackay_precision(expectation.gamma, expectation.mode_norm, bounds)
        if not expectation.solution.exact:
            # Samples at an α far from the end are too inaccurate to be trusted over a larger factor.
            updated = torch.minimum(torch.maximum(updated, prior.precision / _FARTHEST), prior.precision * _FARTHEST)
        return prior.with_precision(updated.clamp(*bounds))

    def _updated_likelihood(self, expectation: _Expectation) -> Likelihood:
        likelihood, e = self.model.likelihood, expectation
        if not (isinstance(likelihood, Gaussian) and likelihood.learn):
            return likelihood
        updated = noise_update(self.model, e.ggn, e.samples, e.gamma, e.mode_outputs, self._of_all)
        return likelihood.with_precision(updated.clamp(*self.noise_bounds))

    def _record(self, expectation: _Expectation, updated: GaussianPrior, started: float) -> None:
        model, solution = self.model, expectation.solution
        step = Step(
            step=len(self.history) + 1,
            prior_precision=_floats(self.prior.precision),
            new_prior_precision=_floats(updated.precision),
            noise_precision=_noise(model.likelihood),
            effective_dimension=_floats(expectation.gamma),
            effective_dimension_se=None if solution.exact else _floats(expectation.gamma_se),
            mode_norm=_floats(expectation.mode_norm),
            loss=model.total_loss(expectation.mode_outputs),
            network_loss=model.total_loss(model.network_outputs),
            mode_residual=expectation.minimum.residual,
            sample_residual=expectation.residual,
            passes=expectation.passes,
            seconds=time.perf_counter() - started,
        )
        if not all(math.isfinite(v) for v in (step.loss, *step.effective_dimension, *(step.mode_norm or ()))):
            raise FloatingPointError(
                f"Step {step.step} of `fit_hyperparameters` gave NaN or infinity: loss {step.loss:.3g}, effective "
                f"dimension {step.effective_dimension}, norm of the mode {step.mode_norm}, at prior precision "
                f"{step.prior_precision}. Check the weights of the model and the data for extreme values, or use "
                "`model.double()`."
            )
        self.history.append(step)


def fit_em(
    model: LinearModel,
    prior: GaussianPrior,
    draws: Draws,
    solver: Solver,
    *,
    hessian_at: str,
    mode: Float[Tensor, "1 P"] | None = None,
    max_steps: int = 10,
    tolerance: float = 0.03,
    precision_bounds: Bounds = PRECISION_BOUNDS,
    noise_bounds: Bounds = NOISE_BOUNDS,
    afford: Afford = unlimited,
    progress: bool = False,
    callback: Callable[[Step], object] | None = None,
) -> EMResult:
    r"""Expectation maximisation for the prior precision and the noise precision, with frozen draws and warm starts.

    Args:
        model: the linear model on the training data.
        prior: starting point; its scale stays fixed.
        draws: frozen randomness. The prior sample `θ⁰` scales with `α^{-1/2}`, and iterates are `δ = ζ − θ⁰`.
        solver: for samples and for the mode.
        hessian_at: `"network"`, `B` at `f(w̄, x)`; or `"mode"`, `B` at `h(θ̄, x)`, which moves with `α`.
        mode: where the search for the mode starts, in scaled coordinates; zero by default.
        max_steps: largest number of steps.
        tolerance: converged when `|Δ log α|` (and `|Δ log b|`) is below it for every group.
        precision_bounds: bounds of `α`.
        noise_bounds: bounds of `b`.
        afford: whether passes may be made: no step begins that would take more, by what the last one took.
        progress: show progress bars.
        callback: called with the record of each step.
    """
    check_bounds(precision_bounds, noise_bounds)
    prior = prior.to(model.features.device, model.features.dtype)
    bounds = precision_bounds, noise_bounds
    iteration = _Iteration(model, prior, draws, solver, hessian_at, tolerance, *bounds, progress, mode)
    with progress_bar("EM" if progress else None, total=max_steps, leave=True) as bar:
        while True:
            expectation = None  # the samples of the last step are freed before the next ones are made
            expectation = iteration.step()
            alpha, gamma = float(iteration.prior.precision.mean()), float(expectation.gamma.sum())
            bar.update()
            bar.set_postfix(alpha=f"{alpha:.3g}", gamma=f"{gamma:.3g}")
            if callback is not None:
                callback(iteration.history[-1])
            if iteration.converged or len(iteration.history) >= max_steps:
                break
            if not afford(iteration.history[-1].passes):
                break
    return _result(iteration, expectation, prior.scale)


def _result(iteration: _Iteration, expectation: _Expectation, scale: Float[Tensor, " P"]) -> EMResult:
    return EMResult(
        prior=iteration.prior,
        likelihood=iteration.model.likelihood,
        mode=(expectation.minimum.value * scale)[0],
        mode_outputs=expectation.mode_outputs,
        effective_dimension=expectation.gamma,
        effective_dimension_se=expectation.gamma_se,
        converged=iteration.converged,
        history=iteration.history,
    )


def _possible(gamma: Tensor, error: Tensor, sizes: Tensor, rows: float) -> Tensor:
    """An estimate of `γ` brought to what is possible: positive, at most `P_g`, and at most `N·C` in all."""
    # An estimate near zero would end the iteration at an α near zero: a tenth of its error is possible as well.
    gamma = torch.maximum(gamma, 0.1 * error.nan_to_num(0)).clamp_min(1e-3)
    gamma = torch.minimum(gamma, sizes)
    return gamma * min(1.0, rows / float(gamma.sum()))


def _noise(likelihood: Likelihood) -> list[float] | None:
    return _floats(likelihood.noise_precision) if isinstance(likelihood, Gaussian) else None


def _floats(values: Tensor | float) -> list[float]:
    return [float(v) for v in torch.as_tensor(values).reshape(-1)]
