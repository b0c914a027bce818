"""What devcomm finds on this machine, and what to do about what is missing.

    python -m devcomm.doctor

Its exit status is 0 if everything works that this machine's GPUs need, or if there are no GPUs and
simulated ones work.
"""

import ctypes
import importlib.util
import subprocess
import sys

from devcomm import _devcomm

# The attributes of `cuDeviceGetAttribute` for the two numbers of the compute capability.
_CAPABILITY = (75, 76)

_SIMULATED = """
import devcomm, {package}
def main(rank):
    x = {package}.ones(8, dtype={package}.float32)
    devcomm.Collectives(rank.communicator()).all_reduce(x)
    return x[0]
assert devcomm.World.simulated(2).run(main) == [2.0, 2.0]
"""

_NCCL = "import devcomm; print(*devcomm.load_nccl())"


def _run(code):
    """Whether a program succeeds in a process of its own, and the last lines that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip()
    # Of an exception of devcomm's only the message, after the traceback and the type's name.
    _, error, message = lines.rpartition("devcomm.errors.")
    return done.returncode == 0, message.partition(": ")[2] if error else lines


def _gpus():
    """The driver's version of CUDA, or why it does not work, and each GPU's name and compute
    capability."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver", []
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if code := cuda.cuInit(0):
        return f"cuInit fails with code {code}", []
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    cuda.cuDeviceGetCount(ctypes.byref(number))
    found = []
    for device in range(number.value):
        cuda.cuDeviceGetName(name, len(name), device)
        capability = []
        for attribute in _CAPABILITY:
            cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
            capability.append(str(number.value))
        found.append(f"{name.value.decode()} (compute capability {'.'.join(capability)})")
    return version, found


def main():
    """Prints the report, and returns the exit status."""
    has = {package: importlib.util.find_spec(package) is not None for package in ("numpy", "torch")}
    missing = []

    def line(name, state, to_do=None):
        print(f"{name:<16}{state}")
        if to_do is not None:
            print(f"{'':<16}to do: {to_do}")
            missing.append(name)

    line("devcomm", f"{_devcomm.__version__}, Python {sys.version.split()[0]}")
    driver, gpus = _gpus()
    line("driver", driver)
    line("GPUs", ", ".join(gpus) or "none")
    kernels = _devcomm._kernels()
    to_do = "install a wheel that was built with --features ptx or kernels-bin"
    line("own kernels", kernels or "none in this wheel", None if kernels or not gpus else to_do)
    # If torch is imported first, its NCCL is the one that is loaded, and it may be too old.
    works, said = _run(("import torch; " if has["torch"] else "") + _NCCL)
    if works:
        line("NCCL", said)
    elif gpus:
        line("NCCL", "cannot be used", said)
    else:
        line("NCCL", f"GPUs would need another: {said}")
    if has["torch"]:
        works, said = _run("import torch; print(torch.__version__, torch.cuda.device_count())")
        version, _, count = said.partition(" ")
        if not works:
            line("torch", "import torch fails", said)
        elif int(count) < len(gpus):
            line("torch", f"{version} finds {count} GPUs", "install a torch for CUDA 13")
        else:
            line("torch", version)
    else:
        line("torch", "not installed: arrays of numpy only")
    if any(has.values()):
        package = "numpy" if has["numpy"] else "torch"
        works, said = _run(_SIMULATED.format(package=package))
        line("simulated GPUs", "work" if works else "fail", None if works else said)
    else:
        to_do = "install numpy or torch"
        line("simulated GPUs", "not tried, as their arrays are missing", None if gpus else to_do)
    if missing:
        print(f"\nnot ready: {', '.join(missing)}")
    else:
        print(f"\nready for {'GPUs' if gpus else 'simulated GPUs: World.simulated(n)'}")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
