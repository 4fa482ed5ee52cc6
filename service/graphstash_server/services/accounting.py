"""Accounting: counts requests in memory, and writes the counts to the database periodically.

So a hit writes nothing to the database. A crash loses the counts since the last flush, on which
only statistics and the order of eviction depend. No count is written twice, except if PostgreSQL's
connection ends between a commit and its confirmation.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

from graphstash_schema import ErrorCode
from graphstash_schema.history import Step
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.prepared import Transaction
from graphstash_server.db.queries.history import HistoryChange, begin_of
from graphstash_server.db.queries.requests import (
    Requests,
    Skipped,
    UsageCounts,
    Uses,
    add_requests,
)
from graphstash_server.db.queries.tokens import touch_tokens
from graphstash_server.db.queries.usage import find_namespaces
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

MAX_AT_ONCE: Final = 256
"""Maximum number of uses, and of groups, of one transaction, which takes tens of milliseconds.
Meanwhile, uploads into its namespaces wait on PostgreSQL, and all uploads on SQLite."""

_MAX_FAILURES: Final = 3
"""Failed transactions after which a flush does not begin further ones. Each may take seconds."""

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
    def total(self) -> UsageCounts:
        """Counts for the namespace, without uploads, which count in their own transaction."""
        return UsageCounts(
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

    @property
    def requests(self) -> Requests:
        """The groups of one namespace."""
        total = _Usage()
        for usage in self.values():
            total.add(usage)
        steps = {group[1:]: usage.step for group, usage in self.items() if any(usage.step)}
        return Requests(total.total, steps)


_Namespaces: TypeAlias = defaultdict[str, _Groups]


def _new_namespaces() -> _Namespaces:
    return defaultdict(_Groups)


@dataclass(slots=True)
class _Counts:
    """Changes that are not yet written. If a flush fails, it merges them back.

    Attributes:
        new: counts since the last flush, which have no hour yet.
        usage: counts to write, by the hour of the first flush after them, and by namespace.
        uses: hits of used artifacts, by namespace. A flush takes its own time for their last use.
        token_uses: last use of each token.
    """

    new: _Groups = field(default_factory=_Groups)
    usage: defaultdict[datetime, _Namespaces] = field(
        default_factory=lambda: defaultdict(_new_namespaces)
    )
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
            self.usage[hour][group[0]][group].add(usage)
        self.new.clear()

    def merge(self, other: "_Counts") -> None:
        for hour, namespaces in other.usage.items():
            for namespace, groups in namespaces.items():
                self.usage[hour][namespace].merge(groups)
        for uses in other.uses.values():
            for key, hits in uses.items():
                self.use(key, hits)
        self.token_uses = other.token_uses | self.token_uses


class _Part(NamedTuple):
    """Counts of one transaction: uses, and the counts of some namespaces in an hour."""

    uses: Uses
    hour: datetime
    namespaces: Sequence[str]

    def split(self, skipped: Skipped) -> "list[_Part]":
        """Split skipped counts into parts that may wait for locks (see `add_requests`)."""
        uses = groupby(skipped.uses, key=lambda use: use[0].namespace)
        return [_Part(list(group), self.hour, ()) for _, group in uses] + [
            _Part((), self.hour, (name,)) for name in skipped.namespaces
        ]


@dataclass(kw_only=True, eq=False)
class Accounting:
    """Count the requests of this process. Its owner cancels `run` at the end and calls `flush`.

    Attributes:
        counters: counters of this host for Prometheus.
        bound_time: corrects the time of a use before it changes the order of eviction.
        healed: rows dropped because their blob was lost or damaged.
        reported: reports that a stored artifact is wrong.
        refused: refused requests, by error code.
        when_written: called with the keys whose uses were written to the database.
        reads: GETs and HEADs of artifacts: `fast`, or why the fast path (`fast`) did not answer.
    """

    database: Database
    counters: Counters
    clock: Clock
    bound_time: Callable[[datetime], datetime]

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
            hour = begin_of(Step.HOUR, self.clock())
            counts.assign_hour(hour)
            failure: ServerError | None = None
            try:
                await self._drop_unknown(counts)
                later: list[_Part] = []
                failed = 0
                for part in _parts(counts, hour):
                    try:
                        skipped = await self._write(part, counts)
                    except ServerError:
                        failed += 1
                        if failed == _MAX_FAILURES:
                            raise
                        skipped = Skipped(part.uses, part.namespaces)
                    later += part.split(skipped)
                for part in later:
                    try:
                        await self._write(part, counts, waits=True)
                    except ServerError as error:
                        failure = error  # continue with the other rows
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
        named = {name for namespaces in counts.usage.values() for name in namespaces}
        if not named:
            return
        known = await find_namespaces(self.database, sorted(named))
        for namespaces in counts.usage.values():
            for name in namespaces.keys() - known:
                del namespaces[name]

    async def _write(self, part: _Part, counts: _Counts, *, waits: bool = False) -> Skipped:
        """Write a part in one transaction, and drop it from the counts. Return the counts whose
        rows were locked. With `waits`, the transaction waits for them.
        """
        usage = counts.usage[part.hour]
        is_begun = False

        async def add(connection: Transaction) -> Skipped:
            nonlocal is_begun
            is_begun = True
            return await add_requests(
                connection,
                part.uses,
                {name: usage[name].requests for name in part.namespaces},
                now=self.bound_time(self.clock()),
                hour=part.hour,
                max_groups=MAX_GROUPS,
                waits=waits,
            )

        try:
            async with self.database.writing_in_steps(at_once=True) as steps:
                skipped = await steps.run(add, is_last=True)
        except asyncio.CancelledError:
            if is_begun:  # it may be committed
                self._drop_written(part, counts, Skipped())
            raise
        left = Skipped() if waits else skipped  # a transaction that has waited skips what is gone
        self._drop_written(part, counts, left)
        await asyncio.sleep(0)  # requests run between two parts
        return left

    def _drop_written(self, part: _Part, counts: _Counts, left: Skipped) -> None:
        """Drop a part from the counts, without the counts that are left to write."""
        written = dict(part.uses)
        for key, _ in left.uses:
            del written[key]
        for key in written:
            del counts.uses[key.namespace][key]
        for name in set(part.namespaces).difference(left.namespaces):
            del counts.usage[part.hour][name]
        self.when_written(written)

    async def run(self, *, every_seconds: float) -> None:
        """Flush until cancelled, or until the database is corrupt."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                # A flush that is cancelled during a write drops the counts of this write.
                await asyncio.shield(self.flush())
            except CorruptDatabaseError:
                return  # the database has logged it
            except ServerError as error:
                _LOGGER.warning("could not write the usage counters, will retry: %s", error)
            except Exception:
                _LOGGER.exception("could not write the usage counters, will retry")


def _parts(counts: _Counts, hour: datetime) -> list[_Part]:
    """Split the counts into parts of at most `MAX_AT_ONCE` uses, and about as many groups."""
    ordered = [
        use
        for _, uses in sorted(counts.uses.items())
        for use in sorted(uses.items(), key=itemgetter(1))  # see `Uses`
    ]
    parts = [ordered[start : start + MAX_AT_ONCE] for start in range(0, len(ordered), MAX_AT_ONCE)]
    counted: list[tuple[datetime, list[str]]] = []
    for of_hour, namespaces in sorted(counts.usage.items()):
        free = 0
        for name, groups in sorted(namespaces.items()):
            if free <= 0:
                counted.append((of_hour, []))
                free = MAX_AT_ONCE
            counted[-1][1].append(name)
            free -= len(groups)
    return [
        _Part(uses or (), *(named or (hour, ()))) for uses, named in zip_longest(parts, counted)
    ]
