"""The gradient of a module by itself in its own parameters, as training takes it, which leaves nothing behind.

Products give the module other weights for their time (`held_module`). What holds weights of its own, or runs a part of
the module again after that time, as the backward pass of an adjoint method does, takes the module's parameters instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from laplace_sampling.networks.derivative_rules import forward_mode_kernels
from laplace_sampling.networks.evaluation_mode import evaluation_mode
from laplace_sampling.networks.held_module import HeldModule

__all__ = ["plain_gradient"]


def plain_gradient(held: HeldModule, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, " Q"]:
    """`Σ_n φ(x_n)ᵀ u_n` in all elements of the parameters that have random weights, without `functional_call`.

    Gradients that a function of autograd adds to the parameters itself, in its backward pass, count as well.
    """
    with torch.enable_grad(), evaluation_mode(held), forward_mode_kernels(layers=False), _as_leaves(held) as parameters:
        outputs = held(None, x, composed=True)
        gradients: tuple[Tensor | None, ...] = (None,) * len(parameters)
        if outputs.requires_grad:
            u = u.to(outputs.dtype).reshape(outputs.shape)
            gradients = torch.autograd.grad(outputs, parameters, u, allow_unused=True)
        parts = [
            sum((g.reshape(-1) for g in (gradient, p.grad) if g is not None), torch.zeros_like(p).reshape(-1))
            for gradient, p in zip(gradients, parameters, strict=True)
        ]
    return torch.cat([part.detach().to(held.dtype) for part in parts])


@contextmanager
def _as_leaves(held: HeldModule) -> Iterator[list[Tensor]]:
    """The parameters that have random weights, which require a gradient inside; none of the module has one or hooks.

    Hooks may mask or clip what training takes a step by, or take the step.
    """
    parameters = dict(held.module.named_parameters())
    random = [parameters[name] for name in held.names]
    requiring = [p.requires_grad for p in random]
    gradients = [p.grad for p in parameters.values()]
    hooks = [
        (of_parameter, of_parameter.copy())
        for p in parameters.values()
        for of_parameter in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
        if of_parameter
    ]
    try:
        for of_parameter, _ in hooks:
            of_parameter.clear()
        for p in parameters.values():
            p.grad = None
        for p in random:
            p.requires_grad_()
        yield random
    finally:
        for p, required in zip(random, requiring, strict=True):
            p.requires_grad_(required)
        for p, gradient in zip(parameters.values(), gradients, strict=True):
            p.grad = gradient
        for of_parameter, before in hooks:
            of_parameter.update(before)
