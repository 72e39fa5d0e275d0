"""A limit of the processor's time."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["time_limit"]


@contextmanager
def time_limit(seconds: float, error: type[BaseException]) -> Iterator[None]:
    """Raises an error after so many seconds of the processor, in the main thread.

    Other processes make no difference.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise error(f"it took more than {seconds:.3g} s of the processor")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
