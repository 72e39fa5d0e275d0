"""States in files: the old file stays until the new one is whole, and one sentence says what is wrong with a file."""

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from laplace_sampling.data.batches import as_plain

__all__ = ["File", "check_target", "explained", "read", "replace_file", "target_of", "write"]

# A path, or an open file in binary mode.
File = str | os.PathLike[str] | IO[bytes]
# Characters of the name of a file in that of its temporary one: names have 255 bytes at most.
_NAMED = 40


def write(state: dict[str, Tensor], file: File) -> None:
    """Write a state to a file, all of it or nothing.

    It goes to a temporary file in the same folder, is flushed to the disk, and takes the place of the old file, with
    its permissions. A symbolic link stays, and what it points to is replaced. An open file is written to as it is.

    Raises:
        OSError: if that is not possible; the old file is still there, and the temporary one is not.
    """
    if hasattr(file, "write"):
        _save(state, cast(IO[bytes], file))
        return
    replace_file(target_of(cast(str, file)), lambda opened: _save(state, opened), "save")


def target_of(path: str | os.PathLike[str]) -> Path:
    """The file that a path, or a symbolic link there, stands for."""
    return Path(os.path.realpath(os.fsdecode(path)))


def replace_file(target: Path, write: Callable[[IO[bytes]], object], call: str) -> None:
    """Put what `write` writes in the place of a file, all of it or nothing; `call` is what the user called.

    Raises:
        OSError: if that is not possible; the old file is still there, and the temporary one is not.
    """
    temporary = target.with_name(f".{target.name[:_NAMED]}.{secrets.token_hex(4)}.tmp")
    try:
        _check_target(target)
        try:
            with open(temporary, "xb") as opened:
                write(opened)
                opened.flush()
                os.fsync(opened.fileno())
            if target.exists():
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        before = " The file that was there before is unchanged." if target.is_file() else ""
        raise explained(error, f"`{call}`: {target} cannot be written: {error.strerror}.{before}") from error
    with suppress(OSError):  # not every system lets one flush a folder
        _flush_folder(target.parent)


def read(file: File) -> Any:
    """What `torch.save` wrote to a file, tensors only, on a CPU.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if it is damaged, or of something else.
    """
    if hasattr(file, "read"):
        return _load(cast(IO[bytes], file), "The open file")
    path = os.fsdecode(cast(str, file))
    try:
        with open(path, "rb") as opened:
            return _load(opened, f"{path}, of {os.fstat(opened.fileno()).st_size} bytes,")
    except OSError as error:
        raise explained(error, f"`load`: {path} cannot be read: {error.strerror}.") from error


def check_target(target: Path, call: str) -> None:
    """Raise an `OSError` if nothing may be put in the place of a file; `call` is what the user called."""
    try:
        _check_target(target)
    except OSError as error:
        raise explained(error, f"`{call}`: {target} cannot be written: {error.strerror}.") from error


def _check_target(target: Path) -> None:
    """Raise if nothing may be put in the place of a file."""
    if target.is_dir():
        raise IsADirectoryError(0, "it is a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(0, f"there is no folder {target.parent}; make it first")
    if target.exists() and not target.is_file():
        raise OSError(0, "it is a device or a pipe; open it, and pass the open file")
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(0, "it is write-protected")


class _UntilError:
    """An open file that takes no more after an error, which torch would replace by one of its own."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.error = file, None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.file.write(data)
            except BaseException as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        pass


def _save(state: dict[str, Tensor], file: IO[bytes]) -> None:
    writer = _UntilError(file)
    torch.save(state, cast(IO[bytes], writer))
    if writer.error is not None:
        raise writer.error


def _load(file: IO[bytes], name: str) -> Any:
    start = file.tell() if file.seekable() else None
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of zip files, of pickles, of memory: a damaged file may look like anything
        if classes := _other_classes(file, start):
            raise ValueError(
                f"`load`: {name} holds objects of {', '.join(classes)}, and `load` reads plain tensors only, since "
                "others may run code. If `save` wrote it and you trust it, allow these classes by "
                "`torch.serialization.add_safe_globals([...])`, load it, and save it again; or fit and save again."
            ) from error
        raise ValueError(
            f"`load`: {name} is damaged, cut off, or no file of `save`. Take another copy of it, or fit and save again."
        ) from error
    return tree_map_only(Tensor, as_plain, loaded)


def _other_classes(file: IO[bytes], start: int | None) -> list[str]:
    """The classes and functions in a file that `torch.load` refuses; none of a damaged one."""
    if start is None:
        return []
    with suppress(Exception):
        file.seek(start)
        return torch.serialization.get_unsafe_globals_in_checkpoint(file)
    return []


def explained(error: OSError, sentence: str) -> OSError:
    """An error of the same kind with a sentence."""
    explained = type(error)(sentence)
    explained.errno = error.errno
    return explained


def _flush_folder(folder: Path) -> None:
    """So that the new name is on the disk, too."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
