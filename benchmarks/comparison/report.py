"""Tables and figures from files of results, on one page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison import cost, fidelity, figures, halves, run
from benchmarks.comparison.checks import checks
from benchmarks.comparison.lines import read
from benchmarks.comparison.results import Results
from benchmarks.comparison.tables import by_case, by_method, cost_table, failures, links_table, settings_table, table

__all__ = ["page", "write"]


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
    return table(["method", *heads], rows)


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
    return table(["C", "P", f"ours, {unit}", *methods], rows)


def page(
    results: Results, near: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]], images: Sequence[str]
) -> str:
    """The page in Markdown: the halves of real data, then the suites of data that come with libraries."""
    everything, results = results, others_than_halves(results)
    parts: list[tuple[str, str, Callable[[], str] | str]] = [
        *(part for suite in halves.TITLES for part in halves.sections(everything.of_suite(suite), suite)),
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
        (
            "Costs",
            "Means over the cases that a method ran on. The training of MAP is not counted.",
            lambda: cost_table(results),
        ),
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
        summary(everything),
    ]
    lines += [f"\n![{Path(image).stem.replace('_', ' ')}]({image})" for image in images]
    for title, text, body in parts:
        content = body if isinstance(body, str) else body()
        if content:
            lines += ["", f"## {title}", "", *([text, ""] if text else []), content]
    return "\n".join(lines) + "\n"


def others_than_halves(results: Results) -> Results:
    return Results([line for line in results.lines if line.get("suite") not in halves.TITLES])


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
    """The last line of each suite and key in all files."""
    found = {}
    for line in (line for file in files for line in read(file, key)):
        found[line.get("suite", "small"), *(line[name] for name in key)] = line
    return list(found.values())


def write(files: Sequence[Path], to: Path) -> None:
    """Writes the page, and its figures into `images` beside it. Later files replace results of earlier ones."""
    results = Results(merged(files, run.KEY))
    near, costs = merged(files, fidelity.KEY), merged(files, cost.KEY)
    images = figures.draw(results, near, to.parent / "images")
    to.write_text(page(results, near, costs, [f"images/{image.name}" for image in images]), encoding="utf-8")
