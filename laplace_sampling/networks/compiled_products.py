"""Jacobian products by `torch.compile`, of shapes that come again; each program is checked before it is used.

Compiling takes seconds to a minute for each shape, and saves what a small network spends between its operations, and
memory that is written and read again. A product is that of a chunk of vectors, filled up with zeros to a power of two,
so that there are few shapes.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from laplace_sampling.data.batches import arguments, num_rows, plain, read
from laplace_sampling.networks.forward_mode import ComposedLayers
from laplace_sampling.networks.memory import cpu_out_of_memory

__all__ = ["CompiledProducts"]

Weights = dict[str, Tensor]
Program = Callable[[Weights, Sequence[Tensor], Tensor], Tensor]
Plain = Callable[[Tensor], Tensor]

# Products of a shape before it is compiled, so that what comes rarely is not; and programs at most.
_BEFORE, _PROGRAMS = 3, 32
# What may come of rounding, as a power of the precision of the numbers: 2e-3 in float32.
_EXPONENT = 0.4


class CompiledProducts:
    """Programs of one network.

    Args:
        module: the network.
        shapes: of its random weights, by name.
        backend: of `torch.compile`.

    Attributes:
        programs: how many there are.

    Raises:
        ValueError: for a backend that torch does not have.
    """

    def __init__(self, module: nn.Module, shapes: dict[str, torch.Size], backend: str) -> None:
        known = dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"`compile={backend!r}` must be True or a backend of torch.compile, one of {known}.")
        self.module, self.shapes, self.backend = module, shapes, backend
        self._programs: dict[Any, Program] = {}
        self._calls: Counter[Any] = Counter()
        # After a failure what is there stays, for it has been checked, and nothing is compiled any more.
        self._failed = False

    @property
    def programs(self) -> int:
        return len(self._programs)

    def __getstate__(self) -> dict[str, Any]:
        """Without programs, which are of the module itself: a copy has another."""
        return {**self.__dict__, "_programs": {}, "_calls": Counter()}

    def push(self, weights: Weights, x: Any, v: Tensor, most: int, product: Plain) -> Tensor:
        """`φ v_k`, `[K, N, C]`, of at most so many vectors at once; by `product` what is not compiled."""
        return self._in_chunks(_push, weights, x, v, most, product)

    def pull(self, weights: Weights, x: Any, u: Tensor, most: int, product: Plain) -> Tensor:
        """`φᵀ u_k`, `[K, P]`, as `push`."""
        return self._in_chunks(_pull, weights, x, u, most, product)

    def _in_chunks(self, kind: Any, weights: Weights, x: Any, vectors: Tensor, most: int, product: Plain) -> Tensor:
        tensors, spec = tree_flatten(plain(x))
        if is_in_torch_dispatch_mode() or not all(isinstance(t, Tensor) and t.dim() for t in tensors):
            return product(vectors)  # as where operations are counted; constants would be those of the first batch
        seen = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        parts = []
        for part in vectors.split(1 << most.bit_length() - 1):
            width = 1 << (len(part) - 1).bit_length()
            key = kind, width, spec, seen, vectors.dtype, self._state(weights)
            self._calls[key] += 1
            if key not in self._programs and self._calls[key] > _BEFORE:
                self._add(key, weights, x, tensors, part, product)
            # A program may have been made for something that is not so any more.
            found = self._run(key, weights, tensors, part) if key in self._programs else None
            parts.append(product(part) if found is None else found)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _state(self, weights: Weights) -> tuple[Any, ...]:
        """What programs depend on beside the batch, as far as torch itself does not see it."""
        hooks = tuple(h for m in self.module.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks))
        one = next(iter(weights.values()))
        return hooks, one.dtype, one.device

    def _add(self, key: Any, weights: Weights, x: Any, tensors: Sequence[Tensor], part: Tensor, product: Plain) -> None:
        """A program, if it gives the product of random vectors that torch gives without it."""
        if self._failed or len(self._programs) == _PROGRAMS:
            return
        kind, width, spec = key[:3]
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(width, *part.shape[1:], generator=generator).to(part)
        expected = product(vectors)
        size = float(expected.norm())
        if not 0 < size < math.inf:
            return  # it would show nothing
        program = kind(_function(self.module, spec, num_rows(x), vectors.dtype), self.shapes)
        # torch counts programs by their code, and has no more than eight of the same.
        program.__code__ = program.__code__.replace()
        self._programs[key] = torch.compile(program, fullgraph=True, dynamic=False, backend=self.backend)
        off = math.inf
        try:
            found = self._run(key, weights, tensors, vectors, first=True)
            if found is not None and (found.shape, found.dtype) == (expected.shape, expected.dtype):
                off = float((found - expected).norm()) / size
        finally:
            if not off <= torch.finfo(vectors.dtype).eps ** _EXPONENT:
                del self._programs[key]
        if key not in self._programs and not self._failed:
            self._fail(f"a compiled product is off by {off:.2g} of its size")

    def _run(
        self, key: Any, weights: Weights, tensors: Sequence[Tensor], part: Tensor, *, first: bool = False
    ) -> Tensor | None:
        """The product by a program; None if it fails."""
        width, device = key[1], part.device.type
        padded = F.pad(part, (0, 0) * (part.dim() - 1) + (0, width - len(part))) if len(part) < width else part
        try:
            # Modules are held with `force_eager` around, for parts of them that their user has compiled. Dynamo would
            # compile anew, and unchecked, where it finds that something has changed.
            with (
                torch.enable_grad(),
                torch.autocast(device, enabled=False),
                torch.compiler.set_stance("default"),
                dynamo.config.patch(error_on_recompile=not first),  # pyright: ignore
                cpu_out_of_memory(),
            ):
                return self._programs[key](weights, tensors, padded)[: len(part)].detach()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch says by many classes that it does not compile something
            said = next(iter(str(error).strip().splitlines()), type(error).__name__)
            why = f"torch.compile fails, {type(error).__name__}: {said}"
        if not first:
            del self._programs[key]
        self._fail(why)
        return None

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            warnings.warn(f"Products of {type(self.module).__name__} are not compiled: {why}.", stacklevel=2)


def _function(
    module: nn.Module, spec: TreeSpec, num: int, dtype: torch.dtype
) -> Callable[[Weights, Sequence[Tensor]], Tensor]:
    """The network, `[N, C]`, for inputs of one structure."""

    def function(weights: Weights, tensors: Sequence[Tensor]) -> Tensor:
        args, kwargs = arguments(tree_unflatten([t.clone() for t in tensors], spec))
        with ComposedLayers():
            output = functional_call(module, weights, args, kwargs)
        return read(output, num)[0].reshape(num, -1).to(dtype)

    return function


def _push(function: Callable[[Weights, Sequence[Tensor]], Tensor], shapes: dict[str, torch.Size]) -> Any:
    sizes = [shape.numel() for shape in shapes.values()]

    def push(weights: Weights, tensors: Sequence[Tensor], v: Tensor) -> Tensor:
        parts = zip(shapes.items(), v.split(sizes, dim=-1), strict=True)
        tangents = {name: part.reshape(-1, *shape) for (name, shape), part in parts}
        random = {name: weights[name] for name in shapes}
        return vmap(lambda t: jvp(lambda w: function({**weights, **w}, tensors), (random,), (t,))[1])(tangents)

    return push


def _pull(function: Callable[[Weights, Sequence[Tensor]], Tensor], shapes: dict[str, torch.Size]) -> Any:
    def pull(weights: Weights, tensors: Sequence[Tensor], u: Tensor) -> Tensor:
        random = {name: weights[name] for name in shapes}
        back = vjp(lambda w: function({**weights, **w}, tensors), random)[1]
        (rows,) = vmap(back)(u)
        return torch.cat([rows[name].reshape(len(u), -1) for name in shapes], dim=1)

    return pull
