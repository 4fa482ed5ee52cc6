"""Sums of several ranks through aggregators, compared with torch's own."""

import json
import math
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, distributed

from graphstash import ConfigError
from graphstash.training.reduce import AggregatedAllReduce, SparseState, sparse_hook
from graphstash.training.reduce.aggregators import sockets
from support.aggregation_formula import rounds_of, streams_of
from support.cases.ranks import assert_same_bits, error_of, gathered
from support.cases.sums import drawn, expected, nonzero_blocks, trained

BLOCK = 64
HEADER = 72
RECEIVE = sockets.received
SEND = sockets.send


def is_last() -> bool:
    return distributed.get_rank() == distributed.get_world_size() - 1


def exact_sum(values: Tensor) -> Tensor:
    """Return the promised sum, in rank order. Sums of 16-bit types use float32."""
    is_narrow = values.dtype.is_floating_point and values.itemsize == 2
    total = torch.zeros(values.shape, dtype=torch.float32 if is_narrow else values.dtype)
    for each in gathered(values):
        total += each
    return total.to(values.dtype)


def require_sums(made: AggregatedAllReduce, count: int, *, counts_bytes: bool = True) -> None:
    """Require the promised bits on all ranks, and the bytes of the formula."""
    session: Any = made._session
    for name, values, _ in drawn(3, count, [BLOCK]):
        expected_sum, nonzero = exact_sum(values), nonzero_blocks(values, BLOCK)
        before = made.counters.sent_bytes, made.counters.received_bytes
        sent = made.sum_(values)
        torch.testing.assert_close(values, expected_sum, rtol=0, atol=0, equal_nan=True, msg=name)
        assert_same_bits(name, values)
        if not counts_bytes:
            continue
        block_bytes = BLOCK * values.itemsize + 4
        capacity = (session.payload_bytes - HEADER) // block_bytes
        pool = session._worker._slots * distributed.get_world_size()
        streams = streams_of(math.ceil(len(values) / BLOCK), capacity, pool)
        headers = HEADER * rounds_of(nonzero, capacity, streams)
        union = len(set().union(*nonzero))
        assert sent.union_blocks == union, name
        own = made.counters.sent_bytes - before[0]
        assert sent.bitmap_bytes + sent.block_bytes == own, name
        assert own == headers + sent.own_blocks * block_bytes, name
        assert made.counters.received_bytes - before[1] == headers + union * block_bytes, name


def sums(*, count: int, **arguments: Any) -> None:
    with AggregatedAllReduce(block_size=BLOCK, **arguments) as made:
        require_sums(made, count)


def sums_on_ipv6(*, count: int) -> None:
    try:  # containers often lack such an address
        sockets.bound(("::1", 0)).close()
    except ConfigError:
        return
    sums(count=count, listen="::1")


class Lossy:
    """Lose, double and delay datagrams of this rank, in both directions."""

    def __init__(self, seed: int, share: float) -> None:
        self._chance, self._share = random.Random(seed), share
        self._held: dict[tuple[Any, str], list[Any]] = {}
        self.faults = 0

    def __enter__(self) -> Self:
        sockets.send, sockets.received = self.send, self.received
        return self

    def __exit__(self, *_: object) -> None:
        sockets.send, sockets.received = SEND, RECEIVE

    def _fate(self) -> int | None:
        fate = self._chance.random() / self._share
        self.faults += fate < 3
        return int(fate) if fate < 3 else None

    def send(self, at: Any, datagram: bytearray, to: Any = None) -> bool:
        fate = self._fate()
        for late in self._held.pop((at, "out"), []):
            SEND(at, late, to)
        if fate == 0:
            return True
        if fate == 1:
            SEND(at, datagram, to)
        if fate == 2:  # after the next one
            self._held[at, "out"] = [datagram]
            return True
        return SEND(at, datagram, to)

    def received(self, at: Any) -> Iterator[Any]:
        for found in RECEIVE(at):
            fate = self._fate()
            if fate == 0:
                continue
            if fate == 1:
                yield found
            if fate == 2:
                self._held.setdefault((at, "in"), []).append(found)
                continue
            yield found
            yield from self._held.pop((at, "in"), [])


def lossy(*, count: int) -> int:
    """Return the number of bytes that were sent again."""
    with (
        AggregatedAllReduce(block_size=BLOCK, payload_bytes=3_000) as made,
        Lossy(distributed.get_rank(), 0.03) as faults,
    ):
        require_sums(made, count)
        assert faults.faults > 20
        return made.counters.resent_datagrams


def hostile(*, count: int) -> None:
    """Sum while a stranger on this host sends random, repeated and altered datagrams."""
    stop, chance = threading.Event(), random.Random(distributed.get_rank())
    heard, said = [], 0

    def listening(at: Any, datagram: bytearray, to: Any = None) -> bool:
        heard.append(bytes(datagram))
        return SEND(at, datagram, to)

    def attack(client: Any) -> None:
        nonlocal said
        stranger = sockets.bound(("127.0.0.1", 0))
        addresses = list(client._addresses)
        while not stop.wait(0.001):
            datagram = chance.choice(heard) if heard else b"?"
            some = chance.choice(
                [
                    chance.randbytes(chance.randrange(1, 3000)),
                    datagram,
                    datagram[: chance.randrange(len(datagram))] or b"!",
                    datagram[:40] + chance.randbytes(max(1, len(datagram) - 40)),
                    b"",
                ]
            )
            said += SEND(stranger, bytearray(some), chance.choice(addresses))
            SEND(stranger, bytearray(some), chance.choice(client._sockets).getsockname())
        stranger.close()

    with AggregatedAllReduce(block_size=BLOCK, payload_bytes=3_000) as made:
        session: Any = made._session
        sockets.send = listening
        thread = threading.Thread(target=attack, args=(session._client,))
        thread.start()
        try:
            while min(gathered(said)) <= 20:
                require_sums(made, count, counts_bytes=False)
        finally:
            stop.set()
            thread.join()
            sockets.send = SEND


def whole() -> None:
    """Require that a whole tensor is sent with its zeros."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    with AggregatedAllReduce(block_size=BLOCK) as made:
        values = torch.zeros(1000)
        values[rank] = 1
        assert made.sum_whole_(values) == math.ceil(1000 / BLOCK) * (BLOCK * 4 + 4) + HEADER
        assert values[:world].tolist() == [1.0] * world
        assert not values[world:].any()


DDP: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "float32": ({}, {}, 1e-6),
    "quantized": ({"quantize": True}, {}, 1e-6),
    "whole": ({}, {"dense_above": 0}, 1e-6),
    "bf16 on the wire": ({}, {"wire_dtype": torch.bfloat16}, 2e-2),
}
"""Arguments of the aggregators and of the hook's state, and the tolerance to a dense sum."""


def trains_the_same(*, name: str) -> None:
    aggregators, hook, tolerance = DDP[name]
    plain = expected(accumulate=2)
    with (
        AggregatedAllReduce(block_size=16, **aggregators) as made,
        SparseState(through=made, **hook) as state,
    ):
        values, _ = trained(lambda _: (state, sparse_hook), accumulate=2)
        scalars, sent = state.scalars(), made.counters.sent_bytes
    torch.testing.assert_close(values, plain, rtol=tolerance, atol=tolerance)
    assert_same_bits(name, values)
    if name != "bf16 on the wire":
        assert scalars["sent_bytes"] == sent
    if name == "whole":
        assert scalars["whole"] > 0
        return
    assert scalars["whole"] == 0 < scalars["looks"]
    assert 0 < scalars["density"] < scalars["union_density"] < 0.4
    assert scalars["sent_bytes"] < 0.05 * scalars["saved_bytes"]


def mistakes(*, directory: str) -> dict[str, str]:
    """Return the message of each invalid argument or tensor on this rank."""
    rank, world, messages = distributed.get_rank(), distributed.get_world_size(), {}

    def made(**arguments: Any) -> str:
        return error_of(lambda: AggregatedAllReduce(**arguments))

    with AggregatedAllReduce() as sums:
        messages["sizes"] = error_of(lambda: sums.sum_(torch.ones(10 + rank)))
        messages["after it"] = error_of(lambda: sums.sum_(torch.ones(10)))
    with AggregatedAllReduce() as sums:
        dtype = torch.float64 if rank else torch.float32
        messages["types"] = error_of(lambda: sums.sum_(torch.ones(10, dtype=dtype)))
    messages |= {
        "blocks": made(block_size=8 + rank),
        "address": made(listen="192.0.2.1"),
        "payload": made(payload_bytes=70),
        "no secret": made(aggregators=["127.0.0.1:9"]),
        "port": made(listen="127.0.0.1:7171"),
        "any address": made(listen="0.0.0.0"),
        "one text": made(aggregators="a:1"),
        "secret alone": made(secret_file="mine"),
        "for ever": made(lost_after_seconds=math.inf),
        "no time": made(timeout_seconds=0),
        "named twice": made(aggregators=["a:1", "a:1"]),
    }
    secret = Path(directory) / str(rank)
    secret.write_text("1" * 32)
    secret.chmod(0o600)
    absent = {"aggregators": ["127.0.0.1:9"], "lost_after_seconds": 1}
    messages["absent aggregator"] = made(**absent, secret_file=secret)
    messages["long name"] = made(aggregators=["a" * 64 + ":1"], secret_file=secret)
    many = torch.ones(1, dtype=torch.uint8).expand(256 * (2**32 - 2) + 1)
    with AggregatedAllReduce(payload_bytes=1_452) as sums:
        tensors = {
            "too many": many,
            "two dimensions": torch.ones(2, 128),
            "too large": torch.ones(10, dtype=torch.float64),
            "complex": torch.ones(10, dtype=torch.complex64),
        }
        messages |= {name: error_of(partial(sums.sum_, t)) for name, t in tensors.items()}
        flat = torch.ones(10) * 1j
        messages["imaginary"] = error_of(lambda: sums.sum_(flat, wire_dtype=torch.float32))
        messages["two dimensions whole"] = error_of(lambda: sums.sum_whole_(torch.ones(2, 128)))
        sums.sum_(torch.ones(10))
    messages["closed"] = error_of(lambda: sums.sum_(torch.ones(10)))
    some = distributed.new_group([0])
    if rank == 0:
        with AggregatedAllReduce(group=some) as sums:
            alone = torch.ones(3)
            assert sums.sum_(alone).union_blocks == 1
            assert alone.tolist() == [1.0, 1.0, 1.0]
            all_ranks = distributed.group.WORLD
            messages["other ranks"] = error_of(lambda: SparseState(all_ranks, through=sums))
    assert world == 3
    return messages


def on_one_rank() -> dict[str, str]:
    """Return this rank's message for each error that occurs only on the last rank."""
    messages = {}
    python = sys.executable
    sys.executable = "/bin/echo" if is_last() else python
    messages["speaks first"] = error_of(AggregatedAllReduce)
    sys.executable = python
    size = threading.stack_size(2**50 if is_last() else 0)  # more than the address space
    messages["no thread"] = error_of(AggregatedAllReduce)
    threading.stack_size(size)

    def no_send(at: Any, datagram: bytearray, to: Any = None) -> bool:
        sockets.send = SEND  # for the farewell
        raise ValueError("of mine")

    with AggregatedAllReduce() as made:
        if is_last():
            sockets.send = no_send
        try:
            messages["own error"] = error_of(lambda: made.sum_(torch.ones(10)))
        finally:
            sockets.send = SEND
    return messages


def with_a_fork() -> None:
    """Require that a fork is no rank, and that it does not keep the aggregator's process alive."""
    made = AggregatedAllReduce()
    reads, writes = os.pipe()
    fork = os.fork()
    if not fork:
        os.write(writes, error_of(lambda: made.sum_(torch.ones(10))).encode())
        signal.pause()
    assert b"is a fork of the rank's process" in os.read(reads, 10_000)
    require_ones(made)
    session: Any = made._session
    own = session._own._process
    made.close()
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    assert own.returncode == 0  # the aggregator ended at a request, not by a signal


def require_ones(made: AggregatedAllReduce) -> None:
    values = torch.ones(10)
    made.sum_(values)
    assert float(values.sum()) == 10 * distributed.get_world_size()


def told_to_end() -> None:
    """Require that aggregators ignore the signals that schedulers send to all processes."""
    with AggregatedAllReduce() as made:
        session: Any = made._session
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            session._own._process.send_signal(number)
        require_ones(made)


# Sums until a process is killed.


def note(directory: str, name: str, text: str = "") -> None:
    path = Path(directory) / f"{name}-{distributed.get_rank()}"
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").replace(path)


def begun(directory: str, made: AggregatedAllReduce) -> Any:
    """Note the pid of this rank's own aggregator, if it has one, and return its process."""
    session: Any = made._session
    own = session._own._process if session._own is not None else None
    note(directory, "child", json.dumps(own and own.pid))
    return own


def sums_until(directory: str, made: AggregatedAllReduce, at_20: Callable[[], object]) -> str:
    """Repeat a sum until it fails, and return the message. Calls `at_20` before the 20th sum."""
    for number in range(10**6):
        if number == 20:
            at_20()
            note(directory, "going")
        if message := error_of(lambda: made.sum_(torch.ones(200_000))):
            return message
    raise AssertionError("no kill has ended these sums")


def broken(*, directory: str, kills: str, **arguments: Any) -> str:
    """Sum until a process is killed: the last "rank", its "child", or one of the test."""
    made = AggregatedAllReduce(lost_after_seconds=3, **arguments)
    own = begun(directory, made)

    def kill() -> None:
        if is_last() and kills == "rank":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_last() and kills == "child":
            own.kill()

    return sums_until(directory, made, kill)


def suspended(*, directory: str) -> None:
    """Sum until the file "enough" exists. A test may suspend the whole job meanwhile."""
    with AggregatedAllReduce(lost_after_seconds=6) as made:
        begun(directory, made)
        values = torch.zeros(2)
        number = 0
        while not values[0]:
            values = torch.tensor([float((Path(directory) / "enough").exists()), 1.0])
            made.sum_(values)
            if number == 20:
                note(directory, "going")
            number += 1
        assert float(values[1]) == distributed.get_world_size()
