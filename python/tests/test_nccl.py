"""Which NCCL a process uses, and what the error says of one that is too old. No GPU is needed.

Each case runs in a process of its own. Its packages have a small library in place of NCCL; the last
test takes torch with its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="for one process"),
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="it reads /proc"),
]

# The files of NCCL that the process has loaded, and what load_nccl returns or its error says.
REPORT = """
import json
try:
    said = list(devcomm.load_nccl())
except devcomm.NcclError as error:
    said = str(error)
lines = open("/proc/self/maps").read().splitlines()
files = {line[line.index("/"):] for line in lines if "/libnccl.so" in line}
print(json.dumps([sorted(files), said]))
"""

# Loads a library as `import torch` loads NCCL.
LOAD = "import ctypes; ctypes.CDLL({path!r})\n"


def run(code, packages=None):
    """What `REPORT` says at the end of a program, with these packages before all others."""
    variables = {name: value for name, value in os.environ.items() if "NCCL" not in name}
    variables.pop("VIRTUAL_ENV", None)
    variables["PATH"] = "/nonexistent"  # no other Python is asked
    variables["DEVCOMM_CACHE"] = "/nonexistent"
    if packages is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(packages), *map(str, sys.path)])
    arguments = [sys.executable, "-c", code + REPORT]
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment(root, version):
    """The packages of a Python environment with an NCCL of this version, and its library."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    site = root / "lib/python3.12/site-packages"
    lib = site / "nvidia/nccl/lib"
    lib.mkdir(parents=True)
    (site / "nvidia_nccl_cu13-1.0.dist-info").mkdir()
    (root / "bin").mkdir()
    (root / "bin/python").touch()
    source = root / "nccl.c"
    source.write_text(f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}")
    library = lib / "libnccl.so.2"
    arguments = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o", library, source]
    subprocess.run([compiler, *arguments], check=True)
    return site, str(library)


def command(root):
    return f"`{root / 'bin/python'} -m pip install nvidia-nccl-cu13==2.32.3`"


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(LOAD + "import devcomm", id="loaded-first"),
        pytest.param("import devcomm\n" + LOAD, id="devcomm-first"),
    ],
)
def test_an_older_nccl_that_another_package_has_loaded_names_the_command_that_renews_it(
    code, tmp_path
):
    site, library = environment(tmp_path, 22809)
    files, said = run(code.format(path=library), site)
    assert files == [library]
    assert "2.28.9" in said and "2.32.3" in said and library in said
    assert command(tmp_path) in said


def test_an_older_nccl_that_is_not_loaded_yet_names_it_too(tmp_path):
    site, library = environment(tmp_path, 22809)
    _, said = run("import devcomm", site)
    # Where the system has a newer one, that is taken.
    if isinstance(said, str):
        assert "it is NCCL 2.28.9" in said and command(tmp_path) in said
    else:
        assert said[1] != library


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(LOAD + "import devcomm", id="loaded-first"),
        pytest.param("import devcomm\n" + LOAD, id="devcomm-first"),
        pytest.param("import devcomm; devcomm.load_nccl()\n" + LOAD, id="opened-first"),
        pytest.param("import devcomm", id="not-loaded"),
    ],
)
def test_an_nccl_that_is_new_enough_is_the_only_one_in_any_order(code, tmp_path):
    site, library = environment(tmp_path, 23203)
    assert run(code.format(path=library), site) == [[library], ["2.32.3", library]]


def test_a_library_is_found_and_global_in_a_folder_whose_name_is_not_utf8(tmp_path):
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    root.mkdir()
    folder = str(Path(environment(root, 23203)[1]).parent)
    code = f"""if True:
        import ctypes, os, devcomm
        devcomm.load_nccl({folder!r})
        ctypes.CDLL(None).ncclGetVersion
        assert os.environ["DEVCOMM_NCCL_HOME"] == {folder!r}
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# Torch's NCCL is that of its packages: the one that its wheel pins, or the newer one that was
# installed in its place.
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("code", ["import torch, devcomm", "import devcomm, torch"])
def test_torchs_nccl_is_used_or_refused_with_the_command_that_renews_it(code):
    files, said = run(code)
    if not files:
        pytest.skip("this torch has no NCCL of its own")
    assert len(files) == 1
    if isinstance(said, list):
        assert said[1] == files[0]
    else:
        assert files[0] in said
        assert re.search(r"`\S+ -m pip install nvidia-nccl-cu1[23]==2\.32\.3`", said)
