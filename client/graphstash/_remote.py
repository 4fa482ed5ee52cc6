"""Remote: one server, call by call.

Nothing is kept and nothing is interpreted here: blobs are files, checked against the digest that
the server announced and nothing more. What is inside them is the business of `_stash`.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError

from graphstash._config import ClientConfig, holder_name
from graphstash._download import Downloaded, download
from graphstash._envelope import Sealed
from graphstash._errors import (
    ConflictError,
    LeaseLostError,
    Reason,
    RefusedError,
    TransportError,
)
from graphstash._proof import Part
from graphstash._transport import Answer, Transport
from graphstash_schema import (
    ArtifactInfo,
    ArtifactKey,
    ArtifactMetadata,
    Digest,
    LeaseOutcome,
    LeaseReply,
    LeaseRequest,
    LookupRequest,
    LookupResponse,
    Manifest,
    ManifestName,
    ManifestUpdate,
    Namespace,
    ReportReason,
    ReportRequest,
    ReportResponse,
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
    """Calls one server; safe for many threads.

    What has no `namespace` argument is about the one that the job writes to.

    Args:
        config: URL, namespaces, limits.

    Raises:
        ConfigError: on construction, when a file that it names cannot be used.
    """

    def __init__(self, config: ClientConfig) -> None:
        self.config = config
        self._transport = Transport(config)
        self._may_write = True

    @property
    def is_read_only(self) -> bool:
        """Whether there is no use in publishing: by the settings, or the server said so."""
        return self.config.read_only or not self._may_write

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()

    def download(
        self, key: ArtifactKey, target: Path, *, namespace: Namespace | None = None
    ) -> Downloaded | None:
        """Writes an artifact's blob to `target` and checks its digest.

        Returns:
            What came, None for a miss.

        Raises:
            CacheError: the server cannot say, or its bytes are not what it announced.
        """
        path = key.artifact_path(namespace or self.config.namespace)
        return download(self._transport, path, target, config=self.config)

    def upload(self, key: ArtifactKey, envelope: Sealed, metadata: ArtifactMetadata) -> None:
        """Publishes a blob.

        Raises:
            ConflictError: other bytes are stored under the key and stay.
            CacheError: the server cannot take it.
        """
        digest = Digest(envelope.sha256, envelope.size_bytes)
        with self._writing():
            self._transport.upload(
                key.artifact_path(self.config.namespace),
                headers={"Repr-Digest": digest.repr_digest, HEADER_METADATA: metadata.to_header()},
                chunks=_read_chunks(envelope.path, envelope.size_bytes),
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

    def report(
        self,
        key: ArtifactKey,
        *,
        digest: Digest,
        reason: ReportReason,
        namespace: Namespace | None = None,
    ) -> ReportResponse:
        """Tells the server that an artifact is wrong, so that an administrator looks at it.

        Raises:
            CacheError: the server cannot take it.
        """
        request = ReportRequest(key=key, digest=str(digest), reason=reason)
        answer = self._transport.call(
            "POST",
            f"{API_PREFIX}/{namespace or self.config.namespace}/artifacts:report",
            json=request.model_dump_json().encode(),
        )
        return _parsed(ReportResponse, answer)

    def acquire(self, key: ArtifactKey, *, wait_seconds: float = 0.0) -> LeaseReply:
        """Asks for the right to compile; waits on the server while somebody else holds it.

        Raises:
            CacheError: the cache cannot say.
        """
        request = LeaseRequest(holder=holder_name(), ttl_seconds=self.config.lease_seconds)
        with self._writing():
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
        with self._writing():
            self._transport.call("PUT", self._manifest_path(name), json=body)

    def server_stats(self) -> ServerStats:
        """The server's statistics.

        Raises:
            CacheError: the cache cannot say.
        """
        return _parsed(ServerStats, self._transport.call("GET", f"{API_PREFIX}/stats"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Whoever has no right to write is told once, and this job only reads from then on."""
        try:
            yield
        except (ConflictError, LeaseLostError):
            raise
        except RefusedError as error:
            # To those who may not even read, a namespace looks as if it was not there. Without a
            # token, 401 says the same, and reading may go on.
            is_right_missing = error.status in (403, 404)
            if not is_right_missing and not (error.status == 401 and self._transport.is_anonymous):
                raise
            self._may_write = False
            told = f"{error.detail}; this job only reads from now on"
            raise RefusedError(told, code=error.code, status=error.status) from None

    def _manifest_path(self, name: ManifestName) -> str:
        return f"{API_PREFIX}/{self.config.namespace}/manifests/{name}"


def _read_chunks(path: Path, size_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        envelope = Part(file, size_bytes)  # a proof lies behind it
        while chunk := envelope.read(_CHUNK_BYTES):
            yield chunk


def _parsed(model: type[_Model], answer: Answer) -> _Model:
    try:
        return model.model_validate_json(answer.body)
    except ValidationError as error:
        raise TransportError(Reason.PROTOCOL, f"not a {model.__name__}: {error}") from None
