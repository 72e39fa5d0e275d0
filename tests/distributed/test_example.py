"""`examples/distributed.py` by `torchrun`, which starts it again when one of its processes is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"
# Seconds of the whole, with the imports of four processes.
TIMEOUT = 300.0


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def test_the_example_goes_on_after_a_kill(tmp_path: Path) -> None:
    checkpoint, output = tmp_path / "fit.checkpoint", tmp_path / "output"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", str(EXAMPLE), "--folder", str(tmp_path), "--images", "300", "--epochs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # its store would keep what the killed processes wrote
    end = time.monotonic() + TIMEOUT
    with open(output, "wb") as file:
        torchrun = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        # The file is there when what it is of is written, before anything else.
        while not (checkpoint.exists() and checkpoint.stat().st_size > 20_000):
            assert torchrun.poll() is None, output.read_text()
            assert time.monotonic() < end
            time.sleep(0.001)
        os.kill(children_of(torchrun.pid)[1], signal.SIGKILL)
        assert torchrun.wait(end - time.monotonic()) == 0, output.read_text()
    finally:
        torchrun.kill()
        torchrun.wait()
    text = output.read_text()
    assert text.count(f"goes on with the fit of {checkpoint}") == 1
    assert text.count("accuracy on 1000 test images") == 1
    assert not checkpoint.exists()
