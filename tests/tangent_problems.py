"""Tangent models with dense features, and a matrix of a known spectrum."""

from dataclasses import replace

import torch
from cases import make_case
from torch import Tensor

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.as_prior import as_prior
from laplace_sampling.linear_model.priors.prior import GaussianPrior


def dense_model(name: str) -> LinearModel:
    model = make_case(name).linear_model()
    return replace(model, features=DenseFeatures.of(model.features))


def build(recipe: str, model: LinearModel, precision: float) -> GaussianPrior:
    layers = (["all"], torch.zeros(model.features.size, dtype=torch.long))
    ggn = model.ggn(model.network_outputs)
    return replace(as_prior(recipe), precision=precision).build(
        ggn, layers, Draws(64, 0, 1).noise(model.features.num_outputs)
    )


def rows_of(model: LinearModel, prior: GaussianPrior) -> Tensor:
    """`[N, C, P]` in the scaled coordinates of the prior."""
    return ScaledFeatures(model.features, prior.scale).rows(torch.arange(model.features.num_data))


def log_evidence(J: Tensor, y: Tensor, alpha: float, beta: float) -> float:
    """Log marginal likelihood of the Gaussian linear model, from its dense definition."""
    covariance = J @ J.T / alpha + torch.eye(len(J), dtype=J.dtype) / beta
    return float(torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y))


def random_spectrum(size: int = 300) -> tuple[GGN, Tensor]:
    g = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))[0]
    spectrum = 1e4 * torch.arange(1, size + 1, dtype=torch.float64) ** -1.5
    features = DenseFeatures((spectrum.sqrt()[:, None] * basis)[:, None])
    return GGN(features, Gaussian(1.0), torch.zeros(size, 1, dtype=torch.float64)), spectrum
