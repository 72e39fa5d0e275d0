"""Where training data come from: a dataset with a sampler, or a stream.

Each gives all data in batches, in an order that repeats, and the inputs of some of them. Of several processes each
reads its part of a dataset; a stream, which has an order only, is read by all of them, unless each has another one.
"""

import copy
import itertools
import operator
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

from laplace_sampling.data.batches import batched, concatenate, num_rows, take
from laplace_sampling.data.coverage import check_coverage, drawn_by_all
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.data.unpacking import Unpack
from laplace_sampling.solvers.checks import check_whole

__all__ = ["RandomAccess", "Source", "Stream", "check_repeatable", "check_same_stream", "source_of"]

# The batch size of the loader that a dataset gets. With 128 and 512 instead, GGN products of 8 vectors on LeNet take
# the same time a datum within 5 %.
_BATCH_SIZE = 256


class Source(ABC):
    """Where data come from: all of them in batches, and the inputs of some."""

    in_memory = False  # whether the dataset holds tensors, of which no copies are needed
    kept = False  # whether inputs are kept whatever their size
    shared = False  # whether each process reads its part
    divided = False  # whether that part is a stream of its own

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """All data, in batches."""

    @abstractmethod
    def inputs(self, indices: Tensor) -> Any:
        """The inputs of some data."""

    def own(self) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """The batches that this process reads, with their numbers."""
        yield from enumerate(self)

    def total_bytes(self, num_bytes: float) -> float:
        """Of the inputs that this process reads, if a datum has so many; 0 if their number is not known."""
        return 0.0


class RandomAccess(Source):
    """The data of a `DataLoader` in a fixed order, with its own sampler, collation and batch size."""

    def __init__(
        self,
        loader: DataLoader,
        batch_sampler: Iterable[Any],
        unpack: Unpack,
        processes: Processes,
        drawn_by: Processes,
    ) -> None:
        self.dataset, self.collate, self.unpack = loader.dataset, loader.collate_fn, unpack
        if type(batch_sampler) is BatchSampler:
            # The sampler, not the batches: `drop_last` would leave out different data at each pass.
            drawn, self.batch_size = list(batch_sampler.sampler), batch_sampler.batch_size
        else:
            batches = [list(batch) for batch in batch_sampler]
            drawn = [index for batch in batches for index in batch]
            self.batch_size = max(map(len, batches), default=1)
        drawn = drawn_by_all(loader, [_plain(index) for index in drawn], drawn_by)
        check_coverage(loader, drawn)
        self.part, self.shared = processes.part(len(drawn)), processes.share_data
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

    def own(self) -> Iterator[tuple[int, tuple[Any, Any]]]:
        for positions in torch.arange(self.part.start, self.part.stop).split(self.batch_size):
            if len(positions):
                yield int(positions[0]) // self.batch_size, self.fetch(positions)

    def total_bytes(self, num_bytes: float) -> float:
        return len(self.part) * num_bytes


class Stream(Source):
    """Batches in their order, read afresh in each pass; a datum is known by its place, so that the order must repeat.

    Of inputs that are too large to be kept one batch is held: a request for earlier data begins a new pass.
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
            missing = num_rows(x) if self.num_data is None or self.divided else self.num_data - num
            if missing < num_rows(x):
                self._warn_of_more()
                x, y = take(x, slice(missing)), take(y, slice(missing))
            checksum = _checksum((x, y))
            if self.checksums.setdefault(number, checksum) != checksum:
                raise _unrepeatable(number)
            num += num_rows(x)
            if num_rows(x):
                yield x, y
            if self.divided and num > (self.num_data or 0):
                break  # it may have no end
            if num == self.num_data and not self.divided:
                self._look_past_the_end(batches)
                return
        if self.num_data is not None and not self.divided:
            raise ValueError(f"The data end after {num} of `num_data={self.num_data}`; give the number that there are.")

    def inputs(self, indices: Tensor) -> Any:
        if bool((indices.diff() < 0).any()):
            order = indices.argsort()
            return take(self.inputs(indices[order]), order.argsort())
        # Earlier data are gone: a stream goes forward only.
        if self.held is None or int(indices[0]) < self.first:
            self.reader = iter(self)
            self.first, self.held = 0, next(self.reader)[0]
        found = []
        while True:
            following = self.first + num_rows(self.held)
            inside = indices[(indices >= self.first) & (indices < following)] - self.first
            if len(inside):
                are_neighbours = bool((inside.diff() == 1).all())
                found.append(take(self.held, slice(int(inside[0]), int(inside[-1]) + 1) if are_neighbours else inside))
            if int(indices[-1]) < following:
                return found[0] if len(found) == 1 else concatenate(found)
            self.first, self.held = following, next(self.reader)[0]


def _plain(index: Any) -> Any:
    """A number as Python has it: those of torch and numpy are told apart where they are equal."""
    with suppress(TypeError):  # of what is no whole number
        return operator.index(index)
    return index


def source_of(
    loader: Iterable[Any], num_data: int | None, unpack: Unpack, processes: Processes, drawn_by: Processes
) -> Source:
    """Where the data of a loader come from; arguments as of `TrainingData`."""
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
        return Stream(_with_own_workers(loader), num, unpack)
    if num_data is not None:
        raise ValueError(f"`num_data` is for an IterableDataset; the data of a {type(loader).__name__} are counted.")
    # Without a sampler of batches a loader's dataset gives whole batches, which have an order only.
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        return RandomAccess(loader, loader.batch_sampler, unpack, processes, drawn_by)
    if isinstance(loader, DataLoader):
        check_coverage(loader, drawn_by_all(loader, list(loader.sampler), ALONE))
        loader = _with_own_workers(loader)
    return Stream(loader, None, unpack)


def _with_own_workers(loader: DataLoader) -> DataLoader:
    """The same loader; workers of the user's own that persist would go on from where these passes end."""
    own = copy.copy(loader)
    own._iterator = None
    return own


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


def check_repeatable(source: Source, processes: Processes) -> None:
    """Compares the checksum of the first batch in two passes, and with those of other processes.

    Streams of which each process has another one are parts of one.

    Raises:
        ValueError: if the passes differ, or the datasets of processes.
    """
    divisible = isinstance(source, Stream) and source.num_data is not None and processes.share_data
    source.divided = divisible  # a part may have no data
    firsts = processes.gathered(lambda: _first_checksum(source))
    differ = any(first != firsts[0] for first in firsts)
    if differ and not divisible:
        raise ValueError(
            "The processes have different data: give each the same loader of all data, which are shared out by index, "
            "or one that differs by its sampler only, such as a DistributedSampler. Lists of batches must be whole in "
            "each process; streams may be parts, with `num_data` of all of them together."
        )
    source.divided = differ
    if isinstance(source, Stream):
        source.shared = differ
        source.checksums.clear()  # those of batches that are not cut off at the end


def check_same_stream(source: Source, processes: Processes) -> None:
    """Compares all batches of a stream that was read, with those of the processes that read the same.

    Raises:
        ValueError: if they are not the same.
    """
    if not isinstance(source, Stream) or not processes.are_several:
        return
    read = processes.gathered_samples if source.divided else processes.gathered_from_all
    everywhere = read(lambda: sorted(source.checksums.items()))
    if any(other != everywhere[0] for other in everywhere):
        raise ValueError(
            "The processes have streams that begin with the same batch and go on with others. Give each the whole "
            "stream, in the same order, or parts that differ from the first batch on."
        )


def _first_checksum(source: Source) -> tuple[int, ...] | None:
    # One batch is enough for augmentation, which changes every datum; streams compare all batches as they are read.
    first, second = (next(itertools.islice(source, 1), None) for _ in range(2))
    if first is not None and (second is None or _checksum(first) != _checksum(second)):
        raise _unrepeatable(0)
    return None if first is None else _checksum(first)
