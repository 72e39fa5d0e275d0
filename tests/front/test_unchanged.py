"""What neither a fit nor an error changes."""

import warnings

import pytest
import torch
from cases import CASES, make_case
from flat_settings import QUICK, fitted, laplace_of, loader
from snapshot import assert_unchanged, snapshot
from torch.testing import assert_close

from laplace_sampling import ConvergenceWarning, Evidence

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
        la.fit_hyperparameters(loader(case), criterion=Evidence(max_steps=2, num_samples=2), progress=False)
    la.predict(case.x)
    la.sample(2)
    la.state_dict()
    assert_unchanged(case.model, before)


def test_inference_mode_around_everything_and_no_gradient() -> None:
    case = make_case("classification_many_data")
    expected = fitted(case, method="sgd", solver=QUICK).predict(case.x)
    with torch.inference_mode():
        la = fitted(case, method="sgd", solver=QUICK)
        assert_close(la.predict(case.x).samples, expected.samples)
        assert la.sample(2).isfinite().all()
    assert not expected.samples.requires_grad


def test_predictions_are_those_of_the_fit_whatever_becomes_of_the_model() -> None:
    case = make_case("classification")
    la = fitted(case, num_samples=2)
    expected = la.predict(case.x).samples
    with torch.no_grad():
        for p in case.model.parameters():
            p.add_(1.0)
    case.model.register_forward_hook(lambda *_: pytest.fail("the model was run"))
    assert torch.equal(la.predict(case.x).samples, expected)
    case.model._forward_hooks.clear()
    assert not torch.equal(la.fit(loader(case), progress=False).predict(case.x).samples, expected)


def test_a_weight_that_is_shared_and_changed_in_place_is_named() -> None:
    case = make_case("classification")
    name = next(name for name, _ in case.model.named_parameters())
    la = fitted(case, num_samples=2, parameters=[f"!{name}"])
    with torch.no_grad():
        case.model.get_parameter(name).add_(1.0)
    for call in (lambda: la.predict(case.x), lambda: la.sample(1), la.log_marginal_likelihood):
        with pytest.raises(ValueError, match=name):
            call()
    la.fit(loader(case), progress=False).predict(case.x)


def test_predictions_during_a_second_fit_are_those_of_the_first() -> None:
    case = make_case("classification")
    la = fitted(case, num_samples=2)
    expected, found = la.predict(case.x).samples, []
    with torch.no_grad():
        for p in case.model.parameters():
            p.add_(1.0)

    def callback(_: object) -> None:
        found.append(la.predict(case.x).samples)

    la.fit_hyperparameters(loader(case), callback=callback, progress=False)
    assert all(torch.equal(samples, expected) for samples in found)
    assert found
    assert not torch.equal(la.predict(case.x).samples, expected)
