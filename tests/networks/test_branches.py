"""Networks that branch on values of each datum: data that take the same branch go together, without a notice."""

import pytest
import reference
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace


class Masked(nn.Module):
    """Attention that builds a mask only where there is padding, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.key, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        h, mask = self.embedding(tokens), mask.bool()
        scores = self.key(h) @ h.mT
        if not mask.all():
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return self.head((scores.softmax(-1) @ h)[:, 0])


class Shortened(nn.Module):
    """Cuts off what is padding in the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        length = int(mask.sum(1).max())
        h = self.embedding(tokens[:, :length]).tanh() * mask[:, :length, None]
        return self.head(h.sum(1) / mask.sum(1, keepdim=True))


class Twice(nn.Module):
    """Two branches one after the other, one of them on a number that depends on the weights, and NaN in another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 1)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        if len(tokens) > 1:
            return torch.cat([self(tokens[n : n + 1], mask[n : n + 1]) for n in range(len(tokens))])
        h = self.embedding(tokens) * mask[..., None]
        if h.sum() > 0:
            h = h.sin()
        if (mask.sum().log() - mask.sum().log().item()).isnan().item() or mask.sum() > 3:
            h = h * 2
        return self.head(h.sum(1))


LENGTHS = torch.tensor([6, 6, 3, 1, 6, 4, 6, 2, 6, 6, 5, 6])


def _fitted(kind: type[nn.Module], method: str) -> tuple[LinearisedLaplace, nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model, tokens, y = kind().double(), torch.randint(0, 11, (12, 6)), torch.randn(12, 1).double()
    x = tokens, (torch.arange(6) < LENGTHS[:, None]).long()
    likelihood, prior = Gaussian(4.0, learn=False), IsotropicPrior(precision=1.0)
    return LinearisedLaplace(model, likelihood, prior=prior, method=method).fit([(x, y)], progress=False), model, x


@pytest.mark.parametrize("kind", [Masked, Shortened, Twice])
def test_error_bars_are_those_of_each_datum_by_itself(kind: type[nn.Module]) -> None:
    la, model, x = _fitted(kind, "exact")

    class ByPosition(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, rows: Tensor) -> Tensor:
            return self.model(*(tensor[rows] for tensor in x))

    J = reference.jacobian(ByPosition(), torch.arange(12))[:, 0]
    H = 4 * J.T @ J + torch.eye(J.shape[1]).double()
    expected = (J @ torch.linalg.inv(H) * J).sum(1).sqrt()
    assert_close(la.predict(x).stddev.flatten(), expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("kind", [Masked, Shortened, Twice])
def test_rows_for_factors_come_without_a_notice(kind: type[nn.Module]) -> None:
    la, _, x = _fitted(kind, "kfac")
    assert (la.predict(x).stddev > 0).all()
