"""Scores of strange inputs by one forward pass, of ours and of peers; a larger score is stranger.

Each takes features `z` of the last layer, means over positions of what goes into it, and its weights. Formulas are
those of the papers, on features of the training data and without held-out data.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.comparison.predictions import Classified, Fitted, Prediction, prediction
from benchmarks.comparison.training import Problem, outputs_of
from laplace_sampling import LinearisedLaplace

Score = Callable[[Tensor, Tensor], Tensor]  # of features [N, D] and logits [N, C]
NEIGHBOURS = 50


def unit(z: Tensor) -> Tensor:
    return nn.functional.normalize(z, dim=1)


def distances(z: Tensor, means: Tensor, covariance: Tensor) -> Tensor:
    """Squared Mahalanobis distances to some means, `[N, C]`; a ridge of a millionth keeps it invertible."""
    ridge = 1e-6 * covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    root = torch.linalg.inv(torch.linalg.cholesky(covariance + ridge)).mT
    return torch.cdist(z @ root, means @ root).square()


def class_means(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([z[y == c].mean(0) for c in y.unique()])


def nearest(z: Tensor, y: Tensor, head: nn.Linear) -> Score:
    """The distance to the 50th nearest neighbour of unit features (Sun et al. 2022)."""
    return lambda x, _: torch.cdist(unit(x), unit(z)).kthvalue(min(NEIGHBOURS, len(z)), 1).values


def vim(z: Tensor, y: Tensor, head: nn.Linear) -> Score:
    """The norm outside of the principal space, matched to the logits, against their energy (Wang et al. 2022)."""
    weight, bias = head.weight.detach().double(), head.bias.detach().double()
    origin = -torch.linalg.pinv(weight) @ bias
    basis = torch.linalg.eigh((z - origin).mT @ (z - origin)).eigenvectors
    null = basis[:, : z.shape[1] // 2]  # the smaller half of the variances
    logits, residual = z @ weight.mT + bias, ((z - origin) @ null).norm(dim=1)
    factor = logits.amax(1).mean() / residual.mean().clamp_min(1e-12)
    return lambda x, f: factor * ((x - origin) @ null).norm(dim=1) - f.logsumexp(1)


def fdbd(z: Tensor, y: Tensor, head: nn.Linear) -> Score:
    """The mean distance to the decision boundaries, relative to that from the mean (Liu & Qin 2024)."""
    weight, mean = head.weight.detach().double(), z.mean(0)
    between = torch.cdist(weight, weight)

    def score(x: Tensor, f: Tensor) -> Tensor:
        top = f.argmax(1)
        gaps = (f.amax(1, keepdim=True) - f).abs() / between[top].clamp_min(1e-12)
        others = torch.ones_like(gaps).scatter(1, top[:, None], 0.0)
        return -(gaps * others).sum(1) / (f.shape[1] - 1) / (x - mean).norm(dim=1)

    return score


def relative_mahalanobis(z: Tensor, y: Tensor, head: nn.Linear) -> Score:
    """The distance to the nearest class mean minus that to the mean, of unit features (Ren et al. 2021)."""
    u = unit(z)
    means, mean = class_means(u, y), u.mean(0, keepdim=True)
    own = u - means[y.unique(return_inverse=True)[1]]
    within, total = own.mT @ own / len(u), (u - mean).mT @ (u - mean) / len(u)
    return lambda x, _: distances(unit(x), means, within).amin(1) - distances(unit(x), mean, total)[:, 0]


def neural_collapse(z: Tensor, y: Tensor, head: nn.Linear) -> Score:
    """How far the centred feature points away from the weights of its class, and its size (Liu & Qin 2025)."""
    weight, mean = head.weight.detach().double(), z.mean(0)

    def score(x: Tensor, f: Tensor) -> Tensor:
        centred = x - mean
        aligned = (weight[f.argmax(1)] * centred).sum(1) / centred.norm(dim=1).clamp_min(1e-12)
        return -aligned - 1e-3 * x.norm(p=1, dim=1)

    return score


def identity_curvature(z: Tensor, y: Tensor, head: nn.Linear) -> Score:
    """`uᵀ (UᵀU + I)⁻¹ u` of unit features: the variance of a last layer whose curvature is one for all data."""
    u = unit(z)
    root = torch.linalg.inv(torch.linalg.cholesky(u.mT @ u + torch.eye(u.shape[1]).to(u))).mT
    return lambda x, _: (unit(x) @ root).square().sum(1)


def by_features(make: Callable[[Tensor, Tensor, nn.Linear], Score]) -> Callable[[Problem], Fitted]:
    """A score of the input of the last linear layer beside the network's own predictions."""

    def method(problem: Problem) -> Fitted:
        network, train = problem.network, problem.data.train
        head = [part for part in network.modules() if isinstance(part, nn.Linear)][-1]

        def features(x: Tensor) -> tuple[Tensor, Tensor]:
            kept: list[Tensor] = []
            with head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0].double())):
                outputs = outputs_of(network, x)
            return torch.cat(kept), outputs

        score = make(features(train.x)[0], train.y, head)

        def predict(x: Tensor) -> Prediction:
            z, outputs = features(x)
            return with_score(outputs, score(z, outputs.double()))

        return Fitted(predict)

    return method


def novelty(validated: bool = False) -> Callable[[Problem], Fitted]:
    """`novelty` of this library, without a fitted posterior."""

    def method(problem: Problem) -> Fitted:
        data, la = problem.data, LinearisedLaplace(problem.network, problem.likelihood)
        la.calibrate_novelty(data.train.loader(), data.validation.loader() if validated else None)
        return Fitted(lambda x: with_score(outputs_of(problem.network, x), la.novelty_of(x)), 1 / 3)

    return method


def with_score(outputs: Tensor, score: Tensor) -> Classified:
    p = prediction("classification", outputs[None])
    assert isinstance(p, Classified)
    # Constants of two classes may be infinite, of which no area is computed.
    return Classified(p.log_probs, p.samples, score.nan_to_num(math.inf).clamp(-1e30, 1e30))


PEERS = {
    "nearest neighbours": nearest,
    "ViM": vim,
    "fDBD": fdbd,
    "relative Mahalanobis": relative_mahalanobis,
    "neural collapse": neural_collapse,
    "identity curvature": identity_curvature,
}
