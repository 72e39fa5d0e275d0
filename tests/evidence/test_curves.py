import math
from dataclasses import replace

import pytest
import torch
from tangent_problems import random_spectrum
from torch.testing import assert_close

from laplace_sampling.evidence.curves import EvidencePath, bai_golub_bound
from laplace_sampling.solvers.quadrature import Quadrature

ALPHAS = torch.logspace(-3, 3, 7, dtype=torch.float64)


@pytest.mark.parametrize("alpha", [1e-3, 1.0, 1e3])
def test_bai_golub_bound_is_above_the_log_determinant(alpha: float) -> None:
    _ggn, spectrum = random_spectrum(60)
    a = torch.tensor([alpha], dtype=torch.float64)
    truth = (spectrum + alpha).log().sum()
    bound = bai_golub_bound(spectrum.sum(), spectrum.square().sum(), spectrum.max(), 60, 60, a)
    assert float(bound) >= float(truth) - 1e-9
    # Exact where all eigenvalues of the range are one of two that the formula finds.
    low = torch.tensor([3.0] * 5 + [10.0] * 2, dtype=torch.float64)
    known = bai_golub_bound(low.sum(), low.square().sum(), low.max(), 7, 9, a)
    assert float(known) == pytest.approx(float((low + alpha).log().sum()) + 2 * math.log(alpha))


def test_quadratures_of_all_eigenvalues_have_no_error() -> None:
    _, spectrum = random_spectrum(20)
    ones = torch.ones(1, 20, dtype=torch.float64)
    unit, fit = Quadrature(spectrum, ones, ones), Quadrature(spectrum, 2 * ones, ones)
    path = EvidencePath(unit, fit, 5.0, 20, 20, None, 1.0, exact=True, passes=0.0)
    gamma, se = path.effective_dimension(ALPHAS)
    assert_close(gamma, torch.stack([(spectrum / (spectrum + a)).sum() for a in ALPHAS]))
    assert float(se.max()) == 0
    assert float(path.log_marginal_likelihood(ALPHAS)[1].max()) == 0
    assert path.remaining(1.0) == (0, 0)


def test_a_followed_fixed_point_is_the_one_that_the_update_leads_to() -> None:
    one = torch.ones(1, 2, dtype=torch.float64)
    # γ = Σ n λ/(λ + α) with two clusters; ‖θ̄‖² = Σ w (λ + α)⁻²: three fixed points, the middle one unstable.
    nodes = torch.tensor([1e-3, 1e3], dtype=torch.float64)
    traces, fit = Quadrature(nodes, 50 * one, one), Quadrature(nodes, torch.tensor([[1.0, 1e6]]).double(), one)
    path = EvidencePath(traces, fit, 1e6, 100, 100, None, 1.0, exact=True, passes=0.0)
    grid = torch.logspace(-6, 6, 4000, dtype=torch.float64)
    sign = path.mackay(grid)[0].sign()
    up = grid[:-1][(sign[:-1] < 0) & (sign[1:] > 0)].tolist()
    down = grid[:-1][(sign[:-1] > 0) & (sign[1:] < 0)].tolist()
    assert len(up) == 2
    assert len(down) == 1
    for factor, end in ((0.5, up[0]), (2.0, up[1])):
        start = replace(path, at=down[0] * factor)
        found = start.fixed_point((1e-6, 1e6), follow=True).precision
        assert found == pytest.approx(end, rel=0.02)


def test_a_bound_with_more_evidence_is_taken_before_a_fixed_point() -> None:
    # A weak direction in which the mode is large, and many strong ones in which it is zero: a stable fixed point at a
    # small `α`, and more evidence where `α` has no end.
    one = torch.ones(1, 2, dtype=torch.float64)
    nodes = torch.tensor([1e-3, 1e3], dtype=torch.float64)
    traces, fit = (
        Quadrature(nodes, torch.tensor([weights], dtype=torch.float64), one) for weights in ([1.0, 40.0], [0.3, 0.0])
    )
    path = EvidencePath(traces, fit, 1e3, 100, 100, None, 1.0, exact=True, passes=0.0)
    grid = torch.logspace(-6, 6, 4000, dtype=torch.float64)
    evidence, sign = path.log_marginal_likelihood(grid)[0], path.mackay(grid)[0].sign()
    stable = grid[:-1][(sign[:-1] < 0) & (sign[1:] > 0)]
    assert len(stable) >= 1
    assert float(evidence[-1]) > float(path.log_marginal_likelihood(stable)[0].max())
    found = path.fixed_point((1e-6, 1e6))
    assert found.precision == pytest.approx(1e6)
    assert math.isinf(found.error)


def test_the_lower_bound_is_taken_where_the_evidence_rises_to_it_and_the_curves_are_exact() -> None:
    # The mode is large in a direction that the data hardly see, so that a smaller `α` is always better; and there is a
    # stable fixed point at 1e3.
    one, nodes = torch.ones(1, 2, dtype=torch.float64), torch.tensor([1e-9, 1e3], dtype=torch.float64)
    traces, fit = (
        Quadrature(nodes, torch.tensor([weights], dtype=torch.float64), one) for weights in ([1.0, 40.0], [1e-2, 8e4])
    )
    exact = EvidencePath(traces, fit, 1e3, 100, 100, None, 1.0, exact=True, passes=0.0)
    low, inside = (exact.log_marginal_likelihood(torch.tensor([alpha]).double())[0] for alpha in (1e-6, 1e3))
    assert float(low) > float(inside)
    assert exact.fixed_point((1e-6, 1e6)).precision == pytest.approx(1e-6)
    # Curves of few products say nothing of such an `α`.
    assert replace(exact, exact=False).fixed_point((1e-6, 1e6)).precision == pytest.approx(1e3, rel=0.02)
