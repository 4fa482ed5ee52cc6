"""Conversations: for every input, the server sends only complete responses and no 5xx."""

import asyncio
import re
import tempfile
from pathlib import Path

import uvicorn
from harness import instrumented, main
from uvicorn.server import ServerState

with instrumented():
    from graphstash_schema import Problem
    from graphstash_server.api.connection import connections
    from graphstash_server.app import create_app
    from graphstash_server.settings import Settings
    from graphstash_server.testing import MemoryBlobStore

_FOLDER = Path(tempfile.mkdtemp(prefix="graphstash-fuzz-"))
_PATH = "/v1/team/artifacts/jax/cpu-x86_64-0123456789abcdef/" + "0" * 64
_HOST = "Host: a\r\n"
SEEDS = tuple(
    request.encode()
    for request in (
        f"GET {_PATH} HTTP/1.1\r\n{_HOST}Range: bytes=0-1\r\n\r\n",
        f"HEAD {_PATH} HTTP/1.1\r\n{_HOST}If-None-Match: *\r\n\r\n",
        f"PUT {_PATH} HTTP/1.1\r\n{_HOST}Content-Length: 1\r\nRepr-Digest: sha-256=:AA==:\r\n\r\nx",
        f"DELETE {_PATH} HTTP/1.0\r\n\r\n",
        (
            f"POST {_PATH.replace('artifacts', 'leases')} HTTP/1.1\r\n{_HOST}Prefer: wait=0\r\n"
            "Content-Length: 2\r\n\r\n{}"
        ),
        (
            f"POST /v1/team/artifacts:lookup HTTP/1.1\r\n{_HOST}Transfer-Encoding: chunked\r\n\r\n"
            "2\r\n{}\r\n0\r\n\r\n"
        ),
        f"GET /v1/team/manifests/m%2e HTTP/1.1\r\n{_HOST}\r\nGET / HTTP/1.1\r\n{_HOST}\r\n",
        f"GET /v1/-/access HTTP/1.1\r\n{_HOST}Authorization: Bearer x\r\nX-Request-Id: a\r\n\r\n",
        f"GET //%00/..;/x?a=b#c HTTP/1.1\r\n{_HOST}Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    )
)
_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")


class _Wire(asyncio.Transport):
    """In-memory transport that records the bytes that a connection writes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self._is_closing = False

    def write(self, data: bytes) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class _Server:
    """The application and its connections without sockets, shared by the whole run."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        settings = Settings(data_dir=_FOLDER, min_free_bytes=0, upload_idle_seconds=0.01)
        self.store = MemoryBlobStore()
        app = create_app(settings, blob_store=self.store)
        limits = settings.model_copy(update={"header_seconds": 3600, "max_connections": 10})
        self._config = uvicorn.Config(
            app,
            http=connections(limits, count_refusal=app.count_refusal),
            ws="none",
            log_config=None,
            lifespan="off",
        )
        self._config.load()
        self._open = app.router.lifespan_context(app)
        self.loop.run_until_complete(self._open.__aenter__())

    def ask(self, data: bytes) -> bytes:
        return self.loop.run_until_complete(self._ask(data))

    async def _ask(self, data: bytes) -> bytes:
        state, wire = ServerState(), _Wire()
        connection = self._config.http_protocol_class(
            config=self._config, server_state=state, app_state={}, _loop=self.loop
        )
        connection.connection_made(wire)
        for start in range(0, len(data), 100):  # in pieces, as from a network
            connection.data_received(data[start : start + 100])
        while state.tasks:
            await asyncio.wait(state.tasks, timeout=5)
        connection.connection_lost(None)
        return bytes(wire.written)


_SERVER: list[_Server] = []


def check(data: bytes) -> None:
    if not _SERVER:
        _SERVER.append(_Server())
    written = _SERVER[0].ask(data)
    _check_answers(written)


def _check_answers(written: bytes) -> None:
    while written:
        line = _STATUS_LINE.match(written)
        assert line is not None, f"no status line: {written[:200]!r}"
        status = int(line.group(1))
        if status == 100:
            written = written[line.end() + 2 :]
            continue
        assert 200 <= status < 500, written[:2000]
        head, end, rest = written.partition(b"\r\n\r\n")
        assert end, "the head is cut"
        headers = dict(each.lower().split(b": ", 1) for each in head.split(b"\r\n")[1:])
        assert headers[b"x-content-type-options"] == b"nosniff"
        assert b"\n" not in head.replace(b"\r\n", b"")
        if status >= 400 and rest:
            size_bytes = int(headers[b"content-length"])
            if not rest.startswith(b"HTTP/"):  # responses to HEAD have no body
                problem = Problem.model_validate_json(rest[:size_bytes])
                assert problem.status == status
                rest = rest[size_bytes:]
            written = rest
        else:
            written = _after_success(status, headers, rest)


def _after_success(status: int, headers: dict[bytes, bytes], rest: bytes) -> bytes:
    if status in {204, 304} or rest.startswith(b"HTTP/1.1 "):
        return rest
    return rest[int(headers.get(b"content-length", b"0")) :]


if __name__ == "__main__":
    main(check, seeds=SEEDS)
