"""Sections of the report about a half of the tasks on real data."""

from collections.abc import Callable

import numpy as np

from benchmarks.comparison.claims import SCORES, claims
from benchmarks.comparison.results import Results, nan_mean
from benchmarks.comparison.tables import by_case, by_method, cost_table, failures, number, settings_table, table

__all__ = ["sections"]

TITLES = {"second": "Second half", "first": "First half"}
TEXTS = {
    "second": "Fashion-MNIST, CIFAR-10 and large regressions. Choices were made on the other half, but for these: that "
    "the evidence of the network itself decides for Kronecker factors of regressions, and the price at which held-out "
    "data take wider error bars, were first looked at on data of this half; the formula of `epistemic` was chosen on "
    "networks for MNIST and Fashion-MNIST, and the numbers of self-consistency, which decides on none of these "
    "networks, on Fashion-MNIST.",
    "first": "Digits, MNIST and small regressions, on which choices were made.",
}
SHOWN = (
    "MAP", "temperature scaling", "ours", "ours, validation", "ours, last layer", "ours, last layer, validation",
    "ours, KFAC", "laplace-torch, last layer, KFAC", "laplace-torch, last layer, KFAC, validation", "MC dropout",
    "SNGP", "ensemble of 5", "ensemble of 5, a fifth of the steps",
)  # fmt: skip


def sections(results: Results, suite: str) -> list[tuple[str, str, Callable[[], str]]]:
    """Titles, sentences and tables, for a suite that has results."""
    if not results.cases:
        return []
    title = TITLES[suite]
    return [
        (f"{title}: what holds", TEXTS[suite], lambda: table(["claim", "figure", "holds"], claims(results))),
        (
            f"{title}: log-likelihood on test data, by case",
            "Means over seeds. The best temperature for test data is above one where the network is overconfident; "
            "regressions have none.",
            lambda: by_case(results, SHOWN),
        ),
        (
            f"{title}: all methods, classification",
            "Means over the cases that a method ran on: compare methods of the same number. Gains are "
            "in log-likelihood over MAP in the same cases; the shift is corruption of severity 3 to 5.",
            lambda: by_method(results, "classification"),
        ),
        (
            f"{title}: all methods, regression",
            "As above; the shift is the gap.",
            lambda: by_method(results, "regression"),
        ),
        (
            f"{title}: other data",
            "AUROC of other data against test data, by the score of largest mean: entropy (E), mutual information (I), "
            "variance of the logits (V), the method's own (O). Means over the networks that a method ran on: compare "
            "methods of the same number. The last column has errors.",
            lambda: other_data_table(results),
        ),
        (
            f"{title}: settings",
            "`log(NLL / NLL of MAP)`, mean and largest over the cases where there is a result: below zero is better.",
            lambda: settings_table(results),
        ),
        (
            f"{title}: costs",
            "Means over the classifications that a method ran on: compare methods of the same number. The training of "
            "MAP is not counted.",
            lambda: cost_table(results),
        ),
        (f"{title}: what did not run", "", lambda: failures(results)),
    ]


def other_data_table(results: Results) -> str:
    """A row for each method, a column for each pair of a set and other data, and one for errors."""
    cases = [case for case in results.cases if results.others(case)]
    columns: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for other in results.others(case):
            columns.setdefault((case.partition(",")[0], other), []).append(case)
    rows = []
    for method in results.methods(cases):
        row = [method, str(sum(not np.isnan(results.mean(case, method)) for case in cases))]
        for (_, other), of in columns.items():
            row.append(best(lambda s, m=method, o=other, c=of: nan_mean([results.ood_auroc(x, m, o, s) for x in c])))
        row.append(best(lambda s, m=method: nan_mean([results.mean(c, m, f"error_auroc_{s}") for c in cases])))
        rows.append(row)
    heads = [f"{inside} / {other}" for inside, other in columns]
    return table(["method", "networks", *heads, "errors"], rows)


def best(value: Callable[[str], float]) -> str:
    """The largest value of all scores, and the letter of the score."""
    letters: dict[str, str] = dict(zip(SCORES, "EIVO", strict=True))
    found = {score: value(score) for score in SCORES}
    found = {score: v for score, v in found.items() if not np.isnan(v)}
    if not found:
        return ""
    score = max(found, key=lambda name: found[name])
    return f"{number(found[score])} {letters[score]}"
