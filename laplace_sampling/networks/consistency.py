"""Whether a network is what all that follows takes it for: a function of each datum, with one derivative."""

from typing import Any

import torch
from torch import Tensor

from laplace_sampling.data.batches import num_rows, place, take
from laplace_sampling.networks.linearisation import Linearisation

__all__ = ["check_consistency"]

# What may come of rounding, as a power of the precision of the numbers: 2e-3 in float32, 0.1 in bfloat16.
_EXPONENT = 0.4
# How far a datum by itself may be from one in a batch: layers quantised dynamically take their range from the batch.
_COUPLING = 0.05


def check_consistency(network: Linearisation, x: Any) -> None:
    r"""Raise if rows of a batch act on each other, or if products by forward and reverse mode are not adjoint.

    A datum by itself must have the outputs and the product `φ v` that it has behind another one, to 5 %; and for random
    `u` and `v` it must be that `⟨u, φv⟩ = ⟨φᵀu, v⟩`, of two data and of one: torch has kernels whose derivatives are
    wrong for one only. What fails is computed in float64 before it is believed: a unit of
    almost no input may be on in one pass and off in another. Products are not counted.

    Args:
        network: the linearised network.
        x: inputs, of which the first two are taken; where the network fails on these, it is run on all.

    Raises:
        ValueError: if either is not so, or if the network fails on so few data but not on all. What else it raises is
            raised as it is.
    """
    everything, x = x, take(x, slice(0, 2))
    counts = dict(network.products)
    try:
        try:
            problem = _problem(network, x)
        except _Fails as failure:
            network(everything)
            raise ValueError(str(failure)) from failure.__cause__
        if problem is not None and network.dtype != torch.float64:
            problem = _in_float64(network, x, problem)
    finally:
        network.products.update(counts)
    if problem is not None:
        raise ValueError(problem)


class _Fails(Exception):
    """The network does not run on few data."""


def _problem(network: Linearisation, x: Any) -> str | None:
    """What is wrong, in words."""
    name, generator = type(network.module).__name__, torch.Generator().manual_seed(0)
    v = torch.randn(2, network.num_parameters, generator=generator).to(network.device, network.dtype)
    alone = take(x, slice(-1, None))
    try:
        outputs, own = (network(part).reshape(num_rows(part), -1) for part in (x, alone))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _Fails(
            f"{name} runs on the first batch of the data, but not on one or two of them: {type(error).__name__}, "
            f"{error} {_INDEPENDENT}"
        ) from error
    product, by_itself = network.jvp(x, v), network.jvp(alone, v)
    if not all(bool(values.isfinite().all()) for values in (outputs, own, product, by_itself)):
        return None  # the fit says what is not finite
    dtype = network.module_dtype if network.autocast is None else network.autocast
    allowed = torch.finfo(dtype).eps ** _EXPONENT
    for what, together, single in (("outputs", outputs[-1:], own), ("products `φv`", product[:, -1:], by_itself)):
        whole = outputs if what == "outputs" else product
        if not _near(single, together, whole, max(allowed, _COUPLING)):
            off = float((single - together).norm() / whole.norm())
            return (
                f"What {name} gives for a datum depends on the other data of its batch: the {what} of the second datum "
                f"by itself and beside the first differ by {off:.2g} of their size. {_INDEPENDENT}"
            )
    u = torch.randn(product.shape, generator=generator).to(product)
    for data, pushed, of in ((x, product, u), (alone, by_itself, u[:, -1:])):
        left, right = (of * pushed).sum((1, 2)), (v * network.vjp(data, of)).sum(1)
        if _near(left, right, pushed, allowed):
            continue
        return (
            f"The Jacobian products of {name} by forward and by reverse mode are not of the same Jacobian: "
            f"⟨u, φv⟩ = {float(left[0]):.6g}, but ⟨φᵀu, v⟩ = {float(right[0]):.6g} for random u and v. "
            f"{_ANOTHER if network.lacking is None else _LACKING.format(network.lacking)} Replace it, or choose "
            "weights after it with `parameters=`."
        )
    return None


_INDEPENDENT = (
    "Rows must be independent data: leave out what is taken over the batch, such as means over its first axis or "
    "`BatchNorm(track_running_stats=False)`, and give what belongs together as one datum, graphs as "
    "[graphs, nodes, ...]."
)


_ANOTHER = (
    "Some operation has another derivative in one of them, as by a custom `autograd.Function` or a gradient hook."
)
_LACKING = (
    "An operation has no forward derivative, and its reverse one cannot be differentiated in its place, as where it "
    "is `once_differentiable` or goes through numpy: {}."
)


def _near(a: Tensor, b: Tensor, size: Tensor, allowed: float) -> bool:
    return float((a - b).norm()) <= allowed * float(size.norm())


def _in_float64(network: Linearisation, x: Any, problem: str) -> str | None:
    """What is wrong in float64, where the network can be computed so."""
    try:
        precise = network.in_float64()
        wide = place(x, network.device, torch.float64)
        if precise(wide).dtype != torch.float64:
            return problem
        return _problem(precise, wide)
    except Exception:  # a network may hold anything: one that cannot be copied or computes in its own dtype
        return problem
