"""Promise: the service keeps its protocol: answers, counters, leases, eviction and access. It keeps
the protocol on real databases, blob stores and proxies, and after crashes.

Most tests share one live server and take a namespace of their own.
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
from graphstash_server.db.migrate import migrate
from graphstash_server.testing import LiveServer, ServerProcess
from support.api import Api, assert_problem
from support.commands import invoke
from support.dashboard import Team
from support.nginx import Nginx, in_front_of
from support.services import opener
from support.sessions import HTML, sign_in
from support.tokens import Guarded
from support.waiting import until


def files_of(data_dir: Path) -> list[Path]:
    """Every blob and every temporary file."""
    return sorted(path for path in (data_dir / "blobs").rglob("*") if path.is_file())


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Asynchronous tests run on asyncio, as the server does."""
    return "asyncio"


@pytest.fixture(scope="session")
def live_server(start_once: Callable[..., Any]) -> LiveServer:
    """One server on each database: whatever holds for one holds for the other."""
    return start_once(
        LiveServer,
        max_artifact_bytes=400 * 1024**2,
        upload_idle_seconds=3.0,  # longer than collecting garbage pauses this process
        flush_seconds=0.05,
        log_level="error",
    )


@pytest.fixture(scope="session")
def guarded(start_once: Callable[..., Any]) -> Guarded:
    """A server that asks for tokens, on each database; take a `namespace` of your own."""
    return start_once(Guarded)


@pytest.fixture
def team(guarded: Guarded, namespace: str) -> Iterator[Team]:
    """A team whose work the dashboard of `guarded` shows, in a namespace of the test."""
    with closing(Team(guarded.url, namespace, guarded.admin)) as team:
        yield team


@pytest.fixture
def browse(guarded: Guarded) -> Iterator[Callable[..., httpx.Client]]:
    """Opens the pages of `guarded`, signed in with these grants. Without grants, not signed in."""
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
    """The same namespace, through nginx."""
    return connect(nginx.url, api.namespace)


@pytest.fixture
def files(live_server: LiveServer) -> Callable[[], list[Path]]:
    """What the shared server stores, without what earlier tests broke off."""
    temporary = live_server.data_dir / "blobs" / "tmp"
    until(lambda: not any(temporary.iterdir()))
    return lambda: files_of(live_server.data_dir)


@pytest.fixture
def file_of(files: Callable[[], list[Path]]) -> Callable[[bytes], Path]:
    """Where a blob lies."""
    return lambda blob: next(path for path in files() if path.name == Digest.of(blob).sha256)


@pytest.fixture
def stored_files() -> Callable[[Path], list[Path]]:
    return files_of


@pytest.fixture
def problem() -> Callable[..., dict[str, Any]]:
    return assert_problem


@pytest.fixture
def connect() -> Iterator[Callable[..., Api]]:
    """Makes an `Api` for any server, and closes it at the end."""
    with ExitStack() as stack:
        yield lambda *where: stack.enter_context(closing(Api(*where)))


@pytest.fixture(scope="session")
def process_environment() -> dict[str, str]:
    """Variables of every server process."""
    return {"GRAPHSTASH_MIN_FREE_BYTES": "0"}


@pytest.fixture
def start(
    tmp_path: Path, process_environment: dict[str, str]
) -> Iterator[Callable[..., ServerProcess]]:
    """Starts server processes on one data directory, and ends those that still run."""
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
    """Makes a function that runs a command beside a server, and gives what it prints."""
    monkeypatch.setenv("GRAPHSTASH_DATA_DIR", str(tmp_path / "data"))
    with LiveServer(tmp_path / "data", log_level="error") as server:

        def make(command: Any) -> Callable[..., str]:
            run = partial(invoke, command)
            run.url = server.url  # type: ignore[attr-defined] # for tests
            return run

        yield make


@pytest.fixture
def writers() -> Callable[..., AbstractContextManager[dict[int, bytes]]]:
    """Threads that upload until the end; what was acknowledged, by number."""

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
                    is_over.wait(0.05)  # its server is away
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
    """Counts how many calls of a module's coroutine ran at the same time."""

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


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database as a server has it; take a copy."""
    path: Path = tmp_path_factory.mktemp("migrated") / "graphstash.sqlite3"
    migrate(f"sqlite+aiosqlite:///{path}", lock_path=path.with_name("lock"))
    return path


@pytest.fixture(scope="session")
def migrated_name(postgres: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of such a database of PostgreSQL; take a copy."""
    url: str = postgres.new_database()
    migrate(url, lock_path=tmp_path_factory.mktemp("migrated") / "lock")
    return url.rpartition("/")[2]


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database as a server has it, of each kind: a copy of one that was migrated once."""
    if request.param == "postgresql":
        template = request.getfixturevalue("migrated_name")
        return str(request.getfixturevalue("postgres").new_database(template=template))
    path = tmp_path / "graphstash.sqlite3"
    shutil.copy(request.getfixturevalue("migrated_file"), path)
    return f"sqlite+aiosqlite:///{path}"


@pytest.fixture
def opened(database_url: str, tmp_path: Path) -> Any:
    """Opens servers without HTTP; see `support.services.opener`."""
    return opener(tmp_path, database_url)
