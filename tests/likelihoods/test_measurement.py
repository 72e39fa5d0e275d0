import pytest
import torch
from torch.testing import assert_close

from laplace_sampling.likelihoods.measurement import as_measurement


def test_what_is_no_measurement_is_refused() -> None:
    T = torch.randn(5, 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(ValueError, match="shape"):
        as_measurement(T[:, 0], 18)
    with pytest.raises(TypeError, match="LinearOperator"):
        as_measurement("radon", 18)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="⟨Tf, u⟩"):
        as_measurement((lambda f: T @ f, lambda u: 2 * T.T @ u), 18)
    with pytest.raises(ValueError, match="entries"):
        as_measurement((lambda f: T @ f, lambda u: u), 18)


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_sparse_matrices_of_any_layout(layout: str) -> None:
    dense = torch.tensor([[1.0, 0, 2], [0, 0, 3]], dtype=torch.float64)
    sparse = {"coo": dense.to_sparse_coo, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}[layout]()
    T, f, u = as_measurement(sparse, 3), torch.randn(2, 4, 3).double(), torch.randn(5, 2).double()
    assert_close(T.apply(f), f @ dense.T)
    assert_close(T.adjoint(u), u @ dense)
