"""Error bars for any trained PyTorch network: the linearised Laplace approximation by sampling."""

from importlib.metadata import version

from laplace_sampling.composite_likelihoods import MultiTask
from laplace_sampling.curves import EvidenceCurves, MarginalLikelihood
from laplace_sampling.diagnostics import Diagnosis
from laplace_sampling.dual import DualCG
from laplace_sampling.evidence import EMStep
from laplace_sampling.laplace import LinearisedLaplace, NotFittedError
from laplace_sampling.largest_variance import largest_variance
from laplace_sampling.leave_one_out import LeaveOneOut
from laplace_sampling.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from laplace_sampling.loss_likelihoods import from_loss
from laplace_sampling.plotting import plot_evidence
from laplace_sampling.predictive import (
    ClassificationPrediction,
    CountPrediction,
    HeteroscedasticPrediction,
    MultiTaskPrediction,
    Prediction,
    RegressionPrediction,
)
from laplace_sampling.priors import GPrior, IsotropicPrior, LayerwisePrior, Prior
from laplace_sampling.solvers import ConvergenceWarning
from laplace_sampling.stochastic import SGD

__all__ = [
    "SGD",
    "Bernoulli",
    "Categorical",
    "ClassificationPrediction",
    "ConvergenceWarning",
    "CountPrediction",
    "Diagnosis",
    "DualCG",
    "EMStep",
    "EvidenceCurves",
    "GPrior",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HeteroscedasticPrediction",
    "IsotropicPrior",
    "LayerwisePrior",
    "LeaveOneOut",
    "Likelihood",
    "LinearisedLaplace",
    "MarginalLikelihood",
    "MultiTask",
    "MultiTaskPrediction",
    "NotFittedError",
    "Poisson",
    "Prediction",
    "Prior",
    "RegressionPrediction",
    "from_loss",
    "largest_variance",
    "plot_evidence",
]

__version__ = version("laplace_sampling")
