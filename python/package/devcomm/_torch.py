"""What devcomm needs of torch.distributed."""

from collections import defaultdict
from itertools import count

# How many communicators were adopted of groups with these ranks, which do so in one order.
_adopted = defaultdict(count)


def parts(group, store):
    """The address of a group's NCCL communicator, the GPU, and a store for its ranks."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ValueError("torch.distributed has no process group: call init_process_group first")
    group = dist.group.WORLD if group is None else group
    device = torch.device("cuda", torch.cuda.current_device())
    backend = group._get_backend(device)
    if not hasattr(backend, "_comm_ptr"):
        raise ValueError(f"the group's backend on {device} is {backend!r}, which is not NCCL's")
    address = backend._comm_ptr()
    if address == 0:
        # NCCL's communicator is made by the first collective.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)
        address = backend._comm_ptr()
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    prefix = f"devcomm/{ranks}/{next(_adopted[ranks])}"
    return address, device.index, dist.PrefixStore(prefix, store)
