"""Training data by index: the same datum under the same index in every pass, whatever order the loader has.

Frozen noise belongs to a datum, and solvers choose mini-batches, so data are fetched from the loader's dataset by
index. The loader gives its batch size (what fits in memory), its sampler (which data) and its `collate_fn`. A stream
has no index but its order, which must repeat.

Training goes on after a fit, bit for bit, as it would have without one. But a shuffled loader draws from torch's global
generator or from one of its own, and samplers draw from numpy's or python's, or change lists of their own. So data are
read by a copy of the loader's samplers (`private_loader`) and in global states of their own (`PrivateRandomness`).

A `Source` is a dataset, which is read by index, or a stream, whose order must repeat. Of several processes each reads
its own part of a dataset; a stream is read whole by all of them.
"""

import copy
import math
import operator
import random
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

from laplace_sampling.arguments import check_whole
from laplace_sampling.data.batches import (
    as_tensors,
    batched,
    concatenate,
    constants,
    digest,
    flaw_of,
    num_bytes,
    num_rows,
    take,
)
from laplace_sampling.data.processes import ALONE, Processes


def private_loader(loader: DataLoader) -> DataLoader:
    """A loader of the same dataset whose samplers, generator and workers are its own."""
    own, memo = copy.copy(loader), {id(loader.dataset): loader.dataset}
    if "base_dataloader" in vars(loader):  # a loader of Accelerate, which asks the one inside for all that it has not
        vars(own)["base_dataloader"] = private_loader(vars(loader)["base_dataloader"])
        return own
    # Workers of the user's that persist would go on from where these passes end.
    own._iterator = None
    # Set past `DataLoader.__setattr__`, which forbids it; with one memo, so that they still share what they share.
    vars(own).update({n: copy.deepcopy(vars(loader)[n], memo) for n in ("generator", "sampler", "batch_sampler")})
    return own


class PrivateRandomness:
    """Global random states that begin as the user's, and go on from one use to the next.

    Several threads may borrow the user's state at the same time: the first one keeps it, and the last one puts it back.
    """

    _lock = threading.Lock()
    _of_user: ClassVar[list[tuple[Any, ...]]] = []  # once for each thread that borrows it

    def __init__(self) -> None:
        self._own: tuple[Any, ...] | None = None

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside, what is drawn goes on from the last use; at the end the user's state is put back."""
        with self._lock:
            self._of_user.append(self._of_user[0] if self._of_user else _states())
        try:
            # A stream that was half read goes on with the state in which it stopped.
            if self._own is not None:
                _set_states(self._own)
            try:
                yield
            finally:
                self._own = _states()
        finally:
            with self._lock:
                states = self._of_user.pop()
                if not self._of_user:
                    _set_states(states)


def _states() -> tuple[Any, ...]:
    of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), of_cuda, np.random.get_state(), random.getstate()  # noqa: NPY002 it is the user's


def _set_states(states: tuple[Any, ...]) -> None:
    of_torch, of_cuda, of_numpy, of_python = states
    torch.set_rng_state(of_torch)
    if of_cuda is not None:
        torch.cuda.set_rng_state_all(of_cuda)
    np.random.set_state(of_numpy)  # noqa: NPY002
    random.setstate(of_python)


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
