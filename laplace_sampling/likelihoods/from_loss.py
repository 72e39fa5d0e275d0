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
from laplace_sampling.solvers.placement import NUMBERS_TOGETHER, normal

Loss = Callable[[Tensor, Tensor], Tensor]


def from_loss(loss: Loss, name: str = "custom") -> "LossLikelihood":
    r"""A likelihood whose negative logarithm is a loss, convex in the outputs.

    `B` is the Hessian of the loss in the outputs, `L` its symmetric root, from an eigendecomposition of `C × C` for
    each datum: for up to some hundred outputs. A product with `B` forms no matrix.

    Args:
        loss: `loss(f, y)` of *one* datum, a scalar tensor. It gets outputs `f` in the shape that the model gives them,
            without the batch axis, and a target `y`. `torch.func` has to differentiate it twice, by reverse mode, and
            map it over data (`torch.where`, no `if` on values). It must be a negative log-likelihood,
            `−log p(y | f)`, summed over outputs and not scaled: a mean over a batch is not. Terms that do not depend on
            `f` matter to `log_prob` and the evidence only.
        name: name in messages and saved files. Files do not hold the function: `load` needs the likelihood again.

    Raises:
        ValueError: (at the first use) if a Hessian has a negative eigenvalue, so that `B` would be no covariance; if
            all Hessians are 0, as for an absolute error; if the loss has no second derivative, or cannot be mapped over
            data.

    Example:
        >>> from laplace_sampling import LinearisedLaplace, from_loss
        >>> gumbel = from_loss(lambda f, y: (y - f + (f - y).exp()).sum(), "gumbel")
        >>> la = LinearisedLaplace(torch.nn.Linear(1, 1), gumbel)
    """
    if not callable(loss) or not isinstance(name, str):
        wrong = loss if not callable(loss) else name
        raise TypeError(
            f"`from_loss(loss, name)` needs a function of outputs and target and a string, but got {wrong!r:.80}."
        )
    return LossLikelihood(loss, name)


@dataclass(frozen=True)
class LossLikelihood(Likelihood):
    """The likelihood that `from_loss` returns.

    Attributes:
        function: loss of one datum.
        name: name of the likelihood.
        shape: shape of the outputs of a datum; `bind` sets it.
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
        return _over_data(self._single, f, y) if len(y) else f.new_zeros(f.shape[:-1])

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return _over_data(grad(self._single), f, y) if len(y) else torch.zeros_like(f)

    def curvature(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        y = self._needed(y)
        if not len(y):
            return torch.zeros_like(u)

        # Reverse over reverse: many operations of torch have no forward derivative. `B` is symmetric, so `uᵀB` is `Bu`.
        def product(f_n: Tensor, u_n: Tensor, y_n: Tensor) -> Tensor:
            return vjp(lambda g: grad(self._single)(g, y_n), f_n)[1](u_n)[0]

        each = vmap(product)
        stack = u.reshape(-1, *f.shape)
        return vmap(lambda v: each(f.to(u), v, y))(stack).reshape(u.shape)

    def root(self, f: Tensor, u: Tensor, y: Tensor | None = None) -> Tensor:
        y = self._needed(y)
        if not len(y):
            return torch.zeros_like(u)
        # A root needs the whole Hessian `C × C` of each datum: a few data at a time.
        parts = torch.arange(len(f)).split(max(1, NUMBERS_TOGETHER // f.shape[-1] ** 2))
        roots = ((part, self._root(f[part].to(u), y[part], int(part[0]))) for part in parts)
        return torch.cat([torch.einsum("ncd,...nd->...nc", L, u[..., part, :]) for part, L in roots], dim=-2)

    root_transpose = root

    def _root(self, f: Tensor, y: Tensor, first: int) -> Float[Tensor, "N C C"]:
        values, vectors = torch.linalg.eigh(vmap(jacrev(grad(self._single)))(f, y))
        # Relative to all data: where a softmax is saturated, the whole Hessian of a datum is of the size of rounding.
        # Convex losses of 3 to 200 outputs had eigenvalues above -0.6 of this unit; a hundred of it count as rounding.
        rounding = 100 * torch.finfo(f.dtype).eps * f.shape[-1] * values.abs().max()
        indefinite = (values[:, 0] < -rounding).nonzero()[:, 0]
        if len(indefinite):
            datum = int(indefinite[0])
            raise ValueError(
                f"The loss of likelihood {self.name!r} is not convex in the outputs: its Hessian at datum "
                f"{first + datum} of the batch has the eigenvalue {float(values[datum, 0]):.3g} (the largest is "
                f"{float(values[datum, -1]):.3g}), so that it is the curvature of no Gaussian. Write a subclass of "
                "`Likelihood` whose curvature is the Fisher matrix, the mean of the Hessian over y ~ p(y | f)."
            )
        # The symmetric root: unlike a Cholesky factor it exists for singular Hessians, and is its own transpose.
        return (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT

    def check_targets(self, output_shape: torch.Size, y: Tensor) -> None:
        if y.dim() == 0 or len(y) != output_shape[0]:
            raise ValueError(f"There are targets of shape {list(y.shape)} for outputs of shape {list(output_shape)}.")
        if not len(y):
            return
        outputs = torch.zeros(1, output_shape[1:].numel(), device=y.device)
        try:
            replace(self, shape=tuple(output_shape[1:])).curvature(outputs, outputs, y[:1])
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            reason = next(iter(str(error).splitlines()), "")
            raise ValueError(
                f"The loss of likelihood {self.name!r} must return a scalar for the outputs of one datum, of shape "
                f"{list(output_shape[1:])}, and a target of shape {list(y.shape[1:])}, but it fails or cannot be "
                "differentiated twice for many data together. Write it with torch operations of tensors that have "
                "second derivatives, with `torch.where` in place of `if`, and without `.item()` or `float(...)`. "
                f"torch says: {reason}"
            ) from error

    def check_curvature(self, f: Tensor, y: Tensor) -> None:
        # `Lu` of a random `u` is zero only if all Hessians are; `root` also raises where one is indefinite.
        probe = normal(*f.shape, seed=0, dtype=f.dtype, device=f.device)
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
    """The function of each datum, for each set of outputs in a stack."""
    each = vmap(function)
    result = vmap(lambda g: each(g, y))(f.reshape(-1, *f.shape[-2:]))
    return result.reshape(*f.shape[:-2], *result.shape[1:])
