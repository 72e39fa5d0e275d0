r"""Which operations of a network use its random weights, and the gradient of each datum in these weights.

Linear layers, convolutions and normalisations apply a weight at many places `t` of a datum `i`. The gradient of a
function of the outputs in the weights `[m, k]` of one of `q` groups is

    D_i = Σ_t g_it a_itᵀ,

with the gradient `g` in the output of the operation and its inputs `a` (a one is appended for the bias). The operations
are watched, not the modules: a weight that a user's own module gives to `F.linear` is seen as well.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from laplace_sampling.networks.elementary_layers import BatchNormCall

# `g`, `[n, q, m, T]`, and `a`, `[n, q, k, T]`.
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Fold:
    """Where the data are in a tensor: along one axis, whose index is `datum · r + place` or `place · n + datum`."""

    axis: int
    places_first: bool

    def fits(self, shape: torch.Size, num_data: int) -> bool:
        """Whether so many data can be there in a tensor of a shape."""
        return shape[self.axis] % num_data == 0

    def __call__(self, x: Tensor, num_data: int) -> Float[Tensor, "n ..."]:
        """The tensor with the data along an axis of their own, the first."""
        sizes = (-1, num_data) if self.places_first else (num_data, -1)
        return x.unflatten(self.axis, sizes).movedim(self.axis + self.places_first, 0)


def folds(shape: torch.Size, leading: int, num_data: int) -> list[Fold]:
    """All places that the data may have among the first axes of a shape."""
    both = [Fold(axis, places_first) for axis in range(leading) for places_first in (False, True)]
    return [fold for fold in both if fold.fits(shape, num_data)]


@dataclass(frozen=True)
class _Operation:
    """How an operation uses a weight.

    Attributes:
        weight, bias: its arguments; the bias may be `None`.
        leading: how many axes of its output may hold the data.
        pair: `(gradient in the output, whether the bias is random, fold, number of data) ↦ (g, a)`.
    """

    weight: Tensor | None
    bias: Tensor | None
    leading: int
    pair: Callable[[Tensor, bool, Fold, int], Pair]


@dataclass(frozen=True)
class Use:
    """One operation of a run of the network that takes a random weight.

    Attributes:
        names: of the weight, and of the bias if that is random.
        edge: its output in the graph.
        shape: of the output.
        leading: how many axes of the output may hold the data.
    """

    names: tuple[str, ...]
    edge: GradientEdge
    shape: torch.Size
    leading: int
    _pair: Callable[[Tensor, bool, Fold, int], Pair]

    def pair(self, gradient: Tensor, fold: Fold, num_data: int, dtype: torch.dtype) -> Pair:
        """`g` and `a` of each datum from the gradient in the output."""
        g, a = self._pair(gradient, len(self.names) > 1, fold, num_data)
        return g.to(dtype), a.to(dtype)


class WeightUses(TorchFunctionMode):
    """Keeps the operations inside that take weights.

    Attributes:
        weights: the random weights in the graph, by name.
        uses: in the order of the calls.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.weights, self.uses = weights, list[Use]()
        self._names = {id(weight): name for name, weight in weights.items()}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            # A function mode sees the outermost call only.
            with torch._C.DisableTorchFunction(), self._linear_inside():
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if func in _OPERATIONS:
            self._keep(_OPERATIONS[func](*args, **kwargs), output)
        return output

    def _keep(self, operation: _Operation | None, output: Tensor) -> None:
        if operation is not None and id(operation.weight) in self._names and output.requires_grad:
            of_bias = [self._names[id(operation.bias)]] if id(operation.bias) in self._names else []
            names = (self._names[id(operation.weight)], *of_bias)
            # An edge, not the output: the next module may change that in place, as `ReLU(inplace=True)` does.
            self.uses.append(Use(names, get_gradient_edge(output), output.shape, operation.leading, operation.pair))

    @contextmanager
    def _linear_inside(self) -> Iterator[None]:
        """Keeps calls of `F.linear` by functions of torch."""
        plain = F.linear

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            output = plain(input, weight, bias)
            self._keep(_linear(input, weight, bias), output)
            return output

        try:
            F.linear = linear
            yield
        finally:
            F.linear = plain


# Operations -----------------------------------------------------------------------------------------------------------


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Operation:
    x = input.detach()

    def pair(gradient: Tensor, with_bias: bool, fold: Fold, num_data: int) -> Pair:
        a, g = (fold(t, num_data).reshape(num_data, 1, -1, t.shape[-1]).mT for t in (x, gradient))
        return g, torch.cat([a, torch.ones_like(a[:, :, :1])], dim=2) if with_bias else a

    return _Operation(weight, bias, x.dim() - 1, pair)


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Operation | None:
    x, axes = input.detach(), weight.dim() - 2
    if x.dim() != weight.dim():  # a single datum without an axis
        return None

    def pair(gradient: Tensor, with_bias: bool, fold: Fold, num_data: int) -> Pair:
        patches = _patches(x, weight.shape[2:], _each(stride, axes), padding, _each(dilation, axes), groups, with_bias)
        return tuple(
            # Data, places of the fold, groups, channels, places: all places go last.
            fold(t, num_data).movedim(1, -2).flatten(-2)
            for t in (gradient.unflatten(1, (groups, -1)).flatten(3), patches)
        )  # pyright: ignore[reportReturnType]

    return _Operation(weight, bias, 1, pair)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    """An argument of a convolution for each axis."""
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * axes if len(value) == 1 else value


def _patches(
    x: Tensor,
    kernel: torch.Size,
    stride: tuple[int, ...],
    padding: Any,
    dilation: tuple[int, ...],
    groups: int,
    with_bias: bool,
) -> Float[Tensor, "N q k T"]:
    """The inputs of a convolution at each place, with a one for the bias."""
    axes = len(kernel)
    reach = [d * (size - 1) for d, size in zip(dilation, kernel, strict=True)]
    if isinstance(padding, str):
        before = [total // 2 if padding == "same" else 0 for total in reach]
        after = [total - total // 2 if padding == "same" else 0 for total in reach]
    else:
        before = after = list(_each(padding, axes))
    if any(before) or any(after):
        x = F.pad(x, [size for pads in zip(reversed(before), reversed(after), strict=True) for size in pads])
    for axis in range(axes):  # views only
        x = x.unfold(axis + 2, reach[axis] + 1, stride[axis])[..., :: dilation[axis]]
    # [N, c, *places, *kernel] in groups, with the places last.
    x = x.unflatten(1, (groups, -1)).permute(0, 1, 2, *range(3 + axes, 3 + 2 * axes), *range(3, 3 + axes))
    size, places = math.prod(x.shape[2:-axes]), x.shape[-axes:]
    rows = x.new_ones(len(x), groups, size + with_bias, *places)
    rows[:, :, :size].unflatten(2, x.shape[2:-axes]).copy_(x)
    return rows.flatten(3)


def _normalisation(
    x: Tensor, normalised: Callable[[], Tensor], of_channels: bool, *given: Tensor | None
) -> _Operation | None:
    """`w ⊙ x̂ + b`; of channels, on axis 1, or of the last axes."""
    weight, bias = given
    if weight is None:
        return None
    leading = 1 if of_channels else x.dim() - weight.dim()

    def pair(gradient: Tensor, with_bias: bool, fold: Fold, num_data: int) -> Pair:
        each = [gradient * normalised(), gradient] if with_bias else [gradient * normalised()]
        if of_channels:
            each = [t.movedim(1, -1) for t in each]
        sums = [fold(t, num_data).reshape(num_data, -1, weight.numel()).sum(1) for t in each]
        a = torch.stack(sums, dim=-1)[..., None]
        return torch.ones_like(a[:, :, :1]), a

    return _Operation(weight, bias, leading, pair)


def _batch_norm(*args: Any, **kwargs: Any) -> _Operation | None:
    call = BatchNormCall(*args, **kwargs)
    if call.training:  # a datum has no output of its own
        return None
    x = call.input.detach()
    plain = BatchNormCall(x, call.running_mean, call.running_var, eps=call.eps)
    return _normalisation(x, lambda: F.batch_norm(*plain), True, call.weight, call.bias)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> _Operation | None:
    x = input.detach()
    return _normalisation(x, lambda: F.group_norm(x, num_groups, eps=eps), True, weight, bias)


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> _Operation | None:
    x = input.detach()
    return _normalisation(x, lambda: F.layer_norm(x, normalized_shape, eps=eps), False, weight, bias)


_OPERATIONS: dict[Callable, Callable[..., _Operation | None]] = {
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.batch_norm: _batch_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
}
