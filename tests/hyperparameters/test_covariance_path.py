"""The covariance of the function for every prior precision, against dense algebra."""

import pytest
import reference
import torch
from cases import make_case
from grids import covering
from problems import make_prior
from torch.testing import assert_close

from laplace_sampling.gp.posterior import GramPath, GramPosterior
from laplace_sampling.hyperparameters.covariance_path import CovariancePath, FactoredPath, function_draws
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import ScaledFeatures, SomeFeatures

ALPHAS = torch.tensor([1e-3, 0.7, 40.0], dtype=torch.float64)


def problem(name: str, prior: str):
    case = make_case(name)
    model = case.linear_model("affine")
    built = make_prior(model, case, prior)
    J = torch.cat([model.features.rows(batch) for batch in model.features.chunks()])
    B = reference.curvature(model.likelihood, model.network_outputs, model.targets)
    return model, built, J, reference.ggn(J, B)


def path_of(kind: str, model, prior) -> CovariancePath:
    if kind == "weights":
        ggn = model.ggn(model.network_outputs)
        scaled = type(ggn)(ScaledFeatures(ggn.features, prior.scale), ggn.likelihood, ggn.outputs, ggn.targets)
        return FactoredPath(scaled.dense_curvature(), prior)
    return GramPath(GramPosterior.of(model, prior))


@covering(
    strength=2,
    name=["regression", "classification", "binary", "poisson"],
    prior=["isotropic", "g-prior"],
    kind=["weights", "observations"],
)
def test_covariances_and_effective_dimension_are_those_of_dense_algebra(name: str, prior: str, kind: str) -> None:
    model, built, J, M = problem(name, prior)
    path, some = path_of(kind, model, built), torch.tensor([0, 3, 4])
    found = path.covariances(SomeFeatures(model.features, some), ALPHAS)
    for alpha, blocks in zip(ALPHAS.tolist(), found, strict=True):
        A = alpha / built.scale.double() ** 2
        expected = J[some] @ torch.linalg.inv(M + torch.diag(A)) @ J[some].mT
        assert_close(blocks, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max()))
        assert path.effective_dimension(alpha) == pytest.approx(reference.effective_dimension(M, A), rel=1e-6)
    unit = path.prior_variance(model.features, Draws(400, 0, 5))
    expected = float((J * built.scale.double()).square().sum(-1).mean())
    # A mean of squares of normal numbers that are all one number has the relative standard error √(2/400).
    assert unit == pytest.approx(expected, rel=4 * (2 / 400) ** 0.5)
    largest = float(torch.linalg.eigvalsh(M * built.scale[:, None] * built.scale)[-1])
    assert path.largest_eigenvalue == pytest.approx(largest, rel=1e-6)


def test_draws_of_the_function_have_its_covariance_and_come_from_weights_if_outputs_are_many(monkeypatch) -> None:
    model, built, _, _ = problem("classification", "g-prior")
    path, few = path_of("weights", model, built), SomeFeatures(model.features, torch.arange(3))
    covariances, num = path.covariances(few, ALPHAS), 20_000
    for most in (32, 1):
        monkeypatch.setattr("laplace_sampling.hyperparameters.covariance_path._MOST_OUTPUTS", most)
        monkeypatch.setattr("laplace_sampling.hyperparameters.covariance_path._SAMPLES", num)
        drawn = function_draws(path, few, ALPHAS, Draws(num, 0, 5))
        for index, covariance in enumerate(covariances):
            z = drawn(index)
            found = torch.einsum("knc,knd->ncd", z, z) / num
            # An entry has the standard error √((V_cc V_dd + V_cd²)/K), at most √(2/K) of the largest entry.
            assert_close(found, covariance, rtol=0, atol=5 * (2 / num) ** 0.5 * float(covariance.abs().max()))
