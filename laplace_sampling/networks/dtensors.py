"""Tensors that processes share out, as `fully_shard` does: what each holds, and all of them as plain ones.

All processes gather, and agree, together.
"""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as no_transforms
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["MANAGED", "agreed", "check_methods", "check_shards", "is_dtensor", "local", "mesh_of", "whole"]

MANAGED = "_is_fsdp_managed_module"  # an attribute of each part whose own parameters `fully_shard` shares out


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


def local(tensor: Any) -> Tensor:
    """What this process holds of a tensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def mesh_of(tensors: Iterable[Any]) -> Any:
    """Of the processes that share out the first DTensor among some tensors; `None` if there is none."""
    return next((tensor.device_mesh for tensor in tensors if is_dtensor(tensor)), None)


def agreed(value: int, mesh: Any) -> int:
    """The smallest value that a process of a mesh has; the own one if there is no mesh."""
    if mesh is None:
        return value
    smallest = torch.tensor(value, device=mesh.device_type)
    for axis in range(mesh.ndim):
        torch.distributed.all_reduce(smallest, torch.distributed.ReduceOp.MIN, group=mesh.get_group(axis))
    return int(smallest)


def check_shards(tensor: Any, part: nn.Module, subject: str) -> None:
    """Raises for a parameter that is shared out in another way than by `fully_shard` alone.

    Raises:
        TypeError: for such a DTensor, as of `parallelize_module`.
        ValueError: for one that is not on the device of its mesh, as with `CPUOffloadPolicy`.
    """
    *replicated, last = tensor.placements
    by_fsdp = getattr(part, MANAGED, False) and not getattr(part, "_distribute_module_applied", False)
    if not (by_fsdp and last.is_shard() and all(placement.is_replicate() for placement in replicated)):
        raise TypeError(
            f"{subject} is a DTensor with placements {list(tensor.placements)}, shared out over the processes of a "
            "mesh in another way than by `fully_shard` alone, as by `parallelize_module`, and has no Jacobian "
            "products: load the full weights, as of `torch.distributed.checkpoint.state_dict.get_model_state_dict("
            "model, options=StateDictOptions(full_state_dict=True))`, into a model that is not parallelised, to which "
            "you may apply `fully_shard`, and pass that."
        )
    if tensor.device.type != tensor.device_mesh.device_type:
        raise ValueError(
            f"{subject} is on {tensor.device}, but its mesh is of {tensor.device_mesh.device_type}: use `fully_shard` "
            "without `CPUOffloadPolicy`."
        )


def check_methods(part: nn.Module, subject: str) -> None:
    """Raises for a method that gathers weights as FSDP does.

    Raises:
        TypeError: for one of `register_fsdp_forward_method`.
    """
    for name, value in vars(part).items():
        if "_fully_shard" in getattr(getattr(value, "__code__", None), "co_filename", ""):
            raise TypeError(
                f"`{name}` of {subject} is of `register_fsdp_forward_method`, which gathers weights in a way that "
                "torch does not differentiate: call it through a `forward`, and remove it by `del`."
            )
