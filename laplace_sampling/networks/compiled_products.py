"""Jacobian products by `torch.compile`, of shapes that come again; each program is checked before it is used.

Compiling takes seconds to a minute for each shape. It saves what a small network spends between its operations, and
memory that is written and read again. Vectors go in chunks that are filled up with zeros to a power of two, so that
there are few shapes.
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from laplace_sampling.data.batches import arguments, num_rows, plain, read
from laplace_sampling.networks.allocator import cpu_out_of_memory
from laplace_sampling.networks.derivative_rules import ComposedLayers
from laplace_sampling.networks.held_module import HeldModule
from laplace_sampling.solvers.placement import normal

__all__ = ["CompiledProducts"]

Weights = dict[str, Tensor]
Program = Callable[[Weights, Sequence[Tensor], Tensor], Tensor]
Product = Callable[[Tensor], Tensor]

# Products of a shape before it is compiled, so that rare shapes are not, as that of a smaller last batch. A program
# takes seconds to compile: at one, shapes that come twice are compiled in vain; at six, three more products are not.
_CALLS_BEFORE = 3
# At most so many programs, each of which holds memory. Networks of the tests take 1 to 6 of them, so that half and
# twice change nothing.
_MAX_PROGRAMS = 32
# Differences that rounding brings about, as a power of the precision of the numbers: 2e-3 in float32. Programs differ
# by 1e-7 or are wrong altogether; as in `consistency`, 0.2 and 0.8 would be 4e-2 and 3e-6.
_ROUNDING_EXPONENT = 0.4
# On a CPU, pullbacks are slower compiled if the network makes tensors of more bytes than this: their convolutions are
# torch's own again, and run vector by vector. Compiled, 8 pullbacks of LeNet (0.6 MB) take 0.95 of the time, which half
# of the value would give away; those of networks of 1.1 MB, which twice would compile, gained nothing on a
# Xeon and compile for a minute.
_COMPILED_PULL_BYTES = 10**6


class CompiledProducts:
    """Programs of one network.

    Args:
        held: the network.
        backend: of `torch.compile`; `True` for its default.

    Attributes:
        programs: how many there are.

    Raises:
        ValueError: for a backend that torch does not have, or a network that is sharded or in several precisions.
    """

    def __init__(self, held: HeldModule, backend: bool | str) -> None:
        # `torch._dynamo` takes a second to import, and few networks are compiled.
        from torch._dynamo import list_backends

        if held.shards is not None:
            raise ValueError(
                "`compile` is not for models that `fully_shard` has shared out over processes: leave it out."
            )
        precisions = {p.dtype for p in held.module.parameters()} | {held.dtype}
        if held.autocast is not None or len(precisions) > 1:
            raise ValueError(
                "`compile` is for networks in one precision, float32 or float64, without `autocast`: leave it out."
            )
        known = list_backends(exclude_tags=())
        self.backend = backend if isinstance(backend, str) else "inductor"
        if self.backend not in known:
            raise ValueError(f"`compile={backend!r}` must be True or a backend of torch.compile, one of {known}.")
        self.module, self.shapes = held.module, held.shapes
        self._programs: dict[Any, Program] = {}
        self._calls: Counter[Any] = Counter()
        # After a failure nothing is compiled any more; programs that are there stay, for they were checked.
        self._failed = False

    @property
    def programs(self) -> int:
        return len(self._programs)

    def __getstate__(self) -> dict[str, Any]:
        """Without programs, which are of the module itself: a copy has another."""
        return {**self.__dict__, "_programs": {}, "_calls": Counter()}

    @staticmethod
    def pays_to_pull(device: torch.device, largest: float) -> bool:
        """Whether pullbacks are faster compiled, the largest tensor of a forward pass having so many bytes."""
        return device.type != "cpu" or largest <= _COMPILED_PULL_BYTES

    def push(self, weights: Weights, x: Any, v: Tensor, most: int, product: Product) -> Tensor:
        """`φ v_k`, `[K, N, C]`.

        Args:
            weights: of the network, all of them.
            x: inputs.
            v: `v_k`, `[K, P]`.
            most: vectors at once.
            product: computes the product of some vectors where it is not compiled.
        """
        return self._in_chunks(_push_program, weights, x, v, most, product)

    def pull(self, weights: Weights, x: Any, u: Tensor, most: int, product: Product) -> Tensor:
        """`φᵀ u_k`, `[K, P]`, with the arguments of `push`."""
        return self._in_chunks(_pull_program, weights, x, u, most, product)

    def _in_chunks(self, kind: Any, weights: Weights, x: Any, vectors: Tensor, most: int, product: Product) -> Tensor:
        tensors, spec = tree_flatten(plain(x))
        if is_in_torch_dispatch_mode() or not all(isinstance(t, Tensor) and t.dim() for t in tensors):
            # Modes that count operations do not see programs, and constants would be those of the first batch.
            return product(vectors)
        form = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
        parts = []
        for part in vectors.split(1 << most.bit_length() - 1):
            width = 1 << (len(part) - 1).bit_length()
            key = kind, width, spec, form, vectors.dtype, self._state(weights)
            self._calls[key] += 1
            if key not in self._programs and self._calls[key] > _CALLS_BEFORE:
                self._add(key, weights, x, tensors, part, product)
            # A program fails where something has changed since it was made.
            result = self._run(key, weights, tensors, part) if key in self._programs else None
            parts.append(product(part) if result is None else result)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _state(self, weights: Weights) -> tuple[Any, ...]:
        """What programs depend on beside the batch, as far as torch itself does not see it."""
        hooks = tuple(h for m in self.module.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks))
        weight = next(iter(weights.values()))
        return hooks, weight.dtype, weight.device

    def _add(
        self, key: Any, weights: Weights, x: Any, tensors: Sequence[Tensor], part: Tensor, product: Product
    ) -> None:
        """Adds a program, if it gives the product of random vectors that torch gives without it."""
        if self._failed or len(self._programs) == _MAX_PROGRAMS:
            return
        kind, width, spec = key[:3]
        # Vectors of a solver may be zero, which would show nothing.
        vectors = normal(width, *part.shape[1:], seed=0, dtype=part.dtype, device=part.device)
        expected = product(vectors)
        size = float(expected.norm())
        if not 0 < size < math.inf:
            return
        program = kind(_network_function(self.module, spec, num_rows(x), vectors.dtype), self.shapes)
        # torch counts programs by their code, and has no more than eight of the same.
        program.__code__ = program.__code__.replace()
        self._programs[key] = torch.compile(program, fullgraph=True, dynamic=False, backend=self.backend)
        error = math.inf
        try:
            result = self._run(key, weights, tensors, vectors, first=True)
            if result is not None and (result.shape, result.dtype) == (expected.shape, expected.dtype):
                error = float((result - expected).norm()) / size
        finally:  # also after an interrupt, so that no program stays unchecked
            if not error <= torch.finfo(vectors.dtype).eps ** _ROUNDING_EXPONENT:
                del self._programs[key]
        if key not in self._programs and not self._failed:
            self._fail(f"a compiled product is off by {error:.2g} of its size")

    def _run(
        self, key: Any, weights: Weights, tensors: Sequence[Tensor], part: Tensor, *, first: bool = False
    ) -> Tensor | None:
        """The product by a program; `None` if it fails."""
        from torch._dynamo import config

        width, device = key[1], part.device.type
        padded = F.pad(part, (0, 0) * (part.dim() - 1) + (0, width - len(part))) if len(part) < width else part
        try:
            # `evaluation_mode` forces eager code for parts of the module that the user has compiled. torch would
            # compile anew, and unchecked, where something has changed: that is an error but in the first run.
            with (
                torch.enable_grad(),
                torch.autocast(device, enabled=False),
                torch.compiler.set_stance("default"),
                config.patch(error_on_recompile=not first),  # pyright: ignore
                cpu_out_of_memory,
            ):
                return self._programs[key](weights, tensors, padded)[: len(part)].detach()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch has many classes of errors for what it does not compile
            sentence = next(iter(str(error).strip().splitlines()), type(error).__name__)
            reason = f"torch.compile fails, {type(error).__name__}: {sentence}"
        if not first:
            del self._programs[key]
        self._fail(reason)
        return None

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            warnings.warn(f"Products of {type(self.module).__name__} are not compiled: {reason}.", stacklevel=2)


def _network_function(
    module: nn.Module, spec: TreeSpec, num: int, dtype: torch.dtype
) -> Callable[[Weights, Sequence[Tensor]], Tensor]:
    """The network, `[N, C]`, for inputs of one structure."""

    def function(weights: Weights, tensors: Sequence[Tensor]) -> Tensor:
        args, kwargs = arguments(tree_unflatten([t.clone() for t in tensors], spec))
        with ComposedLayers():
            output = functional_call(module, weights, args, kwargs)
        return read(output, num)[0].reshape(num, -1).to(dtype)

    return function


def _push_program(function: Callable[[Weights, Sequence[Tensor]], Tensor], shapes: dict[str, torch.Size]) -> Any:
    sizes = [shape.numel() for shape in shapes.values()]

    def push(weights: Weights, tensors: Sequence[Tensor], v: Tensor) -> Tensor:
        parts = zip(shapes.items(), v.split(sizes, dim=-1), strict=True)
        tangents = {name: part.reshape(-1, *shape) for (name, shape), part in parts}
        random = {name: weights[name] for name in shapes}
        return vmap(lambda t: jvp(lambda w: function({**weights, **w}, tensors), (random,), (t,))[1])(tangents)

    return push


def _pull_program(function: Callable[[Weights, Sequence[Tensor]], Tensor], shapes: dict[str, torch.Size]) -> Any:
    def pull(weights: Weights, tensors: Sequence[Tensor], u: Tensor) -> Tensor:
        random = {name: weights[name] for name in shapes}
        back = vjp(lambda w: function({**weights, **w}, tensors), random)[1]
        (rows,) = vmap(back)(u)
        return torch.cat([rows[name].reshape(len(u), -1) for name in shapes], dim=1)

    return pull
