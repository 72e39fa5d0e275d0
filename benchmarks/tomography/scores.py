"""How well standard deviations of an image say where it is wrong, and a picture of both."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks.comparison.metrics import best_scale
from benchmarks.tomography.problems import Problem
from laplace_sampling import Gaussian
from laplace_sampling.predictions.prediction import RegressionPrediction

# Of the intervals whose coverage is reported, the quantile of a normal distribution, and sides of patches.
LEVEL, _QUANTILE, PATCH = 0.9, 1.6448536, (10, 10)


@dataclass(frozen=True)
class Estimate:
    """An image with error bars.

    Attributes:
        mean: `[side, side]`.
        deviations: draws of `x − mean`, `[K, side, side]`; or one array of standard deviations of independent pixels.
        noise: variance of the measurements; `None` if there are no error bars of these.
        facts: times, iterations, hyperparameters.
    """

    mean: np.ndarray
    deviations: np.ndarray
    noise: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def stddev(self) -> np.ndarray:
        return np.sqrt((self.deviations**2).mean(0)) if self.deviations.ndim == 3 else self.deviations

    def prediction(self) -> RegressionPrediction:
        """The same as the library predicts images, with a channel."""
        mean, deviations = (torch.as_tensor(v, dtype=torch.float64) for v in (self.mean, self.deviations))
        return RegressionPrediction(mean[None, None], deviations[:, None, None], Gaussian())


def log_density(error: np.ndarray, variance: np.ndarray | float) -> np.ndarray:
    """`log N(e | 0, v)` of each entry."""
    return -0.5 * (error**2 / variance + np.log(2 * np.pi * variance))


def scores(problem: Problem, estimate: Estimate) -> dict[str, float]:
    """Scores of an estimate against the truth; logarithms are natural, and a mean over pixels."""
    error, deviation, added = problem.truth - estimate.mean, estimate.stddev.astype(np.float64), problem.pixel_noise
    regions = problem.regions
    inside = regions["object"]
    total = np.sqrt(deviation**2 + added)
    found = {
        "psnr": 10 * math.log10(float(problem.truth.max()) ** 2 / float((error**2).mean())),
        "rms_object": float(np.sqrt((error[inside] ** 2).mean())),
        "ll": float(log_density(error, total**2).mean()),
        "ll_object": float(log_density(error[inside], total[inside] ** 2).mean()),
        "mean_sd_object": float(deviation[inside].mean()),
    }
    for name, where in regions.items():
        found[f"coverage_{name}"] = float((np.abs(error) <= _QUANTILE * total)[where].mean())
    # with the noise of the truth, as that of the pixels is multiplied and it is not
    factor = best_scale(lambda s: -float(log_density(error, math.exp(2 * s) * deviation**2 + added).mean()), 0.02, 50)
    scaled = np.sqrt(factor**2 * deviation**2 + added)
    found |= {
        "factor": factor,
        "ll_factor": float(log_density(error, scaled**2).mean()),
        "coverage_object_factor": float((np.abs(error) <= _QUANTILE * scaled)[inside].mean()),
    }
    if estimate.deviations.ndim == 3:
        ranked: Any = spearmanr(deviation[inside], np.abs(error[inside]))
        found["rank"] = float(ranked.statistic)
        truth = torch.as_tensor(problem.truth, dtype=torch.float64)[None, None]
        found["ll_patches"] = float(estimate.prediction().log_likelihood(truth, PATCH, pixel_noise=added))
        if estimate.noise is not None:
            found["coverage_held_out"] = held_out_coverage(problem, estimate)
    else:
        found["ll_patches"] = found["ll"]
    return found


def held_out_coverage(problem: Problem, estimate: Estimate) -> float:
    """How many measurements from other angles are in their intervals, among those whose rays meet the object."""
    shadow = problem.held_T @ problem.regions["object"].ravel() > 0
    T, error = problem.held_T[shadow], (problem.held_y - problem.held_T @ estimate.mean.ravel())[shadow]
    variance = ((T @ estimate.deviations.reshape(len(estimate.deviations), -1).T) ** 2).mean(1) + estimate.noise
    return float((np.abs(error) <= _QUANTILE * np.sqrt(variance)).mean())


def constants(problem: Problem, mean: np.ndarray) -> dict[str, Estimate]:
    """A reconstruction with the constant standard deviations that are best in hindsight: one, and two by region."""
    error, inside = problem.truth - mean, problem.regions["object"]
    spread = np.full_like(error, np.sqrt((error**2).mean()), dtype=np.float64)
    two = np.where(inside, np.sqrt((error[inside] ** 2).mean()), np.sqrt((error[~inside] ** 2).mean()))
    return {"one constant": Estimate(mean, spread), "two constants": Estimate(mean, two)}


def draw(path: Path, problem: Problem, estimates: dict[str, Estimate]) -> None:
    """A row for each estimate: reconstruction, error, standard deviation on one scale, and standardised errors."""
    import matplotlib.pyplot as plt
    from scipy.stats import norm

    figure, axes = plt.subplots(
        len(estimates), 4, figsize=(12, 3 * len(estimates)), layout="constrained", squeeze=False
    )
    grid = np.linspace(-5, 5, 101)
    for row, (name, estimate) in zip(axes, estimates.items(), strict=True):
        error = problem.truth - estimate.mean
        most = float(np.quantile(np.abs(error), 0.995))
        panels = {
            "reconstruction": estimate.mean,
            "absolute error": np.abs(error),
            "standard deviation": estimate.stddev,
        }
        for axis, (title, values) in zip(row, panels.items(), strict=False):
            limits = {"cmap": "gray", "vmin": 0, "vmax": 1} if title == "reconstruction" else {"vmin": 0, "vmax": most}
            figure.colorbar(axis.imshow(values, **limits), ax=axis, shrink=0.8)
            axis.set_title(f"{name}: {title}", fontsize=9)
            axis.axis("off")
        total = np.sqrt(estimate.stddev**2 + problem.pixel_noise)
        for region, where in problem.regions.items():
            standardised = (error / total)[where].clip(-5, 5)
            row[3].hist(standardised, grid[::4], density=True, histtype="step", label=region)
        row[3].plot(grid, norm.pdf(grid), "k:", label="standard normal")
        row[3].set_title(f"{name}: error / standard deviation", fontsize=9)
        row[3].legend(fontsize=7)
    figure.savefig(path, dpi=100)
    plt.close(figure)
