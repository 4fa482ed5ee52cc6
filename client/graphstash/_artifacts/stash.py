"""Stash: the cache as a program sees it: one server, with this host's disk in front.

It reads from one namespace or several and writes to one; what it hands out is verified.

Calls block and raise `CacheError` when the cache cannot help; a miss is None. For "give me the
compiled graph, whatever it takes" see `CompileCache.get_or_compile`, which never fails because of
the cache.
"""

import io
import tempfile
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from graphstash._artifacts.envelope import Nowhere, seal
from graphstash._artifacts.local_tier import OWN, LocalTier
from graphstash._artifacts.reader import Fetched, Reader
from graphstash._artifacts.run_downloads import RunDownloads
from graphstash._artifacts.standing import Standing
from graphstash._http.client import ServerClient
from graphstash._trust.policy import Signatures
from graphstash._trust.provenance import SignedSubject
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
from graphstash_schema import ArtifactKey, ArtifactMetadata, Digest, ErrorCode, Namespace

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from graphstash._tracing import Tracer

__all__ = ["Destination", "Fetched", "Memory", "Stash"]

_UNSENT: Final = frozenset((Reason.CONNECT, Reason.TLS, Reason.CIRCUIT_OPEN, Reason.NO_SERVER))
"""Reasons of uploads of which the server has received nothing."""

Destination: TypeAlias = Path | io.BytesIO
"""Where a payload goes: a file, which appears whole by rename, or memory."""


class Memory(io.BytesIO):
    """Memory for one payload, no larger than `max_bytes`; None is no limit.

    A larger one is refused, when its header says its size: nothing of it is unpacked.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: "ReadableBuffer", /) -> int:
        """Adds bytes.

        Raises:
            VerificationError: there would be more than the limit.
        """
        size = self.tell() + memoryview(data).nbytes
        if self._max_bytes is not None and size > self._max_bytes:
            raise VerificationError(Reason.TOO_LARGE, f"{size} bytes; at most {self._max_bytes}")
        return super().write(data)


class Stash:
    """Gets and puts verified artifacts, through this host's disk.

    Safe for many threads. Whoever makes a stash closes it.

    Attributes:
        config: the settings.
        server: calls the server directly: look-ups, leases, manifests, statistics.
        local: this host's disk.
        signatures: what may be used.
        standing: which of its copies may still be used.
        downloads: what this run has brought there.

    Args:
        config: URL, namespaces, keys, limits.
        run: the run that this process is part of, where it shares its disk with others of it.
        tracer: makes each call of the server a span.

    Raises:
        ConfigError: on construction, when a file that it names cannot be used.
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
        self._reader = Reader(
            self.server, self.local, self.signatures, self.standing, self.downloads
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and keeps the local tier within its limit."""
        self.server.close()
        self.local.close()

    def get(self, key: ArtifactKey) -> bytes | None:
        """The payload of an artifact, verified; None for a miss.

        Raises:
            CacheError: the cache cannot say, or what it gave does not verify.
        """
        buffer = io.BytesIO()
        return buffer.getvalue() if self.fetch(key, buffer) else None

    def fetch(self, key: ArtifactKey, destination: Destination) -> Fetched | None:
        """Writes the verified payload of an artifact to `destination`; None for a miss.

        A file appears by rename, whole or not at all, and memory stays constant. A buffer is empty
        before, and of no use unless this returns.

        Raises:
            CacheError: the cache cannot say, or what it gave does not verify.
        """
        if isinstance(destination, io.BytesIO):
            return self._reader.read(key, destination)
        try:
            with tempfile.NamedTemporaryFile(
                dir=destination.parent, prefix=".graphstash-", delete=False
            ) as file:
                partial = Path(file.name)
                try:
                    fetched = self._reader.read(key, file)
                    file.close()
                    if fetched:
                        partial.replace(destination)
                finally:
                    partial.unlink(missing_ok=True)
        except OSError as error:
            raise LocalTierError(f"{destination}: {error}") from error
        return fetched

    def ensure_local(self, key: ArtifactKey) -> Fetched | None:
        """Brings an artifact to this host's disk without unpacking it; None for a miss.

        Raises:
            CacheError: the cache cannot say, or what it gave does not verify.
        """
        return self._reader.read(key, Nowhere())

    def claim_prefetch(self, job: str) -> bool:
        """Whether this process prefetches for its run; True for the first that asks."""
        return self.downloads.claim(f"prefetch-{job}")

    def release_prefetch(self, job: str) -> None:
        """Lets another process of the run prefetch: this one ended before it was done."""
        self.downloads.release(f"prefetch-{job}")

    def is_on_this_host(self, key: ArtifactKey) -> bool:
        """Whether the local tier has something under the key, sound or not."""
        return any(self.standing.has(name, key) for name in self.config.readable)

    def forget(self, key: ArtifactKey) -> None:
        """Removes an artifact that turned out to be of no use from this host's disk."""
        for namespace in self.config.readable:
            self._discard(namespace, key)

    def _discard(self, namespace: Namespace, key: ArtifactKey) -> None:
        for origin in self.standing.origins:
            self.local.discard(namespace, key, origin=origin)

    def _hand_over(self, key: ArtifactKey, *, to_origin: str) -> None:
        self.local.hand_over(
            self.config.namespace, key, from_origin=self.standing.offered, to_origin=to_origin
        )

    def put(
        self,
        key: ArtifactKey,
        payload: bytes | Path,
        metadata: ArtifactMetadata,
        *,
        local_only: bool = False,
    ) -> int:
        """Publishes an artifact and keeps it on this host's disk.

        It is on the disk before the upload begins: a host never waits for its own upload. A disk
        that refuses is noted in `local.troubles`, and the upload goes on.

        Args:
            key: where it is found.
            payload: what the compiler made; a file is read in constant memory.
            metadata: what is known about it.
            local_only: leave the server out.

        Returns:
            Bytes sent: 0 when only the local tier took it, also because the job is read-only.

        Raises:
            ConflictError: other bytes are stored under the key and stay; the local tier keeps
                nothing then, so that all hosts run the same executable, and nothing of what is
                withheld.
            CacheError: the cache cannot take it.
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
                if local_only or self.server.is_read_only:
                    self.local.adopt(self.config.namespace, key, envelope, proof=proof)
                    return 0
                offered = self.standing.offered
                self.local.adopt(self.config.namespace, key, envelope, origin=offered, proof=proof)
                self.local.discard(self.config.namespace, key)  # from an earlier job
                metadata = metadata.model_copy(update={"signature": proof.signature})
                try:
                    self.server.upload(key, envelope, digest, metadata)
                except CacheError as error:
                    if _is_withdrawn(error):
                        self._discard(self.config.namespace, key)
                    elif _is_not_stored(error):
                        self._hand_over(key, to_origin=OWN)
                    raise
                self.standing.note(self.config.namespace, key, digest.sha256, asked_at=stored_at)
                self._hand_over(key, to_origin=self.standing.origin)
                return sealed.size_bytes
        except OSError as error:
            raise LocalTierError(str(error)) from error


def _is_withdrawn(error: CacheError) -> bool:
    """Whether the server has other bytes under the key, or withholds it."""
    is_withheld = isinstance(error, RefusedError) and error.code is ErrorCode.WITHHELD
    return is_withheld or isinstance(error, ConflictError)


def _is_not_stored(error: CacheError) -> bool:
    """Whether a failed upload has certainly stored nothing. A lost answer leaves that open."""
    is_refused = isinstance(error, RefusedError) and error.status < 500
    return is_refused or isinstance(error, BusyError) or error.reason in _UNSENT
