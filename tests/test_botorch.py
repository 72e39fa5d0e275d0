"""The surrogate of BoTorch."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import reference
import torch
from test_exact import noisy
from torch import nn
from torch.testing import assert_close

from laplace_sampling.exact import ExactRegression
from laplace_sampling.gram import features_at
from laplace_sampling.linearise import Linearisation

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    botorch = pytest.importorskip("botorch", reason="BoTorch, of the extra `botorch`, is not there")
    from botorch.acquisition import LogExpectedImprovement, PosteriorMean, qLogExpectedImprovement
    from botorch.acquisition.objective import ScalarizedPosteriorTransform
    from botorch.optim import optimize_acqf

    from laplace_sampling.integrations.botorch import TangentSurrogate

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_posterior_is_the_exact_one(outputs: int) -> None:
    case, model, prior = noisy(30, outputs=outputs)
    surrogate = TangentSurrogate(case.model, case.x, case.y, mean="homogeneous")
    exact = ExactRegression.of(model, prior)
    found = exact.fit()
    assert surrogate.optimum.precision == pytest.approx(found.precision)
    assert surrogate.num_outputs == outputs
    x = case.x[:4] + 0.3
    at = exact.at(features_at(Linearisation(case.model), x))
    posterior = surrogate.posterior(x)
    assert_close(posterior.mean, at.mean(found.precision, found.noise_precision), rtol=1e-6, atol=1e-7)
    joint = at.joint_covariance(found.precision, found.noise_precision)
    assert_close(posterior.distribution.covariance_matrix, joint, rtol=1e-6, atol=1e-7)
    noisy_posterior = surrogate.posterior(x, observation_noise=True)
    assert_close(noisy_posterior.variance, posterior.variance + 1 / found.noise_precision)
    given = surrogate.posterior(x, observation_noise=torch.full((4, outputs), 0.5).double())
    assert_close(given.variance, posterior.variance + 0.5)
    batches = surrogate.posterior(torch.stack([x, x + 1]))
    assert_close(batches.mean[0], posterior.mean)
    assert_close(batches.distribution.covariance_matrix[0], posterior.distribution.covariance_matrix)
    last = surrogate.posterior(x, output_indices=[outputs - 1])
    assert_close(last.mean[:, 0], posterior.mean[:, -1])
    assert_close(last.variance[:, 0], posterior.variance[:, -1])
    weights = torch.ones(outputs, dtype=torch.float64)
    total = surrogate.posterior(x, posterior_transform=ScalarizedPosteriorTransform(weights))
    assert_close(total.mean[:, 0], posterior.mean.sum(1))
    with pytest.raises(TypeError, match=r"`posterior` does not know \['other'\]"):
        surrogate.posterior(x, other=1)


@pytest.mark.parametrize("mean", ["network", "affine"])
def test_the_posterior_is_differentiable_in_its_inputs(mean: str) -> None:
    case, _, _ = noisy(20)
    surrogate = TangentSurrogate(case.model, case.x, case.y, mean=mean, prior_precision=1.0, noise_precision=9.0)
    assert (surrogate.prior_precision, surrogate.noise_precision) == pytest.approx((1.0, 9.0))
    x = case.x[:3].clone().requires_grad_()

    def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        posterior = surrogate.posterior(x)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, (x,))
    paths = surrogate.sample_paths(2)
    assert torch.autograd.gradcheck(lambda x: paths.posterior(x).mean, (x,))
    assert not any(p.requires_grad for p in surrogate.parameters())
    assert all(p.grad is None for p in case.model.parameters())


def test_paths_have_the_moments_of_the_posterior_and_are_functions() -> None:
    case, _, _ = noisy(20)
    surrogate = TangentSurrogate(case.model, case.x, case.y)
    x = case.x[:3] + 0.5
    paths = surrogate.sample_paths(3000, seed=1)
    values = paths.posterior(x).mean[..., 0]
    assert values.shape == (3000, 3)
    assert torch.equal(paths.posterior(x).mean[..., 0], values)
    posterior = surrogate.posterior(x)
    error = (values.mean(0) - posterior.mean[:, 0]) / (posterior.variance[:, 0] / 3000).sqrt()
    assert (error.abs() < 5).all()
    ratio = values.var(0) / posterior.variance[:, 0]
    assert ((ratio - 1).abs() < 5 * (2 / 3000) ** 0.5).all()
    # One input for each function.
    few = surrogate.sample_paths(4, seed=1)
    each = few.posterior(x[:1].expand(4, 1, 2) + torch.arange(4).double()[:, None, None]).mean
    assert_close(each[2], few.posterior(x[:1] + 2).mean[2])
    assert_close(few.posterior(x).mean[..., 0], values[:4])
    with pytest.raises(ValueError, match=r"`sample_paths\(num_samples\)` needs at least 1, got 0"):
        surrogate.sample_paths(0)


def test_acquisition_functions_are_optimised() -> None:
    case, _, _ = noisy(20)
    surrogate = TangentSurrogate(case.model, case.x, case.y)
    bounds = torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)
    torch.manual_seed(0)
    for acquisition, q in (
        (LogExpectedImprovement(surrogate, case.y.max()), 1),
        (qLogExpectedImprovement(surrogate, case.y.max()), 2),
    ):
        found, value = optimize_acqf(acquisition, bounds, q, num_restarts=2, raw_samples=8)
        assert found.shape == (q, 2)
        assert bool(value.isfinite())
    thompson = surrogate.sample_paths()
    found, value = optimize_acqf(PosteriorMean(thompson), bounds, 1, num_restarts=2, raw_samples=16)
    grid = torch.rand(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 - 2
    assert float(value) > float(thompson.posterior(grid).mean.quantile(0.95))


def test_more_observations() -> None:
    case, _, _ = noisy(25)
    options = {"prior_precision": 2.0, "noise_precision": 5.0, "scale": torch.full((33,), 1.5).double()}
    whole = TangentSurrogate(case.model, case.x, case.y, **options)
    part = TangentSurrogate(case.model, case.x[:20], case.y[:20], **options)
    more = part.condition_on_observations(case.x[20:], case.y[20:])
    x = case.x[:3] + 0.1
    assert_close(more.posterior(x).mean, whole.posterior(x).mean)
    assert_close(more.posterior(x).variance, whole.posterior(x).variance)
    J = reference.jacobian(case.model, case.x)
    H = 5.0 * reference.ggn(J, torch.ones(25, 1, 1).double()) + 2.0 / 1.5**2 * torch.eye(33, dtype=torch.float64)
    rows = reference.jacobian(case.model, x)[:, 0]
    assert_close(
        whole.posterior(x).variance[:, 0], (rows @ torch.linalg.solve(H, rows.T)).diagonal(), rtol=1e-6, atol=0
    )
    with pytest.raises(NotImplementedError, match="fantasies of several batches are not supported"):
        part.condition_on_observations(case.x[None], case.y[None])


def test_images_and_refusals() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))
        x = torch.randn(6, 9)
    surrogate = TangentSurrogate(
        net, x, torch.randn(6, 1, generator=torch.Generator().manual_seed(0)), input_shape=(1, 3, 3)
    )
    posterior = surrogate.posterior(x)
    assert posterior.mean.shape == (6, 1)
    assert posterior.mean.dtype == torch.float32
    with pytest.raises(ValueError, match=r"`train_Y` must have shape \[N, C\] with N = 6, but has \[6\]"):
        TangentSurrogate(net, x, torch.zeros(6), input_shape=(1, 3, 3))
    with pytest.raises(ValueError, match="`train_Y` has 2 outputs, but the network has 1"):
        TangentSurrogate(net, x, torch.zeros(6, 2), input_shape=(1, 3, 3))


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(
        "bayesian_optimisation", Path(__file__).parents[1] / "examples" / "bayesian_optimisation.py"
    )
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    table = example.main(["--function", "branin", "--steps", "2", "--initial", "6", "--seeds", "1"])
    assert set(table) == set(example.METHODS)
    out = capsys.readouterr().out
    for name, best in table.items():
        assert best == sorted(best)
        assert name in out
