"""Checks of a network before a fit: is it a function of each datum, with one derivative, in its registered weights?

torch has derivatives that are wrong, and nothing says so. Forward mode is compared with reverse mode, and again in
float64 before an error is raised: a unit of almost no input may be on in one pass and off in another.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_unflatten

from laplace_sampling.data.batches import num_rows, place, take
from laplace_sampling.networks.agreement import rounding
from laplace_sampling.networks.derivative_rules import ComposedLayers, forward_mode_kernels
from laplace_sampling.networks.jacobian_products import origin_of
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.shell import Shell
from laplace_sampling.solvers.placement import normal

# How far a datum by itself may be from one in a batch: layers quantised dynamically take their range from the batch,
# and differed by 0.007. Half and twice of it accept the same networks.
_COUPLING = 0.05
# Weights that an error names.
_NUM_NAMED = 4


def check_consistency(network: Linearisation, x: Any) -> None:
    r"""Raises if rows of a batch act on each other, if products miss weights, or are not of one Jacobian by both modes.

    A datum by itself must have the outputs and the product `φ v` that it has behind another one, to 5 %. `φᵀu` must be
    the gradient that the module by itself has in its own parameters. For random `u` and `v` it must be that
    `⟨u, φv⟩ = ⟨φᵀu, v⟩`, of two data and of one: torch has kernels whose derivatives are wrong for one only. Where an
    operation is found whose forward derivative is wrong, products take two reverse passes from here on, and a notice
    says so. Products of the check are not counted.

    Args:
        network: the linearised network.
        x: inputs, of which the first two are taken; where the network fails on these, it is run on all.

    Raises:
        ValueError: if either is not so, or if the network fails on so few data but not on all. What else it raises is
            raised as it is.
    """
    pair = take(x, slice(0, 2))
    with _trial(network):
        try:
            problem = _confirmed(network, pair)
        except _FailsOnFewData as failure:
            network(x)
            raise ValueError(str(failure)) from failure.__cause__
        if isinstance(problem, _TwoJacobians) and (origin := _wrong_rule(network, pair)) is not None:
            network.take_two_pullbacks(origin, "a wrong forward derivative")
            problem = _confirmed(network, pair)
    if problem is not None:
        raise ValueError(problem)


@contextmanager
def _trial(network: Linearisation) -> Iterator[None]:
    """Products inside are not counted."""
    counts = dict(network.products)
    try:
        yield
    finally:
        network.products.update(counts)


class _FailsOnFewData(Exception):
    """The network does not run on one or two data."""


class _TwoJacobians(str):
    """The problem that products by forward and by reverse mode are not of the same Jacobian."""


def _confirmed(network: Linearisation, x: Any) -> str | None:
    """What is wrong with a network in float64 as well, where it can be computed so; `None` if nothing is."""
    problem = _problem(network, x)
    if problem is None or network.dtype == torch.float64:
        return problem
    try:
        precise = network.in_float64()
        wide = place(x, network.device, torch.float64)
        if precise(wide).dtype != torch.float64:
            return problem
        return _problem(precise, wide)
    except Exception:  # a network may hold anything: one that cannot be copied or computes in its own dtype
        return problem


def _wrong_rule(network: Linearisation, x: Any) -> str | None:
    """The operation whose forward derivative is wrong, and its module; `None` if it is not found."""
    try:
        precise = network if network.module_dtype == torch.float64 else network.in_float64()
        return wrong_forward_rule(precise.shell, place(x, network.device, torch.float64))
    except Exception:  # as for `_confirmed`
        return None


def _problem(network: Linearisation, x: Any) -> str | None:
    """What is wrong with a network, as a sentence; `None` if nothing is."""
    name, generator = type(network.module).__name__, torch.Generator().manual_seed(0)
    v = normal(2, network.num_parameters, seed=generator, dtype=network.dtype, device=network.device)
    second = take(x, slice(-1, None))
    try:
        outputs, single_output = (network(part).reshape(num_rows(part), -1) for part in (x, second))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _FailsOnFewData(
            f"{name} runs on the first batch of the data, but not on one or two of them: {type(error).__name__}, "
            f"{error} {_INDEPENDENT}"
        ) from error
    allowed = _rounding(network)
    u = normal(2, *outputs.shape, seed=generator, dtype=network.dtype, device=network.device)
    pulled = network.vjp(x, u)
    if problem := _missed_weights(network, x, u[0], pulled[0]):
        return problem
    # Two vectors also try what products of several take; of the datum by itself one says as much.
    product, single_product = network.jvp(x, v), network.jvp(second, v[:1])
    if not all(bool(values.isfinite().all()) for values in (outputs, single_output, product, single_product)):
        return None  # the fit itself says what is not finite
    coupling = max(allowed, _COUPLING)
    for quantity, of_pair, of_second, single in (
        ("outputs", outputs, outputs[-1:], single_output),
        ("products `φv`", product[:1], product[:1, -1:], single_product),
    ):
        if not _near(single, of_second, of_pair, coupling):
            difference = float((single - of_second).norm() / of_pair.norm())
            return (
                f"What {name} gives for a datum depends on the other data of its batch: the {quantity} of the second "
                f"datum by itself and beside the first differ by {difference:.2g} of their size. {_INDEPENDENT}"
            )
    single_u = u[:1, -1:]
    return _not_adjoint(network, v, product, u, pulled, allowed) or _not_adjoint(
        network, v[:1], single_product, single_u, network.vjp(second, single_u), allowed
    )


def check_weights(network: Linearisation, x: Any) -> None:
    """Raises if reverse products miss weights: where the module takes them from elsewhere than from its parts.

    It is for those who take nothing but rows of Jacobians; `check_consistency` checks this as well.

    Args:
        network: the linearised network.
        x: inputs, of which the first two are taken.
    """
    pair = take(x, slice(0, 2))
    with _trial(network):
        outputs = network(pair).reshape(num_rows(pair), -1)
        u = normal(1, *outputs.shape, seed=0, dtype=network.dtype, device=network.device)
        problem = _missed_weights(network, pair, u[0], network.vjp(pair, u)[0])
    if problem is not None:
        raise ValueError(problem)


def _missed_weights(network: Linearisation, x: Any, u: Tensor, pulled: Tensor) -> str | None:
    """Names the weights in which `pulled`, `φᵀu`, is not the gradient of the module by itself."""
    if network.shell.shards is not None:
        return None  # weights that are shared out have no gradient outside of the hooks of FSDP
    with network.differentiating(layers=False):
        plain = network.shell.plain_gradient(x, u)
    gradient = dict(zip(network.shell.names, plain.split(network.shell.sizes), strict=True))
    random = network.unflatten(torch.ones_like(pulled))  # of a parameter some elements may be known
    # Where a gradient is zero but for rounding, as before a normalisation, it is compared with that of all weights.
    allowed, size = _rounding(network), torch.stack([part.norm() for part in gradient.values()]).norm()
    missed = []
    for name, part in network.unflatten(pulled).items():
        missing = ((gradient[name].reshape(part.shape) - part) * random[name]).norm()
        if missing > allowed * gradient[name].norm() and missing > allowed**2 * size:
            missed.append(f"`{name}`")
    if not missed:
        return None
    named = ", ".join(missed[:_NUM_NAMED]) + (", …" if len(missed) > _NUM_NAMED else "")
    return _MISSED.format(type(network.module).__name__, named)


def _rounding(network: Linearisation) -> float:
    dtype = network.module_dtype if network.autocast is None else network.autocast
    return rounding(dtype)


def _not_adjoint(
    network: Linearisation, v: Tensor, pushed: Tensor, u: Tensor, pulled: Tensor, allowed: float
) -> str | None:
    """Compares `⟨u, φv⟩`, `pushed` being `φv`, with `⟨φᵀu, v⟩`, `pulled` being `φᵀu`."""
    forward, reverse = (u * pushed).sum((1, 2)), (v * pulled).sum(1)
    if _near(forward, reverse, pushed, allowed):
        return None
    reason = _OTHER_DERIVATIVE if network.lacking is None else _LACKING.format(network.lacking)
    return _TwoJacobians(
        f"The Jacobian products of {type(network.module).__name__} by forward and by reverse mode are not of the same "
        f"Jacobian: ⟨u, φv⟩ = {float(forward[0]):.6g}, but ⟨φᵀu, v⟩ = {float(reverse[0]):.6g} for random u and v. "
        f"{reason} Replace it, or choose weights after it with `parameters=`."
    )


_INDEPENDENT = (
    "Rows must be independent data: leave out what is taken over the batch, such as means over its first axis or "
    "`BatchNorm(track_running_stats=False)`, and give what belongs together as one datum, graphs as "
    "[graphs, nodes, ...]."
)
_MISSED = (
    "{} does not take the weights {} from where they are registered: `torch.autograd.grad` of the model has another "
    "derivative in them than Jacobian products, which put other weights there. So it is with functions of autograd "
    "that run a part of the model again in their backward pass, as `torchdiffeq.odeint_adjoint` and reversible layers "
    "do, or that take a weight from a list; and with tensors that were once computed of a weight and kept, as views. "
    "Let the forward pass compute all from the registered parameters (`odeint` in place of `odeint_adjoint`), or "
    "choose others with `parameters=`: those after such a function, or all but those kept elsewhere."
)
_OTHER_DERIVATIVE = (
    "Some operation has another derivative in one of them, as by a custom `autograd.Function` or a gradient hook."
)
_LACKING = (
    "An operation has no forward derivative, and its reverse one cannot be differentiated in its place, as where it "
    "is `once_differentiable` or goes through numpy: {}."
)


def _near(a: Tensor, b: Tensor, scale: Tensor, allowed: float) -> bool:
    return float((a - b).norm()) <= allowed * float(scale.norm())


# Operations whose forward derivative is wrong ----------------------------------------------------------------------


# Central differences are right to two thirds of the digits with steps of a third of them; derivatives that agree in a
# third of the digits are the same.
_STEP = _SAME = torch.finfo(torch.float64).eps ** (1 / 3)
# What takes a dual number apart: its value alone has no forward derivative.
_APART = torch._C._VariableFunctions._unpack_dual  # pyright: ignore


class _WrongRule(Exception):
    pass


def wrong_forward_rule(shell: Shell, x: Any) -> str | None:
    """The first operation whose forward derivative is wrong where its reverse one is right, with its module.

    `None` if there is none; what the network or an operation raises is raised.

    Args:
        shell: a network in float64.
        x: inputs.
    """
    weights = shell.random()
    num = sum(shell.sizes)
    tangents = shell.unflatten(normal(1, num, seed=0, dtype=shell.dtype, device=shell.device)[0])
    try:
        with torch.enable_grad(), shell.opened(), forward_mode_kernels(layers=False), dual_level(), _Rules():
            shell.outputs(x)({name: make_dual(w, tangents[name].to(w.dtype)) for name, w in weights.items()})
    except _WrongRule as found:
        return origin_of(found, shell.module)
    return None


class _Rules(TorchFunctionMode):
    """Raises at the first operation whose forward derivative is wrong and whose reverse one is right."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _APART:
            return func(*args, **(kwargs or {}))
        values, spec = tree_flatten((args, kwargs or {}))
        duals = {n: unpack_dual(value) for n, value in enumerate(values) if _has_numbers(value)}
        changing = {n: dual.tangent for n, dual in duals.items() if dual.tangent is not None}
        # Operations in place change what they are given.
        given = [duals[n].primal.detach().clone() if n in duals else value for n, value in enumerate(values)]
        ways = [tangent.detach().clone() for tangent in changing.values()]
        output = func(*args, **(kwargs or {}))
        found = [unpack_dual(value) for value in tree_flatten(output)[0] if _has_numbers(value)]
        if not changing or not found:
            return output
        forward = _flat([torch.zeros_like(p) if t is None else t for p, t in found])

        def at(places: list[Tensor]) -> Tensor:
            moved = dict(zip(changing, places, strict=True))
            some = [moved.get(n, value.clone() if n in duals else value) for n, value in enumerate(given)]
            args, kwargs = tree_unflatten(some, spec)
            with ComposedLayers():
                return _flat([value for value in tree_flatten(func(*args, **kwargs))[0] if _has_numbers(value)])

        points = [given[n] for n in changing]
        try:
            h = _STEP * float(_flat(points).norm() / _flat(ways).norm())
            above, below = (at([a + s * h * t for a, t in zip(points, ways, strict=True)]) for s in (1, -1))
            change = (above - below).detach() / (2 * h)
            if _same(forward, change) or not _same(self._reverse(at, points, ways, change), change.square().sum()):
                return output
        except Exception:  # what has no reverse derivative, say
            return output
        raise _WrongRule(f"`{resolve_name(func) or func.__name__}`")

    def _reverse(self, at: Callable, points: list[Tensor], ways: list[Tensor], u: Tensor) -> Tensor:
        """`⟨∂f/∂a ᵀ u, ȧ⟩`."""
        leaves = [a.clone().requires_grad_() for a in points]
        pulled = torch.autograd.grad(at([leaf.clone() for leaf in leaves]), leaves, u, materialize_grads=True)
        return (_flat(list(pulled)) * _flat(ways)).sum()


def _has_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= _SAME * b.norm())
