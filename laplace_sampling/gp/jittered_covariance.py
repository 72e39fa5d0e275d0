"""Covariances that may be singular up to rounding, with a Cholesky factor all the same."""

import torch

from laplace_sampling.gp.linear_operators import DenseLinearOperator, TriangularLinearOperator

__all__ = ["JitteredCovariance"]

# Factors of ten that the jitter of a Cholesky factor is raised by at most.
_JITTERS = 16


class JitteredCovariance(DenseLinearOperator):
    """A covariance; its Cholesky factor is that of a matrix with jitter, relative to its largest variance.

    Raises:
        FloatingPointError: by what needs the factor, if the matrix is not finite.
    """

    def _cholesky(self, upper: bool | None = False) -> TriangularLinearOperator:
        matrix = self.tensor
        # Acquisition functions evaluate inputs that nearly coincide, whose covariance is singular up to rounding. The
        # jitter starts at a few roundings of the largest variance, which change no digit that is right, and rises
        # tenfold for those matrices of a batch that still fail.
        largest = matrix.detach().diagonal(dim1=-1, dim2=-2).abs().amax(-1).clamp_min(1e-30)
        jitter = 10 * torch.finfo(matrix.dtype).eps * largest
        for _ in range(_JITTERS):
            raised = matrix + torch.diag_embed(jitter[..., None].expand(matrix.shape[:-1]))
            factor, failed = torch.linalg.cholesky_ex(raised)
            if not bool(failed.any()):
                return TriangularLinearOperator(factor.mT if upper else factor, upper=bool(upper))
            jitter = torch.where(failed > 0, 10 * jitter, jitter)
        raise FloatingPointError(
            "The posterior covariance of a TangentSurrogate is not finite: check `X`, and the Jacobian of the network."
        )
