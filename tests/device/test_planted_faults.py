"""A tensor on the wrong device is found, whatever room of the package the mistake is in."""

import pkgutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import make_case
from pretended_device import pretended_device

from laplace_sampling import LinearisedLaplace

Function = Callable[..., Any]


def on_cpu(function: Function, device: torch.device) -> Function:
    """A mistake: what is computed on the device is put on the CPU."""
    return lambda *args, **kwargs: function(*args, **kwargs).cpu()


def on_device(function: Function, device: torch.device) -> Function:
    """A mistake: indices of the data are made on the device."""
    return lambda *args, **kwargs: function(*args, **kwargs).to(device)


def not_placed(function: Function, device: torch.device) -> Function:
    """A mistake: inputs are not moved to the network."""
    return lambda x, *args: x


def unmoved_mask(function: Function, device: torch.device) -> Function:
    """A mistake: a mask of the device selects indices of the CPU."""
    return lambda indices, mask: indices[mask]


# In each room a function, by its name where it is used, a mistake, and the method of a fit that meets it.
FAULTS: dict[str, tuple[str, Function, str]] = {
    "solvers": ("laplace_sampling.solvers.operator.normal", on_cpu, "stochastic"),
    "data": ("laplace_sampling.linear_model.linear_model.LinearModel.targets_of", on_cpu, "kfac"),
    "networks": ("laplace_sampling.linear_model.network_features.place", not_placed, "auto"),
    "linear_model": ("laplace_sampling.predictions.left_out_labels.some_of", on_device, "kfac"),
    "likelihoods": ("laplace_sampling.likelihoods.categorical.Categorical.curvature", on_cpu, "krylov"),
    "predictions": ("laplace_sampling.linear_model.linear_model.chosen", unmoved_mask, "kfac"),
}


@pytest.mark.parametrize("room", FAULTS)
def test_a_planted_fault_is_found(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mistake, method = FAULTS[room]
    case = make_case("classification")
    data = [(case.x.repeat(5, 1), case.given[1].repeat(5))]

    def fit() -> None:
        la = LinearisedLaplace(case.model.to(device), "classification", method=method, num_samples=2)
        la.fit_hyperparameters(data, max_steps=1, num_samples=2, tolerance=0.2, progress=False)

    with pretended_device() as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setattr(path, mistake(pkgutil.resolve_name(path), device))
        with pytest.raises(RuntimeError, match="cpu"):
            fit()
        monkeypatch.undo()
        fit()
