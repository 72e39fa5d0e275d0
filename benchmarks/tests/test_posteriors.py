"""The other posteriors of the benchmark, where the answer has a closed form: linear models with Gaussian noise."""

import math

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.testing import assert_close

from benchmarks.comparison.networks import mlp
from benchmarks.posteriors import chains
from benchmarks.posteriors.features import Process, feature_process, linear
from benchmarks.posteriors.layers import Layers
from benchmarks.posteriors.report import ranks, table
from benchmarks.posteriors.variational import GlobalInducing, MeanField, Posterior, maximise
from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace

NOISE, INPUTS = 0.04, 3
# A linear model: one layer with a bias, whose prior has the variance 1 / (INPUTS + 1).
LINEAR = Layers([INPUTS, 1], nn.Identity())


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def linear_data(num: int = 25) -> tuple[Tensor, Tensor]:
    """Inputs that are correlated, so that independent weights are not the posterior."""
    random = generator()
    x = torch.randn(num, INPUTS, generator=random, dtype=torch.float64)
    x[:, 1] += 0.8 * x[:, 0]
    noise = torch.randn(num, generator=random, dtype=torch.float64)
    return x, 0.5 * x[:, 0] - 0.3 * x[:, 2] + 0.2 + math.sqrt(NOISE) * noise


def linear_posterior(x: Tensor, y: Tensor, prior_precision: float) -> tuple[Tensor, Tensor]:
    """Mean and precision of the weights, the bias last."""
    features = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    precision = features.mT @ features / NOISE + prior_precision * torch.eye(INPUTS + 1, dtype=torch.float64)
    return torch.linalg.solve(precision, features.mT @ y / NOISE), precision


def log_evidence(x: Tensor, y: Tensor) -> float:
    return float(Process(linear(INPUTS + 1), torch.tensor(NOISE, dtype=torch.float64), x, y).log_evidence)


def test_layers_are_the_network() -> None:
    torch.manual_seed(0)
    network = mlp(torch.Size([INPUTS]), 1, 0.0, width=5, depth=2, activation=nn.Tanh).double()
    layers, x = Layers.of(network), linear_data()[0]
    assert list(layers.sizes) == [INPUTS, 5, 5, 1]
    weights = layers.weights_of(network)
    assert_close(layers(torch.stack([weights, 0 * weights]), x)[0], network(x)[:, 0])
    # 4 inputs with the constant for each unit of the first layer, 6 for those of the others
    assert_close(layers.prior_variances.sum(), torch.tensor(5.0 + 5.0 + 1.0).double())


def test_a_linear_kernel_on_frozen_features_is_the_last_layer() -> None:
    torch.manual_seed(0)
    network = mlp(torch.Size([INPUTS]), 1, 0.0, width=8, activation=nn.Tanh).double()
    x, y = linear_data()
    likelihood, prior = Gaussian(1 / NOISE, learn=False), IsotropicPrior(precision=2.0)
    la = LinearisedLaplace(network, likelihood, prior=prior, parameters="last_layer", method="exact")
    la.fit([(x, y[:, None])], progress=False)
    assert isinstance(network, nn.Sequential)
    new = torch.randn(7, INPUTS, generator=generator(), dtype=torch.float64)
    with torch.no_grad():
        features, at = network[:-1](x), network[:-1](new)
    process = Process(linear(2.0), torch.tensor(NOISE, dtype=torch.float64), features, y)
    mean, covariance = process.predict(at)
    assert_close(la.predict(new).variance[:, 0], covariance.diagonal(), rtol=1e-6, atol=1e-9)
    assert_close(at @ la.mode_[:-1] + la.mode_[-1], mean, rtol=1e-6, atol=1e-9)
    assert float(la.log_marginal_likelihood().value) == pytest.approx(float(process.log_evidence), rel=1e-6)


def test_training_of_the_features_raises_the_evidence_and_leaves_the_network() -> None:
    torch.manual_seed(0)
    network = mlp(torch.Size([INPUTS]), 1, 0.0, width=8)
    assert isinstance(network, nn.Sequential)
    x, y = linear_data()
    frozen = feature_process(network, x, y, False, 20, 0)
    before = [p.detach().clone() for p in network.parameters()]
    assert frozen.details["score"] < feature_process(network, x, y, True, 20, 0).details["score"]
    assert all(map(torch.equal, network.parameters(), before))


@pytest.mark.parametrize("whitened", [False, True])
def test_hmc_has_the_posterior_of_a_linear_model(whitened: bool) -> None:
    x, y = linear_data()
    mean, precision = linear_posterior(x, y, 2.0)
    variances = precision.inverse().diagonal()

    def potential(weights: Tensor) -> Tensor:
        return 0.5 * ((y - LINEAR(weights, x)).square().sum(1) / NOISE + 2.0 * weights.square().sum(1))

    def whiten(weights: Tensor) -> chains.Root:
        features = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        return chains.tangent_root(features.expand(len(weights), -1, -1), NOISE, 2.0)

    starts = torch.randn(64, INPUTS + 1, generator=generator(), dtype=torch.float64)
    found = chains.hmc(potential, starts, 240, generator(), whiten if whitened else None, leapfrogs=20)
    assert abs(float(found.acceptance.mean()) - chains.ACCEPTANCE) < 0.15
    # Chains are independent, so that their means tell the Monte Carlo error; four standard errors are allowed.
    for values, expected in ((found.draws, mean), ((found.draws - mean).square(), variances)):
        of_chains = values.mean(1)
        error = of_chains.std(0) / math.sqrt(len(of_chains))
        assert torch.all((of_chains.mean(0) - expected).abs() < 4 * error)
        assert torch.all(error < 0.1 * expected.abs().clamp_min(variances.sqrt().min()))
    assert float(chains.split_r_hat(found.draws).max()) < 1.05


def test_the_root_of_the_tangent_posterior() -> None:
    jacobian = torch.randn(2, 3, 5, generator=generator(), dtype=torch.float64)
    root = chains.tangent_root(jacobian, 0.01, 2.0)
    roots = torch.stack([root(row.expand(2, -1)) for row in torch.eye(5, dtype=torch.float64)], 1)
    precision = 2 * torch.eye(5, dtype=torch.float64) + jacobian.mT @ jacobian / 0.01
    assert_close(roots @ roots, precision.inverse())


def test_chains_that_disagree_are_told() -> None:
    draws = torch.randn(4, 200, 2, generator=generator(), dtype=torch.float64)
    draws[3, :, 1] += 1
    agree, disagree = chains.split_r_hat(draws)
    assert agree < 1.02
    assert disagree > 1.05


def test_sgld_without_data_draws_from_the_prior() -> None:
    precision, step = 4.0, 0.05
    start = torch.zeros(5000, dtype=torch.float64)
    draws = chains.sgld(lambda w, rows: 0 * w.sum(), precision, start, 1, step, (1, 100), 2, generator())
    # The recursion w ← (1 − ηα/2) w + √η ξ has the variance 1 / (α (1 − ηα/4)).
    assert len(draws) == 2
    assert float(draws[1].var()) == pytest.approx(1 / (precision * (1 - step * precision / 4)), rel=0.06)


def test_global_inducing_points_at_the_data_reach_the_evidence_of_a_linear_model() -> None:
    x, y = linear_data()
    posterior = GlobalInducing(LINEAR, x, y, torch.zeros(INPUTS + 1), NOISE)
    with torch.no_grad():
        # Each single draw is it: the posterior is exact.
        assert float(posterior.elbo(x, y, 1, generator())) == pytest.approx(log_evidence(x, y), rel=1e-9)


def test_the_bound_of_mean_field_is_below_the_evidence_by_its_divergence() -> None:
    x, y = linear_data()
    posterior = MeanField(LINEAR, torch.zeros(INPUTS + 1, dtype=torch.float64), NOISE, learn_noise=False)
    random = generator()
    maximise(posterior, x, y, 1000, random)
    with torch.no_grad():
        bounds = torch.stack([posterior.elbo(x, y, 500, random) for _ in range(10)])
    precision = linear_posterior(x, y, INPUTS + 1)[1]
    # The best independent Gaussians have the diagonal of the precision.
    divergence = 0.5 * float(precision.diagonal().log().sum() - precision.logdet())
    error = float(bounds.std()) / math.sqrt(len(bounds))
    assert float(bounds.mean()) < log_evidence(x, y)
    assert abs(float(bounds.mean()) - log_evidence(x, y) + divergence) < 4 * error + 0.05


def test_global_inducing_has_a_larger_bound_than_mean_field_on_a_cubic() -> None:
    random = generator()
    x = torch.cat([side + 2 * torch.rand(20, 1, generator=random, dtype=torch.float64) for side in (-4, 2)])
    y = x[:, 0] ** 3 + 3 * torch.randn(40, generator=random, dtype=torch.float64)
    scale, y = float(y.std()), (y - y.mean()) / y.std()
    x, noise, layers = x / x.std(), (3 / scale) ** 2, Layers([1, 20, 20, 1], nn.ReLU())
    start = torch.randn(len(layers.prior_variances), generator=random) * layers.prior_variances.sqrt()
    posteriors: list[Posterior] = [
        GlobalInducing(layers, x, y, start, noise, learn_noise=False),
        MeanField(layers, start, noise, learn_noise=False),
    ]
    correlated, factorised = (maximise(posterior, x, y, 300, random) for posterior in posteriors)
    assert correlated > factorised + 20


def row(network: str, contender: str, score: float, ll: float, r_hat: float | None = None) -> dict:
    moments = {"mean": [0.0, 1.0], "stddev": [1.0, 2.0 if r_hat else 8.0]}
    test = {"ll": ll, "joint": ll, "rmse": 1.0, "coverage": 0.9} | moments
    details = {"score": score} | ({"r_hat": r_hat} if r_hat else {})
    return {
        "split": 0, "network": network, "contender": contender, "test": test, "details": details, "seconds": 1.0
    }  # fmt: skip


def test_the_table_marks_chains_that_disagree_and_quotes_published_figures() -> None:
    rows = [row("n", "ours", -1.0, -2.0), row("n", "HMC (reference)", 0.0, -2.0, 1.2)]
    lines = table(rows, "uci", "yacht")
    assert any("R̂ up to 1.20" in line for line in lines)
    # 8 / 2 and 1 / 1 have the geometric mean 2.
    ours = next(line for line in lines if line.startswith("| ours"))
    assert " | 2 | " in ours
    assert any(line.startswith("| *published: deep Wishart") for line in lines)


def test_ranks_of_networks() -> None:
    scores, tests = [0.3, 0.1, 0.2, 0.4], [-1.0, -3.0, -0.5, -0.2]
    rows = [row(str(k), "ours", scores[k], tests[k]) for k in range(4)]
    assert f"{spearmanr(scores, tests)[0]:.3g}" in ranks(rows, "yacht")[-1]
