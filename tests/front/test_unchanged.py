"""What neither a fit nor an error changes."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from cases import CASES, make_case
from flat_settings import QUICK, fitted, laplace_of, loader
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import (
    ConvergenceWarning,
)

# With buffers, with kernels that depend on the mode, with several outputs, and with weights that are frozen.
OFTEN = ("classification", "conv_batch_norm", "attention", "multi_task", "frozen_body")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in OFTEN)) for name in CASES])
def test_network_is_unchanged_by_everything(name: str) -> None:
    case = make_case(name)
    case.model.train()
    list(case.model.modules())[-1].eval()
    before = snapshot(case.model)
    la = laplace_of(case.model, case.likelihood, method="sgd", solver=QUICK, num_samples=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        la.fit_hyperparameters(loader(case), max_steps=2, num_samples=2, progress=False)
    la.predict(case.x)
    la.sample(2)
    la.state_dict()
    assert_unchanged(case.model, before)


class Bomb(nn.Module):
    """Raises in the forward pass number `fuse`."""

    def __init__(self, fuse: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
        self.fuse = SimpleNamespace(left=fuse)  # attributes are put back, and what is in lists

    def forward(self, x: Tensor) -> Tensor:
        self.fuse.left -= 1
        if self.fuse.left <= 0:  # and from then on: what fails once only is tried another way
            raise RuntimeError("boom")
        return self.body(x)


@pytest.mark.parametrize("fuse", [1, 3, 4, 8, 30, 100])
def test_after_an_exception_the_network_is_unchanged_and_nothing_is_lost(fuse: int) -> None:
    case = make_case("classification_many_data")
    model = Bomb(10**9).double().train()
    la = laplace_of(model, "classification", method="sgd", solver=QUICK, num_samples=4)
    la.fit(loader(case), progress=False)
    expected = la.predict(case.x).samples
    before = snapshot(model)
    model.fuse.left = fuse
    with pytest.raises(RuntimeError, match="boom"):
        la.fit_hyperparameters(loader(case), progress=False)
    assert_unchanged(model, before)
    model.fuse.left = 10**9
    assert torch.equal(la.predict(case.x).samples, expected)


def test_inference_mode_around_everything_and_no_gradient() -> None:
    case = make_case("classification_many_data")
    expected = fitted(case, method="sgd", solver=QUICK).predict(case.x)
    with torch.inference_mode():
        la = fitted(case, method="sgd", solver=QUICK)
        assert_close(la.predict(case.x).samples, expected.samples)
        assert la.sample(2).isfinite().all()
    assert not expected.samples.requires_grad


def test_a_model_that_was_moved_after_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("classification")
    la = fitted(case, num_samples=2)
    monkeypatch.setattr(type(la.network), "device", torch.device("cuda:0"))
    for call in (lambda: la.predict(case.x), lambda: la.sample(1), la.log_marginal_likelihood):
        with pytest.raises(ValueError, match="cuda:0"):
            call()
