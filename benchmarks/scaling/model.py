"""What products of a network take on many GPUs: operations, seconds, memory and traffic, by formulas.

A network is known by a few numbers (`Work`), a cluster by others (`Hardware`), and how the ranks share the work by a
`Mesh`: `data` ranks have a part of the data each, and each of `samples` groups of such ranks has a part of the vectors.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.scaling.hardware import Figure, Hardware

__all__ = [
    "Mesh",
    "Work",
    "all_reduce_seconds",
    "best_mesh",
    "efficiency",
    "gather_seconds",
    "gathered_bytes",
    "ggn_operations",
    "jvp_operations",
    "memory",
    "meshes",
    "operations",
    "product_seconds",
    "ring_factor",
    "sent_bytes",
    "solve_seconds",
    "vectors_that_fit",
    "vjp_operations",
]

# Bytes of a number of the vectors of weights and outputs, which are in float32 whatever runs inside of products.
_FLOAT = 4
# Tensors as large as the largest one that a JVP holds for each vector: `linear_model.cost`.
_ALIVE = 4
# Reading `K` vectors for the JVP, and reading and writing the sum of all batches.
_TOUCHED = 3


@dataclass(frozen=True)
class Work:
    """A network and its data.

    Attributes:
        name: of both.
        num_data: `N`.
        outputs: `C`, numbers of the output of a datum.
        weights: `P`, random ones.
        forward: operations of a forward pass of a datum.
        frozen: whether weights are random in small added layers only, so that a tangent or a cotangent takes one pass
            through the network in place of two.
        batch: data that go through the network together on a rank.
        model_bytes: of all weights.
        activations: bytes that a forward pass of a datum keeps for the pullback.
        largest: bytes of the largest tensor of a datum.
        bf16: the part of the peak that it reaches with bfloat16 inside of products.
        fp32: likewise in float32.
        overhead: seconds of Python for a JVP or a pullback of vectors that go together; a GPU works meanwhile.
        together: vectors that go through the network together.
    """

    name: str
    num_data: int
    outputs: int
    weights: int
    forward: float
    frozen: bool
    batch: int
    model_bytes: float
    activations: float
    largest: float
    bf16: Figure
    fp32: Figure
    overhead: Figure
    together: int = 16

    @property
    def passes(self) -> int:
        """Passes through the network that a tangent or a cotangent takes, in units of `forward`."""
        return 1 if self.frozen else 2

    def speed(self, hardware: Hardware, dtype: str = "bf16") -> float:
        """Operations a second."""
        used: Figure = getattr(self, dtype)
        return used.value * hardware.figures[dtype].value


@dataclass(frozen=True)
class Mesh:
    """How many ranks share the data of a group, and how many groups share the vectors."""

    data: int = 1
    samples: int = 1

    @property
    def ranks(self) -> int:
        return self.data * self.samples


def ring_factor(ranks: int) -> float:
    """`2(r − 1)/r`: how often a rank sends a vector that a ring sums over all ranks."""
    return 2 * (ranks - 1) / ranks


def sent_bytes(num_bytes: float, ranks: int) -> float:
    """Bytes that each rank sends for one sum of such a vector."""
    return ring_factor(ranks) * num_bytes


def all_reduce_seconds(num_bytes: float, ranks: int, hardware: Hardware) -> float:
    """One sum over neighbouring ranks by a ring, nodes filled one after the other.

    `l₀ + (2(r − 1) − 2(m − 1)) l₁ + 2(m − 1) l₂ + 2(r − 1)/r · bytes/w` for `r` ranks on `m` nodes, `w` the bandwidth
    of the slowest link (NCCL, `src/graph/tuning.cc`).
    """
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / hardware.gpus)
    link = hardware.link.value if nodes == 1 else min(hardware.link.value, hardware.network.value)
    outside = 2 * (nodes - 1)
    inside = 2 * (ranks - 1) - outside
    latency = hardware.base_latency.value + inside * hardware.link_latency.value
    return latency + outside * hardware.network_latency.value + sent_bytes(num_bytes, ranks) / link


def jvp_operations(work: Work, num_data: float, vectors: int) -> float:
    """Vectors go through the network in groups, each of which repeats the forward pass."""
    return work.forward * num_data * (math.ceil(vectors / work.together) + work.passes * vectors)


def vjp_operations(work: Work, num_data: float, vectors: int) -> float:
    """One forward pass serves all cotangents."""
    return work.forward * num_data * (1 + work.passes * vectors)


def ggn_operations(work: Work, num_data: float, vectors: int) -> float:
    """A JVP and a VJP; for one vector, both share the forward pass."""
    shared = work.forward * num_data if vectors == 1 else 0.0
    return jvp_operations(work, num_data, vectors) + vjp_operations(work, num_data, vectors) - shared


def operations(work: Work, kind: str, num_data: float, vectors: int) -> float:
    """Of a product: a `"jvp"`, a `"vjp"`, both in one, `"ggn"`, or `"rows"`, a VJP of each datum."""
    count = {"jvp": jvp_operations, "vjp": vjp_operations, "rows": vjp_operations, "ggn": ggn_operations}[kind]
    return count(work, num_data, vectors)


def product_seconds(
    work: Work,
    hardware: Hardware,
    vectors: int,
    mesh: Mesh = Mesh(),
    num_data: int | None = None,
    dtype: str = "bf16",
    kind: str = "ggn",
) -> float:
    """One product of some vectors with all data, or with a mini-batch of them.

    Arithmetic, or the Python beside it if that takes longer; memory traffic of the vectors; and the sum over the ranks
    of a group, which JVPs and rows do not need.

    Args:
        work: the network and its data.
        hardware: what it runs on.
        vectors: `K`, of all ranks.
        mesh: how ranks share the work. Ranks of a group are neighbours.
        num_data: of a mini-batch; by default all.
        dtype: `"bf16"` or `"fp32"`, inside of products.
        kind: as of `operations`.
    """
    own_data = math.ceil((work.num_data if num_data is None else num_data) / mesh.data)
    own_vectors = math.ceil(vectors / mesh.samples)
    vector_bytes = _FLOAT * own_vectors * work.weights
    batches = math.ceil(own_data / work.batch)
    arithmetic = operations(work, kind, own_data, own_vectors) / work.speed(hardware, dtype)
    python = (2 if kind == "ggn" else 1) * batches * math.ceil(own_vectors / work.together) * work.overhead.value
    touched = batches * _TOUCHED * vector_bytes / hardware.memory_bandwidth.value
    summed = 0.0 if kind in ("jvp", "rows") else all_reduce_seconds(vector_bytes, mesh.data, hardware)
    return max(arithmetic, python) + touched + summed


def efficiency(work: Work, hardware: Hardware, vectors: int, mesh: Mesh, num_data: int | None = None) -> float:
    """`T₁/(r T_r)` of a product."""
    alone = product_seconds(work, hardware, vectors, num_data=num_data)
    return alone / (mesh.ranks * product_seconds(work, hardware, vectors, mesh, num_data))


def memory(work: Work, vectors: int, mesh: Mesh, stacks: int, batch: int | None = None) -> dict[str, float]:
    """Bytes on a rank, by what they are for.

    Args:
        work: the network and its data.
        vectors: `K`, of all ranks.
        mesh: how ranks share the work.
        stacks: vectors of weights that a solver holds for each sample.
        batch: data that go through the network together, by default as of the work.
    """
    num = work.batch if batch is None else batch
    own_vectors, own_data = math.ceil(vectors / mesh.samples), math.ceil(work.num_data / mesh.data)
    tangents = _ALIVE * work.largest * min(own_vectors, work.together)
    return {
        "weights of the network": work.model_bytes,
        "vectors of the solver": float(_FLOAT * stacks * own_vectors * work.weights),
        "activations of a batch": num * (work.activations + tangents),
        # What the JVP makes and what the curvature makes of it; the noise of a sample has the same shape, at another
        # time.
        "outputs or noise of a batch, all vectors": 2.0 * _FLOAT * num * own_vectors * work.outputs,
        "outputs of the network, own data": float(_FLOAT * own_data * work.outputs),
        "samples, gathered in the end": float(_FLOAT * vectors * work.weights),
    }


def vectors_that_fit(work: Work, hardware: Hardware, vectors: int, mesh: Mesh, stacks: int) -> int:
    """Of a rank's own vectors, how many it can solve for together; 0 if nothing fits. More are solved for in groups."""
    gathered = float(_FLOAT * vectors * work.weights)
    for own in range(math.ceil(vectors / mesh.samples), 0, -1):
        parts = memory(work, own, Mesh(mesh.data), stacks)
        if sum(parts.values()) - parts["samples, gathered in the end"] + gathered <= hardware.memory.value:
            return own
    return 0


def meshes(ranks: int) -> Iterator[Mesh]:
    """All ways to divide some ranks among data and samples."""
    yield from (Mesh(data, ranks // data) for data in range(1, ranks + 1) if ranks % data == 0)


def gather_seconds(work: Work, hardware: Hardware, vectors: int, mesh: Mesh) -> float:
    """Every rank gets the samples of all groups, once in a fit; each sends `(s − 1)/s` of all of them."""
    link = hardware.link.value if mesh.ranks <= hardware.gpus else min(hardware.link.value, hardware.network.value)
    return gathered_bytes(work, vectors, mesh) / link


def gathered_bytes(work: Work, vectors: int, mesh: Mesh) -> float:
    """What a rank sends when samples are gathered."""
    return _FLOAT * vectors * work.weights * (mesh.samples - 1) / mesh.samples


def solve_seconds(
    work: Work, hardware: Hardware, vectors: int, mesh: Mesh, stacks: int, num_data: int | None = None
) -> float:
    """One product of each vector, in as many groups of them as memory asks for; infinite if it holds none."""
    together = vectors_that_fit(work, hardware, vectors, mesh, stacks)
    if not together:
        return math.inf
    own = math.ceil(vectors / mesh.samples)
    groups = math.ceil(own / together)
    once = math.ceil(own / groups) * mesh.samples
    return groups * product_seconds(work, hardware, once, mesh, num_data)


def best_mesh(
    work: Work, hardware: Hardware, vectors: int, ranks: int, stacks: int, num_data: int | None = None
) -> Mesh | None:
    """The mesh whose product of all vectors is the fastest; `None` if none fits in memory."""
    seconds = {mesh: solve_seconds(work, hardware, vectors, mesh, stacks, num_data) for mesh in meshes(ranks)}
    best = min(seconds, key=lambda mesh: seconds[mesh])
    return best if math.isfinite(seconds[best]) else None
