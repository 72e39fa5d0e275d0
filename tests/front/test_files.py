"""What may happen to a file while it is written, and what may be wrong with one that is read."""

import errno
import io
import os
import re
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_files import cut_files, fitted, flipped_bits, killed_saves
from torch import nn

from laplace_sampling import LinearisedLaplace, files

LA = fitted(3)
MODEL = LA.network.source


def load(file: files.File) -> LinearisedLaplace:
    return LinearisedLaplace.load(file, MODEL)


@contextmanager
def says(kind: type[Exception], pattern: str) -> Iterator[None]:
    """One or two sentences on one line, of exactly this kind of error."""
    with pytest.raises(kind, match=pattern) as caught:
        yield
    message = str(caught.value)
    assert type(caught.value) is kind
    assert message.endswith(".")
    assert "\n" not in message
    assert not re.search("Errno|pickle|zip", message)


@contextmanager
def small_disk(num_bytes: int) -> Iterator[None]:
    """No file may be larger, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    assert killed_saves(10, 0, tmp_path) == []


@pytest.mark.parametrize("part", [0.0, 0.1, 0.6, 0.9, 0.999])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(part: float, tmp_path: Path) -> None:
    path, whole = tmp_path / "la.pt", io.BytesIO()
    LA.save(whole)
    num_bytes = int(part * len(whole.getvalue()))
    with small_disk(num_bytes), says(OSError, "large"):
        LA.save(path)
    assert list(tmp_path.iterdir()) == []
    LA.save(path)
    before = path.read_bytes()
    with small_disk(num_bytes), says(OSError, "unchanged"):
        fitted(3, seed=1).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("where", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_errors_at_the_end_leave_the_old_file_and_nothing_else(
    where: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "la.pt"
    LA.save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(type(error)) as caught:
        fitted(3, seed=1).save(path)
    if isinstance(error, OSError):
        assert str(caught.value).endswith("No space left on device. The file that was there before is unchanged.")
        assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_flushed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "_flush_folder", fail)
    LA.save(tmp_path / "la.pt")
    load(tmp_path / "la.pt")


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target.pt", tmp_path / "link.pt"
    LA.save(target)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(target.stat().st_mode) == 0o666 & ~umask
    target.chmod(0o640)
    link.symlink_to(target.name)
    fitted(3, seed=1).save(str(link))
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert torch.equal(load(link).samples_, fitted(3, seed=1).samples_)
    target.unlink()
    LA.save(link)  # to what is not there
    assert link.is_symlink()
    assert torch.equal(load(target).samples_, LA.samples_)


def test_paths_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with says(IsADirectoryError, "a folder"):
        LA.save(tmp_path)
    with says(FileNotFoundError, "no folder"):
        LA.save(tmp_path / "missing" / "la.pt")
    with says(OSError, "device"):
        LA.save("/dev/full")
    path = tmp_path / "la.pt"
    LA.save(path)
    with monkeypatch.context() as patch:  # the tests may run as root, whom no permissions stop
        patch.setattr(os, "access", lambda *_: False)
        with says(PermissionError, "write-protected"):
            LA.save(path)

    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "open", fail, raising=False)
    with says(PermissionError, "Permission"):
        LA.save(tmp_path / "new.pt")
    assert list(tmp_path.iterdir()) == [path]


class Full(io.BytesIO):
    """An open file that takes no more at its end, after which torch raises an error of its own."""

    def write(self, data: Any) -> int:
        if self.tell() > 400:
            raise OSError("No space left on device")
        return super().write(data)


def test_open_files() -> None:
    file = io.BytesIO(b"before")
    file.seek(0, io.SEEK_END)
    LA.save(file)
    file.seek(len(b"before"))
    assert torch.equal(load(io.BytesIO(file.read())).samples_, LA.samples_)
    for full in (Full(), io.FileIO("/dev/full", "w")):
        with full, pytest.raises(OSError, match="space"):
            LA.save(full)


# Reading --------------------------------------------------------------------------------------------------------------


def test_flipped_bits_are_refused_or_change_nothing() -> None:
    assert flipped_bits(200, 0) == []


def test_files_that_are_cut_off_are_refused() -> None:
    assert cut_files(60, 0) == []


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with says(FileNotFoundError, r"missing\.pt"):
        load(tmp_path / "missing.pt")
    with says(IsADirectoryError, "directory"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("write", "pattern"),
    [
        (lambda path: path.write_bytes(b""), r"\b0 bytes"),
        (lambda path: path.write_text("name,value\n" * 9), r"\b99 bytes"),
        (lambda path: torch.save(nn.Linear(1, 1), path), "bytes"),
        (lambda path: torch.save(MODEL.state_dict(), path), "LinearisedLaplace"),
        (lambda path: torch.save([torch.zeros(3)], path), "LinearisedLaplace"),
        (lambda path: torch.save({"format": 6}, path), "incomplete"),
    ],
)
def test_files_of_something_else(write: Callable[[Path], object], pattern: str, tmp_path: Path) -> None:
    write(tmp_path / "other.pt")
    with says(ValueError, pattern):
        load(tmp_path / "other.pt")


@pytest.mark.parametrize("name", ["network", "posterior", "settings"])
def test_states_that_lack_something_are_refused(name: str) -> None:
    state = LA.state_dict()
    parts = [None, torch.zeros(3), *({k: v for k, v in state[name].items() if k != key} for key in state[name])]
    for part in parts:
        with says(ValueError, "incomplete"):
            load(_written({**state, name: part}))


def _written(state: dict) -> io.BytesIO:
    file = io.BytesIO()
    files.write(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(("version", "pattern"), [(7, "newer"), (5, "older")])
def test_other_versions(version: int, pattern: str) -> None:
    with says(ValueError, pattern):
        LinearisedLaplace(MODEL, "regression").load_state_dict({**LA.state_dict(), "format": version})
