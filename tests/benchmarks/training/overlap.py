"""Measure overlap: how near the executor's wall time comes to that of the slower half.

Both halves of a step are calibrated to the same time. The device half is a matrix product on one
core. The host half is one of

    sleep     waits outside the interpreter, as for files or the network
    native    computes outside the interpreter on another core, as decoding and tokenizing
    python    computes inside the interpreter, so that both halves need the interpreter lock

and the last one also runs against a device half of many small operations, each of which releases
and reacquires the lock.
"""

import statistics
import time
from functools import partial

import torch

from graphstash.training.threads import DeviceExecutor

TABLE = "Equal halves of 10 ms, one computed by the executor: wall time over the slower half"
STEPS = 50
SECONDS = 0.01  # of one half
DEPTH = 2


def measure(figures, rounds, steps):
    """Add every pair of halves, with its four arms interleaved in each round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pairs = pairs_of_halves()
        for _ in range(rounds):
            for row, (host, device) in pairs.items():
                add = partial(figures.add, TABLE, row)
                host_ms = per_step(steps, repeat, host, steps)
                serial_ms = per_step(steps, in_series, host, device, steps)
                threaded_ms = per_step(steps, threaded, host, device, steps)
                device_ms = per_step(steps, repeat, device, steps)
                slower = max(host_ms, device_ms)
                add("host ms", host_ms)
                add("device ms", device_ms)
                add("serial / slower half", serial_ms / slower)  # 1 is perfect, 2 no overlap
                add("executor / slower half", threaded_ms / slower)
    finally:
        torch.set_num_threads(threads)


def pairs_of_halves():
    tall, square, small = torch.randn(50_000, 256), torch.randn(256, 256), torch.randn(16, 16)

    def product(rows):
        torch.mm(tall[:rows], square)

    product, native = calibrate(product), calibrate(product)
    python = calibrate(partial(repeat, count))
    many = calibrate(partial(repeat, lambda: torch.mm(small, small)))
    return {
        "host: sleep; device: one product": (partial(time.sleep, SECONDS), product),
        "host: native; device: one product": (native, product),
        "host: python; device: one product": (python, product),
        "host: python; device: small operations": (python, many),
    }


def in_series(host, device, steps):
    for _ in range(steps):
        host()
        device()


def threaded(host, device, steps):
    with DeviceExecutor(depth=DEPTH) as executor:
        for _ in range(steps):
            host()
            executor.submit(device)


def count():
    total = 0
    for number in range(100):
        total += number


def calibrate(part):
    """Return the part with the size at which it takes SECONDS."""
    size = 1
    for _ in range(6):
        taken = statistics.median(per_step(1, part, size) for _ in range(5))
        size = max(1, round(size * SECONDS * 1000 / taken))
    return partial(part, size)


def repeat(part, times):
    for _ in range(times):
        part()


def per_step(steps, run, *arguments):
    """Return milliseconds per step."""
    started = time.perf_counter()
    run(*arguments)
    return (time.perf_counter() - started) / steps * 1000
