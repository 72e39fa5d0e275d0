"""The suites of other libraries that check kernels, means and linear operators, on ours; they are in `tests/gp`."""

import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.trial.report import Report

__all__ = ["run"]

_ROOT = Path(__file__).parents[2]


def run(count: int, seed: int) -> Report:
    """So many tests of these suites, chosen at random if there are more."""
    report = Report()
    files = [path for path in sorted((_ROOT / "tests" / "gp").glob("test_*.py")) if "TestCase" in path.read_text()]
    if not files:
        return Report(skipped="`tests/gp` is not there")
    collected = _pytest("--collect-only", *map(str, files)).splitlines()
    # Those of other libraries are in classes.
    tests = [line for line in collected if line.count("::") == 2]
    chosen = random.Random(seed).sample(tests, min(count, len(tests)))
    report.counts["tests there are"] = len(tests)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.xml"
        if chosen:
            _pytest(f"--junitxml={path}", *chosen)
            for case in ET.parse(path).iter("testcase"):
                report.trials += 1
                for bad in (*case.iter("failure"), *case.iter("error")):
                    report.defects.append(
                        f"{case.get('classname')}.{case.get('name')}: {bad.get('message', '')[:120]!r}"
                    )
    return report


def _pytest(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False).stdout
