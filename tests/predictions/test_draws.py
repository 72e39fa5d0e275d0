"""Covariances of each datum in closed form, by layers, and draws of outputs from them."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import reference
import torch
from cases import Case, make_case
from flat_settings import laplace_of, loader
from grids import covering
from pretended_device import pretended_device
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import IsotropicPrior, LinearisedLaplace
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.predictions.function_covariance import DenseCovariance, white_noise

NAMES = ["regression", "classification", "conv_batch_norm", "layer_norm", "attention", "token_labels", "multi_task"]


class Shared(nn.Module):
    """A matrix that a datum uses twice, batch first and batch second, and convolutions in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both = nn.Conv1d(2, 4, 3, groups=2), nn.Linear(4, 4)
        self.norm, self.last = nn.GroupNorm(2, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).permute(2, 0, 1)  # places, data, channels
        h = self.both(torch.tanh(self.both(h))).mean(0)
        return self.last(torch.tanh(h))


def shared() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Shared().double(), torch.randn(6, 2, 5, dtype=torch.float64)
    return replace(make_case("classification"), model=model, x=x, y=torch.arange(6) % 3)


def few_positions() -> Case:
    """A convolution with more weights than what goes in and out of it: its rows are sums of four outer products."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(6, 1, 4, 4, dtype=torch.float64)
        # The second convolution has more weights than blocks that are not factored.
        layers = nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(12, 12, 3, padding=1), nn.Tanh()
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 3)).double()
    return replace(make_case("classification"), model=model, x=x, y=torch.arange(6) % 3)


def case_of(name: str) -> Case:
    return shared() if name == "shared" else make_case(name)


def fitted(case: Case, method: str, num_samples: int = 64, prior: str = "isotropic") -> LinearisedLaplace:
    la = laplace_of(
        case.model, case.likelihood, method=method, prior=prior, prior_precision=0.7, num_samples=num_samples
    )
    return la.fit(loader(case), progress=False, tolerance=1e-6)


def dense_covariance(la: LinearisedLaplace, case: Case) -> Tensor:
    """`φ S (M̂ + A)⁻¹ S φᵀ` of all data, `[NC, NC]`, by matrices."""
    prior, curvature = la.posterior_.prior, la.posterior_.curvature
    assert curvature is not None
    M = curvature.matmul(torch.eye(len(prior.scale), dtype=torch.float64))
    rows = (reference.jacobian(case.model, case.x) * prior.scale).flatten(0, 1)
    return rows @ torch.linalg.solve(M + prior.spread().diag(), rows.T)


@covering(name=[*NAMES, "shared"], method=["kfac", "diagonal", "subset"], prior=["isotropic", "layerwise", "g-prior"])
def test_covariances_are_those_of_dense_algebra(name: str, method: str, prior: str) -> None:
    case = case_of(name)
    la = fitted(case, method, prior=prior)
    joint, num = dense_covariance(la, case), len(case.x)
    size = len(joint) // num
    expected = torch.stack([joint[n * size :, n * size :][:size, :size] for n in range(num)])
    pred = la.predict(case.x)
    assert_close(pred.covariance().reshape(expected.shape), expected, rtol=1e-8, atol=1e-12)
    assert_close(pred.variance.flatten(), expected.diagonal(dim1=1, dim2=2).flatten(), rtol=1e-8, atol=1e-12)
    alone = torch.cat([la.predict(case.x[n : n + 1]).covariance() for n in range(num)])
    assert_close(alone.reshape(expected.shape), expected, rtol=1e-8, atol=1e-12)
    assert_close(pred.joint_covariance(), joint, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", ["kfac", "diagonal", "subset"])
def test_covariances_by_a_convolution_at_few_positions(method: str) -> None:
    """Those of dense algebra, and the same on a device with data on the CPU."""
    case = few_positions()
    la = fitted(case, method)
    joint = dense_covariance(la, case).unflatten(0, (6, 3)).unflatten(2, (6, 3))
    expected = torch.stack([joint[n, :, n] for n in range(6)])
    assert_close(la.predict(case.x).covariance(), expected, rtol=1e-8, atol=1e-12)
    with pretended_device() as device:
        model = copy.deepcopy(case.model).to(device)
        there = laplace_of(model, case.likelihood, method=method, prior_precision=0.7)
        there.fit(loader(case), progress=False, tolerance=1e-6)
        assert_close(there.predict(case.x).covariance().cpu(), expected, rtol=1e-8, atol=1e-12)


class TwiceAsWide(IsotropicPrior):
    """The isotropic prior with a scale of two: `A = α/4`."""

    def build(self, *args: Any) -> GaussianPrior:
        prior = super().build(*args)
        return replace(prior, scale=2 * prior.scale)


@pytest.mark.parametrize("method", ["kfac", "diagonal", "subset"])
def test_a_prior_with_one_scale_is_one_of_another_precision(method: str) -> None:
    case = case_of("conv_batch_norm")
    scaled, plain = (
        LinearisedLaplace(case.model, case.likelihood, method=method, prior=prior)
        .fit(loader(case), progress=False, tolerance=1e-6)
        .predict(case.x)
        for prior in (TwiceAsWide(2.8), IsotropicPrior(0.7))
    )
    assert_close(scaled.covariance(), plain.covariance(), rtol=1e-8, atol=1e-12)
    assert_close(scaled.joint_covariance(), plain.joint_covariance(), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["classification", "conv_batch_norm", "layer_norm", "shared"])
@pytest.mark.parametrize("method", ["kfac", "diagonal", "subset"])
def test_networks_of_layers_take_no_rows_of_all_weights(name: str, method: str, monkeypatch) -> None:
    case = case_of(name)
    la, products = fitted(case, method), []
    monkeypatch.setattr(DenseCovariance, "_blocks", lambda *_: products.append(1))
    pred = la.predict(case.x)
    before = dict(la.network.products)
    assert pred.variance.shape == pred.outputs.shape
    assert (pred.probs.sum(-1) - 1).abs().max() < 1e-12
    # One pullback of each output, for everything that is asked of a datum by itself, and no tangents.
    assert la.network.products["vjp"] - before["vjp"] == pred.outputs.numel()
    assert la.network.products["jvp"] == before["jvp"]
    assert not products


def test_samples_of_weights_are_drawn_when_they_are_asked_for() -> None:
    case = make_case("classification")
    la = fitted(case, "kfac")
    pred, products = la.predict(case.x), la.network.products
    before = products["jvp"]
    y = case.given[1]
    for _ in (pred.probs, pred.log_prob(y), pred.epistemic, pred.entropy, pred.prediction_set()):
        assert products["jvp"] == before
    assert not len(la.posterior_.samples)
    assert_close(pred.deviations, la.network.jvp(case.x, la.samples_))
    assert_close(pred.samples, pred.outputs + pred.deviations)
    again = fitted(case, "kfac").predict(case.x)
    assert_close(again.joint_log_prob(y), pred.joint_log_prob(y))
    both = torch.cat([pred.outputs + pred.deviations, pred.outputs - pred.deviations]).log_softmax(-1)
    expected = both[:, torch.arange(len(y)), y].sum(1).logsumexp(0) - math.log(128)
    assert_close(pred.joint_log_prob(y), expected)


def test_samples_are_those_of_the_fit_at_which_was_predicted() -> None:
    case = make_case("classification")
    la = fitted(case, "kfac")
    pred, expected = la.predict(case.x), fitted(case, "kfac").predict(case.x).deviations
    la.fit([(case.x[:4], case.given[1][:4])], progress=False)
    assert_close(pred.deviations, expected)


@pytest.mark.parametrize("method", ["kfac", "subset", "exact"])
def test_draws_of_outputs_have_their_covariance(method: str) -> None:
    """Exactly, of as many draws as outputs or more; and the draws of a datum do not depend on the others."""
    case = make_case("classification")
    la = fitted(case, method, num_samples=16)
    pred = la.predict(case.x)
    draws = pred._draws
    assert_close(torch.einsum("knc,knd->ncd", draws, draws) / 16, pred.covariance())
    assert_close(la.predict(case.x[3:5])._draws, draws[:, 3:5])
    few = la.predict(case.x, num_samples=5)
    assert_close(few.variance, pred.variance)
    assert_close(few._draws.square().mean(0), pred.variance)
    assert not torch.allclose(fitted(case, method, num_samples=16).predict(case.x[:1])._draws, draws[:, 1:2])


def test_white_noise_is_normal() -> None:
    """Second moments exactly, and others within their standard error, over seeds."""
    z = torch.stack([white_noise(64, 3, seed) for seed in range(100)])
    assert_close(z.mT @ z / 64, torch.eye(3, dtype=torch.float64).expand(100, 3, 3))
    num = z.numel()
    assert abs(float(z.mean())) < 4 / math.sqrt(num)
    assert abs(float(z.pow(3).mean())) < 4 * math.sqrt(15 / num)
    # Of 64 draws with a given length the fourth moment is `3K/(K + 2)`.
    assert float(z.pow(4).mean()) == pytest.approx(3 * 64 / 66, abs=4 * math.sqrt(96 / num))
    assert not torch.equal(white_noise(64, 3, 0), white_noise(64, 3, 1))
    few = torch.cat([white_noise(2, 5, seed) for seed in range(1000)])
    assert_close(few.T @ few / len(few), torch.eye(5, dtype=torch.float64), rtol=0, atol=5 * math.sqrt(2 / len(few)))


def test_probabilities_are_those_of_many_draws() -> None:
    """Means over seeds within their standard error, and one seed nearer than as many independent draws would be."""
    case = make_case("classification")
    found = []
    for seed in range(16):
        la = laplace_of(case.model, case.likelihood, method="kfac", prior_precision=0.7, num_samples=16, seed=seed)
        found.append(la.fit(loader(case), progress=False).predict(case.x).probs)
    pred = la.predict(case.x)
    root = torch.linalg.cholesky(pred.covariance())
    z = torch.randn(20_000, len(root), 4, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    draws = (pred.outputs + (root @ z)[..., 0]).softmax(-1)
    found, expected = torch.stack(found), draws.mean(0)
    assert float((found - found[0]).abs().max()) > 0
    error = (found.var(0) / 16 + draws.var(0) / len(draws)).sqrt()
    assert float(((found.mean(0) - expected) / error).abs().max()) < 5
    assert float((found - expected).square().mean()) < float(draws.var(0).mean()) / 16 / 2


def test_more_outputs_than_samples_take_tangents() -> None:
    case = make_case("classification")
    la = fitted(case, "kfac", num_samples=3)
    before = la.network.products["vjp"]
    pred = la.predict(case.x)
    both = torch.cat([pred.outputs + pred.deviations, pred.outputs - pred.deviations])
    assert_close(pred.probs, both.softmax(-1).mean(0))
    assert la.network.products["vjp"] == before
    # Covariances stay those of the closed form.
    assert_close(pred.covariance(), fitted(case, "kfac").predict(case.x).covariance())


def test_heads_draw_from_their_own_covariances() -> None:
    case = make_case("multi_task")
    pred = fitted(case, "kfac").predict(case.x)
    for head in pred.values():
        blocks = head.covariance()
        draws = head._draws.reshape(64, len(blocks), -1)
        assert_close(torch.einsum("knc,knd->ncd", draws, draws) / 64, blocks)
    assert_close(torch.cat([head.deviations.reshape(64, 6, -1) for head in pred.values()], 2), pred.deviations)


def test_outputs_that_are_not_finite_have_no_draws() -> None:
    case = make_case("classification")
    pred = fitted(case, "kfac").predict(case.x)
    blocks = pred.covariance().clone()
    blocks[2, 1, 1] = math.inf
    pred.function.known["blocks"] = blocks
    assert pred.probs[2].isnan().all()
    assert pred.probs[[0, 1, 3]].isfinite().all()
