r"""The tangent kernel for GPyTorch: `k(x, x') = φ(x) A⁻¹ φ(x')ᵀ`, `φ(x) = ∂f/∂w` at the trained weights `w̄`.

Inputs are rows, `[…, N, D]`, as GPyTorch has them; `input_shape` says what a row is reshaped to for the network. A
network of `C` outputs gives `[…, N·C, M·C]`, the outputs of an input adjacent. Weights stay as they are: the network is
held outside the parameters of these modules, which do not move it between devices or dtypes.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.gp.linear_operators import IndexType, LinearOperator, gpytorch, to_dense
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.checks import as_numbers, check_positive

__all__ = ["NetworkMean", "TangentGP", "TangentKernel", "TangentKernelOperator"]

# Numbers of a block of rows of the Jacobian: a definition, 128 MiB in float32.
_BLOCK = 2**25
_MEANS = ("network", "affine", "homogeneous")
_SINGLE = (gpytorch.likelihoods.GaussianLikelihood, gpytorch.likelihoods.FixedNoiseGaussianLikelihood)
_COMBINED = (gpytorch.kernels.AdditiveKernel, gpytorch.kernels.ProductKernel)


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
        self.num_outputs = network(self._inputs(x1[:1])).numel()

    def _size(self) -> torch.Size:
        sizes = (len(self.x1) * self.num_outputs, len(self.x2) * self.num_outputs)
        return torch.Size([*self.variance.shape[:-1], *sizes])

    def _transpose_nonbatch(self) -> "TangentKernelOperator":
        if self.x2 is self.x1:
            return self
        return TangentKernelOperator(self.variance, x1=self.x2, x2=self.x1, network=self.network)

    def _graph(self, *tensors: Tensor) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.variance, *tensors))

    def _inputs(self, x: Tensor) -> Tensor:
        return x.to(self.network.dtype) if x.is_floating_point() else x

    def _matmul(self, rhs: Float[Tensor, "*B MC K"]) -> Float[Tensor, "*B NC K"]:
        # Pullbacks do not work in inference mode, in which GPyTorch may predict.
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return self._matmul(rhs.clone())
        columns = rhs[:, None] if rhs.dim() == 1 else rhs
        x1, x2 = self._inputs(self.x1), self._inputs(self.x2)
        # All columns of all batches are one stack of vectors, so that they share one forward pass.
        stack = columns.mT.reshape(-1, len(x2), self.num_outputs).to(self.network.dtype)
        graph = self._graph(self.x1, self.x2, rhs)
        weights = self.network.vjp(x2, stack, graph=graph).reshape(*columns.mT.shape[:-1], -1)
        weights = weights * self.variance.to(weights.dtype)[..., None, :]
        product = self.network.jvp(x1, weights.reshape(-1, weights.shape[-1]), graph=graph).flatten(1)
        product = product.reshape(*weights.shape[:-1], -1).mT.to(self.dtype)
        return product[..., 0] if rhs.dim() == 1 else product.contiguous()

    def _rows(self, x: Tensor) -> Float[Tensor, "n P"]:
        return self.network.jacobian(self._inputs(x), graph=self._graph(x)).flatten(0, 1).to(self.dtype)

    def _pieces(self, x: Tensor) -> Sequence[Tensor]:
        return x.split(max(1, _BLOCK // (self.num_outputs * self.network.num_parameters)))

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
        part = TangentKernelOperator(self.variance, x1=self.x1[row_data], x2=self.x2[column_data], network=self.network)
        rows = row_place * self.num_outputs + row_index % self.num_outputs
        columns = column_place * self.num_outputs + col_index % self.num_outputs
        return part.to_dense()[cast(tuple[Tensor, ...], (*batch_indices, rows, columns))]


class TangentKernel(gpytorch.kernels.Kernel):
    r"""`k(x, x') = φ(x) diag(s²) φ(x')ᵀ / α`, alone or with other kernels, as in `TangentKernel(net) + RBFKernel()`.

    Its one hyperparameter is the prior precision `α`. The matrix at `α = 1` of the last inputs without gradient is
    kept, so that training `α` needs it once; it is made anew when the inputs, the scale or the network have changed.

    Kernels of several outputs go with multitask means and likelihoods, and are added to kernels of as many outputs:
    `TangentKernel(net) + MultitaskKernel(RBFKernel(), num_tasks=C)`.

    Args:
        network: a trained network, or its linearisation (for a choice of weights).
        scale: `s`, `[P]`, prior standard deviations at `α = 1`, by default one; `prior_scale_` of a fitted
            `LinearisedLaplace`.
        input_shape: of one input, where it is not the row itself.
        prior_precision: where `α` starts.
        precision_prior: a GPyTorch prior of `α`.
        dense_size: matrices of up to so many rows are made dense, others are `TangentKernelOperator`s.
    """

    def __init__(
        self,
        network: nn.Module | Linearisation,
        *,
        scale: Float[Tensor, " P"] | None = None,
        input_shape: Sequence[int] | None = None,
        prior_precision: float = 1.0,
        precision_prior: Any = None,
        dense_size: int = 4000,
    ) -> None:
        super().__init__()
        check_positive("`prior_precision`", prior_precision)
        self.network = network if isinstance(network, Linearisation) else Linearisation(network)
        size = self.network.num_parameters
        scale = None if scale is None else as_numbers("`scale`", scale)
        if scale is not None and scale.shape != (size,):
            raise ValueError(f"`scale` must have one entry a weight, [{size}], but has shape {list(scale.shape)}.")
        given = torch.ones(size, dtype=self.network.dtype) if scale is None else scale
        self.variance: Tensor
        self.register_buffer("variance", given.detach().to(self.network.device) ** 2)
        self.input_shape = None if input_shape is None else tuple(input_shape)
        self.dense_size = dense_size
        self.register_parameter("raw_prior_precision", nn.Parameter(torch.zeros(1).to(self.variance)))
        # The optimiser sees `log α`: a sensible `α` may lie anywhere in ten decades.
        positive = gpytorch.constraints.Positive(
            transform=torch.exp,  # pyright: ignore[reportArgumentType]
            inv_transform=torch.log,
        )
        self.register_constraint("raw_prior_precision", positive)
        if precision_prior is not None:
            self.register_prior(
                "precision_prior",
                precision_prior,
                lambda module: module.prior_precision,
                lambda module, value: setattr(module, "prior_precision", value),
            )
        self.prior_precision = prior_precision
        # The matrix of the last inputs without gradient, and the tensors that it depends on.
        self._cached: tuple[tuple[Tensor, ...], Tensor] | None = None
        self._num_outputs: int | None = None

    @property
    def prior_precision(self) -> Float[Tensor, " 1"]:
        """`α`, in units of the sum of losses over the data."""
        return self._positive.transform(cast(Tensor, self.raw_prior_precision))

    @prior_precision.setter
    def prior_precision(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value).to(self.variance).reshape(1)
        self.initialize(raw_prior_precision=self._positive.inverse_transform(value))

    @property
    def _positive(self) -> Any:
        return self.raw_prior_precision_constraint

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """`C`."""
        if self._num_outputs is None:
            row = x1.detach().reshape(-1, x1.shape[-1])[:1]
            self._num_outputs = self.network(shape_inputs(self.network, row, self.input_shape)).numel()
        return self._num_outputs

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
        alpha = self.prior_precision
        # A network has one batch axis: the pairs of a batch of inputs are matrices one after the other.
        if x1.dim() > 2 or x2.dim() > 2:
            shape = torch.broadcast_shapes(x1.shape[:-2], x2.shape[:-2])
            pairs = zip(*(x.expand(*shape, *x.shape[-2:]).flatten(0, -3) for x in (x1, x2)), strict=True)
            parts = [to_dense(self.forward(a, b, diag=diag)) for a, b in pairs]
            return torch.stack(parts).unflatten(0, shape)
        operator = self._operator(x1, x2)
        if diag:
            return operator.diagonal() / alpha
        if max(operator.shape) > self.dense_size:
            return operator * (1 / alpha)
        return self._dense(operator, x1, x2) / alpha

    def _operator(self, x1: Tensor, x2: Tensor) -> TangentKernelOperator:
        inputs = [shape_inputs(self.network, x, self.input_shape) for x in (x1, x2)]
        # Equal inputs need one Jacobian in place of two. Inputs with gradients stay apart: their gradients differ.
        same = x1 is x2 or (x1.shape == x2.shape and not x1.requires_grad and not x2.requires_grad and x1.equal(x2))
        variance = self.variance.to(x1.dtype)
        return TangentKernelOperator(variance, x1=inputs[0], x2=None if same else inputs[1], network=self.network)

    def _dense(self, operator: TangentKernelOperator, x1: Tensor, x2: Tensor) -> Tensor:
        if x1.requires_grad or x2.requires_grad:
            return operator.to_dense()
        # The matrix at `α = 1` does not depend on the hyperparameter: training computes it once, not once a step.
        key = (self.network.fingerprint(), self.variance, x1, x2)
        if self._cached is None or not all(_equal(a, b) for a, b in zip(self._cached[0], key, strict=True)):
            with torch.no_grad():
                self._cached = tuple(t.clone() for t in key), operator.to_dense()
        return self._cached[1]


class NetworkMean(gpytorch.means.Mean):
    r"""The prior mean of a tangent Gaussian process, of inputs `[…, N, D]`.

    - `"network"`: `f(w̄, x)`: the prior is around the trained weights, and the data correct the network.
    - `"affine"`: `f(w̄, x) − φ(x) w̄`, the prior mean of the linearised Laplace approximation: the marginal likelihood is
      its evidence, and the posterior mean is near the network's output where that is a mode.
    - `"homogeneous"`: zero.

    Args:
        network: a trained network, or its linearisation.
        kind: one of these.
        input_shape: of one input, where it is not the row itself.
    """

    def __init__(
        self, network: nn.Module | Linearisation, kind: str = "network", *, input_shape: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        if kind not in _MEANS:
            raise ValueError(f"`NetworkMean(kind={kind!r})` is not known; use one of {list(_MEANS)}.")
        self.network = network if isinstance(network, Linearisation) else Linearisation(network)
        self.kind = kind
        self.input_shape = None if input_shape is None else tuple(input_shape)

    def forward(self, x: Tensor) -> Tensor:
        """`[…, N]`, or `[…, N, C]` for several outputs."""
        flat = shape_inputs(self.network, x.reshape(-1, x.shape[-1]), self.input_shape)
        graph = torch.is_grad_enabled() and x.requires_grad
        mean = self.network(flat, graph=graph).reshape(len(flat), -1)
        if self.kind == "affine":
            mean = mean - self.network.jvp(flat, self.network.weights[None], graph=graph)[0]
        elif self.kind == "homogeneous":
            mean = torch.zeros_like(mean)
        mean = mean.to(x.dtype) if x.is_floating_point() else mean
        return mean.reshape(x.shape[:-1] if mean.shape[1] == 1 else (*x.shape[:-1], mean.shape[1]))


class TangentGP(gpytorch.models.ExactGP):
    r"""Exact Gaussian process with the tangent kernel of a network, and a mean of it; trained as any of GPyTorch's.

    Args:
        train_x: inputs, `[N, D]`.
        train_y: targets, `[N]`, or `[N, C]` for several outputs.
        likelihood: `GaussianLikelihood`, or `MultitaskGaussianLikelihood` for several outputs.
        network: a trained network, or its linearisation.
        mean: `"network"`, `"affine"` or `"homogeneous"`, see `NetworkMean`.
        kernel: by default `TangentKernel(network, ...)`; another with it as a part, or of it.
        options: of `TangentKernel`; with a `kernel`, which has its own, only `input_shape`, for the mean.

    Raises:
        ValueError: if targets, likelihood or kernel are not of as many outputs as the network has, or if there are
            options beside a kernel.
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
        unused = sorted(set(options) - {"input_shape"})
        if kernel is not None and unused:
            raise ValueError(
                f"`TangentGP(kernel=...)` was also given {unused}, which are options of a TangentKernel that is made "
                "here: give them to the TangentKernel in your kernel."
            )
        # One linearisation for mean and kernel, so that both see the same weights.
        linearised = network if isinstance(network, Linearisation) else Linearisation(network)
        self.mean_module = NetworkMean(linearised, mean, input_shape=options.get("input_shape"))
        self.covar_module = TangentKernel(linearised, **options) if kernel is None else kernel
        self._fingerprint = linearised.fingerprint()
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
        self._check_kernel(C, x)

    def _check_likelihood(self, C: int) -> None:
        tasks = getattr(self.likelihood, "num_tasks", 1 if isinstance(self.likelihood, _SINGLE) else C)
        if tasks != C or (C == 1 and hasattr(self.likelihood, "num_tasks")):
            needed = "GaussianLikelihood()" if C == 1 else f"MultitaskGaussianLikelihood(num_tasks={C})"
            raise ValueError(
                f"`TangentGP` with a network of {_outputs(C)} needs a likelihood of as many, as `{needed}`, but got a "
                f"{type(self.likelihood).__name__} of {tasks}."
            )

    def _check_kernel(self, C: int, x: Tensor) -> None:
        """Raise if the kernel is not of `C` outputs, or adds or multiplies kernels of different numbers of outputs."""
        groups = [[self.covar_module], *(k.kernels for k in self.covar_module.modules() if isinstance(k, _COMBINED))]
        for position, kernels in enumerate(cast(list[list[Any]], groups)):
            sizes = [kernel.num_outputs_per_input(x, x) for kernel in kernels]
            wanted = C if position == 0 else max(sizes)
            for kernel, size in zip(kernels, sizes, strict=True):
                if size != wanted:
                    raise ValueError(
                        f"`TangentGP` with a network of {_outputs(C)}: its kernel must be of {_outputs(wanted)} here, "
                        f"but {type(kernel).__name__} is of {size}; `MultitaskKernel(kernel, num_tasks={C})` is not."
                    )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The prior in training, the posterior in evaluation, see `gpytorch.models.ExactGP`."""
        network = cast(NetworkMean, self.mean_module).network
        fingerprint = network.fingerprint()
        if not torch.equal(self._fingerprint, fingerprint):
            # GPyTorch's cache for predictions is that of the weights as they were.
            self._clear_cache()
            self._fingerprint = fingerprint
        return super().__call__(*args, **kwargs)

    def forward(self, x: Float[Tensor, "*B N D"]) -> gpytorch.distributions.MultivariateNormal:
        """The prior at some inputs."""
        mean, covariance = cast(Tensor, self.mean_module(x)), self.covar_module(x)
        if mean.dim() == x.dim():
            return gpytorch.distributions.MultitaskMultivariateNormal(mean, covariance)
        return gpytorch.distributions.MultivariateNormal(mean, covariance)


def _outputs(count: int) -> str:
    return "one output" if count == 1 else f"{count} outputs"


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def shape_inputs(network: Linearisation, x: Float[Tensor, "N D"], input_shape: Sequence[int] | None) -> Tensor:
    """Rows as the network takes them."""
    x = x if input_shape is None else x.reshape(-1, *input_shape)
    return x.to(network.dtype) if x.is_floating_point() else x
