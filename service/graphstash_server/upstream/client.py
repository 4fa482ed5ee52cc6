"""UpstreamClient: calls of a region to its upstream.

Every wait is bounded. A call without an answer marks the upstream as down. Until a probe marks it
as up (`following`), calls fail at once, so that a dead upstream delays no request. A busy upstream,
or a wait for one of this server's own connections, does not mark the upstream as down.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Final, NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from graphstash_schema import (
    Digest,
    LookupRequest,
    LookupResponse,
    Namespace,
)
from graphstash_schema.names import ListPosition
from graphstash_schema.protocol import (
    ADMIN_PREFIX,
    API_PREFIX,
    HEADER_COPY,
    HEADER_METADATA,
    HEADER_PROTOCOL,
    HEADER_PUBLISHER,
    HEADER_WITHDRAWALS,
    PROTOCOL_VERSION,
)
from graphstash_schema.region import UpstreamState
from graphstash_server import __version__
from graphstash_server.errors import StartError
from graphstash_server.keys import StoredKey
from graphstash_server.services.counters import Counters
from graphstash_server.settings import Settings

__all__ = ["MAX_IDENTIFYING", "Answer", "UpstreamBusyError", "UpstreamClient", "UpstreamError"]

_LOGGER = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 2.0
_IDLE_SECONDS: Final = 10.0
"""Seconds that a transfer may pause."""

_COMMIT_SECONDS: Final = 30.0
"""Seconds in which the upstream commits an upload, in addition to those for an answer."""

_MIN_BYTES_PER_SECOND: Final = 128 * 1024
"""Minimum mean rate of a transfer, beyond half a minute."""

_MAX_ANSWER_BYTES: Final = 8 * 1024**2
"""Maximum size of an answer that is not an artifact: ten thousand namespaces take a megabyte."""

_MAX_CONNECTIONS: Final = 64
_MAX_POLLS: Final = 512
"""Concurrent long polls, which occupy connections of their own for seconds."""

MAX_IDENTIFYING: Final = 40
"""Callers to identify at the same time. Their pool has one more connection, for probes."""

_FAILURES: Final = (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError)

M = TypeVar("M", bound=BaseModel)


class UpstreamError(Exception):
    """The upstream does not answer, or its answer is not valid."""


class UpstreamBusyError(UpstreamError):
    """The upstream asks to retry later, or all connections of a pool are in use. Other calls may
    succeed.
    """


class Answer(NamedTuple):
    """An answer with a status below 500, or with 507: the upstream has no room."""

    status: int
    body: bytes

    def parse(self, model: type[M]) -> M:
        """Parse the body. Raise `UpstreamError` if it has another form."""
        try:
            return model.model_validate_json(self.body)
        except ValidationError as error:
            raise UpstreamError(f"an answer of the upstream is malformed: {error}") from None


class UpstreamClient:
    """Connections to one upstream. Short questions and long polls have pools of their own.

    Attributes:
        url: the upstream, without a slash at the end.
        is_up: event that is set while the upstream answers. Probes set it (`following`).
        went_down: event that is set by the first call without an answer, and cleared by a probe.
    """

    def __init__(self, settings: Settings, *, counters: Counters) -> None:
        """Connect to nothing yet.

        Raises:
            StartError: the CA file cannot be used.
        """
        assert settings.upstream_url is not None  # noqa: S101 - the caller has checked
        self.url = settings.upstream_url.rstrip("/")
        self.is_up = asyncio.Event()
        self.went_down = asyncio.Event()
        self._counters = counters
        self._token = settings.upstream_token
        self._answer_seconds = settings.upstream_answer_seconds
        tls = _tls(settings)
        self._http = self._pool(_MAX_CONNECTIONS, tls=tls)
        self._polls = self._pool(_MAX_POLLS, tls=tls)
        self._probes = self._pool(MAX_IDENTIFYING + 1, tls=tls)

    async def close(self) -> None:
        """Close the connections."""
        for pool in (self._http, self._polls, self._probes):
            await pool.aclose()

    def count(self, event: str) -> None:
        """Count an event of `graphstash_upstream_total`."""
        self._counters.count_upstream(event)

    async def probe(self) -> UpstreamState:
        """Ask for the upstream's state, even while it is down. Raise `UpstreamError` if it does not
        answer. The caller marks the upstream as up.
        """
        answer = await self._ask(f"{ADMIN_PREFIX}/upstream", None)
        if answer.status == 401:
            raise UpstreamError(f"{self.url} refuses GRAPHSTASH_UPSTREAM_TOKEN")
        if answer.status != 200:
            raise UpstreamError(
                f"{self.url} answers {answer.status}: is it a graphstash server of this release?"
            )
        return answer.parse(UpstreamState)

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        headers: Mapping[str, str] | None = None,
        credentials: str | None = None,
        poll_seconds: float = 0.0,
    ) -> Answer:
        """Make a call with a small answer.

        Args:
            method: HTTP method.
            path: path and query.
            body: JSON to send.
            headers: further headers.
            credentials: a caller's bearer token. Default: the token of this region.
            poll_seconds: seconds for which the upstream may hold the answer back, in a long poll.

        Raises:
            UpstreamError: the upstream does not answer.
        """
        self._check()
        sent = self._headers(credentials) | dict(headers or {})
        content = None
        if body is not None:
            sent["Content-Type"] = "application/json"
            content = body.model_dump_json(exclude_none=True).encode()
        pool = self._polls if poll_seconds else self._http
        timeout = self._timeout(poll_seconds)
        request = pool.build_request(method, path, headers=sent, content=content, timeout=timeout)
        return await self._exchange(pool, request, poll_seconds=poll_seconds)

    async def ask(self, path: str, *, credentials: str | None = None) -> Answer:
        """Make a GET on the connections of the probes, which no other calls occupy. At most
        `MAX_IDENTIFYING` calls with a caller's credentials may run at the same time.
        """
        self._check()
        return await self._ask(path, credentials)

    async def look_up(
        self, namespace: Namespace, keys: Sequence[StoredKey], *, is_comparison: bool = False
    ) -> LookupResponse:
        """Look up at most `MAX_LOOKUP_KEYS` keys, in the upstream's database. The upstream counts a
        comparison apart from the requests of jobs.
        """
        request = LookupRequest(keys=tuple(key.key for key in keys))
        path = f"{API_PREFIX}/{namespace}/artifacts:lookup"
        headers = {HEADER_COPY: "1"} if is_comparison else None
        answer = await self.call("POST", path, body=request, headers=headers)
        if answer.status != 200:
            raise UpstreamError(f"{self.url} answers a look-up in {namespace} with {answer.status}")
        return answer.parse(LookupResponse)

    @asynccontextmanager
    async def download(self, key: StoredKey, digest: Digest) -> AsyncIterator[httpx.Response]:
        """Open an artifact. The caller checks status, headers and bytes.

        Raises:
            UpstreamError: the upstream does not answer, or the transfer stalls.
        """
        self._check()
        with self._map_errors(may_mark_down=False):
            async with (
                asyncio.timeout(_transfer_seconds(digest)),
                self._http.stream(
                    "GET", key.artifact_path, headers=self._headers(None)
                ) as response,
            ):
                yield response

    async def upload(
        self,
        key: StoredKey,
        digest: Digest,
        chunks: AsyncIterator[bytes],
        *,
        metadata: str,
        publisher: str,
        withdrawals: ListPosition,
    ) -> Answer:
        """Send an artifact. Raise `UpstreamError` if the upstream does not answer. `metadata` and
        `publisher` are values of headers. The upstream answers 412 if it withdrew the same bytes
        after the position `withdrawals`.
        """
        self._check()
        headers = self._headers(None) | {
            "Content-Length": str(digest.size_bytes),
            "Content-Type": "application/octet-stream",
            "Repr-Digest": digest.repr_digest,
            HEADER_PUBLISHER: publisher,
            HEADER_WITHDRAWALS: withdrawals,
        }
        if metadata:
            headers[HEADER_METADATA] = metadata
        with self._map_errors(may_mark_down=digest.size_bytes <= _MAX_ANSWER_BYTES):
            async with asyncio.timeout(_transfer_seconds(digest)):
                response = await self._http.put(
                    key.artifact_path,
                    headers=headers,
                    content=chunks,
                    timeout=self._timeout(_COMMIT_SECONDS),
                )
        return self._judge(response, response.content)

    def mark_up(self) -> None:
        """Let calls pass, after a probe."""
        self.went_down.clear()
        if not self.is_up.is_set():
            _LOGGER.info("the upstream %s answers", self.url)
            self.is_up.set()

    def mark_down(self, reason: str) -> None:
        """Let calls fail at once, until a probe."""
        if self.is_up.is_set():
            _LOGGER.warning(
                "the upstream %s does not answer, so the region does without it: %s",
                self.url,
                reason,
            )
            self.is_up.clear()
        self.went_down.set()

    def _check(self) -> None:
        if not self.is_up.is_set():
            raise UpstreamError(f"{self.url} does not answer")

    async def _ask(self, path: str, credentials: str | None) -> Answer:
        headers = self._headers(credentials)
        return await self._exchange(
            self._probes, self._probes.build_request("GET", path, headers=headers)
        )

    async def _exchange(
        self, pool: httpx.AsyncClient, request: httpx.Request, *, poll_seconds: float = 0.0
    ) -> Answer:
        seconds = _CONNECT_SECONDS + 2 * self._answer_seconds + poll_seconds
        with self._map_errors():
            async with (
                asyncio.timeout(seconds),
                aclosing(await pool.send(request, stream=True)) as response,
            ):
                received = bytearray()
                async for chunk in response.aiter_raw():
                    received += chunk
                    if len(received) > _MAX_ANSWER_BYTES:
                        raise UpstreamError(
                            f"an answer of {self.url} exceeds {_MAX_ANSWER_BYTES} bytes"
                        )
        return self._judge(response, bytes(received))

    def _judge(self, response: httpx.Response, body: bytes) -> Answer:
        """Return an answer, or raise `UpstreamError` if no working upstream has sent it."""
        status = response.status_code
        if status == 429 or (status == 503 and "retry-after" in response.headers):
            raise UpstreamBusyError(f"{self.url} is busy and answers {status}")
        if status >= 500 and status != 507:
            self.mark_down(f"it answers {status}")
            raise UpstreamError(f"{self.url} answers {status}")
        if response.headers.get(HEADER_PROTOCOL) != str(PROTOCOL_VERSION):
            self.mark_down(f"it answers without {HEADER_PROTOCOL}: {PROTOCOL_VERSION}")
            raise UpstreamError(f"{self.url} is no graphstash server")
        return Answer(status, body)

    def _headers(self, credentials: str | None) -> dict[str, str]:
        if credentials is None and self._token is not None:
            credentials = self._token.get_secret_value()
        if credentials is None or not credentials.isascii():
            return {}
        return {"Authorization": f"Bearer {credentials}"}

    def _pool(self, connections: int, *, tls: ssl.SSLContext | bool) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url,
            headers={
                HEADER_PROTOCOL: str(PROTOCOL_VERSION),
                "User-Agent": f"graphstash/{__version__}",
                "Accept-Encoding": "identity",
            },
            verify=tls,
            timeout=self._timeout(0.0),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=16),
        )

    def _timeout(self, held_seconds: float) -> httpx.Timeout:
        """Return the limits of a call whose answer the upstream may hold back for some time."""
        return httpx.Timeout(
            _IDLE_SECONDS,
            connect=_CONNECT_SECONDS,
            read=self._answer_seconds + held_seconds,
            pool=self._answer_seconds,
        )

    @contextmanager
    def _map_errors(self, *, may_mark_down: bool = True) -> Iterator[None]:
        """Raise failures as `UpstreamError`, and mark the upstream as down.

        Args:
            may_mark_down: whether a failure on an open connection also marks it. A transfer that
                stalls does not show that other calls fail.
        """
        try:
            yield
        except httpx.PoolTimeout as error:
            raise UpstreamBusyError(f"all connections to {self.url} are in use") from error
        except _FAILURES as error:
            if may_mark_down or isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                self.mark_down(repr(error))
            raise UpstreamError(f"{self.url} does not answer: {error!r}") from error


def _transfer_seconds(digest: Digest) -> float:
    return 30.0 + digest.size_bytes / _MIN_BYTES_PER_SECOND


def _tls(settings: Settings) -> ssl.SSLContext | bool:
    if settings.upstream_ca_file is None:
        is_https = str(settings.upstream_url).startswith("https:")
        return httpx.create_ssl_context() if is_https else False
    try:
        return ssl.create_default_context(cafile=settings.upstream_ca_file)
    except OSError as error:  # its text does not name the file
        raise StartError(
            f"GRAPHSTASH_UPSTREAM_CA_FILE={settings.upstream_ca_file} cannot be used: {error}"
        ) from None
