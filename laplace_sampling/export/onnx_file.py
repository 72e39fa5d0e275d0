"""`save_onnx`: a module with error bars as an ONNX file, which needs neither torch nor this library."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from laplace_sampling.export.posterior_module import PosteriorModule
from laplace_sampling.export.program import batch_sizes, quietly, two_rows


def save_onnx(module: PosteriorModule, path: str | Path, x: Any) -> None:
    """Write a module as one ONNX file, for batches of any size; its outputs have the names of `module.outputs`.

    Args:
        module: from `LinearisedLaplace.to_module`.
        path: of the file.
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
