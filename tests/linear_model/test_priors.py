import json
from dataclasses import dataclass, replace

import pytest
import torch
from cases import FEW_CASES, Case, make_case
from torch import nn
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.linear_model.draws import Draws, SeededNoise
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.as_prior import PRIORS, as_prior, prior_from_recipe, recipe_of_prior
from laplace_sampling.linear_model.priors.prior import (
    GaussianPrior,
    GPrior,
    IsotropicPrior,
    Layers,
    LayerwisePrior,
    Prior,
    ungrouped,
)
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.operator import make_dense


def build(recipe, case: Case, precision: float = 2.0, seed: int = 0, dense: bool = False):
    """The prior of a recipe, and `M`; with `dense` features, many products are fast."""
    model = case.linear_model()
    if dense:
        model = replace(model, features=DenseFeatures.of(model.features))
    ggn = model.ggn(model.network_outputs)
    noise = Draws(getattr(recipe, "num_probes", 1), seed=seed).noise(model.features.num_outputs)
    return replace(recipe, precision=precision).build(ggn, Linearisation(case.model).layers(), noise), make_dense(ggn)


@pytest.mark.parametrize("case", FEW_CASES, indirect=True)
def test_isotropic_is_alpha_times_identity(case: Case) -> None:
    prior, _ = build(IsotropicPrior(), case)
    assert_close(prior.diagonal(), torch.full_like(prior.scale, 2.0))
    assert prior.names == ("all",)


def test_layerwise_has_one_precision_a_module() -> None:
    prior, _ = build(LayerwisePrior(), make_case("conv_batch_norm"))
    assert prior.names == ("0", "1", "5")
    prior = prior.with_precision(torch.tensor([1.0, 2.0, 3.0]))
    assert prior.diagonal().tolist() == [1.0] * 30 + [2.0] * 6 + [3.0] * 52
    assert prior.grouped(torch.ones(2, 88)).tolist() == [[30, 6, 52]] * 2


def test_layers_may_start_from_precisions_of_their_own() -> None:
    case = make_case("conv_batch_norm")
    model = case.linear_model()
    ggn, layers = model.ggn(model.network_outputs), Linearisation(case.model).layers()
    noise = Draws(1, seed=0).noise(model.features.num_outputs)
    prior = LayerwisePrior(2.0, layers={"5": 7.0, "0": 3.0}).build(ggn, layers, noise)
    assert prior.precision.tolist() == [3.0, 2.0, 7.0]
    assert hash(LayerwisePrior(layers={"5": 7.0})) == hash(LayerwisePrior())
    with pytest.raises(ValueError, match="'6'"):
        LayerwisePrior(layers={"6": 7.0}).build(ggn, layers, noise)
    with pytest.raises(ValueError, match=r"\{'0'"):
        LayerwisePrior(layers={"0": -1.0})
    with pytest.raises(TypeError, match=r"\[1\.0\]"):
        LayerwisePrior(layers=[1.0])  # type: ignore[arg-type]


def test_exact_g_prior_is_alpha_times_the_diagonal_of_the_ggn(case: Case) -> None:
    prior, M = build(GPrior(floor=1e-12), case)
    names, groups = Linearisation(case.model).layers()
    means = torch.stack([M.diagonal()[groups == i].mean() for i in range(len(names))])
    alive = M.diagonal() > 1e-12 * means[groups]
    assert_close(prior.diagonal()[alive], 2 * M.diagonal()[alive])
    # In scaled coordinates the trace of M is the number of weights with curvature.
    assert_close((M.diagonal() * prior.scale**2)[alive].sum(), alive.sum().double())
    assert prior.num_floored == int((~alive).sum())


def test_floor_is_relative_to_the_mean_and_reported() -> None:
    case = make_case("classification")
    with torch.no_grad():
        case.model[2].weight[:, 0] = 0  # the first hidden unit has no influence: its incoming weights are dead
    prior, M = build(GPrior(floor=1e-2), case)
    floor = torch.cat([(1e-2 * layer.mean()).expand(len(layer)) for layer in M.diagonal().split([24, 28])])
    dead = M.diagonal() < floor
    assert prior.num_floored == int(dead.sum()) >= 4
    assert_close(prior.scale[dead], floor[dead].rsqrt())


def test_stochastic_g_prior_is_unbiased_with_its_own_standard_error() -> None:
    case, num = make_case("classification"), 4000
    recipe = GPrior(num_probes=num, exact_limit=0, floor=1e-12)
    prior, M = build(recipe, case, dense=True)
    estimate = prior.diagonal() / 2
    assert ((estimate - M.diagonal()).abs() < 5 * M.diagonal() * (2 / num) ** 0.5).all()
    assert not torch.equal(estimate, M.diagonal())


def test_g_prior_is_exact_only_where_affordable() -> None:
    model = make_case("classification").linear_model()
    ggn = model.ggn(model.network_outputs)
    assert GPrior()._is_exact(ggn)
    assert not GPrior(num_probes=3)._is_exact(ggn)  # 4 outputs
    assert not GPrior(exact_limit=10)._is_exact(ggn)


def test_mackay_update_applies_its_bounds() -> None:
    prior, _ = build(LayerwisePrior(), make_case("classification"))
    update = prior.mackay_precision(torch.tensor([6.0, 5.0]), torch.tensor([2.0, 0.0]), (0.1, 50.0))
    assert update.tolist() == [3.0, 50.0]
    assert prior.mackay_precision(torch.tensor([1e-9, 5.0]), torch.tensor([2.0, 1.0]), (0.1, 50.0))[0] == 0.1


def test_g_prior_needs_curvature() -> None:
    case = make_case("classification")
    nn.init.zeros_(case.model[2].weight)
    with torch.no_grad():
        case.model[2].bias.copy_(torch.tensor([1e4, 0, 0, 0]))
    case.model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match="g-prior"):
        build(GPrior(), case)


def test_names_and_bad_settings() -> None:
    assert as_prior("g-prior") == GPrior()
    assert as_prior("isotropic") == IsotropicPrior()
    assert as_prior("layerwise") == LayerwisePrior()
    own = GPrior(floor=0.1)
    assert as_prior(own) is own
    with pytest.raises(ValueError, match="flat"):
        as_prior("flat")
    with pytest.raises(ValueError, match="num_probes"):
        GPrior(num_probes=0)


@pytest.mark.parametrize("precision", [0.0, -1.0, float("nan"), float("inf")])
def test_precisions_that_are_none_are_refused(precision: float) -> None:
    for prior in (IsotropicPrior, LayerwisePrior, GPrior):
        with pytest.raises(ValueError, match="precision"):
            prior(precision=precision)


@pytest.mark.parametrize(
    "prior",
    [
        IsotropicPrior(0.5),
        LayerwisePrior(2.0),
        LayerwisePrior(2.0, layers={"0": 3.0}),
        GPrior(3.0, num_probes=7, floor=0.1),
    ],
)
def test_a_prior_comes_back_from_its_recipe(prior: Prior) -> None:
    recipe = json.loads(json.dumps(recipe_of_prior(prior)))
    assert prior_from_recipe(recipe) == prior


@dataclass(frozen=True)
class ByIndex(Prior):
    """Precisions that grow with the index of a weight, as no prior of the library has them."""

    growth: float = 0.1

    def build(self, ggn: GGN, layers: Layers, noise: SeededNoise) -> GaussianPrior:
        return ungrouped((1 + self.growth * torch.arange(ggn.size)).rsqrt().to(ggn.dtype), self.precision)


def test_a_new_prior_is_a_line_in_the_table(monkeypatch) -> None:
    with pytest.raises(ValueError, match="ByIndex"):
        prior_from_recipe(recipe_of_prior(ByIndex()))
    monkeypatch.setitem(PRIORS, "by_index", ByIndex)
    assert as_prior("by_index") == ByIndex()
    assert prior_from_recipe(recipe_of_prior(ByIndex(2.0, growth=0.3))) == ByIndex(2.0, growth=0.3)
    case = make_case("regression")
    la = LinearisedLaplace(case.model, case.likelihood, prior="by_index", num_samples=2)
    la.fit([(case.x, case.y)], progress=False)
    assert la.prior_scale_[0] > la.prior_scale_[1]


def test_the_prior_is_isotropic_by_default() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 1))
    assert LinearisedLaplace(network, "regression").settings.prior == IsotropicPrior()
