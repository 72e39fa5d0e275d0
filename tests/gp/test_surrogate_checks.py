"""Bad data, settings and inputs of the surrogate of BoTorch."""

import warnings

import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch", reason="BoTorch, of the extra `botorch`, is not there")
    from laplace_sampling.gp.botorch import TangentSurrogate

pytestmark = pytest.mark.slow

NET = nn.Linear(2, 1)
X = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
KNOWN = {"prior_precision": 1.0, "noise_precision": 4.0}


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (X[:, 0], Y, r"train_X.*\[6\]"),
        (X[:0], Y[:0], r"train_X.*\[0, 2\]"),
        (X, Y[:3], r"train_Y.*\[3, 1\]"),
        (None, Y, r"train_X.*NoneType"),
        (X, Y + 0j, r"train_Y.*complex"),
    ],
)
def test_data_of_other_kinds_are_refused(x, y, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        TangentSurrogate(NET, x, y, **KNOWN)


def test_settings_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="scale"):
        TangentSurrogate(NET, X, Y, scale=torch.ones(4), **KNOWN)
    with pytest.raises(ValueError, match="input_shape"):
        TangentSurrogate(NET, X, Y, input_shape=(7,), **KNOWN)
    with pytest.raises(ValueError, match="prior_precision"):
        TangentSurrogate(NET, X, Y, prior_precision="1")  # pyright: ignore[reportArgumentType]


def test_inputs_of_other_kinds_are_refused() -> None:
    surrogate = TangentSurrogate(NET, X, Y, **KNOWN)
    for x in (X[0], X[:0], X.repeat(1, 2)):
        with pytest.raises(ValueError, match="shape"):
            surrogate.posterior(x)
    with pytest.raises(TypeError, match=r"\blist\b"):
        surrogate.posterior([[1.0]])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num_samples"):
        surrogate.sample_paths(2.5)  # pyright: ignore[reportArgumentType]
