"""Quadratics of a known spectrum, their solutions, and an objective."""

import math
from collections.abc import Iterator

import torch
from cases import make_case
from torch import Tensor

from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import DenseFeatures
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.linear_model import ModeObjective
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.solvers.operator import Operator, make_dense
from laplace_sampling.solvers.solver import Quadratic


class Counted(Operator):
    """Another operator, the rows given to it counted."""

    def __init__(self, operator: Operator) -> None:
        self.operator, self.count = operator, 0

    like = property(lambda self: self.operator)

    def matmul(self, v: Tensor, batch: Tensor | None = None) -> Tensor:
        self.count += len(v)
        return self.operator.matmul(v, batch)

    def root_rows(self) -> Iterator[Tensor]:
        return self.operator.root_rows()


def spectral(
    condition: float, size: int = 80, rows: int = 4, scale: float = 1.0, uniform: bool = True, samples: bool = True
) -> Quadratic:
    """Eigenvalues of `M` from `condition` down to 0.01 in equal ratios and random eigenvectors, `A` about 1."""
    g = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))[0]
    spectrum = scale * torch.logspace(math.log10(condition), -2, size, dtype=torch.float64)
    features = DenseFeatures((spectrum.sqrt()[:, None] * basis)[:, None])
    ggn = GGN(features, Gaussian(1.0), torch.zeros(size, 1, dtype=torch.float64))
    precision = torch.ones(size, dtype=torch.float64)
    if not uniform:
        precision = 10 ** (2 * torch.rand(size, generator=g, dtype=torch.float64) - 1)
    precision = scale * precision
    prior, data = torch.randn(2, rows, size, generator=g, dtype=torch.float64)
    centre = prior / precision.sqrt()
    return Quadratic(Counted(ggn), precision, centre if samples else 0 * centre, (data * spectrum.sqrt()) @ basis)


def exact(p: Quadratic) -> Tensor:
    H = make_dense(p.operator) + torch.diag(p.precision)
    root = p.precision.sqrt()
    return torch.linalg.solve(H / root / root[:, None], ((p.linear + p.precision * p.centre) / root).T).T / root


def true_error(p: Quadratic, value: Tensor) -> Tensor:
    """`‖Φ(ζ − ζ*)‖_B / ‖Φζ‖_B`."""
    root = torch.cat(list(p.operator.root_rows()))
    return ((value - exact(p)) @ root.T).norm(dim=1) / (value @ root.T).norm(dim=1)


def classification(name: str = "classification", alpha: float = 0.3) -> tuple[ModeObjective, Tensor]:
    model = make_case(name).linear_model()
    prior = GaussianPrior(
        torch.tensor([alpha, 5 * alpha], dtype=torch.float64),
        (torch.arange(model.features.size) % 3 == 0).long(),
        torch.ones(model.features.size, dtype=torch.float64),
        ("a", "b"),
    )
    return ModeObjective(model, prior), torch.zeros(1, model.features.size, dtype=torch.float64)


def moderate(num_data: int = 300, outputs: int = 2, size: int = 8, rows: int = 3, scale: float = 1.0) -> Quadratic:
    """A quadratic of moderate condition; `scale` multiplies the whole objective."""
    g = torch.Generator().manual_seed(0)
    features = torch.randn(num_data, outputs, size, generator=g, dtype=torch.float64)
    features *= torch.linspace(0.3, 1, size, dtype=torch.float64)
    ggn = GGN(DenseFeatures(features), Gaussian(scale), torch.zeros(num_data, outputs, dtype=torch.float64))
    precision = scale * (1 + 20 * torch.rand(size, generator=g, dtype=torch.float64))
    centre, linear = torch.randn(2, rows, size, generator=g, dtype=torch.float64)
    return Quadratic(ggn, precision, centre, scale * 30 * linear)


def random_spectrum(size: int = 300) -> tuple[GGN, Tensor]:
    g = torch.Generator().manual_seed(4)
    basis = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))[0]
    spectrum = 1e4 * torch.arange(1, size + 1, dtype=torch.float64) ** -1.5
    features = DenseFeatures((spectrum.sqrt()[:, None] * basis)[:, None])
    return GGN(features, Gaussian(1.0), torch.zeros(size, 1, dtype=torch.float64)), spectrum
