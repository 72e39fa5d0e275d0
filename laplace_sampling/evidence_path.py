r"""Evidence, effective dimension and mode as functions of the prior precision, from one Krylov run.

While `B` is fixed, `M` does not depend on `α`. With `T = V M Vᵀ` on a block Krylov basis `V` of a few random probes `z`
and of the right-hand side `b` of the mode, Gauss quadrature (Golub and Meurant) gives for *every* `α`

    γ(α) = Tr M(M + α)⁻¹,    log|I + M/α|,    ‖θ̄(α)‖² = bᵀ(M + α)⁻²b,

the traces as means over the probes (stochastic Lanczos quadrature), and so the log marginal likelihood

    log p(y | α) = −Σ_i ℓ(y_i, h(θ̄, x_i)) − ½ α‖θ̄‖² − ½ log|I + M/α|.

For a loss that is not quadratic, it is that of its quadratic expansion at the mode where the run was made, with
`b = Mθ̄ − ∇ℓ`: exact there, and to first order in `log α` around it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from laplace_sampling.evidence import EMStep
from laplace_sampling.krylov import CG, Basis
from laplace_sampling.likelihoods import Gaussian, Likelihood
from laplace_sampling.operators import GGN, Operator, ScaledFeatures
from laplace_sampling.priors import GaussianPrior
from laplace_sampling.sampling import Draws, LinearModel, ModeObjective, linear_model_mode

__all__ = [
    "EvidenceCurves",
    "EvidencePath",
    "MarginalLikelihood",
    "PathResult",
    "Quadrature",
    "bai_golub_bound",
    "evidence_path",
    "exact_path",
    "fit_path",
]


@dataclass(frozen=True)
class Quadrature:
    """`Σ_j w_j f(λ_j)`, several rows of weights `[R, m]` on the same nodes `[m]`: means over the rows are estimates.

    Attributes:
        nodes: `λ`.
        weights: `w`.
        random: the part of the weights that is random given the rest; the same weights for plain quadrature.
        earlier: the quadrature a Lanczos step earlier, `None` if this one is exact.
    """

    nodes: Float[Tensor, " m"]
    weights: Float[Tensor, "R m"]
    random: Float[Tensor, "R m"]
    earlier: "Quadrature | None" = field(default=None, repr=False)

    @classmethod
    def of(cls, basis: Basis, vectors: Float[Tensor, "R P"], sizes: list[int], exact: bool) -> "Quadrature":
        """`zᵀf(M)z` of each of some vectors in the basis, `sizes` being its sizes after each step."""
        coordinates = basis.project(vectors)

        def at(size: int, earlier: "Quadrature | None") -> "Quadrature":
            nodes, eigenvectors = torch.linalg.eigh(basis.T[:size, :size])
            weights = ((coordinates[:, :size] @ eigenvectors) ** 2).cpu()
            return cls(nodes.clamp_min(0).cpu(), weights, weights, earlier)

        return at(sizes[-1], None if exact or len(sizes) < 2 else at(sizes[-2], None))

    @classmethod
    def of_trace(cls, basis: Basis, probes: Float[Tensor, "R P"], sizes: list[int], exact: bool) -> "Quadrature":
        """`Tr f(M)`, one estimate from each probe and the Krylov space of the others.

        With `Q` an orthonormal basis of the Krylov space of all other probes and `z̃ = (I − QQᵀ)z` brought to norm
        `√(P − dim Q)`, the estimate is `Tr QᵀfQ + z̃ᵀf z̃` (Chen and Hallman 2023, "Krylov-aware stochastic trace
        estimation", with the exchange of probes of Epperly, Tropp and Webber 2024, "XTrace"). Only the second part is
        random, and it does not see the leading eigenvectors, which `Q` holds. Everything happens inside the basis: no
        product is made.
        """
        coordinates = basis.project(probes)

        def at(steps: int, earlier: "Quadrature | None") -> "Quadrature":
            size = sizes[steps - 1]
            T = basis.T[:size, :size]
            nodes, eigenvectors = torch.linalg.eigh(T)
            inside = coordinates[:, :size]
            fixed, random = [], []
            for i in range(len(inside)):
                Q = _krylov_space(T, torch.cat([inside[:i], inside[i + 1 :]]), max(steps - 1, 1))
                rest = inside[i] - (inside[i] @ Q.T) @ Q
                norm = float(rest @ rest)
                left = probes.shape[1] - len(Q)
                scale = left / norm if norm > 1e-12 * float(inside[i] @ inside[i]) else 0.0
                fixed.append(((Q @ eigenvectors) ** 2).sum(0))
                random.append(scale * (rest @ eigenvectors) ** 2)
            part = torch.stack(random).cpu()
            return cls(nodes.clamp_min(0).cpu(), torch.stack(fixed).cpu() + part, part, earlier)

        return at(len(sizes), None if exact or len(sizes) < 2 else at(len(sizes) - 1, None))

    def __call__(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "R n"]:
        """Values for functions `f(λ)`, `[n, m]`."""
        return self.weights @ f(self.nodes).T

    def variance(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
        """Of the mean over the rows: that of a quadratic form in `z̃`, known better so than by the scatter of few."""
        return 2 * (self.random @ (f(self.nodes) ** 2).T).mean(0) / len(self.weights)

    def change(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "R n"]:
        """What the last Lanczos step changed: an estimate of the error, zero if the quadrature is exact."""
        return torch.zeros_like(self(f)) if self.earlier is None else self(f) - self.earlier(f)


def _krylov_space(T: Tensor, start: Tensor, blocks: int) -> Tensor:
    """Orthonormal basis of the span of `start T^k`, `k < blocks`."""
    Q, block = start[:0], start
    for _ in range(blocks):
        for _ in range(2):
            norm = block.norm(dim=1, keepdim=True)
            block = block[norm[:, 0] > 0] / norm[norm > 0][:, None]
            block = block - (block @ Q.T) @ Q
            block = block[block.norm(dim=1) > 1e-8]
            if len(block) == 0:
                return Q
            q, r = torch.linalg.qr(block.T)
            block = q.T[r.diagonal().abs() > 1e-8]
        Q, block = torch.cat([Q, block]), block @ T
    return Q


def bai_golub_bound(trace: Tensor, squares: Tensor, largest: Tensor, rank: int, size: int, alpha: Tensor) -> Tensor:
    r"""Upper bound of `log|M + αI|` from two traces and the largest eigenvalue (Bai and Golub 1996; Brack 2023, §3.2).

    With `K` eigenvalues at most `β = λ_max + α` on the range of `M`, `μ₁ = Tr M + Kα`, `μ₂ = Tr M² + 2α Tr M + Kα²`,
    and `α` on the other `P − K`.

    Args:
        trace: `Tr M`.
        squares: `Tr M²`.
        largest: at least the largest eigenvalue of `M`.
        rank: `K`, at least the rank of `M`.
        size: `P`.
        alpha: `[n]`.
    """
    beta = largest + alpha
    first = trace + rank * alpha
    second = squares + 2 * alpha * trace + rank * alpha**2
    t = (beta * first - second) / (beta * rank - first)
    # [log β, log t] [[β, t], [β², t²]]⁻¹ [μ₁, μ₂]ᵀ, the inverse written out
    a = (first * t - second) / (beta * (t - beta))
    b = (second - beta * first) / (t * (t - beta))
    return a * beta.log() + b * t.log() + (size - rank) * alpha.log()


@dataclass(frozen=True)
class EvidencePath:
    r"""Functions of the prior precision `α` (a tensor `[n]`), at the curvature of one Krylov run.

    For several groups of weights, `α` is the geometric mean of their precisions over the weights, which all go up and
    down together.

    Attributes:
        traces: quadrature of the probes.
        fit: quadrature of `b`, one row.
        loss: the quadratic expansion of the sum of losses at `θ = 0`.
        num_outputs: `N·C`.
        size: `P`.
        noise_precision: of a Gaussian likelihood with one, else `None`.
        at: `α` at which the run was made.
        exact: no probes, but all eigenvalues: `traces` has one row of unit weights.
        passes: products spent, in units of all data and one vector.
    """

    traces: Quadrature
    fit: Quadrature
    loss: float
    num_outputs: int
    size: int
    noise_precision: float | None
    at: float
    exact: bool
    passes: float

    def _trace(self, f: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """`Tr f(M)` and its standard error, with what the last Lanczos step changed added in squares."""
        value = self.traces(f).mean(0)
        return value, (self._probe_variance(f) + self.traces.change(f).mean(0) ** 2).sqrt()

    def _probe_variance(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.zeros_like(self.traces(f).mean(0)) if self.exact else self.traces.variance(f)

    def effective_dimension(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`γ(α) = Tr M(M + α)⁻¹`, and its standard error."""
        a = alpha.double()[:, None]
        return self._trace(lambda t: t / (t + a))

    def squared_dimension(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`Tr (M(M + α)⁻¹)²`: half the variance of `ζᵀMζ` for a posterior sample `ζ`."""
        a = alpha.double()[:, None]
        return self._trace(lambda t: (t / (t + a)) ** 2)[0]

    def log_determinant(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`log|I + M/α|`, and its standard error."""
        a = alpha.double()[:, None]
        return self._trace(lambda t: torch.log1p(t / a))

    def log_determinant_bound(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Bai and Golub's upper bound of `log|I + M/α|`; its traces are estimates, too."""
        one = torch.ones(1, 1, dtype=torch.float64)
        trace, square = (self._trace(lambda t, k=k: t**k * one)[0] for k in (1, 2))
        rank = min(self.size, self.num_outputs)
        a = alpha.double()
        return bai_golub_bound(trace, square, self.traces.nodes.max(), rank, self.size, a) - self.size * a.log()

    def mode_norm(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`‖θ̄(α)‖²`, in scaled coordinates."""
        a = alpha.double()[:, None]
        return self.fit(lambda t: (t + a) ** -2)[0]

    def data_fit(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`Σ_i ℓ(y_i, h(θ̄(α), x_i))`, a sum over the data."""
        a = alpha.double()[:, None]
        return self.loss + self.fit(lambda t: 0.5 * t * (t + a) ** -2 - 1 / (t + a))[0]

    def complexity(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`½ α‖θ̄‖² + ½ log|I + M/α|`."""
        return 0.5 * alpha.double() * self.mode_norm(alpha) + 0.5 * self.log_determinant(alpha)[0]

    def log_marginal_likelihood(self, alpha: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """`log p(y | α)`, and its standard error (of probes, and of the last Lanczos step)."""
        a = alpha.double()[:, None]
        change = 0.5 * self.fit.change(lambda t: 1 / (t + a))[0]
        error = (0.25 * self.log_determinant(alpha)[1] ** 2 + change**2).sqrt()
        return -self.data_fit(alpha) - self.complexity(alpha), error

    def last_change(self, alpha: float) -> float:
        """By how much the last Lanczos step changed `γ` or `‖θ̄‖²`, relative."""
        a = torch.tensor([[alpha]], dtype=torch.float64)
        changes = (
            (self.traces, lambda t: t / (t + a)),
            (self.fit, lambda t: (t + a) ** -2),
        )
        return max(float(q.change(f).mean().abs() / q(f).mean().abs().clamp_min(1e-300)) for q, f in changes)

    def last_change_of_evidence(self, alpha: Float[Tensor, " n"]) -> float:
        """The same of the log marginal likelihood, the largest over some `α`."""
        a = alpha.double()[:, None]
        change = 0.5 * self.traces.change(lambda t: torch.log1p(t / a)).mean(0).abs()
        change = change + 0.5 * self.fit.change(lambda t: 1 / (t + a))[0].abs()
        return float((change / self.log_marginal_likelihood(alpha)[0].abs()).max())

    def mackay(
        self, alpha: Float[Tensor, " n"], learn_noise: bool = False
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        r"""`log` of the ratio of `α` to MacKay's update of it, zero at a fixed point, and the factor of the noise.

        With a noise precision to learn, `M` and `b` scale with it: `α` is then the ratio of the prior precision to the
        factor `κ` by which the noise precision grows, and `κ = N·C / Q`, `Q = b·SSE + α‖θ̄‖²`, is of most evidence.
        """
        gamma = self.effective_dimension(alpha)[0]
        factor = self.noise_factor(alpha) if learn_noise else torch.ones_like(gamma)
        return (alpha.double() * self.mode_norm(alpha) * factor / gamma.clamp_min(1e-30)).log(), factor

    def noise_factor(self, alpha: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """`κ = N·C / (b·SSE + α‖θ̄‖²)`, by which the noise precision of a Gaussian likelihood would have to grow."""
        assert self.noise_precision is not None
        constant = 0.5 * self.num_outputs * math.log(2 * math.pi / self.noise_precision)
        q = 2 * (self.data_fit(alpha) - constant) + alpha.double() * self.mode_norm(alpha)
        return self.num_outputs / q.clamp_min(1e-30)

    def _profile(self, alpha: Tensor, learn_noise: bool) -> Tensor:
        """Evidence at the best noise precision, up to a constant."""
        if not learn_noise:
            return self.log_marginal_likelihood(alpha)[0]
        return 0.5 * self.num_outputs * self.noise_factor(alpha).log() - 0.5 * self.log_determinant(alpha)[0]

    def fixed_point(
        self, bounds: tuple[float, float], learn_noise: bool = False, follow: bool = False
    ) -> tuple[float, float, float]:
        """MacKay's fixed point: `α` (before the factor of the noise), that factor, and the probes' error of `log α`.

        Args:
            bounds: within which it is sought; a bound is returned if there is none between.
            learn_noise: joint with the noise precision.
            follow: the fixed point that the update leads to from `at`; else the one of most evidence.
        """
        grid = torch.logspace(math.log10(bounds[0]), math.log10(bounds[1]), 800, dtype=torch.float64)
        value, factor = self.mackay(grid, learn_noise)
        up = ((value[:-1] < 0) & (value[1:] >= 0)).nonzero()[:, 0]
        if len(up) == 0:
            end = 0 if value[0] > 0 else -1
            return float(grid[end]), float(factor[end]), math.inf
        if follow:
            here = int(torch.searchsorted(grid, torch.tensor(self.at, dtype=torch.float64)).clamp(0, len(grid) - 1))
            ahead = up[up >= here - 1] if value[here] < 0 else up[up < here].flip(0)
            chosen = int(ahead[0]) if len(ahead) else int(up[(up - here).abs().argmin()])
        else:
            chosen = int(up[self._profile(grid[up], learn_noise).argmax()])
        low, high, v0, v1 = grid[chosen].log(), grid[chosen + 1].log(), value[chosen], value[chosen + 1]
        log_alpha = low - v0 * (high - low) / (v1 - v0)
        alpha = log_alpha.exp()[None]
        gamma, error = (
            self.effective_dimension(alpha)[0],
            self._probe_variance(lambda t: t / (t + alpha[:, None])).sqrt(),
        )
        slope = max(float((v1 - v0) / (high - low)), 0.05)
        final_factor = self.mackay(alpha, learn_noise)[1]
        return float(alpha), float(final_factor), float(error / gamma) / slope


@dataclass(frozen=True)
class EvidenceCurves:
    """Curves over the prior precision, all `[n]`, in float64 on the CPU; logarithms are natural, sums over the data.

    Attributes:
        prior_precision: `α`.
        effective_dimension: `γ(α)`, and its standard error.
        mode_norm: `‖θ̄(α)‖²` in the scaled coordinates of the prior.
        log_determinant: `log|I + M/α|`, and its standard error.
        data_fit: `Σ_i ℓ(y_i, h(θ̄(α), x_i))`.
        log_marginal_likelihood: `log p(y | α)`, and its standard error.
        at: the fitted `α`, where the curvature is taken.
    """

    prior_precision: Float[Tensor, " n"]
    effective_dimension: Float[Tensor, " n"]
    effective_dimension_se: Float[Tensor, " n"]
    mode_norm: Float[Tensor, " n"]
    log_determinant: Float[Tensor, " n"]
    log_determinant_se: Float[Tensor, " n"]
    data_fit: Float[Tensor, " n"]
    log_marginal_likelihood: Float[Tensor, " n"]
    log_marginal_likelihood_se: Float[Tensor, " n"]
    at: float

    @classmethod
    def of(cls, path: EvidencePath, alpha: Float[Tensor, " n"]) -> "EvidenceCurves":
        return cls(
            alpha,
            *path.effective_dimension(alpha),
            path.mode_norm(alpha),
            *path.log_determinant(alpha),
            path.data_fit(alpha),
            *path.log_marginal_likelihood(alpha),
            path.at,
        )


@dataclass(frozen=True)
class MarginalLikelihood:
    """`log p(y)` at some hyperparameters; `float()` of it is the value.

    Attributes:
        value: `−data_fit − complexity`, a sum over the data.
        standard_error: of it; 0 if exact.
        lower_bound: with Bai and Golub's bound of the log determinant.
        data_fit: `Σ_i ℓ(y_i, h(θ̄, x_i))`.
        complexity: `½ θ̄ᵀAθ̄ + ½ log|I + A⁻¹M|`.
        balance: for a Gaussian likelihood with one noise precision `(b·SSE + θ̄ᵀAθ̄) / (N·C)`, which is 1 where
            evidence is largest; else `None`.
        exact: whether all eigenvalues were at hand.
    """

    value: float
    standard_error: float
    lower_bound: float
    data_fit: float
    complexity: float
    balance: float | None
    exact: bool

    def __float__(self) -> float:
        return self.value

    @classmethod
    def of(cls, path: EvidencePath, alpha: float) -> "MarginalLikelihood":
        a = torch.tensor([alpha], dtype=torch.float64)
        value, error = path.log_marginal_likelihood(a)
        bound = -path.data_fit(a) - 0.5 * a * path.mode_norm(a) - 0.5 * path.log_determinant_bound(a)
        balance = None if path.noise_precision is None else 1 / float(path.noise_factor(a))
        return cls(
            float(value),
            0.0 if path.exact else float(error),
            float(bound),
            float(path.data_fit(a)),
            float(path.complexity(a)),
            balance,
            path.exact,
        )


@dataclass(frozen=True)
class PathResult:
    """What `fit_path` ends with: hyperparameters, mode `[P]` (unscaled), the curves, and a record of each round."""

    prior: GaussianPrior
    likelihood: Likelihood
    mode: Float[Tensor, " P"]
    path: EvidencePath
    converged: bool
    history: list[EMStep]


@dataclass(frozen=True)
class _Run:
    """Quadratures of the probes and of the right-hand side, and the bases behind them."""

    traces: Quadrature
    fit: Quadrature
    basis: Basis
    rhs_basis: Basis
    rhs: Float[Tensor, "1 P"]

    @property
    def passes(self) -> float:
        return self.basis.passes + (0.0 if self.basis is self.rhs_basis else self.rhs_basis.passes)

    def mode(self, alpha: float) -> Float[Tensor, "1 P"]:
        """`(M + α)⁻¹ b`."""
        T = self.rhs_basis.T
        inner = T + alpha * torch.eye(len(T), dtype=T.dtype, device=T.device)
        return self.rhs_basis.combine(torch.linalg.solve(inner, self.rhs_basis.project(self.rhs).T).T)


def _run(
    operator: Operator,
    probes: Float[Tensor, "R P"],
    rhs_operator: Operator,
    rhs: Float[Tensor, "1 P"],
    stop: Callable[[_Run], bool],
    max_basis: int | None,
) -> _Run:
    """Block Lanczos with reorthogonalisation; `stop` says when it is accurate enough."""
    basis = Basis(operator)
    joint = rhs_operator is operator
    rhs_basis = basis if joint else Basis(rhs_operator)
    if not joint:
        rhs_basis.extend(rhs)
    basis.extend(torch.cat([rhs, probes]) if joint else probes)
    sizes, rhs_sizes = [basis.size], [rhs_basis.size]
    while True:
        room = _has_room(basis, max_basis) and _has_room(rhs_basis, max_basis)
        grown = room and basis.extend(basis.last_product) > 0
        if grown:
            sizes.append(basis.size)
        if joint:
            rhs_sizes = sizes
        elif room:
            for _ in range(2):  # a single vector needs more steps than a block, and its steps cost little
                if rhs_basis.extend(rhs_basis.last_product):
                    rhs_sizes.append(rhs_basis.size)
                    grown = True
        exact = room and not grown  # nothing left to add: the space is invariant
        traces = Quadrature.of_trace(basis, probes, sizes, exact)
        run = _Run(traces, Quadrature.of(rhs_basis, rhs, rhs_sizes, exact), basis, rhs_basis, rhs)
        if not grown or stop(run):
            return run


def _has_room(basis: Basis, max_basis: int | None) -> bool:
    return max_basis is None or basis.size + len(basis.last_product) <= max_basis


def one_noise(likelihood: Likelihood) -> float | None:
    """The noise precision of a Gaussian likelihood with one for all outputs; else `None`."""
    if not isinstance(likelihood, Gaussian):
        return None
    precision = torch.as_tensor(likelihood.noise_precision)
    return float(precision) if precision.dim() == 0 else None


@dataclass(frozen=True)
class _Expansion:
    """The loss around a mode, `loss − bᵀθ + ½‖θ‖²_M`, in coordinates in which the prior is isotropic.

    `path` has all that is known without a spectrum; `white` takes the coordinates to the scaled ones of the prior.
    """

    at_mode: GGN
    operator: GGN
    rhs: Float[Tensor, "1 P"]
    white: Float[Tensor, " P"]
    path: EvidencePath


def _expand(model: LinearModel, prior: GaussianPrior, mode: Float[Tensor, "1 P"], hessian_at: str) -> _Expansion:
    objective = ModeObjective(model, prior)
    mean = float(prior.spread().double().log().mean().exp())
    white = (mean / prior.spread()).sqrt()
    whitened = replace(model, features=ScaledFeatures(model.features, prior.scale * white))
    outputs = model.outputs(mode * prior.scale)[0]
    at_mode = whitened.ggn(outputs)
    gaussian = isinstance(model.likelihood, Gaussian)
    gradient = (objective.gradient(mode, None) - objective.precision * mode) * white
    theta = mode / white
    passes, product = 1.5, torch.zeros_like(mode)
    if bool(theta.any()):
        product, passes = at_mode.matmul(theta), passes + 1
    loss = float(model.likelihood.loss(outputs, model.targets).double().sum())
    loss -= float((gradient.double() * theta.double()).sum())
    loss += 0.5 * float((theta.double() * product.double()).sum())
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    unknown = Quadrature(nothing[0], nothing, nothing)
    path = EvidencePath(
        traces=unknown,
        fit=unknown,
        loss=loss,
        num_outputs=outputs.numel(),
        size=len(white),
        noise_precision=one_noise(model.likelihood),
        at=mean,
        exact=False,
        passes=passes,
    )
    same = gaussian or hessian_at == "mode"
    operator = at_mode if same else whitened.ggn(model.network_outputs)
    return _Expansion(at_mode, operator, product - gradient, white, path)


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
    expansion = _expand(model, prior, mode, hessian_at)
    quadratic = isinstance(model.likelihood, Gaussian)
    probes = draws.prior(model.features.size).to(mode)
    probes = probes * (math.sqrt(model.features.size) / probes.norm(dim=1, keepdim=True))

    def path_of(run: _Run) -> EvidencePath:
        passes = expansion.path.passes + run.passes
        return replace(expansion.path, traces=run.traces, fit=run.fit, passes=passes)

    def stop(run: _Run) -> bool:
        path = path_of(run)
        if decades is not None:
            ends = path.at * torch.tensor([10.0**-decades, 1.0, 10.0**decades], dtype=torch.float64)
            return path.last_change_of_evidence(ends) < accuracy
        alpha = path.fixed_point(bounds, learn_noise, follow=not quadratic)[0]
        return path.last_change(alpha) < accuracy

    run = _run(expansion.operator, probes, expansion.at_mode, expansion.rhs, stop, max_basis)
    return path_of(run), lambda alpha: run.mode(alpha) * expansion.white


def exact_path(
    model: LinearModel, prior: GaussianPrior, mode: Float[Tensor, "1 P"], *, hessian_at: str
) -> EvidencePath:
    """The same curves from all eigenvalues, by dense algebra: for small problems."""
    expansion = _expand(model, prior, mode, hessian_at)

    def spectrum(operator: GGN) -> tuple[Tensor, Tensor]:
        root = torch.cat([block.double() for block in operator.root_rows()])
        if len(root) < operator.size:
            values, vectors = torch.linalg.eigh(root @ root.T)
            scaled = (vectors.T @ root) / values.clamp_min(1e-300).sqrt()[:, None]
            return values, torch.where((values > 1e-14 * values[-1])[:, None], scaled, 0.0)
        values, vectors = torch.linalg.eigh(root.T @ root)
        return values, vectors.T

    values, vectors = spectrum(expansion.at_mode)
    weights = (expansion.rhs.double() @ vectors.T) ** 2
    same = expansion.operator is expansion.at_mode
    trace_values = values if same else spectrum(expansion.operator)[0]
    nodes, ones = trace_values.clamp_min(0).cpu(), torch.ones(1, len(trace_values), dtype=torch.float64)
    fit = weights.cpu()
    return replace(
        expansion.path,
        traces=Quadrature(nodes, ones, ones),
        fit=Quadrature(values.clamp_min(0).cpu(), fit, fit),
        exact=True,
    )


# Standard errors of log α that successive rounds of `fit_path` aim at: B moves with α, and rounds far from the end
# need not be exact. The last one is half the tolerance.
_ROUNDS = (0.25, 0.08, 0.03)


# Within this factor of the present α the expansion at the mode is trusted; farther off the plain update is.
_TRUSTED = 4.0
# By what a round shrinks the distance to the end where B is at the mode: seen in practice, then measured.
_RATE = 0.4


def _next_precision(
    path: EvidencePath, fixed_point: float, before: float, visited: list[tuple[float, float]], rate: float
) -> tuple[float, float]:
    """The next `α` while `B` moves with it, and the rate at which rounds converge without the secant step.

    `visited` has `(log α, log of the fixed point of its curves)` of earlier rounds, to which this one is added.
    """
    if not 1 / _TRUSTED <= fixed_point / before <= _TRUSTED:
        visited.clear()
        plain = before / math.exp(float(path.mackay(torch.tensor([before]))[0]))
        return min(max(plain, before / 1e3), before * 1e3), rate
    x, s = math.log(before), math.log(fixed_point)
    visited.append((x, s))
    if len(visited) > 1 and abs(x - visited[-2][0]) > 0.1:
        rate = min(max((s - visited[-2][1]) / (x - visited[-2][0]), -0.3), 0.6)
    return math.exp(s + rate / (1 - rate) * (s - x)), rate


def _per_probe(path: EvidencePath, alpha: float, error: float, num_probes: int) -> float:
    """Standard error of `log α` by one probe, to choose how many the next round needs."""
    # Few Lanczos steps find too little of the variance; Tr (H⁻¹M)² is about a third of γ where spectra decay.
    gamma = float(path.effective_dimension(torch.tensor([alpha]))[0])
    return max(error * math.sqrt(num_probes), math.sqrt(0.25 / max(gamma, 1e-3)))


def fit_path(
    model: LinearModel,
    prior: GaussianPrior,
    seed: int,
    stream: int,
    *,
    hessian_at: str,
    tolerance: float = 0.03,
    max_rounds: int = 12,
    max_probes: int = 64,
    precision_bounds: tuple[float, float] = (1e-8, 1e12),
    noise_bounds: tuple[float, float] = (1e-12, 1e12),
    max_basis: int | None = None,
    progress: bool = False,
    callback: Callable[[EMStep], object] | None = None,
) -> PathResult:
    r"""Prior precision (one group) and noise precision (one for all outputs) at MacKay's fixed point, by Krylov runs.

    Each round finds the mode at the present `α`, makes one Krylov run there, and goes to the fixed point of its curves.
    With a Gaussian likelihood `B` is constant and the curves are exact; else rounds go on until `α` stays, with more
    probes as it settles.

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
        progress: show progress bars.
        callback: called with the record of each round.
    """
    features, likelihood = model.features, model.likelihood
    prior = prior.to(features.device, features.dtype)
    quadratic = isinstance(likelihood, Gaussian)
    learn = isinstance(likelihood, Gaussian) and likelihood.learn
    path: EvidencePath | None = None
    mode = torch.zeros(1, features.size, device=features.device, dtype=features.dtype)
    targets = [*(level for level in _ROUNDS if level > tolerance), tolerance / 2]
    if quadratic or hessian_at == "network":
        targets = [targets[0], targets[-1]]
    level, per_probe, history, converged = 0, 0.15, [], False
    moving = not quadratic and hessian_at == "mode"
    rate, visited = _RATE if moving else 0.0, []
    bar = tqdm(total=len(targets), desc="evidence", disable=not progress)
    while len(history) < max_rounds and not converged:
        started, passes = time.perf_counter(), 0.0
        mode_residual = 0.0
        if not quadratic:
            label = f"round {len(history) + 1}: mode" if progress else None
            rough = CG(tolerance=max(targets[level], tolerance))
            minimum = linear_model_mode(model, prior, rough, mode, description=label)
            mode, passes, mode_residual = minimum.value, minimum.passes, minimum.residual
        num_probes = min(max_probes, max(1 + level, math.ceil((per_probe / targets[level]) ** 2)))
        path, mode_at = evidence_path(
            model,
            prior,
            Draws(num_probes, seed, stream),
            mode,
            hessian_at=hessian_at,
            accuracy=targets[level],
            learn_noise=learn,
            bounds=precision_bounds,
            max_basis=max_basis,
        )
        before = float(prior.precision)
        alpha, factor, error = path.fixed_point(precision_bounds, learn, follow=not quadratic)
        if math.isfinite(error):
            per_probe = _per_probe(path, alpha, error, num_probes) / (1 - (_RATE if moving else 0.0))
        if not quadratic:
            alpha, rate = _next_precision(path, alpha, before, visited, rate)
        mode = mode_at(alpha)
        noise = []
        if isinstance(likelihood, Gaussian):
            noise = torch.as_tensor(likelihood.noise_precision).reshape(-1).tolist()
            if learn:
                kept = min(max(noise[0] * factor, noise_bounds[0]), noise_bounds[1])
                likelihood, factor = likelihood.with_precision(kept), kept / noise[0]
        updated = min(max(alpha * factor, precision_bounds[0]), precision_bounds[1])
        model = model.with_likelihood(likelihood)
        at = torch.tensor([alpha], dtype=torch.float64)
        gamma, gamma_se = path.effective_dimension(at)
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
                network_loss=float(model.likelihood.loss(model.network_outputs, model.targets).double().sum()),
                mode_residual=mode_residual,
                sample_residual=0.0,
                passes=passes + path.passes,
                seconds=time.perf_counter() - started,
            )
        )
        moved = abs(math.log(updated / before))
        prior = prior.with_precision(torch.tensor([updated], dtype=torch.float64))
        if callback is not None:
            callback(history[-1])
        # What is left after a move is what the curvature will change by it; after a plain step nothing is known.
        if quadratic or (visited and max(abs(rate), 0.1) * moved <= tolerance):
            converged = level == len(targets) - 1
        if quadratic or moved <= 3 * targets[level]:
            level = min(level + 1, len(targets) - 1)
            bar.update()
        bar.set_postfix(alpha=f"{updated:.3g}", gamma=f"{float(gamma):.3g}")
    bar.close()
    assert path is not None
    return PathResult(prior, likelihood, (mode * prior.scale)[0], path, converged, history)
