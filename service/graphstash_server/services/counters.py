"""HostCounters: the counters of one host's workers, in shared memory.

The parent maps the memory before it forks. Each worker writes only to its own row, so no lock is
needed. The worker that serves `/metrics` sums the rows. A row outlives its worker, and the next
worker continues its counts, so a counter never decreases.
"""

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from graphstash_schema import STATUS, ErrorCode
from graphstash_server.services.buckets import Buckets
from graphstash_server.services.named_counts import NamedCounts
from graphstash_server.shared_text import SharedText

__all__ = ["BUCKETS", "Counted", "Counters", "HostCounters"]

BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Inclusive upper bounds of request durations in seconds. Waits for leases take up to a minute."""

_METHODS: Final = ("GET", "HEAD", "PUT", "POST", "DELETE", "other")
_STATUSES: Final = sorted({200, 201, 202, 204, 206, 304, 307, *STATUS.values()})


def _layout() -> Iterator[tuple[str, ...]]:
    for method in _METHODS:
        for status in (*_STATUSES, "other"):
            yield "requests", method, str(status)
    for code in ErrorCode:
        yield "refused", code.value
    for bucket in range(len(BUCKETS) + 1):
        yield "seconds", str(bucket)
    yield ("microseconds",)
    yield from (("healed",), ("leases_expired",))
    yield from (("workers",), ("waiters",), ("listening",))  # gauges: `give_back` clears them


_CELL: Final = {name: number for number, name in enumerate(_layout())}
_WORKERS, _WAITERS, _LISTENING = (_CELL[name,] for name in ("workers", "waiters", "listening"))
_SECONDS: Final = _CELL["seconds", "0"]
_REQUEST: Final = {
    (method, status): _CELL["requests", method, str(status)]
    for method in _METHODS
    for status in _STATUSES
}


class Counted(NamedTuple):
    """The sums of all workers.

    Attributes:
        requests: number of requests by method and status.
        refused: number of refused requests by error code, including those refused before routing.
        seconds: number of requests per bucket of `BUCKETS`, and last of longer requests. Artifact
            reads that bypass FastAPI (`graphstash_server.fast`) are not timed.
        healed: artifacts dropped because their blob was lost or damaged.
        leases_expired: leases that were granted to another holder after they expired.
        upstream: for each event between a region and its upstream, how often it happened.
        unrecognized_headers: for each header, the number of reads that it kept from the fast path.
        waiters: requests that wait for a lease.
        listening: processes that receive the database's notifications.
    """

    requests: dict[tuple[str, str], int]
    refused: dict[str, int]
    seconds: Sequence[int]
    total_seconds: float
    healed: int
    leases_expired: int
    upstream: dict[str, int]
    unrecognized_headers: dict[str, int]
    workers: int
    waiters: int
    listening: int


class HostCounters:
    """The rows of all workers. Create it before the workers are forked.

    Attributes:
        corruption: the first damage to the database that a worker found.
        unknown_blobs: why the reconciler keeps blobs without an artifact and artifacts without a
            blob; None if it removes them.
        rates: token buckets of the namespaces with a request rate.
        protected: token buckets for look-ups that protect artifacts, per caller and per namespace.
    """

    def __init__(self, workers: int = 1) -> None:
        """Map `workers` rows: the maximum number of workers that run at the same time."""
        size_bytes = 8 * len(_CELL)
        cells = memoryview(mmap.mmap(-1, workers * size_bytes)).cast("q")
        self._rows = [
            cells[number * len(_CELL) : (number + 1) * len(_CELL)] for number in range(workers)
        ]
        self._unrecognized_headers = [NamedCounts() for _ in range(workers)]
        self._upstream = [NamedCounts() for _ in range(workers)]
        self._free = list(range(workers))
        self.corruption = SharedText()
        self.unknown_blobs = SharedText()
        self.rates = Buckets()
        self.protected = Buckets()

    def take(self) -> int:
        """Return a free row for a process that is about to be forked."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """Free the row of a process that has ended or never started, and keep its counts."""
        for cell in (_WORKERS, _WAITERS, _LISTENING):
            self._rows[row][cell] = 0
        self._free.append(row)

    def of(self, row: int) -> "Counters":
        """Return the counters of the worker that has this row."""
        return Counters(
            self._rows[row],
            self,
            unrecognized_headers=self._unrecognized_headers[row],
            upstream=self._upstream[row],
        )

    def sums(self) -> Counted:
        """Return the sums since the server started."""
        sums = [sum(cells) for cells in zip(*self._rows, strict=True)]
        named = dict(zip(_CELL, sums, strict=True))
        buckets = len(BUCKETS) + 1
        return Counted(
            requests={key[1:]: named[key] for key in _CELL if key[0] == "requests" and named[key]},  # type: ignore[misc] # mypy does not know the key's length
            refused={key[1]: named[key] for key in _CELL if key[0] == "refused" and named[key]},
            seconds=sums[_SECONDS : _SECONDS + buckets],
            total_seconds=named["microseconds",] / 1e6,
            upstream=NamedCounts.sums(self._upstream),
            unrecognized_headers=NamedCounts.sums(self._unrecognized_headers),
            **{
                name: named[name,]
                for name in ("healed", "leases_expired", "workers", "waiters", "listening")
            },
        )


class Counters:
    """The counters of one worker. `host` has the rows of all workers."""

    def __init__(
        self,
        cells: "memoryview[int]",
        host: HostCounters,
        *,
        unrecognized_headers: NamedCounts,
        upstream: NamedCounts,
    ) -> None:
        self._cells = cells
        self._upstream = upstream
        self._unrecognized_headers = unrecognized_headers
        self.host = host

    @classmethod
    def alone(cls) -> "Counters":
        """Return the counters of a server with one process."""
        host = HostCounters()
        return host.of(host.take())

    def begin(self) -> None:
        """Mark this worker as serving, and reset the other gauges."""
        self._cells[_WORKERS] = 1
        self._cells[_WAITERS] = self._cells[_LISTENING] = 0

    def count_request(self, method: str, status: int) -> None:
        """Count an answered request."""
        cell = _REQUEST.get((method, status))
        self._cells[cell if cell is not None else _other(method, status)] += 1

    def count_seconds(self, seconds: float) -> None:
        """Record the duration of a request."""
        self._cells[_SECONDS + bisect_left(BUCKETS, seconds)] += 1
        self._cells[_CELL["microseconds",]] += int(seconds * 1e6)

    def count_refusal(self, code: ErrorCode) -> None:
        """Count a refused request."""
        self._cells[_CELL["refused", code.value]] += 1

    def count_unrecognized_headers(self, names: Iterable[str]) -> None:
        """Count a read for each header that kept it from the fast path."""
        for name in names:
            self._unrecognized_headers.count(name)

    def count_upstream(self, event: str) -> None:
        """Count an event between this region and its upstream, such as `fetch_stored`."""
        self._upstream.count(event)

    def count_healed(self) -> None:
        """Count an artifact dropped because its blob was lost or damaged."""
        self._cells[_CELL["healed",]] += 1

    def count_expired_lease(self) -> None:
        """Count an expired lease that is granted to another holder."""
        self._cells[_CELL["leases_expired",]] += 1

    def add_waiters(self, change: int) -> None:
        """Add `change`, which may be negative, to the number of requests that wait for a lease."""
        self._cells[_WAITERS] += change

    def set_listening(self, is_listening: bool) -> None:  # noqa: FBT001 - a gauge
        """Set whether this process receives the database's notifications."""
        self._cells[_LISTENING] = is_listening


def _other(method: str, status: int) -> int:
    known = method if method in _METHODS else "other"
    return _CELL["requests", known, str(status) if status in _STATUSES else "other"]
