"""Products in full precision while something is solved, and in the user's own where a network is evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["solving", "users_precision"]

# What the user had set, for each context that was entered.
_before: list[list[str]] = []


def _backends() -> list[Any]:
    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]


def _set(values: list[str]) -> None:
    for backend, value in zip(_backends(), values, strict=True):
        backend.fp32_precision = value


def _get() -> list[str]:
    return [backend.fp32_precision for backend in _backends()]


@contextmanager
def solving() -> Iterator[None]:
    """Float32 products without TF32 or bfloat16, which solvers cannot orthogonalise by; tensors with a graph."""
    _before.append(_get())
    try:
        _set(["ieee"] * len(_backends()))
        with torch.inference_mode(False):
            yield
    finally:
        _set(_before.pop())


@contextmanager
def users_precision() -> Iterator[None]:
    """Inside `solving`, what it was outside."""
    now = _get()
    try:
        _set(_before[0] if _before else now)
        yield
    finally:
        _set(now)
