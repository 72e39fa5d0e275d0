r"""Hyperparameters by expectation maximisation on samples (thesis §6.2, Alg. 3–4, with their errata).

One step: samples and mode at the current `(α, b)`; the effective dimension `γ = Tr(H⁻¹M)`; then MacKay's update
`α ← γ/‖θ̄‖²` and, for a Gaussian likelihood, `b ← (N·C − γ)/‖y − h(θ̄)‖²`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.solver import Solution, Solver

# The largest factor by which samples may move α in one step.
_FARTHEST = 1e3

__all__ = [
    "EMResult",
    "EMStep",
    "effective_dimension",
    "effective_dimension_weight_space",
    "fit_em",
    "noise_update",
]


@dataclass(frozen=True)
class EMStep:
    """One step of `fit_em`. Vectors have one entry a group of the prior; losses are sums over the data.

    Attributes:
        step: counted from 1.
        prior_precision: `α` during the step; `new_prior_precision` after it.
        noise_precision: `b` during the step, empty if the likelihood has none.
        effective_dimension: `γ`, with its standard error (0 from the exact method).
        mode_norm: `‖θ̄‖²` in the scaled coordinates of the prior.
        loss: `Σ_i ℓ(y_i, h(θ̄, x_i))`; `network_loss` the same of the network itself.
        mode_residual: norm of the gradient at `θ̄`, relative to that at zero.
        sample_residual: largest residual of a sample.
        passes: Jacobian products, in units of all data and one vector.
        seconds: wall time of the step.
    """

    step: int
    prior_precision: list[float]
    new_prior_precision: list[float]
    noise_precision: list[float]
    effective_dimension: list[float]
    effective_dimension_se: list[float]
    mode_norm: list[float]
    loss: float
    network_loss: float
    mode_residual: float
    sample_residual: float
    passes: float
    seconds: float

    def shifted(self, loss: float) -> "EMStep":
        """The same with a constant added to the losses."""
        return replace(self, loss=self.loss + loss, network_loss=self.network_loss + loss)


@dataclass(frozen=True)
class EMResult:
    """What `fit_em` ends with; `mode`, `[P]`, and `samples`, `[K, P]`, are those of the last step, unscaled."""

    prior: GaussianPrior
    likelihood: Likelihood
    mode: Float[Tensor, " P"]
    mode_outputs: Float[Tensor, "N C"]
    samples: Float[Tensor, "K P"]
    effective_dimension: Float[Tensor, " G"]
    effective_dimension_se: Float[Tensor, " G"]
    converged: bool
    history: list[EMStep] = field(default_factory=list)


def effective_dimension(solution: Solution, prior: GaussianPrior) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
    r"""`γ_g = Tr_g(H⁻¹M)` and its standard error, in prediction space: `(1/K) Σ_k ζ_kᵀ(Mζ_k)`, split by group.

    Summed over groups it is `(1/K) Σ_k Σ_i ‖φ_iζ_k‖²_B` (thesis eq. 6.9): unbiased, never negative, of variance
    `2 Tr((H⁻¹M)²)/K`. A solver may give estimates of less variance for the sum (`Solution.traces`); one that knows the
    diagonal of `H⁻¹M` gives it exactly, with standard error 0.
    """
    traces = solution.traces
    rows = prior.grouped(solution.leverage) if traces is None or len(prior.names) > 1 else traces[:, None]
    if solution.exact:
        return rows[0], torch.zeros_like(rows[0])
    return rows.mean(0), _standard_error(rows)


def effective_dimension_weight_space(
    samples: Float[Tensor, "K P"], prior: GaussianPrior
) -> tuple[Float[Tensor, " G"], Float[Tensor, " G"]]:
    r"""`γ_g = P_g − (1/K) Σ_k ζ_kᵀAζ_k` of unscaled samples (thesis eq. 6.10), for comparison.

    Free, and unbiased too, but of variance `2 Tr((AH⁻¹)²)/K ≈ 2(P − 2γ)/K`: it can be negative.
    """
    sizes = torch.bincount(prior.groups, minlength=len(prior.names)).double()
    rows = sizes - prior.grouped(samples**2 * prior.diagonal())
    return rows.mean(0), _standard_error(rows)


def _standard_error(rows: Float[Tensor, "K G"]) -> Float[Tensor, " G"]:
    """Of the mean of the rows; NaN for a single one."""
    return rows.std(0) / math.sqrt(len(rows)) if len(rows) > 1 else torch.full_like(rows[0], math.nan)


def noise_update(
    model: LinearModel, ggn: GGN, samples: Float[Tensor, "K P"], gamma: Tensor, mode_outputs: Float[Tensor, "N C"]
) -> Tensor:
    r"""MacKay's update of the noise precision, `b ← (N·C − γ)/Σ‖y − h(θ̄)‖²`; one an output if `b` is a vector.

    Per output `c`, `γ_c = (1/K) Σ_k Σ_i b_c (φ_ic ζ_k)²`, which takes a pass of JVPs.
    """
    likelihood = model.likelihood
    assert isinstance(likelihood, Gaussian)
    precision = torch.as_tensor(likelihood.noise_precision)
    outputs = mode_outputs if likelihood.noise_at == "mode" else model.network_outputs
    errors = (outputs - model.targets.reshape(outputs.shape)).double()
    if precision.dim() == 0:
        free = (errors.numel() - gamma.sum()).clamp_min(0.01 * errors.numel())
        total = (errors**2).sum()
    else:
        used = torch.zeros_like(errors[0])
        for batch in ggn.features.chunks():
            roots = likelihood.root_transpose(
                mode_outputs[batch], ggn.features.jvp(samples, batch), model.targets[batch]
            )
            used += (roots.double() ** 2).mean(0).sum(0)
        free = len(errors) - used.clamp_max(0.99 * len(errors))  # as for γ: before samples have converged
        total = (errors**2).sum(0)
    return free.cpu() / total.cpu()


def fit_em(
    model: LinearModel,
    prior: GaussianPrior,
    draws: Draws,
    solver: Solver,
    *,
    hessian_at: str,
    max_steps: int = 10,
    tolerance: float = 0.03,
    precision_bounds: tuple[float, float] = (1e-8, 1e12),
    noise_bounds: tuple[float, float] = (1e-12, 1e12),
    progress: bool = False,
    callback: Callable[[EMStep], object] | None = None,
) -> EMResult:
    r"""Expectation maximisation for the prior precision and the noise precision, with frozen draws and warm starts.

    Args:
        model: the linear model on the training data.
        prior: starting point; its scale stays fixed.
        draws: frozen randomness. The prior sample `θ⁰` scales with `α^{-1/2}`, and iterates are `δ = ζ − θ⁰`.
        solver: for samples and for the mode.
        hessian_at: `"network"`, `B` at `f(w̄, x)`; or `"mode"`, `B` at `h(θ̄, x)`, which moves with `α`.
        max_steps: at most so many.
        tolerance: converged when `|Δ log α|` (and `|Δ log b|`) is below it for every group.
        precision_bounds: within which `α` is kept.
        noise_bounds: within which `b` is kept.
        progress: show progress bars.
        callback: called with the record of each step.
    """
    check_bounds(precision_bounds, noise_bounds)
    features = model.features
    prior = prior.to(features.device, features.dtype)
    sizes = torch.bincount(prior.groups, minlength=len(prior.names)).cpu()
    network_outputs = model.network_outputs
    mode: Tensor | None = None
    delta: Tensor | None = None
    history: list[EMStep] = []
    bar = tqdm(total=max_steps, desc="EM", disable=not progress)
    while True:
        started = time.perf_counter()
        labels = [f"step {len(history) + 1}: {what}" if progress else None for what in ("mode", "samples")]
        minimum = linear_model_mode(model, prior, solver, mode, description=labels[0])
        mode = minimum.value
        mode_outputs = model.outputs(mode * prior.scale)[0]
        ggn = model.ggn(mode_outputs if hessian_at == "mode" else network_outputs)
        solution = sample_posterior(ggn, prior, draws, solver, init=delta, description=labels[1])
        samples = solution.value * prior.scale
        gamma, gamma_se = (t.cpu() for t in effective_dimension(solution, prior))
        if not solution.exact:
            gamma = _possible(gamma, gamma_se, sizes, 0.99 * network_outputs.numel())
        mode_norm = prior.grouped(mode[0].double() ** 2).cpu()
        updated = prior.mackay_precision(gamma, mode_norm, precision_bounds)
        if not solution.exact:  # samples at a far-off α are too poor to be believed over more than this
            updated = torch.minimum(torch.maximum(updated, prior.precision / _FARTHEST), prior.precision * _FARTHEST)
        updated = prior.with_precision(updated.clamp(*precision_bounds))
        likelihood = _update_noise(model, ggn, samples, gamma, mode_outputs, noise_bounds)
        loss, network_loss = (_total_loss(model, f) for f in (mode_outputs, network_outputs))
        history.append(
            EMStep(
                step=len(history) + 1,
                prior_precision=_floats(prior.precision),
                new_prior_precision=_floats(updated.precision),
                noise_precision=_noise(model.likelihood),
                effective_dimension=_floats(gamma),
                effective_dimension_se=_floats(gamma_se),
                mode_norm=_floats(mode_norm),
                loss=loss,
                network_loss=network_loss,
                mode_residual=minimum.residual,
                sample_residual=float(solution.residual.max()),
                passes=minimum.passes + solution.passes,
                seconds=time.perf_counter() - started,
            )
        )
        if not all(math.isfinite(v) for v in (loss, *history[-1].effective_dimension, *history[-1].mode_norm)):
            raise FloatingPointError(f"An EM step gave a quantity that is not finite: {history[-1]}")
        old = [*_floats(prior.precision), *_noise(model.likelihood)]
        new = [*_floats(updated.precision), *_noise(likelihood)]
        converged = max(abs(math.log(b / a)) for a, b in zip(old, new, strict=True)) < tolerance
        # δ is nearly −θ⁰ where the data determine the weights, and zero where they leave them free: it scales with θ⁰.
        delta = solution.delta * (prior.spread() / updated.spread()).sqrt()
        prior, model = updated, model.with_likelihood(likelihood)
        bar.update()
        bar.set_postfix(alpha=f"{float(prior.precision.mean()):.3g}", gamma=f"{float(gamma.sum()):.3g}")
        if callback is not None:
            callback(history[-1])
        if converged or len(history) >= max_steps:
            break
    bar.close()
    return EMResult(
        prior=prior,
        likelihood=model.likelihood,
        mode=(mode * prior.scale)[0],
        mode_outputs=mode_outputs,
        samples=samples,
        effective_dimension=gamma,
        effective_dimension_se=gamma_se,
        converged=converged,
        history=history,
    )


def check_bounds(precision_bounds: tuple[float, float], noise_bounds: tuple[float, float]) -> None:
    """Raise if bounds are not positive and in order."""
    for name, (low, high) in (("precision_bounds", precision_bounds), ("noise_bounds", noise_bounds)):
        if not 0 < low < high:
            raise ValueError(f"`{name}` must be positive and in order, but is {(low, high)}.")


def _possible(gamma: Tensor, error: Tensor, sizes: Tensor, rows: float) -> Tensor:
    """An estimate of `γ` brought to what is possible: positive, at most `P_g`, and at most `N·C` in all."""
    gamma = torch.maximum(gamma, 0.1 * error.nan_to_num(0)).clamp_min(1e-3)
    gamma = torch.minimum(gamma, sizes)
    return gamma * min(1.0, rows / float(gamma.sum()))


def _update_noise(
    model: LinearModel,
    ggn: GGN,
    samples: Float[Tensor, "K P"],
    gamma: Float[Tensor, " G"],
    mode_outputs: Float[Tensor, "N C"],
    bounds: tuple[float, float],
) -> Likelihood:
    if not (isinstance(model.likelihood, Gaussian) and model.likelihood.learn):
        return model.likelihood
    return model.likelihood.with_precision(noise_update(model, ggn, samples, gamma, mode_outputs).clamp(*bounds))


def _noise(likelihood: Likelihood) -> list[float]:
    return _floats(likelihood.noise_precision) if isinstance(likelihood, Gaussian) else []


def _floats(values: Tensor | float) -> list[float]:
    return [float(v) for v in torch.as_tensor(values).reshape(-1)]


def _total_loss(model: LinearModel, outputs: Float[Tensor, "N C"]) -> float:
    return float(model.likelihood.loss(outputs, model.targets).double().sum())
