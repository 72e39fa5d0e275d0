"""Models whose parameters `fully_shard` (FSDP2) has shared out over processes, in Jacobian products.

Each process holds a part of each parameter, a DTensor, and hooks of FSDP gather those of a block before its forward.
torch differentiates neither: DTensors have no forward derivatives, and the hooks write over the weights that a product
puts into a module. So the private copy of a module has no hooks of FSDP, and those of this file take their places:
plain tensors are gathered before the forward of a block and dropped after it. The graph of a backward pass
holds those that it needs until the product is done.

All processes run the same code, so that they gather together.
"""

import sys
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

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


@contextmanager
def gathering(module: nn.Module, random: Container[str]) -> Iterator[None]:
    """Blocks inside gather their weights while they run.

    Blocks are the parts to which `fully_shard` was applied, and the module itself: each gathers those of its weights
    that are not of a block inside. What an error in the network leaves whole, the caller puts back.

    Args:
        module: a private copy.
        random: the names of the weights that are random.
    """
    leaves = {id(p) for name, p in module.named_parameters() if name in random}

    def gather(kept: list[Any], parts: list[nn.Module], *_: Any) -> None:
        for own in (part._parameters for part in parts):
            for name, parameter in own.items():
                if is_dtensor(parameter):
                    kept.append((own, name, parameter))
                    # Checkpoints run a part of the network again, where random weights must have a graph.
                    own[name] = cast(nn.Parameter, whole(parameter, id(parameter) in leaves))

    def drop(kept: list[Any], *_: Any) -> None:
        while kept:
            own, name, parameter = kept.pop()
            own[name] = parameter

    with ExitStack() as hooks:
        for block, parts in _blocks(module).items():
            kept = list[Any]()
            hooks.callback(block.register_forward_pre_hook(partial(gather, kept, parts), prepend=True).remove)
            hooks.callback(block.register_forward_hook(partial(drop, kept)).remove)
        yield


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
