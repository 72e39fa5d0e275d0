"""`python -m benchmarks.price [--data DIR] [--parts products fit prediction file] [--quick]`.

What error bars cost, each figure beside its peer in one run on one thread: GGN products beside curvlinops, fits and
predictions beside laplace-torch, in units of the same network's own work, and the file of a posterior beside the size
of the weights. `DIR` has `images/fashion-mnist.npz`; without it images are made up.
"""

import argparse
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.comparison import laplace_torch
from benchmarks.comparison.methods import METHODS, missing
from benchmarks.comparison.networks import build
from benchmarks.comparison.training import Recipe, outputs_of, train
from benchmarks.data.image_sets import labelled_images, made_up
from benchmarks.data.tasks import Data, Part
from benchmarks.gpu.contenders import check, contenders
from laplace_sampling import LinearisedLaplace

# The last two for products only.
NETWORKS = ("LeNet of 1998", "CNN with batch norm", "ResNet", "ViT")
OF_PRODUCTS = NETWORKS[2:]
# Training, validation and test images; vectors and images of a product, and vectors that plain `vmap` takes together.
DATA, HELD_OUT, VECTORS, PRODUCT, CHUNK = 10_000, 2000, (1, 8, 64), 64, 16
BATCH, EPOCHS = 100, 10
# Images of a long prediction, and of the training epoch beside it.
MANY, PART = 1000, 5000
SETTINGS: dict[str, dict[str, Any]] = {
    "last layer": {"parameters": "last_layer"},
    "Kronecker factors": {"method": "kfac"},
    "all weights, default": {},
}
# Seconds of a timing at least: what takes less is repeated.
LEAST = 0.05

Row = dict[str, str]
COLUMNS = ("network", "what", "ours", "peer", "in units of", "remarks")


def turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least seconds of the processor that each takes, as they run one after the other, so many times."""
    least: dict[str, float] = {}
    for _ in range(repeats):
        for name, call in calls.items():
            started, runs, seconds = time.process_time(), 0, 0.0
            while seconds < LEAST:
                call()
                runs, seconds = runs + 1, time.process_time() - started
            least[name] = min(seconds / runs, least.get(name, math.inf))
    return least


def once(call: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the seconds of the processor that it took."""
    started = time.process_time()
    result = call()
    return result, time.process_time() - started


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network, its data, and the fits that several parts share."""

    name: str
    network: nn.Module
    data: Data
    repeats: int

    @classmethod
    def of(cls, name: str, data: Data, epochs: int, repeats: int) -> "Subject":
        network = build(name, data.train.x.shape[1:], 10)
        if epochs:
            steps = max(1, epochs * len(data.train.y) // BATCH)
            recipe = Recipe(steps=steps, step_size=1e-3, batch_size=BATCH)
            network.load_state_dict(train(network, "classification", data, recipe, 0)["end"])
        return cls(name, network.eval(), data, repeats)

    @cached_property
    def epoch(self) -> float:
        """Seconds of an epoch of gradients, by the best of several."""
        weights = list(self.network.parameters())

        def gradients() -> None:
            for x, y in self.data.train.loader(BATCH):
                torch.autograd.grad(F.cross_entropy(self.network(x), y), weights)

        gradients()
        return turns({"epoch": gradients}, self.repeats)["epoch"]

    @cached_property
    def fits(self) -> dict[str, tuple[LinearisedLaplace, float]]:
        """Our fits and the seconds that they took."""
        found = {}
        for name, settings in SETTINGS.items():
            la = LinearisedLaplace(self.network, "classification", **settings)
            found[name] = once(lambda la=la: la.fit_hyperparameters(self.data.train.loader(BATCH), progress=False))
        return found

    @cached_property
    def peer(self) -> tuple[Any, float] | None:
        """laplace-torch's last layer with Kronecker factors, tuned by its evidence, if it is installed."""
        if missing(METHODS["laplace-torch, last layer, KFAC"]) is not None:
            return None

        def fitted() -> Any:
            la, _, _ = laplace_torch.build(self.network, "classification", "last_layer", "kron")
            la.fit(self.data.train.loader(BATCH))
            la.optimize_prior_precision()
            return la

        return once(fitted)

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return sum(p.numel() * p.element_size() for p in self.network.parameters())


def products(subject: Subject) -> Iterator[Row]:
    """GGN products of several vectors on one batch, by gradients of it."""
    x = subject.data.train.x[:PRODUCT]
    torch.backends.mha.set_fastpath_enabled(False)
    for vectors in VECTORS:
        # Else neither `vmap` nor curvlinops has products of attention.
        with sdpa_kernel(SDPBackend.MATH):
            calls = contenders(subject.network, x, vectors, min(CHUNK, vectors))
            expected = calls["ours"]()
            for way in ("vmap", "curvlinops"):
                if way in calls:
                    check(calls[way](), expected, way)
            least = turns(calls, subject.repeats)
        unit = least.pop("gradient")
        beside = ", ".join(f"{way} {seconds / unit:.2f}" for way, seconds in least.items() if way != "ours")
        yield {
            "what": f"GGN product, {vectors} vector{'s' if vectors > 1 else ''}", "ours": f"{least['ours'] / unit:.2f}",
            "peer": beside, "in units of": "a gradient", "remarks": f"arithmetic alone {(1 + 4 * vectors) / 3:.1f}",
        }  # fmt: skip


def fit(subject: Subject) -> Iterator[Row]:
    """Fits with their hyperparameters, by epochs of training; and the log loss on test data."""
    x, y = subject.data.test.x, subject.data.test.y
    alone = float(F.cross_entropy(outputs_of(subject.network, x), y))
    for name, (la, seconds) in subject.fits.items():
        parts: list[Any] = [la.predict(part).log_prob(labels) for part, labels in subject.data.test.loader(200)]
        loss = -float(torch.cat(parts).double().mean())
        theirs, remarks = "", f"counted {la.diagnose().epochs:.2f}; log loss {loss:.4f}, network {alone:.4f}"
        if name == "last layer" and subject.peer is not None:
            theirs = f"laplace-torch {subject.peer[1] / subject.epoch:.2f}"
            probs = torch.cat([peer_probs(subject.peer[0], part) for part in x.split(200)])
            remarks += f", laplace-torch {float(F.nll_loss(probs.log(), y)):.4f}"
        yield {
            "what": f"fit, {name}", "ours": f"{seconds / subject.epoch:.2f}", "peer": theirs,
            "in units of": "an epoch of training", "remarks": remarks,
        }  # fmt: skip


def peer_probs(la: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return la(x).detach().double().clamp_min(1e-30)


def prediction(subject: Subject) -> Iterator[Row]:
    """Probabilities of one image and of many, by the time of the network's output without a gradient."""
    for name, (la, _) in subject.fits.items():
        for num in (1, 256):
            x = subject.data.test.x[:num]
            calls: dict[str, Callable[[], object]] = {
                "network": lambda x=x: outputs_of(subject.network, x),
                "ours": lambda x=x, la=la: la.predict(x).probs,  # pyright: ignore[reportAttributeAccessIssue]
            }
            if name == "last layer" and subject.peer is not None:
                calls["laplace-torch"] = lambda x=x: peer_probs(subject.peer[0], x)  # pyright: ignore
            turns(calls, 1)
            least = turns(calls, subject.repeats)
            unit, images = least["network"], "one image" if num == 1 else f"{num} images"
            yield {
                "what": f"prediction of {images}, {name}", "ours": f"{least['ours'] / unit:.1f}",
                "peer": "" if len(least) < 3 else f"laplace-torch {least['laplace-torch'] / unit:.1f}",
                "in units of": "the network's output", "remarks": f"the network takes {1000 * unit:.2f} ms",
            }  # fmt: skip
        x = subject.data.test.x[:MANY]
        least = turns({"ours": lambda x=x, la=la: la.predict(x).probs}, subject.repeats)  # pyright: ignore
        epoch = subject.epoch * PART / len(subject.data.train.y)
        yield {
            "what": f"prediction of {len(x)} images, {name}", "ours": f"{least['ours'] / epoch:.2f}", "peer": "",
            "in units of": f"an epoch of {PART} images", "remarks": "",
        }  # fmt: skip


def file(subject: Subject) -> Iterator[Row]:
    """The file of a posterior, by the bytes of the weights; and the time of saving and loading."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior"
        for name, (la, _) in subject.fits.items():
            _, saving = once(lambda la=la: la.save(path))
            size = path.stat().st_size / subject.size
            _, loading = once(lambda: LinearisedLaplace.load(path, subject.network))
            theirs = ""
            if name == "last layer" and subject.peer is not None:
                torch.save(subject.peer[0].state_dict(), path)
                theirs = f"laplace-torch {path.stat().st_size / subject.size:.2f}"
            yield {
                "what": f"file, {name}", "ours": f"{size:.2f}", "peer": theirs, "in units of": "the weights",
                "remarks": f"{saving:.2f} s to save, {loading:.2f} s to load",
            }  # fmt: skip


PARTS: dict[str, Callable[[Subject], Iterator[Row]]] = {
    "products": products,
    "fit": fit,
    "prediction": prediction,
    "file": file,
}


def data_of(folder: Path | None, num: int, held_out: int) -> Data:
    """Fashion-MNIST from a folder, or images that are made up."""
    if folder is None:
        return made_up(num, held_out)
    train, test = labelled_images(folder / "images", "Fashion-MNIST")
    validation = Part(train.x[-held_out:], train.y[-held_out:])
    return Data(Part(train.x[:num], train.y[:num]), validation, Part(test.x[:held_out], test.y[:held_out]))


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    top = argparse.ArgumentParser(prog="python -m benchmarks.price", description=__doc__)
    top.add_argument("--data", type=Path, metavar="DIR", help="a folder with `images`")
    top.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    top.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    top.add_argument("--quick", action="store_true", help="few data, everything once: shows that all parts run")
    options = top.parse_args(arguments)
    torch.set_num_threads(1)
    data = data_of(options.data, *((300, 100) if options.quick else (DATA, HELD_OUT)))
    sys.stdout.write(f"{line(COLUMNS)}\n{line(['---'] * len(COLUMNS))}\n")
    for name in options.networks:
        parts = [part for part in options.parts if part == "products" or name not in OF_PRODUCTS]
        epochs = 0 if parts == ["products"] else 1 if options.quick else EPOCHS
        subject = Subject.of(name, data, epochs, 1 if options.quick else 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part in parts:
                for row in PARTS[part](subject):
                    print(line([str((row | {"network": name})[key]) for key in COLUMNS]), flush=True)


if __name__ == "__main__":
    main()
