"""Exact fits in observation space, from the eigendecomposition of the Gram matrix: what all likelihoods share."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.gp.exact_prediction import ExactPrediction
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.posterior_samples import Sampled
from laplace_sampling.linear_model.sampling import Draws
from laplace_sampling.methods.fits import Fit, Task, Tuning
from laplace_sampling.predictions.function_covariance import FunctionCovariance

__all__ = ["UNLIMITED", "GramFit"]

# What the class has checked already, for all methods, by its own limit.
UNLIMITED = float("inf")


@dataclass(frozen=True)
class GramFit(Fit):
    """A fit of which everything is known in closed form, without the Jacobian."""

    @classmethod
    @abstractmethod
    def tune(cls, task: Task, tuning: Tuning) -> Self:
        """The posterior at hyperparameters found to rounding."""

    @classmethod
    @abstractmethod
    def of(cls, task: Task) -> Self:
        """The posterior at the hyperparameters of a task."""

    @classmethod
    @abstractmethod
    def restore(cls, task: Task, tensors: dict[str, Tensor]) -> Self:
        """The posterior of `tensors`, without its samples."""

    @property
    @abstractmethod
    def effective_dimension(self) -> float:
        """`γ`."""

    @property
    @abstractmethod
    def precisions(self) -> tuple[float, float]:
        """`α` and `b`, as an `ExactPrediction` takes them."""

    @abstractmethod
    def samples(self, draws: Draws) -> Float[Tensor, "K P"]:
        """Posterior samples, unscaled, in float64."""

    @abstractmethod
    def predict(self, features: Features) -> ExactPrediction:
        """The posterior of the function at other inputs."""

    @property
    def path(self) -> EvidencePath:
        return self.evidence(None)[0]

    def with_samples(self) -> Self:
        """The same with the samples that are kept."""
        return replace(self, sampled=self.draw(self.task.draws))

    def draw(self, draws: Draws, description: str | None = None) -> Sampled:
        model, prior, samples = self.model, self.prior, self.samples(draws)
        at = self.mode_outputs if self.task.hessian_at == "mode" else model.network_outputs.double()
        outputs = torch.cat([model.features.outputs(part.to(model.features.dtype)) for part in samples.split(16)])
        energies = model.likelihood.root_transpose(at, outputs.double(), model.targets).flatten(1).square().sum(1)
        of_prior = torch.stack([(prior.diagonal().double() * row**2).sum() for row in samples])
        none = torch.zeros(len(samples), dtype=torch.float64, device=samples.device)
        return Sampled(
            samples.to(self.task.dtype),
            none.new_tensor([[self.effective_dimension]]),
            energies,
            energies + of_prior,
            none,
            none,
            1.5 * len(samples),
            converged=True,
            exact=True,
        )

    def judge(self, sampled: Sampled) -> tuple[Tensor, float]:
        return sampled.residual, 1e-6

    def covariance_at(self, features: Features) -> FunctionCovariance:
        return _GramCovariance(self, features.in_float64())


@dataclass(frozen=True)
class _GramCovariance(FunctionCovariance):
    """Made when it is asked for: an input costs `C` VJPs and a product with the eigenvectors."""

    fit: GramFit
    features: Features

    @cached_property
    def _prediction(self) -> ExactPrediction:
        return self.fit.predict(self.features)

    def variance(self) -> Float[Tensor, "N C"]:
        return self._prediction.stddev(*self.fit.precisions) ** 2

    def blocks(self) -> Float[Tensor, "N C C"]:
        blocks = self._prediction.covariance(*self.fit.precisions)
        diagonal = blocks.diagonal(dim1=1, dim2=2)
        diagonal.clamp_(min=0)
        return blocks

    def joint(self) -> Float[Tensor, "NC NC"]:
        return self._prediction.joint_covariance(*self.fit.precisions)
