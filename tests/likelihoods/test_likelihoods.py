import pytest
import reference
import torch
import torch.nn.functional as F
from cases import Case, make_case
from torch import Tensor
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.data.batches import Layout, read
from laplace_sampling.likelihoods.as_likelihood import as_likelihood
from laplace_sampling.likelihoods.bernoulli import Bernoulli
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.from_loss import from_loss
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
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


NOISY = ["classification", "multi_label", "regression_per_output", "segmentation", "poisson", "heteroscedastic"]


@pytest.mark.parametrize("name", [*NOISY, "token_labels", "multi_task", "from_loss"])
def test_noise_has_covariance_b(name: str, generator: torch.Generator) -> None:
    case = make_case(name)
    f, num = outputs(case)[:1], 200_000
    B = reference.curvature(case.likelihood, f, case.y)[0]
    noise = case.likelihood.noise(f, num, generator, case.y[:1])[:, 0]
    covariance = noise.T @ noise / num
    # Var of a product of Gaussians: B_ii B_jj + B_ij².
    error = (B.diagonal()[:, None] * B.diagonal() + B**2).sqrt() / num**0.5
    assert ((covariance - B).abs() < 5 * error + 1e-12).all()


def test_losses_without_forward_derivatives(generator: torch.Generator) -> None:
    """`F.huber_loss` has reverse ones only: its Hessian is one within 1 of the target, else zero."""
    huber = from_loss(lambda f, y: F.huber_loss(f, y, reduction="sum"), "huber")
    f, y = 2 * torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    huber, y = huber.prepare(Layout.single((3,)), y)
    u = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64)
    near = ((f - y).abs() < 1).double()
    assert 0 < float(near.mean()) < 1
    assert_close(huber.gradient(f, y), (f - y).clamp(-1, 1))
    for applied in (huber.curvature(f, u, y), huber.root(f, u, y)):
        assert_close(applied, near * u)


@pytest.mark.parametrize(
    "loss",
    [
        lambda f, y: (f - y).abs().sum() if (f - y).abs().sum() > 1 else ((f - y) ** 2).sum() / 2,
        lambda f, y: ((f - y) ** 2).sum() * float(y.sum()),
    ],
)
def test_losses_that_look_at_values_are_refused(loss) -> None:
    with pytest.raises(
        ValueError,
        match=r"of likelihood 'own' cannot be differentiated twice for many .*`torch.where` in.* torch says: ",
    ):
        from_loss(loss, "own").check_targets(torch.Size((3, 2)), torch.ones(3, 2))


@pytest.mark.parametrize(
    "loss", [lambda f, y: (f - y).abs().sum(), lambda f, y: ((f - y).detach() ** 2).sum() + 0 * f.sum()]
)
def test_losses_without_curvature_are_refused(loss) -> None:
    x, y = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="loss of likelihood 'own' has no curvature in the outputs at any datum"):
        LinearisedLaplace(torch.nn.Linear(2, 2), from_loss(loss, "own")).fit([(x, y)], progress=False)


def test_labels_of_another_axis_say_which() -> None:
    y = torch.zeros(8, 5, dtype=torch.long)
    with pytest.raises(ValueError, match=r"have \[8, 5\]. They fit classes on axis 2: `Categorical\(class_dim=2\)`\.$"):
        Categorical().check_targets(torch.Size((8, 5, 3)), y)
    with pytest.raises(ValueError, match=r"but have \[8, 7\]\.$"):
        Categorical().check_targets(torch.Size((8, 5, 3)), torch.zeros(8, 7, dtype=torch.long))


def test_saturated_logits_stay_finite() -> None:
    f = torch.tensor([[1e4, -1e4, 0.0]])
    u = torch.ones(1, 1, 3)
    for likelihood in (Categorical(), Bernoulli()):
        assert likelihood.root(f, u).isfinite().all()
        assert likelihood.curvature(f, u).isfinite().all()


def test_names_give_likelihoods() -> None:
    assert as_likelihood("regression", 3.0) == Gaussian(3.0)
    assert as_likelihood("classification") == Categorical()
    assert as_likelihood("binary") == Bernoulli()
    assert Gaussian(torch.tensor([2.0])) == Gaussian(2.0)  # one entry is a scalar
    own = Gaussian(2.0)
    assert as_likelihood(own) is own
    with pytest.raises(
        ValueError, match=r"`likelihood='student'` is not known; use \"regression\", \"classification\""
    ):
        as_likelihood("student")


def test_noise_precision_without_a_use_is_refused() -> None:
    for likelihood in ("classification", Gaussian(2.0)):
        with pytest.raises(ValueError, match=r"`noise_precision` goes with likelihood=\"regression\" only"):
            as_likelihood(likelihood, 3.0)


def test_labels_of_any_integer_type() -> None:
    f, y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 1])
    assert_close(Categorical().loss(f, y.int()), Categorical().loss(f, y))
    assert_close(Categorical().gradient(f, y.to(torch.uint8)), Categorical().gradient(f, y))


@pytest.mark.parametrize("precision", [0.0, -1.0, float("nan"), float("inf"), [[1.0]]])
def test_gaussian_refuses_a_noise_precision_that_is_none(precision) -> None:
    with pytest.raises(ValueError, match="needs a positive number or a tensor"):
        Gaussian(torch.tensor(precision))


@pytest.mark.parametrize(
    ("likelihood", "shape", "y", "error", "message"),
    [
        (Gaussian(), (3, 1), torch.zeros(3), ValueError, r"output, \[3, 1\], but have \[3\].*unsqueeze"),
        (Gaussian(), (3,), torch.zeros(3).long(), TypeError, r"must be floating point, but have dtype torch.int64"),
        (Gaussian(torch.ones(2)), (3, 4), torch.zeros(3, 4), ValueError, "2 entries, but the model has 4 outputs"),
        (Categorical(), (3, 4), torch.zeros(3), TypeError, r"integers, but have dtype torch.float32.*y.long\(\)"),
        (Categorical(), (3, 4), torch.zeros(3, 1).long(), ValueError, r"must have shape \[3\] for .* have \[3, 1\]"),
        (Categorical(), (3, 4), torch.tensor([0, 1, 4]), ValueError, "0 and 3 for 4 outputs, but range from 0 to 4"),
        (Categorical(), (3, 4), torch.tensor([0, -1, 2]), ValueError, "but range from -1 to 2"),
        (Categorical(), (3, 1), torch.zeros(3).long(), ValueError, 'For one logit a datum use likelihood="binary"'),
        (Categorical(), (3, 1, 2, 2), torch.zeros(3, 2, 2).long(), ValueError, r"needs outputs \[N, C\]"),
        (Categorical(), (3, 4, 2, 2), torch.zeros(3, 2).long(), ValueError, r"shape \[3, 2, 2\] .* but have \[3, 2\]"),
        (Categorical(-1), (3, 5, 4), torch.zeros(3, 4).long(), ValueError, r"\[3, 5\] for .* classes on axis 2, but"),
        (Categorical(), (3, 4), torch.full((3,), -100), ValueError, "All labels are ignore_index=-100"),
        (Poisson(), (3, 1), torch.tensor([[-1], [0], [2]]), ValueError, "numbers of at least 0, but range from -1"),
        (Poisson(), (3, 1), torch.tensor([[1.5], [0], [2]]), ValueError, "to 2, not all of them whole"),
        (HeteroscedasticGaussian(), (3, 3), torch.zeros(3, 1), ValueError, r"outputs \[N, 2D, ...\].* gives \[3, 3\]"),
        (HeteroscedasticGaussian(), (3, 4), torch.zeros(3, 4), ValueError, r"shape of the means, \[3, 2\], but have"),
        (HeteroscedasticGaussian(), (3, 2), torch.zeros(3, 1).long(), TypeError, "must be floating point"),
        (Bernoulli(), (3, 1), torch.zeros(3), ValueError, r"Binary targets must have the shape"),
        (Bernoulli(), (3,), torch.tensor([-1.0, 1.0, 1.0]), ValueError, r"must be 0 or 1, but range from -1 to 1"),
    ],
)  # fmt: skip
def test_targets_that_do_not_fit_are_refused(likelihood, shape, y, error, message) -> None:
    with pytest.raises(error, match=message):
        likelihood.check_targets(torch.Size(shape), y)


@pytest.mark.parametrize("classes", [2, 5, 15, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_of_few_and_many_classes(classes: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    f = 300 * torch.randn(3, 4, classes, generator=generator, dtype=torch.float64).to(dtype)
    likelihood = Categorical().prepare(Layout.single([classes]), torch.zeros(4, dtype=torch.long))[0]
    assert_close(likelihood.link(f), f.softmax(-1))
    assert_close(likelihood.link(f + 1e6), (f + 1e6).softmax(-1))
