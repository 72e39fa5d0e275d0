"""`Settings`: what a `LinearisedLaplace` is constructed with; written once, for the constructor, `repr` and files."""

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from laplace_sampling.arguments import check_whole
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.likelihoods.as_likelihood import as_likelihood
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.priors.as_prior import as_prior
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.methods import as_method
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.random_weights import Subset, linearise

__all__ = ["Settings"]

_LINEAR_MODELS = ("auto", "affine", "homogeneous")


@dataclass(frozen=True)
class Settings:
    """Arguments of the constructor of `LinearisedLaplace`, with what their strings stand for."""

    likelihood: Likelihood
    prior: Prior
    parameters: Subset
    method: Method
    num_samples: int
    seed: int
    linear_model: str
    processes: Processes = field(default=ALONE, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        likelihood: Any,
        *,
        prior: Any = "isotropic",
        parameters: Subset = None,
        method: Any = "auto",
        num_samples: int = 64,
        seed: int = 0,
        linear_model: str = "auto",
        process_group: Any = None,
    ) -> "Settings":
        """The settings of arguments, some of which are strings.

        Raises:
            TypeError, ValueError: for settings that are not known or do not go together.
        """
        _check_choice("linear_model", linear_model, _LINEAR_MODELS)
        likelihood = as_likelihood(likelihood)
        # The affine model was better on small regressions, the homogeneous one on small classifications.
        default = "affine" if likelihood.quadratic else "homogeneous"
        return cls(
            likelihood=likelihood,
            prior=as_prior(prior),
            parameters=parameters,
            method=as_method(method),
            num_samples=num_samples,
            seed=seed,
            linear_model=default if linear_model == "auto" else linear_model,
            processes=ALONE if process_group is None else Processes(process_group),
        )

    def __post_init__(self) -> None:
        check_whole("`num_samples`", self.num_samples, 2)
        check_whole("`seed`", self.seed, 0)
        self.method.check_likelihood(self.likelihood)

    @property
    def observation(self) -> Any:
        """`T` of measurements `y = T f(x) + noise`, or `None`."""
        return getattr(self.likelihood, "observe", None)

    def linearise(self, model: nn.Module) -> Linearisation:
        """The network with these random weights."""
        return self.prior.linearised(linearise(model, self.parameters, autocast=self.method.autocast))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is not known; use one of {list(choices)}.")
