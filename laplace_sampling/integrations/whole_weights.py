"""Whether each process of a training by Accelerate, or by transformers' `Trainer` on top of it, has all weights."""

from accelerate import DistributedType

__all__ = ["check_whole_weights"]

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def check_whole_weights(distributed_type: DistributedType) -> None:
    """Raise if a process has a share of the weights only."""
    if distributed_type in _SHARDED:
        raise ValueError(
            f"Training by {distributed_type.value} shares out the weights over processes, so that none has a network "
            "to fit error bars to. Fit after training, with all weights loaded into a model on one device."
        )
