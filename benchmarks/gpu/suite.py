"""The tests of the suite that need a GPU, in a process of their own."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu.report import Cells, FailedError, Job, OutOfTime, Setup

ROOT = Path(__file__).parents[2]
MOST = 150.0


def jobs(setup: Setup) -> Iterator[Job]:
    yield Job(partial(run, ROOT / "tests"), {"run": "pytest -m gpu"}, MOST)


def run(folder: Path) -> Cells:
    """Runs the tests; what came of them is read from what pytest prints, also if their time is over."""
    # Only files that name the marker: others import libraries that may not be there.
    files = [str(path) for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    if not files:
        raise FailedError("no test has the marker `gpu`", {})
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *files, "-p", "no:cacheprovider", "--color=no"]
    command += ["--continue-on-collection-errors", "-o", "addopts=--import-mode=importlib"]  # without those of xdist
    command += ["-p", "xdist.plugin", "-n", "4"] if importlib.util.find_spec("xdist") else []
    # Other plugins that happen to be installed may warn, and warnings are errors.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            end = "" if process.wait() else None
        except OutOfTime:
            end = "stopped: "
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        text = out.read()
    if end is None:
        return {"outcome": counts(text)}
    print(text[-20_000:], file=sys.stderr)
    names = dict.fromkeys(re.findall(r"\b(?:FAILED|ERROR) +\S*?([^/\s]+\.py\S*)", text))
    raise FailedError(end + counts(text), {"remarks": ", ".join(names)})


def counts(text: str) -> str:
    """Numbers of tests that passed, failed and were skipped."""
    summary = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", text.strip().rpartition("\n")[2])
    if not summary:  # pytest did not come to its end
        summary = [(len(re.findall(rf"\b{word}\b", text)), word.lower()) for word in ("PASSED", "FAILED", "SKIPPED")]
    return ", ".join(f"{num} {word}" for num, word in summary)
