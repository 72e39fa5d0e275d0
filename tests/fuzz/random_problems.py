"""Random small problems: what they are made of, and how hypothesis draws them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import reference
import torch
from fuzz.dense import Dense, Loss, curvature, flat_outputs, losses
from fuzz.small_networks import ACTIVATIONS, NETWORKS, Sizes, build
from hypothesis import strategies as st
from torch import Tensor, nn

from laplace_sampling import (
    SGD,
    SVRG,
    Bernoulli,
    Categorical,
    Data,
    Dual,
    Gaussian,
    GPrior,
    HeteroscedasticGaussian,
    IsotropicPrior,
    Krylov,
    LayerwisePrior,
    Likelihood,
    LinearisedLaplace,
    Method,
    MultiTask,
    Poisson,
    Stochastic,
    from_loss,
)

METHODS = ["exact", "krylov", "cg", "svrg", "sgd", "dual", "kfac", "diagonal", "auto"]
PRIORS = {"isotropic": IsotropicPrior, "g-prior": GPrior, "layerwise": LayerwisePrior}
LIKELIHOODS = ["regression", "classification", "binary", "poisson", "heteroscedastic", "from_loss"]
# What `parameters` is, and the same as a function of a name and its weight.
PARAMETERS: dict[str, tuple[Any, Callable[[str, Tensor], bool]]] = {
    "all": (None, lambda name, weight: weight.requires_grad),
    "last_layer": ("last_layer", lambda name, weight: fnmatch(name, "head*")),
    "head": (["head*"], lambda name, weight: fnmatch(name, "head*")),
    "weights": (lambda name, weight: name.endswith("weight"), lambda name, weight: name.endswith("weight")),
}
# Data that are predicted and not fitted, and the largest number of observations.
_UNSEEN, _MOST_ROWS = 3, 120


@dataclass(frozen=True)
class Example:
    """All that makes a problem; two equal ones are the same problem bit by bit."""

    seed: int = 0
    network: str = "mlp"
    likelihood: str = "regression"
    num_data: int = 1
    outputs: int = 1
    width: int = 1
    depth: int = 1
    activation: str = "tanh"
    steps: int = 0
    dtype: str = "float64"
    method: str = "exact"
    prior: str = "isotropic"
    log_precision: int = 0
    log_noise: int = 0
    noise: str = "network"
    parameters: str = "all"
    linear_model: str = "auto"
    batch_size: int = 60
    weighted: bool = False
    num_samples: int = 8
    training: bool = False

    def __repr__(self) -> str:
        """What differs from the defaults."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Example({', '.join(f'{name}={value!r}' for name, value in given)})"


@st.composite
def examples(draw: st.DrawFn, method: str) -> Example:
    """Random examples of a method; simple ones are those with the first of each list."""
    network = draw(st.sampled_from(list(NETWORKS)))
    possible = {
        "heads": ["heads"],
        "tokens": ["regression", "tokens", "binary", "poisson"],
        "image": ["regression", "classification", "binary", "poisson"],
    }.get(network, LIKELIHOODS)
    if method == "dual":
        possible = [name for name in possible if name == "regression"]
        network = "mlp" if network == "heads" else network
    likelihood = draw(st.sampled_from(possible or ["regression"]))
    outputs = draw(st.integers(1, 3))
    if likelihood in ("classification", "tokens"):
        outputs = max(outputs, 2)
    if likelihood == "heteroscedastic":
        outputs = 2 if outputs < 3 else 4
    return Example(
        seed=draw(st.integers(0, 999)),
        network=network,
        likelihood=likelihood,
        num_data=draw(st.integers(1, 12 if method in ("sgd", "svrg") else 60)),  # many steps, of milliseconds each
        outputs=outputs,
        # The norm of one unit is a constant, all derivatives of which are rounding.
        width=draw(st.integers(2 if network == "norm" else 1, 6)),
        depth=draw(st.integers(0, 2)) if network in ("mlp", "residual", "frozen", "heads") else 1,
        activation=draw(st.sampled_from(list(ACTIVATIONS))),
        steps=draw(st.sampled_from([0, 3, 100])),
        dtype=draw(st.sampled_from(["float64", "float32"])),
        method=method,
        prior=draw(st.sampled_from(list(PRIORS))),
        log_precision=draw(st.integers(-6, 6)),
        log_noise=draw(st.integers(-3, 6)) if likelihood == "regression" else 0,
        noise=draw(st.sampled_from(["network", "given", "outputs"])) if likelihood == "regression" else "network",
        parameters=draw(st.sampled_from(list(PARAMETERS))),
        linear_model=draw(st.sampled_from(["auto", "affine", "homogeneous"])),
        batch_size=draw(st.sampled_from([60, 20, 7])),
        weighted=draw(st.booleans()),
        num_samples=draw(st.sampled_from([8, 2, 20])),
        training=draw(st.booleans()),
    )


@dataclass
class Problem:
    """A network with data, the settings of a fit, and the dense posterior.

    Attributes:
        model: the network.
        batches: training data.
        likelihood: as a user gives it.
        settings: of the constructor; `given` of a fit.
        dense: the same by dense algebra.
        test: some of the training data and unseen ones; `test_J` is the Jacobian there.
        noise_variances: one over the weight of each datum.
        y: targets.
        loss: the sum of losses at a noise precision.
    """

    example: Example
    model: nn.Module
    batches: list[tuple[Any, Any]]
    likelihood: Likelihood
    settings: dict[str, Any]
    given: dict[str, Any]
    dense: Dense
    test: Any
    test_J: Tensor
    noise_variances: Tensor
    y: Any
    loss: Callable[[Tensor], Loss]

    def laplace(self, method: str | Method | None = None, **changed: Any) -> LinearisedLaplace:
        settings = self.settings | changed
        settings["method"] = self.method if method is None else method
        return LinearisedLaplace(self.model, self.likelihood, **settings)

    @property
    def method(self) -> str | Method:
        name = self.example.method
        if name == "cg":
            size = sum(p.numel() for p in self.model.parameters())
            # So many vectors hold no Krylov basis that is worth having.
            width = 8 if self.example.dtype == "float64" else 4
            return Krylov(max_memory=float(size * width * (2 * self.example.num_samples + 60)))
        if name in ("sgd", "svrg"):
            return Stochastic(solver=SGD() if name == "sgd" else SVRG())
        return Dual() if name == "dual" else name


def _slice(x: Any, rows: slice | Tensor) -> Any:
    return {name: part[rows] for name, part in x.items()} if isinstance(x, dict) else x[rows]


def _as(x: Any, dtype: torch.dtype) -> Any:
    """Inputs in a dtype, unless they are whole numbers."""
    if isinstance(x, dict):
        return {name: _as(part, dtype) for name, part in x.items()}
    return x.to(dtype) if x.is_floating_point() else x


def _targets(kind: str, outputs: Tensor) -> Any:
    """Targets for outputs of the network, `[N, ...]`, in the form that a user gives."""
    N = len(outputs)
    if kind == "heads":
        return {
            "kind": torch.randint(3, (N,)),
            "value": outputs[:, 3:5] + torch.randn(N, 2, dtype=outputs.dtype),
            "count": torch.randint(4, (N,)),
        }
    if kind == "classification":
        return torch.randint(outputs.shape[1], (N, *outputs.shape[2:]))
    if kind == "tokens":
        return torch.randint(outputs.shape[2], outputs.shape[:2])
    if kind == "binary":
        return torch.randint(2, outputs.shape)
    if kind == "poisson":
        return torch.randint(4, outputs.shape)
    noise = torch.randn(outputs.shape, dtype=outputs.dtype)
    y = torch.sin(2 * outputs.detach()) + 0.3 * noise
    return y.chunk(2, 1)[0] if kind == "heteroscedastic" else y


def _columns(kind: str, y: Any) -> Any:
    if kind != "heads":
        return y if kind in ("classification", "tokens") else y.double()
    return torch.cat([y["kind"][:, None], y["value"], y["count"][:, None]], 1).double()


def _smooth_loss(f: Tensor, y: Tensor) -> Tensor:
    return (f - y).cosh().log().sum() + torch.nn.functional.softplus(f.sum())


def _likelihood(example: Example, width: int) -> tuple[Likelihood, Tensor]:
    """The likelihood, and its noise precision."""
    if example.likelihood == "regression":
        noise = torch.tensor(10.0**example.log_noise, dtype=torch.float64)
        if example.noise == "outputs" and width > 1:
            noise = noise * torch.linspace(0.5, 2, width, dtype=torch.float64)
        return Gaussian(noise, learn=example.noise != "given"), noise
    made = {
        "classification": Categorical(),
        "tokens": Categorical(class_dim=-1),
        "binary": Bernoulli(),
        "poisson": Poisson(),
        "heteroscedastic": HeteroscedasticGaussian(),
        "from_loss": from_loss(_smooth_loss),
        "heads": MultiTask({"value": Gaussian(2.0, learn=False), "kind": Categorical(), "count": Poisson()}),
    }
    return made[example.likelihood], torch.ones((), dtype=torch.float64)


def _train(model: nn.Module, x: Any, y: Any, kind: str, shape: tuple[int, ...], steps: int) -> None:
    weights = [p for p in model.parameters() if p.requires_grad]
    if not steps or not weights:
        return
    optimiser = torch.optim.Adam(weights, lr=0.03)
    loss = losses(kind, _columns(kind, y), shape, torch.ones(()), torch.ones((), dtype=torch.float64))
    model.eval()
    for _ in range(steps):
        optimiser.zero_grad()
        f = flat_outputs(model, x).double()
        value = loss(f, f)
        value.backward()
        optimiser.step()
    for weight in weights:
        weight.grad = None


def problem(example: Example) -> Problem:
    """The problem of an example."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(example.seed)
        return _problem(example)


def _problem(example: Example) -> Problem:
    dtype = getattr(torch, example.dtype)
    sizes = Sizes(example.outputs, example.width, example.depth, example.activation)
    model, x = build(example.network, sizes, example.num_data + _UNSEEN)
    model = model.to(dtype).eval()
    x = _as(x, dtype)
    with torch.no_grad():
        flat = flat_outputs(model, x)
        out = flat if example.network == "heads" else (model(**x) if isinstance(x, dict) else model(x))
    width = flat.shape[1]
    N = max(1, min(example.num_data, _MOST_ROWS // width))
    kind = example.likelihood
    y = _targets(kind, out)
    train, y = _slice(x, slice(0, N)), _slice(y, slice(0, N))
    _train(model, train, y, kind, tuple(out.shape[1:]), example.steps)

    likelihood, noise = _likelihood(example, width)
    multiplicity = (1 + torch.arange(N) % 3).double() if example.weighted else torch.ones(N, dtype=torch.float64)
    given = Data() if not example.weighted else Data(weights=multiplicity)
    if example.weighted and kind == "regression" and example.seed % 2:
        given = Data(noise_variances=1 / multiplicity)

    precise, exact_x = copy.deepcopy(model).double(), _as(x, torch.float64)
    parameters: dict[str, Tensor] = dict(precise.named_parameters())
    names = [name for name, weight in parameters.items() if PARAMETERS[example.parameters][1](name, weight)]
    for name, weight in parameters.items():
        weight.requires_grad_(name in names)
    J = reference.jacobian(precise, exact_x)
    with torch.no_grad():
        f = flat_outputs(precise, exact_x)
    w = torch.cat([parameters[name].detach().flatten() for name in names])
    affine = example.linear_model == "affine" or (example.linear_model == "auto" and kind == "regression")
    offset = f - J @ w if affine else torch.zeros_like(f)
    loss = partial(losses, kind, _columns(kind, y), tuple(out.shape[1:]), multiplicity)
    scale = torch.ones(J.shape[-1], dtype=torch.float64)
    dense = Dense(J[:N], f[:N], offset[:N], loss(noise), scale)
    if example.prior == "g-prior":
        dense = replace(dense, scale=_g_scale(dense, names, parameters))
    test = torch.cat([torch.arange(min(N, 3)), torch.arange(len(J) - _UNSEEN, len(J))])
    model.train(example.training)
    size = example.batch_size
    batches = [(_slice(train, slice(n, n + size)), _slice(y, slice(n, n + size))) for n in range(0, N, size)]
    settings = {
        "prior": PRIORS[example.prior](precision=10.0**example.log_precision),
        "parameters": PARAMETERS[example.parameters][0],
        "num_samples": example.num_samples,
        "seed": example.seed,
        "linear_model": example.linear_model,
    }
    return Problem(
        example, model, batches, likelihood, settings, given, dense, _slice(x, test), J[test], 1 / multiplicity, y, loss
    )


def _g_scale(dense: Dense, names: list[str], parameters: dict[str, Tensor]) -> Tensor:
    """`diag(M)^{-1/2}`, entries below a thousandth of the mean of their layer raised to that."""
    diagonal = torch.einsum("ncp,ncd,ndp->p", dense.J, curvature(dense.loss, dense.network), dense.J)
    layers = [name.rpartition(".")[0] for name in names for _ in range(parameters[name].numel())]
    floored = diagonal.clone()
    for layer in set(layers):
        inside = torch.tensor([name == layer for name in layers])
        mean = float(diagonal[inside].mean())
        floored[inside] = diagonal[inside].clamp_min(1e-3 * (mean if mean > 0 else float(diagonal.mean())))
    return floored.rsqrt()
