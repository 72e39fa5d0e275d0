"""Conformal intervals and sets: ranks, coverage, equal data, files and messages."""

import math

import pytest
import torch
from pretended_device import pretended_device
from scipy import stats
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Data, LinearisedLaplace, NotFittedError
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.predictions.prediction import make_prediction


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


@pytest.mark.parametrize("num", [1, 9, 19, 99, 100])
def test_the_largest_score_has_the_rank_of_the_theorem(num: int) -> None:
    scores = torch.randperm(num, generator=generator()).double() + 1
    for level in (0.1, 0.5, 0.9, 0.95):
        rank = math.ceil(round((num + 1) * level, 9))
        expected = float(rank) if rank <= num else math.inf
        assert SplitConformal.of(scores[:, None], 4).largest(level).tolist() == [expected]


def test_targets_that_are_not_given_are_not_counted() -> None:
    # A level of next to nothing is that of the smallest score.
    assert SplitConformal.of(torch.tensor([[1.0], [2.0]]), 8).largest(1e-12).tolist() == [1.0]
    scores = torch.tensor([[3.0, 1.0], [1.0, math.nan], [2.0, math.nan]])
    found = SplitConformal.of(scores, 4)
    assert found.num_data.tolist() == [3, 1]
    assert found.largest(0.5).tolist() == [2.0, 1.0]
    assert found.largest(0.7).tolist() == [3.0, math.inf]


def linear_data(num: int, seed: int) -> tuple[Tensor, Tensor]:
    x = normal(num, 2, seed=seed)
    # Noise with long tails and a spread that grows, which the model does not have.
    noise = torch.tensor(stats.t.rvs(3, size=num, random_state=seed)) * (0.2 + x[:, 0].abs())
    return x, (x.sum(1) + noise)[:, None]


def trained_linear(x: Tensor, y: Tensor) -> nn.Module:
    model = nn.Linear(2, 1).double()
    joined = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    solution = torch.linalg.lstsq(joined, y).solution[:, 0]
    with torch.no_grad():
        model.weight.copy_(solution[None, :2])
        model.bias.copy_(solution[2:])
    return model


def test_intervals_of_a_wrong_model_cover_what_they_promise() -> None:
    """60 training sets, 100 new data each; a normal distribution with the wrong noise covers far less."""
    covered, own, level = [], [], 0.8
    for seed in range(40):
        x, y = linear_data(39, 3 * seed)
        la = LinearisedLaplace(
            trained_linear(x, y), Gaussian(25.0, learn=False), prior="isotropic", method="exact", num_samples=64
        ).fit([(x, y)], progress=False)
        new_x, new_y = linear_data(100, 3 * seed + 1)
        lower, upper = la.predict(new_x).interval(level)
        own.append(float(((new_y >= lower) & (new_y <= upper)).double().mean()))
        la.calibrate_conformal([linear_data(39, 3 * seed + 2)])
        lower, upper = la.predict(new_x).interval(level)
        covered.append(float(((new_y >= lower) & (new_y <= upper)).double().mean()))
    found = torch.tensor(covered)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - level) < 3 * error
    assert error < 0.015
    assert sum(own) / len(own) < level - 0.2


def test_intervals_without_calibration_are_those_of_the_predictive_distribution() -> None:
    outputs, deviations = normal(4, 2), 0.3 * normal(8, 4, 2, seed=1)
    prediction = make_prediction(outputs, deviations, Gaussian(torch.tensor([4.0, 1.0], dtype=torch.float64)))
    lower, upper = prediction.interval(0.9)
    expected = stats.norm.interval(0.9, outputs, prediction.observation_variance.sqrt())
    assert_close(lower, torch.tensor(expected[0]))
    assert_close(upper, torch.tensor(expected[1]))


def test_split_intervals_are_scores_times_standard_deviations() -> None:
    outputs, deviations = normal(4, 2), 0.3 * normal(8, 4, 2, seed=1)
    scores = SplitConformal.of(torch.tensor([[1.0, 20.0], [2.0, 10.0], [3.0, 30.0]]), 8)
    prediction = make_prediction(outputs, deviations, Gaussian(4.0), conformal=scores)
    lower, upper = prediction.interval(0.75)
    half = torch.tensor([3.0, 30.0]) * prediction.observation_variance.sqrt()
    assert_close(lower, outputs - half)
    assert_close(upper, outputs + half)


def labels_with_noise(num: int, seed: int) -> tuple[Tensor, Tensor]:
    x = normal(num, 2, seed=seed)
    y = (3 * x[:, 0]).long().clamp(-1, 1) + 1
    wrong = torch.rand(num, generator=generator(seed)) < 0.3
    return x, torch.where(wrong, torch.randint(3, (num,), generator=generator(seed + 1)), y)


def sure_classifier() -> nn.Module:
    model = nn.Linear(2, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-20.0, 0.0], [0.0, 0.0], [20.0, 0.0]]))
        model.bias.copy_(torch.tensor([-6.0, 0.0, -6.0]))
    return model


def test_sets_of_a_network_that_is_too_sure_cover_what_they_promise() -> None:
    level, covered, own = 0.9, [], []
    la = LinearisedLaplace(sure_classifier(), "classification", method="exact", num_samples=16)
    la = la.fit([labels_with_noise(50, 0)], progress=False)
    for seed in range(40):
        new_x, new_y = labels_with_noise(100, 10 + 3 * seed)
        belongs = la.calibrate([labels_with_noise(9, 1)]).predict(new_x).prediction_set(level)
        own.append(float(belongs.gather(1, new_y[:, None]).double().mean()))
        la.calibrate_conformal([labels_with_noise(59, 11 + 3 * seed)])
        belongs = la.predict(new_x).prediction_set(level)
        covered.append(float(belongs.gather(1, new_y[:, None]).double().mean()))
    found = torch.tensor(covered)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - level) < 3 * error
    assert error < 0.01


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_adaptive_sets_are_sums_of_probabilities_and_cover_what_they_promise(penalty: float) -> None:
    """Their scores by sorting in plain Python; coverage is at least the level, as they have no random part."""
    level, covered = 0.8, []
    la = LinearisedLaplace(sure_classifier(), "classification", method="exact", num_samples=16)
    la = la.fit([labels_with_noise(50, 0)], progress=False)
    for seed in range(20):
        new_x, new_y = labels_with_noise(100, 10 + 3 * seed)
        held_x, held_y = labels_with_noise(59, 11 + 3 * seed)
        belongs = la.calibrate_conformal([(held_x, held_y)], penalty=penalty).predict(new_x).prediction_set(level)
        covered.append(float(belongs.gather(1, new_y[:, None]).double().mean()))

        def sums(probs: Tensor) -> list[list[float]]:
            """The score of each class."""
            return [
                [sum(q for q in row if q >= p) + penalty * sum(q > p for q in row) for p in row]
                for row in probs.tolist()
            ]

        of_labels = sorted(row[y] for row, y in zip(sums(la.predict(held_x).probs), held_y.tolist(), strict=True))
        threshold = of_labels[math.ceil(60 * level) - 1]
        scores = torch.tensor(sums(la.predict(new_x).probs))
        expected = (scores <= threshold) | (scores == scores.amin(1, keepdim=True))
        apart = (scores - threshold).abs() > 1e-4  # rounding decides of the others
        assert torch.equal(belongs[apart], expected[apart])
        assert apart.double().mean() > 0.05
        assert belongs.any(1).all()
    found = torch.tensor(covered)
    assert float(found.mean()) > level - 3 * float(found.std()) / math.sqrt(len(found))


def test_classes_that_are_equal_up_to_rounding_count_for_adaptive_scores() -> None:
    logits = torch.tensor([[0.0, 1e-16, -1.0], [1e-16, 0.0, -1.0]], dtype=torch.float64)
    prediction = make_prediction(logits, torch.zeros(2, 2, 3, dtype=torch.float64), Categorical())
    scores = prediction.scores_of(torch.tensor([[0], [0]]), 0.5)
    both = 2 * float(prediction.probs[0, 0]) + 0.5
    assert_close(scores, torch.full((2, 1), both, dtype=torch.float64))


def test_adaptive_sets_have_one_class_at_least() -> None:
    """The most probable one, where its probability alone is larger than the threshold."""
    logits = torch.tensor([[0.9, 0.06, 0.04], [0.4, 0.35, 0.25]], dtype=torch.float64).log()
    seen = SplitConformal.of(torch.full((9, 1), 0.8, dtype=torch.float64), 2, penalty=0.1)
    prediction = make_prediction(logits, torch.zeros(2, 2, 3, dtype=torch.float64), Categorical(), conformal=seen)
    assert prediction.prediction_set(0.5).tolist() == [[True, False, False], [True, False, False]]


def test_a_file_keeps_the_penalty(tmp_path) -> None:
    la = LinearisedLaplace(sure_classifier(), "classification", method="exact", num_samples=16)
    la.fit([labels_with_noise(50, 0)], progress=False).calibrate_conformal([labels_with_noise(59, 11)], penalty=0.2)
    la.save(tmp_path / "la.pt")
    loaded = LinearisedLaplace.load(tmp_path / "la.pt", sure_classifier())
    x = labels_with_noise(30, 5)[0]
    assert loaded.posterior_.conformal.penalty == 0.2
    assert torch.equal(loaded.predict(x).prediction_set(0.8), la.predict(x).prediction_set(0.8))


def test_adaptive_sets_on_a_device_with_data_on_the_cpu() -> None:
    found = []
    with pretended_device() as device:
        for where in (torch.device("cpu"), device):
            la = LinearisedLaplace(sure_classifier().to(where), "classification", method="exact", num_samples=16)
            la = la.fit([labels_with_noise(50, 0)], progress=False)
            la.calibrate_conformal([labels_with_noise(59, 11)], penalty=0.1)
            found.append(la.predict(labels_with_noise(30, 5)[0]).prediction_set(0.8).cpu())
    assert (found[0] == found[1]).double().mean() > 0.95  # but for scores that rounding decides


def test_a_penalty_that_is_none_is_refused() -> None:
    x, y = linear_data(20, 0)
    la = LinearisedLaplace(trained_linear(x, y), "regression").fit([(x, y)], progress=False)
    with pytest.raises(ValueError, match="intervals"):
        la.calibrate_conformal([(x, y)], penalty=0.1)
    with pytest.raises(ValueError, match="penalty"):
        la.calibrate_conformal([(x, y)], penalty=-0.1)


@pytest.mark.parametrize("calibrated", [False, True])
def test_several_levels_have_an_axis_of_their_own(calibrated: bool) -> None:
    scores = SplitConformal.of(torch.tensor([[1.0, 20.0], [2.0, 10.0], [3.0, 30.0]]), 8) if calibrated else None
    prediction = make_prediction(normal(4, 2), 0.3 * normal(8, 4, 2, seed=1), Gaussian(4.0), conformal=scores)
    lower, upper = prediction.interval((0.5, 0.75))
    assert lower.shape == (2, 4, 2)
    for number, level in enumerate((0.5, 0.75)):
        for found, expected in zip((lower[number], upper[number]), prediction.interval(level), strict=True):
            assert torch.equal(found, expected)
    for wrong in ((0.5, 1.5), (), "0.5"):
        with pytest.raises((TypeError, ValueError), match="level"):
            prediction.interval(wrong)


def test_sets_without_calibration_are_the_most_probable_classes() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2], [0.96, 0.03, 0.01], [0.2, 0.3, 0.5]]).log()
    prediction = make_prediction(logits, torch.zeros(2, 3, 3), Categorical())
    assert prediction.prediction_set(0.7).tolist() == [[True, True, False], [True, False, False], [False, True, True]]
    assert prediction.prediction_set(0.95).tolist() == [[True, True, True], [True, False, False], [True, True, True]]


def test_sets_of_positions_and_of_binary_outputs_have_their_axes() -> None:
    maps = make_prediction(normal(2, 3, 4), 0.1 * normal(8, 2, 3, 4, seed=1), Categorical())
    belongs = maps.prediction_set(0.5)
    assert belongs.shape == (2, 3, 4)
    # The most probable class belongs, and one that is half as probable as needed does not.
    assert belongs.gather(1, maps.probs.argmax(1, keepdim=True)).all()
    assert bool((belongs.sum(1) < 3).any())
    binary = make_prediction(torch.tensor([[2.0], [-2.0], [0.0]]), torch.zeros(2, 3, 1), Bernoulli())
    expected = [[[False, True]], [[True, False]], [[True, True]]]
    assert binary.prediction_set(0.8).tolist() == expected
    scores = SplitConformal.of(torch.tensor([[-math.log(0.6)]]), 2)
    binary = make_prediction(torch.tensor([[2.0], [-2.0], [0.0]]), torch.zeros(2, 3, 1), Bernoulli(), conformal=scores)
    assert binary.prediction_set(0.5).tolist() == [[[False, True]], [[True, False]], [[False, False]]]


def test_scores_of_labels_are_negative_log_probabilities() -> None:
    likelihood = Categorical()
    prediction = make_prediction(normal(3, 4), 0.5 * normal(8, 3, 4, seed=1), likelihood)
    y = torch.tensor([2, likelihood.ignore_index, 0])
    scores = prediction.scores_of(y)
    assert scores[1].isnan().all()
    assert_close(scores[[0, 2], 0], -prediction.log_prob(y)[[0, 2]])
    maps = make_prediction(normal(2, 3, 4), 0.1 * normal(8, 2, 3, 4, seed=1), likelihood)
    y = torch.randint(3, (2, 4), generator=generator())
    assert_close(maps.scores_of(y), -maps.probs.gather(1, y[:, None])[:, 0].log())


def test_files_keep_what_was_calibrated(tmp_path) -> None:
    x, y = linear_data(30, 0)
    model = trained_linear(x, y)
    la = LinearisedLaplace(model, "regression", num_samples=8).fit([(x, y)], progress=False)
    la.calibrate_conformal([linear_data(30, 1)])
    expected = la.predict(x[:3]).interval(0.8)
    la.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", model)
    for ours, theirs in zip(again.predict(x[:3]).interval(0.8), expected, strict=True):
        assert_close(ours, theirs)


def test_a_fit_and_a_calibration_take_it_back() -> None:
    x, y = linear_data(30, 0)
    la = LinearisedLaplace(trained_linear(x, y), "regression", num_samples=8)
    la.fit([(x, y)], progress=False).calibrate_conformal([linear_data(30, 1)])
    assert la.predict(x).conformal is not None
    assert la.calibrate([linear_data(30, 2)]).predict(x).conformal is None
    la.calibrate_conformal([linear_data(30, 1)])
    assert la.fit([(x, y)], progress=False).predict(x).conformal is None


def test_a_variance_that_the_network_gives_is_corrected_as_well() -> None:
    x, y = linear_data(40, 0)
    model = nn.Linear(2, 2).double()
    la = LinearisedLaplace(model, "heteroscedastic", num_samples=8, prior="isotropic")
    la.fit([(x, y)], progress=False).calibrate_conformal([linear_data(199, 1)])
    new_x, new_y = linear_data(1000, 2)
    lower, upper = la.predict(new_x).interval(0.8)
    assert lower.shape == new_y.shape
    # 199 data: coverage has a beta distribution with standard deviation 0.028.
    assert abs(float(((new_y >= lower) & (new_y <= upper)).double().mean()) - 0.8) < 0.1


def test_outputs_without_an_axis() -> None:
    x, y = linear_data(30, 0)
    settings = {"method": "exact", "num_samples": 8}
    plain, flat = trained_linear(x, y), nn.Sequential(trained_linear(x, y), nn.Flatten(0))
    la = LinearisedLaplace(plain, "regression", **settings).fit([(x, y)], progress=False)
    of_flat = LinearisedLaplace(flat, "regression", **settings).fit([(x, y[:, 0])], progress=False)
    held_x, held_y = linear_data(30, 1)
    expected = la.calibrate([(held_x, held_y)]).calibrate_conformal([(held_x, held_y)])
    found = of_flat.calibrate([(held_x, held_y[:, 0])]).calibrate_conformal([(held_x, held_y[:, 0])])
    for ours, theirs in zip(found.predict(x).interval(0.8), expected.predict(x).interval(0.8), strict=True):
        assert_close(ours, theirs[:, 0])


def test_sets_of_binary_outputs_without_an_axis() -> None:
    x, y = linear_data(30, 0)
    y = (y > 0).double()
    plain, flat = trained_linear(x, y), nn.Sequential(trained_linear(x, y), nn.Flatten(0))
    expected, found = (
        LinearisedLaplace(model, "binary", method="exact", num_samples=8)
        .fit([(x, targets)], progress=False)
        .calibrate([(x, targets)])
        .calibrate_conformal([(x, targets)])
        .predict(x)
        .prediction_set(0.8)
        for model, targets in ((plain, y), (flat, y[:, 0]))
    )
    assert found.shape == (30, 2)
    assert torch.equal(found, expected[:, 0])


def test_positions_are_those_that_were_seen() -> None:
    model = nn.Conv1d(2, 3, 1).double()
    x, y = normal(20, 2, 5), torch.randint(3, (20, 5), generator=generator())
    la = LinearisedLaplace(model, "classification", method="exact", num_samples=8)
    la.fit([(x, y)], progress=False).calibrate_conformal([(x, y)])
    assert la.predict(x).prediction_set(0.5).shape == (20, 3, 5)
    with pytest.raises(ValueError, match="targets"):
        la.predict(x[..., :1]).prediction_set(0.5)


def test_messages() -> None:
    x, y = linear_data(30, 0)
    la = LinearisedLaplace(trained_linear(x, y), "regression", num_samples=8)
    with pytest.raises(NotFittedError, match="calibrate_conformal"):
        la.calibrate_conformal([(x, y)])
    la.fit([(x, y)], progress=False).calibrate_conformal([linear_data(30, 1)])
    with pytest.raises(ValueError, match="num_samples"):
        la.predict(x, num_samples=4).interval(0.9)
    with pytest.raises(ValueError, match="level"):
        la.predict(x).interval(0)
    with pytest.raises(TypeError, match="Tensor"):
        la.predict(x).interval(torch.tensor(0.9))
    with pytest.raises(ValueError, match="probability"):
        la.predict(x).interval(95)
    la.fit([(x, y)], data=Data(noise_variances=torch.ones(30)), progress=False)
    with pytest.raises(ValueError, match="noise_variances"):
        la.calibrate_conformal([(x, y)])
    counts = LinearisedLaplace(nn.Linear(2, 1).double(), "poisson", num_samples=8, method="exact")
    counts.fit([(x, y.abs().round())], progress=False)
    with pytest.raises(ValueError, match="poisson"):
        counts.calibrate_conformal([(x, y.abs().round())])


@pytest.mark.parametrize("method", ["exact", pytest.param("krylov", marks=pytest.mark.slow), "kfac"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_equal_data_keep_their_guarantee(kind: str, dtype: torch.dtype, method: str) -> None:
    """Of few inputs that are equally frequent, one has the largest score, at which its targets are exactly."""
    outputs = 1 if kind == "regression" else 3
    x = normal(80, 3).to(dtype)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, outputs)).to(dtype)
    y = x[:, :1].sin() if kind == "regression" else (3 * x[:, 0]).round().long() % 3
    la = LinearisedLaplace(model, kind, method=method, num_samples=16).fit([(x, y)], progress=False)
    for num in (2, 4):
        few = normal(num, 3, seed=num).to(dtype)
        labels = few[:, :1].sin() + 0.3 if kind == "regression" else torch.arange(num) % 3
        calibration = torch.arange(40 // num * num) % num
        la.calibrate_conformal([(few[calibration], labels[calibration])])
        for batch in (1, 3):
            covered = []
            for some in (torch.arange(batch * num) % num).split(batch):
                prediction = la.predict(few[some])
                if kind == "regression":
                    lower, upper = prediction.interval(0.9)
                    covered.append(((lower <= labels[some]) & (labels[some] <= upper))[:, 0])
                else:
                    covered.append(prediction.prediction_set(0.9).gather(1, labels[some][:, None])[:, 0])
            assert float(torch.cat(covered).double().mean()) >= 0.9


def test_rounding_of_large_outputs_keeps_the_guarantee_of_equal_data() -> None:
    """Errors of a hundredth, of outputs of a thousand whose last digit is a ten thousandth."""
    x = normal(80, 3).float()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1))
    nn.init.constant_(model[2].bias, 1000.0)
    la = LinearisedLaplace(model, "regression", method="exact").fit([(x, 1000 + x[:, :1].sin())], progress=False)
    few = normal(4, 3, seed=4).float()
    labels = la.predict(few).mean + 0.01
    calibration = torch.arange(40) % 4
    la.calibrate_conformal([(few[calibration], labels[calibration])])
    for batch in (1, 3, 33):
        covered = []
        for some in (torch.arange(4 * batch) % 4).split(batch):
            lower, upper = la.predict(few[some]).interval(0.9)
            covered.append(((lower <= labels[some]) & (labels[some] <= upper))[:, 0])
        assert float(torch.cat(covered).double().mean()) >= 0.9


def test_messages_say_that_data_are_those_of_val_loader() -> None:
    x, y = linear_data(30, 0)
    la = LinearisedLaplace(trained_linear(x, y), "regression", method="exact").fit([(x, y)], progress=False)
    for call in (la.calibrate, la.calibrate_conformal):
        with pytest.raises(ValueError, match="NaN") as raised:
            call([(x, y * math.nan)])
        assert raised.value.__notes__ == ["These are the data of `val_loader`."]
