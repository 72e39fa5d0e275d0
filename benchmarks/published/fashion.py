"""Fashion-MNIST with three convolutions and three linear layers: accuracy, log loss, calibration, MNIST as other data.

Immer, Korzepa and Bauer (2021), as quoted in the slides of Hernández-Lobato.
"""

from functools import partial
from pathlib import Path

from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.ours import validated, with_validation
from benchmarks.published.classifiers import scored
from benchmarks.published.setup import Cells, Rows, Setup, Study
from benchmarks.published.tables import beside, sizes

__all__ = ["STUDY"]

NETWORK = "3 convolutions and 3 linear layers"
NUM, EPOCHS, TEST, SEEDS = 60_000, 12, 10_000, 1
KEYS = ("accuracy", "log_loss", "calibration_error", "ood_auroc")
PUBLISHED = {
    "network alone": ("0.914 ± 0.001", "0.258 ± 0.004", "0.017 ± 0.001", "0.864 ± 0.014"),
    "Laplace, not linearised": ("0.844 ± 0.001", "0.942 ± 0.016", "0.411 ± 0.008", "0.945 ± 0.002"),
    "Laplace, linearised": ("0.923 ± 0.001", "0.244 ± 0.003", "0.012 ± 0.003", "0.955 ± 0.006"),
}
CONTENDERS = {
    "network alone": METHODS["MAP"].fit,
    "ours": METHODS["ours"].fit,
    "ours, precision by validation": with_validation,
    "ours, Kronecker factors, precision by validation": validated(method="kfac"),
}


def cells(setup: Setup) -> Cells:
    name = NETWORK + ", narrow" * setup.quick

    def row(method: str, seed: int) -> Rows:
        problem = setup.problem("Fashion-MNIST", name, seed, num=NUM, epochs=EPOCHS, test=setup.size(TEST, 50))
        return [scored(problem, method, CONTENDERS[method])]

    return {f"{method}, seed {s}": partial(row, method, s) for s in setup.runs(SEEDS) for method in CONTENDERS}


def section(rows: Rows, images: Path) -> str:
    head = ("method", "accuracy", "log loss", "calibration error", "AUROC against MNIST, by entropy")
    return (
        f"{beside(head, PUBLISHED, rows, KEYS)}\n\n"
        "Published: Immer, Korzepa and Bauer (2021), Kronecker factors, prior precision by validation data. "
        f"Here: {sizes(rows)}. What differs: the source gives no widths (here 32, 48 and 64 channels, 128 and 64 "
        "units) and no schedule of training (here Adam with a falling step size, and a tenth of the training images "
        f"for validation); calibration is in 15 bins; MNIST is its first 2,000 test images."
    )


STUDY = Study("Fashion-MNIST, three convolutions and three linear layers", cells, section)
