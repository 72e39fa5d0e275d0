"""Which documents and modules have their examples run, and in which tier."""

import importlib.util
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
# The libraries that examples or imports of a file need beyond those of the tests: it is left out where one is missing.
NEEDS = {
    "laplace_sampling/gp/botorch.py": ("botorch",),
    "laplace_sampling/integrations/accelerate.py": ("accelerate",),
    "laplace_sampling/integrations/laplace_torch.py": ("laplace",),
    "laplace_sampling/integrations/lightning.py": ("lightning",),
    "laplace_sampling/integrations/scikit_learn.py": ("sklearn",),
    "laplace_sampling/integrations/transformers.py": ("accelerate", "transformers"),
    "laplace_sampling/integrations/whole_weights.py": ("accelerate",),
    "laplace_sampling/kernels/botorch.py": ("botorch",),
}
# They are of the tier `slow`, and not even imported by others.
SLOW = {ROOT / name for name in NEEDS}


@cache
def _is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not collection_path.is_relative_to(ROOT):
        return None
    if collection_path == ROOT / "tests/fuzz":
        is_deselected = config.option.markexpr and "fuzz" not in config.option.markexpr.replace("not fuzz", "")
        return True if is_deselected or not _is_installed("hypothesis") else None
    needed = NEEDS.get(collection_path.relative_to(ROOT).as_posix(), ())
    is_deselected = collection_path in SLOW and "not slow" in config.option.markexpr
    return True if is_deselected or not all(map(_is_installed, needed)) else None


@pytest.hookimpl(tryfirst=True)  # before items are deselected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path in SLOW:
            item.add_marker(pytest.mark.slow)
