"""Seconds of a processor and counted operations, of contenders that run in turns; and a limit of time."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from laplace_sampling.networks.resources import Operations

__all__ = ["OutOfTime", "limited", "operations_of", "turns"]


# Seconds of a timing at least: what takes less is repeated, as clocks of processors may tick a hundred times a second.
_LEAST = 0.05


class OutOfTime(BaseException):
    """Raised by `limited`; as with Ctrl-C, nothing but its caller takes it for an error."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `OutOfTime` after so many seconds of the processor, in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"{seconds:.3g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def turns(contenders: Mapping[str, Callable[[], object]], repeats: int = 1) -> dict[str, float]:
    """The least seconds of the processor that each takes, as they run one after the other, so many times."""
    least: dict[str, float] = {}
    for _ in range(repeats):
        for name, run in contenders.items():
            started, runs, seconds = time.process_time(), 0, 0.0
            while seconds < _LEAST:
                run()
                runs, seconds = runs + 1, time.process_time() - started
            least[name] = min(seconds / runs, least.get(name, math.inf))
    return least


def operations_of(run: Callable[[], object]) -> float:
    """Floating-point operations of matrix products and convolutions, those of decompositions not among them."""
    with Operations() as counted:
        run()
    return counted.count
