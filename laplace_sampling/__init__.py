"""Error bars for any trained PyTorch network: the linearised Laplace approximation by sampling."""

from importlib.metadata import version

from laplace_sampling.data.training_data import Data
from laplace_sampling.evaluate import Evaluation, evaluate
from laplace_sampling.export.posterior_module import save_onnx
from laplace_sampling.hyperparameters.criterion import (
    Accuracy,
    Criterion,
    Evidence,
    LeftOutLabels,
    SelfConsistency,
    Validation,
)
from laplace_sampling.hyperparameters.curves import EvidenceCurves, MarginalLikelihood
from laplace_sampling.hyperparameters.hyperparameters import Step, StopFit
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.largest_variance import largest_variance
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.from_loss import from_loss
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.linear_model.priors.filterwise import FilterwisePrior
from laplace_sampling.linear_model.priors.prior import GPrior, IsotropicPrior, LayerwisePrior, Prior
from laplace_sampling.methods.closed_form import Exact, Factored, Subset
from laplace_sampling.methods.method import Method
from laplace_sampling.methods.plan import Auto
from laplace_sampling.methods.solves import Dual, Krylov, Stochastic
from laplace_sampling.posterior import NotFittedError
from laplace_sampling.predictions.calibration import Calibration, CalibrationWarning
from laplace_sampling.predictions.diagnosis import Diagnosis
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.predictions.model_score import Comparison, Score, compare
from laplace_sampling.predictions.prediction import (
    ClassificationPrediction,
    CountPrediction,
    HeteroscedasticPrediction,
    MultiTaskPrediction,
    Prediction,
    RegressionPrediction,
)
from laplace_sampling.residual_precision import residual_precision
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import ConvergenceWarning
from laplace_sampling.solvers.svrg import SVRG

__all__ = [
    "SGD",
    "SVRG",
    "Accuracy",
    "Auto",
    "Bernoulli",
    "Calibration",
    "CalibrationWarning",
    "Categorical",
    "ClassificationPrediction",
    "Comparison",
    "ConvergenceWarning",
    "CountPrediction",
    "Criterion",
    "Data",
    "Diagnosis",
    "Dual",
    "Evaluation",
    "Evidence",
    "EvidenceCurves",
    "Exact",
    "Factored",
    "FilterwisePrior",
    "GPrior",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HeteroscedasticPrediction",
    "IsotropicPrior",
    "Krylov",
    "LayerwisePrior",
    "LeaveOneOut",
    "LeftOutLabels",
    "Likelihood",
    "LinearisedLaplace",
    "MarginalLikelihood",
    "Method",
    "MultiTask",
    "MultiTaskPrediction",
    "NotFittedError",
    "Poisson",
    "Prediction",
    "Prior",
    "RegressionPrediction",
    "Score",
    "SelfConsistency",
    "Step",
    "Stochastic",
    "StopFit",
    "Subset",
    "Validation",
    "compare",
    "evaluate",
    "from_loss",
    "largest_variance",
    "residual_precision",
    "save_onnx",
]

__version__ = version("laplace_sampling")
