"""A fitted posterior as nested dictionaries, and back: what `save` writes and `load` reads.

A state holds tensors and plain values only, for `torch.load(..., weights_only=True)`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from laplace_sampling.data.batches import as_plain
from laplace_sampling.evidence.step import Step
from laplace_sampling.files import File, read, write
from laplace_sampling.fitted import Fitted, FittedModel, check_fingerprint, check_function
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.recipes import likelihood_from_recipe, recipe_of_likelihood
from laplace_sampling.linear_model.priors.as_prior import prior_from_recipe, recipe_of_prior
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Prior
from laplace_sampling.methods import method_from_recipe, recipe_of_method
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.function_fingerprint import FunctionFingerprint
from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.posterior import Posterior
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.conformal import conformal_of
from laplace_sampling.preparation import restore_fit
from laplace_sampling.settings import Settings

_FORMAT = 5
_SETTINGS = ("likelihood", "prior", "method", "num_samples", "seed", "linear_model")
_NUM_NAMED = 3


class SavableModel(FittedModel):
    """A fitted model that can be written to a file, and read."""

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

    def _state(self, include_data: bool, call: str) -> dict[str, Any]:
        posterior = self._require(call).posterior
        if posterior.curvature is None:
            posterior = self._drawn(call).posterior
        if not include_data:
            posterior = posterior.without_data()
        return state_of(posterior, self.settings, self.network)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a posterior from `state_dict`.

        Raises:
            ValueError: if the state is damaged or incomplete, of a network with other weights or another function, of
                another likelihood or another choice of parameters; what was fitted before is kept.
        """
        self._take_over(state, "load_state_dict")

    def _take_over(self, state: dict[str, Any], call: str) -> None:
        check_format(state)
        network = self.network.renewed()
        posterior, settings = posterior_of(state, self.settings, network, call)
        fit, tangent = restore_fit(settings, network, posterior)
        self.settings, self.network, self._unfinished = settings, network, ()
        self._keep(posterior, fit, tangent)

    def start_from(self, state: dict[str, Any]) -> None:
        """Take over a posterior of the network as it was earlier in its training, for `warm_start=True` to start from.

        Nothing is predicted before the next fit, unless the network has the weights of that posterior.

        Args:
            state: from `state_dict`, whatever the weights of the network were then.

        Raises:
            ValueError: if the state is damaged or incomplete, of another likelihood or another choice of parameters.
        """
        check_format(state)
        posterior, self.settings = posterior_of(state, self.settings, self.network, "start_from", of_this_network=False)
        self._fitted, self._unfinished = Fitted(posterior, of_earlier_weights=True), ()

    def save(self, path: File, *, include_data: bool = True) -> None:
        """Write `state_dict()` to a file, which holds the inputs of a few training data, or all data: see there.

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
            prior: likewise.
            method: likewise.
            process_group: as of the constructor, whatever the number of processes was that saved it.

        Raises:
            OSError: if the file cannot be opened.
            ValueError: if it is damaged, of something else or of another version; if `model` has other weights than at
                the fit, or computes another function of the data; if something has to be given.
        """
        state = read(path)
        check_format(state)
        arguments = arguments_of(state, likelihood=likelihood, prior=prior, method=method)
        # The constructor is that of `LinearisedLaplace`.
        la = cls(model, **arguments, process_group=process_group)  # pyright: ignore[reportCallIssue]
        la._take_over(state, "load")
        return la


def state_of(posterior: Posterior, settings: Settings, network: Linearisation) -> dict[str, Any]:
    """The state of a posterior, whose tensors are copies."""
    state = {
        "format": _FORMAT,
        "settings": {
            "likelihood": recipe_of_likelihood(settings.likelihood),
            "prior": recipe_of_prior(settings.prior),
            "method": recipe_of_method(settings.method),
            **{name: getattr(settings, name) for name in _SETTINGS[3:]},
        },
        "network": {
            "parameters": network.selection,
            "last_layer": isinstance(network, LastLayer) and not network.named,
            "lacking": network.lacking,
            "observed": settings.observation is not None,
            "fingerprint": posterior.fingerprint,
            "function": None if posterior.function is None else posterior.function.state(),
        },
        "posterior": {
            "prior": {field.name: getattr(posterior.prior, field.name) for field in fields(posterior.prior)},
            "noise_precision": posterior.likelihood.noise_precisions(),
            # Those of a closed form are drawn again when they are asked for.
            "samples": posterior.samples if posterior.curvature is None else posterior.samples[:0],
            "mode": posterior.mode,
            "effective_dimension": posterior.effective_dimension,
            "effective_dimension_se": posterior.effective_dimension_se,
            "history": [asdict(step) for step in posterior.history],
            "method": recipe_of_method(posterior.method),
            "rows": posterior.rows,
            "converged": posterior.converged,
            "unequal_noise": posterior.unequal_noise,
            "calibration": asdict(posterior.calibration),
            "exact": posterior.exact,
            "conformal": {} if posterior.conformal is None else posterior.conformal.tensors(),
        },
    }
    return tree_map_only(Tensor, lambda tensor: as_plain(tensor.detach()).clone(), state)


def check_format(state: Any) -> None:
    """Raise a `ValueError` unless something is a state of this version."""
    if not isinstance(state, dict) or not isinstance(found := state.get("format"), int):
        raise ValueError(
            "This is not a state of a LinearisedLaplace, or one of an old version: it has no entry 'format'."
        )
    if found == _FORMAT and not all(isinstance(state.get(n), dict) for n in ("settings", "network", "posterior")):
        raise ValueError("The state is incomplete or damaged. Take another copy of it, or fit and save again.")
    if found != _FORMAT:
        what = "a newer version wrote it, so update laplace_sampling" if found > _FORMAT else "an older one wrote it"
        raise ValueError(f"The state has format {found}, but this version reads format {_FORMAT}: {what}.")


def posterior_of(
    state: dict[str, Any], settings: Settings, network: Linearisation, call: str, of_this_network: bool = True
) -> tuple[Posterior, Settings]:
    """The posterior of a state, and the settings with the linear model that it is of.

    Args:
        state: from `state_of`.
        settings: of the object that takes it over.
        network: whose posterior it must be.
        call: what the user called.
        of_this_network: whether it must be of the weights that the network has now.

    Raises:
        ValueError: if the state is incomplete, has NaN in it, is of other weights, of another function of the data, of
            other random parameters or another likelihood.
    """
    with _complete():
        of_network, kept, saved = state["network"], state["posterior"], state["settings"]
        prior = GaussianPrior(**kept["prior"])
        numbers = {"samples": kept["samples"], "mode": kept["mode"], "noise_precision": kept["noise_precision"]}
        _check_finite({**numbers, "prior": torch.cat([prior.precision, prior.scale.cpu()])})
        function = of_network["function"] and FunctionFingerprint(**of_network["function"])
        fingerprint, selection = of_network["fingerprint"].cpu(), of_network["parameters"]
        lacking, observed, recipe = of_network["lacking"], of_network["observed"], saved["likelihood"]
    if isinstance(network, LastLayer):
        network.take_over(selection)
    _check_selection(selection, network.selection)
    if lacking is not None:  # a wrong derivative is found at a fit only
        network.take_two_pullbacks(lacking)
    _check_likelihood(recipe, settings)
    _check_observed(observed, settings.observation is not None)
    if of_this_network:
        check_fingerprint(network, fingerprint, call)
        check_function(network, function, call)
    with _complete():
        likelihood, device = settings.likelihood, network.device
        if kept["samples"].shape[1:] != (network.num_parameters,):
            raise KeyError("samples")
        if isinstance(likelihood, Gaussian):
            likelihood = likelihood.with_precision(kept["noise_precision"])
        there = tree_map_only(Tensor, lambda tensor: tensor.to(device), kept)
        posterior = Posterior(
            prior=replace(
                prior, precision=prior.precision.cpu(), groups=there["prior"]["groups"], scale=there["prior"]["scale"]
            ),
            likelihood=likelihood,
            samples=there["samples"],
            mode=there["mode"],
            effective_dimension=there["effective_dimension"],
            effective_dimension_se=there["effective_dimension_se"],
            history=[Step(**step) for step in kept["history"]],
            method=method_from_recipe(kept["method"], otherwise=settings.method),
            rows=kept["rows"],
            fingerprint=fingerprint,
            function=function,
            converged=kept["converged"],
            unequal_noise=kept["unequal_noise"],
            calibration=Calibration(**kept["calibration"]),
            exact=there["exact"],
            conformal=conformal_of(kept["conformal"]),
        )
    # With these the samples of a closed form are those of the saved posterior.
    return posterior, replace(settings, **{name: saved[name] for name in _SETTINGS[_NUM_NAMED:]})


@contextmanager
def _complete() -> Iterator[None]:
    """One sentence for a state that lacks something, or has something else in its place."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"The state is incomplete or damaged ({error}). Take another copy of it, or fit and save again."
        ) from error


def arguments_of(state: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Arguments for the constructor, so that a loaded object fits again as the saved one would.

    Args:
        state: from `state_of`.
        given: `likelihood`, `prior` and `method` in place of those that were saved; `None` for these.
    """
    with _complete():
        arguments, of_network = {name: state["settings"][name] for name in _SETTINGS}, state["network"]
        selection = "last_layer" if of_network["last_layer"] else of_network["parameters"]
    of_recipe = {"likelihood": likelihood_from_recipe, "prior": prior_from_recipe, "method": method_from_recipe}
    for name, make in of_recipe.items():
        arguments[name] = make(arguments[name]) if given[name] is None else given[name]
    return arguments | {"parameters": selection}


def _check_finite(numbers: dict[str, Tensor | None]) -> None:
    # Extremes are NaN where anything is, and take no memory.
    known = {name: number for name, number in numbers.items() if number is not None and number.numel()}
    wrong = [name for name, number in known.items() if not all(bool(v.isfinite()) for v in number.aminmax())]
    if wrong:
        raise ValueError(f"The posterior has NaN or infinity in {wrong}, so that it predicts nothing: fit again.")


def _check_selection(saved: Any, selection: Any) -> None:
    if saved == selection:
        return
    saved_names, names = list(saved), list(selection)
    which = "the same, but of other elements" if saved_names == names else _first_of(names)
    raise ValueError(
        f"The state is of {len(saved_names)} random parameters, {_first_of(saved_names)}, but this LinearisedLaplace "
        f"has {len(names)}, {which}. Give the same `parameters=`."
    )


def _check_likelihood(saved: dict[str, Any], settings: Settings) -> None:
    recipe = recipe_of_likelihood(settings.likelihood)
    (name, kind), (own_name, own_kind) = ((r["name"], r["class"]) for r in (saved, recipe))
    if (name, kind) != (own_name, own_kind):
        kinds = [f", a {k}" if name == own_name else "" for k in (kind, own_kind)]
        raise ValueError(
            f"The state is of likelihood {name!r}{kinds[0]}, but this LinearisedLaplace has {own_name!r}{kinds[1]}."
        )


def _check_observed(saved: bool, observed: bool) -> None:
    if saved != observed:
        raise ValueError(
            f"The posterior was {'not ' if observed else ''}fitted to measurements `y = T f(x) + noise`: "
            f"{'leave out `observe`' if observed else 'give T as `likelihood=Gaussian(observe=T)`'}."
        )


def _first_of(names: list[str]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (", …" if len(names) > _NUM_NAMED else "")
