"""Contour quadrature as a method, beside Krylov and dense algebra."""

import pytest
import torch
from cases import make_case
from flat_settings import laplace_of


@pytest.mark.parametrize("name", ["regression_many_data", "classification_many_data"])
def test_krylov_and_ciq_agree_with_the_exact_method(name: str) -> None:
    case = make_case(name)
    settings = {"prior": "isotropic", "prior_precision": 2.0, "num_samples": 200}
    exact, krylov, ciq = (
        laplace_of(case.model, case.likelihood, method=method, **settings).fit(case.batches, progress=False)
        for method in ("exact", "krylov", "ciq")
    )
    torch.testing.assert_close(krylov.samples_, exact.samples_, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(krylov.sample(3), exact.sample(3), rtol=1e-6, atol=1e-8)
    # γ ≤ P: the standard error of either estimate is at most √(2γ/K)
    gamma = float(exact.effective_dimension_.sum())
    assert float(ciq.effective_dimension_.sum()) == pytest.approx(gamma, abs=5 * (2 * gamma / 200) ** 0.5)
    a, b = exact.log_marginal_likelihood(), krylov.log_marginal_likelihood()
    assert float(b) == pytest.approx(float(a), rel=1e-4)  # the mode is as good as its tolerance
    assert a.exact
    assert a.standard_error == 0
    assert a.lower_bound <= a.value
    assert a.value == pytest.approx(-a.data_fit - a.complexity)
    curves = [la.evidence_path(decades=3, num=7) for la in (exact, krylov)]
    torch.testing.assert_close(curves[0].log_marginal_likelihood, curves[1].log_marginal_likelihood, rtol=1e-3, atol=0)
    torch.testing.assert_close(curves[0].effective_dimension, curves[1].effective_dimension, rtol=1e-5, atol=0)
