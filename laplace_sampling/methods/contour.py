"""`Contour`: samples by the inverse square root of the posterior precision, for comparison."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import PosteriorSamples, Sampler, draw
from laplace_sampling.methods.krylov import Krylov
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.methods.solver_method import SolverFit
from laplace_sampling.solvers.checks import check_positive, check_whole
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution, Solver

__all__ = ["Contour"]


@dataclass(frozen=True, kw_only=True)
class Contour(Krylov):
    """Samples `ζ = H^{-1/2} z` by contour integral quadrature; mode and hyperparameters as `Krylov` finds them.

    `gp.contour_quadrature` has the equations. It takes full passes and much memory, and is here for comparison.

    Args:
        num_quadrature: points of the quadrature, `Q`.
        max_iterations: of MINRES.
        minres_tolerance: under which MINRES stops.
        residual_tolerance: residual under which a sample counts as converged.
    """

    num_quadrature: int = 10
    max_iterations: int = 1000
    minres_tolerance: float = 1e-4
    residual_tolerance: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_quadrature", "max_iterations"):
            check_whole(f"`Contour({name}=...)`", getattr(self, name), 1)
        for name in ("minres_tolerance", "residual_tolerance"):
            check_positive(f"`Contour({name}=...)`", getattr(self, name))

    @property
    def name(self) -> str:
        return "ciq"

    @property
    def minimises(self) -> bool:
        return False

    @property
    def stacks(self) -> int:
        return 80

    @property
    def residual_kind(self) -> str:
        return "relative gradient"

    def remark(self, problem: Problem, memory: Memory) -> str:
        return ""

    def _rank(self, memory: Memory, num_samples: int) -> int:
        return 0

    def preconditioner_vectors(self, memory: Memory, num_samples: int) -> int:
        return 0

    def fit_of(self, *parts: Any) -> "ContourFit":
        return ContourFit(*parts)

    def judge(self, sampled: PosteriorSamples, solver: Solver) -> tuple[Tensor, float]:
        return sampled.residual, self.residual_tolerance


@dataclass(frozen=True)
class _ContourSampler(Sampler):
    """Draws by contour quadrature; it solves nothing."""

    method: Contour

    def sample(self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Tensor | None = None) -> Solution:
        # It needs linear_operator, which takes seconds to import.
        from laplace_sampling.gp.contour_quadrature import sample_contour

        return sample_contour(
            ggn,
            prior,
            draws,
            num_quadrature=self.method.num_quadrature,
            max_iterations=self.method.max_iterations,
            tolerance=self.method.minres_tolerance,
            residual_tolerance=self.method.residual_tolerance,
        )

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        raise NotImplementedError("Contour quadrature draws samples; it solves no linear system.")

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        raise NotImplementedError("Contour quadrature draws samples; it minimises no objective.")


class ContourFit(SolverFit):
    """A fit whose samples are those of contour quadrature, and whose mode the solver found."""

    def draw(self, draws: Draws, description: str | None = None) -> PosteriorSamples:
        method = self.method
        assert isinstance(method, Contour)
        return draw(
            self.ggn,
            self.prior,
            draws,
            _ContourSampler(method),
            rows=method.rows(self.task.memory, self.task.num_samples),
            dtype=self.task.dtype,
            description=description,
        )
