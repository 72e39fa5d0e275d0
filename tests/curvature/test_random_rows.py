"""The sequence of random rows: every beginning of it is unbiased, the last is the GGN itself."""

import math
from dataclasses import replace

import pytest
import reference
import torch
from cases import Case, make_case
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.curvature.part import RandomRows
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.operator import make_dense


def ggn_of(case: Case) -> GGN:
    model = case.linear_model()
    return model.ggn(model.network_outputs)


def reference_ggn(case: Case) -> Tensor:
    f = case.linear_model().network_outputs
    return reference.ggn(reference.jacobian(case.model, case.x), reference.curvature(case.likelihood, f, case.y))


def estimate(sequence: RandomRows, num_rows: int) -> Tensor:
    rows = sequence.rows(0, num_rows).dense()
    return rows.T @ (sequence.weights(num_rows)[:, None] * rows)


def test_all_rows_are_the_ggn(case: Case) -> None:
    sequence = RandomRows(ggn_of(case), 3)
    assert_close(estimate(sequence, sequence.most), reference_ggn(case), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("num_rows", "num_outputs"), [(2, 3), (5, 3), (8, 3), (11, 3), (24, 3), (3, 2)])
def test_every_part_is_unbiased(num_rows: int, num_outputs: int) -> None:
    """For 8 data: a part of the data, all, some or all with more rows; within 5 standard errors.

    With two outputs each datum has as many random signs as numbers that decide its order.
    """
    generator = torch.Generator().manual_seed(0)
    phi, outputs = (torch.randn(8, num_outputs, *size, generator=generator, dtype=torch.float64) for size in ((4,), ()))
    ggn = GGN(DenseFeatures(phi), Categorical(), 2 * outputs)
    M, number = make_dense(ggn), 500
    found = torch.stack([estimate(RandomRows(ggn, seed), num_rows) for seed in range(number)])
    error = found.std(0) / math.sqrt(number)
    assert ((found.mean(0) - M).abs() < 5 * error + 1e-9).all()
    # A bias of a third of the trace would show.
    traces = found.diagonal(dim1=1, dim2=2).sum(1)
    assert 5 * float(traces.std()) / math.sqrt(number) < 0.34 * float(M.trace())


def test_a_part_is_contained_in_a_larger_one_with_the_same_draws() -> None:
    ggn = ggn_of(make_case("classification"))
    sequence = RandomRows(ggn, 1)
    whole = sequence.rows(0, 20).dense()
    assert_close(
        torch.cat([sequence.rows(0, 3).dense(), sequence.rows(3, 9).dense(), sequence.rows(9, 20).dense()]), whole
    )
    assert_close(RandomRows(replace(ggn, features=ggn.features.in_chunks(1)), 1).rows(0, 20).dense(), whole)
    assert sequence.num_seen(sequence.most) == 8
    assert sequence.num_seen(5) <= 5
    other = RandomRows(ggn, 2).rows(0, 20).dense()
    assert float((other - whole).norm()) > 0.1 * float(whole.norm())
    assert float((RandomRows(ggn, 1, stream=1).rows(0, 20).dense() - whole).norm()) > 0.1 * float(whole.norm())


def test_data_of_large_curvature_come_first() -> None:
    """A datum with all of the curvature is drawn first, with weight one, and the others seldom."""
    case = make_case("classification")
    model = case.linear_model()
    outputs = torch.zeros_like(model.network_outputs)
    outputs[1:, 0] = 40.0  # certain of the first class
    M, C = make_dense(model.ggn(outputs)), outputs.shape[1]
    for seed in range(20):
        sequence = RandomRows(model.ggn(outputs), seed)
        assert_close(estimate(sequence, 2 * C), M, rtol=0.02, atol=1e-9)
        assert float(sequence.weights(2 * C).min()) == pytest.approx(1.0)


def test_the_sizes_of_rows_are_those_of_the_columns_of_a_root() -> None:
    generator = torch.Generator().manual_seed(0)
    for num_outputs, accuracy in ((5, 1e-5), (80, 0.3)):
        outputs = 2 * torch.randn(6, num_outputs, generator=generator, dtype=torch.float64)
        ggn = GGN(DenseFeatures(torch.zeros(6, num_outputs, 1, dtype=torch.float64)), Categorical(), outputs)
        p = outputs.softmax(1)
        # `√p_k (e_k − p)`, less what a root may add in the direction of no curvature.
        expected = p * ((1 - p).square() + p.square().sum(1, keepdim=True) - p.square())
        columns = torch.stack([Categorical().root(outputs, e.expand_as(outputs)) for e in torch.eye(num_outputs)], 1)
        assert_close(columns.square().sum(2), expected, check_dtype=False)
        error = (ggn.root_sizes().double() - expected).norm() / expected.norm()
        assert float(error) < accuracy
        assert_close(ggn.sizes(), p.mul(1 - p).sum(1), rtol=accuracy, atol=0)


def test_a_row_is_one_vjp() -> None:
    case = make_case("classification")
    ggn = ggn_of(case)
    network = ggn.features.network
    before = dict(network.products)
    RandomRows(ggn, 0).rows(0, 13)
    assert network.products["vjp"] - before["vjp"] == 13
    assert network.products["jvp"] == before["jvp"]
