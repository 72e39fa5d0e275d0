"""The pictures of fits and of scores; matplotlib is imported only when one is drawn."""

import math
from typing import Any

import numpy as np

from laplace_sampling.plots.drawing import BLUE, GREY, ORANGE, RED, Axes, axes_of, check_kind, panels
from laplace_sampling.predictions.scores import SCORES

# Label of each curve that `plot_evidence` draws.
_CURVES = {
    "log_marginal_likelihood": "log marginal likelihood, nats",
    "effective_dimension": "effective dimension γ",
    "mode_norm": "‖θ̄‖² of the mode, in units of the prior",
}


# Words above a point.
_ABOVE: Any = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": "small"}


def plot_evidence(
    la: Any,
    ax: Axes = None,
    *,
    curve: str = "log_marginal_likelihood",
    decades: float = 3.0,
    num: int = 121,
) -> Axes:
    r"""The log marginal likelihood `log p(y | α)` of the linear model against the prior precision `α`.

    The curve is that of `evidence_path`. The band is two standard errors (the exact method has none), and a vertical
    line marks the fitted `α`. That is where the curve is largest only if the evidence has chosen it:
    `criterion="leave_one_out"` and validation data choose others. Then a point marks the largest evidence of
    this range, and words say how many nats lie between.

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
    if curve not in _CURVES:
        raise ValueError(f"`plot_evidence(curve={curve!r})` is not known; use one of {list(_CURVES)}.")
    ax = axes_of("plot_evidence", ax)
    curves = la.evidence_path(decades, num)
    alpha, values = curves.prior_precision, getattr(curves, curve)
    ax.plot(alpha, values, color=BLUE)
    error = getattr(curves, f"{curve}_se", None)
    if error is not None and bool((error > 0).any()):
        ax.fill_between(alpha, values - 2 * error, values + 2 * error, color=BLUE, alpha=0.2, linewidth=0)
    ax.axvline(curves.at, color="black", linestyle=":")
    said = f"fitted, α = {curves.at:.3g}"
    evidence = curves.log_marginal_likelihood
    best, at = int(evidence.argmax()), int((alpha.log() - math.log(curves.at)).abs().argmin())
    if (gap := float(evidence[best] - evidence[at])) > 1:
        said += f"\n{gap:.3g} nats below the largest evidence here"
        ax.plot(alpha[best], values[best], "o", color=RED)
        ax.annotate("largest evidence here", (float(alpha[best]), float(values[best])), (0, 6), **_ABOVE, color=RED)
    ax.annotate(said, (curves.at, 1.0), (0, 4), xycoords=ax.get_xaxis_transform(), **_ABOVE)
    mean = ", geometric mean of the groups" if len(la.prior_precision_) > 1 else ""
    ax.set(xscale="log", yscale="log" if curve == "mode_norm" else "linear")
    ax.set(xlabel=f"prior precision α{mean}", ylabel=_CURVES[curve])
    ax.margins(y=0.12)
    return ax


def plot_history(la: Any, ax: Axes = None) -> Axes:
    r"""Prior precision `α`, noise precision `b` and effective dimension `γ` in each step of `fit_hyperparameters`.

    Each has a panel, since each has a unit of its own: one over squared weights, one over squared targets, and numbers
    of directions. Values are those of `history_`: `α` and `b` during the step, and `γ` summed over the groups of the
    prior; there is a line for each `α` and `b` where there are several.

    Args:
        la: a `LinearisedLaplace` after `fit_hyperparameters`.
        ax: axes whose place the panels take; a new figure by default.

    Returns:
        The axes of the first panel; `ax.figure.axes` are all of them.

    Raises:
        NotFittedError: before a fit.
        ImportError, TypeError, ValueError: without matplotlib; for other objects; after `fit`, which takes no steps.
    """
    steps = la.history_
    if not steps:
        raise ValueError(
            "`plot_history(la)` needs the steps of `fit_hyperparameters`, but `history_` is empty: the posterior was "
            "fitted by `fit`, at the hyperparameters that it was given."
        )
    noise = [step.noise_precision for step in steps if step.noise_precision is not None]
    series = {
        "prior precision α": [step.prior_precision for step in steps],
        "noise precision\nb = 1/σ²": noise,
        "effective\ndimension γ": [[sum(step.effective_dimension)] for step in steps],
    }
    series = {label: rows for label, rows in series.items() if rows}
    ax = axes_of("plot_history", ax, (6.4, 1.8 * len(series)))
    parts = panels(ax, len(series), 1)
    for part, (label, rows) in zip(parts, series.items(), strict=True):
        for values in zip(*rows, strict=True):
            part.plot(range(1, len(values) + 1), values, color=BLUE, marker="o", markersize=4)
        part.xaxis.get_major_locator().set_params(integer=True)
        part.set(yscale="log", ylabel=label)
        part.tick_params(labelbottom=part is parts[-1])
    parts[-1].set_xlabel("step")
    return ax


def plot_evaluation(evaluation: Any, ax: Axes = None) -> Axes:
    """The scores of an `Evaluation`, a panel for each, with a dot for each predictor and its value beside it.

    An arrow says which way is better.

    Args:
        evaluation: what `evaluate` returned.
        ax: axes whose place the panels take; a new figure by default.

    Returns:
        The axes of the first panel; `ax.figure.axes` are all of them.

    Raises:
        ImportError, TypeError: without matplotlib; for other objects.
    """
    check_kind("plot_evaluation(evaluation)", getattr(evaluation, "table", None), dict, "what `evaluate` returns")
    table: dict[str, dict[str, float]] = evaluation.table
    names, colours = list(next(iter(table.values()))), {"network": GREY, "laplace": BLUE}
    columns = min(4, -(-len(names) // 2))
    rows = -(-len(names) // columns)
    ax = axes_of("plot_evaluation", ax, (2.4 * columns, (0.9 + 0.25 * len(table)) * rows))
    parts = panels(ax, rows, columns)
    for number, (part, name) in enumerate(zip(parts, names, strict=False)):
        label, larger = SCORES[name]
        part.set_title(label + {True: " ↑", False: " ↓", None: ""}[larger], fontsize="small")
        for place, (predictor, scores) in enumerate(table.items()):
            value, colour = scores[name], colours.get(predictor, ORANGE)
            part.plot(value, place, "o", color=colour)
            if np.isfinite(value):
                part.annotate(
                    f"{value:.3g}", (value, place), (6, 0), textcoords="offset points", va="center", fontsize="small"
                )
        part.set_yticks(range(len(table)), list(table) if number % columns == 0 else [""] * len(table))
        part.set_ylim(len(table) - 0.5, -0.5)
        part.margins(x=0.4)
        low, high = part.get_xlim()
        # An axis spans a tenth of its numbers at least, so that those that are nearly equal look so.
        missing = max(0.0, 0.1 * max(abs(low), abs(high)) - (high - low)) / 2
        part.set_xlim(low - missing, high + missing)
        part.tick_params(labelsize="small")
        part.spines[["top", "right"]].set_visible(False)
    for part in parts[len(names) :]:
        part.remove()
    return ax
