"""`HeldSamples`: posterior samples where they are kept: on the device, in host memory, or some in each process."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.processes import ALONE, Processes

__all__ = ["HeldSamples", "Holding"]

# Samples that are converted or moved go in blocks of so many bytes: half repeats the pass of a last layer more often,
# twice holds more. Those that are converted go at the least as many together as go through a network at once.
_CONVERTED_BYTES, _FEWEST = 2**26, 16
# Those that are moved are there because memory is short: a block of this size, or a single sample.
_MOVED_BYTES = 2**30


@dataclass(frozen=True)
class Holding:
    """Where samples are kept.

    Attributes:
        offloaded: in host memory, from which they go to the device in blocks.
        processes: whose groups keep the samples that they draw themselves; by default each process has all of them.
    """

    offloaded: bool = False
    processes: Processes = field(default=ALONE, compare=False, repr=False)

    def num_on_device(self, num: int) -> int:
        """How many of so many samples stay in the memory of the device of a process."""
        return 0 if self.offloaded else -(-num // self.processes.num_samplers)

    def empty(self, num: int, size: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "K P"]:
        """Memory for so many samples."""
        if not self.offloaded or device.type == "cpu":
            return torch.empty(num, size, dtype=dtype, device=device)
        # Pinned memory is copied several times as fast.
        return torch.empty(num, size, dtype=dtype, pin_memory=device.type == "cuda")

    def kept(self, rows: Float[Tensor, "k P"], dtype: torch.dtype) -> Float[Tensor, "k P"]:
        """Samples where they are kept, and in this precision."""
        if not self.offloaded:
            return rows.to(dtype)
        return self.empty(len(rows), rows.shape[1], dtype, rows.device).copy_(rows)


@dataclass(frozen=True)
class HeldSamples:
    """Posterior samples `[K, P]`, of which this process may have some.

    Attributes:
        rows: those of this process: in the precision of the network, or divided by `scales` in half precision.
        num: `K`, those of all processes.
        device: where they are used.
        holding: where they are kept.
        scales: of samples in half precision, the largest number of each.
    """

    rows: Float[Tensor, "k P"]
    num: int
    device: torch.device
    holding: Holding = field(default_factory=Holding)
    scales: Float[Tensor, " k"] | None = None

    @classmethod
    def whole(cls, rows: Float[Tensor, "K P"]) -> "HeldSamples":
        """All samples, where they are."""
        return cls(rows, len(rows), rows.device)

    @classmethod
    def of_part(
        cls,
        rows: Float[Tensor, "k P"],
        num: int,
        holding: Holding,
        device: torch.device,
        scales: Float[Tensor, " K"] | None = None,
    ) -> "HeldSamples":
        """So many samples, of which these are those that this process keeps; `scales` are of all."""
        own = holding.processes.samples_of(num)
        kept = rows if holding.offloaded else rows.to(device)
        return cls(kept, num, device, holding, None if scales is None else scales[own.start : own.stop].to(device))

    @classmethod
    def of(
        cls,
        rows: Float[Tensor, "K P"],
        holding: Holding,
        device: torch.device,
        scales: Float[Tensor, " K"] | None = None,
    ) -> "HeldSamples":
        """Those that this process keeps of all samples."""
        own = holding.processes.samples_of(len(rows))
        # Copies, so that the memory of all rows may be freed.
        kept = holding.empty(len(own), rows.shape[1], rows.dtype, device).copy_(rows[own.start : own.stop])
        return cls.of_part(kept, len(rows), holding, device, scales)

    def __len__(self) -> int:
        return self.num

    @property
    def size(self) -> int:
        """`P`."""
        return self.rows.shape[1]

    @property
    def are_shared(self) -> bool:
        """Whether other processes have some of them, so that all processes have to ask for them together."""
        return self.holding.processes.shares_samples(self.num)

    @property
    def own(self) -> range:
        """The numbers of those of this process."""
        return self.holding.processes.samples_of(self.num)

    @property
    def block(self) -> int:
        """How many go to the device, or are converted, at once; all of those for which neither is needed."""
        bytes_ = torch.float32.itemsize * max(1, self.size)
        if self.holding.offloaded:
            return max(1, _MOVED_BYTES // bytes_)
        return max(1, len(self.rows)) if self.scales is None else max(_FEWEST, _CONVERTED_BYTES // bytes_)

    def blocks(self, num: int | None = None) -> Iterator[tuple[slice, Float[Tensor, "k P"]]]:
        """Of the first samples, all or so many, those of this process: blocks on the device, with their numbers."""
        first, last = self.own.start, min(self.own.stop, self.num if num is None else num)
        for start in range(first, last, self.block):
            stop = min(start + self.block, last)
            yield slice(start, stop), self._on_device(slice(start - first, stop - first))

    def _on_device(self, rows: slice) -> Float[Tensor, "k P"]:
        there = self.rows[rows].to(self.device, non_blocking=True)
        return there if self.scales is None else self.scales[rows, None] * there.to(self.scales.dtype)

    def joined(self, rows: Float[Tensor, "K *n"]) -> Float[Tensor, "K *n"]:
        """Rows of all samples from those that each process has, in which the others are zero; in place."""
        if self.are_shared:
            self.holding.processes.sum_of_samples(rows)
        return rows

    def first(self, num: int) -> Float[Tensor, "K P"]:
        """The first samples, so many at most, on the device and in the precision of the network."""
        dtype = self.rows.dtype if self.scales is None else self.scales.dtype
        into = torch.zeros(min(num, self.num), self.size, dtype=dtype, device=self.device)
        for numbers, samples in self.blocks(len(into)):
            into[numbers] = samples
        return self.joined(into)

    def part(self, numbers: range) -> Float[Tensor, "k P"] | None:
        """Samples of these numbers; `None` if this process does not have them."""
        own = self.own
        if not (own.start <= numbers.start and numbers.stop <= own.stop):
            return None
        return self._on_device(slice(numbers.start - own.start, numbers.stop - own.start))

    def none(self) -> "HeldSamples":
        """The same before any is drawn."""
        return replace(self, rows=self.rows[:0].clone(), num=0, scales=None)

    def in_half(self, dtype: torch.dtype) -> "HeldSamples":
        """The same in half precision, divided by the largest number of each."""
        rows, scales = [], []
        for _, samples in self.blocks():
            scales.append(samples.abs().amax(1).clamp_min(torch.finfo(samples.dtype).tiny))
            rows.append((samples / scales[-1][:, None]).to(dtype).to(self.rows.device))
        return replace(self, rows=torch.cat(rows), scales=torch.cat(scales))

    def rows_of_all(self) -> Float[Tensor, "K P"]:
        """The samples of all processes as they are kept."""
        return self.holding.processes.samples_of_all(self.rows, self.num)

    def scales_of_all(self) -> Float[Tensor, " K"] | None:
        """The scales of all processes, of samples in half precision."""
        return None if self.scales is None else self.holding.processes.samples_of_all(self.scales, self.num)

    def full(self) -> Float[Tensor, "K P"]:
        """All samples in the precision of the network, in the memory where they are kept."""
        rows, scales = self.rows_of_all(), self.scales_of_all()
        return rows if scales is None else scales[:, None].to(rows.device) * rows.to(scales.dtype)
