r"""Gauss quadrature of `zᵀf(M)z` and `Tr f(M)` for any `f`, from one Krylov basis; no products of its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.krylov import Basis

__all__ = ["Quadrature", "TraceEstimator"]

# Quadratures converge geometrically, at a rate that depends on the function: it is taken between these bounds.
_RATES = (0.2, 0.9)


@dataclass(frozen=True)
class Quadrature:
    """`Σ_j w_j f(λ_j)`, several rows of weights `[R, m]` on the same nodes `[m]`: means over the rows are estimates.

    Attributes:
        nodes: `λ`.
        weights: `w`.
        random: the part of the weights that is random given the rest; the same weights for plain quadrature.
        total: `Tr M` where it is known: a control variate for estimates of traces.
        truncated: the same a Lanczos step earlier, `None` if this one is exact.
        before: the last one of the same run.
        below: weights and nodes of a matrix that is at most `M`, and sees as much of it as products tell; this one's is
            the compression of `M`. For an operator monotone and concave `f`, as `λ/(λ + α)` and `log(1 + λ/α)`, the
            value lies between the two.
    """

    nodes: Float[Tensor, " m"]
    weights: Float[Tensor, "R m"]
    random: Float[Tensor, "R m"]
    total: float | None = None
    truncated: "Quadrature | None" = field(default=None, repr=False)
    before: "Quadrature | None" = field(default=None, repr=False)
    below: "Quadrature | None" = field(default=None, repr=False)

    @classmethod
    def of(cls, basis: Basis, vectors: Float[Tensor, "R P"], size: int) -> "Quadrature":
        """`zᵀf(M)z` of each of some vectors that lie in the span of the first `size` ones of a basis."""
        nodes, eigenvectors = torch.linalg.eigh(basis.T[:size, :size])
        weights = ((basis.project(vectors)[:, :size] @ eigenvectors) ** 2).cpu()
        return cls(nodes.clamp_min(0).cpu(), weights, weights)

    def rescaled(self, nodes: float, weights: float) -> "Quadrature":
        """With nodes and weights times two factors."""
        return Quadrature(
            self.nodes * nodes,
            self.weights * weights,
            self.random * weights,
            None if self.total is None else self.total * nodes,
            None if self.truncated is None else self.truncated.rescaled(nodes, weights),
            None if self.before is None else self.before.rescaled(nodes, weights),
            None if self.below is None else self.below.rescaled(nodes, weights),
        )

    def __call__(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "R n"]:
        """Values for functions `f(λ)`, `[n, m]`."""
        values = f(self.nodes)
        if self.total is None:
            return self.weights @ values.T
        return self.weights @ values.T + (self.total - self.weights @ self.nodes)[:, None] * self._slope(values)

    def variance(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        """Of the mean over the rows: that of a quadratic form in `z̃`, known better so than by the scatter of few.

        `z̃` is uniform on a sphere, so that a constant in `f` adds nothing.
        """
        values = f(self.nodes)
        if self.total is not None:
            values = values - self._slope(values)[:, None] * self.nodes
        weights = self.random.mean(0)
        mean = values @ weights / weights.sum().clamp_min(1e-300)
        return 2 * ((values - mean[:, None]) ** 2 @ weights) / len(self.weights)

    def _slope(self, values: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """`c` for which `f(λ) − cλ` varies least: the coefficient of the control variate."""
        weights = self.random.mean(0)
        centred = self.nodes - (weights @ self.nodes) / weights.sum().clamp_min(1e-300)
        mean = (values @ weights / weights.sum().clamp_min(1e-300))[:, None]
        floor = (16 * torch.finfo(torch.float64).eps * self.nodes.max()) ** 2 * weights.sum()
        return ((values - mean) @ (weights * centred)) / (weights @ centred**2).clamp_min(max(float(floor), 1e-300))

    def remaining(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        """What further Lanczos steps would change of the mean over the rows, if they go on as the last two did."""
        last = self._last_change(f)
        if self.before is None or self.before.truncated is None:
            return last
        rate = (last / self.before._last_change(f)).abs().nan_to_num().clamp(*_RATES)
        return last * rate / (1 - rate)

    def bound(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        """What all further Lanczos steps may change of the mean over the rows, at most, for an `f` as `below` says.

        Infinite without a step. The control variate has no part in it: forms of `M` itself are exact.
        """
        if self.below is None:
            return torch.full_like(self(f).mean(0), math.inf)
        above, below = (part.weights @ f(part.nodes).T for part in (self, self.below))
        return (above - below).mean(0).clamp_min(0)

    def _last_change(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        value = self(f).mean(0)
        return torch.zeros_like(value) if self.truncated is None else value - self.truncated(f).mean(0)


class _OthersSpace:
    """The Krylov space `Q` of all probes but one, by what the space of all probes has beyond it.

    In coordinates of a basis, where the operator is `T`. `beyond` `[·, m]` are orthonormal rows, as is `last`, the
    block that `Q` was extended by. Per step `Q` gains a block, `beyond` about one row.
    """

    def __init__(self, others: Float[Tensor, "r m"], block: Float[Tensor, "R m"]) -> None:
        self.last, self.beyond = self._split(others, block)

    def extend(self, T: Float[Tensor, "m m"], block: Float[Tensor, "b m"]) -> None:
        """A step, `block` being what the space of all probes gains."""
        if len(self.last):
            self.last, self.beyond = self._split(_pad(self.last, len(T)) @ T, _padded(self.beyond, block))
        else:
            self.beyond = _padded(self.beyond, block)

    @staticmethod
    def _split(images: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """What some vectors span within some orthonormal rows, and the rest of these rows."""
        images = images / images.norm(dim=1, keepdim=True).clamp_min(1e-300)
        _, size, rows = torch.linalg.svd(images @ candidates.T)
        rank = int((size > 1e-8).sum())
        return rows[:rank] @ candidates, rows[rank:] @ candidates


def _pad(rows: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, size - rows.shape[1]))


def _padded(rows: Tensor, more: Tensor) -> Tensor:
    return torch.cat([_pad(rows, more.shape[1]), more])


class TraceEstimator:
    """`Tr f(M)`, one estimate from each probe and the Krylov space of the others.

    With `Q` an orthonormal basis of the Krylov space of all other probes and `z̃ = (I − QQᵀ)z` brought to norm
    `√(P − dim Q)`, the estimate is `Tr QᵀfQ + z̃ᵀf z̃` (Chen and Hallman 2023, "Krylov-aware stochastic trace
    estimation", with the exchange of probes of Epperly, Tropp and Webber 2024, "XTrace"). Only the second part is
    random, and it does not see the leading eigenvectors, which `Q` holds. For the small eigenvalues that are left `f`
    is nearly proportional to `λ`, so that a known `Tr M` takes most of the rest of the variance away.

    `Q` is two block steps short of the basis: these two are for `z̃ᵀf z̃`, and what the second of them changes tells how
    far its quadrature is from the end.

    Args:
        basis: to grow; it may hold other vectors, and grow by others between steps.
        probes: of norm `√P`.
        total: `Tr M`, if known.
    """

    def __init__(self, basis: Basis, probes: Float[Tensor, "R P"], total: float | None = None) -> None:
        self.basis, self.probes, self.total = basis, probes, total
        self.quadrature: Quadrature | None = None
        self._sizes: list[int] = []
        # The Krylov space of all probes by blocks, in coordinates of the basis.
        self._blocks: list[Tensor] = []
        self._others: list[_OthersSpace] = []
        self._depth = 0  # of the spaces `Q`

    @property
    def steps(self) -> int:
        return len(self._sizes)

    @property
    def width(self) -> int:
        """By how much a step may extend the basis."""
        return len(self._blocks[-1]) if self._blocks else len(self.probes)

    def step(self) -> bool:
        """A block step, after which `quadrature` is the one with it; `False` if nothing was left to add.

        The space of the probes is invariant then: it holds all eigenvectors of eigenvalues but zero, unless one has as
        many of them as there are probes.
        """
        # Products of the last block, not only of what was new in it when other vectors are in the basis, too: the
        # Krylov spaces of the other probes must not depend on a probe.
        front = self.basis.combine_products(self._last_block()) if self._blocks else self.probes
        self.basis.extend(front)
        block = _orthonormal(self.basis.project(front), self._space(len(self._blocks), self.basis.size))
        if len(block) == 0:
            self._deepen(len(self._blocks), self._sizes[-1])
            self.quadrature = self._exact() or self._within(-1, len(self._blocks))
            return False
        self._blocks.append(block)
        self._sizes.append(self.basis.size)
        self._deepen(max(len(self._sizes) - 2, 1), self._sizes[-2] if len(self._sizes) > 1 else self._sizes[-1])
        value = self._within(-1, len(self._blocks) - 1)
        if len(self._sizes) > 1:
            before = self.quadrature and replace(self.quadrature, before=None)
            value = replace(value, truncated=self._within(-2, None), before=before)
        self.quadrature = value
        return True

    def _last_block(self) -> Tensor:
        return _pad(self._blocks[-1], self.basis.size)

    def _space(self, depth: int, size: int) -> Tensor:
        empty = torch.zeros(0, size, dtype=self.basis.T.dtype, device=self.basis.T.device)
        return torch.cat([empty, *(_pad(block, size) for block in self._blocks[:depth])])

    def _deepen(self, depth: int, size: int) -> None:
        """Bring the spaces `Q` to a depth; they lie in the first `size` coordinates."""
        if not self._others:
            inside = self.basis.project(self.probes)
            rest = [torch.cat([inside[:i], inside[i + 1 :]]) for i in range(len(inside))]
            self._others = [_OthersSpace(others, self._blocks[0]) for others in rest]
            self._depth = 1
        while self._depth < depth:
            block = _pad(self._blocks[self._depth], size)
            for others in self._others:
                others.extend(self.basis.T[:size, :size], block)
            self._depth += 1

    def _exact(self) -> Quadrature | None:
        """All eigenvalues, if the probes have seen them all."""
        nodes = torch.linalg.eigvalsh(self.basis.T).clamp_min(0).cpu()
        width, largest = len(self.probes), float(nodes[-1])
        # As many equal ones as probes: there may be more.
        if len(nodes) >= width:
            upper, lower = nodes[width - 1 :], nodes[: len(nodes) - width + 1]
            if bool(((upper - lower <= 1e-6 * upper) & (upper > 1e-10 * largest)).any()):
                return None
        ones = torch.ones(1, len(nodes), dtype=nodes.dtype)
        value = Quadrature(nodes, ones, torch.zeros_like(ones))
        return replace(value, below=value)

    def _within(self, step: int, multiplied: int | None) -> Quadrature:
        """By a step; `multiplied` blocks have their products in the basis, and give the lower bound."""
        size = self._sizes[step]
        T = self.basis.T[:size, :size]
        value = self._weighted(T, size)
        if multiplied is None:
            return value
        return replace(value, below=self._weighted(_nystrom(T, self._space(multiplied, size)), size))

    def _weighted(self, T: Float[Tensor, "m m"], size: int) -> Quadrature:
        nodes, eigenvectors = torch.linalg.eigh(T)
        space = self._space(self._depth, size)
        whole = ((space @ eigenvectors) ** 2).sum(0)
        fixed, random = [], []
        for z, others in zip(self.basis.project(self.probes), self._others, strict=True):
            rows = others.beyond
            beyond, part = rows @ eigenvectors[: rows.shape[1]], rows @ z[: rows.shape[1]]
            norm = float(part @ part)
            left = self.probes.shape[1] - len(space) + len(rows)
            scale = left / norm if norm > 1e-12 * float(z @ z) else 0.0
            fixed.append(whole - (beyond**2).sum(0))
            random.append(scale * (part @ beyond) ** 2)
        weights = torch.stack(random).cpu()
        return Quadrature(nodes.clamp_min(0).cpu(), torch.stack(fixed).cpu() + weights, weights, self.total)


def _nystrom(T: Float[Tensor, "m m"], rows: Float[Tensor, "k m"]) -> Float[Tensor, "m m"]:
    """`TQᵀ(QTQᵀ)⁻¹QT`, which is at most `T`, and at most `M` where the span of `Q` is one that `M` keeps in the basis.

    For one vector it is that of the Gauss-Radau rule with a node at zero.
    """
    product = rows @ T
    values, vectors = torch.linalg.eigh(product @ rows.T)
    seen = values > 1e-13 * values.max() if len(values) else values > 0
    half = (vectors[:, seen].T @ product) / values[seen].sqrt()[:, None]
    return half.T @ half


def _orthonormal(block: Tensor, space: Tensor) -> Tensor:
    """Orthonormal rows for what a block has beyond the span of others."""
    for _ in range(2):
        norm = block.norm(dim=1, keepdim=True)
        block = block[norm[:, 0] > 0] / norm[norm > 0][:, None]
        block = block - (block @ space.T) @ space
        block = block[block.norm(dim=1) > 1e-8]
        if len(block) == 0:
            return block
        q, r = torch.linalg.qr(block.T)
        block = q.T[r.diagonal().abs() > 1e-8]
    return block
