"""Fetches: downloads an artifact that the region lacks from its upstream, once.

All requests of a process for a key share one task. Processes that share a database claim the
download in it. Nothing is served before it is stored and checked: size and digest against the
upstream's database, and the key against the head of the envelope. The client checks the signature.

A withdrawal must not be missed. The upstream may serve an artifact for two seconds after its
withdrawal, so a download first looks up the key in the upstream's database. The transaction that
stores the copy fails if the region has applied a withdrawal of the same bytes since the look-up.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from io import BytesIO
from typing import Final

from graphstash_schema import (
    ArtifactMetadata,
    Digest,
    ErrorCode,
    InvalidValueError,
    Namespace,
    NamespacePolicy,
    WriteMode,
)
from graphstash_schema.envelope import MAX_ENVELOPE_HEAD_BYTES, names_key, read_envelope_head
from graphstash_schema.protocol import HEADER_METADATA
from graphstash_server.artifact import FoundArtifact
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.artifacts import FoundArtifacts
from graphstash_server.db.queries.upstream import (
    claim_download,
    end_download,
    find_download_claim,
    find_position,
    renew_download,
    use_namespace,
)
from graphstash_server.db.queries.withdrawals import withdrawal_head
from graphstash_server.errors import DigestMismatchError, LengthMismatchError, ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.logs import in_background
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.artifacts.uploads import (
    Upload,
    UploadService,
    WithdrawnMeanwhileError,
)
from graphstash_server.services.wait_queue import WaitQueue
from graphstash_server.upstream.claims import CLAIM, keep_renewed
from graphstash_server.upstream.client import UpstreamClient, UpstreamError
from graphstash_server.upstream.setting_aside import UPSTREAM, SetAside

__all__ = ["Fetches"]

_LOGGER = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 1.5
"""Seconds that a read waits for a download. Jobs wait two seconds for the first byte. After a 503
they retry while they expect to wait less than compiling takes."""

_MAX_AT_ONCE: Final = 16
"""Concurrent downloads of a process."""

_POLL_SECONDS: Final = 0.2


class _RefusedError(Exception):
    """The upstream's bytes, digest or size differ from its announcement."""


@dataclass(kw_only=True, eq=False)
class Fetches:
    """Fetch missing artifacts.

    Attributes:
        is_shared: whether other processes use the database.
    """

    client: UpstreamClient
    database: Database
    artifacts: ArtifactService
    uploads: UploadService
    set_aside: SetAside
    wait_queue: WaitQueue
    clock: Clock
    is_shared: bool

    def __post_init__(self) -> None:
        self._running: dict[StoredKey, asyncio.Task[bool]] = {}
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)
        self._followed: set[Namespace] = set()

    async def fetch(
        self,
        key: StoredKey,
        policy: NamespacePolicy,
        *,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> bool:
        """Fetch an artifact. Return whether the region may have it now.

        Raises:
            ServerError: 503, the download continues.
        """
        running = self._running.get(key)
        if running is None:
            if not self.client.is_up.is_set():
                return False
            running = self._running[key] = in_background(self._run(key, policy))
            running.add_done_callback(lambda _: self._running.pop(key))
        done, _ = await asyncio.wait({running}, timeout=patience_seconds)
        if done:
            return running.result()
        raise ServerError(
            ErrorCode.UNAVAILABLE,
            f"{key.key} is on its way from the upstream: retry in a second",
            retry_after_seconds=1.0,
        )

    async def look_up(
        self, namespace: Namespace, keys: Collection[StoredKey], found: FoundArtifacts
    ) -> None:
        """Add what the upstream has, or withholds, of the keys that this server lacks or has set
        aside.
        """
        for key in await self.set_aside.find(found.withheld):
            del found.withheld[key]
        missing = [key for key in keys if key not in found.artifacts and key not in found.withheld]
        if not missing or not self.client.is_up.is_set():
            return
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                answer = await self.client.look_up(namespace, missing)
            asked = {key.key: key for key in missing}
            for infos, group in (
                (answer.found, found.artifacts),
                (answer.withdrawn, found.withheld),
            ):
                for each in infos:
                    if each.key in asked:
                        digest = Digest.parse(each.digest, size_bytes=each.size_bytes)
                        group[asked[each.key]] = FoundArtifact(
                            digest.sha256, digest.size_bytes, each.compile_seconds or 0.0
                        )

    async def close(self) -> None:
        """Cancel the downloads."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, key: StoredKey, policy: NamespacePolicy) -> bool:
        """Fetch an artifact, and count how that ended."""
        try:
            outcome = await self._fetch(key, policy)
        except UpstreamError as error:
            _LOGGER.debug("could not fetch %s: %s", key.key, error)
            outcome = "failed"
        except (
            _RefusedError,
            DigestMismatchError,
            LengthMismatchError,
            InvalidValueError,
        ) as error:
            _LOGGER.warning("refused %s in %s from the upstream: %s", key.key, key.namespace, error)
            outcome = "refused"
        except ServerError as error:
            _LOGGER.warning("could not keep %s in %s: %s", key.key, key.namespace, error)
            outcome = "not_kept"
        self.client.count(f"fetch_{outcome}")
        return outcome in {"stored", "present"}

    async def _fetch(self, key: StoredKey, policy: NamespacePolicy) -> str:
        if (kept := await self._kept(key)) is not None:
            return kept
        async with self.database.reading() as connection:
            began = await withdrawal_head(connection, key.namespace)
        digest = await self._find_digest(key)
        if digest is None:
            return "absent"
        await self.set_aside.confirm(key, digest)
        async with self._claimed(key) as is_ours:
            if await self.artifacts.find(key) is not None:
                return "present"  # another process was faster
            if not is_ours:
                return "failed"
            try:
                await self._download(key, digest, policy, withdrawn_until=began.number)
            except WithdrawnMeanwhileError:
                return "absent"
        return "stored"

    async def _kept(self, key: StoredKey) -> str | None:
        """Return the outcome if the region has, or withholds, an artifact. Otherwise None, also if
        its blob is absent or the region has set it aside.
        """
        if await self.artifacts.find(key) is not None:
            return "present"
        stored = await self.artifacts.find_row(key)
        if stored is None or stored.withheld_at is None:
            return None
        return None if await self.set_aside.find([key]) else "absent"

    async def _find_digest(self, key: StoredKey) -> Digest | None:
        """Return the digest in the upstream's database. Follow the namespace from then on.

        The region does not apply a withdrawal that it learns of before it follows the namespace. So
        it looks up the first artifact of a namespace again.
        """
        is_followed = key.namespace in self._followed
        found = await self.client.look_up(key.namespace, [key])
        if found.found and not is_followed:
            await self.follow(key.namespace)
            found = await self.client.look_up(key.namespace, [key])
        if not found.found:
            return None
        (info,) = found.found
        return Digest.parse(info.digest, size_bytes=info.size_bytes)

    async def follow(self, namespace: Namespace) -> None:
        """Apply the withdrawals of a namespace since the last probe from now on, unless the region
        does already. Call it before the region stores anything in the namespace.
        """
        if namespace in self._followed:
            return
        async with self.database.reading() as connection:
            known = await find_position(connection, namespace)
        if known is None:
            async with self.database.writing() as connection:
                await use_namespace(connection, namespace)
        self._followed.add(namespace)

    @asynccontextmanager
    async def _claimed(self, key: StoredKey) -> AsyncIterator[bool]:
        """Claim a download, and wait until this process may begin another one. Yield False after a
        download of another process.
        """
        if not self.is_shared:
            async with self._slots:
                yield True
            return
        while not await self._claim(key):
            if not await self._is_other_dead(key):
                yield False
                return

        async def renew() -> None:
            async with self.database.writing() as connection:
                await renew_download(connection, key, until=self.clock() + CLAIM)

        try:
            async with keep_renewed(renew), self._slots:
                yield True
        finally:
            async with self.database.writing() as connection:
                await end_download(connection, key)

    async def _claim(self, key: StoredKey) -> bool:
        now = self.clock()
        async with self.database.writing() as connection:
            return await claim_download(connection, key, now=now, until=now + CLAIM)

    async def _is_other_dead(self, key: StoredKey) -> bool:
        """Wait for the download of another process. Return whether its claim ended without it."""
        with self.wait_queue.joined(key) as ticket:
            while ticket.digest is None:
                ticket.clear()
                async with self.database.reading() as connection:
                    end = await find_download_claim(connection, key)
                if end is None:
                    return False
                if not timedelta() < end - self.clock() < 2 * CLAIM:
                    return True
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await ticket.wait()
        return False

    async def _download(
        self, key: StoredKey, digest: Digest, policy: NamespacePolicy, *, withdrawn_until: int
    ) -> None:
        async with self.client.download(key, digest) as response:
            if response.status_code != 200:
                raise UpstreamError(f"the upstream answers {response.status_code}")
            size_bytes = int(response.headers.get("content-length", -1))
            sent = Digest.parse_repr_digest(
                response.headers.get("repr-digest", ""), size_bytes=max(size_bytes, 0)
            )
            if sent != digest:
                raise _RefusedError(f"it announces {digest} and sends {sent}")
            header = response.headers.get(HEADER_METADATA, "")
            metadata = ArtifactMetadata.from_header(header) if header else None
            upload = Upload(
                key=key,
                digest=digest,
                metadata_header=header,
                compile_seconds=metadata.compile_seconds if metadata else 0.0,
                toolchain=metadata.toolchain if metadata else "",
                only_if_absent=False,
                actor=UPSTREAM,
                policy=policy.model_copy(update={"mode": WriteMode.WRITE_ONCE}),
                withdrawn_until=withdrawn_until,
            )
            try:
                await self.uploads.publish(upload, _of_key(key, response.aiter_raw()))
            except ServerError as error:
                if error.code is not ErrorCode.CONFLICT:  # a job here published meanwhile
                    raise


async def _of_key(key: StoredKey, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass on a blob that is an envelope of the key, else raise `_RefusedError`."""
    start = bytearray()
    is_checked = False
    async for chunk in chunks:
        if is_checked:
            yield chunk
            continue
        start += chunk
        if len(start) >= MAX_ENVELOPE_HEAD_BYTES:
            _check_head(key, start)
            is_checked = True
            yield bytes(start)
    if not is_checked:
        _check_head(key, start)
        yield bytes(start)


def _check_head(key: StoredKey, start: bytearray) -> None:
    try:
        header = read_envelope_head(BytesIO(start).read)
    except ValueError as error:
        raise _RefusedError(str(error)) from None
    if not names_key(header, key.key):
        raise _RefusedError("the envelope is of another key")
