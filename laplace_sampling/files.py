"""States in files: the old file stays until the new one is whole, and one sentence says what is wrong with a file."""

import os
import secrets
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from laplace_sampling.data.batches import as_plain

# A path, or an open file in binary mode.
File = str | os.PathLike[str] | IO[bytes]


def write(state: dict[str, Any], file: File) -> None:
    """Write a state to a file, all of it or nothing; an open file is written to as it is.

    It goes to a temporary file in the same folder, is flushed to the disk, and takes the place of the old file, with
    its permissions. A symbolic link stays, and what it points to is replaced.

    Raises:
        OSError: if that is not possible; the old file is still there, and the temporary one is not.
    """
    if hasattr(file, "write"):
        _save(state, cast(IO[bytes], file))
        return
    target = target_of(cast(str, file))
    temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(4)}.tmp")  # names have 255 bytes at most
    check_target(target, "save")
    try:
        with open(temporary, "xb") as opened:
            _save(state, opened)
            opened.flush()
            os.fsync(opened.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        before = " The file that was there before is unchanged." if target.is_file() else ""
        raise explained(error, f"`save`: {target} cannot be written: {error.strerror}.{before}") from error
    with suppress(OSError):  # not every system lets one flush a folder
        _flush_folder(target.parent)


def read(file: File) -> Any:
    """Read what `write` wrote: nested dictionaries and lists of tensors on the CPU and of plain values.

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


def target_of(path: str | os.PathLike[str]) -> Path:
    """The file that a path, or a symbolic link there, stands for."""
    return Path(os.path.realpath(os.fsdecode(path)))


def check_target(target: Path, call: str) -> None:
    """Raise an `OSError` if nothing may be put in the place of a file; `call` is what the user called."""
    if target.is_dir():
        error = IsADirectoryError(0, "it is a folder; give the name of a file in it")
    elif not target.parent.is_dir():
        error = FileNotFoundError(0, f"there is no folder {target.parent}; make it first")
    elif target.exists() and not target.is_file():
        error = OSError(0, "it is a device or a pipe; open it, and pass the open file")
    elif target.exists() and not os.access(target, os.W_OK):
        error = PermissionError(0, "it is write-protected")
    else:
        return
    raise explained(error, f"`{call}`: {target} cannot be written: {error.strerror}.")


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


def _save(state: dict[str, Any], file: IO[bytes]) -> None:
    writer = _UntilError(file)
    torch.save(state, cast(IO[bytes], writer))
    if writer.error is not None:
        raise writer.error


def _load(file: IO[bytes], name: str) -> Any:
    try:
        loaded = load_checked(file, map_location="cpu")
    except Exception as error:  # of zip files, of pickles, of memory: a damaged file may look like anything
        raise ValueError(
            f"`load`: {name} is damaged, cut off, or no file of `save` (which holds plain tensors and values only). "
            "Take another copy of it, or fit and save again."
        ) from error
    return tree_map_only(Tensor, as_plain, loaded)


def load_checked(file: IO[bytes], **options: Any) -> Any:
    """What `torch.save` wrote to a file, after a look at the checksums of its archive, which torch does not take."""
    start = file.tell()
    with zipfile.ZipFile(file) as archive:
        if archive.testzip() is not None:
            raise zipfile.BadZipFile
    file.seek(start)
    return torch.load(file, weights_only=True, **options)


def explained(error: OSError, sentence: str) -> OSError:
    """An error of the same kind with a sentence."""
    explained = type(error)(sentence)
    explained.errno = error.errno
    return explained


def _flush_folder(folder: Path) -> None:
    """Write the new name of a file to the disk, too."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
