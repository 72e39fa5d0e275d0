"""Samples of a posterior as functions, in the form in which BoTorch takes paths."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn


class KernelPaths(nn.Module):
    """`K` functions drawn from a posterior, fixed and differentiable, in the units of the targets.

    Called with `X` of shape `[…, Q, D]` it returns `[…, *sample_shape, Q]`: batch dimensions of `X` are broadcast with
    the sample shape, as for paths of BoTorch. `[Q, D]` are inputs that all functions share, `[K, Q, D]` those of each.

    Attributes:
        sample_shape: `[K]`, unless it is changed to another one of as many functions.
    """

    def __init__(self, functions: Callable[[Tensor, Tensor], Tensor], chosen: Tensor, sample_shape: torch.Size) -> None:
        super().__init__()
        self._functions, self._chosen, self.sample_shape = functions, chosen, sample_shape

    def forward(self, X: Float[Tensor, "*B Q D"]) -> Float[Tensor, "*BK Q"]:
        """The functions at `X`."""
        shape, own = self.sample_shape, X.shape[:-2][-len(self.sample_shape) :] if self.sample_shape else ()
        batch = torch.broadcast_shapes(X.shape[:-2], shape)
        lead, count = batch[: len(batch) - len(shape)], len(self._chosen)
        if count > 1 and all(size == 1 for size in own):
            values = self._functions(X.reshape(-1, X.shape[-1]), self._chosen)
        else:
            each = X.expand(*batch, *X.shape[-2:]).reshape(-1, count, *X.shape[-2:])
            values = self._functions(each.transpose(0, 1).flatten(1, 2), self._chosen)
        return values.reshape(count, lead.numel(), -1).transpose(0, 1).reshape(*batch, X.shape[-2])

    def set_ensemble_as_batch(self, ensemble_as_batch: bool) -> None:
        """Nothing changes, as these are paths of one model; BoTorch calls it."""
