"""`FitGroup`: a process group of fits alone beside that of the user, whose processes tell each other of failures.

All that processes send to each other is sent here; what they share out is in `Processes`.

A process that fails leaves the sums that the others have begun, and such a sum would meet the next one that it asks
for, of whatever fit or training. So fits have a group of their own, and a new one after a failure.
"""

import pickle
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laplace_sampling.data.processes import ENDED, ProcessError, words

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FitGroup"]

# By the names of the groups of the user.
_ALL: "dict[str, FitGroup]" = {}

# Seconds after which a process that waits for others looks whether one of them has failed, and between looks at
# whether they have come.
_LOOK, _NAP = 1.0, 5e-5


@dataclass(eq=False)
class FitGroup:
    """The group of fits beside a group of the user.

    Attributes:
        given: the group of the user.
        telling: whether a call is being made whose errors are told.
        apart: whether this process works on its own data, of which others know nothing: nothing is sent.
    """

    given: "ProcessGroup"
    telling: bool = False
    apart: bool = False
    _own: "ProcessGroup | None" = None
    # Under which name failures are told. A random one, for a store may keep what other processes wrote into it.
    _key: str = ""
    _ended: str | None = None

    @classmethod
    def of(cls, given: "ProcessGroup") -> "FitGroup":
        """That of a group, always the same."""
        found = _ALL.get(given.group_name)
        if found is None or found.given is not given:  # the default group was destroyed and made again
            found = _ALL[given.group_name] = cls(given)
        return found

    @property
    def own(self) -> "ProcessGroup":
        """The group of fits, which all of its processes make together where they first need it."""
        import torch.distributed as dist

        assert not self.apart, "a process that works on its own data waits for others, which never come"
        if self._own is None:
            ranks, backend = dist.get_process_group_ranks(self.given), dist.get_backend_config(self.given)
            timeout = _timeout_of(self.given)
            own = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
            assert isinstance(own, dist.ProcessGroup)
            name = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=_device_of(own))
            dist.broadcast(name, ranks[0], group=own)
            self._own, self._key = own, f"laplace_sampling/failure/{bytes(name.tolist()).hex()}"
        return self._own

    @property
    def place(self) -> tuple[int, int]:
        """The number of this process, and how many there are."""
        import torch.distributed as dist

        return dist.get_rank(self.given), dist.get_world_size(self.given)

    # What is sent -----------------------------------------------------------------------------------------------------

    def reduced(self, tensor: Tensor, operation: str) -> Tensor:
        """The sum of a tensor over the processes, or as another operation says, in its place."""
        import torch.distributed as dist

        device = tensor.device if tensor.device.type != "cpu" else _device_of(self.given)
        there = tensor.to(device).contiguous()
        self.wait(dist.all_reduce(there, getattr(dist.ReduceOp, operation), group=self.own, async_op=True))
        return tensor if there is tensor else tensor.copy_(there)

    def exchanged(self, mine: Any) -> list[Any]:
        """What each process gives, by pickle. Torch's own function waits without a look at failures."""
        import torch.distributed as dist

        sent = _pickled(mine).to(_device_of(self.given))
        sizes = [torch.zeros(1, dtype=torch.int64, device=sent.device) for _ in range(self.place[1])]
        size = torch.tensor([len(sent)], device=sent.device)
        self.wait(dist.all_gather(sizes, size, group=self.own, async_op=True))
        longest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(sent, (0, longest - len(sent)))
        there = [torch.empty_like(padded) for _ in sizes]
        self.wait(dist.all_gather(there, padded, group=self.own, async_op=True))
        return [_unpickled(one[: int(size)]) for one, size in zip(there, sizes, strict=True)]

    def sent(self, value: Any) -> Any:
        """What the first process gives, likewise."""
        import torch.distributed as dist

        first, is_first = dist.get_global_rank(self.given, 0), self.place[0] == 0
        sent = _pickled(value).to(_device_of(self.given))
        size = torch.tensor([len(sent)], device=sent.device)
        self.wait(dist.broadcast(size, first, group=self.own, async_op=True))
        if not is_first:
            sent = torch.empty(int(size), dtype=torch.uint8, device=sent.device)
        self.wait(dist.broadcast(sent, first, group=self.own, async_op=True))
        return value if is_first else _unpickled(sent)

    # Failures ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """All processes begin a fit.

        Raises:
            ProcessError: if one of them has ended in an earlier fit.
        """
        if self._ended is not None:
            raise ProcessError(self._ended)
        _ = self.own  # from here on failures can be told

    def fail(self, error: BaseException) -> None:
        """Tells the others of an error of this process, or of another that told it, and leaves what they have begun."""
        self._own = None
        cause = error.cause if isinstance(error, ProcessError) else f"process {_rank()}: {words(error)}"
        if ENDED in cause:
            self._ended = cause
        with suppress(Exception):  # the process that holds the store may have ended first
            if self.told() is None:
                _store().set(self._key, cause)

    def told(self) -> str | None:
        """What a process has told of its failure."""
        with suppress(Exception):
            return _store().get(self._key).decode() if _store().check([self._key]) else None
        return None

    def wait(self, work: Any) -> None:
        """Until a sum is there, or until another process is known to have failed."""
        looked, cause = time.monotonic(), None
        try:
            while not work.is_completed():
                time.sleep(_NAP)
                if time.monotonic() - looked > _LOOK:
                    # The process may have failed after this sum, which is then about to come.
                    if cause is not None:
                        raise ProcessError(cause)
                    looked, cause = time.monotonic(), self.told()
            work.wait()
        except ProcessError:
            raise
        except RuntimeError as error:
            raise ProcessError(self.told() or f"{ENDED}: {error}") from error


def _device_of(group: Any) -> torch.device:
    """Where a group takes tensors: NCCL on a GPU only, Gloo on the CPU."""
    import torch.distributed as dist

    is_nccl = "nccl" in dist.get_backend_config(group) and "gloo" not in dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(numbers: Tensor) -> Any:
    return pickle.loads(numbers.cpu().numpy().tobytes())


def _timeout_of(group: Any) -> timedelta | None:
    """How long a process of a group waits for others; `None` for that of the backend."""
    with suppress(Exception):  # torch has no public name for it
        return group._get_backend(_device_of(group)).options._timeout
    return None
