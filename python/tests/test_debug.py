"""`devcomm.debug` on simulated GPUs, in a process of its own, as it stays enabled."""

import os
import subprocess
import sys

import pytest

from devcomm import debug

BEFORE = """
import devcomm

def put(rank, then):
    comm = rank.communicator()
    source, window = comm.window(4, "f32"), comm.window(4, "f32")
    window.put_signal(source, 1 - rank.rank)
    comm.wait_signal(1 - rank.rank)
    then(rank, comm, window)
    comm.barrier()
"""


def run(program):
    command, env = [sys.executable, "-c", BEFORE + program], os.environ | {"DEVCOMM_DEBUG": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_a_window_that_is_closed_before_a_barrier_is_found():
    ended = run("""
def mistake(rank, comm, window):
    window.close()

try:
    devcomm.World.simulated(2).run(lambda rank: put(rank, mistake))
except devcomm.CheckError as error:
    print(error)
assert len(devcomm.debug.found) == 2, devcomm.debug.found
""")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("window_dropped: a window at 0x"), ended.stdout
    assert "after put_signal, called in <string>:7" in ended.stdout, ended.stdout
    assert ended.stderr.count("devcomm.debug: window_dropped") == 2, ended.stderr


@pytest.mark.parametrize("barrier", ["comm.barrier()", "rank.barrier()"])
def test_a_window_that_is_closed_after_a_barrier_is_not(barrier):
    ended = run(f"""
def right(rank, comm, window):
    comm.synchronize()
    {barrier}
    window.close()

devcomm.World.simulated(2).run(lambda rank: put(rank, right))
assert not devcomm.debug.found, devcomm.debug.found
""")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_barrier_is_no_error_while_another_thread_uses_a_window():
    watch = debug._Watch(None, None)

    class Event:
        def query(self):
            watch.shared(1, 3, "put_signal", 0, None)  # as of another thread
            return True

    for window in (1, 2):
        watch._shared[1, window] = ("put_signal", Event(), 0)
    assert watch.arriving(1) == [(1, 1), (1, 2)]
