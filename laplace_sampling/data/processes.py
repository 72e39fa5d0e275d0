"""`Processes`: those that share a fit, each of which sums over its own part of the data or draws its own samples.

All of them run the same code on the same numbers, and meet where something is summed over data
(`linear_model.features.Features.sum_over`) or computed for each datum (`by_datum`): there each takes its part, and
`torch.distributed` joins the results. What follows, solvers and stopping decisions among it, is computed from these on
every process alike. So nothing else has to know that there are several.
"""

import pickle
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from laplace_sampling.data.fit_group import FitGroup, ProcessError, device_of, words

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ALONE", "ProcessError", "Processes"]

Result = TypeVar("Result")

_NOT_INSIDE = "This process is not in the group of `process_group=` or `mesh=`: only those that are share a fit."
# Names of the two axes of a mesh.
_DATA, _SAMPLES = "data", "samples"


@dataclass(frozen=True, eq=False)
class Processes:
    """The processes of a fit, by two axes.

    Attributes:
        data: the group whose processes share out the data; `None` if this process has all of them.
        samples: the group whose processes share out the samples, each of which is in another group of `data`; `None` if
            this process draws all of them.
    """

    data: "ProcessGroup | None" = None
    samples: "ProcessGroup | None" = None
    # Numbers of processes and of this one, which do not change: asking for them takes longer than a small sum.
    _places: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, process_group: "ProcessGroup | None" = None, mesh: "DeviceMesh | None" = None) -> "Processes":
        """The processes of a group, which share out the data, or of a mesh.

        Args:
            process_group: all of its processes share out the data.
            mesh: with the axes `"data"`, `"samples"` or both; a mesh of one axis without a name is one of data.

        Raises:
            TypeError, ValueError: for something else, for both, or where this process is in none of them.
        """
        if process_group is None and mesh is None:
            return ALONE
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "`process_group=` and `mesh=` need the processes of `torch.distributed`: start the script by "
                "`torchrun`, and call `torch.distributed.init_process_group()` first."
            )
        if process_group is not None and mesh is not None:
            raise ValueError("`process_group=` and `mesh=` say the same in two ways: give one of them.")
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(_NOT_INSIDE)
        if mesh is None:
            if not isinstance(process_group, dist.ProcessGroup):
                raise TypeError(
                    f"`process_group` must be a group of `torch.distributed`, such as `torch.distributed.group.WORLD`, "
                    f"but is {process_group!r:.80}."
                )
            return cls._checked(process_group, None)
        if not isinstance(mesh, dist.device_mesh.DeviceMesh):
            raise TypeError(f"`mesh` must be a DeviceMesh of `torch.distributed`, but is {mesh!r:.80}.")
        names = mesh.mesh_dim_names or (_DATA,) * (mesh.ndim == 1)
        if not names or not set(names) <= {_DATA, _SAMPLES}:
            raise ValueError(
                f"The axes of `mesh` must be named {_DATA!r}, {_SAMPLES!r} or both, but are {mesh.mesh_dim_names}: "
                f'make it by `init_device_mesh(device, (2, 4), mesh_dim_names=("{_DATA}", "{_SAMPLES}"))`, or take a '
                'part of yours, as `mesh["data"]`.'
            )
        if mesh.get_coordinate() is None:
            raise ValueError(_NOT_INSIDE)
        groups = {name: mesh.get_group(number) for number, name in enumerate(names)}
        return cls._checked(groups.get(_DATA), groups.get(_SAMPLES))

    @classmethod
    def _checked(cls, data: "ProcessGroup | None", samples: "ProcessGroup | None") -> "Processes":
        import torch.distributed as dist

        for group in (data, samples):
            if group is not None and dist.get_rank(group) < 0:
                raise ValueError(_NOT_INSIDE)
        return cls(data, samples)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, or in a file, nobody shares anything."""
        return Processes, ()

    def _place(self, axis: str) -> tuple[int, int]:
        """The number of this process on an axis, and how many there are."""
        if axis not in self._places:
            group = getattr(self, axis)
            if group is None:
                self._places[axis] = 0, 1
            else:
                import torch.distributed as dist

                self._places[axis] = dist.get_rank(group), dist.get_world_size(group)
        return self._places[axis]

    @property
    def share_data(self) -> bool:
        """Whether others have a part of the data."""
        return self._place(_DATA)[1] > 1

    @property
    def num_samplers(self) -> int:
        """How many groups draw their own samples."""
        return self._place(_SAMPLES)[1]

    @property
    def sampler(self) -> int:
        """The number of the group that this process draws samples in."""
        return self._place(_SAMPLES)[0]

    @property
    def are_several(self) -> bool:
        """Whether there are others at all."""
        return self.share_data or self.num_samplers > 1

    @property
    def shape_of_mesh(self) -> tuple[int, int] | None:
        """How many processes each axis has; `None` where no samples are shared out."""
        return None if self.num_samplers == 1 else (self._place(_DATA)[1], self._place(_SAMPLES)[1])

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes what all of them have."""
        return self._place(_DATA)[0] == 0 and self._place(_SAMPLES)[0] == 0

    def part(self, num: int) -> range:
        """Which of so many data are those of this process: neighbours, as many as others have, up to one."""
        return _part(num, *self._place(_DATA))

    def in_step(self, own: Tensor, num: int, most: int) -> list[Tensor]:
        """The part of this process of so many data in pieces of at most so many, as many pieces as others have.

        Raises:
            ValueError: for fewer data than pieces.
        """
        num_processes = self._place(_DATA)[1]
        pieces = -(-num // (num_processes * most))
        if num // num_processes < pieces:
            raise ValueError(
                f"A model of `fully_shard` runs in all of the {num_processes} processes at once, each with data of its "
                f"own, but {num} data in batches of {most} are too few for that. Leave out `process_group=`, or give "
                "larger batches."
            )
        return list(own.tensor_split(pieces))

    def samples_of(self, num: int) -> range:
        """Which of so many samples this process draws."""
        return _part(num, *self._place(_SAMPLES))

    # Sums over data ---------------------------------------------------------------------------------------------------

    def sum(self, *totals: Tensor) -> None:
        """In place of what each process has of a sum over data the sum itself."""
        if self.share_data:
            for total in totals:
                self._reduced(total, "SUM", self.data)

    def least(self, value: float) -> float:
        """The least of a number that each process has."""
        for axis in (_DATA, _SAMPLES):
            if self._place(axis)[1] > 1:
                value = float(self._reduced(torch.tensor(value, dtype=torch.float64), "MIN", getattr(self, axis)))
        return value

    @contextmanager
    def counting(self, counts: MutableMapping[str, int]) -> Iterator[None]:
        """Inside, counts go up by what all processes do to the data that they share out."""
        with self._counting(counts, self.data if self.share_data else None):
            yield

    @contextmanager
    def counting_samples(self, counts: MutableMapping[str, int]) -> Iterator[None]:
        """Likewise of the samples."""
        with self._counting(counts, self.samples if self.num_samplers > 1 else None):
            yield

    @contextmanager
    def _counting(self, counts: MutableMapping[str, int], group: Any) -> Iterator[None]:
        before = dict(counts)
        yield
        if group is not None and counts:
            made = torch.tensor([counts[name] - before[name] for name in before], dtype=torch.int64)
            for name, number in zip(before, self._reduced(made, "SUM", group).tolist(), strict=True):
                counts[name] = before[name] + number

    def _reduced(self, tensor: Tensor, operation: str, group: Any) -> Tensor:
        import torch.distributed as dist

        device = tensor.device if tensor.device.type != "cpu" else device_of(group)
        there = tensor.to(device).contiguous()
        shared = FitGroup.of(group)
        shared.wait(dist.all_reduce(there, getattr(dist.ReduceOp, operation), group=shared.own, async_op=True))
        if there is tensor:
            return tensor
        return tensor.copy_(there)

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

    def of_first(self, compute: Callable[[], Result]) -> Result:
        """What a function gives on the first process of the data axis; errors as of `gathered`."""
        if not self.share_data:
            return compute()
        if self._place(_DATA)[0] > 0:
            result, cause = self._sent(None, self.data)
            if cause is not None:
                raise ProcessError(cause, "Process 0 of those that share a fit")
            return result
        try:
            result = compute()
        except Exception as error:
            self._sent((None, words(error)), self.data)
            raise
        self._sent((result, None), self.data)
        return result

    def _gathered(self, compute: Callable[[], Result], group: Any) -> list[Result]:
        error, mine = None, None
        try:
            mine = compute()
        except Exception as caught:
            error = caught
        parts = self._exchanged((mine, None if error is None else words(error)), group)
        if error is not None:
            raise error
        for number, (_, cause) in enumerate(parts):
            if cause is not None:
                raise ProcessError(cause, f"Process {number} of {len(parts)} that share a fit")
        return [result for result, _ in parts]

    def _exchanged(self, mine: Any, group: Any) -> list[Any]:
        """What each process gives, by pickle. Torch's own function waits without a look at failures."""
        import torch.distributed as dist

        shared, sent = FitGroup.of(group), _pickled(mine).to(device_of(group))
        sizes = [torch.zeros(1, dtype=torch.int64, device=sent.device) for _ in range(dist.get_world_size(group))]
        size = torch.tensor([len(sent)], device=sent.device)
        shared.wait(dist.all_gather(sizes, size, group=shared.own, async_op=True))
        longest = max(int(size) for size in sizes)
        padded = torch.nn.functional.pad(sent, (0, longest - len(sent)))
        there = [torch.empty_like(padded) for _ in sizes]
        shared.wait(dist.all_gather(there, padded, group=shared.own, async_op=True))
        return [_unpickled(one[: int(size)]) for one, size in zip(there, sizes, strict=True)]

    def _sent(self, value: Any, group: Any) -> Any:
        """What the first process of a group gives, likewise."""
        import torch.distributed as dist

        first = dist.get_global_rank(group, 0)
        shared, sent = FitGroup.of(group), _pickled(value).to(device_of(group))
        size = torch.tensor([len(sent)], device=sent.device)
        shared.wait(dist.broadcast(size, first, group=shared.own, async_op=True))
        if dist.get_rank(group) > 0:
            sent = torch.empty(int(size), dtype=torch.uint8, device=sent.device)
        shared.wait(dist.broadcast(sent, first, group=shared.own, async_op=True))
        return value if dist.get_rank(group) == 0 else _unpickled(sent)

    def rows_of_all(self, rows: Tensor, num: int) -> Tensor:
        """The rows of all data, so many, from those of `part` of them."""
        return self._filled(rows, num, self.part(num), self.data) if self.share_data else rows

    def samples_of_all(self, rows: Tensor, num: int) -> Tensor:
        """The rows of all samples, from those of `samples_of` them."""
        return rows if self.num_samplers == 1 else self._filled(rows, num, self.samples_of(num), self.samples)

    def _filled(self, rows: Tensor, num: int, part: range, group: Any) -> Tensor:
        # Sums of rows and zeros: bits stay, also those of truth values.
        dtype = torch.uint8 if rows.dtype == torch.bool else rows.dtype
        total = torch.zeros(num, *rows.shape[1:], dtype=dtype, device=rows.device)
        total[part.start : part.stop] = rows
        return self._reduced(total, "SUM", group).to(rows.dtype)

    # Failures ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error inside is told to the other processes, which end with its words where they wait for this one.

        All of them have come to the end when one of them leaves it.
        """
        shared = [FitGroup.of(group) for group in (self.data, self.samples) if group is not None]
        for group in shared:
            group.begin()
        try:
            yield
            self.least(0.0)
        except BaseException as error:
            for group in shared:
                group.fail(error)
            raise


ALONE = Processes()


def _part(num: int, place: int, num_processes: int) -> range:
    return range(num * place // num_processes, num * (place + 1) // num_processes)


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(numbers: Tensor) -> Any:
    return pickle.loads(numbers.cpu().numpy().tobytes())
