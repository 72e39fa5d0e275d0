r"""Training by the evidence: weight decay and noise follow the weights that are trained with them.

Algorithm 1 of Immer, Bauer, Fortuin, Rätsch and Khan (ICML 2021), with MacKay's updates in place of gradient steps.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from laplace_sampling.data.batches import arguments, num_rows, place, read
from laplace_sampling.data.sources import unpacking
from laplace_sampling.data.training_data import Unpack
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.random_weights import Subset
from laplace_sampling.solvers.checks import check_flag, check_whole
from laplace_sampling.solvers.progress import progress_bar
from laplace_sampling.training.precision_update import (
    PrecisionUpdate,
    linearised,
    loss_unit,
    settings_of,
    task_of,
    update_at,
    weight_decay_of,
)

_SCHEDULES = ("epoch", "batch")


@dataclass(frozen=True)
class TrainedByEvidence:
    """What `train_by_evidence` found; the model has the weights of `best_epoch_`.

    Attributes:
        history_: the update after each of `epochs_`.
        epochs_: epochs, counted from 1, after which precisions were updated.
        best_epoch_: that of the largest evidence.
    """

    history_: list[PrecisionUpdate] = field(default_factory=list)
    epochs_: list[int] = field(default_factory=list)
    best_epoch_: int = 0

    @property
    def best_(self) -> PrecisionUpdate:
        """The update of largest evidence."""
        return self.history_[self.epochs_.index(self.best_epoch_)]

    @property
    def prior_precision_(self) -> Float[Tensor, " G"]:
        """`α`, `[G]`, one a layer, in units of the sum of losses over the data."""
        return self.best_.prior_precision

    @property
    def noise_precision_(self) -> float | None:
        """`1/σ²`; `None` unless it is a regression with one noise precision."""
        return self.best_.noise_precision

    @property
    def effective_dimension_(self) -> Float[Tensor, " G"]:
        """`γ`, `[G]`: how many directions of weight space the data determine."""
        return self.best_.effective_dimension

    @property
    def log_marginal_likelihood_(self) -> float:
        """`log p(y)` at the weights of the network, a sum over the data."""
        return self.best_.log_marginal_likelihood.value

    @property
    def prior_(self) -> Prior:
        """The prior with these precisions, for a `LinearisedLaplace`."""
        return self.best_.prior

    @property
    def likelihood_(self) -> Likelihood:
        """The likelihood with the noise precision, likewise."""
        return self.best_.likelihood


def train_by_evidence(
    model: nn.Module,
    likelihood: str | Likelihood | Mapping[str, str | Likelihood],
    loader: Iterable[Any],
    optimiser: Optimizer,
    *,
    epochs: int,
    burn_in: int | None = None,
    every: int = 5,
    prior: str | Prior = "layerwise",
    parameters: Subset = None,
    method: str | Method = "kfac",
    seed: int = 0,
    scheduler: LRScheduler | None = None,
    schedule: str = "epoch",
    evidence_loader: Iterable[Any] | None = None,
    unpack: Unpack | None = None,
    num_data: int | None = None,
    progress: bool = True,
    callback: Callable[[int, PrecisionUpdate], object] | None = None,
) -> TrainedByEvidence:
    r"""Trains with a weight decay for each layer that the evidence finds, for networks that overfit without one.

    No validation data are needed, and where there are some they are the better judge: the evidence charges for each
    direction that the data determine, and takes more decay than test data ask for. So it helps where training without
    decay fits the training data far better than others, and costs where it does not, as of few epochs, small steps or
    clean labels (figures in `docs/decisions.md`).

    **This function trains the model**, unlike all others of this library. Its loss is

        (1/n) Σ_batch ℓ(y_i, f(w, x_i)) + ½ Σ_g (α_g/N) ‖w_g‖²,

    `1/N` of the negative log joint density, and for a regression divided by the noise precision `b`, so that step sizes
    keep their meaning: half the squared error, with the decay `α_g/(N b)`. After some epochs, `α_g ← γ_g/‖w_g‖²` and
    `b ← (N·C − γ)/Σ(y − f)²`, with the curvature at the weights of now (`updated_precisions`; MacKay 1992), and the
    weights are kept if the evidence at them is the largest so far. At the end, also after an error or Ctrl-C, the model
    has the weights and buffers of the largest evidence. Its modes are put back.

    An update takes about as long as an epoch of a small network and 10,000 data, less of more: it takes a forward pass
    of all data in evaluation mode, and gradients of some 3,000.

    Args:
        model: the network, which is trained in place. Normalisations work with the statistics of batches in training,
            and with running ones in updates; weights of theirs have a precision like those of any other layer. Parts
            that are in evaluation mode stay so; a model that is so as a whole is put into training mode.
        likelihood: as of `LinearisedLaplace`; the noise precision of a `Gaussian` is where it starts.
        loader: batches of training data, as of `fit_hyperparameters`.
        optimiser: of the parameters of the model, without a weight decay of its own.
        epochs: of training.
        burn_in: epochs before the first update, until which the precisions are those of `prior` and `likelihood`; by
            default as many as `every`, as weights that have not grown yet ask for too much decay.
        every: epochs between updates; the last epoch ends with one in any case.
        prior: `"layerwise"`, `"isotropic"`, or one of these with the precisions to start from.
        parameters: which weights have the prior, and so weight decay: names, globs (`"!*Norm*.*"`) or a predicate; all
            trainable ones by default. The others are trained without.
        method: of the curvature, `"kfac"`, `"diagonal"`, or a `Factored` with settings of its own.
        seed: of random outputs and data that stand for all in an update. The order of batches is that of the loader.
        scheduler: of the step size, called as `schedule` says.
        schedule: `"epoch"` or `"batch"`, after which `scheduler.step()` is called.
        evidence_loader: the same data without random augmentation, where `loader` has some.
        unpack: for batches that are no pairs, `batch -> (inputs, targets)`.
        num_data: of an `IterableDataset`.
        progress: show a progress bar.
        callback: called with the epoch and the `PrecisionUpdate` after each update.

    Raises:
        TypeError, ValueError: before anything is trained, for settings that are not known or do not go together, for an
            optimiser with a weight decay or of other parameters, and for data that do not fit the model; later, for
            weights that have become NaN.

    Example:
        >>> import torch
        >>> from laplace_sampling.training.train_by_evidence import train_by_evidence
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> y = x + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
        >>> result = train_by_evidence(model, "regression", [(x, y)], optimiser, epochs=300, every=20, progress=False)
        >>> round(result.noise_precision_ ** -0.5, 1)
        0.1
    """
    _check_training(epochs, burn_in, every, schedule, scheduler, progress, callback)
    burn_in = min(every, epochs) if burn_in is None else burn_in
    settings = settings_of(likelihood, prior, parameters, method, seed)
    network = linearised(settings, model)
    _check_optimiser(optimiser, network)
    fixed = loader if evidence_loader is None else evidence_loader
    data: dict[str, Any] = {"unpack": unpack, "num_data": num_data}
    task = task_of(settings, network, fixed, **data)  # all that may be wrong is found before anything is trained
    decay = weight_decay_of(task.prior, task.model.likelihood, network, task.model.features.num_data)
    fixed_parts = [part for part in model.modules() if model.training and not part.training]
    run = _Run(model, network, optimiser, scheduler, schedule, unpacking(unpack), fixed_parts)
    best, history, at = _Checkpoint(model), list[PrecisionUpdate](), list[int]()
    with best.restored():
        for epoch in progress_bar("training by the evidence" if progress else None, range(1, epochs + 1)):
            run.epoch(loader, settings.likelihood, decay)
            if epoch != epochs and (epoch < burn_in or (epoch - burn_in) % every):
                continue
            network = network.renewed()
            update = update_at(task_of(settings, network, fixed, **data), network, settings)
            settings, decay = replace(settings, prior=update.prior, likelihood=update.likelihood), update.weight_decay
            history.append(update)
            at.append(epoch)
            best.offer(epoch, update.log_marginal_likelihood.value)
            if callback is not None:
                callback(epoch, update)
    return TrainedByEvidence(history, at, best.epoch)


@dataclass(eq=False)
class _Run:
    """Epochs of training; `fixed` parts are in evaluation mode."""

    model: nn.Module
    network: Linearisation
    optimiser: Optimizer
    scheduler: LRScheduler | None
    schedule: str
    unpack: Unpack
    fixed: list[nn.Module]

    def epoch(self, loader: Iterable[Any], likelihood: Likelihood, decay: dict[str, float]) -> None:
        """One pass over the loader."""
        self.model.train()
        for part in self.fixed:
            part.training = False
        total, num = 0.0, 0
        for batch in loader:
            x, y = self.unpack(batch)
            x, y = (place(part, self.network.device, self.network.dtype) for part in (x, y))
            total += num_rows(x) * self._step(x, y, likelihood, decay)
            num += num_rows(x)
            if self.schedule == "batch" and self.scheduler is not None:
                self.scheduler.step()
        if self.schedule == "epoch" and self.scheduler is not None:
            if isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step(total / max(num, 1))
            else:
                self.scheduler.step()

    def _step(self, x: Any, y: Any, likelihood: Likelihood, decay: dict[str, float]) -> float:
        """A step of the optimiser, which may ask for the loss and its gradient more than once; the loss."""
        weights, (args, kwargs) = dict(self.network.source.named_parameters()), arguments(x)

        def closure() -> Any:
            self.optimiser.zero_grad()
            output, layout = read(self.model(*args, **kwargs), num_rows(x))
            of_outputs, targets = likelihood.prepare(layout, y, [])  # a batch may have no targets
            loss = of_outputs.loss(output.reshape(len(output), -1), targets).mean() / loss_unit(likelihood)
            penalty = sum(value * weights[name].square().sum() for name, value in decay.items())
            loss = loss + 0.5 * penalty
            loss.backward()
            return loss.detach()

        return float(self.optimiser.step(closure))


@dataclass(eq=False)
class _Checkpoint:
    """The weights and buffers of the largest evidence."""

    model: nn.Module
    value: float = -torch.inf
    epoch: int = 0
    state: dict[str, Any] | None = None

    def offer(self, epoch: int, value: float) -> None:
        """Keeps what the model has now if the evidence is larger than before."""
        if value > self.value or self.state is None:
            self.epoch, self.value, self.state = epoch, value, copy.deepcopy(self.model.state_dict())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """At its end the model has the state that was kept, and its modes of before."""
        modes = [(part, part.training) for part in self.model.modules()]
        try:
            yield
        finally:
            if self.state is not None:
                self.model.load_state_dict(self.state)
            for part, mode in modes:
                part.training = mode


def _check_training(
    epochs: Any, burn_in: Any, every: Any, schedule: Any, scheduler: Any, progress: Any, callback: Any
) -> None:
    for name, value in (("epochs", epochs), ("burn_in", burn_in), ("every", every)):
        if value is not None or name != "burn_in":
            check_whole(f"`train_by_evidence({name}=...)`", value, 1)
    if burn_in is not None and burn_in > epochs:
        raise ValueError(
            f"`train_by_evidence(burn_in={burn_in})` is more than `epochs={epochs}`, so that nothing would be trained "
            "with precisions of the evidence: lower it."
        )
    if schedule not in _SCHEDULES:
        raise ValueError(f"`schedule={schedule!r}` is not known; use one of {list(_SCHEDULES)}.")
    if scheduler is not None and not isinstance(scheduler, LRScheduler):
        raise TypeError(f"`scheduler` must be one of `torch.optim.lr_scheduler`, but is {scheduler!r:.80}.")
    check_flag("`progress`", progress)
    if callback is not None and not callable(callback):
        raise TypeError(f"`callback` must be a function of an epoch and a `PrecisionUpdate`, but is {callback!r:.80}.")


def _check_optimiser(optimiser: Any, network: Linearisation) -> None:
    """Raise if the optimiser would not train the network by the loss with the decay of the evidence alone."""
    if not isinstance(optimiser, Optimizer):
        raise TypeError(f"`optimiser` must be one of `torch.optim`, but is {optimiser!r:.80}.")
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
