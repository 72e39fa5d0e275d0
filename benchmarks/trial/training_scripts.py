"""Training scripts that `killed_trainings` kills: each goes on from the last checkpoint of its trainer in a folder.

Checkpoints of Lightning have no random state: there the order of data and dropout are functions of epoch and step.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from laplace_sampling.integrations.accelerate import AcceleratedFits
from laplace_sampling.integrations.lightning import LaplaceCallback
from laplace_sampling.integrations.periodic_fits import PeriodicFits
from laplace_sampling.integrations.transformers import LaplaceTrainerCallback

__all__ = ["SCRIPTS", "Ended", "Stage"]

NUM, WIDTH, CLASSES, BATCH, EPOCHS, STEPS_SAVED = 150, 6, 3, 25, 5, 4
FITS: dict[str, Any] = {"num_samples": 8, "budget": None}

# Says what a script is at, inside of a context: `stage("fit")` or `stage("save")`.
Stage = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Ended:
    """What a training leaves: by names, tensors and numbers that have to be equal bit for bit."""

    weights: dict[str, Tensor]
    optimiser: dict[str, Any]
    history: list[dict[str, float]]
    samples: Tensor


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(NUM, WIDTH, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def network() -> nn.Module:
    """With dropout and running statistics."""
    torch.manual_seed(0)
    body = (nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2))
    return nn.Sequential(*body, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def staged(fits: PeriodicFits, stage: Stage) -> None:
    """Fits say what they are at."""
    fit = fits.fit

    def told(*args: Any, **kwargs: Any) -> dict[str, float]:
        with stage("fit"):
            return fit(*args, **kwargs)

    fits.fit = told


def ended(model: nn.Module, optimiser: Any, fits: PeriodicFits) -> Ended:
    return Ended(dict(model.state_dict()), optimiser.state_dict(), fits.history_, fits.laplace_.samples_)


# Lightning ------------------------------------------------------------------------------------------------------------


class _Order(Sampler):
    """An order of the data for each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(NUM, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return NUM


class _Seeds(Callback):
    """Dropout for each step: Lightning does not call `on_train_epoch_start` in a training that goes on."""

    def on_train_batch_start(self, trainer: LightningTrainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(trainer.global_step)


class _Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def by_lightning(folder: Path, stage: Stage, *, after_epoch: bool) -> Ended:
    """Checkpoints after the validation of an epoch, before its fit, or after the epoch."""

    class Saving(LightningTrainer):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with stage("save"):
                super().save_checkpoint(*args, **kwargs)

    laplace, module = LaplaceCallback("classification", **FITS), _Module()
    staged(laplace.fits, stage)
    saving = ModelCheckpoint(folder, filename="{epoch:02d}", save_top_k=-1, save_on_train_epoch_end=after_epoch)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = Saving(max_epochs=EPOCHS, accelerator="cpu", callbacks=[_Seeds(), laplace, saving], **quiet)
    loader = DataLoader(TensorDataset(*data()), BATCH, sampler=_Order())
    last = max(map(str, folder.glob("*.ckpt")), default=None)
    trainer.fit(module, loader, DataLoader(TensorDataset(*data()), 50), ckpt_path=last)
    return ended(module, trainer.optimizers[0], laplace.fits)


# Trainer of transformers ----------------------------------------------------------------------------------------------


class _Rows(Dataset):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, labels = data()
        return {"x": x[index], "labels": labels[index]}


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        logits = self.net(x)
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


def by_transformers(folder: Path, stage: Stage, **saving: Any) -> Ended:
    class Saving(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with stage("save"):
                super()._save_checkpoint(*args, **kwargs)

    class Saved(LaplaceTrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with stage("save") if control.should_save else nullcontext():
                super().on_step_end(args, state, control, **kwargs)

    laplace = Saved("classification", method="krylov", max_steps=3, **FITS)
    staged(laplace.fits, stage)
    arguments = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        learning_rate=0.02,
        save_total_limit=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="epoch",
        **saving,
    )
    trainer = Saving(_Classifier(), arguments, train_dataset=_Rows(), callbacks=[laplace])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=_last_whole(folder))
    assert trainer.model is not None
    return ended(trainer.model, trainer.optimizer, laplace.fits)


def _last_whole(folder: Path) -> str | None:
    """The last checkpoint that the Trainer was not killed in: it writes its state at the end."""
    by_step = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in by_step:
        try:
            TrainerState.load_from_json(str(path / "trainer_state.json"))
        except (OSError, ValueError):
            continue
        return str(path)
    return None


# Accelerate -----------------------------------------------------------------------------------------------------------


def by_accelerate(folder: Path, stage: Stage) -> Ended:
    """A folder for each epoch, which gets its name when all of it is written."""
    model, accelerator = network(), Accelerator(cpu=True)
    fits = AcceleratedFits(accelerator, "classification", every_n_epochs=2, **FITS)
    staged(fits, stage)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(TensorDataset(*data()), BATCH, shuffle=True)
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    saved = sorted(path for path in folder.iterdir() if path.name.isdigit())
    if saved:
        accelerator.load_state(str(saved[-1]))
    for epoch in range(int(saved[-1].name) + 1 if saved else 1, EPOCHS + 2):
        model.train()
        for x, y in loader:
            optimiser.zero_grad()
            accelerator.backward(F.cross_entropy(model(x), y))
            optimiser.step()
        if fits.due(epoch):
            fits.fit(model, loader, epoch=epoch)
        with stage("save"):
            accelerator.save_state(str(folder / "unfinished"))
            os.replace(folder / "unfinished", folder / str(epoch))
    model = accelerator.unwrap_model(model)
    fits.restore(model)
    return ended(model, optimiser, fits)


SCRIPTS: dict[str, Callable[[Path, Stage], Ended]] = {
    "Lightning, saved after epochs": lambda folder, stage: by_lightning(folder, stage, after_epoch=True),
    "Trainer, saved after epochs": lambda folder, stage: by_transformers(folder, stage, save_strategy="epoch"),
    "Accelerate": by_accelerate,
    "Lightning, saved after validation": lambda folder, stage: by_lightning(folder, stage, after_epoch=False),
    "Trainer, saved by steps": lambda folder, stage: by_transformers(
        folder, stage, save_strategy="steps", save_steps=STEPS_SAVED
    ),
}
