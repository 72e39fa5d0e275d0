"""The curves of an `EvidencePath` from all eigenvalues, by dense algebra: for small problems."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.evidence.expansion import Expansion, Point, expand
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.lapack import sum_of_squares, symmetric_eigen
from laplace_sampling.solvers.quadrature import Quadrature

__all__ = ["DenseCurves", "Spectrum", "dense_spectrum", "exact_path"]


@dataclass(frozen=True)
class Spectrum:
    """All eigenvalues of a matrix that may not be zero, and the coordinates of vectors in their eigenvectors.

    Attributes:
        values: `λ`, not negative.
        rotated: from vectors to coordinates.
        back: from coordinates to vectors.
    """

    values: Float[Tensor, " m"]
    rotated: Callable[[Float[Tensor, "K P"]], Float[Tensor, "K m"]]
    back: Callable[[Float[Tensor, "K m"]], Float[Tensor, "K P"]]


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

    def __init__(self, expansion: Expansion, spectrum_of: "Callable[[GGN], Spectrum] | None" = None) -> None:
        spectrum_of = spectrum_of or dense_spectrum
        self.white = expansion.white
        rhs, path = expansion.complete(expansion.at_mode.matmul(expansion.theta))
        self.spectrum = spectrum_of(expansion.at_mode)
        self.values = self.spectrum.values
        self.rhs = self.spectrum.rotated(rhs.double())[0]
        same = expansion.operator is expansion.at_mode
        nodes = self.values if same else spectrum_of(expansion.operator).values
        ones, fit = torch.ones(1, len(nodes), dtype=torch.float64), self.rhs[None].square().cpu()
        traces = Quadrature(nodes.cpu(), ones, ones)
        self.path = replace(path, traces=traces, fit=Quadrature(self.values.cpu(), fit, fit), exact=True)

    def carries(self, alpha: float) -> bool:
        """Whether the curves are accurate at some `α`."""
        return True

    def mode(self, alpha: float) -> Float[Tensor, "1 P"]:
        """`(M + α)⁻¹ b`, in the scaled coordinates of the prior."""
        return self.spectrum.back((self.rhs / (self.values + alpha))[None]).to(self.white) * self.white


def exact_path(model: LinearModel, prior: GaussianPrior, mode: Float[Tensor, "1 P"]) -> EvidencePath:
    """The curves around a mode in scaled coordinates; arguments as of `evidence_path`."""
    return DenseCurves(expand(model, prior, Point.of(model, prior, mode))).path


def dense_spectrum(operator: GGN) -> Spectrum:
    """The spectrum of `M` that is held, or of the smaller of `RRᵀ` and `RᵀR`, of rows `R` in memory."""
    values, vectors = _decomposed(operator)
    return Spectrum(values, lambda v: v @ vectors.T, lambda v: v @ vectors)


def _decomposed(operator: GGN) -> tuple[Float[Tensor, " m"], Float[Tensor, "m P"]]:
    """All eigenvalues that may not be zero, and eigenvectors as rows; by the smaller of `RRᵀ` and `RᵀR`."""
    with _decomposing():
        held = operator.dense()
        if held is not None:
            return held.spectrum, held.vectors.T
        blocks = [block.double() for block in operator.root_rows()]
        if sum(map(len, blocks)) >= operator.size:
            values, vectors = symmetric_eigen(sum_of_squares(blocks, operator.size, blocks[0].device))
            return values, vectors.T
        root = torch.cat(blocks)
        values, vectors = symmetric_eigen(root @ root.T)
    scaled = (vectors.T @ root) / values.clamp_min(1e-300).sqrt()[:, None]
    # Vectors of eigenvalues that are zero up to rounding would be noise divided by noise.
    return values, torch.where((values > 1e-14 * values[-1])[:, None], scaled, 0.0)


@contextmanager
def _decomposing() -> Iterator[None]:
    """Says what is wrong where there are no eigenvalues."""
    with suppress(FloatingPointError, torch.linalg.LinAlgError, np.linalg.LinAlgError):  # pyright: ignore
        yield
        return
    raise ValueError(
        "The curvature at the mode of the linear model has no eigenvalues in this precision: either the Jacobian of "
        "the model contains NaN or infinity, or the mode has run away, as it may for an affine model of classes. Use "
        '`linear_model="homogeneous"`, or a larger lower bound of `precision_bounds`.'
    )
