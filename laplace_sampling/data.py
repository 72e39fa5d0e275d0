"""Training data by index: the same datum under the same index in every pass, whatever order the loader has.

Frozen noise belongs to a datum, and mini-batches are ours to choose, so data are fetched from the loader's
dataset by index; the loader gives its batch size (what fits in memory), its sampler (which data) and its
`collate_fn`.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

__all__ = ["TrainingData"]

# Data up to this size are kept in memory, as tensors, and the dataset is read once.
DEFAULT_CACHE_BYTES = 2**31


class TrainingData:
    """Pairs `(x, y)` of a loader, by index.

    Args:
        loader: a `DataLoader` over a map-style dataset, or any iterable of `(x, y)` batches that can be read again.
        cache_bytes: data larger than this are read from the dataset at each pass instead of being kept.

    Attributes:
        num_data: `N`, counted, not taken from `len(dataset)`.
        batch_size: rows that go through the network together in a pass.
        targets: all `y`, `[N, ...]`.

    Raises:
        TypeError: if the loader is a one-shot iterator, or its batches are not pairs of tensors.
        ValueError: if it is empty, has NaN or infinity in it (the message names the batch), or gives different
            data at each pass.
    """

    def __init__(self, loader: Iterable[Any], *, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        if isinstance(loader, Iterator):
            raise TypeError(
                f"The data are a one-shot iterator ({type(loader).__name__}): they can be read only once, and fitting "
                "makes many passes. Pass a DataLoader or a list of batches, for example `list(iterator)`."
            )
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            loader = DataLoader(loader, batch_size=256)
        if not isinstance(loader, Iterable):
            raise TypeError(f"The data must be a DataLoader of (x, y) batches, but are a {type(loader).__name__}.")
        self._source = self._random_access(loader)
        batches = self._source if self._source is not None else loader
        _check_repeatable(batches)
        inputs, targets, sizes, kept = [], [], [], 0
        for number, batch in enumerate(batches):
            x, y = _pair(batch)
            _check_finite(x, "inputs", number)
            _check_finite(y, "targets", number)
            if len(x) != len(y):
                raise ValueError(f"Batch {number} has {len(x)} inputs and {len(y)} targets.")
            kept += x.numel() * x.element_size()
            if kept <= cache_bytes or self._source is None:
                inputs.append(x)
            targets.append(y)
            sizes.append(len(x))
        self.num_data = sum(sizes)
        if self.num_data == 0:
            raise ValueError(
                "The loader is empty: it gave no data. Check the dataset, and `drop_last=True` with a "
                "batch size larger than the dataset."
            )
        self.batch_size = max(sizes)
        self.targets = torch.cat(targets)
        if self._source is None or kept <= cache_bytes:
            self._source, self._inputs = None, torch.cat(inputs)
        else:
            self._inputs = None

    def inputs(self, indices: Tensor) -> Tensor:
        """The inputs of some data, `[n, ...]`."""
        if self._inputs is not None:
            return self._inputs[indices]
        assert self._source is not None
        return _pair(self._source.fetch(indices))[0]

    @staticmethod
    def _random_access(loader: Iterable[Any]) -> "_RandomAccess | None":
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return None
        return None if loader.batch_sampler is None else _RandomAccess(loader, loader.batch_sampler)


class _RandomAccess:
    """The data of a `DataLoader` in a fixed order, with its own sampler, collation and batch size."""

    def __init__(self, loader: DataLoader, batch_sampler: Iterable[Any]) -> None:
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        if type(batch_sampler) is BatchSampler:
            # The sampler, not the batches: `drop_last` would leave out different data at each pass.
            drawn, self.batch_size = list(batch_sampler.sampler), batch_sampler.batch_size
        else:
            batches = [list(batch) for batch in batch_sampler]
            drawn = [index for batch in batches for index in batch]
            self.batch_size = max(map(len, batches), default=1)
        # Sorted, so that a shuffled loader gives the same order, hence the same samples, every time.
        self.order = sorted(drawn) if all(isinstance(i, int) for i in drawn) else drawn

    def fetch(self, positions: Tensor) -> Any:
        return self.collate([self.dataset[self.order[i]] for i in positions.tolist()])

    def __iter__(self) -> Iterator[Any]:
        for positions in torch.arange(len(self.order)).split(self.batch_size):
            if len(positions):  # `split` of nothing gives one empty piece
                yield self.fetch(positions)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(part, Tensor) for part in batch):
        found = [type(part).__name__ for part in batch] if isinstance(batch, list | tuple) else type(batch).__name__
        hint = " To give all data at once, pass the list [(x, y)]." if isinstance(batch, Tensor) else ""
        raise TypeError(f"Batches of the loader must be pairs (x, y) of tensors, but one is {found}.{hint}")
    return batch[0].detach(), batch[1].detach()


def _check_finite(tensor: Tensor, what: str, number: int) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise ValueError(f"Batch {number} (counted from 0) has NaN or infinity in its {what}; clean the data first.")


def _checksum(batch: Any) -> tuple[int, ...]:
    return tuple(
        zlib.crc32(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for part in _pair(batch)
    )


def _check_repeatable(batches: Iterable[Any]) -> None:
    """Compare the checksum of the first batch in two passes."""
    first, second = next(iter(batches), None), next(iter(batches), None)
    if first is not None and (second is None or _checksum(first) != _checksum(second)):
        raise ValueError(
            "The loader gives different data at each pass: the first batch differs between two passes over the same "
            "indices. Random augmentation (or an iterable that shuffles itself) makes the likelihood ill-defined and "
            "the error bars too small; pass the training data without augmentation."
        )
