"""GPU communication by devcomm's kernels, on torch tensors.

    world = devcomm.World.simulated(4)          # or from_env(), under torchrun
    world.run(lambda rank: devcomm.Collectives(rank.communicator()).all_reduce(x))

In a process that uses torch.distributed, `Communicator.from_torch()` takes its communicator.
`import devcomm.torch` defines torch's operators, `torch.ops.devcomm.*`.
"""

import atexit

from devcomm._devcomm import (
    AllGatherGemm,
    Collectives,
    Communicator,
    DevComm,
    ExpertParallel,
    Gemm,
    GemmAllReduce,
    GemmReduceScatter,
    GroupedGemm,
    KernelSet,
    Rank,
    Window,
    World,
    __version__,
    _forget,
    load_nccl,
)
from devcomm.errors import (
    DevCommError,
    DriverError,
    Error,
    InvalidInput,
    LaunchError,
    NcclError,
    StateError,
    WorldError,
)

__all__ = [
    "AllGatherGemm",
    "Collectives",
    "Communicator",
    "DevComm",
    "DevCommError",
    "DriverError",
    "Error",
    "ExpertParallel",
    "Gemm",
    "GemmAllReduce",
    "GemmReduceScatter",
    "GroupedGemm",
    "InvalidInput",
    "KernelSet",
    "LaunchError",
    "NcclError",
    "Rank",
    "StateError",
    "Window",
    "World",
    "WorldError",
    "load_nccl",
]

atexit.register(_forget)
