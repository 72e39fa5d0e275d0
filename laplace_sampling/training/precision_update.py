r"""One round of MacKay's cycle at the weights of a network: precisions of prior and noise that its evidence asks for.

With the curvature `M̂` of the training loss at the network's outputs, `γ_g = Tr_g((M̂ + A)⁻¹M̂)` is the number of
directions that the data determine among the weights of a group,

    α_g ← γ_g / ‖w̄_g‖²,        b ← (N·C − Σ_g γ_g) / Σ‖y − f(w̄, x)‖²,

where the evidence of the network itself has its maximum, were `γ` what it is now (MacKay 1992; Immer et al. 2021 take
gradient steps of the same evidence). The norms and residuals are those of the network, not of the mode of its linear
model, which is another predictor (`docs/decisions.md`).
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.data.training_data import Unpack
from laplace_sampling.evidence.curves import MarginalLikelihood, Traces
from laplace_sampling.evidence.em import noise_update
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.bounds import NOISE_BOUNDS, PRECISION_BOUNDS, clamped
from laplace_sampling.linear_model.priors.prior import (
    GaussianPrior,
    IsotropicPrior,
    LayerwisePrior,
    Prior,
    overall_precision,
)
from laplace_sampling.methods.fit import Task
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.random_weights import Subset
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.networks.subnetwork import Subnetwork
from laplace_sampling.predictions.covariance_path import FactoredPath
from laplace_sampling.preparation import prepare
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.preconditioners import Factored

_KINDS = ("kfac", "diagonal")
# Samples are not drawn, but `Settings` asks for two.
_SAMPLES = 2


@dataclass(frozen=True)
class PrecisionUpdate:
    """Precisions of prior and noise after a round of MacKay's cycle. Vectors have one entry a group of the prior.

    Attributes:
        prior: with the new precisions, for the next round, or for a `LinearisedLaplace`.
        likelihood: with the new noise precision, likewise.
        names: of the groups: layers, or `"all"`.
        prior_precision: `α`, `[G]`, in units of the sum of losses over the data.
        noise_precision: `b`, of a regression; else `None`.
        effective_dimension: `γ`, `[G]`, at the precisions before.
        weight_norm: `‖w̄_g‖²`, `[G]`.
        log_marginal_likelihood: `log p(y)` at the network's weights and the new precisions, a sum over the data.
        weight_decay: `λ` of each parameter by its name, for a loss `(mean + ½ Σ λ‖w‖²)`: `α/N`, and for a regression
            `α/(N b)`, with half the squared error as its loss.
        passes: Jacobian products, in units of all data and one vector.
        seconds: wall time.
    """

    prior: Prior
    likelihood: Likelihood
    names: tuple[str, ...]
    prior_precision: Float[Tensor, " G"]
    noise_precision: float | None
    effective_dimension: Float[Tensor, " G"]
    weight_norm: Float[Tensor, " G"]
    log_marginal_likelihood: MarginalLikelihood
    weight_decay: dict[str, float]
    passes: float
    seconds: float


@solver_call
def updated_precisions(
    model: nn.Module,
    likelihood: str | Likelihood,
    loader: Iterable[Any],
    *,
    prior: str | Prior = "layerwise",
    parameters: Subset = None,
    method: str | Method = "kfac",
    seed: int = 0,
    unpack: Unpack | None = None,
    num_data: int | None = None,
) -> PrecisionUpdate:
    r"""A round of MacKay's cycle at the weights that a network has now, for a training loop of one's own.

    `α_g ← γ_g / ‖w̄_g‖²`, and for a regression `b ← (N·C − γ) / Σ(y − f)²`. Give the `prior` and the `likelihood` of
    the last update to the next one, and train with its `weight_decay`; `train_by_evidence` is such a loop. The model is
    not changed. It takes a forward pass of all data and, of Kronecker factors, gradients of some 3,000.

    Args:
        model: the network.
        likelihood: as of `LinearisedLaplace`.
        loader: the training data, without random augmentation.
        prior: `"layerwise"`, `"isotropic"`, or one of these with its precisions, which are those before.
        parameters: which weights have the prior; all trainable ones by default.
        method: of the curvature, `"kfac"`, `"diagonal"`, or a `Factored` with settings of its own.
        seed: of random outputs and data that stand for all.
        unpack: for batches that are no pairs, `batch -> (inputs, targets)`.
        num_data: of an `IterableDataset`.

    Raises:
        TypeError, ValueError: for settings that do not go together, and for data that do not fit the model.
    """
    settings = settings_of(likelihood, prior, parameters, method, seed)
    network = linearised(settings, model)
    return update_at(task_of(settings, network, loader, unpack=unpack, num_data=num_data), network, settings)


def settings_of(likelihood: Any, prior: Any, parameters: Subset, method: Any, seed: int) -> Settings:
    """The settings of a training by the evidence, checked."""
    # The mode of the linear model is not needed, and so no offset.
    settings = Settings.of(
        likelihood,
        prior=prior,
        parameters=parameters,
        method=method,
        num_samples=_SAMPLES,
        seed=seed,
        linear_model="homogeneous",
    )
    if settings.method.name not in _KINDS:
        raise ValueError(
            f'Training by the evidence takes curvature in closed form, method="kfac" or "diagonal" or a `Factored` of '
            f"these kinds, but the method is {settings.method.name!r}."
        )
    if not isinstance(settings.prior, IsotropicPrior | LayerwisePrior):
        raise ValueError(
            "Training by the evidence takes a prior whose variances do not depend on the curvature, which moves with "
            f'the weights: "layerwise" or "isotropic", but the prior is a {type(settings.prior).__name__}.'
        )
    if settings.observation is not None:
        raise ValueError(
            "Training by the evidence is of the outputs of the network: put the operator of `Gaussian(observe=...)` "
            "into the model."
        )
    noise = settings.likelihood.noise_precisions()
    if settings.likelihood.learns_noise and noise is not None and noise.dim():
        raise ValueError(
            f"Training by the evidence learns one noise precision for all outputs, but `Gaussian` has {len(noise)}: "
            "give one number, or `learn=False`."
        )
    return settings


def linearised(settings: Settings, model: nn.Module) -> Linearisation:
    """The network with whole random weights."""
    network = settings.linearise(model)
    if isinstance(network, Subnetwork):
        raise ValueError(
            "Training by the evidence takes whole parameters: give their names as `parameters=`, not masks."
        )
    return network


def task_of(settings: Settings, network: Linearisation, loader: Iterable[Any], **data: Any) -> Task:
    """The linear model at the weights of now, with the precisions of the settings."""
    return settings.method.prepare(prepare(settings, network, loader, **data))


def weight_decay_of(
    prior: GaussianPrior, likelihood: Likelihood, network: Linearisation, num_data: int
) -> dict[str, float]:
    """`λ = α/(N b)` of each random parameter, `b = 1` but for a regression."""
    unit = num_data * loss_unit(likelihood)
    first = [int(part[0]) for part in prior.groups.split(network.shell.sizes)]
    alphas = prior.precision.tolist()
    return {name: alphas[group] / unit for name, group in zip(network.names, first, strict=True)}


def loss_unit(likelihood: Likelihood) -> float:
    """By what the loss is divided: the noise precision of a regression, which step sizes must not grow with."""
    noise = likelihood.noise_precisions()
    return 1.0 if noise is None else float(noise.mean())


def update_at(task: Task, network: Linearisation, settings: Settings) -> PrecisionUpdate:
    """The update at the weights of a task."""
    started = time.perf_counter()
    path, prior = settings.method.covariance_path(task), task.prior
    assert isinstance(path, FactoredPath)
    curvature = path.curvature
    assert isinstance(curvature, Factored)
    gamma = prior.grouped(curvature.leverage(prior.spread())).cpu()
    norm = prior.grouped(task.trained_weights.double()[None] ** 2)[0].cpu()
    new_prior = prior.with_precision(prior.mackay_precision(gamma, norm, PRECISION_BOUNDS))
    likelihood = _with_noise(task, gamma)
    new_task = replace(task, prior=new_prior, model=task.model.with_likelihood(likelihood))
    noise = likelihood.noise_precisions()
    learnt = likelihood is not task.model.likelihood
    return PrecisionUpdate(
        prior=_recipe(settings.prior, new_prior),
        likelihood=likelihood if learnt else settings.likelihood,
        names=prior.names,
        prior_precision=new_prior.precision,
        noise_precision=None if noise is None or noise.dim() else float(noise),
        effective_dimension=gamma,
        weight_norm=norm,
        log_marginal_likelihood=_evidence(new_task, curvature, loss_unit(task.model.likelihood), norm),
        weight_decay=weight_decay_of(new_prior, likelihood, network, task.model.features.num_data),
        passes=curvature.passes,
        seconds=time.perf_counter() - started,
    )


def _with_noise(task: Task, gamma: Float[Tensor, " G"]) -> Likelihood:
    """The likelihood with the noise precision that the residuals of the network ask for, if it is learnt."""
    likelihood = task.model.likelihood
    if not (isinstance(likelihood, Gaussian) and likelihood.learn):
        return likelihood
    # One precision for all outputs takes no samples.
    found = noise_update(task.model, gamma)
    return likelihood.with_precision(clamped(float(found), NOISE_BOUNDS))


def _recipe(prior: Prior, built: GaussianPrior) -> Prior:
    """The prior that a user would give for these precisions."""
    if isinstance(prior, LayerwisePrior):
        return replace(prior, layers=dict(zip(built.names, built.precision.tolist(), strict=True)))
    return replace(prior, precision=float(built.precision))


def _evidence(task: Task, curvature: Factored, noise_before: float, norm: Float[Tensor, " G"]) -> MarginalLikelihood:
    """The evidence at the network's weights, with the precisions of a task; the curvature is that of another noise."""
    alpha, model = overall_precision(task.prior), task.model
    # `M̂` of a regression is proportional to its noise precision.
    ratio = loss_unit(model.likelihood) / noise_before
    even = (ratio * alpha / task.prior.spread()).sqrt()
    loss, energy = model.total_loss(model.network_outputs.double()), float((task.prior.precision * norm).sum())
    traces = Traces.of_eigenvalues(curvature.congruent(even).eigenvalues(), alpha)
    return MarginalLikelihood.of(traces, alpha, loss, energy, "network")
