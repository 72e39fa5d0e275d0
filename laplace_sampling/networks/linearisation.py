"""The network as a function of one flat weight vector, and its Jacobian products.

Everything above this room sees a network only through :class:`Linearisation`: `φ(x) = ∂f(w, x)/∂w` at the trained
weights `w̄` is applied, never formed; only `jacobian`, for small problems, forms it.

A product passes these files:

- `shell`: the network as a function of its random weights, on a private copy; other threads and Ctrl-C wait for one
  product (`solving`).
- `memory`: how many data and vectors go through it at once.
- `products`: the ways of differentiating, of which the first that works is taken.
- `derivatives`: derivatives that torch lacks or has wrong.
- `consistency`: comparisons of forward with reverse mode, and of both with the module itself, which find an operation
  whose forward derivative is wrong.

`select` finds the module inside its wrappers, and which of its parameters are random.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from laplace_sampling.data.batches import Layout, num_rows, rows_of, take
from laplace_sampling.networks.derivatives import differentiable, forward_mode_kernels
from laplace_sampling.networks.memory import Batching, keep_freed_memory
from laplace_sampling.networks.products import JacobianProducts, rows_of_each_datum, vjp_with_graph
from laplace_sampling.networks.sharded import MANAGED, is_dtensor, reshard
from laplace_sampling.networks.shell import Shell
from laplace_sampling.networks.solving import users_precision

Selection = Sequence[str] | str | Callable[[str, nn.Parameter], bool] | None


def select(module: nn.Module, selection: Selection) -> list[str]:
    """Names of the random weights, in the order of `module.named_parameters()`.

    Raises:
        TypeError: for what is no selection.
        ValueError: if it selects nothing, names nothing, or takes weights that are not floating point.
    """
    parameters = dict(module.named_parameters())
    if selection is None:
        names = _trained(module)
    elif callable(selection):
        names = [name for name, p in parameters.items() if selection(name, p)]
    else:
        names = _matching(module, _patterns(selection))
    if not names:
        raise ValueError(f"`parameters` selects nothing; the model has {list(parameters)}.")
    fixed = [name for name in names if not _has_derivatives(parameters[name])]
    if fixed:
        raise ValueError(f"Parameters {fixed} are not floating point; leave them out with `parameters=`.")
    return names


def _trained(module: nn.Module) -> list[str]:
    names = _require_gradient(module)
    if not names:
        raise ValueError(
            "No parameter of the model requires a gradient, so none is random. Name some with `parameters=[...]`, or "
            "call `requires_grad_(True)` on them. A quantised layer has none: pass the model before it was quantised."
        )
    return names


def _require_gradient(module: nn.Module) -> list[str]:
    # Weights that were frozen in training are not at a mode of the loss in their own directions.
    return [name for name, p in module.named_parameters() if p.requires_grad and _has_derivatives(p)]


def _has_derivatives(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def _patterns(selection: Sequence[str] | str) -> list[str]:
    patterns = [selection] if isinstance(selection, str) else selection
    if isinstance(patterns, Iterable) and all(isinstance(pattern, str) for pattern in patterns):
        return list(patterns)
    raise TypeError(
        f"`parameters` takes names, globs, a predicate `(name, parameter) -> bool` or masks by name, but got "
        f"a {type(patterns).__name__}; the names are those of `model.named_parameters()`."
    )


def _matching(module: nn.Module, patterns: list[str]) -> list[str]:
    """Names that match a pattern and none with a leading `"!"`; with these alone, of all that require a gradient."""
    parameters = dict(module.named_parameters())
    names_of, classes_of = _all_names(module)
    existing = {name for names in names_of.values() for name in names}

    def matches(name: str, pattern: str) -> bool:
        pattern = pattern.removeprefix("!")
        if pattern in existing:  # brackets in a name are no glob
            return pattern in names_of[name]
        return any(fnmatchcase(alias, pattern) for alias in (*names_of[name], *classes_of[name]))

    # A pattern with a misprint would otherwise select nothing without a word, or exclude nothing.
    unknown = [pattern for pattern in patterns if not any(matches(name, pattern) for name in parameters)]
    if unknown:
        raise ValueError(f"`parameters={unknown}` match no parameter of the model; it has {list(parameters)}.")
    included = [pattern for pattern in patterns if not pattern.startswith("!")]
    excluded = [pattern for pattern in patterns if pattern.startswith("!")]
    if included or not patterns:
        names = [name for name in parameters if any(matches(name, pattern) for pattern in included)]
    else:
        names = _require_gradient(module)
    return [name for name in names if not any(matches(name, pattern) for pattern in excluded)]


def _all_names(module: nn.Module) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The names of each parameter, of which tied weights have several, and `Class.name` of the modules that own it."""
    parameters = dict(module.named_parameters())
    # By identity: tied weights are one parameter, random once, under whichever of its names the user selects it.
    first_name = {id(p): name for name, p in parameters.items()}
    names_of: dict[str, list[str]] = {name: [] for name in parameters}
    classes_of: dict[str, list[str]] = {name: [] for name in parameters}
    for name, p in module.named_parameters(remove_duplicate=False):
        owner, _, last = name.rpartition(".")
        names_of[first_name[id(p)]].append(name)
        classes_of[first_name[id(p)]].append(f"{type(module.get_submodule(owner)).__name__}.{last}")
    return names_of, classes_of


# The module ---------------------------------------------------------------------------------------------------------


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`, which share its weights.

    Raises:
        TypeError: if it is no module, or a scripted one, whose operations cannot be differentiated forwards; if its
            weights are shared out over processes in another way than by `fully_shard`.
        ValueError: if a part of it has weights that cannot be differentiated, or that change when it is called.
    """
    while isinstance(module, nn.Module):
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules and not isinstance(module, torch.jit.ScriptModule):
            module = module._modules["_orig_mod"]  # pyright: ignore
        else:
            reshard(module)
            for name, part in module.named_modules():
                _check_part(part, f"`{name}` of the model" if name else "The model")
            return module
    raise TypeError(f"`Linearisation(module)` needs a torch.nn.Module, but got {type(module).__name__}.")


def _check_part(part: nn.Module, subject: str) -> None:
    kind = type(part).__name__
    if isinstance(part, torch.jit.ScriptModule):
        raise TypeError(f"{subject} is a {kind} of torch.jit, which has no Jacobian products: pass its plain module.")
    if kind == "FullyShardedDataParallel":
        raise TypeError(
            f"{subject} is a {kind}, whose parameters are flattened: apply `fully_shard` to the model instead."
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise ValueError(
            f"{subject} is an `nn.{kind}(max_norm=...)`, which changes its weights in its forward: renormalise them "
            "once, and set `max_norm` to None."
        )
    for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
        if tensor is None:
            continue
        if is_lazy(tensor) or tensor.is_meta:
            raise ValueError(
                f"{subject} is a {kind} whose `{name}` holds no numbers, being "
                f"{'lazy: run the model on a batch' if is_lazy(tensor) else 'on `meta`: load its weights'} first."
            )
        if tensor.is_inference():
            raise ValueError(
                f"{subject} is a {kind} whose `{name}` was made in `torch.inference_mode()`: make or load the model "
                "outside of it, or pass `copy.deepcopy(model)`."
            )
        if is_dtensor(tensor) and not _is_shared_by_fsdp_alone(tensor, part):
            raise TypeError(
                f"{subject} is a {kind} whose `{name}` is shared out in another way than by `fully_shard` alone, as by "
                "`parallelize_module`: load the full weights into a model that is not parallelised."
            )


def _is_shared_by_fsdp_alone(tensor: Any, part: nn.Module) -> bool:
    *replicated, last = tensor.placements
    by_fsdp = getattr(part, MANAGED, False) and not getattr(part, "_distribute_module_applied", False)
    return by_fsdp and last.is_shard() and all(placement.is_replicate() for placement in replicated)


# `u ↦ Bu`, `[K, N, C]` both.
Curvature = Callable[[Tensor], Tensor]


# A JVP of some data takes the rows of their Jacobian, if there are at least so many vectors for each. A pullback of one
# datum takes four times a JVP of one of 64 vectors, in LeNets and a ResNet on one core.
_VECTORS_OF_A_ROW = 4


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

    def to_weights(self, v: Float[Tensor, "*K P"]) -> Float[Tensor, "*K P"]:
        """The weights of vectors in the coordinates of products, which are others in a `FilterNetwork`."""
        return v

    def of_gradients(self, v: Float[Tensor, "*K Q"]) -> Float[Tensor, "*K P"]:
        """Gradients in all elements of the parameters as gradients in the coordinates of products."""
        return v

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
        with torch.enable_grad(), self.differentiating(layers=False), watch(weights) as watched:
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
        self.products["jvp"] += len(v) * num_rows(x)
        few = not graph and num_rows(x) <= len(v) / _VECTORS_OF_A_ROW
        if few and (rows := self._rows(x, len(v) / _VECTORS_OF_A_ROW)) is not None:
            return (rows @ v.T).permute(2, 0, 1)
        weights, largest = self.shell.random(), self.batching.largest_tensor(self.shell.forward, x)
        tangents = {name: t.to(weights[name].dtype) for name, t in self.unflatten(v).items()}
        with differentiable(graph):
            return self.ways.push(self.shell.outputs(x), weights, tangents, largest, graph=graph)

    def _pull(self, x: Any, u: Tensor) -> Tensor:
        self.products["vjp"] += len(u) * num_rows(x)
        with torch.enable_grad():
            weights = self.shell.leaves()
            return self._pulled(x, weights, self.shell.outputs(x)(weights), u)

    def _pulled(self, x: Any, weights: dict[str, Tensor], outputs: Tensor, u: Tensor) -> Tensor:
        rows, largest = u.new_empty(len(u), self.num_parameters), self.batching.largest_tensor(self.shell.forward, x)
        cotangents = u.to(outputs.dtype).reshape(len(u), *outputs.shape)
        self.shell.write(self.ways.pull(outputs, list(weights.values()), cotangents, largest), rows)
        return rows

    def _rows(self, x: Any, most: float = math.inf) -> Float[Tensor, "N C P"] | None:
        """The Jacobian of few data by a pullback of each output; `None` if these are more than `most`, or constant."""
        with torch.enable_grad():
            weights = self.shell.leaves()
            outputs = self.shell.outputs(x)(weights)
            if not 0 < outputs.numel() <= most or not outputs.requires_grad:
                return None
            cotangents = torch.eye(outputs.numel(), dtype=self.dtype, device=self.device)
            return self._pulled(x, weights, outputs, cotangents).unflatten(0, outputs.shape)

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
        if num_rows(x) == 1 and not graph:
            with self.differentiating(layers=False):
                rows = self._rows(x)
            if rows is not None:
                return rows
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
