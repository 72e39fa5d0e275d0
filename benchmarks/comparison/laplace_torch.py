"""laplace-torch , with settings that are fair to it.

BackPACK computes Jacobians where it knows all layers, else they are computed in small batches. KFAC covers linear and
convolutional layers only, as laplace-torch has no other. Joint samples come from its samples of weights through the
tangent, since the samples of outputs that it offers are not joint over inputs. Predictions are by its default link.
"""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comparison.predictions import Classified, Fitted, Prediction, Regressed
from benchmarks.comparison.training import Problem, outputs_of
from laplace_sampling.networks.linearisation import Linearisation

# Arguments of `Laplace`: which weights are random, and the form of the Hessian.
STRUCTURES = {
    "last layer": ("last_layer", "full"),
    "last layer, KFAC": ("last_layer", "kron"),
    "KFAC": ("all", "kron"),
    "diagonal": ("all", "diag"),
}
GRID, SAMPLES, BATCH, SMALL_BATCH = 21, 64, 50, 5
KNOWN_TO_BACKPACK = (
    nn.Sequential, nn.Flatten, nn.Unflatten, nn.Linear, nn.Conv2d, nn.ReLU, nn.Tanh, nn.AvgPool2d, nn.Dropout,
)  # fmt: skip


def build(
    network: nn.Module, likelihood: str, subset: str, structure: str, **settings: Any
) -> tuple[Any, list[str], int]:
    """A `Laplace` on a copy of the network, the names of its random weights, and a batch size."""
    # absent without the extra
    from laplace import Laplace  # pyright: ignore[reportMissingImports]
    from laplace.curvature import BackPackGGN, CurvlinopsGGN  # pyright: ignore[reportMissingImports]

    network = copy.deepcopy(network)
    if subset == "all" and structure == "kron":
        layers = [m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        chosen = {id(p) for layer in layers for p in layer.parameters()}
        for parameter in network.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
    names = [name for name, p in network.named_parameters() if p.requires_grad]
    whole = len(names) == len(list(network.parameters()))
    plain = whole and all(isinstance(m, KNOWN_TO_BACKPACK) for m in network.modules())
    backend = BackPackGGN if plain else CurvlinopsGGN
    la = Laplace(
        network, likelihood, subset_of_weights=subset, hessian_structure=structure, backend=backend, **settings
    )
    return la, names, BATCH if plain or subset == "last_layer" else SMALL_BATCH


def laplace_torch(structure: str, validated: bool) -> Callable[[Problem], Fitted]:
    """Tuned by its own marginal likelihood, or by its own search on validation data."""

    def method(problem: Problem) -> Fitted:
        la, names, batch = fitted(problem, structure, validated)
        deviations = weight_samples(la, problem.seed)
        noise = float(la.sigma_noise) ** 2
        tangent = Linearisation(problem.network, names)

        def predict(x: Tensor) -> Prediction:
            outputs = outputs_of(problem.network, x)
            samples = outputs + torch.cat([tangent.jvp(part, deviations) for part in x.split(200)], 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parts = [la(part) for part in x.split(batch)]
            if problem.likelihood == "regression":
                mean, variance = (torch.cat([part[i].detach().flatten() for part in parts]) for i in (0, 1))
                return Regressed(mean, variance + noise, samples.flatten(1), noise, gaussian=True)
            probs = torch.cat([part.detach() for part in parts]).double().clamp_min(1e-30)
            return Classified(probs.log(), samples)

        precision = torch.as_tensor(la.prior_precision).flatten().tolist()
        # A Jacobian is as many reverse passes as there are outputs.
        return Fitted(predict, problem.task.outputs, {"prior_precision": precision, "noise": noise})

    return method


def fitted(problem: Problem, structure: str, validated: bool) -> tuple[Any, list[str], int]:
    """The results of `build`, with the object fitted and tuned."""
    la, names, batch = build(problem.network, problem.likelihood, *STRUCTURES[structure])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la.fit(problem.data.train.loader(batch))
        tune(la, problem, validated, batch)
    if STRUCTURES[structure][0] == "last_layer":
        names = [name for name in names if name.startswith(f"{la.model._last_layer_name}.")]
    return la, names, batch


def tune(la: Any, problem: Problem, validated: bool, batch: int) -> None:
    """Tunes by its own means; the noise of a regression follows its documentation, or validation residuals."""
    if problem.likelihood == "regression" and not validated:
        log_prior, log_noise = (torch.ones(1, requires_grad=True) for _ in range(2))
        optimiser = torch.optim.Adam([log_prior, log_noise], lr=0.1)
        for _ in range(1000):
            optimiser.zero_grad()
            (-la.log_marginal_likelihood(log_prior.exp(), log_noise.exp())).backward()
            optimiser.step()
            if max(float(v.grad.abs()) for v in (log_prior, log_noise) if v.grad is not None) < 1e-3:
                break
        la.prior_precision, la.sigma_noise = log_prior.detach().exp(), log_noise.detach().exp()
        return
    if not validated:
        la.optimize_prior_precision(method="marglik")
        return
    validation = problem.data.validation
    loader = validation.loader(batch)
    loss = None
    if problem.likelihood == "regression":
        residuals = outputs_of(problem.network, validation.x) - validation.y
        la.sigma_noise = float(residuals.square().mean().sqrt())
        loss = GaussianLoss(la)
    la.optimize_prior_precision(method="gridsearch", val_loader=loader, grid_size=GRID, loss=loss)


class GaussianLoss:
    """Negative log-likelihood; its default, the squared error, does not depend on the prior precision."""

    def __init__(self, la: Any) -> None:
        self.la = la

    def __call__(self, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        total = variance.flatten() + self.la.sigma_noise**2
        return 0.5 * ((mean.flatten() - y.flatten()).square() / total + (2 * math.pi * total).log()).mean()


def weight_samples(la: Any, seed: int, num: int = SAMPLES) -> Tensor:
    """Samples of the weights from the posterior, minus the mean: `[K, P]`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (la.sample(num) - la.mean).detach()
