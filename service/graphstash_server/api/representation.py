"""What a stored artifact is answered with: status, headers, and which of its bytes.

Both ways to an artifact ask here, the call (`api.artifacts`) and the fast path (`fast`), so that
their answers cannot differ. Request headers come as a mapping whose names are lower case.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from graphstash_schema import ErrorCode, NamespacePolicy, WriteMode
from graphstash_schema.protocol import HEADER_ACCEPT_REDIRECT, HEADER_HITS, HEADER_METADATA
from graphstash_server.api.conditions import lists_etag, requested_range
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.services.artifacts.service import StoredArtifact
from graphstash_server.settings import Settings

__all__ = [
    "ACCEPT_REDIRECT",
    "HEADER_ACCEL",
    "MIN_ACCELERATED_BYTES",
    "Representation",
    "absent",
    "changes",
    "description_of",
    "representation_of",
    "shared_headers",
    "takes_link",
    "whole_of",
]

HEADER_ACCEL: Final = "graphstash-accel"
"""Request: the reverse proxy in front can read the blob directory. docker/nginx sets it."""

ACCEPT_REDIRECT: Final = HEADER_ACCEPT_REDIRECT.lower()

MIN_ACCELERATED_BYTES: Final = 256 * 1024
"""From this size on it is cheaper to let the reverse proxy send the file than to send it through
the proxy. docs/decisions.md has the measurement."""

_ACCEL_PREFIX: Final = "/_blobs/"
"""Where the proxy has the blob directory; not reachable from outside (`internal`)."""

_OTHER_CONDITIONS: Final = ("if-match", "if-modified-since", "if-unmodified-since")
"""This server ignores them, and nginx would not."""

_MADE_BY_THE_PROXY: Final = frozenset(
    {"Content-Range", "Accept-Ranges", "Cache-Control", "Content-Disposition"}
)
"""nginx derives them from the file, or would copy them onto any answer, even for a missing file."""

_CACHE_CONTROL: Final = {
    False: "private, max-age=31536000, immutable",
    True: "private, no-cache",
}
"""A year where the artifact of a key never changes; revalidated every time where it may."""


class LocalFile(Protocol):
    """What a `BlobReader` says about its file."""

    @property
    def path(self) -> Path | None:
        """Where the bytes are, if they are in a local file."""
        ...


class Representation(NamedTuple):
    """The answer to a GET.

    Attributes:
        status: 200, 206 or 304.
        headers: all of them.
        span: first byte and end (exclusive) of the body; None for an answer without one.
        served: the same bytes, whoever sends them: this process or the reverse proxy.
    """

    status: int
    headers: Mapping[str, str]
    span: tuple[int, int] | None
    served: tuple[int, int] | None


def absent(key: StoredKey) -> ServerError:
    """The answer for an artifact that does not exist."""
    return ServerError(
        ErrorCode.NOT_FOUND, f"there is no artifact {key.key} in namespace {key.namespace}"
    )


def changes(policy: NamespacePolicy) -> bool:
    """Whether an artifact may be replaced under its key."""
    return policy.mode is WriteMode.OVERWRITE


def takes_link(settings: Settings, asked: Mapping[str, str]) -> bool:
    """Whether the client accepts a redirect to the blob store, and wants the whole blob."""
    return (
        settings.s3_redirect_bytes is not None
        and asked.get(ACCEPT_REDIRECT) == "1"
        and "range" not in asked
        and "if-none-match" not in asked
    )


def representation_of(
    row: StoredArtifact,
    asked: Mapping[str, str],
    policy: NamespacePolicy,
    *,
    file: LocalFile | None,
    settings: Settings,
) -> Representation:
    """The answer to a GET of an artifact that is there.

    Args:
        row: the artifact.
        asked: the headers of the request.
        policy: of its namespace.
        file: where its bytes are; None when they were read already.
        settings: of the server.

    Raises:
        ServerError: 416 when no byte of the blob is in the requested range.
    """
    changing = changes(policy)
    size_bytes = row.digest.size_bytes
    if lists_etag(asked.get("if-none-match"), row.digest.etag):
        return Representation(304, _unchanged(row, changing=changing), None, None)
    part = requested_range(
        asked.get("range"), asked.get("if-range"), etag=row.digest.etag, size_bytes=size_bytes
    )
    span = part or (0, size_bytes)
    accelerated = None
    is_worth_it = HEADER_ACCEL in asked and size_bytes >= MIN_ACCELERATED_BYTES
    if file is not None and is_worth_it and not changing:  # the proxy lets its answers be kept
        accelerated = _accelerated_path(asked, file.path, settings.blob_dir, part=part)
    if accelerated is not None:
        headers = shared_headers(row, changing=changing)
        kept = {name: text for name, text in headers.items() if name not in _MADE_BY_THE_PROXY}
        sent = {**kept, "X-Accel-Redirect": accelerated, "Content-Length": "0"}
        return Representation(200, sent, None, span)
    if part is None:
        return whole_of(row, changing=changing)
    headers = shared_headers(row, changing=changing)
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size_bytes}"
    headers["Content-Length"] = str(span[1] - span[0])
    return Representation(206, headers, span, span)


def whole_of(row: StoredArtifact, *, changing: bool) -> Representation:
    """The answer with the whole artifact; `changing` says whether its key may get another one."""
    headers = shared_headers(row, changing=changing)
    headers["Content-Length"] = str(row.digest.size_bytes)
    span = (0, row.digest.size_bytes)
    return Representation(200, headers, span, span)


def description_of(
    row: StoredArtifact, asked: Mapping[str, str], *, changing: bool
) -> tuple[int, Mapping[str, str]]:
    """Status and headers of the answer to a HEAD of an artifact that is there."""
    if lists_etag(asked.get("if-none-match"), row.digest.etag):
        return 304, _unchanged(row, changing=changing)
    headers = shared_headers(row, changing=changing)
    headers["Content-Length"] = str(row.digest.size_bytes)
    headers[HEADER_HITS] = str(row.hits)
    return 200, headers


def shared_headers(row: StoredArtifact, *, changing: bool) -> dict[str, str]:
    """What every answer with an artifact has."""
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": "attachment",
        "ETag": row.digest.etag,
        "Repr-Digest": row.digest.repr_digest,
        "Accept-Ranges": "bytes",
        "Cache-Control": _CACHE_CONTROL[changing],
    }
    if row.metadata_header:
        headers[HEADER_METADATA] = row.metadata_header
    return headers


def _unchanged(row: StoredArtifact, *, changing: bool) -> dict[str, str]:
    """What a 304 repeats (RFC 9110 section 15.4.5)."""
    return {"ETag": row.digest.etag, "Cache-Control": _CACHE_CONTROL[changing]}


def _accelerated_path(
    asked: Mapping[str, str],
    file: Path | None,
    blob_dir: Path,
    *,
    part: tuple[int, int] | None,
) -> str | None:
    """Where the reverse proxy finds the blob; None when this process has to send it.

    The proxy applies the request's own range and conditions to the file. Where it would read
    them differently (several ranges, a malformed one, an If-Range that does not match), this server
    sends the bytes.

    The proxy replaces the header, so no client can pass its own. A client that reaches this server
    directly and sends it gets the headers of a hit with an empty body, which does not match the
    digest: it harms only itself. The path contains nothing but the digest, which it gets anyway.
    """
    if file is None or not file.is_relative_to(blob_dir):
        return None
    if ("range" in asked and part is None) or any(name in asked for name in _OTHER_CONDITIONS):
        return None
    return _ACCEL_PREFIX + file.relative_to(blob_dir).as_posix()
