import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from laplace_sampling import LinearisedLaplace
from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.from_loss import from_loss


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
        match=r"torch\.where",
    ):
        from_loss(loss, "own").check_targets(torch.Size((3, 2)), torch.ones(3, 2))


@pytest.mark.parametrize(
    "loss", [lambda f, y: (f - y).abs().sum(), lambda f, y: ((f - y).detach() ** 2).sum() + 0 * f.sum()]
)
def test_losses_without_curvature_are_refused(loss) -> None:
    x, y = torch.randn(2, 6, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="no curvature"):
        LinearisedLaplace(torch.nn.Linear(2, 2), from_loss(loss, "own")).fit([(x, y)], progress=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_confident_outputs_are_not_taken_for_a_loss_that_is_not_convex(dtype: torch.dtype) -> None:
    """The Hessian of a saturated softmax is of the size of rounding."""
    generator = torch.Generator().manual_seed(0)
    f = (10 * torch.randn(100, 3, generator=generator, dtype=torch.float64)).to(dtype)
    y, u = (
        torch.zeros(100, dtype=torch.long),
        torch.randn(2, 100, 3, generator=generator, dtype=torch.float64).to(dtype),
    )
    softmax = from_loss(lambda g, label: -g.log_softmax(-1).gather(-1, label[None])[0])
    applied = softmax.root(f, softmax.root_transpose(f, u, y), y)
    assert_close(applied, Categorical().curvature(f, u, y), rtol=1e-4, atol=1e-5)


def test_losses_that_are_not_convex_are_refused() -> None:
    f, y = torch.zeros(4, 2), torch.zeros(4, 2)
    saddle = from_loss(lambda g, target: g[0] ** 2 - g[1] ** 2, "saddle")
    with pytest.raises(ValueError, match="eigenvalue -2"):
        saddle.root(f, f, y)


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(TypeError, match=r"\b3\b"):
        from_loss(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="None"):
        from_loss(lambda f, y: f.sum(), None)  # pyright: ignore[reportArgumentType]
    fails = from_loss(lambda f: f.sum())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="shape"):
        fails.check_targets(torch.Size((3, 2)), torch.zeros(3, 2))
