"""devcomm on simulated GPUs, with arrays of numpy and torch's tensors on the CPU."""

import threading

import numpy as np
import pytest

import devcomm

N = 4


def on_ranks(function, n=N, settings=""):
    return devcomm.World.simulated(n, settings).run(function)


def collectives(rank):
    return devcomm.Collectives(rank.communicator())


def inputs(rank, shape, dtype):
    return np.random.default_rng(rank).integers(0, 10, shape).astype(dtype)


def test_a_world_says_what_it_is():
    world = devcomm.World.simulated(3)
    assert (world.n_ranks, world.is_simulated) == (3, True)
    assert repr(world) == "World(3 simulated ranks)"

    def describe(rank, *rest):
        comm = rank.communicator()
        assert (comm.rank, comm.n_ranks, comm.device) == (rank.rank, 3, rank.device)
        assert len(rank.hosts) == 3 and rank.is_simulated and comm.is_simulated
        return rank.rank, rank.local_rank, rest

    assert world.run(describe, "x", 1) == [(r, r, ("x", 1)) for r in range(3)]


def test_the_environment_says_how_many_gpus_are_simulated(monkeypatch):
    monkeypatch.setenv("DEVCOMM_SIMULATE", "3,team=1")
    world = devcomm.World.from_env()
    assert (world.n_ranks, world.is_simulated) == (3, True)
    assert world.run(lambda rank: rank.n_ranks) == [3] * 3


def test_bytes_of_all_ranks_are_gathered_in_order():
    assert on_ranks(lambda rank: rank.all_gather(bytes([rank.rank] * rank.rank))) == [
        [bytes([r] * r) for r in range(N)]
    ] * N


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int32", "uint8", "int64"])
def test_an_all_reduce_is_numpys(dtype):
    shapes = [1, 1000, (17, 31)]
    operators = {"sum": np.sum, "max": np.max, "min": np.min}

    def reduce(rank):
        coll, results = collectives(rank), []
        for shape in shapes:
            for op in operators:
                x = inputs(rank.rank, shape, dtype)
                out = np.zeros_like(x)
                coll.all_reduce(x, out, op)
                assert np.array_equal(x, inputs(rank.rank, shape, dtype))
                coll.all_reduce(x, op=op)
                assert np.array_equal(x, out)
                results.append(out)
        return results

    all_inputs = [np.stack([inputs(r, shape, dtype) for r in range(N)]) for shape in shapes]
    expected = [f(xs, axis=0).astype(dtype) for xs in all_inputs for f in operators.values()]
    for results in on_ranks(reduce):
        assert all(map(np.array_equal, results, expected))


@pytest.mark.parametrize("count", [1, 300])
def test_the_other_collectives_are_numpys(count):
    def run(rank):
        coll, x = collectives(rank), inputs(rank.rank, count * N, np.float32)
        gathered = np.zeros(count * N * N, np.float32)
        part = np.zeros(count, np.float32)
        swapped = np.zeros(count * N, np.float32)
        coll.all_gather(x, gathered)
        coll.reduce_scatter(x, part, "sum")
        coll.all_to_all(x, swapped)
        coll.broadcast(x, 2)
        return gathered, part, swapped, x

    xs = np.stack([inputs(r, count * N, np.float32) for r in range(N)])
    parts = xs.reshape(N, N, count)
    for r, (gathered, part, swapped, x) in enumerate(on_ranks(run)):
        assert np.array_equal(gathered, xs.reshape(-1))
        assert np.array_equal(part, parts.sum(axis=0)[r])
        assert np.array_equal(swapped, parts[:, r].reshape(-1))
        assert np.array_equal(x, xs[2])


def test_windows_are_copied_and_reduced():
    def run(rank):
        comm = rank.communicator()
        window = comm.window(500, np.float32)
        assert (len(window), window.dtype, window.shape) == (500, "float32", (500,))
        zeros = np.ones(500, np.float32)
        window.copy_to(zeros)
        assert not zeros.any()
        window.copy_from(np.arange(500, dtype=np.float32) + rank.rank)
        coll = devcomm.Collectives(comm)
        coll.all_reduce(window)
        sums = np.zeros(500, np.float32)
        window.copy_to(sums)
        coll.all_reduce(np.full(500, 2, np.float32), window)
        twos = np.zeros(500, np.float32)
        window.copy_to(twos)
        assert (twos == 2 * N).all()
        return sums

    for sums in on_ranks(run):
        assert np.array_equal(sums, N * np.arange(500) + sum(range(N)))


def test_simulated_memory_is_not_handed_to_other_libraries():
    def run(rank):
        window = rank.communicator().window(4, "f32")
        with pytest.raises(BufferError, match="copy_to"):
            window.__dlpack__()
        assert not hasattr(window, "__cuda_array_interface__")

    on_ranks(run, 1)


def test_an_exception_of_a_rank_is_the_worlds_and_the_others_do_not_hang():
    def run(rank):
        if rank.rank == 2:
            raise KeyError("rank 2 fails")
        rank.barrier()

    with pytest.raises(KeyError, match="rank 2 fails"):
        on_ranks(run)


def test_the_others_learn_why_a_rank_is_lost():
    seen = []

    def run(rank):
        if rank.rank == 1:
            raise RuntimeError("of my own")
        try:
            rank.barrier()
        except devcomm.WorldError as error:
            seen.append(str(error))
            raise

    with pytest.raises(RuntimeError, match="of my own"):
        on_ranks(run)
    assert len(seen) == N - 1
    assert all("rank 1 is lost" in text and "of my own" in text for text in seen), seen


def test_a_wait_for_a_rank_that_has_ended_is_an_error():
    def run(rank):
        if rank.rank == 0:
            rank.barrier()

    with pytest.raises(devcomm.Error):
        on_ranks(run, 2)


def test_a_world_within_a_rank_is_refused():
    def run(rank):
        with pytest.raises(devcomm.InvalidInput, match=f"within.*here rank {rank.rank};"):
            on_ranks(lambda inner: inner.barrier(), 2)
        rank.barrier()
        return rank.rank

    assert on_ranks(run, 2) == [0, 1]


def test_a_world_within_a_rank_of_the_environments_world_is_refused(monkeypatch):
    monkeypatch.setenv("DEVCOMM_SIMULATE", "2")

    def run(rank):
        with pytest.raises(devcomm.InvalidInput, match="within the function of a world's rank"):
            devcomm.World.from_env().run(lambda inner: inner.barrier())
        rank.barrier()

    devcomm.World.from_env().run(run)


def test_what_outlives_its_world_refuses_every_use():
    kept = []

    def run(rank):
        comm = rank.communicator()
        kept.append((rank, comm, comm.window(8, "f32"), devcomm.Collectives(comm)))

    on_ranks(run, 1)
    rank, comm, window, coll = kept.pop()
    for use in (
        rank.barrier,
        comm.barrier,
        lambda: window.copy_from(np.zeros(8, np.float32)),
        lambda: coll.all_reduce(np.zeros(8, np.float32)),
    ):
        with pytest.raises(devcomm.Error, match="made by another thread"):
            use()


def test_what_is_closed_is_an_error_that_says_so():
    def run(rank):
        comm = rank.communicator()
        window, coll = comm.window(8, "f32"), devcomm.Collectives(comm)
        coll.close()
        coll.close()
        with pytest.raises(devcomm.StateError, match="closed"):
            coll.all_reduce(np.zeros(8, np.float32))
        window.close()
        with pytest.raises(devcomm.StateError, match="closed"):
            window.copy_to(np.zeros(8, np.float32))
        comm.close()
        with pytest.raises(devcomm.StateError, match="closed"):
            comm.barrier()

    on_ranks(run, 2)


def test_objects_stay_on_their_thread():
    def run(rank):
        comm, errors = rank.communicator(), []

        def elsewhere():
            try:
                comm.barrier()
            except devcomm.InvalidInput as error:
                errors.append(str(error))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return errors

    (errors,) = on_ranks(run, 1)
    assert len(errors) == 1 and "another thread" in errors[0]


def test_a_device_communicator_has_the_resources_that_were_asked_for():
    def run(rank):
        comm = rank.communicator()
        plain = comm.dev_comm(lsa_barriers=1)
        assert (plain.ll_a2a, plain.buffer) == (None, None)
        both = comm.dev_comm(lsa_barriers=1, ll_a2a=(4, 64, 16), buffer=(1000, 256))
        sessions, slots = np.frombuffer(both.ll_a2a, np.uint32).tolist()
        # 64 elements of 16 bytes, which are two slots.
        assert slots == 128 and sessions != both.buffer
        with pytest.raises(devcomm.Error, match="align"):
            comm.dev_comm(buffer=(1000, 3))
        both.close()
        return both.buffer

    first, *others = on_ranks(run, 2)
    assert others == [first]


BAD = {
    "another dtype": (lambda c, x: c.all_reduce(x, x.astype(np.float64)), "Float64.*Float32"),
    "a dtype that NCCL lacks": (lambda c, x: c.all_reduce(x.astype(np.int16)), "i2"),
    "booleans": (lambda c, x: c.all_reduce(x > 0), "b1"),
    "a big-endian dtype": (lambda c, x: c.all_reduce(x.astype(">f4")), ">f4"),
    "every other element": (lambda c, x: c.all_reduce(x[::2]), "not contiguous"),
    "a transposed matrix": (lambda c, x: c.all_reduce(x.reshape(4, 25).T), "not contiguous"),
    "another length": (lambda c, x: c.all_reduce(x, x[:50].copy()), "100.*50"),
    "a wrong gather": (lambda c, x: c.all_gather(x, x.copy()), "100"),
    "parts that do not divide": (lambda c, x: c.all_to_all(x[:99], x[:99].copy()), "99"),
    "an unknown operator": (lambda c, x: c.all_reduce(x, op="xor"), "xor"),
    "no such root": (lambda c, x: c.broadcast(x, 7), "7"),
    "a stream for each thread": (lambda c, x: c.all_reduce(x, stream=2), "on each thread"),
    "a stream of another library": (lambda c, x: c.all_reduce(x, stream=7), "no such stream"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_what_is_wrong(name):
    call, message = BAD[name]

    def run(rank):
        coll, x = collectives(rank), np.ones(100, np.float32)
        with pytest.raises(devcomm.InvalidInput, match=message):
            call(coll, x)
        assert (x == 1).all()
        coll.all_reduce(x)
        return x

    for x in on_ranks(run, 2):
        assert (x == 2).all()


def test_what_is_no_array_is_a_type_error():
    def run(rank):
        for wrong in ([1.0, 2.0], 3, None, "text"):
            with pytest.raises(TypeError):
                collectives(rank).all_gather(wrong, wrong)

    on_ranks(run, 1)


def test_a_read_only_array_is_read_and_not_written():
    def run(rank):
        x, out = np.ones(10, np.float32), np.zeros(10, np.float32)
        x.setflags(write=False)
        coll = collectives(rank)
        coll.all_reduce(x, out)
        with pytest.raises(devcomm.InvalidInput, match="read-only"):
            coll.all_reduce(x)
        return out

    assert all((out == 2).all() for out in on_ranks(run, 2))


def test_a_read_only_array_is_broadcast_by_the_root():
    def run(rank):
        x = np.full(100, rank.rank, dtype=np.float32)
        x.setflags(write=rank.rank != 1)
        collectives(rank).broadcast(x, 1)
        return x

    assert all((x == 1).all() for x in on_ranks(run, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: devcomm.World.simulated(0), "0 ranks"),
        (lambda: devcomm.World.simulated(2, "speed=3"), "speed"),
        (lambda: devcomm.World.simulated(2, "seed=x"), "seed"),
    ],
)
def test_a_world_that_cannot_be_is_refused(make, message):
    with pytest.raises(devcomm.InvalidInput, match=message):
        make()


def test_a_world_of_gpus_without_gpus_says_what_is_missing():
    try:
        devcomm.World.threads(2)
    except devcomm.DriverError as error:
        assert "libcuda" in str(error) or "GPU" in str(error)
    except devcomm.NcclError as error:
        assert "NCCL" in str(error)


def test_a_window_of_an_unknown_type_or_length_is_refused():
    def run(rank):
        comm = rank.communicator()
        with pytest.raises(devcomm.InvalidInput, match="complex64"):
            comm.window(8, np.complex64)
        with pytest.raises(devcomm.InvalidInput, match="0 elements"):
            comm.window(0, np.float32)
        with pytest.raises(OverflowError):
            comm.window(-1, np.float32)
        window = comm.window(8, np.float32)
        with pytest.raises(devcomm.InvalidInput, match="9 elements for a window of 8"):
            window.copy_from(np.zeros(9, np.float32))
        with pytest.raises(devcomm.InvalidInput, match="Float64"):
            window.copy_from(np.zeros(8))
        with pytest.raises(devcomm.InvalidInput, match="gin_connection"):
            comm.dev_comm(gin_connection="some")

    on_ranks(run, 2)


def test_garbage_of_one_rank_may_be_collected_by_another():
    def run(rank):
        import gc

        for _ in range(3):
            coll = collectives(rank)
            cycle = [coll]
            cycle.append(cycle)
            x = np.ones(10, np.float32)
            coll.all_reduce(x)
            del coll, cycle
            gc.collect()
            assert (x == N).all()

    on_ranks(run)


def test_other_threads_of_python_go_on_while_ranks_wait():
    ends, counted = threading.Event(), [0]

    def count():
        while not ends.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:

        def run(rank):
            coll, x = collectives(rank), np.ones(1000, np.float32)
            for _ in range(5):
                coll.all_reduce(x)
                rank.barrier()
            return x[0]

        assert on_ranks(run) == [float(N**5)] * N
    finally:
        ends.set()
        thread.join()
    assert counted[0] > 0


def test_a_product_is_numpys():
    def run(rank):
        gemm = devcomm.Gemm(rank.communicator())
        for m, n, k in ((1, 1, 1), (17, 40, 24), (64, 8, 128)):
            a, b = inputs(0, (m, k), np.float16) % 2, inputs(1, (n, k), np.float16) % 2
            c = np.zeros((m, n), np.float16)
            gemm(a, b, c)
            assert np.array_equal(c, a @ b.T)
        for a, b, c in (
            ((4, 8), (4, 16), (4, 4)),
            ((4, 8), (4, 8), (4, 5)),
            ((32,), (4, 8), (4, 4)),
        ):
            with pytest.raises(devcomm.InvalidInput, match="expected"):
                gemm(*(np.zeros(shape, np.float16) for shape in (a, b, c)))
        with pytest.raises(devcomm.InvalidInput, match="Float32"):
            gemm(*[np.zeros((8, 8), np.float32)] * 3)

    on_ranks(run, 1)


def test_compiled_kernels_are_refused_on_simulated_gpus_by_name(tmp_path):
    (tmp_path / "sums.ptx").write_text(".version 8.6")

    def run(rank):
        for path in (tmp_path, str(tmp_path / "sums.ptx")):
            with pytest.raises(devcomm.DriverError, match=r"sums\.ptx.*simulated"):
                devcomm.KernelSet(rank.communicator(), path)
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(devcomm.InvalidInput, match="no .ptx"):
            devcomm.KernelSet(rank.communicator(), tmp_path / "empty")

    on_ranks(run, 1)


def test_another_librarys_communicator_needs_a_gpu():
    with pytest.raises(devcomm.Error):
        devcomm.Communicator.from_nccl(0, 0)
    with pytest.raises(devcomm.InvalidInput, match="deadline"):
        devcomm.Communicator.from_nccl(0, 0, deadline=-1.0)
