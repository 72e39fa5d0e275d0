"""`Checkpoint`: the file of `fit(checkpoint=...)`, from which the same call goes on after its process was killed.

The SQLite file holds results of costly functions (`solvers.recorded`); a fit that goes on runs through the same code,
and takes from the file what is there. So this file knows no method, and no method knows this file. SQLite writes a
result as a whole or not at all, and keeps a second fit out of the file.
"""

import copy
import hashlib
import io
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from laplace_sampling.data.batches import batched, digest
from laplace_sampling.data.processes import Processes
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.files import check_target, load_checked, target_of
from laplace_sampling.likelihoods.as_likelihood import recipe_of_likelihood
from laplace_sampling.linear_model.held_out import HeldOut
from laplace_sampling.linear_model.linear_model import TangentModel
from laplace_sampling.linear_model.priors.as_prior import recipe_of_prior
from laplace_sampling.methods import recipe_of_method
from laplace_sampling.methods.method import Fit
from laplace_sampling.methods.problem import Problem
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.posterior import Posterior
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.recorded import recording

Result = TypeVar("Result")
FilePath = str | os.PathLike[str]

_DATA = "the training data, their order or their batches"
_DIGEST = "sha256 "  # stands before the digest of a value that is long


class Checkpoint(ExitStack):
    """A context in which, from `begin` on, the results of a fit are kept in a file; with `None` nothing happens.

    Args:
        path: of the file, or `None`.
        call: what the user called.
        arguments: of the call, by name, as far as results depend on them.

    Raises:
        TypeError, OSError: if there can be no file of this path.
    """

    def __init__(self, path: FilePath | None, call: str, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self._call, self._arguments = call, arguments
        self._path: Path | None = None
        self._results: Results | None = None
        if path is not None:
            if not isinstance(path, str | os.PathLike):
                raise TypeError(f"`{call}(checkpoint=...)` must be the path of a file, but is {path!r:.80}.")
            self._path = target_of(path)
            check_target(self._path, "checkpoint=")

    def begin(
        self,
        settings: Settings,
        network: Linearisation,
        problem: Problem,
        held_out: HeldOut | None = None,
        earlier: Posterior | None = None,
    ) -> Problem:
        """Open the file, or make it, and return the problem with the memory that the fit had when it began.

        Args:
            settings: of the `LinearisedLaplace`.
            network: the linearised network.
            problem: what is fitted.
            held_out: data of `val_loader`.
            earlier: the posterior that a warm fit starts from.

        Raises:
            BlockingIOError: if another fit, of whatever process, has the file.
            OSError: if the file cannot be opened or written.
            ValueError: if it is damaged, or of another fit.
        """
        processes = settings.processes
        if self._path is None and processes.size == 1:
            return problem
        fit = self._described(settings, network, held_out, earlier)
        if other := processes.differing(fit):  # both would wait for each other
            raise ValueError(
                f"`{self._call}`: the processes that share the fit differ in {', '.join(other)}. Make the same call in "
                "each of them, with the same arguments."
            )
        if self._path is None:
            return problem
        fit[_DATA] = _comparable(_digest_of(problem.tangent.data))
        self._results = results = self.enter_context(Results(self._path, fit, network.products, processes))
        self._check(results.head, fit)
        self._check_loss(results, problem.tangent)
        # What is solved for together depends on how much memory was free when the fit began.
        memory = results.result("memory", (), lambda: _memory_of(problem, network))
        self.enter_context(recording(results))
        return _with_memory(problem, network, *memory)

    def done(self, fit: Fit) -> None:
        """Delete the file at the end of the fit, unless Ctrl-C ended the fit with some of its samples."""
        interrupted = fit.sampled is not None and fit.sampled.interrupted
        if self._results is not None and not interrupted:
            self._results.delete()

    def _described(
        self,
        settings: Settings,
        network: Linearisation,
        held_out: HeldOut | None,
        earlier: Posterior | None,
    ) -> dict[str, Any]:
        """What the results depend on, without the training data, by the words of an error."""
        found = {
            "the call": self._call,
            "the version of laplace_sampling": version("laplace_sampling"),
            "the version of torch": torch.__version__,
            "the device": str(network.device),
            "the dtype of the weights": str(network.dtype),
            "the weights or buffers of the model": bytes(network.fingerprint().tolist()).hex(),
            "`likelihood`": recipe_of_likelihood(settings.likelihood),
            "`prior`": recipe_of_prior(settings.prior),
            "`method`": recipe_of_method(settings.method),
            "`parameters`": network.selection,
            "`num_samples` of the constructor": settings.num_samples,
            "`seed`": settings.seed,
            "`linear_model`": settings.linear_model,
            "the data of `val_loader`": None if held_out is None else _digest_of(held_out.data),
            "the posterior that it starts from": None if earlier is None else _digest_of_posterior(earlier),
        }
        # Functions have no value that another process could compare.
        found |= {f"`{name}`": value for name, value in self._arguments.items() if not callable(value)}
        return {name: _comparable(value) for name, value in found.items()}

    def _check(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        other = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if other:
            which = ", ".join(name + _both(there.get(name), here.get(name)) for name in other)
            raise ValueError(
                f"`{self._call}(checkpoint=...)`: {self._path} is of a fit that was begun otherwise: {which}. Call it "
                "as it was begun, or give another path, or delete the file to begin anew."
            )

    def _check_loss(self, results: "Results", tangent: TangentModel) -> None:
        """Raise if the same weights compute something else, or have another loss, which may be a user's own."""
        loss = tangent.model.total_loss(tangent.model.network_outputs)
        before = results.result("loss", (), lambda: loss)
        if not abs(loss - before) <= 1e-3 * abs(before):  # a larger difference is not one of rounding
            raise ValueError(
                f"`{self._call}(checkpoint=...)`: {self._path} is of a model with these weights that computes "
                f"something else: the loss of the data was {before:.6g}, and is {loss:.6g}. Take the code of the model "
                "and of the likelihood as it was, or delete the file to begin anew."
            )


def _memory_of(problem: Problem, network: Linearisation) -> tuple[float, int, int | None]:
    """Bytes that solvers may take by default, and data that go through the network together."""
    return problem.free_bytes, problem.features.batch_size, network.batching.max_rows


def _with_memory(problem: Problem, network: Linearisation, free: float, rows: int, most: int | None) -> Problem:
    """The problem with another `_memory_of`."""
    features, network.batching.max_rows = copy.copy(problem.features), most
    features.batch_size = rows

    tangent = replace(problem.tangent, model=replace(problem.tangent.model, features=features))
    return replace(problem, tangent=tangent, free_bytes=free)


def _comparable(value: Any) -> Any:
    """A value as a file gives it back; what is long by a digest."""
    if isinstance(value, Tensor):
        return _DIGEST + digest([("", value)]).hex()
    text = json.dumps(value, default=repr)
    return json.loads(text) if len(text) <= 60 else _DIGEST + hashlib.sha256(text.encode()).hexdigest()


def _both(there: Any, here: Any) -> str:
    """Two values for an error, unless one is a digest."""
    texts = [json.dumps(value) for value in (there, here)]
    return "" if any(_DIGEST in text for text in texts) else f" (it was {texts[0]}, and is {texts[1]})"


def _digest_of(data: TrainingData) -> str:
    """SHA-256 of inputs, batch by batch, since sums over data are rounded by batches, and of targets."""

    def of_part() -> bytes:
        with data.processes.local_only():
            return b"".join(digest(("", x) for x in batched(data.inputs(b))[0]) for b in data.own_batches())

    targets = digest(("", y) for y in batched(data.targets)[0])
    return _DIGEST + hashlib.sha256(b"".join([*data.processes.gathered(of_part), targets])).hexdigest()


def _digest_of_posterior(posterior: Posterior) -> str:
    samples, prior = posterior.samples, posterior.prior
    return _DIGEST + digest([("samples", samples), ("prior", prior.precision), ("scale", prior.scale)]).hex()


class Results:
    """A recorder (`solvers.recorded.Recorder`) that keeps results in a file, and gives those that are there.

    The first of several processes has the file; all of them get the results, so that a fit goes on with more or fewer.

    Args:
        path: of the file.
        head: of which fit the results are, as JSON.
        products: counts of Jacobian products of the network; what a call adds to them is a part of its result.
        processes: those that share the fit.

    Attributes:
        head: as it was when the file was made.

    Raises:
        BlockingIOError: if another fit has the file.
        OSError: if it cannot be opened or written.
        ValueError: if it is damaged, or of something else.
    """

    _FORMAT = 3

    def __init__(self, path: Path, head: dict[str, Any], products: dict[str, int], processes: Processes) -> None:
        self.path, self.products, self.processes = path, products, processes
        self._database: sqlite3.Connection | None = None
        self._calls: Counter[str] = Counter()
        self._key = ""
        self.head: dict[str, Any] = processes.first(lambda: self._open(head))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._database is not None:
            self._database.close()

    def delete(self) -> None:
        """Remove the file, when all processes have come here."""
        self.processes.least(0.0)
        if self._database is not None:
            self._database.close()
            self.path.unlink(missing_ok=True)

    def result(self, name: str, arguments: Sequence[Any], compute: Callable[[], Result]) -> Result:
        """The next result of such a call that is in the file, or what is computed now."""
        found = self.processes.first(lambda: self._known(name, arguments))
        if found is not None:
            value, spent = found
            for product, number in spent.items():
                self.products[product] += number
            return value
        before = dict(self.products)
        value = compute()
        if self._database is not None:
            spent = {product: number - before.get(product, 0) for product, number in self.products.items()}
            self._write(value, spent)
        return value

    def _open(self, head: dict[str, Any]) -> dict[str, Any]:
        with self._errors():
            database = sqlite3.connect(self.path, timeout=0, isolation_level=None)
            try:
                # The lock stays until the connection ends. A power loss may cost the last results, not the file.
                database.execute("PRAGMA locking_mode = EXCLUSIVE")
                database.execute("PRAGMA synchronous = NORMAL")
                database.execute("BEGIN EXCLUSIVE")
                if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    database.execute("CREATE TABLE fit (head TEXT)")
                    database.execute("CREATE TABLE results (key TEXT PRIMARY KEY, value BLOB)")
                    database.execute("INSERT INTO fit VALUES (?)", [json.dumps(head)])
                    database.execute(f"PRAGMA user_version = {self._FORMAT}")
                database.execute("COMMIT")
                found = database.execute("PRAGMA user_version").fetchone()[0]
                if found != self._FORMAT:
                    raise ValueError(
                        f"`checkpoint=`: {self.path} has format {found}, but this version has {self._FORMAT}: "
                        "fit with the version that wrote it, or delete it."
                    )
                head = json.loads(database.execute("SELECT head FROM fit").fetchone()[0])
            except BaseException:
                database.close()
                raise
        self._database = database
        return head

    def _known(self, name: str, arguments: Sequence[Any]) -> tuple[Any, dict[str, int]] | None:
        """The result in the file of the next such call, with the products that it took."""
        assert self._database is not None
        key = key_of(name, arguments)
        self._calls[key] += 1
        self._key = f"{key} {self._calls[key]}"
        with self._errors():
            row = self._database.execute("SELECT value FROM results WHERE key = ?", [self._key]).fetchone()
        with suppress(Exception):  # a damaged result is computed again
            return None if row is None else load_checked(io.BytesIO(row[0]))
        return None

    def _write(self, value: Any, spent: Mapping[str, int]) -> None:
        """Write the result of the last call."""
        assert self._database is not None
        written = io.BytesIO()
        # Copies, for a view would be written with all that it is a view of. They keep the order of axes in memory:
        # products with a matrix and with its transpose are rounded differently.
        torch.save((tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value), dict(spent)), written)
        with self._errors():
            self._database.execute("INSERT OR REPLACE INTO results VALUES (?, ?)", [self._key, written.getbuffer()])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of SQLite in one sentence."""
        try:
            yield
        except sqlite3.Error as error:
            # Extended codes have more in the bits above the first eight.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise BlockingIOError(
                    f"`checkpoint=`: {self.path} is in use by another fit, of this process or another one. Wait until "
                    "that ends, or give another path."
                ) from error
            if isinstance(error, sqlite3.OperationalError):
                raise OSError(
                    f"`checkpoint=`: {self.path} cannot be read or written: {error}. What is in it stays."
                ) from error
            raise ValueError(
                f"`checkpoint=`: {self.path} is damaged, or no file of a fit ({error}). Give another path, or delete "
                "it if it is."
            ) from error


def key_of(name: str, arguments: Sequence[Any]) -> str:
    """A digest of a call. Objects without a `key()` count by their class: calls with the same key are in order."""
    sha = hashlib.sha256(name.encode())
    for part in _parts(arguments):
        sha.update(part)
    return sha.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield digest([("", value)])
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value).encode() + b";"
    elif isinstance(value, tuple | list):
        yield f"{len(value)}:".encode()
        for part in value:
            yield from _parts(part)
    else:
        yield type(value).__name__.encode()
        if hasattr(value, "key"):
            yield from _parts(value.key())
