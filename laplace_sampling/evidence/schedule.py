"""How accurate a round of `fit_path` is, and by how many probes; its "problems" are those of `fixed_point`."""

import math
from dataclasses import dataclass

__all__ = ["PROBES", "Schedule"]

# Probes of the last round, to begin with: each of them uses the Krylov spaces of all others. Six take 4,230 passes on
# the problems and 24 take 5,640, at an error of 0.008.
PROBES = 12
# The largest factor by which the probes of a round are multiplied for the next, because the error that asks for them is
# an estimate. Half and twice have no effect on the problems, where twelve probes are enough.
_MORE_PROBES = 3


@dataclass
class Schedule:
    """The accuracy and the number of probes of a round: more of both as rounds settle."""

    targets: list[float]
    max_probes: int
    max_basis: int | None
    level: int = 0
    _last_probes: int = PROBES

    @property
    def last(self) -> bool:
        return self.level == len(self.targets) - 1

    @property
    def target(self) -> float:
        return self.targets[self.level]

    @property
    def wished(self) -> int:
        return min(self._last_probes if self.last else 2 * (self.level + 1), self.max_probes)

    @property
    def num_probes(self) -> int:
        # A quarter of the basis for a block of probes leaves room for a few steps.
        return self.wished if self.max_basis is None else min(self.wished, self.max_basis // 4)

    @property
    def least_passes(self) -> float:
        """Passes that a round takes at least: its probes twice, an expansion and a mode."""
        return 2 * self.num_probes + 3.0

    def add_probes(self, error: float) -> None:
        # The error goes down as the root of the probes.
        factor = min(max(error / self.targets[-1], 1) ** 2, _MORE_PROBES)
        self._last_probes = math.ceil(self._last_probes * factor)

    def refine(self) -> None:
        self.level = min(self.level + 1, len(self.targets) - 1)
