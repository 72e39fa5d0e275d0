"""`LinearisedLaplace`: error bars for a trained network."""

import math
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.contour import sample_contour
from laplace_sampling.data import TrainingData
from laplace_sampling.dense import Dense
from laplace_sampling.diagnostics import Diagnosis, chi_squared_test, data_energy_test
from laplace_sampling.evidence import EMResult, EMStep, effective_dimension, fit_em
from laplace_sampling.evidence_path import (
    EvidenceCurves,
    EvidencePath,
    MarginalLikelihood,
    PathResult,
    evidence_path,
    exact_path,
    fit_path,
)
from laplace_sampling.krylov import BlockKrylov
from laplace_sampling.likelihoods import Categorical, Gaussian, Likelihood, as_likelihood
from laplace_sampling.linearise import Linearisation, Selection
from laplace_sampling.operators import DenseFeatures, Features, NetworkFeatures, ScaledFeatures
from laplace_sampling.predictive import ClassificationPrediction, RegressionPrediction
from laplace_sampling.priors import GaussianPrior, Prior, as_prior
from laplace_sampling.sampling import Draws, LinearModel, linear_model_mode, sample_posterior
from laplace_sampling.saving import Posterior, encode, likelihood_of, prior_of, recipe_of_prior, restore, settings_of
from laplace_sampling.solvers import ConvergenceWarning, Minimum, Solution, Solver
from laplace_sampling.stochastic import SGD
from laplace_sampling.variance_reduced import SVRG

__all__ = ["LinearisedLaplace", "NotFittedError"]

# "auto" takes the exact method up to this size of its matrix, and of the Jacobian that it holds (in numbers).
_AUTO_EXACT_SIZE, _AUTO_EXACT_JACOBIAN = 2000, 5e7
_EXACT_JACOBIAN_BYTES = 8 * 2**30
# Full-batch Krylov methods need a few passes whatever N is, stochastic ones a number of steps: up to this many data.
_AUTO_KRYLOV_DATA = 20_000
# The fewest vectors of a Krylov basis that are worth having.
_LEAST_BASIS = 64

# Streams of one seed: what each set of draws is for. Those of samples count up from the third.
_EM_STREAM, _PROBE_STREAM, _SAMPLE_STREAM = 0, 1, 2
_PATH_STREAM = 2**20
_EVIDENCE_PROBES, _EVIDENCE_ACCURACY = 16, 2e-3


class NotFittedError(ValueError, AttributeError):
    """A method that needs a fitted posterior was called before `fit_hyperparameters`, `fit` or `load`."""


@dataclass(frozen=True)
class _Check:
    """What `diagnose` needs to know of the last fit."""

    solution: Solution
    minimum: Minimum
    data_energies: Float[Tensor, " K"]
    energies: Float[Tensor, " K"]
    hyperparameters_converged: bool | None
    at_bounds: tuple[str, ...]


class LinearisedLaplace:
    r"""Linearised Laplace approximation of a trained network, by posterior samples of its tangent model.

    The network `f(w̄, x)` is replaced, for uncertainty only, by the Bayesian linear model `h(θ, x)` with features
    `φ(x) = ∂f/∂w` at `w̄`; its Gaussian posterior has precision `H = M + A`, `M = Σᵢ φᵢᵀBᵢφᵢ`. The mean of a
    prediction is the network's own output; its error bars are those of samples `φ(x) ζ_k`, `ζ_k ~ N(0, H⁻¹)`
    (Antorán, Padhy et al., ICLR 2023).

    Args:
        model: the trained network. It is held and never changed.
        likelihood: `"regression"` (Gaussian), `"classification"` (categorical), `"binary"` (Bernoulli, one or several
            outputs) or a `Likelihood`.
        prior: `"g-prior"`, `"isotropic"`, `"layerwise"` or a `Prior`.
        prior_precision: starting value of `α`, in units of the sum of losses over the data (a weight decay `λ` with
            a mean loss is `α = λN`).
        noise_precision: starting value of `1/σ²` for `"regression"`.
        parameters: which weights are random: names, globs or a predicate; all trainable ones by default.
        linear_model: `"affine"`, `h = f + φ(θ − w̄)`; `"homogeneous"`, `h = φθ`; `"auto"`, affine for a Gaussian
            likelihood and homogeneous for the others.
        hessian_at: where `B` is evaluated: `"network"`, at `f(w̄, x)`; `"mode"`, at `h(θ̄, x)`; `"auto"` is the
            mode. (For a Gaussian likelihood `B` is constant.)
        method: `"exact"`, dense algebra, for small problems; `"cg"`, block Krylov on all data, and hyperparameters from
            an evidence path; `"sgd"`, for many data; `"svrg"`, preconditioned and variance-reduced, likewise; `"ciq"`,
            samples by the inverse square root, for comparison; `"auto"` chooses between exact, cg and sgd, and
            `print` tells why.
        num_samples: posterior samples for predictions, `K`.
        seed: of all randomness.
        solver: settings of `"sgd"`.
        max_memory: bytes that solvers may take for vectors of `P` numbers; half of what is free by default.

    Attributes:
        prior_precision_: `α`, `[G]`, one a group of the prior.
        noise_precision_: `1/σ²`, a scalar or `[C]`; `None` unless the likelihood is Gaussian.
        effective_dimension_: `γ`, `[G]`: how many directions of weight space the data determine.
        samples_: zero-mean posterior samples `ζ`, `[K, P]`.
        mode_: mode `θ̄` of the linear model, `[P]`.
        history_: one `EMStep` a step of `fit_hyperparameters`.

    Example:
        >>> import torch
        >>> from laplace_sampling import LinearisedLaplace
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> y = x + 0.1 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0))
        >>> model = torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
        >>> la = LinearisedLaplace(model, "regression")
        >>> la = la.fit_hyperparameters([(x, y)], progress=False)
        >>> pred = la.predict(torch.tensor([[0.0], [3.0]]))
        >>> bool(pred.stddev[1] > 2 * pred.stddev[0])
        True
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        *,
        prior: str | Prior = "g-prior",
        prior_precision: float = 1.0,
        noise_precision: float | Tensor = 1.0,
        parameters: Selection = None,
        linear_model: str = "auto",
        hessian_at: str = "auto",
        method: str = "auto",
        num_samples: int = 64,
        seed: int = 0,
        solver: SGD | None = None,
        max_memory: float | None = None,
    ) -> None:
        _check_choice("linear_model", linear_model, ("auto", "affine", "homogeneous"))
        _check_choice("hessian_at", hessian_at, ("auto", "network", "mode"))
        _check_choice("method", method, ("auto", "exact", "cg", "sgd", "svrg", "ciq"))
        if max_memory is not None and not max_memory > 0:
            raise ValueError(f"`max_memory` must be a positive number of bytes, but is {max_memory}.")
        if not 0 < prior_precision < math.inf:
            raise ValueError(f"`prior_precision` must be positive and finite, but is {prior_precision}.")
        if num_samples < 2:
            raise ValueError(f"`num_samples` must be at least 2, but is {num_samples}.")
        if seed < 0:
            raise ValueError(f"`seed` must not be negative, but is {seed}.")
        self.network = Linearisation(model, parameters)
        self.likelihood = as_likelihood(likelihood, noise_precision)
        self.prior = as_prior(prior)
        self.prior_precision = float(prior_precision)
        gaussian = isinstance(self.likelihood, Gaussian)
        self.linear_model = linear_model if linear_model != "auto" else "affine" if gaussian else "homogeneous"
        self.hessian_at = hessian_at if hessian_at != "auto" else "mode"
        self.method = method
        self.num_samples = num_samples
        self.seed = seed
        self.solver = solver or SGD(seed=seed)
        self.max_memory = max_memory
        self._choice: tuple[str, str] | None = None
        self._path: EvidencePath | None = None
        self._check: _Check | None = None
        self._posterior: Posterior | None = None
        self._model: LinearModel | None = None
        self._mode_outputs: Tensor | None = None
        self._drawn = 0

    # Fitting ---------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def fit_hyperparameters(
        self,
        loader: Iterable[Any],
        *,
        max_steps: int = 10,
        tolerance: float = 0.03,
        num_samples: int = 16,
        precision_bounds: tuple[float, float] = (1e-8, 1e12),
        progress: bool = True,
        callback: Callable[[EMStep], object] | None = None,
    ) -> "LinearisedLaplace":
        r"""Tune the prior precision, and the noise precision of a regression, by EM on samples; draw the posterior.

        No validation data are used. The loader may be shuffled; its batch size is what goes through the network
        at once, and does not change the result.

        Args:
            loader: of pairs `(x, y)`: a `DataLoader`, a dataset, or a list of batches, without random augmentation.
            max_steps: EM steps at most; a `ConvergenceWarning` tells if they were not enough.
            tolerance: of `log α` (and `log b`): stop when it changes by less, or is known so well. Error bars where the
                prior determines them go with `α^{-1/2}`, so that their relative error is half of it.
            num_samples: samples during EM (which `"cg"` needs for layer-wise priors only); the relative standard error
                of `γ` is about `√(2/(Kγ))`.
            precision_bounds: within which `α` is kept.
            progress: show progress bars.
            callback: called with the `EMStep` of each step.

        Raises:
            TypeError, ValueError: for data that do not fit the model or the likelihood, or that cannot be read twice;
                what was fitted before is kept.
        """
        if max_steps < 1 or num_samples < 1 or not tolerance > 0:
            raise ValueError(
                f"`fit_hyperparameters` needs max_steps and num_samples of at least 1 and a positive tolerance, "
                f"got {max_steps}, {num_samples}, {tolerance}."
            )
        model, data, solver = self._prepare(loader)
        prior = self._build_prior(model)
        result: EMResult | PathResult
        if isinstance(solver, BlockKrylov) and _has_path(model.likelihood, prior):
            result = fit_path(
                model,
                prior,
                self.seed,
                _PATH_STREAM,
                hessian_at=self.hessian_at,
                tolerance=tolerance,
                max_rounds=max_steps + 2,
                precision_bounds=precision_bounds,
                max_basis=solver.max_basis,
                progress=progress,
                callback=callback,
            )
        else:
            result = fit_em(
                model,
                prior,
                Draws(num_samples, self.seed, _EM_STREAM),
                solver,
                hessian_at=self.hessian_at,
                max_steps=max_steps,
                tolerance=tolerance,
                precision_bounds=precision_bounds,
                progress=progress,
                callback=callback,
            )
        if not result.converged:
            warnings.warn(
                f"`fit_hyperparameters` stopped after {len(result.history)} steps, before its tolerance: "
                f"prior precision went {[f'{s.prior_precision[0]:.3g}' for s in result.history]}. "
                "Raise `max_steps`, or `tolerance`.",
                ConvergenceWarning,
                stacklevel=3,  # this method is behind the wrapper of `inference_mode`
            )
        at_bound = [
            name
            for name, alpha in zip(result.prior.names, result.prior.precision.tolist(), strict=True)
            if alpha in precision_bounds
        ]
        if at_bound:
            warnings.warn(
                f"`fit_hyperparameters` ended at one of precision_bounds={precision_bounds} for the groups {at_bound}: "
                "at the upper one the data show no effect of these weights, at the lower one the prior fades out. "
                "Check the data, or give other bounds.",
                ConvergenceWarning,
                stacklevel=3,
            )
        model = model.with_likelihood(result.likelihood)
        start = (result.mode / result.prior.scale)[None]
        self._draw_posterior(
            model,
            data,
            result.prior,
            solver,
            start,
            result.history,
            progress,
            path=result.path if isinstance(result, PathResult) else None,
            fitted=(result.converged, tuple(at_bound)),
        )
        return self

    @torch.inference_mode(False)
    def fit(self, loader: Iterable[Any], *, progress: bool = True) -> "LinearisedLaplace":
        """The posterior at the prior and noise precision given to the constructor.

        Args:
            loader: as for `fit_hyperparameters`.
            progress: show progress bars.
        """
        model, data, solver = self._prepare(loader)
        self._draw_posterior(model, data, self._build_prior(model), solver, None, [], progress)
        return self

    def _prepare(self, loader: Iterable[Any]) -> tuple[LinearModel, TrainingData, Solver]:
        with torch.random.fork_rng(devices=[]):  # a shuffled loader draws from the global generator
            data = TrainingData(loader)
        if not bool(self.network.weights.isfinite().all()):
            raise ValueError("The weights of the model contain NaN or infinity; train or load it again.")
        outputs = []
        for number, batch in enumerate(torch.arange(data.num_data).split(data.batch_size)):
            x = data.inputs(batch).to(self.network.device)
            outputs.append(self.network(x))
            if not bool(outputs[-1].isfinite().all()):
                raise ValueError(f"The model gives NaN or infinity on batch {number} (counted from 0) of the data.")
            if number == 0 and not torch.equal(self.network(x), outputs[0]):
                raise ValueError(
                    "The model gives different outputs for the same input in evaluation mode. Remove what is random "
                    "in its forward (for example `F.dropout(..., training=True)`)."
                )
        structured = torch.cat(outputs)
        targets = data.targets.to(self.network.device)
        self.likelihood.check_targets(structured.shape, targets)
        f = structured.reshape(data.num_data, -1)
        if not bool(self.likelihood.loss(f, targets).isfinite().all()):
            raise ValueError("The loss of the model on the data is not finite; check targets and noise precision.")
        features: Features = NetworkFeatures(self.network, data, f.shape[1])
        self._choice = method, _ = self._choose_method(features)
        solver = self._make_solver(method, features)
        if method == "exact":
            features = DenseFeatures.of(features)
            f = f.double()
        offset = torch.zeros_like(f)
        if self.linear_model == "affine":
            offset = f - features.outputs(self.network.weights[None].to(features.dtype))[0]
        return LinearModel(features, offset, f, targets, self.likelihood), data, solver

    def _choose_method(self, features: Features) -> tuple[str, str]:
        """The method, and the reason for it in words."""
        rows = features.num_data * features.num_outputs
        smaller, jacobian = min(rows, features.size), rows * features.size
        needed = 8 * (jacobian + 3 * smaller**2)
        if self.method == "exact" and needed > _EXACT_JACOBIAN_BYTES:
            raise ValueError(
                f'method="exact" would need about {needed / 2**30:.1f} GiB for {features.num_data} data, '
                f'{features.num_outputs} outputs and {features.size} weights; use method="cg" or "sgd".'
            )
        if self.method != "auto":
            return self.method, "as asked for"
        if smaller <= _AUTO_EXACT_SIZE and jacobian <= _AUTO_EXACT_JACOBIAN:
            return "exact", f"a matrix of {smaller} rows, and a Jacobian of {jacobian:.2g} numbers, are cheap"
        if features.num_data > _AUTO_KRYLOV_DATA:
            return "sgd", f"{features.num_data} data: steps on few of them cost less than passes over all"
        basis = self._max_basis(features)
        if basis < _LEAST_BASIS:
            return "sgd", f"memory holds {basis} vectors of {features.size} weights, too few for a Krylov basis"
        return "cg", f"{features.num_data} data: a few passes over all are cheap, and memory holds {basis} vectors"

    def _max_basis(self, features: Features) -> int:
        """Vectors of a Krylov basis that the memory holds, beside the stacks that a solve needs."""
        budget = self.max_memory if self.max_memory is not None else 0.5 * _free_memory(features.device)
        vectors = budget / (features.size * torch.empty((), dtype=features.dtype).element_size())
        return max(4, int((vectors - 8 * self.num_samples) / 3))

    def _build_prior(self, model: LinearModel) -> GaussianPrior:
        # At the mode B depends on α; the scale of a g-prior must not, so it is taken where all outputs are zero.
        at = model.network_outputs if self.hessian_at == "network" else torch.zeros_like(model.network_outputs)
        probes = Draws(getattr(self.prior, "num_probes", 1), self.seed, _PROBE_STREAM)
        noise = probes.noise(model.features.num_outputs)
        return self.prior.build(model.ggn(at), self.network.layers(), self.prior_precision, noise)

    def _draw_posterior(
        self,
        model: LinearModel,
        data: TrainingData,
        prior: GaussianPrior,
        solver: Solver,
        mode: Tensor | None,
        history: list[EMStep],
        progress: bool,
        *,
        path: EvidencePath | None = None,
        fitted: tuple[bool | None, tuple[str, ...]] = (None, ()),
    ) -> None:
        """Mode and samples at given hyperparameters; replaces what was fitted before, at the very end."""
        prior = prior.to(model.features.device, model.features.dtype)
        if isinstance(solver, SGD):
            solver = self._long_solver()
        minimum = linear_model_mode(model, prior, solver, mode, description="mode" if progress else None)
        theta = (minimum.value * prior.scale)[0]
        mode_outputs = model.outputs(theta[None])[0]
        at = mode_outputs if self.hessian_at == "mode" else model.network_outputs
        draws = Draws(self.num_samples, self.seed, _SAMPLE_STREAM)
        description = f"{self.num_samples} samples" if progress else None
        ggn = model.ggn(at)
        if self._choice is not None and self._choice[0] == "ciq":
            solution = sample_contour(ggn, prior, draws)
        else:
            solution = sample_posterior(ggn, prior, draws, solver, description=description)
        if not (solution.converged and minimum.converged):
            advice = "Give more passes with `solver=SGD(epochs=..., mode_epochs=...)`."
            if not isinstance(solver, SGD):
                advice = "Float64 weights help where the problem is badly conditioned, a larger prior precision too."
            warnings.warn(
                f"The posterior has not converged: residual {float(solution.residual.max()):.2g} of the samples, "
                f"{minimum.residual:.2g} of the mode. {advice}",
                ConvergenceWarning,
                stacklevel=4,
            )
        gamma, gamma_se = effective_dimension(solution, prior)
        dtype = self.network.dtype
        self._posterior = Posterior(
            prior=prior,
            likelihood=model.likelihood,
            samples=(solution.value * prior.scale).to(dtype),
            mode=theta.to(dtype),
            effective_dimension=gamma,
            effective_dimension_se=gamma_se,
            history=history,
            rows=data.batch_size,
            fingerprint=self.network.fingerprint(),
        )
        self._model, self._mode_outputs, self._drawn, self._path = model, mode_outputs, 0, path
        scaled = replace(ggn, features=ScaledFeatures(ggn.features, prior.scale))
        product = scaled.matmul(solution.value) if solution.exact else None
        data_energies = ((solution.value * product) if product is not None else solution.leverage).double().sum(1)
        self._check = _Check(
            solution=replace(
                solution, value=solution.value[:0], delta=solution.delta[:0], leverage=solution.leverage[:0]
            ),
            minimum=minimum,
            data_energies=data_energies,
            energies=data_energies + (prior.spread() * solution.value.double() ** 2).sum(1),
            hyperparameters_converged=fitted[0],
            at_bounds=fitted[1],
        )

    # Using -----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)
    def predict(self, x: Tensor, *, num_samples: int | None = None) -> RegressionPrediction | ClassificationPrediction:
        r"""Predictions with error bars: `f(w̄, x)` and `φ(x) ζ_k`, by `K` JVPs a datum and no VJP.

        Args:
            x: inputs as the model takes them, `[N, ...]`.
            num_samples: use only the first so many of `samples_`.

        Raises:
            NotFittedError: before a fit.
            ValueError: for NaN in `x`, or if the weights of the model have changed since the fit.
        """
        posterior = self._fitted("predict")
        if not isinstance(x, Tensor):
            raise TypeError(f"`predict(x)` needs a tensor, but got {type(x).__name__}.")
        if x.dim() == 0 or len(x) == 0:
            raise ValueError(
                f"`predict(x)` needs a batch of inputs [N, ...] with N of at least 1, got {list(x.shape)}."
            )
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise ValueError("`predict(x)`: x contains NaN or infinity.")
        samples = posterior.samples
        if num_samples is not None:
            if not 1 <= num_samples <= len(samples):
                raise ValueError(
                    f"`predict(num_samples={num_samples})`: there are {len(samples)} samples; construct "
                    f"`LinearisedLaplace(..., num_samples={num_samples})` and fit for more."
                )
            samples = samples[:num_samples]
        self._check_fingerprint(posterior.fingerprint, "predict")
        x = x.to(self.network.device)
        outputs = self.network(x)
        deviations = torch.cat([self.network.jvp(part, samples) for part in x.split(posterior.rows)], dim=1)
        deviations = deviations.reshape(len(samples), *outputs.shape)
        kind = RegressionPrediction if isinstance(posterior.likelihood, Gaussian) else ClassificationPrediction
        return kind(outputs, deviations, posterior.likelihood)

    @torch.inference_mode(False)
    def sample(self, num_samples: int) -> Float[Tensor, "K P"]:
        """New zero-mean posterior samples `ζ ~ N(0, H⁻¹)`, independent of `samples_` and of earlier calls."""
        posterior = self._fitted("sample")
        if num_samples < 1:
            raise ValueError(f"`sample(num_samples)` needs at least 1, got {num_samples}.")
        if self._model is None or self._mode_outputs is None:
            raise NotFittedError(
                "`sample` needs the training data, which a loaded posterior does not have: call `fit(loader)`, or use "
                "the samples that were saved, `samples_`."
            )
        self._check_fingerprint(posterior.fingerprint, "sample")
        self._drawn += 1
        model = self._model
        at = self._mode_outputs if self.hessian_at == "mode" else model.network_outputs
        draws = Draws(num_samples, self.seed, _SAMPLE_STREAM + self._drawn)
        ggn = model.ggn(at)
        if self._choice is not None and self._choice[0] == "ciq":
            solution = sample_contour(ggn, posterior.prior, draws)
        else:
            solver = self._make_solver(self._choice[0] if self._choice else self.method, model.features)
            solver = self._long_solver() if isinstance(solver, SGD) else solver
            solution = sample_posterior(ggn, posterior.prior, draws, solver)
        return (solution.value * posterior.prior.scale).to(self.network.dtype)

    @torch.inference_mode(False)
    def log_marginal_likelihood(self) -> MarginalLikelihood:
        r"""`log p(y)` of the linear model at the fitted hyperparameters, a sum over the data, with its standard error.

        `−Σ_i ℓ(y_i, h(θ̄, x_i)) − ½ θ̄ᵀAθ̄ − ½ log|I + A⁻¹M|`: the log determinant exactly from the exact method, else by
        stochastic Lanczos quadrature. For a loss that is not quadratic it is Laplace's approximation, and with
        `hessian_at="mode"` no guide to the prior precision, as the curvature moves with it.
        """
        path, alpha = self._evidence("log_marginal_likelihood")
        return MarginalLikelihood.of(path, alpha)

    @torch.inference_mode(False)
    def evidence_path(self, decades: float = 3.0, num: int = 121) -> EvidenceCurves:
        """Effective dimension, norm of the mode and log marginal likelihood as functions of the prior precision.

        The curvature is that at the fitted hyperparameters. Several precisions go up and down together; the axis is
        their geometric mean over the weights.

        Args:
            decades: to both sides of the fitted precision.
            num: points.
        """
        if not (0 < decades <= 12 and num >= 2):
            raise ValueError(f"`evidence_path` needs 0 < decades <= 12 and num of at least 2, got {decades}, {num}.")
        path, alpha = self._evidence("evidence_path", decades)
        return EvidenceCurves.of(path, alpha * torch.logspace(-decades, decades, num, dtype=torch.float64))

    def _evidence(self, call: str, decades: float | None = None) -> tuple[EvidencePath, float]:
        posterior = self._fitted(call)
        if self._model is None:
            raise NotFittedError(
                f"`{call}` needs the training data, which a loaded posterior does not have: call `fit(loader)`."
            )
        self._check_fingerprint(posterior.fingerprint, call)
        model = self._model
        prior = posterior.prior.to(model.features.device, model.features.dtype)
        alpha = float(prior.spread().double().log().mean().exp())
        mode = (posterior.mode.to(model.features.dtype) / prior.scale)[None]
        if isinstance(model.features, DenseFeatures):
            return exact_path(model, prior, mode, hessian_at=self.hessian_at), alpha
        path, _ = evidence_path(
            model,
            prior,
            Draws(_EVIDENCE_PROBES, self.seed, _PATH_STREAM),
            mode,
            hessian_at=self.hessian_at,
            accuracy=_EVIDENCE_ACCURACY,
            decades=0.0 if decades is None else decades,
            max_basis=self._max_basis(model.features),
        )
        return path, alpha

    def diagnose(self) -> Diagnosis:
        """Whether solves, samples and hyperparameters of the last fit are right; `print` it for one page in words.

        The energies of the samples are tested against their distributions; see `laplace_sampling.diagnostics`.
        """
        posterior, model, check = self._fitted("diagnose"), self._model, self._check
        if model is None or check is None or self._choice is None:
            raise NotFittedError("`diagnose` needs the fit itself, which a loaded posterior does not have: call `fit`.")
        alpha = float(posterior.prior.spread().double().log().mean().exp())
        reference = None if self._path is None else torch.tensor([alpha], dtype=torch.float64)
        moments: tuple[float, float, float] | None = None
        if self._path is not None and reference is not None:
            gamma, error = self._path.effective_dimension(reference)
            moments = float(gamma), 2 * float(self._path.squared_dimension(reference)), float(error)
        f = model.network_outputs
        linear = model.features.outputs(self.network.weights[None].to(model.features.dtype))[0]
        energies = check.data_energies.cpu()
        classes = isinstance(model.likelihood, Categorical)
        # What each solver judges itself by: the error of the function, or the gradient.
        residuals, tolerance = {
            "cg": (check.solution.error, BlockKrylov().tolerance),
            "svrg": (check.solution.error, math.sqrt(SVRG().tolerance)),
            "sgd": (check.solution.residual, self.solver.tolerance),
            "exact": (check.solution.residual, 1e-6),
            "ciq": (check.solution.residual, 0.1),
        }[self._choice[0]]
        return Diagnosis(
            num_samples=len(posterior.samples),
            num_parameters=self.network.num_parameters,
            num_data=model.features.num_data,
            num_outputs=model.features.num_outputs,
            linear_model=self.linear_model,
            method=self._choice[0],
            reason=self._choice[1],
            residuals=residuals.cpu(),
            tolerance=tolerance,
            solver_converged=check.solution.converged,
            mode_residual=check.minimum.residual,
            mode_converged=check.minimum.converged,
            hyperparameters_converged=check.hyperparameters_converged,
            prior_precision=dict(zip(posterior.prior.names, posterior.prior.precision.tolist(), strict=True)),
            at_bounds=check.at_bounds,
            effective_dimension=float(posterior.effective_dimension.sum()),
            effective_dimension_se=float(posterior.effective_dimension_se.square().sum().sqrt()),
            gamma_reference=None if moments is None else moments[0],
            gamma_reference_se=None if moments is None else moments[2],
            total_test=chi_squared_test(check.energies.cpu(), self.network.num_parameters),
            data_test=data_energy_test(energies) if moments is None else data_energy_test(energies, *moments),
            offset=float((linear - f).norm() / f.norm()),
            num_floored=posterior.prior.num_floored,
            passes=check.solution.passes + check.minimum.passes + sum(step.passes for step in posterior.history),
            max_rank=f.shape[0] * (f.shape[1] - 1) if classes else None,
        )

    def _make_solver(self, method: str, features: Features) -> Solver:
        if method == "exact":
            return Dense()
        if method == "svrg":
            return SVRG(seed=self.seed)
        return BlockKrylov(max_basis=self._max_basis(features)) if method in ("cg", "ciq") else self.solver

    def _long_solver(self) -> SGD:
        # These samples are kept, and have no warm start.
        return replace(self.solver, epochs=2 * self.solver.epochs)

    @property
    def prior_precision_(self) -> Float[Tensor, " G"]:
        return self._fitted("prior_precision_").prior.precision

    @property
    def noise_precision_(self) -> Tensor | None:
        likelihood = self._fitted("noise_precision_").likelihood
        return torch.as_tensor(likelihood.noise_precision) if isinstance(likelihood, Gaussian) else None

    @property
    def effective_dimension_(self) -> Float[Tensor, " G"]:
        return self._fitted("effective_dimension_").effective_dimension

    @property
    def samples_(self) -> Float[Tensor, "K P"]:
        return self._fitted("samples_").samples

    @property
    def mode_(self) -> Float[Tensor, " P"]:
        return self._fitted("mode_").mode

    @property
    def history_(self) -> list[EMStep]:
        return self._fitted("history_").history

    def __repr__(self) -> str:
        head = (
            f"LinearisedLaplace({type(self.network.module).__name__}, {self.likelihood.name!r}, "
            f"P={self.network.num_parameters}, prior={type(self.prior).__name__}, linear_model={self.linear_model!r}, "
            f"hessian_at={self.hessian_at!r}, method={self.method!r}"
        )
        p = self._posterior
        if p is None:
            return head + ", not fitted)"
        if self._choice is not None:
            head += f" → {self._choice[0]!r}: {self._choice[1]}"
        alpha = ", ".join(f"{name}: {float(a):.3g}" for name, a in zip(p.prior.names, p.prior.precision, strict=True))
        floored = f", {p.prior.num_floored} weights floored" if p.prior.num_floored else ""
        return (
            head
            + f", prior_precision_={{{alpha}}}, effective_dimension_={float(p.effective_dimension.sum()):.1f}{floored})"
        )

    # Keeping ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All that predictions need, as tensors only: loads with `torch.load(..., weights_only=True)`."""
        settings = {
            "linear_model": self.linear_model,
            "hessian_at": self.hessian_at,
            "parameters": self.network.names,
            "recipe": self._recipe(),
        }
        return encode(self._fitted("state_dict"), settings)

    def _recipe(self) -> dict[str, Any]:
        """What the constructor was given, so that a loaded object fits again as the saved one would."""
        recipe = {
            "prior": recipe_of_prior(self.prior),
            "prior_precision": self.prior_precision,
            "method": self.method,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "solver": asdict(self.solver),
            "max_memory": self.max_memory,
        }
        if isinstance(self.likelihood, Gaussian):
            recipe["noise_precision"] = torch.as_tensor(self.likelihood.noise_precision).tolist()
        return recipe

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a posterior from `state_dict`.

        Raises:
            ValueError: if the state is not of this model's weights, of another likelihood or another choice of
                parameters, or incomplete; what was fitted before is kept.
        """
        network = self.network
        posterior = restore(state, network.names, self.likelihood, network.num_parameters, network.device)
        self._check_fingerprint(posterior.fingerprint, "load_state_dict")
        settings = settings_of(state)
        self._posterior = posterior
        self.linear_model, self.hessian_at = settings["linear_model"], settings["hessian_at"]
        self._model = self._mode_outputs = self._check = self._path = self._choice = None

    def save(self, path: str | Path) -> None:
        """Write `state_dict()` to a file."""
        torch.save(self.state_dict(), path)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        likelihood: str | Likelihood | None = None,
        prior: str | Prior | None = None,
    ) -> "LinearisedLaplace":
        """Read what `save` wrote, for the same trained network; settings are those of the saved object.

        Args:
            path: of the file.
            model: the network, with the weights that it had at the fit.
            likelihood: needed only if it was not one of the library's own.
            prior: likewise.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        settings = settings_of(state)
        recipe = settings["recipe"]
        la = cls(
            model,
            likelihood_of(settings) if likelihood is None else likelihood,
            prior=prior_of(recipe["prior"]) if prior is None else prior,
            prior_precision=recipe["prior_precision"],
            parameters=settings["parameters"],
            method=recipe["method"],
            num_samples=recipe["num_samples"],
            seed=recipe["seed"],
            solver=SGD(**recipe["solver"]),
            max_memory=recipe.get("max_memory"),
        )
        la.load_state_dict(state)
        return la

    # Checks ----------------------------------------------------------------------------------------------------

    def _fitted(self, what: str) -> Posterior:
        if self._posterior is None:
            raise NotFittedError(
                f"`{what}` needs a fitted posterior: call `fit_hyperparameters(loader)`, `fit(loader)` or `load` first."
            )
        return self._posterior

    def _check_fingerprint(self, fingerprint: Tensor, call: str) -> None:
        if not torch.equal(fingerprint.cpu(), self.network.fingerprint()):
            raise ValueError(
                f"`{call}`: the weights or buffers of the model are not those of the fit, so its error bars do not "
                "apply. Load the weights that the model had then, or fit again."
            )


def _has_path(likelihood: Likelihood, prior: GaussianPrior) -> bool:
    """Whether the hyperparameters are those of one curve: a prior precision, and at most one noise precision."""
    one_noise = not isinstance(likelihood, Gaussian) or torch.as_tensor(likelihood.noise_precision).dim() == 0
    return len(prior.names) == 1 and one_noise


def _free_memory(device: torch.device) -> float:
    """Bytes."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError):  # not every system tells
        return 4.0 * 2**30


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is not known; use one of {list(choices)}.")
