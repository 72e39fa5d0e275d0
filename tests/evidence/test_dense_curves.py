import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from tangent_problems import build, dense_model
from torch.testing import assert_close

from laplace_sampling.evidence.dense_curves import DenseCurves
from laplace_sampling.evidence.expansion import Point, expand
from laplace_sampling.evidence.krylov_curves import evidence_path
from laplace_sampling.linear_model.dense_curvature import HeldCurvatures
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.solvers.dense import Dense


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("name", ["classification", "classification_many_data"])
def test_a_curvature_without_eigenvalues_is_an_error(name: str, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "eigenvalues"
    model = dense_model(name)
    prior = build("isotropic", model, 0.5)
    if held:
        model = replace(model, features=model.features.holding_curvature(HeldCurvatures()))
    start = Point.of(model, prior, torch.zeros(1, model.features.size, dtype=torch.float64))
    expansion = expand(model, prior, start)
    not_finite = replace(model, features=DenseFeatures(model.features.rows(torch.arange(6)) * math.nan))
    with pytest.raises(ValueError, match=said):
        DenseCurves(replace(expansion, operator=not_finite.ggn(model.network_outputs[:6])))

    def fails(*_: object, **__: object) -> None:
        raise np.linalg.LinAlgError

    monkeypatch.setattr(scipy.linalg, "eigh", fails)
    with pytest.raises(ValueError, match=said):
        DenseCurves(expansion)


@pytest.mark.parametrize("name", ["classification", "classification_many_data"])
def test_the_curves_are_those_of_a_complete_krylov_run(name: str) -> None:
    model = dense_model(name)
    prior = build("g-prior", model, 0.5)
    mode = linear_model_mode(model, prior, Dense()).value
    settings = {"accuracy": 1e-12, "decades": 3.0}
    run, mode_of_run = evidence_path(model, prior, Draws(model.features.size, 0), mode, **settings)
    curves = DenseCurves(expand(model, prior, Point.of(model, prior, mode)))
    alphas = torch.logspace(-3, 3, 7, dtype=torch.float64)
    for curve in ("mode_norm", "data_fit"):
        assert_close(getattr(run, curve)(alphas), getattr(curves.path, curve)(alphas), rtol=1e-5, atol=1e-6)
    for curve in ("effective_dimension", "log_determinant", "log_marginal_likelihood"):
        assert_close(getattr(run, curve)(alphas)[0], getattr(curves.path, curve)(alphas)[0], rtol=1e-5, atol=1e-6)
    for alpha in (0.01, 10.0):
        assert_close(mode_of_run(alpha), curves.mode(alpha), rtol=1e-5, atol=1e-6)
