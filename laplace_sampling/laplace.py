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
from laplace_sampling.calibrated import calibrated, calibrated_by, held_out_problems, split_conformal
from laplace_sampling.checkpoint import Checkpoint, FilePath
from laplace_sampling.data.training_data import Data
from laplace_sampling.export.posterior_module import PosteriorModule
from laplace_sampling.files import File, arguments_of, novelty_of_state, posterior_of, read, state_of, write
from laplace_sampling.functions import Functions, Program, propagate
from laplace_sampling.hyperparameters.as_criterion import as_criterion
from laplace_sampling.hyperparameters.criterion import Criterion
from laplace_sampling.hyperparameters.curves import EvidenceCurves, MarginalLikelihood
from laplace_sampling.hyperparameters.hyperparameters import Step, StopFit
from laplace_sampling.hyperparameters.network_evidence import NetworkEvidence
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.linear_model.held_out import HeldOut, check_calibration
from laplace_sampling.linear_model.linear_model import TangentModel
from laplace_sampling.linear_model.priors.prior import Prior
from laplace_sampling.methods.method import Fit, Method, Task
from laplace_sampling.methods.plan import Plan, of_last_layer
from laplace_sampling.methods.problem import Problem
from laplace_sampling.methods.verification import diagnosis_of
from laplace_sampling.networks.filters import OTHERS
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.random_weights import Subset, of_some_weights
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.novelty_by_data import novelty_at, novelty_by
from laplace_sampling.posterior import Fitted, NotFittedError, Posterior, evidence_of, leave_one_out_of, warmed, warn_of
from laplace_sampling.predict import check_options, checked_inputs, predict, prior_deviations, samples_for
from laplace_sampling.predictions.calibration import Calibration, CalibrationWarning
from laplace_sampling.predictions.diagnosis import Diagnosis
from laplace_sampling.predictions.leave_one_out import LeaveOneOut
from laplace_sampling.predictions.model_score import Score
from laplace_sampling.predictions.novelty import Novelty
from laplace_sampling.predictions.prediction import Prediction, RegressionPrediction, check_quantities
from laplace_sampling.preparation import prepare, prepare_with_held_out, restore_fit, with_filters
from laplace_sampling.production import module_of, predictions_of
from laplace_sampling.scored import evidence_score, left_out_score
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.recorded import unrecorded
from laplace_sampling.solvers.solver import ConvergenceWarning

_NO_DATA = Data()


class LinearisedLaplace:
    r"""Linearised Laplace approximation of a trained network, by posterior samples of its tangent model.

    For its uncertainty only, the network `f(w̄, x)` is replaced by the Bayesian linear model `h(θ, x)` with features
    `φ(x) = ∂f/∂w` at `w̄`. The Gaussian posterior of this model has the precision `H = M + A`, `M = Σᵢ φᵢᵀBᵢφᵢ`. The
    mean of a prediction is the network's own output. Its error bars are those of samples `φ(x) ζ_k`, `ζ_k ~ N(0, H⁻¹)`
    (Antorán, Padhy et al., ICLR 2023).

    Args:
        model: the trained network. A fit copies it, and neither changes nor runs it. Predictions are those of the fit.
        likelihood: `"regression"` (Gaussian), `"classification"` (categorical), `"binary"` (Bernoulli, one or several
            outputs), `"poisson"` (counts), `"heteroscedastic"` (means and log variances), a `Likelihood`, or a
            dictionary of these, one for each head of a network that returns a dictionary.
        prior: `"isotropic"`; `"g-prior"`, which does not depend on the scale of weights before a normalisation;
            `"layerwise"`; `"filterwise"`, which correlates the taps of convolutional filters; or a `Prior`, which also
            sets where the fit of its precision starts.
        parameters: the weights to be uncertain about, by default all trainable ones. `"last_layer"`; names or globs,
            where a leading `"!"` excludes; a function of name and tensor; or masks by name, such as those of
            `largest_variance`.
        method: `"exact"`, dense algebra, for small problems; `"krylov"`, block Krylov on all data; `"stochastic"`,
            mini-batches, for many data; `"dual"`, conjugate gradients in observation space, for regressions; `"kfac"`
            and `"diagonal"`, which leave out correlations; `"subset"`, the full covariance of a part of the data;
            `"auto"` takes the best that the budget of a fit pays for (`plan`, `print`). Or a `Method` with settings of
            its own, such as `Krylov(max_memory=2e9)`.
        num_samples: the number of posterior samples, `K`. Standard deviations have a relative error of `1/√(2K)`.
        seed: the seed of all random numbers.
        linear_model: `"affine"`, `h = f + φ(θ − w̄)`; `"homogeneous"`, `h = φθ`; `"auto"`, affine for a Gaussian
            likelihood and homogeneous for the others.
        process_group: processes of `torch.distributed` that share out the data of fits (`docs/distributed.md`). Each
            makes the same calls, with a loader of all data. One of them alone may call `predict` and `save`.

    Raises:
        ValueError: for settings that are not known or do not go together.

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
        self._novelty: Novelty | None = None
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
        accuracy: float | None = None,
        criterion: str | Criterion = "auto",
        budget: float | None = 10.0,
        tolerance: float = 0.015,
        warm_start: bool = False,
        progress: bool = True,
        callback: Callable[[Step], object] | None = None,
        checkpoint: FilePath | None = None,
    ) -> Self:
        r"""Find the prior precision, and the noise precision of a regression; then draw the posterior.

        The loader may be shuffled. Its batch size is what goes through the network at once, and changes no result.

        Args:
            loader: pairs `(x, y)` from a `DataLoader`, a dataset, or a list of batches, without random augmentation.
                `x` is a tensor, a tuple of positional arguments of the model, or a dictionary of keyword arguments. A
                batch may also be a mapping with `labels`.
            val_loader: data of the same form that the network was not trained on, for `criterion="validation"`.
            data: weights or noise variances of the data, or how to unpack the batches of the loader (`Data`).
            accuracy: for classifications without a `val_loader`: the part of new labels that the network predicts
                rightly, such as 0.93, from any test of it; 0.03 more or less matter little. It gives the
                temperature of predictions (`Accuracy`). Without this and `val_loader` predictions of a classification
                are as sure as the network, apart from error bars, since training labels do not say how sure it should
                be.
            criterion: what chooses the hyperparameters: a name, or a `Criterion` with settings such as
                `Evidence(max_steps=20)`. `"auto"` takes the first of these that is possible:

                - `"validation"`, if there is a `val_loader`: `α` together with a temperature or the noise. It takes the
                  widest error bars that hardly make the validation data less likely.
                - `Accuracy(a)`, if there is an `accuracy`: its temperature, and then `α` as the next one finds it. The
                  prior has to have one precision.
                - `"leave_one_out"` for classifications with one label for each datum, at most 100 classes, and at least
                  ten data a class on average; `"self_consistency"` for other labels and for counts.
                - `"evidence"` for everything else, and for priors of several precisions. With `method="kfac"` or
                  `"diagonal"` a regression takes the evidence of the network's own weights.

                The evidence of a classification may give error bars that are too wide. A `CalibrationWarning` says so.
            budget: iterations stop after this many training epochs, counted in operations (`plan`); of measurements
                (`Gaussian(observe=T)`) an epoch has as many gradients as a datum has measurements, or one for each
                datum if these are more. The first 10¹⁰ operations, a second or so, are never refused, so that small
                problems take more epochs. `None` is no limit.
            tolerance: `τ`, the relative error of predicted standard deviations, beside the noise `1/√(2K)` of `K`
                samples. Where the prior decides, they are proportional to `α^{-1/2}`. So the search for `log α` (and
                `log b`) stops when a step or its standard error is below `2τ`. Samples are solved for to the same `τ`.
            warm_start: start from the present posterior, if there is one. It may be that of earlier weights.
            progress: show progress bars.
            callback: called with each `Step`. A fit that resumes from a checkpoint calls it for the earlier steps, too.
                It may raise `StopFit`, which ends the fit and keeps the posterior that was there before.
            checkpoint: a file that keeps what the fit has computed. If its process is killed, the same call with the
                same model and data goes on from there, to the same numbers (`docs/training.md`). The file is
                deleted when the fit is done.

        Raises:
            TypeError, ValueError, FloatingPointError: for data that do not fit the model or the likelihood, or that
                cannot be read twice; for a `checkpoint` of another fit; for a fit that ends with NaN or infinity. The
                earlier posterior is kept.
            OSError: if the file of `checkpoint` cannot be read or written.
        """
        chosen = as_criterion(criterion, accuracy)
        check_positive("`fit_hyperparameters(tolerance=...)`", tolerance)
        record = self._recorded_steps(callback)
        asked = {"criterion": chosen.name, **asdict(chosen), **Data.fields(data)}
        asked |= {"budget": budget, "tolerance": tolerance, "warm_start": warm_start}
        with self._fitting(), Checkpoint(checkpoint, "fit_hyperparameters", asked) as kept:
            network = self._renewed()  # predictions meanwhile are those of the earlier fit
            # All data are read before anything is fitted.
            problem, held_out = prepare_with_held_out(
                self.settings, network, loader, val_loader, data, budget=budget, progress=progress
            )
            problem = kept.begin(self.settings, network, problem, held_out, self._earlier(warm_start))
            loss = problem.tangent.log_scale
            problem = replace(problem, tolerance=tolerance, callback=lambda step: record(step.shifted(loss)))
            problem, filters = with_filters(problem.by(chosen, held_out))
            task = self._task(problem, warm_start)
            if filters is None:
                found = task.method.tune(task)
            else:
                found = task.ended(filters.hyperparameters(task.model, task.prior), filters.started)
            fit = task.method.fit(task, found)
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
        budget: float | None = 10.0,
        tolerance: float = 0.015,
        warm_start: bool = False,
        progress: bool = True,
        checkpoint: FilePath | None = None,
    ) -> Self:
        """Draw the posterior at the precisions of the prior and of the noise that the constructor was given.

        With `warm_start` it takes the precisions of the present posterior. Arguments are those of
        `fit_hyperparameters`.
        """
        check_positive("`fit(tolerance=...)`", tolerance)
        asked = {**Data.fields(data), "budget": budget, "tolerance": tolerance, "warm_start": warm_start}
        with self._fitting(), Checkpoint(checkpoint, "fit", asked) as kept:
            network = self._renewed()
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
        accuracy: float | None = None,
        criterion: str | Criterion = "auto",
        budget: float | None = 10.0,
    ) -> Plan:
        """What `fit_hyperparameters` will do with these data: method, training epochs, memory, and why; `print` it.

        It reads all data, runs them through the network once, and counts the operations of a few Jacobian products. It
        fits nothing, and an earlier posterior stays.

        Arguments and errors are those of `fit_hyperparameters`. It is also an error if no method can fit.
        """
        chosen = as_criterion(criterion, accuracy)
        batching, counts, max_rows = self.network.batching, dict(self.network.products), self.network.batching.max_rows
        try:
            problem, held_out = prepare_with_held_out(
                self.settings, self.network, loader, val_loader, data, budget=budget, progress=False
            )
            alone = of_last_layer(problem)
            alone = None if alone is None else alone.by(chosen, held_out)
            return Plan.of(problem.by(chosen, held_out), self.settings.method, alone)
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

    def _renewed(self) -> Linearisation:
        """The network with the weights that it has now, in the coordinates of the prior."""
        network = self.network.renewed()
        self.settings.prior.place(network)
        return network

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
        if self._novelty is not None and not torch.equal(self._novelty.fingerprint, posterior.fingerprint):
            self._novelty = None
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
        r"""Predictions with error bars, by what is cheapest.

        Where the posterior has a closed form, variances and covariances are `φ(x) H⁻¹ φ(x)ᵀ` without sampling noise,
        by `C` VJPs for each datum when something first asks for them. Probabilities, entropies, `epistemic` and
        `log_prob` are means over draws of the outputs of each datum from these, whatever the other data are, if there
        are no more outputs than samples. `samples` and `joint_log_prob` take `φ(x) ζ_k`, `K` JVPs for each datum when
        they are asked for. Of other posteriors all is by the samples.

        Args:
            x: inputs as the model takes them, `[N, ...]`: a tensor, or a tuple or dictionary of arguments. With no
                data, `[0, ...]`, predictions have no rows.
            num_samples: use only the first so many of `samples_`.
            accuracy: use the smallest number of samples whose standard deviations have this relative standard error,
                `1/√(2K)`.
            noise_variances: `R` at these inputs, `[N]` or `[N, ...]`, if the noise is not the same everywhere.
            observed: predict the measurements `T f(x)` instead of the outputs, where the likelihood has
                `Gaussian(observe=T)`.

        Raises:
            NotFittedError: before a fit.
            ValueError: for NaN in `x`, or if weights that the fit shares with the model have changed since.
        """
        fitted = self._require("predict")
        available, seed, samples = fitted.draws(self.settings)
        num_samples, x = samples_for(num_samples, accuracy, available), checked_inputs(x)
        check_options(self.settings.likelihood, observed, noise_variances)
        self._check_network("predict")
        return predict(
            self.network,
            fitted.posterior,
            fitted.fit,
            x,
            num_samples=num_samples,
            seed=seed,
            samples=samples,
            noise_variances=noise_variances,
            observed=observed,
            fitted_layout=None if fitted.tangent is None else fitted.tangent.layout,
            novelty=self._novelty,
            check=lambda: self._check_network("predict"),
        )

    @solver_call
    def functions(self, num_samples: int | None = None) -> Functions:
        r"""The samples of the posterior as functions of the input that autograd differentiates.

        `functions(x)` gives `f(w̄, x) + φ(x) ζ_k`, `[K, N, ...]`, with scale and temperature of predictions: row `k` is
        one function at all inputs. It may be minimised, integrated or followed, one sample at a time, and works inside
        `torch.func` (`grad`, `jacrev`, `vmap`). A call takes `K` JVPs for each datum. Later fits do not change it.

        The error bars of a number that a program computes once are cheaper, and exact where they can be, by
        `propagate`.

        Args:
            num_samples: use only the first so many of `samples_`.

        Raises:
            NotFittedError: before a fit.
            ValueError: if there are not as many samples, or if weights that the fit shares with the model have changed.
        """
        posterior = self._drawn("functions").posterior
        num_samples = samples_for(num_samples, None, len(posterior.samples), call="functions")
        self._check_network("functions")
        return Functions(self.network, posterior, num_samples)

    @solver_call
    def propagate(self, program: Program, *, num_samples: int | None = None) -> RegressionPrediction:
        r"""Error bars of whatever is computed with the network: derivatives, sums, integrals, any program.

            forces = la.propagate(lambda f: -torch.autograd.grad(f(x).sum(), x)[0])
            forces.mean, forces.stddev, forces.joint_covariance(), forces.samples

        `program(f)` is called once, with the network as a function `f` of the input, divided by the temperature of
        predictions. It returns a tensor `T`. Its covariance is `∂T/∂w H⁻¹ (∂T/∂w)ᵀ` where the posterior is known in
        closed form or by dense algebra, and else that of the samples `T + ∂T/∂w ζ_k`. For a program that is linear in
        `f`, as derivatives and sums are, these are the numbers that it computes of the functions `f(w̄, x) + φ(x) ζ_k`.
        For any other they are of first order in the error bars: where these are large, compute samples with
        `functions`.

        It takes a pullback through the program for each number of `T`, or two for each sample where these are fewer.

        Args:
            program: a function of `f`. `f(x)` takes inputs as `predict` does, or the arguments of the model, and
                returns what the model returns, one tensor for each head where it has several. `torch.autograd.grad`
                inside keeps the graph without `create_graph=True`.
            num_samples: use only the first so many of `samples_`.

        Returns:
            A prediction in the shape of `T`, or `[1]` for a single number, whose mean is `T` of the network, and whose
            noise is zero: intervals and densities are those of `T` itself.

        Raises:
            NotFittedError: before a fit.
            TypeError: if the program does not return a tensor in floating point.
            ValueError: if what it returns does not depend on `f`; if there are not as many samples; if weights that the
                fit shares with the model have changed since.
        """
        fitted = self._require("propagate")
        available, seed, samples = fitted.draws(self.settings)
        num_samples = samples_for(num_samples, None, available, call="propagate")
        self._check_network("propagate")
        check = lambda: self._check_network("propagate")  # noqa: E731
        return propagate(
            self.network, fitted.posterior, fitted.fit, program, num_samples=num_samples, seed=seed, samples=samples,
            check=check,
        )  # fmt: skip

    @solver_call
    def predict_loader(
        self,
        loader: Iterable[Any],
        outputs: Sequence[str] | None = None,
        *,
        data: Data = _NO_DATA,
        progress: bool = True,
    ) -> dict[str, Tensor]:
        """Predictions of any number of data, batch by batch: a dictionary of tensors of all data, on the CPU.

        Only one batch is in memory at a time, and what was asked for, so the data may be larger than memory.
        `"samples"` and `"deviations"` are `[K, N, ...]`, everything else is `[N, ...]`, in the order of the loader.

        Args:
            loader: batches `(x, y)` or `x` from a `DataLoader`, a dataset, or any iterable. Targets are not used. From
                a mapping `labels` are left out. A pair is always `(x, y)`: for a network that takes two tensors,
                batches without targets are `((a, b),)`.
            outputs: names of attributes of predictions, as for `to_module`.
            data: how to unpack batches of another form, `Data(unpack=...)`. Their targets may be `None`.
            progress: show a progress bar.

        Raises:
            NotFittedError: before a fit.
            TypeError: for batches of another form.
            ValueError: for a name that predictions do not have; without a batch; as for `predict`; for outputs whose
                shape is not the same in all batches.
        """
        data.check("predict_loader", "unpack")
        fitted = self._require("predict_loader")
        num_samples, seed, samples = fitted.draws(self.settings)
        names = check_quantities("predict_loader", outputs, self.settings.likelihood)

        def predicted(x: Any) -> Prediction:
            self._check_network("predict_loader")
            posterior, fit = fitted.posterior, fitted.fit
            options: Any = {"num_samples": num_samples, "seed": seed, "samples": samples, "novelty": self._novelty}
            return predict(self.network, posterior, fit, x, **options)

        return predictions_of(loader, predicted, names, fitted.posterior.rows, progress, data.unpack)

    @solver_call
    def to_module(
        self,
        num_samples: int | None = None,
        outputs: Sequence[str] | None = None,
        *,
        level: float | None = None,
        example: Any = None,
    ) -> PosteriorModule:
        r"""The network with its error bars as one `nn.Module`, for `torch.export`, ONNX, `torch.compile` and servers.

        `module(x)` is a dictionary of what `predict(x)` gives: probabilities, standard deviations and so on, for a
        batch of any size. The network's weights and the samples are buffers of the module, and scale, temperature and
        noise are inside it. It needs neither training data nor this object.

        If all weights are random, the module computes `f(w̄, x)` and `K` JVPs `φ(x) ζ_k`, by the forward derivatives of
        the operations into which `torch.export` takes the network apart. If only those of a linear last layer are
        (`parameters="last_layer"`), the rest of the network, `module.program.body`, runs once and is not
        differentiated: it may be quantised or pruned. Samples are then one product of matrices, and so is the
        covariance where `predict` has it in closed form.

        Other variances are those of the samples. Where `predict` knows variances without samples, as after an exact
        fit, a notice says which outputs of the module have the noise of samples, `1/√(2K)` of themselves.

        Args:
            num_samples: use only the first so many of `samples_`.
            outputs: names of attributes of predictions, such as `"probs"`, `"mean"`, `"samples"`, `"entropy"`. By
                default `"probs"` or `"mean"`, and `"stddev"` and `"epistemic"` where predictions have them.
            level: one probability, which adds `"lower"` and `"upper"`, the ends of `interval(level)`, for a regression,
                or `"set"`, that of `prediction_set(level)`, for a classification. After `calibrate_conformal` they have
                its guarantee.
            example: inputs of `predict`, with which the network is traced and the module checked. By default the few
                training data that the posterior keeps to recognise its network.

        Raises:
            NotFittedError: before a fit.
            ValueError: for a name that predictions do not have; for a network of several heads; for a network that
                torch does not export, or with an operation without a rule, which is named; if the module does not
                compute what `predict` does; if an example is needed; for a level of other likelihoods, or one after
                `calibrate_conformal` where the module has samples in place of the covariance that `predict` knows.
        """
        fitted = self._drawn("to_module")
        self._check_network("to_module")
        return module_of(
            self.network, self.settings, fitted.posterior, fitted.fit, num_samples, outputs, example, level
        )

    # Held-out data ----------------------------------------------------------------------------------------------------

    @solver_call
    def calibrate(self, val_loader: Iterable[Any], *, data: Data = _NO_DATA) -> Self:
        """Choose the scale of the error bars by held-out data, without another solve.

        It sets `scale_`. For a classification it also sets the temperature of the outputs, `temperature_`, and for a
        regression the noise precision, `noise_precision_`, even if that was given. Earlier values of these are
        replaced. Samples and prior stay. `fit_hyperparameters(..., val_loader=..., criterion="evidence")` does this
        after the fit.

        Args:
            val_loader: data that the network was not trained on, in the form of the training data. For a regression
                their noise is that of data of weight one.
            data: how to unpack the batches of the loader, and the number of data of an `IterableDataset`.

        Raises:
            NotFittedError, TypeError, ValueError: before a fit; as for `val_loader` in `fit_hyperparameters`; after a
                fit with `noise_variances`; if the model has changed. The posterior stays as it was.
        """
        fitted, held_out = self._held_out("calibrate", val_loader, data)
        with self.settings.processes.shared_call():
            posterior = calibrated(held_out, self.network, fitted.posterior, fitted.fit, *fitted.draws(self.settings))
        self._fitted = replace(fitted, posterior=posterior)
        problems = held_out_problems(held_out, fitted.tangent, posterior.likelihood, posterior.calibration)
        warn_of([], [*problems, *posterior.calibration.problems], stacklevel=4)
        return self

    @solver_call
    def calibrate_conformal(
        self, val_loader: Iterable[Any], *, penalty: float | None = None, data: Data = _NO_DATA
    ) -> Self:
        """Make `interval` and `prediction_set` of predictions contain the share of targets that they promise.

        It is split conformal prediction (`predictions.conformal`). For new data of the same distribution the guarantee
        holds on average, with any network and any posterior. Nothing else may have used these data: neither the
        training nor `fit_hyperparameters` or `calibrate`.

        A later fit or `calibrate` undoes it. Files keep it.

        Args:
            val_loader: held-out data in the form of the training data.
            penalty: makes sets of classes adaptive: the most probable classes up to a sum of probabilities (APS, with
                0), and with a penalty for each class but the first (RAPS), .01 say for sets of many classes. They have
                more classes where the network is less sure, and cover hard inputs better, but are larger on average
                than those by `−log p(y)`, the default.
            data: how to unpack the batches of the loader, and the number of data of an `IterableDataset`.

        Raises:
            NotFittedError: before a fit.
            TypeError, ValueError: as in `calibrate`; for a penalty below zero, or of a regression; for a likelihood
                that is neither a regression nor a classification; for outputs whose shape is not the same for all data.
        """
        if penalty:
            check_positive("`calibrate_conformal(penalty=...)`", penalty)
        fitted, held_out = self._held_out("calibrate_conformal", val_loader, data)
        with self.settings.processes.shared_call():
            conformal = split_conformal(
                held_out, self.network, fitted.posterior, fitted.fit, *fitted.draws(self.settings), penalty
            )
        self._fitted = replace(fitted, posterior=replace(fitted.posterior, conformal=conformal))
        return self

    @solver_call
    def calibrate_novelty(
        self, train_loader: Iterable[Any], val_loader: Iterable[Any] | None = None, *, data: Data = _NO_DATA
    ) -> Self:
        """Prepare `novelty` of predictions, and `novelty_of`: how unlike the training data an input is.

        Features of the network rank an input among the training data (`predictions.novelty`): distances of what goes
        into each layer with weights, and of the nearest training data in the last layer. Labels of classes, if there
        are any, say how much the latter count. It is there for any likelihood and several heads, takes a forward pass
        of 5,000 data at most, and needs no fit. What a network averages over positions it averages over padding, too.

        A fit of the network with other weights undoes it. Files keep it, with features of these data. It is not in
        exported modules.

        Args:
            train_loader: the data that the network was trained on, without augmentation.
            val_loader: data of the same form that the network was not trained on; then inputs are ranked among these.
                A network that knows its training data by heart has features of them that new data do not have, so
                that too many of these are strange without.
            data: how to unpack the batches of the loaders, and the number of data of an `IterableDataset`.

        Raises:
            TypeError, ValueError: as for the loader of a fit; for fewer than ten data; for a network in which no layer
                has features of each datum.
        """
        data.check("calibrate_novelty", "unpack", "num_data")
        network = self._network_of("calibrate_novelty")
        with self.settings.processes.shared_call():
            novelty = novelty_by(train_loader, val_loader, network, self.settings, data)
        self.network, self._novelty = network, novelty
        return self

    @solver_call
    def novelty_of(self, x: Any) -> Float[Tensor, " N"]:
        """`novelty` of predictions, `[N]`, by one forward pass and without a fitted posterior.

        Args:
            x: inputs as for `predict`.

        Raises:
            NotFittedError: before `calibrate_novelty`.
            TypeError, ValueError: for inputs that `predict` does not take.
        """
        if self._novelty is None:
            raise NotFittedError("`novelty_of` ranks inputs among the training data: call `calibrate_novelty` first.")
        self.network.shell.check("novelty_of")
        return novelty_at(self._novelty, self.network, checked_inputs(x, "novelty_of"))

    def _network_of(self, call: str) -> Linearisation:
        """The network of the fit, or before a fit as it is now."""
        if self._fitted is None:
            return self.network.renewed()
        self._check_network(call)
        return self.network

    def _held_out(self, call: str, val_loader: Iterable[Any], data: Data) -> tuple[Fitted, HeldOut]:
        """What was fitted, and data that calibrate it."""
        data.check(call, "unpack", "num_data")
        fitted = self._require(call)
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
        return self.network.to_weights(fitted.new_samples(fit, self.settings, num_samples))

    @solver_call
    def sample_prior(self, x: Any, num_samples: int = 16) -> Float[Tensor, "K N ..."]:
        """Deviations `φ(x) θ_k` of the outputs, `θ_k ~ N(0, A⁻¹)`: what functions the fitted prior takes for likely.

        They start from the same noise as the first samples of the posterior. Several heads are flat, one after another.

        Args:
            x: inputs as for `predict`.
            num_samples: `K`.

        Raises:
            NotFittedError: before a fit.
            ValueError: for inputs that `predict` does not take, or if the model has changed.
        """
        posterior = self._require("sample_prior").posterior
        check_whole("`sample_prior(num_samples=...)`", num_samples, 1)
        self._check_network("sample_prior")
        x = checked_inputs(x, "sample_prior")
        return prior_deviations(self.network, posterior, x, num_samples, self.settings.seed)

    @solver_call
    def log_marginal_likelihood(self, at: str = "mode") -> MarginalLikelihood:
        r"""`log p(y)` of the linear model at the fitted hyperparameters, summed over the data, with its standard error.

        `−Σ_i ℓ(y_i, h(θ̄, x_i)) − ½ θ̄ᵀAθ̄ − ½ log|I + A⁻¹M|`. The exact method computes the log determinant exactly,
        others by stochastic Lanczos quadrature. For a loss that is not quadratic this is Laplace's approximation. It
        does not contain what validation data chose (`scale_`, and the noise of predictions).

        With `at="network"` it is taken at the weights and outputs of the network. Use that one, or `score`, to compare
        networks.
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

        The curvature is that at the fitted hyperparameters. If the prior has several precisions, they are multiplied by
        one factor, and the axis is their geometric mean over the weights.

        Args:
            decades: how far the curves go to both sides of the fitted precision.
            num: the number of points.
        """
        check_positive("`evidence_path(decades=...)`", decades, 12)
        check_whole("`evidence_path(num=...)`", num, 2)
        fit, tangent = self._with_data("evidence_path")
        path = evidence_of(fit, self.settings, "evidence_path", decades)
        grid = fit.alpha * torch.logspace(-decades, decades, num, dtype=torch.float64)
        return EvidenceCurves.of(path, grid).shifted(tangent.log_scale)

    @solver_call
    def leave_one_out(self) -> LeaveOneOut:
        r"""Each training datum predicted from all others by the *linear model*, at the fitted hyperparameters.

        `log_prob`, `[N]`, is `log p(y_i | y_{−i})`, joint over the outputs of a datum that have a target. For a
        Gaussian likelihood `mean` and `covariance` are those of the targets, in their units and with noise (Rasmussen &
        Williams 2006, eq. 5.10–5.12). For any other they are those of the outputs, such as logits, after a Newton step
        (`predictions.leave_one_out`). Both come from the covariance of the fit, without another fit. Weights and
        features stay those of all data.

        Raises:
            ValueError: if the fit is neither exact nor that of a linear last layer whose closed form is exact.
        """
        return leave_one_out_of(*self._with_data("leave_one_out"), self.settings)

    @solver_call
    def score(self, kind: str = "evidence", *, num_data: int = 1000) -> Score:
        r"""How good the network is, judged by its training data alone, in nats for each datum; larger is better.

        Scores compare networks of any architecture that were fitted to the same data (`compare`). A datum without a
        target does not count. A datum with some targets counts as one.

        - `"evidence"`: `log p(y)/N` by Laplace's approximation at the network's own weights and outputs, with the
          precisions of prior and noise at their maximum. `log_marginal_likelihood()` is that of the linear model at its
          mode, which ranks networks less well.
        - `"loo"`: the mean of `log p(y_i | y_{−i})`, each datum predicted without its target: around `f_i + V_i^{−i}
          ∂ℓ_i/∂f`, where a Newton step from the network's output `f_i` ends, with the covariance `V_i^{−i} = V_i (I −
          B_i V_i)⁻¹` and the scale and temperature of predictions. It is exact for a linear model with Gaussian noise
          at its minimum. The network has to be at a minimum of the loss with weight decay; elsewhere the step is too
          long (`predictions.leave_one_out`). If few samples make a covariance too noisy, a `ConvergenceWarning` says
          so.

        Neither score notices labels that a network has learnt by heart (`docs/design.md`); held-out data do.

        Args:
            kind: `"evidence"` or `"loo"`.
            num_data: for `"loo"`, the largest number of training data that are left out. They are random and depend on
                the seed only. Each takes a JVP for every sample, or a VJP for every output where covariances have a
                closed form.

        Raises:
            NotFittedError: before a fit, or for a posterior that was loaded without its data.
            ValueError: for another kind; if none of the chosen data has a target.
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
        """Checks of the solves, samples and hyperparameters of the last fit; `print` it for a table with advice.

        The energies of the samples are compared with their distributions (`predictions.diagnosis`).
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
        """`α`, `[G]`, one for each group of the prior."""
        return self._require("prior_precision_").posterior.prior.precision

    @property
    def prior_scale_(self) -> Float[Tensor, " P"]:
        """`s`, `[P]`, prior standard deviations of the weights at `α = 1`, all one without a g-prior."""
        return self._require("prior_scale_").posterior.prior.scale

    @property
    def noise_precision_(self) -> Tensor | None:
        """`1/σ²` of predictions, a scalar or `[C]`; `None` unless the likelihood is Gaussian."""
        posterior = self._require("noise_precision_").posterior
        return posterior.calibration.likelihood(posterior.likelihood).noise_precisions()

    @property
    def effective_dimension_(self) -> Float[Tensor, " G"]:
        """`γ`, `[G]`: how many directions of weight space the data determine."""
        return self._require("effective_dimension_").posterior.effective_dimension

    @property
    def scale_(self) -> float:
        """`τ`: predictions use the samples `√τ ζ_k`."""
        return self._require("scale_").posterior.calibration.scale

    @property
    def temperature_(self) -> float:
        """Predictions divide the outputs by it."""
        return self._require("temperature_").posterior.calibration.temperature

    @property
    def calibration_(self) -> Calibration:
        """Scale and temperature, with the log-likelihoods that they were chosen by."""
        return self._require("calibration_").posterior.calibration

    @property
    def converged_(self) -> bool:
        """Whether samples and mode, and hyperparameters if they were fitted, reached their tolerances."""
        return self._require("converged_").posterior.converged

    @property
    def samples_(self) -> Float[Tensor, "K P"]:
        """Posterior samples `ζ` with mean zero, `[K, P]`."""
        samples = self._drawn("samples_").posterior.samples
        return self.network.to_weights(samples)

    @property
    def mode_(self) -> Float[Tensor, " P"]:
        """The mode `θ̄` of the linear model, `[P]`."""
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
        return self.network.to_weights(fitted.posterior.mode)

    @property
    def posterior_(self) -> Posterior:
        """The posterior: prior, likelihood, samples or curvature, calibration and history."""
        return self._require("posterior_").posterior

    @property
    def epochs_(self) -> float:
        """What the fit, and everything that was computed from it since, has cost, in training epochs of operations.

        It is NaN for a posterior that was loaded.
        """
        fit = self._require("epochs_").fit
        return math.nan if fit is None else fit.task.budget.spent_with_later

    @property
    def stopped_(self) -> bool:
        """Whether the last `fit_hyperparameters` ended early, as by `StopFit`: then the posterior is an older one."""
        return bool(self._unfinished)

    @property
    def history_(self) -> list[Step]:
        """One `Step` for each step of `fit_hyperparameters`. An interrupted fit has the steps that it finished."""
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
        for name, (variance, lengthscale) in prior.blocks.items():
            length = "" if name == OTHERS else f", lengthscale {lengthscale:.3g}"
            head += f", {name}: variance {variance / float(prior.precision):.3g}{length}"
        temperature = fitted.posterior.calibration.temperature
        divided = "" if temperature == 1 else f", temperature_={temperature:.3g}"
        return head + f", prior_precision_={{{alpha}}}, effective_dimension_={gamma:.1f}{divided}{floored})"

    def __str__(self) -> str:
        """As `repr`, what else there is to know, and what the fit has cost and how accurate it is."""
        fit = None if self._fitted is None else self._fitted.fit
        if fit is None or fit.sampled is None:
            return repr(self)
        return "\n".join([repr(self), *fit.remarks, f"{fit.task.budget}; {fit.accuracy}."])

    # Files ------------------------------------------------------------------------------------------------------------

    def state_dict(self, *, include_data: bool = True) -> dict[str, Any]:
        """All that predictions need, as nested dictionaries of tensors and plain values.

        `torch.save` writes it, and `torch.load(..., weights_only=True)` reads it. It contains these data:

        - the inputs of at most four training data. `load` compares by them whether a network computes what it did at
          the fit, and `to_module` traces the network with them;
        - after an exact fit in observation space all training data: inputs, targets, weights and noise variances.
          Covariances are computed from them;
        - after `calibrate_conformal` a score for each target of its data, without inputs and targets;
        - after `calibrate_novelty` features of its data in the last layer, and ranks of those in others.

        Everything else is computed from sums over the data.

        Args:
            include_data: with `False` it contains no inputs and targets. Then `load` does not notice a network with the
                same weights that computes something else, as with another activation, and `to_module` needs `example=`.
                After an exact fit in observation space variances and covariances are those of the samples, with a
                relative error of `√(2/K)`, and `sample`, evidence and leave-one-out need another fit.
        """
        return self._state(include_data, "state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a posterior from `state_dict`.

        Raises:
            ValueError: if the state is damaged or incomplete; if it belongs to a network with other weights or another
                function, to another likelihood or to another choice of parameters. The earlier posterior is kept.
        """
        self._take_over(state, "load_state_dict")

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over a posterior of the network at an earlier time of its training, as the start of `warm_start=True`.

        It predicts nothing before the next fit, unless the network has the weights of that posterior.

        Args:
            state: from `state_dict`, whatever the weights of the network were then.

        Raises:
            ValueError: if the state is damaged or incomplete, or belongs to another likelihood or choice of parameters.
        """
        posterior, self.settings = posterior_of(state, self.settings, self.network, "start_from", of_this_network=False)
        self._fitted, self._unfinished, self._novelty = Fitted(posterior, of_earlier_weights=True), (), None

    def save(self, path: File, *, include_data: bool = True) -> None:
        """Write `state_dict()` to a file. It contains some or all training data; `state_dict` says which.

        The state goes to a temporary file in the same folder, which takes the place of an older file when it is
        complete. So there is always one whole file, the old one or the new one. A process that is killed may leave the
        temporary file, whose name begins with a dot and ends in `.tmp`.

        Args:
            path: the path of the file, or an open file in binary mode, to which the state is written directly.
            include_data: with `False` the file contains no inputs and targets, with the consequences in `state_dict`.

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
            path: the path of the file, or an open file in binary mode.
            model: the network, with the weights that it had at the fit.
            likelihood: needed only if the file cannot contain it: a likelihood of your own, or one of measurements,
                `Gaussian(observe=T)`.
            prior: needed only for a prior of your own.
            method: needed only for a method of your own.
            process_group: as in the constructor, for later fits. Any number of processes may have saved the file.

        Raises:
            OSError: if the file cannot be opened.
            ValueError: if the file is damaged, of another version, or no file of `save`; if `model` has other weights
                than at the fit, or computes another function of the data; if likelihood, prior or method has to be
                given.
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
        posterior = posterior if include_data else posterior.without_data()
        return state_of(posterior, self.settings, self.network, self._novelty)

    def _take_over(self, state: dict[str, Any], call: str) -> None:
        network = self.network.renewed()
        posterior, settings = posterior_of(state, self.settings, network, call)
        fit, tangent = restore_fit(settings, network, posterior)
        novelty = novelty_of_state(state, network)
        self.settings, self.network, self._unfinished, self._novelty = settings, network, (), novelty
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
