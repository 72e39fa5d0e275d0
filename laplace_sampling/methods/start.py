r"""`Start`: a posterior of the same weights from which a fit starts, as after more training of the network.

**Samples.** A sample of the new posterior minimises a quadratic whose prior sample `θ⁰` and noise `z` are keyed by
seed, sample and datum, so that the old sample of the same draws is near it. It is carried over in units of the prior's
standard deviation, `ζ ← A^{-1/2} A_old^{1/2} ζ_old`: where the data say nothing both are the prior sample, for every
`α` and every scale of a g-prior. Where they say much, `δ = ζ − θ⁰` is nearly `−θ⁰` before and after.

**Precisions, mode, preconditioners.** `α` and the noise precision are those of the old posterior, a mode is sought from
the old one, and a preconditioner only has to be near.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision


@dataclass(frozen=True)
class Start:
    """What a fit takes from an earlier posterior of the same weights.

    Attributes:
        prior: `A_old`.
        likelihood: with its noise precision.
        samples: `ζ_old`, unscaled; `None` where they are not those of a minimisation, as of Kronecker factors.
        draws: of the samples.
        mode: `θ̄_old`, if it is known.
        solver: that the earlier fit ended with, which may hold a preconditioner.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    samples: Float[Tensor, "K P"] | None
    draws: Draws
    mode: Float[Tensor, " P"] | None = None
    solver: Any = field(default=None, repr=False)

    @property
    def alpha(self) -> float:
        """`α`, the geometric mean over the weights."""
        return overall_precision(self.prior)

    def check(self, prior: GaussianPrior) -> None:
        """Raise a `ValueError` if the posterior is of other weights than those of a prior."""
        old, new = len(self.prior.scale), len(prior.scale)
        if old != new or self.prior.names != prior.names:
            before, now = _described(old, self.prior), _described(new, prior)
            raise ValueError(
                f"`warm_start=True` starts from the posterior that is there, which is of {before}, but the model now "
                f"has {now}: fit without `warm_start`."
            )

    def prior_from(self, prior: GaussianPrior) -> GaussianPrior:
        """A prior with the old precisions; its scale stays, and so what `α` means in its coordinates."""
        return prior.with_precision(self.prior.precision)

    def likelihood_from(self, likelihood: Likelihood) -> Likelihood:
        """A likelihood with the old noise precision, where it is one that is learnt."""
        noise = self.likelihood.noise_precisions()
        if not (isinstance(likelihood, Gaussian) and likelihood.learn) or noise is None:
            return likelihood
        return likelihood.with_precision(noise)

    def delta(self, draws: Draws, prior: GaussianPrior) -> Float[Tensor, "K P"] | None:
        """`δ = ζ − θ⁰` for a solve, in the scaled coordinates of a prior; `None` if there are no such samples.

        Args:
            draws: some of those of the samples.
            prior: `A`, on the device and in the dtype of the solve.
        """
        last = draws.first + draws.num_samples
        if self.samples is None or replace(draws, num_samples=1, first=0) != replace(self.draws, num_samples=1):
            return None
        if last > len(self.samples):
            return None
        old, samples = self.prior.to(prior.scale.device, prior.scale.dtype), self.samples[draws.first : last]
        samples = samples.to(prior.scale)
        # In units of the prior's standard deviation, in which `θ⁰` is white noise.
        white = samples * (old.spread().sqrt() / old.scale)
        return (white - draws.prior(samples.shape[1]).to(white)) / prior.spread().sqrt()

    def mode_in(self, scale: Float[Tensor, " P"]) -> Float[Tensor, "1 P"] | None:
        """The old mode in scaled coordinates."""
        return None if self.mode is None else (self.mode.to(scale) / scale)[None]

    def change_of_scale(self, prior: GaussianPrior) -> Float[Tensor, " P"]:
        """`s/s_old`, by which a preconditioner goes from the old scaled coordinates to those of a prior."""
        return prior.scale / self.prior.scale.to(prior.scale)


def _described(size: int, prior: GaussianPrior) -> str:
    groups = "" if len(prior.names) == 1 else f" in the groups {', '.join(prior.names[:4])}"
    return f"{size} random weights{groups}"
