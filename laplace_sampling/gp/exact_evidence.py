r"""Hyperparameters of an exact regression, also with a noise precision for each output.

One decomposition cannot serve several noise precisions. With `G = K/α + D`, `D = diag(R_i/b_c)`, `P = G⁻¹`,
`a = P(y − o)`, and a derivative `G_j` for each logarithm `j` of `α` and the `b_c` (Rasmussen & Williams 2006, eq. 5.9,
and its derivative)

    ∂ log p/∂j = ½(aᵀG_j a − Tr P G_j)
    ∂² log p/∂j∂k = ½(aᵀG_jk a − Tr P G_jk) + ½ Tr(P G_j P G_k) − aᵀG_j P G_k a

Every `G_j` is diagonal but that of `α`, which is `D − G`, so that `P` is all that is needed: Newton's method takes one
Cholesky factor a step.
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import scipy.optimize
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.gp.exact_regression import NOISE_BOUNDS, PRECISION_BOUNDS, ExactRegression, Optimum, noise_scale
from laplace_sampling.gp.gram import MAX_MEMORY, check_gram_size, gram
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import BLOCK_BYTES
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision, unit_variance
from laplace_sampling.solvers.lapack import inverse_
from laplace_sampling.solvers.quadrature import Quadrature

__all__ = ["ExactFit", "NoiseComponents", "exact_curves", "fit_exact_regression"]


# Starts of Newton's method at most.
_ATTEMPTS = 4
# Of the fixed point of noise precisions and α.
_ROUNDS, _FIXED_POINT_STEPS = 4, 40


@dataclass(frozen=True)
class ExactFit:
    """A regression at the hyperparameters of largest evidence.

    Attributes:
        posterior: the decomposition, whose `noise_scale` has the ratios of the noise precisions.
        optimum: the overall precisions: arguments for the methods of `posterior`.
        prior: with the precisions that were found.
        likelihood: likewise.
    """

    posterior: ExactRegression
    optimum: Optimum
    prior: GaussianPrior
    likelihood: Gaussian


def fit_exact_regression(
    model: LinearModel,
    prior: GaussianPrior,
    *,
    noise_variances: Tensor | None = None,
    learn_precision: bool = True,
    precision_bounds: tuple[float, float] = PRECISION_BOUNDS,
    noise_bounds: tuple[float, float] = NOISE_BOUNDS,
    products: str = "auto",
    block_bytes: float = BLOCK_BYTES,
    max_memory: float = MAX_MEMORY,
) -> ExactFit:
    r"""`α` and the noise precision, or one for each output, of largest evidence, by dense algebra in float64.

    The likelihood says whether noise is learnt (`Gaussian(learn=...)`), whether it is one number or one an output, and
    with `noise_at="network"` that it is `b = (N − γ)/Σ(y − f)²/R` instead, with `α` of largest evidence at that `b`.
    For given noise variances that are exact, use `Gaussian(1.0, learn=False)`.

    Args:
        model: the linear model on the training data.
        prior: starting point; its scale, and the ratios of its precisions, stay.
        noise_variances: of each datum, `[N]` or `[N, C]`, see `ExactRegression.of`.
        learn_precision: whether `α` is learnt.
        precision_bounds: within which `α` is kept.
        noise_bounds: within which the noise precision is kept.
        products: how the Gram matrix is built, see `gram`.
        block_bytes: memory for rows of the Jacobian.
        max_memory: bytes that four Gram matrices may take.

    Raises:
        TypeError: if the likelihood is not Gaussian.
        ValueError: if the Gram matrix is too large, not finite, or `noise_variances` do not fit.
    """
    R = noise_scale(model, noise_variances)
    check_gram_size(model.features, max_memory)
    assert isinstance(model.likelihood, Gaussian)
    K = gram(model.features, unit_variance(prior), products=products, block_bytes=block_bytes)
    separate = model.likelihood.learn and torch.as_tensor(model.likelihood.noise_precision).dim() == 1
    posterior = ExactRegression.decompose(K.clone() if separate else K, model, prior, R, block_bytes)
    options = {
        "learn_precision": learn_precision,
        "precision_bounds": precision_bounds,
        "noise_bounds": noise_bounds,
    }
    optimum = posterior.fit(**options)
    if separate:
        components, maxima = NoiseComponents(K, posterior.residual, R), optimum.num_maxima
        first = [optimum.precision, *[optimum.noise_precision] * R.shape[1]]
        logs = start = torch.tensor(first, dtype=torch.float64).log()
        for _ in range(_ATTEMPTS):
            del posterior  # its memory is needed
            logs, converged, at_bounds = components.newton(start, learn_precision, precision_bounds, noise_bounds)
            ratio = (logs[1:].mean() - logs[1:]).exp().to(R)
            value = components.evaluate(logs)[0]
            posterior = ExactRegression.decompose(K.clone(), model, prior, R * ratio, block_bytes)
            if "noise_precision" in at_bounds:
                found = _at_noise(posterior, float(logs[1:].mean().exp()), learn_precision, precision_bounds)
            else:
                found = posterior.fit(**options)
            optimum = replace(
                found,
                at_bounds=at_bounds,
                converged=converged and found.converged and not at_bounds,
                num_maxima=maxima,
            )
            if found.log_evidence <= value + 1e-8 * abs(value):
                break
            # Along these ratios there is a larger maximum than the one that Newton's method went to.
            noise = math.log(found.noise_precision) - ratio.log().cpu()
            start = torch.cat([torch.tensor([found.precision], dtype=torch.float64).log(), noise])
        if model.likelihood.noise_at == "network":
            f = model.network_outputs.reshape(R.shape)
            squares = ((model.targets.reshape(R.shape) - f).double() ** 2 / R).sum(0)
            low, high = (math.log(bound) for bound in noise_bounds)
            found, balanced, settled = optimum, False, False
            for _ in range(_ATTEMPTS):
                del posterior
                logs, balanced = components.noise_of_network(
                    squares, logs, learn_precision, precision_bounds, noise_bounds
                )
                ratio = (logs[1:].mean() - logs[1:]).exp().to(R)
                posterior = ExactRegression.decompose(K.clone(), model, prior, R * ratio, block_bytes)
                found = _at_noise(posterior, float(logs[1:].mean().exp()), learn_precision, precision_bounds)
                # Of largest evidence at this noise; else from there, for α can have several fixed points.
                alpha = math.log(found.precision)
                settled = abs(alpha - float(logs[0])) < 1e-5
                if settled:
                    break
                logs[0] = alpha
            ended = bool(((logs[1:] <= low + 1e-9) | (logs[1:] >= high - 1e-9)).any())
            at_bounds = found.at_bounds + (("noise_precision",) if ended else ())
            good = settled and balanced and found.converged and not ended
            optimum = replace(found, num_maxima=maxima, at_bounds=at_bounds, converged=good)
    likelihood = model.likelihood
    if likelihood.noise_at == "network" and likelihood.learn and not separate:
        optimum = _with_noise_of_network(posterior, optimum, learn_precision, precision_bounds, noise_bounds)
    if likelihood.learn:
        # R has the ratios of noise variances per output and given ones: what is left of the given ones is divided out.
        given = R * (torch.as_tensor(likelihood.precision(R)) / _overall(likelihood))
        per_output = (optimum.noise_precision * given / posterior.noise_scale)[0]
        one = torch.as_tensor(likelihood.noise_precision).dim() == 0
        likelihood = likelihood.with_precision(optimum.noise_precision if one else per_output.cpu())
    return ExactFit(
        posterior,
        optimum,
        prior.with_precision(prior.precision * (optimum.precision / overall_precision(prior))),
        likelihood,
    )


def exact_curves(exact: ExactRegression, precision: float, noise_precision: float) -> EvidencePath:
    r"""Evidence, `γ` and norm of the mode for every `α`, at a noise precision.

    In coordinates where `A = α`, `M` has the eigenvalues `bλ`, and `Φᵀ(b/R)(y − o)` is `b√λ c` along its eigenvectors.

    Args:
        exact: the decomposition; its model has the likelihood at these precisions.
        precision: `α`.
        noise_precision: `b`.
    """
    model = exact.model
    nodes = (noise_precision * exact.eigenvalues).cpu()
    weights = (noise_precision**2 * exact.eigenvalues * exact.rotated**2).cpu()[None]
    ones = torch.ones_like(weights)
    assert isinstance(model.likelihood, Gaussian)
    noise = torch.as_tensor(model.likelihood.noise_precision)
    return EvidencePath(
        traces=Quadrature(nodes, ones, ones),
        fit=Quadrature(nodes, weights, weights),
        loss=float(model.likelihood.loss(model.offset.double(), model.targets).sum()),
        num_outputs=exact.size,
        size=model.features.size,
        noise_precision=float(noise) if noise.dim() == 0 else None,
        at=precision,
        exact=True,
        passes=0.0,
    )


def _with_noise_of_network(
    posterior: ExactRegression,
    optimum: Optimum,
    learn_precision: bool,
    precision_bounds: tuple[float, float],
    noise_bounds: tuple[float, float],
) -> Optimum:
    """The root of `b Σ(y − f)²/R = N·C − γ`, both sides of which change sign once where `γ` rises with `b`."""
    model = posterior.model
    shape = posterior.noise_scale.shape
    residual = (model.targets.reshape(shape) - model.network_outputs.reshape(shape)).double()
    squares = float((residual**2 / posterior.noise_scale).sum())

    def at(log_noise: float) -> Optimum:
        return _at_noise(posterior, math.exp(log_noise), learn_precision, precision_bounds)

    def excess(log_noise: float) -> float:
        found = at(log_noise)
        gamma = float(posterior.effective_dimension(found.precision, found.noise_precision))
        return found.noise_precision * squares - (posterior.size - gamma)

    first, last = math.log(noise_bounds[0]), math.log(noise_bounds[1])
    # Not negative at N·C/Σ: from there downwards until it is.
    low = high = min(max(math.log(posterior.size / squares) if squares > 0 else last, first), last)
    while low > first and excess(low) > 0:
        low, high = max(low - 1, first), low
    inside = low < high and excess(low) <= 0
    root = cast(float, scipy.optimize.brentq(excess, low, high, xtol=1e-8)) if inside else low
    at_bounds = () if inside else ("noise_precision",)
    found = at(root)
    return replace(
        found,
        num_maxima=optimum.num_maxima,
        at_bounds=found.at_bounds + at_bounds,
        converged=found.converged and not at_bounds,
    )


def _at_noise(
    posterior: ExactRegression, noise_precision: float, learn_precision: bool, bounds: tuple[float, float]
) -> Optimum:
    """`α` of largest evidence at a noise precision."""
    given = replace(posterior, model=posterior.model.with_likelihood(Gaussian(noise_precision, learn=False)))
    return given.fit(learn_precision=learn_precision, precision_bounds=bounds)


def _overall(likelihood: Gaussian) -> float:
    return float(torch.as_tensor(likelihood.noise_precision).log().mean().exp())


@dataclass(frozen=True)
class NoiseComponents:
    """Evidence as a function of `log α` and `log b_c`, with derivatives.

    Attributes:
        gram: `K`, `[N·C, N·C]`.
        residual: `y − o`, `[N, C]`.
        noise_scale: `R`, `[N, C]`.
    """

    gram: Float[Tensor, "NC NC"]
    residual: Float[Tensor, "N C"]
    noise_scale: Float[Tensor, "N C"]

    def _solve(self, logs: Float[Tensor, " 1+C"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`log|G|`, `P`, `a` and the diagonal of `D`."""
        D = (self.noise_scale / logs[1:].exp().to(self.gram)).flatten()
        G = self.gram / float(logs[0].exp())
        G.diagonal().add_(D)
        logdet = inverse_(G)
        return logdet, G, G @ self.residual.flatten(), D

    def _by_output(self, x: Tensor) -> Tensor:
        return x.reshape(*self.residual.shape, *x.shape[1:]).sum(0)

    def noise_of_network(
        self,
        squares: Float[Tensor, " C"],
        start: Float[Tensor, " 1+C"],
        learn_precision: bool,
        precision_bounds: tuple[float, float],
        noise_bounds: tuple[float, float],
    ) -> tuple[Float[Tensor, " 1+C"], bool]:
        """`b_c Σ(y − f)²/R = N − γ_c` for each output and `α` of a fixed point there, within bounds; if it was found.

        The fixed-point map of both, with steps that are halved where the residual grows, goes near; a root finder,
        which gets lost from afar, ends there.
        """
        C = len(squares)
        low, high = (
            torch.tensor([alpha, *[b] * C], dtype=torch.float64).log()
            for alpha, b in zip(precision_bounds, noise_bounds, strict=True)
        )

        def residual(x: np.ndarray) -> np.ndarray:
            logs = torch.from_numpy(x).clamp(low, high)
            _, P, a, D = self._solve(logs)
            left = self._by_output(P.diagonal() * D)  # N − γ_c
            signal = self.residual.flatten() @ a - (a * a * D).sum()  # θ̄ᵀAθ̄
            gamma = len(a) - left.sum()
            alpha = logs[0] + (gamma / signal).log().cpu() if learn_precision else start[0]
            to = torch.cat([alpha[None], (left / squares).log().cpu()]).nan_to_num(nan=0.0)
            return x - to.clamp(low, high).numpy()

        x, length = start.clamp(low, high).numpy(), 0.5
        for _ in range(_ROUNDS):
            found = residual(x)
            for _ in range(_FIXED_POINT_STEPS):
                if np.abs(found).max() < 1e-2:
                    break
                proposal = x - length * found
                at = residual(proposal)
                if np.abs(at).max() > np.abs(found).max():
                    length = max(0.5 * length, 0.05)
                x, found = proposal, at
            root = scipy.optimize.root(residual, x, tol=1e-10).x
            if np.abs(residual(root)).max() < 1e-7:
                return torch.from_numpy(root).clamp(low, high), True
        return torch.from_numpy(x).clamp(low, high), False

    def evaluate(self, logs: Float[Tensor, " 1+C"]) -> tuple[float, Float[Tensor, " 1+C"], Float[Tensor, "1+C 1+C"]]:
        """`log p(y)`, its gradient and its second derivatives, on the CPU."""
        (N, C), r, by_output = self.residual.shape, self.residual.flatten(), self._by_output
        logdet, P, a, D = self._solve(logs)
        value = -0.5 * (logdet + r @ a + N * C * math.log(2 * math.pi))
        # Traces Tr P D_c, quadratic forms aᵀD_c a, Tr P D_c P D_e, aᵀD_c P D_e a, in logarithms of 1/b_c.
        trace, form = by_output(P.diagonal() * D), by_output(a * a * D)
        masked = torch.eye(C).to(P).repeat(N, 1) * D[:, None]  # [N·C, C]
        solved = P @ (masked * a[:, None])
        forms = (masked * a[:, None]).T @ solved
        traces = masked.T @ P.square_() @ masked
        full = a - solved.sum(1)  # P (K/α) a
        gradient = torch.cat([(-(N * C - trace.sum()) + (r @ a - form.sum()))[None], form - trace]).neg() / 2
        # In log α the sign of every derivative of K/α is that of −1, in log b likewise: two of them cancel.
        hessian = torch.empty(1 + C, 1 + C).to(P)
        signal = r @ a - form.sum()
        hessian[0, 0] = (
            0.5 * (signal - (N * C - trace.sum())) + 0.5 * (N * C - 2 * trace.sum() + traces.sum()) - (r - D * a) @ full
        )
        cross = 0.5 * (trace - traces.sum(0)) - masked.T @ (a * full)
        hessian[0, 1:] = hessian[1:, 0] = cross
        hessian[1:, 1:] = 0.5 * traces - forms + torch.diag(0.5 * (form - trace))
        return float(value), gradient.cpu(), hessian.cpu()

    def newton(
        self,
        start: Float[Tensor, " 1+C"],
        learn_precision: bool,
        precision_bounds: tuple[float, float],
        noise_bounds: tuple[float, float],
        max_steps: int = 50,
    ) -> tuple[Float[Tensor, " 1+C"], bool, tuple[str, ...]]:
        """A local maximum near `start`: logarithms, whether the gradient vanishes, and what ended at a bound."""
        C = self.residual.shape[1]
        low = torch.tensor([precision_bounds[0], *[noise_bounds[0]] * C], dtype=torch.float64).log()
        high = torch.tensor([precision_bounds[1], *[noise_bounds[1]] * C], dtype=torch.float64).log()
        logs = torch.minimum(torch.maximum(start, low), high)
        value, gradient, hessian = self.evaluate(logs)
        size = self.residual.numel()
        for _ in range(max_steps):
            free = ~(((logs <= low) & (gradient < 0)) | ((logs >= high) & (gradient > 0)))
            free[0] &= learn_precision
            if bool((gradient[free].abs() <= 1e-10 * size).all()):
                break
            curvature, basis = torch.linalg.eigh(-hessian[free][:, free])
            floor = 1e-3 * curvature.abs().max()
            # Uphill also where the evidence is not concave, by at most two e-folds.
            step = torch.zeros_like(logs)
            step[free] = basis @ ((basis.T @ gradient[free]) / curvature.abs().clamp_min(floor * 1e-6))
            step *= min(1.0, 2.0 / float(step.abs().max()))
            length, accepted = 1.0, False
            while length > 1e-10 and not accepted:
                proposal = torch.minimum(torch.maximum(logs + length * step, low), high)
                found = self.evaluate(proposal)
                if accepted := found[0] >= value - 1e-12 * abs(value):
                    logs, (value, gradient, hessian) = proposal, found
                else:
                    length /= 2
            if not accepted:
                break
        free = (logs > low) & (logs < high)
        names = ["precision", *["noise_precision"] * C]
        learnt = torch.tensor([learn_precision, *[True] * C])
        at = tuple(dict.fromkeys(n for n, f, on in zip(names, free, learnt, strict=True) if on and not f))
        return logs, bool((gradient[free & learnt].abs() <= 1e-7 * size).all()), at
