"""Stash: the cache as a program sees it. One server, one namespace, this host's disk in front.

Calls block and raise `CacheError` when the cache cannot help; a miss is None. For "give me the
compiled graph, whatever it takes" see `CompileCache.get_or_compile`, which never fails because of
the cache.
"""

import contextlib
import io
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal, Self

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
        with Path(os.devnull).open("wb") as nowhere:
            return self._fetch(key, nowhere)

    def put(self, key: ArtifactKey, payload: bytes | Path, metadata: ArtifactMetadata) -> int:
        """Publishes an artifact and keeps it on this host's disk.

        Args:
            key: where it is found.
            payload: what the compiler made; a file is read in constant memory.
            metadata: what is known about it.

        Returns:
            Bytes sent: 0 when only the local tier took it because the job is read-only.

        Raises:
            ConflictError: other bytes are stored under the key and stay; the local tier gets
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
                try:
                    if not self.config.read_only:
                        self.upload(key, sealed, metadata)
                except ConflictError:
                    raise
                except CacheError:
                    # The server's trouble is no reason to compile again on this host.
                    self.local.adopt(self.config.namespace, key, envelope)
                    raise
                self.local.adopt(self.config.namespace, key, envelope)
                return 0 if self.config.read_only else sealed.size_bytes
        except OSError as error:
            raise LocalTierError(str(error)) from error

    def _fetch(self, key: ArtifactKey, into: IO[bytes]) -> Fetched | None:
        if fetched := self._from_local(key, into):
            return fetched
        with self.local.exclusive(key, timeout_seconds=self.config.fetch_seconds):
            # Another process of this host may have fetched it while this one waited.
            return self._from_local(key, into) or self._from_server(key, into)

    def _from_local(self, key: ArtifactKey, into: IO[bytes]) -> Fetched | None:
        envelope = self.local.open(self.config.namespace, key)
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
