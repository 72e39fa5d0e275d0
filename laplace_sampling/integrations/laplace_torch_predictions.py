"""`SampledPredictions`: predictions in the forms of laplace-torch, for `laplace_torch.SampledLaplace`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_sampling.data.batches import place
from laplace_sampling.networks.evaluation_mode import evaluation_mode
from laplace_sampling.networks.held_module import solver_call
from laplace_sampling.predict import predict
from laplace_sampling.predictions.classification_prediction import ClassificationPrediction
from laplace_sampling.solvers.checks import check_whole

if TYPE_CHECKING:
    from laplace_sampling.laplace import LinearisedLaplace

try:
    from laplace.baselaplace import ParametricLaplace
except ImportError as error:
    raise ImportError(
        "`laplace_sampling.integrations.laplace_torch` is for callers of laplace-torch, which is not there or does not "
        f"import ({error}): `pip install laplace_sampling[laplace_torch]` has versions that work together."
    ) from error

__all__ = ["SampledPredictions"]


class SampledPredictions(ParametricLaplace):
    """Predictions and samples of a posterior that a subclass fits."""

    # Of the order and the signs of samples, where a call gives no other.
    _generator: torch.Generator
    # Those of the posterior and those that were drawn after it; `None` before the first call that takes any.
    _samples: Tensor | None

    def _posterior(self) -> "LinearisedLaplace":
        """At the present hyperparameters."""
        raise NotImplementedError

    def _inputs(self, x: Any) -> Any:
        """A dictionary, without its targets, is one argument of the model, where ours are keyword arguments."""
        return ({name: value for name, value in x.items() if name != self.dict_key_y},) if isinstance(x, Mapping) else x

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
        posterior = replace(la._require("functional_samples").posterior, samples=deviations, exact={})
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
