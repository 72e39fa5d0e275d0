"""Samples that stay in the processes that draw them: fits, predictions and files are as with all of them in each."""

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from laplace_sampling import SVRG, Gaussian, Krylov, LinearisedLaplace, Stochastic
from laplace_sampling.integrations.periodic_fits import PeriodicFits
from laplace_sampling.journal import Journal

pytestmark = pytest.mark.slow

# Of ten samples three groups have three, three and four.
K, N, D, C = 10, 37, 3, 2
NAMES = ("data", "shared_samples")
PrecisionAndSamples = tuple[Tensor, Tensor]
METHODS: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "krylov": {"method": Krylov()},
    "krylov by layers": {"method": Krylov(), "prior": "layerwise"},
    "stochastic": {"method": Stochastic(solver=SVRG(max_snapshots=4, max_restarts=0))},
    "kfac": {"method": "kfac"},
    "last layer": {"parameters": "last_layer"},
}
CASES = [(method, likelihood) for method in METHODS for likelihood in ("regression", "classification")]
# Its noise of each output takes a sum over the samples of all processes.
CASES.append(("krylov by layers", "regression with a noise of each output"))
# Each method once, and all three likelihoods.
FEW = [
    ("exact", "regression"),
    ("krylov", "classification"),
    ("krylov by layers", "regression with a noise of each output"),
    ("stochastic", "regression"),
    ("kfac", "classification"),
    ("last layer", "regression"),
]
# Processes on the axes of the data and of the samples, and what they fit in one start.
STARTS = [((2, 2), FEW), ((2, 2), [case for case in CASES if case not in FEW]), ((1, 3), CASES)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C)).double()


def data(likelihood: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    y = (x @ torch.randn(D, C, generator=generator, dtype=torch.float64)).sin()
    y = y + 0.2 * torch.randn(N, C, generator=generator, dtype=torch.float64)
    y = y.argmax(1) if likelihood == "classification" else y
    return list(zip(x.split(8), y.split(8), strict=True))


X = torch.linspace(-2, 2, 4 * D, dtype=torch.float64).reshape(4, D)


def fitted(method: str, likelihood: str, **where: Any) -> LinearisedLaplace:
    by_output = Gaussian(torch.ones(C, dtype=torch.float64))
    family = by_output if "each output" in likelihood else likelihood
    la = LinearisedLaplace(model(), family, num_samples=K, **METHODS[method], **where)
    # Samples that are solved for together help each other, and end together: without them a sample is another one
    # within a tolerance.
    tolerance = 1e-11 if "krylov" in method or method == "stochastic" else 0.1
    return la.fit_hyperparameters(
        data(likelihood), progress=False, budget=None, max_steps=2, tolerance=tolerance, criterion="evidence"
    )


def numbers(la: LinearisedLaplace, likelihood: str) -> dict[str, Any]:
    pred, few = la.predict(X), la.predict(X, num_samples=4)
    found = {
        "prior precision": la.prior_precision_,
        "effective dimension": la.effective_dimension_,
        "noise": torch.ones(1) if la.noise_precision_ is None else la.noise_precision_,
        "scale": torch.tensor(la.scale_),
        "samples": la.samples_,
        "deviations": pred.deviations,
        "deviations of few samples": few.deviations,
        "new samples": la.sample(5),
        "energies": torch.tensor(la.diagnose()["energy"].value),
        "state": la.state_dict()["samples"],
        "in half": la.state_dict(dtype=torch.float16)["sample_scales"],
    }
    found["score"] = torch.tensor(float(la.score(kind="loo").value))
    la.calibrate(data(likelihood))
    found["calibrated"] = torch.tensor(la.scale_)
    la.calibrate_conformal(data(likelihood))
    conformal = la.predict(X)
    found["conformal"] = (
        conformal.prediction_set(0.9).double() if likelihood == "classification" else conformal.interval(0.9)[1]
    )
    return found


def mesh_of(shape: tuple[int, int]) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=NAMES)}


def on_rank(shape: tuple[int, int], cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    found = []
    for method, likelihood in cases:
        la = fitted(method, likelihood, **mesh_of(shape))
        found.append(numbers(la, likelihood))
        held = la._fitted.posterior.samples  # pyright: ignore
        found[-1]["rows here"] = len(held.rows)
    return found


@functools.cache
def alone(case: tuple[str, str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return numbers(fitted(*case), case[1])


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> tuple[tuple[int, int], dict[tuple[str, str], list[dict[str, Any]]]]:
    shape, cases = STARTS[request.param]
    found = run_on_ranks(on_rank, shape[0] * shape[1], shape, cases, timeout=300.0)
    return shape, dict(zip(cases, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize(
    ("shared", "case"),
    [
        pytest.param(
            number,
            case,
            id=f"{shape}-{', '.join(case)}",
            marks=[*[pytest.mark.nightly] * (number > 0), pytest.mark.xdist_group(f"shared samples, start {number}")],
        )
        for number, (shape, cases) in enumerate(STARTS)
        for case in cases
    ],
    indirect=["shared"],
    scope="module",
)
def test_all_numbers_are_those_of_one_process(case: tuple[str, str], shared: tuple) -> None:
    shape, cases = shared
    for rank, of_rank in enumerate(cases[case]):
        for name, value in alone(case).items():
            atol = 1e-9 * float(value.double().abs().max())
            assert_close(of_rank[name], value, rtol=1e-9, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
        group, groups = rank % shape[1], shape[1]
        assert of_rank["rows here"] == K * (group + 1) // groups - K * group // groups


# Files ----------------------------------------------------------------------------------------------------------------


def _written(folder: str) -> Tensor:
    warnings.simplefilter("ignore")
    la = fitted("krylov", "regression", **mesh_of((2, 2)))
    la.save(Path(folder) / "shared")
    la.save(Path(folder) / "shared")  # in the place of the first
    la.save(Path(folder) / "half", dtype=torch.float16)
    return la.predict(X).deviations


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    folder = tmp_path_factory.mktemp("files")
    return folder, run_on_ranks(_written, 4, str(folder))[3]


@pytest.mark.xdist_group("files of shared samples")
def test_a_folder_is_read_by_one_process(written: tuple[Path, Tensor]) -> None:
    folder, expected = written
    assert sorted(path.name for path in folder.iterdir()) == ["half", "shared"]
    la = LinearisedLaplace.load(folder / "shared", model())
    assert_close(la.predict(X).deviations, expected, rtol=1e-12, atol=1e-14)
    half = LinearisedLaplace.load(folder / "half", model())
    assert half.predict(X).deviations.dtype == torch.float64
    assert_close(half.predict(X).deviations, expected, rtol=1e-2, atol=2e-2 * float(expected.abs().max()))


def _read(folder: str) -> tuple[int, Tensor, Tensor]:
    la = LinearisedLaplace.load(Path(folder) / "shared", model(), **mesh_of((1, 3)))
    whole = LinearisedLaplace.load(Path(folder) / "shared", model(), process_group=dist.group.WORLD)
    rows = len(la._fitted.posterior.samples.rows)  # pyright: ignore
    return rows, la.predict(X).deviations, whole.predict(X).deviations


@pytest.mark.xdist_group("files of shared samples")
def test_a_folder_is_read_by_another_number_of_processes(written: tuple[Path, Tensor]) -> None:
    folder, expected = written
    for rank, (rows, shared, whole) in enumerate(run_on_ranks(_read, 3, str(folder))):
        assert rows == [3, 3, 4][rank]
        assert_close(shared, expected, rtol=1e-12, atol=1e-14)
        assert_close(whole, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.xdist_group("files of shared samples")
def test_a_damaged_folder_is_told(written: tuple[Path, Tensor], tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in (written[0] / "shared").iterdir():
        data = bytearray(path.read_bytes())
        if path.suffix == ".distcp":
            data[len(data) // 2] ^= 255
        (folder / path.name).write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        LinearisedLaplace.load(folder, model())


def _state_and_warm_start() -> list[Tensor]:
    warnings.simplefilter("ignore")
    la = fitted("krylov", "regression", **mesh_of((1, 2)))
    other = LinearisedLaplace(model(), "regression", num_samples=K, method="krylov", **mesh_of((1, 2)))
    other.load_state_dict(la.state_dict())
    again = copy.copy(la).fit(data("regression"), warm_start=True, progress=False, tolerance=1e-11)
    return [la.samples_, other.samples_, again.samples_]


def test_states_and_warm_starts() -> None:
    for samples, loaded, again in run_on_ranks(_state_and_warm_start, 2):
        assert torch.equal(loaded, samples)
        assert_close(again, samples, rtol=1e-8, atol=1e-9)


# Messages -------------------------------------------------------------------------------------------------------------


def said_of(calls: Iterable[Callable[[], Any]]) -> list[str]:
    """What each call says that cannot be made."""
    said = []
    for call in calls:
        try:
            call()
        except (Exception, KeyboardInterrupt) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")
    return said


def _differing(folder: str) -> tuple[list[str], str]:
    warnings.simplefilter("ignore")
    la, rank = fitted("kfac", "regression", **mesh_of((1, 2))), dist.get_rank()
    said = said_of(
        [
            lambda: la.predict(X * (1 + rank)),
            lambda: la.predict(X[: 2 + rank]),
            lambda: la.predict(X, num_samples=2 + rank),
            lambda: la.predict_loader([X] * (1 + rank), progress=False),
            lambda: la.state_dict(torch.float16 if rank else None),
            lambda: la.save(Path(folder) / f"of{rank}"),
        ]
    )
    assert la.predict(X).deviations.isfinite().all()
    (pickled,) = said_of([lambda: pickle.dumps(la)])
    assert_close(copy.deepcopy(la).predict(X).deviations, la.predict(X).deviations)
    return said, pickled


def test_processes_that_ask_for_different_things_are_told(tmp_path: Path) -> None:
    for said, pickled in run_on_ranks(_differing, 2, str(tmp_path)):
        differ = ["the inputs", "the inputs", "`num_samples`", "the", "`dtype`", "`path`"]
        calls = ["predict", "predict", "predict", "predict", "state_dict", "save"]
        for one, call, what in zip(said, calls, differ, strict=True):
            assert one.startswith(f"ValueError: `{call}"), one
            assert what in one
        assert "pickled" in pickled
    assert not list(tmp_path.iterdir())


def _each_its_data() -> tuple[Tensor, Tensor]:
    warnings.simplefilter("ignore")
    la = fitted("kfac", "regression", **mesh_of((2, 2)))
    # The first two share out the samples, and the last two.
    part = X[:2] if dist.get_rank() < 2 else X[2:]
    return la.predict(X).deviations, torch.cat([la.predict(x[None]).deviations for x in part], 1)


def test_those_that_share_out_the_data_predict_other_data_each() -> None:
    for rank, (every, own) in enumerate(run_on_ranks(_each_its_data, 4)):
        assert_close(own, every[:, :2] if rank < 2 else every[:, 2:])


def _after_a_failure() -> list[str]:
    warnings.simplefilter("ignore")
    la, rank = fitted("kfac", "regression", **mesh_of((2, 2))), dist.get_rank()
    said = said_of([lambda: la.predict(X if rank else X * float("nan")), lambda: la.predict(X)])
    # Groups are made by all processes in the same order, those of the user, too.
    dist.barrier(dist.new_group([0, 1, 2, 3]))
    bad = data("regression") if rank else [(X * float("nan"), X[:, :C])]
    fit = la.fit_hyperparameters
    return said + said_of([lambda: fit(bad, progress=False), lambda: fit(data("regression"), progress=False)])


def test_all_go_on_after_a_prediction_that_failed_in_one_process() -> None:
    for said in run_on_ranks(_after_a_failure, 4):
        assert "NaN" in said[0]
        assert said[1] == said[3] == "nothing"
        assert "different data" in said[2]


def _periodic() -> tuple[float, float]:
    warnings.simplefilter("ignore")
    batches = data("classification")
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    fits = PeriodicFits("classification", method="kfac", num_samples=4, **mesh_of((2, 2)))
    # Two processes have two batches of nine, and two have three.
    held_out = [(x[:9], y[:9]), (x[9:18], y[9:18]), (x[18:], y[18:])]
    found = fits.fit(model(), batches, epoch=1, val_loader=held_out)
    alone = LinearisedLaplace(model(), "classification", method="kfac", num_samples=4)
    alone.fit_hyperparameters(batches, progress=False)
    return found["val_log_loss"], -float(alone.predict(x).log_prob(y).mean())


def test_periodic_fits_predict_held_out_data_of_different_numbers_of_batches() -> None:
    for found, expected in run_on_ranks(_periodic, 4):
        assert found == pytest.approx(expected, rel=1e-9)


def _of_one(folder: str) -> Tensor:
    warnings.simplefilter("ignore")
    la = fitted("kfac", "regression", **mesh_of((1, 1)))
    (Path(folder) / "new").mkdir()
    la.save(Path(folder) / "new")  # an empty folder
    return la.predict(X).deviations


def test_a_mesh_of_one_process_writes_a_folder_too(tmp_path: Path) -> None:
    (expected,) = run_on_ranks(_of_one, 1, str(tmp_path))
    assert_close(LinearisedLaplace.load(tmp_path / "new", model()).predict(X).deviations, expected)


def _writing(folder: str) -> tuple[list[str], list[str]]:
    warnings.simplefilter("ignore")
    la, rank, path = fitted("kfac", "regression", **mesh_of((1, 2))), dist.get_rank(), Path(folder)
    write, save = filesystem.FileSystemWriter.write_data, state_dict_saver.save
    la.save(path / "of save")

    def interrupted(*args: Any) -> Any:
        if rank == 1:
            raise KeyboardInterrupt
        return write(*args)

    def elsewhere(*args: Any, storage_writer: Any, **settings: Any) -> None:
        save(*args, storage_writer=storage_writer, **settings)
        if rank == 0:  # which does not see what the other wrote
            (Path(storage_writer.path) / "__1_0.distcp").unlink()

    def ended(*args: Any, **settings: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    filesystem.FileSystemWriter.write_data = interrupted
    said = said_of([lambda: la.save(path / "of save")])
    filesystem.FileSystemWriter.write_data = write
    state_dict_saver.save = elsewhere
    said += said_of([lambda: la.save(path / "of save")])
    state_dict_saver.save = save
    dist.barrier()
    if rank == 0:
        (path / "of save" / "notes.txt").write_text("mine")
        (path / "of a model").mkdir()
    save({"weight": X}, checkpoint_id=str(path / "of a model"))
    said += said_of([lambda: la.save(path / "of save"), lambda: la.save(path / "of a model")])
    assert_close(la.predict(X).deviations, LinearisedLaplace.load(path / "of save", model()).predict(X).deviations)
    dist.barrier()
    if rank == 1:
        (path / "of save" / "__1_0.distcp").unlink()
    dist.barrier()
    said += said_of([lambda: LinearisedLaplace.load(path / "of save", model(), **mesh_of((1, 2)))])
    assert la.predict(X).deviations.isfinite().all()
    state_dict_saver.save = ended
    return said, said_of([lambda: la.save(path / "last"), lambda: la.predict(X)])


def test_what_goes_wrong_with_a_folder_is_told_to_all(tmp_path: Path) -> None:
    first, second = run_on_ranks(_writing, 2, str(tmp_path))
    interrupted, elsewhere, notes, of_model, absent = zip(first[0], second[0], strict=True)
    assert "process 1: KeyboardInterrupt" in interrupted[0]
    assert interrupted[1].startswith("KeyboardInterrupt")
    for one in elsewhere:
        assert "__1_0.distcp" in one
        assert "disk" in one
    for one in (*notes, *of_model):
        assert "folder" in one
    assert all("is damaged" in one for one in absent)
    for _, said in (first, second):
        assert "Connection closed by peer" in said[0]
        assert said[1].startswith("ProcessError")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of a model", "of save"]
    assert (tmp_path / "of save" / "notes.txt").read_text() == "mine"


def _resumed(folder: str) -> tuple[PrecisionAndSamples, PrecisionAndSamples, int]:
    warnings.simplefilter("ignore")
    keep, known, counts = Journal.keep, Journal.known, {"kept": 0, "found": 0}
    mesh, path = mesh_of((2, 2)), Path(folder) / "fit"

    def numbers_of(checkpoint: Path | None) -> PrecisionAndSamples:
        la = LinearisedLaplace(model(), "classification", method=Krylov(), num_samples=4, **mesh)
        la.fit_hyperparameters(data("classification"), max_steps=3, progress=False, checkpoint=checkpoint)
        return la.prior_precision_, la.samples_

    def failing(self: Journal, *result: Any) -> None:
        keep(self, *result)
        counts["kept"] += 1
        if counts["kept"] == 4:
            raise RuntimeError("no further")

    def counted(self: Journal, key: str) -> Any:
        counts["found"] += (found := known(self, key)) is not None
        return found

    expected, Journal.keep = numbers_of(None), failing
    (said,) = said_of([lambda: numbers_of(path)])
    assert "no further" in said
    Journal.keep, Journal.known = keep, counted
    return expected, numbers_of(path), counts["found"]


def test_a_fit_of_shared_samples_goes_on(tmp_path: Path) -> None:
    for rank, (expected, found, num_found) in enumerate(run_on_ranks(_resumed, 4, str(tmp_path))):
        assert_close(found, expected, rtol=1e-10, atol=1e-12)
        # The first of those that share out the data keep the files.
        assert num_found == (4 if rank < 2 else 0)


def _failing(folder: str) -> list[str]:
    warnings.simplefilter("ignore")
    la = fitted("kfac", "regression", **mesh_of((1, 2)))
    said = said_of(
        [
            lambda: la.save(Path(folder) / "taken"),
            lambda: la.save(Path(folder) / "missing" / "folder"),
            lambda: la.predict(X if dist.get_rank() == 0 else X * float("nan")),
        ]
    )
    # The next call is as before.
    assert la.predict(X).deviations.isfinite().all()
    return said


def test_an_error_in_one_process_is_told_to_all(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("something else")
    first, second = run_on_ranks(_failing, 2, str(tmp_path))
    for said in (first, second):
        assert "`save`" in said[0]
        assert "no folder" in said[1]
        assert "NaN" in said[2]
    assert (tmp_path / "taken").read_text() == "something else"


def _both_axes_of_samples() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("samples", "shared_samples"))
    with pytest.raises(ValueError, match="`mesh`"):
        LinearisedLaplace(model(), "regression", mesh=mesh)


def test_samples_are_shared_along_one_axis() -> None:
    run_on_ranks(_both_axes_of_samples, 2)
