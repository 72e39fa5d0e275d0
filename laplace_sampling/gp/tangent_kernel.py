r"""The tangent kernel for GPyTorch: `k(x, x') = φ(x) A⁻¹ φ(x')ᵀ`, `φ(x) = ∂f/∂w` at the trained weights `w̄`.

Inputs are rows, `[…, N, D]`, as GPyTorch has them; `input_shape` says what a row is reshaped to for the network. A
network of `C` outputs gives `[…, N·C, M·C]`, the outputs of an input adjacent. Weights stay as they are: the network is
held outside the parameters of these modules, which do not move it between devices or dtypes.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.arguments import as_numbers, check_positive
from laplace_sampling.gp.linear_operators import IndexType, LinearOperator, gpytorch
from laplace_sampling.networks.consistency import check_consistency
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER

MEANS = ("network", "affine", "homogeneous")
_SINGLE = (gpytorch.likelihoods.GaussianLikelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood)


class TangentKernelOperator(LinearOperator):
    r"""`K = φ(X) diag(v) φ(X')ᵀ`, `[…, N·C, M·C]`, applied by one VJP at `X'` and one JVP at `X`; nothing is stored.

    It has gradients in `v`, `X` and `X'`. `to_dense` contracts the Jacobians in blocks.

    Args:
        variance: `v`, the prior variance of each weight, `[…, P]`; a batch of them gives a batch of matrices.
        x1: `X`, inputs as the network takes them, `[N, …]`.
        x2: `X'`, by default `X`.
        network: the linearised network.
    """

    def __init__(
        self, variance: Float[Tensor, "*B P"], *, x1: Tensor, x2: Tensor | None = None, network: Linearisation
    ) -> None:
        # A LinearOperator indexes the batch axes of its positional arguments with those of the matrix; keywords stay.
        super().__init__(variance, x1=x1, network=network, **({} if x2 is None else {"x2": x2}))
        self.variance, self.x1, self.x2, self.network = variance, x1, x1 if x2 is None else x2, network
        self.num_outputs = network(to_network(network, x1[:1])).numel()

    def _size(self) -> torch.Size:
        sizes = (len(self.x1) * self.num_outputs, len(self.x2) * self.num_outputs)
        return torch.Size([*self.variance.shape[:-1], *sizes])

    def _transpose_nonbatch(self) -> "TangentKernelOperator":
        if self.x2 is self.x1:
            return self
        return TangentKernelOperator(self.variance, x1=self.x2, x2=self.x1, network=self.network)

    def _graph(self, *tensors: Tensor) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.variance, *tensors))

    def _matmul(self, rhs: Float[Tensor, "*B MC K"]) -> Float[Tensor, "*B NC K"]:
        # Pullbacks do not work in inference mode, in which GPyTorch may predict.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._matmul(rhs.clone())
        columns = rhs[:, None] if rhs.dim() == 1 else rhs
        x1, x2 = to_network(self.network, self.x1), to_network(self.network, self.x2)
        # All columns of all batches are one stack of vectors, so that they share one forward pass.
        stack = columns.mT.reshape(-1, len(x2), self.num_outputs).to(x2.device, self.network.dtype)
        graph = self._graph(self.x1, self.x2, rhs)
        weights = self.network.vjp(x2, stack, graph=graph).reshape(*columns.mT.shape[:-1], -1)
        weights = weights * self.variance.to(weights)[..., None, :]
        product = self.network.jvp(x1, weights.reshape(-1, weights.shape[-1]), graph=graph).flatten(1)
        product = product.reshape(*weights.shape[:-1], -1).mT.to(rhs.device, self.dtype)
        return product[..., 0] if rhs.dim() == 1 else product.contiguous()

    def _rows(self, x: Tensor) -> Float[Tensor, "n P"]:
        return self.network.jacobian(to_network(self.network, x), graph=self._graph(x)).flatten(0, 1).to(self.variance)

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        return x.split(max(1, NUMBERS_TOGETHER // (self.num_outputs * self.network.num_parameters)))

    def to_dense(self) -> Float[Tensor, "*B NC MC"]:
        """The matrix, from blocks of rows of the Jacobian; those of `X'` are computed for each block of `X`."""
        blocks, row_pieces = [], self._pieces(self.x1)
        column_pieces = row_pieces if self.x2 is self.x1 else self._pieces(self.x2)
        for x in row_pieces:
            scaled = (jacobian := self._rows(x)) * self.variance[..., None, :]
            products = [scaled @ (jacobian if y is x else self._rows(y)).mT for y in column_pieces]
            blocks.append(torch.cat(products, dim=-1))
        return torch.cat(blocks, dim=-2)

    def _diagonal(self) -> Float[Tensor, "*B NC"]:
        parts = []
        for x, y in zip(self._pieces(self.x1), self._pieces(self.x2), strict=True):
            rows = self._rows(x)
            parts.append((rows * (rows if self.x2 is self.x1 else self._rows(y))) @ self.variance[..., None])
        return torch.cat(parts, dim=-2)[..., 0]

    def _get_indices(self, row_index: IndexType, col_index: IndexType, *batch_indices: IndexType) -> Tensor:
        assert isinstance(row_index, Tensor)
        assert isinstance(col_index, Tensor)
        # Only the data that the indices touch: a few entries of a large matrix take a small block of it.
        row_data, row_place = (row_index // self.num_outputs).unique(return_inverse=True)
        column_data, column_place = (col_index // self.num_outputs).unique(return_inverse=True)
        # Inputs may be where the network is, the matrix elsewhere.
        x1, x2 = self.x1[row_data.to(self.x1.device)], self.x2[column_data.to(self.x2.device)]
        part = TangentKernelOperator(self.variance, x1=x1, x2=x2, network=self.network)
        rows = row_place * self.num_outputs + row_index % self.num_outputs
        columns = column_place * self.num_outputs + col_index % self.num_outputs
        return part.to_dense()[cast(tuple[Tensor, ...], (*batch_indices, rows, columns))]


class TangentKernel(gpytorch.kernels.Kernel):
    r"""`k(x, x') = φ(x) diag(s²) φ(x')ᵀ / α`, alone or with other kernels, as in `TangentKernel(net) + RBFKernel()`.

    Its one hyperparameter is the prior precision `α`. The kernel keeps the matrix at `α = 1` of the last inputs without
    gradient, so that training `α` computes it once. It computes a new one when inputs, scale or network have changed.

    Kernels of several outputs go with multitask means and likelihoods, and are added to kernels of as many outputs:
    `TangentKernel(net) + MultitaskKernel(RBFKernel(), num_tasks=C)`.

    Args:
        network: a trained network, or its linearisation (for a choice of weights).
        scale: `s`, `[P]`, prior standard deviations at `α = 1`, by default one; such as `prior_scale_` of a fitted
            `LinearisedLaplace`.
        input_shape: the shape of one input of the network, if it is not a row.
        prior_precision: the start of `α`, a number or `[*batch_shape, 1]`.
        precision_prior: a GPyTorch prior of `α`.
        dense_size: the largest number of rows of a dense matrix. Larger ones are `TangentKernelOperator`s, except those
            of a batch of inputs, which are always dense.
        batch_shape: the shape of a batch of kernels, each with its own `α`, for inputs of this batch shape or one that
            broadcasts with it. They share the network and `s`.
        active_dims: the columns of the inputs that the network takes, by default all.

    Raises:
        ValueError: if `scale` does not have one entry for each weight, or `prior_precision` is not positive and finite.
    """

    def __init__(
        self,
        network: nn.Module | Linearisation,
        *,
        scale: Float[Tensor, " P"] | None = None,
        input_shape: Sequence[int] | None = None,
        prior_precision: float | Tensor = 1.0,
        precision_prior: Any = None,
        dense_size: int = 4000,
        batch_shape: Sequence[int] = (),
        active_dims: Sequence[int] | Tensor | None = None,
    ) -> None:
        super().__init__(batch_shape=torch.Size(batch_shape), active_dims=cast(Any, active_dims))
        if not isinstance(prior_precision, Tensor):
            check_positive("`prior_precision`", prior_precision)
        start = torch.as_tensor(prior_precision, dtype=torch.float64)
        if not bool(((start > 0) & start.isfinite()).all()):
            raise ValueError(f"`prior_precision` must be positive and finite, but is {prior_precision}.")
        self.network = network if isinstance(network, Linearisation) else Linearisation(network)
        size = self.network.num_parameters
        scale = None if scale is None else as_numbers("`scale`", scale)
        if scale is not None and scale.shape != (size,):
            raise ValueError(f"`scale` must have one entry a weight, [{size}], but has shape {list(scale.shape)}.")
        given = torch.ones(size, dtype=self.network.dtype) if scale is None else scale
        self.variance: Tensor
        self.register_buffer("variance", given.detach().to(self.network.device) ** 2)
        self.input_shape = _shape(input_shape)
        self.dense_size = dense_size
        self.register_parameter(
            "raw_prior_precision", nn.Parameter(torch.zeros(*self.batch_shape, 1).to(self.variance))
        )
        # The optimiser sees `log α`: a sensible `α` may lie anywhere in ten decades.
        positive = gpytorch.constraints.Positive(
            transform=torch.exp,  # pyright: ignore[reportArgumentType]
            inv_transform=torch.log,
        )
        self.register_constraint("raw_prior_precision", positive)
        if precision_prior is not None:
            self.register_prior("precision_prior", precision_prior, _prior_precision, _set_prior_precision)
        self.prior_precision = start
        # The matrix of the last inputs without gradient, and the tensors that it depends on.
        self._cached: tuple[tuple[Tensor, ...], Tensor] | None = None
        # And the rows of the Jacobian at the last inputs that all matrices of a batch had.
        self._kept_rows: tuple[Tensor, Tensor] | None = None
        self._num_outputs: int | None = None

    @property
    def prior_precision(self) -> Float[Tensor, "*B 1"]:
        """`α`, in units of the sum of losses over the data."""
        return self._positive.transform(cast(Tensor, self.raw_prior_precision))

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.variance.dtype, device=self.variance.device)
        self.initialize(raw_prior_precision=self._positive.inverse_transform(value))

    @property
    def _positive(self) -> Any:
        return self.raw_prior_precision_constraint

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """`C`."""
        if self._num_outputs is None:
            rows = x1.detach().reshape(-1, x1.shape[-1])[:2]
            # A sum of kernels asks with all columns, the kernel itself with those that are active.
            active = cast(Tensor | None, self.active_dims)
            rows = rows if active is None or rows.shape[1] == len(active) else rows.index_select(1, active)
            inputs = shape_inputs(self.network, rows, self.input_shape)
            with torch.inference_mode(False):
                check_consistency(self.network, inputs.clone())
            self._num_outputs = self.network(inputs[:1]).numel()
        return self._num_outputs

    def expand_batch(self, *sizes: Any) -> "TangentKernel":
        """Kernels of the same network and the same `α`, of a larger batch shape.

        Args:
            sizes: the batch shape, to which that of this kernel broadcasts.
        """
        shape = torch.Size(sizes if all(isinstance(size, int) for size in sizes) else sizes[0])
        return self if shape == self.batch_shape else self._batch_of(lambda alpha: alpha.expand(shape))

    def __getitem__(self, index: Any) -> "TangentKernel":
        """The kernels of some entries of the batch shape, of the same network."""
        return self._batch_of(lambda alpha: alpha[index]) if self.batch_shape else self

    def _batch_of(self, choose: Callable[[Tensor], Tensor]) -> "TangentKernel":
        """A kernel with other entries of `α`, `[*B]`."""
        # Those of GPyTorch copy the network, and take the first axes of all buffers for those of the batch.
        kept = {id(shared): shared for shared in (self.network, self._cached, self._kept_rows)}
        kernel, raw = copy.deepcopy(self, kept), cast(Tensor, self.raw_prior_precision)
        kernel.raw_prior_precision = nn.Parameter(choose(raw.detach()[..., 0])[..., None].clone(), raw.requires_grad)
        kernel.batch_shape = kernel.raw_prior_precision.shape[:-1]
        return kernel

    def forward(
        self, x1: Tensor, x2: Tensor, diag: bool = False, last_dim_is_batch: bool = False, **params: Any
    ) -> Tensor | LinearOperator:
        """The matrix of `x1`, `[…, N, D]`, and `x2`, `[…, M, D]`, or its diagonal."""
        if last_dim_is_batch:
            raise NotImplementedError("A TangentKernel has no batches of input dimensions; use it without them.")
        if torch.is_inference_mode_enabled():
            # Jacobians cannot be taken there, and a matrix made there could not be differentiated later.
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(x1, x2, diag=diag)
        x1, x2 = (x.clone() if x.is_inference() else x for x in (x1, x2))
        alpha = self.prior_precision.to(x1.device)
        if diag:
            return self._of_inputs(x1, x2, diag=True) / alpha
        rows = max(x1.shape[-2], x2.shape[-2]) * self.num_outputs_per_input(x1, x2)
        if rows > self.dense_size and x1.dim() == x2.dim() == 2:
            operator = self._operator(x1, x2)
            return operator.expand(*self.batch_shape, *operator.shape) * (1 / alpha)[..., None]
        return self._dense(x1, x2) / alpha[..., None]

    def _dense(self, x1: Tensor, x2: Tensor) -> Tensor:
        if x1.requires_grad or x2.requires_grad:
            return self._of_inputs(x1, x2)
        # The matrix at `α = 1` does not depend on the hyperparameter: training computes it once, not once a step.
        key = (self.variance, x1, x2)
        if self._cached is None or not all(_equal(a, b) for a, b in zip(self._cached[0], key, strict=True)):
            with torch.no_grad():
                self._cached = tuple(t.clone() for t in key), self._of_inputs(x1, x2)
        return self._cached[1]

    def _of_inputs(self, x1: Tensor, x2: Tensor, diag: bool = False) -> Tensor:
        """The matrix at `α = 1`, or its diagonal."""
        shape = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
        if not shape:
            operator = self._operator(x1, x2)
            return operator.diagonal() if diag else operator.to_dense()
        # A network has one batch axis: the inputs of several matrices go through it as one batch.
        pairs = [x.expand(*shape, *x.shape[-2:]).flatten(0, -3) for x in (x1, x2)]
        numbers = max(x1.shape[-2], x2.shape[-2]) * self.num_outputs_per_input(x1, x2) * self.network.num_parameters
        if numbers > NUMBERS_TOGETHER:
            return torch.stack([self._of_inputs(a, b, diag) for a, b in zip(*pairs, strict=True)]).unflatten(0, shape)
        parts, variance = [], self._variance(x1)
        for a, b in zip(*(x.split(NUMBERS_TOGETHER // numbers) for x in pairs), strict=True):
            rows = self._rows(a)
            scaled, others = rows * variance, rows if self._same(a, b) else self._rows(b)
            parts.append((scaled * others).sum(-1) if diag else scaled @ others.mT)
        return torch.cat(parts).unflatten(0, shape)

    def _rows(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B NC P"]:
        """The Jacobian at the inputs of several matrices."""
        if not x.requires_grad and bool((x == x[:1]).all()):
            # The observations, which optimisers of acquisition functions pass with every batch of candidates.
            if self._kept_rows is None or not _equal(self._kept_rows[0], x[0]):
                with torch.no_grad():
                    self._kept_rows = x[0].clone(), self._compute_rows(x[:1])
            return self._kept_rows[1].expand(len(x), -1, -1)
        return self._compute_rows(x)

    def _compute_rows(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B NC P"]:
        inputs = shape_inputs(self.network, x.flatten(0, 1), self.input_shape)
        graph = torch.is_grad_enabled() and x.requires_grad
        rows = self.network.jacobian(inputs, graph=graph).to(self._variance(x))
        return rows.reshape(len(x), -1, rows.shape[-1])

    def _operator(self, x1: Tensor, x2: Tensor) -> TangentKernelOperator:
        inputs = [shape_inputs(self.network, x, self.input_shape) for x in (x1, x2)]
        x2_or_none = None if self._same(x1, x2) else inputs[1]
        return TangentKernelOperator(self._variance(x1), x1=inputs[0], x2=x2_or_none, network=self.network)

    def _same(self, x1: Tensor, x2: Tensor) -> bool:
        """Whether one Jacobian serves both; inputs with gradients stay apart, for their gradients differ."""
        return x1 is x2 or (not x1.requires_grad and not x2.requires_grad and _equal(x1, x2))

    def _variance(self, x: Tensor) -> Float[Tensor, " P"]:
        """Where the inputs are, as matrices of GPyTorch's kernels are; the network may be elsewhere."""
        return self.variance.to(x.device, x.dtype if x.is_floating_point() else None)


def _prior_precision(kernel: Any) -> Tensor:
    return kernel.prior_precision


def _set_prior_precision(kernel: Any, value: float | Tensor) -> None:
    kernel.prior_precision = value


class NetworkMean(gpytorch.means.Mean):
    r"""The prior mean of a tangent Gaussian process, for inputs `[…, N, D]`.

    - `"network"`: `f(w̄, x)`: the prior is around the trained weights, and the data correct the network.
    - `"affine"`: `f(w̄, x) − φ(x) w̄`, the prior mean of the linearised Laplace approximation: the marginal likelihood
      is its evidence, and the posterior mean is near the network's output where that is a mode.
    - `"homogeneous"`: zero.

    Args:
        network: a trained network, or its linearisation.
        kind: one of these names.
        input_shape: the shape of one input of the network, if it is not a row.
        active_dims: the columns of the inputs that the network takes, by default all.
    """

    def __init__(
        self,
        network: nn.Module | Linearisation,
        kind: str = "network",
        *,
        input_shape: Sequence[int] | None = None,
        active_dims: Sequence[int] | Tensor | None = None,
    ) -> None:
        super().__init__()
        if kind not in MEANS:
            raise ValueError(f"`NetworkMean(kind={kind!r})` is not known; use one of {list(MEANS)}.")
        self.network = network if isinstance(network, Linearisation) else Linearisation(network)
        self.kind = kind
        self.input_shape = _shape(input_shape)
        self.active_dims = None if active_dims is None else torch.as_tensor(active_dims).tolist()

    def forward(self, x: Tensor) -> Tensor:
        """`[…, N]`, or `[…, N, C]` for several outputs."""
        rows = x if self.active_dims is None else x[..., self.active_dims]
        flat = shape_inputs(self.network, rows.reshape(-1, rows.shape[-1]), self.input_shape)
        graph = torch.is_grad_enabled() and x.requires_grad
        mean = self.network(flat, graph=graph).reshape(len(flat), -1)
        if self.kind == "affine":
            mean = mean - self.network.jvp(flat, self.network.weights[None], graph=graph)[0]
        elif self.kind == "homogeneous":
            mean = torch.zeros_like(mean)
        mean = mean.to(x.device, x.dtype if x.is_floating_point() else None)
        return mean.reshape(x.shape[:-1] if mean.shape[1] == 1 else (*x.shape[:-1], mean.shape[1]))


class TangentGP(gpytorch.models.ExactGP):
    r"""Exact Gaussian process with the tangent kernel of a network and a mean from it, trained as any of GPyTorch's.

    Args:
        train_x: inputs, `[N, D]`.
        train_y: targets, `[N]`, or `[N, C]` for several outputs.
        likelihood: `GaussianLikelihood`, or `MultitaskGaussianLikelihood` for several outputs.
        network: a trained network, or its linearisation.
        mean: `"network"`, `"affine"` or `"homogeneous"` (`NetworkMean`).
        kernel: by default `TangentKernel(network, ...)`; or another kernel that contains one.
        options: further arguments of `TangentKernel`. With a `kernel` only `input_shape` and `active_dims`, for the
            mean.

    Raises:
        ValueError: if targets, likelihood or kernel do not have as many outputs as the network, or for other options
            beside a kernel.
    """

    def __init__(
        self,
        train_x: Float[Tensor, "N D"],
        train_y: Float[Tensor, "N *C"],
        likelihood: Any,
        network: nn.Module | Linearisation,
        *,
        mean: str = "network",
        kernel: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(train_x, train_y, likelihood)
        of_mean = {name: options[name] for name in ("input_shape", "active_dims") if name in options}
        unused = sorted(options.keys() - of_mean.keys())
        if kernel is not None and unused:
            raise ValueError(
                f"`TangentGP(kernel=...)` was also given {unused}, which are options of a TangentKernel that is made "
                "here: give them to the TangentKernel in your kernel."
            )
        # One linearisation for mean and kernel, so that both see the same weights.
        linearised = network if isinstance(network, Linearisation) else Linearisation(network)
        self.mean_module = NetworkMean(linearised, mean, **of_mean)
        self.covar_module = TangentKernel(linearised, **options) if kernel is None else kernel
        # Models for predictions from a state dict may be made without data.
        if self.train_inputs is not None:
            self._check_outputs()

    def _check_outputs(self) -> None:
        """Raise if targets, likelihood or kernel do not have the outputs of the network."""
        (x,) = cast(tuple[Tensor], self.train_inputs)
        y = cast(Tensor, self.train_targets)
        with torch.no_grad():
            tasks = cast(Tensor, self.mean_module(x[..., :1, :])).shape[x.dim() - 1 :]
        shape = (*x.shape[:-1], *tasks)
        C = tasks.numel()
        if y.shape != shape:
            raise ValueError(
                f"`TangentGP` with a network of {_outputs(C)} needs `train_y` of shape {list(shape)}, "
                f"but got {list(y.shape)}."
            )
        self._check_likelihood(C)
        if (size := self.covar_module(x[..., :1, :]).shape[-1]) != C:
            raise ValueError(
                f"`TangentGP` with a network of {_outputs(C)} needs a kernel of as many, but "
                f"{type(self.covar_module).__name__} is of {size}."
            )

    def _check_likelihood(self, C: int) -> None:
        tasks = getattr(self.likelihood, "num_tasks", 1 if isinstance(self.likelihood, _SINGLE) else C)
        if tasks != C or (C == 1 and hasattr(self.likelihood, "num_tasks")):
            needed = "GaussianLikelihood()" if C == 1 else f"MultitaskGaussianLikelihood(num_tasks={C})"
            raise ValueError(
                f"`TangentGP` with a network of {_outputs(C)} needs a likelihood of as many, as `{needed}`, but got a "
                f"{type(self.likelihood).__name__} of {tasks}."
            )

    def forward(self, x: Float[Tensor, "*B N D"]) -> gpytorch.distributions.MultivariateNormal:
        """The prior at some inputs."""
        mean, covariance = cast(Tensor, self.mean_module(x)), self.covar_module(x)
        if mean.dim() == x.dim():
            return gpytorch.distributions.MultitaskMultivariateNormal(mean, covariance)
        return gpytorch.distributions.MultivariateNormal(mean, covariance)


def _shape(input_shape: Any) -> tuple[int, ...] | None:
    if input_shape is None:
        return None
    if not isinstance(input_shape, Sequence) or not all(isinstance(length, int) for length in input_shape):
        raise ValueError(f"`input_shape` must be whole numbers, but is {input_shape!r:.80}.")
    return tuple(input_shape)


def _outputs(count: int) -> str:
    return "one output" if count == 1 else f"{count} outputs"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def shape_inputs(network: Linearisation, x: Float[Tensor, "N D"], input_shape: Sequence[int] | None) -> Tensor:
    """Rows as the network takes them."""
    if input_shape is not None and math.prod(input_shape) != x.shape[-1]:
        raise ValueError(f"`input_shape={input_shape!r}` is not that of rows of {x.shape[-1]} numbers.")
    return to_network(network, x if input_shape is None else x.reshape(-1, *input_shape))


def to_network(network: Linearisation, x: Tensor) -> Tensor:
    """Inputs where the network is, and in its dtype."""
    return x.to(network.device, network.dtype if x.is_floating_point() else None)
