"""A fitted posterior as tensors only, and back: what `save` writes and `load` reads.

A state is a dictionary of tensors, for `torch.load(..., weights_only=True)`.
"""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from laplace_sampling.checksums import described, with_checksums
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

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from laplace_sampling.settings import Settings

__all__ = ["SavableModel"]

# Before the names of the tensors of an exact or factored posterior, of what the network computes, and of scores.
_EXACT, _FUNCTION, _CONFORMAL = "exact.", "function.", "conformal."
_NUM_NAMED = 3


class SavableModel(FittedModel):
    """A fitted model that can be written to a file, and read."""

    def state_dict(self, *, include_data: bool = True) -> dict[str, Tensor]:
        """All that predictions need, as tensors only: loads with `torch.load(..., weights_only=True)`.

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

    def _state(self, include_data: bool, call: str) -> dict[str, Tensor]:
        posterior = self._require(call).posterior
        if posterior.curvature is None:
            posterior = self._drawn(call).posterior
        if not include_data:
            posterior = posterior.without_data()
        return state_of(posterior, self.settings, self.network)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a posterior from `state_dict`.

        Raises:
            ValueError: if the state is damaged or incomplete, of a network with other weights or another function, of
                another likelihood or another choice of parameters; what was fitted before is kept.
        """
        self._take_over(state, described(state), "load_state_dict")

    def _take_over(self, state: dict[str, Tensor], how: dict[str, Any], call: str) -> None:
        posterior, settings = posterior_of(state, how, self.settings, self.network, call)
        fit, tangent = restore_fit(settings, self.network, posterior)
        self.settings, self._unfinished = settings, ()
        self._keep(posterior, fit, tangent)

    def start_from(self, state: dict[str, Tensor]) -> None:
        """Take over a posterior of the network as it was earlier in its training, for `warm_start=True` to start from.

        Nothing is predicted before the next fit, unless the network has the weights of that posterior.

        Args:
            state: from `state_dict`, whatever the weights of the network were then.

        Raises:
            ValueError: if the state is damaged or incomplete, of another likelihood or another choice of parameters.
        """
        posterior, self.settings = posterior_of(
            state, described(state), self.settings, self.network, "start_from", of_this_network=False
        )
        self._fitted, self._unfinished = Fitted(posterior), ()

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
        process_group: "ProcessGroup | None" = None,
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
        how = described(state)
        arguments = arguments_of(how, likelihood=likelihood, prior=prior, method=method)
        # The constructor is that of `LinearisedLaplace`.
        la = cls(model, **arguments, process_group=process_group)  # pyright: ignore[reportCallIssue]
        la._take_over(state, how, "load")
        return la


def state_of(posterior: Posterior, settings: "Settings", network: Linearisation) -> dict[str, Tensor]:
    """The state of a posterior: its tensors, as JSON how it was made, and checksums of both."""
    how = {
        "groups": posterior.prior.names,
        "num_floored": posterior.prior.num_floored,
        "rows": posterior.rows,
        "method": recipe_of_method(posterior.method),
        "converged": posterior.converged,
        "unequal_noise": posterior.unequal_noise,
        "calibration": asdict(posterior.calibration),
        "history": [asdict(step) for step in posterior.history],
        "parameters": network.selection,
        "last_layer": isinstance(network, LastLayer) and not network.named,
        "lacking": network.lacking,
        "observed": settings.observation is not None,
        "settings": {
            "likelihood": recipe_of_likelihood(settings.likelihood),
            "prior": recipe_of_prior(settings.prior),
            "method": recipe_of_method(settings.method),
            "num_samples": settings.num_samples,
            "seed": settings.seed,
            "linear_model": settings.linear_model,
        },
    }
    state = {
        "fingerprint": posterior.fingerprint,
        "prior_precision": posterior.prior.precision,
        "prior_groups": posterior.prior.groups,
        "prior_scale": posterior.prior.scale,
        "effective_dimension": posterior.effective_dimension,
        "effective_dimension_se": posterior.effective_dimension_se,
    }
    # Those of a closed form are drawn again when they are asked for.
    if posterior.curvature is None:
        state["samples"] = posterior.samples
    if posterior.mode is not None:
        state["mode"] = posterior.mode
    noise = posterior.likelihood.noise_precisions()
    if noise is not None:
        state["noise_precision"] = noise
    state |= {f"{_EXACT}{name}": tensor for name, tensor in posterior.exact.items()}
    if posterior.conformal is not None:
        state |= {f"{_CONFORMAL}{name}": tensor for name, tensor in posterior.conformal.tensors().items()}
    if posterior.function is not None:
        state |= {f"{_FUNCTION}{name}": tensor for name, tensor in posterior.function.tensors().items()}
    return with_checksums(state, how)


def posterior_of(
    state: dict[str, Tensor],
    how: dict[str, Any],
    settings: "Settings",
    network: Linearisation,
    call: str,
    of_this_network: bool = True,
) -> "tuple[Posterior, Settings]":
    """The posterior of a state, and the settings with the linear model that it is of.

    Args:
        state: from `state_of`.
        how: from `described(state)`.
        settings: of the object that takes it over.
        network: whose posterior it must be.
        call: what the user called.
        of_this_network: whether it must be of the weights that the network has now.

    Raises:
        ValueError: if the state has NaN in it, is of other weights, of another function of the data, of other random
            parameters or another likelihood.
    """
    saved = how["settings"]
    _check_finite(state)
    if isinstance(network, LastLayer):
        network.take_over(how["parameters"])
    _check_selection(how["parameters"], network.selection)
    if (origin := how.get("lacking")) is not None:  # a wrong derivative is found at a fit only
        network.take_two_pullbacks(origin)
    _check_likelihood(saved["likelihood"], settings)
    _check_observed(how["observed"], settings.observation is not None)
    function = {name.removeprefix(_FUNCTION): t for name, t in state.items() if name.startswith(_FUNCTION)}
    function = FunctionFingerprint.of_tensors(function) if function else None
    if of_this_network:
        check_fingerprint(network, state["fingerprint"], call)
        check_function(network, function, call)
    likelihood, device = settings.likelihood, network.device
    if isinstance(likelihood, Gaussian):
        likelihood = likelihood.with_precision(state["noise_precision"])
    undrawn = torch.empty(0, network.num_parameters, dtype=network.dtype, device=device)
    posterior = Posterior(
        prior=GaussianPrior(
            precision=state["prior_precision"].cpu(),
            groups=state["prior_groups"].to(device),
            scale=state["prior_scale"].to(device),
            names=tuple(how["groups"]),
            num_floored=how["num_floored"],
        ),
        likelihood=likelihood,
        samples=state["samples"].to(device) if "samples" in state else undrawn,
        mode=state["mode"].to(device) if "mode" in state else None,
        effective_dimension=state["effective_dimension"].to(device),
        effective_dimension_se=state["effective_dimension_se"].to(device),
        history=[Step(**step) for step in how["history"]],
        method=method_from_recipe(how["method"], otherwise=settings.method),
        rows=how["rows"],
        fingerprint=state["fingerprint"].cpu(),
        function=function,
        converged=how["converged"],
        unequal_noise=how["unequal_noise"],
        calibration=Calibration(**how["calibration"]),
        exact={name.removeprefix(_EXACT): t.to(device) for name, t in state.items() if name.startswith(_EXACT)},
        conformal=conformal_of({n.removeprefix(_CONFORMAL): t for n, t in state.items() if n.startswith(_CONFORMAL)}),
    )
    # With these the samples of a closed form are those of the saved posterior.
    return posterior, replace(settings, **{name: saved[name] for name in ("linear_model", "num_samples", "seed")})


def arguments_of(how: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Arguments for the constructor, so that a loaded object fits again as the saved one would.

    Args:
        how: from `described`.
        given: `likelihood`, `prior` and `method` in place of those that were saved; `None` for these.
    """
    arguments = dict(how["settings"])
    of_recipe = {"likelihood": likelihood_from_recipe, "prior": prior_from_recipe, "method": method_from_recipe}
    for name, make in of_recipe.items():
        arguments[name] = make(arguments[name]) if given[name] is None else given[name]
    arguments["parameters"] = "last_layer" if how["last_layer"] else how["parameters"]
    return arguments


def _check_finite(state: dict[str, Tensor]) -> None:
    names = ("samples", "mode", "prior_precision", "prior_scale", "noise_precision")
    # Extremes are NaN where anything is, and take no memory.
    wrong = [n for n in names if n in state and not all(bool(value.isfinite()) for value in state[n].aminmax())]
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


def _check_likelihood(saved: dict[str, Any], settings: "Settings") -> None:
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
