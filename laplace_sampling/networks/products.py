"""The ways of differentiating a network: each product is taken by the first way that works for it.

JVPs of many vectors are tried under `vmap`, then one by one, both by forward mode; then as the derivative of `u ↦ φᵀu`,
which is linear, in `u`: two reverse passes. A way that failed is not tried again, and a notice says so once.
"""

import linecache
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import jacrev, jvp, vjp, vmap

from laplace_sampling.data.batches import batched, num_rows, take
from laplace_sampling.networks.derivatives import ComposedLayers, by_branch
from laplace_sampling.networks.memory import Batching
from laplace_sampling.networks.shell import HALF, Shell, Weights


def rounding(dtype: torch.dtype) -> float:
    """The relative difference that rounding of a whole network may bring about: 2e-3 in float32, 0.1 in bfloat16.

    Networks in three precisions differed by at most 1e-6 and 0.05. With the power 0.8 a network in bfloat16 would be
    refused; with 0.2, derivatives that are wrong by 4 % in float32 would pass.
    """
    return torch.finfo(dtype).eps ** 0.4


def difference(a: Tensor, b: Tensor) -> float:
    """`‖a − b‖/‖b‖`, zero where both are equal; infinite for other shapes."""
    if a.shape != b.shape or torch.equal(a, b):
        return 0.0 if torch.equal(a, b) else math.inf
    size = float(b.norm())
    return float((a - b).norm()) / size if size else math.inf


Function = Callable[[Weights], Tensor]


# Exceptions of operations that lack a derivative or a rule for batches; the last two are of operations that call
# functions, as `cond` (torch 2.14).
_LACKING = (RuntimeError, NotImplementedError, KeyError, TypeError, AssertionError)


def _attempt(way: Callable[[], Any], plain: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """The result of a way, or the error by which it fails each time although the network itself works.

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
    """The ways that work for one network, of a function of weights `{name: tensor} -> [N, C]`.

    Args:
        module: the network, to be named in notices.
        batching: says how many vectors go together.

    Attributes:
        lacking: the operation without a forward derivative and its module, once one was met.
        data_together: whether Jacobians of many data are computed together.
        rows_are_right: whether these need not be compared with those of a datum alone.
    """

    def __init__(self, module: nn.Module, batching: Batching) -> None:
        self.module, self.batching = module, batching
        self._pushes = [self._push_together, self._push_each, self._push_by_two_pullbacks]
        self._pulls_together = self.data_together = True
        self.rows_are_right, self._dual_works = False, True
        self.lacking: str | None = None

    def push(
        self, f: Function, weights: Weights, tangents: Weights, largest: float, *, graph: bool
    ) -> Float[Tensor, "K N C"]:
        """`φ v_k`.

        Args:
            f: the function.
            weights: where it is differentiated.
            tangents: `v_k`, by weight `[K, ...]`.
            largest: bytes of the largest tensor that the network makes.
            graph: whether the product is differentiable itself.

        Raises:
            RuntimeError: if an operation has neither a forward derivative nor a second reverse one.
        """
        errors = []
        # `vmap` over a single vector would only take longer.
        single = len(next(iter(tangents.values()))) == 1
        for way in self._pushes:
            if single and way == self._push_together:
                continue
            with torch.enable_grad():  # `no_grad` would stop forward derivatives too, see `derivatives`
                result, error = _attempt(partial(way, f, weights, tangents, largest, graph), partial(f, weights))
            if error is not None:
                errors.append(error)
                continue
            if errors:
                self._settle_on(way, errors[-1])
            return result if graph else result.detach()
        forward, reverse = origin_of(errors[0], self.module), origin_of(errors[-1], self.module)
        raise RuntimeError(
            f"{type(self.module).__name__} has no Jacobian-vector product. By forward mode: {forward}. By reverse "
            f"mode: {reverse}. Replace this operation by one that torch differentiates, or choose weights after it "
            "with `parameters=`."
        ) from errors[0]

    def _settle_on(self, way: Callable, error: Exception) -> None:
        """Drops the ways before this one, and says why."""
        origin = origin_of(error, self.module)
        if way == self._push_each:
            self._pushes = self._pushes[self._pushes.index(way) :]
            message = f"takes one vector at a time, which is slower: {origin}"
            warnings.warn(f"The Jacobian-vector product of {type(self.module).__name__} {message}.", stacklevel=2)
        else:
            self.take_two_pullbacks(origin, "no forward derivative")

    def take_two_pullbacks(self, origin: str, having: str = "") -> None:
        """From here on `push` takes two reverse passes.

        Args:
            origin: the operation that is the reason, and its module.
            having: what a notice says that the product has; there is none without it.
        """
        self._pushes, self.lacking = [self._push_by_two_pullbacks], origin
        if having:
            how = f"has {having}; two reverse passes are taken instead, which is slower"
            warnings.warn(f"The Jacobian-vector product of {type(self.module).__name__} {how}: {origin}.", stacklevel=2)

    def _push_together(self, f: Function, weights: Weights, tangents: Weights, largest: float, graph: bool) -> Tensor:
        like = next(iter(tangents.values()))
        together = self.batching.vectors_together(len(like), like.device, largest)
        chunk_size = together if together < len(like) else None  # splitting takes as long as a small network
        return vmap(lambda t: jvp(f, (weights,), (t,))[1], chunk_size=chunk_size)(tangents)

    def _push_each(self, f: Function, weights: Weights, tangents: Weights, largest: float, graph: bool) -> Tensor:
        num = len(next(iter(tangents.values())))
        # For operations that have a forward derivative, but no rule for batches.
        each = [{name: t[k] for name, t in tangents.items()} for k in range(num)]
        return torch.stack([jvp(f, (weights,), (t,))[1] for t in each])

    def _push_by_two_pullbacks(
        self, f: Function, weights: Weights, tangents: Weights, largest: float, graph: bool
    ) -> Tensor:
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        return push_by_two_pullbacks(f(leaves), leaves, tangents, graph)

    def pull(
        self, outputs: Tensor, weights: list[Tensor], cotangents: Float[Tensor, "K ..."], largest: float
    ) -> Iterator[list[Tensor | None]]:
        """`φᵀ u_k` of a few cotangents after the other, by weight, `[k, ...]`.

        A weight that the outputs do not depend on has `None`.

        Args:
            outputs: with a graph.
            weights: leaves of that graph.
            cotangents: `u_k`.
            largest: bytes of the largest tensor that the network makes.

        Raises:
            ValueError: if the outputs depend on none of the weights.
        """
        if not outputs.requires_grad:
            raise ValueError(
                f"The outputs of {type(self.module).__name__} depend on none of the random weights by operations that "
                "torch differentiates. Name others with `parameters=`."
            )

        def gradients(u: Tensor, batched: bool = False) -> tuple[Tensor | None, ...]:
            with ComposedLayers():  # checkpoints run a part of the network again
                return torch.autograd.grad(
                    outputs, weights, u, retain_graph=True, allow_unused=True, is_grads_batched=batched
                )

        together = self.batching.pullbacks_together(len(cotangents), outputs.device, largest)
        for part in cotangents.split(together if self._pulls_together else 1):
            if len(part) > 1 and self._pulls_together:
                result, error = _attempt(partial(gradients, part, batched=True), partial(gradients, part[0]))
                if error is None:
                    # Without any gradient nothing says how many cotangents there were: one row is given for each.
                    dependent = any(g is not None for g in result)
                    yield from [list(result)] * (1 if dependent else len(part))
                    continue
                # Without a notice: one by one is as fast where the network is not tiny.
                self._pulls_together = False
            for u in part:
                yield [None if g is None else g[None] for g in gradients(u)]

    def push_and_pull(
        self, f: Function, weights: Weights, tangent: Weights, curvature: Callable[[Tensor], Tensor], largest: float
    ) -> list[Tensor | None] | None:
        """`φᵀ B φ v` of one vector by one forward pass; `None` where torch lacks a derivative.

        The pass computes dual numbers, whose values carry the graph of the pullback.
        """
        if self._pushes[0] == self._push_by_two_pullbacks or not self._dual_works:
            return None
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}

        def product() -> list[Tensor | None]:
            with torch.enable_grad(), dual_level():
                outputs = f({name: make_dual(w, tangent[name]) for name, w in leaves.items()})
                value, change = unpack_dual(outputs)
                change = torch.zeros_like(value) if change is None else change.detach()
            return next(iter(self.pull(value, list(leaves.values()), curvature(change[None]), largest)))

        # The pullback is part of the attempt: checkpoints run a part of the network again, then without dual numbers.
        gradients, error = _attempt(product, partial(f, weights))
        self._dual_works = error is None
        return gradients

    def of_each_datum(
        self, together: Callable[[], Weights], alone: Callable[[int], list[Tensor]], weights: Weights, num: int
    ) -> Weights:
        """`together()`, under `vmap`; where that fails, or is not right, `alone(n)` for each datum, stacked."""
        reason = None
        if self.data_together:
            rows, error = _attempt(together, partial(alone, 0))
            if error is None and (self.rows_are_right or num == 1 or self._is_right(rows, partial(alone, num - 1))):
                return rows
            wrong = "torch's derivatives of many of them at once are wrong"
            reason = wrong if error is None else origin_of(error, self.module)
        rows = [alone(n) for n in range(num)]
        if reason is not None:
            self.data_together = False
            message = f"Jacobians of {type(self.module).__name__} take one datum at a time, which is slower"
            warnings.warn(f"{message}: {reason}.", stacklevel=2)
        return {name: torch.stack([row[n] for row in rows]) for n, name in enumerate(weights)}

    def _is_right(self, rows: Weights, last: Callable[[], list[Tensor]]) -> bool:
        """Whether rows of data together are those of the last datum alone; asked once.

        torch has derivatives that are wrong under `vmap` only, as those of `torch.linalg.lu_factor`.
        """
        # Half precision has ties, such as those of maxima, which either of them may break in another way.
        if any(is_functorch_wrapped_tensor(row) or row.dtype in HALF for row in rows.values()):
            return True
        self.rows_are_right = True
        together, alone = (
            torch.cat([r.detach().flatten() for r in of]) for of in ([row[-1] for row in rows.values()], last())
        )
        return not difference(together, alone) > rounding(torch.bfloat16)


def push_by_two_pullbacks(
    outputs: Tensor, leaves: Weights, tangents: Weights, graph: bool = False
) -> Float[Tensor, "K ..."]:
    """`φ v_k` as the derivative of `u ↦ φᵀu` in `u`.

    Args:
        outputs: a tensor with a graph.
        leaves: the weights in that graph, by name.
        tangents: `v_k`, `[K, ...]`.
        graph: whether the product is differentiable itself.
    """
    u = torch.zeros_like(outputs).requires_grad_()
    with ComposedLayers():  # checkpoints run a part of the network again
        pulled = torch.autograd.grad(outputs, list(leaves.values()), u, create_graph=True, allow_unused=True)
    # Gradients that do not depend on `u` contribute nothing.
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


# Rows of the Jacobian: derivatives of each datum by itself, for all data together under `vmap` ------------------------


def rows_of_each_datum(
    shell: Shell, ways: JacobianProducts, x: Any, u: Float[Tensor, "N C"] | None = None, *, graph: bool = False
) -> Tensor:
    """`φ(x_n)ᵀ u_n`, `[N, P]`; without `u` the Jacobians `φ(x_n)`, `[N, C, P]`."""
    weights, num = shell.random(), num_rows(x)
    ways.rows_are_right |= shell.mesh is not None  # processes that share out the weights must agree
    tensors, rebuild = batched(x)
    if u is not None:
        tensors = [*tensors, u.to(shell.dtype)]

    # Each datum is a batch of one, so that the network sees the axis that it expects.
    def of_datum(x_n: list[Tensor]) -> Weights:
        *x_n, u_n = x_n if u is not None else [*x_n, None]
        datum = rebuild([t[None] for t in x_n])
        f = lambda w: shell(w, datum).reshape(-1)  # noqa: E731
        return jacrev(f)(weights) if u_n is None else vjp(f, weights)[1](u_n)[0]

    rows = ways.of_each_datum(
        lambda: by_branch(vmap(of_datum), tensors, num if u is None else 4 * ways.batching.chunk_size),
        lambda n: _rows_alone(shell, take(x, slice(n, n + 1)), None if u is None else u[n : n + 1], graph),
        weights,
        num,
    )
    axes = 2 if u is None else 1
    full = torch.cat([row.reshape(*row.shape[:axes], -1) for row in rows.values()], dim=-1)
    full = full if u is None else full.to(u.dtype)
    return full if graph else full.detach()


def _rows_alone(shell: Shell, x: Any, u: Tensor | None, graph: bool) -> list[Tensor]:
    """`φᵀu` of one datum, by weight; the rows of its Jacobian without `u`."""
    with torch.enable_grad():
        weights = shell.leaves()
        outputs, leaves = shell(weights, x).reshape(-1), list(weights.values())
        options = {"retain_graph": True, "create_graph": graph, "allow_unused": True, "materialize_grads": True}
        cotangents = torch.eye(len(outputs)).to(outputs) if u is None else u.to(outputs.dtype)
        pulled = [torch.autograd.grad(outputs, leaves, cotangent, **options) for cotangent in cotangents]
    return [of_weight[0] if u is not None else torch.stack(of_weight) for of_weight in zip(*pulled, strict=True)]


def vjp_with_graph(shell: Shell, x: Any, u: Float[Tensor, "K N C"], chunk_size: int) -> Float[Tensor, "K P"]:
    """`Σ_n φ(x_n)ᵀ u_kn` that autograd differentiates in `x` and `u`."""
    outputs, pull, *_ = vjp(lambda w: shell(w, x), shell.random())
    cotangents = u.to(outputs.dtype).reshape(len(u), *outputs.shape)
    (rows,) = vmap(pull, chunk_size=chunk_size)(cotangents)
    return torch.cat([row.reshape(len(u), -1) for row in rows.values()], dim=1).to(u.dtype)


# Errors ---------------------------------------------------------------------------------------------------------------


def origin_of(error: BaseException, module: nn.Module) -> str:
    """An error's first sentence, and the innermost part of a module, or of a copy of it, that it came from."""
    names = {id(m): name for name, m in module.named_modules()}
    part, line = module, ""
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        owner, code = traceback.tb_frame.f_locals.get("self"), traceback.tb_frame.f_code
        if isinstance(owner, type(module)) and id(owner) not in names:
            names |= {id(m): name for name, m in owner.named_modules()}
        if isinstance(owner, nn.Module) and id(owner) in names:
            part = owner
            # The line is shown for the module's own code: torch does not name custom functions.
            is_own_code = code.co_name not in ("_call_impl", "_wrapped_call_impl")
            line = linecache.getline(code.co_filename, traceback.tb_lineno).strip()[:80] if is_own_code else ""
        traceback = traceback.tb_next
    name = names.get(id(part), "")
    # torch explains at length what a user can do about `vmap`, so only the first sentence is taken.
    sentence = next(iter(str(error).strip().splitlines()), type(error).__name__).split(". ")[0].removesuffix(".")
    return f"{sentence} — in {f'`{name}`, ' if name else ''}a {type(part).__name__}{line and f': `{line}`'}"
