"""The posterior of a part of the data: exact with all rows, and near it with some."""

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of, loader
from grids import covering
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Evidence, LinearisedLaplace
from laplace_sampling.methods import closed_form
from laplace_sampling.methods.closed_form import Subset
from laplace_sampling.methods.method import Choice
from laplace_sampling.methods.plan import Auto

ALL = Subset(max_rows=10**6)


def regression(num_data: int = 300) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(num_data, 1, generator=generator, dtype=torch.float64) * 4 - 2
    y = (2 * x).sin() + 0.1 * torch.randn(num_data, 1, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(300):
        optimiser.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimiser.step()
    return model, x, y


@covering(name=["classification", "regression", "conv_batch_norm"], prior=["isotropic", "g-prior", "layerwise"])
def test_all_rows_give_the_exact_posterior(name: str, prior: str) -> None:
    case = make_case(name)
    settings = {"prior": prior, "prior_precision": 0.6, "num_samples": 1000}
    found, exact = (
        # The rank is that of the accuracy which is asked for.
        laplace_of(case.model, case.likelihood, method=method, **settings).fit(
            loader(case), progress=False, tolerance=1e-7
        )
        for method in (ALL, "exact")
    )
    pred, expected = found.predict(case.x[:3]), exact.predict(case.x[:3])
    covariance = expected.joint_covariance()
    assert_close(pred.joint_covariance(), covariance, rtol=1e-5, atol=1e-9)
    assert float(found.effective_dimension_.sum()) == pytest.approx(float(exact.effective_dimension_.sum()), rel=1e-6)
    assert float(found.log_marginal_likelihood()) == pytest.approx(float(exact.log_marginal_likelihood()), rel=2e-3)
    assert found.converged_
    deviations = pred.deviations.flatten(1)
    error = ((covariance.diagonal()[:, None] * covariance.diagonal() + covariance**2) / 1000).sqrt()
    assert ((deviations.T @ deviations / 1000 - covariance).abs() < 5 * error + 1e-12).all()


@pytest.mark.filterwarnings("ignore:The samples have not converged:laplace_sampling.ConvergenceWarning")
def test_hyperparameters_of_a_regression_are_the_exact_ones() -> None:
    """`α`, `b` and `γ` by the evidence, whose determinant is that of a part; its mode is that of all data."""
    model, x, y = regression()
    batches = list(zip(x.split(100), y.split(100), strict=True))
    settings = {"prior": "isotropic", "linear_model": "affine"}
    exact = LinearisedLaplace(model, "regression", method="exact", **settings).fit_hyperparameters(
        batches, progress=False, tolerance=1e-3
    )
    gamma = float(exact.effective_dimension_)
    for method, accuracy in ((ALL, 0.02), (Subset(max_rows=200), 0.25)):
        la = LinearisedLaplace(model, "regression", method=method, **settings)
        la.fit_hyperparameters(batches, progress=False, tolerance=5e-3, criterion=Evidence(max_steps=40))
        assert float(la.prior_precision_) == pytest.approx(float(exact.prior_precision_), rel=2 * accuracy)
        assert float(la.noise_precision_) == pytest.approx(float(exact.noise_precision_), rel=accuracy)
        assert float(la.effective_dimension_) == pytest.approx(gamma, rel=accuracy)


def test_the_part_and_its_accuracy_are_told() -> None:
    model, x, y = regression()
    la = laplace_of(model, "regression", method=Subset(max_rows=20), prior="isotropic", prior_precision=1.0)
    with pytest.warns(UserWarning, match="max_rows"):
        la.fit([(x, y)], progress=False)
    assert "20 random rows of 20 of 300 data" in str(la)
    diagnosis = la.diagnose()
    assert "change of standard deviations from half of the part" in diagnosis["largest residual"].name
    assert not la.converged_
    with pytest.raises(ValueError, match="max_rows"):
        Subset(max_rows=0)


def chosen(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """`Auto` takes a part of so many rows."""
    monkeypatch.setattr(Auto, "choose", lambda self, problem: Choice(Subset(max_rows=rows), self))


@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
@pytest.mark.parametrize("criterion", ["self_consistency", "evidence"])
def test_a_classification_is_tuned_saved_and_loaded(criterion: str, tmp_path) -> None:
    case = make_case("classification_many_data")
    settings = {"prior": "isotropic", "num_samples": 4}
    found, exact = (
        LinearisedLaplace(case.model, "classification", method=method, **settings).fit_hyperparameters(
            case.batches, progress=False, criterion=criterion
        )
        for method in (ALL, "exact")
    )
    assert float(found.prior_precision_) == pytest.approx(float(exact.prior_precision_), rel=0.15)
    pred = found.predict(case.x[:3])
    found.save(tmp_path / "posterior.pt")
    loaded = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert loaded.settings.method == ALL
    assert_close(loaded.predict(case.x[:3]).joint_covariance(), pred.joint_covariance())


@pytest.mark.filterwarnings("ignore::laplace_sampling.ConvergenceWarning")
@pytest.mark.parametrize("grows", [True, False])
def test_the_part_of_the_fit_chooses_the_precision(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, parts, choose = make_case("classification_many_data"), [], closed_form.by_selection

    def recorded(task, selection, path, *near):
        parts.append(path.curvature.num_rows)
        return choose(task, selection, path, *near)

    monkeypatch.setattr(closed_form, "by_selection", recorded)
    monkeypatch.setattr(closed_form, "_PILOT", 20)
    method, steps = Subset(max_rows=10_000 if grows else 20), []
    la = LinearisedLaplace(case.model, "classification", method=method, prior="isotropic", num_samples=4)
    la.fit_hyperparameters(case.batches, progress=False, criterion="self_consistency", callback=steps.append)
    assert len(steps) == 1
    assert len(parts) == 1 + grows
    assert f"{parts[-1]} random rows" in str(la)


def test_all_rows_of_a_small_network_are_within_the_default_budget() -> None:
    """Their matrix is that of the weights, whose cube counts, and not that of the 10,000 rows."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2000, 5, generator=generator), torch.randint(5, (2000,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.Tanh(), torch.nn.Linear(12, 5))
    la = LinearisedLaplace(model, "classification", method="subset", num_samples=4).fit([(x, y)], progress=False)
    accuracy = la.diagnose().accuracy
    assert accuracy is not None
    assert accuracy.left_out <= 0.015
    assert la.converged_ is not False
