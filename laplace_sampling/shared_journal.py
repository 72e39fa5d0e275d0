"""`SharedJournal`: a journal of processes that share a fit, which the first of those that share out the data keeps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from laplace_sampling.data.processes import Processes
from laplace_sampling.journal import Journal, Known, rebuilt

Result = TypeVar("Result")


class SharedJournal:
    """A `Journal` whose results all processes get, so that a fit goes on with more or fewer of them.

    Args:
        path: of the file.
        head: as of a `Journal`, and likewise `products`.
        processes: those that share the fit.

    Attributes:
        head: as it was when the file was made.
    """

    def __init__(self, path: Path, head: dict[str, Any], products: dict[str, int], processes: Processes) -> None:
        self.products, self.processes, self.journal = products, processes, None
        self.head = processes.first(lambda: self._opened(path, head))

    def _opened(self, path: Path, head: dict[str, Any]) -> dict[str, Any]:
        self.journal = Journal(path, head, self.products)
        return self.journal.head

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.journal is not None:
            self.journal.__exit__()

    def delete(self) -> None:
        """Removes the file, when all processes have come here."""
        self.processes.least(0.0)
        if self.journal is not None:
            self.journal.delete()

    def result(self, name: str, arguments: Sequence[Any], compute: Callable[[], Result]) -> Result:
        """As of a `Recorder`, on all processes alike."""
        journal = self.journal
        if self.processes.size == 1:
            assert journal is not None
            return journal.result(name, arguments, compute)
        key: list[str] = []

        def known() -> Known | None:
            assert journal is not None
            key.append(journal.key(name, arguments))
            return journal.known(key[0])

        found = self.processes.first(known)
        if found is not None:
            return rebuilt(found, self.products)
        before = dict(self.products)
        value = compute()
        if journal is not None:
            journal.keep(key[0], value, before)
        return value
