"""The curvature of a linear last layer and covariances from its inputs, against dense algebra."""

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Categorical, Gaussian, Poisson
from laplace_sampling.curvature import head as module_of_head
from laplace_sampling.curvature.head import (
    head_covariances,
    head_curvature,
    head_kronecker,
    head_matrix,
    head_of,
    head_variances,
)
from laplace_sampling.curvature.kronecker import Kronecker
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.likelihoods.weighted import weighted
from laplace_sampling.linear_model.features import NetworkFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.networks.last_layer import LastLayer, LinearLayer
from laplace_sampling.solvers.dense import DenseCurvature

# Cases whose network ends with a linear layer of a vector for each datum.
NAMES = [
    name
    for name in CASES
    if name not in ("image_regression", "segmentation", "token_labels", "multi_task", "scalar_and_matrix")
]


def head_model(case: Case) -> tuple[LinearModel, LastLayer]:
    """The linear model of the last layer."""
    network, data = LastLayer(case.model), TrainingData(case.batches)
    with network.keep_inputs(data) as kept:
        outputs = [network.evaluate(x) for x, _ in case.batches]
    features = NetworkFeatures(*network.shortened(data, kept), outputs[0][1])
    f = torch.cat([output for output, _ in outputs]).reshape(len(case.x), -1)
    return LinearModel(features, torch.zeros_like(f), f, case.y, case.likelihood), network


def dense(case: Case, network: LastLayer) -> tuple[Tensor, Tensor]:
    """`J` of the last layer and `M`, by autograd."""
    J = reference.jacobian(case.model, case.x)
    names = [name for name, p in case.model.named_parameters() if p.requires_grad]
    sizes = [p.numel() for p in case.model.parameters() if p.requires_grad]
    chosen = torch.cat([part for name, part in zip(names, J.split(sizes, 2), strict=True) if name in network.names], 2)
    f = case.model(case.x).detach().reshape(len(case.x), -1)
    return chosen, reference.ggn(chosen, reference.curvature(case.likelihood, f, case.y))


@pytest.mark.parametrize("name", NAMES)
def test_the_matrix_of_a_last_layer_is_the_dense_one(name: str) -> None:
    case = make_case(name)
    model, network = head_model(case)
    assert isinstance(head_of(model.features), LinearLayer)
    J, M = dense(case, network)
    before = dict(network.products)
    ggn = model.ggn(model.network_outputs)
    assert_close(head_matrix(ggn), M, rtol=1e-7, atol=1e-9)
    assert network.products == before  # no product, so no derivative
    scale = torch.rand(len(M), generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    if not isinstance(case.likelihood, Gaussian):
        scaled = head_curvature(ggn, scale).matmul(torch.eye(len(M)).double())
        assert_close(scaled, scale[:, None] * M * scale, rtol=1e-7, atol=1e-9)
    assert_close(model.features.rows(torch.arange(len(case.x))), J)


def test_weights_of_data_count() -> None:
    case = make_case("classification")
    model, network = head_model(case)
    J, _ = dense(case, network)
    weights = torch.rand(len(case.x), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[0] = 0
    B = reference.curvature(case.likelihood, model.network_outputs, case.y)
    likelihood, targets = weighted(case.likelihood, case.y, weights)
    ggn = GGN(model.features, likelihood, model.network_outputs, targets)
    assert_close(head_matrix(ggn), reference.ggn(J, B * weights[:, None, None]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("noise", [2.0, torch.tensor([0.5, 1.0, 4.0, 2.0], dtype=torch.float64)])
def test_a_kronecker_product_is_exact_for_a_regression(bias: bool, noise) -> None:
    case = linear_case(Gaussian(noise), torch.randn(9, 4, generator=torch.Generator().manual_seed(1)).double(), bias)
    model, network = head_model(case)
    found = head_curvature(model.ggn(model.network_outputs))
    assert isinstance(found, Kronecker)
    _, M = dense(case, network)
    assert_close(found.matmul(torch.eye(len(M)).double()), M)


def linear_case(likelihood, y: Tensor, bias: bool = True) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4, bias=bias)).double()
        return Case(body, likelihood, torch.randn(9, 2).double(), y)


def basis_of(M: Tensor, size: int = 4) -> Tensor:
    """The Kronecker product of the eigenvectors of both partial traces."""
    blocks = M.reshape(size, -1, size, len(M) // size)
    traces = torch.einsum("aibi->ab", blocks), torch.einsum("aiaj->ij", blocks)
    return torch.kron(*(torch.linalg.eigh(trace)[1] for trace in traces))


@pytest.mark.parametrize("kind", ["labels", "weights and ignored labels", "counts"])
def test_many_weights_are_kronecker_factored(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    counts = (torch.arange(36).reshape(9, 4) % 5).double()
    case = linear_case(*(Poisson(), counts) if kind == "counts" else (Categorical(), torch.arange(9) % 4))
    model, _ = head_model(case)
    ggn = model.ggn(model.network_outputs)
    w = torch.ones(9, dtype=torch.float64)
    if kind == "weights and ignored labels":
        labels = case.y.clone()
        labels[2] = -100
        w = torch.linspace(0.5, 2, 9).double()
        likelihood, targets = weighted(case.likelihood, labels, w)
        ggn = GGN(model.features, likelihood, model.network_outputs, targets)
        w[2] = 0
    assert isinstance(head_curvature(ggn), DenseCurvature)
    monkeypatch.setattr(module_of_head, "_MOST_WEIGHTS", 15)  # the layer has 16
    found = head_curvature(ggn)
    assert isinstance(found, Kronecker)
    # The diagonal of `M` in the eigenvectors of both factors, from the formula.
    h = torch.cat([case.model[:2](case.x).detach(), torch.ones(9, 1).double()], 1)
    B, (block,) = reference.curvature(case.likelihood, model.network_outputs, case.y), found.blocks
    B = B * w[:, None, None]
    M = sum(torch.kron(B_i, torch.outer(h_i, h_i)) for B_i, h_i in zip(B, h, strict=True))
    basis = basis_of(M)
    expected = basis @ torch.diag((basis.T @ M @ basis).diagonal()) @ basis.T
    order = block.index.flatten()
    assert_close(found.matmul(torch.eye(16).double())[order][:, order], expected)
    # Scales of a prior change the eigenvectors.
    of_outputs, of_inputs = torch.linspace(1, 2, 4).double(), torch.linspace(0.5, 1, 4).double()
    scale = torch.empty(16, dtype=torch.float64)
    scale[block.index[0]] = of_outputs[:, None] * of_inputs
    M = torch.outer(scale[order], scale[order]) * M
    basis = basis_of(M)
    expected = basis @ torch.diag((basis.T @ M @ basis).diagonal()) @ basis.T
    assert_close(head_curvature(ggn, scale).matmul(torch.eye(16).double())[order][:, order], expected)


@pytest.mark.parametrize("kronecker", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_covariances_of_many_precisions(kronecker: bool, bias: bool) -> None:
    case = linear_case(Categorical(), torch.arange(9) % 4, bias)
    model, network = head_model(case)
    ggn, layer = model.ggn(model.network_outputs), head_of(model.features)
    assert layer is not None
    J, _ = dense(case, network)
    generator = torch.Generator().manual_seed(3)
    of_outputs, of_inputs = (torch.rand(n, generator=generator).double() + 0.5 for n in layer.index.shape)
    scale = torch.empty(len(J[0, 0]), dtype=torch.float64)
    scale[layer.index] = of_outputs[:, None] * of_inputs
    curvature = (head_kronecker if kronecker else head_curvature)(ggn, scale)
    M, shifts = curvature.matmul(torch.eye(len(scale)).double()), torch.tensor([0.1, 3.0])
    z = model.features.inputs(torch.arange(9))[0]
    found = head_covariances(curvature, layer, z, shifts, scale)
    for shift, blocks in zip(shifts.double(), found, strict=True):
        inverse = torch.linalg.inv(M + shift * torch.eye(len(M)).double())
        rows = J * scale
        assert_close(blocks, rows @ inverse @ rows.mT, rtol=1e-7, atol=1e-9)
        variances = head_variances(curvature, layer, z, shift, scale)
        assert_close(variances, blocks.diagonal(dim1=1, dim2=2), rtol=1e-7, atol=1e-9)
