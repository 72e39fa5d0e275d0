r"""Lengthscales and variances of filters by the exact evidence of a regression.

Of the rows `J` of the Jacobian of `c` targets, those of block `k` are `J_k`. With `D_m`, which is one where two taps of
a filter have the distance `r_m` and else zero (thesis eq. 7.7)

    K_yy = Σ_k a_k⁻¹ Σ_m exp(−r_m/ψ_k) G_km,     G_km = J_k D_m J_kᵀ,     log p(y) = log N(y − o; 0, K_yy + R/b)

so that the network is not needed for other `a` and `ψ`. With the differences `δ` of the Jacobian rows of neighbouring
pixels, the expected total variation of images that are drawn from block `k` is (thesis eq. 7.8, in closed form)

    κ_k = √(2/π) Σ_pairs √(a_k⁻¹ Σ_m exp(−r_m/ψ_k) V_km),                        V_km = δᵀ D_m δ
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.hyperparameters.em import noise_update
from laplace_sampling.hyperparameters.hyperparameters import Bounds, Hyperparameters, clamped, in_one_step
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.features import DenseFeatures, NetworkFeatures
from laplace_sampling.linear_model.linear_model import LinearModel, TangentModel
from laplace_sampling.linear_model.priors.filterwise import FilterwisePrior
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.filters import OTHERS, FilterNetwork

# Rows of `K_yy` at most, of which there are seven matrices for each block of 3×3 filters: at 3,000 half a gigabyte.
MOST_ROWS = 3000

# Lengthscales in taps: below the first one neighbours are independent, above the second one all taps are equal.
_LENGTHSCALES = (1e-2, 1e2)

# A gradient in the logarithms below which the evidence is flat: a factor of e changes it by a hundredth.
_FLAT = 1e-2

# Rounds of a noise that is learnt, and the change of its logarithm that ends them.
_ROUNDS, _SETTLED = 50, 1e-3


@dataclass(frozen=True)
class ByDistance:
    """Quadratic forms of each block and distance of taps, `Q_km`, and their sums over both.

    Attributes:
        forms: `Q_km`, `[M, ...]`.
        blocks: number of the block of each, `[M]`.
        distances: `r_m` of each, `[M]`.
    """

    forms: Float[Tensor, "M *n"]
    blocks: Tensor
    distances: Float[Tensor, " M"]

    @classmethod
    def of(
        cls, rows: Float[Tensor, "n P"], network: FilterNetwork, product: Callable[[Tensor, Tensor], Tensor]
    ) -> Self:
        """The forms `product(J_k D_m, J_k)`.

        Args:
            rows: `J`, in the coordinates of the weights.
            network: knows the filters.
            product: of two matrices `[n, p]`, a sum over columns.
        """
        names, groups = network.layers()
        found: dict[tuple[int, int], Tensor] = {}

        def add(block: int, square: int, form: Tensor) -> None:
            found[block, square] = found[block, square] + form if (block, square) in found else form

        for of in network.filters:
            taps, squares = of.taps(rows), of.squared_distances()
            for square in squares.unique().tolist():
                chosen = (taps @ (squares == square).to(taps)).flatten(1)
                add(names.index(of.block), square, product(chosen, taps.flatten(1)))
        if OTHERS in names:
            others = rows[:, (groups == names.index(OTHERS)).to(rows.device)]
            add(names.index(OTHERS), 0, product(others, others))
        blocks, squares = torch.tensor(list(found)).T
        forms = torch.stack(list(found.values()))
        return cls(forms, blocks.to(rows.device), squares.to(rows.device).double().sqrt())

    def weights(self, precisions: Float[Tensor, " G"], lengthscales: Float[Tensor, " G"]) -> Float[Tensor, " M"]:
        """`a_k⁻¹ exp(−r_m/ψ_k)`."""
        return (-self.distances / lengthscales[self.blocks]).exp() / precisions[self.blocks]

    def total(self, precisions: Float[Tensor, " G"], lengthscales: Float[Tensor, " G"]) -> Float[Tensor, "*n"]:
        """`Σ_k a_k⁻¹ Σ_m exp(−r_m/ψ_k) Q_km`."""
        return torch.tensordot(self.weights(precisions, lengthscales), self.forms, 1)

    def of_blocks(self, precisions: Float[Tensor, " G"], lengthscales: Float[Tensor, " G"]) -> Float[Tensor, "G n"]:
        """The sums over distances alone."""
        weighted = self.weights(precisions, lengthscales)[:, None] * self.forms
        return weighted.new_zeros(len(precisions), weighted.shape[1]).index_add(0, self.blocks, weighted)


def total_variation(
    pairs: ByDistance, precisions: Float[Tensor, " G"], lengthscales: Float[Tensor, " G"]
) -> Float[Tensor, " G"]:
    """`κ_k`: the mean of the sum of absolute differences of neighbours, which are Gaussian."""
    # The root has no derivative at zero, where all pairs are constant.
    variances = pairs.of_blocks(precisions, lengthscales).clamp_min(torch.finfo(torch.float64).tiny)
    return math.sqrt(2 / math.pi) * variances.sqrt().sum(1)


@dataclass
class FilterEvidence:
    """`log p(y)` as a function of `log a` and `log ψ`, with the penalty of the total variation if it is asked for.

    Attributes:
        gram: `G_km` of the targets.
        residuals: `y − o`.
        noise: `1/b`, `[c]`.
        pairs: `V_km`, for a penalty.
        penalty: `λ`.
    """

    gram: ByDistance
    residuals: Float[Tensor, " c"]
    noise: Float[Tensor, " c"]
    pairs: ByDistance | None = None
    penalty: float = 0.0
    names: Sequence[str] = field(default_factory=list)

    def _factor(self, precisions: Tensor, lengthscales: Tensor) -> tuple[Tensor, Tensor]:
        """`K`, and a Cholesky factor of `K + R/b` as rounding has it."""
        K = self.gram.total(precisions, lengthscales)
        rounding = torch.finfo(K.dtype).eps * K.detach().trace()
        return K, torch.linalg.cholesky(K + (self.noise + rounding).diag())

    def log_evidence(self, precisions: Float[Tensor, " G"], lengthscales: Float[Tensor, " G"]) -> Tensor:
        """`log p(y)`."""
        _, L = self._factor(precisions, lengthscales)
        white = torch.linalg.solve_triangular(L, self.residuals[:, None], upper=False)
        constant = 0.5 * len(self.residuals) * math.log(2 * math.pi)
        return -0.5 * white.square().sum() - L.diagonal().log().sum() - constant

    def log_penalty(self, precisions: Float[Tensor, " G"], lengthscales: Float[Tensor, " G"]) -> Tensor:
        """`Σ_k −λκ_k + log(λ |∂κ_k/∂ψ_k|)` over blocks of filters (TV-PredCP, thesis eq. 7.9–7.10)."""
        if self.pairs is None:
            return precisions.new_zeros(())
        filters = [k for k, name in enumerate(self.names) if name != OTHERS]
        kappa = total_variation(self.pairs, precisions, lengthscales)
        # `κ_k` depends on `ψ_k` alone.
        (slopes,) = torch.autograd.grad(kappa.sum(), lengthscales, create_graph=True)
        slopes = slopes.abs().clamp_min(torch.finfo(torch.float64).tiny)
        return ((self.penalty * slopes).log() - self.penalty * kappa)[filters].sum()

    def __call__(self, logs: Float[Tensor, "2 G"]) -> Tensor:
        """The objective at `log a` and `log ψ`."""
        precisions, lengthscales = logs.exp()
        return self.log_evidence(precisions, lengthscales) + self.log_penalty(precisions, lengthscales)

    def at_mode(self, precisions: Float[Tensor, " G"], lengthscales: Float[Tensor, " G"]) -> tuple[float, float, float]:
        """`γ`, `‖θ̄‖²_A` and the loss at the mode."""
        K, L = self._factor(precisions, lengthscales)
        solved = torch.cholesky_solve(self.residuals[:, None], L)[:, 0]
        gamma = len(K) - float((self.noise * torch.cholesky_inverse(L).diagonal()).sum())
        losses = self.noise * solved.square() + (2 * math.pi * self.noise).log()
        return gamma, float(solved @ K @ solved), 0.5 * float(losses.sum())

    def largest(self, logs: Float[Tensor, "2 G"], bounds: Bounds) -> tuple[Float[Tensor, "2 G"], bool]:
        """Where the objective is largest near a start, by L-BFGS in float64, and whether it is flat there."""
        from scipy.optimize import minimize  # slow to import

        def negative(x: "object") -> "tuple[float, object]":
            at = torch.as_tensor(x, device=self.residuals.device).reshape(2, -1).requires_grad_()
            value = -self(at)
            (gradient,) = torch.autograd.grad(value, at)
            return float(value.detach()), gradient.flatten().cpu().numpy()

        limits = [tuple(map(math.log, ends)) for ends in (bounds, _LENGTHSCALES) for _ in range(logs.shape[1])]
        found = minimize(
            negative,
            logs.flatten().cpu().numpy(),
            jac=True,
            method="L-BFGS-B",
            bounds=limits,
            options={"maxiter": 2000, "maxfun": 5000, "ftol": 1e-13, "gtol": 1e-5},
        )
        # A line search that rounding ends says that it failed. At a bound only the gradient into the inside counts.
        low, high = torch.tensor(limits, dtype=torch.float64).T
        x, slope = torch.as_tensor(found.x), torch.as_tensor(found.jac)
        inwards = torch.where(x <= low, slope.clamp_max(0), torch.where(x >= high, slope.clamp_min(0), slope))
        return x.reshape(2, -1).to(logs), bool(inwards.abs().max() < _FLAT)


@dataclass(frozen=True)
class FoundFilters:
    """What the evidence finds of the blocks.

    Attributes:
        prior: with `a` and `ψ` of each block.
        likelihood: with its noise precision.
        effective_dimension: `γ`.
        mode_norm: `‖θ̄‖²_A`.
        loss: at the mode.
        converged: whether the search ended at a maximum.
        started: when it began, by `time.perf_counter`.
    """

    prior: FilterwisePrior
    likelihood: Gaussian
    effective_dimension: float
    mode_norm: float
    loss: float
    converged: bool
    started: float

    def hyperparameters(self, model: LinearModel, prior: GaussianPrior) -> Hyperparameters:
        """The hyperparameters of a fit, for its linear model and the prior that was built."""
        problem = (
            "`fit_hyperparameters` found no maximum of the evidence of lengthscales and variances: give other starting "
            "values in `FilterwisePrior`, or fix the noise."
        )
        return in_one_step(
            model,
            prior,
            self.prior.precision,
            self.likelihood,
            effective_dimension=self.effective_dimension,
            mode_norm=self.mode_norm,
            loss=self.loss,
            passes=float(model.features.num_outputs),
            problems=[] if self.converged else [problem],
            # With a penalty it is no maximum of the evidence, and is not to be verified as one.
            criterion="evidence" if self.prior.total_variation is None else "total variation",
        )


def find_filters(
    tangent: TangentModel, prior: FilterwisePrior, precision_bounds: Bounds, noise_bounds: Bounds
) -> FoundFilters:
    """Variances and lengthscales of largest evidence, and of a noise that is learnt MacKay's fixed point.

    Args:
        tangent: the linear model, with a network in its own coordinates.
        prior: with the values to start from.
        precision_bounds: for `a_k`.
        noise_bounds: for the noise.

    Raises:
        ValueError: for `total_variation` and outputs that are no images.
    """
    started, network, model = time.perf_counter(), tangent.network, tangent.in_float64()
    assert isinstance(network, FilterNetwork)
    likelihood = model.likelihood
    assert isinstance(likelihood, Gaussian)
    names, device = network.layers()[0], model.features.device
    given = model.observed().flatten()
    rows = DenseFeatures.of(model.features).matrix.flatten(0, 1)[given]
    evidence = FilterEvidence(
        ByDistance.of(rows, network, lambda left, right: left @ right.mT),
        model.residuals(model.offset).flatten()[given],
        torch.zeros(len(rows), dtype=torch.float64, device=device),
        None if prior.total_variation is None else pairs_of(tangent, network),
        prior.total_variation or 0.0,
        names,
    )
    del rows
    starts = [prior.precision * prior.precisions.get(name, 1.0) for name in names]
    lengthscales = [prior.lengthscales.get(name, prior.lengthscale) for name in names]
    logs = torch.tensor([starts, lengthscales], dtype=torch.float64, device=device).log()
    settled, rounds = False, 0
    while True:
        b = likelihood.noise_precisions().to(device, torch.float64)
        evidence.noise = (1 / b).expand(model.offset.shape).flatten()[given]
        logs, converged = evidence.largest(logs, precision_bounds)
        gamma, norm, loss = evidence.at_mode(*logs.exp())
        if settled or not likelihood.learn or rounds == _ROUNDS:
            break
        updated = clamped(float(noise_update(model, torch.tensor([gamma]))), noise_bounds)
        settled, rounds = abs(math.log(updated / float(b))) < _SETTLED, rounds + 1
        likelihood = likelihood.with_precision(updated)
    converged = converged and (settled or not likelihood.learn)
    precisions, lengthscales = (dict(zip(names, values, strict=True)) for values in logs.exp().tolist())
    lengthscales.pop(OTHERS, None)
    found = replace(prior, precision=1.0, precisions=precisions, lengthscales=lengthscales)
    return FoundFilters(found, likelihood, gamma, norm, loss, converged, started)


def pairs_of(tangent: TangentModel, network: FilterNetwork) -> ByDistance:
    """`V_km` of all pairs of neighbouring pixels of the images that the network gives for the training inputs.

    Raises:
        ValueError: for outputs that are no images.
    """
    if len(tangent.layout.shape) < 2:
        raise ValueError(
            "`FilterwisePrior(total_variation=...)` needs a network whose outputs are images [..., H, W], but those of "
            f"a datum have shape {list(tangent.layout.shape)}: leave it out."
        )
    features = NetworkFeatures(network, tangent.data, tangent.layout).in_float64()
    images = DenseFeatures.of(features).matrix.reshape(-1, *tangent.layout.shape[-2:], network.num_parameters)
    pairs = [images.diff(dim=axis).flatten(0, 2) for axis in (1, 2)]
    return ByDistance.of(torch.cat(pairs), network, lambda left, right: (left * right).sum(1))
