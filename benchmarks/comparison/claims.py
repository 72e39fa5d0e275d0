"""What the library should achieve on the halves of real data, as numbers computed from results."""

from collections.abc import Sequence

import numpy as np

from benchmarks.comparison.results import Results, nan_mean, severe

__all__ = ["claims"]

SLACK, VALIDATED_SLACK, SHIFT_LEAD, SHARE, FASHION = 0.005, 0.002, 0.02, 0.8, 0.96
OWN, VALIDATED = "ours", "ours, validation"
SCORES = ("entropy", "mutual_information", "variance", "epistemic")
FITS_AND_SCORES = tuple((own, score) for own in (OWN, VALIDATED) for score in SCORES)

Row = tuple[str, str, str]


def claims(results: Results) -> list[Row]:
    """Rows of a table: a claim, its figure, and whether it holds. A claim without results has no row."""
    return [
        *never_below(results, OWN, "MAP", SLACK, "without validation data"),
        *untuned(results),
        *never_below(results, VALIDATED, "temperature scaling", VALIDATED_SLACK, "with validation data", ALL[:1]),
        *under_shift(results),
        *other_data(results),
        *fashion(results),
        *joint(results),
    ]


ALL = ("classification", "regression")


def verdict(holds: bool) -> str:
    return "yes" if holds else "**no**"


def gains(results: Results, own: str, over: str, metric: str = "log_likelihood", kinds: Sequence[str] = ALL) -> dict:
    """By case, where there are results of both."""
    found = {c: results.gain(c, own, metric, over=over) for c in results.cases if results.likelihood(c) in kinds}
    return {case: gain for case, gain in found.items() if not np.isnan(gain)}


def never_below(
    results: Results, own: str, over: str, slack: float, name: str, kinds: Sequence[str] = ALL
) -> list[Row]:
    found = gains(results, own, over, kinds=kinds)
    if not found:
        return []
    worst = min(found, key=found.__getitem__)
    claim = f"{name}: log-likelihood not below that of {over} minus {slack} on any task"
    figure = f"worst {found[worst]:+.4f}, {worst}; mean {np.mean(list(found.values())):+.4f} over {len(found)}"
    return [(claim, figure, verdict(found[worst] >= -slack))]


def untuned(results: Results) -> list[Row]:
    """Against laplace-torch without validation data: its best setting in each case, and that of the best mean."""
    names = [
        name
        for name in results.methods(results.cases)
        if name.startswith("laplace-torch") and not name.endswith(", validation")
    ]
    leads = {name: gains(results, OWN, name) for name in names}
    leads = {name: found for name, found in leads.items() if found}
    if not leads:
        return []
    each = {c: min(found[c] for found in leads.values() if c in found) for c in set().union(*leads.values())}
    # Settings are compared where all of them ran, since some run on small tasks only.
    common = set.intersection(*map(set, leads.values()))
    one = min(leads, key=lambda name: float(np.mean([v for c, v in leads[name].items() if not common or c in common])))
    rows = []
    for name, found in (
        (f"laplace-torch's setting of the best mean ({one})", leads[one]),
        ("its best in each case", each),
    ):
        share, mean = float(np.mean([v > 0 for v in found.values()])), float(np.mean(list(found.values())))
        claim = f"without validation data: better than {name} on {SHARE:.0%} of the tasks, and on average"
        rows.append((claim, f"{share:.0%} of {len(found)}, {mean:+.4f}", verdict(share >= SHARE and mean > 0)))
    return rows


def under_shift(results: Results) -> list[Row]:
    over = "temperature scaling"
    found = [
        results.gain(case, VALIDATED, "log_likelihood", part, over)
        for case in results.cases
        if results.likelihood(case) == "classification"
        for part in severe(results.shifts(case))
    ]
    mean = nan_mean(found)
    if np.isnan(mean):
        return []
    claim = f"with validation data, corruption of severity 3 to 5: above {over} by {SHIFT_LEAD} on average"
    return [(claim, f"{mean:+.4f}", verdict(mean >= SHIFT_LEAD))]


def peers_of(results: Results) -> list[str]:
    """Methods of others around a single network, which see no test data."""
    several = ("ensemble", "temperature by test oracle")
    return [n for n in results.methods(results.cases) if not n.startswith((*several, "ours"))]


def pairs(results: Results) -> list[tuple[str, str]]:
    """Cases and other data."""
    return [(case, other) for case in results.cases for other in results.others(case)]


def best_score(results: Results, case: str, other: str, method: str) -> float:
    """The largest area under the curve of any of the scores of a method."""
    found = [results.ood_auroc(case, method, other, score) for score in SCORES]
    return max((v for v in found if not np.isnan(v)), default=float("nan"))


def other_data(results: Results) -> list[Row]:
    """A row for each score of ours, and one for its best in each pair; peers have their best one in each pair."""
    rows = []
    for own, score in (*FITS_AND_SCORES, (OWN, None), (VALIDATED, None)):
        ahead = []
        for case, other in pairs(results):
            mine = (
                best_score(results, case, other, own) if score is None else results.ood_auroc(case, own, other, score)
            )
            found = [best_score(results, case, other, name) for name in peers_of(results)]
            best = max((v for v in found if not np.isnan(v)), default=float("nan"))
            if not np.isnan(mine + best):
                ahead.append(mine > best)
        if ahead:
            share = float(np.mean(ahead))
            by = "the best of its scores, too," if score is None else score.replace("_", " ")
            claim = f"{own}: AUROC against other data by {by} above all peers of one network, "
            claim += f"by the best of their scores, on {SHARE:.0%} of the pairs"
            rows.append((claim, f"{share:.0%} of {len(ahead)}", verdict(share >= SHARE)))
    return rows


def fashion(results: Results) -> list[Row]:
    rows = []
    for own, score in FITS_AND_SCORES:
        found = [
            results.ood_auroc(case, own, other, score)
            for case, other in pairs(results)
            if case.startswith("Fashion-MNIST") and other == "MNIST"
        ]
        found = [v for v in found if not np.isnan(v)]
        if found:
            claim = f"{own}: Fashion-MNIST against MNIST by {score.replace('_', ' ')}: "
            claim += f"AUROC of at least {FASHION} on average"
            figure = f"{np.mean(found):.3f}, least {min(found):.3f}, largest {max(found):.3f}"
            rows.append((claim, figure, verdict(float(np.mean(found)) >= FASHION)))
    return rows


def joint(results: Results) -> list[Row]:
    rows = []
    for own in (OWN, VALIDATED):
        for kappa in (3, 4, 5):
            found = gains(results, own, "ensemble of 5", f"joint_{kappa}")
            if found:
                mean = float(np.mean(list(found.values())))
                claim = f"{own}: joint log-likelihood, κ = {kappa}, above that of ensembles of 5 on average"
                share = float(np.mean([v > 0 for v in found.values()]))
                rows.append((claim, f"{mean:+.3f}, above in {share:.0%} of {len(found)}", verdict(mean > 0)))
    return rows
