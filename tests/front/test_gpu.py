"""Mini-batches on a GPU, whose roundings `tests/device` does not compare. Skipped where there is none."""

import copy

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of
from torch.testing import assert_close

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("method", ["sgd", "svrg"])
@pytest.mark.parametrize("name", ["regression", "classification", "conv_batch_norm", "segmentation"])
def test_samples(name: str, method: str) -> None:
    """Variances of 512 samples: standard error 6 %, of the largest of some dozens 20 %."""
    case = make_case(name)
    settings = {"prior_precision": 2.0, "num_samples": 512}
    exact = laplace_of(case.model, case.given[0], method="exact", **settings).fit(case.batches, progress=False)
    la = laplace_of(copy.deepcopy(case.model).to(DEVICE), case.given[0], method=method, **settings)
    la.fit(case.batches, progress=False)
    found, known = (m.predict(x).variance.cpu() for m, x in ((la, case.x.to(DEVICE)), (exact, case.x)))
    assert_close(found, known, rtol=0.25, atol=1e-6)
