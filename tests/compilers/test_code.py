"""Descriptions of the code of a program. `wrong_hits` tests the places where compilers read it."""

import _random
import abc
import dataclasses
import enum
import functools
import hashlib
import itertools
import math
import os
import sys
import threading
import time
import types
import typing
from pathlib import Path

import matplotlib._path
import numpy as np
import pytest
import torch

from compilers.wrong_hits.generated.values import HOLDERS
from graphstash.hooks.code import CodeDescriber, UndescribableError
from graphstash.hooks.inductor.describer import describe_constant


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Marked(enum.Enum):
    ONE = 1

    def __init__(self, by):
        self.by = by


class Base(abc.ABC):  # noqa: B024 - only registrations matter
    pass


Base.register(Level)


class Other(property):
    def __get__(self, *_):
        return 5


class WithProperty:
    @Other
    def by(self):
        return 7


class Partial(functools.partial):
    def __call__(self):
        return 5


def named(by):
    """Return a class, a function and an object whose names or attributes depend on `by`."""
    cls, function, part = type("A", (), {}), lambda: 5, functools.partial(max, 5)
    cls.__name__, function.__qualname__, part.by = f"a{by}", f"b{by}", by
    return cls, function, part


def with_metaclass(by):
    class Meta(type):
        def __call__(cls):
            return by

    return Meta("A", (), {})


def imports():
    from imported_by_test import size

    return size


def imports_in_a_class():
    class Read:
        from imported_by_test import size

        by = size

    return Read.by


def imports_one_of_two(*, first):
    if first:
        from imported_by_test import size
    else:
        from math import e as size
    return size


def imports_for_another_function():
    def read():
        return size

    def load():
        nonlocal size
        from imported_by_test import size

    size = 0
    load()
    return read()


def imports_for_a_comprehension():
    from imported_by_test import size

    return [size for _ in range(5)]


def with_factory(factory):
    return dataclasses.make_dataclass(
        "A", [("by", int, dataclasses.field(default_factory=factory))]
    )


def with_builtins(by):
    names = {"__builtins__": {"abs": by}}
    exec("def function():\n    return abs", names)
    return names["function"]


def assigns_to_a_global():
    global count  # noqa: PLW0603 - the describer must refuse it
    count = 5


of_thread = threading.local()


def notes(value):
    of_thread.value = value
    return abs(value)


class Scale:
    def __init__(self, by):
        self.by = by


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0.0, -0.0),
        (math.nan, -math.nan),
        (complex(0, math.nan), complex(0, -math.nan)),
        ([np.array([math.nan])], [np.array([-math.nan])]),
        (Level.LOW, Level.HIGH),
        (Scale(1), Scale(2)),
        (Scale(5).__init__, Scale(7).__init__),
        ({"k": [1, {"n": 2}]}, {"k": [1, {"n": 3}]}),
        ({"k": 5, "l": 1}, {"l": 1, "k": 5}),
        (lambda key: 5, lambda key: 7),
        (lambda keys: max(keys, key=lambda _: 5), lambda keys: max(keys, key=lambda _: 7)),
        (lambda key, by=5: by, lambda key, by=7: by),
        (lambda key, *, by=5: by, lambda key, *, by=7: by),
        (functools.partial(max, 5), functools.partial(max, 7)),
        *zip(named(5), named(7), strict=True),
        (with_builtins(5), with_builtins(7)),
        (with_metaclass(5), with_metaclass(7)),
        (str.upper, str.lower),
        (int.__add__, int.__sub__),
        ([np.ones((2, 3), order="C")], [np.ones((2, 3), order="F")]),
    ],
)
def test_another_value_has_another_description(one, other):
    described = [CodeDescriber().describe(each) for each in (one, one, other)]
    assert described[0] == described[1] != described[2]


@pytest.mark.parametrize(
    "function",
    [
        imports,
        imports_in_a_class,
        imports_one_of_two,
        imports_for_another_function,
        imports_for_a_comprehension,
    ],
)
def test_value_is_described_that_a_function_imports_from_a_loaded_module(function, monkeypatch):
    described = []
    for size in (5, 7):
        module = types.ModuleType("imported_by_test")
        module.size = size
        monkeypatch.setitem(sys.modules, "imported_by_test", module)
        described.append(CodeDescriber().describe(function))
    assert described[0] != described[1]
    del module.size  # the function would import a submodule
    with pytest.raises(UndescribableError, match=r"imported_by_test\.size"):
        CodeDescriber().describe(function)
    monkeypatch.delitem(sys.modules, "imported_by_test")
    with pytest.raises(UndescribableError, match="imports imported_by_test"):
        CodeDescriber().describe(function)


@pytest.mark.parametrize("holder", HOLDERS)
def test_value_is_described_however_a_function_gets_it_and_wherever_the_function_stands(holder):
    def described(value, before=""):
        program = {"__name__": "program"}
        exec(before + HOLDERS[holder].replace("VALUE", value), program)
        return CodeDescriber().describe(program["read"])

    assert described("5") == described("5", "\n# moved\nSPARE = 1\n") != described("7")


@pytest.mark.parametrize(
    ("owner", "read"),
    [
        (torch.nn.Module, lambda: torch.nn.Module.by),
        (torch.nn.functional.softsign, lambda: torch.nn.functional.softsign.by),
    ],
)
@pytest.mark.parametrize("values", [(5, 7), (lambda: 5, lambda: 7)])
def test_attribute_that_a_program_gives_a_class_or_function_of_a_compiler_is_described(
    owner, read, values, monkeypatch
):
    described = []
    for value in values:
        monkeypatch.setattr(owner, "by", value, raising=False)
        described.append(CodeDescriber("torch").describe(read))
    assert described[0] != described[1]


def test_attribute_of_member_of_enumeration_is_described():
    before = CodeDescriber().describe(Marked.ONE)
    Marked.ONE.by = 7
    assert CodeDescriber().describe(Marked.ONE) != before


@pytest.mark.parametrize(
    "value",
    [
        object(),
        threading.Lock(),
        time.time,
        types.MappingProxyType({"k": 5}),
        functools.partial(open, "file"),
        itertools.count(5),
        _random.Random,
        _random.Random.random,
        assigns_to_a_global,
        lambda key: key.__globals__,
        lambda key: os.environ[key],
        lambda key: getattr(os, key),
        lambda key: __import__("os"),
        lambda key: of_thread.value,
        lambda key: key.__doc__,
        lambda key: key.__module__,
        lambda key: Scale.__dict__["__module__"],
        lambda key: key.__code__.co_firstlineno,
        lambda key: isinstance(key, Base),
        lambda key: WithProperty.by,
        Partial(max, 5),
        [np.ma.masked_array([1], [True], fill_value=5)],
        lambda key: Scale.__init__.__annotations__,
        lambda key: getattr(key, "__globals__", None),
        lambda key: typing.get_type_hints(Scale),
        lambda key: [each.type for each in dataclasses.fields(key)],
        lambda key: hash(key) % 2,
        lambda key: key.__hash__(),
    ],
)
def test_value_that_reads_more_than_its_arguments_has_no_description(value):
    with pytest.raises(UndescribableError):
        CodeDescriber().describe(value)


def hashed(by):
    class Name:
        def __hash__(self):
            return hash(self.text) + by

    return Name


def test_method_that_gives_the_hash_is_described():
    assert CodeDescriber().describe(hashed(1)) == CodeDescriber().describe(hashed(1))
    assert CodeDescriber().describe(hashed(1)) != CodeDescriber().describe(hashed(2))


def test_value_that_a_function_leaves_for_its_thread_is_not_described():
    before = CodeDescriber().describe(notes)
    of_thread.value = threading.Lock()
    assert CodeDescriber().describe(notes) == before


def test_function_that_pybind11_made_is_described_by_its_name_and_file():
    described = [
        CodeDescriber().describe(getattr(matplotlib._path, name))
        for name in ("affine_transform", "cleanup_path", "affine_transform")
    ]
    assert described[0] == described[2] != described[1]
    assert hashlib.sha256(Path(matplotlib._path.__file__).read_bytes()).hexdigest() in described[0]


def test_function_of_a_compiled_module_is_described_by_its_name():
    describer = CodeDescriber("torch")
    dump, names = torch._C._dispatch_dump, torch._C._dispatch_get_all_op_names
    assert describer.describe(dump) == CodeDescriber("torch").describe(dump)
    assert describer.describe(dump) != describer.describe(names)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.quantize_per_tensor(torch.ones(5000), 0.1, 0, torch.quint8),
        torch.ones(3).to_mkldnn(),
        torch.eye(3).to_sparse(),
    ],
    ids=["quantized", "mkldnn", "sparse"],
)
def test_constant_that_has_more_than_its_elements_is_refused(tensor):
    with pytest.raises(UndescribableError, match="a tensor of torch"):
        describe_constant(tensor, most=10_000)


def test_constant_is_described_by_the_bits_of_nan():
    number = torch.tensor([math.nan])
    assert (
        describe_constant(number) == describe_constant(number.clone()) != describe_constant(-number)
    )


def test_conjugated_constant_is_not_its_original():
    numbers = torch.full((5000,), 1j)
    assert describe_constant(numbers.conj(), most=10_000) != describe_constant(numbers, most=10_000)
