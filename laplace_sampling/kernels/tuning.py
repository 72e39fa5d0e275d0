r"""Hyperparameters of Gaussian processes by the evidence, on data that no factor fits.

    log p(y | θ) = −½ rᵀA⁻¹r − ½ log det A − ½ N log 2π,   A = K + S,   r = y − m(X)

Its gradient takes solutions of linear systems (the pathwise estimator; Lin, Padhy, Antorán and others, 2024): with
`v_y = A⁻¹r`, and `v_j = A⁻¹(f_j(X) + ε_j)`, whose covariance is `A⁻¹`, it is that of

    ½ v_yᵀ A(θ) v_y + v_yᵀ m_θ(X) − 1/(2K) Σ_j v_jᵀ A(θ) v_j

with `v` held fixed. The `v_j` are what samples of the posterior are made of.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.arguments import check_positive, check_whole
from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.kernels.kernel_rows import KernelRows, kernel_matrix
from laplace_sampling.kernels.prior import Prior
from laplace_sampling.kernels.prior_draws import PriorDraws
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER, normal
from laplace_sampling.solvers.row_blocks import Automatic
from laplace_sampling.solvers.solver import ConvergenceWarning, Quadratic

# Data up to which the evidence is exact: a factor and its derivative cost less there than solves. Beyond, so many of
# them give the point from which the search starts.
_EXACT = 2000
# Nats, in all: the search ends where a step would gain less.
_ENOUGH = 1e-3
METHODS = ("auto", "exact", "pathwise")


@dataclass(frozen=True)
class Tuned:
    """What a search has found; the hyperparameters themselves are in the model.

    Attributes:
        gain: by how much the evidence, with the priors of hyperparameters, is larger than before, in nats per datum.
        method: `"exact"` or `"pathwise"`.
        evaluations: of the evidence and its gradient, on all data.
        passes: products of the kernel matrix with all columns that these took.
        converged: whether the search has ended by itself, and not by the budget.
        error: of the last solves, as that of `KernelPosterior`; 0 for a factor.
    """

    gain: float
    method: str
    evaluations: int
    passes: float
    converged: bool
    error: float


def tune(
    model: gpytorch.models.ExactGP,
    num_samples: int = 16,
    *,
    method: str = "auto",
    max_passes: int = 1000,
    tolerance: float = 0.01,
    seed: int = 0,
) -> Tuned:
    r"""Sets the hyperparameters of a model to those of the largest evidence, as `fit_gpytorch_mll` of BoTorch does.

        >>> import gpytorch, torch
        >>> from laplace_sampling.kernels import condition, tune
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> model = Model(x, (6 * x[:, 0]).sin()).double()
        >>> found = tune(model)
        >>> found.gain > 0.5, found.converged, model.likelihood.noise.item() < 0.01
        (True, True, True)
        >>> posterior = condition(model)

    **The model is changed**, in place: all its parameters that require a gradient are tuned, those of its likelihood,
    mean, kernel and features alike, and it is in evaluation mode afterwards. Constraints hold, and priors on
    hyperparameters count. The search itself takes a copy in float64: if it fails, or finds nothing better, the model
    has the hyperparameters that it had.

    The objective is `log p(y | θ) + log p(θ)`. Up to 2,000 data it is computed from a Cholesky factor. Beyond, the
    gradient is estimated from solves for the targets and `K` draws of noisy targets from the prior, which are the same
    functions of the hyperparameters throughout, and the evidence is its integral along the steps. With fixed draws the
    evidence that is found is about `p/2K` nats below the largest, in all and not per datum, for `p` hyperparameters.
    Solves start from those of the last step. The search is L-BFGS, with the steps that it chooses itself, and starts at
    the hyperparameters of the model, or at those of 2,000 random data, if the evidence of all data is larger there.

    Args:
        model: as `condition` takes it, also in training mode.
        num_samples: `K`.
        method: `"exact"` (a factor of all data at each evaluation), `"pathwise"`, or `"auto"`.
        max_passes: the budget of the search on all data, in products of the kernel matrix with all columns. A gradient
            counts as three.
        tolerance: of the solves, as in `condition`.
        seed: of draws, solves, and the random data.

    Returns:
        What the search has gained and taken.

    Raises:
        TypeError: if the model is no `ExactGP`, or its likelihood is not Gaussian.
        ValueError: if it has no data, several outputs, a batch shape, or no parameter that requires a gradient.
        NotImplementedError: for kernels whose prior cannot be drawn as a function, by the pathwise estimator.
        FloatingPointError: if the evidence is not finite at the hyperparameters of the model.
    """
    check_whole("`tune(num_samples=...)`", num_samples, 1)
    check_whole("`tune(max_passes=...)`", max_passes, 1)
    check_positive("`tune(tolerance=...)`", tolerance, 1)
    check_whole("`tune(seed=...)`", seed, 0)
    if method not in METHODS:
        raise ValueError(f"`tune(method={method!r:.80})` is not known; use one of {sorted(METHODS)}.")
    point = Hyperparameters(model)
    n = len(point.y)
    if method == "auto":
        method = "exact" if n <= _EXACT else "pathwise"
    if method == "exact":
        evidence = ExactEvidence(point, torch.arange(n))
        search = Search(point, evidence, n)
    else:
        evidence = PathwiseEvidence(point, num_samples, tolerance, seed)
        search = Search(point, evidence, n, max_passes, len(point.get()) / (2 * num_samples))
        if n > _EXACT:
            some = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:_EXACT]
            of_some = Search(point, ExactEvidence(point, some), _EXACT)
            of_some.run()
            search.move(of_some.at - search.at)
    converged = search.run()
    if search.gain > 0:
        point.set(search.at)
        point.write_to(model)
    model.train()  # drops what was cached, and the inputs that old hyperparameters have transformed
    model.eval()
    if not converged:
        warnings.warn(
            f"`tune` ended after {search.passes:.0f} passes, before the evidence had its maximum: raise `max_passes`, "
            "or call it again, which goes on from here.",
            ConvergenceWarning,
            stacklevel=2,
        )
    return Tuned(search.gain, method, search.evaluations, search.passes, converged, evidence.error)


class Hyperparameters:
    """The hyperparameters of a copy of a model as one vector without constraints, and its data.

    What is positive is taken by its logarithm, and what lies between two bounds by that of the ratio of the distances
    from both, whether GPyTorch has a constraint as a transform or (as BoTorch's are) as bounds for the optimiser.

    Attributes:
        prior: the copy.
        x, y: inputs as the user has given them, and targets as the model has them.
    """

    def __init__(self, model: Any) -> None:
        self.prior = Prior(model, "tune")
        copied = self.prior.model
        for own, given in zip(copied.parameters(), model.parameters(), strict=True):
            own.requires_grad_(given.requires_grad)
        (x,) = copied.train().train_inputs
        copied.eval()
        self.x, self.y = x.double(), copied.train_targets.double()
        named = copied.named_parameters_and_constraints()
        self._parts = [(one, constraint) for _, one, constraint in named if one.requires_grad]
        if not self._parts:
            raise ValueError("`tune` found no parameter of the model that requires a gradient: there is none to tune.")
        self._raw = list[Tensor]()

    @torch.no_grad()
    def get(self) -> Tensor:
        """The vector."""
        return torch.cat([_free(one, constraint).flatten().cpu() for one, constraint in self._parts])

    def set(self, point: Float[Tensor, " p"]) -> None:
        """Gives the copy a vector."""
        self._vector = point.clone().requires_grad_()
        pieces = self._vector.split([one.numel() for one, _ in self._parts])
        self._raw = []
        for (one, constraint), piece in zip(self._parts, pieces, strict=True):
            raw = _raw(piece.to(one.device).reshape(one.shape), constraint)
            self._raw.append(raw)
            one.data.copy_(raw.detach())
            one.grad = None

    def gradient(self) -> Float[Tensor, " p"]:
        """The gradient that is accumulated, in the coordinates of the vector."""
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one, _ in self._parts]
        return torch.autograd.grad(self._raw, self._vector, gradients)[0]

    def noise(self) -> Float[Tensor, " N"]:
        """Noise variances of the data."""
        return self.prior.model.likelihood.noise.expand(len(self.y))

    def log_prior(self) -> Tensor:
        """`log p(θ)` by the priors that are registered."""
        terms = [prior.log_prob(of(module)).sum() for _, module, prior, of, _ in self.prior.model.named_priors()]
        return sum(terms, torch.zeros((), dtype=torch.float64, device=self.y.device))

    @torch.no_grad()
    def write_to(self, model: Any) -> None:
        for given, own in zip(model.parameters(), self.prior.model.parameters(), strict=True):
            given.copy_(own)


def _limits(constraint: Any) -> tuple[Any, Any]:
    """Finite bounds of a parameter, or none."""
    if constraint is None:
        return None, None
    bounds = (constraint.lower_bound.double(), constraint.upper_bound.double())
    low, high = (bound if bool(bound.isfinite().all()) else None for bound in bounds)
    return low, high


def _free(parameter: Tensor, constraint: Any) -> Tensor:
    """The coordinates of a parameter that have no bounds."""
    low, high = _limits(constraint)
    value = constraint.transform(parameter) if constraint is not None and constraint.enforced else parameter
    least = torch.finfo(torch.float64).tiny  # of what has reached a bound
    total = torch.zeros_like(value)
    if low is not None:
        total = total + (value - low).clamp_min(least).log()
    if high is not None:
        total = total - (high - value).clamp_min(least).log()
    return value if low is None and high is None else total


def _raw(free: Tensor, constraint: Any) -> Tensor:
    """The parameter of these coordinates."""
    low, high = _limits(constraint)
    value = free
    if low is not None and high is not None:
        value = low + (high - low) * free.sigmoid()
    elif low is not None:
        value = low + free.exp()
    elif high is not None:
        value = high - (-free).exp()
    return constraint.inverse_transform(value) if constraint is not None and constraint.enforced else value


@dataclass
class ExactEvidence:
    """The evidence of some data, and its gradient by backpropagation."""

    point: Hyperparameters
    rows: Tensor
    error: float = 0.0

    def __call__(self) -> float:
        """Accumulates the gradient, and returns the passes that it took."""
        point = self.point
        mean, kernel, x = point.prior.evaluated(point.x[self.rows])
        A = kernel_matrix(kernel, x, x) + torch.diag(point.noise()[self.rows])
        factor = torch.linalg.cholesky(A)
        white = torch.linalg.solve_triangular(factor, (point.y[self.rows] - mean)[:, None], upper=False)
        value = -0.5 * white.square().sum() - factor.diagonal().log().sum() + point.log_prior()
        value.backward()
        return 1.0


@dataclass
class PathwiseEvidence:
    """The gradient of the evidence of all data, by the estimator of the module."""

    point: Hyperparameters
    num_samples: int
    tolerance: float
    seed: int
    num_features: int = 2000
    weights: Tensor | None = None
    error: float = 0.0

    def __call__(self) -> float:
        """Accumulates the gradient, and returns the passes that it took."""
        passes = self._solve()
        assert self.weights is not None
        point, weights, n = self.point, self.weights, len(self.point.y)
        coefficients = torch.full((len(weights), 1), -0.5 / self.num_samples).to(weights)
        coefficients[0] = 0.5
        mean, kernel, x = point.prior.evaluated(point.x)
        rest = weights[0] @ mean + point.noise() @ (coefficients * weights.square()).sum(0) + point.log_prior()
        # Where features have parameters, all blocks share their graph, which is passed through once.
        leaf = x.detach().requires_grad_(x.requires_grad)
        for rows in torch.arange(n).split(max(1, NUMBERS_TOGETHER // n)):
            block = kernel_matrix(kernel, leaf[rows], leaf)
            of_block = (((coefficients * weights[:, rows]).T @ weights) * block).sum()
            if of_block.requires_grad:
                of_block.backward()
        if leaf.grad is not None:
            rest = rest + (x * leaf.grad).sum()
        rest.backward()
        return passes + 3

    @torch.no_grad()
    def _solve(self) -> float:
        """Takes the solutions at the present hyperparameters; returns the passes."""
        point, n = self.point, len(self.point.y)
        mean, kernel, x = point.prior.evaluated(point.x)
        noise = point.noise()
        # Frequencies of its own for each draw: with 16 draws of a Matérn kernel and a noise of 2e-3 of the signal, the
        # evidence that 600 data end with is .002 nats per datum below the largest, and .006 if eight draws share them.
        draws = PriorDraws(kernel, x.shape[1], self.num_samples, self.seed, self.num_features, 1)(x)
        white = normal(self.num_samples, n, seed=self.seed + 1, dtype=torch.float64, device=x.device)
        targets = torch.cat([(point.y - mean)[None], draws + white * noise.sqrt()])
        rows = KernelRows(kernel, x, float(noise.min()))
        problem = Quadratic(rows, noise, torch.zeros_like(targets), targets, dual=True)
        solution = Automatic(tolerance=self.tolerance, seed=self.seed).solve(problem, self.weights)
        self.weights, self.error = solution.value, float(solution.error.max())
        return solution.passes / len(targets)


class Search:
    """L-BFGS on the negative objective per datum, from its gradients alone.

    The objective changes by the integral of the gradient along a step, by the trapezoidal rule. A step changes no
    coordinate by more than one, a hyperparameter by a factor of e, along which the rule can be trusted.

    Attributes:
        at, gradient: the point of the largest objective so far, and its gradient.
        gain: of the objective, per datum.
        evaluations, passes: what it has taken.
    """

    def __init__(
        self,
        point: Hyperparameters,
        evidence: Callable[[], float],
        count: int,
        max_passes: float = math.inf,
        enough: float = 0.0,
    ) -> None:
        self._point, self._evidence, self._count, self._max_passes = point, evidence, count, max_passes
        # Nats, in all: the search ends where a step would gain less.
        self._enough = max(_ENOUGH, enough)
        self.passes, self.evaluations, self.gain, self.at = 0.0, 0, 0.0, point.get()
        gradient = self._gradient(self.at)
        if gradient is None:
            raise FloatingPointError(
                "`tune` found no finite evidence at the hyperparameters of the model: check these, and the data."
            )
        self.gradient = gradient
        self._pairs = list[tuple[Tensor, Tensor]]()

    def _gradient(self, at: Tensor) -> Tensor | None:
        """The gradient, if it is finite."""
        self._point.set(at)
        self.evaluations += 1
        try:
            with torch.enable_grad():
                self.passes += self._evidence()
        except (torch.linalg.LinAlgError, FloatingPointError):  # pyright: ignore[reportPrivateImportUsage]
            return None
        gradient = -self._point.gradient() / self._count
        return gradient if bool(gradient.isfinite().all()) else None

    def move(self, step: Tensor) -> Tensor | None:
        """Takes a step if the objective grows; returns the gradient at its end."""
        gradient = self._gradient(self.at + step)
        if gradient is not None and (gain := -0.5 * float((self.gradient + gradient) @ step)) > 0:
            self.at, self.gradient, self.gain = self.at + step, gradient, self.gain + gain
        return gradient

    def _direction(self, plain: bool) -> Tensor:
        """The step of Newton's method with the curvature that the steps so far have seen, or the least of these."""
        if not self._pairs:
            return -self.gradient / self.gradient.norm().clamp_min(torch.finfo(torch.float64).tiny)
        if plain:
            return -self.gradient * max(float(step @ step) / float(step @ change) for step, change in self._pairs)
        q, factors = self.gradient.clone(), []
        for step, change in reversed(self._pairs):
            factors.append(float(step @ q) / float(step @ change))
            q -= factors[-1] * change
        step, change = self._pairs[-1]
        q *= float(step @ change) / float(change @ change)
        for (step, change), factor in zip(self._pairs, reversed(factors), strict=True):
            q += (factor - float(change @ q) / float(step @ change)) * step
        return -q

    def run(self) -> bool:
        """Searches; returns whether the search has ended by itself."""
        # After few steps Newton's method knows few directions. So the gradient itself has a say before the end.
        plain = False
        while True:
            step = self._direction(plain)
            step = step / max(1.0, float(step.abs().max()))
            start, gradient = self.at, self.gradient
            while self.at is start:
                if self.passes >= self._max_passes:
                    return False
                before = float(gradient @ step)
                if -0.5 * before * self._count < self._enough:
                    break
                found = self.move(step)
                # Where the slope along the step vanishes, by the secant.
                after = math.inf if found is None else float(found @ step)
                if self.at is start:
                    step = step * min(0.5, max(0.1, before / (before - after)))
            if self.at is start and plain:
                return True
            plain = self.at is start
            if float((change := self.gradient - gradient) @ step) > 0:
                self._pairs.append((step, change))
