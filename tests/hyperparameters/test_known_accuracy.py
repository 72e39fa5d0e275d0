"""The temperature that the accuracy on new data gives, by noise in the logits."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretended_device import pretended_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Accuracy, ClassificationPrediction, LinearisedLaplace
from laplace_sampling.hyperparameters.known_accuracy import accuracy_of, noisy_outputs
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.weighted import weighted
from laplace_sampling.solvers.solver import ConvergenceWarning

C = 3


@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli()])
def test_outputs_have_noise_with_which_labels_are_right_so_often(likelihood: Likelihood) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(C, (20_000,), generator=generator)
    f = (5 + torch.rand(len(y), 1, generator=generator, dtype=torch.float64)) * (F.one_hot(y, C).double() - 0.5)
    y = y if isinstance(likelihood, Categorical) else F.one_hot(y, C).double()

    def size(g: Tensor) -> Tensor:
        return (g - g.mean(1, keepdim=True) if isinstance(likelihood, Categorical) else g).square().sum().sqrt()

    wanted = [0.95, 0.7, 0.55]
    for noisy, accuracy in zip(noisy_outputs(likelihood, f, y, wanted, 0), wanted, strict=True):
        # The accuracy is curved between two sizes of the grid.
        assert accuracy_of(likelihood, noisy, y) == pytest.approx(accuracy, abs=0.015)
        torch.testing.assert_close(size(noisy), size(f))
    never, always = noisy_outputs(likelihood, f, y, [1.01, 0.2], 0)
    assert accuracy_of(likelihood, never, y) == 1
    chance = 1 / C if isinstance(likelihood, Categorical) else 1 / 2
    assert accuracy_of(likelihood, always, y) == pytest.approx(chance, abs=0.02)


def test_noise_is_as_large_as_the_logits_of_its_datum_and_white() -> None:
    y = torch.zeros(20_000, dtype=torch.long)
    f = torch.zeros(20_000, C, dtype=torch.float64)
    f[:, 0] = 1.0
    f[:10_000] *= 4
    (noisy,) = noisy_outputs(Categorical(), f, y, [0.8], 0)
    noisy = noisy - noisy.mean(1, keepdim=True)
    means, deviations = noisy.unflatten(0, (2, -1)).mean(1), noisy.unflatten(0, (2, -1)).std(1)
    torch.testing.assert_close(means[0], 4 * means[1], atol=0.05, rtol=0)
    torch.testing.assert_close(deviations[0], 4 * deviations[1], rtol=0.05, atol=0)
    torch.testing.assert_close(deviations[1], deviations[1].mean().expand(C), rtol=0.05, atol=0)
    # With `d = r (s z₀ − s z₁) / 3` in units of the logits: P(no other logit is larger) = 0.8.
    ratio = float(means[1, 0] / deviations[1, 0])
    z = torch.randn(200_000, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z = (z - z.mean(1, keepdim=True)) / math.sqrt(2 / 3) + ratio * torch.tensor([1.0, -0.5, -0.5])
    assert float((z.argmax(1) == 0).double().mean()) == pytest.approx(0.8, abs=0.015)


def test_accuracies_count_weights_missing_and_soft_labels() -> None:
    f = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [0.0, 4.0]], dtype=torch.float64)
    y = torch.tensor([0, 0, -100, 1])
    assert accuracy_of(Categorical(), f, y) == pytest.approx(2 / 3)
    heavy, targets = weighted(Categorical(), y, torch.tensor([1.0, 2.0, 5.0, 1.0]))
    assert accuracy_of(heavy, f, targets) == pytest.approx(2 / 4)
    soft = torch.tensor([[0.9, 0.1], [0.5, 0.5], [math.nan, math.nan], [0.2, 0.8]], dtype=torch.float64)
    assert accuracy_of(Categorical(), f, soft) == pytest.approx((0.9 + 0.5 + 0.8) / 3)
    several = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert accuracy_of(Bernoulli(), f - 0.5, several) == pytest.approx(4 / 7)


# A planted temperature ------------------------------------------------------------------------------------------------

INPUTS, NEW = 40, 20_000


def drawn(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Labels drawn from a softmax of linear logits."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(INPUTS, C, generator=torch.Generator().manual_seed(7)) / 3
    x = torch.randn(num, INPUTS, generator=generator)
    return x, torch.multinomial((x @ W).softmax(1), 1, generator=generator)[:, 0]


def overfitted(num: int, divisor: float = 1.0) -> tuple[nn.Module, DataLoader]:
    """A linear classifier at its least training loss, whose logits are then divided; and its training data."""
    x, y = drawn(num, 0)
    model = nn.Linear(INPUTS, C).requires_grad_(True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    optimiser = torch.optim.LBFGS(model.parameters(), max_iter=200)

    def loss() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-4 * model.weight.square().sum()
        loss.backward()
        return loss.detach()

    optimiser.step(loss)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for weight in model.parameters():
            weight /= divisor
    return model, DataLoader(TensorDataset(x, y), 100)


def fitted(model: nn.Module, loader: Iterable[Any], **options: Any) -> LinearisedLaplace:
    la = LinearisedLaplace(model, "classification", num_samples=8)
    return la.fit_hyperparameters(loader, progress=False, **options)


def probs(la: LinearisedLaplace, x: Tensor) -> Tensor:
    pred = la.predict(x)
    assert isinstance(pred, ClassificationPrediction)
    return pred.probs


@pytest.mark.parametrize(("num", "divisor"), [(400, 1.0), (250, 1.0), (400, 5.0)])
def test_a_planted_temperature_is_found(num: int, divisor: float) -> None:
    model, loader = overfitted(num, divisor)
    x, y = drawn(NEW, 1)
    with torch.no_grad():
        f = model(x).double()
    accuracy = float((f.argmax(1) == y).double().mean())
    grid = torch.logspace(-1.5, 1.5, 301, dtype=torch.float64)
    losses = torch.stack([F.cross_entropy(f / T, y) for T in grid])
    best = float(grid[losses.argmin()])
    assert abs(math.log(best)) > 0.2  # there is something to find
    la = fitted(model, loader, accuracy=accuracy)
    # Below one the root of the temperature is taken.
    expected = best if best > 1 else math.sqrt(best)
    assert math.log(la.temperature_) == pytest.approx(math.log(expected), abs=0.25)
    gained = F.cross_entropy(f, y) - F.cross_entropy(f / la.temperature_, y)
    assert gained > 0.6 * (F.cross_entropy(f, y) - losses.min())
    # Probabilities are those at this temperature, apart from error bars.
    expected = (f[:50] / la.temperature_).softmax(1).float()
    torch.testing.assert_close(probs(la, x[:50]), expected, atol=0.1, rtol=0)
    assert la.calibration_.scale == 1


def test_it_is_one_mechanism_with_criteria_plans_files_and_later_fits(tmp_path: Path) -> None:
    model, loader = overfitted(250)
    la = fitted(model, loader, accuracy=0.6)
    assert fitted(model, loader, criterion=Accuracy(0.6)).temperature_ == la.temperature_
    # The more errors on new data, the less sure it is.
    assert fitted(model, loader, accuracy=0.5).temperature_ > la.temperature_ > 1
    assert fitted(model, loader).temperature_ == 1
    assert la.plan(loader, accuracy=0.6).epochs == la.plan(loader).epochs
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", model)
    assert loaded.temperature_ == la.temperature_
    x = drawn(20, 1)[0]
    torch.testing.assert_close(probs(loaded, x), probs(la, x))
    again = la.temperature_
    assert la.fit_hyperparameters(loader, accuracy=0.6, warm_start=True, progress=False).temperature_ == again
    # An accuracy that is known does not change which error bars are possible, only how sure predictions are.
    assert "accuracy=" not in str(la)
    assert f"temperature_={la.temperature_:.3g}" in str(la)
    assert "pass `val_loader`, or `accuracy=`" in str(fitted(model, loader))


def test_it_takes_a_prior_of_one_precision() -> None:
    body, loader = overfitted(50)
    model = nn.Sequential(body, nn.Tanh(), nn.Linear(C, C))
    with pytest.raises(ValueError, match=r"`accuracy` looks for one prior precision.*or leave `accuracy` out"):
        LinearisedLaplace(model, "classification", prior="layerwise").fit_hyperparameters(loader, accuracy=0.6)


def test_data_on_the_cpu_and_a_model_on_a_device() -> None:
    model, loader = overfitted(250)
    expected = fitted(model, loader, accuracy=0.6).temperature_
    with pretended_device() as device:
        assert fitted(model.to(device), loader, accuracy=0.6).temperature_ == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("value", [93, 0, -0.5, math.nan, "0.9", True])
def test_it_is_a_part_of_one(value: Any) -> None:
    with pytest.raises(ValueError, match="`accuracy` must be positive and finite, and at most 1, a part of one"):
        Accuracy(value)


def test_what_says_nothing_is_refused_or_told() -> None:
    model, loader = overfitted(250)
    with pytest.raises(ValueError, match="above chance, 1/3 of 3 classes"):
        fitted(model, loader, accuracy=0.3)
    with pytest.raises(ValueError, match="give it or `val_loader`"):
        fitted(model, loader, accuracy=0.6, val_loader=loader)
    with pytest.raises(ValueError, match="give `accuracy` or `criterion`"):
        fitted(model, loader, accuracy=0.6, criterion="evidence")
    regression = LinearisedLaplace(nn.Linear(2, 1), "regression")
    with pytest.raises(ValueError, match="`accuracy` is that of labels"):
        regression.fit_hyperparameters([(torch.randn(9, 2), torch.randn(9, 1))], accuracy=0.9)
    x, _ = drawn(250, 0)
    others = DataLoader(TensorDataset(x, drawn(250, 5)[1]), 100)  # labels that the network was not trained on
    with pytest.warns(ConvergenceWarning, match="more than the network has on the training data"):
        fitted(model, others, accuracy=0.95)
