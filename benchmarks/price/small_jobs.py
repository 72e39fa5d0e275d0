"""A small job at the default settings: a network for digits."""

from functools import partial

import torch
from sklearn.datasets import load_digits

from benchmarks.data.tasks import Part
from benchmarks.price.fits import epochs_row, measured, ours
from benchmarks.price.networks import MLP, num_weights
from benchmarks.price.scores import log_losses, our_log_loss
from benchmarks.price.setup import Cells, Row, Setup, at_most
from benchmarks.price.training import trained

__all__ = ["cells"]

DATA, VALIDATION, EPOCHS, TRAINING = 1200, 297, 20.0, 40


def cells(setup: Setup) -> Cells:
    return {MLP: partial(rows, setup)}


def rows(setup: Setup) -> list[Row]:
    train, validation, test = digits(setup)
    network = trained(MLP, "digits", train, setup.seed, cache=setup.cache, epochs=TRAINING, narrow=setup.narrow)
    cost = measured(network, train, ours(network, train, seed=setup.seed), EPOCHS, setup)
    what = f"{MLP}, P = {num_weights(network):,}, N = {len(train.y):,}, defaults"
    found = [epochs_row(f"{what}: fit", cost, EPOCHS)]
    if cost.result is None:
        return found
    losses = log_losses(network, test, validation)
    text = ", ".join(f"{key} {value:.4f}" for key, value in losses.items())
    return [*found, at_most(f"{what}: log loss", our_log_loss(cost.result, test), losses["network"], 4, text)]


def digits(setup: Setup) -> tuple[Part, Part, Part]:
    """Those of scikit-learn, with pixels between -1 and 1."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 8 - 1, torch.tensor(labels)[order]
    num = setup.num(DATA)
    ends = DATA, DATA + VALIDATION
    parts = [slice(num), slice(*ends), slice(ends[1], None)]
    train, validation, test = (Part(x[part], y[part]) for part in parts)
    return train, validation, test
