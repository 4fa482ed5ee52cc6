"""Failures: what httpx raises and what a refusal says, in the words of our errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import httpx
from pydantic import ValidationError

from graphstash._errors import Reason, TransportError
from graphstash._tls import tls_failure
from graphstash_schema import Problem

__all__ = ["named_failures", "problem_of", "retry_after"]


_NO_CERTIFICATE: Final = (
    " This is also how a server ends that does not get, or not accept, a certificate of ours: "
    "GRAPHSTASH_CLIENT_CERT and GRAPHSTASH_CLIENT_KEY"
)
"""Python's own servers end such a connection without an alert."""


@contextmanager
def named_failures(url: str) -> Iterator[None]:
    """Turns httpx's exceptions into ours, most specific first (tests check that none is left)."""
    try:
        with _tls_first(url):
            yield
    except httpx.ConnectTimeout as error:
        raise TransportError(Reason.CONNECT, f"{url}: no connection in time") from error
    except httpx.TimeoutException as error:
        raise TransportError(Reason.TIMEOUT, f"{url}: {type(error).__name__}") from error
    except (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
        raise TransportError(Reason.CONNECT, f"{url}: {error}") from error
    except httpx.RemoteProtocolError as error:
        reason = _reason_of(error)
        advice = _NO_CERTIFICATE if reason is Reason.RESET and url.startswith("https:") else ""
        raise TransportError(reason, f"{url}: {error}{advice}") from error
    except httpx.NetworkError as error:
        raise TransportError(Reason.RESET, f"{url}: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise TransportError(Reason.PROTOCOL, f"{url}: {error}") from error


@contextmanager
def _tls_first(url: str) -> Iterator[None]:
    """In TLS 1.3 a server refuses our certificate at the first read, not while we connect."""
    try:
        yield
    except httpx.NetworkError as error:
        if told := tls_failure(error):
            raise TransportError(Reason.TLS, f"{url}: {told}") from error
        raise


def _reason_of(error: httpx.RemoteProtocolError) -> Reason:
    # httpx has one class for three cases and tells them apart in the text only.
    text = str(error)
    if "peer closed connection without sending complete message body" in text:
        return Reason.TRUNCATED
    return Reason.RESET if "disconnected without sending" in text else Reason.PROTOCOL


def problem_of(body: bytes) -> Problem | None:
    """What a refusal says; None when it is not a problem document."""
    try:
        return Problem.model_validate_json(body)
    except ValidationError:
        return None


def retry_after(response: httpx.Response) -> float:
    """The pause in seconds that a server asks for."""
    # The HTTP-date form of Retry-After is not worth a parser here: our server sends seconds.
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 1.0
