r"""Hyperparameters by expectation maximisation on samples (thesis §6.2, Alg. 3–4, with their errata).

One step: samples and mode at the current `(α, b)`; the effective dimension `γ = Tr(H⁻¹M)`; then MacKay's update
`α ← γ/‖θ̄‖²` and, for a Gaussian likelihood, `b ← (N·C − γ)/‖y − f‖²`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.hyperparameters.hyperparameters import (
    NOISE_BOUNDS,
    PRECISION_BOUNDS,
    Bounds,
    Hyperparameters,
    Step,
    check_bounds,
)
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel, linear_model_mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.solver import Afford, Minimum, Solver, progress_bar, unlimited


class DampedSteps:
    """Half of the last length where a change points back, twice of it where it does not, at most the change itself.

    Attributes:
        length: of the last step, relative to the change.
        direction: scalar product of the last two changes.
    """

    def __init__(self) -> None:
        self.length, self.direction = 1.0, 0.0
        self.last: Tensor | None = None

    def step(self, change: Tensor) -> Tensor:
        """The next step, for a change of the map."""
        self.direction = 0.0 if self.last is None else float((self.last * change).sum())
        self.length = 0.5 * self.length if self.direction < 0 else min(1.0, 2 * self.length)
        self.last = change
        return self.length * change


def effective_dimension(leverage: Float[Tensor, "L G"], exact: bool) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
    r"""`γ_g = Tr_g(H⁻¹M)` and its standard error, in prediction space: `(1/K) Σ_k ζ_kᵀ(Mζ_k)`, split by group.

    Summed over groups it is `(1/K) Σ_k Σ_i ‖φ_iζ_k‖²_B` (thesis eq. 6.9): unbiased, never negative, of variance
    `2 Tr((H⁻¹M)²)/K`. A solver that knows the diagonal of `H⁻¹M` gives it exactly, with standard error 0.

    Args:
        leverage: sums over groups of `ζ ⊙ Mζ`, one row a sample; or of the diagonal of `H⁻¹M`, one row.
        exact: whether it is the exact one.
    """
    # Not by the weights, `P − (1/K) Σ_k ζ_kᵀAζ_k` (thesis eq. 6.10): that costs nothing, but its variance is about
    # `2(P − 2γ)/K`, which is larger by the ratio of the weights to the effective dimension.
    if exact:
        return leverage[0], torch.zeros_like(leverage[0])
    num = len(leverage)
    error = leverage.std(0) / math.sqrt(num) if num > 1 else torch.full_like(leverage[0], math.nan)
    return leverage.mean(0), error


def noise_update(model: LinearModel, gamma: Tensor) -> Tensor:
    r"""MacKay's update of the noise precision, `b ← (N·C − γ)/Σ‖y − f‖²`; one an output if `b` is a vector.

    `N·C` is the number of targets.

    Args:
        model: the linear model.
        gamma: `γ`, of each group of the prior; or `γ_c` of each output, if `b` is a vector; see `dimensions_by_output`.
    """
    likelihood = model.likelihood
    assert isinstance(likelihood, Gaussian)
    errors = model.squared_errors(model.network_outputs)
    # γ of samples that have not converged may exceed the number of observations: a hundredth of them stays free.
    if torch.as_tensor(likelihood.noise_precision).dim() == 0:
        num = model.num_observations
        return (num - gamma.sum()).clamp_min(0.01 * num).cpu() / errors.sum()
    num = model.num_targets()
    return (num - gamma.cpu().minimum(0.99 * num)) / errors


@recorded
def dimensions_by_output(
    model: LinearModel, ggn: GGN, samples: Float[Tensor, "K P"], mode_outputs: Float[Tensor, "N C"]
) -> Float[Tensor, "K C"]:
    """`Σ_i b_c (φ_ic ζ_k)²` of each sample, whose mean is `γ_c`; it takes a pass of JVPs."""
    used = mode_outputs.new_zeros(len(samples), mode_outputs.shape[1], dtype=torch.float64)
    with ggn.features.summing(used):
        for batch in ggn.features.own_chunks():
            changes = ggn.features.jvp(samples, batch)
            roots = model.likelihood.root_transpose(mode_outputs[batch], changes, model.targets[batch])
            used += (roots.double() ** 2).sum(1)
    return used


@dataclass(frozen=True)
class _Expectation:
    """The mode at the hyperparameters of a step, and the moments of the samples that the update takes.

    `gamma` and `mode_norm` are one a group, `gamma_by_output` is there where the noise precision is a vector;
    `residual` is the largest of a sample, `passes` counts those of samples and mode.
    """

    minimum: Minimum
    mode_outputs: Tensor
    gamma: Tensor
    gamma_se: Tensor
    gamma_by_output: Tensor | None
    exact: bool
    mode_norm: Tensor
    residual: float
    passes: float


@dataclass
class _Iteration:
    """The state between steps of expectation maximisation."""

    # The largest factor by which samples may move α in one step. From α off by 1e4 to 1e6, 500, 2,000 and
    # 1e9 take the same steps on the problems of `fixed_point`; 10 takes a tenth more.
    _FARTHEST = 1e3

    model: LinearModel
    prior: GaussianPrior
    draws: Draws
    solver: Solver
    rows: int
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
        assert self.delta is not None
        self.delta *= (self.prior.spread() / prior.spread()).sqrt()
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
        ggn = model.ggn(model.network_outputs)
        leverage, by_output, residuals, passes, exact = self._moments(ggn, mode_outputs)
        gamma, gamma_se = (t.cpu() for t in effective_dimension(leverage, exact))
        if not exact:
            sizes = torch.bincount(prior.groups, minlength=len(prior.names)).cpu()
            gamma = _possible(gamma, gamma_se, sizes, 0.99 * model.num_observations)
        mode_norm = prior.grouped(self.mode[0].double() ** 2).cpu()
        residual, passes = float(residuals.max()), passes + minimum.passes
        gamma_by_output = None if by_output is None else by_output.mean(0)
        return _Expectation(minimum, mode_outputs, gamma, gamma_se, gamma_by_output, exact, mode_norm, residual, passes)

    def _moments(self, ggn: GGN, mode_outputs: Tensor) -> tuple[Tensor, Tensor | None, Tensor, float, bool]:
        """Leverage, dimensions by output and residuals of the samples, passes, and whether the leverage is exact.

        Groups of samples are solved one after the other, and no more of a sample is kept than its warm start.
        """
        prior, draws = self.prior, self.draws
        leverage, by_output, residuals, passes, exact = [], [], [], 0.0, False
        delta = self.delta
        for group in draws.groups(self.rows):
            rows = slice(group.first - draws.first, group.first - draws.first + group.num_samples)
            start = None if self.delta is None else self.delta[rows]
            solution = sample_posterior(ggn, prior, group, self.solver, init=start, description=self._label("samples"))
            if delta is None:
                delta = solution.delta.new_empty(draws.num_samples, ggn.size)
            delta[rows] = solution.delta
            leverage.append(prior.grouped(solution.leverage))
            residuals.append(solution.residual)
            passes, exact = passes + solution.passes, solution.exact
            likelihood = self.model.likelihood
            if isinstance(likelihood, Gaussian) and likelihood.learn and likelihood.noise_precisions().dim():
                samples = solution.value * prior.scale
                by_output.append(dimensions_by_output(self.model, ggn, samples, mode_outputs))
        self.delta = delta
        # An exact diagonal is the same for every group.
        found = leverage[0] if exact else torch.cat(leverage)
        return found, torch.cat(by_output) if by_output else None, torch.cat(residuals), passes, exact

    def _label(self, what: str) -> str | None:
        return f"step {len(self.history) + 1}: {what}" if self.progress else None

    def _updated_prior(self, expectation: _Expectation) -> GaussianPrior:
        prior, bounds = self.prior, self.precision_bounds
        updated = prior.mackay_precision(expectation.gamma, expectation.mode_norm, bounds)
        if not expectation.exact:
            # Samples at an α far from the end are too inaccurate to be trusted over a larger factor.
            updated = torch.minimum(
                torch.maximum(updated, prior.precision / self._FARTHEST), prior.precision * self._FARTHEST
            )
        return prior.with_precision(updated.clamp(*bounds))

    def _updated_likelihood(self, expectation: _Expectation) -> Likelihood:
        likelihood, e = self.model.likelihood, expectation
        if not (isinstance(likelihood, Gaussian) and likelihood.learn):
            return likelihood
        updated = noise_update(self.model, e.gamma if e.gamma_by_output is None else e.gamma_by_output)
        return likelihood.with_precision(updated.clamp(*self.noise_bounds))

    def _record(self, expectation: _Expectation, updated: GaussianPrior, started: float) -> None:
        model = self.model
        step = Step(
            step=len(self.history) + 1,
            prior_precision=_floats(self.prior.precision),
            new_prior_precision=_floats(updated.precision),
            noise_precision=_noise(model.likelihood),
            effective_dimension=_floats(expectation.gamma),
            effective_dimension_se=None if expectation.exact else _floats(expectation.gamma_se),
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
    rows: int | None = None,
    mode: Float[Tensor, "1 P"] | None = None,
    max_steps: int = 10,
    tolerance: float = 0.03,
    precision_bounds: Bounds = PRECISION_BOUNDS,
    noise_bounds: Bounds = NOISE_BOUNDS,
    afford: Afford = unlimited,
    progress: bool = False,
    callback: Callable[[Step], object] | None = None,
) -> Hyperparameters:
    r"""Expectation maximisation for the prior precision and the noise precision, with frozen draws and warm starts.

    Args:
        model: the linear model on the training data.
        prior: starting point; its scale stays fixed.
        draws: frozen randomness. The prior sample `θ⁰` scales with `α^{-1/2}`, and iterates are `δ = ζ − θ⁰`.
        solver: for samples and for the mode.
        rows: number of samples that are solved for together; all by default.
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
    rows = draws.num_samples if rows is None else rows
    iteration = _Iteration(model, prior, draws, solver, rows, tolerance, *bounds, progress, mode)
    with progress_bar("EM" if progress else None, total=max_steps, leave=True) as bar:
        while True:
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
    return Hyperparameters(
        prior=iteration.prior,
        likelihood=iteration.model.likelihood,
        mode=(expectation.minimum.value * prior.scale)[0],
        converged=iteration.converged,
        history=iteration.history,
        criterion="evidence",
    )


def _possible(gamma: Tensor, error: Tensor, sizes: Tensor, rows: float) -> Tensor:
    """An estimate of `γ` brought to what is possible: positive, at most `P_g`, and at most `N·C` in all."""
    # An estimate near zero would end the iteration at an α near zero: a tenth of its error is possible as well.
    gamma = torch.maximum(gamma, 0.1 * error.nan_to_num(0)).clamp_min(1e-3)
    gamma = torch.minimum(gamma, sizes)
    return gamma * min(1.0, rows / float(gamma.sum()))


def _noise(likelihood: Likelihood) -> list[float] | None:
    return _floats(likelihood.noise_precisions()) if isinstance(likelihood, Gaussian) else None


def _floats(values: Tensor | float) -> list[float]:
    return [float(v) for v in torch.as_tensor(values).reshape(-1)]
