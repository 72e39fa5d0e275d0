r"""Estimators of scikit-learn with error bars: `pip install "laplace_sampling[scikit_learn]"`.

`LaplaceRegressor` and `LaplaceClassifier` train a network, by skorch, and fit the linearised Laplace approximation
to the same data. They work in pipelines, cross-validation and searches of scikit-learn.

What `predict(X, return_std=True)` returns includes the noise, which is learnt from the data. So it does for the
estimators of scikit-learn that learn their noise, `BayesianRidge`, and `GaussianProcessRegressor` with a `WhiteKernel`;
`GaussianProcessRegressor(alpha=...)`, to which the noise is given, returns the function without it, as `noise=False`
does here.
"""

import math
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import Tags, check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
    from skorch import NeuralNet, NeuralNetBinaryClassifier
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "`laplace_sampling.integrations.scikit_learn` needs scikit-learn and skorch: pip install "
        '"laplace_sampling[scikit_learn]"'
    ) from error

from laplace_sampling.integrations.skorch_nets import (
    LIKELIHOODS,
    Log,
    Network,
    initialised,
    inputs_of,
    outputs_of,
    returns_probs,
)
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.random_weights import Subset
from laplace_sampling.predictions.classification_prediction import ClassificationPrediction
from laplace_sampling.predictions.prediction import Prediction
from laplace_sampling.predictions.regression_prediction import RegressionPrediction
from laplace_sampling.solvers.checks import check_positive, check_whole

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]

_LARGEST_SEED = 2**31 - 1


class _LaplaceEstimator(BaseEstimator):
    """What both estimators share: the network, its training by skorch, and the posterior."""

    def __init__(
        self,
        net: Network | None = None,
        *,
        max_epochs: int = 200,
        lr: float = 0.001,
        batch_size: int = 128,
        prior: str | Prior = "isotropic",
        parameters: Subset = None,
        method: str | Method = "auto",
        num_samples: int = 64,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.net = net
        self.max_epochs = max_epochs
        self.lr = lr
        self.batch_size = batch_size
        self.prior = prior
        self.parameters = parameters
        self.method = method
        self.num_samples = num_samples
        self.random_state = random_state

    def _fit(self, x: np.ndarray, y: np.ndarray, num_outputs: int, regression: bool) -> Self:
        seed = int(check_random_state(self.random_state).randint(_LARGEST_SEED))
        name = type(self).__name__
        check_whole(f"`{name}(max_epochs=...)`", self.max_epochs, 0)
        check_positive(f"`{name}(lr=...)`", self.lr)
        check_whole(f"`{name}(batch_size=...)`", self.batch_size, 1)
        # Initial weights and the order of batches come from torch's global generators.
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            net = initialised(
                self.net,
                x,
                y if regression else None,
                num_outputs,
                max_epochs=self.max_epochs,
                lr=self.lr,
                batch_size=self.batch_size,
            )
            likelihood = self._likelihood(net, regression)
            inputs = inputs_of(net.module_, x).cpu()
            targets = self._targets(y, outputs_of(net.module_, x), likelihood, num_outputs)
            if net is not self.net:
                # This net flattens its outputs, and no other.
                flat = isinstance(net, NeuralNetBinaryClassifier)
                net.partial_fit(inputs, targets.flatten() if flat else targets)
        self.net_ = net
        self.laplace_ = LinearisedLaplace(
            nn.Sequential(net.module_, Log()) if returns_probs(net) else net.module_,
            Gaussian(torch.ones(num_outputs)) if regression and num_outputs > 1 else likelihood,
            prior=self.prior,
            parameters=self.parameters,
            method=self.method,
            num_samples=self.num_samples,
            seed=seed,
        )
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=self.batch_size)
        self.laplace_.fit_hyperparameters(loader, progress=False)
        return self

    def _likelihood(self, net: NeuralNet, regression: bool) -> str:
        """The likelihood of which the criterion of a net is the loss."""
        known = {loss: name for loss, name in LIKELIHOODS.items() if (name == "regression") == regression}
        found = type(net.criterion_)
        if found not in known:
            raise ValueError(
                f"`{type(self).__name__}(net)` needs a net of skorch whose criterion is "
                f"{' or '.join(loss.__name__ for loss in known)}, but it is {found.__name__}."
            )
        return known[found]

    def _targets(self, y: np.ndarray, outputs: Tensor, likelihood: str, num_outputs: int) -> Tensor:
        """The targets in the shape of the outputs."""
        found = outputs[0].numel()
        if found != (1 if likelihood == "binary" and num_outputs == 2 else num_outputs):
            what = "columns of targets" if likelihood == "regression" else "classes"
            raise ValueError(
                f"`{type(self).__name__}.fit(X, y)`: the number of outputs of the network for each datum is {found}, "
                f"but that of {what} in `y` is {num_outputs}."
            )
        if likelihood == "classification":
            return torch.tensor(y)
        return torch.tensor(y).to(outputs.dtype).reshape(len(y), *outputs.shape[1:])

    def _predict(self, X: Any) -> Prediction:
        check_is_fitted(self)
        x: Any = validate_data(self, X, reset=False, dtype=np.float64, allow_nd=True)
        return self.laplace_.predict(inputs_of(self.net_.module_, x))


class LaplaceRegressor(RegressorMixin, _LaplaceEstimator):
    r"""A regression by a network, with error bars by the linearised Laplace approximation.

    Args:
        net: the network: a `torch.nn.Module`, of which a copy is trained from the weights that it has; a callable
            `(num_inputs, num_outputs) -> nn.Module`; a net of skorch, of which a copy is trained as it says; or a net
            of skorch that is initialised (fitted, or with weights that were loaded), which is taken as it is, and must
            have been trained on the data of `fit`: to copy it, as cross-validation does, is to forget its weights. By
            default two layers of 50 units, in double precision, which standardise inputs and targets.
        max_epochs: of the training of a module, by Adam; with 0 its weights stay what they are.
        lr: of the same.
        batch_size: of the same, and of the data that go through the network together.
        prior: as of `LinearisedLaplace`, and so are `parameters`, `method` and `num_samples`.
        parameters: which weights are random.
        method: of the fit.
        num_samples: of the posterior.
        random_state: of initial weights, batches and samples.

    Attributes:
        net_: the net of skorch that was trained.
        laplace_: the fitted `LinearisedLaplace`, with all that it offers: `laplace_.predict(x)`, `laplace_.save(path)`.
        n_features_in_: columns of `X`.

    Example:
        >>> import numpy as np
        >>> from laplace_sampling.integrations.scikit_learn import LaplaceRegressor
        >>> X = np.linspace(-1, 1, 40)[:, None]
        >>> y = X[:, 0] + 0.1 * np.random.RandomState(0).randn(40)
        >>> regressor = LaplaceRegressor(lr=0.01).fit(X, y)
        >>> mean, std = regressor.predict([[0.0], [3.0]], return_std=True)
        >>> bool(std[1] > 2 * std[0])
        True
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network, and fit its hyperparameters and posterior.

        Args:
            X: inputs, `[N, ...]`.
            y: targets, `[N]`, or `[N, D]` with a noise precision for each of the `D` columns.

        Raises:
            ValueError: for data that are no finite numbers, and a network whose outputs or criterion do not fit them.
        """
        x: Any
        x, y = validate_data(
            self, X, y, dtype=np.float64, allow_nd=True, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        self._target_shape = y.shape[1:]
        return self._fit(x, y.astype(np.float64), y[0].size, regression=True)

    def predict(
        self, X: Any, return_std: bool = False, noise: bool = True
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        r"""The network's own output, `[N]` or `[N, D]`, and with `return_std` its standard deviation, of that shape.

        Args:
            X: inputs.
            return_std: whether to return standard deviations as well.
            noise: whether these are of new targets, `√(var f + σ²)`, or of the function alone, `√(var f)`.
        """
        pred = self._predict(X)
        assert isinstance(pred, RegressionPrediction)
        mean = self._array(pred.mean)
        if not return_std:
            return mean
        return mean, self._array((pred.observation_variance if noise else pred.variance).sqrt())

    def sample_y(
        self, X: Any, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0, noise: bool = True
    ) -> np.ndarray:
        r"""Draws of the targets, joint over inputs: `[N, n_samples]` or `[N, D, n_samples]`.

        Each is the network's output with `(1/√K) Σ_k ε_k φ(x)ζ_k`, `ε ~ N(0, I)`, which has the covariance of the `K`
        samples of the posterior, and independent noise.

        Args:
            X: inputs.
            n_samples: draws.
            random_state: of the draws.
            noise: without it they are of the function.
        """
        rng = check_random_state(random_state)
        pred = self._predict(X)
        assert isinstance(pred, RegressionPrediction)
        deviations = pred.deviations.cpu().double().numpy()
        weights = rng.standard_normal((len(deviations), n_samples)) / math.sqrt(len(deviations))
        draws = np.tensordot(np.moveaxis(deviations, 0, -1), weights, 1)
        draws = self._array(pred.mean)[..., None] + draws.reshape(len(draws), *self._target_shape, n_samples)
        if noise:
            stddev = self._array(pred.noise_variance.expand_as(pred.mean).sqrt())[..., None]
            draws = draws + stddev * rng.standard_normal(draws.shape)
        return draws

    def _array(self, values: Tensor) -> np.ndarray:
        return values.cpu().double().numpy().reshape(len(values), *self._target_shape)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class LaplaceClassifier(ClassifierMixin, _LaplaceEstimator):
    r"""A classification by a network, with probabilities that know of error bars, as `ClassificationPrediction.probs`.

    Arguments and attributes are those of `LaplaceRegressor`. The network returns logits, one for each class, or for two
    classes also a single one. That of a `NeuralNetClassifier` with `NLLLoss` returns probabilities, as skorch wants it.

    Attributes:
        classes_: the labels, of any kind, in the order of the columns of `predict_proba`.

    Example:
        >>> import numpy as np
        >>> from laplace_sampling.integrations.scikit_learn import LaplaceClassifier
        >>> X = np.random.RandomState(0).randn(60, 2)
        >>> y = np.where(X[:, 0] + 0.3 * np.random.RandomState(1).randn(60) > 0, "right", "left")
        >>> classifier = LaplaceClassifier(lr=0.01).fit(X, y)
        >>> classifier.classes_.tolist(), classifier.predict([[2.0, 0.0]]).tolist()
        (['left', 'right'], ['right'])
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Train the network, and fit its hyperparameters and posterior.

        Args:
            X: inputs, `[N, ...]`.
            y: labels, `[N]`.

        Raises:
            ValueError: for data that are no finite numbers, labels that are no classes or of one class only, and a
                network whose outputs or criterion do not fit them.
        """
        x: Any
        x, y = validate_data(self, X, y, dtype=np.float64, allow_nd=True, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "`LaplaceClassifier.fit(X, y)` needs labels of two classes or more, but `y` has one class."
            )
        return self._fit(x, labels, len(self.classes_), regression=False)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities of the classes, means over the samples of the posterior, `[N, C]`."""
        pred = self._predict(X)
        assert isinstance(pred, ClassificationPrediction)
        probs = pred.probs.cpu().double().numpy().reshape(len(pred.outputs), -1)
        if probs.shape[1] == 1:
            probs = np.hstack([1 - probs, probs])
        return probs / probs.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each input."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(1)]
