"""`AcceleratedFits` in real training loops of Accelerate."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_processes import run_on_ranks
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trained import assert_same_bits, bits_of_training

from laplace_sampling import LinearisedLaplace

accelerate = pytest.importorskip("accelerate", reason="the extra `accelerate` is not installed")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.tracking import GeneralTracker, on_main_process  # noqa: E402
from accelerate.utils import DataLoaderConfiguration  # noqa: E402

from laplace_sampling.integrations.accelerate import AcceleratedFits  # noqa: E402

pytestmark = pytest.mark.slow

NUM_DATA, BATCH_SIZE, NUM_EPOCHS = 26, 8, 4


@pytest.fixture(autouse=True)
def anew() -> None:
    """Accelerate's state, with the precision, is one for the process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Tracker(GeneralTracker):
    """Keeps what is logged."""

    name, requires_logging_directory, tracker = "kept", False, None

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[tuple[dict[str, float], int | None]] = []

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        pass

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        self.logs.append((values, step))


def data(num: int = NUM_DATA, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(num, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


class Training:
    """A loop as in Accelerate's examples: shuffled data, dropout, a normalisation, a schedule."""

    def __init__(
        self,
        *,
        fits: dict | None = None,
        tracker: Tracker | None = None,
        prepared: bool = True,
        batch_norm: bool = True,
        **how: Any,
    ) -> None:
        torch.manual_seed(1)
        loading = DataLoaderConfiguration(use_seedable_sampler=how.pop("use_seedable_sampler", False))
        self.accelerator = accelerate.Accelerator(
            cpu=True, dataloader_config=loading, log_with=tracker, step_scheduler_with_optimizer=False, **how
        )
        self.accelerator.init_trackers("test")
        norm = nn.BatchNorm1d(4) if batch_norm and self.accelerator.num_processes == 1 else nn.LayerNorm(4)
        model = nn.Sequential(nn.Linear(2, 4), norm, nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3))
        optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
        loader = DataLoader(TensorDataset(*data()), BATCH_SIZE, shuffle=True)
        self.model, self.optimiser, self.loader, self.schedule = self.accelerator.prepare(
            model, optimiser, loader, torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.7)
        )
        self.data_of_fits = self.loader if prepared else loader
        self.losses, self.fits = [], None
        if fits is not None:
            settings = {"every_n_epochs": 2, "num_samples": 4, "budget": None} | fits
            self.fits = AcceleratedFits(self.accelerator, "classification", **settings)

    def run(self, first: int = 1, last: int = NUM_EPOCHS) -> "Training":
        for epoch in range(first, last + 1):
            self.model.train()
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.optimiser.zero_grad()
                    loss = F.cross_entropy(self.model(x), y)
                    self.accelerator.backward(loss)
                    self.optimiser.step()
                self.losses.append(loss.item())
            self.schedule.step()
            if self.fits is not None and self.fits.due(epoch):
                self.fits.fit(self.model, self.data_of_fits, epoch=epoch, step=len(self.losses))
        return self

    def bits(self) -> list[Any]:
        gradient_state = {
            name: value
            for name, value in vars(self.accelerator.gradient_state).items()
            if isinstance(value, bool | int)
        }
        return bits_of_training(
            self.model,
            self.optimiser,
            self.schedule,
            gradient_state,
            {"losses": self.losses, "at": self.loader.iteration},
        )


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"use_seedable_sampler": True},
        {"gradient_accumulation_steps": 2},
        {"mixed_precision": "bf16"},
    ],
    ids=["default", "seedable sampler", "accumulation", "mixed precision"],
)
@pytest.mark.parametrize("prepared", [True, False])
def test_training_is_bit_equal_to_one_without_fits(how: dict, prepared: bool) -> None:
    without = Training(prepared=prepared, **how).run().bits()
    held_out = DataLoader(TensorDataset(*data(9, seed=2)), 4, shuffle=True)
    training = Training(fits={"val_loader": held_out}, prepared=prepared, **how).run()
    assert_same_bits(training.bits(), without)
    assert [record["epoch"] for record in training.fits.history_] == [2, 4]
    assert {"val_log_loss", "cost"} <= training.fits.history_[0].keys()


@pytest.mark.parametrize("stop", [2, 3])
def test_a_training_that_is_resumed_is_bit_equal_and_has_the_same_error_bars(tmp_path: Path, stop: int) -> None:
    resumed = []
    for number, fits in enumerate([None, {}]):
        folder = str(tmp_path / str(number))
        Training(fits=fits).run(last=stop).accelerator.save_state(folder)
        training = Training(fits=fits)
        training.accelerator.load_state(folder)
        resumed.append(training.run(first=stop + 1))
    assert_same_bits(resumed[1].bits(), resumed[0].bits())
    whole = Training(fits={}).run()
    assert_same_bits(bits_of_training(resumed[1].model), bits_of_training(whole.model))
    assert resumed[1].fits.history_ == whole.fits.history_
    x = data()[0]
    assert torch.equal(resumed[1].fits.laplace_.predict(x).samples, whole.fits.laplace_.predict(x).samples)


def test_what_fits_find_goes_to_the_trackers() -> None:
    tracker = Tracker()
    training = Training(fits={}, tracker=tracker).run()
    assert [step for _, step in tracker.logs] == [8, 16]
    for (values, _), record in zip(tracker.logs, training.fits.history_, strict=True):
        assert values == {f"laplace_{name}": value for name, value in record.items() if name != "epoch"}


def test_fits_are_of_the_model_inside_its_wrappers_and_of_all_data() -> None:
    training = Training(fits={"every_n_epochs": NUM_EPOCHS, "method": "exact"}).run()
    x, y = data()
    reference = LinearisedLaplace(training.accelerator.unwrap_model(training.model), "classification", method="exact")
    reference.fit_hyperparameters([(x, y)], progress=False)
    assert_close(training.fits.laplace_.prior_precision_, reference.prior_precision_)


def on_rank(folder: str) -> dict[str, Any]:
    """Trainings by two processes, without fits and with, of data as `prepare` returns them."""
    rank = dist.get_rank()
    without = Training().run(last=2).bits()
    tracker = Tracker()
    training = Training(fits={"method": "exact"}, tracker=tracker).run(last=2)
    assert_same_bits(training.bits(), without)
    assert training.accelerator.num_processes == 2
    assert len(training.loader) == 2  # of four batches
    assert len(tracker.logs) == (rank == 0)
    training.accelerator.save_state(folder)
    found = {"history": training.fits.history_, "samples": training.fits.laplace_.samples_}
    whole = AcceleratedFits(training.accelerator, "classification", method="exact", num_samples=4, budget=None)
    found["whole"] = whole.fit(training.model, DataLoader(TensorDataset(*data()), BATCH_SIZE), epoch=2)
    stream = training.accelerator.prepare(DataLoader(Stream()))
    with pytest.raises(ValueError, match="stream"):
        training.fits.fit(training.model, stream, epoch=3)
    apart = AcceleratedFits(
        training.accelerator, "classification", method="exact", num_samples=4, budget=None, process_group=None
    )
    if rank == 0:  # no other process takes part
        found["alone"] = apart.fit(training.model, training.loader, epoch=2)
        found["predicted"] = training.fits.laplace_.predict(data()[0]).probs
    return found


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(*data(), strict=True)


def test_two_processes_fit_together_and_one_goes_on(tmp_path: Path) -> None:
    first, second = run_on_ranks(on_rank, 2, str(tmp_path), timeout=120.0)
    assert first["history"] == second["history"]
    assert torch.equal(first["samples"], second["samples"])
    assert first["whole"] == {name: value for name, value in first["history"][0].items() if name != "epoch"}
    assert first["alone"] == pytest.approx(first["whole"], rel=1e-4)
    resumed = Training(fits={"method": "exact"}, batch_norm=False)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.run(first=3)
    assert resumed.fits.history_[0] == first["history"][0]
    assert [record["epoch"] for record in resumed.fits.history_] == [2, 4]
