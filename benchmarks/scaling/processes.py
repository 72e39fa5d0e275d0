"""A function on each rank of a process group on this machine, one thread each."""

import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["on_ranks"]

# Of a rank that waits for another one.
_TIMEOUT = timedelta(minutes=10)


def on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """What `function(*args)` returns on each rank of a gloo group.

    Args:
        function: of the top level of a module, as its name is sent to the processes.
        num_ranks: the number of processes.
        args: of the function; they can be pickled, as can what it returns.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of a rank that raises; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run, (folder, num_ranks, function, args), num_ranks)
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(num_ranks)]


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result {rank}"


def _run(rank: int, folder: str, num_ranks: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = f"file://{Path(folder).resolve() / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    result = function(*args)
    _result(folder, rank).write_bytes(pickle.dumps(result))
    # A rank that ends earlier closes connections on which others still wait.
    dist.barrier()
    dist.destroy_process_group()
