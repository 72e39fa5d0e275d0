"""A fitted model of GPyTorch as `condition` and `tune` take it: its data, its kernel, its noise."""

import copy
from typing import Any, Self, cast

import torch
from torch import Tensor

from laplace_sampling.arguments import as_numbers, refuse_class
from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.networks.linearisation import Linearisation

_LIKELIHOODS = (gpytorch.likelihoods.GaussianLikelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood)


class Prior:
    """A private copy in float64 of a fitted model, and its data as its kernel takes them.

    Args:
        model: that the user gives.
        caller: the function that takes it, for messages.

    Attributes:
        model: the copy, in evaluation mode.
        kernel: of the features that `forward` gives it.
        x, y, noise: features of the data, `y − m(X)`, and noise variances.
        shift, scale: of the targets, that BoTorch has standardised.
    """

    def __init__(self, model: Any, caller: str = "condition") -> None:
        _check(model, caller)
        self._caller = caller
        # Without what is cached, which has the size of the data squared; networks are private copies already.
        kept: dict[int, Any] = {id(model.prediction_strategy): None}
        for module in model.modules():
            if isinstance(getattr(module, "network", None), Linearisation):
                kept |= {id(module.network): module.network, id(getattr(module, "_cached", None)): None}
        self.model = copy.deepcopy(model, kept).double().requires_grad_(False).eval()
        self.shift, self.scale = _standardisation(model, caller)
        (x,) = cast(tuple[Tensor], self.model.train_inputs)
        with torch.no_grad():
            mean, self.kernel, self.x = self._forward(x.double())
            self.y = self.model.train_targets.double() - mean
            self._fixed = isinstance(model.likelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood)
            self.noise = self.model.likelihood.noise.double().expand(len(self.x)).clone()

    def _forward(self, x: Tensor) -> tuple[Tensor, gpytorch.kernels.Kernel, Tensor]:
        """The prior mean, the kernel, and the inputs that it takes."""
        with gpytorch.settings.lazily_evaluate_kernels(True):
            prior = self.model.forward(x)
        covariance: Any = prior.lazy_covariance_matrix
        if not isinstance(covariance, gpytorch.lazy.LazyEvaluatedKernelTensor):
            raise TypeError(
                f"`{self._caller}` needs a model whose `forward` calls one kernel, but its covariance is a "
                f"{type(covariance).__name__}: add or multiply kernels, as in `k1 + k2`, and not matrices."
            )
        kernel = covariance.kernel
        if kernel.active_dims is not None:  # the features have these columns only
            same = kernel.__new__(type(kernel))  # of the same parameters, as no copy of GPyTorch is
            same.__dict__ = {**kernel.__dict__, "_buffers": {**kernel._buffers, "active_dims": None}}
            kernel = same
        return prior.mean, kernel, covariance.x1

    def at(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The prior mean and the features of new inputs."""
        mean, _, features = self.evaluated(x)
        return mean, features

    def evaluated(self, x: Tensor) -> tuple[Tensor, gpytorch.kernels.Kernel, Tensor]:
        """The prior mean, the kernel, and the features of inputs, all at the present hyperparameters."""
        (data,) = cast(tuple[Tensor], self.model.train_inputs)
        if x.dim() == 1 and data.shape[1] == 1:  # as GPyTorch takes them
            x = x[:, None]
        if x.dim() != 2:
            raise ValueError(f"Inputs must have shape [N, D], but have {list(x.shape)}.")
        x = x.to(self.x.device, torch.float64)
        transform = getattr(self.model, "transform_inputs", None)
        return self._forward(x if transform is None else transform(x))

    def noise_of_new(self) -> Tensor:
        if self._fixed:
            raise ValueError("The model has a fixed noise for each datum, so that those of new data have to be given.")
        return self.noise[0]

    def extended(self, x: Tensor, y: Tensor, noise: Tensor | None) -> Self:
        """Returns the prior of these data and new ones together."""
        y = as_numbers("`Y_new`", y).to(self.y).reshape(-1)
        if len(y) != len(x) or not bool(y.isfinite().all()):
            raise ValueError(f"`extended` needs a finite target for each input, but got {len(x)} and {len(y)}.")
        means, features = self.at(x)
        other = copy.copy(self)
        other.x, other.y = torch.cat([self.x, features]), torch.cat([self.y, (y - self.shift) / self.scale - means])
        new = self.noise_of_new() if noise is None else variances(noise, len(x)).to(self.y) / self.scale**2
        other.noise = torch.cat([self.noise, new.expand(len(x))])
        return other


def variances(noise: Any, count: int) -> Tensor:
    """Variances of the noise of new data, one for each or for all."""
    found = as_numbers("`noise`", noise).reshape(-1)
    if len(found) not in (1, count) or not bool((found > 0).all()):
        raise ValueError(
            f"`noise` needs positive variances, for all or each of the {count} data, but is {noise!r:.60}."
        )
    return found


def _check(model: Any, caller: str) -> None:
    """Raise if a model has no posterior here, and say what to do."""
    refuse_class("model", model)
    if not isinstance(model, gpytorch.models.ExactGP):
        raise TypeError(
            f"`{caller}` takes a gpytorch.models.ExactGP, such as SingleTaskGP, but got a {type(model).__name__}. "
            "Of a list of models give each."
        )
    x: Any = model.train_inputs
    if model.training and caller == "condition":
        raise ValueError("`condition` takes a fitted model, but this one is in training mode: call `model.eval()`.")
    if x is None or model.train_targets is None:
        raise ValueError(f"`{caller}` needs a model with its data: call `model.set_train_data(x, y, strict=False)`.")
    if type(model.likelihood) not in _LIKELIHOODS:
        raise TypeError(
            f"`{caller}` takes Gaussian noise, of a GaussianLikelihood or a FixedNoiseGaussianLikelihood, but the "
            f"model has a {type(model.likelihood).__name__}. For a classification use `LinearisedLaplace`."
        )
    if len(x) != 1:
        raise ValueError(
            f"`{caller}` takes models of one tensor of inputs, but this one has {len(x)}: join "
            "them as columns, and choose columns by `active_dims` of the kernels."
        )
    y: Any = model.train_targets
    if y.dim() != 1 or x[0].dim() != 2:
        raise ValueError(
            f"`{caller}` takes one output and no batch shape, but the model has targets of shape "
            f"{list(y.shape)}: give a model for each output."
        )
    if not bool(y.isfinite().all()):
        raise ValueError("The targets of the model contain NaN or infinity: leave these data out.")


def _standardisation(model: Any, caller: str) -> tuple[float, float]:
    """`a` and `b` with which the targets are `a + b` times those of the model."""
    transform = getattr(model, "outcome_transform", None)
    if transform is None:
        return 0.0, 1.0
    if type(transform).__name__ != "Standardize":
        raise NotImplementedError(
            f"`{caller}` takes back a Standardize of BoTorch only, and not a {type(transform).__name__}: give the "
            "model transformed targets."
        )
    return float(transform.means), float(transform.stdvs)
