"""Each datum predicted from all others."""

import pytest
import reference
import torch
from cases import make_case
from flat_settings import fit_case, laplace_of
from problems import SAMPLES, trained
from torch.testing import assert_close

from laplace_sampling import Data, LeaveOneOut


@pytest.mark.parametrize("name", ["regression", "regression_many_data", "regression_per_output"])
@pytest.mark.parametrize("heteroscedastic", [False, True])
def test_leave_one_out_is_a_fit_without_the_datum(name: str, heteroscedastic: bool) -> None:
    case = make_case(name)
    num = len(case.y)
    R = torch.linspace(0.5, 2, num).double() if heteroscedastic else torch.ones(num).double()
    settings = {"linear_model": "homogeneous", "prior_precision": 0.7, "num_samples": 4}
    la = fit_case(case, "exact", noise_variances=R if heteroscedastic else None, **settings)
    found = la.leave_one_out()
    assert isinstance(found, LeaveOneOut)
    assert found.log_prob.shape == (num,)
    J = reference.jacobian(case.model, case.x)
    for i in (0, num - 1):
        rest = [j for j in range(num) if j != i]
        without = laplace_of(case.model, case.likelihood, method="exact", **settings)
        without.fit([(case.x[rest], case.y[rest])], data=Data(noise_variances=R[rest]), progress=False)
        noise = (R[i] / torch.as_tensor(case.likelihood.noise_precision)).expand(J.shape[1])
        covariance = without.predict(case.x[i : i + 1]).covariance()[0] + torch.diag(noise)
        mean = J[i] @ without.mode_
        assert_close(found.mean[i], mean, **SAMPLES)
        assert_close(found.covariance[i], covariance, **SAMPLES)
        expected = torch.distributions.MultivariateNormal(mean, covariance).log_prob(case.y[i].reshape(-1))
        assert_close(found.log_prob[i], expected, **SAMPLES)


def test_leave_one_out_of_classes_and_where_it_is_not_known(tmp_path) -> None:
    case = make_case("classification")
    found = fit_case(case, "exact").leave_one_out()
    assert found.log_prob.shape == (8,)
    assert (found.log_prob < 0).all()
    la = fit_case(case, "krylov")
    with pytest.raises(ValueError, match="krylov"):
        la.leave_one_out()
    with pytest.raises(ValueError, match="dual"):
        fit_case(trained(), "dual").leave_one_out()
