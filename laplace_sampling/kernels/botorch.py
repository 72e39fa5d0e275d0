r"""Posteriors of any kernel as models of BoTorch: `pip install laplace_sampling[botorch]`.

`ConditionedModel(condition(model))` goes where a fitted `SingleTaskGP` goes, on data that no factor fits: acquisition
functions of one or many inputs, `PathwiseThompsonSampling`, `draw_matheron_paths`.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.kernels.conditioned import KernelPosterior
from laplace_sampling.kernels.paths import KernelPaths

try:
    from botorch.models.model import Model
    from botorch.posteriors import GPyTorchPosterior
    from botorch.sampling.pathwise import SamplePath
    from botorch.sampling.pathwise.posterior_samplers import DrawMatheronPaths
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "`laplace_sampling.kernels.botorch` needs BoTorch: `pip install laplace_sampling[botorch]`."
    ) from error

# Paths do not need BoTorch, but are instances of its class.
SamplePath.register(KernelPaths)


class ConditionedModel(Model):
    """A posterior as a model of BoTorch, in the units of the user: transforms of inputs and outcomes are applied.

    `posterior(X)` is Gaussian, with the mean of the posterior, and the covariance of its samples' deviations: of rank
    `K`, the same at every call, differentiable, and in variances with a relative standard error of `√(2/K)`.

    `draw_matheron_paths`, and with it `PathwiseThompsonSampling`, takes some of the samples at random, by the seed of
    torch. So `q` candidates at a time need at least `q` samples. It does not solve anything.

    Args:
        conditioned: what `condition` has returned.

    Raises:
        TypeError: for anything else.
    """

    num_outputs = 1  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    batch_shape = torch.Size([])  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, conditioned: KernelPosterior) -> None:
        super().__init__()
        if not isinstance(conditioned, KernelPosterior):
            raise TypeError(
                f"`ConditionedModel(conditioned)` needs what `condition(model)` returns, but got a "
                f"{type(conditioned).__name__}."
            )
        self.conditioned = conditioned

    def posterior(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        X: Float[Tensor, "*B Q D"],
        output_indices: list[int] | None = None,
        observation_noise: bool = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The joint posterior of `Q` values.

        Args:
            X: inputs, `[…, Q, D]`.
            output_indices: for BoTorch; there is one output.
            observation_noise: whether noise is added to the variances.
            posterior_transform: of BoTorch.

        Raises:
            ValueError: if noise is asked for, and the model has a fixed one for each datum.
            TypeError: if it is a tensor.
        """
        if not isinstance(observation_noise, bool):
            raise TypeError("`observation_noise` must be True or False: add variances of your own to the covariance.")
        flat = X.reshape(-1, X.shape[-1])
        mean, deviations = (part.reshape(*part.shape[:-1], *X.shape[:-1]) for part in self.conditioned.parts(flat))
        covariance = torch.einsum("k...i,k...j->...ij", deviations, deviations) / len(deviations)
        if observation_noise:
            covariance = covariance + self.conditioned.noise_of_new().to(mean) * torch.eye(X.shape[-2]).to(mean)
        found = GPyTorchPosterior(gpytorch.distributions.MultivariateNormal(mean, covariance))
        return found if posterior_transform is None else posterior_transform(found)

    def condition_on_observations(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, X: Float[Tensor, "M D"], Y: Float[Tensor, "M 1"], noise: Float[Tensor, "M 1"] | None = None, **kwargs: Any
    ) -> "ConditionedModel":
        """The model of more data, solved from where this one has ended (`KernelPosterior.extended`).

        Args:
            X: inputs.
            Y: targets.
            noise: its variances, for a model with a fixed noise for each datum.
            kwargs: of BoTorch, without effect.
        """
        return ConditionedModel(self.conditioned.extended(X, Y, noise))


@DrawMatheronPaths.register(ConditionedModel)
def _draw_matheron_paths(model: ConditionedModel, *, sample_shape: torch.Size, **kwargs: Any) -> KernelPaths:
    """Other samplers and updates, which BoTorch hands over, have no place here."""
    paths = model.conditioned.sample_paths(sample_shape.numel(), seed=int(torch.randint(2**31, ())))
    paths.sample_shape = sample_shape
    return paths
