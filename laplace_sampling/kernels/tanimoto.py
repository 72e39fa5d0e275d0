r"""The Tanimoto kernel of fingerprints, `k(x, y) = Σ min(x_d, y_d) / Σ max(x_d, y_d)`, for GPyTorch."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.linear_operators import gpytorch


class TanimotoKernel(gpytorch.kernels.Kernel):
    r"""`k(x, y) = Σ min(x_d, y_d) / Σ max(x_d, y_d)` of counts or bits, which are not negative.

    It has no hyperparameter; `ScaleKernel(TanimotoKernel())` has a variance. Two inputs of zeros only are equal: `1`.
    Bits take a matrix product. Counts take distances, which cost some fifty times as much.
    """

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Float[Tensor, "*B N M"]:
        """The matrix of `x1`, `[…, N, D]`, and `x2`, `[…, M, D]`, or its diagonal."""
        if bool((x1 < 0).any()) or bool((x2 < 0).any()):
            raise ValueError("`TanimotoKernel` takes counts or bits, but some inputs are negative.")
        if diag:
            shared, total = torch.minimum(x1, x2).sum(-1), x1.sum(-1) + x2.sum(-1)
        else:
            total = x1.sum(-1)[..., :, None] + x2.sum(-1)[..., None, :]
            # `2 min(a, b) = a + b − |a − b|`, and `min(a, b) = ab` for bits.
            shared = x1 @ x2.mT if _bits(x1) and _bits(x2) else (total - torch.cdist(x1, x2, p=1)) / 2
        joint = total - shared
        return torch.where(joint > 0, shared / joint.clamp_min(torch.finfo(total.dtype).tiny), 1.0)


def _bits(x: Tensor) -> bool:
    # Its derivative in the inputs is that of counts.
    return not x.requires_grad and bool(((x == 0) | (x == 1)).all())
