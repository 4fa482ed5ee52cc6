import ctypes
import logging
import os
import platform
import threading
import time
from pathlib import Path

import pytest
import zstandard.backend_c

from graphstash.hooks.torch_xla import answering
from graphstash.hooks.torch_xla import gate as gate_module
from graphstash.hooks.torch_xla import stub as stub_module
from graphstash.hooks.torch_xla.elf import find_slot, libc_function, read_pointer
from graphstash.hooks.torch_xla.gate import GateUnavailable, StatGate
from graphstash.hooks.torch_xla.stub import PATH_LIMIT
from support.machine_code import stat_by
from support.waiting import until

A_LIBRARY = Path(zstandard.backend_c.__file__)


def count_descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def gate_threads():
    return [each for each in threading.enumerate() if each.name.startswith("graphstash-gate")]


class Slot:
    """A stand-in for a library's jump slot: eight bytes with the address of `__xstat`."""

    def __init__(self):
        self.real = libc_function("__xstat", "GLIBC_2.2.5")
        self.cell = ctypes.c_uint64(self.real)

    def call(self, path):
        return stat_by(self.cell.value, path)


@pytest.fixture
def slot(monkeypatch):
    slot = Slot()
    monkeypatch.setattr(gate_module, "find_slot", lambda *_: ctypes.addressof(slot.cell))
    return slot


@pytest.fixture
def open_gate(slot, tmp_path):
    gates = []

    def make(answer, *, liveness_seconds=5.0):
        gate = StatGate(A_LIBRARY, f"{tmp_path}/", answer, liveness_seconds=liveness_seconds)
        gates.append(gate)
        gate.open()
        return gate

    yield make
    for gate in gates:
        gate.close()


def test_slot_of_a_loaded_library_holds_the_imported_function():
    assert read_pointer(find_slot(A_LIBRARY, "clock")) == libc_function("clock", "GLIBC_2.2.5")


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        (lambda: StatGate(A_LIBRARY, "/x/", print).open(), "no jump slot for __xstat"),
        (lambda: StatGate(Path("/x/lib.so"), "/x/", print).open(), "not loaded"),
        (lambda: libc_function("no_such_function", "GLIBC_2.2.5"), "has no no_such_function"),
    ],
)
def test_library_or_function_that_is_absent_is_refused(use, reason):
    with pytest.raises(GateUnavailable, match=reason):
        use()


def test_answer_is_asked_once_for_each_missing_file_below_the_prefix(slot, open_gate, tmp_path):
    seen: list[str] = []

    def answer(path):
        seen.append(path)
        Path(path).touch()

    gate = open_gate(answer)
    assert gate.requests == 0
    assert list(tmp_path.iterdir()) == []
    strange = tmp_path / os.fsdecode(b"\xff\n")
    assert slot.call(tmp_path.parent / "missing") == -1
    assert slot.call(strange) == slot.call(strange) == 0
    assert seen == [str(strange)]
    assert (gate.requests, gate.give_ups) == (1, 0)


def test_caller_waits_for_answer_that_takes_longer_than_the_liveness_time(
    slot, open_gate, tmp_path
):
    def answer(path):
        time.sleep(3)
        Path(path).touch()

    gate = open_gate(answer, liveness_seconds=2)
    assert slot.call(tmp_path / "x") == 0
    assert gate.give_ups == 0


def test_caller_continues_if_python_cannot_run(slot, open_gate, tmp_path):
    seen: list[str] = []

    def answer(path):
        seen.append(Path(path).name)
        if len(seen) == 1:
            ctypes.PyDLL(None).usleep(2_000_000)  # holds the interpreter's lock

    gate = open_gate(answer, liveness_seconds=1.5)
    assert slot.call(tmp_path / "one") == -1
    assert gate.give_ups == 1
    assert slot.call(tmp_path / "two") == -1
    assert (gate.requests, gate.give_ups) == (2, 1)
    assert seen == ["one", "two"]


def test_request_given_up_is_still_answered_in_order(slot, open_gate, tmp_path, monkeypatch):
    monkeypatch.setattr(gate_module, "_HEARTBEATS_PER_LIVENESS", 0.01)
    may_finish = threading.Event()
    finished: list[str] = []

    def answer(path):
        may_finish.wait(60)
        finished.append(Path(path).name)

    gate = open_gate(answer, liveness_seconds=0.3)
    for name in ("one", "two"):
        slot.call(tmp_path / name)
    assert gate.give_ups == 2
    may_finish.set()
    until(lambda: len(finished) == 2)
    assert finished == ["one", "two"]


def test_failing_answer_is_logged_and_next_request_is_answered(slot, open_gate, tmp_path, caplog):
    def answer(path):
        if path.endswith("bad"):
            raise ValueError(path)
        Path(path).touch()

    gate = open_gate(answer)
    with caplog.at_level(logging.ERROR, "graphstash"):
        assert slot.call(tmp_path / "bad") == -1
    assert [record.name for record in caplog.records] == ["graphstash"]
    assert slot.call(tmp_path / "good") == 0
    assert gate.give_ups == 0


def test_closing_restores_the_slot_and_ends_threads_and_descriptors(slot, open_gate, tmp_path):
    seen: list[str] = []
    gate = open_gate(seen.append)
    stub = slot.cell.value
    assert stub != slot.real
    assert len(gate_threads()) == 2
    for _ in range(2):
        gate.close()
    assert slot.cell.value == slot.real
    assert not gate_threads()
    assert stat_by(stub, tmp_path / "x") == -1  # a thread that had loaded the pointer before
    assert seen == []
    descriptors, times = count_descriptors(), 100
    for _ in range(times):
        gate.open()
        gate.close()
    assert count_descriptors() < descriptors + times  # others may open some meanwhile
    for _ in range(2):
        gate.open()
    assert slot.call(tmp_path / "x") == -1
    assert len(seen) == gate.requests == 1
    gate.close()


def test_closing_releases_waiting_caller(slot, open_gate, tmp_path, monkeypatch):
    # The answer takes longer than `close` waits.
    monkeypatch.setattr(answering, "_LEAVE_SECONDS", 0.1)
    asked, may_end = threading.Event(), threading.Event()

    def answer(path):
        asked.set()
        may_end.wait(60)

    gate = open_gate(answer)
    results: list[int] = []
    caller = threading.Thread(target=lambda: results.append(slot.call(tmp_path / "x")))
    caller.start()
    assert asked.wait(60)
    gate.close()
    caller.join(30)
    assert results == [-1]
    may_end.set()


def test_closing_keeps_slot_changed_by_another_tool(slot, open_gate):
    gate = open_gate(print)
    slot.cell.value = 1234
    gate.close()
    assert slot.cell.value == 1234


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_forked_child_sends_no_request_until_it_has_threads(slot, open_gate, tmp_path):
    seen: list[str] = []

    def answer(path):
        seen.append(Path(path).name)
        Path(path).touch()

    gate = open_gate(answer)
    slot.call(tmp_path / "parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert slot.call(tmp_path / "early") == -1
            gate.reopen_in_child()
            assert slot.call(tmp_path / "child") == 0
            assert (gate.requests, gate.give_ups) == (1, 0)
            gate.close()
            assert slot.cell.value == slot.real
            assert seen == ["parent", "child"]
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0) == (child, 0)
    assert slot.call(tmp_path / "after") == 0
    assert seen == ["parent", "after"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_child_closing_inherited_gate_keeps_gate_of_parent(slot, open_gate, tmp_path):
    gate = open_gate(lambda path: Path(path).touch())
    child = os.fork()
    if child == 0:
        gate.close()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert slot.call(tmp_path / "after") == 0


def assert_refused(slot, prefix, reason):
    before = slot.cell.value
    with pytest.raises(GateUnavailable, match=reason):
        StatGate(A_LIBRARY, prefix, print).open()
    assert slot.cell.value == before
    assert not gate_threads()


def no_new_code(*_):
    raise GateUnavailable("mprotect failed: Permission denied")


@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        (platform, "machine", lambda: "aarch64", "64-bit x86"),
        (stub_module, "protect", no_new_code, "mprotect failed"),
        (
            stub_module,
            "LISTING",
            (("b8 ff ff ff ff", "mov eax, -1"), ("c3", "ret")),
            "self-test: an existing file",
        ),
    ],
    ids=["other machine", "kernel that forbids new code", "stub that does not work"],
)
def test_host_without_requirements_of_the_gate_is_refused(
    slot, tmp_path, monkeypatch, module, name, value, reason
):
    monkeypatch.setattr(module, name, value)
    assert_refused(slot, f"{tmp_path}/", reason)


def test_slot_changed_by_another_tool_is_refused(slot, tmp_path):
    slot.cell.value += 16
    assert_refused(slot, f"{tmp_path}/", "another tool")


def test_directory_in_which_no_file_can_be_made_is_refused(slot, tmp_path):
    assert_refused(slot, f"{tmp_path}/no-such-directory/", "self-test: a file made by the answer")


@pytest.mark.parametrize("prefix", ["", "/a\0b", "/" * PATH_LIMIT])
def test_prefix_that_no_path_begins_with_is_refused(prefix):
    with pytest.raises(ValueError, match="prefix"):
        StatGate(A_LIBRARY, prefix, print)


def test_zero_liveness_time_is_refused():
    with pytest.raises(ValueError, match="liveness_seconds"):
        StatGate(A_LIBRARY, "/x/", print, liveness_seconds=0)
