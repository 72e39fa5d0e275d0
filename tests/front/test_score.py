"""Scores of networks: each datum left out, and the evidence at the network."""

import math
import warnings
from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from flat_settings import fit_case
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import (
    Categorical,
    ConvergenceWarning,
    Data,
    Gaussian,
    IsotropicPrior,
    LinearisedLaplace,
    Score,
    compare,
)
from laplace_sampling.predictions.leave_one_out import left_out_log_probs, sampling_bias, without_datum

TIGHT = {"rtol": 1e-6, "atol": 1e-7}
ALPHA, NOISE = 0.7, 4.0


def ridge(num: int = 25, largest: float = 1.0) -> tuple[nn.Linear, Tensor, Tensor]:
    """A linear network at the minimum of its ridge regression; the first input is so many times larger."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(num, d, generator=generator, dtype=torch.float64) for d in (3, 1))
    x[0] *= largest
    y = x.sum(1, keepdim=True) + 0.5 * y
    network = nn.Linear(3, 1, bias=False).double()
    network.weight.data = torch.linalg.solve(NOISE * x.T @ x + ALPHA * torch.eye(3).double(), NOISE * x.T @ y).T
    return network, x, y


def left_out(case: Case, f: Tensor, J: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and their covariances after a Newton step without each datum, by an inverse of each Hessian."""
    B = reference.curvature(case.likelihood, f, case.y)
    means, covariances = [], []
    for i in range(len(f)):
        at = f[i].clone().requires_grad_()
        gradient = torch.autograd.grad(reference.loss(case.likelihood, at, case.y[i]), at)[0]
        V = J[i] @ torch.linalg.inv(H - J[i].T @ B[i] @ J[i]) @ J[i].T
        means.append(f[i] + V @ gradient)
        covariances.append(V)
    return torch.stack(means), torch.stack(covariances)


def dense(case: Case, alpha: float = ALPHA) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs, Jacobian, `M` and `H` at the network, by the formulas."""
    with torch.no_grad():
        f = case.model(case.x)
    f = torch.cat([p.reshape(len(case.x), -1) for p in (f.values() if isinstance(f, dict) else [f])], 1)
    J = reference.jacobian(case.model, case.x)
    M = reference.ggn(J, reference.curvature(case.likelihood, f, case.y))
    return f, J, M, M + alpha * torch.eye(len(M)).double()


@pytest.mark.parametrize("method", ["exact", "subset"])
@pytest.mark.parametrize("largest", [1.0, 30.0])
def test_left_out_ridge_regression_is_a_refit_without_the_datum(method: str, largest: float) -> None:
    """Also of a datum that decides its own prediction, to a leverage of 0.99; a part here is all of the data."""
    network, x, y = ridge(largest=largest)
    la = LinearisedLaplace(network, Gaussian(NOISE, learn=False), prior=IsotropicPrior(ALPHA), method=method)
    score = la.fit([(x, y)], progress=False).score("loo")
    H = NOISE * x.T @ x + ALPHA * torch.eye(3).double()
    assert (float(NOISE * x[0] @ torch.linalg.solve(H, x[0])) > 0.95) is (largest > 1)
    assert score.num_data == len(y)
    for i in range(len(y)):
        rest = [j for j in range(len(y)) if j != i]
        H = NOISE * x[rest].T @ x[rest] + ALPHA * torch.eye(3).double()
        mean = x[i] @ torch.linalg.solve(H, NOISE * x[rest].T @ y[rest])
        variance = x[i] @ torch.linalg.solve(H, x[i]) + 1 / NOISE
        expected = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[i])[0]
        assert_close(score.log_probs[i], expected, **TIGHT)
    assert score.value == pytest.approx(float(score.log_probs.mean()))
    assert score.standard_error == pytest.approx(float(score.log_probs.std()) / math.sqrt(len(y)))


@pytest.mark.parametrize("name", ["regression", "regression_many_data", "regression_per_output", "image_regression"])
@pytest.mark.parametrize("method", ["exact", "subset"])
def test_left_out_is_a_newton_step_without_the_datum(name: str, method: str) -> None:
    case = make_case(name)
    # The part of the data grows to all of them: it is exact.
    la = fit_case(case, method, prior_precision=ALPHA, num_samples=32)
    f, J, _, H = dense(case, ALPHA)
    mean, V = left_out(case, f, J, H)
    noise = torch.diag_embed((1 / torch.as_tensor(case.likelihood.noise_precision)).expand(mean.shape))
    expected = torch.distributions.MultivariateNormal(mean, V + noise).log_prob(case.y.reshape(mean.shape))
    assert_close(la.score("loo").log_probs, expected, **TIGHT)


@pytest.mark.parametrize("name", ["classification", "multi_label", "poisson", "heteroscedastic", "segmentation"])
def test_left_out_of_other_likelihoods_is_the_mean_over_a_newton_step(name: str) -> None:
    case = make_case(name)
    f, J, _, H = dense(case, 5.0)
    mean, V = left_out(case, f, J, H)
    found = fit_case(case, "exact", prior_precision=5.0, num_samples=64).score("loo")
    assert found.data.tolist() == list(range(len(f)))
    values, vectors = torch.linalg.eigh(V)
    root = vectors * values.clamp_min(0).sqrt()[:, None]
    white = torch.randn(20_000, *f.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    draws = mean + torch.einsum("ncd,knd->knc", root, white)
    likelihoods = (-case.likelihood.loss(draws, case.y)).exp()
    # Both are means over draws: 512 of them, in pairs, and the reference's.
    error = likelihoods.std(0) / likelihoods.mean(0) / math.sqrt(256)
    assert_close(found.log_probs, likelihoods.mean(0).log(), rtol=0, atol=4 * float(error.max()))


@pytest.mark.slow
def test_left_out_logistic_regression_is_close_to_refits() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = (x @ torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64) + torch.randn(40, generator=generator) > 0).long()
    case = Case(nn.Linear(3, 2, bias=False).double(), Categorical(), x, y)
    J = reference.jacobian(case.model, x)
    A = torch.full((6,), 0.5, dtype=torch.float64)

    def refit(rest: list[int]) -> Tensor:
        return reference.mode(case.likelihood, J[rest], torch.zeros(len(rest), 2).double(), y[rest], A)

    case.model.weight.data = refit(list(range(40))).reshape(2, 3)
    found = fit_case(case, "exact", prior_precision=0.5).score("loo").log_probs
    white, expected = torch.randn(4000, 2, generator=generator, dtype=torch.float64), []
    for i in range(40):
        rest = [j for j in range(40) if j != i]
        theta = refit(rest)
        H = reference.ggn(J[rest], reference.curvature(case.likelihood, J[rest] @ theta, y[rest])) + A.diag()
        values, vectors = torch.linalg.eigh(J[i] @ torch.linalg.solve(H, J[i].T))
        draws = J[i] @ theta + white @ (vectors * values.clamp_min(0).sqrt()).T
        expected.append(draws.log_softmax(-1)[:, y[i]].exp().mean().log())
    expected = torch.stack(expected)
    with torch.no_grad():
        trained = case.model(x).log_softmax(-1)[torch.arange(40), y]
    # Labels of few data are influential; the network's own outputs are off by ten times as much.
    assert float((found - expected).abs().max()) < 0.1
    assert float((found - expected).mean().abs()) < 0.1 * float((trained - expected).mean().abs())


@pytest.mark.parametrize("method", ["krylov", pytest.param("stochastic", marks=pytest.mark.slow)])
def test_samples_give_the_score_of_the_exact_covariance(method: str) -> None:
    case = make_case("classification_many_data")
    exact = fit_case(case, "exact", prior_precision=5.0, num_samples=64).score("loo")
    found = fit_case(case, method, prior_precision=5.0, num_samples=1000).score("loo")
    assert found.value == pytest.approx(exact.value, rel=0.02)


def test_a_weight_counts_as_copies_and_noise_variances_have_their_units() -> None:
    network, x, y = ridge()
    settings = {"prior": IsotropicPrior(ALPHA), "method": "exact"}
    R = torch.linspace(0.5, 2, len(y)).double()
    la = LinearisedLaplace(network, Gaussian(NOISE, learn=False), **settings)
    found = la.fit([(x, y)], data=Data(noise_variances=R), progress=False).score("loo").log_probs
    H = NOISE * (x.T / R) @ x + ALPHA * torch.eye(3).double()
    for i in (0, len(y) - 1):
        V = x[i] @ torch.linalg.solve(H - NOISE / R[i] * x[i].outer(x[i]), x[i])
        f = network(x[i]).detach()
        normal = torch.distributions.Normal(f + V * NOISE / R[i] * (f - y[i]), (V + R[i] / NOISE).sqrt())
        assert_close(found[i], normal.log_prob(y[i])[0], **TIGHT)
    case = make_case("classification")
    weights = torch.ones(8)
    weights[3] = 3.0
    la = LinearisedLaplace(case.model, "classification", prior=IsotropicPrior(5.0), method="exact")
    score = la.fit(case.batches, data=Data(weights=weights), progress=False).score("loo")
    plain = score.log_probs * weights.mean() / weights
    assert score.value == pytest.approx(float((weights * plain).sum() / weights.sum()))


@pytest.mark.parametrize("name", [name for name in CASES if name != "regression_flat"])
def test_the_evidence_at_the_network_is_the_formula(name: str) -> None:
    case = make_case(name)
    f, _, _, H = dense(case)
    w = torch.cat([p.detach().flatten() for p in case.model.parameters() if p.requires_grad])
    loss = sum(float(reference.loss(case.likelihood, f[n], case.y[n])) for n in range(len(f)))
    expected = -loss - 0.5 * ALPHA * float(w @ w) - 0.5 * float(torch.logdet(H / ALPHA))
    for method in ("exact", "krylov"):
        found = fit_case(case, method).log_marginal_likelihood(at="network")
        assert float(found) == pytest.approx(expected, rel=1e-6)
        assert found.at == "network"
        assert "at='network'" in repr(found)
        assert found.data_fit + found.complexity == pytest.approx(-float(found))


@pytest.mark.parametrize("settings", [{"prior": "g-prior"}, {"prior": "layerwise"}])
def test_the_evidence_at_the_network_of_other_settings(settings: dict) -> None:
    case = make_case("classification")
    la = fit_case(case, "exact", **settings)
    f, _, M, _ = dense(case)
    A = la.prior_precision_.double()
    A = A.expand(len(M)) if len(A) == 1 else A[la._fitted.posterior.prior.groups]
    A = A / la.prior_scale_.double() ** 2
    w = torch.cat([p.detach().flatten() for p in case.model.parameters()])
    loss = float(case.likelihood.loss(f, case.y).sum())
    expected = -loss - 0.5 * float((A * w**2).sum()) - 0.5 * float(torch.logdet(torch.eye(len(M)) + M / A))
    assert float(la.log_marginal_likelihood("network")) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["regression", "regression_many_data", "classification", "poisson"])
@pytest.mark.parametrize("method", ["exact", "krylov", "kfac"])
def test_the_score_by_evidence_is_its_maximum(name: str, method: str) -> None:
    case = make_case(name)
    la = fit_case(case, method, prior_precision=300.0 if method == "krylov" else ALPHA)
    score = la.score("evidence")
    f, _, M, _ = dense(case)
    w = torch.cat([p.detach().flatten() for p in case.model.parameters()])
    values = torch.linalg.eigvalsh(M).clamp_min(0)
    if method == "kfac":
        values = la._fitted.fit.eigenvalues.double()
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def evidence() -> Tensor:
        alpha, noise = logs.exp()
        if isinstance(case.likelihood, Gaussian):
            likelihood = replace(case.likelihood, noise_precision=1.0)
            squares = likelihood.loss(f, case.y).sum() - 0.5 * f.numel() * math.log(2 * math.pi)
            loss = noise * squares - 0.5 * f.numel() * (noise / (2 * math.pi)).log()
            spectrum = noise / float(case.likelihood.noise_precision) * values
        else:
            loss, spectrum = case.likelihood.loss(f, case.y).sum(), values
        return -loss - 0.5 * alpha * w @ w - 0.5 * torch.log1p(spectrum / alpha).sum()

    optimiser = torch.optim.LBFGS([logs], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = -evidence()
        value.backward()
        return value

    optimiser.step(closure)
    assert float(score) * len(f) == pytest.approx(float(evidence().detach()), rel=1e-5)
    assert score.prior_precision == pytest.approx(float(logs[0].detach().exp()), rel=1e-3)
    assert score.standard_error == 0.0 or method == "krylov"


def test_the_score_by_evidence_has_the_units_of_the_targets() -> None:
    """`log p(y)` of ridge regression with a noise variance for each datum, at the weights of the network."""
    network, x, y = ridge()
    R = torch.linspace(0.2, 3.0, len(y)).double()
    la = LinearisedLaplace(network, Gaussian(NOISE, learn=False), prior=IsotropicPrior(ALPHA), method="exact")
    score = la.fit([(x, y)], data=Data(noise_variances=R), progress=False).score()
    w, b = network.weight.detach(), NOISE / R
    noise = torch.distributions.Normal((x @ w.T)[:, 0], b.rsqrt()).log_prob(y[:, 0]).sum()
    M = x.T @ (b[:, None] * x)

    def log_evidence(alpha: float) -> float:
        return float(noise - 0.5 * alpha * w.square().sum() - 0.5 * (torch.eye(3).double() + M / alpha).logdet())

    best = max(torch.logspace(-3, 3, 601).tolist(), key=log_evidence)
    assert score.prior_precision == pytest.approx(best, rel=0.02)
    assert score.value * len(y) == pytest.approx(log_evidence(score.prior_precision), rel=1e-6)


def test_networks_that_are_compared() -> None:
    good, x, y = ridge(60)
    bad = nn.Linear(3, 1, bias=False).double()
    settings = {"prior": IsotropicPrior(ALPHA), "method": "exact"}
    models = {
        name: LinearisedLaplace(network, Gaussian(NOISE), **settings).fit_hyperparameters([(x, y)], progress=False)
        for name, network in {"bad": bad, "good": good}.items()
    }
    for kind in ("loo", "evidence"):
        found = compare(models, kind)
        assert found.names == ("good", "bad")
        assert found.scores[0].value > found.scores[1].value
        assert "good" in str(found).splitlines()[1]
    unnamed = compare([model.score("loo", num_data=40) for model in models.values()])
    assert unnamed.best == "1"
    assert unnamed.scores[0].num_data == 40


def test_evidences_with_and_without_correlations_are_not_alike() -> None:
    case = make_case("regression")
    models = {method: fit_case(case, method, prior_precision=ALPHA) for method in ("exact", "kfac")}
    evidences = {method: model.score() for method, model in models.items()}
    # By Fischer's inequality a determinant is at most that of its blocks.
    assert evidences["kfac"].value < evidences["exact"].value - 1e-3
    with pytest.warns(UserWarning, match="'kfac'"):
        compare(models)
    with pytest.warns(UserWarning, match="'kfac'"):
        compare(models, "loo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare([evidences["kfac"], evidences["kfac"]])
        compare([evidences["exact"], evidences["exact"]])


@pytest.mark.parametrize("kind", ["evidence", "loo"])
def test_scores_of_some_weights_and_of_all_are_not_alike(kind: str) -> None:
    case = make_case("classification")
    parts = {"all": None, "last_layer": "last_layer"}
    scores = {name: fit_case(case, parameters=part, prior_precision=ALPHA).score(kind) for name, part in parts.items()}
    assert [score.of_some_weights for score in scores.values()] == [False, True]
    with pytest.warns(UserWarning, match="'last_layer'"):
        compare(scores)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare([scores["last_layer"], scores["last_layer"]])


def test_frozen_weights_that_are_chosen_do_not_stand_for_trained_ones() -> None:
    case = make_case("classification")
    first, last = case.model[0], case.model[2]
    first.requires_grad_(False)
    assert fit_case(case, parameters=["0.*"]).score().of_some_weights
    # Known weights that are not trained are part of the network.
    assert not fit_case(case, parameters=["2.*"]).score().of_some_weights
    first.requires_grad_(True)
    last.requires_grad_(False)
    assert not fit_case(case).score().of_some_weights


def test_bad_questions() -> None:
    case = make_case("classification")
    la = fit_case(case, "exact")
    with pytest.raises(ValueError, match="waic"):
        la.score("waic")
    with pytest.raises(ValueError, match="num_data"):
        la.score(num_data=0)
    with pytest.raises(ValueError, match="at='weights'"):
        la.log_marginal_likelihood("weights")
    with pytest.raises(ValueError, match="got 1"):
        compare([la])
    with pytest.raises(TypeError, match=r"\bstr\b"):
        compare([la, "b"])
    for alone in (la, la.score(), None, "ab"):
        with pytest.raises(TypeError):
            compare(alone)
    with pytest.raises(ValueError, match="'loo'"):
        compare([la.score("loo"), la.score("evidence")])
    assert isinstance(la.score(), Score)
    assert la.score().kind == "evidence"


def many_features(method: str, num: int, num_samples: int = 64) -> tuple[LinearisedLaplace, Tensor, Tensor]:
    """A ridge regression of 60 features at its minimum; of few data each decides its own prediction."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(num, d, generator=generator, dtype=torch.float64) for d in (60, 1))
    network = nn.Linear(60, 1, bias=False).double()
    network.weight.data = torch.linalg.solve(NOISE * x.T @ x + ALPHA * torch.eye(60).double(), NOISE * x.T @ y).T
    likelihood, prior = Gaussian(NOISE, learn=False), IsotropicPrior(ALPHA)
    la = LinearisedLaplace(network, likelihood, prior=prior, method=method, num_samples=num_samples)
    return la.fit([(x, y)], progress=False), x, y


def test_samples_that_are_too_few_for_large_leverages_are_told() -> None:
    noisy, exact = many_features("krylov", 40)[0], many_features("exact", 40)[0].score("loo")
    with pytest.warns(ConvergenceWarning, match="num_samples") as caught:
        found = noisy.score("loo")
    assert caught[0].filename == __file__
    assert found.value - exact.value > 5 * found.standard_error
    # Of more data leverages are small, and 64 samples are enough: no warning, and the score of the exact covariance.
    exact, found = (many_features(method, 400)[0].score("loo") for method in ("exact", "krylov"))
    assert found.value == pytest.approx(exact.value, abs=exact.standard_error / 2)


def test_the_bias_of_samples_is_that_of_repeated_draws() -> None:
    """To second order in a leverage of 0.3 from 400 samples; 4,000 repetitions, whose standard error is below 3 %."""
    generator = torch.Generator().manual_seed(0)
    s, num, repetitions, error = 0.3, 400, 4000, 1.0
    likelihood, f = Gaussian(1.0, learn=False), torch.zeros(repetitions, 1, dtype=torch.float64)
    y = f + error
    root = (s / num) ** 0.5 * torch.randn(num, repetitions, 1, generator=generator, dtype=torch.float64)
    mean, rows = without_datum(likelihood, y, f, root, 0.95)
    noisy = left_out_log_probs(likelihood, y, mean, rows)
    exact = torch.full((1, 1, 1), s**0.5, dtype=torch.float64)
    clean = left_out_log_probs(likelihood, y[:1], *without_datum(likelihood, y[:1], f[:1], exact, 0.95))
    # `½ log(1 − s) − ½ e²/(1 − s)`: its second derivative times half the variance `2s²/K`.
    curvature = -0.5 / (1 - s) ** 2 - error**2 / (1 - s) ** 3
    bias, standard_error = float(noisy.mean() - clean), float(noisy.std()) / math.sqrt(repetitions)
    assert abs(bias - curvature * s**2 / num) < 3 * standard_error
    found = sampling_bias(likelihood, y, rows, f)
    assert found == pytest.approx((s / (1 - s)) ** 2 / num, rel=0.05)
    assert 0.5 < abs(curvature * s**2 / num) / found < 4


@pytest.mark.parametrize("kind", ["loo", "evidence"])
def test_scores_of_other_targets_are_not_compared(kind: str) -> None:
    network, x, y = ridge()

    def fitted(x: Tensor, y: Tensor, **settings: object) -> LinearisedLaplace:
        la = LinearisedLaplace(network, Gaussian(NOISE, learn=False), prior=IsotropicPrior(ALPHA), method="exact")
        return la.fit([(x, y)], progress=False, **settings)

    first, order = fitted(x, y), torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    again = fitted(x, y, data=Data(noise_variances=torch.linspace(0.5, 2, len(y)).double()))
    assert set(compare({"a": first, "b": again}, kind).names) == {"a", "b"}
    assert set(compare({"a": first, "b": fitted(x.float().double(), y.float().double())}, kind).names) == {"a", "b"}
    with pytest.raises(ValueError, match="'c'"):
        compare({"a": first, "b": again, "c": fitted(x, 100 * y)}, kind)
    reordered = fitted(x[order], y[order])
    if kind == "evidence":
        assert_close(float(reordered.score()), float(first.score()))
        compare([first, reordered], kind)
    else:
        with pytest.raises(ValueError, match="order"):
            compare([first, reordered], kind)


def test_data_are_no_kind_of_score() -> None:
    la, x, y = many_features("exact", 40)
    with pytest.raises(TypeError, match="log_prob"):
        la.score([(x, y)])
