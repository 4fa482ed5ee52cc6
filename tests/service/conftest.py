"""A live server for most tests, and what a client does with one namespace of it."""

import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from graphstash_schema import ArtifactMetadata, Digest, Namespace
from graphstash_server.db.migrate import migrate
from graphstash_server.testing import LiveServer, ServerProcess
from support.postgres import Postgres
from support.services import opener
from support.tokens import Guarded

DEVICE = "cpu-x86_64-0123456789abcdef"
NUMBERS = itertools.count()


class Api:
    """One namespace of one server, seen through HTTP."""

    def __init__(self, url: str, namespace: str = "team") -> None:
        self.url = url
        self.namespace = Namespace(namespace)
        self.http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def path(self, number: int = 0) -> str:
        return f"/v1/{self.namespace}/artifacts/jax/{DEVICE}/{self.fingerprint(number)}"

    def lease_path(self, number: int = 0) -> str:
        return f"/v1/{self.namespace}/leases/jax/{DEVICE}/{self.fingerprint(number)}"

    def key(self, number: int = 0) -> dict[str, str]:
        return {
            "kind": "jax",
            "device_type": DEVICE,
            "fingerprint": self.fingerprint(number),
        }

    @staticmethod
    def fingerprint(number: int) -> str:
        return hashlib.sha256(str(number).encode()).hexdigest()

    def put(
        self, blob: bytes, number: int = 0, *, seconds: float | None = None, **headers: str
    ) -> httpx.Response:
        sent = {"Repr-Digest": Digest.of(blob).repr_digest}
        if seconds is not None:
            metadata = ArtifactMetadata(compile_seconds=seconds, raw_size_bytes=len(blob))
            sent["Graphstash-Metadata"] = metadata.to_header()
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.put(self.path(number), content=blob, headers=sent)

    def get(self, number: int = 0, **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.get(self.path(number), headers=sent)

    def acquire(
        self, number: int = 0, *, wait: int | None = None, **request: Any
    ) -> httpx.Response:
        headers = {} if wait is None else {"Prefer": f"wait={wait}"}
        return self.http.post(self.lease_path(number), json=request, headers=headers)

    def stats(self) -> dict[str, Any]:
        """The counters of this namespace."""
        stats = self.http.get("/v1/stats").json()
        found = [each for each in stats["namespaces"] if each["namespace"] == self.namespace]
        return found[0] if found else {}

    def close(self) -> None:
        self.http.close()


def files_of(data_dir: Path) -> list[Path]:
    """Every blob and every temporary file."""
    return sorted(path for path in (data_dir / "blobs").rglob("*") if path.is_file())


def assert_problem(answer: httpx.Response, status: int, code: str, *named: str) -> dict[str, Any]:
    """Checks that an answer is a whole problem document, and that its sentence names things."""
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["code"]) == (status, code), problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["graphstash-protocol"] == "1"
    assert problem["status"] == status
    assert problem["type"] == f"urn:graphstash:error:{code}"
    assert problem["instance"] == f"urn:graphstash:request:{answer.headers['x-request-id']}"
    for name in named:
        assert name in problem["detail"]
    return problem


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL server; take a `new_database()` of your own."""
    with Postgres() as postgres:
        yield postgres


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def live_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    """One server on each database: whatever holds for one holds for the other."""
    settings = {}
    if request.param == "postgresql":
        settings["database_url"] = request.getfixturevalue("postgres").new_database()
    with LiveServer(
        tmp_path_factory.mktemp("server"),
        **settings,
        max_artifact_bytes=400 * 1024**2,
        upload_idle_seconds=1.0,
        flush_seconds=0.05,
        log_level="error",
    ) as server:
        yield server


@pytest.fixture(scope="session", params=["sqlite", "postgresql"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Guarded]:
    """A server that asks for tokens, on each database; take a `namespace` of your own."""
    settings = {}
    if request.param == "postgresql":
        settings["database_url"] = request.getfixturevalue("postgres").new_database()
    with Guarded(tmp_path_factory.mktemp("guarded"), **settings) as guarded:
        yield guarded


@pytest.fixture
def api(live_server: LiveServer) -> Iterator[Api]:
    """A namespace that no other test uses, on the shared server."""
    api = Api(live_server.url, f"test-{next(NUMBERS)}")
    yield api
    api.close()


@pytest.fixture
def files(live_server: LiveServer) -> Callable[[], list[Path]]:
    return lambda: files_of(live_server.data_dir)


@pytest.fixture
def stored_files() -> Callable[[Path], list[Path]]:
    return files_of


@pytest.fixture
def problem() -> Callable[..., dict[str, Any]]:
    return assert_problem


@pytest.fixture
def connect() -> Iterator[Callable[..., Api]]:
    """Makes an `Api` for any server, and closes it at the end."""
    made: list[Api] = []

    def make(url: str, namespace: str = "team") -> Api:
        made.append(Api(url, namespace))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture(scope="session")
def process_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compiled modules are kept between the servers of a run: each starts in half the time."""
    cache = tmp_path_factory.mktemp("pycache")
    return {"PYTHONPYCACHEPREFIX": str(cache), "PYTHONDONTWRITEBYTECODE": ""}


@pytest.fixture
def start(
    tmp_path: Path, process_environment: dict[str, str]
) -> Iterator[Callable[..., ServerProcess]]:
    """Starts server processes on one data directory, and ends those that still run."""
    started: list[ServerProcess] = []

    def make(*options: str, **keywords: Any) -> ServerProcess:
        options = ("--min-free-bytes", "0", *options)
        started.append(
            ServerProcess(tmp_path / "data", *options, environment=process_environment, **keywords)
        )
        return started[-1]

    yield make
    for server in started:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Asserts what becomes true within a few seconds: counters lag by a flush."""

    def check(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not holds():
            assert time.monotonic() < deadline, "it never became true"
            time.sleep(0.02)

    return check


@pytest.fixture(params=["sqlite", "postgresql"])
def new_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of each kind."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").new_database())
    return f"sqlite+aiosqlite:///{tmp_path / 'graphstash.sqlite3'}"


@pytest.fixture
def database_url(new_database_url: str, tmp_path: Path) -> str:
    """A database as a server has it."""
    migrate(new_database_url, lock_path=tmp_path / "lock")
    return new_database_url


@pytest.fixture
def opened(new_database_url: str, tmp_path: Path) -> Any:
    """Opens servers without HTTP; see `support.services.opener`."""
    return opener(tmp_path, new_database_url)
