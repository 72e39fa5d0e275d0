"""The price list as a table."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.comparison.report import table
from benchmarks.price.parts import PARTS

__all__ = ["line", "page", "verdict"]

HEAD = ("on", "bound", "figure", "holds")


def verdict(holds: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[holds]


def cells(row: dict[str, Any]) -> list[str]:
    return [row["what"], row["bound"], row["figure"], verdict(row["holds"])]


def line(row: dict[str, Any]) -> str:
    """For a terminal."""
    return " | ".join(cells(row))


def page(records: Iterable[dict[str, Any]]) -> str:
    """A table of all rows in the order of the parts, and how many bounds hold."""
    order = list(PARTS)
    ordered = sorted(records, key=lambda record: order.index(record["part"]))
    rows = [row for record in ordered for row in record["rows"]]
    return f"{table(HEAD, map(cells, rows))}\n\n{summary(rows)}\n"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    bounds = [row["holds"] for row in rows if row["bound"]]
    missing = bounds.count(None)
    skipped = f", {missing} have no figure" if missing else ""
    return f"{bounds.count(True)} of {len(bounds)} bounds hold{skipped}."
