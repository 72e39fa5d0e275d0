"""Small trained networks for ablations, their tangent models in dense float64, and exact functions of their spectra."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import scipy.interpolate
import scipy.optimize
import torch
from torch import Tensor, nn

from benchmarks.comparison.networks import lenet, mlp, tanh_mlp
from benchmarks.comparison.training import Recipe, train
from benchmarks.data.tasks import TASKS, Data
from laplace_sampling import LinearisedLaplace
from laplace_sampling.likelihoods.categorical import Categorical
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.linear_model.draws import Draws
from laplace_sampling.linear_model.features import DenseFeatures, ScaledFeatures
from laplace_sampling.linear_model.linear_model import LinearModel
from laplace_sampling.linear_model.mode_objective import linear_model_mode
from laplace_sampling.linear_model.priors.as_prior import as_prior
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.linear_model.tangent_model_of import tangent_model_of
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.solvers.dense import Dense

__all__ = ["CASES", "Case", "Spectrum", "Trained", "root", "trained"]

SMALL, TINY = (4, 8, 16), (3, 6, 12)  # channels of LeNets of some 1,000 and 600 weights
DIGITS = "digits, n=300, noise 1"


@dataclass(frozen=True)
class Case:
    """A task, a network that is made from the shape of an input, the number of outputs and a rate of dropout."""

    task: str
    make: Callable[[torch.Size, int, float], nn.Module]
    weight_decay: float


CASES = {
    "wine, MLP": Case("wine", mlp, 1e-3),
    "breast cancer, MLP": Case("breast cancer", mlp, 1e-3),
    "digits, LeNet": Case(DIGITS, partial(lenet, channels=SMALL), 1e-3),
    "digits, tiny LeNet": Case(DIGITS, partial(lenet, channels=TINY), 1e-3),
    "digits, tiny LeNet with batch norm": Case(DIGITS, partial(lenet, channels=TINY, norm=True), 1e-3),
    "1,400 digits, tiny LeNet": Case("digits, n=1400, noise 1", partial(lenet, channels=TINY), 1e-3),
    "diabetes, tanh MLP": Case("diabetes", tanh_mlp, 1e-2),
    "gap, tanh MLP": Case("gap", tanh_mlp, 1e-3),
}


@dataclass(frozen=True, eq=False)
class Trained:
    """A network, what it was trained on, and its linear models."""

    network: nn.Module
    data: Data
    likelihood: str

    def laplace(self, **settings) -> LinearisedLaplace:
        """The exact method; fits should have `scale=1.0`."""
        exact = {"likelihood": self.likelihood, "method": "exact", "num_samples": 2}
        return LinearisedLaplace(self.network, **{**exact, **settings})

    @cached_property
    def noise_precision(self) -> float:
        """The noise precision that the library fits; for classes a number that nothing depends on."""
        la = self.laplace().fit_hyperparameters(self.data.train.loader(), scale=1.0, progress=False)
        return 1.0 if la.noise_precision_ is None else float(la.noise_precision_)

    def model(self, kind: str) -> LinearModel:
        """The linear model, `"affine"` or `"homogeneous"`; the noise of a regression is known."""
        regression = self.likelihood == "regression"
        likelihood = Gaussian(self.noise_precision, learn=False) if regression else Categorical()
        return tangent_model_of(Linearisation(self.network), likelihood, self.data.train.loader(), kind=kind).dense()

    @property
    def default(self) -> LinearModel:
        return self.model("affine" if self.likelihood == "regression" else "homogeneous")

    @cached_property
    def weights(self) -> Tensor:
        return Linearisation(self.network).weights.double()

    def prior(self, model: LinearModel, name: str = "isotropic", precision: float = 1.0) -> GaussianPrior:
        """The prior; its scale, if it has one, is taken at the network."""
        ggn = model.ggn(model.network_outputs)
        prior = replace(as_prior(name), precision=precision).build(ggn, self.layers, Draws(64, 0).noise(10))
        return prior.to(model.features.device, torch.float64)

    @property
    def layers(self) -> tuple[list[str], Tensor]:
        """Layers in the form of `Linearisation.layers`."""
        return Linearisation(self.network).layers()

    def test_features(self, num: int = 100) -> Tensor:
        return Linearisation(self.network).jacobian(self.data.test.x[:num])


@lru_cache(maxsize=32)
def trained(name: str, seed: int, steps: int = 1000) -> Trained:
    """A network of `CASES`, trained to convergence."""
    case = CASES[name]
    task = TASKS[case.task]
    data = task.load(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = case.make(data.train.x.shape[1:], task.outputs, 0.0)
    train(network, task.likelihood, data, Recipe(weight_decay=case.weight_decay, steps=steps), seed)
    return Trained(network.eval(), data, task.likelihood)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A linear model in scaled coordinates, in the row space of its features, with `B` at the network.

    There all of EM is an exact function of `α`, except for the norm of the mode, which is interpolated from a table.

    Attributes:
        values: `λ`, eigenvalues of `M`, the others are zero.
        vectors: of these, `[r, r]`.
        model: in the row space, `r = min(N·C, P)` weights.
        size: `P`.
    """

    values: Tensor
    vectors: Tensor
    model: LinearModel
    size: int
    span: tuple[float, float] = (1e-2, 1e4)  # of the table
    per_decade: int = 3

    @classmethod
    def of(cls, model: LinearModel, prior: GaussianPrior) -> "Spectrum":
        features = ScaledFeatures(model.features, prior.scale).rows(torch.arange(model.features.num_data))
        rows = features.flatten(0, 1)
        if len(rows) < rows.shape[1]:
            rows = torch.linalg.qr(rows.T).R.T  # the mode is in the row space, whatever `α`
        reduced = DenseFeatures(rows.reshape(*features.shape[:2], -1))
        model = replace(model, features=reduced)
        root = torch.cat(list(model.ggn(model.network_outputs).root_rows()))
        values, vectors = torch.linalg.eigh(root.T @ root)
        return cls(values.clamp_min(0), vectors, model, features.shape[-1])

    def gamma(self, alpha: float) -> float:
        """`Tr M(M + α)⁻¹`."""
        return float((self.values / (self.values + alpha)).sum())

    def trace_of_inverse(self, alpha: float) -> float:
        """`Tr (M + α)⁻¹`, that of directions without data included."""
        return float((1 / (self.values + alpha)).sum()) + (self.size - len(self.values)) / alpha

    def sampled_gamma(self, alpha: float, data: Tensor, prior: Tensor) -> float:
        """`(1/K) Σ_k ζ_kᵀMζ_k` of samples by white noise of data and prior, `[K, r]`, along the eigenvectors."""
        samples = (self.values.sqrt() * data + alpha**0.5 * prior) / (self.values + alpha)
        return float((self.values * samples.square()).sum(-1).mean())

    def mode(self, alpha: float, init: Tensor | None = None) -> Tensor:
        """`θ̄/s` in the row space, `[1, r]`, by Newton's method."""
        size = self.model.features.size
        precision = torch.tensor([alpha], dtype=torch.float64)
        prior = GaussianPrior(precision, torch.zeros(size, dtype=torch.long), torch.ones(size).double(), ("all",))
        return linear_model_mode(self.model, prior, Dense(tolerance=1e-7), init).value

    @cached_property
    def _log_norm(self) -> scipy.interpolate.CubicSpline:
        """`log ‖θ̄‖²` against `log α`."""
        low, high = (math.log10(v) for v in self.span)
        nodes, norms, mode = np.logspace(high, low, round(self.per_decade * (high - low)) + 1), [], None
        for alpha in nodes:
            mode = self.mode(float(alpha), mode)
            norms.append(float(mode.square().sum()))
        return scipy.interpolate.CubicSpline(np.log(nodes[::-1]), np.log(norms[::-1]))

    def norm(self, alpha: float) -> float:
        """`‖θ̄‖²` in scaled coordinates, constant outside of the table."""
        return math.exp(self._log_norm(math.log(min(max(alpha, self.span[0]), self.span[1]))))

    def fixed_point(self, norm: Callable[[float], float] | None = None) -> float:
        """The smallest `α` above which MacKay's update lowers it, and below which it raises it."""
        norm = norm or self.norm

        def excess(u: float) -> float:
            return u + math.log(norm(math.exp(u))) - math.log(self.gamma(math.exp(u)))

        grid = np.linspace(math.log(self.span[0]), math.log(self.span[1]), 200)
        up = np.array([excess(u) > 0 for u in grid])
        crossings = np.flatnonzero(~up[:-1] & up[1:])
        if not len(crossings):
            raise ValueError(f"MacKay's update has no fixed point from α = {self.span[0]:g} to {self.span[1]:g}.")
        return math.exp(root(excess, *grid[crossings[0] :][:2]))


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """The root of a function of `log α`."""
    solution: Any = scipy.optimize.brentq(function, low, high, xtol=1e-12)
    return solution
