"""A warning is for what users should act on; what else there is to know is a line of `print(la)`."""

import copy
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from laplace_sampling import (
    CalibrationWarning,
    ConvergenceWarning,
    Data,
    Gaussian,
    LinearisedLaplace,
    RegressionPrediction,
)

Batches = list[tuple[Tensor, Tensor]]


@cache
def _data() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of which one or two matter, noisy targets, and labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1200, 8, generator=generator, dtype=torch.float64)
    y = (2 * x[:, :1]).sin() + 0.3 * torch.randn(1200, 1, generator=generator, dtype=torch.float64)
    return x, y, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


@cache
def _trained(kind: str, num: int, width: int, steps: int, decay: float) -> nn.Module:
    x, y, labels = _data()
    loss, targets, outputs = (mse_loss, y, 1) if kind == "regression" else (cross_entropy, labels, 3)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, outputs)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.02, weight_decay=decay)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(x[:num]), targets[:num]).backward()
        optimiser.step()
    return model


def trained(kind: str, num: int = 200, width: int = 16, steps: int = 100, decay: float = 0.0) -> tuple:
    """A network, the batches that it was trained on, and other ones."""
    x, y, labels = _data()
    targets = y if kind == "regression" else labels
    model = copy.deepcopy(_trained(kind, num, width, steps, decay))
    return model, [(x[:num], targets[:num])], [(x[600:], targets[600:])]


def coverage(la: LinearisedLaplace, batches: Batches) -> float:
    (x, y) = batches[0]
    predicted = la.predict(x)
    assert isinstance(predicted, RegressionPrediction)
    low, high = predicted.interval(0.9)
    return float(((low < y) & (y < high)).double().mean())


@pytest.mark.parametrize("method", ["auto", "dual", pytest.param("krylov", marks=pytest.mark.slow)])
def test_a_network_that_knows_its_data_by_heart_is_told_with_its_cures(method: str) -> None:
    model, train, test = trained("regression", width=32, steps=500)
    la = LinearisedLaplace(model, "regression", method=method)
    with pytest.warns(CalibrationWarning, match="by heart") as told:
        la.fit_hyperparameters(train, progress=False)
    assert len(told) == 1
    covered = coverage(la, test)
    print(f"γ {float(la.effective_dimension_):.1f} of 200; intervals of 90 % cover {covered:.2f} of 600 data, ± 0.02")
    assert covered < 0.8


def test_the_cures_are_no_longer_warned_of() -> None:
    """Warnings are errors: weight decay, or data that choose the noise."""
    model, train, test = trained("regression", width=32, steps=500)
    LinearisedLaplace(model, "regression").fit_hyperparameters(train, test, progress=False)
    model, train, test = trained("regression", width=32, steps=500, decay=0.02)
    la = LinearisedLaplace(model, "regression").fit_hyperparameters(train, progress=False)
    covered = coverage(la, test)
    print(f"with weight decay intervals of 90 % cover {covered:.2f}")
    assert covered > 0.8


def test_too_few_data_are_told() -> None:
    model, train, _ = trained("regression", num=12, steps=300)
    with pytest.warns(CalibrationWarning, match="too few"):
        LinearisedLaplace(model, "regression").fit_hyperparameters(train, progress=False)


def test_a_network_without_noise_that_is_right_is_no_problem() -> None:
    """It knows more than nine tenths of its data, and predicts others as well."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1)).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    noise = 1e-3 * torch.randn(12, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    LinearisedLaplace(model, "regression").fit_hyperparameters([(x, model(x).detach() + noise)], progress=False)


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("criterion", ["auto", "evidence"])
def test_validation_data_of_another_task_are_told(kind: str, criterion: str) -> None:
    model, train, [(x, y)] = trained(kind)
    la = LinearisedLaplace(model, kind, num_samples=16)
    la.fit_hyperparameters(train, [(x[:5], y[:5])], criterion=criterion, progress=False)
    la.fit_hyperparameters(train, [(x[:200], y[:200])], criterion=criterion, progress=False)
    shuffled = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(0))]
    in_other_units = [(x[:200], 5 * y[:200] + 20), (x[:200], y[:200] + 2)] if kind == "regression" else []
    for stale in ((x[:200], shuffled[:200]), *in_other_units, (x[:200].flip(1), y[:200])):
        with pytest.warns(CalibrationWarning, match="val_loader"):
            la.fit_hyperparameters(train, [stale], criterion=criterion, progress=False)
    with pytest.warns(CalibrationWarning, match="without inputs"):
        la.calibrate([stale])
    # Log-likelihoods of 200 targets by mean and variance, or by frequencies, of those of the training data.
    (_, trained_on), calibration = train[0], la.calibration_
    if kind == "regression":
        constant = torch.distributions.Normal(trained_on.mean(), trained_on.std(correction=0)).log_prob(y[:200])
    else:
        constant = (trained_on.bincount() / len(trained_on)).log()[y[:200]]
    assert calibration.log_likelihood is not None
    assert calibration.log_likelihood < float(constant.sum()) + 1


def test_a_budget_that_ends_too_early_is_told() -> None:
    """A part of the data is all that it pays for."""
    x = torch.randn(600, 400, generator=torch.Generator().manual_seed(0))
    y = (x[:, :4] + 0.5 * torch.randn(600, 4, generator=torch.Generator().manual_seed(1))).argmax(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(400, 100), nn.Tanh(), nn.Linear(100, 4))
    la = LinearisedLaplace(model, "classification", method="subset", num_samples=8)
    with pytest.warns(ConvergenceWarning, match="budget"):
        la.fit(([(x, y)]), budget=0.1, progress=False)


@pytest.mark.parametrize("learn", [True, False])
def test_targets_in_other_units_than_those_of_the_training_are_told(learn: bool) -> None:
    model, [(x, y)], _ = trained("regression", decay=0.1)
    la = LinearisedLaplace(model, Gaussian(1.0, learn=learn))
    with pytest.warns(
        CalibrationWarning, match=r"off its training targets by 51 .*standard deviation of 7\.\d.*standardised"
    ):
        la.fit_hyperparameters([(x, 50 + 10 * y)], progress=False)
    la.fit_hyperparameters([(x, y + y.mean())], progress=False)  # a bias is no other unit


def test_units_are_judged_by_each_output_and_as_they_were_given() -> None:
    """Outputs of large numbers hide no others, noise variances are no units, and few targets say nothing."""
    model, [(x, y)], _ = trained("regression", decay=0.1)
    both = nn.Sequential(model, nn.Linear(1, 2).double())
    with torch.no_grad():
        both[1].weight.copy_(torch.tensor([[1.0], [100.0]])), both[1].bias.zero_()
    two = torch.cat([50 + y, 100 * y], 1)
    with pytest.warns(CalibrationWarning, match=r"of output 0 by 50 .*standard deviation of 0\.7"):
        LinearisedLaplace(both, Gaussian(torch.ones(2))).fit_hyperparameters([(x, two)], progress=False)
    few = torch.cat([y, 100 * y], 1)
    few[5:, 1], few[:5, 1] = torch.nan, 1000.0 + torch.arange(5)
    LinearisedLaplace(both, Gaussian(torch.ones(2))).fit_hyperparameters([(x, few)], progress=False)
    constant = torch.cat([y, 100.0 + 1e-4 * y], 1)  # up to rounding: it has no unit
    LinearisedLaplace(both, Gaussian(torch.ones(2))).fit_hyperparameters([(x, constant)], progress=False)
    la, variances = LinearisedLaplace(model, "regression"), Data(noise_variances=torch.full((len(x),), 100.0))
    with pytest.warns(CalibrationWarning, match=r"by 51 .*standard deviation of 7\.\d"):
        la.fit_hyperparameters([(x, 50 + 10 * y)], data=variances, progress=False)


def test_a_classification_without_error_bars_says_so() -> None:
    model, train, test = trained("classification", num=60, steps=400)
    la = LinearisedLaplace(model, "classification").fit_hyperparameters(train, progress=False)
    gamma = float(la.effective_dimension_)
    print(f"γ {gamma:.2g}")
    assert gamma < 1
    assert "Error bars are negligible" in str(la)
    assert "`val_loader`" in str(la)
    la.fit_hyperparameters(train, test, progress=False)
    print(f"γ with held-out data {float(la.effective_dimension_):.3g}")
    assert "negligible" not in str(la)


def test_a_network_that_ends_in_a_softmax_is_told_by_its_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 2, generator=generator), torch.arange(30) % 3
    layers = nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)
    with pytest.warns(CalibrationWarning, match="softmax"):
        LinearisedLaplace(nn.Sequential(*layers, nn.Softmax(-1)), "classification").fit_hyperparameters(
            [(x, y)], progress=False
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "With its error bars")
        LinearisedLaplace(nn.Sequential(*layers, nn.LogSoftmax(-1)), "classification").fit_hyperparameters(
            [(x, y)], progress=False
        )
