"""Results as lines of JSON, in a file that several processes may append to and that can be read while it grows."""

import json
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["append", "read", "versions"]

PACKAGES = ("laplace_sampling", "torch", "laplace-torch", "curvlinops-for-pytorch", "gpytorch", "scikit-learn")


def read(path: Path, key: Sequence[str]) -> list[dict[str, Any]]:
    """The last line for each value of `key`, names that all lines have; skips lines that were cut off in writing."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if set(key) <= result.keys():
            results[tuple(result[name] for name in key)] = result
    return list(results.values())


def append(path: Path, result: dict[str, Any]) -> None:
    """Writes a line in one piece, so that several processes may write to the file."""
    line = "\n" if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n") else ""
    line += json.dumps(rounded(result)) + "\n"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), "wb") as file:
        file.write(line.encode())


def rounded(value: Any) -> Any:
    """Keeps six digits of numbers, and replaces NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed
