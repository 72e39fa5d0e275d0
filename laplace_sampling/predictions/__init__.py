"""What `predict` returns, how wide its error bars should be, and how good the samples behind it are.

- `Prediction` and one kind a family of likelihoods; `make_prediction` has the table of kinds.
- `FunctionCovariance`: covariances that are known without samples; `DenseCovariance` by a factor of `H`.
- `Calibration`: factors of covariance, temperature and noise, from held-out data or left-out training data, and what
  these say about them.
- `LeaveOneOut`: each training datum predicted from the others.
- `Diagnosis`: a table of checks of a fit.
"""

from laplace_sampling.predictions.calibration import Calibration, CalibrationWarning
from laplace_sampling.predictions.classification_prediction import ClassificationPrediction
from laplace_sampling.predictions.dense_covariance import DenseCovariance
from laplace_sampling.predictions.diagnosis import Check, Diagnosis
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.predictions.make_prediction import CountPrediction, MultiTaskPrediction, make_prediction
from laplace_sampling.predictions.prediction import Prediction, SampledPrediction
from laplace_sampling.predictions.regression_prediction import HeteroscedasticPrediction, RegressionPrediction

__all__ = [
    "Calibration",
    "CalibrationWarning",
    "Check",
    "ClassificationPrediction",
    "CountPrediction",
    "DenseCovariance",
    "Diagnosis",
    "FunctionCovariance",
    "HeteroscedasticPrediction",
    "LeaveOneOut",
    "MultiTaskPrediction",
    "Prediction",
    "RegressionPrediction",
    "SampledPrediction",
    "make_prediction",
]
