"""The page that a `Diagnosis` prints: a title, a table, and the problems in as many words as fit."""

import textwrap
from dataclasses import dataclass

__all__ = ["Problem", "Row", "listed", "number", "page", "percent", "plus_minus"]

# The page fits a screen: a definition.
_LINES, _COLUMNS = 60, 100

# Quantity, value, what it should be, unit.
Row = tuple[str, str, str, str]


@dataclass(frozen=True)
class Problem:
    """In plain words: what is the matter, why it matters, and what to do.

    `serious` is false for what deserves a look but leaves the error bars valid.
    """

    what: str
    why: str
    do: str
    serious: bool = True


def page(title: list[tuple[str, str, int]], rows: list[Row], problems: list[Problem]) -> str:
    """The page.

    Args:
        title: lines, each with a mark before it and the number of lines that it may take.
        rows: of the table.
        problems: serious ones first.
    """
    serious = sum(problem.serious for problem in problems)
    verdict = f"Verdict: {serious} {_things(serious)} wrong." if serious else "Verdict: nothing is wrong."
    if len(problems) > serious:
        verdict += f" {len(problems) - serious} worth a look."
    head = [line for mark, text, lines in title for line in _wrapped(mark, text, lines)]
    head += ["", *_table(rows), "", verdict]
    # All sentences of all problems, or fewer of them until the page is one page.
    body: list[str] = []
    for detail in ("all", "what and do", "what"):
        body = [line for position, problem in enumerate(problems, 1) for line in _paragraph(position, problem, detail)]
        if len(head) + len(body) <= _LINES:
            break
    return "\n".join(head + body)


def _table(rows: list[tuple[str, str, str, str]]) -> list[str]:
    rows = [("", "value", "should be", ""), *rows]
    cells = [[shortened(cell, width) for cell, width in zip(row, (38, 22, 22, 26), strict=True)] for row in rows]
    first, second, third = (max(len(row[i]) for row in cells) for i in range(3))
    lines = [f"{a:<{first}}{b:>{second + 2}}{c:>{third + 2}}  {d}" for a, b, c, d in cells]
    return [shortened(line.rstrip(), _COLUMNS) for line in lines]


def _paragraph(position: int, problem: Problem, detail: str) -> list[str]:
    mark = f"{position:2}. " if problem.serious else f"{position:2}. (a look) "
    if detail == "what":
        return _wrapped(mark, problem.what, 1)
    parts = [problem.what, *([f"Why: {problem.why}"] if detail == "all" else []), f"Do: {problem.do}"]
    return [line for i, part in enumerate(parts) for line in _wrapped("    " if i else mark, part, 4)]


def _wrapped(mark: str, text: str, lines: int) -> list[str]:
    """Wrap a text after a mark, later lines indented, to at most `lines` lines."""
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=mark,
        subsequent_indent=" " * (4 if mark else 0),
        max_lines=lines,
        placeholder=" …",
    )


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def listed(names: list[str]) -> str:
    """A few names, and how many others there are."""
    shown = ", ".join(shortened(name, 30) for name in names[:3])
    return shown + (f" and {len(names) - 3} other groups" if len(names) > 3 else "")


def _things(count: int) -> str:
    return "thing is" if count == 1 else "things are"


def number(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def plus_minus(error: float) -> str:
    return f" ± {number(error)}" if error > 0 else ""


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"
