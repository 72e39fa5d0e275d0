r"""Kronecker-factored curvature, `M̂ = G ⊗ A` for the weights of each layer.

`kfac.py` computes the factors. In the eigenvectors of `G` and `A` every function of `M̂ + s I` is elementwise.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.preconditioners import Factored, Jacobi

__all__ = ["CURVATURE", "Inverse", "Kronecker", "KroneckerBlock", "restored_curvature"]

# Before the names of the tensors of `M̂` in a file.
CURVATURE = "curvature."
# Added to the eigenvalues: one number, or one for each weight.
Shift = float | Tensor


@dataclass(frozen=True)
class KroneckerBlock:
    """`G ⊗ A` for the weights of one layer.

    Attributes:
        index: positions of the weights in the flat vector, `[m, n]`.
        G: factor of the outputs.
        A: factor of the inputs.
    """

    index: Tensor
    G: Float[Tensor, "m m"]
    A: Float[Tensor, "n n"]

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *torch.linalg.eigh(self.G), *torch.linalg.eigh(self.A)

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "m n"]:
        g, _, a, _ = self._eigen
        # Both factors are positive semi-definite up to rounding.
        return g.clamp_min(0)[:, None] * a.clamp_min(0)

    def shift(self, shift: Shift) -> float:
        """The shift of this block, one number: `G ⊗ A + s I` has the eigenvectors of `G ⊗ A` for no other shift."""
        if not isinstance(shift, Tensor) or shift.dim() == 0:
            return float(shift)
        shifts = shift[self.index]
        if not bool((shifts == shifts[0, 0]).all()):
            raise ValueError(
                "Kronecker-factored curvature takes one prior precision for the weights of a layer: use "
                'prior="isotropic", "layerwise" or "g-prior".'
            )
        return float(shifts[0, 0])

    def apply(self, f: Callable[[Tensor], Tensor], v: Float[Tensor, "K P"]) -> Float[Tensor, "K m n"]:
        """`f(M̂) v_k` at these positions."""
        # `(U ⊗ V) f(λ) (U ⊗ V)ᵀ v` without forming a Kronecker product, which has (mn)² entries.
        _, U, _, V = self._eigen
        return U @ ((U.T @ v[:, self.index].to(U) @ V) * f(self.eigenvalues)) @ V.T

    def diagonal(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "m n"]:
        """The diagonal of `f(M̂)`."""
        # Entries of the diagonal are `Σ_jk U_ij² f(λ_jk) V_lk²`: the squares suffice.
        _, U, _, V = self._eigen
        return U**2 @ f(self.eigenvalues) @ (V**2).T

    def congruent(self, w: Float[Tensor, " P"]) -> "KroneckerBlock":
        """`diag(w) (G ⊗ A) diag(w)`."""
        scales = w[self.index].to(self.G)
        # Scales of rank one keep the Kronecker form: one factor goes into `G`, the other into `A`.
        of_outputs, of_inputs = scales[:, 0] / scales[0, 0], scales[0]
        if not torch.allclose(of_outputs[:, None] * of_inputs, scales, rtol=1e-4):
            raise ValueError(
                "Kronecker-factored curvature takes a prior whose scales are a product of one factor for each output "
                'and one for each input of a layer: use prior="isotropic", "layerwise" or "g-prior".'
            )
        return replace(self, G=of_outputs[:, None] * self.G * of_outputs, A=of_inputs[:, None] * self.A * of_inputs)


class Kronecker(Factored):
    """`M̂` of blocks `G ⊗ A`, and a diagonal for the weights that are in no block.

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

    def tensors(self) -> dict[str, Tensor]:
        # Names are flat, as files hold a dictionary of tensors: `3.G` is a factor of block 3.
        blocks = [{"index": block.index, "G": block.G, "A": block.A} for block in self.blocks]
        named = {f"{n}.{name}": tensor for n, block in enumerate(blocks) for name, tensor in block.items()}
        return {"rest": self.rest, "diagonal": self.diagonal, **named}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Kronecker":
        """The inverse of `tensors`."""
        numbers = range((len(tensors) - 2) // 3)
        blocks = [KroneckerBlock(*(tensors[f"{n}.{name}"] for name in ("index", "G", "A"))) for n in numbers]
        return cls(blocks, tensors["rest"], tensors["diagonal"], 0.0)


def restored_curvature(tensors: dict[str, Tensor]) -> Factored:
    """`M̂` from its `tensors`."""
    return Kronecker.from_tensors(tensors) if "rest" in tensors else Jacobi(tensors["diagonal"])


@dataclass(frozen=True)
class Inverse:
    """`(M̂ + A)⁻¹` of rows, in scaled coordinates."""

    curvature: Factored
    spread: Float[Tensor, " P"]

    def solve(self, rhs: Tensor) -> Tensor:
        """`(M̂ + A)⁻¹ v`."""
        return self.curvature.solve(rhs, self.spread)
