"""Fits that start from the posterior that is there: they end where cold ones do, and cost less."""

import copy
import functools
import io
from dataclasses import replace

import pytest
import torch
from flat_settings import fit_arguments
from torch import Tensor, nn

from laplace_sampling import SGD, SVRG, GPrior, Krylov, LinearisedLaplace, Stochastic

METHODS = {
    "exact": "exact",
    "krylov": "krylov",
    "sgd": Stochastic(solver=SGD()),
    # With fewer rows than all of these few data have, whose preconditioner leaves nothing to save.
    "svrg": Stochastic(solver=SVRG(max_rank=32)),
    "kfac": "kfac",
    "diagonal": "diagonal",
    "dual": "dual",
    "subset": "subset",
}


class Problem:
    """A small network that is trained, and can be trained further."""

    def __init__(self, kind: str, num_data: int = 80) -> None:
        g = torch.Generator().manual_seed(3)
        self.kind, outputs = kind, 1 if kind == "regression" else 3
        self.x = torch.randn(num_data, 4, generator=g, dtype=torch.float64)
        truth = self.x @ torch.randn(4, outputs, generator=g, dtype=torch.float64)
        noise = torch.randn(truth.shape, generator=g, dtype=torch.float64)
        self.y = truth.sin() + 0.2 * noise if kind == "regression" else (2 * truth + noise).argmax(1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.train(60)

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(32), self.y.split(32), strict=True))

    def train(self, epochs: int = 1) -> None:
        loss = nn.MSELoss() if self.kind == "regression" else nn.CrossEntropyLoss()
        for _ in range(epochs):
            for x, y in self.batches:
                self.optimiser.zero_grad()
                loss(self.model(x), y).backward()
                self.optimiser.step()

    def laplace(self, method="krylov", **settings) -> LinearisedLaplace:
        return LinearisedLaplace(self.model, self.kind, method=method, **{"num_samples": 16, **settings})


def products(la: LinearisedLaplace) -> int:
    return sum(la.network.products.values())


def deviations(la: LinearisedLaplace, x: Tensor) -> Tensor:
    return la.predict(x).deviations.flatten(2)


def distance(la: LinearisedLaplace, other: LinearisedLaplace, x: Tensor) -> float:
    """How far the samples of two posteriors are apart, as functions on some inputs."""
    ours, theirs = deviations(la, x), deviations(other, x)
    return float((ours - theirs).norm() / theirs.norm())


def labelled() -> Problem:
    """A network that knows its training labels better than their neighbours do, so that error bars are warranted."""
    return copy.deepcopy(_labelled())


@functools.cache
def _labelled() -> Problem:
    problem = Problem("classification", 300)
    problem.optimiser.param_groups[0]["lr"] = 0.3
    problem.train(200)
    problem.optimiser.param_groups[0]["lr"] = 2e-3
    return problem


def problem_of(method: str) -> Problem:
    return Problem("regression" if method == "dual" else "classification")


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("sgd", "svrg"))) for name in METHODS]
)
@pytest.mark.parametrize("prior", ["isotropic", "g-prior"])
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_the_samples_are_those_of_a_cold_fit(method: str, prior: str) -> None:
    problem = problem_of(method)
    la = problem.laplace(METHODS[method], prior=prior).fit(problem.batches, progress=False)
    before = la.samples_.clone()
    problem.train()
    la.fit(problem.batches, warm_start=True, progress=False)
    cold = problem.laplace(METHODS[method], prior=prior).fit(problem.batches, progress=False)
    assert la.converged_
    assert cold.converged_
    # The error of a sample's function is at most 2τ = 0.03 for Krylov solvers, 0.1 for mini-batches.
    tolerance = 0.2 if method in ("sgd", "svrg") else 0.06
    assert distance(la, cold, problem.x) < tolerance
    assert not torch.equal(before, la.samples_)


@pytest.mark.parametrize(
    ("method", "criterion"),
    [
        ("exact", "evidence"),
        pytest.param("krylov", "evidence", marks=pytest.mark.slow),
        pytest.param("sgd", "evidence", marks=pytest.mark.nightly),
        pytest.param("kfac", "evidence", marks=pytest.mark.slow),
        pytest.param("diagonal", "evidence", marks=pytest.mark.slow),
        ("dual", "evidence"),
        ("krylov", "self_consistency"),
        ("exact", "self_consistency"),
        ("kfac", "self_consistency"),
        ("krylov", "validation"),
        ("kfac", "validation"),
        ("dual", "validation"),
    ],
)
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_the_precision_is_that_of_a_cold_fit(method: str, criterion: str) -> None:
    problem = problem_of(method)
    held_out = problem.batches[-1:] if criterion == "validation" else None
    options = fit_arguments(criterion, progress=False, max_steps=30)

    def tuned(la: LinearisedLaplace, warm: bool) -> LinearisedLaplace:
        return la.fit_hyperparameters(problem.batches, held_out, warm_start=warm, **options)

    la = tuned(problem.laplace(METHODS[method]), False)
    problem.train()
    tuned(la, True)
    cold = tuned(problem.laplace(METHODS[method]), False)
    # To the tolerance of the search, 2τ = 0.03, and with EM from either side.
    assert abs(float((la.prior_precision_ / cold.prior_precision_).log())) < (0.15 if method == "sgd" else 0.07)
    if la.noise_precision_ is not None:
        assert abs(float((la.noise_precision_ / cold.noise_precision_).log())) < 0.03


# Where counts of products tell: the exact method has to see all rows once, whatever it starts from.
@pytest.mark.slow
@pytest.mark.parametrize("method", ["kfac", pytest.param("diagonal", marks=pytest.mark.nightly)])
def test_after_one_more_epoch_it_costs_at_most_half(method: str) -> None:
    problem = Problem("classification", 300)
    options = {"criterion": "evidence", "progress": False}
    la = problem.laplace(METHODS[method]).fit_hyperparameters(problem.batches, **options)
    first = products(la)
    problem.optimiser.param_groups[0]["lr"] = 2e-3
    problem.train()
    la.fit_hyperparameters(problem.batches, warm_start=True, **options)
    assert products(la) - first <= 0.5 * first
    cold = problem.laplace(METHODS[method]).fit_hyperparameters(problem.batches, **options)
    assert abs(float((la.prior_precision_ / cold.prior_precision_).log())) < 0.03
    assert distance(la, cold, problem.x) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("off", [pytest.param(1e-5, marks=pytest.mark.nightly), 1e5])
@pytest.mark.parametrize(
    ("method", "criterion"),
    [
        ("exact", "evidence"),
        pytest.param("krylov", "evidence", marks=pytest.mark.nightly),
        ("dual", "evidence"),
        ("subset", "leave_one_out"),
        pytest.param("kfac", "validation", marks=pytest.mark.nightly),
        pytest.param("exact", "self_consistency", marks=pytest.mark.nightly),
        pytest.param("kfac", "leave_one_out", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_a_start_that_is_far_off_is_left(method: str, criterion: str, off: float) -> None:
    problem = Problem("regression", 300) if method == "dual" else labelled()
    held_out = problem.batches[-1:] if criterion == "validation" else None
    options = fit_arguments(criterion, progress=False, max_steps=30)
    la = problem.laplace(METHODS[method]).fit_hyperparameters(problem.batches, held_out, **options)
    posterior = la._fitted.posterior
    wrong = posterior.prior.with_precision(off * posterior.prior.precision)
    la._fitted.posterior = replace(posterior, prior=wrong)
    with torch.random.fork_rng():  # another network
        torch.manual_seed(7)
        for layer in (problem.model[0], problem.model[2]):
            layer.reset_parameters()
    problem.optimiser.param_groups[0]["lr"] = 0.05 if method == "dual" else 0.3
    problem.train(200)
    la.fit_hyperparameters(problem.batches, held_out, warm_start=True, **options)
    cold = problem.laplace(METHODS[method]).fit_hyperparameters(problem.batches, held_out, **options)
    assert abs(float((la.prior_precision_ / cold.prior_precision_).log())) < 0.05
    assert distance(la, cold, problem.x) < 0.05


def test_without_an_earlier_fit_it_is_cold() -> None:
    problem = Problem("classification")
    la = problem.laplace().fit(problem.batches, warm_start=True, progress=False)
    cold = problem.laplace().fit(problem.batches, progress=False)
    assert torch.equal(la.samples_, cold.samples_)


def test_data_may_change_in_number_and_order() -> None:
    problem = Problem("classification")
    la = problem.laplace().fit([(problem.x[:60], problem.y[:60])], progress=False)
    flipped = [(problem.x.flip(0), problem.y.flip(0))]
    la.fit(flipped, warm_start=True, progress=False)
    cold = problem.laplace().fit(flipped, progress=False)
    assert la.converged_
    assert distance(la, cold, problem.x) < 0.06


def test_a_loaded_posterior_is_a_start() -> None:
    problem = Problem("classification")
    fitted = problem.laplace(prior=GPrior(precision=0.3)).fit(problem.batches, progress=False)
    file = io.BytesIO()
    fitted.save(file)
    file.seek(0)
    la = LinearisedLaplace.load(file, problem.model)
    problem.train()
    counts = []
    for each in (fitted, la):
        before = products(each)
        each.fit(problem.batches, warm_start=True, progress=False)
        counts.append(products(each) - before)
    assert counts[0] == counts[1]
    assert distance(la, fitted, problem.x) < 1e-6


def test_a_warm_fit_keeps_the_precisions_that_were_found() -> None:
    problem = Problem("regression")
    la = problem.laplace().fit_hyperparameters(problem.batches, progress=False)
    alpha, noise = float(la.prior_precision_), float(la.noise_precision_)
    problem.train()
    la.fit(problem.batches, warm_start=True, progress=False)
    assert float(la.prior_precision_) == alpha
    assert float(la.noise_precision_) == noise


def test_a_warm_fit_that_was_wrong_warns() -> None:
    problem = Problem("classification")
    method = Krylov()
    la = problem.laplace(method).fit(problem.batches, progress=False)
    with torch.no_grad():
        problem.model[0].weight.mul_(-2.0)  # another network: the start is worth nothing
    la.fit(problem.batches, warm_start=True, progress=False)
    cold = problem.laplace(method).fit(problem.batches, progress=False)
    assert la.converged_
    assert distance(la, cold, problem.x) < 0.06


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("subset", "exact"), ("exact", "krylov"), ("kfac", "subset")])
def test_the_start_may_be_of_another_method(first: str, second: str) -> None:
    problem, options = labelled(), {"criterion": "leave_one_out", "progress": False}
    la = problem.laplace(first).fit_hyperparameters(problem.batches, **options)
    problem.train()
    other, cold = problem.laplace(second), problem.laplace(second).fit_hyperparameters(problem.batches, **options)
    other.start_from(la.state_dict())
    other.fit_hyperparameters(problem.batches, warm_start=True, **options)
    assert abs(float((other.prior_precision_ / cold.prior_precision_).log())) < 0.03
    assert distance(other, cold, problem.x) < 0.05
