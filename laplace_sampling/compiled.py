"""Jacobian products by `torch.compile`, of shapes that come again; each program is checked where it is first used.

Compiling takes seconds to a minute for each shape, and saves what a small network spends between its operations, and
memory that is written and read again. A product is that of a chunk of vectors, which all have one size but for the
last, so that there are few shapes.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from laplace_sampling.calling import arguments, batched, constants, num_rows, read

__all__ = ["CompiledProducts"]

Weights = dict[str, Tensor]
Program = Callable[[Weights, Sequence[Tensor], Tensor], Tensor]

# Products of a shape before it is compiled, so that what comes rarely is not; and programs at most.
_BEFORE, _PROGRAMS = 3, 32
# What may come of rounding, as a power of the precision of the numbers: 2e-3 in float32.
_EXPONENT = 0.4


class CompiledProducts:
    """Programs of one network.

    Args:
        module: the network.
        shapes: of its random weights, by name.
        dtype: of outputs.
        backend: of `torch.compile`.

    Attributes:
        programs: how many there are; none are used after one that failed.
    """

    def __init__(self, module: nn.Module, shapes: dict[str, torch.Size], dtype: torch.dtype, backend: str) -> None:
        self.module, self.shapes, self.dtype, self.backend = module, shapes, dtype, backend
        self._programs: dict[Any, Program] = {}
        self._calls: Counter[Any] = Counter()
        self._failed = False

    @property
    def programs(self) -> int:
        return 0 if self._failed else len(self._programs)

    def push(self, weights: Weights, x: Any, v: Tensor, most: int, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """`φ v_k`, `[K, N, C]`, of at most so many vectors at once; by `plain` what is not compiled."""
        return self._in_chunks("push", self._push, weights, x, v, most, plain)

    def pull(self, weights: Weights, x: Any, u: Tensor, most: int, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """`φᵀ u_k`, `[K, P]`, as `push`."""
        return self._in_chunks("pull", self._pull, weights, x, u, most, plain)

    def _in_chunks(
        self,
        kind: str,
        make: Callable[[Any], Program],
        weights: Weights,
        x: Any,
        vectors: Tensor,
        most: int,
        plain: Callable[[Tensor], Tensor],
    ) -> Tensor:
        if self._failed or constants(x) or is_in_torch_dispatch_mode():  # as when operations are counted
            return plain(vectors)
        tensors, _ = batched(x)
        shapes = tuple((t.shape, t.dtype, t.device) for t in tensors)
        parts = []
        for part in vectors.split(1 << most.bit_length() - 1):
            width = 1 << (len(part) - 1).bit_length()  # powers of two, so that there are few
            key = kind, width, shapes, vectors.dtype
            self._calls[key] += 1
            parts.append(self._part(key, make, weights, x, part, plain))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(
        self, key: Any, make: Callable[[Any], Program], weights: Weights, x: Any, part: Tensor, plain: Callable
    ) -> Tensor:
        new = key not in self._programs
        if self._failed or (new and (self._calls[key] <= _BEFORE or len(self._programs) == _PROGRAMS)):
            return plain(part)
        if new:
            self._programs[key] = make(x)
        width = key[1]
        padded = F.pad(part, (0, 0) * (part.dim() - 1) + (0, width - len(part))) if len(part) < width else part
        try:
            # Modules are held with `force_eager` around, for parts of them that their user has compiled.
            with torch.enable_grad(), torch.compiler.set_stance("default"):
                found = self._programs[key](weights, batched(x)[0], padded)[: len(part)].detach()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch says by many classes that it does not compile something
            said = next(iter(str(error).strip().splitlines()), type(error).__name__)
            return self._without(f"torch.compile fails, {type(error).__name__}: {said}", plain(part))
        if not new:
            return found
        expected = plain(part)
        off = float((found - expected).norm() / expected.norm().clamp_min(1e-300))
        if not off <= torch.finfo(self.dtype).eps ** _EXPONENT and bool(expected.isfinite().all()):
            return self._without(f"a compiled product is off by {off:.2g} of its size", expected)
        return found

    def _without(self, why: str, instead: Tensor) -> Tensor:
        self._failed = True
        message = f"Products of {type(self.module).__name__} are not compiled: {why}."
        warnings.warn(message, stacklevel=2)
        return instead

    def _function(self, x: Any) -> Callable[[Weights, Sequence[Tensor]], Tensor]:
        """The network for inputs of one structure."""
        module, num, dtype, (_, rebuild) = self.module, num_rows(x), self.dtype, batched(x)

        def function(weights: Weights, tensors: Sequence[Tensor]) -> Tensor:
            args, kwargs = arguments(rebuild([t.clone() for t in tensors]))
            return read(functional_call(module, weights, args, kwargs), num)[0].reshape(num, -1).to(dtype)

        return function

    def _push(self, x: Any) -> Program:
        function, shapes = self._function(x), self.shapes
        sizes = [shape.numel() for shape in shapes.values()]

        def push(weights: Weights, tensors: Sequence[Tensor], v: Tensor) -> Tensor:
            parts = zip(shapes.items(), v.split(sizes, dim=-1), strict=True)
            tangents = {name: part.reshape(-1, *shape) for (name, shape), part in parts}
            random = {name: weights[name] for name in shapes}
            return vmap(lambda t: jvp(lambda w: function({**weights, **w}, tensors), (random,), (t,))[1])(tangents)

        return self._compiled(push)

    def _pull(self, x: Any) -> Program:
        function, shapes = self._function(x), self.shapes

        def pull(weights: Weights, tensors: Sequence[Tensor], u: Tensor) -> Tensor:
            random = {name: weights[name] for name in shapes}
            _, back = vjp(lambda w: function({**weights, **w}, tensors), random)
            (rows,) = vmap(back)(u)
            return torch.cat([rows[name].reshape(len(u), -1) for name in shapes], dim=1)

        return self._compiled(pull)

    def _compiled(self, program: Any) -> Program:
        # torch counts programs by their code, and has no more than eight of the same.
        program.__code__ = program.__code__.replace()
        return torch.compile(program, fullgraph=True, dynamic=False, backend=self.backend)
