"""Time of one GGN product of `K` vectors, against one gradient, curvlinops, a loop and `vmap`, all in one run.

`python -m benchmarks.networks.products [--networks LeNet] [--vectors 1 8 64] [--repeats 9] [--data 64] [--compile]
[--ways ours curvlinops] [--device cuda]` runs the contenders in turns. It prints the least processor time of one
thread, or on a GPU the least time until the product is done, in units of a gradient of the same network and batch. The
floor is the arithmetic, `(1 + 4K)/3` gradients: one forward pass, and two passes for each tangent and for each
pullback.

`--compile` adds the compiled product, the seconds that compiling takes, and the JVP of a trace that is kept for a batch
which comes again (`torch.func.linearize`). That JVP stores what a forward pass computes, and then only pushes tangents.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp, linearize, vjp, vmap

from benchmarks.networks.torch_layers import UNet
from laplace_sampling.networks.derivative_rules import forward_mode_kernels
from laplace_sampling.networks.linearisation import Linearisation

WAYS = ["jvp", "vjp", "ours", "curvlinops", "loop", "vmap", "compiled", "trace"]
# Limit for the largest tensor of a forward pass with all vectors together; hundreds of others are as large.
MOST_BYTES = 10**8


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(10, 50), nn.Tanh(), nn.Linear(50, 10)), torch.randn(100, 10)


def lenet() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    return net, torch.randn(64, 1, 28, 28)


def lenet_of_1998() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    return net, torch.randn(64, 1, 28, 28)


def resnet18() -> tuple[nn.Module, Tensor]:
    import torchvision

    net = torchvision.models.resnet18(num_classes=10)
    net.conv1, net.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()  # pyright: ignore
    return net, torch.randn(8, 3, 32, 32)


def vit_small() -> tuple[nn.Module, Tensor]:
    import torchvision

    return torchvision.models.VisionTransformer(32, 4, 6, 6, 384, 768, num_classes=10), torch.randn(4, 3, 32, 32)


def unet() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(UNet(16), nn.AvgPool2d(4), nn.Flatten()), torch.randn(8, 3, 32, 32)


NETWORKS = {
    "MLP": mlp, "LeNet": lenet, "LeNet of 1998": lenet_of_1998, "ResNet-18": resnet18, "ViT-small": vit_small,
    "U-Net": unet,
}  # fmt: skip


def contenders(
    module: nn.Module, x: Tensor, K: int, chunk: int, *, compile: bool = False
) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute the product of the same `K` vectors, and one gradient."""
    network = Linearisation(module)
    weights, f = network.shell.random(), network(x)
    labels = torch.randint(f.shape[1], (len(x),), device=x.device)
    p = f.softmax(-1)
    v = torch.randn(K, network.num_parameters, device=x.device)
    tangents = network.unflatten(v)

    def curvature(u: Tensor) -> Tensor:
        return p * u - p * (p * u).sum(-1, keepdim=True)

    def one(tangent: dict[str, Tensor]) -> Tensor:
        def outputs(w: dict[str, Tensor]) -> Tensor:
            return functional_call(module, w, (x,))

        u = curvature(jvp(outputs, (weights,), (tangent,))[1])
        return torch.cat([g.reshape(-1) for g in vjp(outputs, weights)[1](u)[0].values()])

    def gradient() -> Tensor:
        return torch.autograd.grad(F.cross_entropy(module(x), labels), list(module.parameters()))[0]

    u = curvature(network.jvp(x, v))
    products = {
        "gradient": gradient,
        "jvp": lambda: network.jvp(x, v),
        "vjp": lambda: network.vjp(x, u),
        "ours": lambda: network.ggn(x, v, curvature),
        "loop": torch.no_grad()(lambda: torch.stack([one({n: t[k] for n, t in tangents.items()}) for k in range(K)])),
        "vmap": torch.no_grad()(lambda: vmap(one, chunk_size=chunk)(tangents)),
    }
    if K * network.batching.largest_tensor(network.shell.forward, x) < MOST_BYTES:  # else memory is short
        products["vmap of all"] = torch.no_grad()(lambda: vmap(one)(tangents))
    if compile:
        compiled = Linearisation(module, compile=True)

        def outputs(w: dict[str, Tensor]) -> Tensor:
            return functional_call(module, w, (x,))

        _, push = linearize(outputs, weights)
        products["compiled"] = lambda: compiled.ggn(x, v, curvature)
        products["trace"] = torch.no_grad()(lambda: vmap(push, chunk_size=chunk)(tangents))
    try:
        from curvlinops import GGNLinearOperator  # pyright: ignore[reportMissingImports]
    except ImportError:
        return products
    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = GGNLinearOperator(
        module,
        loss,
        list(module.parameters()),
        [(x, labels)],
        check_deterministic=False,  # pyright: ignore
    )
    columns = v.T.contiguous() if K > 1 else v[0]
    return {**products, "curvlinops": lambda: (operator @ columns).reshape(-1, K).T}  # pyright: ignore


def least_seconds(products: dict[str, Callable[[], Tensor]], repeats: int, device: torch.device) -> dict[str, float]:
    def now() -> float:
        if device.type == "cpu":
            return time.process_time()
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    times = {name: [] for name in products}
    for _ in range(repeats + 1):
        for name, call in products.items():
            started = now()
            call()
            times[name].append(now() - started)
    return {name: min(of_one[1:]) for name, of_one in times.items()}


def check(result: Tensor, expected: Tensor, way: str) -> None:
    """Raises an error if two products differ by more than rounding in float32 explains, also through flipped ReLUs."""
    off = float((result - expected).norm() / expected.norm())
    if not off < 2e-3:
        raise ValueError(f"{way} differs by {off:.2g} of its size")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--vectors", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--chunk", type=int, default=16)
    parser.add_argument("--data", type=int, help="in the batch; by default 100 of the MLP, 64 of LeNet, few of others")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="contenders beside `ours`, by default all")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with forward_mode_kernels(layers=False):  # else neither `vmap` nor curvlinops has products of attention
        compare(args)


def compare(args: argparse.Namespace) -> None:
    ways = [way for way in WAYS if args.compile or way not in ("compiled", "trace")]
    ways = [way for way in ways if way in ("ours", *(args.ways or ways))]
    heads = ["network", "K", "gradient, ms", "floor", *ways, "curvlinops / ours"]
    heads += ["curvlinops / compiled", "compiling, s"] if args.compile else []
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for name in args.networks:
        module, x = NETWORKS[name]()
        x = x if args.data is None else torch.randn(args.data, *x.shape[1:])
        module, x = module.eval().to(args.device), x.to(args.device)
        for K in args.vectors:
            products = contenders(module, x, K, args.chunk, compile=args.compile)
            products = {
                way: call for way, call in products.items() if way.removesuffix(" of all") in ("gradient", *ways)
            }
            started = time.perf_counter()
            for _ in range(5 if "compiled" in products else 0):  # the fourth product is the first that is compiled
                products["compiled"]()
            compiling = time.perf_counter() - started
            results = {
                way: products[way]() for way in ("ours", "loop", "vmap", "curvlinops", "compiled") if way in products
            }
            for way, result in results.items():
                check(result, results["ours"], way)
            if {"trace", "jvp"} <= products.keys():
                check(products["trace"](), products["jvp"](), "trace")
            seconds = least_seconds(products, args.repeats, args.device)
            unit = seconds["gradient"]
            if "vmap of all" in seconds:
                seconds["vmap"] = min(seconds["vmap"], seconds["vmap of all"])
            cells = [f"{seconds.get(way, math.nan) / unit:.2f}" for way in ways]
            for way in ("ours", "compiled") if args.compile else ("ours",):
                cells.append(f"{seconds.get('curvlinops', math.nan) / seconds.get(way, math.nan):.2f}")
            cells += [f"{compiling:.0f}"] if args.compile else []
            print(f"| {name} | {K} | {1e3 * unit:.1f} | {(1 + 4 * K) / 3:.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
