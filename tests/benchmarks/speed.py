"""Watch how fast a core computes, to tell a slow processor from a slow server.

    python -m benchmarks.speed CORE < pipe > samples

Every 4 ms, a process on the core hashes the same bytes and measures how long that takes, until its
input ends. The output is a pickle of the samples: seconds of the monotonic clock, and the duration.
"""

import gc
import hashlib
import pickle
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

EVERY_SECONDS = 0.004
SLOW = 1.5  # times the median
DATA = bytes(16 * 1024)
PRIORITY = "20"  # above the servers and the generator


@contextmanager
def watch(cores, *, is_realtime):
    """Watch cores in a block. Yield a list that has a list of samples for each core after it."""
    samples = []
    watchers = [
        subprocess.Popen(
            [
                *("taskset", "--cpu-list", str(core)),
                *(("chrt", "--fifo", PRIORITY) if is_realtime else ()),
                *(sys.executable, "-m", __name__),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for core in cores
    ]
    try:
        yield samples
    finally:
        samples += [pickle.loads(watcher.communicate()[0]) for watcher in watchers]


def slow_times(samples):
    """Return when the samples took longer than `SLOW` times their median."""
    usual = statistics.median(took for _, took in samples)
    return [at for at, took in samples if took > SLOW * usual]


def sample(until):
    """Return the samples taken until an event."""
    samples = []
    while not until.wait(EVERY_SECONDS):
        hashlib.sha256(DATA[:4096]).digest()  # the first pages may have left the cache
        began = time.monotonic()
        hashlib.sha256(DATA).digest()
        samples.append((began, time.monotonic() - began))
    return samples


if __name__ == "__main__":
    gc.disable()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    pickle.dump(sample(ended), sys.stdout.buffer)
