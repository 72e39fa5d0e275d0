"""Scores of methods on a problem with images, for the parts that compare classifiers."""

import warnings
from collections.abc import Callable
from typing import Any, cast

from benchmarks.comparison.metrics import ood_aurocs, score
from benchmarks.comparison.predictions import Classified, Fitted
from benchmarks.comparison.training import Problem

__all__ = ["described", "scored"]


def described(problem: Problem) -> dict[str, Any]:
    """Sizes of a problem, for a row."""
    return {
        "num_data": len(problem.data.train.y),
        "num_weights": sum(p.numel() for p in problem.network.parameters()),
        "epochs": round(problem.epochs),
        "seed": problem.seed,
    }


def scored(problem: Problem, method: str, fit: Callable[[Problem], Fitted]) -> dict[str, Any]:
    """A row of scores on test data, and of the detection of other data by the entropy of predictions and by others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = fit(problem)
        inside = cast(Classified, fitted.predict(problem.data.test.x))
        scores = score(inside, problem.data.test.y, problem.seed)
        for other in problem.data.others.values():
            areas = ood_aurocs(inside, cast(Classified, fitted.predict(other)))
            scores["ood_auroc"] = areas.pop("entropy")
            scores |= {f"ood_auroc_{score}": area for score, area in areas.items()}
    scores["log_loss"] = -scores["log_likelihood"]
    return {"method": method, **described(problem), **scores}
