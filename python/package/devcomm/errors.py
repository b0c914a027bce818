"""The exceptions of devcomm. Each message says what failed, where, and what to do."""


class Error(RuntimeError):
    """The base class of devcomm's exceptions."""


class DriverError(Error):
    """The CUDA driver or its GPUs; also a call that simulated GPUs do not have."""


class NcclError(Error):
    """NCCL: its library, its version, its calls."""


class LaunchError(Error):
    """Kernels: loading, launching and aborting them."""


class DevCommError(Error):
    """Device communicators and windows."""


class WorldError(Error):
    """The world: its environment variables, its rendezvous, its ranks."""


class StateError(Error):
    """An object is in a state that does not allow the call, such as closed."""


class InvalidInput(Error, ValueError):
    """An argument is invalid."""


class CheckError(InvalidInput):
    """A check has found a mistake of the program; the text begins with the check's name. See
    devcomm.debug."""
