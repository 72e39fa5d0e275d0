"""How long methods take on networks that have no results yet, counted from a measured step of training."""

import time
from collections.abc import Mapping

import torch

from benchmarks.comparison.networks import build
from benchmarks.comparison.suites import Unit
from benchmarks.comparison.training import loss_of
from benchmarks.data.tasks import Data, Task

__all__ = ["EFFORT", "Expected"]

# Of a method: how often a network is trained, epochs of a fit, and predictions of an input, in gradients.
EFFORT = {
    "MAP": (1, 0, 1),
    "temperature scaling": (0, 0, 1),
    "temperature by test oracle": (0, 0, 1),
    "ours, last layer": (0, 3, 1),
    "ours, last layer, validation": (0, 3, 1),
    "ours, KFAC": (0, 10, 25),
    **dict.fromkeys(("laplace-torch, KFAC", "laplace-torch, diagonal"), (0, 30, 180)),
    **dict.fromkeys(("laplace-torch, KFAC, validation", "laplace-torch, diagonal, validation"), (0, 500, 180)),
    "MC dropout": (2, 0, 30),
    "SNGP": (1, 1, 1),
    "ensemble of 5": (4, 0, 2),
    "ensemble of 5, a fifth of the steps": (1, 0, 2),
}
OURS, OTHERS = (0, 20, 25), (0, 3, 18)
# Of a small network the overhead of a fit, and a regression by Gaussian processes; and a step of training.
OVERHEAD, BATCH = 5.0, 100


class Expected:
    """Seconds of methods on the units of some tasks, which are loaded once each, as they come."""

    def __init__(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = tasks
        self._sizes: dict[str, tuple[torch.Size, int, int, Data]] = {}
        self._steps: dict[tuple[str, torch.Size], float] = {}

    def seconds(self, unit: Unit, method: str) -> float:
        shape, num, predicted, data = self._size(unit.case.task)
        key = unit.case.network, shape
        if key not in self._steps:
            self._steps[key] = step(self.tasks[unit.case.task], unit.case.network, data)
        gradient = self._steps[key] / BATCH
        recipe = unit.case.recipe
        trained, epochs, products = EFFORT.get(method, OURS if method.startswith("ours") else OTHERS)
        images = trained * recipe.steps * recipe.batch_size + epochs * num + products * predicted
        return OVERHEAD + gradient * images

    def _size(self, task: str) -> tuple[torch.Size, int, int, Data]:
        """The shape of an input, training data, and inputs that are predicted; and a batch of data."""
        if task not in self._sizes:
            data = self.tasks[task].load(0)
            inputs = [data.test.x, *(part.x for part in data.shifts.values()), *data.others.values()]
            few = Data(*(type(part)(part.x[:BATCH].clone(), part.y[:BATCH].clone()) for part in parts(data)))
            self._sizes[task] = data.train.x.shape[1:], len(data.train.y), sum(map(len, inputs)), few
        return self._sizes[task]


def parts(data: Data) -> tuple:
    return data.train, data.validation, data.test


def step(task: Task, name: str, data: Data, repeats: int = 3) -> float:
    """The least of the seconds of a few steps of Adam on one batch of 100."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    network, loss = build(name, data.train.x.shape[1:], task.outputs), loss_of(task.likelihood)
    optimiser, least = torch.optim.Adam(network.parameters()), float("inf")
    for _ in range(repeats):
        started = time.process_time()
        optimiser.zero_grad()
        loss(network(data.train.x), data.train.y).backward()
        optimiser.step()
        least = min(least, time.process_time() - started)
    torch.set_num_threads(threads)
    return least * BATCH / len(data.train.y)
