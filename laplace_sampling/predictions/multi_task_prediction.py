"""Predictions of networks with several heads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.predictions.prediction import SampledPrediction

__all__ = ["MultiTaskPrediction"]


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
