"""UploadService: takes an artifact; what it acknowledged survives a crash, byte for byte."""

import asyncio
import logging
from collections.abc import AsyncIterator

from graphstash_schema import Digest, ErrorCode, Namespace, NamespacePolicy
from graphstash_server.errors import NoSpaceError, ServerError
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts import ArtifactService
from graphstash_server.services.blobs import BlobKeeper
from graphstash_server.services.commits import Committer, Upload, withheld
from graphstash_server.services.eviction import Evictor
from graphstash_server.services.policies import check_writable
from graphstash_server.services.waiting import Waiters, Wake
from graphstash_server.storage import BlobStore

__all__ = ["Upload", "UploadService"]

_LOGGER = logging.getLogger(__name__)

_ATTEMPTS_WHEN_FULL = 4


class UploadService:
    """The first writer of a key stays: compilers are not reproducible, and the processes of one job
    must all load one executable. A namespace's policy may let the last one stay instead, or none
    in.
    """

    def __init__(
        self,
        *,
        blobs: BlobStore,
        keeper: BlobKeeper,
        artifacts: ArtifactService,
        accounting: Accounting,
        committer: Committer,
        evictor: Evictor,
        waiters: Waiters,
        max_artifact_bytes: int,
        evicts_when_full: bool,
    ) -> None:
        """Prepares it.

        Args:
            blobs: where the bytes go.
            keeper: deletes blobs that no artifact has.
            artifacts: finds what is there already.
            accounting: counts conflicts.
            committer: makes stored blobs visible.
            evictor: makes room.
            waiters: told when an artifact is there.
            max_artifact_bytes: largest artifact taken.
            evicts_when_full: whether evicting makes room where uploads find none: not when they
                wait on a disk for a bucket.
        """
        self._blobs = blobs
        self._keeper = keeper
        self._artifacts = artifacts
        self._accounting = accounting
        self._committer = committer
        self._evictor = evictor
        self._waiters = waiters
        self._max_artifact_bytes = max_artifact_bytes
        self._evicts_when_full = evicts_when_full

    async def publish(self, upload: Upload, chunks: AsyncIterator[bytes]) -> bool:
        """Stores an artifact. Nothing is read from `chunks` before everything else was checked.

        Returns:
            False when the same bytes were under the key already; the chunks are not read then.

        Raises:
            ServerError: 403, 412, 409, 413, 507, 400 or 503, see the design's list of answers;
                nothing is stored then.
        """
        self.check(upload.key.namespace, upload.digest.size_bytes, policy=upload.policy)
        existing = await self._artifacts.find_stored(upload.key)
        if existing is not None and existing.withheld_at is not None:
            raise withheld(upload, existing.digest)
        if existing is not None and (existing.digest == upload.digest or not upload.replaces):
            return self._refuse_other(upload, existing.digest)
        await self._evictor.ensure_room(upload.key.namespace, upload.digest.size_bytes)
        is_due = False
        try:
            with self._keeper.uploading(upload.key.namespace, upload.digest):
                is_due = await self._keeper.settle(upload.digest)
                await self._put(upload.digest, chunks)
                is_due = True
                commit = await self._committer.commit(upload)
        except BaseException:
            if is_due:
                await asyncio.shield(self._drop_blob(upload.digest))
            raise
        self._waiters.wake(Wake.ready(upload.key, commit.stays or upload.digest))
        if commit.replaced is not None:
            self._artifacts.forget(upload.key)
            await self._drop_blob(commit.replaced)
        if commit.stays is None:
            return True
        await self._drop_blob(upload.digest)
        return self._refuse_other(upload, commit.stays)

    async def _put(self, digest: Digest, chunks: AsyncIterator[bytes]) -> None:
        """Stores the bytes. When the disk is full and none was read yet, others make room; more
        than once, for the database on the same disk grows while it evicts.
        """
        unread = _Unread(chunks)
        for attempt in range(_ATTEMPTS_WHEN_FULL):
            try:
                await self._blobs.put(digest, unread)
            except NoSpaceError as error:
                is_last = attempt == _ATTEMPTS_WHEN_FULL - 1
                if is_last or unread.is_begun or not self._evicts_when_full:
                    raise
                if not await self._evictor.free(error.missing_bytes or digest.size_bytes):
                    raise
            else:
                return

    async def _drop_blob(self, digest: Digest) -> None:
        """Removes a blob whose row was not stored, or is another one's now; what fails here is
        tidied at the next start, or is marked.
        """
        try:
            await self._keeper.collect(digest)
        except ServerError as error:
            _LOGGER.warning("the unused blob %s stays for now: %s", digest, error)

    def check(self, namespace: Namespace, size_bytes: int, *, policy: NamespacePolicy) -> None:
        """Refuses what the rules do not let in, before anything else is looked at.

        Raises:
            ServerError: 403 or 413.
        """
        check_writable(namespace, policy)
        limit = policy.max_artifact_bytes
        if limit is not None and size_bytes > limit:
            raise ServerError(
                ErrorCode.TOO_LARGE,
                f"the artifact has {size_bytes} bytes and the namespace {namespace} takes at most "
                f"{limit}: an admin can raise it (graphstash namespace set {namespace} "
                "--max-artifact)",
                limit=limit,
            )
        if size_bytes > self._max_artifact_bytes:
            raise ServerError(
                ErrorCode.TOO_LARGE,
                f"the artifact has {size_bytes} bytes and this server takes at most "
                f"{self._max_artifact_bytes}: raise GRAPHSTASH_MAX_ARTIFACT_BYTES there",
                limit=self._max_artifact_bytes,
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


class _Unread:
    """Chunks that know whether the first one was asked for."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self.is_begun = False

    def __aiter__(self) -> "_Unread":
        return self

    async def __anext__(self) -> bytes:
        self.is_begun = True
        return await anext(self._chunks)
