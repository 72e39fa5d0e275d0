"""A fitted posterior as tensors only, and back: what `save` writes and `load` reads.

A state is a dictionary of tensors, for `torch.load(..., weights_only=True)`; what is not a tensor is JSON, as bytes.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from laplace_sampling.evidence.step import Step
from laplace_sampling.fitted import Fitted, FittedModel, check_fingerprint
from laplace_sampling.likelihoods.gaussian import Gaussian
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.recipes import likelihood_from_recipe, recipe_of_likelihood
from laplace_sampling.linear_model.priors.as_prior import prior_from_recipe, recipe_of_prior
from laplace_sampling.linear_model.priors.prior import GaussianPrior, Prior
from laplace_sampling.methods import method_from_recipe, recipe_of_method
from laplace_sampling.methods.method import Method
from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.posterior import Posterior
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.preparation import restore_fit
from laplace_sampling.settings import Settings

__all__ = ["SavableModel"]

_FORMAT = 3
# Before the names of the tensors of an exact or factored posterior.
_EXACT = "exact."
_NUM_NAMED = 3


class SavableModel(FittedModel):
    """A fitted model that can be written to a file, and read."""

    def state_dict(self) -> dict[str, Tensor]:
        """All that predictions need, as tensors only: loads with `torch.load(..., weights_only=True)`."""
        return state_of(self._require("state_dict").posterior, self.settings, self.network)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over a posterior from `state_dict`.

        Raises:
            ValueError: if the state is not of this model's weights, of another likelihood or another choice of
                parameters, or incomplete; what was fitted before is kept.
        """
        posterior, settings = posterior_of(state, self.settings, self.network)
        fit, tangent = restore_fit(settings, self.network, posterior)
        self.settings, self._fitted, self._unfinished = settings, Fitted(posterior, fit, tangent), ()

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
        method: str | Method | None = None,
    ) -> Self:
        """Read what `save` wrote, for the same trained network; settings are those of the saved object.

        Args:
            path: of the file.
            model: the network, with the weights that it had at the fit.
            likelihood: needed only if the file does not hold it: if it was not one of the library's own, or one of
                measurements, `Gaussian(observe=T)`.
            prior: likewise.
            method: likewise.
        """
        state = torch.load(path, map_location="cpu", weights_only=True)
        # The constructor is that of `LinearisedLaplace`.
        la = cls(model, **arguments_of(state, likelihood=likelihood, prior=prior, method=method))  # pyright: ignore[reportCallIssue]
        la.load_state_dict(state)
        return la


def state_of(posterior: Posterior, settings: Settings, network: Linearisation) -> dict[str, Tensor]:
    """The state of a posterior: its tensors, and as JSON how it was made."""
    described = {
        "format": _FORMAT,
        "groups": posterior.prior.names,
        "num_floored": posterior.prior.num_floored,
        "rows": posterior.rows,
        "method": recipe_of_method(posterior.method),
        "converged": posterior.converged,
        "unequal_noise": posterior.unequal_noise,
        "calibration": asdict(posterior.calibration),
        "history": [asdict(step) for step in posterior.history],
        "parameters": network.selection,
        "last_layer": isinstance(network, LastLayer),
        "observed": settings.observation is not None,
        "settings": {
            "likelihood": recipe_of_likelihood(settings.likelihood),
            "prior": recipe_of_prior(settings.prior),
            "method": recipe_of_method(settings.method),
            "num_samples": settings.num_samples,
            "seed": settings.seed,
            "linear_model": settings.linear_model,
            "hessian_at": settings.hessian_at,
        },
    }
    state = {
        "settings": torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8),
        "fingerprint": posterior.fingerprint,
        "samples": posterior.samples,
        "mode": posterior.mode,
        "prior_precision": posterior.prior.precision,
        "prior_groups": posterior.prior.groups,
        "prior_scale": posterior.prior.scale,
        "effective_dimension": posterior.effective_dimension,
        "effective_dimension_se": posterior.effective_dimension_se,
    }
    noise = posterior.likelihood.noise_precisions()
    if noise is not None:
        state["noise_precision"] = noise
    state |= {f"{_EXACT}{name}": tensor for name, tensor in posterior.exact.items()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def posterior_of(state: dict[str, Tensor], settings: Settings, network: Linearisation) -> tuple[Posterior, Settings]:
    """The posterior of a state, and the settings with the linear model that it is of.

    Args:
        state: from `state_of`.
        settings: of the object that takes it over.
        network: whose posterior it must be.

    Raises:
        ValueError: if the state is of other weights, parameters or another likelihood, or incomplete.
    """
    described = _described(state)
    saved = described["settings"]
    if isinstance(network, LastLayer):
        network.take_over(described["parameters"])
    _check_selection(described["parameters"], network.selection)
    _check_likelihood(saved["likelihood"], settings)
    _check_observed(described["observed"], settings.observation is not None)
    _check_shapes(state, network.num_parameters, len(described["groups"]))
    check_fingerprint(network, state["fingerprint"], "load_state_dict")
    likelihood, device = settings.likelihood, network.device
    if isinstance(likelihood, Gaussian):
        likelihood = likelihood.with_precision(state["noise_precision"])
    posterior = Posterior(
        prior=GaussianPrior(
            precision=state["prior_precision"].cpu(),
            groups=state["prior_groups"].to(device),
            scale=state["prior_scale"].to(device),
            names=tuple(described["groups"]),
            num_floored=described["num_floored"],
        ),
        likelihood=likelihood,
        samples=state["samples"].to(device),
        mode=state["mode"].to(device),
        effective_dimension=state["effective_dimension"].to(device),
        effective_dimension_se=state["effective_dimension_se"].to(device),
        history=[Step(**step) for step in described["history"]],
        method=method_from_recipe(described["method"], otherwise=settings.method),
        rows=described["rows"],
        fingerprint=state["fingerprint"].cpu(),
        converged=described["converged"],
        unequal_noise=described["unequal_noise"],
        calibration=Calibration(**described["calibration"]),
        exact={name.removeprefix(_EXACT): t.to(device) for name, t in state.items() if name.startswith(_EXACT)},
    )
    return posterior, replace(settings, linear_model=saved["linear_model"], hessian_at=saved["hessian_at"])


def arguments_of(state: dict[str, Tensor], **given: Any) -> dict[str, Any]:
    """Arguments for the constructor, so that a loaded object fits again as the saved one would.

    Args:
        state: from `state_of`.
        given: `likelihood`, `prior` and `method` in place of those that were saved; `None` for these.
    """
    described = _described(state)
    arguments = dict(described["settings"])
    of_recipe = {"likelihood": likelihood_from_recipe, "prior": prior_from_recipe, "method": method_from_recipe}
    for name, make in of_recipe.items():
        arguments[name] = make(arguments[name]) if given[name] is None else given[name]
    arguments["parameters"] = "last_layer" if described["last_layer"] else described["parameters"]
    return arguments


def _described(state: dict[str, Tensor]) -> dict[str, Any]:
    """What is not a tensor in a state."""
    if not isinstance(state, dict) or "settings" not in state:
        raise ValueError("This is not a state of a LinearisedLaplace: it has no entry 'settings'.")
    described = json.loads(bytes(state["settings"].cpu().tolist()))
    if described["format"] != _FORMAT:
        raise ValueError(f"The state has format {described['format']}, but this version reads format {_FORMAT}.")
    return described


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


def _check_shapes(state: dict[str, Tensor], size: int, num_groups: int) -> None:
    shapes = {
        "fingerprint": (32,),
        **{name: (size,) for name in ("mode", "prior_groups", "prior_scale")},
        **{name: (num_groups,) for name in ("prior_precision", "effective_dimension", "effective_dimension_se")},
    }
    wrong = [name for name, shape in shapes.items() if name not in state or state[name].shape != shape]
    if wrong or "samples" not in state or state["samples"].shape[1:] != (size,):
        raise ValueError(f"The state is incomplete or damaged: entries {wrong or ['samples']} are not as they were.")


def _first_of(names: list[str]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (", …" if len(names) > _NUM_NAMED else "")
