"""Checks of a network before a fit: is it a function of each datum, with one derivative, in its registered weights?

torch has derivatives that are wrong, and nothing says so. Forward mode is compared with reverse mode, and again in
float64 before an error is raised: a unit of almost no input may be on in one pass and off in another.

A `FunctionFingerprint` says whether a network computes what it computed at the fit, on a few data; `load` compares it.
Weights and buffers do not tell: another activation leaves them as they are.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import num_bytes, num_rows, place, storable, take
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.networks.filters import FilterNetwork
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.products import difference, rounding
from laplace_sampling.networks.solving import solving
from laplace_sampling.solvers.placement import normal

# How far a datum by itself may be from one in a batch: layers quantised dynamically take their range from the batch,
# and differed by 0.007. Half and twice of it accept the same networks.
_COUPLING = 0.05


def check_consistency(network: Linearisation, x: Any) -> None:
    r"""Raises if rows of a batch act on each other, if products miss weights, or are not of one Jacobian by both modes.

    A datum by itself must have the outputs and the product `φ v` that it has behind another one, to 5 %. `φᵀu` must be
    the gradient that the module by itself has in its own parameters. For random `u` and `v` it must be that
    `⟨u, φv⟩ = ⟨φᵀu, v⟩`, of two data and of one: torch has kernels whose derivatives are wrong for one only. Where
    differences of outputs say that reverse mode is right, products take two reverse passes from here on, and a notice
    says so. Products of the check are not counted.

    Args:
        network: the linearised network.
        x: inputs, of which the first two are taken; where the network fails on these, it is run on all.

    Raises:
        ValueError: if either is not so, or if the network fails on so few data but not on all. What else it raises is
            raised as it is.
    """
    # Gradients of the module are in its own coordinates.
    network = network.whole if isinstance(network, FilterNetwork) else network
    pair, counts = take(x, slice(0, 2)), dict(network.products)
    try:
        with _missing_derivatives_raise(network):
            problem = _confirmed(network, pair)
        if isinstance(problem, _TwoJacobians) and network.lacking is None and _reverse_is_right(network, pair):
            network.take_two_pullbacks("differences of outputs are those of reverse mode", "a wrong forward derivative")
            problem = _confirmed(network, pair)
    except _FailsOnFewData as failure:
        network(x)
        raise ValueError(str(failure)) from failure.__cause__
    finally:
        network.products.update(counts)
    if problem is not None:
        raise ValueError(problem)


@contextmanager
def _missing_derivatives_raise(network: Linearisation) -> Iterator[None]:
    """An error where torch would take a derivative that it does not have for zero, as those of quantised layers."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*an autograd kernel was not registered")
            yield
    except UserWarning as warning:
        model, operation = type(network.module).__name__, str(warning).split(": ")[0]
        raise ValueError(
            f"The outputs of {model} depend on random weights by `{operation}`, which torch does not differentiate. "
            "Name weights after it with `parameters=`, or replace this operation."
        ) from warning


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


def _reverse_is_right(network: Linearisation, x: Any) -> bool:
    """Whether central differences in float64 have the derivative of reverse mode, and not that of forward mode."""
    try:
        precise, x = network.in_float64(), place(x, network.device, torch.float64)
        v = normal(1, network.num_parameters, seed=0, dtype=torch.float64, device=network.device)
        # Differences are right to two thirds of the digits with steps of a third of them.
        h = torch.finfo(torch.float64).eps ** (1 / 3) * float(precise.weights.norm() / v.norm())
        weights, directions = precise.shell.random(), precise.unflatten(v[0])
        f = precise.shell.outputs(x)
        with torch.no_grad(), precise.differentiating(layers=False):
            above, below = (f({name: w + s * directions[name] for name, w in weights.items()}) for s in (h, -h))
        u = normal(1, *above.shape, seed=1, dtype=torch.float64, device=network.device)
        change = (u * (above - below)).sum() / (2 * h)
        reverse, forward = (precise.vjp(x, u) * v).sum(), (u * precise.jvp(x, v)).sum()
        return bool((change - reverse).abs() < 0.1 * (change - forward).abs())
    except Exception:  # as for `_confirmed`
        return False


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


def _missed_weights(network: Linearisation, x: Any, u: Tensor, pulled: Tensor) -> str | None:
    """Names the weights in which `pulled`, `φᵀu`, is not the gradient of the module by itself."""
    if network.shell.mesh is not None:
        return None  # weights that are shared out have no gradient outside of the hooks of FSDP
    with network.differentiating(layers=False):
        plain = network.shell.plain_gradient(x, u)
    gradient = dict(zip(network.shell.names, plain.split(network.shell.sizes), strict=True))
    random = network.unflatten(torch.ones_like(pulled))  # of a parameter some elements may be known
    # Where a gradient is zero up to rounding, as before a normalisation, it is compared with that of all weights.
    allowed, size = _rounding(network), torch.stack([part.norm() for part in gradient.values()]).norm()
    missed = []
    for name, part in network.unflatten(pulled).items():
        missing = ((gradient[name].reshape(part.shape) - part) * random[name]).norm()
        if missing > allowed * gradient[name].norm() and missing > allowed**2 * size:
            missed.append(f"`{name}`")
    if not missed:
        return None
    return _MISSED.format(type(network.module).__name__, ", ".join(missed[:4]) + (", …" if missed[4:] else ""))


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
    reason = f": {network.lacking}" if network.lacking else ""
    return _TwoJacobians(
        f"The Jacobian products of {type(network.module).__name__} by forward and by reverse mode are not of the same "
        f"Jacobian: ⟨u, φv⟩ = {float(forward[0]):.6g}, but ⟨φᵀu, v⟩ = {float(reverse[0]):.6g} for random u and v. "
        "Some operation has another derivative in one of them, as by a custom `autograd.Function`, a gradient hook or "
        f"numpy{reason}. Replace it, or choose weights after it with `parameters=`."
    )


_INDEPENDENT = (
    "Rows must be independent data: leave out what is taken over the batch, such as means over its first axis or "
    "`BatchNorm(track_running_stats=False)`, and give what belongs together as one datum, graphs as "
    "[graphs, nodes, ...]."
)


_MISSED = (
    "{} does not take the weights {} from where they are registered: `torch.autograd.grad` of the model has another "
    "derivative in them, as where a backward pass runs a part of the model again (`torchdiffeq.odeint_adjoint`), or a "
    "closure or a view holds a weight. Compute all from the registered parameters (`odeint`), or choose weights after "
    "that with `parameters=`."
)


def _near(a: Tensor, b: Tensor, scale: Tensor, allowed: float) -> bool:
    return float((a - b).norm()) <= allowed * float(scale.norm())


# Data that are kept, fewer if they are larger than so many bytes, and outputs of each datum. The numbers are not tuned:
# another activation shows at a single datum.
_NUM_DATA, _MOST_BYTES, _MOST_OUTPUTS = 4, 2**22, 4096


# The relative difference that another machine or device may make. Two MLPs, two CNNs and a ResNet-18 differ by 1e-7 in
# float32, by 1e-3 with weights in TF32, and once trained by 0.06 with an autocast to bfloat16 in their forward. Of nine
# other activations only a leaky ReLU of slope 0.01 for a ReLU differs by less than 0.1 in outputs and derivatives.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class FunctionFingerprint:
    """What a network computes at a few inputs, without `autocast`.

    Attributes:
        inputs: training data, at most four.
        outputs: `f(w̄, x)`; of a datum with many outputs, some of them.
        product: `φ(x) v` of the same outputs, `v` being signs from a generator with a fixed seed.
    """

    inputs: Any
    outputs: Float[Tensor, "n c"]
    product: Float[Tensor, "n c"]

    @classmethod
    def of(cls, network: Linearisation, data: TrainingData) -> "FunctionFingerprint | None":
        """At some of the training data.

        `None` where a file cannot hold them, or where the network does not compute the same or what is finite twice.
        """
        inputs = _some_inputs(data, network.batching.max_rows or _NUM_DATA)
        try:
            inputs = storable(inputs)
        except TypeError:
            return None
        computed, again = (_computed(network, inputs) for _ in range(2))
        same = all(difference(b, a) <= _tolerance(network) for a, b in zip(computed, again, strict=True))
        return cls(inputs, *computed) if same and bool(computed[1].isfinite().all()) else None

    def difference(self, network: Linearisation) -> str | None:
        """In words, how far a network is from this one on the same data; `None` if it is the same up to rounding."""
        now = _computed(network, self.inputs)
        outputs, product = (difference(a, b) for a, b in zip(now, (self.outputs, self.product), strict=True))
        tolerance = _tolerance(network)
        if outputs <= tolerance and product <= tolerance:
            return None
        return (
            f"on {num_rows(self.inputs)} of the training data its outputs differ by {outputs:.2g} of their size, and "
            f"its derivatives by {product:.2g}"
        )


def _some_inputs(data: TrainingData, most: int) -> Any:
    """Few data, from the first to the last; the first ones of data that are read in order."""
    first = data.inputs(torch.arange(1))
    num = max(1, min(_NUM_DATA, most, data.num_data, _MOST_BYTES // max(1, num_bytes(first))))
    step = 1 if data.in_order else data.num_data // num
    return data.inputs(torch.arange(num) * step)


def _tolerance(network: Linearisation) -> float:
    """The relative difference that is none."""
    return max(_TOLERANCE, rounding(network.module_dtype))


@solving()
def _computed(network: Linearisation, x: Any) -> tuple[Tensor, Tensor]:
    """Outputs and product, on a CPU in float64."""
    # Without autocast, which is a setting of the method: it may be another one after `load`.
    plain = network.with_names(network.names)
    plain.shell.autocast, plain.products = None, {"jvp": 0, "vjp": 0}
    x = place(x, plain.device, plain.dtype)
    signs = torch.randint(2, (plain.num_parameters,), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    v = (2 * signs - 1).to(plain.device, plain.dtype)
    # With a graph outputs are computed as products are; without one, in the precision that the user has set.
    rows = plain(x, graph=True).detach().reshape(num_rows(x), -1), plain.jvp(x, v[None])[0]
    step = math.ceil(rows[0].shape[1] / _MOST_OUTPUTS) or 1
    outputs, product = (of[:, ::step].double().cpu() for of in rows)
    return outputs, product
