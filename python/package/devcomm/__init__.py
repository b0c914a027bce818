"""GPU communication by devcomm's kernels, on torch tensors.

    world = devcomm.World.simulated(4)          # or from_env(), under torchrun
    world.run(lambda rank: devcomm.Collectives(rank.communicator()).all_reduce(x))

In a process that uses torch.distributed, `Communicator.from_torch()` takes its communicator.
`import devcomm.torch` defines torch's operators, `torch.ops.devcomm.*`. DEVCOMM_DEBUG=1 enables the
checks of `devcomm.debug`.
"""

import atexit
import os

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
    CheckError,
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
    "CheckError",
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

if os.environ.get("DEVCOMM_DEBUG") == "1":
    from devcomm import debug

    debug.enable()
