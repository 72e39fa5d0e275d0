r"""Any likelihood in observation space, by dense algebra on `S = LᵀKL`, `L Lᵀ = B`, for `N·C` up to some thousands.

With `K = Φ A₁⁻¹ Φᵀ`, `A = α A₁`, and weights `θ = A⁻¹Φᵀa` (Rasmussen & Williams 2006, ch. 3, for any `C`; `B` may be
singular, as it is for the softmax)

    mode        a = −∂ℓ/∂h at h = o + K a/α;  Newton: a ← b − L(I + S/α)⁻¹LᵀK b/α,  b = B(h − o) − ∂ℓ/∂h
    evidence    log p(y) ≈ −Σ_i ℓ(y_i, h_i) − ½ aᵀ(h − o) − ½ log|I + S/α|
    γ           Tr (I + S/α)⁻¹ S/α
    covariance  (k(x, x) − k(x, X) L (αI + S)⁻¹ Lᵀ k(X, x)) / α      of φ(x)θ, with k at α = 1
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.dual_point import DualPoint
from laplace_sampling.gp.exact_prediction import ExactPrediction, PosteriorAt
from laplace_sampling.gp.gram import MAX_MEMORY, add_transposed_, check_gram_size, cross_gram, gram, transposed
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.bounds import PRECISION_BOUNDS, check_bounds, is_at_bound
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision, unit_variance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut, leave_one_out
from laplace_sampling.solvers.lapack import check_finite, solve_, symmetric_eigen
from laplace_sampling.solvers.root import falling_root

__all__ = ["ExactClassification", "ExactMode", "ExactPosterior"]

# Rows of a matrix that a root of the curvature is applied to at once: a definition of what is little memory next to it.
_ROWS = 64


@dataclass(frozen=True)
class ExactMode:
    """The mode of the linear model in observation space, `θ̄ = A⁻¹Φᵀa`.

    Attributes:
        coefficients: `a`, `[N, C]`.
        outputs: `h(θ̄, x_i)`, `[N, C]`.
        loss: `Σ_i ℓ(y_i, h_i)`.
        norm: `θ̄ᵀA₁θ̄`.
        residual: `‖a + ∂ℓ/∂h‖` relative to that at `θ = 0`.
        converged: whether it is below the tolerance.
    """

    coefficients: Float[Tensor, "N C"]
    outputs: Float[Tensor, "N C"]
    loss: float
    norm: float
    residual: float
    converged: bool


@dataclass(frozen=True)
class ExactPosterior:
    """The posterior at one prior precision.

    Attributes:
        problem: the Gram matrix and the data.
        precision: `α`.
        known_mode: at `α`, if it is known already.
        curvature_outputs: where `B` was taken, `[N, C]`.
        eigenvalues: of `S`, rising, `[N·C]`.
        vectors: `U`, `[N·C, N·C]`.
        at_bounds: `("precision",)` if `α` ended at one of its bounds.
    """

    problem: "ExactClassification"
    precision: float
    known_mode: ExactMode | None
    curvature_outputs: Float[Tensor, "N C"]
    eigenvalues: Float[Tensor, " NC"]
    vectors: Float[Tensor, "NC NC"]
    at_bounds: tuple[str, ...] = ()

    @cached_property
    def mode(self) -> ExactMode:
        """`θ̄`, found when it is first needed."""
        return self.problem.mode(self.precision) if self.known_mode is None else self.known_mode

    @property
    def converged(self) -> bool:
        """Whether the mode has converged, and `α`, if it was learnt, is within its bounds."""
        return self.mode.converged and not self.at_bounds

    def with_precision(self, precision: float) -> "ExactPosterior":
        """The posterior at another `α`, with the curvature where it is."""
        return replace(self, precision=precision, known_mode=None)

    @property
    def prior(self) -> GaussianPrior:
        """The prior with the precision of this posterior."""
        prior = self.problem.prior
        return prior.with_precision(prior.precision * (self.precision / overall_precision(prior)))

    @property
    def effective_dimension(self) -> float:
        """`γ = Tr(H⁻¹M)`."""
        return _effective_dimension(self.eigenvalues, self.precision)

    @property
    def log_evidence(self) -> float:
        """Laplace's approximation of `log p(y)`, a sum over the data."""
        # `log1p`: most eigenvalues are tiny against `α`, and `log(1 + x)` would lose their digits.
        logdet = float((self.eigenvalues / self.precision).log1p().sum())
        return -self.mode.loss - 0.5 * self.precision * self.mode.norm - 0.5 * logdet

    def _likelihood(self) -> Likelihood:
        return self.problem.model.likelihood

    def mode_weights(self) -> Float[Tensor, " P"]:
        """`θ̄`, unscaled."""
        return self._to_weights(self.mode.coefficients[None])[0]

    def _to_weights(self, u: Float[Tensor, "K N C"]) -> Float[Tensor, "K P"]:
        return transposed(self.problem.model.features, u) * unit_variance(self.problem.prior) / self.precision

    def at(self, features: Features) -> PosteriorAt:
        """The posterior at other inputs; see `features_at`."""
        K = self._cross_gram(features)
        mean = (K @ self.mode.coefficients.flatten() / self.precision).reshape(-1, features.num_outputs)
        return PosteriorAt(mean, self.precision, self._prediction(features, K))

    def prediction_at(self, features: Features) -> ExactPrediction:
        """The covariances of `at`, which take no mode."""
        return self._prediction(features, self._cross_gram(features))

    def _cross_gram(self, features: Features) -> Float[Tensor, "MC NC"]:
        problem = self.problem
        variance = unit_variance(problem.prior)
        return cross_gram(features, problem.model.features, variance, block_bytes=problem.block_bytes)

    def _prediction(self, features: Features, K: Float[Tensor, "MC NC"]) -> ExactPrediction:
        problem, (N, C) = self.problem, self.curvature_outputs.shape
        targets = problem.model.targets
        # `Lᵀk(X, x)`, in blocks and in the memory of `k`, which the mean does not need any more.
        for rows in K.split(_ROWS):
            stack = rows.reshape(-1, N, C)
            rows.copy_(self._likelihood().root_transpose(self.curvature_outputs, stack, targets).flatten(1))
        # The mean is not linear in the targets, so that the prediction has none: it serves for covariances only.
        targets = torch.zeros_like(self.eigenvalues)
        variance = unit_variance(problem.prior)
        return ExactPrediction(features, variance, K @ self.vectors, self.eigenvalues, targets, problem.block_bytes)

    def sample(self, draws: Draws) -> Float[Tensor, "K P"]:
        r"""Zero-mean posterior samples, unscaled: those of `sample_posterior` with the same draws.

        `ζ = θ⁰ + A⁻¹ΦᵀL(I + S/α)⁻¹(z − LᵀΦθ⁰)`: Matheron's rule where `B` may be singular.
        """
        features, (N, C) = self.problem.model.features, self.curvature_outputs.shape
        variance = (unit_variance(self.problem.prior) / self.precision).to(self.vectors.device)
        samples = (
            draws.prior(features.size)
            .to(self.vectors.device, features.precision)
            .mul_(variance.sqrt().to(features.precision))
        )
        outputs, likelihood, targets = self.curvature_outputs, self._likelihood(), self.problem.model.targets
        prior_outputs = features.outputs(samples).double()
        white = draws.noise(C)(torch.arange(N)).to(prior_outputs)
        difference = white - likelihood.root_transpose(outputs, prior_outputs, targets)
        solved = (difference.flatten(1) @ self.vectors / (self.eigenvalues / self.precision + 1)) @ self.vectors.T
        add_transposed_(samples, features, likelihood.root(outputs, solved.reshape(white.shape), targets), variance)
        return samples

    def leave_one_out(self, num_samples: int = 512, seed: int = 0) -> LeaveOneOut:
        r"""Each datum from the others, to first order: `Σ_i(I − B_iΣ_i)⁻¹`, `h_i + Σ_i(I − B_iΣ_i)⁻¹ ∂ℓ/∂h_i`.

        `Σ_i` is the posterior covariance of its outputs; mean and covariance are of the outputs, without noise. The log
        probability is that of the mean of the likelihood over so many samples.
        """
        problem, (N, C) = self.problem, self.curvature_outputs.shape
        likelihood, outputs, targets = self._likelihood(), self.curvature_outputs, problem.model.targets
        blocks = []
        # Only the blocks on the diagonal are needed: `k(x_i, x_i)` less the part that the data explain, a few rows of
        # `K` at a time, so that no second matrix is held beside the Gram matrix and the eigenvectors.
        for batch in torch.arange(N).split(max(1, _ROWS // C)):
            rows = problem.gram.reshape(N, C, N, C)[batch].reshape(-1, N, C)
            Q = (likelihood.root_transpose(outputs, rows, targets).flatten(1) @ self.vectors).reshape(len(batch), C, -1)
            prior = problem.gram.reshape(N, C, N, C)[batch, :, batch]
            blocks.append((prior - (Q / (self.eigenvalues + self.precision)) @ Q.mT) / self.precision)
        covariance = torch.cat(blocks)
        return leave_one_out(likelihood, targets, self.mode.outputs, outputs, covariance, num_samples, seed)


@dataclass(frozen=True)
class ExactClassification:
    """The Gram matrix of a problem of any likelihood; `posterior` and `fit` do the rest.

    Attributes:
        model: the linear model on the training data.
        prior: its precisions in ratio are those of `A₁`.
        block_bytes: memory for rows of the Jacobian.
    """

    model: LinearModel
    prior: GaussianPrior
    block_bytes: float = BLOCK_BYTES

    @classmethod
    def of(cls, model: LinearModel, prior: GaussianPrior, max_memory: float = MAX_MEMORY) -> "ExactClassification":
        """Checks that the Gram matrix fits in memory; the first method that needs the matrix builds it.

        Args:
            model: the linear model on the training data.
            prior: of its weights.
            max_memory: bytes that four Gram matrices may take.

        Raises:
            ValueError: if it is too large.
        """
        check_gram_size(model.features, max_memory, dual=False)
        return cls(model, prior)

    @cached_property
    def gram(self) -> Float[Tensor, "NC NC"]:
        """`K` at `α = 1`, built when it is first needed."""
        variance = unit_variance(self.prior)
        K = gram(self.model.features, variance, block_bytes=self.block_bytes)
        check_finite(K)
        return K

    def whitened(self, outputs: Float[Tensor, "N C"], keep: bool = True) -> Float[Tensor, "NC NC"]:
        """`S = LᵀKL`, with `L Lᵀ = B` at some outputs; in the memory of `K`, to be built again, if it is not kept."""
        K, (N, C), likelihood = self.gram, outputs.shape, self.model.likelihood
        S = K.clone() if keep else K
        if not keep:
            del vars(self)["gram"]
        # Along rows, then along columns, in blocks: a root of all rows would take the memory of two more matrices.
        for view in (S, S.T):
            for rows in view.split(_ROWS):
                stack = rows.reshape(-1, N, C)
                rows.copy_(likelihood.root_transpose(outputs, stack, self.model.targets).flatten(1))
        return S

    def mode(
        self,
        precision: float,
        start: ExactMode | None = None,
        *,
        tolerance: float = 1e-12,
        max_steps: int = 100,
    ) -> ExactMode:
        """`θ̄` by Newton's method, steps halved until the objective goes down.

        Args:
            precision: `α`.
            start: a mode at another precision.
            tolerance: of the residual.
            max_steps: at most so many.
        """
        # `a` hardly depends on `α` where the data decide, so that a mode at another precision saves Newton steps; its
        # outputs do, and are computed again.
        K, offset = self.gram, self.model.offset.double()
        a = torch.zeros_like(offset) if start is None else start.coefficients
        point = DualPoint(self.model, a, offset + (K @ a.flatten()).reshape(offset.shape) / precision)
        # Relative to zero weights: the slope at the mode itself vanishes where the network fits its labels.
        scale = float(point.initial_slope.norm())
        for _ in range(max_steps):
            if point.residual <= tolerance * scale:
                break
            step = self._newton_step(point, precision)
            lower = point.descended(step, (K @ step.flatten()).reshape(offset.shape) / precision)
            # No length lowers the objective any more: rounding is reached, and `mode_of` judges the residual.
            if lower is None:
                break
            point = lower[0]
        return self.mode_of(precision, point.coefficients, point.outputs, tolerance)

    def _newton_step(self, point: DualPoint, precision: float) -> Float[Tensor, "N C"]:
        """`b − L(I + S/α)⁻¹LᵀK b/α − a`."""
        likelihood, targets, h = self.model.likelihood, self.model.targets, point.outputs
        b = point.newton_target
        # `I + S/α` has no eigenvalue below one and exists for a singular `B`; `K + B⁻¹` does not.
        S = self._shifted(h, precision)
        change = (self.gram @ b.flatten()).reshape(h.shape) / precision
        rhs = likelihood.root_transpose(h, change, targets).reshape(-1, 1)
        return b - likelihood.root(h, solve_(S, rhs).reshape(h.shape), targets) - point.coefficients

    def _shifted(self, outputs: Float[Tensor, "N C"], precision: float) -> Float[Tensor, "NC NC"]:
        """`I + S/α`, in the memory of one matrix."""
        S = self.whitened(outputs)
        S /= precision
        S.diagonal().add_(1)
        return S

    def mode_of(
        self, precision: float, a: Float[Tensor, "N C"], h: Float[Tensor, "N C"], tolerance: float = 1e-12
    ) -> ExactMode:
        """The mode of given coefficients and outputs, with its residual; arguments as of `mode`."""
        point = DualPoint(self.model, a, h)
        loss, norm = (float(v.sum()) for v in (self.model.likelihood.loss(h, self.model.targets), a * point.change))
        residual = point.relative_residual
        # Rounding of K a leaves more than the tolerance where the data determine much.
        converged = residual <= max(tolerance, 1e-8)
        return ExactMode(a, h, loss, norm / precision, residual, converged)

    def posterior(self, precision: float) -> ExactPosterior:
        """The posterior at a prior precision `α`, with the curvature `B` at the network's outputs."""
        outputs = self.model.network_outputs.double()
        return ExactPosterior(self, precision, None, outputs, *self._decomposed(outputs))

    def fit(
        self,
        *,
        precision_bounds: tuple[float, float] = PRECISION_BOUNDS,
        tolerance: float = 1e-10,
    ) -> ExactPosterior:
        r"""The posterior at MacKay's fixed point `α = γ/θ̄ᵀA₁θ̄`, to rounding; the search starts at the prior's `α`.

        There the derivative of the evidence is zero, since `B` is taken at the network's outputs for every `α`.

        Args:
            precision_bounds: within which `α` is kept.
            tolerance: of `log α`.
        """
        check_bounds(precision_bounds)
        outputs = self.model.network_outputs.double()
        # The curvature is the same for every α: one decomposition serves all.
        values, vectors = self._decomposed(outputs)
        # Every mode starts from the one before: the root search moves `α` less and less.
        last: ExactMode | None = None

        def excess(log_precision: float) -> float:
            """`log` of MacKay's update over `α`: where it is positive, `α` is to rise."""
            nonlocal last
            alpha = math.exp(log_precision)
            last = self.mode(alpha, last)
            gamma = _effective_dimension(values, alpha)
            return math.log(max(gamma, 1e-300)) - math.log(max(alpha * last.norm, 1e-300))

        # In `log α`, in which the update is smooth and the tolerance is a relative one.
        bounds = (math.log(precision_bounds[0]), math.log(precision_bounds[1]))
        start = min(max(math.log(overall_precision(self.prior)), bounds[0]), bounds[1])
        root, inside = falling_root(excess, start, bounds, tolerance)
        alpha = math.exp(root) if inside else precision_bounds[bounds.index(root)]
        mode = self.mode(alpha, last)
        ended = is_at_bound(alpha, precision_bounds)
        at_bounds = ("precision",) if ended else ()
        return ExactPosterior(self, alpha, mode, outputs, values, vectors, at_bounds)

    def _decomposed(self, outputs: Float[Tensor, "N C"]) -> tuple[Float[Tensor, " NC"], Float[Tensor, "NC NC"]]:
        return symmetric_eigen(self.whitened(outputs))


def _effective_dimension(eigenvalues: Float[Tensor, " NC"], precision: float) -> float:
    return float((eigenvalues / (eigenvalues + precision)).sum())
