"""Where training data come from: a dataset, which is read by index, or a stream, whose order must repeat.

Of several processes each reads its own part of a dataset; a stream is read whole by all of them.
"""

import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from laplace_sampling.arguments import check_whole
from laplace_sampling.data.batches import as_tensors, batched, concatenate, digest, num_rows, take
from laplace_sampling.data.processes import ALONE, Processes
from laplace_sampling.data.random_state import private_loader

Unpack = Callable[[Any], tuple[Any, Any]]


class Source(ABC):
    """Batches of data, and the inputs of some of them by index."""

    in_memory = False  # whether inputs are views of memory that the dataset holds anyway

    @abstractmethod
    def batches(self) -> Iterator[tuple[int, Any, Any]]:
        """Number, inputs and targets of the batches that this process reads."""

    @abstractmethod
    def inputs(self, index: Tensor) -> Any:
        """The inputs of some data."""

    @abstractmethod
    def first_batch(self) -> tuple[Any, Any] | None:
        """The first batch of all data."""

    def total_bytes(self, datum: float) -> float:
        """The bytes of all inputs that this process reads, `datum` each; 0 if their number is not known."""
        return 0.0


class RandomAccess(Source):
    """The data of a map-style `DataLoader` in a fixed order, with its own sampler, collation and batch size."""

    def __init__(self, loader: DataLoader, unpack: Unpack, processes: Processes, sampled_by: Processes) -> None:
        self.dataset, self.collate, self.unpack = loader.dataset, loader.collate_fn, unpack
        if type(loader.batch_sampler) is BatchSampler:
            # The sampler, not the batches: `drop_last` would leave out different data at each pass.
            indices, self.batch_size = list(loader.batch_sampler.sampler), loader.batch_sampler.batch_size
        else:
            batches = [list(batch) for batch in loader.batch_sampler or ()]
            indices = [index for batch in batches for index in batch]
            self.batch_size = max(map(len, batches), default=1)
        indices = _indices_of_all(loader, [_plain(index) for index in indices], sampled_by)
        _check_coverage(loader, indices)
        # Sorted, so that a shuffled loader gives the same order, hence the same samples, every time.
        self.order = sorted(indices) if all(isinstance(i, int) for i in indices) else indices
        self.part = processes.part(len(indices))
        self.in_memory = type(self.dataset) is TensorDataset and self.collate is default_collate
        self.index = torch.tensor(self.order) if self.in_memory else None

    def batch(self, positions: Tensor) -> tuple[Any, Any]:
        if self.index is not None:
            assert isinstance(self.dataset, TensorDataset)
            chosen = self.index[positions]
            return self.unpack([tensor[chosen] for tensor in self.dataset.tensors])
        return self.unpack(self.collate([self.dataset[self.order[i]] for i in positions.tolist()]))

    def inputs(self, index: Tensor) -> Any:
        return self.batch(index)[0]

    def first_batch(self) -> tuple[Any, Any] | None:
        return self.batch(torch.arange(min(self.batch_size, len(self.order)))) if self.order else None

    def batches(self) -> Iterator[tuple[int, Any, Any]]:
        for positions in torch.arange(self.part.start, self.part.stop).split(self.batch_size):
            if len(positions):  # `split` of nothing gives one empty piece
                yield int(positions[0]) // self.batch_size, *self.batch(positions)

    def total_bytes(self, datum: float) -> float:
        return len(self.part) * datum


class Stream(Source):
    """Batches in their order, read afresh in each pass; a datum is known by its place.

    Of inputs that are too large to be kept, one batch is in memory: a request for earlier data begins a new pass.
    """

    def __init__(self, stream: Iterable[Any], num_data: int | None, unpack: Unpack) -> None:
        self.stream, self.num_data, self.unpack = stream, num_data, unpack
        self.in_list = not isinstance(stream, DataLoader)  # in memory as it is
        self.reader: Iterator[tuple[int, Any, Any]] = iter(())
        self.start, self.current = 0, None

    def first_batch(self) -> tuple[Any, Any] | None:
        return next(((x, y) for _, x, y in self.batches()), None)

    def batches(self) -> Iterator[tuple[int, Any, Any]]:
        num, batches = 0, iter(self.stream)
        for number, batch in enumerate(batches):
            x, y = self.unpack(batch)
            if self.num_data is not None and num + num_rows(x) > self.num_data:
                x, y = (take(part, slice(self.num_data - num)) for part in (x, y))
            num += num_rows(x)
            if num_rows(x):
                yield number, x, y
            if num == self.num_data:
                return
        if self.num_data is not None:
            raise ValueError(
                f"The data end after {num} of `Data(num_data={self.num_data})`; give the number that there are."
            )

    def inputs(self, index: Tensor) -> Any:
        if bool((index.diff() < 0).any()):
            order = index.argsort()
            return take(self.inputs(index[order]), order.argsort())
        # Earlier data are gone: a stream goes forward only.
        if self.current is None or int(index[0]) < self.start:
            self.reader = self.batches()
            self.start, self.current = 0, next(self.reader)[1]
        found = []
        while True:
            stop = self.start + num_rows(self.current)
            inside = (index >= self.start) & (index < stop)
            if bool(inside.any()):
                found.append(take(self.current, index[inside] - self.start))
            if int(index[-1]) < stop:
                return found[0] if len(found) == 1 else concatenate(found)
            self.start, self.current = stop, next(self.reader)[1]


def source_of(
    loader: Iterable[Any], num_data: int | None, unpack: Unpack, processes: Processes, sampled_by: Processes
) -> Source:
    """The source of a loader; arguments as for `TrainingData`."""
    # Before anything is read from it: reading would use up the data of the caller.
    if isinstance(loader, Iterator):
        raise TypeError(
            f"The data are a one-shot iterator ({type(loader).__name__}): they can be read only once, and fitting "
            "makes many passes. Pass a DataLoader or a list of batches, for example `list(iterator)`."
        )
    if isinstance(loader, Dataset):
        loader = DataLoader(loader, batch_size=256)  # half and twice of it take the same time a datum within 5 %
    if not isinstance(loader, Iterable):
        raise TypeError(f"The data must be a DataLoader of (x, y) batches, but are a {type(loader).__name__}.")
    if num_data is not None:
        check_whole("`num_data`", num_data, 1)
    if isinstance(loader, DataLoader):
        loader = private_loader(loader)
        if isinstance(loader.dataset, IterableDataset):
            return Stream(loader, _num_data(loader.dataset) if num_data is None else num_data, unpack)
    if num_data is not None:
        raise ValueError(f"`num_data` is for an IterableDataset; the data of a {type(loader).__name__} are counted.")
    # Without a sampler of batches a loader's dataset gives whole batches, which have an order only.
    if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
        return RandomAccess(loader, unpack, processes, sampled_by)
    if isinstance(loader, DataLoader):
        _check_coverage(loader, _indices_of_all(loader, list(loader.sampler), ALONE))
    return Stream(loader, None, unpack)


def _num_data(dataset: IterableDataset) -> int:
    if not isinstance(dataset, Sized):
        raise ValueError(
            "The data are an IterableDataset, which may have no end: say how many there are with `Data(num_data=...)`."
        )
    return len(dataset)


def _check_coverage(loader: DataLoader, indices: list[Any]) -> None:
    """Warns if the sampler of a loader gives a part of the data, or some of them more than once.

    Args:
        loader: a loader of a map-style dataset.
        indices: what its sampler gives.
    """
    total = _total(loader)
    if total is None or not all(isinstance(index, Hashable) for index in indices):
        return
    num = len(set(indices))
    repeated = f", {len(indices) - num} times one of them again" if num < len(indices) else ""
    if indices and (num < total or repeated):
        warnings.warn(
            f"The sampler of the loader gives {num} of the {total} data of its dataset{repeated}: the posterior is of "
            "these. Pass a loader without that sampler for all data, each once, or one of "
            "`torch.utils.data.Subset(dataset, indices)` for some without this warning.",
            stacklevel=2,
        )


def _indices_of_all(loader: DataLoader, indices: list[Any], processes: Processes) -> list[Any]:
    """The indices that the samplers of all processes give together, without those that a sampler gives to fill up.

    Args:
        loader: a loader of a map-style dataset.
        indices: what its sampler gives in this process.
        processes: those that share a fit.

    Raises:
        ValueError: for the share of one process in distributed training, if it shares no fit: its posterior is not that
            of all data.
    """
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    is_part = any(isinstance(one, DistributedSampler) and one.num_replicas > 1 for one in samplers)
    if processes.size == 1:
        if is_part:
            raise ValueError(
                f"The loader has a DistributedSampler, which gives this process {len(indices)} of {_total(loader)} "
                "data; the posterior is of all of them. Give `LinearisedLaplace` the `process_group=` that shares out "
                "the data, or pass a loader without it, such as `DataLoader(dataset, batch_size=...)`."
            )
        return indices
    order = sorted(indices, key=None if _are_numbers(indices) else repr)
    found = processes.gathered(lambda: (is_part, order))
    if not any(part for part, _ in found) and all(other == order for _, other in found):
        return indices
    united = list(dict.fromkeys(index for _, part in found for index in part))
    return sorted(united) if _are_numbers(united) else united


def _are_numbers(indices: list[Any]) -> bool:
    return all(isinstance(index, int) for index in indices)


def _total(loader: DataLoader) -> int | None:
    return len(loader.dataset) if isinstance(loader.dataset, Sized) else None


def check_repeatable(source: Source, processes: Processes) -> None:
    """Compare the first batch of two passes, and those of all processes.

    Raises:
        ValueError: if they are not the same.
    """
    # One batch is enough for augmentation, which changes every datum, and for a stream that shuffles itself.
    first, second = (_digest(source.first_batch()) for _ in range(2))
    if first != second:
        raise ValueError(
            "The loader gives different data at each pass: the first batch differs between two passes over the same "
            "indices. Random augmentation (or an iterable that shuffles itself) makes the likelihood ill-defined and "
            "the error bars too small; pass the training data without augmentation."
        )
    check_alike(first, processes)


def check_alike(digest: bytes | None, processes: Processes) -> None:
    """Raise if a digest of the data is not the same in all processes."""
    if processes.size > 1 and processes.differing({"data": digest}):
        raise ValueError(
            "The processes have different data: give each the same loader of all data, which are shared out by index, "
            "or one that differs by its sampler only, such as a DistributedSampler. Lists of batches and streams must "
            "be whole in each process."
        )


def _digest(batch: tuple[Any, Any] | None) -> bytes | None:
    # Tensors without numbers, and sparse ones, are refused when they are read.
    tensors = [t for t in batched(batch)[0] if not t.is_meta and t.layout == torch.strided] if batch else []
    return digest(("", tensor) for tensor in tensors) if batch else None


def _plain(index: Any) -> Any:
    """A number as Python has it, in place of those of torch and numpy, which do not compare with others."""
    with suppress(TypeError):  # of what is no whole number
        return operator.index(index)
    return index


def unpacking(unpack: Unpack | None) -> Unpack:
    """The user's function with a check of what it returns, or the one for pairs and for mappings with `labels`.

    Raises:
        TypeError: if it is no function.
    """
    if unpack is not None and not callable(unpack):
        raise TypeError(f"`unpack` must be a function of a batch, but is {unpack!r:.80}.")
    return _pair if unpack is None else partial(_unpacked, unpack)


def _pair(batch: Any) -> tuple[Any, Any]:
    batch = as_tensors(batch)
    if isinstance(batch, Mapping) and "labels" in batch:
        return {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    if not _is_pair(batch):
        hint = " To give all data at once, pass the list [(x, y)]." if isinstance(batch, Tensor) else ""
        raise TypeError(
            "Batches of the loader must be pairs (x, y) of tensors (or of tuples or dictionaries of them), or "
            f"mappings with `labels`, but one is {_kinds(batch)}.{hint} For others give `Data(unpack=...)`, of a batch "
            "that returns (inputs, targets)."
        )
    return batch[0], batch[1]


def _unpacked(unpack: Unpack, batch: Any) -> tuple[Any, Any]:
    pair = as_tensors(unpack(batch))
    if not _is_pair(pair):
        raise TypeError(
            "`unpack(batch)` must return (inputs, targets), both tensors or tuples or dictionaries of them, but "
            f"returned {_kinds(pair)}."
        )
    return pair[0], pair[1]


def _kinds(batch: Any) -> Any:
    return [type(part).__name__ for part in batch] if isinstance(batch, list | tuple) else type(batch).__name__


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list | tuple) and len(pair) == 2 and all(batched(part)[0] for part in pair)
