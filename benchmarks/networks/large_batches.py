"""Time of products of large batches on a CPU, computed in pieces and on the whole batch, in one run.

`python -m benchmarks.networks.large_batches [--networks LeNet] [--vectors 1 8] [--repeats 3]` runs both in turns, in
one thread, and prints the least processor time of each and the memory pages that its last run newly took.
"""

import argparse
import math
import resource
import time

import torch
from torch import Tensor

from benchmarks.networks.products import NETWORKS, check
from laplace_sampling.networks.linearisation import Linearisation

# Batches, and sizes of images where they are not those of `benchmarks.networks.products`.
BATCHES = {"LeNet": (4096, 28), "LeNet of 1998": (2048, 28), "U-Net": (32, 64), "ResNet-18": (256, 32)}


def measured(network: Linearisation, call: str, x: Tensor, vectors: Tensor) -> tuple[float, int, Tensor]:
    """Seconds, faults and the product."""
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    product = getattr(network, call)(x, vectors, *([torch.tanh] if call == "ggn" else []))
    seconds = time.process_time() - start
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--vectors", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("| network | images | K | product | pieces | s | whole, s | ratio | pages | whole, pages |\n|" + "---|" * 10)
    for name in args.networks:
        module, x = NETWORKS[name]()
        num, side = BATCHES[name]
        x = torch.randn(num, x.shape[1], side, side)
        network = Linearisation(module.eval())
        kept = network.batching.kept_bytes
        for K in args.vectors:
            v, u = torch.randn(K, network.num_parameters), torch.randn(K, *network(x).shape)
            for call, vectors in (("jvp", v), ("vjp", u), ("ggn", v)):
                times, pages, products = {}, {}, {}
                for _ in range(args.repeats):
                    for most in (kept, math.inf):
                        network.batching.kept_bytes = most
                        seconds, pages[most], products[most] = measured(network, call, x, vectors)
                        times[most] = min(times.get(most, math.inf), seconds)
                network.batching.kept_bytes = kept
                check(products[kept], products[math.inf], "the product of pieces")
                pieces = len(network._pieces(x, 1 if call == "vjp" else K))
                a, b = times[kept], times[math.inf]
                of_product = f"| {name} | {num} | {K} | {call} | {pieces} | {a:.2f} | {b:.2f} | {a / b:.2f} "
                print(f"{of_product}| {pages[kept]:,} | {pages[math.inf]:,} |", flush=True)


if __name__ == "__main__":
    main()
