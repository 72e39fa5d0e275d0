"""Plots of a fit; matplotlib is imported only when one is drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from laplace_sampling.evidence.curves import EvidenceCurves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_evidence"]

_STANDARD_ERRORS = 2


class HasEvidence(Protocol):
    """What `plot_evidence` needs of a `LinearisedLaplace`."""

    @property
    def prior_precision_(self) -> Tensor: ...

    def evidence_path(self, decades: float = ..., num: int = ...) -> EvidenceCurves: ...


def plot_evidence(
    la: HasEvidence, decades: float = 3.0, num: int = 121, axes: "Sequence[Axes] | None" = None
) -> "Figure":
    r"""Effective dimension `γ`, `‖θ̄‖²` and log marginal likelihood against the prior precision `α`.

    The curves are those of `evidence_path`, at the curvature of the fit. Bands are two standard errors (the exact
    method has none); a vertical line marks the fitted `α`. Where the curvature of the loss is taken at the mode, the
    evidence need not be largest there, because the curvature moves with `α`.

    Args:
        la: a fitted `LinearisedLaplace` that has its training data.
        decades: range of `α` to both sides of the fitted one.
        num: number of points of each curve.
        axes: three to draw on; a new figure by default.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('`plot_evidence` needs matplotlib: pip install "laplace_sampling[demo]"') from error
    if axes is not None and len(axes) != 3:
        raise ValueError(f"`plot_evidence(axes=...)` needs three axes, got {len(axes)}.")
    curves = la.evidence_path(decades, num)
    if axes is None:
        axes = plt.subplots(3, 1, figsize=(5, 7), sharex=True, layout="constrained")[1]
    assert axes is not None
    _draw(axes, curves)
    several = len(la.prior_precision_) > 1
    axes[-1].set_xlabel("prior precision α" + (", geometric mean" if several else ""))
    figure = axes[0].get_figure(root=True)
    assert figure is not None
    return figure


def _draw(axes: "Sequence[Axes]", curves: EvidenceCurves) -> None:
    panels = (
        ("effective dimension γ", curves.effective_dimension, curves.effective_dimension_se),
        ("‖θ̄‖², scaled", curves.mode_norm, None),
        ("log marginal likelihood", curves.log_marginal_likelihood, curves.log_marginal_likelihood_se),
    )
    for ax, (label, values, error) in zip(axes, panels, strict=True):
        ax.plot(curves.prior_precision, values, color="C0")
        if error is not None and bool((error > 0).any()):
            band = _STANDARD_ERRORS * error
            ax.fill_between(curves.prior_precision, values - band, values + band, color="C0", alpha=0.2, linewidth=0)
        ax.axvline(curves.at, color="k", linestyle=":", linewidth=1)
        ax.set(xscale="log", ylabel=label)
    axes[1].set_yscale("log")
