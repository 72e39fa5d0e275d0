"""Ctrl-C at any moment: the model and the earlier posterior stay, and so do steps that were finished."""

import random
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import make_case
from flat_settings import QUICK, laplace_of, loader
from snapshot import assert_unchanged, snapshot

from laplace_sampling import ConvergenceWarning, Evidence, LinearisedLaplace, NotFittedError, Step
from laplace_sampling.linear_model import sampling
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.solving import precisions


class Moments:
    """Ctrl-C at a moment that is counted, not timed: Python handles signals as functions start and C calls end."""

    def __init__(self, last: float = float("inf")) -> None:
        self.number, self.last = 0, last

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return"):
            self.number += 1
            if self.number == self.last:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    def during(self, call: Callable[[], object]) -> bool:
        """Whether the call was interrupted."""
        sys.setprofile(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False


def state_of_torch() -> tuple[Any, ...]:
    return (
        torch.autograd.forward_ad._current_level,
        torch._C._functorch.peek_interpreter_stack(),
        torch._C._len_torch_function_stack(),
        torch._C._is_fwd_grad_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.compiler._stance.stance if hasattr(torch.compiler, "_stance") else None,
        precisions(),
        signal.getsignal(signal.SIGINT),
        warnings.filters[:],
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
# An interrupt while a generator is closed is told and lost: Python has nowhere to raise it.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <generator:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("regression", "krylov"),
        ("classification_many_data", "exact"),
        ("classification", "kfac"),
        pytest.param("regression", "sgd", marks=pytest.mark.nightly),
        pytest.param("regression", "dual", marks=pytest.mark.nightly),
    ],
)
def test_interrupts_at_random_moments(name: str, method: str) -> None:
    case, moments = make_case(name), random.Random(0)
    case.model.train()
    list(case.model.modules())[-1].eval()
    solver = QUICK if method == "sgd" else None
    la = laplace_of(case.model, case.likelihood, method=method, solver=solver, num_samples=4)
    la.fit(loader(case), progress=False)
    expected, generator = la.predict(case.x), torch.get_rng_state()
    expected_stddev = expected.stddev
    before, torch_before = snapshot(case.model), state_of_torch()
    steps: list[Step] = []
    calls = {
        "fit": lambda: la.fit(loader(case), progress=False),
        "tune": lambda: la.fit_hyperparameters(
            loader(case), criterion=Evidence(max_steps=2), callback=steps.append, progress=False
        ),
        "predict": lambda: la.predict(case.x).stddev,
    }
    numbers = {}
    for what, call in calls.items():
        fitted, counter = la._fitted, Moments()
        counter.during(call)
        numbers[what], la._fitted = counter.number, fitted
    for trial in range(17):
        what = list(calls)[trial % 3]
        steps.clear()
        fitted = la._fitted
        interrupted = Moments(moments.randint(1, numbers[what])).during(calls[what])
        assert_unchanged(case.model, before)
        assert state_of_torch() == torch_before
        if not interrupted:  # the count of events differs by a few
            la._fitted = fitted
        if interrupted and steps:
            assert la.history_ == steps
        again = la.predict(case.x)
        assert torch.equal(again.samples, expected.samples)
        assert torch.equal(again.stddev, expected_stddev)
        assert torch.equal(torch.get_rng_state(), generator)


def interrupted_after(steps: int, seen: list[Step]) -> Callable[[Step], None]:
    def callback(step: Step) -> None:
        seen.append(step)
        if len(seen) == steps:
            raise KeyboardInterrupt

    return callback


@pytest.mark.parametrize("method", ["sgd", "krylov", "dual", "exact", "kfac"])
@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
def test_an_interrupted_fit_shows_its_steps_until_the_next_one(method: str) -> None:
    case, options = make_case("regression"), {"tolerance": 1e-3, "progress": False}
    la = laplace_of(case.model, "regression", method=method, solver=QUICK if method == "sgd" else None, num_samples=4)
    with pytest.raises(NotFittedError, match="history_"):
        la.history_  # noqa: B018
    seen: list[Step] = []
    with pytest.raises(KeyboardInterrupt):
        la.fit_hyperparameters(loader(case), callback=interrupted_after(1, seen), **options)
    assert la.history_ == seen
    with pytest.raises(NotFittedError):
        la.predict(case.x)
    recorded: list[Step] = []
    la.fit_hyperparameters(loader(case), criterion=Evidence(max_steps=2), callback=recorded.append, **options)
    assert la.history_ == la._fitted.posterior.history == recorded
    alpha, again = la.prior_precision_, []
    with pytest.raises(KeyboardInterrupt):
        la.fit_hyperparameters(loader(case, 4), callback=interrupted_after(1, again), **options)
    assert la.history_ == again
    assert torch.equal(la.prior_precision_, alpha)
    la.load_state_dict(la.state_dict())
    assert la.history_ == recorded
    la.fit(loader(case), progress=False)
    assert la.history_ == []


@pytest.mark.parametrize(
    ("method", "call"),
    [("krylov", "fit_hyperparameters"), ("dual", "fit"), ("dual", "fit_hyperparameters"), ("sgd", "fit")],
)
@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
def test_groups_of_samples_that_are_drawn_are_kept(
    method: str, call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case, groups = make_case("regression"), []
    settings = {"solver": QUICK if method == "sgd" else None, "num_samples": 6}
    la, whole = (laplace_of(case.model, "regression", method=method, **settings) for _ in range(2))
    monkeypatch.setattr(Method, "rows", lambda *_, **__: 2)
    draw = sampling.sample_posterior
    interrupted = 3

    def counted(ggn: Any, prior: Any, draws: Draws, *others: Any, **settings: Any) -> Any:
        if draws.stream == Stream.SAMPLES:
            groups.append(draws.first)
            if len(groups) == interrupted:
                raise KeyboardInterrupt
        return draw(ggn, prior, draws, *others, **settings)

    getattr(whole, call)(loader(case), progress=False)
    monkeypatch.setattr(sampling, "sample_posterior", counted)
    with pytest.warns(ConvergenceWarning, match=r"\b4\b") as caught:
        getattr(la, call)(loader(case), progress=False)
    assert "Give" not in str(caught[0].message)  # advice on solves that would not converge
    assert groups == [0, 2, 4]  # no other way to solve is tried
    assert not la.converged_
    assert "(4 samples" in str(la)
    assert torch.equal(la.samples_, whole.samples_[:4])
    assert torch.equal(la.predict(case.x).samples, whole.predict(case.x, num_samples=4).samples)
    la.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert torch.equal(loaded.samples_, la.samples_)
    groups.clear()
    interrupted = 1
    with pytest.raises(KeyboardInterrupt):
        getattr(la, call)(loader(case), progress=False)
    assert torch.equal(la.samples_, whole.samples_[:4])
    interrupted = 0
    la.fit(loader(case), progress=False, warm_start=True)
    assert len(la.samples_) == 6
