"""`python -m benchmarks.distances [--quick]`: distances of approximations to exact linearised Laplace, by network size.

The claim of Antorán et al. (2023, Figure 3): samples stay near the exact posterior as networks grow. All methods have
the isotropic prior at the precision of the exact evidence. Three distances, each a mean over test data: the
2-Wasserstein distance of the Gaussians of the logits; the symmetrised divergence of their predictive probabilities; and
that divergence as each method predicts, which for this library includes the noise of its samples. The cost of a fit is
in epochs of training, counted in operations.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comparison import laplace_torch
from benchmarks.comparison.methods import METHODS, missing
from benchmarks.comparison.metrics import logit_wasserstein, symmetrised_kl
from benchmarks.comparison.networks import NETWORKS, lenet
from benchmarks.comparison.predictions import log_mean_exp
from benchmarks.comparison.training import Problem, Recipe, outputs_of
from benchmarks.data.tasks import TASKS
from laplace_sampling import IsotropicPrior, LinearisedLaplace

SIZES = {"LeNet, small": (4, 8, 16), "LeNet": (8, 16, 32), "LeNet, large": (12, 24, 64)}
DRAWS, TEST, BATCH = 4096, 200, 200

# Covariances of the logits of test data, `[N, C, C]`; log-probabilities as predicted, `[N, C]`, if not those of the
# Gaussians; and epochs of the fit, if they are counted.
Approximation = tuple[Tensor, Tensor | None, float | None]


def log_probs(outputs: Tensor, covariance: Tensor) -> Tensor:
    """Log-probabilities of Gaussian logits by many draws; the normal draws are the same for every covariance."""
    values, vectors = torch.linalg.eigh(covariance.double())
    root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    generator, total = torch.Generator().manual_seed(0), []
    for _ in range(0, DRAWS, 256):
        normal = torch.randn(256, *outputs.shape, generator=generator, dtype=torch.float64)
        draws = outputs + torch.einsum("ncd,knd->knc", root, normal)
        total.append(log_mean_exp(draws.log_softmax(-1)))
    return log_mean_exp(torch.stack(total))


def alone(problem: Problem, precision: float, x: Tensor) -> Approximation:
    outputs = outputs_of(problem.network, x)
    return torch.zeros(*outputs.shape, outputs.shape[-1]), None, 0.0


def ours(problem: Problem, precision: float, x: Tensor, budget: float | None = None, **settings: Any) -> Approximation:
    prior = IsotropicPrior(precision=precision)
    la = LinearisedLaplace(problem.network, "classification", prior=prior, seed=problem.seed, **settings)
    la.fit(problem.data.train.loader(BATCH), budget=budget, progress=False)
    prediction: Any = la.predict(x)
    return prediction.covariance(), prediction.probs.double().log(), la.diagnose().epochs


def theirs(problem: Problem, precision: float, x: Tensor, subset: str, structure: str) -> Approximation:
    settings = {"prior_precision": precision}
    la, _, batch = laplace_torch.build(problem.network, "classification", subset, structure, **settings)
    la.fit(problem.data.train.loader(batch))
    return torch.cat([la._glm_predictive_distribution(part)[1].detach() for part in x.split(batch)]), None, None


APPROXIMATIONS: dict[str, Callable[[Problem, float, Tensor], Approximation]] = {
    "MAP": alone,
    "laplace-torch, diagonal": partial(theirs, subset="all", structure="diag"),
    "laplace-torch, KFAC": partial(theirs, subset="all", structure="kron"),
    "laplace-torch, last layer": partial(theirs, subset="last_layer", structure="full"),
    **{f"ours, {num} samples": partial(ours, num_samples=num, method="krylov") for num in (16, 64)},
    "ours, Kronecker factors": partial(ours, method="kfac"),
    **{f"ours, at most {budget:g} epochs": partial(ours, budget=budget) for budget in (5.0, 10.0, 20.0, 50.0)},
}


def rows(problem: Problem) -> list[list[str]]:
    """A row for each method."""
    x, train = problem.data.test.x[:TEST], problem.data.train
    la = LinearisedLaplace(problem.network, "classification", method="exact", num_samples=2)
    # The default budget may end before the precision is found.
    la.fit_hyperparameters(train.loader(BATCH), budget=None, criterion="evidence", progress=False)
    prediction: Any = la.predict(x)
    precision, outputs, covariance = float(la.prior_precision_[0]), prediction.logits.double(), prediction.covariance()
    exact, found = log_probs(outputs, covariance), []
    size = f"{sum(p.numel() for p in problem.network.parameters()):,}"
    for name, method in APPROXIMATIONS.items():
        if name.startswith("laplace-torch") and missing(METHODS["laplace-torch, KFAC"]) is not None:
            continue
        spread, predicted, epochs = method(problem, precision, x)
        gaussian = log_probs(outputs, spread)
        distances = (
            float(symmetrised_kl(exact, gaussian).mean()),
            float(symmetrised_kl(exact, gaussian if predicted is None else predicted).mean()),
            float(logit_wasserstein(covariance, spread).mean()),
        )
        cost = "" if epochs is None else f"{epochs:.1f}"
        found.append([size, name, cost, *(f"{value:.4g}" for value in distances)])
    return found


def network(channels: tuple[int, int, int], shape: torch.Size, outputs: int, dropout: float) -> nn.Module:
    return lenet(shape, outputs, dropout, channels=channels)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distances", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small network, trained for a moment")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = {"quick": (1, 2, 4)} if options.quick else SIZES
    NETWORKS.update({name: partial(network, channels) for name, channels in sizes.items()})
    name = "digits, n=150" if options.quick else "digits, n=300"
    head = ("P", "method", "epochs of the fit", "symmetrised KL", "as predicted", "2-Wasserstein distance of logits")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for architecture in sizes:
        recipe = Recipe(weight_decay=1e-3, early=True, steps=50 if options.quick else 1000)
        problem = Problem(TASKS[name], TASKS[name].load(options.seed), architecture, recipe, options.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for row in rows(problem):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
