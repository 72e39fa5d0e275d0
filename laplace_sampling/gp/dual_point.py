r"""An iterate of Newton's method in observation space, of the mode `θ̄ = A⁻¹Φᵀa`.

The objective of the linear model, `Σ_i ℓ(y_i, h_i) + ½ θᵀAθ`, is `Σ_i ℓ(y_i, h_i) + ½ aᵀ(h − o)` for weights
`θ = A⁻¹Φᵀa`, whose outputs are `h = o + ΦA⁻¹Φᵀa`: outputs and coefficients are all that a step changes.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.solvers.line_search import halve_until_accepted


@dataclass(frozen=True)
class DualPoint:
    """Coefficients and the outputs that they give.

    Attributes:
        model: the linear model on the training data.
        coefficients: `a`, `[N, C]`.
        outputs: `h`, `[N, C]`.
    """

    model: LinearModel
    coefficients: Float[Tensor, "N C"]
    outputs: Float[Tensor, "N C"]

    @property
    def change(self) -> Float[Tensor, "N C"]:
        """`h − o`."""
        return self.outputs - self.model.offset.double()

    @cached_property
    def value(self) -> float:
        """The objective."""
        loss = float(self.model.likelihood.loss(self.outputs, self.model.targets).sum())
        return loss + 0.5 * float((self.coefficients * self.change).sum())

    @cached_property
    def slope(self) -> Float[Tensor, "N C"]:
        """`∂ℓ/∂h`."""
        return self.model.likelihood.gradient(self.outputs, self.model.targets)

    @property
    def residual(self) -> float:
        """`‖a + ∂ℓ/∂h‖`, zero at the mode."""
        return float((self.coefficients + self.slope).norm())

    @property
    def relative_residual(self) -> float:
        """The residual relative to that of zero weights."""
        return self.residual / max(float(self.initial_slope.norm()), 1e-300)

    @property
    def initial_slope(self) -> Float[Tensor, "N C"]:
        """`∂ℓ/∂h` of zero weights."""
        return self.model.likelihood.gradient(self.model.offset.double(), self.model.targets)

    @property
    def newton_target(self) -> Float[Tensor, "N C"]:
        """`b = B(h − o) − ∂ℓ/∂h`, by which Newton's method takes `a` to `b − L(I + S)⁻¹LᵀK b`."""
        return self.model.likelihood.curvature(self.outputs, self.change, self.model.targets) - self.slope

    def descended(self, step: Float[Tensor, "N C"], change: Float[Tensor, "N C"]) -> "tuple[DualPoint, float] | None":
        """The point after a step that is halved until the objective goes down, and the length; `None` if it never does.

        Args:
            step: of the coefficients.
            change: of the outputs.
        """

        def attempt(length: float) -> tuple[DualPoint, float] | None:
            coefficients, outputs = self.coefficients + length * step, self.outputs + length * change
            point = replace(self, coefficients=coefficients, outputs=outputs)
            # At the mode values differ by rounding only.
            return (point, length) if point.value <= self.value + 1e-13 * abs(self.value) else None

        return halve_until_accepted(attempt)
