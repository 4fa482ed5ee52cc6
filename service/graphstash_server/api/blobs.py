"""BlobResponse: sends an artifact in constant memory, and never a wrong number of bytes.

The bytes take the shortest of three ways that is open:

    accel      the reverse proxy in front reads the file itself: the answer only names it
    pathsend   the ASGI server reads the file itself (extension `http.response.pathsend`)
    chunks     this process reads the store and sends piece by piece; always open

The status is decided before, whichever way it is.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphstash_server.api.calls import until_gone
from graphstash_server.api.representation import Representation
from graphstash_server.services.artifacts.service import OpenArtifact

__all__ = ["BlobResponse"]

_WATCHED_BYTES = 8 * 1024**2
"""A longer body ends when the caller closes the connection; a shorter one is sent before that is
noticed."""

_EMPTY: Final = {"type": "http.response.body", "body": b"", "more_body": False}


class BlobResponse(Response):
    """The artifact was opened before the first header: deleting it meanwhile cannot cut the body.

    When the blob is shorter than it was, the exception reaches the server, which cuts the
    connection; with Content-Length sent the caller cannot take what it got for the whole.
    """

    def __init__(
        self, artifact: OpenArtifact, answer: Representation, *, sent: Callable[[int], None]
    ) -> None:
        """Takes over the artifact and closes it; `sent` is called at the end with the number of
        bytes sent.
        """
        self._reader = artifact.reader
        self._is_accelerated = answer.span is None
        self._start, self._stop = answer.served or (0, 0)
        self._sent = sent
        self.status_code = answer.status
        self.background = None
        self.body = b""
        self.init_headers(answer.headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends headers and bytes."""
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
            if self._is_accelerated:
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
