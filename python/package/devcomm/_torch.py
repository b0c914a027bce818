"""What devcomm needs of torch, and of torch.distributed."""

from collections import defaultdict
from itertools import count

# For each list of ranks, how many communicators were taken from its groups. The number is the same
# on all of these ranks, which take them in one order.
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
        # Torch makes NCCL's communicator in the first collective.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        torch.cuda.synchronize(device)
        address = backend._comm_ptr()
    if store is None:
        store = dist.distributed_c10d._get_default_store()
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    prefix = f"devcomm/{ranks}/{next(_adopted[ranks])}"
    return address, device.index, dist.PrefixStore(prefix, store)


def new_tensor(like, method, shape, dtype, stream):
    """A new tensor where a tensor is, which its method makes, as work of the stream with this
    handle; None: the current one."""
    import torch

    def make():
        return getattr(like, method)(shape, dtype=getattr(torch, dtype))

    if stream is None or not like.is_cuda:
        return make()
    # 0 and 1 are handles of the default stream.
    if stream in (0, 1):
        on = torch.cuda.default_stream(like.device)
    else:
        on = torch.cuda.ExternalStream(stream, like.device)
    with torch.cuda.stream(on):
        return make()
