"""Parse headers of a request: conditions (RFC 9110, section 13), a range (section 14), preferences
(RFC 7240), and the name of the job.

Invalid headers are ignored, as these specifications require.
"""

import re

from graphstash_schema import ErrorCode, ManifestName
from graphstash_server.errors import ServerError

__all__ = ["job_of", "lists_etag", "requested_range", "requested_wait"]

_RANGE = re.compile(r"bytes=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.IGNORECASE)
_WAIT = re.compile(r"(?:^|,)\s*wait\s*=\s*\"?(\d{1,9})\"?\s*(?:$|[,;])", re.IGNORECASE)
_ETAG = re.compile(r'(?:W/)?("[^"]*")')


def job_of(header: str | None) -> str:
    """Return the job that `HEADER_JOB` names, or an empty string for no or an invalid name."""
    return header if header is not None and ManifestName.form.fullmatch(header) else ""


def lists_etag(header: str | None, etag: str) -> bool:
    """Return whether `If-None-Match` lists an entity tag, by weak comparison. `*` lists all."""
    if header is None:
        return False
    return header.strip() == "*" or etag in _ETAG.findall(header)


def requested_range(
    range_header: str | None, if_range: str | None, *, etag: str, size_bytes: int
) -> tuple[int, int] | None:
    """Return the requested bytes of a blob: start (inclusive) and stop (exclusive).

    Returns:
        None for the whole blob: there is no `Range`, it has several ranges or is invalid, or
        `If-Range` names another version (strong comparison).

    Raises:
        ServerError: 416 if no byte of the blob is in the range.
    """
    match = _RANGE.fullmatch(range_header) if range_header is not None else None
    if match is None or (if_range is not None and if_range.strip() != etag):
        return None
    first, last = match.groups()
    if first:
        start = int(first)
        stop = min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < start:
            return None
    elif last:
        start, stop = max(size_bytes - int(last), 0), size_bytes
    else:
        return None
    if start >= stop:
        raise ServerError(
            ErrorCode.RANGE_NOT_SATISFIABLE,
            f"the range {range_header!r} holds no byte of the artifact, which has {size_bytes}",
            limit=size_bytes,
        )
    return start, stop


def requested_wait(prefer: str | None, *, at_most_seconds: float) -> float | None:
    """Return the seconds of `Prefer: wait=`, at most the limit, or None without this preference."""
    match = _WAIT.search(prefer) if prefer is not None else None
    return None if match is None else min(float(match.group(1)), at_most_seconds)
