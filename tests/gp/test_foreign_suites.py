"""The test suites of linear_operator and GPyTorch on the operators, kernels and means of this package."""

import unittest
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from laplace_sampling.gp.linear_operators import LinearOperator, settings
from laplace_sampling.gp.tangent_kernel import NetworkMean, TangentKernel, TangentKernelOperator
from laplace_sampling.networks.linearisation import Linearisation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # both use torch.jit.script at import, deprecated in new versions of torch
    from gpytorch.test.base_kernel_test_case import BaseKernelTestCase
    from gpytorch.test.base_mean_test_case import BaseMeanTestCase
    from linear_operator.test.linear_operator_test_case import (
        LinearOperatorTestCase,
    )
    from linear_operator.utils.warnings import NumericalWarning, PerformanceWarning


# Their tests make matrices on purpose that these two speak of: ill-conditioned ones, and large diagonals by rows.
expected_warnings = pytest.mark.filterwarnings(
    f"ignore::{NumericalWarning.__module__}.{NumericalWarning.__qualname__}",
    f"ignore::{PerformanceWarning.__module__}.{PerformanceWarning.__qualname__}",
)
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """New torch warns where linear_operator does not choose; BoTorch switches conjugate gradients off at its import."""
    with torch.sparse.check_sparse_tensor_invariants(False), settings.fast_computations(True, True, True):
        yield


def network(outputs: int) -> Linearisation:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Linearisation(nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, outputs)))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def rows(network: Linearisation, x: Tensor) -> Tensor:
    """The Jacobian with a graph in the inputs, by reverse mode on the module itself."""
    x = x.to(network.dtype)
    weights = {name: p.detach() for name, p in network.source.named_parameters()}

    def f(*values: Tensor) -> Tensor:
        named = dict(zip(network.names, values, strict=True))
        return torch.func.functional_call(network.source, named, (x,)).reshape(-1)

    parts = torch.autograd.functional.jacobian(f, tuple(weights[n] for n in network.names), create_graph=True)
    return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)


class _Square:
    seed = 0
    should_test_sample = True
    outputs = 1
    batch: tuple[int, ...] = ()

    def create_linear_op(self) -> LinearOperator:
        net = network(self.outputs)
        variance = torch.linspace(0.5, 1.5, net.num_parameters) / (1 + normal(*self.batch, 1).abs())
        return TangentKernelOperator(variance, x1=3 * normal(6 // self.outputs, 3), network=net)

    def evaluate_linear_op(self, linear_op: LinearOperator) -> Tensor:
        variance, *inputs = linear_op.representation()
        left, right = (rows(linear_op._kwargs["network"], x).to(variance) for x in (inputs[0], inputs[-1]))
        return (left * variance[..., None, :]) @ right.mT


@expected_warnings
class TestTangentKernelOperatorOfABatch(_Square, LinearOperatorTestCase, unittest.TestCase):
    batch, outputs = (2,), 2


def pooling(outputs: int) -> nn.Module:
    """A network for rows of any length, which the suites of kernels and means have."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.AdaptiveAvgPool1d(2), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs))


class TestTangentKernel(BaseKernelTestCase, unittest.TestCase):
    """The matrices are dense."""

    def create_kernel_no_ard(self, **kwargs: object) -> TangentKernel:
        return TangentKernel(pooling(1), **kwargs)


class TestTangentKernelOfOperators(BaseKernelTestCase, unittest.TestCase):
    """The matrices are `TangentKernelOperator`s."""

    def create_kernel_no_ard(self, **kwargs: object) -> TangentKernel:
        return TangentKernel(pooling(2), dense_size=1, **kwargs)


class TestNetworkMean(BaseMeanTestCase, unittest.TestCase):
    def create_mean(self) -> NetworkMean:
        return NetworkMean(pooling(1), "affine")
