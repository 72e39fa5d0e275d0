"""The methods, each from a study to predictions, and their scores.

All start at the same trained network. Hamiltonian Monte Carlo and stochastic gradients have the prior and the noise of
our posterior; the others find theirs.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comparison.methods import METHODS
from benchmarks.comparison.metrics import score
from benchmarks.comparison.ours import BATCH, common
from benchmarks.comparison.predictions import Fitted, Prediction, Regressed
from benchmarks.posteriors import chains, variational
from benchmarks.posteriors.features import feature_process
from benchmarks.posteriors.layers import DRAWS, by_draws
from benchmarks.posteriors.studies import Study

# Of the targets whose joint log-likelihood is taken; and of inputs at which moments are stored.
GROUP, STORED = 10, 100
INDUCING, TRAINED_STARTS, PRIOR_STARTS = 100, 2, 2
# The variance of the noise with which the bound of inducing points starts: from a smaller one it is slower.
FIRST_NOISE = 0.01
# Of stochastic gradients, in units of the variance of the noise by the number of data: that of the mean squared error.
LANGEVIN_STEP = 0.1


def ours(study: Study) -> Fitted:
    la = study.fit()  # for the clock

    def predict(x: Tensor) -> Prediction:
        return common([la.predict(batch) for batch in x.split(BATCH)])

    details = {"prior_precision": study.precision, "noise": study.noise}
    return Fitted(predict, details=details | {"score": float(la.score()), "loo": float(la.score("loo"))})


def feature_kernel(joint: bool) -> Callable[[Study], Fitted]:
    def contender(study: Study) -> Fitted:
        network = study.problem.network
        assert isinstance(network, nn.Sequential)
        x, y = study.problem.data.train.x, study.problem.data.train.y
        return feature_process(network, x, y, joint, study.effort.processes, study.problem.seed)

    return contender


def mean_field(study: Study) -> Fitted:
    posterior = variational.MeanField(study.layers, study.weights, study.noise)
    return variational.fitted(posterior, study.x, study.y, study.effort.mean_field, study.generator)


def global_inducing(study: Study) -> Fitted:
    generator = study.generator
    rows = torch.randperm(len(study.y), generator=generator)[:INDUCING]
    posterior = variational.GlobalInducing(study.layers, study.x[rows], study.y[rows], study.weights, FIRST_NOISE)
    return variational.fitted(posterior, study.x, study.y, study.effort.inducing, generator)


def sgld(study: Study) -> Fitted:
    x, y, layers, noise = study.x, study.y, study.layers, study.noise

    def loss(weights: Tensor, rows: Tensor) -> Tensor:
        return 0.5 * (y[rows] - layers(weights[None], x[rows])).square().sum() / noise

    step = LANGEVIN_STEP * noise / len(y)
    draws = chains.sgld(loss, study.precision, study.weights, len(y), step, study.effort.epochs, DRAWS, study.generator)
    moved = float((draws[-1] - study.weights).square().mean().sqrt()) * study.precision**0.5
    return by_draws(lambda at: layers(draws, at), noise, moved=moved)


def hmc(study: Study) -> Fitted:
    """Two chains from the trained weights, two from the prior; R̂ is the largest of the predictions of test data."""
    x, y, layers, noise, generator = study.x, study.y, study.layers, study.noise, study.generator

    def potential(weights: Tensor) -> Tensor:
        misfit = (y - layers(weights, x)).square().sum(1) / noise
        return 0.5 * (misfit + study.precision * weights.square().sum(1))

    def whiten(weights: Tensor) -> chains.Root:
        of_one = torch.func.jacrev(lambda w: layers(w[None], x)[0])
        return chains.tangent_root(torch.stack([of_one(w) for w in weights]), noise, study.precision)

    prior = torch.randn(PRIOR_STARTS, len(study.weights), generator=generator, dtype=torch.float64)
    starts = torch.cat([study.weights.expand(TRAINED_STARTS, -1), prior / study.precision**0.5])
    found = chains.hmc(potential, starts, study.effort.trajectories, generator, whiten)
    draws = found.draws[:, :: study.effort.thinning]
    chosen = torch.linspace(0, draws.shape[1] - 1, max(1, DRAWS // len(draws))).long()

    def outputs(of: Tensor, at: Tensor) -> Tensor:
        return torch.stack([layers(chain, at.double()) for chain in of])

    def predict(at: Tensor) -> Prediction:
        """Moments are those of all draws; the mixture is of as many as other methods have."""
        values = outputs(draws, at)
        mean, variance = values.mean((0, 1)), values.flatten(0, 1).var(0)
        return Regressed(mean, variance + noise, values[:, chosen].flatten(0, 1), noise)

    data, details = study.problem.data, {}
    for name, at in {"": data.test.x, **{f"_{k}": part.x for k, part in data.shifts.items()}}.items():
        values = outputs(draws, at)
        details[f"r_hat{name}"] = float(chains.split_r_hat(values).max())
        details[f"r_hat_median{name}"] = float(chains.split_r_hat(values).median())
        details[f"r_hat_trained{name}"] = float(chains.split_r_hat(values[:TRAINED_STARTS]).max())
        # How far the chains of the trained weights are from those of the prior: whether one mode is enough.
        parts = [values[:TRAINED_STARTS].flatten(0, 1), values[TRAINED_STARTS:].flatten(0, 1)]
        details[f"stddev_trained{name}"], details[f"stddev_prior{name}"] = (float(v.std(0).mean()) for v in parts)
    details |= {"acceptance": found.acceptance.tolist(), "step": found.step.tolist(), "draws": draws.shape[1]}
    return Fitted(predict, details=details)


def shared(name: str) -> Callable[[Study], Fitted]:
    """A method of the comparison."""
    return lambda study: METHODS[name].fit(study.problem)


CONTENDERS: dict[str, Callable[[Study], Fitted]] = {
    "MAP": shared("MAP"),
    "ours": ours,
    "ours, validation": shared("ours, validation"),
    "ours, last layer": shared("ours, last layer"),
    "GP on frozen features": feature_kernel(joint=False),
    "GP on features trained jointly": feature_kernel(joint=True),
    "mean field": mean_field,
    "global inducing": global_inducing,
    "SGLD": sgld,
    "ensemble of 5": shared("ensemble of 5"),
    "HMC (reference)": hmc,
}
# On sets of more data chains take too long; scores of networks are those of these methods.
WITH_CHAINS = ("yacht", "energy", "cubic", "made up")
RANKING = ("ours", "GP on frozen features", "GP on features trained jointly", "mean field", "global inducing")


def contenders(study: Study) -> list[str]:
    if study.key["part"] == "ranking":
        return list(RANKING)
    return [name for name in CONTENDERS if name != "HMC (reference)" or study.key["set"] in WITH_CHAINS]


def result(study: Study, name: str) -> dict[str, Any]:
    """Scores in original units, moments of the function at some inputs in standard ones, and the time of the fit."""
    _ = study.weights, study.precision  # found before the clock starts
    start = time.perf_counter()
    fitted = CONTENDERS[name](study)
    found: dict[str, Any] = {"details": fitted.details, "seconds": time.perf_counter() - start}
    for where, part in {"test": study.problem.data.test, **study.problem.data.shifts}.items():
        p, y = fitted.predict(part.x), part.y.flatten()
        assert isinstance(p, Regressed)
        scores = score(p, y, study.problem.seed)
        shift = float(torch.tensor(study.scale).log())
        found[where] = {
            # A Gaussian's for processes, that of a mixture of draws for others.
            "ll": scores["joint_1"] - shift,
            "joint": scores["joint_2"] - GROUP * shift,
            "rmse": scores["rmse"] * study.scale,
            "coverage": scores["coverage"],
            "mean": p.mean[:STORED].tolist(),
            "stddev": (p.variance - p.noise_variance).clamp_min(0).sqrt()[:STORED].tolist(),
        }
    return found
