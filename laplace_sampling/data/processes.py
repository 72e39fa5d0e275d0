"""`Processes`: the processes of `torch.distributed` that share out the data of a fit.

All of them run the same code on the same numbers, and meet where something is summed over data
(`linear_model.features.Features.summing`) or computed for each datum (`by_datum`): there each takes its part of the
data, and the parts are joined. What follows, decisions of solvers among it, comes from these results on every process
alike, so nothing else has to know that there are several.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")

# The groups of fits, by the names of the groups of users that they stand beside.
_OWN: dict[str, tuple[Any, Any]] = {}


class ProcessError(RuntimeError):
    """Another process of a fit has failed, or has ended."""


class Processes:
    """The processes that share out the data of a fit; without a group this one is alone.

    Everything is sent in a group of fits alone. A process that fails leaves the sums that others have begun, and these
    must not meet another sum, of whatever fit or training; so there is a new group after a failure (`shared_call`).

    Args:
        group: the process group of the user.

    Attributes:
        rank: the number of this process.
        size: how many there are.
        is_local: whether this process works on its own data, so that nothing may be sent.

    Raises:
        TypeError, ValueError: for something else than a group, or one in which this process is not.
    """

    def __init__(self, group: Any = None) -> None:
        self.group, self.rank, self.size, self.is_local = group, 0, 1, False
        if group is None:
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "`process_group=` needs the processes of `torch.distributed`: start the script by `torchrun`, and call "
                "`torch.distributed.init_process_group()` first."
            )
        is_outside = group == dist.GroupMember.NON_GROUP_MEMBER
        if not is_outside and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"`process_group` must be a group of `torch.distributed`, such as `torch.distributed.group.WORLD`, but "
                f"is {group!r:.80}."
            )
        if is_outside or dist.get_rank(group) < 0:
            raise ValueError("This process is not in the group of `process_group=`: only those that are share a fit.")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, or in a file, nobody shares anything."""
        return Processes, ()

    # Parts of the data ------------------------------------------------------------------------------------------------

    def part(self, num: int) -> range:
        """Which of so many data are those of this process: neighbours, as many as others have, up to one."""
        return range(num * self.rank // self.size, num * (self.rank + 1) // self.size)

    def even_pieces(self, own: Tensor, num: int, most: int) -> list[Tensor]:
        """The part of this process of `num` data in pieces of at most `most`, as many pieces as others have.

        Raises:
            ValueError: for fewer data than pieces.
        """
        pieces = -(-num // (self.size * most))
        if num // self.size < pieces:
            raise ValueError(
                f"A model of `fully_shard` runs in all of the {self.size} processes at once, each with data of its "
                f"own, but {num} data in batches of {most} are too few for that. Leave out `process_group=`, or give "
                "larger batches."
            )
        return list(own.tensor_split(pieces))

    @contextmanager
    def local_only(self) -> Iterator[None]:
        """Inside, each process works on its own data, and nothing is sent."""
        before, self.is_local = self.is_local, self.size > 1
        try:
            yield
        finally:
            self.is_local = before

    # Sums -------------------------------------------------------------------------------------------------------------

    def sum(self, *totals: Tensor) -> None:
        """Replace what each process has of a sum by the sum itself."""
        if self.size > 1:
            for total in totals:
                self._reduce(total, "SUM")

    def least(self, value: float) -> float:
        """The least of a number that each process has."""
        return float(self._reduce(torch.tensor(value, dtype=torch.float64), "MIN")) if self.size > 1 else value

    @contextmanager
    def counting(self, counts: MutableMapping[str, int]) -> Iterator[None]:
        """Inside, counts go up by what all processes do."""
        before = dict(counts)
        yield
        if self.size > 1 and counts:
            made = torch.tensor([counts[name] - before[name] for name in before], dtype=torch.int64)
            for name, number in zip(before, self._reduce(made, "SUM").tolist(), strict=True):
                counts[name] = before[name] + number

    # Rows of each datum -----------------------------------------------------------------------------------------------

    def all_rows(self, rows: Tensor, num: int) -> Tensor:
        """The rows of all `num` data, from those of its part in each process."""
        if self.size == 1:
            return rows
        # A sum of rows and zeros; by bytes where gloo has no sums, as for short integers and truth values.
        as_they_are = rows.dtype in (torch.float32, torch.float64)
        flat = rows.reshape(len(rows), rows.shape[1:].numel())
        sent = flat if as_they_are else flat.contiguous().view(torch.uint8)
        total, part = torch.zeros(num, sent.shape[1], dtype=sent.dtype, device=sent.device), self.part(num)
        total[part.start : part.stop] = sent
        return self._reduce(total, "SUM").view(rows.dtype).reshape(num, *rows.shape[1:])

    # Results ----------------------------------------------------------------------------------------------------------

    def gathered(self, compute: Callable[[], Result]) -> list[Result]:
        """The results of a function on each process, in their order.

        Raises:
            Exception: that of the function on this process, and on all others a `ProcessError` with its words.
        """
        if self.size == 1:
            return [compute()]
        result, error = _attempted(compute)
        results: list[Any] = [None] * self.size
        with self._sending():
            dist.all_gather_object(results, (result, error and _in_one_line(error)), group=self._own)
        if error is not None:
            raise error
        for rank, (_, cause) in enumerate(results):
            self._raise(rank, cause)
        return [result for result, _ in results]

    def first(self, compute: Callable[[], Result]) -> Result:
        """The result of a function that only the first process calls; errors as in `gathered`."""
        if self.size == 1:
            return compute()
        result, error = _attempted(compute) if self.rank == 0 else (None, None)
        sent = [(result, error and _in_one_line(error))]
        with self._sending():
            dist.broadcast_object_list(sent, dist.get_global_rank(self.group, 0), group=self._own)
        if error is not None:
            raise error
        self._raise(0, sent[0][1])
        return cast(Result, sent[0][0])

    def differing(self, here: Mapping[str, Any]) -> list[str]:
        """The names whose values are not the same in all processes."""
        everywhere = self.gathered(lambda: here)
        names = dict.fromkeys(name for there in everywhere for name in there)
        return [name for name in names if any(there.get(name) != here.get(name) for there in everywhere)]

    def _raise(self, rank: int, cause: str | None) -> None:
        if cause is not None:
            raise ProcessError(f"Process {rank} of the {self.size} that share the fit has failed: {cause}")

    # The group of fits ------------------------------------------------------------------------------------------------

    @contextmanager
    def shared_call(self) -> Iterator[None]:
        """A call that all processes make; one that fails gives up its group, so that others do not wait for it."""
        try:
            yield
        except BaseException:
            if self.size > 1 and self.group.group_name in _OWN:
                with suppress(Exception):  # of a group that has ended
                    dist.destroy_process_group(_OWN.pop(self.group.group_name)[1])
            raise

    @property
    def _own(self) -> Any:
        """The group of fits, which all processes make together where they first need it."""
        name = self.group.group_name
        # The default group may have been destroyed and made again.
        if name not in _OWN or _OWN[name][0] is not self.group:
            ranks, backend = dist.get_process_group_ranks(self.group), dist.get_backend_config(self.group)
            own = dist.new_group(ranks, _timeout_of(self.group), backend, use_local_synchronization=True)
            _OWN[name] = self.group, own
        return _OWN[name][1]

    def _reduce(self, tensor: Tensor, operation: str) -> Tensor:
        """Replace a tensor by its sum over the processes, or as another operation says."""
        there = tensor.to(tensor.device if tensor.device.type != "cpu" else _device_of(self.group)).contiguous()
        with self._sending():
            dist.all_reduce(there, getattr(dist.ReduceOp, operation), group=self._own)
        return tensor if there is tensor else tensor.copy_(there)

    @contextmanager
    def _sending(self) -> Iterator[None]:
        assert not self.is_local, "a process that works on its own data waits for others, which never come"
        try:
            yield
        except RuntimeError as error:
            raise ProcessError(
                "Another process that shares the fit has failed or ended; its own error says why. If it has ended, "
                f"start all processes again: a fit with `checkpoint=` goes on. ({error})"
            ) from error


ALONE = Processes()


def _attempted(compute: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return compute(), None
    except Exception as error:
        return None, error


def _in_one_line(error: Exception) -> str:
    return str(error) if isinstance(error, ProcessError) else f"{type(error).__name__}: {error}"


def _device_of(group: Any) -> torch.device:
    """The device whose tensors a group takes: NCCL on a GPU only, Gloo on the CPU."""
    backends = dist.get_backend_config(group)
    is_nccl = "nccl" in backends and "gloo" not in backends
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _timeout_of(group: Any) -> timedelta | None:
    """How long a process of a group waits for others; `None` for the default of the backend."""
    with suppress(Exception):  # torch has no public name for it
        return group._get_backend(_device_of(group)).options._timeout
    return None
