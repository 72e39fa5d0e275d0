"""Grids of parameters, of which the default tests run a part that covers each parameter."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Point = tuple[int, ...]


def covering(
    *, strength: int = 1, rest: bool = True, indirect: Sequence[str] = (), **axes: Iterable[Any]
) -> pytest.MarkDecorator:
    """Parametrise a test by the product of some axes, most points of which are marked `slow`.

    By default run as many points as are needed for each value of each axis to occur once, or with `strength=2` each
    pair of values of two axes. Among points that do this equally well, pairs that are rare as yet are preferred, those
    of the shortest axes first. `rest=False` leaves the other points out instead of marking them.
    """
    values = [list(axis) for axis in axes.values()]
    points = list(product(*[range(len(axis)) for axis in values]))
    chosen = _cover(points, [len(axis) for axis in values], strength)
    parameters = [
        pytest.param(
            *[axis[n] for axis, n in zip(values, point, strict=True)],
            marks=() if point in chosen else pytest.mark.slow,
        )
        for point in points
        if point in chosen or rest
    ]
    return pytest.mark.parametrize(tuple(axes), parameters, indirect=list(indirect))


def _cover(points: list[Point], sizes: list[int], strength: int) -> set[Point]:
    """Points that together have every value or every pair of values, chosen one by one for what they add."""
    singles = [(axis,) for axis in range(len(sizes))]
    pairs = sorted(combinations(range(len(sizes)), 2), key=lambda pair: sizes[pair[0]] * sizes[pair[1]])
    wanted = pairs if strength == 2 else singles
    seen = Counter[tuple[Point, Point]]()

    def times_seen(point: Point, group: Point) -> int:
        return seen[group, tuple(point[axis] for axis in group)]

    def what_it_adds(point: Point) -> tuple[int, ...]:
        added = sum(times_seen(point, group) == 0 for group in wanted)
        return added, *[-times_seen(point, group) for group in pairs], -sum(times_seen(point, g) for g in singles)

    chosen: set[Point] = set()
    while what_it_adds(best := max(points, key=what_it_adds))[0]:
        chosen.add(best)
        seen.update((group, tuple(best[axis] for axis in group)) for group in [*singles, *pairs])
    return chosen
