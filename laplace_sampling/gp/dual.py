r"""Samples and modes in observation space by conjugate gradients, for few outputs and many weights.

With a root `L Lᵀ = B` and `S = LᵀΦA⁻¹ΦᵀL`, `[N·C, N·C]` (thesis eq. 2.16 to 2.19, §7.3.3)

    ζ = θ⁰ + A⁻¹ΦᵀL x,   (I + S) x = z − LᵀΦθ⁰          Matheron's rule
    θ̄ = A⁻¹ΦᵀL x,        (I + S) x = Lᵀ(y − o)           the mode of a regression

also for a singular `B`. A product with `S` is a VJP and a JVP over all data. With `t` for `z`, or `Lᵀ(y − o)`, the
residual is `r = t − x − LᵀΦζ`: one JVP of what is returned measures it. Since `S(I + S)⁻¹ < I`, the error of the
function is at most `‖r‖/‖LᵀΦζ‖`.
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.posterior import transposed
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import ModeObjective
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import Sampler
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.preconditioners import Nystrom
from laplace_sampling.solvers.recorded import recorded
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution


class WhitenedGram(Operator):
    """`S = LᵀΦA⁻¹ΦᵀL`, in float64, known by its products.

    Args:
        ggn: `M = ΦᵀL LᵀΦ`.
        variance: the diagonal of `A⁻¹`, `[P]`.
    """

    def __init__(self, ggn: GGN, variance: Float[Tensor, " P"]) -> None:
        self.ggn, self.variance = ggn, variance.double()

    @property
    def like(self) -> GGN:
        return self.ggn

    @property
    def size(self) -> int:
        return self.ggn.outputs.numel()

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64

    @recorded
    def matmul(self, v: Float[Tensor, "K NC"], batch: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        # Few enough at a time for their stacks in weight space, which are larger by P/(N·C).
        parts = v.split(max(1, NUMBERS_TOGETHER // self.ggn.size))
        return torch.cat([forward(self.ggn, self.variance * backward(self.ggn, part)) for part in parts])


def backward(ggn: GGN, u: Float[Tensor, "K NC"]) -> Float[Tensor, "K P"]:
    """`ΦᵀL u`, in float64."""
    return transposed(ggn.features, ggn.likelihood.root(ggn.outputs, u.reshape(-1, *ggn.outputs.shape), ggn.targets))


@recorded
def forward(ggn: GGN, v: Float[Tensor, "K P"]) -> Float[Tensor, "K NC"]:
    """`LᵀΦ v`, in float64."""
    outputs = ggn.features.outputs(v.to(ggn.dtype)).double()
    return ggn.likelihood.root_transpose(ggn.outputs, outputs, ggn.targets).flatten(1)


@dataclass(frozen=True)
class DualCG(Sampler):
    """Conjugate gradients on `I + S`: it samples, and finds modes of regressions.

    Args:
        tolerance: the largest error of the function, as in `Solution.error`.
        rank: the rank of the preconditioner; 0 for none.
        max_iterations: the largest number of steps of conjugate gradients in each solve.
        seed: the seed of the preconditioner.
        held: an earlier preconditioner; a product finds the factor by which `S` has changed since.
    """

    # Solves at most, each from where the last one ended and to a smaller residual.
    _SOLVES = 4
    # The tolerance of the first solve relative to that of the error of the function: products of a few more iterations
    # for hyperparameters by EM that do not depend on how samples are grouped.
    _SAFETY = 0.1
    # The accuracy of the mode relative to that of samples: it is one row, so that accuracy is cheap.
    _MODE_ACCURACY = 0.01

    tolerance: float = 1e-3
    rank: int = 0
    max_iterations: int = 1000
    seed: int = 0
    held: Nystrom | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1 or self.rank < 0 or self.max_iterations < 1:
            raise ValueError(f"The tolerance must be within 0 and 1, max_iterations at least 1: {self}.")

    def hold(self, S: WhitenedGram) -> "DualCG":
        """Returns the solver with a preconditioner, which later solves use as well."""
        return replace(self, held=self._preconditioner(S))

    def _preconditioner(self, S: WhitenedGram) -> Nystrom | None:
        if not self.rank or self.held is not None:
            return self.held
        return Nystrom.of(S, self.rank, self.seed)

    def sample(
        self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Float[Tensor, "K P"] | None = None
    ) -> Solution:
        """Zero-mean posterior samples in scaled coordinates: those of `sample_posterior` with the same draws."""
        scale, spread = prior.scale.double(), prior.spread().double()
        centre = draws.prior(ggn.size).to(ggn.device).double() / spread.sqrt()
        white = draws.noise(ggn.features.num_outputs)(torch.arange(ggn.num_data)).to(ggn.device).double().flatten(1)
        found = self._solve(ggn, prior, white, centre)
        leverage = found.value * backward(ggn, found.function) * scale
        dtype = ggn.dtype
        return Solution(
            found.value.to(dtype),
            (found.value - centre).to(dtype),
            found.residual.to(dtype),
            leverage.to(dtype),
            found.passes + 0.5 * len(white),
            bool((found.error <= self.tolerance).all()),
            error=found.error,
        )

    def inverse(self, ggn: GGN, prior: GaussianPrior, v: Float[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        """`H⁻¹ v` of rows, unscaled: a sample of the prior without noise, with `A⁻¹v` in its place."""
        centre = v.double() * prior.scale.double() / prior.spread().double()
        nothing = centre.new_zeros(len(v), ggn.outputs.numel())
        return self._solve(ggn, prior, nothing, centre).value * prior.scale.double()

    def _solve(
        self, ggn: GGN, prior: GaussianPrior, target: Float[Tensor, "K NC"], centre: Float[Tensor, "K P"]
    ) -> "_Solved":
        """`ζ/s = θ⁰/s + A⁻¹ΦᵀL x/s` with `(I + S) x = t − LᵀΦθ⁰`."""
        # The algebra is in float64, products of the network are in its own dtype: conjugate gradients need the digits.
        scale, spread = prior.scale.double(), prior.spread().double()
        S = WhitenedGram(ggn, scale**2 / spread)
        preconditioner = self._preconditioner(S)
        built = 0.0 if preconditioner is None or self.held is not None else preconditioner.passes
        # Zero weights have outputs of zero, at no product.
        start = forward(ggn, centre * scale) if bool(centre.any()) else torch.zeros_like(target)
        problem = Quadratic(S, torch.ones_like(target[0]), torch.zeros_like(target), target - start)
        # It stops by `‖r‖/2√(xᵀSx)`, of samples about half of the bound below, since `E xᵀSx` is `γ`.
        x, passes, tolerance, solves = None, built + 0.5 * len(target), self._SAFETY * self.tolerance, 0
        while True:
            solution = CG(tolerance, self.max_iterations, preconditioner).solve(problem, x)
            x, solves = solution.value, solves + 1
            passes += solution.passes + len(target)
            value = centre + backward(ggn, x) * scale / spread
            function = forward(ggn, value * scale)
            residual = target - x - function
            error = residual.norm(dim=1) / function.norm(dim=1).clamp_min(1e-300)
            if bool((error <= self.tolerance).all()) or not solution.converged or solves == self._SOLVES:
                relative = residual.norm(dim=1) / ((target - function).norm(dim=1) + x.norm(dim=1)).clamp_min(1e-300)
                return _Solved(value, function, relative, error, passes)
            tolerance *= 0.5 * float(self.tolerance / error.max())

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        raise NotImplementedError("`DualCG` samples, which takes the noise of the data, and finds modes.")

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        if not isinstance(objective, ModeObjective) or not isinstance(objective.model.likelihood, Gaussian):
            raise TypeError("`DualCG` finds modes of linear models with a Gaussian likelihood.")
        model, precision = objective.model, objective.precision.double()
        ggn, residual = model.ggn(model.offset), model.residuals(model.offset)
        target = ggn.likelihood.root_transpose(ggn.outputs, residual[None], ggn.targets).flatten(1)
        # The objective is in scaled coordinates: each weight is a group, of unit scale.
        groups = torch.arange(len(precision), device=precision.device)
        prior = GaussianPrior(precision, groups, torch.ones_like(precision), ())
        solver = replace(self, tolerance=min(1e-4, self._MODE_ACCURACY * self.tolerance))
        found = solver._solve(ggn, prior, target, torch.zeros_like(precision)[None])
        return Minimum(found.value, float(found.residual), found.passes, bool((found.error <= solver.tolerance).all()))


@dataclass(frozen=True)
class _Solved:
    """`ζ/s`, `LᵀΦζ`, the relative residual, the error of the function of each row, and the passes."""

    value: Float[Tensor, "K P"]
    function: Float[Tensor, "K NC"]
    residual: Float[Tensor, " K"]
    error: Float[Tensor, " K"]
    passes: float
