"""Stash: this host's disk and one server as one store of verified artifacts.

A stash reads from one or several namespaces and writes to one. Calls block, return None for a miss,
and raise `CacheError` if the cache cannot help. `CompileCache.get_or_compile` compiles instead.
"""

import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import time
from typing import IO, TYPE_CHECKING, Final, Self, TypeAlias

from graphstash._artifacts.envelope import NullFile, seal
from graphstash._artifacts.local_tier import OWN, LocalTier
from graphstash._artifacts.reader import Fetched, Reader, WhenBusy
from graphstash._artifacts.run_downloads import RunDownloads
from graphstash._artifacts.standing import Standing
from graphstash._artifacts.unsent import Unsent
from graphstash._http.client import ServerClient
from graphstash._replacing import replacing
from graphstash._trust.policy import Signatures, SignedSubject
from graphstash.config import ClientConfig
from graphstash.errors import (
    BusyError,
    CacheError,
    ConflictError,
    LocalTierError,
    Reason,
    RefusedError,
    VerificationError,
)
from graphstash_schema import RETRYABLE, ArtifactKey, Digest, Namespace

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from graphstash._tracing import Tracer
    from graphstash_schema import ArtifactMetadata
    from graphstash_schema.explanation import Description

__all__ = ["Destination", "Fetched", "Memory", "Stash", "is_temporary"]

_UNSENT: Final = frozenset((Reason.CONNECT, Reason.TLS, Reason.CIRCUIT_OPEN, Reason.NO_SERVER))
"""Reasons for which an upload failed before the server received any of it."""

Destination: TypeAlias = Path | io.BytesIO
"""Destination of a payload: a file, which is renamed into place, or memory."""


class Memory(io.BytesIO):
    """Memory for one payload of at most `max_bytes`. Default: no limit. It refuses a larger payload
    before the decompression, because `unseal` writes the last byte first.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write bytes at the current position, or raise VerificationError beyond the limit."""
        size = self.tell() + memoryview(data).nbytes
        if self._max_bytes is not None and size > self._max_bytes:
            raise VerificationError(Reason.TOO_LARGE, f"{size} bytes; at most {self._max_bytes}")
        return super().write(data)


class Stash:
    """Get and put verified artifacts, on this host's disk and one server.

    Thread-safe. The creator of a stash closes it.

    Attributes:
        server: client for direct calls: look-ups, leases, manifests, statistics.
        local: this host's disk.
        standing: decides which copies on the disk may still be used.
        downloads: downloads of this run.
        unsent: records of artifacts to publish later.

    Args:
        run: name of the run whose processes share records on the disk. Default: none.
        tracer: records each call to the server as a span.

    Raises:
        ConfigError: a configured file cannot be used.
    """

    def __init__(
        self, config: ClientConfig, *, run: str = "", tracer: "Tracer | None" = None
    ) -> None:
        self.config = config
        self.server = ServerClient(config, tracer=tracer)
        self.local = LocalTier(config.cache_dir, limit_bytes=config.local_limit)
        self.signatures = Signatures(config, secret=self.local.secret)
        folder = self.local.run_folder(run) if run else None
        self.downloads = RunDownloads(folder)
        self.standing = Standing(self.server, self.local, folder)
        self.unsent = Unsent(self.local, config)
        self._reader = Reader(
            self.server, self.local, self.signatures, self.standing, self.downloads
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, and evict from the local tier if it exceeds its limit."""
        self.server.close()
        self.local.close()

    def get(self, key: ArtifactKey) -> bytes | None:
        """Return the verified payload of an artifact, or None for a miss, see `fetch`."""
        buffer = io.BytesIO()
        return buffer.getvalue() if self.fetch(key, buffer) else None

    def fetch(
        self,
        key: ArtifactKey,
        destination: Destination,
        *,
        when_busy: WhenBusy = lambda *_: False,
    ) -> Fetched | None:
        """Write the verified payload of an artifact to `destination`. Return None for a miss.

        A file is renamed into place, and takes constant memory. A buffer must be empty; after an
        error its contents are undefined. `when_busy` may wait for a busy server. Default: raise
        `BusyError`.

        Raises:
            CacheError: the cache cannot answer, or the artifact does not verify.
        """
        if isinstance(destination, io.BytesIO):
            return self._reader.read(key, destination, when_busy=when_busy)
        try:
            with replacing(destination, is_text=False, is_durable=False) as file:
                fetched = self._reader.read(key, file, when_busy=when_busy)
                if not fetched:
                    file.close()
        except OSError as error:
            raise LocalTierError(f"{destination}: {error}") from error
        return fetched

    def ensure_local(self, key: ArtifactKey) -> Fetched | None:
        """Copy an artifact to this host's disk without decompression. Otherwise like `fetch`."""
        return self._reader.read(key, NullFile())

    def is_on_this_host(self, key: ArtifactKey) -> bool:
        """Return whether the local tier has a copy, even if the copy does not verify."""
        return any(self.standing.has(name, key) for name in self.config.readable)

    def forget(self, key: ArtifactKey) -> None:
        """Remove this job's copies of an unusable artifact from this host's disk."""
        for namespace in self.config.readable:
            self._discard(namespace, key)

    def _discard(self, namespace: Namespace, key: ArtifactKey) -> None:
        for origin in self.standing.origins:
            self.local.discard(namespace, key, origin=origin)

    def put(
        self,
        key: ArtifactKey,
        payload: bytes | Path,
        metadata: "ArtifactMetadata",
        *,
        local_only: bool = False,
        description: "Description | None" = None,
        when_busy: Callable[[BusyError], bool] = lambda _: False,
    ) -> int:
        """Publish an artifact and keep it on this host's disk.

        Write to the disk first, so that other processes of this host need not wait for the upload.
        If the disk fails, add the reason to `local.troubles`, and still upload. If the upload fails
        temporarily, a later job publishes the copy on the disk. A file is read in constant memory.

        Returns:
            Bytes sent. 0 if `local_only` or `server.is_read_only` is true.

        Raises:
            ConflictError: the server has other bytes, or withholds the key. The local tier then
                deletes its copies, so that all hosts run the same executable.
            CacheError: the cache cannot store the artifact.
        """
        try:
            with self.local.temporary() as envelope:
                sealed = seal(key, payload, envelope)
                if max(sealed.size_bytes, sealed.raw_size_bytes) > self.config.max_artifact:
                    raise CacheError(
                        Reason.TOO_LARGE,
                        f"{key} has {sealed.raw_size_bytes} bytes; "
                        f"GRAPHSTASH_MAX_ARTIFACT allows {self.config.max_artifact}",
                    )
                digest = Digest(sealed.sha256, sealed.size_bytes)
                proof = self.signatures.prove(
                    SignedSubject(self.config.namespace, key, digest, sealed.raw_size_bytes)
                )
                stored_at = time()
                proof = proof.model_copy(
                    update={
                        "compile_seconds": metadata.compile_seconds,
                        "sha256": digest.sha256,
                        "stored_at": stored_at,
                    }
                )
                metadata = metadata.model_copy(update={"signature": proof.signature})
                is_kept = local_only or self.server.is_read_only
                origin = OWN if is_kept else self.standing.offered
                is_here = self.local.adopt(
                    self.config.namespace, key, envelope, origin=origin, proof=proof
                )
                if is_kept:
                    if is_here and not local_only and self.config.awaits_server:
                        self.unsent.add(key, digest, metadata, description)
                    return 0
                # An older copy of this key that was not meant for a server, or was imported.
                self.local.discard(self.config.namespace, key, origin=OWN)
                recording = self.unsent.uploading(key, digest, metadata, description)
                with recording if is_here else nullcontext():
                    try:
                        self.upload(
                            self.server,
                            key,
                            envelope,
                            digest,
                            metadata,
                            from_origin=origin,
                            asked_at=stored_at,
                            when_busy=when_busy,
                        )
                    except CacheError as error:
                        if not is_temporary(error):
                            self.unsent.remove(key, digest.sha256)
                        raise
                return sealed.size_bytes
        except OSError as error:
            raise LocalTierError(str(error)) from error

    def upload(
        self,
        server: ServerClient,
        key: ArtifactKey,
        envelope: IO[bytes],
        digest: Digest,
        metadata: "ArtifactMetadata",
        *,
        from_origin: str,
        asked_at: float | None = None,
        withdrawals: str | None = None,
        between_chunks: Callable[[], None] = lambda: None,
        when_busy: Callable[[BusyError], bool] = lambda _: False,
    ) -> None:
        """Upload an artifact from the local tier, and update the origin of the tier's copy.

        A conflict deletes the copy. `standing` records that the server had the artifact at the time
        `asked_at`, by default the end of the upload. `when_busy` may wait for a busy server, and
        returns whether to upload again. Raises as `put` does.
        """
        namespace, to_origin = self.config.namespace, self.standing.origin
        is_in_doubt = False
        while True:
            try:
                server.upload(
                    key,
                    envelope,
                    digest,
                    metadata,
                    withdrawals=withdrawals,
                    between_chunks=between_chunks,
                )
            except CacheError as error:
                is_in_doubt |= error.is_in_doubt
                if isinstance(error, BusyError) and when_busy(error):
                    continue
                if isinstance(error, ConflictError):
                    self._discard(namespace, key)
                    self.unsent.remove(key, digest.sha256)
                else:
                    is_absent = _is_not_stored(error) and not is_in_doubt
                    origin = OWN if is_absent else self.standing.offered
                    if origin != from_origin:
                        self.local.change_origin(
                            namespace, key, from_origin=from_origin, to_origin=origin
                        )
                raise
            break
        at = time() if asked_at is None else asked_at
        self.standing.note(namespace, key, digest.sha256, asked_at=at)
        self.local.change_origin(namespace, key, from_origin=from_origin, to_origin=to_origin)
        self.unsent.remove(key, digest.sha256)


def is_temporary(error: CacheError) -> bool:
    """Return whether a later upload may succeed after this error."""
    if isinstance(error, RefusedError):
        if error.status >= 500 or error.status == 401:  # an expired token
            return True
        return error.code in RETRYABLE or error.status in (408, 412)
    return not isinstance(error, LocalTierError | VerificationError)


def _is_not_stored(error: CacheError) -> bool:
    """Return whether a failed upload certainly stored nothing. False if the answer was lost."""
    is_refused = isinstance(error, RefusedError) and error.status < 500
    return is_refused or isinstance(error, BusyError) or error.reason in _UNSENT
