"""`Checkpoint`: the file of `fit(checkpoint=...)`, from which the same call goes on after its process was killed.

What the file holds are results of costly functions (`solvers.recorded`, `results`); a fit that goes on runs through the
same code, and takes from the file what is there. So this file knows no method, and no method knows this file.
"""

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from laplace_sampling.data.batches import batched
from laplace_sampling.data.digest import digest
from laplace_sampling.data.processes import Processes
from laplace_sampling.data.training_data import TrainingData
from laplace_sampling.files import check_target, target_of
from laplace_sampling.held_out import HeldOut
from laplace_sampling.likelihoods.as_likelihood import recipe_of_likelihood
from laplace_sampling.linear_model.priors.as_prior import recipe_of_prior
from laplace_sampling.linear_model.tangent_model import TangentModel
from laplace_sampling.methods import recipe_of_method
from laplace_sampling.methods.fit import Fit
from laplace_sampling.methods.problem import Memory, Problem
from laplace_sampling.networks.function_fingerprint import FunctionFingerprint
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.posterior import Posterior
from laplace_sampling.results import Results
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.recorded import recording

FilePath = str | os.PathLike[str]

_DATA = "the training data, their order or their batches"
# Characters of a value that an error shows; what stands before a digest.
_SHOWN, _DIGEST = 60, "sha256 "
# A relative difference of the loss of the network that is not one of rounding.
_LOSS = 1e-3


class Checkpoint:
    """A context in which, from `begin` on, the results of a fit are kept in a file; with `None` nothing happens.

    Args:
        path: of the file, or `None`.
        call: what the user called.
        arguments: of the call, by name, as far as results depend on them.

    Raises:
        TypeError, OSError: if there can be no file of this path.
    """

    def __init__(self, path: FilePath | None, call: str, arguments: Mapping[str, Any]) -> None:
        self._call, self._arguments, self._stack = call, arguments, ExitStack()
        self._path: Path | None = None
        self._results: Results | None = None
        if path is not None:
            if not isinstance(path, str | os.PathLike):
                raise TypeError(f"`{call}(checkpoint=...)` must be the path of a file, but is {path!r:.80}.")
            self._path = target_of(path)
            check_target(self._path, "checkpoint=")

    def __enter__(self) -> Self:
        self._stack.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

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
        self._check_alike(fit, processes)
        if self._path is None:
            return problem
        fit[_DATA] = _comparable(_digest_of(problem.tangent.data))
        self._results = results = self._stack.enter_context(Results(self._path, fit, network.products, processes))
        self._check(results.head, fit)
        self._check_function(results, network, problem.tangent)
        # What is solved for together depends on how much memory was free when the fit began.
        memory = results.result("memory", (), lambda: _memory_of(problem, network))
        self._stack.enter_context(recording(results))
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

    def _check_alike(self, here: dict[str, Any], processes: Processes) -> None:
        """Raise if another process makes another call: both would wait for each other."""
        if other := processes.differing(here):
            raise ValueError(
                f"`{self._call}`: the processes that share the fit differ in {', '.join(other)}. Make the same call in "
                "each of them, with the same arguments."
            )

    def _check(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        other = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if other:
            which = ", ".join(name + _both(there.get(name), here.get(name)) for name in other)
            raise ValueError(
                f"`{self._call}(checkpoint=...)`: {self._path} is of a fit that was begun otherwise: {which}. Call it "
                "as it was begun, or give another path, or delete the file to begin anew."
            )

    def _check_function(self, results: Results, network: Linearisation, tangent: TangentModel) -> None:
        """Raise if the same weights compute something else, or have another loss, which may be a user's own."""
        now = FunctionFingerprint.of(network, tangent.data)
        loss = tangent.model.total_loss(tangent.model.network_outputs)
        before, *numbers = results.result("function", (), lambda: (loss, *([now.outputs, now.product] if now else [])))
        difference = f"the loss of the data was {before:.6g}, and is {loss:.6g}"
        same = abs(loss - before) <= _LOSS * abs(before)
        if same and now is not None:
            difference = FunctionFingerprint(now.inputs, *numbers).difference(network)
            same = difference is None
        if not same:
            raise ValueError(
                f"`{self._call}(checkpoint=...)`: {self._path} is of a model with these weights that computes "
                f"something else: {difference}. Take the code of the model and of the likelihood as it was, or delete "
                "the file to begin anew."
            )


def _memory_of(problem: Problem, network: Linearisation) -> tuple[float, int, int | None]:
    """Bytes that solvers may take by default, and data that go through the network together."""
    return problem.memory_of(None).bytes, problem.features.batch_size, network.batching.max_rows


def _with_memory(problem: Problem, network: Linearisation, free: float, rows: int, most: int | None) -> Problem:
    """The problem with another `_memory_of`."""
    features, network.batching.max_rows = copy.copy(problem.features), most
    features.batch_size = rows

    def memory_of(max_memory: float | None) -> Memory:
        memory = problem.memory_of(max_memory)
        return memory if memory.given else replace(memory, bytes=free)

    tangent = replace(problem.tangent, model=replace(problem.tangent.model, features=features))
    return replace(problem, tangent=tangent, memory_of=memory_of)


def _comparable(value: Any) -> Any:
    """A value as a file gives it back; what is long by a digest."""
    if isinstance(value, Tensor):
        return _DIGEST + digest([("", value)]).hex()
    text = json.dumps(value, default=repr)
    return json.loads(text) if len(text) <= _SHOWN else _DIGEST + hashlib.sha256(text.encode()).hexdigest()


def _both(there: Any, here: Any) -> str:
    """Two values for an error, unless one is a digest."""
    texts = [json.dumps(value) for value in (there, here)]
    return "" if any(_DIGEST in text for text in texts) else f" (it was {texts[0]}, and is {texts[1]})"


def _digest_of(data: TrainingData) -> str:
    """SHA-256 of inputs, batch by batch, since sums over data are rounded by batches, and of targets."""

    def of_part() -> bytes:
        with data.processes.local_only():
            return b"".join(digest(("", x) for x in batched(data.inputs(b))[0]) for b in data.own_batches())

    targets = digest(("", y) for y in batched(data.all_targets())[0])
    return _DIGEST + hashlib.sha256(b"".join([*data.processes.gathered(of_part), targets])).hexdigest()


def _digest_of_posterior(posterior: Posterior) -> str:
    samples, prior = posterior.samples, posterior.prior
    return _DIGEST + digest([("samples", samples), ("prior", prior.precision), ("scale", prior.scale)]).hex()
