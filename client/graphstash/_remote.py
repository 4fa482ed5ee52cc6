"""Remote: one namespace of one server, call by call.

Nothing is kept and nothing is interpreted here: blobs are files, checked against the digest that
the server announced and nothing more. What is inside them is the business of `_stash`.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from graphstash._config import ClientConfig, holder_name
from graphstash._envelope import Sealed
from graphstash._errors import (
    CacheError,
    LocalTierError,
    Reason,
    TransportError,
    VerificationError,
)
from graphstash._network import Deadline
from graphstash._transport import Answer, Transport
from graphstash_schema import (
    ArtifactInfo,
    ArtifactKey,
    ArtifactMetadata,
    Digest,
    DigestHasher,
    InvalidValueError,
    LeaseOutcome,
    LeaseReply,
    LeaseRequest,
    LookupRequest,
    LookupResponse,
    Manifest,
    ManifestName,
    ManifestUpdate,
    ServerStats,
    VerifyResponse,
)
from graphstash_schema.protocol import (
    API_PREFIX,
    HEADER_LEASE,
    HEADER_METADATA,
    MAX_LOOKUP_KEYS,
    MAX_MANIFEST_ENTRIES,
)

__all__ = ["Remote"]

_CHUNK_BYTES: Final = 1024**2

_VERIFY_SECONDS: Final = 5.0
"""A server reads some gigabytes in that time; if it takes longer, the next client asks again."""

_Model = TypeVar("_Model", bound=BaseModel)


class Remote:
    """Calls one server for one namespace; safe for many threads.

    Args:
        config: URL, namespace, limits.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._transport = Transport(config)

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()

    def download(self, key: ArtifactKey, target: Path) -> int | None:
        """Writes an artifact's blob to `target` and checks its digest.

        Returns:
            Size of the blob, None for a miss.

        Raises:
            CacheError: the server cannot say, or its bytes are not what it announced.
        """
        deadline = Deadline(self.config.fetch_seconds)
        took_redirects = self._transport.takes_redirects
        try:
            return self._download(key, target, deadline)
        except (TransportError, VerificationError):
            if self._transport.takes_redirects or not took_redirects:
                raise
        # Where the server sent us, the blob could not be had: the server itself has it.
        return self._download(key, target, deadline)

    def _download(self, key: ArtifactKey, target: Path, deadline: Deadline) -> int | None:
        path = key.artifact_path(self.config.namespace)
        with self._transport.download(path, deadline=deadline) as (answer, chunks):
            if answer.status == 404:
                return None
            announced, metadata = _announced(answer)
            if announced.size_bytes > self.config.max_artifact:
                raise CacheError(
                    Reason.TOO_LARGE,
                    f"{key} has {announced.size_bytes} bytes; "
                    f"GRAPHSTASH_MAX_ARTIFACT allows {self.config.max_artifact}",
                )
            if metadata:
                # A fetch that takes longer than the compilation is not worth waiting for.
                deadline.shorten(max(metadata.compile_seconds, self.config.first_byte_seconds))
            hasher = DigestHasher()
            try:
                with target.open("wb") as file:
                    for chunk in chunks:
                        hasher.update(chunk)
                        file.write(chunk)
                        if hasher.size_bytes > announced.size_bytes:
                            break
            except OSError as error:
                raise LocalTierError(f"{target}: {error}") from error
        received = hasher.digest()
        if received != announced:
            if answer.is_redirected:
                self._transport.takes_redirects = False
            raise VerificationError(
                Reason.DIGEST_MISMATCH,
                f"{key}: announced {announced} ({announced.size_bytes} bytes), "
                f"received {received} ({received.size_bytes} bytes)",
            )
        return received.size_bytes

    def upload(self, key: ArtifactKey, envelope: Sealed, metadata: ArtifactMetadata) -> None:
        """Publishes a blob.

        Raises:
            ConflictError: other bytes are stored under the key and stay.
            CacheError: the server cannot take it.
        """
        digest = Digest(envelope.sha256, envelope.size_bytes)
        self._transport.upload(
            key.artifact_path(self.config.namespace),
            headers={"Repr-Digest": digest.repr_digest, HEADER_METADATA: metadata.to_header()},
            chunks=_read_chunks(envelope.path),
            size_bytes=envelope.size_bytes,
        )

    def lookup(self, keys: Iterable[ArtifactKey]) -> LookupResponse:
        """Asks which of many artifacts the server has; more than 1,000 take several calls.

        Raises:
            CacheError: the cache cannot say.
        """
        wanted = tuple(keys)
        found: list[ArtifactInfo] = []
        missing: list[ArtifactKey] = []
        for start in range(0, len(wanted), MAX_LOOKUP_KEYS):
            request = LookupRequest(keys=wanted[start : start + MAX_LOOKUP_KEYS])
            answer = self._transport.call(
                "POST",
                f"{API_PREFIX}/{self.config.namespace}/artifacts:lookup",
                json=request.model_dump_json().encode(),
            )
            reply = _parsed(LookupResponse, answer)
            found += reply.found
            missing += reply.missing
        return LookupResponse(found=tuple(found), missing=tuple(missing))

    def verify(self, key: ArtifactKey) -> VerifyResponse:
        """Asks the server to read an artifact's blob again, and to drop it if it is damaged.

        Raises:
            CacheError: the cache cannot say.
        """
        answer = self._transport.call(
            "POST",
            f"{API_PREFIX}/{self.config.namespace}/artifacts:verify",
            json=key.model_dump_json().encode(),
            patience_seconds=_VERIFY_SECONDS,
        )
        return _parsed(VerifyResponse, answer)

    def acquire(self, key: ArtifactKey, *, wait_seconds: float = 0.0) -> LeaseReply:
        """Asks for the right to compile; waits on the server while somebody else holds it.

        Raises:
            CacheError: the cache cannot say.
        """
        request = LeaseRequest(holder=holder_name(), ttl_seconds=self.config.lease_seconds)
        answer = self._transport.call(
            "POST",
            key.lease_path(self.config.namespace),
            headers={"Prefer": f"wait={math.ceil(wait_seconds)}"},
            json=request.model_dump_json().encode(),
            patience_seconds=wait_seconds,
        )
        return _parsed(LeaseReply, answer)

    def renew(self, key: ArtifactKey, token: str) -> None:
        """Keeps a lease alive.

        Raises:
            LeaseLostError: it expired.
            CacheError: the cache cannot say.
        """
        request = LeaseRequest(holder=holder_name(), ttl_seconds=self.config.lease_seconds)
        self._transport.call(
            "PUT",
            key.lease_path(self.config.namespace),
            headers={HEADER_LEASE: token},
            json=request.model_dump_json().encode(),
        )

    def release(self, key: ArtifactKey, token: str, outcome: LeaseOutcome) -> None:
        """Ends a lease; waiters fetch the artifact, or the next of them compiles.

        Raises:
            LeaseLostError: it had expired.
            CacheError: the cache cannot say.
        """
        self._transport.call(
            "DELETE",
            f"{key.lease_path(self.config.namespace)}?outcome={outcome}",
            headers={HEADER_LEASE: token},
        )

    def manifest(self, name: ManifestName) -> Manifest | None:
        """The artifacts that earlier runs of a job used; None when there were none.

        Raises:
            CacheError: the cache cannot say.
        """
        answer = self._transport.call("GET", self._manifest_path(name))
        return None if answer.status == 404 else _parsed(Manifest, answer)

    def update_manifest(self, name: ManifestName, keys: Iterable[ArtifactKey]) -> None:
        """Adds what this run used.

        Raises:
            CacheError: the cache cannot take it.
        """
        newest = tuple(keys)[-MAX_MANIFEST_ENTRIES:]
        body = ManifestUpdate(keys=newest).model_dump_json().encode()
        self._transport.call("PUT", self._manifest_path(name), json=body)

    def server_stats(self) -> ServerStats:
        """The server's statistics.

        Raises:
            CacheError: the cache cannot say.
        """
        return _parsed(ServerStats, self._transport.call("GET", f"{API_PREFIX}/stats"))

    def _manifest_path(self, name: ManifestName) -> str:
        return f"{API_PREFIX}/{self.config.namespace}/manifests/{name}"


def _read_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _announced(answer: Answer) -> tuple[Digest, ArtifactMetadata | None]:
    try:
        size = int(answer.headers["Content-Length"])
        digest = Digest.parse_repr_digest(answer.headers["Repr-Digest"], size_bytes=size)
        header = answer.headers.get(HEADER_METADATA)
        return digest, ArtifactMetadata.from_header(header) if header else None
    except (KeyError, ValueError, InvalidValueError) as error:
        raise TransportError(Reason.PROTOCOL, f"an artifact without digest: {error}") from None


def _parsed(model: type[_Model], answer: Answer) -> _Model:
    try:
        return model.model_validate_json(answer.body)
    except ValidationError as error:
        raise TransportError(Reason.PROTOCOL, f"not a {model.__name__}: {error}") from None
