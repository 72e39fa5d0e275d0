r"""Posterior samples by an inverse square root: `ζ = H^{-1/2} z`, `z ~ N(0, I)`, with `H = M + A`.

The root is taken by contour integral quadrature (Pleiss et al. 2020, "Fast Matrix Square Roots with Applications to
Gaussian Processes and Bayesian Optimization", eq. 2–4),

    H^{-1/2} z ≈ Σ_q w_q (H + t_q I)⁻¹ z,        q = 1 … Q,

all `Q` systems solved at once by MINRES with products of `H` with one vector a row, from `linear_operator`. Unlike
sample-then-optimise it needs full-batch products, and `Q` stacks of vectors in memory.
"""

import warnings
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.operator import Operator, largest_eigenvalue
from laplace_sampling.solvers.solver import Solution

with warnings.catch_warnings():
    # linear_operator uses torch.jit.script at import, deprecated in new versions of torch.
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
    from linear_operator import LinearOperator, settings
    from linear_operator.operators import DiagLinearOperator
    from linear_operator.operators._linear_operator import IndexType
    from linear_operator.utils.contour_integral_quad import contour_integral_quad

__all__ = ["PosteriorPrecision", "quadrature", "sample_contour"]


class PosteriorPrecision(LinearOperator):
    """`H = M + diag(A)`, `[…, P, P]`, as `linear_operator` sees matrices: vectors are columns, `[P, K]`.

    The dtype is that of `A`. `rows` counts the vectors that `M` was multiplied with. Small matrices are made dense by
    `linear_operator` where it sees fit, from products. There are gradients in `A`, none in `M`.

    Args:
        precision: the diagonal of `A`, `[…, P]`; a batch of them gives a batch of matrices.
        operator: `M`.
    """

    def __init__(self, precision: Float[Tensor, "*B P"], operator: Operator) -> None:
        precision = precision.to(operator.device)
        # Tensors are positional and others keywords in the representation that linear_operator rebuilds objects from.
        super().__init__(precision, operator=operator)
        self.precision, self.operator = precision, operator
        self.rows = 0

    def _size(self) -> torch.Size:
        return torch.Size([*self.precision.shape, self.operator.size])

    def _transpose_nonbatch(self) -> "PosteriorPrecision":
        return self

    def _matmul(self, rhs: Float[Tensor, "*B P K"]) -> Float[Tensor, "*B P K"]:
        columns = rhs[:, None] if rhs.dim() == 1 else rhs
        product = self._product(columns) + self.precision[..., None] * columns
        # A copy, for linear_operator's solvers write into what they get and expect it contiguous.
        return product[..., 0] if rhs.dim() == 1 else product.contiguous()

    def _product(self, columns: Float[Tensor, "*B P K"]) -> Float[Tensor, "*B P K"]:
        """`M` times columns."""
        stack = columns.mT.reshape(-1, self.operator.size)
        self.rows += len(stack)
        return self.operator.matmul(stack.to(self.operator.dtype)).to(columns.dtype).reshape(columns.mT.shape).mT

    def _get_indices(self, row_index: IndexType, col_index: IndexType, *batch_indices: IndexType) -> Tensor:
        # By unit vectors, a product for each column asked for, the whole diagonal too: for small problems.
        assert isinstance(row_index, Tensor)
        assert isinstance(col_index, Tensor)
        rows, columns = torch.broadcast_tensors(row_index, col_index)
        distinct, place = columns.unique(return_inverse=True)
        units = torch.zeros(self.operator.size, len(distinct), device=self.device, dtype=self.dtype)
        units[distinct, torch.arange(len(distinct), device=distinct.device)] = 1
        entries = self.precision[cast(tuple[Tensor, ...], (*batch_indices, rows))]
        return self._product(units)[rows, place] + torch.where(rows == columns, entries, 0)


def quadrature(smallest: float, largest: float, num_quadrature: int) -> tuple[Float[Tensor, " Q"], Float[Tensor, " Q"]]:
    r"""Shifts `t_q > 0` and weights `w_q > 0` with `x^{-1/2} ≈ Σ_q w_q / (x + t_q)` for `smallest ≤ x ≤ largest`.

    The relative error falls as `exp(−2π²Q / (log κ + 3))`, `κ = largest / smallest` (Pleiss et al. 2020, lemma 1; the
    rule is that of Hale, Higham & Trefethen 2008).
    """
    # linear_operator has the rule inside its solver only: the solver on diag(smallest, largest), whose eigenvalues its
    # Lanczos steps find exactly, gives it away.
    ends = torch.tensor([smallest, largest], dtype=torch.float64)
    _, weights, _, shifts = contour_integral_quad(
        DiagLinearOperator(ends),
        torch.ones(2, 1, dtype=torch.float64),
        inverse=True,
        num_contour_quadrature=num_quadrature,
    )
    assert weights is not None
    # It solves (t_q − H) x = z with t_q < 0 and w_q < 0; the first shift, zero, is not of the rule.
    return -shifts[1:].flatten(), -weights.flatten()


def sample_contour(
    ggn: GGN,
    prior: GaussianPrior,
    draws: Draws,
    *,
    num_quadrature: int = 10,
    max_iterations: int = 1000,
    tolerance: float = 1e-4,
    residual_tolerance: float = 0.1,
) -> Solution:
    r"""Zero-mean posterior samples `ζ = H^{-1/2} z ~ N(0, (M + A)⁻¹)` in the scaled coordinates `ζ/s` of the prior.

    The rule covers eigenvalues from the smallest `α`, a bound by Weyl's inequality, to above the largest eigenvalue of
    `M`, by power iteration, plus the largest `α`. So its error is that of `num_quadrature` alone.

    Of the `Solution`:

    - `residual` is `|ζᵀHζ / ‖z‖² − 1|^{1/2}`, of the size of the whitened error `‖H^{1/2}ζ − z‖ / ‖z‖`: with
      `e = H^{1/2}ζ − z` what is under the root is `|2⟨z, e⟩ + ‖e‖²| / ‖z‖²`, which is above the squared error unless
      the two terms cancel. It is no bound, and it is relative to all `P` directions, of which the data may determine
      few. Rounding leaves some `3e-4` of it in float32.
    - `converged` says that MINRES reached its tolerance within `max_iterations` and all residuals are below
      `residual_tolerance`.
    - `delta` is zero: there is no prior sample that `ζ` started from, and no warm start for a later solve.
    - `passes` counts the products that were made, those of power iteration and of the residual among them.

    Args:
        ggn: `M`, unscaled.
        prior: `A`.
        draws: `z` is `draws.prior`. For the same draws the samples are others than those of `sample_posterior`, of the
            same distribution.
        num_quadrature: `Q`. MINRES holds about five times `Q + 1` stacks of samples in memory.
        max_iterations: limit to the iterations of MINRES, a product a row each; never more than `P + 3`, which rounding
            errors can make too few for a small ill-conditioned problem.
        tolerance: MINRES stops when the last update, relative to the solution and averaged over rows and systems,
            falls below; looked at every ten iterations. The error left is larger, and grows with the condition number:
            where the data determine few of many weights, those few directions were off by 0.04 %, 3 % and 22 % at
            condition numbers of 1e2, 1e4 and 1e6, with 1e-6 by 0.0004 %, 0.01 % and 0.3 %.
        residual_tolerance: residual under which a row counts as converged.
    """
    if num_quadrature < 1 or max_iterations < 1:
        raise ValueError(
            f"num_quadrature and max_iterations must be at least 1, but are {num_quadrature} and {max_iterations}."
        )
    scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
    spread = prior.spread()
    H = PosteriorPrecision(spread.to(ggn.dtype), scaled)
    z = draws.prior(ggn.size).to(ggn.device, ggn.dtype)

    # Power iteration comes from below, and a rule for a range somewhat too wide costs next to nothing.
    generator = torch.Generator().manual_seed(draws.seed)
    largest = 1.25 * largest_eigenvalue(scaled, None, _POWER_ITERATIONS, generator) + float(spread.max())
    shifts, weights = quadrature(float(spread.min()), largest, num_quadrature)

    # `LinearOperator.sqrt_inv_matmul` cannot be given the range: it takes that from 20 Lanczos steps, whose smallest
    # Ritz value is far above the smallest eigenvalue of an ill-conditioned matrix. On 600 eigenvalues spread evenly on
    # a log scale from 1 to 1e4 its ζ was off by 11 %, 1.2 % and 0.013 % at 5, 10 and 20 points; with the range known
    # 0.09 % and 0.0005 % at 5 and 10. Hence the function below it, with a rule of our own range as it expects it.
    shifts = torch.cat([torch.zeros(1, dtype=shifts.dtype), -shifts]).to(z)
    weights = -weights.to(z)[:, None, None]
    with settings.minres_tolerance(tolerance), settings.max_cg_iterations(max_iterations):
        solves, *_ = contour_integral_quad(H, z.mT.contiguous(), inverse=True, weights=weights, shifts=shifts)
    zeta = (solves * weights).sum(0).mT.contiguous()
    # MINRES makes a product before the first iteration, and allows itself two more iterations than it is told and, in
    # exact arithmetic enough, no more than P + 1.
    iterations = H.rows // len(z) - 1
    finished = iterations < max_iterations + 2 or ggn.size < max_iterations

    product = scaled.matmul(zeta)
    energy = (zeta.double() * (product + spread * zeta).double()).sum(1)
    residual = (energy / z.double().square().sum(1) - 1).abs().sqrt()
    converged = finished and bool((residual < residual_tolerance).all())
    passes = float(_POWER_ITERATIONS + H.rows + len(z))
    return Solution(
        zeta, torch.zeros_like(zeta), residual.to(zeta.dtype), zeta * product, passes, converged, error=residual
    )


_POWER_ITERATIONS = 10
