"""Inputs and targets as tensors, and back: what is no tensor is kept as JSON, in a tensor of bytes."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.data.batches import plain

__all__ = ["decode_inputs", "encode_inputs"]


def encode_inputs(x: Any, name: str = "inputs") -> dict[str, Tensor]:
    """Inputs of a network, or targets, as a dictionary of tensors.

    Args:
        x: of the forms of `laplace_sampling.data.batches`.
        name: of the entry that holds the structure; those of the tensors begin with it.

    Raises:
        TypeError: if something in it is neither a tensor nor JSON.
    """
    tensors: list[Tensor] = []
    as_json = json.dumps(_describe(plain(x), tensors)).encode()
    entries = {f"{name}.{i}": tensor for i, tensor in enumerate(tensors)}
    return {**entries, name: torch.frombuffer(bytearray(as_json), dtype=torch.uint8)}


def decode_inputs(entries: Mapping[str, Tensor], name: str = "inputs") -> Any:
    """The inputs that `encode_inputs` was given."""
    return _build(json.loads(bytes(entries[name].cpu().tolist())), entries, name)


def _describe(x: Any, tensors: list[Tensor]) -> Any:
    """The structure of `x`, with tensors by their places in a list that they are appended to."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return {"tensor": len(tensors) - 1}
    if isinstance(x, dict):
        return {"dict": {name: _describe(value, tensors) for name, value in x.items()}}
    if isinstance(x, tuple | list):
        return {"list": [_describe(value, tensors) for value in x]}
    return {"value": x}


def _build(description: Any, entries: Mapping[str, Tensor], name: str) -> Any:
    ((kind, value),) = description.items()
    if kind == "tensor":
        return entries[f"{name}.{value}"]
    if kind == "dict":
        return {key: _build(part, entries, name) for key, part in value.items()}
    return [_build(part, entries, name) for part in value] if kind == "list" else value
