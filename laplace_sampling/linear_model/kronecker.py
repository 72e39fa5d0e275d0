r"""Kronecker-factored curvature (KFAC): `M̂ = G ⊗ A` for the weights of each linear layer and convolution.

With inputs `a` of such a layer (a one appended for its bias) and pulled-back columns `g` of roots of `B`, the exact
block is `Σ_i Σ_c vec(Σ_t g_itc a_itᵀ) vec(…)ᵀ` over data `i`, outputs `c` and places `t` where the weights are used.
Here inputs and gradients, and places, are taken for independent (Martens and Grosse 2015; "expand" of Eschenhagen et
al. 2023):

    G = Σ_i Σ_t Σ_c g_itc g_itcᵀ,        A = Σ_i Σ_t w_i a_it a_itᵀ / Σ_i Σ_t w_i,

with weights `w` of data, which are in `g` already, and sums over the places that outputs depend on: where all `g_itc`
are zero, as at padding and labels that are ignored, there is nothing of `M`.

Weights of all other modules have the diagonal of `M`. Whether a layer is used as its class says, is tried: where the
gradients of its weights are not `Σ_it g_it a_itᵀ`, they are treated as the others.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.likelihoods.composite import Weighted
from laplace_sampling.linear_model.features import GGN, NetworkFeatures, WhiteNoise
from laplace_sampling.linear_model.priors import GaussianPrior, GPrior
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.subnetwork import Subnetwork
from laplace_sampling.solvers.preconditioners import Factored

__all__ = ["Kronecker", "kronecker", "kronecker_prior"]

Shift = float | Tensor


@dataclass(frozen=True)
class _Block:
    """`G ⊗ A` at the places `index`, `[m, n]`, of the flat vector."""

    index: Tensor
    G: Float[Tensor, "m m"]
    A: Float[Tensor, "n n"]

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return *torch.linalg.eigh(self.G), *torch.linalg.eigh(self.A)

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "m n"]:
        g, _, a, _ = self._eigen
        return g.clamp_min(0)[:, None] * a.clamp_min(0)

    def of(self, shift: Shift) -> float:
        """The shift of this block."""
        if not isinstance(shift, Tensor) or shift.dim() == 0:
            return float(shift)
        here = shift[self.index]
        if not bool((here == here[0, 0]).all()):
            raise ValueError(
                "Kronecker-factored curvature takes one prior precision for the weights of a layer: use "
                'prior="isotropic", "layerwise" or "g-prior".'
            )
        return float(here[0, 0])

    def apply(self, f: Callable[[Tensor], Tensor], v: Float[Tensor, "K P"]) -> Float[Tensor, "K m n"]:
        """`f(M̂) v_k` at these places."""
        _, U, _, V = self._eigen
        return U @ ((U.T @ v[:, self.index].to(U) @ V) * f(self.eigenvalues)) @ V.T

    def diagonal(self, f: Callable[[Tensor], Tensor]) -> Float[Tensor, "m n"]:
        """Of `f(M̂)`."""
        _, U, _, V = self._eigen
        return U**2 @ f(self.eigenvalues) @ (V**2).T

    def congruent(self, w: Float[Tensor, " P"]) -> "_Block":
        here = w[self.index].to(self.G)
        left, right = here[:, 0] / here[0, 0], here[0]
        if not torch.allclose(left[:, None] * right, here, rtol=1e-4):
            raise ValueError(
                "Kronecker-factored curvature takes a prior whose scales are a product of one factor for each output "
                'and one for each input of a layer: use prior="isotropic", "layerwise" or "g-prior".'
            )
        return replace(self, G=left[:, None] * self.G * left, A=right[:, None] * self.A * right)


class Kronecker(Factored):
    """`M̂` of some blocks `G ⊗ A`, and a diagonal for the other weights.

    Args:
        blocks: see above.
        rest: places of the other weights in the flat vector.
        diagonal: of `M̂` there.
        passes: as of a `Preconditioner`.

    Attributes:
        num_factored: how many weights are in blocks.
    """

    def __init__(self, blocks: list[_Block], rest: Tensor, diagonal: Tensor, passes: float) -> None:
        self.blocks, self.rest, self.diagonal, self.passes = blocks, rest, diagonal, passes
        self.num_factored = sum(block.index.numel() for block in blocks)
        self.size = self.num_factored + len(rest)

    def _apply(self, v: Tensor, f: Callable[[Tensor, Shift], Tensor], shift: Shift = 0.0) -> Tensor:
        out = torch.empty_like(v)
        for block in self.blocks:
            of_block = block.of(shift)
            out[:, block.index] = block.apply(lambda t, s=of_block: f(t, s), v).to(v)
        rest = shift[self.rest] if isinstance(shift, Tensor) and shift.dim() else shift
        out[:, self.rest] = v[:, self.rest] * f(self.diagonal, rest).to(v)
        return out

    def _diagonal(self, f: Callable[[Tensor, Shift], Tensor], shift: Shift) -> Tensor:
        out = torch.empty(self.size, dtype=torch.float64, device=self.rest.device)
        for block in self.blocks:
            of_block = block.of(shift)
            out[block.index] = block.diagonal(lambda t, s=of_block: f(t, s))
        rest = shift[self.rest] if isinstance(shift, Tensor) and shift.dim() else shift
        out[self.rest] = f(self.diagonal, rest).to(out)
        return out

    def solve(self, v: Tensor, shift: Shift) -> Tensor:
        return self._apply(v, lambda t, s: 1 / (t + s), shift)

    def solve_root(self, v: Tensor, shift: Shift) -> Tensor:
        return self._apply(v, lambda t, s: (t + s) ** -0.5, shift)

    def matmul(self, v: Tensor) -> Tensor:
        return self._apply(v, lambda t, s: t)

    def variance(self, shift: Shift) -> Tensor:
        return self._diagonal(lambda t, s: 1 / (t + s), shift)

    def leverage(self, shift: Shift) -> Tensor:
        return self._diagonal(lambda t, s: t / (t + s), shift)

    def eigenvalues(self) -> Tensor:
        return torch.cat([*(block.eigenvalues.reshape(-1) for block in self.blocks), self.diagonal])

    def congruent(self, w: Tensor) -> "Kronecker":
        blocks = [block.congruent(w) for block in self.blocks]
        return Kronecker(blocks, self.rest, self.diagonal * w[self.rest].to(self.diagonal) ** 2, self.passes)

    def tensors(self) -> dict[str, Tensor]:
        blocks = [{"index": block.index, "G": block.G, "A": block.A} for block in self.blocks]
        named = {f"{n}.{name}": tensor for n, block in enumerate(blocks) for name, tensor in block.items()}
        return {"rest": self.rest, "diagonal": self.diagonal, **named}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> "Kronecker":
        """That of which these are the `tensors`."""
        numbers = range((len(tensors) - 2) // 3)
        blocks = [_Block(*(tensors[f"{n}.{name}"] for name in ("index", "G", "A"))) for n in numbers]
        return cls(blocks, tensors["rest"], tensors["diagonal"], 0.0)


@dataclass
class _Call:
    """One call of a layer: inputs as rows, the output, and how much each row counts."""

    inputs: Float[Tensor, "rows n"]
    output: Tensor
    counts: Float[Tensor, " rows"]


@dataclass
class _Layer:
    """A linear layer or convolution, and what was seen of it in one run.

    Attributes:
        module: itself.
        weight: its name among the random weights.
        bias: likewise, if it is random.
        calls: in the last run of the network.
        A: `Σ w a aᵀ`, of rows whose weights `w` sum to `rows`.
        G: `Σ g gᵀ`.
    """

    module: nn.Linear | nn.Conv2d
    weight: str
    bias: str | None
    calls: list[_Call] = field(default_factory=list)
    A: Tensor | float = 0.0
    G: Tensor | float = 0.0
    rows: float = 0.0

    def see(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
        """A hook of the forward pass. What comes after may change an output in place: it gets another tensor."""
        inputs = self._unfolded((args[0] if args else kwargs["input"]).detach())
        self.calls.append(_Call(inputs, output, torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device)))
        return output.clone()

    def count(self) -> None:
        """Add the inputs of all calls to `A`, and forget the calls."""
        for call in self.calls:
            a = call.inputs.double()
            self.A, self.rows = self.A + (call.counts * a.T) @ a, self.rows + float(call.counts.sum())
        self.calls = []

    def _unfolded(self, x: Tensor) -> Tensor:
        module = self.module
        if isinstance(module, nn.Conv2d):
            assert not isinstance(module.padding, str)
            x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT
        x = x.reshape(-1, x.shape[-1])
        return x if self.bias is None else torch.cat([x, x.new_ones(len(x), 1)], dim=1)

    def by_row(self, gradient: Tensor) -> Tensor:
        """The gradient in an output as rows `[rows, m]`, in the order of those of the inputs."""
        if isinstance(self.module, nn.Conv2d):
            gradient = gradient.movedim(1, -1)
        return gradient.reshape(-1, gradient.shape[-1])

    def explains(self, gradients: list[Tensor], of_weights: dict[str, Tensor]) -> bool:
        """Whether the gradients of its weights are those by way of its calls."""
        if not self.calls:
            return False
        pairs = [(self.by_row(g), call.inputs) for call, g in zip(self.calls, gradients, strict=True)]
        if any(len(g) != len(a) for g, a in pairs):  # of a class that changes what the layer returns
            return False
        found = torch.stack([g.T @ a for g, a in pairs]).sum(0)
        expected = of_weights[self.weight].reshape(len(found), -1)
        if self.bias is not None:
            expected = torch.cat([expected, of_weights[self.bias][:, None]], dim=1)
        return float((found - expected).norm()) <= math.sqrt(torch.finfo(found.dtype).eps) * float(expected.norm())


def kronecker(ggn: GGN, noise: WhiteNoise) -> Kronecker:
    """KFAC of a GGN, by a forward pass of all data, and a reverse pass for each output or probe.

    Args:
        ggn: `M`, of the features of a network.
        noise: probes in place of the columns of roots of `B`, where these are more.

    Raises:
        ValueError: for other features, as of measurements or with noise variances.
    """
    features = ggn.features
    if not isinstance(features, NetworkFeatures) or isinstance(features.network, Subnetwork):
        raise ValueError(
            'method="kfac" is for whole weights of a network and data of equal noise: leave out `noise_variances` (or '
            '`weights` of a regression), `observe` and masks of `parameters=`, or use method="diagonal".'
        )
    network = features.network
    layers = _layers(network)
    exact = features.num_outputs <= noise.num_samples
    passes = 0.0
    for number, chunk in enumerate(features.chunks()):
        x, own = features.inputs(chunk)
        with _seen(layers):
            outputs, weights = network.traced(x)
        f = outputs.reshape(len(chunk), -1)
        if number == 0:
            layers = _used_as_said(layers, f, weights)
        if exact:
            white = torch.eye(features.num_outputs).to(f)[:, None].expand(-1, len(f), -1)
        else:
            white = noise(chunk).to(f) / math.sqrt(noise.num_samples)
        targets = ggn._targets(chunk)
        roots = ggn.likelihood.root(ggn.outputs[chunk], white.to(ggn.outputs), targets)
        roots = features.layout.narrow(roots, own).to(f)
        calls = [(layer, call) for layer in layers for call in layer.calls]
        for root in roots if calls else []:
            for (layer, call), g in zip(calls, _by_row(f, calls, root), strict=True):
                layer.G = layer.G + g.T @ g
                call.counts[(g != 0).any(1)] = 1.0
        if isinstance(ggn.likelihood, Weighted) and calls:
            assert targets is not None
            _weigh(f, calls, roots, ggn.likelihood.weights(targets).to(f))
        for layer in layers:
            layer.count()
        passes += len(roots) * len(chunk) / (2 * features.num_data)
    return _assembled(ggn, layers, noise, passes)


def _layers(network: Linearisation) -> list[_Layer]:
    """Linear layers and convolutions whose weight is random."""
    names = {id(p): name for name, p in network.module.named_parameters() if name in network.shapes}
    found = []
    for module in network.module.modules():
        if isinstance(module, nn.Conv2d):
            known = module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)
        else:
            known = isinstance(module, nn.Linear)
        if known and isinstance(module, nn.Linear | nn.Conv2d) and id(module.weight) in names:
            found.append(_Layer(module, names[id(module.weight)], names.get(id(module.bias))))
    return found


def _gradients(f: Tensor, of: list[Tensor], u: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(f, of, u, retain_graph=True, allow_unused=True, materialize_grads=True))


@contextmanager
def _seen(layers: list[_Layer]) -> Iterator[None]:
    """Calls of these layers are recorded inside."""
    handles = [layer.module.register_forward_hook(layer.see, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _by_row(f: Tensor, calls: list[tuple[_Layer, _Call]], u: Tensor) -> list[Float[Tensor, "rows m"]]:
    """`u` pulled back to the outputs of calls."""
    gradients = _gradients(f, [call.output for _, call in calls], u)
    return [layer.by_row(gradient).double() for (layer, _), gradient in zip(calls, gradients, strict=True)]


def _weigh(f: Tensor, calls: list[tuple[_Layer, _Call]], roots: Tensor, weights: Float[Tensor, " n"]) -> None:
    """Each row counts as the datum that it is of: which one, is seen from what weights do to its gradient."""
    signs = torch.randn(len(roots), generator=torch.Generator().manual_seed(0)).to(roots)
    u = torch.einsum("k,knc->nc", signs, roots)
    pairs = zip(_by_row(f, calls, u), _by_row(f, calls, u * weights[:, None]), strict=True)
    for (_, call), (plain, scaled) in zip(calls, pairs, strict=True):
        found = (scaled * plain).sum(1) / plain.square().sum(1)
        call.counts = torch.where(call.counts > 0, found.nan_to_num(0.0), 0.0)


def _used_as_said(layers: list[_Layer], f: Tensor, weights: dict[str, Tensor]) -> list[_Layer]:
    """The layers whose weights act through their calls only, by the gradients of a random combination of outputs."""
    u = torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f)
    of_weights = dict(zip(weights, _gradients(f, list(weights.values()), u), strict=True))
    used = []
    for layer in layers:
        outs = [call.output for call in layer.calls]
        if outs and layer.explains(_gradients(f, outs, u), of_weights):
            used.append(layer)
        else:
            layer.calls = []
    return used


def _assembled(ggn: GGN, layers: list[_Layer], noise: WhiteNoise, passes: float) -> Kronecker:
    """The blocks, and the diagonal of what is in none."""
    features = ggn.features
    assert isinstance(features, NetworkFeatures)
    network, sizes = features.network, [shape.numel() for shape in features.network.shapes.values()]
    places = dict(zip(network.names, torch.arange(ggn.size, device=ggn.device).split(sizes), strict=True))
    blocks, left = [], dict(places)
    for layer in layers:
        index = left.pop(layer.weight).reshape(len(layer.module.weight), -1)
        if layer.bias is not None:
            index = torch.cat([index, left.pop(layer.bias)[:, None]], dim=1)
        assert isinstance(layer.G, Tensor)
        assert isinstance(layer.A, Tensor)
        blocks.append(_Block(index, layer.G, layer.A / (layer.rows or 1.0)))
    if not left:
        nothing = torch.zeros(0, dtype=torch.long, device=ggn.device)
        return Kronecker(blocks, nothing, nothing.double(), passes)
    others = NetworkFeatures(network.with_names(list(left)), features.data, features.layout)
    diagonal = GPrior(num_probes=noise.num_samples).diagonal(replace(ggn, features=others), noise)
    return Kronecker(blocks, torch.cat([left[name] for name in others.network.names]), diagonal.double(), passes)


def kronecker_prior(
    prior: GPrior, curvature: Kronecker, layers: tuple[list[str], Tensor], precision: float, dtype: torch.dtype
) -> GaussianPrior:
    """The g-prior of Kronecker-factored curvature, `A = α diag(M̂)`; in blocks its floor is one of each factor."""
    diagonal = torch.zeros(curvature.size, dtype=torch.float64, device=curvature.rest.device)
    diagonal[curvature.rest] = curvature.diagonal
    floored = 0
    for block in curvature.blocks:
        g, a = block.G.diagonal(), block.A.diagonal()
        low_g, low_a = prior.floor * g.mean(), prior.floor * a.mean()
        diagonal[block.index] = torch.maximum(g, low_g)[:, None] * torch.maximum(a, low_a)
        floored += int(((g < low_g)[:, None] | (a < low_a)).sum())
    built = prior.of(diagonal, layers, precision)
    scale = built.scale.clone()
    for block in curvature.blocks:  # not floored again, weight by weight: scales are a product of two factors
        if bool((diagonal[block.index] > 0).all()):
            scale[block.index] = diagonal[block.index].rsqrt()
    floored += int((scale[curvature.rest] < curvature.diagonal.rsqrt()).sum())
    return replace(built, scale=scale.to(dtype), num_floored=floored)
