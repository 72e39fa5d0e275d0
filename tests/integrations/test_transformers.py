"""`LaplaceTrainerCallback` in real trainings of transformers' `Trainer`, of small models with random weights."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_processes import run_on_ranks
from torch import nn
from torch.testing import assert_close
from torch.utils.data import IterableDataset, Subset
from trained import assert_same_bits, bits_of_training

from laplace_sampling import Categorical, Data, LinearisedLaplace

REASON = "the extras `transformers` and `accelerate` are not installed"
transformers = pytest.importorskip("transformers", reason=REASON)
accelerate = pytest.importorskip("accelerate", reason=REASON)

from transformers import Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from laplace_sampling.integrations.periodic_fits import PeriodicFits  # noqa: E402
from laplace_sampling.integrations.transformers import FILE, LaplaceTrainerCallback, next_token  # noqa: E402

pytestmark = pytest.mark.slow

NUM_DATA, BATCH_SIZE, NUM_EPOCHS = 26, 8, 4
STEPS = 4  # an epoch
# Entries of the log that tell the time.
TIMED = ("train_runtime", "eval_runtime")


class Rows(torch.utils.data.Dataset):
    """Points in the plane, labelled by their quadrant; random access only."""

    def __init__(self, num: int = NUM_DATA, seed: int = 0) -> None:
        self.x = torch.randn(num, 2, generator=torch.Generator().manual_seed(seed))
        self.labels = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index], "unused": torch.tensor(index)}


class Classifier(nn.Module):
    """As models of transformers, with dropout and a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor | None]:
        logits = self.body(x)
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


class StopAfter(TrainerCallback):
    """As a training that is cut off, after its checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


class Reporter(TrainerCallback):
    """As TensorBoard's."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    level = logging.getLogger("transformers").level
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    logging.getLogger("transformers").setLevel(level)


class StepAsMetric(TrainerCallback):
    """So that a test knows which checkpoint is best: `metric_for_best_model="step"`."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        metrics["eval_step"] = state.global_step


def make_trainer(folder: Path, *callbacks: TrainerCallback, model: nn.Module | None = None, **options: Any) -> Trainer:
    """A training of some epochs, of which checkpoints are saved."""
    torch.manual_seed(1)
    data = {"train_dataset": options.pop("train_dataset", Rows()), "eval_dataset": Rows(12, seed=1)}
    given = {"num_train_epochs": NUM_EPOCHS, "learning_rate": 0.05, "logging_strategy": "epoch"} | options
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH_SIZE,
        save_strategy=given.pop("save_strategy", "epoch"),
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **given,
    )
    return Trainer(model or Classifier(), arguments, callbacks=list(callbacks), **data)


def callback(likelihood: Any = "classification", **options: Any) -> LaplaceTrainerCallback:
    return LaplaceTrainerCallback(likelihood, **{"every_n_epochs": 2, "num_samples": 4, "budget": None} | options)


def bits(trainer: Trainer) -> list[Any]:
    """All of a training, but for what a callback logs, and times."""
    logs = [
        {name: value for name, value in entry.items() if not any(name.endswith(end) for end in ("runtime", "_second"))}
        for entry in trainer.state.log_history
        if not any(name.startswith("laplace_") for name in entry)
    ]
    return bits_of_training(trainer.model, trainer.optimizer, trainer.lr_scheduler, {"logs": logs})


def logged(trainer: Trainer) -> list[dict[str, float]]:
    return [entry for entry in trainer.state.log_history if "laplace_effective_dimension" in entry]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logging_strategy": "steps", "logging_steps": 3, "save_strategy": "steps", "save_steps": 5},
        {"eval_strategy": "epoch", "load_best_model_at_end": True, "lr_scheduler_type": "cosine"},
        {"gradient_accumulation_steps": 2, "bf16": True, "dataloader_drop_last": True, "max_steps": 5},
    ],
    ids=["epochs", "steps", "best model", "mixed precision"],
)
@pytest.mark.parametrize("with_trainer", [False, True])
def test_training_is_bit_equal_to_one_without_fits(tmp_path: Path, options: dict, with_trainer: bool) -> None:
    plain = make_trainer(tmp_path / "plain", **options)
    plain.train()
    without = bits(plain)
    trainer = make_trainer(tmp_path / "fits", **options)
    fits = callback(trainer=trainer if with_trainer else None, val_dataset=Rows(9, seed=2))
    trainer.add_callback(fits)
    trainer.train()
    assert_same_bits(bits(trainer), without)
    assert trainer.control == plain.control
    assert [record["epoch"] for record in fits.fits.history_][:1] == [2]
    assert {"laplace_val_log_loss", "laplace_cost"} <= logged(trainer)[0].keys()


@pytest.mark.parametrize(
    ("step", "saving", "every_n_epochs"),
    [
        (2 * STEPS, {"save_strategy": "steps", "save_steps": 2 * STEPS}, 2),
        (2 * STEPS + 1, {"save_strategy": "steps", "save_steps": 2 * STEPS + 1}, 2),
        (2 * STEPS, {}, 2),
        (2 * STEPS + 1, {}, 1),
    ],
    ids=["before the fit of an epoch", "within an epoch", "after an epoch", "a stop within an epoch"],
)
def test_a_training_that_is_resumed_is_bit_equal_and_has_the_same_error_bars(
    tmp_path: Path, step: int, saving: dict, every_n_epochs: int
) -> None:
    """Also from a checkpoint of the last step of an epoch, which is older than the fit of that epoch."""
    make = partial(callback, every_n_epochs=every_n_epochs)
    resumed, found, fits = {}, {}, {"with": make(), "whole": make()}
    for name in ("without", "with"):
        make_trainer(tmp_path / name, StopAfter(step), *([make()] if name == "with" else []), **saving).train()
        resumed[name] = make_trainer(tmp_path / name, *([fits[name]] if name == "with" else []), **saving)
        resumed[name].train(resume_from_checkpoint=True)
        found[name] = bits(resumed[name])
    assert_same_bits(found["with"], found["without"])
    whole = make_trainer(tmp_path / "whole", fits["whole"], **saving)
    whole.train()
    assert_same_bits(
        bits_of_training(whole.model, whole.optimizer),
        bits_of_training(resumed["with"].model, resumed["with"].optimizer),
    )
    assert logged(resumed["with"]) == logged(whole)
    assert [entry["epoch"] for entry in logged(whole)] == list(range(every_n_epochs, NUM_EPOCHS + 1, every_n_epochs))
    predictions = [fits[name].laplace_.predict({"x": Rows().x}) for name in fits]
    assert torch.equal(predictions[0].samples, predictions[1].samples)


def test_fits_see_all_data_once_through_the_collator_of_the_trainer(tmp_path: Path) -> None:
    """`drop_last` and columns that the model does not take change nothing."""
    fits = callback(every_n_epochs=NUM_EPOCHS, method="exact")
    trainer = make_trainer(tmp_path, fits, dataloader_drop_last=True)
    trainer.train()
    rows = Rows()
    reference = LinearisedLaplace(trainer.model, "classification", num_samples=4, method="exact")
    reference.fit_hyperparameters([({"x": rows.x}, rows.labels)], progress=False)
    assert_close(fits.laplace_.prior_precision_, reference.prior_precision_)
    assert_close(fits.laplace_.predict({"x": rows.x}).stddev, reference.predict({"x": rows.x}).stddev)


def test_other_data_are_fitted_in_place_of_those_of_training(tmp_path: Path) -> None:
    rows = Rows()
    loader = [({"x": rows.x[:20]}, rows.labels[:20])]
    found = []
    for name, given in {
        "dataset": {"train_dataset": Subset(rows, range(20))},
        "loader": {"train_loader": loader},
    }.items():
        fits = callback(every_n_epochs=NUM_EPOCHS, method="exact", **given)
        make_trainer(tmp_path / name, fits).train()
        found.append(fits.laplace_.predict({"x": rows.x}).stddev)
    assert_close(*found)
    everything = callback(every_n_epochs=NUM_EPOCHS, method="exact")
    make_trainer(tmp_path / "all", everything).train()
    assert (everything.laplace_.predict({"x": rows.x}).stddev - found[0]).abs().max() > 0.01


def test_a_stream_of_training_data_needs_other_data_for_the_fits(tmp_path: Path) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            return (Rows()[index] for index in range(NUM_DATA))

    options = {"train_dataset": Stream(), "max_steps": 2 * STEPS}
    fits = callback(train_dataset=Rows())
    make_trainer(tmp_path / "given", fits, **options).train()
    assert fits.laplace_.predict({"x": Rows().x}).probs.shape == (NUM_DATA, 3)
    trainer = make_trainer(tmp_path / "missing", callback(), **options)
    with pytest.raises(ValueError, match="IterableDataset"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_entries_of_the_log_reach_reporters_through_the_trainer(tmp_path: Path) -> None:
    """`logging_strategy="epoch"` asks for the loss at the end of an epoch, which logging of anything takes back."""
    reporter = Reporter()
    trainer = make_trainer(tmp_path, reporter)
    trainer.add_callback(callback(trainer=trainer))
    trainer.train()
    reported = [entry for entry in reporter.logs if "laplace_effective_dimension" in entry]
    assert [entry["epoch"] for entry in reported] == [2.0, 4.0]
    assert [{**entry, "step": int(entry["epoch"]) * STEPS} for entry in reported] == logged(trainer)
    assert len([entry for entry in reporter.logs if "loss" in entry]) == NUM_EPOCHS


def test_the_file_goes_with_its_checkpoint(tmp_path: Path) -> None:
    make_trainer(tmp_path, callback(every_n_epochs=1), save_total_limit=2).train()
    assert sorted(path.parent.name for path in tmp_path.rglob(FILE)) == ["checkpoint-12", "checkpoint-16"]
    state = torch.load(tmp_path / "checkpoint-12" / FILE, weights_only=True)
    assert [record["epoch"] for record in state["history"]] == [1, 2, 3]


def test_the_last_fit_is_of_the_model_that_training_leaves(tmp_path: Path) -> None:
    """Of the best one if that is loaded, and also where no fit was due at the end; else there is one fit less."""
    fits = callback(every_n_epochs=3)
    trainer = make_trainer(tmp_path / "last", fits)
    trainer.train()
    assert [entry["step"] for entry in logged(trainer)] == [3 * STEPS, 4 * STEPS]
    fits.laplace_.predict({"x": Rows().x})  # raises for other weights
    best = callback(every_n_epochs=NUM_EPOCHS)
    options = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "step"}
    trainer = make_trainer(tmp_path / "best", best, StepAsMetric(), **options, greater_is_better=False)
    trainer.train()
    assert trainer.state.best_global_step == STEPS
    assert len(logged(trainer)) == 2
    best.laplace_.predict({"x": Rows().x})


def test_checkpoints_of_other_trainings_and_places_are_told_apart(tmp_path: Path) -> None:
    make_trainer(tmp_path / "a", callback(), StopAfter(2 * STEPS)).train()
    moved = (tmp_path / "a" / "checkpoint-8").rename(tmp_path / "moved")
    # Another training with a checkpoint of as many steps is in the folder.
    make_trainer(tmp_path / "b", callback(), StopAfter(2 * STEPS), learning_rate=0.01).train()
    fits = callback()
    with pytest.warns(UserWarning, match=r"laplace_sampling\.pt"):
        make_trainer(tmp_path / "b", fits).train(resume_from_checkpoint=str(moved))
    assert fits.fits.history_[0]["epoch"] == 2
    assert len(fits.fits.history_) == 2
    resumed = make_trainer(tmp_path / "b", fits, resume_from_checkpoint=str(moved))
    resumed.train(resume_from_checkpoint=resumed.args.resume_from_checkpoint)
    assert fits.fits.history_[0] == torch.load(moved / FILE, weights_only=True)["history"][0]


def tiny_bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=6,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


def tiny_gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=7, n_positions=5, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def sentences(num: int, vocabulary: int, language_model: bool) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, vocabulary, (num, 5), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row if language_model else row[0] % 3} for row in ids]


@pytest.mark.parametrize("language_model", [False, True], ids=["bert", "gpt2"])
def test_models_of_transformers_train_as_without_fits(tmp_path: Path, language_model: bool) -> None:
    make_model, vocabulary = (tiny_gpt2, 7) if language_model else (tiny_bert, 20)
    rows = sentences(10, vocabulary, language_model)
    weights = []
    fits = callback(
        Categorical(class_dim=-1) if language_model else "classification",
        every_n_epochs=1,
        parameters="*c_proj*" if language_model else "classifier*",
        method="krylov",
        **({"data": Data(unpack=next_token)} if language_model else {}),
    )
    for callbacks in ([], [fits]):
        torch.manual_seed(0)
        folder = tmp_path / str(len(callbacks))
        trainer = make_trainer(folder, *callbacks, model=make_model(), train_dataset=rows, num_train_epochs=2)
        trainer.train()
        weights.append(bits(trainer))
    assert_same_bits(*weights)
    assert [entry["epoch"] for entry in logged(trainer)] == [1.0, 2.0]
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids).logits
    assert torch.equal(fits.laplace_.predict({"input_ids": ids}).outputs.reshape(logits.shape), logits)


def test_labels_of_the_next_token_give_the_loss_of_the_model() -> None:
    model = tiny_gpt2().eval()
    ids = torch.stack([row["input_ids"] for row in sentences(4, 7, True)])
    labels = ids.where(ids != 3, -100)
    inputs, targets = next_token({"input_ids": ids, "labels": labels})
    with torch.no_grad():
        loss = model(input_ids=ids, labels=labels).loss
        logits = model(**inputs).logits
    likelihood = Categorical(class_dim=-1, shape=tuple(logits.shape[1:]))
    ours = likelihood.losses(logits.flatten(1)[None], targets).sum() / (targets != -100).sum()
    assert_close(ours, loss)


def test_a_causal_language_model_needs_to_know_how_its_labels_are_moved(tmp_path: Path) -> None:
    rows = sentences(10, 7, True)
    trainer = make_trainer(tmp_path, callback(Categorical(class_dim=-1)), model=tiny_gpt2(), train_dataset=rows)
    with pytest.raises(ValueError, match="unpack"):
        trainer.train()


def on_rank(folder: str) -> dict[str, Any]:
    """Trainings under `torchrun`, without fits and with."""
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"num_train_epochs": 2}
    plain = make_trainer(Path(folder) / "plain", **options)
    plain.train()
    without = bits(plain)
    reporter, fits = Reporter(), callback(method="exact", val_dataset=Rows(9, seed=2))
    trainer = make_trainer(Path(folder) / "fits", reporter, fits, **options)
    fits.trainer = trainer
    trainer.train()
    assert_same_bits(bits(trainer), without)
    assert trainer.args.world_size == 2
    assert trainer.state.global_step == STEPS  # of two epochs
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    found = {"history": fits.fits.history_, "samples": fits.laplace_.samples_}
    found["logged"] = [entry for entry in reporter.logs if "laplace_cost" in entry]
    if dist.get_rank() == 0:  # no other process takes part
        rows, held_out = Rows(), Rows(9, seed=2)
        alone = PeriodicFits("classification", num_samples=4, method="exact", budget=None)
        batches = ([({"x": data.x}, data.labels)] for data in (rows, held_out))
        found["alone"] = alone.fit(trainer.model, *batches, epoch=2)
        found["predicted"] = fits.laplace_.predict({"x": rows.x}).probs
    return found


def test_two_processes_fit_together_and_one_goes_on(tmp_path: Path) -> None:
    first, second = run_on_ranks(on_rank, 2, str(tmp_path), timeout=120.0)
    assert first["history"] == second["history"]
    assert torch.equal(first["samples"], second["samples"])
    for name in set(first["alone"]) - {"cost"}:  # batches are of other sizes
        assert first["history"][0][name] == pytest.approx(first["alone"][name], rel=1e-4)
    # Reporters of the library report on the main process only.
    assert len(first["logged"]) == len(second["logged"]) == 1
    fits = callback(method="exact", val_dataset=Rows(9, seed=2))
    trainer = make_trainer(tmp_path / "fits", fits)
    trainer.train(resume_from_checkpoint=str(tmp_path / "fits" / f"checkpoint-{STEPS}"))
    assert [record["epoch"] for record in fits.fits.history_] == [2, 4]
    assert fits.fits.history_[0] == first["history"][0]
