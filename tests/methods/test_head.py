"""The posterior of a linear last layer in closed form, against dense algebra and the same weights by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
from cases import CASES, Case, make_case
from flat_settings import laplace_of, loader
from snapshot import assert_unchanged, snapshot
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Categorical, Gaussian, LinearisedLaplace
from laplace_sampling.curvature import head as module_of_head
from laplace_sampling.methods.closed_form import Head

NAMES = [
    name
    for name in CASES
    if name not in ("image_regression", "segmentation", "token_labels", "multi_task", "scalar_and_matrix")
]


def dense(case: Case, la: LinearisedLaplace, alpha: float) -> tuple[Tensor, Tensor]:
    """`J` of the last layer and the covariance of its weights, by autograd."""
    J = reference.jacobian(case.model, case.x)
    trained = [(name, p.numel()) for name, p in case.model.named_parameters() if p.requires_grad]
    parts = zip(trained, J.split([size for _, size in trained], 2), strict=True)
    J = torch.cat([part for (name, _), part in parts if name in la.network.names], 2)
    f = case.model(case.x).detach().reshape(len(case.x), -1)
    M = reference.ggn(J, reference.curvature(case.likelihood, f, case.y))
    return J, torch.linalg.inv(M + alpha * torch.eye(len(M)).double())


@pytest.mark.parametrize("name", NAMES)
def test_predictions_are_dense_ones_without_products(name: str, tmp_path: Path) -> None:
    case = make_case(name)
    before = snapshot(case.model)
    settings = {"prior_precision": 0.6, "prior": "isotropic", "num_samples": 400}
    la = laplace_of(case.model, case.given[0], parameters="last_layer", method="auto", **settings)
    la.fit(loader(case), progress=False)
    assert isinstance(la._fitted.fit.method, Head)
    J, covariance = dense(case, la, 0.6)
    expected = J.flatten(0, 1) @ covariance @ J.flatten(0, 1).T
    counts = dict(la.network.products)
    pred = la.predict(case.x)
    assert_close(pred.joint_covariance(), expected, rtol=1e-6, atol=1e-9)
    blocks = torch.stack([block @ covariance @ block.T for block in J])
    assert_close(pred.covariance(), blocks, rtol=1e-6, atol=1e-9)
    variances = blocks.diagonal(dim1=1, dim2=2)
    if name != "heteroscedastic":  # which gives that of the mean only
        assert_close(pred.variance.reshape(variances.shape), variances, rtol=1e-6, atol=1e-9)
    # Deviations are products of matrices with the inputs of the layer, counted as such, one a sample and datum.
    samples = pred.deviations.reshape(400, -1)
    assert_close(samples, la.samples_ @ J.flatten(0, 1).T, rtol=1e-6, atol=1e-9)
    assert la.network.products["jvp"] - counts["jvp"] == 400 * len(case.x)
    error = ((expected.diagonal()[:, None] * expected.diagonal() + expected**2) / 400).sqrt()
    assert ((samples.T @ samples / 400 - expected).abs() < 5 * error + 1e-12).all()
    assert_unchanged(case.model, before)
    if name == "from_loss":  # a file does not hold the user's loss
        return
    la.save(tmp_path / "posterior")
    loaded = LinearisedLaplace.load(tmp_path / "posterior", case.model)
    again = loaded.predict(case.x)
    assert loaded.network.head is not None
    assert_close(again.deviations, pred.deviations)
    assert_close(again.covariance(), pred.covariance())


class Counted(nn.Module):
    """Tells a function how many data go through it; a list of its own would be put back."""

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()
        self.body, self.head, self.count = nn.Sequential(nn.Linear(2, 5), nn.Tanh()), nn.Linear(5, 3), count

    def forward(self, x: Tensor) -> Tensor:
        self.count(len(x))
        return self.head(self.body(x))


def counted(count: Callable[[int], None] = lambda num: None) -> tuple[Counted, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(60, 2).double()
        return Counted(count).double(), x, torch.randint(3, (60,))


def test_a_fit_runs_the_network_once_and_so_does_a_prediction() -> None:
    counts: list[int] = []
    model, x, y = counted(counts.append)
    la = LinearisedLaplace(model, "classification", parameters="last_layer")
    la.fit_hyperparameters(DataLoader(TensorDataset(x, y), 10), progress=False)
    # Every batch, and the first one again, to see whether outputs are random; besides a few data, of which there are
    # products of the whole network: to find the layer, to compare both modes, and for the fingerprint of the function;
    # and four to count the operations of a gradient.
    assert counts.count(10) == 6 + 1
    assert sum(num for num in counts if num < 10) <= 40 + 4
    counts.clear()
    la.predict(x[:7]).covariance()
    assert counts == [7]


@pytest.mark.parametrize("noise", [Gaussian(1.0), Gaussian(torch.tensor([1.0, 2.0, 4.0]))])
def test_hyperparameters_and_evidence_of_a_regression_are_those_of_exact_algebra(noise: Gaussian) -> None:
    model, x, _ = counted()
    y = model(x).detach() + 0.3 * torch.randn(60, 3, generator=torch.Generator().manual_seed(1)).double()
    las = [
        LinearisedLaplace(model, noise, parameters="last_layer", method=method, num_samples=8)
        for method in ("last_layer", "exact")
    ]
    if noise.noise_precisions().dim():
        las = [la.fit([(x, y)], progress=False) for la in las]
    else:
        las = [la.fit_hyperparameters([(x, y)], progress=False) for la in las]
        assert_close(las[0].noise_precision_, las[1].noise_precision_, rtol=1e-5, atol=0.0)
    assert_close(las[0].prior_precision_, las[1].prior_precision_, rtol=1e-4, atol=0.0)
    assert_close(las[0].effective_dimension_, las[1].effective_dimension_, rtol=1e-4, atol=0.0)
    evidences = [float(la.log_marginal_likelihood()) for la in las]
    assert evidences[0] == pytest.approx(evidences[1], rel=1e-6)
    assert_close(las[0].predict(x[:4]).covariance(), las[1].predict(x[:4]).covariance(), rtol=1e-4, atol=1e-12)
    assert_close(las[0].leave_one_out().log_prob, las[1].leave_one_out().log_prob, rtol=1e-4, atol=1e-6)


def test_leave_one_out_and_evidence_of_classes_are_those_of_exact_algebra() -> None:
    model, x, y = counted()
    las = [
        laplace_of(model, "classification", parameters="last_layer", method=method).fit(
            [(x, y)], progress=False, tolerance=1e-4
        )
        for method in ("last_layer", "exact")
    ]
    assert_close(las[0].leave_one_out().log_prob, las[1].leave_one_out().log_prob, rtol=1e-4, atol=1e-4)
    evidences = [float(la.log_marginal_likelihood()) for la in las]
    assert evidences[0] == pytest.approx(evidences[1], rel=1e-5)


def test_evidence_chooses_what_exact_algebra_chooses() -> None:
    model, x, y = counted()
    found = [
        LinearisedLaplace(model, "classification", parameters="last_layer", method=method)
        .fit_hyperparameters([(x, y)], progress=False, criterion="evidence")
        .prior_precision_
        for method in ("last_layer", "exact")
    ]
    assert_close(*found, rtol=0.06, atol=0.0)  # of the tolerance of the search


@pytest.mark.parametrize("prior", ["isotropic", "g-prior", "layerwise"])
def test_many_weights_have_factors_and_every_prior(prior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_head, "_MOST_WEIGHTS", 1)
    model, x, y = counted()
    la = LinearisedLaplace(model, "classification", parameters="last_layer", prior=prior, num_samples=1000)
    la.fit_hyperparameters([(x, y)], progress=False)
    fit = la._fitted.fit
    assert fit.approximate
    M, A = fit.curvature.matmul(torch.eye(18).double()), torch.diag(fit.prior.spread().double())
    pred, scale = la.predict(x[:5]), fit.prior.scale.double()
    rows = la.network.jacobian(x[:5]) * scale
    expected = rows @ torch.linalg.inv(M + A) @ rows.mT * la.scale_ / la.temperature_**2
    assert_close(pred.covariance(), expected, rtol=1e-6, atol=1e-9)
    with pytest.raises(ValueError, match="covariances"):
        la.leave_one_out()


def test_errors_name_what_the_method_is_for() -> None:
    model, x, y = counted()
    with pytest.raises(ValueError, match="last_layer"):
        LinearisedLaplace(model, Categorical(), method="last_layer").fit([(x, y)], progress=False)
