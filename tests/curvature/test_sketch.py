"""Sketches: all functions against dense algebra, the correction of the inverse, growth and its limits."""

import math
from dataclasses import replace

import pytest
import torch
from cases import make_case
from problems import make_prior
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.curvature.kronecker import restored_curvature
from laplace_sampling.curvature.low_rank import LowRank, Sketch
from laplace_sampling.curvature.part import Growth, Part, RandomRows, bytes_of_rows, rows_that_fit
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import ungrouped
from laplace_sampling.solvers.operator import Congruent, make_dense

P = 30


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(num: int, seed: int = 0) -> Tensor:
    """Rows whose squares fall from about 100 to 0.01."""
    return randn(num, P, seed=seed) * torch.logspace(1, -1, P, dtype=torch.float64)


def made(num: int, chance: float = 0.0) -> tuple[Sketch, Tensor]:
    rows, weights = rows_of(num), randn(num, seed=1).square() + 0.1
    return Sketch(rows.split(7), weights, chance=chance), rows.T @ (weights[:, None] * rows)


def classifier(num_data: int, num_outputs: int = 3, size: int = 40, decay: float = 1.5) -> GGN:
    """A classification whose curvature has a few large eigenvalues."""
    scales = torch.logspace(0, -decay, size, dtype=torch.float64)
    features = DenseFeatures(randn(num_data, num_outputs, size) * scales)
    return GGN(features, Categorical(), randn(num_data, num_outputs, seed=5) * 2)


@pytest.mark.parametrize("num", [5, 20, 45])
@pytest.mark.parametrize("shift", [0.3, torch.linspace(0.2, 2, P, dtype=torch.float64)])
def test_functions_are_the_dense_ones(num: int, shift: float | Tensor) -> None:
    sketch, M = made(num)
    found = sketch.low_rank(shift, 0.0)
    A = torch.diag(torch.as_tensor(shift, dtype=torch.float64).expand(P))
    inverse = torch.linalg.inv(M + A)
    v, eye = randn(4, P, seed=3), torch.eye(P, dtype=torch.float64)
    assert_close(found.matmul(v), v @ M)
    assert_close(found.solve(v, shift), v @ inverse)
    root = found.solve_root(eye, shift)
    assert_close(root.T @ root, inverse)
    assert_close(found.variance(shift), inverse.diagonal())
    assert_close(found.leverage(shift), (inverse @ M).diagonal())
    if not isinstance(shift, Tensor):
        assert_close(root, root.T)
        assert found.dimension(shift) == pytest.approx(float((inverse @ M).trace()), rel=1e-9)
    assert_close(found.eigenvalues().sort().values, torch.linalg.eigvalsh(M).clamp_min(0), rtol=1e-8, atol=1e-8)


def test_covariances_serve_many_shifts() -> None:
    sketch, M = made(20)
    phi, shifts = randn(6, 2, P, seed=4), torch.tensor([0.01, 1.0, 50.0], dtype=torch.float64)
    eye = torch.eye(P, dtype=torch.float64)
    expected = torch.stack([phi @ torch.linalg.inv(M + s * eye) @ phi.mT for s in shifts])
    assert_close(sketch.covariances(phi, shifts), expected)
    assert_close(sketch.low_rank(0.1, 0.0).covariances(phi, shifts), expected)
    norms = phi[:, 0].square().sum(1)
    assert_close(sketch.variances(norms, sketch.project(phi[:, 0]), 1.0), expected[1, :, 0, 0])


def test_congruent_and_adapted() -> None:
    sketch, M = made(20)
    sketch = sketch.low_rank(0.4, 0.0)
    w, v = torch.linspace(0.5, 2, P, dtype=torch.float64), randn(3, P, seed=3)
    assert_close(sketch.congruent(w).solve(v, 0.4), v @ torch.linalg.inv(w[:, None] * M * w + 0.4 * torch.eye(P)))
    half = sketch.congruent(torch.full((P,), 0.5, dtype=torch.float64))
    assert_close(half.solve(v, 0.4), v @ torch.linalg.inv(0.25 * M + 0.4 * torch.eye(P)))
    ggn = classifier(20)
    whole = Growth(RandomRows(ggn, 0)).sketch(60).low_rank(1.0, 0.0)
    three = whole.adapted(Congruent(ggn, lambda u: 3**0.5 * u))
    assert_close(three.matmul(randn(2, 40)), 3 * randn(2, 40) @ make_dense(ggn), rtol=1e-6, atol=1e-8)
    assert three.passes == whole.passes + 1


def test_tensors_are_all_of_it() -> None:
    low, v = made(20, 0.7)[0].low_rank(0.3, 0.0), randn(3, P, seed=3)
    found = restored_curvature(low.tensors())
    assert torch.equal(found.solve(v, 0.3), low.solve(v, 0.3))
    assert found.dimension(0.3) == low.dimension(0.3)


@pytest.mark.parametrize("accuracy", [0.6, 6e-2, 6e-3])
def test_standard_deviations_are_as_accurate_as_was_asked_for(accuracy: float) -> None:
    """At the rows the sum of variances grows by a third of the accuracy at most, which is less than any direction has;
    with a rank less by more, or a direction by more than three times the accuracy."""
    sketch, M = made(45)
    shift, G = 5.0, sketch.rows
    rows = torch.cat(G) * sketch.weights.sqrt()[:, None]
    exact = (rows @ torch.linalg.inv(M + shift * torch.eye(P)) * rows).sum()
    low = sketch.low_rank(shift, accuracy)
    assert 1 < low.rank < P
    for rank, holds in ((low.rank, True), (low.rank - 1, False)):
        less = LowRank(low.factor[:rank], low.spectrum)
        growth = float((less.solve(rows, shift) * rows).sum() / exact) - 1
        left_out = float(low.spectrum[rank]) / shift
        assert (0 <= growth <= accuracy / 3 and left_out <= 6 * accuracy) == holds
    assert low.dimension(shift) == pytest.approx(float(exact), rel=1e-9)
    for few in (1, 7):
        assert sketch.low_rank(shift, accuracy, few * 8 * P).rank == few


def test_eigenvectors_are_in_float64_where_rounding_would_count() -> None:
    rows = rows_of(60).float()
    sketch, phi = Sketch([rows], torch.ones(60)), rows[:5, None]
    rows = rows.double()
    for shift, dtype in ((1e3, torch.float32), (1e-5, torch.float64)):
        low = sketch.low_rank(shift, 1e-4)
        assert low.factor.dtype == dtype
        expected = phi.double() @ torch.linalg.inv(rows.T @ rows + shift * torch.eye(P)) @ phi.double().mT
        assert_close(low.covariances(phi, torch.tensor([shift]))[0], expected, rtol=1e-3, atol=0)


def test_rows_in_float32_are_accurate_where_the_data_decide() -> None:
    """Variances that are a ten thousandth of those of the prior, by a Gram matrix and a difference in float64."""
    rows = rows_of(60).float()
    sketch, phi = Sketch([rows], torch.ones(60)), rows[:5, None]
    rows = rows.double()
    expected = phi.double() @ torch.linalg.inv(rows.T @ rows + 0.01 * torch.eye(P)) @ phi.double().mT
    found = sketch.covariances(phi, torch.tensor([0.01], dtype=torch.float64))[0]
    assert float(expected.max()) < 1e-3 * float(phi.square().sum(2).max()) / 0.01
    assert_close(found, expected, rtol=1e-8, atol=0)


def test_the_correction_solves_its_equation() -> None:
    sketch, M = made(20, 0.8)
    for alpha in (0.01, 1.0, 100.0):
        c = sketch.correction(alpha)
        inner = torch.linalg.inv(M + c * alpha * torch.eye(P))
        assert c == pytest.approx(1 - 0.8 * float((inner @ M).trace()) / 20, rel=1e-6)
        phi, corrected = randn(2, 2, P, seed=4), torch.linalg.inv(M / c + alpha * torch.eye(P))
        root = sketch.solve_root(torch.eye(P, dtype=torch.float64), alpha)
        assert_close(root @ root, corrected)
        shifts = torch.tensor([alpha], dtype=torch.float64)
        assert_close(sketch.covariances(phi, shifts)[0], phi @ corrected @ phi.mT)
        assert sketch.dimension(alpha) == pytest.approx(float((corrected @ M).trace()) / c, rel=1e-6)
        for low in (sketch.low_rank(alpha, 0.0), sketch.at(alpha).low_rank(alpha, 0.0)):
            assert_close(low.solve(torch.eye(P, dtype=torch.float64), alpha), corrected)
            assert low.dimension(alpha) == pytest.approx(sketch.dimension(alpha))


@pytest.mark.parametrize(("num", "alpha"), [(40, 1.0), (60, 0.1), (120, 0.1)])
def test_the_correction_takes_the_bias_away(num: int, alpha: float) -> None:
    """Standard deviations from random rows are too large on average; corrected ones by less than a fifth of that."""
    scales = torch.logspace(1, -1, P, dtype=torch.float64).square()
    exact = (1 / (scales + alpha)).sqrt()
    raw, corrected = torch.zeros(P).double(), torch.zeros(P).double()
    number = 60
    for seed in range(number):
        rows, weights = rows_of(num, seed), torch.full((num,), 1 / num)
        raw += Sketch([rows], weights).low_rank(alpha, 0.0).variance(alpha).sqrt() / number
        corrected += Sketch([rows], weights, chance=1.0).low_rank(alpha, 0.0).variance(alpha).sqrt() / number
    bias = float((raw / exact - 1).mean())
    assert bias > 0.02
    assert abs(float((corrected / exact - 1).mean())) < 0.2 * bias


def test_a_part_and_its_half_have_the_same_draws() -> None:
    """The change is that of standard deviations from the first half of the rows to all of them."""
    growth = Growth(RandomRows(classifier(400, size=100), 0))
    half, whole = growth.sketch(40), growth.sketch(80)
    assert torch.equal(half.rows[0], whole.rows[0])
    variances = [
        s.covariances(growth.probes.dense()[:, None], torch.tensor([0.5], dtype=torch.float64)).flatten()
        for s in (half, whole)
    ]
    old, new = (v.sqrt() for v in variances)
    expected = float((old - new).norm() / new.norm())
    assert growth.change_at(0.5) == pytest.approx(expected, rel=1e-9)


def test_growth_stops_at_the_tolerance() -> None:
    ggn = classifier(3000)
    sizes = []
    for tolerance in (1.0, 0.025, 0.0):
        growth = Growth(RandomRows(ggn, 0))
        sizes.append(growth.grow(1.0, tolerance, 4000).num_rows)
        if tolerance > 0:
            assert growth.change <= tolerance
    assert sizes[0] < sizes[1] < sizes[2]


def test_growth_ends_at_its_limits() -> None:
    ggn = classifier(300, size=500)
    growth = Growth(RandomRows(ggn, 0))
    assert growth.grow(0.1, 0.0, 290).num_rows == 290
    assert growth.change > 0
    bytes_ = bytes_of_rows(100, 500, 8)
    assert rows_that_fit(500, 8, bytes_) in (99, 100)
    sketch = Growth(RandomRows(ggn, 0), bytes_).grow(0.1, 0.0, 10_000)
    assert sketch.num_rows in (rows_that_fit(500, 8, bytes_), rows_that_fit(500, 8, bytes_) - 1)


def test_all_rows_are_exact() -> None:
    """Their matrix is that of the 40 weights, not of the 360 rows."""
    ggn = classifier(120)
    growth = Growth(RandomRows(ggn, 0))
    sketch = growth.grow(0.1, 0.0, 10_000)
    assert (sketch.num_rows, growth.change, sketch.chance) == (360, 0.0, 0.0)
    M = make_dense(ggn)
    v = randn(3, 40)
    low = sketch.low_rank(0.1, 0.0)
    assert_close(low.matmul(v), v @ M)
    assert_close(low.solve(v, 0.1), v @ torch.linalg.inv(M + 0.1 * torch.eye(40)))
    assert sketch.dimension(0.1) == pytest.approx(float(torch.linalg.solve(M + 0.1 * torch.eye(40), M).trace()))


def test_more_rows_are_nearer_to_the_exact_posterior() -> None:
    """Each larger part is more accurate, and the last one exact."""
    ggn = classifier(500, num_outputs=4)
    M, alpha = make_dense(ggn), 0.3
    phi = ggn.features.rows(torch.arange(100))
    exact = (phi @ torch.linalg.inv(M + alpha * torch.eye(40)) @ phi.mT).diagonal(dim1=1, dim2=2).sqrt()
    errors = torch.zeros(5)
    for seed in range(5):
        growth = Growth(RandomRows(ggn, seed))
        for i, num in enumerate((30, 120, 500, 1000, 2000)):
            sketch = growth.sketch(growth.reachable(num))
            found = sketch.covariances(phi, torch.tensor([alpha], dtype=torch.float64))[0]
            errors[i] += (found.diagonal(dim1=1, dim2=2).sqrt() - exact).norm() / exact.norm() / 5
    assert (errors[1:] < 0.7 * errors[:-1]).all()
    assert errors[-1] < 1e-7


def test_passes_count_the_vjps() -> None:
    """Half a pass for each row of a datum, those by which parts are compared among them."""
    case = make_case("classification")
    model = case.linear_model()
    ggn = model.ggn(model.network_outputs)
    before = ggn.features.network.products["vjp"]
    sketch = Growth(RandomRows(ggn, 0)).grow(1.0, 0.0, 12)
    assert sketch.num_rows == 12
    spent = ggn.features.network.products["vjp"] - before
    assert spent <= 2 * 8 * sketch.passes <= 12 + 8


@pytest.mark.parametrize("noise", [1.0, 9.0])
def test_a_part_is_compared_with_its_half_under_the_noise_that_is_asked_for(noise: float) -> None:
    case = make_case("regression")
    model = case.linear_model()
    first, asked = (replace(model.ggn(model.network_outputs), likelihood=Gaussian(b)) for b in (1.0, noise))
    prior = make_prior(model, case, "isotropic").with_precision(torch.tensor([2.0], dtype=torch.float64))
    growth, expected = (
        Growth(RandomRows(replace(ggn, features=ScaledFeatures(ggn.features, prior.scale)), 0))
        for ggn in (first, asked)
    )
    for num_rows in (3, 6):
        growth.sketch(num_rows)
        expected.sketch(num_rows)
    part = Part(growth, tolerance=math.inf)
    part.grow(asked, prior, 6)
    assert part.change == pytest.approx(expected.change_at(float(prior.precision)))
    # The correction of both is that of the precision.
    eye = torch.eye(asked.size, dtype=torch.float64)
    part, growth.change = replace(part, tolerance=0.0), 0.0
    assert_close(part.of(asked, prior).matmul(eye), expected.made[-1].low_rank(2.0, 0.0).matmul(eye))


@pytest.mark.parametrize("change", [math.nan, 0.01, 0.3])
def test_eigenvectors_are_cut_off_where_the_tolerance_or_the_change_of_the_part_lets_them(change: float) -> None:
    """Standard deviations at rows of the data, beside those of all eigenvectors, by dense algebra: they grow by a
    sixth of what the curvature says for the worst, and of the larger of both at most; with a rank less by more, or in a
    direction by more than three times as much."""
    ggn, alpha, tolerance = classifier(200, num_outputs=4), 2.0, 0.03
    prior = ungrouped(torch.ones(ggn.size, dtype=torch.float64), alpha)
    scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
    growth = Growth(RandomRows(scaled, 0))
    sketch = growth.sketch(150).at(alpha)
    growth.change = change
    low = Part(growth, tolerance).of(ggn, prior)
    rows = sketch.low_rank(alpha, 0.0).factor
    exact = (rows @ torch.linalg.inv(rows.T @ rows + alpha * torch.eye(ggn.size)) * rows).sum()
    accuracy = 0.3 if change == 0.3 else tolerance
    for rank, holds in ((low.rank, True), (low.rank - 1, False)):
        less = LowRank(low.factor[:rank], low.spectrum)
        error = (float((less.solve(rows, alpha) * rows).sum() / exact) - 1) / 2
        left_out = float(low.spectrum[rank]) / alpha
        assert (0 < error <= accuracy / 6 and left_out <= 6 * accuracy) == holds
        if holds:
            assert low.error == pytest.approx(6 * error, rel=1e-6)


def test_the_correction_is_of_the_part_of_the_trace_that_is_estimated() -> None:
    growth = Growth(RandomRows(classifier(300), 0))
    found, sequence = growth.sketch(200), growth.sequence
    squares = sequence.rows(0, 200).dense().double().square().sum(1)
    weighted = float((sequence.weights(200) * squares).sum())
    assert found.chance == pytest.approx(1 - float(squares.sum()) / weighted, rel=1e-6)
    assert 0 < found.chance < 1
