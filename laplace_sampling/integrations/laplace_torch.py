r"""`Laplace(..., hessian_structure="sampled")`: posteriors of this library for callers of laplace-torch.

After `import laplace_sampling.integrations.laplace_torch`, laplace-torch finds the two classes below by their `_key`:

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="sampled")

It is fitted, tuned and called as any other `Laplace`, and returns what these return. The posterior behind it is a
`LinearisedLaplace`, in `la.linearised`. See `docs/from_laplace_torch.md`.

`pip install laplace_sampling[laplace_torch]`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_sampling.evidence.curves import EvidencePath
from laplace_sampling.fitted import NotFittedError
from laplace_sampling.integrations.laplace_torch_predictions import SampledPredictions
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.ggn import GGN, WhiteNoise
from laplace_sampling.linear_model.priors.isotropic_prior import IsotropicPrior
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Layers, Prior, ungrouped
from laplace_sampling.methods.fit import Fit
from laplace_sampling.methods.method import Method
from laplace_sampling.methods.network_score import network_evidence

__all__ = ["SampledLaplace", "SampledLastLayerLaplace"]

# How far, in decades, a curve of the evidence is trusted that is not made of all eigenvalues; then it is made anew.
_DECADES = 1.0


class SampledLaplace(SampledPredictions):
    """All weights, with a posterior that is sampled; arguments and results are those of laplace-torch.

    Covariances are those of the samples, or exact where the method is. `functional_samples` and `predictive_samples`
    are joint: each is one function at all inputs. They are drawn from those that the fit has, with random signs, so
    that two calls have samples in common; more are drawn where more are asked for.

    Args:
        model: the trained network. It is held and never changed.
        likelihood: `"regression"` or `"classification"`.
        sigma_noise: standard deviation of the noise of a regression, `1/√noise_precision`.
        prior_precision: in units of the sum of losses; one, one for each parameter tensor, or one for each weight.
        prior_mean: of the weights, for the marginal likelihood; predictions do not depend on it.
        temperature: `T`; the curvature is divided by it.
        enable_backprop: must be `False`.
        dict_key_x: not needed: a model that takes a dictionary gets it whole.
        dict_key_y: the targets in batches that are dictionaries.
        backend: must be `None`, and so must `backend_kwargs`.
        method: as of `LinearisedLaplace`, and so are `num_samples` and `seed`.
        budget: as of `LinearisedLaplace.fit`, for each fit.

    Raises:
        NotImplementedError: for what has no meaning here, such as another curvature.
        ValueError: for settings that are not known, as laplace-torch and `LinearisedLaplace` do.

    Attributes:
        linearised: the `LinearisedLaplace`, of the hyperparameters at which it was fitted last; `None` before `fit`.
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
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: None = None,
        backend_kwargs: None = None,
        *,
        method: str | Method = "auto",
        num_samples: int = 100,
        seed: int = 0,
        budget: float | None = 20.0,
    ) -> None:
        if likelihood == "reward_modeling":
            raise NotImplementedError('`hessian_structure="sampled"` has no pairwise preferences, "reward_modeling".')
        if enable_backprop:
            raise NotImplementedError(
                '`hessian_structure="sampled"` gives no gradients in `x`, `enable_backprop=True`; for Bayesian '
                "optimisation take `laplace_sampling.gp.botorch.TangentSurrogate`."
            )
        if backend is not None or backend_kwargs:
            raise NotImplementedError(
                '`hessian_structure="sampled"` has one curvature, the GGN, by its own products with the network: leave '
                "out `backend` and `backend_kwargs`."
            )
        self._settings = {"method": method, "num_samples": num_samples, "seed": seed}
        self._budget, self._loader = budget, None
        self._generator = torch.Generator().manual_seed(seed)
        self.linearised: LinearisedLaplace | None = None
        # Files hold a plain string in place of laplace-torch's enumeration. Lengths of precisions and means are checked
        # against the random weights, which are chosen after this.
        super().__init__(
            model,
            getattr(likelihood, "value", likelihood),
            sigma_noise,
            temperature=temperature,
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
        )
        self._take_weights(self._unfitted())
        self.prior_precision, self.prior_mean = prior_precision, prior_mean
        self.mean: Tensor = self._prior_mean

    # Fits -------------------------------------------------------------------------------------------------------------

    def fit(self, train_loader: DataLoader, override: bool = True, progress_bar: bool = False) -> None:
        """The posterior at these hyperparameters; the loader is kept, to fit again when they have changed.

        Raises:
            NotImplementedError: for `override=False`.
            TypeError, ValueError: for data that do not fit the model, as `LinearisedLaplace.fit` does.
        """
        if not override:
            raise NotImplementedError(
                '`hessian_structure="sampled"` does not add data to a posterior, `fit(override=False)`: give all data.'
            )
        la = self._fit(train_loader, progress_bar)
        self._loader = train_loader
        self._take_weights(la)
        self.mean, model, constant = la.network.weights, self._data_of("fit").model, 0.0
        self.n_data, self.n_outputs = model.features.num_data, model.features.num_outputs
        if self.likelihood == "regression":
            # Half of the squared errors: the loss at a noise of one, without the constant of its density.
            model, constant = model.with_likelihood(Gaussian(1.0)), 0.5 * math.log(2 * math.pi)
        loss = model.total_loss(model.network_outputs.double()) - constant * model.num_observations
        self.loss = torch.tensor(loss, device=self._device, dtype=self._dtype)

    def _unfitted(self) -> LinearisedLaplace:
        """A `LinearisedLaplace` at the present hyperparameters."""
        likelihood: Any = self.likelihood
        precisions, sigma, temperature = self._hyperparameters()
        if likelihood == "regression":
            likelihood = Gaussian(sigma**-2, learn=False)
        # The temperature `T` is a prior of precision `TA`, and a covariance that is multiplied by `T`.
        precisions = tuple(temperature * precision for precision in precisions)
        sizes = tuple(p.numel() for p in self.params)
        prior = IsotropicPrior(precisions[0]) if len(precisions) == 1 else _Given(precisions=precisions, sizes=sizes)
        return LinearisedLaplace(self.model, likelihood, prior=prior, parameters=self._parameters, **self._settings)

    def _fit(self, loader: Any, progress: bool) -> LinearisedLaplace:
        la = self._unfitted()
        la.fit(loader, budget=self._budget, scale=float(self.temperature), unpack=self._unpacked, progress=progress)
        return self._keep(la)

    def _keep(self, la: LinearisedLaplace) -> LinearisedLaplace:
        self.linearised, self._fitted_at = la, self._hyperparameters()
        self._samples: Tensor | None = None
        self._path: EvidencePath | None = None
        return la

    def _take_weights(self, la: LinearisedLaplace) -> None:
        """The parameters that are random, of which a last layer is known after a run of the network."""
        parameters = dict(la.network.source.named_parameters())
        self.params = [parameters[name] for name in la.network.names]
        self.n_params, self.n_layers = la.network.num_parameters, len(self.params)

    def _hyperparameters(self) -> tuple[list[float], float, float]:
        precision, sigma = torch.as_tensor(self.prior_precision), torch.as_tensor(self.sigma_noise)
        return precision.detach().tolist(), float(sigma.detach()), float(self.temperature)

    def _posterior(self) -> LinearisedLaplace:
        """At the present hyperparameters, fitted again if they have changed."""
        self._check_H_init()
        assert self.linearised is not None
        if self._hyperparameters() == self._fitted_at:
            return self.linearised
        if self._loader is None:
            raise NotFittedError(
                "`prior_precision`, `sigma_noise` or `temperature` has changed, and a loaded posterior has no data to "
                "be fitted to again: call `fit(train_loader)`."
            )
        self.linearised._check_network("fit")
        return self._fit(self._loader, False)

    def _data_of(self, call: str) -> Fit:
        self._check_H_init()
        assert self.linearised is not None
        return self.linearised._with_data(call)[0]

    def _init_H(self) -> None:
        self.H = None

    def _check_H_init(self) -> None:
        if self.linearised is None:
            raise NotFittedError("This `Laplace` needs a fitted posterior: call `fit(train_loader)` first.")

    def _unpacked(self, batch: Any) -> Any:
        return (self._inputs(batch), batch[self.dict_key_y]) if isinstance(batch, Mapping) else batch

    # Evidence ---------------------------------------------------------------------------------------------------------

    @property
    def log_det_ratio(self) -> Tensor:
        r"""`log|I + hA⁻¹M₁|`, differentiable in one prior precision or those of layers, and in the noise.

        Its derivatives in the logarithms of the precisions are `−γ`, the effective dimensions, and in that of `h` their
        sum. One prior precision takes no fit; several take one for each of their values.

        Raises:
            NotImplementedError: for a gradient in one precision for each weight.
        """
        self._check_H_init()
        ratio = self.prior_precision / self._H_factor
        single = len(ratio) == 1 and len(self._fitted_at[0]) == 1
        if not single:
            self._posterior()
        fit = self._data_of("log_marginal_likelihood")
        alpha = fit.alpha
        if single:
            noise = fit.model.likelihood.noise_precisions()
            alpha = float(ratio.detach()) * (1.0 if noise is None else float(noise))
        path = self._path_near(fit, alpha)
        at = torch.tensor([alpha], dtype=torch.float64)
        value = path.log_determinant(at)[0].to(ratio.detach())[0]
        if not ratio.requires_grad:
            return value
        assert self.linearised is not None
        gamma = path.effective_dimension(at)[0] if single else self.linearised.effective_dimension_
        if len(gamma) != len(ratio):
            raise NotImplementedError(
                'The evidence is not differentiated in one prior precision for each weight, `prior_structure="diag"`, '
                'which that many data do not determine: use "scalar" or "layerwise".'
            )
        return value - (gamma.to(ratio) * (ratio.log() - ratio.detach().log())).sum()

    def _path_near(self, fit: Fit, alpha: float) -> EvidencePath:
        if self._path is None or (not self._path.exact and abs(math.log10(alpha / self._path.at)) > _DECADES):
            prior = fit.prior.with_precision(fit.prior.precision * alpha / fit.alpha)
            self._path = network_evidence(replace(fit, task=replace(fit.task, prior=prior)), _DECADES).path
        return self._path

    @property
    def log_det_posterior_precision(self) -> Tensor:
        """`log|hM₁ + A|`."""
        return self.log_det_ratio + self.log_det_prior_precision

    @property
    def posterior_precision(self) -> Tensor:
        """Raises `NotImplementedError`."""
        raise NotImplementedError(
            "`posterior_precision` is not there, as no matrix of the size of the weights is formed: "
            "`square_norm(value)` multiplies by it."
        )

    def square_norm(self, value: Tensor) -> Tensor:
        """`δᵀ(hM₁ + A)δ` for `δ = value − mean`, `[P]`."""
        self._posterior()
        delta, fit = (value - self.mean).double(), self._data_of("square_norm")
        product = fit.ggn.matmul(delta[None].to(fit.model.features.precision))[0].double()
        return (delta @ product / self.temperature + delta @ (self.prior_precision_diag * delta)).to(self._dtype)

    def _gridsearch(self, *args: Any, **kwargs: Any) -> Tensor:
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            return super()._gridsearch(*args, **kwargs)
        finally:
            # laplace-torch leaves the model in evaluation mode.
            for module, training in modes:
                module.training = training

    # Files ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that predictions need, for `torch.load(..., weights_only=True)`; `"H"` is that of `linearised`."""
        state = {**super().state_dict(), "H": self._posterior().state_dict()}
        # A loop that maximises the evidence leaves the graph of its hyperparameters behind.
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a posterior from `state_dict`, for the same model; it predicts, and is not tuned any more.

        Raises:
            ValueError: if it is of another class, another likelihood or a network with other weights.
        """
        if state_dict["cls_name"] != type(self).__name__ or state_dict["likelihood"] != self.likelihood:
            raise ValueError(
                f"The state is of a {state_dict['cls_name']} of likelihood {state_dict['likelihood']!r}, but this "
                f"`Laplace` is a {type(self).__name__} of {self.likelihood!r}: give the same `likelihood`, "
                "`subset_of_weights` and `hessian_structure`."
            )
        la = self._unfitted()
        la.load_state_dict(state_dict["H"])
        self._take_weights(la)
        for name in ("mean", "loss", "prior_mean", "prior_precision", "sigma_noise", "temperature", "n_data"):
            setattr(self, name, state_dict[name])
        self.n_outputs, self._loader = state_dict["n_outputs"], None
        self._keep(la)


class SampledLastLayerLaplace(SampledLaplace):
    """The weights of the last layer, as of `SampledLaplace`.

    Args:
        last_layer_name: its name; by default it is found by running the network.
        settings: as of `SampledLaplace`.
    """

    _key = ("last_layer", "sampled")

    def __init__(
        self, model: nn.Module, likelihood: str, *args: Any, last_layer_name: str | None = None, **settings: Any
    ) -> None:
        self._parameters = "last_layer" if last_layer_name is None else f"{last_layer_name}.*"
        super().__init__(model, likelihood, *args, **settings)


@dataclass(frozen=True)
class _Given(Prior):
    """One precision for each parameter tensor, or for each weight."""

    precisions: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()

    def build(self, ggn: GGN, layers: Layers, noise: WhiteNoise) -> GaussianPrior:
        precisions = torch.tensor(self.precisions, dtype=torch.float64)
        if len(precisions) != len(self.sizes):
            return ungrouped(precisions.rsqrt().to(ggn.device, ggn.dtype), 1.0)
        groups = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes)).to(ggn.device)
        ones = torch.ones(ggn.size, device=ggn.device, dtype=ggn.dtype)
        return GaussianPrior(precisions, groups, ones, tuple(f"tensor {i}" for i in range(len(self.sizes))))
