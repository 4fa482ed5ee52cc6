"""BlobResponse: sends an artifact in constant memory, and never a wrong number of bytes.

The bytes take the shortest of three ways that is open:

    accel      the reverse proxy in front reads the file itself: the answer only names it
    pathsend   the ASGI server reads the file itself (extension `http.response.pathsend`)
    chunks     this process reads the store and sends piece by piece; always open

Whichever it is, the decision what to answer was made before.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from graphstash_server.services.artifacts import OpenArtifact

__all__ = ["HEADER_ACCEL", "BlobResponse", "accelerated_path"]

HEADER_ACCEL: Final = "Graphstash-Accel"
"""Request: the reverse proxy in front can read the blob directory. docker/nginx sets it."""

_ACCEL_PREFIX: Final = "/_blobs/"
"""Where the proxy has the blob directory; not reachable from outside (`internal`)."""

_OTHER_CONDITIONS: Final = ("if-match", "if-modified-since", "if-unmodified-since")
"""Nothing here looks at them, and nginx would."""

_MADE_BY_THE_PROXY: Final = frozenset(
    {"Content-Range", "Accept-Ranges", "Cache-Control", "Content-Disposition"}
)
"""Made of the file, or copied by nginx onto whatever it answers, be it that the file is gone."""

_WATCHED_BYTES = 8 * 1024**2
"""A longer body is given up when the caller hangs up; a shorter one is sent before that shows."""


def accelerated_path(
    request: Request, file: Path | None, *, blob_dir: Path, span: tuple[int, int] | None
) -> str | None:
    """Where the reverse proxy finds the blob; None when this process has to send it.

    The proxy applies the request's own range and conditions to the file. Where it would read them
    in another way than this server did (several ranges, one that is out of form, an If-Range that
    does not hold), the bytes are sent from here.

    The proxy's header is replaced by the proxy, so no client gets it past. A client that reaches
    this server directly and sends it gets the headers of a hit with an empty body, which does not
    fit the digest: it harms itself only. The path it sees is the digest that it sees anyway.

    Args:
        request: what was asked for.
        file: the blob's local file, where there is one.
        blob_dir: the directory that the proxy can read.
        span: the range that this server serves; None for the whole.
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
            span: first byte and end (exclusive) of the range that was asked for; None for all.
            headers: all but Content-Length.
            accelerated: where the reverse proxy finds the file, see `accelerated_path`.
            sent: told at the end how many bytes went out.
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
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            if self._accelerated is not None:
                await self._send_nothing(send)
            elif (path := self._sendable(scope)) is not None:
                await self._send_path(path, send)
            else:
                await self._send_chunks(receive, send)
        finally:
            await self._artifact.reader.close()

    async def _send_nothing(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self._sent(self._stop - self._start)

    def _sendable(self, scope: Scope) -> Path | None:
        """The file, where all of it is asked for and the ASGI server can send one."""
        reader = self._artifact.reader
        is_whole = self._stop - self._start == reader.size_bytes
        can_send = "http.response.pathsend" in scope.get("extensions", {})
        return reader.path if is_whole and can_send else None

    async def _send_path(self, path: Path, send: Send) -> None:
        await send({"type": "http.response.pathsend", "path": str(path)})
        self._sent(self._stop - self._start)

    async def _send_chunks(self, receive: Receive, send: Send) -> None:
        if self._stop - self._start <= _WATCHED_BYTES:
            await self._send_each(send, gone=None)
            return
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await self._send_each(send, gone=gone)
        finally:
            gone.cancel()

    async def _send_each(self, send: Send, *, gone: "asyncio.Task[None] | None") -> None:
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
