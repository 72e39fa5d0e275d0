"""Seconds of a processor and counted operations, of contenders that run in turns."""

import math
import time
from collections.abc import Callable, Mapping

from laplace_sampling.networks.resources import Operations

__all__ = ["operations_of", "turns"]


# Seconds of a timing at least: what takes less is repeated, as clocks of processors may tick a hundred times a second.
_LEAST = 0.05


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
