"""Error bars for any trained PyTorch network: the linearised Laplace approximation by sampling."""

from importlib.metadata import version

from laplace_sampling.curves import EvidenceCurves, MarginalLikelihood
from laplace_sampling.diagnostics import Diagnosis
from laplace_sampling.dual import DualCG
from laplace_sampling.evidence import EMStep
from laplace_sampling.laplace import LinearisedLaplace, NotFittedError
from laplace_sampling.leave_one_out import LeaveOneOut
from laplace_sampling.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from laplace_sampling.plotting import plot_evidence
from laplace_sampling.predictive import ClassificationPrediction, RegressionPrediction
from laplace_sampling.priors import GPrior, IsotropicPrior, LayerwisePrior, Prior
from laplace_sampling.solvers import ConvergenceWarning
from laplace_sampling.stochastic import SGD

__all__ = [
    "SGD",
    "Bernoulli",
    "Categorical",
    "ClassificationPrediction",
    "ConvergenceWarning",
    "Diagnosis",
    "DualCG",
    "EMStep",
    "EvidenceCurves",
    "GPrior",
    "Gaussian",
    "IsotropicPrior",
    "LayerwisePrior",
    "LeaveOneOut",
    "Likelihood",
    "LinearisedLaplace",
    "MarginalLikelihood",
    "NotFittedError",
    "Prior",
    "RegressionPrediction",
    "plot_evidence",
]

__version__ = version("laplace_sampling")
