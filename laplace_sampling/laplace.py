"""`LinearisedLaplace`: error bars for a trained network."""

import json
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.data import TrainingData
from laplace_sampling.evidence import EMStep, effective_dimension, fit_em
from laplace_sampling.likelihoods import Gaussian, Likelihood, as_likelihood
from laplace_sampling.linearise import Linearisation, Selection
from laplace_sampling.operators import DenseFeatures, Features, NetworkFeatures
from laplace_sampling.predictive import ClassificationPrediction, RegressionPrediction
from laplace_sampling.priors import GaussianPrior, GPrior, IsotropicPrior, LayerwisePrior, Prior, as_prior
from laplace_sampling.sampling import Draws, LinearModel, linear_model_mode, sample_posterior
from laplace_sampling.solvers import SGD, ConvergenceWarning, Dense, Solver

__all__ = ["LinearisedLaplace", "NotFittedError"]

# "auto" takes the exact method up to this size of its matrix, and of the Jacobian that it holds (in numbers).
_AUTO_EXACT_SIZE, _AUTO_EXACT_JACOBIAN = 2000, 5e7
_EXACT_JACOBIAN_BYTES = 8 * 2**30

# Streams of one seed: what each set of draws is for.
_EM_STREAM, _PROBE_STREAM, _SAMPLE_STREAM = 0, 1, 2

_FORMAT = 1


class NotFittedError(ValueError, AttributeError):
    """A method that needs a fitted posterior was called before `fit_hyperparameters`, `fit` or `load`."""


@dataclass(frozen=True)
class _Posterior:
    """All that prediction needs."""

    prior: GaussianPrior
    likelihood: Likelihood
    samples: Float[Tensor, "K P"]
    mode: Float[Tensor, " P"]
    effective_dimension: Float[Tensor, " G"]
    effective_dimension_se: Float[Tensor, " G"]
    history: list[EMStep]
    rows: int
    fingerprint: Tensor


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
        method: `"sgd"`; `"exact"`, dense algebra, for small problems; `"auto"`, exact where it is cheap.
        num_samples: posterior samples for predictions, `K`.
        seed: of all randomness.
        solver: settings of the stochastic solver.

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
    ) -> None:
        _check_choice("linear_model", linear_model, ("auto", "affine", "homogeneous"))
        _check_choice("hessian_at", hessian_at, ("auto", "network", "mode"))
        _check_choice("method", method, ("auto", "sgd", "exact"))
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
        self._posterior: _Posterior | None = None
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
            tolerance: stop when `log α` (and `log b`) changes by less.
            num_samples: samples during EM; the relative standard error of `γ` is about `√(2/(Kγ))`.
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
        result = fit_em(
            model,
            self._build_prior(model),
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
                f"`fit_hyperparameters` stopped after {max_steps} steps, before its tolerance: prior precision went "
                f"{[f'{s.prior_precision[0]:.3g}' for s in result.history]}. Raise `max_steps`, or `tolerance`.",
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
        self._draw_posterior(model, data, result.prior, solver, start, result.history, progress)
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
        solver: Solver = self.solver
        if self._choose_method(features) == "exact":
            features, solver = DenseFeatures.of(features), Dense()
            f = f.double()
        offset = torch.zeros_like(f)
        if self.linear_model == "affine":
            offset = f - features.outputs(self.network.weights[None].to(features.dtype))[0]
        return LinearModel(features, offset, f, targets, self.likelihood), data, solver

    def _choose_method(self, features: Features) -> str:
        rows = features.num_data * features.num_outputs
        smaller, jacobian = min(rows, features.size), rows * features.size
        if self.method == "auto":
            return "exact" if smaller <= _AUTO_EXACT_SIZE and jacobian <= _AUTO_EXACT_JACOBIAN else "sgd"
        needed = 8 * (jacobian + 3 * smaller**2)
        if self.method == "exact" and needed > _EXACT_JACOBIAN_BYTES:
            raise ValueError(
                f'method="exact" would need about {needed / 2**30:.1f} GiB for {features.num_data} data, '
                f'{features.num_outputs} outputs and {features.size} weights; use method="sgd".'
            )
        return self.method

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
        solution = sample_posterior(model.ggn(at), prior, draws, solver, description=description)
        if not (solution.converged and minimum.converged):
            warnings.warn(
                f"The posterior has not converged: residual {float(solution.residual.max()):.2g} of the samples, "
                f"{minimum.residual:.2g} of the mode. Give more passes with `solver=SGD(epochs=..., mode_epochs=...)`.",
                ConvergenceWarning,
                stacklevel=4,
            )
        gamma, gamma_se = effective_dimension(solution, prior)
        dtype = self.network.dtype
        self._posterior = _Posterior(
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
        self._model, self._mode_outputs, self._drawn = model, mode_outputs, 0

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
        solver = (
            Dense()
            if isinstance(model.features, DenseFeatures)
            else replace(self.solver, epochs=2 * self.solver.epochs)
        )
        draws = Draws(num_samples, self.seed, _SAMPLE_STREAM + self._drawn)
        solution = sample_posterior(model.ggn(at), posterior.prior, draws, solver)
        return (solution.value * posterior.prior.scale).to(self.network.dtype)

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
        alpha = ", ".join(f"{name}: {float(a):.3g}" for name, a in zip(p.prior.names, p.prior.precision, strict=True))
        floored = f", {p.prior.num_floored} weights floored" if p.prior.num_floored else ""
        return (
            head
            + f", prior_precision_={{{alpha}}}, effective_dimension_={float(p.effective_dimension.sum()):.1f}{floored})"
        )

    # Keeping ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All that predictions need, as tensors only: loads with `torch.load(..., weights_only=True)`."""
        p = self._fitted("state_dict")
        settings = {
            "format": _FORMAT,
            "likelihood": p.likelihood.name,
            "likelihood_class": type(p.likelihood).__name__,
            "learn_noise": bool(getattr(p.likelihood, "learn", False)),
            "linear_model": self.linear_model,
            "hessian_at": self.hessian_at,
            "parameters": self.network.names,
            "groups": p.prior.names,
            "num_floored": p.prior.num_floored,
            "rows": p.rows,
            "recipe": self._recipe(),
            "history": [asdict(step) for step in p.history],
        }
        state = {
            "settings": torch.frombuffer(bytearray(json.dumps(settings).encode()), dtype=torch.uint8),
            "fingerprint": p.fingerprint,
            "samples": p.samples,
            "mode": p.mode,
            "prior_precision": p.prior.precision,
            "prior_groups": p.prior.groups,
            "prior_scale": p.prior.scale,
            "effective_dimension": p.effective_dimension,
            "effective_dimension_se": p.effective_dimension_se,
        }
        if isinstance(p.likelihood, Gaussian):
            state["noise_precision"] = torch.as_tensor(p.likelihood.noise_precision)
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def _recipe(self) -> dict[str, Any]:
        """What the constructor was given, so that a loaded object fits again as the saved one would."""
        prior = {"class": type(self.prior).__name__, **(asdict(self.prior) if is_dataclass(self.prior) else {})}
        recipe = {
            "prior": prior,
            "prior_precision": self.prior_precision,
            "method": self.method,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "solver": asdict(self.solver),
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
        settings = _settings(state)
        if settings["parameters"] != self.network.names:
            raise ValueError(
                f"The state is of {len(settings['parameters'])} random parameters, {_few(settings['parameters'])}, but "
                f"this LinearisedLaplace has {len(self.network.names)}, {_few(self.network.names)}. "
                "Give the same `parameters=`."
            )
        if settings["likelihood"] != self.likelihood.name:
            raise ValueError(
                f"The state is of likelihood {settings['likelihood']!r}, but this LinearisedLaplace has "
                f"{self.likelihood.name!r}."
            )
        P, G = self.network.num_parameters, len(settings["groups"])
        shapes = {
            "mode": (P,),
            "prior_precision": (G,),
            "prior_groups": (P,),
            "prior_scale": (P,),
            "fingerprint": (32,),
        }
        shapes |= {"effective_dimension": (G,), "effective_dimension_se": (G,)}
        wrong = [name for name, shape in shapes.items() if name not in state or state[name].shape != shape]
        if wrong or "samples" not in state or state["samples"].shape[1:] != (P,):
            raise ValueError(
                f"The state is incomplete or damaged: entries {wrong or ['samples']} are not as they were."
            )
        self._check_fingerprint(state["fingerprint"], "load_state_dict")
        device = self.network.device
        likelihood = self.likelihood
        if isinstance(likelihood, Gaussian):
            likelihood = Gaussian(state["noise_precision"], learn=settings["learn_noise"])
        self._posterior = _Posterior(
            prior=GaussianPrior(
                precision=state["prior_precision"].cpu(),
                groups=state["prior_groups"].to(device),
                scale=state["prior_scale"].to(device),
                names=tuple(settings["groups"]),
                num_floored=settings["num_floored"],
            ),
            likelihood=likelihood,
            samples=state["samples"].to(device),
            mode=state["mode"].to(device),
            effective_dimension=state["effective_dimension"].to(device),
            effective_dimension_se=state["effective_dimension_se"].to(device),
            history=[EMStep(**step) for step in settings["history"]],
            rows=settings["rows"],
            fingerprint=state["fingerprint"].cpu(),
        )
        self.linear_model, self.hessian_at = settings["linear_model"], settings["hessian_at"]
        self._model = self._mode_outputs = None

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
        settings = _settings(state)
        recipe = settings["recipe"]
        if likelihood is None:
            likelihood = as_likelihood(settings["likelihood"])
            if "noise_precision" in recipe:
                likelihood = Gaussian(
                    torch.tensor(recipe["noise_precision"], dtype=torch.float64), learn=settings["learn_noise"]
                )
        if prior is None:
            fields = dict(recipe["prior"])
            own = {c.__name__: c for c in (GPrior, IsotropicPrior, LayerwisePrior)}
            name = fields.pop("class")
            if name not in own:
                raise ValueError(f"`load`: the prior was a {name}, which is not of this library; give it as `prior=`.")
            prior = own[name](**fields)
        la = cls(
            model,
            likelihood,
            prior=prior,
            prior_precision=recipe["prior_precision"],
            parameters=settings["parameters"],
            method=recipe["method"],
            num_samples=recipe["num_samples"],
            seed=recipe["seed"],
            solver=SGD(**recipe["solver"]),
        )
        la.load_state_dict(state)
        return la

    # Checks ----------------------------------------------------------------------------------------------------

    def _fitted(self, what: str) -> _Posterior:
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


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}={value!r}` is not known; use one of {list(choices)}.")


def _settings(state: dict[str, Tensor]) -> dict[str, Any]:
    if not isinstance(state, dict) or "settings" not in state:
        raise ValueError("This is not a state of a LinearisedLaplace: it has no entry 'settings'.")
    settings = json.loads(bytes(state["settings"].cpu().tolist()))
    if settings["format"] != _FORMAT:
        raise ValueError(f"The state has format {settings['format']}, but this version reads format {_FORMAT}.")
    return settings


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
