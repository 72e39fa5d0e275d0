import math

import pytest
import torch
from tangent_problems import build, dense_model, log_evidence, rows_of
from torch import nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.evidence.curves import FixedPoint
from laplace_sampling.evidence.em import fit_em
from laplace_sampling.evidence.fixed_point import _Rounds, fit_path
from laplace_sampling.evidence.schedule import Schedule
from laplace_sampling.evidence.secant import Secant
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.solvers.dense import Dense


@pytest.mark.parametrize("recipe", ["isotropic", "g-prior"])
def test_the_fixed_point_of_regression_is_that_of_em(recipe: str) -> None:
    model = dense_model("regression_many_data").with_likelihood(Gaussian(0.5, noise_at="mode"))
    prior = build(recipe, model, 2.0)
    em = fit_em(model, prior, Draws(2, 0), Dense(), max_steps=5000, tolerance=1e-10)
    result = fit_path(model, prior, 0, 3, tolerance=1e-3)
    assert em.converged
    assert result.converged
    assert float(result.prior.precision) == pytest.approx(float(em.prior.precision), rel=1e-3)
    noise = float(result.likelihood.noise_precision)
    assert noise == pytest.approx(float(em.likelihood.noise_precision), rel=1e-3)
    assert_close(result.mode, em.mode, rtol=1e-3, atol=1e-6)
    # b·SSE + α‖θ̄‖² = N·C
    J, y = rows_of(model, result.prior).flatten(0, 1), (model.targets - model.offset).reshape(-1)
    alpha = float(result.prior.precision)
    theta = result.mode / result.prior.scale
    total = noise * float(((y - J @ theta) ** 2).sum()) + alpha * float(theta @ theta)
    assert total == pytest.approx(len(y), rel=1e-6)
    best = log_evidence(J, y, alpha, noise)
    for factor in (0.8, 1.25):
        assert log_evidence(J, y, alpha * factor, noise) < best
        assert log_evidence(J, y, alpha, noise * factor) < best


@pytest.mark.parametrize("name", ["classification", "classification_many_data"])
def test_the_fixed_point_of_classification_is_that_of_em(name: str) -> None:
    model = dense_model(name)
    prior = build("isotropic", model, 1.0)
    em = fit_em(model, prior, Draws(2, 0), Dense(), max_steps=5000, tolerance=1e-8)
    steps = []
    result = fit_path(model, prior, 0, 3, tolerance=0.01, callback=steps.append)
    assert em.converged
    assert result.converged
    assert steps == result.history
    ends = math.log(float(result.prior.precision)), math.log(float(em.prior.precision))
    print(name, ends, len(steps))
    assert ends[0] == pytest.approx(ends[1], abs=0.03)


@pytest.mark.parametrize(
    ("found", "error", "quadratic", "level", "beyond", "expected"),
    [
        (1e-8, math.inf, False, 0, [], 0.5),  # nothing was seen: as far as the next round goes
        (1e12, math.inf, True, 0, [], 8.0),
        (1e12, math.inf, True, 1, [], 1e12),  # a bound that more probes have not changed
        (1e-8, math.inf, False, 1, [-1.0], 2 / 16),  # and twice as far, in log α, the second time
        (1e-8, math.inf, False, 1, [1.0], 0.5),  # but not the other way
        (3.0, 0.1, False, 1, [], 3.0),
        (100.0, 0.1, False, 1, [], 100.0),  # curves around zero weights are believed
    ],
)
def test_curves_are_accurate_where_the_next_round_goes(
    found: float, error: float, quadratic: bool, level: int, beyond: list[float], expected: float
) -> None:
    rounds = object.__new__(_Rounds)
    rounds.quadratic, rounds.history, rounds.secant = quadratic, [], Secant(True)
    rounds.schedule, rounds.secant.beyond = Schedule([0.1, 0.01], 8, None, level), beyond
    rounds._fixed_point = lambda path: FixedPoint(found, 1.0, error, 1.0)
    assert rounds._sought(2.0, None).precision == pytest.approx(expected)
    rounds.history = [None]  # later rounds
    if not quadratic:
        assert rounds._sought(2.0, None).precision == pytest.approx(min(expected, 8.0))


@pytest.mark.parametrize("method", ["exact", "krylov", "auto"])
@pytest.mark.parametrize(("weak", "coefficient", "noise_precision"), [(1e-5, 0.03, 1e6), (1e-4, 0.03, 1e5)])
def test_of_two_maxima_the_likelier_is_taken(
    method: str, weak: float, coefficient: float, noise_precision: float
) -> None:
    """Strong features ask for `α = 1`, weak ones, which a noise that is far too small does not excuse, for `1e-7`."""
    g = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(40, 8, generator=g, dtype=torch.float64))[0]
    strengths, coefficients = (torch.ones(8, dtype=torch.float64) for _ in range(2))
    strengths[4:], coefficients[4:] = weak, coefficient
    y = U @ coefficients + 1e-3 * torch.randn(40, generator=g, dtype=torch.float64)
    alphas = torch.logspace(-8, 3, 2001, dtype=torch.float64)
    v = torch.cat([strengths.square(), torch.zeros(32, dtype=torch.float64)]) / alphas[:, None] + 1 / noise_precision
    squares = torch.linalg.qr(U, mode="complete")[0].T @ y
    evidence = -0.5 * (v.log() + squares.square() / v).sum(1)
    inside = evidence[1:-1]
    maxima = ((inside > evidence[:-2]) & (inside > evidence[2:])).nonzero()[:, 0] + 1
    assert len(maxima) == 2
    best = float(alphas[evidence.argmax()])
    model = nn.Linear(8, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    la = LinearisedLaplace(model, Gaussian(noise_precision, learn=False), method=method)
    la.fit_hyperparameters([(U * strengths, y[:, None])], criterion="evidence", progress=False)
    assert float(la.prior_precision_) == pytest.approx(best, rel=0.03)
