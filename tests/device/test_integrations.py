"""The interfaces of other libraries, with the data on the CPU and the network on the device.

Trainers of Lightning, transformers and Accelerate ask torch for a real device. Their callbacks fit by `PeriodicFits`.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, cast

import gpytorch
import pytest
import torch
from cases import make_case
from gaussian_processes import KERNELS, inputs, model
from pretended_device import pretended_device
from torch import Tensor, nn

from laplace_sampling import Evidence, LinearisedLaplace
from laplace_sampling.gp.tangent_kernel import TangentGP
from laplace_sampling.integrations.periodic_fits import PeriodicFits
from laplace_sampling.kernels import condition, tune


def same_on_both(function: Callable[[nn.Module], dict[str, Tensor]], model: nn.Module) -> None:
    """Compares what a function makes of a network on the CPU and on the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = {name: value.detach() for name, value in function(copy.deepcopy(model)).items()}
        with pretended_device() as device:
            found = {name: value.detach().cpu() for name, value in function(copy.deepcopy(model).to(device)).items()}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("dense_size", [4000, 1])
def test_a_process_of_gpytorch(dense_size: int) -> None:
    """The process is where its data are, whether its matrix is dense or known by its products."""
    case = make_case("regression")

    def process(model: nn.Module) -> dict[str, Tensor]:
        likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
        gp = TangentGP(case.x, case.y[:, 0], likelihood, model, dense_size=dense_size)
        loss = -gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp.train())(gp(case.x), case.y[:, 0])
        loss.backward()
        prediction = gp.eval()(case.x + 0.1)
        assert prediction.mean.is_cpu
        assert prediction.variance.is_cpu
        gradient = gp.covar_module.raw_prior_precision.grad
        return {"loss": loss.detach(), "gradient": gradient, "mean": prediction.mean, "variance": prediction.variance}

    same_on_both(process, case.model)


@pytest.mark.parametrize("solver", ["exact", "cg", "projections", "dual_descent"])
def test_a_posterior_of_any_kernel(solver: str) -> None:
    """The model is on the device, the inputs of predictions on the CPU."""
    gp = model(KERNELS["network and rest"](), n=60, noise=0.3)

    def posterior(gp: nn.Module) -> dict[str, Tensor]:
        posterior = condition(cast(Any, gp), 3, solver=solver, max_passes=20, tolerance=0.9)
        x = inputs(5, seed=2)
        more = posterior.extended(x, x[:, 0])
        found = {"samples": posterior.samples(x), "mean": more.mean(x), "log_prob": more.log_prob(x, x[:, 0])}
        own = x.expand(3, 5, -1).clone().requires_grad_()
        found["paths"] = posterior.sample_paths()(own)
        (found["derivatives"],) = torch.autograd.grad(found["paths"].sum(), own)
        assert all(value.is_cpu for value in found.values())
        return {name: value.detach() for name, value in found.items()}

    same_on_both(posterior, gp)


@pytest.mark.parametrize("inducing", [8, inputs(8, seed=3)], ids=["number", "points"])
def test_inducing_points_of_a_process(inducing: int | Tensor) -> None:
    """Points that are given are on the CPU, the model on the device."""
    gp = model(KERNELS["network and rest"](), n=60, noise=0.3)

    def posterior(gp: nn.Module) -> dict[str, Tensor]:
        posterior = condition(cast(Any, gp), 3, inducing=inducing)
        x = inputs(5, seed=2)
        return {"samples": posterior.samples(x), "mean": posterior.mean(x), "log_prob": posterior.log_prob(x, x[:, 0])}

    same_on_both(posterior, gp)


@pytest.mark.parametrize("method", ["exact", "pathwise"])
def test_hyperparameters_of_a_process(method: str) -> None:
    gp = model(KERNELS["network and rest"](), n=30, noise=0.3)

    def tuned(gp: nn.Module) -> dict[str, Tensor]:
        found = tune(cast(Any, gp), 2, method=method, max_passes=12, tolerance=0.5)
        return {"gain": torch.tensor(found.gain), **gp.state_dict()}

    same_on_both(tuned, gp)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_a_module_with_conformal_intervals_or_sets(kind: str) -> None:
    """Scores of held-out data are on the CPU, the module on the device."""
    case = make_case(kind)

    def at_level(model: nn.Module) -> dict[str, Tensor]:
        la = LinearisedLaplace(model, kind, method="krylov", num_samples=4).fit(case.batches, progress=False)
        la.calibrate_conformal([(torch.cat([case.x] * 3) + 0.1, torch.cat([case.y] * 3))])
        found = la.to_module(level=0.8)(case.x.to(next(model.parameters()).device))
        return {name: value.double() for name, value in found.items()}

    same_on_both(at_level, case.model)


def test_fits_within_a_training() -> None:
    case = make_case("regression_many_data")

    def training(model: nn.Module) -> dict[str, Tensor]:
        device = next(model.parameters()).device
        fits = PeriodicFits("regression", val_loader=case.batches, metrics={"log_prob": _log_prob}, budget=None)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
        for epoch in (1, 2):
            for x, y in case.batches:
                optimiser.zero_grad()
                nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()
                optimiser.step()
            fits.fit(model, case.batches, epoch=epoch)
        metrics = torch.tensor([record["log_prob"] for record in fits.history_], dtype=torch.float64)
        return {"metrics": metrics, "alpha": fits.laplace_.prior_precision_}

    same_on_both(training, case.model)


def _log_prob(prediction: Any, targets: Tensor) -> Tensor:
    return prediction.log_prob(targets)


@pytest.mark.slow
def test_an_estimator_of_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    from laplace_sampling.integrations.scikit_learn import LaplaceRegressor

    case = make_case("regression")
    x, y = case.x.float().numpy(), case.y.float().numpy()

    def estimator(model: nn.Module) -> dict[str, Tensor]:
        regressor = LaplaceRegressor(model.float(), max_epochs=1, num_samples=4).fit(x, y)
        mean, deviation = regressor.predict(x, return_std=True)
        return {"mean": torch.tensor(mean), "deviation": torch.tensor(deviation)}

    same_on_both(estimator, case.model)


@pytest.mark.slow
def test_a_classifier_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=2, **size)
    model = transformers.BertForSequenceClassification(config).double().eval()
    tokens = torch.randint(20, (24, 6))
    batches = [{"input_ids": part, "labels": part[:, 0] % 2} for part in tokens.split(8)]

    def classifier(model: nn.Module) -> dict[str, Tensor]:
        la = LinearisedLaplace(model, "classification", method="kfac", num_samples=4)
        la.fit_hyperparameters(batches, tolerance=0.2, criterion=Evidence(max_steps=1), progress=False)
        return {"probs": la.predict({"input_ids": tokens[:5]}).probs}

    same_on_both(classifier, model)
