from dataclasses import replace

import pytest
import reference
import torch
from cases import CASES, Case
from grids import covering
from problems import setting
from torch.testing import assert_close

from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.sgd import SGD


@covering(indirect=["case"], case=CASES, kind=["affine", "homogeneous"])
def test_mode_equals_the_dense_one(case: Case, kind: str) -> None:
    if case.likelihood.name == "heteroscedastic":
        pytest.skip("Fisher scoring converges linearly; tests/front/test_outputs.py has its mode")
    model = case.linear_model(kind)
    model = replace(model, features=DenseFeatures.of(model.features))
    _, _, built = setting(case, "g-prior")
    J = reference.jacobian(case.model, case.x)
    f = model.network_outputs
    weights = torch.cat([p.detach().reshape(-1) for p in case.model.parameters() if p.requires_grad])
    offset = f - J @ weights if kind == "affine" else torch.zeros_like(f)
    expected = reference.mode(case.likelihood, J, offset, case.y, built.diagonal())
    newton = linear_model_mode(model, built, Dense())
    assert newton.converged
    assert_close((newton.value * built.scale)[0], expected, rtol=1e-5, atol=1e-6)
    sgd = linear_model_mode(model, built, SGD(min_steps=2500, batch_size=100))
    assert_close((sgd.value * built.scale)[0], expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
