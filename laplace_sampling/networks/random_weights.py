"""What `parameters=` takes, and the network with these weights random.

A `Subnetwork` has some weights of a network, down to single elements of its tensors, in a flat vector of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.arguments import as_numbers
from laplace_sampling.data.batches import split, take
from laplace_sampling.networks.last_layer import LastLayer, linear_layer_of
from laplace_sampling.networks.linearisation import Linearisation, Selection, unwrapped
from laplace_sampling.networks.shell import Shell, real_shape
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER

# For each parameter by name: a mask of its shape, or indices into its flattened elements.
Elements = Mapping[str, Tensor | Sequence[int]]


def of_some_weights(network: Linearisation) -> bool:
    """Whether weights that require a gradient are taken as known."""
    others = any(p.requires_grad for name, p in network.source.named_parameters() if name not in network.shapes)
    return others or network.num_parameters < sum(network.shell.sizes)


class Subnetwork(Linearisation):
    """A network in which some elements of its parameters are random: `P` is the number of these, in every product.

    The network is differentiated in the whole tensors that have such elements, few vectors at a time.

    Args:
        module: the trained network.
        elements: masks or indices by name of parameter.
        autocast: as for `Linearisation`.

    Attributes:
        index: of the random elements among those of the parameters in `names`, `[P]`, rising.
        whole: the network with all elements of these parameters random.

    Raises:
        ValueError: for names or elements that the module does not have, or none at all.
    """

    def __init__(self, module: nn.Module, elements: Elements, *, autocast: torch.dtype | None = None) -> None:
        chosen = _indices(unwrapped(module), elements)
        super().__init__(module, list(chosen), autocast=autocast)
        self.whole = self.with_names(list(chosen))
        starts = torch.tensor([0, *self.shell.sizes]).cumsum(0).tolist()
        index = torch.cat([chosen[name] + start for name, start in zip(self.names, starts, strict=False)])
        self.index, self.num_parameters = index.to(self.device), len(index)

    @property
    def selection(self) -> dict[str, list[int]]:
        """The indices of the random elements by name."""
        parts = torch.zeros(self.whole.num_parameters, dtype=torch.bool).index_fill(0, self.index.cpu(), True)
        masks = zip(self.names, parts.split(self.shell.sizes), strict=True)
        return {name: mask.nonzero()[:, 0].tolist() for name, mask in masks}

    @property
    def weights(self) -> Float[Tensor, " P"]:
        """The trained weights `w̄` that are random."""
        return super().weights[self.index]

    def layers(self) -> tuple[list[str], Tensor]:
        """The names of the modules that own random weights, and for each weight the index of its module, `[P]`."""
        names, groups = super().layers()
        present, groups = groups[self.index.to(groups.device)].unique(return_inverse=True)
        return [names[i] for i in present.tolist()], groups

    def embed(self, v: Float[Tensor, "*K P"]) -> Float[Tensor, "*K Q"]:
        """The vectors of all elements of the parameters, zero where these are not random."""
        return v.new_zeros(*v.shape[:-1], self.whole.num_parameters).index_copy(-1, self.index.to(v.device), v)

    def of_gradients(self, v: Float[Tensor, "*K Q"]) -> Float[Tensor, "*K P"]:
        """Gradients in the random elements alone."""
        return v[..., self.index]

    def unflatten(self, v: Tensor) -> dict[str, Tensor]:
        """`[..., P]` in the shapes of the parameters, by name; zero in the elements that are not random."""
        return self.whole.unflatten(self.embed(v))

    def jvp(self, x: Any, v: Float[Tensor, "K P"], *, graph: bool = False) -> Float[Tensor, "K N C"]:
        """As `Linearisation` does."""
        self._check_width(v, "jvp")
        parts = [self.whole.jvp(x, self.embed(part), graph=graph) for part in v.split(self.batching.chunk_size)]
        return torch.cat(parts)

    def vjp(self, x: Any, u: Float[Tensor, "K N C"], *, graph: bool = False) -> Float[Tensor, "K P"]:
        """As `Linearisation` does."""
        parts = [self.whole.vjp(x, part, graph=graph)[:, self.index] for part in u.split(4 * self.batching.chunk_size)]
        return torch.cat(parts)

    def ggn(self, x: Any, v: Float[Tensor, "K P"], curvature: Callable[[Tensor], Tensor]) -> Float[Tensor, "K P"]:
        """As `Linearisation` does."""
        self._check_width(v, "ggn")
        # One vector takes the fused product; a stack goes in two halves, so that only a few embedded vectors of all
        # elements are in memory at a time.
        if len(v) == 1:
            return self.whole.ggn(x, self.embed(v), curvature)[:, self.index]
        return self.vjp(x, curvature(self.jvp(x, v)))

    def vjp_each(self, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, "N P"]:
        """As `Linearisation` does."""
        rows = max(1, NUMBERS_TOGETHER // self.whole.num_parameters)
        parts = zip(split(x, rows), u.split(rows), strict=True)
        return torch.cat([self.whole.vjp_each(part, of_part)[:, self.index] for part, of_part in parts])

    def jacobian(self, x: Any, *, graph: bool = False) -> Float[Tensor, "N C P"]:
        """As `Linearisation` does."""
        outputs = self.evaluate(take(x, slice(1)))[0].numel()
        rows = max(1, NUMBERS_TOGETHER // (outputs * self.whole.num_parameters))
        return torch.cat([self.whole.jacobian(part, graph=graph)[..., self.index] for part in split(x, rows)])

    def on(self, shell: Shell) -> Self:
        """As `Linearisation` does."""
        other = super().on(shell)
        other.whole = self.whole.on(shell)
        return other


def _indices(module: nn.Module, elements: Elements) -> dict[str, Tensor]:
    """The chosen elements of each parameter that has any, rising."""
    parameters = dict(module.named_parameters())
    unknown = [name for name in elements if name not in parameters]
    if unknown:
        raise ValueError(f"`parameters={{...}}` has masks for {unknown}; the model has {list(parameters)}.")
    indices = {name: _index(name, real_shape(parameters[name]), of_name) for name, of_name in elements.items()}
    indices = {name: index for name, index in indices.items() if len(index)}
    if not indices:
        raise ValueError("`parameters={...}` selects nothing: all masks are empty.")
    return indices


def _index(name: str, shape: torch.Size, elements: Tensor | Sequence[int]) -> Tensor:
    """The chosen elements of one flattened parameter, rising."""
    given = as_numbers(f"`parameters={{{name!r}: ...}}`", elements, boolean=True)
    if given.dtype == torch.bool:
        if given.shape != shape:
            raise ValueError(
                f"`parameters`: the mask for `{name}` has shape {list(given.shape)}, but the parameter {list(shape)}; "
                "give one of its shape, or indices into its flattened elements."
            )
        return given.reshape(-1).nonzero()[:, 0].cpu()
    # A repeated or negative index would count a weight twice, under two priors.
    index = given.reshape(-1).long().cpu()
    inside = (index >= 0) & (index < shape.numel()) & (index == given.reshape(-1).cpu())
    if not bool(inside.all()) or len(index.unique()) < len(index):
        raise ValueError(
            f"`parameters`: the indices for `{name}` must be different, from 0 to {shape.numel() - 1}, and whole: "
            "the elements of the flattened parameter."
        )
    return index.sort().values


Subset = Selection | Elements


def linearise(module: nn.Module, parameters: Subset, *, autocast: torch.dtype | None = None) -> Linearisation:
    """The network with the random weights that `parameters` names.

    Args:
        module: the trained network.
        parameters: names, globs or a predicate; `"last_layer"`; or masks or indices by name of parameter.
        autocast: as for `Linearisation`.

    Raises:
        TypeError, ValueError: as `Linearisation`, `LastLayer` and `Subnetwork` do.
    """
    if isinstance(parameters, str) and parameters == "last_layer":
        return LastLayer(module, autocast=autocast)
    if isinstance(parameters, Mapping):
        return Subnetwork(module, parameters, autocast=autocast)
    network = Linearisation(module, parameters, autocast=autocast)
    layer = linear_layer_of(network.module, network.names)
    return network if layer is None else LastLayer(module, autocast=autocast, layer=layer)
