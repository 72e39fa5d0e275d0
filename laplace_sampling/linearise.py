"""The network as a function of one flat weight vector, and its Jacobian products.

Everything above this module sees a network only through :class:`Linearisation`:
`φ(x) = ∂f(w, x)/∂w` at the trained weights `w̄` is applied, never formed (but for `jacobian`,
which the exact method calls on small problems).
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from laplace_sampling.calling import Layout, arguments, batched, num_rows, read

__all__ = ["Linearisation", "Selection"]

Selection = Sequence[str] | str | Callable[[str, nn.Parameter], bool] | None

# Jacobian products evaluated together under `vmap`, which is measured to be up to 10 times faster than a loop, and
# never slower by more than 15 % (`benchmarks/products.py`). Most of the gain is there at 16; memory grows with it.
DEFAULT_CHUNK = 16


class Linearisation:
    r"""A trained network `f(w, x)` and the products of its Jacobian `φ(x)` in the weights.

    The module is held, never changed: it runs in evaluation mode with frozen buffers, and its
    modes are put back after every call, also after one that raised.

    Args:
        module: the trained network. Inputs `x` and outputs are of the forms of `laplace_sampling.calling`.
        parameters: which weights are random: names, globs (`"head.*"`) or a predicate
            `(name, parameter) -> bool`. By default all that require a gradient.
        chunk_size: how many vectors are pushed through the network together.

    Attributes:
        num_parameters: `P`, the length of a flat weight vector.
        names: the selected parameters, in the order of the flat vector.
        products: counts of `jvp` and `vjp`; the unit is one datum and one vector.

    Raises:
        TypeError: if `module` is not an `nn.Module`.
        ValueError: if the selection names nothing, something unknown, or weights that are not floating point.
    """

    def __init__(self, module: nn.Module, parameters: Selection = None, *, chunk_size: int = DEFAULT_CHUNK) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"`Linearisation(module)` needs a torch.nn.Module, but got {type(module).__name__}.")
        if chunk_size < 1:
            raise ValueError(f"`chunk_size` must be at least 1, but is {chunk_size}.")
        self.module = module
        self.chunk_size = chunk_size
        self.names = _select(module, parameters)
        self.shapes = {name: parameter.shape for name, parameter in self._selected().items()}
        self.num_parameters = sum(shape.numel() for shape in self.shapes.values())
        self.products = {"jvp": 0, "vjp": 0}

    def _selected(self) -> dict[str, Tensor]:
        parameters = dict(self.module.named_parameters())
        return {name: parameters[name].detach() for name in self.names}

    def _fixed(self) -> dict[str, Tensor]:
        """The weights that are not random, so that no gradient reaches those of the module."""
        return {name: p.detach() for name, p in self.module.named_parameters() if name not in self.shapes}

    @property
    def device(self) -> torch.device:
        return next(iter(self._selected().values())).device

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self._selected().values())).dtype

    @property
    def weights(self) -> Float[Tensor, " P"]:
        """The trained weights `w̄` as one flat vector (a copy)."""
        return torch.cat([w.reshape(-1) for w in self._selected().values()])

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
        with torch.enable_grad(), _evaluation_mode(self.module):
            return self._apply({**self._fixed(), **self._selected()}, x)

    def evaluate(self, x: Any) -> tuple[Float[Tensor, "N ..."], Layout]:
        """The network's own output and its layout, without gradient."""
        args, kwargs = arguments(x)
        with torch.no_grad(), _evaluation_mode(self.module):
            return read(self.module(*args, **kwargs), num_rows(x))

    def jvp(self, x: Any, v: Float[Tensor, "K P"], *, graph: bool = False) -> Float[Tensor, "K N C"]:
        """`φ(x) v_k` for each of `K` vectors by forward mode; the outputs of a datum are flattened to `C`.

        Without gradient; with `graph`, autograd differentiates it in `x` and `v`.
        """
        self._check_width(v, "jvp")
        num = num_rows(x)
        self.products["jvp"] += len(v) * num
        weights, fixed = self._selected(), self._fixed() if graph else {}

        def directional(tangent: dict[str, Tensor]) -> Tensor:
            out = jvp(lambda w: self._apply({**fixed, **w}, x), (weights,), (tangent,))[1]
            return out.reshape(num, -1)

        with _differentiable(graph), _evaluation_mode(self.module), _differentiable_kernels():
            tangents = self.unflatten(v.to(self.dtype))
            if len(v) == 1:
                return directional({name: t[0] for name, t in tangents.items()})[None]
            return vmap(directional, chunk_size=self.chunk_size)(tangents)

    def vjp(self, x: Any, u: Float[Tensor, "K N C"], *, graph: bool = False) -> Float[Tensor, "K P"]:
        """`Σ_n φ(x_n)ᵀ u_kn` for each of `K` cotangents: one forward pass, `K` pullbacks.

        Without gradient; with `graph`, autograd differentiates it in `x` and `u`.
        """
        self.products["vjp"] += len(u) * num_rows(x)
        if graph:
            return self._vjp_with_graph(x, u)
        weights = {name: w.requires_grad_() for name, w in self._selected().items()}
        result = torch.zeros(len(u), self.num_parameters, dtype=u.dtype, device=u.device)
        with torch.enable_grad(), _evaluation_mode(self.module), _differentiable_kernels():
            outputs = self._apply(weights, x)
            cotangents = u.to(outputs.dtype).reshape(len(u), *outputs.shape)
            for start in range(0, len(u), self.chunk_size):
                part = cotangents[start : start + self.chunk_size]
                batched = len(part) > 1  # measured: `vmap` of one is slower than none
                grads = torch.autograd.grad(
                    outputs,
                    list(weights.values()),
                    part if batched else part[0],
                    retain_graph=True,
                    is_grads_batched=batched,
                    allow_unused=True,  # a weight that the output does not depend on has derivative zero
                )
                offset = 0
                for shape, grad in zip(self.shapes.values(), grads, strict=True):
                    if grad is not None:
                        rows = slice(start, start + len(part))
                        result[rows, offset : offset + shape.numel()] = grad.reshape(len(part), -1)
                    offset += shape.numel()
        return result

    def vjp_each(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, "N P"]:
        """`φ(x_n)ᵀ u_n` of each datum by itself: as many products as one cotangent of `vjp`."""
        weights, num = self._selected(), num_rows(x)
        tensors, rebuild = batched(x)

        def single(w: dict[str, Tensor], x_n: list[Tensor], u_n: Tensor) -> dict[str, Tensor]:
            datum = rebuild([t[None] for t in x_n])
            return vjp(lambda w: self._apply(w, datum).reshape(-1), w)[1](u_n)[0]

        self.products["vjp"] += num
        with torch.no_grad(), _evaluation_mode(self.module), _differentiable_kernels():
            gradients = _of_each_datum(single, weights, tensors, u.to(self.dtype), chunk_size=4 * self.chunk_size)
            return torch.cat([g.reshape(num, -1) for g in gradients.values()], dim=1)

    def _vjp_with_graph(self, x: Any, u: Tensor) -> Tensor:
        fixed = self._fixed()
        with _differentiable(True), _evaluation_mode(self.module), _differentiable_kernels():
            outputs, pull, *_ = vjp(lambda w: self._apply({**fixed, **w}, x), self._selected())
            cotangents = u.to(outputs.dtype).reshape(len(u), *outputs.shape)
            (rows,) = vmap(pull, chunk_size=self.chunk_size)(cotangents)
            return torch.cat([row.reshape(len(u), -1) for row in rows.values()], dim=1).to(u.dtype)

    def jacobian(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N C P"]:
        """`φ(x)` in full, `[N, C, P]`: for the exact method and for exact diagonals of small problems only.

        Without gradient; with `graph`, autograd differentiates it in `x`.
        """
        weights, fixed = self._selected(), self._fixed() if graph else {}
        tensors, rebuild = batched(x)

        def single(w: dict[str, Tensor], x_n: list[Tensor]) -> Tensor:
            return self._apply({**fixed, **w}, rebuild([t[None] for t in x_n])).reshape(-1)

        self.products["vjp"] += num_rows(x) * self(x)[:1].numel()
        with _differentiable(graph), _evaluation_mode(self.module), _differentiable_kernels():
            rows = _of_each_datum(torch.func.jacrev(single), weights, tensors)
            return torch.cat([row.flatten(2) if row.dim() > 2 else row[..., None] for row in rows.values()], dim=-1)

    def in_float64(self) -> "Linearisation":
        """The same on a copy of the module in float64; products are counted together."""
        other = copy.copy(self)
        other.module = copy.deepcopy(self.module).double()
        return other

    def fingerprint(self) -> Tensor:
        """SHA-256 of all weights and buffers, `[32]` bytes: tells whether a network is the one that was fitted."""
        digest = hashlib.sha256()
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        for name, tensor in tensors:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)

    def _apply(self, weights: dict[str, Tensor], x: Any) -> Tensor:
        return read(functional_call(self.module, weights, *arguments(x)), num_rows(x))[0]

    def _check_width(self, v: Tensor, call: str) -> None:
        if v.dim() != 2 or v.shape[1] != self.num_parameters:
            raise ValueError(
                f"`{call}(x, v)` needs `v` of shape [K, P] with P = {self.num_parameters}, but got {list(v.shape)}."
            )


def _select(module: nn.Module, selection: Selection) -> list[str]:
    """Names of the random weights, in the order of `module.named_parameters()`."""
    parameters = dict(module.named_parameters())
    if selection is None:
        names = [name for name, p in parameters.items() if p.requires_grad]
        if not names:
            raise ValueError(
                "No parameter of the model requires a gradient, so none is random. "
                "Name some with `parameters=[...]`, or call `requires_grad_(True)` on them."
            )
    elif callable(selection):
        names = [name for name, p in parameters.items() if selection(name, p)]
    else:
        patterns = [selection] if isinstance(selection, str) else list(selection)
        unknown = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in parameters)]
        if unknown:
            raise ValueError(f"`parameters={unknown}` match no parameter of the model; it has {list(parameters)}.")
        names = [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        raise ValueError(f"`parameters` selects nothing; the model has {list(parameters)}.")
    wrong = [name for name in names if not parameters[name].is_floating_point()]
    if wrong:
        raise ValueError(f"Parameters {wrong} are not floating point; leave them out with `parameters=`.")
    return names


def _of_each_datum(
    single: Callable[..., dict[str, Tensor]],
    weights: dict[str, Tensor],
    *data: Tensor | list[Tensor],
    chunk_size: int | None = None,
) -> dict[str, Tensor]:
    """`single(weights, *datum)`, stacked over data: under `vmap`, else (where values steer the network) one by one."""
    try:
        return vmap(single, in_dims=(None, *[0] * len(data)), chunk_size=chunk_size)(weights, *data)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
    first = data[0][0] if isinstance(data[0], list) else data[0]
    rows = [single(weights, *tree_map(lambda t, n=n: t[n], list(data))) for n in range(len(first))]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode in every submodule; modes, parameters and buffers are put back to what they were."""
    saved = [(m, m.training, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    try:
        # The attribute, not `eval()`: modules that override `train` would not come back as they were.
        for m, *_ in saved:
            m.training = False
        yield
    finally:
        for m, training, parameters, buffers in saved:
            m.training = training
            # `functional_call` leaves plain tensors behind in a module that is registered under two names.
            m._parameters.update(parameters)
            m._buffers.update(buffers)


@contextmanager
def _differentiable_kernels() -> Iterator[None]:
    """Attention kernels that have forward-mode derivatives; the fused ones have none (pytorch #117629, #128971)."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel([SDPBackend.MATH]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


class _ComposedNorms(TorchFunctionMode):
    """Layer and group normalisation from elementary operations.

    The second derivatives of torch's own take the mean and variance of an input for constants (torch 2.15): a Jacobian
    product through them has wrong derivatives in the input, silently.
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.layer_norm:
            return _layer_norm(*args, **(kwargs or {}))
        if func is F.group_norm:
            return _group_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(axes, keepdim=True)
    scaled = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    grouped = input.reshape(len(input), num_groups, -1)
    scaled = _layer_norm(grouped, grouped.shape[-1:], eps=eps).reshape(input.shape)
    channels = (1, -1, *[1] * (input.dim() - 2))
    scaled = scaled if weight is None else scaled * weight.reshape(channels)
    return scaled if bias is None else scaled + bias.reshape(channels)


@contextmanager
def _differentiable(graph: bool) -> Iterator[None]:
    """Whether Jacobian products have derivatives."""
    with torch.set_grad_enabled(graph), _ComposedNorms() if graph else nullcontext():
        yield
