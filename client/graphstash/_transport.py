"""Transport: one call in, one answer or one `CacheError` out.

Time is bounded everywhere: for the connection, for every byte waited for, and for the whole call.
Failures feed the circuit breaker; a pause that the server asks for is kept.
"""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import httpx
from pydantic import ValidationError

from graphstash._breaker import CircuitBreaker
from graphstash._config import ClientConfig
from graphstash._errors import (
    BusyError,
    ConflictError,
    LeaseLostError,
    Reason,
    RefusedError,
    TransportError,
)
from graphstash._network import Deadline, DeadlineTransport
from graphstash_schema import ErrorCode, Problem
from graphstash_schema.protocol import HEADER_PROTOCOL, PROTOCOL_VERSION

__all__ = ["Answer", "Transport"]

_SMALL_BODY_BYTES: Final = 4 * 1024**2
"""Largest answer that is read into memory: a lookup of 1,000 keys takes about 1 MiB."""

_SLOWEST_UPLOAD_BYTES_PER_SECOND: Final = 256 * 1024
"""Uploads run in the background; below this rate they are given up."""

_CLASS_OF_CODE: Final[dict[ErrorCode, type[RefusedError]]] = {
    ErrorCode.CONFLICT: ConflictError,
    ErrorCode.LEASE_LOST: LeaseLostError,
}
_PASSING: Final = (429, 503)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer below 400. `body` is empty for a streamed call."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


class Transport:
    """Speaks to one server; safe for many threads, and for a forked child.

    Args:
        config: URL and time limits.
        breaker: shared by all calls of this transport.
    """

    def __init__(self, config: ClientConfig, *, breaker: CircuitBreaker | None = None) -> None:
        self._config = config
        self._breaker = breaker or CircuitBreaker()
        self._lock = threading.Lock()  # guards the client of this process
        self._connection: tuple[int, httpx.Client, DeadlineTransport] | None = None
        self._closed = False

    def call(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        json: bytes | None = None,
        patience_seconds: float = 0.0,
    ) -> Answer:
        """Makes a call whose answer is small.

        Args:
            method: HTTP method.
            path: begins with a slash.
            headers: beside the protocol header.
            json: body, already serialized.
            patience_seconds: how much longer than usual the first byte may take (long poll).

        Returns:
            The answer; a GET's 404 is one too, because a miss is not an error.

        Raises:
            CacheError: of the class and reason that fit.
        """
        sent = dict(headers or {})
        if json is not None:
            sent["Content-Type"] = "application/json"
        deadline = Deadline(
            self._config.connect_seconds + 2 * self._config.first_byte_seconds + patience_seconds
        )
        with self._stream(
            method,
            path,
            headers=sent,
            content=json,
            patience_seconds=patience_seconds,
            deadline=deadline,
        ) as response:
            return Answer(response.status_code, response.headers, _read_small(response))

    @contextmanager
    def download(
        self, path: str, *, deadline: Deadline
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """Streams an answer's body; at the end its length has been checked.

        Raises:
            CacheError: of the class and reason that fit, also while the body is iterated.
        """
        headers = {"Accept-Encoding": "identity"}  # a proxy must not touch the bytes
        with self._stream("GET", path, headers=headers, deadline=deadline) as response:
            yield Answer(response.status_code, response.headers), response.iter_raw(1024**2)

    def upload(
        self, path: str, *, headers: Mapping[str, str], chunks: Iterable[bytes], size_bytes: int
    ) -> Answer:
        """Streams a body of known length out.

        Raises:
            CacheError: of the class and reason that fit.
        """
        sent = dict(headers) | {
            "Content-Length": str(size_bytes),
            "Content-Type": "application/octet-stream",
        }
        # The server answers after its fsync, and a disk under load may take seconds for that.
        patience = 10.0
        deadline = Deadline(patience + size_bytes / _SLOWEST_UPLOAD_BYTES_PER_SECOND)
        with self._stream(
            "PUT", path, headers=sent, content=chunks, patience_seconds=patience, deadline=deadline
        ) as response:
            return Answer(response.status_code, response.headers, _read_small(response))

    def close(self) -> None:
        """Closes the connections of this process."""
        with self._lock:
            if self._connection is not None and self._connection[0] == os.getpid():
                self._connection[1].close()
            self._connection = None
            self._closed = True

    def _connected(self) -> tuple[httpx.Client, DeadlineTransport]:
        # A forked child must not speak on its parent's sockets.
        with self._lock:
            if self._closed:
                raise TransportError(Reason.CONNECT, f"{self._config.url}: closed here")
            if self._connection is None or self._connection[0] != os.getpid():
                limits = httpx.Limits(max_connections=16, keepalive_expiry=30.0)
                transport = DeadlineTransport(limits, tls=self._config.url.startswith("https:"))
                client = httpx.Client(
                    transport=transport,
                    base_url=self._config.url,
                    headers={
                        HEADER_PROTOCOL: str(PROTOCOL_VERSION),
                        "User-Agent": "graphstash",
                    },
                    follow_redirects=False,
                    trust_env=False,  # a proxy for the internet is not the way to the team's cache
                )
                self._connection = (os.getpid(), client, transport)
            return self._connection[1:]

    @contextmanager
    def _stream(
        self,
        method: str,
        path: str,
        *,
        deadline: Deadline,
        headers: Mapping[str, str],
        content: bytes | Iterable[bytes] | None = None,
        patience_seconds: float = 0.0,
    ) -> Iterator[httpx.Response]:
        if not self._breaker.allows():
            raise TransportError(Reason.CIRCUIT_OPEN, "earlier calls failed; pausing")
        timeout = httpx.Timeout(
            self._config.first_byte_seconds + patience_seconds,
            connect=self._config.connect_seconds,
            pool=self._config.first_byte_seconds,
        )
        try:
            with _mapped(self._config.url):
                client, transport = self._connected()
                with (
                    transport.within(deadline),
                    client.stream(
                        method, path, headers=headers, content=content, timeout=timeout
                    ) as response,
                ):
                    self._refuse_errors(response)
                    yield response
        except BusyError as error:
            self._breaker.pause(error.retry_after_seconds)
            raise
        except TransportError:
            self._breaker.failed()
            raise
        except RefusedError as error:
            if error.reason is Reason.SERVER_ERROR:
                self._breaker.failed()
            else:
                self._breaker.succeeded()
            raise
        else:
            self._breaker.succeeded()

    def _refuse_errors(self, response: httpx.Response) -> None:
        status = response.status_code
        if response.headers.get(HEADER_PROTOCOL) != str(PROTOCOL_VERSION) and status < 500:
            raise TransportError(
                Reason.PROTOCOL,
                f"{self._config.url} answered {status} without {HEADER_PROTOCOL}: "
                f"{PROTOCOL_VERSION}; is it a graphstash server?",
            )
        if status < 300 or (status == 404 and response.request.method == "GET"):
            return
        if status < 400:
            raise TransportError(Reason.PROTOCOL, f"unexpected redirect ({status})")
        problem = _problem_of(_read_small(response))
        detail = problem.detail if problem else f"{self._config.url} answered {status}"
        if status in _PASSING:
            raise BusyError(detail, retry_after_seconds=_retry_after(response))
        code = problem.code if problem else None
        kind = _CLASS_OF_CODE.get(code, RefusedError) if code else RefusedError
        raise kind(detail, code=code, status=status)


def _read_small(response: httpx.Response) -> bytes:
    body = bytearray()
    for chunk in response.iter_raw():
        body += chunk
        if len(body) > _SMALL_BODY_BYTES:
            raise TransportError(
                Reason.PROTOCOL, f"an answer of more than {_SMALL_BODY_BYTES} bytes"
            )
    return bytes(body)


def _problem_of(body: bytes) -> Problem | None:
    try:
        return Problem.model_validate_json(body)
    except ValidationError:
        return None


def _retry_after(response: httpx.Response) -> float:
    # The HTTP-date form of Retry-After is not worth a parser here: our server sends seconds.
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else 1.0


@contextmanager
def _mapped(url: str) -> Iterator[None]:
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
