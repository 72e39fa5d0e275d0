"""The surrogate of BoTorch."""

import copy
import importlib.util
import io
import warnings
from pathlib import Path

import pytest
import reference
import torch
from problems import noisy
from torch import nn
from torch.testing import assert_close

from laplace_sampling.gp.exact_regression import ExactRegression
from laplace_sampling.linear_model.network_features import features_at
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
    from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling
    from botorch.optim import optimize_acqf

    from laplace_sampling.gp.botorch import TangentSurrogate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


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
    with pytest.raises(TypeError, match="'other'"):
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
    single = TangentSurrogate(copy.deepcopy(net).float(), x.float(), y.float(), **options)
    new = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    J, rows = reference.jacobian(net, x)[:, 0], reference.jacobian(net, new)[:, 0]
    # Two factors of the posterior covariance, since H itself is too ill-conditioned to be solved with.
    Q = torch.linalg.qr(torch.cat([J * noise_precision**0.5, torch.eye(J.shape[1], dtype=torch.float64)]), mode="r")[1]
    variance = torch.linalg.solve_triangular(Q.T, rows.T, upper=False).square().sum(0)
    found = double.posterior(new).distribution.lazy_covariance_matrix.diagonal()
    assert_close(found, variance, rtol=1e-5, atol=0)
    for posterior in (single.posterior(new.float()), double.posterior(new.float())):
        assert posterior.mean.dtype == torch.float32
        found = posterior.distribution.lazy_covariance_matrix.diagonal()
        assert_close(found.double(), variance, rtol=1e-2, atol=0)
        assert bool(posterior.rsample(torch.Size([3])).isfinite().all())


def test_samples_at_equal_inputs_are_equal() -> None:
    case, _, _ = noisy(20)
    surrogate = TangentSurrogate(case.model, case.x, case.y, prior_precision=1.0, noise_precision=9.0)
    two = case.x[:2] + 0.3
    batch = torch.stack([two[[0, 1, 0]], two.repeat(2, 1)[:3] * 2]).requires_grad_()
    posterior = surrogate.posterior(batch)
    operator = posterior.distribution.lazy_covariance_matrix
    factor = operator.cholesky().to_dense()
    assert_close(factor @ factor.mT, operator.to_dense(), rtol=1e-8, atol=1e-10)
    samples = posterior.rsample(torch.Size([5]))
    deviation = (samples - posterior.mean) / posterior.variance.sqrt()
    assert_close(deviation[:, 0, 0], deviation[:, 0, 2], rtol=0, atol=1e-5)
    assert float((deviation[:, 0, 0] - deviation[:, 0, 1]).abs().max()) > 1e-2
    samples.sum().backward()
    assert batch.grad is not None
    assert bool(batch.grad.isfinite().all())
    with pytest.raises(FloatingPointError, match="covariance"):
        surrogate.posterior(torch.full((2, 2), torch.nan, dtype=torch.float64)).rsample()


def test_a_changed_network_is_noticed() -> None:
    case, _, _ = noisy(10)
    net = copy.deepcopy(case.model)
    surrogate = TangentSurrogate(net, case.x, case.y, prior_precision=1.0, noise_precision=9.0)
    path = surrogate.sample_paths()
    net[0].weight.data.mul_(1.5)
    message = "buffers"
    for call in (
        lambda: surrogate.posterior(case.x),
        lambda: path.posterior(case.x),
        surrogate.sample_paths,
        lambda: surrogate.condition_on_observations(case.x, case.y),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_data_are_copied_and_leave_inference_mode() -> None:
    case, _, _ = noisy(10)
    options = {"prior_precision": 1.0, "noise_precision": 9.0}
    x, y = case.x.clone(), case.y.clone()
    with torch.inference_mode():
        surrogate = TangentSurrogate(case.model, x * 1, y * 1, **options)
    other = TangentSurrogate(case.model, x, y, **options)
    new = case.x[:2].clone().requires_grad_()
    surrogate.posterior(new).variance.sum().backward()
    assert bool(new.grad.abs().max() > 0)
    x.mul_(2)
    more = [s.condition_on_observations(case.x[:1] + 1, case.y[:1]) for s in (surrogate, other)]
    assert_close(more[0].posterior(case.x).mean, more[1].posterior(case.x).mean)


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


def test_what_is_not_supported_says_so() -> None:
    case, _, _ = noisy(10)
    surrogate = TangentSurrogate(case.model, case.x, case.y, prior_precision=1.0, noise_precision=9.0)
    with pytest.raises(NotImplementedError, match="fantasize"):
        qKnowledgeGradient(surrogate, num_fantasies=2)(case.x[:3])
    with pytest.raises(NotImplementedError, match="fantasize"):
        qNegIntegratedPosteriorVariance(surrogate, mc_points=case.x)(case.x[:1])
    with pytest.raises(NotImplementedError, match="output_indices"):
        surrogate.subset_output([0])
    with pytest.raises(NotImplementedError, match="draw_matheron_paths"):
        PathwiseThompsonSampling(surrogate)(case.x[:1])


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
    with pytest.raises(NotImplementedError, match="condition_on_observations"):
        part.condition_on_observations(case.x[None], case.y[None])


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
        surrogate.load_state_dict({**surrogate.state_dict()})
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
    with pytest.raises(ValueError, match=r"train_Y.*\[6\]"):
        TangentSurrogate(net, x, torch.zeros(6), input_shape=(1, 3, 3))
    with pytest.raises(ValueError, match="outputs"):
        TangentSurrogate(net, x, torch.zeros(6, 2), input_shape=(1, 3, 3))
    y = torch.zeros(6, 1)
    with pytest.raises(ValueError, match=r"train_Y.*\[4\]"):
        TangentSurrogate(net, x, torch.where(torch.arange(6)[:, None] == 4, torch.nan, y), input_shape=(1, 3, 3))
    with pytest.raises(ValueError, match=r"train_X.*\[0, 1, 2, 3, 4\]"):
        TangentSurrogate(net, x * torch.inf, y, input_shape=(1, 3, 3))
    with pytest.raises(ValueError, match="prior_precision"):
        TangentSurrogate(net, x, y, input_shape=(1, 3, 3), prior_precision=0.0)
    with pytest.raises(ValueError, match="noise_precision"):
        TangentSurrogate(net, x, y, input_shape=(1, 3, 3), noise_precision=-1.0)


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


def test_outputs_are_counted_from_the_end_too() -> None:
    case, _, _ = noisy(12, outputs=2)
    surrogate = TangentSurrogate(case.model, case.x, case.y, prior_precision=1.0, noise_precision=9.0)
    x = case.x[:3] + 0.2
    both = surrogate.posterior(x)
    for indices, columns in (([-1], [1]), ([-2], [0]), ([1, -2], [1, 0])):
        some = surrogate.posterior(x, output_indices=indices)
        assert_close(some.mean, both.mean[:, columns])
        assert_close(some.variance, both.variance[:, columns])
    with pytest.raises(ValueError, match="output_indices"):
        surrogate.posterior(x, output_indices=[2])


@pytest.mark.parametrize("learnt", [False, True])
def test_the_state_is_that_of_the_posterior(learnt: bool) -> None:
    case, _, _ = noisy(20)
    options = {} if learnt else {"prior_precision": 0.7, "noise_precision": 6.0}
    surrogate = TangentSurrogate(case.model, case.x, case.y, scale=torch.linspace(0.5, 2, 33).double(), **options)
    surrogate.float()  # which must not round the hyperparameters
    file = io.BytesIO()
    torch.save({"network": case.model.state_dict(), "surrogate": surrogate.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state["surrogate"].values())
    # Another network of the same weights, and a surrogate of other data.
    net = copy.deepcopy(case.model)
    torch.nn.init.zeros_(net[0].weight)
    net.load_state_dict(state["network"])
    other = TangentSurrogate(net, case.x[:2], case.y[:2], prior_precision=1.0, noise_precision=1.0)
    assert other.load_state_dict(state["surrogate"]).missing_keys == []
    x = case.x[:4] + 0.1
    for found, expected in (
        (other.posterior(x), surrogate.posterior(x)),
        (other.posterior(x, observation_noise=True), surrogate.posterior(x, observation_noise=True)),
        (other.sample_paths(2).posterior(x), surrogate.sample_paths(2).posterior(x)),
    ):
        assert_close(found.mean, expected.mean)
        assert_close(found.variance, expected.variance)
    more = [s.condition_on_observations(case.x[:1] + 1, case.y[:1]).posterior(x) for s in (other, surrogate)]
    assert_close(more[0].mean, more[1].mean)
    assert (other.prior_precision, other.noise_precision) == (surrogate.prior_precision, surrogate.noise_precision)
    assert other.optimum.converged == surrogate.optimum.converged
    assert other.optimum.gradient == pytest.approx(surrogate.optimum.gradient, abs=1e-6)
    copied = copy.deepcopy(surrogate)
    assert_close(copied.posterior(x).variance, surrogate.posterior(x).variance)
    whole = botorch.models.ModelList(surrogate, surrogate)
    loaded = botorch.models.ModelList(other, TangentSurrogate(net, case.x[:2], case.y[:2], **_GIVEN))
    loaded.load_state_dict(whole.state_dict())
    assert_close(loaded.posterior(x).mean, whole.posterior(x).mean)


_GIVEN = {"prior_precision": 1.0, "noise_precision": 1.0}


def test_states_of_other_models_are_refused() -> None:
    case, _, _ = noisy(10)
    surrogate = TangentSurrogate(case.model, case.x, case.y, prior_precision=0.5, noise_precision=4.0)
    state = surrogate.state_dict()
    other_network = copy.deepcopy(case.model)
    torch.nn.init.ones_(other_network[0].bias)
    for model, name in (
        (TangentSurrogate(case.model, case.x, case.y, mean="homogeneous", **_GIVEN), "mean"),
        (TangentSurrogate(case.model, case.x, case.y, input_shape=(2,), **_GIVEN), "input_shape"),
        (TangentSurrogate(other_network, case.x, case.y, **_GIVEN), "network"),
    ):
        before = model.posterior(case.x).mean
        with pytest.raises(RuntimeError, match=f"`{name}`"):
            model.load_state_dict(state)
        assert_close(model.posterior(case.x).mean, before)
    model = TangentSurrogate(case.model, case.x, case.y, **_GIVEN)
    part = {name: value for name, value in state.items() if name != "train_Y"}
    with pytest.raises(RuntimeError, match='"train_Y"'):
        model.load_state_dict(part)
    with pytest.raises(RuntimeError, match='"other"'):
        model.load_state_dict({**state, "other": torch.zeros(1)})
    fresh = TangentSurrogate(case.model, case.x, case.y, **_GIVEN)
    assert fresh.load_state_dict(part, strict=False).missing_keys == ["train_Y"]
    assert fresh.prior_precision == 1.0
