"""Publishes: sends the artifacts of a region to its upstream, in the background.

The transaction that stores an artifact queues it, so an acknowledged artifact reaches the upstream
even if the region is killed. A process claims the publishes that it sends. If it dies, another one
sends them after the claim ends, within half a minute. Sending twice is harmless: the upstream keeps
the first artifact.

If the upstream has other bytes for the key, the region drops its own. All regions then serve the
same executable. It also drops an artifact whose publisher may no longer write, by the token and the
policy that the upstream has by then.

Nothing is sent before the region has applied the withdrawals of its namespace. Otherwise bytes that
the upstream deleted while the region was cut off would return to it. The upload names the last of
these withdrawals, and the upstream refuses it after a later one of the same bytes.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from graphstash_schema import Digest, ErrorCode, Problem
from graphstash_schema.names import LIST_START, ListPosition
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.upstream import (
    QueuedPublish,
    claim_publishes,
    count_publishes,
    end_publish,
    find_position,
    renew_publish,
    retry_publish,
)
from graphstash_server.db.queries.withdrawals import is_listed_as_withheld
from graphstash_server.errors import ServerError, ShortBlobError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.service import ArtifactService, OpenArtifact
from graphstash_server.services.artifacts.uploads import Upload, withheld
from graphstash_server.upstream.claims import CLAIM, keep_renewed
from graphstash_server.upstream.client import Answer, UpstreamClient, UpstreamError
from graphstash_server.upstream.fetches import Fetches
from graphstash_server.upstream.setting_aside import UPSTREAM

__all__ = ["Publishes"]

_LOGGER = logging.getLogger(__name__)

_AT_ONCE: Final = 4
"""Concurrent publishes of a process."""

_PAUSE_SECONDS: Final = 2.0
"""Seconds between two looks at the queue of a process that stored nothing."""

_MAX_PAUSE: Final = timedelta(minutes=5)
_DOUBLINGS: Final = 9

_WITHDRAWALS_PAUSE: Final = timedelta(seconds=1)
"""Pause of a publish that waits for withdrawals."""

_FINAL: Final = frozenset({400, 411, 413, 422, 431})
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
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look at the queue now."""
        self._woken.set()

    async def count(self) -> int:
        """Return the length of the queue."""
        async with self.database.reading() as connection:
            return await count_publishes(connection)

    async def admit(self, upload: Upload) -> None:
        """Refuse bytes that the upstream has withheld, even while it does not answer. Follow the
        withdrawals of the namespace from now on.

        Raises:
            ServerError: 409, and nothing of the body was read.
        """
        await self.fetches.follow(upload.key.namespace)
        async with self.database.reading() as connection:
            is_listed = await is_listed_as_withheld(connection, upload.key, upload.digest)
        if is_listed and not await self._is_released(upload.key):
            raise withheld(upload, upload.digest)

    async def _is_released(self, key: StoredKey) -> bool:
        if not self.client.is_up.is_set():
            return False
        try:
            found = await self.client.look_up(key.namespace, [key])
        except UpstreamError:
            return False
        return not found.withdrawn

    async def run(self) -> None:
        """Send what is queued, until cancelled. A slow upload delays no other one."""
        sending: set[asyncio.Task[None]] = set()

        def end(task: asyncio.Task[None]) -> None:
            sending.discard(task)
            self.wake()

        async with asyncio.TaskGroup() as tasks:
            while True:
                await self.client.is_up.wait()
                self._woken.clear()
                for queued in await self._claim(_AT_ONCE - len(sending)):
                    task = tasks.create_task(self._try(queued))
                    sending.add(task)
                    task.add_done_callback(end)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_SECONDS):
                        await self._woken.wait()

    async def _claim(self, limit: int) -> list[QueuedPublish]:
        if limit == 0:
            return []
        now = self.clock()
        try:
            async with self.database.writing() as connection:
                return await claim_publishes(connection, now=now, until=now + CLAIM, limit=limit)
        except ServerError as error:
            _LOGGER.warning("the queue for the upstream waits for the database: %s", error)
        except Exception:
            _LOGGER.exception("the queue for the upstream cannot be read, will retry")
        return []

    async def _try(self, queued: QueuedPublish) -> None:
        """Send an artifact, and count how that ended. An exception leaves it queued."""

        async def renew(pause: timedelta = CLAIM) -> None:
            async with self.database.writing() as connection:
                digest, until = Digest(queued.sha256, 0), self.clock() + pause
                await renew_publish(connection, queued.key, digest, until=until)

        try:
            async with keep_renewed(renew):
                outcome = await self._send_or_fail(queued)
            if outcome == "early":
                await renew(_WITHDRAWALS_PAUSE)
                return
            self.client.count(f"publish_{outcome}")
            if outcome in {"failed", "refused"}:
                # In an outage, no process claims anything, so the pause grows for other causes
                # only.
                seconds = 2 ** min(queued.attempts, _DOUBLINGS)
                pause = min(timedelta(seconds=seconds), _MAX_PAUSE)
                async with self.database.writing() as connection:
                    await retry_publish(connection, queued.key, until=self.clock() + pause)
        except ServerError as error:
            _LOGGER.warning("could not send %s, will retry: %s", queued.key.key, error)
        except Exception:
            _LOGGER.exception("sending %s failed and will be retried", queued.key.key)

    async def _send_or_fail(self, queued: QueuedPublish) -> str:
        try:
            return await self._send(queued)
        except (UpstreamError, ShortBlobError) as error:
            _LOGGER.warning(
                "could not send %s of %s, will retry: %s",
                queued.key.key,
                queued.key.namespace,
                error,
            )
            return "failed"

    async def _send(self, queued: QueuedPublish) -> str:
        key = queued.key
        artifact = await self.artifacts.open(key)
        if artifact is not None and artifact.row.digest.sha256 != queued.sha256:
            await artifact.reader.close()
            artifact = None
        if artifact is None:
            stored = await self.artifacts.find_row(key)
            if stored is not None and stored.digest.sha256 == queued.sha256:
                # An administrator may release it, and an absent blob may be back soon.
                return "refused"
            async with self.database.writing() as connection:
                await end_publish(connection, key, Digest(queued.sha256, 0))
            return "gone"
        try:
            digest = artifact.row.digest
            found = await self.client.look_up(key.namespace, [key])
            newest = ListPosition(found.newest_withdrawal or LIST_START)
            await self.fetches.follow(key.namespace)
            if any(each.digest == str(digest) for each in found.found):
                outcome = "sent"
            elif not await self._may_send(key, digest, newest):
                return "early"
            else:
                answer = await self.client.upload(
                    key,
                    digest,
                    _chunks(artifact),
                    metadata=artifact.row.metadata_header,
                    publisher=queued.publisher,
                    withdrawals=newest,
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
        if outcome in {"refused", "early"}:
            return outcome
        if outcome == "conflict":
            withdrawn = await self.artifacts.withdraw(key, actor=UPSTREAM, digest=str(digest))
            if withdrawn is not None:
                self.artifacts.collect_soon(withdrawn)
        async with self.database.writing() as connection:
            await end_publish(connection, key, digest)
        return outcome

    async def _may_send(self, key: StoredKey, digest: Digest, newest: ListPosition) -> bool:
        """Return whether the region has applied all withdrawals, and none withdrew the artifact
        since it was opened.
        """
        async with self.database.reading() as connection:
            applied = await find_position(connection, key.namespace) or LIST_START
        if applied.number < newest.number:
            return False
        stored = await self.artifacts.find_row(key)
        return stored is not None and stored.digest == digest and stored.withheld_at is None


def _outcome(answer: Answer) -> str:
    if answer.status in (200, 201):
        return "sent"
    if answer.status == 412:  # withdrawn since the upstream was asked
        return "early"
    if answer.status in (403, 409) and answer.parse(Problem).code in _UNWANTED:
        return "conflict"
    return "dropped" if answer.status in _FINAL else "refused"


async def _chunks(artifact: OpenArtifact) -> AsyncIterator[bytes]:
    async for chunk in artifact.reader.chunks(0, artifact.reader.size_bytes):
        yield bytes(chunk)
