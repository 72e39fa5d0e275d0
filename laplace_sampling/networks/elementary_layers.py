"""Layers from elementary operations, whose kernels in torch lack a derivative or have a wrong one.

Each function has the arguments of the one of torch whose place it takes; `ELEMENTARY_LAYERS` says which.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map


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

    That has a wrong pullback: see `derivative_rules.batch_norm`.
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
