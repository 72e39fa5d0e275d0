r"""Sums over data of what the gradients `D_i`, `[m, k]`, of a layer's weights say of the curvature.

With a random output `φ_iᵀ L z_i` of each datum, `E[z zᵀ] = I`, a layer's block of `M` is `E[Σ_i vec(D_i) vec(D_i)ᵀ]`.
Its partial traces, and its diagonal in the Kronecker product of two bases, are sums over the same gradients:

    G = Σ_i D_i D_iᵀ,        A = Σ_i D_iᵀ D_i,        Λ = Σ_i (U_Gᵀ D_i U_A)².

The places at which a layer uses its weights are summed within `D_i`, not taken as data of their own.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.networks.layers import Pair

__all__ = ["partial_traces", "squares"]

# Numbers of the gradients `D_i` that are in memory at once.
_NUMBERS = 2**22


def partial_traces(pair: Pair) -> tuple[Float[Tensor, "q m m"], Float[Tensor, "q k k"]]:
    """`G` and `A` of some data, in float64."""
    g, a = pair
    m, k, places = g.shape[2], a.shape[2], g.shape[3]
    # Whichever is cheaper: places are multiplied by places, or the gradients are formed.
    if places**2 * (m + k) + places * (m**2 + k**2) <= m * k * (places + m + k):
        return _summed("nqmt,nqlt->qml", g @ (a.mT @ a), g), _summed("nqkt,nqlt->qkl", a @ (g.mT @ g), a)
    G, A = 0.0, 0.0
    for of_outputs, of_inputs in _split(g, a):
        D = of_outputs @ of_inputs.mT
        G, A = G + _summed("nqmk,nqlk->qml", D, D), A + _summed("nqmk,nqml->qkl", D, D)
    assert isinstance(G, Tensor)
    assert isinstance(A, Tensor)
    return G, A


def squares(pair: Pair, left: Float[Tensor, "q m m"], right: Float[Tensor, "q k k"]) -> Float[Tensor, "q m k"]:
    """`Σ_i (leftᵀ D_i right)²` of some data, in float64."""
    g, a = pair
    left, right = left.to(g), right.to(a)
    m, k, places = g.shape[2], a.shape[2], g.shape[3]
    # Whichever is cheaper: the places are turned, or the gradients.
    early = places * (m**2 + k**2) <= m * k * (m + k)
    if early:
        g, a = torch.einsum("nqmt,qmj->nqjt", g, left), torch.einsum("nqkt,qkl->nqlt", a, right)
    if early and places == 1:
        return _summed("nqm,nqk->qmk", g[..., 0].square(), a[..., 0].square())
    total = torch.zeros(g.shape[1], m, k, dtype=torch.float64, device=g.device)
    for of_outputs, of_inputs in _split(g, a):
        D = of_outputs @ of_inputs.mT
        if not early:
            # One product of all data for each group, not one for each datum.
            D = torch.einsum("nqjk,qkl->nqjl", torch.einsum("nqmk,qmj->nqjk", D, left), right)
        total += D.square_().sum(0)
    return total


def _summed(equation: str, left: Tensor, right: Tensor) -> Tensor:
    # Data of one batch are summed in their own precision, batches in float64.
    return torch.einsum(equation, left, right).double()


def _split(g: Tensor, a: Tensor) -> list[Pair]:
    """The data in parts whose gradients fit in memory."""
    most = max(1, _NUMBERS // (g.shape[1] * g.shape[2] * a.shape[2]))
    return list(zip(g.split(most), a.split(most), strict=True))
