"""Which of the data of a dataset a loader gives."""

import hashlib
import warnings
from collections.abc import Hashable, Iterator, Sized
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from laplace_sampling.data.processes import Processes


def check_coverage(loader: DataLoader, indices: list[Any]) -> None:
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


def indices_of_all(loader: DataLoader, indices: list[Any], processes: Processes) -> list[Any]:
    """The indices that the samplers of all processes give together, without those that a sampler gives to fill up.

    Args:
        loader: a loader of a map-style dataset.
        indices: what its sampler gives in this process.
        processes: those that share a fit.

    Raises:
        ValueError: for the share of one process in distributed training, if it shares no fit: its posterior is not that
            of all data.
    """
    is_part = any(isinstance(one, DistributedSampler) and one.num_replicas > 1 for one in _samplers(loader))
    if processes.size == 1:
        if is_part:
            raise ValueError(
                f"The loader has a DistributedSampler, which gives this process {len(indices)} of {_total(loader)} "
                "data; the posterior is of all of them. Give `LinearisedLaplace` the `process_group=` that shares out "
                "the data, or pass a loader without it, such as `DataLoader(dataset, batch_size=...)`."
            )
        return indices
    order = sorted(indices, key=None if _are_numbers(indices) else repr)
    found = processes.gathered(lambda: (is_part, hashlib.sha256(repr(order).encode()).digest()))
    if not any(part for part, _ in found) and all(other == found[0] for other in found):
        return indices
    united = list(dict.fromkeys(index for part in processes.gathered(lambda: order) for index in part))
    return sorted(united) if _are_numbers(united) else united


def _are_numbers(indices: list[Any]) -> bool:
    return all(isinstance(index, int) for index in indices)


def _total(loader: DataLoader) -> int | None:
    return len(loader.dataset) if isinstance(loader.dataset, Sized) else None


def _samplers(loader: DataLoader) -> Iterator[Any]:
    """The samplers of a loader, and those inside of them."""
    found: list[Any] = [loader.sampler, loader.batch_sampler]
    for sampler in found:
        yield sampler
        inner = getattr(sampler, "__dict__", {}).get("sampler")
        if inner is not None and all(inner is not other for other in found):
            found.append(inner)
