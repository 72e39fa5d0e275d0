"""The registry of cases: small problems in float64 that together cover every shape and likelihood."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laplace_sampling.data.batches import split
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.from_loss import from_loss
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.linear_model.features import NetworkFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.networks.linearisation import Linearisation


@dataclass
class Case:
    """A network with data. `likelihood` and `y` become those of flattened outputs; `given` are what a user gives."""

    model: nn.Module
    likelihood: Likelihood
    x: Tensor
    y: Any
    batch_size: int = 3

    def __post_init__(self) -> None:
        self.given = self.likelihood, self.y
        layout = Linearisation(self.model).evaluate(self.x)[1]
        self.likelihood, self.y = self.likelihood.prepare(layout, self.y)

    @property
    def batches(self) -> list[tuple[Tensor, Any]]:
        return list(zip(self.x.split(self.batch_size), split(self.given[1], self.batch_size), strict=True))

    def linear_model(self, kind: str = "homogeneous") -> LinearModel:
        network = Linearisation(self.model)
        f = network(self.x).reshape(len(self.x), -1)
        features = NetworkFeatures(network, TrainingData(self.batches), network.evaluate(self.x)[1])
        offset = torch.zeros_like(f)
        if kind == "affine":
            offset = f - features.outputs(network.weights[None])[0]
        return LinearModel(features, offset, f, self.y, self.likelihood)


class ScalarAndMatrix(nn.Module):
    """`a · xW + b`, with `a` a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(0.7))
        self.weight = nn.Parameter(torch.randn(3, 2))
        self.b = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a * (x @ self.weight)) + self.b


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class Heads(nn.Module):
    """A dictionary of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.value, self.count = _mlp(2, 4), nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).tanh()
        return {"kind": self.kind(h), "value": self.value(h), "count": self.count(h)[:, 0]}


def smooth_loss(f: Tensor, y: Tensor) -> Tensor:
    """Convex in `f`, coupled between outputs, of no known distribution."""
    return (f - y).cosh().log().sum() + torch.nn.functional.softplus(f.sum())


def _ignored(labels: Tensor, index: int = -100) -> Tensor:
    """Every fifth label is one to be ignored."""
    labels.view(-1)[::5] = index
    return labels


def _mlp(inputs: int, outputs: int, width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def _conv_bn(outputs: int) -> nn.Sequential:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, outputs),
    )
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    return net


def _frozen() -> nn.Sequential:
    net = _mlp(3, 4)
    net[0].requires_grad_(False)
    return net


def _labels(num: int, classes: int) -> Tensor:
    return torch.randint(classes, (num,))


CASES: dict[str, Callable[[], Case]] = {
    "regression": lambda: Case(_mlp(2, 1), Gaussian(2.5), torch.randn(7, 2), torch.randn(7, 1)),
    "regression_many_data": lambda: Case(nn.Linear(2, 1), Gaussian(0.5), torch.randn(20, 2), torch.randn(20, 1), 6),
    "regression_per_output": lambda: Case(
        _mlp(2, 3), Gaussian(torch.tensor([0.5, 1.0, 4.0])), torch.randn(8, 2), torch.randn(8, 3)
    ),
    "regression_flat": lambda: Case(
        nn.Sequential(_mlp(2, 1), nn.Flatten(0)), Gaussian(1.5), torch.randn(7, 2), torch.randn(7)
    ),
    "image_regression": lambda: Case(
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 1)),
        Gaussian(2.0),
        torch.randn(4, 1, 3, 3),
        torch.randn(4, 2, 3, 3),
    ),
    "classification": lambda: Case(_mlp(3, 4), Categorical(), torch.randn(8, 3), _labels(8, 4)),
    "classification_many_data": lambda: Case(nn.Linear(2, 3), Categorical(), torch.randn(25, 2), _labels(25, 3), 10),
    "conv_batch_norm": lambda: Case(_conv_bn(4), Categorical(), torch.randn(5, 1, 4, 4), _labels(5, 4), 2),
    "layer_norm": lambda: Case(
        nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)),
        Categorical(),
        torch.randn(7, 3),
        _labels(7, 3),
    ),
    "attention": lambda: Case(Attention(), Categorical(), torch.randn(5, 3, 4), _labels(5, 3), 2),
    "binary": lambda: Case(_mlp(2, 1), Bernoulli(), torch.randn(7, 2), _labels(7, 2)[:, None].double()),
    "multi_label": lambda: Case(_mlp(2, 3), Bernoulli(), torch.randn(7, 2), torch.randint(2, (7, 3))),
    "segmentation": lambda: Case(
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)),
        Categorical(),
        torch.randn(4, 1, 3, 2),
        _ignored(_labels(24, 3).reshape(4, 3, 2)),
    ),
    "token_labels": lambda: Case(
        _mlp(2, 3),
        Categorical(class_dim=-1, ignore_index=9),
        torch.randn(5, 2, 2),
        _ignored(_labels(10, 3), 9).reshape(5, 2),
    ),
    "poisson": lambda: Case(_mlp(2, 2), Poisson(), torch.randn(7, 2), torch.randint(6, (7, 2))),
    "heteroscedastic": lambda: Case(_mlp(2, 4), HeteroscedasticGaussian(), torch.randn(8, 2), 0.5 * torch.randn(8, 2)),
    "multi_task": lambda: Case(
        Heads(),
        MultiTask({"value": Gaussian(2.0, learn=False), "kind": Categorical(), "count": Poisson()}),
        torch.randn(6, 2),
        {"kind": _labels(6, 3), "value": torch.randn(6, 2), "count": torch.randint(4, (6,))},
    ),
    "from_loss": lambda: Case(_mlp(2, 2), from_loss(smooth_loss), torch.randn(7, 2), torch.randn(7, 2)),
    "frozen_body": lambda: Case(_frozen(), Categorical(), torch.randn(7, 3), _labels(7, 4)),
    "scalar_and_matrix": lambda: Case(ScalarAndMatrix(), Gaussian(1.0), torch.randn(7, 3), torch.randn(7, 2)),
}


# One of each shape of data and outputs and of each kind of network, for what no likelihood plays a part in.
FEW_CASES = [
    "regression_per_output",
    "regression_flat",
    "image_regression",
    "conv_batch_norm",
    "attention",
    "token_labels",
    "multi_task",
    "scalar_and_matrix",
]


def make_case(name: str) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            case = CASES[name]()
        finally:
            torch.set_default_dtype(default)
    case.model.eval()
    return case
