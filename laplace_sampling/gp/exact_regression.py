r"""Regression in observation space, exactly: one eigendecomposition serves every prior and noise precision.

The tangent model `y = o + Φθ + e` is a Gaussian process with mean `o` and kernel `K/α`, `K = Φ A₁⁻¹ Φᵀ`, `A = α A₁`.
With noise `e ~ N(0, R/b)`, `R` diagonal, and `R^{-1/2} K R^{-1/2} = U Λ Uᵀ`, `c = Uᵀ R^{-1/2}(y − o)`, `v = λ/α + 1/b`
(thesis eq. 2.16–2.19; Rasmussen & Williams 2006, ch. 2)

    θ̄ = A⁻¹ Φᵀ R^{-1/2} U (c/v)                cov h(x) = k(x, x) − k(x, X) R^{-1/2} U diag(1/v) Uᵀ R^{-1/2} k(X, x)

and the evidence of `regression_evidence`. Everything is in float64.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.exact_prediction import ExactPrediction
from laplace_sampling.gp.gram import MAX_MEMORY, add_transposed_, check_gram_size, cross_gram, gram, transposed
from laplace_sampling.gp.regression_evidence import Optimum, RegressionEvidence, largest_evidence
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.bounds import NOISE_BOUNDS, PRECISION_BOUNDS
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision, unit_variance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.lapack import symmetric_eigen

__all__ = ["ExactRegression", "noise_scale", "overall_noise", "overall_precisions"]

# Numbers of a block of rows of `U`, 8 MiB: a definition of what is small next to a Gram matrix.
_NUMBERS = 2**20


@dataclass(frozen=True)
class ExactRegression(RegressionEvidence):
    """The eigendecomposition of a regression in observation space; see the equations of the module.

    Outputs without a target have no row in it.

    The arguments `precision` and `noise_precision` of its methods are those of `RegressionEvidence`, `α` and `b`.

    Attributes:
        model: the linear model on the training data.
        prior: its precisions in ratio are those of `A₁`.
        eigenvalues: `λ`, rising, one for each of `n` targets.
        vectors: `U`, `[n, n]`.
        rotated: `c`, `[n]`.
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

    @cached_property
    def observed(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _places(self.model)

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
        root, observed = noise_scale.flatten().sqrt(), _places(model)
        if observed is not None:
            K, root = K[observed][:, observed], root[observed]
        # In place: a quotient by `root ⊗ root` would be one more matrix in memory.
        K /= root
        K /= root[:, None]
        values, vectors = symmetric_eigen(K)
        # The noise is white in these coordinates, so that one decomposition is diagonal for all `α` and `b` together.
        return cls.known(model, prior, values, vectors, noise_scale, block_bytes)

    @classmethod
    def known(
        cls,
        model: LinearModel,
        prior: GaussianPrior,
        eigenvalues: Float[Tensor, " n"],
        vectors: Float[Tensor, "n n"],
        noise_scale: Float[Tensor, "N C"],
        block_bytes: float = BLOCK_BYTES,
    ) -> "ExactRegression":
        """From a decomposition."""
        residual, observed = (model.residuals(model.offset) / noise_scale.sqrt()).flatten(), _places(model)
        residual = residual if observed is None else residual[observed]
        return cls(model, prior, eigenvalues, vectors, vectors.T @ residual, noise_scale, block_bytes)

    def coefficients(self, precision: float, noise_precision: float) -> Float[Tensor, "N C"]:
        """`(K/α + R/b)⁻¹ (y − o)`, zero where there is no target."""
        _, _, v = self._terms(precision, noise_precision)
        return self._of_outputs(self.vectors @ (self.rotated / v)) / self.noise_scale.sqrt()

    def mode(self, precision: float, noise_precision: float) -> Float[Tensor, " P"]:
        """`θ̄ = A⁻¹Φᵀ (K/α + R/b)⁻¹ (y − o)`, unscaled: the mode of the linear model."""
        return self._to_weights(self.coefficients(precision, noise_precision)[None], precision)[0]

    def mode_outputs(self, precision: float, noise_precision: float) -> Float[Tensor, "N C"]:
        """`h(θ̄, x_i) = y − (R/b) (K/α + R/b)⁻¹ (y − o)`, without a pass over the data where all have targets."""
        # From the residual of the targets: `o + K(…)` would need `K`, which the decomposition has overwritten.
        targets = self.model.targets.reshape(self.noise_scale.shape).double()
        outputs = targets - self.noise_scale / noise_precision * self.coefficients(precision, noise_precision)
        if self.observed is None:
            return outputs
        features = self.model.features
        predicted = features.outputs(self.mode(precision, noise_precision)[None].to(features.dtype))[0]
        return outputs.where(~targets.isnan(), (self.model.offset + predicted).double())

    def free_data(self, precision: float, noise_precision: float) -> Float[Tensor, " C"]:
        """`N − γ_c` for each output `c`, with `γ_c` its part of the effective dimension: the diagonal of `(R/b) P`."""
        _, noise, v = self._terms(precision, noise_precision)
        weights = noise / v
        # A block of rows at a time: the squares of all are one more matrix in memory.
        rows = self.vectors.split(max(1, _NUMBERS // self.size))
        diagonal = torch.cat([part**2 @ weights for part in rows])
        return self._of_outputs(diagonal).sum(0)

    def _to_weights(self, u: Float[Tensor, "K N C"], precision: float) -> Float[Tensor, "K P"]:
        """`A⁻¹Φᵀu`."""
        return transposed(self.model.features, u) * unit_variance(self.prior) / precision

    def sample(self, draws: Draws, precision: float, noise_precision: float) -> Float[Tensor, "K P"]:
        r"""Zero-mean posterior samples `ζ ~ N(0, H⁻¹)`, unscaled: those of `sample_posterior` with the same draws.

        `ζ = θ⁰ − A⁻¹Φᵀ(K/α + R/b)⁻¹(ε + Φθ⁰)` (Matheron's rule; thesis §7.3.3) with `ε = −(R/b)^{1/2} z`.
        """
        features, (N, C) = self.model.features, self.noise_scale.shape
        _, _, v = self._terms(precision, noise_precision)
        variance = (unit_variance(self.prior) / precision).to(self.vectors.device)
        samples = (
            draws.prior(features.size)
            .to(self.vectors.device, features.precision)
            .mul_(variance.sqrt().to(features.precision))
        )
        white = draws.noise(C)(torch.arange(N)).to(self.vectors) / noise_precision**0.5
        root = self.noise_scale.sqrt()
        # Prior samples go through the features: a root of `K` would give the outputs only, not the weights.
        outputs = features.outputs(samples).double() / root
        solved = (self._of_targets(white - outputs) @ self.vectors / v) @ self.vectors.T
        add_transposed_(samples, features, self._of_outputs(solved) / root, variance)
        return samples

    def leave_one_out(self, precision: float, noise_precision: float) -> LeaveOneOut:
        r"""Each datum from the others: mean `y − P_ii⁻¹ a_i`, covariance `P_ii⁻¹`.

        With `P = (K/α + R/b)⁻¹` and `a = P(y − o)`, by blocks of the outputs of a datum (Rasmussen & Williams 2006,
        eq. 5.10–5.12).
        """
        if self.observed is not None:
            return self._leave_some_out(precision, noise_precision)
        _, _, v = self._terms(precision, noise_precision)
        (N, C), root = self.noise_scale.shape, self.noise_scale.sqrt()
        rows, covariances = self.vectors.reshape(N, C, -1), []
        # `P_ii` from the rows of `U` of datum `i` alone: N inverses of size C in place of N fits.
        for batch in torch.arange(N).split(max(1, _NUMBERS // (C * self.size))):
            part = rows[batch] / root[batch][..., None]
            covariances.append(torch.linalg.inv((part / v) @ part.mT))
        covariance = torch.cat(covariances)
        # A normal distribution is refused where the two triangles differ by rounding.
        covariance = (covariance + covariance.mT) / 2
        residual = (covariance @ self.coefficients(precision, noise_precision)[..., None])[..., 0]
        mean = self.model.targets.reshape(N, C).double() - residual
        return LeaveOneOut.gaussian(mean, covariance, mean + residual)

    def _leave_some_out(self, precision: float, noise_precision: float) -> LeaveOneOut:
        """Outputs without a target are predicted here by the covariance of all outputs."""
        noise, targets = self.noise_scale / noise_precision, self.model.targets.reshape(self.noise_scale.shape).double()
        given, eye = ~targets.isnan(), torch.eye(noise.shape[1]).to(noise)
        S = self.at(self.model.features).covariance(precision, noise_precision)
        outputs = self.mode_outputs(precision, noise_precision)
        B = torch.diag_embed((1 / noise).where(given, 0))
        # What is left without a datum, `S (I − BS)⁻¹`.
        left_out = S @ torch.linalg.inv_ex(eye - B @ S).inverse
        slope = (B @ (outputs - targets).nan_to_num()[..., None])[..., 0]
        mean = outputs + (left_out @ slope[..., None])[..., 0]
        # Of targets `P_ii⁻¹`, which stays positive where rounding leaves nothing of this difference.
        _, _, v = self._terms(precision, noise_precision)
        rows = self._of_outputs(self.vectors.T) / self.noise_scale.sqrt()
        P = torch.einsum("jnc,j,jnd->ncd", rows, 1 / v, rows)
        inverse = torch.linalg.inv(P + torch.diag_embed((~given).double()))
        residual = (inverse @ self.coefficients(precision, noise_precision)[..., None])[..., 0]
        covariance = inverse.where(given[:, :, None] & given[:, None], left_out + torch.diag_embed(noise))
        covariance, mean = (covariance + covariance.mT) / 2, (targets - residual).where(given, mean)
        return LeaveOneOut.gaussian(mean, covariance, targets)

    def at(self, features: Features, *, products: str = "auto") -> ExactPrediction:
        """The posterior at other inputs, of as many outputs or of others (`features_at` makes features of inputs)."""
        variance = unit_variance(self.prior)
        K = cross_gram(features, self.model.features, variance, products=products, block_bytes=self.block_bytes)
        # Columns belong to training data, whose noise was made white; rows belong to the new inputs and stay.
        if self.observed is not None:
            K = K[:, self.observed]
        K /= self._of_targets(self.noise_scale).sqrt()
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
        `ρ` alone. A grid brackets its maxima, roots of the derivative; the largest is taken.

        Args:
            learn_precision: whether `α` is learnt.
            learn_noise: whether `b` is learnt; by default what the likelihood says.
            precision_bounds: within which `α` is kept.
            noise_bounds: within which `b` is kept.
        """
        likelihood = self.model.likelihood
        assert isinstance(likelihood, Gaussian)
        learn = (learn_precision, likelihood.learn if learn_noise is None else learn_noise)
        start = overall_precisions(self.model, self.prior)
        return largest_evidence(self, start, learn, precision_bounds, noise_bounds)


def _places(model: LinearModel) -> Tensor | None:
    """Places of the targets among the `N·C` outputs; `None` where each output has one."""
    observed = model.observed()
    return None if bool(observed.all()) else observed.flatten().nonzero()[:, 0]


def overall_precisions(model: LinearModel, prior: GaussianPrior) -> tuple[float, float]:
    """`α` and `b` of a prior and of the Gaussian likelihood of a model, geometric means where there are several."""
    assert isinstance(model.likelihood, Gaussian)
    return overall_precision(prior), overall_noise(model.likelihood)


def noise_scale(model: LinearModel, variances: Tensor | None) -> Float[Tensor, "N C"]:
    """`R`: the variances that are given, times the ratios of those of the likelihood, one per output."""
    if not isinstance(model.likelihood, Gaussian):
        raise TypeError(
            f"Exact regression needs a Gaussian likelihood, but the model has a {type(model.likelihood).__name__}; "
            "use `ExactClassification`."
        )
    shape = model.offset.shape
    # Ratios only: the common factor is `b`, which all methods take beside `R`; it would count twice.
    precision = model.likelihood.precision(model.offset).double()
    R = (overall_noise(model.likelihood) / precision).expand(shape)
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


def overall_noise(likelihood: Gaussian) -> float:
    """`b`, the geometric mean over the outputs of a likelihood's noise precisions."""
    noise = torch.as_tensor(likelihood.noise_precision)
    return float(noise) if noise.dim() == 0 else float(noise.log().mean().exp())
