"""Posteriors of Gaussian processes: every kernel by every solver, against dense algebra."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import gpytorch
import pytest
import torch
from gaussian_processes import KERNELS, NUMBERS, Model, inputs, kernels, model, scaled, with_lengthscale
from grids import covering
from torch import Tensor

from laplace_sampling import ConvergenceWarning
from laplace_sampling.kernels import KernelPosterior, condition
from laplace_sampling.kernels.kernel_rows import kernel_matrix
from laplace_sampling.kernels.prior_draws import PriorDraws
from laplace_sampling.solvers.placement import normal
from laplace_sampling.solvers.row_blocks import SOLVERS, PivotedCG, Projections

TIGHT: dict[str, Any] = {"tolerance": 3e-4, "max_passes": 2000}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preconditioners and blocks that are much smaller than the data here."""
    monkeypatch.setattr(PivotedCG, "_RANK", 25)
    monkeypatch.setattr(Projections, "_BLOCK", 75)


def dense(gp: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """The posterior mean and covariance of the function."""
    (data,), y = gp.train_inputs, gp.train_targets
    noise = gp.likelihood.noise.detach().expand(len(data))
    with torch.no_grad():
        K, cross, prior = (kernel_matrix(gp.covar_module, a, b) for a, b in ((data, data), (x, data), (x, x)))
        solved = torch.linalg.solve(K + torch.diag(noise), torch.cat([(y - 0.3)[:, None], cross.T], dim=1))
        return 0.3 + cross @ solved[:, 0], prior - cross @ solved[:, 1:]


def check_solvers(name: str, n: int, solvers: Iterable[str]) -> None:
    """Mean and samples, with the same draws, within 1e-3 of dense algebra."""
    gp, x = model(KERNELS[name](), n, noise=0.5), inputs(20, seed=5)
    wanted, _ = dense(gp, x)
    (data,) = gp.train_inputs
    draws = PriorDraws(gp.covar_module.double(), data.shape[1], 4, 0)
    white = normal(4, len(data), seed=1, dtype=torch.float64, device=data.device)
    with torch.no_grad():
        K, cross = kernel_matrix(gp.covar_module, data, data), kernel_matrix(gp.covar_module, x, data)
        K.diagonal().add_(gp.likelihood.noise)
        drawn = draws(data) + white * gp.likelihood.noise.sqrt()
        samples = wanted + draws(x) - torch.linalg.solve(K, drawn.T).T @ cross.T
    for solver in solvers:
        posterior = condition(gp, 4, solver=solver, **TIGHT)
        assert posterior.error <= 3e-4
        assert posterior.solver == solver
        for found, right in ((posterior.mean(x), wanted), (posterior.samples(x), samples)):
            assert float((found - right).norm() / right.norm()) <= 1e-3, (solver, posterior.passes)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_by_every_solver(name: str) -> None:
    check_solvers(name, 150, SOLVERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_of_two_thousand_data(name: str) -> None:
    """By a factor and by conjugate gradients: the others take minutes to this tolerance."""
    check_solvers(name, 2000, ("exact", "cg"))


@pytest.mark.parametrize("name", ["matern-3/2", "network and rest", "product"])
def test_covariance_of_samples(name: str) -> None:
    """4,096 samples, of 32 sets of features, entry by entry within four standard errors; and variances."""
    gp, x = model(KERNELS[name](), n=40), inputs(8, seed=5)
    wanted, covariance = dense(gp, x)
    posteriors = [condition(gp, 128, seed=1000 * seed) for seed in range(32)]
    deviations = torch.stack([posterior.samples(x) - wanted for posterior in posteriors])
    products = (deviations[..., :, None] * deviations[..., None, :]).mean(1)
    assert bool(((products.mean(0) - covariance).abs() <= 4 * products.std(0) / 32**0.5).all())
    variances = torch.stack([posterior.variance(x) for posterior in posteriors])
    assert bool(((variances.mean(0) - covariance.diagonal()).abs() <= 4 * variances.std(0) / 32**0.5).all())


def test_variances_that_little_noise_leaves() -> None:
    """They lie in rare frequencies: were these the same for all draws, variances would be off by 230 %."""
    smooth, rough = kernels.RBFKernel(**NUMBERS), kernels.MaternKernel(nu=1.5, active_dims=[0, 2])
    kernel = scaled(with_lengthscale(smooth, 1.0)) + scaled(with_lengthscale(rough, 1.0))
    gp, x = model(kernel, noise=1e-4), inputs(60, seed=5)
    wanted = dense(gp, x)[1].diagonal()
    ratio = condition(gp, 512, seed=1).variance(x) / wanted
    assert float((ratio - 1).square().mean().sqrt()) < 0.3


def generated(signal: float, noise: float, ratio: float, n: int, dimension: int = 6) -> tuple[Model, Tensor, Tensor]:
    """Data from the prior of a Matérn kernel of largest eigenvalue `n/ratio`; other inputs, and the function there."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n + 200, dimension, generator=generator, dtype=torch.float64)
    kernel = scaled(with_lengthscale(kernels.MaternKernel(nu=1.5), 1.0), signal).double().requires_grad_(False)
    low, high = 1e-2, 1e2
    for _ in range(25):
        kernel.base_kernel.lengthscale = (low * high) ** 0.5
        few = kernel(x[:400]).to_dense()
        larger = float(torch.linalg.eigvalsh(few)[-1]) / 400 < 1 / ratio
        low, high = ((low * high) ** 0.5, high) if larger else (low, (low * high) ** 0.5)
    f = PriorDraws(kernel, dimension, 1, 3)(x)[0]
    y = f[:n] + noise**0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    return Model(x[:n], y + 0.3, kernel, noise).double().eval(), x[n:], f[n:] + 0.3


# Signal, noise and n/λ of evidence on four sets of data: pol, bike, keggdirected, elevators.
SETS = [(0.161, 0.00135, 40.5), (0.026, 0.0001, 247.0), (0.121, 0.00286, 16.3), (0.502, 0.0988, 7.3)]


def function_error(found: KernelPosterior, exact: KernelPosterior, x: Tensor) -> float:
    """The largest of the mean and the samples."""
    pairs = [(found.mean(x) - 0.3, exact.mean(x) - 0.3), *zip(found.samples(x), exact.samples(x), strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def test_a_function_to_one_percent_in_a_hundred_passes() -> None:
    gp, x, _ = generated(*SETS[0], n=1500)
    exact = condition(gp, 8, solver="exact")
    for solver in ("cg", "dual_descent"):
        found = condition(gp, 8, solver=solver)
        assert found.passes <= 100
        assert function_error(found, exact, x) <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETS)
def test_a_function_to_one_percent_of_four_thousand_data(settings: tuple[float, float, float]) -> None:
    gp, x, _ = generated(*settings, n=4000)
    # The tolerance is one at the data; at other inputs the error of a draw may be larger by chance.
    exact, found = condition(gp, 16, solver="exact"), condition(gp, 16, solver="cg", tolerance=0.005)
    assert found.passes <= 100
    assert function_error(found, exact, x) <= 0.01


@covering(solver=["cg", "projections", "dual_descent", "auto"], settings=SETS)
def test_ten_passes_are_never_worse_than_five(solver: str, settings: tuple[float, float, float]) -> None:
    """Nearer to the exact functions, and in test error but for what chance gives an unfinished one (.1 %)."""
    gp, x, f = generated(*settings, n=1200)
    exact, errors, distances = condition(gp, 4, solver="exact"), [], []
    for passes in (5, 10):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            posterior = condition(gp, 4, solver=solver, max_passes=passes, tolerance=1e-6)
        assert posterior.passes <= passes + 1
        assert bool(posterior.samples(x).isfinite().all())
        errors.append(float((posterior.mean(x) - f).norm()))
        distances.append(function_error(posterior, exact, x))
    assert distances[1] <= distances[0] <= 1
    assert errors[1] <= 1.001 * errors[0]
    assert errors[0] <= float((f - 0.3).norm())


def test_targets_that_are_the_mean() -> None:
    gp = model(KERNELS["rbf"]())
    (data,) = gp.train_inputs
    gp.set_train_data(targets=gp.mean_module(data).detach(), strict=False)
    for solver in ("exact", "cg", "projections"):
        posterior = condition(gp, 1, solver=solver)
        assert posterior.error < 0.01
        torch.testing.assert_close(posterior.mean(inputs(5)), torch.full((5,), 0.3, dtype=torch.float64))


@pytest.mark.parametrize("passes", [3, 6, 8, 12])
def test_a_limit_of_passes(passes: int) -> None:
    """With the products of a start and of preconditioners, also where more data go on from a solution."""
    gp, x, _ = generated(*SETS[1], n=1200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        first = condition(gp, 1, solver="auto", max_passes=passes, tolerance=1e-6)
        more = first.extended(x[:7], x[:7, 0])
    assert max(first.passes, more.passes) <= passes + 0.1
    assert max(first.error, more.error) < 1


def test_few_data_are_factored_whatever_the_passes() -> None:
    gp = model(KERNELS["rbf"](), 300)
    assert condition(gp, 1, max_passes=1).error < 1e-8


@pytest.mark.usefixtures("small")
def test_early_conjugate_gradients_are_never_worse_than_no_data() -> None:
    """Without the state of the least residual they are, at such a noise and with a small preconditioner."""
    gp, _, _ = generated(50.0, 1e-4, 0.04, n=600)
    (x,) = gp.train_inputs
    exact, y = condition(gp, 2, solver="exact").mean(x), gp.train_targets - 0.3
    distances = [float((exact - 0.3).norm())]
    for passes in (2, 4, 8, 16):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            found = condition(gp, 2, solver="cg", max_passes=passes, tolerance=1e-6).mean(x)
        distances.append(float((found - exact).norm()))
    assert max(distances) <= 1.01 * float(y.norm())
    assert distances == sorted(distances, reverse=True)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("trial", range(10))
def test_no_divergence_whatever_the_settings(trial: int) -> None:
    """Signal, noise, length and dimension at random, with outliers among the inputs: never worse than no data."""
    generator = torch.Generator().manual_seed(trial)
    signal, noise, length = (10 ** (4 * torch.rand(3, generator=generator) - torch.tensor([2.0, 5.0, 2.0]))).tolist()
    x = torch.randn(400, 1 + trial % 5, generator=generator, dtype=torch.float64) ** 3
    y = x[:, 0].sin() + noise**0.5 * torch.randn(400, generator=generator, dtype=torch.float64)
    kernel = scaled(with_lengthscale(kernels.MaternKernel(nu=1.5), length), signal)
    if trial % 2:
        kernel = kernel + kernels.LinearKernel()
    gp = Model(x, y, kernel, max(noise, 1e-4)).double().eval()
    exact = condition(gp, 4, solver="exact").samples(x)
    # Residuals of no data are the right-hand sides, and bound the error of the functions.
    with torch.no_grad():
        nothing = float(
            PriorDraws(gp.covar_module, x.shape[1], 4, 0)(x).norm() + 2 * (y - 0.3).norm() + 40 * noise**0.5
        )
    for solver in ("cg", "projections", "dual_descent"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            posterior = condition(gp, 4, solver=solver, max_passes=30)
        assert float((posterior.samples(x) - exact).norm()) <= nothing, solver
        assert posterior.passes <= 31


@pytest.mark.usefixtures("small")
def test_noise_of_each_datum_and_more_data() -> None:
    """A warm start leads to the same functions in fewer passes; noise variances differ by a factor of 400."""
    n, more = 120, 6
    noise = torch.logspace(-1, 1.6, n + more, dtype=torch.float64)
    gp, x = model(KERNELS["rbf"](), n + more, noise), inputs(20, seed=5)
    (data,), y = gp.train_inputs, gp.train_targets
    first = Model(data[:n], y[:n], gp.covar_module, noise[:n]).double().eval()
    wanted, _ = dense(gp, x)
    for solver in SOLVERS:
        posterior = condition(first, 4, solver=solver, **TIGHT)
        extended = posterior.extended(data[n:], y[n:], noise[n:])
        torch.testing.assert_close(extended.mean(x), wanted, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(posterior.mean(x), dense(first, x)[0], rtol=1e-3, atol=1e-3)
        assert extended.samples(x).shape == (4, 20)
        if solver == "dual_descent":
            cold = condition(gp, 4, solver=solver, **TIGHT)
            assert extended.passes < cold.passes
    with pytest.raises(ValueError, match="fixed noise"):
        posterior.extended(data[n:], y[n:])
    with pytest.raises(ValueError, match="fixed noise"):
        posterior.log_prob(x, wanted)
    torch.testing.assert_close(
        posterior.log_prob(x, wanted, 0.1),
        torch.distributions.Normal(posterior.mean(x), (posterior.variance(x) + 0.1).sqrt()).log_prob(wanted),
    )


def test_features_before_the_kernel_and_derivatives_in_the_inputs() -> None:
    class Deep(Model):
        def forward(self, x: Tensor) -> Any:
            z = torch.cat([x[:, :1] ** 2, x[:, 1:2].sin()], dim=1)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(z))

    data = inputs(60)
    gp = Deep(data, data[:, 0] + data[:, 1], scaled(kernels.RBFKernel(active_dims=[1])), 0.01).double().eval()
    posterior, x = condition(gp, 3), inputs(4, seed=5).requires_grad_()
    with torch.no_grad(), gpytorch.settings.fast_pred_var(False):
        torch.testing.assert_close(posterior.mean(x.detach()), gp(x.detach()).mean, rtol=1e-6, atol=1e-6)
    assert torch.autograd.gradcheck(posterior.samples, x)


def test_the_model_stays_as_it_is_and_the_posterior_too() -> None:
    gp, x = model(KERNELS["tangent"]()), inputs(5, seed=5)
    gp(x).mean.sum().backward()  # what GPyTorch has cached
    before, cache = copy.deepcopy(gp.state_dict()), gp.prediction_strategy
    posterior = condition(gp, 4)
    samples = posterior.samples(x)
    assert gp.prediction_strategy is cache
    assert all(torch.equal(value, before[name]) for name, value in gp.state_dict().items())
    gp.covar_module.prior_precision = 100.0
    assert torch.equal(posterior.samples(x), samples)
    assert torch.equal(condition(model(KERNELS["tangent"]()), 4).samples(x), samples)


def test_float32_models_are_solved_in_float64() -> None:
    gp, x = model(KERNELS["rbf"]()), inputs(5, seed=5)
    (data,) = gp.train_inputs
    single = Model(data.float(), gp.train_targets.float(), KERNELS["rbf"](), 0.05).float().eval()
    found = condition(single, 4).samples(x.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), condition(gp, 4).samples(x), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("memory", [8 * 150**2, 4 * 150**2, 1000])
def test_a_matrix_that_memory_does_not_hold(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held in float64 or in float32, or computed again: the same functions."""
    gp, x = model(KERNELS["matern-3/2"]()), inputs(20, seed=5)
    wanted = condition(gp, 4).samples(x)
    monkeypatch.setattr("laplace_sampling.kernels.kernel_rows.free_memory", lambda device: 2.0 * memory)
    for solver in SOLVERS:
        posterior = condition(gp, 4, solver=solver, **TIGHT)
        assert float((posterior.samples(x) - wanted).norm() / wanted.norm()) <= 1e-3


@pytest.mark.parametrize("each", [False, True])
def test_products_with_a_matrix_in_float32(each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that is told bounds the true one, of which rounded entries take a fifth: they are off independently.

    With sums in float32 the true error is larger than the bound, with scales in float32 it takes more than a third.
    """
    random = torch.Generator().manual_seed(2)
    kernel = scaled(with_lengthscale(kernels.MaternKernel(nu=1.5, **NUMBERS), 3.0), 100.0)
    noise = 0.003 * 10 ** (0.3 * torch.rand(1500, generator=random, dtype=torch.float64)) if each else 0.003
    gp = model(kernel, 1500, noise=noise)
    (x,) = gp.train_inputs
    gp.set_train_data(x, gp.train_targets + torch.randn(1500, generator=random, dtype=torch.float64), strict=False)
    gp.eval()
    monkeypatch.setattr("laplace_sampling.kernels.kernel_rows.free_memory", lambda device: 2.0 * 4 * len(x) ** 2)
    wanted = dense(gp, x)[0] - 0.3
    posterior = condition(gp, 2, solver="cg", tolerance=1e-4)
    assert 0.01 < posterior.error < 0.1
    assert float((posterior.mean(x) - 0.3 - wanted).norm() / wanted.norm()) < 0.28 * posterior.error


def test_a_solver_that_does_not_converge_says_so() -> None:
    gp, x = model(KERNELS["rbf"](), noise=1e-4), inputs(2)
    with pytest.warns(ConvergenceWarning, match=r"above the tolerance of 0.01: raise `max_passes`") as warned:
        condition(gp, 4, solver="dual_descent", max_passes=1).extended(x, x[:, 0])
    assert [warning.filename for warning in warned] == [__file__] * 2


def test_inputs_as_users_have_them() -> None:
    """Whole numbers have functions that are none, and a vector is a column, as for GPyTorch."""
    gp, x = model(KERNELS["tanimoto"]()), inputs(5)
    posterior = condition(gp, 4)
    torch.testing.assert_close(posterior.samples(x.long()), posterior.samples(x.long().double()))
    column = Model(x[:, 0], x[:, 1], kernels.RBFKernel(), 0.1).double().eval()
    posterior = condition(column, 4)
    torch.testing.assert_close(posterior.mean(x[:, 0]), dense(column, x[:, :1])[0])
    assert posterior.extended(x[:, 2], x[:, 3]).mean(x[:, 0]).shape == (5,)


def test_what_has_no_posterior_here_is_refused_with_the_cure() -> None:
    gp, x = model(KERNELS["rbf"]()), inputs(10)
    two = model(KERNELS["rbf"]())
    two.set_train_data(targets=torch.zeros(2, 150), strict=False)
    empty = model(KERNELS["rbf"]())
    empty.train_inputs = None
    missing = model(KERNELS["rbf"]())
    missing.train_targets[3] = torch.nan
    student = model(KERNELS["rbf"]())
    student.likelihood = gpytorch.likelihoods.StudentTLikelihood()

    class Summed(Model):
        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x) + self.covar_module(x)
            )

    for given, error, cure in (
        (torch.nn.Linear(1, 1), TypeError, "ExactGP, .* a Linear"),
        (Model, TypeError, "is a class"),
        (copy.deepcopy(gp).train(), ValueError, "call `model.eval"),
        (two, ValueError, "a model for each output"),
        (empty, ValueError, "set_train_data"),
        (missing, ValueError, "leave these data out"),
        (student, TypeError, "StudentTLikelihood"),
        (Summed(x, x[:, 0], kernels.RBFKernel(), 0.1).double().eval(), TypeError, "add or multiply kernels"),
        (model(kernels.CosineKernel()), NotImplementedError, "CosineKernel"),
    ):
        with pytest.raises(error, match=cure):
            condition(given)
    with pytest.raises(ValueError, match=r"use one of.*projections"):
        condition(gp, solver="sdd")
    posterior, nan = condition(gp, 2), torch.full_like(x, torch.nan)
    with pytest.raises(ValueError, match=r"\[N, D\]"):
        posterior.mean(x[0])
    with pytest.raises(ValueError, match="got 10 and 9"):
        posterior.log_prob(x, x[:9, 0])
    assert posterior.log_prob(x, x[:, :1]).shape == (10,)
    for wrong in (-1.0, 0.0, torch.ones(3)):
        with pytest.raises(ValueError, match="positive variances"):
            posterior.log_prob(x, x[:, 0], wrong)
        with pytest.raises(ValueError, match="positive variances"):
            posterior.extended(x, x[:, 0], torch.as_tensor(wrong))
    with pytest.raises(FloatingPointError, match="NaN or infinity: check the inputs"):
        posterior.extended(nan, x[:, 0])
    with pytest.raises(FloatingPointError, match="NaN or infinity: check the inputs"):
        condition(Model(nan, x[:, 0], kernels.RBFKernel(), 0.1).double().eval())
    negative = model(KERNELS["tanimoto"]())
    negative.train_inputs[0].neg_()
    with pytest.raises(ValueError, match="negative"):
        condition(negative)
    assert "150 data, 2 samples" in repr(condition(gp, 2))


def test_a_model_of_botorch() -> None:
    """Its transforms are applied: inputs and targets are those of the user."""
    botorch: Any = pytest.importorskip("botorch")
    x = 100 * inputs(60)[:, :2]
    y = 1000 + 50 * (x[:, :1] / 20).sin()
    gp = botorch.models.SingleTaskGP(x, y, input_transform=botorch.models.transforms.Normalize(2)).eval()
    posterior, new = condition(gp, 512), 100 * inputs(20, seed=5)[:, :2]
    with torch.no_grad():
        wanted = gp.posterior(new)
    torch.testing.assert_close(posterior.mean(new), wanted.mean[:, 0])
    ratio = posterior.variance(new) / wanted.variance[:, 0]
    assert float((ratio - 1).abs().max()) < 4 * (2 / 512) ** 0.5 + 0.05
    log_prob = posterior.log_prob(new, wanted.mean[:, 0])
    noisy = gp.posterior(new, observation_noise=True)
    exact = torch.distributions.Normal(noisy.mean, noisy.variance.sqrt()).log_prob(wanted.mean)[:, 0]
    torch.testing.assert_close(log_prob, exact.detach(), rtol=0, atol=0.1)
    more = posterior.extended(new[:3], wanted.mean[:3] + 10)
    assert float((more.mean(new[:3]) - wanted.mean[:3, 0]).min()) > 1
