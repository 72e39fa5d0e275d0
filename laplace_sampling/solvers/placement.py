"""Where tensors are when the network is on a GPU and the data are not.

- Indices of data are on the CPU. Inputs are moved to the network batch by batch.
- Targets, outputs, features, and masks that are computed from these are where the network is.
- Random numbers are drawn on the CPU, so that a seed gives the same ones everywhere, and then moved.
- What belongs to no datum and is small, such as precisions, spectra and effective dimensions, is on the CPU in float64.
"""

import torch
from torch import Tensor

# Numbers of a temporary tensor that is made at once, 32 MiB in float64; what is larger is made in parts. It bounds
# memory, and changes results by rounding only.
NUMBERS_TOGETHER = 2**22


def chosen(indices: Tensor, mask: Tensor) -> Tensor:
    """The indices where a mask is true, on the CPU, wherever the mask is."""
    return indices[mask.cpu()]


def normal(
    *shape: int,
    seed: int | torch.Generator,
    dtype: torch.dtype,
    device: torch.device,
    drawn_in: torch.dtype = torch.float32,
) -> Tensor:
    """Standard normal numbers of a dtype on a device, drawn on the CPU in single or double precision."""
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    return torch.randn(shape, generator=generator, dtype=drawn_in).to(device, dtype)
