"""The recipe that was published beside ours: Jacobian products and log loss, on a small network.

Antorán et al. (2023): 8 steps of EM, in each a mode by 40 epochs of SGD and 16 samples by 20, then 64 samples by 20.
A product is a JVP or a VJP of one vector for each datum. Those of the recipe follow from its settings; ours are counted
operations by those of a product.
"""

import warnings
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.comparison.predictions import log_mean_exp
from benchmarks.comparison.training import outputs_of
from benchmarks.data.tasks import Part
from benchmarks.price.dense_reference import jacobian
from benchmarks.price.fits import ours
from benchmarks.price.meter import operations_of
from benchmarks.price.networks import SMALL
from benchmarks.price.scores import log_loss, our_log_loss
from benchmarks.price.setup import Cells, Row, Setup, at_most
from benchmarks.price.training import BATCH
from benchmarks.solvers.digits import RECIPE
from laplace_sampling import IsotropicPrior
from laplace_sampling.evidence.em import fit_em
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation

__all__ = ["cells", "published_products"]

DATA, TRAINING, START, FEWER = 1000, 60, 1.0, 30.0
STEPS, TUNING, EPOCHS, MODE_EPOCHS, SAMPLES = 8, 16, 20, 40, 64


def cells(setup: Setup) -> Cells:
    return {SMALL: partial(rows, setup)}


def published_products() -> float:
    """An epoch of a vector is a JVP and a VJP; a right-hand side is a VJP, an effective dimension a JVP a sample."""
    tuning = STEPS * (2 * MODE_EPOCHS + 2 * EPOCHS * TUNING + TUNING) + TUNING
    return float(tuning + SAMPLES * (2 * EPOCHS + 1))


def rows(setup: Setup) -> list[Row]:
    network, train, test = setup.network(SMALL, DATA, TRAINING), setup.train(DATA), setup.test
    kept = {}

    def fit() -> None:
        kept["la"] = ours(network, train, seed=setup.seed)()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        products = operations_of(fit) / operations_of_product(network, train)
        theirs = recipe_log_loss(network, train, test, setup.seed)
    losses = {"published": theirs, "ours": our_log_loss(kept["la"], test)}
    losses["network"] = log_loss(outputs_of(network, test.x).log_softmax(-1), test.y)
    what = f"{SMALL}, N = {len(train.y):,}, the published recipe"
    published = published_products()
    text = f"{published:.0f} products, ours {products:.1f}"
    times = Row(
        f"{what}: products by ours",
        f"≥ {FEWER:g}",
        f"{published / products:.0f} ({text})",
        published / products >= FEWER,
        {"products": products, "published": published},
    )
    beside = ", ".join(f"{key} {value:.4f}" for key, value in losses.items())
    return [times, at_most(f"{what}: our log loss", losses["ours"], theirs, 4, beside, losses)]


def operations_of_product(network: nn.Module, train: Part) -> float:
    """The mean of a JVP and a VJP of one vector for all data."""
    tangent = Linearisation(network)
    x = train.x[:BATCH]
    v = torch.ones(1, tangent.weights.numel())
    tangent.jvp(x[:2], v)  # the first product tries which way works
    counted = operations_of(lambda: tangent.vjp(x, tangent.jvp(x, v)))
    return counted / 2 / len(x) * len(train.y)


def recipe_log_loss(network: nn.Module, train: Part, test: Part, seed: int) -> float:
    """With the Jacobian in memory, which changes no result."""
    features = DenseFeatures(features_of(network, train.x))
    f = outputs_of(network, train.x)
    model = LinearModel(features, torch.zeros_like(f), f, train.y, Categorical())
    ggn, draws = model.ggn(f), Draws(TUNING, seed)
    start = IsotropicPrior(START).build(ggn, Linearisation(network).layers(), draws.noise(f.shape[1]))
    tuned = fit_em(model, start, draws, RECIPE, max_steps=STEPS, tolerance=1e-6)
    samples = sample_posterior(ggn, tuned.prior, Draws(SAMPLES, seed, 1), RECIPE).value * tuned.prior.scale
    deviations = torch.einsum("ncp,kp->knc", features_of(network, test.x), samples)
    outputs = outputs_of(network, test.x)
    both = torch.cat([outputs + deviations, outputs - deviations])
    return log_loss(log_mean_exp(both.log_softmax(-1)), test.y)


def features_of(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([jacobian(network, part) for part in x.split(BATCH)])
