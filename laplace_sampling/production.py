"""Predictions of many data, and a posterior as a module that needs nothing else: `predict_loader`, `to_module`."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from laplace_sampling.data.batches import as_tensors, place
from laplace_sampling.data.sources import Unpack
from laplace_sampling.export.posterior_module import PosteriorModule
from laplace_sampling.fitted import FittedModel
from laplace_sampling.methods.fit import Fit
from laplace_sampling.networks.agreement import difference, rounding
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.networks.solving import solver_call
from laplace_sampling.posterior import Posterior
from laplace_sampling.predict import checked_inputs, predict, samples_for
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.prediction import Prediction, check_quantities
from laplace_sampling.settings import Settings
from laplace_sampling.solvers.progress import progress_bar

# Of these the first axis is that of the samples.
_SAMPLED = ("samples", "deviations")


class ProductionModel(FittedModel):
    """A fitted model that predicts outside of the session of its fit."""

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
            example: inputs as of `predict`, with which the network is traced and the module checked; by default the few
                training data that the posterior keeps to know its network again.

        Raises:
            NotFittedError: before a fit.
            ValueError: for a name that predictions do not have; for a network that torch does not export, or with an
                operation without a rule, named in the error; for one of several heads; if the module does not compute
                what `predict` does; if an example is needed.
        """
        fitted = self._drawn("to_module")
        self._check_network("to_module")
        return module_of(self.network, self.settings, fitted.posterior, fitted.fit, num_samples, outputs, example)

    @solver_call
    def predict_loader(
        self,
        loader: Iterable[Any],
        outputs: Sequence[str] | None = None,
        *,
        progress: bool = True,
        unpack: Unpack | None = None,
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
            unpack: for other batches, `batch -> (inputs, targets)`, as for `fit`; targets may be `None`.

        Raises:
            NotFittedError: before a fit.
            TypeError: for batches of another form.
            ValueError: for a name that predictions do not have; without a batch; as `predict`; for outputs whose shape
                is not the same in all batches.
        """
        fitted = self._drawn("predict_loader")
        names = check_quantities("predict_loader", outputs, self.settings.likelihood)

        def predicted(x: Any) -> Prediction:
            self._check_network("predict_loader")
            return predict(self.network, fitted.posterior, fitted.fit, x)

        return predictions_of(loader, predicted, names, fitted.posterior.rows, progress, unpack)


def module_of(
    network: Linearisation,
    settings: Settings,
    posterior: Posterior,
    fit: Fit | None,
    num_samples: int | None,
    outputs: Sequence[str] | None,
    example: Any,
) -> PosteriorModule:
    """What `to_module` returns; its arguments are the last ones."""
    names = check_quantities("to_module", outputs, settings.likelihood)
    num_samples = samples_for(num_samples, None, len(posterior.samples), call="to_module")
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
    plain = predict(network, uncalibrated, fit, x, num_samples=num_samples)
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
    )
    _check_program(module, x, plain)
    if plain.function is not None and not module.exact:
        _tell_of_noise(module, x, predict(network, posterior, fit, x, num_samples=num_samples))
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
        prediction = predicted(checked_inputs(_inputs(batch) if unpack is None else unpack(batch)[0]))
        for name, values in parts.items():
            values.append(getattr(prediction, name).cpu())
    return {name: _joined(name, values) for name, values in parts.items()}


def _inputs(batch: Any) -> Any:
    """The inputs of a batch, `(x, y)`, `(x,)` or `x`."""
    batch = as_tensors(batch)
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}
    if not isinstance(batch, list | tuple):
        return batch
    if len(batch) > 2 or not batch:
        raise TypeError(
            f"Batches of `predict_loader(loader)` must be pairs (x, y), or inputs x alone, but one is a "
            f"{type(batch).__name__} of {len(batch)}. Others take `unpack=`, a function of a batch that returns "
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
def _tell_of_noise(module: PosteriorModule, x: Any, expected: Prediction) -> None:
    """A notice if outputs are those of samples, where `predict` has covariances without."""
    found, num = module(x), len(expected.deviations)
    pairs = [(name, value, getattr(expected, name)) for name, value in found.items()]
    if noisy := [f"`{name}`" for name, a, b in pairs if not difference(a, b) <= rounding(b.dtype)]:  # also if NaN
        warnings.warn(
            f"`to_module`: {', '.join(noisy)} of the module are those of {num} samples, by which standard deviations "
            f"are accurate to {(2 * num) ** -0.5:.2g}; `predict` knows the covariances of this posterior without.",
            stacklevel=6,
        )
