from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

_R = TypeVar("_R")

class _DLPack(Protocol):
    def __dlpack__(self, *, stream: int | None = ...) -> Any: ...

class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

# numpy.ndarray. Other objects with this interface are refused: numpy.asarray makes an array of one.
class _HostArray(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

# A tensor of torch's is a _DLPack.
Array: TypeAlias = "_DLPack | _CudaArray | _HostArray | Window"
# torch.cuda.Stream, an object with __cuda_stream__, or a cudaStream_t.
Stream: TypeAlias = Any
# "sum", "prod", "max", "min", "avg", or torch.distributed.ReduceOp's.
Op: TypeAlias = Any
# Of torch or numpy, or a name.
DType: TypeAlias = Any
Extents: TypeAlias = int | tuple[int, int] | tuple[int, int, int]

__version__: str

def load_nccl(path: str | PathLike[str] | None = None) -> tuple[str, str]: ...

class World:
    @classmethod
    def from_env(cls) -> World: ...
    @classmethod
    def threads(cls, n: int) -> World: ...
    @classmethod
    def simulated(cls, n: int, settings: str = "") -> World: ...
    @property
    def n_ranks(self) -> int: ...
    @property
    def is_simulated(self) -> bool: ...
    @property
    def nccl_version(self) -> str: ...
    def run(self, function: Callable[..., _R], *args: Any) -> list[_R]: ...

class Rank:
    @property
    def rank(self) -> int: ...
    @property
    def n_ranks(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def is_simulated(self) -> bool: ...
    @property
    def hosts(self) -> list[str]: ...
    def communicator(self) -> Communicator: ...
    def communicator_from_nccl(self, address: int) -> Communicator: ...
    def barrier(self) -> None: ...
    def all_gather(self, value: bytes) -> list[bytes]: ...

class Communicator:
    @classmethod
    def from_torch(
        cls, group: Any = None, *, store: Any = None, deadline: float | None = 600.0
    ) -> Communicator: ...
    @classmethod
    def from_nccl(
        cls, address: int, device: int, *, store: Any = None, deadline: float | None = 600.0
    ) -> Communicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def n_ranks(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def is_simulated(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    def window(self, length: int, dtype: DType) -> Window: ...
    def dev_comm(
        self,
        *,
        lsa_barriers: int = 0,
        barriers: int = 0,
        world_gin_barriers: int = 0,
        rail_gin_barriers: int = 0,
        gin_signals: int = 0,
        gin_counters: int = 0,
        gin_connection: Literal["none", "full", "rail"] = "none",
        lsa_multimem: bool = False,
        ll_a2a: tuple[int, int, int] | None = None,
        buffer: tuple[int, int] | None = None,
    ) -> DevComm: ...
    def signal(
        self, peer: int, *, index: int = 0, context: int = 0, stream: Stream = None
    ) -> None: ...
    def wait_signal(
        self, peer: int, count: int = 1, *, index: int = 0, context: int = 0, stream: Stream = None
    ) -> None: ...
    def barrier(self) -> None: ...
    def synchronize(self, stream: Stream = None) -> None: ...
    def close(self) -> None: ...

class DevComm:
    @property
    def ll_a2a(self) -> bytes | None: ...
    @property
    def buffer(self) -> int | None: ...
    def close(self) -> None: ...

class Window:
    def __len__(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int]: ...
    def copy_from(self, array: Array) -> None: ...
    def copy_to(self, array: Array) -> None: ...
    def put_signal(
        self,
        source: Array,
        peer: int,
        at: int = 0,
        *,
        first: int = 0,
        count: int | None = None,
        index: int = 0,
        context: int = 0,
        stream: Stream = None,
    ) -> None: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

class Collectives:
    def __new__(cls, communicator: Communicator) -> Collectives: ...
    def all_reduce(
        self, send: Array, recv: Array | None = None, op: Op = None, *, stream: Stream = None
    ) -> None: ...
    def all_gather(self, send: Array, recv: Array, *, stream: Stream = None) -> None: ...
    def reduce_scatter(
        self, send: Array, recv: Array, op: Op = None, *, stream: Stream = None
    ) -> None: ...
    def broadcast(self, array: Array, root: int = 0, *, stream: Stream = None) -> None: ...
    def all_to_all(self, send: Array, recv: Array, *, stream: Stream = None) -> None: ...
    def all_to_all_v(
        self,
        send: Array,
        send_counts: Sequence[int],
        recv: Array,
        recv_counts: Sequence[int],
        *,
        stream: Stream = None,
    ) -> None: ...
    def all_reduce_rmsnorm(
        self,
        input: Array,
        residual: Array,
        weight: Array,
        output: Array | None = None,
        *,
        eps: float = 1e-6,
        scale: Array | None = None,
        stream: Stream = None,
    ) -> None: ...
    def close(self) -> None: ...

class GemmAllReduce:
    def __new__(
        cls,
        communicator: Communicator,
        m: int,
        n: int,
        *,
        wire: Literal["bf16", "f32", "e4m3"] | None = None,
        stream: Stream = None,
    ) -> GemmAllReduce: ...
    def __call__(self, a: Array, b: Array, c: Array, *, stream: Stream = None) -> Array: ...
    def measure(self, a: Array, b: Array, c: Array, *, stream: Stream = None) -> str: ...
    def explain(self, m: int, n: int, k: int) -> str: ...
    def close(self) -> None: ...

class GemmReduceScatter:
    def __new__(
        cls, communicator: Communicator, m: int, n: int, *, stream: Stream = None
    ) -> GemmReduceScatter: ...
    def __call__(
        self, a: Array, b: Array, c: Array | None = None, *, stream: Stream = None
    ) -> Any: ...
    def measure(self, a: Array, b: Array, c: Array, *, stream: Stream = None) -> str: ...
    def explain(self, m: int, n: int, k: int) -> str: ...
    def close(self) -> None: ...

class AllGatherGemm:
    def __new__(
        cls, communicator: Communicator, m: int, k: int, *, stream: Stream = None
    ) -> AllGatherGemm: ...
    def __call__(
        self,
        a: Array,
        b: Array,
        c: Array | None = None,
        *,
        bias: Array | None = None,
        activation: Literal["gelu", "silu"] | None = None,
        residual: Array | None = None,
        stream: Stream = None,
    ) -> Any: ...
    def measure(self, a: Array, b: Array, c: Array, *, stream: Stream = None) -> str: ...
    def explain(self, m: int, n: int, k: int) -> str: ...
    def close(self) -> None: ...

class Gemm:
    def __new__(cls, communicator: Communicator, *, stream: Stream = None) -> Gemm: ...
    def __call__(
        self,
        a: Array,
        b: Array,
        c: Array | None = None,
        *,
        bias: Array | None = None,
        activation: Literal["gelu", "silu"] | None = None,
        residual: Array | None = None,
        scales: tuple[Array, Array] | None = None,
        block_scales: tuple[Array, Array] | None = None,
        transposed_a: bool = False,
        transposed_b: bool = False,
        stream: Stream = None,
    ) -> Any: ...
    def close(self) -> None: ...

class GroupedGemm:
    def __new__(cls, communicator: Communicator, *, stream: Stream = None) -> GroupedGemm: ...
    def __call__(
        self,
        a: Array,
        b: Array,
        c: Array | None,
        offsets: Array,
        sizes: Array,
        *,
        activation: Literal["gelu", "silu"] | None = None,
        stream: Stream = None,
    ) -> Any: ...
    def close(self) -> None: ...

class ExpertParallel:
    def __new__(
        cls,
        communicator: Communicator,
        hidden: int,
        tokens: int,
        experts: int,
        top_k: int,
        *,
        alignment: int = 1,
        f8: bool = False,
        rows: int | None = None,
        stream: Stream = None,
    ) -> ExpertParallel: ...
    @property
    def communicator(self) -> Communicator: ...
    @property
    def hidden(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def f8(self) -> bool: ...
    @property
    def local_experts(self) -> int: ...
    @property
    def most_rows(self) -> int: ...
    def dispatch(
        self, input: Array, ids: Array, weights: Array, *, stream: Stream = None
    ) -> None: ...
    def group(
        self,
        rows: Array,
        offsets: Array | None = None,
        sizes: Array | None = None,
        *,
        scales: Array | None = None,
        origins: Array | None = None,
        stream: Stream = None,
    ) -> None: ...
    def combine(
        self, rows: Array, output: Array, residual: Array | None = None, *, stream: Stream = None
    ) -> None: ...
    def layer(
        self,
        input: Array,
        ids: Array,
        weights: Array,
        up: Array,
        down: Array,
        output: Array,
        residual: Array | None = None,
        *,
        activation: Literal["gelu", "silu"] | None = "silu",
        stream: Stream = None,
    ) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...

class KernelSet:
    def __new__(
        cls, communicator: Communicator, path: str | PathLike[str]
    ) -> KernelSet: ...
    @property
    def names(self) -> list[str]: ...
    def params(self, name: str) -> list[tuple[str, str]]: ...
    def launch(
        self,
        name: str,
        *args: Any,
        grid: Extents,
        block: Extents,
        shared: int = 0,
        cluster: int | None = None,
        dependent: bool = False,
        stream: Stream = None,
    ) -> None: ...
    def close(self) -> None: ...
