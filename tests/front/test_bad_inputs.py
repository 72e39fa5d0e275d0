"""Bad inputs of public calls: each ends in one sentence that says what was called and what to do.

An input is answered rightly by a `TypeError` or `ValueError` from a `raise` of the library itself, not from inside
torch, whose message names what was called. Afterwards the module is bit for bit what it was.
"""

# Arguments of a wrong type are what this file is for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import linecache
import math
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat_settings import fit_arguments
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import laplace_sampling
from laplace_sampling import (
    SGD,
    Categorical,
    Dual,
    Exact,
    Gaussian,
    GPrior,
    IsotropicPrior,
    Krylov,
    LinearisedLaplace,
    MultiTask,
    NotFittedError,
    Stochastic,
    from_loss,
    largest_variance,
)

PACKAGE = str(Path(laplace_sampling.__file__).parent)
DATA = torch.Generator().manual_seed(0)
X = torch.randn(12, 2, generator=DATA)
REAL = torch.randn(12, 1, generator=DATA)
LABELS = torch.arange(12) % 3
ONES = (torch.arange(12) % 2)[:, None].float()
COUNTS = (torch.arange(12) % 4)[:, None]
# Of each likelihood: the outputs of a network, and targets.
TARGETS: dict[str, tuple[int, Tensor]] = {
    "regression": (1, REAL),
    "classification": (3, LABELS),
    "binary": (1, ONES),
    "poisson": (1, COUNTS),
}
NOT_WHOLE = (2.5, "8", True, -3, [8], math.nan)
NOT_POSITIVE = (0.0, -1.0, math.nan, "1", 1j)

# A call by its name, with a word that the message has to say.
BAD_INPUTS: dict[str, tuple[str, Callable[[], object]]] = {}
watched: list[tuple[nn.Module, Any]] = []


def add(name: str, words: str, call: Callable[[], object]) -> None:
    assert name not in BAD_INPUTS, name
    BAD_INPUTS[name] = words, call


def add_values(call: str, argument: str, values: Any, make: Callable[[Any], object]) -> None:
    """A case for each bad value of an argument, whose name the message has to say."""
    for value in values:
        shown = getattr(value, "__name__", None) or str(value).replace("\n", "")
        add(f"{call}: {argument}={type(value).__name__} {shown[:40]}", argument, partial(make, value))


def net(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(outputs)
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))
    watched.append((model, snapshot(model)))
    return model


class Returning(nn.Module):
    """A network that returns what a function makes of its output."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(2, 1), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.layer(x))


class Heads(nn.ModuleDict):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: head(x) for name, head in self.items()}


def heads() -> nn.Module:
    return Heads({"a": nn.Linear(2, 3), "b": nn.Linear(2, 1)})


def la_of(kind: str = "regression", **settings: Any) -> LinearisedLaplace:
    return LinearisedLaplace(net(TARGETS[kind][0]), kind, **{"num_samples": 4, **settings})


@cache
def fit_of(kind: str) -> LinearisedLaplace:
    outputs, y = TARGETS[kind]
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))
    return LinearisedLaplace(model, kind, num_samples=4, method="krylov").fit([(X, y)], progress=False)


def fitted(kind: str = "regression") -> LinearisedLaplace:
    la = fit_of(kind)
    watched.append((la.network.source, snapshot(la.network.source)))
    return la


def fit(model: nn.Module, likelihood: Any, y: Any, x: Any = X, **settings: Any) -> object:
    return LinearisedLaplace(model, likelihood, num_samples=4, **settings).fit([(x, y)], progress=False)


# Constructor ----------------------------------------------------------------------------------------------------------

for _argument, _values in {
    "num_samples": (*NOT_WHOLE, 0, 1),
    "seed": NOT_WHOLE,
    "linear_model": ("x", None, 3),
    "prior": ("flat", None, 1.0, IsotropicPrior),
    "method": ("adam", None, 3, Exact, SGD()),
    "parameters": (
        "head.*", [], 3, {}, "!*", {"0.weight": torch.ones(3, dtype=torch.bool)}, {"0.weight": [6]},
        {"0.weight": "all"}, {"weight": torch.ones(3, 2, dtype=torch.bool)},
    ),
}.items():  # fmt: skip
    add_values("LinearisedLaplace", _argument, _values, lambda v, a=_argument: la_of(**{a: v}))
add_values(
    "LinearisedLaplace", "likelihood", ("ordinal", None, 3, Gaussian, nn.MSELoss(), {"a": "ordinal"}),
    lambda value: LinearisedLaplace(net(), value),
)  # fmt: skip
add("LinearisedLaplace: a head learns noise", "noise", lambda: LinearisedLaplace(net(), {"a": "regression"}))
add("LinearisedLaplace: method of another likelihood", "dual", lambda: la_of("classification", method="dual"))
add("LinearisedLaplace: unknown keyword", "device", lambda: la_of(device="cpu"))
for _name, (_words, _make) in {
    "a string": ("Module", lambda: "net"),
    "a class": ("Module", lambda: nn.Linear),
    "no parameters": ("parameter", nn.ReLU),
    "all frozen": ("parameter", lambda: nn.Linear(2, 1).requires_grad_(False)),
    "scripted": ("torch.jit", lambda: torch.jit.script(nn.Linear(2, 1))),
    "on meta": ("meta", lambda: nn.Linear(2, 1, device="meta")),
    "lazy": ("run the model on a batch first", lambda: nn.LazyLinear(1)),
}.items():
    add(f"LinearisedLaplace: model {_name}", _words, lambda make=_make: LinearisedLaplace(make(), "regression"))

# Data -----------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, REAL, strict=True)


class Augmented(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + torch.rand(2), REAL[i]


def distributed() -> DataLoader:
    data = TensorDataset(X, REAL)
    return DataLoader(data, batch_size=3, sampler=DistributedSampler(data, num_replicas=2, rank=0))


WIDE, NAN, PAIRS = torch.randn(12, 5, generator=DATA), X.clone(), REAL.expand(12, 2)
NAN[3, 0] = math.nan
LOADERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "None": ("DataLoader", lambda: None),
    "a tensor": ("pairs", lambda: X),
    "a pair": ("[(x, y)]", lambda: (X, REAL)),
    "a dictionary": ("pairs", lambda: {"x": X, "y": REAL}),
    "an iterator": ("one-shot iterator", lambda: iter([(X, REAL)])),
    "empty": ("empty", list),
    "inputs only": ("pairs", lambda: [X]),
    "strings": ("pairs", lambda: [("a", "b")]),
    "fewer targets": ("12 inputs and 4 targets", lambda: [(X, REAL[:4])]),
    "NaN in inputs": ("NaN", lambda: [(NAN, REAL)]),
    "NaN in all targets": ("NaN", lambda: [(X, REAL * math.nan)]),
    "infinity in targets": ("targets", lambda: [(X, REAL / 0)]),
    "flat targets": ("shape", lambda: [(X, REAL[:, 0])]),
    "whole targets": ("floating point", lambda: [(X, REAL.long())]),
    "complex targets": ("complex", lambda: [(X, REAL + 0j)]),
    "wide inputs": ("Sequential", lambda: [(WIDE, REAL)]),
    "inputs of whole numbers": ("int64", lambda: [(X.long(), REAL)]),
    "inputs in float64": ("float64", lambda: [(X.double(), REAL)]),
    "inputs without numbers": ("meta", lambda: [(X.to("meta"), REAL)]),
    "batches of other targets": ("shape", lambda: [(X, REAL), (X, PAIRS)]),
    "augmented": ("different data at each pass", lambda: DataLoader(Augmented(), batch_size=4)),
    "a distributed sampler": ("DistributedSampler", distributed),
    "a stream without an end": ("num_data", lambda: DataLoader(Stream(), batch_size=4)),
}
for _name, (_words, _make) in LOADERS.items():
    add(f"fit: {_name}", _words, lambda make=_make: la_of().fit(make(), progress=False))
    add(f"calibrate: {_name}", _words, lambda make=_make: fitted().calibrate(make()))
for _kind, _cases in {
    "classification": {"between 0 and 2": LABELS + 5, "integers": LABELS.double(), "shape": LABELS[:, None]},
    "binary": {"0 or 1": ONES + 1, "shape": ONES[:, 0]},
    "poisson": {"Counts": COUNTS / 2, "shape": COUNTS[:, 0]},
}.items():
    for _words, _y in _cases.items():
        add(f"fit: {_kind}, {_words}", _words, lambda k=_kind, y=_y: la_of(k).fit([(X, y)], progress=False))
add("fit: all labels ignored", "ignore_index", lambda: fit(net(3), "classification", torch.full((12,), -100)))
add("fit: classification of one output", "binary", lambda: fit(net(1), "classification", LABELS))
HEADS: dict[str, Any] = {"a": "classification", "b": "poisson"}
HEAD_TARGETS = {"a": LABELS, "b": COUNTS}
add("fit: heads of a network with one", "heads", lambda: fit(net(3), HEADS, HEAD_TARGETS))
add("fit: one likelihood of a network with heads", "dictionary", lambda: fit(heads(), "poisson", COUNTS))
add("fit: heads without targets", "heads", lambda: fit(heads(), HEADS, {"a": LABELS}))
add("fit: a head with labels out of range", "Head 'a'", lambda: fit(heads(), HEADS, HEAD_TARGETS | {"a": LABELS + 5}))
for _name, (_words, _change) in {
    "None": ("NoneType", lambda f: None),
    "a tuple": ("tuple", lambda f: (f, f)),
    "complex": ("complex", lambda f: f + 0j),
    "whole numbers": ("int64", lambda f: f.long()),
    "NaN": ("NaN", lambda f: f / 0 * 0),
    "one number": ("the first axis", lambda f: f.sum()),
    "another number of rows": ("the first axis", lambda f: f[:3]),
    "detached": ("weights", lambda f: f.detach()),
}.items():
    add(f"fit: a network that returns {_name}", _words, lambda c=_change: fit(Returning(c), "regression", REAL))


def filled(value: float) -> nn.Module:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return model


for _value in (1e38, math.nan):
    add(f"fit: weights of {_value}", "model", lambda value=_value: fit(filled(value), "regression", REAL))

# Arguments of fits ----------------------------------------------------------------------------------------------------


def fit_with(call: str, argument: str, value: Any) -> object:
    return getattr(la_of(), call)([(X, REAL)], **fit_arguments(**{"progress": False, argument: value}))


WEIGHTS = ("x", torch.ones(3), -torch.ones(12), torch.full((12,), math.nan), 3.0)
for _argument, _values in {
    "tolerance": (*NOT_POSITIVE, math.inf),
    "weights": (*WEIGHTS, torch.zeros(12)),
    "noise_variances": (*WEIGHTS, torch.zeros(12)),
    "unpack": (3, lambda batch: None),
    "progress": ("no", None),
    "num_data": (12,),
}.items():
    add_values("fit", _argument, _values, partial(fit_with, "fit", _argument))
for _call in ("fit", "fit_hyperparameters", "plan"):
    add(f"{_call}: data", "`Data(weights=...)`", lambda call=_call: getattr(la_of(), call)([(X, REAL)], data={"w": 1}))
for _argument, _values in {
    "max_steps": (*NOT_WHOLE, 0),
    "num_samples": (*NOT_WHOLE, 0),
    "precision_bounds": ((2.0, 1.0), (-1.0, 1.0), 3.0, ("a", "b")),
    "callback": ("print", 3),
}.items():
    add_values("fit_hyperparameters", _argument, _values, partial(fit_with, "fit_hyperparameters", _argument))

# Predictions and files ------------------------------------------------------------------------------------------------

for _name, (_words, _x) in {
    "None": ("NoneType", None),
    "lists": ("list", [[1.0, 2.0]]),
    "too wide": ("Sequential", WIDE),
    "without the axis of the batch": ("first axis", X[0]),
    "NaN": ("NaN", NAN),
    "whole numbers": ("int64", X.long()),
    "in float64": ("float64", X.double()),
    "an array of words": ("array", np.array(["a"])),
    "without numbers": ("meta", X.to("meta")),
    "a loader": ("batch", DataLoader(TensorDataset(X, REAL))),
    "tensors of two lengths": ("first axis", (X, X[:3])),
    "an unknown name": ("Sequential", {"x": X}),
}.items():
    add(f"predict: {_name}", _words, lambda x=_x: fitted().predict(x))
add_values("predict", "num_samples", (*NOT_WHOLE, 0, 5), lambda value: fitted().predict(X, num_samples=value))
add_values("predict", "noise_variances", WEIGHTS, lambda value: fitted().predict(X, noise_variances=value))
add("predict: under vmap", "vmap", lambda: torch.func.vmap(lambda x: fitted().predict(x[None]).outputs)(X))
add("predict: under grad", "torch.func", lambda: torch.func.grad(lambda x: fitted().predict(x).stddev.sum())(X))
add_values("sample", "num_samples", (*NOT_WHOLE, 0), lambda value: fitted().sample(value))
add_values("evidence_path", "decades", (*NOT_POSITIVE, 13), lambda value: fitted().evidence_path(value))
add("leave_one_out: another method", "exact", lambda: fitted().leave_one_out())
for _kind, (_, _y) in TARGETS.items():
    for _name, _changed in {"few": _y[:3], "word": "y", "complex": _y + 0j, "shape": _y[..., None]}.items():
        add(f"log_prob: {_kind}, {_name}", "log_prob", lambda k=_kind, y=_changed: fitted(k).predict(X).log_prob(y))
add_values("probs", "probs_with", ("x", None), lambda v: fitted("classification").predict(X).probs_with(v))
for _state in ({}, None, nn.Linear(1, 1).state_dict()):
    add(f"load_state_dict: {str(_state)[:20]}", "state", lambda state=_state: la_of().load_state_dict(state))

# Methods, likelihoods, priors -----------------------------------------------------------------------------------------

for _type, _settings in {
    Krylov: {"max_memory": ("1GB", -1.0)},
    Dual: {"rank": NOT_WHOLE, "max_iterations": (*NOT_WHOLE, 0), "accuracy": NOT_POSITIVE},
    Stochastic: {"solver": ("adam", 3, SGD)},
    SGD: {"min_steps": NOT_WHOLE, "epochs": NOT_POSITIVE, "momentum": (1.0, "1")},
    Gaussian: {"noise_precision": (*NOT_POSITIVE, math.inf, torch.ones(2, 2)), "learn": ("no",), "observe": (2, "T")},
    Categorical: {"class_dim": (0, 1.5, "x"), "ignore_index": (1.5, "x")},
    IsotropicPrior: {"precision": (*NOT_POSITIVE, math.inf)},
    GPrior: {"num_probes": (*NOT_WHOLE, 0), "floor": NOT_POSITIVE},
}.items():
    for _argument, _values in _settings.items():
        add_values(_type.__name__, _argument, _values, lambda v, t=_type, a=_argument: t(**{a: v}))
for _value in ({}, 3, [Gaussian()]):
    add(f"MultiTask: {_value}", "MultiTask", lambda v=_value: MultiTask(v))
for _name, (_words, _loss) in {
    "not a scalar": ("scalar", lambda f, y: (f - y) ** 2),
    "no curvature": ("curvature", lambda f, y: (f - y).abs().sum()),
    "not convex": ("convex", lambda f, y: -((f - y) ** 2).sum()),
    "an if": ("differentiated", lambda f, y: f.square().sum() if f.sum() > 0 else f.sum()),
}.items():
    add(f"from_loss: {_name}", _words, lambda loss=_loss: fit(net(), from_loss(loss), REAL))
add_values("masks", "k", (*NOT_WHOLE, 0, 99), lambda k: largest_variance(net(), "regression", [(X, REAL)], k))


def is_explained(error: BaseException) -> bool:
    """Whether the library itself raised an error, or Python at the line of the call for an unknown argument."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == __file__:
        return True
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return last.filename.startswith(PACKAGE) and line.startswith("raise")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_ends_in_a_sentence(name: str) -> None:
    words, call = BAD_INPUTS[name]
    watched.clear()
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert is_explained(caught.value), "the message is that of other code"
    assert words in str(caught.value)
    for model, before in watched:
        assert_unchanged(model, before)


@pytest.mark.parametrize(
    "use",
    [
        lambda la: la.predict(X), lambda la: la.sample(1), lambda la: la.samples_, lambda la: la.mode_,
        lambda la: la.diagnose(), lambda la: la.log_marginal_likelihood(), lambda la: la.state_dict(),
        lambda la: la.save("nowhere"), lambda la: la.calibrate([(X, REAL)]),
    ],
)  # fmt: skip
def test_use_before_a_fit(use: Callable[[LinearisedLaplace], object]) -> None:
    la = la_of()
    with pytest.raises(NotFittedError, match="fit_hyperparameters"):
        use(la)
    assert not hasattr(la, "samples_")  # as scikit-learn's checks expect of fitted attributes


def test_after_bad_data_the_posterior_is_there() -> None:
    la = la_of().fit([(X, REAL)], progress=False)
    expected = la.samples_
    with pytest.raises(ValueError, match="inputs"):
        la.fit_hyperparameters([(NAN, REAL)], progress=False)
    assert la.samples_ is expected


def test_arrays_are_taken_as_inputs() -> None:
    la = fitted()
    assert torch.equal(la.predict(X.numpy()).outputs, la.predict(X).outputs)
