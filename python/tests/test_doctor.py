"""`python -m devcomm.doctor`, without GPUs, and with a driver that has one but nothing for it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="for one process")

# A driver with a GPU of compute capability 9.0.
DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetName(char *name, int length, int device) { name[0] = 'X'; name[1] = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
"""


def doctor(**variables):
    """The exit status and the report, with these variables."""
    done = subprocess.run(
        [sys.executable, "-m", "devcomm.doctor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_without_gpus_simulated_ones_are_tried(tmp_path):
    (tmp_path / "libcuda.so.1").touch()  # no library: the driver cannot be loaded
    status, report = doctor(LD_LIBRARY_PATH=str(tmp_path))
    lines = {line[:16].strip(): line[16:] for line in report.splitlines() if line[:1].strip()}
    assert lines["GPUs"] == "none"
    assert lines["simulated GPUs"] == "work"
    assert "to do:" not in report
    assert report.splitlines()[-1] == "ready for simulated GPUs: World.simulated(n)"
    assert status == 0


def test_what_a_gpu_lacks_is_named_with_what_to_do(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    nowhere = {name: "/nonexistent" for name in ("DEVCOMM_NCCL_HOME", "DEVCOMM_CACHE")}
    status, report = doctor(LD_LIBRARY_PATH=str(tmp_path), **nowhere)
    assert status == 1
    assert "X (compute capability 9.0)" in report and "CUDA 13.2" in report
    assert "NCCL            cannot be used\n                to do: " in report
    last = report.splitlines()[-1]
    assert last.startswith("not ready: ") and "NCCL" in last
    from devcomm import _devcomm

    assert ("own kernels" in last) == (_devcomm._kernels() is None)
