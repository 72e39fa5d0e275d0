"""`ByNetworkEvidence`: precisions of the factored posterior of a regression, by the evidence of the network itself.

Its maximum is a root along the spectrum of the factors (`evidence.network_evidence`), where that of the evidence of the
linear model takes a search for the mode on all data at each precision that is tried.
"""

from dataclasses import dataclass

from laplace_sampling.evidence.network_evidence import NetworkEvidence
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.bounds import clamped
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.methods.fit import Task
from laplace_sampling.methods.network_score import path_of
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.covariance_path import CovariancePath, FactoredPath
from laplace_sampling.predictions.selection import SearchCost, Selected, Selection

__all__ = ["ByNetworkEvidence", "has_network_noise"]


def has_network_noise(likelihood: Likelihood) -> bool:
    """Whether the noise is Gaussian, and that of the network's own residuals."""
    return isinstance(likelihood, Gaussian) and likelihood.noise_at == "network"


@dataclass(frozen=True)
class ByNetworkEvidence(Selection):
    """Precisions of prior and noise of largest evidence at the network's own weights.

    Args:
        task: before its hyperparameters are chosen.
        noise_bounds: within which the noise precision is kept.
    """

    task: Task
    noise_bounds: tuple[float, float]
    name = "network_evidence"

    def cost(self, features: Features, *, rough: bool = True) -> SearchCost:
        return SearchCost()

    def select(
        self,
        model: LinearModel,
        path: CovariancePath,
        bounds: tuple[float, float],
        seed: int,
        weight_norm: float,
        near: float | None = None,
    ) -> Selected:
        likelihood = model.likelihood
        assert isinstance(likelihood, Gaussian)
        assert isinstance(path, FactoredPath)
        before, loss = float(likelihood.noise_precision), model.total_loss(model.network_outputs.double())
        evidence = NetworkEvidence(path_of(self.task, path.curvature.eigenvalues()), loss, weight_norm)
        _, alpha, best = evidence.best(likelihood.learn)
        alpha = clamped(alpha, bounds)
        if likelihood.learn:
            assert best.path.noise_precision is not None
            likelihood = likelihood.with_precision(clamped(best.path.noise_precision, self.noise_bounds))
        # The path is that of the noise before. No product with the network is made.
        gamma = path.effective_dimension(alpha * before / float(likelihood.noise_precision))
        return Selected(alpha, likelihood, Calibration(), gamma, passes=0.0)
