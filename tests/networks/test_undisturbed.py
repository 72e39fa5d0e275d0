"""Signals and other threads wait for products."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from laplace_sampling.networks import undisturbed as module
from laplace_sampling.networks.held_module import solving
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.undisturbed import LOCK, handle_signals, signals_wait, undisturbed


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == before
    waiting = module._waiting
    assert (waiting.contexts, waiting.products, waiting.received) == (0, 0, [])
    assert LOCK.acquire(blocking=False)
    LOCK.release()


def test_signals_wait_for_the_end_of_the_outermost_context() -> None:
    done = []

    def product() -> None:
        with undisturbed:
            with undisturbed:
                ctrl_c()
                ctrl_c()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        product()
    assert done == ["inner", "outer"]


def test_after_an_error_the_signal_is_handled_as_well() -> None:
    def product() -> None:
        with undisturbed:
            ctrl_c()
            raise ValueError("in the product")

    with pytest.raises(KeyboardInterrupt) as caught:
        product()
    assert isinstance(caught.value.__context__, ValueError)


def test_the_handler_of_the_user_is_called_once_later() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with undisturbed:
            ctrl_c()
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


class Entered:
    """A context whose `__enter__` is interrupted before it is through, and its `__exit__`."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __enter__(self) -> None:
        ctrl_c()
        self.log.append("entered")

    def __exit__(self, *_: object) -> None:
        ctrl_c()
        self.log.append("left")


def test_between_products_signals_wait_for_contexts_only() -> None:
    log: list[str] = []

    def call() -> None:
        with signals_wait:
            with Entered(log):
                log.append("inside")
            log.append("after")
            with undisturbed:
                log.append("product")
            log.append("not reached")

    def between() -> None:
        with signals_wait:
            ctrl_c()
            log.append("not reached")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert log == ["entered", "inside", "left", "after", "product"]
    with pytest.raises(KeyboardInterrupt):
        between()
    assert log[-1] == "product"


class Interrupted(nn.Module):
    """Counts its calls, and gets Ctrl-C in one of them."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.layer, self.at = nn.Linear(3, 2), call
        self.count = SimpleNamespace(calls=0)  # attributes are put back, and what is in lists

    def forward(self, x: Tensor) -> Tensor:
        self.count.calls += 1
        if self.count.calls == self.at:
            ctrl_c()
        return self.layer(x)


def test_a_long_product_ends_at_its_next_pass_through_the_network() -> None:
    model = Interrupted(3).double()
    network = Linearisation(model)
    network.batching.max_rows = 2
    x, v = torch.ones(40, 3, dtype=torch.float64), torch.ones(1, network.num_parameters, dtype=torch.float64)
    with pytest.raises(KeyboardInterrupt):
        network.jvp(x, v)
    assert model.count.calls == 3
    assert model.training
    expected = network.jvp(x, v)
    assert model.count.calls > 20
    assert torch.equal(network.jvp(x, v), expected)


@pytest.mark.parametrize("context", [lambda: undisturbed, solving])
def test_the_main_thread_can_be_interrupted_while_it_waits(context) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with undisturbed:
            held.set()
            done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    killer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    killer.start()
    try:
        with pytest.raises(KeyboardInterrupt), context():
            pytest.fail("the context was entered")
    finally:
        done.set()
        thread.join()
        killer.join()


def test_signals_are_not_handled_by_other_threads() -> None:
    waiting = []

    def product() -> None:
        with undisturbed:
            ctrl_c()
            thread = threading.Thread(target=handle_signals)
            thread.start()
            thread.join()
            waiting.extend(module._waiting.received)

    with pytest.raises(KeyboardInterrupt):
        product()
    assert waiting == [signal.SIGINT]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_process_that_is_forked_beside_a_product_computes() -> None:
    network = Linearisation(nn.Linear(3, 2).double())
    x, v = torch.ones(4, 3, dtype=torch.float64), torch.ones(1, network.num_parameters, dtype=torch.float64)
    expected = network.jvp(x, v)
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            network.jvp(x, v)

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if child == 0:  # a failure must not run the tests again
                os._exit(0 if torch.equal(network.jvp(x, v), expected) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        thread.join()
