"""Models whose parameters `fully_shard` (FSDP2) has shared out over processes, in Jacobian products.

Each process holds a part of each parameter, a DTensor, and hooks of FSDP gather those of a block before its forward.
torch differentiates neither: DTensors have no forward derivatives, and the hooks write over the weights that a product
puts into a module. So the private copy of a module has no hooks of FSDP, and those of this file take their places:
plain tensors are gathered before the forward of a block and dropped after it. The graph of a backward pass
holds those that it needs until the product is done.

All processes run the same code, so that they gather together.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as no_transforms
from torch.utils._python_dispatch import _disable_current_modes

MANAGED = "_is_fsdp_managed_module"  # an attribute of each part whose own parameters `fully_shard` shares out
BLOCK = "_is_block_of_fsdp"  # an attribute of private copies of parts to which `fully_shard` was applied


# Single tensors -------------------------------------------------------------------------------------------------------


def is_dtensor(tensor: Any) -> bool:
    # Who has a DTensor has imported its module; importing it here would cost all others time.
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def whole(tensor: Any, requires_grad: bool = False) -> Tensor:
    """All of a tensor as a plain one without a graph, gathered from all processes if it is shared out."""
    if not is_dtensor(tensor):
        return tensor.detach()
    # It is a constant, and no operation of the network: neither transforms nor modes see how it is gathered.
    with torch.no_grad(), no_transforms(), torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.full_tensor().contiguous().requires_grad_(requires_grad)


def mesh_of(tensors: Iterable[Any]) -> Any:
    """The mesh of the first DTensor among some tensors; `None` if there is none."""
    return next((tensor.device_mesh for tensor in tensors if is_dtensor(tensor)), None)


def reshard(module: nn.Module) -> None:
    """Drops the weights that a forward pass without a backward one has left whole, as FSDP does before a next step."""
    for part in module.modules():
        if is_fsdp(part):
            cast(Any, part).reshard()


def agreed(value: int, mesh: Any) -> int:
    """The smallest value that a process of a mesh has; the own one if there is no mesh."""
    if mesh is None:
        return value
    smallest = torch.tensor(value, device=mesh.device_type)
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=mesh.get_group(axis))
    return int(smallest)


# Models ---------------------------------------------------------------------------------------------------------------


class Shards:
    """The parameters of a module that `fully_shard` has shared out.

    Blocks are the parts to which `fully_shard` was applied, and the module itself: each gathers those of its parameters
    that are not of a block inside.

    Args:
        module: of which.
        random: the names of the weights that are random.
    """

    def __init__(self, module: nn.Module, random: Iterable[str]) -> None:
        self.module, self.names = module, frozenset(random)
        self._gathered = dict[nn.Module, list[tuple[dict[str, Any], str, Any]]]()
        self._random: dict[str, Tensor] | None = None
        self._depth = 0

    @classmethod
    def of(cls, module: nn.Module, random: Iterable[str]) -> Self | None:
        """`None` for a module without such parameters."""
        return cls(module, random) if any(hasattr(part, MANAGED) for part in module.modules()) else None

    def random(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The random weights, whole; gathered once for each product."""
        if self._random is None or list(self._random) != list(parameters):
            gathered = {name: whole(parameter) for name, parameter in parameters.items()}
            if not self._depth:
                return gathered
            self._random = gathered
        return {name: weight.detach() for name, weight in self._random.items()}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Blocks inside gather their parameters while they run."""
        with ExitStack() as stack:
            random = {id(p) for name, p in self.module.named_parameters() if name in self.names}
            for block, parts in _blocks(self.module).items():
                gather, drop = partial(self._gather, parts, random), self._drop
                stack.callback(block.register_forward_pre_hook(gather, prepend=True).remove)
                stack.callback(block.register_forward_hook(drop).remove)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                for block in list(self._gathered):  # after an error in the network
                    self._drop(block)
                if not self._depth:
                    self._random = None

    def _gather(self, parts: list[nn.Module], random: set[int], block: nn.Module, inputs: Any) -> None:
        """Before the forward of a block."""
        tensors, places = dict[int, Tensor](), self._gathered.setdefault(block, [])
        for own in (part._parameters for part in parts):
            for name, parameter in own.items():
                if is_dtensor(parameter):
                    if id(parameter) not in tensors:
                        # Checkpoints run a part of the network again, where random weights must have a graph.
                        tensors[id(parameter)] = whole(parameter, id(parameter) in random)
                    places.append((own, name, parameter))
                    own[name] = cast(nn.Parameter, tensors[id(parameter)])

    def _drop(self, block: nn.Module, inputs: Any = None, output: Any = None) -> None:
        """After the forward of a block."""
        for own, name, parameter in self._gathered.pop(block, []):
            own[name] = parameter


def is_fsdp(part: nn.Module) -> bool:
    package = sys.modules.get("torch.distributed.fsdp")
    return package is not None and isinstance(part, package.FSDPModule)


def _blocks(module: nn.Module) -> dict[nn.Module, list[nn.Module]]:
    """The blocks, from outside, and the parts of each that are in no block inside; the block itself is the first."""
    blocks, seen = dict[nn.Module, list[nn.Module]](), set[nn.Module]()

    def visit(part: nn.Module, block: nn.Module) -> None:
        if part not in seen:
            seen.add(part)
            block = part if hasattr(part, BLOCK) else block
            blocks.setdefault(block, []).append(part)
            for child in part.children():
                visit(child, block)

    visit(module, module)
    return blocks


def is_of_fsdp(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp")
