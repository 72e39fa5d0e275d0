"""`processes_of`: the processes that share a fit, from `process_group=` or `mesh=` of the user."""

from typing import TYPE_CHECKING

from laplace_sampling.data.fit_group import FitGroup
from laplace_sampling.data.processes import ALONE, DATA, SAMPLES, SHARED_SAMPLES, Processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["processes_of"]

_NOT_INSIDE = "This process is not in the group of `process_group=` or `mesh=`: only those that are share a fit."


def processes_of(process_group: "ProcessGroup | None" = None, mesh: "DeviceMesh | None" = None) -> Processes:
    """The processes of a group, which share out the data, or of a mesh.

    Args:
        process_group: all of its processes share out the data.
        mesh: with the axes `"data"`, `"samples"` or both; a mesh of one axis without a name is one of data. An axis
            `"shared_samples"` is one of samples, which stay in the processes that draw them.

    Raises:
        TypeError, ValueError: for something else, for both, or where this process is in none of them.
    """
    if process_group is None and mesh is None:
        return ALONE
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "`process_group=` and `mesh=` need the processes of `torch.distributed`: start the script by "
            "`torchrun`, and call `torch.distributed.init_process_group()` first."
        )
    if process_group is not None and mesh is not None:
        raise ValueError("`process_group=` and `mesh=` say the same in two ways: give one of them.")
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NOT_INSIDE)
    if mesh is None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"`process_group` must be a group of `torch.distributed`, such as `torch.distributed.group.WORLD`, "
                f"but is {process_group!r:.80}."
            )
        return _checked(process_group, None)
    if not isinstance(mesh, dist.device_mesh.DeviceMesh):
        raise TypeError(f"`mesh` must be a DeviceMesh of `torch.distributed`, but is {mesh!r:.80}.")
    names = mesh.mesh_dim_names or (DATA,) * (mesh.ndim == 1)
    if not names or not set(names) <= {DATA, SAMPLES, SHARED_SAMPLES} or {SAMPLES, SHARED_SAMPLES} <= set(names):
        raise ValueError(
            f"The axes of `mesh` must be named {DATA!r}, {SAMPLES!r} (or {SHARED_SAMPLES!r}) or both, but are "
            f"{mesh.mesh_dim_names}: make it by "
            f'`init_device_mesh(device, (2, 4), mesh_dim_names=("{DATA}", "{SAMPLES}"))`, or take a part of yours, as '
            '`mesh["data"]`.'
        )
    if mesh.get_coordinate() is None:
        raise ValueError(_NOT_INSIDE)
    groups = {name: mesh.get_group(number) for number, name in enumerate(names)}
    return _checked(groups.get(DATA), groups.get(SAMPLES) or groups.get(SHARED_SAMPLES), SHARED_SAMPLES in names)


def _checked(data: "ProcessGroup | None", samples: "ProcessGroup | None", samples_stay: bool = False) -> Processes:
    import torch.distributed as dist

    for group in (data, samples):
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(_NOT_INSIDE)
    own_data, own_samples = (None if group is None else FitGroup.of(group) for group in (data, samples))
    return Processes(own_data, own_samples, samples_stay)
