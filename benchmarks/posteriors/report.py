"""Tables of results: a table for each part and set, and the ranks of networks."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.posteriors.published import PUBLISHED

Row = dict[str, Any]
KINDS = {"score": "evidence or ELBO", "loo": "leave-one-out"}
REFERENCE, LARGEST_R_HAT = "HMC (reference)", 1.05
COLUMNS = {
    "ll": "log-likelihood",
    "joint": "10 jointly",
    "rmse": "RMSE",
    "coverage": "coverage of 90 %",
    "gap_ll": "log-likelihood in the gap",
    "gap_coverage": "coverage in the gap",
    "width": "sd in the gap / outside",
    "sd": "sd / HMC",
    "sd_gap": "sd / HMC, gap",
    "mean": "mean off, HMC sd",
    "mean_gap": "mean off, gap",
    "score": KINDS["score"],
    "seconds": "seconds",
}


def values(row: Row, reference: Row | None) -> dict[str, float | None]:
    """The columns of a row; those of a method without error bars, or without a reference, are empty."""
    test, gap = row["test"], row.get("gap")
    found: dict[str, float | None] = {name: test[name] for name in ("ll", "joint", "rmse", "coverage")}
    stddev = float(np.mean(test["stddev"]))
    if gap is not None:
        found |= {"gap_ll": gap["ll"], "gap_coverage": gap["coverage"]}
        found["width"] = float(np.mean(gap["stddev"])) / stddev if stddev else None
    if reference is not None and row is not reference:
        for suffix, where in (("", "test"), ("_gap", "gap")):
            if where in row:
                mean, sd = (np.array(row[where][name]) for name in ("mean", "stddev"))
                true_mean, true_sd = (np.array(reference[where][name]) for name in ("mean", "stddev"))
                # The geometric mean of ratios: half and twice as wide are as bad.
                found[f"sd{suffix}"] = float(np.exp(np.log(sd / true_sd).mean())) if sd.all() else None
                found[f"mean{suffix}"] = float((np.abs(mean - true_mean) / true_sd).mean())
    return found | {"score": row["details"].get("score"), "seconds": row["seconds"]}


def cell(numbers: Sequence[float]) -> str:
    """The mean, with its standard error if there are several."""
    if not numbers:
        return ""
    error = f" ± {np.std(numbers, ddof=1) / len(numbers) ** 0.5:.2g}" if len(numbers) > 1 else ""
    return f"{np.mean(numbers):.3g}{error}"


def table(rows: Sequence[Row], part: str, name: str) -> list[str]:
    """Means over splits by method; a reference whose chains do not agree is marked."""
    references = {row["split"]: row for row in rows if row["contender"] == REFERENCE}
    methods: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        methods[row["contender"]].append(row)
    found = {method: [values(row, references.get(row["split"])) for row in group] for method, group in methods.items()}
    columns = [c for c in COLUMNS if any(v.get(c) is not None for group in found.values() for v in group)]
    lines = ["", f"{part}, {name}, {rows[0]['network']}", f"| | {' | '.join(COLUMNS[c] for c in columns)} |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for method, group in found.items():
        label = f"{method} ({len(group)})"
        if method == REFERENCE:
            r_hats = [row["details"].get(kind, 1.0) for row in methods[method] for kind in ("r_hat", "r_hat_gap")]
            # A chain that never moves has none.
            worst = max(math.inf if value is None else value for value in r_hats)
            if worst > LARGEST_R_HAT:
                label += f" **R̂ up to {worst:.2f}: chains disagree**"
        cells = [cell([number for v in group if (number := v.get(c)) is not None]) for c in columns]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    if part == "uci":
        for method, sets in PUBLISHED.items():
            if name in sets:
                quoted: dict[str, float | None] = {"ll": sets[name][0], "score": sets[name][1]}
                cells = [cell([v]) if (v := quoted.get(c)) is not None else "" for c in columns]
                lines.append(f"| *published: {method}* | {' | '.join(cells)} |")
    return lines


def ranks(rows: Sequence[Row], name: str) -> list[str]:
    """Spearman's correlation over networks, of a score of the training data with log-likelihoods of test data."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for split in sorted({row["split"] for row in rows}):
        methods: dict[str, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            if row["split"] == split:
                methods[row["contender"]][row["network"]] = row
        networks = sorted(set.intersection(*map(set, methods.values())))
        for method, of in methods.items():
            for kind in ("score", "loo"):
                scores = [of[network]["details"].get(kind) for network in networks]
                if len(networks) > 2 and None not in scores and "ours" in methods:
                    tests = [[by[network]["test"]["ll"] for network in networks] for by in (of, methods["ours"])]
                    found[f"{method}, {KINDS[kind]}"].append((rank(scores, tests[0]), rank(scores, tests[1])))
    lines = ["", f"ranking of networks, {name}", "| score | with its own test log-likelihood | with that of ours |"]
    lines.append("|---" * 3 + "|")
    for label, pairs in found.items():
        lines.append(f"| {label} ({len(pairs)}) | {' | '.join(map(cell, zip(*pairs, strict=True)))} |")
    return lines


def rank(a: Sequence[float], b: Sequence[float]) -> float:
    result: Any = spearmanr(a, b)
    return float(result.statistic)


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["key"]["part"], row["key"]["set"]].append({**row["key"], **row})
    lines = []
    for (part, name), group in groups.items():
        lines += ranks(group, name) if part == "ranking" else table(group, part, name)
    return "\n".join(lines)
