"""One connection to the server, below what jobs see of it.

A job turns every answer into what it means; here the answer itself is wanted: who speaks, in which
version, at what time. No token is sent: what is asked is open to everybody.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from types import TracebackType
from typing import Final, Self

import httpx

from graphstash._config import ClientConfig
from graphstash._network import Deadline, DeadlineTransport
from graphstash._tls import server_context
from graphstash_schema.protocol import HEADER_PROTOCOL, PROTOCOL_VERSION

__all__ = ["Heard", "Wire"]

_MOST_BYTES: Final = 64 * 1024
"""Of an answer; health and readiness take less than one KiB."""


@dataclass(frozen=True, slots=True)
class Heard:
    """An answer as it came.

    Attributes:
        status: the HTTP status.
        headers: by name, in any case.
        body: at most 64 KiB of it.
        seconds: from the request to the end of the answer.
        at: this host's clock when the head of the answer was there.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float
    at: datetime


class Wire:
    """Asks without a token; a context manager.

    Args:
        config: URL, TLS and time limits.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        limits = httpx.Limits(max_connections=1)
        context = server_context(config) if config.url.startswith("https:") else None
        self._transport = DeadlineTransport(limits, context=context)
        self._client = httpx.Client(
            transport=self._transport,
            base_url=config.url,
            headers={HEADER_PROTOCOL: str(PROTOCOL_VERSION), "User-Agent": "graphstash-doctor"},
            follow_redirects=False,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()

    def get(self, path: str, *, patience_seconds: float = 0.0) -> Heard:
        """Asks once.

        Args:
            path: begins with a slash.
            patience_seconds: how much longer than usual the answer may take.

        Raises:
            httpx.HTTPError: nothing usable came in time.
        """
        config = self._config
        deadline = Deadline(
            config.connect_seconds + 2 * config.first_byte_seconds + patience_seconds
        )
        timeout = httpx.Timeout(
            config.first_byte_seconds + patience_seconds, connect=config.connect_seconds
        )
        started = monotonic()
        with (
            self._transport.within(deadline),
            self._client.stream("GET", path, timeout=timeout) as response,
        ):
            at = datetime.now(UTC)
            body = bytearray()
            for chunk in response.iter_raw():
                body += chunk
                if len(body) > _MOST_BYTES:
                    break
            seconds = monotonic() - started
        return Heard(response.status_code, response.headers, bytes(body[:_MOST_BYTES]), seconds, at)
