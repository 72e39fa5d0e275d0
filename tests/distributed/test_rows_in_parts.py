"""Each process computes outputs of its part of the data, and all have the outputs and the inputs of a last layer."""

import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_processes import run_on_ranks
from flat_settings import fit_arguments
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from laplace_sampling import Data, Dual, Exact, Gaussian, Krylov, LinearisedLaplace, from_loss
from laplace_sampling.checkpoint import Checkpoint, Results
from laplace_sampling.linear_model import linear_model as tangent_model
from laplace_sampling.methods import closed_form, problem

pytestmark = pytest.mark.slow

# Three ranks have 4, 5 and 5 data.
N, D, C = 14, 3, 4


def inputs() -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def network(num_outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, num_outputs)).double()


def labels() -> Tensor:
    return (inputs() @ torch.linspace(-1, 1, D * C, dtype=torch.float64).reshape(D, C).sin()).argmax(1)


def values(num_outputs: int = 2) -> Tensor:
    noise = torch.randn(N, num_outputs, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return inputs().sum(1, keepdim=True).sin() + 0.1 * noise


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = network(5), nn.Linear(5, C).double(), nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.body(x)
        return {"a": self.a(z), "b": self.b(z)}


def results(
    model: nn.Module, likelihood: Any, y: Any, fit: dict[str, Any] | None = None, **options: Any
) -> tuple[LinearisedLaplace, dict[str, Tensor]]:
    warnings.simplefilter("ignore")
    if dist.is_initialized():
        options["process_group"] = dist.group.WORLD
    la = LinearisedLaplace(model, likelihood, num_samples=6, **options)
    loader = [(inputs(), y)] if isinstance(y, dict) else DataLoader(TensorDataset(inputs(), y), batch_size=3)
    settings = fit_arguments(**({"budget": None, "max_steps": 2, "tolerance": 1e-11} | (fit or {})))
    la.fit_hyperparameters(loader, progress=False, **settings)
    found = {"precision": la.prior_precision_, "samples": la.samples_, "mode": la.mode_}
    found["evidence"] = torch.tensor(float(la.log_marginal_likelihood()))
    if la.noise_precision_ is not None:
        found["noise"] = la.noise_precision_
    diagnosis = la.diagnose()
    found["offset"] = torch.tensor(diagnosis["‖φw̄ − f‖"].value)
    return la, found


def _ignored() -> dict[str, Tensor]:
    y = labels()
    y[:5] = -100
    la, found = results(network(C), "classification", y, method=Krylov())
    return found | {"score": la.score("loo").log_probs}


def _without_weight() -> dict[str, Tensor]:
    weights = torch.ones(N)
    weights[9:] = 0.0
    la, found = results(network(C), "classification", labels(), {"weights": weights}, method="kfac")
    return found | {"score": la.score("loo").log_probs}


def _heads() -> dict[str, Tensor]:
    y = labels()
    y[4:] = -100
    torch.manual_seed(0)
    likelihoods = {"a": "classification", "b": Gaussian(4.0, learn=False)}
    return results(Heads(), likelihoods, {"a": y, "b": values(1)}, method=Krylov())[1]


def _unequal_noise(**options: Any) -> dict[str, Tensor]:
    noise = torch.linspace(0.5, 2, N, dtype=torch.float64)
    la, found = results(network(2), "regression", values(), {"noise_variances": noise}, **options)
    if isinstance(options["method"], Exact):
        found["left out"] = la.leave_one_out().covariance
    return found | {"score": la.score("loo").log_probs}


def _of_rows() -> dict[str, Tensor]:
    la, found = results(network(2), "regression", values(), method=Exact())
    left_out = la.leave_one_out()
    return found | {"mean": left_out.mean, "covariance": left_out.covariance}


def _of_weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    la, found = results(nn.Linear(D, C).double(), "classification", labels(), method=Exact())
    return found | {"left out": la.leave_one_out().mean}


def _observed() -> dict[str, Tensor]:
    T = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    return results(network(2), Gaussian(1.0, observe=T), values(1), method=Krylov())[1]


def _noise_by_output() -> dict[str, Tensor]:
    likelihood = Gaussian(torch.tensor([10.0, 20.0], dtype=torch.float64), learn=True)
    la, found = results(network(2), likelihood, values(), method=Krylov())
    la.calibrate_conformal([(inputs(), values())])
    lower, upper = la.predict(inputs()[:2]).interval(0.8)
    return found | {"lower": lower, "upper": upper}


def _flat_loss() -> dict[str, Tensor]:
    y = torch.cat([values(1), torch.ones(N, 1, dtype=torch.float64)], dim=1)
    y[:6, 1] = 0.0
    return results(network(1), from_loss(lambda f, y: y[1] * (f - y[0]).square().sum()), y, method=Krylov())[1]


def _self_consistent() -> dict[str, Tensor]:
    fit = {"criterion": "self_consistency"}
    return results(network(C), "classification", labels(), fit, method="subset")[1]


def _with_accuracy() -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    where = {"process_group": dist.group.WORLD} if dist.is_initialized() else {}
    la = LinearisedLaplace(network(C), "classification", method="subset", num_samples=6, **where)
    la.fit_hyperparameters(DataLoader(TensorDataset(inputs(), labels()), 3), accuracy=0.6, progress=False)
    return {"temperature": torch.tensor(la.temperature_), "precision": la.prior_precision_}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(inputs(), labels(), strict=True)


def _last_layer_of_stream() -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    where = {"process_group": dist.group.WORLD} if dist.is_initialized() else {}
    la = LinearisedLaplace(network(C), "classification", parameters="last_layer", num_samples=6, **where)
    la.fit_hyperparameters(DataLoader(Stream(), 3), data=Data(num_data=N), progress=False)
    return {"samples": la.samples_, "precision": la.prior_precision_}


CASES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "ignored labels": _ignored,
    "weights of zero": _without_weight,
    "heads": _heads,
    "unequal noise, krylov": lambda: _unequal_noise(method=Krylov()),
    "unequal noise, dual": lambda: _unequal_noise(method=Dual(accuracy=1e-10)),
    "unequal noise, exact": lambda: _unequal_noise(method=Exact()),
    "observation space": _of_rows,
    "weight space": _of_weights,
    "measurements": _observed,
    "noise by output": _noise_by_output,
    "loss without curvature": _flat_loss,
    "self-consistency": _self_consistent,
    "accuracy": _with_accuracy,
    "last layer of a stream": _last_layer_of_stream,
}


# Each kind of rows, likelihood and method once; the others take as long again.
OFTEN = {
    "ignored labels",
    "heads",
    "unequal noise, exact",
    "weight space",
    "noise by output",
    "self-consistency",
    "last layer of a stream",
}


def _of_case(name: str) -> dict[str, Tensor]:
    return CASES[name]()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.nightly) for name in CASES]
)
def test_what_is_in_parts_gives_the_results_of_one_process(name: str) -> None:
    alone = _of_case(name)
    for found in run_on_ranks(_of_case, 3, name):
        assert list(found) == list(alone)
        for what, value in alone.items():
            scale = float(value.abs().max())
            assert_close(found[what], value, rtol=1e-8, atol=1e-8 * scale, msg=lambda text, what=what: f"{what} {text}")


# Files of fits ------------------------------------------------------------------------------------------------------


class Ended(BaseException):
    """In the place of a kill at the end of a fit, whose file is then there."""


def _with_file(path: Path, ends: bool) -> tuple[dict[str, Tensor], int] | None:
    """Results, and how many entries of the file were found in it."""
    found, known = [0], Results._known

    def counted(self: Results, *call: Any) -> Any:
        entry = known(self, *call)
        found[0] += entry is not None
        return entry

    def end(*_: Any, **__: Any) -> None:
        raise Ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Results, "_known", counted)
        patch.setattr(tangent_model, "is_accumulated", lambda rows, size: rows >= size)
        patch.setattr(problem, "is_accumulated", lambda rows, size: rows >= size)
        if ends:
            patch.setattr(Checkpoint, "done", end)
        torch.manual_seed(0)
        model = nn.Linear(D, C).double()
        try:
            return results(model, "classification", labels(), {"checkpoint": path}, method=Exact())[1], found[0]
        except Ended:
            return None


def test_results_in_a_file_are_those_of_all_processes(tmp_path: Path) -> None:
    alone = _with_file(tmp_path / "alone", False)
    assert alone is not None
    assert run_on_ranks(_with_file, 2, tmp_path / "fit", True) == [None, None]
    for num_ranks in (2, 1, 3):
        path = tmp_path / str(num_ranks)
        shutil.copy(tmp_path / "fit", path)
        resumed = run_on_ranks(_with_file, num_ranks, path, False)
        for of_rank in resumed:
            for name, value in alone[0].items():
                assert_close(of_rank[0][name], value, rtol=1e-7, atol=1e-7 * float(value.abs().max()))
        assert resumed[0][1] > 0  # what the first process found in the file


def _predicted_alone(layer: bool) -> Tensor | None:
    """Error bars of the first process, while others have gone on; rows of the Jacobian are not in memory."""
    options = {"parameters": "last_layer"} if layer else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closed_form, "holds_rows", lambda *_: False)
        la, _ = results(network(2), "regression", values(), method=Exact(), **options)
    return None if dist.is_initialized() and dist.get_rank() else la.predict(inputs()[:2]).stddev


@pytest.mark.parametrize("layer", [True, False])
def test_a_process_predicts_alone_by_the_exact_method(layer: bool) -> None:
    found = run_on_ranks(_predicted_alone, 2, layer)
    assert_close(found[0], _predicted_alone(layer), rtol=1e-8, atol=1e-10)


# What is refused -----------------------------------------------------------------------------------------------------


def _refused(y: Tensor) -> tuple[str, str]:
    with pytest.raises(ValueError, match=r"ignore_index|abels must") as caught:
        results(network(C), "classification", y, method="kfac")
    return type(caught.value).__name__, str(caught.value)


def test_labels_that_are_all_ignored_are_refused_by_all() -> None:
    for kind, message in run_on_ranks(_refused, 3, torch.full((N,), -100)):
        assert kind == "ValueError"
        assert "-100" in message
        assert "nothing to learn from" in message
