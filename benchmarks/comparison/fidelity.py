"""Distance of approximations to the exact linearised Laplace, by size of the network (Antorán et al. 2023, Figure 3).

All have the isotropic prior with the precision of the exact evidence, and the curvature at the network's outputs, as
laplace-torch has. There are three distances, each a mean over test data: the 2-Wasserstein distance between the
Gaussians of the logits; the symmetrised divergence between predictive probabilities of those Gaussians, by many draws;
and the same divergence for the probabilities as each method predicts them, which for this library includes the noise of
its samples. What a fit costs is counted, in operations of matrix products and convolutions by those of an epoch of
training.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison.laplace_torch import build
from benchmarks.comparison.lines import append, read, versions
from benchmarks.comparison.methods import METHODS, missing
from benchmarks.comparison.metrics import logit_wasserstein, symmetrised_kl
from benchmarks.comparison.ours import BATCH
from benchmarks.comparison.predictions import log_mean_exp
from benchmarks.comparison.run import Case, problem_of
from benchmarks.comparison.training import Problem, Recipe, outputs_of
from benchmarks.price.meter import operations_of
from benchmarks.price.training import epoch_of
from laplace_sampling import ConvergenceWarning, IsotropicPrior, LinearisedLaplace
from laplace_sampling.networks.resources import Operations

__all__ = ["KEY", "METHODS_COMPARED", "SUITES", "distances", "run"]

KEY = ("study", "network", "seed", "method")
NETWORKS = ("LeNet, small", "LeNet", "LeNet, large")
SUITES = {"small": ("digits, n=300, noise 1", 3), "full": ("digits, n=1400, noise 1", 5)}
DRAWS, TEST, SUBNETWORK = 4096, 200, 400

# Covariances of the logits of test data, `[N, C, C]`, and log-probabilities as predicted, `[N, C]`, if not those of the
# Gaussians.
Approximation = tuple[Tensor, Tensor | None]
# A fit at a prior precision, which returns what predicts.
Method = Callable[[Problem, float], Callable[[Tensor], Approximation]]


def log_probs(outputs: Tensor, covariance: Tensor) -> Tensor:
    """Log-probabilities of Gaussian logits by many draws; the normal draws are the same for every covariance."""
    values, vectors = torch.linalg.eigh(covariance.double())
    root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    generator = torch.Generator().manual_seed(0)
    total = []
    for _ in range(0, DRAWS, 256):
        normal = torch.randn(256, *outputs.shape, generator=generator, dtype=torch.float64)
        draws = outputs + torch.einsum("ncd,knd->knc", root, normal)
        total.append(log_mean_exp(draws.log_softmax(-1)))
    return log_mean_exp(torch.stack(total))


def alone(problem: Problem, precision: float) -> Callable[[Tensor], Approximation]:
    def predict(x: Tensor) -> Approximation:
        outputs = outputs_of(problem.network, x)
        return torch.zeros(*outputs.shape, outputs.shape[-1]), None

    return predict


def ours(problem: Problem, precision: float, budget: float | None = None, **settings: Any) -> Callable:
    la = LinearisedLaplace(
        problem.network,
        problem.likelihood,
        prior=IsotropicPrior(precision=precision),
        seed=problem.seed,
        **settings,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a budget may end a fit
        la.fit(problem.data.train.loader(BATCH), budget=budget, progress=False)

    def predict(x: Tensor) -> Approximation:
        prediction: Any = la.predict(x)
        return prediction.covariance(), prediction.probs.double().log()

    return predict


def theirs(problem: Problem, precision: float, subset: str, structure: str) -> Callable[[Tensor], Approximation]:
    settings: dict[str, Any] = {"prior_precision": precision}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if subset == "subnetwork":
            settings["subnetwork_indices"] = widest(problem, precision)
        la, _, batch = build(problem.network, problem.likelihood, subset, structure, **settings)
        la.fit(problem.data.train.loader(batch))

    def predict(x: Tensor) -> Approximation:
        parts = [la._glm_predictive_distribution(part)[1].detach() for part in x.split(batch)]
        return torch.cat(parts), None

    return predict


def widest(problem: Problem, precision: float) -> Tensor:
    """Indices of the weights of the largest marginal variance (Daxberger et al. 2021)."""
    diagonal, _, batch = build(problem.network, problem.likelihood, "all", "diag", prior_precision=precision)
    diagonal.fit(problem.data.train.loader(batch))
    return diagonal.posterior_variance.topk(SUBNETWORK).indices.sort().values


METHODS_COMPARED: dict[str, Method] = {
    "MAP": alone,
    "diagonal": partial(theirs, subset="all", structure="diag"),
    "KFAC": partial(theirs, subset="all", structure="kron"),
    "last layer": partial(theirs, subset="last_layer", structure="full"),
    f"subnetwork of {SUBNETWORK}": partial(theirs, subset="subnetwork", structure="full"),
    **{f"ours, {num} samples": partial(ours, num_samples=num, method="krylov") for num in (16, 64, 256)},
    "ours, Kronecker factors": partial(ours, method="kfac"),
    **{f"ours, at most {budget:g} epochs": partial(ours, budget=budget) for budget in (5.0, 10.0, 20.0, 50.0)},
}


@dataclass(frozen=True)
class Reference:
    """The exact posterior at the precision of its own evidence, on some of the test data.

    Attributes:
        precision: a number.
        outputs: of the network, `[N, C]`.
        covariance: of the logits, `[N, C, C]`.
    """

    precision: float
    outputs: Tensor
    covariance: Tensor

    @cached_property
    def log_probs(self) -> Tensor:
        return log_probs(self.outputs, self.covariance)


def reference_of(problem: Problem) -> Reference:
    """The exact posterior, which is stored beside the network, as it takes longer than most that it is compared to."""
    return Reference(**problem.stored(f"{problem.seed}, exact", partial(exact, problem)))


def exact(problem: Problem) -> dict[str, Any]:
    la = LinearisedLaplace(problem.network, problem.likelihood, method="exact", num_samples=2)
    # The default budget may end before the precision is found.
    la.fit_hyperparameters(
        problem.data.train.loader(BATCH), budget=None, criterion="evidence", scale=1.0, progress=False
    )
    prediction: Any = la.predict(problem.data.test.x[:TEST])
    precision = float(la.prior_precision_[0])
    return {"precision": precision, "outputs": prediction.logits.double(), "covariance": prediction.covariance()}


def distances(problem: Problem, methods: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    """The distances of methods, by default of all, on some of the test data."""
    x, reference = problem.data.test.x[:TEST], reference_of(problem)
    epoch = operations_of(epoch_of(problem.network, problem.data.train.loader(BATCH)))
    for name in METHODS_COMPARED if methods is None else methods:
        method = METHODS_COMPARED[name]
        if getattr(method, "func", None) is theirs and missing(METHODS["laplace-torch, KFAC"]) is not None:
            continue
        started = time.perf_counter()
        with Operations() as counted:
            predict = method(problem, reference.precision)
        spread, predicted = predict(x)
        seconds = time.perf_counter() - started
        other = log_probs(reference.outputs, spread)
        predicted = other if predicted is None else predicted
        yield {
            "method": name,
            "symmetrised_kl": float(symmetrised_kl(reference.log_probs, other).mean()),
            "symmetrised_kl_predicted": float(symmetrised_kl(reference.log_probs, predicted).mean()),
            "wasserstein": float(logit_wasserstein(reference.covariance, spread).mean()),
            "prior_precision": reference.precision,
            "num_parameters": sum(p.numel() for p in problem.network.parameters()),
            "seconds": round(seconds, 3),
            "epochs_of_fit": counted.count / epoch,
        }


def run(suite: str, out: Path) -> None:
    """Appends the results that the file does not have, network by network."""
    task, seeds = SUITES[suite]
    done = {(r["network"], r["seed"]) for r in read(out, KEY)}
    for seed in range(seeds):
        for network in NETWORKS:
            if (network, seed) in done:
                continue
            case = Case(task, network, Recipe(weight_decay=1e-3, early=True))
            head = {"study": "fidelity", "task": task, "network": network, "seed": seed}
            results = list(distances(problem_of(case, seed, out.with_suffix("") / "networks")))
            for result in results:
                append(out, head | result | {"versions": versions()})
            print(
                f"{task}, {network}, seed {seed}: "
                + ", ".join(f"{r['method']} {r['wasserstein']:.3f}" for r in results)
            )
