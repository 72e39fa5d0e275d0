import pytest
import torch
from quadratics import classification
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.newton import halve_until_accepted, newton
from laplace_sampling.solvers.operator import Operator, make_dense

SOLVERS = {"block": BlockKrylov, "krylov": CG}


@pytest.fixture(params=list(SOLVERS))
def kind(request: pytest.FixtureRequest) -> type[BlockKrylov] | type[CG]:
    return SOLVERS[request.param]


@pytest.mark.parametrize(
    ("name", "start"), [("classification", 0.0), ("classification_many_data", 3.0), ("regression", 0.0)]
)
def test_newton_finds_the_mode(kind, name: str, start: float) -> None:
    objective, zero = classification(name)
    init = zero + start
    dense = Dense().minimise(objective, init)
    counted = objective.model.features.features.network.products
    counted.update(jvp=0, vjp=0)
    minimum = kind(tolerance=1e-8).minimise(objective, init)
    assert minimum.converged
    assert_close(minimum.value, dense.value, rtol=1e-6, atol=1e-7)
    assert minimum.residual < 1e-6
    assert minimum.passes == pytest.approx((counted["jvp"] + counted["vjp"]) / (2 * objective.num_data))
    # A loose one is as good as it says, and cheaper.
    rough = kind(tolerance=0.01).minimise(objective, init)
    assert rough.converged
    error = ((rough.value - dense.value).square() * objective.precision).sum().sqrt()
    assert float(error) < 0.03 * float((dense.value.square() * objective.precision).sum().sqrt())
    assert rough.passes < minimum.passes
    assert kind(tolerance=0.01).minimise(objective, dense.value.clone()).passes <= rough.passes


def test_newton_halves_steps_that_go_up() -> None:
    objective, zero = classification()
    dense = Dense().minimise(objective, zero).value

    def too_far(operator: Operator, precision: Tensor, gradient: Tensor, _: float) -> tuple[Tensor, float]:
        H = make_dense(operator) + torch.diag(precision)
        return 3 * torch.linalg.solve(H, gradient.T).T, 0.0

    minimum = newton(objective, zero, too_far, tolerance=1e-6, max_steps=100)
    assert objective.value(minimum.value) <= objective.value(zero)
    assert_close(minimum.value, dense, rtol=1e-3, atol=1e-3)


def test_the_first_accepted_length_is_taken() -> None:
    tried = []

    def attempt(length: float) -> str | None:
        tried.append(length)
        return f"at {length}" if length <= 0.25 else None

    assert halve_until_accepted(attempt) == "at 0.25"
    assert tried == [1.0, 0.5, 0.25]


@pytest.mark.parametrize(("shortest", "number"), [(0.3, 2), (0.25, 2), (1e-8, 27)])
def test_steps_that_are_all_refused_give_nothing(shortest: float, number: int) -> None:
    tried = []
    assert halve_until_accepted(tried.append, shortest) is None
    assert len(tried) == number
