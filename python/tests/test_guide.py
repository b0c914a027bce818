"""The listings of the guide's chapter run, those for GPUs under torchrun."""

import os
import re
from pathlib import Path

import pytest

# In the repository; a copy of the tests elsewhere has no guide.
CHAPTER = Path(__file__).parents[2] / "docs/guide/src/python.md"


def listings():
    if not CHAPTER.is_file():
        pytest.skip("the guide is not here")
    found = re.findall(r"^```python\n(.*?)^```$", CHAPTER.read_text(), re.M | re.S)
    on_gpus = [code for code in found if code.startswith("# torchrun ")]
    return [code for code in found if code not in on_gpus], on_gpus


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="for one process")
def test_the_listings_for_simulated_gpus_run():
    simulated, _ = listings()
    with_torch = ["import torch" in code for code in simulated]
    assert with_torch == [False] * 5 + [True] * 3
    names = {}
    for code, needs_torch in zip(simulated, with_torch, strict=True):
        if needs_torch:
            pytest.importorskip("torch")
        exec(compile(code, str(CHAPTER), "exec"), names)


def test_the_listings_for_gpus_compile():
    _, on_gpus = listings()
    assert len(on_gpus) == 2
    for code in on_gpus:
        compile(code, str(CHAPTER), "exec")
