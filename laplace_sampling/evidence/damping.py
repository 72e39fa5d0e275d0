"""Steps along the changes of a fixed-point map, shorter where they oscillate."""

from torch import Tensor


class DampedSteps:
    """Half of the last length where a change points back, twice of it where it does not, at most the change itself.

    Attributes:
        length: of the last step, relative to the change.
        direction: scalar product of the last two changes.
    """

    def __init__(self) -> None:
        self.length, self.direction = 1.0, 0.0
        self.last: Tensor | None = None

    def step(self, change: Tensor) -> Tensor:
        """The next step, for a change of the map."""
        self.direction = 0.0 if self.last is None else float((self.last * change).sum())
        self.length = 0.5 * self.length if self.direction < 0 else min(1.0, 2 * self.length)
        self.last = change
        return self.length * change
