"""The stubs for type checkers have the module's names and signatures."""

import ast
import inspect
from importlib import resources

import pytest

from devcomm import _devcomm

STUBS = ast.parse(resources.files("devcomm").joinpath("_devcomm.pyi").read_text())


def public(names):
    kept = {"__dlpack__", "__dlpack_device__", "__cuda_array_interface__", "__call__", "__len__"}
    return {name for name in names if not name.startswith("_") or name in kept}


def test_every_class_and_function_has_a_stub():
    stubs = {node.name for node in STUBS.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assert public(stubs) == public(dir(_devcomm))


@pytest.mark.parametrize("name", [n.name for n in STUBS.body if isinstance(n, ast.ClassDef)])
def test_every_method_has_its_stub(name):
    if name.startswith("_"):
        return
    (stub,) = (n for n in STUBS.body if isinstance(n, ast.ClassDef) and n.name == name)
    methods = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    real = getattr(_devcomm, name)
    assert public(methods) == public(vars(real))
    assert real.__doc__
    for method, node in methods.items():
        if node.decorator_list and node.decorator_list[0].id == "property":
            assert getattr(real, method).__doc__, method
            continue
        if method in ("__call__", "__len__"):
            continue  # Python knows no signature of these.
        signature = inspect.signature(real if method == "__new__" else getattr(real, method))
        names = [p for p in signature.parameters if p != "self"]
        args = node.args
        every = [*args.args[1:], *filter(None, [args.vararg]), *args.kwonlyargs]
        assert names == [arg.arg for arg in every], method
