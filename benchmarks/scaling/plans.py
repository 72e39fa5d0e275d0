"""Two fits that are too large for one machine: ResNet-50 on ImageNet, and LoRA weights of a language model.

Each fit is a list of stages, and each stage some products; counts are those of the library's own settings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.scaling.hardware import TPU_V3_FLOPS, Figure, Hardware
from benchmarks.scaling.ladder import Ladder
from benchmarks.scaling.model import (
    Mesh,
    Work,
    gather_seconds,
    gathered_bytes,
    meshes,
    operations,
    product_seconds,
    sent_bytes,
    vectors_that_fit,
)
from laplace_sampling.methods.krylov import Krylov
from laplace_sampling.methods.stochastic import Stochastic
from laplace_sampling.solvers.sgd import SGD

__all__ = [
    "IMAGENET",
    "KRYLOV_STACKS",
    "LANGUAGE_MODEL",
    "PUBLISHED_HOURS",
    "SAMPLES",
    "STOCHASTIC_STACKS",
    "TEST_IMAGES",
    "TEST_SEQUENCES",
    "Stage",
    "default_fit",
    "fastest_mesh",
    "implied_utilisation",
    "krylov_fit",
    "lora_weights",
    "published_step",
    "rows_in_memory",
    "stochastic_fit",
]

# Of the published EM step; Antorán et al. (ICLR 2023): "Each EM step takes roughly 26 hours on a TPU-v3 accelerator."
PUBLISHED_HOURS = 26.0
# `num_samples` of the constructor, and products of each sample that a solve of many together takes, as `la.plan` has it
# (`methods.solver_method`).
SAMPLES, PRODUCTS = 64, 5
# Data that are predicted: the validation set of ImageNet, and a tenth of the sequences.
TEST_IMAGES, TEST_SEQUENCES = 50_000, 1_000

_OVERHEAD = Figure(0.02, "s", "assumption")
_FP32 = Figure(
    367 * 3 * 8.18e9 / 15.7e12,
    "of the peak",
    "[NVIDIA](https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/ConvNets/resnet50v1.5/"
    "README.md): 367 images a second in training on a V100 of 15.7·10¹² operations a second",
)

IMAGENET = Work(
    "ResNet-50 on ImageNet",
    num_data=1_281_167,
    outputs=1000,
    weights=25_557_032,
    forward=2 * 4.09e9,  # torchvision counts multiplications
    frozen=False,
    batch=128,
    model_bytes=4 * 25_557_032,
    activations=3 * 2 * 11.1e6,
    largest=2 * 64 * 112 * 112,
    bf16=Figure(
        2470 * 3 * 8.18e9 / 312e12,
        "of the peak",
        "[NVIDIA](https://github.com/NVIDIA/DeepLearningExamples/blob/master/PyTorch/Classification/ConvNets/"
        "resnet50v1.5/README.md): 2,470 images a second in training on an A100; on other GPUs: assumption",
    ),
    fp32=_FP32,
    overhead=_OVERHEAD,
)


def lora_weights(rank: int, layers: int, shapes: list[tuple[int, int]]) -> int:
    """Weights of the two factors beside each matrix `[in, out]` of each layer."""
    return layers * rank * sum(inside + outside for inside, outside in shapes)


# The architecture of TinyLlama 1.1B.
_LAYERS, _WIDTH, _HEADS, _KEYS, _HIDDEN, _VOCABULARY, _LENGTH = 22, 2048, 32, 256, 5632, 32_000, 512
_SHAPES = [
    *((_WIDTH, _WIDTH),) * 2, *((_WIDTH, _KEYS),) * 2, *((_WIDTH, _HIDDEN),) * 2, (_HIDDEN, _WIDTH),
]  # fmt: skip
_MODEL = _LAYERS * sum(inside * outside for inside, outside in _SHAPES) + 2 * _VOCABULARY * _WIDTH

LANGUAGE_MODEL = Work(
    "LoRA of a language model",
    num_data=10_000,
    outputs=_LENGTH * _VOCABULARY,
    weights=lora_weights(16, _LAYERS, _SHAPES),
    # Two operations for each weight and token but those of the embedding, which is looked up; and attention.
    forward=2.0 * (_MODEL - _VOCABULARY * _WIDTH) * _LENGTH + _LAYERS * 4 * _WIDTH * _LENGTH**2,
    frozen=True,
    batch=2,
    model_bytes=2.0 * _MODEL,
    activations=(34.0 + 5 * _HEADS * _LENGTH / _WIDTH) * _LENGTH * _WIDTH * _LAYERS,
    largest=4.0 * _LENGTH * _VOCABULARY,
    bf16=Figure(
        0.4321,
        "of the peak",
        "[llm-foundry](https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md): "
        "training of 1.3 billion weights with sequences of 512 tokens on eight H100",
    ),
    fp32=_FP32,
    overhead=_OVERHEAD,
)


@dataclass(frozen=True)
class Stage:
    """Some equal products.

    Attributes:
        name: what they are for.
        kind: `"ggn"`, `"jvp"`, `"vjp"` or `"rows"`; `"forward"`, without vectors; `"dense"`, of matrices; `"gather"`,
            of samples.
        num_data: of one product.
        vectors: likewise.
        times: how many products.
        dense: operations of matrices, which one rank does.
    """

    name: str
    kind: str
    num_data: int = 0
    vectors: int = 0
    times: float = 1.0
    dense: float = 0.0

    @property
    def jvps(self) -> float:
        """In units of a datum and a vector."""
        return self.times * self.num_data * self.vectors if self.kind in ("ggn", "jvp") else 0.0

    @property
    def vjps(self) -> float:
        """Likewise."""
        return self.times * self.num_data * self.vectors if self.kind in ("ggn", "vjp", "rows") else 0.0

    def operations(self, work: Work) -> float:
        if self.kind == "forward":
            return self.times * work.forward * self.num_data
        if self.kind in ("dense", "gather"):
            return self.dense
        return self.times * operations(work, self.kind, self.num_data, self.vectors)

    def mesh(self, mesh: Mesh) -> Mesh:
        """How so many ranks share it: groups that have no vectors of their own idle."""
        return Mesh(mesh.data, min(mesh.samples, max(1, self.vectors)))

    def seconds(self, work: Work, hardware: Hardware, mesh: Mesh, dtype: str = "bf16") -> float:
        """On some ranks."""
        if self.kind == "dense":
            return self.dense / hardware.fp32.value
        if self.kind == "gather":
            return gather_seconds(work, hardware, self.vectors, self.mesh(mesh))
        if self.kind == "forward":
            return self.operations(work) / (work.speed(hardware, dtype) * mesh.data)
        once = product_seconds(work, hardware, self.vectors, self.mesh(mesh), self.num_data, dtype, self.kind)
        return self.times * once

    def sent(self, work: Work, mesh: Mesh) -> float:
        """Bytes that a rank sends to others."""
        if self.kind == "gather":
            return gathered_bytes(work, self.vectors, self.mesh(mesh))
        if self.kind not in ("ggn", "vjp"):
            return 0.0
        own = math.ceil(self.vectors / self.mesh(mesh).samples)
        return self.times * sent_bytes(4.0 * own * work.weights, mesh.data)


def fastest_mesh(
    work: Work, fit: Sequence[Stage], hardware: Hardware, ranks: int, stacks: int, vectors: int = SAMPLES
) -> Mesh | None:
    """The mesh on which a whole fit takes least time; one that holds all vectors if there is any, `None` if none fits.

    Args:
        work: the network and its data.
        fit: its stages.
        hardware: what it runs on.
        ranks: how many.
        stacks: vectors of weights that the solver holds for each sample.
        vectors: that are solved for.
    """
    held = {mesh: vectors_that_fit(work, hardware, vectors, mesh, stacks) for mesh in meshes(ranks)}
    fitting = [mesh for mesh, number in held.items() if number == math.ceil(vectors / mesh.samples)]
    fitting = fitting or [mesh for mesh, number in held.items() if number]
    return min(fitting, key=lambda mesh: sum(stage.seconds(work, hardware, mesh) for stage in fit), default=None)


def rows_in_memory(work: Work, memory: float, num_samples: int = SAMPLES) -> int:
    """Rows of a part of the data that memory holds beside the samples, with their Gram matrix and what it takes.

    `4mP + 32m² ≤ bytes − 4KP`, as in `linear_model.sketch_growth`.
    """
    room, vector = memory - 4.0 * num_samples * work.weights, 4.0 * work.weights
    return max(0, int((math.sqrt(vector**2 + 128 * room) - vector) / 64)) if room > 0 else 0


def default_fit(work: Work, found: Ladder, rows: int, num_test: int) -> list[Stage]:
    """`fit_hyperparameters(loader)` with the budget of 20 epochs, which pays for a part of the data."""
    samples = 8  # of the rule, for more than 32 outputs: `predictions.covariance_path`
    dense = 2.0 * work.weights * rows * (rows + 2 * SAMPLES) + 10.3 * rows**3  # `Subset.predicted`
    return [
        Stage("outputs of all data", "forward", work.num_data),
        Stage(f"{rows} rows of a part of the data", "rows", rows, 1),
        Stage("their Gram matrix, and samples", "dense", dense=dense),
        Stage("rule for the prior precision", "jvp", round(found.rule_jvps / samples), samples),
        Stage("predictions", "jvp", num_test, SAMPLES),
    ]


def stochastic_fit(work: Work, found: Ladder, num_test: int, solver: SGD | None = None) -> list[Stage]:
    """Samples by mini-batches, `method="stochastic"` and `budget=None`."""
    solver = SGD() if solver is None else solver
    steps = round(solver.epochs * work.num_data / solver.batch_size)
    return [
        Stage("outputs of all data", "forward", work.num_data),
        Stage("rule for the prior precision", "jvp", round(found.rule_jvps / 8), 8),
        Stage("right-hand sides", "vjp", work.num_data, SAMPLES),
        Stage("64 samples, mini-batches", "ggn", solver.batch_size, SAMPLES, steps),
        Stage("residuals", "ggn", work.num_data, SAMPLES),
        Stage("samples gathered", "gather", vectors=SAMPLES),
        Stage("predictions", "jvp", num_test, SAMPLES),
    ]


def krylov_fit(work: Work, found: Ladder, num_test: int) -> list[Stage]:
    """Samples by products with all data, `method="krylov"` and `budget=None`, with as many as `la.plan` predicts."""
    return [
        Stage("outputs of all data", "forward", work.num_data),
        Stage("rule for the prior precision", "jvp", round(found.rule_jvps / 8), 8),
        Stage("right-hand sides", "vjp", work.num_data, SAMPLES),
        Stage("64 samples, full products", "ggn", work.num_data, SAMPLES, PRODUCTS),
        Stage("samples gathered", "gather", vectors=SAMPLES),
        Stage("predictions", "jvp", num_test, SAMPLES),
    ]


def published_step(work: Work) -> list[Stage]:
    """One EM step of the published table: six samples, ten epochs for the mode and one for the samples.

    Batches of 240 and 24 data (Antorán et al., ICLR 2023, appendix).
    """
    return [
        Stage("noise of six samples", "vjp", work.num_data, 6),
        Stage("mode, ten epochs", "ggn", 240, 1, round(10 * work.num_data / 240)),
        Stage("six samples, one epoch", "ggn", 24, 6, round(work.num_data / 24)),
    ]


def implied_utilisation(work: Work) -> float:
    """The part of one TPU-v3 chip's peak that the published hours are, for the operations counted here."""
    counted = sum(stage.operations(work) for stage in published_step(work))
    return counted / (PUBLISHED_HOURS * 3600 * TPU_V3_FLOPS.value)


# Vectors of weights that the solvers hold for each sample.
STOCHASTIC_STACKS, KRYLOV_STACKS = Stochastic(solver=SGD()).stacks, Krylov().stacks
