"""Scores of predictions: proper scores, calibration, detection of errors and of other data, joint log-likelihood."""

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import brier_score_loss, roc_auc_score
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmarks.comparison.predictions import Classified, Prediction, Regressed, log_mean_exp

KAPPAS, SHUFFLES, LEVEL = range(1, 6), 10, 0.9


def score(p: Prediction, y: Tensor, seed: int = 0) -> dict[str, float]:
    """All scores of predictions of targets `[N]`; NaN where one is not defined, such as without any error."""
    scores = _classified(p, y) if isinstance(p, Classified) else _regressed(p, y)
    if isinstance(p, Regressed) and p.gaussian:
        joint = [gaussian_joint_log_likelihood(p, y, kappa, seed) for kappa in KAPPAS]
    else:
        ell = label_log_likelihoods(p, y)
        joint = [joint_log_likelihood(ell, kappa, seed) for kappa in KAPPAS]
    return scores | {f"joint_{kappa}": value for kappa, value in zip(KAPPAS, joint, strict=True)}


def _classified(p: Classified, y: Tensor) -> dict[str, float]:
    probs, picked = p.log_probs.double().exp(), torch.arange(len(y))
    num_classes = probs.shape[-1]
    is_error = probs.argmax(-1) != y
    normed = probs / probs.sum(-1, keepdim=True)
    scores = {
        "log_likelihood": float(p.log_probs[picked, y].mean()),
        "brier": float(brier_score_loss(y, normed, labels=range(num_classes), scale_by_half=cast(Any, False))),
        "calibration_error": float(multiclass_calibration_error(normed.float(), y, num_classes, n_bins=15)),
        "accuracy": 1 - float(is_error.double().mean()),
        "error_auroc": auroc(-probs.amax(-1), is_error),
    }
    return scores | {f"error_auroc_{name}": auroc(values, is_error) for name, values in detectors(p).items()}


def _regressed(p: Regressed, y: Tensor) -> dict[str, float]:
    distribution = Normal(p.mean, p.variance.sqrt())
    central = (2 * distribution.cdf(y) - 1).abs()
    return {
        "log_likelihood": float(distribution.log_prob(y).mean()),
        "rmse": float((p.mean - y).square().mean().sqrt()),
        "crps": float(crps(p.mean, p.variance.sqrt(), y).mean()),
        "coverage": float((central <= LEVEL).double().mean()),
        "calibration_error": interval_error(central),
    }


def interval_error(central: Tensor) -> float:
    """Mean distance between levels of central intervals, 5 to 95 %, and how many targets they cover."""
    levels = torch.arange(0.05, 1.0, 0.05).to(central)
    return float((levels - (central[:, None] <= levels).to(central).mean(0)).abs().mean())


def crps(mean: Tensor, stddev: Tensor, y: Tensor) -> Tensor:
    """Continuous ranked probability score of a Gaussian (Gneiting & Raftery 2007, eq. 21): `∫(F(t) − 1[t ≥ y])² dt`."""
    z = (y - mean) / stddev
    standard = Normal(torch.zeros_like(z), torch.ones_like(z))
    return stddev * (z * (2 * standard.cdf(z) - 1) + 2 * standard.log_prob(z).exp() - 1 / math.sqrt(math.pi))


def auroc(scores: Tensor, positive: Tensor) -> float:
    if positive.all() or not positive.any():
        return math.nan
    return float(roc_auc_score(positive.numpy(), scores.double().numpy()))


def detectors(p: Classified) -> dict[str, Tensor]:
    """Scores `[N]` that should be high for errors and for other data.

    They are the entropy of the prediction; of joint draws of the function the mutual information of label and draw, and
    the variance of the logits, summed over them; and the method's own `epistemic`.
    """
    scores = {"entropy": entropy(p.log_probs)}
    if len(p.samples) > 1:
        each = p.samples.log_softmax(-1)
        # the link of the method may be another one, so that the mean is that of the draws
        scores["mutual_information"] = entropy(log_mean_exp(each)) - entropy(each).mean(0)
        scores["variance"] = p.samples.var(0, correction=0).sum(-1)
    return scores if p.epistemic is None else scores | {"epistemic": p.epistemic}


def entropy(log_probs: Tensor) -> Tensor:
    return torch.special.entr(log_probs.double().exp()).sum(-1)


def ood_aurocs(inside: Classified, outside: Classified) -> dict[str, float]:
    """How well each score of `detectors` separates other data from test data."""
    found, others = detectors(inside), detectors(outside)
    positive = torch.arange(len(inside.log_probs) + len(outside.log_probs)) >= len(inside.log_probs)
    return {name: auroc(torch.cat([found[name], others[name]]), positive) for name in found}


def label_log_likelihoods(p: Prediction, y: Tensor) -> Tensor:
    """`log p(y_n | f_k(x_n))`, `[K, N]`, of joint draws of the function."""
    if isinstance(p, Regressed):
        return Normal(p.samples, math.sqrt(p.noise_variance)).log_prob(y)
    return p.samples.log_softmax(-1).gather(-1, y.expand(len(p.samples), -1)[..., None])[..., 0]


def joint_log_likelihood(ell: Tensor, kappa: int, seed: int = 0, shuffles: int = SHUFFLES) -> float:
    r"""Mean of `log (1/K) Σ_k exp Σ_l b_l ell_{k,l}` over groups of `κ` data, drawn `τ = 10(κ − 1)` times in all.

    Groups are parts of a shuffled test set, the mean is over shuffles too (Antorán et al. 2023, G.2.1). At `κ = 1` it
    is the marginal log-likelihood.
    """
    if kappa == 1:
        return float(log_mean_exp(ell).mean())
    drawn = drawn_groups(ell.shape[1], kappa, seed, shuffles)
    return float(torch.stack([log_mean_exp(ell[:, rows].sum(-1)).mean() for rows in drawn]).mean())


def gaussian_joint_log_likelihood(
    p: Regressed, y: Tensor, kappa: int, seed: int = 0, shuffles: int = SHUFFLES
) -> float:
    """The same for a Gaussian function, whose covariance is that of the draws: no mixture of them.

    With little noise none of the draws is near the targets of a whole group, and the mixture would be off by tens of
    nats.
    """
    if kappa == 1:
        return float(Normal(p.mean, p.variance.sqrt()).log_prob(y).mean())
    mean, targets, deviations = p.mean.double(), y.double(), (p.samples - p.mean).double()
    noise = p.noise_variance * torch.eye(10 * (kappa - 1), dtype=torch.float64)
    values = []
    for rows in drawn_groups(len(y), kappa, seed, shuffles):
        chosen = deviations[:, rows]
        covariance = torch.einsum("kgi,kgj->gij", chosen, chosen) / len(chosen) + noise
        values.append(MultivariateNormal(mean[rows], covariance).log_prob(targets[rows]).mean())
    return float(torch.stack(values).mean())


def drawn_groups(num_data: int, kappa: int, seed: int, shuffles: int) -> Iterator[Tensor]:
    """Indices of data, `[groups, τ]`, for each shuffle."""
    generator = torch.Generator().manual_seed(seed)
    num, tau = num_data // kappa, 10 * (kappa - 1)
    for _ in range(shuffles):
        groups = torch.randperm(num_data, generator=generator)[: num * kappa].reshape(num, kappa)
        yield groups.gather(1, torch.randint(kappa, (num, tau), generator=generator))


def best_scale(loss: Callable[[float], float], least: float, most: float) -> float:
    """`s` that minimises `loss(log s)` between two bounds: the best of a grid, refined."""
    grid = np.linspace(math.log(least), math.log(most), 21)
    best, step = grid[int(np.argmin([loss(v) for v in grid]))], grid[1] - grid[0]
    optimum: Any = minimize_scalar(
        loss, bounds=(max(grid[0], best - step), min(grid[-1], best + step)), method="bounded"
    )
    return math.exp(optimum.x)


def symmetrised_kl(p: Tensor, q: Tensor) -> Tensor:
    """`KL(p‖q) + KL(q‖p)` of log-probabilities `[N, C]`, `[N]`."""
    return ((p.exp() - q.exp()) * (p - q)).sum(-1)


def logit_wasserstein(a: Tensor, b: Tensor) -> Tensor:
    """2-Wasserstein distance of Gaussians of equal means, covariances `[N, C, C]`: `[N]`.

    Its square is `tr a + tr b − 2 tr (a^{1/2} b a^{1/2})^{1/2}`.
    """
    a, b = a.double(), b.double()
    root = _root(a)
    cross = torch.linalg.eigvalsh(root @ b @ root).clamp_min(0).sqrt().sum(-1)
    traces = a.diagonal(dim1=-2, dim2=-1).sum(-1) + b.diagonal(dim1=-2, dim2=-1).sum(-1)
    return (traces - 2 * cross).clamp_min(0).sqrt()


def _root(a: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT
