"""Torch's tensors on the CPU, in simulated worlds."""

import pytest

import devcomm

torch = pytest.importorskip("torch")


def on_ranks(function, n=2):
    return devcomm.World.simulated(n).run(function)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8]
)
def test_a_tensor_of_each_type_is_reduced(dtype):
    def run(rank):
        x = torch.arange(60).to(dtype).reshape(3, 20)
        out = torch.zeros_like(x)
        coll = devcomm.Collectives(rank.communicator())
        coll.all_reduce(x, out)
        coll.all_reduce(x, op=torch.distributed.ReduceOp.MAX)
        return x, out

    whole = torch.arange(60).reshape(3, 20)
    for x, out in on_ranks(run):
        assert torch.equal(out, (2 * whole).to(dtype)) and torch.equal(x, whole.to(dtype))


def test_windows_take_torchs_types_and_tensors():
    def run(rank):
        window = rank.communicator().window(10, torch.bfloat16)
        assert window.dtype == "bfloat16"
        window.copy_from(torch.full((10,), 1.5, dtype=torch.bfloat16))
        out = torch.zeros(10, dtype=torch.bfloat16)
        window.copy_to(out)
        return out

    assert all((out == 1.5).all() for out in on_ranks(run))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(4, 6).T, "not contiguous"),
        (lambda: torch.ones(4, dtype=torch.int16), "int16"),
        (lambda: torch.ones(4, dtype=torch.bool), "bool"),
        (lambda: torch.ones(4, dtype=torch.complex64), "complex64"),
        (lambda: torch.ones(4, device="meta"), "meta"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(make, message):
    def run(rank):
        with pytest.raises(devcomm.InvalidInput, match=message):
            devcomm.Collectives(rank.communicator()).all_reduce(make())

    on_ranks(run)


@pytest.mark.parametrize("left", [0, 1, 39])
def test_a_tensor_whose_storage_was_resized_is_refused(left):
    # As frameworks do to free the memory of parameters that are elsewhere.
    def run(rank):
        x, out = torch.ones(10), torch.zeros(10)
        x.untyped_storage().resize_(left)
        coll = devcomm.Collectives(rank.communicator())
        for call in (lambda: coll.all_reduce(x), lambda: coll.all_reduce(x, out)):
            with pytest.raises(devcomm.InvalidInput, match="NULL|storage"):
                call()
        x.untyped_storage().resize_(40)
        part = x.fill_(1)[3:]
        coll.all_reduce(part)
        return x

    expected = torch.cat([torch.ones(3), torch.full((7,), 2.0)])
    assert all(torch.equal(x, expected) for x in on_ranks(run))


def test_a_tensor_without_elements_needs_no_storage():
    def run(rank):
        devcomm.Collectives(rank.communicator()).all_reduce(torch.ones(0, 3))

    on_ranks(run)


def test_without_a_process_group_there_is_no_communicator_of_torch():
    with pytest.raises(ValueError, match="init_process_group"):
        devcomm.Communicator.from_torch()


def test_a_measurement_chooses_the_plan_of_a_shape():
    m, n, k = 1, 9, 8

    def run(rank):
        comm = rank.communicator()
        gemm = devcomm.GemmAllReduce(comm, m, n)
        a, b = (torch.ones(rows, k, dtype=torch.bfloat16) for rows in (m, n))
        c = comm.window(m * n, torch.bfloat16)
        plan = gemm.measure(a, b, c)
        assert gemm.explain(m, n, k) == f"{plan}, as it was measured"
        with pytest.raises(devcomm.InvalidInput, match="Bfloat16"):
            gemm.measure(a.float(), b, c)
        gemm(a, b, c)
        out = torch.zeros(m, n, dtype=torch.bfloat16)
        c.copy_to(out)
        return plan, out

    (plan, out), (other, _) = on_ranks(run)
    assert plan == other
    assert torch.equal(out, torch.full((m, n), 2 * k, dtype=torch.bfloat16))


def test_a_product_with_its_all_reduce_is_torchs():
    m, n, k = 20, 64, 48

    def operands(rank):
        generator = torch.Generator().manual_seed(rank)
        shapes = (m, k), (n, k)
        return [torch.randint(0, 2, s, generator=generator).to(torch.bfloat16) for s in shapes]

    def run(rank):
        comm = rank.communicator()
        gemm = devcomm.GemmAllReduce(comm, m, n)
        c = comm.window(m * n, torch.bfloat16)
        gemm(*operands(rank.rank), c)
        out = torch.zeros(m, n, dtype=torch.bfloat16)
        c.copy_to(out)
        assert gemm.explain(m, n, k)
        a, b = operands(rank.rank)
        with pytest.raises(devcomm.InvalidInput, match="no window"):
            gemm(a, b, out)
        with pytest.raises(devcomm.InvalidInput, match="Bfloat16"):
            gemm(a.float(), b, c)
        with pytest.raises(devcomm.InvalidInput, match="expected"):
            gemm(a, b[:, 8:].contiguous(), c)
        return out

    expected = sum(a.float() @ b.float().T for a, b in map(operands, range(2)))
    for out in on_ranks(run):
        assert torch.equal(out, expected.to(torch.bfloat16))


def test_a_negated_view_is_refused():
    def run(rank):
        coll, x = devcomm.Collectives(rank.communicator()), torch.ones(4)
        with pytest.raises(devcomm.InvalidInput, match="resolve_neg"):
            coll.all_reduce(torch._neg_view(x))
        coll.all_reduce(torch._neg_view(x).resolve_neg(), x)
        return x.tolist()

    assert on_ranks(run) == [[-2.0] * 4] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_dropped_objects_are_freed_is_raised(monkeypatch):
    def ctrl_c():
        raise KeyboardInterrupt

    def run(rank):
        comm = rank.communicator()
        window = comm.window(4, "f32")
        with monkeypatch.context() as patch:
            # Where a handler of a signal may be called.
            patch.setattr(torch.cuda, "is_initialized", ctrl_c)
            del window
            with pytest.raises(KeyboardInterrupt):
                comm.barrier()
        comm.barrier()

    on_ranks(run, 1)
