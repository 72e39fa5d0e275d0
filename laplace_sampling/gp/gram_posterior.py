"""Posteriors in closed form from a decomposition of the Gram matrix, for a regression or any other likelihood."""

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.gp.exact_classification import ExactClassification, ExactPosterior
from laplace_sampling.gp.exact_curves import classification_curves, regression_curves
from laplace_sampling.gp.exact_prediction import ExactPrediction
from laplace_sampling.gp.exact_regression import ExactRegression, overall_precisions
from laplace_sampling.gp.regression_evidence import HyperparameterBounds
from laplace_sampling.gp.tuned_regression import fit_exact_regression
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import Features
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.solvers.solver import Minimum

__all__ = ["GramClassification", "GramOptimum", "GramPosterior", "GramRegression", "gram_posterior_of"]

# Callers have checked the memory already.
_UNLIMITED = float("inf")


class GramPosterior(ABC):
    """The posterior at its hyperparameters.

    Attributes:
        precisions: `α` and `b`, as an `ExactPrediction` takes them.
        effective_dimension: `γ`.
        mode_outputs: `h(θ̄, x_i)`, `[N, C]`.
        mode_norm: `‖θ̄‖²` in the scaled coordinates of the prior.
        mode_residual: of the mode's objective, relative; `None` where the mode is a closed form.
    """

    # Annotations only: a regression stores these as fields, the other posteriors compute them as properties.
    precisions: tuple[float, float]
    mode_residual: float | None = None

    @property
    @abstractmethod
    def effective_dimension(self) -> float: ...

    @property
    @abstractmethod
    def eigenvalues(self) -> Float[Tensor, " NC"]:
        """Of the Gram matrix at `α = b = 1`, whitened by the noise or the curvature, rising."""

    @property
    def largest_eigenvalue(self) -> float:
        return float(self.eigenvalues[-1])

    @abstractmethod
    def at(self, model: LinearModel, prior: GaussianPrior) -> "GramPosterior":
        """The same decomposition at the hyperparameters of a model and a prior."""

    @abstractmethod
    def mode(self) -> Float[Tensor, " P"]:
        """`θ̄`, unscaled, by one pass of VJPs."""

    @property
    @abstractmethod
    def mode_outputs(self) -> Float[Tensor, "N C"]: ...

    @property
    @abstractmethod
    def mode_norm(self) -> float: ...

    @abstractmethod
    def minimum(self, mode: Float[Tensor, "1 P"]) -> Minimum:
        """The mode, which is given in scaled coordinates, with its residual."""

    @abstractmethod
    def sample(self, draws: Draws) -> Float[Tensor, "K P"]:
        """Zero-mean posterior samples, unscaled, in float64."""

    @abstractmethod
    def predict(self, features: Features) -> ExactPrediction:
        """The posterior of the function at other inputs."""

    @abstractmethod
    def curves(self) -> EvidencePath:
        """Evidence, `γ` and norm of the mode for every `α`."""

    @abstractmethod
    def leave_one_out(self) -> LeaveOneOut:
        """The prediction of each datum from all others."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that `restore` needs."""

    @classmethod
    @abstractmethod
    def of(cls, model: LinearModel, prior: GaussianPrior) -> "GramPosterior":
        """The posterior at the hyperparameters of a model and a prior."""

    @classmethod
    @abstractmethod
    def tuned(cls, model: LinearModel, prior: GaussianPrior, bounds: HyperparameterBounds) -> "GramOptimum":
        """The posterior at the hyperparameters of largest evidence."""

    @classmethod
    @abstractmethod
    def restore(cls, model: LinearModel, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "GramPosterior":
        """The posterior of `tensors`."""


@dataclass(frozen=True)
class GramOptimum:
    """A posterior at the hyperparameters of largest evidence.

    Attributes:
        posterior: the decomposition there.
        likelihood: with the fitted noise.
        converged: whether there is a maximum, inside the bounds.
        problem: what went wrong other than a bound, in words, or nothing.
        seconds: wall time of the search.
    """

    posterior: GramPosterior
    likelihood: Likelihood
    converged: bool
    problem: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class GramRegression(GramPosterior):
    """Of a regression: one decomposition serves every `α` and `b`."""

    exact: ExactRegression
    precisions: tuple[float, float]

    @classmethod
    def of(cls, model: LinearModel, prior: GaussianPrior) -> "GramRegression":
        exact = ExactRegression.of(model, prior, max_memory=_UNLIMITED)
        return cls(exact, overall_precisions(model, prior))

    @classmethod
    def tuned(cls, model: LinearModel, prior: GaussianPrior, bounds: HyperparameterBounds) -> GramOptimum:
        started = time.perf_counter()
        tuned = fit_exact_regression(
            model, prior, precision_bounds=bounds.precision, noise_bounds=bounds.noise, max_memory=_UNLIMITED
        )
        optimum = tuned.optimum
        # A search that ends at a bound has done its work; `fit_hyperparameters` warns about the bound itself.
        lost = not (optimum.converged or optimum.at_bounds)
        problem = (
            "`fit_hyperparameters` found no maximum of the evidence to rounding: its gradient in log α and log b "
            f"is {optimum.gradient[0]:.2g}, {optimum.gradient[1]:.2g}. Check the data, or use `model.double()`."
        )
        fitted = prior.with_precision(torch.tensor([optimum.precision], dtype=torch.float64))
        # The decomposition is that of the kernel at α = 1 and b = 1: it serves the fitted precisions, too.
        exact = replace(tuned.posterior, model=model.with_likelihood(tuned.likelihood), prior=fitted)
        return GramOptimum(
            cls(exact, (optimum.precision, optimum.noise_precision)),
            tuned.likelihood,
            optimum.converged,
            problem if lost else "",
            time.perf_counter() - started,
        )

    @classmethod
    def restore(cls, model: LinearModel, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "GramRegression":
        values, vectors, noise_scale = (tensors[name] for name in ("eigenvalues", "vectors", "noise_scale"))
        # `c` costs one product with the eigenvectors, so that files need not hold it.
        exact = ExactRegression.known(model, prior, values, vectors, noise_scale)
        alpha, noise_precision = tensors["precisions"].tolist()
        return cls(exact, (alpha, noise_precision))

    def tensors(self) -> dict[str, Tensor]:
        return {
            "eigenvalues": self.exact.eigenvalues,
            "vectors": self.exact.vectors,
            "noise_scale": self.exact.noise_scale,
            "precisions": torch.tensor(self.precisions, dtype=torch.float64),
        }

    @property
    def effective_dimension(self) -> float:
        return float(self.exact.effective_dimension(*self.precisions))

    @property
    def eigenvalues(self) -> Float[Tensor, " NC"]:
        return self.exact.eigenvalues

    def at(self, model: LinearModel, prior: GaussianPrior) -> "GramRegression":
        return GramRegression(replace(self.exact, model=model, prior=prior), overall_precisions(model, prior))

    def mode(self) -> Float[Tensor, " P"]:
        return self.exact.mode(*self.precisions)

    @property
    def mode_outputs(self) -> Float[Tensor, "N C"]:
        return self.exact.mode_outputs(*self.precisions)

    @property
    def mode_norm(self) -> float:
        return float(self.exact.mode_norm(*self.precisions))

    def minimum(self, mode: Float[Tensor, "1 P"]) -> Minimum:
        # The mode is a closed form of the decomposition: it has the residual zero up to rounding, for one pass of VJPs.
        return Minimum(mode, 0.0, 1.0, True)

    def sample(self, draws: Draws) -> Float[Tensor, "K P"]:
        return self.exact.sample(draws, *self.precisions)

    def predict(self, features: Features) -> ExactPrediction:
        return self.exact.at(features)

    def curves(self) -> EvidencePath:
        return regression_curves(self.exact, *self.precisions)

    def leave_one_out(self) -> LeaveOneOut:
        return self.exact.leave_one_out(*self.precisions)


@dataclass(frozen=True)
class GramClassification(GramPosterior):
    """Of any other likelihood, whose curvature is taken at the network's outputs."""

    exact: ExactPosterior

    @classmethod
    def of(cls, model: LinearModel, prior: GaussianPrior) -> "GramClassification":
        problem = ExactClassification.of(model, prior, max_memory=_UNLIMITED)
        return cls(problem.posterior(overall_precision(prior)))

    @classmethod
    def tuned(cls, model: LinearModel, prior: GaussianPrior, bounds: HyperparameterBounds) -> GramOptimum:
        started = time.perf_counter()
        problem = ExactClassification.of(model, prior, max_memory=_UNLIMITED)
        exact = problem.fit(precision_bounds=bounds.precision)
        # A mode that has not converged has a warning of its own.
        return GramOptimum(
            cls(exact), model.likelihood, converged=not exact.at_bounds, seconds=time.perf_counter() - started
        )

    @classmethod
    def restore(cls, model: LinearModel, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "GramClassification":
        # Without the check of `of`: the Gram matrix is built only if leave-one-out predictions or curves ask for it.
        problem, alpha = ExactClassification(model, prior), overall_precision(prior)
        mode = None
        if "coefficients" in tensors:
            mode = problem.mode_of(alpha, tensors["coefficients"], tensors["mode_outputs"])
        values, vectors, outputs = (tensors[name] for name in ("eigenvalues", "vectors", "curvature_outputs"))
        return cls(ExactPosterior(problem, alpha, mode, outputs, values, vectors))

    def tensors(self) -> dict[str, Tensor]:
        kept = {
            "eigenvalues": self.exact.eigenvalues,
            "vectors": self.exact.vectors,
            "curvature_outputs": self.exact.curvature_outputs,
        }
        if self.exact.known_mode is None:
            return kept
        return kept | {"coefficients": self.exact.mode.coefficients, "mode_outputs": self.exact.mode.outputs}

    # The likelihood has no noise of its own, so that `b = 1`: the noise is in the root of the curvature.
    @property
    def precisions(self) -> tuple[float, float]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.exact.precision, 1.0

    @property
    def mode_residual(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.exact.mode.residual

    @property
    def effective_dimension(self) -> float:
        return self.exact.effective_dimension

    @property
    def eigenvalues(self) -> Float[Tensor, " NC"]:
        return self.exact.eigenvalues

    def at(self, model: LinearModel, prior: GaussianPrior) -> "GramClassification":
        return GramClassification(self.exact.with_precision(overall_precision(prior)))

    def mode(self) -> Float[Tensor, " P"]:
        return self.exact.mode_weights()

    @property
    def mode_outputs(self) -> Float[Tensor, "N C"]:
        return self.exact.mode.outputs

    @property
    def mode_norm(self) -> float:
        return self.exact.mode.norm

    def minimum(self, mode: Float[Tensor, "1 P"]) -> Minimum:
        return Minimum(mode, self.exact.mode.residual, 1.0, self.exact.mode.converged)

    def sample(self, draws: Draws) -> Float[Tensor, "K P"]:
        return self.exact.sample(draws)

    def predict(self, features: Features) -> ExactPrediction:
        return self.exact.prediction_at(features)

    def curves(self) -> EvidencePath:
        return classification_curves(self.exact)

    def leave_one_out(self) -> LeaveOneOut:
        return self.exact.leave_one_out()


def gram_posterior_of(likelihood: Likelihood) -> type[GramPosterior]:
    """The kind of posterior that a likelihood has."""
    return GramRegression if isinstance(likelihood, Gaussian) else GramClassification
