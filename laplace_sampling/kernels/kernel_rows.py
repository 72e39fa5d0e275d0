"""The matrix of a GPyTorch kernel by its rows, which are held where memory allows, or else computed when needed."""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.networks.memory import free_memory
from laplace_sampling.solvers.row_blocks import RowBlocks

# Half the distance of neighbours in single precision, relative: the rounding of an entry of `K`.
_ROUNDING = torch.finfo(torch.float32).eps / 2


def kernel_matrix(kernel: gpytorch.kernels.Kernel, x1: Tensor, x2: Tensor) -> Float[Tensor, "N M"]:
    """`k(x1, x2)` in full."""
    # One row more than columns: GPyTorch has factors of its own, with jitter, for sums and products of square matrices.
    more = torch.cat([x1, x1[:1]]) if len(x1) == len(x2) else x1
    # Kernels that interpolate make sparse matrices, of which torch warns unless it is told what to check.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return kernel(more, x2).to_dense()[: len(x1)]  # pyright: ignore[reportAttributeAccessIssue]


class KernelRows(RowBlocks):
    r"""`K = k(X, X)` for any kernel with one output, evaluated in float64.

    It is held in float64 if it fits in half of the free memory. If not, it is held in float32 where that fits, and
    rounding moves `K + A` by less than a tenth of the noise: by about `6e-8 σ² √N`.

    Args:
        kernel: in float64.
        x: `X`, as the kernel takes it.
        noise: the least noise variance.
    """

    def __init__(self, kernel: gpytorch.kernels.Kernel, x: Float[Tensor, "N D"], noise: float) -> None:
        self.kernel, self.x, self.noise = kernel, x, noise
        self._held: Tensor | None = None
        self._dtype = self._dtype_to_hold()

    @property
    def size(self) -> int:
        return len(self.x)

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def memory(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 0.5 * free_memory(self.device)

    def _dtype_to_hold(self) -> torch.dtype | None:
        moved = self._moved()
        for dtype, allowed in ((torch.float64, True), (torch.float32, moved < 0.1 * self.noise)):
            if allowed and self.size**2 * dtype.itemsize <= self.memory:
                return dtype
        return None

    def _moved(self) -> float:
        """By how much rounding to float32 changes `K`, in the spectral norm."""
        return _ROUNDING * float(self.diagonal().max()) * self.size**0.5

    @property
    def rounding(self) -> float:
        """By how much what is held differs from `K`, in the spectral norm."""
        return self._moved() if self._dtype == torch.float32 else 0.0

    def entries(self, rows: Tensor, columns: Tensor | None = None) -> Tensor:
        if columns is not None:
            return self._computed(self.x[rows], self.x[columns])
        if self._dtype is None:
            return self._computed(self.x[rows], self.x)
        if self._held is None:
            held = torch.empty(self.size, self.size, dtype=self._dtype, device=self.device)
            for part in self.parts(torch.arange(self.size)):
                held[part] = self._computed(self.x[part], self.x).to(self._dtype)
            self._held = held
        return self._held[rows]

    @torch.no_grad()
    def _computed(self, x1: Tensor, x2: Tensor) -> Tensor:
        return kernel_matrix(self.kernel, x1, x2)

    @torch.no_grad()
    def diagonal(self) -> Tensor:
        diagonal = self.kernel(self.x, diag=True)
        return diagonal if isinstance(diagonal, Tensor) else diagonal.to_dense()  # pyright: ignore

    def matrix(self) -> Tensor:
        if self._dtype == torch.float64:
            return super().matrix()
        # A factor takes all digits, and the place of what is held.
        self._held = None
        full = torch.empty(self.size, self.size, dtype=torch.float64, device=self.device)
        for part in self.parts(torch.arange(self.size)):
            full[part] = self._computed(self.x[part], self.x)
        return full
