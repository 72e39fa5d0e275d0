"""What the library should achieve against its peers, as numbers computed from results."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.comparison.results import Results

__all__ = ["checks"]

OVERCONFIDENT, SLACK = 1.2, 0.005
WITH_VALIDATION, OF_DROPOUT = "ours, validation", "ours, trained with dropout, validation"


def checks(
    results: Results, near: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]]
) -> list[tuple[str, str, str]]:
    """Rows of a table: a claim, its figure, and whether it holds."""
    return [*defaults(results), *with_validation(results), *fidelity(near), *prediction_cost(costs)]


def verdict(holds: bool) -> str:
    return "yes" if holds else "**no**"


def defaults(results: Results) -> list[tuple[str, str, str]]:
    rows = []
    gains = {case: results.gain(case, "ours", "log_likelihood") for case in results.cases}
    gains = {case: gain for case, gain in gains.items() if not np.isnan(gain)}
    if gains:
        worst = min(gains, key=gains.__getitem__)
        claim = f"defaults: log-likelihood not below MAP's minus {SLACK} on any task"
        rows.append((claim, f"worst {gains[worst]:+.3f}, {worst}", verdict(gains[worst] >= -SLACK)))
        sure = [g for case, g in gains.items() if results.temperature(case) > OVERCONFIDENT]
        if sure:
            share = float(np.mean([g > 0 for g in sure]))
            claim = f"defaults: above MAP on 80 % of the overconfident networks (best T > {OVERCONFIDENT})"
            rows.append((claim, f"{share:.0%} of {len(sure)}", verdict(share >= 0.8)))
    ratios = []
    for case in results.cases:
        ours, best = (results.mean(case, name) for name in ("ours", "ours, precision by test oracle"))
        if results.likelihood(case) == "classification" and not np.isnan(ours + best):
            ratios.append(ours / best - 1)
    if ratios:
        mean = float(np.mean(ratios))
        claim = "defaults: within 6 % of the negative log-likelihood of the best prior precision, on average"
        rows.append((claim, f"{mean:.1%} over {len(ratios)} cases", verdict(mean <= 0.06)))
    return rows


def with_validation(results: Results) -> list[tuple[str, str, str]]:
    cases = [case for case in results.cases if results.likelihood(case) == "classification"]

    def lead(
        over: str, metric: str = "log_likelihood", parts: Sequence[str] = ("test",), own: str = WITH_VALIDATION
    ) -> tuple[float, int]:
        gains = [results.gain(case, own, metric, part, over) for case in cases for part in parts]
        gains = [value for value in gains if not np.isnan(value)]
        return (float(np.mean(gains)) if gains else np.nan, len(gains))

    rows = []
    peers = ["temperature scaling", "MC dropout"]
    library = [name for name in results.methods(cases) if name.startswith("laplace-torch")]
    if library:
        peers.append(max(library, key=lambda name: -lead(name)[0]))
    severe = [f"severity {s}" for s in (3, 4, 5)]
    kinds = [("corruption of severity 3 to 5", "log_likelihood", severe)]
    kinds += [(f"joint log-likelihood, κ = {kappa}", f"joint_{kappa}", ["test"]) for kappa in (3, 4, 5)]
    compared = [("test data", "temperature scaling", lead("temperature scaling"), 0.0)]
    compared += [(name, peer, lead(peer, metric, parts), 1e-12) for name, metric, parts in kinds for peer in peers]
    same = "MC dropout, of the network that it trained"
    compared += [(name, same, lead("MC dropout", metric, parts, OF_DROPOUT), 1e-12) for name, metric, parts in kinds]
    for name, peer, (value, count), least in compared:
        if count:
            rows.append((f"with validation, {name}: against {peer}", f"{value:+.3f}", verdict(value >= least)))
    return rows


def fidelity(near: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    rows = []
    for size in sorted({line["num_parameters"] for line in near}):
        for metric in ("symmetrised_kl", "symmetrised_kl_predicted", "wasserstein"):
            means: dict[str, float] = {}
            for method in dict.fromkeys(line["method"] for line in near):
                values = [v[metric] for v in near if v["method"] == method and v["num_parameters"] == size]
                if values:
                    means[method] = float(np.mean(values))
            others = {m: v for m, v in means.items() if not m.startswith("ours")}
            if "ours, 64 samples" in means and others:
                best = min(others, key=others.__getitem__)
                ours = means["ours, 64 samples"]
                claim = f"64 samples nearest to exact, {metric.replace('_', ' ')}, P = {size}"
                rows.append((claim, f"{ours:.2g}; {best} {others[best]:.2g}", verdict(ours < others[best])))
    return rows


def prediction_cost(costs: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    cells = {(v["outputs"], v["size"], v["method"]): v.get("seconds_predict") for v in costs}
    rows = []
    for outputs, least in ((10, 10.0), (100, 50.0)):
        ratios = []
        for (c, size, method), seconds in cells.items():
            own = cells.get((c, size, "ours"))
            if c == outputs and method == "KFAC" and seconds and own:
                ratios.append(seconds / own)
        if ratios:
            claim = f"prediction, C = {outputs}: {least:g} times faster than all-weights KFAC"
            figure = f"{min(ratios):.2g} to {max(ratios):.2g} times"
            rows.append((claim, figure, verdict(min(ratios) >= least)))
    return rows
