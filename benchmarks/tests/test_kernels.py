from typing import Any

import pytest
import torch

from benchmarks.kernels import Process, exact_in_place


@pytest.mark.parametrize("block", [64, 300])
def test_factor_in_place_gives_the_prediction_of_gpytorch(block: int) -> None:
    random = torch.Generator().manual_seed(0)
    x, x_test = (torch.rand(num, 3, generator=random, dtype=torch.float64) for num in (250, 40))
    y = torch.sin(4 * x).sum(1) + 0.1 * torch.randn(250, generator=random, dtype=torch.float64)
    model: Any = Process(x, y).double()
    model.likelihood.noise = 0.03
    model.mean_module.constant.data.fill_(0.3)
    model.eval()
    with torch.no_grad():
        expected = model.likelihood.eval()(model(x_test))
    (mean, variance), _ = exact_in_place(model, x, y, x_test, block)
    torch.testing.assert_close(mean, expected.mean, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(variance, expected.variance, rtol=1e-8, atol=1e-10)
