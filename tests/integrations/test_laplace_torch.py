"""`Laplace(..., hessian_structure="sampled")` against laplace-torch's own full covariance."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from laplace_sampling import Krylov, LinearisedLaplace, NotFittedError

laplace: Any = pytest.importorskip("laplace", reason="the extra `laplace_torch` is not installed")

from laplace_sampling.integrations.laplace_torch import SampledLaplace, SampledLastLayerLaplace  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    # laplace-torch says this of every call of `optimize_prior_precision` for a classification.
    pytest.mark.filterwarnings("ignore:By default `link_approx` is `probit`:UserWarning"),
]

LIKELIHOODS, SUBSETS = ("regression", "classification"), ("all", "last_layer")
LINKS = ("probit", "bridge", "bridge_norm")
# Float64, and dense algebra of both.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    """laplace-torch multiplies the curvature by an identity in the default precision, whatever that of the model."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Problem:
    """A small network that has learnt a little, and data: fewer numbers than weights, or more."""

    def __init__(self, likelihood: str, num_data: int = 30, outputs: int = 3) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs))
            x = torch.randn(num_data, 2)
            self.x_new = 1.5 * torch.randn(4, 2)
            truth = torch.stack([x[:, 0].sin(), x[:, 1], x.prod(1)], 1)[:, :outputs]
            noisy = truth + 0.3 * torch.randn(num_data, outputs)
            y = noisy if likelihood == "regression" else noisy.argmax(1)
            loss = nn.functional.mse_loss if likelihood == "regression" else nn.functional.cross_entropy
            optimiser = torch.optim.Adam(self.model.parameters(), 0.02)
            for _ in range(100):
                optimiser.zero_grad()
                loss(self.model(x), y).backward()
                optimiser.step()
        self.model.zero_grad()
        self.x, self.y, self.likelihood = x, y, likelihood
        self.loader = DataLoader(TensorDataset(x, y), batch_size=7)
        self.noise = {"sigma_noise": 0.3} if likelihood == "regression" else {}

    def pair(
        self, subset: str = "all", method: Any = "exact", num_samples: int = 100, **settings: Any
    ) -> tuple[Any, SampledLaplace]:
        """Theirs with the full covariance, and ours, both fitted."""
        settings = {"prior_precision": 0.7, **self.noise, **settings}
        theirs = laplace.Laplace(self.model, self.likelihood, subset, "full", **settings)
        own = {"method": method, "num_samples": num_samples}
        ours = laplace.Laplace(self.model, self.likelihood, subset, "sampled", **own, **settings)
        theirs.fit(self.loader)
        assert ours.fit(self.loader) is None
        return theirs, ours

    def sampled(self, **settings: Any) -> SampledLaplace:
        """Ours, fitted."""
        settings = {"method": "exact", **self.noise, **settings}
        ours = laplace.Laplace(self.model, self.likelihood, "all", "sampled", **settings)
        ours.fit(self.loader)
        return ours


@pytest.fixture(params=LIKELIHOODS)
def problem(request: pytest.FixtureRequest) -> Problem:
    return Problem(request.param)


def assert_same_predictions(theirs: Any, ours: SampledLaplace, x: Tensor) -> None:
    if theirs.likelihood == "classification":
        for link in LINKS:
            assert_close(ours(x, link_approx=link), theirs(x, link_approx=link), **CLOSE)
        return
    for form in ({}, {"joint": True}, {"diagonal_output": True}):
        for mine, other in zip(ours(x, **form), theirs(x, **form), strict=True):
            assert_close(mine, other, **CLOSE)


def evidence_and_gradient(la: Any, values: dict[str, Tensor]) -> tuple[Tensor, ...]:
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    evidence = la.log_marginal_likelihood(**values)
    evidence.backward()
    return evidence.detach(), *(value.grad for value in values.values())


# What is the same -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subset", SUBSETS)
def test_predictions_and_evidence_are_those_of_the_full_covariance(problem: Problem, subset: str) -> None:
    theirs, ours = problem.pair(subset)
    assert type(ours) is (SampledLaplace if subset == "all" else SampledLastLayerLaplace)
    assert_same_predictions(theirs, ours, problem.x_new)
    assert_close(ours.predictive(problem.x_new, "glm", "probit", 10), ours(problem.x_new))
    assert_close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood(), **CLOSE)
    assert_close(ours.log_likelihood, theirs.log_likelihood)
    assert_close(ours.mean, theirs.mean)
    assert (ours.n_data, ours.n_outputs, ours.n_params) == (theirs.n_data, theirs.n_outputs, theirs.n_params)


def test_fewer_observations_than_weights(problem: Problem) -> None:
    problem = Problem(problem.likelihood, num_data=6)
    theirs, ours = problem.pair()
    assert "space of the observations" in repr(ours.linearised)
    for precision in (0.7, 0.02):
        theirs.prior_precision = ours.prior_precision = precision
        assert_same_predictions(theirs, ours, problem.x_new)
        assert_close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood(), **CLOSE)


def test_hyperparameters_mean_the_same(problem: Problem) -> None:
    theirs, ours = problem.pair(temperature=0.6, prior_mean=0.2)
    assert_same_predictions(theirs, ours, problem.x_new)
    for la in (theirs, ours):
        la.prior_precision, la.temperature = 0.4, 1.7
        la.prior_mean = torch.linspace(-1, 1, ours.n_params)
        if problem.noise:
            la.sigma_noise = torch.tensor([0.8])
    assert_same_predictions(theirs, ours, problem.x_new)
    assert_close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood(), **CLOSE)
    assert_close(ours.log_det_posterior_precision, theirs.log_det_posterior_precision, **CLOSE)


@pytest.mark.parametrize("precision", [0.5, 1e-4])
def test_evidence_has_the_same_gradient(problem: Problem, precision: float) -> None:
    theirs, ours = problem.pair(temperature=1.3)
    values = {"prior_precision": torch.tensor([precision])}
    if problem.noise:
        values["sigma_noise"] = torch.tensor(0.45)
    for mine, other in zip(*(evidence_and_gradient(la, values) for la in (ours, theirs)), strict=True):
        assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("subset", SUBSETS)
def test_marglik_chooses_the_same_prior_precision(problem: Problem, subset: str) -> None:
    theirs, ours = problem.pair(subset)
    for la in (theirs, ours):
        la.optimize_prior_precision(method="marglik")
    assert_close(ours.prior_precision, theirs.prior_precision, **CLOSE)
    assert_same_predictions(theirs, ours, problem.x_new)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_named_last_layer_and_frozen_weights(likelihood: str) -> None:
    problem = Problem(likelihood)
    named = laplace.Laplace(
        problem.model, likelihood, "last_layer", "sampled", last_layer_name="2", method="exact", **problem.noise
    )
    problem.model[0].requires_grad_(False)
    frozen = laplace.Laplace(problem.model, likelihood, "all", "sampled", method="exact", **problem.noise)
    full = laplace.Laplace(problem.model, likelihood, "last_layer", "full", **problem.noise)
    for la in (named, frozen, full):
        la.fit(problem.loader)
    assert_same_predictions(full, named, problem.x_new)
    assert_same_predictions(full, frozen, problem.x_new)


# Samples --------------------------------------------------------------------------------------------------------------


def test_samples_have_the_full_covariance() -> None:
    """Second moments of `K` samples have a relative standard error of at most `√(2/K)`."""
    problem = Problem("regression")
    theirs, ours = problem.pair(num_samples=4000, temperature=1.6)
    standard_error = math.sqrt(2 / 4000)
    covariance = theirs.posterior_covariance
    scale = covariance.diagonal().sqrt()
    deviations = (ours.sample(4000) - ours.mean) / scale
    correlation = covariance / scale[:, None] / scale
    assert float((deviations.T @ deviations / 4000 - correlation).abs().max()) < 5 * standard_error
    mean, joint = theirs(problem.x_new, joint=True)
    scale = joint.diagonal().sqrt()
    functions = (ours.functional_samples(problem.x_new, n_samples=4000).flatten(1) - mean) / scale
    correlation = joint / scale[:, None] / scale
    assert float((functions.T @ functions / 4000 - correlation).abs().max()) < 5 * standard_error


def test_a_sample_is_one_function_of_all_inputs() -> None:
    problem = Problem("regression")
    ours = problem.sampled()

    def draws(of: Any, *args: Any, **options: Any) -> Tensor:
        return of(*args, n_samples=9, generator=torch.Generator().manual_seed(3), **options)

    weights = draws(ours.sample)
    assert ours.linearised is not None
    network = ours.linearised.network
    expected = problem.model(problem.x_new) + network.jvp(problem.x_new, weights - ours.mean)
    assert_close(draws(ours.functional_samples, problem.x_new), expected.detach())
    assert_close(draws(ours.predictive_samples, problem.x_new), expected.detach())
    copied = copy.deepcopy(problem.model)
    expected = []
    for row in weights:
        nn.utils.vector_to_parameters(row, copied.parameters())
        expected.append(copied(problem.x_new).detach())
    expected = torch.stack(expected)
    assert_close(draws(ours.functional_samples, problem.x_new, pred_type="nn"), expected)
    assert_close(draws(ours.predictive_samples, problem.x_new, pred_type="nn"), expected)


def test_other_methods_agree_within_the_errors_of_samples(problem: Problem) -> None:
    """Variances of `K` samples have a relative standard error of `√(2/K)`; the evidence has one of its own."""
    theirs, ours = problem.pair(method=Krylov(), num_samples=400)
    evidence = ours.log_marginal_likelihood()
    assert ours.linearised is not None
    error = ours.linearised.log_marginal_likelihood(at="network").standard_error
    assert float(evidence) == pytest.approx(float(theirs.log_marginal_likelihood()), abs=4 * error + 1e-3)
    for la in (ours, theirs):
        la.optimize_prior_precision()
    assert float(ours.prior_precision) == pytest.approx(float(theirs.prior_precision), rel=0.05)
    theirs.prior_precision = ours.prior_precision
    variances = [la._glm_predictive_distribution(problem.x_new)[1].diagonal(dim1=1, dim2=2) for la in (ours, theirs)]
    assert_close(*variances, rtol=5 * math.sqrt(2 / 400), atol=0)


def test_forms_of_samples(problem: Problem) -> None:
    ours, x = problem.sampled(num_samples=4), problem.x_new
    torch.manual_seed(0)
    state = torch.get_rng_state()
    weights = {name: p.clone() for name, p in problem.model.named_parameters()}
    for pred_type in ("glm", "nn"):
        # Nine are more than the fit has, of which the further ones are kept.
        assert ours.functional_samples(x, pred_type, n_samples=9).shape == (9, 4, 3)
        samples = ours.predictive_samples(x, pred_type=pred_type, n_samples=3)
        assert samples.shape == (3, 4, 3)
        assert bool((samples.sum(-1) - 1).abs().max() < 1e-12) == (problem.likelihood == "classification")
    assert ours.functional_samples(x).shape == (100, 4, 3)
    assert ours.sample(2).shape == (2, ours.n_params)
    assert not torch.equal(ours.sample(1), ours.sample(1))
    pairs = [ours.sample(3, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*pairs)
    if problem.likelihood == "regression":
        mean, variance = ours(x, pred_type="nn", link_approx="mc", n_samples=20)
        assert mean.shape == variance.shape == (4, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, weights[name]) for name, p in problem.model.named_parameters())


def test_samples_of_images_keep_their_shape() -> None:
    model, x = nn.Conv2d(1, 2, 3, padding=1), torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    ours = laplace.Laplace(model, "regression", "all", "sampled", method="exact")
    ours.fit(DataLoader(TensorDataset(x, model(x).detach() + 0.1), 3))
    mean, covariance = ours(x[:2])
    assert_close(mean, model(x[:2]).detach().flatten(1))
    assert covariance.shape == (2, 32, 32)
    assert ours.functional_samples(x[:2], n_samples=5).shape == (5, 2, 2, 4, 4)
    with pytest.raises(NotImplementedError, match="axis"):
        laplace.Laplace(model, "classification", "all", "sampled").fit([(x, model(x).argmax(1))])


# Fits, files and batches ----------------------------------------------------------------------------------------------


def test_one_prior_precision_is_tuned_without_a_fit(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = []
    fit = LinearisedLaplace.fit
    monkeypatch.setattr(LinearisedLaplace, "fit", lambda la, *args, **rest: fits.append(la) or fit(la, *args, **rest))
    ours = problem.sampled()
    ours.optimize_prior_precision()
    ours.log_marginal_likelihood(torch.tensor(3.0))
    assert len(fits) == 1
    for _ in range(2):
        ours(problem.x_new)
        ours.sample(3)
    assert len(fits) == 2
    assert ours.linearised is fits[-1]
    assert float(ours.linearised.prior_precision_) == pytest.approx(3.0)
    ours.fit(problem.loader, progress_bar=False)
    assert len(fits) == 3


def test_a_posterior_is_saved_by_this_library(problem: Problem, tmp_path: Path) -> None:
    ours = problem.sampled(temperature=1.5)
    with pytest.raises(NotImplementedError, match="save"):
        ours.state_dict()
    assert ours.linearised is not None
    ours.linearised.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", problem.model)
    assert_close(again.predict(problem.x_new).covariance(), ours._glm_predictive_distribution(problem.x_new)[1])


class OfDictionary(nn.Module):
    """As laplace-torch calls them: with the whole dictionary as one argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        return self.model(data["features"])


def test_batches_that_are_dictionaries(problem: Problem) -> None:
    data = [{"features": x, "target": y} for x, y in zip(problem.x, problem.y, strict=True)]
    settings = {"dict_key_y": "target", "dict_key_x": "features", **problem.noise}
    of_dictionary = laplace.Laplace(
        OfDictionary(problem.model), problem.likelihood, "all", "sampled", method="exact", **settings
    )
    of_dictionary.fit(DataLoader(data, batch_size=7))
    expected = problem.sampled()(problem.x_new)
    for x in ({"features": problem.x_new}, {"features": problem.x_new, "target": problem.x_new}):
        assert_close(of_dictionary(x), expected)
    assert of_dictionary.functional_samples({"features": problem.x_new}, "nn", n_samples=2).shape == (2, 4, 3)


# Errors ---------------------------------------------------------------------------------------------------------------


def test_calls_without_a_meaning(problem: Problem) -> None:
    ours, x = problem.sampled(), problem.x_new
    for call, message in (
        (lambda: ours.fit(problem.loader, override=False), "data"),
        (lambda: problem.sampled().optimize_prior_precision(prior_structure="diag"), "prior precision"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
    for call, message in (
        (lambda: ours.functional_samples(x, "linear"), "glm"),
        (lambda: ours(x, pred_type="linear"), "glm"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_nothing_is_asked_of_what_is_not_fitted(problem: Problem) -> None:
    ours = laplace.Laplace(problem.model, problem.likelihood, "all", "sampled")
    for call in (
        lambda: ours(problem.x_new),
        lambda: ours.sample(1),
        ours.log_marginal_likelihood,
    ):
        with pytest.raises(NotFittedError, match="train_loader"):
            call()


def test_another_network_is_not_fitted_again_without_a_word(problem: Problem) -> None:
    ours = problem.sampled()
    with torch.no_grad():
        problem.model[0].bias += 1
    ours.prior_precision = 3.0
    with pytest.raises(ValueError, match="weights"):
        ours(problem.x_new)
