"""The file of a fit gives back what was computed, and the recorder of a fit sees its own functions only."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laplace_sampling.checkpoint import Results
from laplace_sampling.data.batches import digest
from laplace_sampling.data.processes import ALONE
from laplace_sampling.solvers.recorded import recorded, recording, stop_recording, unrecorded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results"


def opened(path: Path, head: Any = None, products: Any = None) -> Results:
    return Results(path, head or {}, {} if products is None else products, ALONE)


RESULTS = [
    torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
    torch.arange(12.0).reshape(3, 4).T,
    torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0),
    torch.zeros(0, 3),
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.ones(1).expand(5),
    (torch.ones(2), [None, 3, 0.1, float("inf"), True, "text"], (torch.arange(3),)),
    [],
    None,
]


@pytest.mark.parametrize("value", RESULTS)
def test_results_come_back_as_they_were(value: Any, path: Path) -> None:
    counts = {"jvp": 1, "vjp": 2}

    def compute() -> Any:
        counts["jvp"] += 5
        return value

    with opened(path, {"a": 1}, counts) as results:
        assert results.result("f", (1, None), compute) is value
    with opened(path, {"a": 2}, again := {"jvp": 0, "vjp": 0}) as results:
        assert results.head == {"a": 1}
        found = results.result("f", (1, None), lambda: pytest.fail("it is there"))
        assert again == {"jvp": 5, "vjp": 0}
    assert digest(_tensors(found)) == digest(_tensors(value))
    # The order of axes in memory, of what is more than one number: products are rounded by it.
    assert [_order(t) for _, t in _tensors(found)] == [_order(t) for _, t in _tensors(value)]
    assert _shape(found) == _shape(value)


def _tensors(value: Any) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [("", value)]
    return [pair for part in value for pair in _tensors(part)] if isinstance(value, tuple | list) else []


def _order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))


def _shape(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_shape, value))
    return "tensor" if isinstance(value, Tensor) else value


def test_calls_are_told_apart_by_their_arguments(path: Path) -> None:
    with opened(path) as results:
        for value in (1.0, 2.0, 2.0):
            results.result("f", (torch.tensor(value), object()), lambda value=value: value)
        results.result("g", (torch.tensor(1.0), object()), lambda: 3.0)
        assert [results.result("h", pair, lambda pair=pair: pair[0]) for pair in ((1, 23), (12, 3))] == [1, 12]
    with opened(path) as results:
        calls = [("g", 1.0), ("f", 2.0), ("f", 2.0), ("f", 3.0), ("f", 1.0), ("f", 1.0)]
        arguments = [(name, (torch.tensor(value), object())) for name, value in calls]
        assert [results.result(*call, lambda: -1.0) for call in arguments] == [3.0, 2.0, 2.0, -1.0, 1.0, -1.0]


def test_what_is_no_part_of_a_fit_is_not_recorded(path: Path) -> None:
    square, made = recorded(lambda value: made.append(value) or value**2), []
    with opened(path) as results, recording(results):
        assert unrecorded(square, 3.0) == 9.0
        assert square(2.0) == 4.0
        stop_recording()
        assert square(5.0) == 25.0
    with opened(path) as results, recording(results):
        assert [square(value) for value in (2.0, 3.0, 5.0)] == [4.0, 9.0, 25.0]
    assert made == [3.0, 2.0, 5.0, 3.0, 5.0]


def test_only_the_outermost_function_of_the_same_thread_is_recorded() -> None:
    names: list[str] = []

    class Recorder:
        def result(self, name: str, arguments: Any, compute: Callable[[], Any]) -> Any:
            names.append(name.rpartition(".")[2])
            return compute()

    @recorded
    def inner(x: int) -> int:
        return x

    @recorded
    def outer(x: int) -> int:
        return inner(x) + inner(x=x)

    assert outer(1) == 2
    with recording(Recorder()):
        thread = threading.Thread(target=outer, args=(1,))
        thread.start()
        thread.join()
        assert names == []
        assert inner(x=2) + outer(1) == 4
    assert outer(1) == 2
    assert names == ["inner", "outer"]


def test_a_damaged_result_does_not_move_the_same_calls_after_it(path: Path) -> None:
    with opened(path) as results:
        assert [results.result("f", (), lambda n=n: n) for n in ("first", "second")] == ["first", "second"]
    content = path.read_bytes()
    path.write_bytes(content.replace(b"first", b"forst", 1))
    for _ in range(2):
        with opened(path) as results:
            assert [results.result("f", (), lambda n=n: n) for n in ("first", "second")] == ["first", "second"]


def test_a_file_is_of_one_fit_at_a_time(path: Path) -> None:
    with opened(path), pytest.raises(BlockingIOError, match="in use"):
        opened(path)
    opened(path).delete()
    assert not list(path.parent.iterdir())
