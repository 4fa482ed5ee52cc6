"""What a kernel takes from the modules around it: Triton compiles it in and has it in no key."""

import importlib.util
import sys
from types import ModuleType

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphstash.hooks.triton.fingerprint import request_of
from graphstash.hooks.triton.source import source_being_compiled, values_in

TEXT = """
import settings
import triton
import triton.language as tl

NUMBER = tl.constexpr(settings.number)
TYPE = settings.type
PAIR = (tl.constexpr(1), settings.number)


@triton.jit
def scaled(x, by: tl.constexpr = NUMBER):
    return x * by


@triton.jit
def constant(x):
    tl.store(x, tl.load(x) * NUMBER)


@triton.jit
def kind(x):
    tl.store(x, tl.load(x).to(TYPE).to(tl.float32))


@triton.jit
def attribute(x):
    tl.store(x, tl.load(x) * settings.number)


@triton.jit
def default(x):
    tl.store(x, scaled(tl.load(x)))


@triton.jit
def element(x):
    tl.store(x, tl.load(x) * PAIR[1])


@triton.jit
def plain(x):
    tl.store(x, tl.load(x) * 2.0)
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Makes sources from one text and the settings of a job."""
    path = tmp_path / "kernels.py"
    path.write_text(TEXT)

    def source(name, **settings):
        module = ModuleType("settings")
        vars(module).update(settings)
        monkeypatch.setitem(sys.modules, "settings", module)
        spec = importlib.util.spec_from_file_location("kernels", path)
        kernels = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(kernels)
        return ASTSource(fn=getattr(kernels, name), signature={"x": "*fp32"}, constexprs={})

    return source


def artifact(source):
    """The key under which the result of a source is shared."""
    return request_of("Triton's own key", "group", {}, source).key


@pytest.mark.parametrize("name", ["constant", "kind", "attribute", "default", "element"])
def test_another_value_is_another_kernel_though_not_for_triton(source, name):
    one = source(name, number=2.0, type=triton.language.float16)
    other = source(name, number=3.0, type=triton.language.bfloat16)
    assert one.hash() == other.hash()
    assert values_in(one) != values_in(other)
    assert artifact(one) != artifact(other)
    again = source(name, number=2.0, type=triton.language.float16)
    assert values_in(one) == values_in(again)
    assert artifact(one) == artifact(again)


def test_a_kernel_of_its_arguments_alone_has_no_values(source):
    assert values_in(source("plain", number=2.0, type=None)) == ""
    assert values_in(None) == ""


def test_the_source_is_known_while_triton_looks_a_kernel_up(source, monkeypatch):
    asked = []

    def look_up(_):
        asked.append(source_being_compiled())
        raise InterruptedError

    monkeypatch.setattr("triton.compiler.compiler.get_cache_manager", look_up)
    compiled = source("plain", number=2.0, type=None)
    with pytest.raises(InterruptedError):
        triton.compile(compiled, target=GPUTarget("cuda", 90, 32))
    assert asked == [compiled]
    assert source_being_compiled() is None
