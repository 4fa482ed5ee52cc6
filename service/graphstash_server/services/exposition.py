"""ExpositionService: the contents of `GET /metrics`, in the text format of Prometheus.

Counters of this host come from memory that its workers share (`counters`). Every server reports the
same values of the database, so scrape them from one server only.
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from graphstash_server import __version__
from graphstash_server.db.engine import Database
from graphstash_server.db.prepared import Row
from graphstash_server.db.queries.usage import UsageChange, list_usage
from graphstash_server.errors import ServerError
from graphstash_server.logs import in_background
from graphstash_server.services.counters import BUCKETS, Counted, Counters
from graphstash_server.services.jobs.leases import LeaseService
from graphstash_server.services.named_counts import OTHER
from graphstash_server.services.plausible_clock import PlausibleClock

__all__ = ["MAX_LABELLED", "OTHER", "ExpositionService"]

MAX_LABELLED = 50
"""Maximum namespaces with series of their own: those with the most hits and misses."""

_STORED = ("size_bytes", "metadata_bytes", "manifest_bytes")

_DATABASE_SECONDS = 1.0
"""Seconds that a scrape waits for the database. If scrapes reached Prometheus' timeout, it would
report that the server is down."""


@dataclass(kw_only=True, eq=False)
class ExpositionService:
    """Collect and format metrics. Safe for concurrent calls."""

    database: Database
    counters: Counters
    leases: LeaseService
    plausible_clock: PlausibleClock
    store_limit_bytes: int | None
    region: Callable[[], Awaitable[tuple[bool, int, int]]] | None = None
    """Returns whether the upstream answers, the number of artifacts that wait for it, and the
    number of namespaces with withdrawals that the region has not applied."""

    def __post_init__(self) -> None:
        self._asking: asyncio.Task[_Asked | None] | None = None

    def without_database(self) -> bytes:
        """Return only the state of the database, which `/readyz` reports to every caller."""
        return _text([self._corrupt(), _gauge("database_up", _DATABASE_UP, 0)])

    async def read(self, *, with_database: bool = True) -> bytes:
        """Return all series. Omit those of the database unless `with_database`, or if the database
        does not answer in time.
        """
        host = list(_of_host(self.counters.host.sums(), is_postgresql=self.database.is_postgresql))
        host.append(self._corrupt())
        jump, suspended = self.plausible_clock.jump, self.plausible_clock.is_suspended
        host.append(_gauge("clock_jump_seconds", _CLOCK_JUMP, jump.total_seconds()))
        host.append(_gauge("deletion_suspended", "Whether nothing is deleted by age.", suspended))
        is_doubtful = self.counters.host.unknown_blobs.get() is not None
        host.append(_gauge("blobs_unknown", _UNKNOWN, is_doubtful))
        limit = self.store_limit_bytes
        if limit is not None:
            host.append(_gauge("store_limit_bytes", "Hard limit of all that is stored.", limit))
        answer = await self._ask_in_time() if with_database else None
        if answer is None:
            return _text([*host, _gauge("database_up", _DATABASE_UP, 0)])
        rows, held, region = answer
        if region is not None:
            host.append(_gauge("upstream_up", "Whether the upstream answers.", region[0]))
            host.append(_gauge("upstream_queued", _QUEUED, region[1]))
            host.append(_gauge("upstream_behind", _BEHIND, region[2]))

        def text() -> bytes:
            usage = {row[0]: UsageChange(*row[1:]) for row in rows}
            return _text(
                [
                    *host,
                    _gauge("database_up", _DATABASE_UP, 1),
                    _gauge("leases_held", "Leases that have not expired.", held),
                    *_of_database(usage),
                ]
            )

        return await asyncio.to_thread(text)  # slow with ten thousand namespaces

    def _corrupt(self) -> Metric:
        is_corrupt = self.database.corruption is not None
        return _gauge("database_corrupt", "Whether the database is damaged.", is_corrupt)

    async def _ask_in_time(self) -> "_Asked | None":
        """Return what the database counts, or None. Concurrent calls share one query. A timeout
        does not cancel it, because a frozen database would not free the connection earlier.
        """
        if self._asking is None or self._asking.done():
            self._asking = in_background(self._ask())
        asking = self._asking
        await asyncio.wait([asking], timeout=_DATABASE_SECONDS)
        return asking.result() if asking.done() else None

    async def _ask(self) -> "_Asked | None":
        try:
            region = await self.region() if self.region is not None else None
            return _Asked(await list_usage(self.database), await self.leases.count_held(), region)
        except ServerError:
            return None


class _Asked(NamedTuple):
    """What the database counts: usage, held leases, and the state of a region."""

    rows: Sequence[Row]
    held: int
    region: tuple[bool, int, int] | None


_BEHIND = "Namespaces with withdrawals of the upstream that this region has not applied."
_QUEUED = "Artifacts of this region that its upstream does not have yet."
_CLOCK_JUMP = "How far the clock is ahead of the time that the servers have recorded."
_UNKNOWN = "Whether the servers keep blobs and artifacts because database and store disagree."
_DATABASE_UP = "Whether the database answered this scrape."


def _of_host(counted: Counted, *, is_postgresql: bool) -> Iterable[Metric]:
    build = InfoMetricFamily("graphstash_build", "The release that runs.")
    build.add_metric([], {"version": __version__})
    yield build
    requests = _counter("requests", "Requests that were answered.", ["method", "status"])
    for labels, count in counted.requests.items():
        requests.add_metric(labels, count)
    yield requests
    refused = _counter("refused", "Requests that were refused, by error code.", ["code"])
    for code, count in counted.refused.items():
        refused.add_metric([code], count)
    yield refused
    strange = _counter(
        "strange_headers",
        "Reads that took longer because of a header, by the header's name.",
        ["name"],
    )
    for name, count in _limited(counted.unrecognized_headers).items():
        strange.add_metric([name], count)
    yield strange
    if counted.upstream:
        upstream = _counter("upstream", "Events between this region and its upstream.", ["event"])
        for event, count in counted.upstream.items():
            upstream.add_metric([event], count)
        yield upstream
    yield _histogram(counted)
    yield _counter(
        "healed", "Artifacts dropped because their blob was lost or damaged.", value=counted.healed
    )
    yield _counter(
        "leases_expired",
        "Leases that another process took, because their holder did not release them in time.",
        value=counted.leases_expired,
    )
    yield _gauge("lease_waiters", "Requests that wait for a lease.", counted.waiters)
    yield _gauge("workers", "Processes of this host that serve.", counted.workers)
    if is_postgresql:
        yield _gauge(
            "listener_connected",
            "Whether every process gets the notifications of PostgreSQL; 0 means that some poll.",
            counted.workers > 0 and counted.listening == counted.workers,
        )


def _limited(counts: dict[str, int]) -> dict[str, int]:
    """Return the largest counts, and the sum of the others."""
    shown = dict(heapq.nlargest(MAX_LABELLED, counts.items(), key=itemgetter(1)))
    rest = sum(counts.values()) - sum(shown.values())
    return {**shown, OTHER: shown.get(OTHER, 0) + rest} if rest else shown


def _histogram(counted: Counted) -> Metric:
    """Return the histogram of request times. The format requires cumulative buckets."""
    buckets = []
    total = 0
    for end, count in zip((*map(str, BUCKETS), "+Inf"), counted.seconds, strict=True):
        total += count
        buckets.append((end, float(total)))
    seconds = HistogramMetricFamily(
        "graphstash_request_seconds",
        "How long requests took, with their waits and transfers, without the reads of artifacts "
        "that are answered in front of the framework.",
    )
    seconds.add_metric([], buckets, counted.total_seconds)
    return seconds


def _of_database(usage: dict[str, UsageChange]) -> Iterable[Metric]:
    total = UsageChange(*map(sum, zip(UsageChange(), *usage.values(), strict=True)))
    for name, text, value_of in _COUNTERS:
        yield _counter(name, f"{text}, in all namespaces.", value=value_of(total))
    yield _gauge("artifacts", "Artifacts that are stored.", total.artifacts)
    yield _gauge("store_bytes", "What is stored, as the limits count it.", _bytes_of(total))

    largest = set(
        heapq.nlargest(
            MAX_LABELLED, usage, key=lambda name: (usage[name].hits + usage[name].misses, name)
        )
    )
    shown = {name: usage[name] for name in sorted(largest)}
    for name, change in usage.items():
        if name not in largest:
            shown[OTHER] = shown.get(OTHER, UsageChange()).plus(change)
    for name, text, value_of in _COUNTERS:
        metric = _counter(f"namespace_{name}", f"{text}.", ["namespace"])
        for label, change in shown.items():
            metric.add_metric([label], value_of(change))
        yield metric
    stored = GaugeMetricFamily(
        "graphstash_namespace_bytes",
        "What is stored, as the limits count it.",
        labels=["namespace"],
    )
    for label, change in shown.items():
        stored.add_metric([label], _bytes_of(change))
    yield stored


_COUNTERS = [
    ("hits", "Artifacts that were served", attrgetter("hits")),
    ("misses", "Artifacts that were asked for and absent", attrgetter("misses")),
    ("served_bytes", "Bytes of artifacts that were sent", attrgetter("served_bytes")),
    ("puts", "Artifacts that were stored", attrgetter("puts")),
    ("evictions", "Artifacts that were evicted", attrgetter("evictions")),
    (
        "saved_compile_seconds",
        "Compilers' time that hits avoided, summed",
        attrgetter("saved_seconds"),
    ),
]


def _bytes_of(change: UsageChange) -> int:
    return sum(getattr(change, name) for name in _STORED)


def _counter(
    name: str, text: str, labels: list[str] | None = None, *, value: float | None = None
) -> CounterMetricFamily:
    return CounterMetricFamily(f"graphstash_{name}", text, labels=labels, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"graphstash_{name}", text, value=value)


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _text(metrics: list[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(metrics))
    return generate_latest(registry)
