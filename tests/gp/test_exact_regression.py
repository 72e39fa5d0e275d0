"""Exact regression in observation space, against dense algebra in weight space with `H = M + A`."""

import math
import os
import subprocess
import sys

import pytest
import reference
import torch
from cases import Case, make_case
from flat_settings import laplace_of
from grids import covering
from problems import CLOSE, make_prior, noisy
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import ConvergenceWarning, LinearisedLaplace
from laplace_sampling.data.batches import Layout
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.evidence.em import fit_em
from laplace_sampling.evidence.fixed_point import fit_path
from laplace_sampling.gp.exact_regression import ExactRegression
from laplace_sampling.gp.tuned_regression import fit_exact_regression
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.network_features import NetworkFeatures, features_at
from laplace_sampling.linear_model.priors.g_prior import GPrior
from laplace_sampling.linear_model.priors.isotropic_prior import IsotropicPrior
from laplace_sampling.linear_model.priors.layerwise_prior import LayerwisePrior
from laplace_sampling.linear_model.priors.prior import GaussianPrior, overall_precision
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.dense import Dense

REGRESSIONS = ["regression", "regression_many_data", "regression_per_output", "regression_flat", "image_regression"]
PRIORS = {"isotropic": IsotropicPrior(), "g-prior": GPrior(), "layerwise": LayerwisePrior()}


class Primal:
    """Posterior and evidence in weight space, at given `α` and noise variances, `[N, C]`."""

    def __init__(self, case: Case, model: LinearModel, A: Tensor, noise: Tensor) -> None:
        self.J = reference.jacobian(case.model, case.x)
        self.A, self.B = A, (1 / noise)
        self.r = (case.y.reshape(noise.shape) - model.offset).detach()
        M = torch.einsum("ncp,nc,ncq->pq", self.J, self.B, self.J)
        self.H = M + torch.diag(A)
        self.mode = torch.linalg.solve(self.H, torch.einsum("ncp,nc,nc->p", self.J, self.B, self.r))
        self.gamma = float(torch.linalg.solve(self.H, M).trace())
        error = self.r - self.J @ self.mode
        self.sse = float((self.B * error**2).sum())
        logdet = torch.linalg.slogdet(self.H / A.sqrt() / A.sqrt()[:, None])[1]
        self.evidence = float(
            -0.5 * (self.sse + (A * self.mode**2).sum() + logdet - self.B.log().sum())
            - 0.5 * noise.numel() * math.log(2 * math.pi)
        )


def setting(name: str, prior: str, kind: str = "affine") -> tuple[Case, LinearModel, GaussianPrior]:
    case = make_case(name)
    model = case.linear_model(kind)
    return case, model, make_prior(model, case, prior)


def noise_of(model: LinearModel, exact: ExactRegression, b: float) -> Tensor:
    return exact.noise_scale / b


@covering(name=REGRESSIONS, prior=PRIORS)
def test_everything_agrees_with_weight_space(name: str, prior: str) -> None:
    case, model, built = setting(name, prior)
    exact = ExactRegression.of(model, built)
    x = case.x[:3] * 1.7 + 0.3
    at = exact.at(features_at(Linearisation(case.model), x))
    J = reference.jacobian(case.model, x)
    for alpha, b in ((0.3, 0.5), (2.0, 40.0), (500.0, 3.0)):
        A = built.diagonal() * alpha / overall_precision(built)
        primal = Primal(case, model, A, exact.noise_scale / b)
        assert_close(float(exact.log_evidence(alpha, b)), primal.evidence, **CLOSE)
        assert_close(float(exact.effective_dimension(alpha, b)), primal.gamma, **CLOSE)
        assert_close(exact.mode(alpha, b), primal.mode, **CLOSE)
        assert_close(exact.mode_outputs(alpha, b), model.offset + primal.J @ primal.mode, **CLOSE)
        assert_close(float(exact.mode_norm(alpha, b)), float((A * primal.mode**2).sum()) / alpha, **CLOSE)
        assert_close(float(exact.squared_error(alpha, b) * b), primal.sse, **CLOSE)
        assert_close(at.mean(alpha, b), J @ primal.mode, **CLOSE)
        flat = J.flatten(0, 1)
        joint = flat @ torch.linalg.solve(primal.H, flat.T)
        C = J.shape[1]
        blocks = torch.stack([joint[i * C : (i + 1) * C, i * C : (i + 1) * C] for i in range(len(x))])
        assert_close(at.joint_covariance(alpha, b), joint, **CLOSE)
        assert_close(at.covariance(alpha, b), blocks, **CLOSE)
        assert_close(at.stddev(alpha, b) ** 2, blocks.diagonal(dim1=1, dim2=2), **CLOSE)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_derivatives_of_the_evidence(name: str) -> None:
    _, model, built = setting(name, "g-prior")
    exact = ExactRegression.of(model, built)
    logs = torch.tensor([0.4, -0.7], dtype=torch.float64, requires_grad=True)
    exact.log_evidence(logs[0].exp(), logs[1].exp()).backward()
    alpha, b = logs.detach().exp().tolist()
    gradient = exact.log_evidence_gradient(alpha, b)
    assert_close(gradient, logs.grad)
    step = 1e-5
    for i in range(2):
        ends = [[alpha, b], [alpha, b]]
        ends[0][i] *= math.exp(-step)
        ends[1][i] *= math.exp(step)
        difference = (exact.log_evidence(*ends[1]) - exact.log_evidence(*ends[0])) / (2 * step)
        assert_close(gradient[i], difference, rtol=1e-6, atol=1e-6)
        bend = (exact.log_evidence_gradient(*ends[1]) - exact.log_evidence_gradient(*ends[0])) / (2 * step)
        assert_close(exact.log_evidence_hessian(alpha, b)[i], bend, rtol=1e-6, atol=1e-6)
    grid = torch.tensor([[0.5, 2.0], [3.0, 9.0]], dtype=torch.float64)
    values = exact.log_evidence(grid[:, 0], grid[:, 1])
    assert_close(values[1], exact.log_evidence(3.0, 9.0))
    assert values.shape == (2,)


def test_both_hyperparameters_are_at_the_maximum() -> None:
    _, model, prior = noisy(60)
    exact = ExactRegression.of(model, prior)
    found = exact.fit()
    assert found.converged
    assert found.num_maxima == 1
    assert not found.at_bounds
    assert max(map(abs, found.gradient)) < 1e-7
    assert 0.2 < found.precision * 0.7**2 < 5
    assert found.noise_precision == pytest.approx(1 / 0.3**2, rel=0.4)
    # MacKay's fixed point, and the identity that holds there only.
    gamma, alpha, b = (
        exact.effective_dimension(found.precision, found.noise_precision),
        found.precision,
        found.noise_precision,
    )
    assert float(gamma / exact.mode_norm(alpha, b)) == pytest.approx(alpha, rel=1e-8)
    assert float((60 - gamma) / exact.squared_error(alpha, b)) == pytest.approx(b, rel=1e-8)
    best = float(exact.log_evidence(alpha, b))
    assert best == found.log_evidence
    for du, dv in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01), (0.01, 0.01)):
        assert float(exact.log_evidence(alpha * math.exp(du), b * math.exp(dv))) < best
    information = -exact.log_evidence_hessian(alpha, b)
    assert_close(torch.tensor(found.standard_errors).double() ** 2, torch.linalg.inv(information).diagonal())


@pytest.mark.parametrize(("precision", "noise"), [(True, False), (False, True), (False, False)])
def test_one_or_none_is_learnt(precision: bool, noise: bool) -> None:
    _, model, prior = noisy(40)
    exact = ExactRegression.of(model, prior)
    found = exact.fit(learn_precision=precision, learn_noise=noise)
    assert found.converged
    for learnt, slope, error in zip((precision, noise), found.gradient, found.standard_errors, strict=True):
        assert (abs(slope) < 1e-7) == learnt
        assert (error > 0) == learnt
    assert (found.precision == overall_precision(prior)) == (not precision)
    assert (found.noise_precision == 1.0) == (not noise)
    fixed = ExactRegression.of(model.with_likelihood(Gaussian(1.0, learn=False)), prior).fit(learn_precision=precision)
    if not noise:
        assert fixed == found


def test_noise_at_the_network() -> None:
    """`b Σ(y − f)² = N·C − γ`, and `α` of largest evidence there; the same as of the mode where the network is one."""
    _, model, prior = noisy(60)
    at_mode = fit_exact_regression(model, prior)
    alpha, b = at_mode.optimum.precision, at_mode.optimum.noise_precision
    learnt = Gaussian(1.0, noise_at="network")
    f = at_mode.posterior.mode_outputs(alpha, b)
    same = fit_exact_regression(LinearModel(model.features, model.offset, f, model.targets, learnt), prior).optimum
    assert same.precision == pytest.approx(alpha, rel=1e-6)
    assert same.noise_precision == pytest.approx(b, rel=1e-6)
    f = f + 0.4 * torch.sin(torch.arange(60).double())[:, None]
    model = LinearModel(model.features, model.offset, f, model.targets, learnt)
    found = fit_exact_regression(model, prior)
    alpha, b = found.optimum.precision, found.optimum.noise_precision
    assert b < 0.8 * same.noise_precision
    assert found.optimum.converged
    assert abs(found.optimum.gradient[0]) < 1e-8
    assert float(found.likelihood.noise_precision) == b
    gamma = float(found.posterior.effective_dimension(alpha, b))
    assert b * float((model.targets - f).square().sum()) == pytest.approx(60 - gamma, rel=1e-6)
    # EM and evidence paths end there too.
    dense = LinearModel(DenseFeatures.of(model.features), model.offset, f, model.targets, learnt)
    em = fit_em(dense, prior, Draws(1, 0), Dense(), max_steps=300, tolerance=1e-10)
    path = fit_path(dense, prior, 0, 0, exact=True)
    for result in (em, path):
        assert float(result.prior.precision) == pytest.approx(alpha, rel=1e-6)
        assert float(result.likelihood.noise_precision) == pytest.approx(b, rel=1e-6)
    # What is given is kept, and so are bounds.
    fixed = model.with_likelihood(Gaussian(3.0, learn=False, noise_at="network"))
    assert fit_exact_regression(fixed, prior).optimum.noise_precision == pytest.approx(3.0)
    kept = fit_exact_regression(model, prior, learn_precision=False).optimum
    assert kept.precision == pytest.approx(overall_precision(prior))
    bounded = fit_exact_regression(model, prior, noise_bounds=(1e-6, 0.5 * b)).optimum
    assert bounded.noise_precision == pytest.approx(0.5 * b)
    assert bounded.at_bounds == ("noise_precision",)
    assert not bounded.converged
    with pytest.raises(ValueError, match="noise_at='data'"):
        Gaussian(noise_at="data")


def test_noise_of_each_output_at_the_network() -> None:
    _, model, prior = noisy(50, outputs=3)
    generator = torch.Generator().manual_seed(4)
    scales = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    targets = model.targets + scales * torch.randn(50, 3, generator=generator, dtype=torch.float64)
    given = torch.rand(50, generator=generator, dtype=torch.float64) + 0.5
    learnt = Gaussian(torch.ones(3), noise_at="network")
    model = LinearModel(DenseFeatures.of(model.features), model.offset, 0.5 * targets, targets, learnt)
    found = fit_exact_regression(model, prior, noise_variances=given)
    assert found.optimum.converged
    b, exact = torch.as_tensor(found.likelihood.noise_precision), found.posterior
    alpha, overall = found.optimum.precision, found.optimum.noise_precision
    blocks = exact.at(model.features).covariance(alpha, overall)
    gamma = (b * blocks.diagonal(dim1=1, dim2=2) / given[:, None]).sum(0)
    assert_close(b * ((0.5 * targets) ** 2 / given[:, None]).sum(0), 50 - gamma, rtol=1e-6, atol=0)
    assert abs(found.optimum.gradient[0]) < 1e-7


def test_em_ends_at_the_same_hyperparameters() -> None:
    _, model, prior = noisy(60)
    dense = LinearModel(
        DenseFeatures.of(model.features), model.offset, model.network_outputs, model.targets, model.likelihood
    )
    em = fit_em(dense, prior, Draws(1, 0), Dense(), max_steps=300, tolerance=1e-10)
    found = fit_exact_regression(model, prior)
    assert float(em.prior.precision) == pytest.approx(found.optimum.precision, rel=1e-7)
    assert float(em.likelihood.noise_precision) == pytest.approx(found.optimum.noise_precision, rel=1e-7)
    assert float(found.prior.precision) == pytest.approx(found.optimum.precision, rel=1e-8)
    assert float(found.likelihood.noise_precision) == found.optimum.noise_precision
    assert_close(
        found.posterior.mode(found.optimum.precision, found.optimum.noise_precision), em.mode, rtol=1e-6, atol=1e-7
    )


def test_bounds_are_kept_and_told() -> None:
    _, model, prior = noisy(40)
    exact = ExactRegression.of(model, prior)
    inside = exact.fit()
    bounds = (1e-8, 0.5 * inside.precision)
    found = exact.fit(precision_bounds=bounds)
    assert found.precision == bounds[1]
    assert found.at_bounds == ("precision",)
    assert not found.converged
    assert abs(found.gradient[1]) < 1e-8  # the other is at its best there
    found = exact.fit(noise_bounds=(2 * inside.noise_precision, 1e9))
    assert found.at_bounds == ("noise_precision",)
    assert abs(found.gradient[0]) < 1e-8
    for options in ({"precision_bounds": (1.0, 0.5)}, {"noise_bounds": (0.0, 1.0)}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}"):
            exact.fit(**options)
    # Targets without noise, that the model can fit: the noise goes to its bound, and α to its best there.
    rows = torch.eye(10, 50, dtype=torch.float64)[:, None]
    features = DenseFeatures(rows * torch.logspace(0, -12, 10, dtype=torch.float64)[:, None, None])
    zero = torch.zeros(10, 1, dtype=torch.float64)
    few = LinearModel(features, zero, zero, features.outputs(torch.ones(1, 50).double())[0], model.likelihood)
    wide = IsotropicPrior().build(few.ggn(few.offset), ([], torch.zeros(0)), Draws(1, 0).noise(1))
    decomposed = ExactRegression.of(few, wide)
    found = decomposed.fit(noise_bounds=(1e-3, 1e30))
    assert found.noise_precision == 1e30
    assert found.at_bounds == ("noise_precision",)
    assert found.precision == pytest.approx(1.0, rel=1e-4)  # c² = λ
    # Targets that are nothing but noise say nothing of the weights.
    noise = LinearModel(
        model.features, model.offset, model.network_outputs, torch.zeros(40, 1).double(), model.likelihood
    )
    found = ExactRegression.of(noise, prior).fit(learn_noise=False)
    assert found.at_bounds == ("precision",)
    assert found.precision == 1e12


@pytest.mark.parametrize("shape", ["datum", "output"])
def test_noise_given_for_each_datum(shape: str) -> None:
    case, model, prior = noisy(30, outputs=2)
    generator = torch.Generator().manual_seed(3)
    given = torch.rand(30, 2, generator=generator, dtype=torch.float64) + 0.2
    if shape == "datum":
        given = given[:, 0]
    full = given.reshape(30, -1).expand(30, 2)
    model = model.with_likelihood(Gaussian(1.0, learn=False))
    found = fit_exact_regression(model, prior, noise_variances=given)
    alpha, b = found.optimum.precision, found.optimum.noise_precision
    assert b == 1.0
    assert found.optimum.converged
    exact = found.posterior
    primal = Primal(case, model, torch.full((model.features.size,), alpha).double(), full)
    assert_close(float(exact.log_evidence(alpha, 1.0)), primal.evidence, **CLOSE)
    assert_close(exact.mode(alpha, 1.0), primal.mode, **CLOSE)
    assert_close(exact.mode_outputs(alpha, 1.0), primal.J @ primal.mode, **CLOSE)
    at = exact.at(features_at(Linearisation(case.model), case.x[:2]))
    J = primal.J[:2].flatten(0, 1)
    assert_close(at.joint_covariance(alpha, 1.0), J @ torch.linalg.solve(primal.H, J.T), **CLOSE)
    # A common factor may be learnt: then ratios count, not the unit.
    learnt = [
        fit_exact_regression(
            model.with_likelihood(Gaussian(1.0, noise_at="mode")), prior, noise_variances=given * unit
        ).optimum
        for unit in (1.0, 100.0)
    ]
    assert learnt[1].noise_precision == pytest.approx(100 * learnt[0].noise_precision)
    assert learnt[1].log_evidence == pytest.approx(learnt[0].log_evidence)


def test_a_noise_precision_for_each_output() -> None:
    case, model, prior = noisy(50, outputs=3)
    scales = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    targets = case.y + scales * torch.randn(50, 3, generator=generator, dtype=torch.float64)
    model = LinearModel(
        model.features, model.offset, model.network_outputs, targets, Gaussian(torch.ones(3), noise_at="mode")
    )
    found = fit_exact_regression(model, prior)
    assert found.optimum.converged
    b = found.likelihood.noise_precision
    assert b.shape == (3,)
    assert_close(1 / b.sqrt(), (scales**2 + 0.3**2).sqrt(), rtol=0.3, atol=0)
    # The same precisions in one primal problem: no step in any of the four directions goes up.
    case.y = targets

    def evidence(alpha: float, b: Tensor) -> float:
        noise = (1 / b).expand(50, 3)
        return Primal(case, model, torch.full((model.features.size,), alpha).double(), noise).evidence

    alpha = found.optimum.precision
    best = evidence(alpha, b)
    assert best == pytest.approx(found.optimum.log_evidence, rel=1e-8)
    for i in range(4):
        ends = []
        for sign in (-1, 1):
            logs = torch.tensor([math.log(alpha), *b.log().tolist()], dtype=torch.float64)
            logs[i] += sign * 1e-3
            ends.append(evidence(float(logs[0].exp()), logs[1:].exp()))
        assert max(ends) < best
        # The iteration ends where a round changes log b_c by less than 1e-6.
        assert abs(ends[1] - ends[0]) / 2e-3 < 1e-4
    # With the noise fixed the given ratios stay.
    fixed = model.with_likelihood(Gaussian(torch.tensor([1.0, 2.0, 4.0]), learn=False))
    kept = fit_exact_regression(fixed, prior)
    assert_close(kept.likelihood.noise_precision, fixed.likelihood.noise_precision)
    # Given variances and a precision for each output together: the units of the given ones are kept.
    given = torch.rand(50, generator=generator, dtype=torch.float64) + 0.5
    both = [fit_exact_regression(model, prior, noise_variances=given * unit) for unit in (1.0, 10.0)]
    assert_close(both[1].likelihood.noise_precision, 10 * both[0].likelihood.noise_precision, rtol=1e-5, atol=0)
    assert both[0].optimum.log_evidence == pytest.approx(both[1].optimum.log_evidence)


def test_noise_precisions_of_outputs_at_a_bound() -> None:
    _, model, prior = noisy(30, outputs=2)
    model = model.with_likelihood(Gaussian(torch.ones(2), noise_at="mode"))
    found = fit_exact_regression(model, prior, noise_bounds=(1e-6, 5.0))
    assert found.optimum.at_bounds == ("noise_precision",)
    assert not found.optimum.converged
    assert float(found.likelihood.noise_precision.max()) == pytest.approx(5.0)


def few_data(num: int, outputs: int, seed: int) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """Fewer data than weights, noise of each output ten times that of the one before; the network is the truth."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 2, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = torch.nn.Sequential(torch.nn.Linear(2, 40), torch.nn.Tanh(), torch.nn.Linear(40, outputs)).double()
    noise = torch.randn(num, outputs, generator=generator, dtype=torch.float64)
    return network, x, network(x).detach() + torch.logspace(-1, 0, outputs, dtype=torch.float64) * noise


@pytest.mark.parametrize(("num", "outputs", "seed"), [(6, 3, 1), (7, 3, 18), (8, 2, 4), (11, 3, 7)])
def test_each_output_has_the_noise_that_its_network_leaves(num: int, outputs: int, seed: int) -> None:
    """`b_c Σ(y − f)² = N − γ_c`, with `γ_c` by dense algebra, where a root finder alone gets lost."""
    network, x, y = few_data(num, outputs, seed)
    la = LinearisedLaplace(network, Gaussian(torch.ones(outputs)), method="exact", prior="isotropic")
    la.fit_hyperparameters([(x, y)], progress=False)
    J, b = la.network.jacobian(x).reshape(num, outputs, -1), la.noise_precision_
    assert b is not None
    H = torch.einsum("ncp,c,ncq->pq", J, b, J) + float(la.prior_precision_) * torch.eye(J.shape[2])
    used = torch.einsum("ncp,pq,ncq->c", J, torch.linalg.inv(H), J) * b
    assert_close(b * (y - network(x).detach()).square().sum(0), num - used, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.parametrize("noise_at", ["network", "mode"])
def test_each_output_keeps_to_the_bounds_of_the_noise(noise_at: str) -> None:
    network, x, y = few_data(12, 2, 3)
    la = laplace_of(network, Gaussian(torch.ones(2)), method="exact", prior="isotropic", noise_at=noise_at)
    with pytest.warns(ConvergenceWarning, match="noise_bounds"):
        la.fit_hyperparameters([(x, y)], noise_bounds=(0.5, 1.5), progress=False)
    assert la.noise_precision_ is not None
    assert float(la.noise_precision_.min()) >= 0.5 - 1e-9
    assert float(la.noise_precision_.max()) == pytest.approx(1.5)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_leaving_a_datum_out_is_fitting_without_it(name: str) -> None:
    case, model, built = setting(name, "isotropic")
    exact = ExactRegression.of(model, built)
    alpha, b = 0.7, 3.0
    out = exact.leave_one_out(alpha, b)
    A = built.diagonal() * alpha / overall_precision(built)
    primal = Primal(case, model, A, exact.noise_scale / b)
    for i in range(min(len(case.x), 4)):
        rest = [j for j in range(len(case.x)) if j != i]
        J, B = primal.J[rest], primal.B[rest]
        H = torch.einsum("ncp,nc,ncq->pq", J, B, J) + torch.diag(A)
        mode = torch.linalg.solve(H, torch.einsum("ncp,nc,nc->p", J, B, primal.r[rest]))
        mean = model.offset[i] + primal.J[i] @ mode
        covariance = primal.J[i] @ torch.linalg.solve(H, primal.J[i].T) + torch.diag(exact.noise_scale[i] / b)
        assert_close(out.mean[i], mean, **CLOSE)
        assert_close(out.covariance[i], covariance, **CLOSE)
        normal = torch.distributions.MultivariateNormal(mean, covariance)
        assert_close(out.log_prob[i], normal.log_prob(case.y[i].reshape(-1)), **CLOSE)


@covering(name=REGRESSIONS, prior=PRIORS)
def test_same_draws_give_the_same_samples_as_weight_space(name: str, prior: str) -> None:
    _, model, built = setting(name, prior)
    exact = ExactRegression.of(model, built)
    assert isinstance(model.likelihood, Gaussian)
    b = float(torch.as_tensor(model.likelihood.noise_precision).log().mean().exp())
    draws = Draws(3, 2)
    expected = sample_posterior(model.ggn(model.network_outputs), built, draws, Dense()).value * built.scale
    assert_close(exact.sample(draws, overall_precision(built), b), expected, rtol=1e-6, atol=1e-7)


def test_the_order_of_a_shuffled_loader_is_kept() -> None:
    case, model, prior = noisy(40)
    loader = DataLoader(TensorDataset(case.x, case.y), batch_size=7, shuffle=True)
    data = TrainingData(loader)
    features = NetworkFeatures(Linearisation(case.model), data, Layout.single((1,)))
    shuffled = LinearModel(features, model.offset, model.network_outputs, data.targets, model.likelihood)
    found = [ExactRegression.of(m, prior).fit() for m in (model, shuffled)]
    assert found[0].log_evidence == pytest.approx(found[1].log_evidence, rel=1e-8)


def test_float32_networks_are_decomposed_in_float64() -> None:
    case, _, _ = noisy(30)
    small = Case(case.model.float(), Gaussian(1.0), case.x.float(), case.y.float())
    model = small.linear_model("homogeneous")
    exact = ExactRegression.of(model, make_prior(model, small, "isotropic"))
    assert exact.eigenvalues.dtype == torch.float64
    assert exact.fit().converged
    assert exact.mode(1.0, 1.0).dtype == torch.float64


def test_errors() -> None:
    case, model, prior = noisy(10, outputs=2)
    with pytest.raises(ValueError, match="dual"):
        ExactRegression.of(model, prior, max_memory=10_000.0)
    with pytest.raises(ValueError, match="dual"):
        fit_exact_regression(model, prior, max_memory=10_000.0)
    with pytest.raises(ValueError, match="shape"):
        ExactRegression.of(model, prior, noise_variances=torch.ones(2))
    with pytest.raises(ValueError, match=r"noise_variances.*positive"):
        ExactRegression.of(model, prior, noise_variances=-torch.ones(10))
    classes = make_case("classification")
    other = classes.linear_model()
    with pytest.raises(TypeError, match="Categorical"):
        ExactRegression.of(other, make_prior(other, classes, "isotropic"))
    with torch.no_grad():
        case.model[0].weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="Gram"):
        ExactRegression.of(case.linear_model("homogeneous"), prior)


_PEAK = """
import os, torch
from torch import nn
from laplace_sampling.gp.tuned_regression import fit_exact_regression
from laplace_sampling.linear_model.network_features import features_at
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.linear_model import LinearModel

torch.manual_seed(0)
# Threads that wait for each other take minutes where other tests run side by side.
torch.set_num_threads(1)
def fit(n, outputs):
    net = nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, outputs)).double()
    features = features_at(Linearisation(net), torch.randn(n, 3).double(), 50)
    zero, y = torch.zeros(n, outputs).double(), torch.randn(n, outputs).double()
    noise = Gaussian(torch.ones(outputs))
    P = features.size
    prior = GaussianPrior(torch.ones(1).double(), torch.zeros(P, dtype=torch.long), torch.ones(P).double(), ("all",))
    fit_exact_regression(LinearModel(features, zero, zero, y, noise), prior, block_bytes=2**22)
fit(40, 2)
before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
for outputs in (1, 2):
    fit(1600 // outputs, outputs)
    peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print(int(peak[0].split()[1]) * 1024 - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read from /proc")
def test_peak_memory_is_below_four_gram_matrices_and_a_block() -> None:
    """With one noise precision, and with one for each output."""
    command = [sys.executable, "-W", "ignore", "-c", _PEAK]
    # What is freed goes back to the system at once, as it does anyway for matrices above 32 MiB.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    for line in result.stdout.split():
        grams = (float(line) - 2**22) / (8 * 1600**2)
        print(f"peak: {grams:.2f} Gram matrices and a block")
        assert grams < 4
