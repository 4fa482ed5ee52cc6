"""Convert httpx exceptions and error responses to the exceptions of `errors.py`."""

import re
from math import inf
from typing import TYPE_CHECKING, Final

from graphstash._http.lean_httpx import httpx
from graphstash._http.tls import tls_failure
from graphstash.errors import (
    BusyError,
    ConflictError,
    LeaseLostError,
    Reason,
    RefusedError,
    TransportError,
)
from graphstash_schema import ErrorCode
from graphstash_schema.protocol import HEADER_ACCEPT_REDIRECT, HEADER_PROTOCOL, PROTOCOL_VERSION

if TYPE_CHECKING:
    from graphstash_schema import Problem

__all__ = [
    "MAX_PROBLEM_BYTES",
    "map_httpx_errors",
    "message_of",
    "problem_of",
    "read_small",
    "refuse_errors",
    "retry_after",
]

_SMALL_BODY_BYTES: Final = 4 * 1024**2
"""Limit for a response that is read into memory: a lookup of 1,000 keys takes about 1 MiB."""

_MAX_SMALL_VALUES: Final = 100_000
"""Limit for JSON values in such a response: a parsed value takes a hundred times its bytes."""

MAX_PROBLEM_BYTES: Final = 64 * 1024

_UNAVAILABLE_SECONDS: Final = 30.0
"""Maximum seconds that a job waits for a server that cannot answer. A restart of the server or of
its database takes less; an outage takes longer."""

_CLASS_OF_CODE: Final[dict[ErrorCode, type[RefusedError]]] = {
    ErrorCode.CONFLICT: ConflictError,
    ErrorCode.WITHHELD: ConflictError,
    ErrorCode.LEASE_LOST: LeaseLostError,
}

# Python's TLS servers close the connection without an alert if the client sends no certificate.
_NO_CERTIFICATE: Final = (
    " A server that requires a client certificate can also end a connection like this: see "
    "GRAPHSTASH_CLIENT_CERT and GRAPHSTASH_CLIENT_KEY"
)


class map_httpx_errors:  # noqa: N801 - used like a function; a generator takes three times the CPU time
    """Raise httpx's exceptions as `TransportError`. A test checks that all are converted."""

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, httpx.HTTPError | httpx.InvalidURL | httpx.StreamError):
            raise _convert(error, self._url) from error


def _convert(error: Exception, url: str) -> TransportError:
    match error:
        case httpx.ConnectTimeout():
            return TransportError(Reason.CONNECT, f"{url}: the connection timed out")
        case httpx.TimeoutException():
            return TransportError(Reason.TIMEOUT, f"{url}: {type(error).__name__}")
        case httpx.NetworkError():
            # TLS 1.3 may raise a TLS failure at the first read instead of on connect.
            failure = tls_failure(error)
            reason = Reason.CONNECT if isinstance(error, httpx.ConnectError) else Reason.RESET
            text = ": ".join(failure) if failure else message_of(error)
            return TransportError(Reason.TLS if failure else reason, f"{url}: {text}")
        case httpx.ProxyError() | httpx.UnsupportedProtocol():
            return TransportError(Reason.CONNECT, f"{url}: {error}")
        case httpx.RemoteProtocolError():
            reason = _reason_of(error)
            advice = _NO_CERTIFICATE if reason is Reason.RESET and url.startswith("https:") else ""
            return TransportError(reason, f"{url}: {error}{advice}")
        case _:
            return TransportError(Reason.PROTOCOL, f"{url}: {error}")


def message_of(error: Exception) -> str:
    """Return an error's message without the number that Python prints first."""
    return re.sub(r"^\[Errno -?[0-9]+\] ", "", str(error))


def _reason_of(error: httpx.RemoteProtocolError) -> Reason:
    # httpx raises one class for three cases; only the message distinguishes them.
    text = str(error)
    if "peer closed connection without sending complete message body" in text:
        return Reason.TRUNCATED
    return Reason.RESET if "disconnected without sending" in text else Reason.PROTOCOL


def refuse_errors(response: httpx.Response, *, url: str) -> None:
    """Raise if the response is an error. A 404 for a GET is a miss, not an error.

    Raises:
        CacheError: the server refused the call, is busy, or does not respond as graphstash does.
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
    problem = problem_of(read_small(response, most=MAX_PROBLEM_BYTES))
    detail = problem.detail if problem else f"{url} answered {status}"
    if status in (429, 503):
        is_full = problem is not None and problem.code is ErrorCode.TOO_MANY_CONNECTIONS
        raise BusyError(
            detail,
            retry_after_seconds=retry_after(response),
            patience_seconds=inf if is_full or status == 429 else _UNAVAILABLE_SECONDS,
            is_full=is_full,
        )
    code = problem.code if problem else None
    kind = _CLASS_OF_CODE.get(code, RefusedError) if code else RefusedError
    raise kind(detail, code=code, status=status)


def read_small(response: httpx.Response, *, most: int = _SMALL_BODY_BYTES) -> bytes:
    """Read a response's body into memory, within limits for bytes and JSON values.

    Raises:
        TransportError: the body exceeds a limit.
    """
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > most:
            raise TransportError(Reason.PROTOCOL, f"the answer exceeds the limit of {most} bytes")
    if sum(map(body.count, (b"{", b"[", b","))) > _MAX_SMALL_VALUES:
        raise TransportError(
            Reason.PROTOCOL, f"the answer exceeds the limit of {_MAX_SMALL_VALUES} values"
        )
    return bytes(body)


def problem_of(body: bytes) -> "Problem | None":
    """Parse a problem document, or return None if the body is not one."""
    from pydantic import ValidationError

    from graphstash_schema import Problem

    try:
        return Problem.model_validate_json(body)
    except ValidationError:
        return None


def retry_after(response: httpx.Response) -> float:
    """Return the seconds in `Retry-After`, or 1 without such a number."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 1.0
