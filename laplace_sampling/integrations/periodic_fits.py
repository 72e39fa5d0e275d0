"""`PeriodicFits`: error bars while a network is trained; what all callbacks of trainers share, and plain loops use.

Training goes on bit for bit as without fits: data are read by index in a random state of their own
(`data.training_data`), and the network is differentiated on a copy that nobody else has (`networks.shell`).
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laplace_sampling.arguments import check_positive, check_whole
from laplace_sampling.data.batches import batched, flattened, take
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.data.training_data import (
    Data,
    PrivateRandomness,
    TrainingData,
    check_repeatable,
    source_of,
    unpacking,
)
from laplace_sampling.hyperparameters.as_criterion import as_criterion
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.methods.closed_form import Exact, Factored
from laplace_sampling.methods.problem import Strict
from laplace_sampling.posterior import NotFittedError
from laplace_sampling.settings import Settings

_log = logging.getLogger(__name__)

# Stands for the processes of the training, which callbacks do not know before it begins.
AUTO = "auto"

# Factors cost little, and what is logged is of one kind from epoch to epoch.
_DEFAULTS = {"method": "kfac", "num_samples": 16, "progress": False}
# Before the names of metrics where trainers log them.
PREFIX = "laplace_"


class PeriodicFits:
    r"""Fits a `LinearisedLaplace` to a network every few epochs of its training, each from the posterior of the last.

    The training goes on bit for bit as without fits: network, modes, buffers, gradients, optimiser, loaders, and the
    random states of torch, NumPy and Python.

    The training data must not change from pass to pass: a loader with random augmentation is refused. Give a loader
    without augmentation for the fits. A loader with `drop_last` or `shuffle` is read whole and in order.

    Args:
        likelihood: as in `LinearisedLaplace`.
        every_n_epochs: a fit is due after this many epochs, and after the last one; `budget` may leave some out.
        val_loader: data for metrics, which training does not use; `criterion="validation"` fits to them, too.
        metrics: what is computed from predictions for `val_loader`, by name: a function `(prediction, targets) ->
            number` or `-> [N]` of what `LinearisedLaplace.predict` returns for a batch, averaged over the data; or a
            metric of torchmetrics, which gets `prediction.probs`, or `prediction.mean` for a regression.
        budget: the first fit costs at most this many training epochs, counted in operations, and each later one at most
            half of what the first took. A fit is skipped, and `logging` says why, if the fits so far, this one and one
            at the end of training would cost more than the epochs so far, were each to cost what the last one did. The
            first fit and the one after the last epoch are never skipped, so that the fits of a short training may cost
            more than it does. `None` is no limit, and skips none.
            With few data, fits cost more: Kronecker factors take at least 250 gradients, and rules for `α` use 50 data.
        process_group: the processes of `torch.distributed` that share out the data of the fits and of the metrics. All
            of them make the same calls (`docs/distributed.md`). Their buffers may differ, such as the running means of
            `BatchNorm`: fits take those of the first process. `"auto"` is all processes, if there are several.
        options: further arguments of `LinearisedLaplace` and `fit_hyperparameters`, with other defaults:
            `method="kfac"`, which costs little and is the same method in each epoch; `num_samples=16`, which gives
            standard deviations an error of 18 %; `progress=False`.

    Raises:
        TypeError, ValueError: for settings that are not known.

    Attributes:
        laplace_: the last fit. It predicts until the next step of training; keep one by `laplace_.save(path)`.
        history_: metrics of each fit, with its `epoch`.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from laplace_sampling.integrations.periodic_fits import PeriodicFits
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> loader = DataLoader(TensorDataset(x, 2 * x), batch_size=10, shuffle=True)
        >>> model = torch.nn.Linear(1, 1)
        >>> fits = PeriodicFits("regression", every_n_epochs=2, budget=None)  # data so few cost little
        >>> for epoch in range(1, 5):
        ...     pass  # train for an epoch
        ...     if fits.due(epoch, last=epoch == 4):
        ...         metrics = fits.fit(model, loader, epoch=epoch)
        >>> len(fits.history_)
        2
    """

    def __init__(
        self,
        likelihood: str | Likelihood | Mapping[str, str | Likelihood],
        *,
        every_n_epochs: int = 1,
        val_loader: Iterable[Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        budget: float | None = 5.0,  # twice as many are most of a training of 20 epochs
        process_group: dist.ProcessGroup | str | None = None,
        **options: Any,
    ) -> None:
        check_whole("`every_n_epochs`", every_n_epochs, 1)
        if budget is not None:
            check_positive("`budget`", budget)
        self.likelihood, self.every_n_epochs, self.budget = likelihood, every_n_epochs, budget
        self.val_loader, self.metrics = val_loader, dict(metrics or {})
        self._settings, self._options = _parted({**_DEFAULTS, **options})
        self.process_group = process_group
        Settings.of(likelihood, **self._settings, process_group=None if process_group == AUTO else process_group)
        if wrong := [name for name, metric in self.metrics.items() if not callable(metric)]:
            raise TypeError(f"`metrics` must be functions `(prediction, targets) -> number`, but {wrong} are not.")
        self.history_: list[dict[str, float]] = []
        self._laplace: LinearisedLaplace | None = None
        self._state: dict[str, Tensor] | None = None  # of a posterior that the next fit starts from
        self._first = 0.0  # epochs of the first fit, without a look at held-out data

    @property
    def laplace_(self) -> LinearisedLaplace:
        if self._laplace is None:
            raise NotFittedError(
                "`laplace_` is there after a fit: call `fit(model, train_loader, epoch=...)` first, or, if a training "
                "that has ended was loaded, `restore(model)`."
            )
        return self._laplace

    def due(self, epoch: int, last: bool = False) -> bool:
        """Whether a fit is due after these epochs of training. If `budget` leaves one out, the reason is logged.

        Args:
            epoch: number of finished epochs of training.
            last: whether this is the last epoch. The trained network always has a fit, whatever that costs.
        """
        if last or epoch % self.every_n_epochs:
            return last
        costs = [record["cost"] for record in self.history_]
        # The next one is taken to cost what the last one did, and so is one at the end of training.
        total = sum(costs + 2 * costs[-1:])
        paid_for = self.budget is None or total <= epoch
        if not paid_for:
            _tell(
                f"No fit after epoch {epoch}: the {len(costs)} so far cost {sum(costs):.3g} training epochs, and with "
                f"this one and one at the end of training they would cost {total:.3g}, which is more than the training "
                "so far. `budget=None` leaves none out."
            )
        return paid_for

    def check_loader(self, train_loader: Iterable[Any]) -> None:
        """Raise what a fit would raise for a loader that changes from pass to pass, before training takes time.

        It reads the first batch twice; all processes call it together.

        Raises:
            TypeError, ValueError: for a one-shot iterator, random augmentation, and streams that shuffle themselves.
        """
        data, group = self._options.get("data", Data()), self._group()
        processes = ALONE if group is None else Processes(group)
        with PrivateRandomness().use():
            source = source_of(train_loader, data.num_data, unpacking(data.unpack), processes, processes)
            check_repeatable(source, processes)

    def fit(
        self, model: nn.Module, train_loader: Iterable[Any], val_loader: Iterable[Any] | None = None, *, epoch: int
    ) -> dict[str, float]:
        """Fit the network as it is now, whether a fit is due or not.

        Args:
            model: the network, usually the same at each fit.
            train_loader: its training data, as in `fit_hyperparameters`.
            val_loader: takes the place of the constructor's.
            epoch: number of finished epochs of training.

        Returns:
            What trainers log. Numbers of several groups or outputs have a `/` and the name or number behind their name.

            - `prior_precision`, `effective_dimension`, for a regression `noise_precision`;
            - `converged`, one or zero;
            - `score`, the evidence for each datum in nats, for exact and factored posteriors;
            - with a `val_loader`: `val_log_loss`, in nats for each datum, and the `metrics`;
            - `cost`, in training epochs.

            It is empty if a callback has stopped the fit with `StopFit`. Then the last fit is kept, and `logging` says
                so.

        Raises:
            TypeError, ValueError, FloatingPointError: as in `fit_hyperparameters`. The last fit is kept.
            Exception: of one of the `metrics`. The fit is kept, and is in `history_` without metrics.
        """
        val_loader = self.val_loader if val_loader is None else val_loader
        with PrivateRandomness().use():
            la, warm = self._at(model), self._first > 0
            processes = la.settings.processes
            criterion = as_criterion(self._options.get("criterion", "auto"))
            held_out = val_loader if criterion.name == "validation" else None
            # A later fit starts from the one before, and may take half of what the first one cost.
            budget = self.budget and Strict(self._first / 2 if warm else self.budget)
            with _buffers_of_first(la.network.source, processes):
                la.fit_hyperparameters(train_loader, held_out, budget=budget, warm_start=True, **self._options)
                if la.stopped_:
                    _tell(f"No fit after epoch {epoch}: a callback has stopped it by `StopFit`; the last one is kept.")
                    return {}
                self._laplace, self._state = la, None
                self._first = self._first or la.epochs_
                found = self._found(la)
                try:
                    if val_loader is not None:
                        with processes.shared_call(), processes.counting(la.network.products):
                            found |= self._predicted(la, val_loader)
                finally:  # also of a fit whose metrics raise an error: the next ones are due by what all have cost
                    found["cost"] = la.epochs_
                    self.history_.append({"epoch": epoch, **found})
        return found

    def _at(self, model: nn.Module) -> LinearisedLaplace:
        """The posterior of a network that fits start from."""
        la = self._laplace
        if la is None or la.network.source is not model:
            state = self._state if la is None else la.state_dict()
            la = LinearisedLaplace(model, self.likelihood, **self._settings, process_group=self._group())
            if state is not None:
                la.start_from(state)
        return la

    def _group(self) -> Any:
        if self.process_group != AUTO:
            return self.process_group
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return dist.group.WORLD if several else None

    def _found(self, la: LinearisedLaplace) -> dict[str, float]:
        """What a fit says without other data."""
        prior, noise = la.posterior_.prior, la.noise_precision_
        found = _named("prior_precision", prior.names, prior.precision)
        if noise is not None:
            found |= _named("noise_precision", range(noise.numel()), noise)
        found |= {"effective_dimension": float(la.effective_dimension_.sum()), "converged": float(la.converged_)}
        # Other methods take as long for it as for a fit.
        closed_form = isinstance(la.posterior_.method, Exact | Factored)
        return found | ({"score": float(la.score())} if closed_form else {})

    def _predicted(self, la: LinearisedLaplace, val_loader: Iterable[Any]) -> dict[str, float]:
        """The log loss and the user's metrics of held-out data."""
        likelihood, processes = la.settings.likelihood, la.settings.processes
        data = TrainingData(
            val_loader,
            unpack=self._options.get("data", Data()).unpack,
            fill=likelihood.fill,
            missing=likelihood.takes_missing,
            processes=processes,
        )
        metrics = {"val_log_loss": _log_loss, **self.metrics}
        sums = dict.fromkeys(metrics, 0.0)
        streams = {name: metric for name, metric in metrics.items() if hasattr(metric, "compute")}
        for metric in streams.values():
            metric.reset()
        # Processes that share out the weights predict together, at the same data.
        apart = la.network.shell.mesh is None
        part = data.part if apart else range(data.num_data)
        num_data = 0
        for batch in torch.arange(part.start, part.stop).split(data.batch_size):
            batch = batch[_have_targets(take(data.targets, batch), la.settings.likelihood.fill)]
            if not len(batch):
                continue
            num_data += len(batch)
            with processes.local_only() if apart else nullcontext():
                x = data.inputs(batch)
            prediction = la.predict(x)
            targets = take(data.targets, batch)
            for name, metric in metrics.items():
                if name in streams:
                    shown: Any = getattr(prediction, "probs" if hasattr(prediction, "probs") else "mean")
                    metric.update(shown.to(metric.device), targets.to(metric.device))
                else:
                    values = torch.as_tensor(metric(prediction, targets), dtype=torch.float64)
                    sums[name] += float(values.mean()) * len(batch)
        totals = torch.tensor([*sums.values(), num_data], dtype=torch.float64)
        if apart:
            processes.sum(totals)
        means = dict(zip(sums, (totals[:-1] / totals[-1]).tolist(), strict=True))
        # Metrics of torchmetrics put together what each process has seen.
        return means | {name: float(metric.compute()) for name, metric in streams.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs: numbers and tensors, for `torch.load(weights_only=True)`.

        It contains the posterior with its samples, which take the memory of `num_samples` networks.
        """
        posterior = self._state if self._laplace is None else self._laplace.state_dict()
        return {"history": [dict(record) for record in self.history_], "posterior": posterior, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`: the next fit starts from its posterior, even if the network was trained since."""
        self._laplace, self._state = None, state["posterior"]
        self.history_ = [dict(record) for record in state["history"]]
        self._first = float(state["first"])

    def restore(self, model: nn.Module) -> bool:
        """Make the posterior of `load_state_dict` predict again, when no training follows.

        Args:
            model: the network of the checkpoint.

        Returns:
            Whether `laplace_` is that posterior now. It is not if the network has other weights than at its fit.
        """
        if self._state is None:
            return False
        la = LinearisedLaplace(model, self.likelihood, **self._settings, process_group=self._group())
        with PrivateRandomness().use():
            try:
                la.load_state_dict(self._state)
            except ValueError:  # of other weights, or of another function of the data
                return False
        self._laplace, self._state = la, None
        return True


def _tell(message: str) -> None:
    """Log why there is no fit, once for all processes."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        _log.warning(message)


def _parted(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the constructor, and of `fit_hyperparameters`."""
    taken = inspect.signature(LinearisedLaplace).parameters
    settings = {name: value for name, value in options.items() if name in taken}
    fits = {name: value for name, value in options.items() if name not in taken}
    known = set(inspect.signature(LinearisedLaplace.fit_hyperparameters).parameters)
    if unknown := sorted({*fits} - known | {*options} & {*_OWN}):
        raise TypeError(f"{unknown} are no options of `LinearisedLaplace` or `fit_hyperparameters`.")
    return settings, fits


@contextmanager
def _buffers_of_first(module: nn.Module, processes: Processes) -> Iterator[None]:
    """Inside, the buffers of all processes are those of the first, which trainers save."""
    buffers = list(module.buffers()) if processes.size > 1 else []
    own = [buffer.detach().clone() for buffer in buffers]
    with processes.shared_call():
        first = processes.first(lambda: [buffer.cpu() for buffer in own]) if own else []
    try:
        _fill(buffers, first)
        yield
    finally:
        _fill(buffers, own)


@torch.no_grad()
def _fill(buffers: list[Tensor], values: list[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


# Arguments that are no options.
_OWN = ("model", "loader", "warm_start", "checkpoint")


def _named(name: str, parts: Iterable[Any], values: Tensor) -> dict[str, float]:
    """One number by its name; several with the names of their parts."""
    numbers = values.flatten().tolist()
    return {name if len(numbers) == 1 else f"{name}/{p}": v for p, v in zip(parts, numbers, strict=True)}


def _have_targets(targets: Any, fill: int | None) -> Tensor:
    """Which data have a target that is neither NaN nor, where targets are labels, the one that is ignored."""
    tensors = [flattened(y.cpu()) for y in batched(targets)[0]]
    missing = (y.isnan() if y.is_floating_point() or fill is None else y == fill for y in tensors)
    return torch.stack([~marks.all(1) for marks in missing]).any(0)


def _log_loss(prediction: Any, targets: Any) -> Tensor:
    return -prediction.log_prob(targets)
