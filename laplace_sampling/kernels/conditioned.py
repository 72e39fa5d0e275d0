r"""Posteriors of Gaussian processes with any kernel, as functions, on data that no factor fits.

    f_k | y = f_k + k(·, X) (K + S)⁻¹ (y − m(X) − f_k(X) − ε_k),   f_k ~ GP(m, k),  ε_k ~ N(0, S)

(Matheron's rule): one linear system for the mean and all samples, solved together. Prior draws are functions
(`prior_draws`); what the data say goes through the kernel itself.
"""

import math
import warnings

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.arguments import as_numbers, check_positive, check_whole
from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.kernels.inducing import inducing_weights
from laplace_sampling.kernels.kernel_rows import KernelRows, kernel_matrix
from laplace_sampling.kernels.paths import KernelPaths
from laplace_sampling.kernels.prior import Prior, variances
from laplace_sampling.kernels.prior_draws import PriorDraws
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER, normal
from laplace_sampling.solvers.row_blocks import SOLVERS, RowSolver
from laplace_sampling.solvers.solver import ConvergenceWarning, Quadratic, Solution


def condition(
    model: gpytorch.models.ExactGP,
    num_samples: int = 64,
    *,
    inducing: Float[Tensor, "m D"] | int | None = None,
    solver: str = "auto",
    tolerance: float = 0.01,
    max_passes: int = 100,
    seed: int = 0,
) -> "KernelPosterior":
    r"""The posterior of a fitted `ExactGP` of GPyTorch or `SingleTaskGP` of BoTorch, which stays as it is.

        >>> import gpytorch, torch
        >>> from laplace_sampling.kernels import condition
        >>> class Model(gpytorch.models.ExactGP):
        ...     def __init__(self, x, y):
        ...         super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        ...         self.mean_module = gpytorch.means.ConstantMean()
        ...         self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5))
        ...     def forward(self, x):
        ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
        >>> x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> model = Model(x, (6 * x[:, 0]).sin()).double().eval()  # after training, as GPyTorch's tutorials do it
        >>> posterior = condition(model)
        >>> new = torch.tensor([[0.5, 0.5], [3.0, 3.0]], dtype=torch.float64)
        >>> posterior.mean(new).shape, posterior.samples(new).shape
        (torch.Size([2]), torch.Size([64, 2]))
        >>> bool(posterior.variance(new)[0] < posterior.variance(new)[1])
        True
        >>> posterior.solver, bool(posterior.error < 0.01)
        ('auto', True)

    The kernel is evaluated in float64, in blocks of rows. Its matrix is held if it fits in half of the free memory, in
    float32 if only that fits and its rounding is small against the noise, and else is computed at every pass.

    Args:
        model: in evaluation mode, with one output and Gaussian noise. Its `forward` may compute features of the inputs
            first; the covariance is one kernel of these. The posterior keeps a copy: later training does not change it.
        num_samples: `K`. Means have no noise of samples; variances have a relative standard error of `√(2/K)`, and of
            up to three times that where data with a noise of 1e-4 of the signal leave little of it: what is left then
            lies in rare frequencies, and eight draws share 2,000 random ones.
        inducing: `m` points, or how many of the data shall be points, at random. Mean and samples are then those
            combinations of the kernel at these points that fit all data best, in one pass over them and without a
            solver: `2Nm²` operations, and memory for `3m²` numbers. Prior draws stay whole, so that away from the
            points variances are those of the prior.
        solver: `"exact"` is a Cholesky factor. `"cg"` takes conjugate gradients with a preconditioner of some rows of
            the matrix, `"projections"` the equations of one block of data at a time, and `"dual_descent"` those of a
            few data; none has a step size to tune. `"auto"` takes the factor where it fits in memory and costs less
            than `max_passes`, or else a few passes of projections and then conjugate gradients.
        tolerance: of the function at the data, relative: `error` shall be below it.
        max_passes: the largest number of products of the kernel matrix with all columns.
        seed: of the samples and the solver.

    Raises:
        TypeError: if the model is no `ExactGP`, or its likelihood is not Gaussian.
        ValueError: if it is in training mode, has no data, several outputs or a batch shape; for inducing points
            together with a solver.
        NotImplementedError: for kernels whose prior cannot be drawn as a function; for outcome transforms other than
            `Standardize`.
    """
    check_whole("`condition(num_samples=...)`", num_samples, 1)
    check_whole("`condition(max_passes=...)`", max_passes, 1)
    check_positive("`condition(tolerance=...)`", tolerance, 1)
    check_whole("`condition(seed=...)`", seed, 0)
    if solver not in SOLVERS:
        raise ValueError(f"`condition(solver={solver!r:.80})` is not known; use one of {sorted(SOLVERS)}.")
    if inducing is not None and solver != "auto":
        raise ValueError(f"`condition(inducing=...)` takes no solver, but got {solver!r}: leave one of both out.")
    prior = Prior(model)
    points = None if inducing is None else _points(prior, inducing, seed)
    settings = SOLVERS[solver](tolerance, max_passes, seed)
    draws = PriorDraws(prior.kernel, prior.x.shape[1], num_samples, seed)
    posterior = KernelPosterior(prior, draws, solver if points is None else "inducing", settings, points)
    noise = normal(num_samples, len(prior.x), seed=seed + 1, dtype=torch.float64, device=prior.x.device)
    posterior._solve(posterior._right_hand_sides(prior.x, prior.y, prior.noise, noise), None)
    return posterior


def _points(prior: Prior, inducing: Tensor | int, seed: int) -> Tensor:
    """Features of the inducing points."""
    if not isinstance(inducing, Tensor):
        check_whole("`condition(inducing=...)`, if it is no tensor,", inducing, 1)
        order = torch.randperm(len(prior.x), generator=torch.Generator().manual_seed(seed))
        return prior.x[order[:inducing]]
    with torch.no_grad():
        points = prior.at(inducing)[1]
    if not len(points) or not bool(points.isfinite().all()):
        raise ValueError("`condition(inducing=...)` needs at least one point, and no NaN or infinity in them.")
    return points


class KernelPosterior:
    """What `condition` returns: functions of inputs `[N, D]`, differentiable in them, in the units of the targets.

    Attributes:
        error: the largest error of the mean and the samples at the data, relative to their norm: a bound, with the
            rounding of a matrix that memory holds in single precision only. It is 0 with inducing points: how far these
            are from all data it does not tell.
        passes: products of the kernel matrix with all columns that the solver took.
        solver: its name, or `"inducing"`.
    """

    error: float
    passes: float

    def __init__(
        self, prior: Prior, draws: PriorDraws, solver: str, settings: RowSolver, inducing: Tensor | None = None
    ) -> None:
        self.solver, self._prior, self._draws, self._settings = solver, prior, draws, settings
        self._inducing = inducing
        # Whose kernel functions the weights are of.
        self._centres = prior.x if inducing is None else inducing

    def mean(self, x: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """The posterior mean."""
        return self.parts(x)[0]

    def variance(self, x: Float[Tensor, "N D"]) -> Float[Tensor, " N"]:
        """The posterior variance of the function, without noise: the mean square of the samples' deviations."""
        return self.parts(x)[1].square().mean(0)

    def samples(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "K N"]:
        """Functions drawn from the posterior; the same ones at every call."""
        mean, deviations = self.parts(x)
        return mean + deviations

    def noise_of_new(self) -> Float[Tensor, ""]:
        """The variance of the noise of new data.

        Raises:
            ValueError: for a model with a fixed noise for each datum.
        """
        return self._prior.noise_of_new() * self._prior.scale**2

    def sample_paths(self, num_samples: int | None = None, seed: int | None = None) -> KernelPaths:
        """Samples as functions of inputs of any batch shape, the same for all or each function's own (`KernelPaths`).

        Args:
            num_samples: `K`, at most that of `condition`; by default all.
            seed: of the choice among the samples; by default the first are taken.

        Raises:
            ValueError: if there are not as many samples.
        """
        held = len(self._targets) - 1
        count = held if num_samples is None else num_samples
        check_whole("`sample_paths(num_samples)`", count, 1)
        if count > held:
            raise ValueError(
                f"`sample_paths({count})` has {held} samples: call `condition(model, num_samples={count})`."
            )
        order = torch.arange(held)
        if seed is not None:
            order = torch.randperm(held, generator=torch.Generator().manual_seed(seed))
        return KernelPaths(self._paths, order[:count].sort().values, torch.Size([count]))

    def log_prob(
        self, x: Float[Tensor, "N D"], y: Float[Tensor, " N"], noise: Float[Tensor, " N"] | float | None = None
    ) -> Float[Tensor, " N"]:
        """Log density of each target by itself, Gaussian with the posterior mean and variance and the noise.

        Args:
            x: inputs.
            y: targets, `[N]` or `[N, 1]`.
            noise: its variance, which a model with a fixed noise for each datum does not know; by default the model's.

        Raises:
            ValueError: if shapes do not fit, or the noise of new data is not known.
        """
        mean, deviations = self.parts(x)
        if noise is None:
            noise = self.noise_of_new()
        variance = deviations.square().mean(0) + variances(noise, len(mean)).to(mean)
        y = as_numbers("`y`", y).to(mean).reshape(-1)
        if len(y) != len(mean):
            raise ValueError(f"`log_prob` needs a target for each input, but got {len(mean)} and {len(y)}.")
        return -0.5 * ((y - mean) ** 2 / variance + (2 * math.pi * variance).log())

    def extended(
        self, X_new: Float[Tensor, "M D"], Y_new: Float[Tensor, " M"], noise: Float[Tensor, " M"] | None = None
    ) -> "KernelPosterior":
        """The posterior of more data, with the same prior draws, solved from where this one has ended.

        Args:
            X_new: inputs.
            Y_new: targets, `[M]` or `[M, 1]`.
            noise: its variances, for a model with a fixed noise for each datum.

        Raises:
            ValueError: if shapes do not fit, or the noise of new data is not known.
        """
        old = self._prior
        prior = old.extended(X_new.detach(), Y_new, noise)
        other = KernelPosterior(prior, self._draws, self.solver, self._settings, self._inducing)
        n = len(old.x)
        # A seed that no earlier call has had.
        seed, count = self._settings.seed + 1 + n, len(self._targets) - 1
        white = normal(count, len(prior.x) - n, seed=seed, dtype=torch.float64, device=prior.x.device)
        new = other._right_hand_sides(prior.x[n:], prior.y[n:], prior.noise[n:], white)
        warm = torch.cat([self._weights, torch.zeros_like(new)], dim=1) if self._inducing is None else None
        other._solve(torch.cat([self._targets, new], dim=1), warm)
        return other

    @torch.no_grad()
    def _right_hand_sides(self, x: Tensor, y: Tensor, noise: Tensor, white: Tensor) -> Float[Tensor, "1+K N"]:
        """`y − m(X)`, and `f_k(X) + ε_k`, whose solutions the deviations take."""
        return torch.cat([y[None], self._draws(x) + white * noise.sqrt()])

    @torch.no_grad()
    def _solve(self, targets: Tensor, warm: Tensor | None) -> None:
        prior = self._prior
        if not bool(targets.isfinite().all()):
            raise FloatingPointError(
                "`condition` found NaN or infinity: check the inputs and hyperparameters of the model."
            )
        self._targets = targets
        if self._inducing is not None:
            self._weights = inducing_weights(prior.kernel, self._inducing, prior.x, prior.noise, targets)
            self.error, self.passes = 0.0, 1.0
            return
        rows = KernelRows(prior.kernel, prior.x, float(prior.noise.min()))
        problem = Quadratic(rows, prior.noise, torch.zeros_like(targets), targets, dual=True)
        solution: Solution = self._settings.solve(problem, warm, description=f"condition, {self.solver}")
        self._weights = solution.value
        reached, self.passes = float(solution.error.max()), solution.passes / len(targets)
        function = (targets - prior.noise * self._weights).norm(dim=1)
        rounding = rows.rounding * self._weights.norm(dim=1) / function.clamp_min(torch.finfo(function.dtype).tiny)
        self.error = float((solution.error + rounding).max())
        if reached > self._settings.tolerance:
            warnings.warn(
                f"`condition(solver={self.solver!r})` ended with an error of {self.error:.2g} of the function after "
                f"{self.passes:.0f} passes, above the tolerance of {self._settings.tolerance:g}: raise `max_passes` "
                '(or take solver="auto"), or the noise of the model.',
                ConvergenceWarning,
                stacklevel=4,  # beyond `no_grad`, too
            )

    def parts(self, x: Float[Tensor, "N D"]) -> tuple[Float[Tensor, " N"], Float[Tensor, "K N"]]:
        """The mean, and deviations of samples from it."""
        prior = self._prior
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
            means, features = prior.at(x)
            parts = []
            for part in features.split(max(1, NUMBERS_TOGETHER // len(self._centres))):
                updates = self._weights @ kernel_matrix(prior.kernel, part, self._centres).mT
                draws = self._draws(part)
                parts.append(torch.cat([updates[:1], draws - updates[1:]]))
            values = torch.cat(parts, dim=1)
            mean = prior.shift + prior.scale * (means + values[0])
            # Of whole numbers, as fingerprints are, functions are none.
            like = x if x.is_floating_point() else x.double()
            return mean.to(like), (prior.scale * values[1:]).to(like)

    def _paths(self, x: Float[Tensor, "N D"] | Float[Tensor, "k N D"], chosen: Tensor) -> Float[Tensor, "k N"]:
        """Some samples, at the same inputs or each at its own."""
        if x.dim() == 2:
            return self.samples(x)[chosen]
        prior, numbers = self._prior, chosen.tolist()
        with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
            means, features = prior.at(x.flatten(0, 1))
            weights = self._weights[0] - self._weights[1:]
            draws = [self._draws(some, only) for only, some in zip(numbers, features.split(x.shape[1]), strict=True)]
            values, owners = means + torch.cat(draws, dim=1)[0], chosen.repeat_interleave(x.shape[1])
            together = max(1, NUMBERS_TOGETHER // len(self._centres))
            updates = [
                (kernel_matrix(prior.kernel, part, self._centres) * weights[own.to(weights.device)]).sum(1)
                for part, own in zip(features.split(together), owners.split(together), strict=True)
            ]
            values = prior.shift + prior.scale * (values + torch.cat(updates))
            return values.reshape(x.shape[:2]).to(x if x.is_floating_point() else values)

    def __repr__(self) -> str:
        return (
            f"KernelPosterior({len(self._prior.x)} data, {len(self._targets) - 1} samples, solver={self.solver!r}, "
            f"error={self.error:.2g}, passes={self.passes:.0f})"
        )
