"""The posterior as functions of the input: samples that autograd differentiates, and programs that call the network.

A program `T(f)` computes a tensor with the network as a function `f(x)`: a derivative, a sum, an integral. Its first
derivative in the weights, `∂T/∂w` at `w̄`, is one row of features for each number of `T`, as the Jacobian is for
the outputs. So the covariance of a program is `∂T/∂w H⁻¹ (∂T/∂w)ᵀ`, and its samples are `T + ∂T/∂w ζ_k`. Where `T` is
linear in `f`, these are the numbers that the program computes of the functions `f(w̄, x) + φ(x) ζ_k`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from laplace_sampling.data.batches import as_tensors, flattened, place, take
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import DenseFeatures, in_float64_at
from laplace_sampling.methods.method import Fit
from laplace_sampling.networks.derivatives import differentiable
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.memory import TensorBytes
from laplace_sampling.networks.products import push_by_two_pullbacks
from laplace_sampling.networks.solving import solving
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import covariance_of
from laplace_sampling.predictions.function_covariance import OnRequest
from laplace_sampling.predictions.prediction import RegressionPrediction
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER

# What a program gets, and what it is.
Function = Callable[..., Any]
Program = Callable[[Function], Tensor]


def _inputs(network: Linearisation, x: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The arguments of a call as inputs of the network: `f(x)`, `f(a, b)` and `f(a=a, b=b)`."""
    given = named or (x[0] if len(x) == 1 else x)
    return place(as_tensors(given), network.device, network.dtype)


@contextmanager
def _derivatives(network: Linearisation) -> Iterator[None]:
    """Inside, what calls the network has derivatives of any order."""
    with differentiable(True), network.differentiating():
        yield


def _float64_copy(network: Linearisation) -> Linearisation:
    try:
        return network.in_float64()
    except Exception:  # some networks cannot be copied
        return network


class Functions:
    """Posterior samples as functions of the input, from `LinearisedLaplace.functions`.

    `functions(x)`, `[K, N, ...]`, is what `predict(x).samples` would be, and autograd differentiates it in `x` any
    number of times.

    Attributes:
        samples: `ζ`, `[K, P]`.
    """

    def __init__(self, network: Linearisation, posterior: Posterior, num_samples: int | None) -> None:
        calibration = posterior.calibration
        self._network, self._temperature = network, calibration.temperature
        self.samples = posterior.samples[:num_samples]
        self._factor = math.sqrt(calibration.scale) / calibration.temperature

    def __call__(self, *x: Any, **named: Any) -> Any:
        """`f(w̄, x) + φ(x) ζ_k`, `[K, N, ...]`: row `k` is one function; of several heads a dictionary of these.

        Args:
            x: inputs as `predict` takes them, `[N, ...]`, or the arguments of the model one by one.
            named: keyword arguments of the model.

        Raises:
            ValueError: if weights that the fit shares with the model have changed since.
        """
        network, graph = self._network, torch.is_grad_enabled()
        network.shell.check("functions")
        inputs = _inputs(network, x, named)
        with solving(), _derivatives(network):
            with network.shell.explained(inputs):
                outputs, layout = network.shell.with_layout(network.shell.random(), inputs)
            deviations = network.jvp(inputs, self.samples, graph=True).reshape(len(self.samples), *outputs.shape)
            functions = outputs / self._temperature + self._factor * deviations
        functions = functions if graph else functions.detach()
        return layout.split(flattened(functions, 2)) if layout.names else functions


class _WithGraph(TorchFunctionMode):
    """`torch.autograd.grad` keeps the graph: what a program differentiates in `x` has to have derivatives in `w`."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.autograd.grad:
            kwargs["create_graph"] = True
        return func(*args, **kwargs)


class _Run(DenseFeatures):
    """`∂T/∂w` of one run of a program, whose graph stays: `[N, C, P]` by a pullback for each row.

    Args:
        network: the linearised network.
        program: `T`.
        temperature: divides the outputs.
        precise: whether the network computes in float64 where it can.

    Attributes:
        value: `T(f)`, with its graph; a single number as `[1]`.
    """

    def __init__(self, network: Linearisation, program: Program, temperature: float, precise: bool) -> None:
        if not callable(program):
            raise TypeError(
                "`propagate(program)` takes a function of the network `f`, such as `lambda f: f(x).sum()`, but got a "
                f"{type(program).__name__}."
            )
        dtype, other = network.dtype, _float64_copy(network) if precise else network
        # Leaves are made outside of the transforms of `torch.func` that a program may call `f` in.
        leaves = {of: of.shell.leaves() for of in (network, other)}
        self._network, called = other, False

        def f(*x: Any, **named: Any) -> Any:
            nonlocal called
            inputs = _inputs(network, x, named)
            if not called and other is not network:
                self._network = in_float64_at(network, take(inputs, slice(1)), other)
            called, shell = True, self._network.shell
            inputs = place(inputs, shell.device, shell.dtype)
            with shell.explained(inputs):
                outputs, layout = shell.with_layout(leaves[self._network], inputs)
            outputs = outputs.to(dtype) / temperature
            return layout.split(flattened(outputs)) if layout.names else outputs

        with torch.enable_grad(), _derivatives(network), TensorBytes() as made, _WithGraph():
            value = program(f)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"`propagate(program)`: `program(f)` must return a tensor of real numbers in floating point, but "
                f"returned {found}. Join several by `torch.cat`."
            )
        if not value.requires_grad or not called:
            raise ValueError(
                "`propagate(program)`: what `program(f)` returns does not depend on `f` by operations that torch "
                "differentiates. Call `f(x)` inside, without `torch.no_grad()`, `detach()` and numbers that leave "
                "torch, and take derivatives by `torch.autograd.grad` or `torch.func`, not by `backward()`."
            )
        self._leaves = leaves[self._network]
        self.value, self._largest = value if value.dim() else value[None], max(made.sizes, default=0)
        self.num_data, self.num_outputs = len(self.value), self.value.shape[1:].numel()
        self.size, self.batch_size = network.num_parameters, max(1, self.num_data)

    @property
    def device(self) -> torch.device:
        return self._network.device

    @property
    def dtype(self) -> torch.dtype:
        return self._network.dtype

    def rows(self, batch: Tensor) -> Float[Tensor, "n C P"]:
        places = (batch[:, None] * self.num_outputs + torch.arange(self.num_outputs)).flatten()
        size = sum(self._network.shell.sizes)
        rows = torch.empty(len(places), size, dtype=self.dtype, device=self.device)
        most = max(1, NUMBERS_TOGETHER // max(1, self.num_observations))
        with _derivatives(self._network):
            for some, into in zip(places.split(most), rows.split(most), strict=True):
                units = torch.zeros(len(some), self.num_observations).scatter_(1, some[:, None], 1)
                units = units.to(self.value).reshape(-1, *self.value.shape)
                pulled = self._network.ways.pull(self.value, list(self._leaves.values()), units, self._largest)
                self._network.shell.write(pulled, into)
        return self._network.of_gradients(rows).reshape(len(batch), self.num_outputs, -1)

    def deviations(self, v: Float[Tensor, "K P"]) -> Float[Tensor, "K N *C"]:
        """`∂T/∂w v_k` by as many pullbacks as there are rows, or two for each vector."""
        if not self.num_observations:
            return self.value.detach().expand(len(v), *self.value.shape)
        v = v.to(self.dtype)
        if self.num_observations <= len(v):
            product = self.jvp(v, torch.arange(self.num_data))
        else:
            tangents = {name: t.to(self._leaves[name].dtype) for name, t in self._network.unflatten(v).items()}
            with _derivatives(self._network):
                product = push_by_two_pullbacks(self.value, self._leaves, tangents)
        return product.detach().to(self.value).reshape(-1, *self.value.shape)


def propagate(
    network: Linearisation,
    posterior: Posterior,
    fit: Fit | None,
    program: Program,
    num_samples: int,
    seed: int,
    samples: Callable[[], Float[Tensor, "K P"]],
    check: Callable[[], None],
) -> RegressionPrediction:
    """The prediction of what a program computes with the network.

    Args:
        network: the linearised network.
        posterior: what was fitted.
        fit: with the training data, where these are at hand.
        program: `T`.
        num_samples: use only the first so many of the samples.
        seed: of draws.
        samples: draws the samples of the posterior, if they are not there.
        check: raises if the network is another one when covariances are asked for.
    """
    scale, temperature = posterior.calibration.scale, posterior.calibration.temperature
    # Covariances without samples are differences of larger numbers.
    precise = bool(posterior.exact) and network.dtype != torch.float64
    run = _Run(network, program, temperature, precise)
    sampled = lambda: run.deviations(samples()[:num_samples])  # noqa: E731
    function = covariance_of(posterior, fit, run) if run.num_observations else None
    value = run.value.detach()
    return RegressionPrediction(
        value,
        math.sqrt(scale) * sampled() if function is None else None,
        Gaussian(1.0, learn=False),
        function=None if function is None else OnRequest(function, check, scale, True, sampled, num_samples, seed),
        noise_scale=torch.zeros_like(value),
    )
