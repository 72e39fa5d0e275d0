import math
from dataclasses import replace

import pytest
import torch
from grids import covering
from tangent_problems import build, dense_model, log_evidence, random_spectrum, rows_of
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.evidence.curves import EvidencePath, FixedPoint
from laplace_sampling.evidence.expansion import Point, expand
from laplace_sampling.evidence.krylov_curves import FixedPointGoal, KrylovRun, Progress, evidence_path, run_curves
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.operator import make_dense

ALPHAS = torch.logspace(-3, 3, 7, dtype=torch.float64)


def complete(model: LinearModel, prior: GaussianPrior, mode: Tensor | None = None, **settings):
    """The curves with as many probes as weights and every Lanczos step."""
    mode = torch.zeros(1, model.features.size, dtype=torch.float64) if mode is None else mode
    settings = {"accuracy": 1e-12} | settings
    return evidence_path(model, prior, Draws(model.features.size, 0), mode, **settings)


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


@covering(
    strength=2,
    name=["classification", "classification_many_data"],
    at=[1e-3, 0.1, 10.0, 1e3],
)
def test_classification_curves_are_exact_where_the_run_is_made(name: str, at: float) -> None:
    model = dense_model(name)
    prior = build("isotropic", model, at)
    minimum = linear_model_mode(model, prior, Dense())
    mode = minimum.value
    path, mode_at = complete(model, prior, mode, decades=3.0)
    assert path.at == pytest.approx(at)
    outputs = model.outputs(mode)[0]
    M = make_dense(model.ggn(model.network_outputs))
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
        path, _ = complete(model, prior, linear_model_mode(model, prior, solver).value)
        values.append(torch.stack([*path.log_marginal_likelihood(alpha), path.mode_norm(alpha)]))
    assert_close(values[0], values[1], rtol=1e-6, atol=1e-7)


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
        settings = {"accuracy": 1e-4, "decades": 0.0, "max_basis": max_basis}
        path, _ = evidence_path(model, prior, Draws(num_probes, seed), start, **settings)
        assert path.full
        pairs = (path.effective_dimension(a), path.log_determinant(a))
        within += [abs(float(value) - t) <= 3 * float(se) for (value, se), t in zip(pairs, truth, strict=True)]
        assert float(path.log_marginal_likelihood(a)[1]) >= 0.5 * float(pairs[1][1])
    assert sum(within) >= 0.95 * len(within)


def test_without_a_step_nothing_is_known_of_traces() -> None:
    model = dense_model("regression")
    zero = torch.zeros(1, model.features.size, dtype=torch.float64)
    settings = {"accuracy": 1e-4, "decades": 0.0, "max_basis": 4}
    path, _ = evidence_path(model, build("isotropic", model, 1.0), Draws(8, 0), zero, **settings)
    assert bool(path.effective_dimension(ALPHAS)[1].isinf().all())
    assert bool(path.log_marginal_likelihood(ALPHAS)[1].isinf().all())


@pytest.mark.parametrize("name", ["regression", "regression_many_data", "classification", "classification_many_data"])
def test_the_bound_of_a_path_is_above_its_log_determinant(name: str) -> None:
    path, _ = complete(dense_model(name), build("isotropic", dense_model(name), 1.0))
    assert bool((path.log_determinant_bound(ALPHAS) >= path.log_determinant(ALPHAS)[0] - 1e-9).all())


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
    path, _ = evidence_path(model, prior, Draws(16, 0), zero, accuracy=2e-3, decades=3.0)
    spectrum = 10 * root**2
    for alpha in ALPHAS:
        gamma, se = path.effective_dimension(alpha[None])
        assert abs(float(gamma) - float((spectrum / (spectrum + alpha)).sum())) <= 3 * float(se) + 1e-6


def test_the_standard_error_of_evidence_is_half_that_of_the_log_determinant() -> None:
    model = dense_model("classification")
    prior = build("isotropic", model, 1.0)
    zero = torch.zeros(1, model.features.size, dtype=torch.float64)
    path, _ = evidence_path(model, prior, Draws(2, 0), zero, accuracy=0.1, decades=1.0)
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
    expansion = expand(model, prior, Point.of(model, prior, torch.zeros(1, model.features.size).double()))
    run = KrylovRun(expansion, Draws(1, 0).prior(model.features.size).double(), None, None)
    M = make_dense(expansion.at_mode)
    for alpha in (0.01, 1.0):
        H = M + alpha * torch.eye(len(M), dtype=M.dtype)
        theta = run.mode(alpha) / expansion.white
        gap = theta - torch.linalg.solve(H, run.rhs[0])[None]
        error = float(((gap @ H) * gap).sum().sqrt() / (alpha**0.5 * theta.norm()))
        assert 0 < error <= run.fit_error(alpha)
        # What the evidence lacks is half the squared error in the norm of H, at most this.
        assert 0.5 * float(((gap @ H) * gap).sum()) <= run.missing_evidence(alpha)


@pytest.mark.parametrize("accuracy", [1e-3, 1e-6])
def test_the_part_of_the_mode_is_as_accurate_as_asked_for_at_both_ends(accuracy: float) -> None:
    # One probe: the directions of the mode have to be found for its own sake.
    ggn, _ = random_spectrum()
    y = 100 * torch.randn(300, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros_like(y)
    model = LinearModel(ggn.features, zero, zero, y, Gaussian(1.0))
    prior = build("isotropic", model, 30.0)
    path, _ = evidence_path(
        model, prior, Draws(1, 0), torch.zeros(1, 300, dtype=torch.float64), accuracy=accuracy,
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


def test_a_mode_out_of_reach_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its error does not go down, after some hundreds of vectors and not all."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(900, 1, 900, generator=generator) * torch.logspace(0, -4, 900)
    outputs, y = torch.zeros(900, 1), torch.randn(900, 1, generator=generator)
    model = LinearModel(DenseFeatures(rows), outputs, outputs, y, Gaussian(1.0))
    prior = build("isotropic", model, 1.0)
    expansion = expand(model, prior.to(rows.device, rows.dtype), Point.of(model, prior, torch.zeros(1, 900)))
    monkeypatch.setattr(EvidencePath, "remaining", lambda path, alpha: (0.0, 0.0))  # only the mode is at stake
    monkeypatch.setattr(KrylovRun, "fit_error", lambda run, alpha: 12.0)

    def target(path: EvidencePath) -> FixedPoint:
        return replace(path.fixed_point((1e-8, 1e12), False, follow=False), precision=1e-9, slope=1.0, error=0.0)

    run = run_curves(expansion, Draws(2, 0, 1), FixedPointGoal(target, 1e-3), max_basis=None)
    assert 200 < run.fit_basis.size < 220


def test_progress_of_a_mode() -> None:
    progress = Progress()
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
    path, _ = evidence_path(model, prior, Draws(8, 0), mode, accuracy=1e-3, decades=3)
    at = torch.tensor([1.0, 1e3, 1e6], dtype=torch.float64)
    J, target = rows[:, 0].double(), y.double()
    for alpha, found in zip(at.tolist(), path.data_fit(at).tolist(), strict=True):
        theta = torch.linalg.solve(J.T @ J + alpha * torch.eye(400, dtype=torch.float64), J.T @ target)
        exact = float(0.5 * (target - J @ theta).square().sum() + 200 * math.log(2 * math.pi))
        assert found == pytest.approx(exact, rel=1e-3)
