"""Expert parallelism on torch's tensors on the CPU, on simulated GPUs."""

import pytest

import devcomm

torch = pytest.importorskip("torch")

N, HIDDEN, TOKENS, EXPERTS, TOP_K = 2, 64, 6, 4, 2
BF16 = torch.bfloat16


def on_ranks(function):
    return devcomm.World.simulated(N).run(function)


def numbers(seed, *shape):
    """Whole numbers from -2 to 2, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(BF16)


def routed(rank, count):
    """Tokens of a rank, the experts of each, of which one has none, and their weights."""
    generator = torch.Generator().manual_seed(rank)
    order = torch.rand(count, EXPERTS, generator=generator).argsort(1)
    ids = order[:, :TOP_K].to(torch.int32).contiguous()
    ids[:1, 0] = -1
    weights = torch.tensor([0.5, 0.25]).expand(count, TOP_K).contiguous()
    return numbers(10 + rank, count, HIDDEN), ids, weights


def right(x, ids, weights, expert, residual=0):
    """The sums of the experts' rows times their weights, by torch in float64."""
    sums = torch.zeros(x.shape, dtype=torch.float64) + residual
    for token, (row, experts, factors) in enumerate(zip(x.double(), ids, weights, strict=True)):
        for e, factor in zip(experts.tolist(), factors.tolist(), strict=True):
            if e >= 0:
                sums[token] += factor * expert(row, e)
    return sums


@pytest.mark.parametrize("rows", [None, N * TOKENS * TOP_K], ids=["low latency", "many tokens"])
def test_tokens_go_to_their_experts_and_the_results_return(rows):
    counts = [5, 0]

    def run(rank):
        x, ids, weights = routed(rank.rank, counts[rank.rank])
        parallel = devcomm.ExpertParallel(
            rank.communicator(), HIDDEN, TOKENS, EXPERTS, TOP_K, rows=rows
        )
        local = parallel.local_experts
        assert (local, parallel.most_rows) == (EXPERTS // N, N * TOKENS * TOP_K)
        here = torch.zeros(parallel.most_rows, HIDDEN, dtype=BF16)
        offsets = torch.zeros(local + 1, dtype=torch.int32)
        sizes = torch.zeros(local, dtype=torch.int32)
        parallel.dispatch(x, ids, weights)
        parallel.group(here, offsets, sizes)
        for e, (first, size) in enumerate(zip(offsets.tolist(), sizes.tolist())):
            here[first : first + size] *= rank.rank * local + e + 1
        output, residual = torch.zeros_like(x), numbers(20 + rank.rank, *x.shape)
        parallel.combine(here, output, residual)
        parallel.check()
        parallel.close()
        return output, sizes.tolist(), residual

    results = on_ranks(run)
    tokens = [routed(r, count) for r, count in enumerate(counts)]
    of_each = [sum((ids == e).sum().item() for _, ids, _ in tokens) for e in range(EXPERTS)]
    assert [size for _, sizes, _ in results for size in sizes] == of_each
    for (x, ids, weights), (output, _, residual) in zip(tokens, results, strict=True):
        wanted = right(x, ids, weights, lambda row, e: row * (e + 1), residual.double())
        assert torch.equal(output, wanted.to(BF16))


ACTIVATIONS = {"silu": torch.nn.functional.silu, None: lambda x: x}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_layer_is_that_of_torch(activation):
    wide = 40
    up, down = numbers(1, EXPERTS, wide, HIDDEN) / 8, numbers(2, EXPERTS, HIDDEN, wide) / 8

    def run(rank):
        comm, local = rank.communicator(), EXPERTS // N
        mine = slice(rank.rank * local, (rank.rank + 1) * local)
        parallel = devcomm.ExpertParallel(comm, HIDDEN, TOKENS, EXPERTS, TOP_K)
        results = []
        for count in (TOKENS, 3):
            x, ids, weights = routed(rank.rank, count)
            output = torch.zeros_like(x)
            parallel.layer(x, ids, weights, up[mine], down[mine], output, x, activation=activation)
            results.append(output)
        # The same by its parts, in the rows of the caller.
        rows, inner = (torch.zeros(parallel.most_rows, n, dtype=BF16) for n in (HIDDEN, wide))
        groups = [torch.zeros(n, dtype=torch.int32) for n in (local + 1, local)]
        parallel.dispatch(x, ids, weights)
        parallel.group(rows, *groups)
        gemm, output = devcomm.GroupedGemm(comm), torch.zeros_like(x)
        gemm(rows, up[mine], inner, *groups, activation=activation)
        gemm(inner, down[mine], rows, *groups)
        parallel.combine(rows, output, x)
        assert torch.equal(output, results[-1])
        parallel.check()
        return results

    def expert(row, e):
        return ACTIVATIONS[activation](row @ up[e].double().T) @ down[e].double().T

    for rank, results in enumerate(on_ranks(run)):
        for output in results:
            x, ids, weights = routed(rank, len(output))
            wanted = right(x, ids, weights, expert, x.double())
            torch.testing.assert_close(output.double(), wanted, rtol=2e-2, atol=5e-2)


def test_tokens_travel_as_8_bit_floats_with_scales():
    hidden = 128

    def run(rank):
        parallel = devcomm.ExpertParallel(rank.communicator(), hidden, 1, N, N, f8=True)
        x = torch.full((1, hidden), 1.5 + 2 * rank.rank, dtype=BF16)
        ids, weights = torch.arange(N, dtype=torch.int32)[None], torch.ones(1, N)
        rows = torch.zeros(N, hidden, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(1, N)
        parallel.dispatch(x, ids, weights)
        with pytest.raises(devcomm.InvalidInput, match="f8"):
            parallel.group(rows)
        parallel.group(rows, scales=scales)
        results = (rows.float() * scales[0, :, None]).to(BF16)
        output = torch.zeros_like(x)
        parallel.combine(results, output)
        assert torch.equal(output, N * x)
        return results[:, 0].tolist()

    assert on_ranks(run) == [[1.5, 3.5]] * N


def test_what_does_not_fit_is_refused():
    def run(rank):
        comm = rank.communicator()
        parallel = devcomm.ExpertParallel(comm, HIDDEN, TOKENS, EXPERTS, TOP_K)
        x, ids, weights = routed(rank.rank, 4)
        rows = torch.zeros(parallel.most_rows, HIDDEN, dtype=BF16)
        refused = [
            ("Int64", lambda: parallel.dispatch(x, ids.long(), weights)),
            ("ids has the shape", lambda: parallel.dispatch(x, ids[:3], weights)),
            ("input has the shape", lambda: parallel.dispatch(x[:, 8:].contiguous(), ids, weights)),
            ("tokens", lambda: parallel.dispatch(*routed(rank.rank, TOKENS + 1))),
            ("dispatch", lambda: parallel.group(rows)),
            ("group", lambda: parallel.combine(rows, torch.zeros_like(x))),
            ("scales", lambda: parallel.group(rows, scales=torch.zeros(1, len(rows)))),
            ("residual", lambda: parallel.combine(rows, torch.zeros_like(x), x[:2])),
            ("tanh", lambda: parallel.layer(x, ids, weights, x, x, x, activation="tanh")),
        ]
        for message, call in refused:
            with pytest.raises(devcomm.InvalidInput, match=message):
                call()
        parallel.dispatch(x, torch.full_like(ids, EXPERTS), weights)
        with pytest.raises(devcomm.InvalidInput, match="do not exist"):
            parallel.check()
        with pytest.raises(devcomm.InvalidInput, match="experts on 2 ranks"):
            devcomm.ExpertParallel(comm, HIDDEN, TOKENS, EXPERTS + 1, TOP_K)

    on_ranks(run)
