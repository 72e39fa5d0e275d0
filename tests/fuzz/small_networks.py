"""Small networks of every kind that has a path of its own in the library."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "NETWORKS", "Sizes", "build"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
    "leaky_relu": nn.LeakyReLU,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
}
# Steps of a sequence, and the length of each side of an image.
_STEPS, _SIDE = 3, 3
_WORDS = 5


@dataclass(frozen=True)
class Sizes:
    """How large a network is."""

    outputs: int
    width: int = 3
    depth: int = 1
    activation: str = "tanh"

    def act(self) -> nn.Module:
        return ACTIVATIONS[self.activation]()


# A network without its last layer, the width of what goes into that, and a function that makes inputs of so many data.
Body = tuple[nn.Module, int, Callable[[int], Any]]


class WithHead(nn.Module):
    """A body and a linear layer, whose name is `head`."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.head(self.body(*args, **kwargs))


class Residual(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(x)


class Recurrent(nn.Module):
    """The last state of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


class Attention(nn.Module):
    """A mean over the steps, or all of them."""

    def __init__(self, width: int, mean: bool) -> None:
        super().__init__()
        self.attention, self.mean = nn.MultiheadAttention(width, 2, batch_first=True), mean

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(x, x, x, need_weights=False)[0]
        return h.mean(1) if self.mean else h


class Words(nn.Module):
    """The mean of embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, width, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x).mean(1)


class Named(nn.Module):
    """Two inputs by name."""

    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(2, width), nn.Linear(1, width, bias=False), act

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.act(self.first(left) * self.second(right) + self.first(left))


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self, width: int, act: nn.Module) -> None:
        super().__init__()
        self.down, self.act = nn.Linear(2, width), act
        self.up = nn.Linear(width, 2, bias=False)
        self.again = nn.Linear(2, width)
        self.again.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.again(self.up(self.act(self.down(x)))))


class Heads(nn.Module):
    """A dictionary of outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.kind, self.value, self.count = nn.Linear(width, 3), nn.Linear(width, 2), nn.Linear(width, 1)

    def forward(self, h: Tensor) -> dict[str, Tensor]:
        return {"kind": self.kind(h), "value": self.value(h), "count": self.count(h)[:, 0]}


def _mlp(sizes: Sizes) -> Body:
    layers: list[nn.Module] = []
    width = 2
    for _ in range(sizes.depth):
        layers += [nn.Linear(width, sizes.width), sizes.act()]
        width = sizes.width
    return nn.Sequential(*layers), width, lambda n: torch.randn(n, 2)


def _norm(sizes: Sizes) -> Body:
    body = nn.Sequential(nn.Linear(2, sizes.width), nn.LayerNorm(sizes.width), sizes.act())
    return body, sizes.width, lambda n: torch.randn(n, 2)


def _residual(sizes: Sizes) -> Body:
    inside = nn.Sequential(nn.Linear(sizes.width, sizes.width), sizes.act(), nn.Dropout(0.3))
    body = nn.Sequential(nn.Linear(2, sizes.width), *(Residual(inside) for _ in range(sizes.depth)))
    return body, sizes.width, lambda n: torch.randn(n, 2)


def _conv(sizes: Sizes) -> Body:
    norm = nn.BatchNorm2d(sizes.width)
    norm.running_mean = 0.3 * torch.randn(sizes.width)
    norm.running_var = 0.5 + torch.rand(sizes.width)
    body = nn.Sequential(nn.Conv2d(1, sizes.width, 2), norm, sizes.act(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return body, sizes.width, lambda n: torch.randn(n, 1, _SIDE, _SIDE)


def _image(sizes: Sizes) -> Body:
    body = nn.Sequential(nn.Conv2d(1, sizes.width, 2), nn.GroupNorm(1, sizes.width), sizes.act())
    return body, sizes.width, lambda n: torch.randn(n, 1, _SIDE, _SIDE)


def _recurrent(kind: Callable[..., nn.RNNBase]) -> Callable[[Sizes], Body]:
    def build(sizes: Sizes) -> Body:
        body = Recurrent(kind(2, sizes.width, batch_first=True))
        return body, sizes.width, lambda n: torch.randn(n, _STEPS, 2)

    return build


def _attention(mean: bool) -> Callable[[Sizes], Body]:
    def build(sizes: Sizes) -> Body:
        return Attention(4, mean), 4, lambda n: torch.randn(n, _STEPS, 4)

    return build


def _words(sizes: Sizes) -> Body:
    return Words(sizes.width), sizes.width, lambda n: torch.randint(_WORDS, (n, _STEPS))


def _named(sizes: Sizes) -> Body:
    return (
        Named(sizes.width, sizes.act()),
        sizes.width,
        lambda n: {"left": torch.randn(n, 2), "right": torch.randn(n, 1)},
    )


def _tied(sizes: Sizes) -> Body:
    return Tied(sizes.width, sizes.act()), sizes.width, lambda n: torch.randn(n, 2)


def _frozen(sizes: Sizes) -> Body:
    body, width, inputs = _mlp(sizes)
    for weight in list(body.parameters())[:1]:
        weight.requires_grad_(False)
    return body, width, inputs


def _dead(sizes: Sizes) -> Body:
    """A unit that is never on."""
    layer = nn.Linear(2, sizes.width)
    with torch.no_grad():
        layer.bias[0] = -1e3
    return nn.Sequential(layer, nn.ReLU()), sizes.width, lambda n: torch.randn(n, 2)


# Names of the kinds of networks; `image`, `tokens` and `heads` say what the outputs are.
NETWORKS: dict[str, Callable[[Sizes], Body]] = {
    "mlp": _mlp,
    "norm": _norm,
    "residual": _residual,
    "conv": _conv,
    "image": _image,
    "rnn": _recurrent(nn.RNN),
    "gru": _recurrent(nn.GRU),
    "lstm": _recurrent(nn.LSTM),
    "attention": _attention(mean=True),
    "tokens": _attention(mean=False),
    "words": _words,
    "named": _named,
    "tied": _tied,
    "frozen": _frozen,
    "dead": _dead,
    "heads": _mlp,
}


def build(kind: str, sizes: Sizes, num_data: int) -> tuple[nn.Module, Any]:
    """A network of random weights, and inputs."""
    body, width, inputs = NETWORKS[kind](sizes)
    if kind == "heads":
        head: nn.Module = Heads(width)
    elif kind == "image":
        head = nn.Conv2d(width, sizes.outputs, 1)
    else:
        head = nn.Linear(width, sizes.outputs)
    return WithHead(body, head), inputs(num_data)
