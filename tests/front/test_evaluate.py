"""Each score of `evaluate` is what plain NumPy and scikit-learn compute from the predictions."""

import builtins
import copy
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import make_case
from numpy.testing import assert_allclose
from pretended_device import pretended_device
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Data, LinearisedLaplace, NotFittedError, Poisson, evaluate
from laplace_sampling.likelihoods.categorical import Categorical


def network(outputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def inputs(num: int, seed: int, shift: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 2, generator=generator, dtype=torch.float64) + shift


def classification(classes: int) -> tuple[LinearisedLaplace, nn.Module, list[list[tuple[Tensor, Tensor]]]]:
    """A fit that has a temperature, its network, and test and validation data; one logit for two classes."""
    outputs = 1 if classes == 2 else classes
    model, parts = network(outputs), []
    with torch.no_grad():
        model[2].weight *= 6 if outputs > 1 else 12  # as sure as a network that is trained for long
        for seed, num in ((1, 90), (2, 80), (3, 70)):
            x = inputs(num, seed)
            noise = torch.rand(num, outputs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            if outputs == 1:
                y = (0.5 * model(x) + (noise / (1 - noise)).log() > 0).double()
            else:
                y = (0.5 * model(x) - (-noise.log()).log()).argmax(1)
            parts.append((x, y))
    la = LinearisedLaplace(model, "binary" if outputs == 1 else "classification", method="exact", num_samples=16)
    train, test, held_out = ([(x[:50], y[:50]), (x[50:], y[50:])] for x, y in parts)
    la.fit(train, progress=False).calibrate(held_out)
    assert abs(la.temperature_ - 1) > 0.1
    return la, model, [test, held_out, train]


def all_of(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def probabilities(logits: Tensor) -> np.ndarray:
    """Of all classes; of one logit of both."""
    logits = torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits
    odds = np.exp(logits.numpy() - logits.numpy().max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def calibration_error(claimed: np.ndarray, right: np.ndarray) -> float:
    bins = np.ceil(claimed * 15)
    return sum(abs((right - claimed)[bins == b].sum()) for b in range(16)) / len(claimed)


def fpr95(inside: np.ndarray, outside: np.ndarray) -> float:
    threshold = max(t for t in outside if (outside >= t).mean() >= 0.95)
    return float((inside >= threshold).mean())


def expected(p: np.ndarray, y: np.ndarray) -> dict[str, float]:
    top, right, binary = p.max(1), p.argmax(1) == y, p.shape[1] == 2
    order = sorted(range(len(y)), key=lambda i: -top[i])
    kept = [np.mean(right[order[:num]]) for num in range(1, len(y) + 1)]
    squares = ((p - np.eye(p.shape[1])[y]) ** 2).sum(1).mean()
    return {
        "log_loss": log_loss(y, p),
        "brier": brier_score_loss(y, p[:, 1]) if binary else squares,
        "calibration_error": calibration_error(p[:, 1], y) if binary else calibration_error(top, right),
        "accuracy": accuracy_score(y, p.argmax(1)),
        "rejection": float(np.mean(kept)),
        "error_auroc": roc_auc_score(~right, -top),
    }


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_of_a_classification(classes: int) -> None:
    la, model, (test, held_out, _) = classification(classes)
    other = [inputs(40, 5, shift=3.0)]
    found = evaluate(la, test, other, val_loader=held_out)
    x, y = all_of(test)
    labels = y.long().flatten().numpy()
    with torch.no_grad():
        logits, of_other, of_held_out = model(x), model(other[0]), model(all_of(held_out)[0])
    held_out_labels = all_of(held_out)[1].long().flatten().numpy()
    T = minimize_scalar(lambda T: log_loss(held_out_labels, probabilities(of_held_out / T)), bounds=(0.1, 10)).x
    ours, pred = la.predict(x), la.predict(other[0])
    predicted = {
        "network": (probabilities(logits), probabilities(of_other)),
        "temperature": (probabilities(logits / T), probabilities(of_other / T)),
        "laplace": tuple(
            np.hstack([1 - p, p]) if classes == 2 else p for p in (ours.probs.numpy(), pred.probs.numpy())
        ),
    }
    assert list(found.table) == list(predicted)
    for name, (p, q) in predicted.items():
        entropies = [-(values * np.log(values)).sum(1) for values in (p, q)]
        reference = expected(p, labels)
        reference["other_auroc"] = roc_auc_score([0] * len(p) + [1] * len(q), np.concatenate(entropies))
        reference["other_fpr95"] = fpr95(*entropies)
        assert list(found.table[name]) == list(reference)
        for score, value in reference.items():
            rtol = 1e-4 if name == "temperature" else 1e-5
            assert_allclose(found.table[name][score], value, rtol=rtol, atol=1e-6, err_msg=f"{name}, {score}")
    assert (found.num_data, found.num_other) == (80, 40)
    assert set(found.other_score.values()) == {"entropy"}
    assert len({round(row["log_loss"], 3) for row in found.table.values()}) == 3


def test_novelty_finds_other_data_once_it_is_there() -> None:
    la, _, (test, _, train) = classification(3)
    la.calibrate_novelty(train)
    found = evaluate(la, test, [(inputs(40, 5, shift=3.0), None)], data=Data(unpack=lambda batch: batch))
    assert found.other_score == {"network": "entropy", "laplace": "novelty"}
    values = [la.predict(x).novelty.numpy() for x in (all_of(test)[0], inputs(40, 5, shift=3.0))]
    assert_allclose(
        found.table["laplace"]["other_auroc"], roc_auc_score([0] * 80 + [1] * 40, np.concatenate(values)), rtol=1e-6
    )
    assert_allclose(found.table["laplace"]["other_fpr95"], fpr95(*values), rtol=1e-6)


def regression(kind: str = "regression") -> tuple[LinearisedLaplace, list[tuple[Tensor, Tensor]], list]:
    model, parts = network(2), []
    for seed, num in ((1, 60), (2, 50), (3, 40)):
        x = inputs(num, seed)
        generator = torch.Generator().manual_seed(10 + seed)  # with that of the inputs noise is a function of these
        with torch.no_grad():
            y = model(x)[:, :1] if kind == "heteroscedastic" else model(x)
        parts.append((x, y + 0.3 * torch.randn(y.shape, generator=generator, dtype=torch.float64)))
    test = parts[1]
    la = LinearisedLaplace(model, kind, method="exact", num_samples=16)
    la.fit_hyperparameters([parts[0]], criterion="evidence", progress=False)
    return la, [(test[0][:30], test[1][:30]), (test[0][30:], test[1][30:])], [parts[2]]


def crps(mean: float, stddev: float, y: float) -> float:
    """By its definition, the integral of `(F(t) − 1[t ≥ y])²`."""
    t = np.linspace(-12, 12, 40_001)
    return float(np.sum((norm.cdf(t, mean, stddev) - (t >= y)) ** 2) * (t[1] - t[0]))


@pytest.mark.parametrize("kind", ["regression", "heteroscedastic"])
def test_scores_of_a_regression(kind: str) -> None:
    la, test, held_out = regression(kind)
    with_noise = kind == "regression"
    if with_noise:
        test[0][1][3, 1] = test[0][1][5] = math.nan  # missing: one output of a datum, and both of another
    x, y = (part.numpy() for part in all_of(test))
    other = inputs(30, 5, shift=2.0)
    found = evaluate(la, test, DataLoader(TensorDataset(other, other), 7), val_loader=held_out)
    with torch.no_grad():
        outputs = la.network(torch.from_numpy(x)).numpy()
    ours = la.predict(torch.from_numpy(x))
    if with_noise:
        mean, noise = outputs, np.full(y.shape, 1 / float(la.noise_precision_))
        with torch.no_grad():
            residuals = held_out[0][1] - la.network(held_out[0][0])
        rows = {"network": noise, "noise": np.full(y.shape, float((residuals**2).mean()))}
    else:
        mean, rows = outputs[:, :1], {"network": np.exp(outputs[:, 1:])}
    rows["laplace"] = ours.observation_variance.numpy()
    assert list(found.table) == list(rows)
    given = ~np.isnan(y)
    for name, variance in rows.items():
        stddev = np.sqrt(variance)
        half = norm.ppf(0.95) * stddev
        inside = np.abs(y - mean) <= half
        reference = {
            "log_loss": -np.where(given, norm.logpdf(y, mean, stddev), 0).sum() / given.any(1).sum(),
            "rmse": math.sqrt(np.nanmean((y - mean) ** 2)),
            "crps": np.mean([crps(*each) for each in zip(mean[given], stddev[given], y[given], strict=True)]),
            "coverage_90": inside[given].mean(),
            "width_90": 2 * half[given].mean(),
        }
        if name == "laplace":
            scores = [la.predict(part).epistemic.numpy() for part in (torch.from_numpy(x), other)]
            reference["log_loss"] = -float(ours.log_prob(torch.from_numpy(y)).sum()) / given.any(1).sum()
            reference["other_auroc"] = roc_auc_score([0] * 50 + [1] * 30, np.concatenate(scores))
            reference["other_fpr95"] = fpr95(*scores)
        else:
            reference["other_auroc"] = reference["other_fpr95"] = math.nan
        assert_allclose([found.table[name][score] for score in reference], list(reference.values()), rtol=2e-4)
        assert set(found.table[name]) == set(reference)


def test_labels_of_positions_count_each_and_missing_ones_not_at_all() -> None:
    case = make_case("segmentation")
    la = LinearisedLaplace(case.model, case.given[0]).fit(case.batches, progress=False)
    likelihood = la.posterior_.likelihood
    assert isinstance(likelihood, Categorical)
    x, y = case.x, case.y.clone()
    y[0] = likelihood.ignore_index
    found = evaluate(la, [(x, y)]).table["laplace"]
    given = y != likelihood.ignore_index
    p, labels = la.predict(x).probs.movedim(likelihood.class_dim, -1)[given], y[given]
    assert_allclose(found["log_loss"], -p.gather(1, labels[:, None]).log().mean(), rtol=1e-6)
    assert_allclose(found["accuracy"], (p.argmax(1) == labels).double().mean(), rtol=1e-6)


def test_a_table_is_printed_drawn_and_given_to_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    la, test, held_out = regression()
    found = evaluate(la, test, [inputs(5, 1)], val_loader=held_out)
    lines = str(found).splitlines()
    assert lines[0].split() == ["50", "test", "data", "network", "noise", "laplace"]
    assert lines[2].split()[-4:] == ["↓", *(f"{row['rmse']:.4g}" for row in found.table.values())]
    assert lines[-1].split()[-3:] == ["–", "–", "epistemic"]
    axes = found.plot().figure.axes
    titles = [ax.get_title() for ax in axes]
    assert len(titles) == len(found.table["laplace"])
    assert titles[1] == "RMSE ↓"
    low, high = axes[1].get_xlim()  # the network and ours have the same
    assert high - low > 0.09 * found.table["laplace"]["rmse"]
    frames = SimpleNamespace(DataFrame=SimpleNamespace(from_dict=lambda table, orient: (table, orient)))
    monkeypatch.setitem(sys.modules, "pandas", frames)
    assert found.frame() == (found.table, "index")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas"):
        found.frame()


def test_data_on_the_cpu_and_the_network_on_a_device() -> None:
    _, test, held_out = regression()
    train = [(inputs(60, 1), torch.zeros(60, 2, dtype=torch.float64))]
    tables = []
    with pretended_device() as device:
        for where in (torch.device("cpu"), device):
            model = copy.deepcopy(network(2)).to(where)
            moved = LinearisedLaplace(model, "regression", method="exact", num_samples=4).fit(train, progress=False)
            moved.calibrate_novelty(train)
            tables.append(evaluate(moved, test, [inputs(5, 1)], val_loader=held_out).table)
            la3 = LinearisedLaplace(network(3).to(where), "classification", num_samples=4)
            labels = [(x, y[:, 0].clamp(0, 2).long()) for x, y in test]
            la3.fit(labels, progress=False)
            tables.append(evaluate(la3, labels, [inputs(5, 1)], val_loader=labels).table)
    for cpu, moved in zip(tables[:2], tables[2:], strict=True):
        for name, row in cpu.items():
            assert_allclose(list(moved[name].values()), list(row.values()), rtol=1e-6)


def test_what_cannot_be_scored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    la, test, _ = regression()
    with pytest.raises(ValueError, match="test data"):
        evaluate(la, [])
    with pytest.raises(ValueError, match="other data"):
        evaluate(la, test, [])
    with pytest.raises(ValueError, match="held-out data"):
        evaluate(la, test, val_loader=[])
    with pytest.raises(ValueError, match="target"):
        evaluate(la, [(test[0][0], torch.full_like(test[0][1], math.nan))])
    with pytest.raises(TypeError, match="pairs"):
        evaluate(la, [test[0][0]])
    with pytest.raises(NotFittedError):
        evaluate(LinearisedLaplace(nn.Linear(2, 1), "regression"), test)
    x = torch.rand(6, 2)
    counts = LinearisedLaplace(nn.Linear(2, 1), Poisson()).fit([(x, torch.ones(6, 1))], progress=False)
    with pytest.raises(ValueError, match="poisson"):
        evaluate(counts, [(x, torch.ones(6, 1))])
    soft = LinearisedLaplace(nn.Linear(2, 3), "classification").fit([(x, torch.zeros(6).long())], progress=False)
    with pytest.raises(ValueError, match="probabilities"):
        evaluate(soft, [(x, torch.full((6, 3), 1 / 3))])
    imported = builtins.__import__
    monkeypatch.setattr(
        builtins,
        "__import__",
        lambda name, *args, **kwargs: (
            imported("torchmetrics_that_is_not_there")
            if name.startswith("torchmetrics")
            else imported(name, *args, **kwargs)
        ),
    )
    with pytest.raises(ImportError, match=r"pip install laplace_sampling\[torchmetrics\]"):
        evaluate(la, test)
