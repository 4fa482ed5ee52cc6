"""Answers: what a server said, or the error that it comes to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httpx

from graphstash._errors import (
    BusyError,
    ConflictError,
    LeaseLostError,
    Reason,
    RefusedError,
    TransportError,
)
from graphstash._failures import problem_of, retry_after
from graphstash_schema import ErrorCode
from graphstash_schema.protocol import HEADER_ACCEPT_REDIRECT, HEADER_PROTOCOL, PROTOCOL_VERSION

__all__ = ["Answer", "read_small", "refuse_errors"]

_SMALL_BODY_BYTES: Final = 4 * 1024**2
"""Largest answer that is read into memory: a lookup of 1,000 keys takes about 1 MiB."""

_CLASS_OF_CODE: Final[dict[ErrorCode, type[RefusedError]]] = {
    ErrorCode.CONFLICT: ConflictError,
    ErrorCode.LEASE_LOST: LeaseLostError,
}
_PASSING: Final = (429, 503)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer below 400. `body` is empty for a streamed call; `is_redirected` tells whether its
    bytes come from another place than the server.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    is_redirected: bool = False


def refuse_errors(response: httpx.Response, *, url: str) -> None:
    """Raises unless the answer is one that its caller can use; a GET's 404 is.

    Raises:
        CacheError: of the class and reason that fit.
    """
    status = response.status_code
    if response.headers.get(HEADER_PROTOCOL) != str(PROTOCOL_VERSION) and status < 500:
        raise TransportError(
            Reason.PROTOCOL,
            f"{url} answered {status} without {HEADER_PROTOCOL}: "
            f"{PROTOCOL_VERSION}; is it a graphstash server?",
        )
    if status < 300 or (status == 404 and response.request.method == "GET"):
        return
    if status == 307 and HEADER_ACCEPT_REDIRECT in response.request.headers:
        return
    if status < 400:
        raise TransportError(Reason.PROTOCOL, f"unexpected redirect ({status})")
    problem = problem_of(read_small(response))
    detail = problem.detail if problem else f"{url} answered {status}"
    if status in _PASSING:
        raise BusyError(detail, retry_after_seconds=retry_after(response))
    code = problem.code if problem else None
    kind = _CLASS_OF_CODE.get(code, RefusedError) if code else RefusedError
    raise kind(detail, code=code, status=status)


def read_small(response: httpx.Response) -> bytes:
    """The body of an answer that is never large.

    Raises:
        TransportError: it is.
    """
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > _SMALL_BODY_BYTES:
            raise TransportError(
                Reason.PROTOCOL, f"an answer of more than {_SMALL_BODY_BYTES} bytes"
            )
    return bytes(body)
