"""`python -m benchmarks.scaling.memory`: peak memory of each process of a fit, above what it takes before the fit.

- of inputs that are kept, which go through 1, 2 and 4 processes: each keeps those of its part;
- of virtual inputs, of which 100 GB stream through 2 processes in each pass: each is made when it is read, from a part
  of an array that is mapped from a file. No more is in memory than a few batches;
- of outputs of a network of 1,000 classes, a gigabyte: 1, 2 and 4 processes have those of their part of the data;
- of 64 samples of four million weights, by the diagonal of 64 data, which 1, 2 and 4 processes draw: all of them
  keep all, or each keeps its own (the axis "shared_samples").

The first two are of a last layer, the third of Kronecker factors.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.scaling.processes import on_ranks
from laplace_sampling import IsotropicPrior, LinearisedLaplace

__all__ = ["VirtualImages", "peak"]

# Of the network of many outputs.
_CLASSES = 1000
# Of the network whose samples are shared out.
_WEIGHTS = 4_000_000
# Of an image, which has about a megabyte; images of the array that is mapped; images of a batch.
_SIDE, _MAPPED, _BATCH = 296, 64, 32
_MEGABYTE = 3 * _SIDE**2 * 4


class VirtualImages(Dataset):
    """Images of a megabyte, each another one, that are not stored.

    Args:
        path: of a file with some numbers, which is mapped.
        num: how many images there are.
    """

    def __init__(self, path: Path, num: int) -> None:
        self.num = num
        self.mapped = np.memmap(path, dtype=np.float32, mode="r", shape=(_MAPPED, 3, _SIDE, _SIDE))

    @staticmethod
    def write(path: Path) -> None:
        """Makes the file."""
        numbers = np.random.default_rng(0).standard_normal((_MAPPED, 3, _SIDE, _SIDE), dtype=np.float32)
        numbers.tofile(path)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.from_numpy(self.mapped[index % _MAPPED] + np.float32(index / self.num))
        return image, index % 10


def peak(folder: Path, num: int) -> dict[str, float]:
    """Of this process: the peak of its memory in a fit, above that before the fit, and the seconds of the fit."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    network = nn.Sequential(nn.AvgPool2d(37), nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 10))
    la = LinearisedLaplace(
        network, "classification", parameters="last_layer", num_samples=8, process_group=dist.group.WORLD
    )
    loader = DataLoader(VirtualImages(folder / "numbers", num), batch_size=_BATCH)
    before, started = _most(), time.perf_counter()
    la.fit(loader, progress=False)
    return {"before": before, "peak": _most(), "seconds": time.perf_counter() - started}


def peak_of_outputs(num_data: int) -> dict[str, float]:
    """The same of a network of many outputs, whose inputs are small."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    la = LinearisedLaplace(
        nn.Linear(8, _CLASSES), "classification", method="kfac", num_samples=4, process_group=dist.group.WORLD
    )
    x = torch.randn(num_data, 8)
    loader = DataLoader(TensorDataset(x, torch.arange(num_data) % _CLASSES), batch_size=256)
    before, started = _most(), time.perf_counter()
    la.fit(loader, progress=False)
    return {"before": before, "peak": _most(), "seconds": time.perf_counter() - started}


def peak_of_samples(num_weights: int, num_samples: int, share: bool) -> dict[str, float]:
    """The same of a fit and a prediction of one input, whose samples the processes share out."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    width = num_weights // 102
    network = nn.Sequential(nn.Linear(100, width), nn.Tanh(), nn.Linear(width, 1))
    x = torch.randn(64, 100)
    options: dict[str, Any] = {"num_samples": num_samples, "method": "diagonal", "prior": IsotropicPrior(precision=1.0)}
    if dist.get_world_size() > 1:
        names = "data", "shared_samples" if share else "samples"
        options["mesh"] = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
    before, started = _most(), time.perf_counter()
    la = LinearisedLaplace(network, "regression", **options).fit([(x, x[:, :1])], progress=False)
    la.predict(x[:1])
    kept = 4.0 * la._fitted.posterior.samples.rows.numel()  # pyright: ignore
    return {"before": before, "peak": _most(), "kept": kept, "seconds": time.perf_counter() - started}


def _most() -> float:
    """Bytes that the process has had in memory at most."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run(gigabytes: float, kept: float, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A record for each number of processes."""
    records = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        VirtualImages.write(folder / "numbers")
        for what, size, nums in (
            ("kept", kept, ranks if kept else []),
            ("streamed", gigabytes, [2] if gigabytes else []),
        ):
            for num in nums:
                found = on_ranks(peak, num, folder, int(size * 1e9 / _MEGABYTE))
                records.append({"inputs": what, "gigabytes": size, "ranks": num, "processes": found})
                worst = max(found, key=lambda one: one["peak"])
                print(
                    f"{size:g} GB {what}, {num} processes: peak {worst['peak'] / 1e9:.2f} GB of a process, "
                    f"{(worst['peak'] - worst['before']) / 1e9:.2f} GB above that before, {worst['seconds']:.0f} s",
                    flush=True,
                )
    return records


def run_outputs(gigabytes: float, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A record for each number of processes, of so many gigabytes of outputs of all data."""
    records = []
    for num in ranks:
        found = on_ranks(peak_of_outputs, num, int(gigabytes * 1e9 / (4 * _CLASSES)))
        records.append({"outputs": gigabytes, "ranks": num, "processes": found})
        rise = max(one["peak"] - one["before"] for one in found)
        print(f"{gigabytes:g} GB of outputs, {num} processes: peak {rise / 1e9:.2f} GB above that before", flush=True)
    return records


def run_samples(num_samples: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """A record for each number of processes, with samples that are whole in each of them and shared out."""
    records = []
    for share in (False, True):
        for num in ranks:
            found = on_ranks(peak_of_samples, num, _WEIGHTS, num_samples, share)
            records.append({"samples": num_samples, "shared": share, "ranks": num, "processes": found})
            worst = max(found, key=lambda one: one["peak"])
            print(
                f"{num_samples} samples {'shared out' if share else 'in each'}, {num} processes: kept "
                f"{worst['kept'] / 1e9:.3f} GB, peak {(worst['peak'] - worst['before']) / 1e9:.2f} GB above that "
                f"before, {worst['seconds']:.0f} s",
                flush=True,
            )
    return records


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.memory", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=100.0, help="that are streamed; 0 for none")
    parser.add_argument("--kept", type=float, default=1.0, help="gigabytes that are kept")
    parser.add_argument("--outputs", type=float, default=1.0, help="gigabytes of outputs; 0 for none")
    parser.add_argument("--samples", type=int, default=64, help="that are shared out; 0 for none")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--out", type=Path, help="a file to which records are appended")
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    ranks = [int(num) for num in options.ranks.split(",")]
    records = run(options.gigabytes, options.kept, ranks) if options.kept or options.gigabytes else []
    records += run_outputs(options.outputs, ranks) if options.outputs else []
    records += run_samples(options.samples, ranks) if options.samples else []
    if options.out is not None:
        with open(options.out, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
