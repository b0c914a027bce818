"""Times the operations of PyTorch's symmetric memory, for `devcomm-bench .. --peers torch`.

devcomm-bench starts a process for each GPU, with the environment of torchrun and a job as argument
(JSON): all-reduces of some sizes, or products of some shapes with a collective. Rank 0 prints a
line of JSON for each case and variant: the time of each round on the slowest rank, and the number
of wrong elements; or why it was left out. Only operations that load and store are asked for; torch
itself takes multicast where it finds it, unless TORCH_SYMM_MEM_DISABLE_MULTICAST is 1.
"""

import json
import os
import random
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ALL_REDUCES = {
    "torch-one-shot": torch.ops.symm_mem.one_shot_all_reduce,
    "torch-two-shot": torch.ops.symm_mem.two_shot_all_reduce_,
}
# A message consists of whole words of this many bytes.
WORD = 4
# If the L2 cache is to be cold, the copies of B have this many times its size.
CACHES = 4


def over_ranks(numbers, operation):
    """Reduces numbers over the ranks, which is also a barrier of the hosts."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    return tensor.tolist()


def small_integers(shape, device, seed, most):
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator, device=device)


class Case:
    """An operation on some elements. Subclasses have `case`, the columns that identify its rows,
    and the methods `fill(check)`, `launch(variant)` and `wrong_elements(result of launch)`."""

    def __init__(self, job):
        self.job = job
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD.group_name

    def wrong(self, variant):
        """The number of wrong elements over all ranks and checks, None without checks."""
        if not self.job["check"]:
            self.fill(None)
            self.launch(variant)
            return None
        wrong = 0
        for check in range(self.job["check"]):
            self.fill(check)
            torch.cuda.synchronize()
            over_ranks([0], dist.ReduceOp.SUM)
            wrong += self.wrong_elements(self.launch(variant))
            over_ranks([0], dist.ReduceOp.SUM)
        return int(over_ranks([wrong], dist.ReduceOp.SUM)[0])

    def capture(self, variant):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(self.job["iters"]):
                self.launch(variant)
        graph.replay()
        torch.cuda.synchronize()
        return graph

    def time(self, launch, launches, operations):
        """Microseconds per operation of a batch, after a launch that aligns the ranks' GPUs."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        over_ranks([0], dist.ReduceOp.SUM)
        launch()
        begin.record()
        for _ in range(launches):
            launch()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / operations

    def rounds(self, variants, order):
        """The times of each variant on the slowest rank."""
        self.fill(None)
        iters, graphs = self.job["iters"], self.job["graph"]
        launches, times = {}, {variant: [] for variant in variants}
        for variant in variants:
            for _ in range(self.job["warmup"]):
                self.launch(variant)
            torch.cuda.synchronize()
            over_ranks([0], dist.ReduceOp.SUM)
            launches[variant] = lambda variant=variant: self.launch(variant)
            if graphs:
                launches[variant] = self.capture(variant).replay
        for _ in range(self.job["rounds"]):
            for variant in order.sample(variants, len(variants)):
                launch = launches[variant]
                times[variant].append(self.time(launch, graphs or iters, max(graphs, 1) * iters))
        return {key: over_ranks(mine, dist.ReduceOp.MAX) for key, mine in times.items()}

    def print(self, **row):
        if self.rank == 0:
            print(json.dumps({**self.case, **row}), flush=True)

    def run(self, order):
        wrong = {}
        for variant in self.job["variants"]:
            try:
                wrong[variant] = self.wrong(variant)
            except (RuntimeError, ValueError, AttributeError) as error:
                # All ranks fail alike: the cause is the shape, or the version of torch.
                self.print(variant=variant, left_out=str(error).split("\n")[0])
        for variant, times in self.rounds(list(wrong), order).items():
            self.print(variant=variant, times_us=times, wrong=wrong[variant])


class AllReduce(Case):
    """An all-reduce of the elements of a tensor in symmetric memory."""

    def __init__(self, job, dtype, tensor):
        super().__init__(job)
        self.tensor = tensor
        self.case = {"type": dtype, "size": tensor.numel() * tensor.element_size()}

    def inputs(self, rank):
        """Small integers, whose sums are exact."""
        seed = self.job["seed"] * 1000 + rank
        return small_integers(self.tensor.shape, self.tensor.device, seed, 8).to(self.tensor.dtype)

    def fill(self, check):
        if check is None:
            self.tensor.zero_()
        else:
            self.tensor.copy_(self.inputs(self.rank))

    def launch(self, variant):
        return ALL_REDUCES[variant](self.tensor, "sum", self.group)

    def wrong_elements(self, result):
        expected = sum(self.inputs(rank).float() for rank in range(self.ranks))
        return int((result.float() != expected).sum())


def cold_copies(job, cache, size):
    """The number of copies of B that calls use in turn: together they exceed the L2 cache, as do
    those with which a graph ends and then begins, unless it uses all equally often."""
    least, fill, calls = CACHES * cache // size + 1, cache // size + 1, job["iters"]
    fits = (n for n in range(least, calls + 1) if calls % n == 0 or calls % n >= fill)
    return next(fits, least) if job["graph"] else least


class Product(Case):
    """`A x B^T` in bf16, with B stored row-major, fused with a collective."""

    def __init__(self, job, shape, device, workspace):
        super().__init__(job)
        self.collective, self.shape, self.device = job["product"]["collective"], shape, device
        m, n, k = shape
        gathers = self.collective == "all-gather"
        count = m * k if gathers else m * n
        self.case = {"type": "bf16", "size": 2 * count, "shape": shape}
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        copies = cold_copies(job, cache, 2 * n * k) if job["product"]["cold"] else 1
        rows = m // self.ranks if gathers else m
        self.a = torch.empty(rows, k, dtype=torch.bfloat16, device=device)
        self.b = torch.empty(copies, n, k, dtype=torch.bfloat16, device=device)
        # C of all-reduces is in symmetric memory.
        self.c = workspace[: m * n].view(m, n) if workspace is not None else None
        self.turn = 0

    def factors(self, rank):
        """A and B of a rank: small integers, whose sums are exact. For an all-gather they are the whole
        A, and one B for all ranks."""
        (m, n, k), seed = self.shape, 1000 * self.job["seed"]
        rank = 0 if self.collective == "all-gather" else rank
        a = small_integers((m, k), self.device, seed + 2 * rank, 2)
        return a.bfloat16(), small_integers((n, k), self.device, seed + 2 * rank + 1, 2).bfloat16()

    def fill(self, check):
        if check is None:
            # Random bits: with few distinct values a GPU draws less power.
            self.a.uniform_(-1, 1)
            self.b.uniform_(-1, 1)
            return
        a, b = self.factors(self.rank)
        rows = self.a.shape[0]
        self.a.copy_(a[self.rank * rows :][:rows] if self.collective == "all-gather" else a)
        self.b.copy_(b)

    def launch(self, variant):
        b = self.b[self.turn % len(self.b)].t()
        self.turn += 1
        operations = torch.ops.symm_mem
        if self.collective == "all-gather":
            return operations.fused_all_gather_matmul(
                self.a, [b], 0, self.group, return_A=False
            )[1][0]
        if self.collective == "reduce-scatter":
            return operations.fused_matmul_reduce_scatter(self.a, b, "sum", 0, self.group)
        torch.mm(self.a, b, out=self.c)
        return ALL_REDUCES[variant](self.c.view(-1), "sum", self.group).view(self.c.shape)

    def wrong_elements(self, result):
        """The number of elements that differ from the sum by more than the roundings of each rank's
        product and of each partial sum."""
        total, largest = 0, 0.0
        ranks = 1 if self.collective == "all-gather" else self.ranks
        for rank in range(ranks):
            a, b = self.factors(rank)
            product = a.float() @ b.float().t()
            largest = max(largest, float(product.abs().max()))
            total = total + product
        if self.collective == "reduce-scatter":
            total = total.chunk(self.ranks)[self.rank]
        half_step = torch.finfo(torch.bfloat16).eps / 2
        bound = total.abs() * half_step
        if ranks > 1:
            partial = sum(range(2, ranks + 1)) * largest
            bound = half_step * (ranks * largest + partial) * (1 + half_step) ** ranks
        # A NaN is no smaller than the bound.
        return int((~((result.float() - total).abs() <= bound)).sum())


def leave_out(job, dtype, sizes, why):
    """Says that messages, of f16 if of no type of torch's, have no rows."""
    for variant in job["variants"] if dist.get_rank() == 0 else []:
        for size in sizes:
            row = {"variant": variant, "type": dtype, "size": size, "left_out": why}
            print(json.dumps(row), flush=True)


def all_reduces(job, device, order):
    for dtype, counts in job["counts"].items():
        if dtype not in DTYPES:
            leave_out(job, dtype, [2 * count for count in counts], "torch adds f32 and bf16 here")
            continue
        whole = symm_mem.empty(max(counts), dtype=DTYPES[dtype], device=device)
        symm_mem.rendezvous(whole, dist.group.WORLD.group_name)
        for count in counts:
            size = count * whole.element_size()
            if size % WORD == 0:
                AllReduce(job, dtype, whole[:count]).run(order)
            else:
                leave_out(job, dtype, [size], f"messages have whole words of {WORD} bytes")


def products(job, device, order):
    shapes, workspace = job["product"]["shapes"], None
    if job["product"]["collective"] == "all-reduce":
        most = max(m * n for m, n, _ in shapes)
        workspace = symm_mem.empty(most, dtype=torch.bfloat16, device=device)
        symm_mem.rendezvous(workspace, dist.group.WORLD.group_name)
    for shape in shapes:
        Product(job, shape, device, workspace).run(order)


def main():
    job = json.loads(sys.argv[1])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # gloo reduces the numbers of the hosts; NCCL runs nothing.
    dist.init_process_group("cpu:gloo,cuda:nccl")
    measure = products if "product" in job else all_reduces
    measure(job, device, random.Random(job["seed"]))
    torch.cuda.synchronize()
    dist.destroy_process_group()


with torch.no_grad():
    main()
