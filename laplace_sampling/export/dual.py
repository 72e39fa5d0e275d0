"""`Dual`: a tensor with tangents, in plain operations that `torch.export` traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Dual:
    """A tensor and `K` tangents of it."""

    value: Tensor
    tangents: Float[Tensor, "K ..."]


def is_dual(x: Any) -> bool:
    return isinstance(x, Dual)


def value_of(x: Any) -> Any:
    return x.value if isinstance(x, Dual) else x


def parts_of(x: Any) -> tuple[Any, Tensor | None]:
    return (x.value, x.tangents) if isinstance(x, Dual) else (x, None)


def total(terms: Sequence[Tensor]) -> Tensor:
    """The sum of one term or more."""
    return reduce(torch.add, terms)


def aligned(tangents: Float[Tensor, "K ..."], rank: int) -> Tensor:
    """Tangents of a tensor that is broadcast to so many axes."""
    return tangents.reshape(len(tangents), *[1] * (rank + 1 - tangents.dim()), *tangents.shape[1:])


def broadcast(tangents: Float[Tensor, "K ..."], like: Tensor) -> Tensor:
    return aligned(tangents, like.dim()).expand(len(tangents), *like.shape)
