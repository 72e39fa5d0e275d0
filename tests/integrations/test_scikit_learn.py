import copy
import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn

from laplace_sampling import CalibrationWarning, ConvergenceWarning, GPrior, LinearisedLaplace

pytest.importorskip("sklearn", reason="the extra `scikit_learn` is not installed")

from sklearn.datasets import load_diabetes
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from laplace_sampling.integrations.scikit_learn import LaplaceClassifier, LaplaceRegressor

RNG = np.random.RandomState(0)
X = RNG.randn(40, 3)
Y = np.sin(X[:, 0]) + 0.5 * X[:, 1] + 0.1 * RNG.randn(40)
LABELS = np.array(["low", "middle", "high"])[np.digitize(Y + 0.3 * RNG.randn(40), [-0.5, 0.5])]
TWO = np.where(Y + 0.3 * RNG.randn(40) > 0, 7, 3)
NEW = RNG.randn(6, 3)
QUICK = {"max_epochs": 20, "lr": 0.01, "weight_decay": 0.0, "num_samples": 8}


def network(outputs: int = 1, *last: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs), *last).double()


class First(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., 0]


def weights_of(module: nn.Module) -> np.ndarray:
    return nn.utils.parameters_to_vector(module.parameters()).detach().numpy().copy()


# The data of some checks are noise, or perfectly separated.
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
@parametrize_with_checks(
    [
        LaplaceRegressor(**QUICK),
        LaplaceClassifier(**QUICK),
        LaplaceRegressor(**{**QUICK, "weight_decay": "auto"}),
    ]
)
@pytest.mark.slow
def test_conventions_of_scikit_learn(estimator, check) -> None:
    check(estimator)


def test_a_regression_is_that_of_the_laplace_approximation_of_the_network() -> None:
    module = network()
    settings = {"prior": GPrior(2.0), "parameters": "last_layer", "method": "exact", "num_samples": 12}
    regressor = LaplaceRegressor(module, max_epochs=0, random_state=5, **settings).fit(X, Y)
    seed = np.random.RandomState(5).randint(2**31 - 1)
    la = LinearisedLaplace(module, "regression", seed=seed, **settings)
    data = [(torch.as_tensor(X), torch.as_tensor(Y)[:, None])]
    pred = la.fit_hyperparameters(data, progress=False).predict(torch.as_tensor(NEW))
    mean, std = regressor.predict(NEW, return_std=True)
    assert_allclose(mean, module(torch.as_tensor(NEW)).detach()[:, 0])
    assert_allclose(regressor.predict(NEW), mean)
    assert_allclose(std, pred.observation_variance.sqrt()[:, 0])
    _, function = regressor.predict(NEW, return_std=True, noise=False)
    assert_allclose(function, pred.stddev[:, 0])
    assert_allclose(std**2 - function**2, 1 / float(la.noise_precision_))
    assert regressor.laplace_.samples_.shape == la.samples_.shape
    assert_allclose(regressor.laplace_.samples_, la.samples_)
    assert regressor.n_features_in_ == 3


def test_the_default_is_to_include_the_noise_that_is_learnt() -> None:
    rng = np.random.RandomState(0)
    x = rng.uniform(-1, 1, (300, 1))
    _, std = LaplaceRegressor(**QUICK).fit(x, x[:, 0] + 0.3 * rng.randn(300)).predict([[0.0]], return_std=True)
    # The relative standard error of a standard deviation of 300 data is 4 %.
    assert_allclose(std, 0.3, rtol=0.15)


def test_samples_are_joint() -> None:
    regressor = LaplaceRegressor(network(), max_epochs=0, num_samples=12).fit(X, Y)
    pred = regressor.laplace_.predict(torch.as_tensor(NEW))
    eps = np.random.RandomState(3).standard_normal((12, 5)) / 12**0.5
    expected = regressor.predict(NEW)[:, None] + pred.deviations[:, :, 0].T.numpy() @ eps
    assert_allclose(regressor.sample_y(NEW, 5, random_state=3, noise=False), expected)
    draws = regressor.sample_y(NEW, 40_000, random_state=1) - regressor.predict(NEW)[:, None]
    flat = pred.deviations[:, :, 0]
    covariance = (flat.T @ flat / 12 + torch.eye(6) * pred.noise_variance).numpy()
    # The variance of an entry of an empirical covariance is (c_ij² + c_ii c_jj)/n; five standard errors.
    error = np.sqrt((covariance**2 + np.outer(np.diag(covariance), np.diag(covariance))) / 40_000)
    assert (np.abs(draws @ draws.T / 40_000 - covariance) < 5 * error).all()
    assert_array_equal(regressor.sample_y(NEW), regressor.sample_y(NEW, 1, 0))
    assert regressor.sample_y(NEW).shape == (6, 1)


def test_several_targets_have_a_noise_each() -> None:
    rng = np.random.RandomState(1)
    y = np.stack([Y, 100 * X[:, 2] + 20 * rng.randn(40)], 1)
    regressor = LaplaceRegressor(lr=0.01, num_samples=8, weight_decay=0.0).fit(X, y)
    mean, std = regressor.predict(NEW, return_std=True)
    assert mean.shape == std.shape == (6, 2)
    noise = regressor.laplace_.noise_precision_
    assert noise.shape == (2,)
    _, function = regressor.predict(NEW, return_std=True, noise=False)
    assert_allclose(std**2 - function**2, (1 / noise).expand(6, 2))
    draws = regressor.sample_y(NEW, 20_000)
    assert draws.shape == (6, 2, 20_000)
    pred = regressor.laplace_.predict(torch.as_tensor(NEW))
    variance = (pred.deviations**2).mean(0) + 1 / noise
    assert_allclose(draws.var(-1), variance, rtol=0.06)
    assert_allclose(draws.mean(-1), mean, atol=5 * float(variance.max() / 20_000) ** 0.5)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_module_is_copied_and_trained_by_adam(decay: float) -> None:
    module = network()
    before = weights_of(module)
    settings = {"max_epochs": 7, "lr": 0.03, "batch_size": 100, "parameters": "last_layer"}
    regressor = LaplaceRegressor(module, weight_decay=decay, **settings).fit(X, Y)
    assert_array_equal(weights_of(module), before)
    reference = copy.deepcopy(module)
    optimiser = torch.optim.Adam(reference.parameters(), lr=0.03)
    for _ in range(7):
        optimiser.zero_grad()
        error = nn.functional.mse_loss(reference(torch.as_tensor(X)), torch.as_tensor(Y)[:, None])
        norm = sum(weight.square().sum() for weight in reference.parameters())
        (0.5 * error / np.var(Y) + 0.5 * decay * norm).backward()
        optimiser.step()
    assert_allclose(weights_of(regressor.network_), weights_of(reference), rtol=1e-5)
    assert regressor.weight_decay_ == decay


def test_cross_validation_chooses_a_decay_for_noise_and_none_for_a_rule() -> None:
    """As many inputs as data: without decay the network learns the noise by heart."""
    rng = np.random.RandomState(3)
    x, new = rng.randn(40, 40), rng.randn(400, 40)
    settings = {"max_epochs": 100, "lr": 0.03, "parameters": "last_layer"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        noisy = [LaplaceRegressor(nn.Linear, weight_decay=d, **settings) for d in ("auto", 0.0)]
        y = x[:, 0] + 2 * rng.randn(40)
        auto, none = (regressor.fit(x, y) for regressor in noisy)
    assert auto.weight_decay_ >= 10 / 40
    assert auto.score(new, new[:, 0]) > none.score(new, new[:, 0]) + 0.1
    rule = LaplaceRegressor(nn.Linear, **{**settings, "max_epochs": 30, "lr": 0.1}).fit(
        new, new[:, 0] + 0.1 * rng.randn(400)
    )
    assert rule.weight_decay_ <= 1 / 400
    assert LaplaceRegressor(nn.Linear, **QUICK).fit(X, Y).weight_decay_ == 0


def test_the_last_layer_of_the_default_network_says_nothing() -> None:
    """A rescaling follows it, of which a user could change nothing."""
    regressor = LaplaceRegressor(parameters="last_layer", max_epochs=1, weight_decay=0.0, num_samples=2).fit(X, Y)
    assert regressor.laplace_.network.names == ["6.weight", "6.bias"]
    assert isinstance(regressor.network_[6], nn.Linear)
    assert not any(isinstance(layer, nn.Linear) for layer in regressor.network_[7:])


@pytest.mark.nightly  # two minutes
def test_the_default_is_no_worse_than_bayesian_ridge_on_data_that_are_nearly_linear() -> None:
    """Of the mean over five parts; without decay it is 0.06 worse, and other initial weights change it by 0.003."""
    x, y = load_diabetes(return_X_y=True)
    differences = []
    for train, test in KFold(5, shuffle=True, random_state=0).split(x):
        ours = LaplaceRegressor(parameters="last_layer").fit(x[train], y[train])
        ridge = BayesianRidge().fit(x[train], y[train])
        differences.append(ours.score(x[test], y[test]) - ridge.score(x[test], y[test]))
    assert np.mean(differences) > -0.01
    assert min(differences) > -0.05


@pytest.mark.parametrize("held_out", [0.0, 0.25])
def test_intervals_and_sets_may_be_conformal(held_out: float) -> None:
    regressor = LaplaceRegressor(network(), conformal=held_out, **QUICK).fit(X, Y)
    classifier = LaplaceClassifier(network(3), conformal=held_out, **QUICK).fit(X, LABELS)
    for estimator in (regressor, classifier):
        posterior, data = estimator.laplace_.posterior_, int(held_out * 40)
        assert (posterior.conformal is not None) == (held_out > 0)
        if posterior.conformal is not None:
            assert posterior.conformal.num_data.tolist() == [data]
    lower, upper = regressor.predict_interval(NEW, 0.8)
    expected = regressor.laplace_.predict(torch.as_tensor(NEW)).interval(0.8)
    assert_allclose(np.stack([lower, upper]), torch.stack(expected)[..., 0])
    sets = classifier.predict_set(NEW, 0.8)
    assert_array_equal(sets, classifier.laplace_.predict(torch.as_tensor(NEW)).prediction_set(0.8))
    assert sets.shape == (6, 3)


def test_data_that_make_intervals_conformal_are_not_seen_by_the_fit() -> None:
    """Were one of them seen, its target, which no other datum has, would change the network."""
    seen = []
    module = network()
    module.register_forward_pre_hook(lambda part, args: seen.append(args[0]) if part.training else None)
    regressor = LaplaceRegressor(module, conformal=0.3, **{**QUICK, "max_epochs": 1}).fit(X, Y)
    trained = torch.cat(seen).numpy()
    assert len(trained) == 28
    left = np.array([not (trained == x).all(1).any() for x in X])
    pred = regressor.laplace_.predict(torch.as_tensor(X[left]))
    scores = np.abs(Y[left] - pred.mean[:, 0].numpy()) / pred.observation_variance[:, 0].sqrt().numpy()
    assert_allclose(regressor.laplace_.posterior_.conformal.scores[:, 0], np.sort(scores), rtol=1e-5)


def test_batches_are_as_large_as_asked_for_and_shuffled() -> None:
    seen = []
    module = network()
    # The copy that is trained has the same hook.
    module.register_forward_pre_hook(lambda part, args: seen.append(args[0]) if part.training else None)
    LaplaceRegressor(module, max_epochs=1, lr=0.01, batch_size=16, weight_decay=0).fit(X, Y)
    assert [len(x) for x in seen] == [16, 16, 8]
    epoch = torch.cat(seen).numpy()
    assert not np.array_equal(epoch, X)
    assert_allclose(np.sort(epoch, 0), np.sort(X, 0))


def test_a_callable_is_given_the_numbers_of_inputs_and_outputs() -> None:
    calls = []

    def build(inputs: int, outputs: int) -> nn.Module:
        calls.append((inputs, outputs))
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))

    images = np.stack([X, RNG.randn(40, 3)], 1)
    LaplaceRegressor(build, **{**QUICK, "lr": 0.1}).fit(images, Y).predict(images[:2])
    LaplaceRegressor(build, **{**QUICK, "lr": 0.1}).fit(images, np.stack([Y, X[:, 0] - Y], 1))
    LaplaceClassifier(build, **{**QUICK, "lr": 0.1}).fit(images, LABELS)
    LaplaceClassifier(build, **{**QUICK, "lr": 0.1}).fit(images, TWO)
    assert calls == [(6, 1), (6, 2), (6, 3), (6, 2)]


def test_the_default_network_does_not_depend_on_units() -> None:
    regressor = LaplaceRegressor(max_epochs=50, weight_decay=0, lr=0.01, method="exact").fit(X, Y)
    scale, shift = np.array([1e3, 1e-2, 5.0]), np.array([-4e3, 1.0, 0.0])
    other = LaplaceRegressor(max_epochs=50, weight_decay=0, lr=0.01, method="exact").fit(
        X * scale + shift, 200 * Y - 1000
    )
    mean, std = regressor.predict(NEW, return_std=True)
    other_mean, other_std = other.predict(NEW * scale + shift, return_std=True)
    assert_allclose(other_mean, 200 * mean - 1000, rtol=1e-3)
    assert_allclose(other_std, 200 * std, rtol=0.05)
    assert regressor.score(X, Y) > 0.9
    constant = LaplaceRegressor(**QUICK).fit(np.hstack([X, np.ones((40, 1))]), Y)
    assert np.isfinite(constant.predict(np.hstack([NEW, np.ones((6, 1))]))).all()


def test_a_network_may_return_one_number_a_datum() -> None:
    regressor = LaplaceRegressor(network(1, First()), **QUICK).fit(X, Y)
    mean, std = regressor.predict(NEW, return_std=True)
    assert mean.shape == std.shape == (6,)
    assert_allclose(mean, regressor.network_(torch.as_tensor(NEW)).detach())


def test_a_classification_has_the_probabilities_of_the_laplace_approximation() -> None:
    module = network(3)
    classifier = LaplaceClassifier(module, max_epochs=0, num_samples=12).fit(X, LABELS)
    assert classifier.classes_.tolist() == ["high", "low", "middle"]
    seed = np.random.RandomState(0).randint(2**31 - 1)
    la = LinearisedLaplace(module, "classification", num_samples=12, seed=seed)
    labels = torch.tensor([["high", "low", "middle"].index(label) for label in LABELS])
    pred = la.fit_hyperparameters([(torch.as_tensor(X), labels)], progress=False).predict(torch.as_tensor(NEW))
    assert_allclose(classifier.predict_proba(NEW), pred.probs)
    assert_array_equal(classifier.predict(NEW), classifier.classes_[pred.probs.argmax(1).numpy()])


@pytest.mark.parametrize("last", [(), (First(),)], ids=["[N, 1]", "[N]"])
def test_two_classes_may_have_one_logit(last: tuple[nn.Module, ...]) -> None:
    classifier = LaplaceClassifier(network(1, *last), max_epochs=10, weight_decay=0, lr=0.01).fit(X, TWO)
    assert classifier.classes_.tolist() == [3, 7]
    assert classifier.laplace_.settings.likelihood.name == "binary"
    pred = classifier.laplace_.predict(torch.as_tensor(NEW))
    ones = pred.probs.reshape(-1).numpy()
    assert_allclose(classifier.predict_proba(NEW), np.stack([1 - ones, ones], 1))
    assert_array_equal(classifier.predict(NEW), np.where(ones > 0.5, 7, 3))


def test_nothing_global_changes_and_the_seed_decides() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = LaplaceRegressor(**QUICK, random_state=1).fit(X, Y)
    first.sample_y(NEW, 3)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert_array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    torch.manual_seed(2)
    same = LaplaceRegressor(**QUICK, random_state=1).fit(X, Y)
    other = LaplaceRegressor(**QUICK, random_state=2).fit(X, Y)
    assert_array_equal(first.predict(NEW, return_std=True), same.predict(NEW, return_std=True))
    assert np.abs(first.predict(NEW) - other.predict(NEW)).max() > 1e-3


def test_evaluation_mode_and_precision_are_those_of_the_network() -> None:
    module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 1))
    regressor = LaplaceRegressor(module, max_epochs=3, weight_decay=0, lr=0.01).fit(X, Y)
    trained = copy.deepcopy(regressor.network_).eval()
    assert_allclose(regressor.predict(NEW), trained(torch.as_tensor(NEW).float()).detach()[:, 0], rtol=1e-5)
    assert module.training
    assert module[1].num_batches_tracked == 0


# A search tries settings that are bad.
@pytest.mark.filterwarnings("ignore::laplace_sampling.CalibrationWarning")
def test_pipelines_searches_and_cross_validation() -> None:
    pipeline = make_pipeline(
        StandardScaler(), LaplaceRegressor(network(), max_epochs=20, weight_decay=0, lr=0.05, num_samples=8)
    )
    scores = cross_val_score(pipeline, X, Y, cv=2)
    assert scores.shape == (2,)
    search = GridSearchCV(
        LaplaceRegressor(network(), weight_decay=0, lr=0.01, num_samples=8), {"max_epochs": [1, 150]}, cv=2
    ).fit(X, Y)
    assert search.best_params_ == {"max_epochs": 150}
    _, std = search.best_estimator_.predict(NEW, return_std=True)
    assert std.shape == (6,)


def test_bad_input_is_refused() -> None:
    for call in ("predict", "sample_y"):
        with pytest.raises(NotFittedError, match="LaplaceRegressor"):
            getattr(LaplaceRegressor(), call)(X)
    with pytest.raises(NotFittedError, match="LaplaceClassifier"):
        LaplaceClassifier().predict_proba(X)
    message = "outputs"
    with pytest.raises(ValueError, match=message):
        LaplaceRegressor(network(2)).fit(X, Y)
    message = r"\b{} outputs"
    for outputs in (1, 2):
        with pytest.raises(ValueError, match=message.format(outputs)):
            LaplaceClassifier(network(outputs)).fit(X, LABELS)
    with pytest.raises(ValueError, match="`y`"):
        LaplaceClassifier().fit(X, np.ones(40))
    with pytest.raises(ValueError, match="max_epochs"):
        LaplaceRegressor(max_epochs=-1).fit(X, Y)
    with pytest.raises(ValueError, match=r"\blr\b"):
        LaplaceRegressor(lr=0).fit(X, Y)
    with pytest.raises(ValueError, match="batch_size"):
        LaplaceClassifier(batch_size=0).fit(X, TWO)
    for decay in (-1, "much"):
        with pytest.raises(ValueError, match="weight_decay"):
            LaplaceRegressor(weight_decay=decay).fit(X, Y)
    for share in (-0.1, 1.0, "all"):
        with pytest.raises(ValueError, match="conformal"):
            LaplaceRegressor(conformal=share).fit(X, Y)
    with pytest.raises(ValueError, match="conformal"):
        LaplaceRegressor(conformal=0.99).fit(X, Y)


def test_warnings_of_the_fit_reach_the_user() -> None:
    noise = np.random.RandomState(1).randn(40, 4)
    with pytest.warns(ConvergenceWarning, match="precision_bounds"):
        LaplaceRegressor(nn.Linear, **QUICK).fit(noise[:, :3], noise[:, 3])
