"""BlobResponse: send an artifact in constant memory.

There are two ways to send a blob:

    pathsend   the ASGI server reads the file (extension `http.response.pathsend`)
    chunks     this process reads the store and sends pieces
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphstash_server.api.calls import until_gone
from graphstash_server.reading.reads import ReadAnswer

__all__ = ["BlobResponse"]

_WATCHED_BYTES = 8 * 1024**2
"""Size above which the response stops if the caller closes the connection. A smaller body is sent
before the server detects that."""

_EMPTY: Final = {"type": "http.response.body", "body": b"", "more_body": False}


class BlobResponse(Response):
    """The body of an artifact, whose blob was opened before the headers were made. Chunks of it are
    complete even if the blob is deleted meanwhile.

    If the stored blob is too short, `ShortBlobError` makes the ASGI server close the connection.
    The caller detects missing bytes by Content-Length.
    """

    def __init__(self, answer: ReadAnswer, *, sent: Callable[[int], None]) -> None:
        """Take ownership of the answer's reader. After sending, call `sent` with the number of
        bytes.
        """
        made, _, reader = answer
        assert reader is not None  # noqa: S101 - other answers need no `BlobResponse`
        self._reader = reader
        self._start, self._stop = made.span or (0, 0)
        self._sent = sent
        self.status_code = made.status
        self.background = None
        self.body = b""
        self.init_headers(made.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send headers and bytes."""
        reader = self._reader
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
            if can_send_files and reader.path is not None and size_bytes == reader.size_bytes:
                await send({"type": "http.response.pathsend", "path": str(reader.path)})
                self._sent(size_bytes)
            else:
                await self._send_chunks(receive, send)
        finally:
            await reader.close()

    async def _send_chunks(self, receive: Receive, send: Send) -> None:
        sent_bytes = 0
        total_bytes = self._stop - self._start
        is_watched = total_bytes > _WATCHED_BYTES
        gone = asyncio.create_task(until_gone(receive)) if is_watched else None
        try:
            async for chunk in self._reader.chunks(self._start, self._stop):
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
