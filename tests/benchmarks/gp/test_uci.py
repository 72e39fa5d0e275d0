"""The benchmark of small regressions on generated data in the format of the UCI folder."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.data.uci import Split, load
from benchmarks.gp import processes, regression_task, regressors, uci


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regression_task, "WIDTH", 8)
    monkeypatch.setattr(regression_task, "NETWORK_STEPS", 20)
    monkeypatch.setattr(regressors, "DROPOUT_STEPS", 20)
    monkeypatch.setattr(processes, "PROCESS_STEPS", 20)
    monkeypatch.setattr(processes, "KERNEL_STEPS", 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two data sets of two splits; the target is not the last column, and one column is constant."""
    for number, name in enumerate(("concrete", "yacht")):
        generator = np.random.default_rng(number)
        x = generator.normal(size=(60, 2))
        y = 100 + 10 * np.sin(2 * x[:, 0]) + x[:, 1] + generator.normal(size=60)
        directory = tmp_path / name
        directory.mkdir()
        np.savetxt(directory / "data.txt", np.column_stack([x, y, np.ones(60)]))
        np.savetxt(directory / "index_features.txt", [0, 1, 3], fmt="%d")
        np.savetxt(directory / "index_target.txt", [2], fmt="%d")
        for split in range(2):
            order = generator.permutation(60)
            np.savetxt(directory / f"index_train_{split}.txt", order[:50], fmt="%d")
            np.savetxt(directory / f"index_test_{split}.txt", order[50:], fmt="%d")
    return tmp_path


def run(folder: Path, out: Path, *arguments: str) -> list[dict]:
    arguments = (
        "--uci",
        str(folder),
        "--out",
        str(out),
        "--sets",
        "concrete",
        "yacht",
        "--splits",
        "0",
        "1",
        *arguments,
    )
    uci.main(arguments)
    return [json.loads(line) for line in out.read_text().splitlines()]


FAST = ("MAP, noise of training residuals", "ours, affine, isotropic", "GP, RBF")


def test_every_method_gives_scores_in_the_units_of_the_targets(folder: Path, tmp_path: Path) -> None:
    methods = [m for m in regressors.METHODS if m != "laplace-torch, full"]
    split = load(folder / "concrete", 0)
    assert split.x.shape == (50, 3)
    assert split.y_test.shape == (10,)
    results = list(uci.evaluate(split, methods, 2, seed=0))
    assert [r["method"] for r in results] == methods
    for result in results:
        assert 0 < result["rmse"] < 30
        assert 0 <= result["coverage"] <= 1
        assert result["log_likelihood"] < 0  # of one datum, whose noise has a standard deviation of one
        assert math.isfinite(result["log_likelihood"])


def test_lines_that_are_there_are_not_made_again(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "results.jsonl"
    rows = run(folder, out, "--depths", "1", "--methods", *FAST)
    assert len(rows) == 2 * 2 * 3
    assert {r["depth"] for r in rows} == {0, 1}
    # A line is lost: it comes back the same, and no other is written.
    out.write_text("".join(json.dumps(r) + "\n" for r in rows[:4] + rows[5:]))
    again = run(folder, out, "--depths", "1", "--methods", *FAST, "--table")
    assert len(again) == len(rows)
    assert again[:-1] == rows[:4] + rows[5:]
    assert again[-1] | {"seconds": 0} == rows[4] | {"seconds": 0}
    text = capsys.readouterr().out
    assert text.count("| ours, affine, isotropic |") == 3  # log-likelihood, RMSE, coverage
    assert text.count("| GP, RBF |") == 3
    assert "±" in text


def test_no_method_sees_test_targets(folder: Path) -> None:
    split = load(folder / "yacht", 1)
    other = Split(split.x, split.y, split.x_test, split.y_test + 5.0)
    methods = ["MAP, noise of held-out residuals", "ours, affine, g-prior", "MC dropout", "GP, RBF"]
    for one, two in zip(uci.evaluate(split, methods, 1, 0), uci.evaluate(other, methods, 1, 0), strict=True):
        assert one["details"] == two["details"]
        assert one["rmse"] != two["rmse"]


def test_mixtures_of_equal_weights() -> None:
    outcome = regression_task.gaussian(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), 0.5)
    torch.testing.assert_close(outcome.distribution.mean, torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(outcome.distribution.variance, torch.tensor([1.25, 0.25]))


def test_laplace_torch_gives_the_same_error_bars_at_the_same_hyperparameters(folder: Path) -> None:
    laplace = pytest.importorskip("laplace", reason="laplace-torch is a baseline of the benchmark, not a dependency")
    split = load(folder / "concrete", 0)
    x, y, x_test = (torch.from_numpy(v) for v in (split.x, (split.y - 100) / 10, split.x_test))
    task = regression_task.Task(x, y, x_test, 1, 0, 1e-3)
    outcome = regressors.laplace_torch(task)
    la = laplace.FullLaplace(task.map, "regression", sigma_noise=outcome.details["noise"])
    la.prior_precision = outcome.details["precision"]
    la.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y[:, None])))
    _, variance = la(x_test)
    torch.testing.assert_close(
        outcome.distribution.variance, variance.flatten() + outcome.details["noise"] ** 2, rtol=1e-6, atol=0
    )
    fit = regressors.fit_tangent(task, "isotropic", "affine", "network")
    stddev = fit.posterior.at(task.tangent[2]).stddev(outcome.details["precision"], outcome.details["noise"] ** -2)
    torch.testing.assert_close(stddev[:, 0] ** 2, variance.flatten(), rtol=1e-5, atol=0)
