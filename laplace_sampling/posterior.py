"""`Posterior`: all that predictions need of a fit."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.encoding import encode_inputs
from laplace_sampling.evidence.step import Step
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.weighted import Weighted
from laplace_sampling.linear_model.kronecker import CURVATURE, restored_curvature
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.tangent_model import TangentModel
from laplace_sampling.methods.fit import Fit
from laplace_sampling.networks.function_fingerprint import FunctionFingerprint
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.conformal import Conformal
from laplace_sampling.solvers.preconditioners import Factored

if TYPE_CHECKING:
    from laplace_sampling.methods.method import Method

__all__ = ["Posterior"]

# Samples in half precision are converted in blocks of so many bytes: half repeats the pass of a last layer more often,
# twice holds more. At the least as many as go through a network together.
_CONVERTED_BYTES, _FEWEST = 2**26, 16


@dataclass(frozen=True)
class Posterior:
    """All that predictions need.

    Attributes:
        prior: `A`.
        likelihood: with the fitted noise precision.
        samples: `ζ`, zero-mean; those in half precision are divided by `scales`. Before they are drawn, where the fit
            needs none, they are `[0, P]`.
        mode: `θ̄`, if it was needed.
        effective_dimension: `γ` of each group; `effective_dimension_se` its standard error.
        history: a record of each step of the fit.
        method: that made the fit.
        rows: data that go through the network together.
        fingerprint: of the network's weights and buffers.
        function: of what the network computes, on a few training data; `None` where it cannot be repeated or kept.
        converged: whether all tolerances were reached.
        unequal_noise: whether the fit was given `noise_variances`.
        exact: of an exact posterior, what its covariances take: in observation space the decomposition and the training
            data, in weight space a factor of `H`; of a factored one, its curvature.
        calibration: factors of what is predicted.
        scales: of samples in half precision, the largest number of each.
        conformal: scores of data, for intervals and sets.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    samples: Float[Tensor, "K P"]
    mode: Float[Tensor, " P"] | None
    effective_dimension: Float[Tensor, " G"]
    effective_dimension_se: Float[Tensor, " G"]
    history: list[Step]
    method: "Method"
    rows: int
    fingerprint: Tensor
    function: FunctionFingerprint | None
    converged: bool = True
    unequal_noise: bool = False
    exact: dict[str, Tensor] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    scales: Float[Tensor, " K"] | None = None
    conformal: Conformal | None = None

    def drawn(self, fit: Fit) -> "Posterior":
        """The same with the samples of its fit."""
        assert fit.sampled is not None
        return replace(self, samples=fit.sampled.samples)

    @property
    def block(self) -> int:
        """Samples that are converted at once; all of those that need not be."""
        size = max(_FEWEST, _CONVERTED_BYTES // (4 * max(1, self.samples.shape[1])))
        return max(1, len(self.samples)) if self.scales is None else size

    def blocks(self, num: int | None = None) -> Iterator[Float[Tensor, "k P"]]:
        """The first samples in the precision of the network, `block` of them at once."""
        samples = self.samples[:num].split(self.block)
        if self.scales is None:
            return iter(samples)
        scales = self.scales[:num, None].split(self.block)
        return (scale * part.to(scale.dtype) for part, scale in zip(samples, scales, strict=True))

    @property
    def full_samples(self) -> Float[Tensor, "K P"]:
        """All samples in the precision of the network."""
        return self.samples if self.scales is None else torch.cat(list(self.blocks()))

    def in_half(self, dtype: torch.dtype) -> "Posterior":
        """The same with samples in half precision, divided by the largest number of each."""
        samples = self.full_samples
        scales = samples.abs().amax(1).clamp_min(torch.finfo(samples.dtype).tiny)
        return replace(self, samples=(samples / scales[:, None]).to(dtype), scales=scales)

    @classmethod
    def of(
        cls, fit: Fit, tangent: TangentModel, network: Linearisation, calibration: Calibration, unequal_noise: bool
    ) -> "Posterior":
        """What a fit with its samples leaves for predictions."""
        assert fit.sampled is not None
        gamma, gamma_se = fit.sampled.effective_dimension()
        return cls(
            prior=fit.prior,
            likelihood=fit.model.likelihood.unweighted,
            samples=fit.sampled.samples,
            mode=fit.mode.weights.to(network.dtype) if fit.known_mode else None,
            effective_dimension=gamma,
            effective_dimension_se=gamma_se,
            method=fit.method,
            history=[step.shifted(tangent.log_scale) for step in fit.tuned.history],
            rows=tangent.data.batch_size,
            fingerprint=network.fingerprint(),
            function=FunctionFingerprint.of(network, tangent.data),
            converged=fit.converged,
            unequal_noise=unequal_noise,
            exact=fit.tensors() | (_training_data(fit, tangent) if fit.saves_data else {}),
            calibration=calibration,
        )

    @cached_property
    def curvature(self) -> Factored | None:
        """`M̂` of a factored posterior, in the scaled coordinates of the prior."""
        kept = {name.removeprefix(CURVATURE): t for name, t in self.exact.items() if name.startswith(CURVATURE)}
        return restored_curvature(kept) if kept else None


def _training_data(fit: Fit, tangent: TangentModel) -> dict[str, Tensor]:
    """Inputs, targets and weights, which covariances in observation space need."""
    inputs = tangent.data.inputs(torch.arange(tangent.data.num_data))
    kept = {**encode_inputs(inputs), **encode_inputs(tangent.data.targets, "targets")}
    if isinstance(fit.model.likelihood, Weighted):
        kept["weights"] = fit.model.likelihood.weights(fit.model.targets)
    if tangent.weights is not None:
        kept["noise_variances"] = tangent.weights**-2
    return kept
