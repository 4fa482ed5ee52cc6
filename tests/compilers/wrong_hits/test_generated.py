"""Generated programs for torch.compile have equal keys exactly when they are equal.

A program is an operation of torch, a custom operation with a registration whose code reads a value
from somewhere, and a switch of the process. Only its key is computed.
"""

import contextlib
import dataclasses
import functools
import types

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.library import Library, custom_op

from graphstash.hooks.inductor.key_info import _completed

OPERATIONS = ("sin", "cos", "exp", "neg", "relu", "tanh")

VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([0.0, -0.0, 1.0, 2.0, float("inf")]),
    st.sampled_from(["", "1", "one"]),
    st.none(),
)

SWITCHES = {
    "nothing": contextlib.nullcontext,
    "bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "math": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}


def in_closure(value):
    return lambda *_: value


def in_default(value):
    def read(*_, by=value):
        return by

    return read


def in_partial(value):
    return functools.partial(lambda by, *_: by, value)


def in_list(value):
    held = [None, value]
    return lambda *_: held[1]


def in_dictionary(value):
    held = {"k": {"by": value}}
    return lambda *_: held["k"]["by"]


def in_object(value):
    held = types.SimpleNamespace(by=value)
    return lambda *_: held.by


def in_dataclass(value):
    @dataclasses.dataclass
    class Held:
        by: object = value

    held = Held()
    return lambda *_: held.by


def in_attribute_of_function(value):
    def read(*_):
        return read.by

    read.by = value
    return read


def in_attribute_of_class(value):
    class Held:
        by = value

    return lambda *_: Held.by


def in_method(value):
    class Held:
        def __init__(self):
            self.by = value

        def read(self, *_):
            return self.by

    return Held().read


def two_calls_away(value):
    inner = in_closure(value)
    return lambda *_: inner()


HOLDERS = (
    *(in_closure, in_default, in_partial, in_list, in_dictionary, in_object, in_dataclass),
    *(in_attribute_of_function, in_attribute_of_class, in_method, two_calls_away),
)

REGISTRATIONS = {
    "nothing": lambda operation, function: None,
    "backward": lambda operation, function: operation.register_autograd(function),
    "fake": lambda operation, function: operation.register_fake(function),
    "kernel": lambda operation, function: operation.register_kernel("cpu", function),
    "vmap": lambda operation, function: operation.register_vmap(function),
    "saved": lambda operation, function: operation.register_autograd(
        in_closure(1), setup_context=function
    ),
}

PROGRAMS = st.tuples(
    st.sampled_from(OPERATIONS),
    st.sampled_from(sorted(REGISTRATIONS)),
    st.sampled_from(HOLDERS),
    VALUES,
    st.sampled_from(sorted(SWITCHES)),
)


def key(program):
    """The key of a program, as the hook completes it."""
    name, registration, holder, value, switch = program

    @custom_op("generated::scale", mutates_args=())
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    REGISTRATIONS[registration](scale, holder(value))
    nodes = torch.fx.Graph()
    scaled = nodes.call_function(scale._opoverload, (nodes.placeholder("x"),))
    nodes.output((nodes.call_function(getattr(torch.ops.aten, name).default, (scaled,)),))
    graph = torch.fx.GraphModule(torch.nn.Module(), nodes)
    with SWITCHES[switch]():
        return _completed(f"f{graph.code}", graph, [torch.ones(2)])[0]


def identity(program):
    """What two programs with one key have in common."""
    name, registration, holder, value, switch = program
    held = () if registration == "nothing" else (holder, type(value), repr(value))
    return name, registration, held, switch


@pytest.fixture(scope="module", autouse=True)
def _own_library():
    """Ends the operations with this module."""
    yield
    library = Library("generated", "FRAGMENT")
    library._destroy()


BUDGET = hypothesis.settings(max_examples=hypothesis.settings().max_examples // 5)


@BUDGET
@hypothesis.given(PROGRAMS, PROGRAMS)
def test_generated_programs_share_key_exactly_if_they_are_equal(one, other):
    first, second = key(one), key(other)
    assert first == key(one)
    assert (first == second) == (identity(one) == identity(other))


@BUDGET
@hypothesis.given(PROGRAMS, VALUES)
def test_generated_program_with_another_value_has_another_key(program, value):
    other = (*program[:3], value, program[4])
    assert (key(program) == key(other)) == (identity(program) == identity(other))
