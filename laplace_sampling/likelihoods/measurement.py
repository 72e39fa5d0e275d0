r"""Linear measurements of the outputs, `y = T f(x) + noise`, as in inverse problems (thesis eq. 7.1, 7.5–7.6).

Matrices, pairs of functions and physics, objects with `A` and `A_adjoint`, become the same thing: two functions of
stacks of flattened rows.
"""

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.placement import chosen

Function: TypeAlias = Callable[[Tensor], Tensor]
# What users may give for `T`: a matrix, a LinearOperator (which is not imported here, as that takes seconds), a pair of
# functions, or an object with `A` and `A_adjoint`.
Observation: TypeAlias = Any

# Units of rounding that a sum of products may be off by, relative to the norm of these. Dense matrices, convolutions
# and cumulative sums in float32 are off by half the root of the number of terms, by 512 units for a million.
_ROUNDINGS = 1e3
# Pairs of random vectors by which T and its adjoint are compared: by a single one, an adjoint that is off by a random
# 1e-3 passes in float32 one time in five.
_PROBES = 8

_COMPLEX = (
    "`observe=T` gives complex numbers, but measurements are real: give real and imaginary parts as two numbers, as "
    "`torch.view_as_real` and, for the adjoint, `torch.view_as_complex` make them."
)


@dataclass(frozen=True)
class Product:
    """`T f` of the rows of a matrix, by a matrix `T`, which multiplies from the left: sparse ones do nothing else."""

    matrix: Any
    placed: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)

    def __call__(self, rows: Float[Tensor, "K n"]) -> Float[Tensor, "K m"]:
        where = rows.device, rows.dtype
        if where not in self.placed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # rows of sparse matrices are new in torch
                self.placed[where] = self.matrix.to(*where)
        return (self.placed[where] @ rows.T.contiguous()).T


@dataclass(frozen=True)
class Stacked:
    """`T f` of the rows of a matrix, by a function.

    Attributes:
        function: of one vector, or of stacks of them.
        shape: of a vector.
        own: a tensor on the device and in the dtype of the vectors.
        singly: whether the function takes one vector at a time.
    """

    function: Function
    shape: tuple[int, ...]
    own: Tensor
    singly: bool = False

    def __call__(self, rows: Float[Tensor, "K n"]) -> Float[Tensor, "K m"]:
        return self.unflattened(rows).detach().reshape(len(rows), -1)

    def unflattened(self, rows: Float[Tensor, "K n"]) -> Float[Tensor, "K *m"]:
        """What the function returns."""
        stack = rows.to(self.own).reshape(-1, *self.shape)
        return torch.stack([self.function(row) for row in stack]) if self.singly else self.function(stack)


@dataclass(frozen=True)
class Measurement:
    """`T`, `[m, n]`, by its products with stacks of rows.

    Attributes:
        forward: `T f` of the rows of a matrix.
        backward: `Tᵀ u` of the rows of a matrix.
        num_outputs: `n`.
        entries: the shape that all measurements of a datum have.
        rounding: of the dtype in which `T` computes, whatever that of the rows is; 0 for that of the rows.
        kept: which of all measurements these are; `None` for all of them.
    """

    forward: Function
    backward: Function
    num_outputs: int
    entries: tuple[int, ...]
    rounding: float = 0.0
    kept: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """`(m, n)`."""
        return math.prod(self.entries) if self.kept is None else len(self.kept), self.num_outputs

    def apply(self, f: Float[Tensor, "*K n"]) -> Float[Tensor, "*K m"]:
        """`T f`."""
        found = _of_rows(self.forward, f, math.prod(self.entries))
        return found if self.kept is None else found[..., self.kept.to(f.device)]

    def adjoint(self, u: Float[Tensor, "*K m"]) -> Float[Tensor, "*K n"]:
        """`Tᵀ u`."""
        if self.kept is not None:
            u = u.new_zeros(*u.shape[:-1], math.prod(self.entries)).index_copy_(-1, self.kept.to(u.device), u)
        return _of_rows(self.backward, u, self.num_outputs)

    def given(self, values: Float[Tensor, "N *m"]) -> Float[Tensor, "N m"]:
        """Numbers of all measurements, flat and of those that these are."""
        flat = values.flatten(1)
        return flat if self.kept is None else flat[:, self.kept.to(flat.device)]

    def checked(self, like: Tensor) -> "Measurement":
        r"""The measurements of any output, without rows of `T` that are zero, once `T` and `Tᵀ` have been tried.

        Args:
            like: on the device and in the dtype of the outputs.

        Raises:
            ValueError: if `T(f + g)` is not `Tf + Tg`, or `⟨Tf, u⟩` not `⟨f, Tᵀu⟩`, for random `f`, `g` and `u`.
        """
        (m, n), rounding = self.shape, _ROUNDINGS * max(self.rounding, torch.finfo(like.dtype).eps)
        f, u = _random(_PROBES, n).to(like), _random(_PROBES, m).to(like)
        *of_f, of_sum = self.apply(torch.cat([f, f[:1] + f[1:2]])).double()
        measured, back = torch.stack(of_f), self.adjoint(u).double()
        if not bool(measured.isfinite().all() & back.isfinite().all()):
            raise ValueError("`observe=T`: T or its adjoint gives NaN or infinity for finite numbers; mend it.")
        if float((of_sum - of_f[0] - of_f[1]).norm()) > rounding * float(of_f[0].norm() + of_f[1].norm()):
            raise ValueError(
                "`observe=T`: T is not linear, as T(f + g) is not Tf + Tg for random f and g. Leave out noise and "
                "constants; of a nonlinear one give the derivative T′ at the reconstruction f₀ (`torch.func.jvp` and "
                "`vjp`), and the targets y − T(f₀) + T′f₀."
            )
        terms, others = measured * u.double(), f.double() * back
        sums = torch.stack([terms.sum(1), others.sum(1)])
        errors = (sums[0] - sums[1]).abs()
        if float(errors.norm()) > rounding * float(terms.norm() + others.norm()):
            forth, and_back = sums[:, int(errors.argmax())].tolist()
            raise ValueError(
                f"`observe=T`: T and its adjoint are not adjoint, ⟨Tf, u⟩ = {forth:.6g} but ⟨f, Tᵀu⟩ = {and_back:.6g} "
                "for random f and u. `torch.func.vjp` makes an exact adjoint of T, as does "
                "`Tomography(adjoint_via_backprop=True)` of deepinv."
            )
        kept = chosen(torch.arange(m), measured.any(0))
        if not len(kept):
            raise ValueError("`observe=T` measures nothing: T f is zero for random outputs f.")
        return self if len(kept) == m else replace(self, kept=kept)


def _of_rows(function: Function, rows: Tensor, length: int) -> Tensor:
    stack = rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])
    found = function(stack).to(rows) if len(stack) else stack.new_zeros(0, length)
    return found.reshape(*rows.shape[:-1], length)


def _random(num: int, length: int) -> Tensor:
    return torch.randn(num, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


def _is_matrix(T: Observation) -> bool:
    return hasattr(T, "tocsr") or all(hasattr(T, name) for name in ("shape", "detach", "__matmul__"))


def check_observation(T: Observation) -> None:
    """Raise if there is no measurement that is given so; `None` is none."""
    if T is None:
        return
    if _is_matrix(T):
        if len(shape := list(T.shape)) != 2:
            raise ValueError(f"`observe=T` needs a matrix [m, n], but got a tensor of shape {shape}.")
        return
    pair = (
        cast("tuple[Any, ...]", T) if isinstance(T, tuple) else tuple(getattr(T, n, None) for n in ("A", "A_adjoint"))
    )
    if [callable(part) for part in pair] == [True, True]:
        return
    found = f"got {type(T).__name__}"
    if hasattr(T, "__array__"):
        found += ": give `torch.as_tensor(T)`"
    if callable(pair[0]) and len(pair) == 2:
        found += (
            " without an `A_adjoint`: give the pair (A, adjoint) of functions of flat vectors. The adjoint of a linear "
            "A is `u ↦ torch.func.vjp(A, f)[1](u)[0]`"
        )
    raise TypeError(
        "`observe=T` needs a matrix, a LinearOperator, a pair of functions (forward, adjoint) or an object with such "
        f"functions `A` and `A_adjoint`, but {found}."
    )


def as_measurement(T: Observation, outputs: Tensor) -> Measurement:
    r"""A measurement from what a user gives.

    Args:
        T: a matrix (dense, or sparse of torch or scipy), a `LinearOperator`, a pair of functions `(forward, adjoint)`
            of flat vectors, which are given stacks of them if they take these, or an object with functions `A` and
            `A_adjoint` of stacks of outputs in their own shape, as the physics of deepinv.
        outputs: of the network, `[N, ...]`, of whose shape, device and dtype `T` gets its vectors. An object that has
            buffers gets them on the device and in the dtype of these.

    Raises:
        TypeError: if `T` is nothing of these.
        ValueError: if `T` does not fit the outputs, or gives complex numbers.
    """
    check_observation(T)
    if not _is_matrix(T):
        return _of_functions(T, outputs)
    num_outputs, (rows, columns) = outputs.shape[1:].numel(), T.shape
    if columns != num_outputs:
        raise ValueError(f"`observe=T` has {columns} columns, but the model gives {num_outputs} outputs a datum.")
    matrix, transposed = _matrices(T)
    if matrix.dtype.is_complex:
        raise ValueError(_COMPLEX)
    return Measurement(Product(matrix), Product(transposed), columns, (rows,))


def _matrices(T: Any) -> tuple[Any, Any]:
    """`T` and `Tᵀ`; a sparse one with rows of both, as products with columns take ten times as long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        if hasattr(T, "tocsr"):
            parts = (part.tocsr() for part in (T, T.T))
            arrays = ((part.indptr, part.indices, part.data, part.shape) for part in parts)
            matrix, transposed = (
                torch.sparse_csr_tensor(*map(torch.as_tensor, numbers), size=shape) for *numbers, shape in arrays
            )
            return matrix, transposed
        T = T.detach()
        if not isinstance(T, Tensor) or T.layout == torch.strided:
            return T, T.mT
        T = T.to_sparse_coo()
        return T.to_sparse_csr(), T.t().to_sparse_csr()


def _of_functions(T: Any, outputs: Tensor) -> Measurement:
    """Functions of flat vectors, or of stacks of outputs in their own shape."""
    is_pair, own = isinstance(T, tuple), outputs[:0]
    functions, names = (T, ("forward", "adjoint")) if is_pair else ((T.A, T.A_adjoint), ("A", "A_adjoint"))
    if not is_pair and hasattr(T, "buffers"):
        tensors = (tensor for tensor in chain(T.buffers(), T.parameters()) if tensor.is_floating_point())
        own = next(tensors, own).detach()

    def first(number: int, shape: tuple[int, ...]) -> tuple[Stacked, Tensor]:
        """One of the functions, and what it gives for a few random vectors of a shape."""
        length = math.prod(shape)
        rows = _random(2 if length == 3 else 3, length).to(own)  # a stack is not a square matrix
        found = Stacked(functions[number], shape, own, singly=is_pair)
        try:
            values = found.unflattened(rows)
            if isinstance(values, Tensor) and values.shape[:1] != rows.shape[:1]:
                raise ValueError(f"its result has shape {list(values.shape)}, so no axis of the stack")
        except Exception as error:
            raise ValueError(
                f"`observe=T`: `{names[number]}` of {type(T).__name__} raised {type(error).__name__} for a "
                f"{'vector' if is_pair else 'stack'} {[*rows.shape[:1], *shape][is_pair:]} in {rows.dtype}: "
                f"{error}. Bring T and the model to the same shape and dtype, as by `model.float()` or "
                "`physics.to(torch.float64)`."
            ) from error
        with suppress(Exception):
            together = replace(found, singly=False)
            difference, tolerance = together.unflattened(rows) - values, _ROUNDINGS * torch.finfo(own.dtype).eps
            if difference.shape == values.shape and bool(difference.norm() <= tolerance * values.norm()):
                return together, values
        return found, values

    num_outputs = outputs.shape[1:].numel()
    forward, measured = first(0, (num_outputs,) if is_pair else tuple(outputs.shape[1:]))
    if not isinstance(measured, Tensor):
        raise TypeError(f"`observe=T`: `{names[0]}` gives a {type(measured).__name__}: give physics of one tensor.")
    if measured.is_complex():
        raise ValueError(_COMPLEX)
    entries = tuple(measured.shape[1:])
    backward, back = first(1, entries)
    if back.shape[1:].numel() != num_outputs:
        raise ValueError(
            f"`observe=T`: the adjoint of measurements {list(entries)} has {back.shape[1:].numel()} entries, but the "
            f"outputs have {num_outputs}."
        )
    return Measurement(forward, backward, num_outputs, entries, torch.finfo(own.dtype).eps)
