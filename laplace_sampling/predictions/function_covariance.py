"""Covariance of the function at the inputs of a prediction, where it is known without samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.networks.solving import solver_call

__all__ = ["FunctionCovariance", "Guarded", "OfOutputs", "Scaled"]

# Numbers of a covariance that is pickled: a definition, 128 MiB in float64.
_KEPT = 2**24


class FunctionCovariance(ABC):
    """Covariance of the function at the inputs of a prediction without samples, as the exact method knows it."""

    @abstractmethod
    def variance(self) -> Float[Tensor, "N C"]:
        """Of each output."""

    @abstractmethod
    def blocks(self) -> Float[Tensor, "N C C"]:
        """Between the (flattened) outputs of each input."""

    @abstractmethod
    def joint(self) -> Float[Tensor, "NC NC"]:
        """Over all inputs and outputs, the outputs of an input adjacent."""


@dataclass(frozen=True)
class Guarded(FunctionCovariance):
    """A covariance that is computed when it is asked for, after a check that it still can be.

    Args:
        function: the covariance.
        check: raises if not.
    """

    function: FunctionCovariance
    check: Callable[[], None]

    @solver_call
    def _checked(self, name: str) -> Tensor:
        self.check()
        return getattr(self.function, name)()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Guarded":
        return self  # it never changes, and a copy would copy the network

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled: the covariances themselves, since the network and the training data stay behind."""
        variance = self.variance()
        num, size = variance.shape
        kept = {"blocks": num * size**2, "joint": (num * size) ** 2}
        return _Computed, (variance, {name: self._checked(name) for name, n in kept.items() if n <= _KEPT})

    def variance(self) -> Tensor:
        return self._checked("variance")

    def blocks(self) -> Tensor:
        return self._checked("blocks")

    def joint(self) -> Tensor:
        return self._checked("joint")


@dataclass(frozen=True)
class _Computed(FunctionCovariance):
    """Covariances that were computed; the larger ones only where they are not too large."""

    variances: Tensor
    kept: dict[str, Tensor]

    def variance(self) -> Tensor:
        return self.variances

    def blocks(self) -> Tensor:
        return self._kept("blocks", "covariance()")

    def joint(self) -> Tensor:
        return self._kept("joint", "joint_covariance()")

    def _kept(self, name: str, call: str) -> Tensor:
        if name not in self.kept:
            raise ValueError(
                f"`{call}` of a prediction that was pickled is there up to {_KEPT:.2g} numbers, and this one has more: "
                "ask the prediction for it before it is pickled, or predict fewer inputs at once."
            )
        return self.kept[name]


@dataclass(frozen=True)
class Scaled(FunctionCovariance):
    """A multiple of a covariance."""

    function: FunctionCovariance
    factor: float

    def variance(self) -> Tensor:
        return self.factor * self.function.variance()

    def blocks(self) -> Tensor:
        return self.factor * self.function.blocks()

    def joint(self) -> Tensor:
        return self.factor * self.function.joint()


@dataclass(frozen=True)
class OfOutputs(FunctionCovariance):
    """That of some of the (flattened) outputs.

    Args:
        function: of all outputs.
        columns: which.
        num_outputs: `C`, of all.
    """

    function: FunctionCovariance
    columns: slice
    num_outputs: int

    def variance(self) -> Tensor:
        variance = self.function.variance()
        return variance.reshape(len(variance), -1)[:, self.columns]

    def blocks(self) -> Tensor:
        return self.function.blocks()[:, self.columns, self.columns]

    def joint(self) -> Tensor:
        joint = self.function.joint()
        part = joint.reshape(-1, self.num_outputs, len(joint))[:, self.columns].flatten(0, 1)
        return part.reshape(len(part), -1, self.num_outputs)[..., self.columns].flatten(1)
