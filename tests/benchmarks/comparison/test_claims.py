"""Claims about the halves of real data, from results made up here."""

import math
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks.comparison import claims as module
from benchmarks.comparison import halves, lines
from benchmarks.comparison.results import Results


def line(case: str, method: str, value: float, **others: float) -> dict:
    """A result whose likelihood falls with the severity, and whose scores of other data are given."""
    scores = {"log_likelihood": value, "error_auroc_entropy": 0.8} | {f"joint_{k}": 10 * k * value for k in range(1, 6)}
    metrics = {"test": scores} | {f"severity {s}": {"log_likelihood": value * s} for s in range(1, 6)}
    return {
        "suite": "second",
        "case": case,
        "method": method,
        "seed": 0,
        "likelihood": "classification",
        "details": {},
        "metrics": metrics,
        "ood_auroc": {"MNIST": others} if others else {},
        "seconds_fit": 1.0,
        "seconds_predict": 1.0,
        "passes_fit": 1.0,
        "products_predict": 1.0,
    }


FASHION, OTHER = "Fashion-MNIST, all / MLP / decay, early", "CIFAR-10, all / MLP / decay, early"


@pytest.fixture
def results() -> Results:
    found = []
    for case, base in ((FASHION, -0.5), (OTHER, -0.8)):
        found += [
            line(case, "MAP", base, entropy=0.8),
            line(case, "temperature scaling", base + 0.02, entropy=0.85),
            line(case, "laplace-torch, last layer", base + 0.01, entropy=0.7, variance=0.9),
            line(case, "laplace-torch, last layer, validation", base + 0.5, entropy=0.7),
            line(case, "ensemble of 5", base + 0.1, entropy=0.99),
        ]
    found.append(line(FASHION, "laplace-torch, last layer, KFAC", -0.475, entropy=0.5))
    found += [
        line(FASHION, "ours", -0.48, entropy=0.86, variance=0.97),
        line(OTHER, "ours", -0.806, entropy=0.86, variance=0.89),
    ]
    found += [
        line(FASHION, "ours, validation", -0.47, entropy=0.9),
        line(OTHER, "ours, validation", -0.7805, entropy=0.9),
    ]
    return Results(found)


def found_in(results: Results) -> dict[str, tuple[str, str]]:
    return {claim: (figure, verdict) for claim, figure, verdict in module.claims(results)}


def starting(rows: dict[str, tuple[str, str]], start: str) -> tuple[str, str]:
    (found,) = [row for claim, row in rows.items() if claim.startswith(start)]
    return found


def test_ours_and_the_network(results: Results) -> None:
    figure, verdict = starting(found_in(results), "without validation data: log-likelihood not below that of MAP")
    assert figure == f"worst -0.0060, {OTHER}; mean +0.0070 over 2"
    assert verdict == "**no**"


def test_settings_without_validation_data(results: Results) -> None:
    rows = found_in(results)
    # the best mean is that of the one setting, which ran once: ahead by −0.005
    assert "(laplace-torch, last layer, KFAC)" in next(c for c in rows if "of the best mean" in c)
    assert starting(rows, "without validation data: better than laplace-torch's") == ("0% of 1, -0.0050", "**no**")
    # in each case: −0.48 against −0.475, and −0.806 against −0.79
    assert starting(rows, "without validation data: better than its best")[0] == "0% of 2, -0.0105"


def test_settings_are_chosen_on_the_cases_of_all() -> None:
    cases = [f"case {i}" for i in range(3)]
    found = [line(case, "ours", value) for case, value in zip(cases, (-0.5, -0.5, -0.5), strict=True)]
    # the first is the better one where both ran, and where the other did not, ours is far ahead of it
    found += [line(c, "laplace-torch, last layer", v) for c, v in zip(cases, (-0.48, -0.52, -3.0), strict=True)]
    found += [line(c, "laplace-torch, last layer, KFAC", v) for c, v in zip(cases, (-0.5, -0.6), strict=False)]
    rows = found_in(Results(found))
    assert "(laplace-torch, last layer)" in next(c for c in rows if "of the best mean" in c)


def test_validation_data(results: Results) -> None:
    rows = found_in(results)
    figure, verdict = starting(rows, "with validation data: log-likelihood not below")
    assert figure.startswith(f"worst -0.0005, {OTHER}")
    assert verdict == "yes"
    # gains of 0.01 and −0.0005, times the severities 3 to 5
    assert starting(rows, "with validation data, corruption") == (f"{0.0095 / 2 * 4:+.4f}", "**no**")


def test_other_data(results: Results) -> None:
    rows = found_in(results)
    # peers of one network have 0.9 by their best score, and the ensemble's 0.99 does not count
    assert starting(rows, "ours: AUROC against other data by variance") == ("50% of 2", "**no**")
    assert starting(rows, "ours: AUROC against other data by entropy") == ("0% of 2", "**no**")
    # of each pair the best: 0.97 and 0.89 against 0.9
    assert starting(rows, "ours: AUROC against other data by the best") == ("50% of 2", "**no**")
    assert starting(rows, "ours: Fashion-MNIST against MNIST by variance") == (
        "0.970, least 0.970, largest 0.970",
        "yes",
    )
    assert starting(rows, "ours: Fashion-MNIST against MNIST by entropy")[1] == "**no**"
    # 0.9 is not above the peers' 0.9
    assert starting(rows, "ours, validation: AUROC against other data by entropy") == ("0% of 2", "**no**")
    figure = "0.900, least 0.900, largest 0.900"
    assert starting(rows, "ours, validation: Fashion-MNIST against MNIST by entropy") == (figure, "**no**")
    assert not any("epistemic" in claim for claim in rows)


def test_joint_log_likelihoods(results: Results) -> None:
    rows = found_in(results)
    # κ = 3: 30 times −0.08 and −0.106
    assert starting(rows, "ours: joint log-likelihood, κ = 3") == (f"{30 * -0.093:+.3f}, above in 0% of 2", "**no**")


def test_no_results_no_claims() -> None:
    assert module.claims(Results([])) == []
    assert halves.sections(Results([]), "second") == []


def test_the_page_of_results_is_that_of_the_records(tmp_path: Path) -> None:
    command.main(["report", "--page", str(tmp_path / "results.md")])
    written = Path(command.__file__).parents[1] / "docs" / "results.md"
    assert (tmp_path / "results.md").read_text() == written.read_text()


def test_the_page_has_the_halves_on_top(results: Results, tmp_path: Path) -> None:
    out, small = tmp_path / "second.jsonl", tmp_path / "small.jsonl"
    for each in results.lines:
        lines.append(out, each)
    # the same case in another suite is another result
    lines.append(small, line(FASHION, "MAP", -9.0) | {"suite": "small"})
    command.main(["report", str(small), str(out), "--page", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    assert 0 < text.index("## Second half: what holds") < text.index("## Log-likelihood on test data, by case")
    assert f"| {FASHION} | 1 |  | -0.500 | -0.480 |" in text
    assert f"| {FASHION} | 1 |  | -9.000 |" in text
    assert "| ours | 2 | 0.970 V | 0.890 V |" in text
    assert "First half" not in text
    assert math.isnan(results.ood_auroc(OTHER, "ours", "letters", "variance"))
