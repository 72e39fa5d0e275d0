"""Jacobian products of a plain network from stored activations: the numbers of `NetworkFeatures`, in less time.

A plain network is a `Sequential` of blocks: a convolution or linear layer, then perhaps a ReLU, then perhaps an average
pooling by two. The inputs of its layers stay the same while a posterior is sampled. They are computed once, and a
product then is a few matrix products a layer. One product of one datum and one vector counts as it does elsewhere.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laplace_sampling.linear_model.features import Features


@dataclass
class _Block:
    """A layer with weights, and what follows it; `columns` `[n, in, positions]` are what its weights multiply.

    Of the first block, which no tangent enters, they are those after ReLU and pooling, `[n, out, in + 1, positions]`,
    the last one that of the bias.
    """

    layer: nn.Conv2d | nn.Linear
    relu: bool = False
    pool: bool = False
    columns: Tensor = field(default_factory=lambda: torch.empty(0))
    active: Tensor = field(default_factory=lambda: torch.empty(0))
    shape: torch.Size = field(default_factory=torch.Size)

    def store(self, x: Tensor, first: bool, batch_size: int) -> Tensor:
        """The outputs; they may be flattened."""
        parts = [self._store(part, first) for part in x.split(batch_size)]
        columns, active, outputs = (torch.cat(p) for p in zip(*parts, strict=True))
        self.columns, self.active = columns, active
        return outputs

    def _store(self, x: Tensor, first: bool) -> tuple[Tensor, Tensor, Tensor]:
        out = self._raw(x)
        self.shape, active = out.shape[1:], out > 0
        columns = self._unfold(x)
        if first:
            ones = torch.ones_like(columns[:, :1])
            all_columns = torch.cat([columns, ones], 1)[:, None]  # [n, 1, in + 1, positions]
            channels = [
                self._follow(
                    all_columns.reshape(len(x), -1, *self.shape[1:]),
                    active[:, c : c + 1].expand(-1, all_columns.shape[2], *self.shape[1:]),
                ).flatten(2)
                for c in range(self.shape[0])
            ]
            columns = torch.stack(channels, 1)
        return columns, active, self._follow(out, active)

    def _raw(self, x: Tensor) -> Tensor:
        return self.layer(x if isinstance(self.layer, nn.Conv2d) else x.flatten(1))

    def _unfold(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return x.flatten(1)[:, :, None]
        return F.unfold(x, self.layer.kernel_size, padding=self.layer.padding)  # type: ignore[arg-type]

    def _follow(self, t: Tensor, active: Tensor) -> Tensor:
        t = t * active if self.relu else t
        return F.avg_pool2d(t, 2) if self.pool else t

    def push(self, tangent: Tensor | None, v: Tensor, batch: Tensor) -> Tensor:
        """Tangents `[n·K, ...]` of the outputs from those of the inputs and of the weights, `[K, out, in + 1]`."""
        n, num = len(batch), len(v)
        columns = self.columns[batch]
        if tangent is None:
            t = torch.matmul(v.transpose(0, 1), columns)  # [n, out, K, positions]
            return t.transpose(1, 2).reshape(n * num, len(self.layer.weight), *self._after())
        from_weights = v[:, :, :-1].flatten(0, 1) @ columns + v[:, :, -1].reshape(-1, 1)  # [n, K·out, positions]
        if isinstance(self.layer, nn.Linear):
            t = from_weights.reshape(n * num, -1) + tangent.flatten(1) @ self.layer.weight.T
        else:
            t = from_weights.reshape(n * num, *self.shape) + F.conv2d(
                tangent, self.layer.weight, padding=self.layer.padding
            )
        return self._follow(t, self._each(batch, num)) if self.relu or self.pool else t

    def pull(self, u: Tensor, batch: Tensor, num: int, first: bool, each: bool = False) -> tuple[Tensor, Tensor]:
        """Cotangents `[K, out, in + 1]` of the weights, and those of the inputs, from those of the outputs.

        With `each`, of the weights for each datum, `[n, out, in + 1]`, at `K = 1`.
        """
        n = len(batch)
        columns = self.columns[batch]
        if first:
            u = u.reshape(n, num, len(self.layer.weight), -1).transpose(1, 2)  # [n, out, K, positions]
            weights = torch.matmul(u, columns.mT)
            return (weights[:, :, 0] if each else weights.sum(0).transpose(0, 1)), u
        if self.pool:
            u = F.interpolate(u.reshape(n * num, *self.shape[:1], *self._after()), scale_factor=2.0) / 4
            grow = [self.shape[2] - u.shape[3], self.shape[1] - u.shape[2]]
            u = F.pad(u, [0, grow[0], 0, grow[1]]) if any(grow) else u
        if self.relu:
            u = u.reshape(n * num, *self.shape) * self._each(batch, num)
        out = u.reshape(n, num, self.shape[0], -1)
        if each:
            weight, bias = out[:, 0] @ columns.mT, out[:, 0].sum(2, keepdim=True)
        else:
            out = out.permute(1, 2, 0, 3).reshape(num * self.shape[0], -1)
            weight = (out @ columns.transpose(1, 2).flatten(0, 1)).reshape(num, self.shape[0], -1)
            bias = out.sum(1).reshape(num, self.shape[0], 1)
        if isinstance(self.layer, nn.Linear):
            back = u.reshape(n * num, -1) @ self.layer.weight
        else:
            u = u.reshape(n * num, *self.shape)
            back = F.conv_transpose2d(u, self.layer.weight, padding=self.layer.padding)  # type: ignore[arg-type]
        return torch.cat([weight, bias], 2), back

    def _each(self, batch: Tensor, num: int) -> Tensor:
        active = self.active[batch]
        return active[:, None].expand(-1, num, *self.shape).flatten(0, 1)

    def _after(self) -> list[int]:
        return [side // 2 if self.pool else side for side in self.shape[1:]]


class StoredFeatures(Features):
    """`Φ` of a plain network on inputs `x`."""

    def __init__(self, model: nn.Sequential, x: Tensor, batch_size: int = 125) -> None:
        self.blocks = _blocks(model)
        with torch.no_grad():
            outputs = x
            for number, block in enumerate(self.blocks):
                outputs = block.store(outputs, number == 0, batch_size)
        self.outputs_of_network = outputs
        self.num_data, self.num_outputs, self.batch_size = len(x), outputs.shape[1], batch_size
        self.size = sum(p.numel() for p in model.parameters())
        self.products = {"jvp": 0, "vjp": 0}

    @property
    def device(self) -> torch.device:
        return self.blocks[0].columns.device

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0].columns.dtype

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        self.products["jvp"] += len(v) * len(batch)
        tangent, offset = None, 0
        with torch.no_grad():
            for block in self.blocks:
                weight, bias = block.layer.weight, block.layer.bias
                middle, end = offset + weight.numel(), offset + weight.numel() + len(weight)
                assert bias is not None
                block_v = torch.cat([v[:, offset:middle].reshape(len(v), len(weight), -1), v[:, middle:end, None]], 2)
                tangent, offset = block.push(tangent, block_v, batch), end
        assert tangent is not None
        return tangent.reshape(len(batch), len(v), -1).transpose(0, 1)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        self.products["vjp"] += len(u) * len(batch)
        parts: list[Tensor] = []
        cotangent = u.transpose(0, 1).reshape(len(batch) * len(u), -1)
        with torch.no_grad():
            for block in reversed(self.blocks):
                gradients, cotangent = block.pull(cotangent, batch, len(u), block is self.blocks[0])
                parts = [gradients[:, :, :-1].flatten(1), gradients[:, :, -1], *parts]
        return torch.cat(parts, 1)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        self.products["vjp"] += len(batch)
        parts: list[Tensor] = []
        cotangent = u
        with torch.no_grad():
            for block in reversed(self.blocks):
                gradients, cotangent = block.pull(cotangent, batch, 1, block is self.blocks[0], each=True)
                parts = [gradients[:, :, :-1].flatten(1), gradients[:, :, -1], *parts]
        return torch.cat(parts, 1)

    def rows(self, batch: Tensor) -> Tensor:
        eye = torch.eye(self.num_outputs, device=self.device, dtype=self.dtype)
        return torch.stack([self.vjp(eye[:, None], datum[None]) for datum in batch])


def _blocks(model: nn.Sequential) -> list[_Block]:
    blocks: list[_Block] = []
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            blocks.append(_Block(layer))
        elif isinstance(layer, nn.ReLU) and not blocks[-1].pool:
            blocks[-1].relu = True
        elif isinstance(layer, nn.AvgPool2d) and layer.kernel_size == 2:
            blocks[-1].pool = True
        elif not isinstance(layer, nn.Flatten):
            raise TypeError(f"{layer} is not a layer of a plain network.")
    return blocks
