r"""Training by the evidence: weight decay and noise follow the weights that are trained with them.

Algorithm 1 of Immer, Bauer, Fortuin, Rätsch and Khan (ICML 2021), with MacKay's updates in place of gradient steps.
With the curvature `M̂` of the training loss at the network's outputs, `γ_g = Tr_g((M̂ + A)⁻¹M̂)` is the number of
directions that the data determine among the weights of a group,

    α_g ← γ_g / ‖w̄_g‖²,        b ← (N·C − Σ_g γ_g) / Σ‖y − f(w̄, x)‖²,

where the evidence of the network itself has its maximum, were `γ` what it is now (MacKay 1992). The norms and residuals
are those of the network, not of the mode of its linear model, which is another predictor (`docs/design.md`).
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from laplace_sampling.arguments import check_whole
from laplace_sampling.data.batches import arguments, num_rows, place, read
from laplace_sampling.data.training_data import Data, unpacking
from laplace_sampling.hyperparameters.covariance_path import FactoredPath
from laplace_sampling.hyperparameters.curves import MarginalLikelihood, Traces
from laplace_sampling.hyperparameters.em import noise_update
from laplace_sampling.hyperparameters.hyperparameters import NOISE_BOUNDS, PRECISION_BOUNDS, clamped
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.priors.prior import (
    GaussianPrior,
    IsotropicPrior,
    LayerwisePrior,
    Prior,
    overall_precision,
)
from laplace_sampling.methods.method import Method, Task
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.random_weights import Subnetwork, Subset
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.preparation import prepare
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.preconditioners import Curvature
from laplace_sampling.solvers.solver import progress_bar

_NO_DATA = Data()


@dataclass(frozen=True)
class PrecisionUpdate:
    """Precisions of prior and noise after a round of MacKay's cycle. Vectors have an entry for each group of the prior.

    Attributes:
        prior: the prior with the new precisions, for the next round, or for a `LinearisedLaplace`.
        likelihood: the likelihood with the new noise precision.
        names: the names of the groups: layers, or `"all"`.
        prior_precision: `α`, `[G]`, in units of the sum of losses over the data.
        noise_precision: `b` of a regression with one noise precision for all outputs; else `None`.
        effective_dimension: `γ`, `[G]`, at the earlier precisions.
        weight_norm: `‖w̄_g‖²`, `[G]`.
        log_marginal_likelihood: `log p(y)` at the network's weights and the new precisions, a sum over the data.
        weight_decay: `λ` of each parameter by its name, for a loss `(mean + ½ Σ λ‖w‖²)`: `α/N`, and for a regression
            `α/(N b)`, with half the squared error as its loss; `b` is the mean where outputs have fixed precisions.
        passes: Jacobian products, in units of all data and one vector.
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
    data: Data = _NO_DATA,
) -> PrecisionUpdate:
    r"""A round of MacKay's cycle at the present weights of a network, for a training loop of your own.

    `α_g ← γ_g / ‖w̄_g‖²`, and for a regression `b ← (N·C − γ) / Σ(y − f)²`. Give the `prior` and the `likelihood` of
    the last update to the next one, and train with its `weight_decay`; `train_by_evidence` is such a loop. The model is
    not changed. It takes a forward pass of all data, and with Kronecker factors about 3,000 gradients.

    Args:
        model: the network.
        likelihood: as in `LinearisedLaplace`.
        loader: the training data, without random augmentation.
        prior: `"layerwise"`, `"isotropic"`, or one of these with its precisions of the last update.
        parameters: the weights that have the prior; all trainable ones by default.
        method: the kind of curvature: `"kfac"`, `"diagonal"`, or a `Factored` with settings of its own.
        seed: the seed of random outputs and data that represent all.
        data: how to unpack the batches of the loader, and the number of data of an `IterableDataset`.

    Raises:
        TypeError, ValueError: for settings that do not go together, and for data that do not fit the model.
    """
    settings = _settings_of(likelihood, prior, parameters, method, seed)
    network = _linearised(settings, model)
    task = settings.method.prepare(prepare(settings, network, loader, data))
    return _update_at(task, network, settings)


@dataclass(frozen=True)
class TrainedByEvidence:
    """What `train_by_evidence` found; the model has the weights of `best_epoch_`.

    Attributes:
        history_: the updates, one for each of `epochs_`.
        epochs_: the epochs, counted from 1, after which precisions were updated.
        best_epoch_: the epoch of the largest evidence.
    """

    history_: list[PrecisionUpdate]
    epochs_: list[int]
    best_epoch_: int

    @property
    def best_(self) -> PrecisionUpdate:
        """The update of largest evidence."""
        return self.history_[self.epochs_.index(self.best_epoch_)]


def train_by_evidence(
    model: nn.Module,
    likelihood: str | Likelihood | Mapping[str, str | Likelihood],
    loader: Iterable[Any],
    optimiser: Optimizer,
    *,
    epochs: int,
    every: int = 5,
    prior: str | Prior = "layerwise",
    parameters: Subset = None,
    method: str | Method = "kfac",
    seed: int = 0,
    scheduler: LRScheduler | None = None,
    evidence_loader: Iterable[Any] | None = None,
    data: Data = _NO_DATA,
    progress: bool = True,
    callback: Callable[[int, PrecisionUpdate], object] | None = None,
) -> TrainedByEvidence:
    r"""Train with a weight decay for each layer that the evidence finds, for networks that overfit without one.

    It needs no validation data; where there are some, they are the better judge. The evidence charges for each
    direction that the data determine, and takes more decay than test data ask for. So it helps if training without
    decay fits the training data far better than other data. Otherwise it does harm, as with few epochs, small steps or
    clean labels (figures in `docs/training.md`).

    **This function trains the model**, unlike all others of this library. Its loss is

        (1/n) Σ_batch ℓ(y_i, f(w, x_i)) + ½ Σ_g (α_g/N) ‖w_g‖²,

    `1/N` of the negative log joint density. For a regression it is divided by the noise precision `b`, so that step
    sizes keep their meaning: half the squared error, with the decay `α_g/(N b)`. Every few epochs, `α_g ← γ_g/‖w_g‖²`
    and `b ← (N·C − γ)/Σ(y − f)²`, with the curvature at the present weights (`updated_precisions`; MacKay 1992). The
    weights are kept if their evidence is the largest so far. At the end, also after an error or Ctrl-C, the model has
    the weights and buffers of the largest evidence, and its earlier modes.

    For a small network and 10,000 data an update takes about as long as an epoch, for more data less: it takes a
    forward pass of all data in evaluation mode, and about 3,000 gradients.

    Args:
        model: the network, which is trained in place. Normalisations use the statistics of batches in training, and the
            running ones in updates. Their weights have a precision like those of any other layer. Parts in evaluation
            mode stay so, unless the whole model is in evaluation mode; then it is put into training mode.
        likelihood: as in `LinearisedLaplace`. The noise precision of a `Gaussian` is the starting value.
        loader: batches of training data, as in `fit_hyperparameters`.
        optimiser: the optimiser of the model's parameters, without a weight decay of its own.
        epochs: the number of epochs.
        every: epochs between updates, and before the first one: weights that have not grown yet ask for too much
            decay. The last epoch always ends with an update.
        prior: `"layerwise"`, `"isotropic"`, or one of these with the precisions to start from.
        parameters: the weights that have the prior, and so weight decay: names, globs (`"!*Norm*.*"`) or a predicate;
            all trainable ones by default. The others are trained without decay.
        method: the kind of curvature: `"kfac"`, `"diagonal"`, or a `Factored` with settings of its own.
        seed: the seed of random outputs and data that represent all in an update. The order of batches is the loader's.
        scheduler: a scheduler of the step size. `scheduler.step()` is called after each epoch.
        evidence_loader: these data without random augmentation, if `loader` has some.
        data: how to unpack the batches of the loader, and the number of data of an `IterableDataset`.
        progress: show a progress bar.
        callback: called with the epoch and the `PrecisionUpdate` after each update.

    Raises:
        TypeError, ValueError: before training, for settings that are not known or do not go together, for an optimiser
            with a weight decay or of other parameters, and for data that do not fit the model; later, for weights that
            have become NaN.

    Example:
        >>> import torch
        >>> from laplace_sampling.training.train_by_evidence import train_by_evidence
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> y = x + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
        >>> result = train_by_evidence(model, "regression", [(x, y)], optimiser, epochs=300, every=20, progress=False)
        >>> round(result.best_.noise_precision ** -0.5, 1)
        0.1
    """
    for name, value in (("epochs", epochs), ("every", every)):
        check_whole(f"`train_by_evidence({name}=...)`", value, 1)
    settings = _settings_of(likelihood, prior, parameters, method, seed)
    network = _linearised(settings, model)
    _check_optimiser(optimiser, network)
    data.check("train_by_evidence", "unpack", "num_data")
    fixed_loader = loader if evidence_loader is None else evidence_loader
    # All that may be wrong is found before anything is trained.
    task = settings.method.prepare(prepare(settings, network, fixed_loader, data))
    decay = _weight_decay_of(task.prior, task.model.likelihood, network, task.model.features.num_data)
    modes = [(part, part.training) for part in model.modules()]
    fixed = [part for part, is_training in modes if model.training and not is_training]
    history, at, best, kept = list[PrecisionUpdate](), list[int](), -torch.inf, None
    best_epoch, unpacked = 0, unpacking(data.unpack)
    try:
        for epoch in progress_bar("training by the evidence" if progress else None, range(1, epochs + 1)):
            model.train()
            for part in fixed:
                part.training = False
            for batch in loader:
                x, y = (place(part, network.device, network.dtype) for part in unpacked(batch))
                _step(model, network, optimiser, x, y, settings.likelihood, decay)
            if scheduler is not None:
                scheduler.step()
            if epoch != epochs and epoch % every:
                continue
            network = network.renewed()
            update = _update_at(
                settings.method.prepare(prepare(settings, network, fixed_loader, data)), network, settings
            )
            settings, decay = replace(settings, prior=update.prior, likelihood=update.likelihood), update.weight_decay
            history.append(update)
            at.append(epoch)
            if kept is None or update.log_marginal_likelihood.value > best:
                best, best_epoch = update.log_marginal_likelihood.value, epoch
                kept = copy.deepcopy(model.state_dict())
            if callback is not None:
                callback(epoch, update)
    finally:
        if kept is not None:
            model.load_state_dict(kept)
        for part, is_training in modes:
            part.training = is_training
    return TrainedByEvidence(history, at, best_epoch)


def _step(
    model: nn.Module,
    network: Linearisation,
    optimiser: Optimizer,
    x: Any,
    y: Any,
    likelihood: Likelihood,
    decay: dict[str, float],
) -> None:
    """A step of the optimiser, which may ask for the loss and its gradient more than once."""
    weights, (args, kwargs) = dict(network.source.named_parameters()), arguments(x)

    def closure() -> Any:
        optimiser.zero_grad()
        output, layout = read(model(*args, **kwargs), num_rows(x))
        of_outputs, targets = likelihood.prepare(layout, y, some_given=False)
        loss = of_outputs.loss(output.reshape(len(output), -1), targets).mean() / _loss_unit(likelihood)
        loss = loss + 0.5 * sum(value * weights[name].square().sum() for name, value in decay.items())
        loss.backward()
        return loss.detach()

    optimiser.step(closure)


def _settings_of(likelihood: Any, prior: Any, parameters: Subset, method: Any, seed: int) -> Settings:
    """The settings of a training by the evidence, checked."""
    # The mode of the linear model is not needed, and so no offset.
    settings = Settings.of(
        likelihood,
        prior=prior,
        parameters=parameters,
        method=method,
        num_samples=2,  # none are drawn, but `Settings` asks for two
        seed=seed,
        linear_model="homogeneous",
    )
    if settings.method.name not in ("kfac", "diagonal"):
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


def _linearised(settings: Settings, model: nn.Module) -> Linearisation:
    """The network with whole random weights."""
    network = settings.linearise(model)
    if isinstance(network, Subnetwork):
        raise ValueError(
            "Training by the evidence takes whole parameters: give their names as `parameters=`, not masks."
        )
    return network


def _weight_decay_of(
    prior: GaussianPrior, likelihood: Likelihood, network: Linearisation, num_data: int
) -> dict[str, float]:
    """`λ = α/(N b)` of each random parameter; `b = 1` if the likelihood is no regression."""
    unit = num_data * _loss_unit(likelihood)
    first = [int(part[0]) for part in prior.groups.split(network.shell.sizes)]
    alphas = prior.precision.tolist()
    return {name: alphas[group] / unit for name, group in zip(network.names, first, strict=True)}


def _loss_unit(likelihood: Likelihood) -> float:
    """By what the loss is divided: the noise precision of a regression, which step sizes must not grow with."""
    noise = likelihood.noise_precisions()
    return 1.0 if noise is None else float(noise.mean())


def _update_at(task: Task, network: Linearisation, settings: Settings) -> PrecisionUpdate:
    """The update at the weights of a task."""
    path, prior = settings.method.covariance_path(task), task.prior
    assert isinstance(path, FactoredPath)
    curvature = path.curvature
    assert isinstance(curvature, Curvature)
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
        log_marginal_likelihood=_evidence(new_task, curvature, _loss_unit(task.model.likelihood), norm),
        weight_decay=_weight_decay_of(new_prior, likelihood, network, task.model.features.num_data),
        passes=curvature.passes,
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


def _evidence(task: Task, curvature: Curvature, noise_before: float, norm: Float[Tensor, " G"]) -> MarginalLikelihood:
    """The evidence at the network's weights, with the precisions of a task; the curvature is that of another noise."""
    alpha, model = overall_precision(task.prior), task.model
    # `M̂` of a regression is proportional to its noise precision.
    ratio = _loss_unit(model.likelihood) / noise_before
    even = (ratio * alpha / task.prior.spread()).sqrt()
    loss, energy = model.total_loss(model.network_outputs.double()), float((task.prior.precision * norm).sum())
    traces = Traces.of_eigenvalues(curvature.congruent(even).eigenvalues(), alpha)
    return MarginalLikelihood.of(traces, alpha, loss, energy, "network")


def _check_optimiser(optimiser: Optimizer, network: Linearisation) -> None:
    """Raise if the optimiser would not train the network by the loss with the decay of the evidence alone."""
    if decays := sorted({group["weight_decay"] for group in optimiser.param_groups if group.get("weight_decay")}):
        raise ValueError(
            f"The optimiser has weight_decay={', '.join(f'{decay:g}' for decay in decays)} (AdamW has one by default), "
            "and the decay that the evidence finds would come on top: give `weight_decay=0`; "
            "`prior=LayerwisePrior(precision=weight_decay * N)` starts there."
        )
    held = {id(p) for group in optimiser.param_groups for p in group["params"]}
    parameters = dict(network.source.named_parameters())
    if missing := [name for name in network.names if id(parameters[name]) not in held]:
        raise ValueError(
            f"The optimiser does not have {len(missing)} of the parameters that get a prior, {missing[:4]}: make it of "
            "`model.parameters()`, or leave these out by `parameters=`."
        )
