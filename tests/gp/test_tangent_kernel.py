"""The tangent kernel in linear_operator and GPyTorch."""

import copy
import math
import pickle
from collections.abc import Iterator

import pytest
import reference
import torch
from cases import Case, make_case
from problems import largest_evidence, noisy
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.gp import tangent_kernel
from laplace_sampling.gp.linear_operators import gpytorch, settings
from laplace_sampling.gp.posterior import GramPosterior
from laplace_sampling.gp.tangent_kernel import NetworkMean, TangentGP, TangentKernel, TangentKernelOperator
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.linearisation import Linearisation


def posterior_at(model: LinearModel, prior: GaussianPrior, alpha: float, b: float) -> GramPosterior:
    precision = torch.tensor([alpha], dtype=torch.float64)
    return GramPosterior.of(model.with_likelihood(Gaussian(b)), prior.with_precision(precision))


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """New torch warns where linear_operator does not choose; BoTorch switches conjugate gradients off at its import."""
    with torch.sparse.check_sparse_tensor_invariants(False), settings.fast_computations(True, True, True):
        yield


def network(outputs: int, inputs: int = 3, width: int = 40, dtype: torch.dtype = torch.float32) -> Linearisation:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))
    return Linearisation(net.to(dtype))


def test_the_operator_is_the_dense_matrix(case: Case) -> None:
    net = Linearisation(case.model)
    J = reference.jacobian(case.model, case.x).flatten(0, 1)
    v = torch.rand(net.num_parameters, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    K = (J * v) @ J.T
    operator = TangentKernelOperator(v, x1=case.x, network=net)
    assert operator.shape == K.shape
    b = torch.randn(2, len(K), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rhs in (b, b[0], b[0, :, 0]):
        assert_close(operator @ rhs, K @ rhs)
    assert_close(operator.to_dense(), K)
    assert_close(operator.diagonal(), K.diagonal())
    assert_close(operator[1, 2], K[1, 2])
    C = len(K) // len(case.x)
    other = TangentKernelOperator(v, x1=case.x[:2], x2=case.x, network=net)
    assert_close(other.to_dense(), K[: 2 * C])
    assert_close(other.mT @ b[0, : 2 * C], K[:, : 2 * C] @ b[0, : 2 * C])


def test_no_gradient_reaches_the_network() -> None:
    case = make_case("classification")
    net = Linearisation(case.model, ["2.*"])  # the first layer is not random, but has gradients
    x = case.x.clone().requires_grad_()
    variance = torch.ones(net.num_parameters, dtype=torch.float64, requires_grad=True)
    operator = TangentKernelOperator(variance, x1=x, network=net)
    operator.to_dense().sum().backward()
    (operator @ torch.ones(len(x) * 4, 1, dtype=torch.float64)).sum().backward()
    (NetworkMean(net)(x).sum() + NetworkMean(net, "affine")(x).sum()).backward()
    assert x.grad is not None
    assert variance.grad is not None
    assert all(p.grad is None for p in case.model.parameters())


def fixed_noise(b: float) -> gpytorch.likelihoods.GaussianLikelihood:
    likelihood = gpytorch.likelihoods.GaussianLikelihood(
        noise_constraint=gpytorch.constraints.GreaterThan(1e-8)
    ).double()
    likelihood.noise = 1 / b
    return likelihood


@pytest.mark.parametrize("mean", ["network", "affine", "homogeneous"])
def test_the_gaussian_process_is_the_exact_posterior(mean: str) -> None:
    case, model, prior = noisy(30)
    net = Linearisation(case.model)
    if mean == "affine":
        model = case.linear_model("affine")
    elif mean == "network":
        model = case.linear_model("homogeneous")
        model = type(model)(
            model.features, model.network_outputs, model.network_outputs, model.targets, model.likelihood
        )
    alpha, b = 0.6, 7.0
    exact = posterior_at(model, prior, alpha, b)
    likelihood = fixed_noise(b)
    gp = TangentGP(case.x, case.y[:, 0], likelihood, case.model, mean=mean, prior_precision=alpha)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    gp.train()
    value = mll(gp(case.x), case.y[:, 0]) * 30
    assert_close(value.detach(), exact.evidence.log_evidence(alpha, b), rtol=1e-6, atol=1e-6)
    value.backward()
    # α is trained through its logarithm.
    assert_close(
        gp.covar_module.raw_prior_precision.grad[0], exact.evidence.gradient(alpha, b)[0], rtol=1e-6, atol=1e-6
    )
    gp.eval()
    x = case.x[:4] + 0.3
    with torch.no_grad(), settings.fast_computations(solves=False):
        posterior = gp(x)
    theta = exact.mode_weights()
    J = reference.jacobian(case.model, x).flatten(0, 1)
    H = reference.ggn(reference.jacobian(case.model, case.x), torch.full((30, 1, 1), b).double())
    H = H + alpha * torch.eye(len(H), dtype=torch.float64)
    offset = {"network": net(x), "affine": net(x) - net.jvp(x, net.weights[None])[0], "homogeneous": 0 * net(x)}[mean]
    assert_close(posterior.mean, (offset[:, 0] + J @ theta), rtol=1e-6, atol=1e-6)
    assert_close(posterior.covariance_matrix, J @ torch.linalg.solve(H, J.T), rtol=1e-6, atol=1e-6)


def test_hyperparameters_are_trained_by_the_marginal_likelihood() -> None:
    case, model, prior = noisy(60)
    best = largest_evidence(model, prior)
    likelihood = fixed_noise(1.0)
    gp = TangentGP(case.x, case.y[:, 0], likelihood, case.model, mean="homogeneous")
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    network_calls = gp.covar_module.network.products
    gp.train()
    optimiser = torch.optim.LBFGS(gp.parameters(), lr=0.5, max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -mll(gp(case.x), case.y[:, 0])
        loss.backward()
        return loss

    optimiser.step(closure)
    assert float(gp.covar_module.prior_precision.detach()) == pytest.approx(best.precision, rel=1e-2)
    assert float(likelihood.noise.detach()) == pytest.approx(1 / best.noise_precision, rel=1e-2)
    assert network_calls["vjp"] == 60  # the matrix at α = 1 was made once


def test_a_batch_of_prior_variances_is_a_batch_of_matrices() -> None:
    case = make_case("classification")
    net = Linearisation(case.model)
    J = reference.jacobian(case.model, case.x).flatten(0, 1)
    v = torch.rand(3, 2, net.num_parameters, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    K = (J * v[..., None, :]) @ J.T
    operator = TangentKernelOperator(v, x1=case.x, network=net)
    assert_close(operator.to_dense(), K)
    assert_close(operator.diagonal(), K.diagonal(dim1=-2, dim2=-1))
    b = torch.randn(len(J), 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(operator @ b, K @ b)
    assert_close(operator[1].to_dense(), K[1])
    assert_close(operator[1, 0, 3, 4], K[1, 0, 3, 4])


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize("prior", ["g-prior", "isotropic"])
def test_the_gaussian_process_of_a_fitted_posterior(prior: str) -> None:
    case, _, _ = noisy(30)
    la = LinearisedLaplace(case.model, "regression", prior=prior, method="exact")
    la.fit_hyperparameters([(case.x, case.y)], progress=False)
    assert la.prior_scale_.shape == la.mode_.shape
    assert bool((la.prior_scale_ == 1).all()) == (prior == "isotropic")
    assert la.noise_precision_ is not None
    likelihood = fixed_noise(float(la.noise_precision_))
    options = {"scale": la.prior_scale_, "prior_precision": float(la.prior_precision_)}
    x = case.x[:4] + 0.3
    pred = la.predict(x)
    with torch.no_grad(), settings.fast_computations(solves=False):
        outputs = TangentGP(case.x, la.network(case.x)[:, 0], likelihood, case.model, **options).eval()(x)
        mode = TangentGP(case.x, case.y[:, 0], likelihood, case.model, mean="affine", **options).eval()(x)
    # On the network's outputs as targets nothing corrects it.
    assert_close(outputs.mean, pred.mean[:, 0])
    for posterior in (outputs, mode):
        assert_close(posterior.covariance_matrix, pred.joint_covariance(), rtol=1e-6, atol=1e-9)
    linear = la.network(x) + la.network.jvp(x, (la.mode_ - la.network.weights)[None])[0]
    assert_close(mode.mean, linear[:, 0], rtol=1e-6, atol=1e-6)


def test_kernels_are_combined() -> None:
    case, _, _ = noisy(20)
    kernel = TangentKernel(case.model, prior_precision=2.0) + gpytorch.kernels.RBFKernel().double()
    K = kernel(case.x).to_dense()
    J = reference.jacobian(case.model, case.x).flatten(0, 1)
    rbf = torch.exp(-0.5 * torch.cdist(case.x, case.x) ** 2 / math.log(2) ** 2)
    assert_close(K, J @ J.T / 2 + rbf)
    gp = TangentGP(case.x, case.y[:, 0], fixed_noise(4.0), case.model, kernel=kernel)
    gp.eval()
    x = case.x[:3].clone().requires_grad_()
    gp(x).variance.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    gp.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp)
    mll(gp(case.x), case.y[:, 0]).backward()
    assert all(p.grad is not None for p in gp.parameters())


def test_several_outputs_are_a_multitask_process() -> None:
    case, model, prior = noisy(25, outputs=2)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2, rank=0, has_task_noise=False).double()
    likelihood.noise = 0.2
    gp = TangentGP(case.x, case.y, likelihood, case.model, mean="homogeneous", prior_precision=0.7)
    gp.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    value = mll(gp(case.x), case.y)
    exact = posterior_at(model, prior, 0.7, 5.0)
    assert_close(value.detach() * 50, exact.evidence.log_evidence(0.7, 5.0), rtol=1e-6, atol=1e-6)
    gp.eval()
    with torch.no_grad():
        assert_close(gp(case.x[:5]).mean, exact.mode.outputs[:5], rtol=1e-5, atol=1e-5)


def test_batches_shapes_and_large_matrices() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1)).double()
    x = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.linspace(0.5, 2, Linearisation(net).num_parameters, dtype=torch.float64)
    kernel = TangentKernel(net, scale=scale, input_shape=(1, 3, 3), prior_precision=3.0)
    J = [reference.jacobian(net, rows.reshape(-1, 1, 3, 3)).flatten(0, 1) * scale for rows in x]
    assert_close(kernel(x).to_dense(), torch.stack([j @ j.T / 3 for j in J]))
    assert_close(kernel(x, x[:1]).to_dense()[1], J[1] @ J[0].T / 3)
    assert_close(kernel(x).diagonal(), torch.stack([(j**2).sum(1) / 3 for j in J]))
    assert_close(kernel(x[0]).diagonal(), (J[0] ** 2).sum(1) / 3)
    large = TangentKernel(net, scale=scale, input_shape=(1, 3, 3), prior_precision=3.0, dense_size=2)
    assert_close(large(x[0]) @ torch.ones(5, 1, dtype=torch.float64), (J[0] @ J[0].T / 3).sum(1, keepdim=True))
    assert_close(large(x[0], x[1]).to_dense(), J[0] @ J[1].T / 3)
    with pytest.raises(NotImplementedError, match="batches"):
        kernel.forward(x, x, last_dim_is_batch=True)


def test_the_matrix_that_is_kept_is_of_the_present_scale_and_inputs() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    kernel = TangentKernel(net)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def check() -> None:
        J = reference.jacobian(net, x).flatten(0, 1)
        assert_close(kernel(x).to_dense(), (J * kernel.variance) @ J.T)

    check()
    x.mul_(2)
    check()
    kernel.load_state_dict({**kernel.state_dict(), "variance": torch.linspace(0.5, 2, 17).double()})
    check()
    kept = kernel._cached
    check()
    assert kernel._cached is kept


def test_predictions_are_of_the_network_that_was_given() -> None:
    case, _, _ = noisy(20)
    net = copy.deepcopy(case.model)
    gp = TangentGP(case.x, case.y[:, 0], fixed_noise(4.0), net).eval()
    x = case.x[:3] + 0.1
    gp(x).mean.sum().backward()
    again = TangentGP(case.x, case.y[:, 0], fixed_noise(4.0), copy.deepcopy(net)).eval()
    with torch.no_grad():
        net[0].weight.mul_(1.5)
        assert_close(gp(x).mean, again(x).mean)
        assert_close(gp(x).variance, again(x).variance)


@pytest.mark.parametrize("dense_size", [4000, 2])
def test_inference_mode_leaves_nothing_that_cannot_be_differentiated(dense_size: int) -> None:
    case, _, _ = noisy(6)
    kernel = TangentKernel(case.model, dense_size=dense_size)
    J = reference.jacobian(case.model, case.x).flatten(0, 1)
    ones = torch.ones(6, 1, dtype=torch.float64)
    with torch.inference_mode():
        x = case.x.clone()
        assert_close(kernel(x) @ ones, J @ J.T @ ones)
        assert_close(kernel(x).diagonal(), (J**2).sum(1))
    for inputs in (case.x, x):  # the second is an inference tensor
        kernel.zero_grad()
        (kernel(inputs) @ ones).sum().backward()
        assert_close(kernel.raw_prior_precision.grad, -(J @ J.T).sum()[None])


def test_parts_of_a_kernel_are_where_the_network_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is computed on this device: GPyTorch would look at the value.
    monkeypatch.setattr(TangentKernel, "initialize", lambda self, **values: self)
    network = Linearisation(nn.Linear(2, 1))
    network.module.to("meta")
    kernel = TangentKernel(network, scale=torch.ones(3))
    assert {t.device.type for t in (kernel.raw_prior_precision, kernel.variance)} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dense_size", [4000, 1])
def test_a_process_on_a_gpu_of_a_network_that_is_not(dense_size: int) -> None:
    case, _, _ = noisy(6)
    options = {"prior_precision": 2.0, "dense_size": dense_size, "mean": "affine"}
    gp = TangentGP(case.x, case.y[:, 0], fixed_noise(4.0), case.model, **options).eval()
    moved = copy.deepcopy(gp).cuda()
    x = case.x[:3] + 0.1
    with torch.no_grad():
        expected, found = gp(x), moved(x.cuda())
        assert_close(found.mean.cpu(), expected.mean)
        assert_close(found.covariance_matrix.cpu(), expected.covariance_matrix)
        assert_close(moved.covar_module(case.x.cuda())[1, 2].cpu(), gp.covar_module(case.x)[1, 2])
    assert {p.device.type for p in moved.mean_module.network.source.parameters()} == {"cpu"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_kernel_of_a_network_on_a_gpu() -> None:
    case, _, _ = noisy(6)
    K = TangentKernel(case.model, prior_precision=2.0)(case.x).to_dense()
    assert_close(
        TangentKernel(copy.deepcopy(case.model).cuda(), prior_precision=2.0)(case.x.cuda()).to_dense().cpu(), K
    )


def test_state_and_prior_of_the_precision() -> None:
    net = network(1, dtype=torch.float64)
    prior = gpytorch.priors.GammaPrior(2.0, 1.0)
    kernel = TangentKernel(net, precision_prior=prior, prior_precision=0.5)
    assert float(kernel.prior_precision.detach()) == pytest.approx(0.5)
    kernel.prior_precision = 9.0
    again = TangentKernel(net, precision_prior=gpytorch.priors.GammaPrior(2.0, 1.0))
    again.load_state_dict(kernel.state_dict())
    assert float(again.prior_precision.detach()) == pytest.approx(9.0)
    assert [name for name, _ in kernel.named_parameters()] == ["raw_prior_precision"]
    assert len(list(kernel.named_priors())) == 1


def test_kernels_of_several_outputs_are_combined() -> None:
    case, _, _ = noisy(12, outputs=2)
    rbf = gpytorch.kernels.RBFKernel() + gpytorch.kernels.MaternKernel()
    kernel = TangentKernel(case.model) + gpytorch.kernels.MultitaskKernel(rbf, num_tasks=2, rank=1).double()
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    gp = TangentGP(case.x, case.y, likelihood, case.model, kernel=kernel).train()
    gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)(gp(case.x), case.y).backward()
    assert all(p.grad is not None for p in gp.parameters())
    assert gp.eval()(case.x[:3] + 0.1).mean.shape == (3, 2)


def test_refusals_of_the_gaussian_process() -> None:
    one, two = noisy(6)[0], noisy(6, outputs=2)[0]
    single, multiple = fixed_noise(1.0), gpytorch.likelihoods.MultitaskGaussianLikelihood(num_tasks=2).double()
    kernel = TangentKernel(one.model)
    message = "nonsense"
    with pytest.raises(ValueError, match=message):
        TangentGP(
            one.x,
            one.y[:, 0],
            single,
            one.model,
            kernel=kernel,
            prior_precision=5.0,
            scale=torch.ones(2),
            nonsense=1,
        )
    with pytest.raises(ValueError, match="train_y"):
        TangentGP(one.x, one.y, single, one.model)
    with pytest.raises(ValueError, match="train_y"):
        TangentGP(two.x, two.y[:, 0], multiple, two.model)
    for likelihood in (single, gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.ones(6).double())):
        with pytest.raises(ValueError, match="`MultitaskGaussianLikelihood"):
            TangentGP(two.x, two.y, likelihood, two.model)
    with pytest.raises(ValueError, match="`GaussianLikelihood"):
        TangentGP(one.x, one.y[:, 0], multiple, one.model)
    with pytest.raises(ValueError, match="RBFKernel"):
        TangentGP(two.x, two.y, multiple, two.model, kernel=gpytorch.kernels.RBFKernel().double())


def test_refusals() -> None:
    net = network(1)
    with pytest.raises(ValueError, match="scale"):
        TangentKernel(net, scale=torch.ones(3))
    with pytest.raises(ValueError, match="prior_precision"):
        TangentKernel(net, prior_precision=0.0)
    with pytest.raises(ValueError, match="kind"):
        NetworkMean(net, "zero")


def matrices(net: nn.Module, x: Tensor) -> Tensor:
    """`φ(X) φ(X)ᵀ` of each matrix of a batch of inputs."""
    J = [reference.jacobian(net, rows).flatten(0, 1) for rows in x.flatten(0, -3)]
    return torch.stack([j @ j.T for j in J]).unflatten(0, x.shape[:-2])


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("dense_size", [4000, 1])
def test_a_batch_of_kernels(outputs: int, dense_size: int) -> None:
    case, _, _ = noisy(6, outputs=outputs)
    alpha = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    kernel = TangentKernel(case.model, batch_shape=[2], prior_precision=alpha, dense_size=dense_size)
    assert kernel.batch_shape == (2,)
    assert_close(kernel.prior_precision.detach(), alpha)
    K = matrices(case.model, case.x[None])[0] / alpha[..., None]
    assert_close(kernel(case.x).to_dense(), K)
    assert_close(kernel(case.x).diagonal(), K.diagonal(dim1=-2, dim2=-1))
    ones = torch.ones(len(K[0]), 1, dtype=torch.float64)
    assert_close(kernel(case.x) @ ones, K @ ones)
    (kernel(case.x) @ ones).sum().backward()
    assert_close(kernel.raw_prior_precision.grad, -(K @ ones).sum((1, 2))[:, None])
    # Each with inputs of its own, or of a larger batch that broadcasts.
    x = case.x + torch.arange(6, dtype=torch.float64).reshape(3, 2, 1, 1) / 10
    assert_close(kernel(x).to_dense(), matrices(case.model, x) / alpha[..., None])
    assert_close(kernel(x, case.x).to_dense()[2, 1], kernel[1](x[2, 1], case.x).to_dense())
    assert_close(kernel(x)[1, 1].to_dense(), matrices(case.model, x)[1, 1] / 3)
    expanded = kernel.expand_batch(3, 2)
    assert expanded.batch_shape == (3, 2)
    assert_close(expanded(x).to_dense(), kernel(x).to_dense())
    assert expanded[0, 1].batch_shape == ()
    assert {id(k.network) for k in (kernel, expanded, expanded[0, 1])} == {id(kernel.network)}
    kernel.prior_precision = 2.0
    assert kernel.prior_precision.flatten().tolist() == pytest.approx([2.0, 2.0])
    with pytest.raises(ValueError, match="prior_precision"):
        TangentKernel(case.model, batch_shape=[2], prior_precision=-alpha)


def test_matrices_of_a_batch_are_made_once_from_one_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    case, _, _ = noisy(6)
    kernel = TangentKernel(case.model, batch_shape=[4])
    x = case.x + torch.arange(4, dtype=torch.float64)[:, None, None] / 10
    K = matrices(case.model, x)
    calls = []
    jacobian = Linearisation.jacobian
    monkeypatch.setattr(Linearisation, "jacobian", lambda *args, **kw: calls.append(args) or jacobian(*args, **kw))
    for _ in range(2):
        kernel.prior_precision = 2.0
        assert_close(kernel(x).to_dense(), K / 2)
    assert len(calls) == 1
    # Where the rows of all do not fit in a block, or not those of one.
    for limit in (2 * 6 * 33, 5):
        monkeypatch.setattr(tangent_kernel, "NUMBERS_TOGETHER", limit)
        assert_close(TangentKernel(case.model)(x, x + 0).to_dense(), K)
        assert_close(TangentKernel(case.model)(x, diag=True), K.diagonal(dim1=-2, dim2=-1))


def test_the_network_takes_the_active_columns() -> None:
    case, _, _ = noisy(8)
    others = torch.randn(8, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = torch.cat([case.x[:, :1], others, case.x[:, 1:]], dim=1)
    K = matrices(case.model, case.x[None])[0]
    for batch_shape in ((), (2,)):
        kernel = TangentKernel(case.model, active_dims=[0, 3], batch_shape=batch_shape)
        assert_close(kernel(x).to_dense(), K.expand(*batch_shape, 8, 8))
        assert_close(kernel.expand_batch(3, *batch_shape)(x)[0].to_dense(), kernel(x).to_dense())
    assert_close(NetworkMean(case.model, active_dims=[0, 3])(x), NetworkMean(case.model)(case.x))
    whole = TangentGP(case.x, case.y[:, 0], fixed_noise(4.0), case.model, mean="affine").eval()
    gp = TangentGP(x, case.y[:, 0], fixed_noise(4.0), case.model, mean="affine", active_dims=torch.tensor([0, 3]))
    with torch.no_grad():
        assert_close(gp.eval()(x + 0.1).mean, whole(case.x + 0.1).mean)
    rbf = gpytorch.kernels.RBFKernel(active_dims=[1]).double()
    total = TangentKernel(case.model, active_dims=[0, 3]) + rbf
    assert_close(total(x).to_dense(), K + rbf(x).to_dense())
    gp = TangentGP(x, case.y[:, 0], fixed_noise(4.0), case.model, kernel=total, active_dims=[0, 3])
    assert gp.eval()(x + 0.1).mean.shape == (8,)


def test_inputs_of_integers_leave_the_prior_as_it_is() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1)).double()
    scale = torch.full((22,), 0.5, dtype=torch.float64)
    tokens = torch.tensor([[0, 1], [2, 4], [3, 3]])
    J = reference.jacobian(net, tokens).flatten(0, 1)
    kernel = TangentKernel(net, scale=scale)
    assert_close(kernel(tokens).to_dense(), 0.25 * J @ J.T)
    assert_close(kernel(tokens[None]).to_dense()[0], 0.25 * J @ J.T)


def test_a_kernel_in_another_dtype_than_its_network() -> None:
    case, _, _ = noisy(6)
    K = matrices(case.model, case.x[None])[0]
    kernel = TangentKernel(case.model, prior_precision=0.7).float()
    assert kernel(case.x.float()).to_dense().dtype == torch.float32
    assert_close(kernel(case.x.float()).to_dense().double(), K / 0.7, rtol=1e-5, atol=1e-6)
    assert {p.dtype for p in case.model.parameters()} == {torch.float64}
    # All digits of a number that is given.
    assert float(TangentKernel(case.model, prior_precision=0.7).prior_precision.detach()) == pytest.approx(
        0.7, rel=1e-14
    )


def test_kernels_with_a_prior_are_pickled_and_copied() -> None:
    case, _, _ = noisy(6)
    kernel = TangentKernel(case.model, precision_prior=gpytorch.priors.GammaPrior(2.0, 1.0), prior_precision=3.0)
    for other in (pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel)):
        assert_close(other(case.x).to_dense(), kernel(case.x).to_dense())
        other.prior_precision = 1.0
        _, module, prior, closure, _ = next(other.named_priors())
        assert_close(prior.log_prob(closure(module)), prior.log_prob(torch.ones(1, dtype=torch.float64)))
    assert float(kernel.prior_precision.detach()) == pytest.approx(3.0)
