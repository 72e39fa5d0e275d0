"""Posteriors in files, and which states are refused."""

import copy
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
from cases import Case, make_case
from flat_settings import QUICK, fitted, laplace_of, loader
from problems import trained
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import (
    ConvergenceWarning,
    Data,
    Evidence,
    Gaussian,
    GPrior,
    IsotropicPrior,
    Krylov,
    LinearisedLaplace,
    NotFittedError,
    from_loss,
)


@pytest.mark.parametrize("method", ["exact", pytest.param("sgd", marks=pytest.mark.slow)])
def test_predictions_after_a_reload_are_the_same_bit_for_bit(case: Case, method: str, tmp_path) -> None:
    la = laplace_of(
        case.model, case.likelihood, method=method, solver=QUICK if method == "sgd" else None, num_samples=4
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        la.fit_hyperparameters(loader(case), criterion=Evidence(max_steps=2, num_samples=2), progress=False)
        mode = la.mode_  # found when it is asked for, and then in the file
    la.save(tmp_path / "la.pt")
    torch.load(tmp_path / "la.pt", weights_only=True)  # nothing that may run code
    # The function of a loss is not in the file.
    given = case.likelihood if case.likelihood.name == "custom" else None
    again = LinearisedLaplace.load(tmp_path / "la.pt", copy.deepcopy(case.model), given)
    pred, expected = again.predict(case.x), la.predict(case.x)
    assert torch.equal(pred.samples, expected.samples)
    assert torch.equal(pred.log_prob(case.given[1]), expected.log_prob(case.given[1]))
    assert again.history_ == la.history_
    assert torch.equal(again.mode_, mode)
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
    with pytest.raises(ValueError, match=r"load_state_dict.*buffers"):
        LinearisedLaplace(other, "classification").load_state_dict(state)
    expected = la.predict(case.x).samples
    case.model[0].weight.data.mul_(2)
    assert torch.equal(la.predict(case.x).samples, expected)
    with pytest.raises(ValueError, match=r"load_state_dict.*buffers"):
        la.load_state_dict(state)
    assert torch.equal(la.predict(case.x).samples, expected)


def test_states_that_do_not_fit_are_refused(tmp_path) -> None:
    case = make_case("classification")
    state = fitted(case).state_dict()
    with pytest.raises(ValueError, match="`parameters=`"):
        LinearisedLaplace(case.model, "classification", parameters="2.*").load_state_dict(state)
    with pytest.raises(ValueError, match="'binary'"):
        LinearisedLaplace(case.model, "binary").load_state_dict(state)
    posterior = state["posterior"]
    short, without = {**posterior, "samples": posterior["samples"][:, :3]}, dict(posterior)
    del without["samples"]
    for damaged in (short, without):
        with pytest.raises(ValueError, match="'samples'"):
            LinearisedLaplace(case.model, "classification").load_state_dict({**state, "posterior": damaged})
    with pytest.raises(ValueError, match="entry 'format'"):
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
    with pytest.raises(NotFittedError, match=r"fit\(loader\)"):
        again.sample(2)


def test_a_loaded_object_fits_as_the_saved_one_would(tmp_path) -> None:
    case = make_case("regression")
    settings = {"prior": GPrior(num_probes=7), "prior_precision": 7.0, "num_samples": 5, "seed": 3, "method": "sgd"}
    la = laplace_of(case.model, "regression", noise_precision=0.1, solver=QUICK, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        la.fit_hyperparameters(loader(case), criterion=Evidence(max_steps=2), progress=False)
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
    with pytest.raises(ValueError, match="Mine"):
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
        with pytest.raises(ValueError, match=f"'{name}'"):
            LinearisedLaplace.load(tmp_path / "posterior.pt", model)
        loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", model, likelihood=own)
        assert torch.equal(loaded.predict(x).samples, la.predict(x).samples)
    with pytest.raises(ValueError, match="Gaussian"):
        LinearisedLaplace.load(tmp_path / "posterior.pt", model, likelihood="regression")


@pytest.mark.parametrize("method", ["exact", "krylov", "dual"])
def test_weights_of_data_leave_a_posterior_that_can_be_calibrated(method: str, tmp_path) -> None:
    case = trained()
    weights = torch.linspace(0.5, 2, len(case.x)).double()
    la = LinearisedLaplace(case.model, "regression", method=method, num_samples=4)
    la.fit_hyperparameters(case.batches, data=Data(weights=weights), progress=False)
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    scales = [fitted.calibrate([(case.x + 0.1, case.y)]).scale_ for fitted in (la, again)]
    assert scales[0] == pytest.approx(scales[1])
    la.fit_hyperparameters(case.batches, data=Data(noise_variances=1 / weights), progress=False)
    with pytest.raises(ValueError, match="noise_variances"):
        la.calibrate([(case.x, case.y)])


def test_a_method_with_settings_that_are_no_json_is_saved_by_its_name(tmp_path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(Krylov):
        target: torch.Tensor | None = None

    case = trained()
    mine = Mine(target=torch.ones(2))
    la = LinearisedLaplace(case.model, "regression", method=mine, num_samples=4).fit(case.batches, progress=False)
    la.save(tmp_path / "la.pt")
    with pytest.raises(ValueError, match="Mine"):
        LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model, method=mine)
    assert torch.equal(again.predict(case.x).samples, la.predict(case.x).samples)


class Activated(nn.Module):
    """The activation is chosen by code, so that no module shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.last(self.act(self.first(x)))


class Rectified(Activated):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


@pytest.fixture
def activated() -> tuple[LinearisedLaplace, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = Activated()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    x = torch.randn(12, 2, generator=generator)
    return LinearisedLaplace(model, "regression", method="krylov").fit([(x, x[:, :1])], progress=False), x


_OTHER_FUNCTION = r"^`{}`.*derivatives"


def test_load_refuses_the_same_weights_with_another_function(activated, tmp_path) -> None:
    la, x = activated
    la.save(tmp_path / "la.pt")
    expected = la.predict(x).samples
    swapped, other = copy.deepcopy(la.network.source), Rectified()
    swapped.act = nn.ReLU()
    other.load_state_dict(la.network.source.state_dict())
    for model in (swapped, other):
        with pytest.raises(ValueError, match=_OTHER_FUNCTION.format("load")):
            LinearisedLaplace.load(tmp_path / "la.pt", model)
        with pytest.raises(ValueError, match=_OTHER_FUNCTION.format("load_state_dict")):
            LinearisedLaplace(model, "regression").load_state_dict(la.state_dict())
    with torch.no_grad():
        swapped.last.bias += 1  # both are others
    with pytest.raises(ValueError, match=r"^(?!.*derivatives).*buffers"):
        LinearisedLaplace.load(tmp_path / "la.pt", swapped)
    other.forward = lambda x, y: x
    with pytest.raises(ValueError, match="'y'"):
        LinearisedLaplace.load(tmp_path / "la.pt", other)
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", copy.deepcopy(la.network.source))
    assert torch.equal(loaded.predict(x).samples, expected)


@pytest.mark.parametrize("reloaded", [False, True])
def test_predictions_are_of_the_function_of_the_fit(activated, reloaded: bool, tmp_path) -> None:
    la, x = activated
    model = la.network.source
    if reloaded:
        la.save(tmp_path / "la.pt")
        la = LinearisedLaplace.load(tmp_path / "la.pt", model)
    expected, rows = la.predict(x).samples, []
    model.act = nn.ReLU()
    model.first.register_forward_hook(lambda module, args, output: rows.append(len(output)))
    assert torch.equal(la.predict(x).samples, expected)
    assert torch.equal(pickle.loads(pickle.dumps(la.predict(x))).samples, expected)
    assert not rows  # the model itself is not run


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "krylov"},
        {"method": "kfac"},
        {"method": "exact"},
        {"method": "exact", "parameters": "last_layer"},
        {"method": "exact", "parameters": ["2.bias"]},
    ],
    ids=["krylov", "kfac", "observation space", "last layer", "weight space"],
)
def test_a_file_without_data_holds_no_row_of_them(settings: dict, tmp_path) -> None:
    case = make_case("regression_per_output")
    x, y = case.x[:6], case.y[:6].double()  # 18 numbers, for 21 weights in the last layer
    la = LinearisedLaplace(case.model, "regression", num_samples=50, **settings).fit([(x, y)], progress=False)
    with torch.no_grad():
        of_the_layer = case.model[:2](x)
    x_new = 2 * x

    def held(include_data: bool) -> list[int]:
        """How many data of each kind are in the file."""
        la.save(tmp_path / "la.pt", include_data=include_data)
        content = (tmp_path / "la.pt").read_bytes()
        return [sum(row.numpy().tobytes() in content for row in kind) for kind in (x, of_the_layer, y)]

    whole = settings["method"] == "exact" and settings.get("parameters") != ["2.bias"]
    # At most four inputs; all data where exact covariances are made of them.
    assert held(True) == [6 if whole else 4, 0, 6 if whole else 0]
    expected = LinearisedLaplace.load(tmp_path / "la.pt", case.model).predict(x_new)
    stddev = expected.stddev
    assert held(False) == [0, 0, 0]
    found = LinearisedLaplace.load(tmp_path / "la.pt", case.model).predict(x_new)
    assert_close(found.deviations, expected.deviations)
    if whole:  # by samples, of which there are 50
        assert_close(found.variance, (found.deviations**2).mean(0))
        assert 0 < float((found.stddev / stddev - 1).abs().max()) < 5 * 100**-0.5
    else:
        assert_close(found.stddev, stddev)


def test_what_a_file_without_data_cannot_do(activated, tmp_path) -> None:
    la, x = activated
    la.save(tmp_path / "la.pt", include_data=False)
    other = Rectified()
    other.load_state_dict(la.network.source.state_dict())
    LinearisedLaplace.load(tmp_path / "la.pt", other)  # has no data on which the two differ
    again = LinearisedLaplace.load(tmp_path / "la.pt", la.network.source)
    with pytest.raises(ValueError, match="example="):
        again.to_module()
    exact = LinearisedLaplace(la.network.source, "regression", method="exact").fit([(x, x[:, :1])], progress=False)
    exact.load_state_dict(exact.state_dict(include_data=False))
    for call in ("sample", "log_marginal_likelihood", "leave_one_out"):
        with pytest.raises(NotFittedError, match=rf"`{call}` needs the training data.*fit\(loader\)"):
            getattr(exact, call)(*([1] if call == "sample" else []))
    with torch.no_grad():
        la.network.source.last.bias += 1
    with pytest.raises(ValueError, match="buffers"):
        LinearisedLaplace.load(tmp_path / "la.pt", la.network.source)


def test_scores_of_a_calibration_stay_without_its_data(tmp_path) -> None:
    """One number for each target, so that intervals keep their guarantee."""
    case = make_case("regression")
    la = LinearisedLaplace(case.model, "regression", method="krylov").fit(loader(case), progress=False)
    la.calibrate_conformal(loader(case))
    la.save(tmp_path / "la.pt", include_data=False)
    again = LinearisedLaplace.load(tmp_path / "la.pt", case.model)
    for found, expected in zip(again.predict(case.x).interval(0.6), la.predict(case.x).interval(0.6), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("method", ["exact", "kfac", "krylov", "subset"])
def test_a_fitted_object_is_pickled(method: str) -> None:
    case = make_case("regression")
    la = LinearisedLaplace(case.model, case.given[0], method=method, num_samples=4)
    la.fit_hyperparameters(case.batches, budget=None, progress=False, callback=lambda step: None)
    again = pickle.loads(pickle.dumps(la))
    assert torch.equal(again.predict(case.x).variance, la.predict(case.x).variance)
    assert_close(again.sample(2), la.sample(2))
