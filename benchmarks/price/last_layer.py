"""The last layer beside laplace-torch's: time, log loss, and predictions of one and of 256 images."""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.data.tasks import Part
from benchmarks.price import laplace_torch as peer
from benchmarks.price.fits import Measured, epochs_row, measured, ours
from benchmarks.price.meter import turns
from benchmarks.price.networks import CNN, LENET
from benchmarks.price.scores import log_loss, log_losses, our_log_loss
from benchmarks.price.setup import Cells, Row, Setup, at_most
from laplace_sampling import LinearisedLaplace

__all__ = ["cells", "prediction_row"]

NETWORKS = (CNN, LENET)
DATA, EPOCHS, BESIDE, WORSE = 10_000, 2.0, 1.5, 0.002
# Bounds by the number of images, and how often a prediction is repeated.
PREDICTIONS = {1: (2.0, 50), 256: (1.3, 5)}


def cells(setup: Setup) -> Cells:
    return {name: partial(rows, setup, name) for name in NETWORKS}


def rows(setup: Setup, name: str) -> list[Row]:
    network, train = setup.network(name, DATA), setup.train(DATA)
    settings = {"parameters": "last_layer", "seed": setup.seed}
    fits = {"laplace-torch": partial(peer.last_layer, network, train)} if peer.installed() else {}
    cost = measured(network, train, ours(network, train, **settings), EPOCHS, setup, others=fits)
    found = [epochs_row(f"{name}, last layer: fit with tuning", cost, EPOCHS)]
    if cost.result is None:
        return found
    fitted = {
        "ours": cost.result,
        "ours, validation": ours(network, train, setup.validation, **settings)(),
        "laplace-torch": fits["laplace-torch"]() if fits else None,
    }
    found += [beside(name, cost), *loss_rows(setup, name, network, fitted)]
    for num, (bound, repeats) in PREDICTIONS.items():
        found.append(prediction_row(f"{name}, last layer", network, cost.result, setup.test, num, bound, repeats))
    return found


def beside(name: str, cost: Measured) -> Row:
    what = f"{name}, last layer: fit with tuning by laplace-torch's time"
    theirs = cost.others.get("laplace-torch")
    if theirs is None:
        return Row(what, f"≤ {BESIDE:g}", peer.MISSING)
    return at_most(what, cost.epochs / theirs, BESIDE, beside=f"laplace-torch {theirs:.2f} epochs", values=cost.others)


def loss_rows(setup: Setup, name: str, network: nn.Module, fitted: dict[str, Any]) -> list[Row]:
    test, theirs = setup.test, fitted["laplace-torch"]
    found = log_losses(network, test, setup.validation)
    found |= {key: our_log_loss(fitted[key], test) for key in ("ours", "ours, validation")}
    what = f"{name}, last layer: log loss"
    if theirs is None:
        text = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
        return [Row(what, "≤ laplace-torch's + .002", f"{text}; {peer.MISSING}", values=dict(found))]
    found["laplace-torch"] = log_loss(peer.log_probs(theirs, test.x), test.y)
    text = ", ".join(f"{key} {found[key]:.4f}" for key in ("network", "temperature", "laplace-torch"))
    bound = found["laplace-torch"] + WORSE
    return [
        at_most(what, found["ours"], bound, 4, text, found),
        at_most(f"{what}, with validation data", found["ours, validation"], bound, 4),
    ]


def prediction_row(
    what: str, network: nn.Module, la: LinearisedLaplace, test: Part, num: int, bound: float, repeats: int
) -> Row:
    """Probabilities of so many images, by the time of the network's output without a gradient."""
    x = test.x[:num]

    def plain() -> None:
        with torch.no_grad():
            network(x)

    def ours() -> None:
        pred: Any = la.predict(x)
        _ = pred.probs

    contenders = {"network": plain, "ours": ours}
    turns(contenders, 2)
    least = turns(contenders, repeats)
    milliseconds = {key: 1000 * value for key, value in least.items()}
    text = ", ".join(f"{key} {value:.2f} ms" for key, value in milliseconds.items())
    what = f"{what}: prediction of {'one image' if num == 1 else f'{num} images'} by the network's time"
    return at_most(what, least["ours"] / least["network"], bound, beside=text, values=milliseconds)
