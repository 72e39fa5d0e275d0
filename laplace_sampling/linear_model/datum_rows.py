r"""`DatumRows`: the gradient of each datum, one row each, factored where a layer uses its weights once a datum.

The gradient of a linear layer's weights at a datum is an outer product, `D_i = g_i a_iᵀ`, so that two rows have the
product `⟨D_i, D_j⟩ = (g_iᵀg_j)(a_iᵀa_j)`: `m + k` multiplications instead of `mk`. Those of other layers, as
convolutions and normalisations, are formed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.networks.layers import Outer
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.recorded import recorded


@dataclass(frozen=True)
class DatumRows:
    """Rows `φ_iᵀu_i` of some data, `[n, P]`, without all of their numbers.

    Attributes:
        size: `P`.
        formed: the part of the rows that is no outer product, `[n, p]`.
        places: of its columns among all; `None` where it has all columns in their order.
        outer: positions of each other layer, with `g` and `a`.
    """

    size: int
    formed: Float[Tensor, "n p"]
    places: Tensor | None = None
    outer: Sequence[Outer] = ()

    @classmethod
    def of_layers(cls, size: int, layers: Sequence[Outer]) -> "DatumRows":
        """The rows of layers that hold all weights; a single row of weights is formed."""
        rows = [(index[0], g * a) for index, g, a in layers if len(index) == 1]
        n, like = len(layers[0][1]), layers[0][1]
        formed = torch.cat([like.new_empty(n, 0), *(row for _, row in rows)], 1)
        places = torch.cat([layers[0][0].new_empty(0), *(index for index, _ in rows)])
        return cls(size, formed, places, [layer for layer in layers if len(layer[0]) > 1])

    @classmethod
    def cat(cls, parts: Sequence["DatumRows"]) -> "DatumRows":
        """The rows of one part after the other; formed ones if some parts are and others are not."""
        if not all(part.like(parts[0]) for part in parts):
            parts = [cls(part.size, part.dense()) for part in parts]
        outer = [
            (of_parts[0][0], torch.cat([g for _, g, _ in of_parts]), torch.cat([a for _, _, a in of_parts]))
            for of_parts in zip(*(part.outer for part in parts), strict=True)
        ]
        return replace(parts[0], formed=torch.cat([part.formed for part in parts]), outer=outer)

    @property
    def width(self) -> int:
        """Multiplications of a product of two rows."""
        return self.formed.shape[1] + sum(g.shape[1] + a.shape[1] for _, g, a in self.outer)

    def __len__(self) -> int:
        return len(self.formed)

    def dense(self) -> Float[Tensor, "n P"]:
        """All numbers of the rows."""
        if self.places is None:
            return self.formed
        rows = self.formed.new_zeros(len(self), self.size)
        rows[:, self.places] = self.formed
        for index, g, a in self.outer:
            rows[:, index.flatten()] = (g[:, :, None] * a[:, None]).flatten(1)
        return rows

    def scaled(self, scale: Float[Tensor, " P"]) -> "DatumRows":
        """The rows times a scale of each weight."""
        first = scale[0]
        if bool((scale == first).all()):
            return replace(self, formed=self.formed * first, outer=[(i, g * first, a) for i, g, a in self.outer])
        return DatumRows(self.size, self.dense() * scale)

    def like(self, other: "DatumRows") -> bool:
        """Whether the same layers are factored."""
        return len(self.outer) == len(other.outer) and (self.places is None) == (other.places is None)

    def narrowed(self, narrow: Callable[[Tensor], Tensor]) -> "DatumRows":
        """With other columns in place of the formed ones, for products only."""
        return replace(self, formed=narrow(self.formed))

    def squares(self) -> Float[Tensor, " n"]:
        """The squared norm of each row, in float64."""
        total = torch.zeros(len(self), dtype=torch.float64, device=self.formed.device)
        # All of them in float64 would be as much memory again, twice.
        for some in self.formed.split(max(1, NUMBERS_TOGETHER // max(1, len(self.formed))), 1):
            total += some.double().square().sum(1)
        for _, g, a in self.outer:
            total = total + g.double().square().sum(1) * a.double().square().sum(1)
        return total

    def squares_of_columns(self) -> Float[Tensor, " P"]:
        """The squared norm of each column."""
        total = self.formed.new_zeros(self.size)
        total[slice(None) if self.places is None else self.places] = self.formed.square().sum(0)
        for index, g, a in self.outer:
            total[index] = g.square().T @ a.square()
        return total

    @recorded
    def products(self, other: "DatumRows") -> Float[Tensor, "n m"]:
        """The products of all rows with all rows of another one of the same network, in float64."""
        if not self.like(other):
            return inner_products(self.dense(), other.dense())
        total = inner_products(self.formed, other.formed)
        for (_, g, a), (_, h, b) in zip(self.outer, other.outer, strict=True):
            total += (g.double() @ h.double().T) * (a.double() @ b.double().T)
        return total


def inner_products(left: Float[Tensor, "n p"], right: Float[Tensor, "m p"]) -> Float[Tensor, "n m"]:
    """`left rightᵀ` in float64.

    Where the data decide, a variance is the difference of much larger numbers: products in float32 would leave an error
    of `10⁻⁷` of the prior's variance, in a test 1 % of a posterior's that is 10⁻⁵ of it.
    """
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    width = max(1, NUMBERS_TOGETHER // max(1, len(left), len(right)))
    for a, b in zip(left.split(width, 1), right.split(width, 1), strict=True):
        total.addmm_(a.double(), b.double().T)
    return total
