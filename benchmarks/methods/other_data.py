"""Scores of predictions, as detectors of images that are unlike the training images, and of errors.

Networks of the price list for MNIST and Fashion-MNIST, 1,000 and 10,000 images, all weights and the last layer; areas
under the ROC curve of test images against those of the other set, letters, and photographs of CIFAR-10 in grey; and of
wrong predictions among test images.

Run: python -m benchmarks.methods.other_data <folder of images> <folder for networks> [--seeds 0 1]
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison.metrics import auroc
from benchmarks.data.image_sets import labelled_images, pixels, standardised
from benchmarks.data.tasks import Part
from benchmarks.price.networks import CNN, LENET
from benchmarks.price.scores import auroc_of
from benchmarks.price.training import trained
from laplace_sampling import LinearisedLaplace

__all__ = ["SCORES", "areas", "scores"]

SCORES = ("epistemic", "mutual information", "entropy", "variance of the logits")
BATCH, TEST, OTHER, SAMPLES = 100, 800, 400, 32
EPOCHS = {1000: 15, 10_000: 8}


def scores(la: LinearisedLaplace, x: Tensor) -> dict[str, Tensor]:
    """All scores of some inputs, and the predicted classes."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for part in x.split(BATCH):
        pred: Any = la.predict(part)
        values = pred.epistemic, pred.mutual_information, pred.entropy, pred.variance.sum(-1)
        for name, value in zip((*SCORES, "class"), (*values, pred.logits.argmax(-1)), strict=True):
            found[name].append(value.detach())
    return {name: torch.cat(parts) for name, parts in found.items()}


def areas(la: LinearisedLaplace, test: Part, others: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Of each score, the area for each other set, and for `"errors"`."""
    inside, wrong = scores(la, test.x), "errors"
    found: dict[str, dict[str, float]] = {name: {} for name in SCORES}
    for other, x in others.items():
        outside = scores(la, x)
        for name in SCORES:
            found[name][other] = auroc_of(inside[name], outside[name])
    for name in SCORES:
        found[name][wrong] = auroc(inside[name].double(), inside["class"] != test.y)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("networks", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for data, unlike in (("MNIST", "Fashion-MNIST"), ("Fashion-MNIST", "MNIST")):
        train, test = labelled_images(options.images, data)
        test = Part(test.x[:TEST], test.y[:TEST])
        names = {"the other set": unlike, "letters": "letters", "CIFAR-10": "CIFAR-10"}
        others = {key: standardised(pixels(options.images, name, OTHER), data) for key, name in names.items()}
        for num, epochs in EPOCHS.items():
            part = Part(train.x[:num], train.y[:num])
            for network, seed in ((name, seed) for name in (CNN, LENET) for seed in options.seeds):
                model = trained(network, data, part, seed, cache=options.networks, epochs=epochs)
                for which, parameters in (("all weights", None), ("last layer", "last_layer")):
                    la = LinearisedLaplace(model, "classification", parameters=parameters, num_samples=SAMPLES)
                    la.fit_hyperparameters(part.loader(), progress=False)
                    for score, found in areas(la, test, others).items():
                        text = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
                        print(f"{data}, {num}, {network}, {which}, seed {seed}: {score}: {text}", flush=True)
                        for key, value in found.items():
                            rows[f"{data}, {num:,}", score, key].append(value)
    print(_table(rows))


def _table(rows: dict[tuple[str, str, str], list[float]]) -> str:
    """Means over networks and seeds for each score; and over all, with the smallest."""
    sets, kinds = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 2))
    other = [kind for kind in kinds if kind != "errors"]
    lines = ["| score | " + " | ".join(sets) + " | all | smallest | " + " | ".join(kinds) + " |"]
    lines.append("|---" * (len(sets) + len(kinds) + 3) + "|")
    for score in SCORES:
        of_others = [v for (_, s, kind), values in rows.items() if s == score and kind in other for v in values]
        of_sets = [fmean(v for kind in other for v in rows[data, score, kind]) for data in sets]
        of_kinds = [fmean(v for data in sets for v in rows[data, score, kind]) for kind in kinds]
        numbers = [*of_sets, fmean(of_others), min(of_others), *of_kinds]
        lines.append(f"| {score} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
