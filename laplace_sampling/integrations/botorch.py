r"""The tangent model as a surrogate of BoTorch: `pip install laplace_sampling[botorch]`.

A trained network is the prior mean, or its linearisation is; observations correct it through the tangent kernel
`k(x, x') = φ(x) A⁻¹ φ(x')ᵀ`. Posterior mean and covariance at `x` are

    m(x) + φ(x) θ̄,    φ(x) A⁻¹ φ(x)ᵀ − Rᵀ R,    R = F⁻¹ k(X, x),    F Fᵀ = K/α + I/b,

differentiable in `x`; joint samples of the function at all inputs are `m(x) + φ(x)(θ̄ + ζ_k)` (pathwise conditioning).
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.exact import ExactRegression, Optimum, unit_variance
from laplace_sampling.gram import features_at, row_blocks
from laplace_sampling.likelihoods import Gaussian
from laplace_sampling.linear_operators import gpytorch
from laplace_sampling.linearise import Linearisation
from laplace_sampling.priors import GaussianPrior
from laplace_sampling.sampling import Draws, LinearModel
from laplace_sampling.tangent_kernel import NetworkMean, shape_inputs

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.model import Model
    from botorch.posteriors.gpytorch import GPyTorchPosterior
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "`laplace_sampling.integrations.botorch` needs BoTorch: `pip install laplace_sampling[botorch]`."
    ) from error

__all__ = ["TangentSurrogate"]


class TangentSurrogate(Model):
    r"""A BoTorch model of one or several outputs: a Gaussian process with the tangent kernel of a trained network.

    Unless they are given, the prior precision and the noise precision are those of largest evidence, exactly. The rows
    of the Jacobian at the observations are kept, `[N·C, P]`: for some hundreds of observations.

    Args:
        network: a trained network, or its linearisation.
        train_X: `[N, D]`.
        train_Y: `[N, C]`.
        mean: `"network"`, `"affine"` or `"homogeneous"`, see `NetworkMean`.
        scale: `s`, `[P]`, prior standard deviations at `α = 1`, by default one.
        prior_precision: `α`, learnt by default.
        noise_precision: `b`, learnt by default.
        input_shape: of one input, where it is not the row itself.

    Attributes:
        optimum: how the hyperparameters were found.
    """

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
        if train_Y.dim() != 2 or len(train_Y) != len(train_X):
            raise ValueError(
                f"`train_Y` must have shape [N, C] with N = {len(train_X)}, but has {list(train_Y.shape)}."
            )
        # A linearisation is no module: the weights are not parameters of this one.
        self.network = network if isinstance(network, Linearisation) else Linearisation(network)
        self.mean_module = NetworkMean(self.network, mean, input_shape=input_shape)
        self._input_shape = input_shape
        self.options = {
            "mean": mean,
            "scale": scale,
            "prior_precision": prior_precision,
            "noise_precision": noise_precision,
            "input_shape": input_shape,
        }
        self.train_inputs, self.train_targets = (train_X.detach(),), train_Y.detach()
        size, C = self.network.num_parameters, train_Y.shape[1]
        unit = torch.ones(size, dtype=torch.float64, device=self.network.device)
        prior = GaussianPrior(
            torch.tensor([prior_precision or 1.0], dtype=torch.float64),
            torch.zeros(size, dtype=torch.long, device=unit.device),
            unit if scale is None else scale.to(unit),
            ("all",),
        )
        features = features_at(self.network, shape_inputs(self.network, train_X.detach(), input_shape))
        if features.num_outputs != C:
            raise ValueError(f"`train_Y` has {C} outputs, but the network has {features.num_outputs}.")
        with torch.no_grad():
            offset = self._mean(train_X.detach()).double()
        likelihood = Gaussian(noise_precision or 1.0, learn=noise_precision is None)
        model = LinearModel(features, offset, offset, train_Y.detach().double(), likelihood)
        self.exact = ExactRegression.of(model, prior)
        self.optimum: Optimum = self.exact.fit(learn_precision=prior_precision is None)
        self.prior_precision, self.noise_precision = self.optimum.precision, self.optimum.noise_precision
        self._condition(prior)

    def _condition(self, prior: GaussianPrior) -> None:
        exact, alpha, b = self.exact, self.prior_precision, self.noise_precision
        self._variance = unit_variance(prior) / alpha
        rows = torch.cat([block for _, block in row_blocks(exact.model.features)])
        v = exact.eigenvalues / alpha + 1 / b
        # Any root of (K/α + I/b)⁻¹ will do: here V diag(v)^{-1/2}.
        self._reduction = (exact.vectors / v.sqrt()).T @ (rows * self._variance)
        self._mode = exact.mode(alpha, b)

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
        shape, C = X.shape[:-1], self.num_outputs
        mean: Tensor
        flat = X.reshape(-1, X.shape[-1])
        graph = torch.is_grad_enabled() and X.requires_grad
        with torch.set_grad_enabled(graph):
            x = shape_inputs(self.network, flat, self._input_shape)
            rows = self.network.jacobian(x, graph=graph).double()
            mean = self._mean(flat).reshape(*shape, C).double() + (rows @ self._mode).reshape(*shape, C)
            rows = rows.reshape(*shape[:-1], shape[-1] * C, -1)
            reduced = rows @ self._reduction.T
            covariance = (rows * self._variance) @ rows.mT - reduced @ reduced.mT
        if output_indices is not None:
            keep = (torch.arange(shape[-1])[:, None] * C + torch.tensor(output_indices)).flatten()
            covariance = covariance[..., keep, :][..., keep]
            mean = mean[..., output_indices]
        if isinstance(observation_noise, Tensor) or observation_noise:
            fixed = torch.tensor(1 / self.noise_precision)
            noise = (observation_noise if isinstance(observation_noise, Tensor) else fixed).to(covariance)
            covariance = covariance + torch.diag_embed(noise.expand_as(mean).reshape(*shape[:-1], -1))
        mean, covariance = mean.to(X.dtype), covariance.to(X.dtype)
        # Rounding leaves of a variance that the data reduce to nothing a small number of either sign.
        floor = 10 * torch.finfo(X.dtype).eps * float(self._largest)
        covariance = covariance + floor * torch.eye(covariance.shape[-1]).to(covariance)
        distributions = gpytorch.distributions
        if mean.shape[-1] == 1:
            distribution = distributions.MultivariateNormal(mean[..., 0], covariance)
        else:
            distribution = distributions.MultitaskMultivariateNormal(mean, covariance)
        posterior = GPyTorchPosterior(distribution)
        return posterior if posterior_transform is None else posterior_transform(posterior)

    @property
    def _largest(self) -> float:
        """The largest prior variance among the observations, nearly."""
        return float(self.exact.eigenvalues[-1]) / self.prior_precision

    def sample_paths(self, num_samples: int | None = None, seed: int = 0) -> GenericDeterministicModel:
        r"""Functions drawn from the posterior, `f_k(x) = m(x) + φ(x)(θ̄ + ζ_k)`, by pathwise conditioning.

        As a deterministic model of BoTorch: differentiable, and the same at every call, so that Thompson sampling can
        maximise it, by `PosteriorMean` for instance.

        Args:
            num_samples: `K`; the model then has batch shape `[K]`, and takes `X` of shape `[…, K, Q, D]`, inputs of
                each function, or `[…, 1, Q, D]` or `[Q, D]`, the same for all. By default one function of any `X`.
            seed: of the draws.
        """
        if num_samples is not None and num_samples < 1:
            raise ValueError(f"`sample_paths(num_samples)` needs at least 1, got {num_samples}.")
        zeta = self.exact.sample(Draws(num_samples or 1, seed), self.prior_precision, self.noise_precision)
        weights = (self._mode + zeta).to(self.network.dtype)

        def function(X: Tensor, k: int) -> Tensor:
            flat = X.reshape(-1, X.shape[-1])
            graph = torch.is_grad_enabled() and X.requires_grad
            x = shape_inputs(self.network, flat, self._input_shape)
            deviation = self.network.jvp(x, weights[k : k + 1], graph=graph)[0]
            return (self._mean(flat) + deviation).reshape(*X.shape[:-1], -1).to(X.dtype)

        def functions(X: Tensor) -> Tensor:
            if num_samples is None:
                return function(X, 0)
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
        options = {**self.options, "prior_precision": self.prior_precision, "noise_precision": self.noise_precision}
        data = (torch.cat([self.train_inputs[0], X.detach()]), torch.cat([self.train_targets, Y.detach()]))
        return TangentSurrogate(self.network, *data, **cast(dict[str, Any], options))
