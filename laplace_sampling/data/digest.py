"""SHA-256 of tensors: tells whether weights, or the entries of a file, are what they were."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def digest(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """SHA-256, 32 bytes, of the names, dtypes, shapes and numbers of tensors, in their order."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in _dense_parts(tensor.detach().cpu()):
            # Not `reshape`, which keeps the stride of a single number: bytes need a stride of 1.
            flat = part.contiguous().as_strided((part.numel(),), (1,))
            sha.update(flat.view(torch.uint8).numpy().data)
    return sha.digest()


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """The indices and values of a sparse tensor; a dense one itself."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
