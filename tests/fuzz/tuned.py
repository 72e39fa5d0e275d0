"""Hyperparameters that were fitted, compared with the evidence by dense algebra.

With a Gaussian likelihood the evidence is a formula in `α` and `b`. With others the library defines `α` by MacKay's
fixed point `γ(α) = α‖θ̄(α)‖²`; the difference of both sides, halved, is what the derivative of the evidence in `log α`
is at a fixed curvature. Its integral takes the place of the evidence here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from fuzz.dense import Dense, Whitened, curvature
from fuzz.random_problems import Problem
from scipy.interpolate import CubicSpline
from scipy.optimize import minimize
from torch import Tensor

from laplace_sampling import LinearisedLaplace

# By how much the logarithm of the evidence may be below its maximum. Hyperparameters are claimed to 3 % of `α`, which
# is much less where the data determine them; a step of EM is below its tolerance also where the evidence is flat.
_NATS = 1.0
# Relative distance of `b` from its own update.
_NOISE = 0.2
_BOUNDS = {"precision": (1e-8, 1e12), "noise": (1e-12, 1e12)}
_FACTORED = ("kfac", "diagonal")

Defect = tuple[str, str]


def tuning_defects(case: Problem, la: LinearisedLaplace) -> list[Defect]:
    """What is wrong with hyperparameters that were fitted, beside predictions."""
    example, alpha = case.example, la.prior_precision_.double()
    noise = la.noise_precision_
    found = [("precision", value) for value in alpha.tolist()]
    if noise is not None and example.noise != "given":
        found += [("noise", value) for value in noise.double().reshape(-1).tolist()]
    if not all(math.isfinite(value) and value > 0 for _, value in found):
        return [("hyperparameters are not finite", f"{found}")]
    if not la.converged_:
        return []
    for name, value in found:
        if any(abs(math.log(value / bound)) < 0.01 for bound in _BOUNDS[name]):
            return [("a hyperparameter at a bound counts as converged", f"{name} {value:.10g}")]
    if len(alpha) > 1 or example.method in _FACTORED:
        return []
    dense = dense_at(case, la)
    if noise is None:
        return _fixed_point_defects(dense, float(alpha))
    return _regression_defects(case, dense, float(alpha), noise.double())


def dense_at(case: Problem, la: LinearisedLaplace) -> Dense:
    """The linear model at the hyperparameters of a fit; that of a layer-wise prior at an overall `α` of one."""
    noise, dense = la.noise_precision_, with_factored_scale(case, la)
    if noise is not None:
        dense = replace(dense, loss=case.loss(noise.double()))
    alpha = la.prior_precision_.double()
    if len(alpha) > 1:
        dense = replace(dense, scale=alpha[la._require("groups").posterior.prior.groups].rsqrt())
    return dense


def with_factored_scale(case: Problem, la: LinearisedLaplace) -> Dense:
    """The linear model with the g-prior of a last layer in closed form: a factor of outputs times one of inputs."""
    if case.example.prior == "g-prior" and "→ 'last_layer'" in repr(la):
        return replace(case.dense, scale=la.prior_scale_.double())
    return case.dense


@dataclass
class _Evidence:
    """`log p(y)` of a regression, from the eigenvalues of its kernel `JJᵀ`."""

    values: Tensor
    squares: Tensor

    @classmethod
    def of(cls, dense: Dense, y: Tensor, variances: Tensor) -> "_Evidence":
        """`variances` are those of the noise at `b = 1`, `[N, C]`."""
        root = variances.rsqrt()
        J = (dense.J * dense.scale * root[..., None]).flatten(0, 1)
        # Squares of singular values: zeros of the kernel, at rounding, would pass for variance beside a tiny noise.
        vectors, singular, _ = torch.linalg.svd(J)
        values = torch.zeros(len(J), dtype=J.dtype)
        values[: len(singular)] = singular.square()
        residual = ((y.reshape(root.shape).double() - dense.offset) * root).flatten()
        return cls(values, (vectors.mT @ residual).square())

    def __call__(self, log_alpha: Tensor | float, log_noise: Tensor | float) -> Tensor:
        alpha, noise = torch.as_tensor(log_alpha).exp()[..., None], torch.as_tensor(log_noise).exp()[..., None]
        v = self.values / alpha + 1 / noise
        return -0.5 * (v.log() + self.squares / v).sum(-1)

    def gamma(self, alpha: float, noise: float) -> float:
        return float((self.values / alpha / (self.values / alpha + 1 / noise)).sum())


def _regression_defects(case: Problem, dense: Dense, alpha: float, noise: Tensor) -> list[Defect]:
    """`α` is of largest evidence at the noise that is, and a learnt noise is that of the network's residuals."""
    example, b = case.example, float(noise.log().mean().exp())
    variances = case.noise_variances[:, None] * (b / noise).expand(dense.network.shape)
    evidence = _Evidence.of(dense, case.y, variances)
    here = float(evidence(math.log(alpha), math.log(b)))
    alphas = _grid("precision")
    defects = []
    highest = float(evidence(alphas, math.log(b)).max())
    near = _uphill(lambda log_alpha: evidence(log_alpha, math.log(b)), math.log(alpha))
    defects += _below("the evidence", near, highest, here, f"α={alpha:.3g}, b={b:.3g}")
    if example.noise == "network" and noise.numel() == 1:
        squares = float(((case.y.reshape(variances.shape) - dense.network).square() / variances).sum())
        gamma = evidence.gamma(alpha, b)
        update = (len(evidence.values) - gamma) / squares
        # EM knows `γ` from 16 samples.
        by_chance = 4 * math.sqrt(2 * gamma / 16) / (len(evidence.values) - gamma)
        if abs(math.log(update / b)) > _NOISE + (0 if example.method in ("exact", "auto") else by_chance):
            defects.append(("the noise precision is not at its update", f"b={b:.3g}, update {update:.3g}"))
    return defects


def _grid(name: str) -> Tensor:
    low, high = map(math.log, _BOUNDS[name])
    return torch.linspace(low, high, 231, dtype=torch.float64)


def _below(what: str, near: float, highest: float, here: float, at: str) -> list[Defect]:
    if near - here > _NATS:
        return [(f"fitted hyperparameters are not at a maximum of {what}", f"{at}, {near - here:.3g} nats below one")]
    if highest - here > _NATS:
        return [(f"another maximum of {what} is higher", f"{at}, {highest - here:.3g} nats below it")]
    return []


def _uphill(evidence: Callable[[Tensor], Tensor], start: float) -> float:
    """The next maximum within the bounds."""

    def negative(at: np.ndarray) -> tuple[float, np.ndarray]:
        point = torch.tensor(at[0], dtype=torch.float64, requires_grad=True)
        value = -evidence(point)
        return float(value), torch.autograd.grad(value, point)[0].numpy()[None]

    limits = [tuple(map(math.log, _BOUNDS["precision"]))]
    return -float(minimize(negative, np.array([start]), jac=True, bounds=limits, method="L-BFGS-B").fun)


def _fixed_point_defects(dense: Dense, alpha: float) -> list[Defect]:
    """By the integral of `½(γ − α‖θ̄‖²)` in `log α`, from `10⁸` down to where the mode is known."""
    logs = np.linspace(8, -8, 41) * math.log(10)
    slopes: list[float] = []
    u = None
    for number, log_alpha in enumerate(logs):
        start = None if u is None else u * math.exp((log_alpha - logs[number - 1]) / 2)
        u, _, known = dense.mode(math.exp(log_alpha), start, steps=40)
        if not known:
            break
        B = curvature(dense.loss, dense.network)
        gamma = Whitened.of(B, dense.features(dense.J, math.exp(log_alpha))).gamma
        slopes.append(0.5 * (gamma - float(u @ u)))
    logs = logs[: len(slopes)][::-1]
    if len(logs) < 4 or not logs[0] < math.log(alpha) < logs[-1]:
        return []
    evidence = CubicSpline(logs, slopes[::-1]).antiderivative()
    fine = np.linspace(logs[0], logs[-1], 2001)
    values, here = evidence(fine), float(evidence(math.log(alpha)))
    index = int(np.abs(fine - math.log(alpha)).argmin())
    step = 1 if values[min(index + 1, 2000)] > values[max(index - 1, 0)] else -1
    while 0 <= index + step <= 2000 and values[index + step] > values[index]:
        index += step
    near = f"α={alpha:.3g}, maximum at {math.exp(fine[index]):.3g}, highest at {math.exp(fine[values.argmax()]):.3g}"
    return _below("the fixed-point integral", float(values[index]), float(values.max()), here, near)
