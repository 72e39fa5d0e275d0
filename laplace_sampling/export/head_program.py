"""A last layer with error bars: the rest of the network runs once, and one product of matrices gives all samples."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.curvature.head import has_head_covariances
from laplace_sampling.curvature.kronecker import Kronecker, outer_factors
from laplace_sampling.data.batches import arguments, num_rows, read
from laplace_sampling.linear_model.priors.prior import GaussianPrior
from laplace_sampling.networks.linear_layer import LinearLayer
from laplace_sampling.networks.private_copy import own_parameter, private_copy
from laplace_sampling.solvers.dense_curvature import DenseCurvature
from laplace_sampling.solvers.preconditioners import Curvature


class HeadProgram(nn.Module):
    """Outputs and deviations of a network whose outputs are those of a linear layer; and their variances.

    Attributes:
        body: the network with the identity in place of the layer: any module that returns its inputs will do.
        layer: the layer.
    """

    matrix: Tensor
    bias: Tensor | None
    root: Tensor | None
    mixing: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        name: str,
        layer: LinearLayer,
        samples: Float[Tensor, "K P"],
        root: tuple[Float[Tensor, "D m"], Float[Tensor, "m C"]] | None,
    ) -> None:
        super().__init__()
        self.body = copied(network)
        if name:
            self.body.set_submodule(name, nn.Identity())
        else:
            self.body = nn.Identity()
        self.layer, self.shape = copied(layer.module), (len(samples), layer.index.shape[0])
        extended = samples[:, layer.index].flatten(0, 1)
        self.register_buffer("matrix", extended[:, : layer.num_inputs].contiguous())
        self.register_buffer("bias", extended[:, -1].contiguous() if layer.has_bias else None)
        for part, tensor in zip(("root", "mixing"), root or (None, None), strict=True):
            self.register_buffer(part, None if tensor is None else tensor.to(samples.dtype).contiguous())

    def forward(self, x: Any) -> tuple[Tensor, Float[Tensor, "K N C"], Float[Tensor, "N C"] | None]:
        args, kwargs = arguments(x)
        z = read(self.body(*args, **kwargs), num_rows(x))[0]
        rows = nn.functional.linear(z, self.matrix, self.bias).unflatten(1, self.shape)
        # Squares of what a body in half precision gives may leave its range.
        dtype = torch.promote_types(z.dtype, torch.float32)
        variance = None
        if self.root is not None and self.mixing is not None:
            # Of an input with a one for the bias, without forming it.
            scaled = z @ self.root[: z.shape[1]] + (0 if self.bias is None else self.root[-1])
            variance = scaled.to(dtype).square() @ self.mixing.to(dtype)
        return self.layer(z).to(dtype), rows.transpose(0, 1).to(dtype), variance


def head_root(
    layer: LinearLayer, curvature: Curvature, prior: GaussianPrior
) -> tuple[Float[Tensor, "D m"], Float[Tensor, "m C"]] | None:
    """`R` and `W` of the variances `Σ_m (hᵀR)²_m W_mc` of the outputs for inputs `h`, in float64; `None` for others.

    As `curvature.head`: of a Kronecker product `R = s ∘ V` and `W` holds `Σ_n U²_cn/(Λ_nm + α)`; of a
    matrix, `R` holds a root of the covariance of the weights of each output.
    """
    if len(prior.precision) != 1 or not has_head_covariances(curvature):
        return None
    scales, shift = prior.scale[layer.index].double(), prior.precision.to(prior.scale.device, torch.float64)
    if isinstance(curvature, Kronecker):
        block = curvature.blocks[0]
        (of_outputs,), (of_inputs,) = outer_factors(scales[None])
        U = of_outputs[:, None] * block.U_G[0]
        return of_inputs[:, None] * block.U_A[0], (1 / (block.eigenvalues[0] + shift)).T @ U.square().T
    assert isinstance(curvature, DenseCurvature)
    rows = curvature.vectors[layer.index] * scales[..., None]
    values, vectors = torch.linalg.eigh(rows / (curvature.spectrum + shift) @ rows.mT)
    roots = vectors * values.clamp_min(0).sqrt()[:, None]
    return roots.movedim(0, 1).flatten(1), torch.eye(len(roots)).to(roots).repeat_interleave(roots.shape[1], 0)


def copied(module: nn.Module) -> nn.Module:
    """A copy in evaluation mode, without gradients."""
    return private_copy(module, lambda _, p: own_parameter(p, requires_grad=False))
