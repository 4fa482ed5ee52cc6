"""Accounting: counts requests in memory, and writes the counts to the database periodically.

So a hit writes nothing to the database. A crash loses the counts since the last flush, on which
only statistics and the order of eviction depend.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import chain, islice
from operator import itemgetter
from typing import Final, TypeAlias

from graphstash_schema import ErrorCode
from graphstash_schema.history import Step
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.prepared import Transaction
from graphstash_server.db.queries.artifacts import MAX_TOUCHED, touch_artifacts
from graphstash_server.db.queries.history import HistoryChange, add_history, begin_of
from graphstash_server.db.queries.tokens import touch_tokens
from graphstash_server.db.queries.usage import UsageChange, add_counts, find_namespaces
from graphstash_server.errors import CorruptDatabaseError, ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.counters import Counters

__all__ = ["Accounting"]

_LOGGER = logging.getLogger(__name__)


MAX_GROUPS: Final = 128
"""Maximum number of groups in an hour or a day of a namespace's history. Clients choose job names,
and device types in misses. Further groups share the row of their kind."""

_MAX_IN_MEMORY: Final = 16_384
"""Maximum number of groups since the last flush, and of unwritten groups per hour and namespace."""

_NAMESPACES_AT_ONCE: Final = 256
"""Namespaces whose counts one transaction writes on SQLite, in some tens of milliseconds: meanwhile
no upload can commit."""

_Group: TypeAlias = tuple[str, str, str, str]
"""Namespace, kind, device type and job."""


@dataclass(slots=True)
class _Usage:
    hits: int = 0
    misses: int = 0
    served_bytes: int = 0
    puts: int = 0
    conflicts: int = 0
    saved_seconds: float = 0.0

    def add(self, other: "_Usage") -> None:
        """Add in place."""
        self.hits += other.hits
        self.misses += other.misses
        self.served_bytes += other.served_bytes
        self.puts += other.puts
        self.conflicts += other.conflicts
        self.saved_seconds += other.saved_seconds

    @property
    def change(self) -> UsageChange:
        """Counts for the namespace, without uploads, which count in their own transaction."""
        return UsageChange(
            hits=self.hits,
            misses=self.misses,
            served_bytes=self.served_bytes,
            conflicts=self.conflicts,
            saved_seconds=self.saved_seconds,
        )

    @property
    def step(self) -> HistoryChange:
        return HistoryChange(
            hits=self.hits,
            misses=self.misses,
            served_bytes=self.served_bytes,
            puts=self.puts,
            saved_compile_seconds=self.saved_seconds,
        )


class _Groups(dict[_Group, _Usage]):
    """Counters by group. Beyond the limit, new groups share the counters of their kind."""

    def __missing__(self, group: _Group) -> _Usage:
        shared = (*group[:2], "", "")
        if len(self) >= _MAX_IN_MEMORY and group != shared:
            return self[shared]
        usage = self[group] = _Usage()
        return usage

    def merge(self, other: "_Groups") -> None:
        for group, usage in other.items():
            self[group].add(usage)


_Hours: TypeAlias = defaultdict[datetime, _Groups]
"""Counts of one namespace, by the hour of the first flush after them."""


def _new_hours() -> _Hours:
    return defaultdict(_Groups)


@dataclass(slots=True)
class _Counts:
    """Changes that are not yet written. If a flush fails, it merges them back.

    Attributes:
        new: counts since the last flush, which have no hour yet.
        usage: counts that a flush failed to write, by namespace.
        uses: hits of used artifacts, by namespace. A flush takes its own time for their last use.
        token_uses: last use of each token.
    """

    new: _Groups = field(default_factory=_Groups)
    usage: defaultdict[str, _Hours] = field(default_factory=lambda: defaultdict(_new_hours))
    uses: defaultdict[str, dict[StoredKey, int]] = field(default_factory=lambda: defaultdict(dict))
    token_uses: dict[str, datetime] = field(default_factory=dict)

    def of(self, key: StoredKey, job: str) -> _Usage:
        return self.new[key.namespace, key.kind._value_, key.device_type, job]

    def use(self, key: StoredKey, hits: int) -> None:
        uses = self.uses[key.namespace]
        uses[key] = uses.get(key, 0) + hits

    def assign_hour(self, hour: datetime) -> None:
        """Assign the new counts to an hour."""
        for group, usage in self.new.items():
            self.usage[group[0]][hour][group].add(usage)
        self.new.clear()

    @property
    def namespaces(self) -> set[str]:
        return self.usage.keys() | self.uses.keys()

    def merge(self, other: "_Counts") -> None:
        for namespace, hours in other.usage.items():
            for hour, groups in hours.items():
                self.usage[namespace][hour].merge(groups)
        for uses in other.uses.values():
            for key, hits in uses.items():
                self.use(key, hits)
        self.token_uses = other.token_uses | self.token_uses


def _in_key_order(use: tuple[StoredKey, int]) -> tuple[str, ...]:
    return use[0].columns


@dataclass(kw_only=True, eq=False)
class Accounting:
    """Count the requests of this process. Its owner cancels `run` at the end and calls `flush`.

    Attributes:
        counters: counters of this host for Prometheus.
        bounded: corrects the time of a use before it changes the order of eviction.
        healed: rows dropped because their blob was lost or damaged.
        reported: reports that a stored artifact is wrong.
        refused: refused requests, by error code.
        when_written: called with the keys whose uses were written to the database.
        reads: GETs and HEADs of artifacts: `fast`, or why the fast path (`fast`) did not answer.
    """

    database: Database
    counters: Counters
    clock: Clock
    bounded: Callable[[datetime], datetime]

    def __post_init__(self) -> None:
        self._counts = _Counts()
        self._flushing = asyncio.Lock()  # the last flush must write what an earlier one merges back
        self.healed = 0
        self.reported = 0
        self.refused: Counter[ErrorCode] = Counter()
        self.when_written: Callable[[Iterable[StoredKey]], None] = lambda _: None
        self.reads: Counter[str] = Counter()

    def count_hit(
        self, key: StoredKey, *, saved_seconds: float, job: str = "", sent_bytes: int = 0
    ) -> None:
        """Count an artifact that is served from its first byte."""
        usage = self._counts.of(key, job)
        usage.hits += 1
        usage.saved_seconds += saved_seconds
        usage.served_bytes += sent_bytes
        self._counts.use(key, 1)

    def count_answer(
        self,
        key: StoredKey,
        served: tuple[int, int] | None,
        *,
        saved_seconds: float,
        job: str = "",
        sent_bytes: int = 0,
    ) -> None:
        """Count a response with an artifact, a part of it, or only its headers.

        Args:
            key: key of the artifact.
            served: half-open range of the served bytes. None for headers only.
            saved_seconds: seconds that the compilation took.
            job: name of the client's job, or empty.
            sent_bytes: bytes that are already sent. `count_served` counts the rest.
        """
        if served is not None and served[0] == 0:
            self.count_hit(key, saved_seconds=saved_seconds, job=job, sent_bytes=sent_bytes)
            return
        if sent_bytes:
            self.count_served(key, sent_bytes=sent_bytes, job=job)
        self.count_use(key)

    def count_use(self, key: StoredKey) -> None:
        """Count a use that is not a hit: a request for headers or for a later part."""
        self._counts.use(key, 0)

    def count_served(self, key: StoredKey, *, sent_bytes: int, job: str = "") -> None:
        """Count bytes that were sent."""
        self._counts.of(key, job).served_bytes += sent_bytes

    def count_miss(self, key: StoredKey, *, job: str = "") -> None:
        """Count a request for an absent artifact."""
        self._counts.of(key, job).misses += 1

    def count_put(self, key: StoredKey, *, job: str = "") -> None:
        """Count a stored artifact."""
        self._counts.of(key, job).puts += 1

    def count_conflict(self, key: StoredKey) -> None:
        """Count an upload whose bytes differ from the stored artifact's."""
        self._counts.of(key, "").conflicts += 1

    def count_token_use(self, token_id: str) -> None:
        """Record that a caller presented a valid token."""
        self._counts.token_uses[token_id] = self.clock()

    def count_healed(self) -> None:
        """Count a row that was dropped because its blob was lost or damaged."""
        self.healed += 1
        self.counters.count_healed()

    def count_reported(self) -> None:
        """Count a client's report of a wrong artifact."""
        self.reported += 1

    def count_refusal(self, code: ErrorCode) -> None:
        """Count a refused request."""
        self.refused[code] += 1
        self.counters.count_refusal(code)

    async def flush(self) -> None:
        """Write the counts to the database. The next flush retries counts that this one fails to
        write.

        Raises:
            ServerError: the database failed to write some counts.
        """
        async with self._flushing:
            counts, self._counts = self._counts, _Counts()
            counts.assign_hour(begin_of(Step.HOUR, self.clock()))
            failure: ServerError | None = None
            try:
                await self._drop_unknown(counts)
                namespaces = sorted(counts.namespaces)
                # On PostgreSQL, no namespace waits for a lock on another one. SQLite has one lock.
                most = 1 if self.database.is_postgresql else _NAMESPACES_AT_ONCE
                for start in range(0, len(namespaces), most):
                    try:
                        await self._write(namespaces[start : start + most], counts)
                    except ServerError as error:
                        failure = error  # continue with the other namespaces
                if counts.token_uses:
                    async with self.database.writing() as connection:
                        await touch_tokens(connection, counts.token_uses)
                    counts.token_uses.clear()
            finally:
                self._counts.merge(counts)
            if failure is not None:
                raise failure

    async def _drop_unknown(self, counts: _Counts) -> None:
        """Drop misses in namespaces that never stored anything: clients may invent namespaces."""
        if not counts.usage:
            return
        known = await find_namespaces(self.database, sorted(counts.usage))
        for namespace in counts.usage.keys() - known:
            del counts.usage[namespace]

    async def _write(self, namespaces: Sequence[str], counts: _Counts) -> None:
        """Write the counts of some namespaces in one transaction.

        The event loop answers requests between two parts of the uses.
        """
        used_at = self.bounded(self.clock())
        parts = list(self._parts([counts.uses.get(namespace, {}) for namespace in namespaces]))

        async def add(connection: Transaction) -> None:
            for namespace in namespaces:
                await self._add(connection, namespace, counts.usage.get(namespace, _new_hours()))

        async with self.database.writing_in_steps() as steps:
            for part in parts:  # all transactions lock artifacts, then usage, then history
                await steps.run(partial(touch_artifacts, used=part, used_at=used_at))
            await steps.run(add, is_last=True)
        for namespace in namespaces:
            counts.uses.pop(namespace, None)
            counts.usage.pop(namespace, None)
        for part in parts:
            self.when_written([key for key, _ in part])
            await asyncio.sleep(0)

    def _parts(
        self, uses: Iterable[dict[StoredKey, int]]
    ) -> Iterator[Sequence[tuple[StoredKey, int]]]:
        """Yield the uses in the order of `touch_artifacts`, at most `MAX_TOUCHED` at a time."""
        order = _in_key_order if self.database.is_postgresql else itemgetter(1)
        ordered = chain(*(sorted(of_namespace.items(), key=order) for of_namespace in uses))
        while part := list(islice(ordered, MAX_TOUCHED)):
            yield part

    async def _add(self, connection: Transaction, namespace: str, hours: _Hours) -> None:
        if hours:
            total = _Usage()
            for groups in hours.values():
                for usage in groups.values():
                    total.add(usage)
            await add_counts(connection, namespace, total.change)
        for hour, groups in sorted(hours.items()):
            changes = {group[1:]: usage.step for group, usage in groups.items() if any(usage.step)}
            await add_history(connection, namespace, hour, changes, max_groups=MAX_GROUPS)

    async def run(self, *, every_seconds: float) -> None:
        """Flush until cancelled, or until the database is corrupt."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                # A flush that is cancelled after its commit would count what it has written again.
                await asyncio.shield(self.flush())
            except CorruptDatabaseError:
                return  # the database has logged it
            except ServerError as error:
                _LOGGER.warning("could not write the usage counters, will retry: %s", error)
            except Exception:
                _LOGGER.exception("could not write the usage counters, will retry")
