"""Transport: make one call that ends with a response or a `CacheError`.

Every connection attempt, every read and every whole call has a time limit. The client
distinguishes these failures:

    refused  another 4xx: a working server, so the circuit breaker closes
    busy     429 or 503. During the server's `Retry-After`, calls fail at once with the same error
    down     no response: a failure for the circuit breaker. A timeout is a `BusyError` until the
             circuit opens, if a retry does no harm: the server may only be slow
    broken   a wrong response or another 5xx: a failure for the circuit breaker
"""

import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from random import uniform
from typing import Final, cast

from graphstash._http.circuit_breaker import CircuitBreaker
from graphstash._http.connections import REPEATED, ProcessClient
from graphstash._http.credentials import Credentials
from graphstash._http.deadline import Deadline
from graphstash._http.errors import MAX_PROBLEM_BYTES, map_httpx_errors, read_small, refuse_errors
from graphstash._http.lean_httpx import httpx
from graphstash._http.tls import server_context, storage_context
from graphstash.config import ClientConfig
from graphstash.errors import BusyError, CacheError, Reason, RefusedError, TransportError
from graphstash_schema.protocol import (
    HEADER_ACCEPT_REDIRECT,
    HEADER_COPY,
    HEADER_JOB,
    HEADER_PROTOCOL,
    PROTOCOL_VERSION,
)

__all__ = ["Answer", "Transport"]

_SLOWEST_UPLOAD_BYTES_PER_SECOND: Final = 256 * 1024
"""Minimum mean rate. A slower upload is abandoned. Uploads run in the background."""

_SLOW_SECONDS: Final = 1.0
"""`retry_after_seconds` of the `BusyError` after a timeout."""

_MAX_SLOW_SECONDS: Final = 10.0
"""Maximum seconds that a job waits for a server that does not answer, including the timeouts. The
circuit breaker usually ends the wait earlier."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with a status below 400, or the 404 of a GET.

    Attributes:
        headers: headers, with case-insensitive names.
        body: empty if the caller streams it.
        is_redirected: whether the bytes come from storage instead of the server.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    is_redirected: bool = False


class Transport:
    """Sends requests to one server. Thread-safe, and usable in a forked child.

    Paths have a leading slash. A failed call raises a `CacheError`.

    Raises:
        ConfigError: a certificate file is unusable.

    Attributes:
        context: TLS context for the server. None: loaded when the first connection needs it.
        job: name of the job, sent with each request for the server's statistics.
        is_copying: whether downloads are copies, which count neither as hits nor as misses.
        takes_redirects: whether the server may redirect downloads to storage. False after the first
            failure of the storage, which does not count for the circuit breaker.
    """

    def __init__(self, config: ClientConfig, *, context: ssl.SSLContext | None = None) -> None:
        self._config = config
        self.job = config.job
        self.is_copying = False
        self._breaker = CircuitBreaker()
        self._busy: BusyError | None = None  # the reason of the breaker's last pause
        self._credentials = Credentials(config)
        self.context = context
        # Without these files, delay loading the system's certificate authorities, about 20 ms.
        if context is None and (config.ca_file or config.client_cert):
            self.context = server_context(config)
        headers = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), "User-Agent": "graphstash"}
        self._client = ProcessClient(config.url, context=self._tls, headers=headers)
        self._storage = ProcessClient(context=lambda: storage_context(config))
        self.takes_redirects = True

    @property
    def is_anonymous(self) -> bool:
        """Whether requests carry no token. Valid after the first request."""
        return self._credentials.is_anonymous

    def call(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        json: bytes | None = None,
        patience_seconds: float = 0.0,
    ) -> Answer:
        """Make a call with a small response. A long poll waits `patience_seconds` longer for it."""
        all_headers = dict(headers or {})
        if json is not None:
            all_headers["Content-Type"] = "application/json"
        deadline = Deadline(
            self._config.connect_seconds + 2 * self._config.first_byte_seconds + patience_seconds
        )
        with self._stream(
            method,
            path,
            headers=all_headers,
            content=json,
            patience_seconds=patience_seconds,
            deadline=deadline,
        ) as response:
            return Answer(response.status_code, response.headers, read_small(response))

    @contextmanager
    def download(
        self, path: str, *, deadline: Deadline
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """Stream the body of a GET, from the server or from storage. Empty for a 404. The iterator
        may also raise `CacheError`, for example if the body is too short.
        """
        headers: dict[str, str] = {}
        if self.takes_redirects:
            headers[HEADER_ACCEPT_REDIRECT] = "1"
        if self.is_copying:
            headers[HEADER_COPY] = "1"
        with self._stream("GET", path, headers=headers, deadline=deadline) as response:
            answer = Answer(response.status_code, response.headers)
            if answer.status < 300:
                yield answer, iter(cast("httpx.SyncByteStream", response.stream))
                return
            body = read_small(response, most=MAX_PROBLEM_BYTES)
            if answer.status == 404:
                yield Answer(404, answer.headers, body), iter(())
                return
        try:
            with self._follow_redirect(answer, deadline) as followed:
                yield followed
        except TransportError:
            self.takes_redirects = False
            raise

    @contextmanager
    def _follow_redirect(
        self, answer: Answer, deadline: Deadline
    ) -> Iterator[tuple[Answer, Iterator[bytes]]]:
        """Yield the server's headers with the bytes from storage, which gets no token and no client
        certificate. Callers compare the bytes with the digest that the server announced.
        """
        location = answer.headers.get("Location", "")
        origin = _origin_of(location)
        with map_httpx_errors(origin):
            url = httpx.URL(location)
            if url.scheme not in ("http", "https") or not url.host:
                raise httpx.UnsupportedProtocol(f"a redirect to {origin}")
            _, transport = self._storage.connect()
            # httpx's client would log the URL, which grants access to the blob, and add headers.
            request = httpx.Request(
                "GET",
                url,
                headers={"Accept-Encoding": "identity"},
                extensions={"timeout": self._timeout().as_dict(), "deadline": deadline},
            )
            with closing(transport.handle_request(request)) as response:
                response.request = request
                if response.status_code != 200:
                    raise TransportError(
                        Reason.PROTOCOL, f"{origin} answered {response.status_code}"
                    )
                headers = httpx.Headers(dict(answer.headers))
                headers["Content-Length"] = response.headers.get("Content-Length", "")
                yield Answer(200, headers, is_redirected=True), response.iter_raw()

    def upload(
        self,
        path: str,
        *,
        headers: Mapping[str, str],
        chunks: Callable[[], Iterator[bytes]],
        size_bytes: int,
    ) -> Answer:
        """Make a PUT with a streamed body. If the server has closed a kept connection, `chunks` is
        called again.
        """
        all_headers = dict(headers) | {
            "Content-Length": str(size_bytes),
            "Content-Type": "application/octet-stream",
        }
        # The server answers after an fsync, which can take seconds on a busy disk.
        patience = 10.0
        deadline = Deadline(patience + size_bytes / _SLOWEST_UPLOAD_BYTES_PER_SECOND)
        with self._stream(
            "PUT",
            path,
            headers=all_headers,
            content=_Reiterable(chunks),
            patience_seconds=patience,
            deadline=deadline,
        ) as response:
            return Answer(response.status_code, response.headers, read_small(response))

    def close(self) -> None:
        """Close the connections of this process. Further calls fail."""
        self._client.close()
        self._storage.close()

    def _timeout(self, patience_seconds: float = 0.0) -> httpx.Timeout:
        return httpx.Timeout(
            self._config.first_byte_seconds + patience_seconds,
            connect=self._config.connect_seconds,
            pool=self._config.first_byte_seconds,
        )

    def _tls(self) -> ssl.SSLContext | None:
        if self.context is None and self._config.url.startswith("https:"):
            self.context = server_context(self._config)
        return self.context

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
        if not self._config.url:
            raise CacheError(
                Reason.NO_SERVER,
                "set GRAPHSTASH_URL, or start a server on this host with `graphstash serve`",
            )
        token = self._credentials.token()
        self._check_circuit()
        if self.job:
            headers = {**headers, HEADER_JOB: self.job}
        if token:  # httpx masks it in the repr of headers
            headers = {**headers, "Authorization": f"Bearer {token}"}
        is_answered = False
        try:
            with (
                map_httpx_errors(self._config.url),
                self._client.connect()[0].stream(
                    method,
                    path,
                    headers=headers,
                    content=content,
                    timeout=self._timeout(patience_seconds),
                    deadline=deadline,
                ) as response,
            ):
                is_answered = True
                try:
                    refuse_errors(response, url=self._config.url)
                except CacheError as error:
                    error.is_in_doubt = REPEATED in response.extensions
                    raise
                yield response
        except CacheError as error:
            self._judge(error, method, token, is_answered=is_answered)
            raise
        else:
            self._breaker.record_success()

    def pause(self, seconds: float) -> None:
        """Make no call for some seconds, because the server is busy and the job must not wait."""
        self._breaker.pause(seconds)

    def _check_circuit(self) -> None:
        busy, seconds = self._busy, self._breaker.asked_seconds
        if busy is not None and seconds > 0.0:
            patience = busy.patience_seconds
            raise BusyError(busy.detail, retry_after_seconds=seconds, patience_seconds=patience)
        if not self._breaker.allows():
            raise TransportError(Reason.CIRCUIT_OPEN, "earlier calls failed; the client pauses")

    def _judge(self, error: CacheError, method: str, token: str, *, is_answered: bool) -> None:
        """Record a failed call for later calls. Raise if callers should get another error."""
        if isinstance(error, BusyError):
            self._busy = error
            if error.is_full:
                # The server refuses only new connections. Other threads may have open ones.
                self._breaker.record_success()
            else:
                # Many processes get the same Retry-After, and must not all return at once.
                self._breaker.pause(error.retry_after_seconds * uniform(1.0, 1.5))  # noqa: S311 - no secret
        elif isinstance(error, TransportError):
            is_open = self._breaker.record_failure()
            if not is_open and not is_answered and _may_be_slow(error, method):
                raise BusyError(
                    error.detail,
                    retry_after_seconds=_SLOW_SECONDS,
                    patience_seconds=_MAX_SLOW_SECONDS,
                    reason=error.reason,
                ) from error.__cause__
        elif isinstance(error, RefusedError):
            if error.status >= 500:
                self._breaker.record_failure()
            else:
                self._breaker.record_success()
            if error.status == 401:
                detail = f"{self._config.url}: {self._credentials.record_refusal(token)}"
                if token:
                    detail += f": {error.detail}"
                raise RefusedError(detail, code=error.code, status=401) from None


@dataclass(frozen=True, slots=True)
class _Reiterable:
    chunks: Callable[[], Iterator[bytes]]

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks()


def _may_be_slow(error: TransportError, method: str) -> bool:
    """Return whether the server may only have been slow, and a retry does no harm."""
    timeout = error.__cause__
    is_unsent = isinstance(timeout, httpx.ConnectTimeout | httpx.PoolTimeout)
    return is_unsent or (isinstance(timeout, httpx.ReadTimeout) and method == "GET")


def _origin_of(location: str) -> str:
    """Return the origin of a URL for messages: its path and query grant access to the blob."""
    scheme, separator, rest = location.partition("://")
    return f"{scheme[:8]}{separator}{rest.partition('/')[0][:255]}"
