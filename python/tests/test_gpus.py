"""devcomm on GPUs, against torch's results. Each GPU is a rank of torchrun's:

    torchrun --nproc-per-node 2 -m pytest -x python/tests/test_gpus.py

DEVCOMM_TEST_KERNELS is the folder with the PTX of devcomm's own kernels, for the test that launches
one by its name; DEVCOMM_GUIDE_KERNELS that of the guide's, for the guide's listing that does.
"""

import ctypes
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

import devcomm

if "TORCHELASTIC_RUN_ID" not in os.environ:
    pytest.skip("only under torchrun, on GPUs", allow_module_level=True)

# Before torch, whose NCCL may be too old for devcomm's kernels.
devcomm.load_nccl()

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

RANK, N = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
SUM = dist.ReduceOp.SUM


@pytest.fixture(scope="module")
def comm():
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", device_id=DEVICE)
    comm = devcomm.Communicator.from_torch()
    yield comm
    comm.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def coll(comm):
    coll = devcomm.Collectives(comm)
    yield coll
    coll.close()


def integers(shape, dtype, below=5, seed=0):
    """Small integers: their sums are exact in every type."""
    generator = torch.Generator(DEVICE).manual_seed(100 * seed + RANK)
    shape = (shape,) if isinstance(shape, int) else shape
    return torch.randint(0, below, shape, generator=generator, device=DEVICE).to(dtype)


def reduced(x, op=SUM):
    x = x.clone()
    dist.all_reduce(x, op=op)
    return x


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8]
SIZES = [1, 1000, 1 << 16, (1 << 20) + 3]


def test_the_communicator_is_torchs(comm):
    assert (comm.rank, comm.n_ranks, comm.device) == (RANK, N, DEVICE.index)
    assert not comm.is_simulated
    comm.barrier()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_an_all_reduce_is_torchs(coll, dtype, size):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        x = integers(size, dtype)
        out = torch.empty_like(x)
        expected = reduced(x, op)
        coll.all_reduce(x, out, op)
        assert torch.equal(out, expected)
        coll.all_reduce(x, op=op)
        assert torch.equal(x, expected)


@pytest.mark.parametrize("size", [1, 1000, 1 << 18])
def test_part_of_a_tensor_that_begins_anywhere_is_reduced(coll, size):
    x = integers(size + 1, torch.float32)[1:]
    expected = reduced(x)
    coll.all_reduce(x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("size", SIZES)
def test_the_other_collectives_are_torchs(coll, size):
    x = integers(size * N, torch.float32)
    part, gathered = torch.empty_like(x[:size]), torch.empty(size * N * N, device=DEVICE)
    swapped, first = torch.empty_like(x), x.clone()
    expected = [torch.empty_like(t) for t in (part, gathered, swapped)]
    dist.reduce_scatter_tensor(expected[0], x)
    dist.all_gather_into_tensor(expected[1], x)
    dist.all_to_all_single(expected[2], x)
    coll.reduce_scatter(x, part)
    coll.all_gather(x, gathered)
    coll.all_to_all(x, swapped)
    assert all(map(torch.equal, (part, gathered, swapped), expected))
    coll.broadcast(first, N - 1)
    dist.broadcast(x, N - 1)
    assert torch.equal(first, x)


@pytest.mark.parametrize("size", [1000, 1 << 22])
def test_a_window_is_a_tensor_by_dlpack(comm, coll, size):
    window = comm.window(size, torch.float32)
    x = torch.from_dlpack(window)
    assert x.shape == (size,) and x.device == DEVICE and not x.any()
    assert x.data_ptr() == window.__cuda_array_interface__["data"][0]
    x.copy_(integers(size, torch.float32))
    expected = reduced(x)
    coll.all_reduce(x)
    assert torch.equal(x, expected)
    host = torch.empty(size)
    window.copy_to(host)
    assert torch.equal(host, expected.cpu())
    # The tensor alone keeps the window.
    del window
    half = x[: size // 2]
    coll.all_reduce(half)
    assert torch.equal(half, reduced(expected[: size // 2]))
    torch.cuda.synchronize()


@pytest.mark.parametrize("last", ["tensor", "window"])
def test_memory_of_a_window_is_freed_after_the_work_of_torch(comm, last):
    window = comm.window(1 << 20, torch.float32)
    x = torch.from_dlpack(window)
    # The driver loads a kernel at its first launch, and may wait for the GPU meanwhile.
    x.fill_(0)
    torch.cuda.synchronize()
    # A stream that devcomm does not know, where a kernel runs for some tenths of a second.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 29)
        x.fill_(7)
    assert not side.query()
    if last == "tensor":
        window.close()
        del window, x
    else:
        del x, window
    assert side.query()
    comm.barrier()


def test_a_tensor_of_a_window_lasts_when_the_window_is_closed(comm):
    window = comm.window(1000, torch.float32)
    x = torch.from_dlpack(window)
    window.close()
    others = [comm.window(1000, torch.float32) for _ in range(4)]
    x.fill_(3)
    assert (x == 3).all() and not any(torch.from_dlpack(other).any() for other in others)


def test_a_tensor_of_a_closed_window_is_reduced_as_any_other(comm, coll):
    window = comm.window(1 << 20, torch.float32)
    x = torch.from_dlpack(window)
    window.close()
    coll.all_reduce(x.fill_(1))
    assert (x == N).all()


class Array:
    """A tensor as an array of another library, which writes it on a stream."""

    def __init__(self, tensor, stream=None):
        interface = {**tensor.__cuda_array_interface__, "version": 3, "stream": stream}
        self.tensor, self.__cuda_array_interface__ = tensor, interface


def test_a_call_waits_for_the_stream_on_which_an_array_is_written(coll):
    side, x = torch.cuda.Stream(), torch.zeros(1000, device=DEVICE)
    out = torch.empty_like(x)
    # The driver loads a kernel at its first launch, and may wait for the GPU meanwhile.
    x.fill_(0)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 28)
        x.fill_(1)
    coll.all_reduce(Array(x, side.cuda_stream), out)
    torch.cuda.synchronize()
    assert (out == N).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs of this process")
def test_an_array_on_another_gpu_is_refused(coll):
    other = torch.ones(4, device=torch.device("cuda", (DEVICE.index + 1) % 2))
    with pytest.raises(devcomm.InvalidInput, match=f"GPU {other.get_device()}.*{DEVICE.index}"):
        coll.all_reduce(Array(other))


def test_what_another_stream_uses_is_kept_until_it_is_done(comm, coll):
    side = torch.cuda.Stream()
    size = 1 << 20
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 28)
    x, out = torch.ones(size, device=DEVICE), torch.empty(size, device=DEVICE)
    torch.cuda.current_stream().synchronize()
    coll.all_reduce(x, out, stream=side)
    del x
    # Torch would give it the memory of x, which has no other owner.
    torch.empty(size, device=DEVICE).fill_(100)
    torch.cuda.current_stream().synchronize()
    side.synchronize()
    assert (out == N).all()


def test_a_new_result_is_made_on_the_stream_of_its_call(comm):
    gemm, side = devcomm.GroupedGemm(comm), torch.cuda.Stream()
    a, b = (torch.ones(s, 64, 64, device=DEVICE).bfloat16().squeeze(0) for s in (1, 2))
    offsets, sizes = (torch.tensor(x, device=DEVICE).int() for x in ([0, 32], [32, 32]))
    for stream in (None, side):
        torch.cuda.synchronize()
        # Zeros of the current stream would come after the products.
        torch.cuda._sleep(1 << 28)
        c = gemm(a, b, None, offsets, sizes, stream=stream)
        torch.cuda.synchronize()
        assert (c == 64).all()
    gemm.close()


def test_what_a_stream_has_done_is_dropped_while_another_one_waits(comm, coll):
    slow, x, window = torch.cuda.Stream(), torch.ones(4, device=DEVICE), comm.window(4, "f32")
    first, second = (Array(torch.ones(4, device=DEVICE)) for _ in range(2))
    window.copy_from(first)
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(1 << 29)
    coll.all_reduce(x, stream=slow)
    window.copy_from(second)
    dropped = weakref.ref(second)
    del second
    assert dropped() is not None
    torch.cuda.current_stream().synchronize()
    window.copy_from(first)
    assert dropped() is None and not slow.query()
    torch.cuda.synchronize()
    comm.barrier()


def test_the_object_of_a_given_stream_lasts_and_is_of_this_gpu(coll):
    class Given:
        def __cuda_stream__(self):
            return 0, handle.value

    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    x = torch.ones(100, device=DEVICE)
    torch.cuda.synchronize()
    assert driver.cuStreamCreate(ctypes.byref(handle), 1) == 0
    given = Given()
    coll.all_reduce(x, stream=given)
    kept = weakref.ref(given)
    del given
    assert kept() is not None
    torch.cuda.synchronize()
    assert (x == N).all()
    if torch.cuda.device_count() > 1:
        other = torch.cuda.Stream(torch.device("cuda", (DEVICE.index + 1) % 2))
        with pytest.raises(devcomm.InvalidInput, match=f"expected a stream of GPU {DEVICE.index}"):
            coll.all_reduce(x, stream=other)


def test_a_program_ends_well_whose_communicator_is_not_closed():
    program = """if True:
        import os
        import devcomm

        devcomm.load_nccl()
        import torch
        import torch.distributed as dist

        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        comm = devcomm.Communicator.from_torch(deadline=2)
        comm.barrier()
    """
    variables = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    for attempt in range(4):
        # The programs of the ranks meet at another port than these processes.
        port = str(int(os.environ["MASTER_PORT"]) + 60 + attempt)
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env=variables | {"MASTER_PORT": port},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr


def test_ctrl_c_ends_the_wait_for_ranks_that_do_not_come():
    program = """if True:
        import os, signal, threading, time
        import devcomm

        sent = None

        def interrupt():
            global sent
            sent = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

        world = devcomm.World.from_env()
        threading.Timer(2, interrupt).start()
        try:
            world.run(lambda rank: None)
        except KeyboardInterrupt:
            assert time.monotonic() - sent < 10
            print("interrupted")
    """
    # Each rank's program is rank 0 of a world of its own, on a port of its own.
    port = str(int(os.environ["MASTER_PORT"]) + 20 + RANK)
    variables = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port, "DEVCOMM_PORT": port}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=variables | alone,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr


def test_debug_names_the_mistakes_of_a_program():
    program = """if True:
        import os
        import devcomm  # with DEVCOMM_DEBUG: loads NCCL and torch
        import torch
        import torch.distributed as dist
        import devcomm.torch

        rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        comm = devcomm.Communicator.from_torch()
        collectives = devcomm.Collectives(comm)
        name = devcomm.torch.register(comm)
        x, side = torch.ones(1000, device=device), torch.cuda.Stream()

        def found(check, call):
            try:
                call()
            except devcomm.CheckError as error:
                assert str(error).startswith(check), error
            else:
                raise AssertionError(check)

        def all_reduce(x):
            torch.ops.devcomm.all_reduce_(x, name)

        for reduce in (collectives.all_reduce, all_reduce):
            reduce(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.fill_(2)
            found("stream_order", lambda: reduce(x))
            torch.cuda.current_stream().wait_stream(side)
            reduce(x)
            # Here torch finds it, after a call of devcomm's.
            with torch.cuda.stream(side):
                try:
                    x.add_(1)
                except torch.cuda._sanitizer.CUDASanitizerErrors:
                    pass
                else:
                    raise AssertionError
            torch.cuda.synchronize()

        if torch.cuda.device_count() > 1:
            other = torch.ones(4, device=torch.device("cuda", (device.index + 1) % 2))
            found("tensor_device", lambda: collectives.all_reduce(other))

        window, source = comm.window(4, "f32"), comm.window(4, "f32")
        for right in (True, False):
            window.put_signal(source, (rank + 1) % n)
            comm.wait_signal((rank - 1) % n)
            if right:
                comm.synchronize()
                torch.cuda._sleep(1 << 28)  # other work
            else:
                torch.cuda._sleep(1 << 28)
                window.put_signal(source, (rank + 1) % n)
                comm.wait_signal((rank - 1) % n)
            comm.barrier()
            torch.cuda.synchronize()
            window.close()
            if right:
                collectives.all_reduce(x)
                window = comm.window(4, "f32")
        found("window_dropped", lambda: collectives.all_reduce(x))
        torch.cuda.synchronize()
        print("found", flush=True)
        os._exit(0)
    """
    # The programs of the ranks meet at another port than these processes.
    port = str(int(os.environ["MASTER_PORT"]) + 40)
    variables = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=variables | {"MASTER_PORT": port, "DEVCOMM_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (0, "found\n"), ended.stderr


def test_calls_follow_torchs_current_stream(coll):
    side = torch.cuda.Stream()
    for _ in range(50):
        x = integers(1 << 18, torch.float32)
        expected = reduced(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
            coll.all_reduce(x)
            x.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        coll.all_reduce(x, op="max")
        assert torch.equal(x, 2 * expected + 1)
    x = torch.ones(100, device=DEVICE)
    torch.cuda.synchronize()
    for stream in (side, side.cuda_stream):
        coll.all_reduce(x, stream=stream)
    torch.cuda.synchronize()
    assert (x == N * N).all()


@pytest.mark.parametrize("size", [1000, 1 << 20, 1 << 23])
@pytest.mark.parametrize("windowed", [False, True])
def test_an_all_reduce_is_captured_by_torch(comm, coll, size, windowed):
    window = comm.window(size, torch.float32) if windowed else None
    x = torch.from_dlpack(window) if windowed else torch.empty(size, device=DEVICE)
    out = torch.zeros(size, device=DEVICE)
    x.fill_(1)
    coll.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.mul_(2)
        coll.all_reduce(x)
        out.copy_(x)
    for seed in range(5):
        y = integers(size, torch.float32, seed=seed)
        expected = reduced(2 * y)
        x.copy_(y)
        graph.replay()
        assert torch.equal(out, expected)
        # Calls between the launches of a graph.
        coll.all_reduce(out)
        assert torch.equal(out, N * expected)
    torch.cuda.synchronize()


def test_a_capture_is_valid_though_work_of_before_may_be_in_flight(coll):
    side, x = torch.cuda.Stream(), torch.ones(1000, device=DEVICE)
    coll.all_reduce(x)
    torch.cuda.synchronize()
    # What this uses is dropped by a later call.
    coll.all_reduce(x.clone(), stream=side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        coll.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    assert (x == N * N).all()


def products(m, n, k, seed=0):
    a, b = (integers(shape, torch.bfloat16, 2, seed) for shape in ((m, k), (n, k)))
    return a, b, reduced((a.float() @ b.float().T)).bfloat16()


SHAPES = [(1, 128, 64), (16, 1024, 128), (200, 384, 64), (1024, 4096, 120)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_with_its_all_reduce_is_torchs(comm, shape):
    m, n, k = shape
    window = comm.window(m * n, torch.bfloat16)
    c = torch.from_dlpack(window).view(m, n)
    gemm = devcomm.GemmAllReduce(comm, m, n)
    assert gemm.explain(m, n, k)
    a, b, expected = products(m, n, k)
    gemm(a, b, c)
    assert torch.equal(c, expected)
    plan = gemm.measure(a, b, c)
    assert gemm.explain(m, n, k) == f"{plan}, as it was measured"
    c.zero_()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        gemm(a, b, window)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(c, expected)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(a, b, c)
        doubled = c + c
    for seed in range(3):
        new_a, new_b, expected = products(m, n, k, seed)
        a.copy_(new_a)
        b.copy_(new_b)
        graph.replay()
        assert torch.equal(doubled, expected + expected)
    torch.cuda.synchronize()
    del graph
    gemm.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_torchs(comm, dtype):
    gemm = devcomm.Gemm(comm)
    for m, n, k in SHAPES:
        a, b = integers((m, k), dtype, 2), integers((n, k), dtype, 2)
        c = torch.empty(m, n, dtype=dtype, device=DEVICE)
        gemm(a, b, c)
        assert torch.equal(c, a @ b.T)
    with pytest.raises(devcomm.InvalidInput, match="expected"):
        gemm(a, b.T.contiguous(), c)
    gemm.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_functions_run_on_the_thread_of_torchs_autograd(comm, compiled):
    import devcomm.torch
    import torch.distributed.nn

    rows, k, columns = 64, 128, 256
    name = devcomm.torch.register(comm)
    ops, threads = torch.ops.devcomm, set()

    def layer(x, up, down):
        return ops.gemm_reduce_scatter(ops.all_gather_gemm(x, up, name), down, name)

    def of_torch(x, up, down):
        every = dist.nn.all_gather(x)
        parts = dist.nn.all_reduce(torch.cat(every) @ up.T @ down.T)
        return parts.chunk(N)[RANK]

    function = torch.compile(layer, fullgraph=True) if compiled else layer
    grads = []
    for of in (function, of_torch):
        shapes = (rows, k), (columns, k), (k, columns)
        mine = [integers(s, torch.bfloat16, 2, i).requires_grad_() for i, s in enumerate(shapes)]
        mine[0].register_hook(lambda grad: threads.add(threading.get_ident()))
        (of(*mine).float() / 1024).sum().backward()
        grads.append([tensor.grad for tensor in mine])
    assert threads and threading.get_ident() not in threads
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)
    devcomm.torch.unregister(name)


def test_a_kernel_of_a_compiled_package_is_launched_by_name(comm):
    folder = os.environ.get("DEVCOMM_TEST_KERNELS")
    if folder is None:
        pytest.skip("DEVCOMM_TEST_KERNELS names no folder")
    kernels = devcomm.KernelSet(comm, os.path.join(folder, "lsa_allreduce.ptx"))
    name, size, blocks = "lsa_allreduce_f32", 10_000, 8
    assert kernels.params(name) == [
        ("comm", "DevComm"),
        ("send", "Window<f32>"),
        ("recv", "Window<f32>"),
        ("count", "usize"),
    ]
    assert name in kernels.names
    dev = comm.dev_comm(lsa_barriers=blocks)
    send, recv = comm.window(size, "f32"), comm.window(size, "f32")
    x, out = torch.from_dlpack(send), torch.from_dlpack(recv)

    def launch(*args, grid=blocks):
        kernels.launch(name, *args, grid=grid, block=256)

    x.copy_(integers(size, torch.float32))
    launch(dev, send, recv, size)
    assert torch.equal(out, reduced(x))

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(dev, send, recv, size)
    x.copy_(integers(size, torch.float32, seed=7))
    graph.replay()
    assert torch.equal(out, reduced(x))
    torch.cuda.synchronize()

    other = comm.window(size, torch.bfloat16)
    for args, message in (
        ((dev, send, recv), r"takes \(.*\), and got 3"),
        ((send, send, recv, size), "comm: DevComm takes a devcomm.DevComm"),
        ((dev, x, recv, size), "send: Window<f32> takes a devcomm.Window"),
        ((dev, other, recv, size), "takes elements of f32, got Bfloat16"),
        ((dev, send, recv, "many"), "count: usize"),
        ((dev, send, recv, -1), "count: usize"),
    ):
        with pytest.raises(devcomm.InvalidInput, match=message):
            launch(*args)
    with pytest.raises(devcomm.LaunchError, match="barriers"):
        launch(dev, send, recv, size, grid=blocks + 1)
    with pytest.raises(devcomm.InvalidInput, match="no kernel no_such"):
        kernels.launch("no_such", grid=1, block=1)
    del graph
    kernels.close()
    dev.close()
    with pytest.raises(devcomm.StateError, match="closed"):
        launch(dev, send, recv, size)


def test_a_slice_of_elements_that_tensors_lack_is_refused(comm, tmp_path):
    folder = os.environ.get("DEVCOMM_TEST_KERNELS")
    if folder is None:
        pytest.skip("DEVCOMM_TEST_KERNELS names no folder")
    for ending in ("ptx", "json"):
        text = Path(folder, f"lsa_allreduce.{ending}").read_text()
        # No launch comes to the kernel, which has a number there.
        (tmp_path / f"lsa_allreduce.{ending}").write_text(text.replace("usize", "&[[f32; 4]]"))
    kernels = devcomm.KernelSet(comm, tmp_path)
    windows = [comm.window(8, "f32") for _ in range(2)]
    args = comm.dev_comm(lsa_barriers=1), *windows, torch.ones(100, device=DEVICE)
    with pytest.raises(devcomm.InvalidInput, match=r"arrays have no elements of \[f32; 4\]"):
        kernels.launch("lsa_allreduce_f32", *args, grid=1, block=256)
    comm.barrier()


def test_tensors_that_do_not_fit_are_refused(coll):
    x = torch.ones(100, device=DEVICE)
    for call, message in (
        (lambda: coll.all_reduce(x, x.double()), "Float64"),
        (lambda: coll.all_reduce(x[::2]), "not contiguous"),
        (lambda: coll.all_reduce(x.short()), "int16"),
        (lambda: coll.all_reduce(x, torch.ones(99, device=DEVICE)), "100.*99"),
        (lambda: coll.all_gather(x, torch.empty(100, device=DEVICE)), "100"),
        (lambda: coll.broadcast(x, N), str(N)),
    ):
        with pytest.raises(devcomm.InvalidInput, match=message):
            call()
    if torch.cuda.device_count() > 1:
        elsewhere = torch.ones(8, device=torch.device("cuda", (DEVICE.index + 1) % 2))
        with pytest.raises(devcomm.InvalidInput, match="tensor_device"):
            coll.all_reduce(elsewhere)
    coll.all_reduce(x)
    assert (x == N).all()


def test_a_tensor_of_the_host_is_copied_there_and_back(coll):
    x = torch.full((1000,), float(RANK + 1))
    coll.all_reduce(x)
    assert (x == N * (N + 1) // 2).all()


CHAPTER = Path(__file__).parents[2] / "docs/guide/src/python.md"


@pytest.mark.parametrize("index", [0, 1])
def test_the_guides_listings_run(comm, index, tmp_path):
    folder = os.environ.get("DEVCOMM_GUIDE_KERNELS")
    if not CHAPTER.is_file() or (index == 1 and folder is None):
        pytest.skip("the guide, or its kernels, are not here")
    found = re.findall(r"^```python\n(# torchrun .*?)^```$", CHAPTER.read_text(), re.M | re.S)
    program = tmp_path / "listing.py"
    program.write_text(found[index])
    # Each rank has a process for the program; these meet at another port than those of the tests.
    port = str(int(os.environ["MASTER_PORT"]) + 10 + index)
    variables = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    command = [sys.executable, program, *([folder] if index == 1 else [])]
    ended = subprocess.run(
        command, env=variables | {"MASTER_PORT": port}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    comm.barrier()


def test_a_world_of_torchruns_processes_beside_torch(comm):
    def run(rank):
        assert (rank.rank, rank.n_ranks) == (RANK, N)
        coll = devcomm.Collectives(rank.communicator())
        x = integers(5000, torch.float32)
        expected = reduced(x)
        coll.all_reduce(x)
        assert torch.equal(x, expected)
        torch.cuda.synchronize()
        return rank.rank, coll

    ((rank, coll),) = devcomm.World.from_env().run(run)
    assert rank == RANK
    with pytest.raises(devcomm.StateError, match="its world has ended"):
        coll.all_reduce(torch.ones(8, device=DEVICE))
