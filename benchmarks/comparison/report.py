"""Means of results as a CSV file, and from it a page with one table for each half and a figure."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison.methods import METHODS

Row = Mapping[str, Any]
SEVERE = ("severity 3", "severity 4", "severity 5", "gap")


def test(name: str) -> Callable[[Row], float | None]:
    return lambda line: line["metrics"]["test"].get(name)


def shifted(line: Row) -> float | None:
    """Log-likelihood under corruptions of severity 3 to 5, or in the gap of a regression."""
    values = [line["metrics"][part]["log_likelihood"] for part in SEVERE if part in line["metrics"]]
    return mean(values)


def others(line: Row) -> float | None:
    """How well other data are told by the method's own measure of what it does not know, or else by the entropy."""
    found = (line.get("ood_auroc") or {}).values()
    return mean([each.get("epistemic", each.get("entropy")) for each in found])


def epochs(line: Row) -> float | None:
    return line["epochs_fit"]


NUMBERS: dict[str, Callable[[Row], float | None]] = {
    "log_likelihood": test("log_likelihood"),
    "shifted": shifted,
    "accuracy": test("accuracy"),
    "rmse": test("rmse"),
    "calibration_error": test("calibration_error"),
    "error_auroc": test("error_auroc"),
    "other_auroc": others,
    "joint_5": test("joint_5"),
    "epochs_fit": epochs,
    "seconds_predict": lambda line: line["seconds_predict"],
}
FIELDS = ("suite", "case", "method", "seeds", *NUMBERS)


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def means(lines: Sequence[Row]) -> list[dict[str, Any]]:
    """One row for each suite, case and method: means over seeds. Results that are errors have no row."""
    cells: dict[tuple[str, str, str], list[Row]] = {}
    for line in lines:
        if "error" not in line and line["method"] in METHODS:
            cells.setdefault((line["suite"], line["case"], line["method"]), []).append(line)
    order = list(METHODS)
    cases = list(dict.fromkeys((suite, case) for suite, case, _ in cells))
    rows = []
    for suite, case, method in sorted(cells, key=lambda key: (cases.index(key[:2]), order.index(key[2]))):
        found = cells[suite, case, method]
        numbers = {name: mean(number(line) for line in found) for name, number in NUMBERS.items()}
        rows.append({"suite": suite, "case": case, "method": method, "seeds": len(found)} | numbers)
    return rows


def write_means(rows: Iterable[Row], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        above: Row = {"suite": None, "case": None}
        for row in rows:
            shown = dict(row) | {name: "" for name in ("suite", "case") if row[name] == above[name]}
            writer.writerow([f"{v:.4g}" if isinstance(v, float) else v for v in (shown[name] for name in FIELDS)])
            above = row


def read_means(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; an empty suite or case is that of the row above."""
    rows: list[dict[str, Any]] = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            head = {name: row[name] or rows[-1][name] for name in ("suite", "case")}
            numbers = {name: float(row[name]) if row[name] else None for name in NUMBERS}
            rows.append(row | head | numbers)
    return rows


def difference(rows: Sequence[Row], method: str, name: str) -> list[float]:
    """A number minus that of the network alone, by case."""
    alone = {row["case"]: row[name] for row in rows if row["method"] == "MAP"}
    mine = {row["case"]: row[name] for row in rows if row["method"] == method}
    return [mine[c] - alone[c] for c in mine if mine[c] is not None and alone.get(c) is not None]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def text(value: float | None, digits: int = 3, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.{digits}f}"


def by_method(rows: Sequence[Row]) -> str:
    """Gains over the network alone, means over the cases that a method ran on."""
    columns = {"calibration_error": 3, "error_auroc": 3, "other_auroc": 3, "joint_5": 1, "epochs_fit": 1}
    columns = {name: digits for name, digits in columns.items() if any(row[name] is not None for row in rows)}
    head = ["method", "sees", "cases", "gain", "worst", "gain, shifted", *columns, "prediction"]
    body = []
    for method in dict.fromkeys(
        row["method"] for row in sorted(rows, key=lambda row: list(METHODS).index(row["method"]))
    ):
        found = [row for row in rows if row["method"] == method]
        gains, moved = difference(rows, method, "log_likelihood"), difference(rows, method, "shifted")
        alone = {row["case"]: row["seconds_predict"] for row in rows if row["method"] == "MAP"}
        times = mean(row["seconds_predict"] for row in found), mean(alone[row["case"]] for row in found)
        slower = times[0] / times[1] if times[0] and times[1] else None
        cells = [text(mean(gains), 3, "+"), text(min(gains), 3, "+"), text(mean(moved), 2, "+")]
        cells += [text(mean(row[name] for row in found), digits) for name, digits in columns.items()]
        body.append([method, METHODS[method].sees or "–", str(len(found)), *cells, f"{text(slower, 0)}×"])
    names = {
        "calibration_error": "calibration error", "error_auroc": "AUROC of errors",
        "other_auroc": "AUROC of other data",        "joint_5": "joint, κ = 5", "epochs_fit": "epochs of the fit",
    }  # fmt: skip
    return table([names.get(name, name) for name in head], body)


INTRODUCTION = """# Results

`python -m benchmarks.comparison report` draws this page from `benchmarks/records/means.csv`, which has the results case
by case: {cases} networks and each method that ran on them, means over seeds; [Benchmarks](benchmarks.md) says how to
repeat them. The page shows the half on which no choice was made, Fashion-MNIST, CIFAR-10 and large regressions. Three
choices were first looked at on its data, though: that the evidence decides for Kronecker factors of regressions, the
price at which validation data widen error bars, and the formula of `epistemic`.

![Gain in log-likelihood under corruption against the cost of the fit](images/results.png)

A gain is a difference in mean log-likelihood to the network alone, in nats; *worst* is the smallest gain of any case,
*shifted* is under corruptions of severity 3 to 5, or in the gap of a regression. Other data are images or numbers that
belong to no class; *prediction* is the time of a prediction by that of the network. Methods that are slow ran on fewer,
smaller networks, so compare rows of as many cases.
"""


def page(rows: Sequence[Row]) -> str:
    """The half that is reported, or all rows of a file that has another suite."""
    cases = len({row["case"] for row in rows})
    rows = [row for row in rows if row["suite"] == "second"] or rows
    parts = [INTRODUCTION.format(cases=cases)]
    for kind, score in (("Classification", "accuracy"), ("Regression", "rmse")):
        chosen = [row for row in rows if row[score] is not None]
        if chosen:
            parts.append(f"## {kind}\n\n{by_method(chosen)}\n")
    return "\n".join(parts)


def draw(rows: Sequence[Row], path: Path) -> None:
    """The gain under corruption against the cost of the fit, means over the classifications of the second half."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["suite"] == "second" and row["accuracy"] is not None]
    shown = (
        "temperature scaling", "ours", "ours, validation", "ours, last layer", "ours, last layer, validation",
        "ours, KFAC", "laplace-torch, last layer, KFAC", "laplace-torch, last layer, KFAC, validation", "MC dropout",
        "SNGP", "ensemble of 5",
    )  # fmt: skip
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for method in shown:
        found = [row for row in rows if row["method"] == method]
        gain, cost = mean(difference(rows, method, "shifted")), mean(row["epochs_fit"] for row in found)
        if gain is not None and cost is not None:
            axes.plot(cost, gain, "o" if method.startswith("ours") else "s")
            axes.annotate(method, (cost, gain), (5, 4), textcoords="offset points", fontsize="small")
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set(xlabel="cost of the fit, epochs of training", ylabel="gain in log-likelihood under corruption, nats")
    axes.margins(x=0.35)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
