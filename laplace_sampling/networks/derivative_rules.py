"""The derivatives that Jacobian products take, switched inside contexts only.

Four things are not as a Jacobian product needs them in torch:

- Some layers have no forward derivative (fused attention, recurrent layers on oneDNN and cuDNN, fused weight
  normalisation, embedding bags), or two derivatives that are not the same. The functions of `elementary_layers` take
  their places, also of `torch.cond` and its like.
- Forward derivatives pass through `torch.no_grad()`, where reverse ones stop. Here both stop, else the two products
  would not be adjoint.
- Reentrant checkpoints and the weights that a product gives to a module know nothing of each other: see
  `_no_reentrant_checkpoints`.
- The forward derivative of a product is `ȧ b + a ḃ`, and torch multiplies zeros where a factor has no tangent, such as
  inputs and weights that are not random. That is a third of the forward derivative of a frozen layer, of the first
  layer, and of one that takes the adjacency matrix of a graph. The rules of this file leave these products out.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from laplace_sampling.networks.branches import QUESTIONS
from laplace_sampling.networks.elementary_layers import (
    CONTROL_FLOW,
    ELEMENTARY_LAYERS,
    group_norm,
    instance_norm,
    layer_norm,
)
from laplace_sampling.networks.tangents import BatchNormCall, batch_norm_tangents

# Contexts -------------------------------------------------------------------------------------------------------------


@cache
def _load_decompositions() -> None:
    """Imports what torch needs for the first dual number, without the warning that it uses `torch.jit`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        from torch._decomp import decompositions_for_jvp  # noqa: F401


@contextmanager
def forward_mode_kernels(layers: bool = True) -> Iterator[None]:
    """Kernels that have forward-mode derivatives (pytorch #117629, #128971).

    Without `layers`, `ComposedLayers` is left to the caller: it takes time for every call of torch.
    """
    _load_decompositions()
    fastpath, forward = torch.backends.mha.get_fastpath_enabled(), torch._C._is_fwd_grad_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with (
            sdpa_kernel([SDPBackend.MATH]),
            _no_reentrant_checkpoints(),
            ComposedLayers() if layers else nullcontext(),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        torch._C._set_fwd_grad_enabled(forward)


@contextmanager
def _no_reentrant_checkpoints() -> Iterator[None]:
    """Reentrant checkpoints keep the graph of their part, so that it has the weights that it ran with.

    Their backward pass runs the part again, with the weights that the module has then, and adds gradients to these.
    """
    kind = torch.utils.checkpoint.CheckpointFunction
    outermost = "apply" not in vars(kind)
    try:
        if outermost:
            kind.apply = staticmethod(lambda part, preserve_rng_state, *args: part(*args))
        yield
    finally:
        if outermost:
            del kind.apply


@contextmanager
def differentiable(graph: bool) -> Iterator[None]:
    """Jacobian products inside have derivatives if `graph` is true."""
    with torch.set_grad_enabled(graph), _ComposedNorms() if graph else nullcontext():
        yield


class ComposedLayers(TorchFunctionMode):
    """Calls functions with the derivatives of this file and of `elementary_layers` in place of those of torch."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            # `torch.no_grad()` in the network stops forward derivatives as it stops reverse ones.
            torch._C._set_fwd_grad_enabled(*args)
        return _REPLACED.get(func, func)(*args, **kwargs)


class _ComposedNorms(TorchFunctionMode):
    """Layer and group normalisation from elementary operations.

    The second derivatives of torch's own take the mean and variance of an input for constants (torch 2.15): a Jacobian
    product through them has wrong derivatives in the input, silently.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return {F.layer_norm: layer_norm, F.group_norm: group_norm}.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def linear_inside(function: Callable[..., Tensor]) -> Iterator[None]:
    """`function` in place of `F.linear` inside attention, of which a function mode sees the outermost call only."""
    before = F.linear
    try:
        F.linear = function
        yield
    finally:
        F.linear = before


def _attention(*args: Any, **kwargs: Any) -> Any:
    with linear_inside(_linear):
        return F.multi_head_attention_forward(*args, **kwargs)


def _composed(function: Callable) -> Callable:
    """A function that calls others of the network, in which layers are replaced as well."""

    def composed(*args: Any, **kwargs: Any) -> Any:
        with ComposedLayers():
            return function(*args, **kwargs)

    return composed


# Rules ----------------------------------------------------------------------------------------------------------------


def _dual_parts(tensor: Any) -> tuple[Any, Tensor | None]:
    """A tensor without its tangent, and the tangent; sparse tensors have none."""
    return (tensor, None) if tensor is None or tensor.layout != torch.strided else unpack_dual(tensor)


def _are_plain(*tensors: Tensor | None) -> bool:
    """Whether tangents can be asked for: subclasses may not have them, nor tensors in a `vmap` of the network's own."""
    return all(t is None or (type(t) in (Tensor, nn.Parameter) and not is_batchedtensor(t)) for t in tensors)


def _product(func: Callable, a: Tensor, b: Tensor) -> Tensor | None:
    """`func(a, b)`, linear in both, as a dual number; `None` unless just one of them has a tangent."""
    if not _are_plain(a, b):
        return None
    (a, a_dot), (b, b_dot) = _dual_parts(a), _dual_parts(b)
    if (a_dot is None) == (b_dot is None):
        return None
    return make_dual(func(a, b), func(a_dot, b) if b_dot is None else func(a, b_dot))


def bilinear(func: Callable) -> Callable:
    """The rule of `func(a, b)`, which is linear in either, as `torch.matmul`."""

    def rule(*args: Any, **kwargs: Any) -> Tensor:
        product = _product(func, *args) if len(args) == 2 and not kwargs else None
        return func(*args, **kwargs) if product is None else product

    return rule


def affine(func: Callable, trailing: int) -> Callable:
    """The rule of `func(input, weight, bias, ...)`, a product and a bias, as `F.linear`.

    Args:
        func: of torch.
        trailing: how many axes of the output come after that of the bias.
    """

    def rule(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if not _are_plain(input, weight, bias):
            return func(input, weight, bias, *args, **kwargs)
        (x, x_dot), (w, w_dot), (b, b_dot) = _dual_parts(input), _dual_parts(weight), _dual_parts(bias)
        if x_dot is w_dot is b_dot is None or (x_dot is not None and w_dot is not None):
            return func(input, weight, bias, *args, **kwargs)
        # One factor has a tangent at most, so the tangent is one product: torch would take two.
        value = func(x, w, b, *args, **kwargs)
        if w_dot is not None:
            tangent = func(x, w_dot, b_dot, *args, **kwargs)
        elif x_dot is not None:
            tangent = func(x_dot, w, b_dot, *args, **kwargs)
        else:
            assert b_dot is not None
            tangent = b_dot.reshape(*b_dot.shape, *[1] * trailing).to(value.dtype).expand_as(value)
        return make_dual(value, tangent)

    return rule


_affine_linear = affine(F.linear, 0)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with all axes of the data as one: torch else repeats the tangent of a weight along the first axis.

    The derivatives in the weights of three axes and more are up to six times slower.
    """
    if input.dim() < 3:
        return _affine_linear(input, weight, bias)
    return _affine_linear(input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])


def batch_norm(*args: Any, **kwargs: Any) -> Tensor:
    """`F.batch_norm`, for a single datum from elementary operations.

    The kernel's pullback is wrong for a single datum on a CPU where cotangents are contiguous in another order of axes
    than the input, as those from a transposition are (torch 2.15).
    """
    call = BatchNormCall(*args, **kwargs)
    input, running_mean, running_var, weight, bias, training, momentum, eps = call
    one_number_a_channel = training and input.dim() < 3  # an error of torch
    if len(input) <= 1 and training == (running_mean is None) and not one_number_a_channel:
        return instance_norm(*call)
    if training or running_mean is None or running_var is None:
        return F.batch_norm(*args, **kwargs)
    if not _are_plain(input, running_mean, running_var, weight, bias):
        return F.batch_norm(*args, **kwargs)
    if all(_dual_parts(t)[1] is None for t in (input, weight, bias)):
        return F.batch_norm(*args, **kwargs)
    mean, var = unpack_dual(running_mean).primal, unpack_dual(running_var).primal  # constants, as for torch
    return _fixed_batch_norm(input, mean, var, weight, bias, momentum, eps)


def _fixed_batch_norm(
    input: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, momentum: float, eps: float
) -> Tensor:
    """Batch normalisation with fixed statistics, whose tangent takes three passes over the data; torch takes seven."""
    (x, x_dot), (w, w_dot), (b, b_dot) = _dual_parts(input), _dual_parts(weight), _dual_parts(bias)
    value = F.batch_norm(x, mean, var, w, b, False, momentum, eps)
    single = [None if t is None else t[None] for t in (x_dot, w_dot, b_dot)]
    return make_dual(value, batch_norm_tangents(x, mean, var, w, eps, *single)[0].to(value.dtype))


def _torch_batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, *options: Any
) -> Tensor:
    """The order of `aten`, whose last argument is for cuDNN."""
    return batch_norm(input, mean, var, weight, bias, *options[:-1])


_CONVOLUTIONS = [(F.conv1d, F.conv_transpose1d), (F.conv2d, F.conv_transpose2d), (F.conv3d, F.conv_transpose3d)]
_MATMULS = [getattr(owner, name) for owner in (torch, Tensor) for name in ("matmul", "mm", "bmm")] + [torch.sparse.mm]

# What `ComposedLayers` calls in place of functions of torch. To add a missing derivative, write the function from
# elementary operations in `elementary_layers`, or a rule above, and name it in the dictionary there or here.
# Exported networks call the functions of `aten`.
_REPLACED: dict[Callable, Callable] = {
    **ELEMENTARY_LAYERS,
    F.linear: _linear,
    **{func: affine(func, axes) for axes, pair in enumerate(_CONVOLUTIONS, 1) for func in pair},
    **{func: bilinear(func) for func in _MATMULS},
    F.multi_head_attention_forward: _attention,
    **QUESTIONS,
    **{operation: _composed(function) for operation, function in CONTROL_FLOW.items()},
    F.batch_norm: batch_norm,
    **dict.fromkeys((torch.batch_norm, torch.ops.aten.batch_norm.default), _torch_batch_norm),
}
