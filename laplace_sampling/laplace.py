"""`LinearisedLaplace`: error bars for a trained network."""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.curves import EvidenceCurves, EvidencePath, MarginalLikelihood
from laplace_sampling.data import TrainingData
from laplace_sampling.dense import Dense
from laplace_sampling.diagnostics import Diagnosis, TestResult, advice, chi_squared_test, data_energy_test
from laplace_sampling.evidence import EMResult, EMStep, fit_em
from laplace_sampling.evidence_path import evidence_path, exact_path
from laplace_sampling.krylov import BlockKrylov
from laplace_sampling.likelihoods import Categorical, Gaussian, Likelihood, as_likelihood
from laplace_sampling.linearise import Linearisation, Selection
from laplace_sampling.methods import METHODS, Plan, make_plan
from laplace_sampling.operators import GGN, DenseFeatures, Features, NetworkFeatures, ScaledFeatures
from laplace_sampling.path_fit import PathResult, fit_path
from laplace_sampling.posterior import Sampled, draw
from laplace_sampling.predictive import ClassificationPrediction, RegressionPrediction
from laplace_sampling.priors import GaussianPrior, Prior, as_prior
from laplace_sampling.sampling import Draws, LinearModel, linear_model_mode
from laplace_sampling.saving import Posterior, encode, likelihood_of, prior_of, recipe_of_prior, restore, settings_of
from laplace_sampling.solvers import ConvergenceWarning, Minimum, Solver
from laplace_sampling.stochastic import SGD

__all__ = ["LinearisedLaplace", "NotFittedError"]

# Streams of one seed: what each set of draws is for. Those of samples count up from the third.
_EM_STREAM, _PROBE_STREAM, _SAMPLE_STREAM = 0, 1, 2
_PATH_STREAM = 2**20
# Probes for the evidence at one precision, and for a path: far below the fitted one determinants are known less well.
_EVIDENCE_PROBES, _PATH_PROBES, _EVIDENCE_ACCURACY = 16, 48, 2e-3

_TOLERANCE = 0.015


class NotFittedError(ValueError, AttributeError):
    """A method that needs a fitted posterior was called before `fit_hyperparameters`, `fit` or `load`."""


@dataclass(frozen=True)
class _Check:
    """What `diagnose` needs to know of the last fit."""

    sampled: Sampled
    minimum: Minimum
    residuals: Float[Tensor, " K"]
    tolerance: float
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
            an evidence path; `"svrg"`, preconditioned mini-batches, for many data; `"sgd"`, the same where a
            preconditioner does not fit or pay; `"ciq"`, samples by the inverse square root, for comparison; `"auto"`
            chooses between all but the last, and `print` tells why.
        num_samples: posterior samples for predictions, `K`.
        seed: of all randomness.
        solver: settings of `"sgd"`.
        max_memory: bytes that solvers may take for vectors of `P` numbers, `samples_` among them; half of what is free
            by default. Activations of the network come on top. Where it is short, samples are solved for in groups.

    Attributes:
        prior_precision_: `α`, `[G]`, one a group of the prior.
        noise_precision_: `1/σ²`, a scalar or `[C]`; `None` unless the likelihood is Gaussian.
        effective_dimension_: `γ`, `[G]`: how many directions of weight space the data determine.
        converged_: whether samples and mode, and hyperparameters if they were fitted, reached their tolerances.
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
        _check_choice("method", method, METHODS)
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
        self._plan: Plan | None = None
        self._solver: Solver | None = None
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
        tolerance: float = _TOLERANCE,
        num_samples: int = 16,
        precision_bounds: tuple[float, float] = (1e-8, 1e12),
        noise_bounds: tuple[float, float] = (1e-12, 1e12),
        progress: bool = True,
        callback: Callable[[EMStep], object] | None = None,
    ) -> "LinearisedLaplace":
        r"""Tune the prior precision, and the noise precision of a regression, by EM on samples; draw the posterior.

        No validation data are used. The loader may be shuffled; its batch size is what goes through the network
        at once, and does not change the result.

        Args:
            loader: of pairs `(x, y)`: a `DataLoader`, a dataset, or a list of batches, without random augmentation.
            max_steps: EM steps at most; a `ConvergenceWarning` tells if they were not enough.
            tolerance: relative error of predicted standard deviations, `τ`. Where the prior decides, they go with
                `α^{-1/2}`, so `log α` is found to `2τ` (and `log b` likewise): it stops when it changes by less, or is
                known so well. Samples are solved for to the same `τ`, as `Plan.solver` in `laplace_sampling.methods`
                derives. The noise of `K` samples, `1/√(2K)`, comes on top.
            num_samples: samples during EM (which `"cg"` needs for layer-wise priors only); the relative standard error
                of `γ` is about `√(2/(Kγ))`.
            precision_bounds: within which `α` is kept.
            noise_bounds: within which the noise precision is kept.
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
        model, data, plan = self._prepare(loader)
        prior = self._build_prior(model, plan)
        solver = self._make_solver(plan, model, prior, tolerance, None)
        settings = {
            "hessian_at": self.hessian_at,
            "tolerance": 2 * tolerance,
            "precision_bounds": precision_bounds,
            "noise_bounds": noise_bounds,
            "progress": progress,
            "callback": callback,
        }
        path: PathResult | None = None
        if isinstance(solver, BlockKrylov | Dense) and _has_path(model.likelihood, prior):
            path = fit_path(
                model,
                prior,
                self.seed,
                _PATH_STREAM,
                max_rounds=max_steps + 2,
                max_basis=solver.max_basis if isinstance(solver, BlockKrylov) else None,
                exact=isinstance(solver, Dense),
                **settings,
            )
            if path.full:
                # The basis was full before the curves were accurate: EM goes on from what they gave.
                model, prior, path = model.with_likelihood(path.likelihood), path.prior, None
        result: EMResult | PathResult
        if path is not None:
            result = path
        else:
            held = plan.em_samples(num_samples)
            if held < num_samples:
                plan = replace(plan, reason=f"{plan.reason}, and {held} samples in EM")
            draws = Draws(held, self.seed, _EM_STREAM)
            result = fit_em(model, prior, draws, plan.for_em(solver, held), max_steps=max_steps, **settings)
        problems = []
        if not result.converged:
            problems.append(
                f"`fit_hyperparameters` stopped after {len(result.history)} steps, before its tolerance: "
                f"prior precision went {[f'{s.prior_precision[0]:.3g}' for s in result.history]}. "
                "Raise `max_steps`, or `tolerance`."
            )
        at_bound = [
            name
            for name, alpha in zip(result.prior.names, result.prior.precision.tolist(), strict=True)
            if alpha in precision_bounds
        ]
        if at_bound:
            problems.append(
                f"`fit_hyperparameters` ended at one of precision_bounds={precision_bounds} for the groups {at_bound}: "
                "at the upper one the data show no effect of these weights, at the lower one the prior fades out. "
                "Check the data, or give other bounds."
            )
        if _noise_ended_at(result.likelihood, noise_bounds):
            at_bound.append("noise")
            problems.append(
                f"`fit_hyperparameters` ended at one of noise_bounds={noise_bounds} for the noise precision: at the "
                "upper one the linear model fits the targets exactly, at the lower one not at all. Check the units of "
                "the targets, give other bounds, or fix the noise (`Gaussian(b, learn=False)`)."
            )
        start = (result.mode / result.prior.scale)[None]
        self._draw_posterior(
            model.with_likelihood(result.likelihood),
            data,
            result.prior,
            plan,
            solver,
            start,
            result.history,
            progress,
            path=None if path is None else path.path,
            fitted=(result.converged, tuple(at_bound)),
            problems=problems,
        )
        return self

    @torch.inference_mode(False)
    def fit(
        self, loader: Iterable[Any], *, tolerance: float = _TOLERANCE, progress: bool = True
    ) -> "LinearisedLaplace":
        """The posterior at the prior and noise precision given to the constructor.

        Args:
            loader: as for `fit_hyperparameters`.
            tolerance: likewise.
            progress: show progress bars.
        """
        if not tolerance > 0:
            raise ValueError(f"`fit` needs a positive tolerance, got {tolerance}.")
        model, data, plan = self._prepare(loader)
        prior = self._build_prior(model, plan)
        solver = self._make_solver(plan, model, prior, tolerance, self.prior_precision)
        self._draw_posterior(model, data, prior, plan, solver, None, [], progress, problems=[])
        return self

    def _prepare(self, loader: Iterable[Any]) -> tuple[LinearModel, TrainingData, Plan]:
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
        plan = make_plan(self.method, features, self.num_samples, self.max_memory)
        if plan.method == "exact":
            features = DenseFeatures.of(features)
            f = f.double()
        offset = torch.zeros_like(f)
        if self.linear_model == "affine":
            offset = f - features.outputs(self.network.weights[None].to(features.dtype))[0]
        return LinearModel(features, offset, f, targets, self.likelihood), data, plan

    def _build_prior(self, model: LinearModel, plan: Plan) -> GaussianPrior:
        # At the mode B depends on α; the scale of a g-prior must not, so it is taken where all outputs are zero.
        at = model.network_outputs if self.hessian_at == "network" else torch.zeros_like(model.network_outputs)
        probes = Draws(getattr(self.prior, "num_probes", 1), self.seed, _PROBE_STREAM)
        noise = probes.noise(model.features.num_outputs)
        ggn = model.ggn(at)
        if plan.method != "exact":  # a diagonal takes rows of the Jacobian: no more of them than memory holds
            ggn = replace(ggn, features=model.features.in_chunks(int(plan.vectors / (4 * model.features.num_outputs))))
        return self.prior.build(ggn, self.network.layers(), self.prior_precision, noise)

    def _make_solver(
        self, plan: Plan, model: LinearModel, prior: GaussianPrior, tolerance: float, shift: float | None
    ) -> Solver:
        def operator() -> GGN:
            at = model.network_outputs if self.hessian_at == "network" else torch.zeros_like(model.network_outputs)
            ggn = model.ggn(at)
            scale = prior.scale.to(ggn.device, ggn.dtype)
            return replace(ggn, features=ScaledFeatures(ggn.features, scale))

        solver = plan.solver(tolerance, self.solver, self.seed)
        return plan.precondition(solver, operator, shift, self.num_samples, self.seed)

    def _draw_posterior(
        self,
        model: LinearModel,
        data: TrainingData,
        prior: GaussianPrior,
        plan: Plan,
        solver: Solver,
        mode: Tensor | None,
        history: list[EMStep],
        progress: bool,
        *,
        problems: list[str],
        path: EvidencePath | None = None,
        fitted: tuple[bool | None, tuple[str, ...]] = (None, ()),
    ) -> None:
        """Mode and samples at given hyperparameters; replaces what was fitted before, at the very end."""
        prior = prior.to(model.features.device, model.features.dtype)
        if isinstance(solver, SGD):  # these samples are kept, and have no warm start
            solver = replace(solver, epochs=2 * solver.epochs)
        minimum = linear_model_mode(model, prior, solver, mode, description="mode" if progress else None)
        theta = (minimum.value * prior.scale)[0]
        mode_outputs = model.outputs(theta[None])[0]
        at = mode_outputs if self.hessian_at == "mode" else model.network_outputs
        sampled = draw(
            model.ggn(at),
            prior,
            Draws(self.num_samples, self.seed, _SAMPLE_STREAM),
            None if plan.method == "ciq" else solver,
            rows=plan.rows(self.num_samples),
            dtype=self.network.dtype,
            description=f"{self.num_samples} samples" if progress else None,
        )
        residuals, tolerance = plan.judge(sampled, solver)
        if not (sampled.converged and minimum.converged):
            problems.append(
                f"The posterior has not converged: residual {float(residuals.max()):.2g} of the samples (tolerance "
                f"{tolerance:.2g}), {minimum.residual:.2g} of the mode. {advice(plan.method)}"
            )
        gamma, gamma_se = sampled.effective_dimension()
        self._posterior = Posterior(
            prior=prior,
            likelihood=model.likelihood,
            samples=sampled.samples,
            mode=theta.to(self.network.dtype),
            effective_dimension=gamma,
            effective_dimension_se=gamma_se,
            history=history,
            rows=data.batch_size,
            fingerprint=self.network.fingerprint(),
            converged=sampled.converged and minimum.converged and fitted[0] is not False,
        )
        self._model, self._mode_outputs, self._drawn, self._path = model, mode_outputs, 0, path
        self._plan, self._solver = plan, solver
        self._check = _Check(
            sampled=replace(sampled, samples=sampled.samples[:0].clone()),
            minimum=replace(minimum, value=minimum.value[:0].clone()),
            residuals=residuals,
            tolerance=tolerance,
            hyperparameters_converged=fitted[0],
            at_bounds=fitted[1],
        )
        if problems:
            warnings.warn(
                " ".join(problems),
                ConvergenceWarning,
                stacklevel=4,  # the public method is behind the wrapper of `inference_mode`
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
        plan, solver = self._plan, self._solver
        assert plan is not None
        assert solver is not None
        sampled = draw(
            model.ggn(at),
            posterior.prior,
            draws,
            None if plan.method == "ciq" else solver,
            rows=plan.rows(self.num_samples),
            dtype=self.network.dtype,
        )
        if not sampled.converged:
            residuals, tolerance = plan.judge(sampled, solver)
            warnings.warn(
                f"The samples have not converged: residual {float(residuals.max()):.2g}, tolerance {tolerance:.2g}. "
                f"{advice(plan.method)}",
                ConvergenceWarning,
                stacklevel=3,
            )
        return sampled.samples

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
        problems = []
        if self._check is not None and not self._check.minimum.converged:
            problems.append(f"the mode, whose residual is {self._check.minimum.residual:.2g}, has not converged")
        if isinstance(model.features, DenseFeatures):
            path = exact_path(model, prior, mode, hessian_at=self.hessian_at)
            _warn_of_evidence(call, problems)
            return path, alpha
        assert self._plan is not None
        max_basis = self._plan.max_basis
        wished = _EVIDENCE_PROBES if decades is None else _PATH_PROBES
        path, _ = evidence_path(
            model,
            prior,
            Draws(max(1, min(wished, max_basis // 4)), self.seed, _PATH_STREAM),
            mode,
            hessian_at=self.hessian_at,
            accuracy=_EVIDENCE_ACCURACY,
            decades=0.0 if decades is None else decades,
            max_basis=max_basis,
        )
        ends = alpha * torch.logspace(-(decades or 0.0), decades or 0.0, 3, dtype=torch.float64)
        change = max(path.remaining_of_evidence(ends))
        if not change < _EVIDENCE_ACCURACY:
            problems.append(
                f"its last iteration changed it by {100 * change:.2g} % when memory was full; give more `max_memory`"
            )
        _warn_of_evidence(call, problems)
        return path, alpha

    def diagnose(self) -> Diagnosis:
        """Whether solves, samples and hyperparameters of the last fit are right; `print` it for one page in words.

        The energies of the samples are tested against their distributions; see `laplace_sampling.diagnostics`.
        """
        posterior, model, check = self._fitted("diagnose"), self._model, self._check
        plan = self._plan
        if model is None or check is None or plan is None:
            raise NotFittedError("`diagnose` needs the fit itself, which a loaded posterior does not have: call `fit`.")
        alpha = float(posterior.prior.spread().double().log().mean().exp())
        reference = None if self._path is None else torch.tensor([alpha], dtype=torch.float64)
        moments: tuple[float, float, float] | None = None
        if self._path is not None and reference is not None:
            gamma, error = self._path.effective_dimension(reference)
            moments = float(gamma), 2 * float(self._path.squared_dimension(reference)), float(error)
        f = model.network_outputs
        linear = model.features.outputs(self.network.weights[None].to(model.features.dtype))[0]
        energies = check.sampled.data_energies.cpu()
        classes = isinstance(model.likelihood, Categorical)
        return Diagnosis(
            num_samples=len(posterior.samples),
            num_parameters=self.network.num_parameters,
            num_data=model.features.num_data,
            num_outputs=model.features.num_outputs,
            linear_model=self.linear_model,
            method=plan.method,
            reason=plan.reason,
            residuals=check.residuals.cpu(),
            tolerance=check.tolerance,
            solver_converged=check.sampled.converged,
            mode_residual=check.minimum.residual,
            mode_converged=check.minimum.converged,
            hyperparameters_converged=check.hyperparameters_converged,
            prior_precision=dict(zip(posterior.prior.names, posterior.prior.precision.tolist(), strict=True)),
            at_bounds=check.at_bounds,
            effective_dimension=float(posterior.effective_dimension.sum()),
            effective_dimension_se=float(posterior.effective_dimension_se.square().sum().sqrt()),
            gamma_reference=None if moments is None else moments[0],
            gamma_reference_se=None if moments is None else moments[2],
            total_test=chi_squared_test(check.sampled.energies.cpu(), self.network.num_parameters),
            data_test=_data_test(energies, moments),
            offset=float((linear - f).norm() / f.norm()),
            num_floored=posterior.prior.num_floored,
            passes=check.sampled.passes + check.minimum.passes + sum(step.passes for step in posterior.history),
            max_rank=f.shape[0] * (f.shape[1] - 1) if classes else None,
        )

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
    def converged_(self) -> bool:
        return self._fitted("converged_").converged

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
        if self._plan is not None:
            head += f" → {self._plan.method!r}: {self._plan.reason}"
        alpha = ", ".join(f"{name}: {float(a):.3g}" for name, a in zip(p.prior.names, p.prior.precision, strict=True))
        floored = f", {p.prior.num_floored} weights floored" if p.prior.num_floored else ""
        return (
            head
            + f", prior_precision_={{{alpha}}}, effective_dimension_={float(p.effective_dimension.sum()):.1f}{floored})"
        )

    def __str__(self) -> str:
        """As `repr`, and the time of products if it was measured, which is not the same in two runs."""
        cost = None if self._plan is None else self._plan.cost
        if cost is None or self._posterior is None:
            return repr(self)
        return f"{repr(self)[:-1]}, a pass of products takes about {cost.seconds:.1g} s)"

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
        self._model = self._mode_outputs = self._check = self._path = self._plan = self._solver = None

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


def _data_test(energies: Tensor, moments: tuple[float, float, float] | None) -> TestResult | None:
    if moments is not None:
        return data_energy_test(energies, *moments)
    return data_energy_test(energies) if len(energies) > 2 else None  # the shape of two numbers is nothing


def _noise_ended_at(likelihood: Likelihood, bounds: tuple[float, float]) -> bool:
    if not (isinstance(likelihood, Gaussian) and likelihood.learn):
        return False
    return any(b in bounds for b in torch.as_tensor(likelihood.noise_precision).reshape(-1).tolist())


def _warn_of_evidence(call: str, problems: list[str]) -> None:
    if problems:
        warnings.warn(f"`{call}` is inaccurate: {'; '.join(problems)}.", ConvergenceWarning, stacklevel=5)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is not known; use one of {list(choices)}.")
