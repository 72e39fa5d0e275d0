"""Training data by index: the same datum under the same index in every pass, whatever order the loader has.

Frozen noise belongs to a datum, and solvers choose mini-batches, so data are fetched from the loader's dataset by
index. The loader gives its batch size (what fits in memory), its sampler (which data) and its `collate_fn`. A stream
has no index but its order, which must repeat.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laplace_sampling.data.batches import batched, concatenate, constants, digest, flaw_of, num_bytes, num_rows, take
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.data.random_state import PrivateRandomness
from laplace_sampling.data.sources import (
    RandomAccess,
    Source,
    Stream,
    Unpack,
    check_alike,
    check_repeatable,
    source_of,
    unpacking,
)

# Inputs up to this size are kept in memory, as tensors, and the dataset is read once. It is not tuned: half and twice
# of it change no result, and the time only where the size of a dataset is between the two.
DEFAULT_CACHE_BYTES = 2**31


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """What a loader of training data does not say.

    Args:
        weights: `[N]`, in the order of the dataset: a datum of weight 2 counts as two in the sum of losses. For a
            regression they are `1/noise_variances`.
        noise_variances: `R` of heteroscedastic noise, `[N]` or one for each output, `[N, ...]`, in the units of the
            targets squared and in the order of the dataset, whatever order the loader has. The noise variance of a
            datum is `R/b`, with `b` learnt. For known variances use `Gaussian(1.0, learn=False)`.
        unpack: a function `batch -> (inputs, targets)`, for batches that are no pairs `(x, y)`.
        num_data: the number of data of an `IterableDataset`. It is read in its order, which must repeat.
    """

    weights: Tensor | Sequence[float] | None = None
    noise_variances: Tensor | None = None
    unpack: Unpack | None = None
    num_data: int | None = None

    @staticmethod
    def fields(data: Any) -> dict[str, Any]:
        """The fields of a `Data`; a `TypeError` says what else was given as `data=`."""
        if not isinstance(data, Data):
            raise TypeError(f"`data` must be a `Data`, such as `Data(weights=...)`, but is a {type(data).__name__}.")
        return vars(data)

    def check(self, call: str, *names: str) -> None:
        """Raise a `ValueError` if anything but these is given, which a call has no use for."""
        if other := [name for name, value in vars(self).items() if value is not None and name not in names]:
            raise ValueError(f"`{call}(data=Data({other[0]}=...))`: give {' and '.join(names)} only.")


class TrainingData:
    """Inputs and targets of a loader, by index.

    Args:
        loader: a `DataLoader`, a dataset, or any iterable of batches that can be read again.
        unpack: `batch -> (inputs, targets)`; by default batches are pairs, or mappings with `labels`.
        num_data: how many data of a stream there are.
        missing: whether NaN in targets says that they are missing; in inputs it is an error.
        fill: pads targets of different length, if the likelihood knows such a label.
        cache_bytes: inputs larger than this are read from the dataset at each pass instead of being kept.
        processes: those that share out the data: each reads its part of a dataset, or the whole of a stream.
        sampled_by: the processes whose samplers together give the data, by default the same.

    Attributes:
        num_data: `N`, counted, not taken from `len(dataset)`.
        part: which data are those of this process; `own_batches` begin there.
        batch_size: rows that go through the network together in a pass.
        targets: `y` of all data, `[N, ...]`, or a dictionary of them.
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
        sampled_by: Processes | None = None,
    ) -> None:
        self.processes, randomness = processes, PrivateRandomness()
        with randomness.use():
            source = source_of(loader, num_data, unpacking(unpack), processes, sampled_by or processes)
            check_repeatable(source, processes)
            targets, inputs = list[Any](), list[Any]()

            def read() -> _Seen:
                return _read(source, cache_bytes, missing, targets, inputs)

            # Each process reads its part of a dataset, and the whole of a stream.
            of_dataset = isinstance(source, RandomAccess)
            parts = processes.gathered(read) if of_dataset else [read()]
        seen = parts[0]
        for rank, other in enumerate(parts[1:], 1):
            seen.add(other, f"the data of process {rank}")
        self.num_data, self.ragged = seen.num_data, len(seen.shapes) > 1
        if seen.nothing is None:
            raise ValueError(
                "The loader is empty: it gave no data. Check the dataset, and `drop_last=True` with a "
                "batch size larger than the dataset."
            )
        if self.ragged and not of_dataset:
            raise ValueError(
                f"Batches have inputs of different shapes, {sorted(seen.shapes, key=str)[:2]}, and are given "
                "ready-made, so that data cannot be batched anew: pass a DataLoader of a map-style dataset, whose "
                "`collate_fn` pads, or pad all data to one length."
            )
        self.part = processes.part(self.num_data)
        # A batch is of the same size however many processes there are.
        self.batch_size = min(source.batch_size, self.num_data) if of_dataset else seen.largest
        own = _padded(targets or [seen.nothing[1]], seen.target_shapes, fill)
        if of_dataset:
            self.targets = _of_all(own, self.num_data, processes)
        else:
            check_alike(digest(("", y) for y in batched(own)[0]), processes)
            self.targets = own
        in_memory = self.part if of_dataset else range(self.num_data)
        self._inputs: Source | _InMemory = source
        if inputs and not self.ragged:
            others = source if len(in_memory) < self.num_data else None
            self._inputs = _InMemory(concatenate(inputs), in_memory, others)
        # What is in memory draws nothing any more.
        draws = isinstance(self._inputs, Source) or self._inputs.others is not None
        self._reading = randomness.use if draws and not source.in_memory else nullcontext

    @classmethod
    def unlabelled(cls, x: Any, batch_size: int) -> "TrainingData":
        """Inputs in memory, without targets."""
        data = cls.__new__(cls)
        data.num_data, data.batch_size, data.ragged = num_rows(x), batch_size, False
        data.processes, data.part, data.targets = ALONE, range(data.num_data), torch.zeros(data.num_data)
        data._inputs, data._reading = _InMemory(x, data.part), nullcontext
        return data

    def with_inputs(self, x: Any, device: torch.device) -> "TrainingData":
        """These data with other inputs, in memory in each process, and without targets.

        Args:
            x: those of the part of this process; `None` if it has none.
            device: where they are.
        """
        forms = self.processes.gathered(lambda: None if x is None else _on(take(x, slice(0)), torch.device("cpu")))
        if x is None:
            x = _on(next(form for form in forms if form is not None), device)
        other = self.unlabelled(_of_all(x, self.num_data, self.processes), self.batch_size)
        other.part, other.processes = self.part, self.processes
        return other

    @property
    def in_order(self) -> bool:
        return isinstance(self._inputs, Stream)

    def own_batches(self) -> list[Tensor]:
        """The batches that begin in the part of this process."""
        batches = torch.arange(self.num_data).split(self.batch_size)
        return [batch for batch in batches if int(batch[0]) in self.part]

    def inputs(self, index: Tensor) -> Any:
        """The inputs of some data, `[n, ...]`."""
        with self._reading():
            return self._inputs.inputs(index)


def _of_all(x: Any, num_data: int, processes: Processes) -> Any:
    """A batch of all data, from that of its part in each process."""
    tensors, rebuild = batched(x)
    return rebuild([processes.all_rows(rows, num_data) for rows in tensors])


def _on(x: Any, device: torch.device) -> Any:
    tensors, rebuild = batched(x)
    return rebuild([tensor.to(device) for tensor in tensors])


Shapes = set[tuple[torch.Size, ...]]


@dataclass
class _Seen:
    """What batches are like, of a process or of all of them.

    Attributes:
        num_data: how many data they have.
        largest: how many the largest has.
        shapes: of the inputs of a datum.
        target_shapes: of the targets of a datum.
        fixed: what has no rows in the inputs.
        nothing: inputs and targets of no data; `None` before there are any.
    """

    num_data: int = 0
    largest: int = 0
    shapes: Shapes = field(default_factory=set)
    target_shapes: Shapes = field(default_factory=set)
    fixed: list[Any] = field(default_factory=list)
    nothing: tuple[Any, Any] | None = None

    def add(self, other: "_Seen", where: str) -> None:
        """Add what other batches are like, or raise if they cannot go through a network together with these."""
        if other.nothing is None:
            return
        if self.nothing is None:
            self.fixed, self.nothing = other.fixed, other.nothing
        if other.fixed != self.fixed:
            raise ValueError(
                f"What is no tensor of rows in the inputs must be the same for all data, but is {self.fixed} in the "
                f"first batch and {other.fixed} in {where}; leave out by `Data(unpack=...)` what is not needed."
            )
        self.num_data, self.largest = self.num_data + other.num_data, max(self.largest, other.largest)
        self.shapes |= other.shapes
        self.target_shapes |= other.target_shapes


def _read(source: Source, cache_bytes: float, missing: bool, targets: list[Any], inputs: list[Any]) -> _Seen:
    """Read and check all batches, and append their targets, and their inputs if memory holds them."""
    seen, read_bytes = _Seen(), 0
    for number, x, y in source.batches():
        _check_finite(x, "inputs", number)
        _check_finite(y, "targets", number, missing)
        num = num_rows(x)
        if num != num_rows(y):
            raise ValueError(f"Batch {number} has {num} inputs and {num_rows(y)} targets.")
        nothing = (take(x, slice(0)), take(y, slice(0)))
        batch = _Seen(num, num, {_shapes_of(x)}, {_shapes_of(y)}, constants(x), nothing)
        seen.add(batch, f"batch {number}")
        targets.append(y)
        read_bytes += num_bytes(x)
        # Inputs that will be too large are not kept until they are.
        expected = max(read_bytes, source.total_bytes(num_bytes(x) / max(num, 1)))
        in_list = isinstance(source, Stream) and source.in_list
        if in_list or (expected <= cache_bytes and not source.in_memory):
            inputs.append(x)
        else:
            inputs.clear()
    return seen


def _shapes_of(x: Any) -> tuple[torch.Size, ...]:
    """The shapes of a datum of a batch."""
    return tuple(tensor.shape[1:] for tensor in batched(x)[0])


class _InMemory:
    """The inputs of neighbouring data in memory; others, which processes alone have not, are read."""

    def __init__(self, x: Any, part: range, others: Source | None = None) -> None:
        self.x, self.part, self.others = x, part, others

    def inputs(self, index: Tensor) -> Any:
        inside = (index >= self.part.start) & (index < self.part.stop)
        if self.others is None or bool(inside.all()):
            return take(self.x, index - self.part.start)
        return self.others.inputs(index)


def _padded(targets: list[Any], shapes: Shapes, fill: int | None) -> Any:
    """All targets of this process as one, padded to the largest of `shapes` with the label that is ignored."""
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


def _check_finite(x: Any, what: str, number: int, missing: bool = False) -> None:
    if (flaw := flaw_of(x, missing)) is not None:
        raise ValueError(f"Batch {number} (counted from 0) has {flaw} in its {what}; clean the data first.")
