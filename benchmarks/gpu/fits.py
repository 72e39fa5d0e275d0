"""Classifications of images by the fits that a user would ask for, after regressions beside the same fit on the CPU."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.data.image_sets import labelled_images, made_up, pixels, standardised
from benchmarks.data.tasks import Part
from benchmarks.gpu import regressions
from benchmarks.gpu.networks import NETWORKS, made, num_weights, trained
from benchmarks.gpu.regressions import told_by
from benchmarks.gpu.report import Cells, Job, Setup, number, words
from laplace_sampling import LinearisedLaplace

# Seconds that a fit should take at most, by which its budget is set, and after which a job is stopped.
FIT, MOST = 30.0, 75.0
# Images that belong to no class, at most; test images of networks whose epoch takes many seconds, at least.
FEW, FEWEST = 2000, 500
# Settings of `LinearisedLaplace`, and whether there are validation data.
FITS: dict[str, tuple[dict[str, Any], bool]] = {
    "default": ({}, False),
    "last_layer": ({"parameters": "last_layer"}, False),
    "kfac": ({"method": "kfac"}, False),
    "val_loader": ({}, True),
    "last_layer, val_loader": ({"parameters": "last_layer"}, True),
}


@dataclass(frozen=True, eq=False)
class Images:
    """All on the CPU; `strange` are such as belong to no class."""

    train: Part
    validation: Part
    test: Part
    strange: dict[str, Tensor]
    batch: int = 512

    @classmethod
    def of(cls, setup: Setup) -> "Images":
        if setup.data is None or setup.quick:
            images = made_up(200, 60) if setup.quick else made_up(50_000, 10_000)
            return cls(images.train, images.validation, images.test, {"made up": images.others["made up"][:FEW]})
        train, test = labelled_images(setup.data, "Fashion-MNIST")
        validation, train = Part(train.x[50_000:], train.y[50_000:]), Part(train.x[:50_000], train.y[:50_000])
        files = {"MNIST": "mnist.npz", "letters": "not-mnist"}
        there = [name for name, file in files.items() if (setup.data / file).exists()]
        shares = {name: pixels(setup.data, name, FEW // len(there)) for name in there}
        return cls(train, validation, test, {name: standardised(x, "Fashion-MNIST") for name, x in shares.items()})

    def loader(self, part: Part) -> DataLoader:
        return DataLoader(TensorDataset(part.x, part.y), self.batch)


def jobs(setup: Setup) -> Iterator[Job]:
    yield from regressions.jobs(setup)
    images = Images.of(setup)
    for name in setup.networks:
        full, small, epochs = NETWORKS[name]
        subject = Subject(made(small if setup.quick else full, setup.device), setup, images)
        labels = {"network": name, "weights": num_weights(subject.network)}
        yield Job(partial(subject.train, 1 if setup.quick else epochs), {**labels, "run": "training"}, MOST)
        for fit in FITS:
            yield Job(partial(subject.fit, fit), {**labels, "run": fit}, MOST)


@dataclass(eq=False)
class Subject:
    """A network, the seconds of an epoch once it is trained, and its fits."""

    network: nn.Module
    setup: Setup
    images: Images
    epoch: float = field(default=0.0, init=False)

    def train(self, epochs: int) -> Cells:
        setup, images = self.setup, self.images
        took = setup.seconds(lambda: trained(self.network, images.train, epochs))
        there = [(x.to(setup.device), y.to(setup.device)) for x, y in images.loader(images.train)]
        self._gradients(there[:3])
        from_memory = setup.seconds(lambda: self._gradients(there))
        self.epoch = setup.seconds(lambda: self._gradients(images.loader(images.train)))
        outputs = self._outputs(images.test)
        return {
            "outcome": f"by {epochs} times all data", "seconds": number(took),
            "log loss, network → error bars": number(float(F.cross_entropy(outputs, images.test.y)), 4),
            "accuracy": f"{float((outputs.argmax(-1) == images.test.y).double().mean()):.4f}",
            "remarks": f"one epoch of gradients in float32 takes {number(self.epoch)} s, {number(from_memory)} s with "
            "the data on the device",
        }  # fmt: skip

    def _gradients(self, batches: Iterable[Any]) -> None:
        """What training computes, in evaluation mode, as fits do."""
        weights = list(self.network.parameters())
        for x, y in batches:
            x, y = x.to(self.setup.device), y.to(self.setup.device)
            torch.autograd.grad(F.cross_entropy(self.network(x), y), weights)

    @torch.no_grad()
    def _outputs(self, part: Part) -> Tensor:
        parts = [self.network(x.to(self.setup.device)) for x in part.x.split(self.images.batch)]
        return torch.cat(parts).double().cpu()

    def fit(self, name: str) -> Cells:
        if not self.epoch:
            raise RuntimeError("the network was not trained")
        (settings, validated), setup, images = FITS[name], self.setup, self.images
        budget = 20 if setup.quick else int(min(20, max(5, FIT / self.epoch)))
        # A prediction takes many passes: that of all images would take longer than the fit.
        num = int(min(len(images.test.y), max(FEWEST, len(images.test.y) / self.epoch**2)))
        test = Part(images.test.x[:num], images.test.y[:num])
        loader, val_loader = images.loader(images.train), images.loader(images.validation) if validated else None
        la = LinearisedLaplace(self.network, "classification", **settings)
        setup.reset_peak()
        took = setup.seconds(lambda: la.fit_hyperparameters(loader, val_loader, budget=budget, progress=False))
        peak = setup.peak()
        ones = [setup.seconds(lambda: la.predict(test.x[:1])) for _ in range(4 if setup.quick else 20)]
        found = predicted(la, test.x, setup, images.batch, test.y)
        strange = {n: predicted(la, x[:num], setup, images.batch)["epistemic"] for n, x in images.strange.items()}
        losses = float(F.cross_entropy(self._outputs(test), test.y)), -float(found["log_prob"].double().mean())
        method, counted = told_by(la)
        return {
            "outcome": method, "seconds": number(took), "epochs or gradients": number(took / self.epoch),
            "peak, GB": peak, "log loss, network → error bars": " → ".join(number(loss, 4) for loss in losses),
            "accuracy": f"{float((found['label'] == test.y).double().mean()):.4f}",
            "AUROC": ", ".join(f"{n} {auroc(found['epistemic'], scores):.3f}" for n, scores in strange.items()),
            "predict 10,000, s": number(float(found["seconds"].sum()) * 10_000 / len(test.y)),
            "one image, ms": number(1e3 * statistics.median(ones[1:])),
            "remarks": words(
                f"{counted} epochs of operations",
                f"budget of {budget} epochs" if budget < 20 else "",
                f"{len(test.y):,} test images" if len(test.y) < 10_000 else "",
                f"the first prediction took {number(1e3 * ones[0])} ms",
                "" if la.converged_ else "not converged",
            ),
        }  # fmt: skip


def predicted(la: LinearisedLaplace, x: Tensor, setup: Setup, batch: int, y: Tensor | None = None) -> dict[str, Tensor]:
    """On the CPU: labels and scores of all images, log-probabilities of their labels, and seconds of each batch."""
    found: dict[str, list[Tensor]] = {"seconds": [], "label": [], "epistemic": [], "log_prob": []}
    for rows in torch.arange(len(x)).split(batch):
        kept: list[Any] = []
        seconds = setup.seconds(lambda rows=rows, kept=kept: kept.append(la.predict(x[rows])))
        found["seconds"].append(torch.tensor([seconds]))
        found["label"].append(kept[0].probs.argmax(-1).cpu())
        found["epistemic"].append(kept[0].epistemic.cpu())
        found["log_prob"].append(torch.empty(0) if y is None else kept[0].log_prob(y[rows].to(setup.device)).cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}


def auroc(inside: Tensor, outside: Tensor) -> float:
    """How well a score that is higher outside tells both from each other."""
    scores = torch.cat([inside, outside])
    return float(roc_auc_score((torch.arange(len(scores)) >= len(inside)).numpy(), scores.double().numpy()))
