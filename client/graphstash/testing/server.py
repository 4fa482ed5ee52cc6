"""FakeServer: the server in a thread of this process, with a layer that makes its calls fail.

The layer is an ASGI application around the server's. It records each call and passes it on, unless
a failure applies. The fast path is off, because it would answer requests before the layer.
"""

import asyncio
import socket
import sqlite3
import tempfile
import threading
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, get_args

import uvicorn
from sqlalchemy import func, select
from starlette.types import Message, Receive, Scope, Send

from graphstash.testing.failures import Call, Failure, Fault, ServerCall, StoredArtifact
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

if TYPE_CHECKING:
    from graphstash import ClientConfig

__all__ = ["FakeServer"]

_MAX_CALLS: Final = 100_000

_SECONDS: Final = 60.0
"""Timeout of a start, of a stop and of a coroutine in the server's thread."""


class FakeServer:
    """A graphstash server for tests, on a free loopback port. Thread-safe.

    Use it as a context manager, or call `start` and `close`. Its data is in a temporary directory.

    It is the real server with default settings, behind a layer that records calls and can make them
    fail. It never evicts.

    Args:
        token: bearer token that clients must present. None requires no token.
        max_bytes: limit for all artifacts together. Beyond it, the server refuses uploads with 507.

    Attributes:
        url: `GRAPHSTASH_URL` for the code under test.
    """

    def __init__(self, *, token: str | None = None, max_bytes: int = 256 * 1024**2) -> None:
        self._token = token
        self._bearer = None if token is None else f"Bearer {token}".encode()
        self._max_bytes = max_bytes
        self._folder = tempfile.TemporaryDirectory(prefix="graphstash-")
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble: BaseException | None = None
        self._is_closing = False
        self._running: set[asyncio.Task[Any]] = set()
        self._calls: deque[Call] = deque(maxlen=_MAX_CALLS)
        self._failures: deque[Failure] = deque()
        self._reports: dict[str, RunReport] = {}
        self._artifacts: tuple[StoredArtifact, ...] = ()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start serving in the background. Entering the context manager does the same.

        Raises:
            RuntimeError: the server was closed, or does not start.
        """
        if self._is_closing:
            raise RuntimeError("this server was closed: make a new one")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)
            self._thread.start()
            if not self._ready.wait(_SECONDS):
                raise RuntimeError(f"the server did not start within {_SECONDS:g} s")
            if self._trouble is not None:
                raise RuntimeError("the server did not start") from self._trouble
        return self

    def close(self) -> None:
        """Close every connection and end every thread. Further calls cannot connect.

        Recorded calls and stored artifacts stay readable. Closing twice does nothing.
        """
        if self._thread is not None and self._thread.is_alive():
            self._artifacts = self.artifacts
            self._is_closing = True
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(_SECONDS)
        self._is_closing = True
        self._listener.close()
        self._folder.cleanup()

    def config(self, *, cache_dir: Path, **settings: Any) -> "ClientConfig":
        """Return client settings for this server, independent of the environment.

        Args:
            cache_dir: the client's local tier. Give each simulated host its own directory: a client
                does not fetch artifacts that are on disk already.
            settings: further fields of `ClientConfig`.
        """
        from graphstash import ClientConfig

        ours = {"url": self.url, "token": self._token, "cache_dir": cache_dir}
        return ClientConfig.load({}, **(ours | settings))

    def environment(self, *, cache_dir: Path) -> dict[str, str]:
        """Return environment variables that make a subprocess use this server, as in `config`."""
        variables = {"GRAPHSTASH_URL": self.url, "GRAPHSTASH_CACHE_DIR": str(cache_dir)}
        return variables | ({"GRAPHSTASH_TOKEN": self._token} if self._token else {})

    def fail_on(
        self,
        *operations: ServerCall,
        fault: Fault | None = None,
        status: int = 500,
        times: int | None = None,
        namespace: str | None = None,
        kind: str | None = None,
        key: ArtifactKey | None = None,
    ) -> Failure:
        """Make matching calls fail from now on.

        If several failures match a call, the earliest applies until it has failed `times` calls. A
        call that fails with a status or a `reset` changes nothing on the server.

            server.fail_on("get", times=2)                      two downloads get a 500
            server.fail_on(status=503)                          the server is overloaded
            server.fail_on("get", fault="flip", kind="triton")  Triton's kernels arrive damaged
            with server.fail_on("put", fault="hang") as failure:
                start_job()
                failure.wait()                                  an upload hangs now

        Args:
            operations: calls that fail. None given means every call.
            fault: kind of failure. None means an error response with `status`.
            status: HTTP status from 400 to 599, used without `fault`. 429 and 503 carry
                `Retry-After: 1`.
            times: number of calls that fail. None means all until the failure is removed.
            namespace: only calls in this namespace fail.
            kind: only calls on one artifact of this kind fail.
            key: only calls on the artifact with this key fail.

        Returns:
            The failure, which counts its calls and can be waited for and removed.

        Raises:
            ValueError: unknown operation or fault, or a status or number of times out of range.
        """
        if unknown := set(operations) - set(get_args(ServerCall)):
            raise ValueError(f"unknown operation {unknown}: use {', '.join(get_args(ServerCall))}")
        if fault is not None and fault not in get_args(Fault):
            raise ValueError(f"unknown fault {fault!r}: use {', '.join(get_args(Fault))}")
        if not 400 <= status <= 599:
            raise ValueError(f"status must be from 400 to 599 (got {status})")
        if times is not None and times < 1:
            raise ValueError(f"times must be at least 1 (got {times})")
        failure = Failure(
            operations=frozenset(operations),
            fault=fault,
            status=status,
            times=times,
            namespace=namespace,
            kind=kind,
            key=key,
        )
        self._failures.append(failure)
        return failure

    def recover(self) -> None:
        """End all failures. The server now answers hanging calls."""
        while self._failures:
            self._failures.popleft().remove()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The last 100,000 calls, oldest first."""
        return tuple(self._calls)

    def count(
        self,
        operation: ServerCall | None = None,
        *,
        namespace: str | None = None,
        key: ArtifactKey | None = None,
    ) -> int:
        """Return how many of `calls` match the arguments, including failed calls."""
        return sum(
            operation in (None, call.operation)
            and namespace in (None, call.namespace)
            and key in (None, call.key)
            for call in self.calls
        )

    @property
    def artifacts(self) -> tuple[StoredArtifact, ...]:
        """All stored artifacts, oldest first, including withheld artifacts."""
        return self._artifacts if self._is_closing else self._ask(self._read_artifacts())

    @property
    def reports(self) -> tuple[RunReport, ...]:
        """The newest report of each process, oldest first."""
        return tuple(self._reports.values())

    def clear(self) -> None:
        """Remove all artifacts, leases, manifests, reports, calls and failures. Keep serving."""
        self.recover()
        self._ask(self._replace())
        self._calls.clear()

    def _recorded(self, call: Call) -> Failure | None:
        """Record a call, and return the failure that applies to it."""
        failures = tuple(self._failures)
        failure = next((each for each in failures if each.applies_to(call)), None)
        self._calls.append(replace(call, failure=failure))
        return failure

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
        app, opened, running = self._app, self._opened, self._running
        self._running, self._reports = set(), {}
        await self._open()
        app.stop_waiting()
        if running:
            await asyncio.wait(running)
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
        running = self._running
        running.add(task)
        try:
            transport = scope["state"].pop("transport")
            await self._pass_or_fail(Exchange(self._app, scope, receive, send, transport))
        finally:
            running.discard(task)

    async def _pass_or_fail(self, exchange: Exchange) -> None:
        call = await exchange.call()
        failure = None if call is None else self._recorded(call)
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
