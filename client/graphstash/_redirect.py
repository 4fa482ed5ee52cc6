"""Redirect: fetches a blob from where the server says that it lies, once.

Nothing of ours goes there: no token, no certificate, no header but the one that keeps the bytes as
they are. What comes back proves itself by its digest, which the server announced.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import httpx

from graphstash._config import ClientConfig
from graphstash._network import Deadline, DeadlineTransport
from graphstash._tls import storage_context

__all__ = ["RedirectClient", "place_of"]

_HEADERS: Final = {"Accept-Encoding": "identity"}


class RedirectClient:
    """Safe for many threads, and for a forked child.

    Args:
        config: who may vouch for the other server.
    """

    def __init__(self, config: ClientConfig) -> None:
        self._config = config
        self._lock = threading.Lock()  # guards the client of this process
        self._connection: tuple[int, httpx.Client, DeadlineTransport] | None = None

    @contextmanager
    def get(
        self, location: str, *, deadline: Deadline, timeout: httpx.Timeout
    ) -> Iterator[httpx.Response]:
        """The answer of another server; its body is not read yet.

        Raises:
            httpx.HTTPError: when none comes.
            httpx.InvalidURL: when the location is none.
        """
        url = httpx.URL(location)
        if url.scheme not in ("http", "https") or not url.host:
            raise httpx.UnsupportedProtocol(f"a redirect to {place_of(location)}")
        _, transport = self._connected()
        # Past the client: it would add its headers, and log the URL, which is a key to the blob.
        request = httpx.Request(
            "GET", url, headers=_HEADERS, extensions={"timeout": timeout.as_dict()}
        )
        with transport.within(deadline):
            response = transport.handle_request(request)
            response.request = request
            try:
                yield response
            finally:
                response.close()

    def close(self) -> None:
        """Closes the connections of this process."""
        with self._lock:
            if self._connection is not None and self._connection[0] == os.getpid():
                self._connection[1].close()
            self._connection = None

    def _connected(self) -> tuple[httpx.Client, DeadlineTransport]:
        with self._lock:
            if self._connection is None or self._connection[0] != os.getpid():
                limits = httpx.Limits(max_connections=16, keepalive_expiry=30.0)
                transport = DeadlineTransport(limits, context=storage_context(self._config))
                client = httpx.Client(transport=transport, follow_redirects=False, trust_env=False)
                self._connection = (os.getpid(), client, transport)
            return self._connection[1:]


def place_of(location: str) -> str:
    """What may be said of a link: its path and query are a key to the blob."""
    scheme, separator, rest = location.partition("://")
    return f"{scheme[:8]}{separator}{rest.partition('/')[0][:255]}"
