import math
from dataclasses import replace

import pytest
import torch
from cases import make_case
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.evidence.curves import EvidencePath, FixedPoint, bai_golub_bound
from laplace_sampling.evidence.em import fit_em
from laplace_sampling.evidence.expansion import Point, Run, _eigh, _Progress, evidence_path, expand, run_curves
from laplace_sampling.evidence.fixed_point import _Rounds, _Schedule, _Secant, fit_path
from laplace_sampling.likelihoods.likelihood import Gaussian
from laplace_sampling.linear_model.features import GGN, DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.priors import GaussianPrior, as_prior
from laplace_sampling.linear_model.sampling import Draws, LinearModel, linear_model_mode
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG, Basis
from laplace_sampling.solvers.operator import make_dense
from laplace_sampling.solvers.quadrature import Quadrature, TraceEstimator

ALPHAS = torch.logspace(-3, 3, 7, dtype=torch.float64)


def dense_model(name: str) -> LinearModel:
    model = make_case(name).linear_model()
    return replace(model, features=DenseFeatures.of(model.features))


def build(recipe: str, model: LinearModel, precision: float) -> GaussianPrior:
    layers = (["all"], torch.zeros(model.features.size, dtype=torch.long))
    ggn = model.ggn(model.network_outputs)
    return as_prior(recipe).build(ggn, layers, precision, Draws(64, 0, 1).noise(model.features.num_outputs))


def rows_of(model: LinearModel, prior: GaussianPrior) -> Tensor:
    """`[N, C, P]` in the scaled coordinates of the prior."""
    return ScaledFeatures(model.features, prior.scale).rows(torch.arange(model.features.num_data))


def complete(model: LinearModel, prior: GaussianPrior, mode: Tensor | None = None, **settings):
    """The curves with as many probes as weights and every Lanczos step."""
    mode = torch.zeros(1, model.features.size, dtype=torch.float64) if mode is None else mode
    settings = {"hessian_at": "network", "accuracy": 1e-12} | settings
    return evidence_path(model, prior, Draws(model.features.size, 0), mode, **settings)


def log_evidence(J: Tensor, y: Tensor, alpha: float, beta: float) -> float:
    """Log marginal likelihood of the Gaussian linear model, from its dense definition."""
    covariance = J @ J.T / alpha + torch.eye(len(J), dtype=J.dtype) / beta
    return float(torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y))


@pytest.mark.parametrize("recipe", ["isotropic", "g-prior"])
@pytest.mark.parametrize("name", ["regression", "regression_many_data"])
def test_regression_curves_equal_dense_ones_at_every_precision(name: str, recipe: str) -> None:
    model = dense_model(name)
    prior = build(recipe, model, 2.0)
    path, mode_at = complete(model, prior)
    J, y = rows_of(model, prior).flatten(0, 1), (model.targets - model.offset).reshape(-1)
    beta, eye = float(model.likelihood.noise_precision), torch.eye(model.features.size, dtype=torch.float64)
    M = beta * J.T @ J
    gamma, logdet = path.effective_dimension(ALPHAS)[0], path.log_determinant(ALPHAS)[0]
    evidence = path.log_marginal_likelihood(ALPHAS)[0]
    for i, alpha in enumerate(ALPHAS.tolist()):
        theta = torch.linalg.solve(M + alpha * eye, beta * J.T @ y)
        leverage = torch.linalg.solve(M + alpha * eye, M)
        assert_close(mode_at(alpha)[0], theta, rtol=1e-6, atol=1e-9)
        fit = -torch.distributions.Normal(J @ theta, beta**-0.5).log_prob(y).sum()
        dense = {
            "gamma": (gamma[i], leverage.trace()),
            "squared": (path.squared_dimension(ALPHAS)[i], (leverage @ leverage).trace()),
            "norm": (path.mode_norm(ALPHAS)[i], theta @ theta),
            "log determinant": (logdet[i], torch.linalg.slogdet(eye + M / alpha)[1]),
            "data fit": (path.data_fit(ALPHAS)[i], fit),
            "evidence": (evidence[i], torch.tensor(log_evidence(J, y, alpha, beta), dtype=torch.float64)),
        }
        for what, (mine, truth) in dense.items():
            assert float(mine) == pytest.approx(float(truth), rel=1e-6, abs=1e-7), (what, alpha)


@pytest.mark.parametrize("hessian_at", ["network", "mode"])
@pytest.mark.parametrize("name", ["classification", "classification_many_data"])
@pytest.mark.parametrize("at", [1e-3, 0.1, 10.0, 1e3])
def test_classification_curves_are_exact_where_the_run_is_made(name: str, hessian_at: str, at: float) -> None:
    model = dense_model(name)
    prior = build("isotropic", model, at)
    minimum = linear_model_mode(model, prior, Dense())
    mode = minimum.value
    path, mode_at = complete(model, prior, mode, hessian_at=hessian_at, decades=3.0)
    assert path.at == pytest.approx(at)
    outputs = model.outputs(mode)[0]
    M = make_dense(model.ggn(outputs if hessian_at == "mode" else model.network_outputs))
    alpha, eye = torch.tensor([at], dtype=torch.float64), torch.eye(model.features.size, dtype=torch.float64)
    loss = float(model.likelihood.loss(outputs, model.targets).sum())
    norm = float((mode**2).sum())
    logdet = float(torch.linalg.slogdet(eye + M / at)[1])
    assert_close(mode_at(at), mode, rtol=1e-6, atol=1e-7)
    for mine, truth in (
        (path.mode_norm(alpha), norm),
        (path.data_fit(alpha), loss),
        (path.log_marginal_likelihood(alpha)[0], -loss - 0.5 * at * norm - 0.5 * logdet),
    ):
        assert float(mine) == pytest.approx(truth, rel=1e-6, abs=1e-7)
    gamma, logdets = path.effective_dimension(ALPHAS)[0], path.log_determinant(ALPHAS)[0]
    for i, a in enumerate(ALPHAS.tolist()):
        assert float(gamma[i]) == pytest.approx(float(torch.linalg.solve(M + a * eye, M).trace()), rel=1e-6)
        assert float(logdets[i]) == pytest.approx(float(torch.linalg.slogdet(eye + M / a)[1]), rel=1e-6)


def test_a_mode_found_by_cg_gives_the_same_curves() -> None:
    model = dense_model("classification")
    prior = build("isotropic", model, 0.5)
    alpha = torch.tensor([0.5], dtype=torch.float64)
    values = []
    for solver in (Dense(), CG(1e-8)):
        path, _ = complete(model, prior, linear_model_mode(model, prior, solver).value, hessian_at="mode")
        values.append(torch.stack([*path.log_marginal_likelihood(alpha), path.mode_norm(alpha)]))
    assert_close(values[0], values[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("recipe", ["isotropic", "g-prior"])
def test_the_fixed_point_of_regression_is_that_of_em(recipe: str) -> None:
    model = dense_model("regression_many_data").with_likelihood(Gaussian(0.5, learn=True))
    prior = build(recipe, model, 2.0)
    em = fit_em(model, prior, Draws(2, 0), Dense(), hessian_at="network", max_steps=5000, tolerance=1e-10)
    result = fit_path(model, prior, 0, 3, hessian_at="network", tolerance=1e-3)
    assert em.converged
    assert result.converged
    assert float(result.prior.precision) == pytest.approx(float(em.prior.precision), rel=1e-3)
    noise = float(result.likelihood.noise_precision)
    assert noise == pytest.approx(float(em.likelihood.noise_precision), rel=1e-3)
    assert_close(result.mode, em.mode, rtol=1e-3, atol=1e-6)
    # b·SSE + α‖θ̄‖² = N·C
    J, y = rows_of(model, result.prior).flatten(0, 1), (model.targets - model.offset).reshape(-1)
    alpha = float(result.prior.precision)
    theta = result.mode / result.prior.scale
    total = noise * float(((y - J @ theta) ** 2).sum()) + alpha * float(theta @ theta)
    assert total == pytest.approx(len(y), rel=1e-6)
    best = log_evidence(J, y, alpha, noise)
    for factor in (0.8, 1.25):
        assert log_evidence(J, y, alpha * factor, noise) < best
        assert log_evidence(J, y, alpha, noise * factor) < best


# With B at the mode, "classification" has no fixed point: the prior precision goes to its upper bound.
@pytest.mark.parametrize(
    ("name", "hessian_at"),
    [("classification", "network"), ("classification_many_data", "network"), ("classification_many_data", "mode")],
)
def test_the_fixed_point_of_classification_is_that_of_em(name: str, hessian_at: str) -> None:
    model = dense_model(name)
    prior = build("isotropic", model, 1.0)
    em = fit_em(model, prior, Draws(2, 0), Dense(), hessian_at=hessian_at, max_steps=5000, tolerance=1e-8)
    steps = []
    result = fit_path(model, prior, 0, 3, hessian_at=hessian_at, tolerance=0.01, callback=steps.append)
    assert em.converged
    assert result.converged
    assert steps == result.history
    ends = math.log(float(result.prior.precision)), math.log(float(em.prior.precision))
    print(name, hessian_at, ends, len(steps))
    assert ends[0] == pytest.approx(ends[1], abs=0.03)


def random_spectrum(size: int = 300) -> tuple[GGN, Tensor]:
    g = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))[0]
    spectrum = 1e4 * torch.arange(1, size + 1, dtype=torch.float64) ** -1.5
    features = DenseFeatures((spectrum.sqrt()[:, None] * basis)[:, None])
    return GGN(features, Gaussian(1.0), torch.zeros(size, 1, dtype=torch.float64)), spectrum


def test_standard_errors_cover_the_truth() -> None:
    ggn, spectrum = random_spectrum()
    size, alpha = len(spectrum), torch.tensor([30.0], dtype=torch.float64)
    y = torch.randn(size, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros_like(y)
    model = LinearModel(ggn.features, zero, zero, y, Gaussian(1.0))
    prior = GaussianPrior(alpha, torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.float64), ("all",))
    truth = float((spectrum / (spectrum + 30)).sum()), float((1 + spectrum / 30).log().sum())
    errors, ses = [], []
    for seed in range(40):
        path, _ = evidence_path(
            model,
            prior,
            Draws(8, seed),
            torch.zeros(1, size, dtype=torch.float64),
            hessian_at="network",
            accuracy=1e-4,
            decades=0.0,
        )
        pairs = (path.effective_dimension(alpha), path.log_determinant(alpha))
        errors.append([float(value) - t for (value, _), t in zip(pairs, truth, strict=True)])
        ses.append([float(se) for _, se in pairs])
    deviation, se = torch.tensor(errors), torch.tensor(ses)
    within = (deviation.abs() <= 3 * se).double().mean(0)
    bias = deviation.mean(0) / (deviation.std(0) / 40**0.5)
    ratio = deviation.square().mean(0) / se.square().mean(0)
    print(f"within 3 s.e. {within.tolist()}, bias in s.e. {bias.tolist()}, mean square over reported {ratio.tolist()}")
    assert float(within.min()) >= 0.95
    assert float(bias.abs().max()) < 3
    assert bool((ratio > 0.2).all())
    assert bool((ratio < 3).all())


@pytest.mark.parametrize(("num_probes", "max_basis"), [(1, 4), (8, 32)])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, 300.0])
def test_standard_errors_cover_the_truth_when_the_basis_is_full(num_probes: int, max_basis: int, alpha: float) -> None:
    # The last Lanczos steps tell too little: by them, two in three were off by more than three standard errors.
    ggn, spectrum = random_spectrum()
    size, a = len(spectrum), torch.tensor([alpha], dtype=torch.float64)
    y = torch.randn(size, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero, start = torch.zeros_like(y), torch.zeros(1, size, dtype=torch.float64)
    model = LinearModel(ggn.features, zero, zero, y, Gaussian(1.0))
    prior = GaussianPrior(a, torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.float64), ("all",))
    truth = float((spectrum / (spectrum + alpha)).sum()), float((1 + spectrum / alpha).log().sum())
    within = []
    for seed in range(8):
        settings = {"hessian_at": "network", "accuracy": 1e-4, "decades": 0.0, "max_basis": max_basis}
        path, _ = evidence_path(model, prior, Draws(num_probes, seed), start, **settings)
        assert path.full
        pairs = (path.effective_dimension(a), path.log_determinant(a))
        within += [abs(float(value) - t) <= 3 * float(se) for (value, se), t in zip(pairs, truth, strict=True)]
        assert float(path.log_marginal_likelihood(a)[1]) >= 0.5 * float(pairs[1][1])
    assert sum(within) >= 0.95 * len(within)


@pytest.mark.parametrize("others", [0, 3])
def test_a_quadratic_form_lies_within_the_bound_of_its_quadrature(others: int) -> None:
    ggn, _ = random_spectrum(120)
    values, vectors = torch.linalg.eigh(make_dense(ggn))
    basis, probe = Basis(ggn), Draws(1, 0).prior(120).double()
    if others:
        basis.extend(torch.randn(others, 120, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    estimator = TraceEstimator(basis, probe * math.sqrt(120) / probe.norm())

    def f(t: Tensor) -> Tensor:
        return torch.cat([torch.stack([t / (t + a), torch.log1p(t / a)]) for a in (1e-3, 1.0, 300.0)])

    truth = f(values) @ (estimator.probes[0] @ vectors) ** 2
    gaps = []
    for _ in range(8):
        estimator.step()
        assert estimator.quadrature is not None
        value, gap = estimator.quadrature(f)[0], estimator.quadrature.bound(f)
        assert bool((truth <= value * (1 + 1e-9)).all())
        assert bool((truth >= value - gap - 1e-9 * value).all())
        gaps.append(gap)
    assert bool((gaps[-1] < gaps[2]).all())
    assert bool((gaps[-1][-2:] < 0.05 * value[-2:]).all())  # tight where the small eigenvalues have no part


def test_without_a_step_nothing_is_known_of_traces() -> None:
    model = dense_model("regression")
    zero = torch.zeros(1, model.features.size, dtype=torch.float64)
    settings = {"hessian_at": "network", "accuracy": 1e-4, "decades": 0.0, "max_basis": 4}
    path, _ = evidence_path(model, build("isotropic", model, 1.0), Draws(8, 0), zero, **settings)
    assert bool(path.effective_dimension(ALPHAS)[1].isinf().all())
    assert bool(path.log_marginal_likelihood(ALPHAS)[1].isinf().all())


@pytest.mark.parametrize("alpha", [1e-3, 1.0, 1e3])
def test_bai_golub_bound_is_above_the_log_determinant(alpha: float) -> None:
    _ggn, spectrum = random_spectrum(60)
    a = torch.tensor([alpha], dtype=torch.float64)
    truth = (spectrum + alpha).log().sum()
    bound = bai_golub_bound(spectrum.sum(), spectrum.square().sum(), spectrum.max(), 60, 60, a)
    assert float(bound) >= float(truth) - 1e-9
    # Exact where all eigenvalues of the range are one of two that the formula finds.
    low = torch.tensor([3.0] * 5 + [10.0] * 2, dtype=torch.float64)
    known = bai_golub_bound(low.sum(), low.square().sum(), low.max(), 7, 9, a)
    assert float(known) == pytest.approx(float((low + alpha).log().sum()) + 2 * math.log(alpha))


@pytest.mark.parametrize("name", ["regression", "regression_many_data", "classification", "classification_many_data"])
def test_the_bound_of_a_path_is_above_its_log_determinant(name: str) -> None:
    path, _ = complete(dense_model(name), build("isotropic", dense_model(name), 1.0))
    assert bool((path.log_determinant_bound(ALPHAS) >= path.log_determinant(ALPHAS)[0] - 1e-9).all())


def test_quadratures_of_all_eigenvalues_have_no_error() -> None:
    _, spectrum = random_spectrum(20)
    ones = torch.ones(1, 20, dtype=torch.float64)
    unit, fit = Quadrature(spectrum, ones, ones), Quadrature(spectrum, 2 * ones, ones)
    path = EvidencePath(unit, fit, 5.0, 20, 20, None, 1.0, exact=True, passes=0.0)
    gamma, se = path.effective_dimension(ALPHAS)
    assert_close(gamma, torch.stack([(spectrum / (spectrum + a)).sum() for a in ALPHAS]))
    assert float(se.max()) == 0
    assert float(path.log_marginal_likelihood(ALPHAS)[1].max()) == 0
    assert path.remaining(1.0) == (0, 0)


def test_what_remains_is_the_rest_of_a_geometric_series() -> None:
    one = torch.ones(1, dtype=torch.float64)
    first, second, third = (
        Quadrature(one, w, w) for w in torch.tensor([[[10.0]], [[6.0]], [[4.0]]], dtype=torch.float64)
    )
    before = replace(second, truncated=first)
    value = replace(third, truncated=second, before=before)
    assert float(value.remaining(lambda t: t[None])) == pytest.approx(-2)  # 10, 6, 4, 3, 2.5, … go to 2
    assert float(before.remaining(lambda t: t[None])) == pytest.approx(-4)  # no rate to be seen yet: as much again


@pytest.mark.parametrize("others", [0, 2])
def test_traces_are_exact_when_the_space_is_exhausted(others: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 60, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, 20).double()[:, None]
    operator = GGN(DenseFeatures(rows[:, None]), Gaussian(1.0), torch.zeros(20, 1, dtype=torch.float64))
    spectrum = torch.linalg.eigvalsh(rows @ rows.T)
    basis, probes = Basis(operator), Draws(5, 0).prior(60).double()
    if others:
        basis.extend(torch.randn(others, 60, generator=generator, dtype=torch.float64))
    estimator = TraceEstimator(basis, probes * math.sqrt(60) / probes.norm(dim=1, keepdim=True))
    while estimator.step():
        if others:  # vectors that belong to another purpose come between
            basis.extend(torch.randn(1, 60, generator=generator, dtype=torch.float64))
    assert estimator.quadrature is not None
    for alpha in (1e-4, 1.0, 1e4):

        def f(t: torch.Tensor, alpha: float = alpha) -> torch.Tensor:
            return torch.log1p(t / alpha)[None]

        assert_close(estimator.quadrature(f).mean(), f(spectrum).sum(), rtol=1e-6, atol=1e-9)
        assert float(estimator.quadrature.variance(f)) == float(estimator.quadrature.remaining(f)) == 0


def test_many_equal_eigenvalues_are_not_taken_for_all() -> None:
    operator = GGN(DenseFeatures(torch.eye(40).double()[:, None]), Gaussian(1.0), torch.zeros(40, 1).double())
    estimator = TraceEstimator(Basis(operator), Draws(4, 0).prior(40).double())
    while estimator.step():
        pass
    assert estimator.quadrature is not None
    assert float(estimator.quadrature(lambda t: t[None]).mean()) == pytest.approx(40)


def test_estimates_of_traces_have_no_bias_with_other_vectors_in_the_basis() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(80, 120, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 80).double()[:, None]
    operator = GGN(DenseFeatures(rows[:, None]), Gaussian(1.0), torch.zeros(80, 1, dtype=torch.float64))
    spectrum = torch.linalg.eigvalsh(rows @ rows.T)

    def f(t: torch.Tensor) -> torch.Tensor:
        return torch.log1p(t / 0.1)[None]

    errors, variances = [], []
    for seed in range(30):
        basis, probes = Basis(operator), Draws(6, seed).prior(120).double()
        basis.extend(torch.randn(2, 120, generator=generator, dtype=torch.float64))
        estimator = TraceEstimator(basis, probes * math.sqrt(120) / probes.norm(dim=1, keepdim=True))
        for _ in range(6):
            estimator.step()
            basis.extend(basis.combine_products(torch.randn(1, basis.size, generator=generator, dtype=torch.float64)))
        assert estimator.quadrature is not None
        errors.append(float(estimator.quadrature(f).mean() - f(spectrum).sum()))
        variances.append(float(estimator.quadrature.variance(f) + estimator.quadrature.remaining(f) ** 2))
    error, variance = torch.tensor(errors), torch.tensor(variances).mean()
    sigmas, ratio = error.mean() / (variance / 30).sqrt(), (error**2).mean() / variance
    print(f"bias {sigmas:.2f} s.e., mean square over reported {ratio:.2f}")
    assert abs(sigmas) <= 3
    assert 0.5 <= ratio <= 1.5


@pytest.mark.parametrize("equal", [120, 60])
def test_traces_of_a_multiple_of_the_identity(equal: int) -> None:
    # All of the random part is on one eigenvalue, or on two: the control variate has nothing to go by.
    root = torch.ones(120, dtype=torch.float64)
    root[equal:] = 3
    model = LinearModel(
        DenseFeatures((root.diag() * math.sqrt(10)).reshape(120, 1, 120)),
        *(torch.zeros(120, 1, dtype=torch.float64) for _ in range(2)),
        torch.randn(120, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        Gaussian(1.0),
    )
    prior = build("isotropic", model, 1.0)
    zero = torch.zeros(1, 120, dtype=torch.float64)
    path, _ = evidence_path(model, prior, Draws(16, 0), zero, hessian_at="mode", accuracy=2e-3, decades=3.0)
    spectrum = 10 * root**2
    for alpha in ALPHAS:
        gamma, se = path.effective_dimension(alpha[None])
        assert abs(float(gamma) - float((spectrum / (spectrum + alpha)).sum())) <= 3 * float(se) + 1e-6


def test_the_standard_error_of_evidence_is_half_that_of_the_log_determinant() -> None:
    model = dense_model("classification")
    prior = build("isotropic", model, 1.0)
    zero = torch.zeros(1, model.features.size, dtype=torch.float64)
    path, _ = evidence_path(model, prior, Draws(2, 0), zero, hessian_at="network", accuracy=0.1, decades=1.0)
    known = replace(path, fit=replace(path.fit, truncated=None))
    error = known.log_determinant(ALPHAS)[1]
    assert float(error.min()) > 0
    assert_close(known.log_marginal_likelihood(ALPHAS)[1], 0.5 * error)


def test_curves_of_another_noise_precision_are_those_of_a_run_there() -> None:
    model = dense_model("regression")
    prior = build("isotropic", model, 1.0)
    twice = model.with_likelihood(Gaussian(2 * float(torch.as_tensor(model.likelihood.noise_precision))))
    rescaled, direct = complete(model, prior)[0].rescaled(2.0), complete(twice, prior)[0]
    for curve in ("log_marginal_likelihood", "effective_dimension"):
        for one, other in zip(getattr(rescaled, curve)(ALPHAS), getattr(direct, curve)(ALPHAS), strict=True):
            assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert_close(rescaled.mode_norm(ALPHAS), direct.mode_norm(ALPHAS), rtol=1e-6, atol=1e-9)


def test_the_bound_of_the_error_of_a_mode_holds_and_says_what_is_missing() -> None:
    model = dense_model("classification")
    prior = build("isotropic", model, 0.01)
    expansion = expand(model, prior, Point.of(model, prior, torch.zeros(1, model.features.size).double()), "network")
    run = Run(expansion, Draws(1, 0).prior(model.features.size).double(), None, None)
    M = make_dense(expansion.at_mode)
    for alpha in (0.01, 1.0):
        H = M + alpha * torch.eye(len(M), dtype=M.dtype)
        theta = run.mode(alpha) / expansion.white
        gap = theta - torch.linalg.solve(H, run.rhs[0])[None]
        error = float(((gap @ H) * gap).sum().sqrt() / (alpha**0.5 * theta.norm()))
        assert 0 < error <= run.fit_error(alpha)
        # What the evidence lacks is half the squared error in the norm of H, at most this.
        assert 0.5 * float(((gap @ H) * gap).sum()) <= 0.5 * run.residual_norm(alpha) ** 2 / alpha


def test_a_followed_fixed_point_is_the_one_that_the_update_leads_to() -> None:
    one = torch.ones(1, 2, dtype=torch.float64)
    # γ = Σ n λ/(λ + α) with two clusters; ‖θ̄‖² = Σ w (λ + α)⁻²: three fixed points, the middle one unstable.
    nodes = torch.tensor([1e-3, 1e3], dtype=torch.float64)
    traces, fit = Quadrature(nodes, 50 * one, one), Quadrature(nodes, torch.tensor([[1.0, 1e6]]).double(), one)
    path = EvidencePath(traces, fit, 1e6, 100, 100, None, 1.0, exact=True, passes=0.0)
    grid = torch.logspace(-6, 6, 4000, dtype=torch.float64)
    sign = path.mackay(grid)[0].sign()
    up = grid[:-1][(sign[:-1] < 0) & (sign[1:] > 0)].tolist()
    down = grid[:-1][(sign[:-1] > 0) & (sign[1:] < 0)].tolist()
    assert len(up) == 2
    assert len(down) == 1
    for factor, end in ((0.5, up[0]), (2.0, up[1])):
        start = replace(path, at=down[0] * factor)
        found = start.fixed_point((1e-6, 1e6), follow=True).precision
        assert found == pytest.approx(end, rel=0.02)


def test_the_secant_goes_to_the_end_of_a_line() -> None:
    secant, x, end = _Secant(moving=True), math.log(3.0), math.log(0.5)
    for _ in range(3):
        following = secant.next(math.exp(end + 0.6 * (x - end)), math.exp(x), 1e-6, 12)
        x = math.log(following)
    assert secant.rate == pytest.approx(0.6, abs=1e-3)
    assert x == pytest.approx(end, abs=1e-3)
    still = _Secant(moving=False)
    assert still.next(0.5, 3.0, 0.1, 12) == pytest.approx(3.0 / 4)  # as far as the curves are trusted
    assert still.next(0.5, 0.75, 0.1, 12) == pytest.approx(0.5)


def test_distance_of_points_is_that_of_the_hessian() -> None:
    model = dense_model("classification")
    prior = build("isotropic", model, 1.0)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(1, model.features.size, generator=generator, dtype=torch.float64) for _ in range(2))
    points = [Point.of(model, prior, theta) for theta in (first, second)]
    M = make_dense(GGN(ScaledFeatures(model.features, prior.scale), model.likelihood, points[1].outputs))
    step, alpha = (second - first)[0], 0.3
    expected = ((step @ M @ step + alpha * step @ step) / (alpha * second[0] @ second[0])).sqrt()
    assert points[0].distance(model, points[1], alpha) == pytest.approx(float(expected))


@pytest.mark.parametrize("accuracy", [1e-3, 1e-6])
def test_the_part_of_the_mode_is_as_accurate_as_asked_for_at_both_ends(accuracy: float) -> None:
    # One probe: the directions of the mode have to be found for its own sake.
    ggn, _ = random_spectrum()
    y = 100 * torch.randn(300, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros_like(y)
    model = LinearModel(ggn.features, zero, zero, y, Gaussian(1.0))
    prior = build("isotropic", model, 30.0)
    path, _ = evidence_path(
        model, prior, Draws(1, 0), torch.zeros(1, 300, dtype=torch.float64), hessian_at="network", accuracy=accuracy,
        decades=1.0,
    )  # fmt: skip
    ends = torch.tensor([3.0, 30.0, 300.0], dtype=torch.float64)
    rhs = ggn.features.vjp(y[None], torch.arange(300))[0].double()
    M = make_dense(ggn)
    for i, alpha in enumerate(ends.tolist()):
        truth = path.loss - 0.5 * float(rhs @ torch.linalg.solve(M + alpha * torch.eye(300), rhs))
        mine = float(path.data_fit(ends)[i] + 0.5 * alpha * path.mode_norm(ends)[i])
        size = abs(float(path.log_marginal_likelihood(ends)[0][i]))
        print(alpha, (mine - truth) / size)
        assert abs(mine - truth) <= accuracy * size


def test_a_step_that_raises_the_objective_is_halved() -> None:
    model = dense_model("classification")
    prior = build("isotropic", model, 0.5)
    start = Point.of(model, prior, torch.zeros(1, model.features.size, dtype=torch.float64))
    mode = linear_model_mode(model, prior, Dense()).value
    assert start.toward(model, (near := Point.of(model, prior, mode)), 0.5) is near
    far = Point.of(model, prior, 3000 * mode)
    assert far.objective(0.5) > start.objective(0.5)
    found = start.toward(model, far, 0.5)
    assert found.objective(0.5) <= start.objective(0.5)
    halvings = math.log2(float(far.theta.norm() / found.theta.norm()))
    assert halvings == pytest.approx(round(halvings), abs=1e-9)
    assert halvings > 0
    again = Point.of(model, prior, found.theta)
    assert_close(found.outputs, again.outputs)
    assert found.loss == pytest.approx(again.loss)
    assert Point.of(model, prior, 2 * found.theta).objective(0.5) > start.objective(0.5)  # the first that does


def test_a_curvature_without_eigenvalues_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"has no eigenvalues in this precision: .* Use `linear_model=\"homogeneous\"`, or a larger lower bound"
    with pytest.raises(ValueError, match=said):
        _eigh(torch.full((2, 2), math.nan))

    def fails(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(ValueError, match=said):
        _eigh(torch.eye(2))


@pytest.mark.parametrize(
    ("found", "error", "quadratic", "level", "beyond", "expected"),
    [
        (1e-8, math.inf, False, 0, [], 0.5),  # nothing was seen: as far as the next round goes
        (1e12, math.inf, True, 0, [], 8.0),
        (1e12, math.inf, True, 1, [], 1e12),  # a bound that more probes have not changed
        (1e-8, math.inf, False, 1, [-1.0], 2 / 16),  # and twice as far, in log α, the second time
        (1e-8, math.inf, False, 1, [1.0], 0.5),  # but not the other way
        (3.0, 0.1, False, 1, [], 3.0),
        (100.0, 0.1, False, 1, [], 100.0),  # curves around zero weights are believed
    ],
)
def test_curves_are_accurate_where_the_next_round_goes(
    found: float, error: float, quadratic: bool, level: int, beyond: list[float], expected: float
) -> None:
    rounds = object.__new__(_Rounds)
    rounds.quadratic, rounds.history, rounds.secant = quadratic, [], _Secant(True)
    rounds.schedule, rounds.secant.beyond = _Schedule([0.1, 0.01], 8, None, level), beyond
    rounds._fixed_point = lambda path: FixedPoint(found, 1.0, error, 1.0)
    assert rounds._sought(2.0, None).precision == pytest.approx(expected)
    rounds.history = [None]  # later rounds
    if not quadratic:
        assert rounds._sought(2.0, None).precision == pytest.approx(min(expected, 8.0))


def test_a_mode_out_of_reach_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its error does not go down, after some hundreds of vectors and not all."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(900, 1, 900, generator=generator) * torch.logspace(0, -4, 900)
    outputs, y = torch.zeros(900, 1), torch.randn(900, 1, generator=generator)
    model = LinearModel(DenseFeatures(rows), outputs, outputs, y, Gaussian(1.0))
    prior = build("isotropic", model, 1.0)
    expansion = expand(model, prior.to(rows.device, rows.dtype), Point.of(model, prior, torch.zeros(1, 900)), "network")
    monkeypatch.setattr(EvidencePath, "remaining", lambda path, alpha: (0.0, 0.0))  # only the mode is at stake
    monkeypatch.setattr(Run, "fit_error", lambda run, alpha: 12.0)

    def target(path: EvidencePath) -> FixedPoint:
        return replace(path.fixed_point((1e-8, 1e12), False, follow=False), precision=1e-9, slope=1.0, error=0.0)

    run = run_curves(expansion, Draws(2, 0, 1), target, 1e-3, max_basis=None)
    assert 200 < run.fit_basis.size < 220


def test_progress_of_a_mode() -> None:
    progress = _Progress()
    for error, num, stalled in ((1.0, 10, False), (0.9, 200, False), (0.9, 201, True), (0.4, 202, False)):
        progress.see(1.0, error, num)
        assert progress.stalled == stalled
    for num, stalled in ((404, False), (405, True)):  # twice as many as at the last halving
        progress.see(0.9, 0.3, num)
        assert progress.stalled == stalled
    progress.see(0.4, 5.0, 500)  # an error elsewhere is a new beginning
    assert not progress.stalled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mode_that_is_found_at_one_precision_is_sought_at_others(dtype: torch.dtype) -> None:
    """At a large `α` few vectors reach rounding; curves at a small one take more. Against dense algebra."""
    generator = torch.Generator().manual_seed(0)
    factors = [torch.linalg.qr(torch.randn(400, 400, generator=generator, dtype=torch.float64))[0] for _ in range(2)]
    rows = ((factors[0] * torch.logspace(1.5, 0, 400, dtype=torch.float64)) @ factors[1])[:, None].to(dtype)
    theta = torch.randn(400, 1, generator=generator, dtype=torch.float64).to(dtype)
    y, zero = 0.5 * (rows[:, 0] @ theta + theta.flip(0)), torch.zeros(400, 1, dtype=dtype)
    model = LinearModel(DenseFeatures(rows), zero, zero, y, Gaussian(1.0))
    prior = build("isotropic", model, 1000.0).to(rows.device, dtype)
    mode = torch.zeros(1, 400, dtype=dtype)
    path, _ = evidence_path(model, prior, Draws(8, 0), mode, hessian_at="network", accuracy=1e-3, decades=3)
    at = torch.tensor([1.0, 1e3, 1e6], dtype=torch.float64)
    J, target = rows[:, 0].double(), y.double()
    for alpha, found in zip(at.tolist(), path.data_fit(at).tolist(), strict=True):
        theta = torch.linalg.solve(J.T @ J + alpha * torch.eye(400, dtype=torch.float64), J.T @ target)
        exact = float(0.5 * (target - J @ theta).square().sum() + 200 * math.log(2 * math.pi))
        assert found == pytest.approx(exact, rel=1e-3)
