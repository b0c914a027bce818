"""Products with communication, collectives of several tensors, on torch's tensors on the CPU."""

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


def test_windows_of_signed_numbers_are_offsets_and_sizes():
    m, n, k = 8, 16, 24
    a, b = numbers(1, m, k), numbers(2, 1, n, k)

    def run(rank):
        comm = rank.communicator()
        offsets, sizes = (comm.window(1, dtype) for dtype in ("int32", "uint32"))
        offsets.copy_from(torch.tensor([2], dtype=torch.int32))
        sizes.copy_from(torch.tensor([5], dtype=torch.int32).view(torch.uint32))
        return devcomm.GroupedGemm(comm)(a, b, None, offsets, sizes)

    right = torch.zeros(m, n, dtype=torch.bfloat16)
    right[2:7] = product(a[2:7], b[0])
    assert torch.equal(*on_ranks(run, 1), right)


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [False, True], ids=["c of the type", "c of float32"])
def test_a_product_has_a_bias_an_activation_and_a_residual(dtype, wide):
    m, n, k = 12, 40, 24
    a, b = numbers(1, m, k, dtype=dtype) / 4, numbers(2, n, k, dtype=dtype) / 4
    of_c = torch.float32 if wide else dtype
    bias, residual = numbers(3, n, dtype=of_c), numbers(4, m, n, dtype=of_c)

    def run(rank):
        gemm = devcomm.Gemm(rank.communicator())
        new = gemm(a, b)
        assert new.dtype == dtype and torch.equal(new, (a.double() @ b.double().T).to(dtype))
        c = torch.zeros(m, n, dtype=of_c)
        assert gemm(a, b, c, bias=bias, activation="gelu", residual=residual) is c
        # The residual may be c, and a and b transposed.
        added = residual.clone()
        turned = {"transposed_a": True, "transposed_b": True}
        gemm(a.t().contiguous(), b.t().contiguous(), added, residual=added, **turned)
        return c, added

    ((c, added),) = on_ranks(run, 1)
    product = a.double() @ b.double().T
    right = gelu(product + bias.double()) + residual.double()
    tolerance = {"rtol": 2**-8, "atol": 2e-3} if not wide else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(c.double(), right, **tolerance)
    assert torch.equal(added, (product + residual.double()).to(of_c))


def test_gathered_rows_are_multiplied_with_a_bias_an_activation_and_a_residual():
    m, n, k = 12, 24, 16
    a = [numbers(r, m // N, k) / 4 for r in range(N)]
    b, bias, residual = numbers(10, n, k) / 4, numbers(11, n), numbers(12, m, n)

    def run(rank):
        gemm = devcomm.AllGatherGemm(rank.communicator(), m, k)
        added = gemm(a[rank.rank], b, bias=bias, activation="silu", residual=residual)
        return gemm(a[rank.rank], b), added

    product = torch.cat(a).double() @ b.double().T
    right = torch.nn.functional.silu(product + bias.double()) + residual.double()
    for plain, added in on_ranks(run):
        assert torch.equal(plain, product.to(torch.bfloat16))
        torch.testing.assert_close(added.double(), right, rtol=2**-8, atol=2e-3)


@pytest.mark.parametrize(("wire", "error"), [(None, 2**-7), ("f32", 2**-8), ("e4m3", 2**-3)])
def test_sums_are_as_exact_as_the_type_in_which_parts_are_sent(wire, error):  # None: bf16
    m, n, k = 16, 64, 32
    a, b = [numbers(r, m, k) for r in range(N)], [numbers(10 + r, n, k) for r in range(N)]

    def run(rank):
        comm = rank.communicator()
        window = comm.window(m * n, torch.bfloat16)
        assert devcomm.GemmAllReduce(comm, m, n, wire=wire)(
            a[rank.rank], b[rank.rank], window
        ) is window
        c = torch.zeros(m, n, dtype=torch.bfloat16)
        window.copy_to(c)
        return c

    products = [x.double() @ y.double().T for x, y in zip(a, b, strict=True)]
    most = sum(product.abs() for product in products)
    for c in on_ranks(run):
        assert ((c.double() - sum(products)).abs() <= error * most + 2**-6).all()


def test_results_are_new_tensors_where_none_is_given():
    m, n, k = 8, 24, 16
    a, b = numbers(1, m, k), numbers(2, n, k)
    groups = [torch.tensor(x, dtype=torch.int32) for x in ([2, 4], [2, 3])]

    def run(rank):
        comm = rank.communicator()
        part = devcomm.GemmReduceScatter(comm, m, n)(a, b)
        grouped = devcomm.GroupedGemm(comm)(a, torch.stack([b, -b]), None, *groups)
        return part, grouped

    for rank, (part, grouped) in enumerate(on_ranks(run)):
        assert torch.equal(part, (N * product(a, b))[rank * m // N :][: m // N])
        right = torch.zeros(m, n, dtype=torch.bfloat16)
        right[2:4], right[4:7] = product(a[2:4], b), -product(a[4:7], b)
        assert torch.equal(grouped, right)


F8 = torch.float8_e4m3fn


@pytest.mark.parametrize("f8", [F8, torch.float8_e5m2])
def test_a_product_of_8_bit_floats_has_scales(f8):
    m, n, k = 16, 144, 160
    a, b = numbers(1, m, k, dtype=f8), numbers(2, n, k, dtype=f8)
    scales = torch.tensor([0.5]), torch.tensor(0.25)
    blocks = numbers(3, 2, m, dtype=torch.float32), numbers(4, 2, 2, dtype=torch.float32)

    def run(rank):
        gemm = devcomm.Gemm(rank.communicator())
        wide = gemm(a, b, torch.zeros(m, n), scales=scales)
        return gemm(a, b), gemm(a, b, scales=scales), wide, gemm(a, b, block_scales=blocks)

    ((plain, scaled, wide, by_block),) = on_ranks(run, 1)
    product = a.double() @ b.double().T
    # Sums of few bits are exact.
    assert plain.dtype == torch.bfloat16 and torch.equal(plain, product.bfloat16())
    assert torch.equal(scaled, (product / 8).bfloat16())
    assert torch.equal(wide, (product / 8).float())
    of_a = blocks[0].double().repeat_interleave(128, 0)[:k].T
    of_b = blocks[1].double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    right = (a.double() * of_a) @ (b.double() * of_b).T
    assert torch.equal(by_block, right.bfloat16())


def test_what_does_not_fit_a_product_is_refused_by_its_name():
    a, b, c = numbers(1, 8, 16), numbers(2, 24, 16), numbers(3, 8, 24)
    one = torch.ones(1)

    def run(rank):
        comm = rank.communicator()
        gemm, gathered = devcomm.Gemm(comm), devcomm.AllGatherGemm(comm, 8, 16)
        reduced = devcomm.GemmAllReduce(comm, 8, 24)
        a8, b8 = a.to(F8), b.to(F8)
        turned, wrong_bias = a8.t().contiguous(), a[:, 0].clone()
        refused = [
            ("b has elements of Float16", lambda: gemm(a, b.half(), c)),
            (r"bias has the shape \[8\], expected \[24\]", lambda: gemm(a, b, c, bias=wrong_bias)),
            ("bias has elements of Float32", lambda: gemm(a, b, c, bias=torch.ones(24))),
            ("residual has the shape", lambda: gemm(a, b, c, residual=c[:4])),
            ("tanh", lambda: gemm(a, b, c, activation="tanh")),
            ("fit together.*transposed_a", lambda: gemm(a, b, c, transposed_a=True)),
            ("a product of Float32", lambda: gemm(a.float(), b.float())),
            ("scales of Bfloat16", lambda: gemm(a, b, c, scales=(one, one))),
            ("transposed factors of Float8e4m3", lambda: gemm(turned, b8, c, transposed_a=True)),
            ("multiple of 16", lambda: gemm(*[x[:, :8].contiguous() for x in (a8, b8)])),
            (r"scales\[1\] has the shape", lambda: gemm(a8, b8, scales=(one, torch.ones(2)))),
            (r"block_scales\[0\].*\[1, 8\]", lambda: gemm(a8, b8, block_scales=(one, one))),
            ("only one", lambda: gemm(a8, b8, scales=(one, one), block_scales=(one, one))),
            (
                "block_scales with c",
                lambda: gemm(a8, b8, c.float(), block_scales=(torch.ones(1, 8), torch.ones(1, 1))),
            ),
            ("tensor of torch", lambda: gemm(a.float().numpy(), b.float().numpy())),
            ("residual has the shape", lambda: gathered(a[:4], b, residual=c[:4])),
            ("fp8", lambda: devcomm.GemmAllReduce(comm, 8, 24, wire="fp8")),
            ("c is left out", lambda: reduced(a, b)),
        ]
        for message, call in refused:
            with pytest.raises(devcomm.InvalidInput, match=message):
                call()
        with pytest.raises(TypeError, match="bias"):
            reduced(a, b, c, bias=c[0])

    on_ranks(run)


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
