"""Reader: finds artifacts and verifies them before use.

Reads one namespace after the other, in the order in which the job trusts them:

    1 this host's disk      copies that `standing` allows, verified on every read
    2 the server            digest, signature, key, then the payload

If a copy on the disk fails, the reader deletes it and asks the server. A copy signed by an unknown
key stays on the disk. If a download fails, the reader reports it to the server and continues with
the next namespace. If the server does not answer for a namespace, the reader still uses copies of
later namespaces.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from time import time
from typing import IO, TYPE_CHECKING, Literal, TypeAlias, cast

from graphstash._artifacts.envelope import Unsealed, unseal
from graphstash._artifacts.local_tier import LocalTier
from graphstash._artifacts.run_downloads import RunDownloads
from graphstash._artifacts.standing import Standing, Verdict
from graphstash._bounded_reader import BoundedReader, digest_of
from graphstash._http.client import ServerClient
from graphstash._trust.policy import Signatures, SignedSubject
from graphstash._trust.provenance import read_provenance
from graphstash.config import SignaturePolicy
from graphstash.errors import (
    BusyError,
    CacheError,
    LocalTierError,
    Reason,
    VerificationError,
)
from graphstash_schema import ArtifactKey, Digest, Namespace

if TYPE_CHECKING:
    from graphstash._trust.proof import Provenance

__all__ = ["Fetched", "Reader", "WhenBusy"]

_log = logging.getLogger("graphstash")

WhenBusy: TypeAlias = Callable[[BusyError, Callable[[], None]], bool]
"""Called when the server is busy, with a function to call at least once per second of a wait.
Returns True to call the server again. While another process of this host waits for the server, it
is called repeatedly with an error that has that wait's patience, and returns True to wait on."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Source and properties of a fetched artifact.

    Attributes:
        source: this host's disk, or the server.
        size_bytes: received bytes, 0 for a local hit.
        raw_size_bytes: size of the decompressed payload.
        compile_seconds: time of the compilation, as reported by the publisher.
        namespace: namespace of the artifact. None for a result of this process.
        is_unsigned: whether signatures are checked, and the artifact has neither a signature nor
            the code with which this user marks its own compilations.
        refused: failed verifications in namespaces that were read before.
    """

    source: Literal["local", "remote"]
    size_bytes: int
    raw_size_bytes: int
    compile_seconds: float
    namespace: Namespace | None = None
    is_unsigned: bool = False
    refused: tuple[VerificationError, ...] = ()


class Reader:
    """Find and verify artifacts. Thread-safe.

    Attributes:
        received_bytes: bytes of all downloads, used or not. Exact if only one thread reads.

    Args:
        between_chunks: called between chunks of a prefetch, which yields to urgent downloads.
            None for a download that the job needs.
    """

    def __init__(
        self,
        server: ServerClient,
        tier: LocalTier,
        signatures: Signatures,
        standing: Standing,
        downloads: RunDownloads,
        *,
        between_chunks: Callable[[], None] | None = None,
    ) -> None:
        self._server = server
        self._config = server.config
        self._tier = tier
        self._signatures = signatures
        self._standing = standing
        self._downloads = downloads
        self._between_chunks = between_chunks
        self.received_bytes = 0
        self._reported: set[tuple[Namespace, ArtifactKey]] = set()
        self._may_report = True

    def read(
        self, key: ArtifactKey, into: IO[bytes], *, when_busy: WhenBusy = lambda *_: False
    ) -> Fetched | None:
        """Write the verified payload to `into`. Return None for a miss in every namespace.

        If `when_busy` waits for a busy server, other processes of this host wait for this one.

        Raises:
            CacheError: the cache cannot answer, or no copy verifies.
        """
        if fetched := self._from_disk(self._config.readable[0], key, into):
            return fetched
        # If another process downloads the artifact, wait as long as the server may take to begin
        # its answer, and longer only while bytes arrive. If the server hangs, processes must not
        # time out one after another. While the other process waits for a busy server, wait with
        # the same patience. Otherwise this process would use its own patience afterwards.
        timeout = self._config.connect_seconds + self._config.first_byte_seconds
        with self._tier.exclusive(
            key,
            timeout_seconds=timeout,
            most_seconds=self._config.fetch_seconds,
            when_busy=lambda seconds: when_busy(
                BusyError(
                    "another process waits for the server",
                    retry_after_seconds=0.0,
                    patience_seconds=seconds,
                ),
                lambda: None,
            ),
        ) as signal:
            while True:
                try:
                    return self._read_namespaces(key, into, signal)
                except BusyError as error:
                    if not when_busy(error, partial(signal, busy_seconds=error.patience_seconds)):
                        raise

    def _read_namespaces(
        self, key: ArtifactKey, into: IO[bytes], signal_progress: Callable[[], None]
    ) -> Fetched | None:
        refused: list[VerificationError] = []
        failure: CacheError | None = None
        for number, namespace in enumerate(self._config.readable):
            # Another process may have fetched the artifact while this process waited.
            if fetched := self._from_disk(namespace, key, into):
                return dataclasses.replace(fetched, refused=tuple(refused))
            later = self._config.readable[number + 1 :]
            if (
                not self._server.is_configured
                or failure
                or self._has_only_later_copy(namespace, key, later)
            ):
                continue
            try:
                fetched = self._download(namespace, key, into, signal_progress)
            except VerificationError as error:
                named = VerificationError(error.reason, error.detail, namespace=namespace)
                named.__cause__ = error
                refused.append(named)
                _clear(into)
            except CacheError as error:
                failure = error
                _clear(into)
            else:
                if fetched is not None:
                    return dataclasses.replace(fetched, refused=tuple(refused))
        if failure is not None:
            raise failure
        if refused:
            # The artifact in the write namespace decides whether publishing is worthwhile.
            refused.sort(key=lambda error: error.namespace == self._config.namespace)
            *earlier, last = refused
            raise VerificationError(
                last.reason, last.detail, namespace=last.namespace, earlier=tuple(earlier)
            ) from last.__cause__
        return None

    def _has_only_later_copy(
        self, namespace: Namespace, key: ArtifactKey, later: Sequence[Namespace]
    ) -> bool:
        """Return whether a namespace lacks an artifact and this host has a later namespace's copy.
        `standing` asks for many keys in one request, so most calls cost no request.
        """
        if not any(self._standing.has(each, key) for each in later):
            return False
        try:
            return self._standing.stored(namespace, key) is None
        except CacheError:  # the download raises the same error
            return False

    def _from_disk(self, namespace: Namespace, key: ArtifactKey, into: IO[bytes]) -> Fetched | None:
        for origin in self._standing.origins:
            if fetched := self._from_file(namespace, key, into, origin=origin):
                return fetched
        return None

    def _from_file(
        self, namespace: Namespace, key: ArtifactKey, into: IO[bytes], *, origin: str
    ) -> Fetched | None:
        try:
            envelope = self._tier.open(namespace, key, origin=origin)
        except LocalTierError:  # another user's file or a failing disk: ask the server
            return None
        if envelope is None:
            return None
        with envelope:
            try:
                proof, size = read_provenance(envelope)
            except OSError as error:
                _log.debug("graphstash: the local tier: %s", error)
                self._tier.discard(namespace, key, origin=origin, opened=envelope)
                return None
            verdict = self._standing.verdict(namespace, key, proof, origin=origin)
            if verdict is not Verdict.USE:
                if verdict is Verdict.DELETE:
                    self._tier.discard(namespace, key, origin=origin, opened=envelope)
                return None
            try:
                return self._unpack_file(envelope, namespace, key, into, proof=proof, size=size)
            except VerificationError as error:
                # The server may have a valid copy: undo the partial write.
                _log.debug("graphstash: the local tier: %s", error)
                # Another job may trust the key, or a clock that is ahead makes it look expired.
                if error.reason is not Reason.UNKNOWN_KEY:
                    self._tier.discard(namespace, key, origin=origin, opened=envelope)
                _clear(into)
                return None

    def _unpack_file(
        self,
        envelope: IO[bytes],
        namespace: Namespace,
        key: ArtifactKey,
        into: IO[bytes],
        *,
        proof: "Provenance",
        size: int,
    ) -> Fetched:
        is_checked = self._signatures.policy is not SignaturePolicy.OFF
        try:
            digest = digest_of(envelope, size) if is_checked else None
        except OSError as error:
            raise VerificationError(Reason.CORRUPT, f"{key}: {error}") from None
        part = cast("IO[bytes]", _TierReader(envelope, size))
        if digest is None:
            unsealed = unseal(part, key, into, max_bytes=self._config.max_artifact, size_bytes=size)
            return _fetched(unsealed, namespace, proof, is_unsigned=False)
        return self._unpack_checked(part, namespace, key, into, digest=digest, proof=proof)

    def _download(
        self,
        namespace: Namespace,
        key: ArtifactKey,
        into: IO[bytes],
        signal_progress: Callable[[], None],
    ) -> Fetched | None:
        is_prefetch = self._between_chunks is not None

        def between_chunks() -> None:
            signal_progress()
            if self._between_chunks is not None:
                self._between_chunks()

        asked_at, before = time(), self._standing.deletion_mark(namespace)
        signal_progress()
        with self._tier.temporary() as envelope:
            with nullcontext() if is_prefetch else self._tier.downloading():
                try:
                    downloaded = self._server.download(
                        key, envelope, namespace=namespace, between_chunks=between_chunks
                    )
                finally:
                    self.received_bytes += envelope.seek(0, os.SEEK_END)
            if downloaded is None:
                return None
            envelope.seek(0)
            signal_progress()
            digest, metadata = downloaded.digest, downloaded.metadata
            from graphstash._trust.proof import Provenance  # most jobs download nothing

            proof = Provenance(
                signature=metadata.signature if metadata else None,
                compile_seconds=metadata.compile_seconds if metadata else 0.0,
                sha256=digest.sha256,
                stored_at=asked_at,
            )
            try:
                fetched = self._unpack_checked(
                    envelope, namespace, key, into, digest=digest, proof=proof, is_downloaded=True
                )
            except VerificationError as error:
                self._report(namespace, key, digest, error.reason)
                raise
            # A process that finds the file reads these records at once, so write them first.
            self._downloads.add(key, "prefetched" if is_prefetch else "server")
            self._standing.note(namespace, key, digest.sha256, asked_at=asked_at)
            origin = self._standing.origin
            self._tier.adopt(namespace, key, envelope, origin=origin, proof=proof)
        # If withdrawn copies were deleted during the download, this copy may have been missed.
        is_late = self._standing.deletion_mark(namespace) != before
        if is_late and not self._standing.confirms(namespace, key, digest.sha256):
            self._tier.discard(namespace, key, origin=origin)
        return fetched

    def _unpack_checked(
        self,
        envelope: IO[bytes],
        namespace: Namespace,
        key: ArtifactKey,
        into: IO[bytes],
        *,
        digest: Digest,
        proof: "Provenance",
        is_downloaded: bool = False,
    ) -> Fetched:
        """Decompress a blob with this digest if the signature policy allows it.

        For a download, the server announced the digest. For a file, the digest was computed from
        the file, and proves the contents only together with a signature.
        """
        checked: list[bool] = []

        def admit(raw_size_bytes: int) -> None:
            subject = SignedSubject(namespace, key, digest, raw_size_bytes)
            checked.append(self._signatures.check(subject, proof))

        limit = self._config.max_artifact
        unsealed = unseal(
            envelope,
            key,
            into,
            max_bytes=limit,
            size_bytes=digest.size_bytes,
            is_proven=lambda: is_downloaded or checked[0],
            admit=admit,
        )
        is_counted = self._signatures.policy is not SignaturePolicy.OFF
        return _fetched(
            unsealed,
            namespace,
            proof,
            is_unsigned=is_counted and not checked[0],
            received_bytes=digest.size_bytes if is_downloaded else None,
        )

    def _report(
        self, namespace: Namespace, key: ArtifactKey, digest: Digest, reason: Reason
    ) -> None:
        """Report the artifact to the server once, best effort, within the time of one call.

        After a timeout, report nothing more: otherwise every graph would wait for the server.
        """
        from graphstash_schema import ReportReason  # few jobs report anything

        is_reportable = reason.value in {each.value for each in ReportReason}
        if not is_reportable or (namespace, key) in self._reported or not self._may_report:
            return
        self._reported.add((namespace, key))
        try:
            self._server.report(
                key, digest=digest, reason=ReportReason(reason.value), namespace=namespace
            )
        except CacheError as error:
            self._may_report = error.reason is not Reason.TIMEOUT
            _log.debug("graphstash: not reported: %s", error)


class _TierReader(BoundedReader):
    """An envelope of the local tier. A read error makes it corrupt."""

    def read(self, size: int = -1) -> bytes:
        try:
            return super().read(size)
        except OSError as error:  # a bad block, or removed by another host on NFS
            raise VerificationError(Reason.CORRUPT, str(error)) from None


def _fetched(
    unsealed: Unsealed,
    namespace: Namespace,
    proof: "Provenance",
    *,
    is_unsigned: bool,
    received_bytes: int | None = None,
) -> Fetched:
    return Fetched(
        source="local" if received_bytes is None else "remote",
        size_bytes=received_bytes or 0,
        raw_size_bytes=unsealed.raw_size_bytes,
        compile_seconds=proof.compile_seconds or unsealed.compile_seconds,
        namespace=namespace,
        is_unsigned=is_unsigned,
    )


def _clear(into: IO[bytes]) -> None:
    if into.seekable():
        into.seek(0)
        into.truncate()
