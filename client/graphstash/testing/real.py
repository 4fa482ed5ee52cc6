"""RealServer: the server in a thread of this process, with a layer that makes its calls fail.

The layer is an ASGI application around the server's. It records each call and passes it on, unless
a failure applies. The fast path is off, because it would answer requests before the layer.
"""

import asyncio
import socket
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any, Final

import uvicorn
from sqlalchemy import func, select
from starlette.types import Message, Receive, Scope, Send

from graphstash.testing.failures import Call, Failure, StoredArtifact
from graphstash.testing.faults import Exchange
from graphstash_schema import ArtifactKey, ArtifactMetadata, Digest, Grant, TokenRequest
from graphstash_schema.protocol import API_PREFIX
from graphstash_schema.run import RunReport
from graphstash_server.actor import Actor
from graphstash_server.api.connection import Connection, connections
from graphstash_server.app import ServerApp, create_app
from graphstash_server.clock import system_clock
from graphstash_server.context import open_services
from graphstash_server.db.migrate import migrate
from graphstash_server.db.tables import artifacts as stored
from graphstash_server.serving.server import KEEP_ALIVE_SECONDS
from graphstash_server.settings import Settings

__all__ = ["RealServer"]

_SECONDS: Final = 60.0
"""Timeout of a start, of a stop and of a coroutine in the server's thread."""


class RealServer:
    """A server with its data in a temporary directory.

    Args:
        token: bearer token that callers must present. None requires no token.
        max_bytes: limit for all artifacts together. The layer refuses uploads that exceed it,
            because the server would evict instead.
        record: records a call, and returns the failure that applies to it.
    """

    def __init__(
        self, *, token: str | None, max_bytes: int, record: Callable[[Call], Failure | None]
    ) -> None:
        self._bearer = None if token is None else f"Bearer {token}".encode()
        self._max_bytes = max_bytes
        self._record = record
        self._folder = tempfile.TemporaryDirectory(prefix="graphstash-")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble: BaseException | None = None
        self._is_closing = False
        self._calls: set[asyncio.Task[Any]] = set()
        self._reports: dict[str, RunReport] = {}
        self._artifacts: tuple[StoredArtifact, ...] = ()

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it accepts requests.

        Raises:
            RuntimeError: the server was closed or failed to start.
        """
        if self._is_closing:
            raise RuntimeError("this server was closed: make a new one")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)
            self._thread.start()
            self._ready.wait(_SECONDS)
            if self._trouble is not None:
                raise RuntimeError("the server did not start") from self._trouble

    def close(self) -> None:
        """Stop the server and delete its data. `artifacts` and `reports` still work."""
        if self._thread is not None and self._thread.is_alive():
            self._artifacts = self.artifacts()
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(_SECONDS)
        self._is_closing = True
        self._listener.close()
        self._folder.cleanup()

    def artifacts(self) -> tuple[StoredArtifact, ...]:
        """Return every artifact, oldest first."""
        return self._artifacts if self._is_closing else self._ask(self._read_artifacts())

    def reports(self) -> tuple[RunReport, ...]:
        """Return the newest report of each process, oldest first."""
        return tuple(self._reports.values())

    def clear(self) -> None:
        """Replace the server by an empty one on the same port."""
        self._ask(self._replace())

    def _ask(self, coroutine: Any) -> Any:
        if self._thread is None:
            coroutine.close()
            return ()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_SECONDS)

    def _run(self) -> None:
        try:
            _empty_database()  # cannot run in a thread with a running event loop
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - `start` raises it
            self._trouble = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._open()
        config = uvicorn.Config(
            self._answer,
            http=connections(
                self._settings, count_refusal=self._app.count_refusal, kind=_Connection
            ),
            ws="none",
            lifespan="off",
            interface="asgi3",
            proxy_headers=False,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=self._settings.shutdown_seconds,
        )
        self._server = uvicorn.Server(config)
        self._loop.call_soon(self._ready.set)  # the kernel queues connections until then
        try:
            await self._server.serve([self._listener])
        finally:
            await self._opened.aclose()

    def _stop(self) -> None:
        self._app.stop_waiting()
        self._server.should_exit = True

    async def _open(self) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        (folder / "graphstash.sqlite3").write_bytes(_empty_database())
        self._settings = Settings(
            data_dir=folder,
            auth="none" if self._bearer is None else "tokens",
            max_artifact_bytes=self._max_bytes,
            min_free_bytes=0,
            shutdown_seconds=5,
        )
        self._app: ServerApp = create_app(self._settings)
        self._opened = AsyncExitStack()
        # Run no background tasks: they evict, and use most of the CPU time of a start.
        services = open_services(self._settings, blob_store=None, clock=system_clock)
        context = await self._opened.enter_async_context(services)
        self._app.context = self._app.state.context = context
        if self._bearer is not None:
            request = TokenRequest(description="FakeServer", grants=(Grant.parse("admin:*"),))
            issued = await self._app.context.tokens.create(request, actor=Actor("local:test"))
            self._issued = f"Bearer {issued.token}".encode()

    async def _replace(self) -> None:
        app, opened, calls = self._app, self._opened, self._calls
        self._calls, self._reports = set(), {}
        await self._open()
        app.stop_waiting()
        if calls:
            await asyncio.wait(calls)
        await opened.aclose()

    async def _read_artifacts(self) -> tuple[StoredArtifact, ...]:
        context = self._app.context
        await context.accounting.flush()
        async with context.database.reading() as connection:
            rows = (await connection.execute(select(stored).order_by(stored.c.created_at))).all()
        found = []
        for row in rows:
            digest = Digest(row.sha256, row.size_bytes)
            reader = await context.uploads.blobs.open(digest)
            if reader is None:
                continue
            header = row.metadata_header
            try:
                artifact = StoredArtifact(
                    namespace=row.namespace,
                    key=ArtifactKey.parse(row.kind, row.device_type, row.fingerprint),
                    blob=b"".join([chunk async for chunk in reader.chunks(0, digest.size_bytes)]),
                    metadata=ArtifactMetadata.from_header(header) if header else None,
                    is_withheld=row.withheld_at is not None,
                    hits=row.hits,
                )
            finally:
                await reader.close()
            found.append(artifact)
        return tuple(found)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - uvicorn runs each request in a task
        calls = self._calls
        calls.add(task)
        try:
            transport = scope["state"].pop("transport")
            await self._pass_or_fail(Exchange(self._app, scope, receive, send, transport))
        finally:
            calls.discard(task)

    async def _pass_or_fail(self, exchange: Exchange) -> None:
        call = await exchange.call()
        failure = None if call is None else self._record(call)
        if self._bearer is not None:
            exchange.replace_header(self._bearer, self._issued)
        if call is not None and call.operation in {"head", "stats"}:
            await self._app.context.accounting.flush()  # a server flushes once per second
        if call is None:
            await exchange.answer()
        elif failure is not None and failure.fault == "wrong_artifact":
            await self._exchange_artifact(exchange, call)
        elif failure is not None:
            await exchange.fail(failure, is_closing=lambda: self._is_closing)
        elif call.operation == "put" and await self._is_too_much(call):
            await exchange.body()
            detail = f"more than FakeServer's max_bytes, which are {self._max_bytes}"
            await exchange.refuse(507, detail)
        elif call.operation == "put_run":
            self._keep_report(exchange, await exchange.body())
            await exchange.answer()
        else:
            await exchange.answer()

    def _keep_report(self, exchange: Exchange, body: bytes) -> None:
        """Keep the report if the server accepts it."""
        path, send = exchange.scope["path"], exchange.send

        async def keeping(message: Message) -> None:
            if message.get("status") == 204:
                self._reports.pop(path, None)  # a repeated report becomes the newest
                self._reports[path] = RunReport.model_validate_json(body)
            await send(message)

        exchange.send = keeping

    async def _exchange_artifact(self, exchange: Exchange, call: Call) -> None:
        """Answer a `get` with another artifact of the namespace."""
        if call.operation == "get":
            others = select(stored).where(stored.c.namespace == call.namespace, ~_is_at(call))
            async with self._app.context.database.reading() as connection:
                row = (await connection.execute(others.limit(1))).first()
            if row is None:
                await exchange.refuse(500, "wrong_artifact needs a second artifact")
                return
            key = ArtifactKey.parse(row.kind, row.device_type, row.fingerprint)
            path = f"{API_PREFIX}/{call.namespace}/artifacts/{key}"
            exchange.scope.update(path=path, raw_path=path.encode())
        await exchange.answer()

    async def _is_too_much(self, call: Call) -> bool:
        length = call.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > self._max_bytes:
            return False  # the server refuses this upload with its own reason
        used = select(func.coalesce(func.sum(stored.c.size_bytes), 0)).where(~_is_at(call))
        async with self._app.context.database.reading() as connection:
            total: int = (await connection.execute(used)).scalar_one()
        return total + int(length) > self._max_bytes


class _Connection(Connection):
    """Passes its transport to the layer, which resets connections."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["transport"] = self.transport


@cache
def _empty_database() -> bytes:
    """Return a migrated SQLite database, cached because migrating is most of a start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "empty.sqlite3"
        migrate(f"sqlite+aiosqlite:///{path}", lock_path=Path(folder) / "lock")
        connection = sqlite3.connect(path)
        try:
            return connection.serialize()
        finally:
            connection.close()


def _is_at(call: Call) -> Any:
    key = call.key
    assert key is not None  # noqa: S101 - every call on an artifact has a key
    return (
        (stored.c.namespace == call.namespace)
        & (stored.c.fingerprint == key.fingerprint)
        & (stored.c.kind == key.kind)
        & (stored.c.device_type == key.device_type)
    )
