"""`FitGroup`: a process group of fits alone beside that of the user, whose processes tell each other of failures.

A process that fails leaves the sums that the others have begun, and such a sum would meet the next one that it asks
for, of whatever fit or training. So fits have a group of their own, and a new one after a failure.
"""

import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["FitGroup", "ProcessError", "device_of", "words"]

# By the names of the groups of the user.
_ALL: "dict[str, FitGroup]" = {}

# Seconds after which a process that waits for others looks whether one of them has failed, and between looks at
# whether they have come.
_LOOK, _NAP = 1.0, 5e-5
_ENDED = "it has ended, or cannot be reached"


class ProcessError(RuntimeError):
    """Another process of a fit has failed, or has ended.

    Attributes:
        cause: the words of its error.
    """

    def __init__(self, cause: str, who: str = "Another process that shares the fit") -> None:
        advice = ". Start all processes again; a fit with `checkpoint=` goes on." if _ENDED in cause else ""
        super().__init__(f"{who} has failed: {cause}{advice}")
        self.cause = cause


@dataclass(eq=False)
class FitGroup:
    """The group of fits beside a group of the user.

    Attributes:
        given: the group of the user.
    """

    given: "ProcessGroup"
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

        if self._own is None:
            ranks, backend = dist.get_process_group_ranks(self.given), dist.get_backend_config(self.given)
            own = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            assert isinstance(own, dist.ProcessGroup)
            name = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=device_of(own))
            dist.broadcast(name, ranks[0], group=own)
            self._own, self._key = own, f"laplace_sampling/failure/{bytes(name.tolist()).hex()}"
        return self._own

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
        if _ENDED in cause:
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
            raise ProcessError(self.told() or f"{_ENDED}: {error}") from error


def words(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def device_of(group: Any) -> torch.device:
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
