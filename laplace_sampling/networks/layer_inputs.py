"""Features of a network at several depths: what goes into each of its layers, as a mean over positions.

A layer is here a module that has a matrix (or a kernel) of its own, such as a linear layer, a convolution or a
recurrent layer. Hooks on the private copy see its inputs in the pass by which outputs are computed anyway, so that it
makes no difference whether activations are modules, functions or in place.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from laplace_sampling.data.batches import take
from laplace_sampling.networks.last_layer import has_matrix
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.solving import exclusive

# Features of a layer, whose covariances take the cube of it: with 64, 128 or all of 784 features AUROCs of other
# images differed by .003 at most, by distances within single layers.
WIDTH = 64
# Features of the last layer, where neighbours are looked for: half as many as there are cost .008 of an AUROC.
LAST_WIDTH = 512


@dataclass(frozen=True)
class LayerInput:
    """Where the features of each datum are in the input of a layer.

    Attributes:
        name: of the module.
        axis: of the data, the first, or the second as in sequences by time.
        rows: of that axis for each datum, more than one where positions are folded into it.
        size: how many features there are.
    """

    name: str
    axis: int
    rows: int
    size: int

    def features(self, module: nn.Module, h: Tensor) -> Float[Tensor, "N D"]:
        """Means over all positions of each datum; where there are several, root mean squares as well."""
        h = h.detach().movedim(self.axis, 0)
        h = h if self.rows == 1 else h.unflatten(0, (-1, self.rows))
        if isinstance(module, _ConvNd):
            h = h.movedim(-1 - len(module.kernel_size), -1)
        if h.dim() == 2:
            return h
        positions = tuple(range(1, h.dim() - 1))
        squares = torch.linalg.vector_norm(h, dim=positions) / h[0, ..., 0].numel() ** 0.5
        return torch.cat([_narrowed(h.mean(positions), WIDTH // 2), _narrowed(squares, WIDTH // 2)], 1)


@dataclass(frozen=True)
class Features:
    """Features of some data.

    Attributes:
        layers: in each layer.
        last: of unit length, in the last layer.
    """

    layers: Float[Tensor, "L N W"]
    last: Float[Tensor, "N D"]

    @classmethod
    def of(cls, inputs: Sequence[Float[Tensor, "N D"]]) -> "Features":
        """The features of inputs of layers."""
        last, narrow = _narrowed(inputs[-1], LAST_WIDTH), [_narrowed(h, WIDTH) for h in inputs]
        width = max(h.shape[1] for h in narrow)
        padded = torch.stack([F.pad(h, (0, width - h.shape[1])) for h in narrow])
        # Features that are all zero have no direction.
        return cls(padded, F.normalize(last, dim=-1, eps=torch.finfo(last.dtype).tiny))

    @classmethod
    def joined(cls, parts: Sequence["Features"]) -> "Features":
        """The features of several batches."""
        return cls(
            torch.cat([part.layers for part in parts], 1),
            torch.cat([part.last for part in parts]),
        )

    def last_of(self, num: int) -> "Features":
        """Returns the features of the last `num` data, `num ≥ 1`, of all that the network was run on."""
        return Features(self.layers[:, -num:], self.last[-num:])


def _narrowed(h: Float[Tensor, "N D"], width: int) -> Float[Tensor, "N W"]:
    """Means over neighbouring features, such as flattened positions of a channel, if there are more than `width`."""
    return F.adaptive_avg_pool1d(h[None], width)[0] if h.shape[1] > width else h


def layer_inputs(network: Linearisation, x: Any) -> list[LayerInput]:
    """The layers whose inputs have features of each datum, in the order of their last calls.

    Which axis is that of the data is seen by runs on two and on three of them.

    Raises:
        ValueError: if there are none.
    """
    runs = [_shapes(network, take(x, slice(num))) for num in (2, 3)]
    found = [_layer_input(name, shape, runs[1].get(name)) for name, shape in runs[0].items()]
    layers = [layer for layer in found if layer is not None]
    if not layers:
        raise ValueError(
            f"No layer of {type(network.module).__name__} takes two numbers or more of each datum, by which novelty "
            "is told: it needs a module with weights of its own, such as a `torch.nn.Linear`, that is called with a "
            "tensor with an axis of the data."
        )
    return layers


def _layer_input(name: str, two: torch.Size, three: torch.Size | None) -> LayerInput | None:
    """Where data are in inputs of these shapes, the features last; of one number there is nothing but its size."""
    for axis in range(min(2, len(two) - 1)):
        if three is not None and len(three) == len(two) and two[axis] % 2 == 0 and three[axis] * 2 == two[axis] * 3:
            return LayerInput(name, axis, two[axis] // 2, two[-1]) if two.numel() > 2 else None
    return None


def _shapes(network: Linearisation, x: Any) -> dict[str, torch.Size]:
    """Shapes of the inputs of all layers, the features last."""
    seen = dict[str, torch.Size]()

    def see(name: str, module: nn.Module, h: Tensor) -> None:
        seen.pop(name, None)  # the last call of a layer counts
        channel = -1 - len(module.kernel_size) if isinstance(module, _ConvNd) else -1
        seen[name] = h.movedim(channel, -1).shape

    names = [name for name, _ in network.module.named_modules() if has_matrix(network.module, name)]
    with _hooked(network.module, names, see):
        network.evaluate(x)
    return seen


@contextmanager
def watched(network: Linearisation, layers: Sequence[LayerInput]) -> Iterator[list[Features]]:
    """Features of the data that this thread takes through the network inside, one after the other."""
    by_name, found, inputs = {layer.name: layer for layer in layers}, list[Features](), dict[str, Tensor]()

    def keep(name: str, module: nn.Module, h: Tensor) -> None:
        inputs[name] = by_name[name].features(module, h)

    def close() -> None:
        # Memory may hold parts of the data only, which go through the network one by one.
        if len(inputs) < len(layers):
            missing = [name for name in by_name if name not in inputs]
            raise ValueError(
                f"Novelty is told by the inputs of the layers {missing}, but they were not called with an axis of the "
                "data. x must be like the training data, and have that axis also for one datum, as `x[None]`."
            )
        found.append(Features.of([inputs[name].to(network.dtype) for name in by_name]))
        inputs.clear()

    with _hooked(network.module, list(by_name), keep, close):
        yield found


@contextmanager
def _hooked(
    module: nn.Module, names: Sequence[str], see: Callable[..., None], *ends: Callable[..., None]
) -> Iterator[None]:
    """Inside, the first tensor of numbers that each call of some parts gets is seen in this thread."""
    thread = threading.get_ident()

    def hook(name: str, part: nn.Module, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() == thread:
            given = [h for h in tree_leaves((args, kwargs)) if isinstance(h, Tensor) and h.is_floating_point()]
            if given and given[0].dim() > 1:
                see(name, part, given[0])

    def end(part: nn.Module, args: tuple, output: Any) -> None:
        if threading.get_ident() == thread:
            for function in ends:
                function()

    hooks = list[RemovableHandle]()
    try:
        # Not while another thread runs the network, which goes through its hooks.
        with exclusive:
            for name in names:
                hooks.append(
                    module.get_submodule(name).register_forward_pre_hook(partial(hook, name), with_kwargs=True)
                )
            hooks.append(module.register_forward_hook(end))
        yield
    finally:
        with exclusive:
            for handle in hooks:
                handle.remove()
