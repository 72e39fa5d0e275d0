"""The Jacobian in memory in the precision of the network, its Gram matrix in float64: for few rows of many weights.

Let rows of relative error `ε`, a rounding of the network, be those of a Jacobian of their own. What dense algebra
computes from one set of them is right for these, and the function of an input whose row is computed elsewhere is off
by `ε|φ|/√α` at most, where the data leave a standard deviation of about `b^{-1/2}`: by a share `ε (λ₁b/α)^{1/2}` of it.
Errors of rows are in directions that the data do not determine, so that variances add: standard deviations grow by the
factor `(1 + ε² λ₁b/α)^{1/2}`.
The Gram matrix loses its smallest eigenvalues to errors of its products, a share `ε λ₁b/α`: these are in float64.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.features import Features
from laplace_sampling.solvers.lapack import sum_of_squares

__all__ = ["HeldRows"]

# Numbers of a block of columns, 4 MiB in float64, which caches hold. At half or twice, products with 30 rows of 3.4
# million weights take the same time within a tenth.
_NUMBERS = 2**19


class HeldRows(Features):
    """`Φ`, each row computed once, in the precision of the network; vectors are given and taken in float64.

    Products with vectors are in the precision of the network within a block of columns, and summed in float64.

    Args:
        features: that compute the rows, when they are first needed.
    """

    def __init__(self, features: Features) -> None:
        self.features, self._matrix = features, None
        self.num_data, self.num_outputs = features.num_data, features.num_outputs
        self.size, self.batch_size = features.size, features.batch_size

    @property
    def device(self) -> torch.device:
        return self.features.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    @property
    def precision(self) -> torch.dtype:
        """The precision in which rows are computed."""
        return self.features.dtype

    @property
    def matrix(self) -> Float[Tensor, "NC P"]:
        """The rows."""
        if self._matrix is None:
            if self.num_data <= self.batch_size and not self.features.processes.size > 1:
                # A model in half precision may give rows in it.
                rows = self.features.rows(torch.arange(self.num_data)).to(self.precision)
            else:
                shape = (self.num_data, self.num_outputs, self.size)
                rows = self.features.by_datum(self.features.rows, shape, 0, self.precision)
            self._matrix = rows.flatten(0, 1)
        return self._matrix

    def gram(self, variance: Float[Tensor, " P"]) -> Float[Tensor, "NC NC"]:
        """`Φ diag(v) Φᵀ`, in float64."""
        root = variance.double().sqrt()
        blocks = ((rows.double() * root[columns]).T for columns, rows in self._blocks(self.matrix))
        return sum_of_squares(blocks, len(self.matrix), self.device)

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        chosen = self._chosen(batch)
        total = torch.zeros(len(v), len(chosen), dtype=torch.float64, device=self.device)
        for columns, rows in self._blocks(chosen):
            total += v[:, columns].to(rows) @ rows.T
        return total.unflatten(1, (len(batch), self.num_outputs))

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return (u.flatten(1).to(self.precision) @ self._chosen(batch)).double()

    def add_vjp_(self, target: Float[Tensor, "K P"], u: Float[Tensor, "K N C"], scale: Float[Tensor, " P"]) -> None:
        """Adds `diag(s) Φᵀu` to some vectors."""
        cotangents = u.flatten(1).to(self.precision)
        for columns, rows in self._blocks(self.matrix):
            target[:, columns] += (cotangents @ rows) * scale[columns].to(rows)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return (u.double()[:, None] @ self.rows(batch))[:, 0]

    def rows(self, batch: Tensor) -> Tensor:
        return self._chosen(batch).double().unflatten(0, (len(batch), self.num_outputs))

    def outputs(self, v: Tensor) -> Tensor:
        return self.jvp(v, torch.arange(self.num_data))

    def with_rows_in_float64(self) -> "HeldRows":
        """Returns features whose rows are computed again, in float64, where that is possible; else these."""
        features = self.features.in_float64()
        return self if features.dtype == self.precision else HeldRows(features)

    def _chosen(self, batch: Tensor) -> Float[Tensor, "m P"]:
        """The rows of some data, without a copy of those of all."""
        is_all = len(batch) == self.num_data and bool((batch[1:] > batch[:-1]).all())
        return self.matrix if is_all else self.matrix.unflatten(0, (self.num_data, -1))[batch].flatten(0, 1)

    def _blocks(self, matrix: Float[Tensor, "m P"]) -> Iterator[tuple[slice, Float[Tensor, "m p"]]]:
        """Blocks of columns."""
        width = max(1, _NUMBERS // max(1, len(matrix)))
        for start in range(0, self.size, width):
            columns = slice(start, min(start + width, self.size))
            yield columns, matrix[:, columns]
