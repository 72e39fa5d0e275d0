"""The gradient of a module by itself in its own parameters, as training takes it, which leaves nothing behind.

Products give the module other weights for their time (`held_module`). What holds weights of its own, or runs a part of
the module again after that time, as the backward pass of an adjoint method does, takes the module's parameters instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from laplace_sampling.networks.derivative_rules import forward_mode_kernels
from laplace_sampling.networks.evaluation_mode import evaluation_mode
from laplace_sampling.networks.held_module import HeldModule
from laplace_sampling.networks.undisturbed import undisturbed


def plain_gradient(held: HeldModule, x: Any, u: Float[Tensor, "N C"]) -> Float[Tensor, " Q"]:
    """`Σ_n φ(x_n)ᵀ u_n` in all elements of the parameters that have random weights, without `functional_call`.

    Gradients that a function of autograd adds to the parameters itself, in its backward pass, count as well.
    """
    own = dict(held.module.named_parameters())
    parameters = [own[name] for name in held.names]
    required = [(p, p.requires_grad) for p in own.values()]
    with torch.enable_grad(), evaluation_mode(held), forward_mode_kernels(layers=False), gradients_apart(held.module):
        try:
            # Of the others none, since what is before the random weights may have no gradient at all.
            for name, p in own.items():
                p.requires_grad_(name in held.shapes)
            outputs = held(None, x, composed=True)
            gradients: tuple[Tensor | None, ...] = (None,) * len(parameters)
            if outputs.requires_grad:
                u = u.to(outputs.dtype).reshape(outputs.shape)
                gradients = torch.autograd.grad(outputs, parameters, u, allow_unused=True)
            parts = [
                sum((g for g in (gradient, p.grad) if g is not None), torch.zeros_like(p))
                for gradient, p in zip(gradients, parameters, strict=True)
            ]
        finally:
            for p, of_user in required:
                p.requires_grad_(of_user)
    # The gradient in a complex number has those in its two parts as its parts.
    real = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    return torch.cat([part.detach().reshape(-1).to(held.dtype) for part in real])


@contextmanager
def gradients_apart(module: nn.Module) -> Iterator[None]:
    """Gradients that backward passes inside add to the parameters are dropped at the end, and meet no hooks.

    Hooks may mask or clip gradients, which is of the optimisation, or take its step.
    """
    with undisturbed:
        parameters = list(module.parameters())
        gradients = [p.grad for p in parameters]
        hooks = [
            (of_parameter, of_parameter.copy())
            for p in parameters
            for of_parameter in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
            if of_parameter
        ]
        try:
            for of_parameter, _ in hooks:
                of_parameter.clear()
            for p in parameters:
                p.grad = None
            yield
        finally:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            for of_parameter, before in hooks:
                of_parameter.update(before)
