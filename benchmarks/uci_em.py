"""EM with two samples in observation space, against the exact optimum of the evidence.

`python -m benchmarks.uci_em --uci DIR`: the networks of `benchmarks.uci` on one data set, `α` and noise from where a
user starts, `α = b = 1`; and `α` alone with the noise of the optimum.
"""

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.regressors import Task, fit_tangent
from benchmarks.uci import load, standardise
from laplace_sampling.dual import DualCG
from laplace_sampling.evidence import EMResult, fit_em
from laplace_sampling.likelihoods import Gaussian
from laplace_sampling.sampling import Draws

NUM_SAMPLES, MAX_STEPS = 2, 5


def run_em(task: Task, prior: str, seed: int, *, learn_noise: bool) -> tuple[EMResult, list[float], list[float]]:
    """Five steps at most, and after each how far the logarithms of `α` and `b` are from those of the optimum."""
    fit = fit_tangent(task, prior, "affine", "mode")
    b = 1.0 if learn_noise else fit.optimum.noise_precision
    model = fit.posterior.model.with_likelihood(Gaussian(b, learn=learn_noise))
    solver = DualCG(tolerance=1e-5, rank=400)
    start = fit.prior.with_precision(torch.ones(1))
    result = fit_em(model, start, Draws(NUM_SAMPLES, seed), solver, hessian_at="mode", max_steps=MAX_STEPS)
    steps = result.history
    alphas = [step.new_prior_precision[0] for step in steps]
    noises = [*[step.noise_precision[0] for step in steps[1:]], float(result.likelihood.noise_precision)]  # pyright: ignore[reportAttributeAccessIssue]
    return (
        result,
        [math.log(a / fit.optimum.precision) for a in alphas],
        [math.log(b / fit.optimum.noise_precision) for b in noises],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uci", type=Path, metavar="DIR", required=True)
    parser.add_argument("--set", default="concrete")
    parser.add_argument("--splits", nargs="+", type=int, default=range(3))
    parser.add_argument("--depths", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--priors", nargs="+", default=("isotropic", "g-prior"))
    parser.add_argument("--networks", type=Path, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(arguments)
    for depth in args.depths:
        for split in args.splits:
            task = standardise(load(args.uci / args.set, split), depth, split, args.networks)
            for prior in args.priors:
                for learn_noise in (True, False):
                    for seed in range(args.seeds):
                        start = time.perf_counter()
                        _, alpha, noise = run_em(task, prior, seed, learn_noise=learn_noise)
                        what = "α and noise" if learn_noise else "α"
                        path = " ".join(f"{math.expm1(a):+.1%}" for a in alpha)
                        end = f", noise {math.expm1(noise[-1]):+.1%}" if learn_noise else ""
                        print(
                            f"{args.set} {split}, {depth} hidden, {prior}, {what}, seed {seed}: α off by {path}{end}; "
                            f"{time.perf_counter() - start:.1f} s",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
