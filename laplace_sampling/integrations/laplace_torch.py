r"""`Laplace(..., hessian_structure="sampled")`: posteriors of this library for callers of laplace-torch.

After `import laplace_sampling.integrations.laplace_torch`, laplace-torch finds the two classes below by their `_key`:

    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure="sampled")

It is fitted, tuned and called as any other `Laplace`, and returns what these return. The posterior behind it is a
`LinearisedLaplace`, in `la.linearised`. See `docs/from_laplace_torch.md`.

`pip install laplace_sampling[laplace_torch]`.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from laplace_sampling.data.batches import place
from laplace_sampling.integrations.laplace_torch_fits import FittedLaplace
from laplace_sampling.networks.evaluation_mode import evaluation_mode
from laplace_sampling.networks.held_module import solver_call
from laplace_sampling.predict import predict
from laplace_sampling.predictions.classification_prediction import ClassificationPrediction
from laplace_sampling.solvers.checks import check_whole

__all__ = ["SampledLaplace", "SampledLastLayerLaplace"]


class SampledLaplace(FittedLaplace):
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

    # Predictions ------------------------------------------------------------------------------------------------------

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

    def _glm_forward_call(
        self,
        x: Any,
        likelihood: Any,
        joint: bool = False,
        link_approx: Any = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        # These need no matrix of the outputs, of which there may be many.
        if likelihood == "regression" and diagonal_output and not joint:
            return self._glm_predictive_distribution(x, diagonal_output=True)
        if likelihood == "classification" and link_approx == "mc":
            return self.predictive_samples(x, n_samples=n_samples, diagonal_output=diagonal_output).mean(0)
        if likelihood == "classification" and link_approx == "probit":
            prediction = self._posterior().predict(self._inputs(x))
            assert isinstance(prediction, ClassificationPrediction)
            return prediction.probs_with("probit")
        return super()._glm_forward_call(x, likelihood, joint, link_approx, n_samples, diagonal_output)

    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draws of the function, `[n_samples, N, ...]`: each is one function at all inputs."""
        if pred_type == "nn":
            return self._of_weights(x, n_samples, generator)
        if pred_type != "glm":
            raise ValueError(f'`pred_type={pred_type!r}` is not known; use "glm" or "nn".')
        if diagonal_output:
            raise NotImplementedError(
                "Samples are of the function, whose outputs are correlated: leave out `diagonal_output=True`."
            )
        return self._linear(self._inputs(x), self._deviations(n_samples, generator))

    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """As `functional_samples`, with the softmax of a classification applied."""
        samples = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        # The axis of the classes is the first of a datum.
        return samples.softmax(2) if self.likelihood == "classification" else samples

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Tensor:
        """Weights of the posterior, `[n_samples, P]`, the network's own added."""
        return self.mean + math.sqrt(self.temperature) * self._deviations(n_samples, generator)

    def _deviations(self, num: int, generator: torch.Generator | None) -> Tensor:
        """Some of the samples `ζ`, in random order and with random signs; more are drawn where there are too few."""
        la = self._posterior()
        check_whole("`n_samples`", num, 1)
        held = la.samples_ if self._samples is None else self._samples
        if num > len(held):
            held = self._samples = torch.cat([held, la.sample(num - len(held))])
        generator = self._generator if generator is None else generator
        order = torch.randperm(len(held), generator=generator, device=generator.device)[:num]
        signs = 2 * torch.randint(2, (num, 1), generator=generator, device=generator.device) - 1
        return held[order.to(held.device)] * signs.to(held)

    @solver_call
    def _linear(self, x: Any, deviations: Tensor) -> Tensor:
        """`f(w̄, x) + φ(x)ζ_k`."""
        la = self._posterior()
        la._check_network("functional_samples")
        posterior = replace(la._require("functional_samples").posterior, samples=deviations, scales=None, exact={})
        return predict(la.network, posterior, None, x).samples

    def _of_weights(self, X: Any, n_samples: int, generator: torch.Generator | None) -> Tensor:
        """`f(w̄ + ζ_k, x)`; the weights of the network stay as they are."""
        weights = self.sample(n_samples, generator)
        network = self._posterior().network
        held, x = network.held, place(self._inputs(X), network.device, network.dtype)
        with torch.no_grad(), evaluation_mode(held):
            return torch.stack([held(held.fixed() | network.unflatten(w), x) for w in weights])

    def _nn_predictive_samples(
        self, X: Any, n_samples: int = 100, generator: torch.Generator | None = None, **model_kwargs: Any
    ) -> Tensor:
        if model_kwargs:
            raise NotImplementedError(f"The model gets `x` alone, but {sorted(model_kwargs)} were given as well.")
        return self.predictive_samples(X, "nn", n_samples, generator=generator)

    def _nn_predictive_classification(self, X: Any, n_samples: int = 100, **model_kwargs: Any) -> Tensor:
        return self._nn_predictive_samples(X, n_samples, **model_kwargs).mean(0)

    def functional_variance(self, Js: Tensor) -> Tensor:
        """Raises `NotImplementedError`."""
        raise NotImplementedError("`functional_variance(Js)` takes Jacobians, which are not formed: call `la(x)`.")

    def functional_covariance(self, Js: Tensor) -> Tensor:
        """Raises `NotImplementedError`."""
        raise NotImplementedError(
            "`functional_covariance(Js)` takes Jacobians, which are not formed: call `la(x, joint=True)`."
        )

    # Files ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that predictions need, for `torch.load(..., weights_only=True)`; `"H"` is that of `linearised`."""
        state = self._posterior().state_dict()
        return {**super().state_dict(), "H": state}

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
