"""Inverse square roots by contour integral quadrature, against the eigendecomposition of the dense matrix."""

from dataclasses import replace

import linear_operator
import pytest
import torch
from cases import FEW_CASES, Case, make_case
from problems import PRIORS, setting
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.gp.contour_quadrature import PosteriorPrecision, quadrature, sample_contour
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, Features, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.isotropic_prior import IsotropicPrior
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.operator import make_dense


def inverse_root(H: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(H)
    return (vectors * values.rsqrt()) @ vectors.T


def dense(ggn: GGN, prior: GaussianPrior) -> Tensor:
    """`H` in the scaled coordinates of a prior."""
    scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
    return make_dense(scaled) + torch.diag(prior.spread())


def spectrum(
    condition: float, size: int, repeats: int, dtype: torch.dtype = torch.float64
) -> tuple[GGN, GaussianPrior]:
    """A problem whose `H` has eigenvalues from 1 to `condition`, evenly on a log scale, each repeated."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    values = torch.logspace(0, torch.tensor(condition).log10(), size // repeats, dtype=torch.float64) - 1
    values = values.repeat_interleave(repeats)
    rows = (values.clamp_min(0).sqrt()[:, None] * basis.T).to(dtype)
    ggn = GGN(DenseFeatures(rows[:, None]), Gaussian(1.0), torch.zeros(size, 1, dtype=dtype))
    return ggn, IsotropicPrior().build(ggn, ([], torch.zeros(0)), Draws(1, 0).noise(1))


def error(ggn: GGN, prior: GaussianPrior, draws: Draws, samples: Tensor) -> float:
    """`‖ζ − H^{-1/2} z‖ / ‖H^{-1/2} z‖`."""
    exact = draws.prior(ggn.size).double() @ inverse_root(dense(ggn, prior).double())
    return float((samples.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("case", FEW_CASES, indirect=True)
def test_the_adapter_is_the_dense_matrix(case: Case) -> None:
    _, ggn, _ = setting(case, "isotropic")
    A = torch.rand(ggn.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    H, adapter = make_dense(ggn) + torch.diag(A), PosteriorPrecision(A, ggn)
    b = torch.randn(2, ggn.size, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert adapter.shape == H.shape
    assert adapter.dtype == torch.float64
    assert adapter.device == ggn.device
    for rhs in (b, b[0], b[0, :, 0]):
        assert_close(adapter @ rhs, H @ rhs)
    assert_close(adapter.mT @ b[0], H @ b[0])
    assert_close(adapter.to_dense(), H)
    assert_close(adapter.diagonal(), H.diagonal())
    with torch.sparse.check_sparse_tensor_invariants(False):  # new torch warns where linear_operator does not choose
        assert_close(adapter[2:5, :4].to_dense(), H[2:5, :4])
    assert_close(adapter[1, 2], H[1, 2])
    assert_close((2.0 * adapter).to_dense(), 2 * H)
    assert_close(adapter.add_jitter(0.1).to_dense(), H + 0.1 * torch.eye(len(H), dtype=H.dtype))
    again = adapter.representation_tree()(*adapter.representation())
    assert_close(again @ b[0], H @ b[0])


@pytest.mark.parametrize("cholesky_size", [0, 800])
def test_the_solvers_of_linear_operator_run_on_the_adapter(cholesky_size: int) -> None:
    _, ggn, prior = setting(make_case("classification"), "layerwise")
    H, adapter = dense(ggn, prior), PosteriorPrecision(prior.spread(), ggn)
    b = torch.randn(ggn.size, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tight = linear_operator.settings
    with tight.max_cholesky_size(cholesky_size), tight.cg_tolerance(1e-5), tight.minres_tolerance(1e-10):
        assert_close(adapter.solve(b), torch.linalg.solve(H, b), rtol=1e-4, atol=1e-4)
        assert_close(adapter.sqrt_inv_matmul(b), inverse_root(H) @ b, rtol=1e-3, atol=1e-3)


def test_the_rule_is_as_accurate_as_its_bound() -> None:
    for condition in (1e2, 1e4, 1e6, 1e8):
        x = torch.logspace(0, torch.tensor(condition).log10(), 500, dtype=torch.float64)
        for num in (3, 5, 10, 20):
            shifts, weights = quadrature(1.0, condition, num)
            assert (shifts > 0).all()
            relative = (weights / (x[:, None] + shifts)).sum(1) * x.sqrt() - 1
            decay = torch.exp(-2 * torch.pi**2 * num / (torch.log(torch.tensor(condition)) + 3))
            assert relative.abs().max() < 5 * decay + 1e-6  # the ends are those that Lanczos steps return


def assert_inverse_root(case: Case, prior: str) -> None:
    _, ggn, built = setting(case, prior)
    draws = Draws(3, seed=1)
    solution = sample_contour(ggn, built, draws, num_quadrature=15, tolerance=1e-8)
    assert solution.converged
    H = dense(ggn, built)
    expected = draws.prior(ggn.size).double() @ inverse_root(H)
    assert_close(solution.value, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    product = expected @ (H - torch.diag(built.spread()))
    assert_close(solution.leverage, expected * product, rtol=1e-4, atol=1e-5)
    assert not solution.delta.any()
    assert not solution.exact


@pytest.mark.slow
def test_samples_are_the_inverse_root_of_the_noise(case: Case) -> None:
    assert_inverse_root(case, "g-prior")


@pytest.mark.parametrize("prior", list(PRIORS))
@pytest.mark.parametrize("name", ["regression", "conv_batch_norm"])
def test_samples_are_the_inverse_root_under_every_prior(name: str, prior: str) -> None:
    assert_inverse_root(make_case(name), prior)


def test_covariance_is_the_inverse() -> None:
    """White noise replaced by the columns of the identity gives `H^{-1/2}`, whose square is the covariance."""
    _, ggn, built = setting(make_case("classification"), "layerwise")

    class Columns(Draws):
        def prior(self, size: int) -> Tensor:
            return torch.eye(size)

    root = sample_contour(ggn, built, Columns(ggn.size, 0), num_quadrature=20, tolerance=1e-9).value
    assert_close(root.T @ root, torch.linalg.inv(dense(ggn, built)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_accuracy_grows_with_the_number_of_points(condition: float) -> None:
    ggn, prior = spectrum(condition, 200, 5)
    draws = Draws(4, 0)
    errors = [
        error(ggn, prior, draws, sample_contour(ggn, prior, draws, num_quadrature=q, tolerance=1e-9).value)
        for q in (1, 3, 10, 20)
    ]
    print(f"condition number {condition:.0e}: error {errors} at 1, 3, 10 and 20 points")
    assert errors[0] > 3 * errors[1] > 30 * errors[2]
    assert errors[2] < 1e-5
    assert errors[3] < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_default_accuracy_and_residual(dtype: torch.dtype) -> None:
    """With the defaults half a percent at a condition number of 1e4, and the residual above the whitened error."""
    ggn, prior = spectrum(1e4, 300, 1, dtype)
    draws = Draws(4, 0)
    solution = sample_contour(ggn, prior, draws)
    assert solution.converged
    assert solution.value.dtype == dtype
    assert error(ggn, prior, draws, solution.value) < 0.01
    H, z = dense(ggn, prior).double(), draws.prior(ggn.size).double()
    whitened = (solution.value.double() @ H @ inverse_root(H) - z).norm(dim=1) / z.norm(dim=1)
    assert (whitened < solution.residual).all()
    assert (solution.residual < 0.02).all()


def test_the_range_of_linear_operator_is_too_narrow_for_an_ill_conditioned_matrix() -> None:
    """Why `sqrt_inv_matmul` is not used as it is: at equal points and tolerance its error is far larger."""
    ggn, prior = spectrum(1e4, 300, 4)
    draws = Draws(4, 0)
    z = draws.prior(ggn.size).double()
    settings = linear_operator.settings
    with settings.num_contour_quadrature(10), settings.minres_tolerance(1e-7):
        theirs = PosteriorPrecision(prior.spread(), ggn).sqrt_inv_matmul(z.T).T
    ours = sample_contour(ggn, prior, draws, num_quadrature=10, tolerance=1e-7).value
    assert error(ggn, prior, draws, theirs) > 3e-3
    assert error(ggn, prior, draws, ours) < 1e-5


def test_passes_are_the_products_that_were_made() -> None:
    _, ggn, built = setting(make_case("classification"), "g-prior")

    class Counted(DenseFeatures):
        products = 0

        def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
            self.products += len(v) * len(batch)
            return super().jvp(v, batch)

    features: Features = ggn.features
    assert isinstance(features, DenseFeatures)
    counted = Counted(features.matrix)
    solution = sample_contour(replace(ggn, features=counted), built, Draws(3, 0))
    assert solution.passes == counted.products / counted.num_data


def test_no_global_randomness_and_the_same_samples_again() -> None:
    _, ggn, built = setting(make_case("classification"), "g-prior")
    state = torch.get_rng_state()
    first = sample_contour(ggn, built, Draws(2, 5)).value
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(sample_contour(ggn, built, Draws(2, 5)).value, first)
    assert not torch.equal(sample_contour(ggn, built, Draws(2, 6)).value, first)


def test_settings_of_linear_operator_are_put_back() -> None:
    _, ggn, built = setting(make_case("regression"), "isotropic")
    settings = linear_operator.settings
    before = settings.minres_tolerance.value(), settings.max_cg_iterations.value()
    sample_contour(ggn, built, Draws(1, 0), max_iterations=7, tolerance=0.3)
    assert (settings.minres_tolerance.value(), settings.max_cg_iterations.value()) == before


def test_too_few_iterations_are_told() -> None:
    ggn, prior = spectrum(1e4, 200, 5)
    assert not sample_contour(ggn, prior, Draws(2, 0), max_iterations=3).converged
    assert not sample_contour(ggn, prior, Draws(2, 0), max_iterations=3, residual_tolerance=10.0).converged
    assert not sample_contour(ggn, prior, Draws(2, 0), num_quadrature=1).converged
    with pytest.raises(ValueError, match="num_quadrature"):
        sample_contour(ggn, prior, Draws(2, 0), num_quadrature=0)
