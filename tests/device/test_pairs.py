"""Whatever users do gives the numbers of the CPU when the network is on a device, and no error.

Of cases, methods, criteria, placements of the data and actions each pair that is possible occurs in a trial. Those of
the default tier have each pair without a case, and each case by solves and in closed form; the others are slow.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, make_case
from pretended_device import pretended_device
from torch import Tensor

from device.trials import ACTIONS, CRITERIA, METHODS, PLACEMENTS, Trial, results
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood

LIKELIHOODS: dict[str, Likelihood] = {name: make_case(name).given[0] for name in CASES}
LABELS = Bernoulli, Categorical
ONE_LABEL = {"binary", "classification", "classification_many_data", "conv_batch_norm", "layer_norm", "attention"}
ONE_LABEL |= {"frozen_body"}


def is_possible(*parts: str) -> bool:
    """Whether the library has an answer for a case, a method, a criterion and an action, or for some of these."""
    case = next((part for part in parts if part in CASES), None)
    likelihood = None if case is None else LIKELIHOODS[case]
    regression = isinstance(likelihood, Gaussian)
    if likelihood is not None:
        if {"validation", "calibrate", "conformal"} & {*parts} and not (regression or isinstance(likelihood, LABELS)):
            return False
        if not regression and "dual" in parts:
            return False
        if regression and "self_consistency" in parts:
            return False
        if "leave_one_out" in parts and case not in ONE_LABEL:
            return False
        if case == "regression_per_output" and "validation" in parts:
            return False
    if {"multi_task", "last layer"} <= {*parts}:
        return False
    if {"segmentation", "stochastic", "validation"} <= {*parts}:  # rounding decides where the search for a scale ends
        return False
    if "export" in parts and case in ("attention", "multi_task"):  # `torch.export` asks for a real device
        return False
    if "leave one out" in parts and ({*parts} & {*METHODS}) - {"exact"}:
        return False
    return not ("dual" in parts and {"leave_one_out", "self_consistency"} & {*parts})


@cache
def pairs_of(trial: Trial) -> set[frozenset[str]]:
    parts = [trial.case, f"by {trial.method}", f"criterion {trial.criterion}", trial.placement]
    found = {frozenset(pair) for pair in combinations(parts, 2)}
    return found | {frozenset((part, action)) for part in parts for action in trial.actions}


def is_possible_trial(trial: Trial) -> bool:
    parts = trial.case, trial.method, trial.criterion
    return is_possible(*parts) and all(is_possible(*parts, action) for action in trial.actions)


def possible_trials() -> list[Trial]:
    """All that are possible with one action."""
    trials = (Trial(*parts[:-1], parts[-1:]) for parts in product(CASES, METHODS, CRITERIA, PLACEMENTS, ACTIONS))
    return [trial for trial in trials if is_possible_trial(trial)]


def covering_trials() -> Iterator[Trial]:
    """A trial for each case and method, and more until each pair that is possible occurs in one."""
    possible = possible_trials()
    left = {pair for trial in possible for pair in pairs_of(trial)}
    of_base: dict[tuple[str, str], list[Trial]] = {}
    for trial in possible:
        of_base.setdefault((trial.case, trial.method), []).append(trial)
    for trials in of_base.values():
        yield _most_pairs(trials, left)
    while left:
        missing = min(left, key=sorted)
        yield _most_pairs([trial for trial in possible if missing in pairs_of(trial)], left)


def _most_pairs(trials: list[Trial], left: set[frozenset[str]]) -> Trial:
    """The trial, of one action or two, with most of the pairs that are left; they are left no longer."""
    trial = max(trials, key=lambda other: len(pairs_of(other) & left))
    left -= pairs_of(trial)
    more = [replace(trial, actions=(action,)) for action in ACTIONS]
    other = max(filter(is_possible_trial, more), key=lambda other: len(pairs_of(other) & left))
    if not pairs_of(other) & left:
        return trial
    left -= pairs_of(other)
    return replace(trial, actions=(*trial.actions, *other.actions))


def check(trial: Trial, folder: Path) -> None:
    expected = results(trial, folder)
    with pretended_device() as device:
        found = results(trial, folder, device)
    assert_same(found, expected, 1e-6)


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Numbers agree to a tolerance, relative to the largest of a tensor; words agree."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            atol = tolerance * float(value.abs().max())
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
        elif not isinstance(value, Tensor):
            assert found[name] == (value if isinstance(value, str) else pytest.approx(value, rel=tolerance)), name


TRIALS = list(covering_trials())


def by_default(trials: list[Trial]) -> set[Trial]:
    """Trials that together have each pair without a case, and each case with each of the two ways to a posterior."""
    of_trial = {
        trial: {pair for pair in pairs_of(trial) if trial.case not in pair}
        | {frozenset((trial.case, "solves" if trial.method in ("krylov", "stochastic", "dual") else "closed form"))}
        for trial in trials
    }
    left, chosen = set[frozenset[str]]().union(*of_trial.values()), set[Trial]()
    while left:
        cases = Counter(trial.case for trial in chosen)
        chosen.add(best := max(trials, key=lambda trial: (len(of_trial[trial] & left), -cases[trial.case])))
        left -= of_trial[best]
    return chosen


DEFAULT = by_default(TRIALS)


@pytest.mark.parametrize(
    "trial", [pytest.param(t, marks=() if t in DEFAULT else pytest.mark.slow) for t in TRIALS], ids=str
)
def test_pairs(trial: Trial, tmp_path: Path) -> None:
    check(trial, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("trial", [trial for trial in TRIALS if trial.method != "stochastic"], ids=str)
def test_pairs_on_a_gpu(trial: Trial, tmp_path: Path) -> None:
    """Sums are in another order there, and iterations end at another rounding."""
    expected, found = results(trial, tmp_path), results(trial, tmp_path, torch.device("cuda"))
    assert_same(found, expected, 1e-3)
