"""Ctrl-C ends what waits. Each test is a process of its own, which would not end otherwise."""

import subprocess
import sys
import textwrap

import pytest

START = """
import os, signal, sys, threading, time
import numpy as np
import devcomm

def interrupt(number=signal.SIGINT):
    global sent
    sent = time.monotonic()
    os.kill(os.getpid(), number)

def run(function, n=2):
    return devcomm.World.simulated(n).run(function)

def is_interrupted(function, exception=KeyboardInterrupt):
    try:
        run(function)
    except exception:
        # A second is promised; a busy machine may take longer.
        assert time.monotonic() - sent < 10
    else:
        raise AssertionError("the world was not interrupted")
"""


def passes(script):
    script = START + textwrap.dedent(script) + "print('passed')\n"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout) == (0, "passed\n"), ran.stderr


@pytest.mark.parametrize(
    "endless",
    [
        "while True: pass",
        "while True: time.sleep(0.01)",
        "[0 for _ in iter(int, 1)]",
        "time.sleep(3600)",
        "threading.Event().wait()",
    ],
)
def test_ctrl_c_ends_a_world_whose_ranks_do_not_end(endless):
    passes(f"""
        def function(rank):
            if rank.rank == 1:
                interrupt()
                {endless}
            rank.barrier()

        is_interrupted(function)
    """)


def test_ctrl_c_is_an_exception_of_the_ranks_and_other_worlds_run_after_it():
    passes("""
        seen = []

        def function(rank):
            try:
                if rank.rank == 0:
                    interrupt()
                    while True:
                        pass
                rank.communicator().barrier()
            except BaseException as error:
                seen.append((rank.rank, type(error)))
                raise

        is_interrupted(function)
        assert sorted(seen, key=str) == [(r, KeyboardInterrupt) for r in range(2)], seen

        def reduce(rank):
            x = np.ones(100, np.float32)
            devcomm.Collectives(rank.communicator()).all_reduce(x)
            return x[0]

        assert run(reduce) == [2, 2]
    """)


def test_ctrl_c_is_not_lost_when_a_rank_fails_at_the_same_time():
    passes("""
        def function(rank):
            if rank.rank == 1:
                interrupt()
                raise ValueError
            rank.barrier()

        is_interrupted(function)
    """)


def test_a_rank_that_goes_on_after_the_end_of_python_does_not_end_the_process():
    passes("""
        awaited, written = os.pipe()

        class Output:
            def __init__(self, output):
                self.write, self.flush_output = output.write, output.flush

            def flush(self):
                self.flush_output()
                # Python flushes its output once more when it has ended for all other threads.
                if sys.is_finalizing():
                    os.write(written, b"x")
                    for _ in range(20):
                        # The rank's thread asks for the GIL.
                        time.sleep(0.01)

        def function(rank):
            if rank.rank == 1:
                interrupt()
                os.read(awaited, 1)
            rank.barrier()

        is_interrupted(function)
        sys.stdout = Output(sys.stdout)
    """)


def test_the_exception_of_another_signals_handler_is_that_of_the_world():
    passes("""
        class TooLong(Exception):
            pass

        def too_long(number, frame):
            raise TooLong

        signal.signal(signal.SIGALRM, too_long)

        def function(rank):
            if rank.rank == 0:
                interrupt(signal.SIGALRM)
                while True:
                    pass
            rank.barrier()

        is_interrupted(function, TooLong)
    """)


@pytest.mark.parametrize(("raised", "is_lost"), [("TimeoutError", False), ("RuntimeError", True)])
def test_an_exception_that_is_not_torchs_is_raised_where_torch_is_asked_for_its_capture(
    raised, is_lost
):
    passes(f"""
        import types

        # Stands for a handler that is called in torch, or for an error of torch.
        def fails():
            raise {raised}

        def function(rank):
            comm = rank.communicator()
            window = comm.window(4, "float32")
            sys.unraisablehook = lambda _: None
            sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=fails)
            del window
            try:
                comm.window(4, "float32")
            except {raised}:
                return False
            finally:
                del sys.modules["torch.cuda"]
            return True

        assert run(function, 1) == [{is_lost}]
    """)


def test_an_exception_in_a_destructor_leaves_the_exception_of_the_call():
    passes("""
        import types

        def fails():
            raise TimeoutError

        def function(rank):
            comm = rank.communicator()
            sys.unraisablehook = lambda _: None
            sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=fails)
            try:
                # The window is dropped while the TypeError is on its way.
                int(comm.window(4, "float32"))
            except TypeError:
                return True
            finally:
                del sys.modules["torch.cuda"]
            return False

        assert run(function, 1) == [True]
    """)


def test_a_handler_without_an_exception_is_called_while_ranks_go_on():
    passes("""
        handled = threading.Event()
        signal.signal(signal.SIGUSR2, lambda *_: handled.set())

        def function(rank):
            if rank.rank == 0:
                interrupt(signal.SIGUSR2)
                assert handled.wait(60)
            rank.barrier()
            return rank.rank

        assert run(function) == [0, 1]
    """)


def test_an_exception_of_a_rank_is_not_changed_by_the_thread_that_waits():
    passes("""
        def function(rank):
            if rank.rank == 1:
                raise KeyboardInterrupt("of my own")
            rank.barrier()

        try:
            run(function)
        except KeyboardInterrupt as error:
            assert str(error) == "of my own"
        else:
            raise AssertionError
    """)
