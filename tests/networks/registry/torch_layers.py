"""Layers of `torch.nn` in the table of compatibility, small and with random weights: `(library, name, build)`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, Any]]

__all__ = ["NETWORKS"]

NETWORKS: list[tuple[str, str, Build]] = []


def entry(library: str, name: str) -> Callable[[Build], Build]:
    def register(build: Build) -> Build:
        NETWORKS.append((library, name, build))
        return build

    return register


def images(size: int = 8, channels: int = 3, num: int = 2) -> Tensor:
    return torch.randn(num, channels, size, size)


def tokens(length: int = 5, vocabulary: int = 11, num: int = 3) -> Tensor:
    return torch.randint(1, vocabulary, (num, length))


class First(nn.Module):
    """The first of the outputs of a recurrent layer, or of a tuple, at the last step; then a linear layer."""

    def __init__(self, body: nn.Module, width: int, batch_first: bool = True) -> None:
        super().__init__()
        self.body, self.head, self.batch_first = body, nn.Linear(width, 2), batch_first

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x if self.batch_first else x.transpose(0, 1))[0]
        return self.head(out[:, -1] if self.batch_first else out[-1])


@entry("torch.nn", "MLP")
def _():
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2)), torch.randn(4, 3)


@entry("torch.nn", "CNN, batch norm")
def _():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
    )
    net[1].running_mean.normal_()  # pyright: ignore
    net[1].running_var.uniform_(0.5, 2)  # pyright: ignore
    return net, images()


@entry("torch.nn", "CNN, group and instance norm")
def _():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, groups=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, groups=2),
        nn.InstanceNorm2d(4, affine=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    ), images()  # fmt: skip


@entry("torch.nn", "layer and RMS norm")
def _():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.RMSNorm(4), nn.Linear(4, 2)), torch.randn(4, 3)


@entry("torch.nn", "weight norm (parametrisation)")
def _():
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Conv2d(3, 4, 3)), nn.Tanh(), nn.Flatten(), norm(nn.Linear(144, 2))), images()


@entry("torch.nn", "weight norm (hook)")
def _():
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3)


@entry("torch.nn", "spectral norm (parametrisation)")
def _():
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(3, 4)), nn.Tanh(), norm(nn.Linear(4, 2))), torch.randn(4, 3)


@entry("torch.nn", "spectral norm (hook)")
def _():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3)


@entry("torch.nn", "orthogonal parametrisation")
def _():
    return nn.Sequential(
        nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)
    ), torch.randn(4, 3)


class UNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.head = nn.Conv2d(2 * width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.middle(skip))], 1))


@entry("torch.nn", "U-Net")
def _():
    return UNet(), images()


@entry("torch.nn", "3-d and transposed 1-d convolution")
def _():
    return nn.Sequential(
        nn.Conv3d(1, 2, 3), nn.ReLU(), nn.Flatten(2), nn.ConvTranspose1d(2, 2, 3), nn.Flatten(), nn.LazyLinear(2)
    ), torch.randn(2, 1, 4, 4, 4)


@entry("torch.nn", "bilinear upsampling, pixel shuffle, PReLU")
def _():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.PReLU(), nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(1, 1, 3), nn.AvgPool2d(3),
    ), images(4)  # fmt: skip


@entry("torch.nn", "MultiheadAttention")
def _():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    return Attention(), torch.randn(3, 5, 4)


@entry("torch.nn", "TransformerEncoder")
def _():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(20, 2)), torch.randn(3, 5, 4)


@entry("torch.nn", "Transformer, encoder and decoder")
def _():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Transformer(4, 2, 1, 1, 8, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x, x[:, :2]))[:, -1]

    return Both(), torch.randn(3, 5, 4)


@entry("torch.nn", "fused attention, causal mask")
def _():
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])

    return Causal(), torch.randn(3, 5, 4)


@entry("torch.nn", "LSTM, 2 layers, both directions")
def _():
    return First(nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), 8), torch.randn(4, 5, 3)


@entry("torch.nn", "LSTM with projections")
def _():
    return First(nn.LSTM(3, 4, proj_size=2), 2, batch_first=False), torch.randn(4, 5, 3)


@entry("torch.nn", "LSTM on packed sequences")
def _():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.lstm(packed)[1][0][-1])

    return Packed(), (torch.randn(4, 5, 3), torch.tensor([5, 3, 4, 1]))


@entry("torch.nn", "GRU, both directions")
def _():
    return First(nn.GRU(3, 4, batch_first=True, bidirectional=True), 8), torch.randn(4, 5, 3)


@entry("torch.nn", "RNN and LSTMCell")
def _():
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.cell, self.head = nn.RNN(3, 4, batch_first=True), nn.LSTMCell(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for step in self.rnn(x)[0].unbind(1):
                state = self.cell(step, state)
            assert state is not None
            return self.head(state[0])

    return Cells(), torch.randn(4, 5, 3)


@entry("torch.nn", "Embedding, tied with the head")
def _():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embedding(x).mean(1)))

    return Tied(), tokens()


@entry("torch.nn", "EmbeddingBag, mean")
def _():
    return nn.Sequential(nn.EmbeddingBag(11, 4, padding_idx=1), nn.Tanh(), nn.Linear(4, 2)), tokens()


@entry("torch.nn", "EmbeddingBag, sum and max, with offsets")
def _():
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum, self.max = nn.EmbeddingBag(11, 4, mode="sum"), nn.EmbeddingBag(11, 4, mode="max")

        def forward(self, x: Tensor) -> Tensor:
            offsets = torch.arange(len(x)) * x.shape[1]
            return self.sum(x.flatten(), offsets) * self.max(x.flatten(), offsets)

    return Bags(), tokens()
