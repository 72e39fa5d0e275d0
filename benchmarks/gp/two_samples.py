"""EM with two samples in observation space, against the exact optimum of the evidence.

`python -m benchmarks.gp.two_samples --uci DIR` takes the networks of `benchmarks.gp.uci` on one data set. It learns `α`
and the noise together, and `α` alone with the noise of the optimum.
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from benchmarks.data.uci import load
from benchmarks.gp.regression_task import Task
from benchmarks.gp.regressors import fit_tangent
from benchmarks.gp.uci import standardise
from laplace_sampling import ConvergenceWarning, Gaussian, LinearisedLaplace
from laplace_sampling.methods import dual

NUM_SAMPLES, MAX_STEPS = 2, 5


def run_em(task: Task, prior: str, seed: int, *, learn_noise: bool) -> tuple[list[float], list[float]]:
    """The ratios of `α` and `b` to the optimum, at the start of EM and after each of at most five steps."""
    _, optimum = fit_tangent(task, prior, "affine", "mode")
    likelihood = Gaussian(1.0 if learn_noise else optimum.noise_precision, learn=learn_noise, noise_at="mode")
    la = LinearisedLaplace(task.map, likelihood, prior=prior, method="dual", num_samples=2, seed=seed)
    # By EM, as for more observations, whose Gram matrix is not decomposed.
    with warnings.catch_warnings(), mock.patch.object(dual, "_GRAM_ROWS", 0):
        warnings.simplefilter("ignore", ConvergenceWarning)  # five steps may be too few for it
        la.fit_hyperparameters(
            [(task.x, task.y[:, None])], num_samples=NUM_SAMPLES, max_steps=MAX_STEPS, progress=False
        )
    assert la.noise_precision_ is not None
    steps = la.history_
    alphas = [step.prior_precision[0] for step in steps] + [steps[-1].new_prior_precision[0]]
    noises = [step.noise_precision[0] for step in steps if step.noise_precision] + [float(la.noise_precision_)]
    return [a / optimum.precision for a in alphas], [b / optimum.noise_precision for b in noises]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uci", type=Path, metavar="DIR", required=True)
    parser.add_argument("--set", default="concrete")
    parser.add_argument("--splits", nargs="+", type=int, default=range(3))
    parser.add_argument("--depths", nargs="+", type=int, default=(1, 2))
    parser.add_argument("--priors", nargs="+", default=("isotropic",))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", type=Path, metavar="DIR", help="where trained networks are kept")
    args = parser.parse_args(arguments)
    for depth in args.depths:
        for split in args.splits:
            task = standardise(load(args.uci / args.set, split), depth, split, args.networks)
            for prior in args.priors:
                for learn_noise in (True, False):
                    for seed in range(args.seeds):
                        start = time.perf_counter()
                        alphas, noises = run_em(task, prior, seed, learn_noise=learn_noise)
                        what = "α and noise" if learn_noise else "α"
                        path = " ".join(f"{a - 1:+.1%}" for a in alphas)
                        end = f", b {noises[-1] - 1:+.1%}" if learn_noise else ""
                        print(
                            f"{args.set} {split}, {depth} hidden, {prior}, {what}, seed {seed}: α off by {path}{end}; "
                            f"{time.perf_counter() - start:.1f} s",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
