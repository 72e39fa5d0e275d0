"""`plot_history`: what a fit of hyperparameters did in each step."""

from typing import TYPE_CHECKING

from laplace_sampling.plots.axes import axes_of, check_fitted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from laplace_sampling.laplace import LinearisedLaplace

__all__ = ["plot_history"]


def plot_history(la: "LinearisedLaplace", ax: "Axes | None" = None) -> "Axes":
    r"""Prior precision `α`, noise precision `b` and effective dimension `γ` in each step of `fit_hyperparameters`.

    Values are those of `history_`: `α` and `b` during the step, and `γ` summed over the groups of the prior; there is a
    line for each `α` and `b` where there are several. The last point is what was fitted; a run that was interrupted has
    none.

    Args:
        la: a `LinearisedLaplace` after `fit_hyperparameters`.
        ax: to draw on; a new figure by default.

    Returns:
        The axes.

    Raises:
        NotFittedError: before a fit.
        ImportError, TypeError, ValueError: without matplotlib; for other objects; after `fit`, which takes no steps.
    """
    check_fitted("plot_history", la, "history_")
    steps = la.history_
    if not steps:
        raise ValueError(
            "`plot_history(la)` needs the steps of `fit_hyperparameters`, but `history_` is empty: the posterior was "
            "fitted by `fit`, at the hyperparameters that it was given."
        )
    ax = axes_of("plot_history", ax)
    # An interrupted run leaves its steps, and the posterior of an earlier one.
    finished = not la.stopped_
    noise = la.noise_precision_ if finished else None
    alpha = [step.prior_precision for step in steps] + ([la.prior_precision_.tolist()] if finished else [])
    gamma = [sum(step.effective_dimension) for step in steps]
    gamma += [float(la.effective_dimension_.sum())] if finished else []
    noises = [step.noise_precision for step in steps if step.noise_precision is not None]
    noises += [noise.reshape(-1).tolist()] if noise is not None else []
    series = (
        ("prior precision α", alpha, "o"),
        ("noise precision b = 1/σ²", noises, "s"),
        ("effective dimension γ", [[value] for value in gamma], "^"),
    )
    for number, (label, rows, marker) in enumerate(series):
        for column, values in enumerate(zip(*rows, strict=True)):
            label_once = label if column == 0 else None
            ax.plot(range(1, len(values) + 1), values, color=f"C{number}", marker=marker, label=label_once)
    numbers = [str(step.step) for step in steps] + ["fitted"] * finished
    every = -(-len(steps) // 10)
    shown = sorted({*range(0, len(steps), every), len(numbers) - 1})
    ax.set_xticks([position + 1 for position in shown], [numbers[position] for position in shown])
    ax.set(yscale="log", xlabel="step", ylabel="value")
    ax.legend()
    return ax
