"""Which objects are arrays: memory is read and written only where one of them has it."""

import numpy as np
import pytest

import devcomm


def on_ranks(function, n=1):
    return devcomm.World.simulated(n).run(function)


class Cuda:
    """An array on a GPU, as its interface describes it."""

    def __init__(self, shape, address=4096, typestr="<f4", **rest):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
            **rest,
        }


@pytest.mark.parametrize("scalar", [np.float32(1), np.int64(2), np.float64(3), np.uint8(4)])
def test_a_scalar_of_numpy_is_no_array(scalar):
    # Its interface describes memory that is free again when the interface is there.
    def run(rank):
        comm = rank.communicator()
        coll, out = devcomm.Collectives(comm), np.zeros(1, scalar.dtype)
        window = comm.window(1, scalar.dtype)
        for call in (
            lambda: coll.all_reduce(scalar),
            lambda: coll.all_reduce(scalar, out),
            lambda: coll.all_reduce(out, scalar),
            lambda: window.copy_from(scalar),
            lambda: window.copy_to(scalar),
        ):
            with pytest.raises(TypeError, match=r"scalar.*cannot receive.*np\.array\(x\)"):
                call()
        coll.all_reduce(np.array(scalar), out)
        return out[0]

    assert on_ranks(run, 2) == [2 * scalar] * 2


@pytest.mark.parametrize("size", [1, 5000])
def test_the_memory_of_an_interface_of_a_temporary_array_is_not_written(size):
    victims = []

    class Temporary:
        @property
        def __array_interface__(self):
            interface = np.ones(size, np.float32).__array_interface__
            victims.extend(np.full(size, 100, np.float32) for _ in range(10))
            return interface

    def run(rank):
        with pytest.raises(TypeError, match=r"numpy\.asarray"):
            devcomm.Collectives(rank.communicator()).all_reduce(Temporary())

    on_ranks(run, 2)
    assert all((victim == 100).all() for victim in victims)


def test_a_subclass_of_ndarray_does_not_say_where_its_memory_is():
    other = np.full(4, 7, np.float32)

    class Elsewhere(np.ndarray):
        @property
        def __array_interface__(self):
            return other.__array_interface__

    def run(rank):
        x = np.ones(4, np.float32).view(Elsewhere)
        devcomm.Collectives(rank.communicator()).all_reduce(x)
        assert (np.asarray(x.view(np.ndarray)) == 2).all() and (other == 7).all()

    on_ranks(run, 2)


def test_a_masked_array_is_refused_since_its_masked_elements_would_count():
    def run(rank):
        x = np.ma.masked_array(np.ones(4, np.float32), [0, 1, 0, 0])
        coll, out = devcomm.Collectives(rank.communicator()), np.zeros(4, np.float32)
        for call in (lambda: coll.all_reduce(x), lambda: coll.all_reduce(x, out)):
            with pytest.raises(devcomm.InvalidInput, match="masked.*filled"):
                call()
        with pytest.raises(devcomm.InvalidInput, match="mask"):
            coll.all_reduce(Cuda((4,), mask=x))

    on_ranks(run)


def test_an_array_at_an_odd_address_says_which_alignment_it_needs():
    def run(rank):
        x = np.frombuffer(bytearray(41), np.uint8)[1:].view(np.float32)
        with pytest.raises(devcomm.InvalidInput, match="send.*Float32.*multiple of 4.*copy"):
            devcomm.Collectives(rank.communicator()).all_reduce(x, np.zeros(10, np.float32))

    on_ranks(run)


@pytest.mark.parametrize(
    ("shape", "address"),
    [
        ((2**32, 2**32), 4096),
        ((2**62,), 4096),
        ((2**63,), 4096),
        ((2**64, 0), 4096),
        ((2**31, 2**31, 2), 4096),
        ((2**61,), 2**64 - 4096),
        ((2048,), 2**64 - 4096),
        ((-1,), 4096),
        ((-2, -2), 4096),
        ((2**70,), 4096),
        ((4,), 0),
    ],
)
def test_a_shape_or_address_that_no_array_has_is_refused(shape, address):
    def run(rank):
        comm = rank.communicator()
        coll, x = devcomm.Collectives(comm), np.zeros(4, np.float32)
        for call in (
            lambda: coll.all_reduce(Cuda(shape, address)),
            lambda: coll.all_reduce(Cuda(shape, address, strides=(4,) * len(shape))),
            lambda: coll.all_reduce(x, Cuda(shape, address)),
            lambda: comm.window(4, "f32").copy_from(Cuda(shape, address)),
        ):
            with pytest.raises(devcomm.InvalidInput, match="shape|address|NULL"):
                call()

    on_ranks(run)


@pytest.mark.parametrize(
    ("stream", "message"), [(0, "either default stream"), (2, "another stream on each thread")]
)
def test_an_array_on_a_gpu_is_not_written_on_a_stream_that_is_not_one(stream, message):
    def run(rank):
        coll = devcomm.Collectives(rank.communicator())
        with pytest.raises(devcomm.InvalidInput, match=message):
            coll.all_reduce(Cuda((4,), stream=stream))
        with pytest.raises(devcomm.InvalidInput, match="simulated world"):
            coll.all_reduce(Cuda((4,), stream=1))

    on_ranks(run)


def test_an_array_on_a_gpu_that_is_read_only_is_not_written():
    def run(rank):
        coll, array = devcomm.Collectives(rank.communicator()), Cuda((4,))
        array.__cuda_array_interface__["data"] = (4096, True)
        with pytest.raises(devcomm.InvalidInput, match="read-only"):
            coll.all_reduce(array)

    on_ranks(run)


@pytest.mark.parametrize("shape", [(0, 2**62), (2**62, 0, 2**62), (0,)])
def test_an_array_without_elements_has_no_shape_that_is_too_large(shape):
    def run(rank):
        with pytest.raises(devcomm.InvalidInput, match="simulated world"):
            devcomm.Collectives(rank.communicator()).all_reduce(Cuda(shape, 0))

    on_ranks(run)


def test_the_extents_of_a_product_do_not_overflow():
    def run(rank):
        gemm = devcomm.Gemm(rank.communicator())
        a = np.zeros((2**32, 0), np.float16)
        with pytest.raises(devcomm.InvalidInput, match="expected"):
            gemm(a, a, np.zeros(4, np.float16))

    on_ranks(run)


@pytest.mark.parametrize("length", [2**61, 2**62, 2**63 - 1, 2**64 - 1])
def test_a_window_of_too_many_elements_is_refused(length):
    def run(rank):
        with pytest.raises(devcomm.InvalidInput, match="elements"):
            rank.communicator().window(length, "f64")

    on_ranks(run)


@pytest.mark.parametrize("name", ["__cuda_array_interface__", "__dlpack__"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError, MemoryError])
def test_an_exception_of_a_property_is_the_calls(name, error):
    class Array:
        def __getattr__(self, attribute):
            raise error("of the property") if attribute == name else AttributeError(attribute)

    def run(rank):
        coll = devcomm.Collectives(rank.communicator())
        with pytest.raises(error):
            coll.all_reduce(Array())

    on_ranks(run)


def test_an_exception_of_a_type_or_operator_is_the_calls():
    class Interrupts:
        def __getattr__(self, attribute):
            raise KeyboardInterrupt

        def __str__(self):
            raise KeyboardInterrupt

    def run(rank):
        comm = rank.communicator()
        with pytest.raises(KeyboardInterrupt):
            comm.window(4, Interrupts())
        with pytest.raises(KeyboardInterrupt):
            devcomm.Collectives(comm).all_reduce(np.zeros(4, np.float32), op=Interrupts())

    on_ranks(run)


def test_an_array_lasts_as_long_as_the_call_that_uses_it():
    def run(rank):
        coll, out = devcomm.Collectives(rank.communicator()), np.zeros(1000, np.float32)
        for _ in range(3):
            # Nothing but the call has the array.
            coll.all_reduce(np.ones(1000, np.float32), out)
            assert (out == 2).all()

    on_ranks(run, 2)
