"""Tables and figures from files of results, on one page."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison import cost, fidelity, figures, run
from benchmarks.comparison.checks import checks
from benchmarks.comparison.lines import read
from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.results import Results, compared, nan_mean, severe

__all__ = ["page", "write"]

COLUMNS = {
    "classification": (
        ("brier", "Brier", 3), ("calibration_error", "calibration error", 3), ("accuracy", "accuracy", 3),
        ("error_auroc", "AUROC of errors", 3), ("ood_auroc", "AUROC of other data", 3), ("joint_3", "joint, κ = 3", 2),
        ("joint_5", "κ = 5", 2),
    ),
    "regression": (
        ("rmse", "RMSE", 3), ("crps", "CRPS", 3), ("coverage", "coverage of 90 %", 3),
        ("calibration_error", "interval error", 3), ("joint_3", "joint, κ = 3", 2), ("joint_5", "κ = 5", 2),
    ),
}  # fmt: skip
MAIN = (
    "MAP",
    "temperature scaling",
    "temperature by test oracle",
    "ours",
    "ours, not scaled",
    "ours, g-prior, B at the mode",
    "ours, isotropic, B at the mode",
    "ours, g-prior",
    "ours, validation",
    "ours, trained with dropout, validation",
    "ours, scale by test oracle",
)


def number(value: float, digits: int = 3) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def by_case(results: Results) -> str:
    """Test log-likelihoods, one row for each case."""
    methods = [method for method in MAIN if method in results.methods(results.cases)]
    rows = []
    for case in results.cases:
        seeds = len(results.values(case, "MAP", "log_likelihood"))
        scores = [number(results.mean(case, method)) for method in methods]
        rows.append([case, str(seeds), number(results.temperature(case), 2), *scores])
    return table(["task / network / training", "seeds", "best T", *methods], rows)


def by_method(results: Results, likelihood: str) -> str:
    """Means over the cases where methods are compared; log-likelihood as gain over MAP, mean, worst and under shift."""
    cases = compared(results, likelihood)
    if not cases:
        return ""
    columns = COLUMNS[likelihood]
    head = ["method", "sees", "cases", "gain", "worst gain", "gain under shift", *(name for _, name, _ in columns)]
    rows = []
    for method in results.methods(cases):
        gains = [results.gain(case, method, "log_likelihood") for case in cases]
        shifted = [
            results.gain(case, method, "log_likelihood", part)
            for case in cases
            for part in severe(results.shifts(case))
        ]
        if np.isnan(gains).all():
            continue
        scores = [number(nan_mean([results.mean(c, method, metric) for c in cases]), d) for metric, _, d in columns]
        count = str(np.isfinite(gains).sum())
        row = [number(nan_mean(gains)), number(float(np.nanmin(gains))), number(nan_mean(shifted))]
        rows.append([method, METHODS[method].sees or "–", count, *row, *scores])
    return table(head, rows)


def settings_table(results: Results) -> str:
    """Our settings: `log(NLL / NLL of MAP)`, the mean over classifications and the worst."""
    cases = [case for case in results.cases if results.likelihood(case) == "classification"]
    rows = []
    for method in [name for name in results.methods(cases) if METHODS[name].own or "temperature" in name]:
        ratios = {}
        for case in cases:
            mine, base = results.values(case, method, "log_likelihood"), results.values(case, "MAP", "log_likelihood")
            seeds = mine.keys() & base.keys()
            if seeds:
                ratios[case] = float(np.log(np.mean([mine[s] for s in seeds]) / np.mean([base[s] for s in seeds])))
        if not ratios:
            continue
        worst = max(ratios, key=ratios.__getitem__)
        below = sum(v < 0 for v in ratios.values())
        means = number(float(np.mean(list(ratios.values()))), 2)
        rows.append([method, str(len(ratios)), str(below), means, number(ratios[worst], 2), worst])
    return table(["method", "cases", "better than MAP", "mean", "worst", "where"], rows)


def links_table(results: Results) -> str:
    """Log-likelihood of one fit by several links, means over all classifications."""
    cases = [case for case in results.cases if results.likelihood(case) == "classification"]
    names = {"mc": "log_likelihood", "probit": "log_likelihood_probit", "bridge": "log_likelihood_bridge"}
    rows = []
    for method in ("ours", "ours, g-prior, B at the mode", "ours, isotropic, B at the mode"):
        scored = [c for c in cases if all(not np.isnan(results.mean(c, method, metric)) for metric in names.values())]
        if scored:
            means = [number(nan_mean([results.mean(c, method, metric) for c in scored])) for metric in names.values()]
            rows.append([method, str(len(scored)), *means])
    return table(["fit", "cases", *names], rows)


def cost_table(results: Results) -> str:
    """Seconds, passes over the data and products a prediction; means over the cases where methods are compared."""
    cases = compared(results, "classification")
    rows = []
    for method in results.methods(cases):
        lines = [line for line in results.lines if line["method"] == method and line["case"] in cases]
        lines = [line for line in lines if "error" not in line]
        means = [nan_mean([float(line[key]) for line in lines]) for key in ("seconds_fit", "passes_fit")]
        predict = nan_mean([line["seconds_predict"] for line in lines])
        products = nan_mean([float(line["products_predict"]) for line in lines])
        rows.append([method, number(means[0], 1), number(means[1], 0), number(predict, 2), number(products, 0)])
    return table(["method", "fit, s", "fit, passes", "predict test set, s", "products an input"], rows)


def failures(results: Results) -> str:
    cases_of: dict[tuple[str, str], list[str]] = {}
    for line in results.lines:
        if "error" in line:
            cases_of.setdefault((line["method"], line["error"]), []).append(line["case"])
    rows = [[method, f"`{error}`", "; ".join(dict.fromkeys(cases))] for (method, error), cases in cases_of.items()]
    return table(["method", "error", "where"], rows) if rows else ""


def fidelity_table(lines: Sequence[dict[str, Any]]) -> str:
    """One row for each method and one column for each size; means over seeds."""
    sizes = sorted({line["num_parameters"] for line in lines})
    rows = []
    for method in dict.fromkeys(line["method"] for line in lines):
        cells = []
        for metric in ("symmetrised_kl", "symmetrised_kl_predicted", "wasserstein"):
            for size in sizes:
                values = [v[metric] for v in lines if v["method"] == method and v["num_parameters"] == size]
                cells.append(f"{np.mean(values):.2g}" if values else "")
        rows.append([method, *cells])
    heads = [f"{name}, P = {size}" for name in ("KL", "KL as predicted", "W₂") for size in sizes]
    return table(["method", *heads], rows) if rows else ""


def ratios_table(lines: Sequence[dict[str, Any]], step: str) -> str:
    """For a step, our figure and the ratio of theirs to ours."""
    cells = {(v["outputs"], v["size"], v["method"]): v for v in lines}
    places = sorted({(outputs, size) for outputs, size, _ in cells})
    methods = [method for method in cost.METHODS if method != "ours"]
    key = "mebibytes" if step == "memory" else f"seconds_{step}"
    rows = []
    for place in places:
        our_value = cells.get((*place, "ours"), {}).get(key)
        row = [str(place[0]), f"{place[1]:.0e}", "–" if our_value is None else f"{our_value:.3g}"]
        for method in methods:
            line = cells.get((*place, method), {})
            if line.get(key) is not None and our_value and not (step == "memory" and "error" in line):
                row.append(f"{line[key] / our_value:.2g}")
            else:
                row.append(line.get("error", "")[:60])
        rows.append(row)
    unit = "MiB" if step == "memory" else "s"
    return table(["C", "P", f"ours, {unit}", *methods], rows) if rows else ""


def page(
    results: Results, near: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]], images: Sequence[str]
) -> str:
    """The page in Markdown."""
    parts: list[tuple[str, str, Callable[[], str] | str]] = [
        ("What holds", "", lambda: table(["claim", "figure", "holds"], checks(results, near, costs))),
        (
            "Log-likelihood on test data, by case",
            "Means over seeds. The best temperature for test data is above one where the network is overconfident.",
            lambda: by_case(results),
        ),
        (
            "All methods, classification",
            "Means over the cases where they are compared. Gains are in log-likelihood over MAP; the shift is "
            "corruption of severity 3 to 5, or more noise.",
            lambda: by_method(results, "classification"),
        ),
        ("All methods, regression", "As above; the shift is the gap.", lambda: by_method(results, "regression")),
        (
            "Settings",
            "`log(NLL / NLL of MAP)`, mean and largest over the cases where there is a result: below zero is better.",
            lambda: settings_table(results),
        ),
        ("Links", "", lambda: links_table(results)),
        ("Costs", "Means over the same cases. The training of MAP is not counted.", lambda: cost_table(results)),
        (
            "Distance to the exact posterior",
            "All methods have the isotropic prior at the precision of the exact evidence, and the curvature at the "
            "network. KL is the symmetrised divergence between probabilities: those of the Gaussians of the logits, "
            "and those predicted, which include the noise of the samples.",
            lambda: fidelity_table(near),
        ),
        *(
            (
                f"Cost against laplace-torch: {step}",
                "The figure of this library, and the ratio of theirs to ours.",
                ratios_table(costs, step),
            )
            for step in ("fit", "tune", "predict", "memory")
        ),
        ("What did not run", "", lambda: failures(results)),
    ]
    lines = [
        "# Results",
        "",
        "`python -m benchmarks report` writes this page; [Benchmarks](benchmarks.md) says how to run it.",
        summary(results),
    ]
    lines += [f"\n![{Path(image).stem.replace('_', ' ')}]({image})" for image in images]
    for title, text, body in parts:
        content = body if isinstance(body, str) else body()
        if content:
            lines += ["", f"## {title}", "", *([text, ""] if text else []), content]
    return "\n".join(lines) + "\n"


def summary(results: Results) -> str:
    """The number of results, and the versions of libraries."""
    seeds = len({line["seed"] for line in results.lines})
    minutes = sum(line.get("seconds", 0.0) for line in results.lines) / 60
    versions = sorted({f"{k} {v}" for line in results.lines for k, v in line.get("versions", {}).items()})
    return (
        f"{len(results.lines)} results, {len(results.cases)} pairs of a network and its training on a task, up to "
        f"{seeds} seed{'s' if seeds > 1 else ''}, {minutes:.0f} minutes one after another, on one thread each. "
        f"{', '.join(versions)}."
    )


def merged(files: Sequence[Path], key: Sequence[str]) -> list[dict[str, Any]]:
    """The last line of each key in all files."""
    return list({tuple(line[name] for name in key): line for file in files for line in read(file, key)}.values())


def write(files: Sequence[Path], to: Path) -> None:
    """Writes the page, and its figures into `images` beside it. Later files replace results of earlier ones."""
    results = Results(merged(files, run.KEY))
    near, costs = merged(files, fidelity.KEY), merged(files, cost.KEY)
    images = figures.draw(results, near, to.parent / "images")
    to.write_text(page(results, near, costs, [f"images/{image.name}" for image in images]), encoding="utf-8")
