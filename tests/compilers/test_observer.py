import ctypes
import json
import re
import subprocess
import sys
import threading

import pytest

from graphstash.hooks.torch_xla.elf import GateUnavailable
from graphstash.hooks.torch_xla.observer import (
    ADDED,
    COMPARED,
    FINISH,
    Argument,
    Observation,
    Observer,
)

FIRST = Argument("first", "48 89 f8", "mov rax, rdi")
SECOND = Argument("second", "f2 48 0f 2d c0", "cvtsd2si rax, xmm0")
COUNT = Argument("count", "48 89 f8", "mov rax, rdi", is_added=True)

SOURCE = """
long observed(long first, double second) { return first * 10 + (long)second; }
long calls(long first, double second) { return observed(first, second) + 1; }
static long hidden(long first) { return first; }
long calls_hidden(long first) { return hidden(first); }
"""

OTHER_BUILD = """
import dataclasses
import json
import logging

import torch_xla

from graphstash.hooks.torch_xla import hook
from graphstash.hooks.torch_xla import omitted

messages = []
logging.getLogger("graphstash").addFilter(lambda record: messages.append(record.getMessage()))
omitted.OPERATIONS = (
    dataclasses.replace(omitted.OPERATIONS[0], symbols=("_ZN9torch_xla4CeluEv",)),
)
print(json.dumps({"installed": hook.install(None) is not None, "messages": messages}))
"""

LATE = """
import json
import logging

import torch
import torch_xla

from graphstash.hooks.torch_xla import hook

messages = []
logging.getLogger("graphstash").addFilter(lambda record: messages.append(record.getMessage()))
pending = torch.ones(2, device=torch_xla.device()) + 1
print(json.dumps({"installed": hook.install(None) is not None, "messages": messages}))
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


def operations():
    from graphstash.hooks.torch_xla.omitted import OPERATIONS

    return OPERATIONS


def assembled(tmp_path, lines):
    source, made, raw = (tmp_path / name for name in ("code.s", "code.o", "code.bin"))
    source.write_text("\n".join([".intel_syntax noprefix", *lines]) + "\n")
    subprocess.run(["as", "-o", made, source], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", made, raw], check=True)
    return raw.read_bytes()


@pytest.mark.parametrize("listing", [COMPARED, ADDED, FINISH])
def test_machine_code_equals_assembled_listing(tmp_path, listing):
    lines = [re.sub(r"\{\w+\}", "0x11223344", text) for _, text in listing]
    distance = (0x11223344).to_bytes(4, "little").hex()
    ours = "".join(code + (distance if "{" in text else "") for code, text in listing)
    assert bytes.fromhex(ours) == assembled(tmp_path, lines)


def test_assembled_code_loads_arguments_of_torch_xla(tmp_path):
    arguments = [argument for each in operations() for argument in each.arguments]
    lines = [line for argument in arguments for line in argument.assembly.split("; ")]
    ours = bytes.fromhex("".join(argument.code for argument in arguments))
    assert ours == assembled(tmp_path, lines)


def test_observer_records_common_value_of_all_calls(library):
    path, loaded = library
    observer = Observer(path, "observed", [FIRST, SECOND, COUNT])
    assert observer.observation() == Observation(called=False, values=(0, 0, 0))
    assert [loaded.calls(7, 0.0), loaded.calls(7, 0.0)] == [71, 71]
    assert observer.observation() == Observation(called=True, values=(7, 0, 14))


def test_observer_records_that_values_differ(library):
    path, loaded = library
    observer = Observer(path, "observed", [FIRST, SECOND])
    assert [loaded.calls(0, 3.0), loaded.calls(1, 3.0)] == [4, 14]
    assert observer.observation() == Observation(called=True, values=(None, 3))


def test_observer_records_calls_of_all_threads(library):
    path, loaded = library
    observer = Observer(path, "observed", [COUNT, FIRST])
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
    ("symbol", "reason"), [("no_such_function", "has no"), ("calls", "has no jump slot for calls")]
)
def test_function_that_is_not_called_through_a_pointer_cannot_be_observed(library, symbol, reason):
    path, _ = library
    with pytest.raises(GateUnavailable, match=reason):
        Observer(path, symbol, [])


def test_library_that_is_not_loaded_cannot_be_observed(tmp_path):
    with pytest.raises(GateUnavailable, match="not loaded"):
        Observer(tmp_path / "library.so", "observed", [])


@pytest.mark.parametrize(
    ("script", "reason"),
    [(OTHER_BUILD, "cannot be observed"), (LATE, "already recorded operations")],
    ids=["other build", "operations before the hook"],
)
def test_hook_is_not_installed_if_attributes_are_unknown(script, reason, monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["installed"] is False
    assert len(told["messages"]) == 1
    assert reason in told["messages"][0]
