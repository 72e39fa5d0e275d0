"""Rules for the prior precision of a classification that see training data alone, by dense algebra in float64.

`python -m benchmarks.methods.rules` prints, for each rule, what it gains in log-likelihood of test data over the
network, on digits of scikit-learn: clean ones (150 to 300 images, 12 networks), and with pixel noise. The posterior has
all weights, an isotropic prior, and the curvature at the network. Rules are:

- `leave_one_out` and `self_consistency`: criteria of the library.
- evidence: `α‖w̄‖² = γ(α)`; mixture: predictions of all precisions, weighted by the evidence at the network.
- left-out score: the precision under which labels are likeliest when a Newton step leaves each datum out.
- training accuracy: the smallest precision at which error bars cost a part of 0.003 of it (TFB, arXiv 2412.05723).
- null space: draws that change no training output (arXiv 2410.16901), at the precision that is best for test data, or
  at that of the evidence in these directions, `α = (P − rank)/‖w̄‖²`.
"""

import statistics
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.comparison.predictions import log_mean_exp
from benchmarks.comparison.report import table
from benchmarks.comparison.training import Problem, Recipe
from benchmarks.data.tasks import TASKS, Part
from benchmarks.price.dense_reference import jacobian
from laplace_sampling import LinearisedLaplace

__all__ = ["CASES", "Posterior", "gains", "left_out"]

NETWORKS = ("LeNet", "LeNet with batch norm")
SEEDS = 2
# Tasks, their seeds, and how networks are trained.
CASES = {
    "clean": (tuple(f"digits, n={n}" for n in (150, 220, 300)), SEEDS, (Recipe(),)),
    "noise": (("digits, n=300, noise 1",), SEEDS, (Recipe(), Recipe(weight_decay=1e-3, early=True))),
}
ALPHAS = torch.logspace(-2, 7, 46, dtype=torch.float64)
DRAWS, ACCURACY, BATCH, NOTHING = 64, 0.003, 50, 1e-9


@dataclass(frozen=True, eq=False)
class Posterior:
    """The curvature in its eigenvectors, and a part of the data: rows of the Jacobian there, outputs and labels."""

    values: Tensor
    rows: Tensor  # [N, C, P]
    outputs: Tensor
    labels: Tensor

    def covariance(self, alpha: float, null: bool = False) -> Tensor:
        """`φ (M + αI)⁻¹ φᵀ`, `[N, C, C]`; of directions without curvature alone, if `null`."""
        kept = self.values <= NOTHING * self.values.max() if null else torch.ones_like(self.values, dtype=torch.bool)
        half = self.rows[..., kept] / (self.values[kept].clamp_min(0) + alpha).sqrt()
        return half @ half.mT

    def log_probs(self, covariance: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Of Gaussian outputs, by draws and their opposites."""
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp_min(0).sqrt()[..., None, :]
        white = torch.randn(DRAWS, *self.outputs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        z = torch.einsum("ncd,knd->knc", root, white)
        outputs = self.outputs if outputs is None else outputs
        return log_mean_exp(torch.cat([outputs + z, outputs - z]).log_softmax(-1))

    def mean(self, log_probs: Tensor) -> float:
        """Of the log-probabilities of the labels."""
        return float(log_probs.gather(-1, self.labels[:, None]).mean())

    def accuracy(self, log_probs: Tensor) -> float:
        return float((log_probs.argmax(-1) == self.labels).double().mean())


def posteriors(problem: Problem) -> tuple[Posterior, Posterior, float]:
    """On the training data and on the test data; and `‖w̄‖²`."""
    network = problem.network.double()
    with torch.no_grad():
        rows, outputs = zip(*(of_part(network, part) for part in (problem.data.train, problem.data.test)), strict=True)
        p = outputs[0].softmax(-1)
        root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
        weighted = torch.einsum("ncd,ncp->ndp", root, rows[0]).flatten(0, 1)
        values, vectors = torch.linalg.eigh(weighted.mT @ weighted)
        norm = sum(float(w.square().sum()) for w in network.parameters())
        train, test = (
            Posterior(values, r @ vectors, f, part.y)
            for r, f, part in zip(rows, outputs, (problem.data.train, problem.data.test), strict=True)
        )
    return train, test, norm


def of_part(network: torch.nn.Module, part: Part) -> tuple[Tensor, Tensor]:
    x = part.x.double()
    return torch.cat([jacobian(network, batch) for batch in x.split(BATCH)]), network(x)


def left_out(train: Posterior, alpha: float) -> float:
    """The mean log-probability of labels, each left out by a Newton step: `f + V(I − BV)⁻¹g`, `V(I − BV)⁻¹`."""
    V, p = train.covariance(alpha), train.outputs.softmax(-1)
    B = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    gradient = p - torch.nn.functional.one_hot(train.labels, p.shape[-1])
    without = torch.linalg.solve(torch.eye(p.shape[-1], dtype=V.dtype) - V @ B, V)
    outputs = train.outputs + torch.einsum("ncd,nd->nc", without, gradient)
    return train.mean(train.log_probs((without + without.mT) / 2, outputs))


def gains(problem: Problem) -> dict[str, float]:
    """By rule, the gain in test log-likelihood over the network."""
    chosen = {}
    for criterion in ("leave_one_out", "self_consistency"):
        la = LinearisedLaplace(problem.network.double(), "classification", method="exact", num_samples=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x, y = problem.data.train.x.double(), problem.data.train.y
            la.fit_hyperparameters(
                list(zip(x.split(BATCH), y.split(BATCH), strict=True)), criterion=criterion, progress=False
            )
        chosen[criterion] = float(la.prior_precision_[0])
    train, test, norm = posteriors(problem)
    alone = test.mean(test.outputs.log_softmax(-1))
    at = {float(a): test.log_probs(test.covariance(float(a))) for a in ALPHAS}
    excess = [norm * a - float((train.values.clamp_min(0) / (train.values.clamp_min(0) + a)).sum()) for a in at]
    chosen["evidence"] = next((a for a, value in zip(at, excess, strict=True) if value > 0), float(ALPHAS[-1]))
    chosen["left-out score"] = max(at, key=lambda a: left_out(train, a))
    least = train.accuracy(train.outputs) - ACCURACY
    wide = [train.accuracy(train.log_probs(train.covariance(a))) < least for a in at]
    chosen["training accuracy"] = list(at)[min(len(wide) - 1, len(wide) - wide[::-1].index(True) if any(wide) else 0)]
    found = {rule: test.mean(test.log_probs(test.covariance(alpha))) - alone for rule, alpha in chosen.items()}
    log_evidence = torch.tensor([
        -0.5 * (a * norm + float((train.values.clamp_min(0) / a).log1p().sum())) for a in at
    ])  # fmt: skip
    weights = log_evidence.double().log_softmax(0)
    found["mixture"] = test.mean(torch.logsumexp(torch.stack(list(at.values())) + weights[:, None, None], 0)) - alone
    null = {float(a): test.mean(test.log_probs(test.covariance(float(a), null=True))) - alone for a in ALPHAS}
    found["null space, best α"] = max(null.values())
    free = int((train.values <= NOTHING * train.values.max()).sum())
    found["null space, α of the evidence"] = null[min(null, key=lambda a: abs(a - free / norm))]
    return found | {"best α": max(map(test.mean, at.values())) - alone}


def problems(kind: str) -> Iterator[Problem]:
    tasks, seeds, recipes = CASES[kind]
    for task in tasks:
        for network in NETWORKS:
            for recipe in recipes:
                for seed in range(seeds):
                    yield Problem(TASKS[task], TASKS[task].load(seed), network, recipe, seed, task)


def main() -> None:
    found: dict[str, list[dict[str, float]]] = {}
    for kind in CASES:
        for problem in problems(kind):
            found.setdefault(kind, []).append(gains(problem))
            print(f"{problem.name}, {problem.architecture}, {found[kind][-1]}", file=sys.stderr, flush=True)
    rows = []
    for rule in found["clean"][0]:
        cells = [rule]
        for each in found.values():
            values = [gain[rule] for gain in each]
            below = sum(value < -0.005 for value in values)
            cells += [f"{statistics.fmean(values):+.3f}", f"{min(values):+.3f}", f"{below} of {len(values)}"]
        rows.append(cells)
    print(table(("rule", *(f"{kind}: {what}" for kind in found for what in ("mean", "worst", "below −0.005"))), rows))


if __name__ == "__main__":
    main()
