"""`LinearisedLaplace`: error bars for a trained network."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.arguments import check_flag, check_positive, check_whole
from laplace_sampling.calibrated import calibrated, calibrated_by, split_conformal
from laplace_sampling.checkpoint import Checkpoint, FilePath
from laplace_sampling.data.training_data import Data
from laplace_sampling.export.posterior_module import PosteriorModule
from laplace_sampling.files import File, arguments_of, posterior_of, read, state_of, write
from laplace_sampling.fitted import Fitted, NotFittedError, evidence_of, leave_one_out_of, warmed, warn_of
from laplace_sampling.hyperparameters.criteria import Criterion, as_criterion
from laplace_sampling.hyperparameters.curves import EvidenceCurves, MarginalLikelihood
from laplace_sampling.hyperparameters.hyperparameters import Step, StopFit
from laplace_sampling.hyperparameters.network_evidence import NetworkEvidence
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.held_out import HeldOut, check_calibration
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.linear_model.tangent_model import TangentModel
from laplace_sampling.methods.method import Fit, Method, Task
from laplace_sampling.methods.plan import Plan
from laplace_sampling.methods.problem import Problem
from laplace_sampling.methods.verification import diagnosis_of
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.random_weights import Subset
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.networks.subnetwork import of_some_weights
from laplace_sampling.on_training_data import held_out_problems
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import check_options, checked_inputs, predict, samples_for
from laplace_sampling.predictions.calibration import Calibration, CalibrationWarning
from laplace_sampling.predictions.diagnosis import Diagnosis
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.predictions.model_score import Score
from laplace_sampling.predictions.prediction import Prediction, RegressionPrediction, check_quantities
from laplace_sampling.preparation import prepare, prepare_with_held_out, restore_fit
from laplace_sampling.production import module_of, predictions_of
from laplace_sampling.scored import evidence_score, left_out_score
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.recorded import unrecorded
from laplace_sampling.solvers.solver import ConvergenceWarning

_NO_DATA = Data()


class LinearisedLaplace:
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
            predicate; masks by name, such as those of `largest_variance`; all trainable ones by default.
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
        prior_scale_: `s`, `[P]`, prior standard deviations of the weights at `α = 1`, all one without a g-prior.
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
        process_group: Any = None,
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

        self._fitted: Fitted | None = None
        # Steps of a run of `fit_hyperparameters` that has not come to its end.
        self._unfinished: Sequence[Step] = ()

    # Fits -------------------------------------------------------------------------------------------------------------

    @solver_call
    def fit_hyperparameters(
        self,
        loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        data: Data = _NO_DATA,
        criterion: str | Criterion = "auto",
        budget: float | None = 20.0,
        tolerance: float = 0.015,
        warm_start: bool = False,
        progress: bool = True,
        callback: Callable[[Step], object] | None = None,
        checkpoint: FilePath | None = None,
    ) -> Self:
        r"""Tune the prior precision, and the noise precision of a regression; draw the posterior.

        The loader may be shuffled; its batch size is what goes through the network at once, and changes no result.

        Args:
            loader: of pairs `(x, y)`: a `DataLoader`, a dataset, or a list of batches, without random augmentation. `x`
                is a tensor, a tuple of positional or a dictionary of keyword arguments of the model. Mappings with
                `labels` are taken as well.
            val_loader: data that the network was not trained on, of the same form: for `criterion="validation"`.
            data: weights or noise variances of the data, or how the batches of the loader are unpacked (`Data`).
            criterion: what chooses the hyperparameters, by its name or as a `Criterion` with settings, such as
                `Evidence(max_steps=20)`. `"auto"` is `"validation"` with a `val_loader`: `α` and a temperature, or the
                noise, of the widest error bars that cost its data hardly anything; `"evidence"` for a regression and
                several precisions, for factors of a regression the network's (`by_network_evidence`);
                `"leave_one_out"` (`hyperparameters.rules`) for one label a datum, of at most 100 classes with ten
                data each; `"self_consistency"` for other labels, and counts; else evidence. The evidence of a
                classification makes error bars too wide for certain networks; a `CalibrationWarning` says so.
            budget: training epochs, counted in operations, after which iterations stop; see `plan`. `None`: no limit.
            tolerance: relative error of predicted standard deviations, `τ`. Where the prior decides, they go with
                `α^{-1/2}`, so `log α` (and `log b`) is found to `2τ`: the search stops when it changes by less, or when
                its standard error is less. Samples are solved for to the same `τ`, as `methods.method` derives;
                the noise of `K` samples, `1/√(2K)`, comes on top.
            warm_start: start from the posterior that is there, also of earlier weights, if any (`methods.problem`).
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
        chosen = as_criterion(criterion)
        check_positive("`fit_hyperparameters(tolerance=...)`", tolerance)
        record = self._recorded_steps(callback)
        asked = {"criterion": chosen.name, **asdict(chosen), **Data.fields(data)}
        asked |= {"budget": budget, "tolerance": tolerance, "warm_start": warm_start}
        with self._fitting(), Checkpoint(checkpoint, "fit_hyperparameters", asked) as kept:
            network = self.network.renewed()  # predictions meanwhile are those of the earlier fit
            # All data are read before anything is fitted.
            problem, held_out = prepare_with_held_out(
                self.settings, network, loader, val_loader, data, budget=budget, progress=progress
            )
            problem = kept.begin(self.settings, network, problem, held_out, self._earlier(warm_start))
            loss = problem.tangent.log_scale
            problem = replace(problem, tolerance=tolerance, callback=lambda step: record(step.shifted(loss)))
            task = self._task(problem.by(chosen, held_out), warm_start)
            fit = task.method.fit(task, task.method.tune(task))
            given_noise = data.noise_variances is not None
            posterior, problems = calibrated_by(held_out, fit, problem.tangent, network, given_noise)
            kept.done(fit)
            self._keep(network, posterior, fit, problem.tangent)
            warn_of(fit.problems, problems, stacklevel=4)
        return self

    @solver_call
    def fit(
        self,
        loader: Iterable[Any],
        *,
        data: Data = _NO_DATA,
        budget: float | None = 20.0,
        tolerance: float = 0.015,
        warm_start: bool = False,
        progress: bool = True,
        checkpoint: FilePath | None = None,
    ) -> Self:
        """Draw the posterior at the precisions of the prior and of the noise that the constructor was given.

        With `warm_start`, at those of the posterior that is there. Arguments are those of `fit_hyperparameters`.
        """
        check_positive("`fit(tolerance=...)`", tolerance)
        asked = {**Data.fields(data), "budget": budget, "tolerance": tolerance, "warm_start": warm_start}
        with self._fitting(), Checkpoint(checkpoint, "fit", asked) as kept:
            network = self.network.renewed()
            problem = prepare(self.settings, network, loader, data, budget=budget, progress=progress)
            problem = kept.begin(self.settings, network, problem, earlier=self._earlier(warm_start))
            task = self._task(replace(problem, tolerance=tolerance), warm_start)
            fit = task.method.fit(task, task.given)
            given_noise = data.noise_variances is not None
            posterior = Posterior.of(fit, problem.tangent, network, Calibration(), given_noise)
            kept.done(fit)
            self._keep(network, posterior, fit, problem.tangent)
            warn_of(fit.problems, [], stacklevel=4)
        return self

    @solver_call
    def plan(
        self,
        loader: Iterable[Any],
        val_loader: Iterable[Any] | None = None,
        *,
        data: Data = _NO_DATA,
        criterion: str | Criterion = "auto",
        budget: float | None = 20.0,
    ) -> Plan:
        """What `fit_hyperparameters` will do with these data: method, training epochs, memory, and why; `print` it.

        All data are read and go through the network once, and a few Jacobian products are made, whose operations are
        counted. Nothing is fitted, and what was fitted before stays.

        Arguments are those of `fit_hyperparameters`, and so are the errors; there is one also where no method can fit.
        """
        batching, counts, max_rows = self.network.batching, dict(self.network.products), self.network.batching.max_rows
        try:
            problem, held_out = prepare_with_held_out(
                self.settings, self.network, loader, val_loader, data, budget=budget, progress=False
            )
            return Plan.of(problem.by(as_criterion(criterion), held_out), self.settings.method)
        finally:
            batching.max_rows = max_rows
            self.network.products.update(counts)

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        """A fit. After one that failed or was interrupted everything but the steps that it finished is as before."""
        fitted, batching, max_rows = self._fitted, self.network.batching, self.network.batching.max_rows
        try:
            with self.settings.processes.shared_call():
                yield
            self._unfinished = ()
        except BaseException as error:
            # A warning of the end is raised where the user made it an error; the posterior is there.
            if not isinstance(error, ConvergenceWarning | CalibrationWarning):
                self._fitted, batching.max_rows = fitted, max_rows
            if not isinstance(error, StopFit):
                raise

    def _recorded_steps(self, callback: Callable[[Step], object] | None) -> Callable[[Step], None]:
        """A callback that keeps the steps of a run, and calls that of the user."""
        if callback is not None and not callable(callback):
            raise TypeError(f"`callback` must be a function of a `Step`, but is {callback!r:.80}.")
        self._unfinished = steps = []

        def stopped(step: Step) -> StopFit | None:
            try:
                if callback is not None:
                    unrecorded(callback, step)
            except StopFit as stop:
                return stop

        def record(step: Step) -> None:
            steps.append(step)
            # Of several processes one may look at the steps, and all of them stop.
            stops = self.settings.processes.gathered(lambda: stopped(step))
            if stop := next(filter(None, stops), None):
                raise stop

        return record

    def _earlier(self, warm_start: bool) -> Posterior | None:
        """The posterior that a warm fit starts from."""
        check_flag("`warm_start`", warm_start)
        return self._fitted.posterior if warm_start and self._fitted is not None else None

    def _task(self, problem: Problem, warm_start: bool) -> Task:
        """The problem as a method takes it, which starts from what was fitted before if it is to be warm."""
        task = self.settings.method.prepare(problem)
        if not warm_start or self._fitted is None:
            return task
        # Exact samples start nothing but another method.
        if task.method.name != self._fitted.posterior.method.name:
            self._drawn("fit")
        return warmed(task, self._fitted.start(task.seed))

    def _keep(self, network: Linearisation, posterior: Posterior, fit: Fit, tangent: TangentModel) -> None:
        """Replace what was fitted before, at the very end."""
        fit.task.budget.end()
        self.network = network
        self._fitted = Fitted(posterior, fit.without_samples(), tangent)

    # Predictions ------------------------------------------------------------------------------------------------------

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

    @solver_call
    def predict_loader(
        self,
        loader: Iterable[Any],
        outputs: Sequence[str] | None = None,
        *,
        data: Data = _NO_DATA,
        progress: bool = True,
    ) -> dict[str, Tensor]:
        """Predictions of any number of data, batch by batch: by name one tensor of all of them, on the CPU.

        One batch and what is asked of it are in memory at a time, so the data may be larger. `"samples"` and
        `"deviations"` are `[K, N, ...]`, everything else is `[N, ...]`, in the order of the loader.

        Args:
            loader: of batches `(x, y)` or `x`; a `DataLoader`, a dataset, or any iterable. Targets are not looked at.
                A mapping is `x` without its `labels`. A pair is always `(x, y)`: of a network that takes two tensors,
                batches without targets are `((a, b),)`.
            outputs: names of attributes of predictions, as for `to_module`.
            progress: show a progress bar.
            data: how other batches are unpacked, `Data(unpack=...)`; targets may be `None`.

        Raises:
            NotFittedError: before a fit.
            TypeError: for batches of another form.
            ValueError: for a name that predictions do not have; without a batch; as `predict`; for outputs whose shape
                is not the same in all batches.
        """
        data.check("predict_loader", "unpack")
        fitted = self._drawn("predict_loader")
        names = check_quantities("predict_loader", outputs, self.settings.likelihood)

        def predicted(x: Any) -> Prediction:
            self._check_network("predict_loader")
            return predict(self.network, fitted.posterior, fitted.fit, x)

        return predictions_of(loader, predicted, names, fitted.posterior.rows, progress, data.unpack)

    @solver_call
    def to_module(
        self,
        num_samples: int | None = None,
        outputs: Sequence[str] | None = None,
        *,
        example: Any = None,
    ) -> PosteriorModule:
        r"""The network with its error bars as one `nn.Module`, for `torch.export`, ONNX, `torch.compile` and servers.

        `module(x)` is a dictionary of what `predict(x)` gives: probabilities, standard deviations and the like, for a
        batch of any size. The network's weights and the samples are buffers of it, with scale, temperature and noise
        inside; it knows neither training data nor this object.

        Of all weights it computes `f(w̄, x)` and `K` JVPs `φ(x) ζ_k` by forward derivatives of the operations that
        `torch.export` takes the network apart into. Of a linear last layer (`parameters="last_layer"`) the rest of the
        network, `module.program.body`, runs once and is not differentiated: it may be quantised, pruned or anything
        else. Samples, and the covariance where `predict` has it in closed form, then take one product of matrices.

        Variances of other posteriors are those of the samples. Where `predict` knows them without samples, as after a
        fit by the exact method, a notice says which outputs differ by the noise of these, `1/√(2K)` of themselves.

        Args:
            num_samples: use only the first so many of `samples_`.
            outputs: names of attributes of predictions, such as `"probs"`, `"mean"`, `"samples"`, `"entropy"`; by
                default `"probs"` or `"mean"`, and `"stddev"` and `"epistemic"` where there are such.
            example: inputs of `predict`, with which the network is traced and the module checked. By default the few
                training data that the posterior keeps to recognise its network.

        Raises:
            NotFittedError: before a fit.
            ValueError: for a name that predictions do not have; for a network that torch does not export, or with an
                operation without a rule, named in the error; for one of several heads; if the module does not compute
                what `predict` does; if an example is needed.
        """
        fitted = self._drawn("to_module")
        self._check_network("to_module")
        return module_of(self.network, self.settings, fitted.posterior, fitted.fit, num_samples, outputs, example)

    # Held-out data ----------------------------------------------------------------------------------------------------

    @solver_call
    def calibrate(self, val_loader: Iterable[Any], *, data: Data = _NO_DATA) -> Self:
        """The fitted or loaded posterior with the scale that held-out data choose, without another solve.

        Sets `scale_`, and with it in a classification the temperature of the outputs, `temperature_`, in a regression
        the noise precision, `noise_precision_`, also one that was given, as `fit_hyperparameters(..., val_loader=...)`
        does with the evidence; other likelihoods have a scale only. Whatever scale and temperature there were are
        replaced. Samples and prior stay.

        Args:
            val_loader: data that the network was not trained on, of the form of the training data. Those of a
                regression have the noise of data of weight one.
            data: how the batches of the loader are unpacked, and the number of data of an `IterableDataset`.

        Raises:
            NotFittedError, TypeError, ValueError: before a fit; as for `val_loader` in `fit_hyperparameters`; after a
                fit with `noise_variances`; if the model has changed. The posterior stays what it was.
        """
        fitted, held_out = self._held_out("calibrate", val_loader, data)
        with self.settings.processes.shared_call():
            posterior = calibrated(held_out, self.network, fitted.posterior, fitted.fit)
        self._fitted = replace(fitted, posterior=posterior)
        problems = held_out_problems(held_out, fitted.tangent, posterior.likelihood, posterior.calibration)
        warn_of([], [*problems, *posterior.calibration.problems], stacklevel=4)
        return self

    @solver_call
    def calibrate_conformal(self, val_loader: Iterable[Any], *, data: Data = _NO_DATA) -> Self:
        """Makes `interval` and `prediction_set` of predictions contain a share of the targets, whatever is wrong.

        By split conformal prediction (`predictions.conformal`): the guarantee holds for new data of the same
        distribution, on average over them, with any network and posterior. The data must be seen by nothing else:
        neither by training nor by `fit_hyperparameters` or `calibrate`, whose `val_loader` are others.

        A later fit or `calibrate` takes it back. Files keep it.

        Args:
            val_loader: held-out data of the form of the training data.
            data: how the batches of the loader are unpacked, and the number of data of an `IterableDataset`.

        Raises:
            NotFittedError: before a fit.
            TypeError, ValueError: as in `calibrate`; for a likelihood other than of a regression or a classification;
                for outputs whose shape is not the same for all data.
        """
        fitted, held_out = self._held_out("calibrate_conformal", val_loader, data)
        with self.settings.processes.shared_call():
            conformal = split_conformal(held_out, self.network, fitted.posterior, fitted.fit)
        self._fitted = replace(fitted, posterior=replace(fitted.posterior, conformal=conformal))
        return self

    def _held_out(self, call: str, val_loader: Iterable[Any], data: Data) -> tuple[Fitted, HeldOut]:
        """What was fitted, and data that calibrate it."""
        data.check(call, "unpack", "num_data")
        fitted = self._drawn(call)
        self._check_network(call)
        check_calibration(f"{call}(val_loader)", self.settings.observation, fitted.posterior.unequal_noise)
        settings = self.settings
        with settings.processes.shared_call():
            return fitted, HeldOut.read(val_loader, self.network, settings.likelihood, settings.processes, data)

    # Questions about the fit ------------------------------------------------------------------------------------------

    @solver_call
    def sample(self, num_samples: int) -> Float[Tensor, "K P"]:
        """New zero-mean posterior samples `ζ ~ N(0, H⁻¹)`, independent of `samples_` and of earlier calls."""
        fitted = self._require("sample")
        check_whole("`sample(num_samples)`", num_samples, 1)
        fit, _ = self._with_data("sample")
        return fitted.new_samples(fit, self.settings, num_samples)

    @solver_call
    def log_marginal_likelihood(self, at: str = "mode") -> MarginalLikelihood:
        r"""`log p(y)` of the linear model at the fitted hyperparameters, a sum over the data, with its standard error.

        With `at="network"` at the weights and outputs of the network; only that says how good it is, as `score` does.

        `−Σ_i ℓ(y_i, h(θ̄, x_i)) − ½ θ̄ᵀAθ̄ − ½ log|I + A⁻¹M|`: the log determinant exactly from the exact method, else by
        stochastic Lanczos quadrature. For a loss that is not quadratic it is Laplace's approximation. What validation
        data chose (`scale_`, and the noise of predictions) has no part in it.
        """
        if at not in ("mode", "network"):
            raise ValueError(f'`log_marginal_likelihood(at={at!r})` is not known; use "mode" or "network".')
        fit, tangent = self._with_data("log_marginal_likelihood")
        if at == "mode":
            path = evidence_of(fit, self.settings, "log_marginal_likelihood")
            return path.at(fit.alpha).shifted(tangent.log_scale)
        with self.settings.processes.shared_call():
            evidence = NetworkEvidence.of(fit.model, fit.prior, fit.task.trained_weights, fit.traces(0.0))
            return evidence.at(fit.alpha).shifted(tangent.log_scale)

    @solver_call
    def evidence_path(self, decades: float = 3.0, num: int = 121) -> EvidenceCurves:
        """Effective dimension, norm of the mode and log marginal likelihood as functions of the prior precision.

        The curvature is that at the fitted hyperparameters. Several precisions go up and down together; the axis is
        their geometric mean over the weights.

        Args:
            decades: to both sides of the fitted precision.
            num: points.
        """
        check_positive("`evidence_path(decades=...)`", decades, 12)
        check_whole("`evidence_path(num=...)`", num, 2)
        fit, tangent = self._with_data("evidence_path")
        path = evidence_of(fit, self.settings, "evidence_path", decades)
        grid = fit.alpha * torch.logspace(-decades, decades, num, dtype=torch.float64)
        return EvidenceCurves.of(path, grid).shifted(tangent.log_scale)

    @solver_call
    def leave_one_out(self) -> LeaveOneOut:
        r"""Each training datum predicted from all others, noise included, at the fitted hyperparameters.

        `log_prob`, `[N]`, is `log p(y_i | y_{−i})`, joint over the outputs of a datum that have a target; `mean` and
        `covariance` are those of the *linear model*, in the units of the targets. From the decomposition of an exact
        fit, without fitting again (Rasmussen & Williams 2006, eq. 5.10–5.12); weights and features stay those of all
        data.

        Raises:
            ValueError: if the fit is not by the exact method.
        """
        return leave_one_out_of(*self._with_data("leave_one_out"), self.settings)

    @solver_call
    def score(self, kind: str = "evidence", *, num_data: int = 1000) -> Score:
        r"""How good the network is, by its training data alone: in nats for each datum, larger for a better one.

        Scores of networks of any architecture that were fitted to the same data can be compared; `compare` does.

        A datum without a target does not count, and one with some missing counts as one datum.

        - `"evidence"`: `log p(y)/N` by Laplace's approximation at the network's own weights and outputs, with the
          precisions of prior and noise at their maximum. `log_marginal_likelihood()` is
          that of the linear model at its mode, which ranks networks less well.
        - `"loo"`: the mean of `log p(y_i | y_{−i})`, each datum predicted without it: around `f_i + V_i^{−i} ∂ℓ_i/∂f`,
          where a Newton step from the network's output `f_i` ends, with the covariance
          `V_i^{−i} = V_i (I − B_i V_i)⁻¹`; with the scale and temperature of predictions. It is exact for a linear
          model with Gaussian noise at its minimum, and asks for a network that is at a minimum of the loss with weight
          decay: the step is too long for others (`predictions.leave_one_out`). Covariances from few samples are too
          noisy where a datum decides its own prediction: a `ConvergenceWarning` says so.

        Neither sees that labels are learnt by heart: networks have seen them, and where they are certain of all of them
        the curvature of the loss vanishes (`docs/decisions.md`). Held-out data do.

        Args:
            kind: which.
            num_data: of `"loo"`, random training data that are left out, at most; they depend on the seed only. It
                takes a JVP of each for every sample, or a VJP for every output where covariances are in closed form.

        Raises:
            NotFittedError: before a fit, or for a posterior that was loaded without its data.
            ValueError: for another kind; if no datum that is looked at has a target.
        """
        if not isinstance(kind, str):
            raise TypeError(
                f'`score(kind)` takes "evidence" or "loo", but got a {type(kind).__name__}: the score is of the '
                "training data. Held-out data are scored by `la.predict(x).log_prob(y)`."
            )
        if kind not in ("evidence", "loo"):
            raise ValueError(f'`score(kind={kind!r})` is not known; use "evidence" or "loo".')
        check_whole("`score(num_data=...)`", num_data, 1)
        fit, tangent = self._with_data("score")
        with self.settings.processes.shared_call():
            if kind == "evidence":
                score = evidence_score(fit, tangent)
            else:
                score = left_out_score(fit, tangent, self._drawn("score").posterior, num_data)
        return replace(score, of_some_weights=of_some_weights(self.network))

    @solver_call
    def diagnose(self) -> Diagnosis:
        """Checks solves, samples and hyperparameters of the last fit; `print` it for a table, and what to do.

        The energies of the samples are tested against their distributions; see `predictions.diagnosis`.
        """
        fit = self._require("diagnose").fit
        if fit is None or fit.sampled is None:
            raise NotFittedError("`diagnose` needs the fit itself, which a loaded posterior does not have: call `fit`.")
        with self.settings.processes.shared_call():
            if not len(fit.sampled.energies):
                fit = fit.with_samples()
            return diagnosis_of(fit, self.network.weights, self.settings.linear_model)

    @property
    def prior_precision_(self) -> Float[Tensor, " G"]:
        return self._require("prior_precision_").posterior.prior.precision

    @property
    def prior_scale_(self) -> Float[Tensor, " P"]:
        return self._require("prior_scale_").posterior.prior.scale

    @property
    def noise_precision_(self) -> Tensor | None:
        posterior = self._require("noise_precision_").posterior
        return posterior.calibration.likelihood(posterior.likelihood).noise_precisions()

    @property
    def effective_dimension_(self) -> Float[Tensor, " G"]:
        return self._require("effective_dimension_").posterior.effective_dimension

    @property
    def scale_(self) -> float:
        return self._require("scale_").posterior.calibration.scale

    @property
    def temperature_(self) -> float:
        return self._require("temperature_").posterior.calibration.temperature

    @property
    def calibration_(self) -> Calibration:
        return self._require("calibration_").posterior.calibration

    @property
    def converged_(self) -> bool:
        return self._require("converged_").posterior.converged

    @property
    def samples_(self) -> Float[Tensor, "K P"]:
        return self._drawn("samples_").posterior.samples

    @property
    def mode_(self) -> Float[Tensor, " P"]:
        return self._mode()

    @solver_call
    def _mode(self) -> Float[Tensor, " P"]:
        """The mode, found now if the fit did not need it."""
        fitted = self._require("mode_")
        if fitted.posterior.mode is None:
            fit, _ = self._with_data("mode_")
            with self.settings.processes.shared_call():
                fitted.posterior = replace(fitted.posterior, mode=fit.mode.weights.to(self.network.dtype))
        assert fitted.posterior.mode is not None
        return fitted.posterior.mode

    @property
    def posterior_(self) -> Posterior:
        """All that predictions need."""
        return self._require("posterior_").posterior

    @property
    def epochs_(self) -> float:
        """The cost of the fit, and of all that was asked of it since, in training epochs, counted in operations.

        NaN for a posterior that was loaded.
        """
        fit = self._require("epochs_").fit
        return math.nan if fit is None else fit.task.budget.spent_with_later

    @property
    def stopped_(self) -> bool:
        """Whether the last `fit_hyperparameters` did not come to its end, as by `StopFit`: the posterior is older."""
        return bool(self._unfinished)

    @property
    def history_(self) -> list[Step]:
        return list(self._unfinished) or self._require("history_").posterior.history

    def __repr__(self) -> str:
        settings, fitted = self.settings, self._fitted
        head = (
            f"LinearisedLaplace({type(self.network.module).__name__}, {settings.likelihood.name!r}, "
            f"P={self.network.num_parameters}, prior={type(settings.prior).__name__}, "
            f"linear_model={settings.linear_model!r}, "
            f"method={settings.method.name!r}"
        )
        if fitted is None:
            return head + ", not fitted)"
        if fitted.fit is not None:
            head += f" → {fitted.fit.method.name!r}: {fitted.fit.task.reason}"
        prior, gamma = fitted.posterior.prior, float(fitted.posterior.effective_dimension.sum())
        alpha = ", ".join(f"{name}: {float(a):.3g}" for name, a in zip(prior.names, prior.precision, strict=True))
        floored = f", {prior.num_floored} weights floored" if prior.num_floored else ""
        return head + f", prior_precision_={{{alpha}}}, effective_dimension_={gamma:.1f}{floored})"

    def __str__(self) -> str:
        """As `repr`, what else there is to know, and what the fit has cost and how accurate it is."""
        fit = None if self._fitted is None else self._fitted.fit
        if fit is None or fit.sampled is None:
            return repr(self)
        return "\n".join([repr(self), *fit.remarks, f"{fit.task.budget}; {fit.accuracy}."])

    # Files ------------------------------------------------------------------------------------------------------------

    def state_dict(self, *, include_data: bool = True) -> dict[str, Any]:
        """All that predictions need, as nested dictionaries of tensors and plain values.

        `torch.save` writes it, and `torch.load(..., weights_only=True)` reads it.

        Of the data it holds

        - the inputs of at most four training data, by which `load` sees whether a network computes what it did at the
          fit, and `to_module` traces it;
        - after an exact fit in observation space all training data, inputs, targets and their weights or noise
          variances, of which its covariances are made;
        - after `calibrate_conformal` the scores of its data, a number for each target, without inputs and targets.

        All else is made of sums over the data.

        Args:
            include_data: with `False` it holds no inputs and targets. Then a network with the weights of the fit that
                computes something else, as with another activation, is not refused; `to_module` needs `example=`; and
                variances and covariances of an exact fit in observation space are those of its samples, which have a
                relative error of `√(2/K)`, and its `sample`, evidence and leave-one-out need another fit.
        """
        return self._state(include_data, "state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a posterior from `state_dict`.

        Raises:
            ValueError: if the state is damaged or incomplete, of a network with other weights or another function, of
                another likelihood or another choice of parameters; what was fitted before is kept.
        """
        self._take_over(state, "load_state_dict")

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over a posterior of the network as it was earlier in its training, for `warm_start=True` to start from.

        Nothing is predicted before the next fit, unless the network has the weights of that posterior.

        Args:
            state: from `state_dict`, whatever the weights of the network were then.

        Raises:
            ValueError: if the state is damaged or incomplete, of another likelihood or another choice of parameters.
        """
        posterior, self.settings = posterior_of(state, self.settings, self.network, "start_from", of_this_network=False)
        self._fitted, self._unfinished = Fitted(posterior, of_earlier_weights=True), ()

    def save(self, path: File, *, include_data: bool = True) -> None:
        """Write `state_dict()` to a file, which holds some or all training data (see `state_dict`).

        It is written to a temporary file in the same folder, flushed to the disk, and put in the place of an older
        file: whatever happens meanwhile, that one or the new one is there, and whole. A process that is killed may
        leave the temporary file behind, which begins with a dot and ends in `.tmp`.

        Args:
            path: of the file; or an open file in binary mode, which is written to as it is.
            include_data: with `False` the file holds no inputs and targets, and less can be done with it, as there.

        Raises:
            NotFittedError: before a fit.
            OSError: if the file cannot be written; an older one is unchanged.
        """
        write(self._state(include_data, "save"), path)

    @classmethod
    def load(
        cls,
        path: File,
        model: nn.Module,
        likelihood: str | Likelihood | None = None,
        prior: str | Prior | None = None,
        method: str | Method | None = None,
        *,
        process_group: Any = None,
    ) -> Self:
        """Read what `save` wrote, for the same trained network; settings are those of the saved object.

        Args:
            path: of the file, or an open file in binary mode.
            model: the network, with the weights that it had at the fit.
            likelihood: needed only if the file does not hold it: if it was not one of the library's own, or one of
                measurements, `Gaussian(observe=T)`.
            prior: needed only if it is not one of the library's own.
            method: needed only if it is not one of the library's own.
            process_group: as in the constructor, for later fits; any number of processes may have saved the file.

        Raises:
            OSError: if the file cannot be opened.
            ValueError: if it is damaged, of something else or of another version; if `model` has other weights than at
                the fit, or computes another function of the data; if something has to be given.
        """
        state = read(path)
        arguments = arguments_of(state, likelihood=likelihood, prior=prior, method=method)
        la = cls(model, **arguments, process_group=process_group)
        la._take_over(state, "load")
        return la

    def _state(self, include_data: bool, call: str) -> dict[str, Any]:
        posterior = self._require(call).posterior
        if posterior.curvature is None:
            posterior = self._drawn(call).posterior
        return state_of(posterior if include_data else posterior.without_data(), self.settings, self.network)

    def _take_over(self, state: dict[str, Any], call: str) -> None:
        network = self.network.renewed()
        posterior, settings = posterior_of(state, self.settings, network, call)
        fit, tangent = restore_fit(settings, network, posterior)
        self.settings, self.network, self._unfinished = settings, network, ()
        self._fitted = Fitted(posterior, fit, tangent)

    # What was fitted --------------------------------------------------------------------------------------------------

    def _require(self, what: str) -> Fitted:
        """What was fitted, or a `NotFittedError`."""
        if self._fitted is None:
            raise NotFittedError(
                f"`{what}` needs a fitted posterior: call `fit_hyperparameters(loader)`, `fit(loader)` or `load` first."
            )
        return self._fitted

    @solver_call
    def _drawn(self, call: str) -> Fitted:
        """What was fitted, with samples that are drawn now if the fit did not need them."""
        fitted = self._require(call)
        fitted.draw(self.settings)
        return fitted

    def _with_data(self, call: str) -> tuple[Fit, TangentModel]:
        """The fit and the linear model on the training data."""
        fitted = self._require(call)
        if fitted.fit is None or fitted.tangent is None:
            raise NotFittedError(f"`{call}` needs the training data, which the file does not hold: call `fit(loader)`.")
        self._check_network(call)
        return fitted.fit, fitted.tangent

    def _check_network(self, call: str) -> None:
        """Raise if weights that the fit shares with the model were changed in place, or it is of earlier weights."""
        fitted = self._require(call)
        if fitted.of_earlier_weights:
            network = self.network.renewed()
            fitted.posterior.check_weights(network, call)
            self.network, fitted.of_earlier_weights = network, False
        self.network.shell.check(call)
