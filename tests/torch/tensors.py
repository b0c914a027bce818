"""Exchanges PyTorch's tensors with the shared library whose path is the argument, and checks them."""

import ctypes
import gc
import sys

import torch

N = min(2, torch.cuda.device_count())
LENGTH = 1000

library = ctypes.CDLL(sys.argv[1])
library.devcomm_nccl.restype = ctypes.c_char_p
library.devcomm_all_reduce.restype = ctypes.c_char_p
library.devcomm_all_reduce.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool]
library.devcomm_sevens.restype = ctypes.c_void_p
library.devcomm_sevens.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_bool]
python = ctypes.pythonapi
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# Capsules keep pointers to their names, which must therefore live as long.
NAMES = {False: (b"dltensor", b"used_dltensor")}
NAMES[True] = (b"dltensor_versioned", b"used_dltensor_versioned")


def capsule(tensor, versioned):
    # Torch exports tensors of the current GPU only.
    with torch.cuda.device(tensor.device if tensor.is_cuda else 0):
        if versioned:
            return tensor.__dlpack__(max_version=(1, 0))
        return tensor.__dlpack__()


def makes_versioned():
    """Returns whether this torch knows tensors with a version."""
    try:
        return '"dltensor_versioned"' in repr(capsule(torch.zeros(1), True))
    except TypeError:
        return False


def all_reduce(tensors, versioned):
    """Sums the tensors in place, and returns None, or an error."""
    pointers = (ctypes.c_void_p * len(tensors))()
    name, used = NAMES[versioned]
    capsules = [capsule(tensor, versioned) for tensor in tensors]
    for index, made in enumerate(capsules):
        pointers[index] = python.PyCapsule_GetPointer(made, name)
        python.PyCapsule_SetName(made, used)
    return library.devcomm_all_reduce(pointers, len(tensors), versioned)


def allocated():
    gc.collect()
    return [torch.cuda.memory_allocated(gpu) for gpu in range(N)]


def torchs_tensors_are_reduced(versioned):
    for dtype in [torch.float32, torch.bfloat16, torch.int64, torch.uint8]:
        before = allocated()
        # The tensors have two dimensions, and an offset from the allocation's beginning.
        whole = [torch.full((3, LENGTH), 1 + gpu, dtype=dtype, device=gpu) for gpu in range(N)]
        torch.cuda.synchronize()
        error = all_reduce([tensor[1:] for tensor in whole], versioned)
        assert error is None, error
        total = N * (N + 1) // 2
        for gpu, tensor in enumerate(whole):
            assert (tensor[0] == 1 + gpu).all() and (tensor[1:] == total).all(), tensor
        del tensor, whole
        # The tensors were given back, and torch has freed their memory.
        assert allocated() == before


def unsupported_tensors_are_refused():
    before = allocated()
    for words, make in {
        "not contiguous": lambda gpu: torch.zeros(4, 4, device=gpu).t(),
        "kind 1": lambda gpu: torch.zeros(4),
        "type that NCCL": lambda gpu: torch.zeros(4, dtype=torch.complex64, device=gpu),
    }.items():
        error = all_reduce([make(gpu) for gpu in range(N)], False)
        assert error and words in error.decode(), error
    if N > 1:
        error = all_reduce([torch.zeros(4, device=N - 1 - gpu) for gpu in range(N)], False)
        assert error and b"not GPU 0" in error, error
    assert allocated() == before


def torch_takes_devcomms_memory(versioned):
    for gpu in range(N):
        pointer = library.devcomm_sevens(gpu, LENGTH, versioned)
        assert pointer
        made = python.PyCapsule_New(pointer, NAMES[versioned][0], None)
        tensor = torch.utils.dlpack.from_dlpack(made)
        assert tensor.device.index == gpu and tensor.shape == (LENGTH,) and (tensor == 7).all()
        # This calls the deleter.
        del tensor, made
        gc.collect()


nccl = library.devcomm_nccl().decode()
# Torch was loaded first, so that its NCCL must be the only one.
with open("/proc/self/maps") as maps:
    loaded = {line.split()[-1] for line in maps if "libnccl.so" in line}
assert loaded == {nccl}, (loaded, nccl)
for versioned in [False, True] if makes_versioned() else [False]:
    torchs_tensors_are_reduced(versioned)
    torch_takes_devcomms_memory(versioned)
unsupported_tensors_are_refused()
print("PASS")
