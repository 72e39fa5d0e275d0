"""What a budget buys: the distance of predicted standard deviations to those of dense algebra, and what was spent."""

import warnings
from functools import partial
from statistics import fmean

import torch

from benchmarks.price.dense_reference import Reference, distance
from benchmarks.price.meter import operations_of
from benchmarks.price.networks import SMALL
from benchmarks.price.numbers import takes_budget
from benchmarks.price.setup import Cells, Row, Setup, at_most
from benchmarks.price.training import BATCH, epoch_of
from laplace_sampling import IsotropicPrior, LinearisedLaplace

__all__ = ["cells"]

DATA, TRAINING, PRECISION, IMAGES = 2000, 60, 30.0, 100
BUDGETS = (1.0, 5.0, 20.0, 100.0)
# Part of a budget that may be missed, and the samples to whose noise the budget of 20 epochs is compared.
SLACK, SAMPLES, REPEATS, COMPARED, WORSE = 0.1, 64, 20, 20.0, 1.2


def cells(setup: Setup) -> Cells:
    return {SMALL: partial(rows, setup)}


def rows(setup: Setup) -> list[Row]:
    if not takes_budget("fit"):
        return [Row(f"{SMALL}: budgets", "spent within 10 %", "skipped: `fit` has no argument `budget`")]
    network, train, x = setup.network(SMALL, DATA, TRAINING), setup.train(DATA), setup.test.x[:IMAGES]
    reference = Reference.of(network, train.x, PRECISION)
    exact = reference.stddev(x)
    noise = fmean(distance(s, exact) for s in reference.sampled_stddev(x, SAMPLES, REPEATS))
    epoch = operations_of(epoch_of(network, train.loader(BATCH)))
    found, before = [], float("inf")
    for budget in BUDGETS:
        la = LinearisedLaplace(network, "classification", prior=IsotropicPrior(precision=PRECISION), seed=setup.seed)
        spent = operations_of(partial(fit, la, train.loader(BATCH), budget)) / epoch
        off = distance(torch.cat([la.predict(part).stddev for part in x.split(50)]), exact)
        found += budget_rows(budget, spent, off, before, noise)
        before = off
    return found


def fit(la: LinearisedLaplace, loader: object, budget: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit(loader, budget=budget, progress=False)  # pyright: ignore


def budget_rows(budget: float, spent: float, off: float, before: float, noise: float) -> list[Row]:
    what = f"{SMALL}, budget of {budget:g} epochs"
    found = [
        at_most(f"{what}: spent, in operations", spent, (1 + SLACK) * budget),
        Row(
            f"{what}: distance to the exact posterior",
            f"< {before:.4f}",
            f"{off:.4f} ({SAMPLES} exact samples {noise:.4f})",
            off < before,
            {"value": off, "bound": before},
        ),
    ]
    if budget == COMPARED:
        found.append(at_most(f"{what}: distance, by that of {SAMPLES} exact samples", off / noise, WORSE))
    return found
