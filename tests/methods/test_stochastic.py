"""Mini-batches: the preconditioner, and when one is worth having."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from cases import Case, make_case
from flat_settings import laplace_of
from problems import linear_problem, make_prior, trained, unsolved_problem
from torch import nn

from laplace_sampling import (
    SGD,
    SVRG,
    ConvergenceWarning,
    Evidence,
    Gaussian,
    IsotropicPrior,
    LinearisedLaplace,
    Stochastic,
)
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.methods.problem import Memory
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.preconditioners import Nystrom


def test_svrg_makes_one_preconditioner_for_em_and_all_samples(monkeypatch) -> None:
    made, solves = [], []
    of_root, solve = Nystrom.of_root.__func__, SVRG.solve
    monkeypatch.setattr(Nystrom, "of_root", classmethod(lambda *a, **k: made.append(1) or of_root(*a, **k)))
    monkeypatch.setattr(SVRG, "solve", lambda *a, **k: solves.append(solve(*a, **k)) or solves[-1])
    monkeypatch.setattr(SVRG, "minimise", lambda _, *a, **k: Dense().minimise(*a, **k))  # the mode is found without
    model, data = linear_problem(inputs=10, num_data=40)
    la = laplace_of(model, "regression", method="svrg", prior="layerwise", num_samples=2)
    la.fit_hyperparameters(
        data, criterion=Evidence(num_samples=4, max_steps=30), tolerance=0.05, progress=False
    )  # the noise is learnt, too
    steps = len(la.history_)
    assert len(solves) == steps + 1
    la.sample(2)
    la.sample(1)
    assert len(solves) == steps + 3 > 5
    assert len(made) == 1


@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
@pytest.mark.parametrize(("outputs", "held"), [(1, True), (3, False)])
def test_noises_of_several_outputs_take_new_preconditioners(outputs: int, held: bool) -> None:
    case = make_case("regression_per_output")
    la = laplace_of(case.model, Gaussian(torch.ones(outputs)), method="svrg", num_samples=2)
    la.fit_hyperparameters(case.batches, criterion=Evidence(num_samples=2, max_steps=1), progress=False)
    assert (la._fitted.fit.solver.held is not None) == held


@pytest.mark.parametrize("num_data", [1, 2, 4])
def test_samples_of_very_few_data_are_right_under_a_weak_prior(num_data: int) -> None:
    """One random row of each datum says little of what data of four outputs decide: beside exact samples."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_data, 2, generator=generator, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (num_data,), generator=generator)
    found, exact = (
        LinearisedLaplace(
            model, "classification", prior=IsotropicPrior(precision=1e-3), method=method, num_samples=20
        ).fit([(x, y)], progress=False)
        for method in (Stochastic(solver=SVRG()), "exact")
    )
    expected = exact.predict(x).deviations
    assert found.converged_
    assert float((found.predict(x).deviations - expected).norm()) < 0.01 * float(expected.norm())


def spirals() -> Case:
    """A classifier of three classes after a few steps, whose data differ much in their curvature."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (150,), generator=generator)
    angle = 3 * torch.rand(150, generator=generator, dtype=torch.float64)
    x = torch.stack([(angle + 2 * y).sin(), (angle + 2 * y).cos()], dim=1) * angle[:, None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    return Case(model, Categorical(), x, y, 40)


@pytest.mark.slow
@pytest.mark.parametrize("make", [partial(trained, 150), spirals], ids=["regression", "classification"])
@pytest.mark.parametrize("rank", [4, 512])
def test_svrg_gives_the_samples_of_matherons_rule_for_the_same_draws(make: Callable[[], Case], rank: int) -> None:
    """`θ⁰ + A⁻¹R(I + RᵀA⁻¹R)⁻¹(z − Rᵀθ⁰)` by dense algebra, `R = ΦᵀL`, with few vectors of a preconditioner or all."""
    model = (case := make()).linear_model("homogeneous")
    ggn, prior, draws = model.ggn(model.network_outputs), make_prior(model, case, "isotropic"), Draws(4, 1)
    rows, spread = torch.cat([*ggn.root_rows()]), prior.spread()
    centre = draws.prior(ggn.size).double() / spread.sqrt()
    z = draws.noise(model.features.num_outputs)(torch.arange(150)).double().flatten(1)
    gram = rows / spread @ rows.T + torch.eye(len(rows)).double()
    exact = centre + torch.linalg.solve(gram, (z - centre @ rows.T).T).T @ rows / spread
    found = sample_posterior(ggn, prior, draws, SVRG(tolerance=1e-8, max_rank=rank))
    assert found.converged
    gap, size = ((value @ rows.T).norm(dim=1) for value in (found.value - exact, exact))
    assert float((gap / size).max()) < 1e-3


def test_the_rank_is_what_memory_holds_and_what_was_asked_for() -> None:
    memory = partial(Memory, given=True, vector=1)
    preconditioned = Stochastic(solver=SVRG())
    assert preconditioned.rank(memory(1e6), 64) == SVRG().max_rank
    assert Stochastic(solver=SVRG(max_rank=30)).rank(memory(1e6), 64) == 30
    # Four rows of data for each of the rank, their factor, and what a product needs.
    assert preconditioned.rank(memory(64 + 22 + 8 * 50), 64) == 50
    assert preconditioned.rank(memory(0), 64) == 1
    assert Stochastic(solver=SGD()).preconditioner_vectors(memory(1e6), 64) == 0


@pytest.mark.parametrize(("max_memory", "solver"), [(1e9, SVRG), (6e6, SGD)])
def test_a_preconditioner_is_made_where_memory_holds_it(max_memory: float, solver: type) -> None:
    choice = Stochastic(max_memory=max_memory).choose(unsolved_problem(30_000, 3000, 1e9, num_samples=64))
    assert isinstance(choice.method, Stochastic)
    assert isinstance(choice.method.solver, solver)
    assert choice.method.max_memory == max_memory
    assert ("preconditioned by" in choice.reason) == (solver is SVRG)
    given = Stochastic(solver=SGD(epochs=3))
    assert given.choose(unsolved_problem(30_000, 3000, 1e9)).method == given


def test_a_stream_has_no_mini_batches() -> None:
    problem = unsolved_problem(100, 10, 1e9, in_order=True)
    with pytest.raises(ValueError, match="krylov"):
        Stochastic(solver=SGD()).check(problem)


@pytest.mark.parametrize("precision", [0.03, 0.3, 3.0])
@pytest.mark.parametrize("solver", [SGD(), SVRG()])
def test_standard_deviations_are_within_the_tolerance_of_the_exact_samples(solver: SGD | SVRG, precision: float):
    case = trained()
    settings = {"prior": IsotropicPrior(precision=precision), "num_samples": 64}
    data = [(case.x, case.y)]

    def stddev(method: Stochastic | str, **options: float) -> torch.Tensor:
        la = LinearisedLaplace(case.model, case.likelihood, method=method, **settings)
        la.fit(data, progress=False, **options)
        assert la.converged_
        return la.predict(case.x).samples.square().mean(0).sqrt()

    got, wanted = stddev(Stochastic(solver=solver)), stddev("krylov", tolerance=1e-8)
    assert float((got - wanted).norm() / wanted.norm()) < 0.015


def test_samples_that_the_budget_leaves_are_told() -> None:
    case = trained()
    la = LinearisedLaplace(
        case.model,
        case.likelihood,
        prior=IsotropicPrior(precision=1e-3),
        method=Stochastic(solver=SGD(finish_passes=1)),
        num_samples=4,
    )
    with pytest.warns(ConvergenceWarning, match="finish_passes"):
        la.fit([(case.x, case.y)], progress=False)
    assert not la.converged_
