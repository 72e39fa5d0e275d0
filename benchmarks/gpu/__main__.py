"""`python -m benchmarks.gpu`: what the library does on one GPU, in one table and at most eight minutes.

`[--data DIR] [--parts tests fits products nccl] [--networks LeNet ViT ResNet-18] [--minutes 8] [--device cuda]
[--quick]`. Rows are printed as they are done; the table of all of them comes at the end. What fails is a row with its
error, whose traceback is on standard error, and the exit status is 1 then. `--quick` makes everything small, and so
does `--device cpu`.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import fits, group, products, suite
from benchmarks.gpu.networks import NETWORKS
from benchmarks.gpu.report import Job, Report, Setup

# Each part with its share of eight minutes; what a part leaves is for those after it.
PARTS: dict[str, tuple[Callable[[Setup], Iterable[Job]], float]] = {
    "tests": (suite.jobs, 2.4),
    "fits": (fits.jobs, 3.7),
    "products": (products.jobs, 1.5),
    "nccl": (group.jobs, 0.4),
}


def main(arguments: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="DIR", help="of fashion-mnist.npz, mnist.npz and not-mnist/")
    parser.add_argument("--parts", nargs="+", metavar="PART", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS), help="of the fits")
    parser.add_argument("--quick", action="store_true", help="everything small, as on a CPU")
    args = parser.parse_args(arguments)
    asked, device = ",".join(args.parts).split(","), args.device
    if unknown := set(asked) - set(PARTS):
        parser.error(f"there are no parts {sorted(unknown)}; there are {list(PARTS)}")
    if device.type != "cpu" and not torch.accelerator.is_available():
        parser.error("there is no GPU; `--device cpu` tries everything on the CPU")
    # Convolutions of cuDNN would use TF32 by default; matrix products do not.
    torch.backends.cudnn.allow_tf32 = False
    quick = args.quick or device.type == "cpu"
    setup, report = Setup(device, args.data, quick, tuple(args.networks)), Report()
    parts = {name: part for name, part in PARTS.items() if name in asked}
    unit, share = 60 * args.minutes / sum(share for _, share in parts.values()), 0.0
    try:
        for name, (jobs, own) in parts.items():
            share += own
            report.run(name, partial(jobs, setup), started + unit * share)
    finally:
        print(f"\n{setup}. {time.monotonic() - started:.0f} s.\n\n{report.table()}", flush=True)
    return int(report.failed)


if __name__ == "__main__":
    raise SystemExit(main())
