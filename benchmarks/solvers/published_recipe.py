"""The recipe that was published, for comparison: geometric averaging, and the objective whose noise is subsampled.

Antorán et al. (2023), and thesis §4.2: mini-batch descent with a constant step, `ᾱ ← χα + (1 − χ)ᾱ` with
`χ = 100/steps`, on `L(ζ) = ½ ‖E − Φζ‖²_B + ½ ‖ζ − θ⁰‖²_A`, of which a mini-batch sees its part of `E` only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.sgd import PROBES, SGD, Gradient, first_iterate
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

    def _run(
        self,
        gradient: Gradient,
        start: Tensor,
        batches: Iterator[Tensor],
        step_sizes: Sequence[float],
        affordable: Callable[[], bool],
        bar: tqdm,
    ) -> tuple[Tensor | None, int]:
        x, scale = first_iterate(gradient, start, batches)
        velocity, num_gradients = torch.zeros_like(x), 2 * PROBES
        average, share = x, min(1.0, 100 / len(step_sizes))
        for step in step_sizes:
            x, velocity, made = self._part(gradient, x, velocity, scale, [next(batches)], [step], affordable)
            num_gradients += made
            bar.update(made)
            if x is None or not made:
                return None if x is None else average, num_gradients
            average = share * x + (1 - share) * average
        return average, num_gradients


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
