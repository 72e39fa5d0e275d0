"""Peak memory of fits and predictions as the number of data `N` and of classes `C` grow.

`python -m benchmarks.methods.memory` fits a small perceptron whose hidden layers are random and whose head is not, so
that `P` is the same for every `C`. Data are computed from their index and take no memory themselves. Each size runs in
a process of its own, and its peak resident memory is printed. The first row is a process that imports everything and
fits ten data of ten classes. "predict" fits ten data and predicts `N`. "head" is the memory that the size needs with
any method: outputs, samples of the outputs for the data that are left out in turn to find a scale (4096 data and 2²⁴
numbers at most), and the weights of the head.
"""

import argparse
import json
import resource
import subprocess
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from laplace_sampling import SGD, SVRG, ConvergenceWarning, Krylov, LinearisedLaplace, Method, Stochastic

INPUTS, WIDTH, SAMPLES = 8, 32, 8
# Memory does not depend on how long a solver runs.
_FEW_STEPS = SGD(epochs=1e-3, mode_epochs=1e-3, min_steps=20, batch_size=20, finish_passes=0)
_MEMORY = 2**26
METHODS: dict[str, Method] = {
    "krylov": Krylov(max_memory=_MEMORY),
    "sgd": Stochastic(solver=_FEW_STEPS, max_memory=_MEMORY),
    "svrg": Stochastic(solver=SVRG(), max_memory=_MEMORY),
}
# N and C of each run.
SIZES = {"N": [(n, 10) for n in (1_000, 10_000, 100_000)], "C": [(50, c) for c in (10, 100, 1_000, 10_000)]}


class Made(Dataset):
    """Data as a function of their index."""

    def __init__(self, num: int, classes: int) -> None:
        self.num, self.classes = num, classes

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.sin((i + 1.0) * torch.arange(1, INPUTS + 1)), (7919 * i) % self.classes


def measure(method: str, num: int, classes: int) -> dict[str, Any]:
    """Peak resident memory in MiB after a fit, and after predictions of as many inputs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)  # a few steps are enough to see what is held
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    model.append(nn.Linear(WIDTH, classes))
    data = Made(10 if method == "predict" else num, classes)
    # The number of outputs that go through the network at once is the same for every C.
    rows = max(1, min(1000, 20_000 // classes))
    la = LinearisedLaplace(
        model,
        "classification",
        parameters=["0.*", "2.*"],
        method=METHODS["krylov" if method == "predict" else method],
        num_samples=SAMPLES,
    )
    la.fit_hyperparameters(DataLoader(data, rows), max_steps=2, num_samples=4, tolerance=0.1, progress=False)
    fitted = _peak()
    for x, _ in DataLoader(Made(num, classes), min(rows, 100)):
        _ = la.predict(x).variance
    return {"fit": fitted, "predict": _peak()}


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _head(num: int, classes: int) -> float:
    """MiB of the outputs, of their samples, and of the head's weights."""
    sampled = min(num, 4096, 2**24 // (SAMPLES * classes))
    return 4 * ((num + SAMPLES * sampled) * classes + classes * WIDTH) / 2**20


def _run(method: str, num: int, classes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.methods.memory", "--one", method, str(num), str(classes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "N", "C"), help="measure one size in this process")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, "predict"])
    parser.add_argument("--sizes", nargs="+", choices=["N", "C"], default=["N", "C"])
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one[0], int(given.one[1]), int(given.one[2]))))
        return
    print("| method | N | C | head (MiB) | fit (MiB) | and predict (MiB) |\n|---|---|---|---|---|---|")
    for method in given.methods:
        for num, classes in [(10, 10), *(size for name in given.sizes for size in SIZES[name])]:
            peaks, head = _run(method, num, classes), _head(num, classes)
            memory = f"{head:.1f} | {peaks['fit']:.0f} | {peaks['predict']:.0f}"
            print(f"| {method} | {num} | {classes} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
