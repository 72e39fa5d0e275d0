"""Each command of the benchmarks once, in its quickest setting and on bundled or made-up data."""

import json
import math
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchmetrics", reason="torchmetrics, of the metrics of the benchmark, is not installed")

from benchmarks import __main__ as comparison
from benchmarks.comparison import cost
from benchmarks.comparison.training import Recipe
from benchmarks.methods import factors
from benchmarks.methods.selection import Candidate
from benchmarks.price import __main__ as price
from benchmarks.price import parts as parts_of_price
from benchmarks.price.networks import CNN
from benchmarks.published import __main__ as published
from benchmarks.published import parts as parts_of_published

# Networks of so few data, which are hardly trained, are those that warnings are for.
pytestmark = pytest.mark.filterwarnings("ignore")
slow, nightly = pytest.mark.slow, pytest.mark.nightly

SHORT = Recipe(steps=20)


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Any:
    yield
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)


def run(module: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m benchmarks.{module} {arguments}` does, in this process."""
    monkeypatch.setattr(sys, "argv", [module, *arguments.split()])
    import_module(f"benchmarks.{module}").main()


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


QUICK = (
    ("networks.compatibility", "--only MLP", slow),
    ("networks.products", "--networks LeNet --vectors 1 --repeats 1 --data 4 --ways jvp vjp loop vmap", slow),
    ("networks.products", "--networks LeNet --vectors 1 --repeats 1 --data 4 --ways curvlinops", slow),
    ("solvers.glyphs", "solvers --num-train 62 --num-data 20 --epochs 1 --rows 1 --sgd-epochs 1", nightly),
    ("solvers.glyphs", "samples --num-train 62 --num-data 10 --epochs 1 --rows 1 --samples 4 --seeds 1", slow),
    ("methods.memory", "--one krylov 10 10", slow),
    ("scaling.memory", "--gigabytes 0 --kept 0.01 --outputs 0 --samples 0 --ranks 1", slow),
)


@pytest.mark.parametrize(("module", "arguments"), [pytest.param(*case, marks=mark) for *case, mark in QUICK])
def test_a_quick_setting(module: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "curvlinops" in arguments:
        pytest.importorskip("curvlinops", reason="curvlinops is a contender of this command")
    run(module, arguments, monkeypatch)


# Constants that say what a command goes through.
FEWER: dict[str, dict[str, Any]] = {
    "methods.conformal": {"RECIPES": (SHORT,), "SPLITS": 2},
    "methods.own_temperature": {"CASES": ((("wine",), ("MLP",), (SHORT,)),), "NUMBERS": (20,), "DRAWS": 2},
    "methods.rules": {
        "CASES": {"clean": (("digits, n=150",), 1, (SHORT,))},
        "NETWORKS": ("LeNet, small",),
        "ALPHAS": torch.logspace(-1, 3, 3, dtype=torch.float64),
        "DRAWS": 4,
    },
    "methods.scale": {"CASES": (("wine", "MLP", "short"),), "RECIPES": {"short": SHORT}, "SEEDS": 1},
    "methods.selection": {"CHOICES": {"gap": ("gap", {str(n): Candidate(width=n, recipe=SHORT) for n in (2, 3)})}},
    "solvers.digits": {"print_sgd": lambda *_: None, "print_precisions": lambda *_: None},
}


@slow
@pytest.mark.parametrize("module", FEWER)
def test_less_of_what_takes_long(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if module == "methods.selection":
        pytest.importorskip("laplace", reason="laplace-torch is a baseline of this command")
    for name, value in FEWER[module].items():
        monkeypatch.setattr(f"benchmarks.{module}.{name}", value)
    arguments = {"methods.conformal": f"--only gap --out {tmp_path / 'out.jsonl'}", "solvers.digits": "--num-train 30"}
    run(module, arguments.get(module, ""), monkeypatch)


@pytest.mark.parametrize("module", ["methods.ablations", "methods.other_data", "gp.two_samples"])
def test_help_of_commands_without_a_quick_setting(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        run(module, "--help", monkeypatch)
    assert ended.value.code == 0


def test_help_of_the_fidelity_study() -> None:
    with pytest.raises(SystemExit) as ended:
        comparison.main(["fidelity", "--help"])
    assert ended.value.code == 0


@nightly
def test_export(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime, of the extra `onnx`, is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript, of the extra `onnx`, is not installed")
    import_module("benchmarks.export.last_layer").main(1, tmp_path)


@slow
def test_factors_and_a_cell_of_the_cost_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(factors.table("digits, tiny LeNet with batch norm", steps=20))) == 1 + len(factors.VARIANTS)
    cost.measure(2, 1e3, "ours")
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert min(last[f"seconds_{step}"] for step in ("fit", "tune", "first", "predict")) > 0


@slow
def test_the_comparison_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, only = tmp_path / "small.jsonl", "wine / MLP / no decay, early / (MAP|temperature scaling)$"
    arguments = ["run", "--seeds", "1", "--jobs", "1", "--only", only, "--out", str(out)]
    comparison.main(arguments)
    assert {record["method"] for record in records_of(out)} == {"MAP", "temperature scaling"}
    comparison.main([*arguments, "--list"])  # nothing is left
    assert "wine" not in capsys.readouterr().out.splitlines()[-1]
    comparison.main(["report", str(out), "--page", str(tmp_path / "page.md")])
    assert "wine / MLP / no decay, early" in (tmp_path / "page.md").read_text()


NIGHTLY: dict[Any, tuple[str, ...]] = {
    published: ("distances",),
    price: ("last_layer", "warm_starts", "defaults", "numbers"),
}


def parts(command: Any, names: Any) -> list[Any]:
    """Those that take long are for the night."""
    return [pytest.param(name, marks=nightly if name in NIGHTLY[command] else slow) for name in names]


def rows_of(main: Callable[[list[str]], Any], part: str, folder: Path) -> list[dict[str, Any]]:
    out = folder / "out.jsonl"
    main(["--quick", "--parts", part, "--out", str(out), "--cache", str(folder / "networks")])
    rows = [row for record in records_of(out) for row in record["rows"]]
    assert rows
    return rows


@pytest.mark.parametrize("part", parts(published, parts_of_published.PARTS))
def test_published(part: str, tmp_path: Path) -> None:
    if part == "optimisation":
        pytest.importorskip("botorch", reason="BoTorch, of the extra `botorch`, is not installed")
    rows = rows_of(published.main, part, tmp_path)
    assert all(math.isfinite(v) for row in rows for v in row.values() if isinstance(v, float))
    published.main(["report", str(tmp_path / "out.jsonl"), "--page", str(tmp_path / "page.md")])
    assert parts_of_published.PARTS[part].title in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("part", parts(price, parts_of_price.PARTS))
def test_price(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.price.fits.GRACE", 2.0)
    monkeypatch.setattr("benchmarks.price.defaults.CASES", ((CNN, 1000),))
    monkeypatch.setattr("benchmarks.price.last_layer.NETWORKS", (CNN,))
    monkeypatch.setattr("benchmarks.price.factored.NETWORKS", (CNN,))
    monkeypatch.setattr("benchmarks.price.numbers.NUMBERS", (1000, 10_000))
    assert all(math.isfinite(row["values"].get("value", 0.0)) for row in rows_of(price.main, part, tmp_path))


@slow
def test_scaling_and_its_page(tmp_path: Path) -> None:
    scaling = import_module("benchmarks.scaling.__main__")
    out, page = tmp_path / "scaling.jsonl", tmp_path / "scaling.md"
    scaling.main(["--quick", "--minutes", "0.1", "--out", str(out)])
    assert all(row["seconds"] > 0 for record in records_of(out) for row in record["rows"])
    page.write_text((Path(scaling.__file__).parents[2] / "docs" / "scaling.md").read_text())
    scaling.main(["report", str(out), "--page", str(page)])


@pytest.fixture
def uci(tmp_path: Path) -> Path:
    """Two splits of made-up data, whose target is not the last column."""
    generator, folder = np.random.default_rng(0), tmp_path / "uci" / "concrete"
    folder.mkdir(parents=True)
    x = generator.normal(size=(60, 2))
    y = 100 + 10 * np.sin(2 * x[:, 0]) + x[:, 1] + generator.normal(size=60)
    np.savetxt(folder / "data.txt", np.column_stack([x, y, np.ones(60)]))
    parts = {"features": [0, 1, 3], "target": [2]}
    for split in range(2):
        order = generator.permutation(60)
        parts |= {f"train_{split}": order[:50], f"test_{split}": order[50:]}
    for name, numbers in parts.items():
        np.savetxt(folder / f"index_{name}.txt", numbers, fmt="%d")
    return folder.parent


@slow
def test_uci(uci: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("regression_task.WIDTH", 8), ("regression_task.NETWORK_STEPS", 20)):
        monkeypatch.setattr(f"benchmarks.gp.{name}", value)
    for name in ("regressors.DROPOUT_STEPS", "processes.PROCESS_STEPS", "processes.KERNEL_STEPS"):
        monkeypatch.setattr(f"benchmarks.gp.{name}", 20)
    regressors = import_module("benchmarks.gp.regressors")
    methods = [name for name in regressors.METHODS if name != "laplace-torch, full" or find_spec("laplace")]
    command, out = import_module("benchmarks.gp.uci"), tmp_path / "uci.jsonl"
    size = ["--sets", "concrete", "--splits", "0", "--depths", "1", "--out", str(out)]
    command.main(["--uci", str(uci), *size, "--methods", *methods, "--table"])
    found = records_of(out)
    assert {record["method"] for record in found} == set(methods)
    assert all(0 < record["rmse"] < 30 and math.isfinite(record["log_likelihood"]) for record in found)
    assert "| ours, affine, isotropic |" in capsys.readouterr().out
