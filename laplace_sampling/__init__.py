"""Error bars for any trained PyTorch network: the linearised Laplace approximation by sampling."""

from importlib.metadata import version

from laplace_sampling.evidence.curves import EvidenceCurves, MarginalLikelihood
from laplace_sampling.evidence.em import EMStep
from laplace_sampling.evidence.plots import plot_evidence
from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.laplace import LinearisedLaplace, NotFittedError
from laplace_sampling.largest_variance import largest_variance
from laplace_sampling.likelihoods.composite import MultiTask
from laplace_sampling.likelihoods.from_loss import from_loss
from laplace_sampling.likelihoods.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from laplace_sampling.linear_model.priors import GPrior, IsotropicPrior, LayerwisePrior, Prior
from laplace_sampling.predictions.classification_prediction import ClassificationPrediction
from laplace_sampling.predictions.count_prediction import CountPrediction
from laplace_sampling.predictions.diagnosis import Diagnosis
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.predictions.multi_task_prediction import MultiTaskPrediction
from laplace_sampling.predictions.prediction import Prediction
from laplace_sampling.predictions.regression_prediction import HeteroscedasticPrediction, RegressionPrediction
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import ConvergenceWarning

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
