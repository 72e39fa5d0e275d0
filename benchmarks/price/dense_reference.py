"""Predicted standard deviations of a small network by dense algebra in float64, from the formulas alone.

`H = Σᵢ φᵢᵀBᵢφᵢ + αI` with `B = diag p − ppᵀ` at the network's outputs, `var f(x) = diag φ(x) H⁻¹ φ(x)ᵀ`.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

__all__ = ["Reference", "distance"]

BATCH = 50


@dataclass(frozen=True, eq=False)
class Reference:
    """The exact posterior of all weights at one prior precision.

    Attributes:
        network: in float64.
        factor: lower Cholesky factor of `H`, `[P, P]`.
    """

    network: nn.Module
    factor: Tensor

    @classmethod
    def of(cls, network: nn.Module, x: Tensor, precision: float) -> "Reference":
        network = copy.deepcopy(network).double().eval()
        size = sum(p.numel() for p in network.parameters())
        H = precision * torch.eye(size, dtype=torch.float64)
        for part in x.double().split(BATCH):
            features = jacobian(network, part)
            p = network(part).softmax(-1).detach()
            # `B = (diag √p − p√pᵀ)(diag √p − p√pᵀ)ᵀ`
            root = torch.diag_embed(p.sqrt()) - p[:, :, None] * p.sqrt()[:, None]
            rows = torch.einsum("ncd,ncp->ndp", root, features).flatten(0, 1)
            H.addmm_(rows.mT, rows)
        return cls(network, torch.linalg.cholesky(H))

    def stddev(self, x: Tensor) -> Tensor:
        """Of each output, `[N, C]`."""
        half = self._half(x)
        return half.square().sum(0).sqrt().reshape(len(x), -1)

    def sampled_stddev(self, x: Tensor, num: int, repeats: int) -> list[Tensor]:
        """Of so many exact samples, several times."""
        half, generator = self._half(x), torch.Generator().manual_seed(0)
        draws = [torch.randn(num, len(half), generator=generator, dtype=half.dtype) for _ in range(repeats)]
        return [(draw @ half).square().mean(0).sqrt().reshape(len(x), -1) for draw in draws]

    def _half(self, x: Tensor) -> Tensor:
        """`C⁻¹φ(x)ᵀ`, `[P, N·C]`, with `H = CCᵀ`."""
        features = torch.cat([jacobian(self.network, part) for part in x.double().split(BATCH)]).flatten(0, 1)
        return torch.linalg.solve_triangular(self.factor, features.mT, upper=False)


def jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """`[N, C, P]`."""
    weights = {name: p.detach() for name, p in network.named_parameters()}
    others = dict(network.named_buffers())

    def outputs(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(network, {**weights, **others}, (x[None],))[0]

    parts = vmap(jacrev(outputs), (None, 0))(weights, x)
    return torch.cat([part.flatten(2) for part in parts.values()], -1)


def distance(stddev: Tensor, exact: Tensor) -> float:
    """`‖s − s*‖/‖s*‖`."""
    return float((stddev.double() - exact).norm() / exact.norm())
