"""Bad inputs of every public call: each ends in one sentence that says what was called and what to do.

An input is answered rightly by one of the errors that are documented, from a `raise` of the library itself and not from
inside torch, with a message that names what was called; afterwards the model is bit for bit what it was.
"""

# Arguments of a wrong type are what this file is for.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import linecache
import math
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import laplace_sampling
from laplace_sampling import (
    SGD,
    SVRG,
    Auto,
    Bernoulli,
    Categorical,
    Dual,
    Exact,
    Factored,
    Gaussian,
    GPrior,
    IsotropicPrior,
    Krylov,
    LayerwisePrior,
    LinearisedLaplace,
    MultiTask,
    NotFittedError,
    Poisson,
    Stochastic,
    from_loss,
    largest_variance,
)

pytestmark = pytest.mark.fuzz

_PACKAGE = str(Path(laplace_sampling.__file__).parent)
_REFUSED = (TypeError, ValueError)
_DATA = torch.Generator().manual_seed(0)
X = torch.randn(12, 2, generator=_DATA)
REAL = torch.randn(12, 1, generator=_DATA)
LABELS = torch.arange(12) % 3
ONES = (torch.arange(12) % 2)[:, None].float()
COUNTS = (torch.arange(12) % 4)[:, None]
PAIRS = REAL.expand(12, 2).clone()
# Of each likelihood: the outputs of a network, and targets.
TARGETS: dict[str, tuple[int, Tensor]] = {
    "regression": (1, REAL),
    "classification": (3, LABELS),
    "binary": (1, ONES),
    "poisson": (1, COUNTS),
    "heteroscedastic": (4, PAIRS),
}
NOT_WHOLE: dict[str, Any] = {
    "2.5": 2.5,
    "'8'": "8",
    "True": True,
    "-3": -3,
    "[8]": [8],
    "nan": math.nan,
    "two numbers": torch.ones(2),
}
NOT_POSITIVE: dict[str, Any] = {
    "0.0": 0.0,
    "-1.0": -1.0,
    "nan": math.nan,
    "'1'": "1",
    "[1.0]": [1.0],
    "1j": 1j,
    "True": True,
}
NOT_FINITE: dict[str, Any] = {"inf": math.inf}
BOUNDS: dict[str, Any] = {
    "in the wrong order": (2.0, 1.0),
    "negative": (-1.0, 1.0),
    "nan": (math.nan, 1.0),
    "one number": 3.0,
    "three numbers": (1.0, 2.0, 3.0),
    "words": ("a", "b"),
    "None": None,
}


@dataclass(frozen=True)
class _BadInput:
    """A call, the errors that it may raise, and a word that the message has to say."""

    call: Callable[[], object]
    errors: tuple[type[BaseException], ...]
    words: str


BAD_INPUTS: dict[str, _BadInput] = {}
# Models of the call, as they were before it.
_watched: list[tuple[nn.Module, dict[str, Any]]] = []


def _add(name: str, words: str, call: Callable[[], object], errors: tuple[type[BaseException], ...] = _REFUSED) -> None:
    assert name not in BAD_INPUTS, name
    BAD_INPUTS[name] = _BadInput(call, errors, words)


def _add_values(call: str, argument: str, values: dict[str, Any], make: Callable[[Any], object]) -> None:
    """A case for each bad value of an argument, whose name the message has to say."""
    for shown, value in values.items():
        _add(f"{call}: {argument}={shown}", argument, partial(make, value))


def _is_explained(error: BaseException) -> bool:
    """Whether the library itself raised an error, or the user's own code, or Python at the line of the call."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    # Python refuses arguments that a function does not have.
    if last.filename == __file__ or (isinstance(error, TypeError) and "LinearisedLaplace." in str(error)):
        return True
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return last.filename.startswith(_PACKAGE) and line.startswith("raise")


def _state(model: nn.Module) -> dict[str, Any]:
    """All of a module that its user would notice."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "flags": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "gradients": [name for name, tensor in tensors.items() if tensor.is_leaf and tensor.grad is not None],
        "modes": {name: module.training for name, module in model.named_modules()},
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items() if not tensor.is_meta},
    }


def _same(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if any(before[key] != after[key] for key in before if key != "values"):
        return False
    pairs = zip(before["values"].values(), after["values"].values(), strict=True)
    # NaN is equal to itself here.
    return all(a.dtype == b.dtype and np.array_equal(*_arrays(a, b), equal_nan=True) for a, b in pairs)


def _arrays(*tensors: Tensor) -> Iterator[np.ndarray]:
    return (getattr(tensor, "_local_tensor", tensor).detach().numpy() for tensor in tensors)


# Networks -------------------------------------------------------------------------------------------------------------


def _watch(model: nn.Module) -> nn.Module:
    _watched.append((model, _state(model)))
    return model


def _net(outputs: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(outputs)
        return _watch(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)))


class _Returning(nn.Module):
    """A network that returns what a function makes of its output."""

    def __init__(self, change: Callable[[Tensor], Any], outputs: int = 1) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(2, outputs), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.layer(x))


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 3), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": self.a(x), "b": self.b(x)}


def _la(kind: str = "regression", **settings: Any) -> LinearisedLaplace:
    return LinearisedLaplace(_net(TARGETS[kind][0]), kind, **{"num_samples": 4, **settings})


@cache
def _fit(kind: str, method: str) -> LinearisedLaplace:
    outputs, y = TARGETS[kind]
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))
    return LinearisedLaplace(model, kind, num_samples=4, method=method).fit([(X, y)], progress=False)


@cache
def _fit_of_heads() -> LinearisedLaplace:
    la = LinearisedLaplace(_Heads(), {"a": "classification", "b": "poisson"}, num_samples=4, method="krylov")
    return la.fit([(X, {"a": LABELS, "b": COUNTS})], progress=False)


def _fitted(kind: str = "regression", method: str = "krylov") -> LinearisedLaplace:
    la = _fit_of_heads() if kind == "heads" else _fit(kind, method)
    _watch(la.network.module)
    return la


def _with(values: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {**values, **others}


# Constructor ----------------------------------------------------------------------------------------------------------


def _construct(argument: str) -> Callable[[Any], object]:
    return lambda value: _la(**{argument: value})


_add_values("LinearisedLaplace", "num_samples", _with(NOT_WHOLE, zero=0, one=1), _construct("num_samples"))
_add_values("LinearisedLaplace", "seed", NOT_WHOLE, _construct("seed"))
_add_values(
    "LinearisedLaplace",
    "linear_model",
    {"'x'": "x", "None": None, "3": 3, "[]": [], "{}": {}},
    _construct("linear_model"),
)
_add_values(
    "LinearisedLaplace",
    "prior",
    {"'flat'": "flat", "None": None, "1.0": 1.0, "a class": IsotropicPrior, "[]": [], "a dictionary": {"precision": 1}},
    _construct("prior"),
)
_add_values(
    "LinearisedLaplace",
    "method",
    {"'adam'": "adam", "None": None, "3": 3, "a class": Exact, "SGD()": SGD(), "SGD": SGD, "[]": [], "Fit": Gaussian()},
    _construct("method"),
)
_add_values(
    "LinearisedLaplace",
    "likelihood",
    {
        "'ordinal'": "ordinal",
        "None": None,
        "3": 3,
        "a class": Gaussian,
        "from_loss": from_loss,
        "[]": [],
        "a loss": nn.MSELoss(),
        "a head of no likelihood": {"a": "ordinal"},
    },
    lambda value: LinearisedLaplace(_net(), value),
)
_add("LinearisedLaplace: likelihood={}", "head", lambda: LinearisedLaplace(_net(), {}))
_add("LinearisedLaplace: a head learns noise", "noise", lambda: LinearisedLaplace(_net(), {"a": "regression"}))
_add("LinearisedLaplace: method of another likelihood", "dual", lambda: _la("classification", method="dual"))
_add_values(
    "LinearisedLaplace",
    "parameters",
    {
        "no match": "head.*",
        "[]": [],
        "3": 3,
        "[1]": [1],
        "''": "",
        "{}": {},
        "a predicate of nothing": lambda name, p: False,
        "a mask of another shape": {"0.weight": torch.ones(3, dtype=torch.bool)},
        "an unknown name": {"weight": torch.ones(3, 2, dtype=torch.bool)},
        "empty masks": {"0.weight": torch.zeros(3, 2, dtype=torch.bool)},
        "a mask that is a string": {"0.weight": "all"},
        "a mask that is None": {"0.weight": None},
        "an index that is too large": {"0.weight": [6]},
        "an index twice": {"0.weight": [1, 1]},
        "indices that are fractions": {"0.weight": [0.5, 1.5]},
        "all but all": "!*",
        "a tensor": torch.ones(3),
        "a parameter": nn.Linear(1, 1).weight,
    },
    _construct("parameters"),
)


def _frozen() -> nn.Module:
    model = _net().requires_grad_(False)
    _watched.clear()
    return _watch(model)


def _of_integers() -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
    return _watch(model)


def _sharded() -> nn.Module:
    """A network whose weights are shared out over the processes of a mesh, here of one process."""
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, mesh = nn.Linear(2, 1), init_device_mesh("cpu", (1,))
    for name, parameter in list(model.named_parameters()):
        shards = distribute_tensor(parameter.detach(), mesh, [Replicate()])
        model.register_parameter(name, nn.Parameter(shards))
    return model


_MODELS: dict[str, tuple[str, Callable[[], Any]]] = {
    "None": ("Module", lambda: None),
    "a string": ("Module", lambda: "net"),
    "a function": ("Module", lambda: torch.tanh),
    "a class": ("Module", lambda: nn.Linear),
    "a state dictionary": ("Module", lambda: _net().state_dict()),
    "a tensor": ("Module", lambda: X),
    "no parameters": ("parameter", nn.ReLU),
    "all frozen": ("parameter", _frozen),
    "of whole numbers": ("parameter", _of_integers),
    "scripted": ("torch.jit", lambda: torch.jit.script(nn.Linear(2, 1))),
    "on meta": ("meta", lambda: nn.Linear(2, 1, device="meta")),
    "lazy": ("without weights", lambda: nn.LazyLinear(1)),
    "sharded": ("DTensor", _sharded),
}
for _name, (_words, _make) in _MODELS.items():
    _add(f"LinearisedLaplace: model {_name}", _words, lambda make=_make: LinearisedLaplace(make(), "regression"))
    _add(f"largest_variance: model {_name}", _words, lambda make=_make: largest_variance(make(), "regression", [], 1))
_add("LinearisedLaplace: unknown keyword", "device", lambda: _la(device="cpu"))
_add("LinearisedLaplace: no likelihood", "likelihood", lambda: LinearisedLaplace(_net()))  # pyright: ignore
_add("LinearisedLaplace: prior by position", "positional", lambda: LinearisedLaplace(_net(), "poisson", "g-prior"))  # pyright: ignore

# Data -----------------------------------------------------------------------------------------------------------------


class _Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(X, REAL, strict=True)


class _Augmented(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + torch.rand(2), REAL[i]


def _distributed() -> DataLoader:
    data = TensorDataset(X, REAL)
    return DataLoader(data, batch_size=3, sampler=DistributedSampler(data, num_replicas=2, rank=0))


_wide, _nan, _infinite = torch.randn(12, 5, generator=_DATA), X.clone(), X.clone()
_nan[3, 0], _infinite[4, 1] = math.nan, math.inf
# Data of a regression: a loader, and a word of the message.
_LOADERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "None": ("DataLoader", lambda: None),
    "a number": ("DataLoader", lambda: 3),
    "a string": ("pairs", lambda: "data"),
    "a tensor": ("pairs", lambda: X),
    "a pair": ("[(x, y)]", lambda: (X, REAL)),
    "arrays": ("pairs", lambda: (X.numpy(), REAL.numpy())),
    "a dictionary": ("pairs", lambda: {"x": X, "y": REAL}),
    "a generator": ("one-shot iterator", lambda: (pair for pair in [(X, REAL)])),
    "an iterator": ("one-shot iterator", lambda: iter([(X, REAL)])),
    "a class": ("DataLoader", lambda: DataLoader),
    "a function": ("DataLoader", lambda: lambda: [(X, REAL)]),
    "empty": ("empty", list),
    "empty tensors": ("empty", lambda: [(X[:0], REAL[:0])]),
    "an empty dataset": ("empty", lambda: TensorDataset(X[:0], REAL[:0])),
    "inputs only": ("pairs", lambda: [X]),
    "a tuple of one": ("pairs", lambda: [(X,)]),
    "a tuple of three": ("pairs", lambda: [(X, REAL, REAL)]),
    "a dictionary without labels": ("pairs", lambda: [{"x": X, "y": REAL}]),
    "targets None": ("pairs", lambda: [(X, None)]),
    "strings": ("pairs", lambda: [("a", "b")]),
    "arrays of objects": ("array", lambda: [(np.array(["a", "b"]), REAL.numpy()[:2])]),
    "fewer targets": ("12 inputs and 4 targets", lambda: [(X, REAL[:4])]),
    "NaN in inputs": ("NaN", lambda: [(_nan, REAL)]),
    "infinity in inputs": ("infinity", lambda: [(_infinite, REAL)]),
    "NaN in all targets": ("All targets are NaN", lambda: [(X, REAL * math.nan)]),
    "infinity in targets": ("targets", lambda: [(X, _infinite[:, 1:])]),
    "flat targets": ("shape", lambda: [(X, REAL[:, 0])]),
    "wide targets": ("shape", lambda: [(X, PAIRS)]),
    "whole targets": ("floating point", lambda: [(X, REAL.long())]),
    "complex targets": ("complex", lambda: [(X, REAL + 0j)]),
    "targets a dictionary": ("Targets", lambda: [(X, {"a": REAL})]),
    "complex inputs": ("complex", lambda: [(X + 0j, REAL)]),
    "wide inputs": ("Sequential", lambda: [(_wide, REAL)]),
    "inputs of whole numbers": ("int64", lambda: [(X.long(), REAL)]),
    "inputs in float64": ("float64", lambda: [(X.double(), REAL)]),
    "arrays in float64": ("float64", lambda: [(X.double().numpy(), REAL.numpy())]),
    "inputs without numbers": ("meta", lambda: [(X.to("meta"), REAL)]),
    "targets without numbers": ("meta", lambda: [(X, REAL.to("meta"))]),
    "two tensors for one input": ("Sequential", lambda: [((X, X), REAL)]),
    "inputs by an unknown name": ("Sequential", lambda: [({"x": X}, REAL)]),
    "batches of other widths": ("shape", lambda: [(X, REAL), (_wide, REAL)]),
    "batches of other targets": ("shape", lambda: [(X, REAL), (X, PAIRS)]),
    "augmented": ("different data at each pass", lambda: DataLoader(_Augmented(), batch_size=4)),
    "a distributed sampler": ("DistributedSampler", _distributed),
    "a stream without an end": ("num_data", lambda: DataLoader(_Stream(), batch_size=4)),
    "scalar inputs": ("tensor", lambda: [(torch.tensor(1.0), torch.tensor(1.0))]),
}
for _name, (_words, _make) in _LOADERS.items():
    _add(f"fit: {_name}", _words, lambda make=_make: _la().fit(make(), progress=False))
    _add(
        f"fit_hyperparameters: val_loader {_name}",
        _words,
        lambda make=_make: _la().fit_hyperparameters([(X, REAL)], make(), progress=False),
    )
    _add(f"calibrate: {_name}", _words, lambda make=_make: _fitted().calibrate(make()))
# Without data to be held out there is nothing to be done, which is what `None` asks for.
del BAD_INPUTS["fit_hyperparameters: val_loader None"]

_BAD_TARGETS: dict[str, dict[str, tuple[str, Any]]] = {
    "classification": {
        "too large": ("between 0 and 2", LABELS + 5),
        "negative": ("between 0 and 2", LABELS - 1),
        "in floating point": ("integers", LABELS.double()),
        "true or false": ("integers", LABELS > 1),
        "one column": ("shape", LABELS[:, None]),
        "one-hot": ("shape", torch.eye(3)[LABELS].long()),
        "all ignored": ("ignore_index", torch.full((12,), -100)),
        "complex": ("complex", LABELS + 0j),
        "without numbers": ("meta", LABELS.to("meta")),
        "a dictionary": ("Targets", {"a": LABELS}),
        "too few": ("12 inputs and 4 targets", LABELS[:4]),
    },
    "binary": {
        "two": ("0 or 1", ONES + 1),
        "minus one": ("0 or 1", 2 * ONES - 1),
        "flat": ("shape", ONES[:, 0]),
        "NaN": ("targets", ONES / 0),
        "complex": ("complex", ONES + 0j),
        "too few": ("12 inputs and 4 targets", ONES[:4]),
    },
    "poisson": {
        "negative": ("Counts", COUNTS - 3),
        "halves": ("Counts", COUNTS / 2),
        "flat": ("shape", COUNTS[:, 0]),
        "NaN": ("targets", COUNTS / 0),
        "complex": ("complex", COUNTS + 0j),
        "too few": ("12 inputs and 4 targets", COUNTS[:4]),
    },
    "heteroscedastic": {
        "as wide as the outputs": ("shape", torch.cat([PAIRS, PAIRS], 1)),
        "whole": ("floating point", PAIRS.long()),
        "NaN": ("targets", PAIRS / 0),
        "too few": ("12 inputs and 4 targets", PAIRS[:4]),
    },
}
for _kind, _cases in _BAD_TARGETS.items():
    for _name, (_words, _targets) in _cases.items():
        _add(
            f"fit: {_kind}, targets {_name}",
            _words,
            lambda kind=_kind, y=_targets: _la(kind).fit([(X, y)], progress=False),
        )
_add("fit: heteroscedastic of three outputs", "2D", lambda: _fit_of(_net(3), "heteroscedastic", PAIRS))
_add("fit: classification of one output", "binary", lambda: _fit_of(_net(1), "classification", LABELS))


def _fit_of(model: nn.Module, likelihood: Any, y: Any, x: Any = X, **settings: Any) -> object:
    return LinearisedLaplace(model, likelihood, num_samples=4, **settings).fit([(x, y)], progress=False)


_HEADS: dict[str, Any] = {"a": "classification", "b": "poisson"}
_HEAD_TARGETS = {"a": LABELS, "b": COUNTS}
_add("fit: heads of a network with one", "heads", lambda: _fit_of(_net(3), _HEADS, _HEAD_TARGETS))
_add("fit: one likelihood of a network with heads", "dictionary", lambda: _fit_of(_Heads(), "poisson", COUNTS))
_add("fit: heads of other names", "heads", lambda: _fit_of(_Heads(), {"a": "poisson", "c": "poisson"}, _HEAD_TARGETS))
_add("fit: heads without targets", "heads", lambda: _fit_of(_Heads(), _HEADS, {"a": LABELS}))
_add("fit: heads with one tensor of targets", "heads", lambda: _fit_of(_Heads(), _HEADS, LABELS))
_add(
    "fit: a head with labels out of range",
    "Head 'a'",
    lambda: _fit_of(_Heads(), _HEADS, {"a": LABELS + 5, "b": COUNTS}),
)
_add(
    "fit: last layer of heads", "last_layer", lambda: _fit_of(_Heads(), _HEADS, _HEAD_TARGETS, parameters="last_layer")
)


def _raise(f: Tensor) -> Tensor:
    raise RuntimeError("size mismatch")


_OUTPUTS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "None": ("NoneType", lambda f: None),
    "a tuple": ("tuple", lambda f: (f, f)),
    "a list": ("list", lambda f: [f]),
    "a string": ("str", lambda f: "output"),
    "a number": ("float", lambda f: 1.0),
    "an array": ("ndarray", lambda f: f.detach().numpy()),
    "complex": ("complex", lambda f: f + 0j),
    "whole numbers": ("int64", lambda f: f.long()),
    "true or false": ("bool", lambda f: f > 0),
    "NaN": ("NaN", lambda f: f / 0 * 0),
    "one number": ("the first axis", lambda f: f.sum()),
    "another number of rows": ("the first axis", lambda f: f[:3]),
    "a constant": ("weights", lambda f: torch.zeros(len(f), 1)),
    "nothing of a datum": ("output", lambda f: f[:, :0]),
    "an error of its own": ("size mismatch", _raise),
    "an empty dictionary": ("dict", lambda f: {}),
    "detached": ("weights", lambda f: f.detach()),
}
for _name, (_words, _change) in _OUTPUTS.items():
    _add(
        f"fit: a network that returns {_name}",
        _words,
        lambda change=_change: _fit_of(_watch(_Returning(change)), "regression", REAL),
        (TypeError, ValueError, RuntimeError),
    )


def _filled(value: float) -> nn.Module:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, value)
    return _watch(model)


def _of_two_dtypes() -> nn.Module:
    return _watch(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double()))


def _without_a_weight(when: str) -> object:
    model = nn.Linear(2, 1)
    la = LinearisedLaplace(model, "regression", num_samples=4)
    if when == "predict":
        la.fit([(X, REAL)], progress=False)
    del model.weight
    return la.predict(X) if when == "predict" else la.fit([(X, REAL)], progress=False)


for _value in (1e38, -3e38, math.nan, math.inf):
    _add(f"fit: weights of {_value}", "model", lambda value=_value: _fit_of(_filled(value), "regression", REAL))
_add("fit: layers of two dtypes", "dtype", lambda: _fit_of(_of_two_dtypes(), "regression", REAL))
_add("fit: a weight deleted", "weight", lambda: _without_a_weight("fit"))
_add("predict: a weight deleted", "weight", lambda: _without_a_weight("predict"))

# Arguments of fits ----------------------------------------------------------------------------------------------------


def _fit_with(call: str, argument: str, kind: str = "regression") -> Callable[[Any], object]:
    def make(value: Any) -> object:
        return getattr(_la(kind), call)([(X, TARGETS[kind][1])], **{"progress": False, argument: value})

    return make


_WEIGHTS: dict[str, Any] = {
    "a string": "x",
    "strings": ["a"] * 12,
    "too few": torch.ones(3),
    "negative": -torch.ones(12),
    "NaN": torch.full((12,), math.nan),
    "complex": torch.ones(12) + 0j,
    "a number": 3.0,
    "a dictionary": {"a": 1.0},
    "zeros": torch.zeros(12),
    "without numbers": torch.ones(12, device="meta"),
    "a column too many": torch.ones(12, 3),
}
for _call in ("fit", "fit_hyperparameters"):
    _add_values(_call, "tolerance", _with(NOT_POSITIVE, **NOT_FINITE), _fit_with(_call, "tolerance"))
    _add_values(_call, "scale", _with(NOT_POSITIVE, **NOT_FINITE, word="x"), _fit_with(_call, "scale"))
    _add_values(_call, "weights", _WEIGHTS, _fit_with(_call, "weights"))
    _add_values(_call, "noise_variances", _WEIGHTS, _fit_with(_call, "noise_variances"))
    _add_values(
        _call,
        "unpack",
        {"3": 3, "a word": "x", "of nothing": lambda b: None, "of inputs": lambda b: b[0], "of words": lambda b: "xy"},
        _fit_with(_call, "unpack"),
    )
    _add_values(_call, "progress", {"a word": "no", "None": None}, _fit_with(_call, "progress"))
    _add(f"{_call}: num_data of a list", "num_data", lambda call=_call: _fit_with(call, "num_data")(12))
    _add(f"{_call}: unknown keyword", "epochs", lambda call=_call: _fit_with(call, "epochs")(3))
    _add(
        f"{_call}: noise_variances of a classification",
        "noise_variances",
        lambda call=_call: _fit_with(call, "noise_variances", "classification")(torch.ones(12)),
    )
_add("fit: scale='auto'", "scale", lambda: _fit_with("fit", "scale")("auto"))
_add("fit: val_loader by position", "positional", lambda: _la().fit([(X, REAL)], [(X, REAL)]))  # pyright: ignore
_add("fit: no data", "loader", lambda: _la().fit())  # pyright: ignore
_add(
    "fit: weights and noise_variances",
    "noise_variances",
    lambda: _la().fit([(X, REAL)], weights=torch.ones(12), noise_variances=torch.ones(12)),
)
_add_values(
    "fit",
    "num_data",
    _with(NOT_WHOLE, zero=0, too_many=13),
    lambda value: _la().fit(DataLoader(_Stream(), batch_size=4), num_data=value, progress=False),
)
_add_values("fit_hyperparameters", "max_steps", _with(NOT_WHOLE, zero=0), _fit_with("fit_hyperparameters", "max_steps"))
_add_values(
    "fit_hyperparameters", "num_samples", _with(NOT_WHOLE, zero=0), _fit_with("fit_hyperparameters", "num_samples")
)
for _argument in ("precision_bounds", "noise_bounds"):
    _add_values("fit_hyperparameters", _argument, BOUNDS, _fit_with("fit_hyperparameters", _argument))
_add_values(
    "fit_hyperparameters",
    "callback",
    {"a word": "print", "3": 3, "[]": []},
    _fit_with("fit_hyperparameters", "callback"),
)
_add(
    "fit_hyperparameters: val_loader of noise_variances",
    "val_loader",
    lambda: _la().fit_hyperparameters([(X, REAL)], [(X, REAL)], noise_variances=torch.ones(12)),
)

# Predictions ----------------------------------------------------------------------------------------------------------

_INPUTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "None": ("NoneType", lambda: None),
    "a number": ("float", lambda: 3.0),
    "a string": ("str", lambda: "x"),
    "an empty list": ("list", list),
    "lists": ("list", lambda: [[1.0, 2.0]]),
    "too wide": ("Sequential", lambda: _wide),
    "without the axis of the batch": ("first axis", lambda: X[0]),
    "one number": ("batch of inputs [N, ...]", lambda: torch.tensor(1.0)),
    "NaN": ("NaN", lambda: _nan),
    "infinity": ("infinity", lambda: _infinite),
    "whole numbers": ("int64", lambda: X.long()),
    "complex": ("complex", lambda: X + 0j),
    "in float64": ("float64", lambda: X.double()),
    "an array in float64": ("float64", lambda: X.double().numpy()),
    "an array of words": ("array", lambda: np.array(["a"])),
    "without numbers": ("meta", lambda: X.to("meta")),
    "sparse": ("sparse", lambda: X.to_sparse()),
    "a loader": ("batch", lambda: DataLoader(TensorDataset(X, REAL))),
    "a dataset": ("batch", lambda: TensorDataset(X)),
    "two tensors": ("Sequential", lambda: (X, X)),
    "tensors of two lengths": ("first axis", lambda: (X, X[:3])),
    "an unknown name": ("Sequential", lambda: {"x": X}),
    "a generator": ("generator", lambda: (x for x in X)),
    "a module": ("Linear", lambda: nn.Linear(1, 1)),
}
for _method in ("exact", "krylov"):
    for _name, (_words, _make) in _INPUTS.items():
        _add(
            f"predict: {_name}, {_method}",
            _words,
            lambda make=_make, method=_method: _fitted(method=method).predict(make()),
        )
_add_values(
    "predict",
    "num_samples",
    _with(NOT_WHOLE, zero=0, too_many=5),
    lambda value: _fitted().predict(X, num_samples=value),
)
_add_values("predict", "noise_variances", _WEIGHTS, lambda value: _fitted().predict(X, noise_variances=value))
_add("predict: observed without T", "observe", lambda: _fitted().predict(X, observed=True))
_add(
    "predict: noise_variances of labels",
    "noise_variances",
    lambda: _fitted("classification").predict(X, noise_variances=torch.ones(12)),
)
_add("predict: unknown keyword", "samples", lambda: _fitted().predict(X, samples=3))  # pyright: ignore
_add("predict: num_samples by position", "positional", lambda: _fitted().predict(X, 3))  # pyright: ignore
_add("predict: under vmap", "vmap", lambda: torch.func.vmap(lambda x: _fitted().predict(x[None]).outputs)(X))
_add("predict: under grad", "torch.func", lambda: torch.func.grad(lambda x: _fitted().predict(x).stddev.sum())(X))
_add("predict: under jvp", "torch.func", lambda: torch.func.jvp(lambda x: _fitted().predict(x).outputs, (X,), (X,)))
_USES: dict[str, Callable[[LinearisedLaplace], object]] = {
    "predict": lambda la: la.predict(X),
    "calibrate": lambda la: la.calibrate([(X, REAL)]),
    "sample": lambda la: la.sample(1),
    "samples_": lambda la: la.samples_,
    "mode_": lambda la: la.mode_,
    "prior_precision_": lambda la: la.prior_precision_,
    "noise_precision_": lambda la: la.noise_precision_,
    "history_": lambda la: la.history_,
    "diagnose": lambda la: la.diagnose(),
    "leave_one_out": lambda la: la.leave_one_out(),
    "evidence_path": lambda la: la.evidence_path(),
    "log_marginal_likelihood": lambda la: la.log_marginal_likelihood(),
    "state_dict": lambda la: la.state_dict(),
}
for _name, _use in _USES.items():
    _add(f"{_name}: before a fit", _name, lambda use=_use: use(_la()), (NotFittedError,))
_add_values("sample", "num_samples", _with(NOT_WHOLE, zero=0), lambda value: _fitted().sample(value))
_add_values(
    "evidence_path", "decades", _with(NOT_POSITIVE, **NOT_FINITE, thirteen=13), lambda v: _fitted().evidence_path(v)
)
_add_values("evidence_path", "num", _with(NOT_WHOLE, one=1), lambda value: _fitted().evidence_path(num=value))
_add("leave_one_out: another method", "exact", lambda: _fitted().leave_one_out())

_TARGETS_OF_ALL: dict[str, Callable[[Tensor], Any]] = {
    "too few": lambda y: y[:3],
    "too many": lambda y: torch.cat([y, y]),
    "None": lambda y: None,
    "a string": lambda y: "y",
    "a number": lambda y: 1.0,
    "an array of words": lambda y: np.array(["a"] * 12),
    "a dictionary": lambda y: {"a": y},
    "complex": lambda y: y + 0j,
    "one number": lambda y: torch.tensor(1),
    "without numbers": lambda y: y.to("meta"),
    "another shape": lambda y: y[..., None],
}
for _kind in (*TARGETS, "heads"):
    _y: Any = _HEAD_TARGETS if _kind == "heads" else TARGETS[_kind][1]
    for _name, _change in _TARGETS_OF_ALL.items():
        _words = "log_prob"

        def _log_prob(kind: str = _kind, y: Any = _y, change: Callable[[Tensor], Any] = _change) -> object:
            y = {head: change(of_head) for head, of_head in y.items()} if isinstance(y, dict) else change(y)
            return _fitted(kind).predict(X).log_prob(y)

        _add(f"log_prob: {_kind}, {_name}", _words, _log_prob)
for _kind, _targets in (
    ("regression", REAL * math.inf),
    ("heteroscedastic", PAIRS * math.inf),
    ("classification", LABELS + 3),
    ("binary", ONES * math.inf),
    ("poisson", COUNTS * math.inf),
):
    _add(f"log_prob: {_kind}, not possible", "log_prob", lambda k=_kind, y=_targets: _fitted(k).predict(X).log_prob(y))
    if _kind != "regression":
        _add(
            f"joint_log_prob: {_kind}, too few",
            "log_prob",
            lambda k=_kind: _fitted(k).predict(X).joint_log_prob(TARGETS[k][1][:3]),
        )
_add_values(
    "ClassificationPrediction",
    "probs_with",
    {"'x'": "x", "None": None, "3": 3},
    lambda value: _fitted("classification").predict(X).probs_with(value),
)
_add("probs_with: bridge of one logit", "Laplace bridge", lambda: _fitted("binary").predict(X).probs_with("bridge"))

# Files ----------------------------------------------------------------------------------------------------------------


def _load(**arguments: Any) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.pt"
        la = _fitted()
        la.save(path)
        return LinearisedLaplace.load(path, **{"model": la.network.module, **arguments})


for _argument, _value in (("likelihood", "ordinal"), ("likelihood", 3), ("prior", "flat"), ("prior", 3), ("method", 3)):
    _add(f"load: {_argument}={_value!r}", _argument, lambda a=_argument, v=_value: _load(**{a: v}))
_add("load: model None", "Module", lambda: _load(model=None))
_add("load: another model", "weights", lambda: _load(model=_net(1)))
_add("load: a model of other layers", "parameters", lambda: _load(model=nn.Linear(2, 1)))
_add("load: another likelihood", "likelihood", lambda: _load(likelihood="poisson"))
_add("load: unknown keyword", "device", lambda: _load(device="cpu"))
for _name, _state_of in (("{}", {}), ("None", None), ("3", 3), ("a module's", nn.Linear(1, 1).state_dict())):
    _add(f"load_state_dict: {_name}", "state", lambda state=_state_of: _la().load_state_dict(state))  # pyright: ignore

# Methods, likelihoods, priors -----------------------------------------------------------------------------------------

for _kind_of_method in (Auto, Exact, Krylov, Stochastic, Dual, Factored):
    _name = _kind_of_method.__name__
    _memory = _with(NOT_POSITIVE, word="1GB")
    if _kind_of_method is not Auto:
        _memory = {"'1GB'": "1GB", "-1.0": -1.0}
    _add_values(_name, "max_memory", _memory, lambda v, k=_kind_of_method: k(max_memory=v))
    _add(f"{_name}: unknown keyword", "epochs", lambda k=_kind_of_method: k(epochs=3))
for _name, _value in (("a word", "bfloat16"), ("float64", torch.float64), ("3", 3)):
    _add(f"Krylov: autocast={_name}", "autocast", lambda v=_value: _la(method=Krylov(autocast=v)))
_add("Krylov: by position", "positional", lambda: Krylov(1e9))  # pyright: ignore
_add_values("Factored", "kind", {"'full'": "full", "None": None, "3": 3, "[]": []}, lambda v: Factored(kind=v))
_add_values("Dual", "rank", NOT_WHOLE, lambda v: Dual(rank=v))
_add_values("Dual", "max_iterations", _with(NOT_WHOLE, zero=0), lambda v: Dual(max_iterations=v))
_add_values("Dual", "accuracy", NOT_POSITIVE, lambda v: Dual(accuracy=v))
_add_values(
    "Stochastic", "solver", {"'adam'": "adam", "3": 3, "SGD": SGD, "SVRG": SVRG}, lambda v: Stochastic(solver=v)
)
for _argument in ("min_steps", "batch_size", "max_doublings", "seed"):
    _add_values("SGD", _argument, NOT_WHOLE, lambda v, a=_argument: SGD(**{a: v}))
for _argument in ("epochs", "step", "clip", "mode_epochs", "tolerance"):
    _add_values("SGD", _argument, NOT_POSITIVE, lambda v, a=_argument: SGD(**{a: v}))
_add_values("SGD", "momentum", _with(NOT_POSITIVE, one=1.0) | {}, lambda v: SGD(momentum=v))
del BAD_INPUTS["SGD: momentum=0.0"]
for _argument in ("batch_size", "max_snapshots", "max_rank", "seed"):
    _add_values("SVRG", _argument, NOT_WHOLE, lambda v, a=_argument: SVRG(**{a: v}))
for _argument in ("epochs", "step", "tolerance"):
    _add_values("SVRG", _argument, NOT_POSITIVE, lambda v, a=_argument: SVRG(**{a: v}))

_add_values(
    "Gaussian",
    "noise_precision",
    _with(NOT_POSITIVE, inf=math.inf, None_=None, empty=torch.ones(0), matrix=torch.ones(2, 2), words=["a"])
    | {"[1.0]": [-1.0]},
    lambda v: Gaussian(v),
)
_add_values("Gaussian", "noise_at", {"'x'": "x", "None": None, "3": 3, "[]": []}, lambda v: Gaussian(noise_at=v))
_add_values("Gaussian", "learn", {"a word": "no", "None": None, "3": 3}, lambda v: Gaussian(learn=v))
_add_values(
    "Gaussian",
    "observe",
    {
        "2": 2,
        "a word": "T",
        "a vector": torch.ones(3),
        "one function": torch.sin,
        "a tuple of one": (torch.sin,),
        "a list": [[1.0]],
        "a pair of tensors": (X, X),
    },
    lambda v: Gaussian(observe=v),
)
_add(
    "Gaussian: observe, not adjoint",
    "adjoint",
    lambda: _fit_of(_net(), Gaussian(observe=(lambda f: 2 * f, lambda u: 3 * u)), REAL),
)
_add(
    "Gaussian: observe of another width",
    "observe",
    lambda: _fit_of(_net(), Gaussian(observe=torch.ones(2, 5)), REAL),
)
_add(
    "Gaussian: as many precisions as outputs", "noise_precision", lambda: _fit_of(_net(), Gaussian(torch.ones(3)), REAL)
)
_add_values(
    "Categorical", "class_dim", {"0": 0, "1.5": 1.5, "'x'": "x", "True": True}, lambda v: Categorical(class_dim=v)
)
_add_values(
    "Categorical", "ignore_index", {"1.5": 1.5, "'x'": "x", "None": None}, lambda v: Categorical(ignore_index=v)
)
_add("Categorical: class_dim of no axis", "class_dim", lambda: _fit_of(_net(3), Categorical(class_dim=3), LABELS))
_add("Bernoulli: an argument", "positional", lambda: Bernoulli(3))  # pyright: ignore
_add("Poisson: an argument", "positional", lambda: Poisson(3))  # pyright: ignore
for _name, _value in (("{}", {}), ("3", 3), ("None", None), ("a list", [Gaussian()]), ("a class", {"a": Poisson})):
    _add(f"MultiTask: {_name}", "MultiTask", lambda v=_value: MultiTask(v))  # pyright: ignore
for _name, _value in (("3", 3), ("None", None), ("a word", "mse")):
    _add(f"from_loss: {_name}", "from_loss", lambda v=_value: from_loss(v))  # pyright: ignore
_add_values("from_loss", "name", {"3": 3, "None": None}, lambda v: from_loss(lambda f, y: (f - y).sum(), v))
_LOSSES: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "not a scalar": ("scalar", lambda f, y: (f - y) ** 2),
    "a number": ("scalar", lambda f, y: 1.0),
    "no curvature": ("curvature", lambda f, y: (f - y).abs().sum()),
    "not convex": ("convex", lambda f, y: -((f - y) ** 2).sum()),
    "no derivative": ("curvature", lambda f, y: (f - y).detach().square().sum()),
    "an if": ("differentiated", lambda f, y: f.square().sum() if f.sum() > 0 else f.sum()),
    "of one argument": ("loss", lambda f: f.sum()),  # pyright: ignore
    "that raises": ("loss", lambda f, y: _raise(f)),
}
for _name, (_words, _loss) in _LOSSES.items():
    _add(f"from_loss: {_name}", _words, lambda loss=_loss: _fit_of(_net(), from_loss(loss), REAL))
for _prior in (IsotropicPrior, LayerwisePrior, GPrior):
    _values = _with(NOT_POSITIVE, **NOT_FINITE)
    _add_values(_prior.__name__, "precision", _values, lambda v, prior=_prior: prior(precision=v))
_add_values("GPrior", "num_probes", _with(NOT_WHOLE, zero=0), lambda v: GPrior(num_probes=v))
_add_values("GPrior", "floor", _with(NOT_POSITIVE, **NOT_FINITE), lambda v: GPrior(floor=v))
_add_values("GPrior", "exact_limit", {"nan": math.nan, "'1'": "1", "-1.0": -1.0}, lambda v: GPrior(exact_limit=v))


def _masks(k: Any, **settings: Any) -> object:
    return largest_variance(_net(), "regression", [(X, REAL)], k, **settings)


_add_values("largest_variance", "k", _with(NOT_WHOLE, zero=0, too_many=99), _masks)
_add("largest_variance: method", "method", lambda: _masks(2, method="kfac"))
_add("largest_variance: unknown keyword", "epochs", lambda: _masks(2, epochs=3))

# Gaussian processes ---------------------------------------------------------------------------------------------------


def _surrogate(network: Any = None, x: Any = X, y: Any = REAL, **options: Any) -> Any:
    from laplace_sampling.gp.botorch import TangentSurrogate

    options = {"prior_precision": 1.0, "noise_precision": 4.0, **options}
    return TangentSurrogate(_net() if network is None else network, x, y, **options)


def _kernel(network: Any = None, **options: Any) -> Any:
    from laplace_sampling.gp.tangent_kernel import TangentKernel

    return TangentKernel(_net() if network is None else network, **options)


_SURROGATE_DATA: dict[str, tuple[str, Any, Any]] = {
    "train_X of one axis": ("train_X", X[:, 0], REAL),
    "train_X empty": ("train_X", X[:0], REAL[:0]),
    "train_X too wide": ("Sequential", _wide, REAL),
    "train_X with NaN": ("train_X", _nan, REAL),
    "train_X None": ("train_X", None, REAL),
    "train_X a list": ("train_X", [[1.0, 2.0]], REAL),
    "train_X complex": ("train_X", X + 0j, REAL),
    "train_X of three axes": ("train_X", X[None], REAL),
    "train_Y of one axis": ("train_Y", X, REAL[:, 0]),
    "train_Y too short": ("train_Y", X, REAL[:3]),
    "train_Y too wide": ("train_y", X, PAIRS),
    "train_Y with infinity": ("train_Y", X, REAL / 0),
    "train_Y None": ("train_Y", X, None),
    "train_Y complex": ("train_Y", X, REAL + 0j),
}
for _name, (_words, _x, _y) in _SURROGATE_DATA.items():
    _add(f"TangentSurrogate: {_name}", _words, lambda x=_x, y=_y: _surrogate(x=x, y=y))
_add("TangentSurrogate: network a word", "Module", lambda: _surrogate("net"))
_add_values("TangentSurrogate", "Mean", {"'x'": "x", "None": None, "3": 3}, lambda v: _surrogate(mean=v))
_add_values("TangentSurrogate", "prior_precision", NOT_POSITIVE, lambda v: _surrogate(prior_precision=v))
_add_values("TangentSurrogate", "noise_precision", NOT_POSITIVE, lambda v: _surrogate(noise_precision=v))
_add_values("TangentSurrogate", "scale", {"too short": torch.ones(3), "3": 3}, lambda v: _surrogate(scale=v))
_add_values(
    "TangentSurrogate",
    "input_shape",
    {"another size": (5,), "3": 3, "a word": "x"},
    lambda v: _surrogate(input_shape=v),
)
_add_values("TangentSurrogate", "num_samples", _with(NOT_WHOLE, zero=0), lambda v: _surrogate().sample_paths(v))
_add("TangentKernel: network None", "Module", lambda: _kernel("net"))
_add_values("TangentKernel", "prior_precision", NOT_POSITIVE, lambda v: _kernel(prior_precision=v))
_add_values("TangentKernel", "scale", {"too short": torch.ones(3), "3": 3}, lambda v: _kernel(scale=v))
_add("TangentKernel: unknown keyword", "precision", lambda: _kernel(precision=3.0))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_a_bad_input_ends_in_a_sentence(name: str) -> None:
    bad = BAD_INPUTS[name]
    _watched.clear()
    with pytest.raises(bad.errors) as caught:
        bad.call()
    assert _is_explained(caught.value), "the message is that of other code"
    assert bad.words in str(caught.value)
    assert all(_same(before, _state(model)) for model, before in _watched), "the model is changed"
