"""Rows of the Jacobian in blocks that fit in memory, for dense algebra in observation space."""

from collections.abc import Iterator

import torch
from torch import Tensor

from laplace_sampling.linear_model.features import BLOCK_BYTES, Features

__all__ = ["row_blocks"]


def row_blocks(features: Features, block_bytes: float = BLOCK_BYTES, start: int = 0) -> Iterator[tuple[int, Tensor]]:
    """Blocks of rows of `Φ`, `[m, P]` in float64, each with the index of its first row; from datum `start` on.

    A block holds whole data, or some outputs of one datum where the Jacobian of a datum is larger than a block.
    """
    limit = max(1, int(block_bytes / (8 * features.size)))
    if start == features.num_data:
        return iter(())
    if features.num_outputs <= limit:
        return _blocks_of_data(features, limit // features.num_outputs, start)
    return _blocks_of_outputs(features, limit, start)


def _blocks_of_data(features: Features, num_data: int, start: int) -> Iterator[tuple[int, Tensor]]:
    for block in torch.arange(start, features.num_data).split(num_data):
        rows = [features.rows(batch).flatten(0, 1).double() for batch in features.chunks(block)]
        yield int(block[0]) * features.num_outputs, rows[0] if len(rows) == 1 else torch.cat(rows)


def _blocks_of_outputs(features: Features, num_rows: int, start: int) -> Iterator[tuple[int, Tensor]]:
    eye = torch.eye(features.num_outputs, dtype=features.dtype, device=features.device)
    for datum in range(start, features.num_data):
        for part in torch.arange(features.num_outputs).split(num_rows):
            # A VJP of a unit vector is a row: `features.rows` would hold all outputs of the datum.
            rows = features.vjp(eye[part.to(eye.device), None], torch.tensor([datum]))
            yield datum * features.num_outputs + int(part[0]), rows.double()
