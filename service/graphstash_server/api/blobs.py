"""BlobResponse: sends an artifact in constant memory, and never a wrong number of bytes."""

import asyncio
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphstash_server.services.artifacts import OpenArtifact

__all__ = ["BlobResponse"]

_WATCHED_BYTES = 8 * 1024**2
"""A longer body is given up when the caller hangs up; a shorter one is sent before that shows."""


class BlobResponse(Response):
    """The artifact was opened before the first header: deleting it meanwhile cannot cut the body.

    When the blob is shorter than it was, the exception reaches the server, which cuts the
    connection; with Content-Length sent the caller cannot take what it got for the whole.
    """

    def __init__(
        self,
        artifact: OpenArtifact,
        *,
        start: int,
        stop: int,
        status_code: int,
        headers: Mapping[str, str],
        sent: Callable[[int], None],
    ) -> None:
        """Takes over the artifact and closes it.

        Args:
            artifact: what to send.
            start: first byte.
            stop: end of the bytes, exclusive.
            status_code: 200 or 206.
            headers: all but Content-Length.
            sent: told at the end how many bytes went out.
        """
        self.status_code = status_code
        self.background = None
        self.body = b""
        self.init_headers({**headers, "Content-Length": str(stop - start)})
        self._artifact = artifact
        self._start = start
        self._stop = stop
        self._sent = sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends headers and bytes."""
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            if await self._send_path(scope, send):
                return
            if self._stop - self._start > _WATCHED_BYTES:
                await self._send_watched(receive, send)
            else:
                await self._send_chunks(send, gone=None)
        finally:
            await self._artifact.reader.close()

    async def _send_path(self, scope: Scope, send: Send) -> bool:
        """Leaves a whole file to the server where it can send one (ASGI extension pathsend)."""
        reader = self._artifact.reader
        is_whole = self._stop - self._start == reader.size_bytes
        if (
            reader.path is None
            or not is_whole
            or "http.response.pathsend" not in scope.get("extensions", {})
        ):
            return False
        await send({"type": "http.response.pathsend", "path": str(reader.path)})
        self._sent(reader.size_bytes)
        return True

    async def _send_watched(self, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await self._send_chunks(send, gone=gone)
        finally:
            gone.cancel()

    async def _send_chunks(self, send: Send, *, gone: "asyncio.Task[None] | None") -> None:
        sent_bytes = 0
        total_bytes = self._stop - self._start
        try:
            async for chunk in self._artifact.reader.chunks(self._start, self._stop):
                if gone is not None and gone.done():
                    return
                await send(
                    {
                        "type": "http.response.body",
                        "body": chunk,
                        "more_body": sent_bytes + len(chunk) < total_bytes,
                    }
                )
                sent_bytes += len(chunk)
            if not total_bytes:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._sent(sent_bytes)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
