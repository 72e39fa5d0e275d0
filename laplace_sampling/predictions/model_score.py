"""`Score`: how well a network predicts data that it was not trained on, and `compare`, which ranks several of them."""

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.solvers.placement import NUMBERS_TOGETHER

# Draws of the Bayesian bootstrap, or of the errors of evidences: probabilities are known to 0.005.
_DRAWS = 10_000


@dataclass(frozen=True)
class Score:
    """A score of a network; larger is better. `float(score)` is its value.

    Attributes:
        kind: `"evidence"` or `"loo"`.
        value: the score in nats for each training datum.
        standard_error: for `"loo"` the standard error of a mean over data. Networks that are compared on the same data
            share most of it. For `"evidence"` the error of random probes, 0 if it is exact.
        num_data: the number of data in the mean.
        log_probs: for `"loo"` `log p(y_i | y_{−i})`, `[num_data]`; else empty.
        data: for `"loo"` indices of these data in the dataset; else empty.
        prior_precision: the prior precision of the score.
        dataset_size: the number of training data, including those that were not used.
        without_correlations: whether the posterior leaves out some correlations, which makes an evidence smaller: the
            determinant is larger, by Fischer's inequality.
        targets: a few means of the training targets, by which other data are recognised (`summary_of`).
        of_some_weights: whether only some of the trainable weights are random. The others count as known, which makes
            the evidence larger than that of all weights.
    """

    kind: str
    value: float
    standard_error: float
    num_data: int
    log_probs: Float[Tensor, " n"] = field(repr=False)
    data: Tensor = field(repr=False)
    prior_precision: float
    dataset_size: int
    without_correlations: bool = False
    targets: tuple[float, ...] = field(default=(), repr=False)
    of_some_weights: bool = False

    def __float__(self) -> float:
        return self.value

    @classmethod
    def of(
        cls, kind: str, log_probs: Float[Tensor, " n"], data: Tensor, prior_precision: float, dataset_size: int
    ) -> "Score":
        """The score that is the mean over some data."""
        num = len(log_probs)
        error = float(log_probs.std()) / math.sqrt(num) if num > 1 else math.inf
        return cls(kind, float(log_probs.mean()), error, num, log_probs, data, prior_precision, dataset_size)


@dataclass(frozen=True)
class Comparison:
    """A ranking of networks, the best one first; `print` it for a table.

    Attributes:
        names: the names of the networks.
        scores: the score of each network.
        probabilities: the probability of each network to be the best, `[M]`. For `"loo"`: for other data like these, by
            the Bayesian bootstrap. For `"evidence"`: the posterior probability of the model, with equal prior
            probabilities.
        differences: the difference of each score to the best one, `[M]`, in nats for each datum; not positive.
        standard_errors: standard errors of the differences. For `"loo"` these are paired, on the same data.
    """

    names: tuple[str, ...]
    scores: tuple[Score, ...]
    probabilities: Float[Tensor, " M"]
    differences: Float[Tensor, " M"]
    standard_errors: Float[Tensor, " M"]

    @property
    def best(self) -> str:
        """The name of the best one."""
        return self.names[0]

    def __str__(self) -> str:
        width = max(map(len, (*self.names, "network")))
        lines = [f"{'network':{width}}  {self.scores[0].kind:>9}  {'to the best':>20}  probability"]
        for i, (name, score) in enumerate(zip(self.names, self.scores, strict=True)):
            difference = f"{float(self.differences[i]):+.4f} ± {float(self.standard_errors[i]):.4f}" if i else ""
            row = f"{name:{width}}  {score.value:9.4f}  {difference:>20}  {float(self.probabilities[i]):11.3f}"
            lines.append(row)
        return "\n".join(lines)


def compare(models: Iterable[Any] | Mapping[str, Any], kind: str = "evidence") -> Comparison:
    """Rank networks that were fitted to the same data, by their scores (`LinearisedLaplace.score`).

    Networks may have any architecture and any number of weights. Likelihoods may differ if all of them are densities,
    or all are probabilities, of the same targets in the same units, and for `"loo"` in the same order. `"kfac"` and
    `"diagonal"` leave out correlations, which makes evidences smaller, the more so the larger the network. Scores with
    some random weights, such as those of the last layer, differ from those with all. A warning says if scores of
    different kinds of posteriors are compared.

    Args:
        models: fitted `LinearisedLaplace`s, or their scores; or a dictionary of these, whose keys are their names.
        kind: the score that models are asked for, `"evidence"` or `"loo"`. Scores that are given have their own kind.

    Raises:
        TypeError: for anything else.
        ValueError: for fewer than two; for scores of several kinds, of other data, of targets in other units, or, for
            `"loo"`, in another order.

    Example:
        >>> import torch
        >>> from laplace_sampling import LinearisedLaplace, compare
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> models = {}
        >>> for name, slope in (("trained", 1.0), ("untrained", -1.0)):
        ...     model = torch.nn.Linear(1, 1)
        ...     _ = torch.nn.init.constant_(model.weight, slope), torch.nn.init.zeros_(model.bias)
        ...     la = LinearisedLaplace(model, "regression")
        ...     models[name] = la.fit_hyperparameters([(x, x + 0.1 * torch.cos(50 * x))], progress=False)
        >>> compare(models).best
        'trained'
    """
    named = models if isinstance(models, Mapping) else {str(i): model for i, model in enumerate(models)}
    if len(named) < 2:
        raise ValueError(f"`compare(models)` ranks two models or more, but got {len(named)}.")
    for model in named.values():
        if not isinstance(model, Score) and not hasattr(model, "score"):
            raise TypeError(
                "`compare(models)` takes fitted `LinearisedLaplace`s or their scores, but got a "
                f"{type(model).__name__}."
            )
    scores = {str(name): model if isinstance(model, Score) else model.score(kind=kind) for name, model in named.items()}
    kinds = {score.kind for score in scores.values()}
    if len(kinds) > 1:
        raise ValueError(f"`compare(models)` needs scores of one kind, but got {sorted(kinds)}.")
    _check_same_data(scores)
    for flag, what in (
        ("without_correlations", "leave out correlations, which makes evidences smaller. Use one `method` for all."),
        ("of_some_weights", "take some weights as known, which makes evidences larger. Fit all weights of each."),
    ):
        some = [name for name, score in scores.items() if getattr(score, flag)]
        if 0 < len(some) < len(scores):
            warnings.warn(f"`compare(models)`: of these scores only those of {some} {what}", stacklevel=2)
    values = _paired(scores) if kinds == {"loo"} else None
    means = torch.tensor([s.value for s in scores.values()], dtype=torch.float64) if values is None else values.mean(1)
    order = means.argsort(descending=True, stable=True)
    best = int(order[0])
    if values is None:
        errors, probabilities = _of_evidence(scores, best)
    else:
        errors, probabilities = (values - values[best]).std(1) / math.sqrt(values.shape[1]), _bootstrap(values)
    ranked = list(scores.items())
    names, found = zip(*(ranked[i] for i in order), strict=True)
    return Comparison(names, found, probabilities[order], (means - means[best])[order], errors[order])


def _paired(scores: Mapping[str, Score]) -> Float[Tensor, "M n"]:
    """Log-likelihoods of the data that all scores have in common."""
    known = [dict(zip(s.data.tolist(), s.log_probs.double().tolist(), strict=True)) for s in scores.values()]
    common = [index for index in known[0] if all(index in other for other in known)]
    if len(common) < 2:
        raise ValueError(
            "`compare(models)`: the scores have fewer than two training data in common. Give all models the same "
            "`seed`, and `score` a larger `num_data`."
        )
    return torch.tensor([[values[index] for index in sorted(common)] for values in known], dtype=torch.float64)


def summary_of(targets: Tensor, in_order: bool) -> tuple[float, ...]:
    """Mean and root mean square of targets, and, of data that are in an order, a mean with weights that grow.

    Networks may hold them in other precisions, so that they are numbers, and no digest.
    """
    # In float64 on the CPU: some devices have none.
    rows = targets.detach().cpu().double().reshape(len(targets), -1).nan_to_num().mean(1)
    square = targets.detach().cpu().double().nan_to_num().square().mean()
    growing = torch.linspace(0, 1, len(rows), dtype=torch.float64)
    return tuple(map(float, (square.sqrt(), rows.mean(), *([(growing * rows).mean()] if in_order else []))))


def _check_same_data(scores: Mapping[str, Score]) -> None:
    sizes = {name: score.dataset_size for name, score in scores.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"`compare(models)` ranks networks that were fitted to the same data, but these have different numbers of "
            f"data: {sizes}. Fit all of them to the same loader."
        )
    # Means of 1,000 targets or more differ by less in bfloat16; the weighted one of a million in another order by 3e-4.
    tolerance = 1e-4
    known = [(name, score) for name, score in scores.items() if score.targets]
    for (first, score), (name, other) in itertools.pairwise(known):
        if any(abs(a - b) > tolerance * score.targets[0] for a, b in zip(score.targets, other.targets, strict=True)):
            raise ValueError(
                f"`compare(models)` ranks networks that were fitted to the same data, but the training targets of "
                f"{name!r} are not those of {first!r}: they are others, in other units or in another order. Fit all "
                "of them to the same loader."
            )


def _bootstrap(values: Float[Tensor, "M n"]) -> Float[Tensor, " M"]:
    """How often each has the largest mean under random weights of the data (Rubin 1981, "The Bayesian bootstrap")."""
    generator = torch.Generator().manual_seed(0)
    wins, num = torch.zeros(len(values), dtype=torch.float64), values.shape[1]
    for part in torch.arange(_DRAWS).split(max(1, NUMBERS_TOGETHER // num)):
        weights = torch.empty(len(part), num, dtype=torch.float64).exponential_(generator=generator)
        wins += (weights @ values.T).argmax(1).bincount(minlength=len(values))
    return wins / _DRAWS


def _of_evidence(scores: Mapping[str, Score], best: int) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Errors of differences to the best, and posterior probabilities, on average over the errors of the evidences."""
    totals = torch.tensor([(s.value, s.standard_error, s.num_data) for s in scores.values()], dtype=torch.float64)
    values, errors, num = totals.unbind(1)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_DRAWS, len(values), generator=generator, dtype=torch.float64)
    probabilities = (num * (values + errors * noise)).softmax(1).mean(0)
    of_difference = (errors**2 + errors[best] ** 2).sqrt()
    of_difference[best] = 0.0
    return of_difference, probabilities
