"""Publishes: sends the artifacts of a region to its upstream, in the background.

The transaction that stores an artifact queues it, so an acknowledged artifact reaches the upstream
even if the region is killed. A process claims the publishes that it sends. If it dies, another one
sends them after the claim ends. Sending twice is harmless: the upstream keeps the first artifact.

If the upstream has other bytes for the key, the region drops its own. All regions then serve the
same executable. It also drops an artifact whose publisher may no longer write, by the token and the
policy that the upstream has by then.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from graphstash_schema import Digest, ErrorCode, Problem
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.upstream import (
    QueuedPublish,
    claim_publishes,
    count_publishes,
    end_publish,
    retry_publish,
)
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.services.artifacts.service import ArtifactService, OpenArtifact
from graphstash_server.upstream.client import Answer, UpstreamClient, UpstreamError
from graphstash_server.upstream.fetches import UPSTREAM, Fetches

__all__ = ["Publishes"]

_LOGGER = logging.getLogger(__name__)

_AT_ONCE: Final = 4
_CLAIM: Final = timedelta(seconds=30)
_PAUSE_SECONDS: Final = 2.0
"""Seconds between two looks at the queue of a process that stored nothing."""

_MAX_PAUSE: Final = timedelta(minutes=5)
_DOUBLINGS: Final = 9

_FINAL: Final = frozenset({400, 411, 412, 413, 422, 431})
"""Statuses of a refusal that no retry changes."""


_UNWANTED: Final = frozenset({ErrorCode.CONFLICT, ErrorCode.WITHHELD, ErrorCode.PUBLISHER_REFUSED})
"""Causes for which the region withdraws its artifact."""


@dataclass(kw_only=True, eq=False)
class Publishes:
    """Send queued artifacts. Cancelling it loses nothing."""

    client: UpstreamClient
    fetches: Fetches
    database: Database
    artifacts: ArtifactService
    clock: Clock

    def __post_init__(self) -> None:
        self._stored = asyncio.Event()

    def wake(self) -> None:
        """Look at the queue now."""
        self._stored.set()

    async def count(self) -> int:
        """Return the length of the queue."""
        async with self.database.reading() as connection:
            return await count_publishes(connection)

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        while True:
            await self.client.is_up.wait()
            self._stored.clear()
            try:
                sent = await self._round()
            except ServerError as error:
                _LOGGER.warning("the queue for the upstream waits for the database: %s", error)
                sent = 0
            except Exception:
                _LOGGER.exception("sending the queue failed and will be retried")
                sent = 0
            if sent < _AT_ONCE:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_SECONDS):
                        await self._stored.wait()

    async def _round(self) -> int:
        now = self.clock()
        async with self.database.writing() as connection:
            claimed = await claim_publishes(connection, now=now, until=now + _CLAIM, limit=_AT_ONCE)
        outcomes = await asyncio.gather(
            *(self._try(each) for each in claimed), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ServerError):
                _LOGGER.error("a publish failed and will be retried", exc_info=outcome)
        return len(claimed)

    async def _try(self, queued: QueuedPublish) -> None:
        try:
            outcome = await self._send(queued)
        except (UpstreamError, ShortBlobError) as error:
            _LOGGER.warning(
                "could not send %s of %s, will retry: %s",
                queued.key.key,
                queued.key.namespace,
                error,
            )
            outcome = "failed"
        self.client.count(f"publish_{outcome}")
        if outcome in {"failed", "refused"}:
            # In an outage, no process claims anything, so the pause grows for other causes only.
            pause = min(timedelta(seconds=2 ** min(queued.attempts, _DOUBLINGS)), _MAX_PAUSE)
            async with self.database.writing() as connection:
                await retry_publish(connection, queued.key, until=self.clock() + pause)

    async def _send(self, queued: QueuedPublish) -> str:
        key = queued.key
        artifact = await self.artifacts.open(key)
        if artifact is None:
            if await self.artifacts.find_stored(key) is not None:
                return "refused"  # withheld here: an administrator may release it
            async with self.database.writing() as connection:
                await end_publish(connection, key, Digest(queued.sha256, 0))
            return "gone"
        try:
            digest = artifact.row.digest
            found = await self.client.look_up(key.namespace, [key])
            await self.fetches.follow(key.namespace, found.newest_withdrawal)
            if any(each.digest == str(digest) for each in found.found):
                outcome = "sent"
            else:
                answer = await self.client.upload(
                    key,
                    digest,
                    _chunks(artifact),
                    metadata=artifact.row.metadata_header,
                    publisher=queued.publisher,
                )
                outcome = _outcome(answer)
                if outcome in {"refused", "dropped"}:
                    _LOGGER.warning(
                        "the upstream refuses %s of %s with %d, so only this region has it%s: %s",
                        key.key,
                        key.namespace,
                        answer.status,
                        "" if outcome == "dropped" else " until a retry",
                        answer.body[:300].decode(errors="replace"),
                    )
        finally:
            await artifact.reader.close()
        if outcome == "refused":
            return outcome
        if outcome == "conflict":
            await self.artifacts.delete(key, actor=UPSTREAM, digest=str(digest))
        async with self.database.writing() as connection:
            await end_publish(connection, key, digest)
        return outcome


def _outcome(answer: Answer) -> str:
    if answer.status in (200, 201):
        return "sent"
    if answer.status in (403, 409) and answer.parsed(Problem).code in _UNWANTED:
        return "conflict"
    return "dropped" if answer.status in _FINAL else "refused"


async def _chunks(artifact: OpenArtifact) -> AsyncIterator[bytes]:
    async for chunk in artifact.reader.chunks(0, artifact.reader.size_bytes):
        yield bytes(chunk)
