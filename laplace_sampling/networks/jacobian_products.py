"""Jacobian products of a function of weights, `{name: tensor} -> [N, C]`, by the first way that works for a network.

JVPs of many vectors are tried under `vmap`, then one by one, both by forward mode; then as the derivative of
`u ↦ φᵀu`, which is linear, in `u`: two reverse passes. What does not work is not tried again, and is said once.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import jvp, vmap

from laplace_sampling.networks.forward_mode import ComposedLayers
from laplace_sampling.networks.held_module import where
from laplace_sampling.networks.memory import LARGEST_KEPT, TensorBytes

__all__ = ["FEWEST", "JacobianProducts"]

Weights = dict[str, Tensor]
Function = Callable[[Weights], Tensor]

# Bytes of the largest tensor of a product that stay in the caches of a CPU, and the fewest vectors that are worth a
# forward pass of their own (`benchmarks/networks/products.py`).
_CACHED, FEWEST = 12 * 2**20, 4
# Beyond so many bytes pullbacks go one by one on a CPU: the forward pass is there already, and torch's backward
# convolutions run vector by vector anyway.
_ALONE = 2 * 10**6
# And so many beyond which they are slower compiled: their convolutions are torch's own again, and vector by vector.
_COMPILED = 10**6

# Exceptions of operations that lack a derivative or a rule for batches.
_LACKING = (RuntimeError, NotImplementedError, KeyError)


def _bytes_made(forward: Callable[[], Tensor]) -> tuple[list[int], Tensor]:
    """Of each tensor of a forward pass, and its output."""
    with torch.no_grad(), TensorBytes() as made:
        output = forward()
    return made.sizes, output


def _attempt(way: Callable[[], Any], plain: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a way gives, or the error by which it fails, each time, where the network itself works.

    The network's own errors are raised: by `plain()`, or because they do not come again.
    """
    try:
        return way(), None
    except torch.OutOfMemoryError:
        raise
    except _LACKING as error:
        plain()
        try:
            way()
        except torch.OutOfMemoryError:
            raise
        except _LACKING:
            return None, error
        raise


class JacobianProducts:
    """The ways that are left for one network.

    Args:
        module: the network, to be named in notices.
        chunk_size: how many vectors are pushed through the network together.

    Attributes:
        lacking: what has no forward derivative, and where, once that is known.
        data_together: whether Jacobians of many data are computed together.
    """

    def __init__(self, module: nn.Module, chunk_size: int) -> None:
        self.module, self.chunk_size = module, chunk_size
        self._pushes = [self._push_together, self._push_each, self._push_by_two_pullbacks]
        self._pulls_together = self.data_together = True
        self._checked, self._dual = False, True
        self._bytes_each: list[float] = []
        self._output_bytes_each = 0.0
        self._in_proportion: bool | None = None
        self.lacking: str | None = None

    @contextmanager
    def trial(self) -> Iterator[None]:
        """What fails within is not said, and tried again behind it."""
        pushes, lacking = self._pushes, self.lacking
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            self._pushes, self.lacking = pushes, lacking

    def size(self, forward: Callable[[], Tensor], inputs: int) -> float:
        """Bytes of the largest tensor of a forward pass: in proportion to the numbers that are put in, from the first.

        Counted, not timed: the same product is the same in every run.
        """
        if not self._bytes_each:
            made, output = _bytes_made(forward)
            self._bytes_each = sorted(size / max(inputs, 1) for size in made or [0])
            self._output_bytes_each = output.numel() * output.element_size() / max(inputs, 1)
        return self._bytes_each[-1] * inputs

    def output_bytes(self, inputs: int) -> float:
        """Of a forward pass, as `size`."""
        return self._output_bytes_each * inputs

    def pieces(self, num: int, inputs: int, vectors: int, weights: int, device: torch.device) -> int:
        """In how many pieces `num` data go through a CPU with some vectors for its C library to keep their tensors.

        Pages of larger ones are got anew each time, but each piece reads and writes as many vectors of `weights` bytes.
        """
        largest = self._bytes_each[-1] * inputs * vectors
        if largest <= LARGEST_KEPT or device.type != "cpu" or self._in_proportion is False:
            return 1
        most = int(num * LARGEST_KEPT / largest)
        if not most:
            return 1
        few = -(-num // most)
        # Of one size, which compile to one program, if that takes few more.
        pieces = next((n for n in range(few, 2 * few) if num % n == 0), few)
        sizes = [size * inputs for size in self._bytes_each]
        anew = sum(size for size in sizes if size * vectors > LARGEST_KEPT)
        return pieces if anew > (pieces - 1) * weights else 1

    def check_proportion(self, forward: Callable[[], Tensor], inputs: int) -> bool:
        """Whether fewer data make what `size` foretells: not if a graph or weights that belong to the module do.

        Nor does what cannot do without the other data.
        """
        if self._in_proportion is None:
            try:
                made, _ = _bytes_made(forward)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # a network may raise anything
                made = []
            pairs = [(max(made, default=0), self._bytes_each[-1]), (sum(made), sum(self._bytes_each))]
            self._in_proportion = all(2 / 3 < found / (each * inputs) < 1.5 for found, each in pairs)
        return self._in_proportion

    def push(
        self, f: Function, weights: Weights, tangents: Weights, size: float, *, graph: bool
    ) -> Float[Tensor, "K N C"]:
        """`φ v_k`; `size` are the bytes of the largest tensor that the network makes.

        Raises:
            RuntimeError: if an operation has neither a forward derivative nor a second reverse one.
        """
        errors = []
        one = len(next(iter(tangents.values()))) == 1
        for way in self._pushes:
            if one and way == self._push_together:
                continue
            with torch.enable_grad():  # `no_grad` would stop forward derivatives too, see `forward_mode`
                result, error = _attempt(partial(way, f, weights, tangents, size, graph), partial(f, weights))
            if error is not None:
                errors.append(error)
                continue
            if errors:
                self._pushes = self._pushes[self._pushes.index(way) :]
                self._say(way, errors[-1])
                if way == self._push_by_two_pullbacks:
                    self.lacking = where(errors[-1], self.module)
            return result if graph else result.detach()
        raise RuntimeError(
            f"{type(self.module).__name__} has no Jacobian-vector product. By forward mode: "
            f"{where(errors[0], self.module)}. By reverse mode: {where(errors[-1], self.module)}. Replace this "
            "operation by one that torch differentiates, or choose weights after it with `parameters=`."
        ) from errors[0]

    def _say(self, way: Callable, error: Exception) -> None:
        if way == self._push_each:
            how = "takes one vector at a time, which is slower"
        else:
            how = "has no forward derivative; two reverse passes are taken instead, which is slower"
        message = f"The Jacobian-vector product of {type(self.module).__name__} {how}: {where(error, self.module)}."
        warnings.warn(message, stacklevel=2)

    def _push_together(self, f: Function, weights: Weights, tangents: Weights, size: float, graph: bool) -> Tensor:
        like = next(iter(tangents.values()))
        num, few = len(like), self.at_once(len(like), like.device, size)
        # Splitting takes as long as a small network.
        return vmap(lambda t: jvp(f, (weights,), (t,))[1], chunk_size=few if few < num else None)(tangents)

    def _push_each(self, f: Function, weights: Weights, tangents: Weights, size: float, graph: bool) -> Tensor:
        num = len(next(iter(tangents.values())))
        each = [{name: t[k] for name, t in tangents.items()} for k in range(num)]
        return torch.stack([jvp(f, (weights,), (t,))[1] for t in each])

    def _push_by_two_pullbacks(
        self, f: Function, weights: Weights, tangents: Weights, size: float, graph: bool
    ) -> Tensor:
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        outputs = f(leaves)
        u = torch.zeros_like(outputs).requires_grad_()
        with ComposedLayers():  # checkpoints run a part of the network again
            pulled = torch.autograd.grad(outputs, list(leaves.values()), u, create_graph=True, allow_unused=True)
        linear = [(g, t) for g, t in zip(pulled, tangents.values(), strict=True) if g is not None and g.requires_grad]
        rows = []
        for k in range(len(next(iter(tangents.values())))):
            if not linear:
                rows.append(torch.zeros_like(outputs))
                continue
            gradients, vectors = [g for g, _ in linear], [t[k] for _, t in linear]
            (row,) = torch.autograd.grad(gradients, u, vectors, retain_graph=True, create_graph=graph)
            rows.append(row)
        return torch.stack(rows)

    def pull(
        self, outputs: Tensor, weights: list[Tensor], cotangents: Float[Tensor, "K ..."], size: float
    ) -> Iterator[list[Tensor | None]]:
        """`φᵀ u_k` of a few cotangents after the other, by weight, `[k, ...]`; None where outputs do not depend on it.

        Raises:
            ValueError: if the outputs depend on none of the weights, or on some by what torch does not differentiate.
        """
        if not self._checked:
            self._check(outputs)
            self._checked = True
        if not outputs.requires_grad:
            raise ValueError(
                f"The outputs of {type(self.module).__name__} depend on none of the random weights by operations that "
                "torch differentiates. Name others with `parameters=`."
            )

        def grads(u: Tensor, batched: bool = False) -> tuple[Tensor | None, ...]:
            with ComposedLayers():  # checkpoints run a part of the network again
                return torch.autograd.grad(
                    outputs, weights, u, retain_graph=True, allow_unused=True, is_grads_batched=batched
                )

        alone = not self._pulls_together or (outputs.device.type == "cpu" and size > _ALONE)
        together = 1 if alone else self.at_once(len(cotangents), outputs.device, size)
        for part in cotangents.split(together):
            if len(part) > 1 and self._pulls_together:
                result, error = _attempt(partial(grads, part, batched=True), partial(grads, part[0]))
                if error is None:
                    some = any(g is not None for g in result)
                    yield from [list(result)] * (1 if some else len(part))
                    continue
                self._pulls_together = False  # said by nobody: one by one is as fast where the network is not tiny
            for u in part:
                yield [None if g is None else g[None] for g in grads(u)]

    def pays_compiled(self, device: torch.device, size: float) -> bool:
        """Whether pullbacks are faster compiled."""
        return device.type != "cpu" or size <= _COMPILED

    def _check(self, outputs: Tensor) -> None:
        """Raises where torch takes a derivative that it does not have for zero, as those of quantised layers."""
        nodes, seen = [outputs.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            if node.name().endswith("WarnNotImplemented"):
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    node(None)  # torch warns, and names the operation  # pyright: ignore
                operation = str(said[0].message).split(": ")[0]
                raise ValueError(
                    f"The outputs of {type(self.module).__name__} depend on random weights by `{operation}`, which "
                    "torch does not differentiate: it would take the derivative for zero. Name weights after it with "
                    "`parameters=`, or replace this operation."
                )
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]

    def at_once(self, num: int, device: torch.device, size: float) -> int:
        """How many of `num` vectors at a time, in parts of one size."""
        most = self.most_at_once(device, size)
        return -(-num // -(-num // most))

    def most_at_once(self, device: torch.device, size: float) -> int:
        """As many vectors as a CPU's caches hold."""
        fewest = min(FEWEST, self.chunk_size) if device.type == "cpu" else self.chunk_size
        return min(max(int(_CACHED / max(size, 1)), fewest), 4 * self.chunk_size)

    def push_and_pull(
        self, f: Function, weights: Weights, tangent: Weights, curvature: Callable[[Tensor], Tensor], size: float
    ) -> list[Tensor | None] | None:
        """`φᵀ B φ v` of one vector by one forward pass, of dual numbers; None where torch lacks a derivative."""
        if self._pushes[0] == self._push_by_two_pullbacks or not self._dual:
            return None
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}

        def both() -> list[Tensor | None]:
            with torch.enable_grad(), dual_level():
                outputs = f({name: make_dual(w, tangent[name]) for name, w in leaves.items()})
                value, change = unpack_dual(outputs)
                change = torch.zeros_like(value) if change is None else change.detach()
            return next(iter(self.pull(value, list(leaves.values()), curvature(change[None]), size)))

        # The pullback as well: checkpoints run a part of the network again, then without dual numbers.
        grads, error = _attempt(both, partial(f, weights))
        self._dual = error is None
        return grads

    def of_each_datum(
        self, together: Callable[[], Weights], alone: Callable[[int], list[Tensor]], weights: Weights, num: int
    ) -> Weights:
        """`together()`, under `vmap`; where that fails `alone(n)` for each datum, stacked."""
        failed = None
        if self.data_together:
            rows, failed = _attempt(together, partial(alone, 0))
            if failed is None:
                return rows
        rows = [alone(n) for n in range(num)]
        if failed is not None:
            self.take_data_alone(where(failed, self.module))
        return {name: torch.stack([row[n] for row in rows]) for n, name in enumerate(weights)}

    def take_data_alone(self, reason: str) -> None:
        """From here on `of_each_datum` takes no data together."""
        self.data_together = False
        message = f"Jacobians of {type(self.module).__name__} take one datum at a time, which is slower"
        warnings.warn(f"{message}: {reason}.", stacklevel=2)

    def rows(self, outputs: Tensor, weights: list[Tensor], cotangents: Tensor, *, graph: bool) -> list[Tensor]:
        """`φᵀ u_k` of each cotangent, stacked, by weight."""
        pulled = [
            torch.autograd.grad(
                outputs, weights, u, retain_graph=True, create_graph=graph, allow_unused=True, materialize_grads=True
            )
            for u in cotangents
        ]
        return [torch.stack(of_weight) for of_weight in zip(*pulled, strict=True)]
