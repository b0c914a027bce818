"""Times NCCL EP, the package nccl-extensions, for `devcomm-bench ep --peers nccl-ep`.

devcomm-bench starts a process for each GPU, with the environment of torchrun and a job as argument
(JSON). Rank 0 prints a line of JSON for each operation and form of the algorithms: the time of each
round on the slowest rank, and the number of wrong elements; or why it was left out. By hand:

    torchrun --nproc-per-node 2 nccl_ep.py '{"experts": {"tokens": [32], "hidden": 7168, "top_k": 8,
    "experts": 256, "routing": "random", "operations": ["dispatch", "combine", "layer"]}, "seed": 1,
    "variants": ["nccl-ep-ll", "nccl-ep-ht"], "iters": 20, "warmup": 5, "check": 1, "graph": 1,
    "rounds": 7}'

It loads the package's library alone, which compiles its kernels by nvcc with the headers of NCCL
2.30, for which the library was built: NCCL_EP_JIT_BUILD_INCLUDE_DIR is their folder. NCCL itself is
2.30 or later, that of DEVCOMM_NCCL_HOME, of LD_LIBRARY_PATH, or torch's.
"""

import contextlib
import ctypes
import importlib.util
import json
import math
import os
import random
import re
import shutil
import struct
import sys
from ctypes import c_size_t, c_void_p
from pathlib import Path

EXPERT_MAJOR, RANK_MAJOR, FLAT = 1, 2, 3
# The layouts, and whether ranks write to each other's tensors without a staging buffer. RANK_MAJOR
# and FLAT send a row once to a rank, with its experts and weights; EXPERT_MAJOR also puts the rows
# in the order of the experts, as the operation `group` of `devcomm-bench ep` does.
STAGED = {"expert-major": (EXPERT_MAJOR, False)}
BOTH = {**STAGED, "expert-major direct": (EXPERT_MAJOR, True)}
FORMS = {
    ("nccl-ep-ll", "dispatch"): {"rank-major direct": (RANK_MAJOR, True)},
    ("nccl-ep-ll", "combine"): STAGED,
    ("nccl-ep-ll", "layer"): STAGED,
    ("nccl-ep-ht", "dispatch"): {"flat direct": (FLAT, True)},
    ("nccl-ep-ht", "combine"): BOTH,
    ("nccl-ep-ht", "layer"): BOTH,
}
# The low-latency form reserves space for all tokens at each expert; a case above this is left out.
MOST_BYTES = 32 << 30


def float32(number):
    return struct.unpack("f", struct.pack("f", number))[0]


def routing(kind, seed, counts, experts, top_k):
    """Experts and weights of each rank's tokens: those of devcomm_testing::experts::Batch, by its
    generator (WyRand of the crate fastrand)."""

    def draw():
        nonlocal seed
        seed = (seed + 0x2D358DCCAA6C78A5) % 2**64
        product = seed * (seed ^ 0x8BB84B93962EACC9)
        return product % 2**64 ^ product >> 64

    def fraction():
        while True:
            number = draw() >> 1
            # The last of 53 bits also tells about the rest: a float is rounded once.
            shift = max(number.bit_length() - 53, 0)
            number = (number >> shift | (number & (1 << shift) - 1 != 0)) << shift
            if (number := float32(number) * 2.0**-63) < 1:
                return number

    def choose():
        at = fraction()
        if kind == "skewed":
            at = float32(float32(float32(at * at) * at) * at)
        return int(float32(at * experts))

    favourite, all_ids, all_weights = draw() * experts >> 64, [], []
    for count in counts:
        ids, weights = [], []
        for _ in range(count):
            weights.append([fraction() for _ in range(top_k)])
            mine = [favourite] + [-1] * (top_k - 1) if kind == "one" else []
            while len(mine) < top_k:
                if (expert := choose()) not in mine or experts < 2 * top_k:
                    mine.append(expert)
            ids.append(mine)
        all_ids.append(ids)
        all_weights.append(weights)
    return all_ids, all_weights


def load_nccl():
    """Loads NCCL before torch, which then uses this one."""
    for name in [f"{os.environ.get('DEVCOMM_NCCL_HOME')}/lib/libnccl.so.2", "libnccl.so.2"]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
    return None


def load_nccl_ep():
    """Loads the package's library, and tells it what compiles its kernels."""
    try:
        package = Path(importlib.util.find_spec("nccl.ep").origin).parent
    except (ImportError, AttributeError):
        sys.exit("there is no package nccl-extensions")
    nvcc, env = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc"), os.environ
    if not env.get("NCCL_EP_JIT_NVCC"):
        env["NCCL_EP_JIT_NVCC"] = nvcc or sys.exit("NCCL EP needs nvcc, by NCCL_EP_JIT_NVCC")
    env.setdefault("NCCL_EP_HOME", str(package))
    header = Path(env.get("NCCL_EP_JIT_BUILD_INCLUDE_DIR", ""), "nccl.h")
    code = re.search(r"NCCL_VERSION_CODE 230\d\d", header.read_text() if header.is_file() else "")
    if not code:
        why = "by NCCL_EP_JIT_BUILD_INCLUDE_DIR, and there is no"
        sys.exit(f"NCCL EP needs the headers of NCCL 2.30, {why} {header}")
    return ctypes.CDLL(package / f"lib/cu{torch.version.cuda.split('.')[0]}" / "libnccl_ep.so")


def over_ranks(numbers, operation="MAX"):
    """Reduces numbers over the ranks, which is also a barrier of the hosts."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    torch.distributed.all_reduce(tensor, op=getattr(torch.distributed.ReduceOp, operation))
    return tensor.tolist()


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 128)]


class Library:
    """NCCL and NCCL EP, with a communicator."""

    def __init__(self, nccl, nccl_ep, rank, ranks):
        self.nccl, self.nccl_ep = nccl, nccl_ep
        nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p
        version, unique = ctypes.c_int(), UniqueId()
        self("ncclGetVersion", ctypes.byref(version))
        if version.value < 23000:
            sys.exit(f"NCCL EP needs NCCL 2.30, by DEVCOMM_NCCL_HOME, and not {version.value}")
        if rank == 0:
            self("ncclGetUniqueId", ctypes.byref(unique))
        shared = torch.tensor(list(unique.bytes), dtype=torch.uint8)
        torch.distributed.broadcast(shared, 0)
        unique = UniqueId.from_buffer_copy(bytes(shared.tolist()))
        self.comm = self.create("ncclCommInitRank", ranks, unique, rank)

    def __call__(self, name, *arguments):
        library = self.nccl_ep if name.startswith("ncclEp") else self.nccl
        if code := getattr(library, name)(*arguments):
            last = self.nccl.ncclGetLastError(c_void_p()) or b""
            why = self.nccl.ncclGetErrorString(code).decode()
            raise RuntimeError(f"{name}: {why} ({code}) {last.decode()}".strip())

    def create(self, name, *arguments):
        handle = c_void_p()
        self(name, ctypes.byref(handle), *arguments)
        return handle


class Batch:
    """The tokens of all ranks, with elements as in the benchmark: multiples of 1/64 from -2 on, below 2."""

    def __init__(self, job, tokens, rank, ranks, device):
        work, self.seed, self.tokens = job["experts"], job["seed"], tokens
        self.hidden, self.top_k, self.experts = work["hidden"], work["top_k"], work["experts"]
        self.rank, self.ranks, self.device = rank, ranks, device
        self.local = self.experts // ranks
        routed = routing(work["routing"], self.seed, [tokens] * ranks, self.experts, self.top_k)
        self.ids, self.weights = (torch.tensor(part, device=device) for part in routed)
        # Dimensions: source rank, token, expert of this rank.
        here = torch.where(self.is_at(rank), self.ids % self.local + 1, 0)
        none = torch.zeros(ranks, tokens, self.local + 1, device=device)
        self.is_here = none.scatter(2, here, 1.0)[..., 1:] > 0
        self.here = none.scatter(2, here, self.weights)[..., 1:]

    def is_at(self, rank):
        return self.ids.div(self.local, rounding_mode="floor") == rank

    def size(self, operation):
        """Bytes of the rows that the busiest rank receives from its peers."""
        counts = [self.is_at(rank).any(2).sum(1) for rank in range(self.ranks)]
        most = max(int(count.sum() - count[rank]) for rank, count in enumerate(counts))
        return 2 * self.hidden * most * (2 if operation == "layer" else 1)

    def rows(self, check):
        """The rows of all ranks; the first elements of a row identify its token."""
        generator = torch.Generator(device=self.device)
        generator.manual_seed(self.seed * 1000 + check)
        shape = (self.ranks, self.tokens, self.hidden)
        rows = torch.randint(
            0, 256, shape, generator=generator, device=self.device, dtype=torch.int16
        )
        number = torch.arange(self.tokens, device=self.device)
        rows[..., 0], rows[..., 1] = number % 256, number // 256
        rows[..., 2] = torch.arange(self.ranks, device=self.device)[:, None]
        return ((rows - 128) / 64).bfloat16()


class Case:
    """An operation in one form of an algorithm."""

    def __init__(self, library, batch, operation, variant, form):
        b = batch
        self.library, self.batch, self.operation = library, b, operation
        self.is_ll, (self.layout, self.direct) = variant == "nccl-ep-ll", form[1]
        self.case = {
            "variant": variant, "type": "bf16", "size": b.size(operation), "tokens": b.tokens,
            "hidden": b.hidden, "operation": operation,
            "algorithm": f"{b.tokens}x{b.hidden}:{b.top_k}/{b.experts} {form[0]}",
        }  # fmt: skip
        self.alive, self.handle, self.group, self.graph = [], None, None, None
        self.window, self.memory = 0, None

    def packed(self, form, *values):
        """A structure of C with these values."""
        self.alive.append(ctypes.create_string_buffer(struct.pack(form, *values)))
        return c_void_p(ctypes.addressof(self.alive[-1]))

    def named(self, *tensors):
        """A structure of pointers to tensors, as ncclEpDispatchInputs_t: after its size in bytes and
        NCCL EP's magic number the addresses, 0 for none."""
        n = len(tensors)
        addresses = [tensor.value if tensor else 0 for tensor in tensors]
        return self.packed(f"2I{n}Q", 8 + 8 * n, 0xC00FFFEE, *addresses)

    def tensor(self, tensor, window=0):
        """An ncclEpTensor_t: its size, magic number, number of dimensions, type (NCCL's number), data,
        window, 0, and the address of the sizes."""
        dtypes = {torch.int32: 2, torch.int64: 4, torch.float32: 7, torch.bfloat16: 9}
        sizes = self.packed(f"{tensor.ndim}Q", *tensor.shape)
        fields = tensor.ndim, dtypes[tensor.dtype], tensor.data_ptr(), window, 0, sizes.value
        return self.packed("4I4Q", 48, 0xCAFECAFE, *fields)

    def create(self):
        b, library, in_order = self.batch, self.library, self.layout == EXPERT_MAJOR
        by_rank, room = self.layout == RANK_MAJOR, b.ranks * b.tokens
        if self.is_ll:
            shape = [b.local, room] if in_order else [b.ranks, b.tokens]
            # The tensor, and two buffers of what is sent.
            size = (b.local * room + 2 * b.experts * b.tokens) * 2 * b.hidden * in_order
            if size > MOST_BYTES:
                raise ValueError(f"its low-latency form takes {size >> 30} GiB")
        else:
            # NCCL EP asserts this where it copies the routing of a rank's tokens.
            if b.ranks < 4 and b.tokens * b.ranks % 4:
                raise ValueError(f"its high-throughput form does not take {b.tokens} tokens")
            # The most rows that can arrive, as in NCCL EP's own benchmark.
            shape = [room * (b.top_k if in_order else 1)]
        # An ncclEpGroupConfig_t: size, magic number, version, algorithm, experts, tokens of a rank,
        # rows that can arrive, bytes of a row, defaults, whether ranks write without a staging buffer
        # (2: always), 0, experts of a token, 0.
        sizes = b.experts, b.tokens, 0 if self.is_ll else shape[0], 2 * b.hidden
        fields = int(not self.is_ll), *sizes, *[0] * 9, 2 if self.direct else 0, 0, b.top_k, 0
        config = self.packed("8IQ3I4x3QI4xQ4I", 112, 0xC00FFFEE, 2, *fields)
        self.group = library.create("ncclEpCreateGroup", library.comm, config)

        def new(*shape, dtype=torch.bfloat16):
            return torch.zeros(*shape, dtype=dtype, device=b.device)

        self.input, self.output = new(b.tokens, b.hidden), new(b.tokens, b.hidden)
        self.received = (self.in_window if self.direct else new)(*shape, b.hidden)
        per_row = [] if in_order else [b.top_k]
        self.their_ids = new(*shape, *per_row, dtype=torch.int32 if self.is_ll else torch.int64)
        self.their_weights = new(*shape, *per_row, dtype=torch.float32)
        self.counters = new(b.ranks if by_rank else b.local, dtype=torch.int32)
        weights, rows = self.tensor(b.weights[b.rank]), self.tensor(self.input)
        counters, received = self.tensor(self.counters), self.tensor(self.received, self.window)
        has_weights = not (self.is_ll and in_order)
        self.ids = self.tensor(b.ids[b.rank])
        # ncclEpLayoutInfo_t, and what the calls take and return.
        self.info = self.named(*([None, counters] if by_rank else [counters, None]), *[None] * 3)
        self.sent = self.named(rows, weights if has_weights else None, None)
        self.arrived = self.named(
            received,
            self.tensor(self.their_weights) if has_weights else None,
            None,
            None if in_order else self.tensor(self.their_ids),
        )
        self.partial = self.named(received, None, None)
        self.combined = self.named(self.tensor(self.output), None if has_weights else weights)
        none = c_void_p()
        create = "ncclEpInitHandle", self.group, self.layout, none, b.top_k, none
        self.handle = library.create(*create)
        self.update()

    def in_window(self, *shape):
        """Memory to which the peers may write."""
        library, count = self.library, math.prod(shape)
        size, window, symmetric = c_size_t(2 * count), c_void_p(), 1
        self.memory = library.create("ncclMemAlloc", size)
        registered = self.memory, size, ctypes.byref(window), symmetric
        library("ncclCommWindowRegister", library.comm, *registered)
        self.window, data = window.value, (self.memory.value, False)
        array = {"shape": (count,), "typestr": "<i2", "data": data, "version": 3}
        memory = type("Memory", (), {"__cuda_array_interface__": array})()
        return torch.as_tensor(memory, device=self.batch.device).view(torch.bfloat16).view(*shape)

    def destroy(self):
        self.graph = None
        barrier()
        owned = [("ncclEpHandleDestroy", self.handle), ("ncclEpGroupDestroy", self.group)]
        for name, handle in owned:
            if handle:
                self.library(name, handle)
        if self.window:
            library = self.library
            library("ncclCommWindowDeregister", library.comm, c_void_p(self.window))
            library("ncclMemFree", self.memory)

    def call(self, name, *arguments):
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        self.library(name, self.handle, *arguments, stream)

    def update(self):
        self.call("ncclEpUpdateHandle", self.ids, None if self.is_ll else self.info)

    def dispatch(self):
        if not self.is_ll:
            # The ranks exchange the routing, which is new in each layer.
            self.update()
        info = self.info if self.is_ll else None
        self.call("ncclEpDispatch", self.sent, self.arrived, info, None)

    def launch(self):
        if self.operation != "combine":
            self.dispatch()
        if self.operation != "dispatch":
            self.call("ncclEpCombine", self.partial, self.combined, None)

    def wrong(self, checks):
        """The number of wrong elements over all ranks and checks, None without checks."""
        wrong = 0
        for check in range(max(checks, 1)):
            values = self.batch.rows(check)
            self.input.copy_(values[self.batch.rank])
            for tensor in (self.received, self.output, self.their_weights):
                tensor.fill_(math.nan)
            for tensor in (self.their_ids, self.counters):
                tensor.fill_(-1)
            barrier()
            if self.operation == "combine":
                self.dispatch()
                barrier()
            self.launch()
            barrier()
            if checks:
                count = self.wrong_rows if self.operation == "dispatch" else self.wrong_results
                wrong += int(count(values))
        return int(over_ranks([wrong], "SUM")[0]) if checks else None

    def wrong_rows(self, values):
        """The number of wrong elements of received rows, of their weights and of the counters."""
        b, by_rank = self.batch, self.layout == RANK_MAJOR
        source, token = b.is_here.any(2).nonzero(as_tuple=True)
        places = torch.arange(len(source), device=b.device)
        counts = torch.bincount(source, minlength=b.ranks)
        if by_rank:
            # A rank's rows are the first ones in its part.
            places += source * b.tokens - (counts.cumsum(0) - counts)[source]
        rows = self.received.view(-1, b.hidden)[places]
        number = (rows[:, :3].float() * 64 + 128).nan_to_num(-1).long()
        of_rank, of_token = number[:, 2], number[:, 0] + 256 * number[:, 1]
        known = (number >= 0).all(1) & (of_rank < b.ranks) & (of_token < b.tokens)
        of_rank, of_token = of_rank * known, of_token * known
        # Each row comes once; the rows of a rank may have any order.
        keys = torch.where(known, of_rank * b.tokens + of_token, -1).sort().values
        misplaced = (keys != source * b.tokens + token).sum()
        misplaced += (of_rank != source).sum() * by_rank
        ids = self.their_ids.view(-1, b.top_k)[places].long()
        weights = self.their_weights.view(-1, b.top_k)[places]
        chosen = torch.where((ids >= 0) & (ids < b.local), ids + 1, 0)
        got = torch.zeros(len(ids), b.local + 1, device=b.device).scatter(1, chosen, weights)
        wrong = (rows != values[of_rank, of_token]).sum() + misplaced * b.hidden
        wrong += (got[:, 1:] != b.here[of_rank, of_token]).sum()
        return wrong + (self.counters != (counts if by_rank else b.is_here.sum((0, 1)))).sum()

    def wrong_results(self, values):
        """The number of wrong sums of the experts' rows, which the low-latency form weights first. A
        sum may be off by a rounding for each rank."""
        b = self.batch
        exists = b.ids[b.rank] >= 0
        factors = (b.weights[b.rank] if self.is_ll else 1.0) * exists
        want = values[b.rank].float() * factors.sum(1, keepdim=True)
        # A NaN is not smaller, and so is wrong.
        return (~((self.output.float() - want).abs() <= 2.0 * b.top_k * b.ranks / 256)).sum()

    def prepare(self, job):
        """Checks the case; returns the number of wrong elements and the function to time."""
        wrong = self.wrong(job["check"])
        for _ in range(job["warmup"]):
            self.launch()
        barrier()
        if not job["graph"]:
            return wrong, self.launch
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="relaxed"):
            for _ in range(job["iters"]):
                self.launch()
        self.graph.replay()
        barrier()
        return wrong, self.graph.replay


def barrier():
    torch.cuda.synchronize()
    over_ranks([0])


def time(launch, launches):
    """Microseconds of a batch, after a launch that aligns the ranks' GPUs."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    barrier()
    launch()
    begin.record()
    for _ in range(launches):
        launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def on_all_ranks(work):
    """Calls `work` on all ranks; returns its result and why it failed on any rank, or None."""
    result, why = None, ""
    try:
        result = work()
    except (RuntimeError, ValueError, AttributeError) as error:
        why = str(error).split("\n")[0] or "no message"
    failed = over_ranks([bool(why)])[0]
    return result, (why or "another rank has failed") if failed else None


def measure(job, cases, order, out):
    """Prints a line for each case."""
    iters, graphs, ready, times = job["iters"], job["graph"], {}, {}
    for case in cases:
        print(f"# {case.operation} {case.case['algorithm']}", file=out, flush=True)
        _, why = on_all_ranks(case.create)
        prepared = None
        if not why:
            prepared, why = on_all_ranks(lambda case=case: case.prepare(job))
        if why:
            print(json.dumps({**case.case, "left_out": why}), file=out, flush=True)
        else:
            ready[case], times[case] = prepared, []
    for _ in range(job["rounds"]):
        for case in order.sample(list(ready), len(ready)):
            us = time(ready[case][1], graphs or iters)
            times[case].append(us / (max(graphs, 1) * iters))
    for case, mine in times.items():
        row = {**case.case, "times_us": over_ranks(mine), "wrong": ready[case][0]}
        print(json.dumps(row), file=out, flush=True)
    ready.clear()
    for case in cases:
        case.destroy()


def main():
    global torch
    job, rank = json.loads(sys.argv[1]), int(os.environ["RANK"])
    # Only rows, and lines that begin with #, go to the standard output: what libraries print goes
    # to the standard error.
    out = os.fdopen(os.dup(1) if rank == 0 else os.open(os.devnull, os.O_WRONLY), "w")
    os.dup2(2, 1)
    # NCCL EP stores over NVLink, without multicast. A rank gives up after waiting for a minute.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    os.environ.setdefault("NCCL_EP_TIMEOUT_MS", "60000")
    nccl = load_nccl()
    import torch
    import torch.distributed

    nccl_ep = load_nccl_ep()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # NCCL takes the thread's context.
    torch.zeros(1, device=device)
    torch.distributed.init_process_group("gloo")
    ranks, order = torch.distributed.get_world_size(), random.Random(job["seed"])
    library = Library(nccl or ctypes.CDLL("libnccl.so.2"), nccl_ep, rank, ranks)
    for tokens in job["experts"]["tokens"]:
        batch = Batch(job, tokens, rank, ranks, device)
        for operation in job["experts"]["operations"]:
            forms = [
                (variant, form)
                for variant in job["variants"]
                for form in FORMS.get((variant, operation), {}).items()
            ]
            cases = [Case(library, batch, operation, *form) for form in forms]
            measure(job, cases, order, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
