"""Figures of accelerators and networks, each with where it is from."""

from dataclasses import dataclass, fields, replace

__all__ = ["A100", "H100", "H100_ONE_CARD", "TPU_V3_FLOPS", "Figure", "Hardware"]


@dataclass(frozen=True)
class Figure:
    """A number, its unit and its source; `assumption` where no source was found."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes.

    Attributes:
        name: of the accelerator.
        gpus: of a node.
        bf16: peak operations a second of dense matrix products.
        fp32: likewise, without TF32.
        memory: bytes of one GPU.
        memory_bandwidth: of one GPU.
        link: bytes a second that each GPU sends in a ring inside a node.
        network: bytes a second that a node sends in a ring over nodes, by all its cards.
        base_latency: seconds of a sum over ranks, whatever their number.
        link_latency: of each step of a ring inside a node.
        network_latency: of each step between nodes.
    """

    name: str
    gpus: int
    bf16: Figure
    fp32: Figure
    memory: Figure
    memory_bandwidth: Figure
    link: Figure
    network: Figure
    base_latency: Figure
    link_latency: Figure
    network_latency: Figure

    @property
    def figures(self) -> dict[str, Figure]:
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), Figure)}


_NCCL = (
    "[NCCL's own model](https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/"
    "tuning.cc) in an older version, protocol Simple"
)
# Of NCCL's ring in its protocol for large vectors.
_BASE = Figure(8.4e-6, "s", f"{_NCCL}, base latency of a ring")
_LINK = Figure(3.4e-6, "s", f"{_NCCL}, a step over NVLink")
_STEP = Figure(9.6e-6, "s", f"{_NCCL}, a step over a network")

_H100_DATA = "[Klockwood](https://glennklockwood.com/garden/processors/h100), from NVIDIA's documents"
_PER_CARD = "[NVIDIA](https://github.com/NVIDIA/nccl-tests/issues/290): 46 to 48 GB/s for each card of 400 Gb/s"

H100 = Hardware(
    "H100 SXM, 80 GB",
    8,
    bf16=Figure(989.4e12, "operations/s", f"{_H100_DATA}, without sparsity"),
    fp32=Figure(66.9e12, "operations/s", _H100_DATA),
    memory=Figure(80e9, "B", _H100_DATA),
    memory_bandwidth=Figure(3.35e12, "B/s", _H100_DATA),
    link=Figure(
        370e9,
        "B/s",
        "[NVIDIA](https://github.com/NVIDIA/nccl-tests/issues/212): 450 GB/s of the line, 370 by a ring",
    ),
    network=Figure(
        8 * 46e9,
        "B/s",
        f"{_PER_CARD}; eight of them in a [DGX H100](https://www.easymanua.ls/nvidia/dgx-h100/manual?p=19)",
    ),
    base_latency=_BASE,
    link_latency=_LINK,
    network_latency=_STEP,
)

# A node whose GPUs share one card, as in many clusters that were not built for training.
H100_ONE_CARD = replace(
    H100,
    name=f"{H100.name}, one network card a node",
    network=Figure(46e9, "B/s", f"{_PER_CARD}; one card: assumption"),
)

_A100_DATA = "[Calculon](https://github.com/calculon-ai/calculon/blob/main/systems/a100_80g.json)"
A100 = Hardware(
    "A100 SXM, 80 GB",
    8,
    bf16=Figure(312e12, "operations/s", _A100_DATA),
    fp32=Figure(19.5e12, "operations/s", "[oumi](https://oumi.ai/docs/en/latest/_modules/oumi/performance/mfu.html)"),
    memory=Figure(80e9, "B", _A100_DATA),
    memory_bandwidth=Figure(2.0e12, "B/s", _A100_DATA),
    link=Figure(235e9, "B/s", f"{_NCCL}, which takes no more on this GPU"),
    network=Figure(
        8 * 24e9,
        "B/s",
        "[measured](https://github.com/NVIDIA/nccl-tests/issues/119): 96 GB/s with four cards of 200 Gb/s; "
        "eight cards: assumption",
    ),
    base_latency=_BASE,
    link_latency=_LINK,
    network_latency=_STEP,
)

TPU_V3_FLOPS = Figure(123e12, "operations/s of a chip", "[Google](https://cloud.google.com/tpu/docs/v3), bf16")
