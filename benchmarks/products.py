"""Loop or vmap for Jacobian products: milliseconds of K products on one batch, both ways, and their ratio.

`python benchmarks/products.py [--device cuda]`. The choice made from it stands in `laplace_sampling/linearise.py`.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap

from laplace_sampling.linearise import Linearisation


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    """A network and one batch of inputs each."""
    mlp = nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 1))
    cnn = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 14, 3, stride=2, padding=1), nn.BatchNorm2d(14), nn.ReLU(),
        nn.Conv2d(14, 14, 3, stride=2, padding=1), nn.BatchNorm2d(14), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(14, 10),
    )  # fmt: skip
    lenet = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return {
        "MLP, batch 100": (mlp, torch.randn(100, 10)),
        "digits CNN, batch 100": (cnn, torch.randn(100, 1, 8, 8)),
        "digits CNN, batch 1400": (cnn, torch.randn(1400, 1, 8, 8)),
        "LeNet 28x28, batch 100": (lenet, torch.randn(100, 1, 28, 28)),
    }


def milliseconds(run, device: str, repeats: int = 3) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[1:])


def both_ways(network: Linearisation, x: Tensor, v: Tensor, u: Tensor, chunk: int) -> dict[str, tuple]:
    """`{product: (loop, vmap)}`."""
    weights = network._selected()
    tangents = network.unflatten(v)

    def push(tangent):
        return jvp(lambda w: functional_call(network.module, w, (x,)), (weights,), (tangent,))[1]

    def pull(step: int):
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        out = functional_call(network.module, leaves, (x,))
        for part in u.reshape(len(u), *out.shape).split(step):
            cotangent = part if step > 1 else part[0]
            torch.autograd.grad(out, list(leaves.values()), cotangent, retain_graph=True, is_grads_batched=step > 1)

    return {
        "jvp": (
            lambda: [push({name: t[k] for name, t in tangents.items()}) for k in range(len(v))],
            lambda: vmap(push, chunk_size=chunk)(tangents),
        ),
        "vjp": (lambda: pull(1), lambda: pull(chunk)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--chunk", type=int, default=16)
    args = parser.parse_args()
    name = torch.cuda.get_device_name() if args.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}, vmap chunks of {args.chunk}")
    print(f"{'network':<26}{'K':>4}{'product':>9}{'loop ms':>10}{'vmap ms':>10}{'vmap/loop':>11}")
    for label, (module, x) in networks().items():
        module, x = module.eval().to(args.device), x.to(args.device)
        network = Linearisation(module)
        for K in (1, 8, 64):
            v = torch.randn(K, network.num_parameters, device=args.device)
            u = torch.randn(K, *network(x).shape, device=args.device)
            for product, ways in both_ways(network, x, v, u, args.chunk).items():
                loop, batched = (milliseconds(way, args.device) for way in ways)
                print(f"{label:<26}{K:>4}{product:>9}{loop:>10.2f}{batched:>10.2f}{batched / loop:>11.2f}", flush=True)


if __name__ == "__main__":
    main()
