"""The data and networks of glyphs, and relations that the comparison of solvers must obey."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from benchmarks.data.glyphs import CHARACTERS, glyphs
from benchmarks.solvers import glyphs as commands
from benchmarks.solvers.glyph_networks import lenet, small_cnn
from benchmarks.solvers.stored_features import StoredFeatures
from laplace_sampling.__main__ import Data
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.isotropic_prior import IsotropicPrior
from laplace_sampling.linear_model.sampling import sample_posterior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.krylov import CG, BlockKrylov
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.svrg import SVRG


@pytest.fixture(scope="module")
def data() -> Data:
    return glyphs(600, 20)


def network(side: int = 20) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 3, 5), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(4 * ((side - 4) // 4) ** 2, 12), nn.ReLU(), nn.Linear(12, 62),
        )  # fmt: skip


@pytest.fixture(scope="module")
def comparison(data: Data) -> commands.Comparison:
    model = network()
    features = StoredFeatures(model, data.x[:200])
    return commands.compare(features, commands.g_prior(features, model, 5.0), rows=3, tolerance=0.005)


def test_the_same_seed_makes_the_same_data(data: Data) -> None:
    again = glyphs(600, 20)
    assert torch.equal(again.x, data.x)
    assert torch.equal(again.y_test, data.y_test)
    assert not torch.equal(glyphs(600, 20, seed=1).y, data.y)


def test_images_of_all_classes(data: Data) -> None:
    assert data.x.shape == (600, 1, 20, 20)
    assert data.x_test.shape == (20, 1, 20, 20)
    assert len(CHARACTERS) == len(data.y.unique()) == 62
    assert_close(data.x.mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    assert_close(data.x.std(), torch.tensor(1.0))


@pytest.mark.parametrize(("make", "weights"), [(lenet, 29_858), (small_cnn, 14_862)])
def test_sizes_of_networks(make, weights: int, data: Data) -> None:
    model = make()
    assert sum(p.numel() for p in model.parameters()) == weights
    assert model(data.x[:2]).shape == (2, 62)


@pytest.mark.parametrize("make", [network, small_cnn], ids=["small", "odd sides"])
def test_stored_features_are_those_of_the_network(make, data: Data) -> None:
    model = make().double()
    x, reference = data.x[:9].double(), Linearisation(model)
    features = StoredFeatures(model, x, batch_size=4)
    g = torch.Generator().manual_seed(0)
    batch = torch.tensor([7, 2, 5])
    v = torch.randn(2, features.size, generator=g, dtype=torch.float64)
    u = torch.randn(2, 3, 62, generator=g, dtype=torch.float64)
    assert_close(features.outputs_of_network, reference(x))
    assert_close(features.jvp(v, batch), reference.jvp(x[batch], v))
    assert_close(features.vjp(u, batch), reference.vjp(x[batch], u))
    assert_close(features.vjp_each(u[0], batch), reference.vjp_each(x[batch], u[0]))
    assert features.products == {"jvp": 6, "vjp": 9}


def test_krylov_traces_end_below_the_goal(comparison: commands.Comparison) -> None:
    for solver in (BlockKrylov(1e-6), CG(1e-6)):
        trace = commands.krylov_trace(comparison, solver)
        passes, errors = zip(*trace, strict=True)
        assert errors[-1] < 0.01 <= errors[-2]
        assert list(passes) == sorted(passes)
        # The products of the first iterate, and half of those of the right-hand side.
        assert passes[0] == 1.5
    assert passes[-1] == pytest.approx(1.5 + len(trace) - 1)


def test_errors_are_below_what_solvers_report(comparison: commands.Comparison) -> None:
    spent, error, solution = commands.stochastic(comparison, SVRG())
    assert solution.converged
    assert error < SVRG().tolerance
    # The products of the check are not in it.
    assert spent == pytest.approx(solution.passes / 3 + 0.5)
    assert error < commands.stochastic(comparison, SGD(epochs=1, min_steps=1, finish_passes=0))[1]


def test_energies_are_those_of_the_operator(data: Data) -> None:
    features = StoredFeatures(network(), data.x[:100])
    ggn = GGN(features, Categorical(), features.outputs_of_network)
    prior = IsotropicPrior(2.0).build(ggn, ([], torch.zeros(0)), Draws(1, 0).noise(62))
    solution = sample_posterior(ggn, prior, Draws(30, 0), BlockKrylov())
    reference, _ = commands.energies(ggn, prior, sample_posterior(ggn, prior, Draws(30, 1), BlockKrylov()).value)
    fit, total = commands.energies(ggn, prior, solution.value)
    assert_close(total - fit, 2 * solution.value.double().square().sum(1))
    for test in commands.tests_of(ggn, prior, solution, reference):
        assert test.p_value > 0.01
