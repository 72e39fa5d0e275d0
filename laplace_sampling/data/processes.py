"""`Processes`: those that share a fit, each of which sums over its own part of the data or draws its own samples.

All of them run the same code on the same numbers, and meet where something is summed over data
(`linear_model.features.Features.summing`) or computed for each datum (`by_datum`): there each takes its part, and
`data.fit_group` joins the results. What follows, solvers and stopping decisions among it, is computed from these on
every process alike. So nothing else has to know that there are several.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from laplace_sampling.data.fit_group import FitGroup

__all__ = ["ALONE", "DATA", "ENDED", "SAMPLES", "SHARED_SAMPLES", "ProcessError", "Processes", "words"]

Result = TypeVar("Result")

# What a process says of another that does not answer.
ENDED = "it has ended, or cannot be reached"
# Names of the two axes of a mesh, and of the second one where samples stay in the processes that draw them.
DATA, SAMPLES, SHARED_SAMPLES = "data", "samples", "shared_samples"


class ProcessError(RuntimeError):
    """Another process of a fit has failed, or has ended.

    Attributes:
        cause: the words of its error.
    """

    def __init__(self, cause: str, who: str = "Another process that shares the fit") -> None:
        advice = ". Start all processes again; a fit with `checkpoint=` goes on." if ENDED in cause else ""
        super().__init__(f"{who} has failed: {cause}{advice}")
        self.cause = cause


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes of a fit, by two axes.

    Attributes:
        data: the group whose processes share out the data; `None` if this process has all of them.
        samples: the group whose processes share out the samples, each of which is in another group of `data`; `None` if
            this process draws all of them.
        samples_stay: whether each process keeps those that it draws, and no others.
    """

    data: "FitGroup | None" = None
    samples: "FitGroup | None" = None
    samples_stay: bool = False
    # Numbers of processes and of this one, which do not change: asking for them takes longer than a small sum.
    _places: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, or in a file, nobody shares anything."""
        if self.samples_stay and self.num_samplers > 1:
            raise TypeError(
                "A posterior whose samples are in several processes cannot be pickled, as each has a part of it: use "
                "`save(path)` or `state_dict()`, which all of them call together."
            )
        return Processes, ()

    @property
    def of_samples(self) -> "Processes":
        """Those that share out the samples, of the same data."""
        return Processes(None, self.samples, self.samples_stay)

    def _place(self, axis: str) -> tuple[int, int]:
        """The number of this process on an axis, and how many there are."""
        if axis not in self._places:
            group = getattr(self, axis)
            self._places[axis] = (0, 1) if group is None else group.place
        return self._places[axis]

    @property
    def share_data(self) -> bool:
        """Whether others have a part of the data."""
        return self._place(DATA)[1] > 1

    @property
    def num_samplers(self) -> int:
        """How many groups draw their own samples."""
        return self._place(SAMPLES)[1]

    @property
    def sampler(self) -> int:
        """The number of the group that this process draws samples in."""
        return self._place(SAMPLES)[0]

    @property
    def is_first_of_data(self) -> bool:
        """Whether this is the first of those that share out the data, which have the same samples."""
        return self.place_of_data == 0

    @property
    def are_several(self) -> bool:
        """Whether there are others at all."""
        return self.share_data or self.num_samplers > 1

    @property
    def place_of_data(self) -> int:
        """The number of this process among those that share out the data."""
        return self._place(DATA)[0]

    @property
    def shape_of_mesh(self) -> tuple[int, int] | None:
        """How many processes each axis has; `None` where no samples are shared out."""
        return None if self.num_samplers == 1 else (self._place(DATA)[1], self._place(SAMPLES)[1])

    def part(self, num: int) -> range:
        """Which of so many data are those of this process: neighbours, as many as others have, up to one."""
        return _part(num, *self._place(DATA))

    def in_step(self, own: Tensor, num: int, most: int) -> list[Tensor]:
        """The part of this process of so many data in pieces of at most so many, as many pieces as others have.

        Raises:
            ValueError: for fewer data than pieces.
        """
        num_processes = self._place(DATA)[1]
        pieces = -(-num // (num_processes * most))
        if num // num_processes < pieces:
            raise ValueError(
                f"A model of `fully_shard` runs in all of the {num_processes} processes at once, each with data of its "
                f"own, but {num} data in batches of {most} are too few for that. Leave out `process_group=`, or give "
                "larger batches."
            )
        return list(own.tensor_split(pieces))

    def samples_of(self, num: int) -> range:
        """Which of so many samples this process draws: neighbours; all of them if there are fewer than groups."""
        return _part(num, *self._place(SAMPLES)) if self.shares_samples(num) else range(num)

    def shares_samples(self, num: int) -> bool:
        """Whether others draw some of so many samples."""
        return 1 < self.num_samplers <= num

    def most_groups(self, num: int, most: int) -> int:
        """In how many groups of at most so many samples the process that has most of so many draws them."""
        return -(-(-(-num // self.num_samplers) if self.shares_samples(num) else num) // most)

    # Sums over data ---------------------------------------------------------------------------------------------------

    def sum(self, *totals: Tensor) -> None:
        """In place of what each process has of a sum over data the sum itself."""
        if self.data is not None and self.share_data:
            for total in totals:
                self.data.reduced(total, "SUM")

    def least(self, value: float) -> float:
        """The least of a number that each process has."""
        for axis in (DATA, SAMPLES):
            if self._place(axis)[1] > 1:
                value = float(getattr(self, axis).reduced(torch.tensor(value, dtype=torch.float64), "MIN"))
        return value

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, each process works on its own data."""
        if self.data is None or self.data.apart:
            yield
            return
        self.data.apart = True
        try:
            yield
        finally:
            self.data.apart = False

    @property
    def are_apart(self) -> bool:
        return self.data is not None and self.data.apart

    @contextmanager
    def counting(self, counts: MutableMapping[str, int]) -> Iterator[None]:
        """Inside, counts go up by what all processes do to the data that they share out."""
        with self._counting(counts, self.data if self.share_data else None):
            yield

    @contextmanager
    def counting_samples(self, counts: MutableMapping[str, int], num: int) -> Iterator[None]:
        """Likewise by what all do for so many samples."""
        with self._counting(counts, self.samples if self.shares_samples(num) else None):
            yield

    @contextmanager
    def _counting(self, counts: MutableMapping[str, int], group: Any) -> Iterator[None]:
        before = dict(counts)
        yield
        if group is not None and counts:
            made = torch.tensor([counts[name] - before[name] for name in before], dtype=torch.int64)
            for name, number in zip(before, group.reduced(made, "SUM").tolist(), strict=True):
                counts[name] = before[name] + number

    # What each process has --------------------------------------------------------------------------------------------

    def gathered(self, compute: Callable[[], Result]) -> list[Result]:
        """What a function gives on each process of the data axis, in their order.

        Raises:
            Exception: that of the function on this process, and on all others a `ProcessError` with its words.
        """
        return [compute()] if not self.share_data else self._gathered(compute, self.data)

    def gathered_samples(self, compute: Callable[[], Result]) -> list[Result]:
        """Likewise on each process of the axis of samples."""
        return [compute()] if self.num_samplers == 1 else self._gathered(compute, self.samples)

    def gathered_from_all(self, compute: Callable[[], Result]) -> list[Result]:
        """Likewise on each process of both axes."""
        return [result for part in self.gathered_samples(lambda: self.gathered(compute)) for result in part]

    def differing(self, here: Mapping[str, Any]) -> list[str]:
        """The names whose values are not the same in all processes."""
        everywhere = self.gathered_from_all(lambda: here)
        names = dict.fromkeys(name for there in everywhere for name in there)
        return [name for name in names if any(there.get(name) != here.get(name) for there in everywhere)]

    def check_call(self, call: str, given: Mapping[str, Any]) -> None:
        """Raise on all processes if they call something with other arguments.

        Raises:
            ValueError: if they do.
        """
        if other := self.differing(given):
            raise ValueError(
                f"`{call}`: the processes that share out the samples call it together, but differ in "
                f"{' and '.join(other)}. Give each the same, in the same order."
            )

    def of_first(self, compute: Callable[[], Result]) -> Result:
        """What a function gives on the first process of the data axis; errors as of `gathered`."""
        if self.data is None or not self.share_data:
            return compute()
        if self._place(DATA)[0] > 0:
            result, cause = self.data.sent(None)
            if cause is not None:
                raise ProcessError(cause, "Process 0 of those that share a fit")
            return result
        try:
            result = compute()
        except Exception as error:
            self.data.sent((None, words(error)))
            raise
        self.data.sent((result, None))
        return result

    def of_very_first(self, compute: Callable[[], Result]) -> Result:
        """What a function gives on the first process of both axes; errors as of `gathered`."""
        is_first = self._place(DATA)[0] == self._place(SAMPLES)[0] == 0
        return cast(Result, self.gathered_from_all(lambda: compute() if is_first else None)[0])

    def _gathered(self, compute: Callable[[], Result], group: Any) -> list[Result]:
        error, mine = None, None
        try:
            mine = compute()
        except Exception as caught:
            error = caught
        parts = group.exchanged((mine, None if error is None else words(error)))
        if error is not None:
            raise error
        for number, (_, cause) in enumerate(parts):
            if cause is not None:
                raise ProcessError(cause, f"Process {number} of {len(parts)} that share a fit")
        return [result for result, _ in parts]

    def rows_of_all(self, rows: Tensor, num: int, part: range) -> Tensor:
        """The rows of all data, so many, from those of a part of them in each process."""
        return _placed(rows, slice(part.start, part.stop), num, self.data) if self.share_data else rows

    def picked(self, rows: Tensor, part: range, batch: Tensor) -> Tensor:
        """The rows of any data on all processes, each of which has those of its part."""
        inside = (batch >= part.start) & (batch < part.stop)
        return self.placed(rows[batch[inside] - part.start], inside)

    def placed(self, rows: Tensor, inside: Tensor) -> Tensor:
        """Rows of which each process has those at some places, where no other has any."""
        return _placed(rows, inside.to(rows.device), len(inside), self.data)

    def picked_by_each(self, rows: Tensor, part: range, batch: Tensor) -> Tensor:
        """Likewise where each process asks for other data, at the same time."""
        asked, mine = self.asked(batch)
        return self.picked(rows, part, asked)[mine]

    def asked(self, batch: Tensor) -> tuple[Tensor, slice]:
        """The data that all processes ask for, and where in them those are that this one does."""
        assert self.data is not None
        by_process = self.data.exchanged(batch)
        start = sum(len(other) for other in by_process[: self.place_of_data])
        return torch.cat(by_process), slice(start, start + len(batch))

    def samples_of_all(self, rows: Tensor, num: int) -> Tensor:
        """The rows of all samples, so many, from those of `samples_of` them."""
        part = self.samples_of(num)
        return _placed(rows, slice(part.start, part.stop), num, self.samples) if self.shares_samples(num) else rows

    def sum_of_samples(self, total: Tensor) -> None:
        """In place of what each process has of a sum over samples the sum itself."""
        if self.samples is not None and self.num_samplers > 1:
            self.samples.reduced(total, "SUM")

    # Failures ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error inside is told to the other processes, which end with its words where they wait for this one.

        All of them have come to the end when one of them leaves it. Inside another such call that one does both.
        """
        shared = [group for group in (self.data, self.samples) if group is not None and not group.telling]
        if not shared:
            yield
            return
        for group in shared:
            group.begin()
        try:
            for group in shared:
                group.telling = True
            yield
            self.least(0.0)
        except BaseException as error:
            for group in shared:
                group.fail(error)
            raise
        finally:
            for group in shared:
                group.telling = False


def _placed(rows: Tensor, places: Tensor | slice, num: int, group: Any) -> Tensor:
    """Rows at so many places, of which each process has some, where no other has any."""
    # Sums of rows and zeros, by bytes where gloo has no sums, as of short integers and truth values.
    as_they_are = rows.dtype in (torch.float32, torch.float64)
    flat = rows.reshape(len(rows), rows.shape[1:].numel())
    sent = flat if as_they_are else flat.contiguous().view(torch.uint8)
    total = torch.zeros(num, sent.shape[1], dtype=sent.dtype, device=sent.device)
    total[places] = sent
    return group.reduced(total, "SUM").view(rows.dtype).reshape(num, *rows.shape[1:])


ALONE = Processes()


def words(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"


def _part(num: int, place: int, num_processes: int) -> range:
    return range(num * place // num_processes, num * (place + 1) // num_processes)
