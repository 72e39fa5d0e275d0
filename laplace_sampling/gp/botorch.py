r"""The tangent model as a surrogate of BoTorch: `pip install laplace_sampling[botorch]`.

A network is the prior mean, or its linearisation is, and observations correct it through the tangent kernel.
`TangentSurrogate` is a `TangentGP` and a `GPyTorchModel`, so that all of BoTorch takes it as it takes a `SingleTaskGP`:
acquisition functions of one and of many inputs, those that look ahead by fantasies (for networks of one output),
`fit_gpytorch_mll`. For Thompson sampling maximise `PosteriorMean(surrogate.sample_paths())`.
"""

import warnings
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.arguments import as_numbers, check_positive, check_whole
from laplace_sampling.gp.evidence import Optimum, RegressionEvidence
from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.gp.tangent_kernel import TangentGP, TangentKernel, shape_inputs
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.solver import ConvergenceWarning

try:
    from botorch.models.deterministic import GenericDeterministicModel
    from botorch.models.gpytorch import GPyTorchModel
    from botorch.models.model import FantasizeMixin
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "`laplace_sampling.gp.botorch` needs BoTorch: `pip install laplace_sampling[botorch]`."
    ) from error


class TangentSurrogate(TangentGP, GPyTorchModel, FantasizeMixin):  # pyright: ignore[reportIncompatibleMethodOverride]
    r"""A BoTorch model of one or several outputs: a Gaussian process with the tangent kernel of a network.

    **With a network that was trained on the observations, Bayesian optimisation makes hardly any progress**: on two of
    three test functions it is no better than random search (`docs/benchmarks.md`). Such a network fits few data
    exactly, with features that training has adapted to them, and the evidence takes that for knowledge. Error bars are
    then too narrow by a factor of five or more. As a part of the kernel of a `SingleTaskGP`, whose other part is
    BoTorch's default, the tangent is level with `SingleTaskGP`; `examples/bayesian_optimisation.py` does so:

        tangent = TangentKernel(network)
        tangent.prior_precision = tangent(train_X, diag=True).detach().mean()  # a variance of one to start from
        kernel = tangent + get_covar_module_with_dim_scaled_prior(ard_num_dims=D)
        model = SingleTaskGP(train_X, train_Y, covar_module=kernel)

    For data too many for a Cholesky factor give that model to `laplace_sampling.kernels.condition`.

    Prior precision and noise precision are those of largest evidence, unless they are given. `fit_gpytorch_mll` finds
    others, such as those of largest posterior probability under priors of GPyTorch.

    Args:
        network: a trained network, or its linearisation.
        train_X: `[N, D]`, best in float64, as BoTorch asks.
        train_Y: `[N, C]`, best standardised: GPyTorch raises variances below 1e-10 to that, in float32 below 1e-6.
        mean: `"network"`, `"affine"` or `"homogeneous"` (`NetworkMean`).
        prior_precision: `α`, learnt by default.
        noise_precision: `b`, common to all outputs, learnt by default.
        options: further arguments of `TangentKernel`, such as `scale` and `input_shape`.

    Raises:
        ValueError: for shapes that do not fit, data that are not finite, and precisions that are not positive.

    Attributes:
        optimum: how the hyperparameters were found. A `ConvergenceWarning` says if the evidence has no maximum.
    """

    covar_module: TangentKernel
    optimum: Optimum

    def __init__(
        self,
        network: nn.Module | Linearisation,
        train_X: Float[Tensor, "N D"],
        train_Y: Float[Tensor, "N C"],
        *,
        mean: str = "affine",
        prior_precision: float | None = None,
        noise_precision: float | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("prior_precision", prior_precision), ("noise_precision", noise_precision)):
            if value is not None:
                check_positive(f"`{name}`", value, also=", or None to be learnt")
        train_X, train_Y = (_checked(name, value) for name, value in (("train_X", train_X), ("train_Y", train_Y)))
        if train_X.dim() != 2 or train_Y.dim() != 2 or len(train_X) != len(train_Y) or not train_X.numel():
            shapes = f"{list(train_X.shape)} and {list(train_Y.shape)}"
            raise ValueError(f"`train_X` and `train_Y` must have shapes [N, D] and [N, C], but have {shapes}.")
        self._num_outputs = train_Y.shape[1]
        targets = train_Y[:, 0] if self._num_outputs == 1 else train_Y
        options |= {"prior_precision": prior_precision or 1.0}
        super().__init__(train_X, targets, _likelihood(self._num_outputs).to(train_X), network, mean=mean, **options)
        self.optimum = self._largest_evidence(prior_precision, noise_precision)
        kernel, noise = cast(Any, self.covar_module), cast(Any, self.likelihood)
        kernel.prior_precision, noise.noise = self.optimum.precision, 1 / self.optimum.noise_precision
        if not self.optimum.converged:
            warnings.warn(
                "`TangentSurrogate` found no maximum of the evidence, and takes "
                f"prior_precision={self.optimum.precision:.3g}, noise_precision={self.optimum.noise_precision:.3g}. "
                "The network fits `train_Y` exactly, or its tangent has no part in it: check the data, or give both.",
                ConvergenceWarning,
                stacklevel=2,
            )

    @torch.no_grad()
    def _largest_evidence(self, prior_precision: float | None, noise_precision: float | None) -> Optimum:
        """`α` and `b` of largest evidence; those that are given stay."""
        K, residual = self._at_observations()
        precision = self.covar_module.prior_precision.double().to(K.device)
        values, vectors = torch.linalg.eigh(precision * K)
        evidence = RegressionEvidence(values.clamp_min(0), vectors.T @ residual.flatten(), len(values))
        start = (prior_precision or 1.0, noise_precision or 1.0)
        return evidence.largest(start, (prior_precision is None, noise_precision is None))

    def _at_observations(self) -> tuple[Float[Tensor, "NC NC"], Float[Tensor, "N C"]]:
        """The kernel matrix and `y − m`, in float64."""
        (x,), y = cast(tuple[Tensor], self.train_inputs), cast(Tensor, self.train_targets)
        prior = self.forward(x)
        return prior.covariance_matrix.double(), (y - prior.mean).double().reshape(len(x), -1)

    def sample_paths(self, num_samples: int | None = None, seed: int = 0) -> GenericDeterministicModel:
        r"""Functions drawn from the posterior, `f_k(x) = m(x) + φ(x)(θ̄ + ζ_k)`, by pathwise conditioning.

        The result is a deterministic model of BoTorch: differentiable, and the same at every call, so that Thompson
        sampling can maximise it, by `PosteriorMean` for instance. A sample is one vector of weights, of the network as
        it is now.

        Args:
            num_samples: `K`; the model then has batch shape `[K]`, and takes `X` of shape `[…, K, Q, D]`, inputs of
                each function, or `[…, 1, Q, D]` or `[Q, D]`, the same for all. By default one function of any `X`.
            seed: the seed of the draws.
        """
        if num_samples is not None:
            check_whole("`sample_paths(num_samples)`", num_samples, 1)
        network, shape = self.covar_module.network, self.covar_module.input_shape
        weights = self._sampled_weights(Draws(num_samples or 1, seed)).to(network.dtype)

        def function(X: Tensor, k: int) -> Tensor:
            flat = X.reshape(-1, X.shape[-1])
            graph = torch.is_grad_enabled() and X.requires_grad
            deviation = network.jvp(shape_inputs(network, flat, shape), weights[k : k + 1], graph=graph)[0]
            mean = cast(Tensor, self.mean_module(flat)).reshape(len(flat), -1)
            return (mean + deviation.to(mean)).reshape(*X.shape[:-1], -1)

        def functions(X: Tensor) -> Tensor:
            if num_samples is None:
                return function(X, 0)
            # Each function has inputs of its own, so that all are maximised together.
            X = X[None] if X.dim() < 3 else X
            X = X.expand(*X.shape[:-3], num_samples, *X.shape[-2:])
            return torch.stack([function(X[..., k, :, :], k) for k in range(num_samples)], dim=-3)

        batch_shape = torch.Size([] if num_samples is None else [num_samples])
        return GenericDeterministicModel(functions, num_outputs=self.num_outputs, batch_shape=batch_shape)

    @torch.no_grad()
    def _sampled_weights(self, draws: Draws) -> Float[Tensor, "K P"]:
        """`θ⁰ + A⁻¹Φᵀ(K + I/b)⁻¹(y − m − Φθ⁰ − ε)`: Matheron's rule."""
        kernel, (x,) = self.covar_module, cast(tuple[Tensor], self.train_inputs)
        network, inputs = kernel.network, shape_inputs(kernel.network, x, kernel.input_shape)
        variance = (kernel.variance / kernel.prior_precision).to(network.device, torch.float64)
        weights = draws.prior(network.num_parameters).to(variance) * variance.sqrt()
        K, residual = self._at_observations()
        variance_of_noise = cast(Tensor, self.likelihood.noise).to(K)
        noise = draws.noise(self.num_outputs)(torch.arange(len(x))).to(K) * variance_of_noise.sqrt()
        wanted = residual - network.jvp(inputs, weights.to(network.dtype)).to(K) - noise
        K.diagonal().add_(variance_of_noise)
        solved = torch.linalg.solve(K, wanted.flatten(1).T).T.reshape(wanted.shape)
        return weights + variance * network.vjp(inputs, solved.to(network.device, network.dtype)).double()


def _checked(name: str, values: Any) -> Tensor:
    """A copy of finite numbers, without a graph."""
    numbers = as_numbers(f"`{name}`", values).clone()
    if not bool(numbers.isfinite().all()):
        raise ValueError(f"`{name}` contains NaN or infinity: leave these data out.")
    return numbers


def _likelihood(num_outputs: int) -> Any:
    """One noise variance, which the optimiser sees as its logarithm."""
    constraint = gpytorch.constraints.GreaterThan(
        0.0,
        transform=torch.exp,  # pyright: ignore[reportArgumentType]
        inv_transform=torch.log,
    )
    if num_outputs == 1:
        return gpytorch.likelihoods.GaussianLikelihood(noise_constraint=constraint)
    return gpytorch.likelihoods.MultitaskGaussianLikelihood(
        num_tasks=num_outputs, noise_constraint=constraint, has_task_noise=False
    )
