"""What may be given as `observe=`, against dense matrices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import inverse
import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from laplace_sampling import Data, Gaussian, LinearisedLaplace
from laplace_sampling.likelihoods.measurement import Measurement, as_measurement

SIDE = 6
IMAGES = torch.zeros(1, 1, SIDE, SIDE, dtype=torch.float64)


def dense(num_rows: int = 5) -> Tensor:
    return torch.randn(num_rows, SIDE**2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Masked(nn.Module):
    """Every other pixel of an image, in its shape; it computes in the dtype of its mask."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(SIDE**2).reshape(SIDE, SIDE) % 2).to(dtype))
        self.calls, self.seen = 0, []

    def A(self, x: Tensor) -> Tensor:
        assert x.dtype == self.mask.dtype
        self.calls += 1
        self.seen.append(x.shape)
        return x * self.mask

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self.A(y)


class Physics:
    """`A` and `A_adjoint` of functions."""

    def __init__(self, A: Callable[[Tensor], Any], A_adjoint: Callable[[Tensor], Any]) -> None:
        self.A, self.A_adjoint = A, A_adjoint


def forms() -> dict[str, Any]:
    T = dense()
    array = scipy.sparse.csr_matrix(T.numpy())
    return {
        "matrix": T,
        "csr": T.to_sparse_csr(),
        "coo of scipy": scipy.sparse.coo_matrix(array),
        "array of scipy": scipy.sparse.csc_array(array),
        "vectors": (lambda f: T @ f, lambda u: T.mT @ u),
        "stacks": (lambda f: f @ T.mT, lambda u: u @ T),
        "physics": Physics(
            lambda x: (x.flatten(1) @ T.mT)[:, None], lambda y: (y[:, 0] @ T).reshape(-1, *IMAGES.shape[1:])
        ),
    }


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # of a matrix of users
@pytest.mark.parametrize("form", ["matrix", "csr", "coo of scipy", "array of scipy", "vectors", "stacks", "physics"])
def test_all_forms_are_the_same_products(form: str) -> None:
    T, generator = dense(), torch.Generator().manual_seed(1)
    measurement = as_measurement(forms()[form], IMAGES).checked(IMAGES)
    for dtype in (torch.float64, torch.float32):
        f = torch.randn(2, 4, SIDE**2, generator=generator, dtype=torch.float64)
        u = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        assert_close(measurement.apply(f.to(dtype)), (f @ T.mT).to(dtype), rtol=1e-5, atol=1e-5)
        assert_close(measurement.adjoint(u.to(dtype)), (u @ T).to(dtype), rtol=1e-5, atol=1e-5)
    assert measurement.apply(f[:0]).shape == (0, 4, 5)
    assert measurement.entries == ((1, 5) if form == "physics" else (5,))


def test_a_pair_of_one_number() -> None:
    row = dense(1)[0]
    measurement = as_measurement((lambda f: row @ f, lambda u: u * row), IMAGES).checked(IMAGES)
    f, u = dense(3), torch.ones(2, 1, dtype=torch.float64)
    assert_close(measurement.apply(f), (f @ row)[:, None])
    assert_close(measurement.adjoint(u), row.expand(2, -1))


def test_a_pair_that_takes_stacks_is_called_once_for_all_rows() -> None:
    calls = []

    def forward(f: Tensor) -> Tensor:
        calls.append(f.shape)
        return f.cumsum(-1)

    measurement = as_measurement((forward, lambda u: u.flip(-1).cumsum(-1).flip(-1)), IMAGES).checked(IMAGES)
    calls.clear()
    f = torch.randn(7, SIDE**2, dtype=torch.float64)
    assert_close(measurement.apply(f), f.cumsum(-1))
    assert calls == [(7, SIDE**2)]


@pytest.mark.parametrize("num_outputs", [2, 3])
def test_stacks_that_a_pair_takes_for_something_else_go_row_by_row(num_outputs: int) -> None:
    """A sum along the first axis, and a matrix that multiplies a stack of as many rows from the left."""
    T, f = dense()[:, :num_outputs], torch.randn(num_outputs, num_outputs, dtype=torch.float64)
    for forward, adjoint, expected in (
        (lambda f: f.cumsum(0), lambda u: u.flip(0).cumsum(0).flip(0), f.cumsum(1)),
        (lambda f: T @ f, lambda u: T.mT @ u, f @ T.mT),
    ):
        like = torch.zeros(1, num_outputs, dtype=torch.float64)
        assert_close(as_measurement((forward, adjoint), like).checked(like).apply(f), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_physics_computes_in_its_own_dtype_and_rows_of_zeros_are_left_out(dtype: torch.dtype) -> None:
    physics = Masked(dtype)
    measurement = as_measurement(physics, IMAGES).checked(IMAGES)
    assert measurement.shape == (SIDE**2 // 2, SIDE**2)
    f = torch.randn(4, SIDE**2, dtype=torch.float64)
    physics.calls = 0
    found = measurement.apply(f)
    assert (found.dtype, physics.calls, physics.seen[-1]) == (torch.float64, 1, (4, 1, SIDE, SIDE))
    assert_close(found, f[:, 1::2], rtol=1e-6, atol=1e-6)
    assert_close(measurement.adjoint(found)[:, 1::2], found)
    assert float(measurement.adjoint(found)[:, ::2].abs().max()) == 0


def fit_of(observe: Any, y: Tensor, **settings: Any) -> LinearisedLaplace:
    model, z = inverse.picture(SIDE)
    la = LinearisedLaplace(model, Gaussian(50.0, observe=observe), num_samples=4, method="exact")
    return la.fit_hyperparameters([(z, y)], progress=False, **settings)


def test_measurements_that_are_never_made_do_not_count(tmp_path: Path) -> None:
    model, z = inverse.picture(SIDE)
    image, physics = inverse.noisy(model(z).detach()), Masked()
    with_zeros, without = (
        fit_of(physics, image * physics.mask),
        fit_of(torch.eye(36)[1::2].double(), image.flatten(1)[:, 1::2]),
    )
    assert "N·C = 18" in str(with_zeros)
    for name in ("noise_precision_", "prior_precision_", "effective_dimension_"):
        assert_close(getattr(with_zeros, name), getattr(without, name))
    assert_close(with_zeros.predict(z).joint_covariance(), without.predict(z).joint_covariance())
    with_zeros.save(tmp_path / "la.pt")
    again = LinearisedLaplace.load(tmp_path / "la.pt", model, likelihood=Gaussian(observe=physics))
    assert torch.equal(again.predict(z).joint_covariance(), with_zeros.predict(z).joint_covariance())
    observed = with_zeros.predict(z, observed=True)
    assert_close(observed.mean, model(z).detach() * physics.mask)
    assert float(observed.variance[..., 0, 0]) == 0 < float(observed.variance[..., 0, 1])
    # Noise variances in the shape of the measurements, or of those that are made.
    R = 0.5 + torch.rand(1, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0)).double()
    unequal = fit_of(physics, image * physics.mask, data=Data(noise_variances=R))
    other = fit_of(
        torch.eye(36)[1::2].double(), image.flatten(1)[:, 1::2], data=Data(noise_variances=R.flatten(1)[:, 1::2])
    )
    assert_close(unequal.noise_precision_, other.noise_precision_)
    with pytest.raises(ValueError, match="18 of 36 measurements are zero"):
        LinearisedLaplace(model, Gaussian(torch.ones(36), observe=physics)).fit([(z, image)], progress=False)


def test_targets_are_in_the_shape_of_the_physics() -> None:
    model, z = inverse.picture(SIDE)
    T = inverse.radon(SIDE, 4)
    D = torch.as_tensor(T.toarray())
    detectors_first = Physics(
        lambda x: (x.flatten(1) @ D.mT).reshape(-1, 1, 4, SIDE).mT,
        lambda y: (y.mT.flatten(1) @ D).reshape(-1, 1, SIDE, SIDE),
    )
    y = inverse.noisy(model(z).detach().flatten(1) @ D.mT).reshape(1, 1, 4, SIDE)
    expected, found = fit_of(T, y.flatten(1)), fit_of(detectors_first, y.mT)
    assert_close(found.predict(z).covariance(), expected.predict(z).covariance())
    assert found.predict(z, observed=True).mean.shape == (1, 1, SIDE, 4)
    assert found.predict(z, observed=True).log_prob(y.mT).shape == (1,)
    with pytest.raises(ValueError, match=r"\[1, 1, 6, 4\] or \[1, 24\], but have shape \[1, 1, 4, 6\]"):
        fit_of(detectors_first, y)


D = dense(200).float()
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no adjoint": (type("Forward", (), {"A": lambda self, x: x})(), TypeError, "without an `A_adjoint`"),
    "not quite adjoint": ((lambda f: f @ D.mT, lambda u: 1.001 * (u @ D)), ValueError, "not adjoint"),
    "a random error of 1e-3": (
        (lambda f: f @ D.mT, lambda u: u @ (D + 1e-3 * D.roll(1))),
        ValueError,
        "adjoint_via_backprop=True",
    ),
    "complex": (Physics(torch.fft.fft2, torch.fft.ifft2), ValueError, "view_as_real"),
    "nonlinear": (Physics(torch.square, lambda y: y), ValueError, "not linear"),
    "affine": (Physics(lambda x: x + 1, lambda y: y), ValueError, "not linear"),
    "several tensors": (Physics(lambda x: [x, x], lambda y: y), TypeError, "one tensor"),
    "NaN": (Physics(lambda x: x / 0 * 0, lambda y: y), ValueError, "NaN"),
    "an array": (D.numpy(), TypeError, "torch.as_tensor"),
    "nothing": (Physics(lambda x: 0 * x, lambda y: 0 * y), ValueError, "measures nothing"),
    "another size": (Physics(lambda x: x.reshape(2, -1), lambda y: y), ValueError, "raised"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_measured_is_refused(name: str) -> None:
    observe, error, message = BAD[name]
    model, z = inverse.picture(SIDE)
    with pytest.raises(error, match=message):
        LinearisedLaplace(model.float(), Gaussian(1.0, observe=observe)).fit(
            [(z.float(), torch.zeros(1, SIDE**2))], progress=False
        )


def test_float64_that_physics_refuses_is_told() -> None:
    model, z = inverse.picture(SIDE)
    kernel = torch.ones(1, 1, 3, 3)
    blur = Physics(lambda x: torch.conv2d(x, kernel, padding=1), lambda y: torch.conv2d(y, kernel, padding=1))
    with pytest.raises(
        ValueError, match=r"`A` of Physics raised RuntimeError for a stack .* in torch.float64.*model.float"
    ):
        LinearisedLaplace(model, Gaussian(1.0, observe=blur)).fit([(z, torch.zeros(1, 36).double())], progress=False)
    la = LinearisedLaplace(model.float(), Gaussian(1.0, observe=blur), num_samples=4)
    assert bool(
        la.fit([(z.float(), torch.zeros(1, 1, SIDE, SIDE))], progress=False).predict(z.float()).stddev.isfinite().all()
    )


def test_adjoints_of_rounding_are_adjoint() -> None:
    """Sums of thousands of numbers in float32, whose errors go one way."""
    like = torch.zeros(1, 40_000)
    for pair in (
        (lambda f: f.cumsum(-1), lambda u: u.flip(-1).cumsum(-1).flip(-1)),
        (lambda f: f - f.mean(-1, keepdim=True), lambda u: u - u.mean(-1, keepdim=True)),
    ):
        assert isinstance(as_measurement(pair, like).checked(like), Measurement)


def physics_of(name: str) -> tuple[Any, int]:
    """One of deepinv's, and the number of its channels."""
    P = pytest.importorskip("deepinv").physics
    size, blur = (1, SIDE, SIDE), P.blur.gaussian_blur(sigma=0.4)
    torch.manual_seed(0)
    made: dict[str, Callable[[], Any]] = {
        "Tomography": lambda: P.Tomography(angles=5, img_width=SIDE, normalize=False),
        "approximate": lambda: P.Tomography(angles=5, img_width=SIDE, normalize=False, adjoint_via_backprop=False),
        "Inpainting": lambda: P.Inpainting(img_size=size, mask=0.5),
        "Blur": lambda: P.Blur(filter=blur, padding="circular"),
        "Downsampling": lambda: P.Downsampling(img_size=size, factor=2),
        "MRI": lambda: P.MRI(mask=(torch.rand(SIDE, SIDE) < 0.5).float(), img_size=(2, SIDE, SIDE)),
        "CompressedSensing": lambda: P.CompressedSensing(m=12, img_size=size),
        "SinglePixelCamera": lambda: P.SinglePixelCamera(m=12, img_size=size, fast=False),
    }
    return made[name](), 2 if name == "MRI" else 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["Tomography", "Inpainting", "Blur", "Downsampling", "MRI", "CompressedSensing", "SinglePixelCamera"]
)
@pytest.mark.parametrize("method", ["exact", "dual"])
def test_physics_of_deepinv(name: str, method: str) -> None:
    """Variances are those of the dense matrix, which the physics gives for unit images."""
    physics, channels = physics_of(name)
    model, z = inverse.picture(SIDE, channels)
    n = channels * SIDE**2
    T = physics.A(torch.eye(n).reshape(n, channels, SIDE, SIDE)).double()
    y = (model(z).detach().flatten(1) @ T.flatten(1)).reshape(1, *T.shape[1:]).float()
    la = LinearisedLaplace(model, Gaussian(20.0, learn=False, observe=physics), num_samples=64, method=method)
    la.fit([(z, y.double())], tolerance=1e-3, progress=False)
    J = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, z))(dict(model.named_parameters()))
    J = torch.cat([part.reshape(n, -1) for part in J.values()], 1).detach()
    rows = T.flatten(1).mT @ J
    expected = J @ torch.linalg.solve(20 * rows.mT @ rows + torch.eye(J.shape[1]).double(), J.mT)
    assert f"{int((T.flatten(1).abs().sum(0) > 0).sum())}" in str(la) or method == "dual"
    if method == "exact":
        assert_close(la.predict(z).covariance()[0], expected, rtol=1e-4, atol=1e-6)
    ratio = la.predict(z).deviations.square().mean(0).sum() / expected.trace()
    assert abs(float(ratio) - 1) < 4 * (2 * float((expected**2).sum()) / 64) ** 0.5 / float(expected.trace())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_approximate_adjoint_of_deepinv_is_refused() -> None:
    like = torch.zeros(1, 1, SIDE, SIDE)
    with pytest.raises(ValueError, match="adjoint_via_backprop=True"):
        as_measurement(physics_of("approximate")[0], like).checked(like)


def test_a_sparse_matrix_keeps_rows_of_both_and_is_of_integers() -> None:
    T = scipy.sparse.random(30, SIDE**2, 0.2, format="coo", rng=np.random.default_rng(0), dtype=np.float64)
    counts = (T != 0).astype(np.int64)
    f = torch.randn(2, SIDE**2, dtype=torch.float64)
    measurement = as_measurement(counts, IMAGES)
    assert_close(measurement.apply(f), f @ torch.as_tensor(counts.toarray()).double().mT)
    assert_close(
        measurement.adjoint(measurement.apply(f)), measurement.apply(f) @ torch.as_tensor(counts.toarray()).double()
    )
