"""Linear measurements of the outputs, against the dense matrix."""

import pytest
import reference
import torch
from cases import Case, make_case
from problems import CLOSE, make_prior
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.gp.dual import DualCG
from laplace_sampling.gp.linear_operators import to_linear_operator
from laplace_sampling.gp.posterior import GramCovariance, GramPosterior, gram
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, features_at
from laplace_sampling.linear_model.linear_model import linear_model_mode, observe
from laplace_sampling.linear_model.priors.prior import IsotropicPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.dense import Dense


def setting() -> tuple[Case, Tensor, Tensor]:
    """Images of 18 numbers, of which 5 sums are measured."""
    case = make_case("image_regression")
    generator = torch.Generator().manual_seed(0)
    T = torch.randn(5, 18, generator=generator, dtype=torch.float64)
    return case, T, torch.randn(4, 5, generator=generator, dtype=torch.float64)


def forms(T: Tensor) -> dict:
    return {
        "matrix": T,
        "sparse": T.to_sparse(),
        "operator": to_linear_operator(T),
        "functions": (lambda f: T @ f, lambda u: T.T @ u),
    }


@pytest.mark.parametrize("form", ["matrix", "sparse", "operator", "functions"])
def test_measurements_of_each_datum(form: str) -> None:
    case, T, y = setting()
    model = case.linear_model("affine")
    observed = observe(model, forms(T)[form], y)
    J = torch.einsum("mc,ncp->nmp", T, reference.jacobian(case.model, case.x))
    features, everything = observed.features, torch.arange(4)
    assert_close(features.rows(everything[1:3]), J[1:3])
    assert_close(observed.offset, model.offset @ T.T)
    assert_close(observed.network_outputs, model.network_outputs @ T.T)
    variance = torch.ones(features.size, dtype=torch.float64)
    # In blocks of two rows of a datum, of rows that are computed again or held, too.
    for held in (features, DenseFeatures.of(features)):
        for rows in (1000, 2):
            found = gram(held, variance, block_bytes=2 * rows * 8 * features.size)
            assert_close(found, J.flatten(0, 1) @ J.flatten(0, 1).T)


def test_the_dual_methods_and_weight_space_agree() -> None:
    """Posterior of the image: mean and covariance of the outputs, from measurements of them."""
    case, T, y = setting()
    model = case.linear_model("affine").with_likelihood(Gaussian(3.0, learn=False))
    observed = observe(model, T, y)
    prior = make_prior(observed, case, "isotropic", 0.5)
    J = reference.jacobian(case.model, case.x)
    rows = torch.einsum("mc,ncp->nmp", T, J).flatten(0, 1)
    H = 3.0 * rows.T @ rows + 0.5 * torch.eye(rows.shape[1], dtype=torch.float64)
    residual = y.flatten() - observed.offset.flatten()
    theta = torch.linalg.solve(H, 3.0 * rows.T @ residual)
    exact = GramPosterior.of(observed, prior)
    assert_close(exact.mode_weights(), theta, **CLOSE)
    assert_close(linear_model_mode(observed, prior, DualCG(1e-9)).value[0], theta, **CLOSE)
    assert_close(linear_model_mode(observed, prior, Dense()).value[0], theta, **CLOSE)
    covariance = GramCovariance(exact, features_at(Linearisation(case.model), case.x[:1]))
    image = J[0]
    assert_close(covariance.joint(), image @ torch.linalg.solve(H, image.T), **CLOSE)
    ggn = observed.ggn(observed.network_outputs)
    expected = sample_posterior(ggn, prior, Draws(2, 0), Dense()).value
    assert_close(DualCG(1e-10).sample(ggn, prior, Draws(2, 0)).value, expected, rtol=1e-5, atol=1e-6)
    assert_close(exact.sample(Draws(2, 0)), expected, rtol=1e-6, atol=1e-7)


def test_few_products_with_the_preconditioner() -> None:
    """Blurred sums of an image: a matrix whose singular values fall."""
    case, _, _ = setting()
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(15, 18, generator=generator, dtype=torch.float64)
    left, _, right = torch.linalg.svd(base, full_matrices=False)
    T = left * torch.logspace(1.5, -1.5, 15, dtype=torch.float64) @ right
    observed = observe(case.linear_model().with_likelihood(Gaussian(100.0)), T, torch.zeros(4, 15).double())
    ggn = observed.ggn(observed.network_outputs)
    prior = IsotropicPrior(1.0).build(ggn, ([], torch.zeros(0)), Draws(1, 0).noise(15))
    plain, helped = (DualCG(1e-3, rank=rank).sample(ggn, prior, Draws(16, 0)).passes / 16 for rank in (0, 30))
    print(f"passes to 1e-3: {plain} without, {helped} with a preconditioner")
    assert helped <= 14 < plain


def test_refusals() -> None:
    case, T, y = setting()
    model = case.linear_model()
    with pytest.raises(ValueError, match="columns"):
        observe(model, T[:, 1:], y)
    with pytest.raises(ValueError, match="measurements"):
        observe(model, T, y.T)
