"""Predictions of classifications, by three links from logits to probabilities."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from laplace_sampling.data.batches import flattened
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.predictions.conformal import rounding
from laplace_sampling.predictions.prediction import SampledPrediction


@dataclass(frozen=True)
class ClassificationPrediction(SampledPrediction):
    """Predictions of a classification: categorical over an axis of the outputs, or Bernoulli for each output."""

    @property
    def logits(self) -> Float[Tensor, "N *C"]:
        """The network's own output."""
        return self.outputs

    @property
    def probs(self) -> Float[Tensor, "N *C"]:
        """Predictive probabilities with the default link, `probs_with("mc")`."""
        return self.probs_with("mc")

    def probs_with(self, link: str) -> Float[Tensor, "N *C"]:
        r"""Predictive probabilities `E[σ(f)]`, by one of three links.

        - `"mc"`: the mean of softmax (or sigmoid) over the samples `f ± φ(x) ζ_k` (thesis eq. 6.15).
        - `"probit"`: `σ(f / √(1 + (π/8) var f))`, MacKay's factor `π/8` for each logit (the paper prints `π/2`).
        - `"bridge"`: the mean of the Dirichlet of the Laplace bridge (Hobbhahn et al. 2022), after the Gaussian is
          conditioned on logits that sum to zero; categorical likelihoods only.
        """
        if link == "mc":
            return self._link(self._mirrored).mean(0)
        if link == "probit":
            return self._link(self.outputs / (1 + math.pi / 8 * self.variance).sqrt())
        if link == "bridge":
            return self._bridge()
        raise ValueError(f'`probs_with({link!r})` is not known; use "mc", "probit" or "bridge".')

    @property
    def _bound(self) -> Categorical | Bernoulli:
        bound = self.likelihood.bind(self._layout)
        assert isinstance(bound, Categorical | Bernoulli)
        return bound

    def _link(self, logits: Tensor) -> Tensor:
        flat = flattened(logits, logits.dim() - len(self._layout.shape))
        return self._bound.link(flat).reshape(logits.shape)

    def _bridge(self) -> Tensor:
        if not isinstance(self.likelihood, Categorical):
            raise ValueError(
                'The Laplace bridge of a single logit has mean sigmoid(f) whatever the variance; use "mc" or "probit".'
            )
        likelihood = self._bound
        assert isinstance(likelihood, Categorical)
        mean, variance = self._conditioned_on_zero_sum()
        num = mean.shape[-1]
        # Parameters of the Dirichlet that matches mean and variance of the logits.
        log_terms = mean + (-mean).logsumexp(-1, keepdim=True) - 2 * math.log(num)
        alpha = (1 - 2 / num + log_terms.exp()) / variance
        return likelihood.flat(alpha / alpha.sum(-1, keepdim=True)).reshape(self.outputs.shape)

    def _conditioned_on_zero_sum(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the logits given that those of a position sum to zero, as a Dirichlet's do."""
        outputs, draws = self._classes(self.outputs), self._classes(self.deviations)
        # From samples, cov(f, Σf) and var(Σf) need no C × C matrix.
        if self.function is not None:
            if outputs.shape[1] > 1:
                raise ValueError('The Laplace bridge of several positions is not there; use "mc" or "probit".')
            cross = self._blocks.sum(-1)[:, None]
            total_variance = cross.sum(-1, keepdim=True)
        else:
            total = draws.sum(-1, keepdim=True)
            cross, total_variance = (draws * total).mean(0), (total**2).mean(0)
        # Samples that are all zero have a sum of no variance.
        total_variance = total_variance.clamp_min(torch.finfo(cross.dtype).tiny)
        unconditional = self._classes(self.variance)
        mean = outputs - cross * outputs.sum(-1, keepdim=True) / total_variance
        variance = (unconditional - cross**2 / total_variance).clamp_min(1e-12 * unconditional + 1e-30)
        return mean, variance

    def _classes(self, f: Tensor) -> Float[Tensor, "*K N S c"]:
        """Logits with the classes last, by positions."""
        bound = self._bound
        assert isinstance(bound, Categorical)
        return bound.positions(flattened(f, f.dim() - len(self._layout.shape)))

    def prediction_set(self, level: float = 0.95) -> Bool[Tensor, "N *C"]:
        """Which classes belong to a set that contains the label with this probability.

        For labels of zero and one the set of each output is `[..., 2]`. After `calibrate_conformal` the probability is
        guaranteed for data like those that it saw, on average over inputs, and for each position or output by itself:
        the set has the classes that are no less probable than a threshold, and may be empty; it has all classes where
        these data are too few for the level, fewer than `q/(1 − q)`. Else the set has the most probable classes, up to
        and with that at which their probabilities reach the level.

        Raises:
            ValueError: for a level that is no probability; for predictions of fewer samples, or of another shape, than
                those that `calibrate_conformal` saw.
        """
        log_probs = self._class_log_probs
        conformal = self._conformal_at("prediction_set(level)", level, log_probs.shape[1])
        if conformal is None:
            ordered, order = log_probs.exp().sort(-1, descending=True)
            # A class belongs to the set if those before it do not reach the level.
            belongs = torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) - ordered < level)
        else:
            belongs = -log_probs <= conformal.largest(level).to(log_probs)[:, None]
        if isinstance(self._bound, Bernoulli):
            return belongs.reshape(*self.outputs.shape, 2)
        return self._bound.flat(belongs).reshape(self.outputs.shape)

    @cached_property
    def _class_log_probs(self) -> Float[Tensor, "N S c"]:
        """Log probabilities of each class, by positions; of both labels of zero and one."""
        logs = self._bound.log_probs(flattened(self._mirrored.double(), 2))
        return logs.logsumexp(0) - math.log(len(logs))

    def scores_of(self, targets: Tensor) -> Float[Tensor, "N S"]:
        if self._bound.is_soft(targets):
            raise ValueError(
                "`calibrate_conformal` needs labels, of which its guarantee is, but these targets are probabilities: "
                "draw a label of each, as by `torch.distributions.Categorical(probs).sample()`."
            )
        labels, given = self._bound.labels(targets)
        chosen = self._class_log_probs.gather(-1, labels[..., None].to(self.outputs.device))[..., 0]
        # A log probability moves by twice as much as the logits, at most.
        of_outputs, of_deviations = rounding(self.outputs)
        raised = 2 * (of_outputs + of_deviations * float(self.deviations.abs().max())) - chosen
        return raised.where(given.to(chosen.device), torch.nan)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the predictive probabilities, in nats: total uncertainty; of each datum, position or output."""
        return self._entropy(self.probs)

    @property
    def mutual_information(self) -> Tensor:
        """Entropy of the mean minus mean of the entropies over samples, in nats: what more data would remove."""
        return (self.entropy - self._entropy(self._link(self._mirrored)).mean(0)).clamp_min(0)

    @property
    def epistemic(self) -> Tensor:
        r"""How unlike the training data a datum is, or how likely wrong: larger for worse; shape as of `entropy`.

        The variance of the log-odds `m_c = f_t − f_c` between the most probable class `t` and the others, relative to
        their size, times the number of classes between which the prediction is undecided,

            exp(H) · Σ_c var(m_c) / Σ_c (1 + m_c²).

        For labels of zero and one, `m = f`. It is no probability and has no unit: it ranks inputs. The variance of
        logits itself grows with the size of the features, which is small for dark images, and mutual information
        vanishes where the network is certain, right or not; the ratio hardly changes where log-odds above one and their
        error bars are twice as large. See `docs/decisions.md` for what it was compared with.
        """
        if isinstance(self.likelihood, Categorical):
            outputs, draws = self._classes(self.outputs), self._classes(self.deviations)
            top = outputs.argmax(-1, keepdim=True)
            outputs, draws = (v - v.gather(-1, top.expand(*v.shape[:-1], 1)) for v in (outputs, draws))
            odds, variance = (outputs**2).sum(-1), (draws**2).mean(0).sum(-1)
            ratio = (variance / (outputs.shape[-1] - 1 + odds)).reshape(self.entropy.shape)
        else:
            ratio = (self.deviations**2).mean(0) / (1 + self.outputs**2)
        return self.entropy.exp() * ratio

    def _entropy(self, p: Tensor) -> Tensor:
        if isinstance(self.likelihood, Categorical):
            dim = self.likelihood.class_dim
            return torch.special.entr(p).sum(dim if dim < 0 else dim - self.outputs.dim())
        return torch.special.entr(p) + torch.special.entr(1 - p)
