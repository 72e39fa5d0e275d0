"""All weights at the default settings, without validation data and with: epochs, log loss, AUROC; cost against N."""

from functools import partial
from typing import Any

from torch import nn

from benchmarks.price import laplace_torch as peer
from benchmarks.price.fits import epochs_row, measured, ours
from benchmarks.price.networks import CNN, LENET
from benchmarks.price.scores import auroc_of, epistemic, log_loss, log_losses, our_log_loss
from benchmarks.price.setup import Cells, Row, Setup, at_most
from laplace_sampling import LinearisedLaplace

__all__ = ["cells"]

# The largest last.
CASES = ((CNN, 1000), (CNN, 10_000), (LENET, 10_000), (CNN, 60_000))
EPOCHS, EPOCHS_VALIDATION, WORSE, LEAST_AUROC = 20.0, 15.0, 0.002, 0.94
# What is fitted once only, as it takes long.
MANY = 5000


def cells(setup: Setup) -> Cells:
    return {
        f"{name}, {num}{', validation' if validation else ''}": partial(rows, setup, name, num, validation)
        for name, num in CASES
        for validation in (False, True)
    }


def rows(setup: Setup, name: str, num: int, validation: bool) -> list[Row]:
    network, train = setup.network(name, num), setup.train(num)
    bound = EPOCHS_VALIDATION if validation else EPOCHS
    fit = ours(network, train, setup.validation if validation else None, seed=setup.seed)
    cost = measured(network, train, fit, bound, setup, once=True)
    what = f"{name}, all weights, N = {len(train.y):,}{', validation data' if validation else ''}"
    found = [epochs_row(f"{what}: fit", cost, bound, num_data=len(train.y))]
    if cost.result is None:
        return found
    found.append(loss_row(what, setup, network, num, cost.result, validation))
    return [*found, *auroc_rows(what, setup, cost.result)] if validation else found


def loss_row(what: str, setup: Setup, network: nn.Module, num: int, la: LinearisedLaplace, validation: bool) -> Row:
    found = log_losses(network, setup.test, setup.validation)
    if not validation and peer.installed():
        theirs = peer.last_layer(network, setup.train(num))
        found["laplace-torch"] = log_loss(peer.log_probs(theirs, setup.test.x), setup.test.y)
    least = found["temperature"] + WORSE
    if not validation:
        least = min(found["network"], found.get("laplace-torch", float("inf")) + WORSE)
    text = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
    return at_most(f"{what}: log loss", our_log_loss(la, setup.test), least, 4, text, {"losses": found, **about(la)})


def about(la: LinearisedLaplace) -> dict[str, Any]:
    """What the fit says about itself."""
    found = la.diagnose()
    return {
        "method": found.method,
        "reason": found.reason,
        "prior_precision": la.prior_precision_.tolist(),
        "scale": la.scale_,
        "temperature": la.temperature_,
        "error": getattr(found, "error", None),
    }


def auroc_rows(what: str, setup: Setup, la: LinearisedLaplace) -> list[Row]:
    """The bound is for the epistemic score of a prediction; without one for the mutual information."""
    inside, outside = (epistemic(la, x) for x in (setup.test.x, setup.other))
    found = {name: auroc_of(inside[name], outside[name]) for name in inside}
    score = "epistemic" if "epistemic" in found else "mutual information"
    text = ", ".join(f"{name} {value:.3f}" for name, value in found.items() if name != score)
    figure = f"{found[score]:.3f} ({score}; {text})"
    holds = found[score] >= LEAST_AUROC
    return [Row(f"{what}: AUROC against MNIST", f"≥ {LEAST_AUROC}", figure, holds, dict(found))]
