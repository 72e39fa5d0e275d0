"""Error bars in training loops of Hugging Face Accelerate: `pip install laplace_sampling[accelerate]`."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from laplace_sampling.integrations.periodic_fits import AUTO, PREFIX, PeriodicFits
from laplace_sampling.likelihoods.likelihood import Likelihood

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.data_loader import BatchSamplerShard
except ImportError as error:  # pragma: no cover
    raise ImportError(
        'laplace_sampling.integrations.accelerate needs accelerate: pip install "laplace_sampling[accelerate]"'
    ) from error


class AcceleratedFits(PeriodicFits):
    r"""`PeriodicFits` in a training loop of Accelerate.

    The model may be what `accelerator.prepare` returned. What a fit finds goes to the accelerator's trackers.
    `accelerator.save_state` and `load_state` take the fits with them, so make this object before either is called, and
    in the training that goes on as in the one that was saved.

    Several processes fit together, and all of them call `fit`: they share out the data, all of them have the result,
    and the main one logs it. Another number of processes may go on from the state that is saved. Only buffers such as
    the running means of `BatchNorm` may differ between processes; fits are of those of the main process, which training
    saves.

    Args:
        accelerator: of the training.
        likelihood: as in `LinearisedLaplace`.
        options: all others of `PeriodicFits`: `every_n_epochs`, `val_loader`, `metrics`, `budget`, `process_group` (by
            default all processes of the training), and those of `LinearisedLaplace` and `fit_hyperparameters`.

    Raises:
        TypeError, ValueError: as `PeriodicFits`, and for an accelerator that shares out the weights over processes.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from laplace_sampling.integrations.accelerate import AcceleratedFits
        >>> accelerator = Accelerator(cpu=True)
        >>> fits = AcceleratedFits(accelerator, "regression", every_n_epochs=2, budget=None)
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=10)
        >>> model, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader)
        >>> for epoch in range(1, 5):
        ...     pass  # train for an epoch
        ...     if fits.due(epoch, last=epoch == 4):
        ...         metrics = fits.fit(model, loader, epoch=epoch)
        >>> len(fits.history_)
        2
    """

    def __init__(
        self,
        accelerator: Accelerator,
        likelihood: str | Likelihood | Mapping[str, str | Likelihood],
        **options: Any,
    ) -> None:
        check_whole_weights(accelerator.state)
        super().__init__(likelihood, **{"process_group": AUTO, **options})
        self.accelerator = accelerator
        accelerator.register_for_checkpointing(self)

    def fit(
        self,
        model: nn.Module,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        epoch: int,
        step: int | None = None,
    ) -> dict[str, float]:
        """`PeriodicFits.fit`, logged as `laplace_…`.

        Args:
            model: the model of the loop.
            train_loader: its training data, as they are in the loop or as they were before `prepare`. An
                `IterableDataset` with several processes has to be given as it was before.
            val_loader: takes the place of the constructor's, in the same form.
            epoch: number of finished epochs of training.
            step: the step of the trackers, as in `accelerator.log`.

        Raises:
            TypeError, ValueError, FloatingPointError: as in `fit_hyperparameters`, and for a loader that gives a
                process its share of a stream. The last fit is kept.
        """
        train_loader = self._whole(train_loader)
        val_loader = self._whole(self.val_loader if val_loader is None else val_loader)
        model = self.accelerator.unwrap_model(model)
        found = super().fit(model, train_loader, val_loader, epoch=epoch)
        if found:
            self.accelerator.log({f"{PREFIX}{name}": value for name, value in found.items()}, step=step)
        return found

    def _whole(self, loader: Any) -> Any:
        """The loader of all data that `prepare` has shared out over processes."""
        num = self.accelerator.num_processes
        if num == 1 or not getattr(loader, "_is_accelerate_prepared", False):
            return loader
        if isinstance(loader.dataset, IterableDataset):
            raise ValueError(
                f"`AcceleratedFits.fit`: the loader gives each of {num} processes its share of a stream, but a "
                "posterior is of all of it. Pass the loader as it was before `accelerator.prepare`."
            )
        shard = loader.batch_sampler
        if not isinstance(shard, BatchSamplerShard):
            return loader
        return DataLoader(loader.dataset, batch_sampler=shard.batch_sampler, collate_fn=loader.collate_fn)


def check_whole_weights(state: Any) -> None:
    """Raise if a process has a share of the weights only, in another form than that of `fully_shard`.

    Args:
        state: of the accelerator, with its `distributed_type`.
    """
    sharded = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
    if state.distributed_type in sharded and not getattr(state, "is_fsdp2", False):
        raise ValueError(
            f"Training by {state.distributed_type.value} shares out the weights over processes, so that none has a "
            "network to fit error bars to. Train by `fully_shard` (FSDP of version 2), or fit after training, with all "
            "weights loaded into a model on one device."
        )
