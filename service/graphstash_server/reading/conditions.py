"""What request headers ask for: conditions (RFC 9110 section 13), ranges (14), preferences (7240);
and for which job.

A header that cannot be understood is ignored, as these specifications say.
"""

import re

from graphstash_schema import ErrorCode, ManifestName
from graphstash_server.errors import ServerError

__all__ = ["job_named", "lists_etag", "requested_range", "requested_wait"]

_RANGE = re.compile(r"bytes=\s*(\d{0,19})\s*-\s*(\d{0,19})\s*", re.IGNORECASE)
_WAIT = re.compile(r"(?:^|,)\s*wait\s*=\s*\"?(\d{1,9})\"?\s*(?:$|[,;])", re.IGNORECASE)
_ETAG = re.compile(r'(?:W/)?("[^"]*")')


def job_named(header: str | None) -> str:
    """The job of `HEADER_JOB`; empty for none."""
    return header if header is not None and ManifestName.form.fullmatch(header) else ""


def lists_etag(header: str | None, etag: str) -> bool:
    """Whether an If-None-Match names an entity tag, by weak comparison; `*` names all."""
    if header is None:
        return False
    return header.strip() == "*" or etag in _ETAG.findall(header)


def requested_range(
    range_header: str | None, if_range: str | None, *, etag: str, size_bytes: int
) -> tuple[int, int] | None:
    """Which bytes of a blob are asked for: start (inclusive) and stop (exclusive).

    Returns:
        None for the whole blob: without a header, with several ranges, with one that is out of
        form, or when `If-Range` names another version (strong comparison).

    Raises:
        ServerError: 416 when no byte of the blob is in the range.
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
    """The seconds of `Prefer: wait=`, cut to a limit; None when it was not asked for."""
    match = _WAIT.search(prefer) if prefer is not None else None
    return None if match is None else min(float(match.group(1)), at_most_seconds)
