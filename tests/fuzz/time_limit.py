"""A limit of the processor's time, or of the time that passes."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["time_limit"]


@contextmanager
def time_limit(seconds: float, error: type[BaseException], *, wall: bool = False) -> Iterator[None]:
    """Raises an error after so many seconds of the processor, in the main thread.

    Other processes make no difference, unless seconds are those of the clock on the wall.
    """
    number, timer = (signal.SIGALRM, signal.ITIMER_REAL) if wall else (signal.SIGPROF, signal.ITIMER_PROF)
    of = "" if wall else " of the processor"

    def stop(number: int, frame: FrameType | None) -> None:
        raise error(f"it took more than {seconds:.3g} s{of}")

    before = signal.signal(number, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
