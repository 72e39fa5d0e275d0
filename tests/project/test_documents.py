"""Notebooks run, the documentation builds without a warning, and the commands that it names exist."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# The libraries that the code of a page needs beyond those of the default tier.
PAGES = {
    "docs/from_laplace_torch.md": ("laplace",),
    "docs/production.md": ("onnx", "onnxruntime", "onnxscript"),
    "docs/training.md": ("accelerate", "lightning", "sklearn", "transformers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel", reason="notebooks run in ipykernel, which is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the package of this checkout
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are not stored"
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()


@pytest.mark.nightly  # `.ci/run` builds the documentation itself
def test_documentation_builds_strictly(tmp_path: Path) -> None:
    for library in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(library, reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _run_code_of(name: str) -> dict[str, Any]:
    """The names that are there after the blocks of code of a page, also those in tabs, run in order."""
    names: dict[str, Any] = {}
    text = (ROOT / name).read_text()
    for indent, block in re.findall(r"^( *)```python\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        exec(compile(textwrap.dedent(block) if indent else block, name, "exec"), names)
    assert names, f"{name} has no code"
    return names


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_code_of_the_first_pages_runs_as_it_stands(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _run_code_of(name)
    assert "torch.Size([64, 3, 2])" in capsys.readouterr().out


@pytest.mark.nightly  # the build of the documentation draws them as well
def test_code_of_plots_draws_the_pictures_of_the_page() -> None:
    plt = pytest.importorskip("matplotlib.pyplot", reason="the extra `plots` is not installed")
    plt.switch_backend("Agg")
    names = _run_code_of("docs/plots.md")
    shown = re.findall(r"\(images/plots/(\w+)\.png\)", (ROOT / "docs/plots.md").read_text())
    plt.close("all")
    assert shown
    assert all(hasattr(names[name], "figure") for name in shown)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore", "error::laplace_sampling.ConvergenceWarning")  # other libraries warn
@pytest.mark.parametrize("name", PAGES)
def test_code_of_a_page_runs_in_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in PAGES[name]:
        pytest.importorskip(library, reason=f"{library} is not installed")
    monkeypatch.chdir(tmp_path)  # examples write files
    _run_code_of(name)


GUIDES = [
    path.relative_to(ROOT).as_posix()
    for folder in ("learn", "howto")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    if "```python\n" in path.read_text()
]
# What a guide imports beyond the libraries of the tests; it is of the tier `slow`.
IMPORTS = {"docs/howto/gp_bo.md": "botorch"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in IMPORTS)) for n in GUIDES])
def test_code_of_guides_runs_as_it_stands(name: str) -> None:
    if name in IMPORTS:
        pytest.importorskip(IMPORTS[name])
    _run_code_of(name)


def test_documents_name_commands_that_exist() -> None:
    texts = [
        ROOT / "README.md",
        ROOT / "pyproject.toml",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.py"),
    ]
    commands = {name for path in texts for name in re.findall(r"python -m (benchmarks[\w.]*)", path.read_text())}
    files = {name: ROOT / name.replace(".", "/") for name in commands}
    assert commands
    assert not {n for n, f in files.items() if not (f.with_suffix(".py").exists() or (f / "__main__.py").exists())}
