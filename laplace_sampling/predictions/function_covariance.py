"""Covariance of the function at the inputs of a prediction, `φ(x) H⁻¹ φ(x)ᵀ`, where it is known without samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curvature.head import has_head_covariances, head_covariances, head_inputs, head_of, head_variances
from laplace_sampling.curvature.kronecker import Inverse
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.last_layer import LinearLayer
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.solvers.dense import Factor
from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.preconditioners import Curvature

# Numbers of a covariance that is pickled: a definition, 128 MiB in float64.
_KEPT = 2**24


class FunctionCovariance(ABC):
    """Covariance of the function at the inputs of a prediction without samples, as the exact method knows it."""

    # Whether variances are those of this covariance; else they are those of the samples, which are there anyway.
    for_variances: bool = True

    def variance(self) -> Float[Tensor, "N C"]:
        """The variance of each output."""
        return self.blocks().diagonal(dim1=1, dim2=2).clamp_min(0)

    @abstractmethod
    def blocks(self) -> Float[Tensor, "N C C"]:
        """The covariance between the (flattened) outputs of each input."""

    @abstractmethod
    def joint(self) -> Float[Tensor, "NC NC"]:
        """The covariance over all inputs and outputs, the outputs of an input adjacent."""


def _nothing() -> None:
    """The check of a covariance that was pickled."""


@dataclass(frozen=True)
class OnRequest(FunctionCovariance):
    """A multiple of a covariance that is computed when it is asked for, and kept where the prediction is pickled.

    Args:
        function: the covariance; None after it was pickled.
        check: raises if it can not be computed any more.
        factor: of the covariance.
        for_variances: whether variances are worth their pullbacks, one for each output.
        known: what was computed before it was pickled, by the names of the methods below.
    """

    function: FunctionCovariance | None
    check: Callable[[], None]
    factor: float = 1.0
    for_variances: bool = True
    known: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

    @solver_call
    def _computed(self, name: str) -> Tensor:
        if self.function is not None:
            self.check()
            return self.factor * getattr(self.function, name)()
        if name not in self.known:
            raise ValueError(
                f"A prediction that was pickled has covariances of up to {_KEPT:.2g} numbers, and its {name} has more: "
                "ask for `covariance()` or `joint_covariance()` before it is pickled, or predict fewer inputs at once."
            )
        return self.known[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnRequest":
        return self  # it never changes, and a copy would copy the network

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled: the covariances themselves, since the network and the training data stay behind."""
        if self.function is None:
            return OnRequest, (None, _nothing, 1.0, self.for_variances, self.known)
        if not self.for_variances:
            return OnRequest, (None, _nothing, 1.0, False, {})
        num, size = self.variance().shape
        numbers = {"variance": 0, "blocks": num * size**2, "joint": (num * size) ** 2}
        known = {name: self._computed(name) for name, n in numbers.items() if n <= _KEPT}
        return OnRequest, (None, _nothing, 1.0, True, known)

    def variance(self) -> Tensor:
        return self._computed("variance")

    def blocks(self) -> Tensor:
        return self._computed("blocks")

    def joint(self) -> Tensor:
        return self._computed("joint")


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


class Solves(Protocol):
    """An object that computes `H⁻¹v` of rows."""

    def solve(self, rhs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DenseCovariance(FunctionCovariance):
    """The covariance at some inputs.

    Attributes:
        features: `φ(x)`.
        prior: `A`.
        factor: solves with `H` in the scaled coordinates of the prior.
        precise: whether rows are computed in float64 where the network allows, once they are asked for.
    """

    features: Features
    prior: GaussianPrior
    factor: Solves
    precise: bool = False

    @cached_property
    def _rows_of(self) -> Features:
        return self.features.in_float64() if self.precise else self.features

    @staticmethod
    def tensors(operator: Operator, prior: GaussianPrior) -> dict[str, Tensor]:
        """A factor of `H` as tensors, to be kept.

        Args:
            operator: `M` in scaled coordinates.
            prior: `A`.
        """
        factor = Factor.of(operator, prior.spread())
        return {"factor": factor.factor} if factor.root is None else {"factor": factor.factor, "root": factor.root}

    @classmethod
    def of(cls, features: Features, prior: GaussianPrior, tensors: dict[str, Tensor]) -> "DenseCovariance":
        """The covariance at some inputs, from what `tensors` gave.

        In float64 where the network allows: where the data decide much, it is a difference of much larger numbers.
        """
        factor = Factor(prior.spread().double(), tensors["factor"], tensors.get("root"))
        return cls(features, prior, factor, precise=True)

    def blocks(self) -> Float[Tensor, "N C C"]:
        features = self.features
        most = max(1, int(BLOCK_BYTES / (16 * features.num_outputs * features.size)))
        blocks = []
        for batch in torch.arange(features.num_data).split(min(most, features.batch_size)):
            rows = self._rows_of.rows(batch).double() * self.prior.scale.double()
            solved = self.factor.solve(rows.flatten(0, 1)).reshape(rows.shape)
            block = rows @ solved.mT
            blocks.append((block + block.mT) / 2)
        return torch.cat(blocks)

    def joint(self) -> Float[Tensor, "NC NC"]:
        rows = torch.cat([self._rows_of.rows(batch).double() for batch in self.features.chunks()]).flatten(0, 1)
        rows = rows * self.prior.scale.double()
        covariance = rows @ self.factor.solve(rows).T
        return (covariance + covariance.T) / 2


@dataclass(frozen=True)
class HeadCovariance(FunctionCovariance):
    """`φ(x) (M̂ + A)⁻¹ φ(x)ᵀ` for `φ = I ⊗ hᵀ`.

    Attributes:
        features: `φ(x)`, of a linear layer.
        prior: `A`, with one precision.
        curvature: `M̂` in the scaled coordinates of the prior.
    """

    features: Features
    prior: GaussianPrior
    curvature: Curvature

    @property
    def _inputs(self) -> tuple[LinearLayer, Tensor]:
        found = head_inputs(self.features, torch.arange(self.features.num_data))
        assert found is not None
        return found

    def blocks(self) -> Float[Tensor, "N C C"]:
        return head_covariances(self.curvature, *self._inputs, self.prior.precision, self.prior.scale)[0]

    def variance(self) -> Float[Tensor, "N C"]:
        return head_variances(self.curvature, *self._inputs, self.prior.precision[0], self.prior.scale)

    def joint(self) -> Float[Tensor, "NC NC"]:
        return DenseCovariance(self.features, self.prior, Inverse(self.curvature, self.prior.spread())).joint()


def factored_covariance(features: Features, prior: GaussianPrior, curvature: Curvature) -> FunctionCovariance:
    """The covariance of a factored posterior at some inputs, from those of a linear layer if features are of one."""
    if head_of(features) is not None and len(prior.precision) == 1 and has_head_covariances(curvature):
        return HeadCovariance(features, prior, curvature)
    return DenseCovariance(features, prior, Inverse(curvature, prior.spread()))
