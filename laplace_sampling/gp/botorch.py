r"""The tangent model as a surrogate of BoTorch: `pip install laplace_sampling[botorch]`.

A network is the prior mean, or its linearisation is; observations correct it through the tangent kernel
`k(x, x') = φ(x) A⁻¹ φ(x')ᵀ`. Posterior mean and covariance at `x` are

    m(x) + φ(x) θ̄,    φ(x) A⁻¹ φ(x)ᵀ − Rᵀ R,    R = F⁻¹ k(X, x),    F Fᵀ = K/α + I/b,

differentiable in `x`; joint samples of the function at all inputs are `m(x) + φ(x)(θ̄ + ζ_k)` (pathwise conditioning).

Acquisition functions that take a posterior work: `LogExpectedImprovement`, `UpperConfidenceBound`, `PosteriorMean`, and
those by Monte Carlo, such as `qLogExpectedImprovement`, `qLogNoisyExpectedImprovement` and `qUpperConfidenceBound`. For
Thompson sampling maximise `PosteriorMean(surrogate.sample_paths())`. Those that look ahead (`qKnowledgeGradient`,
`qNegIntegratedPosteriorVariance`) need fantasies, and `PathwiseThompsonSampling` paths of a `SingleTaskGP`: both raise.

Fantasies, `fit_gpytorch_mll` and `batch_cross_validation` are for models of GPyTorch. Such a model is
`SingleTaskGP(X, Y, covar_module=TangentKernel(network), mean_module=NetworkMean(network))`.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.gp.exact_regression import ExactRegression
from laplace_sampling.gp.jittered_covariance import JitteredCovariance
from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.gp.regression_evidence import Optimum
from laplace_sampling.gp.surrogate_checks import check_inputs, check_settings, check_training_data
from laplace_sampling.gp.tangent_kernel import MEANS, NetworkMean, shape_inputs
from laplace_sampling.gp.tensor_state import TensorState
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.network_features import features_at
from laplace_sampling.linear_model.priors.prior import GaussianPrior, unit_variance
from laplace_sampling.linear_model.row_blocks import row_blocks
from laplace_sampling.networks.consistency import check_weights
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.checks import check_whole
from laplace_sampling.solvers.solver import ConvergenceWarning

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.model import Model
    from botorch.posteriors.gpytorch import GPyTorchPosterior
    from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "`laplace_sampling.gp.botorch` needs BoTorch: `pip install laplace_sampling[botorch]`."
    ) from error

__all__ = ["TangentSurrogate"]

_PRECISIONS = ("prior_precision", "noise_precision")


class TangentSurrogate(TensorState, Model):
    r"""A BoTorch model of one or several outputs: a Gaussian process with the tangent kernel of a network.

    **Of a network that was trained on the observations, Bayesian optimisation makes hardly any progress**, on two of
    three test functions no more than random search (`docs/published.md`, "tangent after training"): it fits so few data
    exactly, by features that training has bent to them, and the evidence takes that for knowledge, so that error bars
    are too narrow by a factor of five or more. Take BoTorch's `SingleTaskGP`, or the tangent of a network with random
    weights, which is level with it there, or behind by a standard error.

    Unless they are given, the prior precision and the noise precision are those of largest evidence, exactly. The rows
    of the Jacobian at the observations are kept, `[N·C, P]`: for some hundreds of observations.

    Args:
        network: a trained network, or its linearisation.
        train_X: `[N, D]`.
        train_Y: `[N, C]`, best standardised. GPyTorch raises variances below 1e-10 to that, in float32 below 1e-6.
        mean: `"network"`, `"affine"` or `"homogeneous"`, see `NetworkMean`.
        scale: `s`, `[P]`, prior standard deviations at `α = 1`, by default one.
        prior_precision: `α`, learnt by default.
        noise_precision: `b`, learnt by default.
        input_shape: of one input, where it is not the row itself.

    Raises:
        ValueError: for shapes that do not fit, data that are not finite, precisions that are not positive; and by all
            methods once the weights or buffers of the network have changed.

    Attributes:
        optimum: how the hyperparameters were found; a `ConvergenceWarning` tells if the evidence has no maximum.

    `state_dict` holds data and hyperparameters, but not the network. `load_state_dict` makes the posterior again, in a
    surrogate of any data with the same network, `mean` and `input_shape`.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        network: nn.Module | Linearisation,
        train_X: Float[Tensor, "N D"],
        train_Y: Float[Tensor, "N C"],
        *,
        mean: str = "affine",
        scale: Float[Tensor, " P"] | None = None,
        prior_precision: float | None = None,
        noise_precision: float | None = None,
        input_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        check_training_data(train_X, train_Y)
        # A linearisation is no module, so that the weights are not parameters of this model: an optimiser of its
        # hyperparameters cannot change them.
        self.network = network if isinstance(network, Linearisation) else Linearisation(network)
        given = {"prior_precision": prior_precision, "noise_precision": noise_precision}
        check_settings(train_X.shape[1], self.network.num_parameters, scale, input_shape, **given)
        self.mean_module = NetworkMean(self.network, mean, input_shape=input_shape)
        self._input_shape = input_shape
        options = {
            "mean": mean,
            "scale": scale,
            "prior_precision": prior_precision,
            "noise_precision": noise_precision,
            "input_shape": input_shape,
        }
        # The network is held, not copied: changed weights would give wrong moments, so that all methods compare this.
        self._fingerprint = self.network.fingerprint()
        self._learn(train_X.detach().clone(), train_Y.detach().clone(), options)
        self._condition(self.optimum.precision, self.optimum.noise_precision)
        if not self.optimum.converged:
            warnings.warn(_problem(self.optimum), ConvergenceWarning, stacklevel=3)

    def _learn(self, train_X: Float[Tensor, "N D"], train_Y: Float[Tensor, "N C"], options: dict[str, Any]) -> None:
        """The hyperparameters of largest evidence on some data."""
        alpha, b = (options[name] for name in _PRECISIONS)
        likelihood = Gaussian(1.0 if b is None else b, learn=b is None)
        prior = _isotropic(self.network, options["scale"], 1.0 if alpha is None else alpha)
        exact = ExactRegression.of(self._linear_model(train_X, train_Y, likelihood), prior)
        self.optimum: Optimum = exact.fit(learn_precision=alpha is None)
        self.train_inputs, self.train_targets, self.options, self.exact = (train_X,), train_Y, options, exact

    def _linear_model(
        self, train_X: Float[Tensor, "N D"], train_Y: Float[Tensor, "N C"], likelihood: Gaussian
    ) -> LinearModel:
        """The tangent model on the observations, with the prior mean as its offset."""
        inputs = shape_inputs(self.network, train_X, self._input_shape)
        check_weights(self.network, inputs)
        features = features_at(self.network, inputs)
        if features.num_outputs != train_Y.shape[1]:
            raise ValueError(f"`train_Y` has {train_Y.shape[1]} outputs, but the network has {features.num_outputs}.")
        with torch.no_grad():
            offset, targets = (t.to(self.network.device, torch.float64) for t in (self._mean(train_X), train_Y))
        return LinearModel(features, offset, offset, targets, likelihood)

    def _condition(self, prior_precision: float, noise_precision: float) -> None:
        """The posterior at some hyperparameters."""
        self.prior_precision, self.noise_precision = alpha, b = prior_precision, noise_precision
        exact = self.exact
        self._variance = unit_variance(exact.prior) / alpha
        # `[N·C, P]` once, here: each later posterior is then two dense products, without a pass over the observations.
        rows = torch.cat([block for _, block in row_blocks(exact.model.features)])
        v = exact.eigenvalues / alpha + 1 / b
        # Any root of (K/α + I/b)⁻¹ will do: here V diag(v)^{-1/2}.
        self._reduction = (exact.vectors / v.sqrt()).T @ (rows * self._variance)
        self._mode = exact.mode(alpha, b)

    def tensor_state(self) -> dict[str, Tensor]:
        """What determines the posterior, beside the weights of the network: data, hyperparameters, and options."""
        return {
            "train_X": self.train_inputs[0],
            "train_Y": self.train_targets,
            "scale": self.exact.prior.scale,
            "precisions": torch.tensor([self.prior_precision, self.noise_precision], dtype=torch.float64),
            "learnt": torch.tensor([self.options[name] is None for name in _PRECISIONS]),
            "mean": torch.tensor(MEANS.index(self.mean_module.kind)),
            "input_shape": torch.tensor(self._input_shape or (), dtype=torch.long),
            "network": self._fingerprint,
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """The surrogate that had this `tensor_state`, with its hyperparameters; called by `load_state_dict`.

        Args:
            state: of a surrogate of the same network.

        Raises:
            ValueError: if it had another network, `mean` or `input_shape`.
        """
        own = self.tensor_state()
        for name in ("network", "mean", "input_shape"):
            if not torch.equal(state[name].to(own[name]), own[name]):
                raise ValueError(f"The state is that of a TangentSurrogate with another `{name}`: make one with that.")
        precisions, learnt = state["precisions"].tolist(), state["learnt"].tolist()
        given = {name: None if learnt[i] else precisions[i] for i, name in enumerate(_PRECISIONS)}
        options = {**self.options, **given, "scale": state["scale"].clone()}
        self._learn(state["train_X"].clone(), state["train_Y"].clone(), options)
        # The optimum found again says how they were found; they themselves are those of the state, to the last digit.
        self._condition(*precisions)

    @property
    def num_outputs(self) -> int:
        """`C`."""
        return self.train_targets.shape[1]

    @property
    def batch_shape(self) -> torch.Size:
        """Empty: there is one model."""
        return torch.Size([])

    def posterior(
        self,
        X: Float[Tensor, "*B Q D"],
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The joint posterior of the function at `Q` inputs of each batch, differentiable in `X`.

        Args:
            X: inputs.
            output_indices: which outputs, by default all.
            observation_noise: whether to add the noise variance `1/b`, or a variance that is given.
            posterior_transform: applied to the posterior.
            kwargs: none are known.
        """
        if kwargs:
            raise TypeError(f"`posterior` does not know {sorted(kwargs)}.")
        check_inputs("posterior", X, self.train_inputs[0].shape[1])
        self._check_network("posterior")
        mean, covariance = self._moments(X)
        if output_indices is not None:
            output_indices = self._outputs(output_indices)
            # Outputs of an input are adjacent in the joint covariance, as in GPyTorch's multitask distributions.
            chosen = torch.arange(X.shape[-2])[:, None] * self.num_outputs + torch.tensor(output_indices)
            covariance = covariance[..., chosen.flatten(), :][..., chosen.flatten()]
            mean = mean[..., output_indices]
        if isinstance(observation_noise, Tensor) or observation_noise:
            common = torch.tensor(1 / self.noise_precision)
            noise = (observation_noise if isinstance(observation_noise, Tensor) else common).to(covariance)
            covariance = covariance + torch.diag_embed(noise.expand_as(mean).flatten(-2))
        posterior = GPyTorchPosterior(_distribution(mean.to(X), JitteredCovariance(covariance.to(X))))
        return posterior if posterior_transform is None else posterior_transform(posterior)

    def _outputs(self, indices: list[int]) -> list[int]:
        """Indices of outputs, of which negative ones count from the end."""
        C = self.num_outputs
        if not all(-C <= index < C for index in indices):
            raise ValueError(f"`posterior(output_indices={indices})`: the surrogate has outputs 0 to {C - 1}.")
        return [index % C for index in indices]

    def _moments(self, X: Float[Tensor, "*B Q D"]) -> tuple[Float[Tensor, "*B Q C"], Float[Tensor, "*B QC QC"]]:
        """Mean and covariance of the function, in float64, with gradients where `X` has them."""
        shape, flat = X.shape[:-1], X.reshape(-1, X.shape[-1])
        # A graph through the Jacobian is several times the memory: only where an optimiser asks for gradients in `X`.
        graph = torch.is_grad_enabled() and X.requires_grad
        with torch.set_grad_enabled(graph):
            x = shape_inputs(self.network, flat, self._input_shape)
            rows = self.network.jacobian(x, graph=graph).double()
            mean = (self._mean(flat).to(rows) + (rows @ self._mode).reshape(len(flat), -1)).reshape(*shape, -1)
            rows = rows.reshape(*shape[:-1], shape[-1] * self.num_outputs, -1)
            # A difference of two positive terms, in float64 for its digits; far from the data the second is small.
            reduced = rows @ self._reduction.T
            return mean, (rows * self._variance) @ rows.mT - reduced @ reduced.mT

    def _check_network(self, call: str) -> None:
        if not torch.equal(self._fingerprint, self.network.fingerprint()):
            raise ValueError(
                f"`{call}`: the weights or buffers of the network are not those that this TangentSurrogate was made "
                "with. Load those, or make another surrogate."
            )

    def sample_paths(self, num_samples: int | None = None, seed: int = 0) -> GenericDeterministicModel:
        r"""Functions drawn from the posterior, `f_k(x) = m(x) + φ(x)(θ̄ + ζ_k)`, by pathwise conditioning.

        As a deterministic model of BoTorch: differentiable, and the same at every call, so that Thompson sampling can
        maximise it, by `PosteriorMean` for instance.

        Args:
            num_samples: `K`; the model then has batch shape `[K]`, and takes `X` of shape `[…, K, Q, D]`, inputs of
                each function, or `[…, 1, Q, D]` or `[Q, D]`, the same for all. By default one function of any `X`.
            seed: of the draws.
        """
        if num_samples is not None:
            check_whole("`sample_paths(num_samples)`", num_samples, 1)
        self._check_network("sample_paths")
        zeta = self.exact.sample(Draws(num_samples or 1, seed), self.prior_precision, self.noise_precision)
        # A sample is one vector of weights: a function at any inputs, without the cubic cost of joint draws there.
        weights = (self._mode + zeta).to(self.network.dtype)

        def function(X: Tensor, k: int) -> Tensor:
            flat = X.reshape(-1, X.shape[-1])
            graph = torch.is_grad_enabled() and X.requires_grad
            x = shape_inputs(self.network, flat, self._input_shape)
            deviation = self.network.jvp(x, weights[k : k + 1], graph=graph)[0]
            return (self._mean(flat).to(deviation) + deviation).reshape(*X.shape[:-1], -1).to(X)

        def functions(X: Tensor) -> Tensor:
            self._check_network("a path of sample_paths")
            if num_samples is None:
                return function(X, 0)
            # Each function has inputs of its own, so that all are maximised together.
            X = X[None] if X.dim() < 3 else X
            X = X.expand(*X.shape[:-3], num_samples, *X.shape[-2:])
            return torch.stack([function(X[..., k, :, :], k) for k in range(num_samples)], dim=-3)

        batch_shape = torch.Size([] if num_samples is None else [num_samples])
        return GenericDeterministicModel(functions, num_outputs=self.num_outputs, batch_shape=batch_shape)

    def _mean(self, rows: Float[Tensor, "n D"]) -> Float[Tensor, "n C"]:
        return cast(Tensor, self.mean_module(rows)).reshape(len(rows), -1)

    def condition_on_observations(
        self, X: Float[Tensor, "M D"], Y: Float[Tensor, "M C"], **kwargs: Any
    ) -> "TangentSurrogate":
        """A surrogate of more data, with the same network and the same hyperparameters.

        Args:
            X: further inputs.
            Y: further observations.
            kwargs: `noise`, which is not supported.
        """
        if X.dim() != 2 or kwargs.get("noise") is not None:
            raise NotImplementedError(
                f"`condition_on_observations` takes X of shape [M, D] and no noise, got {list(X.shape)}; fantasies of "
                "several batches are not supported."
            )
        self._check_network("condition_on_observations")
        # BoTorch expects of this call that hyperparameters stay; a new TangentSurrogate learns them again.
        options = {**self.options, "prior_precision": self.prior_precision, "noise_precision": self.noise_precision}
        kept = (self.train_inputs[0], self.train_targets)
        data = tuple(torch.cat([old, new.detach().to(old.device)]) for old, new in zip(kept, (X, Y), strict=True))
        return TangentSurrogate(self.network, *data, **cast(dict[str, Any], options))

    def fantasize(self, X: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Not supported: there are no surrogates of a batch of data sets."""
        raise NotImplementedError(
            "`fantasize`: a TangentSurrogate has no fantasies, which acquisition functions that look ahead take, such "
            "as qKnowledgeGradient and qNegIntegratedPosteriorVariance. Use one of the posterior, such as "
            "qLogExpectedImprovement, or `sample_paths` for Thompson sampling; `condition_on_observations` adds data. "
            "`SingleTaskGP(X, Y, covar_module=TangentKernel(network))` has fantasies."
        )

    def subset_output(self, idcs: list[int]) -> Model:
        """Not supported: `posterior` has `output_indices`."""
        raise NotImplementedError(
            f"`subset_output({idcs})`: a TangentSurrogate of some outputs only is not supported. Use "
            f"`posterior(X, output_indices={idcs})`, or an objective or a posterior transform that selects them."
        )


def _isotropic(network: Linearisation, scale: Tensor | None, precision: float) -> GaussianPrior:
    """A prior of one group of weights."""
    unit = torch.ones(network.num_parameters, dtype=torch.float64, device=network.device)
    groups = torch.zeros(len(unit), dtype=torch.long, device=unit.device)
    alpha = torch.tensor([precision], dtype=torch.float64)
    return GaussianPrior(alpha, groups, unit if scale is None else scale.to(unit), ("all",))


def _distribution(mean: Float[Tensor, "*B Q C"], covariance: JitteredCovariance) -> Any:
    if mean.shape[-1] == 1:
        return gpytorch.distributions.MultivariateNormal(mean[..., 0], covariance)
    return gpytorch.distributions.MultitaskMultivariateNormal(mean, covariance)


@DrawMatheronPaths.register(TangentSurrogate)
def _draw_matheron_paths(model: TangentSurrogate, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "`draw_matheron_paths`, as of PathwiseThompsonSampling, does not take a TangentSurrogate; maximise "
        "`PosteriorMean(surrogate.sample_paths())`, whose functions are drawn from its posterior."
    )


def _problem(optimum: Optimum) -> str:
    if not optimum.at_bounds:
        return (
            "`TangentSurrogate` found no maximum of the evidence to rounding: its gradient in log α and log b is "
            f"{optimum.gradient[0]:.2g}, {optimum.gradient[1]:.2g}. Check the data, or use `network.double()`."
        )
    values = {"precision": optimum.precision, "noise_precision": optimum.noise_precision}
    ended = ", ".join(f"{'prior_' * (n == 'precision')}{n} = {values[n]:.3g}" for n in optimum.at_bounds)
    return (
        f"The evidence of a `TangentSurrogate` has no maximum: it ended at a bound, {ended}. The network fits "
        "`train_Y` exactly, or its tangent has no part in it. Check the data, or give `prior_precision` and "
        "`noise_precision`."
    )
