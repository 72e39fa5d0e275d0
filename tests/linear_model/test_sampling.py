import pytest
import torch
from cases import CASES, Case, make_case
from grids import covering
from problems import PRIORS, setting
from torch.testing import assert_close

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import IsotropicPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.operator import make_dense
from laplace_sampling.solvers.sgd import SGD


def assert_white(samples: torch.Tensor, H: torch.Tensor) -> None:
    """Second moments of whitened samples within 5 standard errors of the identity, mean within 5 of zero."""
    num = len(samples)
    white = samples @ torch.linalg.cholesky(H)
    error = white.T @ white / num - torch.eye(len(H), dtype=H.dtype)
    standard_error = ((1 + torch.eye(len(H), dtype=H.dtype)) / num) ** 0.5
    assert (error.abs() < 5 * standard_error).all()
    assert (white.mean(0).abs() < 5 / num**0.5).all()


@pytest.mark.parametrize("prior", list(PRIORS))
@pytest.mark.parametrize("name", ["regression", "classification_many_data", "multi_label", "regression_per_output"])
def test_exact_samples_have_the_posterior_covariance(name: str, prior: str) -> None:
    _, ggn, built = setting(make_case(name), prior)
    solution = sample_posterior(ggn, built, Draws(4000, seed=0), Dense())
    assert_white(solution.value * built.scale, make_dense(ggn) + torch.diag(built.diagonal()))


def test_sgd_samples_have_the_posterior_covariance_at_convergence() -> None:
    _, ggn, built = setting(make_case("classification_many_data"), "g-prior")
    solver = SGD(min_steps=3000, batch_size=25)
    solution = sample_posterior(ggn, built, Draws(400, seed=0), solver)
    assert_white(solution.value * built.scale, make_dense(ggn) + torch.diag(built.diagonal()))


@covering(indirect=["case"], case=CASES, prior=PRIORS)
def test_same_draws_give_the_same_samples_by_sgd_and_exactly(case: Case, prior: str) -> None:
    _, ggn, built = setting(case, prior, precision=2.0)
    draws = Draws(3, seed=1)
    exact = sample_posterior(ggn, built, draws, Dense()).value
    sgd = sample_posterior(ggn, built, draws, SGD(min_steps=1500, batch_size=100)).value
    assert_close(sgd, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


def test_a_sample_is_the_minimiser_of_its_formula(case: Case) -> None:
    _, ggn, built = setting(case, "g-prior")
    draws = Draws(2, seed=3)
    A = built.diagonal()
    H = make_dense(ggn) + torch.diag(A)
    theta = draws.prior(ggn.size).double() / A.sqrt()
    u = ggn.root_matmul(draws.noise(ggn.features.num_outputs))
    expected = torch.linalg.solve(H, (u + A * theta).T).T
    assert_close(sample_posterior(ggn, built, draws, Dense()).value * built.scale, expected, rtol=1e-6, atol=1e-8)


def test_low_variance_objective_has_less_noise() -> None:
    """Thesis 4.27: at an initial point independent of the noise, L' has less gradient variance."""
    model, ggn, _ = setting(make_case("classification_many_data"), "isotropic")
    draws = Draws(500, seed=0)
    noise = draws.noise(model.features.num_outputs)
    linear, centre = ggn.root_matmul(noise), draws.prior(ggn.size).double()
    low, high = torch.zeros(()), torch.zeros(())
    full = ggn.matmul(centre) - linear
    for datum in torch.arange(25).split(1):
        part = 25 * ggn.matmul(centre, datum)
        low = low + ((part - linear - full) ** 2).sum(1).mean() / 25
        high = high + ((part - 25 * ggn.root_matmul(noise, datum) - full) ** 2).sum(1).mean() / 25
    trace = make_dense(ggn).trace()
    # The difference is N Tr M − Tr M exactly in expectation; 500 samples leave a few percent.
    assert float(high - low) == pytest.approx(float(24 * trace), rel=0.1)


def test_free_directions_are_exact_at_once_after_a_jump_of_alpha() -> None:
    """Iterates δ = ζ − θ⁰ stay in the range of Φᵀ: what the data leave free is the new prior sample, exactly."""
    case = make_case("regression")
    _, ggn, built = setting(case, "isotropic", precision=100.0)
    draws, short = Draws(4, seed=0), SGD(epochs=2, min_steps=20, finish_passes=0)
    warm = sample_posterior(ggn, built, draws, short).delta
    jumped = built.with_precision(torch.tensor([0.1]))
    after = sample_posterior(ggn, jumped, draws, short, init=warm * (100 / 0.1) ** 0.5)
    exact = sample_posterior(ggn, jumped, draws, Dense())
    values, vectors = torch.linalg.eigh(make_dense(ggn))
    free = vectors[:, values < 1e-10 * values[-1]]
    assert free.shape[1] == ggn.size - 7
    assert_close(after.value @ free, exact.value @ free, rtol=1e-8, atol=1e-8)
    raw = after.value - after.delta + warm + (100**-0.5 - 0.1**-0.5) * draws.prior(ggn.size)  # ζ kept as it was
    ratio = ((raw @ free) ** 2).mean() / ((exact.value @ free) ** 2).mean()
    assert float(ratio) == pytest.approx(0.1 / 100, rel=1e-5)


def test_a_raw_warm_start_is_stale_where_the_data_leave_much_free() -> None:
    """α from 100 to 0.1 with 150 data and 1,500 weights: test variance over the exact one for the same draws."""
    g = torch.Generator().manual_seed(0)
    features, test = torch.randn(150, 1, 1500, generator=g).double(), torch.randn(50, 1500, generator=g).double()
    ggn = GGN(DenseFeatures(features), Gaussian(1.0), torch.zeros(150, 1, dtype=torch.float64))
    prior, draws = IsotropicPrior(100.0).build(ggn, ([], torch.zeros(0)), Draws(1, 0).noise(1)), Draws(8, 0)
    descent = SGD(finish_passes=0)  # conjugate gradients would finish what a bad start leaves
    old = sample_posterior(ggn, prior, draws, descent)
    new = prior.with_precision(torch.tensor([0.1]))
    exact = sample_posterior(ggn, new, draws, Dense()).value
    ratios = {}
    for name, init in {
        "delta": old.delta * (100 / 0.1) ** 0.5,
        "raw": old.value - draws.prior(1500) / 0.1**0.5,
    }.items():
        sample = sample_posterior(ggn, new, draws, descent, init=init).value
        ratios[name] = float(((sample @ test.T) ** 2).mean() / ((exact @ test.T) ** 2).mean())
    print(f"test variance over the exact one: {ratios}")
    assert ratios["delta"] == pytest.approx(1, abs=0.1)
    assert ratios["raw"] < 0.31


def test_linear_model_keeps_its_parts() -> None:
    model = make_case("regression").linear_model("affine")
    assert isinstance(model, LinearModel)
    weights = model.features.network.weights
    assert_close(model.outputs(weights[None])[0], model.network_outputs)
