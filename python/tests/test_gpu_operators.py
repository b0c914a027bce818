"""`torch.ops.devcomm.*` on GPUs against f64: called, compiled as one graph, and captured. This file
is started as test_gpus.py is."""

import pytest
from test_gpus import DEVICE, RANK, N, comm, torch  # noqa: F401 -- a fixture
from test_torch_experts import close, mixture, right, rmsnorm

import devcomm
import devcomm.torch

OPS = torch.ops.devcomm
BF16 = torch.bfloat16
HIDDEN, WIDE, TOKENS, TOP_K = 512, 384, 24, 3
EXPERTS = 4 * N
EPS = 1e-5
# How many rows rank r sends to rank s.
COUNTS = [[3 + (r + 2 * s) % 5 for s in range(N)] for r in range(N)]


def numbers(seed, *shape, dtype=BF16, most=1):
    """Whole numbers, whose sums are exact: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).to(DEVICE, dtype)


def of_ranks(seed, *shape, **options):
    """The tensors of all ranks."""
    return [numbers(100 * seed + rank, *shape, **options) for rank in range(N)]


def called(how, function, *arguments):
    """The results of a function that is called, compiled and called, or captured and replayed."""
    if how == "compiled":
        function = torch.compile(function, fullgraph=True)
    results = function(*arguments)
    if how == "captured":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = function(*arguments)
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()
    return results


def exact(tensors):
    return [tensor.double() for tensor in tensors]


def products(a, b):
    return sum(x @ y.T for x, y in zip(exact(a), exact(b), strict=True))


def exchanged(tensors, counts):
    """What each rank receives if rank r sends counts[r] rows of its tensor."""
    parts = [tensor.split(sent) for tensor, sent in zip(tensors, counts, strict=True)]
    return [torch.cat(received) for received in zip(*parts, strict=True)]


HOW = ["called", "compiled", "captured"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_collectives_are_exact(comm, dtype, how):  # noqa: F811
    rows, columns = 48, 200
    name = devcomm.torch.register(comm)
    every = of_ranks(1, rows * N, columns, dtype=dtype)
    uneven = [tensor[: sum(COUNTS[rank])].contiguous() for rank, tensor in enumerate(every)]
    received = [sent[RANK] for sent in COUNTS]

    def collectives(x):
        return {
            "all_reduce": OPS.all_reduce(x, name),
            "maximum": OPS.all_reduce(x, name, op="max"),
            "all_gather": OPS.all_gather(x, name),
            "reduce_scatter": OPS.reduce_scatter(x, name),
            "all_to_all": OPS.all_to_all(x, name),
        }

    wanted = {
        "all_reduce": sum(exact(every)),
        "maximum": torch.stack(exact(every)).amax(0),
        "all_gather": torch.cat(exact(every)),
        "reduce_scatter": sum(exact(every)).chunk(N)[RANK],
        "all_to_all": exchanged(exact(every), [[rows] * N] * N)[RANK],
    }
    results = called(how, collectives, every[RANK])
    if how == "called":
        results["all_to_all_v"] = OPS.all_to_all_v(uneven[RANK], COUNTS[RANK], received, name)
        wanted["all_to_all_v"] = exchanged(exact(uneven), COUNTS)[RANK]
    for operator, result in results.items():
        assert torch.equal(result, wanted[operator].to(dtype)), operator
    devcomm.torch.unregister(name)


@pytest.mark.parametrize("how", HOW)
def test_products_are_exact(comm, how):  # noqa: F811
    m, n, k = 64 * N, 256, 64
    name = devcomm.torch.register(comm)
    a, b, parts = of_ranks(2, m, k), of_ranks(3, n, k), of_ranks(4, m // N, k)

    def fused(a, b, part):
        return {
            "gemm_all_reduce": OPS.gemm_all_reduce(a, b, name),
            "gemm_reduce_scatter": OPS.gemm_reduce_scatter(a, b, name),
            "all_gather_gemm": OPS.all_gather_gemm(part, b, name),
        }

    wanted = {
        "gemm_all_reduce": products(a, b),
        "gemm_reduce_scatter": products(a, b).chunk(N)[RANK],
        "all_gather_gemm": torch.cat(exact(parts)) @ b[RANK].double().T,
    }
    for operator, result in called(how, fused, a[RANK], b[RANK], parts[RANK]).items():
        assert torch.equal(result, wanted[operator].to(BF16)), operator
    devcomm.torch.unregister(name)


def test_products_on_two_streams_keep_their_results(comm):  # noqa: F811
    m, n, k = 1024, 8192, 64
    name = devcomm.torch.register(comm)
    streams = [torch.cuda.Stream() for _ in range(2)]
    factors = [(of_ranks(10 + 2 * i, m, k), of_ranks(11 + 2 * i, n, k)) for i in range(2)]
    wanted = [products(a, b).to(BF16) for a, b in factors]
    OPS.gemm_all_reduce(factors[0][0][RANK], factors[0][1][RANK], name)
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for stream, (a, b) in zip(streams, factors, strict=True):
            with torch.cuda.stream(stream):
                results.append(OPS.gemm_all_reduce(a[RANK], b[RANK], name))
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, wanted))
    devcomm.torch.unregister(name)


@pytest.mark.parametrize("how", HOW)
def test_normalised_sums_are_right(comm, how):  # noqa: F811
    name = devcomm.torch.register(comm)
    every, residual = of_ranks(5, 5, HIDDEN), numbers(6, 5, HIDDEN)
    weight, scale = numbers(7, HIDDEN, most=2), torch.tensor([0.25], device=DEVICE)

    def normalised(x, residual):
        result = OPS.all_reduce_rmsnorm(x, residual, weight, name, EPS)
        x, y, kept = x * 1, x * 1, residual * 1
        in_place = residual * 1
        OPS.all_reduce_rmsnorm_(x, in_place, weight, name, EPS)
        f8 = OPS.all_reduce_rmsnorm_quantised(y, kept, weight, scale, name, EPS)
        return *result, x, in_place, kept, f8

    total = sum(exact(every)) + residual.double()
    norm = rmsnorm(total, weight.double())
    *results, f8 = called(how, normalised, every[RANK], residual)
    for result, wanted in zip(results, (norm, total, norm, total, total), strict=True):
        assert close(result, wanted)
    assert close(f8.float(), norm * 4, 2**-3)
    devcomm.torch.unregister(name)


def routed(rank):
    """Tokens of a rank, the experts of each, of which one has none, and their weights."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    ids[0, 0] = -1
    weights = torch.randint(1, 5, ids.shape, generator=generator) / 4
    x = numbers(50 + rank, TOKENS, HIDDEN, most=2)
    return x, ids.to(DEVICE, torch.int32).contiguous(), weights.to(DEVICE)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_a_layer_of_experts_is_right_and_trained(comm, many, how):  # noqa: F811
    options = {"rows": N * TOKENS * TOP_K} if many else {}
    experts = devcomm.ExpertParallel(comm, HIDDEN, TOKENS, EXPERTS, TOP_K, **options)
    name = devcomm.torch.register(experts)
    here = slice(RANK * (EXPERTS // N), (RANK + 1) * (EXPERTS // N))
    up, down = numbers(8, EXPERTS, WIDE, HIDDEN) / 32, numbers(9, EXPERTS, HIDDEN, WIDE) / 32
    x, ids, weights = routed(RANK)
    mine = up[here].clone(), down[here].clone()

    def of_parts(x, ids, weights, up, down):
        return mixture(x, ids, weights, up, down, name)

    y = called(how, of_parts, x, ids, weights, *mine)
    wanted = right(x.double(), ids, weights.double(), up.double(), down.double())
    assert close(y, wanted)
    if how == "called":
        assert close(OPS.expert_layer(x, ids, weights, *mine, name, x), wanted)
        moving = [tensor.requires_grad_() for tensor in (x, weights, *mine)]
        of_parts(moving[0], ids, *moving[1:]).float().sum().backward()
        given = [[t.double().requires_grad_() for t in (a, c)] for a, _, c in map(routed, range(N))]
        every = [tensor.double().requires_grad_() for tensor in (up, down)]
        steps = zip(given, map(routed, range(N)), strict=True)
        sum(right(a, step[1], c, *every).sum() for (a, c), step in steps).backward()
        grads = *(t.grad for t in given[RANK]), *(t.grad[here] for t in every)
        for tensor, grad in zip(moving, grads, strict=True):
            assert close(tensor.grad, grad, 2**-5)
    experts.check()
    devcomm.torch.unregister(name)
    experts.close()
