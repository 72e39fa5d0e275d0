"""Covariance of the function at the inputs of a prediction, where it is known without samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.networks.solving import solver_call

# Numbers of a covariance that is pickled: a definition, 128 MiB in float64.
_KEPT = 2**24


class FunctionCovariance(ABC):
    """Covariance of the function at the inputs of a prediction without samples, as the exact method knows it."""

    @abstractmethod
    def variance(self) -> Float[Tensor, "N C"]:
        """The variance of each output."""

    @abstractmethod
    def blocks(self) -> Float[Tensor, "N C C"]:
        """The covariance between the (flattened) outputs of each input."""

    @abstractmethod
    def joint(self) -> Float[Tensor, "NC NC"]:
        """The covariance over all inputs and outputs, the outputs of an input adjacent."""


@dataclass(frozen=True)
class OnRequest(FunctionCovariance):
    """A covariance that is computed when it is asked for, and kept where the prediction is pickled.

    Args:
        function: the covariance.
        check: raises if it can not be computed any more.
    """

    function: FunctionCovariance
    check: Callable[[], None]

    @solver_call
    def _computed(self, name: str) -> Tensor:
        self.check()
        return getattr(self.function, name)()

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnRequest":
        return self  # it never changes, and a copy would copy the network

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled: the covariances themselves, since the network and the training data stay behind."""
        num, size = self.variance().shape
        numbers = {"variance": 0, "blocks": num * size**2, "joint": (num * size) ** 2}
        return _Known, ({name: self._computed(name) for name, n in numbers.items() if n <= _KEPT},)

    def variance(self) -> Tensor:
        return self._computed("variance")

    def blocks(self) -> Tensor:
        return self._computed("blocks")

    def joint(self) -> Tensor:
        return self._computed("joint")


@dataclass(frozen=True)
class _Known(FunctionCovariance):
    """Covariances that were computed; the larger ones only where they are not too large."""

    known: dict[str, Tensor]

    def _get(self, name: str) -> Tensor:
        if name not in self.known:
            raise ValueError(
                f"A prediction that was pickled has covariances of up to {_KEPT:.2g} numbers, and its {name} has more: "
                "ask for `covariance()` or `joint_covariance()` before it is pickled, or predict fewer inputs at once."
            )
        return self.known[name]

    def variance(self) -> Tensor:
        return self._get("variance")

    def blocks(self) -> Tensor:
        return self._get("blocks")

    def joint(self) -> Tensor:
        return self._get("joint")


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
    """The covariance of some of the (flattened) outputs.

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
