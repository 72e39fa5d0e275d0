"""The solvers and EM on digits, against dense algebra for the same draws.

`python -m benchmarks.solvers.digits` prints the figures for 1,400 images and a CNN with batch norm of about 3,100
weights. No step size is given anywhere. The benchmark holds the Jacobian in memory, so that the dense reference is
exact and a product costs little; steps, epochs and products are as many as with a network.
"""

import argparse
import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.solvers.published_recipe import AveragingSGD, SubsampledNoise
from laplace_sampling.__main__ import cnn, digits, train
from laplace_sampling.evidence.em import EMResult, fit_em
from laplace_sampling.evidence.fixed_point import fit_path
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.g_prior import GPrior
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Solution, Solver


@dataclass(frozen=True)
class Problem:
    """The tangent model of a trained network on digits, dense, and test features `[n, C, P]`."""

    model: LinearModel
    layers: tuple[list[str], Tensor]
    test_features: Tensor

    def prior(self, precision: float) -> GaussianPrior:
        f = self.model.network_outputs
        ggn = self.model.ggn(f)
        return GPrior(precision).build(ggn, self.layers, Draws(1, 0).noise(10))

    def ggn(self) -> GGN:
        return self.model.ggn(self.model.network_outputs)


def problem(num_train: int = 1400, noise: float = 0.0, num_test: int = 100) -> Problem:
    data = digits(num_train, noise)
    network = Linearisation(train(cnn, data, nn.CrossEntropyLoss(), 60, "digits"))
    features = DenseFeatures(torch.cat([network.jacobian(x) for x in data.x.split(200)]))
    f = network(data.x)
    model = LinearModel(features, torch.zeros_like(f), f, data.y, Categorical())
    return Problem(model, network.layers(), network.jacobian(data.x_test[:num_test]))


def exact(p: Problem, prior: GaussianPrior, draws: Draws) -> Tensor:
    """The samples that dense algebra gives for the same draws, in scaled coordinates."""
    return sample_posterior(p.ggn(), prior, draws, Dense()).value.float()


def function_error(p: Problem, prior: GaussianPrior, samples: Tensor, truth: Tensor) -> float:
    """`‖Φ(ζ − ζ*)‖²_B / ‖Φζ*‖²_B` over all samples."""
    ggn = p.ggn()

    def norm(v: Tensor) -> float:
        v = v * prior.scale
        return float((v * ggn.matmul(v)).double().sum())

    return norm(samples - truth) / norm(truth)


def solve(
    p: Problem, prior: GaussianPrior, draws: Draws, solver: Solver, *, objective: str = "L'", **settings
) -> Solution:
    """Posterior samples by `L'`, or by an `SGD` on `L`."""
    if objective == "L":
        assert isinstance(solver, SGD)
        solver = SubsampledNoise(solver, draws)
    return sample_posterior(p.ggn(), prior, draws, solver, **settings)


def jump(p: Problem, draws: Draws, before: float = 100.0, after: float = 0.1, min_steps: int = 800) -> dict[str, float]:
    """The ratio of the test variance to the exact one for the same draws, after a jump of α and one warm E-step."""
    solver = SGD(min_steps=min_steps, finish_passes=0)  # conjugate gradients would finish what a bad start leaves
    old, new = p.prior(before), p.prior(after)
    warm = solve(p, old, draws, solver)
    truth = exact(p, new, draws)
    starts = {
        "delta": warm.delta * math.sqrt(before / after),  # what `fit_em` does
        "raw": warm.value - draws.prior(len(new.scale)) / math.sqrt(after),  # ζ itself kept
    }

    def variance(samples: Tensor) -> float:
        return float((torch.einsum("ncp,kp->knc", p.test_features, samples * new.scale) ** 2).mean())

    return {
        name: variance(solve(p, new, draws, solver, init=start).value) / variance(truth)
        for name, start in starts.items()
    }


def em(p: Problem, start: float, num_samples: int = 32, max_steps: int = 8) -> EMResult:
    return fit_em(p.model, p.prior(start), Draws(num_samples, 0), SGD(), max_steps=max_steps)


# The recipe of Antorán et al. (2023) for MNIST: 8 steps of EM, 16 samples by 20 epochs of SGD and a mode by 40 each,
# constant step sizes with geometric averaging, then 64 samples. Their step sizes were tuned by hand; ours is not given.
RECIPE = AveragingSGD(epochs=20, mode_epochs=40, finish_passes=0)


def recipe(p: Problem, start: float) -> EMResult:
    """EM as published, up to its last step."""
    return fit_em(p.model, p.prior(start), Draws(16, 0), RECIPE, max_steps=8, tolerance=1e-6)


def path_fit(p: Problem, start: float, seed: int = 0) -> tuple[float, float]:
    """`α` by evidence paths, and the number of passes, modes included."""
    result = fit_path(p.model, p.prior(start), seed, 0)
    assert result.converged
    return float(result.prior.precision), sum(step.passes for step in result.history)


def dense_fixed_point(p: Problem, near: float, tolerance: float = 3e-3) -> float:
    """MacKay's fixed point by dense algebra in float64, from a starting point that only saves time."""
    features = p.model.features
    assert isinstance(features, DenseFeatures)
    f = p.model.network_outputs.double()
    model = replace(p.model, features=DenseFeatures(features.matrix.double()), offset=0 * f, network_outputs=f)
    prior = p.prior(near).to(f.device, torch.float64)
    result = fit_em(model, prior, Draws(1, 0), Dense(), max_steps=30, tolerance=tolerance)
    assert result.converged
    return float(result.prior.precision)


def print_sgd(p: Problem, alpha: float, num_samples: int) -> None:
    """Errors of samples by SGD, by epochs, averaging and objective; and after a jump of the precision."""
    draws, prior = Draws(num_samples, 0), p.prior(alpha)
    truth = exact(p, prior, draws)

    def error(solver: SGD, **settings) -> tuple[float, float]:
        solution = solve(p, prior, draws, solver, **settings)
        return function_error(p, prior, solution.value, truth), float(solution.residual.max())

    for epochs in (5, 10, 20, 40):
        value, residual = error(SGD(epochs=epochs, finish_passes=0))
        print(f"SGD, {epochs:>2} epochs: error {value:.2%}, residual {residual:.2f}", flush=True)
    for averaging, kind in (("decay", SGD), ("geometric", AveragingSGD)):
        value, _ = error(kind(epochs=40, finish_passes=0))
        print(f"SGD, 40 epochs, averaging {averaging}: error {value:.2%}", flush=True)
    print("objective L at a batch, L' at an eighth of it, 40 epochs:")
    for batch in (800, 400, 200):
        high, low = (
            error(SGD(epochs=40, batch_size=b, finish_passes=0), objective=o)[0]
            for o, b in (("L", batch), ("L'", batch // 8))
        )
        print(f"  L at {batch}: {high:.2%};  L' at {batch // 8}: {low:.2%}", flush=True)
    ratios = jump(p, draws)
    print(f"α from 100 to 0.1, test variance over exact: δ {ratios['delta']:.3f}, raw {ratios['raw']:.3f}", flush=True)


def print_samples(p: Problem, alpha: float, num_samples: int) -> None:
    """Errors and passes of samples by Krylov methods, the paper's recipe beside them."""
    draws, prior = Draws(num_samples, 0), p.prior(alpha)
    truth = exact(p, prior, draws)
    for name, solver in (
        ("BlockKrylov", BlockKrylov()),
        ("CG", CG()),
        ("the paper's recipe, 40 epochs", replace(RECIPE, epochs=40)),
    ):
        solution = solve(p, prior, draws, solver)
        print(
            f"{num_samples} samples, {name}: error {function_error(p, prior, solution.value, truth):.4%} "
            f"(bound {float(solution.error.max()) ** 2:.4%}), {solution.passes + 0.5 * num_samples:.0f} passes, "
            "those of the right-hand side included",
            flush=True,
        )


def print_precisions(p: Problem) -> None:
    """Prior precisions and passes by evidence paths, EM, and the paper's recipe, against dense algebra."""
    if True:
        results = {start: em(p, start) for start in (100.0, 0.01)}
        truth = dense_fixed_point(p, float(results[100.0].prior.precision))
        print(f"dense {truth:.4g}", flush=True)
        for start, seed in itertools.product((1.0, 100.0, 0.01), range(3)):
            alpha, passes = path_fit(p, start, seed)
            print(
                f"  evidence path from {start}, seed {seed}: {alpha:.4g}, "
                f"off by {alpha / truth - 1:+.1%}, {passes:.0f} passes",
                flush=True,
            )
        results = {f"EM from {start}": result for start, result in results.items()}
        for name, result in {**results, "the paper's recipe from 1": recipe(p, 1.0)}.items():
            alpha = float(result.prior.precision)
            trace = " ".join(f"{s.new_prior_precision[0]:.3g}" for s in result.history)
            passes = sum(step.passes for step in result.history)
            print(
                f"  {name}: {trace} ({len(result.history)} steps), "
                f"off by {alpha / truth - 1:+.1%}, {passes:.0f} passes",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["sgd", "samples", "precisions"], help="sgd, samples, precisions")
    parser.add_argument("--num-train", type=int, default=1400)
    parser.add_argument("--alpha", type=float, default=3.5, help="precision of the g-prior for the sampling figures")
    args = parser.parse_args()
    p = problem(args.num_train)
    print(f"{args.num_train} images, P = {p.model.features.size}, g-prior at α = {args.alpha}", flush=True)
    if "sgd" in args.parts:
        print_sgd(p, args.alpha, 32)
    if "samples" in args.parts:
        print_samples(p, args.alpha, 64)
    if "precisions" in args.parts:
        print_precisions(p)


if __name__ == "__main__":
    main()
