"""`LinearisedLaplace`: error bars for a trained network."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.data.training_data import Unpack
from laplace_sampling.evidence.curves import EvidenceCurves, EvidencePath, MarginalLikelihood
from laplace_sampling.evidence.em import EMStep
from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.held_out import HeldOut, OnTrainingData
from laplace_sampling.likelihoods.composite import MultiTask
from laplace_sampling.likelihoods.likelihood import Gaussian, Likelihood, as_likelihood
from laplace_sampling.linear_model.priors import Prior, as_prior
from laplace_sampling.linear_model.sampling import Draws
from laplace_sampling.linear_model.tangent_model import Observation, TangentModel
from laplace_sampling.methods.fits import SAMPLE_STREAM, Fit, Tuned, Tuning
from laplace_sampling.methods.plan import METHODS
from laplace_sampling.methods.solver_fit import fit_by_solver, make_solver, tune_by_solver
from laplace_sampling.methods.tasks import DataArguments, exact_tensors, fit_kind_of, gram_fit_of, prepare, restore_fit
from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.networks.precision import solving
from laplace_sampling.networks.random_weights import Subset, linearise
from laplace_sampling.predict import check_inputs, predict
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.diagnosis import Diagnosis, advice
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.predictions.prediction import Prediction
from laplace_sampling.saving import Posterior, arguments_of, check_observed, encode, recipe_of, restore, settings_of
from laplace_sampling.solvers.sgd import SGD
from laplace_sampling.solvers.solver import ConvergenceWarning

__all__ = ["LinearisedLaplace", "NotFittedError"]

_TOLERANCE = 0.015


class NotFittedError(ValueError, AttributeError):
    """A method that needs a fitted posterior was called before `fit_hyperparameters`, `fit` or `load`."""


class LinearisedLaplace:
    r"""Linearised Laplace approximation of a trained network, by posterior samples of its tangent model.

    The network `f(w̄, x)` is replaced, for uncertainty only, by the Bayesian linear model `h(θ, x)` with features
    `φ(x) = ∂f/∂w` at `w̄`; its Gaussian posterior has precision `H = M + A`, `M = Σᵢ φᵢᵀBᵢφᵢ`. The mean of a
    prediction is the network's own output; its error bars are those of samples `φ(x) ζ_k`, `ζ_k ~ N(0, H⁻¹)`
    (Antorán, Padhy et al., ICLR 2023).

    Args:
        model: the trained network. It is held and never changed.
        likelihood: `"regression"` (Gaussian), `"classification"` (categorical), `"binary"` (Bernoulli, one or several
            outputs), `"poisson"` (counts), `"heteroscedastic"` (means and log variances), a `Likelihood`, or a
            dictionary of these, one for each head of a network that returns a dictionary.
        prior: `"isotropic"`, `"g-prior"`, which does not depend on the scale of weights before a normalisation,
            `"layerwise"`, or a `Prior`.
        prior_precision: starting value of `α`, in units of the sum of losses over the data (a weight decay `λ` with
            a mean loss is `α = λN`).
        noise_precision: starting value of `1/σ²` for `"regression"`.
        parameters: which weights are random: `"last_layer"`; names or globs, with a leading `"!"` those that are not; a
            predicate; masks by name, as of `largest_variance`; all trainable ones by default.
        linear_model: `"affine"`, `h = f + φ(θ − w̄)`; `"homogeneous"`, `h = φθ`; `"auto"`, affine for a Gaussian
            likelihood and homogeneous for the others.
        hessian_at: where `B` is evaluated: `"network"`, at `f(w̄, x)`; `"mode"`, at `h(θ̄, x)`; `"auto"` is the
            mode. (For a Gaussian likelihood `B` is constant.)
        noise_at: what the noise of a regression, where it is learnt, has to explain: `"network"`, what the network
            leaves of the targets, `b = (N·C − γ)/Σ(y − f)²`; `"mode"`, what the linear model leaves at its mode, which
            is the noise of largest evidence. `"auto"` is the network, whose output is the mean of predictions: where
            it is not at the minimum of its loss, the linear model fits the data better, and says too little noise.
        scale: factor of the posterior covariance in predictions. `"auto"`: for a classification, after
            `fit_hyperparameters`, that under which the training labels are likeliest when each datum is left out
            (`calibration.leave_one_out_scale`), so that a network that is not overconfident is not made worse; else 1.
        method: `"exact"`, dense algebra, for small problems: in observation space where `N·C < P` and the prior has one
            precision, else in weight space; `"dual"`, conjugate gradients in observation space, for regressions;
            `"cg"`, block Krylov on all data, and hyperparameters from an evidence path; `"svrg"`, preconditioned
            mini-batches, for many data; `"sgd"`, the same where a preconditioner does not fit or pay; `"ciq"`, samples
            by the inverse square root, and `"diagonal"` and `"kfac"`, which leave out correlations, for comparison;
            `"auto"` chooses between all but the last three, and `print` tells why.
        num_samples: posterior samples for predictions, `K`.
        seed: of all randomness.
        solver: settings of `"sgd"` (`SGD`) or of `"dual"` (`DualCG`).
        max_memory: bytes that solvers may take for vectors of `P` numbers, `samples_` among them; half of what is free
            by default. Where it is short, samples are solved for in groups. Activations of the network may take as much
            again, 64 MiB at least: where the loader's batches are larger, they go through it in pieces, which are
            halved where memory does not hold them all the same.
        observe: `T` of measurements `y = T f(x) + noise`, of the (flattened) outputs of each datum: a matrix `[m, C]`,
            a `LinearOperator`, or a pair of functions, of a vector of outputs and of one of measurements, the adjoint
            of each other. Targets are then `[N, m]`.
        autocast: `torch.bfloat16` or `torch.float16`, to which `torch.autocast` lowers operations of the network inside
            Jacobian products, to about 1 %; sums over data, solvers and samples stay in float32, and so does the
            network's own output.
        compile: whether Jacobian products are compiled by `torch.compile` (or the name of one of its backends), each
            shape of batches and number of vectors when it comes for the fourth time: small networks are then up to a
            few times faster, after tens of seconds for each. A program is first compared with the product that is not
            compiled; where it is wrong or fails, a notice says so, and nothing more is compiled.

    Raises:
        ValueError: for settings that are not known or do not go together.

    Attributes:
        prior_precision_: `α`, `[G]`, one a group of the prior.
        prior_scale_: `s`, `[P]`, prior standard deviations of the weights at `α = 1`; ones but for a g-prior.
        noise_precision_: `1/σ²` of predictions, a scalar or `[C]`; `None` unless the likelihood is Gaussian.
        effective_dimension_: `γ`, `[G]`: how many directions of weight space the data determine.
        converged_: whether samples and mode, and hyperparameters if they were fitted, reached their tolerances.
        samples_: zero-mean posterior samples `ζ`, `[K, P]`.
        mode_: mode `θ̄` of the linear model, `[P]`.
        scale_, temperature_: predictions are those of samples `√scale_ · ζ`; outputs are divided by the temperature, 1
            without validation data.
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
        likelihood: str | Likelihood | Mapping[str, str | Likelihood],
        *,
        prior: str | Prior = "isotropic",
        prior_precision: float = 1.0,
        noise_precision: float | Tensor = 1.0,
        parameters: Subset = None,
        linear_model: str = "auto",
        hessian_at: str = "auto",
        noise_at: str = "auto",
        scale: float | str = "auto",
        method: str = "auto",
        num_samples: int = 64,
        seed: int = 0,
        solver: SGD | DualCG | None = None,
        max_memory: float | None = None,
        observe: Observation | None = None,
        autocast: torch.dtype | None = None,
        compile: bool | str = False,
    ) -> None:
        _check_choice("linear_model", linear_model, ("auto", "affine", "homogeneous"))
        _check_choice("hessian_at", hessian_at, ("auto", "network", "mode"))
        _check_choice("noise_at", noise_at, ("auto", "network", "mode"))
        _check_choice("method", method, METHODS)
        if scale != "auto" and not (isinstance(scale, float | int) and 0 < scale < math.inf):
            raise ValueError(f'`scale` must be a positive number or "auto", but is {scale!r}.')
        if max_memory is not None and not max_memory > 0:
            raise ValueError(f"`max_memory` must be a positive number of bytes, but is {max_memory}.")
        if not 0 < prior_precision < math.inf:
            raise ValueError(f"`prior_precision` must be positive and finite, but is {prior_precision}.")
        if num_samples < 2:
            raise ValueError(f"`num_samples` must be at least 2, but is {num_samples}.")
        if seed < 0:
            raise ValueError(f"`seed` must not be negative, but is {seed}.")
        self.network = linearise(model, parameters, autocast=autocast, compile=compile)
        if isinstance(likelihood, Mapping):
            likelihood = MultiTask(likelihood)
        self.likelihood = as_likelihood(likelihood, noise_precision)
        self.prior = as_prior(prior)
        self.prior_precision = float(prior_precision)
        gaussian = isinstance(self.likelihood, Gaussian)
        self.noise_at = noise_at if noise_at != "auto" else "network"
        if isinstance(self.likelihood, Gaussian):
            self.likelihood = replace(self.likelihood, noise_at=self.noise_at)
        self.linear_model = linear_model if linear_model != "auto" else "affine" if gaussian else "homogeneous"
        self.hessian_at = hessian_at if hessian_at != "auto" else "mode"
        self.scale = scale
        self.method = method
        self.num_samples = num_samples
        self.seed = seed
        self.solver = solver
        if not gaussian and (method == "dual" or observe is not None):
            what = 'method="dual"' if method == "dual" else "observe=T, `y = T f(x) + noise`,"
            raise ValueError(
                f"{what} is for regression with a Gaussian likelihood, but the likelihood is {self.likelihood.name!r}; "
                'use method="exact", "cg" or "sgd", without `observe`.'
            )
        _check_solver(solver, method)
        self.max_memory = max_memory
        self.observe = observe
        self._posterior: Posterior | None = None
        self._fit: Fit | None = None
        self._unequal_noise = False
        self._tangent: TangentModel | None = None
        self._drawn = 0

    # Fitting ---------------------------------------------------------------------------------------------------

    @solving()
    def fit_hyperparameters(
        self,
        loader: Iterable[Any],
        *,
        max_steps: int = 10,
        tolerance: float = _TOLERANCE,
        num_samples: int = 16,
        precision_bounds: tuple[float, float] = (1e-8, 1e12),
        noise_bounds: tuple[float, float] = (1e-12, 1e12),
        noise_variances: Tensor | None = None,
        weights: Tensor | Sequence[float] | None = None,
        unpack: Unpack | None = None,
        num_data: int | None = None,
        val_loader: Iterable[Any] | None = None,
        progress: bool = True,
        callback: Callable[[EMStep], object] | None = None,
    ) -> "LinearisedLaplace":
        r"""Tune the prior precision, and the noise precision of a regression, by EM on samples; draw the posterior.

        No validation data are needed. The loader may be shuffled; its batch size is what goes through the network
        at once, and does not change the result.

        Args:
            loader: of pairs `(x, y)`: a `DataLoader`, a dataset, or a list of batches, without random augmentation. `x`
                is a tensor, a tuple of positional or a dictionary of keyword arguments of the model. Mappings with
                `labels` are taken as well.
            max_steps: EM steps at most; a `ConvergenceWarning` tells if they were not enough.
            tolerance: relative error of predicted standard deviations, `τ`. Where the prior decides, they go with
                `α^{-1/2}`, so `log α` is found to `2τ` (and `log b` likewise): it stops when it changes by less, or is
                known so well. Samples are solved for to the same `τ`, as `Plan.solver` derives. The noise of `K`
                samples, `1/√(2K)`, comes on top.
            num_samples: samples during EM (which `"cg"` needs for layer-wise priors only); the relative standard error
                of `γ` is about `√(2/(Kγ))`.
            precision_bounds: within which `α` is kept.
            noise_bounds: within which the noise precision is kept.
            noise_variances: `R` of heteroscedastic noise, `[N]` or one for each output, `[N, ...]`, in the units of the
                targets squared and in the order of the dataset, whatever order the loader has. The noise variance of a
                datum is `R/b`, with `b` learnt; for variances that are known, use `Gaussian(1.0, learn=False)`.
            weights: `[N]`, in the order of the dataset: a datum of weight 2 counts as two in the sum of losses. For a
                regression they are `1/noise_variances`.
            unpack: for other batches, `batch -> (inputs, targets)`.
            num_data: of an `IterableDataset`, which is read in its order; the order must repeat.
            val_loader: data that the network was not trained on, of the same form. At no further solve they choose the
                scale of the posterior, `scale_`, and with it, in a classification, a temperature of the outputs, in a
                regression the noise precision: those under which they are likeliest
                (`calibration.held_out_classification`, `calibration.held_out_regression`).
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
        if val_loader is not None and (noise_variances is not None or self.observe is not None):
            raise ValueError("`val_loader` goes with neither `noise_variances` nor `observe`; leave it out.")
        data = DataArguments(loader, noise_variances, weights, unpack, num_data)
        tangent, task = prepare(self, data, progress)
        held_out = None
        if val_loader is not None:
            held_out = HeldOut.read(val_loader, self.network, self.likelihood, unpack)
        tuning = Tuning(
            max_steps, tolerance, num_samples, precision_bounds, noise_bounds, _shifted(callback, tangent.log_scale)
        )
        if task.plan.in_observation_space:
            fit: Fit = gram_fit_of(task).tune(task, tuning)
        else:
            solver = make_solver(task, tolerance, None)
            fit = fit_by_solver(*tune_by_solver(task, tuning, solver), solver, fit_kind_of(task))
        posterior, trained = self._posterior_of(fit, tangent), OnTrainingData.of(fit, tangent.in_order)
        if held_out is not None:
            posterior = held_out.calibrated(self.network, posterior, fit)
        elif self.scale == "auto":
            posterior = replace(posterior, calibration=trained.calibration())
        self._unequal_noise = noise_variances is not None
        self._adopt(posterior, fit, tangent, trained.problems(posterior.calibration))
        return self

    @solving()
    def fit(
        self,
        loader: Iterable[Any],
        *,
        tolerance: float = _TOLERANCE,
        noise_variances: Tensor | None = None,
        weights: Tensor | Sequence[float] | None = None,
        unpack: Unpack | None = None,
        num_data: int | None = None,
        progress: bool = True,
    ) -> "LinearisedLaplace":
        """The posterior at the prior and noise precision given to the constructor.

        Args:
            loader: as for `fit_hyperparameters`.
            tolerance: likewise.
            noise_variances: likewise.
            weights: likewise.
            unpack: likewise.
            num_data: likewise.
            progress: show progress bars.
        """
        if not tolerance > 0:
            raise ValueError(f"`fit` needs a positive tolerance, got {tolerance}.")
        data = DataArguments(loader, noise_variances, weights, unpack, num_data)
        tangent, task = prepare(self, data, progress)
        if task.plan.in_observation_space:
            fit: Fit = gram_fit_of(task).of(task)
        else:
            solver = make_solver(task, tolerance, self.prior_precision)
            fit = fit_by_solver(task, Tuned(), solver, fit_kind_of(task))
        self._unequal_noise = noise_variances is not None
        self._adopt(self._posterior_of(fit, tangent), fit, tangent)
        return self

    @solving()
    def calibrate(
        self, val_loader: Iterable[Any], *, unpack: Unpack | None = None, num_data: int | None = None
    ) -> "LinearisedLaplace":
        """The fitted or loaded posterior with the scale that held-out data choose, without another solve.

        Sets `scale_`, and with it in a classification the temperature of the outputs, `temperature_`, in a regression
        the noise precision, `noise_precision_`, also one that was given, as `fit_hyperparameters(..., val_loader=...)`
        does; whatever scale and temperature there were are replaced. Samples and prior stay.

        Args:
            val_loader: data that the network was not trained on, of the form of the training data. Those of a
                regression have the noise of data of weight one.
            unpack: as for `fit_hyperparameters`.
            num_data: of an `IterableDataset`, likewise.

        Raises:
            NotFittedError: before a fit.
            TypeError, ValueError: as of `val_loader` in `fit_hyperparameters`; after a fit with `noise_variances`; if
                the weights of the model have changed since the fit. The posterior stays what it was.
        """
        posterior = self._fitted("calibrate")
        self._check_fingerprint(posterior.fingerprint, "calibrate")
        if self.observe is not None:
            raise ValueError("`calibrate(val_loader)` does not go with `observe`: there is no scale for measurements.")
        if self._unequal_noise:
            raise ValueError("`calibrate(val_loader)` does not go with `noise_variances`, which the fit was given.")
        held_out = HeldOut.read(val_loader, self.network, self.likelihood, unpack, num_data)
        self._posterior = held_out.calibrated(self.network, posterior, self._fit)
        return self

    def _posterior_of(self, fit: Fit, tangent: TangentModel) -> Posterior:
        assert fit.sampled is not None
        gamma, gamma_se = fit.sampled.effective_dimension()
        shift = tangent.log_scale
        history = [step.shifted(shift) for step in fit.tuned.history]
        return Posterior(
            prior=fit.prior,
            likelihood=fit.model.likelihood.unweighted,
            samples=fit.sampled.samples,
            mode=fit.mode.to(self.network.dtype),
            effective_dimension=gamma,
            effective_dimension_se=gamma_se,
            history=history,
            rows=tangent.data.batch_size,
            fingerprint=self.network.fingerprint(),
            converged=fit.converged,
            exact=exact_tensors(fit, tangent),
            calibration=Calibration(1.0 if isinstance(self.scale, str) else float(self.scale)),
        )

    def _adopt(self, posterior: Posterior, fit: Fit, tangent: TangentModel, problems: Sequence[str] = ()) -> None:
        """Replace what was fitted before, at the very end."""
        self._posterior = posterior
        self._fit, self._tangent, self._drawn = fit.light(), tangent, 0
        if problems := [*fit.problems, *problems]:
            warnings.warn(
                " ".join(problems),
                ConvergenceWarning,
                stacklevel=4,  # the public method is behind the wrapper of `inference_mode`
            )

    # Using -----------------------------------------------------------------------------------------------------

    @solving()
    def predict(
        self,
        x: Any,
        *,
        num_samples: int | None = None,
        noise_variances: Tensor | None = None,
        observed: bool = False,
    ) -> Prediction:
        r"""Predictions with error bars: `f(w̄, x)` and `φ(x) ζ_k`, by `K` JVPs a datum and no VJP.

        After an exact fit in observation space, variances and covariances are `φ(x) H⁻¹ φ(x)ᵀ` itself, computed when
        they are asked for, by `C` VJPs a datum; samples are there as well.

        Args:
            x: inputs as the model takes them, `[N, ...]`: a tensor, or a tuple or dictionary of arguments.
            num_samples: use only the first so many of `samples_`.
            noise_variances: `R` at these inputs, `[N]` or `[N, ...]`, if the noise is not the same everywhere.
            observed: predict the measurements `T f(x)` rather than the outputs, after a fit with `observe=T`.

        Raises:
            NotFittedError: before a fit.
            ValueError: for NaN in `x`, or if the weights of the model have changed since the fit.
        """
        posterior = self._fitted("predict")
        check_inputs(x, num_samples, len(posterior.samples))
        self._check_fingerprint(posterior.fingerprint, "predict")
        if (observed and self.observe is None) or (noise_variances is not None and self.noise_precision_ is None):
            raise ValueError(
                "`predict(observed=True)` needs `observe=T` in the constructor, and `noise_variances` a regression."
            )
        return predict(
            self.network,
            posterior,
            self._fit,
            x,
            samples=posterior.samples[:num_samples],
            noise_variances=noise_variances,
            observation=self.observe,
            observed=observed,
            layout=None if self._tangent is None else self._tangent.layout,
            check=lambda: self._check_fingerprint(posterior.fingerprint, "predict"),
        )

    @solving()
    def sample(self, num_samples: int) -> Float[Tensor, "K P"]:
        """New zero-mean posterior samples `ζ ~ N(0, H⁻¹)`, independent of `samples_` and of earlier calls."""
        posterior = self._fitted("sample")
        if num_samples < 1:
            raise ValueError(f"`sample(num_samples)` needs at least 1, got {num_samples}.")
        if self._fit is None:
            raise NotFittedError(
                "`sample` needs the training data, which a loaded posterior does not have: call `fit(loader)`, or use "
                "the samples that were saved, `samples_`."
            )
        self._check_fingerprint(posterior.fingerprint, "sample")
        self._drawn += 1
        sampled = self._fit.draw(Draws(num_samples, self.seed, SAMPLE_STREAM + self._drawn))
        if not sampled.converged:
            warnings.warn(
                f"{self._fit.unconverged(sampled)} {advice(self._fit.plan.method)}",
                ConvergenceWarning,
                stacklevel=3,
            )
        return sampled.samples

    @solving()
    def log_marginal_likelihood(self) -> MarginalLikelihood:
        r"""`log p(y)` of the linear model at the fitted hyperparameters, a sum over the data, with its standard error.

        `−Σ_i ℓ(y_i, h(θ̄, x_i)) − ½ θ̄ᵀAθ̄ − ½ log|I + A⁻¹M|`: the log determinant exactly from the exact method, else by
        stochastic Lanczos quadrature. For a loss that is not quadratic it is Laplace's approximation, and with
        `hessian_at="mode"` no guide to the prior precision, as the curvature moves with it. What validation data
        chose (`scale_`, and the noise of predictions) has no part in it.
        """
        path, alpha, shift = self._evidence("log_marginal_likelihood")
        return MarginalLikelihood.of(path, alpha).shifted(shift)

    @solving()
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
        path, alpha, shift = self._evidence("evidence_path", decades)
        grid = alpha * torch.logspace(-decades, decades, num, dtype=torch.float64)
        return EvidenceCurves.of(path, grid).shifted(shift)

    def _evidence(self, call: str, decades: float | None = None) -> tuple[EvidencePath, float, float]:
        fit, tangent = self._with_data(call)
        path, problems = fit.evidence(decades)
        if problems:
            warnings.warn(f"`{call}` is inaccurate: {'; '.join(problems)}.", ConvergenceWarning, stacklevel=4)
        return path, fit.alpha, tangent.log_scale

    @solving()
    def leave_one_out(self) -> LeaveOneOut:
        r"""Each training datum predicted from all others, noise included, at the fitted hyperparameters.

        `log_prob`, `[N]`, is `log p(y_i | y_{−i})`, joint over the outputs of a datum; `mean` and `covariance` are
        those of the *linear model*, in the units of the targets. From the decomposition of an exact fit, without
        fitting again (Rasmussen & Williams 2006, eq. 5.10–5.12); weights and features stay those of all data.

        Raises:
            ValueError: if the fit is not by the exact method.
        """
        fit, tangent = self._with_data("leave_one_out")
        found = fit.leave_one_out()
        return found if tangent.weights is None else found.scaled(1 / tangent.weights)

    def _with_data(self, call: str) -> tuple[Fit, TangentModel]:
        posterior = self._fitted(call)
        if self._fit is None or self._tangent is None:
            raise NotFittedError(
                f"`{call}` needs the training data, which a loaded posterior does not have: call `fit(loader)`."
            )
        self._check_fingerprint(posterior.fingerprint, call)
        return self._fit, self._tangent

    def diagnose(self) -> Diagnosis:
        """Whether solves, samples and hyperparameters of the last fit are right; `print` it for one page in words.

        The energies of the samples are tested against their distributions; see `predictions.energy_tests`.
        """
        self._fitted("diagnose")
        if self._fit is None or self._fit.sampled is None:
            raise NotFittedError("`diagnose` needs the fit itself, which a loaded posterior does not have: call `fit`.")
        return self._fit.diagnosis(self.network.weights, self.linear_model)

    @property
    def prior_precision_(self) -> Float[Tensor, " G"]:
        return self._fitted("prior_precision_").prior.precision

    @property
    def prior_scale_(self) -> Float[Tensor, " P"]:
        return self._fitted("prior_scale_").prior.scale

    @property
    def noise_precision_(self) -> Tensor | None:
        posterior = self._fitted("noise_precision_")
        likelihood = posterior.calibration.likelihood(posterior.likelihood)
        return torch.as_tensor(likelihood.noise_precision) if isinstance(likelihood, Gaussian) else None

    @property
    def effective_dimension_(self) -> Float[Tensor, " G"]:
        return self._fitted("effective_dimension_").effective_dimension

    @property
    def scale_(self) -> float:
        return self._fitted("scale_").calibration.scale

    @property
    def temperature_(self) -> float:
        return self._fitted("temperature_").calibration.temperature

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
        if self._fit is not None:
            head += f" → {self._fit.plan.method!r}: {self._fit.plan.reason}"
        alpha = ", ".join(f"{name}: {float(a):.3g}" for name, a in zip(p.prior.names, p.prior.precision, strict=True))
        floored = f", {p.prior.num_floored} weights floored" if p.prior.num_floored else ""
        return (
            head
            + f", prior_precision_={{{alpha}}}, effective_dimension_={float(p.effective_dimension.sum()):.1f}{floored})"
        )

    def __str__(self) -> str:
        """As `repr`, and the time of products if it was measured, which is not the same in two runs."""
        cost = None if self._fit is None else self._fit.plan.cost
        if cost is None or self._posterior is None:
            return repr(self)
        return f"{repr(self)[:-1]}, a pass of products takes about {cost.seconds:.1g} s)"

    # Keeping ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All that predictions need, as tensors only: loads with `torch.load(..., weights_only=True)`."""
        settings = {
            "linear_model": self.linear_model,
            "hessian_at": self.hessian_at,
            "parameters": self.network.selection,
            "unequal_noise": self._unequal_noise,
            "recipe": recipe_of(self),
        }
        return encode(self._fitted("state_dict"), settings)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a posterior from `state_dict`.

        Raises:
            ValueError: if the state is not of this model's weights, of another likelihood or another choice of
                parameters, or incomplete; what was fitted before is kept.
        """
        network = self.network
        if isinstance(network, LastLayer):
            network.take_over(settings_of(state)["parameters"])
        posterior = restore(state, network.selection, self.likelihood, network.num_parameters, network.device)
        self._check_fingerprint(posterior.fingerprint, "load_state_dict")
        settings = settings_of(state)
        check_observed(settings, self.observe is not None)
        before = self.linear_model, self.hessian_at
        self.linear_model, self.hessian_at = settings["linear_model"], settings["hessian_at"]
        try:
            self._fit, self._tangent = restore_fit(self, posterior)
        except Exception:
            self.linear_model, self.hessian_at = before
            raise
        self._posterior, self._unequal_noise = posterior, settings.get("unequal_noise", False)

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
        observe: Observation | None = None,
    ) -> "LinearisedLaplace":
        """Read what `save` wrote, for the same trained network; settings are those of the saved object.

        Args:
            path: of the file.
            model: the network, with the weights that it had at the fit.
            likelihood: needed only if it was not one of the library's own.
            prior: likewise.
            observe: `T`, needed if the saved posterior was fitted to measurements.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        settings = settings_of(state)
        arguments = arguments_of(settings, likelihood, prior)
        la = cls(model, **arguments, observe=observe)
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
        held, now = None if self._posterior is None else self._posterior.samples.device, self.network.device
        if held not in (None, now) and call != "load_state_dict":
            raise ValueError(
                f"`{call}`: the model is on {now}, but was on {held} at the fit. Move it back; or `save`, and `load` "
                "with the model where it is now; or fit again."
            )
        if not torch.equal(fingerprint.cpu(), self.network.fingerprint()):
            raise ValueError(
                f"`{call}`: the weights or buffers of the model are not those of the fit, so its error bars do not "
                "apply. Load the weights that the model had then, or fit again."
            )


def _shifted(callback: Callable[[EMStep], object] | None, shift: float) -> Callable[[EMStep], object] | None:
    """With losses of the targets in place of those of the model."""
    if callback is None or shift == 0:
        return callback
    return lambda step: callback(step.shifted(shift))


def _check_solver(solver: SGD | DualCG | None, method: str) -> None:
    """Settings of one method's solver are not silently left out by another."""
    methods = {SGD: "sgd", DualCG: "dual"}
    if solver is not None and type(solver) not in methods:
        raise TypeError(f"`solver` must be an SGD or a DualCG, but is a {type(solver).__name__}.")
    if solver is not None and method not in ("auto", methods[type(solver)]):
        raise ValueError(
            f"`solver={type(solver).__name__}(...)` is for method={methods[type(solver)]!r}, but the method is "
            f"{method!r}; leave out one of them."
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is not known; use one of {list(choices)}.")
