"""`PeriodicFits` in plain loops: training goes on bit for bit, fits start warm, and cost at most what training does."""

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace_sampling import Evidence, Gaussian, Krylov, LinearisedLaplace, NotFittedError, Step, StopFit
from laplace_sampling.integrations.periodic_fits import PeriodicFits


def dataset(kind: str, num: int = 60, inputs: int = 3, outputs: int = 1, seed: int = 0) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(num, inputs, generator=g)
    truth = x @ torch.randn(inputs, outputs, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(num, outputs, generator=g)
    if kind == "regression":
        return TensorDataset(x, truth.sin() + 0.2 * noise)
    return TensorDataset(x, (2 * truth + noise).argmax(1))


class Training:
    """A small training that draws from all random states."""

    def __init__(
        self, kind: str = "regression", outputs: int = 1, generator: torch.Generator | None = None, **sizes: int
    ) -> None:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 as users do
        random.seed(0)
        self.kind, self.data = kind, dataset(kind, outputs=outputs, **sizes)
        width, inputs = 64 if len(self.data) > 1000 else 6, self.data.tensors[0].shape[1]
        self.model = nn.Sequential(
            nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, outputs)
        )
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loader = DataLoader(
            self.data, batch_size=max(16, len(self.data) // 40), shuffle=True, generator=generator, drop_last=True
        )
        self.generator, self.losses = generator, []

    def epoch(self) -> None:
        loss_of = nn.MSELoss() if self.kind == "regression" else nn.CrossEntropyLoss()
        for x, y in self.loader:
            self.optimiser.zero_grad()
            # Augmentation, in the loop: the loader itself gives the data as they are.
            scale = 1 + 0.01 * np.random.rand() + 0.01 * random.random()  # noqa: NPY002
            loss = loss_of(self.model(scale * x), y)
            loss.backward()
            self.optimiser.step()
            self.losses.append(loss.item())

    def run(self, epochs: int, fits: PeriodicFits | None = None, **loaders: Any) -> "Training":
        for epoch in range(1, epochs + 1):
            self.epoch()
            if fits is not None and fits.due(epoch):
                fits.fit(self.model, self.loader, epoch=epoch, **loaders)
        return self

    def state(self) -> list[Any]:
        """All that fits could have changed."""
        numpy = np.random.get_state()  # noqa: NPY002
        tensors = [
            *self.model.state_dict().values(),
            *(p.grad for p in self.model.parameters()),
            *(torch.as_tensor(v) for s in self.optimiser.state.values() for v in s.values()),
            torch.get_rng_state(),
            *([] if self.generator is None else [self.generator.get_state()]),
        ]
        modes = [module.training for module in self.model.modules()]
        flags = [(p.requires_grad, p.grad_fn) for p in self.model.parameters()]
        return [*(t.tolist() for t in tensors), modes, flags, self.losses, list(numpy[1]), numpy[2], random.getstate()]


@pytest.mark.parametrize(
    ("kind", "method", "own_generator"),
    [
        ("regression", "kfac", True),
        pytest.param("classification", "kfac", False, marks=pytest.mark.slow),
        pytest.param("classification", "exact", True, marks=pytest.mark.slow),
        pytest.param("regression", "krylov", False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
def test_training_goes_on_as_without_fits(kind: str, method: str, own_generator: bool) -> None:
    def training() -> Training:
        generator = torch.Generator().manual_seed(3) if own_generator else None
        return Training(kind, 1 if kind == "regression" else 3, generator)

    held_out = DataLoader(dataset(kind, outputs=1 if kind == "regression" else 3, seed=1), batch_size=25, shuffle=True)

    def drawing(prediction: Any, targets: Tensor) -> Tensor:
        torch.rand(1)
        random.random()
        return prediction.outputs.mean()

    fits = PeriodicFits(kind, val_loader=held_out, metrics={"mean": drawing}, budget=None, method=method)
    assert training().run(3, fits).state() == training().run(3).state()
    assert [record["epoch"] for record in fits.history_] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "outputs"), [("regression", 1), ("classification", 10)])
def test_all_fits_together_cost_no_more_than_the_training(kind: str, outputs: int) -> None:
    training, fits = Training(kind, outputs, num=4000, inputs=20), PeriodicFits(kind)
    for epoch in range(1, 21):
        training.epoch()
        if fits.due(epoch) or epoch == 20:
            fits.fit(training.model, training.loader, epoch=epoch)
        # The first one comes when it is due.
        assert sum(record["cost"] for record in fits.history_[1:]) <= epoch
    costs = [record["cost"] for record in fits.history_]
    assert len(costs) > 3
    assert sum(costs) <= 20
    assert costs[-1] <= 0.5 * costs[0]


def test_fits_are_left_out_where_they_cost_more_than_training() -> None:
    training = Training()
    every, dear = PeriodicFits("regression", every_n_epochs=2, budget=None), PeriodicFits("regression")
    training.run(4, every)
    assert [record["epoch"] for record in every.history_] == [2, 4]
    cost = dear.fit(training.model, training.loader, epoch=1)["cost"]
    assert next(epoch for epoch in range(1, 100) if dear.due(epoch)) == int(np.ceil(3 * cost))


def test_the_last_epoch_has_a_fit_and_others_that_are_left_out_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    training, fits = Training(), PeriodicFits("regression", every_n_epochs=2)
    for epoch in range(1, 8):
        training.epoch()
        if fits.due(epoch, last=epoch == 7):
            fits.fit(training.model, training.loader, epoch=epoch)
    assert [record["epoch"] for record in fits.history_] == [2, 7]
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(":")[0] for message in messages] == ["No fit after epoch 4", "No fit after epoch 6"]
    cost = fits.history_[0]["cost"]
    assert all(f"{cost:.3g} training epochs" in message and f"{3 * cost:.3g}" in message for message in messages)


def test_what_is_logged_is_what_the_fit_says() -> None:
    training = Training("regression", 2).run(5)
    options: dict[str, Any] = {"prior": "layerwise", "method": "exact", "num_samples": 32, "seed": 2}
    criterion = Evidence(max_steps=50)
    fits = PeriodicFits(Gaussian(torch.ones(2)), budget=None, criterion=criterion, **options)
    found = fits.fit(training.model, training.loader, epoch=5)
    la = LinearisedLaplace(training.model, Gaussian(torch.ones(2)), **options)
    la.fit_hyperparameters(training.loader, budget=None, criterion=criterion, progress=False)
    names = [f"prior_precision/{name}" for name in ("0", "1", "4")]
    assert [found[name] for name in names] == pytest.approx(la.prior_precision_.tolist())
    assert [found[f"noise_precision/{i}"] for i in range(2)] == pytest.approx(la.noise_precision_.tolist())
    assert found["effective_dimension"] == pytest.approx(float(la.effective_dimension_.sum()))
    assert found["score"] == pytest.approx(float(la.score()))
    assert found["converged"] == la.converged_
    assert fits.history_ == [{"epoch": 5, **found}]
    assert len(fits.laplace_.samples_) == 32
    assert "score" not in PeriodicFits("regression", method="krylov", budget=None).fit(
        training.model, training.loader, epoch=1
    )


def accuracy_of_torchmetrics() -> Any:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(3, average="micro")


@pytest.mark.parametrize("of_torchmetrics", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_metrics_are_means_over_all_held_out_data(of_torchmetrics: bool) -> None:
    training, held_out = Training("classification", 3).run(5), dataset("classification", 50, outputs=3, seed=1)
    metrics = {
        "each": lambda p, y: (p.probs.argmax(1) == y).double(),
        "batch": lambda p, y: float((p.probs.argmax(1) == y).double().mean()),
    }
    if of_torchmetrics:
        metrics["accuracy"] = accuracy_of_torchmetrics()
    fits = PeriodicFits("classification", metrics=metrics, budget=None)
    for epoch in (5, 6):  # a metric of torchmetrics starts anew
        # Batches of 16 and one of two.
        found = fits.fit(training.model, training.loader, DataLoader(held_out, batch_size=16), epoch=epoch)
    x, y = held_out.tensors
    prediction = fits.laplace_.predict(x)
    accuracy = float((prediction.probs.argmax(1) == y).double().mean())
    assert [found[name] for name in metrics] == pytest.approx([accuracy] * len(metrics))
    assert found["val_log_loss"] == pytest.approx(-float(prediction.log_prob(y).mean()), rel=1e-5)


@pytest.mark.slow
def test_metrics_of_a_regression_are_of_its_means() -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    from torchmetrics.regression import MeanSquaredError

    training, held_out = Training().run(5), dataset("regression", 20, seed=1)
    fits = PeriodicFits("regression", val_loader=held_out, metrics={"mse": MeanSquaredError()}, budget=None)
    found = fits.fit(training.model, training.loader, epoch=1)
    x, y = held_out.tensors
    assert found["mse"] == pytest.approx(float(((fits.laplace_.predict(x).mean - y) ** 2).mean()), rel=1e-5)


def test_held_out_data_choose_the_precision_if_they_are_to() -> None:
    training, held_out = Training().run(5), dataset("regression", 40, seed=1)
    fits = PeriodicFits("regression", val_loader=held_out, criterion="validation", method="exact", budget=None)
    found = fits.fit(training.model, training.loader, epoch=1)
    la = LinearisedLaplace(training.model, "regression", method="exact", num_samples=16)
    la.fit_hyperparameters(training.loader, held_out, criterion="validation", progress=False)
    assert found["prior_precision"] == pytest.approx(float(la.prior_precision_), rel=1e-6)


def recorded(steps: list[Step]) -> dict[str, Any]:
    # Its steps are those of expectation maximisation, which have the precision that they start from.
    return {
        "method": Krylov(max_memory=4 * 60 * 200),
        "criterion": "evidence",
        "budget": None,
        "callback": steps.append,
    }


@pytest.mark.slow
@pytest.mark.parametrize("continued", ["same", pytest.param("copy", marks=pytest.mark.slow), "state"])
def test_a_fit_starts_from_the_one_before(continued: str) -> None:
    training, steps = Training(), []
    fits = PeriodicFits("regression", **recorded(steps))
    training.run(2, fits)
    last, model = fits.laplace_.prior_precision_.tolist(), training.model
    training.epoch()  # to weights that are not those of the fit
    if continued == "copy":
        model = copy.deepcopy(model)
    if continued == "state":
        file = io.BytesIO()
        torch.save(fits.state_dict(), file)
        fits = PeriodicFits("regression", **recorded(steps))
        fits.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        with pytest.raises(NotFittedError, match="laplace_"):
            _ = fits.laplace_
    steps.clear()
    fits.fit(model, training.loader, epoch=3)
    assert steps[0].prior_precision == pytest.approx(last, rel=1e-6)
    assert [record["epoch"] for record in fits.history_] == [1, 2, 3]
    assert fits.laplace_.network.source is model


def test_a_schedule_counts_on() -> None:
    training, fits, again = Training(), PeriodicFits("regression"), PeriodicFits("regression")
    again.load_state_dict(fits.state_dict())
    assert again.due(1)
    fits.fit(training.model, training.loader, epoch=1)
    again.load_state_dict(fits.state_dict())
    assert [again.due(epoch) for epoch in range(1, 60)] == [fits.due(epoch) for epoch in range(1, 60)]
    assert not again.due(1)
    costs = [f.fit(training.model, training.loader, epoch=9)["cost"] for f in (fits, again)]
    assert costs[0] == pytest.approx(costs[1])


def test_a_posterior_of_earlier_weights_predicts_nothing_before_a_fit() -> None:
    training = Training().run(1)
    fits = PeriodicFits("regression", budget=None)
    fits.fit(training.model, training.loader, epoch=1)
    state, x = fits.laplace_.state_dict(), training.data.tensors[0]
    earlier, before = copy.deepcopy(training.model), fits.laplace_.predict(x).stddev
    training.epoch()
    la = LinearisedLaplace(training.model, "regression")
    la.start_from(state)
    with pytest.raises(ValueError, match="buffers"):
        la.predict(x)
    training.model.load_state_dict(earlier.state_dict())
    assert torch.equal(la.predict(x).stddev, before)
    with pytest.raises(ValueError, match="likelihood"):
        LinearisedLaplace(training.model, "poisson").start_from(state)


def test_a_fit_that_fails_keeps_the_last_one() -> None:
    training = Training().run(1)
    fits = PeriodicFits("regression", budget=None)
    fits.fit(training.model, training.loader, epoch=1)
    x = training.data.tensors[0]
    before = fits.laplace_.predict(x).stddev
    with pytest.raises(ValueError, match="NaN"):
        fits.fit(training.model, [(x * torch.nan, training.data.tensors[1])], epoch=2)
    assert torch.equal(fits.laplace_.predict(x).stddev, before)
    assert len(fits.history_) == 1


def test_a_fit_that_is_stopped_keeps_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    def stop(step: Step) -> None:
        if stopping:
            raise StopFit

    training, stopping = Training().run(1), True
    fits = PeriodicFits("regression", budget=None, callback=stop)
    assert fits.fit(training.model, training.loader, epoch=1) == {}
    with pytest.raises(NotFittedError):
        fits.laplace_  # noqa: B018
    assert "epoch 1: a callback has stopped it" in caplog.text
    stopping = False
    fits.fit(training.model, training.loader, epoch=2)
    stopping, alpha = True, fits.laplace_.prior_precision_
    training.run(1)
    assert fits.fit(training.model, training.loader, epoch=3) == {}
    assert torch.equal(fits.laplace_.prior_precision_, alpha)
    assert [record["epoch"] for record in fits.history_] == [2]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: PeriodicFits("regression", every_n_epochs=0), ValueError, "`every_n_epochs`"),
        (lambda: PeriodicFits("regression", budget=-1.0), ValueError, "`budget`"),
        (lambda: PeriodicFits("regresion"), ValueError, "regresion"),
        (lambda: PeriodicFits("regression", pior="isotropic"), TypeError, "'pior'"),
        (lambda: PeriodicFits("regression", warm_start=True), TypeError, "'warm_start'"),
        (lambda: PeriodicFits("regression", metrics={"a": 1.0}), TypeError, "metrics"),  # pyright: ignore
        (lambda: PeriodicFits("regression").laplace_, NotFittedError, "laplace_"),
    ],
)
def test_bad_settings(make: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_a_fit_whose_metrics_raise_an_error_has_cost_what_it_did() -> None:
    def fails(prediction: Any, targets: Tensor) -> float:
        raise ZeroDivisionError

    training = Training()
    whole, failed = (PeriodicFits("regression", metrics=metrics) for metrics in (None, {"wrong": fails}))
    whole.fit(training.model, training.loader, training.loader, epoch=1)
    with pytest.raises(ZeroDivisionError):
        failed.fit(training.model, training.loader, training.loader, epoch=1)
    assert failed.laplace_.predict(training.data.tensors[0]).mean.shape == (60, 1)
    (record,) = failed.history_
    assert "val_log_loss" not in record
    assert 0 < record["cost"] <= whole.history_[0]["cost"]
    assert failed.state_dict()["first"] == whole.state_dict()["first"] > 0
    assert not failed.due(2)


def test_a_posterior_is_restored_for_the_weights_of_its_fit_only() -> None:
    training = Training()
    fits, loaded = PeriodicFits("regression", budget=None), PeriodicFits("regression", budget=None)
    assert not fits.restore(training.model)
    fits.fit(training.model, training.loader, epoch=1)
    loaded.load_state_dict(fits.state_dict())
    other = copy.deepcopy(training.model)
    with torch.no_grad():
        other[0].bias += 0.1
    assert not loaded.restore(other)
    with pytest.raises(NotFittedError, match=r"`restore\(model\)`"):
        _ = loaded.laplace_
    assert loaded.restore(training.model)
    x = training.data.tensors[0]
    assert torch.equal(loaded.laplace_.predict(x).samples, fits.laplace_.predict(x).samples)


def on_rank() -> dict[str, Any]:
    """Fits of networks whose running means differ, by loaders that give each process its share."""
    training = Training("classification", 3, num=61).run(1)
    rank, norm = dist.get_rank(), training.model[1]
    with torch.no_grad():
        norm.running_mean += rank
    held_out = dataset("classification", 51, outputs=3, seed=1)
    loaders = [DataLoader(data, 16, sampler=DistributedSampler(data)) for data in (training.data, held_out)]
    metrics = {
        "accuracy": accuracy_of_torchmetrics(),
        "each": lambda p, y: (p.probs.argmax(1) == y).double(),
    }
    fits = PeriodicFits("classification", metrics=metrics, budget=None, method="exact", process_group=dist.group.WORLD)
    before = training.state()
    found = fits.fit(training.model, *loaders, epoch=1)
    assert training.state() == before
    result = {"found": found, "scale": fits.laplace_.scale_, "metrics": [found[name] for name in metrics]}
    if rank == 0:  # no other process takes part
        metrics.pop("accuracy")  # torchmetrics waits for all processes
        alone = PeriodicFits("classification", metrics=metrics, budget=None, method="exact")
        result["alone"] = alone.fit(training.model, training.data, held_out, epoch=1)
    result["predicted"] = fits.laplace_.predict(held_out.tensors[0]).probs.sum().item()
    return result


@pytest.mark.slow
def test_processes_fit_the_network_of_the_first_together() -> None:
    pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    first, second = run_on_ranks(on_rank, 2)
    assert first["found"] == second["found"]
    assert first["scale"] == second["scale"]
    assert first["predicted"] == pytest.approx(second["predicted"])
    assert first["metrics"][0] == pytest.approx(first["metrics"][1])
    assert {name: first["found"][name] for name in first["alone"]} == pytest.approx(first["alone"], rel=1e-4)


def trained_in_shards(shard: bool) -> dict[str, Any]:
    """A training by `fully_shard`, or of the plain network, with fits and without."""
    data, held_out = (dataset("classification", num, outputs=3, seed=num) for num in (61, 51))
    weights, found = [], {}
    for with_fits in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))
        model.register_buffer("rank", torch.tensor(dist.get_rank() if shard else 0))
        model = fully_shard(model) if shard else model
        optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
        metrics = {"error": lambda p, y: (p.probs.argmax(1) != y).double()}
        fits = PeriodicFits("classification", metrics=metrics, budget=None, process_group="auto")
        for epoch in (1, 2):
            nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
            optimiser.step()
            with torch.no_grad():  # a validation, which leaves the weights whole
                model(held_out.tensors[0])
            if with_fits:
                found = fits.fit(model, DataLoader(data, 16), DataLoader(held_out, 16), epoch=epoch)
        assert not shard or model.get_buffer("rank") == dist.get_rank()
        model.get_buffer("rank").zero_()  # as at the fits
        with torch.no_grad():
            outputs = model(held_out.tensors[0])
        if with_fits:
            assert torch.equal(fits.laplace_.predict(held_out.tensors[0]).outputs, outputs)
        nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
        weights.append([p.full_tensor() if shard else p for p in model.parameters()])
        weights[-1].append(torch.get_rng_state())
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    return found


@pytest.mark.slow
def test_processes_that_share_out_the_weights_fit_together() -> None:
    alone = trained_in_shards(False)
    first, second = run_on_ranks(trained_in_shards, 2, True)
    assert first == second
    assert {name: first[name] for name in alone if name != "cost"} == pytest.approx(
        {name: value for name, value in alone.items() if name != "cost"}, rel=1e-4
    )


def test_labels_that_are_ignored_have_no_log_loss() -> None:
    training = Training("classification", outputs=3)
    training.run(1, PeriodicFits("classification"))
    x, y = training.data.tensors
    padded = y.clone()
    padded[::3] = -100
    there = padded != -100
    losses = []
    for data in ((x, padded), (x[there], y[there])):
        fits = PeriodicFits("classification", budget=None)
        losses.append(fits.fit(training.model, training.loader, epoch=1, val_loader=[data])["val_log_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
