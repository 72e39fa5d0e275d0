"""What a part of the trial returns."""

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Report"]


@dataclass
class Report:
    """What a part of the trial found.

    Attributes:
        trials: how many were made.
        defects: one line each, with the seed or the example that repeats it.
        counts: of what is worth knowing and no defect, such as warnings.
        skipped: why the part was not run, if it was not.
    """

    trials: int = 0
    defects: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    skipped: str = ""

    def lines(self, part: str) -> list[str]:
        """For a terminal."""
        if self.skipped:
            return [f"{part}: skipped, {self.skipped}"]
        head = f"{part}: {self.trials} trials, {len(self.defects)} defects"
        counts = [f"    {number:5d} {what}" for what, number in sorted(self.counts.items())]
        return [head, *counts, *(f"  DEFECT {defect}" for defect in self.defects)]
