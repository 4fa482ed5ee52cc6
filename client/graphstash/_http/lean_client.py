"""LeanClient: the part of httpx's client that calls to the server need.

httpx's client parses three URLs per request, collects cookies and follows redirects. That takes as
much CPU time as sending the request and reading the response.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Final

from graphstash._http.deadline import Deadline
from graphstash._http.lean_httpx import httpx

__all__ = ["LeanClient"]

_PLAIN: Final = re.compile(r"[A-Za-z0-9/._~:@!$&+,;=?-]*")
"""Paths that need no quoting."""

_NO_BODY: Final = httpx.ByteStream(b"")

_DEFAULT_HEADERS: Final = {"Accept": "*/*", "Accept-Encoding": "identity"}
"""Callers do not decompress bodies, so a proxy must not compress them."""


class LeanClient:
    """Sends requests to one server. Thread-safe. The creator closes `transport`."""

    def __init__(
        self, transport: httpx.BaseTransport, *, base_url: str, headers: Mapping[str, str]
    ) -> None:
        self._transport = transport
        self._url = httpx.URL(base_url)
        self._prefix = self._url.raw_path.rstrip(b"/")
        host = {"Host": self._url.netloc.decode("ascii")}
        self._headers = httpx.Headers({**host, **_DEFAULT_HEADERS, **headers})

    def stream(
        self,
        method: str,
        path: str,
        *,
        timeout: httpx.Timeout,
        deadline: Deadline,
        headers: Mapping[str, str] | None = None,
        content: bytes | Iterable[bytes] | None = None,
    ) -> "closing[httpx.Response]":
        """Send a request, and return the response before its body is read.

        Raises:
            httpx.HTTPError: the transport failed.
        """
        raw_path = path.encode() if _PLAIN.fullmatch(path) else httpx.URL(path).raw_path
        all_headers = self._headers.copy()
        for name, value in (headers or {}).items():
            all_headers[name] = value
        request = httpx.Request(
            method,
            self._url,
            headers=all_headers,
            content=content,
            # Without a body, httpx has no headers to derive from it.
            stream=_NO_BODY if content is None and method == "GET" else None,
            extensions={
                "timeout": timeout.as_dict(),
                "deadline": deadline,
                "target": self._prefix + raw_path,
            },
        )
        response = self._transport.handle_request(request)
        response.request = request
        response.headers.encoding = "iso-8859-1"  # any bytes; httpx would try other encodings
        return closing(response)
