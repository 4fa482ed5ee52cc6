"""Accounting: counts in memory what is served, and writes the counts to the database periodically.

A hit writes nothing to the database. Counts that were not written yet are lost with the process;
only statistics and the order of eviction depend on them.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from graphstash_schema import ErrorCode
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import touch_artifacts
from graphstash_server.db.queries.tokens import touch_tokens
from graphstash_server.db.queries.usage import UsageChange, add_counts
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey

__all__ = ["Accounting"]

_LOGGER = logging.getLogger(__name__)


@dataclass(slots=True)
class _Counts:
    """What changed since the last flush; merged back when the flush fails."""

    usage: dict[str, UsageChange] = field(default_factory=dict)
    uses: dict[StoredKey, tuple[int, datetime]] = field(default_factory=dict)
    token_uses: dict[str, datetime] = field(default_factory=dict)

    def add(self, namespace: str, change: UsageChange) -> None:
        before = self.usage.get(namespace, _NOTHING)
        self.usage[namespace] = before.plus(change)

    def use(self, key: StoredKey, hits: int, at: datetime) -> None:
        before = self.uses.get(key)
        self.uses[key] = (hits, at) if before is None else (before[0] + hits, max(before[1], at))


_NOTHING = UsageChange()


class Accounting:
    """The caller of `run` cancels it and calls `flush` at the end.

    Attributes:
        healed: rows that this process dropped because their blob was lost or damaged.
        reported: reports of wrong artifacts that this process got, of artifacts that were there.
        refused: how many requests this process refused, by code.
    """

    def __init__(self, *, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._counts = _Counts()
        self._flushing = asyncio.Lock()  # one flush at a time, so that counts merge back in order
        self.healed = 0
        self.reported = 0
        self.refused: Counter[ErrorCode] = Counter()

    def count_hit(self, key: StoredKey, *, saved_seconds: float) -> None:
        """An artifact is served from its first byte."""
        self._counts.add(key.namespace, UsageChange(hits=1, saved_seconds=saved_seconds))
        self._counts.use(key, 1, self._clock())

    def count_use(self, key: StoredKey) -> None:
        """An artifact was requested without its bytes, or only a later part of them."""
        self._counts.use(key, 0, self._clock())

    def count_served(self, key: StoredKey, *, sent_bytes: int) -> None:
        """Bytes went out."""
        self._counts.add(key.namespace, UsageChange(served_bytes=sent_bytes))

    def count_miss(self, key: StoredKey) -> None:
        """An artifact was requested and absent."""
        self._counts.add(key.namespace, UsageChange(misses=1))

    def count_conflict(self, key: StoredKey) -> None:
        """Other bytes were uploaded for a key that has an artifact."""
        self._counts.add(key.namespace, UsageChange(conflicts=1))

    def count_token_use(self, token_id: str) -> None:
        """A caller presented a valid token."""
        self._counts.token_uses[token_id] = self._clock()

    def count_healed(self) -> None:
        """A row was dropped because its blob was lost or damaged."""
        self.healed += 1

    def count_reported(self) -> None:
        """A client reported an artifact as wrong."""
        self.reported += 1

    def count_refusal(self, code: ErrorCode) -> None:
        """A request was refused."""
        self.refused[code] += 1

    async def flush(self) -> None:
        """Writes the counts to the database; when that fails they are kept for the next time.

        Raises:
            ServerError: when the database does not take them.
        """
        async with self._flushing:
            counts, self._counts = self._counts, _Counts()
            if not counts.usage and not counts.uses and not counts.token_uses:
                return
            try:
                async with self._database.writing() as connection:
                    if counts.uses:  # artifacts, then usage: the lock order of every transaction
                        await touch_artifacts(
                            connection,
                            [
                                (key, *counts.uses[key])
                                for key in sorted(counts.uses, key=lambda key: key.columns)
                            ],
                        )
                    await add_counts(connection, counts.usage)
                    if counts.token_uses:
                        await touch_tokens(connection, counts.token_uses)
            except BaseException:
                for namespace, change in counts.usage.items():
                    self._counts.add(namespace, change)
                for key, (hits, at) in counts.uses.items():
                    self._counts.use(key, hits, at)
                self._counts.token_uses = counts.token_uses | self._counts.token_uses
                raise

    async def run(self, *, every_seconds: float) -> None:
        """Flushes until it is cancelled."""
        while True:
            await asyncio.sleep(every_seconds)
            try:
                await self.flush()
            except ServerError as error:
                _LOGGER.warning("could not write the usage counters, will retry: %s", error)
            except Exception:
                _LOGGER.exception("could not write the usage counters, will retry")
