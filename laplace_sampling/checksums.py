"""The form of a state: tensors, how they were made as JSON in a tensor of bytes, and a checksum of every entry."""

import json
from typing import Any

import torch
from torch import Tensor

from laplace_sampling.data.batches import as_plain
from laplace_sampling.data.digest import digest

__all__ = ["described", "with_checksums"]

_FORMAT = 4
# The entry of what is no tensor, with the checksums of the tensors in it, and that of its own checksum.
_SETTINGS, _CHECKSUM = "settings", "checksum"
_NUM_NAMED = 3


def with_checksums(tensors: dict[str, Tensor], how: dict[str, Any]) -> dict[str, Tensor]:
    """The state of some tensors.

    Args:
        tensors: by name; they are copied.
        how: they were made, as JSON.
    """
    state = {name: as_plain(tensor.detach()).clone() for name, tensor in tensors.items()}
    checksums = {name: digest([(name, tensor)]).hex() for name, tensor in state.items()}
    settings = _as_tensor(json.dumps({"format": _FORMAT, "checksums": checksums, **how}).encode())
    return {**state, _SETTINGS: settings, _CHECKSUM: _as_tensor(digest([(_SETTINGS, settings)]))}


def described(state: Any) -> dict[str, Any]:
    """How the tensors of a state were made, after checks that all entries are as they were.

    Args:
        state: of `with_checksums`.

    Raises:
        ValueError: if they are not, or if this is no state, or one of another version.
    """
    if not isinstance(state, dict) or _SETTINGS not in state:
        raise ValueError("This is not a state of a LinearisedLaplace: it has no entry 'settings'.")
    checksum = state.get(_CHECKSUM)
    if checksum is not None and not _is_as_it_was(state, _SETTINGS, checksum):
        raise _damaged([_SETTINGS])
    try:
        how = json.loads(bytes(state[_SETTINGS].tolist()))
        version, checksums = how["format"], how.get("checksums", {})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged([_SETTINGS]) from error
    if version != _FORMAT:
        newer = isinstance(version, int) and version > _FORMAT
        what = (
            "a newer version wrote it, so update laplace_sampling" if newer else "an older one wrote it, so fit again"
        )
        raise ValueError(f"The state has format {version}, but this version reads format {_FORMAT}: {what}.")
    wrong = [] if checksum is not None else [_CHECKSUM]
    there = {name: _as_tensor(bytes.fromhex(hex)) for name, hex in checksums.items()}
    wrong += [name for name, checksum in there.items() if not _is_as_it_was(state, name, checksum)]
    wrong += [name for name in state if name not in (*checksums, _SETTINGS, _CHECKSUM)]
    if wrong:
        raise _damaged(wrong)
    return how


def _is_as_it_was(state: dict[str, Any], name: str, checksum: Any) -> bool:
    tensor = state.get(name)
    if not isinstance(tensor, Tensor) or not isinstance(checksum, Tensor):
        return False
    return list(digest([(name, tensor)])) == checksum.tolist()


def _damaged(names: list[str]) -> ValueError:
    named = f"{names[:_NUM_NAMED]}{' and others' if len(names) > _NUM_NAMED else ''}"
    return ValueError(
        f"The state is incomplete or damaged: entries {named} are not as they were saved. Take another copy of it, or "
        "fit and save again."
    )


def _as_tensor(given: bytes) -> Tensor:
    return torch.frombuffer(bytearray(given), dtype=torch.uint8)
