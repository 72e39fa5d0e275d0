"""Choice of method, accuracy asked for, memory and failure, through the public class."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from laplace_sampling.methods.plan import Plan, make_plan
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import SGD, ConvergenceWarning, Gaussian, LinearisedLaplace
from laplace_sampling.linear_model.cost import Cost, measure
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.sampling import PosteriorSamples, draw
from laplace_sampling.solvers.dense import Dense
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.preconditioners import Nystrom
from laplace_sampling.solvers.svrg import SVRG


def problem(likelihood: str = "regression", inputs: int = 60, num_data: int = 80) -> tuple[nn.Module, list]:
    """A linear network on inputs whose variances fall over three decades."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(num_data, inputs, generator=g) * torch.logspace(0, -1.5, inputs)
    model = nn.Linear(inputs, 1 if likelihood == "regression" else 2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(model.weight.shape, generator=g))
        model.bias.zero_()
        noise = 0.3 * torch.randn(num_data, len(model.bias), generator=g)
        y = model(x) + noise if likelihood == "regression" else (model(x) + noise).argmax(1)
    return model.double(), [(x.double(), y.double() if likelihood == "regression" else y)]


# Tolerance --------------------------------------------------------------------------------------------------------


def test_solvers_take_what_the_tolerance_asks() -> None:
    plan = Plan("krylov", "", vectors=1e6, num_samples=4)
    default = partial(Plan.solver, tolerance=0.015, given=SGD(), seed=0)
    tight = partial(Plan.solver, tolerance=0.0015, given=SGD(), seed=0)
    assert default(plan).tolerance == BlockKrylov().tolerance
    assert tight(plan).tolerance == pytest.approx(0.003)
    short = replace(plan, vectors=100)
    assert isinstance(default(short), CG)
    assert default(short).tolerance == CG().tolerance
    assert tight(short).tolerance == pytest.approx(0.003)
    assert default(replace(plan, method="svrg")).tolerance == pytest.approx(SVRG().tolerance)
    assert tight(replace(plan, method="svrg")).tolerance == pytest.approx(0.001)
    assert default(replace(plan, method="sgd")) == SGD()
    assert tight(replace(plan, method="sgd")).tolerance == pytest.approx(0.05)
    assert isinstance(default(replace(plan, method="exact")), Dense)
    assert Plan.solver(plan, 10.0, SGD(), 0).tolerance == 0.5
    assert Plan.solver(replace(plan, method="sgd"), 10.0, SGD(), 0) == SGD()


def test_a_tighter_tolerance_is_closer_to_dense_algebra() -> None:
    model, data = problem(inputs=120, num_data=100)
    settings = {"prior": "isotropic", "noise_precision": 5.0, "num_samples": 2}
    exact = laplace_of(model, "regression", method="exact", **settings)
    exact.fit_hyperparameters(data, max_steps=2000, tolerance=1e-6, progress=False)
    best = float(exact.prior_precision_.log())
    fixed = {**settings, "prior_precision": 0.05}
    truth = laplace_of(model, "regression", method="exact", **fixed).fit(data, progress=False)
    alphas, errors = [], []
    for tolerance in (0.2, 0.015, 0.004):
        la = laplace_of(model, "regression", method="krylov", **settings)
        la.fit_hyperparameters(data, tolerance=tolerance, max_steps=20, progress=False)
        alphas.append(abs(float(la.prior_precision_.log()) - best))
        drawn = laplace_of(model, "regression", method="krylov", **fixed).fit(data, tolerance=tolerance, progress=False)
        f, g = (one.predict(data[0][0]).samples for one in (truth, drawn))
        errors.append(float(((f - g).flatten(1).norm(dim=1) / f.flatten(1).norm(dim=1)).max()))
        assert errors[-1] <= 2 * tolerance
        assert alphas[-1] <= 3 * 2 * tolerance  # three standard errors
    print("errors of log α", alphas, "of samples", errors)
    assert errors[0] > errors[1] > errors[2]
    assert alphas[2] < alphas[0]
    assert alphas[2] <= alphas[1] + 1e-9


def test_errors_of_a_solve_are_independent_of_the_sample() -> None:
    """So that they add to variances, by the square of their size."""
    model, data = problem(num_data=40)
    la = laplace_of(model, "regression", method="krylov", prior="isotropic", prior_precision=0.1, num_samples=2)
    la.fit(data, progress=False)
    linear = la._fitted.fit.model
    ggn, prior, draws = linear.ggn(linear.network_outputs), la._fitted.posterior.prior, Draws(3000, 0)
    root = torch.cat(list(ggn.root_rows())).double()
    rows = partial(draw, ggn, prior, draws, rows=3000, dtype=torch.float64)
    truth, rough = (rows(solver).samples @ root.T for solver in (Dense(), CG(0.4)))
    inner, squared = (truth * (rough - truth)).sum(1), ((rough - truth) ** 2).sum(1)
    error = float(inner.std()) / len(inner) ** 0.5
    assert abs(float(inner.mean())) < 4 * error
    assert float(squared.mean()) > 20 * error  # the error is there to be seen


def test_a_tolerance_must_be_positive() -> None:
    model, data = problem()
    with pytest.raises(ValueError, match="`fit` needs a positive tolerance, got 0"):
        LinearisedLaplace(model, "regression").fit(data, tolerance=0.0)


# Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", ["isotropic", "layerwise"])
def test_little_memory_gives_the_same_samples_with_one_preconditioner(prior: str, monkeypatch) -> None:
    model, data = problem("classification")
    made = []
    of = Nystrom.of
    monkeypatch.setattr(Nystrom, "of", lambda *args, **kwargs: made.append(1) or of(*args, **kwargs))
    size = 8 * sum(p.numel() for p in model.parameters())
    settings = {"prior": prior, "prior_precision": 0.1, "num_samples": 8, "method": "krylov", "hessian_at": "network"}
    plenty = laplace_of(model, "classification", **settings).fit(data, tolerance=1e-5, progress=False)
    assert made == []
    little = laplace_of(model, "classification", max_memory=100 * size, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of ten steps of EM
        little.fit_hyperparameters(data, progress=False)
    little.sample(3)
    assert made == [1]
    assert "preconditioned conjugate gradients" in repr(little)
    assert isinstance(little._fitted.fit.solver, CG)
    assert little._fitted.fit.solver.preconditioner is not None
    assert 1 <= little._fitted.fit.plan.rows(8) < 8
    little.fit(data, tolerance=1e-5, progress=False)
    assert little.converged_
    assert_close(little.samples_, plenty.samples_, rtol=1e-3, atol=1e-4)
    assert_close(little.effective_dimension_, plenty.effective_dimension_, rtol=1e-4, atol=1e-4)
    assert_close(little.sample(3), plenty.sample(3), rtol=1e-3, atol=1e-4)


def test_too_little_memory_says_what_it_takes() -> None:
    model, data = problem()
    la = laplace_of(model, "regression", method="krylov", num_samples=8, max_memory=20 * 8 * 61)
    with pytest.raises(ValueError, match=r"max_memory of 9.76e\+03 bytes holds 20 vectors of 61 weights, but 8"):
        la.fit(data, progress=False)


def test_a_full_basis_falls_back_to_em(monkeypatch) -> None:
    model, data = problem(inputs=30, num_data=40)
    monkeypatch.setattr(Plan, "short", False)
    monkeypatch.setattr(Plan, "max_basis", 12)
    known, settings = Gaussian(10.0, learn=False), {"prior": "isotropic", "num_samples": 4}
    la = laplace_of(model, known, method="krylov", **settings)
    la.fit_hyperparameters(data, max_steps=200, num_samples=64, tolerance=0.005, progress=False)
    assert all(step.sample_residual > 0 for step in la.history_)  # paths have no samples
    exact = laplace_of(model, Gaussian(10.0, learn=False), method="exact", **{**settings, "noise_precision": 1.0})
    exact.fit_hyperparameters(data, max_steps=2000, tolerance=1e-5, progress=False)
    gamma = float(exact.effective_dimension_)
    # γ ≤ rank: its relative standard error is at most √(2/(64 γ)); α moves by about as much, twice that is generous
    ratio = float(la.prior_precision_ / exact.prior_precision_)
    assert abs(ratio - 1) < 2 * 4 * (2 / (64 * gamma)) ** 0.5


# Choice -----------------------------------------------------------------------------------------------------------


def test_operations_are_counted_and_the_same_each_time() -> None:
    model, data = problem("classification")
    plan = LinearisedLaplace(model, "classification", method="krylov", num_samples=2).fit(data, progress=False)
    first, second = (measure(plan._fitted.fit.model.features) for _ in range(2))
    product = 2 * 60 * 2  # multiplications and additions of x W: two products at least, the network and its derivative
    assert 2 * product <= first.jvp <= 3 * product
    assert 2 * product <= first.vjp <= 3 * product
    assert (first.jvp, first.vjp) == (second.jvp, second.vjp)
    assert first.seconds > 0


@pytest.mark.parametrize(
    ("num_data", "size", "operations", "method"),
    [
        (100, 55, 1.0, "exact"),  # small
        (500, 3000, 1e6, "krylov"),
        (500, 3000, 1e10, "exact"),  # a Jacobian costs less than many passes of an expensive network
        (1900, 1900, 1.0, "krylov"),  # factorisations cost more than passes of a cheap one, and it pays
        (30_000, 3000, 1e6, "svrg"),
        (30_000, 3000, 1e3, "sgd"),  # a preconditioner would cost more than the passes that it saves
        (30_000, 10**6, 1e6, "sgd"),  # memory holds no preconditioner
    ],
)
def test_auto_goes_by_size_unless_operations_differ_much(num_data, size, operations, method) -> None:
    features = DenseFeatures(torch.zeros(1, 5, 1).expand(num_data, 5, size))
    plan = make_plan("auto", features, 16, 1e9, lambda _: Cost(operations, operations, 1.0))
    assert plan.method == method
    assert make_plan("auto", features, 16, 1e9, lambda _: Cost(operations, operations, 1e9)).reason == plan.reason
    if operations == 1e10:
        assert "products of this network are expensive" in plan.reason
        assert make_plan("auto", features, 16, 1e7, lambda _: Cost(operations, operations, 1.0)).method == "krylov"


def test_print_tells_the_time_and_repr_does_not() -> None:
    model, data = problem()
    la = LinearisedLaplace(model, "regression").fit(data, progress=False)
    assert "a pass of products takes about" in str(la)
    assert "takes about" not in repr(la)


# Bounds and failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "krylov"])
def test_the_noise_is_kept_within_its_bounds(method: str) -> None:
    model, data = problem()
    la = laplace_of(model, "regression", method=method, prior="isotropic", num_samples=2)
    with pytest.warns(ConvergenceWarning, match=r"ended at one of noise_bounds=\(0.1, 2.0\) for the noise") as record:
        la.fit_hyperparameters(data, noise_bounds=(0.1, 2.0), max_steps=200, progress=False)
    assert len(record) == 1
    assert float(la.noise_precision_) == 2.0
    assert "noise" in la.diagnose().at_bounds
    with pytest.raises(ValueError, match=r"`noise_bounds` must be positive and in order, but is \(2.0, 1.0\)"):
        LinearisedLaplace(model, "regression", method="exact").fit_hyperparameters(
            data, noise_bounds=(2.0, 1.0), progress=False
        )


FAILING = {
    "krylov": lambda: BlockKrylov(1e-9, max_iterations=1),
    "sgd": lambda: SGD(epochs=0.1, min_steps=1, mode_epochs=0.1, max_doublings=0, tolerance=1e-6),
    "svrg": lambda: SVRG(tolerance=1e-12, max_snapshots=1),
}


@pytest.mark.parametrize("method", list(FAILING))
@pytest.mark.parametrize("call", ["fit", "fit_hyperparameters"])
def test_a_failing_solve_is_told_once_and_everywhere(method: str, call: str, monkeypatch) -> None:
    model, data = problem("classification")
    monkeypatch.setattr(Plan, "solver", lambda *_: FAILING[method]())
    settings = {"prior": "isotropic", "prior_precision": 0.01, "num_samples": 8}  # few, or a block would span it all
    la = laplace_of(model, "classification", method=method, **settings)
    with pytest.warns(ConvergenceWarning, match="The samples have not converged: residual") as record:
        getattr(la, call)(data, progress=False)
    assert len(record) == 1
    assert record[0].filename == __file__
    assert la.converged_ is False
    diagnosis = la.diagnose()
    assert not diagnosis.solver_converged
    assert not diagnosis.ok
    assert "The samples have not converged" in str(diagnosis)
    with pytest.warns(ConvergenceWarning, match="The samples have not converged: residual") as record:
        la.sample(2)
    assert len(record) == 1
    assert record[0].filename == __file__
    la._fitted.fit = replace(la._fitted.fit, minimum=replace(la._fitted.fit.minimum, converged=False))
    with pytest.warns(ConvergenceWarning, match=r"`log_marginal_likelihood` is inaccurate: the mode") as record:
        la.log_marginal_likelihood()
    assert len(record) == 1
    assert record[0].filename == __file__


def test_a_warning_names_only_what_has_not_converged() -> None:
    model, data = problem()
    la = LinearisedLaplace(model, "regression", method="krylov", prior="isotropic", num_samples=12)
    fit = la.fit(data, progress=False)._fitted.fit
    tolerance = fit.judge(fit.sampled)[1]
    assert fit.problems == []

    def errors(wrong: list[int]) -> PosteriorSamples:
        bad = torch.full((12,), 0.1 * tolerance, dtype=torch.float64)
        bad[wrong] = 0.5
        return replace(fit.sampled, error=bad, converged=False)

    (said, do) = replace(fit, sampled=errors([0, 7])).problems
    assert said == (
        f"The samples have not converged: residual 0.5 at most, above the tolerance {tolerance:.2g} for 2 (0, 7) of 12."
    )
    assert "larger prior precision" in do
    assert "for 9 (0, 1, 2, 3, 4, 5, 6, 7, …) of 12" in fit.unconverged(errors([*range(9)]))
    assert "for all of 12" in fit.unconverged(errors([*range(12)]))
    assert "says the solver, though no residual is above" in fit.unconverged(errors([]))
    mode = replace(fit.minimum, converged=False, residual=0.25)
    (said, do) = replace(fit, minimum=mode).problems
    assert said == "The mode of the linear model has not converged: residual 0.25."
    words = replace(fit, minimum=mode, sampled=errors([3]), tuned=replace(fit.tuned, problems=["α moves."])).problems
    assert [word.split()[:3] for word in words[:3]] == [
        ["α", "moves."],
        ["The", "mode", "of"],
        ["The", "samples", "have"],
    ]
    assert replace(fit, tuned=replace(fit.tuned, problems=["α moves."])).problems == ["α moves."]


def test_a_full_basis_makes_the_evidence_inaccurate_and_says_so(monkeypatch) -> None:
    model, data = problem(inputs=100, num_data=60)
    la = laplace_of(model, "regression", method="krylov", prior="isotropic", prior_precision=1e-3, num_samples=2)
    la.fit(data, progress=False)
    assert la.converged_
    la.log_marginal_likelihood()
    monkeypatch.setattr(Plan, "max_basis", 12)
    with pytest.warns(
        ConvergenceWarning,
        match=r"is inaccurate: memory was full before it was accurate: more iterations may .*max_memory",
    ):
        la.log_marginal_likelihood()


def test_convergence_survives_a_reload(tmp_path) -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression", prior="layerwise")
    with pytest.warns(ConvergenceWarning, match="stopped after 1 steps"):
        la.fit_hyperparameters(case.batches, max_steps=1, progress=False)
    la.save(tmp_path / "la.pt")
    assert la.converged_ is False
    assert LinearisedLaplace.load(tmp_path / "la.pt", case.model).converged_ is False


def test_svrg_makes_one_preconditioner_for_em_and_all_samples(monkeypatch) -> None:
    made, solves = [], []
    of_rows, solve = Nystrom.of_rows.__func__, SVRG.solve
    monkeypatch.setattr(Nystrom, "of_rows", classmethod(lambda *a, **k: made.append(1) or of_rows(*a, **k)))
    monkeypatch.setattr(SVRG, "solve", lambda *a, **k: solves.append(solve(*a, **k)) or solves[-1])
    monkeypatch.setattr(SVRG, "minimise", lambda _, *a, **k: Dense().minimise(*a, **k))  # the mode is found without
    model, data = problem(inputs=10, num_data=40)
    la = laplace_of(model, "regression", method="svrg", prior="layerwise", num_samples=2)
    la.fit_hyperparameters(
        data, num_samples=4, tolerance=0.05, max_steps=30, progress=False
    )  # the noise is learnt, too
    steps = len(la.history_)
    assert len(solves) == steps + 1
    la.sample(2)
    la.sample(1)
    assert len(solves) == steps + 3 > 5
    assert len(made) == 1


# Layer-wise priors ------------------------------------------------------------------------------------------------


def test_layerwise_priors_go_by_em_with_warm_starts(monkeypatch) -> None:
    model, data = problem("classification")
    starts: list[Tensor | None] = []
    solve = BlockKrylov.solve

    def recorded(self, problem, init=None, *, description=None):
        solution = solve(self, problem, init, description=description)
        starts.append(init)
        if init is not None and len(problem.centre) == 16:
            cold = solve(self, problem)
            warm_and_cold.append((solution.passes, cold.passes))
        return solution

    warm_and_cold: list[tuple[float, float]] = []
    monkeypatch.setattr(BlockKrylov, "solve", recorded)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(model, nn.Tanh(), nn.Linear(2, 2).double())
    settings = {"prior": "layerwise", "hessian_at": "network", "num_samples": 2}
    la = laplace_of(model, "classification", method="krylov", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of five steps
        la.fit_hyperparameters(data, max_steps=5, tolerance=0.001, progress=False)
    assert len(starts) == len(la.history_) + 1
    assert starts[0] is None
    assert starts[-1] is None  # the samples that are kept are new ones
    assert all(start is not None for start in starts[1:-1])
    assert len(warm_and_cold) == len(la.history_) - 1
    assert sum(warm for warm, _ in warm_and_cold) <= 1.1 * sum(cold for _, cold in warm_and_cold)
    exact = laplace_of(model, "classification", method="exact", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        exact.fit_hyperparameters(data, max_steps=5, tolerance=0.001, progress=False)
    assert len(la.prior_precision_) == 2
    for step, other in zip(la.history_[:2], exact.history_[:2], strict=True):
        # the exact γ has no error; that of its samples is told
        allowed = 5 * torch.tensor(step.effective_dimension_se) / torch.tensor(step.effective_dimension) + 0.05
        ratio = torch.tensor(step.new_prior_precision) / torch.tensor(other.new_prior_precision)
        assert (ratio.log().abs() < 2 * allowed).all()
