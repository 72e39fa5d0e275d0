"""GGN products of `K` vectors beside `vmap` and curvlinops, in units of one gradient of the same batch."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.contenders import check, contenders, least_seconds
from benchmarks.gpu.networks import NETWORKS, made, num_weights, resnet18
from benchmarks.gpu.report import Cells, FailedError, Job, Setup, number, words

PEERS = ("vmap", "curvlinops")
CHUNK, MOST = 16, 45.0
# Seconds of one product above which it is timed once, and not three times.
LONG = 1.0


def resnet50() -> nn.Module:
    import torchvision

    return torchvision.models.resnet50()


def coloured_resnet18() -> nn.Module:
    """For small images of three channels."""
    network = resnet18()
    network.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)  # pyright: ignore
    return network


# A network, the shape of an input, and how many go through it at once, with 64 vectors fewer.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "LeNet": (NETWORKS["LeNet"][0], (1, 28, 28), 512, 512),
    "ViT": (NETWORKS["ViT"][0], (1, 28, 28), 128, 128),
    "ResNet-18": (coloured_resnet18, (3, 32, 32), 128, 128),
    "ResNet-50": (resnet50, (3, 224, 224), 16, 4),
}


def jobs(setup: Setup) -> Iterator[Job]:
    cases, vectors = CASES, (1, 8, 64)
    if setup.quick:
        cases, vectors = {name: (NETWORKS[name][1], (1, 28, 28), 4, 4) for name in ("LeNet", "ViT")}, (1, 2)
    for name, (build, shape, most, few) in cases.items():
        network = made(build, setup.device)
        for K in vectors:
            x = torch.randn(few if K == 64 else most, *shape, device=setup.device)
            labels = {"network": name, "weights": num_weights(network), "run": f"K = {K}, {len(x)} data"}
            yield Job(partial(products, setup, network, x, K), labels, MOST)


def products(setup: Setup, network: nn.Module, x: Tensor, K: int) -> Cells:
    remarks, wrong, peaks = [], [], {}
    torch.backends.mha.set_fastpath_enabled(False)
    # Else neither `vmap` nor curvlinops has products of attention.
    with sdpa_kernel(SDPBackend.MATH):
        calls = contenders(network, x, K, min(CHUNK, K))
        expected, peaks["ours"] = _first(calls["ours"], setup)
        for name in [name for name in PEERS if name in calls]:
            try:
                result, peaks[name] = _first(calls[name], setup)
            except Exception as error:  # too little memory, or an operation without a derivative
                del calls[name]
                remarks.append(f"{name} – ({type(error).__name__})")
                continue
            try:
                check(result, expected, name)
            except ValueError as error:
                wrong.append(str(error))
            del result
        del expected
        repeats = 1 if setup.seconds(calls["ours"]) > LONG else 3
        seconds = least_seconds(calls, repeats, setup.device)
    unit, ours = seconds.pop("gradient"), seconds["ours"]
    remarks += [f"{name} {_beside(seconds[name] / unit, peaks[name])}" for name in PEERS if name in seconds]
    cells = {
        "outcome": f"{len(x) * K / ours:,.0f} vector-images a second", "seconds": number(ours),
        "epochs or gradients": f"{ours / unit:.2f}; floor {(1 + 4 * K) / 3:.1f}", "peak, GB": peaks["ours"],
        "remarks": words(f"a gradient takes {number(1e3 * unit)} ms", *remarks),
    }  # fmt: skip
    if wrong:
        raise FailedError(", ".join(wrong), cells)
    return cells


def _first(call: Callable[[], Tensor], setup: Setup) -> tuple[Tensor, str]:
    """A result, and the most memory on the way to it."""
    setup.reset_peak()
    result = call()
    setup.synchronise()
    return result, setup.peak()


def _beside(gradients: float, peak: str) -> str:
    return f"{gradients:.2f}" if peak == "–" else f"{gradients:.2f} in {peak} GB"
