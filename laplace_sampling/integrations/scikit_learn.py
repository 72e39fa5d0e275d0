r"""Estimators of scikit-learn with error bars: `pip install "laplace_sampling[scikit_learn]"`.

`LaplaceRegressor` and `LaplaceClassifier` train a network and fit the linearised Laplace approximation to the same
data. They work in pipelines, cross-validation and searches of scikit-learn.

What `predict(X, return_std=True)` returns includes the noise, which is learnt from the data. This is so for the
estimators of scikit-learn that learn their noise, `BayesianRidge`, and `GaussianProcessRegressor` with a `WhiteKernel`;
`GaussianProcessRegressor(alpha=...)`, to which the noise is given, returns the function without it, as `noise=False`
does here.
"""

import copy
import math
from collections.abc import Callable
from numbers import Real
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
except ImportError as error:  # pragma: no cover
    raise ImportError(
        '`laplace_sampling.integrations.scikit_learn` needs scikit-learn: pip install "laplace_sampling[scikit_learn]"'
    ) from error

from laplace_sampling.arguments import check_positive, check_whole
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.random_weights import Subset
from laplace_sampling.predictions.prediction import ClassificationPrediction, Prediction, RegressionPrediction

# What an estimator takes.
Network = nn.Module | Callable[[int, int], nn.Module]

# The loss by which each likelihood is trained.
_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "regression": nn.functional.mse_loss,
    "binary": nn.functional.binary_cross_entropy_with_logits,
    "classification": nn.functional.cross_entropy,
}
# Prior precisions that cross-validation chooses from, of standardised targets: decades around one, and none.
_PRECISIONS = (0.0, 0.1, 1.0, 10.0, 100.0)
_FOLDS = 4


class _LaplaceEstimator(BaseEstimator):
    """What both estimators share: the network, its training, and the posterior."""

    def __init__(
        self,
        network: Network | None = None,
        *,
        max_epochs: int = 200,
        lr: float = 0.001,
        batch_size: int = 128,
        weight_decay: float | str = "auto",
        conformal: float = 0.0,
        prior: str | Prior = "isotropic",
        parameters: Subset = None,
        method: str | Method = "auto",
        num_samples: int = 64,
        random_state: int | np.random.RandomState | None = 0,
    ) -> None:
        self.network = network
        self.max_epochs = max_epochs
        self.lr = lr
        self.batch_size = batch_size
        self.weight_decay = weight_decay
        self.conformal = conformal
        self.prior = prior
        self.parameters = parameters
        self.method = method
        self.num_samples = num_samples
        self.random_state = random_state

    def _fit(self, x: np.ndarray, y: np.ndarray, num_outputs: int, regression: bool) -> Self:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        name = type(self).__name__
        check_whole(f"`{name}(max_epochs=...)`", self.max_epochs, 0)
        check_positive(f"`{name}(lr=...)`", self.lr)
        check_whole(f"`{name}(batch_size=...)`", self.batch_size, 1)
        if self.weight_decay != "auto" and not (
            isinstance(self.weight_decay, float | int | np.number) and self.weight_decay >= 0
        ):
            raise ValueError(
                f'`{name}(weight_decay=...)` must be "auto" or a number of at least 0, but is {self.weight_decay!r}.'
            )
        if not (isinstance(self.conformal, Real) and 0 <= self.conformal < 1):
            raise ValueError(
                f"`{name}(conformal=...)` must be the share of the data that makes intervals conformal, from 0 to "
                f"below 1, but is {self.conformal!r}."
            )
        # Initial weights and the order of batches come from torch's global generators.
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            held_out = math.ceil(self.conformal * len(x))
            held_out_x, held_out_y = x[:held_out], y[:held_out]
            if held_out:
                if held_out > len(x) - 2:
                    raise ValueError(
                        f"`{name}(conformal={self.conformal})` leaves {len(x) - held_out} of {len(x)} data for the "
                        "network: give a smaller share, or more data."
                    )
                order = torch.randperm(len(x)).numpy()
                held_out_x, held_out_y = x[order[:held_out]], y[order[:held_out]]
                x, y = x[order[held_out:]], y[order[held_out:]]
            network = self._made(x, y if regression else None, num_outputs)
            inputs = _inputs(network, x)
            with torch.no_grad():
                outputs = network(inputs[:2])
            likelihood = "regression" if regression else "binary" if outputs[0].numel() == 1 else "classification"
            targets = self._targets(y, outputs, likelihood, num_outputs)
            # The loss of a regression is twice the half of squared errors in units of the variance, times the latter.
            unit = 2 * float(targets.var(0, correction=0).mean()) if regression else 1.0
            loss = _LOSSES[likelihood]
            self.weight_decay_ = self._chosen_decay(network, inputs, targets, loss, unit)
            self._train(network, inputs, targets, loss, self.weight_decay_ * unit)
        self.network_, parameters = network, self.parameters
        if self.network is None and parameters == "last_layer":
            parameters = _LAST  # by its name, as the outputs of the layer are rescaled after it
        self.laplace_ = LinearisedLaplace(
            network,
            Gaussian(torch.ones(num_outputs)) if regression and num_outputs > 1 else likelihood,
            prior=self.prior,
            parameters=parameters,
            method=self.method,
            num_samples=self.num_samples,
            seed=seed,
        )
        loader = DataLoader(TensorDataset(inputs, targets), batch_size=self.batch_size)
        self.laplace_.fit_hyperparameters(loader, progress=False)
        if held_out:
            held_out_data = _inputs(network, held_out_x), self._targets(held_out_y, outputs, likelihood, num_outputs)
            self.laplace_.calibrate_conformal(DataLoader(TensorDataset(*held_out_data), batch_size=self.batch_size))
        return self

    def _chosen_decay(
        self, network: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], unit: float
    ) -> float:
        """The weight decay that was given; or the one of the smallest loss in cross-validation, by copies."""
        if self.weight_decay != "auto":
            return float(self.weight_decay)
        if len(x) < _FOLDS or not self.max_epochs:
            return 0.0
        fold, losses = torch.randperm(len(x)) % _FOLDS, dict.fromkeys((a / len(x) for a in _PRECISIONS), 0.0)
        for number in range(_FOLDS):
            others, left_out = (part.nonzero()[:, 0] for part in (fold != number, fold == number))
            for decay in losses:
                copied = copy.deepcopy(network)
                self._train(copied, x[others], y[others], loss, decay * unit)
                with torch.no_grad():
                    losses[decay] += len(left_out) * float(loss(copied(x[left_out]), y[left_out]))
        return min(losses, key=losses.__getitem__)

    def _made(self, x: np.ndarray, targets: np.ndarray | None, num_outputs: int) -> nn.Module:
        """The network before training, in evaluation mode: a copy of a module, or what a callable makes."""
        if self.network is None:
            return _default_network(x, num_outputs, targets).eval()
        if isinstance(self.network, nn.Module):
            return copy.deepcopy(self.network).eval()
        return self.network(x[0].size, num_outputs).eval()

    def _targets(self, y: np.ndarray, outputs: Tensor, likelihood: str, num_outputs: int) -> Tensor:
        """The targets in the shape of the outputs."""
        found = outputs[0].numel()
        if found != (1 if likelihood == "binary" and num_outputs == 2 else num_outputs):
            raise ValueError(
                f"`{type(self).__name__}.fit(X, y)`: the network has {found} outputs for each datum, but `y` needs "
                f"{num_outputs}."
            )
        targets = torch.tensor(y).to(outputs.device)
        if likelihood == "classification":
            return targets
        return targets.to(outputs.dtype).reshape(len(y), *outputs.shape[1:])

    def _train(
        self, network: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], decay: float
    ) -> None:
        """Minimises the mean loss plus `½ decay ‖w‖²` by Adam, and leaves the network in evaluation mode."""
        weights = [weight for weight in network.parameters() if weight.requires_grad]
        optimiser = torch.optim.Adam(network.parameters(), lr=self.lr)
        network.train()
        for _ in range(self.max_epochs):
            for batch in torch.randperm(len(x)).split(self.batch_size):
                optimiser.zero_grad()
                penalty = 0.5 * decay * sum(weight.square().sum() for weight in weights) if decay else 0.0
                (loss(network(x[batch]), y[batch]) + penalty).backward()
                optimiser.step()
        network.eval()

    def _predict(self, X: Any) -> Prediction:
        check_is_fitted(self)
        x: Any = validate_data(self, X, reset=False, dtype=np.float64, allow_nd=True)
        return self.laplace_.predict(_inputs(self.network_, x))


class LaplaceRegressor(RegressorMixin, _LaplaceEstimator):
    r"""A regression by a network, with error bars by the linearised Laplace approximation.

    Args:
        network: a `torch.nn.Module`, a copy of which is trained from the weights that it has; or a callable
            `(num_inputs, num_outputs) -> nn.Module`. By default two layers of 50 units, in double precision, which
            standardise inputs and targets.
        max_epochs: epochs of the training, by Adam; with 0 the weights stay as they are.
        lr: step size of the training.
        batch_size: data of a step, and data that go through the network together.
        weight_decay: `λ` of the training, whose loss is half the mean squared error in units of the variance of the
            targets, or the mean cross-entropy, plus `½ λ ‖w‖²`. By default cross-validation in four parts chooses it,
            among none and the decays `α/N` of prior precisions `α` of 0.1, 1, 10 and 100, before the network is trained
            on all data. It takes twenty trainings: give a number for a network that takes long.
        conformal: share of the data, drawn at random, that neither the network nor the posterior sees; they make
            `predict_interval` and `predict_set` contain as many targets as they promise (`calibrate_conformal`).
        prior: as in `LinearisedLaplace`.
        parameters: which weights are random, as in `LinearisedLaplace`.
        method: as in `LinearisedLaplace`.
        num_samples: number of posterior samples.
        random_state: the seed of initial weights, batches and samples.

    Attributes:
        network_: the network that was trained.
        weight_decay_: the weight decay of the training.
        laplace_: the fitted `LinearisedLaplace`, for everything else: `laplace_.predict(x)`, `laplace_.save(path)`.
        n_features_in_: number of columns of `X`.

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
            ValueError: for data that are no finite numbers, and a network whose outputs do not fit them.
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
            noise: whether they are those of new targets, `√(var f + σ²)`, or of the function alone, `√(var f)`.
        """
        pred = self._predict(X)
        assert isinstance(pred, RegressionPrediction)
        mean = self._array(pred.mean)
        if not return_std:
            return mean
        return mean, self._array((pred.observation_variance if noise else pred.variance).sqrt())

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of intervals that contain a new target with this probability, each `[N]` or `[N, D]`.

        With `conformal` that is guaranteed for data of the same distribution, on average over inputs; else it is as
        true as the model is (`interval` of predictions).

        Args:
            X: inputs.
            level: the probability.
        """
        pred = self._predict(X)
        assert isinstance(pred, RegressionPrediction)
        lower, upper = pred.interval(level)
        return self._array(lower), self._array(upper)

    def sample_y(
        self, X: Any, n_samples: int = 1, random_state: int | np.random.RandomState | None = 0, noise: bool = True
    ) -> np.ndarray:
        r"""Draws of the targets, joint over inputs: `[N, n_samples]` or `[N, D, n_samples]`.

        Each is the network's output plus `(1/√K) Σ_k ε_k φ(x)ζ_k`, `ε ~ N(0, I)`, which has the covariance of the `K`
        samples of the posterior, plus independent noise.

        Args:
            X: inputs.
            n_samples: number of draws.
            random_state: the seed of the draws.
            noise: whether to add the noise; without it they are draws of the function.
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
    r"""A classification by a network, with probabilities that include error bars (`ClassificationPrediction.probs`).

    Arguments and attributes are those of `LaplaceRegressor`. The network returns logits, one for each class. For two
    classes it may also return a single one.

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
                network whose outputs do not fit them.
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

    def predict_set(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Marks of the classes of a set that contains the label with this probability, `[N, C]`.

        With `conformal` that is guaranteed for data of the same distribution, on average over inputs; else it is as
        true as the model is (`prediction_set`).

        Args:
            X: inputs.
            level: the probability.
        """
        pred = self._predict(X)
        assert isinstance(pred, ClassificationPrediction)
        return pred.prediction_set(level).cpu().numpy().reshape(len(pred.outputs), -1)


class _Affine(nn.Module):
    """`scale ⊙ x + shift`, without weights."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


# The last layer with weights of the default network.
_LAST = "6.*"


def _default_network(x: np.ndarray, num_outputs: int, targets: np.ndarray | None) -> nn.Module:
    """Two layers between inputs, and targets if they are numbers, that are standardised inside the network."""
    mean, stddev = _moments(x)
    layers = [nn.Flatten(), _Affine(1 / stddev, -mean / stddev)]
    layers += [nn.Linear(len(mean), 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, num_outputs)]
    if targets is not None:
        mean, stddev = _moments(targets)
        layers.append(_Affine(stddev, mean))
    return nn.Sequential(*layers).double()


def _moments(values: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column; one for a column that is constant."""
    columns = torch.tensor(values).reshape(len(values), -1)
    stddev = columns.std(0, correction=0)
    return columns.mean(0), stddev.where(stddev > 0, 1)


def _inputs(network: nn.Module, x: np.ndarray) -> Tensor:
    """Inputs in the precision of a network, and where it is."""
    weights = (weight for weight in network.parameters() if weight.is_floating_point())
    # Copied: arrays may be read-only, which tensors cannot be.
    return torch.tensor(x).to(next(weights, torch.zeros(0)))
