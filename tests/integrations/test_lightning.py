"""`LaplaceCallback` in real trainings by Lightning, which go on as without it."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

with warnings.catch_warnings():
    # Lightning imports parts of torch and of the standard library that are deprecated.
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning", reason="the extra `lightning` is not installed")
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers.logger import Logger
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.utilities import rank_zero_only

from laplace_sampling.integrations.lightning import LaplaceCallback
from laplace_sampling.integrations.periodic_fits import PeriodicFits

pytestmark = [
    pytest.mark.slow,
    # What Lightning says of small loaders, of the steps of its log, and of a folder that is there.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
]


class Net(LightningModule):
    """A classifier with dropout and batch norm, which draw and change buffers, and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class WithoutForward(Net):
    forward = LightningModule.forward

    def training_step(self, batch: Any, _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None: ...


class Records(Logger):
    """A logger in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[dict[str, float]] = []

    name, version = "records", "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.records.append({**metrics, "step": float(step or 0)})

    def of_user(self) -> list[dict[str, float]]:
        parts = ({n: v for n, v in record.items() if not n.startswith("laplace_")} for record in self.records)
        return [part for part in parts if set(part) - {"epoch", "step"}]


class Augmented(TensorDataset):
    """Inputs with other noise at each access."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__(*tensors)

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


def data(num: int = 60, seed: int = 0) -> TensorDataset:
    x = torch.randn(num, 3, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] + x[:, 1] ** 2 > 0.5).long())


def loader(num: int = 60) -> DataLoader:
    return DataLoader(data(num), batch_size=16, shuffle=True)


def held_out() -> DataLoader:
    return DataLoader(data(30, 1), batch_size=16)


def callback(**options: Any) -> LaplaceCallback:
    return LaplaceCallback("classification", **{"budget": None, **options})


def trainer_of(callbacks: list[Callback], epochs: int = 3, folder: Path | None = None, **options: Any) -> Trainer:
    if folder is not None:
        callbacks = [*callbacks, ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)]
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": Records()}
    options = {**quiet, "enable_checkpointing": folder is not None, **options}
    return Trainer(max_epochs=epochs, accelerator="cpu", callbacks=callbacks, **options)


def trained(
    callbacks: list[Callback], net: type[Net] = Net, seed: int = 0, data: DataLoader | None = None, **options: Any
) -> tuple[Net, Trainer]:
    """A training of a few epochs, always with the same randomness."""
    torch.manual_seed(seed)
    module = net()
    trainer = trainer_of(callbacks, **options)
    trainer.fit(module, data or loader(), held_out())
    return module, trainer


def assert_same(with_fits: tuple[Net, Trainer], without: tuple[Net, Trainer]) -> None:
    """Weights, buffers, modes, gradients, the optimiser's state, what was logged, and the random state."""
    (module, trainer), (other, of_other) = with_fits, without
    assert {n: p.training for n, p in module.named_modules()} == {n: p.training for n, p in other.named_modules()}
    for ours, theirs in zip(module.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad)
        states = (t.optimizers[0].state[p] for t, p in ((trainer, ours), (of_other, theirs)))
        for a, b in zip(*(state.values() for state in states), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert isinstance(trainer.logger, Records)
    assert isinstance(of_other.logger, Records)
    assert trainer.logger.of_user() == of_other.logger.of_user()


@pytest.mark.parametrize("method", ["kfac", "exact", "krylov"])
def test_training_goes_on_as_without_fits(method: str) -> None:
    laplace = callback(method=method, metrics={"error": lambda p, y: (p.probs.argmax(1) != y).double()})
    with_fits = trained([laplace])
    state = torch.get_rng_state()
    without = trained([])
    assert torch.equal(state, torch.get_rng_state())
    assert_same(with_fits, without)
    assert [record["epoch"] for record in laplace.fits.history_] == [1, 2, 3]


def test_what_fits_say_is_logged() -> None:
    laplace = callback()
    _, trainer = trained([laplace])
    assert isinstance(trainer.logger, Records)
    logged = [record for record in trainer.logger.records if "laplace_cost" in record]
    assert len(logged) == len(laplace.fits.history_) == 3
    for record, kept in zip(logged, laplace.fits.history_, strict=True):
        for name in set(kept) - {"epoch"}:
            assert record[f"laplace_{name}"] == pytest.approx(kept[name], rel=1e-6)
    assert trainer.callback_metrics["laplace_val_log_loss"] == pytest.approx(kept["val_log_loss"], rel=1e-6)


def test_the_last_fit_predicts_at_test_time_in_inference_mode() -> None:
    laplace, seen = callback(), []

    class Tested(Net):
        def test_step(self, batch: Any, number: int) -> None:
            assert torch.is_inference_mode_enabled()
            seen.append(laplace.laplace_.predict(batch[0]).probs)

    module, trainer = trained([laplace], Tested)
    trainer.test(module, held_out(), verbose=False)
    expected = laplace.laplace_.predict(held_out().dataset.tensors[0]).probs
    assert torch.allclose(torch.cat(seen), expected)


def test_fits_within_inference_mode() -> None:
    """A callback of the user fits in a validation without gradients, and leaves no tensors of that mode."""
    laplace = callback()

    class Inside(Callback):
        def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if not trainer.sanity_checking:
                assert not torch.is_grad_enabled()
                with torch.inference_mode():
                    laplace.fits.fit(pl_module, loader(), held_out(), epoch=trainer.current_epoch + 1)

    assert_same(trained([Inside()]), trained([]))
    assert len(laplace.fits.history_) == 3
    assert not laplace.laplace_.samples_.is_inference()


@pytest.mark.parametrize("net", [Net, WithoutForward])
def test_a_submodule_is_the_network(net: type[Net]) -> None:
    laplace = callback(module="net")
    module, _ = trained([laplace], net, epochs=1)
    assert laplace.laplace_.network.source is module.net


def test_other_loaders_take_the_place_of_the_trainers() -> None:
    small, large = DataLoader(data(20)), DataLoader(data(40, 2), batch_size=8)
    laplace = callback(train_loader=small, val_loader=large)
    trained([laplace], epochs=1)
    assert laplace.laplace_.diagnose().num_data == 20
    log_prob = laplace.laplace_.predict(data(40, 2).tensors[0]).log_prob(data(40, 2).tensors[1])
    assert laplace.fits.history_[0]["val_log_loss"] == pytest.approx(-float(log_prob.mean()), rel=1e-5)


def test_a_schedule_and_a_training_without_validation() -> None:
    laplace = callback(every_n_epochs=2)
    torch.manual_seed(0)
    trainer_of([laplace], epochs=4, limit_val_batches=0).fit(Net(), loader())
    assert [record["epoch"] for record in laplace.fits.history_] == [2, 4]
    assert "val_log_loss" not in laplace.fits.history_[0]


@pytest.mark.parametrize("options", [{"every_n_epochs": 4}, {"budget": 5.0}], ids=["schedule", "budget"])
def test_the_last_epoch_has_a_fit_where_callbacks_that_come_later_make_it_the_last(options: dict) -> None:
    """`EarlyStopping` looks at the metrics of an epoch when other callbacks are done."""
    stop = EarlyStopping("val_loss", patience=1, min_delta=10.0, check_on_train_epoch_end=True)
    laplace = callback(**options)
    _, trainer = trained([stop, laplace], epochs=6)
    assert trainer.current_epoch == laplace.fits.history_[-1]["epoch"] == 2
    laplace.laplace_.predict(torch.zeros(1, 3))
    assert isinstance(trainer.logger, Records)
    logged = [record for record in trainer.logger.records if "laplace_cost" in record]
    assert logged[-1]["laplace_cost"] == laplace.fits.history_[-1]["cost"]
    assert [record["step"] for record in logged][-1] == trainer.global_step - 1


def test_a_training_of_so_many_steps_has_a_fit_at_its_end() -> None:
    fits = callback(every_n_epochs=2)
    _, trainer = trained([fits], max_steps=1)
    assert [record["epoch"] for record in fits.fits.history_] == [1]
    assert trainer.global_step == 1


class Order(Sampler):
    """An order of the data for each epoch: checkpoints of Lightning have no random state."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(60, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 60


class Seeds(Callback):
    """Dropout for each step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(trainer.global_step)


@pytest.mark.slow
@pytest.mark.parametrize("after_epoch", [True, False])
def test_a_training_that_goes_on_ends_as_one_that_nobody_disturbed(after_epoch: bool, tmp_path: Path) -> None:
    """From checkpoints after an epoch, and after its validation, which is before its fit."""

    def train(checkpoint: Path | None) -> tuple[list[Tensor], LaplaceCallback]:
        torch.manual_seed(0)
        laplace, module = callback(), Net()
        saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, save_on_train_epoch_end=after_epoch)
        trainer = trainer_of([Seeds(), laplace, saving], epochs=4, enable_checkpointing=True)
        trainer.fit(module, DataLoader(data(), 16, sampler=Order()), held_out(), ckpt_path=checkpoint)
        left = tree_leaves([module.state_dict(), trainer.optimizers[0].state_dict(), laplace.fits.laplace_.samples_])
        return [leaf for leaf in left if isinstance(leaf, Tensor)], laplace

    expected, whole = train(None)
    for file in sorted(tmp_path.glob("*.ckpt"))[:3]:
        found, laplace = train(file)
        assert all(map(torch.equal, found, expected))
        assert laplace.fits.history_ == whole.fits.history_


def test_metrics_of_fits_stop_a_training() -> None:
    stop = EarlyStopping("laplace_val_log_loss", patience=1, min_delta=10.0, check_on_train_epoch_end=True)
    laplace = callback()
    _, trainer = trained([laplace, stop], epochs=6)
    assert trainer.current_epoch == len(laplace.fits.history_) == 2


@pytest.mark.parametrize(
    ("options", "net", "message"),
    [
        ({}, WithoutForward, "WithoutForward"),
        ({"module": "nett"}, Net, "nett"),
        ({"train_loader": {"a": loader()}}, Net, r"\bdict\b"),
        ({"val_loader": [loader(), loader()]}, Net, r"\blist\b"),
        ({"train_loader": DataLoader(Augmented(data().tensors), batch_size=16)}, Net, "augmentation"),
    ],
)
def test_what_is_missing_is_said_before_a_step_is_lost(
    options: dict, net: type[Net], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*_: Any) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr(net, "training_step", step)
    laplace = callback(**options)
    with pytest.raises(ValueError, match=message):
        trained([laplace], net)
    assert not laplace.fits.history_


def test_the_posterior_of_a_checkpoint_predicts_without_another_fit(tmp_path: Path) -> None:
    """Where nothing is left to train, and where the model of the checkpoint is tested."""
    first, again, tested, seen = callback(), callback(), callback(), []
    trained([first], epochs=2, folder=tmp_path)
    last = str(tmp_path / "last.ckpt")
    trainer_of([again], epochs=2, folder=tmp_path).fit(Net(), loader(), held_out(), ckpt_path=last)
    assert again.fits.history_ == first.fits.history_

    class Tested(Net):
        def test_step(self, batch: Any, number: int) -> None:
            seen.append(tested.laplace_.predict(batch[0]).probs)

    trainer_of([tested], folder=tmp_path).test(Tested(), held_out(), ckpt_path=last, verbose=False)
    expected = first.laplace_.predict(held_out().dataset.tensors[0]).probs
    assert torch.equal(again.laplace_.predict(held_out().dataset.tensors[0]).probs, expected)
    assert torch.allclose(torch.cat(seen), expected)


def on_rank(folder: str) -> dict[str, Any]:
    """Trainings by DDP, without fits and with. Of 61 data Lightning's DistributedSampler gives each process 31."""
    warnings.simplefilter("ignore")
    rank, num = dist.get_rank(), dist.get_world_size()
    # Each process has dropout of its own.
    options: dict[str, Any] = {"strategy": "ddp", "devices": num, "seed": rank, "epochs": 2}
    without = trained([], data=loader(61), **options)
    state = torch.get_rng_state()
    error = {"error": lambda p, y: (p.probs.argmax(1) != y).double()}
    laplace, every = callback(method="exact", every_n_epochs=2, metrics=error), callback()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with_fits = trained([laplace, every], data=loader(61), folder=Path(folder), **options)
    assert not [warning for warning in said if "laplace" in str(warning.message)]
    assert torch.equal(state, torch.get_rng_state())
    assert_same(with_fits, without)
    module, trainer = with_fits
    assert isinstance(trainer.train_dataloader.sampler, DistributedSampler)
    found = {"history": laplace.fits.history_, "every": every.fits.history_}
    found["samples"] = laplace.laplace_.samples_
    found["monitored"] = trainer.callback_metrics["laplace_error"].item()
    assert isinstance(trainer.logger, Records)
    found["logged"] = [record["laplace_error"] for record in trainer.logger.records if "laplace_error" in record]
    if rank == 0:  # by itself: no other process takes part
        alone = PeriodicFits("classification", method="exact", metrics=error, budget=None)
        found["alone"] = alone.fit(module, DataLoader(data(61), batch_size=16), held_out(), epoch=2)
        found["predicted"] = laplace.laplace_.predict(data().tensors[0]).probs
    found["shards"] = trained_in_shards()
    return found


class InShards(Net):
    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])  # pyright: ignore[reportOptionalSubscript]


def trained_in_shards() -> list[dict[str, float]]:
    """Trainings by FSDP2, which does not take the storages of inference mode."""
    weights, laplace = [], callback(module="net")
    for callbacks in ([], [laplace]):
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        options: dict[str, Any] = {"strategy": strategy, "devices": 2, "inference_mode": False}
        module, _ = trained(list(callbacks), net=InShards, data=loader(61), epochs=2, **options)
        tensors = module.state_dict().values()
        weights.append([*(t.to_local() if isinstance(t, DTensor) else t for t in tensors), torch.get_rng_state()])
        assert any(isinstance(tensor, DTensor) for tensor in tensors)
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    return laplace.fits.history_


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("ddp")
    return run_on_ranks(on_rank, 2, str(folder), timeout=120.0), folder


@pytest.mark.xdist_group("two processes of Lightning")
def test_processes_of_ddp_fit_together_and_train_as_without(two_processes: tuple) -> None:
    (first, second), _ = two_processes
    assert first["history"] == second["history"]
    assert first["shards"] == second["shards"]
    assert len(first["shards"]) == 2
    assert first["every"] == second["every"]
    assert torch.equal(first["samples"], second["samples"])
    assert first["monitored"] == second["monitored"] == pytest.approx(first["history"][0]["error"])
    assert len(first["every"]) == 2
    assert (len(first["logged"]), len(second["logged"])) == (1, 0)
    assert {name: first["history"][0][name] for name in first["alone"]} == pytest.approx(first["alone"], rel=1e-4)


@pytest.mark.xdist_group("two processes of Lightning")
def test_a_posterior_of_two_processes_goes_on_in_one(two_processes: tuple) -> None:
    (first, _), folder = two_processes
    resumed = callback(method="exact", every_n_epochs=2, metrics={"error": lambda p, y: (p.probs.argmax(1) != y) * 1.0})
    torch.manual_seed(0)
    trainer = trainer_of([resumed, callback()], epochs=4, folder=folder)
    trainer.fit(Net(), loader(61), held_out(), ckpt_path=str(folder / "last.ckpt"))
    assert resumed.fits.history_[0] == first["history"][0]
    assert [record["epoch"] for record in resumed.fits.history_] == [2, 4]
