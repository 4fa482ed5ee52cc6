"""Overlap: how near the executor's wall time comes to that of the slower half.

Both halves of a step are calibrated to the same time: the device part is a matrix product on one
core, the host part one of

    sleep     waits outside of the interpreter: reading files, the network
    native    computes outside of it on another core: decoding, tokenizing
    python    computes inside of it, so that both sides need the interpreter lock

and for the last one also against a device part of many small operations, each of which gives up the
lock and has to get it back. `python tests/benchmarks/training/overlap.py` prints the table.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from graphstash.training.threads import DeviceExecutor

__all__ = ["Row", "measure"]

STEPS = 50
SECONDS = 0.01  # of one half
DEPTH = 2


@dataclass
class Row:
    """One pair of halves; one sample per round."""

    host: str
    device: str
    host_ms: list[float] = field(default_factory=list)
    device_ms: list[float] = field(default_factory=list)
    serial_ms: list[float] = field(default_factory=list)
    threaded_ms: list[float] = field(default_factory=list)

    def to_slower_half(self, wall_ms):
        """Wall time over max(host, device), round by round: 1 is perfect, 2 is no overlap."""
        halves = zip(wall_ms, self.host_ms, self.device_ms, strict=True)
        return [wall / max(host, device) for wall, host, device in halves]

    @property
    def serial(self):
        return self.to_slower_half(self.serial_ms)

    @property
    def threaded(self):
        return self.to_slower_half(self.threaded_ms)


def measure(rounds: int, steps: int = STEPS) -> list[Row]:
    """Every pair of halves, its four arms interleaved in each round."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tall, square, small = torch.randn(50_000, 256), torch.randn(256, 256), torch.randn(16, 16)

        def product(rows):
            torch.mm(tall[:rows], square)

        product, native = calibrate(product), calibrate(product)
        python = calibrate(partial(repeat, count))
        many = calibrate(partial(repeat, lambda: torch.mm(small, small)))
        parts = [
            ("sleep", "one product", partial(time.sleep, SECONDS), product),
            ("native", "one product", native, product),
            ("python", "one product", python, product),
            ("python", "small operations", python, many),
        ]
        rows = [Row(host, device) for host, device, _, _ in parts]
        for _ in range(rounds):
            for row, (_, _, host, device) in zip(rows, parts, strict=True):
                row.host_ms.append(per_step(steps, repeat, host, steps))
                row.serial_ms.append(per_step(steps, in_series, host, device, steps))
                row.threaded_ms.append(per_step(steps, threaded, host, device, steps))
                row.device_ms.append(per_step(steps, repeat, device, steps))
        return rows
    finally:
        torch.set_num_threads(threads)


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


def calibrate(part: Callable[[int], object]) -> Callable[[], object]:
    """The part at the size at which it takes SECONDS."""
    size = 1
    for _ in range(6):
        taken = statistics.median(per_step(1, part, size) for _ in range(5))
        size = max(1, round(size * SECONDS * 1000 / taken))
    return partial(part, size)


def repeat(part, times):
    for _ in range(times):
        part()


def per_step(steps, run, *arguments):
    """Milliseconds."""
    started = time.perf_counter()
    run(*arguments)
    return (time.perf_counter() - started) / steps * 1000


def show(samples):
    return f"{statistics.median(samples):.2f} ({min(samples):.2f} to {max(samples):.2f})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    print("| host | device | host ms | device ms | serial / slower half | executor / slower half |")
    print("|---|---|---|---|---|---|")
    for row in measure(parser.parse_args().rounds):
        figures = (row.host_ms, row.device_ms, row.serial, row.threaded)
        print("|", " | ".join((row.host, row.device, *map(show, figures))), "|")
