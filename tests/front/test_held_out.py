"""The scale of the posterior of a `LinearisedLaplace`, with validation data and without."""

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from problems import trained
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_sampling import (
    CalibrationWarning,
    ConvergenceWarning,
    Data,
    Evidence,
    Gaussian,
    IsotropicPrior,
    LinearisedLaplace,
    NotFittedError,
    Validation,
    calibrated,
    from_loss,
)
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model import held_out
from laplace_sampling.methods.problem import Budget
from laplace_sampling.predictions.calibration import Calibration, calibrate


def overfitted() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Three noisy classes in the plane, a network that has learnt 90 points by heart, and new ones."""
    return copy.deepcopy(_overfitted())


@functools.cache
def _overfitted() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(690) % 3
    centres = torch.tensor([[0.0, 1.0], [1.0, -0.5], [-1.0, -0.5]])
    x = (centres[y] + 0.8 * torch.randn(690, 2, generator=generator)).double()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(600):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x[:90]), y[:90]).backward()
        optimiser.step()
    return model.eval(), (x[:90], y[:90]), (x[90:], y[90:])


def test_validation_data_choose_scale_and_temperature(tmp_path: Path) -> None:
    model, train, test = overfitted()
    valid, test = (test[0][:200], test[1][:200]), (test[0][200:], test[1][200:])
    la = LinearisedLaplace(model, "classification", prior="isotropic")
    val_loader = DataLoader(TensorDataset(*valid), batch_size=64)
    la.fit_hyperparameters([train], val_loader=val_loader, criterion="evidence", progress=False)
    pred = la.predict(valid[0])
    assert_close(pred.logits, la.network(valid[0]) / la.temperature_)

    def loss(scale: float, temperature: float, x: Tensor, y: Tensor) -> float:
        # Draws of the outputs from their covariance, by which probabilities are predicted.
        drawn = la.predict(x)._draws * la.temperature_ / math.sqrt(la.scale_)
        f, d = la.network(x), math.sqrt(scale) * drawn
        p = (torch.cat([f + d, f - d]) / temperature).softmax(-1).mean(0)
        return -float((p[torch.arange(len(y)), y]).log().mean())

    def penalised(scale: float, temperature: float) -> float:
        prior = math.log(scale) ** 2 / 8 + 2 * math.log(temperature) ** 2
        return loss(scale, temperature, *valid) + prior / len(valid[1])

    assert -float(pred.log_prob(valid[1]).mean()) == pytest.approx(loss(la.scale_, la.temperature_, *valid))
    grid = [penalised(s, t) for s in (0.01, 0.1, 0.5, 1.0, 2.0, 10.0) for t in (1.0, 1.5, 2.0, 3.0, 5.0)]
    best = penalised(la.scale_, la.temperature_)
    assert best < min(grid) + 1e-6
    assert la.temperature_ > 1.05  # not at its bound
    for factor in (0.97, 1.03):
        assert best < penalised(factor * la.scale_, la.temperature_) < best + 1e-2
        assert best < penalised(la.scale_, factor * la.temperature_) < best + 1e-2
    assert loss(la.scale_, la.temperature_, *test) < 0.9 * loss(1e-9, 1.0, *test)
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", model)
    assert (loaded.scale_, loaded.temperature_) == (la.scale_, la.temperature_)
    assert_close(loaded.predict(test[0]).probs, la.predict(test[0]).probs, rtol=0, atol=0)


def test_a_small_budget_takes_the_temperature_from_all_validation_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Error bars are computed at some of them, but their labels are all counted."""
    model, train, valid = overfitted()
    found = []
    for free in (1e5, 1e12):
        monkeypatch.setattr(Budget, "FREE", free)
        la = LinearisedLaplace(model, "classification", prior="isotropic", method="kfac")
        la.fit_hyperparameters([train], [valid], budget=1.0, progress=False)
        found.append(la)
    drawn = [la._require("test").fit.task.selection.model.num_data for la in found]
    assert drawn[0] < 100 < drawn[1] == 600
    few, every = (math.log(la.temperature_) for la in found)
    by_few = calibrate(Categorical(), valid[1][:50], found[1].network(valid[0][:50]), torch.zeros(1, 50, 3))
    assert abs(math.log(by_few.temperature) - every) > 0.2
    assert abs(few - every) < 0.1


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_validation_data_of_a_regression_choose_scale_and_noise(method: str) -> None:
    case = trained()
    x, y = case.x, case.y
    la = laplace_of(case.model, "regression", method=method, prior="isotropic", num_samples=32)
    la.fit_hyperparameters(case.batches, val_loader=[(x, y + 0.3)], criterion="evidence", progress=False)
    before = laplace_of(case.model, "regression", method=method, prior="isotropic", num_samples=32)
    before.fit_hyperparameters(case.batches, progress=False)
    assert before.scale_ == 1
    best = float(la.predict(x).log_prob(y + 0.3).mean())
    assert best > float(before.predict(x).log_prob(y + 0.3).mean())
    assert la.noise_precision_ is not None
    assert before.noise_precision_ is not None
    mean, covariance = before.predict(x).mean, before.predict(x).covariance()
    assert la.scale_ != 1
    assert_close(la.predict(x).covariance(), la.scale_ * covariance)
    eye = torch.eye(mean.shape[1], dtype=mean.dtype)

    def posterior(scale: float, factor: float) -> float:
        total = scale * covariance + factor / before.noise_precision_ * eye
        normal = torch.distributions.MultivariateNormal(mean, total)
        prior = -(math.log(scale) ** 2) / 8 - 5 * (math.log(factor) + 1 / factor)  # χ² of ten degrees of freedom
        return float(normal.log_prob(y + 0.3).sum()) + prior

    found = la.scale_, float(before.noise_precision_ / la.noise_precision_)
    for scale in (0.8, 1.0, 1.25):
        for factor in (0.8, 1.0, 1.25):
            assert posterior(scale * found[0], factor * found[1]) <= posterior(*found) + 1e-4


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize("method", ["exact", pytest.param("krylov", marks=pytest.mark.slow)])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_fitted_posterior_is_calibrated_later(method: str, loaded: bool, tmp_path: Path) -> None:
    """As if the held-out data had been there at the fit; what was chosen before does not matter."""
    case = trained()
    for likelihood, y in (("regression", case.y), ("classification", (case.y[:, 0] > 0).long())):
        model, loader = case.model if likelihood == "regression" else nn.Linear(1, 2).double(), [(case.x, y)]
        valid = [(case.x[:20], y[:20] + 0.3 if likelihood == "regression" else 1 - y[:20])]
        settings = {"method": method, "num_samples": 8}
        known = laplace_of(model, likelihood, **settings)
        known.fit_hyperparameters(loader, val_loader=valid, criterion="evidence", progress=False)
        la = laplace_of(model, likelihood, **settings)
        la.fit_hyperparameters(loader, criterion="evidence", progress=False)
        samples = la.samples_
        if loaded:
            la.save(tmp_path / "la.pt")
            la = LinearisedLaplace.load(tmp_path / "la.pt", model)
        assert la.calibrate(loader) is la
        assert la.scale_ != known.scale_
        la.calibrate([(*valid[0], 0)], data=Data(unpack=lambda batch: batch[:2]))
        assert (la.scale_, la.temperature_) == pytest.approx((known.scale_, known.temperature_))
        assert_close(la.noise_precision_, known.noise_precision_)
        assert_close(la.predict(case.x).variance, known.predict(case.x).variance)
        assert_close(la.samples_, samples, rtol=0, atol=0)


def test_some_of_the_training_data_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y), _ = overfitted()
    monkeypatch.setattr(calibrated.OnTrainingData, "FEW", 30)  # of 90, every third
    seen, calibration = [], calibrated.OnTrainingData.calibration
    monkeypatch.setattr(
        calibrated.OnTrainingData, "calibration", lambda *args: seen.append(args[0]) or calibration(*args)
    )
    la = LinearisedLaplace(model, "classification", num_samples=8)
    la.fit_hyperparameters([(x, y)], criterion="evidence", progress=False)
    assert seen[0].some.tolist() == list(range(0, 90, 3))
    assert_close(seen[0].deviations, la.network.jvp(x[::3], la.samples_))


def padded(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*batch, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(list(x), batch_first=True), pad(list(y), batch_first=True, padding_value=-100)


# The network is not trained: it predicts worse than without inputs, and a warning says so.
@pytest.mark.filterwarnings("ignore:.* are predicted no better than without inputs:laplace_sampling.CalibrationWarning")
def test_held_out_sequences_of_different_length() -> None:
    """Of each batch as of one that is padded to the longest of all."""
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 5, 2, 4, 6, 6, 2, 3]
    x = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in lengths]
    data = [(v, (v[:, 0] > 0).long() + (torch.rand(len(v), generator=generator) > 0.5).long()) for v in x]
    model = nn.Linear(2, 3).double()
    la = laplace_of(model, Categorical(class_dim=-1), method="exact", prior_precision=1.0, num_samples=4)
    la.fit(DataLoader(data, 2, collate_fn=padded), progress=False)  # so that it predicts two at a time
    found = []
    for batch_size in (8, 2):
        la.calibrate(DataLoader(data, batch_size, collate_fn=padded))
        found.append((la.scale_, la.temperature_))
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class Stream(IterableDataset):
    """Without a length."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(self.x, self.y, strict=True))


def test_held_out_data_in_half_precision_and_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model, train, test = overfitted()
    model, (x, y) = model.float(), (test[0][:60].half(), test[1][:60])
    la = laplace_of(model, "classification", prior_precision=1.0).fit([(train[0].float(), train[1])], progress=False)
    known = la.calibrate([(x.float(), y)]).scale_
    assert la.calibrate([(x, y)]).scale_ == known
    monkeypatch.setattr(calibrated, "_ENOUGH", 40)
    first = la.calibrate([(x[:40], y[:40])]).scale_
    stream = DataLoader(Stream(x, y), 20)
    # nothing is kept of the stream, so that it is read in its order: the first so many
    monkeypatch.setattr(held_out.TrainingData, "in_order", True)
    assert la.calibrate(stream, data=Data(num_data=60)).scale_ == first
    with pytest.raises(ValueError, match="num_data"):
        la.calibrate(stream)


# The network is not trained: it predicts worse than without inputs, and a warning says so.
@pytest.mark.filterwarnings("ignore:.* are predicted no better than without inputs:laplace_sampling.CalibrationWarning")
def test_messages_of_calibrating() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression")
    with pytest.raises(NotFittedError, match="calibrate"):
        la.calibrate(case.batches)
    la.fit(case.batches, progress=False)
    found = la.predict(case.x).variance
    with pytest.raises(ValueError, match="targets"):
        la.calibrate([(case.x, case.y * math.nan)])
    assert_close(la.predict(case.x).variance, found, rtol=0, atol=0)
    la.fit(case.batches, data=Data(noise_variances=torch.ones(len(case.y))), progress=False)
    with pytest.raises(ValueError, match="noise_variances"):
        la.calibrate(case.batches)
    loaded = LinearisedLaplace(case.model, "regression")
    loaded.load_state_dict(la.state_dict())
    with pytest.raises(ValueError, match="noise_variances"):  # also of what is loaded
        loaded.calibrate(case.batches)
    loaded.load_state_dict(LinearisedLaplace(case.model, "regression").fit(case.batches, progress=False).state_dict())
    assert loaded.calibrate(case.batches) is loaded  # nothing is left of the fit before
    measured = laplace_of(case.model, Gaussian(1.0, observe=torch.ones(1, 1, dtype=torch.float64)))
    measured.fit(case.batches, progress=False)
    with pytest.raises(ValueError, match="observe"):
        measured.calibrate(case.batches)


def test_messages() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression")
    with pytest.raises(ValueError, match="noise_variances"):
        la.fit_hyperparameters(
            case.batches, val_loader=case.batches, data=Data(noise_variances=torch.ones(len(case.y)))
        )
    with pytest.raises(ValueError, match="targets"):
        la.fit_hyperparameters(case.batches, val_loader=[(case.x, case.y * math.nan)], progress=False)
    line, x = nn.Linear(1, 1).double(), torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    nn.init.constant_(line.weight, 2.0)
    wide, far = LinearisedLaplace(line, "regression"), [(1.7e308 * x[-1:], x[-1:])]
    # The output of the last is finite, and the square of its feature is not.
    for rule, data in (("evidence", far), ("validation", far), ("validation", [(1e200 * x[-1:], x[-1:])])):
        with pytest.raises(ValueError, match="outputs"):
            wide.fit_hyperparameters([(x, x + x**2)], val_loader=data, criterion=rule, progress=False)


def regression_with_noise(num: int, seed: int) -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A linear model at least squares of 40 data, held-out data, and others to test it."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(40 + num, 6, generator=g, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(40 + num, 1, generator=g, dtype=torch.float64)
    model = nn.Linear(6, 1).double()
    joined = torch.cat([x, torch.ones_like(y)], 1)
    solution = torch.linalg.lstsq(joined[:40], y[:40]).solution
    with torch.no_grad():
        model.weight.copy_(solution[:6].T)
        model.bias.copy_(solution[6])
    return model, (x[:40], y[:40]), (x[40:], y[40:])


@pytest.mark.parametrize("criterion", ["validation", "evidence"])
@pytest.mark.parametrize("num", [1, 3, 10])
def test_few_validation_data_of_a_regression_do_not_choose_its_noise_alone(num: int, criterion: str) -> None:
    for seed in range(6):
        model, train, (x, y) = regression_with_noise(300, seed)
        la = LinearisedLaplace(model, "regression", method="exact")
        plain = float(la.fit_hyperparameters([train], progress=False).predict(x[num:]).log_prob(y[num:]).mean())
        la.fit_hyperparameters([train], [(x[:num], y[:num])], criterion=criterion, progress=False)
        if criterion == "validation":
            assert float(la.predict(x[num:]).log_prob(y[num:]).mean()) > plain - 0.25
        residual = float((y[num:] - model(x[num:]).detach()).square().mean().sqrt())
        assert 0.5 < float(la.noise_precision_) ** -0.5 / residual < 2


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize("criterion", ["validation", "evidence"])
@pytest.mark.parametrize("num", [1, 30])
def test_validation_targets_that_are_met_exactly_leave_noise(num: int, criterion: str) -> None:
    model, train, (x, _) = regression_with_noise(num, 0)
    la = LinearisedLaplace(model, "regression", method="exact")
    own = float(la.fit_hyperparameters([train], progress=False).noise_precision_)
    la.fit_hyperparameters([train], [(x, model(x).detach())], criterion=criterion, progress=False)
    # What the training data say is worth ten targets.
    assert float(la.noise_precision_) == pytest.approx(own * (1 + num / 10), rel=0.3)
    assert math.isfinite(la.calibration_.log_likelihood)


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_a_noise_of_nothing_ends_at_its_bound() -> None:
    model, (x, _), _ = regression_with_noise(1, 0)
    exact, bounds = [(x, model(x).detach())], (1e-3, 1e6)
    la = LinearisedLaplace(model, "regression", method="exact")
    with pytest.warns(ConvergenceWarning, match="noise_bounds"):
        la.fit_hyperparameters(exact, exact, criterion=Validation(noise_bounds=bounds), progress=False)
    assert float(la.noise_precision_) == pytest.approx(1e6)


def counts_of(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(160, 3, generator=g, dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.5, 0.2]]) + 0.5 * torch.randn(1, 3, generator=g))
        model.bias.zero_()
    return model, x, torch.poisson((0.5 * x[:, :1] - 0.5 * x[:, 1:2]).exp(), generator=g)


@pytest.mark.parametrize("method", ["exact", "kfac"])
@pytest.mark.parametrize("custom", [True, False])
def test_validation_data_choose_the_precision_with_any_likelihood(custom: bool, method: str) -> None:
    """The smallest precision of a grid whose loss on these data is within 0.001 nats each of the least."""
    model, x, y = counts_of(0)
    likelihood = from_loss(lambda f, t: (f.exp() - t * f + torch.lgamma(t + 1)).sum()) if custom else "poisson"
    train, held = [(x[:40], y[:40])], (x[40:], y[40:])
    la = LinearisedLaplace(model, likelihood, method=method, num_samples=512).fit_hyperparameters(
        train, [held], progress=False
    )
    alpha = float(la.prior_precision_)
    assert la.temperature_ == la.scale_ == 1.0
    assert la.calibration_.data == "held out"

    def loss(factor: float) -> float:
        prior = IsotropicPrior(precision=factor * alpha)
        of = LinearisedLaplace(model, likelihood, prior=prior, method=method, num_samples=512)
        return -float(of.fit(train, progress=False).predict(held[0]).log_prob(held[1]).mean())

    here, others = loss(1.0), [loss(factor) for factor in (1e-2, 0.1, 10.0, 100.0)]
    assert here < min(others) + 0.002


def test_validation_data_scale_error_bars_with_any_likelihood() -> None:
    model, x, y = counts_of(0)
    la = LinearisedLaplace(model, "poisson", method="exact", prior=IsotropicPrior(precision=1e-4), num_samples=64)
    la.fit([(x[:8], y[:8])], progress=False)
    held = x[8:100], y[8:100]
    before = la.predict(held[0]).log_prob(held[1]).mean()
    la.calibrate([held])
    assert la.temperature_ == 1.0
    # By more than what a scale of one has for itself.
    assert la.predict(held[0]).log_prob(held[1]).mean() > before + math.log(la.scale_) ** 2 / 8 / 92


@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
def test_a_posterior_that_forgets_its_data_says_so() -> None:
    model, train, _ = overfitted()
    la = LinearisedLaplace(model, "classification", prior="isotropic")
    with pytest.warns(CalibrationWarning, match=r"-1\.1\b"):
        la.fit_hyperparameters([train], criterion=Evidence(precision_bounds=(1e-9, 1e-7)), progress=False)
    one = nn.Linear(2, 1).double()
    nn.init.constant_(one.weight, 500.0)
    binary = LinearisedLaplace(one, "binary", prior="isotropic")
    points = torch.randn(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = (points.sum(1, keepdim=True) > 0).double()
    with pytest.warns(CalibrationWarning, match="val_loader"):
        binary.fit_hyperparameters(
            [(points, labels)], criterion=Evidence(precision_bounds=(1e-13, 1e-12)), progress=False
        )


def test_the_log_likelihood_without_inputs_is_that_of_frequencies() -> None:
    """Of labels that are given, by weight: three of class 0, one of class 1; of two outputs, 3/4 and 1/2 ones."""
    y, weights = torch.tensor([[0, -100], [1, 0]]), torch.tensor([[2.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    expected = 0.75 * math.log(0.75) + 0.25 * math.log(0.25)
    assert calibrated._without_inputs(Categorical(), y, weights) == pytest.approx(expected)
    ones, weights = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[3.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    # The outputs have four and two labels.
    expected = (4 * expected + 2 * math.log(0.5)) / 6
    assert calibrated._without_inputs(Bernoulli(), ones, weights) == pytest.approx(expected)


def test_validation_data_that_are_looked_at_are_few_and_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, train, (x, y) = overfitted()
    monkeypatch.setattr(calibrated, "_NUMBERS", 4 * 3 * 100)  # of 600 data every sixth
    settings = {"prior": "isotropic", "method": "exact", "num_samples": 4}
    few = laplace_of(model, "classification", **settings)
    for rule in ("evidence", Validation(most_data=100)):
        few = laplace_of(model, "classification", **settings)
        few.fit_hyperparameters([train], val_loader=[(x, y)], criterion=rule, progress=False)
        same = laplace_of(model, "classification", **settings)
        same.fit_hyperparameters([train], val_loader=[(x[::6], y[::6])], criterion=rule, progress=False)
        assert few.prior_precision_ == same.prior_precision_
        assert (few.scale_, few.temperature_) == (same.scale_, same.temperature_)


def test_few_data_are_looked_at_and_the_first_ones_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y), _ = overfitted()
    la = LinearisedLaplace(model, "classification", num_samples=8).fit_hyperparameters([(x, y)], progress=False)
    fit = replace(la._fitted.fit, sampled=replace(la._fitted.fit.sampled, samples=la._fitted.posterior.samples))
    tangent = la._fitted.tangent
    in_order = replace(tangent, in_order=True)
    assert calibrated.OnTrainingData.of(fit, tangent, 20).some.tolist() == list(range(0, 90, 5))
    assert calibrated.OnTrainingData.of(fit, in_order, 20).some.tolist() == list(range(20))
    monkeypatch.setattr(calibrated, "_NUMBERS", 8 * 3 * 10)
    assert calibrated.OnTrainingData.of(fit, in_order, 20).deviations.shape == (8, 10, 3)


@pytest.mark.parametrize("unequal", [False, True])
def test_log_likelihoods_of_an_exact_regression_are_of_targets_left_out(unequal: bool) -> None:
    case = trained()
    noise = torch.linspace(0.5, 2, len(case.y), dtype=torch.float64) if unequal else None
    la = laplace_of(case.model, "regression", method="exact", prior="isotropic", num_samples=4)
    la.fit_hyperparameters(case.batches, data=Data(noise_variances=noise), progress=False)
    left_out, found = la.leave_one_out(), la.calibration_
    assert found.log_likelihood == pytest.approx(float(left_out.log_prob.sum()))
    variance = (1 if noise is None else noise[:, None]) / la.noise_precision_ * torch.ones_like(left_out.mean)
    alone = torch.distributions.Normal(left_out.mean, variance.sqrt()).log_prob(case.y.reshape(left_out.mean.shape))
    assert found.network_log_likelihood == pytest.approx(float(alone.sum()))
    assert (found.scale, found.num_data, found.data) == (1.0, len(case.y), "left out")
    plain = laplace_of(case.model, "regression", method="krylov", prior="isotropic", num_samples=4)
    assert plain.fit_hyperparameters(case.batches, progress=False).calibration_ == Calibration()


# The noise of the held-out data is larger than the training targets vary.
@pytest.mark.filterwarnings("ignore:.* are predicted no better than without inputs:laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_several_noise_precisions_are_those_of_the_evidence_and_held_out_data_calibrate_them(method: str) -> None:
    """The rule for validation data has one noise precision: with several, one factor for all of them is left to it."""
    generator = torch.Generator().manual_seed(0)
    x, x_new = torch.randn(2, 40, 2, generator=generator, dtype=torch.float64)
    model = nn.Linear(2, 3).double()
    noise = torch.tensor([0.1, 0.3, 1.0]) * torch.randn(2, 40, 3, generator=generator, dtype=torch.float64)
    y, y_new = model(x).detach() + noise[0], model(x_new).detach() + 2 * noise[1]
    settings = {"method": method, "noise_precision": torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)}
    la, before, rule = (laplace_of(model, "regression", num_samples=64, **settings) for _ in range(3))
    loader, val_loader = [(x, y)], [(x_new, y_new)]
    la.fit_hyperparameters(loader, val_loader, progress=False)
    before.fit_hyperparameters(loader, criterion="evidence", progress=False)
    assert la._fitted.fit.found.criterion == before._fitted.fit.found.criterion == "evidence"
    assert la.noise_precision_.shape == (3,)
    assert_close(la.prior_precision_, before.prior_precision_)
    assert_close(la.noise_precision_, before.noise_precision_ / la.calibration_.noise)
    assert la.calibration_.data == "held out"
    assert 2 < la.calibration_.noise < 6
    before.calibrate(val_loader)
    assert la.calibration_ == before.calibration_
    assert_close(la.predict(x_new).covariance(), before.predict(x_new).covariance())
    with pytest.raises(ValueError, match="noise precision"):
        rule.fit_hyperparameters(loader, val_loader, criterion="validation", progress=False)


def test_validation_data_choose_the_prior_precision_in_place_of_the_scale() -> None:
    model, train, test = overfitted()
    valid, test = (test[0][:200], test[1][:200]), (test[0][200:], test[1][200:])
    la = laplace_of(model, "classification", method="exact", num_samples=64)
    la.fit_hyperparameters([train], [valid], progress=False)
    assert la.scale_ == 1
    assert la.calibration_.data == "held out"

    def loss(alpha: float | None) -> float:
        """Of validation data at the temperature that is best there."""
        other = laplace_of(model, "classification", method="exact", num_samples=64, prior_precision=alpha)
        fitted = la if alpha is None else other.fit([train], progress=False)
        f, d = la.network(valid[0]), fitted.predict(valid[0]).deviations
        temperatures = torch.linspace(0.8, 8, 73, dtype=torch.float64)
        draws = torch.cat([f + d, f - d]) / temperatures[:, None, None, None]
        probs = draws.softmax(-1).mean(1)[:, torch.arange(len(f)), valid[1]]
        penalties = 2 * temperatures.log().square() / len(f)
        return float((penalties - probs.log().mean(1)).min())

    # Noise of the draws by which precisions are compared, and those that are tried, leave a per cent or so.
    assert loss(None) < 1.02 * min(map(loss, (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)))
    ours = -float(la.predict(test[0]).log_prob(test[1]).mean())
    assert ours < 0.9 * float(nn.functional.cross_entropy(la.network(test[0]), test[1]))
