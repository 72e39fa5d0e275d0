"""`PosteriorModule`: predictions with error bars as a module that holds all they need; `save_onnx` writes its file."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import Dim

from laplace_sampling.data.batches import Layout
from laplace_sampling.export.program import (
    FormulaProgram,
    HeadProgram,
    batch_sizes,
    copied,
    head_root,
    quietly,
    tangent_program,
    two_rows,
)
from laplace_sampling.likelihoods.likelihood import Likelihood
from laplace_sampling.likelihoods.multi_task import MultiTask
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.last_layer import LastLayer, LinearLayer
from laplace_sampling.networks.linearisation import Linearisation
from laplace_sampling.predictions.calibration import Calibration
from laplace_sampling.predictions.conformal import SplitConformal
from laplace_sampling.predictions.function_covariance import FunctionCovariance
from laplace_sampling.predictions.prediction import at_level, make_prediction, names_at
from laplace_sampling.solvers.preconditioners import Curvature


class PosteriorModule(nn.Module):
    """A network with error bars: `module(x)` is a dictionary of what `predict(x)` gives, by name.

    Weights and samples are buffers of the module, and scale, temperature and noise are inside. It contains neither
    training data nor the fit. It takes a batch of any size, `[N, ...]`, also an empty one, on the device and in the
    dtype of the network, which `module.to(...)`, `.half()` and `.double()` change. Results are in float32 at least. A
    call changes nothing in it, so several threads may call it. `LinearisedLaplace.to_module` makes it.

    Attributes:
        program: `x ↦ f(w̄, x)`, `φ(x) ζ_k`, and variances if they are known without samples.
        outputs: names of what it returns, in order.
        exact: whether variances are known without samples.
    """

    def __init__(self, program: nn.Module, formulas: "_Formulas", x: Any) -> None:
        super().__init__()
        self.program, self.outputs = program, formulas.names
        with torch.no_grad():
            parts = program(two_rows(x))
        self.exact = parts[2] is not None
        # As a program of plain operations the formulas are for all compilers, which do not know the classes of Python.
        sizes = ({0: Dim.DYNAMIC}, {1: Dim.DYNAMIC}, {0: Dim.DYNAMIC} if self.exact else None)
        with quietly():
            # The numbers of formulas, such as scores of held-out data, are on the CPU, and go where the network is.
            on_cpu = tuple(None if part is None else part.cpu() for part in parts)
            exported = torch.export.export(formulas, on_cpu, dynamic_shapes=sizes, strict=False)
        self.formulas = FormulaProgram(exported).to(parts[0].device)

    def forward(self, x: Any) -> dict[str, Tensor]:
        return self.formulas(*self.program(x))

    @classmethod
    def of(
        cls,
        network: Linearisation,
        samples: Float[Tensor, "K P"],
        outputs: Sequence[str],
        likelihood: Likelihood,
        calibration: Calibration,
        x: Any,
        *,
        curvature: Curvature | None = None,
        prior: GaussianPrior | None = None,
        has_noise: bool = True,
        level: float | None = None,
        conformal: SplitConformal | None = None,
    ) -> "PosteriorModule":
        """The module of a posterior.

        Args:
            network: the linearised network.
            samples: samples of its random weights.
            outputs: names of what the module returns.
            likelihood: the likelihood of the targets.
            calibration: the calibration of the predictions.
            x: example inputs, if the network is traced.
            curvature: the curvature of a factored posterior.
            prior: the prior of a factored posterior.
            has_noise: whether targets are noisy outputs, and not measurements of them.
            level: the probability of intervals or sets, which the module returns as well.
            conformal: scores of held-out data for these.

        Raises:
            ValueError: for a network of several heads, and for one that cannot be traced.
        """
        if network.shell.mesh is not None:
            raise ValueError(
                "`to_module` is for a model in one process, but `fully_shard` has shared out the weights of this one: "
                "`save` the posterior, `load` it with the model with the full weights, and export that."
            )
        if isinstance(likelihood, MultiTask):
            raise ValueError(
                "`to_module` is for networks with one output tensor, but this one has several heads: export a module "
                "that returns one of them."
            )
        head = network.head if isinstance(network, LastLayer) else None
        # Outputs of another shape are those of the layer, but changed by the network after it.
        if isinstance(head, LinearLayer) and network.evaluate(x)[0].dim() == 2:
            root = None if curvature is None or prior is None else head_root(head, curvature, prior)
            name = next(name for name, part in network.module.named_modules() if part is head.module)
            program = HeadProgram(network.module, name, head, samples, root)
        else:
            program = _Traced(network, samples, x)
        limit = None if conformal is None or level is None else _Limit.of(conformal, level)
        return cls(program, _Formulas(outputs, likelihood, calibration, has_noise, level, limit), x)


class _Formulas(nn.Module):
    """What is asked of predictions, from outputs and deviations."""

    def __init__(
        self,
        names: Sequence[str],
        likelihood: Likelihood,
        calibration: Calibration,
        has_noise: bool,
        level: float | None,
        conformal: SplitConformal | None,
    ) -> None:
        super().__init__()
        self.plain, self.names, self.level = tuple(names), (*names, *names_at(level, likelihood)), level
        self.has_noise, self.likelihood = has_noise, calibration.likelihood(likelihood)
        self.conformal = conformal
        self.scale, self.temperature = calibration.scale / calibration.temperature**2, calibration.temperature

    def forward(self, outputs: Tensor, deviations: Tensor, variance: Tensor | None) -> dict[str, Tensor]:
        # Most posteriors have neither, and each operation takes time that a small network notices.
        if self.temperature != 1:
            outputs = outputs / self.temperature
        if self.scale != 1:
            deviations = math.sqrt(self.scale) * deviations
            variance = None if variance is None else self.scale * variance
        likelihood = self.likelihood.bind(Layout.single(outputs.shape[1:]))
        function = None if variance is None else _Variances(variance)
        prediction = make_prediction(
            outputs,
            deviations,
            likelihood,
            function=function,
            conformal=self.conformal,
            has_noise=self.has_noise,
        )
        return {name: getattr(prediction, name) for name in self.plain} | at_level(prediction, self.level)


class _Traced(nn.Module):
    """Outputs and deviations by the program of a network, which takes its weights and the samples as inputs."""

    def __init__(self, network: Linearisation, samples: Float[Tensor, "K P"], x: Any) -> None:
        super().__init__()
        module = copied(network.module)
        state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        by_name = {name: t.to(state[name].dtype) for name, t in network.unflatten(samples).items()}
        self.state, self.samples, self.dtype = _Buffers(state), _Buffers(by_name), network.dtype
        self.program = tangent_program(module, self.state.tensors(), self.samples.tensors(), x)

    def forward(self, x: Any) -> tuple[Tensor, Tensor, None]:
        outputs, deviations = self.program(self.state.tensors(), self.samples.tensors(), x)
        dtype = torch.promote_types(outputs.dtype, self.dtype)
        return outputs.to(dtype), deviations.to(dtype), None


class _Buffers(nn.Module):
    """Tensors by names that may have dots in them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.names = list(tensors)
        for number, tensor in enumerate(tensors.values()):
            self.register_buffer(f"tensor_{number}", tensor.detach().clone(memory_format=torch.contiguous_format))

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, f"tensor_{number}") for number, name in enumerate(self.names)}


class _Variances(FunctionCovariance):
    """Variances that were computed."""

    def __init__(self, variances: Tensor) -> None:
        self.variances = variances

    def variance(self) -> Tensor:
        return self.variances

    def blocks(self) -> Tensor:
        raise NotImplementedError("An exported posterior has variances of its outputs, and no covariances.")

    joint = blocks


class _Limit(SplitConformal):
    """The score that new targets stay below at one level; it keeps no scores of single data."""

    @classmethod
    def of(cls, conformal: SplitConformal, level: float) -> "_Limit":  # pyright: ignore[reportIncompatibleMethodOverride]
        largest = conformal.largest(level)[None]
        return cls(largest, conformal.num_data, conformal.num_samples, conformal.penalty)

    def largest(self, level: float) -> Tensor:
        return self.scores[0]


# ONNX -----------------------------------------------------------------------------------------------------------------


def save_onnx(module: PosteriorModule, path: str | Path, x: Any) -> None:
    """Write a module as one ONNX file, for batches of any size; its outputs have the names of `module.outputs`.

    Args:
        module: from `LinearisedLaplace.to_module`.
        path: the path of the file.
        x: example inputs, as for `module(x)`.

    Raises:
        ImportError: without `onnx` and `onnxscript`, which the extra `onnx` installs.
        TypeError: for another module.
        torch.onnx.OnnxExporterError: for an operation that ONNX does not have.
        OSError: if the file cannot be written.
    """
    if not isinstance(module, PosteriorModule):
        raise TypeError(f"`save_onnx(module)` takes a module from `la.to_module()`, but got a {type(module).__name__}.")
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError("`save_onnx` needs `onnx` and `onnxscript`: pip install laplace_sampling[onnx].") from error
    with quietly(), torch.no_grad():
        program = torch.onnx.export(
            _Outputs(module), (two_rows(x),), dynamo=True, verbose=False, dynamic_shapes=(batch_sizes(x),)
        )
    assert program is not None
    graph = program.model.graph
    # Names are one for each value: those of the outputs may be there already, as `mean` of a mean.
    for node in graph:
        for value in node.outputs:
            if value.name in module.outputs:
                value.name = f"{value.name}_inside"
    for value, name in zip(graph.outputs, module.outputs, strict=True):
        value.name = name
    program.save(path, external_data=False)


class _Outputs(nn.Module):
    """The values of a dictionary: one asked for twice would be one output."""

    def __init__(self, module: PosteriorModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> tuple[torch.Tensor, ...]:
        return tuple(value.clone() for value in self.module(x).values())
