import math

import pytest
import torch
from tangent_problems import build, dense_model
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.evidence.dense_curves import DenseCurves, _eigh
from laplace_sampling.evidence.expansion import Point, expand
from laplace_sampling.evidence.krylov_curves import evidence_path
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.solvers.dense import Dense


def test_a_curvature_without_eigenvalues_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"has no eigenvalues in this precision: .* Use `linear_model=\"homogeneous\"`, or a larger lower bound"
    with pytest.raises(ValueError, match=said):
        _eigh(torch.full((2, 2), math.nan))

    def fails(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(ValueError, match=said):
        _eigh(torch.eye(2))


@pytest.mark.parametrize("hessian_at", ["network", "mode"])
@pytest.mark.parametrize("name", ["classification", "classification_many_data"])
def test_the_curves_are_those_of_a_complete_krylov_run(name: str, hessian_at: str) -> None:
    model = dense_model(name)
    prior = build("g-prior", model, 0.5)
    mode = linear_model_mode(model, prior, Dense()).value
    settings = {"hessian_at": hessian_at, "accuracy": 1e-12, "decades": 3.0}
    run, mode_of_run = evidence_path(model, prior, Draws(model.features.size, 0), mode, **settings)
    curves = DenseCurves(expand(model, prior, Point.of(model, prior, mode), hessian_at))
    alphas = torch.logspace(-3, 3, 7, dtype=torch.float64)
    for curve in ("mode_norm", "data_fit"):
        assert_close(getattr(run, curve)(alphas), getattr(curves.path, curve)(alphas), rtol=1e-5, atol=1e-6)
    for curve in ("effective_dimension", "log_determinant", "log_marginal_likelihood"):
        assert_close(getattr(run, curve)(alphas)[0], getattr(curves.path, curve)(alphas)[0], rtol=1e-5, atol=1e-6)
    for alpha in (0.01, 10.0):
        assert_close(mode_of_run(alpha), curves.mode(alpha), rtol=1e-5, atol=1e-6)
