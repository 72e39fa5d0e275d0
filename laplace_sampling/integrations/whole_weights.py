"""Whether a training by Accelerate, or by transformers' `Trainer` on top of it, leaves weights that can be fitted."""

from typing import Any

from accelerate import DistributedType

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def check_whole_weights(state: Any) -> None:
    """Raise if a process has a share of the weights only, in another form than that of `fully_shard`.

    Args:
        state: of the accelerator, with its `distributed_type`.
    """
    if state.distributed_type in _SHARDED and not getattr(state, "is_fsdp2", False):
        raise ValueError(
            f"Training by {state.distributed_type.value} shares out the weights over processes, so that none has a "
            "network to fit error bars to. Train by `fully_shard` (FSDP of version 2), or fit after training, with all "
            "weights loaded into a model on one device."
        )
