"""Scales of the posterior from held-out data, and from the training data left out one at a time."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.weighted import weighted
from laplace_sampling.predictions import calibration
from laplace_sampling.predictions.calibration import (
    Calibration,
    calibrate,
    calibrate_regression,
    label_losses,
    own_temperature,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LABELS = {
    "a class": Categorical(),
    "classes of pixels": Categorical(class_dim=1, shape=(3, 2, 2)),
    "classes of tokens": Categorical(class_dim=-1, shape=(4, 3)),
    "zeros and ones": Bernoulli(),
}


def drawn_labels(kind: str) -> Tensor:
    """Of seven data with twelve outputs; some are ignored."""
    if kind == "a class":
        return torch.arange(7) % 12
    if kind == "zeros and ones":
        return (normal(7, 12) > 0).double()
    labels = torch.randint(3, (7, 4), generator=torch.Generator().manual_seed(0))
    labels[0, 1] = labels[3, :3] = -100
    return labels.reshape(7, 2, 2) if "pixels" in kind else labels


def by_label(kind: str, f: Tensor) -> Tensor:
    """Logits `[N, S, c]` of `S` labels, without what their probabilities do not depend on."""
    if kind == "zeros and ones":
        return f[..., None]
    f = {"a class": f[:, None], "classes of pixels": f.reshape(7, 3, 4).mT}.get(kind, f.reshape(7, 4, -1))
    return f - f.mean(-1, keepdim=True)


@pytest.mark.parametrize("kind", ["classes of pixels", "classes of tokens", "zeros and ones"])
def test_labels_of_a_datum_are_scored_one_by_one(kind: str) -> None:
    """As though each were a datum; ignored ones are worth nothing, and a datum of weight 2 is there twice."""
    likelihood, y = LABELS[kind], drawn_labels(kind)
    f, d = normal(7, 12, seed=1), normal(5, 7, 12, seed=3)
    found = label_losses(likelihood, y, f, d, 2.0)
    samples = torch.cat([f + math.sqrt(2) * d, f - math.sqrt(2) * d])
    expected = torch.zeros_like(found)
    for n, s in torch.cartesian_prod(torch.arange(7), torch.arange(found.shape[1])).tolist():
        label = y.reshape(7, -1)[n, s]
        if kind == "zeros and ones":
            p = (samples[:, n, s] * (2 * label - 1)).sigmoid()
        elif int(label) < 0:
            continue
        else:
            logits = (
                samples[:, n].reshape(-1, 3, 4)[..., s] if "pixels" in kind else samples[:, n].reshape(-1, 4, 3)[:, s]
            )
            p = logits.softmax(-1)[:, label]
        expected[n, s] = -p.mean().log()
    assert_close(found, expected)
    twice = weighted(likelihood, y, torch.full((7,), 2.0))
    assert_close(label_losses(*twice, f, d, 2.0), 2 * expected)


NUM = 3000


def overlapping(size: float, num: int = NUM) -> tuple[Tensor, Tensor]:
    """Labels drawn from the softmax of logits, and these logits times a factor."""
    logits = 2 * normal(num, 3)
    y = torch.distributions.Categorical(logits=logits).sample()
    return y, size * logits


def test_scale_and_temperature_of_held_out_labels() -> None:
    """Logits four times too large: a temperature of four, up to the error of the labels; without error bars."""
    torch.manual_seed(0)
    y, logits = overlapping(4.0)
    found = calibrate(Categorical(), y, logits, 1e-6 * normal(32, NUM, 3, seed=5))
    assert found.temperature == pytest.approx(4.0, rel=0.1)
    assert found.network_log_likelihood == pytest.approx(-float(F.cross_entropy(logits, y, reduction="sum")))
    # where labels vary more than the network says, and the error bars know where, these are scaled to it
    varies = (torch.arange(NUM) % 2)[:, None].double()
    logits = 2 * normal(NUM, 3, seed=7)
    y = torch.distributions.Categorical(logits=logits + 3 * varies * normal(NUM, 3, seed=6)).sample()
    found = calibrate(Categorical(), y, logits, varies * normal(32, NUM, 3, seed=5))
    assert found.scale == pytest.approx(9.0, rel=0.35)
    assert found.temperature == pytest.approx(1.0, rel=0.15)


def test_error_bars_of_some_data_stand_for_those_of_all() -> None:
    """Copies of the data without deviations are worth as much as copies with them."""
    y, f, d = torch.arange(40) % 4, 3 * normal(40, 4), 2 * normal(6, 40, 4, seed=1)
    copies = 5
    every, outputs = y.repeat(copies), f.repeat(copies, 1)
    for free in (("temperature",), ("scale", "temperature")):
        few = calibrate(Categorical(), every, outputs, d, free)
        all_of_them = calibrate(Categorical(), every, outputs, d.repeat(1, copies, 1), free)
        assert few.temperature > 1.2
        assert few.num_data == 40 * copies
        for name in ("temperature", "scale", "log_likelihood", "network_log_likelihood"):
            assert_close(getattr(few, name), getattr(all_of_them, name), rtol=1e-3, atol=1e-6)


def test_a_temperature_is_that_of_all_data_where_error_bars_do_nothing() -> None:
    y, f = torch.arange(400) % 4, 3 * normal(400, 4)
    narrow = torch.zeros(2, 10, 4, dtype=torch.float64)
    found = calibrate(Categorical(), y, f, narrow, ("temperature",)).temperature

    def loss(log: float) -> float:
        return float(F.cross_entropy(f / math.exp(log), y, reduction="sum")) + 2 * log**2

    best = minimize_scalar(loss, bounds=(0.0, 3.0), method="bounded", options={"xatol": 1e-5})
    assert_close(math.log(found), float(best.x), rtol=2e-3, atol=1e-3)
    assert abs(found / calibrate(Categorical(), y[:10], f[:10], narrow, ("temperature",)).temperature - 1) > 0.05


def test_scale_and_noise_of_held_out_targets() -> None:
    """Errors of variance `4 v + 0.25` where `v` varies: both factors are found, up to their error for 20,000 data."""
    v = torch.logspace(-2, 1, 20_000, dtype=torch.float64)[:, None]
    targets = (4 * v + 0.25).sqrt() * normal(20_000, 1)
    found = calibrate_regression(targets, torch.zeros_like(v), v[..., None], torch.ones_like(v))
    assert found.scale == pytest.approx(4.0, rel=0.1)
    assert found.noise == pytest.approx(0.25, rel=0.1)
    assert found.network_log_likelihood == pytest.approx(
        float(torch.distributions.Normal(0, 1).log_prob(targets).sum())
    )
    assert found.temperature == 1.0


@pytest.mark.parametrize("num", [10, 1000])
def test_few_labels_without_an_error_do_not_take_the_temperature_to_zero(num: int) -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]], dtype=torch.float64).repeat(num // 2, 1)
    y, deviations = logits.argmax(1), 1e-6 * normal(8, num, 2)
    T = calibrate(Categorical(), y, logits, deviations).temperature
    # N d/d(log T) softplus(−2/T) at most 1/0.1, the prior's slope, and as large where T is below one
    slope = num * 2 / T / (1 + math.exp(2 / T))
    assert slope == pytest.approx(10, rel=1e-2) if num > 100 else (T == 1 and slope < 10)
    assert T > 0.25


@pytest.mark.parametrize(("margin", "num"), [(0.25, 60), (0.05, 60), (0.05, 200)])
@pytest.mark.parametrize("binary", [False, True])
def test_the_own_temperature_is_the_likeliest_of_two_maxima(margin: float, num: int, binary: bool) -> None:
    """Right labels of small margins: `N softplus(−m/T) + 10 |log T|` has a minimum at one and may have one below."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(num // 2)[:, None]
    outputs, y = margin * signs, (signs + 1) / 2
    if not binary:
        outputs, y = torch.cat([torch.zeros_like(outputs), outputs], 1), y[:, 0].long()
    logs = torch.linspace(-5, 0, 5001, dtype=torch.float64)
    least = logs[(num * F.softplus(-margin / logs.exp()) - 10 * logs).argmin()]
    found = own_temperature(Bernoulli() if binary else Categorical(), y, outputs)
    assert math.log(found) == pytest.approx(float(least), abs=3e-3)
    assert (found == 1) == (margin * num < 5)


def test_labels_of_a_network_that_is_not_sure_enough() -> None:
    """Logits half as large as they should be, and no error bars: many labels say so."""
    torch.manual_seed(0)
    y, logits = overlapping(0.5)
    found = calibrate(Categorical(), y, logits, 1e-6 * normal(8, len(y), 3, seed=5))
    alone = minimize_scalar(
        lambda t: float(F.cross_entropy(logits / math.exp(t), y, reduction="sum")) - 10 * t, bounds=(-3, 0)
    )
    assert found.temperature == pytest.approx(math.exp(alone.x), rel=1e-3)
    assert found.temperature < 0.75


def test_a_temperature_does_not_take_back_what_the_error_bars_widen() -> None:
    """Labels of a network that is right, and error bars that are as large for all: with them alone it is too unsure."""
    logits, deviations = 2 * normal(60, 3, seed=1), 2 * normal(64, 60, 3, seed=2)
    y = torch.distributions.Categorical(logits=logits).sample()

    def loss(scale: float, temperature: float) -> float:
        losses = label_losses(Categorical(), y, logits / temperature, deviations / temperature, scale)
        return float(losses.sum()) + math.log(scale) ** 2 / 8 + 2 * math.log(temperature) ** 2

    found = calibrate(Categorical(), y, logits, deviations)
    assert loss(found.scale, 0.8 * found.temperature) < loss(found.scale, found.temperature)
    for scale, temperature in ((0.8, 1), (1.25, 1), (1, 1.25)):
        assert loss(scale * found.scale, temperature * found.temperature) > loss(found.scale, found.temperature)
    alone = minimize_scalar(
        lambda t: float(F.cross_entropy(logits / math.exp(t), y, reduction="sum")) - 10 * t, bounds=(-3, 0)
    )
    assert found.temperature == pytest.approx(math.exp(alone.x), rel=1e-3)


@pytest.mark.parametrize(("factor", "lowest"), [(3.0, 1.0), (0.5, 0.8), (0.5, 1.0)])
def test_a_temperature_beside_error_bars_has_a_normal_prior_above_the_lowest(factor: float, lowest: float) -> None:
    """Few labels, so that the prior matters; logits that are too large, and too small by more than `T` takes back."""
    generator = torch.Generator().manual_seed(4)
    logits, deviations = normal(40, 3, seed=1), 0.1 * normal(16, 40, 3, seed=2)
    y = torch.multinomial((2 * logits).softmax(1), 1, generator=generator)[:, 0]
    f = 2 * factor * logits
    logs = torch.linspace(math.log(lowest), 3, 3001, dtype=torch.float64)
    losses = [label_losses(Categorical(), y, f / T, deviations / T, 1.0).sum() for T in logs.exp().tolist()]
    least = float(logs[(torch.stack(losses) + 2 * logs**2).argmin()])
    found = calibrate(Categorical(), y, f, deviations, ("temperature",), lowest)
    assert math.log(found.temperature) == pytest.approx(least, abs=0.012)
    assert (found.temperature == lowest) == (factor < 1)


def test_problems_of_a_calibration() -> None:
    """By more than a nat, and more than two standard errors; with both figures."""
    zero, ten = torch.zeros(100), torch.zeros(100)
    ten[::2] = 0.2
    assert Calibration().problems == Calibration().scored("held out", ten, zero).problems == []
    (worse,) = Calibration(scale=3.0).scored("held out", zero - 2, ten - 2).problems
    assert "100 data of `val_loader` have a log-likelihood of -200 with them (at a scale of 3), and -190 by" in worse
    assert Calibration().scored("held out", zero, ten / 20).problems == []
    unsure = torch.where(torch.arange(100) % 2 == 0, 1.2, -0.9)  # better by 15, with a standard error of 10.5
    assert Calibration().scored("left out", zero, unsure).problems == []
    (bound,) = replace(Calibration(scale=100.0), at_bounds=("scale",)).problems
    assert "`scale_`" in bound


def test_held_out_labels_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    y, logits = overlapping(2.0)
    deviations = normal(8, len(y), 3, seed=5)
    whole = calibrate(Categorical(), y, logits, deviations)
    monkeypatch.setattr(calibration, "NUMBERS_TOGETHER", 8 * 3 * 700)
    parts = calibrate(Categorical(), y, logits, deviations)
    assert (parts.scale, parts.temperature) == pytest.approx((whole.scale, whole.temperature), rel=1e-4)
