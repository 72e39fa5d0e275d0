"""The network as a function of one flat weight vector, and its Jacobian products.

Everything above this module sees a network only through :class:`Linearisation`:
`φ(x) = ∂f(w, x)/∂w` at the trained weights `w̄` is applied, never formed (but for `jacobian`,
which the exact method calls on small problems).
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from laplace_sampling.data.batches import Layout, arguments, batched, num_rows, place, read, split, take
from laplace_sampling.networks.compiled_products import CompiledProducts
from laplace_sampling.networks.forward_mode import (
    ComposedLayers,
    differentiable,
    forward_mode_kernels,
    load_decompositions,
)
from laplace_sampling.networks.held_module import evaluation_mode, unwrapped
from laplace_sampling.networks.jacobian_products import FEWEST, JacobianProducts
from laplace_sampling.networks.memory import LARGEST_KEPT, BatchLimit, cpu_out_of_memory, keep_freed_memory
from laplace_sampling.networks.precision import users_precision
from laplace_sampling.networks.selection import Selection, select

__all__ = ["Linearisation"]

# Jacobian products evaluated together under `vmap`. Most of the gain over a loop is there at 16 of them
# (`benchmarks/networks/products.py`); memory grows with it.
DEFAULT_CHUNK = 16

# How far rows of a Jacobian may be from forward mode: in float32 a unit of almost no input is on in one and off in the
# other.
_DIFFERENT = 0.05
# Data of which they are compared.
_COMPARED = 16

_HALF = (torch.bfloat16, torch.float16)


class Linearisation:
    r"""A trained network `f(w, x)` and the products of its Jacobian `φ(x)` in the weights.

    The module is held, never changed: it runs in evaluation mode with frozen buffers, and its
    modes are put back after every call, also after one that raised.

    Args:
        module: the trained network. Inputs `x` and outputs are of the forms of `laplace_sampling.data.batches`.
        parameters: which weights are random: names, globs (`"head.*"`), those with a leading `"!"` left out, or a
            predicate `(name, parameter) -> bool`. By default all that require a gradient. A glob may also be of the
            class of the module that owns a weight: `"Linear.*"`, `"!*Norm*.*"`.
        chunk_size: how many vectors are pushed through the network together, or four times as many of a network whose
            tensors are small; on a CPU fewer, but no fewer than 4, where caches do not hold them.
        autocast: dtype of the operations that `torch.autocast` lowers, within Jacobian products only. Products are
            given and returned in `dtype`, and summed over data in it.
        compile: whether products of shapes that come again are compiled by `torch.compile`, or by which of its
            backends. Where that fails, or gives other products, they are not; a notice says so. Where it is slower
            they are not either: GGN products of one vector, and on a CPU pullbacks through large tensors.

    Attributes:
        limit: of the data that go through the network at once; a batch of more goes in pieces.
        num_parameters: `P`, the length of a flat weight vector.
        names: the selected parameters, in the order of the flat vector.
        products: counts of `jvp` and `vjp`; the unit is one datum and one vector.

    Raises:
        TypeError: if `module` is not an `nn.Module`.
        ValueError: if the selection names nothing, something unknown, or weights that are not floating point; for
            an `autocast` that is not narrower than `dtype`; for `compile` with it, or of weights in several precisions.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Selection = None,
        *,
        chunk_size: int = DEFAULT_CHUNK,
        autocast: torch.dtype | None = None,
        compile: bool | str = False,
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"`chunk_size` must be at least 1, but is {chunk_size}.")
        self.module = module = unwrapped(module)
        self.chunk_size = chunk_size
        self.names = select(module, parameters)
        self.shapes = {name: parameter.shape for name, parameter in self._selected().items()}
        self._all_random = len(self.names) == len(dict(module.named_parameters()))
        self.num_parameters = sum(shape.numel() for shape in self.shapes.values())
        self.products = {"jvp": 0, "vjp": 0}
        self._ways = JacobianProducts(module, chunk_size)
        self._compared: set[tuple[bool, bool]] = set()
        self.limit = BatchLimit()
        keep_freed_memory()
        load_decompositions()
        self.autocast = autocast
        if autocast is not None and (autocast not in _HALF or self.module_dtype != torch.float32):
            raise ValueError(
                f"`autocast={autocast}` must be torch.bfloat16 or torch.float16, of a network in float32, but the "
                f"network is in {self.module_dtype}; leave it out, or call `model.float()`."
            )
        if compile and (autocast is not None or len({p.dtype for p in module.parameters()} | {self.dtype}) > 1):
            raise ValueError(
                "`compile` is for networks in one precision, float32 or float64, without `autocast`: leave it out."
            )
        self.compile = compile
        self._compiled = self._programs() if compile else None

    def _programs(self) -> CompiledProducts:
        backend = self.compile if isinstance(self.compile, str) else "inductor"
        return CompiledProducts(self.module, self.shapes, backend)

    def _selected(self) -> dict[str, Tensor]:
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name].detach() for name in self.names}

    def _one(self) -> Tensor:
        """One of the random weights, without a walk through the module, which takes as long as a small layer."""
        owner, _, name = self.names[0].rpartition(".")
        one = self.module.get_submodule(owner)._parameters[name]
        assert one is not None
        return one

    def _fixed(self) -> dict[str, Tensor]:
        """The weights that are not random, so that no gradient reaches those of the module."""
        if self._all_random:
            return {}
        return {name: p.detach() for name, p in self.module.named_parameters() if name not in self.shapes}

    @property
    def device(self) -> torch.device:
        return self._one().device

    @property
    def module_dtype(self) -> torch.dtype:
        return self._one().dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of vectors, products and outputs: that of the weights, but float32 for half precision."""
        return torch.float32 if self.module_dtype in _HALF else self.module_dtype

    @property
    def weights(self) -> Float[Tensor, " P"]:
        """The trained weights `w̄` as one flat vector (a copy)."""
        return torch.cat([w.reshape(-1) for w in self._selected().values()]).to(self.dtype)

    @property
    def lacking(self) -> str | None:
        """The operation without a forward derivative and its module, if one was met."""
        return self._ways.lacking

    @property
    def selection(self) -> Any:
        """What `parameters=` has to be for the same random weights, as JSON."""
        return self.names

    def layers(self) -> tuple[list[str], Tensor]:
        """The names of the modules that own the weights, and for each weight the index of its module, `[P]`."""
        owners = [name.rpartition(".")[0] or "(root)" for name in self.names]
        layers = list(dict.fromkeys(owners))
        sizes = torch.tensor([shape.numel() for shape in self.shapes.values()])
        return layers, torch.repeat_interleave(torch.tensor([layers.index(o) for o in owners]), sizes)

    def unflatten(self, v: Tensor) -> dict[str, Tensor]:
        """Views of `[..., P]` in the shapes of the parameters, by name."""
        parts = v.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        return {
            name: part.unflatten(-1, shape) if shape else part.squeeze(-1)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def __call__(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N ..."]:
        """The network's own output `f(w̄, x)`, bit for bit what `module.eval()(x)` gives; of several heads flat.

        Without gradient; with `graph`, autograd differentiates it in `x`.
        """
        if not graph:
            return self.evaluate(x)[0]
        with torch.enable_grad(), evaluation_mode(self.module):
            return self._apply({**self._fixed(), **self._selected()}, x)

    def evaluate(self, x: Any) -> tuple[Float[Tensor, "N ..."], Layout]:
        """The network's own output and its layout, without gradient."""

        def outputs(rows: slice) -> tuple[Tensor, Layout]:
            part = _rows_of(x, rows)
            args, kwargs = arguments(self._copied(part))
            with self._explained(part):
                return read(self.module(*args, **kwargs), num_rows(part))

        with torch.no_grad(), evaluation_mode(self.module), users_precision():
            parts = self.limit.in_parts(num_rows(x), outputs)
        return _joined([output for output, _ in parts], 0).to(self.dtype), parts[0][1]

    def jvp(self, x: Any, v: Float[Tensor, "K P"], *, graph: bool = False) -> Float[Tensor, "K N C"]:
        """`φ(x) v_k` for each of `K` vectors by forward mode; the outputs of a datum are flattened to `C`.

        Without gradient; with `graph`, autograd differentiates it in `x` and `v`.
        """
        self._check_width(v, "jvp")
        if graph:
            return self._jvp(x, v, graph=True)
        parts = self.limit.in_parts(num_rows(x), lambda rows: self._jvp(_rows_of(x, rows), v, graph=False))
        return _joined(parts, 1)

    def _jvp(self, x: Any, v: Tensor, *, graph: bool) -> Tensor:
        with evaluation_mode(self.module), forward_mode_kernels(layers=False):
            return self._push(x, v, graph)

    def _push(self, x: Any, v: Tensor, graph: bool = False) -> Tensor:
        weights = self._selected()

        def product(x: Any) -> Tensor:
            def push(v: Tensor) -> Tensor:
                tangents = {name: t.to(weights[name].dtype) for name, t in self.unflatten(v).items()}
                return self._ways.push(self._outputs(x), weights, tangents, self._size(x), graph=graph)

            if graph or self._compiled is None:
                return push(v)
            most = self._ways.most_at_once(v.device, self._size(x))
            return self._compiled.push({**self._fixed(), **weights}, x, v, most, push)

        with differentiable(graph):
            result = product(x) if graph else _joined([product(piece) for piece in self._pieces(x, len(v))], 1)
        self.products["jvp"] += len(v) * num_rows(x)
        return result

    def _pieces(self, x: Any, num: int, pull: bool = False) -> list[Any]:
        """The data in pieces, if products of `num` vectors are faster by them."""
        size = self._size(x)
        if FEWEST * size <= LARGEST_KEPT:
            return [x]
        device = self.device
        vectors = 1 if pull else self._ways.at_once(num, device, size)
        inputs, weights = self._num_inputs(x), self.num_parameters * self.dtype.itemsize
        pieces = self._ways.pieces(num_rows(x), inputs, vectors, weights, device)
        if pieces == 1:
            return [x]
        parts = split(x, -(-num_rows(x) // pieces))
        first = parts[0]
        same = self._ways.check_proportion(lambda: self._outputs(first)(self._selected()), self._num_inputs(first))
        return parts if same else [x]

    @staticmethod
    def _num_inputs(x: Any) -> int:
        return sum(t.numel() for t in batched(x)[0])

    def _outputs(self, x: Any) -> Callable[[dict[str, Tensor]], Tensor]:
        """`w ↦ f(w, x)`, `[N, C]`, from layers with forward derivatives."""
        fixed, num = self._fixed(), num_rows(x)

        def outputs(w: dict[str, Tensor]) -> Tensor:
            output = self._apply({**fixed, **w}, x, composed=True)
            return output if output.dim() == 2 else output.reshape(num, -1)

        return outputs

    def _size(self, x: Any) -> float:
        """Bytes of the largest tensor of a forward pass."""
        return self._ways.size(lambda: self._outputs(x)(self._selected()), self._num_inputs(x))

    def vjp(self, x: Any, u: Float[Tensor, "K N C"], *, graph: bool = False) -> Float[Tensor, "K P"]:
        """`Σ_n φ(x_n)ᵀ u_kn` for each of `K` cotangents: one forward pass, `K` pullbacks.

        Without gradient; with `graph`, autograd differentiates it in `x` and `u`.
        """
        if graph:
            return self._vjp_with_graph(x, u)
        parts = self.limit.in_parts(num_rows(x), lambda rows: self._vjp(_rows_of(x, rows), u[:, rows]))
        return _summed(parts)

    def _vjp(self, x: Any, u: Tensor) -> Tensor:
        with evaluation_mode(self.module), forward_mode_kernels(layers=False):
            return self._pull(x, u)

    def _pull(self, x: Any, u: Tensor) -> Tensor:
        pieces = self._pieces(x, len(u), pull=True)

        def pull(u: Tensor) -> Tensor:
            add, without = len(pieces) > 1, 0
            rows = (u.new_zeros if add else u.new_empty)(len(u), self.num_parameters)
            for piece, part in zip(pieces, u.split([num_rows(piece) for piece in pieces], 1), strict=True):
                weights = {name: w.requires_grad_() for name, w in self._selected().items()}
                with torch.enable_grad():
                    outputs = self._outputs(piece)(weights)
                    without += add and not outputs.requires_grad
                    if add and not outputs.requires_grad and without < len(pieces):
                        continue  # it is enough that one of the pieces depends on the weights
                    cotangents = part.to(outputs.dtype).reshape(len(u), *outputs.shape)
                    pulled = self._ways.pull(outputs, list(weights.values()), cotangents, self._size(piece))
                    self._write(pulled, rows, add=add)
            return rows

        if self._compiled is None or not self._ways.pays_compiled(u.device, self._size(x)):
            rows = pull(u)
        else:
            most = self._ways.most_at_once(u.device, self._size(x))
            rows = self._compiled.pull({**self._fixed(), **self._selected()}, x, u.flatten(2), most, pull)
        self.products["vjp"] += len(u) * num_rows(x)
        return rows

    def traced(self, x: Any) -> tuple[Float[Tensor, "N ..."], dict[str, Tensor]]:
        """Outputs with a graph that autograd differentiates, and the random weights by name, which it is of."""
        weights = {name: w.requires_grad_() for name, w in self._selected().items()}
        with torch.enable_grad(), evaluation_mode(self.module), forward_mode_kernels():
            return self._apply(weights, x), weights

    def _write(
        self, gradients: Iterable[list[Tensor | None]], rows: Float[Tensor, "K P"], *, add: bool = False
    ) -> None:
        """Gradients of some vectors after others, by weight, as rows, or added to what is there."""
        zero, start = rows.new_zeros(1, 1), 0
        for grads in gradients:
            num = next((len(grad) for grad in grads if grad is not None), 1)
            # A weight that the output does not depend on has derivative zero.
            flat = [
                zero.expand(num, size) if grad is None else grad.reshape(num, -1)
                for size, grad in zip(self._sizes, grads, strict=True)
            ]
            part = rows[start : start + num]
            if add:
                for row, grad in zip(part.split(self._sizes, 1), flat, strict=True):
                    row += grad
            else:
                torch.cat(flat, 1, out=part)
            start += num

    @property
    def _sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    def ggn(
        self, x: Any, v: Float[Tensor, "K P"], curvature: Callable[[Float[Tensor, "K N C"]], Float[Tensor, "K N C"]]
    ) -> Float[Tensor, "K P"]:
        """`Σ_n φ(x_n)ᵀ B_n φ(x_n) v_k`, `curvature` being `B`: `vjp(x, curvature(jvp(x, v)))`.

        One vector takes one forward pass instead of two. For several its share is small, and dual numbers with a graph
        would hold the activations of each of them.
        """
        self._check_width(v, "ggn")
        if num_rows(x) <= (self.limit.most or num_rows(x)):
            with suppress(torch.OutOfMemoryError):
                return self._ggn(x, v, curvature)
        return self.vjp(x, curvature(self.jvp(x, v)))

    def _ggn(self, x: Any, v: Tensor, curvature: Callable[[Tensor], Tensor]) -> Tensor:
        """Of data that go through the network at once."""
        with evaluation_mode(self.module), forward_mode_kernels(layers=False):
            rows = self._of_dual_numbers(x, v, curvature) if len(v) == 1 else None
            if rows is not None:
                return rows
            return self._pull(x, curvature(self._push(x, v)))

    def _of_dual_numbers(self, x: Any, v: Tensor, curvature: Callable[[Tensor], Tensor]) -> Tensor | None:
        """By one forward pass, also with `compile`, which would take two; None where torch lacks a derivative."""
        weights, rows = self._selected(), torch.empty_like(v)
        tangent = {name: t[0].to(weights[name].dtype) for name, t in self.unflatten(v).items()}
        pieces, num = self._pieces(x, 1), num_rows(x)
        many, start = len(pieces) > 1, 0
        # The curvature is that of all data, once for each piece.
        if many and len(pieces) * self._ways.output_bytes(self._num_inputs(x)) > LARGEST_KEPT:
            return None
        for piece in pieces:
            stop = start + num_rows(piece)

            def of_piece(u: Tensor, start: int = start, stop: int = stop) -> Tensor:
                return curvature(F.pad(u, (0, 0, start, num - stop)))[:, start:stop]

            here = of_piece if many else curvature
            try:
                grads = self._ways.push_and_pull(self._outputs(piece), weights, tangent, here, self._size(piece))
            except ValueError:  # a piece may not depend on the weights
                if not many:
                    raise
                return None
            if grads is None:
                return None
            self._write([grads], rows, add=start > 0)
            start = stop
        self.products["jvp"] += num
        self.products["vjp"] += num
        return rows

    def vjp_each(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, "N P"]:
        """`φ(x_n)ᵀ u_n` of each datum by itself: as many products as one cotangent of `vjp`."""

        def product(rows: slice) -> Tensor:
            cotangents = u[rows]
            return self._watched(_rows_of(x, rows), cotangents, lambda net, part: net._vjp_each(part, cotangents))

        return _joined(self.limit.in_parts(num_rows(x), product), 0)

    def _watched(
        self, x: Any, u: Tensor | None, rows: Callable[["Linearisation", Any], Tensor], graph: bool = False
    ) -> Tensor:
        """Rows of a Jacobian, `φ(x_n)` or `φ(x_n)ᵀ u_n`, one by one if those of all data together are wrong.

        Some of torch's derivatives are, under `vmap`, and nothing says so: forward mode tells, once for either kind.
        """
        found = rows(self, x)
        columns = u is None and not graph and self.num_parameters < found.shape[1]  # by forward mode themselves
        kind = (u is None, len(found) > 1)
        if columns or kind in self._compared or not self._ways.data_together:
            return found
        counts = dict(self.products)
        try:
            off = self._distance(x, u, found)
            if off is None:
                return found
            self._compared.add(kind)
            if off <= _DIFFERENT or self._right_in_float64(x, u, rows):
                return found
            self._ways.take_data_alone("torch's derivatives of many of them at once are wrong")
            return rows(self, x)
        finally:
            self.products.update(counts)

    def _distance(self, x: Any, u: Tensor | None, rows: Tensor) -> float | None:
        """Of rows from those of forward mode, by a random vector, relative; None if that says nothing."""
        few = slice(0, _COMPARED)
        try:
            v = torch.randn(1, self.num_parameters, generator=torch.Generator().manual_seed(0))
            v = v.to(self.device, self.dtype)
            with self._ways.trial():
                pushed = self._jvp(_rows_of(x, few), v, graph=False)[0].reshape(len(rows[few]), -1)
            expected = pushed if u is None else (u[few] * pushed).sum(-1)
            off, size = float((rows[few].detach().to(v) @ v[0] - expected).norm()), float(expected.norm())
        except Exception:  # within transforms of `torch.func`, or without any Jacobian-vector product
            return None
        return off / size if size > 0 and math.isfinite(off) else None

    def _right_in_float64(self, x: Any, u: Tensor | None, rows: Callable[["Linearisation", Any], Tensor]) -> bool:
        """Whether what differs does so by rounding only, which decides which way a unit goes."""
        if self.module_dtype == torch.float64:
            return False
        try:
            precise, wide = self.in_float64(), place(x, self.device, torch.float64)
            off = precise._distance(wide, u, rows(precise, wide))
        except Exception:  # a network may hold anything: one that cannot be copied or computes in its own dtype
            return False
        return off is not None and off <= _DIFFERENT

    def _vjp_each(self, x: Any, u: Tensor) -> Tensor:
        weights, fixed, num = self._selected(), self._fixed(), num_rows(x)
        tensors, rebuild = batched(x)

        def single(w: dict[str, Tensor], x_n: list[Tensor], u_n: Tensor) -> dict[str, Tensor]:
            datum = rebuild([t[None] for t in x_n])
            return vjp(lambda w: self._apply({**fixed, **w}, datum).reshape(-1), w)[1](u_n)[0]

        self.products["vjp"] += num
        # under `no_grad` torch's derivatives of `linalg.solve` and determinants are wrong
        with torch.enable_grad(), evaluation_mode(self.module), forward_mode_kernels():
            each = vmap(single, in_dims=(None, 0, 0), chunk_size=4 * self.chunk_size)
            gradients = self._ways.of_each_datum(
                lambda: each(weights, tensors, u.to(self.dtype)),
                lambda n: self._alone(take(x, slice(n, n + 1)), u[n : n + 1]),
                weights,
                num,
            )
            return torch.cat([g.reshape(num, -1) for g in gradients.values()], dim=1).to(u.dtype).detach()

    def _vjp_with_graph(self, x: Any, u: Tensor) -> Tensor:
        self.products["vjp"] += len(u) * num_rows(x)
        fixed = self._fixed()
        with differentiable(True), evaluation_mode(self.module), forward_mode_kernels():
            outputs, pull, *_ = vjp(lambda w: self._apply({**fixed, **w}, x), self._selected())
            cotangents = u.to(outputs.dtype).reshape(len(u), *outputs.shape)
            (rows,) = vmap(pull, chunk_size=self.chunk_size)(cotangents)
            return torch.cat([row.reshape(len(u), -1) for row in rows.values()], dim=1).to(u.dtype)

    def jacobian(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N C P"]:
        """`φ(x)` in full, `[N, C, P]`: for the exact method and for exact diagonals of small problems only.

        Without gradient; with `graph`, autograd differentiates it in `x`.
        """
        if graph:
            return self._watched(x, None, lambda net, part: net._jacobian(part, graph=True), graph)

        def product(rows: slice) -> Tensor:
            return self._watched(_rows_of(x, rows), None, lambda net, part: net._jacobian(part, graph=False))

        return _joined(self.limit.in_parts(num_rows(x), product), 0)

    def _jacobian(self, x: Any, *, graph: bool) -> Tensor:
        weights, fixed = self._selected(), self._fixed()
        tensors, rebuild = batched(x)

        def single(w: dict[str, Tensor], x_n: list[Tensor]) -> Tensor:
            return self._apply({**fixed, **w}, rebuild([t[None] for t in x_n])).reshape(-1)

        num, outputs = num_rows(x), self._num_outputs(x)
        if self.num_parameters < outputs and not graph:  # columns are fewer than rows
            columns = torch.eye(self.num_parameters, dtype=self.dtype, device=self.device)
            return self._jvp(x, columns, graph=False).permute(1, 2, 0)
        self.products["vjp"] += num * outputs
        # `enable_grad` also without a graph: see `_vjp_each`
        with differentiable(graph), torch.enable_grad(), evaluation_mode(self.module), forward_mode_kernels():
            together = vmap(torch.func.jacrev(single), in_dims=(None, 0))
            rows = self._ways.of_each_datum(
                lambda: together(weights, tensors),
                lambda n: self._alone(take(x, slice(n, n + 1)), None, graph),
                weights,
                num,
            )
            full = torch.cat([row.flatten(2) if row.dim() > 2 else row[..., None] for row in rows.values()], dim=-1)
            return full if graph else full.detach()

    def _num_outputs(self, x: Any) -> int:
        """`C`."""
        with torch.no_grad(), evaluation_mode(self.module), forward_mode_kernels(layers=False):
            return self._outputs(take(x, slice(1)))(self._selected()).numel()

    def _alone(self, x: Any, u: Tensor | None, graph: bool = False) -> list[Tensor]:
        """`φᵀu` of one datum, or its whole Jacobian, by weight."""
        with torch.enable_grad():
            weights = {name: w.requires_grad_() for name, w in self._selected().items()}
            outputs = self._apply({**(self._fixed() if graph else {}), **weights}, x).reshape(-1)
            cotangents = torch.eye(len(outputs)).to(outputs) if u is None else u.to(outputs.dtype)
            rows = self._ways.rows(outputs, list(weights.values()), cotangents, graph=graph)
        return rows if u is None else [row[0] for row in rows]

    def with_names(self, names: list[str]) -> "Linearisation":
        """The same network with other weights random; what was found of its ways of products is shared."""
        other = Linearisation(
            self.module, names, chunk_size=self.chunk_size, autocast=self.autocast, compile=self.compile
        )
        other._ways, other.products, other.limit = self._ways, self.products, self.limit
        return other

    def in_float64(self) -> "Linearisation":
        """The same on a copy of the module in float64; products are counted together."""
        other = copy.copy(self)
        other.module, other.autocast = copy.deepcopy(self.module).double(), None
        other.compile, other._compiled = False, None
        return other

    def fingerprint(self) -> Tensor:
        """SHA-256 of all weights and buffers, `[32]` bytes: tells whether a network is the one that was fitted."""
        digest = hashlib.sha256()
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        for name, tensor in tensors:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            for part in _dense_parts(tensor.detach().cpu()):
                digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)

    def _apply(self, weights: dict[str, Tensor], x: Any, *, composed: bool = False) -> Tensor:
        called = arguments(self._copied(x))
        one = self._one()
        dtype = torch.float32 if one.dtype in _HALF else one.dtype
        lowered = torch.autocast(one.device.type, self.autocast, self.autocast is not None, cache_enabled=False)
        # The mode takes time for every call on a tensor, so there is none but the network's inside.
        with lowered, cpu_out_of_memory(), ComposedLayers() if composed else nullcontext():
            output = functional_call(self.module, weights, *called)
        output = read(output, num_rows(x))[0]
        return output if output.dtype == dtype else output.to(dtype)  # what does nothing takes time under `vmap`

    def _copied(self, x: Any) -> Any:
        """Inputs that the network may change in place, narrowed to its own precision if that is half."""
        tensors, rebuild = batched(x)
        dtype = self._one().dtype
        narrow = dtype in _HALF
        return rebuild([t.to(dtype, copy=True) if narrow and t.is_floating_point() else t.clone() for t in tensors])

    @contextmanager
    def _explained(self, x: Any) -> Iterator[None]:
        """An error of the network that is about types is shown with those of its inputs, one about gradients too."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if "does not require grad" in str(error):
                raise RuntimeError(
                    f"{type(self.module).__name__} differentiates in its forward, which is run under "
                    f"`torch.no_grad()`: {error}. Put `with torch.enable_grad():` around that part of it, "
                    "and call `requires_grad_()` there on what it differentiates in."
                ) from error
            found = sorted({str(t.dtype) for t in batched(x)[0] if t.dtype != self.module_dtype})
            if not found or "type" not in str(error):
                raise
            raise TypeError(
                f"{type(self.module).__name__}, whose weights are in {self.module_dtype}, fails on inputs in "
                f"{', '.join(found)}: {error} Convert the inputs, as by `x.to({self.module_dtype})` (numbers of numpy "
                "are in float64), or the model."
            ) from error

    def _check_width(self, v: Tensor, call: str) -> None:
        if v.dim() != 2 or v.shape[1] != self.num_parameters:
            raise ValueError(
                f"`{call}(x, v)` needs `v` of shape [K, P] with P = {self.num_parameters}, but got {list(v.shape)}."
            )


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


def _rows_of(x: Any, rows: slice) -> Any:
    """Some of the data; all of them as they are."""
    return x if rows.stop >= num_rows(x) and not rows.start else take(x, rows)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _summed(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])
