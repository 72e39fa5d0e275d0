"""What every likelihood must satisfy."""

import pytest
import reference
import torch
from cases import Case, make_case
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling.data.batches import Layout, read
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from laplace_sampling.likelihoods.labels import softmax
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.likelihoods.poisson import Poisson


def outputs(case: Case) -> Tensor:
    with torch.no_grad():
        return read(case.model(case.x), len(case.x))[0].reshape(len(case.x), -1)


def test_loss_is_the_normalised_negative_log_likelihood(case: Case) -> None:
    f = outputs(case)
    expected = torch.stack([reference.loss(case.likelihood, f[n], case.y[n]) for n in range(len(f))])
    assert_close(case.likelihood.loss(f, case.y), expected)
    # Different outputs for each row of a stack.
    stack = case.likelihood.loss(torch.stack([f, 2 * f]), case.y)
    assert_close(stack, torch.stack([expected, case.likelihood.loss(2 * f, case.y)]))


def test_gradient_is_that_of_the_loss(case: Case) -> None:
    f = outputs(case).requires_grad_()
    expected = torch.autograd.grad(case.likelihood.loss(f, case.y).sum(), f)[0]
    assert_close(case.likelihood.gradient(f.detach(), case.y), expected)


def test_curvature_and_its_root_equal_the_hessian(case: Case, generator: torch.Generator) -> None:
    f = outputs(case)
    B = reference.curvature(case.likelihood, f, case.y)
    u = torch.randn(3, *f.shape, generator=generator, dtype=torch.float64)
    applied = torch.einsum("ncd,knd->knc", B, u)
    assert_close(case.likelihood.curvature(f, u, case.y), applied)
    assert_close(case.likelihood.root(f, case.likelihood.root_transpose(f, u, case.y), case.y), applied)
    assert_close((case.likelihood.root_transpose(f, u, case.y) ** 2).sum(-1), (u * applied).sum(-1))


def test_root_transpose_is_the_transpose(case: Case, generator: torch.Generator) -> None:
    f = outputs(case)
    u, v = torch.randn(2, 3, *f.shape, generator=generator, dtype=torch.float64)
    left = (case.likelihood.root(f, u, case.y) * v).sum(-1)
    assert_close(left, (u * case.likelihood.root_transpose(f, v, case.y)).sum(-1))


@pytest.mark.slow
def test_no_data_have_no_loss_and_no_curvature(case: Case) -> None:
    f, y = outputs(case)[:0], case.y[:0]
    stack = f.expand(2, *f.shape)
    assert case.likelihood.loss(stack, y).shape == (2, 0)
    assert case.likelihood.gradient(stack, y).shape == stack.shape
    for product in (case.likelihood.curvature, case.likelihood.root, case.likelihood.root_transpose):
        assert product(f, stack, y).shape == stack.shape


NOISY = ["classification", "multi_label", "regression_per_output", "segmentation", "poisson", "heteroscedastic"]


@pytest.mark.parametrize("name", [*NOISY, "token_labels", "multi_task", "from_loss"])
def test_noise_has_covariance_b(name: str, generator: torch.Generator) -> None:
    case = make_case(name)
    f, num = outputs(case)[:1], 200_000
    B = reference.curvature(case.likelihood, f, case.y)[0]
    white = torch.randn(num, *f.shape, generator=generator, dtype=torch.float64)
    noise = case.likelihood.root(f, white, case.y[:1])[:, 0]
    covariance = noise.T @ noise / num
    # Var of a product of Gaussians: B_ii B_jj + B_ij².
    error = (B.diagonal()[:, None] * B.diagonal() + B**2).sqrt() / num**0.5
    assert ((covariance - B).abs() < 5 * error + 1e-12).all()


def test_saturated_logits_stay_finite() -> None:
    f = torch.tensor([[1e4, -1e4, 0.0]])
    u = torch.ones(1, 1, 3)
    for likelihood in (Categorical(), Bernoulli()):
        assert likelihood.root(f, u).isfinite().all()
        assert likelihood.curvature(f, u).isfinite().all()


@pytest.mark.parametrize(
    ("likelihood", "shape", "y", "error", "message"),
    [
        (Gaussian(), (3, 1), torch.zeros(3), ValueError, "unsqueeze"),
        (Gaussian(), (3,), torch.zeros(3).long(), TypeError, "int64"),
        (Gaussian(torch.ones(2)), (3, 4), torch.zeros(3, 4), ValueError, "noise_precision"),
        (Categorical(), (3, 4), torch.zeros(3), TypeError, r"y\.long"),
        (Categorical(), (3, 4), torch.zeros(3, 1).long(), ValueError, "shape"),
        (Categorical(), (3, 4), torch.tensor([0, 1, 4]), ValueError, "range"),
        (Categorical(), (3, 4), torch.tensor([0, -1, 2]), ValueError, r"-1\b"),
        (Categorical(), (3, 1), torch.zeros(3).long(), ValueError, "binary"),
        (Categorical(), (3, 1, 2, 2), torch.zeros(3, 2, 2).long(), ValueError, "class_dim"),
        (Categorical(), (3, 4, 2, 2), torch.zeros(3, 2).long(), ValueError, r"\[3, 2, 2\]"),
        (Categorical(-1), (3, 5, 4), torch.zeros(3, 4).long(), ValueError, "class_dim=1"),
        (Poisson(), (3, 1), torch.tensor([[-1], [0], [2]]), ValueError, "range"),
        (Poisson(), (3, 1), torch.tensor([[1.5], [0], [2]]), ValueError, "range"),
        (HeteroscedasticGaussian(), (3, 3), torch.zeros(3, 1), ValueError, "2D"),
        (HeteroscedasticGaussian(), (3, 4), torch.zeros(3, 4), ValueError, "means"),
        (HeteroscedasticGaussian(), (3, 2), torch.zeros(3, 1).long(), TypeError, "int64"),
        (Bernoulli(), (3, 1), torch.zeros(3), ValueError, "shape"),
        (Bernoulli(), (3,), torch.tensor([-1.0, 1.0, 1.0]), ValueError, "range"),
    ],
)  # fmt: skip
def test_targets_that_do_not_fit_are_refused(likelihood, shape, y, error, message) -> None:
    with pytest.raises(error, match=message):
        likelihood.check_targets(torch.Size(shape), y)


def test_targets_are_tensors_of_real_numbers() -> None:
    layout = Layout.single((1,))
    for y, said in ((torch.ones(3, 1) + 0j, "complex"), (torch.tensor(1.0), "axis")):
        with pytest.raises(TypeError, match=said):
            Bernoulli().prepare(layout, y)
    with pytest.raises(ValueError, match="ignore_index"):
        Categorical().prepare(Layout.single((4,)), torch.full((3,), -100))
    with pytest.raises(ValueError, match="MultiTask"):
        MultiTask(3)  # pyright: ignore[reportArgumentType]


def test_labels_of_any_integer_type() -> None:
    f, y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 1])
    assert_close(Categorical().loss(f, y.int()), Categorical().loss(f, y))
    assert_close(Categorical().gradient(f, y.to(torch.uint8)), Categorical().gradient(f, y))


def test_settings_of_another_kind_are_refused() -> None:
    for name in ("class_dim", "ignore_index"):
        with pytest.raises(ValueError, match=name):
            Categorical(**{name: 1.5})


@pytest.mark.parametrize("num_classes", [1, 2, 15, 16, 40])
def test_a_softmax_is_over_the_last_axis_for_any_number_of_classes(num_classes: int) -> None:
    logits = torch.randn(4, 5, num_classes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exponentials = (100 * logits).exp()
    expected = exponentials / exponentials.sum(-1, keepdim=True)
    assert_close(softmax(100 * logits), expected)
    assert_close(softmax(100 * logits + 1e6, log=True), expected.log(), rtol=1e-8, atol=1e-8)
