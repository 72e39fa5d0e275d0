"""Modules that do what few layers do, in the table of compatibility: `(library, name, build)`.

Graphs, routing, in-place operations, custom functions, buffers, checkpointing, wrappers and quantised weights.
"""

import torch
from networks.registry.torch_layers import NETWORKS, entry
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["NETWORKS"]


class MessagePassing(nn.Module):
    """Two rounds of messages along the edges of one graph, the same for each datum."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(6, 4), nn.Linear(7, 3)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges  # pyright: ignore
        for _ in range(2):
            messages = torch.relu(self.message(torch.cat([x[:, source], x[:, target]], -1)))
            index = target[None, :, None].expand_as(messages)
            total = torch.zeros(*x.shape[:2], 4, dtype=x.dtype).scatter_add(1, index, messages)
            x = self.update(torch.cat([x, total], -1))
        return x.sum(1)


@entry("torch.nn", "message passing by `scatter_add`")
def _():
    return MessagePassing(), torch.randn(3, 4, 3)


class Mixture(nn.Module):
    """Each datum goes to one expert, by control flow that depends on the data."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.gate, self.in_place = nn.Linear(3, 3), in_place
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 2)
        for n, expert in enumerate(self.experts):
            rows = (chosen == n).nonzero()[:, 0]
            if len(rows):
                out[rows] = weight[rows, None] * expert(x[rows])
        return out


@entry("torch.nn", "mixture of experts, data-dependent routing")
def _():
    return Mixture(), torch.randn(6, 3)


@entry("torch.nn", "in-place operations")
def _():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(len(x), 4, dtype=x.dtype)
            h += self.first(x)
            h.mul_(2).tanh_()
            return self.second(h)

    return InPlace(), torch.randn(4, 3)


@entry("torch.nn", "a custom `autograd.Function` without `jvp`")
def _():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, g):  # pyright: ignore
            (x,) = ctx.saved_tensors
            return 3 * x**2 * g

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(Cube.apply(self.first(x)))  # pyright: ignore

    return Custom(), torch.randn(4, 3)


@entry("torch.nn", "buffers written in evaluation mode")
def _():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.last = nn.Linear(3, 2), None
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # pyright: ignore
            self.last = self.linear(x)
            return torch.tanh(self.last)

    return Counting(), torch.randn(4, 3)


class Checkpointed(nn.Module):
    """A module of which a part runs again in the pullback."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Radial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.centres, self.head = nn.Linear(3, 4), nn.Parameter(torch.randn(5, 4)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.exp(-(torch.cdist(self.embed(x), self.centres) ** 2)))


@entry("torch.nn", "radial basis functions by `torch.cdist`")
def _():
    return Radial(), torch.randn(4, 3)


class Spectral(nn.Module):
    """Learnt filters of frequencies, as in neural operators, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.head = nn.Parameter(torch.randn(2, 4, 5)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        filters = torch.complex(self.filters[0], self.filters[1])
        filtered = torch.fft.irfft(torch.fft.rfft(x) * filters, n=x.shape[-1]).cumsum(-1)
        return nn.functional.glu(self.head(filtered).flatten(1))


@entry("torch.nn", "filters of a Fourier transform, GLU")
def _():
    return Spectral(), torch.randn(3, 4, 8)


@entry("torch.nn", "gradient checkpointing")
def _():
    return Checkpointed(), torch.randn(4, 3)


@entry("torch.nn", "`torch.compile`d")  # pyright: ignore
def _():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return torch.compile(net), torch.randn(4, 3)  # pyright: ignore


@entry("torch.nn", "`DataParallel`")
def _():
    return nn.DataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), torch.randn(4, 3)


class Int8Linear(nn.Module):
    """Weights of eight bits, which have no derivative."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(outputs) / 100)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to(x.dtype).T) * self.scale


@entry("torch.nn", "weights of 8 bits")
def _():
    return nn.Sequential(Int8Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3)


class Quantised(nn.Module):
    """A body that always computes in eight bits, and a head in floating point."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.body, self.head = torch.ao.quantization.quantize_dynamic(body), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.type("torch.FloatTensor")).to(x.dtype))


@entry("torch.nn", "dynamically quantised body")
def _():
    return Quantised(), torch.randn(4, 3)


@entry("torch.nn", "dynamically quantised head")
def _():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return torch.ao.quantization.quantize_dynamic(net, {"2"}), torch.randn(4, 3)
