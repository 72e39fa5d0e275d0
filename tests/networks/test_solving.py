"""Signals and other threads wait for products."""

import os
import random
import signal
import threading

import pytest
import torch
from torch import nn

from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.solving import LOCK, exclusive


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == before
    assert (exclusive._depth, exclusive._handlers, exclusive._received) == (0, {}, [])
    assert LOCK.acquire(blocking=False)
    LOCK.release()


def test_signals_wait_for_the_end_of_the_outermost_context() -> None:
    done = []

    def product() -> None:
        with exclusive:
            with exclusive:
                ctrl_c()
                ctrl_c()
                done.append("inner")
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        product()
    assert done == ["inner", "outer"]


def test_after_an_error_the_signal_is_handled_as_well() -> None:
    def product() -> None:
        with exclusive:
            ctrl_c()
            raise ValueError("in the product")

    with pytest.raises(KeyboardInterrupt) as caught:
        product()
    assert isinstance(caught.value.__context__, ValueError)


def test_the_handler_of_the_user_is_called_once_later() -> None:
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with exclusive:
            ctrl_c()
            assert seen == []
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_an_interrupt_at_any_moment_leaves_nothing_behind() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before, interrupts, generator = signal.signal(signal.SIGALRM, interrupt), 0, random.Random(0)
    try:
        for _ in range(2000):
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-6, 4e-5))
                for _ in range(10):
                    with exclusive:
                        pass
            except KeyboardInterrupt:
                interrupts += 1
            assert exclusive._depth == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 100


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
