"""Predictions of many data, and a posterior as a module that needs nothing else: `predict_loader`, `to_module`."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from laplace_sampling.data.batches import as_tensors, place
from laplace_sampling.data.training_data import Unpack
from laplace_sampling.export.posterior_module import PosteriorModule
from laplace_sampling.methods.method import Fit
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.products import difference, rounding
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import checked_inputs, predict, samples_for
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.prediction import Prediction, at_level, check_quantities
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.solver import progress_bar

# Quantities whose first axis is that of the samples.
_SAMPLED = ("samples", "deviations")


def module_of(
    network: Linearisation,
    settings: Settings,
    posterior: Posterior,
    fit: Fit | None,
    num_samples: int | None,
    outputs: Sequence[str] | None,
    example: Any,
    level: float | None,
) -> PosteriorModule:
    """What `to_module` returns; its arguments are the last ones."""
    names = check_quantities("to_module", outputs, settings.likelihood)
    if "novelty" in names:
        raise ValueError(
            "`to_module(outputs=...)`: a module has no `novelty`, which looks into the layers of the network: call "
            "`la.novelty_of(x)`, or `predict`."
        )
    num_samples = samples_for(num_samples, None, len(posterior.samples), call="to_module")
    if level is not None and settings.observation is not None:
        raise ValueError(
            "`to_module(level=...)`: intervals are of measurements, and a module of `Gaussian(observe=T)` predicts the "
            "outputs, without noise: leave `level` out."
        )
    if level is not None and posterior.conformal is not None and num_samples != posterior.conformal.num_samples:
        raise ValueError(
            f"`to_module(num_samples={num_samples}, level=...)`: `calibrate_conformal` saw predictions of "
            f"{posterior.conformal.num_samples} samples: leave `num_samples` out."
        )
    if example is None and posterior.function is None:
        raise ValueError(
            "`to_module` needs inputs to trace the network with, since this posterior keeps no training data: pass "
            "`example=x`, a batch as for `predict`."
        )
    kept = posterior.function
    x = checked_inputs(example) if kept is None or example is not None else kept.inputs
    x = place(x, network.device, network.dtype)
    # The last layer of a posterior that was loaded is found by its first prediction.
    uncalibrated = replace(posterior, calibration=Calibration())
    plain = predict(network, uncalibrated, fit, x, num_samples=num_samples, seed=settings.seed)
    module = PosteriorModule.of(
        network,
        posterior.samples[:num_samples],
        names,
        posterior.likelihood,
        posterior.calibration,
        x,
        curvature=posterior.curvature,
        prior=posterior.prior,
        has_noise=settings.observation is None,
        level=level,
        conformal=posterior.conformal,
    )
    _check_program(module, x, plain)
    if plain.function is not None and not module.exact:
        if level is not None and posterior.conformal is not None:
            raise ValueError(
                "`to_module(level=...)`: `calibrate_conformal` saw error bars that this posterior knows without "
                "samples, and those of the module are of samples, so that its guarantee would not hold. Leave `level` "
                'out, or fit with `method="stochastic"`, whose predictions are of samples, too.'
            )
        expected = predict(network, posterior, fit, x, num_samples=num_samples, seed=settings.seed)
        _tell_of_noise(module, x, expected, num_samples, level)
    return module


def predictions_of(
    loader: Iterable[Any],
    predicted: Callable[[Any], Prediction],
    names: Sequence[str],
    rows: int,
    progress: bool,
    unpack: Unpack | None,
) -> dict[str, Tensor]:
    """What `predict_loader` returns: attributes `names` of what is `predicted` of each batch; `rows` of a dataset."""
    if isinstance(loader, Dataset):
        loader = DataLoader(loader, batch_size=rows)
    if isinstance(loader, Tensor | Mapping):
        raise TypeError(
            f"`predict_loader(loader)` takes an iterable of batches, but got a {type(loader).__name__}: pass "
            "`[x]`, or call `predict(x)`."
        )
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch in progress_bar("Predictions" if progress else None, loader, leave=True):
        prediction = predicted(
            checked_inputs(inputs_of("predict_loader(loader)", batch) if unpack is None else unpack(batch)[0])
        )
        for name, values in parts.items():
            values.append(getattr(prediction, name).cpu())
    return {name: _joined(name, values) for name, values in parts.items()}


def inputs_of(call: str, batch: Any) -> Any:
    """The inputs of a batch, `(x, y)`, `(x,)` or `x`."""
    batch = as_tensors(batch)
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}
    if not isinstance(batch, list | tuple):
        return batch
    if len(batch) > 2 or not batch:
        raise TypeError(
            f"Batches of `{call}` must be pairs (x, y), or inputs x alone, but one is a "
            f"{type(batch).__name__} of {len(batch)}. For others `Data(unpack=...)` returns "
            "(inputs, targets)."
        )
    return batch[0]


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if not parts:
        raise ValueError("`predict_loader(loader)` got a loader without a batch.")
    axis = 1 if name in _SAMPLED else 0
    shapes = sorted({tuple(part.shape[axis + 1 :]) for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"`predict_loader(outputs={[name]})` needs outputs of one shape, but those of a datum are of {shapes}: "
            "call `predict(x)` for each batch."
        )
    return torch.cat(parts, dim=axis)


@torch.no_grad()
def _check_program(module: PosteriorModule, x: Any, plain: Prediction) -> None:
    """Raise if a module computes anything else than `predict` does without scale and temperature."""
    expected = {"outputs": plain.outputs, "deviations": plain.deviations}
    if module.exact and plain.function is not None:
        expected["variance"] = plain.function.variance().to(plain.outputs)
    parts = zip(expected.items(), module.program(x), strict=False)
    if wrong := [name for (name, value), found in parts if not difference(found, value) <= rounding(value.dtype)]:
        raise ValueError(
            f"`to_module`: the module computes other {' and '.join(wrong)} than `predict`, as torch does not see all "
            "that the network does. Write it without numbers that leave torch, as by `float(...)`, or export a "
            'posterior of its last layer (`parameters="last_layer"`).'
        )


@torch.no_grad()
def _tell_of_noise(module: PosteriorModule, x: Any, expected: Prediction, num: int, level: float | None) -> None:
    """A notice if outputs are those of samples, where `predict` has covariances without."""
    known = at_level(expected, level)
    pairs = [
        (name, value, known[name] if name in known else getattr(expected, name)) for name, value in module(x).items()
    ]
    if noisy := [f"`{name}`" for name, a, b in pairs if not _are_close(a, b)]:  # also if NaN
        warnings.warn(
            f"`to_module`: {', '.join(noisy)} of the module are those of {num} samples, by which standard deviations "
            f"are accurate to {(2 * num) ** -0.5:.2g}; `predict` knows the covariances of this posterior without.",
            stacklevel=6,
        )


def _are_close(a: Tensor, b: Tensor) -> bool:
    if not b.is_floating_point():
        return torch.equal(a, b)
    return bool(difference(a, b) <= rounding(b.dtype))
