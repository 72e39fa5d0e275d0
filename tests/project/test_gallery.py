"""The gallery: each page asks a question, its script runs as it stands, and the overview shows all of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "docs/gallery"
PAGES = {path.stem: path.read_text() for path in sorted(GALLERY.glob("*.md")) if path.stem != "index"}
SCRIPTS = {name: re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for name, text in PAGES.items()}
NEEDS = {"lora": ("peft", "transformers")}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_a_question_and_shows_the_picture_of_its_script(name: str) -> None:
    text, scripts = PAGES[name], SCRIPTS[name]
    title = text.partition("\n")[0].removeprefix("# ")
    picture, *_ = re.findall(r"^!\[.+\]\((.*)\)$", text, re.MULTILINE)
    assert title.endswith("?")
    assert len(scripts) <= 1
    assert picture == f"../images/gallery/{name}.png" if scripts else (GALLERY / picture).exists()
    assert f"[![]({picture})]({name}.md)\n\n    [{title}]({name}.md)" in (GALLERY / "index.md").read_text()
    assert f"- gallery/{name}.md" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.nightly  # `.ci/run` builds the documentation, which runs them
@pytest.mark.parametrize("name", [name for name, scripts in SCRIPTS.items() if scripts])
def test_script_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    for library in ("matplotlib", "sklearn", *NEEDS.get(name, ())):
        pytest.importorskip(library)
    (tmp_path / "script.py").write_text(SCRIPTS[name][0])
    # Warnings of this library tell a reader to do something, which an example should have done.
    code = (
        "import runpy, warnings, laplace_sampling as ls\n"
        "for warning in (ls.CalibrationWarning, ls.ConvergenceWarning):\n"
        "    warnings.simplefilter('error', warning)\n"
        "runpy.run_path('script.py', run_name='__main__')\n"
        "import matplotlib.pyplot as plt\n"
        "assert plt.get_fignums() and all(axes.has_data() for axes in plt.gcf().axes)\n"
    )
    settings = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
