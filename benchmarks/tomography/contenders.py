"""What gives an image error bars: the linearised network, its repairs, dropout, and a Gaussian process of pixels."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.fft import irfft2, rfft2
from torch import Tensor, nn

from benchmarks.tomography.networks import UNet, residuals, trained
from benchmarks.tomography.problems import Problem
from benchmarks.tomography.scores import Estimate
from laplace_sampling import FilterwisePrior, Gaussian, LinearisedLaplace
from laplace_sampling import Prior as WeightPrior

# Channels of noise as an input.
_NOISE_CHANNELS = 8


@dataclass(frozen=True)
class Settings:
    """Settings of networks, their training and samples.

    Attributes:
        scales, width, norm, sigmoid: of the U-Net.
        smoothness: factor of the total variation.
        steps, rate: of Adam.
        samples: `K`.
        prior: of the linearised network.
        method: of its fit.
    """

    scales: int = 3
    width: int = 16
    norm: bool = False
    sigmoid: bool = True
    smoothness: float = 1e-4
    steps: int = 1500
    rate: float = 1e-3
    samples: int = 256
    prior: str | WeightPrior = "g-prior"
    method: str = "auto"


@dataclass(frozen=True)
class Prior:
    """A trained network with its input."""

    net: nn.Module
    z: Tensor
    seconds: float

    @classmethod
    def of(
        cls, problem: Problem, settings: Settings, seed: int = 0, dropout: float = 0.0, noise: bool = False
    ) -> "Prior":
        """The network of a seed, whose input is the back-projection, or noise."""
        start = time.perf_counter()
        torch.manual_seed(seed)
        z = torch.as_tensor(problem.rough)[None, None]
        if noise:
            z = torch.randn(1, _NOISE_CHANNELS, problem.side, problem.side)
        net = UNet(z.shape[1], settings.scales, settings.width, settings.norm, settings.sigmoid, dropout)
        net = trained(net, z, problem, settings.smoothness, settings.steps, settings.rate)
        return cls(net, z, time.perf_counter() - start)

    @property
    def mean(self) -> np.ndarray:
        with torch.no_grad():
            return self.net(self.z)[0, 0].numpy()


def linearised(problem: Problem, prior: Prior, settings: Settings, noise: float | None = None) -> Estimate:
    """The linearised deep image prior; `noise` is the variance of the measurements, by default that of residuals."""
    start = time.perf_counter()
    noise = float(np.mean(residuals(prior.net, prior.z, problem)[0] ** 2)) if noise is None else noise
    likelihood = Gaussian(1 / noise, learn=False, observe=problem.T)
    la = LinearisedLaplace(
        prior.net, likelihood, prior=settings.prior, method=settings.method, num_samples=settings.samples
    )
    la.fit_hyperparameters([(prior.z, torch.as_tensor(problem.y)[None])], progress=False)
    fitted = time.perf_counter()
    deviations = la.predict(prior.z).deviations[:, 0, 0].numpy()
    facts = {
        "weights": sum(p.numel() for p in prior.net.parameters()),
        "seconds_training": prior.seconds,
        "seconds_fit": fitted - start,
        "seconds_samples": time.perf_counter() - fitted,
        "alpha": float(la.prior_precision_),
        "gamma": float(la.effective_dimension_.sum()),
        "converged": bool(la.converged_),
    }
    return Estimate(prior.mean, deviations, noise, facts)


def filterwise(settings: Settings, total_variation: float | None = None) -> FilterwisePrior:
    """A lengthscale for each resolution of the U-Net, down and up."""
    numbers = range(settings.scales - 1)
    blocks = ("first", *(f"down.{n}" for n in numbers), *(f"up.{n}" for n in numbers))
    return FilterwisePrior(blocks=blocks, total_variation=total_variation)


def dropout(problem: Problem, prior: Prior, settings: Settings, noise: float) -> Estimate:
    """The mean and deviations of passes with other units left out."""
    start = time.perf_counter()
    prior.net.train()
    with torch.no_grad():
        draws = torch.stack([prior.net(prior.z)[0, 0] for _ in range(settings.samples)]).numpy()
    mean = draws.mean(0)
    facts = {"seconds_training": prior.seconds, "seconds_samples": time.perf_counter() - start}
    return Estimate(mean, draws - mean, noise, facts)


def with_spread(estimate: Estimate, others: Sequence[np.ndarray], factor: float) -> Estimate:
    """The estimate about the mean of some reconstructions, whose `factor Σ (g_m − ḡ)(g_m − ḡ)ᵀ` is added."""
    mean = np.mean(others, 0)
    random = np.random.default_rng(0).standard_normal((len(estimate.deviations), len(others)))
    added = np.tensordot(random, np.stack(others) - mean, 1) * factor**0.5
    return replace(estimate, mean=mean, deviations=estimate.deviations + added)


def pixel_process(problem: Problem, settings: Settings, noise: float) -> Estimate:
    """A Gaussian process of pixels with kernel `a exp(−r/ψ)` of the largest evidence, and constant mean zero.

    The kernel is that of a torus of twice the side, so that products with it, and draws, are Fourier transforms.
    """
    start, side, (c, _) = time.perf_counter(), problem.side, problem.T.shape
    size, T = 2 * side, problem.T
    distance = np.minimum(np.arange(size), size - np.arange(size))
    radius = np.hypot(distance[:, None], distance)

    def filtered(images: np.ndarray, spectrum: np.ndarray) -> np.ndarray:
        return irfft2(rfft2(images, (size, size)) * spectrum, (size, size))[..., :side, :side]

    def observed(spectrum: np.ndarray) -> np.ndarray:
        """`T K`, `[c, side²]`."""
        rows = [T[part].toarray().reshape(-1, side, side) for part in np.array_split(np.arange(c), -(-c // 64))]
        return np.concatenate([filtered(part, spectrum).reshape(len(part), -1).astype(np.float32) for part in rows])

    best = (-np.inf, 0.0, 0.0)
    spectra = {psi: rfft2(np.exp(-radius / psi)).real.clip(0) for psi in (side * np.array([0.03, 0.1, 0.3, 1, 3]))}
    for psi, spectrum in spectra.items():
        values, vectors = np.linalg.eigh((T @ observed(spectrum).T).astype(np.float64))
        squares, values = (vectors.T @ problem.y.astype(np.float64)) ** 2, values.clip(0)
        for a in np.geomspace(1e-3, 10, 33):
            variances = a * values + noise
            best = max(best, (-0.5 * float((squares / variances + np.log(variances)).sum()), psi, a))
    evidence, psi, a = best
    TK = a * observed(spectra[psi])
    factor = np.linalg.cholesky((T @ TK.T).astype(np.float64) + noise * np.eye(c))
    random = np.random.default_rng(0)
    white = random.standard_normal((settings.samples, size, size))
    draws = irfft2(rfft2(white) * np.sqrt(a * spectra[psi]), (size, size))[:, :side, :side].reshape(
        settings.samples, -1
    )
    seen = T @ draws.T + noise**0.5 * random.standard_normal((c, settings.samples))
    solved = np.linalg.solve(factor.T, np.linalg.solve(factor, np.column_stack([problem.y, seen])))
    means = (TK.T @ solved).T
    deviations = (draws - means[1:]).reshape(-1, side, side)
    facts = {"seconds_fit": time.perf_counter() - start, "psi": float(psi), "a": float(a), "evidence": evidence}
    return Estimate(means[0].reshape(side, side), deviations, noise, facts)
