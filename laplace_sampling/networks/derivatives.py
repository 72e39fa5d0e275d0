"""The derivatives that Jacobian products take, switched inside contexts only.

Four things are not as a Jacobian product needs them in torch:

- Some layers have no forward derivative (fused attention, recurrent layers on oneDNN and cuDNN, fused weight
  normalisation, embedding bags), or two derivatives that are not the same. The functions in
  `ELEMENTARY_LAYERS` take their places, also of `torch.cond` and its like: each has the arguments of the one of torch.
- Forward derivatives pass through `torch.no_grad()`, where reverse ones stop. Here both stop, else the two products
  would not be adjoint.
- Reentrant checkpoints and the weights that a product gives to a module know nothing of each other: see
  `_no_reentrant_checkpoints`.
- The forward derivative of a product is `ȧ b + a ḃ`, and torch multiplies zeros where a factor has no tangent, such as
  inputs and weights that are not random. That is a third of the forward derivative of a frozen layer, of the first
  layer, and of one that takes the adjacency matrix of a graph. The rules of this file leave these products out.

`by_branch` is for networks that branch on values of a datum, under `vmap` over the data. torch has no value for a
question such as `if mask.all()` of many data at once. Where the answer is the same for all, it is given; where it is
not, the data are shared out by their answers, each part is computed by itself, and asked again at the next branch.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from laplace_sampling.networks.tangents import BatchNormCall, batch_norm_tangents

Weights = dict[str, Tensor]


class _DataDiffer(RuntimeError):
    """Data together of which the network asks a value that is not the same.

    Attributes:
        values: `[n]`, of each of them.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__("vmap: data take different branches")
        self.values = values


def _of_all_data(tensor: Tensor) -> Tensor | None:
    """The numbers, one for each datum, of a tensor that stands for all of them; `None` for what is none."""
    while is_functorch_wrapped_tensor(tensor) and not is_batchedtensor(tensor):
        tensor = get_unwrapped(tensor)
    if not is_batchedtensor(tensor) or tensor.numel() != 1:
        return None
    numbers = get_unwrapped(tensor)
    return None if is_functorch_wrapped_tensor(numbers) else numbers.detach()


def _same_for_all(question: Callable) -> Callable:
    def answer(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        numbers = _of_all_data(tensor)
        if numbers is None:
            return question(tensor, *args, **kwargs)
        with temporarily_clear_interpreter_stack():  # else torch makes tensors of all data of them again
            numbers = numbers.flatten()
            if len(numbers) > 1 and not bool((numbers == numbers[0]).all()):
                raise _DataDiffer(numbers.cpu())
            return question(numbers[0].reshape(tensor.shape), *args, **kwargs)

    return answer


# Functions of torch that take a value out of a tensor, and what is called in their places.
QUESTIONS: dict[Callable, Callable] = {
    question: _same_for_all(question)
    for question in (
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__index__,
        Tensor.__float__,
        Tensor.item,
        Tensor.tolist,
        Tensor.is_nonzero,
        torch.is_nonzero,
    )
}


def by_branch(product: Callable[[list[Tensor]], Weights], tensors: list[Tensor], most: int) -> Weights:
    """`product` of the rows of tensors, `[n, ...]` each, apart for data that take other branches of the network.

    Args:
        product: by name, with a row for each of those of the tensors.
        tensors: the data.
        most: data at once.
    """
    if (num := len(tensors[0])) > most:
        chunks = zip(*(t.split(most) for t in tensors), strict=True)
        return _joined([by_branch(product, list(chunk), most) for chunk in chunks])
    try:
        return product(tensors)
    except _DataDiffer as differ:
        _, branch = differ.values.unique(return_inverse=True)
    order = branch.argsort(stable=True)
    parts = [[t[rows] for t in tensors] for rows in order.split(branch.bincount().tolist())]
    rows = _joined([by_branch(product, part, num) for part in parts])
    return {name: of_name[order.argsort()] for name, of_name in rows.items()}


def _joined(parts: list[Weights]) -> Weights:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@contextmanager
def _composed_recurrence() -> Iterator[None]:
    """Recurrent layers step by step, by the code that torch takes where neither library has a kernel."""
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


def _recurrent(func: Callable, *args: Any, **kwargs: Any) -> Any:
    with _composed_recurrence():
        return func(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / ‖v‖`, a norm for each index of `dim`; one of all for -1."""
    # `dim` of -1 is torch's sign for one norm of the whole tensor.
    axes = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding` with the same derivative by both modes.

    torch's reverse derivative leaves out the row of padding, which its forward one does not, and may be scaled.
    """
    _check_norm(max_norm, "Embedding")
    # `scale_grad_by_freq` and `sparse` say how gradients are used by an optimiser, not what the derivative is.
    rows = F.embedding(input, weight)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight))[..., None], rows.detach(), rows)


def _check_norm(max_norm: float | None, layer: str) -> None:
    if max_norm is not None:
        raise ValueError(
            f"`nn.{layer}(max_norm=...)` changes its weights in the forward pass. Renormalise them once, and set "
            "`max_norm` to None."
        )


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    _check_norm(max_norm, "EmbeddingBag")
    bags, num = _bags(input, offsets, include_last_offset)
    indices = input.reshape(-1).long()
    rows = F.embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    if padding_idx is not None:
        padding_idx %= len(weight)
        rows, bags = rows[indices != padding_idx], bags[indices != padding_idx]
    # Bags are sums by index, not padded to one length: their lengths differ.
    if mode == "max":
        empty = rows.new_zeros(rows.shape[1])
        return torch.stack([rows[bags == n].amax(0) if bool((bags == n).any()) else empty for n in range(num)])
    # Empty bags have the sum zero, and the mean zero as well.
    total = rows.new_zeros(num, rows.shape[1]).index_add(0, bags, rows)
    return total if mode == "sum" else total / bags.bincount(minlength=num).clamp(min=1)[:, None]


def _bags(input: Tensor, offsets: Tensor | None, include_last_offset: bool) -> tuple[Tensor, int]:
    """The bag of each index, and how many bags there are."""
    if input.dim() == 2:
        return torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1]), len(input)
    assert offsets is not None
    starts = offsets[:-1] if include_last_offset else offsets
    positions = torch.arange(len(input), device=input.device)
    return torch.searchsorted(starts.contiguous(), positions, right=True) - 1, len(starts)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """`torch.cdist` from norms: its kernel has no forward derivative and a wrong pullback under `vmap` (torch 2.15)."""
    return torch.linalg.vector_norm(x1[..., :, None, :] - x2[..., None, :, :], ord=p, dim=-1)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """`torch.prelu`, whose kernel has a wrong pullback under two `vmap` (torch 2.15)."""
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype == torch.float32:  # as torch's own does
        input = input.to(torch.get_autocast_dtype(device))
    slopes = weight
    if weight.numel() == 1:
        slopes = weight.reshape(())
    elif input.dim() >= 2:  # a slope for each channel, the second axis
        slopes = weight.reshape(-1, *[1] * (input.dim() - 2))
    return torch.where(input > 0, input, slopes.to(input.dtype) * input)


def _view_as_complex(pairs: Tensor) -> Tensor:
    """`torch.view_as_complex`, which fails on tangents that are parts of a larger tensor, as those of samples are."""
    return torch.complex(*pairs.unbind(-1))


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """`F.instance_norm`, which torch computes as the batch normalisation of one datum with the channels of all.

    That has a wrong pullback: see `batch_norm`.
    """
    dtype = input.dtype
    input = input.to(torch.promote_types(dtype, torch.float32))  # variances of half precision overflow
    if use_input_stats or running_mean is None or running_var is None:
        axes = tuple(range(2, input.dim()))
        mean, var = input.mean(axes), input.var(axes, correction=0)
    else:
        mean, var = running_mean[None], running_var[None]
    mean, var = mean.to(input.dtype), var.to(input.dtype)
    # One factor for each channel, so that scaling takes one pass over the data.
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    shape = (-1, input.shape[1], *[1] * (input.dim() - 2))
    scaled = (input - mean.reshape(shape)) * scale.reshape(shape)
    return (scaled if bias is None else scaled + bias.reshape(shape[1:])).to(dtype)


def _torch_instance_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, *options: Any
) -> Tensor:
    """The order of `aten`, whose last argument is for cuDNN."""
    return instance_norm(input, mean, var, weight, bias, *options[:-1])


def _grouped_mm(
    rows: Tensor,
    weights: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch._grouped_mm`: each group of rows times its matrix, and zero after the last group.

    `offs` are the rows where groups end.
    """
    if offs is None or rows.dim() != 2 or weights.dim() != 3:
        return torch._grouped_mm(rows, weights, offs, bias, out_dtype)  # pyright: ignore
    # Products of slices of rows have the derivatives that the kernel lacks.
    ends = offs.tolist()
    parts = rows.tensor_split(ends)
    product = torch.cat([*[a @ b for a, b in zip(parts, weights, strict=False)], parts[-1] @ weights[0] * 0])
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


# Functions of torch and what is called in their places; exported networks call those of `aten`.
ELEMENTARY_LAYERS: dict[Callable, Callable] = {
    **{func: partial(_recurrent, func) for func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    torch._weight_norm: _weight_norm,  # pyright: ignore
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    **dict.fromkeys((torch.cdist, torch.ops.aten.cdist.default), _cdist),
    **dict.fromkeys((torch.prelu, Tensor.prelu, torch.ops.aten.prelu.default), _prelu),
    torch.view_as_complex: _view_as_complex,
    F.instance_norm: instance_norm,
    **dict.fromkeys((torch.instance_norm, torch.ops.aten.instance_norm.default), _torch_instance_norm),
}


if hasattr(torch, "_grouped_mm"):  # not in torch 2.6
    ELEMENTARY_LAYERS[torch._grouped_mm] = _grouped_mm  # pyright: ignore


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    # The variance is that of the centred input, which does not cancel for inputs far from zero.
    centred = input - input.mean(axes, keepdim=True)
    scaled = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    # A group of channels is normalised as a layer.
    grouped = input.reshape(input.shape[0], num_groups, -1)  # `len` would fix the size of exported batches
    scaled = layer_norm(grouped, grouped.shape[-1:], eps=eps).reshape(input.shape)
    channels = (1, -1, *[1] * (input.dim() - 2))
    scaled = scaled if weight is None else scaled * weight.reshape(channels)
    return scaled if bias is None else scaled + bias.reshape(channels)


# Operations that call functions, as the Python that they stand for: torch lacks their derivatives (2.14) ------------


def _cond(pred: Tensor | bool, true_fn: Callable, false_fn: Callable, operands: Sequence[Any], **_: Any) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _scan(
    combine: Callable, init: Sequence[Tensor], xs: Sequence[Tensor], more: Sequence[Any], **_: Any
) -> list[Tensor]:
    """What is carried at the end, and the other outputs of each step."""
    carried, outputs = list(init), []
    for parts in zip(*(x.unbind() for x in xs), strict=True):
        results = combine(*carried, *parts, *more)
        carried = list(results[: len(init)])
        outputs.append(results[len(init) :])
    return carried + [torch.stack(steps) for steps in zip(*outputs, strict=True)]


def _map(function: Callable, xs: Sequence[Tensor], more: Sequence[Any], **_: Any) -> Any:
    results = [function(*parts, *more) for parts in zip(*(x.unbind() for x in xs), strict=True)]
    return tree_map(lambda *rows: torch.stack(rows), *results)


def _while_loop(
    goes_on: Callable, body: Callable, carried: Sequence[Any], more: Sequence[Any], **_: Any
) -> tuple[Any, ...]:
    while goes_on(*carried, *more):
        carried = body(*carried, *more)
    return tuple(carried)


def _num_positional(function: Callable) -> int:
    parameters = inspect.signature(function).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


_FUNCTIONS = {"cond": _cond, "scan": _scan, "map_impl": _map, "while_loop": _while_loop}


# Operations and what is called in their places, with the same arguments; `scan` has others in torch 2.6.
CONTROL_FLOW: dict[Callable, Callable] = {
    operation: function
    for name, function in _FUNCTIONS.items()
    if (operation := getattr(torch.ops.higher_order, name, None)) is not None
    and _num_positional(operation.__call__) == _num_positional(function)
}


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
    """Calls functions with the derivatives of this file in place of those of torch."""

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
# elementary operations, or a rule above, and name it in one of the dictionaries.
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
