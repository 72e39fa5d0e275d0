r"""The prior precision at which error bars cost the training labels as much as the network's errors elsewhere warrant.

Error bars take log-likelihood from labels of which the network is surely right, and give it to those of which it is
surely wrong. On its training data it is right; elsewhere it errs, and how often decides how wide error bars should be.
An overfitted network and one that was stopped in time may differ in nothing else.

How often it errs is estimated without other data. Labels of up to 1,000 training data are predicted from all others
by kernel ridge regression, `ŷ_i = y_i − [(K + λI)⁻¹y]_i / [(K + λI)⁻¹]_ii`, with the tangent kernel
`K_ij = uᵀφ_i A₁⁻¹ φ_jᵀu` along one random direction `u` of the outputs. (The features have seen the labels: the
estimate is rather too low.) Errors of the network on the same data, which the training loss knows, are taken away, and
so are some standard errors, since few data do not tell few errors from none. Each error that is left warrants `k` nats:
`α` is the smallest precision at which

    (1/n) Σ_i log p(y_i | f_i) − log E p(y_i | f_i + z_i) ≤ k · (part of left-out data that is predicted wrongly − …).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.datum_rows import DatumRows
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import BLOCK_BYTES, Features, some_of
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.predictions.calibration import labelled, labels_of
from laplace_sampling.predictions.loss_rise import LossBound, ShareUsed, cost_of_error_bars
from laplace_sampling.solvers.recorded import recorded

# Data of each class, at least, and classes, at most: with fewer of a class labels are predicted wrongly because there
# are few like them.
_A_CLASS, _MOST_CLASSES = 10, 100


@dataclass(frozen=True)
class LeftOutLabels(LossBound):
    """Error bars cost training labels no more than errors on left-out data warrant.

    The numbers were chosen on 148 networks for digits, tables and MNIST: `docs/decisions.md` has the figures for half
    and twice of the first two.

    Args:
        an_error: `k`, nats for each error.
        standard_errors: of the number of errors, that are taken from it.
        ridge: `λ` by the mean of the kernel's diagonal. A tenth of it changed error rates by 8 %, ten times by 14 %.
        most_data: data that are left out in turn, at most. With 400 of them three standard errors hide the errors of
            networks for 10,000 images, and few neighbours make others.
    """

    name = "leave_one_out"
    an_error: float = 0.2
    standard_errors: float = 3.0
    ridge: float = 0.01
    most_data: int = 1000
    nowhere = "Error bars cost the training labels more than the errors of the network warrant"

    def num_vjps(self, features: Features) -> int:
        return min(features.num_data, self.most_data)

    def share_used(self, model: LinearModel, prior: GaussianPrior, seed: int, in_order: bool) -> ShareUsed:
        some = some_of(model.features, self.num_vjps(model.features), None if in_order else seed)
        some = model.with_targets(some)
        return partial(_share_used, model, self.an_error * self._errors(model, prior, some, seed))

    @recorded
    def _errors(self, model: LinearModel, prior: GaussianPrior, some: Tensor, seed: int) -> float:
        """The part of left-out data that is predicted wrongly, without the network's own errors and standard errors."""
        labels = _labels(model.likelihood, model.targets[some], model.features.num_outputs)
        kernel = _kernel(model.features, prior, some, seed)
        left_out = _left_out(kernel, labels, self.ridge * float(kernel.diagonal().mean()))
        # A soft label counts as labels of several classes.
        wrong, own = (
            1 - float(labels.gather(1, found.argmax(1)[:, None]).mean())
            for found in (left_out, _scores(model.likelihood, model.network_outputs[some]))
        )
        chance = math.sqrt(wrong * (1 - wrong) / len(some))
        # Half an error is always granted: fewer are not seen.
        return max(wrong - own - self.standard_errors * chance, 0.5 / len(some))


def has_left_out_labels(likelihood: Likelihood, num_data: int, num_outputs: int) -> bool:
    """Whether data have one label each, and are enough to leave some of them out."""
    labels = labelled(likelihood)
    if labels is None or labels.positions(torch.empty(1, num_outputs)).shape[1] != 1:
        return False
    num_classes = max(2, num_outputs)
    return num_classes <= _MOST_CLASSES and _A_CLASS * num_classes <= num_data


def _share_used(model: LinearModel, warranted: float, z: Float[Tensor, "K n C"], some: Tensor) -> float:
    likelihood, y = model.likelihood, model.targets[some]
    lost, _ = cost_of_error_bars(likelihood, y, model.network_outputs[some].double(), z)
    return lost / (float(likelihood.weights(y).sum()) * warranted)


def _scores(likelihood: Likelihood, f: Float[Tensor, "n C"]) -> Float[Tensor, "n c"]:
    """A score of each class; of both for a single output."""
    return f if isinstance(labels_of(likelihood), Categorical) else torch.cat([-f, f], 1)


def _labels(likelihood: Likelihood, targets: Tensor, num_outputs: int) -> Float[Tensor, "n c"]:
    """Ones for the label of each datum, or the probabilities of a soft one."""
    labels, y = labels_of(likelihood), likelihood.unweighted_targets(targets)
    if labels.is_soft(y):
        return labels.weights_of_classes(y)[:, 0].double()
    return F.one_hot(y.flatten().long(), max(2, num_outputs)).double()


def _kernel(
    features: Features, prior: GaussianPrior, some: Tensor, seed: int, columns: int = 2**13
) -> Float[Tensor, "n n"]:
    """The tangent kernel of some data along one direction of the outputs.

    Rows of the Jacobian are added up to so many columns, with random signs, before their products. For 300 images of
    MNIST and six networks of 5,706 to 42,310 weights error rates of 0.02 to 0.08 changed by at most 0.01, and with a
    quarter of the columns by 0.016.
    """
    direction = Draws(1, seed, Stream.LEFT_OUT_LABELS).prior(features.num_outputs)[0]
    if features.num_outputs > 1:
        direction = direction - direction.mean()  # a softmax is blind to the mean
    direction, scale = (v.to(features.device, features.dtype) for v in (direction, prior.scale))
    # What is formed of the rows, at most all of their numbers, is in memory for so many data: as many in all processes,
    # which wait for each other where weights are shared out.
    together = max(1, min(features.batch_size, int(BLOCK_BYTES / (4 * features.size))))

    # The numbers of a sketch are as many as the weights: they are drawn and moved once, and not for each batch.
    sketch = cache(partial(_sketch, columns=columns, features=features, seed=seed))

    def rows_of(batch: Tensor) -> DatumRows:
        rows = features.datum_rows(direction.expand(len(batch), -1), batch).scaled(scale)
        return rows.narrowed(sketch(rows.formed.shape[1]))

    rows = [rows_of(batch) for batch in some.split(together)]
    if not all(part.like(rows[0]) for part in rows):  # some took another way: now all rows are formed
        rows = [rows_of(batch) for batch in some.split(together)]
    all_rows = DatumRows.cat(rows)
    return all_rows.products(all_rows)


def _sketch(width: int, columns: int, features: Features, seed: int) -> Callable[[Float[Tensor, "n p"]], Tensor]:
    """Adds up columns of a wide matrix, with random signs, which keeps products of its rows in the mean."""
    if width <= columns:
        return lambda rows: rows
    generator = torch.Generator().manual_seed(seed)
    to = torch.randint(columns, (width,), generator=generator).to(features.device)
    signs = 2 * torch.randint(2, (width,), generator=generator).to(features.device, features.dtype) - 1
    return lambda rows: rows.new_zeros(len(rows), columns).index_add_(1, to, rows * signs)


def _left_out(kernel: Float[Tensor, "n n"], labels: Float[Tensor, "n c"], ridge: float) -> Float[Tensor, "n c"]:
    """Each row of the labels, predicted from all others."""
    mean = labels.mean(0)
    regular = kernel + max(ridge, 1e-300) * torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regular))
    return labels - (inverse @ (labels - mean)) / inverse.diagonal()[:, None]
