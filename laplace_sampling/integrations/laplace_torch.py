r"""`Laplace(..., hessian_structure="sampled")`: posteriors of this library for callers of laplace-torch.

After `import laplace_sampling.integrations.laplace_torch`, laplace-torch finds the two classes below by their `_key`:

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="sampled")

It is fitted, tuned and called as any other `Laplace`, and returns what these return. The posterior behind it is a
`LinearisedLaplace`, in `la.linearised`. See `docs/from_laplace_torch.md`.

`pip install laplace_sampling[laplace_torch]`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_sampling.data.batches import place
from laplace_sampling.data.training_data import Data
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.priors.prior import IsotropicPrior
from laplace_sampling.methods.method import Method
from laplace_sampling.posterior import NotFittedError
from laplace_sampling.predictions.calibration import Calibration

try:
    from laplace.baselaplace import ParametricLaplace
except ImportError as error:
    raise ImportError(
        "`laplace_sampling.integrations.laplace_torch` is for callers of laplace-torch, which is not there or does not "
        f"import ({error}): `pip install laplace_sampling[laplace_torch]` has versions that work together."
    ) from error

# How far, in decades, a curve of the evidence goes to both sides of a fit, and its points: a cubic between them has an
# error of 1e-9 of the effective dimension.
_DECADES, _POINTS = 2.0, 641


class SampledLaplace(ParametricLaplace):
    """All weights, with a posterior that is sampled; arguments and results are those of laplace-torch.

    Covariances are those of the samples, or exact if the method is. Samples of the function are joint: each is one
    function at all inputs, `f + Σ_k ε_k φ(x)ζ_k/√K` with the `K` samples of the fit.

    Args:
        model: the trained network.
        likelihood: `"regression"` or `"classification"`.
        sigma_noise: standard deviation of the noise of a regression, `1/√noise_precision`.
        prior_precision: one number, in units of the sum of losses.
        prior_mean: mean of the weights, for the marginal likelihood; predictions do not depend on it.
        temperature: `T`, which divides the curvature.
        dict_key_x: not needed: a model that takes a dictionary gets it whole.
        dict_key_y: the key of the targets in batches that are dictionaries.
        method: as in `LinearisedLaplace`.
        num_samples: `K`.
        seed: the seed of the samples.
        budget: the budget of each fit, as in `LinearisedLaplace.fit`.

    Raises:
        ValueError: for settings that are not known, as in laplace-torch and `LinearisedLaplace`.

    Attributes:
        linearised: the `LinearisedLaplace` of the last fit; `None` before `fit`.
        mean: the weights of the network, `[P]`.
    """

    _key = ("all", "sampled")
    _parameters: str | None = None

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        sigma_noise: float | Tensor = 1.0,
        prior_precision: float | Tensor = 1.0,
        prior_mean: float | Tensor = 0.0,
        temperature: float = 1.0,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        method: str | Method = "auto",
        num_samples: int = 100,
        seed: int = 0,
        budget: float | None = 10.0,
    ) -> None:
        self._settings: dict[str, Any] = {"method": method, "num_samples": num_samples, "seed": seed}
        self._budget = budget
        self._loader: Any = None
        self._generator = torch.Generator().manual_seed(seed)
        self.linearised: LinearisedLaplace | None = None
        super().__init__(
            model,
            likelihood,
            sigma_noise,
            prior_precision,
            prior_mean,
            temperature,
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
        )
        self._take_weights(self._unfitted())

    def fit(self, train_loader: DataLoader, override: bool = True, progress_bar: bool = False) -> None:
        """Compute the posterior at these hyperparameters, and keep the loader, to fit again when they have changed.

        Raises:
            NotImplementedError: for `override=False`.
            TypeError, ValueError: for data that do not fit the model, as in `LinearisedLaplace.fit`.
        """
        if not override:
            raise NotImplementedError(
                '`hessian_structure="sampled"` does not add data to a posterior, `fit(override=False)`: give all data.'
            )
        self._loader = train_loader
        la = self._fit(progress_bar)
        self._take_weights(la)
        self.mean, self.n_data = la.network.weights, 0
        self.loss = torch.zeros((), device=self._device, dtype=self._dtype)
        for x, y in map(self._unpacked, train_loader):
            outputs = la.network(place(x, la.network.device, la.network.dtype))
            if outputs.dim() > 2 and self.likelihood == "classification":
                raise NotImplementedError("laplace-torch has classes on the last axis: use `LinearisedLaplace`.")
            # Half of the squared errors, without the constant of their density.
            if self.likelihood == "regression":
                self.loss = self.loss + (outputs - y.to(outputs)).square().sum() / 2
            else:
                self.loss = self.loss + nn.functional.cross_entropy(outputs, y.to(outputs.device), reduction="sum")
            self.n_data, self.n_outputs = self.n_data + len(y), outputs[0].numel()

    def _unfitted(self) -> LinearisedLaplace:
        """A `LinearisedLaplace` at the present hyperparameters."""
        precision, sigma, temperature = self._hyperparameters()
        return LinearisedLaplace(
            self.model,
            Gaussian(sigma**-2, learn=False) if self.likelihood == "regression" else self.likelihood,
            # The temperature `T` is a prior of precision `Tα`, and a covariance that is multiplied by `T`.
            prior=IsotropicPrior(temperature * precision),
            parameters=self._parameters,
            **self._settings,
        )

    def _fit(self, progress: bool) -> LinearisedLaplace:
        la = self._unfitted()
        la.fit(self._loader, data=Data(unpack=self._unpacked), budget=self._budget, progress=progress)
        posterior = replace(la.posterior_, calibration=Calibration(scale=float(self.temperature)))
        la._fitted = replace(la._require("fit"), posterior=posterior)
        return self._keep(la)

    def _keep(self, la: LinearisedLaplace) -> LinearisedLaplace:
        self.linearised, self._fitted_at, self._curve = la, self._hyperparameters(), None
        return la

    def _take_weights(self, la: LinearisedLaplace) -> None:
        """Sets the parameters that are random; a last layer is known after a run of the network."""
        parameters = dict(self.model.named_parameters())
        self.params = [parameters[name] for name in la.network.names]
        self.n_params, self.n_layers = la.network.num_parameters, len(self.params)

    def _hyperparameters(self) -> tuple[float, float, float]:
        precision = torch.as_tensor(self.prior_precision)
        if precision.numel() > 1:
            raise NotImplementedError(
                '`hessian_structure="sampled"` has one prior precision, prior_structure="scalar". '
                '`LinearisedLaplace(prior="layerwise")` has one for each layer.'
            )
        return float(precision.detach()), float(torch.as_tensor(self.sigma_noise).detach()), float(self.temperature)

    def _posterior(self) -> LinearisedLaplace:
        """The posterior at the present hyperparameters, fitted again if they have changed."""
        self._check_H_init()
        assert self.linearised is not None
        if self._hyperparameters() == self._fitted_at:
            return self.linearised
        la = self._fit(False)
        if not torch.equal(la.network.weights, self.mean):
            raise ValueError("The weights of the network have changed since `fit(train_loader)`: call it again.")
        return la

    def _init_H(self) -> None:
        self.H = None

    def _check_H_init(self) -> None:
        if self.linearised is None:
            raise NotFittedError("This `Laplace` needs a fitted posterior: call `fit(train_loader)` first.")

    def _inputs(self, x: Any) -> Any:
        """A dictionary, without its targets, is one argument of the model, where ours are keyword arguments."""
        return ({name: value for name, value in x.items() if name != self.dict_key_y},) if isinstance(x, Mapping) else x

    def _unpacked(self, batch: Any) -> Any:
        return (self._inputs(batch), batch[self.dict_key_y]) if isinstance(batch, Mapping) else batch

    @property
    def log_det_ratio(self) -> Tensor:
        r"""`log|I + hA⁻¹M₁|`, differentiable in the prior precision and in the noise, from the curve of one fit.

        Its derivative in the logarithm of the precision is `−γ`, the effective dimension, and in that of `h` it is `γ`.
        """
        self._check_H_init()
        self._hyperparameters()  # one prior precision
        ratio = (self.prior_precision / self._H_factor).reshape(())
        value = math.log(float(ratio.detach()))
        if self._curve is None or abs(value - self._curve[0]) > _DECADES * math.log(10):
            self._curve = _curve_of(self._posterior())
        found, gamma = (float(v) for v in self._curve[1](value))
        return found - gamma * (ratio.log() - ratio.detach().log())

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """`log|hM₁ + A|`."""
        return self.log_det_ratio + self.log_det_prior_precision

    def _glm_predictive_distribution(
        self, X: Any, joint: bool = False, diagonal_output: bool = False
    ) -> tuple[Tensor, Tensor]:
        prediction = self._posterior().predict(self._inputs(X))
        if joint:
            return prediction.outputs.flatten(), prediction.joint_covariance()
        if diagonal_output:
            return prediction.outputs, prediction.variance
        # The bridge writes to both.
        return prediction.outputs.flatten(1).clone(), prediction.covariance().clone()

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws of the function, `[n_samples, N, ...]`: each is one function at all inputs."""
        if pred_type != "glm" or diagonal_output:
            return super().functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        prediction = self._posterior().predict(self._inputs(x))
        return prediction.outputs + self._combined(prediction.deviations, n_samples, generator)

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws of `functional_samples`, with the softmax of a classification applied."""
        samples = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        # The axis of the classes is the first of a datum.
        return samples.softmax(2) if self.likelihood == "classification" else samples

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Weights of the posterior, `[n_samples, P]`, the network's own added."""
        samples = self._posterior().samples_
        return self.mean + math.sqrt(self.temperature) * self._combined(samples, n_samples, generator)

    def _combined(self, samples: Tensor, num: int, generator: torch.Generator | None) -> Tensor:
        """Random combinations `Σ_k ε_k ζ_k/√K`, which have the covariance of the samples `ζ_k`."""
        generator = self._generator if generator is None else generator
        noise = torch.randn(num, len(samples), generator=generator, device=generator.device).to(samples)
        return torch.tensordot(noise / math.sqrt(len(samples)), samples, 1)

    def state_dict(self) -> dict[str, Any]:
        """Not there: `la.linearised.save(path)` writes a file that `LinearisedLaplace.load` reads."""
        raise NotImplementedError(
            '`hessian_structure="sampled"` has no state of its own: `la.linearised.save(path)`, and '
            "`LinearisedLaplace.load(path, model)`."
        )


class SampledLastLayerLaplace(SampledLaplace):
    """The weights of the last layer, with the arguments of `SampledLaplace`.

    Args:
        last_layer_name: its name; by default it is found by running the network.
    """

    _key = ("last_layer", "sampled")

    def __init__(
        self, model: nn.Module, likelihood: str, *args: Any, last_layer_name: str | None = None, **settings: Any
    ) -> None:
        self._parameters = "last_layer" if last_layer_name is None else f"{last_layer_name}.*"
        super().__init__(model, likelihood, *args, **settings)


def _curve_of(la: LinearisedLaplace) -> tuple[float, Callable[[float], Any]]:
    """`log(α/h)` of a fit, and a function of it that gives `log|I + hM₁/α|` and the effective dimension."""
    from scipy.interpolate import CubicSpline  # slow to import

    noise = 1.0 if la.noise_precision_ is None else float(la.noise_precision_)
    curves = la.evidence_path(_DECADES, _POINTS)
    values = torch.stack([curves.log_determinant, curves.effective_dimension], 1).numpy()
    return math.log(curves.at / noise), CubicSpline((curves.prior_precision / noise).log().numpy(), values)
