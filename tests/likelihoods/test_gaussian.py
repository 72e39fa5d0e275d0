import pytest
import torch
from torch.testing import assert_close

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.measurement import as_measurement


@pytest.mark.parametrize("precision", [0.0, -1.0, float("nan"), float("inf"), [[1.0]]])
def test_gaussian_refuses_a_noise_precision_that_is_none(precision) -> None:
    with pytest.raises(ValueError, match="noise_precision"):
        Gaussian(torch.tensor(precision))


def test_one_entry_is_a_scalar() -> None:
    assert Gaussian(torch.tensor([2.0])) == Gaussian(2.0)
    assert Gaussian(torch.tensor([2.0])).noise_precisions().dim() == 0


def test_measurements_are_carried_and_not_compared() -> None:
    T = torch.eye(2)
    likelihood = Gaussian(2.0, observe=T)
    assert likelihood.with_precision(3.0).observe is T
    assert likelihood == Gaussian(2.0, learn=False)
    assert "observe" not in repr(likelihood)


@pytest.mark.parametrize("observe", [2, "T", [[1.0]], (torch.sin,), torch.sin])
def test_what_is_no_measurement_is_refused_at_once(observe) -> None:
    with pytest.raises(TypeError, match="LinearOperator"):
        Gaussian(observe=observe)


def test_settings_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        Gaussian(observe=torch.ones(3))
    with pytest.raises(TypeError, match="learn="):
        Gaussian(learn="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="positive"):
        Gaussian(torch.ones(0))
    with pytest.raises(TypeError, match="numbers"):
        Gaussian("1")  # pyright: ignore[reportArgumentType]


def test_functions_that_are_not_adjoint_are_refused() -> None:
    T = torch.randn(5, 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = torch.zeros(1, 18, dtype=torch.float64)
    with pytest.raises(ValueError, match="⟨Tf, u⟩"):
        as_measurement((lambda f: T @ f, lambda u: 2 * T.T @ u), outputs).checked(outputs)
    with pytest.raises(ValueError, match="entries"):
        as_measurement((lambda f: T @ f, lambda u: u), outputs)


@pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_sparse_matrices_of_any_layout(layout: str) -> None:
    dense = torch.tensor([[1.0, 0, 2], [0, 0, 3]], dtype=torch.float64)
    sparse = {"coo": dense.to_sparse_coo, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}[layout]()
    T, f, u = as_measurement(sparse, torch.zeros(1, 3)), torch.randn(2, 4, 3).double(), torch.randn(5, 2).double()
    assert_close(T.apply(f), f @ dense.T)
    assert_close(T.adjoint(u), u @ dense)
