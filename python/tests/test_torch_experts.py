"""`torch.ops.devcomm.*` for layers of experts and normalised sums, on simulated GPUs."""

import pytest

import devcomm

torch = pytest.importorskip("torch")

import devcomm.torch  # noqa: E402

N, HIDDEN, WIDE, TOKENS, EXPERTS, TOP_K = 2, 32, 24, 6, 4, 2
LOCAL = EXPERTS // N
BF16 = torch.bfloat16
OPS = torch.ops.devcomm
MANY = {"rows": N * TOKENS * TOP_K}


def on_ranks(function, **options):
    """Calls function(rank, name) on every rank, with the name of an object for experts."""

    def run(rank):
        sizes = HIDDEN, TOKENS, EXPERTS, TOP_K
        experts = devcomm.ExpertParallel(rank.communicator(), *sizes, **options)
        name = devcomm.torch.register(experts)
        result = function(rank, name)
        experts.check()
        devcomm.torch.unregister(name)
        return result

    return devcomm.World.simulated(N).run(run)


def numbers(seed, *shape, dtype=BF16):
    """Whole numbers from -2 to 2."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


def routed(rank, count):
    """Tokens of a rank, the experts of each, of which one has none, and their weights."""
    generator = torch.Generator().manual_seed(rank)
    order = torch.rand(count, EXPERTS, generator=generator).argsort(1)
    ids = order[:, :TOP_K].to(torch.int32).contiguous()
    ids[:1, 0] = -1
    weights = torch.randint(1, 5, ids.shape, generator=generator) / 4
    return numbers(10 + rank, count, HIDDEN), ids, weights


UP, DOWN = numbers(1, EXPERTS, WIDE, HIDDEN) / 8, numbers(2, EXPERTS, HIDDEN, WIDE) / 8
COUNTS = [5, 3]


def mine(rank, matrices):
    return matrices[rank.rank * LOCAL :][:LOCAL].clone()


def mixture(x, ids, weights, up, down, name):
    """A layer of experts, by its parts."""
    rows, offsets, sizes = OPS.expert_dispatch(x, ids, weights, name)
    groups = offsets, sizes
    inner = torch.nn.functional.silu(OPS.grouped_gemm(rows, up, *groups, name))
    return OPS.expert_combine(OPS.grouped_gemm(inner, down, *groups, name), ids, weights, name, x)


def right(x, ids, weights, up, down):
    """The same with all experts here, in the tensors' type."""
    out = [row.clone() for row in x]
    for token, experts in enumerate(ids.tolist()):
        for k, e in enumerate(experts):
            if e >= 0:
                inner = torch.nn.functional.silu(x[token] @ up[e].T)
                out[token] = out[token] + weights[token, k] * (inner @ down[e].T)
    return torch.stack(out)


def close(found, wanted, error=2**-6):
    """Whether tensors differ by little, compared with the largest number."""
    difference = (found.double() - wanted.double()).abs().max()
    return difference <= error * wanted.double().abs().max()


@pytest.mark.parametrize(
    ("options", "backend"), [({}, None), (MANY, None), ({}, "aot_eager"), ({}, "inductor")]
)
def test_a_layer_of_experts_is_trained(options, backend):
    def run(rank, name):
        x, ids, weights = routed(rank.rank, COUNTS[rank.rank])
        tensors = x, weights, mine(rank, UP), mine(rank, DOWN)
        x, weights, up, down = (tensor.requires_grad_() for tensor in tensors)
        step = mixture
        if backend is not None:
            step = torch.compile(mixture, fullgraph=True, backend=backend)
        # A second step, and its backward functions, are between those of the first.
        y = step(x, ids, weights, up, down, name)
        z = step(y, ids, weights, up, down, name)
        (z.float() * (1 + rank.rank)).sum().backward()
        layer = OPS.expert_layer(x.detach(), ids, weights, up, down, name, x.detach())
        return y, layer, z, *(tensor.grad for tensor in (x, weights, up, down))

    results = on_ranks(run, **options)
    all_tokens = [routed(r, count) for r, count in enumerate(COUNTS)]
    exact = lambda tensor: tensor.double().requires_grad_()  # noqa: E731
    of_ranks = [(exact(x), ids, exact(weights)) for x, ids, weights in all_tokens]
    up, down = exact(UP), exact(DOWN)
    loss = 0
    for rank, (x, ids, weights) in enumerate(of_ranks):
        y = right(x, ids, weights, up, down)
        z = right(y, ids, weights, up, down)
        loss = loss + (1 + rank) * z.sum()
        for found, wanted in zip(results[rank][:3], (y, y, z), strict=True):
            assert close(found, wanted)
    loss.backward()
    for rank, (x, _, weights) in enumerate(of_ranks):
        wanted = x.grad, weights.grad, *(m.grad[rank * LOCAL :][:LOCAL] for m in (up, down))
        for found, wanted in zip(results[rank][3:], wanted, strict=True):
            assert found.shape == wanted.shape and close(found, wanted, 2**-5)


@pytest.mark.parametrize("options", [{}, MANY, {"alignment": 4}], ids=["few", "many", "aligned"])
def test_rows_are_dispatched_and_combined_exactly(options):
    def run(rank, name):
        x, ids, weights = routed(rank.rank, COUNTS[rank.rank])
        x.requires_grad_(), weights.requires_grad_()
        here, offsets, sizes = OPS.expert_dispatch(x, ids, weights, name)
        assert len(here) >= N * TOKENS * TOP_K and not here[offsets[-1] :].any()
        out = OPS.expert_combine(here, ids, weights, name)
        out.float().sum().backward()
        return out, x.grad, weights.grad

    for rank, (out, of_x, of_weights) in enumerate(on_ranks(run, **options)):
        x, ids, weights = routed(rank, COUNTS[rank])
        used = torch.where(ids >= 0, weights, 0)
        assert torch.equal(out, (x.double() * used.sum(1, keepdim=True)).to(BF16))
        assert torch.equal(of_x, used.sum(1, keepdim=True).expand(x.shape).to(BF16))
        assert torch.equal(of_weights, torch.where(ids >= 0, x.float().sum(1)[:, None], 0))


def test_torchs_checks_of_the_operators_pass():
    def run(rank, name):
        x, ids, weights = routed(rank.rank, COUNTS[rank.rank])
        up, down = mine(rank, UP), mine(rank, DOWN)
        here, offsets, sizes = OPS.expert_dispatch(x, ids, weights, name)
        check, moving = torch.library.opcheck, lambda x: x.clone().requires_grad_()
        check(OPS.expert_dispatch.default, (moving(x), ids, weights, name))
        OPS.expert_dispatch(x, ids, weights, name)
        check(OPS.expert_combine.default, (moving(here), ids, moving(weights), name, moving(x)))
        check(OPS.expert_layer.default, (x, ids, weights, up, down, name))
        check(OPS.grouped_gemm.default, (moving(here), moving(up), offsets, sizes, name))
        out = torch.zeros(len(here), WIDE, dtype=BF16)
        check(OPS.grouped_gemm_out.default, (here, up, offsets, sizes, out, name, "gelu"))

    on_ranks(run)


def test_tokens_are_dispatched_in_8_bit_floats():
    hidden = 256

    def run(rank, _):
        own = devcomm.ExpertParallel(rank.communicator(), hidden, TOKENS, EXPERTS, TOP_K, f8=True)
        name = devcomm.torch.register(own)
        _, ids, weights = routed(rank.rank, COUNTS[rank.rank])
        x = (torch.arange(len(ids) * hidden).reshape(-1, hidden) % 97 - 48).to(BF16)
        arguments = x, ids, weights, name
        torch.library.opcheck(OPS.expert_dispatch_f8.default, arguments)
        step = torch.compile(
            lambda *a: OPS.expert_dispatch_f8(*a), fullgraph=True, backend="aot_eager"
        )
        for dispatch in (OPS.expert_dispatch_f8, step):
            rows, scales, offsets, sizes = dispatch(*arguments)
            assert rows.dtype == torch.float8_e4m3fn and scales.shape == (2, own.most_rows)
            assert not rows.float()[offsets[-1] :].any() and sizes.sum() == offsets[-1]
            here = (rows.float() * scales.t().repeat_interleave(128, 1)).to(BF16)
            out = OPS.expert_combine(here.requires_grad_(), ids, weights, name)
            wanted = x.float() * torch.where(ids >= 0, weights, 0).sum(1, keepdim=True)
            # A number of 8 bits has a fraction of three.
            assert torch.allclose(out.float(), wanted, rtol=2**-4 + 2**-7, atol=0.1)
            with pytest.raises(devcomm.InvalidInput, match="without a derivative"):
                out.float().sum().backward()

    on_ranks(run)


def test_what_does_not_fit_experts_is_refused():
    def run(rank, name):
        x, ids, weights = routed(rank.rank, 4)
        plain = devcomm.torch.register(rank.communicator())
        up = mine(rank, UP)
        here, *groups = OPS.expert_dispatch(x, ids, weights, name)
        f8 = devcomm.ExpertParallel(rank.communicator(), 128, TOKENS, EXPERTS, TOP_K, f8=True)
        in_f8 = devcomm.torch.register(f8)
        refused = [
            ("expert_dispatch_f8, without", lambda: OPS.expert_dispatch(x, ids, weights, in_f8)),
            ("f8=False", lambda: OPS.expert_dispatch_f8(x, ids, weights, name)),
            ("no ExpertParallel", lambda: OPS.expert_dispatch(x, ids, weights, plain)),
            ("register", lambda: OPS.expert_layer(x, ids, weights, up, up, "no such name")),
            ("Float32, expected", lambda: OPS.expert_dispatch(x.float(), ids, weights, name)),
            ("Int64, expected", lambda: OPS.expert_dispatch(x, ids.long(), weights, name)),
            ("weights has the shape", lambda: OPS.expert_dispatch(x, ids, weights[:2], name)),
            ("last step is of 4", lambda: OPS.expert_combine(here, ids[:2], weights, name)),
            ("rows has the shape", lambda: OPS.expert_combine(here[:, 8:], ids, weights, name)),
            ("up has the shape", lambda: OPS.expert_layer(x, ids, weights, up[:1], up, name)),
            ("groups, n, k", lambda: OPS.grouped_gemm(here, up[0], *groups, name)),
            ("of one type", lambda: OPS.grouped_gemm(here, up.half(), *groups, name)),
            ("Float32", lambda: OPS.grouped_gemm(here.float(), up.float(), *groups, name)),
            ("offsets has elements", lambda: OPS.grouped_gemm(here, up, here, groups[1], name)),
        ]
        for message, call in refused:
            with pytest.raises(devcomm.InvalidInput, match=message):
                call()
        here.requires_grad_()
        with pytest.raises(NotImplementedError, match="activation='gelu'"):
            OPS.grouped_gemm(here, up, *groups, name, "gelu")
        y = OPS.expert_layer(x.requires_grad_(), ids, weights, up, mine(rank, DOWN), name)
        with pytest.raises(NotImplementedError, match="expert_layer has no derivative"):
            y.float().sum().backward()
        # A step's backward functions end it.
        rows, *_ = OPS.expert_dispatch(x, ids, weights, name)
        rows.float().sum().backward()
        with pytest.raises(devcomm.InvalidInput, match="has ended"):
            OPS.expert_combine(rows, ids, weights, name)

    on_ranks(run)


EPS = 1e-5


def rmsnorm(total, weight):
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight


def of_rank(rank, dtype):
    residual, weight = numbers(21, 3, HIDDEN, dtype=dtype), numbers(22, HIDDEN, dtype=dtype)
    return numbers(rank, 3, HIDDEN, dtype=dtype), residual, weight


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_normalised_sum_has_a_derivative(dtype, backend):
    def layer(x, residual, weight, name):
        y, total = OPS.all_reduce_rmsnorm(x * 2, residual, weight, name, EPS)
        return y * 3, total

    def run(rank, name):
        given = [tensor.requires_grad_() for tensor in of_rank(rank.rank, dtype)]
        step = layer
        if backend is not None:
            step = torch.compile(layer, fullgraph=True, backend=backend)
        y, total = step(*given, name)
        (y.float().square().sum() * (1 + rank.rank) + total.float().sum()).backward()
        return y, total, *(tensor.grad for tensor in given)

    results, error = on_ranks(run), 2**-6 if dtype == BF16 else 1e-5
    inputs = [[t.double().requires_grad_() for t in of_rank(r, dtype)] for r in range(N)]
    loss = 0
    for rank, (_, residual, weight) in enumerate(inputs):
        total = sum(2 * x for x, _, _ in inputs) + residual
        y = 3 * rmsnorm(total, weight)
        loss = loss + y.square().sum() * (1 + rank) + total.sum()
        assert close(results[rank][0], y, error) and close(results[rank][1], total, error)
    loss.backward()
    for rank, given in enumerate(inputs):
        for found, tensor in zip(results[rank][2:], given, strict=True):
            assert found.dtype == dtype and close(found, tensor.grad, 2 * error)


def test_a_normalised_sum_is_in_place_and_quantised():
    def decode(x, residual, weight, scale, name):
        x, residual = x * 1, residual * 1
        OPS.all_reduce_rmsnorm_(x, residual, weight, name, EPS)
        again = x * 1
        f8 = OPS.all_reduce_rmsnorm_quantised(again, residual, weight, scale, name, EPS)
        return x, f8, residual

    def run(rank, name):
        given = *of_rank(rank.rank, BF16), torch.tensor([0.25]), name
        plain = decode(*given)
        compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")(*given)
        for one, other in zip(plain, compiled, strict=True):
            assert torch.equal(one.float(), other.float())
        x, residual, weight = of_rank(rank.rank, BF16)
        check = torch.library.opcheck
        moving = [tensor.clone().requires_grad_() for tensor in (x, residual, weight)]
        check(OPS.all_reduce_rmsnorm.default, (*moving, name))
        check(OPS.all_reduce_rmsnorm_.default, (x.clone(), residual.clone(), weight, name))
        scaled = (x.clone(), residual.clone(), weight, torch.tensor([0.25]), name)
        check(OPS.all_reduce_rmsnorm_quantised.default, scaled)
        refused = [
            ("residual of", lambda: OPS.all_reduce_rmsnorm(x, residual[:2], weight, name)),
            ("weight of", lambda: OPS.all_reduce_rmsnorm_(x, residual, weight[:8], name)),
            ("Float64", lambda: OPS.all_reduce_rmsnorm(*(t.double() for t in moving), name)),
            ("weight has elements", lambda: OPS.all_reduce_rmsnorm(x, x, weight.float(), name)),
            ("scale has elements", lambda: OPS.all_reduce_rmsnorm_quantised(*scaled[:3], x, name)),
            ("not contiguous", lambda: OPS.all_reduce_rmsnorm_(x.t(), x.t(), x[:, 0], name)),
        ]
        for message, call in refused:
            with pytest.raises(devcomm.InvalidInput, match=message):
                call()
        return plain

    total = sum(of_rank(r, BF16)[0] for r in range(N)).double() + of_rank(0, BF16)[1]
    weight = of_rank(0, BF16)[2].double()
    for x, f8, residual in on_ranks(run):
        assert close(x, rmsnorm(total, weight)) and f8.dtype == torch.float8_e4m3fn
        second = residual.double()
        assert close(residual, N * rmsnorm(total, weight) + total)
        assert close(f8, rmsnorm(second, weight) / 0.25, 2**-4)
