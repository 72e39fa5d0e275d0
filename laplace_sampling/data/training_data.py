"""Training data by index: the same datum under the same index in every pass, whatever order the loader has.

Frozen noise belongs to a datum, and solvers choose mini-batches, so data are fetched from the loader's dataset by
index. The loader gives its batch size (what fits in memory), its sampler (which data) and its `collate_fn`. A stream
has no index but its order, which must repeat.
"""

import copy
import itertools
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext, suppress
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from laplace_sampling.data.batches import (
    batched,
    concatenate,
    constants,
    flaw_of,
    num_bytes,
    num_rows,
    take,
)
from laplace_sampling.data.coverage import check_coverage
from laplace_sampling.data.random_state import BorrowedRandomness
from laplace_sampling.data.unpacking import Unpack, unpacking
from laplace_sampling.solvers.checks import check_whole

__all__ = ["TrainingData", "Unpack"]

# Inputs up to this size are kept in memory, as tensors, and the dataset is read once. It is not tuned: half and twice
# of it change no result, and the time only where the size of a dataset is between the two.
DEFAULT_CACHE_BYTES = 2**31
# The batch size of the loader that a dataset gets. With 128 and 512 instead, GGN products of 8 vectors on LeNet take
# the same time a datum within 5 %.
_BATCH_SIZE = 256


class TrainingData:
    """Inputs and targets of a loader, by index.

    Args:
        loader: a `DataLoader`, a dataset, or any iterable of batches that can be read again.
        unpack: `batch -> (inputs, targets)`; by default batches are pairs, or mappings with `labels`.
        num_data: how many data of a stream there are.
        fill: pads targets of different length, if the likelihood knows such a label.
        cache_bytes: inputs larger than this are read from the dataset at each pass instead of being kept.

    Attributes:
        num_data: `N`, counted, not taken from `len(dataset)`.
        batch_size: rows that go through the network together in a pass.
        targets: all `y`, `[N, ...]`, or a dictionary of them.
        in_order: whether data can be read in their order only, so that there are no mini-batches.
        ragged: whether the shapes of inputs differ from batch to batch, by padding.

    Raises:
        TypeError: if the loader is a one-shot iterator, or its batches are none of the forms above.
        ValueError: if it is empty, has NaN or infinity in it (the message names the batch), or gives different
            data at each pass.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        unpack: Unpack | None = None,
        num_data: int | None = None,
        fill: int | None = None,
        cache_bytes: float = DEFAULT_CACHE_BYTES,
    ) -> None:
        randomness = BorrowedRandomness(loader)
        with randomness.borrowed():
            source = _source(loader, num_data, unpacking(unpack))
            _check_repeatable(source)
            inputs, targets, shapes = _read(source, cache_bytes)
        sizes = [num_rows(y) for y in targets]
        self.num_data = sum(sizes)
        if self.num_data == 0:
            raise ValueError(
                "The loader is empty: it gave no data. Check the dataset, and `drop_last=True` with a "
                "batch size larger than the dataset."
            )
        self.batch_size, self.ragged = max(sizes), len(shapes) > 1
        self.targets = _joined(targets, fill)
        if self.ragged and not isinstance(source, _RandomAccess):
            raise ValueError(
                f"Batches have inputs of different shapes, {sorted(shapes, key=str)[:2]}, and are given ready-made, so "
                "that data cannot be batched anew: pass a DataLoader of a map-style dataset, whose `collate_fn` pads, "
                "or pad all data to one length."
            )
        self._source: _Inputs = _InMemory(concatenate(inputs)) if inputs and not self.ragged else source
        # What is in memory draws nothing any more.
        self._reading = nullcontext if source.in_memory or self._source is not source else randomness.borrowed

    @classmethod
    def unlabelled(cls, x: Any, batch_size: int) -> "TrainingData":
        """Inputs in memory, without targets."""
        data = cls.__new__(cls)
        data._reading = nullcontext
        data._source, data.num_data, data.batch_size, data.ragged = _InMemory(x), num_rows(x), batch_size, False
        data.targets = torch.zeros(data.num_data)
        return data

    @property
    def in_order(self) -> bool:
        return isinstance(self._source, _Stream)

    def inputs(self, indices: Tensor) -> Any:
        """The inputs of some data, `[n, ...]`."""
        with self._reading():
            return self._source.inputs(indices)


Shapes = set[tuple[torch.Size, ...]]


def _read(source: "_Source", cache_bytes: float) -> tuple[list[Any], list[Any], Shapes]:
    """Checks all batches: their inputs, if they are to be kept, their targets, and the shapes of a datum."""
    inputs, targets, shapes, read_bytes, fixed = [], [], set(), 0, None
    for number, (x, y) in enumerate(source):
        _check_finite(x, "inputs", number)
        _check_finite(y, "targets", number)
        if num_rows(x) != num_rows(y):
            raise ValueError(f"Batch {number} has {num_rows(x)} inputs and {num_rows(y)} targets.")
        fixed = constants(x) if fixed is None else fixed
        if constants(x) != fixed:
            raise ValueError(
                f"What is no tensor of rows in the inputs must be the same for all data, but is {fixed} in the "
                f"first batch and {constants(x)} in batch {number}; leave out by `unpack=` what is not needed."
            )
        read_bytes += 0 if source.in_memory else num_bytes(x)
        shapes.add(tuple(tensor.shape[1:] for tensor in batched(x)[0]))
        if source.kept or (read_bytes <= cache_bytes and not source.in_memory):
            inputs.append(x)
        else:
            inputs.clear()
        targets.append(y)
    return inputs, targets, shapes


class _Inputs(Protocol):
    """The inputs of some data."""

    def inputs(self, indices: Tensor) -> Any: ...


class _InMemory:
    """Inputs in memory."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def inputs(self, indices: Tensor) -> Any:
        return take(self.x, indices)


class _Source(ABC):
    """Where data come from: all of them in batches, and the inputs of some."""

    in_memory = False  # whether the dataset holds tensors, of which no copies are needed
    kept = False  # whether inputs are kept whatever their size

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Any, Any]]: ...

    @abstractmethod
    def inputs(self, indices: Tensor) -> Any: ...


class _RandomAccess(_Source):
    """The data of a `DataLoader` in a fixed order, with its own sampler, collation and batch size."""

    def __init__(self, loader: DataLoader, batch_sampler: Iterable[Any], unpack: Unpack) -> None:
        self.dataset, self.collate, self.unpack = loader.dataset, loader.collate_fn, unpack
        if type(batch_sampler) is BatchSampler:
            # The sampler, not the batches: `drop_last` would leave out different data at each pass.
            drawn, self.batch_size = list(batch_sampler.sampler), batch_sampler.batch_size
        else:
            batches = [list(batch) for batch in batch_sampler]
            drawn = [index for batch in batches for index in batch]
            self.batch_size = max(map(len, batches), default=1)
        check_coverage(loader, drawn)
        # Sorted, so that a shuffled loader gives the same order, hence the same samples, every time.
        self.order = sorted(drawn) if all(isinstance(i, int) for i in drawn) else drawn
        # Tensors that the dataset holds are not copied.
        self.in_memory = type(self.dataset) is TensorDataset and self.collate is default_collate
        self.index = torch.tensor(self.order) if self.in_memory else None

    def fetch(self, positions: Tensor) -> tuple[Any, Any]:
        if self.index is not None:
            assert isinstance(self.dataset, TensorDataset)
            chosen = self.index[positions]
            return self.unpack([tensor[chosen] for tensor in self.dataset.tensors])
        return self.unpack(self.collate([self.dataset[self.order[i]] for i in positions.tolist()]))

    def inputs(self, indices: Tensor) -> Any:
        return self.fetch(indices)[0]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for positions in torch.arange(len(self.order)).split(self.batch_size):
            if len(positions):  # `split` of nothing gives one empty piece
                yield self.fetch(positions)


class _Stream(_Source):
    """Batches in their order, read afresh in each pass; a datum is known by its place, so that the order must repeat.

    Inputs that are too large to be kept are held one request at a time: one for earlier data begins a new pass.
    """

    def __init__(self, batches: Iterable[Any], num_data: int | None, unpack: Unpack) -> None:
        self.kept = not isinstance(batches, DataLoader)  # a list is in memory, as it is
        self.batches, self.num_data, self.unpack = batches, num_data, unpack
        # Every batch of every pass is compared: an order that changes would give a datum the noise of another.
        self.checksums: dict[int, tuple[int, ...]] = {}
        self.reader: Iterator[tuple[Any, Any]] = iter(())
        self.first, self.held = 0, None
        self.looked_past_the_end = False

    def _look_past_the_end(self, batches: Iterator[Any]) -> None:
        """Warns in the first pass if there is another batch, which is not used; an error in that batch is ignored."""
        following = None
        if not self.looked_past_the_end:
            with suppress(Exception):
                following = next(batches, None)
        if following is not None:
            self._warn_of_more()
        self.looked_past_the_end = True

    def _warn_of_more(self) -> None:
        if not self.looked_past_the_end:
            warnings.warn(
                f"The data go on after the first {self.num_data}, which is what `num_data=` or the length of the "
                "dataset says there are: those behind are not used.",
                stacklevel=2,
            )
        self.looked_past_the_end = True

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        num = 0
        batches = iter(self.batches)
        for number, batch in enumerate(batches):
            x, y = self.unpack(batch)
            missing = num_rows(x) if self.num_data is None else self.num_data - num
            if missing < num_rows(x):
                self._warn_of_more()
                x, y = take(x, slice(missing)), take(y, slice(missing))
            checksum = _checksum((x, y))
            if self.checksums.setdefault(number, checksum) != checksum:
                raise _unrepeatable(number)
            num += num_rows(x)
            if num_rows(x):
                yield x, y
            if num == self.num_data:
                self._look_past_the_end(batches)
                return
        if self.num_data is not None:
            raise ValueError(f"The data end after {num} of `num_data={self.num_data}`; give the number that there are.")

    def inputs(self, indices: Tensor) -> Any:
        start, stop = int(indices[0]), int(indices[-1]) + 1
        if len(indices) != stop - start or bool((indices.diff() != 1).any()):
            raise ValueError(
                "A stream of data can be read in its order only, not by index, which mini-batches need: use "
                'method="krylov", or a map-style dataset.'
            )
        # Earlier data are gone: a stream goes forward only.
        if self.held is None or start < self.first:
            self.reader, self.first, self.held = iter(self), 0, None
        while self.held is None or self.first + num_rows(self.held) < stop:
            x, _ = next(self.reader)
            if self.held is None or self.first + num_rows(self.held) <= start:
                self.first += 0 if self.held is None else num_rows(self.held)
                self.held = x
            else:
                self.held = concatenate([self.held, x])
        return take(self.held, slice(start - self.first, stop - self.first))


def _source(loader: Iterable[Any], num_data: int | None, unpack: Unpack) -> _Source:
    # Before anything is read from it: reading would use up the data of the caller.
    if isinstance(loader, Iterator):
        raise TypeError(
            f"The data are a one-shot iterator ({type(loader).__name__}): they can be read only once, and fitting "
            "makes many passes. Pass a DataLoader or a list of batches, for example `list(iterator)`."
        )
    if isinstance(loader, Dataset):
        loader = DataLoader(loader, batch_size=_BATCH_SIZE)
    if not isinstance(loader, Iterable):
        raise TypeError(f"The data must be a DataLoader of (x, y) batches, but are a {type(loader).__name__}.")
    if num_data is not None:
        check_whole("`num_data`", num_data, 1)
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        if num_data is None and not isinstance(loader.dataset, Sized):
            raise ValueError(
                "The data are an IterableDataset, which may have no end: say how many there are with `num_data=`."
            )
        num = len(loader.dataset) if num_data is None else num_data  # pyright: ignore
        return _Stream(_with_own_workers(loader), num, unpack)
    if num_data is not None:
        raise ValueError(f"`num_data` is for an IterableDataset; the data of a {type(loader).__name__} are counted.")
    # Without a sampler of batches a loader's dataset gives whole batches, which have an order only.
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        return _RandomAccess(loader, loader.batch_sampler, unpack)
    if isinstance(loader, DataLoader):
        check_coverage(loader, list(loader.sampler))
        loader = _with_own_workers(loader)
    return _Stream(loader, None, unpack)


def _with_own_workers(loader: DataLoader) -> DataLoader:
    """The same loader; workers of the user's own that persist would go on from where these passes end."""
    own = copy.copy(loader)
    own._iterator = None
    return own


def _joined(targets: list[Any], fill: int | None) -> Any:
    """All targets as one; of different lengths padded with a label that is ignored."""
    shapes = {tuple(tensor.shape[1:] for tensor in batched(y)[0]) for y in targets}
    if len(shapes) == 1:
        return concatenate(targets)
    if fill is None or not all(isinstance(y, Tensor) for y in targets) or len(set(map(Tensor.dim, targets))) > 1:
        raise ValueError(
            f"Batches have targets of different shapes, {sorted(shapes, key=str)[:2]}: only labels of a categorical "
            "likelihood, of as many axes, are padded, with its `ignore_index`. Pad the targets to one shape."
        )
    sizes = [max(lengths) for lengths in zip(*(y.shape[1:] for y in targets), strict=True)]

    def padded(y: Tensor) -> Tensor:
        y = y if y.is_floating_point() or y.dtype == torch.bool else y.long()  # bytes do not hold every label
        # `F.pad` takes the last axis first: nothing before, what is missing behind.
        lengths = zip(reversed(y.shape[1:]), reversed(sizes), strict=True)
        return F.pad(y, [n for length, size in lengths for n in (0, size - length)], value=fill)

    return torch.cat([padded(y) for y in targets])


def _check_finite(x: Any, what: str, number: int) -> None:
    if (flaw := flaw_of(x)) is not None:
        raise ValueError(f"Batch {number} (counted from 0) has {flaw} in its {what}; clean the data first.")


def _checksum(pair: tuple[Any, Any]) -> tuple[int, ...]:
    # Tensors without numbers, and sparse ones, are refused when they are read.
    dense = [t.detach().cpu() for t in batched(pair)[0] if not t.is_meta and t.layout == torch.strided]
    return tuple(zlib.crc32(t.contiguous().reshape(-1).view(torch.uint8).numpy().data) for t in dense)


def _unrepeatable(number: int) -> ValueError:
    which = "the first batch" if number == 0 else f"batch {number} (counted from 0)"
    return ValueError(
        f"The loader gives different data at each pass: {which} differs between two passes over the same "
        "indices. Random augmentation (or an iterable that shuffles itself) makes the likelihood ill-defined and "
        "the error bars too small; pass the training data without augmentation."
    )


def _check_repeatable(source: _Source) -> None:
    """Compare the checksum of the first batch in two passes."""
    # One batch is enough for augmentation, which changes every datum; streams compare all batches as they are read.
    first, second = (next(itertools.islice(source, 1), None) for _ in range(2))
    if first is not None and (second is None or _checksum(first) != _checksum(second)):
        raise _unrepeatable(0)
