"""The surrogate of BoTorch."""

import copy
import importlib.util
import warnings
from pathlib import Path

import pytest
import reference
import torch
from problems import largest_evidence, noisy
from torch import nn
from torch.testing import assert_close

from laplace_sampling.gp.posterior import GramCovariance, GramPosterior
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import features_at
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.solver import ConvergenceWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    botorch = pytest.importorskip("botorch", reason="BoTorch, of the extra `botorch`, is not there")
    from botorch.acquisition import (
        LogExpectedImprovement,
        PosteriorMean,
        UpperConfidenceBound,
        qKnowledgeGradient,
        qLogExpectedImprovement,
        qLogNoisyExpectedImprovement,
        qNegIntegratedPosteriorVariance,
        qUpperConfidenceBound,
    )
    from botorch.acquisition.objective import ScalarizedPosteriorTransform
    from botorch.fit import fit_gpytorch_mll
    from botorch.optim import optimize_acqf
    from botorch.sampling import SobolQMCNormalSampler
    from gpytorch.mlls import ExactMarginalLogLikelihood

    from laplace_sampling.gp.botorch import TangentSurrogate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_posterior_is_the_exact_one(outputs: int) -> None:
    case, model, prior = noisy(30, outputs=outputs)
    surrogate = TangentSurrogate(case.model, case.x, case.y, mean="homogeneous")
    found = largest_evidence(model, prior)
    noise = Gaussian(found.noise_precision)
    exact = GramPosterior.of(model.with_likelihood(noise), prior.with_precision(torch.tensor([found.precision])))
    assert surrogate.optimum.precision == pytest.approx(found.precision)
    assert surrogate.num_outputs == outputs
    x = case.x[:4] + 0.3
    features = features_at(Linearisation(case.model), x)
    posterior = surrogate.posterior(x)
    mean = features.outputs(exact.mode_weights()[None])[0]
    assert_close(posterior.mean, mean, rtol=1e-6, atol=1e-7)
    joint = GramCovariance(exact, features).joint()
    assert_close(posterior.distribution.covariance_matrix, joint, rtol=1e-6, atol=1e-7)
    noisy_posterior = surrogate.posterior(x, observation_noise=True)
    assert_close(noisy_posterior.variance, posterior.variance + 1 / found.noise_precision)
    batches = surrogate.posterior(torch.stack([x, x + 1]))
    assert_close(batches.mean[0], posterior.mean)
    assert_close(batches.distribution.covariance_matrix[0], posterior.distribution.covariance_matrix)
    weights = torch.ones(outputs, dtype=torch.float64)
    total = surrogate.posterior(x, posterior_transform=ScalarizedPosteriorTransform(weights))
    assert_close(total.mean[:, 0], posterior.mean.sum(1))


@pytest.mark.parametrize("mean", ["network", "affine"])
def test_the_posterior_is_differentiable_in_its_inputs(mean: str) -> None:
    case, _, _ = noisy(20)
    surrogate = TangentSurrogate(case.model, case.x, case.y, mean=mean, prior_precision=1.0, noise_precision=9.0)
    assert float(surrogate.covar_module.prior_precision) == pytest.approx(1.0)
    assert float(surrogate.likelihood.noise) == pytest.approx(1 / 9.0)
    x = case.x[:3].clone().requires_grad_()

    def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        posterior = surrogate.posterior(x)
        return posterior.mean, posterior.distribution.covariance_matrix

    assert torch.autograd.gradcheck(moments, (x,))
    paths = surrogate.sample_paths(2)
    assert torch.autograd.gradcheck(lambda x: paths.posterior(x).mean, (x,))
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
    with pytest.raises(ValueError, match="num_samples"):
        surrogate.sample_paths(0)


@pytest.mark.parametrize("noise_precision", [400.0, 1e8])
def test_variances_are_those_of_float64(noise_precision: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    x = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) + 0.05 * torch.randn(50, 1, generator=generator, dtype=torch.float64)
    options = {"prior_precision": 1.0, "noise_precision": noise_precision}
    double = TangentSurrogate(net, x, y, **options)
    # Of a network in float32 with data in float64.
    single = TangentSurrogate(copy.deepcopy(net).float(), x, y, **options)
    new = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    J, rows = reference.jacobian(net, x)[:, 0], reference.jacobian(net, new)[:, 0]
    # Two factors of the posterior covariance, since H itself is too ill-conditioned to be solved with.
    Q = torch.linalg.qr(torch.cat([J * noise_precision**0.5, torch.eye(J.shape[1], dtype=torch.float64)]), mode="r")[1]
    variance = torch.linalg.solve_triangular(Q.T, rows.T, upper=False).square().sum(0)
    for surrogate, tolerance in ((double, 1e-5), (single, 1e-2)):
        posterior = surrogate.posterior(new)
        found = posterior.distribution.lazy_covariance_matrix.diagonal()
        assert_close(found, variance, rtol=tolerance, atol=0)
        assert bool(posterior.rsample(torch.Size([3])).isfinite().all())


def test_data_are_copied() -> None:
    case, _, _ = noisy(10)
    x, y = case.x.clone(), case.y.clone()
    surrogate, other = (
        TangentSurrogate(case.model, x, y, prior_precision=1.0, noise_precision=9.0) for x in (x, case.x)
    )
    x.mul_(2)
    assert_close(surrogate.posterior(case.x + 0.1).mean, other.posterior(case.x + 0.1).mean)


def test_evidence_without_a_maximum_gives_a_warning() -> None:
    case, _, _ = noisy(10)
    y = torch.full((10, 1), 2.0, dtype=torch.float64)
    with pytest.warns(ConvergenceWarning, match="noise_precision") as caught:
        surrogate = TangentSurrogate(case.model, case.x, y, mean="homogeneous")
    assert caught[0].filename == __file__
    assert not surrogate.optimum.converged
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        TangentSurrogate(case.model, case.x, y, prior_precision=1.0, noise_precision=4.0)


def test_acquisition_functions_are_optimised() -> None:
    case, _, _ = noisy(20)
    surrogate = TangentSurrogate(case.model, case.x, case.y)
    bounds = torch.tensor([[-2.0, -2.0], [2.0, 2.0]], dtype=torch.float64)
    torch.manual_seed(0)
    for acquisition, q in (
        (LogExpectedImprovement(surrogate, case.y.max()), 1),
        (qLogExpectedImprovement(surrogate, case.y.max()), 2),
        (UpperConfidenceBound(surrogate, 2.0), 1),
        (qUpperConfidenceBound(surrogate, 2.0), 2),
        (qLogNoisyExpectedImprovement(surrogate, case.x, prune_baseline=False), 1),
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
    x = case.x[:3] + 0.1
    part.posterior(x)  # GPyTorch conditions a model that has predicted
    more = part.condition_on_observations(case.x[20:], case.y[20:])
    assert_close(more.posterior(x).mean, whole.posterior(x).mean)
    assert_close(more.posterior(x).variance, whole.posterior(x).variance)
    J = reference.jacobian(case.model, case.x)
    H = 5.0 * reference.ggn(J, torch.ones(25, 1, 1).double()) + 2.0 / 1.5**2 * torch.eye(33, dtype=torch.float64)
    rows = reference.jacobian(case.model, x)[:, 0]
    assert_close(
        whole.posterior(x).variance[:, 0], (rows @ torch.linalg.solve(H, rows.T)).diagonal(), rtol=1e-6, atol=0
    )
    batch = part.condition_on_observations(case.x[None, 20:].expand(2, -1, -1), case.y[None, 20:].expand(2, -1, -1))
    assert_close(batch.posterior(x).mean[1], whole.posterior(x).mean)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_inputs_and_network_on_different_devices() -> None:
    case, _, _ = noisy(10)
    options = {"prior_precision": 1.0, "noise_precision": 9.0}
    x = case.x[:3] + 0.1
    expected = TangentSurrogate(case.model, case.x, case.y, **options)
    for network, data in (("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")):
        net = copy.deepcopy(case.model).to(network)
        surrogate = TangentSurrogate(net, case.x.to(data), case.y.to(data), **options)
        surrogate = surrogate.condition_on_observations(case.x[:1].to(data) + 1, case.y[:1].to(data))
        more = expected.condition_on_observations(case.x[:1] + 1, case.y[:1])
        assert_close(surrogate.posterior(x.to(data)).mean, more.posterior(x).mean.to(data))
        assert_close(surrogate.posterior(x.to(data)).variance, more.posterior(x).variance.to(data))
        assert surrogate.sample_paths(2).posterior(x.to(data)).mean.device.type == data


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
    with pytest.raises(ValueError, match="train_y"):
        TangentSurrogate(net, x, torch.zeros(6, 2), input_shape=(1, 3, 3))
    y = torch.zeros(6, 1)
    with pytest.raises(ValueError, match="train_Y"):
        TangentSurrogate(net, x, torch.where(torch.arange(6)[:, None] == 4, torch.nan, y), input_shape=(1, 3, 3))
    for setting in ("prior_precision", "noise_precision"):
        with pytest.raises(ValueError, match=setting):
            TangentSurrogate(net, x, y, input_shape=(1, 3, 3), **{setting: 0.0})


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(
        "bayesian_optimisation", Path(__file__).parents[2] / "examples" / "bayesian_optimisation.py"
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


def test_fantasies_and_functions_that_look_ahead() -> None:
    case, _, _ = noisy(20)
    surrogate = TangentSurrogate(case.model, case.x, case.y, prior_precision=1.0, noise_precision=9.0)
    x = case.x[:4].clone().requires_grad_()
    fantasies = surrogate.fantasize(x.detach()[:, None], SobolQMCNormalSampler(torch.Size([3]), seed=0))
    assert fantasies.posterior(case.x[:5]).mean.shape == (3, 4, 5, 1)
    for acquisition in (
        qKnowledgeGradient(surrogate, num_fantasies=2)(x),
        qNegIntegratedPosteriorVariance(surrogate, mc_points=case.x[:5])(x[:, None]),
    ):
        (gradient,) = torch.autograd.grad(acquisition.sum(), x)
        assert bool(gradient.isfinite().all())
        assert bool(gradient.abs().sum() > 0)


def test_the_exact_hyperparameters_are_those_of_botorch() -> None:
    case, _, _ = noisy(40)
    surrogate = TangentSurrogate(case.model, case.x, case.y)
    found = TangentSurrogate(case.model, case.x, case.y, prior_precision=1.0, noise_precision=1.0)
    fit_gpytorch_mll(ExactMarginalLogLikelihood(found.likelihood, found))
    assert float(found.covar_module.prior_precision) == pytest.approx(surrogate.optimum.precision, rel=1e-2)
    assert float(found.likelihood.noise) == pytest.approx(1 / surrogate.optimum.noise_precision, rel=1e-2)
    state = surrogate.state_dict()
    found.load_state_dict(state)
    assert_close(found.posterior(case.x + 0.1).mean, surrogate.posterior(case.x + 0.1).mean)


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (torch.zeros(6), torch.zeros(6, 1), "train_X"),
        (torch.zeros(6, 2), torch.zeros(6), "train_Y"),
        (torch.zeros(6, 2) + torch.inf, torch.zeros(6, 1), "train_X"),
        (torch.zeros(0, 2), torch.zeros(0, 1), "train_X"),
        (torch.zeros(6, 2), torch.zeros(3, 1), "train_Y"),
        (None, torch.zeros(6, 1), "train_X"),
        (torch.zeros(6, 2), torch.zeros(6, 1) + 0j, "train_Y"),
    ],
)
def test_data_of_other_kinds_are_refused(x, y, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        TangentSurrogate(nn.Linear(2, 1), x, y, prior_precision=1.0, noise_precision=4.0)
