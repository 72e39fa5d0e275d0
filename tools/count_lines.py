"""`python tools/count_lines.py`: how large the project is. No test depends on these numbers.

It prints code lines of the package by room, without blank lines, comments and docstrings; lines of tests and benchmarks
that are not blank; numeric constants at module level; and circles of imports, those for type checkers counted.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "laplace_sampling"
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
)  # fmt: skip


def code_lines(path: Path) -> int:
    """Lines with a token that is neither a comment nor a docstring."""
    source, lines = path.read_text(), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def not_blank(path: Path) -> int:
    return sum(1 for line in path.read_text().splitlines() if line.strip())


def is_number(node: ast.AST | None) -> bool:
    """Whether an expression has nothing but numbers, such as `2 * 10**6` or `(0.5, 2.0)`."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float) and not isinstance(node.value, bool)
    parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)] if node else []
    is_made_of_them = isinstance(node, ast.UnaryOp | ast.BinOp | ast.Tuple | ast.List)
    return is_made_of_them and bool(parts) and all(map(is_number, parts))


def constants(path: Path) -> int:
    """Names at module level that are assigned numbers."""
    count = 0
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_number(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            count += len(target.elts) if isinstance(target, ast.Tuple) else 1
    return count


def imports(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports anywhere, also for type checkers and inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def circles(package: Path = PACKAGE) -> list[list[str]]:
    """Groups of modules that import one another, directly or by way of others."""
    names = {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}
    reached = {name: {found for found in imports(path) if found in names} - {name} for name, path in names.items()}
    for middle in names:
        for ends in reached.values():
            if middle in ends:
                ends |= reached[middle]
    groups = {frozenset(o for o in reached[n] if n in reached[o]) | {n} for n in names if n in reached[n]}
    return sorted(sorted(group) for group in groups)


def main() -> None:
    rooms: dict[str, list[int]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        counted = rooms.setdefault(parts[0] if len(parts) > 1 else "front", [0, 0, 0])
        for column, number in enumerate((code_lines(path), 1, constants(path))):
            counted[column] += number
    print(f"{'room':16} {'code':>6} {'files':>6} {'constants':>10}")
    for room, row in [*rooms.items(), ("all", [sum(column) for column in zip(*rooms.values(), strict=True)])]:
        print(f"{room:16} {row[0]:6} {row[1]:6} {row[2]:10}")
    for folder in ("tests", "benchmarks"):
        print(f"{folder:16} {sum(map(not_blank, (ROOT / folder).rglob('*.py'))):6} lines that are not blank")
    for circle in circles():
        print(f"a circle of imports: {', '.join(circle)}")


if __name__ == "__main__":
    main()
