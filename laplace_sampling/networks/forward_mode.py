"""Kernels with the derivatives that Jacobian products take, switched inside a context only.

torch has no forward derivative of fused attention, of recurrent layers on oneDNN and cuDNN, of fused weight
normalisation and of embedding bags, and its two of embeddings with padding are not the same. The same functions from
elementary operations have both. And its forward derivatives pass through `torch.no_grad()` where its reverse ones
stop: here both stop, else the two products would not be adjoint.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import dual_level, make_dual
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from laplace_sampling.networks.tangents import addmm, affine, batch_norm, bilinear, einsum

__all__ = ["ComposedLayers", "differentiable", "forward_mode_kernels", "load_decompositions"]

_LINEAR = affine(F.linear, 0)


@cache
def load_decompositions() -> None:
    """What torch imports at the first dual number, without the warning that it uses `torch.jit`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
        with torch.inference_mode(False), suppress(RuntimeError), dual_level():  # within a level they are there
            make_dual(torch.zeros(1, device="cpu"), torch.zeros(1, device="cpu"))


@contextmanager
def forward_mode_kernels(layers: bool = True) -> Iterator[None]:
    """Kernels that have forward-mode derivatives (pytorch #117629, #128971).

    Without `layers`, `ComposedLayers` is left to the caller: it takes time for every call of torch.
    """
    fastpath, forward = torch.backends.mha.get_fastpath_enabled(), torch._C._is_fwd_grad_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel([SDPBackend.MATH]), ComposedLayers() if layers else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        torch._C._set_fwd_grad_enabled(forward)


@contextmanager
def differentiable(graph: bool) -> Iterator[None]:
    """Whether Jacobian products have derivatives."""
    with torch.set_grad_enabled(graph), _ComposedNorms() if graph else nullcontext():
        yield


@contextmanager
def _composed_recurrence() -> Iterator[None]:
    """Recurrent layers step by step: torch's own, which it takes where neither library does."""
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    try:
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


@contextmanager
def _folded_linear() -> Iterator[None]:
    """`_linear` inside attention, of which a mode sees the outermost call only."""
    before = F.linear
    try:
        F.linear = _linear
        yield
    finally:
        F.linear = before


class ComposedLayers(TorchFunctionMode):
    """Recurrent layers, embeddings and weight normalisation from elementary operations; `no_grad` that stops.

    And linear layers of matrices: derivatives in the weights of three axes and more are up to six times slower.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(*args)
        return _COMPOSED.get(func, func)(*args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Any:
    with _folded_linear():
        return F.multi_head_attention_forward(*args, **kwargs)


def _recurrent(func: Callable, *args: Any, **kwargs: Any) -> Any:
    with _composed_recurrence():
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """With all axes of the data as one: torch else repeats the tangent of a weight for each index of the first."""
    if input.dim() < 3:
        return _LINEAR(input, weight, bias)
    return _LINEAR(input.flatten(0, -2), weight, bias).unflatten(0, input.shape[:-1])


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """`g v / ‖v‖`, a norm for each index of `dim`; one of all for -1."""
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
    """With one derivative by both modes: torch's reverse one leaves out the row of padding, and may be scaled."""
    _check_norm(max_norm, "Embedding")
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
    if input.dim() == 2:
        bags = torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1])
        num = len(input)
    else:
        assert offsets is not None
        starts = offsets[:-1] if include_last_offset else offsets
        num = len(starts)
        bags = torch.searchsorted(starts.contiguous(), torch.arange(len(input), device=input.device), right=True) - 1
    indices = input.reshape(-1).long()
    rows = F.embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    if padding_idx is not None:
        padding_idx %= len(weight)
        rows, bags = rows[indices != padding_idx], bags[indices != padding_idx]
    if mode == "max":
        empty = rows.new_zeros(rows.shape[1])
        return torch.stack([rows[bags == n].amax(0) if bool((bags == n).any()) else empty for n in range(num)])
    total = rows.new_zeros(num, rows.shape[1]).index_add(0, bags, rows)
    if mode == "sum":
        return total
    return total / bags.bincount(minlength=num).clamp(min=1)[:, None]


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """From norms: the kernel has no forward derivative, and its pullback under `vmap` is wrong (torch 2.15)."""
    return torch.linalg.vector_norm(x1[..., :, None, :] - x2[..., None, :, :], ord=p, dim=-1)


def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    """From elementary operations: the kernel's pullback under two `vmap` is wrong (torch 2.15)."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype == torch.float32:  # as torch's own does
        input = input.to(torch.get_autocast_dtype(kind))
    slopes = (
        weight.reshape(())
        if weight.numel() == 1
        else weight
        if input.dim() < 2
        else weight.reshape(-1, *[1] * (input.dim() - 2))
    )
    return torch.where(input > 0, input, slopes.to(input.dtype) * input)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Of one datum, from elementary operations.

    The kernel's pullback is wrong on a CPU where cotangents are contiguous in another order of axes than the input, as
    those from a transposition are (torch 2.15).
    """
    if len(input) > 1 or training != (running_mean is None) or (training and input.dim() < 3):
        return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return _instance_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _torch_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As `_batch_norm`, since for torch it is that of one datum whose channels are those of all."""
    given = input.dtype
    input = input.to(torch.promote_types(given, torch.float32))  # variances of half precision overflow
    if use_input_stats or running_mean is None or running_var is None:
        axes = tuple(range(2, input.dim()))
        mean, var = input.mean(axes), input.var(axes, correction=0)
    else:
        mean, var = running_mean[None], running_var[None]
    mean, var = mean.to(input.dtype), var.to(input.dtype)
    scale = (var + eps).rsqrt() if weight is None else (var + eps).rsqrt() * weight
    shape = (-1, input.shape[1], *[1] * (input.dim() - 2))
    scaled = (input - mean.reshape(shape)) * scale.reshape(shape)
    return (scaled if bias is None else scaled + bias.reshape(shape[1:])).to(given)


def _torch_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _grouped_mm(
    rows: Tensor,
    weights: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Each group of rows times its matrix, `offs` being where groups end; zero after the last."""
    if offs is None or rows.dim() != 2 or weights.dim() != 3:
        return torch._grouped_mm(rows, weights, offs, bias, out_dtype)  # pyright: ignore
    ends = offs.tolist()
    parts = rows.tensor_split(ends)
    product = torch.cat([*[a @ b for a, b in zip(parts, weights, strict=False)], parts[-1] @ weights[0] * 0])
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


_CONVOLUTIONS = [(F.conv1d, F.conv_transpose1d), (F.conv2d, F.conv_transpose2d), (F.conv3d, F.conv_transpose3d)]
_MATMULS = [getattr(owner, name) for owner in (torch, Tensor) for name in ("matmul", "mm", "bmm")] + [torch.sparse.mm]

# What `ComposedLayers` calls in their place; exported networks call those of `aten`.
_COMPOSED: dict[Callable, Callable] = {
    F.linear: _linear,
    **{func: affine(func, n) for n, both in enumerate(_CONVOLUTIONS, 1) for func in both},
    **{func: bilinear(func) for func in _MATMULS},
    torch.addmm: addmm,
    torch.einsum: einsum,
    F.multi_head_attention_forward: _attention,
    **{func: partial(_recurrent, func) for func in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    torch._weight_norm: _weight_norm,  # pyright: ignore
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
    **dict.fromkeys((torch.cdist, torch.ops.aten.cdist.default), _cdist),
    **dict.fromkeys((torch.prelu, Tensor.prelu, torch.ops.aten.prelu.default), _prelu),
    F.batch_norm: _batch_norm,
    **dict.fromkeys((torch.batch_norm, torch.ops.aten.batch_norm.default), _torch_batch_norm),
    F.instance_norm: _instance_norm,
    **dict.fromkeys((torch.instance_norm, torch.ops.aten.instance_norm.default), _torch_instance_norm),
    torch._grouped_mm: _grouped_mm,  # pyright: ignore
}


class _ComposedNorms(TorchFunctionMode):
    """Layer and group normalisation from elementary operations.

    The second derivatives of torch's own take the mean and variance of an input for constants (torch 2.15): a Jacobian
    product through them has wrong derivatives in the input, silently.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.layer_norm:
            return _layer_norm(*args, **(kwargs or {}))
        if func is F.group_norm:
            return _group_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(axes, keepdim=True)
    scaled = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = input.reshape(len(input), num_groups, -1)
    scaled = _layer_norm(grouped, grouped.shape[-1:], eps=eps).reshape(input.shape)
    channels = (1, -1, *[1] * (input.dim() - 2))
    scaled = scaled if weight is None else scaled * weight.reshape(channels)
    return scaled if bias is None else scaled + bias.reshape(channels)
