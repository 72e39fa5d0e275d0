from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, Case
from grids import covering
from problems import setting
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel, linear_model_mode
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.sgd import SGD

# One of each likelihood; Fisher scoring of the heteroscedastic one converges linearly, and tests/front/test_outputs.py
# has its mode.
LIKELIHOODS = ["regression_many_data", "classification", "multi_label", "poisson", "multi_task", "from_loss"]
NAMES = [name for name in CASES if name != "heteroscedastic"]


def problem(case: Case, kind: str) -> tuple[LinearModel, GaussianPrior, Tensor]:
    """The linear model, a prior, and the mode by dense algebra."""
    model = case.linear_model(kind)
    model = replace(model, features=DenseFeatures.of(model.features))
    _, _, built = setting(case, "g-prior")
    J = reference.jacobian(case.model, case.x)
    f = model.network_outputs
    weights = torch.cat([p.detach().reshape(-1) for p in case.model.parameters() if p.requires_grad])
    offset = f - J @ weights if kind == "affine" else torch.zeros_like(f)
    return model, built, reference.mode(case.likelihood, J, offset, case.y, built.diagonal())


@covering(indirect=["case"], case=NAMES, kind=["affine", "homogeneous"])
def test_newton_finds_the_dense_mode(case: Case, kind: str) -> None:
    model, built, expected = problem(case, kind)
    newton = linear_model_mode(model, built, Dense())
    assert newton.converged
    assert_close((newton.value * built.scale)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in LIKELIHOODS else pytest.mark.slow) for name in NAMES], indirect=True
)
def test_sgd_finds_the_dense_mode(case: Case) -> None:
    model, built, expected = problem(case, "affine")
    sgd = linear_model_mode(model, built, SGD(min_steps=2500, batch_size=100))
    assert_close((sgd.value * built.scale)[0], expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
