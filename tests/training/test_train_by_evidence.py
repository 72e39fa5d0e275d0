"""Training by the evidence: its loss, its updates, the checkpoint that is kept, and what it refuses."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_sampling import Data, Gaussian, IsotropicPrior, LayerwisePrior, LinearisedLaplace
from laplace_sampling.training.train_by_evidence import (
    PrecisionUpdate,
    TrainedByEvidence,
    train_by_evidence,
    updated_precisions,
)

NUM, CLASSES = 48, 3


def network(outputs: int = CLASSES, *middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 6), *middle, nn.Tanh(), nn.Linear(6, outputs)).double()


def dataset(kind: str = "classification") -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(NUM, 2, generator=generator, dtype=torch.float64)
    if kind == "classification":
        return TensorDataset(x, (x.sum(1) > 0).long() + (x[:, 0] > 1))
    noise = torch.randn(NUM, 1, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.sin(2 * x[:, :1]) + 0.2 * noise)


def shuffled(kind: str = "classification") -> DataLoader:
    return DataLoader(dataset(kind), batch_size=10, shuffle=True)


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, **settings)


def trained(model: nn.Module, optimiser: Any, **settings: Any) -> TrainedByEvidence:
    given = {"likelihood": "classification", "loader": shuffled(), "epochs": 4, "progress": False, **settings}
    return train_by_evidence(model, optimiser=optimiser, **given)


def plain(
    model: nn.Module,
    loader: DataLoader,
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    optimiser: torch.optim.Optimizer,
    after_epoch: Callable[[], object] = lambda: None,
) -> None:
    """An ordinary training loop."""
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            loss(model(x), y).backward()
            optimiser.step()
        after_epoch()


def assert_same(first: nn.Module, second: nn.Module) -> None:
    for name, value in first.state_dict().items():
        assert_close(second.state_dict()[name], value, rtol=1e-9, atol=1e-12)


# The loss -------------------------------------------------------------------------------------------------------------


def test_with_precisions_that_stay_it_is_training_with_weight_decay() -> None:
    alpha, epochs = 3.0, 5
    by_hand, model = network(CLASSES, nn.BatchNorm1d(6)), network(CLASSES, nn.BatchNorm1d(6))
    torch.manual_seed(5)
    plain(by_hand, shuffled(), F.cross_entropy, epochs, sgd(by_hand, momentum=0.9, weight_decay=alpha / NUM))
    torch.manual_seed(5)
    # Nothing that is read before training draws from the state of all randomness.
    result = trained(model, sgd(model, momentum=0.9), epochs=epochs, every=epochs, prior=IsotropicPrior(alpha))
    assert result.epochs_ == [epochs]
    assert_same(by_hand, model)


def test_each_layer_has_its_own_decay_and_others_have_none() -> None:
    by_hand, model = network(CLASSES, nn.LayerNorm(6).double()), network(CLASSES, nn.LayerNorm(6).double())
    groups = [
        {"params": by_hand[0].parameters(), "weight_decay": 4.0 / NUM},
        {"params": by_hand[1].parameters()},
        {"params": by_hand[3].parameters(), "weight_decay": 0.5 / NUM},
    ]
    torch.manual_seed(5)
    plain(by_hand, shuffled(), F.cross_entropy, 3, torch.optim.SGD(groups, lr=0.1))
    torch.manual_seed(5)
    prior = LayerwisePrior(0.5, layers={"0": 4.0})
    trained(model, sgd(model), epochs=3, every=3, prior=prior, parameters="!LayerNorm.*")
    assert_same(by_hand, model)


def test_a_regression_has_half_the_squared_error_as_its_loss() -> None:
    by_hand, model, b = network(1), network(1), 20.0
    torch.manual_seed(5)
    decay = 2.0 / (NUM * b)
    plain(by_hand, shuffled("regression"), lambda f, y: 0.5 * F.mse_loss(f, y), 3, sgd(by_hand, weight_decay=decay))
    torch.manual_seed(5)
    settings = {"likelihood": Gaussian(b), "loader": shuffled("regression"), "prior": IsotropicPrior(2.0)}
    trained(model, sgd(model), epochs=3, every=3, **settings)
    assert_same(by_hand, model)


def test_the_decay_after_an_update_is_that_of_its_precisions() -> None:
    by_hand, model = network(), network()
    loader = DataLoader(dataset(), batch_size=12)
    plain(by_hand, loader, F.cross_entropy, 2, sgd(by_hand, weight_decay=1 / NUM))
    update = updated_precisions(by_hand, "classification", loader)
    first, last = (alpha / NUM for alpha in update.prior_precision.tolist())
    groups = [
        {"params": by_hand[0].parameters(), "weight_decay": first},
        {"params": by_hand[2].parameters(), "weight_decay": last},
    ]
    plain(by_hand, loader, F.cross_entropy, 2, torch.optim.SGD(groups, lr=0.1))
    result = trained(model, sgd(model), loader=loader, epochs=4, every=2)
    assert result.epochs_ == [2, 4]
    torch.testing.assert_close(result.history_[0].prior_precision, update.prior_precision, rtol=1e-9, atol=0)
    assert result.best_epoch_ == 4
    assert_same(by_hand, model)


def test_an_optimiser_that_asks_for_the_loss_again() -> None:
    model = network()
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")
    loader = [dataset().tensors]
    trained(model, optimiser, loader=loader, epochs=10, every=10, prior=IsotropicPrior(1.0))
    x, y = dataset().tensors
    objective = F.cross_entropy(model(x), y) + 0.5 / NUM * sum(p.square().sum() for p in model.parameters())
    gradients = torch.autograd.grad(objective, list(model.parameters()))
    assert max(float(g.abs().max()) for g in gradients) < 1e-5


def test_a_scheduler_is_called_after_epochs() -> None:
    by_hand, model = network(), network()
    optimisers = [sgd(by_hand), sgd(model)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.9) for optimiser in optimisers]
    torch.manual_seed(5)
    plain(by_hand, shuffled(), F.cross_entropy, 3, optimisers[0], after_epoch=schedulers[0].step)
    torch.manual_seed(5)
    trained(model, optimisers[1], epochs=3, every=3, prior=IsotropicPrior(1e-12), scheduler=schedulers[1])
    assert schedulers[1].last_epoch == 3
    assert_same(by_hand, model)


# Updates and the checkpoint -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({"epochs": 12}, [5, 10, 12]),
        ({"epochs": 3}, [3]),
        ({"epochs": 3, "every": 1}, [1, 2, 3]),
        ({"epochs": 1}, [1]),
    ],
)
def test_updates_come_after_every_few_epochs_and_at_the_end(settings: dict[str, int], epochs: list[int]) -> None:
    model, seen = network(), list[tuple[int, PrecisionUpdate]]()
    result = trained(model, sgd(model), callback=lambda epoch, update: seen.append((epoch, update)), **settings)
    assert result.epochs_ == epochs
    assert [epoch for epoch, _ in seen] == epochs
    assert [id(update) for _, update in seen] == [id(update) for update in result.history_]


def test_the_model_has_the_weights_of_the_largest_evidence() -> None:
    model, states = network(CLASSES, nn.BatchNorm1d(6)), list[dict[str, Tensor]]()
    optimiser = sgd(model)

    def callback(epoch: int, update: PrecisionUpdate) -> None:
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        if epoch == 6:
            optimiser.param_groups[0]["lr"] = 30.0  # from here on weights are thrown about

    result = trained(model, optimiser, epochs=9, every=1, callback=callback)
    values = [update.log_marginal_likelihood.value for update in result.history_]
    best = values.index(max(values))
    assert result.best_epoch_ == best + 1 < 9
    assert all(torch.equal(value, states[best][name]) for name, value in model.state_dict().items())
    assert result.best_ is result.history_[best]


def test_noise_and_precisions_are_those_of_the_largest_evidence() -> None:
    x, y = dataset("regression").tensors
    model = network(1)
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    result = trained(model, optimiser, likelihood="regression", loader=[(x, y)], epochs=600, every=60)
    assert result.best_.noise_precision == pytest.approx(25, rel=0.4)
    la = LinearisedLaplace(model, result.best_.likelihood, prior=result.best_.prior, method="kfac")
    la.fit([(x, y)], progress=False)
    assert la.noise_precision_ is not None
    assert float(la.noise_precision_) == result.best_.noise_precision
    # At the end of training, precisions and weights agree.
    norms = torch.stack([sum(p.detach().square().sum() for p in model[i].parameters()) for i in (0, 2)])
    assert_close(result.best_.prior_precision * norms, la.effective_dimension_, rtol=0.05, atol=0)
    squares = result.best_.noise_precision * float((model(x) - y).detach().square().sum())
    assert squares + float((result.best_.prior_precision * norms).sum()) == pytest.approx(y.numel(), rel=0.05)


class Augmented(Dataset):
    """Inputs with noise that is drawn anew."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return x + 0.01 * torch.randn(2, dtype=torch.float64), y


def test_augmented_data_need_the_data_themselves_for_the_evidence() -> None:
    model, loader = network(), DataLoader(Augmented(dataset()), batch_size=12)
    before = model[0].weight.clone()
    with pytest.raises(ValueError, match="augmentation"):
        trained(model, sgd(model), loader=loader)
    assert torch.equal(model[0].weight, before)
    result = trained(model, sgd(model), loader=loader, evidence_loader=shuffled(), every=2)
    update = updated_precisions(model, "classification", shuffled(), prior=result.history_[-2].prior)
    assert update.prior_precision.tolist() == result.best_.prior_precision.tolist()


def test_other_batches_and_settings_of_updates() -> None:
    x, y = dataset().tensors

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            return ({"a": a, "b": b} for a, b in zip(x, y, strict=True))

    model = network()
    loader = DataLoader(Stream(), batch_size=12)
    result = trained(
        model,
        sgd(model),
        loader=loader,
        data=Data(unpack=lambda batch: (batch["a"], batch["b"]), num_data=NUM),
        method="diagonal",
        prior="isotropic",
        seed=3,
        every=2,
    )
    update = updated_precisions(
        model, "classification", [(x, y)], method="diagonal", prior=result.history_[-2].prior, seed=3
    )
    assert_close(result.best_.prior_precision, update.prior_precision, rtol=1e-9, atol=0)


def test_heads_have_a_likelihood_each() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network(CLASSES + 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            outputs = self.body(x)
            return {"label": outputs[:, :CLASSES], "value": outputs[:, CLASSES:]}

    (x, labels), (_, values), model = dataset().tensors, dataset("regression").tensors, Heads()
    likelihood = {"label": "classification", "value": Gaussian(10.0, learn=False)}
    loader = [(x, {"label": labels, "value": values})]
    by_hand = Heads()
    optimiser = sgd(by_hand, weight_decay=1 / NUM)
    for _ in range(2):
        optimiser.zero_grad()
        f = by_hand(x)
        (F.cross_entropy(f["label"], labels) + 5 * F.mse_loss(f["value"], values)).backward()
        optimiser.step()
    trained(model, sgd(model), likelihood=likelihood, loader=loader, epochs=2, every=2)
    assert_same(by_hand, model)


def test_parts_that_the_user_has_in_evaluation_mode_stay_so() -> None:
    """As running statistics of a network that is trained on; dropout inside of such a part draws nothing."""
    model = network(CLASSES, nn.BatchNorm1d(6).double(), nn.Sequential(nn.Dropout(0.5)), nn.BatchNorm1d(6).double())
    model[1].eval()
    model[2].eval()
    modes, fixed = {n: part.training for n, part in model.named_modules()}, model[1].running_mean.clone()
    seen = []
    model.register_forward_pre_hook(
        lambda *_: seen.append({n: part.training for n, part in model.named_modules()}) if model.training else None
    )
    trained(model, sgd(model), epochs=2)
    assert torch.equal(model[1].running_mean, fixed)
    assert model[3].running_mean.abs().max() > 0
    assert all(each == modes for each in seen)
    assert {n: part.training for n, part in model.named_modules()} == modes


def test_a_model_in_evaluation_mode_is_trained_and_put_back() -> None:
    model = network(CLASSES, nn.BatchNorm1d(6), nn.Dropout(0.5)).eval()
    seen: list[list[bool]] = []
    model.register_forward_pre_hook(lambda module, _: seen.append([part.training for part in module.modules()]))
    trained(model, sgd(model), epochs=2)
    assert not any(part.training for part in model.modules())
    assert [True] * 6 in seen


def test_an_interrupt_leaves_the_best_weights_so_far() -> None:
    model, states = network(), list[dict[str, Tensor]]()

    def callback(epoch: int, update: PrecisionUpdate) -> None:
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        if epoch == 3:
            with torch.no_grad():
                model[0].weight.fill_(7.0)
            raise KeyboardInterrupt

    model.eval()
    with pytest.raises(KeyboardInterrupt):
        trained(model, sgd(model), epochs=5, every=1, callback=callback)
    assert any(all(torch.equal(v, state[k]) for k, v in model.state_dict().items()) for state in states)
    assert not model.training


def test_weights_that_become_nan_are_an_error() -> None:
    model = network()
    with pytest.raises(ValueError, match="NaN"):
        trained(model, torch.optim.SGD(model.parameters(), lr=1e300), epochs=4, every=1)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs="),
        ({"every": 2.5}, ValueError, "every="),
        ({"method": "exact"}, ValueError, "Factored"),
        ({"loader": iter([])}, TypeError, "iterator"),
        ({"likelihood": "regression"}, TypeError, r"y\.float"),
    ],
)
def test_bad_settings(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(error, match=message):
        trained(model, **{"optimiser": sgd(model), **settings})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_weight_decay_of_the_optimiser_would_count_twice() -> None:
    model = network()
    with pytest.raises(ValueError, match="weight_decay"):
        trained(model, torch.optim.AdamW(model.parameters()))
    trained(model, torch.optim.AdamW(model.parameters(), weight_decay=0.0), epochs=1)


def test_an_optimiser_of_another_model() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"'0\.weight'"):
        trained(model, sgd(network()))
