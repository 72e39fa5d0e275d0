"""`LaplaceCallback`: error bars while Lightning trains a network.

Needs the extra `lightning`: `pip install "laplace_sampling[lightning]"`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from laplace_sampling.integrations.periodic_fits import AUTO, PREFIX, PeriodicFits
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.likelihood import Likelihood

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise ImportError('`LaplaceCallback` needs Lightning: `pip install "laplace_sampling[lightning]"`.') from error

# Networks of `ModelParallelStrategy` are sharded by `fully_shard`.
_SHARDED = (DeepSpeedStrategy, FSDPStrategy)


class LaplaceCallback(Callback):
    """Fits error bars every few epochs of a training by Lightning, and logs what they find.

    A fit comes at the end of an epoch, after its validation, and starts from the fit before (`PeriodicFits`). The last
    epoch has one. If `budget` leaves one out, the reason is logged. Training goes on bit for bit as without fits.

    Metrics are logged with `laplace_` before their names. `ModelCheckpoint(save_on_train_epoch_end=True)` and
    `EarlyStopping(check_on_train_epoch_end=True)` may monitor them. Lightning's checkpoints contain the state of the
    callback, so that a resumed training continues from its last fit, with any number of processes. Any other training
    that starts at step 0 forgets earlier fits. Several processes fit together: they share out the data, all have the
    result, and the first one logs it.

    Args:
        likelihood: as in `LinearisedLaplace`.
        train_loader: data of the fits, in place of the trainer's; without augmentation.
        val_loader: data of the metrics, in place of the trainer's, if it has one.
        module: the name of the submodule that is the network, such as `"net"`; by default the `LightningModule` itself.
        options: further arguments of `PeriodicFits`: `every_n_epochs`, `metrics`, `budget`, `process_group` (by default
            all processes of the trainer), and those of `LinearisedLaplace` and `fit_hyperparameters`.

    Raises:
        TypeError, ValueError: for settings that are not known; when training starts, if network or loaders cannot be
            found, if the training data change from pass to pass, as by augmentation, and for strategies that shard
            the network.

    Attributes:
        fits: the `PeriodicFits`.
        laplace_: the last fit.
    """

    def __init__(
        self,
        likelihood: str | Likelihood | Mapping[str, str | Likelihood],
        *,
        train_loader: Iterable[Any] | None = None,
        val_loader: Iterable[Any] | None = None,
        module: str | None = None,
        **options: Any,
    ) -> None:
        self.fits = PeriodicFits(likelihood, **{"process_group": AUTO, **options})
        self.train_loader, self.val_loader, self.module = train_loader, val_loader, module
        self._anew = self.fits.state_dict()
        # The epoch that training has come to, if it has no fit.
        self._unfitted: int | None = None

    @property
    def laplace_(self) -> LinearisedLaplace:
        return self.fits.laplace_

    @property
    def state_key(self) -> str:
        return self._generate_state_key(module=self.module, every_n_epochs=self.fits.every_n_epochs)

    def state_dict(self) -> dict[str, Any]:
        return self.fits.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fits.load_state_dict(state_dict)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Before the state of a checkpoint is loaded; a Trainer that trains on has made steps.
        if stage == "fit" and not trainer.global_step:
            self.fits.load_state_dict(self._anew)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The posterior of a checkpoint after which nothing is left to train, or that is tested."""
        if self.fits.history_:
            self.fits.restore(self._network(pl_module))

    on_test_start = on_predict_start = on_fit_end

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise before an epoch is lost."""
        if isinstance(trainer.strategy, _SHARDED):
            raise ValueError(
                f"`LaplaceCallback` needs the whole network in one process, but {type(trainer.strategy).__name__} "
                'shards it: use another strategy, such as "ddp" or `ModelParallelStrategy`, or fit after training.'
            )
        self._network(pl_module)
        self.fits.check_loader(self._loaders(trainer)[0])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        # Predictions are asked for when training has ended.
        last = epoch == trainer.max_epochs or trainer.should_stop or 0 < trainer.max_steps <= trainer.global_step
        due = self.fits.due(epoch, last)
        self._unfitted = None if due else epoch
        if due:
            found = self.fits.fit(self._network(pl_module), *self._loaders(trainer), epoch=epoch)
            for name, value in found.items():
                # All processes have the same number, which callbacks on each of them may monitor, so that nothing is
                # reduced; that it is "synchronised" tells Lightning not to warn that it might differ.
                how = {"on_epoch": True, "batch_size": 1, "sync_dist": True, "rank_zero_only": True}
                pl_module.log(PREFIX + name, value, **how)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit of a last epoch that was not known to be it, as `EarlyStopping` comes after other callbacks."""
        if self._unfitted is None:
            return
        epoch, self._unfitted = self._unfitted, None
        found = self.fits.fit(self._network(pl_module), *self._loaders(trainer), epoch=epoch)
        # A module logs nothing here any more.
        for logger in trainer.loggers:
            logger.log_metrics({f"{PREFIX}{name}": value for name, value in found.items()}, trainer.global_step - 1)

    def _network(self, pl_module: LightningModule) -> nn.Module:
        name = type(pl_module).__name__
        if self.module is not None:
            try:
                return pl_module.get_submodule(self.module)
            except AttributeError:
                names = [child for child, _ in pl_module.named_children()]
                raise ValueError(f"`LaplaceCallback(module={self.module!r})`: {name} has {names}.") from None
        if type(pl_module).forward is LightningModule.forward:
            raise ValueError(
                f"{name} has no `forward`: say which of its submodules is the network, as in "
                '`LaplaceCallback(..., module="net")`.'
            )
        return pl_module

    def _loaders(self, trainer: Trainer) -> tuple[Iterable[Any], Iterable[Any] | None]:
        train = trainer.train_dataloader if self.train_loader is None else self.train_loader
        val = trainer.val_dataloaders if self.val_loader is None else self.val_loader
        return _only("train", train), None if val is None else _only("val", val)


def _only(kind: str, loader: Any) -> Iterable[Any]:
    """The one loader that there is."""
    if isinstance(loader, list | tuple) and len(loader) == 1 and isinstance(loader[0], DataLoader):
        loader = loader[0]
    are_several = isinstance(loader, list | tuple) and any(isinstance(part, DataLoader) for part in loader)
    if not isinstance(loader, Iterable) or isinstance(loader, Mapping) or are_several:
        raise ValueError(
            f"`LaplaceCallback` takes one loader of {kind} data, but the trainer has a {type(loader).__name__}: give "
            f"one as `{kind}_loader=`."
        )
    return loader
