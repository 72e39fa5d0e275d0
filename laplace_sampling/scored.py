"""`ScoredModel`: how well networks predict, from their training data alone, so that one of them can be chosen."""

import math
import warnings
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.evidence.network_evidence import DECADES, best_network_evidence
from laplace_sampling.fitted import FittedModel
from laplace_sampling.linear_model.features import SomeFeatures, some_of
from laplace_sampling.linear_model.tangent_model import TangentModel
from laplace_sampling.methods.fit import Fit
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.networks.subnetwork import of_some_weights
from laplace_sampling.on_training_data import deviations_of, enough
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import covariance_of
from laplace_sampling.predictions.leave_one_out import (
    MOST_LEVERAGE,
    left_out_log_probs,
    root_of,
    sampling_bias,
    without_datum,
)
from laplace_sampling.predictions.model_score import Score, summary_of
from laplace_sampling.solvers.checks import check_whole
from laplace_sampling.solvers.solver import ConvergenceWarning


class ScoredModel(FittedModel):
    """A fitted model that may be compared with others."""

    @solver_call
    def score(self, kind: str = "evidence", *, num_data: int = 1000) -> Score:
        r"""How good the network is, by its training data alone: in nats for each datum, larger for a better one.

        Scores of networks of any architecture that were fitted to the same data can be compared; `compare` does.

        A datum without a target does not count, and one with some missing counts as one datum.

        - `"evidence"`: `log p(y)/N` by Laplace's approximation at the network's own weights and outputs, with the
          precisions of prior and noise at their maximum (`evidence.network_evidence`). `log_marginal_likelihood()` is
          that of the linear model at its mode, which ranks networks less well.
        - `"loo"`: the mean of `log p(y_i | y_{−i})`, each datum predicted without it: around `f_i + V_i^{−i} ∂ℓ_i/∂f`,
          where a Newton step from the network's output `f_i` ends, with the covariance
          `V_i^{−i} = V_i (I − B_i V_i)⁻¹`; with the scale and temperature of predictions. It is exact for a linear
          model with Gaussian noise at its minimum, and asks for a network that is at a minimum of the loss with weight
          decay: the step is too long for others (`predictions.leave_one_out`). Covariances from few samples are too
          noisy where a datum decides its own prediction: a `ConvergenceWarning` says so.

        Neither sees that labels are learnt by heart: networks have seen them, and where they are certain of all of them
        the curvature of the loss vanishes (`docs/decisions.md`). Held-out data do.

        Args:
            kind: which.
            num_data: of `"loo"`, random training data that are left out, at most; they depend on the seed only. It
                takes a JVP of each for every sample, or a VJP for every output where covariances are in closed form.

        Raises:
            NotFittedError: before a fit, or for a posterior that was loaded without its data.
            ValueError: for another kind; if no datum that is looked at has a target.
        """
        if not isinstance(kind, str):
            raise TypeError(
                f'`score(kind)` takes "evidence" or "loo", but got a {type(kind).__name__}: the score is of the '
                "training data. Held-out data are scored by `la.predict(x).log_prob(y)`."
            )
        if kind not in ("evidence", "loo"):
            raise ValueError(f'`score(kind={kind!r})` is not known; use "evidence" or "loo".')
        check_whole("`score(num_data=...)`", num_data, 1)
        fit, tangent = self._with_data("score")
        some = of_some_weights(self.network)
        with self.settings.processes.shared_call():
            if kind == "loo":
                return replace(self._left_out_score(fit, tangent, num_data), of_some_weights=some)
            alpha, evidence = best_network_evidence(
                fit.model, fit.prior, fit.task.trained_weights, lambda prior: fit.at(prior).traces(DECADES)
            )
        num, nothing = fit.model.num_data, torch.zeros(0)
        value, error = (evidence.value - tangent.log_scale) / num, evidence.standard_error / num
        targets = summary_of(_targets(fit, tangent), in_order=False)
        size = fit.model.features.num_data
        return Score(kind, value, error, num, nothing, nothing.long(), alpha, size, fit.approximate, targets, some)

    def _left_out_score(self, fit: Fit, tangent: TangentModel, num_data: int) -> Score:
        posterior = self._require("score").posterior
        features, model, calibration = fit.model.features, fit.model, posterior.calibration
        num = min(num_data, features.num_data, enough(fit.task.num_samples * features.num_outputs))
        some = some_of(features, num, None if tangent.in_order else self.settings.seed)
        some = model.with_targets(some)
        if not len(some):
            raise ValueError("`score`: no training datum that was looked at has a target.")
        root, most, noisy = self._root(fit, posterior, some)
        y, f, at = model.targets[some], model.network_outputs[some], fit.ggn.outputs_of(some)
        mean, rows = without_datum(model.likelihood, y, f, root, most, at)
        T = calibration.temperature
        log_probs = left_out_log_probs(
            calibration.likelihood(model.likelihood), y, mean / T, rows * math.sqrt(calibration.scale) / T
        )
        if tangent.weights is not None:
            log_probs = log_probs + tangent.weights[some].to(log_probs).log().where(model.observed(y), 0).sum(1)
        # A datum of weight two counts as two.
        weights = model.likelihood.weights(y).to(log_probs)
        score = Score.of("loo", (log_probs * weights / weights.mean()).cpu(), some, fit.alpha, features.num_data)
        if noisy and (bias := sampling_bias(model.likelihood, y, rows, at)) > score.standard_error:
            warnings.warn(
                f'`score("loo")`: noise of the samples changes it by something like {bias:.2g} nats for each datum, '
                f"more than its standard error of {score.standard_error:.2g}. Raise `num_samples`, or use "
                '`method="exact"` or "subset", or the score "evidence".',
                ConvergenceWarning,
                stacklevel=4,
            )
        return replace(
            score, without_correlations=fit.approximate, targets=summary_of(_targets(fit, tangent), in_order=True)
        )

    def _root(self, fit: Fit, posterior: Posterior, some: Tensor) -> tuple[Float[Tensor, "m n C"], float, bool]:
        """`D` with the covariance `DᵀD` of the outputs of each datum, the largest leverage, and if it is of samples."""
        features = SomeFeatures(fit.model.features, some)
        function = covariance_of(posterior, fit, features)
        if function is not None and features.num_outputs <= fit.task.num_samples:
            return root_of(function.blocks()), MOST_LEVERAGE if fit.approximate else 1 - 1e-9, False
        samples = self._drawn("score").posterior.samples
        return deviations_of(fit.model.features, samples, some) / math.sqrt(len(samples)), MOST_LEVERAGE, True


def _targets(fit: Fit, tangent: TangentModel) -> Tensor:
    """The targets of all data, in their own units: without the weights that a fit multiplies them by."""
    model = fit.model
    targets = model.likelihood.unweighted_targets(model.targets)
    # A fit may hold all rows where the tangent model holds those of a part.
    return targets if tangent.weights is None else targets / tangent.weights
