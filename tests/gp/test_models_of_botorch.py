"""Models of GPyTorch and BoTorch that have the tangent kernel, in BoTorch's own functions for them."""

import copy
import pickle
import warnings

import pytest
import torch
from problems import largest_evidence, noisy
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.gp.posterior import GramPosterior
from laplace_sampling.gp.tangent_kernel import NetworkMean, TangentGP, TangentKernel
from laplace_sampling.likelihoods.gaussian import Gaussian

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch", reason="BoTorch, of the extra `botorch`, is not there")
    from botorch import cross_validation
    from botorch.acquisition import qKnowledgeGradient, qNegIntegratedPosteriorVariance
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import ModelListGP, SingleTaskGP
    from botorch.models.gpytorch import GPyTorchModel
    from botorch.models.transforms import Normalize
    from botorch.sampling import SobolQMCNormalSampler

pytestmark = pytest.mark.slow


def likelihood(*batch_shape: int) -> gpytorch.likelihoods.GaussianLikelihood:
    return gpytorch.likelihoods.GaussianLikelihood(
        noise_constraint=gpytorch.constraints.GreaterThan(1e-8), batch_shape=torch.Size(batch_shape)
    ).double()


def single_task(net: nn.Module, x: Tensor, y: Tensor, *batch_shape: int) -> SingleTaskGP:
    return SingleTaskGP(
        x,
        y,
        likelihood=likelihood(*batch_shape),
        covar_module=TangentKernel(net, batch_shape=batch_shape),
        mean_module=NetworkMean(net, "homogeneous"),
        outcome_transform=None,
    )


class Mixed(TangentGP, GPyTorchModel):
    _num_outputs = 1

    def __init__(self, train_X: Tensor, train_Y: Tensor, network: nn.Module) -> None:
        shape = train_X.shape[:-2]
        super().__init__(train_X, train_Y[..., 0], likelihood(*shape), network, mean="homogeneous", batch_shape=shape)


def fitted(model: GPyTorchModel) -> GPyTorchModel:
    fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))
    return model


@pytest.mark.parametrize("mixed", [False, True])
def test_hyperparameters_are_fitted(mixed: bool) -> None:
    case, linear, prior = noisy(40)
    best = largest_evidence(linear, prior)
    model = fitted(Mixed(case.x, case.y, case.model) if mixed else single_task(case.model, case.x, case.y))
    assert float(model.covar_module.prior_precision.detach()) == pytest.approx(best.precision, rel=1e-2)
    assert float(model.likelihood.noise.detach()) == pytest.approx(1 / best.noise_precision, rel=1e-2)


def test_outputs_are_fitted_each_with_a_kernel_of_its_own() -> None:
    case, _, _ = noisy(30)
    y = torch.cat([case.y, 3 * case.y.flip(0)], dim=1)
    model = fitted(single_task(case.model, case.x, y, 2)).eval()
    for i in range(2):
        one = fitted(single_task(case.model, case.x, y[:, i : i + 1])).eval()
        alpha = model.covar_module.prior_precision.detach()[i]
        assert_close(alpha, one.covar_module.prior_precision.detach(), rtol=1e-2, atol=0)
        with torch.no_grad():
            new = case.x[:4] + 0.2
            assert_close(model.posterior(new).mean[:, i], one.posterior(new).mean[:, 0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mixed", [False, True])
def test_cross_validation_in_a_batch_is_that_of_each_fold(mixed: bool) -> None:
    case, _, _ = noisy(9)
    folds = cross_validation.gen_loo_cv_folds(case.x, case.y)
    options = (
        {"network": case.model}
        if mixed
        else {
            "covar_module": TangentKernel(case.model, batch_shape=[9]),
            "mean_module": NetworkMean(case.model, "homogeneous"),
            "likelihood": likelihood(9),
            "outcome_transform": None,
        }
    )
    result = cross_validation.batch_cross_validation(
        Mixed if mixed else SingleTaskGP,
        gpytorch.mlls.ExactMarginalLogLikelihood,
        folds,
        model_init_kwargs=options,
    )
    assert result.posterior.mean.shape == (9, 1, 1)
    assert float(result.model.covar_module.prior_precision.detach().std()) > 0
    for i in (0, 4):
        one = single_task(case.model, folds.train_X[i], folds.train_Y[i])
        one.covar_module.prior_precision = result.model.covar_module.prior_precision.detach()[i]
        one.likelihood.noise = result.model.likelihood.noise.detach()[i]
        with torch.no_grad():
            expected = one.posterior(folds.test_X[i])
        assert_close(result.posterior.mean[i], expected.mean, rtol=1e-5, atol=1e-6)
        assert_close(result.posterior.variance[i], expected.variance, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not hasattr(cross_validation, "loo_cv"), reason="this BoTorch has no `loo_cv` yet")
def test_leaving_one_out_without_fits() -> None:
    case, linear, prior = noisy(12)
    model = single_task(case.model, case.x, case.y)
    model.covar_module.prior_precision, model.likelihood.noise = 0.7, 0.2
    found = cross_validation.loo_cv(model, observation_noise=True).posterior
    given = linear.with_likelihood(Gaussian(5.0)), prior.with_precision(torch.tensor([0.7]).double())
    expected = GramPosterior.of(*given).leave_one_out()
    assert_close(found.mean[:, 0], expected.mean, rtol=1e-5, atol=1e-6)


def test_more_observations_and_fantasies() -> None:
    case, _, _ = noisy(20)
    model = single_task(case.model, case.x[:12], case.y[:12])
    whole = single_task(case.model, case.x, case.y)
    for each in (model, whole):
        each.covar_module.prior_precision, each.likelihood.noise = 0.7, 0.2
        each.eval()
    new = case.x[:3] + 0.2
    with torch.no_grad():
        model.posterior(new)
        expected = whole.posterior(new)
        more = model.condition_on_observations(case.x[12:], case.y[12:]).posterior(new)
        assert_close(more.mean, expected.mean, rtol=1e-5, atol=1e-6)
        assert_close(more.variance, expected.variance, rtol=1e-5, atol=1e-6)
        # Of a batch of sets of observations, of which the second is these.
        batch = torch.stack([case.x[12:] + 1, case.x[12:]]), torch.stack([case.y[12:] - 1, case.y[12:]])
        assert_close(
            model.condition_on_observations(*batch).posterior(new).mean[1], expected.mean, rtol=1e-5, atol=1e-6
        )
        fantasies = model.fantasize(case.x[12:].reshape(4, 2, 2), SobolQMCNormalSampler(torch.Size([3]), seed=0))
        assert fantasies.posterior(new).mean.shape == (3, 4, 3, 1)
    x = case.x[:4].clone().requires_grad_()
    for acquisition in (
        qKnowledgeGradient(model, num_fantasies=2)(x),
        qNegIntegratedPosteriorVariance(model, mc_points=case.x[:5])(x[:, None]),
    ):
        (gradient,) = torch.autograd.grad(acquisition.sum(), x)
        assert bool(gradient.isfinite().all())
        assert bool(gradient.abs().sum() > 0)


def test_copies_lists_and_states() -> None:
    case, _, _ = noisy(10)
    model = single_task(case.model, case.x, case.y).eval()
    model.covar_module.prior_precision = 0.3
    new = case.x[:3] + 0.2
    with torch.no_grad():
        expected = model.posterior(new).mean
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), ModelListGP(model, model).models[1]):
            assert_close(other.posterior(new).mean, expected)
        other = single_task(case.model, case.x, case.y).eval()
        other.load_state_dict(model.state_dict())
        assert_close(other.posterior(new).mean, expected)
        single = copy.deepcopy(model).float()
        assert_close(single.posterior(new.float()).mean, expected.float(), rtol=1e-3, atol=1e-3)
        assert {p.dtype for p in case.model.parameters()} == {torch.float64}


def test_inputs_are_transformed_before_the_network() -> None:
    case, _, _ = noisy(10)
    scaled = Normalize(2)(case.x).detach()
    model = SingleTaskGP(
        case.x, case.y, covar_module=TangentKernel(case.model), input_transform=Normalize(2), outcome_transform=None
    )
    plain = SingleTaskGP(scaled, case.y, covar_module=TangentKernel(case.model), outcome_transform=None)
    plain.load_state_dict(model.state_dict(), strict=False)
    new = case.x[:3] + 0.1
    with torch.no_grad():
        assert_close(model.posterior(new).mean, plain.posterior(model.input_transform(new)).mean, rtol=1e-6, atol=1e-6)
