"""Whether weights and buffers are still what they were when their SHA-256 was taken, at the speed of memory.

SHA-256 takes as long as a few images in the network. Three signs are cheaper, and together miss nothing that matters:

- The tensors are the same objects, of the same names, in the same memory. That memory is held here, so that no other
  tensor gets its place.
- Their version counters are the same. torch raises these at each change in place that autograd knows of, of any size:
  a step of an optimiser, `load_state_dict`, `copy_`.
- Changes through `p.data`, or by numpy in the same memory, raise no counter. Each block of 4096 numbers is multiplied
  by one random vector that is no part of the file or the network, and all of these sums are compared bit for bit. A
  change of a block that is larger than the rounding of the sum, 1e-5 of the block's root mean square, changes it, but
  for changes that are orthogonal to the random vector to so many digits. What stays below moves predictions by as
  little.

A sign that is different changes nothing but the time of a call: SHA-256 decides.
"""

from collections.abc import Iterator
from functools import cache
from typing import Self

import torch
from torch import Tensor, nn

from laplace_sampling.networks.sharded import agreed, local, mesh_of

# Numbers in one sum. With twice as many a change has to be 1.4 times as large to be seen; half as many make sums
# of small tensors no faster. A product of such blocks runs at the speed of memory: 17 GB/s, SHA-256 at 1.5.
_BLOCK = 4096
# Blocks at once, where numbers of another precision are converted: 16 MiB.
_CONVERTED = 1024

# A tensor with the names of the part that has it, and its own there.
_Named = tuple[str, str, Tensor]


class WeightsSeal:
    """The signs of the tensors of a module at one time.

    Raises:
        RuntimeError: for tensors that are not one block of memory each, as sparse ones; they have no such signs.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors = list(_tensors_of(module))
        self._mesh = mesh_of(tensor for _, _, tensor in self._tensors)
        self._held = [local(tensor).detach() for _, _, tensor in self._tensors]
        self._dtypes = [tensor.dtype for tensor in self._held]
        # Tensors of inference mode count no versions.
        self._counted = [tensor for _, _, tensor in self._tensors if not tensor.is_inference()]
        self._versions = [tensor._version for tensor in self._counted]
        flat = [_flat(tensor) for tensor in self._held]
        self._groups = [
            _Sums([tensor for tensor in flat if (tensor.device, _precision(tensor)) == kind])
            for kind in dict.fromkeys((tensor.device, _precision(tensor)) for tensor in flat)
        ]
        self._devices = {tensor.device.type for tensor in flat}
        self._sums = [sums.clone() for sums in self._summed()]

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """`None` for a module whose tensors have no such signs."""
        try:
            return cls(module)
        except (RuntimeError, NotImplementedError):
            return None

    def holds(self, module: nn.Module, same_objects: bool = False) -> bool:
        """Whether all signs are as they were.

        Args:
            module: of which.
            same_objects: whether it is known to hold the same tensors as when this was last true.
        """
        same = same_objects or _are_same(list(_tensors_of(module)), self._tensors)
        # Processes that share out the weights hash them together.
        return bool(agreed(same and self._all_hold(), self._mesh))

    def _all_hold(self) -> bool:
        tensors = [tensor if self._mesh is None else local(tensor) for _, _, tensor in self._tensors]
        # `is_set_to` compares storage, offset, sizes and strides.
        return (
            all(map(Tensor.is_set_to, tensors, self._held))
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and [tensor._version for tensor in self._counted] == self._versions
            and all(map(torch.equal, self._summed(), self._sums))
        )

    def _summed(self) -> list[Tensor]:
        for kind in self._devices:
            if torch.is_autocast_enabled(kind):
                # Within the user's `autocast` the sums would have three digits.
                with torch.autocast(kind, enabled=False):
                    return self._summed()
        return [group.summed() for group in self._groups]


class _Sums:
    """The sums of some tensors of one device and precision, in memory that is taken once."""

    def __init__(self, flat: list[Tensor]) -> None:
        whole = [t.numel() // _BLOCK * _BLOCK for t in flat]
        blocks = [t[:end].view(-1, _BLOCK) for t, end in zip(flat, whole, strict=True) if end]
        self._blocks = [part for block in blocks for part in block.split(_CONVERTED)]
        # Small tensors and the ends of large ones are many: they go as one vector.
        self._ends = [tensor[end:] for tensor, end in zip(flat, whole, strict=True) if end < len(tensor)]
        self._dtype, num = _precision(flat[0]), sum(map(len, self._ends))
        self._random = _random(self._dtype, flat[0].device)
        rest = self._random.new_zeros(-(-num // _BLOCK), _BLOCK)
        self._joined, self._blocks = rest.view(-1)[:num], [*self._blocks, rest]
        self._all = self._random.new_empty(sum(map(len, self._blocks)))
        self._each = self._all.split(list(map(len, self._blocks)))

    def summed(self) -> Tensor:
        """All sums, which the next call overwrites."""
        if self._ends:
            torch.cat(self._ends, out=self._joined)
        for block, sums in zip(self._blocks, self._each, strict=True):
            torch.mv(block.to(self._dtype), self._random, out=sums)
        return self._all


def _are_same(now: list[_Named], before: list[_Named]) -> bool:
    """Whether the same tensors are at the same places."""
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a[:2] == b[:2] and a[2] is b[2] for a, b in pairs)


@cache
def _random(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0), dtype=dtype, device="cpu").to(device)


def _precision(tensor: Tensor) -> torch.dtype:
    """Of the sums: integers may need more digits than float32 has."""
    return torch.float32 if tensor.is_floating_point() and tensor.itemsize <= 4 else torch.float64


def _tensors_of(module: nn.Module) -> Iterator[_Named]:
    for name, part in module.named_modules():
        for own in (part._parameters, part._buffers):
            yield from ((name, key, tensor) for key, tensor in own.items() if tensor is not None)


def _flat(tensor: Tensor) -> Tensor:
    """The memory of a tensor as one vector; raises if it is not one block."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Axes may be in another order in memory, as those of `channels_last` are.
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).view(-1)
