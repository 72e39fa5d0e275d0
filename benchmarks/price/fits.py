"""A fit beside epochs of training of the same network on the same batches, in the same run."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from benchmarks.data.tasks import Part
from benchmarks.price.meter import operations_of, turns
from benchmarks.price.setup import Row, Setup
from benchmarks.price.training import BATCH, epoch_of
from benchmarks.time_limit import time_limit
from laplace_sampling import LinearisedLaplace

__all__ = ["Measured", "OutOfTime", "epochs_row", "measured", "ours"]

# Seconds that any fit may take beyond its bound, so that the first call of a kernel does not end it.
GRACE = 20.0
# Data of the epochs that are timed, at most.
TIMED = 10_000

Fit = Callable[[], Any]


class OutOfTime(BaseException):
    """The time of a fit ran out; as with Ctrl-C, nothing but `measured` takes it for an error."""


@dataclass
class Measured:
    """The cost of a fit.

    Attributes:
        result: what the fit returned; `None` if its time ran out.
        epochs: seconds of the fit by those of an epoch.
        counted: the same in operations; `None` without a result.
        others: epochs of other contenders.
        epoch: seconds of an epoch.
    """

    result: Any
    epochs: float
    counted: float | None
    others: dict[str, float] = field(default_factory=dict)
    epoch: float = 0.0


def ours(
    network: nn.Module,
    train: Part,
    validation: Part | None = None,
    fit_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> Fit:
    """`fit_hyperparameters` of a `LinearisedLaplace` with these settings."""

    def fit() -> LinearisedLaplace:
        la = LinearisedLaplace(network, "classification", **settings)
        val_loader = None if validation is None else validation.loader(BATCH)
        return la.fit_hyperparameters(train.loader(BATCH), val_loader, progress=False, **(fit_settings or {}))

    return fit


def measured(
    network: nn.Module,
    train: Part,
    fit: Fit,
    bound: float,
    setup: Setup,
    *,
    others: dict[str, Fit] | None = None,
    once: bool = False,
) -> Measured:
    """A fit, epochs and other contenders in turns; the fit is stopped when it is far above its bound, in epochs.

    Of a fit that runs `once`, operations are counted in this run, which takes a few percent more time.
    """
    # An epoch of very many data is that of a part of them, times the number of parts.
    parts = max(1.0, len(train.y) / TIMED)
    epoch = epoch_of(network, Part(train.x[:TIMED], train.y[:TIMED]).loader(BATCH))
    kept, once = {}, once or setup.repeats == 1

    def run() -> None:
        with time_limit(allowed, OutOfTime):
            kept["result"] = fit()

    def counted() -> None:
        kept["operations"] = operations_of(run)

    epoch()
    unit = parts * turns({"epoch": epoch}, 2)["epoch"]
    allowed = setup.patience * bound * unit + GRACE
    contenders = {"fit": counted if once else run, **(others or {}), "epoch": epoch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            least = turns(contenders, 1 if once else setup.repeats)
            if not once:
                counted()
        except OutOfTime:
            return Measured(None, allowed / unit, None, epoch=unit)
    unit = min(parts * least.pop("epoch"), unit)
    ratios = {name: value / unit for name, value in least.items()}
    counts = kept["operations"] / (parts * operations_of(epoch))
    return Measured(kept["result"], ratios.pop("fit"), counts, others=ratios, epoch=unit)


def epochs_row(what: str, cost: Measured, bound: float, **values: Any) -> Row:
    """The bound holds if it does both in seconds and in operations."""
    values |= {"epochs": cost.epochs, "counted": cost.counted, "bound": bound, "epoch_seconds": cost.epoch}
    limit = f"≤ {bound:g} epochs"
    if cost.counted is None:
        return Row(what, limit, f"not done after {cost.epochs:.0f} epochs", False, values)
    figure = f"{cost.epochs:.2f} epochs, {cost.counted:.2f} in operations"
    return Row(what, limit, figure, max(cost.epochs, cost.counted) <= bound, values)
