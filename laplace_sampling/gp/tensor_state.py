"""Modules whose state is what they were made of: loading it makes the rest again."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TensorState"]


class TensorState(nn.Module, ABC):
    """A module with entries in its `state_dict` that are no buffers, which `to` and `float` would round.

    Subclasses say which tensors these are, and how to make the module of them. With some of them missing nothing is
    changed.
    """

    @abstractmethod
    def tensor_state(self) -> dict[str, Tensor]:
        """The tensors that determine this module, by name."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor]) -> None:
        """Become the module that has this `tensor_state`.

        Args:
            state: a `tensor_state`.

        Raises:
            ValueError: if it is not one of such a module; `load_state_dict` then raises a `RuntimeError` with the text.
        """

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: value for name, value in self.tensor_state().items()})

    @torch.inference_mode(False)
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = {prefix + name: name for name in self.tensor_state()}
        rest = {key: value for key, value in state_dict.items() if key not in names}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing = [key for key in names if key not in state_dict]
        missing_keys += missing
        if not missing:
            try:
                self.restore({name: state_dict[key] for key, name in names.items()})
            except ValueError as error:
                error_msgs.append(str(error))
