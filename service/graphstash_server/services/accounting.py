"""Accounting: counts in memory what is served, and writes the counts to the database periodically.

A hit writes nothing to the database. Counts that were not written yet are lost with the process;
only statistics and the order of eviction depend on them.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeAlias

from graphstash_schema import ErrorCode
from graphstash_schema.history import Step
from graphstash_server.clock import Clock
from graphstash_server.counters import Counters
from graphstash_server.db.engine import Database
from graphstash_server.db.prepared import Connection as Transaction
from graphstash_server.db.queries.artifacts import touch_artifacts
from graphstash_server.db.queries.history import HistoryChange, add_history, begin_of
from graphstash_server.db.queries.tokens import touch_tokens
from graphstash_server.db.queries.usage import UsageChange, add_counts, find_namespaces
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey

__all__ = ["Accounting"]

_LOGGER = logging.getLogger(__name__)


MAX_GROUPS: Final = 128
"""Of one namespace that an hour, or a day, of the history tells apart. Callers name jobs, and the
device types of misses: what is beyond counts for its kind only."""

_MAX_IN_MEMORY: Final = 16_384
"""Groups that are counted between two flushes, and those that wait in vain for one, by hour and
namespace."""

_Group: TypeAlias = tuple[str, str, str, str]
"""Namespace, kind, device type and job."""


@dataclass(slots=True)
class _Usage:
    """What is added to the counters of one group."""

    hits: int = 0
    misses: int = 0
    served_bytes: int = 0
    puts: int = 0
    conflicts: int = 0
    saved_seconds: float = 0.0

    def add(self, other: "_Usage") -> None:
        """Adds in place: a hit makes no new object."""
        self.hits += other.hits
        self.misses += other.misses
        self.served_bytes += other.served_bytes
        self.puts += other.puts
        self.conflicts += other.conflicts
        self.saved_seconds += other.saved_seconds

    @property
    def change(self) -> UsageChange:
        """Of the namespace; an upload is counted there in its own transaction."""
        return UsageChange(
            hits=self.hits,
            misses=self.misses,
            served_bytes=self.served_bytes,
            conflicts=self.conflicts,
            saved_seconds=self.saved_seconds,
        )

    @property
    def step(self) -> HistoryChange:
        """Of the history."""
        return HistoryChange(
            hits=self.hits,
            misses=self.misses,
            served_bytes=self.served_bytes,
            puts=self.puts,
            saved_compile_seconds=self.saved_seconds,
        )


class _Groups(dict[_Group, _Usage]):
    """The counters of each group; when there are too many, new ones share those of their kind."""

    def __missing__(self, group: _Group) -> _Usage:
        """The counters of a group that is new."""
        shared = (*group[:2], "", "")
        if len(self) >= _MAX_IN_MEMORY and group != shared:
            return self[shared]
        usage = self[group] = _Usage()
        return usage

    def merge(self, other: "_Groups") -> None:
        """Adds all of them."""
        for group, usage in other.items():
            self[group].add(usage)


_Hours: TypeAlias = defaultdict[datetime, _Groups]
"""What was counted in one namespace, by the hour of the flush that found it."""


@dataclass(slots=True)
class _Use:
    """How often an artifact was served, and when it was last requested."""

    hits: int
    at: datetime

    def add(self, hits: int, at: datetime) -> None:
        """Adds in place; a use that is merged back may be the older one."""
        self.hits += hits
        self.at = max(self.at, at)


def _no_hours() -> _Hours:
    return defaultdict(_Groups)


@dataclass(slots=True)
class _Counts:
    """What changed since the last flush; merged back when the flush fails.

    Attributes:
        new: counted since then.
        usage: of each namespace, what a flush has found.
        uses: of each namespace, the artifacts that were requested.
        token_uses: when each token was used last.
    """

    new: _Groups = field(default_factory=_Groups)
    usage: defaultdict[str, _Hours] = field(default_factory=lambda: defaultdict(_no_hours))
    uses: defaultdict[str, dict[StoredKey, _Use]] = field(default_factory=lambda: defaultdict(dict))
    token_uses: dict[str, datetime] = field(default_factory=dict)

    def of(self, key: StoredKey, job: str) -> _Usage:
        """The counters that a request counts in."""
        return self.new[key.namespace, key.kind._value_, key.device_type, job]

    def use(self, key: StoredKey, hits: int, at: datetime) -> None:
        uses = self.uses[key.namespace]
        before = uses.get(key)
        if before is None:
            uses[key] = _Use(hits, at)
        else:
            before.add(hits, at)

    def date(self, hour: datetime) -> None:
        """Says when it was that all that is new was counted."""
        for group, usage in self.new.items():
            self.usage[group[0]][hour][group].add(usage)
        self.new.clear()

    @property
    def namespaces(self) -> set[str]:
        """Where something changed."""
        return self.usage.keys() | self.uses.keys()

    def merge(self, other: "_Counts") -> None:
        """Adds what could not be written."""
        for namespace, hours in other.usage.items():
            for hour, groups in hours.items():
                self.usage[namespace][hour].merge(groups)
        for uses in other.uses.values():
            for key, use in uses.items():
                self.use(key, use.hits, use.at)
        self.token_uses = other.token_uses | self.token_uses


@dataclass(kw_only=True, eq=False)
class Accounting:
    """The caller of `run` cancels it and calls `flush` at the end.

    Attributes:
        counters: what this host counts for Prometheus.
        healed: rows that this process dropped because their blob was lost or damaged.
        reported: reports of wrong artifacts that this process got, of artifacts that were there.
        refused: how many requests this process refused, by code.
        when_written: called with the keys whose hits are in the database now.
        reads: how many GETs and HEADs of artifacts it got, by the way they took, see `fast`.
    """

    database: Database
    counters: Counters
    clock: Clock

    def __post_init__(self) -> None:
        self._counts = _Counts()
        self._flushing = asyncio.Lock()  # one flush at a time, so that counts merge back in order
        self.healed = 0
        self.reported = 0
        self.refused: Counter[ErrorCode] = Counter()
        self.when_written: Callable[[Iterable[StoredKey]], None] = lambda _: None
        self.reads: Counter[str] = Counter()

    def count_hit(
        self, key: StoredKey, *, saved_seconds: float, job: str = "", sent_bytes: int = 0
    ) -> None:
        """An artifact is served from its first byte, for a job."""
        usage = self._counts.of(key, job)
        usage.hits += 1
        usage.saved_seconds += saved_seconds
        usage.served_bytes += sent_bytes
        self._counts.use(key, 1, self.clock())

    def count_answer(
        self,
        key: StoredKey,
        served: tuple[int, int] | None,
        *,
        saved_seconds: float,
        job: str = "",
        sent_bytes: int = 0,
    ) -> None:
        """An artifact is answered.

        Args:
            key: its key.
            served: which bytes are, from the first to the end (exclusive); None for none of them.
            saved_seconds: what compiling it took.
            job: the one that asked; empty for none.
            sent_bytes: how many of them are known to go out; `count_served` counts others.
        """
        if served is not None and served[0] == 0:
            self.count_hit(key, saved_seconds=saved_seconds, job=job, sent_bytes=sent_bytes)
            return
        if sent_bytes:
            self.count_served(key, sent_bytes=sent_bytes, job=job)
        self.count_use(key)

    def count_use(self, key: StoredKey) -> None:
        """An artifact was requested without its bytes, or only a later part of them."""
        self._counts.use(key, 0, self.clock())

    def count_served(self, key: StoredKey, *, sent_bytes: int, job: str = "") -> None:
        """Bytes went out."""
        self._counts.of(key, job).served_bytes += sent_bytes

    def count_miss(self, key: StoredKey, *, job: str = "") -> None:
        """An artifact was requested and absent."""
        self._counts.of(key, job).misses += 1

    def count_put(self, key: StoredKey, *, job: str = "") -> None:
        """An artifact was stored."""
        self._counts.of(key, job).puts += 1

    def count_conflict(self, key: StoredKey) -> None:
        """Other bytes were uploaded for a key that has an artifact."""
        self._counts.of(key, "").conflicts += 1

    def count_token_use(self, token_id: str) -> None:
        """A caller presented a valid token."""
        self._counts.token_uses[token_id] = self.clock()

    def count_healed(self) -> None:
        """A row was dropped because its blob was lost or damaged."""
        self.healed += 1
        self.counters.count_healed()

    def count_reported(self) -> None:
        """A client reported an artifact as wrong."""
        self.reported += 1

    def count_refusal(self, code: ErrorCode) -> None:
        """A request was refused."""
        self.refused[code] += 1
        self.counters.count_refusal(code)

    async def flush(self) -> None:
        """Writes the counts to the database; when that fails they are kept for the next time.

        Raises:
            ServerError: when the database does not take them.
        """
        async with self._flushing:
            counts, self._counts = self._counts, _Counts()
            counts.date(begin_of(Step.HOUR, self.clock()))
            failure: ServerError | None = None
            try:
                await self._drop_unknown(counts)
                for namespace in sorted(counts.namespaces):
                    try:
                        await self._write(namespace, counts)
                    except ServerError as error:
                        failure = error  # the others are written all the same
                if counts.token_uses:
                    async with self.database.writing() as connection:
                        await touch_tokens(connection, counts.token_uses)
                    counts.token_uses.clear()
            finally:
                self._counts.merge(counts)
            if failure is not None:
                raise failure

    async def _drop_unknown(self, counts: _Counts) -> None:
        """Forgets misses in namespaces that nothing was ever stored in: a client can ask for any
        number of them.
        """
        if not counts.usage:
            return
        known = await find_namespaces(self.database, sorted(counts.usage))
        for namespace in counts.usage.keys() - known:
            del counts.usage[namespace]

    async def _write(self, namespace: str, counts: _Counts) -> None:
        """One transaction of one namespace, so that others do not wait for what this one waits for;
        what it has written is taken out.
        """
        uses = sorted(counts.uses.get(namespace, {}).items(), key=lambda use: use[0].columns)

        hours = counts.usage.get(namespace, _no_hours())

        async def write(connection: Transaction) -> None:
            if uses:  # artifacts, then usage, then history: the lock order of every transaction
                used = [(key, use.hits, use.at) for key, use in uses]
                await touch_artifacts(connection, used)
            if hours:
                total = _Usage()
                for groups in hours.values():
                    for usage in groups.values():
                        total.add(usage)
                await add_counts(connection, namespace, total.change)
            for hour, groups in sorted(hours.items()):
                changes = {
                    group[1:]: usage.step for group, usage in groups.items() if any(usage.step)
                }
                await add_history(connection, namespace, hour, changes, max_groups=MAX_GROUPS)

        async with self.database.writing_in_steps() as steps:
            await steps.run(write, is_last=True)
        self.when_written([key for key, _ in uses])
        counts.uses.pop(namespace, None)
        counts.usage.pop(namespace, None)

    async def run(self, *, every_seconds: float) -> None:
        """Flushes until it is cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                # A flush that is cut off may have written what it would keep for the next one.
                await asyncio.shield(self.flush())
            except ServerError as error:
                _LOGGER.warning("could not write the usage counters, will retry: %s", error)
            except Exception:
                _LOGGER.exception("could not write the usage counters, will retry")
