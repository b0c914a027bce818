"""`torch.ops.devcomm.*`: torch.library's checks, gradients, torch.compile, on simulated GPUs."""

import pytest

import devcomm

torch = pytest.importorskip("torch")

import devcomm.torch  # noqa: E402
from devcomm import _operators  # noqa: E402

N = 2
OPS = torch.ops.devcomm


def on_ranks(function, n=N):
    """Calls function(rank, name) on every rank."""

    def run(rank):
        name = devcomm.torch.register(rank.communicator())
        result = function(rank, name)
        devcomm.torch.unregister(name)
        return result

    return devcomm.World.simulated(n).run(run)


def numbers(seed, *shape, dtype=torch.float64):
    """Whole numbers from -2 to 2, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype)


# For each operator: the shapes of its tensors on one rank, and a function that computes the results
# of all ranks. It takes, for each of the operator's tensors, the list of all ranks' tensors.
OPERATORS = {
    "all_reduce": ([(3, 4)], lambda x: [sum(x)] * N),
    "all_gather": ([(3, 4)], lambda x: [torch.cat(x)] * N),
    "reduce_scatter": ([(6, 4)], lambda x: sum(x).chunk(N)),
    "all_to_all": ([(6, 4)], lambda x: [torch.cat([y.chunk(N)[r] for y in x]) for r in range(N)]),
    "all_to_all_v": (
        [(5, 4)],
        lambda x: [torch.cat([x[0][:3], x[1][:2]]), torch.cat([x[0][3:], x[1][2:]])],
    ),
    "gemm_all_reduce": ([(6, 8), (5, 8)], lambda a, b: [products(a, b)] * N),
    "gemm_reduce_scatter": ([(6, 8), (5, 8)], lambda a, b: products(a, b).chunk(N)),
    "all_gather_gemm": ([(3, 8), (5, 8)], lambda a, b: [torch.cat(a) @ y.T for y in b]),
}


# COUNTS[r][p] is the number of rows that rank r sends to rank p in all_to_all_v, and also, as the
# table is symmetric, the number that it receives from p.
COUNTS = [[3, 2], [2, 3]]


def arguments(operator, rank, mine):
    """The operator's arguments before the name of its communicator."""
    return (*mine, *[COUNTS[rank.rank]] * (2 if operator == "all_to_all_v" else 0))


def products(a, b):
    return sum(x @ y.T for x, y in zip(a, b, strict=True))


def inputs(operator, dtype=torch.float64):
    """For each of the operator's tensors, the list of all ranks' tensors."""
    shapes = OPERATORS[operator][0]
    return [[numbers(10 * i + r, *s, dtype=dtype) for r in range(N)] for i, s in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_computes_what_its_table_says(operator, dtype):
    tensors = inputs(operator, dtype)

    def run(rank, name):
        mine = [tensor[rank.rank] for tensor in tensors]
        result = getattr(OPS, operator)(*arguments(operator, rank, mine), name)
        out = torch.zeros_like(result)
        # The tensors that an operator reads may have any strides; the one that it writes must be
        # contiguous.
        strided = arguments(operator, rank, [tensor.t().contiguous().t() for tensor in mine])
        assert getattr(OPS, f"{operator}_out")(*strided, out, name) is None
        assert torch.equal(out, result)
        with pytest.raises(devcomm.InvalidInput, match="expected"):
            getattr(OPS, f"{operator}_out")(*strided, out[:, 1:], name)
        return result

    exact = OPERATORS[operator][1](*[[x.double() for x in tensor] for tensor in tensors])
    for result, wanted in zip(on_ranks(run), exact, strict=True):
        assert result.dtype == dtype and torch.equal(result, wanted.to(dtype))


def test_reductions_take_torchs_operators_and_in_place():
    def run(rank, name):
        x = torch.full((4, 3), rank.rank + 1.0)
        results = [OPS.all_reduce(x, name, op=op)[0, 0].item() for op in ("avg", "max", "prod")]
        results.append(OPS.reduce_scatter(x, name, "min")[0, 0].item())
        assert OPS.all_reduce_(x, name) is None
        return [*results, x[0, 0].item()]

    assert on_ranks(run) == [[1.5, 2.0, 2.0, 1.0, 3.0]] * N


@pytest.mark.parametrize("operator", OPERATORS)
def test_torchs_checks_of_an_operator_pass(operator):
    tensors = inputs(operator)

    def run(rank, name):
        mine = [tensor[rank.rank] for tensor in tensors]
        fixed = arguments(operator, rank, mine)
        out = torch.zeros_like(getattr(OPS, operator)(*fixed, name))
        moving = arguments(operator, rank, [tensor.clone().requires_grad_() for tensor in mine])
        torch.library.opcheck(getattr(OPS, operator).default, (*moving, name))
        torch.library.opcheck(getattr(OPS, f"{operator}_out").default, (*fixed, out, name))

    on_ranks(run)


# The gradients that are checked are those of a function from all ranks' tensors to all ranks'
# results: every rank has copies of all tensors, takes its own, calls the operator, and gathers the
# results.
class OfAll(torch.autograd.Function):
    """This rank's part of a tensor that all ranks have, with the gradients of all ranks' parts."""

    @staticmethod
    def forward(ctx, rank, everything):
        ctx.rank = rank
        return everything[rank.rank].clone()

    @staticmethod
    def backward(ctx, grad):
        return None, exchanged(ctx.rank, grad)


class ToAll(torch.autograd.Function):
    """All ranks' tensors, on every rank."""

    @staticmethod
    def forward(ctx, rank, part):
        ctx.rank = rank
        return exchanged(rank, part)

    @staticmethod
    def backward(ctx, grad):
        return None, grad[ctx.rank.rank].clone()


def exchanged(rank, tensor):
    every = rank.all_gather(tensor.detach().contiguous().numpy().tobytes())
    parts = [torch.frombuffer(bytearray(part), dtype=tensor.dtype) for part in every]
    return torch.stack([part.reshape(tensor.shape) for part in parts])


GRADIENTS = [(operator, (), None) for operator in OPERATORS]
GRADIENTS += [("all_reduce", ("avg",), None), ("reduce_scatter", ("avg",), None)]
PRODUCTS = [operator for operator in OPERATORS if "gemm" in operator]
GRADIENTS += [(operator, (), fixed) for operator in PRODUCTS for fixed in (0, 1)]


@pytest.mark.parametrize(("operator", "op", "fixed"), GRADIENTS)
def test_gradients_are_those_of_the_function_of_all_ranks_tensors(operator, op, fixed):
    tensors = [torch.stack(tensor) for tensor in inputs(operator)]

    def run(rank, name):
        def function(*everything):
            mine = [OfAll.apply(rank, tensor) for tensor in everything]
            mine = arguments(operator, rank, mine)
            return ToAll.apply(rank, getattr(OPS, operator)(*mine, name, *op))

        of_all = [tensor.clone().requires_grad_(i != fixed) for i, tensor in enumerate(tensors)]
        return torch.autograd.gradcheck(function, of_all)

    assert all(on_ranks(run))


def test_tensors_that_do_not_fit_are_refused():
    def run(rank, name):
        row, square = torch.ones(3, dtype=torch.bfloat16), torch.ones(4, 4)
        unequal = [1, 3]
        refused = [
            ("0 dimensions", lambda: OPS.all_gather(torch.tensor(1.0), name)),
            ("3 rows for 2 ranks", lambda: OPS.reduce_scatter(row, name)),
            ("3 rows for 2 ranks", lambda: OPS.all_to_all(row, name)),
            ("of one type", lambda: OPS.gemm_all_reduce(square, square.double(), name)),
            ("of one type", lambda: OPS.gemm_all_reduce(square, row, name)),
            ("1 send_counts and 2", lambda: OPS.all_to_all_v(row, [3], [1, 1], name)),
            ("of 2 rows: input has 3", lambda: OPS.all_to_all_v(row, [1, 1], [1, 1], name)),
            ("itself", lambda: OPS.all_to_all_v(square, unequal, unequal[::-1], name)),
            ("xor", lambda: OPS.all_reduce(row, name, "xor")),
            ("not contiguous", lambda: OPS.all_reduce_(square.t()[1:], name)),
        ]
        for message, call in refused:
            with pytest.raises(devcomm.InvalidInput, match=message):
                call()

    on_ranks(run)


@pytest.mark.parametrize("rows", [(4, 6), (0, 0)])
def test_ranks_exchange_different_numbers_of_rows(rows):
    # Rank 0 keeps 1 row and sends the others; rank 1 sends 2 rows and keeps the others.
    first, second = [min(1, rows[0]), max(rows[0] - 1, 0)], [min(2, rows[1]), max(rows[1] - 2, 0)]
    x = [numbers(r, count, 3) for r, count in enumerate(rows)]

    def run(rank, name):
        received = [first[rank.rank], second[rank.rank]]
        part = x[rank.rank].clone().requires_grad_()
        y = OPS.all_to_all_v(part, (first, second)[rank.rank], received, name)
        (y * y).sum().backward()
        return y, part.grad

    (low, of_low), (high, of_high) = on_ranks(run)
    assert torch.equal(low, torch.cat([x[0][: first[0]], x[1][: second[0]]]))
    assert torch.equal(high, torch.cat([x[0][first[0] :], x[1][second[0] :]]))
    assert torch.equal(of_low, 2 * x[0]) and torch.equal(of_high, 2 * x[1])


def test_a_tensor_that_is_not_where_the_gpu_is_is_refused_by_its_name():
    class OnGpu:
        n_ranks, device, is_simulated, is_open = N, 3, False, True

    name, x = "on a GPU", torch.ones(4, 4)
    _operators.groups[name] = _operators.Group(OnGpu())
    try:
        for message, call in [
            ("input is on cpu, expected cuda:3", lambda: OPS.all_reduce(x, name)),
            ("input is on cpu", lambda: OPS.all_reduce_(x, name)),
            ("a is on cpu", lambda: OPS.gemm_all_reduce(x, x, name)),
            ("input is on cpu", lambda: OPS.all_reduce_rmsnorm(x, x, x[0], name)),
        ]:
            with pytest.raises(devcomm.InvalidInput, match=message):
                call()
    finally:
        devcomm.torch.unregister(name)


def test_torch_knows_that_an_operator_has_changed_a_tensor():
    def run(rank, name):
        x = numbers(rank.rank, 4).requires_grad_()
        saved = 2 * x
        loss = (saved * saved).sum()
        OPS.all_reduce_(saved.detach(), name)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with torch.inference_mode():
            OPS.all_reduce_(numbers(rank.rank, 4), name)

    on_ranks(run)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_quantised_sums_have_no_derivative_and_can_be_computed_without(backend):
    def run(rank, name):
        def quantised(x, residual, weight, scale):
            x, residual = x * 1, residual * 1
            y = OPS.all_reduce_rmsnorm_quantised(x, residual, weight, scale, name)
            return y.float() * 2

        x, residual = (torch.ones(2, 16, dtype=torch.bfloat16) for _ in range(2))
        weight, scale = torch.ones(16, dtype=torch.bfloat16, requires_grad=True), torch.ones(1)
        if backend is not None:
            quantised = torch.compile(quantised, fullgraph=True, backend=backend)
        y = quantised(x, residual, weight, scale)
        with pytest.raises(NotImplementedError, match="quantised has no derivative"):
            y.sum().backward()
        return y.tolist()

    assert on_ranks(run) == [[[2.0] * 16] * 2] * N


def test_what_is_written_in_place_has_no_derivative():
    def run(rank, name):
        def refused(tensor, operator):
            with pytest.raises(NotImplementedError, match=f"{operator} has no derivative"):
                tensor.sum().backward()

        x, row = torch.ones(4, 16, requires_grad=True), torch.ones(16)
        y = x * 2
        OPS.all_reduce_(y, name)
        refused(y, "all_reduce_")
        out = torch.zeros(4, 16)
        OPS.all_reduce_out(x, out, name)
        refused(out, "all_reduce_out")
        # The operator writes to views of y and sums, as a model does that passes the rows of all
        # tokens: what has no derivative then is y and sums themselves.
        y, sums = (x * 2).view(2, 32), x * 1
        OPS.all_reduce_rmsnorm_(y.view(4, 16), sums.view(4, 16), row, name)
        refused(y, "rmsnorm_")
        refused(sums, "rmsnorm_")
        with pytest.raises(RuntimeError, match="leaf"):
            OPS.all_reduce_(torch.ones(4, requires_grad=True), name)
        with torch.no_grad():
            OPS.all_reduce_(x, name)
        assert x.grad is None
        x.sum().backward()
        assert torch.equal(x.grad, torch.ones(4, 16))

    on_ranks(run)


def test_a_result_of_another_type_is_refused_and_a_right_one_computed():
    def run(rank, name):
        a, b = (torch.ones(rows, 8, dtype=torch.bfloat16) for rows in (4, 6))
        for dtype in (torch.float32, torch.float16):
            with pytest.raises(devcomm.InvalidInput, match="contiguous, and torch.bfloat16"):
                OPS.gemm_all_reduce_out(a, b, torch.zeros(4, 6, dtype=dtype), name)
        return OPS.gemm_all_reduce(a, b, name).tolist()

    assert on_ranks(run) == [[[8.0 * N] * 6] * 4] * N


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_without_elements_are_empty(dtype):
    def run(rank, name):
        a, b = torch.ones(0, 8, dtype=dtype), torch.ones(0, 8, dtype=dtype)
        some, none = torch.ones(4, 8, dtype=dtype), torch.ones(0, 0, dtype=dtype)
        results = [OPS.gemm_all_reduce(a, b, name), OPS.gemm_reduce_scatter(a, b, name)]
        results += [OPS.gemm_all_reduce(a, some, name), OPS.gemm_reduce_scatter(some, b, name)]
        results += [OPS.all_gather_gemm(a, some, name), OPS.all_gather_gemm(none, none, name)]
        return [tuple(result.shape) for result in results]

    assert on_ranks(run) == [[(0, 0), (0, 0), (0, 4), (2, 0), (0, 4), (0, 0)]] * N


def test_a_maximum_has_no_derivative():
    def run(rank, name):
        x = torch.ones(4, requires_grad=True)
        with pytest.raises(NotImplementedError, match="max"):
            OPS.all_reduce(x, name, "max")
        return OPS.all_reduce(x.detach(), name, "max").tolist()

    assert on_ranks(run) == [[1.0] * 4] * N


def layer(x, up, down, name):
    """Two products of a tensor-parallel layer, of which each rank has a part of the rows of x, and
    after them an all-reduce in place and one that is not."""
    hidden = OPS.all_gather_gemm(x, up, name).relu()
    y = OPS.gemm_reduce_scatter(hidden, down, name) + x
    total = y.float().sum(0)
    OPS.all_reduce_(total, name)
    return y, OPS.all_reduce(y * 2, name, "avg"), total + 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_function_has_one_graph_and_the_same_results(backend):
    m, hidden, wide = 8, 16, 24

    def run(rank, name):
        x = numbers(rank.rank, m // N, hidden, dtype=torch.bfloat16)
        up, down = numbers(7 + rank.rank, wide, hidden), numbers(9 + rank.rank, hidden, wide)
        weights = [weight.to(torch.bfloat16) for weight in (up, down)]
        results = []
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        for function in (layer, compiled, compiled):
            mine = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
            y, mean, total = function(*mine, name)
            (y.float().sum() + mean.float().square().sum()).backward()
            results.append([y, mean, total, *(tensor.grad for tensor in mine)])
        for result in results[1:]:
            torch.testing.assert_close(result, results[0], rtol=2e-2, atol=2e-2)
        return True

    assert all(on_ranks(run))


# `count` is the number of operators, from the first in the list on, that the compiled function
# calls.
@pytest.mark.parametrize(("backend", "count"), [("aot_eager", 4), ("inductor", 1)])
def test_a_rank_that_does_not_use_results_takes_part_in_compiled_operators(backend, count):
    def in_place(x, name):
        x = x * 1
        OPS.all_reduce_(x, name)
        return x

    operators = [
        lambda x, name: OPS.all_reduce(x, name),
        lambda x, name: OPS.all_gather(x, name)[:2] * N,
        lambda x, name: OPS.all_reduce_rmsnorm(x, x * 0, x[0], name)[1],
        in_place,
    ]

    def run(rank, name):
        @torch.compile(fullgraph=True, backend=backend)
        def step(x):
            results = [operator(x, name) for operator in operators[:count]]
            return (x + 1, *results) if rank.rank == 0 else (x + 1,)

        # With gradients the compiler traces a backward function too.
        for needs_grad in (False, True):
            results = step(torch.ones(2, 16, requires_grad=needs_grad))
            assert len(results) == (1 if rank.rank else 1 + count)
            assert all(torch.equal(result, torch.full((2, 16), 2.0)) for result in results)

    on_ranks(run)


def test_the_code_of_operators_is_not_compiled(monkeypatch):
    compiled, convert = [], torch._dynamo.convert_frame.ConvertFrame.__call__

    def spy(self, frame, *args, **options):
        compiled.append(frame.f_code.co_filename)
        return convert(self, frame, *args, **options)

    monkeypatch.setattr(torch._dynamo.convert_frame.ConvertFrame, "__call__", spy)

    def run(rank, name):
        @torch.compile(backend="eager")
        def step(x, a):
            try:
                # After a graph break within a `try` block, torch runs the rest of the block as
                # ordinary Python. There it would compile each function that the block calls.
                torch._dynamo.graph_break()
                y, product = OPS.all_reduce(x, name), OPS.gemm_all_reduce(a, a, name)
                OPS.all_reduce_(y.detach(), name)
                return y.sum() + product.sum()
            finally:
                compiled.append("the end")

        step(torch.ones(4, requires_grad=True), torch.ones(4, 8, dtype=torch.bfloat16)).backward()

    on_ranks(run)
    assert compiled.count("the end") == N and __file__ in compiled
    assert not [file for file in compiled if file.startswith(devcomm.__path__[0])]


def test_a_graph_on_disk_is_not_used_for_another_number_of_ranks():
    def run(rank):
        name = devcomm.torch.register(rank.communicator(), f"rank {rank.rank}")
        x = torch.ones(3, 4)
        y = torch.compile(lambda x: OPS.all_gather(x + 1, name) * 3, fullgraph=True)(x)
        devcomm.torch.unregister(name)
        return y.tolist()

    for ranks in (1, 2):
        # The compiler forgets the graphs that it has in memory, and keeps those on disk: so this
        # tests what another process would find.
        torch._dynamo.reset()
        results = devcomm.World.simulated(ranks).run(run)
        assert results == [[[6.0] * 4] * (3 * ranks)] * ranks


def test_a_name_is_of_one_communicator():
    def run(rank):
        comm, name = rank.communicator(), f"rank {rank.rank}"
        assert devcomm.torch.register(comm, name) == f"{name}/{N}"
        with pytest.raises(devcomm.InvalidInput, match="another communicator"):
            devcomm.torch.register(comm, name)
        with pytest.raises(devcomm.InvalidInput, match="register"):
            OPS.all_reduce(torch.ones(2), "no such name")
        assert comm.is_open

    # The second world uses the names of the first again, whose communicators have ended.
    for _ in range(2):
        devcomm.World.simulated(N).run(run)
    devcomm.torch.unregister(f"rank 0/{N}")
    with pytest.raises(devcomm.InvalidInput, match="rank 0"):
        devcomm.torch.unregister(f"rank 0/{N}")
