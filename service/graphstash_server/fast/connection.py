"""FastConnection: offer each request to the fast path first, and write its responses."""

import asyncio
import logging
import os
import socket
from asyncio import Event, Future
from functools import lru_cache
from typing import ClassVar, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from graphstash_server.api.connection import MAX_PIPELINED, Connection
from graphstash_server.api.frame import header_lines, internal_failure, shutting_down
from graphstash_server.api.problems import logged_id
from graphstash_server.fast.answers import Answer, FastPath, FastRequest
from graphstash_server.storage import BlobReader, FileReader

__all__ = ["FastConnection"]

_LOGGER = logging.getLogger(__name__)


class _Cycle:
    """Replaces uvicorn's `RequestResponseCycle` for a fast request, which has no body."""

    def __init__(self, *, keep_alive: bool, is_complete: bool = False) -> None:
        self.keep_alive = keep_alive
        self.response_complete = is_complete
        self.disconnected = False
        self.more_body = False
        self.sent_bytes = 0  # of a body sent from a reader
        self.message_event = Event()


_ANSWERED: Final = _Cycle(keep_alive=True, is_complete=True)
"""The cycle of every request that was answered immediately."""


class FastConnection(Connection):
    """A connection that offers requests to the fast path before the parser.

    The fast path takes only complete heads of requests without a body, once all earlier requests
    have their responses. The parser gets the rest. So responses keep the order of the requests.
    """

    fast: ClassVar[FastPath]

    _current: _Cycle | None = None  # not `cycle`, which may belong to a later request
    _writable: Future[None] | None = None
    _idle_since = 0.0
    _idle_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Handle requests on the fast path, and leave the rest to the parser."""
        if not (self._is_deaf or self._is_in_head or self._is_in_body or self in self.waiting):
            data = self._left_of(data)
        if data:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the response in progress."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._current is not None:
            self._current.disconnected = True
        super().connection_lost(exc)
        self._resume()

    def _left_of(self, data: bytes) -> bytes:
        """Handle requests from the beginning of `data`, and return the remaining bytes."""
        begin = 0
        for _ in range(MAX_PIPELINED):
            if (end := data.find(b"\r\n\r\n", begin) + 4) < 4:
                break
            if self.transport.is_closing():  # after an earlier response in `data`
                return b""
            if not self._is_answered_fast(data[begin:end]):
                break
            begin = end
        return data[begin:]

    def _is_answered_fast(self, head: bytes) -> bool:
        """Start a response, or return False if the application has to handle the request."""
        if self.is_answering or self.flow.write_paused:
            return False
        scheme = self.scheme or "http"
        try:
            request = self.fast.read(head, scheme=scheme, is_owner=self.is_owners)
            if request is None:
                return False
            answer = self.fast.answer_now(request)
        except Exception:
            _LOGGER.exception("the fast path failed, the application answers")
            return False
        self._unset_head_timer()
        self._unset_keepalive_if_required()
        self.idle.pop(self, None)
        if answer is not None and answer.reader is None:
            self.cycle = _ANSWERED  # type: ignore[assignment] # uvicorn reads no other attributes
            self.server_state.total_requests += 1
            if self._write_whole(request, answer, keep_alive=request.keep_alive):
                self._wait_for_more()
        else:
            cycle = self._current = _Cycle(keep_alive=request.keep_alive)
            self.cycle = cycle  # type: ignore[assignment] # as above
            task = self.loop.create_task(self._answer(cycle, request, answer))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
        return True

    def _write_whole(self, request: FastRequest, answer: Answer, *, keep_alive: bool) -> bool:
        """Write a complete response, and return whether the connection stays open."""
        head, keep_alive = self._head(request, answer, keep_alive=keep_alive)
        self.transport.write(head + answer.body)
        if not keep_alive:
            self.transport.close()
        return keep_alive

    def _wait_for_more(self) -> None:
        """Close the connection if no request arrives for a while. One timer serves many requests:
        reading the clock costs less than starting a timer.
        """
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._end_if_idle)
        self._rest()

    def _end_if_idle(self) -> None:
        self._idle_timer = None
        if self.is_answering or self._is_in_head or self.timeout_keep_alive_task is not None:
            return  # not idle, or uvicorn's own timer is running
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._idle_timer = self.loop.call_later(left, self._end_if_idle)
        else:
            self.timeout_keep_alive_handler()

    def _head(
        self, request: FastRequest, answer: Answer, *, keep_alive: bool
    ) -> tuple[bytes, bool]:
        """Return the head of a response, and whether the connection stays open after it."""
        if self.access_log:
            self.access_logger.info(
                '%s - "%s %s HTTP/%s" %d',
                "%s:%d" % self.client if self.client else "",  # noqa: UP031 - as uvicorn writes it
                request.method,
                request.path,
                "1.1",
                answer.status,
                extra={"state": request.state},
            )
        self.fast.count_answer(request, answer.status)
        default, is_ending = _default_lines(tuple(self.server_state.default_headers))
        keep_alive = keep_alive and not is_ending
        closing = b"" if keep_alive or is_ending else b"connection: close\r\n"
        parts = (STATUS_LINE[answer.status], default, answer.headers, closing, b"\r\n")
        return b"".join(parts), keep_alive

    async def _answer(self, cycle: _Cycle, request: FastRequest, answer: Answer | None) -> None:
        """Send a response that requires waiting."""
        try:
            if answer is None:
                answer = await self._answer_or_failure(cycle, request)
            start, stop = answer.span
            try:
                if cycle.disconnected:
                    pass
                elif answer.reader is not None and start < stop:
                    await self._send(cycle, request, answer, answer.reader)
                else:
                    cycle.response_complete = True
                    self._write_whole(request, answer, keep_alive=cycle.keep_alive)
                    self.on_response_complete()
            finally:
                if answer.reader is not None:
                    await answer.reader.close()
        except Exception:
            # Cut the connection, so that the sent part does not look complete.
            _LOGGER.exception("%s %s failed (%s)", *_names(request), extra={"state": request.state})
            self.transport.close()

    async def _answer_or_failure(self, cycle: _Cycle, request: FastRequest) -> Answer:
        try:
            return await self.fast.answer(request)
        except asyncio.CancelledError:
            if not cycle.disconnected:  # the server shuts down and does not wait any longer
                cycle.response_complete = True
                ending = self.fast.fail(request, shutting_down())
                self._write_whole(request, ending, keep_alive=False)
                self.on_response_complete()
            raise
        except Exception:
            _LOGGER.exception("%s %s failed (%s)", *_names(request), extra={"state": request.state})
            return self.fast.fail(request, internal_failure(request.request_id.decode()))

    async def _send(
        self, cycle: _Cycle, request: FastRequest, answer: Answer, reader: BlobReader
    ) -> None:
        """Send a response with a blob as its body, in constant memory."""
        head, keep_alive = self._head(request, answer, keep_alive=cycle.keep_alive)
        start, stop = answer.span
        is_direct = self.scheme != "https" and not self.transport.get_write_buffer_size()
        try:
            if isinstance(reader, FileReader) and is_direct:
                await self._send_file(cycle, head, reader, start, stop)
            else:
                await self._send_chunks(cycle, head, reader, start, stop)
        finally:
            self.fast.count_sent(request, cycle.sent_bytes)
        if not cycle.disconnected:
            cycle.response_complete = True
            if not (keep_alive and cycle.keep_alive):
                self.transport.close()
            self.on_response_complete()

    async def _send_chunks(
        self, cycle: _Cycle, head: bytes, reader: BlobReader, start: int, stop: int
    ) -> None:
        self.transport.write(head)
        async for chunk in reader.chunks(start, stop):
            if self.flow.write_paused:
                await self.flow.drain()
            if cycle.disconnected:
                return
            self.transport.write(chunk)
            cycle.sent_bytes += len(chunk)

    async def _send_file(
        self, cycle: _Cycle, head: bytes, file: FileReader, start: int, stop: int
    ) -> None:
        """Send a part of a file directly to the socket. The transport's write buffer must be empty.

        A duplicate descriptor stays valid if the transport closes, and the event loop allows to
        watch it, unlike the transport's own.
        """
        own: socket.socket = self.transport.get_extra_info("socket")
        fd = os.dup(own.fileno())
        # Without family, type and protocol, Python would ask the kernel for each of them.
        with socket.socket(own.family, own.type, own.proto, fileno=fd) as out:
            try:
                while head and not cycle.disconnected:
                    try:
                        head = head[out.send(head, socket.MSG_MORE) :]
                    except BlockingIOError:
                        await self._until_writable(cycle, out)
                while (position := start + cycle.sent_bytes) < stop and not cycle.disconnected:
                    try:
                        cycle.sent_bytes += await file.send(fd, position, stop)
                    except BlockingIOError:
                        await self._until_writable(cycle, out)
            except (ConnectionError, TimeoutError):  # the caller closed the connection
                self.transport.abort()
                cycle.disconnected = True

    async def _until_writable(self, cycle: _Cycle, out: socket.socket) -> None:
        """Wait until the socket is writable, or until the caller disconnects or stalls too long."""
        if cycle.disconnected:  # while a thread was sending, so no `_resume` would follow
            return
        self._writable = self.loop.create_future()
        self.pause_writing()
        self.loop.add_writer(out, self._resume)
        try:
            await self._writable
        finally:
            self.loop.remove_writer(out)
            self.resume_writing()

    def _resume(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)


@lru_cache(8)
def _default_lines(headers: tuple[tuple[bytes, bytes], ...]) -> tuple[bytes, bool]:
    """Return the lines that uvicorn adds to every response, and whether the server is stopping."""
    is_ending = any(name == b"connection" for name, _ in headers)
    return header_lines(headers), is_ending


def _names(request: FastRequest) -> tuple[str, str, str]:
    return request.method, request.path, logged_id(request.state)
