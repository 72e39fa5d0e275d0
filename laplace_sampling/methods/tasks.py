"""From the settings of a `LinearisedLaplace` and training data to what is to be fitted, and from a saved fit back."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from laplace_sampling.data.batches import split
from laplace_sampling.data.training_data import Unpack
from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.likelihoods.composite import Weighted
from laplace_sampling.likelihoods.likelihood import Gaussian, Likelihood
from laplace_sampling.linear_model.cost import rows_in_memory
from laplace_sampling.linear_model.factored import FACTORED, prior_of_factored
from laplace_sampling.linear_model.priors import GaussianPrior, Prior
from laplace_sampling.linear_model.sampling import Draws, LinearModel
from laplace_sampling.linear_model.tangent_model import Observation, TangentModel, tangent_model
from laplace_sampling.methods.factored_fit import FactoredFit
from laplace_sampling.methods.fits import Fit, Task
from laplace_sampling.methods.gram_classification import GramClassification
from laplace_sampling.methods.gram_fit import GramFit
from laplace_sampling.methods.gram_regression import GramRegression
from laplace_sampling.methods.plan import Plan, make_plan
from laplace_sampling.methods.solver_fit import SolverFit
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.resources import free_memory
from laplace_sampling.saving import Posterior, decode_inputs, encode_inputs
from laplace_sampling.solvers.sgd import SGD

__all__ = ["DataArguments", "Settings", "exact_tensors", "fit_kind_of", "gram_fit_of", "prepare", "restore_fit"]

_PROBE_STREAM = 1
_MINI_BATCHES = ("sgd", "svrg")
# Bytes that activations of the network may take, however little solvers may.
_LEAST_ACTIVATIONS = 2**26


class Settings(Protocol):
    """What a `LinearisedLaplace` was constructed with."""

    network: Linearisation
    likelihood: Likelihood
    prior: Prior
    prior_precision: float
    linear_model: str
    hessian_at: str
    method: str
    num_samples: int
    seed: int
    solver: SGD | DualCG | None
    max_memory: float | None
    observe: Observation | None


@dataclass(frozen=True)
class DataArguments:
    """Arguments of a fit that say what the data are, as `tangent_model` takes them."""

    loader: Iterable[Any]
    noise_variances: Tensor | None = None
    weights: Tensor | Sequence[float] | None = None
    unpack: Unpack | None = None
    num_data: int | None = None


def prepare(settings: Settings, data: DataArguments, progress: bool) -> tuple[TangentModel, Task]:
    """The linear model on the data of a loader, and how its posterior is to be found."""
    tangent = _within_memory(settings, _tangent(settings, settings.likelihood, data))
    plan = _plan(settings, tangent)
    model = _model(tangent, plan)
    prior = _build_prior(settings, model, plan)
    if plan.method == "exact" and not plan.holds_jacobian and len(prior.names) > 1:
        # The decomposition is for one precision: several are tuned with the Jacobian.
        plan = _plan(settings, tangent, gram=False)
        model = _model(tangent, plan)
    return tangent, _task(settings, model, prior, plan, progress)


def _tangent(settings: Settings, likelihood: Likelihood, data: DataArguments) -> TangentModel:
    return tangent_model(
        settings.network,
        likelihood,
        data.loader,
        kind=settings.linear_model,
        observation=settings.observe,
        noise_variances=data.noise_variances,
        weights=data.weights,
        unpack=data.unpack,
        num_data=data.num_data,
    )


def _within_memory(settings: Settings, tangent: TangentModel) -> TangentModel:
    """The same, with as many data in the network at once as activations have memory for, if the loader has more."""
    features, network = tangent.model.features, settings.network
    network.batching.max_rows = None
    bytes_ = settings.max_memory if settings.max_memory is not None else 0.5 * free_memory(network.device)
    counts = dict(network.products)
    rows = rows_in_memory(features, max(bytes_, _LEAST_ACTIVATIONS), min(settings.num_samples, network.chunk_size))
    network.products.update(counts)
    if rows >= features.batch_size:
        return tangent
    network.batching.max_rows = rows
    return replace(tangent, model=replace(tangent.model, features=features.in_chunks(rows)))


def _plan(settings: Settings, tangent: TangentModel, gram: bool = True) -> Plan:
    def plan(method: str) -> Plan:
        return make_plan(
            method,
            tangent.model.features,
            settings.num_samples,
            settings.max_memory,
            gram=gram,
            dual=isinstance(settings.likelihood, Gaussian),
        )

    found = plan(settings.method)
    if not tangent.in_order or found.method not in _MINI_BATCHES:
        return found
    if settings.method != "auto":
        raise ValueError(
            f'method="{settings.method}" draws mini-batches, but a stream of data that is too large to be kept can be '
            'read in its order only: use method="cg", or a map-style dataset.'
        )
    return replace(plan("cg"), reason="a stream of data is read in its order, in full passes")


def _model(tangent: TangentModel, plan: Plan) -> LinearModel:
    if plan.method != "exact":
        return tangent.model
    return tangent.dense() if plan.holds_jacobian else tangent.in_float64()


def _build_prior(settings: Settings, model: LinearModel, plan: Plan) -> GaussianPrior:
    # At the mode B depends on α; the scale of a g-prior must not, so it is taken where all outputs are zero.
    f = model.network_outputs
    ggn = model.ggn(f if settings.hessian_at == "network" else torch.zeros_like(f))
    if not plan.holds_jacobian:  # a diagonal takes rows of the Jacobian: no more of them than memory holds
        ggn = replace(ggn, features=model.features.in_chunks(int(plan.vectors / (4 * model.features.num_outputs))))
    if plan.method == "kfac":
        return prior_of_factored(
            settings.prior, ggn, settings.network.layers(), settings.prior_precision, settings.seed
        )
    probes = Draws(getattr(settings.prior, "num_probes", 1), settings.seed, _PROBE_STREAM)
    noise = probes.noise(model.features.num_outputs)
    return settings.prior.build(ggn, settings.network.layers(), settings.prior_precision, noise)


def _task(settings: Settings, model: LinearModel, prior: GaussianPrior, plan: Plan, progress: bool) -> Task:
    return Task(
        model=model,
        prior=prior.to(settings.network.device, torch.float64) if plan.method == "exact" else prior,
        plan=plan,
        hessian_at=settings.hessian_at,
        num_samples=settings.num_samples,
        seed=settings.seed,
        dtype=settings.network.dtype,
        given=settings.solver,
        progress=progress,
    )


def gram_fit_of(task: Task) -> type[GramFit]:
    """The exact fit in observation space that the likelihood of a task takes."""
    return GramRegression if isinstance(task.model.likelihood, Gaussian) else GramClassification


def fit_kind_of(task: Task) -> type[SolverFit]:
    """What a solver of a task fits."""
    return FactoredFit if task.plan.method in FACTORED else SolverFit


def exact_tensors(fit: Fit, tangent: TangentModel) -> dict[str, Tensor]:
    """What exact covariances of a loaded posterior need; in observation space that is the training data, too."""
    kept = fit.tensors()
    if not fit.plan.in_observation_space:
        return kept
    inputs = tangent.data.inputs(torch.arange(tangent.data.num_data))
    kept |= {**encode_inputs(inputs), **encode_inputs(tangent.data.targets, "targets")}
    if isinstance(fit.model.likelihood, Weighted):
        kept["weights"] = fit.model.likelihood.weights(fit.model.targets)
    return kept if tangent.weights is None else {**kept, "noise_variances": tangent.weights**-2}


def restore_fit(settings: Settings, posterior: Posterior) -> tuple[Fit, TangentModel] | tuple[None, None]:
    """The fit of a loaded posterior, if it was saved with its training data."""
    kept, rows = posterior.exact, posterior.rows
    if "inputs" not in kept:
        return None, None
    batches = list(zip(split(decode_inputs(kept), rows), split(decode_inputs(kept, "targets"), rows), strict=True))
    data = DataArguments(batches, kept.get("noise_variances"), kept.get("weights"))
    tangent = _tangent(settings, posterior.likelihood, data)
    plan = Plan("exact", "as saved", math.inf, settings.num_samples, space="observations")
    task = _task(settings, tangent.in_float64(), posterior.prior, plan, False)
    return gram_fit_of(task).restore(task, kept), tangent
