r"""Gauss quadrature of `zᵀf(M)z` and `Tr f(M)` for any `f`, from one Krylov basis; no products of its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.krylov import DEPENDENT, Basis
from laplace_sampling.solvers.operator import Operator


@dataclass(frozen=True)
class Quadrature:
    """`Σ_j w_j f(λ_j)`, several rows of weights `[R, m]` on the same nodes `[m]`: means over the rows are estimates.

    Attributes:
        nodes: `λ`.
        weights: `w`.
        random: the part of the weights that is random given the rest; the same weights for plain quadrature.
        total: `Tr M` where it is known: a control variate for estimates of traces.
        truncated: the same quadrature without the last Lanczos step, `None` if this one is exact.
        before: the previous quadrature of the same run.
        below: the quadrature of a matrix that is at most `M`, made from the same products; this one is that of the
            compression of `M`. For an operator monotone and concave `f`, as `λ/(λ + α)` and `log(1 + λ/α)`, the
            value lies between the two.
    """

    # Quadratures converge geometrically, at a rate that depends on the function; estimates of the rate are kept between
    # these bounds. On the problems of `evidence.fixed_point` half or twice the lower bound costs two percent more
    # passes, an upper one of 0.8 or 0.95 changes nothing.
    _RATES = (0.2, 0.9)

    nodes: Float[Tensor, " m"]
    weights: Float[Tensor, "R m"]
    random: Float[Tensor, "R m"]
    total: float | None = None
    truncated: "Quadrature | None" = field(default=None, repr=False)
    before: "Quadrature | None" = field(default=None, repr=False)
    below: "Quadrature | None" = field(default=None, repr=False)

    @classmethod
    def of_eigenvalues(cls, values: Float[Tensor, " m"]) -> "Quadrature":
        """Traces from all eigenvalues that are not zero."""
        ones = torch.ones(1, len(values), dtype=torch.float64)
        return cls(values.double().cpu(), ones, ones)

    def __call__(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "R n"]:
        """Values for functions `f(λ)`, `[n, m]`."""
        values = f(self.nodes)
        if self.total is None:
            return self.weights @ values.T
        return self.weights @ values.T + (self.total - self.weights @ self.nodes)[:, None] * self._slope(values)

    def variance(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        """Variance of the mean over the rows.

        It is that of a quadratic form in `z̃`, which the weights tell better than the scatter of few rows does.
        """
        values = f(self.nodes)
        if self.total is not None:
            values = values - self._slope(values)[:, None] * self.nodes
        weights = self.random.mean(0)
        # `z̃` is uniform on a sphere, so that a constant in `f` has no variance: the mean is subtracted.
        mean = values @ weights / weights.sum().clamp_min(1e-300)
        return 2 * ((values - mean[:, None]) ** 2 @ weights) / len(self.weights)

    def _slope(self, values: Float[Tensor, "n m"]) -> Float[Tensor, " n"]:
        """`c` for which `f(λ) − cλ` varies least: the coefficient of the control variate."""
        weights = self.random.mean(0)
        centred = self.nodes - (weights @ self.nodes) / weights.sum().clamp_min(1e-300)
        mean = (values @ weights / weights.sum().clamp_min(1e-300))[:, None]
        # Where all nodes are equal up to rounding, the slope is noise over noise.
        floor = (16 * torch.finfo(torch.float64).eps * self.nodes.max()) ** 2 * weights.sum()
        return ((values - mean) @ (weights * centred)) / (weights @ centred**2).clamp_min(max(float(floor), 1e-300))

    def remaining(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        """Predicts what further Lanczos steps would change of the mean over the rows, from the last two changes."""
        last = self._last_change(f)
        if self.before is None or self.before.truncated is None:
            return last
        # The rest of a geometric series.
        rate = (last / self.before._last_change(f)).abs().nan_to_num().clamp(*self._RATES)
        return last * rate / (1 - rate)

    def bound(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        """Bounds what all further Lanczos steps may change of the mean over the rows, for an `f` as `below` says.

        It is infinite without a step. The control variate has no part in it, since forms of `M` itself are exact.
        """
        if self.below is None:
            return torch.full_like(self(f).mean(0), math.inf)
        above, below = (part.weights @ f(part.nodes).T for part in (self, self.below))
        return (above - below).mean(0).clamp_min(0)

    def _last_change(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        value = self(f).mean(0)
        return torch.zeros_like(value) if self.truncated is None else value - self.truncated(f).mean(0)


class _OthersSpace:
    """The Krylov space `Q` of all probes but one, described by its complement in the space of all probes.

    All is in coordinates of a basis, where the operator is `T`. `beyond`, `[·, m]`, has orthonormal rows that span the
    complement; `last` is the block that `Q` was extended by. In a step `Q` gains a block, and `beyond` about one row:
    it is much smaller than a basis of `Q`.
    """

    def __init__(self, others: Float[Tensor, "r m"], block: Float[Tensor, "R m"]) -> None:
        self.last, self.beyond = self._split(others, block)

    def extend(self, T: Float[Tensor, "m m"], block: Float[Tensor, "b m"]) -> None:
        """A Lanczos step, in which the space of all probes gains `block`."""
        if len(self.last):
            self.last, self.beyond = self._split(_pad(self.last, len(T)) @ T, _stacked(self.beyond, block))
        else:
            self.beyond = _stacked(self.beyond, block)

    @staticmethod
    def _split(images: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """Orthonormal bases of the part of the span of `candidates` that `images` reach, and of the other part."""
        images = images / images.norm(dim=1, keepdim=True).clamp_min(1e-300)
        _, size, rows = torch.linalg.svd(images @ candidates.T)
        rank = int((size > DEPENDENT).sum())
        return rows[:rank] @ candidates, rows[rank:] @ candidates


def _pad(rows: Tensor, size: int) -> Tensor:
    """Coordinates in a basis that has grown since."""
    return torch.nn.functional.pad(rows, (0, size - rows.shape[1]))


def _stacked(rows: Tensor, more: Tensor) -> Tensor:
    """Older coordinates on top of newer ones."""
    return torch.cat([_pad(rows, more.shape[1]), more])


class TraceEstimator:
    """`Tr f(M)`, one estimate from each probe and the Krylov space of the others.

    With `Q` an orthonormal basis of the Krylov space of all other probes and `z̃ = (I − QQᵀ)z` brought to norm
    `√(P − dim Q)`, the estimate is `Tr QᵀfQ + z̃ᵀf z̃` (Chen and Hallman 2023, "Krylov-aware stochastic trace
    estimation", with the exchange of probes of Epperly, Tropp and Webber 2024, "XTrace"). Only the second part is
    random, and it has no part in the leading eigenvectors, which `Q` holds. For the small eigenvalues that remain `f`
    is nearly proportional to `λ`, so that a known `Tr M` removes most of the remaining variance.

    `Q` is two block steps shorter than the basis: these two are for `z̃ᵀf z̃`, and the change in the second of them shows
    how far its quadrature has converged.

    Args:
        operator: `M`.
        probes: of norm `√P`.
        total: `Tr M`, if known.

    Attributes:
        basis: of the Krylov space of all probes.
        quadrature: the estimate of the last step.
    """

    def __init__(self, operator: Operator, probes: Float[Tensor, "R P"], total: float | None = None) -> None:
        self.basis, self.probes, self.total = Basis(operator), probes, total
        self.quadrature: Quadrature | None = None
        self._sizes: list[int] = []  # of the basis after each step
        self._others: list[_OthersSpace] = []
        self._depth = 0  # of the spaces `Q`

    @property
    def steps(self) -> int:
        return len(self._sizes)

    @property
    def width(self) -> int:
        """The number of vectors by which a step may extend the basis."""
        return len(self._block(self.steps - 1, self.basis.size)) if self._sizes else len(self.probes)

    def step(self) -> bool:
        """Makes a block step and updates `quadrature`; returns `False` if the space of the probes is exhausted.

        That space is invariant then: it holds all eigenvectors of nonzero eigenvalues, unless an eigenvalue is repeated
        at least as often as there are probes.
        """
        front = self.probes
        if self._sizes:
            front = self.basis.combine_products(self._block(self.steps - 1, self.basis.size))
        if not self.basis.extend(front):
            self._deepen(self.steps, self._sizes[-1])
            self.quadrature = self._exact() or self._within(-1, self.steps)
            return False
        self._sizes.append(self.basis.size)
        self._deepen(max(self.steps - 2, 1), self._sizes[-2] if self.steps > 1 else self._sizes[-1])
        value = self._within(-1, self.steps - 1)
        if self.steps > 1:
            before = self.quadrature and replace(self.quadrature, before=None)
            value = replace(value, truncated=self._within(-2, None), before=before)
        self.quadrature = value
        return True

    def _block(self, step: int, size: int) -> Float[Tensor, "b m"]:
        """The vectors of a step, in the first coordinates of the basis."""
        eye = torch.eye(size, dtype=self.basis.T.dtype, device=self.basis.T.device)
        return eye[self._size(step) : self._sizes[step]]

    def _size(self, steps: int) -> int:
        """The size of the basis after some steps."""
        return self._sizes[steps - 1] if steps else 0

    def _deepen(self, depth: int, size: int) -> None:
        """Brings the spaces `Q` to a depth; they lie in the first `size` coordinates."""
        if not self._others:
            inside = self.basis.project(self.probes)
            rest = [torch.cat([inside[:i], inside[i + 1 :]]) for i in range(len(inside))]
            self._others = [_OthersSpace(others, self._block(0, self._sizes[0])) for others in rest]
            self._depth = 1
        while self._depth < depth:
            block = self._block(self._depth, size)
            for others in self._others:
                others.extend(self.basis.T[:size, :size], block)
            self._depth += 1

    def _exact(self) -> Quadrature | None:
        """The quadrature of all eigenvalues, if an exhausted space holds them all."""
        nodes = torch.linalg.eigvalsh(self.basis.T).clamp_min(0).cpu()
        width, largest = len(self.probes), float(nodes[-1])
        # An invariant space holds at most `width` eigenvectors of one eigenvalue: where it holds as many, there may be
        # more outside.
        if len(nodes) >= width:
            upper, lower = nodes[width - 1 :], nodes[: len(nodes) - width + 1]
            if bool(((upper - lower <= 1e-6 * upper) & (upper > 1e-10 * largest)).any()):
                return None
        ones = torch.ones(1, len(nodes), dtype=nodes.dtype)
        value = Quadrature(nodes, ones, torch.zeros_like(ones))
        return replace(value, below=value)

    def _within(self, step: int, multiplied: int | None) -> Quadrature:
        """The quadrature of a step; the first `multiplied` blocks, whose products are known, give the lower bound."""
        size = self._sizes[step]
        T = self.basis.T[:size, :size]
        value = self._weighted(T, size)
        if multiplied is None:
            return value
        return replace(value, below=self._weighted(_nystrom(T, self._size(multiplied)), size))

    def _weighted(self, T: Float[Tensor, "m m"], size: int) -> Quadrature:
        nodes, eigenvectors = torch.linalg.eigh(T)
        inside = self._size(self._depth)
        whole = (eigenvectors[:inside] ** 2).sum(0)
        fixed, random = [], []
        for z, others in zip(self.basis.project(self.probes), self._others, strict=True):
            rows = others.beyond
            beyond, part = rows @ eigenvectors[: rows.shape[1]], rows @ z[: rows.shape[1]]
            norm = float(part @ part)
            # z̃ is brought to the squared norm P − dim Q; where z lies in Q up to rounding, it has no part.
            num_free = self.probes.shape[1] - inside + len(rows)
            scale = num_free / norm if norm > 1e-12 * float(z @ z) else 0.0
            fixed.append(whole - (beyond**2).sum(0))
            random.append(scale * (part @ beyond) ** 2)
        weights = torch.stack(random).cpu()
        return Quadrature(nodes.clamp_min(0).cpu(), torch.stack(fixed).cpu() + weights, weights, self.total)


def _nystrom(T: Float[Tensor, "m m"], multiplied: int) -> Float[Tensor, "m m"]:
    """`TQᵀ(QTQᵀ)⁻¹QT` for the first vectors `Q`: at most `T`, and at most `M` if their products lie in the basis.

    For one vector it gives the Gauss-Radau rule with a node at zero.
    """
    product = T[:multiplied]
    values, vectors = torch.linalg.eigh(product[:, :multiplied])
    # A pseudoinverse: eigenvalues that are zero up to rounding are left out.
    positive = values > 1e-13 * values.max() if len(values) else values > 0
    half = (vectors[:, positive].T @ product) / values[positive].sqrt()[:, None]
    return half.T @ half
