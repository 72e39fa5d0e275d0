r"""Eigenvalue-corrected Kronecker factors as a matrix: `M̂ = (U_G ⊗ U_A) diag(Λ) (U_G ⊗ U_A)ᵀ` for each layer.

`kfac.py` computes them. In these eigenvectors every function of `M̂ + s I` is elementwise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.dense_curvature import DenseCurvature
from laplace_sampling.linear_model.low_rank import LowRank
from laplace_sampling.solvers.preconditioners import Factored, Jacobi

__all__ = ["CURVATURE", "Inverse", "Kronecker", "KroneckerBlock", "outer_factors", "restored_curvature"]

# Before the names of the tensors of `M̂` in a file.
CURVATURE = "curvature."
# The tensors of a block, in the order of its arguments.
_PARTS = ("index", "U_G", "U_A", "eigenvalues")
# Numbers of rows that are turned together.
_NUMBERS = 2**22
# Added to the eigenvalues: one number, or one for each weight.
Shift = float | Tensor


@dataclass(frozen=True)
class KroneckerBlock:
    """`(U_G ⊗ U_A) diag(Λ) (U_G ⊗ U_A)ᵀ` for the weights of one layer, or the same for each of its groups.

    Attributes:
        index: positions of the weights in the flat vector, a matrix `[m, k]` for each of `q` groups.
        U_G: orthonormal columns, for the outputs.
        U_A: the same for the inputs.
        eigenvalues: `Λ`.
    """

    index: Tensor
    U_G: Float[Tensor, "q m m"]
    U_A: Float[Tensor, "q k k"]
    eigenvalues: Float[Tensor, "q m k"]

    def shift(self, shift: Shift) -> float:
        """The shift of this block, one number: the eigenvectors are those of `M̂ + s I` for no other shift."""
        if not isinstance(shift, Tensor) or shift.dim() == 0:
            return float(shift)
        shifts = shift[self.index].flatten()
        if not bool((shifts == shifts[0]).all()):
            raise ValueError(
                "Kronecker-factored curvature takes one prior precision for the weights of a layer: use "
                'prior="isotropic", "layerwise" or "g-prior".'
            )
        return float(shifts[0])

    def turned(self, v: Float[Tensor, "*K P"]) -> Float[Tensor, "*K q m k"]:
        """The coordinates of `v_k` in the eigenvectors."""
        # Without forming a Kronecker product, which has (mk)² entries.
        return self.U_G.mT.to(v) @ v[..., self.index] @ self.U_A.to(v)

    def apply(self, f: Callable[[Tensor], Tensor], v: Float[Tensor, "K P"]) -> Float[Tensor, "K q m k"]:
        """`f(M̂) v_k` at these positions."""
        # In the precision of the vectors: where many outputs share a layer, this is most of a sample's cost.
        return self.U_G.to(v) @ (self.turned(v) * f(self.eigenvalues).to(v)) @ self.U_A.mT.to(v)

    def diagonal(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "q m k"]:
        """The diagonal of `f(M̂)`."""
        # Entries of the diagonal are `Σ_jk U_ij² f(λ_jk) V_lk²`: the squares suffice.
        return self.U_G**2 @ f(self.eigenvalues) @ (self.U_A**2).mT

    def congruent(self, w: Float[Tensor, " P"]) -> "KroneckerBlock":
        """`W M̂ W`, exactly for one number a block or rows; else its diagonal in the basis of its partial traces."""
        scales = w[self.index].to(self.U_G)
        if bool((scales == scales.flatten()[0]).all()):
            return replace(self, eigenvalues=self.eigenvalues * scales**2)
        of_outputs, of_inputs = (
            s[..., None] * U for s, U in zip(outer_factors(scales), (self.U_G, self.U_A), strict=True)
        )
        # Partial traces of `W M̂ W`: the lengths of the scaled vectors of the other side weigh the eigenvalues.
        G = (self.eigenvalues @ of_inputs.square().sum(1)[..., None])[..., 0]
        A = (of_outputs.square().sum(1)[:, None] @ self.eigenvalues)[:, 0]
        U_G = torch.linalg.eigh((of_outputs * G[:, None]) @ of_outputs.mT)[1]
        U_A = torch.linalg.eigh((of_inputs * A[:, None]) @ of_inputs.mT)[1]
        eigenvalues = (U_G.mT @ of_outputs) ** 2 @ self.eigenvalues @ ((U_A.mT @ of_inputs) ** 2).mT
        return KroneckerBlock(self.index, U_G, U_A, eigenvalues)


def outer_factors(scales: Float[Tensor, "q m k"]) -> tuple[Float[Tensor, "q m"], Float[Tensor, "q k"]]:
    """The factors of scales that are a product of one for each output and one for each input.

    Raises:
        ValueError: if they are not.
    """
    of_outputs, of_inputs = scales[..., 0] / scales[:, :1, 0], scales[:, 0]
    if not torch.allclose(of_outputs[..., None] * of_inputs[:, None], scales, rtol=1e-4):
        raise ValueError(
            "Kronecker-factored curvature takes a prior whose scales are a product of one factor for each output "
            'and one for each input of a layer: use prior="isotropic", "layerwise" or "g-prior".'
        )
    return of_outputs, of_inputs


class Kronecker(Factored):
    """`M̂` of a block for each layer, and a diagonal for the weights that are in no block.

    Args:
        blocks: one for each layer.
        rest: positions of the other weights in the flat vector.
        diagonal: diagonal of `M̂` there.
        passes: as of a `Preconditioner`.

    Attributes:
        num_factored: number of weights in blocks.
    """

    def __init__(self, blocks: list[KroneckerBlock], rest: Tensor, diagonal: Tensor, passes: float) -> None:
        self.blocks, self.rest, self.diagonal, self.passes = blocks, rest, diagonal, passes
        self.num_factored = sum(block.index.numel() for block in blocks)
        self.size = self.num_factored + len(rest)

    def _apply(self, v: Tensor, f: Callable[[Tensor, Shift], Tensor], shift: Shift = 0.0) -> Tensor:
        """`f(M̂, s) v_k`, where `f` acts on eigenvalues."""
        out = torch.empty_like(v)
        for block in self.blocks:
            block_shift = block.shift(shift)
            out[:, block.index] = block.apply(lambda t, s=block_shift: f(t, s), v).to(v)
        out[:, self.rest] = v[:, self.rest] * f(self.diagonal, self._shift_of_rest(shift)).to(v)
        return out

    def _diagonal(self, f: Callable[[Tensor, Shift], Tensor], shift: Shift) -> Tensor:
        """The diagonal of `f(M̂, s)`."""
        out = torch.empty(self.size, dtype=torch.float64, device=self.rest.device)
        for block in self.blocks:
            block_shift = block.shift(shift)
            out[block.index] = block.diagonal(lambda t, s=block_shift: f(t, s))
        out[self.rest] = f(self.diagonal, self._shift_of_rest(shift)).to(out)
        return out

    def _shift_of_rest(self, shift: Shift) -> Shift:
        return shift[self.rest] if isinstance(shift, Tensor) and shift.dim() else shift

    def solve(self, v: Tensor, shift: Shift) -> Tensor:
        return self._apply(v, lambda t, s: 1 / (t + s), shift)

    def solve_root(self, v: Tensor, shift: Shift) -> Tensor:
        return self._apply(v, lambda t, s: (t + s) ** -0.5, shift)

    def matmul(self, v: Tensor) -> Tensor:
        return self._apply(v, lambda t, s: t)

    def variance(self, shift: Shift) -> Tensor:
        return self._diagonal(lambda t, s: 1 / (t + s), shift)

    def leverage(self, shift: Shift) -> Tensor:
        return self._diagonal(lambda t, s: t / (t + s), shift)

    def eigenvalues(self) -> Tensor:
        return torch.cat([*(block.eigenvalues.reshape(-1) for block in self.blocks), self.diagonal])

    def congruent(self, w: Tensor) -> "Kronecker":
        blocks = [block.congruent(w) for block in self.blocks]
        return Kronecker(blocks, self.rest, self.diagonal * w[self.rest].to(self.diagonal) ** 2, self.passes)

    def covariances(self, rows: Float[Tensor, "n C P"], shifts: Float[Tensor, " A"]) -> Float[Tensor, "A n C C"]:
        """`φ_i (M̂ + s_a)⁻¹ φ_iᵀ`: rows are turned once, and products of their pairs serve all shifts."""
        # Elementwise products are as many numbers as there are pairs of outputs.
        most = max(1, 2 * _NUMBERS // max(1, rows[0].numel() * (rows.shape[1] + 1)))
        return torch.cat([self._covariances(part, shifts) for part in rows.split(most)], dim=1)

    def _covariances(self, rows: Tensor, shifts: Tensor) -> Tensor:
        turned = torch.cat([*(block.turned(rows).flatten(-3) for block in self.blocks), rows[..., self.rest]], dim=-1)
        first, second = torch.triu_indices(rows.shape[1], rows.shape[1], device=rows.device)
        inverse = 1 / (self.eigenvalues()[:, None] + shifts.to(self.eigenvalues()))
        pairs = (turned[:, first] * turned[:, second] @ inverse.to(turned)).double().movedim(-1, 0)
        blocks = pairs.new_empty(len(shifts), len(rows), rows.shape[1], rows.shape[1])
        blocks[..., first, second] = blocks[..., second, first] = pairs
        return blocks

    def tensors(self) -> dict[str, Tensor]:
        # Names are flat, as files hold a dictionary of tensors: `3.U_G` is of block 3.
        named = {f"{n}.{name}": getattr(block, name) for n, block in enumerate(self.blocks) for name in _PARTS}
        return {"rest": self.rest, "diagonal": self.diagonal, **named}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Kronecker":
        """The inverse of `tensors`."""
        numbers = range((len(tensors) - 2) // len(_PARTS))
        blocks = [KroneckerBlock(*(tensors[f"{n}.{name}"] for name in _PARTS)) for n in numbers]
        return cls(blocks, tensors["rest"], tensors["diagonal"], 0.0)


def restored_curvature(tensors: dict[str, Tensor]) -> Factored:
    """`M̂` from its `tensors`."""
    if "factor" in tensors:
        return LowRank.from_tensors(tensors)
    if "vectors" in tensors:
        return DenseCurvature.from_tensors(tensors)
    return Kronecker.from_tensors(tensors) if "rest" in tensors else Jacobi(tensors["diagonal"])


@dataclass(frozen=True)
class Inverse:
    """`(M̂ + A)⁻¹` of rows, in scaled coordinates."""

    curvature: Factored
    spread: Float[Tensor, " P"]

    def solve(self, rhs: Tensor) -> Tensor:
        """`(M̂ + A)⁻¹ v`."""
        return self.curvature.solve(rhs, self.spread)
