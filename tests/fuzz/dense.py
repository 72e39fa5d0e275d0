r"""The posterior of a small linear model by dense algebra in float64, from the formulas alone.

It shares no code with the library. In whitened coordinates `u = A^{1/2}θ` and with `B = LLᵀ`, the singular values `s`
of `R = LᵀΦA^{-1/2}` give everything: `H⁻¹ = A^{-1/2}(I + RᵀR)⁻¹A^{-1/2}`. No condition number is squared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# `Σ_n w_n ℓ(y_n, f_n)` as a function of all outputs `[N, C]`, and of outputs at which a mean over `y` is taken.
Loss = Callable[[Tensor, Tensor], Tensor]


def flat_outputs(model: nn.Module, x: object) -> Tensor:
    """`[N, C]`; heads one after the other."""
    out = model(**x) if isinstance(x, dict) else model(x)
    parts = list(out.values()) if isinstance(out, dict) else [out]
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)


def losses(kind: str, y: Tensor, shape: tuple[int, ...], weights: Tensor, noise: Tensor) -> Loss:
    """The sum of losses, from torch's own.

    Args:
        kind: name of a likelihood.
        y: targets, `[N, ...]`; of several heads classes, values and counts, `[N, 4]`.
        shape: of the outputs of a datum.
        weights: of each datum, `[N]`.
        noise: noise precision, a scalar or one an output.
    """

    def each(f: Tensor, at: Tensor) -> Tensor:
        if kind == "regression":
            squares = noise * (f - y.reshape(f.shape)) ** 2
            return 0.5 * (squares - noise.log() + math.log(2 * math.pi)).sum(1)
        if kind == "classification":
            return F.cross_entropy(f.reshape(-1, *shape), y, reduction="none").reshape(len(f), -1).sum(1)
        if kind == "tokens":
            return F.cross_entropy(f.reshape(-1, *shape).mT, y, reduction="none").sum(1)
        if kind == "binary":
            return F.binary_cross_entropy_with_logits(f, y.reshape(f.shape).to(f), reduction="none").sum(1)
        if kind == "poisson":
            return (f.exp() - y.reshape(f.shape) * f).sum(1)
        if kind == "heteroscedastic":  # its mean over y, whose Hessian is the Fisher information
            m, s = f.chunk(2, 1)
            mean, log_variance = at.chunk(2, 1)
            squares = (y.reshape(m.shape) - m) ** 2 if at is f else (m - mean) ** 2 + log_variance.exp()
            return 0.5 * (squares * (-s).exp() + s).sum(1)
        if kind == "from_loss":
            return (f - y).cosh().log().sum(1) + F.softplus(f.sum(1))
        assert kind == "heads"
        of_kind = F.cross_entropy(f[:, :3], y[:, 0].long(), reduction="none")
        of_value = (f[:, 3:5] - y[:, 1:3]).square().sum(1)  # noise precision 2
        return of_kind + of_value + f[:, 5].exp() - y[:, 3] * f[:, 5]

    return lambda f, at: (weights * each(f, at)).sum()


def curvature(loss: Loss, f: Tensor) -> Tensor:
    """`B_n`, `[N, C, C]`."""
    at = f.detach()
    g = at.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(g, at), g, create_graph=True)
    columns = []
    for c in range(f.shape[1]):
        total = slope[:, c].sum()
        column = torch.autograd.grad(total, g, retain_graph=True)[0] if total.requires_grad else torch.zeros_like(at)
        columns.append(column)
    return torch.stack(columns, 2)


@dataclass
class Whitened:
    """`R = LᵀΦA^{-1/2}` by its singular values `s` and right singular vectors `V`, `[P, r]`; and `B = LLᵀ`."""

    B: Tensor
    s: Tensor
    V: Tensor

    @classmethod
    def of(cls, B: Tensor, features: Tensor) -> "Whitened":
        values, vectors = torch.linalg.eigh(B)
        roots = vectors * values.clamp_min(0).sqrt()[:, None]
        R = torch.einsum("ncd,ncp->ndp", roots, features).flatten(0, 1)
        _, s, Vh = torch.linalg.svd(R, full_matrices=False)
        return cls(B, s, Vh.mT)

    @property
    def leverage(self) -> Tensor:
        """Eigenvalues of `H⁻¹M`."""
        return self.s**2 / (1 + self.s**2)

    @property
    def gamma(self) -> float:
        return float(self.leverage.sum())

    def solve(self, g: Tensor) -> Tensor:
        """`(I + RᵀR)⁻¹ g`."""
        inside = self.V.mT @ g
        return (g - self.V @ inside) + self.V @ (inside / (1 + self.s**2))

    def covariance(self, features: Tensor) -> Tensor:
        """`φ A^{-1/2} (I + RᵀR)⁻¹ A^{-1/2} φᵀ` of rows `[m, P]` of `φ A^{-1/2}`."""
        inside = features @ self.V
        outside = features - inside @ self.V.mT
        scaled = inside / (1 + self.s**2).sqrt()
        return outside @ outside.mT + scaled @ scaled.mT


@dataclass
class Dense:
    """A linear model on training data, and its posterior at any precision of the prior.

    Attributes:
        J: `Φ`, `[N, C, P]`.
        network: `f`, `[N, C]`.
        offset: of the linear model.
        loss: of all data.
        scale: `s` of the prior, `[P]`.
    """

    J: Tensor
    network: Tensor
    offset: Tensor
    loss: Loss
    scale: Tensor

    def features(self, J: Tensor, alpha: float) -> Tensor:
        """`φ A^{-1/2}`."""
        return J * (self.scale / math.sqrt(alpha))

    def mode(self, alpha: float, start: Tensor | None = None, steps: int = 200) -> tuple[Tensor, Tensor, bool]:
        """`A^{1/2}θ̄`, the outputs there, and whether Newton's method has converged."""
        features = self.features(self.J, alpha)
        u = torch.zeros(features.shape[-1], dtype=torch.float64) if start is None else start

        def objective(u: Tensor) -> Tensor:
            f = self.offset + features @ u
            return self.loss(f, f) + 0.5 * u @ u

        value = objective(u)
        for _ in range(steps):
            f = (self.offset + features @ u).requires_grad_()
            (slope,) = torch.autograd.grad(self.loss(f, f), f)
            f = f.detach()
            gradient = torch.einsum("ncp,nc->p", features, slope) + u
            direction = Whitened.of(curvature(self.loss, f), features).solve(gradient)
            decrement, length = float(gradient @ direction), 1.0
            if decrement <= 1e-18 * (1 + abs(float(value))) or not math.isfinite(decrement):
                return u, f, math.isfinite(decrement)
            while not (new := objective(u - length * direction)) <= value - 1e-4 * length * decrement:
                length /= 2
                if length < 1e-10:  # rounding of the objective decides
                    u = u - direction
                    return u, self.offset + features @ u, decrement < 1e-10 * (1 + abs(float(value)))
            u, value = u - length * direction, new
        return u, self.offset + features @ u, False

    def posterior(self, alpha: float, start: Tensor | None = None) -> tuple[Whitened, Tensor, bool]:
        """The posterior, the mode `A^{1/2}θ̄`, and whether that has converged."""
        u, _, converged = self.mode(alpha, start)
        B = curvature(self.loss, self.network)
        return Whitened.of(B, self.features(self.J, alpha)), u, converged
