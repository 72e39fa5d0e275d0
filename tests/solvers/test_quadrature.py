import math
from dataclasses import replace

import pytest
import torch
from quadratics import random_spectrum
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.solvers.operator import make_dense
from laplace_sampling.solvers.quadrature import Quadrature, TraceEstimator


def test_a_quadratic_form_lies_within_the_bound_of_its_quadrature() -> None:
    ggn, _ = random_spectrum(120)
    values, vectors = torch.linalg.eigh(make_dense(ggn))
    probe = Draws(1, 0).prior(120).double()
    estimator = TraceEstimator(ggn, probe * math.sqrt(120) / probe.norm())

    def f(t: Tensor) -> Tensor:
        return torch.cat([torch.stack([t / (t + a), torch.log1p(t / a)]) for a in (1e-3, 1.0, 300.0)])

    truth = f(values) @ (estimator.probes[0] @ vectors) ** 2
    gaps = []
    for _ in range(8):
        estimator.step()
        assert estimator.quadrature is not None
        value, gap = estimator.quadrature(f)[0], estimator.quadrature.bound(f)
        assert bool((truth <= value * (1 + 1e-9)).all())
        assert bool((truth >= value - gap - 1e-9 * value).all())
        gaps.append(gap)
    assert bool((gaps[-1] < gaps[2]).all())
    assert bool((gaps[-1][-2:] < 0.05 * value[-2:]).all())  # tight where the small eigenvalues have no part


def test_what_remains_is_the_rest_of_a_geometric_series() -> None:
    one = torch.ones(1, dtype=torch.float64)
    first, second, third = (
        Quadrature(one, w, w) for w in torch.tensor([[[10.0]], [[6.0]], [[4.0]]], dtype=torch.float64)
    )
    before = replace(second, truncated=first)
    value = replace(third, truncated=second, before=before)
    assert float(value.remaining(lambda t: t[None])) == pytest.approx(-2)  # 10, 6, 4, 3, 2.5, … go to 2
    assert float(before.remaining(lambda t: t[None])) == pytest.approx(-4)  # no rate to be seen yet: as much again


def test_traces_are_exact_when_the_space_is_exhausted() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 60, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, 20).double()[:, None]
    operator = GGN(DenseFeatures(rows[:, None]), Gaussian(1.0), torch.zeros(20, 1, dtype=torch.float64))
    spectrum = torch.linalg.eigvalsh(rows @ rows.T)
    probes = Draws(5, 0).prior(60).double()
    estimator = TraceEstimator(operator, probes * math.sqrt(60) / probes.norm(dim=1, keepdim=True))
    while estimator.step():
        pass
    assert estimator.quadrature is not None
    for alpha in (1e-4, 1.0, 1e4):

        def f(t: torch.Tensor, alpha: float = alpha) -> torch.Tensor:
            return torch.log1p(t / alpha)[None]

        assert_close(estimator.quadrature(f).mean(), f(spectrum).sum(), rtol=1e-6, atol=1e-9)
        assert float(estimator.quadrature.variance(f)) == float(estimator.quadrature.remaining(f)) == 0


def test_many_equal_eigenvalues_are_not_taken_for_all() -> None:
    operator = GGN(DenseFeatures(torch.eye(40).double()[:, None]), Gaussian(1.0), torch.zeros(40, 1).double())
    estimator = TraceEstimator(operator, Draws(4, 0).prior(40).double())
    while estimator.step():
        pass
    assert estimator.quadrature is not None
    assert float(estimator.quadrature(lambda t: t[None]).mean()) == pytest.approx(40)


def test_estimates_of_traces_have_no_bias() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(80, 120, generator=generator, dtype=torch.float64) * torch.logspace(0, -3, 80).double()[:, None]
    operator = GGN(DenseFeatures(rows[:, None]), Gaussian(1.0), torch.zeros(80, 1, dtype=torch.float64))
    spectrum = torch.linalg.eigvalsh(rows @ rows.T)

    def f(t: torch.Tensor) -> torch.Tensor:
        return torch.log1p(t / 0.1)[None]

    errors, variances = [], []
    for seed in range(30):
        probes = Draws(6, seed).prior(120).double()
        estimator = TraceEstimator(operator, probes * math.sqrt(120) / probes.norm(dim=1, keepdim=True))
        for _ in range(6):
            estimator.step()
        assert estimator.quadrature is not None
        errors.append(float(estimator.quadrature(f).mean() - f(spectrum).sum()))
        variances.append(float(estimator.quadrature.variance(f) + estimator.quadrature.remaining(f) ** 2))
    error, variance = torch.tensor(errors), torch.tensor(variances).mean()
    sigmas, ratio = error.mean() / (variance / 30).sqrt(), (error**2).mean() / variance
    print(f"bias {sigmas:.2f} s.e., mean square over reported {ratio:.2f}")
    assert abs(sigmas) <= 3
    assert 0.5 <= ratio <= 1.5
