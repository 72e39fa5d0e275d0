r"""Linear measurements of the outputs, `y = T f(x) + noise`, as of inverse problems (thesis eq. 7.1, 7.5–7.6).

`observe` turns the linear model of the outputs into that of the measurements, `T h(θ, x) = T o + (TΦ) θ`: all methods,
primal and dual, then work as they are. Predictions of the outputs themselves are made with the features of the network,
as ever.

`weigh` does the same for noise of unequal variances `R`: targets times `R^{-1/2}` have equal ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.linear_operators import LinearOperator
from laplace_sampling.linear_model.features import DerivedFeatures, Features
from laplace_sampling.linear_model.sampling import LinearModel

__all__ = [
    "JointFeatures",
    "Measurement",
    "ObservedFeatures",
    "WeightedFeatures",
    "as_measurement",
    "noise_weights",
    "observe",
    "weigh",
]


class Measurement(ABC):
    """`T`, `[m, n]`, by its products with stacks of rows.

    Attributes:
        shape: `(m, n)`.
    """

    shape: tuple[int, int]

    @abstractmethod
    def apply(self, f: Float[Tensor, "*K n"]) -> Float[Tensor, "*K m"]:
        """`T f`."""

    @abstractmethod
    def adjoint(self, u: Float[Tensor, "*K m"]) -> Float[Tensor, "*K n"]:
        """`Tᵀ u`."""


@dataclass(frozen=True)
class _Matrix(Measurement):
    matrix: Tensor

    @property
    def shape(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.matrix.shape[0], self.matrix.shape[1]

    def apply(self, f: Tensor) -> Tensor:
        return self._product(self.matrix, f)

    def adjoint(self, u: Tensor) -> Tensor:
        return self._product(self.matrix.T, u)

    @staticmethod
    def _product(matrix: Tensor, rows: Tensor) -> Tensor:
        stack = rows.reshape(-1, rows.shape[-1])
        return (matrix.to(stack) @ stack.T).T.reshape(*rows.shape[:-1], -1)


@dataclass(frozen=True)
class _Linear(Measurement):
    operator: LinearOperator

    @property
    def shape(self) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.operator.shape[-2], self.operator.shape[-1]

    def apply(self, f: Tensor) -> Tensor:
        return self._product(self.operator, f)

    def adjoint(self, u: Tensor) -> Tensor:
        return self._product(self.operator.mT, u)

    @staticmethod
    def _product(operator: LinearOperator, rows: Tensor) -> Tensor:
        stack = rows.reshape(-1, rows.shape[-1]).to(operator.dtype)
        product = operator @ stack.T.contiguous()
        assert isinstance(product, Tensor)
        return product.T.reshape(*rows.shape[:-1], -1).to(rows.dtype)


@dataclass(frozen=True)
class _Callables(Measurement):
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], Tensor]
    shape: tuple[int, int]
    dtype: torch.dtype

    def apply(self, f: Tensor) -> Tensor:
        return self._rows(self.forward, f)

    def adjoint(self, u: Tensor) -> Tensor:
        return self._rows(self.backward, u)

    def _rows(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        # The functions are of the dtype of the network, products may be in float64.
        stack = rows.reshape(-1, rows.shape[-1]).to(self.dtype)
        values = torch.stack([function(row).reshape(-1) for row in stack])
        return values.reshape(*rows.shape[:-1], -1).to(rows.dtype)


def as_measurement(
    T: "Measurement | Tensor | LinearOperator | tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]",
    num_outputs: int,
    dtype: torch.dtype = torch.float64,
) -> Measurement:
    r"""A measurement from what a user gives; a pair is tested for `⟨Tf, u⟩ = ⟨f, Tᵀu⟩` on random vectors.

    Args:
        T: a matrix (dense or sparse), a `LinearOperator`, or a pair of functions, of a vector of outputs and of one of
            measurements, the adjoint of each other.
        num_outputs: `n`, for a pair of functions.
        dtype: likewise.
    """
    if isinstance(T, Measurement):
        return T
    if isinstance(T, LinearOperator):
        return _Linear(T)
    if isinstance(T, Tensor):
        if T.dim() != 2:
            raise ValueError(f"`observe=T` needs a matrix [m, n], but got a tensor of shape {list(T.shape)}.")
        return _Matrix(T.detach() if T.layout in (torch.strided, torch.sparse_coo) else T.detach().to_sparse_coo())
    if not (isinstance(T, tuple) and len(T) == 2 and all(map(callable, T))):
        raise TypeError(
            "`observe=T` needs a matrix, a LinearOperator or a pair of functions (forward, adjoint), but got "
            f"{type(T).__name__}."
        )
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(num_outputs, generator=generator, dtype=torch.float64).to(dtype)
    forward = T[0](f).reshape(-1)
    u = torch.randn(len(forward), generator=generator, dtype=torch.float64).to(dtype)
    back = T[1](u).reshape(-1)
    if back.shape != f.shape:
        raise ValueError(
            f"`observe=(forward, adjoint)`: the adjoint of a vector [{len(u)}] has {len(back)} entries, but the "
            f"outputs have {num_outputs}."
        )
    left, right = float(forward.double() @ u.double()), float(f.double() @ back.double())
    size = float(forward.double().norm() * u.double().norm())
    if abs(left - right) > 1e3 * torch.finfo(dtype).eps * max(size, 1e-300):
        raise ValueError(
            f"`observe=(forward, adjoint)`: they are not adjoint, ⟨Tf, u⟩ = {left:.6g} but ⟨f, Tᵀu⟩ = {right:.6g} for "
            "random f and u; or the first is not linear."
        )
    return _Callables(T[0], T[1], (len(forward), num_outputs), dtype)


class ObservedFeatures(DerivedFeatures):
    """`TΦ`: the features of measurements of each datum, `[N, m, P]`."""

    def __init__(self, features: Features, measurement: Measurement) -> None:
        self.features, self.measurement = features, measurement
        self.num_data, self.num_outputs = features.num_data, measurement.shape[0]
        self.size, self.batch_size = features.size, features.batch_size

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        return self.measurement.apply(self.features.jvp(v, batch))

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp(self.measurement.adjoint(u), batch)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp_each(self.measurement.adjoint(u), batch)

    def rows(self, batch: Tensor) -> Tensor:
        # A VJP for each measurement: there may be far fewer than outputs.
        eye = torch.eye(self.num_outputs, dtype=self.dtype, device=self.device)
        return torch.stack([self.vjp(eye[:, None], datum) for datum in batch.split(1)])


class JointFeatures(DerivedFeatures):
    """All data as one, of `N·C` outputs: for measurements of all of them together."""

    def __init__(self, features: Features) -> None:
        self.features = features
        self.num_data, self.num_outputs = 1, features.num_data * features.num_outputs
        self.size, self.batch_size = features.size, 1

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        return self.features.outputs(v).flatten(1)[:, None].expand(-1, len(batch), -1)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        cotangents = u.sum(1).reshape(len(u), self.features.num_data, -1)
        parts = [self.features.vjp(cotangents[:, chunk], chunk) for chunk in self.features.chunks()]
        return torch.stack(parts).sum(0)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.vjp(u[:, None], batch[:1])

    def rows(self, batch: Tensor) -> Tensor:
        rows = torch.cat([self.features.rows(chunk) for chunk in self.features.chunks()])
        return rows.flatten(0, 1)[None].expand(len(batch), -1, -1)


def observe(
    model: LinearModel,
    T: "Measurement | Tensor | LinearOperator | tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]",
    targets: Tensor,
    *,
    joint: bool = False,
) -> LinearModel:
    r"""The linear model of measurements `T h(θ, x)`, in place of that of the outputs.

    Args:
        model: of the outputs; its targets are not used.
        T: see `as_measurement`; `[m, C]`, of the (flattened) outputs of a datum, or `[m, N·C]` if `joint`.
        targets: `y`, `[N, m]`, or `[m]` if `joint`.
        joint: whether `T` measures the outputs of all data together.

    Raises:
        ValueError: if `T` does not fit the outputs, or `targets` do not fit the measurements.
    """
    features = JointFeatures(model.features) if joint else model.features
    measurement = as_measurement(T, features.num_outputs, features.dtype)
    rows, columns = measurement.shape
    if columns != features.num_outputs:
        raise ValueError(
            f"`observe=T` has {columns} columns, but the model gives {features.num_outputs} outputs "
            f"{'for all data together' if joint else 'a datum'}."
        )
    shape = (features.num_data, rows)
    if targets.numel() != shape[0] * shape[1] or (not joint and len(targets) != shape[0]):
        raise ValueError(
            f"The targets must be measurements of shape {list(shape[1:] if joint else shape)}, but have shape "
            f"{list(targets.shape)}."
        )
    observed = ObservedFeatures(features, measurement)
    offset, outputs = (
        measurement.apply(f.reshape(features.num_data, -1)) for f in (model.offset, model.network_outputs)
    )
    return replace(
        model, features=observed, offset=offset, network_outputs=outputs, targets=targets.reshape(shape).to(offset)
    )


class WeightedFeatures(DerivedFeatures):
    """`R^{-1/2}Φ`, every row `φ_ic` by a weight of its own.

    Args:
        features: `Φ`.
        weights: `R^{-1/2}`, `[N, C]`.
    """

    def __init__(self, features: Features, weights: Float[Tensor, "N C"]) -> None:
        self.features, self.weights = features, weights.to(features.device, features.dtype)
        self.num_data, self.num_outputs = features.num_data, features.num_outputs
        self.size, self.batch_size = features.size, features.batch_size

    def jvp(self, v: Tensor, batch: Tensor) -> Tensor:
        return self.weights[batch] * self.features.jvp(v, batch)

    def vjp(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp(u * self.weights[batch], batch)

    def vjp_each(self, u: Tensor, batch: Tensor) -> Tensor:
        return self.features.vjp_each(u * self.weights[batch], batch)

    def rows(self, batch: Tensor) -> Tensor:
        return self.features.rows(batch) * self.weights[batch][..., None]


def noise_weights(noise_variances: Tensor, shape: tuple[int, int]) -> Float[Tensor, "N C"]:
    """`R^{-1/2}` of noise variances that are given for each datum, `[N]`, or each of its outputs, `[N, ...]`.

    Args:
        noise_variances: `R`, in the units of the targets squared, up to the common factor `1/b`.
        shape: `(N, C)`.

    Raises:
        ValueError: if they are of another shape, or not positive and finite.
    """
    given = torch.as_tensor(noise_variances).detach().double()  # lists and NumPy arrays will do
    if given.shape[:1] != shape[:1] or given.numel() not in (shape[0], shape[0] * shape[1]):
        raise ValueError(
            f"`noise_variances` must have one entry a datum, [{shape[0]}], or one an output, {list(shape)}, in the "
            f"order of the dataset, but have shape {list(given.shape)}."
        )
    if not bool((given > 0).all()) or not bool(given.isfinite().all()):
        raise ValueError("`noise_variances` must be positive and finite.")
    return given.reshape(shape[0], -1).expand(shape).rsqrt()


def weigh(model: LinearModel, weights: Float[Tensor, "N C"]) -> LinearModel:
    """The linear model of `R^{-1/2} y`, whose noise has the same variance for all data.

    Densities of the targets themselves are those of this model times `Π R^{-1/2}`.

    Args:
        model: of the targets.
        weights: `R^{-1/2}`, see `noise_weights`.
    """
    w = weights.to(model.offset)
    targets = model.targets.reshape(model.offset.shape).to(model.offset)
    return replace(
        model,
        features=WeightedFeatures(model.features, weights),
        offset=w * model.offset,
        network_outputs=w * model.network_outputs,
        targets=w * targets,
    )
