import copy
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import reference
import torch
from cases import Case, make_case
from flat_settings import laplace_of
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

from laplace_sampling import (
    SGD,
    ConvergenceWarning,
    Gaussian,
    GPrior,
    IsotropicPrior,
    LinearisedLaplace,
    NotFittedError,
    from_loss,
)
from laplace_sampling.data.batches import read
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.solvers.operator import make_dense

QUICK = SGD(epochs=2, min_steps=20, mode_epochs=4, tolerance=1.0)


def loader(case: Case, batch_size: int = 8, **settings) -> DataLoader:
    x, y = case.x, case.given[1]
    if isinstance(y, dict):
        return DataLoader(
            [(x[n], {head: t[n] for head, t in y.items()}) for n in range(len(x))], batch_size, **settings
        )
    return DataLoader(TensorDataset(x, y), batch_size, **settings)


def fitted(case: Case, **settings) -> LinearisedLaplace:
    return laplace_of(case.model, case.likelihood, **settings).fit(loader(case), progress=False)


def posterior_covariance(la: LinearisedLaplace) -> Tensor:
    """`H⁻¹` of what was fitted, dense."""
    prior = la._fitted.posterior.prior
    model = la._fitted.fit.model
    ggn = model.ggn(la._fitted.fit.mode_outputs if la.hessian_at == "mode" else model.network_outputs)
    return torch.linalg.inv(make_dense(ggn) + torch.diag(prior.diagonal().double()))


# The main job -------------------------------------------------------------------------------------------------


# Some of these networks, which are not trained, are best explained without any effect of their weights.
@pytest.mark.filterwarnings("ignore:`fit_hyperparameters` ended at one of:laplace_sampling.ConvergenceWarning")
def test_three_lines(case: Case) -> None:
    la = LinearisedLaplace(case.model, case.likelihood)
    assert la.fit_hyperparameters(loader(case), progress=False, tolerance=1.5) is la
    pred = la.predict(case.x)
    with torch.no_grad():  # attention takes another kernel with gradients
        out = read(case.model(case.x), len(case.x))[0]
    assert torch.equal(pred.outputs, out)
    assert pred.deviations.shape == (64, *out.shape)
    assert pred.log_prob(case.given[1]).shape == (len(case.x),)
    assert la.samples_.shape == (64, la.network.num_parameters)
    assert la.mode_.shape == (la.network.num_parameters,)
    assert len(la.history_) >= 1
    assert 0 < float(la.effective_dimension_.sum()) <= min(la.network.num_parameters, pred.outputs.numel())
    assert float(la.prior_precision_) == la.history_[-1].new_prior_precision[0]


@pytest.mark.parametrize("prior", ["g-prior", "isotropic", "layerwise"])
@pytest.mark.parametrize("linear_model", ["affine", "homogeneous"])
@pytest.mark.parametrize("hessian_at", ["network", "mode"])
def test_predictive_covariance_is_the_dense_one(prior: str, linear_model: str, hessian_at: str) -> None:
    case, num = make_case("classification"), 2000
    la = fitted(
        case, prior=prior, linear_model=linear_model, hessian_at=hessian_at, prior_precision=0.5, num_samples=num
    )
    J = reference.jacobian(case.model, case.x[:3]).flatten(0, 1)
    expected = J @ posterior_covariance(la) @ J.T
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected**2) / num).sqrt()
    assert ((la.predict(case.x[:3]).joint_covariance() - expected).abs() < 5 * error).all()
    # And the curvature was taken where it was asked for.
    J = reference.jacobian(case.model, case.x)
    f = case.model(case.x).detach()
    theta = la.mode_
    if linear_model == "affine":
        theta = theta - la.network.weights
    at = f if hessian_at == "network" else J @ theta + (f if linear_model == "affine" else 0)
    B = reference.curvature(case.likelihood, at, case.y)
    H = reference.ggn(J, B) + torch.diag(la._fitted.posterior.prior.diagonal())
    assert_close(torch.linalg.inv(H), posterior_covariance(la), rtol=1e-4, atol=1e-6)


def test_auto_chooses_by_likelihood_and_size() -> None:
    regression = LinearisedLaplace(make_case("regression").model, "regression")
    assert (regression.linear_model, regression.hessian_at) == ("affine", "mode")
    classification = LinearisedLaplace(make_case("classification").model, "classification")
    assert (classification.linear_model, classification.hessian_at) == ("homogeneous", "mode")
    assert "DenseFeatures" in type(fitted(make_case("classification_many_data"))._fitted.fit.model.features).__name__
    case = make_case("classification")
    assert "NetworkFeatures" in type(fitted(case)._fitted.fit.model.features).__name__
    assert "NetworkFeatures" in type(fitted(case, method="sgd", solver=QUICK)._fitted.fit.model.features).__name__


def test_samples_are_joint_over_inputs() -> None:
    """One weight sample, one function: row k at x does not depend on what else is asked for."""
    case = make_case("regression")
    la = fitted(case)
    together = la.predict(case.x).samples
    apart = torch.cat([la.predict(x[None]).samples for x in case.x], dim=1)
    assert_close(together, apart)
    assert_close(la.predict(case.x, num_samples=5).samples, together[:5])


@pytest.mark.parametrize("method", ["exact", "sgd"])
def test_the_same_seed_gives_the_same_samples_whatever_the_batch_size(method: str) -> None:
    case = make_case("classification_many_data")
    settings = {
        "method": method,
        "solver": SGD(epochs=3, min_steps=30, mode_epochs=4, batch_size=7, tolerance=1.0) if method == "sgd" else None,
        "num_samples": 4,
    }

    def run(batch_size: int, seed: int = 0, **kwargs) -> LinearisedLaplace:
        la = laplace_of(case.model, "classification", seed=seed, **settings)
        return la.fit_hyperparameters(loader(case, batch_size, **kwargs), max_steps=3, tolerance=1.0, progress=False)

    first = run(10)
    for other in (run(4), run(25), run(10, shuffle=True)):
        assert_close(other.samples_, first.samples_, rtol=1e-6, atol=1e-8)
        assert_close(other.prior_precision_, first.prior_precision_, rtol=1e-8, atol=0)
    assert not torch.allclose(run(10, seed=1).samples_, first.samples_)
    state = torch.random.get_rng_state()
    run(10, shuffle=True)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_new_samples_are_new_and_of_the_posterior() -> None:
    case = make_case("classification_many_data")
    la = fitted(case)
    first, second = la.sample(3000), la.sample(3)
    assert second.shape == (3, la.network.num_parameters)
    assert not torch.allclose(first[:3], second)
    assert not torch.allclose(first[:3], la.samples_[:3])
    white = first @ torch.linalg.cholesky(torch.linalg.inv(posterior_covariance(la)))
    error = white.T @ white / 3000 - torch.eye(white.shape[1]).double()
    assert (error.abs() < 5 * (2 / 3000) ** 0.5).all()


def test_g_prior_is_invariant_to_the_scale_before_a_layer_norm() -> None:
    case = make_case("layer_norm")
    case.model[1].eps = 0.0  # exactly invariant only without it
    variances = {}
    for prior in ("g-prior", "isotropic"):
        for factor in (1.0, 0.1, 10.0):
            scaled = copy.deepcopy(case.model)
            with torch.no_grad():
                scaled[0].weight *= factor
                scaled[0].bias *= factor
            assert_close(scaled(case.x), case.model(case.x))
            la = LinearisedLaplace(scaled, "classification", prior=prior, num_samples=16).fit(
                loader(case), progress=False
            )
            J = reference.jacobian(scaled, case.x).flatten(0, 1)
            variances[prior, factor] = (J @ posterior_covariance(la) * J).sum(1)
    for factor in (0.1, 10.0):
        assert_close(variances["g-prior", factor], variances["g-prior", 1.0], rtol=1e-6, atol=0)
        assert not torch.allclose(variances["isotropic", factor], variances["isotropic", 1.0], rtol=0.1)


def test_frozen_weights_are_not_random() -> None:
    case = make_case("frozen_body")
    assert fitted(case).samples_.shape[1] == 28
    la = LinearisedLaplace(case.model, "classification", parameters=["0.*"])
    assert la.network.names == ["0.weight", "0.bias"]


def test_prior_noise_and_starting_values_are_used() -> None:
    case = make_case("regression")
    la = fitted(case, prior=GPrior(floor=0.5), prior_precision=3.0)
    assert la.prior_precision_.tolist() == [3.0]
    assert la.noise_precision_ == 2.5
    assert la._fitted.posterior.prior.num_floored > 0
    named = laplace_of(case.model, "regression", noise_precision=7.0).fit(loader(case), progress=False)
    assert named.noise_precision_ == 7.0
    assert_close(named.predict(case.x).noise_variance, torch.tensor(1 / 7.0).double())
    assert fitted(make_case("classification")).noise_precision_ is None


def test_the_posterior_is_drawn_at_the_tuned_hyperparameters() -> None:
    case, num = make_case("regression_many_data"), 2000
    la = laplace_of(case.model, "regression", num_samples=num, noise_precision=50.0, prior="isotropic")
    la.fit_hyperparameters(loader(case), progress=False, max_steps=200)
    alpha, b = float(la.prior_precision_), float(la.noise_precision_)
    assert alpha == la.history_[-1].new_prior_precision[0]
    assert la.history_[-1].noise_precision == [50.0]  # a single round leads to the end
    assert b < 5
    J = reference.jacobian(case.model, case.x).flatten(0, 1)
    expected = J @ torch.linalg.inv(b * J.T @ J + alpha * torch.eye(3).double()) @ J.T
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected**2) / num).sqrt()
    assert ((la.predict(case.x).joint_covariance() - expected).abs() < 5 * error).all()


@pytest.mark.parametrize("num_data", [1, 2, 12])
@pytest.mark.parametrize("method", ["exact", "sgd"])
@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
def test_very_few_data_and_samples_do_not_blow_up(num_data: int, method: str) -> None:
    case = make_case("regression_many_data")
    model = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    solver = SGD(epochs=2, min_steps=30, mode_epochs=4, max_doublings=1) if method == "sgd" else None
    la = laplace_of(
        model, "regression", prior="layerwise", method=method, noise_precision=100.0, solver=solver, num_samples=4
    )
    data = [(case.x[:num_data], case.y[:num_data])]
    la.fit_hyperparameters(data, num_samples=4, max_steps=4, progress=False)
    assert all(0 < g <= la.network.num_parameters for step in la.history_ for g in step.effective_dimension)
    assert la.predict(case.x).stddev.isfinite().all()
    if num_data > 2 and method == "sgd":  # fewer are interpolated, without noise
        assert 1e-9 < float(la.noise_precision_) < 1e6


def test_ending_at_a_bound_is_said() -> None:
    case = make_case("regression")
    la = laplace_of(case.model, "regression", prior_precision=700.0)
    with pytest.warns(
        ConvergenceWarning, match=r"ended at one of precision_bounds=\(500.0, 1000.0\) for .*\['all'\]"
    ) as record:
        la.fit_hyperparameters(loader(case), precision_bounds=(500.0, 1000.0), progress=False)
    assert record[0].filename == __file__
    with pytest.raises(ValueError, match=r"`precision_bounds` must be positive and in order, but is \(1.0, 0.1\)"):
        la.fit_hyperparameters(loader(case), precision_bounds=(1.0, 0.1), progress=False)


def test_samples_depend_on_the_seed_alone() -> None:
    case = make_case("classification_many_data")
    expected = fitted(case).samples_
    default, state = torch.get_default_dtype(), torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        la = LinearisedLaplace(case.model, "classification").fit(loader(case, shuffle=True), progress=False)
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(la.samples_, expected)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_two_fits_equal_one() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression")
    la.fit_hyperparameters(loader(case), progress=False, max_steps=100)
    la.fit(loader(case), progress=False)
    assert torch.equal(
        la.samples_, LinearisedLaplace(case.model, "regression").fit(loader(case), progress=False).samples_
    )


def test_progress_bars_and_callback(capfd: pytest.CaptureFixture) -> None:
    case, steps = make_case("classification_many_data"), []
    la = laplace_of(case.model, "classification", method="sgd", solver=QUICK)
    la.fit_hyperparameters(loader(case), max_steps=2, tolerance=10.0, num_samples=2, callback=steps.append)
    assert [s.step for s in steps] == [1]
    shown = capfd.readouterr().err
    for label in ("EM", "step 1: mode", "step 1: samples", "64 samples"):
        assert label in shown
    la.fit(loader(case), progress=False)
    assert capfd.readouterr().err == ""


def test_unfinished_em_and_unfinished_samples_warn() -> None:
    case = make_case("regression")
    with pytest.warns(ConvergenceWarning, match=r"stopped after 1 steps, before its tolerance: prior precision went"):
        LinearisedLaplace(case.model, "regression", prior="layerwise").fit_hyperparameters(
            loader(case), max_steps=1, progress=False
        )
    solver = SGD(epochs=1, min_steps=1, tolerance=1e-9, max_doublings=0)
    with pytest.warns(ConvergenceWarning, match=r"samples have not converged: residual .* for all of .*solver=SGD"):
        fitted(case, method="sgd", solver=solver)


def test_repr_tells_the_state() -> None:
    case = make_case("conv_batch_norm")
    la = LinearisedLaplace(case.model, "classification", prior="g-prior")
    assert "P=88" in repr(la)
    assert "not fitted" in repr(la)
    with torch.no_grad():
        case.model[5].weight[:, :4] = 0  # the first channel has no influence
    la.fit(loader(case), progress=False)
    assert "prior_precision_={all: 1}" in repr(la)
    assert "weights floored" in repr(la)


# The network is never changed -----------------------------------------------------------------------------------


def test_network_is_unchanged_by_everything(case: Case) -> None:
    case.model.train()
    list(case.model.modules())[-1].eval()
    before = snapshot(case.model)
    la = laplace_of(case.model, case.likelihood, method="sgd", solver=QUICK, num_samples=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        la.fit_hyperparameters(loader(case), max_steps=2, num_samples=2, progress=False)
    la.predict(case.x)
    la.sample(2)
    la.state_dict()
    assert_unchanged(case.model, before)


class Bomb(nn.Module):
    """Raises in the forward pass number `fuse`."""

    def __init__(self, fuse: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
        self.fuse = SimpleNamespace(left=fuse)  # attributes are put back, and what is in lists

    def forward(self, x: Tensor) -> Tensor:
        self.fuse.left -= 1
        if self.fuse.left <= 0:  # and from then on: what fails once only is tried another way
            raise RuntimeError("boom")
        return self.body(x)


@pytest.mark.parametrize("fuse", [1, 3, 4, 8, 30, 100])
def test_after_an_exception_the_network_is_unchanged_and_nothing_is_lost(fuse: int) -> None:
    case = make_case("classification_many_data")
    model = Bomb(10**9).double().train()
    la = laplace_of(model, "classification", method="sgd", solver=QUICK, num_samples=4)
    la.fit(loader(case), progress=False)
    expected = la.predict(case.x).samples
    before = snapshot(model)
    model.fuse.left = fuse
    with pytest.raises(RuntimeError, match="boom"):
        la.fit_hyperparameters(loader(case), progress=False)
    assert_unchanged(model, before)
    model.fuse.left = 10**9
    assert torch.equal(la.predict(case.x).samples, expected)


# Keeping it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "sgd"])
def test_predictions_after_a_reload_are_the_same_bit_for_bit(case: Case, method: str, tmp_path) -> None:
    la = laplace_of(
        case.model, case.likelihood, method=method, solver=QUICK if method == "sgd" else None, num_samples=4
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        la.fit_hyperparameters(loader(case), max_steps=2, num_samples=2, progress=False)
    la.save(tmp_path / "la.pt")
    state = torch.load(tmp_path / "la.pt", weights_only=True)
    assert all(isinstance(value, Tensor) for value in state.values())
    # The function of a loss is not in the file.
    given = case.likelihood if case.likelihood.name == "custom" else None
    again = LinearisedLaplace.load(tmp_path / "la.pt", copy.deepcopy(case.model), given)
    pred, expected = again.predict(case.x), la.predict(case.x)
    assert torch.equal(pred.samples, expected.samples)
    assert torch.equal(pred.log_prob(case.given[1]), expected.log_prob(case.given[1]))
    assert again.history_ == la.history_
    assert torch.equal(again.mode_, la.mode_)
    assert torch.equal(again.prior_precision_, la.prior_precision_)
    assert torch.equal(again.effective_dimension_, la.effective_dimension_)
    other = LinearisedLaplace(case.model, case.likelihood)
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.predict(case.x).samples, expected.samples)
    assert other.state_dict().keys() == la.state_dict().keys()


def test_other_weights_are_refused() -> None:
    case = make_case("conv_batch_norm")
    la = fitted(case)
    state = la.state_dict()
    other = copy.deepcopy(case.model)
    other[1].running_var += 1e-6
    with pytest.raises(
        ValueError, match=r"`load_state_dict`: the weights or buffers of the model are not those of the fit"
    ):
        LinearisedLaplace(other, "classification").load_state_dict(state)
    with torch.no_grad():
        case.model[0].weight += 1e-6
    with pytest.raises(ValueError, match=r"`predict`: the weights or buffers.*or fit again"):
        la.predict(case.x)
    case.model[0].weight.data.copy_(other[0].weight)
    la.predict(case.x)  # put back: as good as before
    case.model[0].weight.data.mul_(2)  # behind autograd's back
    with pytest.raises(ValueError, match="not those of the fit"):
        la.predict(case.x)


def test_states_that_do_not_fit_are_refused(tmp_path) -> None:
    case = make_case("classification")
    state = fitted(case).state_dict()
    with pytest.raises(
        ValueError, match=r"of 4 random parameters, 0.weight.*has 2, 2.weight, 2.bias.*same `parameters=`"
    ):
        LinearisedLaplace(case.model, "classification", parameters="2.*").load_state_dict(state)
    with pytest.raises(ValueError, match="of likelihood 'classification', but this LinearisedLaplace has 'binary'"):
        LinearisedLaplace(case.model, "binary").load_state_dict(state)
    for damaged in ({**state, "samples": state["samples"][:, :3]}, {k: v for k, v in state.items() if k != "samples"}):
        with pytest.raises(ValueError, match=r"incomplete or damaged: entries \['samples'\]"):
            LinearisedLaplace(case.model, "classification").load_state_dict(damaged)
    with pytest.raises(ValueError, match="no entry 'settings'"):
        LinearisedLaplace(case.model, "classification").load_state_dict({"weight": torch.zeros(1)})


def test_subsets_and_noise_survive_a_reload(tmp_path) -> None:
    case = make_case("regression_per_output")
    likelihood = Gaussian(torch.tensor([1.0, 2.0, 3.0]), learn=False)
    la = LinearisedLaplace(case.model, likelihood, parameters="2.*", prior="layerwise").fit(
        loader(case), progress=False
    )
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    assert again.network.names == ["2.weight", "2.bias"]
    assert again.noise_precision_.tolist() == [1.0, 2.0, 3.0]
    assert not again._fitted.posterior.likelihood.learn
    with pytest.raises(NotFittedError, match=r"`sample` needs the training data.*call `fit\(loader\)`"):
        again.sample(2)


def test_a_loaded_object_fits_as_the_saved_one_would(tmp_path) -> None:
    case = make_case("regression")
    settings = {"prior": GPrior(num_probes=7), "prior_precision": 7.0, "num_samples": 5, "seed": 3, "method": "sgd"}
    la = laplace_of(case.model, "regression", noise_precision=0.1, solver=QUICK, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        la.fit_hyperparameters(loader(case), max_steps=2, progress=False)
        la.save(tmp_path / "la.pt")
        again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
        assert torch.equal(again.samples_, la.samples_)
        for one in (la, again):
            one.fit(loader(case), progress=False)
    assert torch.equal(again.samples_, la.samples_)
    assert repr(again) == repr(la)


def test_a_prior_of_ones_own_must_be_given_to_load(tmp_path) -> None:
    class Mine(IsotropicPrior):
        pass

    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression", prior=Mine()).fit(loader(case), progress=False)
    la.save(tmp_path / "la.pt")
    with pytest.raises(ValueError, match="the prior was a Mine, which is not of this library; give it as `prior=`"):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model, prior=Mine())
    assert torch.equal(again.samples_, la.samples_)


def test_a_likelihood_of_ones_own_is_given_to_load(tmp_path) -> None:
    """Whatever its name."""
    x, y = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 1)
    for name in ("mine", "regression"):
        own, model = from_loss(lambda f, t: ((f - t) ** 2).sum(), name), nn.Linear(2, 1)
        la = LinearisedLaplace(model, own, num_samples=2).fit([(x, y)], progress=False)
        la.save(tmp_path / "posterior.pt")
        with pytest.raises(ValueError, match=f"'{name}' was a LossLikelihood, .*; give it as `likelihood=`"):
            LinearisedLaplace.load(tmp_path / "posterior.pt", model)
        loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", model, likelihood=own)
        assert torch.equal(loaded.predict(x).samples, la.predict(x).samples)
    with pytest.raises(
        ValueError, match=r"is of likelihood 'regression', a LossLikelihood, but .* 'regression', a Gaus"
    ):
        LinearisedLaplace.load(tmp_path / "posterior.pt", model, likelihood="regression")


# Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda la: la.predict(torch.zeros(1, 3)),
        lambda la: la.sample(1),
        lambda la: la.samples_,
        lambda la: la.history_,
        lambda la: la.state_dict(),
        lambda la: la.save("nowhere"),
    ],
)
def test_use_before_fit(use) -> None:
    la = LinearisedLaplace(make_case("classification").model, "classification")
    with pytest.raises(NotFittedError, match=r"needs a fitted posterior: call `fit_hyperparameters\(loader\)`, `fit"):
        use(la)
    assert not hasattr(la, "samples_")  # as scikit-learn's checks expect of fitted attributes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"likelihood": "ordinal"}, "`likelihood='ordinal'` is not known"),
        ({"prior": "flat"}, "`prior='flat'` is not known"),
        ({"linear_model": "quadratic"}, r"`linear_model='quadratic'` is not known; use one of \['auto', 'affine'"),
        ({"hessian_at": "map"}, "`hessian_at='map'` is not known"),
        ({"method": "krylov", "solver": SGD()}, r"`solver=SGD\(...\)` is for method='sgd', but the method is 'cg'"),
        (
            {"method": "sgd", "solver": DualCG()},
            r"`solver=DualCG\(...\)` is for method='dual', but the method is 'sgd'",
        ),
        ({"method": "adam"}, "`method='adam'` is not known"),
        ({"prior_precision": 0.0}, "`prior_precision` must be positive and finite, but is 0.0"),
        ({"seed": -1}, "`seed` must not be negative, but is -1"),
        ({"num_samples": 1}, "`num_samples` must be at least 2, but is 1"),
        ({"parameters": "nothing"}, "match no parameter of the model"),
    ],
)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        laplace_of(make_case("classification").model, **{"likelihood": "classification", **settings})


def test_targets_that_are_zero_end_at_a_bound_and_not_in_an_error() -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, Gaussian(1.0, learn=False), method="krylov", linear_model="homogeneous")
    with pytest.warns(ConvergenceWarning, match="at the upper one the data show no effect of these weights"):
        la.fit_hyperparameters([(case.x, torch.zeros_like(case.given[1]))], progress=False)


def test_a_solver_of_another_kind() -> None:
    with pytest.raises(TypeError, match="`solver` must be an SGD or a but is a str"):
        laplace_of(make_case("classification").model, "classification", solver="adam")


def test_the_exact_method_says_what_it_would_need() -> None:
    model = nn.Sequential(nn.Linear(3, 50_000), nn.Linear(50_000, 4))
    data = [(torch.randn(100, 3), torch.zeros(100).long())] * 50
    with pytest.raises(ValueError, match=r"method=\"exact\" would need about [\d.]+ GiB for 5000 data, 4 outputs"):
        LinearisedLaplace(model, "classification", method="exact").fit(data, progress=False)


CLASSES = make_case("classification_many_data")


class Augmented(Dataset):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int):
        return CLASSES.x[i] + torch.rand(2), CLASSES.y[i]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([(CLASSES.x, CLASSES.y.double())], TypeError, r"labels must be integers, but have dtype torch.float64"),
        ([(CLASSES.x, CLASSES.y + 5)], ValueError, r"must lie between 0 and 2 for 3 outputs"),
        ([(CLASSES.x, CLASSES.y[:, None])], ValueError, r"must have shape \[25\] for outputs .*, but have \[25, 1\]"),
        ([(CLASSES.x / 0, CLASSES.y)], ValueError, r"Batch 0 .* has NaN or infinity in its inputs"),
        ([], ValueError, "The loader is empty"),
        (iter([(CLASSES.x, CLASSES.y)]), TypeError, "one-shot iterator"),
        (DataLoader(Augmented(), batch_size=3), ValueError, "different data at each pass"),
    ],
)  # fmt: skip
def test_bad_data_are_refused_and_nothing_is_lost(data, error, message: str) -> None:
    la = fitted(CLASSES)
    expected = la.samples_
    with pytest.raises(error, match=message):
        la.fit_hyperparameters(data, progress=False)
    assert la.samples_ is expected


def test_regression_targets_of_another_shape() -> None:
    case = make_case("regression")
    with pytest.raises(ValueError, match=r"must have the shape of the model's output, \[7, 1\], but have \[7\]"):
        LinearisedLaplace(case.model, "regression").fit([(case.x, case.y[:, 0])], progress=False)


def test_nan_in_weights_outputs_and_loss() -> None:
    case = make_case("classification_many_data")
    broken = copy.deepcopy(case.model)
    with torch.no_grad():
        broken.bias[0] = float("nan")
    with pytest.raises(ValueError, match="weights of the model contain NaN or infinity"):
        LinearisedLaplace(broken, "classification").fit(loader(case), progress=False)

    class Overflowing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (x[:, :1] - case.x[7, :1])

    model = Overflowing(2, 3).double()
    with pytest.raises(ValueError, match=r"gives NaN or infinity on batch 2 \(counted from 0\)"):
        LinearisedLaplace(model, "classification").fit(loader(case, 3), progress=False)
    huge = copy.deepcopy(make_case("regression"))
    with pytest.raises(ValueError, match="loss of the model on the data is not finite"):
        LinearisedLaplace(huge.model, "regression").fit([(huge.x, huge.y + 1e300)], progress=False)


def test_a_model_that_is_random_in_evaluation_mode() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, training=True)

    case = make_case("classification_many_data")
    with pytest.raises(ValueError, match=r"different outputs for the same input in evaluation mode.*F.dropout"):
        LinearisedLaplace(Noisy(2, 3).double(), "classification").fit(loader(case), progress=False)


def test_a_model_whose_output_is_not_a_tensor() -> None:
    case = make_case("classification_many_data")

    class Tuple(nn.Linear):
        def forward(self, x: Tensor):  # pyright: ignore
            return super().forward(x), x

    with pytest.raises(TypeError, match="returned a tuple, not a tensor"):
        LinearisedLaplace(Tuple(2, 3).double(), "classification").fit(loader(case), progress=False)


def test_one_datum_without_the_axis_of_the_batch() -> None:
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    la = LinearisedLaplace(nn.Linear(3, 3), "classification", num_samples=2).fit([(x, y)], progress=False)
    with pytest.raises(
        ValueError, match=r"gives outputs \[3\] for x, but those of the training data were \[N, 3\]. .*`x\[None\]`"
    ):
        la.predict(x[0])
    assert la.predict(x[0][None]).probs.shape == (1, 3)


def test_a_model_that_was_moved_after_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("classification")
    la = fitted(case, num_samples=2)
    monkeypatch.setattr(type(la.network), "device", torch.device("cuda:0"))
    for call in (lambda: la.predict(case.x), lambda: la.sample(1), la.log_marginal_likelihood):
        with pytest.raises(
            ValueError, match=r"the model is on cuda:0, but was on cpu at the fit. Move it back; or `save`"
        ):
            call()


def test_bad_predictions_and_samples() -> None:
    la = fitted(CLASSES)
    with pytest.raises(
        TypeError, match=r"`predict\(x\)` needs a tensor, or a tuple or dictionary of them, but got ndarray"
    ):
        la.predict(CLASSES.x.numpy())
    with pytest.raises(ValueError, match=r"x contains NaN or infinity"):
        la.predict(CLASSES.x / 0)
    with pytest.raises(ValueError, match=r"needs a batch of inputs .* got \[0, 2\]"):
        la.predict(CLASSES.x[:0])
    with pytest.raises(ValueError, match=r"`predict\(num_samples=65\)`: there are 64 samples; construct"):
        la.predict(CLASSES.x, num_samples=65)
    with pytest.raises(ValueError, match=r"`sample\(num_samples\)` needs at least 1, got 0"):
        la.sample(0)
    with pytest.raises(ValueError, match="max_steps and num_samples of at least 1 and a positive tolerance"):
        la.fit_hyperparameters(loader(CLASSES), max_steps=0)


def test_float32_networks() -> None:
    case = make_case("conv_batch_norm")
    model = copy.deepcopy(case.model).float()
    la = LinearisedLaplace(model, "classification")
    la.fit([(case.x.float(), case.y)], progress=False)
    double = fitted(case)
    pred = la.predict(case.x.float())
    assert pred.samples.dtype == la.samples_.dtype == torch.float32
    assert_close(pred.stddev.double(), double.predict(case.x).stddev, rtol=1e-3, atol=1e-4)


def test_inference_mode_around_everything_and_no_gradient() -> None:
    expected = fitted(CLASSES, method="sgd", solver=QUICK).predict(CLASSES.x)
    with torch.inference_mode():
        la = fitted(CLASSES, method="sgd", solver=QUICK)
        assert_close(la.predict(CLASSES.x).samples, expected.samples)
        assert la.sample(2).isfinite().all()
    assert not expected.samples.requires_grad


@pytest.mark.parametrize("name", ["regression_many_data", "classification_many_data"])
def test_krylov_and_ciq_agree_with_the_exact_method(name: str) -> None:
    case = make_case(name)
    settings = {"prior": "isotropic", "prior_precision": 2.0, "num_samples": 200, "hessian_at": "network"}
    exact, krylov, ciq = (
        laplace_of(case.model, case.likelihood, method=method, **settings).fit(case.batches, progress=False)
        for method in ("exact", "krylov", "ciq")
    )
    torch.testing.assert_close(krylov.samples_, exact.samples_, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(krylov.sample(3), exact.sample(3), rtol=1e-6, atol=1e-8)
    # γ ≤ P: the standard error of either estimate is at most √(2γ/K)
    gamma = float(exact.effective_dimension_.sum())
    assert float(ciq.effective_dimension_.sum()) == pytest.approx(gamma, abs=5 * (2 * gamma / 200) ** 0.5)
    a, b = exact.log_marginal_likelihood(), krylov.log_marginal_likelihood()
    assert float(b) == pytest.approx(float(a), rel=1e-4)  # the mode is as good as its tolerance
    assert a.exact
    assert a.standard_error == 0
    assert a.lower_bound <= a.value
    assert a.value == pytest.approx(-a.data_fit - a.complexity)
    curves = [la.evidence_path(decades=3, num=7) for la in (exact, krylov)]
    torch.testing.assert_close(curves[0].log_marginal_likelihood, curves[1].log_marginal_likelihood, rtol=1e-3, atol=0)
    torch.testing.assert_close(curves[0].effective_dimension, curves[1].effective_dimension, rtol=1e-5, atol=0)


def test_evidence_is_balanced_at_its_optimum() -> None:
    case = make_case("regression_many_data")
    la = laplace_of(case.model, "regression", noise_at="mode", method="krylov")
    evidence = la.fit_hyperparameters(case.batches, progress=False).log_marginal_likelihood()
    assert evidence.balance == pytest.approx(1, abs=1e-6)
    curves = la.evidence_path(decades=1, num=41)
    assert int(curves.log_marginal_likelihood.argmax()) in (19, 20, 21)
    assert curves.at == pytest.approx(float(la.prior_precision_))


def test_a_fit_is_diagnosed_in_words() -> None:
    case = make_case("classification_many_data")
    la = LinearisedLaplace(case.model, "classification", method="krylov").fit_hyperparameters(
        case.batches, progress=False
    )
    assert la.diagnose().ok
    assert "Verdict: nothing is wrong" in str(la.diagnose())
    assert "'cg': as asked for" in repr(la)
    with pytest.warns(ConvergenceWarning, match="The samples have not converged"):
        la = laplace_of(
            case.model,
            "classification",
            method="sgd",
            solver=SGD(epochs=1, min_steps=1, max_doublings=0, tolerance=1e-9),
        ).fit(case.batches, progress=False)
    assert not la.diagnose().ok


@pytest.mark.parametrize("call", ["log_marginal_likelihood", "evidence_path", "diagnose"])
def test_what_needs_the_training_data_says_so(call: str, tmp_path) -> None:
    case = make_case("classification_many_data")
    with pytest.raises(NotFittedError, match=call):
        getattr(LinearisedLaplace(case.model, "classification"), call)()
    LinearisedLaplace(case.model, "classification").fit(case.batches, progress=False).save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    with pytest.raises(NotFittedError, match=f"`{call}` needs the"):
        getattr(loaded, call)()


def test_a_path_of_evidence_needs_a_range() -> None:
    case = make_case("classification_many_data")
    la = LinearisedLaplace(case.model, "classification").fit(case.batches, progress=False)
    with pytest.raises(ValueError, match="needs 0 < decades <= 12"):
        la.evidence_path(decades=0)


def test_the_method_follows_size_and_memory() -> None:
    model = nn.Linear(10, 5)

    def chosen(num_data: int, size: int, **settings) -> str:
        features = DenseFeatures(torch.zeros(1, 5, 1).expand(num_data, 5, size))
        return make_plan("auto", features, 64, settings.get("max_memory")).method

    assert chosen(100, 55) == "exact"
    assert chosen(5000, 3000) == "krylov"
    assert chosen(30_000, 3000) == "svrg"
    assert chosen(5000, 3000, max_memory=4 * 3000 * 500) == "krylov"
    with pytest.raises(ValueError, match="`max_memory` must be a positive number"):
        laplace_of(model, "classification", max_memory=-1)


@pytest.mark.parametrize("method", ["exact", "krylov", "dual"])
def test_noise_explains_what_the_network_leaves(method: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 6, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(80, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 1).double()  # off the minimum of its loss
    with torch.no_grad():
        model.weight.fill_(0.8)
        model.bias.zero_()
    settings = {"prior": "isotropic", "method": method}
    la = laplace_of(model, "regression", **settings)
    la.fit_hyperparameters([(x, y)], max_steps=30, num_samples=64, progress=False)
    left = (la.noise_precision_ * (y - model(x).detach()).square().sum()).item()
    # γ of EM's samples has a noise of its own.
    assert left == pytest.approx(80 - float(la.effective_dimension_.sum()), abs=1e-6 if method == "exact" else 2.0)
    other = laplace_of(model, "regression", noise_at="mode", **settings)
    other.fit_hyperparameters([(x, y)], max_steps=30, num_samples=64, progress=False)
    assert float(other.noise_precision_) > 1.2 * float(la.noise_precision_)
    other.save(tmp_path / "state.pt")
    loaded = LinearisedLaplace.load(tmp_path / "state.pt", model)
    assert loaded.noise_at == "mode"
    assert isinstance(loaded.likelihood, Gaussian)
    assert loaded.likelihood.noise_at == "mode"
    with pytest.raises(ValueError, match="noise_at"):
        laplace_of(model, "regression", noise_at="data")
