"""A likelihood from a loss: gradient, curvature and a root of it by automatic differentiation."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

from laplace_sampling.data.batches import Layout
from laplace_sampling.likelihoods.likelihood import Likelihood

__all__ = ["LossLikelihood", "from_loss"]

Loss = Callable[[Tensor, Tensor], Tensor]

# Below zero by so much of the largest eigenvalue is rounding: in units of the precision of the numbers, times C.
_ROUNDING = 100.0
# Numbers of Hessians in memory at once.
_HESSIANS = 2**22


def from_loss(loss: Loss, name: str = "custom") -> "LossLikelihood":
    r"""A likelihood whose negative logarithm is a loss, convex in the outputs.

    `B` is the Hessian of the loss in the outputs, `L` its symmetric root, from an eigendecomposition of `C × C` for
    each datum: for up to some hundred outputs. A product with `B` forms no matrix.

    Args:
        loss: `loss(f, y)` of *one* datum: outputs `f` in the shape that the model gives them, without the axis of the
            batch, and a target `y`; a scalar tensor, of torch operations that `torch.func` differentiates twice, by
            reverse mode, and maps over data (`torch.where`, no `if` on values). It has
            to be a negative log-likelihood, `−log p(y | f)`, summed over outputs and not scaled: a mean over a batch is
            not. Constants in `f` matter to `log_prob` and the evidence only.
        name: in messages and saved files, which do not hold the function: `load` needs the likelihood again.

    Raises:
        ValueError: (when it is used) if a Hessian has a negative eigenvalue: `B` would be no covariance; if all are 0,
            as those of an absolute error; or if the loss has no second derivative, or cannot be mapped over data.

    Example:
        >>> from laplace_sampling import LinearisedLaplace, from_loss
        >>> gumbel = from_loss(lambda f, y: (y - f + (f - y).exp()).sum(), "gumbel")
        >>> la = LinearisedLaplace(torch.nn.Linear(1, 1), gumbel)
    """
    return LossLikelihood(loss, name)


@dataclass(frozen=True)
class LossLikelihood(Likelihood):
    """What `from_loss` gives.

    Attributes:
        function: the loss of one datum.
        name: of the likelihood.
        shape: of the outputs of a datum; `bind` sets it.
    """

    function: Loss
    name: str = "custom"
    shape: tuple[int, ...] | None = field(default=None, repr=False, compare=False)

    def bind(self, layout: Layout) -> Self:
        super().bind(layout)
        return replace(self, shape=layout.shape)

    def _single(self, f: Float[Tensor, " C"], y: Tensor) -> Tensor:
        return self.function(f if self.shape is None else f.reshape(self.shape), y)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        return _over_data(self._single, f, y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return _over_data(grad(self._single), f, y)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        y = self._needed(y)

        def product(f_n: Tensor, u_n: Tensor, y_n: Tensor) -> Tensor:
            return vjp(lambda g: grad(self._single)(g, y_n), f_n)[1](u_n)[0]  # `B` is symmetric

        each = vmap(product)
        stack = u.reshape(-1, *f.shape)
        return vmap(lambda v: each(f.to(u), v, y))(stack).reshape(u.shape)

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        y = self._needed(y)
        parts = torch.arange(len(f)).split(max(1, _HESSIANS // f.shape[-1] ** 2))
        roots = ((part, self._root(f[part].to(u), y[part], int(part[0]))) for part in parts)
        return torch.cat([torch.einsum("ncd,...nd->...nc", L, u[..., part, :]) for part, L in roots], dim=-2)

    root_transpose = root

    def _root(self, f: Tensor, y: Tensor, first: int) -> Float[Tensor, "N C C"]:
        values, vectors = torch.linalg.eigh(vmap(jacrev(grad(self._single)))(f, y))
        allowed = _ROUNDING * torch.finfo(f.dtype).eps * f.shape[-1] * values.abs().amax(-1)
        wrong = (values[:, 0] < -allowed).nonzero()[:, 0]
        if len(wrong):
            worst = int(wrong[0])
            raise ValueError(
                f"The loss of likelihood {self.name!r} is not convex in the outputs: its Hessian at datum "
                f"{first + worst} of the batch has the eigenvalue {float(values[worst, 0]):.3g} (the largest is "
                f"{float(values[worst, -1]):.3g}), so that it is the curvature of no Gaussian. Write a subclass of "
                "`Likelihood` whose curvature is the Fisher matrix, the mean of the Hessian over y ~ p(y | f)."
            )
        return (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        if y.dim() == 0 or len(y) != output_shape[0]:
            raise ValueError(f"There are targets of shape {list(y.shape)} for outputs of shape {list(output_shape)}.")
        at = torch.zeros(output_shape[1:], device=y.device).requires_grad_()
        value = self.function(at, y[0])
        if not isinstance(value, Tensor) or value.dim():
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"The loss of likelihood {self.name!r} must return a scalar for the outputs of one datum, of shape "
                f"{list(output_shape[1:])}, but returned {found}; sum over outputs."
            )
        flat = at.detach().reshape(1, -1)
        try:
            replace(self, shape=tuple(output_shape[1:])).curvature(flat, flat, y[:1])
        except RuntimeError as error:
            said = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"The loss of likelihood {self.name!r} cannot be differentiated twice for many data together. Write it "
                "with torch operations of tensors that have second derivatives, with `torch.where` in place of `if`, "
                f"and without `.item()` or `float(...)`. torch says: {said}"
            ) from error

    def check_curvature(self, f: Tensor, y: Tensor) -> None:
        probe = torch.randn(f.shape, generator=torch.Generator().manual_seed(0)).to(f)
        if not bool(self.root(f, probe, y).any()):
            raise ValueError(
                f"The loss of likelihood {self.name!r} has no curvature in the outputs at any datum: its Hessian is 0 "
                f"in {f.dtype}, so that these outputs say nothing of the weights. Give a loss that is no straight line "
                "there, such as a Huber loss of a larger `delta` for an absolute error, and detach nothing in it."
            )

    def _needed(self, y: Tensor | None) -> Tensor:
        if y is None:
            raise ValueError(f"The curvature of likelihood {self.name!r} needs the targets.")
        return y


def _over_data(function: Callable[[Tensor, Tensor], Tensor], f: Float[Tensor, "*K N C"], y: Tensor) -> Tensor:
    """Of each datum of a stack of outputs."""
    each = vmap(function)
    result = vmap(lambda g: each(g, y))(f.reshape(-1, *f.shape[-2:]))
    return result.reshape(*f.shape[:-2], *result.shape[1:])
