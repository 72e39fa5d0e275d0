"""Timings on the ranks of a process group, each repetition of all of them after the other.

What one rank does alone, while the others wait, is measured on every rank in turn.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.scaling.networks import Case
from laplace_sampling.likelihoods.as_likelihood import as_likelihood
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.network_features import features_at
from laplace_sampling.networks.linearisation import Linearisation

__all__ = ["ALL_REDUCE", "Timing", "timings"]

# Numbers of a vector whose sum over all ranks is timed: 1 KB to 134 MB.
ALL_REDUCE = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**25)
# Repetitions that are always made, and those that are made if there is time.
_LEAST, _MOST = 3, 15


@dataclass(frozen=True)
class Timing:
    """One of the things that are timed.

    Attributes:
        part: what it is.
        network: on which network, if on any.
        ranks: how many work at the same time.
        data: of all these ranks.
        vectors: of all these ranks.
        bytes: that each rank puts into the communication.
        seconds: of this rank in each repetition; `None` where it waited.
    """

    part: str
    network: str
    ranks: int
    data: int
    vectors: int
    bytes: int
    seconds: list[float | None] = field(default_factory=list, compare=False)


Contenders = dict[Timing, Callable[[], object]]


def timings(cases: Sequence[Case], sizes: Sequence[int], seconds: float, quick: bool) -> list[Timing]:
    """All timings, on every rank of the group.

    Args:
        cases: networks.
        sizes: numbers of the vectors that are summed over ranks.
        seconds: that all repetitions together may take, if three of each need no more.
        quick: whether networks are narrow, and everything runs once after a first time.
    """
    found = []
    # The sums over ranks take seconds; the networks share the rest.
    shares = [0.05 * seconds] + [0.95 * seconds / max(1, len(cases))] * len(cases)
    for make, share in zip(
        [lambda: sums(sizes), *(lambda c=c: products(c, quick) for c in cases)], shares, strict=True
    ):
        contenders = make()
        repeat(contenders, share, 1 if quick else _LEAST, 1 if quick else _MOST)
        found += contenders
    return found


def repeat(contenders: Contenders, seconds: float, least: int, most: int) -> None:
    """Runs all contenders after each other, as often as there is time, and once before to warm up."""
    started = 0.0
    for repetition in range(-1, most):
        if repetition == 0:
            started = time.perf_counter()
        if repetition >= least and not _agreed(time.perf_counter() - started < seconds * repetition / (repetition + 1)):
            return
        for timing, run in contenders.items():
            waits = timing.ranks == 1 and repetition % dist.get_world_size() != dist.get_rank()
            dist.barrier()
            before = time.perf_counter()
            if not waits or repetition < 0:
                run()
            spent = time.perf_counter() - before
            if repetition >= 0:
                timing.seconds.append(None if waits else spent)


def _agreed(here: bool) -> bool:
    """What the first rank says: clocks of ranks may differ."""
    said = torch.tensor([float(here)])
    dist.broadcast(said, 0)
    return bool(said)


def sums(sizes: Sequence[int]) -> Contenders:
    ranks = dist.get_world_size()
    vectors = [torch.zeros(size) for size in sizes]
    return {Timing("all_reduce", "", ranks, 0, 0, 4 * len(x)): lambda x=x: dist.all_reduce(x) for x in vectors}


def products(case: Case, quick: bool) -> Contenders:
    """GGN products of a network, whole ones and parts of them."""
    network, ranks = Linearisation(case.network(quick).eval()), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    K, num = case.vectors, case.held_out * ranks
    v = torch.randn(K, network.num_parameters, generator=generator)

    @cache
    def ggn(num_data: int) -> GGN:
        x = torch.randn(num_data, *case.shape, generator=generator)
        outputs = network(x)
        return GGN(features_at(network, x, case.batch), as_likelihood("classification"), outputs)

    def summed(num_data: int) -> Tensor:
        product = ggn(num_data).matmul(v)
        dist.all_reduce(product)
        return product

    part = v[: K // ranks].contiguous()
    gathered = [torch.empty_like(part) for _ in range(ranks)]
    size, name = 4 * v.numel(), case.name
    return {
        **{Timing("alone", name, 1, n, K, 0): lambda n=n: ggn(n).matmul(v) for n in case.alone},
        Timing("together", name, ranks, ranks * case.batch, K, 0): lambda: ggn(case.batch).matmul(v),
        Timing("whole", name, 1, num, K, 0): lambda: ggn(num).matmul(v),
        Timing("data_parallel", name, ranks, num, K, size): lambda: summed(case.held_out),
        Timing("sample_parallel", name, ranks, num, K, 0): lambda: ggn(num).matmul(part),
        Timing("gather", name, ranks, 0, K, 4 * part.numel()): lambda: dist.all_gather(gathered, part),
    }
