"""Labels of classes: what they and labels of zero and one have in common."""

import math
from abc import abstractmethod

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from laplace_sampling.likelihoods.likelihood import Likelihood

# Numbers of a vector register. Over an axis with fewer, and others before it, torch takes a softmax number by number:
# 33,000 of ten classes take 6 ms, along the first axis 0.3 ms, and copies there and back 0.4.
_FEW_CLASSES = 16


def softmax(logits: Float[Tensor, "*K c"], *, log: bool = False) -> Float[Tensor, "*K c"]:
    """The softmax over the last axis, or its logarithm."""
    function = torch.log_softmax if log else torch.softmax
    if logits.shape[-1] >= _FEW_CLASSES:
        return function(logits, -1)
    return function(logits.movedim(-1, 0), 0).movedim(0, -1)


class Labels(Likelihood):
    """One label or several a datum, each of one of `c` classes.

    A soft label is a distribution over the classes; its loss is the mean over them. Missing labels count nowhere.
    """

    takes_missing = True

    @abstractmethod
    def positions(self, f: Float[Tensor, "*K C"]) -> Float[Tensor, "*K S c"]:
        """Logits of the classes of each label, linear in the flattened outputs."""

    @abstractmethod
    def flat(self, g: Float[Tensor, "*K S c"]) -> Float[Tensor, "*K C"]:
        """The inverse of `positions`."""

    def log_probs(self, f: Float[Tensor, "*K N C"]) -> Float[Tensor, "*K N S c"]:
        """Logarithms of the probabilities of the classes of each label."""
        # The logarithm of the softmax would be −∞ where a probability underflows.
        return softmax(self.positions(f), log=True)

    @abstractmethod
    def is_soft(self, y: Tensor) -> bool:
        """Whether some labels are soft."""

    @abstractmethod
    def labels(self, y: Tensor) -> tuple[Int[Tensor, "N S"], Bool[Tensor, "N S"]]:
        """The classes of labels that are not soft, zero where they are missing, and marks of those that are given."""

    @abstractmethod
    def given(self, y: Tensor) -> Bool[Tensor, "N S"]:
        """Marks the labels that are given."""

    @abstractmethod
    def weights_of_classes(self, y: Tensor) -> Float[Tensor, "N S c"]:
        """How much each soft label counts as each class; nothing where it is missing."""

    def losses(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N S"]:
        """`−log p` of each label."""
        return self._of_labels(-self.log_probs(f), y)

    def mean_losses(self, f: Float[Tensor, "K N C"], y: Tensor) -> Float[Tensor, "N S"]:
        """`−log (1/K) Σ_k p` of each label by itself."""
        return self._of_labels(math.log(len(f)) - self.log_probs(f).logsumexp(0), y)

    def _of_labels(self, losses: Float[Tensor, "*K N S c"], y: Tensor) -> Float[Tensor, "*K N S"]:
        if self.is_soft(y):
            return (self.weights_of_classes(y).to(losses) * losses).sum(-1)
        labels, given = self.labels(y)
        return losses.gather(-1, labels.expand(losses.shape[:-1])[..., None])[..., 0].where(given, 0)

    def loss(self, f: Float[Tensor, "*K N C"], y: Tensor) -> Float[Tensor, "*K N"]:
        return self.losses(f, y).sum(-1)

    def mean_log_prob(self, f: Float[Tensor, "K N C"], y: Tensor) -> Float[Tensor, " N"]:
        """`log (1/K) Σ_k p(y_n | f_kn)`, joint over the labels of a datum; of one soft label the mean over its classes.

        A mean over samples of one likelihood is not a sum over those of the labels that a soft one is made of.
        """
        if self.is_soft(y) and self.positions(f).shape[-2] == 1:
            return -self.mean_losses(f, y)[:, 0]
        return super().mean_log_prob(f, y)
