r"""Posterior samples by sample-then-optimise, and the mode of the linear model.

A zero-mean posterior sample is the minimiser of (thesis §4.2.2, eq. 4.16–4.24)

    L(ζ)  = ½ ‖E − Φζ‖²_B + ½ ‖ζ − θ⁰‖²_A,                        E ~ N(0, B⁻¹), θ⁰ ~ N(0, A⁻¹)
    L'(ζ) = ½ ‖Φζ‖²_B − ⟨u, ζ⟩ + ½ ‖ζ − θ⁰‖²_A,     u = ΦᵀB E = Φᵀ B^{1/2} z ~ N(0, M)

which have the same minimiser `ζ = H⁻¹(u + Aθ⁰) ~ N(0, H⁻¹)`; only `B E = B^{1/2} z` is needed, so `B` may be
singular. In `L'` the noise enters in full at every step, and a mini-batch adds none of its own.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.features import GGN, Features, ScaledFeatures, WhiteNoise
from laplace_sampling.linear_model.priors import GaussianPrior
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution, Solver

__all__ = ["Draws", "LinearModel", "ModeObjective", "Sampler", "SeededNoise", "linear_model_mode", "sample_posterior"]

# Data whose noise is generated together, and the most numbers of a sample. Part of what a seed means: do not change it
# lightly.
_BLOCK, _NUMBERS = 256, 2**16


def _normal(shape: tuple[int, ...], *key: int) -> Tensor:
    """Standard normal numbers that depend on the key alone: not on device, default dtype or global generators."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)[0]
    generator = torch.Generator("cpu").manual_seed(int(state) & (2**63 - 1))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


class SeededNoise(WhiteNoise):
    """Standard normal `z`, `[K, N, C]`, made as needed: that of sample `k` and datum `i` depends on the seed alone."""

    def __init__(self, num_samples: int, num_outputs: int, seed: int, stream: int, first: int = 0) -> None:
        self.num_samples, self.num_outputs, self.first = num_samples, num_outputs, first
        self.seed, self.stream = seed, stream
        self.rows = max(1, min(_BLOCK, _NUMBERS // num_outputs))
        self._last: tuple[int, Tensor] | None = None

    def _block(self, number: int) -> Tensor:
        if self._last is None or self._last[0] != number:
            shape = (self.rows, self.num_outputs)
            samples = range(self.first, self.first + self.num_samples)
            rows = [_normal(shape, self.seed, self.stream, k, number) for k in samples]
            self._last = (number, torch.stack(rows))
        return self._last[1]

    def parts(self, rows: int) -> list["SeededNoise"]:
        starts = range(0, self.num_samples, rows)
        return [
            SeededNoise(min(rows, self.num_samples - k), self.num_outputs, self.seed, self.stream, self.first + k)
            for k in starts
        ]

    def __call__(self, batch: Tensor) -> Float[Tensor, "K n C"]:
        blocks = batch // self.rows
        out = torch.empty(self.num_samples, len(batch), self.num_outputs, dtype=torch.float32, device="cpu")
        for number in blocks.unique().tolist():
            here = blocks == number
            out[:, here] = self._block(number)[:, batch[here] % self.rows]
        return out


@dataclass(frozen=True)
class Draws:
    """The frozen randomness of `K` samples: white noise for the prior and for the data, of one seed.

    Sample `k` does not depend on how many there are, nor on the batch size. Streams of one seed are independent.
    These are the samples from the number `first` on.
    """

    num_samples: int
    seed: int
    stream: int = 0
    first: int = 0

    def groups(self, rows: int) -> "list[Draws]":
        """The same draws, at most so many at a time."""
        starts = range(0, self.num_samples, rows)
        return [replace(self, num_samples=min(rows, self.num_samples - k), first=self.first + k) for k in starts]

    def prior(self, size: int) -> Float[Tensor, "K P"]:
        """Standard normal weights."""
        samples = range(self.first, self.first + self.num_samples)
        return torch.stack([_normal((size,), self.seed, 2 * self.stream, k) for k in samples])

    def noise(self, num_outputs: int) -> SeededNoise:
        """Standard normal noise of the data."""
        return SeededNoise(self.num_samples, num_outputs, self.seed, 2 * self.stream + 1, self.first)


@dataclass(frozen=True)
class LinearModel:
    r"""The tangent model on the training data, `h(θ, x_i) = o_i + φ_i θ`.

    Attributes:
        features: `Φ`.
        offset: `o`, `[N, C]`: `f(w̄, x) − φ(x) w̄` ("affine") or zero ("homogeneous").
        network_outputs: `f(w̄, x_i)`, `[N, C]`.
        targets: `y`.
        likelihood: of the targets given the outputs.
    """

    features: Features
    offset: Float[Tensor, "N C"]
    network_outputs: Float[Tensor, "N C"]
    targets: Tensor
    likelihood: Likelihood

    def outputs(self, theta: Float[Tensor, "K P"]) -> Float[Tensor, "K N C"]:
        """`h(θ_k, x_i)` for all data."""
        return self.offset + self.features.outputs(theta)

    def with_likelihood(self, likelihood: Likelihood) -> "LinearModel":
        return replace(self, likelihood=likelihood)

    def ggn(self, outputs: Float[Tensor, "N C"]) -> GGN:
        """The GGN with curvature taken at the given outputs."""
        return GGN(self.features, self.likelihood, outputs, self.targets)


class ModeObjective(Objective):
    """`Σ_i ℓ(y_i, h(θ, x_i)) + ½‖θ‖²_A` in the scaled coordinates of a prior."""

    def __init__(self, model: LinearModel, prior: GaussianPrior) -> None:
        self.model = replace(model, features=ScaledFeatures(model.features, prior.scale))
        self.num_data = model.features.num_data
        self.precision = prior.spread()

    def _outputs(self, theta: Tensor, batch: Tensor) -> Tensor:
        return self.model.offset[batch] + self.model.features.jvp(theta, batch)

    def value(self, theta: Tensor) -> float:
        fit = sum(
            float(self.model.likelihood.loss(self._outputs(theta, batch), self.model.targets[batch]).double().sum())
            for batch in self.model.features.chunks()
        )
        return fit + 0.5 * float((self.precision * theta.double() ** 2).sum())

    def gradient(self, theta: Tensor, batch: Tensor | None) -> Tensor:
        total = torch.zeros_like(theta)
        for chunk in self.model.features.chunks(batch):
            slope = self.model.likelihood.gradient(self._outputs(theta, chunk), self.model.targets[chunk])
            total += self.model.features.vjp(slope, chunk)
        weight = 1.0 if batch is None else self.num_data / len(batch)
        return weight * total + self.precision * theta

    def curvature(self, theta: Tensor) -> GGN:
        return self.model.ggn(self.model.outputs(theta)[0])


def linear_model_mode(
    model: LinearModel,
    prior: GaussianPrior,
    solver: Solver,
    init: Float[Tensor, "1 P"] | None = None,
    *,
    description: str | None = None,
) -> Minimum:
    r"""`θ̄ = argmin_θ Σ_i ℓ(y_i, h(θ, x_i)) + ½‖θ‖²_A`, with `½` (erratum E1 of the thesis; eq. 2.7).

    `init` and the result's `value`, `[1, P]`, are in the scaled coordinates `θ/s` of the prior. It starts at zero, not
    at the trained weights: then it stays in the range of `A⁻¹Φᵀ`, where the mode is.
    """
    if init is None:
        init = torch.zeros(1, model.features.size, device=model.features.device, dtype=model.features.dtype)
    return solver.minimise(ModeObjective(model, prior), init, description=description)


class Sampler(Solver):
    """A solver that takes the noise `z` of the data itself, of which a `Quadratic` has only `ΦᵀL z`."""

    @abstractmethod
    def sample(
        self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Float[Tensor, "K P"] | None = None
    ) -> Solution:
        """What `sample_posterior` gives."""


def sample_posterior(
    ggn: GGN,
    prior: GaussianPrior,
    draws: Draws,
    solver: Solver,
    *,
    init: Float[Tensor, "K P"] | None = None,
    description: str | None = None,
) -> Solution:
    r"""Zero-mean posterior samples `ζ ~ N(0, (M + A)⁻¹)` in the scaled coordinates `ζ/s` of the prior.

    Args:
        ggn: `M`, unscaled.
        prior: `A`.
        draws: the frozen noise; the same draws give the same samples whatever the solver.
        solver: what minimises the objective. A `Sampler` samples its own way.
        init: warm start `δ = ζ − θ⁰`, in scaled coordinates; zero by default, which is the prior sample.
        description: label of a progress bar; none by default.
    """
    if isinstance(solver, Sampler):
        return solver.sample(ggn, prior, draws, init)
    scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
    spread = prior.spread()
    centre = draws.prior(ggn.size).to(ggn.device, ggn.dtype) / spread.sqrt()
    noise = draws.noise(ggn.features.num_outputs)
    linear = scaled.root_matmul(noise)
    return solver.solve(Quadratic(scaled, spread, centre, linear), init, description=description)
