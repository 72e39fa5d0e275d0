"""Weights that a module takes from elsewhere than from its parts: from lists, closures, or in a backward pass.

References are by `torch.autograd.grad` of the module itself, or of one that has the same weights where they belong.
"""

from collections.abc import Callable
from functools import partial

import pytest
import reference
import torch
import torch.nn.functional as F
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace
from laplace_sampling.gp.tangent_kernel import TangentKernel

generator = torch.Generator().manual_seed(0)
X = torch.randn(20, 3, dtype=torch.float64, generator=generator)
Y = X[:, :1].sin()


class Body(nn.Module):
    """`apply` is what a test puts in the place of the layer `fc`."""

    apply_fc: Callable[[Tensor], Tensor] | None = None
    ws: list[Tensor]
    cache: dict[str, Tensor]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).tanh()
        return self.head((self.fc if self.apply_fc is None else self.apply_fc)(h).tanh())


def in_list(model: Body) -> Callable[[Tensor], Tensor]:
    model.ws = [model.fc.weight, model.fc.bias]
    return lambda h: F.linear(h, *model.ws)


def in_dict(model: Body) -> Callable[[Tensor], Tensor]:
    model.cache = {"w": model.fc.weight}
    return lambda h: h @ model.cache["w"].T + model.fc.bias


def in_partial(model: Body) -> Callable[[Tensor], Tensor]:
    return partial(F.linear, weight=model.fc.weight, bias=model.fc.bias)


def in_closure(model: Body) -> Callable[[Tensor], Tensor]:
    w, b = model.fc.weight, model.fc.bias
    return lambda h: torch.addmm(b, h, torch.cat([w[:2], w[2:]]).t())


def pair(keep: Callable[[Body], Callable]) -> tuple[Body, Body]:
    """A module that keeps weights elsewhere, and one with the same weights that does not."""
    model = Body()
    model.apply_fc = keep(model)
    return model, Body()


def laplace(model: nn.Module, method: str = "exact", parameters=None) -> LinearisedLaplace:
    return LinearisedLaplace(
        model,
        Gaussian(25.0, learn=False),
        prior=IsotropicPrior(precision=1.0),
        method=method,
        parameters=parameters,
        num_samples=16,
    )


def deviations(model: nn.Module, method: str = "exact", parameters=None, dtype=torch.float64) -> Tensor:
    la = laplace(model, method, parameters).fit([(X.to(dtype), Y.to(dtype))], progress=False, budget=None)
    return la.predict(X[:5].to(dtype)).stddev[:, 0]


def dense(model: nn.Module, at: Tensor = X[:5]) -> Tensor:
    J, rows = reference.jacobian(model, X)[:, 0], reference.jacobian(model, at)[:, 0]
    H = 25 * J.T @ J + torch.eye(J.shape[1], dtype=J.dtype)
    return (rows * torch.linalg.solve(H, rows.T).T).sum(1).sqrt()


@pytest.mark.parametrize("keep", [in_list, in_dict])
def test_exact_deviations(keep: Callable) -> None:
    model, _ = pair(keep)
    assert_close(deviations(model), dense(model))


SLOW = [pytest.param(method, marks=pytest.mark.slow) for method in ("dual", "subset", "stochastic")]


@pytest.mark.parametrize("method", ["krylov", "kfac", *SLOW])
def test_each_method(method: str) -> None:
    model, plain = pair(in_list)
    assert_close(deviations(model, method), deviations(plain, method))


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_lists_in_float32(method: str) -> None:
    model, plain = (of_pair.float() for of_pair in pair(in_list))
    assert_close(deviations(model, method, dtype=torch.float32), deviations(plain, method, dtype=torch.float32))


@pytest.mark.parametrize(
    "parameters",
    [["fc.weight"], ["!fc.*"], "last_layer", {"fc.weight": [0, 3, 5]}],
    ids=["one", "others", "last", "few"],
)
def test_some_of_the_weights(parameters) -> None:
    model, plain = pair(in_list)
    assert_close(deviations(model, parameters=parameters), deviations(plain, parameters=parameters))


def test_a_weight_that_is_used_in_both_ways() -> None:
    """As in an autoencoder whose decoder takes the transposed weight of its encoder."""
    model = Body()
    model.ws = [model.fc.weight]
    model.apply_fc = lambda h: model.fc(h).tanh() @ model.ws[0]
    assert_close(deviations(model), dense(model))


# Functions of autograd ------------------------------------------------------------------------------------------------


class Adjoint(torch.autograd.Function):
    """Runs a module again in its backward pass, and differentiates in weights that it was given, as adjoint methods."""

    @staticmethod
    def forward(ctx, part, x, *weights):
        ctx.part = part
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx, g):
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(ctx.part(x), (x, *weights), g, allow_unused=True)
        return None, *[torch.zeros_like(w) if d is None else d for d, w in zip(found, (x, *weights), strict=True)]


class Reversible(torch.autograd.Function):
    """Runs a module again in its backward pass, which adds the gradients to its parameters itself."""

    @staticmethod
    def forward(ctx, part, x):
        ctx.part = part
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)

    @staticmethod
    def backward(ctx, g):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.part(x), g)
        return None, x.grad


def by_adjoint(model: Body) -> Callable[[Tensor], Tensor]:
    return lambda h: Adjoint.apply(model.fc, h, *[p for p in model.fc.parameters() if p.requires_grad])


def by_reversible(model: Body) -> Callable[[Tensor], Tensor]:
    return lambda h: Reversible.apply(model.fc, h)


def by_kept_view(model: Body) -> Callable[[Tensor], Tensor]:
    view = model.fc.weight.T
    return lambda h: h @ view + model.fc.bias


def in_tuple(model: Body) -> Callable[[Tensor], Tensor]:
    weights = (model.fc.weight, model.fc.bias)
    return lambda h: F.linear(h, *weights)


MISSED = [by_adjoint, by_reversible, by_kept_view, in_partial, in_closure, in_tuple]


@covering(method=["exact", "krylov", "kfac"], keep=MISSED)
def test_weights_that_products_miss_are_named(keep: Callable, method: str) -> None:
    model, _ = pair(keep)
    with pytest.raises(ValueError, match=r"`fc\.weight`.*registered.*odeint") as raised:
        deviations(model, method)
    assert "stem" not in str(raised.value)
    assert "head" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:The Jacobian-vector product of Body has no forward derivative")
@pytest.mark.parametrize("keep", MISSED)
def test_weights_after_such_a_function(keep: Callable) -> None:
    model, plain = pair(keep)
    assert_close(deviations(model, parameters=["head.*"]), deviations(plain, parameters=["head.*"]))


@pytest.mark.parametrize("keep", [by_adjoint, by_reversible, in_list])
def test_the_check_leaves_no_gradients(keep: Callable) -> None:
    """Hooks of the user meet none either: they may clip or mask gradients, or take the step of an optimiser."""
    model, _ = pair(keep)
    model.fc.bias.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    gradient, met = model.fc.weight.grad, []
    model.fc.weight.register_hook(met.append)
    model.fc.weight.register_post_accumulate_grad_hook(met.append)
    try:
        deviations(model)
    except ValueError:
        assert keep is not in_list
    assert not met
    assert [p.requires_grad for p in model.fc.parameters()] == [True, False]
    assert model.fc.weight.grad is gradient
    assert_close(gradient, torch.ones_like(gradient))
    assert all(p.grad is None for name, p in model.named_parameters() if name != "fc.weight")
    model(X).sum().backward()
    assert len(met) >= 2


def test_hooks_that_mask_gradients_are_of_the_optimisation() -> None:
    model, plain = Body(), Body()
    model.fc.weight.register_hook(lambda g: g * 0)
    assert_close(deviations(model), deviations(plain))


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_random_weights_of_a_frozen_model(method: str) -> None:
    model, plain = Body().requires_grad_(False), Body()
    assert_close(deviations(model, method, ["fc.*"]), deviations(plain, method, ["fc.*"]))
    assert not any(p.requires_grad for p in model.parameters())
    held, _ = pair(in_tuple)
    with pytest.raises(ValueError, match=r"`fc\.weight`"):
        deviations(held.requires_grad_(False), method, ["fc.*"])


def test_kernels_of_gaussian_processes() -> None:
    model, plain = pair(in_list)
    J = reference.jacobian(plain, X)[:, 0]
    assert_close(TangentKernel(model)(X).to_dense(), J @ J.T)
    with pytest.raises(ValueError, match=r"`fc\.weight`"):
        TangentKernel(pair(by_adjoint)[0])(X).to_dense()


# Checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@covering(method=["exact", "krylov", "kfac"], frozen=[False, True], parameters=[None, ["fc.*"]])
def test_reentrant_checkpoints(method: str, frozen: bool, parameters: list[str] | None) -> None:
    """Also behind a stem without gradients, where torch itself has none of the part."""
    model, plain = pair(lambda model: partial(checkpoint, model.fc, use_reentrant=True))
    for of_pair in (model, plain):
        of_pair.stem.requires_grad_(not frozen)
    assert_close(deviations(model, method, parameters), deviations(plain, method, parameters))
    assert "apply" not in vars(CheckpointFunction)


def test_weights_that_only_later_data_take_from_elsewhere() -> None:
    """As experts of a mixture that are held in a list: the first batches go to none of them."""

    class Routed(Body):
        def forward(self, x: Tensor) -> Tensor:
            h, taken = self.stem(x).tanh(), x[:, :1] > 0
            return self.head(torch.where(taken, F.linear(h, *self.ws), h).tanh() if bool(taken.any()) else h.tanh())

    model, order = Routed(), X[:, 0].argsort()
    model.ws = [model.fc.weight, model.fc.bias]
    x, y = X[order], Y[order]
    la = LinearisedLaplace(model, Gaussian(25.0, learn=False), prior=IsotropicPrior(precision=1.0), method="exact")
    la.fit([(x[:4], y[:4]), (x[4:], y[4:])], progress=False)
    J = reference.jacobian(model, x)[:, 0] if reference.jacobian(model, x).dim() == 3 else reference.jacobian(model, x)
    expected = (J @ torch.linalg.inv(25 * J.T @ J + torch.eye(J.shape[1]).double()) * J).sum(1).sqrt()
    assert_close(la.predict(x).stddev[:, 0], expected, rtol=1e-6, atol=0)
