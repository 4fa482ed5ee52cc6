"""Adds up tensors of several processes through aggregators, beside torch's own way."""

import argparse
import hashlib
import json
import math
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from graphstash import ConfigError
from graphstash.training.reduce import (
    AggregatedAllReduce,
    AggregationError,
    SparseState,
    sparse_hook,
)
from graphstash.training.reduce.aggregators import sockets

parser = argparse.ArgumentParser()
parser.add_argument("report", type=Path)
parser.add_argument("--on", choices=("gloo",))
parser.add_argument("--rank", type=int)
parser.add_argument("--world", type=int)
parser.add_argument("--rendezvous", type=Path)
parser.add_argument("--do", default="sums")
parser.add_argument("--dedicated", default="", help="addresses, with commas")
parser.add_argument("--secret", type=Path)
options = parser.parse_args()

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int32, torch.int64, torch.int8, torch.uint8),
]
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-6, torch.float64: 1e-12}


def digest(values):
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def aggregated(**arguments):
    if options.dedicated:
        arguments |= {"aggregators": options.dedicated.split(","), "secret_file": options.secret}
    return AggregatedAllReduce(**arguments)


def tensors(seed, count):
    """Tensors of all types, sizes, densities and overlaps, in blocks of 64."""
    same = random.Random(seed)
    for number in range(count):
        dtype = same.choice(DTYPES)
        elements = same.choice([0, 1, 63, 64, 65, 1000, 5000, 100_003])
        density, overlaps = same.choice([0, 0.01, 0.3, 1]), same.random() < 0.5
        mine = torch.Generator().manual_seed(number * 100 + options.rank)
        places = torch.Generator().manual_seed(number) if overlaps else mine
        keep = torch.rand(math.ceil(elements / 64), generator=places) < density
        values = (torch.randn(elements, generator=mine) * 4).to(dtype)
        values[~keep.repeat_interleave(64)[:elements]] = 0
        if number % 10 == 0 and elements and dtype.is_floating_point:
            values[elements // 2] = math.nan if options.rank else math.inf
        yield f"{number} {dtype} {elements} at {density}", values


def nonzero_blocks(values):
    return [n for n, part in enumerate(values.split(64)) if len(part) and (part != 0).any()]


def sums(made, count=24):
    """What came of each tensor, and what was sent for it."""
    cases = []
    for name, values in tensors(3, count):
        dense = values.clone()
        distributed.all_reduce(dense)
        limit = TOLERANCE.get(values.dtype, 0)
        chosen = [None] * options.world
        distributed.all_gather_object(chosen, nonzero_blocks(values))
        before = made.counters.sent_bytes, made.counters.received_bytes
        sent = made.sum_(values)
        cases.append(
            {
                "name": name,
                "equal": torch.allclose(
                    values.double(), dense.double(), rtol=limit, atol=limit, equal_nan=True
                ),
                "digest": digest(values),
                "itemsize": values.itemsize,
                "blocks": math.ceil(len(values) / 64),
                "nonzero": chosen,
                "own": sent.own_blocks,
                "union": sent.union_blocks,
                "said": sent.bitmap_bytes + sent.block_bytes,
                "sent": made.counters.sent_bytes - before[0],
                "received": made.counters.received_bytes - before[1],
            }
        )
    return {
        "cases": cases,
        "payload": made._session.payload_bytes,
        "pool": made._session._worker._slots * options.world,
        "again": made.counters.resent_datagrams,
        "ignored": made.counters.ignored_datagrams,
    }


class Lossy:
    """Loses, doubles and delays datagrams of this rank, in both directions."""

    def __init__(self, seed, share):
        self._chance, self._share = random.Random(seed), share
        self._held = {}
        self.faults = 0

    def __enter__(self):
        self._send, self._received = sockets.send, sockets.received
        sockets.send, sockets.received = self.send, self.received
        return self

    def __exit__(self, *_):
        sockets.send, sockets.received = self._send, self._received

    def _fate(self):
        fate = self._chance.random() / self._share
        self.faults += fate < 3
        return int(fate) if fate < 3 else None

    def send(self, at, datagram, to=None):
        fate = self._fate()
        for late in self._held.pop((at, "out"), []):
            self._send(at, late, to)
        if fate == 0:
            return True
        if fate == 1:
            self._send(at, datagram, to)
        if fate == 2:  # after the next one
            self._held[at, "out"] = [datagram]
            return True
        return self._send(at, datagram, to)

    def received(self, at):
        for found in self._received(at):
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


def hostile(made):
    """Sums while somebody on this host sends what they can think of."""
    stop, chance = threading.Event(), random.Random(options.rank)
    heard, said = [], 0
    addresses = list(made._session._client._addresses)
    send = sockets.send

    def listening(at, datagram, to=None):
        heard.append(bytes(datagram))
        return send(at, datagram, to)

    def attack():
        nonlocal said
        stranger = sockets.bound(("127.0.0.1", 0))
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
            said += send(stranger, bytearray(some), chance.choice(addresses))
            ours = chance.choice(made._session._client._sockets).getsockname()
            send(stranger, bytearray(some), ours)
        stranger.close()

    sockets.send = listening
    thread = threading.Thread(target=attack)
    thread.start()
    try:
        return sums(made, 16) | {"attacks": said}
    finally:
        stop.set()
        thread.join()
        sockets.send = send


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingBag(3000, 16)
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, rows, uses_all):
        found = self.rows(rows)
        if uses_all:
            found = self.unused(found)
        return self.head(found).square().mean()


def trained(hook, **arguments):
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), find_unused_parameters=True, bucket_cap_mb=0.02)
    if hook is not None:
        model.register_comm_hook(hook, sparse_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = torch.Generator().manual_seed(options.rank)
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(2):
            rows = torch.randint(0, 3000, (4, 3), generator=mine)
            if micro:
                model(rows, step % 2 == 0).backward()
            else:
                with model.no_sync():
                    model(rows, step % 2 == 0).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.module.parameters()])


def in_ddp():
    expected = trained(None)
    report = {}
    for name, arguments, dense_above, tolerance in (
        ("as it is", {}, None, 1e-6),
        ("quantized", {"quantize": True}, None, 1e-6),
        ("whole", {}, 0, 1e-6),
    ):
        with aggregated(block_size=16, **arguments) as made:
            with SparseState(through=made, dense_above=dense_above) as state:
                values = trained(state)
            report[name] = {
                "equal": torch.allclose(values, expected, rtol=tolerance, atol=tolerance),
                "digest": digest(values),
                "statistics": state.scalars(),
                "sent": made.counters.sent_bytes,
            }
    with (
        aggregated(block_size=16) as made,
        SparseState(through=made, wire_dtype=torch.bfloat16) as state,
    ):
        values = trained(state)
        report["bf16 on the wire"] = {
            "equal": torch.allclose(values, expected, rtol=2e-2, atol=2e-2),
            "digest": digest(values),
            "statistics": state.scalars(),
        }
    return report


def error_of(work):
    try:
        work()
    except (ConfigError, AggregationError, ValueError, TypeError) as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return None


def mistakes():
    told = {}
    with aggregated() as made:
        told["sizes"] = error_of(lambda: made.sum_(torch.ones(10 + options.rank)))
        told["after it"] = error_of(lambda: made.sum_(torch.ones(10)))
    with aggregated() as made:
        dtype = torch.float64 if options.rank else torch.float32
        told["types"] = error_of(lambda: made.sum_(torch.ones(10, dtype=dtype)))
    told["blocks"] = error_of(lambda: aggregated(block_size=8 + options.rank))
    told["address"] = error_of(lambda: aggregated(listen="192.0.2.1"))
    told["payload"] = error_of(lambda: aggregated(payload_bytes=70))
    told["no secret"] = error_of(lambda: aggregated(aggregators=["127.0.0.1:9"]))
    told["port"] = error_of(lambda: aggregated(listen="127.0.0.1:7171"))
    told["any address"] = error_of(lambda: aggregated(listen="0.0.0.0"))
    told["one text"] = error_of(lambda: aggregated(aggregators="a:1"))
    told["secret alone"] = error_of(lambda: aggregated(secret_file="mine"))
    told["for ever"] = error_of(lambda: aggregated(lost_after_seconds=math.inf))
    told["no time"] = error_of(lambda: aggregated(timeout_seconds=0))
    told["named twice"] = error_of(lambda: aggregated(aggregators=["a:1", "a:1"]))
    options.secret = options.rendezvous.with_suffix(f".{options.rank}")
    options.secret.write_text("1" * 32)
    options.secret.chmod(0o600)
    told["nobody"] = error_of(
        lambda: aggregated(
            aggregators=["127.0.0.1:9"], secret_file=options.secret, lost_after_seconds=1
        )
    )
    told["long name"] = error_of(
        lambda: aggregated(aggregators=["a" * 64 + ":1"], secret_file=options.secret)
    )
    with aggregated(payload_bytes=1_452) as made:
        told["imaginary"] = error_of(
            lambda: made.sum_(torch.ones(10) * 1j, wire_dtype=torch.float32)
        )
        many = torch.ones(1, dtype=torch.uint8).expand(256 * (2**32 - 2) + 1)
        told["too many"] = error_of(lambda: made.sum_(many))
        told["two dimensions"] = error_of(lambda: made.sum_(torch.ones(2, 128)))
        told["two dimensions whole"] = error_of(lambda: made.sum_whole_(torch.ones(2, 128)))
        told["too large"] = error_of(lambda: made.sum_(torch.ones(10, dtype=torch.float64)))
        told["complex"] = error_of(lambda: made.sum_(torch.ones(10, dtype=torch.complex64)))
        made.sum_(torch.ones(10))
    told["closed"] = error_of(lambda: made.sum_(torch.ones(10)))
    some = distributed.new_group([0])
    if options.rank == 0:
        with aggregated(group=some) as made:
            alone = torch.ones(3)
            told["alone"] = [made.sum_(alone).union_blocks, alone.tolist()]
            told["other ranks"] = error_of(
                lambda: SparseState(distributed.group.WORLD, through=made)
            )
    return told


def on_one_rank():
    """What goes wrong on the last rank alone, and is told on all."""
    told, is_last = {}, options.rank == options.world - 1
    python = sys.executable
    sys.executable = "/bin/echo" if is_last else python
    told["speaks first"] = error_of(aggregated)
    sys.executable = python
    size = threading.stack_size(2**50 if is_last else 0)  # more than there are addresses
    told["no thread"] = error_of(aggregated)
    threading.stack_size(size)
    send = sockets.send
    with aggregated() as made:
        if is_last:
            sockets.send = no_send
        try:
            told["own error"] = error_of(lambda: made.sum_(torch.ones(10)))
        finally:
            sockets.send = send
    return told


def no_send(at, datagram, to=None):
    sockets.send = SEND  # for the farewell
    raise ValueError("of mine")


SEND = sockets.send


def with_a_fork():
    """What a fork is told, and how the aggregator ends that the fork has a pipe to."""
    made = aggregated()
    reads, writes = os.pipe()
    fork = os.fork()
    if not fork:
        told = error_of(lambda: made.sum_(torch.ones(10)))
        os.write(writes, json.dumps(told).encode())
        signal.pause()
    told = json.loads(os.read(reads, 10_000))
    values = torch.ones(10)
    made.sum_(values)
    own = made._session._own._process
    made.close()
    os.kill(fork, signal.SIGKILL)
    os.waitpid(fork, 0)
    return told | {"sum": float(values.sum()), "status": own.returncode}


def told_to_end():
    """Sums after every process of the job was told to end, as schedulers do."""
    with aggregated() as made:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            made._session._own._process.send_signal(number)
        values = torch.ones(10)
        made.sum_(values)
        return float(values.sum())


def has_ipv6():
    """Containers often have no such address."""
    try:
        sockets.bound(("::1", 0)).close()
    except ConfigError:
        return False
    return True


def everything():
    with aggregated(block_size=64) as made:
        report = {"sums": sums(made), "whole": whole(made)}
    with aggregated(block_size=64) as again:
        report["again"] = sums(again)
    with aggregated(block_size=64, payload_bytes=1_452, slots=3) as small:
        report["small"] = sums(small)
    if has_ipv6():
        with aggregated(block_size=64, listen="::1") as other:
            report["IPv6"] = sums(other, 6)
    with aggregated(block_size=64, payload_bytes=3_000) as made, Lossy(options.rank, 0.03) as lossy:
        report["lossy"] = sums(made) | {"faults": lossy.faults}
    with aggregated(block_size=64, payload_bytes=3_000) as made:
        report["hostile"] = hostile(made)
    report["mistakes"] = mistakes()
    report["on one rank"] = on_one_rank()
    report["with a fork"] = with_a_fork()
    report["told to end"] = told_to_end()
    report["in DDP"] = in_ddp()
    report["late"] = late()
    return report


def whole(made):
    values = torch.zeros(1000)
    values[options.rank] = 1
    sent = made.sum_whole_(values)
    return {"sums": values[: options.world].tolist(), "sent": sent}


def late():
    """A rank is busy for twice as long as a silent one would be waited for."""
    with aggregated(lost_after_seconds=3) as made:
        if options.rank == 0:
            time.sleep(6)
        values = torch.ones(100_000)
        made.sum_(values)
        return {"sum": float(values.sum()), "again": made.counters.resent_bytes}


def broken():
    """Sums until somebody is killed; what this rank is told, and when."""
    made = aggregated(lost_after_seconds=3)
    own = made._session._own
    child = own._process.pid if own is not None else None
    options.report.with_suffix(".ready").write_text(
        json.dumps({"pid": os.getpid(), "child": child})
    )
    last = options.rank == options.world - 1
    for number in range(10**6):
        values = torch.ones(200_000)
        if number == 20 and last and options.do == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 20 and last and options.do == "child":
            own._process.kill()
        if number == 20:
            options.report.with_suffix(".going").touch()
        if number <= 20:  # the last sum of another rank may still be under way
            began = time.monotonic()
        if told := error_of(lambda values=values: made.sum_(values)):
            return told | {"seconds": time.monotonic() - began, "child": child}
    return None


def suspended():
    """Sums until somebody wants no more."""
    with aggregated(lost_after_seconds=6) as made:
        child = made._session._own._process.pid
        options.report.with_suffix(".ready").write_text(
            json.dumps({"pid": os.getpid(), "child": child})
        )
        for number in range(10**6):
            values = torch.ones(1000)
            values[0] = options.rendezvous.with_suffix(".enough").exists()
            if told := error_of(lambda values=values: made.sum_(values)):
                return told
            if values[0]:
                return float(values[1])
            if number == 20:
                options.report.with_suffix(".going").touch()
    return None


distributed.init_process_group(
    "gloo",
    init_method=options.rendezvous.as_uri(),
    rank=options.rank,
    world_size=options.world,
    timeout=timedelta(seconds=100),
)
torch.manual_seed(0)
done = {"sums": everything, "suspended": suspended}.get(options.do, broken)()
options.report.write_text(json.dumps(done))
if options.do == "sums":
    distributed.monitored_barrier()
os._exit(0)
