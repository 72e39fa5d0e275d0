"""The recipe that was published, for comparison: geometric averaging, and the objective whose noise is subsampled.

Antorán et al. (2023), and thesis §4.2: mini-batch descent with a constant step, `ᾱ ← χα + (1 − χ)ᾱ` with
`χ = 100/steps`, on `L(ζ) = ½ ‖E − Φζ‖²_B + ½ ‖ζ − θ⁰‖²_A`, of which a mini-batch sees its part of `E` only.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial

from torch import Tensor

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import Minimum, Objective, Quadratic, Solution, Solver


@dataclass(frozen=True)
class AveragingSGD(SGD):
    """`SGD` with a constant step size, which returns the geometric average of its iterates."""

    def _step_sizes(self, first: float, steps: int, decay: bool) -> list[float]:
        return [first] * steps

    def _descend(self, *arguments, **settings) -> tuple[Tensor, float]:
        *_, decay, _ = arguments
        if decay:
            return super()._descend(*arguments, **settings)
        # Of the first quarter of the way to a mode the last iterate counts, as in `SGD`.
        plain = SGD(**{f.name: getattr(self, f.name) for f in fields(SGD)})
        return plain._descend(*arguments, **settings)

    def _iterates(
        self, gradient: Callable, x: Tensor, scale: Tensor, batches: Iterator[Tensor], step_sizes: Iterable[float]
    ) -> Iterator[Tensor | None]:
        sizes = list(step_sizes)
        average, share = x, min(1.0, 100 / len(sizes))
        for iterate in super()._iterates(gradient, x, scale, batches, sizes):
            if iterate is None:
                yield None
                return
            average = share * iterate + (1 - share) * average
            yield average


@dataclass(frozen=True)
class SubsampledQuadratic(Quadratic):
    """A `Quadratic` of which a mini-batch has its part of the linear term, `linear_batch(batch)`, only."""

    linear_batch: Callable[[Tensor], Tensor]

    def gradient(self, delta: Tensor, batch: Tensor) -> Tensor:
        weight = self.operator.num_data / len(batch)
        fit = self.operator.matmul(self.centre + delta, batch) - self.linear_batch(batch)
        return weight * fit + self.precision * delta


@dataclass(frozen=True)
class SubsampledNoise(Solver):
    """A solver for `sample_posterior` that minimises `L` in place of `L'`: `draws` must be those of the samples."""

    solver: SGD
    draws: Draws

    def solve(self, problem: Quadratic, init: Tensor | None = None, *, description: str | None = None) -> Solution:
        ggn = problem.operator
        assert isinstance(ggn, GGN)
        noise = self.draws.noise(ggn.features.num_outputs)
        subsampled = SubsampledQuadratic(**vars(problem), linear_batch=partial(ggn.root_matmul, noise))
        return self.solver.solve(subsampled, init, description=description)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        return self.solver.minimise(objective, init, description=description)
