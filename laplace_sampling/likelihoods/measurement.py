r"""Linear measurements of the outputs, `y = T f(x) + noise`, as in inverse problems (thesis eq. 7.1, 7.5–7.6)."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

import torch
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from linear_operator import LinearOperator

# A random test of `⟨Tf, u⟩ = ⟨f, Tᵀu⟩` fails above this multiple of the machine precision, relative to `‖Tf‖‖u‖`. Dense
# matrices, convolutions and cumulative sums in float32 differed by at most 0.5: half or twice it changes nothing.
_ADJOINT_ROUNDING = 1e3


class Measurement(ABC):
    """`T`, `[m, n]`, by its products with stacks of rows.

    Attributes:
        shape: `(m, n)`.
    """

    shape: tuple[int, int]

    @abstractmethod
    def apply(self, f: Float[Tensor, "*K n"]) -> Float[Tensor, "*K m"]:
        """`T f`."""

    @abstractmethod
    def adjoint(self, u: Float[Tensor, "*K m"]) -> Float[Tensor, "*K n"]:
        """`Tᵀ u`."""


# What users may give for `T`. `X | Y` would need the class of a LinearOperator here.
Observation: TypeAlias = Union[
    Measurement, Tensor, "LinearOperator", tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
]


@dataclass(frozen=True)
class _Matrix(Measurement):
    matrix: Tensor

    @property
    def shape(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.matrix.shape[0], self.matrix.shape[1]

    def apply(self, f: Tensor) -> Tensor:
        return self._product(self.matrix, f)

    def adjoint(self, u: Tensor) -> Tensor:
        return self._product(self.matrix.T, u)

    @staticmethod
    def _product(matrix: Tensor, rows: Tensor) -> Tensor:
        stack = rows.reshape(-1, rows.shape[-1])
        # Sparse matrices multiply from the left only.
        return (matrix.to(stack) @ stack.T).T.reshape(*rows.shape[:-1], len(matrix))


@dataclass(frozen=True)
class _Linear(Measurement):
    operator: "LinearOperator"

    @property
    def shape(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.operator.shape[-2], self.operator.shape[-1]

    def apply(self, f: Tensor) -> Tensor:
        return self._product(self.operator, f)

    def adjoint(self, u: Tensor) -> Tensor:
        return self._product(self.operator.mT, u)

    @staticmethod
    def _product(operator: "LinearOperator", rows: Tensor) -> Tensor:
        # An operator has a dtype and a device, and takes no others: the rows are converted, and the product back.
        stack = rows.reshape(-1, rows.shape[-1]).to(operator.device, operator.dtype)
        product = operator @ stack.T.contiguous()
        assert isinstance(product, Tensor)
        return product.T.reshape(*rows.shape[:-1], operator.shape[-2]).to(rows)


@dataclass(frozen=True)
class _Callables(Measurement):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], Tensor]
    shape: tuple[int, int]
    dtype: torch.dtype

    def apply(self, f: Tensor) -> Tensor:
        return self._rows(self.forward, f, self.shape[0])

    def adjoint(self, u: Tensor) -> Tensor:
        return self._rows(self.backward, u, self.shape[1])

    def _rows(self, function: Callable[[Tensor], Tensor], rows: Tensor, length: int) -> Tensor:
        # The functions take vectors in the dtype of the network, but products may be in float64.
        stack = rows.reshape(-1, rows.shape[-1]).to(self.dtype)
        values = torch.stack([function(row).reshape(-1) for row in stack]) if len(stack) else rows.new_zeros(0)
        return values.reshape(*rows.shape[:-1], length).to(rows.dtype)


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
    if isinstance(T, Measurement):
        return T
    if _is_linear_operator(T):
        return _Linear(cast("LinearOperator", T))
    if isinstance(T, Tensor):
        return _Matrix(T.detach() if T.layout in (torch.strided, torch.sparse_coo) else T.detach().to_sparse_coo())
    return _from_functions(*cast("tuple[Any, Any]", T), num_outputs, dtype)


def check_observation(T: Any) -> None:
    """Raise if there is no measurement that is given so; `None` is none."""
    if isinstance(T, Tensor) and T.dim() != 2:
        raise ValueError(f"`observe=T` needs a matrix [m, n], but got a tensor of shape {list(T.shape)}.")
    pair = isinstance(T, tuple) and len(T) == 2 and all(map(callable, T))
    if not (T is None or pair or isinstance(T, Measurement | Tensor) or _is_linear_operator(T)):
        raise TypeError(
            "`observe=T` needs a matrix, a LinearOperator or a pair of functions (forward, adjoint), but got "
            f"{type(T).__name__}."
        )


def _is_linear_operator(T: Any) -> bool:
    # A user who has a LinearOperator has imported its package; importing it here would cost all others seconds.
    package = sys.modules.get("linear_operator")
    return package is not None and isinstance(T, package.LinearOperator)


def _from_functions(
    forward: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], num_outputs: int, dtype: torch.dtype
) -> Measurement:
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
    _check_adjoint(f, measured, u, back)
    return _Callables(forward, adjoint, (len(measured), num_outputs), dtype)


def _check_adjoint(f: Tensor, measured: Tensor, u: Tensor, back: Tensor) -> None:
    """Raise unless `⟨Tf, u⟩ = ⟨f, Tᵀu⟩` up to rounding, with `measured = Tf` and `back = Tᵀu`."""
    in_measurements, in_outputs = float(measured.double() @ u.double()), float(f.double() @ back.double())
    size = float(measured.double().norm() * u.double().norm())
    rounding = _ADJOINT_ROUNDING * torch.finfo(f.dtype).eps
    if abs(in_measurements - in_outputs) > rounding * max(size, 1e-300):
        raise ValueError(
            f"`observe=(forward, adjoint)`: they are not adjoint, ⟨Tf, u⟩ = {in_measurements:.6g} but "
            f"⟨f, Tᵀu⟩ = {in_outputs:.6g} for random f and u; or the first is not linear."
        )
