r"""Posteriors of `m` inducing points, in one pass over the data (Lin, Antorán, Padhy and others, 2023).

    α = argmin ½ (z − K_XZ α)ᵀ S⁻¹ (z − K_XZ α) + ½ αᵀ K_ZZ α = (K_ZX S⁻¹ K_XZ + K_ZZ)⁻¹ K_ZX S⁻¹ z

for the targets `z = y − m(X)` and for draws `z = f(X) + ε` of the whole prior. Functions are `k(·, Z) α`. With all data
as points they are those of the exact posterior.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.kernels.kernel_rows import kernel_matrix
from laplace_sampling.solvers.lapack import solve_, sum_of_squares, symmetric_eigen
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER


@torch.no_grad()
def inducing_weights(
    kernel: gpytorch.kernels.Kernel,
    z: Float[Tensor, "m D"],
    x: Float[Tensor, "N D"],
    noise: Float[Tensor, " N"],
    targets: Float[Tensor, "K N"],
) -> Float[Tensor, "K m"]:
    """`α` for each row of targets, by `2Nm²` operations and `3m²` numbers of memory."""
    values, vectors = symmetric_eigen(kernel_matrix(kernel, z, z))
    # In coordinates in which `K_ZZ = I`; without directions that rounding has filled, which equal points have.
    kept = values > len(z) * torch.finfo(values.dtype).eps * values[-1]
    root, scale = vectors[:, kept] / values[kept].sqrt(), noise.sqrt()
    right = torch.zeros(len(targets), root.shape[1], dtype=torch.float64, device=x.device)

    def blocks() -> Iterator[Tensor]:
        for rows in torch.arange(len(x)).split(max(1, NUMBERS_TOGETHER // len(z))):
            features = kernel_matrix(kernel, x[rows], z) @ root / scale[rows, None]
            right.addmm_(targets[:, rows] / scale[rows], features)
            yield features

    precision = sum_of_squares(blocks(), root.shape[1], x.device)
    precision.diagonal().add_(1)
    return (root @ solve_(precision, right.T.contiguous())).T
