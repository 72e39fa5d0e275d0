"""Posteriors whose samples are in several processes, in folders of `torch.distributed.checkpoint`.

Each sample is an entry of its own, which the process that has it writes. So another number of processes reads those
that are its own, or one process all of them.
"""

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.data.processes import ENDED, ProcessError, Processes, words
from laplace_sampling.files import explained
from laplace_sampling.linear_model.held_samples import HeldSamples

__all__ = ["entries", "is_folder", "is_sample", "read_folder", "write_folder"]

_SAMPLE = "sample."


def entries(samples: HeldSamples) -> dict[str, Tensor]:
    """The samples of this process, by the names of their entries."""
    return {f"{_SAMPLE}{number:06d}": row for number, row in zip(samples.own, samples.rows, strict=True)}


def is_sample(name: str) -> bool:
    """Whether an entry is one sample."""
    return name.startswith(_SAMPLE)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a folder of `write_folder`."""
    return (Path(path) / ".metadata").is_file()


def write_folder(state: dict[str, Tensor], folder: Path, processes: Processes) -> None:
    """Write what each process has to a folder, all of it or nothing; all processes do this together.

    It takes the place of an older folder, which stays until the new one is whole.

    Raises:
        OSError: if that is not possible.
    """
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.api import CheckpointException

    temporary = Path(processes.of_very_first(lambda: str(_temporary(folder))))
    try:
        if processes.is_first_of_data:
            # What all processes have is written by one of them: times of steps differ.
            own = {name: tensor for name, tensor in state.items() if processes.sampler == 0 or is_sample(name)}
            writer = filesystem.FileSystemWriter(temporary)
            _save(own, writer, processes)
        processes.of_very_first(lambda: _put(temporary, folder))
    except CheckpointException as error:  # which is no Exception
        failed = {rank: cause for rank, (cause, _) in error.failures.items()}
        own = failed.get(processes.sampler)
        if own is not None and not isinstance(own, Exception):
            raise own from error  # as of Ctrl-C
        causes = "; ".join(dict.fromkeys(f"process {rank}: {words(cause)}" for rank, cause in failed.items()))
        raise OSError(f"`save`: {folder} cannot be written: {causes}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # of a folder that did not become whole


def _save(own: dict[str, Tensor], writer: Any, processes: Processes) -> None:
    from torch.distributed.checkpoint import state_dict_saver

    assert processes.samples is not None
    try:
        state_dict_saver.save(own, storage_writer=writer, process_group=processes.samples.own)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch's own words for another process that has ended
        raise ProcessError(f"{ENDED}: {error}") from error


def _temporary(folder: Path) -> Path:
    """A name for a new folder beside one."""
    if folder.exists() and not (folder.is_dir() and (_is_of_save(folder) or not any(folder.iterdir()))):
        raise FileExistsError(
            f"`save`: {folder} is no folder of an earlier `save` alone, which may be replaced. Samples that are shared "
            "out are written to a folder: give the name of a new one."
        )
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"`save`: there is no folder {folder.parent}; make it first.")
    return folder.with_name(f".{folder.name[:40]}.{os.urandom(4).hex()}.tmp")


def _is_of_save(folder: Path) -> bool:
    """Whether a folder has nothing but what `write_folder` wrote."""
    if not is_folder(folder):
        return False
    try:
        names = _entries_of(folder).state_dict_metadata
    except Exception:  # a damaged index may look like anything
        return False
    files = {file.name for file in folder.iterdir() if file.suffix != ".distcp"}
    return files == {".metadata"} and "settings" in names and any(map(is_sample, names))


def _entries_of(folder: Path) -> Any:
    """The index of a folder."""
    from torch.distributed.checkpoint import filesystem

    return filesystem.FileSystemReader(folder).read_metadata()


def _put(new: Path, folder: Path) -> None:
    """Put a folder in the place of another, which is there again if that fails."""
    old, stored = new.with_suffix(".old"), _entries_of(new).storage_data or {}
    if absent := sorted({info.relative_path for info in stored.values() if not (new / info.relative_path).is_file()}):
        raise FileNotFoundError(
            f"`save`: {folder} cannot be written: {', '.join(absent)} of other processes are not there. The folder has "
            "to be on a disk that all machines share."
        )
    try:
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
    except OSError as error:
        if old.exists():
            os.replace(old, folder)
        raise explained(error, f"`save`: {folder} cannot be written: {error.strerror}.") from error
    shutil.rmtree(old, ignore_errors=True)


def read_folder(folder: Path, own: Callable[[int], range]) -> tuple[dict[str, Tensor], Tensor, int]:
    """What `write_folder` wrote: all but the samples, samples of this process, and how many there are in all.

    Each process reads for itself.

    Args:
        folder: of `write_folder`.
        own: which of so many samples are those of this process.

    Raises:
        OSError, ValueError: if the folder cannot be read, is damaged, or of something else.
    """
    from torch.distributed.checkpoint import filesystem, state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException

    reader = filesystem.FileSystemReader(folder)
    try:
        kept: dict[str, Any] = dict(_entries_of(folder).state_dict_metadata)
        names = sorted(filter(is_sample, kept))
        numbers, shape = own(len(names)), kept[names[0]]
        rows = torch.empty(len(numbers), *shape.size, dtype=shape.properties.dtype)
        state = {n: torch.empty(t.size, dtype=t.properties.dtype) for n, t in kept.items() if not is_sample(n)}
        state |= dict(zip(names[numbers.start : numbers.stop], rows, strict=True))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # a notice that one process reads
            # Each process by itself: one of several may load alone.
            state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    except PermissionError as error:
        raise explained(error, f"`load`: {folder} cannot be read: {error.strerror}.") from error
    except CheckpointException as error:
        for cause, _ in error.failures.values():
            if not isinstance(cause, Exception):
                raise cause from error  # as of Ctrl-C
            if isinstance(cause, PermissionError):
                raise explained(cause, f"`load`: {folder} cannot be read: {cause.strerror}.") from error
        raise _damaged(folder) from error
    except Exception as error:  # a damaged folder may look like anything
        raise _damaged(folder) from error
    return state, rows, len(names)


def _damaged(folder: Path) -> ValueError:
    return ValueError(
        f"`load`: the folder {folder} is damaged, or not one of `save`. Take another copy of it, or fit and save again."
    )
