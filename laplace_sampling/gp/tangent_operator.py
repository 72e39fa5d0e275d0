"""The matrix of the tangent kernel, known by its products: a `LinearOperator`."""

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.linear_operators import IndexType, LinearOperator
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER


class TangentKernelOperator(LinearOperator):
    r"""`K = φ(X) diag(v) φ(X')ᵀ`, `[…, N·C, M·C]`, applied by one VJP at `X'` and one JVP at `X`; nothing is stored.

    It has gradients in `v`, `X` and `X'`. `to_dense` contracts the Jacobians in blocks.

    Args:
        variance: `v`, the prior variance of each weight, `[…, P]`; a batch of them gives a batch of matrices.
        x1: `X`, inputs as the network takes them, `[N, …]`.
        x2: `X'`, by default `X`.
        network: the linearised network.
    """

    def __init__(
        self, variance: Float[Tensor, "*B P"], *, x1: Tensor, x2: Tensor | None = None, network: Linearisation
    ) -> None:
        # A LinearOperator indexes the batch axes of its positional arguments with those of the matrix; keywords stay.
        super().__init__(variance, x1=x1, network=network, **({} if x2 is None else {"x2": x2}))
        self.variance, self.x1, self.x2, self.network = variance, x1, x1 if x2 is None else x2, network
        self.num_outputs = network(to_network(network, x1[:1])).numel()

    def _size(self) -> torch.Size:
        sizes = (len(self.x1) * self.num_outputs, len(self.x2) * self.num_outputs)
        return torch.Size([*self.variance.shape[:-1], *sizes])

    def _transpose_nonbatch(self) -> "TangentKernelOperator":
        if self.x2 is self.x1:
            return self
        return TangentKernelOperator(self.variance, x1=self.x2, x2=self.x1, network=self.network)

    def _graph(self, *tensors: Tensor) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.variance, *tensors))

    def _matmul(self, rhs: Float[Tensor, "*B MC K"]) -> Float[Tensor, "*B NC K"]:
        # Pullbacks do not work in inference mode, in which GPyTorch may predict.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._matmul(rhs.clone())
        columns = rhs[:, None] if rhs.dim() == 1 else rhs
        x1, x2 = to_network(self.network, self.x1), to_network(self.network, self.x2)
        # All columns of all batches are one stack of vectors, so that they share one forward pass.
        stack = columns.mT.reshape(-1, len(x2), self.num_outputs).to(x2.device, self.network.dtype)
        graph = self._graph(self.x1, self.x2, rhs)
        weights = self.network.vjp(x2, stack, graph=graph).reshape(*columns.mT.shape[:-1], -1)
        weights = weights * self.variance.to(weights)[..., None, :]
        product = self.network.jvp(x1, weights.reshape(-1, weights.shape[-1]), graph=graph).flatten(1)
        product = product.reshape(*weights.shape[:-1], -1).mT.to(rhs.device, self.dtype)
        return product[..., 0] if rhs.dim() == 1 else product.contiguous()

    def _rows(self, x: Tensor) -> Float[Tensor, "n P"]:
        return self.network.jacobian(to_network(self.network, x), graph=self._graph(x)).flatten(0, 1).to(self.variance)

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        return x.split(max(1, NUMBERS_TOGETHER // (self.num_outputs * self.network.num_parameters)))

    def to_dense(self) -> Float[Tensor, "*B NC MC"]:
        """The matrix, from blocks of rows of the Jacobian; those of `X'` are computed for each block of `X`."""
        blocks, row_pieces = [], self._pieces(self.x1)
        column_pieces = row_pieces if self.x2 is self.x1 else self._pieces(self.x2)
        for x in row_pieces:
            scaled = (jacobian := self._rows(x)) * self.variance[..., None, :]
            products = [scaled @ (jacobian if y is x else self._rows(y)).mT for y in column_pieces]
            blocks.append(torch.cat(products, dim=-1))
        return torch.cat(blocks, dim=-2)

    def _diagonal(self) -> Float[Tensor, "*B NC"]:
        parts = []
        for x, y in zip(self._pieces(self.x1), self._pieces(self.x2), strict=True):
            rows = self._rows(x)
            parts.append((rows * (rows if self.x2 is self.x1 else self._rows(y))) @ self.variance[..., None])
        return torch.cat(parts, dim=-2)[..., 0]

    def _get_indices(self, row_index: IndexType, col_index: IndexType, *batch_indices: IndexType) -> Tensor:
        assert isinstance(row_index, Tensor)
        assert isinstance(col_index, Tensor)
        # Only the data that the indices touch: a few entries of a large matrix take a small block of it.
        row_data, row_place = (row_index // self.num_outputs).unique(return_inverse=True)
        column_data, column_place = (col_index // self.num_outputs).unique(return_inverse=True)
        # Inputs may be where the network is, the matrix elsewhere.
        x1, x2 = self.x1[row_data.to(self.x1.device)], self.x2[column_data.to(self.x2.device)]
        part = TangentKernelOperator(self.variance, x1=x1, x2=x2, network=self.network)
        rows = row_place * self.num_outputs + row_index % self.num_outputs
        columns = column_place * self.num_outputs + col_index % self.num_outputs
        return part.to_dense()[cast(tuple[Tensor, ...], (*batch_indices, rows, columns))]


def to_network(network: Linearisation, x: Tensor) -> Tensor:
    """Inputs where the network is, and in its dtype."""
    return x.to(network.device, network.dtype if x.is_floating_point() else None)
