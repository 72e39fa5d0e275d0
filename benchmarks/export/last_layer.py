"""What error bars of a last layer cost in ONNX: `python -m benchmarks.export.last_layer [repetitions]`.

One image goes through the network alone, and through the network with error bars, in onnxruntime on one thread. Calls
of the two alternate, and the least time of many repetitions counts, which other programs disturb least.
"""

import sys
import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from torch import nn
from torchvision.models import resnet18

from laplace_sampling import LinearisedLaplace, save_onnx

EXPORTS = {
    "probabilities, 64 samples": (64, ("probs",)),
    "probabilities, 16 samples": (16, ("probs",)),
    "probabilities, standard deviations and `epistemic`, 64 samples": (64, ("probs", "stddev", "epistemic")),
}


def lenet() -> nn.Module:
    """LeNet-5 for images of 28 × 28 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


def small_resnet() -> nn.Module:
    """A ResNet-18 for small images of one channel."""
    net = resnet18(num_classes=10)
    net.conv1, net.maxpool = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.Identity()  # pyright: ignore
    return net


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def least_times(sessions: list[onnxruntime.InferenceSession], x: torch.Tensor, repetitions: int) -> list[float]:
    least = [float("inf")] * len(sessions)
    for _ in range(repetitions):
        for number, run in enumerate(sessions):
            feed = {run.get_inputs()[0].name: x.numpy()}
            begin = time.perf_counter()
            run.run(None, feed)
            least[number] = min(least[number], time.perf_counter() - begin)
    return least


def main(repetitions: int = 3000, folder: Path | None = None) -> None:
    folder = folder or Path(tempfile.mkdtemp())
    for name, make, share in (("LeNet", lenet, 1.0), ("ResNet-18", small_resnet, 0.1)):
        torch.manual_seed(0)
        net = make().eval()
        x, y = torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
        la = LinearisedLaplace(net, "classification", parameters="last_layer").fit([(x, y)], progress=False)
        plain = folder / "plain.onnx"
        torch.onnx.export(net, (x[:1],), plain, dynamo=True, verbose=False, external_data=False)
        sessions = [session(plain)]
        for number, (num_samples, outputs) in enumerate(EXPORTS.values()):
            path = folder / f"{number}.onnx"
            save_onnx(la.to_module(num_samples, outputs), path, x[:2])
            sessions.append(session(path))
        times = least_times(sessions, x[:1], max(1, int(share * repetitions)))
        print(f"{name}, one image: the network alone {1e6 * times[0]:.0f} µs")
        for label, seconds in zip(EXPORTS, times[1:], strict=True):
            print(f"  with {label}: {1e6 * seconds:.0f} µs, {seconds / times[0]:.2f} of it", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))  # pyright: ignore
