"""What a kernel takes from the modules around it: Triton compiles it in and has it in no key."""

import enum
import functools
import importlib.util
import os
import subprocess
import sys
import threading
import time
import types
from types import ModuleType

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphstash.errors import CacheError, Reason
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


def from_table(key, table=settings.table):
    return settings.table_of[key] + table["k"]


def from_closure(value):
    def inner(key):
        return value

    return inner


constexpr_function = getattr(triton, "constexpr_function", triton.jit)
of_table = constexpr_function(from_table)
of_closure = constexpr_function(from_closure(settings.closed))


@constexpr_function
def of_helper(key):
    return settings.helper(key)


@triton.jit
def table(x):
    tl.store(x, tl.load(x) * of_table("k"))


@triton.jit
def closure(x):
    tl.store(x, tl.load(x) * of_closure("k"))


@triton.jit
def helper(x):
    tl.store(x, tl.load(x) * of_helper("k"))


@triton.jit
def plain(x):
    tl.store(x, tl.load(x) * 2.0)
"""

SETTINGS = """
import types

number, type, closed = 2.0, None, frozenset({"a", "b", "c"})
table, table_of = {"k": 1}, {"k": types.SimpleNamespace(by=2)}
helper = abs
"""

TELL = """
import types
import kernels
from graphstash.hooks.triton.source import values_in

for name in ("table", "closure", "helper", "default", "plain"):
    print(values_in(types.SimpleNamespace(fn=getattr(kernels, name))))
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


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Scale:
    def __init__(self, by):
        self.by = by


BASE = {
    "number": 2.0,
    "type": triton.language.float16,
    "table": {"k": 1},
    "table_of": {"k": 1},
    "closed": 1,
    "helper": abs,
}


@pytest.mark.parametrize(
    ("name", "setting", "one", "other"),
    [
        ("constant", "number", 2.0, 3.0),
        ("constant", "number", 0.0, -0.0),
        ("constant", "number", 1, True),
        ("kind", "type", triton.language.float16, triton.language.bfloat16),
        ("attribute", "number", 2.0, 3.0),
        ("attribute", "number", Level.LOW, Level.HIGH),
        ("attribute", "number", Scale(1), Scale(2)),
        ("attribute", "number", types.SimpleNamespace(by=1), types.SimpleNamespace(by=2)),
        ("default", "number", 2.0, 3.0),
        ("element", "number", 2.0, 3.0),
        ("table", "table_of", {"k": 5}, {"k": 7}),
        ("table", "table", {"k": 5}, {"k": 7}),
        ("table", "table_of", {"k": [1, {"n": 2}]}, {"k": [1, {"n": 3}]}),
        ("table", "table_of", {"k": 5, "l": 1}, {"l": 1, "k": 5}),
        ("closure", "closed", 5, 7),
        ("closure", "closed", {"k": 5}, {"k": 7}),
        ("helper", "helper", lambda key: 5, lambda key: 7),
        ("helper", "helper", lambda key, by=5: by, lambda key, by=7: by),
        ("helper", "helper", lambda key, *, by=5: by, lambda key, *, by=7: by),
        ("helper", "helper", Scale(5).__init__, Scale(7).__init__),
        ("helper", "helper", functools.partial(max, 5), functools.partial(max, 7)),
    ],
)
def test_different_value_makes_different_key(source, name, setting, one, other):
    def key(value):
        return artifact(source(name, **{**BASE, setting: value}))

    assert key(one) != key(other)
    assert key(one) == key(one)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("table", "table_of", {"k": object()}),
        ("table", "table", types.MappingProxyType({"k": 5})),
        ("closure", "closed", threading.Lock()),
        ("helper", "helper", open),
        ("helper", "helper", lambda key: os.environ[key]),
        ("helper", "helper", time.time),
        ("helper", "helper", functools.partial(open, "file")),
        ("helper", "helper", lambda key: getattr(os, key)),
        ("helper", "helper", lambda key: __import__("os")),
    ],
)
def test_indescribable_value_makes_kernel_unshareable(source, name, setting, value):
    with pytest.raises(CacheError, match="is not shared") as caught:
        artifact(source(name, **{**BASE, setting: value}))
    assert caught.value.reason is Reason.UNSHAREABLE


def test_key_is_equal_in_another_process_with_another_hash_seed(tmp_path):
    """Print the description of a kernel in processes that differ only in what does not matter."""
    told = set()
    for seed in ("1", "2"):
        place = tmp_path / seed
        place.mkdir()
        (place / "kernels.py").write_text(TEXT)
        (place / "settings.py").write_text(SETTINGS)
        job = subprocess.run(
            [sys.executable, "-c", TELL],
            cwd=place,
            env={**os.environ, "PYTHONHASHSEED": seed, "USER": seed, "PYTHONPATH": str(place)},
            capture_output=True,
            text=True,
            check=True,
        )
        told.add(job.stdout)
    assert len(told) == 1
    assert "frozenset" in told.pop()


def test_value_that_kernel_does_not_read_does_not_change_key(source):
    assert artifact(source("plain", **BASE)) == artifact(source("plain", **{**BASE, "number": 3.0}))
    assert values_in(types.SimpleNamespace()) == ""


def test_kernel_whose_source_is_not_known_is_not_shared():
    with pytest.raises(CacheError, match="not known") as caught:
        values_in(None)
    assert caught.value.reason is Reason.UNSHAREABLE


def test_global_that_replaced_text_reads_changes_the_key(source):
    def key(number):
        kernel = source("plain", **{**BASE, "number": number})
        kernel.fn._unsafe_update_src(kernel.fn.src.replace("2.0", "settings.number"))
        return artifact(kernel)

    assert key(2.0) != key(3.0)
    assert key(2.0) == key(2.0)


def test_the_source_is_known_while_triton_looks_a_kernel_up(source, monkeypatch):
    asked = []

    def look_up(_):
        asked.append(source_being_compiled())
        raise InterruptedError

    monkeypatch.setattr("triton.compiler.compiler.get_cache_manager", look_up)
    compiled = source("plain", **BASE)
    with pytest.raises(InterruptedError):
        triton.compile(compiled, target=GPUTarget("cuda", 90, 32))
    assert asked == [compiled]
    assert source_being_compiled() is None
