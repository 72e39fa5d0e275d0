"""Rooms, and imports that point down only."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import laplace_sampling

# Lowest first; a room imports rooms before it only. What has no folder is the front.
ROOMS = (
    "solvers",
    "data",
    "networks",
    "likelihoods",
    "linear_model",
    "predictions",
    "evidence",
    "gp",
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
# The front is the eighth level, and its class the end of a chain of ten; training and integrations stand on it.

LONGEST_CHAIN, DEEPEST = 12, 9


def room(module: str) -> str:
    first, _, rest = module.partition(".")
    return first if rest else "front"


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All that may run: what is imported for type checkers only does not."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"):
            yield from statements(child)


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of the package that one imports, also inside functions, but for types; a room is its `__init__`."""
    found = set()
    for node in statements(ast.parse(MODULES[module].read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        own = [name.removeprefix("laplace_sampling.") for name in names if name.startswith("laplace_sampling.")]
        found |= {name for name in own if name in MODULES} | {
            f"{n}.__init__" for n in own if f"{n}.__init__" in MODULES
        }
    return frozenset(found - {module})


@cache
def reached(module: str) -> frozenset[str]:
    """Also by way of others."""
    return imports(module).union(*map(reached, imports(module)))


@cache
def chain(module: str) -> tuple[str, ...]:
    """The longest chain of imports that begins with a module; lists of names are not counted."""
    longest = max(map(chain, imports(module)), key=len, default=())
    return longest if module.endswith("__init__") else (module, *longest)


@cache
def depth(of: str) -> int:
    below = {room(found) for module in MODULES if room(module) == of for found in imports(module)} - {of}
    return 1 + max(map(depth, below), default=0)


def test_every_folder_is_a_room() -> None:
    assert {room(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_down(module: str) -> None:
    above = {found for found in reached(module) if ROOMS.index(room(found)) > ROOMS.index(room(module))}
    assert not above


def test_solvers_import_nothing_of_the_package() -> None:
    assert all(room(found) == "solvers" for module in MODULES if room(module) == "solvers" for found in reached(module))


def test_chains_of_imports_are_short() -> None:
    longest = max(map(chain, MODULES), key=len)
    assert len(longest) <= LONGEST_CHAIN, longest


def test_rooms_are_few_levels_deep() -> None:
    assert max(map(depth, ROOMS)) <= DEEPEST


def test_the_public_names_are_listed_and_there() -> None:
    assert sorted(laplace_sampling.__all__) == sorted(set(laplace_sampling.__all__))
    for name in laplace_sampling.__all__:
        assert getattr(laplace_sampling, name).__doc__
