"""Exact regression in observation space, against dense algebra in weight space with `H = M + A`."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import reference
import torch
from cases import Case, make_case
from grids import covering
from problems import CLOSE, largest_evidence, make_prior, noisy
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import ConvergenceWarning, Evidence, LinearisedLaplace
from laplace_sampling.data.batches import Layout
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.gp.evidence import HyperparameterBounds, Optimum
from laplace_sampling.gp.posterior import GramCovariance, GramPosterior, of_largest_evidence
from laplace_sampling.hyperparameters.em import fit_em
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, NetworkFeatures, features_at
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.priors.prior import (
    GaussianPrior,
    GPrior,
    IsotropicPrior,
    LayerwisePrior,
    overall_precision,
)
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


def at(exact: GramPosterior, alpha: float, b: float) -> GramPosterior:
    """The posterior at another `α` and `b`, by the same decomposition."""
    noise = exact.model.likelihood.noise_precisions()
    likelihood = exact.model.likelihood.with_precision(noise * (b / exact.precisions[1]))
    precision = exact.prior.precision * (alpha / exact.precisions[0])
    moved = exact.at(exact.model.with_likelihood(likelihood), exact.prior.with_precision(precision))
    assert moved.vectors is exact.vectors
    return moved


def noise_of(exact: GramPosterior) -> Tensor:
    """Noise variances, `[N, C]`."""
    return (1 / exact.model.likelihood.noise_precisions()).expand(exact.model.offset.shape)


def bounds(precision: tuple[float, float] = (1e-8, 1e12), noise: tuple[float, float] = (1e-12, 1e12)):
    return HyperparameterBounds(precision, noise)


@covering(name=REGRESSIONS, prior=PRIORS)
def test_everything_agrees_with_weight_space(name: str, prior: str) -> None:
    case, model, built = setting(name, prior)
    exact = GramPosterior.of(model, built)
    x = case.x[:3] * 1.7 + 0.3
    J = reference.jacobian(case.model, x)
    for alpha, b in ((0.3, 0.5), (2.0, 40.0), (500.0, 3.0)):
        posterior = at(exact, alpha, b)
        A = built.diagonal() * alpha / overall_precision(built)
        primal = Primal(case, model, A, noise_of(posterior))
        assert_close(float(exact.evidence.log_evidence(alpha, b)), primal.evidence, **CLOSE)
        assert_close(posterior.log_evidence, primal.evidence, **CLOSE)
        assert_close(posterior.effective_dimension(), primal.gamma, **CLOSE)
        assert_close(float(exact.evidence.effective_dimension(alpha, b)), primal.gamma, **CLOSE)
        assert_close(posterior.mode_weights(), primal.mode, **CLOSE)
        assert_close(posterior.mode.outputs, model.offset + primal.J @ primal.mode, **CLOSE)
        assert_close(posterior.mode.norm, float((A * primal.mode**2).sum()) / alpha, **CLOSE)
        flat = J.flatten(0, 1)
        joint = flat @ torch.linalg.solve(primal.H, flat.T)
        C = J.shape[1]
        blocks = torch.stack([joint[i * C : (i + 1) * C, i * C : (i + 1) * C] for i in range(len(x))])
        covariance = GramCovariance(posterior, features_at(Linearisation(case.model), x))
        assert_close(covariance.variance(), blocks.diagonal(dim1=1, dim2=2), **CLOSE)
        assert_close(covariance.joint(), joint, **CLOSE)
        assert_close(covariance.blocks(), blocks, **CLOSE)
        assert_close(covariance.variance(), blocks.diagonal(dim1=1, dim2=2), **CLOSE)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_derivatives_of_the_evidence(name: str) -> None:
    _, model, built = setting(name, "g-prior")
    evidence = GramPosterior.of(model, built).evidence
    logs = torch.tensor([0.4, -0.7], dtype=torch.float64, requires_grad=True)
    evidence.log_evidence(logs[0].exp(), logs[1].exp()).backward()
    alpha, b = logs.detach().exp().tolist()
    gradient = evidence.gradient(alpha, b)
    assert_close(gradient, logs.grad)
    step = 1e-5
    for i in range(2):
        ends = [[alpha, b], [alpha, b]]
        ends[0][i] *= math.exp(-step)
        ends[1][i] *= math.exp(step)
        difference = (evidence.log_evidence(*ends[1]) - evidence.log_evidence(*ends[0])) / (2 * step)
        assert_close(gradient[i], difference, rtol=1e-6, atol=1e-6)
    grid = torch.tensor([[0.5, 2.0], [3.0, 9.0]], dtype=torch.float64)
    values = evidence.log_evidence(grid[:, 0], grid[:, 1])
    assert_close(values[1], evidence.log_evidence(3.0, 9.0))
    assert values.shape == (2,)


def test_both_hyperparameters_are_at_the_maximum() -> None:
    _, model, prior = noisy(60)
    posterior = GramPosterior.of(model, prior)
    evidence = posterior.evidence
    found = evidence.largest((overall_precision(prior), 1.0), (True, True))
    assert found.converged
    assert max(map(abs, found.gradient)) < 1e-7
    alpha, b = found.precision, found.noise_precision
    assert 0.2 < alpha * 0.7**2 < 5
    assert b == pytest.approx(1 / 0.3**2, rel=0.4)
    # MacKay's fixed point, and the identity that holds there only.
    posterior = at(posterior, alpha, b)
    gamma = posterior.effective_dimension()
    assert gamma / posterior.mode.norm == pytest.approx(alpha, rel=1e-8)
    squared_error = float((model.targets - posterior.mode.outputs).square().sum())
    assert (60 - gamma) / squared_error == pytest.approx(b, rel=1e-8)
    best = float(evidence.log_evidence(alpha, b))
    assert best == found.log_evidence
    for du, dv in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01), (0.01, 0.01)):
        assert float(evidence.log_evidence(alpha * math.exp(du), b * math.exp(dv))) < best


@pytest.mark.parametrize(("precision", "noise"), [(True, False), (False, True), (False, False)])
def test_one_or_none_is_learnt(precision: bool, noise: bool) -> None:
    _, model, prior = noisy(40)
    evidence = GramPosterior.of(model, prior).evidence
    found = evidence.largest((overall_precision(prior), 1.0), (precision, noise))
    assert found.converged
    for learnt, slope in zip((precision, noise), found.gradient, strict=True):
        assert (abs(slope) < 1e-7) == learnt
    assert (found.precision == overall_precision(prior)) == (not precision)
    assert (found.noise_precision == 1.0) == (not noise)
    if precision:
        assert of_largest_evidence(model.with_likelihood(Gaussian(1.0, learn=False)), prior, bounds())[1] == found


def test_noise_is_that_of_the_network() -> None:
    """`b Σ(y − f)² = N·C − γ`, and `α` of largest evidence there; that of the mode where the network is one."""
    _, model, prior = noisy(60)
    at_mode = largest_evidence(model, prior)
    f = at(GramPosterior.of(model, prior), at_mode.precision, at_mode.noise_precision).mode.outputs
    _, same = of_largest_evidence(replace(model, network_outputs=f), prior, bounds())
    assert same.precision == pytest.approx(at_mode.precision, rel=1e-6)
    assert same.noise_precision == pytest.approx(at_mode.noise_precision, rel=1e-6)
    f = f + 0.4 * torch.sin(torch.arange(60).double())[:, None]
    model = replace(model, network_outputs=f)
    posterior, found = of_largest_evidence(model, prior, bounds())
    alpha, b = found.precision, found.noise_precision
    assert b < 0.8 * same.noise_precision
    assert found.converged
    assert abs(found.gradient[0]) < 1e-8
    assert posterior.precisions == (alpha, b)
    gamma = posterior.effective_dimension()
    assert b * float((model.targets - f).square().sum()) == pytest.approx(60 - gamma, rel=1e-6)
    # EM ends there too.
    dense = replace(model, features=DenseFeatures.of(model.features))
    em = fit_em(dense, prior, Draws(1, 0), Dense(), max_steps=300, tolerance=1e-10)
    assert float(em.prior.precision) == pytest.approx(alpha, rel=1e-6)
    assert float(em.likelihood.noise_precision) == pytest.approx(b, rel=1e-6)
    assert_close(posterior.mode_weights(), em.mode, rtol=1e-6, atol=1e-7)
    # What is given is kept, and so are bounds.
    fixed = model.with_likelihood(Gaussian(3.0, learn=False))
    assert of_largest_evidence(fixed, prior, bounds())[1].noise_precision == pytest.approx(3.0)
    _, bounded = of_largest_evidence(model, prior, bounds(noise=(1e-6, 0.5 * b)))
    assert bounded.noise_precision == pytest.approx(0.5 * b)
    assert bounded.at_bounds == ("noise_precision",)
    assert not bounded.converged


def test_noise_of_each_output_at_the_network() -> None:
    _, model, prior = noisy(50, outputs=3)
    generator = torch.Generator().manual_seed(4)
    scales = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    targets = model.targets + scales * torch.randn(50, 3, generator=generator, dtype=torch.float64)
    features = DenseFeatures.of(model.features)
    model = LinearModel(features, model.offset, 0.5 * targets, targets, Gaussian(torch.ones(3)))
    exact, found = of_largest_evidence(model, prior, bounds())
    assert found.converged
    b = exact.model.likelihood.noise_precisions()
    gamma = (b * GramCovariance(exact, model.features).variance()).sum(0)
    assert_close(b * ((0.5 * targets) ** 2).sum(0), 50 - gamma, rtol=1e-6, atol=0)
    assert abs(found.gradient[0]) < 1e-7
    # With the noise fixed the given ratios stay.
    fixed = model.with_likelihood(Gaussian(torch.tensor([1.0, 2.0, 4.0]), learn=False))
    kept, _ = of_largest_evidence(fixed, prior, bounds())
    assert_close(kept.model.likelihood.noise_precisions(), fixed.likelihood.noise_precisions())


def test_bounds_are_kept_and_told() -> None:
    _, model, prior = noisy(40)

    def largest(model: LinearModel, prior: GaussianPrior, ends: HyperparameterBounds, learn: bool = True) -> Optimum:
        return GramPosterior.of(model, prior).evidence.largest((overall_precision(prior), 1.0), (True, learn), ends)

    inside = largest(model, prior, bounds())
    ends = (1e-8, 0.5 * inside.precision)
    found = largest(model, prior, bounds(ends))
    assert found.precision == ends[1]
    assert found.at_bounds == ("precision",)
    assert not found.converged
    assert abs(found.gradient[1]) < 1e-8  # the other is at its best there
    found = largest(model, prior, bounds(noise=(2 * inside.noise_precision, 1e9)))
    assert found.at_bounds == ("noise_precision",)
    assert abs(found.gradient[0]) < 1e-8
    for options in ({"precision": (1.0, 0.5)}, {"noise": (0.0, 1.0)}):
        with pytest.raises(ValueError, match=rf"{next(iter(options))}_bounds"):
            bounds(**options)
    # Targets without noise, that the model can fit: the noise goes to its bound, and α to its best there.
    rows = torch.eye(10, 50, dtype=torch.float64)[:, None]
    features = DenseFeatures(rows * torch.logspace(0, -12, 10, dtype=torch.float64)[:, None, None])
    zero = torch.zeros(10, 1, dtype=torch.float64)
    few = LinearModel(features, zero, zero, features.outputs(torch.ones(1, 50).double())[0], model.likelihood)
    wide = IsotropicPrior().build(few.ggn(few.offset), ([], torch.zeros(0)), Draws(1, 0).noise(1))
    found = largest(few, wide, bounds(noise=(1e-3, 1e30)))
    assert found.noise_precision == 1e30
    assert found.at_bounds == ("noise_precision",)
    assert found.precision == pytest.approx(1.0, rel=1e-4)  # c² = λ
    # Targets that are nothing but noise say nothing of the weights.
    found = largest(replace(model, targets=torch.zeros(40, 1).double()), prior, bounds(), learn=False)
    assert found.at_bounds == ("precision",)
    assert found.precision == 1e12


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
def test_each_output_keeps_to_the_bounds_of_the_noise() -> None:
    network, x, y = few_data(12, 2, 3)
    la = LinearisedLaplace(network, Gaussian(torch.ones(2)), method="exact", prior="isotropic")
    with pytest.warns(ConvergenceWarning, match="noise_bounds"):
        la.fit_hyperparameters([(x, y)], criterion=Evidence(noise_bounds=(0.5, 1.5)), progress=False)
    assert la.noise_precision_ is not None
    assert float(la.noise_precision_.min()) >= 0.5 - 1e-9
    assert float(la.noise_precision_.max()) == pytest.approx(1.5)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_leaving_a_datum_out_is_fitting_without_it(name: str) -> None:
    case, model, built = setting(name, "isotropic")
    alpha = 0.7
    exact = at(GramPosterior.of(model, built), alpha, 3.0)
    out, noise = exact.leave_one_out(), noise_of(exact)
    A = built.diagonal() * alpha / overall_precision(built)
    primal = Primal(case, model, A, noise)
    for i in range(min(len(case.x), 4)):
        rest = [j for j in range(len(case.x)) if j != i]
        J, B = primal.J[rest], primal.B[rest]
        H = torch.einsum("ncp,nc,ncq->pq", J, B, J) + torch.diag(A)
        mode = torch.linalg.solve(H, torch.einsum("ncp,nc,nc->p", J, B, primal.r[rest]))
        mean = model.offset[i] + primal.J[i] @ mode
        covariance = primal.J[i] @ torch.linalg.solve(H, primal.J[i].T) + torch.diag(noise[i])
        assert_close(out.mean[i], mean, **CLOSE)
        assert_close(out.covariance[i], covariance, **CLOSE)
        normal = torch.distributions.MultivariateNormal(mean, covariance)
        assert_close(out.log_prob[i], normal.log_prob(case.y[i].reshape(-1)), **CLOSE)


@covering(name=REGRESSIONS, prior=PRIORS)
def test_same_draws_give_the_same_samples_as_weight_space(name: str, prior: str) -> None:
    _, model, built = setting(name, prior)
    exact = GramPosterior.of(model, built)
    draws = Draws(3, 2)
    expected = sample_posterior(model.ggn(model.network_outputs), built, draws, Dense()).value * built.scale
    assert_close(exact.sample(draws), expected, rtol=1e-6, atol=1e-7)


def test_the_order_of_a_shuffled_loader_is_kept() -> None:
    case, model, prior = noisy(40)
    loader = DataLoader(TensorDataset(case.x, case.y), batch_size=7, shuffle=True)
    data = TrainingData(loader)
    features = NetworkFeatures(Linearisation(case.model), data, Layout.single((1,)))
    shuffled = LinearModel(features, model.offset, model.network_outputs, data.targets, model.likelihood)
    found = [of_largest_evidence(m, prior, bounds())[1] for m in (model, shuffled)]
    assert found[0].log_evidence == pytest.approx(found[1].log_evidence, rel=1e-8)


def test_float32_networks_are_decomposed_in_float64() -> None:
    case, _, _ = noisy(30)
    small = Case(case.model.float(), Gaussian(1.0), case.x.float(), case.y.float())
    model = small.linear_model("homogeneous")
    exact, found = of_largest_evidence(model, make_prior(model, small, "isotropic"), bounds())
    assert exact.eigenvalues.dtype == torch.float64
    assert found.converged
    assert exact.mode_weights().dtype == torch.float64


def test_a_network_that_is_not_finite_is_refused() -> None:
    case, _, prior = noisy(10, outputs=2)
    with torch.no_grad():
        case.model[0].weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="Gram"):
        GramPosterior.of(case.linear_model("homogeneous"), prior)


_PEAK = """
import os, torch
from torch import nn
from laplace_sampling.gp.evidence import HyperparameterBounds
from laplace_sampling.gp.posterior import of_largest_evidence
from laplace_sampling.linear_model.features import features_at
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
    of_largest_evidence(LinearModel(features, zero, zero, y, noise), prior, HyperparameterBounds())
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
        # All rows of the Jacobian are a block here.
        grams = (float(line) - 8 * 1600 * 1202) / (8 * 1600**2)
        print(f"peak: {grams:.2f} Gram matrices and a block")
        assert grams < 4
