"""Download an artifact's blob and check it against the digest that the server announces."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO

from graphstash._http.deadline import Deadline
from graphstash._http.errors import problem_of
from graphstash._http.transport import Answer, Transport
from graphstash.config import ClientConfig
from graphstash.errors import LocalTierError, Reason, TransportError, VerificationError
from graphstash_schema import ArtifactMetadata, Digest, DigestHasher, ErrorCode, InvalidValueError
from graphstash_schema.protocol import HEADER_METADATA

__all__ = ["Downloaded", "download"]


@dataclass(frozen=True, slots=True)
class Downloaded:
    """Digest of the received bytes, and the publisher's metadata if there is any."""

    digest: Digest
    metadata: ArtifactMetadata | None


def download(
    transport: Transport,
    path: str,
    target: IO[bytes],
    *,
    config: ClientConfig,
    between_chunks: Callable[[], None] = lambda: None,
) -> Downloaded | None:
    """Write a blob to `target` and rewind it. Return None for a miss.

    The bytes are valid only if this function returns. Read them from this file object, because
    another process may replace the file under its name.

    `between_chunks` is called after every chunk but the last. An exception from it ends the
    download. Its run time does not count against the deadline.

    Raises:
        CacheError: the server does not answer, or the blob is too large or has another digest.
    """
    deadline = Deadline(config.fetch_seconds)
    took_redirects = transport.takes_redirects
    try:
        return _download(transport, path, target, config, deadline, between_chunks=between_chunks)
    except (TransportError, VerificationError):
        if transport.takes_redirects or not took_redirects:
            raise
    # The storage that the server redirected to failed. Fetch the blob from the server.
    return _download(transport, path, target, config, deadline, between_chunks=between_chunks)


def _download(
    transport: Transport,
    path: str,
    target: IO[bytes],
    config: ClientConfig,
    deadline: Deadline,
    *,
    between_chunks: Callable[[], None],
) -> Downloaded | None:
    with transport.download(path, deadline=deadline) as (answer, chunks):
        if answer.status == 404:
            # Most responses are misses. Parse the body only if it names the code.
            problem = (
                problem_of(answer.body) if ErrorCode.UNKNOWN_PATH.encode() in answer.body else None
            )
            if problem is not None and problem.code is ErrorCode.UNKNOWN_PATH:
                raise TransportError(
                    Reason.PROTOCOL,
                    f"{config.url} is a graphstash server, but not with this path: "
                    f"{problem.detail}; correct GRAPHSTASH_URL",
                )
            return None
        announced, metadata = _parse_announcement(answer)
        if announced.size_bytes > config.max_artifact:
            raise VerificationError(
                Reason.TOO_LARGE,
                f"{path} has {announced.size_bytes} bytes; "
                f"GRAPHSTASH_MAX_ARTIFACT allows {config.max_artifact}",
            )
        if metadata:
            # Waiting longer than the compilation took gains nothing.
            deadline.shorten(max(metadata.compile_seconds, config.first_byte_seconds))
        received = _receive(
            chunks, target, announced.size_bytes, deadline, between_chunks=between_chunks
        )
    if received != announced:
        if answer.is_redirected:
            transport.takes_redirects = False
        raise VerificationError(
            Reason.DIGEST_MISMATCH,
            f"{path}: announced {announced} ({announced.size_bytes} bytes), "
            f"received {received} ({received.size_bytes} bytes)",
        )
    return Downloaded(received, metadata)


def _receive(
    chunks: Iterable[bytes],
    target: IO[bytes],
    size_bytes: int,
    deadline: Deadline,
    *,
    between_chunks: Callable[[], None],
) -> Digest:
    """Write chunks to `target` and return their digest. Stop once `size_bytes` is exceeded."""
    hasher = DigestHasher()
    try:
        target.seek(0)
        target.truncate()
        for chunk in chunks:
            hasher.update(chunk)
            target.write(chunk)
            if hasher.size_bytes > size_bytes:
                break
            if hasher.size_bytes < size_bytes:
                with deadline.paused():
                    between_chunks()
        target.seek(0)
    except OSError as error:
        raise LocalTierError(f"{target.name}: {error}") from error
    return hasher.digest()


def _parse_announcement(answer: Answer) -> tuple[Digest, ArtifactMetadata | None]:
    try:
        size = int(answer.headers["Content-Length"])
        digest = Digest.parse_repr_digest(answer.headers["Repr-Digest"], size_bytes=size)
        header = answer.headers.get(HEADER_METADATA)
        return digest, ArtifactMetadata.from_header(header) if header else None
    except (KeyError, ValueError, InvalidValueError) as error:
        raise TransportError(Reason.PROTOCOL, f"an artifact without digest: {error}") from None
