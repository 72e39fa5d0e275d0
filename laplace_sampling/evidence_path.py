r"""Krylov runs behind `EvidencePath`, and hyperparameters from a few of them."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.curves import EvidencePath, FixedPoint, Quadrature
from laplace_sampling.evidence import EMStep, check_bounds
from laplace_sampling.krylov import Basis
from laplace_sampling.likelihoods import Gaussian, Likelihood
from laplace_sampling.operators import GGN, ScaledFeatures
from laplace_sampling.priors import GaussianPrior
from laplace_sampling.sampling import Draws, LinearModel

__all__ = ["PathResult", "evidence_path", "exact_path", "fit_path"]

# Up to so many outputs `Tr M` is worth its C VJPs a datum, C/2 products.
_TRACE_OUTPUTS = 64


@dataclass(frozen=True)
class PathResult:
    """What `fit_path` ends with: hyperparameters, mode `[P]` (unscaled), the curves, and a record of each round.

    `full` tells that the memory held too small a basis for the accuracy.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    mode: Float[Tensor, " P"]
    path: EvidencePath
    converged: bool
    full: bool
    history: list[EMStep]


def one_noise(likelihood: Likelihood) -> float | None:
    """The noise precision of a Gaussian likelihood with one for all outputs; else `None`."""
    if not isinstance(likelihood, Gaussian):
        return None
    precision = torch.as_tensor(likelihood.noise_precision)
    return float(precision) if precision.dim() == 0 else None


@dataclass(frozen=True)
class _Point:
    """Weights in scaled coordinates `[1, P]`, the outputs of the linear model there, and the sum of losses."""

    theta: Float[Tensor, "1 P"]
    outputs: Float[Tensor, "N C"]
    loss: float

    @classmethod
    def of(cls, model: LinearModel, prior: GaussianPrior, theta: Float[Tensor, "1 P"]) -> "_Point":
        if not bool(theta.any()):
            return cls._at(model, theta, model.offset)
        return cls._at(model, theta, model.outputs(theta * prior.scale)[0])

    @classmethod
    def _at(cls, model: LinearModel, theta: Tensor, outputs: Tensor) -> "_Point":
        return cls(theta, outputs, _loss(model, outputs))

    def objective(self, alpha: float) -> float:
        return self.loss + 0.5 * alpha * float(self.theta.double().square().sum())

    def toward(self, model: LinearModel, other: "_Point", alpha: float) -> "_Point":
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

    def distance(self, model: LinearModel, other: "_Point", alpha: float) -> float:
        """Length of the step to `other` in the norm of the Hessian, relative to that of `other` in the prior's."""
        change = (other.outputs - self.outputs).double()
        curved = model.likelihood.curvature(other.outputs, change)
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
class _Expansion:
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


def _expand(model: LinearModel, prior: GaussianPrior, point: _Point, hessian_at: str) -> _Expansion:
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
    return _Expansion(at_mode, operator, point.theta / white, gradient, white, path)


class _Run:
    """Block Lanczos with reorthogonalisation, of probes for the traces and from `θ` and `∇ℓ` for the mode.

    They share a basis if they share `B`. The mode's part grows by its residual at the present `α`: with `θ` and the
    gradient in the space, it is as good as conjugate gradients from `θ`, and better by what the probes have found.
    """

    def __init__(
        self, expansion: _Expansion, probes: Float[Tensor, "R P"], trace: float | None, max_basis: int | None
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
        self._sizes, self._fit_sizes = [], [self.fit_basis.size]
        self._exact = self._fit_exact = False  # nothing left to add: the space is invariant
        self._front = probes
        self.full = False
        self.path = self._start

    def find_trace(self) -> None:
        """`Tr M`, if it is not known and not too dear."""
        outputs = self.expansion.operator.features.num_outputs
        if self.trace is None and outputs <= _TRACE_OUTPUTS:
            self.trace, self._trace_passes = self.expansion.operator.trace(), outputs / 2

    @property
    def steps(self) -> int:
        return len(self._sizes)

    def grow_traces(self) -> bool:
        """A block step of the probes; whether anything was new."""
        if self._exact or not self._make_room(len(self._front)):
            return False
        if self.basis.extend(self._front):
            self._front = self.basis.last_product
            self._sizes.append(self.basis.size)
            return True
        # The products so far lie in the space, and with them all further ones.
        self._exact = True
        return False

    def grow_fit(self, alpha: float) -> bool:
        """One vector more for the mode at some `α`; whether it was new."""
        if self._fit_exact or not self._make_room(1):
            return False
        if self.fit_basis.extend(self._residual(alpha)[0]):
            self._fit_sizes.append(self.fit_basis.size)
            return True
        self._fit_exact = True
        return False

    def _make_room(self, num: int) -> bool:
        total = self.basis.size + (0 if self.joint else self.fit_basis.size)
        if self.max_basis is not None and total + num > self.max_basis:
            self.full = True
        return not self.full

    def update(self) -> None:
        passes = self._trace_passes + self.expansion.path.passes + self.basis.passes
        fit_sizes = (
            self._fit_sizes if self._fit_sizes[-1] == self.fit_basis.size else [*self._fit_sizes, self.fit_basis.size]
        )
        self.path = replace(
            self._start,
            traces=Quadrature.of_trace(self.basis, self.probes, self._sizes, self._exact, self.trace),
            fit=Quadrature.of(self.fit_basis, self.rhs, fit_sizes, self._fit_exact),
            passes=passes if self.joint else passes + self.fit_basis.passes,
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


def _curves(
    expansion: _Expansion,
    draws: Draws,
    target: Callable[[EvidencePath], FixedPoint | Tensor],
    accuracy: float,
    *,
    max_basis: int | None,
    trace: float | None = None,
    find_trace: bool = True,
) -> _Run:
    """A run that goes on until the curves are accurate: for `log α` at a fixed point, or for the evidence at some `α`.

    `trace` is `Tr M` if known already.
    """
    probes = draws.prior(expansion.path.size).to(expansion.theta)
    probes = probes * (math.sqrt(expansion.path.size) / probes.norm(dim=1, keepdim=True))
    run = _Run(expansion, probes, trace, max_basis)
    if find_trace:
        run.find_trace()
    for _ in range(2):
        run.grow_traces()
    while True:
        run.update()
        at = target(run.path)
        if isinstance(at, Tensor):
            traces, fit = run.path.last_changes_of_evidence(at)
            # ½ rᵀ(M + α)⁻¹r is what the mode's part of the evidence lacks.
            sizes = run.path.log_marginal_likelihood(at)[0].abs().tolist()
            missing = [
                (a, 0.5 * run.residual_norm(a) ** 2 / a / size) for a, size in zip(at.tolist(), sizes, strict=True)
            ]
            needed = accuracy
        else:
            traces, fit = run.path.last_changes(at.precision)
            missing = [(at.precision, run.fit_error(at.precision))]
            needed = accuracy * at.slope
        grown = not traces < needed and run.grow_traces()
        for alpha, error in missing:
            wanted = not fit < needed or error > needed
            grown = (wanted and run.grow_fit(alpha)) or grown
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

    run = _curves(
        _expand(model, prior, _Point.of(model, prior, mode), hessian_at),
        draws,
        ends if decades is not None else fixed_point,
        accuracy,
        max_basis=max_basis,
    )
    return run.path, run.mode


class _ExactRun:
    """The curves from all eigenvalues, by dense algebra."""

    trace: float | None = None
    full = False

    def __init__(self, expansion: _Expansion) -> None:
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
        root = torch.cat([block.double() for block in operator.root_rows()])
        if len(root) < operator.size:
            values, vectors = torch.linalg.eigh(root @ root.T)
            scaled = (vectors.T @ root) / values.clamp_min(1e-300).sqrt()[:, None]
            return values.clamp_min(0), torch.where((values > 1e-14 * values[-1])[:, None], scaled, 0.0)
        values, vectors = torch.linalg.eigh(root.T @ root)
        return values.clamp_min(0), vectors.T

    def mode(self, alpha: float) -> Float[Tensor, "1 P"]:
        return ((self.rhs / (self.values + alpha)) @ self.vectors)[None].to(self.white) * self.white


def exact_path(
    model: LinearModel, prior: GaussianPrior, mode: Float[Tensor, "1 P"], *, hessian_at: str
) -> EvidencePath:
    """The same curves from all eigenvalues, by dense algebra: for small problems."""
    return _ExactRun(_expand(model, prior, _Point.of(model, prior, mode), hessian_at)).path


# Standard errors of log α that successive rounds of `fit_path` aim at: B moves with α, and rounds far from the end
# need not be exact. The last one is a third of the tolerance.
_ROUNDS = (0.25, 0.08)
# Probes of the last round, to begin with: each of them sees the Krylov spaces of all others.
_PROBES = 12
# Within this factor of the present α the expansion at the mode is trusted.
_TRUSTED = 4.0
# By what a round shrinks the distance to the end where B is at the mode: seen in practice, then measured.
_RATE = 0.4
# A step of the mode of this length, relative, leaves an error of at most its square.
_NEAR = 0.15


class _Secant:
    """The next `α` while `B` moves with it, from the fixed points of the curves of earlier rounds.

    Where only the mode moves, curves around it are right to first order, and the fixed point needs no correction.
    """

    def __init__(self, moving: bool) -> None:
        self.moving, self.rate = moving, _RATE if moving else 0.0
        self.visited: list[tuple[float, float, int]] = []
        self.beyond: list[float] = []

    def next(self, fixed_point: float, before: float, num_probes: int) -> float:
        x, s = math.log(before), math.log(fixed_point)
        trust = math.log(_TRUSTED) * 2 ** len(self.beyond)
        if self.beyond and self.beyond[-1] * (s - x) < 0:
            trust, self.beyond = math.log(_TRUSTED), []
        if abs(s - x) > trust:
            # Farther off than the curves hold: go so far, and twice as far (in log α) if that was not enough.
            self.visited.clear()
            self.beyond.append(s - x)
            return math.exp(x + math.copysign(trust, s - x))
        self.beyond.clear()
        self.visited.append((x, s, num_probes))
        if self.moving and len(self.visited) > 1:
            last = self.visited[-2]
            # Fixed points by the same probes have most of their errors in common.
            if abs(x - last[0]) > (0.003 if num_probes == last[2] else 0.1):
                self.rate = min(max((s - last[1]) / (x - last[0]), -0.9), 0.7)
        return math.exp(s + self.rate / (1 - self.rate) * (s - x))


def fit_path(
    model: LinearModel,
    prior: GaussianPrior,
    seed: int,
    stream: int,
    *,
    hessian_at: str,
    tolerance: float = 0.03,
    max_rounds: int = 12,
    max_probes: int = 256,
    precision_bounds: tuple[float, float] = (1e-8, 1e12),
    noise_bounds: tuple[float, float] = (1e-12, 1e12),
    max_basis: int | None = None,
    exact: bool = False,
    progress: bool = False,
    callback: Callable[[EMStep], object] | None = None,
) -> PathResult:
    r"""Prior precision (one group) and noise precision (one for all outputs) at MacKay's fixed point, by Krylov runs.

    With a Gaussian likelihood `B` is constant, and the fixed point of one run's curves is the answer. Else each round
    expands the loss around the present weights, makes one Krylov run there, and goes to the fixed point of its curves
    and to the mode at that `α`: a step of Newton's method for the mode, from the weights where all are zero, together
    with one for `α`. Rounds go on until both stay, with more probes as they settle.

    Args:
        model: the linear model on the training data.
        prior: starting point; its scale stays fixed.
        seed: of the probes.
        stream: likewise.
        hessian_at: `"network"` or `"mode"`.
        tolerance: of `log α`.
        max_rounds: at most so many.
        max_probes: at most so many probes.
        precision_bounds: within which `α` is kept.
        noise_bounds: within which the noise precision is kept.
        max_basis: vectors in memory at most.
        exact: all eigenvalues by dense algebra instead of Krylov runs.
        progress: show progress bars.
        callback: called with the record of each round.
    """
    check_bounds(precision_bounds, noise_bounds)
    features, likelihood = model.features, model.likelihood
    prior = prior.to(features.device, features.dtype)
    quadratic = isinstance(likelihood, Gaussian)
    learn = isinstance(likelihood, Gaussian) and likelihood.learn
    targets = (
        [tolerance / 3] if quadratic or exact else [*(level for level in _ROUNDS if level > tolerance), tolerance / 3]
    )
    moving = not quadratic and hessian_at == "mode"
    secant, level, wanted_probes = _Secant(moving), 0, _PROBES
    history: list[EMStep] = []
    path: EvidencePath | None = None
    factor = 1.0
    mode = torch.zeros(1, features.size, device=features.device, dtype=features.dtype)
    point = _Point.of(model, prior, mode)
    trace, start_gradient, converged, full = None, 0.0, False, False
    network_loss = _loss(model, model.network_outputs)
    bar = tqdm(total=len(targets), desc="evidence", disable=not progress)
    while len(history) < max_rounds and not converged:
        started = time.perf_counter()
        before, last = float(prior.precision), level == len(targets) - 1
        wished = min(wanted_probes if last else 2 * (level + 1), max_probes)
        num_probes = wished if max_basis is None else min(wished, max_basis // 4)
        expansion = _expand(model, prior, point, hessian_at)
        residual = float((expansion.gradient + before * expansion.theta).norm())
        start_gradient = start_gradient or residual
        run = (
            _ExactRun(expansion)
            if exact
            else _curves(
                expansion,
                Draws(num_probes, seed, stream),
                lambda path: path.fixed_point(precision_bounds, learn, follow=not quadratic),
                targets[level],
                max_basis=max_basis,
                trace=trace,
                find_trace=level > 0 or not moving,
            )
        )
        path = run.path
        if not moving:
            trace = run.trace
        end = path.fixed_point(precision_bounds, learn, follow=not quadratic)
        error = end.error / (1 - secant.rate)
        # A bound is believed if more probes find no fixed point before it either.
        accurate = path.exact or error <= 1.5 * targets[-1] or (math.isinf(error) and num_probes > _PROBES)
        # Curves around zero weights are good for every α, those around a mode only near its own; and curves of few
        # probes may miss a fixed point where they are flat.
        unsure = math.isinf(error) and not last
        if unsure:
            alpha = before / math.exp(float(path.mackay(torch.tensor([before], dtype=torch.float64))[0]))
            alpha = min(max(alpha, before / _TRUSTED), before * _TRUSTED)
        elif quadratic or (not history and math.isfinite(error)):
            alpha = end.precision
        else:
            alpha = secant.next(end.precision, before, num_probes)
        noise: list[float] = []
        factor = 1.0
        if isinstance(likelihood, Gaussian):
            noise = torch.as_tensor(likelihood.noise_precision).reshape(-1).tolist()
            if learn and accurate:
                kept = min(max(noise[0] * end.noise_factor, noise_bounds[0]), noise_bounds[1])
                likelihood, factor = likelihood.with_precision(kept), kept / noise[0]
        at = torch.tensor([alpha], dtype=torch.float64)
        gamma, gamma_se = path.effective_dimension(at)
        mode, step, passes = run.mode(alpha), 0.0, path.passes
        updated = min(max(alpha * factor, precision_bounds[0]), precision_bounds[1])
        if quadratic:
            # The curves hold everywhere: a run that is not accurate yet is made again where it was.
            updated = updated if accurate else before
        else:
            proposal = _Point.of(model, prior, mode)
            following = point.toward(model, proposal, updated)
            step, point = point.distance(model, following, updated), following
            mode, passes = point.theta, passes + 0.5
        model = model.with_likelihood(likelihood)
        history.append(
            EMStep(
                step=len(history) + 1,
                prior_precision=[before],
                new_prior_precision=[updated],
                noise_precision=noise,
                effective_dimension=gamma.tolist(),
                effective_dimension_se=gamma_se.tolist(),
                mode_norm=path.mode_norm(at).tolist(),
                loss=float(path.data_fit(at)),
                network_loss=network_loss,
                mode_residual=residual / max(start_gradient, 1e-300),
                sample_residual=0.0,
                passes=passes,
                seconds=time.perf_counter() - started,
            )
        )
        moved = abs(math.log(updated / before))
        prior = prior.with_precision(torch.tensor([updated], dtype=torch.float64))
        if callback is not None:
            callback(history[-1])
        # The secant has taken most of what the curvature will change by the move.
        settled = quadratic or (len(history) > 1 and 0.3 * moved <= tolerance / 2 and step <= _NEAR)
        full = last and (run.full or (num_probes < wished and not accurate))
        converged = last and settled and accurate and not full
        if full:
            break
        if last and not accurate:
            wanted_probes = math.ceil(wanted_probes * min((error / targets[-1]) ** 2, 3))
        if quadratic or unsure or moved <= 3 * targets[level]:
            level = min(level + 1, len(targets) - 1)
            bar.update()
        bar.set_postfix(alpha=f"{updated:.3g}", gamma=f"{float(gamma):.3g}")
    bar.close()
    assert path is not None
    if factor != 1:
        path = path.rescaled(factor)
    return PathResult(prior, likelihood, (mode * prior.scale)[0], path, converged, full, history)


def _loss(model: LinearModel, outputs: Float[Tensor, "N C"]) -> float:
    return float(model.likelihood.loss(outputs, model.targets).double().sum())
