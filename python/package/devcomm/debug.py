"""Checks of programs that use torch and devcomm, each with a name: to find mistakes, not for speed.

    DEVCOMM_DEBUG=1 torchrun --nproc-per-node 2 train.py

or `devcomm.debug.enable()`, before the program uses a GPU. A check that finds a mistake raises
`devcomm.CheckError`, whose text begins with its name:

| check | the mistake |
|---|---|
| `stream_order` | a call uses a tensor that work on another stream writes, or writes one that it \
reads, and neither waits for the other |
| `window_dropped` | a window is closed or dropped, and other ranks may still use it: a kernel of a \
`KernelSet` got it, or `put_signal` put into it, and since then the ranks have not waited for that \
work (`synchronize`) and then for each other (`barrier`) |
| `tensor_device` | a tensor is on another GPU than the communicator; always checked |

`stream_order` is torch's own check of its operations, `torch.cuda._sanitizer`, with devcomm's calls
added. It knows tensors by their first element, and the order that streams, events and
synchronisation of torch make, and `Communicator.synchronize`; for the tensors of two calls of one
devcomm object on two streams it expects such an order, too. It sees the thread that enabled it. It
does not see graphs, windows as arguments of kernels, the window of `copy_from`, `copy_to` and
`put_signal`, and arrays of other libraries. While torch's check is on, torch.compile compiles
nothing: functions run as they are written.

`window_dropped` is found on a rank that has put or launched: devcomm does not know on a rank that
others put into its window. The barriers that count are those of `Communicator` and `Rank`, for work
that was done when this rank came to them (on simulated GPUs, for all work). The check does not know
whether a kernel ends with a barrier of the ranks, after which a rank may drop the window at once.
Neither a drop nor `close` raises the error: a later call of devcomm's on that thread does. `found`
lists all errors, also those after which no call followed.
"""

import contextlib
import sys
import threading
import traceback

from devcomm import _devcomm
from devcomm.errors import CheckError, Error

__all__ = ["enable", "found"]

#: The errors of windows, in the order in which they were found.
found: list[CheckError] = []


class _Watch:
    """The methods that `src/debug.rs` calls."""

    def __init__(self, torch, handler):
        self._torch, self._handler = torch, handler  # torch with GPUs, and its sanitizer's handler
        self._thread = threading.get_ident()
        self._shared = {}
        self._raised = threading.local()

    def called(self, stream, arrays):
        """A call has enqueued work that uses arrays, each an address and whether it is written.
        stream: its handle; None on simulated GPUs."""
        self._raise()
        if self._handler is None or stream is None or threading.get_ident() != self._thread:
            return
        written = {address for address, is_written in arrays if is_written}
        read = {address for address, _ in arrays} - written
        names = {address: [] for address in read | written}
        errors = self._handler._handle_kernel_launch(
            stream, read, written, set(), "a call of devcomm", names
        )
        if errors:
            raise CheckError(f"stream_order: {errors[0]}")

    def synchronized(self, stream):
        """The host has waited for a stream."""
        if self._handler is not None and stream is not None:
            self._handler._handle_stream_synchronization(stream)

    def shared(self, comm, window, call, device, stream):
        """A call has enqueued work in which ranks use the window of others."""
        # The last frame is this one; that before it, since Rust's have none, the caller of devcomm.
        where = traceback.extract_stack(limit=2)[0]
        what = f"{call}, called in {where.filename}:{where.lineno}"
        self._shared[comm, window] = (what, self._event(device, stream), threading.get_ident())

    def _event(self, device, stream):
        """An event after the work on a stream, if there is one."""
        if self._torch is None or stream is None:
            return None
        cuda = self._torch.cuda
        on = cuda.ExternalStream(stream, device) if stream else cuda.default_stream(device)
        event = cuda.Event()
        event.record(on)
        return event

    def arriving(self, comm):
        """This rank comes to a barrier, of a communicator or of this thread's world. Returns what
        has been shared by work that is done."""
        done = []
        # A copy, since other threads, and the garbage collector on this one, change it meanwhile.
        for key, (_, event, thread) in list(self._shared.items()):
            of_comm = key[0] == comm if comm is not None else thread == threading.get_ident()
            if of_comm and (event is None or event.query()):
                done.append(key)
        return done

    def passed(self, done):
        """All ranks have come to the barrier."""
        for key in done:
            self._shared.pop(key, None)
        self._raise()

    def dropped(self, comm, window):
        """A window is about to be freed."""
        if self._handler is not None:
            # Other memory may get the address.
            self._handler.tensors_accessed.accesses.pop(window, None)
        what, *_ = self._shared.pop((comm, window), (None,))
        if what is None:
            return
        error = CheckError(
            f"window_dropped: a window at {window:#x} was dropped after {what}, and other ranks "
            "may still use it: before, all ranks wait for that work, comm.synchronize(), and then "
            "for each other, comm.barrier()"
        )
        found.append(error)
        self._raised.error = error
        print(f"devcomm.debug: {error}", file=sys.stderr)

    def _raise(self):
        error, self._raised.error = getattr(self._raised, "error", None), None
        if error is not None:
            raise error


_watch = None


def enable() -> None:
    """Enables the checks for the rest of the program."""
    global _watch
    if _watch is not None:
        return
    if "torch" not in sys.modules:
        # Torch's NCCL may be too old; without a newer one, calls that need it say so.
        with contextlib.suppress(Error):
            _devcomm.load_nccl()
    try:
        import torch
    except ModuleNotFoundError:
        torch = None
    if torch is not None and not (torch.version.cuda and torch.cuda.is_available()):
        torch = None
    handler = None
    if torch is not None:
        from torch.cuda import _sanitizer

        if not _sanitizer.cuda_sanitizer.enabled:
            _sanitizer.enable_cuda_sanitizer()
        handler = _sanitizer.cuda_sanitizer.dispatch.event_handler
    _watch = _Watch(torch, handler)
    _devcomm._watch(_watch)
