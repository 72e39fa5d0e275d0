r"""Where to measure next: a choice of measurements, or of training inputs, by the posterior covariance.

A candidate is a block `β` of numbers that could be observed together, with the rows `φ_β` and noise of precision `b`:
`T_β f(z)` for a few rows of an operator, or the outputs at one input. Its covariance `C_β = φ_β H⁻¹ φ_βᵀ` depends on
what was measured before and not on the values that were found, so that nothing is trained and no targets are needed.

    eig         ½ log|I + b C_β|, the expected information gain in nats (thesis eq. 7.15, with the ½)
    ese         Tr C_β, the expected squared error of the block (thesis eq. 7.16)
    variance    ‖C_tβ (C_β + I/b)^{-½}‖²_F, by how much the variances of targets `t` fall together; BoTorch's integrated
                posterior variance (Seo et al. 2000)

After a choice all covariances are those of the posterior with this block. With `R` the rows of the block in the
covariance `C` of everything, `C ← C − Rᵀ(C_β + I/b)⁻¹R`, and samples become `Y − Rᵀ(C_β + I/b)⁻¹(ε + Y_β)`, which is
Matheron's rule. Hyperparameters stay.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from laplace_sampling.arguments import check_whole
from laplace_sampling.checkpoint import FilePath
from laplace_sampling.data.batches import concatenate, num_rows
from laplace_sampling.gp.dual import DualCG
from laplace_sampling.laplace import LinearisedLaplace
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.measurement import Measurement, as_measurement
from laplace_sampling.linear_model.draws import Draws, Stream
from laplace_sampling.linear_model.features import Features, ObservedFeatures, features_at
from laplace_sampling.methods.method import Fit
from laplace_sampling.networks.memory import free_memory
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import checked_inputs, covariance_of
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.solvers.krylov import CG
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER
from laplace_sampling.solvers.solver import Quadratic

CRITERIA = ("eig", "ese", "variance")
# Samples where covariances do not fit: scores of 32² and 64² images by 1,000 of them had the order of exact ones.
_SAMPLES = 1000
# Accuracy of the rows of a block, relative to the function: far below the noise `1/√(2K)` of the samples.
_SOLVE = 1e-3


@dataclass(frozen=True)
class Design:
    """Candidates that were chosen one after the other.

    Attributes:
        chosen: their indices, in the order of the choice.
        gains: what the criterion gave each of them when it was chosen.
    """

    chosen: list[int]
    gains: list[float]


@solver_call
def greedy(
    la: LinearisedLaplace,
    candidates: Any,
    num: int,
    criterion: str = "eig",
    *,
    targets: Any = None,
    num_samples: int | None = None,
    file: FilePath | None = None,
) -> Design:
    r"""Choose `num` candidates, each the best one given those before it.

    `la` is not changed. To measure in batches of `q`, take `num=q`, measure, and fit again. A candidate is chosen once.
    `"eig"` and `"variance"` have diminishing returns, and a greedy choice by `"eig"` has at least `1 − 1/e` of the
    largest information gain.

    Args:
        la: a fitted regression.
        candidates: after a fit of measurements of one input, `Gaussian(observe=T)`, a list of operators for the same
            input, each of them in a form that `observe` takes. Else inputs of the network, as for `predict`: the
            outputs of each of them are a block.
        num: how many to choose.
        criterion: `"eig"`, `"ese"` or `"variance"` (`laplace_sampling.design`).
        targets: what `"variance"` is to know better, after a fit of measurements an operator such as `torch.eye(dx)`,
            else inputs.
        num_samples: take covariances from so many new posterior samples, `"eig"` and `"ese"` with a relative error of
            about `√(2/K)`. By default they are exact where the posterior has a closed form and memory holds the
            covariance of all candidates, and of 1,000 samples elsewhere. A block that is chosen takes a VJP and a JVP
            for each of its numbers, and unless there is a closed form a solve.
        file: a file of JSON lines, to which each choice is appended. The same call with a file that exists goes on
            after the choices in it. The scores of all candidates before any choice are in it, and tell another
            posterior, other candidates or other targets.

    Raises:
        NotFittedError: before a fit, or if samples or measurements need training data that a file did not hold.
        TypeError, ValueError: if the likelihood is no Gaussian regression; for candidates and targets that do not fit
            it; for an unknown criterion, `"variance"` without targets, and targets without it; for a `num` above the
            number of candidates; for a file of another call.
    """
    check_whole("`greedy(num)`", num, 1)
    state = _state("greedy", la, candidates, criterion, targets, num_samples)
    if num > len(state.sizes):
        raise ValueError(f"`greedy(num={num})`: there are {len(state.sizes)} candidates to choose from.")
    alone = state.scores(criterion)
    asked = {"criterion": criterion, "samples": state.num_samples, "scores": alone.tolist()}
    steps, chosen, gains = _begun(file, asked)[:num], [], []
    while len(chosen) < num:
        if chosen:
            state.condition(chosen[-1])
        if len(chosen) < len(steps):
            best, gain = steps[len(chosen)]["chosen"], steps[len(chosen)]["gain"]
        else:
            of_all = state.scores(criterion) if chosen else alone
            scores = of_all.index_fill(0, torch.tensor(chosen, dtype=torch.long), -torch.inf)
            best = int(scores.argmax())
            gain = float(scores[best])
            _append(file, {"chosen": best, "gain": gain})
        chosen.append(best)
        gains.append(gain)
    return Design(chosen, gains)


@solver_call
def scores(
    la: LinearisedLaplace,
    candidates: Any,
    criterion: str = "eig",
    *,
    targets: Any = None,
    num_samples: int | None = None,
) -> Float[Tensor, " n"]:
    """What each candidate alone would add, in float64 on the CPU.

    Arguments and errors are those of `greedy`.
    """
    return _state("scores", la, candidates, criterion, targets, num_samples).scores(criterion)


class _State(ABC):
    """Covariances of candidates and targets, given the blocks that were chosen.

    Rows of candidates come first, then those of targets. In units of the noise, rows of candidates times `√b`, `C_β` is
    `√b C_β √b` and `C_β + 1/b` becomes `C_β + I`.

    Args:
        sizes: numbers of each candidate.
        noise: `b` of each row of the candidates.
    """

    num_samples: int | None = None

    def __init__(self, sizes: Sequence[int], noise: Float[Tensor, " R"]) -> None:
        self.sizes, self.noise, most = list(sizes), noise, max(sizes)
        ends, place = torch.tensor(self.sizes).cumsum(0), torch.arange(most)
        self.places = (ends - torch.tensor(self.sizes))[:, None] + place
        # The last row is zero, so that blocks are of one size.
        self.places[place >= torch.tensor(self.sizes)[:, None]] = -1

    @property
    def targets(self) -> slice:
        return slice(len(self.noise), -1)

    @abstractmethod
    def covariance(self, rows: Tensor) -> Float[Tensor, "k d d"]:
        """`C_β` of some blocks, from the places of their rows."""

    @abstractmethod
    def explained(self, rows: Tensor, factor: Float[Tensor, "k d d"]) -> Float[Tensor, " k"]:
        """`‖C_tβ L^{-ᵀ}‖²` of some blocks, with `C_β + I = LLᵀ`."""

    @abstractmethod
    def condition(self, number: int) -> None:
        """The posterior with a block."""

    def scores(self, criterion: str) -> Float[Tensor, " n"]:
        found, d = [], self.places.shape[1]
        width = self.num_samples or len(self.noise)
        for rows in self.places.split(max(1, NUMBERS_TOGETHER // (d * max(d, width)))):
            C = self.covariance(rows)
            variances = C.diagonal(dim1=1, dim2=2)
            if criterion == "ese":
                found.append((variances / pad(self.noise, (0, 1), value=1.0)[rows]).sum(1))
                continue
            factor = torch.linalg.cholesky(C + torch.eye(d).to(C))
            gain = factor.diagonal(dim1=1, dim2=2).log().sum(1)
            found.append(gain if criterion == "eig" else self.explained(rows, factor))
        return torch.cat(found).cpu()

    def own(self, number: int) -> Tensor:
        """The places of the rows of a block."""
        return self.places[number, : self.sizes[number]]

    @staticmethod
    def whitened(rows: Float[Tensor, "d R"], own: Tensor) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d R"]]:
        """`L` and `L⁻¹R` of the rows of a block."""
        C = rows[:, own]
        factor = torch.linalg.cholesky((C + C.T) / 2 + torch.eye(len(own)).to(C))
        return factor, torch.linalg.solve_triangular(factor, rows, upper=False)


def _units(noise: Tensor, num: int) -> Float[Tensor, "R+t+1"]:
    """What rows are multiplied with: candidates with `√b`, targets with one, and a row of zeros at the end."""
    return torch.cat([noise.sqrt(), noise.new_ones(num - len(noise)), noise.new_zeros(1)])


class _Exact(_State):
    """The covariance of all rows, held in full."""

    def __init__(self, sizes: Sequence[int], noise: Tensor, covariance: Float[Tensor, "R R"]) -> None:
        super().__init__(sizes, noise)
        units = _units(noise, len(covariance))
        self.C = pad(covariance, (0, 1, 0, 1)).mul_(units).mul_(units[:, None])

    def covariance(self, rows: Tensor) -> Tensor:
        return self.C[rows[:, :, None], rows[:, None]]

    def explained(self, rows: Tensor, factor: Tensor) -> Tensor:
        cross = self.C[:, self.targets][rows]
        return torch.linalg.solve_triangular(factor, cross, upper=False).square().sum((1, 2))

    def condition(self, number: int) -> None:
        own = self.own(number)
        _, white = self.whitened(self.C[own], own)
        self.C.addmm_(white.T, white, alpha=-1)


class _Sampled(_State):
    """Samples of all rows; the rows of blocks that are chosen by products with the network.

    Args:
        sizes: as before.
        noise: as before.
        samples: `Y`.
        rows: computes rows of the covariance before the choice.
        seed: of the noise.
    """

    def __init__(
        self, sizes: Sequence[int], noise: Tensor, samples: Float[Tensor, "K R"], rows: "_Rows", seed: int
    ) -> None:
        super().__init__(sizes, noise)
        self.units, self.rows, self.seed, self.num_samples = _units(noise, samples.shape[1]), rows, seed, len(samples)
        self.Y = pad(samples, (0, 1)).mul_(self.units)
        # `L⁻¹R` of the blocks that were chosen: the covariance is that before any choice minus its square.
        self.white = self.Y[:0]

    def covariance(self, rows: Tensor) -> Tensor:
        Y = self.Y[:, rows].transpose(0, 1)
        return Y.mT @ Y / len(self.Y)

    def explained(self, rows: Tensor, factor: Tensor) -> Tensor:
        at_targets = self.Y[:, self.targets]
        Y = torch.linalg.solve_triangular(factor, self.Y[:, rows].permute(1, 2, 0), upper=False)
        # Products of a sample with itself would add the noise of the samples, `Tr C_t Tr C_β/K`.
        with_itself = Y.square().sum(1) @ at_targets.square().sum(1)
        K = len(self.Y)
        return ((Y @ at_targets).square().sum((1, 2)) - with_itself) / (K * (K - 1))

    def condition(self, number: int) -> None:
        own = self.own(number)
        rows = pad(self.rows(number, own).to(self.Y), (0, 1)) * self.units * self.units[own][:, None]
        factor, white = self.whitened(rows - self.white[:, own].T @ self.white, own)
        noise = Draws(len(self.Y), self.seed, Stream.DESIGN_NOISE).noise(len(own))(torch.tensor([number]))[:, 0]
        innovation = (noise.to(self.Y) + self.Y[:, own]).T
        self.Y -= torch.linalg.solve_triangular(factor, innovation, upper=False).T @ white
        self.white = torch.cat([self.white, white])


@dataclass(frozen=True)
class _Rows:
    """Rows `φ_β H⁻¹ φᵀ` of the covariance of all rows."""

    features: Features
    fit: Fit
    function: FunctionCovariance | None
    factor: float

    def __call__(self, number: int, own: Tensor) -> Float[Tensor, "d R"]:
        if self.features.num_data == 1:
            jacobian = self.features.rows_of(0, slice(int(own[0]), int(own[-1]) + 1))
        else:
            jacobian = self.features.rows(torch.tensor([number]))[0]
        weights = self._inverse(jacobian) if self.function is None else self.function.inverse(jacobian)
        return self.factor * self.features.outputs(weights.to(self.features.dtype)).flatten(1).double()

    def _inverse(self, v: Float[Tensor, "d P"]) -> Float[Tensor, "d P"]:
        """`H⁻¹ v` by a solve."""
        fit, prior = self.fit, self.fit.prior
        if isinstance(fit.solver, DualCG):
            return fit.solver.inverse(fit.ggn, prior, v)
        v = v.to(fit.ggn.dtype) * prior.scale
        problem = Quadratic(fit.task.scaled_ggn(), prior.spread(), torch.zeros_like(v), v)
        return CG(_SOLVE).solve(problem).value * prior.scale


def _state(
    call: str, la: LinearisedLaplace, candidates: Any, criterion: str, targets: Any, num_samples: int | None
) -> _State:
    """The state before any choice, after checks of the arguments."""
    if criterion not in CRITERIA:
        raise ValueError(f"`{call}(criterion={criterion!r})` is not known; use one of {', '.join(CRITERIA)}.")
    if (criterion == "variance") != (targets is not None):
        raise ValueError(
            f'`{call}(criterion="variance", targets=...)` chooses what lowers the variances of targets: give both, or '
            "neither."
        )
    if not isinstance(la, LinearisedLaplace):
        raise TypeError(f"`{call}(la)` needs a fitted `LinearisedLaplace`, but got a {type(la).__name__}.")
    if num_samples is not None:
        check_whole(f"`{call}(num_samples=...)`", num_samples, 2)
    fitted = la._require(call)
    la._check_network(call)
    posterior, calibration = fitted.posterior, fitted.posterior.calibration
    likelihood = calibration.likelihood(posterior.likelihood)
    if not isinstance(likelihood, Gaussian):
        raise ValueError(
            f"`{call}` needs a regression with Gaussian noise, whose covariances do not depend on the values that are "
            f"measured, but the likelihood is {likelihood.name!r}."
        )
    factor, noise = calibration.scale / calibration.temperature**2, likelihood.noise_precisions()
    if la.settings.observation is None:
        x, image = checked_inputs(candidates, call), None
        t = None if targets is None else checked_inputs(targets, call)
        if t is not None and not num_rows(t):
            raise ValueError(f"`{call}(targets)` needs inputs, but there are none.")
        both = x if t is None else concatenate([x, t])
        features: Features = features_at(la.network, both, posterior.rows)
        sizes = [features.num_outputs] * num_rows(x)
        noise = noise.repeat(num_rows(x)) if noise.dim() else noise
    else:
        features, image, sizes = _of_measurements(call, la, candidates, targets)
        if noise.dim():
            raise ValueError(f"`{call}` needs one noise precision for all measurements, but there are {len(noise)}.")
    noise = noise.to(features.device).expand(sum(sizes))
    joint = None if num_samples is not None else _joint(posterior, fitted.fit, features, image)
    if joint is not None:
        return _Exact(sizes, noise, factor * joint.to(noise))
    fit, _ = la._with_data(call)
    weights = fitted.new_samples(fit, la.settings, num_samples or _SAMPLES, Stream.DESIGN)
    Y = features.outputs(weights.to(features.dtype)).flatten(1).double()
    rows = _Rows(features, fit, covariance_of(posterior, fit, features), factor)
    return _Sampled(sizes, noise, factor**0.5 * Y, rows, la.settings.seed)


def _joint(
    posterior: Posterior, fit: Fit | None, features: Features, image: Features | None
) -> Float[Tensor, "R R"] | None:
    """The covariance of all rows where it has a closed form, and memory holds it three times."""
    if 24 * features.num_observations**2 > free_memory(features.device) / 2:
        return None
    if isinstance(features, ObservedFeatures) and image is not None and image.num_outputs < features.num_outputs:
        # There are fewer pixels than rows, and so fewer products with the network.
        function, T = covariance_of(posterior, fit, image), features.measurement
        return None if function is None else T.apply(T.apply(function.joint()).T.contiguous())
    function = covariance_of(posterior, fit, features)
    return None if function is None else function.joint()


def _of_measurements(
    call: str, la: LinearisedLaplace, candidates: Any, targets: Any
) -> tuple[ObservedFeatures, Features, list[int]]:
    """Features of all rows of operators, those of what they measure, and the numbers of rows of each candidate."""
    _, tangent = la._with_data(call)
    if tangent.data.num_data != 1:
        raise ValueError(
            f"`{call}`: candidates are measurements of one input, but the fit has {tangent.data.num_data} inputs."
        )
    image = features_at(la.network, tangent.data.inputs(torch.tensor([0])), layout=tangent.layout)
    outputs = la.network(image.inputs(torch.tensor([0]))[0])
    if not isinstance(candidates, Iterable) or isinstance(candidates, tuple):
        raise TypeError(
            f"`{call}(candidates)` takes a list of operators after a fit of measurements, but got a "
            f"{type(candidates).__name__}."
        )
    named = [(f"candidates[{number}]", T) for number, T in enumerate(candidates)]
    if not named:
        raise ValueError(f"`{call}(candidates)` needs a list of operators, but it is empty.")
    parts: list[Measurement] = []
    for name, T in [*named, *([] if targets is None else [("targets", targets)])]:
        try:
            parts.append(as_measurement(T, outputs).checked(outputs))
        except (TypeError, ValueError) as error:
            raise type(error)(f"`{call}`: {name}, which is given as `observe=T` is: {error}") from error
    rows = [part.shape[0] for part in parts]
    return ObservedFeatures(image, _stacked(parts, rows)), image, rows[: len(named)]


def _stacked(parts: Sequence[Measurement], rows: list[int]) -> Measurement:
    """All measurements as one."""

    def forward(f: Tensor) -> Tensor:
        return torch.cat([part.apply(f) for part in parts], -1)

    def backward(u: Tensor) -> Tensor:
        total = u.new_zeros(len(u), parts[0].num_outputs)
        for part, own in zip(parts, u.split(rows, -1), strict=True):
            if bool(own.any()):  # rows of one block are zero in all others
                total += part.adjoint(own)
        return total

    return Measurement(forward, backward, parts[0].num_outputs, (sum(rows),))


def _begun(file: FilePath | None, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices in a file; one that does not exist gets its first line, which says what was asked for."""
    if file is None:
        return []
    path = Path(file)
    text = path.read_text() if path.exists() else ""
    if not text:
        path.write_text(json.dumps(asked) + "\n")
        return []
    whole = text.rpartition("\n")[0]  # the last line of a killed process may be a part
    call, otherwise = f"`greedy(file={str(file)!r})`", "Delete it, or give another name."
    try:
        first, *steps = map(json.loads, whole.splitlines())
        differs = [name for name in asked if not _are_close(first[name], asked[name])]
        is_whole = all(0 <= step["chosen"] < len(asked["scores"]) and "gain" in step for step in steps)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{call}: the file holds something else than choices of `greedy`. {otherwise}") from error
    if differs or not is_whole:
        raise ValueError(
            f"{call}: the file is of another call, whose {', '.join(differs) or 'candidates'} differ (scores are those "
            f"of the candidates before any choice, by the posterior). {otherwise}"
        )
    path.write_text(whole + "\n")
    return steps


def _are_close(found: Any, wanted: Any) -> bool:
    """Whether two settings are the same; scores of another machine differ by rounding."""
    if not isinstance(wanted, list):
        return found == wanted
    values = torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
    return values[0].shape == values[1].shape and bool((values[0] - values[1]).norm() <= 1e-3 * values[1].norm())


def _append(file: FilePath | None, step: dict[str, Any]) -> None:
    if file is not None:
        with Path(file).open("a") as lines:
            lines.write(json.dumps(step) + "\n")
