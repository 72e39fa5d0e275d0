"""Problems that several tests solve, in float64."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch
from cases import Case, make_case
from torch import Tensor, nn

from laplace_sampling import Gaussian, GPrior, IsotropicPrior, LayerwisePrior
from laplace_sampling.gp.evidence import Optimum
from laplace_sampling.gp.posterior import GramPosterior
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel, TangentModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.methods.problem import Problem
from laplace_sampling.networks.linearisation import Linearisation

PRIORS = {"isotropic": IsotropicPrior(), "g-prior": GPrior(), "layerwise": LayerwisePrior()}


def dense_model(name: str, kind: str = "homogeneous") -> LinearModel:
    """The linear model of a case with its Jacobian in memory, which is fast."""
    model = make_case(name).linear_model(kind)
    return replace(model, features=DenseFeatures.of(model.features))


def built(prior: str, model: LinearModel, precision: float) -> GaussianPrior:
    """A prior of two layers, of half of the weights each."""
    size = model.features.size
    layers = (["first", "second"], (torch.arange(size) >= size // 2).long())
    noise = Draws(64, 0, 1).noise(model.features.num_outputs)
    return replace(PRIORS[prior], precision=precision).build(model.ggn(model.network_outputs), layers, noise)


def setting(case: Case, prior: str, precision: float = 0.8):
    """The linear model with dense features, its GGN and a prior."""
    model = case.linear_model("affine")
    model = replace(model, features=DenseFeatures.of(model.features))
    made = built(prior, model, precision)
    if prior == "layerwise":
        made = made.with_precision(torch.tensor([0.5, 3.0]))
    return model, model.ggn(model.network_outputs), made


# Agreement of observation space and weight space, relative to the largest entry.
CLOSE = {"rtol": 1e-6, "atol": 1e-8}
SAMPLES = {"rtol": 1e-5, "atol": 1e-7}


def make_prior(model: LinearModel, case: Case, prior: str, precision: float = 0.8) -> GaussianPrior:
    ggn, network = model.ggn(model.network_outputs), Linearisation(case.model)
    recipe = replace(PRIORS[prior], precision=precision)
    built = recipe.build(ggn, network.layers(), Draws(8, 0, 1).noise(model.features.num_outputs))
    if prior == "layerwise":
        built = built.with_precision(torch.logspace(-0.3, 0.5, len(built.names), dtype=torch.float64))
    return built


def noisy(num: int, outputs: int = 1, noise: float = 0.3, seed: int = 0) -> tuple[Case, LinearModel, GaussianPrior]:
    """A problem whose targets come from the tangent model itself, so that evidence has a maximum inside."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    x = normal(num, 2)
    case = Case(net, Gaussian(1.0), x, torch.zeros(num, outputs, dtype=torch.float64), 10)
    model = case.linear_model("homogeneous")
    theta = normal(model.features.size) * 0.7
    case.y = model.outputs(theta[None])[0] + noise * normal(num, outputs)
    model = case.linear_model("homogeneous")
    return case, model, make_prior(model, case, "isotropic")


def largest_evidence(model: LinearModel, prior: GaussianPrior) -> Optimum:
    """Precisions of prior and noise that both are of largest evidence."""
    return GramPosterior.of(model, prior).evidence.largest((overall_precision(prior), 1.0), (True, True))


def many(name: str) -> tuple[Case, LinearModel, GaussianPrior]:
    """Labels that the inputs decide in part, so that there is something to learn and `α` has an end."""
    case = make_case(name)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, *case.x.shape[1:], generator=generator, dtype=torch.float64)
    logits = 6 * Linearisation(case.model)(x)
    noise = torch.rand(logits.shape, generator=generator, dtype=torch.float64)
    y = (logits - (-noise.log()).log()).argmax(1) if name.startswith("class") else (logits.sigmoid() > noise).double()
    case = Case(case.model, case.likelihood, x, y, 10)
    model = case.linear_model("homogeneous")
    return case, model, make_prior(model, case, "isotropic")


def trained(num_data: int = 24) -> Case:
    """A network that has been fitted to a sine, so that its data do determine weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.rand(num_data, 1).double() * 4 - 2
        y = torch.sin(2 * x) + 0.2 * torch.randn(num_data, 1).double()
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
        optimiser = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(300):
            optimiser.zero_grad()
            (((model(x) - y) ** 2).sum() * 10 + sum((p**2).sum() for p in model.parameters())).backward()
            optimiser.step()
    return Case(model, Gaussian(20.0), x, y, 7)


def linear_problem(
    likelihood: str = "regression", inputs: int = 60, num_data: int = 80
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A linear network on inputs whose variances fall over three decades, and a loader of its data."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, inputs, generator=g) * torch.logspace(0, -1.5, inputs)
    model = nn.Linear(inputs, 1 if likelihood == "regression" else 2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(model.weight.shape, generator=g))
        model.bias.zero_()
        noise = 0.3 * torch.randn(num_data, len(model.bias), generator=g)
        y = model(x) + noise if likelihood == "regression" else (model(x) + noise).argmax(1)
    return model.double(), [(x.double(), y.double() if likelihood == "regression" else y)]


def unsolved_problem(
    num_data: int,
    size: int,
    max_memory: float,
    *,
    outputs: int = 1,
    likelihood: Likelihood | None = None,
    num_samples: int = 16,
    in_order: bool = False,
    in_observation_space: bool = True,
) -> Problem:
    """The sizes of a problem and the memory for it, with a Jacobian of zeros: what the choice of a method looks at."""
    features = DenseFeatures(torch.zeros(1, outputs, 1).expand(num_data, outputs, size))
    model = SimpleNamespace(features=features, likelihood=likelihood or Gaussian(1.0))

    return Problem(
        tangent=cast(TangentModel, SimpleNamespace(model=model, in_order=in_order, network=SimpleNamespace(shapes={}))),
        family=IsotropicPrior(),
        layers=([], torch.zeros(0)),
        num_samples=num_samples,
        seed=0,
        dtype=features.dtype,
        progress=False,
        free_bytes=max_memory,
        in_observation_space=in_observation_space,
    )
