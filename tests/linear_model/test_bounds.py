import math

import pytest
import torch

from laplace_sampling import Gaussian
from laplace_sampling.hyperparameters.hyperparameters import (
    AtBounds,
    bound_reached,
    check_bounds,
    clamped,
    is_at_bound,
    mackay_root,
)
from laplace_sampling.linear_model.priors.prior import GaussianPrior


def test_values_outside_are_brought_to_the_bound() -> None:
    assert [clamped(v, (1.0, 2.0)) for v in (0.5, 1.5, 3.0)] == [1.0, 1.5, 2.0]


def test_values_within_one_percent_of_a_bound_are_at_it() -> None:
    bounds = (1e-8, 1e12)
    ends = [
        bound_reached(v, bounds) for v in (0.0, 1e-8, 1.009e-8, 1.02e-8, 1.0, 0.98e12, 999999999999.999, 1e12, 1e13)
    ]
    assert ends == ["lower"] * 3 + [None] * 3 + ["upper"] * 3
    assert [is_at_bound(v, (1.0, 2.0)) for v in (1.005, 1.5, 1.99)] == [True, False, True]


def test_precisions_at_their_bounds_are_named_with_what_to_do() -> None:
    groups, scale = torch.tensor([0, 1, 2]), torch.ones(3)
    prior = GaussianPrior(torch.tensor([999999999999.999, 2.0, 1e-8]), groups, scale, ("a", "b", "c"))
    bounds = ((1e-8, 1e12), (1e-3, 1e3))
    found = AtBounds.of(prior, Gaussian(torch.tensor([1.0, 995.0])), *bounds)
    assert found.names == ("a", "c", "noise")
    upper, lower, noise = found.problems
    assert "for the groups ['a'], the upper one: the data show no effect of these weights" in upper
    assert "for the groups ['c'], the lower one: the prior fades out" in lower
    assert "noise_bounds=(0.001, 1000.0) for the noise precision, the upper one: the linear model fits" in noise
    assert "bounds" in upper
    assert "`Gaussian(b, learn=False)`" in noise
    # What is given is nobody's to judge.
    assert AtBounds.of(prior, Gaussian(1e3, learn=False), *bounds).names == ("a", "c")
    inside = prior.with_precision(torch.tensor([1.0, 2.0, 3.0]))
    assert AtBounds.of(inside, Gaussian(1.0), *bounds) == AtBounds((), [])


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (-1.0, 1.0)])
def test_bounds_out_of_order_are_refused(bounds: tuple[float, float]) -> None:
    check_bounds((1.0, 2.0), (1.0, 2.0))
    with pytest.raises(ValueError, match="precision_bounds"):
        check_bounds(bounds, (1.0, 2.0))
    with pytest.raises(ValueError, match="noise_bounds"):
        check_bounds((1.0, 2.0), bounds)


@pytest.mark.parametrize("bounds", [3.0, (1.0, 2.0, 3.0), ("a", "b"), None])
def test_bounds_are_two_numbers(bounds) -> None:
    with pytest.raises(TypeError, match="precision_bounds"):
        check_bounds(bounds, (1.0, 2.0))


@pytest.mark.parametrize("start", [-8.0, 0.5, 9.0])
@pytest.mark.parametrize("root", [-7.5, 0.3, 8.9])
def test_the_root_of_mackay_is_between_the_bounds(start: float, root: float) -> None:
    # Nearly flat on one side, where regula falsi without a remedy takes thousands of steps.
    tried = []

    def dimension(alpha: float) -> float:
        tried.append(math.log(alpha))
        return math.exp(1 - math.exp(2 * (math.log(alpha) - root)))

    bounds = math.exp(-8.0), math.exp(9.0)
    found, inside = mackay_root(dimension, lambda alpha: 1.0, math.exp(start), bounds, 1e-6)
    assert inside
    assert math.log(found) == pytest.approx(root, abs=1e-6)
    assert len(tried) <= 40
    assert all(-8.0 - 1e-9 <= u <= 9.0 + 1e-9 for u in tried)


@pytest.mark.parametrize(("dimension", "bound"), [(2.0, 7.0), (0.5, 0.1)])
def test_without_a_root_updates_lead_to_a_bound(dimension: float, bound: float) -> None:
    assert mackay_root(lambda alpha: dimension, lambda alpha: 1.0, 0.5, (0.1, 7.0), 1e-6) == (bound, False)
