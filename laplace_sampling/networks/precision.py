"""Products in full precision while something is solved, and in the user's own where a network is evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["precisions", "solving", "users_precision"]

# What the user had set, for each context that was entered.
_before: list[list[str]] = []


# By backend from torch 2.9 on.
_BACKENDS: list[Any] = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
if not all(hasattr(backend, "fp32_precision") for backend in _BACKENDS):
    _BACKENDS = []


def _set(values: list[str]) -> None:
    if not _BACKENDS:
        torch.set_float32_matmul_precision(values[0])
    for backend, value in zip(_BACKENDS, values, strict=False):
        backend.fp32_precision = value


def precisions() -> list[str]:
    """Of float32 products now, on a GPU and on a CPU; of both in torch before 2.9."""
    return [backend.fp32_precision for backend in _BACKENDS] or [torch.get_float32_matmul_precision()]


@contextmanager
def solving() -> Iterator[None]:
    """Float32 products without TF32 or bfloat16, which solvers cannot orthogonalise by; tensors with a graph."""
    _before.append(precisions())
    try:
        _set(["ieee"] * len(_BACKENDS) or ["highest"])
        with torch.inference_mode(False):
            yield
    finally:
        _set(_before.pop())


@contextmanager
def users_precision() -> Iterator[None]:
    """Inside `solving`, what it was outside."""
    now = precisions()
    try:
        _set(_before[0] if _before else now)
        yield
    finally:
        _set(now)
