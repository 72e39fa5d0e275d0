"""`plot_evidence`: the evidence, and what it is made of, as functions of the prior precision."""

from typing import TYPE_CHECKING

from laplace_sampling.plots.axes import axes_of, check_fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from laplace_sampling.laplace import LinearisedLaplace

__all__ = ["plot_evidence"]

_STANDARD_ERRORS = 2
_LABELS = {
    "log_marginal_likelihood": "log marginal likelihood, nats",
    "effective_dimension": "effective dimension γ",
    "mode_norm": "‖θ̄‖² of the mode, in units of the prior",
}


def plot_evidence(
    la: "LinearisedLaplace",
    ax: "Axes | None" = None,
    *,
    curve: str = "log_marginal_likelihood",
    decades: float = 3.0,
    num: int = 121,
) -> "Axes":
    r"""The log marginal likelihood `log p(y | α)` of the linear model against the prior precision `α`.

    The curve is that of `evidence_path`. The band is two standard errors (the exact method has none), and a vertical
    line marks the fitted `α`. That is where the curve is largest only if the evidence has chosen it:
    `criterion="leave_one_out"` and validation data choose others.

    Args:
        la: a fitted `LinearisedLaplace` that has its training data.
        ax: to draw on; a new figure by default.
        curve: `"log_marginal_likelihood"`, in nats, a sum over the data; `"effective_dimension"`, `γ(α)`; or
            `"mode_norm"`, `‖θ̄(α)‖²` in the scaled coordinates of the prior.
        decades: range of `α` to both sides of the fitted one.
        num: points of the curve.

    Returns:
        The axes.

    Raises:
        NotFittedError: before a fit, and for a posterior that was loaded without its data.
        ImportError, TypeError, ValueError: without matplotlib; for other objects; for a curve that is not known.
    """
    check_fitted("plot_evidence", la, "evidence_path")
    if curve not in _LABELS:
        known = ", ".join(f'"{name}"' for name in _LABELS)
        raise ValueError(f"`plot_evidence(curve={curve!r})` is not known; use one of {known}.")
    ax = axes_of("plot_evidence", ax)
    curves = la.evidence_path(decades, num)
    alpha, values = curves.prior_precision, getattr(curves, curve)
    (line,) = ax.plot(alpha, values)
    error = getattr(curves, f"{curve}_se", None)
    if error is not None and bool((error > 0).any()):
        band, colour = _STANDARD_ERRORS * error, line.get_color()
        label = f"± {_STANDARD_ERRORS} standard errors"
        ax.fill_between(alpha, values - band, values + band, color=colour, alpha=0.2, linewidth=0, label=label)
    ax.axvline(curves.at, color="black", linestyle=":", label=f"fitted, α = {curves.at:.3g}")
    mean = ", geometric mean of the groups" if len(la.prior_precision_) > 1 else ""
    ax.set(xscale="log", yscale="log" if curve == "mode_norm" else "linear")
    ax.set(xlabel=f"prior precision α{mean}", ylabel=_LABELS[curve])
    ax.legend()
    return ax
