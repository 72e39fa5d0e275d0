"""Files of posteriors whose process is killed, whose bits are flipped, and that are cut off."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from laplace_sampling import LinearisedLaplace
from laplace_sampling.files import read, write

# Seconds until a process is killed, at most: several saves.
_LONGEST = 0.1


def fitted(inputs: int, seed: int = 0) -> LinearisedLaplace:
    """A posterior of a linear network, whose file is as large as there are inputs."""
    generator = torch.Generator().manual_seed(0)
    x, model = torch.randn(8, inputs, generator=generator), nn.Linear(inputs, 1)
    with torch.no_grad():
        model.weight.copy_(torch.randn(1, inputs, generator=generator))
        model.bias.zero_()
        y = model(x)
    la = LinearisedLaplace(model, "regression", method="exact", seed=seed)
    return la.fit([(x, y)], progress=False)


def killed_saves(count: int, seed: int, folder: Path) -> list[str]:
    """Kills so many processes while they save over a file, which must hold what was saved before or after.

    `folder` is empty. It returns a line for each defect.
    """
    states = [folder / f"state_{seed}.pt" for seed in (0, 1)]
    for other, path in enumerate(states):
        fitted(4000, other).save(path)
    # In a process of its own, since one with threads is not to be forked.
    command = [sys.executable, "-W", "ignore", __file__, str(count), str(seed), *map(str, states)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return run.stdout.splitlines() if run.returncode == 0 else [f"the process of kills failed: {run.stderr[-2000:]}"]


def _kill(count: int, seed: int, files: list[str]) -> None:
    random, path = Random(seed), Path(files[0]).with_name("posterior.pt")
    states = [read(file) for file in files]
    write(states[0], path)
    for number in range(count):
        child = os.fork()
        if child == 0:
            while True:
                for state in states:
                    write(state, path)
        time.sleep(_LONGEST * random.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        try:
            found = read(path)
        except Exception as error:
            print(f"after kill {number} of seed {seed} the file is not whole: {error!r}")
            continue
        if not any(_same(found, state) for state in states):
            print(f"after kill {number} of seed {seed} the file has another content")
    left = [file for file in path.parent.iterdir() if str(file) not in (str(path), *files) and not _is_temporary(file)]
    if left:
        print(f"saves left {left}")


def _is_temporary(file: Path) -> bool:
    return file.name.startswith(".") and file.suffix == ".tmp"


def flipped_bits(count: int, seed: int) -> list[str]:
    """Flips so many bits of a file, one at a time: it is refused, or has the same content."""
    la, random, defects = fitted(20), Random(seed), []
    content = _saved(la)
    for _ in range(count):
        place, bit = random.randrange(len(content)), random.randrange(8)
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        defects += _defects(la, bytes(damaged), f"bit {bit} of byte {place} flipped")
    return defects


def cut_files(count: int, seed: int) -> list[str]:
    """Cuts so many files off: each is refused."""
    la, random = fitted(20), Random(seed)
    content = _saved(la)
    lengths = [0, 1, len(content) - 1, *(random.randrange(len(content)) for _ in range(count - 3))]
    return [defect for n in lengths for defect in _defects(la, content[:n], f"cut to {n} bytes")]


def _saved(la: LinearisedLaplace) -> bytes:
    file = io.BytesIO()
    la.save(file)
    return file.getvalue()


def _defects(la: LinearisedLaplace, content: bytes, what: str) -> list[str]:
    try:
        loaded = LinearisedLaplace.load(io.BytesIO(content), la.network.source)
    except ValueError as error:
        message = str(error)
        told = message.endswith(".") and "\n" not in message and ("`load`" in message or "The state" in message)
        return [] if told else [f"{what}: {message}"]
    except Exception as error:
        return [f"{what}: {error!r}"]
    return [] if _same(loaded.state_dict(), la.state_dict()) else [f"{what}: taken"]


def _same(a: Any, b: Any) -> bool:
    (first, structure), (second, other) = tree_flatten(a), tree_flatten(b)
    return structure == other and all(map(_equal, first, second))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b or (a != a and b != b)


if __name__ == "__main__":
    _kill(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
