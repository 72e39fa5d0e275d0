"""Covariance of the function at the inputs of a prediction, `φ(x) H⁻¹ φ(x)ᵀ`, where it is known without samples."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.curvature.by_layers import covariances_by_layers, has_covariances_by_layers
from laplace_sampling.curvature.head import has_head_covariances, head_covariances, head_inputs, head_of, head_variances
from laplace_sampling.curvature.kronecker import Inverse
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.last_layer import LinearLayer
from laplace_sampling.networks.memory import free_memory
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

    def inverse(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        """`H⁻¹ v` of rows, in float64."""
        raise NotImplementedError(f"{type(self).__name__} knows covariances, but not those of the weights.")


class Function(FunctionCovariance):
    """The function at the inputs of a prediction: its covariance, and `num_samples` samples of it."""

    num_samples: int

    @abstractmethod
    def deviations(self) -> Float[Tensor, "K N C"]:
        """`φ(x) ζ_k`: row `k` is one function at all inputs."""

    @abstractmethod
    def white(self, num_outputs: int) -> Float[Tensor, "K C"]:
        """White noise for draws of as many outputs of a datum, the same for all data."""

    def draws(self) -> Float[Tensor, "K N C"]:
        """Draws of the outputs of each datum by itself, `V_n^{1/2} z_k`; their mean square is `V_n` if `K ≥ C`."""
        blocks = self.blocks()
        return draws_of(blocks, self.white(blocks.shape[1]))


def draws_of(blocks: Float[Tensor, "N C C"], white: Float[Tensor, "K C"]) -> Float[Tensor, "K N C"]:
    """`V_n^{1/2} z_k` in float64; NaN where a covariance is not finite."""
    blocks = blocks.double()
    finite = blocks.isfinite().all(2).all(1)[:, None, None]
    values, vectors = torch.linalg.eigh(blocks.where(finite, 0.0))
    # The symmetric root, which does not depend on the signs of eigenvectors.
    root = (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT
    return (white.to(root) @ root.where(finite, torch.nan)).transpose(0, 1)


@lru_cache(16)  # as many calls for one datum each have the same
def white_noise(num_samples: int, num_outputs: int, seed: int) -> Float[Tensor, "K C"]:
    """Normal numbers for draws of outputs, with `(1/K) Σ_k z_k z_kᵀ = I` if there are enough of them."""
    z = Draws(num_samples, seed, Stream.OUTPUTS).prior(num_outputs).double()
    if num_samples < num_outputs:
        return z
    # Second moments of draws are then those of the Gaussian, and means of functions of few draws are more accurate.
    q, r = torch.linalg.qr(z)
    return math.sqrt(num_samples) * q * r.diagonal().sign()


def _nothing() -> None:
    """The check of a covariance that was pickled."""


@dataclass(frozen=True)
class OnRequest(Function):
    """What is known of the function, computed when it is first asked for, and kept where the prediction is pickled.

    Args:
        function: the covariance; None after it was pickled.
        check: raises if it can not be computed any more.
        factor: of the covariance.
        for_variances: whether variances are worth their pullbacks, one for each output.
        sampled: computes `deviations`, without the factor; `None` if the prediction has them.
        num_samples: their number, and that of draws.
        seed: of draws.
        known: what was computed, by the names of the methods below.
    """

    function: FunctionCovariance | None
    check: Callable[[], None]
    factor: float = 1.0
    for_variances: bool = True
    sampled: Callable[[], Tensor] | None = None
    num_samples: int = 0
    seed: int = 0
    known: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @solver_call
    def _computed(self, name: str) -> Tensor:
        if name in self.known:
            return self.known[name]
        if self.function is None:
            raise ValueError(
                f"A prediction that was pickled has what takes up to {_KEPT:.2g} numbers, and its {name} have more: "
                "ask for `samples`, `covariance()` or `joint_covariance()` before it is pickled, or predict fewer "
                "inputs at once."
            )
        self.check()
        if name == "deviations":
            assert self.sampled is not None
            found = math.sqrt(self.factor) * self.sampled()
        else:
            found = self.factor * getattr(self.function, name)()
        return self.known.setdefault(name, found)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnRequest":
        return self  # it never changes, and a copy would copy the network

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled: covariances and samples, since the network and the training data stay behind."""
        known = dict(self.known)
        if self.function is not None and self.for_variances:
            num, size = self.variance().shape
            numbers = {"variance": 0, "blocks": num * size**2, "joint": (num * size) ** 2}
            numbers |= {"deviations": self.num_samples * num * size} if self.sampled is not None else {}
            known |= {name: getattr(self, name)() for name, n in numbers.items() if n <= _KEPT}
        return OnRequest, (None, _nothing, 1.0, self.for_variances, None, self.num_samples, self.seed, known)

    def variance(self) -> Tensor:
        # Most have a variance by their blocks only, which draws take, too.
        by_blocks = self.function is not None and type(self.function).variance is FunctionCovariance.variance
        return super().variance() if by_blocks else self._computed("variance")

    def blocks(self) -> Tensor:
        return self._computed("blocks")

    def joint(self) -> Tensor:
        return self._computed("joint")

    def deviations(self) -> Tensor:
        return self._computed("deviations")

    def white(self, num_outputs: int) -> Tensor:
        return white_noise(self.num_samples, num_outputs, self.seed)


@dataclass(frozen=True)
class OfOutputs(Function):
    """Some of the (flattened) outputs.

    Args:
        function: of all outputs.
        columns: which.
        num_outputs: `C`, of all.
    """

    function: Function
    columns: slice
    num_outputs: int

    @property
    def num_samples(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.function.num_samples

    def variance(self) -> Tensor:
        variance = self.function.variance()
        return variance.reshape(len(variance), -1)[:, self.columns]

    def blocks(self) -> Tensor:
        return self.function.blocks()[:, self.columns, self.columns]

    def joint(self) -> Tensor:
        joint = self.function.joint()
        part = joint.reshape(-1, self.num_outputs, len(joint))[:, self.columns].flatten(0, 1)
        return part.reshape(len(part), -1, self.num_outputs)[..., self.columns].flatten(1)

    def deviations(self) -> Tensor:
        return self.function.deviations()[..., self.columns]

    def white(self, num_outputs: int) -> Tensor:
        return self.function.white(num_outputs)


class Solves(Protocol):
    """An object that computes `H⁻¹v` of rows."""

    def solve(self, rhs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class DenseCovariance(FunctionCovariance):
    """The covariance `φ(x) H⁻¹ φ(x)ᵀ` from whole rows `φ(x)` and solves with `H`, in float64.

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

    def inverse(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        scale = self.prior.scale.double()
        return self.factor.solve(v.double() * scale) * scale

    def blocks(self) -> Float[Tensor, "N C C"]:
        features = self.features
        memory = min(BLOCK_BYTES, free_memory(features.device) / 2)
        # Rows in float64 and their solves; by layers, rows with three copies in another basis in float32.
        most = max(1, int(memory / (16 * features.num_outputs * features.size)))
        batches = torch.arange(features.num_data).split(min(most, features.batch_size))
        blocks = torch.cat([self._blocks(batch) for batch in batches])
        return (blocks + blocks.mT) / 2

    def _blocks(self, batch: Tensor) -> Float[Tensor, "n C C"]:
        """The blocks of some data, symmetric up to rounding."""
        rows = self._rows_of.rows(batch).double() * self.prior.scale.double()
        return rows @ self.factor.solve(rows.flatten(0, 1)).reshape(rows.shape).mT

    def joint(self) -> Float[Tensor, "NC NC"]:
        rows = torch.cat([self._rows_of.rows(batch).double() for batch in self.features.chunks()]).flatten(0, 1)
        rows = rows * self.prior.scale.double()
        covariance = rows @ self.factor.solve(rows).T
        return (covariance + covariance.T) / 2


@dataclass(frozen=True)
class CurvatureCovariance(DenseCovariance):
    """`φ(x) (M̂ + A)⁻¹ φ(x)ᵀ`, by layers of the network where these hold all weights."""

    factor: Inverse

    def _blocks(self, batch: Tensor) -> Float[Tensor, "n C C"]:
        curvature, found = self.factor.curvature, None
        if has_covariances_by_layers(curvature, self.prior):
            rows = self.features.rows_by_layers(batch)
            found = None if rows is None else covariances_by_layers(curvature, rows, self.prior)
        return super()._blocks(batch) if found is None else found


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

    @property
    def _dense(self) -> DenseCovariance:
        return DenseCovariance(self.features, self.prior, Inverse(self.curvature, self.prior.spread()))

    def joint(self) -> Float[Tensor, "NC NC"]:
        return self._dense.joint()

    def inverse(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K P"]:
        return self._dense.inverse(v)


def factored_covariance(features: Features, prior: GaussianPrior, curvature: Curvature) -> FunctionCovariance:
    """The covariance of a factored posterior at some inputs, from those of a linear layer if features are of one."""
    if head_of(features) is not None and len(prior.precision) == 1 and has_head_covariances(curvature):
        return HeadCovariance(features, prior, curvature)
    return CurvatureCovariance(features, prior, Inverse(curvature, prior.spread()))
