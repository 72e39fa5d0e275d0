import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.price.networks import SMALL, build, num_weights
from benchmarks.scaling.hardware import H100
from benchmarks.scaling.ladder import ladder
from benchmarks.scaling.model import Mesh, all_reduce_seconds, ggn_operations, product_seconds, vjp_operations
from benchmarks.scaling.plans import (
    IMAGENET,
    LANGUAGE_MODEL,
    SAMPLES,
    STOCHASTIC_STACKS,
    Stage,
    fastest_mesh,
    implied_utilisation,
    krylov_fit,
    lora_weights,
    published_step,
    rows_in_memory,
    stochastic_fit,
)
from laplace_sampling import LinearisedLaplace
from laplace_sampling.linear_model.cost import measure
from laplace_sampling.linear_model.network_features import features_at
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.sgd import SGD


def test_weights_of_lora() -> None:
    # Two matrices of 3 × 5 and 5 × 7 in each of two layers, with factors of rank 2.
    assert lora_weights(2, 2, [(3, 5), (5, 7)]) == 2 * (2 * (3 + 5) + 2 * (5 + 7))
    assert LANGUAGE_MODEL.weights == 12_615_680
    assert LANGUAGE_MODEL.model_bytes / 2 == pytest.approx(1.1e9, rel=0.01)


def test_the_ladder_is_that_of_a_plan() -> None:
    network = build(SMALL, 0, narrow=True).eval()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(400, 1, 28, 28, generator=generator), torch.arange(400) % 10
    plan = LinearisedLaplace(network, "classification").plan(DataLoader(TensorDataset(x, y), 100), budget=1000.0)
    cost = measure(features_at(Linearisation(network), x, 100))
    work = dataclasses.replace(IMAGENET, num_data=400, outputs=10, weights=num_weights(network), batch=100)
    found = ladder(work, 1e10, budget=1000.0, cost=cost)
    expected = {rung.name: rung for rung in plan.rungs}
    assert len(found.rungs) == 3
    for rung in found.rungs:
        assert rung.method.name == expected[rung.name].method.name
        assert rung.epochs == pytest.approx(expected[rung.name].epochs)
        assert rung.affordable == expected[rung.name].affordable


def test_passes_are_those_of_the_settings() -> None:
    found = ladder(IMAGENET, 40e9)
    N, solver = IMAGENET.num_data, SGD(epochs=3.0, batch_size=1000)
    stages = {stage.name: stage for stage in stochastic_fit(IMAGENET, found, 10, solver)}
    assert stages["64 samples, mini-batches"].jvps == pytest.approx(3 * SAMPLES * N, rel=1e-3)
    assert stages["right-hand sides"].vjps == SAMPLES * N
    # With five products of each sample, as `la.plan` predicts; only the rule, right-hand sides and solves are in it.
    solves = [s for s in krylov_fit(IMAGENET, found, 10) if s.name.startswith(("rule", "right", "64 samples"))]
    epochs = (3 * sum(s.jvps for s in solves) + 3 * sum(s.vjps for s in solves)) / (3 * N)
    assert epochs == pytest.approx(found.solves.epochs, rel=1e-3)


def test_the_published_step() -> None:
    # Noise: 1 + 2·6 forward passes of each image. Mode: ten epochs of one and four. Samples: two and 4·6.
    counted = sum(stage.operations(IMAGENET) for stage in published_step(IMAGENET))
    forward = IMAGENET.forward * IMAGENET.num_data
    assert counted == pytest.approx((13 + 10 * 5 + 26) * forward, rel=1e-3)
    assert implied_utilisation(IMAGENET) == pytest.approx(89 * forward / (26 * 3600 * 123e12), rel=1e-3)


def test_seconds_and_traffic_of_a_stage() -> None:
    stage, mesh = Stage("", "ggn", 100, 64, 7), Mesh(4, 2)
    assert stage.jvps == stage.vjps == 7 * 100 * 64
    assert stage.operations(IMAGENET) == 7 * ggn_operations(IMAGENET, 100, 64)
    assert stage.seconds(IMAGENET, H100, mesh) == 7 * product_seconds(IMAGENET, H100, 64, mesh, 100)
    # Each of four ranks sends 3/2 of 32 vectors, seven times.
    assert stage.sent(IMAGENET, mesh) == 7 * 1.5 * 32 * 4 * IMAGENET.weights
    assert dataclasses.replace(stage, kind="jvp").sent(IMAGENET, mesh) == 0
    rows = dataclasses.replace(stage, kind="rows")
    assert (rows.jvps, rows.vjps, rows.sent(IMAGENET, mesh)) == (0, 7 * 100 * 64, 0)
    assert rows.operations(IMAGENET) == 7 * vjp_operations(IMAGENET, 100, 64)
    vjp = dataclasses.replace(stage, kind="vjp")
    summed = 7 * all_reduce_seconds(32 * 4 * IMAGENET.weights, 4, H100)
    assert vjp.seconds(IMAGENET, H100, mesh) - rows.seconds(IMAGENET, H100, mesh) == pytest.approx(summed)


def test_groups_without_a_vector_idle() -> None:
    stage = Stage("mode", "ggn", 240, 1)
    assert stage.seconds(IMAGENET, H100, Mesh(2, 8)) == stage.seconds(IMAGENET, H100, Mesh(2, 1))


def test_rows_that_memory_holds() -> None:
    rows, weights = rows_in_memory(IMAGENET, 40e9), IMAGENET.weights
    taken = [4.0 * m * weights + 32.0 * m**2 + 4.0 * SAMPLES * weights for m in (rows, rows + 1)]
    assert taken[0] <= 40e9 < taken[1]
    assert rows_in_memory(IMAGENET, 1e9) == 0


def test_the_fastest_mesh_holds_all_vectors_if_there_is_one() -> None:
    fit = [Stage("", "ggn", IMAGENET.num_data, SAMPLES)]
    mesh = fastest_mesh(IMAGENET, fit, H100, 8, STOCHASTIC_STACKS)
    assert mesh == Mesh(2, 4)  # with 32 vectors on a rank, solvers hold 52 GB of them, and 26 GB are for the rest
    assert fastest_mesh(IMAGENET, fit, H100, 1, STOCHASTIC_STACKS) == Mesh()  # in groups
    assert fastest_mesh(LANGUAGE_MODEL, fit, H100, 8, STOCHASTIC_STACKS) is None
