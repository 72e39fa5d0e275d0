"""Rooms, and imports that point down only."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import laplace_sampling
from tools import count_lines as tools

# Lowest first; a room imports rooms before it only. What has no folder is the front.
ROOMS = (
    "arguments",
    "solvers",
    "data",
    "networks",
    "likelihoods",
    "linear_model",
    "curvature",
    "predictions",
    "hyperparameters",
    "gp",
    "kernels",
    "methods",
    "plots",
    "export",
    "front",
    "training",
    "integrations",
)
PACKAGE = Path(laplace_sampling.__file__).parent
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")
}


def room(module: str) -> str:
    first, _, rest = module.partition(".")
    return first if rest or first == "arguments" else "front"


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that one imports, also inside functions; a room is its `__init__`."""
    found = [name.removeprefix("laplace_sampling.") for name in tools.imports(MODULES[module])]
    return frozenset(name for own in found for name in (own, f"{own}.__init__") if name in MODULES) - {module}


@cache
def reached(module: str) -> frozenset[str]:
    """Also by way of others."""
    return imports(module).union(*map(reached, imports(module)))


def test_imports_point_down() -> None:
    """Each folder is a room, and solvers, the lowest, import nothing of the others."""
    assert {room(module) for module in MODULES} == set(ROOMS)
    above = {
        (module, found)
        for module in MODULES
        for found in reached(module)
        if ROOMS.index(room(found)) > ROOMS.index(room(module))
    }
    assert not above


def test_modules_do_not_import_one_another() -> None:
    """Not for type checkers either."""
    assert tools.circles() == []


def test_the_public_names_are_listed_and_there() -> None:
    assert sorted(laplace_sampling.__all__) == sorted(set(laplace_sampling.__all__))
    for name in laplace_sampling.__all__:
        assert getattr(laplace_sampling, name).__doc__


@pytest.mark.slow
def test_nothing_heavy_is_imported() -> None:
    heavy = ("gpytorch", "linear_operator", "matplotlib", "scipy.stats", "scipy.optimize", "torch._dynamo")
    code = f"import sys, torch; before = set(sys.modules); import laplace_sampling; print([m for m in {heavy} "
    code += "if m in sys.modules and m not in before])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
