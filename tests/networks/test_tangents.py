"""Forward derivatives of exported operations are those of torch's own forward mode."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling.export.program import tangent_program
from laplace_sampling.networks.derivatives import forward_mode_kernels

K = 3


class Function(nn.Module):
    """A function of inputs times a weight, so that it has tangents."""

    def __init__(self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(shape, dtype=torch.float64)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def jvps(module: nn.Module, samples: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and products by `torch.func.jvp`, one sample after the other."""
    weights = {name: p.detach() for name, p in module.named_parameters()}

    def run(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, weights, (x,))

    with forward_mode_kernels():  # attention and weight normalisation have a forward derivative in some kernels only
        parts = [torch.func.jvp(run, (weights,), ({n: t[k] for n, t in samples.items()},)) for k in range(K)]
    return parts[0][0].detach(), torch.stack([tangent for _, tangent in parts]).detach()


def check(module: nn.Module, shape: tuple[int, ...]) -> None:
    """For batches of several sizes, also of one, though it is traced with two."""
    module = module.double().eval().requires_grad_(False)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    samples = {name: torch.randn(K, *p.shape, dtype=p.dtype) for name, p in module.named_parameters()}
    program = tangent_program(module, state, samples, torch.randn(2, *shape, dtype=torch.float64))
    for num in (1, 4):
        x = torch.randn(num, *shape, dtype=torch.float64)
        for found, expected in zip(program(state, samples, x), jvps(module, samples, x), strict=True):
            assert_close(found, expected, rtol=1e-9, atol=1e-11)


# Each with a kink or a pole away from the numbers that occur.


def activations(x: Tensor) -> Tensor:
    parts = [
        *(F.relu(x), F.leaky_relu(x, 0.2), F.elu(x, 0.7), F.gelu(x), F.gelu(x, approximate="tanh"), F.hardtanh(x)),
        *(F.softplus(x), F.mish(x), F.hardswish(x), F.silu(x), F.selu(x), F.relu6(4 * x), F.logsigmoid(x)),
    ]
    return torch.cat(parts, 1)


def bounded(x: Tensor) -> Tensor:
    parts = [
        *(x.clamp(-0.3, 0.6), x.clamp(min=0.1), x.clamp(max=0.2), x.tanh(), x.sigmoid(), x.round()),
        *(torch.maximum(x, x.sin()), torch.minimum(x, x.cos()), torch.where(x > 0.1, x, x**2), x.erf()),
    ]
    return torch.cat(parts, 1)


def elementary(x: Tensor) -> Tensor:
    y = x.abs() + 0.1
    parts = [
        *(y.log(), y.log1p(), y.sqrt(), y.rsqrt(), y.reciprocal(), x.sin(), x.cos(), x**3, y**0.5, -x),
        *(x.exp(), x.expm1(), x / y),
    ]
    return torch.cat(parts, 1)


def views(x: Tensor) -> Tensor:
    """`[N, 4, 6]`."""
    first, second = x.split([1, 3], 1)
    parts = [
        *(x.flatten(1), x.transpose(1, 2).reshape(-1, 24), x.unsqueeze(-1).squeeze(-1)[:, 1:3, ::2].flatten(1)),
        *(first.expand(-1, 3, -1).flatten(1) - second.flatten(1), x[:, 2], x.flip(1)[:, 0]),
        *(F.pad(x, (1, 2), value=5.0)[:, 1], x[:, [0, 3], 1], x.index_select(1, torch.tensor([3, 0]))[:, 0]),
        *(x.repeat(1, 1, 2)[:, 0], x.clone()[:, 1], torch.roll(x, 1, 2)[:, 0], torch.stack([x, 2 + x], 1)[:, 1, 0]),
    ]
    return torch.cat(parts, 1)


def sums(x: Tensor) -> Tensor:
    """`[N, 4, 6]`."""
    parts = [
        *(x.mean((1, 2))[:, None], x.sum(-1), x.cumsum(2)[:, 3], x.amax(2), x.max(1).values),
        *((x @ x.transpose(1, 2)).flatten(1), x.softmax(-1)[:, 0], x.log_softmax(1)[:, 1]),
        *(x[:, 0] / x.norm(dim=2)[:, :1], x.var(2), F.normalize(x, dim=1)[:, 2]),
    ]
    return torch.cat(parts, 1)


def images(x: Tensor) -> Tensor:
    """`[N, 2, 6, 6]`: pooling and other sizes."""
    parts = [
        *(F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, (2, 3))),
        *(F.interpolate(x, scale_factor=2.0), F.interpolate(x, scale_factor=2.0, mode="bilinear")),
        *(F.instance_norm(x), F.pixel_shuffle(x.repeat(1, 2, 1, 1), 2)),
    ]
    return torch.cat([part.flatten(1) for part in parts], 1)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (activations, (5,)),
        (bounded, (5,)),
        (elementary, (5,)),
        (views, (4, 6)),
        (sums, (4, 6)),
        (images, (2, 6, 6)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_functions(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    check(Function(function, shape), shape)


class Embedded(nn.Module):
    """Tokens, of which one is padding, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.again = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.again.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.embedding(x.abs().long().clamp(max=4))).sum(1)


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    transposed = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
    return {
        "groups": (nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Conv2d(6, 6, 3, groups=6)), (4, 6, 6)),
        "transposed": (nn.Sequential(nn.Conv2d(2, 4, 1), nn.ReLU(), transposed), (2, 4, 4)),
        "conv1d": (nn.Sequential(nn.Conv1d(2, 4, 3, stride=2), nn.Tanh(), nn.Conv1d(4, 2, 2, dilation=2)), (2, 12)),
        "batch_norm": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), (4,)),
        "group_norm": (nn.Sequential(nn.Conv2d(2, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3)), (2, 4, 4)),
        "layer_norm": (nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 2)), (3, 4)),
        "norm_first": (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), (4,)),
        "attention": (nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), (3, 4)),
        "tied": (Embedded(), (3,)),
        "weight_norm": (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()), (4,)),
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "attention")) for name in layers()]
)
def test_layers(name: str) -> None:
    torch.manual_seed(2)
    module, shape = layers()[name]
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.running_mean, part.running_var = torch.randn(6), torch.rand(6) + 0.5
    check(module, shape)


def test_some_weights_are_random() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).double().requires_grad_(False)
    state, x = dict(module.named_parameters()), torch.randn(4, 1, 4, 4, dtype=torch.float64)
    samples = {"0.bias": torch.randn(K, 2, dtype=torch.float64), "3.weight": torch.randn(K, 2, 8, dtype=torch.float64)}
    weights = {name: state[name] for name in samples}

    def run(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(module, weights, (x,))

    expected = [torch.func.jvp(run, (weights,), ({n: t[k] for n, t in samples.items()},))[1] for k in range(K)]
    assert_close(tangent_program(module, state, samples, x)(state, samples, x)[1], torch.stack(expected))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: torch.fft.fft(x).real, r"aten\._fft"),
        (lambda x: x.amax((1, 2)), r"aten\.amax"),
        (
            lambda x: x.unflatten(2, (2, 3))[:, [0], :, [1]].transpose(0, 1),
            "neighbours",
        ),
        (lambda x: x * float(x.sum()), "to_module"),
        (lambda x: torch.ones_like(x), "outputs"),
    ],
    ids=["fft", "amax", "index", "value", "constant"],
)
def test_what_does_not_go_is_named(function: Callable[[Tensor], Tensor], message: str) -> None:
    module = Function(function, (4, 6)).requires_grad_(False)
    samples = {"weight": torch.randn(K, 4, 6, dtype=torch.float64)}
    with pytest.raises(ValueError, match=message):
        tangent_program(module, {"weight": module.weight}, samples, torch.randn(2, 4, 6, dtype=torch.float64))
