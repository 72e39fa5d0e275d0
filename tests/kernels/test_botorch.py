"""Posteriors of any kernel in BoTorch: its paths, its acquisition functions, its transforms."""

from typing import Any

import pytest
import torch
from gaussian_processes import KERNELS, inputs, model

from laplace_sampling.kernels import condition

botorch: Any = pytest.importorskip("botorch")

from botorch.acquisition import LogExpectedImprovement, qLogExpectedImprovement  # noqa: E402
from botorch.acquisition.thompson_sampling import PathwiseThompsonSampling  # noqa: E402
from botorch.models import SingleTaskGP  # noqa: E402
from botorch.models.transforms import Normalize  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling.pathwise import SamplePath, draw_matheron_paths, get_matheron_path_model  # noqa: E402
from botorch.utils.sampling import optimize_posterior_samples  # noqa: E402

from laplace_sampling.kernels.botorch import ConditionedModel  # noqa: E402

BOUNDS = torch.tensor([[0.0, 0.0], [100.0, 100.0]], dtype=torch.float64)


@pytest.fixture(scope="module")
def gp() -> Any:
    """Inputs are of the size of 100, and targets 1,000 ± 50."""
    x = 100 * inputs(40)[:, :2]
    y = 1000 + 50 * (x[:, :1] / 20).sin() + 20 * (x[:, 1:] / 30).cos()
    return SingleTaskGP(x, y, input_transform=Normalize(2)).eval().requires_grad_(False)


@pytest.mark.parametrize("name", ["matern-3/2", "network and rest", "of molecules", "of tasks"])
def test_paths_are_the_samples_at_inputs_of_any_shape(name: str) -> None:
    posterior = condition(model(KERNELS[name](), n=50), 11)  # in groups of six and five draws
    x, own = inputs(6, seed=5), inputs(2 * 11 * 3, seed=6).reshape(2, 11, 3, 20)
    paths, some, first = posterior.sample_paths(), posterior.sample_paths(4, seed=1), posterior.sample_paths(1)
    samples = posterior.samples(x)
    torch.testing.assert_close(paths(x), samples)
    torch.testing.assert_close(paths(x.reshape(2, 1, 3, 20)), samples.reshape(11, 2, 3).transpose(0, 1))
    torch.testing.assert_close(first(x), samples[:1])
    wanted = posterior.samples(own.reshape(-1, 20)).reshape(11, 2, 11, 3).diagonal(dim1=0, dim2=2).movedim(-1, 1)
    torch.testing.assert_close(paths(own), wanted)
    chosen = [int((samples - path).norm(dim=1).argmin()) for path in some(x)]
    assert len(set(chosen)) == 4
    torch.testing.assert_close(some(x), samples[chosen])
    each = [posterior.samples(at)[one] for one, at in zip(chosen, own[0], strict=False)]
    torch.testing.assert_close(some(own[0, :4]), torch.stack(each))
    with pytest.raises(ValueError, match=r"num_samples=12"):
        posterior.sample_paths(12)


def test_gradients_of_paths_in_inputs_of_their_own() -> None:
    paths = condition(model(KERNELS["product"](), n=30), 3).sample_paths()
    assert torch.autograd.gradcheck(paths, inputs(6, seed=5).reshape(3, 2, 20).requires_grad_())


def test_the_posterior_is_that_of_the_model_with_its_transforms(gp: Any) -> None:
    conditioned, x = ConditionedModel(condition(gp, 2048)), 100 * inputs(12, seed=5)[:, :2].reshape(3, 4, 2)
    for noise in (False, True):
        found, wanted = (m.posterior(x, observation_noise=noise) for m in (conditioned, gp))
        torch.testing.assert_close(found.mean, wanted.mean)
        covariance = wanted.distribution.covariance_matrix
        scale = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
        error = (found.distribution.covariance_matrix - covariance) / scale[..., :, None] / scale[..., None, :]
        # Four standard errors of 2,048 draws, and the same for frequencies, which eight draws share.
        assert float(error.abs().max()) < 4 * (2 / 2048) ** 0.5 * 2
    values = [LogExpectedImprovement(m, 1000.0)(x[:, :1]) for m in (conditioned, gp)]
    torch.testing.assert_close(*values, rtol=0.05, atol=0.05)
    more = conditioned.condition_on_observations(x[0], wanted.mean[0] + 10)
    assert float((more.posterior(x[0]).mean - wanted.mean[0]).min()) > 1


def test_matheron_paths_of_botorch(gp: Any) -> None:
    """In its format: sample dimensions after the batch, and others at each draw, by the seed of torch."""
    conditioned, x = ConditionedModel(condition(gp, 16)), 100 * inputs(5, seed=5)[:, :2]
    torch.manual_seed(0)
    ours, others = (draw_matheron_paths(conditioned, torch.Size([2, 3])) for _ in range(2))
    theirs = draw_matheron_paths(gp, torch.Size([2, 3]))
    assert isinstance(ours, SamplePath)
    for X in (x, x[None, None], x.expand(4, 2, 3, 5, 2), x.expand(4, 1, 1, 5, 2)):
        assert ours(X).shape == theirs(X).shape
        torch.testing.assert_close(ours(X), ours(x).expand(ours(X).shape))
    assert not torch.equal(ours(x), others(x))
    one = get_matheron_path_model(conditioned)
    assert one.posterior(x).mean.shape == (5, 1)
    assert len({float(value) for value in ours(x)[..., 0].flatten()}) == 6


def test_thompson_sampling(gp: Any) -> None:
    """Candidates are the maxima of samples, as far as a grid shows them."""
    conditioned, grid = ConditionedModel(condition(gp, 8)), 100 * torch.rand(4000, 2, dtype=torch.float64)
    torch.manual_seed(1)
    acquisition = PathwiseThompsonSampling(conditioned)
    candidates, value = optimize_acqf(acquisition, BOUNDS, q=3, num_restarts=4, raw_samples=64)
    path = acquisition.samples
    best = path(grid)[..., 0].amax(1)
    assert float(value) >= float(best.sum()) - 1
    torch.testing.assert_close(acquisition(candidates), value.reshape(1))
    _, highest = optimize_posterior_samples(path, BOUNDS, raw_samples=256, num_restarts=2)
    assert bool((highest[:, 0] >= best - 1).all())


def test_acquisition_functions_of_many_inputs(gp: Any) -> None:
    conditioned = ConditionedModel(condition(gp, 256))
    candidates, value = optimize_acqf(
        qLogExpectedImprovement(conditioned, 1060.0), BOUNDS, q=2, num_restarts=2, raw_samples=32
    )
    _, theirs = optimize_acqf(qLogExpectedImprovement(gp, 1060.0), BOUNDS, q=2, num_restarts=2, raw_samples=32)
    assert candidates.shape == (2, 2)
    assert float((value - theirs).abs()) < 0.3


def test_a_model_that_is_not_conditioned_is_refused(gp: Any) -> None:
    with pytest.raises(TypeError, match="what `condition\\(model\\)` returns"):
        ConditionedModel(gp)
