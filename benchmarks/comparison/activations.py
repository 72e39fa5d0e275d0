"""Two rivals of 2026 that look at what goes into the last layer, written from the abstracts of their papers.

GAPA (Bergna et al., arXiv 2602.14934): a Gaussian process takes the place of each activation. Its mean is the
activation itself, and its variance that of a process that has seen the activations of the nearest training data. It is
placed at the input of the last layer, whose outputs then have the variance `Σ_d W_cd² s_d² v(h)`.

Projected tangent features (Rich-BLL, arXiv 2602.01279): a last layer whose features are richer. Of the tangent features
of all weights, those of a subsample are projected on the last layer's, which gives its weights the prior covariance
`I + Φ⁺ K Φ⁺ᵀ` with `K` the tangent kernel of the other weights: never less than that of a last layer alone.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks.comparison.ours import ours
from benchmarks.comparison.peers import Draw, best, by_members
from benchmarks.comparison.predictions import Classified, Fitted, Prediction
from benchmarks.comparison.training import Problem, outputs_of
from laplace_sampling.networks.linearisation import Linearisation

SAMPLES, NEIGHBOURS, SUBSAMPLE = 64, 20, 300
LENGTHS = 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0  # of the median distance of two training data


def head_of(network: nn.Module) -> tuple[str, nn.Linear]:
    return [(name, m) for name, m in network.named_modules() if isinstance(m, nn.Linear)][-1]


def hidden(network: nn.Module, x: Tensor) -> Tensor:
    """What goes into the last layer, `[N, d]`."""
    kept: list[Tensor] = []
    with head_of(network)[1].register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0])):
        outputs_of(network, x)
    return torch.cat(kept)


def gapa(problem: Problem) -> Fitted:
    """Gaussian process activations before the last layer; validation data choose the length of their kernel."""
    network, generator = problem.network, torch.Generator().manual_seed(problem.seed)
    known, weight = hidden(network, problem.data.train.x), head_of(network)[1].weight.detach()
    median = float(torch.pdist(known[torch.randperm(len(known), generator=generator)[:1000]]).median())
    of_outputs = torch.randn(SAMPLES, known.shape[1], generator=generator) * known.std(0) @ weight.T

    def variance(x: Tensor, length: float) -> Tensor:
        """`v(h)`, of an activation of variance one given those of the nearest training data, `[N]`."""
        parts = [_variance(h, known, length) for h in hidden(network, x).split(500)]
        return torch.cat(parts).float()

    def draws(length: float) -> Draw:
        deviations = of_outputs[:, None]
        return lambda x: outputs_of(network, x) + variance(x, length).sqrt()[:, None] * deviations

    length, draw = best(problem, [(length, draws(length)) for length in (s * median for s in LENGTHS)])
    fit = by_members(problem, draw, epochs=1 / 3, length=length / median)  # a forward pass

    def predict(x: Tensor) -> Prediction:
        found = fit.predict(x)
        return replace(found, epistemic=variance(x, length)) if isinstance(found, Classified) else found

    return replace(fit, predict=predict)


def _variance(h: Tensor, known: Tensor, length: float) -> Tensor:
    near = known[torch.cdist(h, known).topk(min(NEIGHBOURS, len(known)), largest=False).indices].double() / length
    here = h[:, None].double() / length

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (-torch.cdist(a, b).square() / 2).exp()

    K = kernel(near, near) + 1e-6 * torch.eye(near.shape[1]).double()
    return (1 - (kernel(here, near) @ torch.linalg.solve(K, kernel(near, here)))[:, 0, 0]).clamp_min(0)


def projected(validated: bool = False) -> Callable[[Problem], Fitted]:
    """The last layer of this library on features `Σ^{1/2}h`, with the prior covariance `Σ` of its weights."""
    last_layer = ours(validated, parameters="last_layer")

    def method(problem: Problem) -> Fitted:
        train = problem.data.train
        some = torch.randperm(len(train.x), generator=torch.Generator().manual_seed(problem.seed))[:SUBSAMPLE]
        eigenvalues, vectors = torch.linalg.eigh(prior_covariance(problem.network, train.x[some]))
        root, inverse = ((vectors * eigenvalues**power) @ vectors.T for power in (0.5, -0.5))
        network = copy.deepcopy(problem.network)
        name, head = head_of(network)
        before = nn.Linear(*reversed(root.shape), bias=False)
        with torch.no_grad():
            before.weight.copy_(root)
            head.weight.copy_(head.weight.double() @ inverse)
        network.set_submodule(name, nn.Sequential(before.requires_grad_(False), head))
        fit = last_layer(_With(**vars(problem) | {"network": network}))
        rows = len(some) * problem.task.outputs
        return replace(fit, epochs=fit.epochs + rows / len(train.x))

    return method


class _With(Problem):
    """A problem with another network of the same function."""

    def __init__(self, network: nn.Module, **parts: object) -> None:
        super().__init__(**parts)  # pyright: ignore
        vars(self)["network"] = network


def prior_covariance(network: nn.Module, x: Tensor) -> Tensor:
    """`I + Φ⁺ K Φ⁺ᵀ` of the weights of an output from the hidden units; `K` is the mean over outputs."""
    tangent = Linearisation(network, [f"!{head_of(network)[0]}.*"])
    outputs = outputs_of(network, x)
    inverse = torch.linalg.pinv(hidden(network, x).double(), rtol=1e-3)
    total = torch.zeros(len(inverse), len(inverse)).double()
    for unit in torch.eye(outputs.shape[1]):
        projection = inverse @ tangent.vjp_each(x, unit.expand(outputs.shape)).double()
        total += projection @ projection.T
    return torch.eye(len(inverse)).double() + total / outputs.shape[1]
