"""`LinearisedLaplace`: error bars for a trained network."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from laplace_sampling.calibrated import CalibratedModel, calibrated
from laplace_sampling.checkpoint import Checkpoint, FilePath
from laplace_sampling.criterion import with_selection
from laplace_sampling.data.training_data import Unpack
from laplace_sampling.evidence.step import Step
from laplace_sampling.fitted import NotFittedError
from laplace_sampling.fitting import fitting
from laplace_sampling.held_out import HeldOut, check_calibration
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.methods.fit import Tuned
from laplace_sampling.methods.method import Method, Tuning
from laplace_sampling.networks.random_weights import Subset
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.on_training_data import calibration_of, held_out_problems
from laplace_sampling.planning import PlannedModel
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import check_options, checked_inputs, predict, samples_for
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.prediction import Prediction, RegressionPrediction
from laplace_sampling.preparation import prepare
from laplace_sampling.production import ProductionModel
from laplace_sampling.saving import SavableModel
from laplace_sampling.scored import ScoredModel
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.checks import check_positive

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LinearisedLaplace", "NotFittedError"]

_TOLERANCE = 0.015


class LinearisedLaplace(PlannedModel, CalibratedModel, ScoredModel, SavableModel, ProductionModel):
    r"""Linearised Laplace approximation of a trained network, by posterior samples of its tangent model.

    The network `f(w̄, x)` is replaced, for uncertainty only, by the Bayesian linear model `h(θ, x)` with features
    `φ(x) = ∂f/∂w` at `w̄`; its Gaussian posterior has precision `H = M + A`, `M = Σᵢ φᵢᵀBᵢφᵢ`. The mean of a
    prediction is the network's own output; its error bars are those of samples `φ(x) ζ_k`, `ζ_k ~ N(0, H⁻¹)`
    (Antorán, Padhy et al., ICLR 2023).

    Args:
        model: the trained network. A fit copies it, and neither changes nor runs it: predictions are those of the fit.
        likelihood: `"regression"` (Gaussian), `"classification"` (categorical), `"binary"` (Bernoulli, one or several
            outputs), `"poisson"` (counts), `"heteroscedastic"` (means and log variances), a `Likelihood`, or a
            dictionary of these, one for each head of a network that returns a dictionary.
        prior: `"isotropic"`, `"g-prior"`, which does not depend on the scale of weights before a normalisation,
            `"layerwise"`, or a `Prior`, which also sets where the fit of its precision starts.
        parameters: which weights are random: `"last_layer"`; names or globs, with a leading `"!"` those that are not; a
            predicate; masks by name, as of `largest_variance`; all trainable ones by default.
        method: `"exact"`, dense algebra, for small problems; `"krylov"`, block Krylov on all data; `"stochastic"`,
            mini-batches, for many data; `"dual"`, conjugate gradients in observation space, for regressions; `"kfac"`
            and `"diagonal"`, which leave out correlations; `"subset"`, the full covariance of a part of the data;
            `"auto"` takes the best that the budget of a fit pays for (`plan`, `print`). Or a `Method` with settings of
            its own, such as `Krylov(max_memory=2e9)`.
        num_samples: posterior samples for predictions, `K`; of standard deviations the relative error is `1/√(2K)`.
        seed: of all randomness.
        linear_model: `"affine"`, `h = f + φ(θ − w̄)`; `"homogeneous"`, `h = φθ`; `"auto"`, affine for a Gaussian
            likelihood and homogeneous for the others.
        process_group: processes of `torch.distributed` that share out the data of fits (`docs/distributed.md`). Each
            makes the same calls, with a loader of all data; `predict` and `save` may be called by one alone.

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
        scale_, temperature_: predictions are of samples `√scale_ · ζ`; outputs are divided by the temperature.
        calibration_: both, and log-likelihoods with error bars and without (`Calibration`).
        history_: one `Step` a step of `fit_hyperparameters`; of an interrupted run those that it finished.

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
        parameters: Subset = None,
        method: str | Method = "auto",
        num_samples: int = 64,
        seed: int = 0,
        linear_model: str = "auto",
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        self.settings = Settings.of(
            likelihood,
            prior=prior,
            parameters=parameters,
            method=method,
            num_samples=num_samples,
            seed=seed,
            linear_model=linear_model,
            process_group=process_group,
        )
        self.network = self.settings.linearise(model)

    @fitting
    @solver_call
    def fit_hyperparameters(
        self,
        loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        budget: float | None = 20.0,
        max_steps: int = 10,
        tolerance: float = _TOLERANCE,
        num_samples: int = 16,
        criterion: str = "auto",
        precision_bounds: tuple[float, float] = (1e-8, 1e12),
        noise_bounds: tuple[float, float] = (1e-12, 1e12),
        scale: float | None = None,
        noise_variances: Tensor | None = None,
        weights: Tensor | Sequence[float] | None = None,
        unpack: Unpack | None = None,
        num_data: int | None = None,
        warm_start: bool = False,
        progress: bool = True,
        callback: Callable[[Step], object] | None = None,
        checkpoint: FilePath | None = None,
    ) -> "LinearisedLaplace":
        r"""Tune the prior precision, and the noise precision of a regression; draw the posterior.

        The loader may be shuffled; its batch size is what goes through the network at once, and changes no result.

        Args:
            loader: of pairs `(x, y)`: a `DataLoader`, a dataset, or a list of batches, without random augmentation. `x`
                is a tensor, a tuple of positional or a dictionary of keyword arguments of the model. Mappings with
                `labels` are taken as well.
            val_loader: data that the network was not trained on, of the same form: for `criterion="validation"`.
            budget: training epochs, counted in operations, after which iterations stop; see `plan`. `None`: no limit.
            max_steps: steps at most; a `ConvergenceWarning` tells if they were not enough.
            tolerance: relative error of predicted standard deviations, `τ`. Where the prior decides, they go with
                `α^{-1/2}`, so `log α` (and `log b`) is found to `2τ`: the search stops when it changes by less, or when
                its standard error is less. Samples are solved for to the same `τ`, as `methods.solver_method` derives;
                the noise of `K` samples, `1/√(2K)`, comes on top.
            num_samples: samples during EM, where a method needs it; `γ` has a relative error of about `√(2/(Kγ))`.
            criterion: what chooses the hyperparameters. `"auto"` is `"validation"` with a `val_loader`: `α` and a
                temperature, or the noise, of the widest error bars that cost its data hardly anything; `"evidence"` for
                a regression and several precisions, for factors of a regression the network's
                (`by_network_evidence`); `"leave_one_out"` (`predictions.left_out_labels`) for one label a datum, of at
                most 100 classes with ten data each; `"self_consistency"` for other labels, and counts; else evidence.
            precision_bounds: within which `α` is kept.
            noise_bounds: within which the noise precision is kept.
            scale: factor of the posterior covariance in predictions, by default 1, or what `criterion` chooses.
                A `CalibrationWarning` tells where error bars are too wide to be of use.
            noise_variances: `R` of heteroscedastic noise, `[N]` or one for each output, `[N, ...]`, in the units of the
                targets squared and in the order of the dataset, whatever order the loader has. The noise variance of a
                datum is `R/b`, with `b` learnt; for variances that are known, use `Gaussian(1.0, learn=False)`.
            weights: `[N]`, in the order of the dataset: a datum of weight 2 counts as two in the sum of losses. For a
                regression they are `1/noise_variances`.
            unpack: for other batches, `batch -> (inputs, targets)`.
            num_data: of an `IterableDataset`, which is read in its order; the order must repeat.
            warm_start: start from the posterior that is there, also of earlier weights, if any (`methods.start`).
            progress: show progress bars.
            callback: called with each `Step`; in a fit that goes on, also with those that were there. It may raise
                `StopFit`, which ends the fit, and keeps what was there.
            checkpoint: a file that keeps what the fit has computed, so that the same call, with the same model and
                data, goes on after its process was killed, to the same numbers (`docs/training_scripts.md`). It is
                deleted when the fit is there.

        Raises:
            TypeError, ValueError, FloatingPointError: for data that do not fit the model or the likelihood, or that
                cannot be read twice, for a `checkpoint` of another fit, and for a fit that ends with NaN or infinity.
                What was fitted before is kept.
            OSError: if the file of `checkpoint` cannot be read or written.
        """
        tuning = self._recorded(Tuning(max_steps, tolerance, num_samples, precision_bounds, noise_bounds, callback))
        calibration = None if scale is None else Calibration.of_scale(scale)
        if val_loader is not None:
            check_calibration("val_loader", self.settings.observation, noise_variances is not None)
        # All data are read before anything is fitted.
        data = {"noise_variances": noise_variances, "weights": weights, "unpack": unpack, "num_data": num_data}
        asked = {**data, **vars(tuning), "criterion": criterion, "scale": scale}
        asked |= {"budget": budget, "warm_start": warm_start}
        network = self.network.renewed()  # predictions meanwhile are those of the earlier fit
        with Checkpoint(checkpoint, "fit_hyperparameters", asked) as kept:
            problem = prepare(self.settings, network, loader, progress, budget, **data)
            held_out = None if val_loader is None else HeldOut.read(val_loader, network, self.settings, unpack)
            problem = kept.begin(self.settings, network, problem, held_out, self._earlier(warm_start))
            problem = with_selection(criterion, self.settings, problem, held_out, noise_bounds)
            task = self._prepared(problem, warm_start)
            tuning = replace(tuning.shifted(problem.tangent.log_scale), criterion=criterion)
            task, tuned = task.method.tune(task, tuning)
            fit = task.method.fit(task, tuned, tolerance)
            calibration, problems = calibration_of(fit, problem.tangent, held_out is not None, calibration)
            posterior = Posterior.of(fit, problem.tangent, network, calibration, noise_variances is not None)
            if held_out is not None and tuned.calibration is None:
                posterior = calibrated(held_out, network, posterior, fit)
            problems = [
                *problems,
                *held_out_problems(held_out, problem.tangent, posterior.likelihood, posterior.calibration),
            ]
            kept.done(fit)
        return self._store(network, posterior, fit, problem.tangent, problems)

    @fitting
    @solver_call
    def fit(
        self,
        loader: Iterable[Any],
        *,
        budget: float | None = 20.0,
        tolerance: float = _TOLERANCE,
        scale: float = 1.0,
        noise_variances: Tensor | None = None,
        weights: Tensor | Sequence[float] | None = None,
        unpack: Unpack | None = None,
        num_data: int | None = None,
        warm_start: bool = False,
        progress: bool = True,
        checkpoint: FilePath | None = None,
    ) -> "LinearisedLaplace":
        """The posterior at the precisions of the prior and of the noise that the constructor was given.

        With `warm_start`, at those of the posterior that is there. Arguments are those of `fit_hyperparameters`.
        """
        check_positive("`fit(tolerance=...)`", tolerance)
        data = {"noise_variances": noise_variances, "weights": weights, "unpack": unpack, "num_data": num_data}
        calibration = Calibration.of_scale(scale)
        asked = {**data, "budget": budget, "tolerance": tolerance, "scale": scale, "warm_start": warm_start}
        network = self.network.renewed()  # predictions meanwhile are those of the earlier fit
        with Checkpoint(checkpoint, "fit", asked) as kept:
            problem = prepare(self.settings, network, loader, progress, budget, **data)
            problem = kept.begin(self.settings, network, problem, earlier=self._earlier(warm_start))
            task = self._prepared(problem, warm_start)
            fit = task.method.fit(task, Tuned(), tolerance)
            posterior = Posterior.of(fit, problem.tangent, network, calibration, noise_variances is not None)
            kept.done(fit)
        return self._store(network, posterior, fit, problem.tangent)

    def _earlier(self, warm_start: bool) -> Posterior | None:
        """The posterior that a warm fit starts from."""
        return self._fitted.posterior if warm_start and self._fitted is not None else None

    @solver_call
    def predict(
        self,
        x: Any,
        *,
        num_samples: int | None = None,
        accuracy: float | None = None,
        noise_variances: Tensor | None = None,
        observed: bool = False,
    ) -> RegressionPrediction | Prediction:
        r"""Predictions with error bars: `f(w̄, x)` and `φ(x) ζ_k`, by `K` JVPs a datum and no VJP.

        After an exact fit in observation space, variances and covariances are `φ(x) H⁻¹ φ(x)ᵀ` itself, computed when
        they are asked for, by `C` VJPs a datum; samples are there as well.

        Args:
            x: inputs as the model takes them, `[N, ...]`: a tensor, or a tuple or dictionary of arguments. Of no data,
                `[0, ...]`, predictions have no rows.
            num_samples: use only the first so many of `samples_`.
            accuracy: use as few as give standard deviations a relative standard error of this, `1/√(2K)`.
            noise_variances: `R` at these inputs, `[N]` or `[N, ...]`, if the noise is not the same everywhere.
            observed: predict the measurements `T f(x)` rather than the outputs, where the likelihood has
                `Gaussian(observe=T)`.

        Raises:
            NotFittedError: before a fit.
            ValueError: for NaN in `x`, or if the weights of the model or what it computes have changed since the fit.
        """
        posterior = (fitted := self._drawn("predict")).posterior
        num_samples, x = samples_for(num_samples, accuracy, len(posterior.samples)), checked_inputs(x)
        check_options(self.settings.likelihood, observed, noise_variances)
        self._check_network("predict")
        return predict(
            self.network,
            posterior,
            fitted.fit,
            x,
            num_samples=num_samples,
            noise_variances=noise_variances,
            observed=observed,
            fitted_layout=None if fitted.tangent is None else fitted.tangent.layout,
            check=lambda: self._check_network("predict"),
        )
