"""Progress bars: the one place that makes them."""

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

# In a notebook bars are widgets, which need no terminal.
_IN_NOTEBOOK = any(kind.__name__ == "tqdm_notebook" for kind in tqdm.__mro__)


def progress_bar(
    description: str | None, items: Iterable[Any] | None = None, *, total: int | None = None, leave: bool = False
) -> tqdm:
    """A bar over items, or one that is moved on by `update`; shown only where standard error is a terminal.

    Args:
        description: its label; `None` for no bar.
        items: that are iterated over.
        total: how many there are, if they are not given.
        leave: whether the bar stays when it is full.
    """
    # `None` asks tqdm to look for a terminal: in files and pipes bars are only noise.
    hidden = True if description is None else False if _IN_NOTEBOOK else None
    return tqdm(items, desc=description, total=total, disable=hidden, leave=leave)
