import copy
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from laplace_sampling import Evidence, LinearisedLaplace

mpl.use("Agg")


@pytest.fixture(scope="session")
def tuned() -> Callable[..., LinearisedLaplace]:
    """A fit of hyperparameters to targets that a network with other weights gives, with noise."""

    def fit(likelihood: Any = "regression", outputs: int = 1, **settings: Any) -> LinearisedLaplace:
        torch.manual_seed(0)
        x = torch.randn(40, 2, dtype=torch.float64)
        model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
        other = copy.deepcopy(model)
        with torch.no_grad():
            for weight in other.parameters():
                weight += 0.5 * torch.randn_like(weight)
            y = other(x) + 0.1 * torch.randn(40, outputs, dtype=torch.float64)
        la = LinearisedLaplace(model, likelihood, method="exact", **settings)
        return la.fit_hyperparameters([(x, y)], criterion=Evidence(max_steps=100), tolerance=0.1, progress=False)

    return fit


@pytest.fixture(autouse=True)
def figures_are_closed_and_settings_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No plot shows anything or changes the settings of matplotlib."""

    def show(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plot called `plt.show`")

    monkeypatch.setattr(plt, "show", show)
    before = mpl.rcParams.copy()
    yield
    assert dict(mpl.rcParams) == dict(before)
    plt.close("all")
