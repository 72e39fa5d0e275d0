"""From a loader of training data to the problem that a method solves, and from a saved posterior back to its fit."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.arguments import check_flag, check_positive
from laplace_sampling.data.batches import split
from laplace_sampling.data.training_data import Data
from laplace_sampling.hyperparameters.filters import MOST_ROWS, FoundFilters, find_filters
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.cost import Cost, measure, rows_in_memory
from laplace_sampling.linear_model.features import NetworkFeatures
from laplace_sampling.linear_model.held_out import HeldOut, check_calibration
from laplace_sampling.linear_model.linear_model import TangentModel, tangent_model_of
from laplace_sampling.linear_model.priors.filterwise import FilterwisePrior
from laplace_sampling.methods.method import Fit
from laplace_sampling.methods.problem import Budget, Problem, holds_rows
from laplace_sampling.networks.filters import FilterNetwork
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.memory import free_memory
from laplace_sampling.posterior import Posterior
from laplace_sampling.settings import Settings

# Bytes that activations of the network may take at least, where solvers may take less: small networks need no pieces.
_LEAST_ACTIVATIONS = 2**26


def prepare(
    settings: Settings,
    network: Linearisation,
    loader: Iterable[Any],
    data: Data,
    *,
    budget: float | None = None,
    progress: bool = False,
) -> Problem:
    """The problem on the data of a loader.

    Args:
        settings: of the `LinearisedLaplace`.
        network: the linearised network.
        loader: of training data.
        data: what the loader does not say.
        budget: training epochs that the fit may take.
        progress: whether progress bars are shown.

    Raises:
        TypeError, ValueError: for data that do not fit the model or the likelihood, or that cannot be read twice.
    """
    check_flag("`progress`", progress)
    if budget is not None:
        check_positive("`budget`", budget)
    _check_alike(settings, network)
    if settings.observation is not None:
        settings.likelihood.noise_precisions()  # raises if it is not given
    tangent = tangent_of(settings, network, settings.likelihood, loader, data)
    tangent = _within_memory(settings, network, tangent)
    problem = problem_of(settings, network, tangent, progress)
    cost, num_data = _cost(network, tangent), problem.features.num_data
    if problem.measured:
        cost = replace(cost, measurements=problem.features.num_outputs)
    allowance = Budget(budget, cost, num_data, network.products)
    # All data have been through the network once, which is about a third of a gradient.
    allowance.add(num_data * cost.gradient / 3)
    return replace(problem, cost=cost, budget=allowance)


def prepare_with_held_out(
    settings: Settings,
    network: Linearisation,
    loader: Iterable[Any],
    val_loader: Iterable[Any] | None,
    data: Data,
    *,
    budget: float | None,
    progress: bool,
) -> tuple[Problem, HeldOut | None]:
    """The problem on the data of a loader, and held-out data if there are any."""
    if val_loader is not None:
        check_calibration("val_loader", settings.observation, data.noise_variances is not None)
    problem = prepare(settings, network, loader, data, budget=budget, progress=progress)
    unpack = Data(unpack=data.unpack)
    return problem, None if val_loader is None else HeldOut.read(
        val_loader, network, settings.likelihood, settings.processes, unpack
    )


def _check_alike(settings: Settings, network: Linearisation) -> None:
    """Raises if processes would come to other numbers, and so wait for each other."""
    if network.shell.mesh is not None:
        network.fingerprint()  # raises if buffers differ
    if settings.processes.size == 1:
        return
    here = {
        "the weights or buffers of the model": network.fingerprint().tolist(),
        "`seed`": settings.seed,
        "`num_samples`": settings.num_samples,
        "`method`": settings.method.name,
        "the version of torch": torch.__version__,
        "the number of threads": torch.get_num_threads(),
    }
    if other := settings.processes.differing(here):
        raise ValueError(
            f"The processes that share a fit differ in {', '.join(other)}. Give each the same: weights and buffers by "
            "`torch.distributed.broadcast` (`DistributedDataParallel` sends the buffers of the first process only "
            "before a forward pass of training), threads by `OMP_NUM_THREADS` or `torch.set_num_threads`."
        )


def _cost(network: Linearisation, tangent: TangentModel) -> Cost:
    """What products of the network take, and a gradient of all its trainable weights."""
    trained = [n for n, p in network.source.named_parameters() if p.requires_grad and p.is_floating_point()]
    whole = network.with_names(trained or network.names)
    features, counts = NetworkFeatures(whole, tangent.data, tangent.layout), dict(network.products)

    def gradient(batch: Tensor) -> None:
        others, passes = whole.names != network.names, 3  # a backward pass counts as two forward ones
        # Weights that processes share out would all be whole at once.
        if network.shell.mesh is None or not others:
            u = torch.ones(1, len(batch), features.num_outputs, dtype=network.dtype, device=network.device)
            try:
                features.vjp(u, batch)
                return
            except (RuntimeError, ValueError, TypeError):
                if not others:
                    raise
                passes = 2  # other weights need not be differentiable, and the forward pass has been counted
        for _ in range(passes):
            features.network(features.inputs(batch)[0])

    everything = type(network) is Linearisation and network.num_parameters == whole.num_parameters
    cost = measure(tangent.model.features, None if everything else gradient)
    network.products.update(counts)
    return cost


def tangent_of(
    settings: Settings, network: Linearisation, likelihood: Likelihood, loader: Iterable[Any], data: Data
) -> TangentModel:
    """The tangent model on the data of a loader."""
    return tangent_model_of(
        network,
        likelihood,
        loader,
        kind=settings.linear_model,
        observation=getattr(likelihood, "observe", None),
        options=Data(**Data.fields(data)),
        processes=settings.processes,
    )


def problem_of(settings: Settings, network: Linearisation, tangent: TangentModel, progress: bool) -> Problem:
    """What is asked of the posterior of a tangent model."""
    return Problem(
        tangent=tangent,
        family=settings.prior,
        layers=network.layers,
        num_samples=settings.num_samples,
        seed=settings.seed,
        dtype=network.dtype,
        progress=progress,
        free_bytes=_half_of_free(settings, network),
    )


def _half_of_free(settings: Settings, network: Linearisation) -> float:
    """Half of the free memory, in bytes, of the process that has least: all take the same decisions."""
    return 0.5 * network.shell.least(settings.processes.least(free_memory(network.device)))


def _within_memory(settings: Settings, network: Linearisation, tangent: TangentModel) -> TangentModel:
    """Lowers the number of data that go through the network at once to what activations have memory for."""
    features, max_memory = tangent.model.features, settings.method.max_memory
    network.batching.max_rows = None
    bytes_ = max_memory if max_memory is not None else _half_of_free(settings, network)
    counts = dict(network.products)
    bytes_, vectors = max(bytes_, _LEAST_ACTIVATIONS), min(settings.num_samples, network.batching.chunk_size)
    rows = rows_in_memory(features, bytes_, vectors)
    network.products.update(counts)
    if rows >= features.batch_size:
        return tangent
    network.batching.max_rows = rows
    return replace(tangent, model=replace(tangent.model, features=features.in_chunks(rows)))


def with_filters(problem: Problem) -> tuple[Problem, FoundFilters | None]:
    """The problem with lengthscales and variances of filters by the evidence, where a prior has these and it is known.

    Raises:
        ValueError: if it is not known, but a penalty of the total variation is asked for.
    """
    prior, tangent, likelihood = problem.family, problem.tangent, problem.tangent.model.likelihood
    if not isinstance(prior, FilterwisePrior):
        return problem, None
    assert isinstance(tangent.network, FilterNetwork)
    memory, num = problem.memory_of(None), problem.num_observations
    matrices = sum(len(of.squared_distances().unique()) for of in tangent.network.filters)
    held = 8 * matrices * num**2 <= memory.bytes and holds_rows(problem.features, memory)
    one_noise = isinstance(likelihood, Gaussian) and not (likelihood.learn and likelihood.noise_precisions().dim())
    if not (problem.selection is None and one_noise and num <= MOST_ROWS and held):
        if prior.total_variation is None:
            return problem, None
        raise ValueError(
            "`FilterwisePrior(total_variation=...)` is added to the evidence of a regression with one noise precision "
            f"and at most {MOST_ROWS:,} observations whose rows memory holds, and there are {num:,}. Leave it out, and "
            "give `lengthscales`."
        )
    tangent.network.take({})  # the filters are those of the network itself
    bounds = problem.criterion.precision_bounds, problem.criterion.noise_bounds
    found = find_filters(tangent, prior, *bounds)
    found.prior.place(tangent.network)
    return replace(problem, family=found.prior), found


def restore_fit(
    settings: Settings, network: Linearisation, posterior: Posterior
) -> tuple[Fit, TangentModel] | tuple[None, None]:
    """The fit of a loaded posterior, if it was saved with its training data."""
    kept, rows = posterior.exact, posterior.rows
    if "inputs" not in kept:
        return None, None
    batches = list(zip(split(kept["inputs"], rows), split(kept["targets"], rows), strict=True))
    data = Data(noise_variances=kept.get("noise_variances"), weights=kept.get("weights"))
    tangent = tangent_of(settings, network, posterior.likelihood, batches, data)
    problem = problem_of(settings, network, tangent, progress=False)
    return posterior.method.restore(problem, posterior.prior, kept), tangent
