"""Which of the data of a dataset a loader gives."""

import warnings
from collections.abc import Hashable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

__all__ = ["check_coverage"]


def check_coverage(loader: DataLoader, drawn: list[Any]) -> None:
    """Warns if the sampler of a loader gives a part of the data, or some of them more than once.

    Args:
        loader: a loader of a map-style dataset.
        drawn: the indices that its sampler gives.

    Raises:
        ValueError: for the share of one process in distributed training: its posterior is not that of all data.
    """
    total = len(loader.dataset) if isinstance(loader.dataset, Sized) else None
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
            raise ValueError(
                f"The loader has a DistributedSampler, which gives this process {len(drawn)} of {total} data; the "
                "posterior is of all of them. Pass a loader without it, such as `DataLoader(dataset, batch_size=...)`, "
                "on one process."
            )
    if total is None or not all(isinstance(index, Hashable) for index in drawn):
        return
    num = len(set(drawn))
    repeated = f", {len(drawn) - num} times one of them again" if num < len(drawn) else ""
    if drawn and (num < total or repeated):
        warnings.warn(
            f"The sampler of the loader gives {num} of the {total} data of its dataset{repeated}: the posterior is of "
            "these. Pass a loader without that sampler for all data, each once, or one of "
            "`torch.utils.data.Subset(dataset, indices)` for some without this warning.",
            stacklevel=2,
        )


def _samplers(loader: DataLoader) -> Iterator[Any]:
    """The samplers of a loader, and those inside of them."""
    found: list[Any] = [loader.sampler, loader.batch_sampler]
    for sampler in found:
        yield sampler
        inner = getattr(sampler, "__dict__", {}).get("sampler")
        if inner is not None and all(inner is not other for other in found):
            found.append(inner)
