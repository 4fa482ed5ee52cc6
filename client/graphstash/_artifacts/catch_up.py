"""CatchUp: publish later what jobs on this host compiled while the server was down.

`Unsent` records these artifacts. An artifact is published with its original signature, metadata and
description if all of this is true:

    the local tier still has the recorded bytes, compiled by this user, and they verify
    the server has no artifact under the key
    the server's list of withdrawals does not contain these bytes
    the signature satisfies this job's policy, and is by this job's signing key if it has one

Servers of earlier releases have no such list, so they get no late uploads.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum, auto
from time import monotonic, time
from typing import IO, Final, NamedTuple, TypeAlias, cast

from graphstash._artifacts.bundle import BundleEntry, FileRange, check_blob
from graphstash._artifacts.local_tier import OWN
from graphstash._artifacts.prefetch import value_of
from graphstash._artifacts.standing import Verdict
from graphstash._artifacts.stash import Stash, is_temporary
from graphstash._http.client import ServerClient
from graphstash._regular_file import open_ours
from graphstash._trust.proof import Provenance
from graphstash._trust.provenance import read_provenance
from graphstash.errors import (
    BundleError,
    CacheError,
    ConflictError,
    LocalTierError,
    Reason,
    RefusedError,
    TransportError,
    VerificationError,
)
from graphstash_schema import ArtifactMetadata, ErrorCode
from graphstash_schema.explanation import Description
from graphstash_schema.protocol import MAX_DESCRIPTIONS

__all__ = ["CatchUp", "Outcome", "Sent", "describe"]

_LOOKUP_SECONDS: Final = 60.0
"""Maximum age of the look-up when an upload begins. The server may have withdrawn bytes since."""

_OF_SETTINGS: Final = (
    *(Reason.BAD_SIGNATURE, Reason.UNKNOWN_KEY, Reason.REVOKED_KEY, Reason.UNSIGNED),
    Reason.TOO_LARGE,
)
"""Failures due to this job's settings. The artifact stays for jobs with other settings."""


class Sent(Enum):
    """Outcome for an artifact without an error."""

    PUBLISHED = auto()
    PRESENT = auto()
    """The server had the same bytes."""
    DIFFERING = auto()
    """The server has other bytes under the key, which stay."""
    GONE = auto()
    """This host has evicted its copy, or has deleted it because the server withdrew it."""


Outcome: TypeAlias = Sent | CacheError
"""Outcome for one artifact. An error: the bytes are unreadable, do not verify, or are refused."""


class CatchUp:
    """Publishes the unsent artifacts of a namespace.

    Args:
        stash: cache that holds the artifacts. The caller closes it.
        server: client for all calls; its failures do not open the circuit breaker of the job's
            client. The caller closes it.
        with_any: whether to include artifacts of jobs that had no server.
        done: called with each artifact that has an outcome.
        before_each: called before each upload.
        is_stopped: polled between artifacts and chunks. If true, the running upload is aborted.
        limit_bytes: maximum bytes to upload.
        limit_seconds: maximum seconds of all uploads. An upload in progress is finished.
        spend: called with (bytes, 0) when an upload begins, and with (0, seconds) for the time of
            each artifact, also after a failure.
        is_dry: whether only to verify the artifacts. Records and copies stay.
    """

    def __init__(
        self,
        stash: Stash,
        server: ServerClient,
        *,
        with_any: bool,
        done: Callable[[BundleEntry, Outcome], None],
        before_each: Callable[[], None] = lambda: None,
        is_stopped: Callable[[], bool] = lambda: False,
        limit_bytes: int = sys.maxsize,
        limit_seconds: float = math.inf,
        spend: Callable[[int, float], None] = lambda *_: None,
        is_dry: bool = False,
    ) -> None:
        self._stash = stash
        self._server = server
        self._with_any = with_any
        self._done = done
        self._before_each = before_each
        self._is_stopped = is_stopped
        self._left_bytes = limit_bytes
        self._left_seconds = limit_seconds
        self._spend = spend
        self._is_dry = is_dry
        self._described: list[Description] = []
        self._asked_at = -math.inf
        self._withdrawals: str | None = None

    def find_publishable(self) -> Sequence[BundleEntry]:
        """Return the artifacts to publish: fewest attempts first, then the most valuable.

        Report the outcome of the other artifacts.

        Raises:
            CacheError: the server does not answer, or does not list its withdrawals in time.
        """
        return self._find_absent(self._stash.unsent.entries(with_any=self._with_any))

    def _find_absent(self, entries: Iterable[BundleEntry]) -> Sequence[BundleEntry]:
        stash, namespace = self._stash, self._stash.config.namespace
        recorded = {each.key: each for each in entries}
        if not recorded:
            return ()
        keys, asked_at = list(recorded), time()
        reply = self._server.lookup(keys)
        self._asked_at, self._withdrawals = monotonic(), reply.newest_withdrawal
        stash.standing.take(namespace, keys, reply, asked_at=asked_at)
        if not stash.standing.has_list(namespace):
            raise CacheError(
                Reason.PROTOCOL, f"{stash.config.url} does not list which artifacts it withdrew"
            )
        if not stash.standing.is_current(namespace):
            raise TransportError(
                Reason.TIMEOUT, f"{stash.config.url} has withdrawn more than could be read in time"
            )
        for found in reply.found:
            self._settle(recorded.pop(found.key), found.digest.partition(":")[2])
        # Otherwise an upload that always fails would be the first in every job.
        return sorted(
            filter(self._may_publish, recorded.values()),
            key=lambda each: (stash.unsent.attempts(each.key), -_value(each)),
        )

    def publish(self, wanted: Sequence[BundleEntry]) -> None:
        """Publish artifacts in this order, within the limits. Repeat the look-up every minute, and
        when the server has withdrawn an artifact since.

        After a failed upload, continue unless the next upload would fail for the same reason.

        Raises:
            CacheError: an upload failed that may succeed later. The first such error, or the one
                that ended the loop.
        """
        failure: CacheError | None = None
        left = deque(wanted)
        repeated: list[BundleEntry] = []
        try:
            while left and not self._is_stopped() and self._left_seconds > 0:
                if monotonic() - self._asked_at > _LOOKUP_SECONDS:
                    left = deque(self._find_absent(left))
                    if not left:
                        break
                entry = left.popleft()
                if entry.size_bytes > self._left_bytes:
                    continue
                self._before_each()
                try:
                    if self._may_publish(entry):
                        self._publish(entry)
                except CacheError as error:
                    if _is_withdrawn(error) and entry not in repeated:
                        repeated.append(entry)
                        left.append(entry)
                        self._asked_at = -math.inf
                        continue
                    if _concerns_all(error):
                        failure = error
                        break
                    failure = failure or error
        finally:
            describe(self._server, self._described)
        if failure is not None:
            raise failure

    def _settle(self, entry: BundleEntry, stored: str) -> None:
        """Report an artifact after the server returned the SHA-256 `stored` for its key.

        Drop the record. An equal copy on this host becomes a copy of the server's artifact. A
        different copy is deleted, unless it is set aside.
        """
        stash, namespace = self._stash, self._stash.config.namespace
        self._done(entry, Sent.PRESENT if stored == entry.sha256 else Sent.DIFFERING)
        if self._is_dry:
            return
        with suppress(LocalTierError):  # the record stays for a later job
            if (copy := self._copy(entry)) is not None:
                with copy.file:
                    verdict = stash.standing.verdict_of_answer(
                        namespace, entry.key, copy.proof, stored, origin=copy.origin
                    )
                    if verdict is Verdict.DELETE:
                        stash.local.discard(
                            namespace, entry.key, origin=copy.origin, opened=copy.file
                        )
            self._forget(entry)

    def _may_publish(self, entry: BundleEntry) -> bool:
        """Return whether the artifact is still here, absent on the server, and not withdrawn.

        Report its outcome otherwise.

        Raises:
            CacheError: the server does not answer.
        """
        stash, namespace = self._stash, self._stash.config.namespace
        if (stored := stash.standing.stored(namespace, entry.key)) is not None:
            self._settle(entry, stored)
            return False
        try:
            copy = self._copy(entry)
        except LocalTierError as error:
            self._done(entry, error)
            return False
        if copy is None:
            self._forget(entry)
            self._done(entry, Sent.GONE)
            return False
        copy.file.close()
        if stash.standing.may_publish(namespace, entry.key, copy.proof):
            return True
        text = f"{stash.config.url} may have withdrawn {entry.key} on an earlier day"
        self._done(entry, CacheError(Reason.REFUSED, text))
        return False

    def _forget(self, entry: BundleEntry) -> None:
        if not self._is_dry:
            self._stash.unsent.remove(entry.key, entry.sha256)

    def _copy(self, entry: BundleEntry) -> "_Copy | None":
        """Return this host's copy of the recorded bytes, or None if it is gone.

        Raises:
            LocalTierError: the copy cannot be read.
        """
        tier, namespace = self._stash.local, self._stash.config.namespace
        offered = self._stash.standing.offered
        for origin in (OWN, offered, OWN):  # another process may move it back to OWN
            path = tier.path(namespace, entry.key, origin=origin)
            try:
                file = open_ours(path)  # unlike `LocalTier.open`, not counted as a use
                proof, size_bytes = read_provenance(file)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise LocalTierError(f"{entry.key} cannot be read: {error}") from error
            if (proof.sha256, size_bytes) == (entry.sha256, entry.size_bytes):
                return _Copy(file, proof, origin)
            file.close()
        return None

    @contextmanager
    def _open_copy(self, entry: BundleEntry) -> Iterator[IO[bytes]]:
        copy = self._copy(entry)
        if copy is None:
            raise LocalTierError(f"{entry.key} is no longer on this host")
        with copy.file:
            # The server has nothing under the key, so an interrupted upload has stored nothing.
            if copy.origin != OWN and not self._is_dry:
                self._stash.local.change_origin(
                    self._stash.config.namespace,
                    entry.key,
                    from_origin=copy.origin,
                    to_origin=OWN,
                )
            yield cast("IO[bytes]", FileRange(copy.file, 0, entry.size_bytes))  # without provenance

    def _check(self, entry: BundleEntry, blob: IO[bytes]) -> None:
        config, signatures = self._stash.config, self._stash.signatures
        own, signature = signatures.signing_key_id, entry.proof.signature
        if own and signature is None:
            raise VerificationError(
                Reason.UNSIGNED, f"{entry.key} was compiled without GRAPHSTASH_SIGNING_KEY"
            )
        # Readers may no longer trust another key, and most servers refuse to replace an artifact.
        if own and signature and signature.key_id != own:
            raise VerificationError(
                Reason.UNKNOWN_KEY,
                f"{entry.key} is signed by key {signature.key_id}, not by GRAPHSTASH_SIGNING_KEY",
            )
        check_blob(
            entry,
            blob,
            namespace=config.namespace,
            signatures=signatures,
            max_bytes=config.max_artifact,
        )

    def _publish(self, entry: BundleEntry) -> None:
        outcome: Outcome
        began = monotonic()
        try:
            with self._open_copy(entry) as blob:
                self._check(entry, blob)
                outcome = Sent.PUBLISHED if self._is_dry else self._upload(entry, blob)
        except LocalTierError as error:
            outcome = error
        except OSError as error:
            outcome = LocalTierError(f"{entry.key} cannot be read: {error}")
        except VerificationError as error:
            cause = error.__cause__ if isinstance(error, BundleError) else error
            if not self._is_dry and getattr(cause, "reason", None) not in _OF_SETTINGS:
                self._stash.local.discard(self._stash.config.namespace, entry.key)
                self._forget(entry)
            outcome = error
        finally:
            seconds = monotonic() - began
            self._left_seconds -= seconds
            self._spend(0, seconds)
        self._done(entry, outcome)

    def _upload(self, entry: BundleEntry, blob: IO[bytes]) -> Outcome:
        metadata = entry.metadata or ArtifactMetadata(compile_seconds=0, raw_size_bytes=0)
        self._stash.unsent.count_attempt(entry.key)
        self._left_bytes -= entry.size_bytes
        self._spend(entry.size_bytes, 0.0)
        try:
            self._stash.upload(
                self._server,
                entry.key,
                blob,
                entry.digest,
                metadata,
                from_origin=OWN,
                withdrawals=self._withdrawals,
                between_chunks=self._end_if_stopped,
            )
        except ConflictError as error:
            return error if error.code is ErrorCode.WITHHELD else Sent.DIFFERING
        except RefusedError as error:
            if is_temporary(error) or not self._server.may_write:
                raise
            # A permanent refusal: for example, the artifact is too large for the server.
            self._forget(entry)
            return error
        if entry.description is not None:
            self._described.append(entry.description)
            if len(self._described) >= MAX_DESCRIPTIONS // 4:
                describe(self._server, self._described)
        return Sent.PUBLISHED

    def _end_if_stopped(self) -> None:
        if self._is_stopped():
            raise TransportError(Reason.TIMEOUT, "the job ends")


class _Copy(NamedTuple):
    file: IO[bytes]
    proof: Provenance
    origin: str


def _is_withdrawn(error: CacheError) -> bool:
    """Return whether the server has withdrawn the bytes since the look-up."""
    return isinstance(error, RefusedError) and error.status == 412


def _concerns_all(error: CacheError) -> bool:
    """Return whether further uploads would fail for the same reason."""
    if isinstance(error, TransportError):
        return error.reason not in (Reason.TIMEOUT, Reason.RESET)
    return not isinstance(error, RefusedError) or error.status in (401, 403, 404)


def describe(server: ServerClient, described: list[Description]) -> None:
    """Upload descriptions of published artifacts, best effort, and clear the list."""
    if described:
        with suppress(CacheError):
            server.describe(described)
        described.clear()


def _value(entry: BundleEntry) -> float:
    return value_of(entry.metadata.compile_seconds if entry.metadata else 0.0, entry.size_bytes)
