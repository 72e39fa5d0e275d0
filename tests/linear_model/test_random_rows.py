"""The sequence of random rows: every beginning of it is unbiased, the last is the GGN itself."""

import math
from dataclasses import replace

import pytest
import reference
import torch
from cases import Case, make_case
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.random_rows import RandomRows
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
    assert sorted(sequence.data.tolist()) == list(range(8))
    other = RandomRows(ggn, 2).rows(0, 20).dense()
    assert float((other - whole).norm()) > 0.1 * float(whole.norm())
    assert float((RandomRows(ggn, 1, stream=1).rows(0, 20).dense() - whole).norm()) > 0.1 * float(whole.norm())


def test_rows_of_a_datum_are_orthogonal_in_the_outputs() -> None:
    sequence = RandomRows(ggn_of(make_case("classification")), 0)
    data = torch.full((4,), 5)
    z = sequence.directions(data, torch.arange(4))
    assert_close(z @ z.T, 4 * torch.eye(4, dtype=torch.float64))


def test_data_of_large_curvature_come_first() -> None:
    """A datum with all of the curvature is drawn first, with weight one, and the others seldom."""
    case = make_case("classification")
    model = case.linear_model()
    outputs = torch.zeros_like(model.network_outputs)
    outputs[1:, 0] = 40.0  # certain of the first class
    for seed in range(20):
        sequence = RandomRows(model.ggn(outputs), seed)
        assert 0 in sequence.data[:3].tolist()
        weights = sequence.weights(4)
        where = (sequence.data[:4] == 0).nonzero()
        assert float(weights[where]) == pytest.approx(1.0, rel=0.5)


def test_weights_of_whole_rounds_are_equal() -> None:
    sequence = RandomRows(ggn_of(make_case("classification")), 0)
    assert_close(sequence.weights(8), torch.ones(8, dtype=torch.float64))
    assert_close(sequence.weights(16), torch.full((16,), 0.5, dtype=torch.float64))
    weights = sequence.weights(10)
    assert_close(weights[:2], torch.full((2,), 0.5, dtype=torch.float64))
    assert_close(weights[2:8], torch.ones(6, dtype=torch.float64))
    assert_close(weights[8:], torch.full((2,), 0.5, dtype=torch.float64))


def test_a_row_is_one_vjp() -> None:
    case = make_case("classification")
    ggn = ggn_of(case)
    network = ggn.features.network
    before = dict(network.products)
    RandomRows(ggn, 0).rows(0, 13)
    assert network.products["vjp"] - before["vjp"] == 13
    assert network.products["jvp"] == before["jvp"]
