r"""Krylov runs behind `EvidencePath`: the loss expanded around a point, and what a run there tells."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath, FixedPoint
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.krylov import Basis
from laplace_sampling.solvers.quadrature import Quadrature, TraceEstimator

__all__ = ["ExactRun", "Expansion", "Point", "Run", "evidence_path", "exact_path", "expand", "run_curves", "total_loss"]

# Up to so many outputs `Tr M` is worth its C VJPs a datum, C/2 products.
_TRACE_OUTPUTS = 64
# Vectors of a basis for each that is added to it before curves are looked at again.
_LARGE = 50
# Vectors of a basis that are always worth a trial: for twice as many it may see no progress.
_PATIENCE = 100
# Of the right-hand side, in units of the precision of its numbers.
_ROUNDING = 4


def one_noise(likelihood: Likelihood) -> float | None:
    """The noise precision of a Gaussian likelihood with one for all outputs; else `None`."""
    if not isinstance(likelihood, Gaussian):
        return None
    precision = torch.as_tensor(likelihood.noise_precision)
    return float(precision) if precision.dim() == 0 else None


@dataclass(frozen=True)
class Point:
    """Weights in scaled coordinates `[1, P]`, the outputs of the linear model there, and the sum of losses."""

    theta: Float[Tensor, "1 P"]
    outputs: Float[Tensor, "N C"]
    loss: float

    @classmethod
    def of(cls, model: LinearModel, prior: GaussianPrior, theta: Float[Tensor, "1 P"]) -> "Point":
        if not bool(theta.any()):
            return cls._at(model, theta, model.offset)
        return cls._at(model, theta, model.outputs(theta * prior.scale)[0])

    @classmethod
    def _at(cls, model: LinearModel, theta: Tensor, outputs: Tensor) -> "Point":
        return cls(theta, outputs, total_loss(model, outputs))

    def objective(self, alpha: float) -> float:
        return self.loss + 0.5 * alpha * float(self.theta.double().square().sum())

    def toward(self, model: LinearModel, other: "Point", alpha: float) -> "Point":
        """`other`, or the first of its halvings that lowers the objective: outputs are linear, this costs nothing."""
        step, length = other, 1.0
        while step.objective(alpha) > self.objective(alpha) * (1 + 1e-12) and length > 1e-6:
            length /= 2
            step = self._at(
                model,
                torch.lerp(self.theta, other.theta, length),
                torch.lerp(self.outputs, other.outputs, length),
            )
        return step

    def distance(self, model: LinearModel, other: "Point", alpha: float) -> float:
        """Length of the step to `other` in the norm of the Hessian, relative to that of `other` in the prior's."""
        change = (other.outputs - self.outputs).double()
        curved = model.likelihood.curvature(other.outputs, change, model.targets)
        squared = float((change * curved).sum())
        squared += alpha * float((other.theta - self.theta).double().square().sum())
        norm = alpha * float(other.theta.double().square().sum())
        return math.sqrt(squared / norm) if norm > 0 else math.inf


def network_errors(model: LinearModel) -> float | None:
    """`b Σ(y − f)²` of the network, if one noise precision is learnt from it."""
    likelihood, f = model.likelihood, model.network_outputs
    b = one_noise(likelihood)
    if b is None or not (isinstance(likelihood, Gaussian) and likelihood.learn and likelihood.noise_at == "network"):
        return None
    return b * float((f - model.targets.reshape(f.shape)).double().square().sum())


@dataclass(frozen=True)
class Expansion:
    """The loss around a point, `loss − bᵀθ + ½‖θ‖²_M`, in coordinates in which the prior is isotropic.

    `gradient` is that of the loss. `path` has all that is known without a spectrum; `white` takes the coordinates to
    the scaled ones of the prior.
    """

    at_mode: GGN
    operator: GGN
    theta: Float[Tensor, "1 P"]
    gradient: Float[Tensor, "1 P"]
    white: Float[Tensor, " P"]
    path: EvidencePath

    def complete(self, product: Float[Tensor, "1 P"]) -> tuple[Float[Tensor, "1 P"], EvidencePath]:
        """`b = Mθ − ∇ℓ` from `Mθ`, and the expansion of the loss at zero."""
        theta, rest = self.theta.double(), 0.5 * product.double() - self.gradient.double()
        loss = self.path.loss + float((rest * theta).sum())
        return product - self.gradient, replace(self.path, loss=loss)


def expand(model: LinearModel, prior: GaussianPrior, point: Point, hessian_at: str) -> Expansion:
    mean = float(prior.spread().double().log().mean().exp())
    white = (mean / prior.spread()).sqrt()
    whitened = replace(model, features=ScaledFeatures(model.features, prior.scale * white))
    at_mode = whitened.ggn(point.outputs)
    gradient = torch.zeros_like(point.theta)
    for chunk in model.features.chunks():
        slope = model.likelihood.gradient(point.outputs[chunk][None], model.targets[chunk])
        gradient += whitened.features.vjp(slope.to(gradient), chunk)
    same = isinstance(model.likelihood, Gaussian) or hessian_at == "mode"
    operator = at_mode if same else whitened.ggn(model.network_outputs)
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    unknown = Quadrature(nothing[0], nothing, nothing)
    path = EvidencePath(
        traces=unknown,
        fit=unknown,
        loss=point.loss,
        num_outputs=point.outputs.numel(),
        size=len(white),
        noise_precision=one_noise(model.likelihood),
        at=mean,
        exact=False,
        passes=1.0,  # of the outputs and the gradient
        network_errors=network_errors(model),
    )
    return Expansion(at_mode, operator, point.theta / white, gradient, white, path)


class Run:
    """Block Lanczos with reorthogonalisation, of probes for the traces and from `θ` and `∇ℓ` for the mode.

    They share a basis if they share `B`. The mode's part grows by its residual at the present `α`: with `θ` and the
    gradient in the space, it is as good as conjugate gradients from `θ`, and better by what the probes have found.
    """

    def __init__(
        self, expansion: Expansion, probes: Float[Tensor, "R P"], trace: float | None, max_basis: int | None
    ) -> None:
        self.expansion, self.probes, self.max_basis = expansion, probes, max_basis
        start = torch.cat([expansion.theta[expansion.theta.any(1)], expansion.gradient])
        self.joint = expansion.operator is expansion.at_mode
        self.fit_basis = Basis(expansion.at_mode)
        self.fit_basis.extend(start)
        self.basis = self.fit_basis if self.joint else Basis(expansion.operator)
        product = torch.zeros_like(expansion.theta)
        if bool(expansion.theta.any()):
            product = self.fit_basis.combine_products(self.fit_basis.project(expansion.theta))
        self.rhs, self._start = expansion.complete(product)
        self.trace, self._trace_passes = trace, 0.0
        self._estimator: TraceEstimator | None = None
        self._traces = expansion.path.traces
        self._fit = Quadrature.of(self.fit_basis, self.rhs, self.fit_basis.size)
        self._exact = self._fit_exact = False  # nothing left to add: the space is invariant
        self.full = False
        self.fit_vectors = 0  # that were added for the mode
        self.path = self._start

    def find_trace(self) -> None:
        """`Tr M`, if it is not known and not too dear."""
        outputs = self.expansion.operator.features.num_outputs
        if self.trace is None and outputs <= _TRACE_OUTPUTS:
            self.trace, self._trace_passes = self.expansion.operator.trace(), outputs / 2

    @property
    def steps(self) -> int:
        return 0 if self._estimator is None else self._estimator.steps

    @property
    def nearly_exhausted(self) -> bool:
        """Whether a step has found less than a block: few products more make the traces exact."""
        return self._estimator is not None and self._estimator.width < len(self.probes)

    def grow_traces(self) -> bool:
        """A block step of the probes; whether anything was new."""
        self._estimator = self._estimator or TraceEstimator(self.basis, self.probes, self.trace)
        if self._exact or not self._make_room(self._estimator.width):
            return False
        self._exact = not self._estimator.step()
        self._traces = self._estimator.quadrature or self._traces
        return not self._exact

    def grow_fit(self, alpha: float) -> bool:
        """A vector more for the mode at some `α`, a few of a large basis; whether there was a new one.

        Curves are computed from all of the basis, which takes longer than a product where it is large.
        """
        grown = False
        for _ in range(1 + self.fit_basis.size // _LARGE):
            if self._fit_exact or not self._make_room(1):
                break
            residual = self._residual(alpha)[0]
            # What rounding leaves has no new direction.
            new = residual.norm() > _ROUNDING * torch.finfo(residual.dtype).eps * self.rhs.norm()
            if not new:
                break  # at this `α`; at others there may be
            if not self.fit_basis.extend(residual):
                self._fit_exact = True
                break
            self.fit_vectors += 1
            grown = True
        return grown

    def _make_room(self, num: int) -> bool:
        total = self.basis.size + (0 if self.joint else self.fit_basis.size)
        if self.max_basis is not None and total + num > self.max_basis:
            self.full = True
        return not self.full

    def update(self) -> None:
        passes = self._trace_passes + self.expansion.path.passes + self.basis.passes
        if len(self._fit.nodes) < self.fit_basis.size:
            before = replace(self._fit, before=None)
            fit = Quadrature.of(self.fit_basis, self.rhs, self.fit_basis.size)
            self._fit = replace(fit, truncated=before, before=before)
        self.path = replace(
            self._start,
            traces=self._traces,
            fit=replace(self._fit, truncated=None) if self._fit_exact or (self.joint and self._exact) else self._fit,
            passes=passes if self.joint else passes + self.fit_basis.passes,
            full=self.full,
        )

    def _solve(self, alpha: float) -> Float[Tensor, "1 m"]:
        T = self.fit_basis.T
        inner = T + alpha * torch.eye(len(T), dtype=T.dtype, device=T.device)
        return torch.linalg.solve(inner, self.fit_basis.project(self.rhs).T).T

    def _residual(self, alpha: float) -> tuple[Float[Tensor, "1 P"], Float[Tensor, "1 P"]]:
        y = self._solve(alpha)
        theta = self.fit_basis.combine(y)
        return self.rhs - self.fit_basis.combine_products(y) - alpha * theta, theta

    def residual_norm(self, alpha: float) -> float:
        return float(self._residual(alpha)[0].norm())

    def fit_error(self, alpha: float) -> float:
        """Bound of the error of the mode in the norm of `M + α`, relative to its norm in that of the prior."""
        residual, theta = self._residual(alpha)
        return float(residual.norm() / (alpha * theta.norm()).clamp_min(1e-300))

    def mode(self, alpha: float) -> Float[Tensor, "1 P"]:
        """`(M + α)⁻¹ b`, in the scaled coordinates of the prior."""
        return self.fit_basis.combine(self._solve(alpha)) * self.expansion.white


class _Progress:
    """Whether the error of a mode still goes down as vectors are added for it.

    At an `α` far too small, as of classes that are separated and a prior that is to vanish, hardly less than a basis of
    all weights finds the mode, of which every vector takes longer than the last.
    """

    def __init__(self) -> None:
        self.alpha, self.least, self.num, self.stalled = math.nan, math.inf, 0, False

    def see(self, alpha: float, error: float, num: int) -> None:
        """After so many vectors; errors at another `α` are not compared."""
        moved = not 0.5 < alpha / self.alpha < 2
        if moved or error < self.least / 2:
            self.alpha, self.least, self.num = alpha if moved else self.alpha, error, num
        self.stalled = num > 2 * max(self.num, _PATIENCE)


def run_curves(
    expansion: Expansion,
    draws: Draws,
    target: Callable[[EvidencePath], FixedPoint | Tensor],
    accuracy: float,
    *,
    max_basis: int | None,
    trace: float | None = None,
    find_trace: bool = True,
) -> Run:
    """A run that goes on until the curves are accurate: for `log α` at a fixed point, or for the evidence at some `α`.

    `trace` is `Tr M` if known already.
    """
    probes = draws.prior(expansion.path.size).to(expansion.theta)
    probes = probes * (math.sqrt(expansion.path.size) / probes.norm(dim=1, keepdim=True))
    run = Run(expansion, probes, trace, max_basis)
    if find_trace:
        run.find_trace()
    for _ in range(2):
        run.grow_traces()
    error, progress = math.inf, _Progress()
    while True:
        run.update()
        at = target(run.path)
        if isinstance(at, Tensor):
            traces, fit = run.path.remaining_of_evidence(at)
            # ½ rᵀ(M + α)⁻¹r is what the mode's part of the evidence lacks.
            sizes = run.path.log_marginal_likelihood(at)[0].abs().tolist()
            missing = [
                (a, 0.5 * run.residual_norm(a) ** 2 / a / size) for a, size in zip(at.tolist(), sizes, strict=True)
            ]
            needed, deeper = accuracy, False
        else:
            traces, fit = run.path.remaining(at.precision)
            missing = [(at.precision, run.fit_error(at.precision))]
            progress.see(*missing[0], run.fit_vectors)
            needed = accuracy * at.slope
            # A step more takes more eigenvectors out of the variance: as long as that pays better than more probes. The
            # first three steps take the same.
            error, before = at.error, error
            deeper = accuracy < error and (run.steps < 5 or error < before * math.sqrt(1 - 1 / run.steps))
        grown = (deeper or run.nearly_exhausted or not traces < needed) and run.grow_traces()
        for alpha, lacking in missing:
            wanted = not fit < needed or lacking > needed
            grown = (wanted and not progress.stalled and run.grow_fit(alpha)) or grown
        if not grown:
            run.update()
            return run


def evidence_path(
    model: LinearModel,
    prior: GaussianPrior,
    draws: Draws,
    mode: Float[Tensor, "1 P"],
    *,
    hessian_at: str,
    accuracy: float,
    decades: float | None = None,
    learn_noise: bool = False,
    bounds: tuple[float, float] = (1e-8, 1e12),
    max_basis: int | None = None,
) -> tuple[EvidencePath, Callable[[float], Float[Tensor, "1 P"]]]:
    """The curves around a mode (in scaled coordinates), from one Krylov run, and the mode as a function of `α`.

    Args:
        model: the linear model on the training data.
        prior: its precision is where the run is made; several groups are scaled together.
        draws: of the probes.
        mode: around which a loss that is not quadratic is expanded.
        hessian_at: as for `fit_em`.
        accuracy: relative, of what the last Lanczos step may change: of `γ` and `‖θ̄‖²` at the fixed point; or, with
            `decades`, of the log determinant so many decades to both sides of the precision of the prior.
        decades: see `accuracy`.
        learn_noise: as for `EvidencePath.fixed_point`.
        bounds: of the prior precision.
        max_basis: vectors in memory at most.
    """
    quadratic = isinstance(model.likelihood, Gaussian)

    def ends(path: EvidencePath) -> Tensor:
        assert decades is not None
        return path.at * torch.tensor([10.0**-decades, 1.0, 10.0**decades], dtype=torch.float64)

    def fixed_point(path: EvidencePath) -> FixedPoint:
        return path.fixed_point(bounds, learn_noise, follow=not quadratic)

    run = run_curves(
        expand(model, prior, Point.of(model, prior, mode), hessian_at),
        draws,
        ends if decades is not None else fixed_point,
        accuracy,
        max_basis=max_basis,
    )
    return run.path, run.mode


class ExactRun:
    """The curves from all eigenvalues, by dense algebra."""

    trace: float | None = None
    full = False

    def __init__(self, expansion: Expansion) -> None:
        self.white, self.product = expansion.white, expansion.at_mode.matmul(expansion.theta)
        rhs, path = expansion.complete(self.product)
        self.values, self.vectors = self._spectrum(expansion.at_mode)
        self.rhs = (rhs.double() @ self.vectors.T)[0]
        same = expansion.operator is expansion.at_mode
        nodes = self.values if same else self._spectrum(expansion.operator)[0]
        ones, fit = torch.ones(1, len(nodes), dtype=torch.float64), self.rhs[None].square().cpu()
        self.path = replace(
            path, traces=Quadrature(nodes.cpu(), ones, ones), fit=Quadrature(self.values.cpu(), fit, fit), exact=True
        )

    @staticmethod
    def _spectrum(operator: GGN) -> tuple[Float[Tensor, " m"], Float[Tensor, "m P"]]:
        """Eigenvalues that may not be zero, and eigenvectors as rows."""
        blocks = [block.double() for block in operator.root_rows()]
        if sum(map(len, blocks)) < operator.size:
            root = torch.cat(blocks)
            values, vectors = _eigh(root @ root.T)
            scaled = (vectors.T @ root) / values.clamp_min(1e-300).sqrt()[:, None]
            return values.clamp_min(0), torch.where((values > 1e-14 * values[-1])[:, None], scaled, 0.0)
        values, vectors = _eigh(sum((block.T @ block for block in blocks[1:]), blocks[0].T @ blocks[0]))
        return values.clamp_min(0), vectors.T

    def mode(self, alpha: float) -> Float[Tensor, "1 P"]:
        return ((self.rhs / (self.values + alpha)) @ self.vectors)[None].to(self.white) * self.white


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    if bool(matrix.isfinite().all()):
        with suppress(torch.linalg.LinAlgError):  # pyright: ignore
            return torch.linalg.eigh(matrix)
    raise ValueError(
        "The curvature at the mode of the linear model has no eigenvalues in this precision: either the Jacobian of "
        "the model contains NaN or infinity, or the mode has run away, as it may for an affine model of classes. Use "
        '`linear_model="homogeneous"`, or a larger lower bound of `precision_bounds`.'
    )


def exact_path(
    model: LinearModel, prior: GaussianPrior, mode: Float[Tensor, "1 P"], *, hessian_at: str
) -> EvidencePath:
    """The same curves from all eigenvalues, by dense algebra: for small problems."""
    return ExactRun(expand(model, prior, Point.of(model, prior, mode), hessian_at)).path


def total_loss(model: LinearModel, outputs: Float[Tensor, "N C"]) -> float:
    return float(model.likelihood.loss(outputs, model.targets).double().sum())
