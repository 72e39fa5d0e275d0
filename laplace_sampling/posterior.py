"""`Posterior`: all that predictions need of a fit."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import storable
from laplace_sampling.evidence.step import Step
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.weighted import Weighted
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.kronecker import CURVATURE, restored_curvature
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.sampling import draw_closed_form
from laplace_sampling.linear_model.tangent_model import TangentModel
from laplace_sampling.methods.fit import Fit
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.function_fingerprint import FunctionFingerprint
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.solvers.preconditioners import Factored


@dataclass(frozen=True)
class Posterior:
    """All that predictions need.

    Attributes:
        prior: `A`.
        likelihood: with the fitted noise precision.
        samples: `ζ`, zero-mean; none before they are asked for, where the posterior has a closed form.
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
        conformal: scores of data, for intervals and sets.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    samples: Float[Tensor, "K P"]
    mode: Float[Tensor, " P"] | None
    effective_dimension: Float[Tensor, " G"]
    effective_dimension_se: Float[Tensor, " G"]
    history: list[Step]
    method: Method
    rows: int
    fingerprint: Tensor
    function: FunctionFingerprint | None
    converged: bool = True
    unequal_noise: bool = False
    exact: dict[str, Any] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)
    conformal: SplitConformal | None = None

    def with_samples(self, num_samples: int, seed: int) -> "Posterior":
        """Returns the posterior with samples drawn from its closed form."""
        assert self.curvature is not None
        draws, like = Draws(num_samples, seed, Stream.SAMPLES), self.samples
        return replace(self, samples=draw_closed_form(self.curvature, self.prior, draws, like.device, like.dtype)[0])

    def drawn(self, fit: Fit) -> "Posterior":
        """Returns the posterior with the samples of its fit."""
        assert fit.sampled is not None
        return replace(self, samples=fit.sampled.samples)

    def without_data(self) -> "Posterior":
        """Leaves out inputs and targets, and covariances that take them, so that those of the samples are left.

        What is left of the training data are sums over them; of those of `calibrate_conformal` their scores.
        """
        return replace(self, function=None, exact={} if "inputs" in self.exact else self.exact)

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
            mode=None if fit.known_mode is None else fit.known_mode.weights.to(network.dtype),
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


def _training_data(fit: Fit, tangent: TangentModel) -> dict[str, Any]:
    """Inputs, targets and weights, which covariances in observation space need."""
    inputs = tangent.data.inputs(torch.arange(tangent.data.num_data))
    kept = {"inputs": storable(inputs), "targets": storable(tangent.data.all_targets())}
    if isinstance(fit.model.likelihood, Weighted):
        kept["weights"] = fit.model.likelihood.weights(fit.model.targets)
    if tangent.weights is not None:
        kept["noise_variances"] = tangent.weights**-2
    return kept
