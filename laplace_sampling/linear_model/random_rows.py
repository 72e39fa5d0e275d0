r"""A sequence of rows of a GGN, of which every beginning estimates `M` without bias, and the last is `M` itself.

A row is `g_ik = φ_iᵀL_i e_k`, datum `i` and column `k` of a root of its curvature, `L_iL_iᵀ = B_i`, so that all `N·C`
of them are `M = Σ_ik g_ik g_ikᵀ`. Of a softmax, it is the gradient of the loss at label `k`, times `√p_k`.

Rows are drawn without replacement by priority sampling (Duffield, Lund and Thorup 2007, "Priority sampling for
estimation of arbitrary subset sums"): with sizes `s_ik = ‖L_i e_k‖²` and uniform `u_ik` the order is that of falling
`s_ik/u_ik`, and the first `m` have the weights `max(1, τ/s_ik)`, `τ` being the priority of the next one. These are
unbiased for every `m`, and one at the end.

Which rows are drawn is all that is random. Random combinations `φ_iᵀL_i z` of all columns would be a second source of
error, and one that a part shares with its half where a datum has weight one: of classifiers that are sure of most data
the few others, which decide, are in both, and comparing the two would say next to nothing of the error.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.linear_model.datum_rows import DatumRows
from laplace_sampling.linear_model.draws import SeededNoise
from laplace_sampling.linear_model.ggn import GGN

__all__ = ["RandomRows"]

# The part of the mean size that every row has besides its own: sizes are those of the curvature of the loss, and
# features differ, too. With 1,000 rows of 10,000 images (Fashion-MNIST, a LeNet of 3,206 weights, three seeds) standard
# deviations had an error of 6.8 %, at half 7.2 %, at twice 6.9 %, with all data alike 8.4 %.
_LEAST_SIZE = 0.1
# Data whose rows are computed together, at most: temporary copies are of these only.
_TOGETHER = 256
# Priorities that are computed, or sorted out, together: no effect on the values.
_PRIORITIES = 2**22


@dataclass(frozen=True)
class RandomRows:
    """The sequence of rows of `M` for a seed; a row is one VJP of one datum.

    A part of the rows is contained in a larger part.

    Attributes:
        ggn: `M`.
        seed: of the order.
        stream: orders of other streams are independent.
    """

    ggn: GGN
    seed: int
    stream: int = 0

    @property
    def num_data(self) -> int:
        return self.ggn.num_data

    @property
    def num_outputs(self) -> int:
        return self.ggn.features.num_outputs

    @property
    def most(self) -> int:
        """The number of rows with which the estimate is `M` itself, `N·C`."""
        return self.num_data * self.num_outputs

    @cached_property
    def _uniform_noise(self) -> SeededNoise:
        # Uniform by the normal distribution, so that they have the keys of all other noise.
        return SeededNoise(1, self.num_outputs, self.seed, 2 * self.stream)

    def _uniform(self, data: Tensor) -> Float[Tensor, "n C"]:
        return torch.special.ndtr(self._uniform_noise(data)[0].double()).clamp(1e-12, 1 - 1e-12)

    @cached_property
    def _priorities(self) -> Float[Tensor, " NC"]:
        """`s_ik/u_ik`, in units of the mean size; as many numbers as the outputs."""
        sizes = self.ggn.root_sizes().clamp_min(0)
        mean = float(sizes.mean(dtype=torch.float64))
        known = mean > 0 and math.isfinite(mean)
        sizes = sizes.div_(mean).add_(_LEAST_SIZE) if known else torch.ones_like(sizes)
        for data in torch.arange(self.num_data).split(max(1, _PRIORITIES // self.num_outputs)):
            sizes[data] = (sizes[data] / self._uniform(data)).to(sizes)
        return sizes.flatten()

    def _first(self, num_rows: int) -> Tensor:
        """The numbers `iC + k` of the first rows, in their order."""
        priorities = self._priorities
        largest = priorities[:0]
        for some in priorities.split(max(_PRIORITIES, num_rows)):
            largest = torch.cat([largest, some])
            largest = largest.topk(min(num_rows, len(largest))).values
        # Those of equal priorities in the order of their numbers, so that a larger part begins with a smaller one.
        numbers = (priorities >= largest[-1]).nonzero().flatten()
        return numbers[priorities[numbers].sort(descending=True, stable=True).indices[:num_rows]]

    def _split(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Data and columns of rows."""
        return numbers.div(self.num_outputs, rounding_mode="floor"), numbers % self.num_outputs

    def num_seen(self, num_rows: int) -> int:
        """How many data the first rows are of."""
        return self.num_data if num_rows == self.most else len(self._split(self._first(num_rows))[0].unique())

    def weights(self, num_rows: int) -> Float[Tensor, " m"]:
        """The weights of the first `m` rows, of which at least one and at most `most` may be asked for."""
        if num_rows == self.most:
            return torch.ones(num_rows, dtype=torch.float64)
        numbers = self._first(num_rows + 1)
        of_rows, following = self._priorities[numbers].double().split([num_rows, 1])
        data, columns = self._split(numbers[:num_rows])
        sizes = of_rows * self._uniform(data).gather(1, columns[:, None])[:, 0]
        return (following / sizes).clamp_min(1.0)

    def rows(self, start: int, stop: int, together: int = _TOGETHER) -> DatumRows:
        """The rows from number `start` on, without weights, in the dtype of the network.

        At most so many data go through the network `together`.
        """
        data, columns = self._split(self._first(stop)[start:])
        return self._rows(data, torch.nn.functional.one_hot(columns, self.num_outputs), together)

    def probes(self, num: int, together: int = _TOGETHER) -> DatumRows:
        """`φ_iᵀL_i z_i` with random signs `z_i` of some random data, whatever their sizes are."""
        data = self._uniform(torch.arange(self.num_data))[:, 0].argsort(stable=True)[:num]
        signs = SeededNoise(1, self.num_outputs, self.seed, 2 * self.stream + 1)(data)[0].sign()
        return self._rows(data, signs, together)

    def _rows(self, data: Tensor, directions: Float[Tensor, "n C"], together: int) -> DatumRows:
        together = max(1, min(together, _TOGETHER, self.ggn.features.batch_size))
        splits = zip(data.split(together), directions.split(together), strict=True)
        parts = (self.ggn.rows_along(some, along) for some, along in splits)
        first = next(parts)
        if 2 * first.formed.shape[1] <= first.size:
            return DatumRows.cat([first, *parts])
        # Factors would save less than half of the products. Rows that are formed whole are in memory only once.
        rows = first.formed.new_empty(len(data), first.size)
        filled = 0
        for part in chain([first], parts):
            rows[filled : filled + len(part)] = part.dense()
            filled += len(part)
        return DatumRows(first.size, rows)
