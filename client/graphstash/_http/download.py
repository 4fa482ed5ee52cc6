"""Download: an artifact's blob as a file that has the digest which the server announced."""

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
    """What came.

    Attributes:
        digest: of the bytes that were received.
        metadata: what its publisher said, if anything.
    """

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
    """Writes a blob to `target`, which is at its beginning afterwards; None for a miss.

    Args:
        transport: to the server.
        path: of the artifact there.
        target: a file that gets the bytes; they are worth nothing unless this function returns.
            Whoever reads them does so through this file: its name may lead to another one by then.
        config: limits of size and time.
        between_chunks: called again and again while bytes are to come; what it raises ends the
            download. What it takes does not count against the limits of time.

    Raises:
        CacheError: the server cannot say, or its bytes are not what it announced.
    """
    deadline = Deadline(config.fetch_seconds)
    took_redirects = transport.takes_redirects
    try:
        return _download(transport, path, target, config, deadline, between_chunks=between_chunks)
    except (TransportError, VerificationError):
        if transport.takes_redirects or not took_redirects:
            raise
    # Where the server sent us, the blob could not be had: the server itself has it.
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
            # Most answers are misses: only one that names the code is worth a parser.
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
        announced, metadata = _announced(answer)
        if announced.size_bytes > config.max_artifact:
            raise VerificationError(
                Reason.TOO_LARGE,
                f"{path} has {announced.size_bytes} bytes; "
                f"GRAPHSTASH_MAX_ARTIFACT allows {config.max_artifact}",
            )
        if metadata:
            # A fetch that takes longer than the compilation is not worth waiting for.
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
    """Writes what comes to `target`, no further than past the announced size; its digest."""
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


def _announced(answer: Answer) -> tuple[Digest, ArtifactMetadata | None]:
    try:
        size = int(answer.headers["Content-Length"])
        digest = Digest.parse_repr_digest(answer.headers["Repr-Digest"], size_bytes=size)
        header = answer.headers.get(HEADER_METADATA)
        return digest, ArtifactMetadata.from_header(header) if header else None
    except (KeyError, ValueError, InvalidValueError) as error:
        raise TransportError(Reason.PROTOCOL, f"an artifact without digest: {error}") from None
