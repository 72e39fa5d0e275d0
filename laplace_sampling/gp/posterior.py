"""The posterior in observation space, from one eigendecomposition of the whitened Gram matrix.

With `K = Φ A₁⁻¹ Φᵀ`, `A = α A₁`, the curvature `b B`, `B = L Lᵀ`, at the network's outputs (`b` is the noise precision
of a regression, one for other likelihoods), `S = LᵀKL = U Λ Uᵀ`, and weights `θ = A⁻¹Φᵀa` (Rasmussen & Williams 2006,
ch. 2 and 3; thesis eq. 2.16 to 2.19). `B` may be singular, as it is for the softmax and for outputs without a target.

    mode        a = −∂ℓ/∂h at h = o + K a/α, for a regression a = L U (Λ/α + 1/b)⁻¹ Uᵀ Lᵀ(y − o)
    γ           Tr Λ (Λ + α/b)⁻¹
    covariance  (k(x, x) − Q (Λ + α/b)⁻¹ Qᵀ)/α,   Q = k(x, X) L U,   of φ(x)θ, with k at α = 1
    samples     θ⁰ + A⁻¹Φᵀ L U (Λ/α + 1/b)⁻¹ Uᵀ (z/√b − LᵀΦθ⁰)

A regression is quadratic: its mode is one step of Newton's method. All numbers are in float64.

`gram` computes `K = Φ A⁻¹ Φᵀ`, `[N·C, N·C]`, in blocks of rows. Row `(i, c)` is output `c` of datum `i`; the outputs of
a datum are adjacent. The Jacobian is never held in full: a block of its rows is multiplied with the others, which are
computed again for every block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.evidence import HyperparameterBounds, Optimum, RegressionEvidence
from laplace_sampling.hyperparameters.covariance_path import CovariancePath
from laplace_sampling.hyperparameters.curves import ModeCurve, interpolated, modes_along
from laplace_sampling.hyperparameters.em import DampedSteps
from laplace_sampling.hyperparameters.hyperparameters import Bounds, is_at_bound, mackay_root
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features, row_blocks
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision, unit_variance
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut, leave_one_out
from laplace_sampling.solvers.lapack import solve_, symmetric_eigen
from laplace_sampling.solvers.newton import halve_until_accepted
from laplace_sampling.solvers.recorded import recorded


@recorded
def gram(
    features: Features, variance: Float[Tensor, " P"], *, block_bytes: float = BLOCK_BYTES
) -> Float[Tensor, "NC NC"]:
    r"""`K = Φ diag(v) Φᵀ`, symmetric to the last bit.

    Args:
        features: `Φ`.
        variance: `v`, the prior variance of each weight, in the units of the weights squared.
        block_bytes: memory for rows of the Jacobian: half of it for the block that is held, half for the others.
    """
    n = features.num_data * features.num_outputs
    K = torch.empty(n, n, dtype=torch.float64, device=features.device)
    for held, rows in _scaled_rows(features, variance, block_bytes):
        K[held, held] = rows @ rows.T
        for columns, others in _scaled_rows(features, variance, block_bytes, held.stop // features.num_outputs):
            if columns.stop <= held.stop:  # of the same datum, and there already
                continue
            block = rows @ others.T
            K[held, columns], K[columns, held] = block, block.T
            del block
        # A product and its transpose differ in the last bit; in place, as a block may be the whole matrix.
        corner = K[held, held]
        corner.add_(corner.T.clone()).div_(2)
    return K


def _scaled_rows(
    features: Features, variance: Float[Tensor, " P"], block_bytes: float, start: int = 0
) -> Iterator[tuple[slice, Float[Tensor, "m P"]]]:
    """Rows of `Φ diag(v)^{1/2}` from a datum on, in blocks of half of the memory, and which rows they are."""
    root = variance.double().sqrt()
    for first, rows in row_blocks(features, block_bytes / 2, start):
        yield slice(first, first + len(rows)), rows * root  # a copy: dense features give their own matrix


@dataclass(frozen=True)
class KernelMatrix:
    """`K` at `α = 1`, built when it is first needed.

    Args:
        features: `Φ`.
        variance: `v`, the diagonal of `A₁⁻¹`.
    """

    features: Features
    variance: Float[Tensor, " P"]

    @cached_property
    def matrix(self) -> Float[Tensor, "NC NC"]:
        return gram(self.features, self.variance)


def cross_gram(
    left: Features, right: Features, variance: Float[Tensor, " P"], *, block_bytes: float = BLOCK_BYTES
) -> Float[Tensor, "MC NC"]:
    r"""`Φ_left diag(v) Φ_rightᵀ`; the arguments are those of `gram`."""
    sizes = [f.num_data * f.num_outputs for f in (left, right)]
    K = torch.empty(*sizes, dtype=torch.float64, device=left.device)
    for held, rows in _scaled_rows(left, variance, block_bytes):
        for columns, others in _scaled_rows(right, variance, block_bytes):
            K[held, columns] = rows @ others.T
    return K


def gram_blocks(
    features: Features, variance: Float[Tensor, " P"], *, block_bytes: float = BLOCK_BYTES
) -> Float[Tensor, "N C C"]:
    """The blocks `φ_i diag(v) φ_iᵀ` on the diagonal, one a datum."""
    num_outputs = features.num_outputs
    limit = max(1, int(block_bytes / (8 * features.size * num_outputs)))
    root = variance.double().sqrt()
    batches = torch.arange(features.num_data).split(min(limit, features.batch_size))
    scaled = (features.rows(batch).double() * root for batch in batches)
    return torch.cat([rows @ rows.mT for rows in scaled])


@recorded
def transposed(features: Features, u: Float[Tensor, "K N C"]) -> Float[Tensor, "K P"]:
    """`Φᵀu`, in float64."""
    total = torch.zeros(len(u), features.size, dtype=torch.float64, device=features.device)
    with features.summing(total):
        for batch in features.own_chunks():
            total += features.vjp(u[:, batch].to(features.dtype), batch)
    return total


def size_of(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB where it is small."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 0.1 * 2**30 else f"{num_bytes / 2**20:.3g} MiB"


# Rows of a matrix that a root of the curvature is applied to at once: little memory next to the matrix.
_ROWS = 64


# Rounds of the noise precisions of several outputs, and the change of their logarithms at which they end.
_MAX_ROUNDS, _TOLERANCE = 100, 1e-6


@dataclass(frozen=True)
class GramMode:
    """The mode of the linear model, `θ̄ = A⁻¹Φᵀa`.

    Attributes:
        coefficients: `a`, `[N, C]`.
        outputs: `h(θ̄, x_i)`, `[N, C]`.
        norm: `θ̄ᵀA₁θ̄`.
        residual: `‖a + ∂ℓ/∂h‖` relative to that at `θ = 0`.
        converged: whether it is below the tolerance.
    """

    coefficients: Float[Tensor, "N C"]
    outputs: Float[Tensor, "N C"]
    norm: float
    residual: float = 0.0
    converged: bool = True


@dataclass(frozen=True)
class GramPosterior:
    """The posterior at the hyperparameters of a model and a prior; the decomposition serves all `α` and `b`.

    Attributes:
        model: the linear model on the training data.
        prior: of its weights; the precisions of its groups go up and down together.
        eigenvalues: `Λ`, rising, `[N·C]`.
        vectors: `U`, `[N·C, N·C]`.
        kernel: `K`, which the mode of a likelihood that is not Gaussian needs.
        known_mode: the mode, if it was found before.
    """

    model: LinearModel
    prior: GaussianPrior
    eigenvalues: Float[Tensor, " NC"]
    vectors: Float[Tensor, "NC NC"]
    kernel: KernelMatrix
    known_mode: GramMode | None = None

    @classmethod
    def of(cls, model: LinearModel, prior: GaussianPrior) -> "GramPosterior":
        """Build the Gram matrix and decompose it.

        Raises:
            FloatingPointError: if it is not finite.
        """
        kernel = KernelMatrix(model.features, unit_variance(prior))
        # Newton's method needs `K` again; a regression decomposes it in place.
        K = gram(model.features, kernel.variance) if isinstance(model.likelihood, Gaussian) else kernel.matrix.clone()
        return cls.of_gram(K, model, prior, kernel)

    @classmethod
    def of_gram(
        cls, K: Float[Tensor, "NC NC"], model: LinearModel, prior: GaussianPrior, kernel: KernelMatrix
    ) -> "GramPosterior":
        """The posterior of a Gram matrix, which is overwritten."""
        outputs = model.network_outputs.double()
        return cls(model, prior, *symmetric_eigen(_whiten_(K, _unit(model.likelihood), outputs, model.targets)), kernel)

    @classmethod
    def restore(cls, model: LinearModel, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "GramPosterior":
        """The posterior of `tensors`."""
        kernel = KernelMatrix(model.features, unit_variance(prior))
        posterior = cls(model, prior, tensors["eigenvalues"], tensors["vectors"], kernel)
        if "coefficients" not in tensors:
            return posterior
        return replace(posterior, known_mode=posterior._judged(tensors["coefficients"], tensors["mode_outputs"]))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that `restore` needs."""
        kept = {"eigenvalues": self.eigenvalues, "vectors": self.vectors}
        if self.known_mode is None:
            return kept
        return kept | {"coefficients": self.known_mode.coefficients, "mode_outputs": self.known_mode.outputs}

    def at(self, model: LinearModel, prior: GaussianPrior) -> "GramPosterior":
        """The posterior at other hyperparameters. If the ratios of noises change, the decomposition is a new one."""
        old, new = (_unit(m.likelihood).noise_precisions() for m in (self.model, model))
        if old is not None and new is not None and not torch.allclose(old, new, rtol=1e-12):
            return GramPosterior.of(model, prior)
        return replace(self, model=model, prior=prior, known_mode=None)

    @property
    def precisions(self) -> tuple[float, float]:
        """`α` and `b`."""
        return overall_precision(self.prior), _overall_noise(self.model.likelihood)

    @property
    def _shift(self) -> float:
        """`α/b`."""
        alpha, b = self.precisions
        return alpha / b

    @property
    def variance(self) -> Float[Tensor, " P"]:
        """The diagonal of `A₁⁻¹`."""
        return unit_variance(self.prior)

    def root_transpose(self, rows: Float[Tensor, "K N C"]) -> Float[Tensor, "K NC"]:
        """`Lᵀv`."""
        outputs = self.model.network_outputs.double()
        return _unit(self.model.likelihood).root_transpose(outputs, rows, self.model.targets).flatten(1)

    def _root(self, rows: Float[Tensor, "K NC"]) -> Float[Tensor, "K N C"]:
        """`Lu`."""
        outputs = self.model.network_outputs.double()
        return _unit(self.model.likelihood).root(outputs, rows.reshape(-1, *outputs.shape), self.model.targets)

    def effective_dimension(self, alpha: float | None = None) -> float:
        """`γ = Tr(H⁻¹M)`, at `α` or at that of the posterior."""
        shift = self._shift if alpha is None else alpha / self.precisions[1]
        return float((self.eigenvalues / (self.eigenvalues + shift)).sum())

    @cached_property
    def evidence(self) -> RegressionEvidence:
        """The evidence of a regression, for all `α` and `b`."""
        model, likelihood = self.model, self.model.likelihood
        assert isinstance(likelihood, Gaussian)
        rotated = self.vectors.T @ self.root_transpose(model.residuals(model.offset)[None])[0]
        # `log|R|`, with `R⁻¹ = B`.
        logs = _unit(likelihood).noise_precisions().log().expand(model.features.num_outputs)
        log_noise = -float(model.num_targets().cpu().double() @ logs)
        return RegressionEvidence(self.eigenvalues, rotated, model.num_observations, log_noise)

    @cached_property
    def mode(self) -> GramMode:
        """The mode of the linear model, found when it is first needed."""
        if self.known_mode is not None:
            return self.known_mode
        likelihood = self.model.likelihood
        return self._mode_of_regression(likelihood) if isinstance(likelihood, Gaussian) else self._mode_by_newton()

    def _mode_of_regression(self, likelihood: Gaussian) -> GramMode:
        model, (alpha, b) = self.model, self.precisions
        v = self.eigenvalues / alpha + 1 / b
        coefficients = self._root((self.vectors @ (self.evidence.rotated / v))[None])[0]
        # `h = y − (bB)⁻¹a`, from the residual of the targets: `o + K a/α` would need `K`, which is overwritten.
        targets, observed = model.targets.reshape(coefficients.shape).double(), model.observed()
        outputs = targets - coefficients / likelihood.precision(targets)
        if not bool(observed.all()):
            weights = self._to_weights(coefficients[None])
            predicted = model.features.outputs(weights.to(model.features.dtype))[0]
            outputs = outputs.where(observed, (model.offset + predicted).double())
        return GramMode(coefficients, outputs, float(self.evidence.mode_norm(alpha, b)))

    def _mode_by_newton(
        self, start: GramMode | None = None, tolerance: float = 1e-12, max_steps: int = 100
    ) -> GramMode:
        """Newton's method from the mode at another `α`, with steps halved until the objective goes down."""
        # `a` hardly depends on `α` where the data decide, so that a mode at another precision saves Newton steps; its
        # outputs do, and are computed again.
        offset = self.model.offset.double()
        a = torch.zeros_like(offset) if start is None else start.coefficients
        mode = self._judged(a, offset + self._kernel_product(a))
        for _ in range(max_steps):
            if mode.residual <= tolerance or (lower := self._descended(mode, self._newton_step(mode))) is None:
                break
            mode = lower
        return mode

    def _kernel_product(self, a: Float[Tensor, "N C"]) -> Float[Tensor, "N C"]:
        """`K a/α`."""
        return (self.kernel.matrix @ a.flatten()).reshape(a.shape) / self.precisions[0]

    def _objective(self, mode: GramMode) -> float:
        """`Σ_i ℓ(y_i, h_i) + ½ θᵀAθ`."""
        return self.model.total_loss(mode.outputs) + 0.5 * self.precisions[0] * mode.norm

    def _descended(self, mode: GramMode, step: Float[Tensor, "N C"]) -> GramMode | None:
        """The point after a step of the coefficients; `None` where rounding lets no length lower the objective."""
        change, value = self._kernel_product(step), self._objective(mode)

        def attempt(length: float) -> GramMode | None:
            point = self._judged(mode.coefficients + length * step, mode.outputs + length * change)
            # At the mode values differ by rounding only.
            return point if self._objective(point) <= value + 1e-13 * abs(value) else None

        return halve_until_accepted(attempt)

    def _judged(self, coefficients: Float[Tensor, "N C"], outputs: Float[Tensor, "N C"]) -> GramMode:
        """The mode that some coefficients and their outputs are, with its residual relative to that of zero weights."""
        likelihood, targets, offset = self.model.likelihood, self.model.targets, self.model.offset.double()
        # Not relative to the slope at the mode, which vanishes where the network fits its labels.
        scale = max(float(likelihood.gradient(offset, targets).norm()), 1e-300)
        residual = float((coefficients + likelihood.gradient(outputs, targets)).norm()) / scale
        norm = float((coefficients * (outputs - offset)).sum()) / self.precisions[0]
        # Rounding of K a leaves more than the tolerance of Newton's method where the data determine much.
        return GramMode(coefficients, outputs, norm, residual, residual <= 1e-8)

    def _newton_step(self, at: GramMode) -> Float[Tensor, "N C"]:
        """`c − L(I + S/α)⁻¹LᵀK c/α − a`, with `B` and `c = B(h − o) − ∂ℓ/∂h` at a point."""
        likelihood, targets, h, alpha = self.model.likelihood, self.model.targets, at.outputs, self.precisions[0]
        # `I + S/α` has no eigenvalue below one and exists for a singular `B`; `K + B⁻¹` does not.
        S = _whiten_(self.kernel.matrix.clone(), likelihood, h, targets)
        S /= alpha
        S.diagonal().add_(1)
        c = likelihood.curvature(h, h - self.model.offset.double(), targets) - likelihood.gradient(h, targets)
        rhs = likelihood.root_transpose(h, self._kernel_product(c), targets).reshape(-1, 1)
        return c - likelihood.root(h, solve_(S, rhs).reshape(h.shape), targets) - at.coefficients

    def mode_weights(self) -> Float[Tensor, " P"]:
        """`θ̄`, unscaled, by one pass of VJPs."""
        return self._to_weights(self.mode.coefficients[None])[0]

    def _to_weights(self, u: Float[Tensor, "K N C"]) -> Float[Tensor, "K P"]:
        """`A⁻¹Φᵀu`."""
        return transposed(self.model.features, u) * self.variance / self.precisions[0]

    @property
    def log_evidence(self) -> float:
        """`log p(y)`, a sum over the data; Laplace's approximation where the likelihood is not Gaussian."""
        # `log1p`: most eigenvalues are tiny against `α`, and `log(1 + x)` would lose their digits.
        logdet = float((self.eigenvalues / self._shift).log1p().sum())
        return -self._objective(self.mode) - 0.5 * logdet

    def sample(self, draws: Draws) -> Float[Tensor, "K P"]:
        """Zero-mean posterior samples by Matheron's rule, unscaled: those of `sample_posterior` with the same draws."""
        features, (alpha, b) = self.model.features, self.precisions
        variance = (self.variance / alpha).to(self.vectors.device)
        samples = draws.prior(features.size).to(self.vectors.device, features.dtype)
        samples.mul_(variance.sqrt().to(features.dtype))
        white = draws.noise(features.num_outputs)(torch.arange(features.num_data)).to(self.vectors) / b**0.5
        return samples.add_(self._correction(samples, white.flatten(1)))

    def inverse(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        """`H⁻¹ v` of rows, unscaled: the correction of `A⁻¹v` without noise."""
        v = v.to(self.vectors) * self.variance / self.precisions[0]
        return v + self._correction(v)

    def _correction(
        self, weights: Float[Tensor, "K P"], white: Float[Tensor, "K NC"] | float = 0.0
    ) -> Float[Tensor, "K P"]:
        """`A⁻¹Φᵀ L U (Λ/α + 1/b)⁻¹ Uᵀ (z/√b − LᵀΦθ)`."""
        features, (alpha, b) = self.model.features, self.precisions
        # Weights go through the features: a root of `K` would give the outputs only, not the weights.
        difference = white - self.root_transpose(features.outputs(weights.to(features.dtype)).double())
        solved = (difference @ self.vectors / (self.eigenvalues / alpha + 1 / b)) @ self.vectors.T
        return self._to_weights(self._root(solved))

    def leave_one_out(self) -> LeaveOneOut:
        r"""Each datum predicted from the others, see `predictions.leave_one_out`.

        A regression has covariance `P_ii⁻¹` and mean `y − P_ii⁻¹a_i` with `P = L U (Λ/α + 1/b)⁻¹ Uᵀ Lᵀ`, by blocks of
        the outputs of a datum (Rasmussen & Williams 2006, eq. 5.10 to 5.12).
        """
        model, likelihood = self.model, self.model.likelihood
        if not isinstance(likelihood, Gaussian) or not bool(model.observed().all()):
            outputs = model.network_outputs.double()
            return leave_one_out(likelihood, model.targets, self.mode.outputs, outputs, self._own_covariances())
        (N, C), shift, inverses = model.offset.shape, self._shift, []
        # `(I + bS/α)⁻¹` from the rows of `U` of a datum alone: N inverses of size C in place of N fits.
        for rows in self.vectors.reshape(N, C, -1).split(max(1, _ROWS // C)):
            inverses.append(torch.linalg.inv((rows * (shift / (self.eigenvalues + shift))) @ rows.mT))
        root, inverse = likelihood.precision(self.vectors).expand(C).rsqrt(), torch.cat(inverses)
        # A normal distribution is refused where the two triangles differ by rounding.
        covariance = (inverse + inverse.mT) / 2 * root * root[:, None]
        targets = model.targets.reshape(N, C).double()
        mean = targets - (covariance @ self.mode.coefficients[..., None])[..., 0]
        return LeaveOneOut.gaussian(mean, covariance, targets)

    def _own_covariances(self) -> Float[Tensor, "N C C"]:
        """The covariance of the outputs of each training datum, from a few rows of `K` at a time."""
        (N, C), alpha, blocks = self.model.offset.shape, self.precisions[0], []
        K = self.kernel.matrix.reshape(N, C, N, C)
        for batch in torch.arange(N).split(max(1, _ROWS // C)):
            Q = (self.root_transpose(K[batch].reshape(-1, N, C)) @ self.vectors).reshape(len(batch), C, -1)
            blocks.append((K[batch, :, batch] - (Q / (self.eigenvalues + self._shift)) @ Q.mT) / alpha)
        return torch.cat(blocks)

    def mode_curve(self, alphas: Float[Tensor, " k"]) -> ModeCurve:
        """Objective and norm of the mode along `α`, from the modes at some rising precisions."""
        if isinstance(self.model.likelihood, Gaussian):
            b = self.precisions[1]
            return interpolated(
                alphas, self.evidence.objective(alphas, b).cpu(), self.evidence.mode_norm(alphas, b).cpu()
            )

        def find(alpha: float, start: GramMode) -> tuple[GramMode, float, float]:
            there = replace(self, prior=_with_overall(self.prior, alpha))
            mode = there._mode_by_newton(start)
            return mode, there._objective(mode), mode.norm

        return modes_along(alphas, self.mode, find)


@dataclass(frozen=True)
class GramCovariance(FunctionCovariance):
    """The covariance of `φ(x)θ`, made when it is asked for: an input costs `C` VJPs and a product with `U`.

    Args:
        posterior: of the weights.
        features: `φ(x)`, of as many outputs as the training data or of others.
    """

    posterior: GramPosterior
    features: Features

    def inverse(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        return self.posterior.inverse(v)

    @cached_property
    def _rotated(self) -> Float[Tensor, "MC NC"]:
        """`Q`."""
        posterior = self.posterior
        shape = posterior.model.offset.shape
        K = cross_gram(self.features, posterior.model.features, posterior.variance)
        # In blocks and in the memory of `k`.
        for rows in K.split(_ROWS):
            rows.copy_(posterior.root_transpose(rows.reshape(-1, *shape)))
        return K @ posterior.vectors

    @cached_property
    def _blocks(self) -> Float[Tensor, "M C C"]:
        return gram_blocks(self.features, self.posterior.variance)

    def _reduction(self, alpha: float) -> Float[Tensor, " NC"]:
        return 1 / (self.posterior.eigenvalues + alpha / self.posterior.precisions[1])

    def variance(self) -> Float[Tensor, "M C"]:
        alpha = self.posterior.precisions[0]
        if "_blocks" in vars(self):
            prior = self._blocks.diagonal(dim1=1, dim2=2)
        else:  # blocks of many outputs would not fit in memory
            parts = [rows**2 @ self.posterior.variance for _, rows in row_blocks(self.features, BLOCK_BYTES)]
            prior = torch.cat(parts).reshape(-1, self.features.num_outputs)
        reduction = (self._rotated**2 @ self._reduction(alpha)).reshape(prior.shape)
        # The difference of two nearly equal numbers can be below zero by rounding.
        return ((prior - reduction) / alpha).clamp_min(0)

    def blocks(self, alpha: float | None = None) -> Float[Tensor, "M C C"]:
        alpha = self.posterior.precisions[0] if alpha is None else alpha
        Q = self._rotated.unflatten(0, (-1, self.features.num_outputs))
        blocks = (self._blocks - (Q * self._reduction(alpha)) @ Q.mT) / alpha
        blocks.diagonal(dim1=1, dim2=2).clamp_(min=0)
        return blocks

    def joint(self) -> Float[Tensor, "MC MC"]:
        alpha, Q = self.posterior.precisions[0], self._rotated
        return (gram(self.features, self.posterior.variance) - (Q * self._reduction(alpha)) @ Q.T) / alpha


@dataclass(frozen=True)
class GramPath(CovariancePath):
    """The posterior covariance for every `α`; that of the posterior does not matter."""

    posterior: GramPosterior

    @property
    def prior(self) -> GaussianPrior:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.posterior.prior

    @property
    def largest_eigenvalue(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.posterior.precisions[1] * float(self.posterior.eigenvalues[-1])

    @property
    def passes(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.posterior.model.features.num_outputs / 2

    @property
    def work(self) -> GramPosterior:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.posterior

    @recorded
    def covariances(self, features: Features, alphas: Float[Tensor, " A"]) -> Float[Tensor, "A N C C"]:
        covariance = GramCovariance(self.posterior, features.in_float64())
        return torch.stack([covariance.blocks(alpha) for alpha in alphas.tolist()])

    def effective_dimension(self, alpha: float) -> float:
        return self.posterior.effective_dimension(alpha)


def of_largest_evidence(
    model: LinearModel, prior: GaussianPrior, bounds: HyperparameterBounds
) -> tuple[GramPosterior, Optimum]:
    r"""The posterior at the hyperparameters of largest evidence, and how they were found.

    A noise that is learnt is `b = (n − γ)/Σ(y − f)²`, with `α` of largest evidence at that `b`. The likelihood says
    whether it is one number or one for each output. For a likelihood that is not Gaussian `α` is MacKay's fixed point
    `γ/θ̄ᵀA₁θ̄`, where the derivative of the evidence is zero.

    Args:
        model: the linear model on the training data.
        prior: starting point; its scale, and the ratios of its precisions, stay.
        bounds: bounds of the precisions.
    """
    likelihood = model.likelihood
    if not isinstance(likelihood, Gaussian):
        return _at_fixed_point(GramPosterior.of(model, prior), bounds.precision)
    if likelihood.learn and likelihood.noise_precisions().dim():
        posterior, optimum = _with_noise_of_each_output(model, prior, bounds)
    else:
        posterior = GramPosterior.of(model, prior)
        optimum = _largest_evidence(posterior, likelihood, bounds)
    if likelihood.learn:
        found = posterior.model.likelihood.noise_precisions()
        assert found is not None
        noise = found * (optimum.noise_precision / posterior.precisions[1])
        model = model.with_likelihood(likelihood.with_precision(noise))
    return replace(posterior, model=model, prior=_with_overall(prior, optimum.precision)), optimum


def _largest_evidence(posterior: GramPosterior, likelihood: Gaussian, bounds: HyperparameterBounds) -> Optimum:
    model = posterior.model
    squares = float(posterior.root_transpose(model.residuals(model.network_outputs)[None]).square().sum())
    return posterior.evidence.largest(posterior.precisions, (True, likelihood.learns_noise), bounds, squares)


def _with_noise_of_each_output(
    model: LinearModel, prior: GaussianPrior, bounds: HyperparameterBounds
) -> tuple[GramPosterior, Optimum]:
    r"""A noise precision for each output, at the fixed point of `b_c ← (N − γ_c)/Σ_i e_ic²` (MacKay 1992, per output).

    `e` is the error of the network. A decomposition serves every `α` and every common factor of the
    noise precisions, but one ratio of them only: each round makes a new one, whose `α` and factor are of largest
    evidence.
    """
    likelihood = model.likelihood
    assert isinstance(likelihood, Gaussian)
    kernel = KernelMatrix(model.features, unit_variance(prior))
    K, posterior, steps = gram(model.features, kernel.variance), None, DampedSteps()
    low, high = (math.log(bound) for bound in bounds.noise)
    logs = torch.zeros(model.features.num_outputs, dtype=torch.float64)
    rounds, common = 0, True
    while True:
        del posterior  # its memory is needed
        given = likelihood.with_precision(logs.exp())
        posterior = GramPosterior.of_gram(K.clone(), model.with_likelihood(given), prior, kernel)
        optimum = _largest_evidence(posterior, replace(given, learn=common), bounds)
        logs = logs - logs.mean() + math.log(optimum.noise_precision)
        posterior = replace(
            posterior,
            model=model.with_likelihood(likelihood.with_precision(logs.exp())),
            prior=_with_overall(prior, optimum.precision),
        )
        updated = _updated_noise(posterior)
        at_bound = any(is_at_bound(b, bounds.noise) for b in updated.exp().tolist())
        # Where an output is at its bound, the evidence is not flat in the common factor either: α alone is maximised.
        common &= not at_bound
        change = updated.clamp(low, high) - logs
        settled, rounds = float(change.abs().max()) < _TOLERANCE, rounds + 1
        if settled or rounds == _MAX_ROUNDS:
            break
        logs = (logs + steps.step(change)).clamp(low, high)
    at_bounds = tuple(n for n in optimum.at_bounds if n == "precision") + ("noise_precision",) * at_bound
    return posterior, replace(optimum, at_bounds=at_bounds, converged=settled and optimum.converged and not at_bounds)


def _updated_noise(posterior: GramPosterior) -> Float[Tensor, " C"]:
    """The logarithm of MacKay's update of each `b_c`."""
    model = posterior.model
    weights = posterior._shift / (posterior.eigenvalues + posterior._shift)
    # A block of rows at a time: the squares of all are one more matrix in memory.
    diagonal = torch.cat([rows**2 @ weights for rows in posterior.vectors.split(_ROWS)]).reshape(model.offset.shape)
    free = diagonal.where(model.observed(), 0).sum(0)
    return free.cpu().log() - model.squared_errors(model.network_outputs).cpu().log()


def _at_fixed_point(posterior: GramPosterior, bounds: Bounds) -> tuple[GramPosterior, Optimum]:
    """The posterior at MacKay's fixed point, to rounding; the search starts at the prior's `α`."""
    last: GramMode | None = None

    def at(alpha: float) -> GramPosterior:
        """The posterior, with a mode that starts from the last one: the search moves `α` less and less."""
        nonlocal last
        moved = replace(posterior, prior=_with_overall(posterior.prior, alpha))
        last = moved._mode_by_newton(last)
        return replace(moved, known_mode=last)

    alpha, _ = mackay_root(
        posterior.effective_dimension,
        lambda alpha: alpha * at(alpha).mode.norm,
        posterior.precisions[0],
        bounds,
    )
    found = at(alpha)
    slope = 0.5 * (found.effective_dimension() - alpha * found.mode.norm)
    at_bounds = ("precision",) * is_at_bound(alpha, bounds)
    return found, Optimum(alpha, 1.0, found.log_evidence, (slope, 0.0), at_bounds, not at_bounds)


def _overall_noise(likelihood: Likelihood) -> float:
    """`b`: the geometric mean of the noise precisions of a Gaussian likelihood, one for others."""
    if not isinstance(likelihood, Gaussian):
        return 1.0
    noise = likelihood.noise_precisions()
    return float(noise) if noise.dim() == 0 else float(noise.log().mean().exp())


_Kind = TypeVar("_Kind", bound=Likelihood)


def _unit(likelihood: _Kind) -> _Kind:
    """The likelihood at `b = 1`."""
    if not isinstance(likelihood, Gaussian):
        return likelihood
    return likelihood.with_precision(likelihood.noise_precisions() / _overall_noise(likelihood))


def _with_overall(prior: GaussianPrior, alpha: float) -> GaussianPrior:
    """A prior with another overall precision."""
    return prior.with_precision(prior.precision * (alpha / overall_precision(prior)))


def _whiten_(
    K: Float[Tensor, "NC NC"], likelihood: Likelihood, outputs: Float[Tensor, "N C"], targets: Tensor
) -> Float[Tensor, "NC NC"]:
    """`LᵀKL` with `L Lᵀ` the curvature at some outputs, in the memory of `K`."""
    # Along rows, then along columns, in blocks: a root of all rows would take the memory of two more matrices.
    for view in (K, K.T):
        for rows in view.split(_ROWS):
            rows.copy_(likelihood.root_transpose(outputs, rows.reshape(-1, *outputs.shape), targets).flatten(1))
    return K
