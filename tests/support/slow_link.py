"""A TCP proxy in front of a real server that delays every byte and loses none.

Bandwidth is unlimited: bytes that are sent together arrive together, after the delay. A connection
takes a round trip before its first byte, as a handshake does.
"""

import asyncio
import re
import threading
from typing import Self

_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1.1\r\n")


class SlowLink:
    """A proxy with one thread; a context manager.

    Attributes:
        requests: method and path of each request, in order.
        most_at_once: maximum number of concurrent requests.
        round_trip_seconds: delay from now on.

    Args:
        upstream_port: port of the server.
        round_trip_seconds: delay to the server and back.
        port: port of this end of the link, such as a reserved one. Default: any free port.
    """

    def __init__(
        self, upstream_port: int, *, round_trip_seconds: float = 0.05, port: int = 0
    ) -> None:
        self.requests: list[str] = []
        self.most_at_once = 0
        self._gather = 0
        self._held_method = b""
        self._gathered = asyncio.Event()
        self._busy: set[object] = set()
        self._upstream_port = upstream_port
        self.round_trip_seconds = round_trip_seconds
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def gather(self, count: int, *, method: str = "") -> None:
        """Hold back requests for artifacts until `count` requests have arrived.

        Args:
            method: method of the requests to hold back, such as `PUT`. Default: any.
        """
        self._gather = count
        self._held_method = method.encode()
        self._gathered = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.round_trip_seconds)
        there, back = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        connection = object()
        try:
            await asyncio.gather(
                self._pump(reader, back, connection, is_request=True),
                self._pump(there, writer, connection, is_request=False),
            )
        finally:
            self._busy.discard(connection)
            writer.close()
            back.close()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        connection: object,
        *,
        is_request: bool,
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, chunk = await queue.get()
                await asyncio.sleep(due - self._loop.time())
                if not is_request:
                    self._busy.discard(connection)
                if not chunk:
                    target.close()
                    return
                target.write(chunk)
                await target.drain()

        sending = asyncio.create_task(send())
        try:
            while True:
                chunk = await source.read(1 << 20)
                if is_request:
                    await self._note(connection, chunk)
                queue.put_nowait((self._loop.time() + self.round_trip_seconds / 2, chunk))
                if not chunk:
                    break
            await sending
        except OSError:
            sending.cancel()

    async def _note(self, connection: object, chunk: bytes) -> None:
        found = _REQUEST.findall(chunk)
        for method, path in found:
            self.requests.append(f"{method.decode()} {path.decode()}")
            self._busy.add(connection)
        self.most_at_once = max(self.most_at_once, len(self._busy))
        if len(self._busy) >= self._gather:
            self._gathered.set()
        if any(
            b"/artifacts/" in path and self._held_method in (b"", method) for method, path in found
        ):
            await self._gathered.wait()
