"""Products with communication, and collectives of several tensors, on torch's tensors on the CPU."""

import pytest

import devcomm

torch = pytest.importorskip("torch")

N = 2


def on_ranks(function, n=N):
    return devcomm.World.simulated(n).run(function)


def numbers(seed, *shape, dtype=torch.bfloat16):
    """Whole numbers from -2 to 2, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def product(a, b):
    return (a.float() @ b.float().T).to(torch.bfloat16)


def test_a_product_is_scattered_over_the_ranks():
    m, n, k = 36, 40, 24
    factors = [(numbers(r, m, k), numbers(10 + r, n, k)) for r in range(N)]

    def run(rank):
        gemm = devcomm.GemmReduceScatter(rank.communicator(), m, n)
        c = torch.zeros(m // N, n, dtype=torch.bfloat16)
        for rows in (m, 8):
            a, b = factors[rank.rank]
            gemm(a[:rows], b, c[: rows // N])
        assert "unfused" in gemm.explain(m, n, k)
        small = c[: 8 // N].clone()
        gemm(*factors[rank.rank], c)
        with pytest.raises(devcomm.InvalidInput, match="fit together"):
            gemm(*factors[rank.rank], torch.zeros(m, n, dtype=torch.bfloat16))
        with pytest.raises(devcomm.InvalidInput, match="fit together"):
            gemm(factors[0][0][:7], factors[0][1], c[:3])
        gemm.close()
        return c, small

    right = sum(product(a, b).float() for a, b in factors).to(torch.bfloat16)
    for rank, (c, small) in enumerate(on_ranks(run)):
        assert torch.equal(c, right[rank * m // N :][: m // N])
        assert torch.equal(small, right[rank * 4 :][:4])


def test_rows_are_gathered_for_a_product():
    m, k = 20, 16
    a = [numbers(r, m // N, k) for r in range(N)]
    # Ranks have different numbers of columns.
    b = [numbers(10 + r, 8 * (r + 1), k) for r in range(N)]

    def run(rank):
        gemm = devcomm.AllGatherGemm(rank.communicator(), m, k)
        c = torch.zeros(m, len(b[rank.rank]), dtype=torch.bfloat16)
        gemm(a[rank.rank], b[rank.rank], c)
        assert "unfused" in gemm.explain(m, 8, k)
        with pytest.raises(devcomm.InvalidInput, match="fit together"):
            gemm(a[rank.rank], b[rank.rank], c[: m // N])
        with pytest.raises(devcomm.InvalidInput, match="Float32"):
            gemm(a[rank.rank].float(), b[rank.rank], c)
        return c

    for rank, c in enumerate(on_ranks(run)):
        assert torch.equal(c, product(torch.cat(a), b[rank]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("integers", [torch.int32, torch.uint32])
def test_each_group_of_rows_has_a_factor_of_its_own(dtype, integers):
    m, n, k, groups = 30, 24, 16, 3
    a, b = numbers(1, m, k, dtype=dtype), numbers(2, groups, n, k, dtype=dtype)
    offsets = torch.tensor([20, 0, 5], dtype=torch.int64).to(integers)
    sizes = torch.tensor([10, 0, 7], dtype=torch.int64).to(integers)

    def run(rank):
        gemm = devcomm.GroupedGemm(rank.communicator())
        plain, active = torch.full((m, n), 99, dtype=dtype), torch.zeros(m, n, dtype=dtype)
        gemm(a, b, plain, offsets, sizes)
        gemm(a, b, active, offsets, sizes, activation="silu")
        with pytest.raises(devcomm.InvalidInput, match="gelu"):
            gemm(a, b, plain, offsets, sizes, activation="tanh")
        with pytest.raises(devcomm.InvalidInput, match="3 groups"):
            gemm(a, b[:2], plain, offsets, sizes)
        with pytest.raises(devcomm.InvalidInput, match="offsets for"):
            gemm(a, b, plain, offsets[:2], sizes)
        return plain, active

    ((plain, active),) = on_ranks(run, 1)
    right = torch.full((m, n), 99.0)
    for group, (first, size) in enumerate([(20, 10), (0, 0), (5, 7)]):
        right[first : first + size] = a[first : first + size].float() @ b[group].float().T
    assert torch.equal(plain, right.to(dtype))
    rows = list(range(5, 12)) + list(range(20, 30))
    wanted = torch.nn.functional.silu(right[rows])
    assert torch.allclose(active[rows].float(), wanted, rtol=1e-2, atol=1e-2)
    assert not active[:5].any() and not active[12:20].any()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_all_reduce_is_normalised(in_place):
    tokens, hidden, eps = 3, 64, 1e-5
    inputs = [numbers(r, tokens, hidden) for r in range(N)]
    residual, weight = numbers(20, tokens, hidden), numbers(21, hidden)

    def run(rank):
        x, kept = inputs[rank.rank].clone(), residual.clone()
        out = x if in_place else torch.zeros_like(x)
        coll = devcomm.Collectives(rank.communicator())
        coll.all_reduce_rmsnorm(x, kept, weight, None if in_place else out, eps=eps)
        with pytest.raises(devcomm.InvalidInput, match="scale without output"):
            coll.all_reduce_rmsnorm(x, kept, weight, scale=torch.ones(1))
        with pytest.raises(devcomm.InvalidInput, match="weight"):
            coll.all_reduce_rmsnorm(x, kept, weight.float())
        return out, kept

    total = sum(x.float() for x in inputs) + residual.float()
    wanted = total * torch.rsqrt((total**2).mean(-1, keepdim=True) + eps) * weight.float()
    for out, kept in on_ranks(run):
        assert torch.equal(kept.float(), total)
        assert torch.allclose(out.float(), wanted, rtol=2e-2, atol=2e-2)


def test_a_normalised_sum_is_quantised():
    tokens, hidden = 2, 64
    inputs = [numbers(r, tokens, hidden) for r in range(N)]
    weight, scale = torch.ones(hidden, dtype=torch.bfloat16), torch.tensor([0.25])

    def run(rank):
        kept = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
        out = torch.zeros(tokens, hidden, dtype=torch.float8_e4m3fn)
        coll = devcomm.Collectives(rank.communicator())
        coll.all_reduce_rmsnorm(inputs[rank.rank].clone(), kept, weight, out, scale=scale)
        return out, kept

    for out, kept in on_ranks(run):
        total = kept.float()
        wanted = total * torch.rsqrt((total**2).mean(-1, keepdim=True) + 1e-6) / 0.25
        assert torch.allclose(out.float(), wanted, rtol=0.07, atol=0.02)


def test_ranks_exchange_parts_of_different_lengths():
    # counts[r][s]: what rank r sends to rank s.
    counts = [[3, 5], [0, 2]]

    def run(rank):
        me = rank.rank
        send = 100.0 * me + torch.arange(sum(counts[me]), dtype=torch.float32)
        received = [counts[source][me] for source in range(N)]
        recv = torch.full((sum(received),), -1.0)
        coll = devcomm.Collectives(rank.communicator())
        coll.all_to_all_v(send, counts[me], recv, received)
        with pytest.raises(devcomm.InvalidInput):
            coll.all_to_all_v(send, [len(send) + 1, 0], recv, received)
        return recv.tolist()

    assert on_ranks(run) == [[0, 1, 2], [3, 4, 5, 6, 7, 100, 101]]
