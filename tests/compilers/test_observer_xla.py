"""Attributes that torch_xla omits from graph names are observed in each call, or not shared."""

import ctypes
import re
import subprocess
import threading

import pytest

from graphstash.hooks.torch_xla.elf import GateUnavailable
from graphstash.hooks.torch_xla.observer import (
    ADDED,
    COMPARED,
    FINISH,
    Argument,
    Observation,
    observe,
)
from support.machine_code import assembled

FIRST = Argument("first", "48 89 f8", "mov rax, rdi")
SECOND = Argument("second", "f2 48 0f 2d c0", "cvtsd2si rax, xmm0")
COUNT = Argument("count", "48 89 f8", "mov rax, rdi", is_added=True)

SOURCE = """
long observed(long first, double second) { return first * 10 + (long)second; }
long calls(long first, double second) { return observed(first, second) + 1; }
extern long alias(long first, double second) __attribute__((alias("observed")));
"""

OTHER_BUILD = """
import dataclasses
from graphstash.hooks.torch_xla import hook, omitted

omitted.OPERATIONS = (
    dataclasses.replace(omitted.OPERATIONS[0], symbols=("_ZN9torch_xla4CeluEv",)),
)
print(hook.install(None))
"""

LATE = """
import torch
import torch_xla
from graphstash.hooks.torch_xla import hook

pending = torch.ones(2, device=torch_xla.device()) + 1
print(hook.install(None))
"""

PLATFORMS = """
import torch_xla
from graphstash.hooks.torch_xla import fingerprint

found = fingerprint.Fingerprints()
torch_xla.device()
made = fingerprint._process_parts()
for platform in ("CPU", "TPU"):
    found._process_parts = {**made, "platform": platform}
    print(bool(found.parts("graph")["threads"]))
"""


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "library.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wl,-z,now", "-x", "c", "-", "-o", path]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    loaded = ctypes.CDLL(str(path))
    loaded.calls.argtypes = (ctypes.c_long, ctypes.c_double)
    loaded.calls.restype = ctypes.c_long
    return path, loaded


def test_machine_code_equals_assembled_listing(tmp_path):
    listing = [*COMPARED, *ADDED, *FINISH]
    lines = [re.sub(r"\{\w+\}", "0x11223344", text) for _, text in listing]
    distance = (0x11223344).to_bytes(4, "little").hex()
    ours = "".join(code + (distance if "{" in text else "") for code, text in listing)
    assert bytes.fromhex(ours) == assembled(tmp_path, lines)


def test_assembled_code_loads_arguments_of_torch_xla(tmp_path):
    from graphstash.hooks.torch_xla.omitted import OPERATIONS

    arguments = [argument for each in OPERATIONS for argument in each.arguments]
    lines = [line for argument in arguments for line in argument.assembly.split("; ")]
    ours = bytes.fromhex("".join(argument.code for argument in arguments))
    assert ours == assembled(tmp_path, lines)


def test_observer_records_common_value_of_all_calls(library):
    path, loaded = library
    (observer,) = observe(path, [("observed", [FIRST, SECOND, COUNT])])
    assert observer.observation() == Observation(called=False, values=(0, 0, 0))
    assert [loaded.calls(7, 0.0), loaded.calls(7, 0.0)] == [71, 71]
    assert observer.observation() == Observation(called=True, values=(7, 0, 14))
    loaded.calls(7, 3.0)
    assert observer.observation() == Observation(called=True, values=(7, None, 21))


def test_observer_records_calls_of_all_threads(library):
    path, loaded = library
    (observer,) = observe(path, [("observed", [COUNT, FIRST])])
    threads = [
        threading.Thread(target=lambda: [loaded.calls(3, 0.0) for _ in range(2000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert observer.observation() == Observation(called=True, values=(3 * 8000, 3))


@pytest.mark.parametrize(
    ("symbol", "reason"),
    [
        ("no_such_function", "has no"),
        ("calls", "has no jump slot for calls"),
        ("alias", "alias is another name"),
    ],
)
def test_library_with_a_function_that_cannot_be_observed_is_left_alone(library, symbol, reason):
    path, loaded = library
    with pytest.raises(GateUnavailable, match=reason):
        observe(path, [("observed", []), (symbol, [])])
    (observer,) = observe(path, [("observed", [FIRST])])  # no other tool has replaced the pointer
    assert loaded.calls(7, 0.0) == 71
    assert observer.observation() == Observation(called=True, values=(7,))


def test_library_that_is_not_loaded_cannot_be_observed(tmp_path):
    with pytest.raises(GateUnavailable, match="not loaded"):
        observe(tmp_path / "library.so", [("observed", [])])


@pytest.mark.parametrize(
    ("script", "reason"),
    [(OTHER_BUILD, "cannot be observed"), (LATE, "runtime has already started")],
    ids=["other build", "runtime before the hook"],
)
def test_hook_is_not_installed_if_attributes_are_unknown(start_program, script, reason):
    outcome = start_program(script, under="").finish()
    assert outcome.report == ["None"]
    (warning,) = outcome.errors.splitlines()
    assert reason in warning


def test_key_contains_threads_of_pools_only_on_cpus(start_program):
    outcome = start_program(PLATFORMS, under="").finish()
    assert outcome.report == ["True", "False"]
