"""Training data by index: the same datum under the same index in every pass, whatever order the loader has.

Frozen noise belongs to a datum, and solvers choose mini-batches, so data are fetched from the loader's dataset by
index. The loader gives its batch size (what fits in memory), its sampler (which data) and its `collate_fn`. A stream
has no index but its order, which must repeat.
"""

import copy
import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_sampling.data.batches import (
    batched,
    concatenate,
    constants,
    flaw_of,
    num_bytes,
    num_rows,
    take,
)
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.data.random_state import BorrowedRandomness
from laplace_sampling.data.sources import RandomAccess, Source, Stream, check_repeatable, check_same_stream, source_of
from laplace_sampling.data.unpacking import Unpack, unpacking

__all__ = ["TrainingData", "Unpack"]

# Inputs up to this size are kept in memory, as tensors, and the dataset is read once. It is not tuned: half and twice
# of it change no result, and the time only where the size of a dataset is between the two.
DEFAULT_CACHE_BYTES = 2**31


class TrainingData:
    """Inputs and targets of a loader, by index.

    Args:
        loader: a `DataLoader`, a dataset, or any iterable of batches that can be read again.
        unpack: `batch -> (inputs, targets)`; by default batches are pairs, or mappings with `labels`.
        num_data: how many data of a stream there are.
        missing: whether NaN in targets says that they are missing; in inputs it is an error.
        fill: pads targets of different length, if the likelihood knows such a label.
        cache_bytes: inputs larger than this are read from the dataset at each pass instead of being kept.
        processes: those that share out the data: each reads its part of a dataset, the whole of a stream, or a stream
            of its own, whose data follow those of the process before.
        drawn_by: those whose samplers together give the data, by default the same.

    Attributes:
        num_data: `N`, counted, not taken from `len(dataset)`.
        part: which data are those of this process.
        divided: whether each process has a stream of its own.
        batch_size: rows that go through the network together in a pass.
        targets: `y` of the part, `[n, ...]`, or a dictionary of them.
        in_order: whether data can be read in their order only, so that there are no mini-batches.
        ragged: whether the shapes of inputs differ from batch to batch, by padding.

    Raises:
        TypeError: if the loader is a one-shot iterator, or its batches are none of the forms above.
        ValueError: if it is empty, has NaN or infinity in it (the message names the batch), or gives different
            data at each pass or in each process.
        ProcessError: if another process has raised one of these.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        unpack: Unpack | None = None,
        num_data: int | None = None,
        fill: int | None = None,
        missing: bool = False,
        cache_bytes: float = DEFAULT_CACHE_BYTES,
        processes: Processes = ALONE,
        drawn_by: Processes | None = None,
    ) -> None:
        self.processes, randomness = processes, BorrowedRandomness(loader)
        with randomness.borrowed():
            source = source_of(loader, num_data, unpacking(unpack), processes, drawn_by or processes)
            check_repeatable(source, processes)
            read = _Read(source, cache_bytes, missing)
            everywhere = processes.gathered(read.look) if source.shared else [read.look()]
            check_same_stream(source, processes)
        if isinstance(source, Stream) and source.divided:
            _check_parts([looked.num_data for looked in everywhere], source.num_data)
        seen = everywhere[0]
        for number, looked in enumerate(everywhere[1:], 1):
            seen = seen.joined(looked, f"the data of process {number}")
        inputs, shapes = read.inputs, seen.shapes
        self.num_data = seen.num_data
        if self.num_data == 0:
            raise ValueError(
                "The loader is empty: it gave no data. Check the dataset, and `drop_last=True` with a "
                "batch size larger than the dataset."
            )
        self.part, self.ragged = processes.part(self.num_data), len(shapes) > 1
        self.divided = source.divided
        if source.divided:
            start = sum(looked.num_data for looked in everywhere[: processes.place_of_data])
            self.part = range(start, start + read.num_data)
        # A batch is of the same size however many processes there are.
        self.batch_size = min(source.batch_size, self.num_data) if isinstance(source, RandomAccess) else seen.largest
        assert seen.nothing is not None
        no_inputs, no_targets = seen.nothing
        self.targets = _padded(read.targets or [no_targets], seen.target_shapes, fill)
        if processes.share_data and not source.shared:
            self.targets = take(self.targets, torch.arange(self.part.start, self.part.stop))  # not a view of all
        if self.ragged and not isinstance(source, RandomAccess):
            raise ValueError(
                f"Batches have inputs of different shapes, {sorted(shapes, key=str)[:2]}, and are given ready-made, so "
                "that data cannot be batched anew: pass a DataLoader of a map-style dataset, whose `collate_fn` pads, "
                "or pad all data to one length."
            )
        self._source: _Inputs = source
        if inputs and not self.ragged:
            in_memory = _InMemory(concatenate(inputs))
            self._source = _PartInMemory(in_memory, self.part, source) if source.shared else in_memory
        if source.divided:
            own = _InMemory(concatenate(inputs)) if inputs else source
            in_order = any(processes.gathered(lambda: len(self.part) > 0 and not inputs))
            self._source = _Shared(own, no_inputs, self.part, processes, in_order=in_order)
        # What is in memory draws nothing any more.
        drawn = not inputs or source.shared
        self._reading = randomness.borrowed if drawn and not source.in_memory else nullcontext

    @classmethod
    def unlabelled(cls, x: Any, batch_size: int) -> "TrainingData":
        """Inputs in memory, without targets."""
        data = cls.__new__(cls)
        data._reading, data.processes, data.part = nullcontext, ALONE, range(num_rows(x))
        data._source, data.num_data, data.batch_size, data.ragged = _InMemory(x), num_rows(x), batch_size, False
        data.divided = False
        data.targets = torch.zeros(data.num_data)
        return data

    def shortened(self, x: Any, device: torch.device, in_step: bool) -> "TrainingData":
        """The same data with other inputs, in memory, and without targets.

        Args:
            x: those of this process; `None` if it has none.
            device: where they are.
            in_step: whether all processes ask for inputs at the same time, each for others.
        """
        if self.processes.share_data:
            forms = self.processes.gathered(lambda: None if x is None else _on(take(x, slice(0)), torch.device("cpu")))
            x = _on(next(form for form in forms if form is not None) if x is None else x, device)
        other = self.unlabelled(x, self.batch_size)
        if self.processes.share_data:
            other._source = _Shared(_InMemory(x), take(x, slice(0)), self.part, self.processes, in_step=in_step)
        other.divided, other.part = self.divided, self.part
        other.num_data, other.processes = self.num_data, self.processes
        return other

    def whole(self) -> "TrainingData":
        """The same with all inputs that processes have apart in each of them, so that one may ask for some alone."""
        if not isinstance(self._source, _Shared) or self._source.in_step or self._source.in_order:
            return self
        other = copy.copy(self)
        other._source = _InMemory(self.inputs(torch.arange(self.num_data)))
        return other

    def all_targets(self) -> Any:
        """`y` of all data, in each process."""
        return self._of_all(self.targets)

    def targets_of(self, indices: Tensor) -> Any:
        """`y` of some data, the same in all processes."""
        if not self.processes.share_data:
            return take(self.targets, indices)
        tensors, rebuild = batched(self.targets)
        return rebuild([self.processes.picked(rows, self.part, indices) for rows in tensors])

    def _of_all(self, x: Any) -> Any:
        tensors, rebuild = batched(x)
        return rebuild([self.processes.rows_of_all(rows, self.num_data, self.part) for rows in tensors])

    @property
    def in_order(self) -> bool:
        return isinstance(self._source, Stream) or (isinstance(self._source, _Shared) and self._source.in_order)

    def own_batches(self) -> list[Tensor]:
        """The batches that this process reads: those that begin in its part, or those of its own stream."""
        first, last = (self.part.start, self.part.stop) if self.divided else (0, self.num_data)
        batches = torch.arange(first, last).split(self.batch_size)
        return [batch for batch in batches if len(batch) and int(batch[0]) in self.part]

    def inputs(self, indices: Tensor) -> Any:
        """The inputs of some data, `[n, ...]`, for which all processes ask, or of own ones in `Processes.apart`."""
        with self._reading():
            return self._source.inputs(indices)


def _on(x: Any, device: torch.device) -> Any:
    tensors, rebuild = batched(x)
    return rebuild([tensor.to(device) for tensor in tensors])


Shapes = set[tuple[torch.Size, ...]]


@dataclass(frozen=True)
class _Seen:
    """What all batches are like, of a process or of all of them.

    Attributes:
        num_data: how many data they have.
        largest: how many the largest has.
        shapes: of the inputs of a datum.
        target_shapes: of the targets of a datum.
        fixed: what has no rows in the inputs.
        nothing: inputs and targets of no data; `None` without any.
    """

    num_data: int
    largest: int
    shapes: Shapes
    target_shapes: Shapes
    fixed: list[Any] | None
    nothing: tuple[Any, Any] | None

    def joined(self, other: "_Seen", where: str) -> "_Seen":
        return _Seen(
            self.num_data + other.num_data,
            max(self.largest, other.largest),
            self.shapes | other.shapes,
            self.target_shapes | other.target_shapes,
            _same_constants(self.fixed, other.fixed, where),
            other.nothing if self.nothing is None else self.nothing,
        )


class _Read:
    """The batches that a process reads: their targets, and inputs that are kept."""

    def __init__(self, source: Source, cache_bytes: float, missing: bool) -> None:
        self.source, self.cache_bytes, self.missing = source, cache_bytes, missing
        self.targets: list[Any] = []
        self.inputs: list[Any] = []
        self.num_data = 0

    def look(self) -> _Seen:
        """Reads and checks all batches."""
        shapes, target_shapes, read_bytes, fixed, sizes = set(), set(), 0, None, [0]
        source, nothing = self.source, None
        for number, (x, y) in source.own():
            _check_finite(x, "inputs", number)
            _check_finite(y, "targets", number, self.missing)
            if num_rows(x) != num_rows(y):
                raise ValueError(f"Batch {number} has {num_rows(x)} inputs and {num_rows(y)} targets.")
            fixed = _same_constants(fixed, constants(x), f"batch {number}")
            read_bytes += 0 if source.in_memory else num_bytes(x)
            shapes.add(_shapes_of(x))
            target_shapes.add(_shapes_of(y))
            # Inputs that will be too large are not kept until they are.
            expected = source.total_bytes(num_bytes(x) / max(num_rows(x), 1))
            if source.kept or (max(read_bytes, expected) <= self.cache_bytes and not source.in_memory):
                self.inputs.append(x)
            else:
                self.inputs.clear()
            self.targets.append(y)
            sizes.append(num_rows(x))
            nothing = nothing or (take(x, slice(0)), take(y, slice(0)))
        self.num_data = sum(sizes)
        return _Seen(self.num_data, max(sizes), shapes, target_shapes, fixed, nothing)


def _shapes_of(x: Any) -> tuple[torch.Size, ...]:
    """The shapes of a datum of a batch."""
    return tuple(tensor.shape[1:] for tensor in batched(x)[0])


def _same_constants(fixed: list[Any] | None, others: list[Any] | None, where: str) -> list[Any] | None:
    if fixed is None or others is None:
        return others if fixed is None else fixed
    if others != fixed:
        raise ValueError(
            f"What is no tensor of rows in the inputs must be the same for all data, but is {fixed} in the "
            f"first batch and {others} in {where}; leave out by `unpack=` what is not needed."
        )
    return fixed


class _Inputs(Protocol):
    """The inputs of some data."""

    def inputs(self, indices: Tensor) -> Any: ...


class _InMemory:
    """Inputs in memory."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def inputs(self, indices: Tensor) -> Any:
        return take(self.x, indices)


class _Shared:
    """The inputs of neighbouring data in each process: those of its own within its part of a sum, elsewhere of any.

    Args:
        own: those of the part.
        nothing: inputs of no data.
        part: whose inputs this process has.
        processes: that share out the data.
        in_step: whether all ask at the same time, each for other data.
        in_order: whether one of them reads its part in its order only.
    """

    def __init__(
        self,
        own: _Inputs,
        nothing: Any,
        part: range,
        processes: Processes,
        *,
        in_step: bool = False,
        in_order: bool = False,
    ) -> None:
        self.own, self.nothing, self.part, self.processes = own, nothing, part, processes
        self.in_step, self.in_order = in_step, in_order

    def inputs(self, indices: Tensor) -> Any:
        if self.processes.are_apart:
            return self.own.inputs(indices - self.part.start)
        asked, mine = self.processes.asked(indices) if self.in_step else (indices, slice(None))
        inside = (asked >= self.part.start) & (asked < self.part.stop)
        found = self.own.inputs(asked[inside] - self.part.start) if bool(inside.any()) else self.nothing
        tensors, rebuild = batched(found)
        return rebuild([self.processes.placed(rows, inside)[mine] for rows in tensors])


class _PartInMemory:
    """The inputs of neighbouring data in memory; others are read."""

    def __init__(self, in_memory: _InMemory, part: range, others: Source) -> None:
        self.in_memory, self.part, self.others = in_memory, part, others

    def inputs(self, indices: Tensor) -> Any:
        inside = (indices >= self.part.start) & (indices < self.part.stop)
        if bool(inside.all()):
            return self.in_memory.inputs(indices - self.part.start)
        return self.others.inputs(indices)


def _padded(targets: list[Any], shapes: Shapes, fill: int | None) -> Any:
    """All targets as one; of different lengths padded with a label that is ignored.

    Args:
        targets: of this process.
        shapes: of a datum, of all processes.
        fill: the label.
    """
    if len(shapes) == 1:
        return concatenate(targets)
    if fill is None or not all(isinstance(y, Tensor) for y in targets) or len({len(shape) for (shape,) in shapes}) > 1:
        raise ValueError(
            f"Batches have targets of different shapes, {sorted(shapes, key=str)[:2]}: only labels of a categorical "
            "likelihood, of as many axes, are padded, with its `ignore_index`. Pad the targets to one shape."
        )
    sizes = [max(lengths) for lengths in zip(*(shape for (shape,) in shapes), strict=True)]

    def padded(y: Tensor) -> Tensor:
        y = y if y.is_floating_point() or y.dtype == torch.bool else y.long()  # bytes do not hold every label
        # `F.pad` takes the last axis first: nothing before, what is missing behind.
        lengths = zip(reversed(y.shape[1:]), reversed(sizes), strict=True)
        # Probabilities of labels are missing where they are NaN.
        value = math.nan if y.is_floating_point() else fill
        return F.pad(y, [n for length, size in lengths for n in (0, size - length)], value=value)

    return torch.cat([padded(y) for y in targets])


def _check_parts(counts: list[int], num_data: int | None) -> None:
    """Raise unless the streams of the processes are all data together, each once."""
    if sum(counts) != num_data:
        raise ValueError(
            f"Each process has another stream, so that they are taken as parts of one, but they give {counts} data, "
            f"and not `num_data={num_data}` together (by default the length of the dataset). Give each process the "
            "whole stream, in the same order, or parts that have each datum once, and how many they are together."
        )


def _check_finite(x: Any, what: str, number: int, missing: bool = False) -> None:
    if (flaw := flaw_of(x, missing)) is not None:
        raise ValueError(f"Batch {number} (counted from 0) has {flaw} in its {what}; clean the data first.")
