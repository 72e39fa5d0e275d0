import pytest
import torch

from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian


@pytest.mark.parametrize("precision", [0.0, -1.0, float("nan"), float("inf"), [[1.0]]])
def test_gaussian_refuses_a_noise_precision_that_is_none(precision) -> None:
    with pytest.raises(ValueError, match="noise_precision"):
        Gaussian(torch.tensor(precision))


def test_what_other_code_asks_of_a_likelihood() -> None:
    likelihood = Gaussian(torch.tensor([2.0, 3.0]))
    assert likelihood.quadratic
    assert likelihood.learns_noise
    assert likelihood.noise_precisions().tolist() == [2.0, 3.0]
    assert not Gaussian(learn=False).learns_noise
    other = Categorical()
    assert (other.quadratic, other.learns_noise, other.noise_precisions()) == (False, False, None)


def test_one_entry_is_a_scalar() -> None:
    assert Gaussian(torch.tensor([2.0])) == Gaussian(2.0)
    assert Gaussian(torch.tensor([2.0])).noise_precisions().dim() == 0


def test_measurements_are_carried_and_not_compared() -> None:
    T = torch.eye(2)
    likelihood = Gaussian(2.0, observe=T)
    assert likelihood.with_precision(3.0).observe is T
    assert likelihood == Gaussian(2.0)
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
