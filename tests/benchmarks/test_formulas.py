"""Formulas of the benchmarks, each against the plain one."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

pytest.importorskip("torchmetrics", reason="torchmetrics, of the metrics of the benchmark, is not installed")

from benchmarks.comparison import lines, peers, spectral
from benchmarks.methods import ablations
from benchmarks.methods.conformal import LEVEL, standard_error
from benchmarks.methods.own_temperature import LOGS, PRIORS, gains, least
from benchmarks.methods.tangents import Spectrum, trained
from benchmarks.price.dense_reference import Reference, distance
from benchmarks.published.batch_bald import batch_bald
from benchmarks.scaling.fitted import Arithmetic, Ring, arithmetic, ring
from benchmarks.scaling.hardware import H100, H100_ONE_CARD, Figure
from benchmarks.scaling.model import Mesh, Work, all_reduce_seconds, jvp_operations, product_seconds, vjp_operations
from benchmarks.solvers.glyph_networks import small_cnn
from benchmarks.solvers.stored_features import StoredFeatures
from benchmarks.time_limit import time_limit
from laplace_sampling import IsotropicPrior, LinearisedLaplace
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.resources import Operations
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.solvers.dense import Dense, Factor


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_samples_of_swag_have_its_covariance() -> None:
    generator, iterates = torch.Generator().manual_seed(0), normal(6, 3)
    samples = peers.swag_samples(iterates, 200_000, 4, generator)
    deviations = iterates[-4:] - iterates.mean(0)
    expected = 0.5 * torch.diag(iterates.var(0, correction=0)) + deviations.T @ deviations / (2 * 3)
    assert_close(samples.mean(0), iterates.mean(0), atol=0.02, rtol=0)
    assert_close(samples.T.cov(), expected, atol=0.03, rtol=0)


def test_divergence_of_gaussians() -> None:
    mean, log_scale = torch.tensor([0.5, -1.0]), torch.tensor([-0.3, 0.2])
    q, p = torch.distributions.Normal(mean, log_scale.exp()), torch.distributions.Normal(0.0, 1.0)
    assert_close(peers.gaussian_divergence(mean, log_scale), torch.distributions.kl_divergence(q, p).sum())


def test_random_features_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectral, "FEATURES", 40_000)
    torch.manual_seed(0)
    head, h = spectral.RandomFeatures(6, 2), normal(8, 6)
    features, normed = head.features(h), head.norm(h)
    expected = (-torch.cdist(normed, normed).square() / (2 * spectral.LENGTH**2)).exp()
    # the standard error of a mean of 40,000 products is below 0.5 %
    assert_close(features @ features.T, expected, atol=0.03, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_the_spectrum_and_its_updates_are_those_of_dense_algebra() -> None:
    problem, alpha = trained("wine, MLP", 0, 300), 0.7
    model = problem.default
    s, prior = Spectrum.of(model, problem.prior(model)), problem.prior(model, precision=alpha)
    gamma = float(Factor.of(model.ggn(model.network_outputs), prior.diagonal()).leverage().sum())
    assert s.gamma(alpha) == pytest.approx(gamma, rel=1e-6)
    assert s.trace_of_inverse(alpha) == pytest.approx((s.size - gamma) / alpha, rel=1e-7)  # Tr H⁻¹(M + α) = P
    assert s.norm(alpha) == pytest.approx(
        float(linear_model_mode(model, prior, Dense()).value.square().sum()), rel=3e-3
    )
    root = s.fixed_point()
    for update in ablations.UPDATES.values():
        assert update(s, root) == pytest.approx(root, rel=1e-6)
        assert abs(math.log(update(s, root / 5) / root)) < math.log(5)  # and it is attracting


def test_the_standard_error_of_coverage_is_that_of_a_random_threshold() -> None:
    # The coverage of the k-th of n uniform scores has a Beta distribution; m test data are a binomial draw of it.
    generator, n, m = torch.Generator().manual_seed(0), 19, 10
    scores = torch.rand(5000, n, generator=generator, dtype=torch.float64)
    thresholds = torch.stack([SplitConformal.of(s[:, None], 1).largest(LEVEL)[0] for s in scores])
    coverages = (torch.rand(5000, m, generator=generator) <= thresholds[:, None]).double().mean(1)
    assert float(coverages.std()) == pytest.approx(standard_error(LEVEL, m, n), rel=0.05)
    assert float(coverages.mean()) == pytest.approx(LEVEL, abs=4 * float(coverages.std()) / math.sqrt(5000))


def test_gains_of_a_temperature_are_those_of_data_that_did_not_choose() -> None:
    logits = normal(400, 3).double()
    y = torch.multinomial((2 * logits).softmax(1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    losses = torch.stack([F.cross_entropy(logits / T, y, reduction="none") for T in LOGS.exp().tolist()], 1)
    found, best = gains(losses, 10, torch.Generator().manual_seed(0))
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    chosen, others = losses[order[:10]], losses[order[10:]].mean(0)
    assert math.log(best) == pytest.approx(float(LOGS[others.argmin()]))
    for name, prior in PRIORS.items():
        assert found[name] == pytest.approx(float(others[-1] - others[least(chosen, prior)]))


def information(probs: torch.Tensor, batch: Sequence[int]) -> float:
    """`I(y; f)` of the labels of a batch, by a sum over all of them."""
    labels = itertools.product(range(probs.shape[-1]), repeat=len(batch))
    joint = torch.stack(
        [torch.stack([probs[:, i, c] for i, c in zip(batch, of, strict=True)]).prod(0).mean() for of in labels]
    )
    return float(torch.special.entr(joint).sum() - torch.special.entr(probs[:, batch]).sum(-1).mean(0).sum())


def test_a_batch_tells_most_about_the_function() -> None:
    probs = (2 * normal(6, 5, 2, seed=2).double()).softmax(-1)
    greedy: list[int] = []
    for _ in range(3):
        rest = [i for i in range(5) if i not in greedy]
        greedy.append(max(rest, key=lambda i: information(probs, [*greedy, i])))
    assert batch_bald(probs, 3, draws=20_000) == greedy


WORK = Work(
    *("made up", 1000, 10, 10**6, 1e9, False, 50, 4e6, 2000.0, 100.0),
    *(Figure(0.5, "of the peak", ""), Figure(0.5, "of the peak", ""), Figure(0.0, "s", "")),
)


def test_operations_of_products_are_those_that_the_library_makes() -> None:
    torch.manual_seed(0)
    network = Linearisation(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(10))))
    x, v, u = torch.randn(8, 64), torch.randn(6, network.num_parameters), torch.randn(6, 8, 64)
    network.jvp(x, v)
    with Operations() as forward:
        network.jvp(x, v)
    with Operations() as backward:
        network.vjp(x, u)
    work = replace(WORK, forward=2.0 * 10 * 64**2)
    # The first layer has no tangent and no cotangent of its input.
    assert forward.count == pytest.approx(jvp_operations(work, 8, 6), rel=0.15)
    assert backward.count == pytest.approx(vjp_operations(work, 8, 6), rel=0.15)


def test_a_ring_within_a_node_and_over_nodes() -> None:
    # 14 steps of eight ranks; each sends 7/4 of the vector.
    assert all_reduce_seconds(1e9, 8, H100) == pytest.approx(8.4e-6 + 14 * 3.4e-6 + 1.75e9 / 370e9)
    # 16 ranks on two nodes: 30 steps, of which two are between nodes; the network is the slowest link.
    latency = 8.4e-6 + 28 * 3.4e-6 + 2 * 9.6e-6
    assert all_reduce_seconds(1e9, 16, H100) == pytest.approx(latency + 1.875e9 / 368e9)
    assert all_reduce_seconds(1e9, 16, H100_ONE_CARD) == pytest.approx(latency + 1.875e9 / 46e9)


def test_seconds_of_a_product() -> None:
    # 1,000 data on 4 ranks are 250 in five batches; 8 vectors in two groups are four for each rank.
    arithmetic, touched = 250e9 * (2 + 4 * 4) / (0.5 * 989.4e12), 5 * 3 * 4 * 4e6 / 3.35e12
    summed = all_reduce_seconds(4 * 4e6, 4, H100)
    assert product_seconds(WORK, H100, 8, Mesh(4, 2)) == pytest.approx(arithmetic + touched + summed)


def test_constants_of_made_up_timings_are_found() -> None:
    local, summed = Arithmetic(2e-3, 0.03), Ring(5e-5, 2e9)
    found = arithmetic([(n, local.seconds(n, 64)) for n in (16, 32, 64, 100)], 64)
    assert (found.per_datum, found.per_batch) == pytest.approx((local.per_datum, local.per_batch))
    of_sums = ring([(size, summed.seconds(size, 4)) for size in (1e3, 1e5, 1e7)], 4)
    assert (of_sums.latency, of_sums.bandwidth) == pytest.approx((summed.latency, summed.bandwidth))


def test_the_dense_reference_of_prices_is_the_exact_posterior() -> None:
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double(), normal(30, 4).double()
    la = LinearisedLaplace(network, "classification", method="exact", prior=IsotropicPrior(2.0), num_samples=4)
    la.fit([(x, torch.arange(30) % 3)], progress=False)
    reference = Reference.of(network, x, 2.0)
    exact = reference.stddev(x[:7])
    assert_close(exact, la.predict(x[:7]).stddev, rtol=1e-6, atol=1e-9)
    off = torch.tensor([distance(s, exact) for s in reference.sampled_stddev(x[:7], 1024, 20)]).mean()
    assert float(off) == pytest.approx(1 / math.sqrt(2 * 1024), rel=0.3)


def test_stored_features_are_those_of_the_network() -> None:
    model, x = small_cnn().double(), normal(9, 1, 20, 20).double()
    features, reference, batch = StoredFeatures(model, x, batch_size=4), Linearisation(model), torch.tensor([7, 2, 5])
    v, u = normal(2, features.size).double(), normal(2, 3, 62).double()
    assert_close(features.jvp(v, batch), reference.jvp(x[batch], v))
    assert_close(features.vjp(u, batch), reference.vjp(x[batch], u))
    assert features.products == {"jvp": 6, "vjp": 6}


def test_a_limit_ends_what_takes_longer() -> None:
    def forever() -> None:
        while True:
            math.sqrt(2)

    with pytest.raises(TimeoutError, match="processor"), time_limit(0.05, TimeoutError):
        forever()


def test_a_line_that_was_cut_off_is_no_result(tmp_path) -> None:
    out = tmp_path / "results.jsonl"
    for case in ("a", "b"):
        lines.append(out, {"case": case, "value": math.nan})
    assert [line["case"] for line in lines.read(out, ("case",))] == ["a", "b"]
    out.write_text(out.read_text()[:-5])
    lines.append(out, {"case": "c", "value": 1.0})
    assert [line["case"] for line in lines.read(out, ("case",))] == ["a", "c"]
