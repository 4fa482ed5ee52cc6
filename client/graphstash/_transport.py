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
from graphstash._failures import named_failures, problem_of, retry_after
from graphstash._network import Deadline, DeadlineTransport
from graphstash._redirect import RedirectClient, place_of
from graphstash_schema import ErrorCode
from graphstash_schema.protocol import (
    HEADER_ACCEPT_REDIRECT,
    HEADER_PROTOCOL,
    PROTOCOL_VERSION,
)

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
    """An answer below 400. `body` is empty for a streamed call; `is_redirected` tells whether its
    bytes come from another place than the server.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    is_redirected: bool = False


class Transport:
    """Speaks to one server; safe for many threads, and for a forked child.

    Args:
        config: URL and time limits.
        breaker: shared by all calls of this transport.

    Attributes:
        takes_redirects: whether downloads may come from where the server says. The first that
            fails there ends this for the process, and says nothing against the server.
    """

    def __init__(self, config: ClientConfig, *, breaker: CircuitBreaker | None = None) -> None:
        self._config = config
        self._breaker = breaker or CircuitBreaker()
        self._lock = threading.Lock()  # guards the client of this process
        self._connection: tuple[int, httpx.Client, DeadlineTransport] | None = None
        self._closed = False
        self._redirects = RedirectClient()
        self.takes_redirects = True

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
        if self.takes_redirects:
            headers[HEADER_ACCEPT_REDIRECT] = "1"
        with self._stream("GET", path, headers=headers, deadline=deadline) as response:
            answer = Answer(response.status_code, response.headers)
            if answer.status != 307:
                yield answer, response.iter_raw(1024**2)
                return
            _read_small(response)
        try:
            with self._followed(answer, deadline) as followed:
                yield followed
        except TransportError:
            self.takes_redirects = False
            raise

    @contextmanager
    def _followed(
        self, answer: Answer, deadline: Deadline
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """What the server announced, and the bytes from where it sent us."""
        location = answer.headers.get("Location", "")
        with (
            named_failures(place_of(location)),
            self._redirects.get(location, deadline=deadline, timeout=self._timeout()) as response,
        ):
            if response.status_code != 200:
                raise TransportError(
                    Reason.PROTOCOL, f"{place_of(location)} answered {response.status_code}"
                )
            headers = httpx.Headers(dict(answer.headers))
            headers["Content-Length"] = response.headers.get("Content-Length", "")
            yield Answer(200, headers, is_redirected=True), response.iter_raw(1024**2)

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
        self._redirects.close()

    def _timeout(self, patience_seconds: float = 0.0) -> httpx.Timeout:
        return httpx.Timeout(
            self._config.first_byte_seconds + patience_seconds,
            connect=self._config.connect_seconds,
            pool=self._config.first_byte_seconds,
        )

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
        timeout = self._timeout(patience_seconds)
        try:
            with named_failures(self._config.url):
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
        if status == 307 and HEADER_ACCEPT_REDIRECT in response.request.headers:
            return
        if status < 400:
            raise TransportError(Reason.PROTOCOL, f"unexpected redirect ({status})")
        problem = problem_of(_read_small(response))
        detail = problem.detail if problem else f"{self._config.url} answered {status}"
        if status in _PASSING:
            raise BusyError(detail, retry_after_seconds=retry_after(response))
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
