"""Figures of the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.comparison.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


__all__ = ["draw"]

SHOWN = (
    "MAP", "temperature scaling", "ours", "ours, validation", "laplace-torch, last layer, KFAC", "MC dropout", "SNGP",
    "ensemble of 5",
)  # fmt: skip


def draw(results: Results, near: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draws the figures for which there are results."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    parts = ["test", *(f"severity {s}" for s in range(1, 6))]
    cases = [c for c in results.cases if results.shifts(c) and results.likelihood(c) == "classification"]
    # Lines are means over the same cases.
    run = set(results.methods(cases))
    methods = [m for m in SHOWN if m in run]
    cases = [c for c in cases if not any(np.isnan(results.mean(c, m, part="severity 1")) for m in methods)]
    if cases:
        figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
        for method in methods:
            ladder = [np.mean([results.mean(c, method, part=p) for c in cases]) for p in parts]
            joint = [np.mean([results.gain(c, method, f"joint_{k}") / k for c in cases]) for k in range(1, 6)]
            axes[0].plot(range(6), ladder, marker=".", label=method)
            axes[1].plot(range(1, 6), joint, marker=".", label=method)
        axes[0].set(xlabel="severity of corruption", ylabel="log-likelihood")
        axes[1].set(xlabel="κ", ylabel="joint log-likelihood over that of MAP, / κ", xticks=range(1, 6))
        figure.legend(*axes[1].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
        figure.savefig(folder / "results_shift.png", dpi=120)
        plt.close(figure)
        drawn.append(folder / "results_shift.png")
    if near:
        figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for axis, metric, name in zip(
            axes, ("symmetrised_kl", "wasserstein"), ("symmetrised divergence", "2-Wasserstein distance"), strict=True
        ):
            distances(axis, near, metric)
            axis.set(xlabel="weights", ylabel=name, xscale="log", yscale="log")
        axes[1].legend(fontsize="small")
        figure.savefig(folder / "results_fidelity.png", dpi=120)
        plt.close(figure)
        drawn.append(folder / "results_fidelity.png")
    return drawn


def distances(axis: "Axes", near: Sequence[dict[str, Any]], metric: str) -> None:
    sizes = sorted({line["num_parameters"] for line in near})
    for method in dict.fromkeys(line["method"] for line in near):
        values = [
            np.mean([v[metric] for v in near if v["method"] == method and v["num_parameters"] == size])
            for size in sizes
        ]
        axis.plot(sizes, values, marker=".", label=method)
