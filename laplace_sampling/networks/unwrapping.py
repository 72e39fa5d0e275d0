"""The module that is linearised: the one inside its wrappers, made of parts that can be differentiated."""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from laplace_sampling.networks.sharded import MANAGED, is_dtensor, reshard


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`, which share its weights.

    Raises:
        TypeError: if it is no module, or a scripted one, whose operations cannot be differentiated forwards; if its
            weights are shared out over processes in another way than by `fully_shard`.
        ValueError: if a part of it has weights that cannot be differentiated, or that change when it is called.
    """
    while True:
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"`Linearisation(module)` got a {type(module).__name__} of torch.jit, which has no Jacobian products. "
                "Pass the module that was scripted or traced."
            )
        if not isinstance(module, nn.Module):
            raise TypeError(f"`Linearisation(module)` needs a torch.nn.Module, but got {type(module).__name__}.")
        if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._modules["_orig_mod"]  # pyright: ignore
        else:
            reshard(module)
            _check_parts(module)
            return module


def _check_parts(module: nn.Module) -> None:
    for name, part in module.named_modules():
        _check_part(part, f"`{name}` of the model is" if name else "The model is")
        _check_methods(part, f"`{name}` of the model" if name else "the model")
        for kind, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is not None:
                _check_tensor(tensor, kind, part, name)


def _check_part(part: nn.Module, subject: str) -> None:
    if isinstance(part, torch.jit.ScriptModule):
        raise TypeError(
            f"{subject} a {type(part).__name__} of torch.jit, which has no Jacobian products. Put the module that was "
            "scripted or traced in its place."
        )
    if type(part).__name__ == "FullyShardedDataParallel":
        raise TypeError(
            f"{subject} a FullyShardedDataParallel, whose flattened parameters have no Jacobian products: apply "
            "`torch.distributed.fsdp.fully_shard` to the model instead, or pass the model with the full weights."
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
        raise ValueError(
            f"{subject} an `nn.{type(part).__name__}(max_norm=...)`, which changes its weights in the forward pass. "
            "Renormalise them once, and set `max_norm` to None."
        )


def _check_tensor(tensor: torch.Tensor, kind: str, part: nn.Module, name: str) -> None:
    """Raises for a weight or a buffer that holds no numbers yet, or that torch does not differentiate."""
    if is_lazy(tensor):
        subject = f"`{name}` of the model is" if name else "The model is"
        raise ValueError(f"{subject} a {type(part).__name__} without weights as yet: run the model on a batch first.")
    if tensor.is_meta:
        raise ValueError(
            f"`{kind}` of {name or 'the model'} is on the device 'meta', which holds no numbers: load its "
            "weights first."
        )
    if is_dtensor(tensor):
        _check_shards(tensor, part, f"`{kind}` of {name or 'the model'}")
    if tensor.is_inference():
        raise ValueError(
            f"`{kind}` of {name or 'the model'} was made in `torch.inference_mode()`, so that torch does not "
            "differentiate it: make or load the model outside of it, or pass `copy.deepcopy(model)`."
        )


def _check_shards(tensor: Any, part: nn.Module, subject: str) -> None:
    """Raises for a parameter that is shared out in another way than by `fully_shard` alone."""
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


def _check_methods(part: nn.Module, subject: str) -> None:
    """Raises for a method that gathers weights as FSDP does."""
    for name, value in vars(part).items():
        if "_fully_shard" in getattr(getattr(value, "__code__", None), "co_filename", ""):
            raise TypeError(
                f"`{name}` of {subject} is of `register_fsdp_forward_method`, which gathers weights in a way that "
                "torch does not differentiate: call it through a `forward`, and remove it by `del`."
            )
