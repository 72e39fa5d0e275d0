"""Rules for the prior precision without evidence: self-consistency, and validation data."""

import math
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from cases import make_case
from problems import make_prior
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from laplace_sampling.hyperparameters.covariance_path import CovariancePath, FactoredPath, function_draws
from laplace_sampling.hyperparameters.hyperparameters import Hyperparameters
from laplace_sampling.hyperparameters.rules import SelfConsistency, grid, smallest_allowed
from laplace_sampling.hyperparameters.validation import Validation, _widest
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.weighted import weighted
from laplace_sampling.linear_model.cost import Cost
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import DenseFeatures, SomeFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import ungrouped
from laplace_sampling.predictions.calibration import Calibration, calibrate, own_temperature

BOUNDS = (1e-8, 1e12)
NOT_GAUSSIAN = ["classification", "binary", "multi_label", "poisson", "heteroscedastic", "segmentation", "from_loss"]


def problem(name: str, confidence: float = 1.0) -> tuple[LinearModel, FactoredPath]:
    """A linear model whose outputs, and with them the certainty of the network, are multiplied by a number."""
    case = make_case(name)
    model = case.linear_model("affine")
    model = replace(model, network_outputs=confidence * model.network_outputs)
    prior = make_prior(model, case, "isotropic")
    return model, FactoredPath(model.ggn(model.network_outputs).dense_curvature(), prior)


def ratio_at(model: LinearModel, path: CovariancePath, alpha: float, num: int = 4000) -> float:
    """The rise of the loss by its curvature and by many other draws."""
    likelihood, f, y = model.likelihood, model.network_outputs, model.targets
    (covariance,) = path.covariances(model.features, torch.tensor([alpha], dtype=torch.float64))
    z = reference.normal(covariance, num, torch.Generator().manual_seed(1))
    rise = likelihood.loss(f + z, y) + likelihood.loss(f - z, y) - 2 * likelihood.loss(f, y)
    return float(rise.mean() / (z * likelihood.curvature(f, z, y)).sum(-1).mean())


def select(model: LinearModel, path: CovariancePath, seed: int = 0, **settings: float) -> Hyperparameters:
    return SelfConsistency(**{"most_ratio": 1.5, "most_lost": 1e9, **settings}).select(model, path, BOUNDS, seed, 1e12)


@pytest.mark.parametrize("confidence", [1.0, 6.0])
@pytest.mark.parametrize("name", NOT_GAUSSIAN)
def test_the_loss_rises_as_its_curvature_says_down_to_the_precision(name: str, confidence: float) -> None:
    model, path = problem(name, confidence)
    # Ratios of the rule are those of 32 pairs of draws for each datum, whose standard error is up to 0.1: so they are
    # compared in the mean of some seeds, with a standard error of 0.04.
    runs = [select(model, path, seed) for seed in range(6)]
    assert not any(found.problems for found in runs)
    alphas = grid(path, model.features, BOUNDS)
    above = [ratio_at(model, path, float(a)) for a in alphas if a > 1.5 * min(found.alpha for found in runs)]
    assert all(abs(math.log(ratio)) < math.log(1.5) + 0.1 for ratio in above)
    ratios = [abs(math.log(ratio_at(model, path, found.alpha))) for found in runs]
    assert sum(ratios) / len(ratios) < math.log(1.5) + 0.1
    if all(found.alpha > 1.01 * float(alphas[-1]) for found in runs):
        assert sum(ratios) / len(ratios) == pytest.approx(math.log(1.5), abs=0.1)
    for found in runs:
        assert found.history[0].effective_dimension[0] == pytest.approx(path.effective_dimension(found.alpha))


def test_a_loss_that_grows_less_than_its_curvature_says_bounds_the_precision_too() -> None:
    model, path = problem("binary", 0.0)
    found = select(model, path, most_ratio=1.2)
    assert found.alpha > 10 * float(grid(path, model.features, BOUNDS)[-1])
    assert math.log(ratio_at(model, path, found.alpha)) == pytest.approx(-math.log(1.2), abs=0.05)


def test_the_precision_is_not_below_that_of_the_evidence_of_the_trained_weights() -> None:
    model, path = problem("classification")
    alpha = 100 * select(model, path).alpha
    norm = path.effective_dimension(alpha) / alpha
    assert SelfConsistency(1.5, 1e9).select(model, path, BOUNDS, 0, norm).alpha == pytest.approx(alpha, rel=0.01)
    # Where the network is certain it is the loss that bounds the precision from below.
    assert select(model, path).alpha == SelfConsistency(1.5, 1e9).select(model, path, BOUNDS, 0, 1e9 * norm).alpha


def test_a_surer_network_and_a_smaller_ratio_get_a_larger_precision() -> None:
    alphas = [select(*problem("classification", confidence)).alpha for confidence in (2.0, 10.0)]
    assert alphas[1] > 2 * alphas[0]
    model, path = problem("classification", 6.0)
    assert select(model, path, most_ratio=1.1).alpha > select(model, path, most_ratio=2.0).alpha


@pytest.mark.parametrize("name", ["classification", "multi_label", "segmentation"])
def test_error_bars_cost_the_training_labels_no_more_than_a_part_of_the_loss(name: str) -> None:
    model, path = problem(name, 2.0)
    f = model.network_outputs
    # Labels of which the network is sure: error bars make them less likely.
    if name == "multi_label":
        y = (f > 0).to(model.targets)
    else:
        y = f.reshape(len(f), -1, 6 if name == "segmentation" else 1).argmax(1).reshape(model.targets.shape)
    model = replace(model, targets=y)
    found = select(model, path, most_ratio=1e9, most_lost=0.1).alpha
    generator = torch.Generator().manual_seed(2)
    for factor, within in ((4.0, True), (1.0, None), (0.1, False)):
        (V,) = path.covariances(model.features, torch.tensor([factor * found], dtype=torch.float64))
        z = reference.normal(V, 4000, generator)
        if name == "multi_label":
            logs = torch.where(y.bool(), (f + z).sigmoid(), (-f - z).sigmoid()).mean(0).log()
            alone = torch.where(y.bool(), f.sigmoid(), (-f).sigmoid()).log()
        else:
            shape = (len(f), 3, -1) if name == "segmentation" else (len(f), -1, 1)
            labels = y.reshape(len(f), -1)
            given = labels >= 0
            index = labels.clamp_min(0)[:, None]
            probs, own = ((v.unflatten(-1, shape[1:])).softmax(-2) for v in (f + z, f))
            logs, alone = (p.gather(1, index)[:, 0][given].log() for p in (probs.mean(0), own))
        lost = float(alone.sum() - logs.sum()) / float(-alone.sum())
        if within is None:
            # The 32 pairs of draws of the rule move it.
            assert lost == pytest.approx(0.1, abs=0.04)
        else:
            assert (lost < 0.1) == within


def test_a_datum_of_weight_two_counts_as_two() -> None:
    case = make_case("classification")
    model = case.linear_model("affine")
    weights = torch.tensor([2.0, *([1.0] * 7)], dtype=torch.float64)
    likelihood, targets = weighted(case.likelihood, case.y, weights)
    heavy = replace(model, likelihood=likelihood, targets=targets)
    prior = make_prior(model, case, "isotropic")
    path = FactoredPath(heavy.ggn(heavy.network_outputs).dense_curvature(), prior)
    again = torch.cat([torch.arange(8), torch.tensor([0])])
    double = replace(
        model,
        features=SomeFeatures(model.features, again),
        network_outputs=model.network_outputs[again],
        offset=model.offset[again],
        targets=model.targets[again],
    )
    # The copy has draws of its own, which move the ratio of nine data.
    assert select(heavy, path).alpha == pytest.approx(select(double, path).alpha, rel=0.3)


def test_a_part_of_many_data_is_looked_at_and_its_rows_are_counted() -> None:
    class Many:
        num_data, num_outputs, size = 60_000, 10, 500

    features: Any = Many()
    rule = SelfConsistency()
    assert rule.num_data(features) == 400
    Many.num_data = 1000
    assert (rule.num_data(features), replace(rule, most=70).num_data(features)) == (100, 70)
    cost = Cost(jvp=2.0, vjp=3.0, gradient=4.0)
    # Ten rows of the Jacobian for each of them.
    assert rule.cost(features).operations(cost) == rule.cost(features, rough=False).operations(cost) == 3 * 10 * 100
    assert rule.cost(features).data_within(100, cost, 1e9) == 100
    assert rule.cost(features).data_within(100, cost, 0.8 * 3000) == 80
    assert rule.cost(features).data_within(100, cost, 0.0) == 50
    Many.size = 10_000  # eight samples at six precisions, and near a known one at three
    assert [rule.cost(features, rough=rough).operations(cost) for rough in (True, False)] == [2 * 8 * 600, 2 * 8 * 300]
    model, path = problem("classification")
    # Eight data of four outputs take 32 VJPs for all precisions, and a pass is a JVP and a VJP of all eight.
    assert select(model, path).history[0].passes == 32 / 16


@pytest.mark.parametrize("start", [None, 0, 3, 12, 39])
def test_a_grid_is_searched_by_bisection_or_near_a_start(start: int | None) -> None:
    for number in (0, 1, 2, 11, 12, 13, 38, 40):
        tried: list[int] = []

        def allowed(index: int, number: int = number, tried: list[int] = tried) -> bool:
            tried.append(index)
            return index < number

        assert smallest_allowed(40, allowed, start) == number
        assert len(set(tried)) == len(tried) <= (6 if start is None else 11)
        assert all(0 <= index < 40 for index in tried)
        if start is not None and abs(number - start) <= 1:
            assert len(tried) <= 4


@pytest.mark.parametrize("confidence", [1.0, 6.0])
@pytest.mark.parametrize("samples", [False, True])
def test_where_another_path_has_said_where_to_look_the_same_is_found_for_less(
    confidence: float, samples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laplace_sampling.hyperparameters.covariance_path._MOST_OUTPUTS", 1 if samples else 32)
    model, path = problem("classification", confidence)
    rule = SelfConsistency(1.5, 1e9)
    found = rule.select(model, path, BOUNDS, 0, 1e12)
    near = rule.select(model, path, BOUNDS, 0, 1e12, 2 * found.alpha)
    assert near.alpha == pytest.approx(found.alpha)
    assert (
        near.history[0].passes < found.history[0].passes
        if samples
        else near.history[0].passes == found.history[0].passes
    )  # rows are those of all precisions
    # Eight held-out data have several maxima, so that where a search begins decides; these are more.
    model, path, other = many()
    found = other.select(model, path, BOUNDS, 0, 1.0)
    near = other.select(model, path, BOUNDS, 0, 1.0, 2 * found.alpha)
    # Precisions that are less likely by less than the price are alike.
    assert near.calibration.log_likelihood is not None
    assert found.calibration.log_likelihood is not None
    assert near.calibration.log_likelihood > found.calibration.log_likelihood - 2 * Validation.price * len(
        other.model.network_outputs
    )
    assert (
        near.history[0].passes < found.history[0].passes
        if samples
        else near.history[0].passes == found.history[0].passes
    )


def tempered(rule: Validation, deviations: Tensor, lowest: float) -> Calibration:
    model = rule.model
    how = ("temperature",), lowest
    return calibrate(model.likelihood, model.targets, model.network_outputs, deviations, *how)


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("name", ["classification_many_data", "multi_label", "many"])
def test_held_out_labels_are_as_likely_from_coarse_to_fine_as_by_a_search_of_all_precisions(
    name: str, samples: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laplace_sampling.hyperparameters.covariance_path._MOST_OUTPUTS", 1 if samples else 32)
    if name == "many":
        model, path, rule = many()
    else:
        model, path = problem(name, 3.0)
        rule = held_out(model)
    selected = rule.select(model, path, BOUNDS, 0, 1.0)
    alphas = grid(path, rule.model.features, BOUNDS)
    drawn = function_draws(path, rule.model.features, alphas, Draws(16, 0, Stream.VALIDATION))
    own = own_temperature(rule.model.likelihood, rule.model.targets, rule.model.network_outputs)
    everywhere = (tempered(rule, drawn(index), own) for index in range(len(alphas)))
    best = max(calibration.log_likelihood or -math.inf for calibration in everywhere)
    found = selected.calibration.log_likelihood
    assert found is not None
    # Steps to larger precisions stop where one gains less than the price, those to smaller ones where they lose more.
    assert found > best - 2 * Validation.price * len(rule.model.network_outputs)
    if name == "many" and samples:
        assert 2 * model.features.num_data * selected.history[0].passes < 0.6 * 8 * rule.model.features.num_data * len(
            alphas
        )


def on_data(model: LinearModel, J: Tensor, f: Tensor, y: Tensor) -> LinearModel:
    """The model on other data."""
    return replace(model, features=DenseFeatures(J), offset=torch.zeros_like(f), network_outputs=f, targets=y)


def many() -> tuple[LinearModel, CovariancePath, Validation]:
    """An overconfident linear model, and 300 held-out data of its own kind."""
    generator = torch.Generator().manual_seed(3)
    J = torch.randn(400, 4, 40, generator=generator, dtype=torch.float64) / 3
    f = J @ torch.randn(40, generator=generator, dtype=torch.float64)
    y = torch.multinomial(f.softmax(1), 1, generator=generator)[:, 0]
    case = make_case("classification")
    model = replace(
        case.linear_model("affine"),
        features=DenseFeatures(J[:100]),
        network_outputs=3 * f[:100],
        offset=torch.zeros_like(f[:100]),
        targets=y[:100],
    )
    prior = ungrouped(torch.ones(40, dtype=torch.float64), 1.0)
    path = FactoredPath(model.ggn(model.network_outputs).dense_curvature(), prior)
    return model, path, Validation(on_data(model, J[100:], 3 * f[100:], y[100:]))


def test_no_precision_at_which_the_rises_agree_takes_the_largest_and_says_so() -> None:
    model, path = problem("classification", 6.0)
    bounds = (1e-8, select(model, path).alpha / 100)
    found = SelfConsistency(1.5, 1e9).select(model, path, bounds, 0, 1e12)
    assert found.alpha == bounds[1]
    assert "Laplace's approximation" in found.problems[0]


def held_out(model: LinearModel, seed: int = 0) -> Validation:
    """The training inputs with targets that their linear model has nothing to do with."""
    generator = torch.Generator().manual_seed(seed)
    f = model.network_outputs
    if isinstance(model.likelihood, Gaussian):
        y = f + torch.randn(f.shape, generator=generator, dtype=f.dtype)
    else:
        noisy = f + 2 * torch.randn(f.shape, generator=generator, dtype=f.dtype)
        if model.targets.shape == f.shape:  # several labels
            y = (noisy > 0).to(model.targets)
        else:
            y = noisy.reshape(len(f), -1, model.targets[0].numel()).argmax(1).reshape(model.targets.shape)
    return Validation(replace(model, targets=y))


@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize("name", ["regression", "regression_many_data"])
def test_held_out_targets_are_likeliest_at_the_precisions_of_a_regression(name: str, learn: bool) -> None:
    model, path = problem(name)
    model = replace(model, likelihood=Gaussian(2.0, learn=learn))
    path = replace(path, curvature=model.ggn(model.network_outputs).dense_curvature())
    rule = held_out(model)
    found = rule.select(model, path, BOUNDS, 0, 1.0)
    J = torch.cat([model.features.rows(batch) for batch in model.features.chunks()])
    G = J.flatten(0, 1).T @ J.flatten(0, 1)
    error = (rule.model.targets - rule.model.network_outputs).double()

    def log_probs(alpha: float, noise: float) -> Tensor:
        V = J @ torch.linalg.inv(noise * G + alpha * torch.eye(len(G), dtype=G.dtype)) @ J.mT
        eye = torch.eye(error.shape[1], dtype=G.dtype)
        return MultivariateNormal(torch.zeros_like(error), V + eye / noise).log_prob(error)

    noise = float(found.likelihood.noise_precisions())  # pyright: ignore[reportArgumentType]
    best = float(log_probs(found.alpha, noise).sum())
    assert found.calibration.log_likelihood == pytest.approx(best, rel=1e-6)
    # Noise of the network alone, with ten targets of what the evidence of the network says of training data.
    alphas = grid(path, model.features, BOUNDS)
    gammas = torch.tensor([path.effective_dimension(a) for a in alphas.tolist()], dtype=torch.float64)
    squares, num = float(model.squared_errors(model.network_outputs).sum()), error.numel()
    energies = alphas / 2.0
    nearest_root = int((gammas * (squares + energies) / (num * energies)).log().abs().argmin())
    training = squares / (num - float(gammas[nearest_root]))
    believed = (10 * training + float(error.square().sum())) / (10 + num)
    own = Normal(0.0, math.sqrt(believed) if learn else 2.0**-0.5)
    assert found.calibration.network_log_likelihood == pytest.approx(float(own.log_prob(error).sum()))
    expected = float(alphas[nearest_root]) / 2.0

    def prior(alpha: float, noise: float) -> float:
        narrower = max(0.0, math.log(alpha / noise / expected))
        return 5 * (math.log(noise) - noise * training) - 0.5 * (narrower / 2) ** 2 if learn else 0.0

    best += prior(found.alpha, noise)
    noises = torch.logspace(-3, 3, 61).tolist() if learn else [2.0]
    alphas = [a for a in torch.logspace(-6, 6, 61).tolist() if float(grid(path, model.features, BOUNDS)[-1]) < a]
    # The grid of the rule is three a decade, which loses little of what the best has over the network alone.
    others = max(float(log_probs(alpha, b).sum()) + prior(alpha, b) for alpha in alphas for b in noises)
    assert best > others - 0.05 * len(error)
    if not learn:
        assert noise == 2.0


def test_held_out_labels_are_likeliest_at_the_precision_and_temperature() -> None:
    model, path = problem("classification_many_data", 3.0)
    rule = held_out(model)
    found = rule.select(model, path, BOUNDS, 0, 1.0)
    assert found.calibration.temperature >= 0.9
    assert found.calibration.log_likelihood is not None
    generator = torch.Generator().manual_seed(7)
    for alpha in (found.alpha * 30, found.alpha, found.alpha / 30):
        (V,) = path.covariances(model.features, torch.tensor([alpha], dtype=torch.float64))
        z = reference.normal(V, 2000, generator)
        for T in (0.7, 1.0, 1.5, 2.5, 4.0):
            probs = ((rule.model.network_outputs + z) / T).softmax(-1).mean(0)
            log_likelihood = float(probs[torch.arange(len(probs)), rule.model.targets].log().sum())
            assert log_likelihood < found.calibration.log_likelihood + 0.5
    alone = float(rule.model.network_outputs.log_softmax(-1)[torch.arange(25), rule.model.targets].sum())
    assert found.calibration.network_log_likelihood == pytest.approx(alone)
    assert found.calibration.log_likelihood > alone


def test_error_bars_are_as_wide_as_held_out_data_allow_for_a_price() -> None:
    losses = [0.0, 0.0, 0.1, 0.2, 0.6, 2.0, 5.0]
    # Wherever it starts: larger precisions that are more likely are gone to, also by less than the price.
    for start in (None, *range(len(losses))):
        assert _widest(lambda i: -losses[i], len(losses), 0.5, start) == 3
    assert _widest(lambda i: -[0.0, 0.9, 1.5, 2.2][i], 4, 0.5, 3) == 0
    assert _widest(lambda i: 0.0, 4, 0.5, 0) == 3
    # Precisions a decade apart say where to look beyond one that is less likely, and not beyond one that is far off.
    assert _widest(lambda i: -[1.0, 1.0, 2.0, 2.0, 2.0, 0.0, 0.0][i], 7, 0.5) == 6
    assert _widest(lambda i: -[0.0, 1.0, 2.0, 99.0, 2.0, 0.0, 0.0][i], 7, 0.5) == 0


def test_a_temperature_does_not_take_the_place_of_error_bars() -> None:
    """Labels that any precision predicts as well get the smallest one of the grid that does."""
    model, path, rule = many()
    found = rule.select(model, path, BOUNDS, 0, 1.0)
    assert found.calibration.log_likelihood is not None
    alphas = grid(path, rule.model.features, BOUNDS)
    index = int((alphas.log() - math.log(found.alpha)).abs().argmin())
    drawn = function_draws(path, rule.model.features, alphas, Draws(16, 0, Stream.VALIDATION))
    own = own_temperature(rule.model.likelihood, rule.model.targets, rule.model.network_outputs)
    smaller = tempered(rule, drawn(index + 1), own).log_likelihood
    assert smaller is not None
    assert smaller < found.calibration.log_likelihood


def test_error_bars_of_a_regression_are_as_wide_as_the_price_allows() -> None:
    """Targets that the network predicts up to equal noise: wider error bars cost little by little."""
    generator = torch.Generator().manual_seed(5)
    J = torch.randn(400, 1, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(400, 1, generator=generator, dtype=torch.float64)
    nothing = torch.zeros(4, 1, dtype=torch.float64)
    model = replace(
        make_case("regression").linear_model("affine"),
        features=DenseFeatures(J[:4]),
        network_outputs=nothing,
        offset=nothing,
        targets=y[:4],
        likelihood=Gaussian(2.0),
    )
    prior = ungrouped(torch.ones(5, dtype=torch.float64), 1.0)
    path = FactoredPath(model.ggn(model.network_outputs).dense_curvature(), prior)
    rule = Validation(on_data(model, J[100:], torch.zeros(300, 1, dtype=torch.float64), y[100:]))
    found = rule.select(model, path, BOUNDS, 0, 1.0)
    G, values = J[:4, 0].T @ J[:4, 0], []
    alphas = grid(path, rule.model.features, BOUNDS).tolist()
    for alpha in alphas:
        # With unit noise, the prior precision is `α/2`; the noise that suits best is a closed form.
        V = J[100:, 0] @ torch.linalg.inv(G + alpha / 2 * torch.eye(5, dtype=G.dtype)) @ J[100:, 0].T
        unit = 1 + V.diagonal()
        noise = float((y[100:, 0].square() / unit).mean())
        values.append(float(Normal(0.0, (noise * unit).sqrt()).log_prob(y[100:, 0]).sum()))
    allowed = [n for n, value in enumerate(values) if value >= max(values) - Validation.price * 300]
    assert allowed[-1] > values.index(max(values))
    noise = float(found.likelihood.noise_precisions())  # pyright: ignore[reportArgumentType]
    assert found.alpha / noise == pytest.approx(alphas[allowed[-1]] / 2)


@pytest.mark.parametrize("factor", [0.05, 8.0])
def test_few_held_out_targets_choose_the_widest_error_bars_within_the_price_of_the_likeliest(factor: float) -> None:
    """Of the rule's own precisions, by dense algebra, with the priors of noise and ratio."""
    model, path = problem("regression_many_data")
    model = replace(model, likelihood=Gaussian(2.0, learn=True))
    path = replace(path, curvature=model.ggn(model.network_outputs).dense_curvature())
    rule = held_out(model)
    targets = rule.model.network_outputs + factor * (rule.model.targets - rule.model.network_outputs)
    few = SomeFeatures(rule.model.features, torch.arange(3))
    outputs = rule.model.network_outputs[:3]
    rule = replace(rule, model=replace(rule.model, features=few, network_outputs=outputs, targets=targets[:3]))
    found = rule.select(model, path, BOUNDS, 0, 1.0)
    error = (rule.model.targets - rule.model.network_outputs).double()
    alphas, eye = grid(path, rule.model.features, BOUNDS), torch.eye(error.shape[1], dtype=torch.float64)
    gammas = torch.tensor([path.effective_dimension(a) for a in alphas.tolist()], dtype=torch.float64)
    squares, num = float(model.squared_errors(model.network_outputs).sum()), model.network_outputs.numel()
    root = int((gammas * (squares + alphas / 2) / (num * alphas / 2)).log().abs().argmin())
    training, ratio = squares / (num - float(gammas[root])), float(alphas[root])
    tried = []
    for alpha, V in zip(alphas.tolist(), path.covariances(rule.model.features, alphas), strict=True):
        unit = 2 * V.double() + eye
        whitened = float((error * torch.linalg.solve(unit, error[..., None])[..., 0]).sum())
        noise = (10 + error.numel()) / (10 * training + whitened)
        log_prob = float(MultivariateNormal(torch.zeros_like(error), unit / noise).log_prob(error).sum())
        of_noise, narrower = 5 * (math.log(noise) - noise * training), max(0.0, math.log(alpha / ratio)) / 2
        tried.append((alpha * noise / 2, log_prob + of_noise - 0.5 * narrower**2))
    least = max(believed for _, believed in tried) - Validation.price * len(error)
    assert found.alpha == pytest.approx([alpha for alpha, believed in tried if believed >= least][-1], rel=1e-6)
