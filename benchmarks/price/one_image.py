"""One image through LeNet and 16 samples of all its weights."""

from functools import partial

from benchmarks.price.last_layer import prediction_row
from benchmarks.price.networks import LENET
from benchmarks.price.setup import Cells, Row, Setup
from laplace_sampling import IsotropicPrior, LinearisedLaplace

__all__ = ["cells"]

# Few data: the cost of a prediction does not depend on them.
DATA, FITTED, SAMPLES, PRECISION, BOUND, REPEATS = 10_000, 100, 16, 100.0, 8.0, 100


def cells(setup: Setup) -> Cells:
    return {LENET: partial(rows, setup)}


def rows(setup: Setup) -> list[Row]:
    network, train = setup.network(LENET, DATA), setup.train(FITTED)
    la = LinearisedLaplace(
        network,
        "classification",
        prior=IsotropicPrior(precision=PRECISION),
        method="krylov",
        num_samples=SAMPLES,
    )
    la.fit(train.loader(FITTED), progress=False)
    what = f"{LENET}, {SAMPLES} samples of all weights"
    return [prediction_row(what, network, la, setup.test, 1, BOUND, max(3, REPEATS * setup.repeats // 3))]
