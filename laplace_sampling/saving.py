"""A fitted posterior as tensors only, and back: what `save` writes and `load` reads.

A state is a dictionary of tensors, for `torch.load(..., weights_only=True)`; what is no tensor is JSON, as bytes.
"""

import json
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.data.batches import batched, plain
from laplace_sampling.evidence.step import Step
from laplace_sampling.gp.dual_cg import DualCG
from laplace_sampling.likelihoods.composite import MultiTask
from laplace_sampling.likelihoods.likelihood import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    as_likelihood,
)
from laplace_sampling.linear_model.factored import restored_curvature
from laplace_sampling.linear_model.priors import GaussianPrior, GPrior, IsotropicPrior, LayerwisePrior, Prior
from laplace_sampling.networks.last_layer import LastLayer
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.solvers.preconditioners import Factored
from laplace_sampling.solvers.sgd import SGD

__all__ = [
    "CURVATURE",
    "Posterior",
    "arguments_of",
    "check_observed",
    "decode_inputs",
    "encode",
    "encode_inputs",
    "recipe_of",
    "restore",
    "settings_of",
]

_FORMAT = 2
# Before the names of the tensors of an exact posterior.
_EXACT = "exact."
# Before the names of those of a factored curvature, among these.
CURVATURE = "curvature."


@dataclass(frozen=True)
class Posterior:
    """All that prediction needs.

    Attributes:
        prior: `A`.
        likelihood: with the fitted noise precision.
        samples: `ζ`, zero-mean.
        mode: `θ̄`.
        effective_dimension: `γ` of each group, with its standard error.
        history: a record of each step of the fit.
        rows: data that went through the network together.
        fingerprint: of the network's weights and buffers.
        converged: whether all tolerances were reached.
        exact: of an exact posterior, what its covariances take: in observation space the decomposition and the training
            data, in weight space a factor of `H`; of a factored one, its curvature.
        calibration: factors of what is predicted.
    """

    prior: GaussianPrior
    likelihood: Likelihood
    samples: Float[Tensor, "K P"]
    mode: Float[Tensor, " P"]
    effective_dimension: Float[Tensor, " G"]
    effective_dimension_se: Float[Tensor, " G"]
    history: list[Step]
    rows: int
    fingerprint: Tensor
    converged: bool = True
    exact: dict[str, Tensor] = field(default_factory=dict)
    calibration: Calibration = field(default_factory=Calibration)

    @cached_property
    def curvature(self) -> Factored | None:
        """`M̂` of a factored posterior, in the scaled coordinates of the prior."""
        kept = {name.removeprefix(CURVATURE): t for name, t in self.exact.items() if name.startswith(CURVATURE)}
        return restored_curvature(kept) if kept else None


def encode(posterior: Posterior, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The state of a posterior.

    Args:
        posterior: what is kept.
        settings: what else a loaded object must know; `settings_of` gives it back.
    """
    p = posterior
    settings = {
        "format": _FORMAT,
        "likelihood": p.likelihood.name,
        "likelihood_class": type(p.likelihood).__name__,
        "learn_noise": bool(getattr(p.likelihood, "learn", False)),
        "groups": p.prior.names,
        "num_floored": p.prior.num_floored,
        "rows": p.rows,
        "converged": p.converged,
        "calibration": asdict(p.calibration),
        "history": [asdict(step) for step in p.history],
        **settings,
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
    state |= {f"{_EXACT}{name}": tensor for name, tensor in p.exact.items()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def settings_of(state: dict[str, Tensor]) -> dict[str, Any]:
    """What is no tensor in a state.

    Raises:
        ValueError: if it is no state, or of another format.
    """
    if not isinstance(state, dict) or "settings" not in state:
        raise ValueError("This is not a state of a LinearisedLaplace: it has no entry 'settings'.")
    settings = json.loads(bytes(state["settings"].cpu().tolist()))
    if settings["format"] != _FORMAT:
        raise ValueError(f"The state has format {settings['format']}, but this version reads format {_FORMAT}.")
    return settings


def restore(
    state: dict[str, Tensor], selection: Any, likelihood: Likelihood, size: int, device: torch.device
) -> Posterior:
    """The posterior of a state.

    Args:
        state: from `encode`.
        selection: of the random weights that it has to be of, as `Linearisation.selection`.
        likelihood: that it has to be of.
        size: `P`.
        device: for its tensors.

    Raises:
        ValueError: if the state is of other parameters or another likelihood, or incomplete.
    """
    settings = settings_of(state)
    if settings["parameters"] != selection:
        saved, own = list(settings["parameters"]), list(selection)
        which = "the same, but of other elements" if saved == own else _few(own)
        raise ValueError(
            f"The state is of {len(saved)} random parameters, {_few(saved)}, but this LinearisedLaplace has "
            f"{len(own)}, {which}. Give the same `parameters=`."
        )
    saved, own = (settings["likelihood"], settings["likelihood_class"]), (likelihood.name, type(likelihood).__name__)
    if saved != own:
        kinds = [f", a {kind}" if saved[0] == own[0] else "" for _, kind in (saved, own)]
        raise ValueError(
            f"The state is of likelihood {saved[0]!r}{kinds[0]}, but this LinearisedLaplace has {own[0]!r}{kinds[1]}."
        )
    num_groups = len(settings["groups"])
    shapes = {
        "fingerprint": (32,),
        **{name: (size,) for name in ("mode", "prior_groups", "prior_scale")},
        **{name: (num_groups,) for name in ("prior_precision", "effective_dimension", "effective_dimension_se")},
    }
    wrong = [name for name, shape in shapes.items() if name not in state or state[name].shape != shape]
    if wrong or "samples" not in state or state["samples"].shape[1:] != (size,):
        raise ValueError(f"The state is incomplete or damaged: entries {wrong or ['samples']} are not as they were.")
    if isinstance(likelihood, Gaussian):
        likelihood = Gaussian(state["noise_precision"], settings["learn_noise"], likelihood.noise_at)
    return Posterior(
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
        history=[Step(**step) for step in settings["history"]],
        rows=settings["rows"],
        fingerprint=state["fingerprint"].cpu(),
        converged=settings["converged"],
        calibration=Calibration(**settings.get("calibration", {})),
        exact={name.removeprefix(_EXACT): t.to(device) for name, t in state.items() if name.startswith(_EXACT)},
    )


def recipe_of_prior(prior: Prior) -> dict[str, Any]:
    """The class and the fields of a prior."""
    return {"class": type(prior).__name__, **(asdict(prior) if is_dataclass(prior) else {})}


def prior_of(recipe: dict[str, Any]) -> Prior:
    """The prior of `recipe_of_prior`, if it is one of the library's own."""
    fields = dict(recipe)
    own = {c.__name__: c for c in (GPrior, IsotropicPrior, LayerwisePrior)}
    name = fields.pop("class")
    if name not in own:
        raise ValueError(f"`load`: the prior was a {name}, which is not of this library; give it as `prior=`.")
    return own[name](**fields)


def recipe_of_solver(solver: SGD | DualCG | None) -> dict[str, Any] | None:
    """The class and the fields of a solver that are settings."""
    if solver is None:
        return None
    settings = {name: value for name, value in vars(solver).items() if name != "held"}
    return {"class": type(solver).__name__, **settings}


def solver_of(recipe: dict[str, Any] | None) -> SGD | DualCG | None:
    """The solver of `recipe_of_solver`."""
    if recipe is None:
        return None
    fields = dict(recipe)
    return DualCG(**fields) if fields.pop("class", "SGD") == "DualCG" else SGD(**fields)


def recipe_of(settings: Any) -> dict[str, Any]:
    """What a `LinearisedLaplace` was constructed with, so that a loaded one fits again as the saved one would."""
    recipe = {
        "prior": recipe_of_prior(settings.prior),
        "prior_precision": settings.prior_precision,
        "noise_at": settings.noise_at,
        "method": settings.method,
        "num_samples": settings.num_samples,
        "seed": settings.seed,
        "scale": settings.scale,
        "solver": recipe_of_solver(settings.solver),
        "max_memory": settings.max_memory,
        "observed": settings.observe is not None,
        "last_layer": isinstance(settings.network, LastLayer),
        "compile": settings.network.compile,
        "autocast": None if settings.network.autocast is None else str(settings.network.autocast).split(".")[-1],
    }
    return {**recipe, "likelihood": recipe_of_likelihood(settings.likelihood)}


def recipe_of_likelihood(likelihood: Likelihood) -> dict[str, Any]:
    """The name and the settings of a likelihood."""
    recipe: dict[str, Any] = {"name": likelihood.name, "class": type(likelihood).__name__}
    if isinstance(likelihood, Gaussian):
        recipe |= {"noise_precision": torch.as_tensor(likelihood.noise_precision).tolist(), "learn": likelihood.learn}
    if isinstance(likelihood, Categorical):
        recipe |= {"class_dim": likelihood.class_dim, "ignore_index": likelihood.ignore_index}
    if isinstance(likelihood, MultiTask):
        recipe |= {"heads": {name: recipe_of_likelihood(head) for name, head in likelihood.likelihoods.items()}}
    return recipe


def likelihood_of(recipe: dict[str, Any]) -> Likelihood:
    """The likelihood of `recipe_of_likelihood`, if it is one of the library's own."""
    fields = dict(recipe)
    name, kind = fields.pop("name"), fields.pop("class")
    own = (Gaussian, Categorical, Bernoulli, Poisson, HeteroscedasticGaussian, MultiTask)
    if kind not in [c.__name__ for c in own]:
        raise ValueError(
            f"`load`: the likelihood {name!r} was a {kind}, which the file does not hold; give it as `likelihood=`."
        )
    if name == "regression":
        return Gaussian(torch.tensor(fields["noise_precision"], dtype=torch.float64), learn=fields["learn"])
    if name == "multitask":
        return MultiTask({head: likelihood_of(of_head) for head, of_head in fields["heads"].items()})
    return Categorical(**fields) if name == "classification" else as_likelihood(name)


def encode_inputs(x: Any, name: str = "inputs") -> dict[str, Tensor]:
    """Inputs of a network, or targets, as tensors; their structure is JSON."""
    tensors, rebuild = batched(x)
    structure: Any = rebuild([_Place(i) for i in range(len(tensors))])  # pyright: ignore[reportArgumentType]
    as_bytes = json.dumps(_described(plain(structure))).encode()
    kept = {f"{name}.{i}": tensor for i, tensor in enumerate(tensors)}
    return {**kept, name: torch.frombuffer(bytearray(as_bytes), dtype=torch.uint8)}


def decode_inputs(state: dict[str, Tensor], name: str = "inputs") -> Any:
    """The inputs of `encode_inputs`."""
    return _built(json.loads(bytes(state[name].cpu().tolist())), state, name)


@dataclass(frozen=True)
class _Place:
    """Of a tensor among those of a batch."""

    index: int


def _described(x: Any) -> Any:
    if isinstance(x, _Place):
        return {"tensor": x.index}
    if isinstance(x, dict):
        return {"dict": {name: _described(value) for name, value in x.items()}}
    if isinstance(x, tuple | list):
        return {"list": [_described(value) for value in x]}
    return {"value": x}


def _built(described: Any, state: dict[str, Tensor], of: str) -> Any:
    ((kind, value),) = described.items()
    if kind == "tensor":
        return state[f"{of}.{value}"]
    if kind == "dict":
        return {name: _built(part, state, of) for name, part in value.items()}
    return [_built(part, state, of) for part in value] if kind == "list" else value


def arguments_of(settings: dict[str, Any], likelihood: Any, prior: Any) -> dict[str, Any]:
    """Arguments for the constructor from the settings of a state.

    Args:
        settings: from `settings_of`.
        likelihood: in place of the one that was saved, if it is given.
        prior: likewise.
    """
    recipe = settings["recipe"]
    return {
        "likelihood": likelihood_of(recipe["likelihood"]) if likelihood is None else likelihood,
        "prior": prior_of(recipe["prior"]) if prior is None else prior,
        "parameters": "last_layer" if recipe.get("last_layer") else settings["parameters"],
        "solver": solver_of(recipe["solver"]),
        "max_memory": recipe.get("max_memory"),
        "compile": recipe.get("compile", False),
        "autocast": getattr(torch, recipe["autocast"]) if recipe.get("autocast") else None,
        "noise_at": recipe.get("noise_at", "auto"),
        "scale": recipe.get("scale", "auto"),
        **{name: recipe[name] for name in ("prior_precision", "method", "num_samples", "seed")},
    }


def check_observed(settings: dict[str, Any], observed: bool) -> None:
    """Raise if a state is of measurements and `T` is not given, or the other way."""
    if settings["recipe"].get("observed", False) != observed:
        raise ValueError(
            f"The posterior was {'not ' if observed else ''}fitted to measurements `y = T f(x) + noise`: "
            f"{'leave out `observe`' if observed else 'give T as `observe=T`'}."
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
