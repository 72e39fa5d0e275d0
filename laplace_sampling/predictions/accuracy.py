"""How far predicted standard deviations of a fit are off, in numbers that are known without the exact posterior."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

__all__ = ["FEW_SAMPLES", "Accuracy"]

# Fewer samples deserve a word, and so does an error that is larger than theirs, `1/√(2K)`, 18 %: a definition.
FEW_SAMPLES = 16


@dataclass(frozen=True)
class Accuracy:
    """Relative errors of predicted standard deviations, by where they come from.

    Attributes:
        num_samples: `K`.
        solves: what solves leave: an error `ε` of the function of each sample, independent of the sample, adds to its
            variance, so that standard deviations grow by `ε²/2`; its product with `K` samples moves them by `ε/√K`.
        left_out: what data that were left out would change: of a random part of the data, by comparison with half of
            it; zero if all are there.
        approximate: whether the covariance is an approximation that leaves out correlations, which is in no number.
    """

    num_samples: int
    solves: float = 0.0
    left_out: float = 0.0
    approximate: bool = False

    @classmethod
    def of(cls, errors: Float[Tensor, " K"]) -> "Accuracy":
        """From the errors `ε` of the functions of samples, as a root mean square."""
        squared = float(errors.double().square().mean())
        return cls(len(errors), squared / 2 + math.sqrt(squared / len(errors)))

    @property
    def samples(self) -> float:
        """`1/√(2K)`, the standard error of a standard deviation from so many samples."""
        return 1 / math.sqrt(2 * self.num_samples)

    @property
    def unfinished(self) -> float:
        """What solves leave and data that were left out would change, together."""
        return math.hypot(self.solves, self.left_out)

    @property
    def matters(self) -> bool:
        """Whether that is more than the error of a few samples, or NaN."""
        return not self.unfinished <= 1 / math.sqrt(2 * FEW_SAMPLES)

    @property
    def total(self) -> float:
        """All of them together, which are independent."""
        return math.hypot(self.samples, self.solves, self.left_out)

    def __str__(self) -> str:
        parts = [f"{self.num_samples} samples {100 * self.samples:.2g} %"]
        parts += [f"solves {100 * self.solves:.2g} %"] if self.solves > 0 else []
        parts += [f"data left out {100 * self.left_out:.2g} %"] if self.left_out != 0 else []
        also = ", besides the correlations that the method leaves out" if self.approximate else ""
        return f"standard deviations of samples are good to about {100 * self.total:.2g} % ({', '.join(parts)}){also}"
