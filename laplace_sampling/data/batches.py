"""How a batch is given to a network, and the outputs that come back.

Inputs are a tensor; a tuple or list, for positional arguments; or a mapping, for keyword arguments (a `BatchEncoding`
is one). They may be nested. The rows of a batch are the first axis of its tensors; other objects, and tensors without
an axis, go to the network as they are.

Outputs are a tensor `[N, ...]`; a dictionary of tensors, the heads of a network; or another object or mapping with
`logits`, which are taken. The outputs of a datum are flattened, head after head, to `C` numbers where algebra needs it.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

# The one head of a network that returns a tensor.
_HEAD = ""


@dataclass(frozen=True)
class Layout:
    """The shapes of the outputs of one datum: of each head in order.

    Attributes:
        heads: names and shapes; a network that returns a tensor has one head, without a name.
    """

    heads: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def single(cls, shape: tuple[int, ...]) -> "Layout":
        """The layout of a network that returns a tensor `[N, *shape]`."""
        return cls(((_HEAD, tuple(shape)),))

    @cached_property
    def names(self) -> list[str]:
        """The names of the heads; empty for a network that returns a tensor."""
        return [name for name, _ in self.heads if name != _HEAD]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the outputs of a datum; flat if there are several heads."""
        return (self.size,) if self.names else self.heads[0][1]

    @property
    def sizes(self) -> list[int]:
        """How many numbers each head has."""
        return [torch.Size(shape).numel() for _, shape in self.heads]

    @property
    def size(self) -> int:
        """`C`, the numbers of all heads."""
        return sum(self.sizes)

    def split(self, flat: Float[Tensor, "*K C"]) -> dict[str, Tensor]:
        """The heads of flattened outputs, in their own shapes."""
        parts = flat.split(self.sizes, dim=-1)
        return {name: part.reshape(*flat.shape[:-1], *s) for (name, s), part in zip(self.heads, parts, strict=True)}

    def union(self, layout: "Layout") -> "Layout":
        """The smallest layout that holds both; lengths of axes may differ, as those of padded sequences do.

        Raises:
            ValueError: if heads or numbers of axes differ.
        """
        ranks = [[(name, len(shape)) for name, shape in item.heads] for item in (self, layout)]
        if ranks[0] != ranks[1]:
            raise ValueError(
                f"The model gives outputs of different kinds for different batches: {dict(self.heads)} and "
                f"{dict(layout.heads)}. Heads and numbers of axes must be the same for all data."
            )
        shapes = [tuple(map(max, a, b)) for (_, a), (_, b) in zip(self.heads, layout.heads, strict=True)]
        return Layout(tuple((name, shape) for (name, _), shape in zip(self.heads, shapes, strict=True)))

    def widen(self, flat: Float[Tensor, "*K c"], to: "Layout") -> Float[Tensor, "*K C"]:
        """Outputs of this layout in a larger one, filled up with zeros."""
        if self == to:
            return flat
        heads = zip(self.split(flat).values(), to.heads, self.heads, strict=True)
        # `F.pad` takes the last axis first: nothing before, what is missing behind.
        padded = [
            F.pad(part, [n for a, b in zip(reversed(shape), reversed(larger), strict=True) for n in (0, b - a)])
            for part, (_, larger), (_, shape) in heads
        ]
        lead = flat.dim() - 1
        return torch.cat([part.flatten(lead) if part.dim() > lead else part[..., None] for part in padded], dim=-1)

    def narrow(self, flat: Float[Tensor, "*K C"], to: "Layout") -> Float[Tensor, "*K c"]:
        """The part of outputs of this layout that is in a smaller one: the transpose of its `widen`."""
        if self == to:
            return flat
        lead, parts = flat.dim() - 1, []
        for part, (_, shape) in zip(self.split(flat).values(), to.heads, strict=True):
            cut = part[(..., *(slice(length) for length in shape))]
            parts.append(cut.flatten(lead) if shape else cut[..., None])
        return torch.cat(parts, dim=-1)


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call of the network."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (tuple(x), {}) if isinstance(x, tuple | list) else ((x,), {})


def plain(x: Any) -> Any:
    """Replaces other mappings by dictionaries, since torch does not look into these."""
    if type(x) is not dict and isinstance(x, Mapping):
        x = dict(x)
    return tree_map(lambda leaf: plain(leaf) if isinstance(leaf, Mapping) else leaf, x)


def as_plain(tensor: Tensor) -> Tensor:
    """A tensor of torch's own class with the numbers of one of another, such as a MetaTensor of MONAI.

    Subclasses that are made of other tensors, and have operations of their own, stay what they are.
    """
    kind: Any = type(tensor)
    if kind in (Tensor, nn.Parameter) or kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():  # some keep their class in every function
        return tensor.as_subclass(Tensor)


def as_tensors(x: Any) -> Any:
    """Plain tensors take the place of subclasses and of numpy's arrays, and share their memory.

    Raises:
        TypeError: for an array that torch has no tensors for, such as words.
    """

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray):
            return as_plain(leaf) if isinstance(leaf, Tensor) else leaf
        try:
            # torch does not take negative strides, and warns of arrays that are read-only.
            return torch.from_numpy(np.require(leaf, requirements=["C", "W"]))
        except TypeError as error:
            raise TypeError(f"There is no tensor of an array of {leaf.dtype}; give one of numbers.") from error

    return tensor(x) if isinstance(x, Tensor) else tree_map(tensor, plain(x))


def storable(x: Any) -> Any:
    """A batch as dictionaries and lists of tensors and plain values, which files hold.

    Raises:
        TypeError: if something else is in it.
    """
    if isinstance(x, Mapping):
        return {name: storable(value) for name, value in x.items()}
    if isinstance(x, tuple | list):
        return [storable(value) for value in x]
    if x is None or isinstance(x, Tensor | str | bool | int | float):
        return x
    raise TypeError(f"Files hold tensors and plain values, but inputs have a {type(x).__name__}.")


def flaw_of(x: Any, missing: bool = False) -> str | None:
    """What a batch holds that no network is differentiated on, in words; `None` for a batch of finite numbers.

    Args:
        x: the batch.
        missing: whether NaN is no flaw, but says that a number is missing.
    """
    for tensor in batched(x)[0]:
        if tensor.is_meta:
            return "tensors on the device 'meta' (they hold no numbers)"
        if tensor.layout != torch.strided:
            return "sparse tensors (`to_dense()` makes them dense)"
        if (tensor.is_floating_point() or tensor.is_complex()) and not _is_finite(tensor):
            if not missing:
                return "NaN or infinity"
            if bool(tensor.isinf().any()):
                return "infinity"
    return None


def _is_finite(tensor: Tensor) -> bool:
    # NaN and infinity stay in a sum, which takes a tenth of the time of looking at each number; it may overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def batched(x: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors of a batch that have rows, and how to put others in their place."""
    # The usual batch, one tensor, without a walk over a tree at every product.
    if isinstance(x, Tensor) and x.dim():
        return [x], lambda tensors: tensors[0]
    leaves, spec = tree_flatten(plain(x))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()]

    def rebuild(tensors: Sequence[Tensor]) -> Any:
        filled = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            filled[i] = tensor
        return tree_unflatten(filled, spec)

    return [leaves[i] for i in places], rebuild


def constants(x: Any) -> list[Any]:
    """The parts of a batch that have no rows: they go to the network as they are."""
    return [leaf for leaf in tree_flatten(plain(x))[0] if not (isinstance(leaf, Tensor) and leaf.dim())]


def num_rows(x: Any) -> int:
    """How many data a batch of inputs has: the first axis of its tensors, which all must agree in.

    Raises:
        TypeError: if there is no tensor with an axis.
        ValueError: if they do not agree.
    """
    if isinstance(x, Tensor) and x.dim():
        return x.shape[0]  # `len` of a tensor takes five calls
    tensors, _ = batched(x)
    if not tensors:
        raise TypeError(f"A batch of inputs needs at least one tensor [N, ...], but is a {type(x).__name__} without.")
    # Not `len`, which makes a number of a length that is a symbol where torch traces it.
    if any(tensor.shape[0] != tensors[0].shape[0] for tensor in tensors):
        raise ValueError(
            f"The tensors of a batch of inputs have shapes {[list(tensor.shape) for tensor in tensors]}; the first "
            "axis must be the data in all of them. What does not belong to a datum goes into the module."
        )
    return tensors[0].shape[0]


def _each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    tensors, rebuild = batched(x)
    return rebuild([change(tensor) for tensor in tensors])


def flattened(tensor: Tensor, lead: int = 1) -> Tensor:
    """The axes behind the first ones as one, also of no data, for which `reshape(N, -1)` fails, and of no such axes."""
    return tensor.reshape(*tensor.shape[:lead], tensor.shape[lead:].numel())


def take(x: Any, indices: Tensor | slice) -> Any:
    """Returns these rows of every tensor of a batch, in a batch of the same structure."""
    return _each(x, lambda tensor: tensor[indices])


def rows_of(x: Any, rows: slice) -> Any:
    """`take` of neighbouring data; a batch itself, without a copy, if they are all of its data."""
    # A copy of all data would double the memory of a pass.
    return x if rows.stop >= num_rows(x) and not rows.start else take(x, rows)


def split(x: Any, size: int) -> list[Any]:
    """A batch in pieces of `size` data."""
    return [take(x, slice(start, start + size)) for start in range(0, num_rows(x), size)]


def concatenate(pieces: Sequence[Any]) -> Any:
    """One batch of several that differ in their rows only."""
    _, rebuild = batched(pieces[0])
    return rebuild([torch.cat(tensors) for tensors in zip(*(batched(piece)[0] for piece in pieces), strict=True)])


def place(x: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The inputs on the device of a network; numbers of less precision than its weights are widened to theirs."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # Integers are labels or tokens and stay; so do numbers of more precision, which would lose digits silently.
        narrow = leaf.is_floating_point() and torch.promote_types(leaf.dtype, dtype) == dtype
        return leaf.to(device, dtype if narrow else leaf.dtype, non_blocking=True)

    return move(x) if isinstance(x, Tensor) else tree_map(move, plain(x))


def num_bytes(x: Any) -> int:
    """The bytes of all tensors of a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in batched(x)[0])


def read(output: Any, num: int) -> tuple[Float[Tensor, "N ..."], Layout]:
    """The outputs of a network as one tensor `[N, ...]`, that of several heads flat, and their layout.

    Args:
        output: what the module returned.
        num: `N`, of the inputs.

    Raises:
        TypeError: if it is none of the forms that this file names.
        ValueError: if its first axis is not that of the inputs.
    """
    if isinstance(output, Tensor):
        _check_rows(output, num)
        return output, Layout.single(output.shape[1:])
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor) and not _has_heads(output, num):
        return read(logits, num)
    if not isinstance(output, Mapping) or not output or not all(isinstance(v, Tensor) for v in output.values()):
        kind = type(output).__name__
        description = f"{kind} with {list(output)}" if isinstance(output, Mapping) else kind
        raise TypeError(
            f"The model returned a {description}, not a tensor. Wrap it in a module that returns the one tensor of "
            "outputs, of shape [N, ...], an object with `logits`, or a dictionary of such tensors, one for each head."
        )
    for head in output.values():
        _check_rows(head, num)
    # One matrix for all heads, so that products, curvatures and solvers need not know of heads.
    flat = torch.cat([flattened(head) for head in output.values()], dim=1)
    return flat, Layout(tuple((str(name), tuple(head.shape[1:])) for name, head in output.items()))


def _has_heads(output: Any, num: int) -> bool:
    """Whether a dictionary is one of several heads, one of them named `logits`."""
    # Output objects of libraries are dictionaries as well, with hidden states beside the logits: a plain one only.
    if type(output) is not dict:
        return False
    have_rows = [isinstance(v, Tensor) and v.dim() > 0 and v.shape[0] == num for v in output.values()]
    return len(have_rows) > 1 and all(have_rows)


def _check_rows(output: Tensor, num: int) -> None:
    if output.dim() == 0 or output.shape[0] != num:
        raise ValueError(
            f"The model returned shape {list(output.shape)} for a batch of {num} inputs; "
            "the first axis of the output must be the batch."
        )
    if not output.is_floating_point():
        raise TypeError(
            f"The model returned outputs in {output.dtype}, but outputs are differentiated: they must be real numbers, "
            "in floating point. Return them before they are rounded or compared, or their real and imaginary parts."
        )


def digest(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """SHA-256, 32 bytes, of the names, dtypes, shapes and numbers of tensors, in their order."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in _dense_parts(tensor.detach().cpu()):
            # Not `reshape`, which keeps the stride of a single number: bytes need a stride of 1.
            flat = part.contiguous().as_strided((part.numel(),), (1,))
            sha.update(flat.view(torch.uint8).numpy().data)
    return sha.digest()


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """The indices and values of a sparse tensor; a dense one itself."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
