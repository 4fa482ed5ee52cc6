"""UploadService: accepts artifacts. An acknowledged artifact survives a crash, byte for byte.

`CommitBatcher` makes stored blobs visible as artifacts. A commit waits for the disk, so uploads
that end during a commit share the next transaction. An upload that arrives alone is committed at
once.

A silent store takes minutes to fail: 40 seconds each for the blob, for the commit before this one
and for this commit, and 15 for each deletion. So the answer has a deadline. Then the server stops
sending the blob. A deletion continues. A commit continues if its transaction has begun, or if fewer
than `_MAX_LATE` others continue.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from graphstash_schema import AuditAction, Digest, ErrorCode, Namespace, NamespacePolicy, WriteMode
from graphstash_schema.region import Publisher
from graphstash_schema.withdrawals import WithdrawalCause
from graphstash_server.actor import Actor
from graphstash_server.artifact import Artifact
from graphstash_server.clock import Clock
from graphstash_server.db.engine import Database
from graphstash_server.db.notifications import notify
from graphstash_server.db.prepared import Transaction
from graphstash_server.db.queries.artifacts import (
    find_stored,
    insert_artifact,
    replace_artifact,
)
from graphstash_server.db.queries.audit import AuditRecord, add_audit
from graphstash_server.db.queries.costs import metadata_bytes
from graphstash_server.db.queries.deletions import (
    add_deletions,
    find_states,
)
from graphstash_server.db.queries.leases import end_leases
from graphstash_server.db.queries.locks import end_pause, pause, share_blobs
from graphstash_server.db.queries.reports import drop_reports
from graphstash_server.db.queries.upstream import (
    is_withdrawn_since,
    lock_position,
    queue_publishes,
)
from graphstash_server.db.queries.usage import UsageChange, add_usage
from graphstash_server.db.queries.withdrawals import add_withdrawals
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.logs import in_background
from graphstash_server.services.accounting import Accounting
from graphstash_server.services.artifacts.allocation import Allocation, Allocator
from graphstash_server.services.artifacts.blobs import BlobCollector
from graphstash_server.services.artifacts.service import ArtifactService
from graphstash_server.services.namespaces import check_writable
from graphstash_server.services.wait_queue import Notification, WaitQueue
from graphstash_server.storage import BlobStore

__all__ = [
    "Commit",
    "CommitBatcher",
    "Upload",
    "UploadService",
    "WithdrawnMeanwhileError",
    "withheld",
]

_MAX_BATCH = 64
"""Maximum uploads of one transaction: a few milliseconds of work for one wait for the disk."""

_CHECK_SECONDS = 45.0
"""Seconds that a transaction may idle while the server checks that the store has its blobs. Longer
than a request to the store with all its attempts (40 s)."""


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload as its request's headers describe it.

    Attributes:
        metadata_header: header that is stored verbatim and returned with every hit.
        compile_seconds: seconds that the publisher took to compile, and that a hit saves.
        toolchain: compiler that made the artifact; empty if unknown.
        only_if_absent: refuse even the same bytes if the key has an artifact (`If-None-Match: *`).
        publisher: whose rights the upstream of this region checks when it gets the artifact. None
            if the artifact does not go to an upstream.
        withdrawn_until: for an artifact that another server sends, the number of the namespace's
            last withdrawal before that server was asked. A later withdrawal of the same bytes makes
            the commit fail.
        displaces: artifact that the commit replaces even if the policy keeps the first one. If the
            artifact has changed since, the policy decides. `UploadService` sets `displaces`, see
            `ArtifactService.is_replaceable`.
    """

    key: StoredKey
    digest: Digest
    metadata_header: str
    compile_seconds: float
    toolchain: str
    only_if_absent: bool
    actor: Actor
    policy: NamespacePolicy
    job: str = ""
    publisher: Publisher | None = None
    withdrawn_until: int | None = None
    displaces: Artifact | None = None

    @property
    def replaces(self) -> bool:
        """Whether this upload may replace an artifact with other bytes."""
        return self.policy.mode is WriteMode.OVERWRITE and not self.only_if_absent


class Commit(NamedTuple):
    """The result of an upload."""

    stays: Digest | None = None  # of the earlier artifact
    stored: Artifact | None = None  # the uploaded artifact
    replaced: Artifact | None = None  # the earlier artifact


_Outcome: TypeAlias = Commit | Exception | None
"""None means retry: the key has an artifact whose blob this transaction has not locked."""

_Waiting: TypeAlias = "tuple[Upload, asyncio.Future[Commit]]"


@dataclass(kw_only=True, eq=False)
class CommitBatcher:
    """Commit artifacts of one namespace together. If a transaction waits, for example for a server
    that froze inside its own transaction, other namespaces continue.
    """

    database: Database
    blobs: BlobStore
    clock: Clock
    plausible_clock: Clock

    def __post_init__(self) -> None:
        self._waiting: dict[str, list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def commit(self, upload: Upload) -> Commit:
        """Make an artifact visible, count it and end its lease, atomically. Raises a `ServerError`
        (503, 507 or 409) if nothing was stored.
        """
        future: asyncio.Future[Commit] = asyncio.get_running_loop().create_future()
        namespace = upload.key.namespace
        if namespace in self._waiting:
            self._waiting[namespace].append((upload, future))
        else:
            self._waiting[namespace] = [(upload, future)]
            task = in_background(self._commit_waiting(namespace))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    def withdraw(self, upload: Upload) -> bool:
        """Cancel a commit that waits for its transaction. Return False if there is none."""
        for each, future in self._waiting.get(upload.key.namespace, ()):
            if each is upload:
                return future.cancel()
        return False

    async def _commit_waiting(self, namespace: str) -> None:
        """Commit batches until no upload waits. Every failure must reach the future of an upload:
        this is the outermost frame of its task.
        """
        waiting = self._waiting[namespace]
        try:
            while waiting:
                batch, waiting[:] = waiting[:_MAX_BATCH], waiting[_MAX_BATCH:]
                if batch := [each for each in batch if not each[1].done()]:  # else cancelled
                    batch.sort(key=lambda each: each[0].key.columns)
                    waiting += await self._answer(batch)
        finally:
            del self._waiting[namespace]

    async def _answer(self, batch: "Sequence[_Waiting]") -> "list[_Waiting]":
        """Commit a batch and resolve its futures. Return the uploads to retry."""
        retries = []
        outcomes = await self._outcomes([upload for upload, _ in batch])
        for (upload, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue  # the caller was cancelled
            if outcome is None:
                retries.append((upload, future))
            elif isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        return retries

    async def _outcomes(self, uploads: Sequence[Upload]) -> list[_Outcome]:
        """Commit a batch. If an unexpected error occurs, commit each upload alone."""
        try:
            return await self._commit_all(uploads)
        except ServerError as error:  # the database itself failed, not one upload
            return [error] * len(uploads)
        except Exception as error:  # noqa: BLE001 - see `_commit_waiting`
            if len(uploads) == 1:
                return [error]
            _LOGGER.warning("a batch of %d uploads failed, trying each alone", len(uploads))
            return [(await self._outcomes([upload]))[0] for upload in uploads]

    async def _commit_all(self, uploads: Sequence[Upload]) -> list[_Outcome]:
        """Commit uploads of one namespace in one transaction. Single uploads may fail.

        The transaction locks the blobs and then checks that the store has them. If the store has
        all blobs and answers without blocking, the transaction is one step. Otherwise it has two
        steps, and the check runs between them.
        """
        if self._are_stored_now(uploads[:1]):  # False for a store that cannot answer at once
            with suppress(_NotStoredNowError):
                async with self.database.writing_in_steps() as steps:
                    return await steps.run(partial(self._commit_now, uploads), is_last=True)
        async with self.database.writing_in_steps() as steps:
            locked = await steps.run(partial(self._lock_before_check, uploads))
            sizes = await asyncio.gather(
                *(self.blobs.stat(upload.digest, is_newest=True) for upload in uploads)
            )
            are_there = [
                size_bytes == upload.digest.size_bytes
                for upload, size_bytes in zip(uploads, sizes, strict=True)
            ]
            return await steps.run(
                partial(self._commit_after_check, uploads, are_there, locked), is_last=True
            )

    def _are_stored_now(self, uploads: Sequence[Upload]) -> bool:
        """Return whether every blob is stored. False if the check would block."""
        for upload in uploads:
            file = self.blobs.open_now(upload.digest)
            if file is None:
                return False
            file.close_now()
            if file.size_bytes != upload.digest.size_bytes:
                return False
        return True

    async def _commit_now(
        self, uploads: Sequence[Upload], connection: Transaction
    ) -> list[_Outcome]:
        """Run the transaction in one step. If it needs two, raise `_NotStoredNowError`."""
        locked = await _lock(connection, uploads)
        if not self._are_stored_now(uploads):
            raise _NotStoredNowError
        return await _store_all(connection, uploads, [True] * len(uploads), locked, self._times())

    async def _lock_before_check(
        self, uploads: Sequence[Upload], connection: Transaction
    ) -> "_Locked":
        """Run the first of two steps, which takes locks and writes nothing."""
        locked = await _lock(connection, uploads)
        for digest, generation in locked.generations.items():
            self.blobs.use_generation(Digest(digest, 0), generation)
        await pause(connection, seconds=_CHECK_SECONDS)
        return locked

    async def _commit_after_check(
        self,
        uploads: Sequence[Upload],
        are_there: Sequence[bool],
        locked: "_Locked",
        connection: Transaction,
    ) -> list[_Outcome]:
        await end_pause(connection)
        return await _store_all(connection, uploads, are_there, locked, self._times())

    def _times(self) -> "_Times":
        return _Times(self.clock(), self.plausible_clock())


class WithdrawnMeanwhileError(Exception):
    """The upstream has withdrawn the bytes since a region asked for them, or began to send them.
    Not a `ServerError`, so the other uploads of the batch are committed.
    """


class _NotStoredNowError(Exception):
    """A blob is absent, or the check would block."""


class _Times(NamedTuple):
    """The time of a commit by the server's clock, and by the clock that ages artifacts."""

    now: datetime
    used_at: datetime


class _Locked(NamedTuple):
    """Blobs that a transaction has locked, and their state at that time."""

    blobs: Collection[Digest]  # uploaded, or of artifacts to replace
    doomed: Collection[str]  # SHA-256 of uploaded blobs that the store may still delete
    generations: Mapping[str, int]  # of uploaded blobs by SHA-256, if not 0


async def _lock(connection: Transaction, uploads: Sequence[Upload]) -> _Locked:
    """Lock the blobs of uploads, and read their state."""
    digests = [upload.digest for upload in uploads]
    # Take all locks at once: two transactions that take them in two steps could deadlock.
    blobs = {*digests, *await _blobs_to_replace(connection, uploads)}
    await share_blobs(connection, list(blobs))
    return _Locked(blobs, *await find_states(connection, digests))


async def _store_all(
    connection: Transaction,
    uploads: Sequence[Upload],
    are_there: Sequence[bool],
    locked: _Locked,
    times: _Times,
) -> list[_Outcome]:
    """Store the artifacts whose blobs are in the store and not doomed."""
    change = UsageChange()
    stored: list[tuple[Upload, Artifact | None]] = []
    new: list[tuple[Upload, Artifact]] = []
    outcomes: list[_Outcome] = []
    for upload, is_there in zip(uploads, are_there, strict=True):
        outcome: _Outcome
        if is_there and upload.digest.sha256 not in locked.doomed:
            outcome = await _store(connection, upload, times, locked=locked.blobs)
        else:
            outcome = _deleted_meanwhile()
        if isinstance(outcome, Commit) and outcome.stays is None:
            stored.append((upload, outcome.replaced))
            assert outcome.stored is not None  # noqa: S101 - nothing else stays
            new.append((upload, outcome.stored))
            more = _change(upload, outcome.replaced)
            change = more if len(stored) == 1 else change.plus(more)
        outcomes.append(outcome)
    if stored:
        await add_usage(connection, uploads[0].key.namespace, change)
        await end_leases(connection, [upload.key for upload, _ in stored], now=times.now)
        payloads = [Notification.ready(upload.key, upload.digest).payload for upload, _ in stored]
        await notify(connection, payloads)
        if displaced := [upload.key for upload, row in stored if row and upload.displaces]:
            await drop_reports(connection, displaced)
        replaced = [
            (row.key, row.digest)
            for upload, row in stored
            if row is not None and row.digest != upload.digest
        ]
        await add_deletions(connection, [digest for _, digest in replaced])
        queued = [(row, upload.publisher) for upload, row in new if upload.publisher is not None]
        if queued:
            await queue_publishes(connection, queued, now=times.now)
        await add_audit(connection, [_record(*each, times.now) for each in stored])
        await add_withdrawals(connection, replaced, cause=WithdrawalCause.REPLACED, now=times.now)
        await _refuse_withdrawn(connection, [upload for upload, _ in new])
    return outcomes


async def _refuse_withdrawn(connection: Transaction, uploads: Sequence[Upload]) -> None:
    """Roll back if an artifact was, or may have been, withdrawn on its way between two servers.

    A region's follower takes the same lock when it adds a withdrawal or a gap. So either this
    transaction finds it, or the follower waits for this transaction and then deletes or compares
    the artifact. At the upstream, a withdrawal is committed with the deletion of its row, before
    which this transaction cannot store another one for the key.
    """
    copies = [(each, each.withdrawn_until) for each in uploads if each.withdrawn_until is not None]
    if copies:
        await lock_position(connection, copies[0][0].key.namespace)
    for upload, number in copies:
        if await is_withdrawn_since(connection, upload.key.namespace, upload.digest, start=number):
            raise WithdrawnMeanwhileError(upload.key.key)


async def _blobs_to_replace(connection: Transaction, uploads: Sequence[Upload]) -> list[Digest]:
    """Return the blobs of artifacts that uploads would replace. They may change until locked."""
    rows = [
        await find_stored(connection, upload.key)
        for upload in uploads
        if upload.replaces or upload.displaces
    ]
    return [row.digest for row in rows if row is not None]


async def _store(
    connection: Transaction, upload: Upload, times: _Times, *, locked: Collection[Digest]
) -> _Outcome:
    """Insert or replace one artifact. Return None if it would replace an artifact whose blob is not
    locked: marking a blob for deletion requires its lock.
    """
    new = Artifact(
        key=upload.key,
        digest=upload.digest,
        metadata_header=upload.metadata_header,
        compile_seconds=upload.compile_seconds,
        toolchain=upload.toolchain,
        hits=0,
        created_at=times.now,
        last_used_at=times.used_at,
    )
    while True:
        if await insert_artifact(connection, new):
            return Commit(stored=new)
        existing = await find_stored(connection, upload.key)
        if existing is None:
            continue
        if upload.displaces is None or upload.displaces.identity != existing.identity:
            if existing.withheld_at is not None:
                return withheld(upload, existing.digest)
            if existing.digest == upload.digest or not upload.replaces:
                return Commit(stays=existing.digest)
        if existing.digest not in locked:
            return None
        if await replace_artifact(connection, new, replaces=existing):
            return Commit(stored=new, replaced=existing)


def _change(upload: Upload, replaced: Artifact | None) -> UsageChange:
    size_bytes = upload.digest.size_bytes
    change = UsageChange(
        artifacts=1,
        puts=1,
        size_bytes=size_bytes,
        metadata_bytes=metadata_bytes(size_bytes, upload.metadata_header),
    )
    if replaced is None:
        return change
    old_bytes = replaced.digest.size_bytes
    old_metadata_bytes = metadata_bytes(old_bytes, replaced.metadata_header)
    return change.plus(
        UsageChange(artifacts=-1, size_bytes=-old_bytes, metadata_bytes=-old_metadata_bytes)
    )


def _record(upload: Upload, replaced: Artifact | None, now: datetime) -> AuditRecord:
    is_same = replaced is None or replaced.digest == upload.digest
    action = AuditAction.PUT if is_same else AuditAction.OVERWRITE
    return AuditRecord.of_artifact(now, upload.actor, action, upload.key, upload.digest)


def withheld(upload: Upload, stays: Digest) -> ServerError:
    """Return the error for an upload to a key whose artifact is withheld."""
    return ServerError(
        ErrorCode.WITHHELD,
        f"{upload.key.key} is withheld: the artifact with the digest {stays} was reported as "
        "wrong; an administrator must release or delete it first (graphstash quarantine)",
        digest=stays,
        given_digest=upload.digest,
    )


def _deleted_meanwhile() -> ServerError:
    return ServerError(
        ErrorCode.UNAVAILABLE,
        "the same bytes were deleted while they were uploaded: nothing was stored; retry the "
        "upload",
    )


_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

_STORE_SECONDS: Final = 30.0
"""Seconds that the server may work on an upload, and make room for it, before it answers. Waits for
the client's bytes do not count."""

_MIN_BYTES_PER_SECOND: Final = 1024**2
"""Slowest store that can take a large blob: each mebibyte received adds a second."""

_DROP_SECONDS: Final = 5.0
"""Seconds that an answer waits for the deletion of an unused blob."""

_MAX_LATE: Final = _MAX_BATCH
"""Maximum commits that continue after the answer at the deadline, unless their transactions have
begun. When the store or the database recovers, one transaction commits as many. They keep at most
2 MiB of metadata in memory."""


@dataclass(kw_only=True, eq=False)
class UploadService:
    """Accept uploads, and keep the first artifact of a key.

    Compilers are not reproducible, and all processes of one job must load the same executable. The
    policy of a namespace may keep the last artifact instead, or refuse all uploads.
    """

    blobs: BlobStore
    collector: BlobCollector
    artifacts: ArtifactService
    accounting: Accounting
    committer: CommitBatcher
    allocator: Allocator
    wait_queue: WaitQueue
    max_artifact_bytes: int

    def __post_init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()  # a server shares its own, which it ends
        self._late: set[asyncio.Task[bool]] = set()

    async def publish(self, upload: Upload, chunks: AsyncIterator[bytes]) -> bool:
        """Store an artifact. Return False if the key already had the same bytes.

        Policy, existing artifact and room are checked before `chunks` is read.

        Raises:
            ServerError: 400, 403, 409, 412, 413, 503 or 507; nothing is stored. After a 503 at the
                deadline, the artifact may still become visible.
        """
        self.check(upload.key.namespace, upload.digest.size_bytes, policy=upload.policy)
        if len(self._late) >= _MAX_LATE:
            raise ServerError(
                ErrorCode.UNAVAILABLE,
                f"{len(self._late)} earlier uploads still wait for the blob store or the database, "
                "which is the limit: check both, then retry",
            )
        existing = await self.artifacts.find_row(upload.key)
        if existing is not None and await self.artifacts.is_replaceable(existing):
            upload = replace(upload, displaces=existing)
        elif existing is not None and existing.withheld_at is not None:
            raise withheld(upload, existing.digest)
        elif existing is not None and (existing.digest == upload.digest or not upload.replaces):
            return self._refuse_other(upload, existing.digest)
        size_bytes = upload.digest.size_bytes
        rows_bytes = metadata_bytes(size_bytes, upload.metadata_header)
        allocation = Allocation(
            upload.key.namespace, blob_bytes=size_bytes, row_bytes=rows_bytes, actor=upload.actor
        )
        await self.allocator.check(allocation)
        is_unused = False  # whether the store may have a blob that no artifact uses
        limit = asyncio.timeout(_STORE_SECONDS)
        try:
            with ExitStack() as held:
                held.enter_context(self.collector.uploading(upload.digest))
                held.enter_context(self.allocator.releasing(allocation))
                async with limit:
                    is_unused = await self.collector.settle(upload.digest)
                    received = _timed(chunks, limit)
                    await self.blobs.put(
                        upload.digest, self.allocator.admit_chunks(allocation, received)
                    )
                    upload = await self._look_again(upload)
                committing = self._in_background(self._commit(upload, held.pop_all()))
        except BaseException as error:
            if is_unused:
                await self._drop_blob(upload.digest)
            if isinstance(error, TimeoutError) and limit.expired():
                raise _too_slow() from error
            raise
        return await self._result_by(limit, upload, committing)

    async def _look_again(self, upload: Upload) -> Upload:
        """Let an upload displace no artifact whose blob came back while the body arrived."""
        row = upload.displaces
        if row is None or row.digest == upload.digest or await self.artifacts.is_replaceable(row):
            return upload
        return replace(upload, displaces=None)

    async def _commit(self, upload: Upload, held: ExitStack) -> bool:
        """Make a stored blob visible, see `publish`. Then release what the upload `held`."""
        began = self.artifacts.steady_clock()
        try:
            with held:
                commit = await self.committer.commit(upload)
        except BaseException:
            await self._drop_blob(upload.digest)
            raise
        if commit.stored is not None:
            self.artifacts.remember(commit.stored, read_at=began)
            self.accounting.count_put(upload.key, job=upload.job)
        if commit.replaced is not None and upload.displaces and not upload.displaces.withheld_at:
            self.accounting.count_healed()
        self.wait_queue.wake(Notification.ready(upload.key, commit.stays or upload.digest))
        if commit.replaced is not None:
            self.artifacts.forget(upload.key)
            await self._drop_blob(commit.replaced.digest)
        if commit.stays is None:
            return True
        await self._drop_blob(upload.digest)
        return self._refuse_other(upload, commit.stays)

    async def _drop_blob(self, digest: Digest) -> None:
        """Delete an unused blob after an upload. If that takes long, it continues in the
        background. If it fails, maintenance deletes the blob later.
        """

        async def drop() -> None:
            try:
                await self.collector.collect_all([digest])
            except ServerError as error:
                _LOGGER.warning(
                    "could not delete the unused blob %s, will retry: %s", digest, error
                )

        await asyncio.wait([self._in_background(drop())], timeout=_DROP_SECONDS)

    def _in_background(self, work: "Coroutine[Any, Any, T]") -> "asyncio.Task[T]":
        """Start work that may outlast its request."""
        task = in_background(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _result_by(
        self, limit: asyncio.Timeout, upload: Upload, committing: "asyncio.Task[bool]"
    ) -> bool:
        """Return the result of a commit. If it does not come in time, raise 503.

        Wait a bit longer than the limit, so that a slow deletion after a commit does not hide it.
        """
        seconds = (limit.when() or 0.0) - asyncio.get_running_loop().time() + _DROP_SECONDS
        try:
            done, _ = await asyncio.wait([committing], timeout=seconds)
        except asyncio.CancelledError:
            self._leave(upload, committing, max_late=0)
            raise
        if done:
            return committing.result()
        self._leave(upload, committing, max_late=_MAX_LATE)
        raise _too_slow()

    def _leave(self, upload: Upload, committing: "asyncio.Task[bool]", *, max_late: int) -> None:
        """Let a commit continue without its request. Withdraw it if `max_late` others continue and
        its transaction has not begun. Otherwise the transaction may store the artifact, so the
        upload holds its room and its blob until then.
        """
        if len(self._late) < max_late or not self.committer.withdraw(upload):
            self._late.add(committing)
            committing.add_done_callback(self._late.discard)
        committing.add_done_callback(_retrieve)

    def check(self, namespace: Namespace, size_bytes: int, *, policy: NamespacePolicy) -> None:
        """Check policy and size limits, without a query. Raises `ServerError` 403 or 413."""
        check_writable(namespace, policy)
        limit = policy.max_artifact_bytes
        if limit is not None and size_bytes > limit:
            raise ServerError(
                ErrorCode.TOO_LARGE,
                f"the artifact has {size_bytes} bytes and the limit of the namespace {namespace} "
                f"is {limit}: an administrator can raise it (graphstash namespace set {namespace} "
                "--max-artifact)",
                limit=limit,
            )
        if size_bytes > self.max_artifact_bytes:
            raise ServerError(
                ErrorCode.TOO_LARGE,
                f"the artifact has {size_bytes} bytes and the limit of this server is "
                f"{self.max_artifact_bytes}: raise GRAPHSTASH_MAX_ARTIFACT_BYTES there",
                limit=self.max_artifact_bytes,
            )

    def _refuse_other(self, upload: Upload, stays: Digest) -> bool:
        """Return False if the stored bytes are the same. Raise for other bytes or If-None-Match."""
        if upload.only_if_absent:
            raise ServerError(
                ErrorCode.PRECONDITION_FAILED,
                f"{upload.key.key} exists with the digest {stays} and If-None-Match: * was given",
                digest=stays,
                given_digest=upload.digest,
            )
        if stays != upload.digest:
            self.accounting.count_conflict(upload.key)
            raise ServerError(
                ErrorCode.CONFLICT,
                f"{upload.key.key} exists with the digest {stays}, {upload.digest} was given: the "
                "first upload is kept, because one job must load one executable; use the stored "
                "artifact",
                digest=stays,
                given_digest=upload.digest,
            )
        return False


async def _timed(chunks: AsyncIterator[bytes], limit: asyncio.Timeout) -> AsyncIterator[bytes]:
    """Pass on the body. Suspend the limit while the client sends."""
    now = asyncio.get_running_loop().time
    left_seconds = (limit.when() or 0.0) - now()
    limit.reschedule(None)
    async for chunk in chunks:
        began = now()
        left_seconds += len(chunk) / _MIN_BYTES_PER_SECOND
        limit.reschedule(began + left_seconds)
        yield chunk
        limit.reschedule(None)
        left_seconds -= now() - began
    limit.reschedule(now() + left_seconds)


def _retrieve(task: "asyncio.Task[Any]") -> None:
    """Retrieve an exception, or asyncio logs that nothing has retrieved it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _LOGGER.warning("an upload failed after its answer: %s", error)


def _too_slow() -> ServerError:
    return ServerError(
        ErrorCode.UNAVAILABLE,
        f"the blob store or the database did not finish within {_STORE_SECONDS:g} s, and a second "
        "for each MiB: check both, then retry",
    )
