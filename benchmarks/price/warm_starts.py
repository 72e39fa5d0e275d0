"""A second fit after one more epoch of training, beside the first: operations, seconds, and whether both agree."""

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.data.tasks import Part
from benchmarks.price.networks import MLP, SMALL
from benchmarks.price.scores import our_log_loss
from benchmarks.price.setup import Cells, Row, Setup, at_most
from benchmarks.price.small_jobs import TRAINING, digits
from benchmarks.price.training import BATCH, EPOCHS, trained
from laplace_sampling import LinearisedLaplace

__all__ = ["cells"]

BOUND, DATA, SCORED = 0.5, 10_000, 400
# Twice the tolerance of a fit.
DIFFERENCE = 0.03
METHODS = ("subset", "kfac", "krylov", "last_layer")


def cells(setup: Setup) -> Cells:
    found = {f"{MLP}, {method}": partial(of_digits, setup, method) for method in METHODS}
    return found | {f"{SMALL}, {method}": partial(of_images, setup, method) for method in METHODS if method != "krylov"}


def of_digits(setup: Setup, method: str) -> list[Row]:
    train, _, test = digits(setup)
    settings = {"cache": setup.cache, "narrow": setup.narrow}
    networks = [trained(MLP, "digits", train, setup.seed, epochs=TRAINING + more, **settings) for more in (0, 1)]
    return rows(f"{MLP}, {method}", setup, method, networks, train, test)


def of_images(setup: Setup, method: str) -> list[Row]:
    networks = [setup.network(SMALL, DATA, EPOCHS + more) for more in (0, 1)]
    return rows(f"{SMALL}, {method}", setup, method, networks, setup.train(DATA), setup.test)


def rows(what: str, setup: Setup, method: str, networks: list[nn.Module], train: Part, test: Part) -> list[Row]:
    """Of networks before and after an epoch; a cold fit of the second one says what is right."""
    before, after = networks
    settings: dict[str, Any] = {"parameters": "last_layer"} if method == "last_layer" else {"method": method}
    warm, cold = (LinearisedLaplace(net, "classification", seed=setup.seed, **settings) for net in (before, after))
    first = fit(warm, train)
    before.load_state_dict(after.state_dict())
    second = fit(warm, train, warm_start=True)
    fit(cold, train)
    ours, theirs = (deviations(la, test.x[:SCORED]) for la in (warm, cold))
    losses = [our_log_loss(la, test) for la in (warm, cold)]
    ratios = {name: second[name] / first[name] for name in first}
    alphas = {"alpha": float(warm.prior_precision_[0]), "cold alpha": float(cold.prior_precision_[0])}
    values = {**ratios, **alphas, "loss": losses[0], "cold loss": losses[1]}
    text = f"{ratios['seconds']:.2f} in seconds"
    change = float((ours - theirs).norm() / theirs.norm())
    beside = f"log loss {losses[0]:.4f}, {losses[1]:.4f} of a cold fit"
    return [
        at_most(f"{what}: second fit after one more epoch", ratios["operations"], BOUND, beside=text, values=values),
        at_most(f"{what}: difference of standard deviations from a cold fit", change, DIFFERENCE, 4, beside),
    ]


def fit(la: LinearisedLaplace, train: Part, **settings: Any) -> dict[str, float]:
    """What a fit takes: operations that its budget counts, and seconds of the processor."""
    started = time.process_time()
    la.fit_hyperparameters(train.loader(BATCH), progress=False, **settings)
    seconds = time.process_time() - started
    return {"operations": la.diagnose().epochs, "seconds": seconds}


def deviations(la: LinearisedLaplace, x: Tensor) -> Tensor:
    """Standard deviations of the outputs, by the samples."""
    parts = (la.predict(part).deviations.square().mean(0).sqrt() for part in x.split(BATCH))
    return torch.cat(list(parts))
