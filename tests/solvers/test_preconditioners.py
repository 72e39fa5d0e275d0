from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from grids import covering
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.solvers.operator import Operator
from laplace_sampling.solvers.preconditioners import Jacobi, Nystrom, Preconditioner, _nystrom

P, N = 40, 300


@dataclass
class Rows(Operator):
    """`RᵀR`, a datum a row, counting products of one datum and one vector."""

    rows: Tensor
    products: int = field(default=0)

    @property
    def num_data(self) -> int:
        return len(self.rows)

    @property
    def size(self) -> int:
        return self.rows.shape[1]

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def matmul(self, v: Tensor, batch: Tensor | None = None) -> Tensor:
        rows = self.rows if batch is None else self.rows[batch]
        self.products += len(rows) * len(v)
        return (v @ rows.T) @ rows

    def root_rows(self) -> Iterator[Tensor]:
        yield self.rows

    def random_rows(self, batch: Tensor, generator: torch.Generator) -> Tensor:
        return self.rows[batch]


def operator(eigenvalues: Tensor, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Rows:
    """A matrix with these eigenvalues, times `scale`."""
    g = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(N, len(eigenvalues), generator=g, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(P, len(eigenvalues), generator=g, dtype=torch.float64))[0]
    return Rows(((left * (scale * eigenvalues).sqrt()) @ right.T).to(dtype))


def falling(rank: int = P, power: float = 2.0) -> Tensor:
    return torch.arange(1, rank + 1, dtype=torch.float64) ** -power


def dense(op: Rows) -> Tensor:
    return op.rows.double().T @ op.rows.double()


def matrix(preconditioner: Preconditioner, shift: float, root: bool = False) -> Tensor:
    """`P⁻¹`, or its root, in full."""
    eye = torch.eye(P, dtype=torch.float64)
    return (preconditioner.solve_root if root else preconditioner.solve)(eye, shift)


@covering(strength=2, scale=[1e-12, 1.0, 1e12], rank=[1, 7, P], max_rank=[10, 1000])
def test_a_sketch_larger_than_the_rank_is_exact(scale: float, rank: int, max_rank: int) -> None:
    op = operator(falling(rank, 1.0), scale)
    preconditioner = Nystrom.of(op, max_rank)
    M = dense(op)
    U, eigenvalues = preconditioner.vectors, preconditioner.eigenvalues
    assert len(U) <= P
    assert_close(U @ U.T, torch.eye(len(U), dtype=torch.float64))
    if len(U) >= rank:
        assert_close((U.T * eigenvalues) @ U / scale, M / scale, rtol=1e-7, atol=1e-10)
        for shift in (1e-3 * scale, 10 * scale):
            eye = torch.eye(P, dtype=torch.float64)
            assert_close(
                matrix(preconditioner, shift) * scale, torch.linalg.inv(M + shift * eye) * scale, rtol=1e-6, atol=1e-6
            )
    else:
        assert len(U) == max_rank
        assert float(eigenvalues[0]) == pytest.approx(scale, rel=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_preconditioned_condition_is_small(scale: float, dtype: torch.dtype) -> None:
    op = operator(falling(), scale, dtype)
    preconditioner = Nystrom.of(op, 16)
    vectors, eigenvalues = preconditioner.vectors.double(), preconditioner.eigenvalues.double()
    preconditioner = Nystrom(vectors, eigenvalues, preconditioner.passes)
    for shift in (1e-4 * scale, 1e-2 * scale):
        H = dense(op) + shift * torch.eye(P, dtype=torch.float64)
        root = matrix(preconditioner, shift, root=True)
        spectrum = torch.linalg.eigvalsh(root @ H @ root)
        # What is left is about (λ_16 + shift) / shift, from a condition of 1e4 and 1e2.
        assert float(spectrum[-1] / spectrum[0]) < 4 * (1 + float(falling()[15]) * scale / shift)
        assert float(spectrum[-1]) < 10  # the last eigenvalues of a sketch are too small by a small factor
        assert_close(root @ root * scale, matrix(preconditioner, shift) * scale, rtol=1e-4, atol=1e-4)
        assert float(torch.linalg.eigvalsh(root)[0]) > 0


def test_float32_matches_float64() -> None:
    wide, narrow = (Nystrom.of(operator(falling(), 1.0, d), 8) for d in (torch.float64, torch.float32))
    assert_close(narrow.eigenvalues.double(), wide.eigenvalues, rtol=1e-3, atol=1e-6)


def test_nothing_to_precondition_leaves_the_shift() -> None:
    op = Rows(torch.zeros(5, P, dtype=torch.float64))
    assert_close(matrix(Nystrom.of(op, 256), 0.5), 2 * torch.eye(P, dtype=torch.float64))


def test_the_stabilising_shift_is_taken_off() -> None:
    basis = torch.linalg.qr(torch.randn(P, P, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    M = dense(operator(falling()))
    vectors, eigenvalues = _nystrom(basis, basis @ M, 0.1)
    assert_close((vectors.T * eigenvalues) @ vectors, M)


def test_all_products_are_counted() -> None:
    op = operator(falling())
    assert Nystrom.of(op, 32).passes == 32
    assert op.products == 32 * N


@pytest.mark.parametrize("num", [P // 2, 3 * P])  # decomposed as products of rows and of columns
@pytest.mark.parametrize("max_rank", [5, 1000])
def test_rows_of_data_have_the_leading_eigenvectors_of_their_sum(num: int, max_rank: int) -> None:
    op, generator = operator(falling(power=1.0)), torch.Generator().manual_seed(0)
    data, weights = torch.randperm(N, generator=generator)[:num], 1 + torch.rand(num, generator=generator)
    found = Nystrom.of_rows(op, data, weights.double(), max_rank=max_rank, generator=generator)
    rows = op.rows[data]
    eigenvalues, vectors = torch.linalg.eigh((rows.T * weights.double()) @ rows)
    rank = min(max_rank, num, P)
    assert_close(found.eigenvalues, eigenvalues.flip(0)[:rank])
    assert_close((found.vectors * (vectors.T.flip(0)[:rank])).sum(1).abs(), torch.ones(rank, dtype=torch.float64))
    assert found.passes == num / (2 * N)


def test_jacobi_is_the_diagonal() -> None:
    op = operator(falling())
    jacobi = Jacobi(dense(op).diagonal(), passes=3.0)
    expected = torch.diag(1 / (dense(op).diagonal() + 0.1))
    assert_close(matrix(jacobi, 0.1), expected)
    assert_close(matrix(jacobi, 0.1, root=True), expected.sqrt())
    assert jacobi.passes == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_products_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(FloatingPointError, match="sketch"):
        Nystrom.of(Rows(torch.full((5, P), bad, dtype=torch.float64)), 8)
