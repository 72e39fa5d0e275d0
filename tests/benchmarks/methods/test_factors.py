"""The comparison of factored posteriors with the dense one."""

import pytest
import torch

from benchmarks.methods import factors
from benchmarks.methods.tangents import trained

NAME = "digits, tiny LeNet with batch norm"


def test_corrected_factors_are_nearer_than_the_diagonal() -> None:
    network = trained(NAME, 0, 100)
    ggn, rows = factors.ggn_of(network), network.test_features(20).double()
    exact = factors.dense(ggn)
    assert all(error < 1e-6 and ratio == pytest.approx(1) for error, ratio in factors.errors(exact, exact, rows))
    found = {
        name: factors.errors(make(ggn), exact, rows)
        for name, make in factors.VARIANTS.items()
        if name in ("diagonal", "corrected, all outputs", "and blocks up to 1,024 weights")
    }
    diagonal, corrected, blocks = (torch.tensor(figures) for figures in found.values())
    assert float(corrected[:, 0].mean()) < float(diagonal[:, 0].mean())
    assert float(blocks[:, 0].mean()) < float(corrected[:, 0].mean())
    assert bool((blocks[:, 1] >= 1 - 1e-6).all())  # leaving out correlations raises the effective dimension


def test_uncorrected_factors_have_the_trace_of_corrected_ones() -> None:
    ggn = factors.ggn_of(trained(NAME, 0, 100))
    plain, corrected = factors.uncorrected(ggn), factors.kronecker(ggn, outputs=64)
    assert float(plain.eigenvalues().sum()) == pytest.approx(float(corrected.eigenvalues().sum()))
