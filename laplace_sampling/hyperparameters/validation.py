r"""The smallest prior precision that costs held-out data at most 0.001 nats each, with a temperature or the noise.

For labels `p = (1/2K) Σ_k Σ_± σ((f ± z_k)/T)`, `z ~ N(0, V(α))`, and the best temperature `T` is found for each `α`
that is tried: precisions a decade apart say where to look. Other likelihoods have no temperature.

For a Gaussian likelihood every precision of the path is tried. The covariance is `V₁(ρ)/b` with `ρ = α/b` and `V₁` that
of unit noise, so that the likeliest noise precision `b` is a closed form for each `ρ`. Few data would choose it by
chance, and so error bars of nothing: what the training data say of the noise counts as ten targets, and `log ρ` has
half a normal prior, of standard deviation 2, above what the evidence of the network says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from laplace_sampling.hyperparameters.covariance_path import CovariancePath, function_draws
from laplace_sampling.hyperparameters.hyperparameters import NOISE_BOUNDS, Bounds, Hyperparameters, clamped, in_one_step
from laplace_sampling.hyperparameters.rules import (
    PER_DECADE,
    SearchCost,
    Selection,
    grid,
    nearest,
    search_cost,
)
from laplace_sampling.likelihoods.gaussian import Gaussian, log_density
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.held_out import check_finite
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.predictions.calibration import (
    LOG_SCALE,
    NOISE_WORTH,
    Calibration,
    believed_variance,
    calibrate,
    labelled,
    own_temperature,
)


@dataclass(frozen=True)
class Validation(Selection):
    """The smallest prior precision, with its best temperature or noise, that costs held-out data hardly anything.

    Attributes:
        model: the tangent model on the held-out data at which the function is drawn.
        rest: of labels, targets and outputs of the network at other held-out data, which cost no draws (`calibrate`).
        noise_bounds: within which the noise precision is kept.
        price: nats a datum that error bars may cost. A third of it brings half as much for telling other data, three
            times as much costs up to 0.006 nats of test data.
    """

    # Draws of the function for each datum, each with its opposite.
    DRAWS: ClassVar[int] = 16

    name = "validation"
    model: LinearModel
    noise_bounds: Bounds = NOISE_BOUNDS
    price: float = 0.001
    rest: tuple[Tensor, Tensor] | None = None

    def cost(self, features: Features, *, rough: bool = True) -> SearchCost:
        return validation_cost(self.model.features, self.model.features.num_data, self.model.likelihood, rough=rough)

    def select(
        self,
        model: LinearModel,
        path: CovariancePath,
        bounds: tuple[float, float],
        seed: int,
        weight_norm: float,
        near: float | None = None,
    ) -> Hyperparameters:
        features, draws = self.model.features, Draws(self.DRAWS, seed, Stream.VALIDATION)
        # An infinite variance would leave no precision to try.
        check_finite(torch.tensor(path.prior_variance(features, Draws(1, seed, Stream.VALIDATION))))
        alphas, likelihood = grid(path, features, bounds), model.likelihood
        if isinstance(likelihood, Gaussian):
            alpha, likelihood, calibration = self._of_regression(likelihood, model, path, alphas, weight_norm)
            spent = search_cost(features, features.num_data, self.DRAWS, len(alphas), rows=True)
        else:
            start = None if near is None else nearest(alphas, near)
            alpha, calibration, spent = self._of_labels(path, alphas, draws, start)
        products = features.num_data + spent.jvps + spent.vjps
        return in_one_step(
            model,
            path.prior,
            alpha,
            likelihood,
            effective_dimension=path.effective_dimension(alpha),
            passes=products / (2 * model.features.num_data),
            criterion=self.name,
            calibration=calibration,
        )

    def _of_labels(
        self, path: CovariancePath, alphas: Tensor, draws: Draws, start: int | None
    ) -> tuple[float, Calibration, SearchCost]:
        """`α`, what the data say at it with the likeliest temperature of labels, and what the search took."""
        features, likelihood = self.model.features, self.model.likelihood
        y, f = self.model.targets, self.model.network_outputs
        if self.rest is not None:
            y, f = (torch.cat(pair) for pair in zip((y, f), self.rest, strict=True))
        lowest = 1.0 if labelled(likelihood) is None else own_temperature(likelihood, y, f)
        drawn = function_draws(path, features, alphas, draws)

        @cache
        def calibration(index: int) -> Calibration:
            return calibrate(likelihood, y, f, drawn(index), ("temperature",), lowest)

        def log_likelihood(index: int) -> float:
            found = calibration(index).log_likelihood
            assert found is not None
            return found

        best = _widest(log_likelihood, len(alphas), self.price * len(f), start)
        tried = calibration.cache_info().currsize
        return float(alphas[best]), calibration(best), search_cost(features, features.num_data, self.DRAWS, tried)

    def _of_regression(
        self, likelihood: Gaussian, model: LinearModel, path: CovariancePath, alphas: Tensor, weight_norm: float
    ) -> tuple[float, Gaussian, Calibration]:
        """`α` and `b` of the widest `N(f, (b₀V(α₀; b₀) + I)/b)`, `α = α₀ b/b₀`, within the price."""
        outputs, before = self.model.network_outputs, float(likelihood.noise_precisions())
        missing = (self.model.targets.reshape(outputs.shape) - outputs).double()
        given, error = ~missing.isnan(), missing.nan_to_num()
        num, eye = int(given.sum()), torch.eye(error.shape[1]).to(error)
        expected, variance = _by_network_evidence(likelihood, model, path, alphas, weight_norm)

        def noise_of(squares: float) -> float:
            if not likelihood.learn:
                return before
            return clamped(1 / max(believed_variance(variance, squares, num), 1e-300), self.noise_bounds)

        tried: list[tuple[float, float, float, Tensor]] = []
        for alpha, covariance in zip(alphas.tolist(), path.covariances(self.model.features, alphas), strict=True):
            # Outputs without a target have an error of zero and independent noise.
            unit = (before * covariance).where(given[:, :, None] & given[:, None], 0) + eye
            noise = noise_of(float((torch.linalg.solve(unit, error[..., None])[..., 0] * error).sum()))
            log_probs = log_density(missing, unit / noise)
            believed = float(log_probs.sum())
            if likelihood.learn:  # with the prior of the noise, and of error bars that are narrower than expected
                believed += 0.5 * NOISE_WORTH * (math.log(noise) - noise * variance)
                believed -= 0.5 * (max(0.0, math.log(alpha / expected)) / LOG_SCALE) ** 2
            tried.append((alpha * noise / before, noise, believed, log_probs))
        least = max(believed for _, _, believed, _ in tried) - self.price * len(error)
        alpha, noise, _, log_probs = [found for found in tried if found[2] >= least][-1]
        alone = log_density(missing, eye / noise_of(float(error.square().sum())))
        fitted = likelihood.with_precision(noise) if likelihood.learn else likelihood
        return alpha, fitted, Calibration().scored("held out", log_probs, alone)


def _by_network_evidence(
    likelihood: Gaussian, model: LinearModel, path: CovariancePath, alphas: Tensor, weight_norm: float
) -> tuple[float, float]:
    """`α₀` of the grid and noise variance that the training data say, by the evidence of the network itself.

    As in `hyperparameters.network_evidence`: `α‖w̄‖² = γ` with `b = N·C/(Σ(y − f)² + ρ‖w̄‖²)`, `ρ = α/b`.
    """
    num = model.num_observations
    squares = float(model.squared_errors(model.network_outputs).sum())
    gamma = torch.tensor([path.effective_dimension(alpha) for alpha in alphas.tolist()], dtype=torch.float64)
    energy = alphas / float(likelihood.noise_precisions()) * weight_norm
    distance = (gamma * (squares + energy)).clamp_min(1e-300).log() - (num * energy).clamp_min(1e-300).log()
    index = int(distance.abs().argmin())
    # Of a network that meets its data exactly nothing is left to tell the noise: a hundredth stays free.
    return float(alphas[index]), squares / max(num - float(gamma[index]), 0.01 * num)


def validation_cost(features: Features, num_data: int, likelihood: Likelihood, *, rough: bool = True) -> SearchCost:
    """What the rule is predicted to take with so many held-out data.

    It tries up to a decade of precisions that are about as likely, and one to each side, beside those that it passes:
    seven, and four more a decade apart unless it is known where to look.
    """
    return search_cost(features, num_data, Validation.DRAWS, 11 if rough else 7, rows=isinstance(likelihood, Gaussian))


def _widest(log_likelihood: Callable[[int], float], number: int, price: float, start: int | None = None) -> int:
    """The index of the smallest precision, of so many from large to small, that is hardly less likely than the best.

    It starts at the smallest of precisions a decade apart that is, if no start is given. From there it climbs to larger
    precisions while these are more likely, and then goes to smaller ones while they are within a price of the best that
    was passed. Steps up count however little they gain: a search that starts where another one ended, a price below the
    best, would else take its start for the best, and end a price further down.
    """
    if start is None:
        start, largest = 0, -math.inf
        for index in [*range(0, number - 1, PER_DECADE), number - 1]:
            found = log_likelihood(index)
            largest = max(largest, found)
            if found >= largest - price:
                start = index
            elif found < largest - 50 * price:  # so far from the best no smaller precision is tried
                break
    best = start
    while best > 0 and log_likelihood(best - 1) > log_likelihood(best):
        best -= 1
    largest = log_likelihood(best)
    while best + 1 < number and log_likelihood(best + 1) >= largest - price:
        best += 1
        largest = max(largest, log_likelihood(best))
    return best
