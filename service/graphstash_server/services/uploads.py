"""UploadService: takes an artifact; what it acknowledged survives a crash, byte for byte."""

import asyncio
import logging
from collections.abc import AsyncIterator

from graphstash_schema import Digest, ErrorCode
from graphstash_server.db.engine import Database
from graphstash_server.db.queries.usage import stored_bytes
from graphstash_server.errors import NoSpaceError, ServerError
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts import ArtifactService
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.services.commits import Committer, Upload
from graphstash_server.services.waiting import Waiters
from graphstash_server.storage import BlobStore

__all__ = ["Upload", "UploadService"]

_LOGGER = logging.getLogger(__name__)


class UploadService:
    """The first writer of a key stays: compilers are not reproducible, and the processes of one job
    must all load one executable.
    """

    def __init__(
        self,
        *,
        database: Database,
        blobs: BlobStore,
        keeper: BlobKeeper,
        artifacts: ArtifactService,
        accounting: Accounting,
        committer: Committer,
        waiters: Waiters,
        max_artifact_bytes: int,
        store_limit_bytes: int | None,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._keeper = keeper
        self._artifacts = artifacts
        self._accounting = accounting
        self._committer = committer
        self._waiters = waiters
        self._max_artifact_bytes = max_artifact_bytes
        self._store_limit_bytes = store_limit_bytes

    async def publish(self, upload: Upload, chunks: AsyncIterator[bytes]) -> bool:
        """Stores an artifact. Nothing is read from `chunks` before everything else was checked.

        Returns:
            False when the same bytes were under the key already; the chunks are not read then.

        Raises:
            ServerError: 412, 409, 413, 507, 400 or 503, see the design's list of answers; nothing
                is stored then.
        """
        existing = await self._artifacts.find(upload.key)
        if existing is not None:
            return self._refuse_other(upload, existing.digest)
        await self._check_limit(upload.digest.size_bytes)
        is_stored = False
        try:
            with self._keeper.uploading(upload.digest):
                await self._blobs.put(upload.digest, chunks)
                is_stored = True
                faster = await self._committer.commit(upload)
        except BaseException:
            if is_stored:
                await asyncio.shield(self._drop_blob(upload.digest))
            raise
        self._waiters.wake_all(upload.key)
        if faster is None:
            return True
        await self._drop_blob(upload.digest)
        return self._refuse_other(upload, faster)

    async def _drop_blob(self, digest: Digest) -> None:
        """Removes a blob whose row was not stored; what fails here is tidied at the next start."""
        try:
            await self._keeper.collect(digest)
        except ServerError as error:
            _LOGGER.warning("the unused blob %s stays for now: %s", digest, error)

    def check_size(self, size_bytes: int) -> None:
        """Refuses what is too large, before anything else is looked at.

        Raises:
            ServerError: 413.
        """
        if size_bytes > self._max_artifact_bytes:
            raise ServerError(
                ErrorCode.TOO_LARGE,
                f"the artifact has {size_bytes} bytes and this server takes at most "
                f"{self._max_artifact_bytes}: raise GRAPHSTASH_MAX_ARTIFACT_BYTES there",
                limit=self._max_artifact_bytes,
            )

    async def _check_limit(self, size_bytes: int) -> None:
        """Other processes' uploads under way are not seen; the limit may be passed by these."""
        if self._store_limit_bytes is None:
            return
        async with self._database.reading() as connection:
            used = await stored_bytes(connection) + self._keeper.uploading_bytes
        if used + size_bytes > self._store_limit_bytes:
            raise NoSpaceError(
                f"the artifact has {size_bytes} bytes, the store has {used} of at most "
                f"{self._store_limit_bytes}: delete artifacts or raise "
                "GRAPHSTASH_STORE_LIMIT_BYTES",
                limit=self._store_limit_bytes,
            )

    def _refuse_other(self, upload: Upload, stays: Digest) -> bool:
        """False when the same bytes are there; a refusal when others are, or any was too much."""
        if upload.only_if_absent:
            raise ServerError(
                ErrorCode.PRECONDITION_FAILED,
                f"{upload.key.key} exists with the digest {stays} and If-None-Match: * was given",
                digest=stays,
                given_digest=upload.digest,
            )
        if stays != upload.digest:
            self._accounting.count_conflict(upload.key)
            raise ServerError(
                ErrorCode.CONFLICT,
                f"{upload.key.key} exists with the digest {stays}, {upload.digest} was given: the "
                "first one stays, because one job must load one executable; use the stored one",
                digest=stays,
                given_digest=upload.digest,
            )
        return False
