"""The tables of docs/scaling.md: timings from records, and plans from the cost model."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from benchmarks.comparison.report import table
from benchmarks.scaling.fitted import comparison
from benchmarks.scaling.hardware import A100, H100, H100_ONE_CARD, TPU_V3_FLOPS, Figure, Hardware
from benchmarks.scaling.ladder import Ladder, ladder
from benchmarks.scaling.model import (
    Mesh,
    Work,
    best_mesh,
    efficiency,
    memory,
    product_seconds,
    solve_seconds,
    vectors_that_fit,
)
from benchmarks.scaling.networks import CASES
from benchmarks.scaling.plans import (
    IMAGENET,
    KRYLOV_STACKS,
    LANGUAGE_MODEL,
    PUBLISHED_HOURS,
    SAMPLES,
    STOCHASTIC_STACKS,
    TEST_IMAGES,
    TEST_SEQUENCES,
    Stage,
    default_fit,
    fastest_mesh,
    implied_utilisation,
    krylov_fit,
    published_step,
    rows_in_memory,
    stochastic_fit,
)

__all__ = ["TABLES", "with_tables"]

Records = Sequence[Mapping[str, Any]]
ASKED_ERROR, ASKED_DATA, ASKED_SAMPLES = 0.15, 0.85, 0.95
# Ranks of the tables, and data of a step of plain mini-batches, `SGD().batch_size`.
RANKS, STEP = (1, 2, 4, 8, 16, 32, 64), 100
# Of the plans: one GPU, all in one dimension, and what `best_mesh` finds.
_SMALL, _LARGE = 8, 64
_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str, records: Records) -> str:
    """The page with each block between `<!-- table: NAME -->` and `<!-- end -->` written anew.

    Raises:
        ValueError: for a block whose name is not in `TABLES`, or a table without a block.
    """
    names = [name for _, name, _ in _BLOCK.findall(page)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"The page has blocks for the tables {sorted(names)}, but the tables are {sorted(TABLES)}.")
    return _BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]](records)}\n\n{found[3]}", page)


def measured(records: Records) -> str:
    """The full runs of the records, one for each number of vectors, or a note that there is none."""
    full = {record["setup"]: record for record in records if record["setup"].startswith("full")}
    if not full:
        return "There is no record of a full run yet."
    return "\n\n".join(measured_in(record) for record in full.values())


def measured_in(record: Mapping[str, Any]) -> str:
    """A run."""
    found = [comparison(record["rows"], case.name) for case in CASES]
    vectors = {row["network"]: row["vectors"] for row in record["rows"]}
    rows = [
        [
            f.network,
            str(vectors[f.network]),
            f"{1e3 * f.arithmetic.per_datum:.3g}",
            f"{1e3 * f.arithmetic.per_batch:.3g}",
            f"{f.slowdown:.2f}",
            f"{f.predicted:.3g}",
            f"{f.measured:.3g}",
            f"{f.error:+.1%} ({_holds(abs(f.error) <= ASKED_ERROR)})",
            f"{f.data_parallel:.2f} ({_holds(f.data_parallel >= ASKED_DATA)})",
            f"{f.sample_parallel:.2f} ({_holds(f.sample_parallel >= ASKED_SAMPLES)})",
            f"{f.data_parallel * f.slowdown:.2f}, {f.sample_parallel * f.slowdown:.2f}",
            f"{f.gather:.2g}",
        ]
        for f in found
    ]
    head = [
        "network", "K", "a datum, ms", "a batch besides, ms", "slowdown", "predicted, s", "measured, s", "error",
        "efficiency, data", "samples", "both without the slowdown", "gather, s",
    ]  # fmt: skip
    ring, repeats = found[0].ring, [len(row["repetitions"]) for row in record["rows"] if row["network"]]
    about = (
        f"Sum over both processes: {1e6 * ring.latency:.0f} µs and {ring.bandwidth / 1e9:.2f} GB/s. "
        f"{min(repeats)} to {max(repeats)} repetitions, torch {record['versions'].get('torch', '?')}, "
        f"{record['cores']} cores, load before the run {record['load_before']:.2f}. "
        f"Asked for: an error of {ASKED_ERROR:.0%} at most, efficiencies of {ASKED_DATA} and {ASKED_SAMPLES} at least."
    )
    return f"{table(head, rows)}\n\n{about}"


def _holds(holds: bool) -> str:
    return "holds" if holds else "**does not hold**"


def hardware_table(records: Records) -> str:
    rows = [
        [hardware.name, name.replace("_", " "), _number(figure), figure.source]
        for hardware in (H100, A100)
        for name, figure in hardware.figures.items()
    ]
    rows.append([H100_ONE_CARD.name, "network", _number(H100_ONE_CARD.network), H100_ONE_CARD.network.source])
    rows.append(["TPU v3", "bf16", _number(TPU_V3_FLOPS), TPU_V3_FLOPS.source])
    return table(["hardware", "figure", "value", "source"], rows)


def _number(figure: Figure) -> str:
    return f"{figure.value:.3g} {figure.unit}"


def works_table(records: Records) -> str:
    """Figures of both networks that are not counted but taken from somewhere."""
    rows = [
        [work.name, field.name, _number(value), value.source]
        for work in (IMAGENET, LANGUAGE_MODEL)
        for field in fields(work)
        if isinstance(value := getattr(work, field.name), Figure)
    ]
    return table(["plan", "figure", "value", "source"], rows)


def efficiencies(work: Work, hardware: Hardware, stacks: int, step: int | None) -> str:
    """Of products with all data and, if there are any, of steps on few data."""
    sizes = [None] if step is None else [None, step]
    kinds = ["all data"] if step is None else ["all data", f"{step} data"]
    rows = []
    for ranks in RANKS:
        row = [str(ranks)]
        for size in sizes:
            for mesh in (Mesh(ranks, 1), Mesh(1, ranks)):
                row.append(f"{efficiency(work, hardware, SAMPLES, mesh, size):.2f}")
            best = best_mesh(work, hardware, SAMPLES, ranks, stacks, size)
            row.append("does not fit" if best is None else _best(work, hardware, stacks, size, best))
        rows.append(row)
    head = [f"{kind}: {how}" for kind in kinds for how in ("data", "samples", "best that fits")]
    return table(["GPUs", *head], rows)


def _best(work: Work, hardware: Hardware, stacks: int, step: int | None, mesh: Mesh) -> str:
    """The efficiency on a mesh, against all vectors together on one GPU whose memory is large enough."""
    alone = product_seconds(work, hardware, SAMPLES, num_data=step)
    found = alone / (mesh.ranks * solve_seconds(work, hardware, SAMPLES, mesh, stacks, step))
    own, together = math.ceil(SAMPLES / mesh.samples), vectors_that_fit(work, hardware, SAMPLES, mesh, stacks)
    groups = f", {math.ceil(own / together)} groups" if together < own else ""
    return f"{found:.2f} ({_mesh(mesh)}{groups})"


def _mesh(mesh: Mesh) -> str:
    return f"{mesh.data} × {mesh.samples}"


@cache
def ladder_of(work: Work) -> Ladder:
    return ladder(work, H100.memory.value / 2, num_samples=SAMPLES)


def ladder_table(records: Records) -> str:
    rows = [
        [work.name, rung.name, f"`{rung.method.name}`", f"{rung.epochs:.3g}", _bytes(rung.bytes), rung.reason]
        for work in (IMAGENET, LANGUAGE_MODEL)
        for rung in ladder_of(work).rungs
    ]
    return table(["plan", "posterior", "method", "epochs", "memory, GB", ""], rows)


def _bytes(value: float) -> str:
    return f"{value / 1e9:.3g}"


def stages(work: Work, fit: Sequence[Stage], stacks: int, vectors: int = SAMPLES) -> str:
    """Counts, GPU hours and hours of each stage, and what a rank sends.

    Args:
        work: the network and its data.
        fit: its stages.
        stacks: vectors that the solver holds for each sample.
        vectors: that are solved for.
    """
    found = (fastest_mesh(work, fit, H100, ranks, stacks, vectors) for ranks in (_SMALL, _LARGE))
    many = [mesh for mesh in found if mesh is not None]
    rows = []
    for stage in fit:
        wall = [stage.seconds(work, H100, mesh) / 3600 for mesh in many]
        rows.append(
            [
                stage.name,
                f"{stage.jvps / work.num_data:.3g}" if stage.jvps else "",
                f"{stage.vjps / work.num_data:.3g}" if stage.vjps else "",
                f"{stage.operations(work):.2g}",
                _hours(stage.seconds(work, H100, Mesh()) / 3600),
                _hours(stage.seconds(work, H100, Mesh(), "fp32") / 3600),
                *(_hours(hours) for hours in wall),
                _bytes(stage.sent(work, many[-1])),
            ]
        )
    sums = [sum(stage.jvps for stage in fit) / work.num_data, sum(stage.vjps for stage in fit) / work.num_data]
    hours = [
        sum(stage.seconds(work, H100, mesh, dtype) for stage in fit) / 3600
        for mesh, dtype in ((Mesh(), "bf16"), (Mesh(), "fp32"), *((mesh, "bf16") for mesh in many))
    ]
    total = f"{sum(stage.operations(work) for stage in fit):.2g}"
    sent = _bytes(sum(stage.sent(work, many[-1]) for stage in fit))
    rows.append(["**all**", *(f"{value:.3g}" for value in sums), total, *map(_hours, hours), sent])
    head = ["stage", "JVPs a datum", "VJPs a datum", "operations", "GPU hours, bf16", "fp32"]
    head += [f"hours on {mesh.ranks} GPUs ({_mesh(mesh)})" for mesh in many]
    return table([*head, f"sent by a rank of {_LARGE}, GB"], rows)


def _hours(hours: float) -> str:
    return "< 0.01" if hours < 0.01 else f"{hours:.2g}" if hours < 100 else f"{hours:.0f}"


def memories(work: Work, stacks: int, choices: Sequence[Mesh]) -> str:
    """Gigabytes on a rank for each mesh."""
    found = [memory(work, SAMPLES, mesh, stacks) for mesh in choices]
    rows = [[name, *(_bytes(parts[name]) for parts in found)] for name in found[0]]
    rows.append(["**all**", *(_bytes(sum(parts.values())) for parts in found)])
    together = []
    for mesh in choices:
        own, held = math.ceil(SAMPLES / mesh.samples), vectors_that_fit(work, H100, SAMPLES, mesh, stacks)
        together.append("does not fit" if held == 0 else f"{held} of {own}")
    rows.append(["samples solved for together in 80 GB", *together])
    return table(
        ["GB on a rank", *(f"{mesh.ranks} GPU{'s' if mesh.ranks > 1 else ''}: {_mesh(mesh)}" for mesh in choices)], rows
    )


def published_table(records: Records) -> str:
    """The published EM step, and the same operations on one H100."""
    step = published_step(IMAGENET)
    hours = [sum(stage.seconds(IMAGENET, H100, Mesh(), dtype) for stage in step) / 3600 for dtype in ("bf16", "fp32")]
    older = sum(stage.seconds(IMAGENET, A100, Mesh()) for stage in step) / 3600
    counted = sum(stage.operations(IMAGENET) for stage in step)
    rows = [
        [
            "published, TPU v3",
            f"{PUBLISHED_HOURS:g}",
            f"{implied_utilisation(IMAGENET):.1%} of one chip, if it was one",
        ],
        ["here, one H100, bf16", f"{hours[0]:.2g}", f"{counted / (hours[0] * 3600 * H100.bf16.value):.1%}"],
        ["here, one H100, float32", f"{hours[1]:.2g}", f"{counted / (hours[1] * 3600 * H100.fp32.value):.1%}"],
        ["here, one A100, bf16", f"{older:.2g}", f"{counted / (older * 3600 * A100.bf16.value):.1%}"],
    ]
    return table(["one EM step", "hours", f"part of the peak, for {counted:.2g} operations"], rows)


def _default(work: Work, num_test: int) -> list[Stage]:
    rows = min(4096, rows_in_memory(work, H100.memory.value / 2))
    return default_fit(work, ladder_of(work), rows, num_test)


TABLES: dict[str, Callable[[Records], str]] = {
    "measured": measured,
    "hardware": hardware_table,
    "works": works_table,
    "efficiency-imagenet": lambda _: efficiencies(IMAGENET, H100, STOCHASTIC_STACKS, STEP),
    "efficiency-one-card": lambda _: efficiencies(IMAGENET, H100_ONE_CARD, STOCHASTIC_STACKS, STEP),
    "efficiency-language-model": lambda _: efficiencies(LANGUAGE_MODEL, H100, KRYLOV_STACKS, None),
    "ladder": ladder_table,
    "imagenet-default": lambda _: stages(IMAGENET, _default(IMAGENET, TEST_IMAGES), STOCHASTIC_STACKS),
    "imagenet-solves": lambda _: stages(
        IMAGENET, stochastic_fit(IMAGENET, ladder_of(IMAGENET), TEST_IMAGES), STOCHASTIC_STACKS
    ),
    "imagenet-published-step": lambda _: stages(IMAGENET, published_step(IMAGENET), STOCHASTIC_STACKS, 6),
    "imagenet-memory": lambda _: memories(
        IMAGENET, STOCHASTIC_STACKS, [Mesh(), Mesh(8, 1), Mesh(1, 8), Mesh(64, 1), Mesh(8, 8), Mesh(1, 64)]
    ),
    "published": published_table,
    "language-model-default": lambda _: stages(LANGUAGE_MODEL, _default(LANGUAGE_MODEL, TEST_SEQUENCES), KRYLOV_STACKS),
    "language-model-solves": lambda _: stages(
        LANGUAGE_MODEL, krylov_fit(LANGUAGE_MODEL, ladder_of(LANGUAGE_MODEL), TEST_SEQUENCES), KRYLOV_STACKS
    ),
    "language-model-memory": lambda _: memories(
        LANGUAGE_MODEL, KRYLOV_STACKS, [Mesh(8, 1), Mesh(1, 8), Mesh(64, 1), Mesh(32, 2), Mesh(16, 4), Mesh(8, 8)]
    ),
}
