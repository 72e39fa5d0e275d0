r"""Regression in observation space, exactly: one eigendecomposition serves every prior and noise precision.

The tangent model `y = o + Φθ + e` is a Gaussian process with mean `o` and kernel `K/α`, `K = Φ A₁⁻¹ Φᵀ`, `A = α A₁`.
With noise `e ~ N(0, R/b)`, `R` diagonal, and `R^{-1/2} K R^{-1/2} = U Λ Uᵀ`, `c = Uᵀ R^{-1/2}(y − o)`, `v = λ/α + 1/b`
(thesis eq. 2.16–2.19, 2.43–2.46; Rasmussen & Williams 2006, ch. 2 and 5)

    log p(y) = −½ Σ_j (log v_j + c_j²/v_j) − ½ log|R| − ½ N·C log 2π          γ = Σ_j (λ_j/α) / v_j
    θ̄ = A⁻¹ Φᵀ R^{-1/2} U (c/v)                cov h(x) = k(x, x) − k(x, X) R^{-1/2} U diag(1/v) Uᵀ R^{-1/2} k(X, x)

in `O(N·C)` for each `(α, b)`. Everything is in float64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.gram import MAX_MEMORY, check_gram_size, cross_gram, gram, gram_blocks, transposed
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features, row_blocks
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision, unit_variance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.lapack import symmetric_eigen

__all__ = [
    "ExactPrediction",
    "ExactRegression",
    "Optimum",
    "noise_scale",
    "overall_precisions",
]

PRECISION_BOUNDS, NOISE_BOUNDS = (1e-8, 1e12), (1e-12, 1e12)


@dataclass(frozen=True)
class Optimum:
    r"""Hyperparameters of largest evidence.

    Attributes:
        precision: `α`, overall: the geometric mean over the weights, where there are several groups.
        noise_precision: `b`, in units of which a noise variance given for a datum is one over its own precision.
        log_evidence: `log p(y)`, a sum over the data.
        gradient: `∂ log p/∂ log α` and `∂ log p/∂ log b`, zero for what was learnt.
        standard_errors: of `log α` and `log b`, from the second derivatives; NaN where there is no maximum.
        num_maxima: local maxima seen on a grid of ten points an e-fold; the largest was taken.
        at_bounds: what ended at one of its bounds, `"precision"` or `"noise_precision"`.
        converged: whether the gradient of what was learnt vanishes, inside the bounds.
    """

    precision: float
    noise_precision: float
    log_evidence: float
    gradient: tuple[float, float]
    standard_errors: tuple[float, float]
    num_maxima: int
    at_bounds: tuple[str, ...]
    converged: bool


@dataclass(frozen=True)
class ExactPrediction:
    """Posterior of the function `φ(x) θ` at some inputs, for every `α` and `b`; noise is not included.

    Attributes:
        features: `φ(x)`.
        variance: of the weights at `α = 1`, `[P]`.
        rotated: `k(x, X) R^{-1/2} U` at `α = 1`, `[M·C, N·C]`.
        eigenvalues: `λ`.
        targets: `c`.
        block_bytes: memory for rows of the Jacobian.
    """

    features: Features
    variance: Float[Tensor, " P"]
    rotated: Float[Tensor, "MC NC"]
    eigenvalues: Float[Tensor, " NC"]
    targets: Float[Tensor, " NC"]
    block_bytes: float = BLOCK_BYTES

    @cached_property
    def _blocks(self) -> Float[Tensor, "M C C"]:
        return gram_blocks(self.features, self.variance, block_bytes=self.block_bytes)

    @cached_property
    def _gram(self) -> Float[Tensor, "MC MC"]:
        return gram(self.features, self.variance, block_bytes=self.block_bytes)

    def mean(self, precision: float, noise_precision: float) -> Float[Tensor, "M C"]:
        """`φ(x) θ̄`: add the offset of the linear model at `x` for the mean of its outputs."""
        v = self.eigenvalues / precision + 1 / noise_precision
        return (self.rotated @ (self.targets / v) / precision).reshape(-1, self.features.num_outputs)

    def covariance(self, precision: float, noise_precision: float) -> Float[Tensor, "M C C"]:
        """Covariance of the outputs of each input."""
        v = self.eigenvalues / precision + 1 / noise_precision
        Q = self.rotated.unflatten(0, (-1, self.features.num_outputs))
        return (self._blocks - (Q / (v * precision)) @ Q.mT) / precision

    @cached_property
    def _diagonal(self) -> Float[Tensor, "M C"]:
        """Of `k(x, x)`, by rows of the Jacobian: many outputs need no block of theirs."""
        if "_blocks" in vars(self):
            return self._blocks.diagonal(dim1=1, dim2=2)
        parts = [rows**2 @ self.variance for _, rows in row_blocks(self.features, self.block_bytes)]
        return torch.cat(parts).reshape(-1, self.features.num_outputs)

    def stddev(self, precision: float, noise_precision: float) -> Float[Tensor, "M C"]:
        """Standard deviation of each output of each input."""
        v = self.eigenvalues / precision + 1 / noise_precision
        reduction = (self.rotated**2 @ (1 / (v * precision))).reshape(-1, self.features.num_outputs)
        return ((self._diagonal - reduction) / precision).clamp_min(0).sqrt()

    def joint_covariance(self, precision: float, noise_precision: float) -> Float[Tensor, "MC MC"]:
        """Covariance over all inputs and outputs, the outputs of an input adjacent."""
        v = self.eigenvalues / precision + 1 / noise_precision
        return (self._gram - (self.rotated / (v * precision)) @ self.rotated.T) / precision


@dataclass(frozen=True)
class ExactRegression:
    """The eigendecomposition of a regression in observation space; see the equations of the module.

    `precision` below is `α`, the overall one: several precisions of a prior go up and down together. `noise_precision`
    is `b`; both may be tensors, which are broadcast, and have gradients.

    Attributes:
        model: the linear model on the training data.
        prior: its precisions in ratio are those of `A₁`.
        eigenvalues: `λ`, rising, `[N·C]`.
        vectors: `U`, `[N·C, N·C]`.
        rotated: `c`, `[N·C]`.
        noise_scale: `R`, `[N, C]`.
        block_bytes: memory for rows of the Jacobian.
    """

    model: LinearModel
    prior: GaussianPrior
    eigenvalues: Float[Tensor, " NC"]
    vectors: Float[Tensor, "NC NC"]
    rotated: Float[Tensor, " NC"]
    noise_scale: Float[Tensor, "N C"]
    block_bytes: float = BLOCK_BYTES

    @classmethod
    def of(
        cls,
        model: LinearModel,
        prior: GaussianPrior,
        *,
        noise_variances: Tensor | None = None,
        products: str = "auto",
        block_bytes: float = BLOCK_BYTES,
        max_memory: float = MAX_MEMORY,
    ) -> "ExactRegression":
        """Build the Gram matrix and decompose it, in place.

        Args:
            model: the linear model on the training data, with a Gaussian likelihood.
            prior: of its weights.
            noise_variances: `R`, the noise variance of each datum, `[N]`, or of each of its outputs, `[N, C]`, in the
                units of the targets squared, known up to the common factor `1/b`. By default one, or, where the
                likelihood has a precision for each output, in ratio to these.
            products: how the Gram matrix is built, see `gram`.
            block_bytes: memory for rows of the Jacobian.
            max_memory: bytes that four Gram matrices may take.

        Raises:
            TypeError: if the likelihood is not Gaussian.
            ValueError: if the Gram matrix is too large, not finite, or `noise_variances` do not fit.
        """
        R = noise_scale(model, noise_variances)
        check_gram_size(model.features, max_memory)
        K = gram(model.features, unit_variance(prior), products=products, block_bytes=block_bytes)
        return cls.decompose(K, model, prior, R, block_bytes)

    @classmethod
    def decompose(
        cls,
        K: Float[Tensor, "NC NC"],
        model: LinearModel,
        prior: GaussianPrior,
        noise_scale: Float[Tensor, "N C"],
        block_bytes: float = BLOCK_BYTES,
    ) -> "ExactRegression":
        """From a Gram matrix at `α = 1`, which is overwritten."""
        root = noise_scale.flatten().sqrt()
        K /= root
        K /= root[:, None]
        values, vectors = symmetric_eigen(K)
        targets = model.targets.reshape(model.offset.shape)
        residual = (targets - model.offset).double().flatten()
        return cls(model, prior, values, vectors, vectors.T @ (residual / root), noise_scale, block_bytes)

    @property
    def residual(self) -> Float[Tensor, "N C"]:
        """`y − o`."""
        return (self.model.targets.reshape(self.model.offset.shape) - self.model.offset).double()

    @property
    def size(self) -> int:
        """`N·C`."""
        return len(self.eigenvalues)

    def _terms(self, precision: float | Tensor, noise_precision: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`λ/α`, `1/b` and `v`, with the broadcast shape of the precisions before the axis of eigenvalues."""
        like = {"dtype": torch.float64, "device": self.eigenvalues.device}
        signal = self.eigenvalues / torch.as_tensor(precision, **like)[..., None]
        noise = 1 / torch.as_tensor(noise_precision, **like)[..., None]
        return signal, noise, signal + noise

    def log_evidence(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`log p(y)`, a sum over the data."""
        _, _, v = self._terms(precision, noise_precision)
        constant = 0.5 * self.noise_scale.log().sum() + 0.5 * self.size * math.log(2 * math.pi)
        return -0.5 * (v.log() + self.rotated**2 / v).sum(-1) - constant

    def log_evidence_gradient(self, precision: float | Tensor, noise_precision: float | Tensor) -> Float[Tensor, "* 2"]:
        """`∂ log p/∂ log α = ½(γ − θ̄ᵀAθ̄)` and `∂ log p/∂ log b = ½(N·C − γ − b·SSE)`."""
        signal, noise, v = self._terms(precision, noise_precision)
        slope = 0.5 * (1 / v - self.rotated**2 / v**2)
        return torch.stack([(slope * signal).sum(-1), (slope * noise).sum(-1)], -1)

    def log_evidence_hessian(
        self, precision: float | Tensor, noise_precision: float | Tensor
    ) -> Float[Tensor, "* 2 2"]:
        """Second derivatives in `log α` and `log b`."""
        signal, noise, v = self._terms(precision, noise_precision)
        slope = 0.5 * (1 / v - self.rotated**2 / v**2)
        bend = 0.5 * (1 / v**2 - 2 * self.rotated**2 / v**3)
        # d/du of `slope · s` with s = exp(−u)·…: −slope·s + bend·s².
        first = (bend * signal**2 - slope * signal).sum(-1)
        cross = (bend * signal * noise).sum(-1)
        second = (bend * noise**2 - slope * noise).sum(-1)
        return torch.stack([torch.stack([first, cross], -1), torch.stack([cross, second], -1)], -2)

    def effective_dimension(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`γ = Tr(H⁻¹M)`."""
        signal, _, v = self._terms(precision, noise_precision)
        return (signal / v).sum(-1)

    def mode_norm(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`θ̄ᵀA₁θ̄`: `‖θ̄‖²` in the scaled coordinates of a prior of one group."""
        signal, _, v = self._terms(precision, noise_precision)
        like = {"dtype": torch.float64, "device": self.eigenvalues.device}
        return (signal * self.rotated**2 / v**2).sum(-1) / torch.as_tensor(precision, **like)

    def squared_error(self, precision: float | Tensor, noise_precision: float | Tensor) -> Tensor:
        """`SSE = Σ (y − h(θ̄, x))²/R`."""
        _, noise, v = self._terms(precision, noise_precision)
        return (noise**2 * self.rotated**2 / v**2).sum(-1)

    def coefficients(self, precision: float, noise_precision: float) -> Float[Tensor, "N C"]:
        """`(K/α + R/b)⁻¹ (y − o)`."""
        _, _, v = self._terms(precision, noise_precision)
        return (self.vectors @ (self.rotated / v)).reshape(self.noise_scale.shape) / self.noise_scale.sqrt()

    def mode(self, precision: float, noise_precision: float) -> Float[Tensor, " P"]:
        """`θ̄ = A⁻¹Φᵀ (K/α + R/b)⁻¹ (y − o)`, unscaled: the mode of the linear model."""
        return self._to_weights(self.coefficients(precision, noise_precision)[None], precision)[0]

    def mode_outputs(self, precision: float, noise_precision: float) -> Float[Tensor, "N C"]:
        """`h(θ̄, x_i) = y − (R/b) (K/α + R/b)⁻¹ (y − o)`, without a pass over the data."""
        targets = self.model.targets.reshape(self.noise_scale.shape).double()
        return targets - self.noise_scale / noise_precision * self.coefficients(precision, noise_precision)

    def _to_weights(self, u: Float[Tensor, "K N C"], precision: float) -> Float[Tensor, "K P"]:
        """`A⁻¹Φᵀu`."""
        return transposed(self.model.features, u) * unit_variance(self.prior) / precision

    def sample(self, draws: Draws, precision: float, noise_precision: float) -> Float[Tensor, "K P"]:
        r"""Zero-mean posterior samples `ζ ~ N(0, H⁻¹)`, unscaled: those of `sample_posterior` with the same draws.

        `ζ = θ⁰ − A⁻¹Φᵀ(K/α + R/b)⁻¹(ε + Φθ⁰)` (Matheron's rule; thesis §7.3.3) with `ε = −(R/b)^{1/2} z`.
        """
        features, (N, C) = self.model.features, self.noise_scale.shape
        _, _, v = self._terms(precision, noise_precision)
        centre = draws.prior(features.size).to(self.vectors) * (unit_variance(self.prior) / precision).sqrt()
        white = draws.noise(C)(torch.arange(N)).to(self.vectors) / noise_precision**0.5
        root = self.noise_scale.sqrt()
        at = features.outputs(centre.to(features.dtype)).double() / root
        solved = ((white - at).flatten(1) @ self.vectors / v) @ self.vectors.T
        return centre + self._to_weights(solved.reshape(at.shape) / root, precision)

    def leave_one_out(self, precision: float, noise_precision: float) -> LeaveOneOut:
        r"""Each datum from the others: mean `y − P_ii⁻¹ a_i`, covariance `P_ii⁻¹`.

        With `P = (K/α + R/b)⁻¹` and `a = P(y − o)`, by blocks of the outputs of a datum (Rasmussen & Williams 2006,
        eq. 5.10–5.12).
        """
        _, _, v = self._terms(precision, noise_precision)
        (N, C), root = self.noise_scale.shape, self.noise_scale.sqrt()
        covariances = []
        rows = self.vectors.reshape(N, C, -1)
        for batch in torch.arange(N).split(max(1, 2**20 // (C * self.size))):
            part = rows[batch] / root[batch][..., None]
            covariances.append(torch.linalg.inv((part / v) @ part.mT))
        covariance = torch.cat(covariances)
        covariance = (covariance + covariance.mT) / 2
        residual = (covariance @ self.coefficients(precision, noise_precision)[..., None])[..., 0]
        mean = self.model.targets.reshape(N, C).double() - residual
        return LeaveOneOut.gaussian(mean, covariance, mean + residual)

    def at(self, features: Features, *, products: str = "auto") -> ExactPrediction:
        """The posterior at other inputs, of as many outputs or of others (`features_at` makes features of inputs)."""
        variance = unit_variance(self.prior)
        K = cross_gram(features, self.model.features, variance, products=products, block_bytes=self.block_bytes)
        K /= self.noise_scale.flatten().sqrt()
        return ExactPrediction(features, variance, K @ self.vectors, self.eigenvalues, self.rotated, self.block_bytes)

    def fit(
        self,
        *,
        learn_precision: bool = True,
        learn_noise: bool | None = None,
        precision_bounds: tuple[float, float] = PRECISION_BOUNDS,
        noise_bounds: tuple[float, float] = NOISE_BOUNDS,
    ) -> Optimum:
        r"""The `α` and `b` of largest evidence, to rounding; what is not learnt stays as prior and likelihood have it.

        With both learnt, `b` has the closed form `N·C / Σ c²/(λ/ρ + 1)` at `ρ = α/b`, and the evidence is a function of
        `ρ` alone. It is looked at on a grid, and its largest maximum found as a root of the derivative.

        Args:
            learn_precision: whether `α` is learnt.
            learn_noise: whether `b` is learnt; by default what the likelihood says.
            precision_bounds: within which `α` is kept.
            noise_bounds: within which `b` is kept.
        """
        for name, (low, high) in (("precision_bounds", precision_bounds), ("noise_bounds", noise_bounds)):
            if not 0 < low < high:
                raise ValueError(f"`{name}` must be positive and in order, but is {(low, high)}.")
        assert isinstance(self.model.likelihood, Gaussian)
        alpha, b = overall_precision(self.prior), _overall_noise(self.model.likelihood)
        learn_noise = self.model.likelihood.learn if learn_noise is None else learn_noise
        count = 1
        if learn_precision and learn_noise:
            alpha, b, count = self._fit_both(precision_bounds, noise_bounds)
            outside = [not low < x < high for x, (low, high) in ((alpha, precision_bounds), (b, noise_bounds))]
            if outside[0] and outside[1] and b >= noise_bounds[1]:
                outside[0] = False  # without noise α has a scale of its own
            alpha, b = _clip(alpha, precision_bounds), _clip(b, noise_bounds)
            if outside[0] or outside[1]:
                # The rest is learnt along the bound.
                learn = (outside[1] and not outside[0], outside[0] and not outside[1])
                alpha, b, count = self._fit_one(alpha, b, *learn, precision_bounds, noise_bounds)
        else:
            alpha, b, count = self._fit_one(alpha, b, learn_precision, learn_noise, precision_bounds, noise_bounds)
        gradient = self.log_evidence_gradient(alpha, b)
        learnt = [learn_precision, learn_noise]
        bounds = (("precision", alpha, precision_bounds), ("noise_precision", b, noise_bounds))
        at_bounds = tuple(n for (n, x, ends), on in zip(bounds, learnt, strict=True) if on and x in ends)
        flat = bool((gradient[torch.tensor(learnt, device=gradient.device)].abs() <= 1e-9 * self.size).all())
        return Optimum(
            precision=alpha,
            noise_precision=b,
            log_evidence=float(self.log_evidence(alpha, b)),
            gradient=(float(gradient[0]), float(gradient[1])),
            standard_errors=_standard_errors(self.log_evidence_hessian(alpha, b).cpu(), learnt),
            num_maxima=count,
            at_bounds=at_bounds,
            converged=flat and not at_bounds,
        )

    def _fit_both(
        self, precision_bounds: tuple[float, float], noise_bounds: tuple[float, float]
    ) -> tuple[float, float, int]:
        values, squares = self.eigenvalues, self.rotated**2

        def weights(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            signal = values / u.exp()[..., None]
            b = self.size / (squares / (signal + 1)).sum(-1).clamp_min(1e-300)
            return signal, signal + 1, b

        def value(u: Tensor) -> Tensor:
            _, w, b = weights(u)
            return 0.5 * self.size * b.log() - 0.5 * w.log().sum(-1)

        def slope(u: Tensor) -> Tensor:
            signal, w, b = weights(u)
            return 0.5 * (signal / w - b[..., None] * squares * signal / w**2).sum(-1)

        largest = max(float(values[-1]), 1e-300)
        ends = (math.log(largest) - 40, math.log(largest) + 20)
        u, count = _maximise(value, slope, ends, values.device)
        b = float(weights(torch.tensor(u, dtype=torch.float64, device=values.device))[2])
        if u == ends[1]:  # the evidence rises to no signal
            return precision_bounds[1], b, count
        if u == ends[0]:  # to no noise
            return _clip(math.exp(u) * b, precision_bounds), noise_bounds[1], count
        return math.exp(u) * b, b, count

    def _fit_one(
        self,
        alpha: float,
        b: float,
        learn_precision: bool,
        learn_noise: bool,
        precision_bounds: tuple[float, float],
        noise_bounds: tuple[float, float],
    ) -> tuple[float, float, int]:
        if not (learn_precision or learn_noise):
            return alpha, b, 1
        which = 0 if learn_precision else 1
        bounds = precision_bounds if learn_precision else noise_bounds

        def both(u: Tensor) -> tuple[Tensor | float, Tensor | float]:
            return (u.exp(), b) if learn_precision else (alpha, u.exp())

        ends = (math.log(bounds[0]), math.log(bounds[1]))
        u, count = _maximise(
            lambda u: self.log_evidence(*both(u)),
            lambda u: self.log_evidence_gradient(*both(u))[..., which],
            ends,
            self.eigenvalues.device,
        )
        found = bounds[ends.index(u)] if u in ends else math.exp(u)
        return (found, b, count) if learn_precision else (alpha, found, count)


def overall_precisions(model: LinearModel, prior: GaussianPrior) -> tuple[float, float]:
    """`α` and `b` of a prior and of the Gaussian likelihood of a model, geometric means where there are several."""
    assert isinstance(model.likelihood, Gaussian)
    return overall_precision(prior), _overall_noise(model.likelihood)


def noise_scale(model: LinearModel, variances: Tensor | None) -> Float[Tensor, "N C"]:
    """`R`: given variances, in ratio to those of a likelihood with a precision for each output."""
    if not isinstance(model.likelihood, Gaussian):
        raise TypeError(
            f"Exact regression needs a Gaussian likelihood, but the model has a {type(model.likelihood).__name__}; "
            "use `ExactClassification`."
        )
    shape = model.offset.shape
    precision = model.likelihood.precision(model.offset).double()
    R = (_overall_noise(model.likelihood) / precision).expand(shape)
    if variances is None:
        return R.contiguous()
    if variances.shape != shape[:1] and variances.shape not in (shape, model.targets.shape):
        raise ValueError(
            f"`noise_variances` must have one entry a datum, [{shape[0]}], or one an output, {list(shape)}, "
            f"but have shape {list(variances.shape)}."
        )
    given = variances.detach().to(R)
    if not bool((given > 0).all()) or not bool(given.isfinite().all()):
        raise ValueError("`noise_variances` must be positive and finite.")
    return R * given.reshape(shape[0], -1)


def _overall_noise(likelihood: Gaussian) -> float:
    noise = torch.as_tensor(likelihood.noise_precision)
    return float(noise) if noise.dim() == 0 else float(noise.log().mean().exp())


def _clip(x: float, bounds: tuple[float, float]) -> float:
    return min(max(x, bounds[0]), bounds[1])


def _maximise(
    value: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
    ends: tuple[float, float],
    device: torch.device,
) -> tuple[float, int]:
    """The largest maximum of a function of a logarithm between two ends, and how many local ones were seen."""
    grid = torch.linspace(*ends, max(3, math.ceil(10 * (ends[1] - ends[0]))), dtype=torch.float64, device=device)
    slopes = torch.cat([slope(part) for part in grid.split(64)]).cpu().numpy()

    def at(u: float) -> Tensor:
        return torch.tensor(u, dtype=torch.float64, device=device)

    candidates = [] if slopes[0] > 0 else [ends[0]]
    for i in np.flatnonzero((slopes[:-1] > 0) & (slopes[1:] <= 0)):
        low, high = float(grid[i]), float(grid[i + 1])
        # By bisection: scipy's root finders keep the function, and the matrices behind it, in a reference cycle.
        while low < (middle := 0.5 * (low + high)) < high:
            low, high = (middle, high) if float(slope(at(middle))) > 0 else (low, middle)
        candidates.append(high)
    if slopes[-1] > 0 or not candidates:
        candidates.append(ends[1])
    return max(candidates, key=lambda u: float(value(at(u)))), len(candidates)


def _standard_errors(hessian: Float[Tensor, "2 2"], learnt: list[bool]) -> tuple[float, float]:
    free = torch.tensor(learnt).nonzero()[:, 0]
    errors = [math.nan if on else 0.0 for on in learnt]
    if len(free):
        information = -hessian[free][:, free]
        if bool(torch.linalg.eigvalsh(information)[0] > 0):
            for i, variance in zip(free.tolist(), torch.linalg.inv(information).diagonal().tolist(), strict=True):
                errors[i] = math.sqrt(variance)
    return errors[0], errors[1]
