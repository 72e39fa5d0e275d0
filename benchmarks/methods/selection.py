"""Scores of networks from training data alone, as a choice between candidates: do they rank them as test data do?

Each choice is between six networks that differ in width, depth, weight decay or steps of training; with `--mixed`, in
all of them, some without weight decay. Scores are those of `LinearisedLaplace.score`, the evidence of the linear model
at its mode (`log_marginal_likelihood`), the log-likelihood of the training data, and laplace-torch's evidence at the
precisions that it tunes. Test log-likelihoods are those of the network alone, with the noise of its training residuals,
and with error bars.

Run: python -m benchmarks.methods.selection [--mixed] [--seeds 0 1]
"""

import argparse
import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import nn

from benchmarks.comparison import laplace_torch, peers
from benchmarks.comparison.metrics import score as scores_of
from benchmarks.comparison.networks import mlp
from benchmarks.comparison.predictions import Fitted
from benchmarks.comparison.training import Problem, Recipe, train
from benchmarks.data.tasks import TASKS, Data
from laplace_sampling import LinearisedLaplace

__all__ = ["AXES", "CHOICES", "MIXED", "MIXED_CHOICES", "Candidate", "ranked", "spearman", "table"]


@dataclass(frozen=True)
class Candidate:
    """A network and how it is trained."""

    width: int = 50
    depth: int = 2
    activation: type[nn.Module] = nn.ReLU
    recipe: Recipe = field(default_factory=lambda: Recipe(weight_decay=1e-3))

    def make(self, data: Data, outputs: int, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return mlp(data.train.x.shape[1:], outputs, 0.0, self.width, self.depth, self.activation)


def _decayed(steps: int = 1000, weight_decay: float = 1e-2) -> Recipe:
    return Recipe(weight_decay=weight_decay, steps=steps)


def _axis(name: str, values: Sequence[Any], make: Callable[[Any], Candidate]) -> dict[str, Candidate]:
    return {f"{name} {value}": make(value) for value in values}


AXES = {
    "width": _axis("width", (2, 4, 8, 16, 50, 200), lambda v: Candidate(width=v, recipe=_decayed())),
    "depth": _axis("depth", (2, 3, 4, 5, 6, 8), lambda v: Candidate(depth=v, recipe=_decayed())),
    "decay": _axis("decay", (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3), lambda v: Candidate(recipe=_decayed(1000, v))),
    "steps": _axis("steps", (15, 30, 60, 120, 300, 1000), lambda v: Candidate(recipe=_decayed(v))),
}
# Networks that have learnt noise by heart, and others that have learnt little: where labels are fitted no score from
# training data is expected to see it.
MIXED = {
    "narrow": Candidate(width=5),
    "wide": Candidate(width=200),
    "deep": Candidate(depth=4),
    "decay": Candidate(recipe=Recipe(weight_decay=3e-2)),
    "no decay": Candidate(recipe=Recipe()),
    "short": Candidate(recipe=Recipe(weight_decay=1e-3, steps=60)),
}
CHOICES: dict[str, tuple[str, dict[str, Candidate]]] = {
    f"{axis}, {task}": (task, AXES[axis])
    for axis, task in (
        ("width", "digits, n=600, noise 1"),
        ("width", "gap"),
        ("depth", "digits, n=300"),
        ("depth", "diabetes"),
        ("decay", "digits, n=300, noise 1"),
        ("decay", "breast cancer"),
        ("steps", "digits, n=600, noise 1"),
        ("steps", "diabetes"),
    )
}
MIXED_CHOICES = {
    f"mixed, {task}": (task, MIXED)
    for task in (
        "two moons", "wine", "breast cancer", "digits, n=300", "digits, n=300, noise 1", "digits, n=600, noise 1",
        "diabetes", "gap",
    )
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Trained(Problem):
    """A problem with the network of a candidate."""

    candidate: Candidate = field(default_factory=Candidate)

    def trained(self, member: int = 0, dropout: float = 0.0) -> nn.Module:
        network = self.candidate.make(self.data, self.task.outputs, self.seed)
        states = train(network, self.likelihood, self.data, self.recipe, self.seed)
        network.load_state_dict(states["end"])
        return network.eval()


def test_log_likelihood(problem: Problem, fitted: Fitted) -> float:
    prediction, y = fitted.predict(problem.data.test.x), problem.data.test.y
    return scores_of(prediction, y.flatten())["log_likelihood"]


def training_log_likelihood(problem: Problem) -> float:
    fitted = peers.network_alone(problem)
    return scores_of(fitted.predict(problem.data.train.x), problem.data.train.y.flatten())["log_likelihood"]


def theirs(problem: Problem, structure: str = "KFAC") -> float:
    """laplace-torch's evidence of a copy of the network, for each datum."""
    la, _, _ = laplace_torch.fitted(copy.copy(problem), structure, "marglik")
    return float(la.log_marginal_likelihood()) / len(problem.data.train.y)


def values(problem: Problem) -> dict[str, float]:
    """Scores and test log-likelihoods of a network."""
    train_loader, test = problem.data.train.loader(), problem.data.test
    la = LinearisedLaplace(problem.network, problem.likelihood)
    la.fit_hyperparameters(train_loader, progress=False)
    found = {
        "test, network": test_log_likelihood(problem, peers.network_alone(problem)),
        "test, error bars": float(la.predict(test.x).log_prob(test.y).double().mean()),
        "loo": float(la.score("loo")),
        "evidence": float(la.score("evidence")),
        "at the mode": float(la.log_marginal_likelihood()) / len(problem.data.train.y),
        "training": training_log_likelihood(problem),
    }
    for structure in ("KFAC", "last layer"):
        found[f"laplace-torch, {structure}"] = theirs(problem, structure)
    return found


def ranked(
    task: str, seed: int, candidates: dict[str, Candidate], measure: Callable[[Problem], dict[str, float]] = values
) -> dict[str, dict[str, float]]:
    """What is measured of each candidate of a task."""
    data = TASKS[task].load(seed)
    found = {}
    for name, candidate in candidates.items():
        problem = _Trained(TASKS[task], data, "MLP", candidate.recipe, seed, task, candidate=candidate)
        found[name] = measure(problem)
    return found


def spearman(found: dict[str, dict[str, float]], score: str, target: str) -> float:
    """Rank correlation of a score with a target over the candidates."""
    scores, targets = ([row[name] for row in found.values()] for name in (score, target))
    return float(spearmanr(scores, targets).statistic)  # pyright: ignore[reportAttributeAccessIssue]


def table(results: dict[tuple[str, int], dict[str, dict[str, float]]], target: str) -> str:
    """Rank correlations of all scores, a row for each task (the mean over seeds), and their mean."""
    names = [name for name in next(iter(next(iter(results.values())).values())) if not name.startswith("test")]
    tasks = list(dict.fromkeys(task for task, _ in results))
    lines = [f"| {target} | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    means: dict[str, list[float]] = {name: [] for name in names}
    for task in tasks:
        row = []
        for name in names:
            row.append(fmean(spearman(found, name, target) for (of, _), found in results.items() if of == task))
            means[name].append(row[-1])
        lines.append(f"| {task} | " + " | ".join(f"{v:.2f}" for v in row) + " |")
    lines.append("| mean | " + " | ".join(f"{fmean(v):.2f}" for v in means.values()) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--mixed", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: dict[tuple[str, int], Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for choice, (task, candidates) in (MIXED_CHOICES if options.mixed else CHOICES).items():
            for seed in options.seeds:
                results[choice, seed] = found = ranked(task, seed, candidates)
                for name, row in found.items():
                    print(f"{choice}, {seed}, {name}: " + ", ".join(f"{k} {v:.4f}" for k, v in row.items()), flush=True)
    for target in ("test, network", "test, error bars"):
        print(table(results, target), "\n")


if __name__ == "__main__":
    main()
