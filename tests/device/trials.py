"""Fits of small problems and what users do with them, on the CPU or on a device.

A `Trial` names a case of the registry, a method, a criterion, where the data are, and some actions. `results` runs it
and returns all numbers that it sees, so that a run on a device can be compared with one on the CPU.
"""

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from cases import Case, make_case
from flat_settings import fit_arguments
from torch import Tensor, nn

from laplace_sampling import SGD, LinearisedLaplace, Stochastic
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.predictions.prediction import ClassificationPrediction, RegressionPrediction

METHODS: dict[str, dict[str, Any]] = {
    "auto": {},
    "exact": {"method": "exact"},
    "krylov": {"method": "krylov"},
    "stochastic": {"method": Stochastic(solver=SGD(epochs=1, min_steps=4, mode_epochs=1, tolerance=0.9))},
    "dual": {"method": "dual"},
    "kfac": {"method": "kfac"},
    "diagonal": {"method": "diagonal"},
    "subset": {"method": "subset"},
    "last layer": {"parameters": "last_layer"},
}
# What chooses the hyperparameters; "given": they stay as they are.
CRITERIA = ("given", "auto", "evidence", "leave_one_out", "self_consistency", "validation")
PLACEMENTS = ("data on the CPU", "all on the device")
# Data that are held out, and data of a fit: ten of each class for the criterion that leaves labels out.
NUM_HELD_OUT, NUM_DATA, NUM_LABELS = 4, 8, 40


@dataclass(frozen=True)
class Trial:
    case: str
    method: str
    criterion: str
    placement: str
    actions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ", ".join([self.case, self.method, self.criterion, self.placement, *self.actions])


class Session:
    """A fitted model with its data, as a user has them; `found` keeps the numbers that were seen."""

    def __init__(self, trial: Trial, device: torch.device | None, folder: Path) -> None:
        case = make_case(trial.case)
        self.trial, self.folder, self.likelihood = trial, folder, case.given[0]
        self.cpu_model, self.model = case.model, copy.deepcopy(case.model)
        num = NUM_LABELS if trial.criterion == "leave_one_out" else NUM_DATA
        x, y = _more(case, num + NUM_HELD_OUT)
        if device is not None:
            self.model = self.model.to(device)
            if trial.placement == "all on the device":
                x, y = x.to(device), _each(y, lambda t: t.to(device))
        first = 2 * num // 3  # the last batch is shorter
        self.train = [_rows((x, y), rows) for rows in (slice(first), slice(first, num))]
        self.held_out = [_rows((x, y), slice(num, None))]
        self.x, self.y = self.held_out[0]
        self.found: dict[str, Any] = {}
        self.la = self.new()

    def new(self, model: nn.Module | None = None) -> LinearisedLaplace:
        settings = METHODS[self.trial.method]
        return LinearisedLaplace(model or self.model, self.likelihood, num_samples=2, **settings)

    def fit(self, la: LinearisedLaplace, **options: Any) -> None:
        if self.trial.criterion == "given":
            la.fit(self.train, tolerance=0.4, progress=False, **options)
            return
        held_out = self.held_out if self.trial.criterion == "validation" else None
        # Within these bounds the solves are well conditioned, so that other orders of a sum leave the numbers alone.
        bounds = {"precision_bounds": (1.0, 10.0), "noise_bounds": (0.5, 5.0)}
        options = {"max_steps": 1, "tolerance": 0.4, "num_samples": 2, "progress": False, **bounds, **options}
        la.fit_hyperparameters(self.train, held_out, **fit_arguments(self.trial.criterion, **options))

    def see(self, name: str, *values: Any) -> None:
        for number, value in enumerate(values):
            self.found[f"{name} {number}"] = value

    def see_prediction(self, name: str, pred: Any) -> None:
        if isinstance(pred, dict):
            for head, part in pred.items():
                self.see_prediction(f"{name}, {head}", part)
        else:
            self.see(name, pred.outputs, pred.samples, pred.covariance())


ACTIONS: dict[str, Callable[[Session], None]] = {}


def action(function: Callable[[Session], None]) -> Callable[[Session], None]:
    ACTIONS[function.__name__.replace("_", " ")] = function
    return function


@action
def plan(s: Session) -> None:
    s.see("plan", s.la.plan(s.train, criterion="auto").method)


@action
def warm_fit(s: Session) -> None:
    s.fit(s.la, warm_start=True)
    s.see_prediction("warm fit", s.la.predict(s.x))


@action
def checkpoint(s: Session) -> None:
    la = s.new()
    s.fit(la, checkpoint=s.folder / "fit.checkpoint")
    s.see("checkpoint", la.prior_precision_)


@action
def sample(s: Session) -> None:
    s.see("sample", s.la.sample(3))


@action
def save(s: Session) -> None:
    path = s.folder / "posterior.pt"
    s.la.save(path)
    given = {"likelihood": s.likelihood} if s.trial.case == "from_loss" else {}  # a file does not hold functions
    on_cpu = LinearisedLaplace.load(path, s.cpu_model, **given)
    s.see_prediction("loaded on the CPU", on_cpu.predict(_each(s.x, lambda t: t.cpu())))
    on_cpu.save(path)
    s.see_prediction("loaded again", LinearisedLaplace.load(path, s.model, **given).predict(s.x))


@action
def state(s: Session) -> None:
    buffer = io.BytesIO()
    torch.save(s.la.state_dict(), buffer)
    buffer.seek(0)
    la = s.new()
    la.load_state_dict(torch.load(buffer, map_location="cpu"))
    s.see_prediction("state", la.predict(s.x))


@action
def score(s: Session) -> None:
    s.see("score", s.la.score().value)


@action
def loo_score(s: Session) -> None:
    s.see("loo score", s.la.score("loo").value)


@action
def leave_one_out(s: Session) -> None:
    s.see("leave one out", s.la.leave_one_out().log_prob)


@action
def calibrate(s: Session) -> None:
    s.la.calibrate(s.held_out)
    s.see_prediction("calibrated", s.la.predict(s.x))


@action
def conformal(s: Session) -> None:
    s.la.calibrate_conformal(s.held_out)
    pred = s.la.predict(s.x)
    s.see("conformal", *(pred.interval(0.5) if isinstance(s.likelihood, Gaussian) else [pred.prediction_set(0.5)]))


@action
def diagnose(s: Session) -> None:
    s.see("diagnosis", str(s.la.diagnose()).partition("\n")[0])


@action
def evidence(s: Session) -> None:
    s.see("evidence", s.la.log_marginal_likelihood().value, s.la.log_marginal_likelihood(at="network").value)


@action
def export(s: Session) -> None:
    module = s.la.to_module(example=s.x)
    s.see("export", *module(_each(s.x, lambda t: t.to(next(s.model.parameters()).device))).values())


@action
def predict_loader(s: Session) -> None:
    s.see("predict_loader", *s.la.predict_loader(s.held_out, progress=False).values())


@action
def programs(s: Session) -> None:
    def joined(outputs: Any) -> Tensor:
        parts = outputs.values() if isinstance(outputs, dict) else [outputs]
        return torch.cat([part.reshape(len(part), -1) for part in parts], 1)

    def slope(f: Callable) -> Tensor:
        x = s.x.clone().requires_grad_()
        return torch.autograd.grad(joined(f(x)).sum(), x)[0]

    pred = s.la.propagate(lambda f: joined(f(s.x)))
    s.see("programs", pred.mean, pred.samples, pred.joint_covariance(), joined(s.la.functions()(s.x)))
    if isinstance(s.x, Tensor) and s.x.is_floating_point():
        s.see("slope", s.la.propagate(slope).stddev)


@action
def log_prob(s: Session) -> None:
    s.see("log_prob", s.la.predict(s.x).log_prob(s.y))


@action
def plots(s: Session) -> None:
    matplotlib.use("agg")
    from matplotlib import pyplot

    from laplace_sampling import plots

    if s.trial.criterion != "given":
        plots.plot_history(s.la)
    plots.plot_evidence(s.la, decades=0.25)  # each decade takes eight modes
    pred = s.la.predict(s.x)
    if isinstance(pred, RegressionPrediction | ClassificationPrediction):
        plots.plot_ood(pred, pred)
        plots.plot_reliability(pred, s.y)
        plots.plot_rejection(pred, s.y)
        plots.plot_most_unsure(pred, torch.rand(len(s.x), 4, 4))
    if isinstance(pred, ClassificationPrediction):
        plots.plot_prediction_sets(pred)
    if isinstance(pred, RegressionPrediction):
        plots.plot_error_bars(pred, output=0)
    pyplot.close("all")


def results(trial: Trial, folder: Path, device: torch.device | None = None) -> dict[str, Any]:
    """All numbers of a trial, on the CPU; on the device also those of the CPU's own fits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fits of one step do not converge
        session = Session(trial, device, folder)
        session.fit(session.la)
        session.see("hyperparameters", session.la.prior_precision_, session.la.scale_, session.la.temperature_)
        session.see_prediction("predict", session.la.predict(session.x))
        for action in trial.actions:
            ACTIONS[action](session)
    return {name: _each(value, lambda t: t.detach().cpu()) for name, value in session.found.items()}


def _more(case: Case, num: int) -> tuple[Tensor, Any]:
    """The data of a case several times, with other noise in the inputs."""
    generator = torch.Generator().manual_seed(1)
    x, y = _each((case.x, case.given[1]), lambda t: torch.cat([t] * -(-num // len(t)))[:num])
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype), y


def _rows(tree: Any, rows: slice) -> Any:
    return _each(tree, lambda t: t[rows])


def _each(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(tree, dict):
        return {name: _each(value, function) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_each(value, function) for value in tree)
    return function(tree) if isinstance(tree, Tensor) else tree
