"""The module that is linearised: the one inside its wrappers, made of parts that can be differentiated."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from laplace_sampling.networks.dtensors import check_methods, check_shards, is_dtensor

__all__ = ["unwrapped"]


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside `torch.compile`, `DataParallel` and `DistributedDataParallel`, which share its weights.

    Raises:
        TypeError: if it is no module, or a scripted one, whose operations cannot be differentiated forwards.
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
            _check_parts(module)
            return module


def _check_parts(module: nn.Module) -> None:
    for name, part in module.named_modules():
        _check_part(part, f"`{name}` of the model is" if name else "The model is")
        check_methods(part, f"`{name}` of the model" if name else "the model")
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
        check_shards(tensor, part, f"`{kind}` of {name or 'the model'}")
    if tensor.is_inference():
        raise ValueError(
            f"`{kind}` of {name or 'the model'} was made in `torch.inference_mode()`, so that torch does not "
            "differentiate it: make or load the model outside of it, or pass `copy.deepcopy(model)`."
        )
