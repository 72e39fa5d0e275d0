"""The same on a GPU as on a CPU; the data stay on the CPU. Skipped where there is none."""

import copy

import pytest
import torch
from cases import Case, make_case
from flat_settings import laplace_of
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.networks.linearisation import Linearisation

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_products(case: Case, generator: torch.Generator) -> None:
    here, there = Linearisation(case.model), Linearisation(copy.deepcopy(case.model).to(DEVICE))
    x = case.x.to(DEVICE)
    v = torch.randn(3, here.num_parameters, generator=generator, dtype=torch.float64)
    assert_close(there.jvp(x, v.to(DEVICE)).cpu(), here.jvp(case.x, v))
    u = torch.randn(here.jvp(case.x, v).shape, generator=generator, dtype=torch.float64)
    assert_close(there.vjp(x, u.to(DEVICE)).cpu(), here.vjp(case.x, u))
    assert_close(there.ggn(x, v.to(DEVICE), lambda a: 2 * a).cpu(), here.ggn(case.x, v, lambda a: 2 * a))
    assert_close(there.jacobian(x).cpu(), here.jacobian(case.x))


def test_exact_posteriors(case: Case) -> None:
    outputs = []
    for device in ("cpu", DEVICE):
        model = copy.deepcopy(case.model).to(device)
        la = laplace_of(model, case.given[0], method="exact", prior_precision=2.0)
        prediction = la.fit(case.batches, progress=False).predict(case.x.to(device))
        parts = prediction.values() if isinstance(prediction, dict) else [prediction]
        outputs.append([part.covariance().cpu() for part in parts])
    assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize("method", ["krylov", "sgd", "svrg"])
@pytest.mark.parametrize("name", ["regression", "classification", "conv_batch_norm", "segmentation"])
def test_samples(name: str, method: str) -> None:
    """Variances of 512 samples: standard error 6 %, of the largest of some dozens 20 %; and saved, on the CPU."""
    case = make_case(name)
    settings = {"prior_precision": 2.0, "num_samples": 512}
    exact = laplace_of(case.model, case.given[0], method="exact", **settings).fit(case.batches, progress=False)
    la = laplace_of(copy.deepcopy(case.model).to(DEVICE), case.given[0], method=method, **settings)
    la.fit(case.batches, progress=False)
    found, known = (m.predict(x).variance.cpu() for m, x in ((la, case.x.to(DEVICE)), (exact, case.x)))
    assert_close(found, known, rtol=0.25, atol=1e-6)


def test_hyperparameters_and_a_reload_on_the_cpu(tmp_path) -> None:
    case = make_case("classification_many_data")
    model = copy.deepcopy(case.model).to(DEVICE)
    here = LinearisedLaplace(case.model, case.given[0], method="krylov").fit_hyperparameters(
        case.batches, progress=False
    )
    there = LinearisedLaplace(model, case.given[0], method="krylov").fit_hyperparameters(case.batches, progress=False)
    assert_close(there.prior_precision_.cpu(), here.prior_precision_, rtol=0.1, atol=0.0)
    there.save(tmp_path / "posterior.pt")
    again = LinearisedLaplace.load(tmp_path / "posterior.pt", case.model)
    assert_close(again.predict(case.x).variance, there.predict(case.x.to(DEVICE)).variance.cpu())
