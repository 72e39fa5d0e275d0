"""Cost against the number of data, until the default tolerance: epochs are to fall."""

import inspect
from functools import partial

from benchmarks.price.fits import Measured, measured, ours
from benchmarks.price.networks import CNN
from benchmarks.price.setup import Cells, Row, Setup
from laplace_sampling import LinearisedLaplace

__all__ = ["cells", "takes_budget"]

NUMBERS = (1000, 10_000, 60_000)
# Epochs after which a fit may be stopped, with the most data; with fewer as many products.
EPOCHS = 20.0


def cells(setup: Setup) -> Cells:
    return {f"{CNN}": partial(rows, setup)}


def takes_budget(name: str) -> bool:
    """Whether a method of `LinearisedLaplace` has such an argument."""
    return "budget" in inspect.signature(getattr(LinearisedLaplace, name)).parameters


def rows(setup: Setup) -> list[Row]:
    found, epochs = [], []
    settings = {"budget": None} if takes_budget("fit_hyperparameters") else {}
    for num in NUMBERS:
        network, train = setup.network(CNN, num), setup.train(num)
        fit = ours(network, train, seed=setup.seed, fit_settings=settings)
        cost = measured(network, train, fit, EPOCHS * NUMBERS[-1] / num, setup, once=True)
        found.append(row(len(train.y), cost, epochs))
        epochs.append(cost.counted)
    return found


def row(num: int, cost: Measured, before: list[float | None]) -> Row:
    """The bound holds if there are fewer epochs than with fewer data."""
    what = f"{CNN}, all weights, N = {num:,}, until the tolerance"
    bound = "fewer epochs than with fewer data" if before else ""
    if cost.counted is None:
        return Row(what, bound, f"not done after {cost.epochs:.0f} epochs", False if before else None)
    error = getattr(cost.result.diagnose(), "error", None)
    accuracy = "" if error is None else f", error of standard deviations {error:.3f} by its own estimate"
    figure = f"{cost.counted:.2f} epochs in operations, {cost.epochs:.2f} in seconds{accuracy}"
    holds = None if not before else before[-1] is None or cost.counted < before[-1]
    return Row(what, bound, figure, holds, {"epochs": cost.epochs, "counted": cost.counted, "num_data": num})
