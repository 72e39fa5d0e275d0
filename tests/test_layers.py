"""Imports point down the table of the design only."""

import ast
from pathlib import Path

import laplace_sampling

LEVELS = {
    "tangents": -3,
    "calling": -2, "compiled": -1, "selection": -1,
    "budgets": -2, "forward_mode": -2, "held_module": -2, "operations": -2, "precision": -2, "jacobian_products": -1,
    "data": 0, "energy_tests": 0, "lapack": 0, "likelihoods": 0, "linear_operators": 0, "linearise": 0,
    "calibration": 1, "composite_likelihoods": 1, "consistency": 1, "diagnostics": 1, "leave_one_out": 1,
    "loss_likelihoods": 1, "operators": 1, "subnetwork": 1, "tangent_kernel": 1,
    "cost": 2, "gram": 2, "preconditioners": 2, "predictive": 2, "priors": 2, "solvers": 2, "whitened_gram": 2,
    "last_layer": 3,
    "dense": 3, "kronecker": 3, "krylov": 3, "sampling": 3, "stochastic": 3,
    "subsets": 4,
    "contour": 4, "dense_covariance": 4, "dual": 4, "evidence": 4, "exact": 4, "factored": 4,
    "measurements": 4, "quadrature": 4,
    "variance_reduced": 4,
    "curves": 5, "exact_classification": 5, "methods": 5, "posterior": 5, "saving": 5, "tangent_model": 5,
    "evidence_path": 6, "exact_fit": 6, "fits": 6,
    "gram_fit": 7, "path_fit": 7, "predict": 7,
    "gram_classification": 8, "gram_regression": 8, "held_out": 8, "integrations": 8, "solver_fit": 8,
    "factored_fit": 9,
    "tasks": 10,
    "laplace": 11,
    "largest_variance": 12, "plotting": 12,
    "__init__": 13,
    "__main__": 14,
}  # fmt: skip
PACKAGE = Path(laplace_sampling.__file__).parent


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("laplace_sampling"):
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {"__init__"}
    return found


def test_every_module_has_a_level() -> None:
    found = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.glob("[a-z]*/")}
    assert found == set(LEVELS)


def test_imports_point_down() -> None:
    for path in PACKAGE.rglob("*.py"):
        level = LEVELS[path.relative_to(PACKAGE).parts[0].removesuffix(".py")]
        above = {name for name in imports(path) if LEVELS[name] >= level}
        assert not above, f"{path.name} imports {above}"


def test_solvers_do_not_know_networks_or_likelihoods() -> None:
    assert imports(PACKAGE / "solvers.py") == {"operators"}


def test_the_public_names_are_listed_and_there() -> None:
    assert sorted(laplace_sampling.__all__) == sorted(set(laplace_sampling.__all__))
    for name in laplace_sampling.__all__:
        assert getattr(laplace_sampling, name).__doc__
