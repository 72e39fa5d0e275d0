"""Means of results as a CSV file, and from it one page: who wins where in words, a table and a figure."""

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


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The rows of both, new ones in the place of old ones of the same case and method.

    Networks that are trained again differ from those of before by the order of sums, so a new run has its own network
    alone, and the cheap methods with it. Times of old rows are taken relative to that of the network alone.
    """
    rows = {_key(row): dict(row) for row in old}
    for row in new:
        there = rows.get(_key(row))
        if row["method"] == "MAP" and there and there["seconds_predict"] and row["seconds_predict"]:
            slower = row["seconds_predict"] / there["seconds_predict"]
            for kept in rows.values():
                if _key(kept)[:2] == _key(row)[:2] and kept["seconds_predict"]:
                    kept["seconds_predict"] *= slower
    rows |= {_key(row): dict(row) for row in new}
    cases, order = list(dict.fromkeys(key[:2] for key in rows)), list(METHODS)
    return [rows[key] for key in sorted(rows, key=lambda key: (cases.index(key[:2]), order.index(key[2])))]


def _key(row: Row) -> tuple[str, str, str]:
    return row["suite"], row["case"], row["method"]


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


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def text(value: float | None, digits: int = 3, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.{digits}f}"


def values(rows: Sequence[Row], method: str, number: str) -> dict[str, float]:
    """A number by case; log-likelihoods as gains over the network alone."""
    found = {row["case"]: row[number] for row in rows if row["method"] == method and row[number] is not None}
    if number not in GAINS:
        return found
    alone = {row["case"]: row[number] for row in rows if row["method"] == "MAP"}
    return {case: value - alone[case] for case, value in found.items() if alone.get(case) is not None}


def methods_of(rows: Sequence[Row], fewest: int = 1) -> list[str]:
    """The methods that ran on so many cases, in the order of `METHODS`."""
    return [name for name in METHODS if sum(row["method"] == name for row in rows) >= fewest]


def by_method(rows: Sequence[Row]) -> str:
    """One row for each method: means over the classifications that it ran on, and its gain on regressions."""
    classes, numbers = ([row for row in rows if row[score] is not None] for score in ("accuracy", "rmse"))
    columns = [name for name in COLUMNS if any(row[name] is not None for row in classes)]
    head = ["method", "sees", "networks", "gain", "worst", *(COLUMNS[name][0] for name in columns), "prediction"]
    body = []
    for method in methods_of(rows):
        found = [row for row in classes if row["method"] == method]
        gains = values(classes, method, "log_likelihood").values()
        alone = {row["case"]: row["seconds_predict"] for row in classes if row["method"] == "MAP"}
        times = mean(row["seconds_predict"] for row in found), mean(alone[row["case"]] for row in found)
        slower = f"{times[0] / times[1]:.0f}×" if times[0] and times[1] else ""
        cells = [text(mean(gains), 3, "+"), text(min(gains, default=None), 3, "+")]
        cells += [text(mean(values(classes, method, name).values()), *COLUMNS[name][1:]) for name in columns]
        regressions = text(mean(values(numbers, method, "log_likelihood").values()), 3, "+")
        body.append([method, METHODS[method].sees or "–", str(len(found)), *cells, slower, regressions])
    return table([*head, "gain, regressions"], body)


# Log-likelihoods, whose differences to the network alone are shown.
GAINS = ("log_likelihood", "shifted")
COLUMNS = {
    "shifted": ("gain, shifted", 2, "+"),
    "calibration_error": ("calibration error", 3),
    "error_auroc": ("AUROC of errors", 3),
    "other_auroc": ("AUROC of other data", 3),
    "joint_5": ("joint, κ = 5", 1),
    "epochs_fit": ("epochs of the fit", 1),
}
# What is compared in words: of which tasks, its name, its unit, and how many digits it has.
QUESTIONS = (
    ("accuracy", "log_likelihood", "Classifications, test data", "nats", 3),
    ("accuracy", "shifted", "Classifications under corruption", "nats", 2),
    ("accuracy", "error_auroc", "Which predictions are wrong, AUROC", "", 3),
    ("accuracy", "other_auroc", "Which inputs are of no class, AUROC", "", 3),
    ("accuracy", "joint_5", "Five labels jointly", "nats", 1),
    ("rmse", "log_likelihood", "Regressions, test data", "nats", 3),
)


def verdicts(rows: Sequence[Row]) -> str:
    """Who wins where: for each question the best setting of this library, and what is better on the same networks."""
    lines = []
    for kind, number, name, unit, digits in QUESTIONS:
        chosen = [row for row in rows if row[kind] is not None]
        for seen, of in (("",), "without validation data"), (("", "validation"), "with validation data"):
            found = {
                method: of_method
                for method in methods_of(chosen)
                if METHODS[method].sees in seen and (of_method := values(chosen, method, number))
            }
            own = [method for method in found if method.startswith("ours")]
            if own:
                lines.append(f"- {name}, {of}: {_verdict(found, own, unit, digits)}")
    return "\n".join(lines)


def in_short(rows: Sequence[Row]) -> str:
    """What a temperature, the last layer and all weights give with validation data, and what each takes."""
    rows = [row for row in rows if row["accuracy"] is not None]
    times = {row["case"]: row["seconds_predict"] for row in rows if row["method"] == "MAP"}
    sentences = []
    for method, name in (
        ("temperature scaling", "A temperature"),
        ("ours, last layer, validation", "The last layer with error bars"),
        ("ours, validation", "The network with error bars of all weights"),
        ("ensemble of 5", "An ensemble of five, which needs no validation data,"),
    ):
        gain, shifted, other = (
            mean(values(rows, method, n).values()) for n in ("log_likelihood", "shifted", "other_auroc")
        )
        cost, time = (
            mean(row[n] for row in rows if row["method"] == method) for n in ("epochs_fit", "seconds_predict")
        )
        alone = mean(times[row["case"]] for row in rows if row["method"] == method)
        if gain is not None and time is not None and alone:
            sentences.append(
                f"{name} gives {gain:+.3f} nats on test data and {text(shifted, 2, '+')} under corruption, and tells "
                f"other data by an AUROC of {text(other, 3)}, for {text(cost, 1)} epochs and {time / alone:.0f} times "
                "the prediction."
            )
    return " ".join(sentences)


def _verdict(found: Mapping[str, Mapping[str, float]], own: Sequence[str], unit: str, digits: int) -> str:
    # Own settings that ran everywhere, and rivals that ran on a quarter of the networks: a few are no answer.
    most = max(len(found[method]) for method in own)
    best = max(
        (method for method in own if len(found[method]) == most), key=lambda m: mean(found[m].values()) or -np.inf
    )
    better = []
    for rival in found:
        common = [case for case in found[rival] if case in found[best]]
        ahead = mean(found[rival][case] - found[best][case] for case in common)
        if rival not in own and 4 * len(common) >= most and ahead is not None and round(ahead, digits) > 0:
            better.append((ahead, f"{rival} (by {ahead:.{digits}f}{unit and f' {unit}'} on {len(common)})"))
    value = text(mean(found[best].values()), digits, "+" if unit == "nats" and digits > 1 else "")
    rivals = ", ".join(words for _, words in sorted(better, reverse=True))
    return f"*{best}* has {value}. " + (f"**Better are** {rivals}." if rivals else "Nothing is better.")


INTRODUCTION = """# Results

What error bars cost and what they give: {cases} networks that no choice of this library was made on, of Fashion-MNIST,
CIFAR-10 and large regressions, and each method that ran on them. `python -m benchmarks.comparison report` draws this
page from `benchmarks/records/means.csv`, case by case and means over seeds; [Benchmarks](benchmarks.md) says how to
repeat them. Three choices were first looked at on these data, though: that the evidence decides for Kronecker factors
of regressions, the price at which validation data widen error bars, and the formula of `epistemic`.

![Gains in log-likelihood against the cost of the fit](images/results.png)

## Who wins where

{short}

Each line has the best setting of this library, and what is better than it, as a mean difference over the networks that
both ran on. Gains are differences in mean log-likelihood to the network alone.

{verdicts}

## All methods

A *gain* is in nats; *worst* is the smallest of any network, *shifted* is under corruptions of severity 3 to 5. Other
data are images that belong to no class; *joint* is the log-likelihood of five labels together; *prediction* is the time
of a prediction by that of the network. Slow methods ran on fewer, smaller networks, so compare rows of as many.
*Ours, novelty* and the six rows from *nearest neighbours* on are scores of an input: only the AUROC of other data, the
epochs and the time are theirs. MC dropout, SNGP, ensembles and inducing points train models of their own, and their
rows are older: networks alone of then and of now differ by some thousandths of a nat.

{table}
"""


def page(rows: Sequence[Row]) -> str:
    """The half that is reported, or all rows of a file that has another suite."""
    rows = [row for row in rows if row["suite"] == "second"] or rows
    cases = len({row["case"] for row in rows})
    return INTRODUCTION.format(cases=cases, short=in_short(rows), verdicts=verdicts(rows), table=by_method(rows))


SHOWN = (
    "temperature scaling", "ours", "ours, validation", "ours, last layer", "ours, last layer, validation", "ours, KFAC",
    "laplace-torch, last layer, KFAC", "laplace-torch, last layer, KFAC, validation", "GAPA", "projected features",
    "projected features, validation", "MC dropout", "SNGP", "ensemble of 5",
)  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Gains on test data and under corruption against the cost of the fit, means over classifications."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["suite"] == "second" and row["accuracy"] is not None]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharex=True)
    for axes, number, name in zip(panels, GAINS, ("on test data", "under corruption"), strict=True):
        for place, method in enumerate(SHOWN):
            cost = mean(row["epochs_fit"] for row in rows if row["method"] == method)
            gain = mean(values(rows, method, number).values())
            if gain is not None and cost is not None:
                kind = "o" if method.startswith("ours") else "s"
                axes.plot(cost, gain, kind, color=f"C{place % 10}", label=method, mfc="none" if place > 9 else None)
        axes.set_xscale("symlog", linthresh=0.1)
        axes.axhline(0, color="grey", linewidth=0.5)
        axes.set(xlabel="cost of the fit, epochs of training", ylabel=f"gain in log-likelihood {name}, nats")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
