"""The ablations on small problems, against dense algebra and identities."""

import math
import statistics
from typing import Any

import pytest
import scipy.optimize
import torch
from torch.testing import assert_close

from benchmarks.methods import ablated_settings, ablations
from benchmarks.methods.ablated_settings import spread
from benchmarks.methods.tangents import Spectrum, Trained, trained
from benchmarks.solvers import digits
from laplace_sampling import Gaussian, IsotropicPrior
from laplace_sampling.evidence.em import fit_em
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.dense import Dense, Factor

# The updates are compared on networks that error bars do not always help.
pytestmark = pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")

NAME, STEPS = "gap, tanh MLP", 300


@pytest.fixture(scope="module")
def gap() -> Trained:
    return trained(NAME, 0, STEPS)


@pytest.fixture(scope="module")
def wine() -> Trained:
    return trained("wine, MLP", 0, STEPS)


@pytest.fixture(scope="module")
def spectra(gap: Trained, wine: Trained) -> dict[str, Spectrum]:
    return {name: Spectrum.of(p.default, p.prior(p.default)) for name, p in (("gap", gap), ("wine", wine))}


def log_evidence(problem: Trained, alpha: float) -> float:
    """Of a regression, as a Gaussian density of the targets: shares nothing with spectra."""
    model = problem.default
    rows, y = model.features.rows(torch.arange(len(model.targets)))[:, 0], model.targets.double().flatten()
    covariance = rows @ rows.T / alpha + torch.eye(len(y)).double() / problem.noise_precision
    mean = model.offset[:, 0]
    return float(torch.distributions.MultivariateNormal(mean, covariance).log_prob(y))


@pytest.mark.parametrize("update", ablations.UPDATES)
def test_updates_end_at_the_largest_evidence(update: str, gap: Trained, spectra: dict[str, Spectrum]) -> None:
    s = spectra["gap"]
    ends = [ablations.iterate(s, update, start)[-1] for start in (0.02, 50.0)]
    best: Any = scipy.optimize.minimize_scalar(
        lambda u: -log_evidence(gap, math.exp(u)), bounds=(math.log(0.01), math.log(100)), method="bounded"
    )
    assert ends == pytest.approx([math.exp(best.x)] * 2, rel=2e-3)
    assert s.fixed_point() == pytest.approx(ends[0], rel=1e-4)


@pytest.mark.parametrize("update", ablations.UPDATES)
def test_updates_have_one_fixed_point_for_classes(update: str, spectra: dict[str, Spectrum]) -> None:
    s = spectra["wine"]
    root = s.fixed_point()
    assert ablations.UPDATES[update](s, root) == pytest.approx(root, rel=1e-6)
    for alpha in (root / 5, 5 * root):  # and it is attracting
        moved = ablations.UPDATES[update](s, alpha)
        assert abs(math.log(moved / root)) < math.log(5)


def test_each_update_maximises_its_own_objective(spectra: dict[str, Spectrum]) -> None:
    s, alpha = spectra["wine"], 2.0
    norm, trace = s.norm(alpha), s.trace_of_inverse(alpha)
    eigenvalues = torch.cat([s.values, torch.zeros(s.size - len(s.values))])

    def lower_bound(a: float) -> float:
        return -0.5 * a * norm - 0.5 * float(torch.log1p(eigenvalues / a).sum())

    def elbo(a: float) -> float:
        return -0.5 * a * (norm + trace) + 0.5 * s.size * math.log(a)

    for objective, update in ((lower_bound, ablations.bound), (elbo, ablations.decoupled)):
        best = update(s, alpha)
        assert objective(best) > max(objective(0.99 * best), objective(1.01 * best))


@pytest.mark.parametrize("name", ["gap", "wine"])
def test_spectrum_is_that_of_dense_algebra(
    name: str, request: pytest.FixtureRequest, spectra: dict[str, Spectrum]
) -> None:
    s, problem = spectra[name], request.getfixturevalue(name)
    model, alpha = problem.default, 0.7
    prior = problem.prior(model, precision=alpha)
    gamma = float(Factor.of(model.ggn(model.network_outputs), prior.diagonal()).leverage().sum())
    assert s.gamma(alpha) == pytest.approx(gamma, rel=1e-6)
    assert s.trace_of_inverse(alpha) == pytest.approx((s.size - gamma) / alpha, rel=1e-7)  # Tr H⁻¹(M + α) = P
    mode = linear_model_mode(model, prior, Dense()).value
    assert s.norm(alpha) == pytest.approx(float(mode.square().sum()), rel=3e-3)


def test_em_trace_is_that_of_the_library(spectra: dict[str, Spectrum]) -> None:
    s, draws, steps = spectra["gap"], Draws(4, 0), 4
    size = s.model.features.size
    prior = GaussianPrior(torch.ones(1).double(), torch.zeros(size).long(), torch.ones(size).double(), ("all",))
    solver = digits.CG(1e-10)
    found = fit_em(s.model, prior, draws, solver, hessian_at="network", max_steps=steps, tolerance=1e-12)
    u = s.model.ggn(s.model.network_outputs).root_matmul(draws.noise(1))
    keep = s.values > 1e-10 * s.values.max()
    data = torch.where(keep, u @ s.vectors / s.values.clamp_min(1e-30).sqrt(), 0.0)
    trace = ablations.em_trace(s, 1.0, (data, draws.prior(size).double() @ s.vectors), steps)
    assert trace == pytest.approx([step.new_prior_precision[0] for step in found.history], rel=5e-3)


def test_more_samples_end_nearer_to_the_dense_fixed_point(spectra: dict[str, Spectrum]) -> None:
    s = spectra["gap"]
    root, sd = s.fixed_point(), {}
    for num in (1, 16):
        ends = []
        for seed in range(20):
            noise = torch.randn(2, num, len(s.values), generator=torch.Generator().manual_seed(seed)).double()
            ends.append(math.log(ablations.em_trace(s, 1.0, (noise[0], noise[1]), 15)[-1] / root))
        sd[num] = statistics.mean(e**2 for e in ends) ** 0.5
    assert sd[16] < 0.5 * sd[1]  # a quarter is expected


def test_objectives_agree_in_expectation_and_on_all_data() -> None:
    p = ablations.in_float32(NAME, 0, STEPS)
    prior, num, draws = p.prior(1.0), p.model.features.num_data, Draws(4, 0)
    truth = digits.exact(p, prior, draws)
    errors = ablations.objective_errors(p, prior, draws, truth, num, epochs=50)
    assert errors["L"] == pytest.approx(errors["L'"], rel=1e-3)
    scaled = digits.replace(p.ggn(), features=ScaledFeatures(p.model.features, prior.scale))
    noise, parts = draws.noise(1), torch.arange(num).split(20)
    # the noise of L, batch by batch, has the mean that L' takes in full
    sums = torch.stack([scaled.root_matmul(noise, b) for b in parts]).sum(0)
    assert_close(sums, scaled.root_matmul(noise), rtol=1e-3, atol=1e-3)
    few = ablations.objective_errors(p, prior, draws, truth, 10, epochs=20)
    assert few["L'"] < few["L"]
    gamma = ablations.leverage_of(p, prior, truth) * num
    exact = float(Factor.of(p.ggn(), prior.diagonal()).leverage().sum())
    assert gamma == pytest.approx(exact, rel=4 * (2 / (4 * exact)) ** 0.5)  # four standard errors


def test_a_kept_delta_has_the_right_variance_after_a_jump() -> None:
    g = torch.Generator().manual_seed(0)
    features, test = (torch.randn(n, 2, 400, generator=g) / 4 for n in (40, 20))
    f, y = torch.randn(40, 2, generator=g), torch.randint(2, (40,), generator=g)
    model = LinearModel(DenseFeatures(features), torch.zeros_like(f), f, y, Categorical())
    p = digits.Problem(model, (["all"], torch.zeros(400, dtype=torch.long)), test)
    ratios = digits.jump(p, Draws(4, 0), min_steps=100)
    assert ratios["delta"] == pytest.approx(1.0, abs=1e-3)
    assert ratios["raw"] < 0.995  # rows that are not started afresh keep the old prior's variance off the data


def test_precision_of_the_weights_solves_its_equation(wine: Trained) -> None:
    alpha = ablated_settings.precision_of_weights(wine)
    model = wine.default
    root = torch.cat(list(model.ggn(model.network_outputs).root_rows()))
    values = torch.linalg.eigvalsh(root @ root.T).clamp_min(0)
    gamma = float((values / (values + alpha)).sum())
    norm = sum(float(w.detach().double().square().sum()) for w in wine.network.parameters())
    assert alpha * norm == pytest.approx(gamma, rel=1e-6)


def test_log_likelihood_is_that_of_a_gaussian_process(gap: Trained) -> None:
    alpha, b = 0.5, gap.noise_precision
    la = gap.laplace(prior=IsotropicPrior(precision=alpha), likelihood=Gaussian(b))
    la.fit(gap.data.train.loader(), progress=False)
    model = gap.default
    rows = model.features.rows(torch.arange(len(model.targets)))[:, 0]
    test = gap.test_features(len(gap.data.test.y))[:, 0].double()
    H = b * rows.T @ rows + alpha * torch.eye(rows.shape[1]).double()
    variance = (test * torch.linalg.solve(H, test.T).T).sum(1) + 1 / b
    with torch.no_grad():
        mean = gap.network(gap.data.test.x)[:, 0].double()
    expected = torch.distributions.Normal(mean, variance.sqrt()).log_prob(gap.data.test.y[:, 0].double()).mean()
    assert ablated_settings.log_likelihood(gap, la) == pytest.approx(float(expected), abs=1e-3)


def test_a_certain_posterior_predicts_as_the_network(wine: Trained) -> None:
    la = wine.laplace(prior=IsotropicPrior(precision=1e9)).fit(wine.data.train.loader(), progress=False)
    found, alone = ablated_settings.log_likelihood(wine, la), ablated_settings.alone(wine)
    assert found == pytest.approx(alone, abs=1e-3)


def test_tables_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablated_settings, "SEEDS", (0, 1))
    monkeypatch.setattr(ablated_settings, "MOST_STEPS", 2)
    monkeypatch.setattr(ablated_settings, "NUMBERS", (NAME,))
    monkeypatch.setattr(ablated_settings, "CLASSES", ())
    monkeypatch.setattr(ablated_settings, "trained", lambda name, seed: trained(name, seed, STEPS))
    ablated_settings.fit.cache_clear()
    try:
        tables = {name: "\n".join(ablation()) for name, ablation in ablated_settings.ABLATIONS.items()}
        fits = [ablated_settings.fit(NAME, seed, prior="isotropic") for seed in (0, 1)]
    finally:
        ablated_settings.fit.cache_clear()
    for fit, seed in zip(fits, (0, 1), strict=True):  # evidence is largest at the fixed point of a spectrum
        problem = trained(NAME, seed, STEPS)
        s = Spectrum.of(problem.default, problem.prior(problem.default))
        assert fit.precision[0] == pytest.approx(s.fixed_point(), rel=0.01)
    row = next(line for line in tables["priors"].splitlines() if "isotropic" in line)
    assert f"{fits[0].precision[0]:.3g}, {fits[1].precision[0]:.3g}" in row
    assert [len(t.splitlines()) for t in tables.values()] == [6, 6, 5, 0]  # of classes there are none


def test_seeds_of_which_one_ended_at_infinity() -> None:
    assert spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert spread([1.0, -math.inf]) == "-inf ± nan"
