"""The curves of an `EvidencePath` from all eigenvalues, by dense algebra: for small problems."""

from contextlib import suppress
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.expansion import Expansion, Point, expand
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.quadrature import Quadrature

__all__ = ["DenseCurves", "exact_path"]


class DenseCurves:
    """The curves of an expansion, and the mode as a function of `α`; takes the place of a `KrylovRun`.

    Attributes:
        path: the curves.
        trace: `None`: nothing is kept for a later run.
        full: `False`: no basis is built.
        least: 0: eigenvalues are those of rows in float64, which are accurate enough for every `α`.
    """

    trace: float | None = None
    full = False
    least = 0.0

    def __init__(self, expansion: Expansion) -> None:
        self.white = expansion.white
        rhs, path = expansion.complete(expansion.at_mode.matmul(expansion.theta))
        self.values, self.vectors = _spectrum(expansion.at_mode)
        self.rhs = (rhs.double() @ self.vectors.T)[0]
        same = expansion.operator is expansion.at_mode
        nodes = self.values if same else _spectrum(expansion.operator)[0]
        ones, fit = torch.ones(1, len(nodes), dtype=torch.float64), self.rhs[None].square().cpu()
        traces = Quadrature(nodes.cpu(), ones, ones)
        self.path = replace(path, traces=traces, fit=Quadrature(self.values.cpu(), fit, fit), exact=True)

    def carries(self, alpha: float) -> bool:
        """Whether the curves are accurate at some `α`."""
        return True

    def mode(self, alpha: float) -> Float[Tensor, "1 P"]:
        """`(M + α)⁻¹ b`, in the scaled coordinates of the prior."""
        return ((self.rhs / (self.values + alpha)) @ self.vectors)[None].to(self.white) * self.white


def exact_path(
    model: LinearModel, prior: GaussianPrior, mode: Float[Tensor, "1 P"], *, hessian_at: str
) -> EvidencePath:
    """The curves around a mode in scaled coordinates; arguments as of `evidence_path`."""
    return DenseCurves(expand(model, prior, Point.of(model, prior, mode), hessian_at)).path


def _spectrum(operator: GGN) -> tuple[Float[Tensor, " m"], Float[Tensor, "m P"]]:
    """All eigenvalues that may not be zero, and eigenvectors as rows; by the smaller of `RRᵀ` and `RᵀR`."""
    blocks = [block.double() for block in operator.root_rows()]
    if sum(map(len, blocks)) < operator.size:
        root = torch.cat(blocks)
        values, vectors = _eigh(root @ root.T)
        scaled = (vectors.T @ root) / values.clamp_min(1e-300).sqrt()[:, None]
        # Vectors of eigenvalues that are zero up to rounding would be noise divided by noise.
        return values.clamp_min(0), torch.where((values > 1e-14 * values[-1])[:, None], scaled, 0.0)
    values, vectors = _eigh(sum((block.T @ block for block in blocks[1:]), blocks[0].T @ blocks[0]))
    return values.clamp_min(0), vectors.T


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    if bool(matrix.isfinite().all()):
        with suppress(torch.linalg.LinAlgError):  # pyright: ignore
            return torch.linalg.eigh(matrix)
    raise ValueError(
        "The curvature at the mode of the linear model has no eigenvalues in this precision: either the Jacobian of "
        "the model contains NaN or infinity, or the mode has run away, as it may for an affine model of classes. Use "
        '`linear_model="homogeneous"`, or a larger lower bound of `precision_bounds`.'
    )
