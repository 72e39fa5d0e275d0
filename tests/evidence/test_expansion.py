import math

import pytest
import torch
from tangent_problems import build, dense_model
from torch.testing import assert_close

from laplace_sampling.evidence.expansion import Point
from laplace_sampling.linear_model.features import ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.operator import make_dense


def test_distance_of_points_is_that_of_the_hessian() -> None:
    model = dense_model("classification")
    prior = build("isotropic", model, 1.0)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(1, model.features.size, generator=generator, dtype=torch.float64) for _ in range(2))
    points = [Point.of(model, prior, theta) for theta in (first, second)]
    M = make_dense(GGN(ScaledFeatures(model.features, prior.scale), model.likelihood, points[1].outputs))
    step, alpha = (second - first)[0], 0.3
    expected = ((step @ M @ step + alpha * step @ step) / (alpha * second[0] @ second[0])).sqrt()
    assert points[0].distance(model, points[1], alpha) == pytest.approx(float(expected))


def test_a_step_that_raises_the_objective_is_halved() -> None:
    model = dense_model("classification")
    prior = build("isotropic", model, 0.5)
    start = Point.of(model, prior, torch.zeros(1, model.features.size, dtype=torch.float64))
    mode = linear_model_mode(model, prior, Dense()).value
    assert start.toward(model, (near := Point.of(model, prior, mode)), 0.5) is near
    far = Point.of(model, prior, 3000 * mode)
    assert far.objective(0.5) > start.objective(0.5)
    found = start.toward(model, far, 0.5)
    assert found.objective(0.5) <= start.objective(0.5)
    halvings = math.log2(float(far.theta.norm() / found.theta.norm()))
    assert halvings == pytest.approx(round(halvings), abs=1e-9)
    assert halvings > 0
    again = Point.of(model, prior, found.theta)
    assert_close(found.outputs, again.outputs)
    assert found.loss == pytest.approx(again.loss)
    assert Point.of(model, prior, 2 * found.theta).objective(0.5) > start.objective(0.5)  # the first that does
