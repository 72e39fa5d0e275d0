"""Fits that are killed go on from their file to the same numbers, bit for bit."""

import contextlib
import multiprocessing
import sqlite3
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from flat_settings import fit_arguments
from torch import Tensor, nn

import laplace_sampling.checkpoint as checkpoints
from laplace_sampling import (
    SGD,
    SVRG,
    CalibrationWarning,
    ConvergenceWarning,
    Data,
    Evidence,
    Gaussian,
    LinearisedLaplace,
    Stochastic,
    from_loss,
    preparation,
)
from laplace_sampling.checkpoint import Results
from laplace_sampling.linear_model import sampling
from laplace_sampling.methods.method import Method

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind.__module__}.{kind.__name__}")
    for kind in (ConvergenceWarning, CalibrationWarning)
]

SGD_ = Stochastic(solver=SGD(epochs=2, min_steps=20, mode_epochs=4))
# What is fitted by which method, and other arguments of the constructor.
FITS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "auto": ("classification", "auto", {}),
    "exact": ("classification", "exact", {}),
    "exact, regression": ("regression", "exact", {}),
    "krylov": ("classification", "krylov", {}),
    "krylov, g-prior": ("regression", "krylov", {"prior": "g-prior"}),
    "krylov, layer-wise": ("regression", "krylov", {"prior": "layerwise"}),
    "stochastic": ("classification", Stochastic(solver=SVRG(max_rank=16)), {}),
    "sgd": ("regression", SGD_, {}),
    "kfac": ("classification", "kfac", {}),
    "diagonal": ("classification", "diagonal", {}),
    "subset": ("classification", "subset", {}),
    "dual": ("regression", "dual", {}),
    "last_layer": ("classification", "last_layer", {"parameters": "last_layer"}),
}


class Killed(BaseException):
    """In the place of SIGKILL, which leaves as much in the file."""


def data(num: int = 60, likelihood: str = "classification") -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(num, 3, generator=torch.Generator().manual_seed(0))
    y = torch.sin(x[:, :1]) if likelihood == "regression" else (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    return list(zip(x.split(25), y.split(25), strict=True))


def network(outputs: int = 3, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, outputs))


def laplace(likelihood: Any = "classification", method: Any = "krylov", **settings: Any) -> LinearisedLaplace:
    model = settings.pop("model", None) or network(1 if likelihood == "regression" else 3)
    return LinearisedLaplace(model, likelihood, method=method, **{"num_samples": 4, **settings})


def fitted(name: str, path: Path | None = None, **arguments: Any) -> LinearisedLaplace:
    likelihood, method, settings = FITS[name]
    la = laplace(likelihood, method, **settings)
    if likelihood == "regression" or "criterion" in arguments:
        arguments = fit_arguments(**{"max_steps": 3, "num_samples": 4, **arguments})
    return la.fit_hyperparameters(data(likelihood=likelihood), progress=False, checkpoint=path, **arguments)


def numbers(la: LinearisedLaplace) -> list[Tensor]:
    steps = [[s.passes, *s.new_prior_precision, *s.effective_dimension] for s in la.history_]
    found = [la.samples_, la.mode_, la.prior_precision_, la.effective_dimension_, torch.tensor(steps)]
    return [*found, torch.tensor([la.scale_, la.temperature_, la.diagnose().epochs], dtype=torch.float64)]


def assert_same(la: LinearisedLaplace, other: LinearisedLaplace) -> None:
    assert all(torch.equal(a, b) for a, b in zip(numbers(la), numbers(other), strict=True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fit.checkpoint"


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says after how many new entries the process ends; `.entries` are those that were written since."""
    write = Results._write

    class Kills:
        def __call__(self, after: int) -> None:
            self.entries, self.after = 0, after

    state = Kills()
    state(10**9)

    def counted(self: Results, *entry: Any) -> None:
        write(self, *entry)
        state.entries += 1
        if state.entries == state.after:
            raise Killed

    monkeypatch.setattr(Results, "_write", counted)
    return state


def killed(name: str, path: Path, kills: Any, after: int, **arguments: Any) -> None:
    kills(after)
    with pytest.raises(Killed):
        fitted(name, path, **arguments)
    kills(10**9)


def goes_on(name: str, path: Path, kills: Any, *parts: float) -> None:
    """A fit is killed when its file has these parts of all entries, at least two and all except the last."""
    expected = fitted(name)
    assert_same(fitted(name, path), expected)
    assert not path.exists()
    total = kills.entries
    for after in {min(max(int(part * total), 2), total - 1) for part in parts}:
        killed(name, path, kills, after)
        size = path.stat().st_size
        assert_same(fitted(name, path), expected)
        # What was in the file is not computed again, and all of the rest is.
        assert kills.entries == total - after
        assert not path.exists()
        assert size > 0


@pytest.mark.parametrize("name", ["exact", "krylov", "kfac"])
def test_a_fit_goes_on_to_the_same_numbers(name: str, path: Path, kills: Any) -> None:
    goes_on(name, path, kills, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "sgd")) for name in FITS])
def test_a_fit_goes_on_from_any_moment(name: str, path: Path, kills: Any) -> None:
    goes_on(name, path, kills, 0.0, 0.5, 1.0)


def test_a_temperature_by_the_accuracy_goes_on(path: Path, kills: Any) -> None:
    expected = fitted("subset", accuracy=0.6)
    assert expected.temperature_ != 1
    killed("subset", path, kills, 3, accuracy=0.6)
    assert_same(fitted("subset", path, accuracy=0.6), expected)
    killed("subset", path, kills, 3, accuracy=0.6)
    with pytest.raises(ValueError, match="another"):
        fitted("subset", path, accuracy=0.7)


def test_fit_at_given_precisions(path: Path, kills: Any) -> None:
    expected = laplace().fit(data(), progress=False)
    kills(3)
    with pytest.raises(Killed):
        laplace().fit(data(), progress=False, checkpoint=str(path))
    kills(10**9)
    la = laplace().fit(data(), progress=False, checkpoint=str(path))
    assert torch.equal(la.samples_, expected.samples_)
    assert not path.exists()


@pytest.mark.slow
def test_validation_data_and_warm_starts(path: Path, kills: Any) -> None:
    held_out = data(70)[-1:]
    expected = fitted("krylov", val_loader=held_out)
    expected.fit_hyperparameters(data(), progress=False, warm_start=True, criterion=Evidence(max_steps=3))
    la = fitted("krylov", val_loader=held_out)
    again = {"warm_start": True, "criterion": Evidence(max_steps=3), "checkpoint": path, "progress": False}
    kills(4)
    with pytest.raises(Killed):
        la.fit_hyperparameters(data(), **again)
    kills(10**9)
    assert_same(la.fit_hyperparameters(data(), **again), expected)
    killed("krylov", path, kills, 4, val_loader=held_out)
    with pytest.raises(ValueError, match="val_loader"):
        fitted("krylov", path, val_loader=data(80)[-1:])


@pytest.mark.slow
def test_a_fit_that_goes_on_has_the_memory_that_it_began_with(
    path: Path, kills: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "free_memory", lambda device: 1e9)
    expected = fitted("krylov")
    killed("krylov", path, kills, 3)
    monkeypatch.setattr(preparation, "free_memory", lambda device: 2 * 4.0 * 59 * 40)
    other = fitted("krylov")
    assert not torch.equal(other.samples_, expected.samples_)
    assert_same(fitted("krylov", path), expected)


@pytest.mark.slow
def test_callbacks_get_the_steps_that_were_there(path: Path, kills: Any) -> None:
    name, evidence = "krylov, layer-wise", {"criterion": "evidence"}
    kills(10**9)
    expected = [step.step for step in fitted(name, path, **evidence).history_]
    killed(name, path, kills, kills.entries - 1, **evidence)
    seen = []
    fitted(name, path, callback=lambda step: seen.append(step.step), **evidence)
    assert seen == expected
    assert len(seen) > 1


# What is not the same ------------------------------------------------------------------------------------------------


OTHERWISE = {
    "buffers": {"model": network().requires_grad_(True)},
    "`prior`": {"prior": "g-prior"},
    "`method`": {"method": "subset"},
    "`likelihood`": {"likelihood": "binary"},
    "`parameters`": {"parameters": "2*"},
    "constructor": {"num_samples": 5},
    "`seed`": {"seed": 1},
    "`linear_model`": {"linear_model": "affine"},
    "batches": {"data": data(61)},
    "dtype": {"dtype": torch.float64},
    "`budget`": {"arguments": {"budget": 20.0}},
    "`criterion`": {"arguments": {"criterion": "self_consistency"}},
    "`weights`": {"arguments": {"weights": torch.full((60,), 2.0)}},
    "`warm_start`": {"arguments": {"warm_start": True}},
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_a_file_of_another_fit_is_refused(what: str, path: Path, kills: Any) -> None:
    kills(4)
    with pytest.raises(Killed):
        laplace().fit_hyperparameters(data(), progress=False, checkpoint=path)
    kills(10**9)
    size, other = path.stat().st_size, dict(OTHERWISE[what])
    loader, arguments = other.pop("data", data()), fit_arguments(**other.pop("arguments", {}))
    if "model" in other:
        with torch.no_grad():
            other["model"][0].bias[0] += 1e-6
    if "likelihood" in other:
        loader = [(x, nn.functional.one_hot(y, 3).float()) for x, y in loader]
    if dtype := other.pop("dtype", None):
        other["model"] = network().to(dtype)
    with pytest.raises(ValueError, match=what):
        laplace(**other).fit_hyperparameters(loader, progress=False, checkpoint=path, **arguments)
    # It is as it was, and still of use.
    assert path.stat().st_size == size
    assert laplace().fit_hyperparameters(data(), progress=False, checkpoint=path).samples_.shape == (4, 59)


def test_other_calls_versions_and_noise_are_refused(path: Path, kills: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = data(likelihood="regression")
    kills(3)
    with pytest.raises(Killed):
        laplace("regression").fit(loader, progress=False, checkpoint=path)
    kills(10**9)
    with pytest.raises(ValueError, match='"fit_hyperparameters"'):
        laplace("regression").fit_hyperparameters(loader, progress=False, checkpoint=path)
    with pytest.raises(ValueError, match="`noise_variances`"):
        laplace("regression").fit(loader, progress=False, checkpoint=path, data=Data(noise_variances=torch.ones(60)))
    with pytest.raises(ValueError, match="`likelihood`"):
        laplace(Gaussian(7.0), model=network(1)).fit(loader, progress=False, checkpoint=path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "version", lambda name: "0.0")
        with pytest.raises(ValueError, match=r"laplace_sampling \("):
            laplace("regression").fit(loader, progress=False, checkpoint=path)
    monkeypatch.setattr(torch, "__version__", "1.0")
    with pytest.raises(ValueError, match="torch"):
        laplace("regression").fit(loader, progress=False, checkpoint=path)


def test_a_model_that_computes_something_else_is_refused(path: Path, kills: Any) -> None:
    kills(4)
    with pytest.raises(Killed):
        laplace().fit(data(), progress=False, checkpoint=path)
    kills(10**9)
    match = "the loss"
    with pytest.raises(ValueError, match=match):
        laplace(model=network(activation=nn.Sigmoid)).fit(data(), progress=False, checkpoint=path)


def test_another_loss_of_the_user_is_refused(path: Path, kills: Any) -> None:
    def loss_of(factor: float) -> Any:
        return from_loss(lambda f, y: factor * nn.functional.cross_entropy(f, y))

    kills(4)
    with pytest.raises(Killed):
        laplace(loss_of(1.0)).fit(data(), progress=False, checkpoint=path)
    kills(10**9)
    with pytest.raises(ValueError, match="the loss"):
        laplace(loss_of(2.0)).fit(data(), progress=False, checkpoint=path)


def test_another_earlier_posterior_is_refused(path: Path, kills: Any) -> None:
    la = laplace().fit(data(), progress=False)
    kills(4)
    with pytest.raises(Killed):
        la.fit(data(), progress=False, checkpoint=path, warm_start=True)
    kills(10**9)
    with pytest.raises(ValueError, match="the posterior"):
        laplace(seed=0).fit(data(61), progress=False).fit(data(), progress=False, checkpoint=path, warm_start=True)


# Files that are damaged, and that cannot be written ------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.3, *(pytest.param(part, marks=pytest.mark.slow) for part in (0.6, 0.95))])
def test_a_damaged_file_is_refused_or_computed_again(part: float, path: Path, kills: Any) -> None:
    fitted("krylov", path)
    killed("krylov", path, kills, kills.entries)
    whole = bytearray(path.read_bytes())
    path.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(ValueError, match="is damaged"):
        fitted("krylov", path)
    whole[int(part * len(whole))] ^= 8
    path.write_bytes(whole)
    said = ""
    try:
        assert_same(fitted("krylov", path), fitted("krylov"))
    except ValueError as error:
        said = str(error)
    assert not said or "is damaged" in said


@pytest.mark.parametrize("content", [b"something else" * 20, b"SQLite format 3\0" * 20, torch.zeros(3)])
def test_other_files_are_refused(content: Any, path: Path) -> None:
    if isinstance(content, Tensor):
        torch.save(content, path)
        content = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        fitted("krylov", path)
    assert path.read_bytes() == content


def test_a_database_of_something_else_is_refused(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE songs (title TEXT)")
    content = path.read_bytes()
    with pytest.raises(ValueError, match="format 0"):
        fitted("krylov", path)
    assert path.read_bytes() == content


def test_paths_at_which_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="checkpoint="):
        fitted("krylov", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(IsADirectoryError, match="a folder"):
        fitted("krylov", tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        fitted("krylov", tmp_path / "none" / "file")


def test_a_disk_that_is_full(path: Path, kills: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Results._open

    def with_few_pages(self: Results, head: dict[str, Any]) -> Any:
        found = opened(self, head)
        self._database.execute("PRAGMA max_page_count = 20")  # pyright: ignore[reportOptionalMemberAccess]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Results, "_open", with_few_pages)
        with pytest.raises(OSError, match="full"):
            fitted("krylov", path)
    before = kills.entries
    assert_same(fitted("krylov", path), fitted("krylov"))
    assert kills.entries > before > 2


# What is kept, and what it costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_file_stays_after_an_error(error: type[BaseException], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sample_posterior", fails)
        with pytest.raises(error):
            fitted("krylov", path)
    assert path.exists()
    assert_same(fitted("krylov", path), fitted("krylov"))
    assert not path.exists()


@pytest.mark.slow
def test_the_file_stays_if_only_some_samples_were_drawn(
    path: Path, kills: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Method, "rows", lambda self, memory, num_samples, held=0: 2)
    expected, draw, calls = fitted("stochastic"), sampling.sample_posterior, []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return draw(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sampling, "sample_posterior", interrupted)
        assert len(fitted("stochastic", path).samples_) == 2
    assert path.exists()
    assert_same(fitted("stochastic", path), expected)
    assert not path.exists()


def test_the_file_is_gone_where_a_warning_is_an_error(path: Path) -> None:
    la = laplace("regression", prior="layerwise")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        with pytest.raises(ConvergenceWarning, match="max_steps"):
            la.fit_hyperparameters(
                data(likelihood="regression"), progress=False, criterion=Evidence(max_steps=1), checkpoint=path
            )
    assert not path.exists()
    assert len(la.samples_) == 4


# On these networks nearly all numbers of a file are vectors of weights.
@pytest.mark.parametrize(("method", "most"), [("krylov", 12), ("kfac", 3), ("subset", 3), ("exact", 3), ("dual", 6)])
def test_what_is_written_is_a_small_multiple_of_the_posterior(
    method: str, most: float, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    likelihood = "regression" if method == "dual" else "classification"
    model = nn.Sequential(nn.Linear(3, 800), nn.Tanh(), nn.Linear(800, 1 if method == "dual" else 3))
    la, written = LinearisedLaplace(model, likelihood, method=method, num_samples=32), []
    delete = Results.delete
    monkeypatch.setattr(Results, "delete", lambda self: written.append(path.stat().st_size) or delete(self))
    la.fit_hyperparameters(data(likelihood=likelihood), progress=False, checkpoint=path)
    la.save(tmp_path / "posterior")
    assert written[0] < most * (tmp_path / "posterior").stat().st_size


def _holds(path: Path, ready: Any) -> None:
    """A fit of another process, which waits in its first step."""

    def wait(step: Any) -> None:
        ready.set()
        time.sleep(600)

    torch.set_num_threads(1)  # as in all tests: sums of two threads are rounded otherwise
    fitted("krylov", path, callback=wait)


@pytest.mark.slow
def test_two_processes_are_not_in_one_file_at_the_same_time(path: Path) -> None:
    """A process that is killed leaves it free, and what it has found."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = context.Process(target=_holds, args=(path, ready), daemon=True)
    other.start()
    assert ready.wait(120)
    with pytest.raises(BlockingIOError, match="in use"):
        fitted("krylov", path)
    assert path.exists()
    other.kill()
    other.join()
    la = fitted("krylov", path)
    assert_same(la, fitted("krylov"))
    assert list(path.parent.iterdir()) == []
