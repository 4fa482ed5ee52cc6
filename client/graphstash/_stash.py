"""Stash: the cache as a program sees it. One server, one namespace, this host's disk in front.

Calls block and raise `CacheError` when the cache cannot help; a miss is None. For "give me the
compiled graph, whatever it takes" see `CompileCache.get_or_compile`, which never fails because of
the cache.
"""

import contextlib
import dataclasses
import io
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Self, cast

from graphstash._config import ClientConfig
from graphstash._envelope import seal, unseal
from graphstash._errors import (
    CacheError,
    ConflictError,
    LocalTierError,
    Reason,
    VerificationError,
)
from graphstash._local import LocalTier
from graphstash._remote import Remote
from graphstash_schema import ArtifactKey, ArtifactMetadata

__all__ = ["Fetched", "Stash"]


@dataclass(frozen=True, slots=True)
class Fetched:
    """How an artifact came.

    Attributes:
        source: this host's disk, or the server.
        size_bytes: received bytes, 0 for a local hit.
        raw_size_bytes: the payload.
        compile_seconds: what its compilation had taken, as its publisher said.
    """

    source: Literal["local", "remote"]
    size_bytes: int
    raw_size_bytes: int
    compile_seconds: float


class Stash(Remote):
    """Gets and puts artifacts; looks up, leases and remembers by the calls of `Remote`.

    Safe for many threads. Whoever makes a stash closes it.

    Args:
        config: URL, namespace, limits.
    """

    def __init__(self, config: ClientConfig) -> None:
        super().__init__(config)
        self.local = LocalTier(config.cache_dir, limit_bytes=config.local_limit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections and keeps the local tier within its limit."""
        super().close()
        self.local.close()

    def get(self, key: ArtifactKey) -> bytes | None:
        """The payload of an artifact, verified; None for a miss.

        Raises:
            CacheError: the cache cannot say, or what it gave does not verify.
        """
        buffer = io.BytesIO()
        return buffer.getvalue() if self._fetch(key, buffer) else None

    def fetch(self, key: ArtifactKey, destination: Path) -> Fetched | None:
        """Writes the verified payload of an artifact to `destination`; None for a miss.

        The file appears by rename, whole or not at all, and memory stays constant.

        Raises:
            CacheError: the cache cannot say, or what it gave does not verify.
        """
        try:
            with tempfile.NamedTemporaryFile(
                dir=destination.parent, prefix=".graphstash-", delete=False
            ) as file:
                partial = Path(file.name)
                try:
                    fetched = self._fetch(key, file)
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
        return self._fetch(key, cast("IO[bytes]", _Nowhere()))

    def put(
        self,
        key: ArtifactKey,
        payload: bytes | Path,
        metadata: ArtifactMetadata,
        *,
        local_only: bool = False,
    ) -> int:
        """Publishes an artifact and keeps it on this host's disk.

        It is on the disk before the upload begins: a host never waits for its own upload.

        Args:
            key: where it is found.
            payload: what the compiler made; a file is read in constant memory.
            metadata: what is known about it.
            local_only: leave the server out.

        Returns:
            Bytes sent: 0 when only the local tier took it, also because the job is read-only.

        Raises:
            ConflictError: other bytes are stored under the key and stay; the local tier keeps
                nothing then, so that all hosts run the same executable.
            CacheError: the cache cannot take it.
        """
        seconds = metadata.compile_seconds
        try:
            with self.local.temporary() as envelope:
                if isinstance(payload, Path):
                    sealed = seal(key, payload, envelope, compile_seconds=seconds)
                else:
                    with self.local.temporary() as raw:
                        raw.write_bytes(payload)
                        sealed = seal(key, raw, envelope, compile_seconds=seconds)
                if max(sealed.size_bytes, sealed.raw_size_bytes) > self.config.max_artifact:
                    raise CacheError(
                        Reason.TOO_LARGE,
                        f"{key} has {sealed.raw_size_bytes} bytes; "
                        f"GRAPHSTASH_MAX_ARTIFACT allows {self.config.max_artifact}",
                    )
                self.local.adopt(self.config.namespace, key, envelope)
                if local_only or self.config.read_only:
                    return 0
                kept = self.local.path(self.config.namespace, key)
                try:
                    self.upload(key, dataclasses.replace(sealed, path=kept), metadata)
                except ConflictError:
                    self.local.discard(self.config.namespace, key)
                    raise
                return sealed.size_bytes
        except OSError as error:
            raise LocalTierError(str(error)) from error

    def _fetch(self, key: ArtifactKey, into: IO[bytes]) -> Fetched | None:
        if fetched := self._from_local(key, into):
            return fetched
        # No longer than a server needs to begin its answer: behind a server that hangs, no process
        # must wait for all others first. A download that takes longer is made twice.
        patience = self.config.connect_seconds + self.config.first_byte_seconds
        with self.local.exclusive(key, timeout_seconds=patience):
            # Another process of this host may have fetched it while this one waited.
            return self._from_local(key, into) or self._from_server(key, into)

    def _from_local(self, key: ArtifactKey, into: IO[bytes]) -> Fetched | None:
        try:
            envelope = self.local.open(self.config.namespace, key)
        except LocalTierError:  # another user's, or a disk that fails: the server may have it
            return None
        if envelope is None:
            return None
        with envelope:
            try:
                unsealed = unseal(envelope, key, into, max_bytes=self.config.max_artifact)
            except VerificationError:
                # The server may have it whole; what was written so far is taken back.
                self.local.discard(self.config.namespace, key)
                if into.seekable():
                    into.seek(0)
                    into.truncate()
                return None
        return Fetched("local", 0, unsealed.raw_size_bytes, unsealed.compile_seconds)

    def _from_server(self, key: ArtifactKey, into: IO[bytes]) -> Fetched | None:
        with self.local.temporary() as envelope:
            size = self.download(key, envelope)
            if size is None:
                return None
            with envelope.open("rb") as file:
                unsealed = unseal(file, key, into, max_bytes=self.config.max_artifact)
            with contextlib.suppress(LocalTierError):  # the payload is there all the same
                self.local.adopt(self.config.namespace, key, envelope)
        return Fetched("remote", size, unsealed.raw_size_bytes, unsealed.compile_seconds)


class _Nowhere(io.RawIOBase):
    """Takes bytes and forgets them: verification without a second copy."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes
