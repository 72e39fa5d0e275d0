"""The evidence at the linear model's mode, and at the trained weights: two prior precisions, and their test log loss.

Antorán (2024), Table 5.1, column CNN. With the curvature fixed at the network, `γ(α) = Tr M(M + α)⁻¹`, the evidence at
weights `w` is largest where `α‖w‖² = γ(α)`: with `w = θ̄(α)` for the first, with `w = w̄` for the second.
"""

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison.metrics import score
from benchmarks.comparison.ours import BATCH, caught, fitted_predictions
from benchmarks.comparison.training import Problem, outputs_of
from benchmarks.price.scores import log_loss
from benchmarks.published.classifiers import described
from benchmarks.published.setup import Cells, Rows, Setup, Study
from benchmarks.published.tables import beside, sizes
from laplace_sampling import IsotropicPrior, LinearisedLaplace

__all__ = ["STUDY", "precision_of_weights", "rows"]

NETWORKS = ("strided CNN, 3,866 weights", "strided CNN, small")
NUM, EPOCHS, TEST, SEEDS = 60_000, 15, 10_000, 1
MODE, WEIGHTS, ALONE = "evidence at the linear mode", "evidence at the trained weights", "network alone"
PUBLISHED = {MODE: ("0.025 ± 0.000", ""), WEIGHTS: ("0.253 ± 0.001", "")}
SETTINGS: dict[str, Any] = {"method": "exact", "linear_model": "homogeneous"}


def precision_of_weights(la: LinearisedLaplace, decades: float = 3.0) -> float:
    """`α` with `α‖w̄‖² = γ(α)`, from the curve of a fit whose prior precision is isotropic."""
    curve = la.evidence_path(decades=decades, num=2001)
    log_alpha = curve.prior_precision.log()
    gap = log_alpha + math.log(float(la.network.weights.double().square().sum())) - curve.effective_dimension.log()
    if not gap[0] < 0 < gap[-1]:
        raise ValueError(f"No precision within {decades:g} decades has α‖w̄‖² = γ(α): take more `decades`.")
    return float(np.exp(np.interp(0.0, gap.numpy(), log_alpha.numpy())))


def rows(problem: Problem) -> Rows:
    """The network alone, and the posteriors of both precisions without a scale."""
    test, train = problem.data.test, problem.data.train.loader(BATCH)
    alone = log_loss(outputs_of(problem.network, test.x).log_softmax(-1), test.y)
    head = described(problem) | {"network": problem.architecture}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mode = LinearisedLaplace(problem.network, "classification", seed=problem.seed, **SETTINGS)
        # The default budget may end before the precision is found.
        mode.fit_hyperparameters(train, budget=None, criterion="evidence", scale=1.0, progress=False)
        precisions = {MODE: float(mode.prior_precision_[0]), WEIGHTS: precision_of_weights(mode)}
        found = [head | {"method": ALONE, "log_loss": alone}]
        for method, precision in precisions.items():
            prior = IsotropicPrior(precision=precision)
            la = LinearisedLaplace(problem.network, "classification", prior=prior, seed=problem.seed, **SETTINGS)
            details = caught(la, lambda la=la: la.fit(train, budget=None, progress=False))
            scores = score(fitted_predictions(problem, la, details).predict(test.x), test.y)
            values = {"log_loss": -scores["log_likelihood"], "prior_precision": precision}
            found.append(head | {"method": method} | values)
    return found


def cells(setup: Setup) -> Cells:
    networks = ("strided CNN, 256 weights",) if setup.quick else NETWORKS
    sizes = {"num": NUM, "epochs": EPOCHS, "test": setup.size(TEST, 50)}

    def run(network: str, seed: int) -> Rows:
        return rows(setup.problem("MNIST", network, seed, **sizes))

    return {f"{name}, seed {s}": partial(run, name, s) for name in networks for s in setup.runs(SEEDS)}


def section(rows: Rows, images: Path) -> str:
    named = [row | {"row": f"{row['network']}: {row['method']}"} for row in rows]
    head = ("evidence", "log loss on test data", "prior precision")
    keys = ("log_loss", "prior_precision")
    return (
        f"{beside(head, PUBLISHED, named, keys, by='row')}\n\n"
        "Published: Antorán (2024), Table 5.1, a CNN on MNIST, one precision, dense curvature; the largest of its "
        f"networks has 46,024 weights, on N = 60,000. Here: {sizes(rows)}, dense curvature too. What differs: fewer "
        "data and weights, Adam with a falling step size where the source has 90 epochs of SGD, and a tenth of the "
        "training images held out. Neither precision is followed by a scale or a temperature."
    )


STUDY = Study("The evidence at the linear mode and at the trained weights, MNIST", cells, section)
