"""Build the HTTP response for a stored artifact: status, headers and byte range of the body.

The functions are pure: `reading.reads` counts hits, misses and bytes. Request headers have
lower-case names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from graphstash_schema import ErrorCode, NamespacePolicy, WriteMode
from graphstash_schema.protocol import HEADER_ACCEPT_REDIRECT, HEADER_HITS, HEADER_METADATA
from graphstash_server.artifact import Artifact
from graphstash_server.errors import ServerError
from graphstash_server.keys import StoredKey
from graphstash_server.reading.conditions import lists_etag, requested_range
from graphstash_server.services.artifacts.service import MAX_ROWS
from graphstash_server.settings import Settings
from graphstash_server.storage import BlobReader

__all__ = [
    "ACCEPT_REDIRECT",
    "CONDITIONS",
    "HEADER_ACCEL",
    "MIN_ACCELERATED_BYTES",
    "Representation",
    "absent",
    "description_of",
    "may_redirect",
    "may_replace",
    "redirect_to",
    "representation_of",
]

HEADER_ACCEL: Final = "graphstash-accel"
"""Request header that nginx sets if it can read the blob directory (docker/nginx)."""

ACCEPT_REDIRECT: Final = HEADER_ACCEPT_REDIRECT.lower()

MIN_ACCELERATED_BYTES: Final = 256 * 1024
"""From this size on, X-Accel-Redirect takes less CPU than a response of this process that nginx
passes on. docs/decisions/0019 has the measurement."""

_ACCEL_PREFIX: Final = "/_blobs/"
"""Path of the blob directory in nginx, which clients cannot request (`internal`)."""

_OTHER_CONDITIONS: Final = ("if-match", "if-modified-since", "if-unmodified-since")
"""Conditions that this server ignores and nginx would evaluate."""

CONDITIONS: Final = ("if-none-match", "if-range", "range", HEADER_ACCEL, *_OTHER_CONDITIONS)
"""Request headers that `representation_of` and `description_of` read."""

_SET_BY_NGINX: Final = frozenset({"Accept-Ranges", "Cache-Control", "Content-Disposition"})
"""Headers that nginx sets itself. It would copy them from this process even to its own errors."""

_CACHE_CONTROL: Final = {
    False: "private, max-age=31536000, immutable",
    True: "private, no-cache",
}
"""By whether an upload may replace the artifact. Clients cache an immutable one for a year."""


_ACCEL_ONLY: Final = {HEADER_ACCEL}


@dataclass(eq=False)
class Representation:
    """A response that contains or describes an artifact.

    Attributes:
        headers: headers about the artifact; the transport adds those of the server.
        span: byte range that this process sends, end exclusive; None without a body.
        served: byte range that this process or nginx sends, end exclusive; None without a body.
    """

    status: int
    headers: Mapping[str, str]
    span: tuple[int, int] | None = None
    served: tuple[int, int] | None = None
    _lines: bytes | None = None

    @property
    def served_bytes(self) -> int:
        """Length of `served`, or 0."""
        start, stop = self.served or (0, 0)
        return stop - start

    @property
    def lines(self) -> bytes:
        """Header lines of HTTP/1.1, built once. A `cached_property` would take a lock."""
        if self._lines is None:
            lines = [f"{name.lower()}: {value}\r\n" for name, value in self.headers.items()]
            self._lines = "".join(lines).encode("latin-1")
        return self._lines


def absent(key: StoredKey) -> ServerError:
    """Return the 404 error for a missing artifact."""
    namespace, *words = key  # not `key.key`: `fast.answers` passes a placeholder as fingerprint
    return ServerError(
        ErrorCode.NOT_FOUND, f"there is no artifact {'/'.join(words)} in namespace {namespace}"
    )


def may_replace(policy: NamespacePolicy) -> bool:
    """Return whether an upload may replace the artifact of a key."""
    return policy.mode is WriteMode.OVERWRITE


def may_redirect(settings: Settings, request: Mapping[str, str]) -> bool:
    """Return whether redirects to S3 are on, and this client accepts one and requests a whole blob
    without a condition.
    """
    return (
        settings.s3_redirect_bytes is not None
        and request.get(ACCEPT_REDIRECT) == "1"
        and "range" not in request
        and "if-none-match" not in request
    )


def representation_of(
    row: Artifact,
    request: Mapping[str, str],
    policy: NamespacePolicy,
    *,
    file: BlobReader | None,
    settings: Settings,
) -> Representation:
    """Return the response to a GET. `request` has its headers; `file` is None for a blob in memory.
    Raise ServerError (416) if no byte of the blob is in the requested range.
    """
    is_replaceable = may_replace(policy)
    size_bytes = row.digest.size_bytes
    is_large = size_bytes >= MIN_ACCELERATED_BYTES
    if not request or (request.keys() == _ACCEL_ONLY and not is_large):
        return _whole(row, is_replaceable=is_replaceable)
    if lists_etag(request.get("if-none-match"), row.digest.etag):
        return _unchanged(row, is_replaceable=is_replaceable)
    part = requested_range(
        request.get("range"), request.get("if-range"), etag=row.digest.etag, size_bytes=size_bytes
    )
    span = part or (0, size_bytes)
    accelerated = None
    if file is not None and HEADER_ACCEL in request and is_large and not is_replaceable:
        # nginx marks its responses as cacheable for a year.
        accelerated = _accelerated_path(request, file.path, settings.blob_dir, part=part)
    if accelerated is not None:
        headers = _shared_headers(row, is_replaceable=is_replaceable)
        kept = {name: text for name, text in headers.items() if name not in _SET_BY_NGINX}
        sent = {**kept, "X-Accel-Redirect": accelerated, "Content-Length": "0"}
        return Representation(200, sent, served=span)
    if part is None:
        return _whole(row, is_replaceable=is_replaceable)
    headers = _shared_headers(row, is_replaceable=is_replaceable)
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size_bytes}"
    headers["Content-Length"] = str(span[1] - span[0])
    return Representation(206, headers, span, span)


def description_of(
    row: Artifact, request: Mapping[str, str], policy: NamespacePolicy
) -> Representation:
    """Return the response to a HEAD."""
    if lists_etag(request.get("if-none-match"), row.digest.etag):
        return _unchanged(row, is_replaceable=may_replace(policy))
    return _described(row, is_replaceable=may_replace(policy))


def redirect_to(url: str, row: Artifact, *, is_replaceable: bool) -> Representation:
    """Redirect the client to the blob store. No cache may store the response: the URL expires."""
    headers = _shared_headers(row, is_replaceable=is_replaceable)
    return Representation(307, {**headers, "Location": url, "Cache-Control": "no-store"})


@lru_cache(MAX_ROWS)
def _whole(row: Artifact, *, is_replaceable: bool) -> Representation:
    headers = _shared_headers(row, is_replaceable=is_replaceable)
    headers["Content-Length"] = str(row.digest.size_bytes)
    span = (0, row.digest.size_bytes)
    return Representation(200, headers, span, span)


@lru_cache(MAX_ROWS)
def _described(row: Artifact, *, is_replaceable: bool) -> Representation:
    headers = _shared_headers(row, is_replaceable=is_replaceable)
    headers["Content-Length"] = str(row.digest.size_bytes)
    headers[HEADER_HITS] = str(row.hits)
    return Representation(200, headers)


def _shared_headers(row: Artifact, *, is_replaceable: bool) -> dict[str, str]:
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Disposition": "attachment",
        "ETag": row.digest.etag,
        "Repr-Digest": row.digest.repr_digest,
        "Accept-Ranges": "bytes",
        "Cache-Control": _CACHE_CONTROL[is_replaceable],
    }
    if row.metadata_header:
        headers[HEADER_METADATA] = row.metadata_header
    return headers


def _unchanged(row: Artifact, *, is_replaceable: bool) -> Representation:
    """Return a 304 for a client that has the artifact (RFC 9110 section 15.4.5)."""
    headers = {"ETag": row.digest.etag, "Cache-Control": _CACHE_CONTROL[is_replaceable]}
    return Representation(304, headers)


def _accelerated_path(
    request: Mapping[str, str],
    file: Path | None,
    blob_dir: Path,
    *,
    part: tuple[int, int] | None,
) -> str | None:
    """Return the blob's path in nginx, or None if this process must send the blob.

    nginx applies the request's range and conditions to the file. If nginx would interpret them
    differently (several ranges, a malformed range, an If-Range that does not match), this process
    sends the blob.

    nginx overwrites `HEADER_ACCEL`, so its clients cannot set it. A client that connects directly
    and sets it only gets an empty body and a path that contains the digest.
    """
    if file is None or not file.is_relative_to(blob_dir):
        return None
    if ("range" in request and part is None) or any(name in request for name in _OTHER_CONDITIONS):
        return None
    return _ACCEL_PREFIX + file.relative_to(blob_dir).as_posix()
