"""`FilterwisePrior`: convolutional filters whose taps are correlated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from laplace_sampling.arguments import check_positive
from laplace_sampling.linear_model.draws import SeededNoise
from laplace_sampling.linear_model.ggn import GGN
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Layers, Prior, ungrouped
from laplace_sampling.networks.filters import FilterNetwork
from laplace_sampling.networks.linearisation import Linearisation


@dataclass(frozen=True)
class FilterwisePrior(Prior):
    r"""Gaussian filters whose taps have the covariance `a_k⁻¹ exp(−r/ψ_k)`, Matérn-½ in their distance `r`.

    Neighbouring taps of a convolution with several taps are alike, so that functions are smoother than with independent
    weights: a prior of image reconstruction (thesis eq. 7.7). Weights of 1×1 convolutions and linear layers, biases and
    all others are independent, with one variance. Fits work in coordinates `w = R w'`, where `R` has Cholesky factors
    of the correlations in its blocks and `w'` is independent.

    By the evidence, `fit_hyperparameters` of a regression finds `a_k` and `ψ_k` of each block, exactly, from
    `K_yy = Σ_k a_k⁻¹ Σ_m exp(−r_m/ψ_k) J_k D_m J_kᵀ`. For more than 3,000 observations, or more than memory holds, and
    by other criteria `ψ_k` and the ratios of `a_k` stay as given, and only their common factor is found. `print(la)`
    shows them.

    Args:
        precision: the factor of all `a_k`.
        lengthscale: starting value of all `ψ_k`, in taps.
        blocks: prefixes of names of modules, such as `("down.0", "up.1")`: the filters inside of one have one `a_k` and
            one `ψ_k`. Each other layer is a block of its own.
        lengthscales: starting values of single blocks, by name.
        precisions: `a_k` of single blocks, and of `"others"`, by name, in units of `precision`.
        total_variation: `λ` of the penalty `Σ_k −λκ_k + log(λ |∂κ_k/∂ψ_k|)` that is added to the evidence, with the
            expected total variation `κ_k` of images drawn from block `k` of the prior (thesis eq. 7.8–7.10). Larger
            values give smoother images, and narrower error bars. It takes a network whose outputs are images
            `[..., H, W]`.

    Raises:
        TypeError, ValueError: for values that are not positive; in the constructor of `LinearisedLaplace`, for random
            weights without filters of several taps, and for a block without any; in a fit, for other names; with
            `total_variation`, for outputs that are no images, and where the evidence is not known.
    """

    lengthscale: float = 1.0
    blocks: Sequence[str] = ()
    lengthscales: Mapping[str, float] = field(default_factory=dict, hash=False)
    precisions: Mapping[str, float] = field(default_factory=dict, hash=False)
    total_variation: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("`FilterwisePrior(lengthscale=...)`", self.lengthscale)
        if self.total_variation is not None:
            check_positive("`FilterwisePrior(total_variation=...)`", self.total_variation)
        if isinstance(self.blocks, str) or not all(isinstance(name, str) for name in self.blocks):
            raise TypeError(f"`FilterwisePrior(blocks=...)` must be several names, but is {self.blocks!r:.80}.")
        for argument in ("lengthscales", "precisions"):
            if not isinstance(given := getattr(self, argument), Mapping):
                raise TypeError(
                    f"`FilterwisePrior({argument}=...)` must be numbers by the names of blocks, but is {given!r:.80}."
                )
            for name, value in given.items():
                check_positive(f"`FilterwisePrior({argument}={{{name!r}: ...}})`", value)

    def linearised(self, network: Linearisation) -> FilterNetwork:
        return FilterNetwork(network, self.blocks)

    def place(self, network: Linearisation) -> None:
        assert isinstance(network, FilterNetwork)
        network.take({of.block: float(self.lengthscales.get(of.block, self.lengthscale)) for of in network.filters})

    def build(self, ggn: GGN, layers: Layers, noise: SeededNoise) -> GaussianPrior:
        names, groups = layers
        if unknown := [name for name in (*self.lengthscales, *self.precisions) if name not in names]:
            raise ValueError(f"`FilterwisePrior` has values for {unknown}, but the blocks are {names}.")
        precisions = torch.tensor([float(self.precisions.get(name, 1.0)) for name in names], dtype=torch.float64)
        scale = precisions.rsqrt().to(ggn.device, ggn.dtype)[groups.to(ggn.device)]
        lengthscales = {name: float(self.lengthscales.get(name, self.lengthscale)) for name in names}
        blocks = {name: (1 / float(a), lengthscales[name]) for name, a in zip(names, precisions, strict=True)}
        return replace(ungrouped(scale, self.precision), blocks=blocks)
