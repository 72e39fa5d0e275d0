"""Labels that are probabilities: as labels of every class that count as much as the probability says."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from laplace_sampling import Bernoulli, Categorical, Data, IsotropicPrior, LinearisedLaplace, MultiTask
from laplace_sampling.predictions.prediction import ClassificationPrediction

NUM = 60
METHODS = ["exact", pytest.param("krylov", marks=pytest.mark.slow), "kfac", "diagonal", "last_layer"]


def trained(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network with its data and soft labels."""
    torch.manual_seed(0)
    x = torch.randn(NUM, 2, dtype=torch.float64)
    logits = 2 * x @ torch.randn(2, 1 if kind == "binary" else 3, dtype=torch.float64)
    y = logits.sigmoid() if kind == "binary" else logits.softmax(-1)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, y.shape[1])).double()
    loss = nn.functional.binary_cross_entropy_with_logits if kind == "binary" else nn.functional.cross_entropy
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-3)
    for _ in range(60):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    return model, x, y


def as_hard_labels(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A datum for each class, with its weight."""
    if y.shape[1] == 1:
        labels, weights = torch.tensor([0.0, 1.0], dtype=y.dtype), torch.cat([1 - y, y], 1)
        return x.repeat_interleave(2, 0), labels.repeat(len(x))[:, None], weights.flatten()
    return x.repeat_interleave(y.shape[1], 0), torch.arange(y.shape[1]).repeat(len(x)), y.flatten()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_a_soft_label_counts_as_weighted_labels(kind: str, method: str) -> None:
    model, x, y = trained(kind)
    settings: dict[str, Any] = {"method": method, "prior": "isotropic", "num_samples": 8}
    settings |= {"parameters": "last_layer"} if method == "last_layer" else {}
    xs, labels, weights = as_hard_labels(x, y)
    soft, hard = LinearisedLaplace(model, kind, **settings), LinearisedLaplace(model, kind, **settings)
    options = {"criterion": "evidence", "progress": False, "budget": None}
    soft.fit_hyperparameters([(x, y)], **options)
    hard.fit_hyperparameters([(xs, labels)], data=Data(weights=weights), **options)
    # Random probes belong to data, of which there are others; factors are of the same sums.
    tolerance = 0.1 if method == "krylov" else 1e-5
    assert torch.allclose(soft.prior_precision_, hard.prior_precision_, rtol=tolerance)
    evidence, other = (m.log_marginal_likelihood() for m in (soft, hard))
    assert math.isclose(evidence.data_fit, other.data_fit, rel_tol=tolerance)
    if method != "krylov":
        assert math.isclose(evidence.value, other.value, rel_tol=1e-6)
        assert torch.allclose(soft.predict(x).covariance(), hard.predict(x).covariance(), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_certain_soft_labels_are_labels(kind: str) -> None:
    model, x, y = trained(kind)
    hard = y.argmax(1) if kind == "classification" else y.round()
    certain = nn.functional.one_hot(hard, 3).double() if kind == "classification" else hard
    fits = []
    for labels in (hard, certain):
        la = LinearisedLaplace(model, kind, method="exact", prior="isotropic")
        fits.append(la.fit_hyperparameters([(x, labels)], criterion="leave_one_out", progress=False))
    a, b = fits
    assert torch.allclose(a.prior_precision_, b.prior_precision_)
    assert math.isclose(a.scale_, b.scale_)
    assert math.isclose(a.score("loo").value, b.score("loo").value, rel_tol=1e-9)
    assert torch.allclose(a.leave_one_out().log_prob, b.leave_one_out().log_prob)
    assert torch.allclose(a.predict(x).log_prob(hard), b.predict(x).log_prob(certain))
    assert math.isclose(float(a.predict(x).joint_log_prob(hard)), float(b.predict(x).joint_log_prob(certain)))


@pytest.mark.parametrize("criterion", ["self_consistency", "validation"])
@pytest.mark.parametrize("kind", ["classification", "binary"])
def test_every_criterion_takes_soft_labels(kind: str, criterion: str) -> None:
    model, x, y = trained(kind)
    la = LinearisedLaplace(model, kind, method="exact", prior="isotropic")
    more = {"val_loader": [(x[40:], y[40:])]} if criterion == "validation" else {}
    la.fit_hyperparameters([(x[:40], y[:40])], criterion=criterion, progress=False, **more)
    assert la.converged_
    assert math.isfinite(la.score("loo").value)
    assert bool(la.leave_one_out().log_prob.isfinite().all())


def test_positions_have_soft_labels_and_some_none() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(1, 3, 1).double(), torch.randn(6, 1, 2, 2, dtype=torch.float64)
    y = torch.randn(6, 3, 2, 2, dtype=torch.float64).softmax(1)
    gone = torch.rand(6, 1, 2, 2) < 0.3
    y = y.masked_fill(gone, torch.nan)
    prior = IsotropicPrior(precision=1.0)
    la = LinearisedLaplace(model, Categorical(), prior=prior, method="exact").fit([(x, y)], progress=False)
    hard = torch.randint(3, (6, 2, 2)).masked_fill(gone[:, 0], -100)
    other = LinearisedLaplace(model, Categorical(), prior=prior, method="exact").fit([(x, hard)], progress=False)
    # The curvature does not depend on the labels, but on where they are.
    assert torch.allclose(la.predict(x).variance, other.predict(x).variance)
    assert bool(la.predict(x).log_prob(y).isfinite().all())


def test_heads_take_soft_labels() -> None:
    torch.manual_seed(0)

    class Heads(nn.ModuleDict):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {name: head(x) for name, head in self.items()}

    model, x = Heads({"kind": nn.Linear(3, 3), "flag": nn.Linear(3, 1)}).double(), torch.randn(20, 3).double()
    y = {"kind": torch.randn(20, 3).double().softmax(1), "flag": torch.rand(20, 1).double()}
    la = LinearisedLaplace(model, MultiTask({"kind": Categorical(), "flag": Bernoulli()}), method="exact")
    la.fit([(x, y)], progress=False)
    pred = la.predict(x)
    assert bool(pred.log_prob(y).isfinite().all())
    assert torch.allclose(pred["kind"].log_prob(y["kind"]), (y["kind"] * pred["kind"].probs.log()).sum(1))


def test_what_is_no_soft_label_is_an_error() -> None:
    model, x, y = trained("classification")
    la = LinearisedLaplace(model, "classification", method="exact")
    for wrong, message in (
        (2 * y, "sum to 1 over axis 1"),
        (y - 0.1 * torch.tensor([4.0, -2.0, -2.0]), "at least 0 and sum to 1"),
        (y.masked_fill(torch.eye(NUM, 3, dtype=torch.bool), torch.nan), "NaN for all of them"),
    ):
        with pytest.raises(ValueError, match=message):
            la.fit([(x, wrong)], progress=False)
    with pytest.raises(TypeError, match="integers"):
        la.fit([(x, y[:, 0])], progress=False)
    la.fit([(x, y.float())], progress=False)
    with pytest.raises(ValueError, match="needs labels"):
        la.calibrate_conformal([(x, y)])
    binary, x, y = trained("binary")
    with pytest.raises(ValueError, match="proportions"):
        LinearisedLaplace(binary, "binary").fit([(x, y + 0.5)], progress=False)
    assert isinstance(la.predict(x), ClassificationPrediction)
