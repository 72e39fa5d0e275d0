"""A fit by a process group of one process, on nccl where the device is a GPU, beside the same fit without a group."""

import tempfile
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.networks import made, num_weights
from benchmarks.gpu.regressions import data, fitted, mlp
from benchmarks.gpu.report import Cells, FailedError, Job, Setup, number
from laplace_sampling import LinearisedLaplace

MOST, NEAR = 60.0, 1e-6


def jobs(setup: Setup) -> Iterator[Job]:
    backend = "nccl" if setup.device.type == "cuda" else "gloo"
    labels = {"network": "MLP", "weights": num_weights(mlp(8)), "run": f"{backend}, one process, float64"}
    yield Job(partial(compared, setup, backend), labels, MOST)


def compared(setup: Setup, backend: str) -> Cells:
    x, y = (part.to(setup.device).double() for part in data(200))
    network = fitted(made(lambda: mlp(8).double(), setup.device), x, y)
    alone = _fit(network, x, y)
    with tempfile.TemporaryDirectory() as folder:
        meeting = {"init_method": f"file://{folder}/meeting", "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=30), **meeting)
        try:
            together: list[Tensor] = []
            took = setup.seconds(lambda: together.extend(_fit(network, x, y, process_group=dist.group.WORLD)))
        finally:
            dist.destroy_process_group()
    distance = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(alone, together, strict=True))
    cells = {"outcome": f"equal to {distance:.0e}", "seconds": number(took)}
    if not distance < NEAR:
        raise FailedError(f"with the group precision and samples differ by {distance:.0e} of the largest", cells)
    return cells


def _fit(network: nn.Module, x: Tensor, y: Tensor, **settings: Any) -> list[Tensor]:
    """Prior precision and samples."""
    la = LinearisedLaplace(network, "regression", method="krylov", num_samples=8, **settings)
    la.fit_hyperparameters([(x, y)], progress=False)
    return [la.prior_precision_, la.samples_]
