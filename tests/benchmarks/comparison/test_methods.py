"""Peers of the benchmark, on problems where it is known what they should give."""

import importlib.util
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from benchmarks.comparison import laplace_torch, ours, peers, processes, spectral
from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.metrics import score
from benchmarks.comparison.networks import SPECTRAL, build
from benchmarks.comparison.predictions import Classified, Regressed, targets
from benchmarks.comparison.training import Problem, Recipe, outputs_of
from benchmarks.data.tasks import TASKS, Data, Part, Task
from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks.linearisation import Linearisation

RECIPE = Recipe(steps=60, step_size=1e-2)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SWAG_STEPS": 40,
        "SWAG_EVERY": 5,
        "SWAG_SAMPLES": 5,
        "MEAN_FIELD_STEPS": 50,
        "MEAN_FIELD_SAMPLES": 8,
        "DROPOUT_SAMPLES": 8,
    }.items():
        monkeypatch.setattr(peers, name, value)


@pytest.fixture(scope="module")
def moons() -> Problem:
    task = TASKS["two moons"]
    return Problem(task, task.load(0), "MLP", RECIPE)


@pytest.fixture(scope="module")
def gap() -> Problem:
    task = TASKS["gap"]
    return Problem(task, task.load(0), "tanh MLP", RECIPE)


PEERS = {
    "temperature": peers.temperature_scaling,
    "dropout": peers.mc_dropout,
    "ensemble": peers.deep_ensemble,
    "short ensemble": peers.short_ensemble,
    "SWAG": peers.swag,
    "mean field": peers.mean_field,
}


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_does_not_change_the_network(name: str, moons: Problem) -> None:
    before = outputs_of(moons.network, moons.data.test.x)
    p = PEERS[name](moons).predict(moons.data.test.x)
    assert isinstance(p, Classified)
    assert_close(p.log_probs.exp().sum(-1), torch.ones(500))
    assert score(p, targets("classification", moons.data.test.y))["accuracy"] > 0.8
    assert torch.equal(outputs_of(moons.network, moons.data.test.x), before)


@pytest.mark.parametrize("name", ["dropout", "ensemble", "SWAG", "mean field"])
def test_members_differ_and_are_the_same_again(name: str, gap: Problem) -> None:
    fit = PEERS[name](gap)
    p, again = (fit.predict(gap.data.test.x) for _ in range(2))
    assert isinstance(p, Regressed)
    assert float(p.samples.std(0).mean()) > 1e-4
    assert_close(p.variance, p.samples.var(0, correction=0) + p.noise_variance)
    assert isinstance(again, Regressed)
    assert torch.equal(again.samples, p.samples)


def test_temperature_scaling_finds_the_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=generator)
    y = torch.multinomial((x / 2.5).softmax(-1), 1, generator=generator)[:, 0]
    part = Part(x, y)
    problem = Problem(Task("classification", 3, lambda seed: data), Data(part, part, part), "MLP", RECIPE)
    data = problem.data
    object.__setattr__(problem, "trained", lambda: nn.Identity())
    fit = peers.temperature_scaling(problem)
    assert abs(fit.details["temperature"] - 2.5) < 0.2
    p = fit.predict(x)
    assert isinstance(p, Classified)
    assert_close(p.log_probs, (x / fit.details["temperature"]).log_softmax(-1))


def test_noise_is_what_members_do_not_explain(gap: Problem) -> None:
    y = torch.zeros(2, 1)
    outputs = torch.tensor([[[1.0], [1.0]], [[3.0], [3.0]]])
    assert peers.residuals(gap, y, outputs) == 4 - 1


def test_members_of_the_short_ensemble_together_take_one_training(moons: Problem) -> None:
    assert peers.short_ensemble(moons).passes == pytest.approx(moons.epochs)


def test_the_spectral_network_bounds_distances_of_hidden_units(moons: Problem) -> None:
    network = build("MLP" + SPECTRAL, torch.Size([2]), 2).train()
    for _ in range(30):  # the power iteration
        network(moons.data.test.x)
    norms = [torch.linalg.matrix_norm(m.weight, 2) for m in network if isinstance(m, nn.Linear)]
    assert len(norms) == 2
    assert_close(torch.stack(norms).detach(), torch.ones(2), atol=1e-3, rtol=0)
    x, z = moons.data.test.x[:50], moons.data.test.x[50:100]
    assert ((network[:-1](x) - network[:-1](z)).norm(dim=1) <= 1.001 * (x - z).norm(dim=1)).all()


def test_random_features_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectral, "FEATURES", 40_000)
    torch.manual_seed(0)
    head, h = spectral.RandomFeatures(6, 2), torch.randn(8, 6)
    features = head.features(h)
    normed = head.norm(h)
    expected = (-torch.cdist(normed, normed).square() / (2 * spectral.LENGTH**2)).exp()
    # the standard error of a mean of 40,000 products is below 0.5 %
    assert_close(features @ features.T, expected, atol=0.03, rtol=0)


def test_the_posterior_of_the_last_layer_of_sngp(moons: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SNGP_SAMPLES", 4000)
    x = moons.data.test.x[:20]
    p = peers.sngp(moons).predict(x)
    assert isinstance(p, Classified)
    recipe = replace(RECIPE, weight_decay=1 / len(moons.data.train.y))
    network = replace(moons, architecture="MLP" + SPECTRAL, recipe=recipe).trained()
    head, hidden = spectral.head_of(network), network[:-1]
    with torch.no_grad():
        train, new = (head.features(hidden(v)).double() for v in (moons.data.train.x, x))
        probs = network(moons.data.train.x).softmax(-1).double()
    for k in range(2):
        weights = probs[:, k] * (1 - probs[:, k])
        precision = torch.eye(train.shape[1]).double() + train.T @ torch.diag(weights) @ train
        variance = (new * torch.linalg.solve(precision, new.T).T).sum(-1)
        # the standard error of a variance is 2.2 %
        assert_close(p.samples[..., k].double().var(0), variance, rtol=0.12, atol=0)
    assert score(p, targets("classification", moons.data.test.y[:20]))["accuracy"] > 0.8


@pytest.mark.parametrize(
    "name", ["LeNet with batch norm", "strided CNN, small", "CNN with batch norm", "ResNet", "ViT"]
)
def test_spectral_networks_train(name: str) -> None:
    task = TASKS["digits, n=150"]
    problem = Problem(task, task.load(0), name, Recipe(steps=4))
    p = peers.sngp(problem).predict(problem.data.test.x[:5])
    assert isinstance(p, Classified)
    assert p.samples.shape == (peers.SNGP_SAMPLES, 5, 10)
    assert p.log_probs.isfinite().all()


@pytest.mark.parametrize("name", ["deep_kernel", "sparse_process", "gaussian_process"])
def test_gaussian_processes(name: str, gap: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gp import sparse

    monkeypatch.setattr(sparse, "INDUCING", 20)
    monkeypatch.setattr(sparse, "STEPS", 300)
    monkeypatch.setattr(sparse, "STEP_SIZE", 0.05)
    before = outputs_of(gap.network, gap.data.test.x)
    p = getattr(processes, name)(gap).predict(gap.data.test.x)
    assert isinstance(p, Regressed)
    assert torch.equal(outputs_of(gap.network, gap.data.test.x), before)
    # noise of 0.15 on a function of variance near a half
    assert float((p.mean - gap.data.test.y.flatten()).square().mean()) < 0.06
    assert 0.1**2 < p.noise_variance < 0.3**2
    ratio = p.samples.var(0) / (p.variance - p.noise_variance)
    assert abs(math.log(float(ratio.mean()))) < 0.4


@pytest.mark.parametrize(
    "name",
    [
        "ours, last layer",
        "ours, last layer, validation",
        "ours, KFAC",
        "ours, evidence",
        "ours, evidence, not scaled",
        "ours, self-consistency",
    ],
)
def test_settings_of_the_halves(name: str, moons: Problem) -> None:
    fit = METHODS[name].fit(moons)
    p = fit.predict(moons.data.test.x)
    assert isinstance(p, Classified)
    assert score(p, targets("classification", moons.data.test.y))["log_likelihood"] > -0.5
    assert fit.details["epochs"] > 0
    assert (fit.details["scale"] == 1.0) or name == "ours, evidence"
    last_layer = "last layer" in name
    assert (len(fit.details["prior_precision"]), fit.details["method"] != "") == (1, True)
    la, _ = ours.fitted(moons, (("parameters", "last_layer"),) if last_layer else ())
    assert la.samples_.shape[1] == (102 if last_layer else sum(v.numel() for v in moons.network.parameters()))


def test_samples_of_swag_have_its_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    iterates = torch.randn(6, 3, generator=generator)
    samples = peers.swag_samples(iterates, 200_000, 4, generator)
    deviations = iterates[-4:] - iterates.mean(0)
    expected = 0.5 * torch.diag(iterates.var(0, correction=0)) + deviations.T @ deviations / (2 * 3)
    assert_close(samples.mean(0), iterates.mean(0), atol=0.02, rtol=0)
    assert_close(samples.T.cov(), expected, atol=0.03, rtol=0)


def test_statistics_of_batch_norm_are_taken_anew() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    x = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    weights = torch.arange(10.0)
    other = peers.with_weights(network, weights, x)
    hidden = x @ weights[:4].reshape(2, 2).T + weights[4:6]
    assert_close(other[1].running_mean, hidden.mean(0))
    assert torch.equal(network[1].running_mean, torch.zeros(2))


def test_divergence_of_gaussians() -> None:
    mean, log_scale = torch.tensor([0.5, -1.0]), torch.tensor([-0.3, 0.2])
    q, p = torch.distributions.Normal(mean, log_scale.exp()), torch.distributions.Normal(0.0, 1.0)
    assert_close(peers.gaussian_divergence(mean, log_scale), torch.distributions.kl_divergence(q, p).sum())


def test_ours_in_the_common_form(moons: Problem) -> None:
    fit = ours.setting()(moons)
    p = fit.predict(moons.data.test.x)
    assert isinstance(p, Classified)
    la, _ = ours.fitted(moons, ())
    direct = la.predict(moons.data.test.x)
    assert_close(p.log_probs.exp(), direct.probs)
    assert_close(p.samples, torch.cat([direct.samples, 2 * direct.logits - direct.samples]))
    assert_close(p.links["probit"].exp().float(), direct.probs_with("probit"))
    assert fit.passes > 0


def test_a_scale_multiplies_deviations(moons: Problem) -> None:
    plain, scaled = ours.setting(scale=1.0)(moons).predict(moons.data.test.x), ours.with_best_scale(moons)
    scale = scaled.details["scale"] ** 0.5
    f = outputs_of(moons.network, moons.data.test.x)
    assert_close(scaled.predict(moons.data.test.x).samples - f, scale * (plain.samples - f), atol=1e-4, rtol=1e-4)
    # and is no worse on what it was chosen by
    values = [ours.mean_log_likelihood(p, moons.data.test.y) for p in (plain, scaled.predict(moons.data.test.x))]
    assert values[1] >= values[0] - 1e-4


def test_validation_data_choose_precision_and_temperature(moons: Problem) -> None:
    # After so few steps the few validation data say enough of a temperature.
    moons = replace(moons, recipe=replace(RECIPE, steps=20))
    plain, chosen = ours.setting()(moons), ours.with_validation(moons)
    assert chosen.details["temperature"] != 1.0
    assert chosen.details["prior_precision"] != plain.details["prior_precision"]
    assert plain.details["temperature"] == 1.0
    values = [
        ours.mean_log_likelihood(m.predict(moons.data.validation.x), moons.data.validation.y) for m in (plain, chosen)
    ]
    assert values[1] >= values[0]
    # as the public way has it
    la = LinearisedLaplace(moons.network, moons.likelihood, seed=moons.seed)
    loaders = moons.data.train.loader(ours.BATCH), moons.data.validation.loader(ours.BATCH)
    la.fit_hyperparameters(loaders[0], val_loader=loaders[1], progress=False)
    assert la.scale_ == chosen.details["scale"] == 1.0
    assert la.temperature_ == chosen.details["temperature"]
    assert la.prior_precision_.tolist() == chosen.details["prior_precision"]
    assert_close(la.predict(moons.data.test.x).probs, chosen.predict(moons.data.test.x).log_probs.exp().float())


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_the_oracle_is_the_best_of_its_grid(gap: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "PRECISION_FACTORS", (0.1, 1.0, 10.0))
    fit, unscaled = ours.chosen_precision(oracle=True)(gap), ()
    y = gap.data.test.y.flatten()
    values = {k: ours.mean_log_likelihood(v.predict(gap.data.test.x), y) for k, v in ours.grid(gap, unscaled).items()}
    assert fit.details["factor"] == max(values, key=values.__getitem__)
    precisions = [v.details["prior_precision"][0] for v in ours.grid(gap, unscaled).values()]
    assert_close(torch.tensor(precisions) / precisions[1], torch.tensor([0.1, 1.0, 10.0]))


# BackPACK's hooks are on the first layer too
hooks = pytest.mark.filterwarnings("ignore:Full backward hook")
laplace = pytest.mark.skipif(
    not importlib.util.find_spec("laplace"),
    reason="laplace-torch, of the extra `bench`, is not there",
)


@laplace
@hooks
@pytest.mark.parametrize("structure", laplace_torch.STRUCTURES)
def test_samples_of_laplace_torch_have_its_variance(structure: str, moons: Problem) -> None:
    la, names, _ = laplace_torch.fitted(moons, structure, "marglik")
    x = moons.data.test.x[:30]
    deviations = laplace_torch.weight_samples(la, 0, 4000)
    found = Linearisation(moons.network, names).jvp(x, deviations).square().mean(0)
    _, covariance = la._glm_predictive_distribution(x)
    # the standard error of a variance is 2.2 %
    assert_close(found, covariance.detach().diagonal(dim1=-2, dim2=-1), rtol=0.1, atol=1e-4)


@laplace
@hooks
def test_predictions_of_laplace_torch_are_its_own(moons: Problem) -> None:
    x = moons.data.test.x
    p = laplace_torch.laplace_torch("KFAC", "gridsearch")(moons).predict(x)
    assert isinstance(p, Classified)
    la, _, _ = laplace_torch.fitted(moons, "KFAC", "gridsearch")
    assert_close(p.log_probs.exp().float(), la(x).detach())
    assert p.samples.shape == (laplace_torch.SAMPLES, 500, 2)


@laplace
def test_laplace_torch_on_a_regression(gap: Problem) -> None:
    p = laplace_torch.laplace_torch("last layer", "gridsearch")(gap).predict(gap.data.test.x)
    assert isinstance(p, Regressed)
    assert_close(p.mean, outputs_of(gap.network, gap.data.test.x).flatten())
    ratio = p.samples.var(0) / (p.variance - p.noise_variance)
    # 64 samples: the standard error of their variance is 18 %
    assert abs(math.log(float(ratio.mean()))) < 0.4


@laplace
def test_only_layers_that_kfac_knows_are_random() -> None:
    task = TASKS["digits, n=300"]
    data = task.load(0)
    problem = Problem(task, data, "LeNet with batch norm", RECIPE)
    la, names, _ = laplace_torch.build(problem.network, "classification", "all", "kron")
    norms = {n for n, m in problem.network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert names
    assert not any(name.rpartition(".")[0] in norms for name in names)
    assert la.n_params == sum(p.numel() for n, p in problem.network.named_parameters() if n in names)
