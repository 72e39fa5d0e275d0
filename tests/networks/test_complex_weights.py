"""Complex weights, as of Fourier neural operators: a number is a pair of real ones under the prior."""

import io
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Gaussian, IsotropicPrior, LinearisedLaplace


class Operator(nn.Module):
    """A convolution in Fourier space, whose weights are complex or pairs of real numbers."""

    def __init__(self, dtype: torch.dtype, pairs: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Conv1d(1, 2, 1, dtype=dtype.to_real()), nn.Conv1d(2, 1, 1, dtype=dtype.to_real())
        spectrum = 0.3 * torch.randn(2, 2, 3, dtype=dtype)
        self.pairs, self.spectrum = pairs, nn.Parameter(torch.view_as_real(spectrum) if pairs else spectrum)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        spectrum = torch.view_as_complex(self.spectrum) if self.pairs else self.spectrum
        f = torch.einsum("bix,iox->box", torch.fft.rfft(h)[..., :3], spectrum)
        return self.down(torch.tanh(torch.fft.irfft(f, n=x.shape[-1]) + h))


def _data(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 1, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype.to_real())
    return x, x.cumsum(-1) / 4


def _fitted(model: nn.Module, dtype: torch.dtype, **options: object) -> LinearisedLaplace:
    likelihood, prior = Gaussian(100.0, learn=False), IsotropicPrior(precision=1.0)
    options = {"prior": prior, "num_samples": 8, **options}
    return LinearisedLaplace(model, likelihood, **options).fit([_data(dtype)], progress=False)  # pyright: ignore


def test_error_bars_are_those_of_dense_algebra() -> None:
    dtype = torch.complex128
    model, (x, _) = Operator(dtype, pairs=False), _data(dtype)
    rows = []
    for f in model(x).flatten():
        gradients = torch.autograd.grad(f, list(model.parameters()), retain_graph=True)
        rows.append(torch.cat([(torch.view_as_real(g) if g.is_complex() else g).flatten() for g in gradients]))
    J = torch.stack(rows)
    expected = (J @ torch.linalg.inv(100 * J.T @ J + torch.eye(J.shape[1]).double()) * J).sum(1).sqrt()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la = _fitted(model, dtype, method="exact")
    assert_close(la.predict(x).stddev.flatten(), expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "krylov"},
        {"method": "kfac"},
        {"method": "diagonal"},
        {"method": "dual"},
        {"method": "subset"},
        {"method": "exact", "prior": "g-prior"},
        {"method": "exact", "parameters": ["spectrum"]},
        {"method": "exact", "parameters": ["down.*"]},
        {"method": "exact", "parameters": {"spectrum": range(0, 24, 2)}},
    ],
    ids=lambda options: "-".join(map(str, options.values()))[:30],
)
def test_they_are_pairs_of_real_weights(options: dict) -> None:
    dtype = torch.complex64
    stddev, x = [], _data(dtype)[0]
    for pairs in (True, False):
        model = Operator(dtype, pairs)
        before = [weight.clone() for weight in model.state_dict().values()]
        la, file = _fitted(model, dtype, **options), io.BytesIO()
        stddev.append(la.predict(x).stddev)
        assert all(map(torch.equal, before, model.state_dict().values()))
        la.save(file)
        file.seek(0)
        assert torch.equal(LinearisedLaplace.load(file, model).predict(x).stddev, stddev[-1])
    assert_close(stddev[1], stddev[0], rtol=1e-3, atol=0)


def test_a_change_of_an_imaginary_part_is_a_change_of_the_network(tmp_path) -> None:
    dtype = torch.complex128
    model = Operator(dtype, pairs=False)
    _fitted(model, dtype, method="exact").save(tmp_path / "posterior.pt")
    with torch.no_grad():
        model.spectrum.imag.add_(0.1)
    with pytest.raises(ValueError, match="weights"):
        LinearisedLaplace.load(tmp_path / "posterior.pt", model)
