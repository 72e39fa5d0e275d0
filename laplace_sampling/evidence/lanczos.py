"""Traces of functions of the curvature by block Lanczos on random probes (`solvers.quadrature`)."""

import math
from collections.abc import Callable

from laplace_sampling.evidence.curves import Traces
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.basis import Basis
from laplace_sampling.solvers.quadrature import TraceEstimator

# `Tr M` takes `C/2` products, and is computed for at most so many outputs: no more than a few steps of the probes.
_TRACE_OUTPUTS = 64


def krylov_traces(
    ggn: GGN,
    at: float,
    draws: Draws,
    accurate: Callable[[Traces], bool],
    max_basis: int | None = None,
) -> Traces:
    """The traces of `M`, from a run that ends where they are accurate, or complete.

    Args:
        ggn: `M`, in coordinates in which the prior has one precision.
        at: that precision.
        draws: of the probes.
        accurate: whether traces are accurate enough, so that the run ends.
        max_basis: largest number of vectors in memory.
    """
    probes = draws.prior(ggn.size).to(ggn.device, ggn.dtype)
    # Of equal norms: the variance of an estimate is then that of directions alone.
    probes = probes * (math.sqrt(ggn.size) / probes.norm(dim=1, keepdim=True))
    known = ggn.features.num_outputs <= _TRACE_OUTPUTS
    basis = Basis(ggn)
    estimator = TraceEstimator(basis, probes, ggn.trace() if known else None)
    while True:
        full = max_basis is not None and basis.size + estimator.width > max_basis and estimator.steps > 0
        exhausted = full or not estimator.step()
        assert estimator.quadrature is not None
        passes = basis.passes + (ggn.features.num_outputs / 2 if known else 0.0)
        traces = Traces(estimator.quadrature, at, exact=False, passes=passes, full=full, rounding=basis.indefiniteness)
        # A step that has added less than a block says that few more products make the traces exact. The change of the
        # last step is known after two.
        settled = estimator.steps > 1 and estimator.width == len(probes)
        if exhausted or (settled and accurate(traces)):
            return traces
