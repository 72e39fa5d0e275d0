"""The record of one step of a fit of hyperparameters."""

from dataclasses import asdict, dataclass, replace


class StopFit(Exception):
    """Raised by a `callback` of `fit_hyperparameters`, it ends the fit without an error, as `break` ends a loop.

    What was fitted before is kept, and `history_` has the steps that were made. Any other exception ends the fit
    likewise, and goes on to the caller.
    """


@dataclass(frozen=True)
class Step:
    """A step of `fit_hyperparameters`. Vectors have one entry a group of the prior; losses are sums over the data.

    A field is `None` where the likelihood or the method has no such quantity.

    Attributes:
        step: counted from 1.
        prior_precision: `α` to which all other values of the step belong: the one from which a step of EM starts, or
            the one that a step finds on a curve along `α`; `new_prior_precision` is that of the next step.
        noise_precision: `b` to which they belong, of a Gaussian likelihood.
        effective_dimension: `γ` at this `α` and `b`; `effective_dimension_se` is its standard error, of methods that
            estimate it.
        mode_norm: `‖θ̄‖²` in the scaled coordinates of the prior.
        loss: `Σ_i ℓ(y_i, h(θ̄, x_i))`, or that of the network where no mode is needed; `network_loss` is the same sum
            for the network itself.
        mode_residual: norm of the gradient at `θ̄`, relative to that at zero, where the mode is sought by iterations.
        sample_residual: largest residual of a sample, of methods that sample in each step.
        passes: Jacobian products, in units of all data and one vector.
        seconds: wall time of the step.
    """

    step: int
    prior_precision: list[float]
    new_prior_precision: list[float]
    effective_dimension: list[float]
    mode_norm: list[float] | None
    loss: float
    network_loss: float
    passes: float
    seconds: float
    noise_precision: list[float] | None = None
    effective_dimension_se: list[float] | None = None
    mode_residual: float | None = None
    sample_residual: float | None = None

    def to_dict(self) -> dict[str, float]:
        """Numbers by name, as loggers take them: those of several groups with `/0`, `/1`, … behind the name.

        Fields that are `None` are left out.
        """
        flat: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, list) and len(value) > 1:
                flat |= {f"{name}/{group}": number for group, number in enumerate(value)}
            elif value is not None:
                flat[name] = value[0] if isinstance(value, list) else value
        return flat

    def shifted(self, loss: float) -> "Step":
        """Returns the step with a constant added to the losses."""
        return replace(self, loss=self.loss + loss, network_loss=self.network_loss + loss)
