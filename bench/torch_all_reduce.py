"""Times the all-reduces of PyTorch's symmetric memory, for `devcomm-bench all-reduce --torch`.

devcomm-bench starts a process for each GPU, with the environment of torchrun and a job as argument
(JSON). Rank 0 prints a line of JSON for each size, type and variant: the time of each round on the
slowest rank, and the number of wrong elements. Both variants load and store; none uses multicast.
"""

import json
import os
import random
import sys

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
OPERATIONS = {
    "torch-one-shot": torch.ops.symm_mem.one_shot_all_reduce,
    "torch-two-shot": torch.ops.symm_mem.two_shot_all_reduce_,
}
# A message consists of whole words of this many bytes.
WORD = 4


def over_ranks(numbers, operation):
    """Reduces numbers over the ranks, and so is a barrier of the hosts."""
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, op=operation)
    return tensor.tolist()


class Case:
    """An all-reduce of the elements of a tensor in symmetric memory."""

    def __init__(self, job, dtype, tensor):
        self.job, self.tensor = job, tensor
        self.case = {"type": dtype, "size": tensor.numel() * tensor.element_size()}
        self.group = dist.group.WORLD.group_name

    def inputs(self, rank):
        """Small integers, whose sums are exact."""
        generator = torch.Generator(device=self.tensor.device)
        generator.manual_seed(self.job["seed"] * 1000 + rank)
        shape, device = self.tensor.shape, self.tensor.device
        numbers = torch.randint(-8, 9, shape, generator=generator, device=device)
        return numbers.to(self.tensor.dtype)

    def launch(self, variant):
        return OPERATIONS[variant](self.tensor, "sum", self.group)

    def wrong(self, variant):
        """The number of wrong elements over all ranks and checks, None without checks."""
        wrong = 0
        for _ in range(self.job["check"]):
            self.tensor.copy_(self.inputs(dist.get_rank()))
            torch.cuda.synchronize()
            over_ranks([0], dist.ReduceOp.SUM)
            result = self.launch(variant)
            expected = sum(self.inputs(rank).float() for rank in range(dist.get_world_size()))
            wrong += int((result.float() != expected).sum())
            over_ranks([0], dist.ReduceOp.SUM)
        return int(over_ranks([wrong], dist.ReduceOp.SUM)[0]) if self.job["check"] else None

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
        self.tensor.zero_()
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

    def run(self, order):
        variants = self.job["variants"]
        wrong = {variant: self.wrong(variant) for variant in variants}
        for variant, times in self.rounds(variants, order).items():
            row = {"variant": variant, **self.case, "times_us": times, "wrong": wrong[variant]}
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)


def main():
    job = json.loads(sys.argv[1])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # Numbers of the hosts are reduced by gloo; nothing is left to NCCL.
    dist.init_process_group("cpu:gloo,cuda:nccl")
    order = random.Random(job["seed"])
    for dtype, counts in job["counts"].items():
        if dtype not in DTYPES:
            continue
        whole = symm_mem.empty(max(counts), dtype=DTYPES[dtype], device=device)
        symm_mem.rendezvous(whole, dist.group.WORLD.group_name)
        for count in counts:
            if count * whole.element_size() % WORD == 0:
                Case(job, dtype, whole[:count]).run(order)
    torch.cuda.synchronize()
    dist.destroy_process_group()


with torch.no_grad():
    main()
