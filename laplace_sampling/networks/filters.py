"""A network in coordinates in which a prior that correlates the taps of convolutional filters is white.

A filter of `k × k` taps has the prior covariance `exp(−r/ψ)` of Matérn-½, `r` the distance of two taps. With its
Cholesky factors in the blocks of `R`, `w = R w'` has this prior where `w'` is white (thesis eq. 7.7).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from laplace_sampling.networks.linearisation import Curvature, Linearisation
from laplace_sampling.networks.shell import Shell

# The block of all weights that are no taps of a filter.
OTHERS = "others"


@dataclass(frozen=True)
class Filters:
    """The filters in a tensor of weights, which follow each other in the flat vector.

    Attributes:
        block: whose lengthscale they have.
        place: of the tensor in the flat vector.
        kernel: number of taps along each axis.
    """

    block: str
    place: slice
    kernel: tuple[int, ...]

    def squared_distances(self) -> Int[Tensor, "taps taps"]:
        """`r²` of two taps: whole numbers, by which equal distances are found."""
        taps = torch.stack(torch.meshgrid(*map(torch.arange, self.kernel), indexing="ij"), -1).flatten(0, -2)
        return (taps[:, None] - taps).square().sum(-1)

    def taps(self, v: Float[Tensor, "*K P"]) -> Float[Tensor, "*K filters taps"]:
        """A view of the filters in flat vectors."""
        return v[..., self.place].unflatten(-1, (-1, torch.Size(self.kernel).numel()))


def correlation(squared_distances: Tensor, lengthscale: float) -> Float[Tensor, "taps taps"]:
    """`exp(−r/ψ)` in float64."""
    return (-squared_distances.double().sqrt() / lengthscale).exp()


class FilterNetwork(Linearisation):
    """A network with the Jacobian `φR`, in coordinates `w = R w'`.

    Args:
        whole: the network in its own coordinates.
        blocks: prefixes of names of modules, whose filters have one lengthscale; the longest one counts. Each other
            layer is a block of its own.

    Attributes:
        filters: of each tensor that has any.
        lengthscales: `ψ` by block; without them `R` is the identity.

    Raises:
        ValueError: if single elements or a last layer only are random, or no filter of several taps is; for a block
            without such filters.
    """

    def __init__(self, whole: Linearisation, blocks: Sequence[str] = ()) -> None:
        super().__init__(whole.shell, batching=whole.batching)
        # Products are counted, and ways of differentiating are found, together.
        self.whole, self.ways, self.products = whole, whole.ways, whole.products
        self.filters = _filters_of(whole, blocks) if type(whole) is Linearisation else []
        if not self.filters:
            raise ValueError(
                "`FilterwisePrior` is for convolutions whose whole filters of several taps are random, but the random "
                f'weights are {whole.names[:4]}: take other `parameters`, or prior="layerwise".'
            )
        if unknown := set(blocks) - {of.block for of in self.filters}:
            found = list(dict.fromkeys(of.block for of in _filters_of(whole, ())))
            raise ValueError(
                f"`FilterwisePrior(blocks=...)` names {sorted(unknown)}, which have no filters of several taps of "
                f"their own; the layers that have some are {found}."
            )
        self.lengthscales: Mapping[str, float] = {}
        self._roots: list[Tensor] = []

    def take(self, lengthscales: Mapping[str, float]) -> None:
        """Go over to the coordinates of other lengthscales, by block; with none to those of the network."""
        self.lengthscales = dict(lengthscales)
        self._roots = [
            torch.linalg.cholesky(correlation(of.squared_distances(), lengthscales[of.block])).to(self.device)
            for of in (self.filters if lengthscales else [])
        ]

    def _mapped(self, v: Float[Tensor, "*K P"], transposed: bool = False, inverse: bool = False) -> Tensor:
        if not self._roots:
            return v
        mapped = v.clone()
        for of, root in zip(self.filters, self._roots, strict=True):
            factor = torch.linalg.inv(root) if inverse else root
            factor = (factor if transposed else factor.mT).to(v)
            mapped[..., of.place] = (of.taps(v) @ factor).flatten(-2)
        return mapped

    def to_weights(self, v: Float[Tensor, "*K P"]) -> Float[Tensor, "*K P"]:
        """`R v`."""
        return self._mapped(v)

    def of_gradients(self, v: Float[Tensor, "*K P"]) -> Float[Tensor, "*K P"]:
        """`Rᵀv`."""
        return self._mapped(v, transposed=True)

    @property
    def weights(self) -> Float[Tensor, " P"]:
        """The trained weights, `R⁻¹w̄`."""
        return self._mapped(self.whole.weights.double(), inverse=True).to(self.dtype)

    def layers(self) -> tuple[list[str], Tensor]:
        """The names of the blocks, and for each weight the index of its block, `[P]`."""
        names = list(dict.fromkeys(of.block for of in self.filters))
        groups = torch.full((self.num_parameters,), len(names))
        for of in self.filters:
            groups[of.place] = names.index(of.block)
        return names + [OTHERS] * bool((groups == len(names)).any()), groups

    def unflatten(self, v: Tensor) -> dict[str, Tensor]:
        """The weights `R v` in the shapes of the parameters, by name."""
        return self.whole.unflatten(self.to_weights(v))

    def jvp(self, x: Any, v: Float[Tensor, "K P"], *, graph: bool = False) -> Float[Tensor, "K N C"]:
        """As `Linearisation` does."""
        self._check_width(v, "jvp")
        return self.whole.jvp(x, self.to_weights(v), graph=graph)

    def vjp(self, x: Any, u: Float[Tensor, "K N C"], *, graph: bool = False) -> Float[Tensor, "K P"]:
        """As `Linearisation` does."""
        return self.of_gradients(self.whole.vjp(x, u, graph=graph))

    def ggn(self, x: Any, v: Float[Tensor, "K P"], curvature: Curvature) -> Float[Tensor, "K P"]:
        """As `Linearisation` does."""
        self._check_width(v, "ggn")
        return self.of_gradients(self.whole.ggn(x, self.to_weights(v), curvature))

    def vjp_each(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, "N P"]:
        """As `Linearisation` does."""
        return self.of_gradients(self.whole.vjp_each(x, u))

    def jacobian(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N C P"]:
        """As `Linearisation` does."""
        return self.of_gradients(self.whole.jacobian(x, graph=graph))

    def on(self, shell: Shell) -> Self:
        """As `Linearisation` does."""
        other = super().on(shell)
        other.whole = self.whole.on(shell)
        return other


def _filters_of(network: Linearisation, blocks: Sequence[str]) -> list[Filters]:
    """The filters of several taps among the random weights."""
    found, start, parameters = [], 0, dict(network.module.named_parameters())
    for name, size in zip(network.names, network.shell.sizes, strict=True):
        owner, _, last = name.rpartition(".")
        module, place = network.module.get_submodule(owner), slice(start, start + size)
        start += size
        if not isinstance(module, _ConvNd) or last != "weight" or parameters[name].is_complex():
            continue
        kernel = tuple(module.kernel_size)
        if torch.Size(kernel).numel() > 1:
            inside = [block for block in blocks if f"{name}.".startswith(f"{block}.")]
            found.append(Filters(max(inside, key=len, default=owner or "(root)"), place, kernel))
    return found
