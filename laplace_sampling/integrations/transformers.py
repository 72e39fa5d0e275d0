"""Error bars while a `Trainer` of Hugging Face trains: `pip install laplace_sampling[transformers]`."""

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from laplace_sampling.data.training_data import Data
from laplace_sampling.files import read, write
from laplace_sampling.integrations.periodic_fits import AUTO, PREFIX, PeriodicFits
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.likelihood import Likelihood

try:
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    from laplace_sampling.integrations.accelerate import check_whole_weights
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "laplace_sampling.integrations.transformers needs transformers and accelerate: "
        'pip install "laplace_sampling[transformers,accelerate]"'
    ) from error

# In the folder of a checkpoint.
FILE = "laplace_sampling.pt"


class LaplaceTrainerCallback(TrainerCallback):
    r"""Fits error bars every few epochs of a `Trainer`, and at the end if the weights have changed since.

    If `budget` leaves a fit out, the reason is logged. Training goes on bit for bit as without fits (`PeriodicFits`).

    `trainer.state.log_history` contains what a fit finds, as `laplace_…`. Each checkpoint contains the last posterior,
    in a file `laplace_sampling.pt`, with which `trainer.train(resume_from_checkpoint=...)` continues; it is deleted
    with its checkpoint. For a checkpoint that is not in `output_dir`, name it in
    `TrainingArguments(resume_from_checkpoint=...)` as well. Trials of `hyperparameter_search` have fits, but no file.

    The fits use the data of `train_dataset`, each once and in their order, through the Trainer's collator. They are
    mappings with `labels`, and the model returns `logits`. Labels of causal language models need
    `data=Data(unpack=next_token)`.

    Several processes fit together: they share out the data, all have the result, and the main one writes the file.
    Another number of processes may continue from it.

    Args:
        likelihood: as in `LinearisedLaplace`.
        train_dataset: data of the fits, in place of the Trainer's, such as one without augmentation.
        val_dataset: held-out data for metrics, through the Trainer's collator.
        train_loader: takes the place of `train_dataset`: a loader or a list of batches, for another collator.
        trainer: the Trainer, for `trainer.add_callback(LaplaceTrainerCallback(..., trainer=trainer))`. Then a fit logs
            by `trainer.log`, and so to its reporters, such as TensorBoard.
        options: further arguments of `PeriodicFits`: `every_n_epochs`, `val_loader` (in place of `val_dataset`),
            `metrics`, `budget`, `process_group` (by default all processes of the training), and those of
            `LinearisedLaplace` and `fit_hyperparameters`.

    Raises:
        TypeError, ValueError: as in `PeriodicFits`; when training begins, if weights are shared out over processes, or
            labels need `next_token`; at the first fit, for data that do not fit the model or the likelihood.

    Attributes:
        fits: the `PeriodicFits`.
        laplace_: the last fit. After training it is that of the trained model, with `load_best_model_at_end` the best
            one.
    """

    def __init__(
        self,
        likelihood: str | Likelihood | Mapping[str, str | Likelihood],
        *,
        train_dataset: Any = None,
        val_dataset: Any = None,
        train_loader: Iterable[Any] | None = None,
        trainer: Trainer | None = None,
        **options: Any,
    ) -> None:
        self.fits = PeriodicFits(likelihood, **{"process_group": AUTO, **options})
        self.train_dataset, self.val_dataset, self.train_loader = train_dataset, val_dataset, train_loader
        self.trainer = trainer
        self._shifts = options.get("data", Data()).unpack is not None
        self._anew = self.fits.state_dict()
        # The step of the weights that the last fit is of.
        self._fitted_at: int | None = None

    @property
    def laplace_(self) -> LinearisedLaplace:
        return self.fits.laplace_

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        check_whole_weights(AcceleratorState())
        parts = {type(part).__name__ for part in kwargs["model"].modules()}
        causal = parts.intersection(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        if causal and not self._shifts:
            raise ValueError(
                f"The labels of a {causal.pop()} are those of the next token. Pass `data=Data(unpack=next_token)` of "
                "laplace_sampling.integrations.transformers, or an `unpack` of your own."
            )
        self.fits.check_loader(self._train_loader(kwargs["train_dataloader"]))  # raises before time is spent
        saved = self._saved(args, state) if state.global_step else None
        self.fits.load_state_dict(self._anew if saved is None else read(saved))
        self._fitted_at = None
        # A checkpoint of the last step of an epoch is older than the fit of that epoch.
        if state.global_step and float(state.epoch).is_integer():
            self.on_epoch_end(args, state, control, **kwargs)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A training that is stopped within an epoch may go on with it later; `on_train_end` fits what it leaves now.
        if control.should_training_stop and not float(state.epoch).is_integer():
            return
        epoch, history = math.ceil(state.epoch), self.fits.history_
        # The fit of the end is in the last checkpoint, unless it is that of the best model, which is loaded later.
        last = state.global_step >= state.max_steps and not args.load_best_model_at_end
        if not (history and history[-1]["epoch"] >= epoch) and self.fits.due(epoch, last):
            self._fit(state, control, state.global_step, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        best = state.best_global_step if args.load_best_model_at_end and state.best_model_checkpoint else None
        step = state.global_step if best is None else best
        # A training that goes on after its last step has the fit of its end.
        if self._fitted_at != step and not self.fits.restore(kwargs["model"]):
            self._fit(state, control, step, **kwargs)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = _checkpoint(args.output_dir, state)
        posterior = self.fits.state_dict()  # on all processes, which gather weights that they share out
        if args.should_save and folder.is_dir() and not state.is_hyper_param_search:
            write(posterior, folder / FILE)

    def _fit(
        self,
        state: TrainerState,
        control: TrainerControl,
        step: int,
        *,
        model: nn.Module,
        train_dataloader: DataLoader,
        **kwargs: Any,
    ) -> None:
        val = None if self.val_dataset is None else _in_order(self.val_dataset, train_dataloader)
        found = self.fits.fit(model, self._train_loader(train_dataloader), val, epoch=math.ceil(state.epoch))
        if not found:
            return
        self._fitted_at = step
        logs = {f"{PREFIX}{name}": value for name, value in found.items()}
        if self.trainer is None:
            state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})
        else:
            # Logging takes back that the loss is to be logged.
            should_log = control.should_log
            self.trainer.log(logs)
            control.should_log = should_log

    def _train_loader(self, like: DataLoader) -> Iterable[Any]:
        if self.train_loader is not None:
            return self.train_loader
        dataset = like.dataset if self.train_dataset is None else self.train_dataset
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "`LaplaceTrainerCallback`: the training data are an IterableDataset, which is read in its order only "
                "and goes on from where training stopped. Pass a map-style dataset as `train_dataset=`, or a loader or "
                "a list of batches as `train_loader=`."
            )
        return _in_order(dataset, like)

    def _saved(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """The file of the checkpoint that training goes on from, of which callbacks do not know the folder."""
        folders = [_checkpoint(args.output_dir, state)]
        if args.resume_from_checkpoint is not None:
            folders.insert(0, Path(args.resume_from_checkpoint))
        for folder in folders:
            # Another training may have left a checkpoint of as many steps.
            if (folder / FILE).is_file() and (folder / TRAINER_STATE_NAME).is_file():
                of_folder = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
                if repr(of_folder.log_history) == repr(state.log_history):
                    return folder / FILE
        warnings.warn(
            f"`LaplaceTrainerCallback`: training goes on from step {state.global_step}, but there is no {FILE} of it "
            f"in {' or '.join(map(str, folders))}, so that the next fit starts anew. If the checkpoint is elsewhere, "
            "name its folder in `TrainingArguments(resume_from_checkpoint=...)`, too.",
            stacklevel=2,
        )
        return None


def _in_order(dataset: Any, like: DataLoader) -> DataLoader:
    """All data of a dataset, through the collator of another one's loader."""
    batch_size = getattr(like.batch_sampler, "batch_size", None) or 1
    return DataLoader(dataset, batch_size=batch_size, collate_fn=like.collate_fn)


def _checkpoint(folder: str | None, state: TrainerState) -> Path:
    return Path(folder or "") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def next_token(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Inputs of a causal language model, and its labels: at each position the token that follows.

    For `Data(unpack=...)` with `Categorical(class_dim=-1)`, where logits are `[N, T, V]`. Models of transformers move
    labels by one position in their loss. The last position has no label.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return inputs, F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
