"""The network as a function of one flat weight vector, and its Jacobian products.

Everything above this room sees a network only through :class:`Linearisation`: `φ(x) = ∂f(w, x)/∂w` at the trained
weights `w̄` is applied, never formed; only `jacobian`, for small problems, forms it.

A product passes these policies, each in a file of its own:

- `shell`: the network as a function of its random weights, on a private copy (`private_copy`); other threads and
  Ctrl-C wait for one product (`solving`).
- `batching`: how many data and vectors go through it at once.
- `jacobian_products`: the ways of differentiating, of which the first that works is taken.
- `derivative_rules`, `elementary_layers`: derivatives that torch lacks or has wrong.
- `consistency`: comparisons of forward with reverse mode, and of both with the module itself, which find an operation
  whose forward derivative is wrong.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.data.batches import Layout, num_rows, rows_of, take
from laplace_sampling.networks.batching import Batching, keep_freed_memory
from laplace_sampling.networks.derivative_rules import differentiable, forward_mode_kernels
from laplace_sampling.networks.jacobian_products import (
    JacobianProducts,
    rows_of_each_datum,
    vjp_with_graph,
)
from laplace_sampling.networks.selection import Selection, select, unwrapped
from laplace_sampling.networks.shell import Shell
from laplace_sampling.networks.solving import users_precision

# `u ↦ Bu`, `[K, N, C]` both.
Curvature = Callable[[Tensor], Tensor]


class Linearisation:
    r"""A trained network `f(w, x)` and the products of its Jacobian `φ(x)` in the weights.

    Products are those of the module at the moment of this call: it is copied, and neither changed nor run. The copy
    shares the memory of weights that are not random, which must not be changed in place.

    Args:
        module: the trained network. Inputs `x` and outputs are of the forms of `laplace_sampling.data.batches`.
        parameters: which weights are random: names, globs (`"head.*"`), those with a leading `"!"` left out, or a
            predicate `(name, parameter) -> bool`. By default all that require a gradient. A glob may also be of the
            class of the module that owns a weight: `"Linear.*"`, `"!*Norm*.*"`.
        autocast: dtype of the operations that `torch.autocast` lowers, within Jacobian products only. Products are
            given and returned in `dtype`, and summed over data in it.
        batching: how many data and vectors go through the network at once, where another network shares them.

    Attributes:
        num_parameters: `P`, the length of a flat weight vector.
        products: counts of `jvp` and `vjp`; the unit is one datum and one vector.
        source: the network that was given, inside its wrappers.
        shell, batching, ways, known_layers: the policies.

    Raises:
        TypeError: if `module` is not an `nn.Module`.
        ValueError: if the selection names nothing, something unknown, or weights that are not floating point; for
            an `autocast` that is not narrower than `dtype`.
    """

    def __init__(
        self,
        module: nn.Module | Shell,
        parameters: Selection = None,
        *,
        autocast: torch.dtype | None = None,
        batching: Batching | None = None,
    ) -> None:
        # Nothing here runs the network or changes the process: the first product does what products need.
        self.batching = batching or Batching()
        if isinstance(module, Shell):
            self.shell = module
        else:
            module = unwrapped(module)
            self.shell = Shell(module, select(module, parameters), autocast)
        self.num_parameters = sum(self.shell.sizes)
        self.products = {"jvp": 0, "vjp": 0}
        self.ways = JacobianProducts(self.shell.module, self.batching)
        self.known_layers = cast(list[Any] | None, None)

    @property
    def module(self) -> nn.Module:
        """The private copy of the network."""
        return self.shell.module

    @property
    def source(self) -> nn.Module:
        return self.shell.source

    @property
    def names(self) -> list[str]:
        """The random weights, in the order of the flat vector."""
        return self.shell.names

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the random weights, by name."""
        return self.shell.shapes

    @property
    def autocast(self) -> torch.dtype | None:
        return self.shell.autocast

    @property
    def device(self) -> torch.device:
        return self.shell.device

    @property
    def module_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.shell.module_dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of vectors, products and outputs: float32 where the weights have half precision."""
        return self.shell.dtype

    @property
    def weights(self) -> Float[Tensor, " P"]:
        """The trained weights `w̄` as one flat vector (a copy)."""
        return torch.cat([w.reshape(-1) for w in self.shell.random().values()]).to(self.dtype)

    @property
    def lacking(self) -> str | None:
        """The operation without a right forward derivative and its module, if one was met."""
        return self.ways.lacking

    def take_two_pullbacks(self, origin: str, having: str = "") -> None:
        """Jacobian-vector products take two reverse passes from here on, as `JacobianProducts` does."""
        self.ways.take_two_pullbacks(origin, having)

    @property
    def selection(self) -> Any:
        """What `parameters=` has to be for the same random weights, as JSON."""
        return self.names

    def layers(self) -> tuple[list[str], Tensor]:
        """The names of the modules that own the weights, and for each weight the index of its module, `[P]`."""
        return self.shell.layers()

    def unflatten(self, v: Tensor) -> dict[str, Tensor]:
        """Views of `[..., P]` in the shapes of the parameters, by name."""
        return self.shell.unflatten(v)

    def fingerprint(self) -> Tensor:
        """SHA-256 of all weights and buffers, `[32]` bytes: tells whether a network is the one that was fitted."""
        return self.shell.fingerprint()

    def with_names(self, names: list[str]) -> "Linearisation":
        """Returns the network with other weights random; what was learnt about its products is shared."""
        other = Linearisation(self.shell.with_names(names), batching=self.batching)
        # Operations without derivatives are those of the module, whichever weights are random.
        other.ways, other.products = self.ways, self.products
        return other

    def in_float64(self) -> Self:
        """The network in float64; products are counted together."""
        return self.on(self.shell.in_float64())

    def renewed(self) -> Self:
        """The network with the weights that it has now; products are counted together."""
        return self.on(self.shell.renewed())

    def on(self, shell: Shell) -> Self:
        """Returns the products of another copy of the network."""
        other = copy.copy(self)
        other.shell = shell
        return other

    @contextmanager
    def keep_inputs(self, data: Any) -> Iterator[list[Any]]:
        """The inputs that `shortened` takes, of calls inside; none but of a last layer."""
        yield []

    def shortened(self, data: Any, kept: Sequence[Any]) -> "tuple[Linearisation, Any]":
        """The part of the network that has random weights and its inputs, if these were kept."""
        return self, data

    # Outputs ----------------------------------------------------------------------------------------------------------

    def __call__(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N ..."]:
        """The network's own output `f(w̄, x)`, bit for bit what `module.eval()(x)` gives; of several heads flat.

        Without gradient; with `graph`, autograd differentiates it in `x`.
        """
        if not graph:
            return self.evaluate(x)[0]
        with torch.enable_grad(), self.shell.opened():
            return self.shell(self.shell.random(), x)

    def evaluate(self, x: Any) -> tuple[Float[Tensor, "N ..."], Layout]:
        """The network's own output and its layout, without gradient."""
        with torch.no_grad(), self.shell.opened(), users_precision():
            parts = self.batching.in_parts(num_rows(x), lambda rows: self.shell.evaluate(rows_of(x, rows)))
        return _joined([output for output, _ in parts], 0).to(self.dtype), parts[0][1]

    def traced(self, x: Any, watch: Callable[[dict[str, Tensor]], Any]) -> tuple[Float[Tensor, "N ..."], Any]:
        """Outputs with a graph that autograd differentiates, run in the context `watch` of the weights in it."""
        weights = self.shell.leaves()
        with torch.enable_grad(), self.differentiating(), watch(weights) as watched:
            return self.shell(weights, x), watched

    # Products ---------------------------------------------------------------------------------------------------------

    def jvp(self, x: Any, v: Float[Tensor, "K P"], *, graph: bool = False) -> Float[Tensor, "K N C"]:
        """`φ(x) v_k` for each of `K` vectors by forward mode; the outputs of a datum are flattened to `C`.

        Without gradient; with `graph`, autograd differentiates it in `x` and `v`.
        """
        self._check_width(v, "jvp")
        if graph:
            return self._run(self._push, x, v, graph=True)
        parts = self.batching.in_parts(num_rows(x), lambda rows: self._run(self._push, rows_of(x, rows), v))
        return _joined(parts, 1)

    def vjp(self, x: Any, u: Float[Tensor, "K N C"], *, graph: bool = False) -> Float[Tensor, "K P"]:
        """`Σ_n φ(x_n)ᵀ u_kn` for each of `K` cotangents: one forward pass, `K` pullbacks.

        Without gradient; with `graph`, autograd differentiates it in `x` and `u`.
        """
        if graph:
            self.products["vjp"] += len(u) * num_rows(x)
            with differentiable(True), self.differentiating():
                return vjp_with_graph(self.shell, x, u, self.batching.chunk_size)
        parts = self.batching.in_parts(num_rows(x), lambda rows: self._run(self._pull, rows_of(x, rows), u[:, rows]))
        return sum(parts[1:], parts[0])

    def ggn(self, x: Any, v: Float[Tensor, "K P"], curvature: Curvature) -> Float[Tensor, "K P"]:
        """`Σ_n φ(x_n)ᵀ B_n φ(x_n) v_k`, `curvature` being `B`: `vjp(x, curvature(jvp(x, v)))`.

        One vector takes one forward pass instead of two. For several its share is small, and dual numbers with a graph
        would hold the activations of each of them.
        """
        self._check_width(v, "ggn")
        if num_rows(x) <= (self.batching.max_rows or num_rows(x)):
            # Memory that does not hold the JVP and the pullback together may hold one after the other.
            with suppress(torch.OutOfMemoryError):
                return self._run(self._ggn, x, v, curvature)
        return self.vjp(x, curvature(self.jvp(x, v)))

    def vjp_each(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, "N P"]:
        """`φ(x_n)ᵀ u_n` of each datum by itself: as many products as one cotangent of `vjp`."""
        return _joined(self.batching.in_parts(num_rows(x), lambda rows: self._vjp_each(rows_of(x, rows), u[rows])), 0)

    def jacobian(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N C P"]:
        """`φ(x)` in full, `[N, C, P]`: for the exact method and for exact diagonals of small problems only.

        Without gradient; with `graph`, autograd differentiates it in `x`.
        """
        if graph:
            return self._jacobian(x, graph)
        return _joined(self.batching.in_parts(num_rows(x), lambda rows: self._jacobian(rows_of(x, rows), graph)), 0)

    # Products of data that go through the network at once - -----------------------------------------------

    @contextmanager
    def differentiating(self, layers: bool = True) -> Iterator[None]:
        """The module in evaluation mode, with kernels that have forward derivatives."""
        keep_freed_memory()
        with self.shell.opened(), forward_mode_kernels(layers):
            yield

    def _run(self, product: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        with self.differentiating(layers=False):
            return product(*args, **kwargs)

    def _push(self, x: Any, v: Tensor, *, graph: bool = False) -> Tensor:
        weights, largest = self.shell.random(), self.batching.largest_tensor(self.shell.forward, x)
        tangents = {name: t.to(weights[name].dtype) for name, t in self.unflatten(v).items()}
        with differentiable(graph):
            product = self.ways.push(self.shell.outputs(x), weights, tangents, largest, graph=graph)
        self.products["jvp"] += len(v) * num_rows(x)
        return product

    def _pull(self, x: Any, u: Tensor) -> Tensor:
        rows, weights = u.new_empty(len(u), self.num_parameters), self.shell.leaves()
        largest = self.batching.largest_tensor(self.shell.forward, x)
        with torch.enable_grad():
            outputs = self.shell.outputs(x)(weights)
            cotangents = u.to(outputs.dtype).reshape(len(u), *outputs.shape)
            self.shell.write(self.ways.pull(outputs, list(weights.values()), cotangents, largest), rows)
        self.products["vjp"] += len(u) * num_rows(x)
        return rows

    def _ggn(self, x: Any, v: Tensor, curvature: Curvature) -> Tensor:
        rows = self._ggn_of_dual_numbers(x, v, curvature) if len(v) == 1 else None
        return self._pull(x, curvature(self._push(x, v))) if rows is None else rows

    def _ggn_of_dual_numbers(self, x: Any, v: Tensor, curvature: Curvature) -> Tensor | None:
        """The product of one vector by one forward pass; `None` where torch lacks a derivative."""
        weights, rows = self.shell.random(), torch.empty_like(v)
        tangent = {name: t[0].to(weights[name].dtype) for name, t in self.unflatten(v).items()}
        largest = self.batching.largest_tensor(self.shell.forward, x)
        gradients = self.ways.push_and_pull(self.shell.outputs(x), weights, tangent, curvature, largest)
        if gradients is None:
            return None
        self.shell.write([gradients], rows)
        self.products["jvp"] += num_rows(x)
        self.products["vjp"] += num_rows(x)
        return rows

    def _vjp_each(self, x: Any, u: Tensor) -> Tensor:
        self.products["vjp"] += num_rows(x)
        # Under `no_grad` torch's derivatives of `linalg.solve` and of determinants are wrong.
        with torch.enable_grad(), self.differentiating():
            return rows_of_each_datum(self.shell, self.ways, x, u)

    def _jacobian(self, x: Any, graph: bool) -> Tensor:
        with torch.no_grad(), self.differentiating(layers=False):
            num_outputs = self.shell.forward(take(x, slice(1))).numel()
        if self.num_parameters < num_outputs and not graph:  # columns are fewer than rows
            columns = torch.eye(self.num_parameters, dtype=self.dtype, device=self.device)
            return self._run(self._push, x, columns).permute(1, 2, 0)
        self.products["vjp"] += num_rows(x) * num_outputs
        # `enable_grad` also without a graph: see `_vjp_each`.
        with differentiable(graph), torch.enable_grad(), self.differentiating():
            return rows_of_each_datum(self.shell, self.ways, x, graph=graph)

    def _check_width(self, v: Tensor, call: str) -> None:
        if v.dim() != 2 or v.shape[1] != self.num_parameters:
            raise ValueError(
                f"`{call}(x, v)` needs `v` of shape [K, P] with P = {self.num_parameters}, but got {list(v.shape)}."
            )


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
