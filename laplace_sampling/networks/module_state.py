"""`ModuleState`: what all parts of a module hold at one time, whether they still do, and how it is put back.

A prediction asks three times whether a module is as it was: when it compares the network with that of the fit, and
before and after a run. To look at each attribute takes longer than a small network; dictionaries that are compared as
a whole take a few microseconds.
"""

from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor, nn

# Attributes that every module has; others are its user's.
COMMON_ATTRIBUTES = frozenset(nn.Module().__dict__)


class ModuleState:
    """The parts of a module, their attributes, weights and buffers, and what lists, dictionaries and sets hold.

    Attributes:
        training: the parts that are in training mode.
        tied: whether some weight has two names.
        buffers: of all parts.
        weights_elsewhere: whether operations take weights that they do not have from the parts; `None` before it
            is known.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts = list(module.modules())
        self._types = list(map(type, self._parts))
        self._forwards = [kind.forward for kind in self._types]
        attributes = [part.__dict__ for part in self._parts]
        tensors = [of_part for part in self._parts for of_part in (part._parameters, part._buffers)]
        own = [value for of_part in attributes for name, value in of_part.items() if name not in COMMON_ATTRIBUTES]
        containers = [value for value in own if type(value) in (list, dict, set)]
        self._restored = [*attributes, *tensors, *containers]
        self._copies = [held.copy() for held in self._restored]
        self._children = [part._modules for part in self._parts]
        self._copies_of_children = [dict(of_part) for of_part in self._children]
        # Dictionaries in another order are equal, but a `Sequential` calls its parts in theirs.
        self._order = list(chain.from_iterable(self._children))
        # Views show what dictionaries hold later.
        self._views = [held.values() for held in tensors]
        self._tensors = list(chain.from_iterable(self._views))
        self._hooks = [d.values() for part in self._parts for d in (part._forward_pre_hooks, part._forward_hooks)]
        self._places = [(held, key, value) for held in [*attributes, *containers] for key, value in _tensors_in(held)]
        self._plain = [value for value in own if isinstance(value, Tensor) and not value.is_inference()]
        self._versions = [tensor._version for tensor in self._plain]
        # To look for weights of two names at each call takes as long as a small network.
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        self.tied = len(list(module.parameters())) < len(names)
        self.weights_elsewhere: bool | None = None
        self.training = [part for part in self._parts if part.training]
        self.buffers = [b for part in self._parts for b in part._buffers.values() if b is not None]

    def holds(self) -> bool:
        """Whether all is as it was, but for hooks, and the numbers in weights and buffers."""
        return (
            self.is_restored()
            and self._children == self._copies_of_children
            and list(chain.from_iterable(self._children)) == self._order
            and list(map(type, self._parts)) == self._types
            and [kind.forward for kind in self._types] == self._forwards
            and [tensor._version for tensor in self._plain] == self._versions
        )

    def hooks(self) -> list[Any]:
        """Those that run with the forward of each part, as they are now."""
        return [(number, *hooks) for number, hooks in enumerate(self._hooks) if hooks]

    def is_restored(self) -> bool:
        """Whether there is nothing to put back."""
        # Python compares the values of dictionaries by `==` only where they are not the same object.
        try:
            same = self._restored == self._copies
        except Exception:  # arrays have no truth value, and classes of users may raise anything
            return False
        # Tensors of one number may be equal without being the same.
        return (
            same
            and all(map(is_, chain.from_iterable(self._views), self._tensors))
            and all(held[key] is value for held, key, value in self._places)
        )

    def restore(self) -> None:
        """Puts back attributes, weights, buffers, and what lists, dictionaries and sets hold."""
        for held, copied in zip(self._restored, self._copies, strict=True):
            if isinstance(held, list):
                held[:] = copied
            elif not (isinstance(held, dict) and _same_objects(held, copied)):  # one that was filled anew is slower
                held.clear()
                held.update(copied)


def _tensors_in(held: Any) -> list[tuple[Any, Tensor]]:
    """Tensors among attributes, or in a list or a dictionary of them, with their places."""
    if isinstance(held, set):
        return []
    items = held.items() if isinstance(held, dict) else enumerate(held)
    return [(key, value) for key, value in items if isinstance(value, Tensor)]


def _same_objects(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether two dictionaries have the same objects in the same order."""
    same = len(now) == len(before) and all(map(is_, now, before))
    return same and all(map(is_, now.values(), before.values()))
