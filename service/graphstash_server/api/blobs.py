"""BlobResponse: sends an artifact in constant memory, and never a wrong number of bytes.

The bytes take the shortest of three ways that is open:

    accel      the reverse proxy in front reads the file itself: the answer only names it
    pathsend   the ASGI server reads the file itself (extension `http.response.pathsend`)
    chunks     this process reads the store and sends piece by piece; always open

The status is decided before, whichever way it is.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphstash_server.api.calls import until_gone
from graphstash_server.services.artifacts.service import OpenArtifact

__all__ = ["HEADER_ACCEL", "BlobResponse", "accelerated_path"]

HEADER_ACCEL: Final = "Graphstash-Accel"
"""Request: the reverse proxy in front can read the blob directory. docker/nginx sets it."""

_ACCEL_PREFIX: Final = "/_blobs/"
"""Where the proxy has the blob directory; not reachable from outside (`internal`)."""

_OTHER_CONDITIONS: Final = ("if-match", "if-modified-since", "if-unmodified-since")
"""This server ignores them, and nginx would not."""

_MADE_BY_THE_PROXY: Final = frozenset(
    {"Content-Range", "Accept-Ranges", "Cache-Control", "Content-Disposition"}
)
"""nginx derives them from the file, or would copy them onto any answer, even for a missing file."""

_WATCHED_BYTES = 8 * 1024**2
"""A longer body ends when the caller closes the connection; a shorter one is sent before that is
noticed."""

_EMPTY: Final = {"type": "http.response.body", "body": b"", "more_body": False}


def accelerated_path(
    request: Request, file: Path | None, *, blob_dir: Path, span: tuple[int, int] | None
) -> str | None:
    """Where the reverse proxy finds the blob; None when this process has to send it.

    The proxy applies the request's own range and conditions to the file. Where it would read
    them differently (several ranges, a malformed one, an If-Range that does not match), this server
    sends the bytes.

    The proxy replaces the header, so no client can pass its own. A client that reaches this server
    directly and sends it gets the headers of a hit with an empty body, which does not match the
    digest: it harms only itself. The path contains nothing but the digest, which it gets anyway.

    `span` is the range that this server serves, or None for the whole blob.
    """
    asked = request.headers
    if file is None or HEADER_ACCEL not in asked or not file.is_relative_to(blob_dir):
        return None
    if ("range" in asked and span is None) or any(name in asked for name in _OTHER_CONDITIONS):
        return None
    return _ACCEL_PREFIX + file.relative_to(blob_dir).as_posix()


class BlobResponse(Response):
    """The artifact was opened before the first header: deleting it meanwhile cannot cut the body.

    When the blob is shorter than it was, the exception reaches the server, which cuts the
    connection; with Content-Length sent the caller cannot take what it got for the whole.
    """

    def __init__(
        self,
        artifact: OpenArtifact,
        *,
        span: tuple[int, int] | None,
        headers: Mapping[str, str],
        accelerated: str | None,
        sent: Callable[[int], None],
    ) -> None:
        """Takes over the artifact and closes it.

        Args:
            artifact: what to send.
            span: first byte and end (exclusive) of the requested range; None for all.
            headers: all but Content-Length.
            accelerated: where the reverse proxy finds the file, see `accelerated_path`.
            sent: called at the end with the number of bytes sent.
        """
        self._artifact = artifact
        self._start, self._stop = span or (0, artifact.reader.size_bytes)
        self._accelerated = accelerated
        self._sent = sent
        self.status_code = 200 if span is None or accelerated else 206
        self.background = None
        self.body = b""
        if accelerated is None:
            self.init_headers({**headers, "Content-Length": str(self._stop - self._start)})
        else:
            kept = {name: headers[name] for name in headers.keys() - _MADE_BY_THE_PROXY}
            self.init_headers({**kept, "X-Accel-Redirect": accelerated, "Content-Length": "0"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends headers and bytes."""
        reader = self._artifact.reader
        size_bytes = self._stop - self._start
        can_send_files = "http.response.pathsend" in scope.get("extensions", {})
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            if self._accelerated is not None:
                await send(_EMPTY)
            elif can_send_files and reader.path is not None and size_bytes == reader.size_bytes:
                await send({"type": "http.response.pathsend", "path": str(reader.path)})
            else:
                await self._send_chunks(receive, send)
                return
            self._sent(size_bytes)
        finally:
            await reader.close()

    async def _send_chunks(self, receive: Receive, send: Send) -> None:
        sent_bytes = 0
        total_bytes = self._stop - self._start
        is_watched = total_bytes > _WATCHED_BYTES
        gone = asyncio.create_task(until_gone(receive)) if is_watched else None
        try:
            async for chunk in self._artifact.reader.chunks(self._start, self._stop):
                if gone is not None and gone.done():
                    return
                more = sent_bytes + len(chunk) < total_bytes
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
                sent_bytes += len(chunk)
            if not total_bytes:
                await send(_EMPTY)
        finally:
            if gone is not None:
                gone.cancel()
            self._sent(sent_bytes)
