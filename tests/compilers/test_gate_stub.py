import contextlib
import ctypes
import errno
import os
import re
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from graphstash.hooks.torch_xla.elf import PAGE, libc_function
from graphstash.hooks.torch_xla.stub import LISTING, PATH_LIMIT, Block, Stub
from support.machine_code import STAT, assembled, stat_by

REPLY = struct.Struct("=Ic")


class Wired:
    """A stub whose other end the test controls instead of a gate."""

    def __init__(self, prefix, *, real=None, patience=5.0):
        self.stub = Stub(
            real=real or libc_function("__xstat", "GLIBC_2.2.5"),
            prefix=os.fsencode(str(prefix)),
            patience_seconds=patience,
        )
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.near.setblocking(False)
        block = self.stub.block
        block.socket, block.owner, block.enabled = self.far.fileno(), os.getpid(), 1

    def call(self, path):
        return stat_by(self.stub.address, path)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.near.close()
        self.far.close()


def test_machine_code_equals_assembled_listing(tmp_path):
    names = {name.upper(): getattr(Block, name).offset for name, _ in Block._fields_}
    names |= {"PAGE": PAGE, "PATH_LIMIT": PATH_LIMIT}
    lines = [f".equ {name}, {value}" for name, value in names.items()]
    lines += [text for _, text in LISTING]
    assert bytes.fromhex("".join(code for code, _ in LISTING)) == assembled(tmp_path, lines)


def test_code_page_cannot_be_written(tmp_path):
    stub = Stub(real=1, prefix=bytes(tmp_path), patience_seconds=1)
    (flags,) = re.findall(
        rf"^{stub.address:x}-\S+ (\S+)", Path("/proc/self/maps").read_text(), re.MULTILINE
    )
    assert flags == "r-xp"


def test_arguments_reach_the_real_function_unchanged_both_times():
    seen = []

    @STAT
    def real(version, path, buffer):
        seen.append((version, path, buffer))
        return -7 if len(seen) == 1 else 5

    with Wired("/p/", real=ctypes.cast(real, ctypes.c_void_p).value) as wired:
        wired.near.send(REPLY.pack(1, b"d"))
        assert STAT(wired.stub.address)(41, b"/p/x", 0x1234) == 5
        assert wired.near.recv(PATH_LIMIT) == struct.pack("=I", 1) + b"/p/x"
    assert seen == [(41, b"/p/x", 0x1234)] * 2


def test_replies_to_earlier_requests_and_heartbeats_do_not_end_the_wait(tmp_path):
    with Wired(tmp_path, patience=0.2) as wired:
        for reply in ((99, b"d"), (1, b"w"), (0, b"d")):
            wired.near.send(REPLY.pack(*reply))
        assert wired.call(tmp_path / "x") == -1
        assert wired.stub.block.give_ups == 1
        wired.near.send(REPLY.pack(1, b"d"))
        wired.near.send(REPLY.pack(2, b"d"))
        assert wired.call(tmp_path / "x") == -1
        assert wired.stub.block.give_ups == 1


def test_silence_ends_the_wait_and_leaves_errno(tmp_path):
    with Wired(tmp_path, patience=0.3) as wired:
        started = time.monotonic()
        assert wired.call(tmp_path / "x") == -1
        assert ctypes.get_errno() == errno.ENOENT
        assert 0.29 < time.monotonic() - started < 30
        assert (wired.stub.block.give_ups, wired.stub.block.busy) == (1, 0)


def test_signals_neither_end_nor_lengthen_the_wait(tmp_path):
    ticks = []
    before = signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    with Wired(tmp_path, patience=0.5) as wired:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        try:
            started = time.monotonic()
            assert wired.call(tmp_path / "x") == -1
            assert 0.49 < time.monotonic() - started < 30
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert ticks


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed connection", "full socket"])
def test_socket_that_takes_no_request_ends_the_wait_at_once(tmp_path, is_closed):
    with Wired(tmp_path, patience=60) as wired:
        if is_closed:
            wired.near.close()
        wired.far.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while not is_closed:
                wired.far.send(b"x")
        assert wired.call(tmp_path / "x") == -1
        assert wired.stub.block.give_ups == 1


def test_second_caller_at_the_same_time_is_passed_on(tmp_path):
    with Wired(tmp_path, patience=60) as wired:
        wired.stub.block.busy = 1
        assert wired.call(tmp_path / "x") == -1
        assert (wired.stub.block.sequence, wired.stub.block.give_ups) == (0, 1)


@pytest.mark.parametrize("length", [PATH_LIMIT - 1, PATH_LIMIT, PATH_LIMIT + 1000])
def test_path_is_sent_whole_or_not_at_all(length):
    path = b"/".ljust(length, b"x")
    with Wired("/", patience=0.01) as wired:
        assert wired.call(os.fsdecode(path)) == -1
        if length < PATH_LIMIT:
            assert wired.near.recv(2 * PATH_LIMIT)[4:] == path
        else:
            with pytest.raises(BlockingIOError):
                wired.near.recv(1)


@pytest.mark.parametrize("path", [b"", b"/pre", b"/prefiX", b"/other/file", None])
def test_path_outside_the_prefix_is_not_requested(path):
    with Wired("/prefix/") as wired:
        buffer = ctypes.create_string_buffer(256)
        assert STAT(wired.stub.address)(1, path, ctypes.addressof(buffer)) == -1
        assert wired.stub.block.sequence == 0
