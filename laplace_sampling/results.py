"""`Results`: the results of the costly functions of one fit, in an SQLite file that survives the process.

SQLite writes a result as a whole or not at all, and keeps a second fit out of the file.
"""

import hashlib
import io
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from laplace_sampling.data.digest import digest
from laplace_sampling.data.processes import Processes
from laplace_sampling.files import load_checked

Result = TypeVar("Result")

_FORMAT = 3


class Results:
    """A recorder (`solvers.recorded.Recorder`) that keeps results in a file, and gives those that are there.

    The first of several processes has the file; all of them get the results, so that a fit goes on with more or fewer.

    Args:
        path: of the file.
        head: of which fit the results are, as JSON.
        products: counts of Jacobian products of the network; what a call adds to them is a part of its result.
        processes: those that share the fit.

    Attributes:
        head: as it was when the file was made.

    Raises:
        BlockingIOError: if another fit has the file.
        OSError: if it cannot be opened or written.
        ValueError: if it is damaged, or of something else.
    """

    def __init__(self, path: Path, head: dict[str, Any], products: dict[str, int], processes: Processes) -> None:
        self.path, self.products, self.processes = path, products, processes
        self._database: sqlite3.Connection | None = None
        self._calls: Counter[str] = Counter()
        self._key = ""
        self.head: dict[str, Any] = processes.first(lambda: self._open(head))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._database is not None:
            self._database.close()

    def delete(self) -> None:
        """Remove the file, when all processes have come here."""
        self.processes.least(0.0)
        if self._database is not None:
            self._database.close()
            self.path.unlink(missing_ok=True)

    def result(self, name: str, arguments: Sequence[Any], compute: Callable[[], Result]) -> Result:
        """The next result of such a call that is in the file, or what is computed now."""
        found = self.processes.first(lambda: self._known(name, arguments))
        if found is not None:
            value, spent = found
            for product, number in spent.items():
                self.products[product] += number
            return value
        before = dict(self.products)
        value = compute()
        if self._database is not None:
            spent = {product: number - before.get(product, 0) for product, number in self.products.items()}
            self._write(value, spent)
        return value

    def _open(self, head: dict[str, Any]) -> dict[str, Any]:
        with self._errors():
            database = sqlite3.connect(self.path, timeout=0, isolation_level=None)
            try:
                # The lock stays until the connection ends. A power loss may cost the last results, not the file.
                database.execute("PRAGMA locking_mode = EXCLUSIVE")
                database.execute("PRAGMA synchronous = NORMAL")
                database.execute("BEGIN EXCLUSIVE")
                if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    database.execute("CREATE TABLE fit (head TEXT)")
                    database.execute("CREATE TABLE results (key TEXT PRIMARY KEY, value BLOB)")
                    database.execute("INSERT INTO fit VALUES (?)", [json.dumps(head)])
                    database.execute(f"PRAGMA user_version = {_FORMAT}")
                database.execute("COMMIT")
                found = database.execute("PRAGMA user_version").fetchone()[0]
                if found != _FORMAT:
                    raise ValueError(
                        f"`checkpoint=`: {self.path} has format {found}, but this version has {_FORMAT}: fit with the "
                        "version that wrote it, or delete it."
                    )
                head = json.loads(database.execute("SELECT head FROM fit").fetchone()[0])
            except BaseException:
                database.close()
                raise
        self._database = database
        return head

    def _known(self, name: str, arguments: Sequence[Any]) -> tuple[Any, dict[str, int]] | None:
        """The result in the file of the next such call, with the products that it took."""
        assert self._database is not None
        key = key_of(name, arguments)
        self._calls[key] += 1
        self._key = f"{key} {self._calls[key]}"
        with self._errors():
            row = self._database.execute("SELECT value FROM results WHERE key = ?", [self._key]).fetchone()
        with suppress(Exception):  # a damaged result is computed again
            return None if row is None else load_checked(io.BytesIO(row[0]))
        return None

    def _write(self, value: Any, spent: Mapping[str, int]) -> None:
        """Write the result of the last call."""
        assert self._database is not None
        written = io.BytesIO()
        # Copies, for a view would be written with all that it is a view of. They keep the order of axes in memory:
        # products with a matrix and with its transpose are rounded differently.
        torch.save((tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value), dict(spent)), written)
        with self._errors():
            self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", [self._key, written.getbuffer()])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of SQLite in one sentence."""
        try:
            yield
        except sqlite3.Error as error:
            # Extended codes have more in the bits above the first eight.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise BlockingIOError(
                    f"`checkpoint=`: {self.path} is in use by another fit, of this process or another one. Wait until "
                    "that ends, or give another path."
                ) from error
            if isinstance(error, sqlite3.OperationalError):
                raise OSError(
                    f"`checkpoint=`: {self.path} cannot be read or written: {error}. What is in it stays."
                ) from error
            raise ValueError(
                f"`checkpoint=`: {self.path} is damaged, or no file of a fit ({error}). Give another path, or delete "
                "it if it is."
            ) from error


def key_of(name: str, arguments: Sequence[Any]) -> str:
    """A digest of a call. Objects without a `key()` count by their class: calls with the same key are in order."""
    sha = hashlib.sha256(name.encode())
    for part in _parts(arguments):
        sha.update(part)
    return sha.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield digest([("", value)])
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value).encode() + b";"
    elif isinstance(value, tuple | list):
        yield f"{len(value)}:".encode()
        for part in value:
            yield from _parts(part)
    else:
        yield type(value).__name__.encode()
        if hasattr(value, "key"):
            yield from _parts(value.key())
