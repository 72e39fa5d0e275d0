r"""The smallest prior precision that costs held-out data at most 0.001 nats each, with a temperature or the noise.

For labels `p = (1/2K) Σ_k Σ_± σ((f ± z_k)/T)`, `z ~ N(0, V(α))`, and the best temperature `T` is found for each `α`
that is tried: a part of the data at precisions a decade apart says where to look, and all data decide. So they do with
other likelihoods, which have no temperature. For a Gaussian likelihood every precision of the path is tried. The
covariance is `V₁(ρ)/b` with `ρ = α/b` and `V₁` that of unit noise, so that the likeliest noise precision `b` is a
closed form for each `ρ`. Few data would choose it by chance, and so error bars of nothing: what the training data say
of the noise counts as ten targets, and `log ρ` has half a normal prior, of standard deviation 2, above what the
evidence of the network says.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.distributions import Normal

from laplace_sampling.likelihoods.gaussian import Gaussian, log_density
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.bounds import NOISE_BOUNDS, Bounds, clamped
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.some_features import SomeFeatures
from laplace_sampling.predictions.calibration import (
    LOG_SCALE,
    NOISE_WORTH,
    Calibration,
    believed_variance,
    calibrate,
    labelled,
    own_temperature,
)
from laplace_sampling.predictions.covariance_path import CovariancePath, function_draws
from laplace_sampling.predictions.selection import (
    PER_DECADE,
    SearchCost,
    Selected,
    Selection,
    grid,
    nearest,
    search_cost,
)

# Draws of the function for each datum, each with its opposite.
_DRAWS = 16
# Precisions that are tried, typically: by all data, and before by a part of them.
_TRIED, _TRIED_FIRST = 7, 6
# Nats a datum by which a part of the data is less likely than at its best where no smaller precision is tried.
_FAR = 0.05
# Nats a datum that error bars may cost (`docs/decisions.md`): a third of it brings half as much for
# telling other data, three times as much costs up to 0.006 nats of test data.
_PRICE = 0.001


@dataclass(frozen=True)
class Validation(Selection):
    """The smallest prior precision, with its best temperature or noise, that costs held-out data hardly anything.

    Attributes:
        model: the tangent model on the held-out data.
        noise_bounds: within which the noise precision is kept.
    """

    name = "validation"
    model: LinearModel
    noise_bounds: Bounds = NOISE_BOUNDS

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
    ) -> Selected:
        # One product with all of these data: an infinite variance would leave no precision to try.
        check_finite(
            self.model.network_outputs,
            torch.tensor(path.prior_variance(self.model.features, Draws(1, seed, Stream.VALIDATION))),
        )
        alphas, products = grid(path, self.model.features, bounds), float(self.model.features.num_data)
        if isinstance(model.likelihood, Gaussian):
            alpha, likelihood, calibration = self._of_regression(model.likelihood, model, path, alphas, weight_norm)
            products += self.model.features.num_data * self.model.features.num_outputs
        else:
            alpha, calibration, spent = self._of_labels(path, alphas, Draws(_DRAWS, seed, Stream.VALIDATION), near)
            likelihood, products = model.likelihood, products + spent
        return Selected(
            alpha,
            likelihood,
            calibration,
            path.effective_dimension(alpha),
            passes=products / (2 * model.features.num_data),
        )

    def _of_labels(
        self, path: CovariancePath, alphas: Tensor, draws: Draws, near: float | None
    ) -> tuple[float, Calibration, float]:
        """`α`, temperature, and what they took."""
        features = self.model.features
        calibrated, everything = self._calibrated_of(), torch.arange(features.num_data)
        drawn = function_draws(path, features, alphas, draws)
        calibration = cache(lambda index: calibrated(drawn(index), everything))
        start, products = self._start(path, alphas, draws, calibrated) if near is None else (nearest(alphas, near), 0.0)
        price = _PRICE * features.num_data
        best = _widest(lambda index: _found(calibration(index)), start, len(alphas), price)
        spent = search_cost(features, features.num_data, _DRAWS, calibration.cache_info().currsize)
        return float(alphas[best]), calibration(best), products + spent.jvps + spent.vjps

    def _calibrated_of(self) -> Callable[[Tensor, Tensor], Calibration]:
        """What some of the data say of draws there, with the likeliest temperature of labels."""
        held_out, own = self.model, 1.0
        likelihood, y, f = held_out.likelihood, held_out.targets, held_out.network_outputs
        if labelled(likelihood) is not None:
            own = own_temperature(likelihood, y, f)
        return lambda deviations, some: calibrate(likelihood, y[some], f[some], deviations, ("temperature",), own)

    def _start(
        self, path: CovariancePath, alphas: Tensor, draws: Draws, calibrated: Callable[[Tensor, Tensor], Calibration]
    ) -> tuple[int, float]:
        """The widest error bars of precisions a decade apart, by a part of the data, and what that took."""
        part, coarse = _part(self.model.features.num_data), _decades(len(alphas))
        features = SomeFeatures(self.model.features, part)
        drawn = function_draws(path, features, alphas[coarse], draws)
        start, best, tried = 0, -math.inf, 0
        for number, index in enumerate(coarse):
            found, tried = _found(calibrated(drawn(number), part)), tried + 1
            best = max(best, found)
            if found >= best - _PRICE * len(part):
                start = index
            elif found < best - _FAR * len(part):
                break
        spent = search_cost(features, len(part), _DRAWS, tried)
        return start, spent.jvps + spent.vjps

    def _of_regression(
        self, likelihood: Gaussian, model: LinearModel, path: CovariancePath, alphas: Tensor, weight_norm: float
    ) -> tuple[float, Likelihood, Calibration]:
        """`α` and `b` of the widest `N(f, (b₀V(α₀; b₀) + I)/b)`, `α = α₀ b/b₀`, within the price."""
        error = (self.model.targets.reshape(self.model.network_outputs.shape) - self.model.network_outputs).double()
        # An output without a target has an error of zero and independent noise, whose density is taken away again.
        given = ~error.isnan()
        error, num = error.where(given, 0), int(given.sum())
        before, eye = float(likelihood.noise_precision), torch.eye(error.shape[1]).to(error)
        expected, variance = self._expected(likelihood, model, path, alphas, weight_norm)

        def noise_of(squares: float) -> float:
            if not likelihood.learn:
                return before
            return clamped(1 / max(believed_variance(variance, squares, num), 1e-300), self.noise_bounds)

        tried: list[tuple[float, float, float, Tensor]] = []
        for alpha, covariance in zip(alphas.tolist(), path.covariances(self.model.features, alphas), strict=True):
            unit = (before * covariance).where(given[:, :, None] & given[:, None], 0) + eye
            noise = noise_of(float((torch.linalg.solve(unit, error[..., None])[..., 0] * error).sum()))
            log_probs = log_density(error.where(given, torch.nan), unit / noise)
            believed = float(log_probs.sum())
            if likelihood.learn:  # with the prior of the noise, and of error bars that are narrower than expected
                believed += 0.5 * NOISE_WORTH * (math.log(noise) - noise * variance)
                believed -= 0.5 * (max(0.0, math.log(alpha / expected)) / LOG_SCALE) ** 2
            tried.append((alpha * noise / before, noise, believed, log_probs))
        least = max(believed for _, _, believed, _ in tried) - _PRICE * len(error)
        alpha, noise, _, log_probs = [found for found in tried if found[2] >= least][-1]
        alone = Normal(0.0, noise_of(float(error.square().sum())) ** -0.5).log_prob(error).where(given, 0).sum(1)
        fitted = likelihood.with_precision(torch.tensor(noise)) if likelihood.learn else likelihood
        return alpha, fitted, Calibration().scored("held out", log_probs, alone)

    @staticmethod
    def _expected(
        likelihood: Gaussian, model: LinearModel, path: CovariancePath, alphas: Tensor, weight_norm: float
    ) -> tuple[float, float]:
        """`α₀` of the grid and noise variance that the training data say, by the evidence of the network itself.

        As in `evidence.network_evidence`: `α‖w̄‖² = γ` with `b = N·C/(Σ(y − f)² + ρ‖w̄‖²)`, `ρ = α/b`.
        """
        num, before = model.num_observations, float(likelihood.noise_precision)
        squares = float(model.squared_errors(model.network_outputs).sum())
        dimensions = [path.effective_dimension(alpha) for alpha in alphas.tolist()]

        def distance(index: int) -> float:
            energy = float(alphas[index]) / before * weight_norm
            return abs(math.log(max(dimensions[index], 1e-300) * (squares + energy) / max(num * energy, 1e-300)))

        index = min(range(len(alphas)), key=distance)
        # Of a network that meets its data exactly nothing is left to tell the noise: a hundredth stays free.
        return float(alphas[index]), squares / max(num - dimensions[index], 0.01 * num)


def validation_cost(features: Features, num_data: int, likelihood: Likelihood, *, rough: bool = True) -> SearchCost:
    """What the rule is predicted to take with so many held-out data.

    It tries up to a decade of precisions that are about as likely, and one to each side, beside those that it passes.
    """
    rows = isinstance(likelihood, Gaussian)
    found = search_cost(features, num_data, _DRAWS, _TRIED, rows=rows)
    if not rough:
        return found
    first = search_cost(features, len(_part(num_data)), _DRAWS, _TRIED_FIRST, rows=rows)
    return SearchCost(found.jvps + first.jvps, found.vjps + first.vjps, found.vectors + first.vectors)


def _part(num_data: int) -> Tensor:
    """Indices of the data that say where to look: a third of them, and all of a few."""
    return torch.arange(0, num_data, min(3, max(1, num_data // 32)))


def _decades(number: int) -> list[int]:
    """Indices of a grid of precisions that are a decade apart, and the last one."""
    found = list(range(0, number, PER_DECADE))
    return found if found[-1] == number - 1 else [*found, number - 1]


def _widest(log_likelihood: Callable[[int], float], start: int, number: int, price: float) -> int:
    """The index of the smallest precision, of so many from large to small, that is hardly less likely than the best.

    From the start it climbs to larger precisions while these are more likely, and then goes to smaller ones while they
    are within a price of the best that was passed. Steps up count however little they gain: a search that starts where
    another one ended, a price below the best, would else take its start for the best, and end a price further down.
    """
    best = start
    while best > 0 and log_likelihood(best - 1) > log_likelihood(best):
        best -= 1
    largest = log_likelihood(best)
    while best + 1 < number and log_likelihood(best + 1) >= largest - price:
        best += 1
        largest = max(largest, log_likelihood(best))
    return best


def _found(calibration: Calibration) -> float:
    """The log-likelihood of a calibration that has one."""
    assert calibration.log_likelihood is not None
    return calibration.log_likelihood


def check_finite(*found: Tensor) -> None:
    """Raise if what is predicted of held-out data is not finite."""
    if not all(bool(values.isfinite().all()) for values in found):
        raise ValueError(
            "The outputs of the model on the data of `val_loader`, or their error bars, contain NaN or infinity: "
            "check these data, or leave them out."
        )
