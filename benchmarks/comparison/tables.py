"""Tables of results in Markdown."""

from collections.abc import Iterable, Sequence

import numpy as np

from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.results import Results, compared, nan_mean, severe

__all__ = ["by_case", "by_method", "cost_table", "failures", "links_table", "number", "settings_table", "table"]

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
    "ours, g-prior",
    "ours, validation",
    "ours, trained with dropout, validation",
    "ours, scale by test oracle",
)


def number(value: float, digits: int = 3) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Empty without rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]) if lines else ""


def by_case(results: Results, shown: Sequence[str] = MAIN) -> str:
    """Test log-likelihoods, one row for each case."""
    methods = [method for method in shown if method in results.methods(results.cases)]
    rows = []
    for case in results.cases:
        seeds = len(results.values(case, "MAP", "log_likelihood"))
        scores = [number(results.mean(case, method)) for method in methods]
        temperature = number(results.temperature(case), 2) if results.likelihood(case) == "classification" else ""
        rows.append([case, str(seeds), temperature, *scores])
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
    """Seconds, passes over the data and products a prediction; means over the cases that a method ran on."""
    cases = compared(results, "classification")
    rows = []
    for method in results.methods(cases):
        lines = [line for line in results.lines if line["method"] == method and line["case"] in cases]
        lines = [line for line in lines if "error" not in line]
        means = [nan_mean([float(line[key]) for line in lines]) for key in ("seconds_fit", "passes_fit")]
        predict = nan_mean([line["seconds_predict"] for line in lines])
        products = nan_mean([float(line["products_predict"]) for line in lines])
        epochs = nan_mean([line["details"].get("epochs") or np.nan for line in lines])
        row = [number(means[0], 1), number(means[1], 0), number(epochs, 1), number(predict, 2), number(products, 0)]
        rows.append([method, str(len({line["case"] for line in lines})), *row])
    head = ["method", "cases", "fit, s", "fit, passes", "fit, epochs", "predict test set, s", "products an input"]
    return table(head, rows)


def failures(results: Results) -> str:
    cases_of: dict[tuple[str, str], list[str]] = {}
    for line in results.lines:
        if "error" in line:
            cases_of.setdefault((line["method"], line["error"]), []).append(line["case"])
    rows = [[method, f"`{error}`", "; ".join(dict.fromkeys(cases))] for (method, error), cases in cases_of.items()]
    return table(["method", "error", "where"], rows)
