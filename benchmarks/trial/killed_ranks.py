"""Fits of two processes, one of which is killed at a random moment; then one to four processes go on.

The killed one gets SIGKILL, of which it learns nothing. The other has to end by itself within a minute, with a sentence
that says why, and the fit that goes on has to end in the numbers of one that nobody disturbed.
"""

import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.trial.report import Report
from laplace_sampling import SVRG, LinearisedLaplace, Stochastic
from laplace_sampling.data.processes import ProcessError
from laplace_sampling.journal import Journal

__all__ = ["METHODS", "run"]

METHODS: dict[str, Any] = {"krylov": "krylov", "stochastic": Stochastic(solver=SVRG(max_rank=32)), "kfac": "kfac"}
# Processes that are killed, and those that go on, in turn.
_RANKS, _GO_ON = 2, (2, 1, 3, 2, 4)
# Seconds within which the others have to end, after which a fit is stuck, and between looks.
_ALLOWED, _STUCK, _POLLED = 60.0, 300.0, 0.002
# Relative to the largest number: float64, in sums of other parts of the data.
_EQUAL = 1e-10
_CAUSE = "has failed: it has ended, or cannot be reached"


class _Fitted:
    """What is fitted in child processes, always the same."""

    def __init__(self, name: str, num_data: int, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.checkpoint, self.starts = folder / f"{name}.checkpoint", 0
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_data, 16, generator=generator, dtype=torch.float64)
        y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
        self.loader = DataLoader(TensorDataset(x, y), batch_size=100)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
            self.model.double()
            optimiser = torch.optim.Adam(self.model.parameters(), 0.01)
            for _ in range(40):
                optimiser.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                optimiser.step()
        children = self.begun()
        started = time.perf_counter()
        self.expected, _ = self.ended(children)
        self.seconds = time.perf_counter() - started

    def start(self, ranks: int) -> dict[int, int]:
        """Processes that fit, by rank."""
        self.starts += 1
        for file in self.folder.glob("rank*"):
            file.unlink()
        return {rank: self._forked(rank, ranks) for rank in range(ranks)}

    def begun(self) -> dict[int, int]:
        """Processes that fit, and have met for the first time."""
        children, latest = self.start(_RANKS), time.perf_counter() + _STUCK
        while not self.checkpoint.exists() and time.perf_counter() < latest:
            time.sleep(_POLLED)
        return children

    def _forked(self, rank: int, ranks: int) -> int:
        child = os.fork()
        if child == 0:
            outcome: Any = None
            try:
                warnings.simplefilter("ignore")
                outcome = self._fit(rank, ranks)
            except ProcessError as error:
                outcome = str(error)
            except BaseException:  # a child that goes on would run the parent's code
                outcome = traceback.format_exc()
            finally:
                torch.save(outcome, self.folder / f"rank{rank}")
                os._exit(0)
        return child

    def _fit(self, rank: int, ranks: int) -> tuple[list[Tensor], int]:
        """Numbers of the fit, and how many of its results came from the file."""
        store = dist.FileStore(str(self.folder / f"store{self.name}{self.starts}"), ranks)  # pyright: ignore
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        found, known = [], Journal.known

        def counted(self: Journal, key: str) -> Any:
            result = known(self, key)
            found.extend([key] if result is not None else [])
            return result

        Journal.known = counted
        method, group = METHODS[self.name], dist.group.WORLD
        la = LinearisedLaplace(self.model, "classification", method=method, num_samples=32, process_group=group)
        la.fit_hyperparameters(self.loader, progress=False, checkpoint=self.checkpoint)
        numbers = [la.samples_, la.prior_precision_, la.effective_dimension_, torch.tensor([la.scale_])]
        dist.barrier()
        return numbers, len(found)

    def ended(self, children: dict[int, int]) -> tuple[list[Tensor], int]:
        """What the first process returns, when all have come to their end.

        Raises:
            RuntimeError: if one of them fails, or all are stuck.
        """
        left = self.waited(children, _STUCK)
        if left:
            raise RuntimeError(f"processes {list(left)} are stuck")
        for outcome in (self.outcome(rank) for rank in children):
            if isinstance(outcome, str):
                raise RuntimeError(outcome)
        return self.outcome(0)

    def waited(self, children: dict[int, int], seconds: float) -> dict[int, int]:
        """Those that have not ended after some seconds, which are killed."""
        end, children = time.perf_counter() + seconds, dict(children)
        while children and time.perf_counter() < end:
            for rank, child in list(children.items()):
                if os.waitpid(child, os.WNOHANG) != (0, 0):
                    children.pop(rank)
            time.sleep(_POLLED)
        for child in children.values():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return children

    def outcome(self, rank: int) -> Any:
        """What a process has left."""
        return torch.load(self.folder / f"rank{rank}", weights_only=True)

    def killed(self, moments: random.Random) -> tuple[int, float, str] | None:
        """The killed process, the seconds until the others ended and what they say; `None` if the fit was faster."""
        victim, wait = moments.randrange(_RANKS), moments.uniform(0, 0.95) * self.seconds
        children = self.begun()
        time.sleep(wait)
        if os.waitpid(children[victim], os.WNOHANG) != (0, 0):
            children.pop(victim)
            self.ended(children)
            return None
        os.kill(children[victim], signal.SIGKILL)
        os.waitpid(children.pop(victim), 0)
        started = time.perf_counter()
        left = self.waited(children, _ALLOWED)
        seconds = time.perf_counter() - started
        said = "nothing" if left else self.outcome(next(iter(children)))
        # Both have met after the fit if one of them has its numbers: the killed one was about to end.
        return (victim, seconds, said) if isinstance(said, str) else None


def run(count: int, seed: int) -> Report:
    """So many kills; fits take a fifth of the time where there are few."""
    report, moments, slowest, furthest = Report(), random.Random(seed), 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        fits: dict[str, _Fitted] = {}
        names = list(METHODS)[: max(1, count // 2)]
        while report.trials < count:
            name, ranks = names[report.trials % len(names)], _GO_ON[report.trials % len(_GO_ON)]
            fitted = fits.get(name) or fits.setdefault(name, _Fitted(name, 200 * min(10, count), Path(folder)))
            killed = fitted.killed(moments)
            if killed is None:
                report.counts["fits that were faster than the kill"] += 1
                continue
            victim, seconds, said = killed
            report.trials += 1
            report.counts[f"{name}: kills of process {victim}"] += 1
            report.counts["fits whose other process says why"] += _CAUSE in said
            where = f"seed {seed}, trial {report.trials}: {name}, process {victim} killed"
            if _CAUSE not in said:
                report.defects.append(f"{where}: the other says after {seconds:.1f} s: {said}")
            slowest = max(slowest, seconds)
            report.counts["fits whose other process ended within 2 s"] += seconds < 2
            kept = fitted.checkpoint.exists()
            try:
                numbers, found = fitted.ended(fitted.start(ranks))
            except RuntimeError as error:
                report.defects.append(f"{where}: {ranks} do not go on: {error}")
                fitted.checkpoint.unlink(missing_ok=True)
                continue
            difference = max(map(_difference, numbers, fitted.expected))
            furthest = max(furthest, difference)
            report.counts[f"fits that went on with {ranks}"] += kept
            report.counts[f"results found in the file with {ranks}"] += found
            if difference > _EQUAL or fitted.checkpoint.exists():
                report.defects.append(f"{where}: {ranks} differ by {difference:.1e}, or leave the file")
        for name, fitted in fits.items():
            report.counts[f"{name}: ms that a fit takes"] = round(1000 * fitted.seconds)
    report.counts["ms until the other ended, at most"] = round(1000 * slowest)
    report.counts["1e-16 relative difference, at most"] = round(1e16 * furthest)
    return report


def _difference(numbers: Tensor, expected: Tensor) -> float:
    """The largest one, relative to the largest number."""
    return float((numbers - expected).abs().max() / expected.abs().max())
