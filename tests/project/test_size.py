"""What keeps the package readable: short files and functions, a small front, light imports."""

import ast
import inspect
import statistics
import subprocess
import sys
from pathlib import Path

import laplace_sampling
from laplace_sampling import LinearisedLaplace

PACKAGE = Path(laplace_sampling.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Two of the arguments say which processes share a fit, by the names that `DistributedDataParallel` and FSDP give them.
LONGEST_FILE, LONGEST_FRONT, MOST_ARGUMENTS = 400, 312, 11
MEDIAN_FUNCTION, LONG_FUNCTION = 10, 25


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def code_lines(function: ast.FunctionDef, source: list[str]) -> int:
    """Lines of a function without its docstring, comments and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    first = body[0].lineno if body else function.lineno
    numbers = [*range(function.lineno, function.body[0].lineno), *range(first, (function.end_lineno or first) + 1)]
    stripped = [source[number - 1].strip() for number in dict.fromkeys(numbers)]
    return sum(bool(line) and not line.startswith("#") for line in stripped)


def test_files_are_short() -> None:
    assert not [path for path in FILES if len(lines(path)) > LONGEST_FILE]
    assert len(lines(PACKAGE / "laplace.py")) <= LONGEST_FRONT


def test_functions_are_short() -> None:
    sizes = []
    for path in FILES:
        source = lines(path)
        tree = ast.parse("\n".join(source))
        sizes += [code_lines(node, source) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert statistics.median(sizes) <= MEDIAN_FUNCTION
    assert statistics.quantiles(sizes, n=10)[-1] <= LONG_FUNCTION


def test_the_constructor_takes_few_arguments() -> None:
    parameters = list(inspect.signature(LinearisedLaplace.__init__).parameters)
    assert len(parameters) - 1 <= MOST_ARGUMENTS  # all but `self`


def test_every_room_says_what_it_is_for() -> None:
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_nothing_heavy_is_imported() -> None:
    heavy = ("gpytorch", "linear_operator", "matplotlib", "scipy.stats", "scipy.optimize", "torch._dynamo")
    code = f"import sys, torch; before = set(sys.modules); import laplace_sampling; print([m for m in {heavy} "
    code += "if m in sys.modules and m not in before])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
