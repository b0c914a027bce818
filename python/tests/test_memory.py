"""Valgrind finds no access of devcomm's to memory that is free, or beyond what was allocated."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

VALGRIND = shutil.which("valgrind")

pytestmark = pytest.mark.skipif(VALGRIND is None, reason="valgrind is not installed")


def wrong_accesses(tmp_path, *command):
    """Runs Python under valgrind; returns what is wrong in accesses to the heap from devcomm."""
    report = tmp_path / "report.xml"
    # Stacks of simulated threads are not valgrind's: it takes what is on them as not initialised.
    valgrind = [VALGRIND, "--undef-value-errors=no", "--error-limit=no", "--xml=yes"]
    ran = subprocess.run(
        [*valgrind, f"--xml-file={report}", sys.executable, *command],
        env=os.environ | {"PYTHONMALLOC": "malloc"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = []
    for error in ElementTree.parse(report).getroot().iter("error"):
        # The loader's reads of whole words beyond a string are none of devcomm's.
        objects = [frame.findtext("obj", "") for frame in error.find("stack")]
        address = error.findtext("auxwhat", "")
        if "block of size" in address and any("_devcomm" in path for path in objects):
            found.append(f"{error.findtext('what')}: {address}")
    return found


def test_arrays_are_read_and_written_only_where_their_memory_is(tmp_path):
    tests = Path(__file__).with_name("test_arrays.py")
    chosen = "temporary or scalar or lasts or masked"
    pytest_run = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "-k", chosen, tests]
    assert wrong_accesses(tmp_path, *pytest_run) == []


def test_valgrind_finds_a_wrong_access(tmp_path):
    script = """if True:
        import ctypes
        import numpy as np
        import devcomm

        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

        def run(rank):
            memory = libc.malloc(20000)
            x = np.ctypeslib.as_array((ctypes.c_float * 5000).from_address(memory))
            x[:] = 1
            libc.free(memory)
            rank.communicator().window(5000, "f32").copy_from(x)

        devcomm.World.simulated(1).run(run)
    """
    found = wrong_accesses(tmp_path, "-c", script)
    assert found and all("inside a block of size 20,000 free'd" in what for what in found), found
