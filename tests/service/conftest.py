"""Promise: the service keeps its protocol: answers, counters, leases, eviction and access. It keeps
the protocol on real databases, blob stores and proxies, and after crashes.

Most tests share one live server and use their own namespace.
"""

import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from graphstash_schema import Digest
from graphstash_server.testing import LiveServer, ServerProcess, migrated_database
from support.api import Api, assert_problem
from support.commands import invoke
from support.dashboard import Team
from support.moto import Moto
from support.nginx import Nginx, in_front_of
from support.postgres import Postgres
from support.s3_proxy import S3Proxy
from support.services import opener
from support.sessions import HTML, sign_in
from support.tokens import Guarded
from support.waiting import until


def files_of(data_dir: Path) -> list[Path]:
    """Return all blobs and temporary files."""
    return sorted(path for path in (data_dir / "blobs").rglob("*") if path.is_file())


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run asynchronous tests on asyncio, like the server."""
    return "asyncio"


@pytest.fixture(scope="session")
def live_server(start_once: Callable[..., Any]) -> LiveServer:
    """One server on each database, with the same tests for both."""
    return start_once(
        LiveServer,
        max_artifact_bytes=400 * 1024**2,
        upload_idle_seconds=3.0,  # longer than garbage collection pauses this process
        flush_seconds=0.05,
        log_level="error",
    )


@pytest.fixture(scope="session")
def guarded(start_once: Callable[..., Any]) -> Guarded:
    """A server that requires tokens, on each database. Use your own `namespace`."""
    return start_once(Guarded)


@pytest.fixture
def team(guarded: Guarded, namespace: str) -> Iterator[Team]:
    """A team in a namespace of the test, whose work the dashboard of `guarded` shows."""
    with closing(Team(guarded.url, namespace, guarded.admin)) as team:
        yield team


@pytest.fixture
def browse(guarded: Guarded) -> Iterator[Callable[..., httpx.Client]]:
    """Return a client of the pages of `guarded`, signed in if grants are given."""
    with ExitStack() as stack:

        def make(*grants: str) -> httpx.Client:
            if not grants:
                anonymous = httpx.Client(base_url=guarded.url, headers=HTML, timeout=60)
                return stack.enter_context(closing(anonymous))
            return stack.enter_context(closing(sign_in(guarded.url, guarded.token(*grants))))

        yield make


@pytest.fixture(autouse=True)
def _nothing_stays_public(request: pytest.FixtureRequest) -> Iterator[None]:
    shared = request.getfixturevalue("guarded") if "guarded" in request.fixturenames else None
    yield
    if isinstance(shared, Guarded):
        shared.end_public()


@pytest.fixture
def api(live_server: LiveServer, new_namespace: Callable[[], str]) -> Iterator[Api]:
    """A namespace that no other test uses, on the shared server."""
    api = Api(live_server.url, new_namespace())
    yield api
    api.close()


@pytest.fixture(scope="module")
def nginx(live_server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with in_front_of(live_server, tmp_path_factory.mktemp("nginx")) as nginx:
        yield nginx


@pytest.fixture
def through(nginx: Nginx, api: Api, connect: Callable[..., Api]) -> Api:
    """The namespace of `api`, through nginx."""
    return connect(nginx.url, api.namespace)


@pytest.fixture
def files(live_server: LiveServer) -> Callable[[], list[Path]]:
    """Return the files of the shared server, once it has removed earlier temporary files."""
    temporary = live_server.data_dir / "blobs" / "tmp"
    until(lambda: not any(temporary.iterdir()))
    return lambda: files_of(live_server.data_dir)


@pytest.fixture
def file_of(files: Callable[[], list[Path]]) -> Callable[[bytes], Path]:
    """Return the path of a blob."""
    return lambda blob: next(path for path in files() if path.name == Digest.of(blob).sha256)


@pytest.fixture
def stored_files() -> Callable[[Path], list[Path]]:
    return files_of


@pytest.fixture
def problem() -> Callable[..., dict[str, Any]]:
    return assert_problem


@pytest.fixture
def connect() -> Iterator[Callable[..., Api]]:
    """Return an `Api` for any server, and close it after the test."""
    with ExitStack() as stack:
        yield lambda *where: stack.enter_context(closing(Api(*where)))


@pytest.fixture(scope="session")
def process_environment() -> dict[str, str]:
    """Environment variables of every server process."""
    return {"GRAPHSTASH_MIN_FREE_BYTES": "0"}


@pytest.fixture
def start(
    tmp_path: Path, process_environment: dict[str, str]
) -> Iterator[Callable[..., ServerProcess]]:
    """Start server processes on one data directory, and kill the running ones after the test."""
    started: list[ServerProcess] = []

    def make(*options: str, **keywords: Any) -> ServerProcess:
        keywords["environment"] = process_environment | keywords.get("environment", {})
        started.append(ServerProcess(tmp_path / "data", *options, **keywords))
        return started[-1]

    yield make
    for server in started:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture
def command_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Callable[..., str]]]:
    """Return a function that runs a command beside a server and returns its output."""
    monkeypatch.setenv("GRAPHSTASH_DATA_DIR", str(tmp_path / "data"))
    with LiveServer(tmp_path / "data", log_level="error") as server:

        def make(command: Any) -> Callable[..., str]:
            run = partial(invoke, command)
            run.url = server.url  # type: ignore[attr-defined] # for tests
            return run

        yield make


@pytest.fixture
def writers() -> Callable[..., AbstractContextManager[dict[int, bytes]]]:
    """Return a context whose threads upload until its end. It collects the acknowledged blobs."""

    @contextmanager
    def writing(apis: list[Api]) -> Iterator[dict[int, bytes]]:
        acknowledged: dict[int, bytes] = {}
        is_over = threading.Event()

        def write(writer: int) -> None:
            for number in itertools.count(writer, len(apis)):
                blob = f"{number} ".encode() * 5000
                try:
                    if apis[writer].put(blob, number).status_code == 201:
                        acknowledged[number] = blob
                except httpx.TransportError:
                    is_over.wait(0.05)  # its server is down
                if is_over.is_set():
                    return

        with ThreadPoolExecutor(len(apis)) as pool:
            written = [pool.submit(write, writer) for writer in range(len(apis))]
            try:
                yield acknowledged
            finally:
                is_over.set()
        for each in written:
            each.result()

    return writing


@pytest.fixture
def most_at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[], int]]:
    """Return a counter of the most calls of a module's coroutine that ran at the same time."""

    def counting(module: Any, name: str) -> Callable[[], int]:
        call, running, most = getattr(module, name), 0, 0

        async def counted(*given: Any, **named: Any) -> Any:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await call(*given, **named)
            finally:
                running -= 1

        monkeypatch.setattr(module, name, counted)
        return lambda: most

    return counting


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a migrated database of each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").new_database())
    path = tmp_path / "graphstash.sqlite3"
    shutil.copy(migrated_database(), path)
    return f"sqlite+aiosqlite:///{path}"


@pytest.fixture
def on_postgresql(postgres: Postgres) -> str:
    """URL of a migrated PostgreSQL database."""
    return postgres.new_database()


@pytest.fixture
def proxy(moto: Moto) -> Iterator[S3Proxy]:
    """A proxy in front of moto that fails on demand."""
    with S3Proxy(moto.port) as proxy:
        yield proxy


@pytest.fixture
def opened(database_url: str, tmp_path: Path) -> Any:
    """Open servers without HTTP; see `support.services.opener`."""
    return opener(tmp_path, database_url)
