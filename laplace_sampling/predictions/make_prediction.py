"""The prediction of a likelihood, by one table of kinds; those of counts and of several heads."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson
from laplace_sampling.predictions.classification_prediction import ClassificationPrediction
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.predictions.function_covariance import FunctionCovariance, OfOutputs
from laplace_sampling.predictions.prediction import Prediction, SampledPrediction
from laplace_sampling.predictions.regression_prediction import HeteroscedasticPrediction, RegressionPrediction


@dataclass(frozen=True)
class CountPrediction(SampledPrediction):
    """Predictions of counts: the outputs are logarithms of rates, and so are `samples`, `variance` and `stddev`."""

    @property
    def log_rate(self) -> Float[Tensor, "N *C"]:
        """The network's own output."""
        return self.outputs

    @property
    def epistemic(self) -> Float[Tensor, " N"]:
        """How little the data say of a datum: `√(Σ var f)`, of the logarithms of its rates, summed over its outputs."""
        return self._total_stddev

    @cached_property
    def mean(self) -> Float[Tensor, "N *C"]:
        """The expected count, `E[eᶠ] = exp(f + ½ var f)` of a Gaussian `f`."""
        return (self.outputs + self.variance / 2).exp()

    @property
    def observation_variance(self) -> Float[Tensor, "N *C"]:
        """Variance of a new count, `E[eᶠ] + var eᶠ`: that of a Poisson variable, and of its rate."""
        return self.mean + self.mean**2 * self.variance.expm1()


@dataclass(frozen=True, eq=False)
class MultiTaskPrediction(SampledPrediction, Mapping[str, Any]):
    """Predictions of a network with several heads: `pred[head]` is that of a head, of the kind of its likelihood.

    `log_prob(y)` and `joint_log_prob(y)` are of all heads together, of a dictionary of targets; `outputs`, `samples`
    and `variance` of the flattened outputs, head after head.
    """

    likelihood: MultiTask
    heads: dict[str, Any] = field(kw_only=True)

    @property
    def _layout(self) -> Layout:
        assert self.likelihood.layout is not None
        return self.likelihood.layout

    def __getitem__(self, head: str) -> Any:
        return self.heads[head]

    def __iter__(self) -> Iterator[str]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)


# The prediction of each likelihood. Any other likelihood, as a user's own, has a `SampledPrediction`, which needs its
# loss only: a new likelihood need not be added here.
KINDS: dict[type[Likelihood], type[Prediction]] = {
    Gaussian: RegressionPrediction,
    Categorical: ClassificationPrediction,
    Bernoulli: ClassificationPrediction,
    Poisson: CountPrediction,
    HeteroscedasticGaussian: HeteroscedasticPrediction,
    MultiTask: MultiTaskPrediction,
}


# What predictions are asked for where names are not given, if they have it.
_USUAL = ("probs", "mean", "stddev", "epistemic")


def kind_of(likelihood: Likelihood) -> type[Prediction]:
    """The class of the predictions of a likelihood."""
    return next((KINDS[family] for family in type(likelihood).__mro__ if family in KINDS), SampledPrediction)


def check_quantities(call: str, names: Sequence[str] | None, likelihood: Likelihood) -> list[str]:
    """Names of tensors that predictions of a likelihood have as attributes; by default the usual ones.

    Raises:
        ValueError: for names of anything else, and for none.
    """
    kind = kind_of(likelihood)
    computed = [n for n in dir(kind) if isinstance(getattr(kind, n), property | cached_property) and n[0] != "_"]
    # The noise of a regression is the same for all data.
    known = sorted(
        {"outputs", "deviations", *computed} - ({"noise_variance"} if kind is RegressionPrediction else set())
    )
    if names is None:
        return [name for name in _USUAL if name in known]
    names = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(
            f"`{call}(outputs={names})`: predictions of likelihood {likelihood.name!r} have the tensors {known}"
            + (f", and not {unknown}." if unknown else "; name one of them or more.")
        )
    return names


def make_prediction(
    outputs: Float[Tensor, "N *C"],
    deviations: Float[Tensor, "K N *C"],
    likelihood: Likelihood,
    *,
    function: FunctionCovariance | None = None,
    conformal: SplitConformal | None = None,
    **noise: Any,
) -> Prediction:
    """The prediction of the kind that a likelihood has.

    Args:
        outputs: of the network.
        deviations: of samples from them.
        likelihood: of targets.
        function: covariance of the function, where it is known without samples.
        conformal: scores of data.
        noise: `noise_scale` and `has_noise` of a `RegressionPrediction`.
    """
    kind = kind_of(likelihood)
    options: dict[str, Any] = {}
    if kind is RegressionPrediction:
        options = noise
    if isinstance(likelihood, MultiTask):
        options = {"heads": _heads(outputs, deviations, likelihood, function)}
    return kind(outputs, deviations, likelihood, function=function, conformal=conformal, **options)


def _heads(
    outputs: Float[Tensor, "N C"],
    deviations: Float[Tensor, "K N C"],
    likelihood: MultiTask,
    function: FunctionCovariance | None,
) -> dict[str, Any]:
    """The prediction of each head, from its columns of the flattened outputs."""
    layout = likelihood.layout
    assert layout is not None
    parts, deviation_parts = layout.split(outputs), layout.split(deviations)
    ends = [0, *itertools.accumulate(layout.sizes)]
    heads = {}
    for number, (name, family) in enumerate(likelihood.heads.items()):
        columns = slice(ends[number], ends[number + 1])
        part = None if function is None else OfOutputs(function, columns, layout.size)
        heads[name] = make_prediction(parts[name], deviation_parts[name], family, function=part)
    return heads
