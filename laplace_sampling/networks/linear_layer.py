"""`LinearLayer`: a linear layer as a network of its own, whose Jacobian products are products of matrices.

The outputs `f = W z + b` are linear in the weights, `φ(z) = I ⊗ (z, 1)`: no derivative is taken, and no program traced.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.shell import HALF


class LinearLayer(Linearisation):
    """A `torch.nn.Linear` with inputs `z`, `[N, d]`, all of whose weights are random.

    A flat vector holds the matrix row by row, `[C, d]`, and then the bias, `[C]`, if there is one.
    """

    @staticmethod
    def fits(module: nn.Module, names: list[str], z: Any) -> bool:
        """Whether a module is such a layer, with these random weights, and `z` such inputs."""
        plain = type(module) is nn.Linear and not nn.utils.parametrize.is_parametrized(module)
        if not (plain and names == [name for name, _ in module.named_parameters()]):
            return False
        # Vectors of a layer in half precision are in float32, and so is not what it multiplies.
        matrix = isinstance(z, Tensor) and z.dim() == 2
        return matrix and z.dtype == module.weight.dtype and z.dtype not in HALF

    @property
    def num_inputs(self) -> int:
        """`d`."""
        return self.shapes["weight"][1]

    @property
    def has_bias(self) -> bool:
        return "bias" in self.shapes

    @property
    def index(self) -> Float[Tensor, "C D"]:
        """The position in a flat vector of the weight from each input, and of the bias, to each output."""
        num_outputs, num_inputs = self.shapes["weight"]
        index = torch.arange(num_outputs * num_inputs, device=self.device).reshape(num_outputs, num_inputs)
        if not self.has_bias:
            return index
        return torch.cat([index, index.numel() + torch.arange(num_outputs, device=self.device)[:, None]], 1)

    def extended(self, z: Float[Tensor, "N d"]) -> Float[Tensor, "N D"]:
        """The inputs, with a one for the bias, as they multiply the weights of each output."""
        return torch.cat([z, z.new_ones(len(z), 1)], 1) if self.has_bias else z

    def _parts(self, v: Float[Tensor, "*K P"]) -> tuple[Float[Tensor, "*K C d"], Float[Tensor, "*K C"] | None]:
        """The matrix and the bias of flat vectors."""
        shape = self.shapes["weight"]
        size = shape.numel()
        return v[..., :size].unflatten(-1, shape), v[..., size:] if self.has_bias else None

    def jvp(self, x: Any, v: Float[Tensor, "K P"], *, graph: bool = False) -> Float[Tensor, "K N C"]:
        """As `Linearisation` does."""
        self._check_width(v, "jvp")
        num, num_data = v.shape[0], x.shape[0]
        self.products["jvp"] += num * num_data
        weight, bias = self._parts(v)
        # One product of matrices for all vectors: a batched one is several times slower for few data.
        matrix = weight.flatten(0, 1).T
        product = x @ matrix if bias is None else torch.addmm(bias.flatten(), x, matrix)
        return product.view(num_data, num, -1).transpose(0, 1)

    def vjp(self, x: Any, u: Float[Tensor, "K N C"], *, graph: bool = False) -> Float[Tensor, "K P"]:
        """As `Linearisation` does."""
        self.products["vjp"] += len(u) * len(x)
        u = u.reshape(len(u), len(x), -1)
        weight = (u.movedim(1, 2).flatten(0, 1) @ x).reshape(len(u), -1)
        return torch.cat([weight, u.sum(1)], 1) if self.has_bias else weight

    def ggn(self, x: Any, v: Float[Tensor, "K P"], curvature: Callable[[Tensor], Tensor]) -> Float[Tensor, "K P"]:
        """As `Linearisation` does."""
        return self.vjp(x, curvature(self.jvp(x, v)))

    def vjp_each(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, "N P"]:
        """As `Linearisation` does."""
        self.products["vjp"] += len(x)
        u = u.reshape(len(x), -1)
        weight = (u[:, :, None] * x[:, None]).flatten(1)
        return torch.cat([weight, u], 1) if self.has_bias else weight

    def jacobian(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N C P"]:
        """As `Linearisation` does."""
        index, rows = self.index, x.new_zeros(len(x), self.shapes["weight"][0], self.num_parameters)
        self.products["vjp"] += len(x) * len(index)
        for c, positions in enumerate(index):
            rows[:, c, positions] = self.extended(x)
        return rows
