r"""Draws from the prior of a GPyTorch kernel, as functions of any input.

A kernel is expanded into a sum of terms

    f_k(x) = √(v/M) Σ_j h_j(x) [cos(ω_jᵀx) ψ(x)ᵀa_kj + sin(ω_jᵀx) ψ(x)ᵀb_kj],   a, b ~ N(0, I)

with finite features `ψ` (linear, constant, index: exact), random frequencies `ω` (stationary kernels, Bochner) and
random signs `h` (Tanimoto). A product of kernels multiplies terms: `ψ` by Kronecker's product, frequencies add, signs
multiply. The tangent kernel is a term of its own: a draw of the weights, exact at any input.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import scipy.special
import scipy.stats
import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.gp.linear_operators import gpytorch
from laplace_sampling.gp.tangent_kernel import TangentKernel, shape_inputs
from laplace_sampling.kernels.tanimoto import TanimotoKernel
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER

kernels = gpytorch.kernels

Features = Callable[[Tensor], Tensor]
Functions = Callable[[Tensor, int | None], Tensor]

# Draws that share their frequencies. The variance that many data with little noise leave is that of rare frequencies,
# of which 2,000 have too few or too many: of 512 draws from the sum of an RBF and a Matérn kernel, 150 data and a noise
# of 1e-4, variances are off by 50 to 230 % with the same ones for all draws, and by 12 to 24 % with others for eight.
_SHARING = 8
# `t` of a hash is taken by this modulus, as a table has an end. 8 and 4,096 have the same error, which is that of `M`.
_HASH_VALUES = 8


@dataclass(frozen=True)
class Term:
    """A summand of a kernel; its parts are as the module says.

    Attributes:
        variance: `v`.
        finite: `ψ`, each `[n, m_i]`; their Kronecker product is taken.
        frequencies: `ω`, `[G·M, D]` of all columns of the inputs, for `G` groups of draws.
        signs: `h`, each `[n, M]`; their product is taken.
        tangent: a tangent kernel and its columns, alone but for `v`.
    """

    variance: float = 1.0
    finite: tuple[Features, ...] = ()
    frequencies: Tensor | None = None
    signs: tuple[Features, ...] = ()
    tangent: tuple[TangentKernel, Tensor] | None = None

    def times(self, other: "Term") -> "Term":
        """The term of a product of kernels, of independent draws."""
        if self.tangent is not None or other.tangent is not None:
            raise NotImplementedError(
                "The prior of a product with a TangentKernel cannot be drawn as a function: add the kernels instead."
            )
        both = [f for f in (self.frequencies, other.frequencies) if f is not None]
        return Term(
            self.variance * other.variance,
            self.finite + other.finite,
            sum(both[1:], both[0]) if both else None,
            self.signs + other.signs,
        )


class PriorDraws:
    r"""`K` functions from the prior of a kernel, of zero mean.

    Args:
        kernel: of one output, made of those that `expanded` knows.
        num_columns: `D` of the inputs.
        num_draws: `K`.
        seed: of the draws.
        num_features: `M`: the kernel of the draws that share their frequencies has an error of about `1/√M` where it is
            not exact. All draws share the random signs.
        sharing: how many draws share them.

    Raises:
        NotImplementedError: for other kernels.
    """

    def __init__(
        self,
        kernel: kernels.Kernel,
        num_columns: int,
        num_draws: int,
        seed: int,
        num_features: int = 2000,
        sharing: int = _SHARING,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            columns, num_groups = torch.arange(num_columns), -(-num_draws // sharing)
            terms = Expansion(num_columns, num_features, generator, num_groups).of(kernel, columns)
            self._parts = [_draw(term, num_columns, num_draws, num_groups, generator) for term in terms]

    def __call__(self, x: Float[Tensor, "N D"], only: int | None = None) -> Float[Tensor, "K N"]:
        """The functions at some inputs, or one of them, `[1, N]`; differentiable in the inputs."""
        draws = [part(x, only) for part in self._parts]
        return sum(draws[1:], draws[0])


@dataclass(frozen=True)
class Expansion:
    """Kernels as sums of terms.

    Attributes:
        num_columns: `D` of all inputs.
        num_features: `M`.
        generator: of frequencies and signs.
        num_groups: of draws, `G`.
    """

    num_columns: int
    num_features: int
    generator: torch.Generator
    num_groups: int = 1

    def of(self, kernel: kernels.Kernel, columns: Tensor) -> list[Term]:
        """The terms of a kernel that is called with some columns of the inputs."""
        if kernel.active_dims is not None:
            columns = columns[cast(Tensor, kernel.active_dims).cpu()]
        return self._of_forward(kernel, columns)

    def _of_forward(self, kernel: kernels.Kernel, columns: Tensor) -> list[Term]:
        """The terms of its `forward`, for which the columns are chosen already."""
        # By the class itself: a subclass may compute anything.
        kind: Any = type(kernel)
        if kind is kernels.ScaleKernel:
            scale = float(cast(Tensor, kernel.outputscale))
            base = cast(kernels.Kernel, kernel.base_kernel)
            return [replace(term, variance=scale * term.variance) for term in self._of_forward(base, columns)]
        if kind is kernels.AdditiveKernel:
            return [term for part in cast(Any, kernel).kernels for term in self.of(part, columns)]
        if kind is kernels.ProductKernel:
            factors = [self.of(part, columns) for part in cast(Any, kernel).kernels]
            terms = []
            for first, *others in product(*factors):
                for other in others:
                    first = first.times(other)
                terms.append(first)
            return terms
        if kind is TangentKernel:
            return [Term(tangent=(cast(TangentKernel, kernel), columns))]
        if kind in FINITE:
            return [Term(finite=(FINITE[kind](kernel, columns),))]
        if kind in SPECTRAL:
            count = self.num_groups * self.num_features
            some = SPECTRAL[kind](kernel, count, len(columns), self.generator)
            frequencies = torch.zeros(count, self.num_columns, dtype=torch.float64)
            frequencies[:, columns] = some.cpu()
            return [Term(frequencies=frequencies)]
        if kind is TanimotoKernel:
            return [Term(signs=(_hashes(columns, self.num_features, self.generator),))]
        known = [kernels.ScaleKernel, kernels.AdditiveKernel, kernels.ProductKernel, *FINITE, *SPECTRAL]
        names = ", ".join(sorted(other.__name__ for other in (*known, TanimotoKernel, TangentKernel)))
        raise NotImplementedError(
            f"The prior of a {kind.__name__} cannot be drawn as a function. Those of these kernels can be, and of "
            f"their sums and products: {names}."
        )


# Finite features ------------------------------------------------------------------------------------------------------


def _linear(kernel: Any, columns: Tensor) -> Features:
    root = kernel.variance.detach().sqrt()[0]
    return lambda x: x[:, columns] * root.to(x)


def _constant(kernel: Any, columns: Tensor) -> Features:
    root = kernel.constant.detach().sqrt()
    return lambda x: root.to(x).reshape(1, 1).expand(len(x), 1)


def _index(kernel: Any, columns: Tensor) -> Features:
    # Of a singular matrix, too.
    values, vectors = torch.linalg.eigh(kernel.covar_matrix.to_dense().detach())
    root = vectors * values.clamp_min(0).sqrt()
    return lambda x: root.to(x)[x[:, columns[0]].long()]


FINITE: dict[Any, Callable[[Any, Tensor], Features]] = {
    kernels.LinearKernel: _linear,
    kernels.ConstantKernel: _constant,
    kernels.IndexKernel: _index,
}

# Frequencies ----------------------------------------------------------------------------------------------------------


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _gamma(shape: float, rate: float, count: int, generator: torch.Generator) -> Float[Tensor, "count 1"]:
    # A distribution of torch takes no generator; this one draws in double precision on the CPU.
    alpha = torch.full((count, 1), shape, dtype=torch.float64)
    return torch._standard_gamma(alpha, generator=generator) / rate  # pyright: ignore[reportPrivateImportUsage]


def _quantiles(
    inverse: Callable[..., Any], parameter: Any, count: int, width: int, generator: torch.Generator
) -> Float[Tensor, "count width"]:
    """Draws that follow the parameter, and leave those of other kernels as they are: by the inverse of their CDF."""
    uniform = torch.rand(count, width, generator=generator, dtype=torch.float64)
    return torch.as_tensor(inverse(parameter, uniform.numpy()), dtype=torch.float64)


def _poisson(rate: Any, uniform: Any) -> Any:
    return scipy.stats.poisson.ppf(uniform, rate)


def _lengthscale(kernel: Any) -> Tensor:
    return kernel.lengthscale.detach().double().cpu()[0]


def _rbf(kernel: Any, count: int, width: int, generator: torch.Generator) -> Tensor:
    return _normal(count, width, generator=generator) / _lengthscale(kernel)


def _matern(kernel: Any, count: int, width: int, generator: torch.Generator) -> Tensor:
    # A multivariate t distribution: one χ²/2ν a frequency. With one a dimension it would be another kernel.
    precision = _gamma(kernel.nu, kernel.nu, count, generator)
    return _rbf(kernel, count, width, generator) / precision.sqrt()


def _rational_quadratic(kernel: Any, count: int, width: int, generator: torch.Generator) -> Tensor:
    alpha = float(kernel.alpha)
    gamma = _quantiles(scipy.special.gammaincinv, alpha, count, 1, generator) / alpha
    return _rbf(kernel, count, width, generator) * gamma.sqrt()


def _periodic(kernel: Any, count: int, width: int, generator: torch.Generator) -> Tensor:
    # `exp(κ(cos θ − 1)) = Σ_j e^{-κ} I_j(κ) cos jθ`: the weights are those of a difference of two Poisson numbers.
    rate = (0.5 / _lengthscale(kernel)).expand(width).numpy()
    first, second = (_quantiles(_poisson, rate, count, width, generator) for _ in range(2))
    return (first - second) * 2 * math.pi / kernel.period_length.detach().double().cpu()[0]


SPECTRAL: dict[Any, Callable[[Any, int, int, torch.Generator], Tensor]] = {
    kernels.RBFKernel: _rbf,
    kernels.MaternKernel: _matern,
    kernels.RQKernel: _rational_quadratic,
    kernels.PeriodicKernel: _periodic,
}

# Hashes ---------------------------------------------------------------------------------------------------------------


def _hashes(columns: Tensor, count: int, generator: torch.Generator) -> Features:
    r"""Signs `h_j`, `[n, M]`, equal for two inputs with probability `k`: consistent weighted sampling (Ioffe, 2010).

    For each hash and column `r, c ~ Γ(2, 1)` and `β ~ U(0, 1)`: `t = ⌊log x/r + β⌋`, `a = c exp(−r(t − β + 1))`; the
    hash is the column of least `a` with its `t`.
    """
    width = len(columns)
    r, c = (_gamma(2.0, 1.0, count * width, generator).reshape(width, count) for _ in range(2))
    beta = torch.rand(width, count, generator=generator, dtype=torch.float64)
    # Also for an input of zeros only, which has no column.
    signs = 2.0 * torch.randint(2, (width + 1, count, _HASH_VALUES), generator=generator, dtype=torch.int8) - 1

    def of_row(row: Tensor) -> Tensor:
        (active,) = row.nonzero(as_tuple=True)
        if not len(active):
            return signs[width, :, 0]
        t = (row[active, None].log() / r[active] + beta[active]).floor()
        least = (c[active].log() - r[active] * (t - beta[active] + 1)).argmin(0)
        value = t.gather(0, least[None])[0].long() % _HASH_VALUES
        return signs[active[least], torch.arange(count), value]

    def features(x: Tensor) -> Tensor:
        # A datum at a time: its zeros, most of a fingerprint, cost nothing.
        rows = x.detach()[:, columns].double().cpu()
        return torch.stack([of_row(row) for row in rows]).to(x)

    return features


# Draws ----------------------------------------------------------------------------------------------------------------


def _draw(term: Term, num_columns: int, num_draws: int, num_groups: int, generator: torch.Generator) -> Functions:
    """`K` functions of a term, `[K, n]`, or one of them."""
    root = math.sqrt(term.variance)
    if term.tangent is not None:
        kernel, columns = term.tangent
        network = kernel.network
        spread = (kernel.variance / kernel.prior_precision.detach()).sqrt().cpu() * root
        weights = _normal(num_draws, network.num_parameters, generator=generator) * spread
        weights = weights.to(network.device, network.dtype)

        def tangent(x: Tensor, only: int | None) -> Tensor:
            inputs = shape_inputs(network, x[:, columns], kernel.input_shape)
            some = weights if only is None else weights[only : only + 1]
            return network.jvp(inputs, some, graph=torch.is_grad_enabled() and x.requires_grad)[..., 0].to(x)

        return tangent
    zero = torch.zeros(1, num_columns, dtype=torch.float64)
    width = math.prod(finite(zero).shape[1] for finite in term.finite)
    groups: tuple[Tensor | None, ...] = (None,)
    count, halves = term.signs[0](zero).shape[1] if term.signs else 1, 1
    if term.frequencies is not None:
        groups, halves = term.frequencies.chunk(num_groups), 2
        count = len(cast(Tensor, groups[0]))
    white = _normal(halves * count, width, num_draws, generator=generator) * (root / math.sqrt(count))

    def function(x: Tensor, only: int | None) -> Tensor:
        psi, signs = (torch.ones(len(x), 1, dtype=x.dtype, device=x.device) for _ in range(2))
        for finite in term.finite:
            psi = (psi[:, :, None] * finite(x)[:, None, :]).flatten(1)
        for some in term.signs:
            signs = signs * some(x)
        parts, numbers = [], torch.arange(num_draws).tensor_split(len(groups))
        for frequencies, own in zip(groups, numbers, strict=True):
            if only is not None:
                own = own[own == only]
            if not len(own):
                continue
            coefficients, waves = white[:, :, own].to(x), signs
            if frequencies is not None:
                angles = x @ frequencies.to(x).T
                waves = torch.cat([signs * angles.cos(), signs * angles.sin()], dim=1)
            draws = (waves @ coefficients.flatten(1)).reshape(len(x), *coefficients.shape[1:])
            parts.append((psi[:, :, None] * draws).sum(1).T)
        return torch.cat(parts)

    together = max(1, NUMBERS_TOGETHER // (halves * count + width * num_draws))
    return lambda x, only: torch.cat([function(part, only) for part in x.split(together)], dim=1)
