r"""Samples of the posterior of a sketch, and one sketch for all precisions and noise levels of a fit."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.factored import FactoredSampler
from laplace_sampling.linear_model.features import ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.low_rank import LowRank
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.linear_model.random_rows import RandomRows
from laplace_sampling.linear_model.sketch import Sketch
from laplace_sampling.linear_model.sketch_growth import Growth, grow
from laplace_sampling.solvers.solver import Minimum, Objective, Solution

__all__ = ["Part", "SketchSampler"]

# The error of half of a part, by what the other half changes: that, and the error of the whole, which was 0.29 to 0.62
# of it (`grow`).
_OF_HALF = 1.6
# Eigenvectors that are left out change standard deviations by this part of the tolerance, or a few times as much at
# inputs unlike the training data. With a third of it posteriors are a third larger.
_CUT = 1 / 30
# Eigenvectors that are kept at least where memory allows: fewer would save little, and are less accurate.
_FEWEST = 64


@dataclass
class Part:
    """The part of the data that stands for all of them, in the scaled coordinates of a prior.

    Where the curvature is another one, its rows are computed anew, for the same data and draws; a noise precision that
    all outputs share is a factor.

    Attributes:
        growth: what the sketch was made by.
        sketch: of the GGN of `growth`.
        tolerance: of its change.
        num_samples: as many eigenvectors are kept at least, since they take no more memory than the samples.
    """

    growth: Growth
    sketch: Sketch
    tolerance: float
    num_samples: int = 1

    @property
    def ggn(self) -> GGN:
        """The GGN that the sketch estimates, scaled."""
        return self.growth.sequence.ggn

    def of(self, ggn: GGN, prior: GaussianPrior) -> LowRank:
        """The curvature of an unscaled GGN, corrected for the precision of the prior, as accurate as that needs."""
        factor = _multiple(ggn, self.ggn)
        if factor is None:
            self._restart(ggn, prior)
            self._take(self.growth.sketch(self.sketch.num_rows))
            factor = 1.0
        sketch, alpha = self.sketch.times(factor), overall_precision(prior)
        spare = self.growth.spare_bytes
        least = max(self.num_samples, min(_FEWEST, int(spare / (ggn.size * ggn.dtype.itemsize))))
        limits = (_CUT * self.tolerance, self.tolerance, least, spare)
        if len(prior.names) > 1:
            return sketch.at(alpha).low_rank(prior.spread().double(), *limits)
        return sketch.low_rank(alpha, *limits)

    def without_rows(self) -> "Part":
        """What a later fit needs of it: how many rows were enough, and their eigenvalues."""
        return replace(self, growth=self.growth.without_rows(), sketch=self.sketch.without_rows())

    def grow(self, ggn: GGN, prior: GaussianPrior, max_rows: int) -> None:
        """Lets the part grow at the precision of a prior, unless the change is below the tolerance there."""
        factor = _multiple(ggn, self.ggn)
        if factor is None:
            self._restart(ggn, prior)
        shift = torch.tensor([overall_precision(prior) / (factor or 1.0)], dtype=torch.float64)
        self._take(grow(self.growth, lambda _: shift, self.tolerance, max_rows=max_rows), judged=True)

    def continued(
        self, growth: Growth, prior: GaussianPrior, likelihood: Likelihood, alpha: float, max_rows: int
    ) -> Sketch:
        """The sketch of a changed network by as many rows as were enough, and the change that is expected of it.

        Args:
            growth: of the changed network.
            prior: of the fit that this part was made for, and so is `likelihood`.
            likelihood: with the noise precision.
            alpha: the prior precision at which standard deviations are predicted.
            max_rows: at most so many rows.
        """
        rows, change = self._enough()
        if not growth.made:
            growth.sketch(growth.reachable(min(rows, max_rows)))
        sketch = growth.made[-1]
        factor = _multiple(replace(self.ggn, likelihood=likelihood), self.ggn) or 1.0
        before = self.sketch.dimension(overall_precision(prior) / factor)
        # The rows act as `c = 1 − γ/m` says.
        sketch.change = change * sketch.dimension(alpha) / before * rows / sketch.num_rows
        return sketch

    def _enough(self) -> tuple[int, float]:
        """Rows, and how much they change standard deviations: half of those that are there if that was seen."""
        made, sketch = self.growth.made, self.sketch
        off = _OF_HALF * sketch.change
        if len(made) > 1 and sketch.num_rows < self.growth.sequence.most and off <= self.tolerance:
            return made[0].num_rows, off
        return sketch.num_rows, sketch.change

    def _restart(self, ggn: GGN, prior: GaussianPrior) -> None:
        old = self.growth.sequence
        scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
        self.growth = Growth(RandomRows(scaled, old.seed, old.stream), self.growth.bytes_)

    def _take(self, new: Sketch, judged: bool = False) -> None:
        if not judged:
            new.change = self.sketch.change
        self.sketch = new


def _multiple(ggn: GGN, other: GGN) -> float | None:
    """`c` with `B = c B'`, if it is known that there is one."""
    family, before = ggn.likelihood, other.likelihood
    if isinstance(family, Gaussian) and isinstance(before, Gaussian):
        ratios = family.noise_precisions() / before.noise_precisions()
        return float(ratios.flatten()[0]) if bool((ratios == ratios.flatten()[0]).all()) else None
    return 1.0 if ggn.is_at(other.outputs) else None


@dataclass(frozen=True)
class SketchSampler(FactoredSampler):
    """Samples of the posterior of a sketch; the mode by conjugate gradients on all data, preconditioned by it.

    Args:
        part: the sketch.
    """

    part: Part = field(kw_only=True)

    def curvature(self, ggn: GGN, prior: GaussianPrior) -> LowRank:
        return self.part.of(ggn, prior)

    def sample(self, ggn: GGN, prior: GaussianPrior, draws: Draws, init: Tensor | None = None) -> Solution:
        """Samples of the posterior of the sketch, and `γ` from its eigenvalues."""
        if len(prior.names) > 1:
            return super().sample(ggn, prior, draws, init)
        curvature, alpha = self.curvature(ggn, prior), overall_precision(prior)
        value = curvature.solve_root(draws.prior(ggn.size).to(ggn.device, ggn.dtype), alpha)
        no_error = torch.zeros(len(value), dtype=torch.float64, device=ggn.device)
        # The whole diagonal would take as long as the sketch itself; the trace is known, and a sum over samples is not
        # needed.
        traces = torch.full_like(no_error, curvature.dimension(alpha))
        leverage = value * curvature.matmul(value)
        return Solution(value, value, no_error, leverage, 0.0, converged=True, error=no_error, traces=traces)

    def minimise(self, objective: Objective, init: Tensor, *, description: str | None = None) -> Minimum:
        held, alpha = self.held, float(objective.precision.mean())
        solver = replace(self.mode, preconditioner=self.part.sketch.low_rank(alpha, 1e-2) if held is None else held)
        return solver.minimise(objective, init, description=description)
