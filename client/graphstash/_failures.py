"""Failures: what httpx raises and what a refusal says, in the words of our errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from pydantic import ValidationError

from graphstash._errors import Reason, TransportError
from graphstash_schema import Problem

__all__ = ["named_failures", "problem_of", "retry_after"]


@contextmanager
def named_failures(url: str) -> Iterator[None]:
    """Turns httpx's exceptions into ours, most specific first (tests check that none is left)."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise TransportError(Reason.CONNECT, f"{url}: no connection in time") from error
    except httpx.TimeoutException as error:
        raise TransportError(Reason.TIMEOUT, f"{url}: {type(error).__name__}") from error
    except (httpx.ConnectError, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
        raise TransportError(Reason.CONNECT, f"{url}: {error}") from error
    except httpx.RemoteProtocolError as error:
        raise TransportError(_reason_of(error), f"{url}: {error}") from error
    except httpx.NetworkError as error:
        raise TransportError(Reason.RESET, f"{url}: {error}") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise TransportError(Reason.PROTOCOL, f"{url}: {error}") from error


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
    return float(value) if value.isdigit() else 1.0
