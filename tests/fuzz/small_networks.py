"""Small networks of every kind that has a path of its own in the library."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
# Steps of a sequence, the length of each side of an image, and the number of words.
_STEPS, _SIDE, _WORDS = 3, 3, 5


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


class Calls(nn.Module):
    """Modules by name, and a function of this module and the inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.function(self, *args, **kwargs)


def _pairs(n: int) -> Tensor:
    return torch.randn(n, 2)


def _mlp(sizes: Sizes) -> Body:
    layers: list[nn.Module] = []
    width = 2
    for _ in range(sizes.depth):
        layers += [nn.Linear(width, sizes.width), sizes.act()]
        width = sizes.width
    return nn.Sequential(*layers), width, _pairs


def _norm(sizes: Sizes) -> Body:
    return nn.Sequential(nn.Linear(2, sizes.width), nn.LayerNorm(sizes.width), sizes.act()), sizes.width, _pairs


def _residual(sizes: Sizes) -> Body:
    inside = nn.Sequential(nn.Linear(sizes.width, sizes.width), sizes.act(), nn.Dropout(0.3))
    blocks = [Calls(lambda m, x: x + m.inside(x), inside=inside) for _ in range(sizes.depth)]
    return nn.Sequential(nn.Linear(2, sizes.width), *blocks), sizes.width, _pairs


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
        body = Calls(lambda m, x: m.layer(x)[0][:, -1], layer=kind(2, sizes.width, batch_first=True))
        return body, sizes.width, lambda n: torch.randn(n, _STEPS, 2)

    return build


def _attention(after: Callable[[Tensor], Tensor]) -> Callable[[Sizes], Body]:
    def forward(module: Any, x: Tensor) -> Tensor:
        return after(x + module.attention(x, x, x, need_weights=False)[0])

    def build(sizes: Sizes) -> Body:
        body = Calls(forward, attention=nn.MultiheadAttention(4, 2, batch_first=True))
        return body, 4, lambda n: torch.randn(n, _STEPS, 4)

    return build


def _words(sizes: Sizes) -> Body:
    body = Calls(lambda m, x: m.embedding(x).mean(1), embedding=nn.Embedding(_WORDS, sizes.width, padding_idx=0))
    return body, sizes.width, lambda n: torch.randint(_WORDS, (n, _STEPS))


def _named(sizes: Sizes) -> Body:
    def forward(m: Any, left: Tensor, right: Tensor) -> Tensor:
        return m.act(m.first(left) * m.second(right) + m.first(left))

    first, second = nn.Linear(2, sizes.width), nn.Linear(1, sizes.width, bias=False)
    body = Calls(forward, first=first, second=second, act=sizes.act())
    return body, sizes.width, lambda n: {"left": torch.randn(n, 2), "right": torch.randn(n, 1)}


def _tied(sizes: Sizes) -> Body:
    down, up, again = nn.Linear(2, sizes.width), nn.Linear(sizes.width, 2, bias=False), nn.Linear(2, sizes.width)
    again.weight = down.weight
    body = Calls(lambda m, x: m.act(m.again(m.up(m.act(m.down(x))))), down=down, act=sizes.act(), up=up, again=again)
    return body, sizes.width, _pairs


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
    return nn.Sequential(layer, nn.ReLU()), sizes.width, _pairs


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
    "attention": _attention(lambda h: h.mean(1)),
    "tokens": _attention(lambda h: h),
    "words": _words,
    "named": _named,
    "tied": _tied,
    "frozen": _frozen,
    "dead": _dead,
    "heads": _mlp,
}


def build(kind: str, sizes: Sizes, num_data: int) -> tuple[nn.Module, Any]:
    """A network of random weights, whose last layer is called `head`, and inputs."""
    body, width, inputs = NETWORKS[kind](sizes)
    if kind == "heads":
        heads = {"kind": nn.Linear(width, 3), "value": nn.Linear(width, 2), "count": nn.Linear(width, 1)}
        head: nn.Module = Calls(
            lambda m, h: {"kind": m.kind(h), "value": m.value(h), "count": m.count(h)[:, 0]}, **heads
        )
    elif kind == "image":
        head = nn.Conv2d(width, sizes.outputs, 1)
    else:
        head = nn.Linear(width, sizes.outputs)
    network = Calls(lambda m, *args, **kwargs: m.head(m.body(*args, **kwargs)), body=body, head=head)
    return network, inputs(num_data)
