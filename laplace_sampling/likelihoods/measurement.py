r"""Linear measurements of the outputs, `y = T f(x) + noise`, as in inverse problems (thesis eq. 7.1, 7.5–7.6)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor

Function: TypeAlias = Callable[[Tensor], Tensor]
# What users may give for `T`: a matrix, a LinearOperator (which is not imported here, as that takes seconds), or a pair
# of functions.
Observation: TypeAlias = Any


@dataclass(frozen=True)
class Measurement:
    """`T`, `[m, n]`, by its products with stacks of rows.

    Attributes:
        shape: `(m, n)`.
        forward: `T f` of the rows of a matrix.
        backward: `Tᵀ u` of the rows of a matrix.
    """

    shape: tuple[int, int]
    forward: Function
    backward: Function

    def apply(self, f: Float[Tensor, "*K n"]) -> Float[Tensor, "*K m"]:
        """`T f`."""
        return self.forward(f.reshape(-1, f.shape[-1])).reshape(*f.shape[:-1], self.shape[0])

    def adjoint(self, u: Float[Tensor, "*K m"]) -> Float[Tensor, "*K n"]:
        """`Tᵀ u`."""
        return self.backward(u.reshape(-1, u.shape[-1])).reshape(*u.shape[:-1], self.shape[1])


def as_measurement(T: Observation, num_outputs: int, dtype: torch.dtype = torch.float64) -> Measurement:
    r"""A measurement from what a user gives.

    Args:
        T: a matrix (dense or sparse), a `LinearOperator`, or a pair of functions `(forward, adjoint)`: the first maps a
            vector of outputs to measurements, the second is its adjoint. A pair is tested for `⟨Tf, u⟩ = ⟨f, Tᵀu⟩` on
            random vectors.
        num_outputs: `n`; used for a pair of functions only.
        dtype: dtype of the vectors that the functions take; used for a pair of functions only.

    Raises:
        TypeError: if `T` is nothing of these.
        ValueError: if it is a tensor but no matrix, or if the functions are not adjoint.
    """
    check_observation(T)
    if isinstance(T, tuple):
        forward, adjoint = cast("tuple[Function, Function]", T)
        return _of_functions(forward, adjoint, num_outputs, dtype)
    matrix = T.detach()
    if isinstance(T, Tensor) and T.layout not in (torch.strided, torch.sparse_coo):
        matrix = matrix.to_sparse_coo()

    # Sparse matrices and operators multiply from the left only.
    def product(matrix: Any, rows: Tensor) -> Tensor:
        return (matrix.to(rows.device, rows.dtype) @ rows.T.contiguous()).T

    return Measurement(
        (matrix.shape[0], matrix.shape[1]), lambda f: product(matrix, f), lambda u: product(matrix.mT, u)
    )


def check_observation(T: Observation) -> None:
    """Raise if there is no measurement that is given so; `None` is none."""
    is_matrix = all(hasattr(T, name) for name in ("shape", "detach", "__matmul__"))
    is_pair = isinstance(T, tuple) and [callable(part) for part in cast("tuple[Any, ...]", T)] == [True, True]
    if not (T is None or is_pair or is_matrix):
        raise TypeError(
            "`observe=T` needs a matrix, a LinearOperator or a pair of functions (forward, adjoint), but got "
            f"{type(T).__name__}."
        )
    if is_matrix and len(shape := list(cast("Any", T).shape)) != 2:
        raise ValueError(f"`observe=T` needs a matrix [m, n], but got a tensor of shape {shape}.")


def _of_functions(forward: Function, adjoint: Function, num_outputs: int, dtype: torch.dtype) -> Measurement:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(num_outputs, generator=generator, dtype=torch.float64).to(dtype)
    measured = forward(f).reshape(-1)
    u = torch.randn(len(measured), generator=generator, dtype=torch.float64).to(dtype)
    back = adjoint(u).reshape(-1)
    if back.shape != f.shape:
        raise ValueError(
            f"`observe=(forward, adjoint)`: the adjoint of a vector [{len(u)}] has {len(back)} entries, but the "
            f"outputs have {num_outputs}."
        )
    in_measurements, in_outputs = float(measured.double() @ u.double()), float(f.double() @ back.double())
    size = float(measured.double().norm() * u.double().norm())
    # Dense matrices, convolutions and cumulative sums in float32 differed by at most half a unit of rounding.
    if abs(in_measurements - in_outputs) > 1e3 * torch.finfo(dtype).eps * max(size, 1e-300):
        raise ValueError(
            f"`observe=(forward, adjoint)`: they are not adjoint, ⟨Tf, u⟩ = {in_measurements:.6g} but "
            f"⟨f, Tᵀu⟩ = {in_outputs:.6g} for random f and u; or the first is not linear."
        )

    def product(function: Function, rows: Tensor, length: int) -> Tensor:
        # The functions take vectors in the dtype of the network, but products may be in float64.
        values = [function(row).reshape(-1) for row in rows.to(dtype)]
        return torch.stack(values).to(rows.dtype) if values else rows.new_zeros(0, length)

    shape = (len(measured), num_outputs)
    return Measurement(shape, lambda f: product(forward, f, shape[0]), lambda u: product(adjoint, u, shape[1]))
