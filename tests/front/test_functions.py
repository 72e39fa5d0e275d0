"""`propagate` and `functions`: the posterior as functions of the input, compared with dense algebra in float64."""

import copy
import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import reference
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace, RegressionPrediction

ALPHA, NOISE = 0.7, 4.0


def mlp(outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, outputs))


def data(num: int, outputs: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(num, 2)
    return x, x[:, :1].sin() + 0.1 * torch.randn(num, outputs)


def fitted(model: nn.Module, x: Any, y: Any, likelihood: Any = None, **settings: Any) -> LinearisedLaplace:
    likelihood = likelihood or Gaussian(NOISE, learn=False)
    la = LinearisedLaplace(model, likelihood, prior=IsotropicPrior(precision=ALPHA), **settings)
    return la.fit([(x, y)], progress=False)


# Programs of a function `f` at points ---------------------------------------------------------------------------------


def forces(f: Callable, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return -torch.autograd.grad(f(x).sum(), x, create_graph=True)[0]


def forces_by_func(f: Callable, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: -f(row[None]).sum()))(x)


def laplacian(f: Callable, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.hessian(lambda row: f(row[None]).sum()))(x).diagonal(dim1=1, dim2=2).sum(1)


def total(f: Callable, x: Tensor) -> Tensor:
    return f(x).sum()


def energies_and_forces(f: Callable, x: Tensor) -> Tensor:
    return torch.cat([f(x).flatten(), forces(f, x).flatten()])


PROGRAMS = [forces, forces_by_func, laplacian, total, energies_and_forces]


def rows(program: Callable, model: nn.Module, x: Tensor) -> Tensor:
    """`∂T/∂w`, `[R, P]`, in float64, one number after the other."""
    model = copy.deepcopy(model).double()
    value, weights = program(model, x.double()).flatten(), [p for p in model.parameters() if p.requires_grad]
    pulled = [torch.autograd.grad(t, weights, retain_graph=True, materialize_grads=True) for t in value]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in pulled]).detach()


def precision(model: nn.Module, x: Tensor) -> Tensor:
    """`H` of a regression."""
    J = reference.jacobian(copy.deepcopy(model).double(), x.double()).flatten(0, 1)
    return NOISE * J.T @ J + ALPHA * torch.eye(J.shape[1], dtype=torch.float64)


def covariance(program: Callable, model: nn.Module, x: Tensor, H: Tensor) -> Tensor:
    R = rows(program, model, x)
    return R @ torch.linalg.solve(H, R.T)


@pytest.mark.parametrize("num", [8, 60], ids=["observation space", "weight space"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_error_bars_are_those_of_dense_algebra(program: Callable, num: int) -> None:
    model, (x, y), points = mlp(), data(num), torch.randn(4, 2)
    pred = fitted(model, x, y, method="exact").propagate(lambda f: program(f, points))
    expected = covariance(program, model, points, precision(model, x))
    assert_close(pred.stddev.double().flatten(), expected.diagonal().sqrt(), rtol=1e-5, atol=0)
    assert_close(pred.joint_covariance().double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert_close(pred.mean, program(model, points).detach().reshape(pred.mean.shape), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
@pytest.mark.parametrize("num", [8, 60], ids=["observation space", "weight space"])
def test_where_the_data_decide_nearly_all(num: int) -> None:
    """Covariances are differences of much larger numbers: rows in float32 would be off by percents."""
    model, (x, y) = mlp(), data(num)
    precise = 1e10
    la = fitted(model, x, y, Gaussian(precise, learn=False), method="exact")
    H = precision(model, x) - ALPHA * torch.eye(la.network.num_parameters, dtype=torch.float64)
    H = H * (precise / NOISE) + ALPHA * torch.eye(len(H), dtype=torch.float64)
    expected = covariance(lambda f, x: f(x), model, x[:3], H).diagonal().sqrt()
    assert_close(la.propagate(lambda f: f(x[:3])).stddev.flatten().double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("num_samples", [3, 80])
def test_samples_are_those_of_the_rows_by_either_way(program: Callable, num_samples: int) -> None:
    """With few samples there are more numbers than samples: then two pullbacks a sample take the place of rows."""
    model, (x, y), points = mlp(), data(20), torch.randn(4, 2)
    la = fitted(model, x, y, method="krylov", num_samples=num_samples)
    pred = la.propagate(lambda f: program(f, points))
    expected = rows(program, model, points) @ la.samples_.double().T
    assert_close(pred.deviations.flatten(1).double(), expected.T, rtol=1e-3, atol=1e-4)
    assert_close(pred.samples, pred.mean + pred.deviations)
    assert_close(pred.stddev.flatten().double(), expected.square().mean(1).sqrt(), rtol=1e-3, atol=1e-4)
    assert la.propagate(lambda f: program(f, points), num_samples=2).deviations.shape == (2, *pred.mean.shape)


@pytest.mark.parametrize("method", ["krylov", "stochastic"])
def test_error_bars_of_samples_have_their_noise(method: str) -> None:
    """`K` times a variance is `χ²_K` times that of dense algebra."""
    model, (x, y), points, K = mlp(), data(20), torch.randn(3, 2), 400
    la = fitted(model, x, y, method=method, num_samples=K)
    pred = la.propagate(lambda f: forces(f, points))
    expected = covariance(forces, model, points, precision(model, x)).diagonal()
    assert float((pred.variance.flatten() / expected - 1).abs().max()) < 4 * math.sqrt(2 / K)


@pytest.mark.parametrize("settings", [{"method": "kfac"}, {"method": "diagonal"}, {"method": "subset"}])
def test_curvatures_in_closed_form(settings: dict[str, Any]) -> None:
    model, (x, y), points = mlp(2), data(60, 2), torch.randn(3, 2)
    la = fitted(model, x, y, **settings)
    curvature = la.posterior_.curvature
    assert curvature is not None
    H = curvature.matmul(torch.eye(la.network.num_parameters, dtype=torch.float64))
    H = H + ALPHA * torch.eye(len(H))
    pred = la.propagate(lambda f: forces(f, points))
    expected = covariance(forces, model, points, H)
    assert_close(pred.stddev.flatten().double(), expected.diagonal().sqrt(), rtol=1e-4, atol=0)


def test_a_last_layer() -> None:
    model, (x, y), points = mlp(), data(30), torch.randn(3, 2)
    la = fitted(model, x, y, parameters="last_layer")
    last = copy.deepcopy(model)
    last[:3].requires_grad_(False)  # pyright: ignore
    pred = la.propagate(lambda f: forces(f, points))
    expected = covariance(forces, last, points, precision(last, x))
    assert_close(pred.stddev.flatten().double(), expected.diagonal().sqrt(), rtol=1e-5, atol=0)


def test_some_elements_of_the_weights() -> None:
    model, (x, y), points = mlp(), data(30), torch.randn(3, 2)
    masks = {"0.weight": torch.tensor([[True, False], [False, True], [True, True], [False, False], [True, False]])}
    masks["3.bias"] = torch.ones(1, dtype=torch.bool)
    pred = fitted(model, x, y, method="exact", parameters=masks).propagate(lambda f: forces(f, points))
    names = [name for name, _ in model.named_parameters()]
    chosen = torch.cat([masks.get(n, torch.zeros_like(p, dtype=torch.bool)).flatten() for n, p in
                        zip(names, model.parameters(), strict=True)])  # fmt: skip
    R, H = rows(forces, model, points)[:, chosen], precision(model, x)[chosen][:, chosen]
    expected = (R @ torch.linalg.solve(H, R.T)).diagonal().sqrt()
    assert_close(pred.stddev.flatten().double(), expected, rtol=1e-5, atol=0)


# Functions ------------------------------------------------------------------------------------------------------------


def sampled_rows(program: Callable, model: nn.Module, x: Tensor, samples: Tensor) -> Tensor:
    """`T + ∂T/∂w ζ_k` of dense rows, `[K, R]`."""
    value = program(copy.deepcopy(model).double(), x.double()).detach().flatten()
    return value + samples.double() @ rows(program, model, x).T


@pytest.mark.parametrize("settings", [{"method": "krylov"}, {"method": "exact"}, {"parameters": "last_layer"}])
def test_samples_as_functions(settings: dict[str, Any]) -> None:
    """A derivative of a sample is the sample of the derivative, which is linear in the function."""
    model, (x, y), points = mlp(), data(20), torch.randn(3, 2)
    la = fitted(model, x, y, num_samples=4, **settings)
    functions, dense = la.functions(), copy.deepcopy(model)
    assert_close(functions(points), la.predict(points).samples)
    for program in (forces, laplacian):
        of_samples = [program(lambda x, k=k: functions(x)[k], points).flatten() for k in range(4)]
        if "parameters" in settings:
            dense[:3].requires_grad_(False)  # pyright: ignore
        expected = sampled_rows(program, dense, points, la.samples_)
        assert_close(torch.stack(of_samples).detach().double(), expected, rtol=1e-3, atol=1e-4)
        assert_close(
            la.propagate(lambda f, p=program: p(f, points)).samples.flatten(1).double(), expected, rtol=1e-3, atol=1e-4
        )
    assert len(la.functions(2)(points)) == 2
    with pytest.raises(ValueError, match="num_samples=5"):
        la.functions(5)
    with torch.no_grad():
        assert not functions(points.clone().requires_grad_()).requires_grad


def test_functions_inside_of_transforms() -> None:
    model, (x, y), points = mlp(2), data(20, 2), torch.randn(3, 2)
    functions = fitted(model, x, y, method="krylov", num_samples=4).functions()
    one = lambda row: functions(row[None])[:, 0]  # noqa: E731
    by_rows = torch.stack([torch.func.jacrev(one)(row) for row in points])
    assert_close(torch.func.vmap(torch.func.jacrev(one))(points), by_rows, rtol=1e-3, atol=1e-5)
    assert_close(torch.func.vmap(torch.func.jacfwd(one))(points), by_rows, rtol=1e-3, atol=1e-5)
    leaf = points.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(functions(leaf)[1, :, 1].sum(), leaf)
    assert_close(by_autograd, by_rows[:, 1, 1], rtol=1e-3, atol=1e-5)


def test_later_fits_leave_functions_alone() -> None:
    model, (x, y), points = mlp(), data(20), torch.randn(3, 2)
    la = fitted(model, x, y, method="krylov", num_samples=4)
    functions, before = la.functions(), la.predict(points).samples
    with torch.no_grad():
        model[0].weight.mul_(2)  # pyright: ignore
    la.fit([(x, y)], progress=False)
    assert_close(functions(points), before)
    assert not torch.allclose(la.functions()(points), before)


def test_weights_that_are_shared_must_not_change() -> None:
    model, (x, y), points = mlp(), data(20), torch.randn(3, 2)
    functions = fitted(model, x, y, parameters=["3.*"], method="krylov", num_samples=4).functions()
    with torch.no_grad():
        model[0].weight.mul_(2)  # pyright: ignore
    with pytest.raises(ValueError, match="`functions`: the weights"):
        functions(points)


# Likelihoods, inputs, files -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_logits_and_probabilities_with_scale_and_temperature() -> None:
    """First order in the error bars for what is not linear, with the temperature inside of the program."""
    torch.manual_seed(2)
    model, x, points = mlp(3), torch.randn(60, 2), torch.randn(3, 2)
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    la = fitted(model, x, labels, "classification", method="exact")
    la.calibrate([(torch.randn(40, 2), torch.randint(3, (40,)))])
    scale, temperature = la.scale_, la.temperature_
    assert 1 not in (scale, temperature)
    program = lambda f: f(points).softmax(-1)  # noqa: E731
    pred, plain = la.propagate(program), la.predict(points)
    assert_close(pred.mean, (model(points) / temperature).softmax(-1).detach())
    p = pred.mean.double()
    slope = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    expected = slope @ plain.covariance().double() @ slope
    assert_close(pred.covariance().double(), expected, rtol=1e-4, atol=1e-6)
    logits = la.propagate(lambda f: f(points))
    assert_close(logits.covariance(), plain.covariance(), rtol=1e-4, atol=1e-6)
    assert_close(logits.deviations, plain.deviations, rtol=1e-4, atol=1e-5)
    assert_close(la.functions()(points), plain.samples, rtol=1e-4, atol=1e-5)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 1), nn.Linear(5, 2)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(torch.cat([a, b], 1)))
        return {"left": self.left(h), "right": self.right(h)}


def test_heads_and_structured_inputs() -> None:
    torch.manual_seed(0)
    model, a, b = TwoHeads(), torch.randn(20, 2), torch.randn(20, 2)
    likelihood = {"left": Gaussian(NOISE, learn=False), "right": Gaussian(NOISE, learn=False)}
    targets = {"left": torch.randn(20, 1), "right": torch.randn(20, 2)}
    la = LinearisedLaplace(model, likelihood, prior=IsotropicPrior(precision=ALPHA), method="exact")
    la.fit([((a, b), targets)], progress=False)

    def program(f: Callable) -> Tensor:
        x = a[:3].clone().requires_grad_()
        heads = f(x, b[:3])
        return torch.autograd.grad(heads["left"].sum() + heads["right"].square().sum(), x)[0]

    J = reference.jacobian(copy.deepcopy(model).double(), {"a": a.double(), "b": b.double()}).flatten(0, 1)
    H = NOISE * J.T @ J + ALPHA * torch.eye(J.shape[1], dtype=torch.float64)
    dense = copy.deepcopy(model).double()
    x = a[:3].double().requires_grad_()
    heads, weights = dense(x, b[:3].double()), list(dense.parameters())
    (value,) = torch.autograd.grad(heads["left"].sum() + heads["right"].square().sum(), x, create_graph=True)
    pulled = [torch.autograd.grad(t, weights, retain_graph=True, materialize_grads=True) for t in value.flatten()]
    R = torch.stack([torch.cat([g.flatten() for g in row]) for row in pulled])
    expected = (R @ torch.linalg.solve(H, R.T)).diagonal().sqrt()
    assert_close(la.propagate(program).stddev.flatten().double(), expected, rtol=1e-5, atol=0)
    right = cast(Any, la.predict((a, b)))["right"]
    for call in (
        lambda f: f((a, b)),
        lambda f: f({"a": a, "b": b}),
        lambda f: f(a=a, b=b),
        lambda f: f(a.numpy(), b.numpy()),
    ):
        assert_close(la.propagate(lambda f, c=call: c(f)["right"]).variance, right.variance)
    assert_close(la.functions()(a, b)["right"], right.samples, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"method": "exact"}, {"method": "kfac"}, {"method": "krylov"}])
def test_after_load(settings: dict[str, Any], tmp_path: Path) -> None:
    model, (x, y), points = mlp(), data(20), torch.randn(3, 2)
    la = fitted(model, x, y, **settings)
    la.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", model, Gaussian(NOISE, learn=False))
    before, after = (one.propagate(lambda f: forces(f, points)) for one in (la, again))
    assert_close(after.joint_covariance(), before.joint_covariance(), rtol=1e-4, atol=1e-6)
    assert_close(after.samples, before.samples, rtol=1e-4, atol=1e-5)
    assert_close(again.functions()(points), la.functions()(points), rtol=1e-4, atol=1e-5)


def test_the_prediction_of_a_program() -> None:
    """It has no noise, so that intervals and densities are those of the quantity itself."""
    model, (x, y), points = mlp(), data(20), torch.randn(3, 2)
    pred = fitted(model, x, y, method="exact").propagate(lambda f: total(f, points))
    assert isinstance(pred, RegressionPrediction)
    assert pred.mean.shape == pred.stddev.shape == (1,)
    assert pred.covariance().shape == (1, 1, 1)
    low, high = pred.interval(0.6826894921370859)
    assert_close(high - low, 2 * pred.stddev)
    assert_close(pred.log_prob(pred.mean), -(pred.stddev * math.sqrt(2 * math.pi)).log())


# Bad input ------------------------------------------------------------------------------------------------------------


def test_programs_that_fail() -> None:
    model, (x, y), points = mlp(), data(20), torch.randn(3, 2)
    la = fitted(model, x, y, method="exact")

    def without_grad(f: Callable) -> Tensor:
        with torch.no_grad():
            return f(points)

    def by_backward(f: Callable) -> Tensor:
        leaf = points.clone().requires_grad_()
        f(leaf).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    for program in (lambda f: points, without_grad, by_backward, lambda f: f(points).detach()):
        with pytest.raises(ValueError, match="does not depend on `f`"):
            la.propagate(program)
    no_numbers: list[Any] = [lambda f: (f(points),), lambda f: f(points).sum().item(), lambda f: f(points).argmax(1)]
    for program in no_numbers:
        with pytest.raises(TypeError, match="must return a tensor"):
            la.propagate(program)
    for no_program in (None, points):
        with pytest.raises(TypeError, match="takes a function of the network"):
            la.propagate(no_program)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"fails on inputs of shape \[3, 1\]"):
        la.propagate(lambda f: f(points[:, :1]))
    with pytest.raises(ValueError, match=r"fails on inputs of shape \[3, 1\]"):
        la.functions()(points[:, :1])
    with pytest.raises(ValueError, match="num_samples=65"):
        la.propagate(lambda f: f(points), num_samples=65)
    assert all(p.grad is None for p in model.parameters())


def test_a_program_that_returns_no_numbers() -> None:
    model, (x, y), points = mlp(), data(20), torch.randn(3, 2)
    for method in ("exact", "krylov"):
        pred = fitted(model, x, y, method=method).propagate(lambda f: f(points[:0]))
        assert pred.mean.shape == pred.stddev.shape == model(points[:0]).shape
        assert pred.samples.shape[1:] == pred.mean.shape
        assert pred.joint_covariance().shape == (0, 0)


def test_programs_that_change_tensors_in_place() -> None:
    model, (x, y), points = mlp(), data(20), torch.randn(3, 2)
    la = fitted(model, x, y, method="exact")

    def program(f: Callable) -> Tensor:
        values = f(points)
        values *= 2
        out = torch.zeros(3)
        out[:2] = values[:2, 0]
        return out

    pred, plain = la.propagate(program), la.predict(points)
    assert_close(pred.stddev[:2], 2 * plain.stddev[:2, 0])
    assert pred.stddev[2] == 0
    moved = points.clone()
    pred = la.propagate(lambda f: f(moved))
    moved += 1
    assert_close(pred.stddev, plain.stddev)


# The example ----------------------------------------------------------------------------------------------------------


def test_forces_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Error bars of the force on the atom that is pushed grow with the distance, and tell the size of the error."""
    errors, stddev = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "forces.py"))["main"]()
    assert len(capsys.readouterr().out.splitlines()) == 5
    pushed = stddev[:, 2]
    assert bool((pushed[1:] > pushed[:-1]).all())
    assert bool((errors[:, 2] < 5 * pushed).all())
    assert float(pushed[-1] / pushed[0]) > 10
