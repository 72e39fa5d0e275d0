import io
import sys

import pytest

from laplace_sampling.solvers.solver import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stderr", "description", "shown"), [
    (Terminal(), "solve", True), (Terminal(), None, False), (io.StringIO(), "solve", False),
])  # fmt: skip
def test_bars_are_for_terminals(stderr: io.StringIO, description, shown: bool, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    assert list(progress_bar(description, range(3))) == [0, 1, 2]
    with progress_bar(description, total=2) as bar:
        bar.update(2)
    assert ("solve" in stderr.getvalue()) == shown
