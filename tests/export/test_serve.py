"""The example of a server answers over HTTP, and modules may be called by several threads."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from exported import BATCH, fitted
from torch import Tensor
from torch.testing import assert_close

ROOT = Path(__file__).parents[2]
# Starting takes some ten seconds, of which most are imports; a busy machine takes several times as long.
_SECONDS = 180


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        try:
            free.bind(("127.0.0.1", 0))
        except OSError as error:
            pytest.skip(f"no port of this machine can be opened: {error}")
        return free.getsockname()[1]


@pytest.fixture
def server(port: int, tmp_path: Path) -> Iterator[str]:
    """The example in a folder of its own; all of its processes end with the test."""
    pytest.importorskip("litserve", reason="the extra `litserve` is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "serve.py"), str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + _SECONDS
    try:
        while not answers(address):
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail((tmp_path / "log").read_text())
            time.sleep(0.2)
        yield address
    finally:
        # A session of its own is the server with its workers.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def ask(address: str, x: Tensor) -> dict[str, Tensor]:
    body, header = json.dumps({"x": x.tolist()}).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}/predict", body, header), timeout=60) as response:
        return {name: torch.tensor(value) for name, value in json.load(response).items()}


@pytest.mark.slow
def test_the_example_answers(server: str, tmp_path: Path) -> None:
    module = torch.export.load(tmp_path / "error_bars.pt2").module()
    x = torch.tensor([[0.5, -1.0], [3.0, 3.0], [0.0, 0.4]])
    expected = module(x)
    for found in (ask(server, x), ask(server, x)):
        assert sorted(found) == ["epistemic", "probs", "stddev"]
        for name, value in found.items():
            assert_close(value, expected[name])
    with ThreadPoolExecutor(3) as pool:  # requests at the same time
        for n, found in enumerate(pool.map(lambda n: ask(server, x[n : n + 1]), range(3))):
            assert_close(found["probs"], expected["probs"][n : n + 1])
    with pytest.raises(urllib.error.HTTPError):
        ask(server, torch.zeros(2))  # no axis of the batch


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"parameters": "last_layer"}], ids=["all", "last"])
def test_predictions_of_several_threads_are_those_of_one(settings: dict) -> None:
    la, x = fitted("lenet", **settings)
    module = la.to_module()
    program = torch.export.export(module, (x[:2],), dynamic_shapes=BATCH).module()
    batches = [x[: 1 + n % 8] for n in range(40)]
    for run in (module, program):
        expected = [run(batch) for batch in batches]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, batches))
        for one, other in zip(expected, found, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in module.outputs)
