"""The factored posterior of all weights: cost and log loss, batch norm included."""

from functools import partial

from benchmarks.price import laplace_torch as peer
from benchmarks.price.fits import epochs_row, measured, ours
from benchmarks.price.networks import CNN, LENET
from benchmarks.price.scores import log_losses, our_log_loss
from benchmarks.price.setup import Cells, Row, Setup, at_most

__all__ = ["cells"]

NETWORKS = (CNN, LENET)
DATA, EPOCHS = 10_000, 4.0


def cells(setup: Setup) -> Cells:
    return {name: partial(rows, setup, name) for name in NETWORKS}


def rows(setup: Setup, name: str) -> list[Row]:
    network, train = setup.network(name, DATA), setup.train(DATA)
    settings = {"method": "kfac", "seed": setup.seed}
    cost = measured(network, train, ours(network, train, **settings), EPOCHS, setup)
    what = f"{name}, all weights, factored"
    found = [epochs_row(f"{what}: fit with tuning", cost, EPOCHS), peer_row(what, setup, name)]
    if cost.result is None:
        return found
    losses = log_losses(network, setup.test, setup.validation)
    text = ", ".join(f"{key} {value:.4f}" for key, value in losses.items())
    return [*found, at_most(f"{what}: log loss", our_log_loss(cost.result, setup.test), losses["network"], 4, text)]


def peer_row(what: str, setup: Setup, name: str) -> Row:
    """Whether laplace-torch has such a posterior; a few data tell."""
    if not peer.installed():
        return Row(f"{what}: laplace-torch", "", peer.MISSING)
    refusal = peer.refusal(setup.network(name, DATA), setup.train(100))
    return Row(f"{what}: laplace-torch", "", f"refuses: {refusal}" if refusal else "fits it")
