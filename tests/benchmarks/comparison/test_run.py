"""The frame of the benchmark: tasks, networks, training, files of results, the report."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

from benchmarks import __main__ as command
from benchmarks.comparison import cost, fidelity, lines, methods, run
from benchmarks.comparison import expected as expected_module
from benchmarks.comparison.checks import checks
from benchmarks.comparison.expected import Expected
from benchmarks.comparison.networks import NETWORKS, build
from benchmarks.comparison.predictions import Fitted
from benchmarks.comparison.results import Results
from benchmarks.comparison.training import Problem, Recipe, outputs_of
from benchmarks.data.folder_tasks import folder_tasks
from benchmarks.data.shifts import CORRUPTIONS, SEVERITIES, corrupt
from benchmarks.data.tasks import TASKS, uci_tasks

SMALL = [name for name in TASKS if not any(size in name for size in ("5000", "60000", "1400"))]


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_makes_a_task(name: str) -> None:
    data, again, other = (TASKS[name].load(seed) for seed in (0, 0, 1))
    assert torch.equal(data.train.x, again.train.x)
    assert torch.equal(data.test.y, again.test.y)
    assert not torch.equal(data.train.x, other.train.x)
    for part in (data.train, data.validation, data.test, *data.shifts.values()):
        assert len(part.x) == len(part.y)
        assert part.x.isfinite().all()
    rows = {tuple(x.tolist()) for x in data.train.x.flatten(1)}
    assert not rows & {tuple(x.tolist()) for x in data.test.x.flatten(1)}


def test_corruptions_grow() -> None:
    x = TASKS["digits, n=300"].load(0).test.x
    distances = torch.stack([(corrupt(x, s) - x).flatten(1).norm(dim=1) for s in SEVERITIES])
    for number in range(len(CORRUPTIONS)):
        each = distances[:, number :: len(CORRUPTIONS)].mean(1)
        assert (each.diff() > 0).all()
        assert each[0] > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_a_start_by_the_seed(name: str) -> None:
    shape = torch.Size([1, 16, 16])
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    first, again, other = (outputs_of(build(name, shape, 10, seed=s).eval(), x) for s in (0, 0, 1))
    assert first.shape == ((3, 16, 16) if name == "pixels" else (3, 10))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    dropped = build(name, shape, 10, dropout=0.5).train()
    assert not torch.equal(dropped(x), dropped(x))


def test_early_stopping_takes_the_best_on_validation_data(tmp_path: Path) -> None:
    task = TASKS["two moons"]
    data = task.load(0)
    recipe = Recipe(steps=300, step_size=1e-2)
    end, early = (Problem(task, data, "MLP", replace(recipe, early=e), 0, "moons", tmp_path) for e in (False, True))

    def loss(problem: Problem) -> float:
        f = outputs_of(problem.network, data.validation.x)
        return float(torch.nn.functional.cross_entropy(f, data.validation.y))

    first = loss(end)
    assert len(list(tmp_path.iterdir())) == 1
    assert loss(early) < first
    assert len(list(tmp_path.iterdir())) == 1  # one run gives both


def test_training_ends_in_the_middle_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[float] = []
    plain = torch.optim.Adam.step

    def step(self: torch.optim.Adam, *arguments: object) -> object:
        sizes.append(self.param_groups[0]["lr"])
        return plain(self, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    task = TASKS["two moons"]
    # ten steps an epoch
    assert Problem(task, task.load(0), "MLP", Recipe(steps=13, batch_size=10)).network is not None
    assert len(sizes) == 13
    assert min(sizes) > 0


def test_weight_decay_makes_weights_smaller() -> None:
    task = TASKS["two moons"]
    data = task.load(0)
    norms = [
        float(
            parameters_to_vector(Problem(task, data, "MLP", Recipe(d, steps=300)).network.parameters()).detach().norm()
        )
        for d in (0.0, 1e-2)
    ]
    assert norms[1] < 0.8 * norms[0]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> run.Suite:
    """Of fast methods and short training; one method fails."""

    def broken(problem: Problem) -> Fitted:
        raise ValueError("no such thing")

    chosen = {name: methods.METHODS[name] for name in ("MAP", "temperature scaling")}
    chosen["broken"] = methods.Method(broken, tier=0)
    chosen["absent"] = methods.Method(broken, tier=0, requires="a_module_that_is_not_there")
    monkeypatch.setattr(run, "METHODS", chosen)
    recipe = Recipe(steps=20)
    return run.Suite((run.Case("two moons", "MLP", recipe), run.Case("gap", "tanh MLP", recipe, tier=0)), 2)


def work_all(suite: run.Suite, out: Path, only: str | None = None) -> int:
    left = list(run.units(suite, only, lines.read(out, run.KEY)))
    for unit in left:
        run.work(unit, out, out.parent / "networks", run.Folders(), torch.get_num_threads())
    return sum(len(unit.methods) for unit in left)


def test_what_is_there_is_not_run_again(suite: run.Suite, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    assert work_all(suite, out, "two moons") == 6
    assert work_all(suite, out) == 6
    assert work_all(suite, out) == 0
    results = lines.read(out, run.KEY)
    assert len(results) == 12
    assert {r["error"] for r in results if r["method"] == "broken"} == {"ValueError: no such thing"}
    good = next(r for r in results if r["method"] == "MAP" and r["task"] == "gap")
    assert {"seconds_fit", "passes_fit", "products_predict", "versions", "seed", "details"} <= set(good)
    assert set(good["metrics"]) == {"test", "gap"}


def test_a_line_that_was_cut_off_is_run_again(suite: run.Suite, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    work_all(suite, out)
    out.write_text(out.read_text()[:-30])
    assert work_all(suite, out) == 1
    assert len(lines.read(out, run.KEY)) == 12


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    lines.append(out, {"case": "a", "metrics": {"x": [math.nan, 1.0, math.inf]}})
    assert json.loads(out.read_text()) == {"case": "a", "metrics": {"x": [None, 1.0, None]}}


def test_time_is_estimated_from_other_seeds(suite: run.Suite) -> None:
    left = list(run.units(suite, "two moons .*(MAP|broken)"))
    done = [{"case": suite.cases[0].name, "method": "MAP", "seconds": 2.0}]
    done += [{"case": "another", "method": name, "seconds": s} for name, s in (("MAP", 50.0), ("broken", 5.0))]
    assert run.estimate(left, done) == 2 * (2.0 + 5.0)
    assert math.isnan(run.estimate(left, []))


def test_every_method_and_network_of_a_suite_is_known() -> None:
    tasks = set(TASKS) | set(folder_tasks(Path("data")))
    for suite in run.SUITES.values():
        assert {case.task for case in suite.cases} <= tasks
        assert {case.network for case in suite.cases} <= set(NETWORKS)
        assert len({case.name for case in suite.cases}) == len(suite.cases)
        assert {case.recipe.name.split(", shifts")[0] for case in suite.cases} <= {
            f"{decay}, {stop}" for decay in ("decay", "no decay") for stop in ("converged", "early")
        }


def test_list_prints_cells(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["run", "--list", "--seeds", "1", "--only", "wine .* no decay, converged / MAP", "--out"]
    command.main([*arguments, str(tmp_path / "x.jsonl")])
    assert capsys.readouterr().out.splitlines() == [
        "wine / MLP / no decay, converged / MAP / seed 0",
        "time not known before a first seed with 2 jobs",
    ]


def test_time_is_expected_from_a_step_of_training(tmp_path: Path) -> None:
    case = run.Case("two moons", "MLP", Recipe(steps=1000))
    left = [run.Unit(case, 0, ("MAP", "ours", "ensemble of 5"))]
    expected = Expected(TASKS)
    seconds = {method: expected.seconds(left[0], method) for method in left[0].methods}
    # of the same steps of training, four times as many
    overhead = expected_module.OVERHEAD
    assert seconds["ensemble of 5"] - overhead == pytest.approx(4 * (seconds["MAP"] - overhead), rel=0.1)
    assert run.estimate(left, [], TASKS) > 3 * overhead
    done = [{"case": case.name, "method": "MAP", "seconds": 1e6}]
    assert run.estimate(left, done, TASKS) > 1e6
    assert math.isnan(run.estimate(left, done))  # without tasks nothing is measured


def test_a_half_without_data_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["run", "--suite", "first", "--list"])
    assert "--suite first is on data from a folder: give --data DIR" in capsys.readouterr().err


def test_uci_tasks_are_found(tmp_path: Path) -> None:
    import numpy as np

    folder = tmp_path / "yacht"
    folder.mkdir()
    np.savetxt(folder / "data.txt", np.random.default_rng(0).normal(size=(50, 3)))
    for name, numbers in (("features", [0, 1]), ("target", [2]), ("train_0", range(40)), ("test_0", range(40, 50))):
        np.savetxt(folder / f"index_{name}.txt", list(numbers), fmt="%d")
    tasks = uci_tasks(tmp_path)
    data = tasks["uci yacht"].load(0)
    assert [len(part.y) for part in (data.train, data.validation, data.test)] == [32, 8, 10]
    assert_close(data.train.x.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert_close(data.train.y.std(), torch.tensor(1.0))


def result(case: str, method: str, seed: int, value: float, **details: float) -> dict:
    scores = {
        "log_likelihood": value,
        "brier": 0.1,
        "joint_1": value,
        "joint_3": 20 * value,
        "joint_4": 0.0,
        "joint_5": 0.0,
    }
    metrics = {"test": scores} | {f"severity {s}": {"log_likelihood": value - s} for s in SEVERITIES}
    head = {"case": case, "method": method, "seed": seed, "likelihood": "classification", "details": details}
    return head | {
        "seconds_fit": 1.0,
        "seconds_predict": 0.5,
        "passes_fit": 10.0,
        "products_predict": 64.0,
        "metrics": metrics,
    }


@pytest.fixture
def results() -> Results:
    """Two cases, one overconfident; the second seed of ours is missing in the first."""
    found = []
    for seed in range(2):
        for case, base, temperature in (("a", -1.0, 2.0), ("b", -0.5, 1.0)):
            found.append(result(case, "MAP", seed, base - seed))
            found.append(result(case, "temperature by test oracle", seed, base + 0.3, temperature=temperature))
            found.append(result(case, "MC dropout", seed, base + 0.1))
            if (case, seed) != ("a", 1):
                found.append(result(case, "ours", seed, base - seed + (0.2 if case == "a" else -0.1)))
                found.append(result(case, "ours, precision by test oracle", seed, base - seed + 0.25))
    found.append({"case": "a", "method": "SWAG", "seed": 0, "likelihood": "classification", "error": "ValueError: no"})
    return Results(found)


def test_gains_are_over_the_seeds_of_both(results: Results) -> None:
    assert_close(results.gain("a", "ours", "log_likelihood"), 0.2)
    assert_close(results.gain("b", "ours", "log_likelihood"), -0.1)
    assert_close(results.mean("a", "MAP"), -1.5)
    assert math.isnan(results.mean("a", "SWAG"))
    assert_close(results.temperature("a"), 2.0)


def test_claims_are_checked(results: Results) -> None:
    found = {claim: (figure, verdict) for claim, figure, verdict in checks(results, [], [])}
    assert found["defaults: log-likelihood not below MAP's minus 0.005 on any task"] == ("worst -0.100, b", "**no**")
    assert ("100% of 1", "yes") in found.values()
    # ours (−0.8 alone; −1.1 ± seeds) over the oracle: 0.8/0.75 and 1.1/0.75
    figure = found["defaults: within 6 % of the negative log-likelihood of the best prior precision, on average"][0]
    assert figure == f"{((0.8 / 0.75 - 1) + (1.1 / 0.75 - 1)) / 2:.1%} over 2 cases"


def test_claims_about_networks_that_were_trained_with_dropout() -> None:
    found = [result("a", "MC dropout", 0, -1.0), result("a", "ours, trained with dropout, validation", 0, -0.9)]
    for line, joint in zip(found, (-5.0, -4.5), strict=True):
        line["metrics"]["test"]["joint_3"] = joint
    claims = {claim: (figure, verdict) for claim, figure, verdict in checks(Results(found), [], [])}
    claim = "with validation, joint log-likelihood, κ = 3: against MC dropout, of the network that it trained"
    assert claims[claim] == ("+0.500", "yes")


def test_the_page_and_its_figures(results: Results, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    for line in results.lines:
        lines.append(out, line)
    near = {"study": "fidelity", "network": "LeNet", "seed": 0, "num_parameters": 100}
    near |= {"symmetrised_kl": 0.5, "symmetrised_kl_predicted": 0.5}
    for method, distance in (("KFAC", 2.0), ("ours, 64 samples", 1.0)):
        lines.append(out, near | {"method": method, "wasserstein": distance})
    for method, seconds in (("ours", 0.5), ("KFAC", 25.0)):
        cell = {"study": "cost", "outputs": 10, "size": 1e3, "method": method, "mebibytes": 10.0}
        lines.append(out, cell | {f"seconds_{step}": seconds for step in ("fit", "tune", "predict")})
    later = tmp_path / "later.jsonl"
    lines.append(later, result("b", "MAP", 0, -0.25) | {"seconds": 180.0})  # in the place of −0.5
    command.main(["report", str(out), str(later), "--page", str(tmp_path / "results.md")])
    text = (tmp_path / "results.md").read_text()
    assert f"{len(results.lines)} results, 2 pairs" in text
    assert "3 minutes one after another" in text
    assert "| a | 2 | 2.00 | -1.500 |" in text
    assert "| b | 2 | 1.00 | -0.875 |" in text
    assert "| SWAG | `ValueError: no` | a |" in text
    assert "| 64 samples nearest to exact, wasserstein, P = 100 | 1; KFAC 2 | yes |" in text
    assert "50 to 50 times | yes |" in text
    assert "| 10 | 1e+03 | 0.5 |" in text
    for image in ("results_shift.png", "results_fidelity.png"):
        assert f"images/{image}" in text
        assert (tmp_path / "images" / image).stat().st_size > 1000


def test_sizes_of_the_cost_report() -> None:
    for outputs, size, _ in cost.cells("full"):
        with torch.device("meta"):
            found = sum(p.numel() for p in cost.network(outputs, size).parameters())
        assert 0.8 * size <= found <= 1.25 * size
    assert (1000, 1e3, "ours") not in cost.cells("full")


def test_a_cell_of_the_cost_report(capsys: pytest.CaptureFixture[str]) -> None:
    cost.measure(2, 1e3, "ours")
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # a line after each step: what ended counts even if the process is ended later
    assert [len(step) for step in steps] == [3, 4, 5, 6]
    assert min(steps[-1][f"seconds_{step}"] for step in ("fit", "tune", "first", "predict")) > 0
    assert steps[-1]["mebibytes"] >= 0


def test_a_cell_that_takes_too_long_is_an_entry() -> None:
    assert cost.run_cell(2, 1e3, "ours", 0.2) == {"error": "more than 0.2 s"}


def test_more_samples_are_nearer_to_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "TEST", 40)
    monkeypatch.setattr(fidelity, "DRAWS", 512)
    rising = ("MAP", "ours, 16 samples", "ours, 256 samples")
    names = (*rising, "ours, at most 5 epochs")
    monkeypatch.setattr(fidelity, "METHODS_COMPARED", {name: fidelity.METHODS_COMPARED[name] for name in names})
    case = run.Case("two moons", "MLP", Recipe(weight_decay=1e-3, steps=100))
    found = {r["method"]: r for r in fidelity.distances(run.problem_of(case, 0, None))}
    for metric in ("symmetrised_kl", "wasserstein"):
        values = [found[name][metric] for name in rising]
        assert values == sorted(values, reverse=True)
    # the standard error of a standard deviation from 256 samples is 4.4 %; that of a point is all of it
    assert found["ours, 256 samples"]["wasserstein"] < 0.15 * found["MAP"]["wasserstein"]
    # operations are counted: none for the network alone; 16 samples take fewer than 256
    epochs = [found[name]["epochs_of_fit"] for name in rising]
    assert epochs[0] == 0 < epochs[1] < epochs[2]
    # dense algebra on so few data and weights is exact
    assert found["ours, at most 5 epochs"]["wasserstein"] < 1e-3 * found["MAP"]["wasserstein"]


def test_the_exact_posterior_is_stored_beside_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "TEST", 10)
    case = run.Case("two moons", "MLP", Recipe(weight_decay=1e-3, steps=100))
    first = fidelity.reference_of(run.problem_of(case, 0, tmp_path))
    monkeypatch.setattr(fidelity, "exact", lambda problem: pytest.fail("it is computed again"))
    second = fidelity.reference_of(run.problem_of(case, 0, tmp_path))
    assert second.precision == first.precision
    assert torch.equal(second.covariance, first.covariance)
    assert torch.equal(second.outputs, first.outputs)
    assert first.covariance.shape == (10, 2, 2)
