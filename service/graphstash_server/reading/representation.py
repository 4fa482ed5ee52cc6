"""How HTTP represents a stored artifact: status, headers, and which of its bytes.

These functions depend on their arguments only; `reads` calls them and counts. Request headers are a
mapping with names in lower case.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final, Protocol

from graphstash_schema import ErrorCode, NamespacePolicy, WriteMode
from graphstash_schema.protocol import HEADER_ACCEPT_REDIRECT, HEADER_HITS, HEADER_METADATA
from graphstash_server.artifact import Artifact
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.reading.conditions import lists_etag, requested_range
from graphstash_server.settings import Settings

__all__ = [
    "ACCEPT_REDIRECT",
    "HEADER_ACCEL",
    "MIN_ACCELERATED_BYTES",
    "Representation",
    "absent",
    "changes",
    "description_of",
    "redirect_to",
    "representation_of",
    "takes_link",
]

HEADER_ACCEL: Final = "graphstash-accel"
"""Request: the reverse proxy in front can read the blob directory. docker/nginx sets it."""

ACCEPT_REDIRECT: Final = HEADER_ACCEPT_REDIRECT.lower()

MIN_ACCELERATED_BYTES: Final = 256 * 1024
"""From this size on it is cheaper to let the reverse proxy send the file than to send it through
the proxy. docs/decisions/0019 has the measurement."""

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


_ACCEL_ONLY: Final = {HEADER_ACCEL}

_MAX_KEPT: Final = 1024
"""Representations kept: as many as the rows in memory (`RecentRows`), at most 32 MiB for GET and
for HEAD."""


@dataclass(eq=False)
class Representation:
    """An answer with an artifact, or about one.

    Attributes:
        status: 200, 206, 304 or 307.
        headers: every header of the artifact; the transport adds the headers of the server.
        span: first byte and end (exclusive) of the body; None for an answer without a body.
        served: the bytes that the client receives, from this process or from the reverse proxy.
    """

    status: int
    headers: Mapping[str, str]
    span: tuple[int, int] | None = None
    served: tuple[int, int] | None = None

    @property
    def served_bytes(self) -> int:
        """The number of bytes that the client receives."""
        start, stop = self.served or (0, 0)
        return stop - start

    @cached_property
    def lines(self) -> bytes:
        """The headers as lines of HTTP/1.1."""
        lines = [f"{name.lower()}: {value}\r\n" for name, value in self.headers.items()]
        return "".join(lines).encode("latin-1")


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
    row: Artifact,
    asked: Mapping[str, str],
    policy: NamespacePolicy,
    *,
    file: LocalFile | None,
    settings: Settings,
) -> Representation:
    """Represent an artifact for a GET.

    Args:
        row: the artifact.
        asked: headers of the request.
        policy: policy of the namespace.
        file: where the bytes are; None if they were read already.
        settings: settings of the server.

    Raises:
        ServerError: 416 if no byte of the blob is in the requested range.
    """
    changing = changes(policy)
    size_bytes = row.digest.size_bytes
    is_worth_it = size_bytes >= MIN_ACCELERATED_BYTES
    if not asked or (asked.keys() == _ACCEL_ONLY and not is_worth_it):
        return _whole(row, changing=changing)
    if lists_etag(asked.get("if-none-match"), row.digest.etag):
        return _unchanged(row, changing=changing)
    part = requested_range(
        asked.get("range"), asked.get("if-range"), etag=row.digest.etag, size_bytes=size_bytes
    )
    span = part or (0, size_bytes)
    accelerated = None
    if file is not None and HEADER_ACCEL in asked and is_worth_it and not changing:
        # A namespace whose artifacts change is left out: the proxy lets its answers be kept.
        accelerated = _accelerated_path(asked, file.path, settings.blob_dir, part=part)
    if accelerated is not None:
        headers = _shared_headers(row, changing=changing)
        kept = {name: text for name, text in headers.items() if name not in _MADE_BY_THE_PROXY}
        sent = {**kept, "X-Accel-Redirect": accelerated, "Content-Length": "0"}
        return Representation(200, sent, served=span)
    if part is None:
        return _whole(row, changing=changing)
    headers = _shared_headers(row, changing=changing)
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size_bytes}"
    headers["Content-Length"] = str(span[1] - span[0])
    return Representation(206, headers, span, span)


def description_of(
    row: Artifact, asked: Mapping[str, str], policy: NamespacePolicy
) -> Representation:
    """Represent an artifact for a HEAD."""
    if lists_etag(asked.get("if-none-match"), row.digest.etag):
        return _unchanged(row, changing=changes(policy))
    return _described(row, changing=changes(policy))


def redirect_to(url: str, row: Artifact, *, changing: bool) -> Representation:
    """Send the client to the blob store. No cache may keep the answer, because the link expires."""
    headers = _shared_headers(row, changing=changing)
    return Representation(307, {**headers, "Location": url, "Cache-Control": "no-store"})


@lru_cache(_MAX_KEPT)
def _whole(row: Artifact, *, changing: bool) -> Representation:
    headers = _shared_headers(row, changing=changing)
    headers["Content-Length"] = str(row.digest.size_bytes)
    span = (0, row.digest.size_bytes)
    return Representation(200, headers, span, span)


@lru_cache(_MAX_KEPT)
def _described(row: Artifact, *, changing: bool) -> Representation:
    headers = _shared_headers(row, changing=changing)
    headers["Content-Length"] = str(row.digest.size_bytes)
    headers[HEADER_HITS] = str(row.hits)
    return Representation(200, headers)


def _shared_headers(row: Artifact, *, changing: bool) -> dict[str, str]:
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


def _unchanged(row: Artifact, *, changing: bool) -> Representation:
    """Tell the client that it has the artifact (RFC 9110 section 15.4.5)."""
    headers = {"ETag": row.digest.etag, "Cache-Control": _CACHE_CONTROL[changing]}
    return Representation(304, headers)


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
