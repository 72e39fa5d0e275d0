"""Processes of a process group, for tests: each runs a function, and the test sees what it returns or raises."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# One process imports torch and the library, and all others are forked from it: they start in milliseconds, without
# threads of a test. `fully_shard` imports the compiler.
_PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "laplace_sampling",
    "pytest",
]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(_PRELOADED)


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 240.0, may_end: bool = False
) -> list[Any]:
    """What `function(*args)` returns on each rank of a gloo process group, one thread each.

    Function and arguments can be pickled. After `timeout` seconds all processes end. A `RuntimeError` has the traceback
    of a rank that raises; with `may_end` a rank that ends without a result has `None`.
    """
    call = pickle.dumps((function, args))
    try:
        return _run_all(call, num_ranks, timeout, may_end)
    except _CrashError:
        # One in about a hundred groups of models that `fully_shard` shares out: a thread of gloo frees memory twice.
        return _run_all(call, num_ranks, timeout, may_end)


class _CrashError(RuntimeError):
    """A rank has ended by a segmentation fault."""


def _run_all(call: bytes, num_ranks: int, timeout: float, may_end: bool) -> list[Any]:
    with tempfile.TemporaryDirectory() as directory:
        store = os.path.join(directory, "store")
        receivers: list[Connection] = []
        processes = []
        try:
            for rank in range(num_ranks):
                receiver, sender = _CONTEXT.Pipe(duplex=False)
                process = _CONTEXT.Process(target=_run, args=(call, rank, num_ranks, store, timeout, sender))
                process.start()
                sender.close()
                receivers.append(receiver)
                processes.append(process)
            return _results(receivers, time.monotonic() + timeout, may_end)
        except RuntimeError as error:
            for process in processes:
                process.join(0.5)  # of one that has just ended there is no exit code yet
            crashed = [rank for rank, process in enumerate(processes) if process.exitcode == -signal.SIGSEGV]
            raise (_CrashError(f"Ranks {crashed} have crashed.") if crashed else error) from error
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(receivers: list[Connection], end: float, may_end: bool) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        missing = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(missing, max(0.0, end - time.monotonic()))
        if not ready:
            ranks = [rank for rank in range(len(receivers)) if rank not in results]
            raise RuntimeError(f"Ranks {ranks} take too long.")
        for receiver in ready:
            rank = receivers.index(receiver)  # pyright: ignore[reportArgumentType]
            try:
                error, results[rank] = pickle.loads(receivers[rank].recv_bytes())
            except EOFError:
                if may_end:
                    results[rank] = None
                    continue
                raise RuntimeError(f"Rank {rank} has ended without a result.") from None
            if error is not None:
                raise RuntimeError(f"Rank {rank} of {len(receivers)} raises:\n{error}")
    return [results[rank] for rank in range(len(receivers))]


def _run(call: bytes, rank: int, num_ranks: int, store: str, timeout: float, sender: Connection) -> None:
    torch.set_num_threads(1)
    # Trainers look here for what `torchrun` has started.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    try:
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=limit)
        function, args = pickle.loads(call)
        outcome = None, function(*args)
    except BaseException:
        outcome = traceback.format_exc(), None
    # Not by `send`, which would send tensors as memory that ends with this process.
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    if outcome[0] is not None:
        # A rank that ends breaks the connections of the others, whose errors would hide its own: the test ends all.
        time.sleep(timeout)
    with suppress(RuntimeError):  # of ranks some of which have ended
        dist.barrier()
    dist.destroy_process_group()
