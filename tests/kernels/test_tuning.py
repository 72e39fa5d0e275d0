"""Hyperparameters by the evidence: the pathwise estimator, the search, and what a search must not do."""

import copy
import math
import warnings
from typing import Any

import gpytorch
import pytest
import scipy.optimize
import torch
from gaussian_processes import COUNTS, KERNELS, NUMBERS, Model, inputs, kernels, model, scaled, with_lengthscale
from torch import Tensor, nn

from laplace_sampling import ConvergenceWarning
from laplace_sampling.kernels import TanimotoKernel, condition, tune
from laplace_sampling.kernels.kernel_rows import kernel_matrix
from laplace_sampling.kernels.tuning import Hyperparameters, PathwiseEvidence
from laplace_sampling.solvers.row_blocks import PivotedCG


def log_evidence(gp: Any) -> Tensor:
    """`log p(y | θ) + log p(θ)` by the density of torch, per datum, at the raw parameters of the model."""
    (x,) = gp.train_inputs
    z, noise = gp.embedded(x) if isinstance(gp, Deep) else x, gp.likelihood.noise.expand(len(x))
    covariance = kernel_matrix(gp.covar_module, z, z) + torch.diag(noise)
    density = torch.distributions.MultivariateNormal(gp.mean_module(z), covariance)
    priors = [one.log_prob(of(module)).sum() for _, module, one, of, _ in gp.named_priors()]
    return (density.log_prob(gp.train_targets) + sum(priors)) / len(x)


class Deep(Model):
    """Features of the inputs with weights of their own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        torch.manual_seed(0)
        self.features = nn.Linear(3, 2)

    def embedded(self, x: Tensor) -> Tensor:
        return self.features(x[:, :3]).tanh()

    def forward(self, x: Tensor) -> Any:
        z = self.embedded(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(z), self.covar_module(z))


def three_parts() -> Any:
    smooth = with_lengthscale(kernels.RBFKernel(ard_num_dims=3, **NUMBERS), 0.5, 1.0, 2.0)
    rough = with_lengthscale(kernels.MaternKernel(nu=1.5, active_dims=[0, 1]), 0.8)
    return scaled(smooth) + scaled(rough, 0.4) + kernels.LinearKernel(active_dims=[2])


def waves() -> Any:
    return KERNELS["rational quadratic"]() + KERNELS["periodic"]() * KERNELS["index"]()


def of_fixed_noise(n: int) -> Model:
    gp = model(scaled(TanimotoKernel(active_dims=COUNTS)), n)
    (x,), noise = gp.train_inputs, torch.linspace(0.1, 2, n, dtype=torch.float64)
    return Model(x, gp.train_targets, gp.covar_module, noise).double().eval()


MODELS = {
    "three parts": lambda n: model(three_parts(), n),
    "waves and labels": lambda n: model(waves(), n, 0.2),
    "features with weights": lambda n: Deep(
        inputs(n), model(kernels.RBFKernel(), n).train_targets, scaled(kernels.RBFKernel()), 0.1
    ).double(),
    "tangent": lambda n: model(KERNELS["network and rest"](), n, 0.1),
    "molecules, noise of each datum": of_fixed_noise,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_estimated_gradient_is_that_of_the_evidence(name: str) -> None:
    """The mean of 40 estimates with two draws each, within three standard errors for each parameter."""
    gp, n = MODELS[name](40), 40
    gp.likelihood.register_prior("some", gpytorch.priors.GammaPrior(2.0, 3.0), lambda module: module.noise)
    log_evidence(gp).backward()
    wanted = torch.cat([p.grad.flatten() for p in gp.parameters() if p.requires_grad]) * n
    point, estimates = Hyperparameters(gp), []
    start = point.get()
    for seed in range(40):
        point.set(start)
        PathwiseEvidence(point, 2, 1e-6, seed, num_features=200)()
        own = [p.grad for p in point.prior.model.parameters() if p.requires_grad]
        estimates.append(torch.cat([gradient.flatten().clone() for gradient in own]))
    found = torch.stack(estimates)
    error = (found.mean(0) - wanted).abs()
    assert bool((error <= 3 * found.std(0) / 40**0.5 + 1e-6 * wanted.abs().max()).all()), error / found.std(0)
    assert bool((error < 0.2 * wanted.abs().max()).all())


def test_coordinates_are_those_of_the_parameters() -> None:
    """Whatever the constraint: there and back, and derivatives by the chain rule, against differences."""
    gp = model(KERNELS["rbf"]())
    interval, bounds = gpytorch.constraints.Interval(0.01, 3.0), gpytorch.constraints.Interval
    gp.covar_module.register_constraint("raw_lengthscale", interval)
    gp.covar_module.lengthscale = torch.tensor([0.5, 1.0, 2.0])
    gp.mean_module.register_constraint("raw_constant", gpytorch.constraints.LessThan(1.0, transform=None))
    gp.likelihood.noise_covar.register_constraint("raw_noise", bounds(1e-3, 4.0, transform=None))
    gp.likelihood.noise = 0.3
    point = Hyperparameters(gp)
    start = point.get()
    before = [p.detach().clone() for p in gp.parameters()]
    point.set(start)
    for own, given in zip(point.prior.model.parameters(), before, strict=True):
        torch.testing.assert_close(own.detach(), given)
    evidence = PathwiseEvidence(point, 2, 1e-6, 0)
    evidence()
    gradient, weights = point.gradient(), evidence.weights
    assert weights is not None

    def surrogate(at: Tensor) -> Tensor:
        """What the estimator is the gradient of, with the solutions held fixed."""
        point.set(at)
        gp = point.prior.model
        prior = gp.forward(gp.train_inputs[0])
        A = prior.covariance_matrix + gp.likelihood.noise * torch.eye(150)
        forms = (weights @ A * weights).sum(1)
        return 0.5 * forms[0] - 0.25 * forms[1:].sum() + weights[0] @ prior.mean

    with torch.no_grad():
        steps = 1e-5 * torch.eye(len(start), dtype=torch.float64)
        differences = [(surrogate(start + step) - surrogate(start - step)) / 2e-5 for step in steps]
    torch.testing.assert_close(gradient, torch.stack(differences), rtol=1e-5, atol=1e-5)


def test_the_gradient_in_blocks_and_without_a_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in blocks, a matrix that is not held, and iterative solves, warm and cold: the same gradient."""
    gp = MODELS["features with weights"](200)
    point = Hyperparameters(gp)
    start, found = point.get(), []

    def gradient(evidence: PathwiseEvidence) -> Tensor:
        point.set(start)
        evidence()
        return point.gradient()

    wanted = gradient(PathwiseEvidence(point, 3, 1e-6, 0))
    monkeypatch.setattr("laplace_sampling.kernels.kernel_rows.free_memory", lambda device: 1000.0)
    monkeypatch.setattr("laplace_sampling.kernels.tuning.NUMBERS_TOGETHER", 200 * 70)
    monkeypatch.setattr(PivotedCG, "_RANK", 20)
    evidence = PathwiseEvidence(point, 3, 1e-6, 0)
    found += [gradient(evidence), gradient(evidence)]
    for one in found:
        torch.testing.assert_close(one, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def with_start(gp: Model, noise: float) -> Model:
    gp.likelihood.noise = noise
    return gp.train()


@pytest.mark.parametrize("noise", [0.7, 1e-3])
def test_tuned_evidence_is_near_the_largest(noise: float) -> None:
    """Of scipy's L-BFGS on raw parameters; and the model is left as `condition` takes it."""
    peers = [with_start(model(three_parts(), 150), noise) for _ in range(3)]
    start = float(log_evidence(peers[0]).detach())
    raw = list(peers[0].parameters())

    def loss(at: Any) -> tuple[float, Any]:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(at), raw)
        value = -log_evidence(peers[0])
        return float(value.detach()), torch.cat([part.flatten() for part in torch.autograd.grad(value, raw)]).numpy()

    first = torch.nn.utils.parameters_to_vector(raw).detach().numpy()
    reference = scipy.optimize.minimize(loss, first, jac=True, method="L-BFGS-B", bounds=[(-8, 8)] * len(first))
    largest = -reference.fun
    exact, pathwise = tune(peers[1]), tune(peers[2], method="pathwise")
    found = [float(log_evidence(gp).detach()) for gp in peers[1:]]
    assert exact.method == "exact"
    assert exact.converged
    assert pathwise.converged
    assert found[0] > largest - 0.001
    # Nine hyperparameters and 16 draws: .3 nats of 150 data on average, and some times that by chance.
    assert found[1] > largest - 5 / 150
    assert abs(exact.gain - (found[0] - start)) < 0.1 * exact.gain
    assert abs(pathwise.gain - (found[1] - start)) < 0.1 * pathwise.gain
    assert condition(peers[2], 4).mean(inputs(3)).isfinite().all()


def test_a_part_of_the_data_gives_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer evaluations on all data lead to the same evidence; a start that is better is kept."""
    gp = with_start(model(three_parts(), 150), 0.7)
    alone, after = copy.deepcopy(gp), copy.deepcopy(gp)
    cold = tune(alone, method="pathwise")
    monkeypatch.setattr("laplace_sampling.kernels.tuning._EXACT", 100)
    warm = tune(after)
    assert warm.method == "pathwise"
    assert warm.evaluations < cold.evaluations
    assert abs(float((log_evidence(alone) - log_evidence(after)).detach())) < 0.02
    best = float(log_evidence(after).detach())
    monkeypatch.setattr("laplace_sampling.kernels.tuning._EXACT", 20)
    tune(after)
    assert float(log_evidence(after).detach()) > best - 0.005


def test_priors_and_bounds_of_botorch() -> None:
    """The objective of `fit_gpytorch_mll`, with the transforms of the model."""
    botorch: Any = pytest.importorskip("botorch")
    x = 100 * inputs(60)[:, :2]
    y = 1000 + 50 * (x[:, :1] / 20).sin() + torch.randn(60, 1, generator=torch.Generator().manual_seed(0)).double()
    normalize = botorch.models.transforms.Normalize(2)
    theirs, ours = (botorch.models.SingleTaskGP(x, y, input_transform=copy.deepcopy(normalize)) for _ in range(2))
    botorch.fit.fit_gpytorch_mll(gpytorch.mlls.ExactMarginalLogLikelihood(theirs.likelihood, theirs))
    found = tune(ours)
    assert found.gain > 0.1
    with torch.no_grad():
        values = [
            float(gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp)(gp(*gp.train_inputs), gp.train_targets))
            for gp in (theirs.train(), ours.train())
        ]
    assert values[1] > values[0] - 1e-3
    torch.testing.assert_close(condition(ours.eval(), 2).mean(x), ours.posterior(x).mean[:, 0].detach())


def test_bounds_hold_where_the_evidence_would_pass_them() -> None:
    gp = with_start(model(scaled(kernels.RBFKernel(**NUMBERS))), 0.7)
    gp.likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(0.3))
    gp.covar_module.base_kernel.register_constraint("raw_lengthscale", gpytorch.constraints.Interval(2.0, 3.0))
    gp.likelihood.noise, gp.covar_module.base_kernel.lengthscale = 0.7, 2.5
    tune(gp)
    assert 0.3 <= gp.likelihood.noise.item() < 0.31
    assert 2.0 <= gp.covar_module.base_kernel.lengthscale.item() < 2.3


def test_what_is_held_fixed_and_float32() -> None:
    gp = with_start(model(three_parts(), 100).float(), 0.7)
    gp.covar_module.kernels[0].raw_outputscale.requires_grad_(False)
    gp.mean_module.requires_grad_(False)
    before = copy.deepcopy(gp.state_dict())
    tune(gp, 2, method="pathwise")
    changed = {name for name, value in gp.state_dict().items() if not torch.equal(value, before[name])}
    assert {value.dtype for value in gp.parameters()} == {torch.float32}
    assert "likelihood.noise_covar.raw_noise" in changed
    assert not {"mean_module.raw_constant", "covar_module.kernels.0.raw_outputscale"} & changed
    assert not gp.training


def test_a_budget_and_a_search_that_fails() -> None:
    """No state is worse than the first one, whenever the search ends."""
    values = []
    for passes in (1, 8, 16):
        gp = with_start(model(three_parts(), 120), 0.7)
        first = float(log_evidence(gp).detach())
        with pytest.warns(ConvergenceWarning, match="raise `max_passes`") as warned:
            found = tune(gp, method="pathwise", max_passes=passes)
        assert warned[0].filename == __file__
        assert found.passes < passes + 10
        values.append(float(log_evidence(gp).detach()) - first)
    assert values == sorted(values)
    assert values[0] >= 0
    gp = model(three_parts())
    before = copy.deepcopy(gp.state_dict())
    gp.train_inputs[0][3] = math.nan
    for method in ("exact", "pathwise"):
        with pytest.raises(FloatingPointError, match="no finite evidence"):
            tune(gp, method=method)
    assert all(torch.equal(value, before[name]) for name, value in gp.state_dict().items())


def test_at_the_maximum_nothing_changes() -> None:
    gp = with_start(model(three_parts(), 120), 0.7)
    tune(gp)
    best = float(log_evidence(gp).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in ("exact", "pathwise"):
            again = tune(gp, method=method)
            assert 0 <= again.gain < 0.01
            assert float(log_evidence(gp).detach()) > best - 0.005


def test_what_cannot_be_tuned_is_refused_with_the_cure() -> None:
    gp = model(KERNELS["rbf"]())
    for given, error, cure in (
        (nn.Linear(1, 1), TypeError, "`tune` takes a gpytorch.models.ExactGP"),
        (copy.deepcopy(gp).requires_grad_(False), ValueError, "requires a gradient"),
    ):
        with pytest.raises(error, match=cure):
            tune(given)
    with pytest.raises(ValueError, match="one of"):
        tune(gp, method="vi")
    with pytest.raises(NotImplementedError, match="CosineKernel"):
        tune(model(kernels.CosineKernel()), method="pathwise")
    assert tune(model(kernels.CosineKernel(active_dims=[0]))).gain > 0


@pytest.mark.nightly
def test_tuned_evidence_of_two_thousand_data() -> None:
    """Within .02 nats per datum of the exact evidence's."""
    peers = [with_start(model(three_parts(), 2000), 0.7) for _ in range(2)]
    tune(peers[0], method="exact")
    tune(peers[1], method="pathwise")
    exact, pathwise = (float(log_evidence(gp).detach()) for gp in peers)
    assert pathwise > exact - 0.02
