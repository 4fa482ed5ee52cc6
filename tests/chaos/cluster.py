"""A whole deployment as processes: PostgreSQL, S3 behind a proxy or one directory, two servers."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import httpx

from chaos.proxy import ChaosProxy
from graphstash_server.testing import ServerProcess
from support.moto import CREDENTIALS, AnyS3, Moto, s3_client
from support.postgres import EMPTY, Postgres
from support.swift import Swift

KEEP = "keep"
TIGHT = "tight"
TIGHT_BYTES = 4_000_000
TIER_BYTES = 6_000_000

_SERVE = (sys.executable, "-m", "graphstash", "serve")
_READY_SECONDS = 60
_START_ATTEMPTS = 50


class Command:
    """`graphstash <arguments>` on the deployment, beside the servers."""

    def __init__(self, arguments, *, environment):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graphstash", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._timer = None

    def kill_after(self, seconds):
        self._timer = threading.Timer(seconds, self._process.kill)
        self._timer.start()

    @property
    def is_over(self):
        return self._process.poll() is not None

    def wait(self):
        """Return the exit code, and everything that the command has printed."""
        said, _ = self._process.communicate(timeout=300)
        if self._timer is not None:
            self._timer.cancel()
        return self._process.returncode, said


class _RunningS3(AnyS3):
    """A context manager; the buckets that it made stay there.

    Args:
        url: `http://<access key>:<secret key>@<host>:<port>`.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not (parts.hostname and parts.port and parts.password):
            raise ValueError(f"{url!r} is not of the form http://ACCESS_KEY:SECRET_KEY@HOST:PORT")
        self.url = f"http://{parts.hostname}:{parts.port}"
        self.access_key, self.secret_key = parts.username or "", parts.password

    def __enter__(self) -> Self:
        self.client = s3_client(self.url, access_key=self.access_key, secret_key=self.secret_key)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


def _open_s3(which: str, directory: Path) -> AbstractContextManager[AnyS3]:
    """Return the S3 server that `which` names. Swift keeps its files in `directory`."""
    if which == "moto":
        return Moto()
    if which == "swift":
        directory.mkdir()
        return Swift(directory)
    return _RunningS3(which)


class Cluster:
    """A context manager.

    Args:
        directory: of the servers.
        s3: `moto`, `swift`, the URL of one that runs already, or None for blobs on disk.

    Attributes:
        s3: None where the blobs are on disk.
        bucket: there.
        proxy: in front of it.
        postgres: of all servers.
        servers: two, each with two workers.
        data_dirs: of the servers, one for both where the blobs are on disk.
    """

    def __init__(self, directory: Path, *, s3: str | None) -> None:
        self._directory = directory
        self._s3_name = s3
        self._starting = self._down = None
        self._starters = ThreadPoolExecutor(1)
        self._stack = ExitStack()
        self.s3 = self.bucket = self.proxy = None

    def __enter__(self):
        self.postgres = Postgres()
        self._stack.callback(self.postgres.close)
        self._environment = {
            "GRAPHSTASH_DATABASE_URL": self.postgres.new_database(template=EMPTY),
            "GRAPHSTASH_NAMESPACE_LIMITS": json.dumps({TIGHT: TIGHT_BYTES}),
            "GRAPHSTASH_MAINTENANCE_SECONDS": "1",
            "GRAPHSTASH_MIN_FREE_BYTES": "0",
            "GRAPHSTASH_SHUTDOWN_SECONDS": "3",
            "GRAPHSTASH_FLUSH_SECONDS": "0.2",
            "GRAPHSTASH_LOG_LEVEL": "warning",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        self.data_dirs = [self._directory / "data"]
        if self._s3_name is not None:
            self.s3 = self._stack.enter_context(_open_s3(self._s3_name, self._directory / "s3"))
            self.bucket = self.s3.new_bucket()
            self.proxy = self._stack.enter_context(ChaosProxy(urlsplit(self.s3.url).port))
            self.data_dirs = [self._directory / f"host-{number}" for number in range(2)]
            self._environment |= CREDENTIALS | {
                "AWS_ACCESS_KEY_ID": self.s3.access_key,
                "AWS_SECRET_ACCESS_KEY": self.s3.secret_key,
                "GRAPHSTASH_BLOB_STORE": "s3",
                "GRAPHSTASH_S3_BUCKET": self.bucket,
                "GRAPHSTASH_S3_ENDPOINT_URL": self.proxy.url,
                "GRAPHSTASH_S3_ADDRESSING": "path",
                "GRAPHSTASH_TIER_LIMIT_BYTES": str(TIER_BYTES),
            }
        self.servers = [self._start(number) for number in range(2)]
        return self

    def __exit__(self, *failure):
        if self.proxy is not None:
            self.proxy.end()
        self._starters.shutdown()  # waits for a server that starts
        for server in self.servers:
            if server.process.poll() is None:
                with suppress(ProcessLookupError):
                    server.kill(tree=True)
        self._stack.__exit__(*failure)  # `close` would hide the failure behind one of its own

    def query(self, statement):
        """Return rows of the servers' database."""
        database = self._environment["GRAPHSTASH_DATABASE_URL"].rpartition("/")[2]
        return self.postgres.execute(statement, database)

    @property
    def log(self):
        """Return the output of the servers."""
        return "".join(log.read_text(errors="replace") for log in self._logs)

    @property
    def _logs(self):
        return [path.with_name(f"{path.name}.log") for path in self.data_dirs]

    def url(self, number):
        """Return the address of a server, or of the other server while that one is down."""
        return self.servers[1 - number if number == self._down else number].url

    def has_flipped_since(self, moment):
        """Return whether the S3 proxy has flipped a bit since a time of the monotonic clock."""
        return self.proxy is not None and self.proxy.flipped_at > moment

    def restart(self, number, *, is_killed):
        """End a server, by SIGKILL with its workers or by SIGTERM. Then try to start it in the
        background until it serves: no server starts while the database or the bucket is down.
        """
        self.wait_for_starts()
        if is_killed:
            self.servers[number].kill(tree=True)
        else:
            self._stop(number)
        self._down = number
        self._starting = self._starters.submit(self._start_until_it_serves, number)

    def wait_for_starts(self):
        """Wait until every server has started. Raise AssertionError if one does not start."""
        if self._starting is not None:
            starting, self._starting = self._starting, None
            starting.result()

    def kill_worker(self, number, pick):
        """Kills one of the workers that are alive just now, if any; `pick` chooses."""
        with suppress(FileNotFoundError, ProcessLookupError):
            workers = sorted(self.servers[number].workers)
            if workers:
                self.servers[number].kill_worker(pick(workers))
                return True
        return False

    def hang_up(self, number):
        """A rolling restart."""
        self.servers[number].process.send_signal(signal.SIGHUP)

    def frozen_postgres(self) -> AbstractContextManager[None]:
        """PostgreSQL does not move: its sockets stay open and nothing answers."""
        pid = self.postgres.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return _frozen([pid, *map(int, children)])

    def frozen_server(self, number) -> AbstractContextManager[None]:
        """A server and its workers do not move, wherever they are; nothing if it is down."""
        server, pids = self.servers[number], []
        with suppress(FileNotFoundError):
            pids = [server.process.pid, *server.workers]
        return _frozen(pids)

    def cut_sessions(self):
        """Ends every session of PostgreSQL, in whatever transaction it is."""
        self.postgres.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )

    def command(self, *arguments):
        data_dir = {"GRAPHSTASH_DATA_DIR": str(self.data_dirs[0])}
        return Command(arguments, environment=os.environ | self._environment | data_dir)

    def leave_orphan(self, blob):
        """What a server leaves that is killed between the blob and its row."""
        name = hashlib.sha256(blob).hexdigest()
        path = f"blobs/sha256/{name[:2]}/{name}"
        if self.bucket:
            self.s3.client.put_object(Bucket=self.bucket, Key=path, Body=blob)
            return
        file = self.data_dirs[0] / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(blob)

    def wait_until_ready(self):
        """Every server answers its probe, again and again: all workers."""
        deadline = time.monotonic() + _READY_SECONDS
        for server in self.servers:
            successes = 0
            while successes < 10:
                with suppress(httpx.TransportError):
                    answer = httpx.get(f"{server.url}/readyz", timeout=20, trust_env=False)
                    successes = successes + 1 if answer.status_code == 200 else 0
                assert time.monotonic() < deadline, f"not ready: {self.log[-4000:]}"
                time.sleep(0.01)

    def stop(self):
        """Ends every server as a user does."""
        self.wait_for_starts()
        for number in range(2):
            self._stop(number)

    def start_again(self):
        self.servers = [self._start(number) for number in range(2)]

    def _stop(self, number):
        code = self.servers[number].stop()
        assert code == 0, f"a server that was stopped ended with {code}: {self.log[-4000:]}"

    def _start_until_it_serves(self, number):
        for _ in range(_START_ATTEMPTS):
            try:
                self.servers[number] = self._start(number)
            except RuntimeError as error:
                last = error
                continue
            self._down = None
            return
        raise AssertionError(f"server {number} did not start in {_START_ATTEMPTS} attempts: {last}")

    def _start(self, number):
        data_dir = self.data_dirs[number % len(self.data_dirs)]
        return ServerProcess(
            data_dir, "--workers", "2", command=_SERVE, environment=self._environment
        )


@contextmanager
def _frozen(pids: list[int]) -> Iterator[None]:
    stopped = [pid for pid in pids if _signal(pid, signal.SIGSTOP)]
    try:
        yield
    finally:
        for pid in stopped:
            _signal(pid, signal.SIGCONT)


def _signal(pid, number):
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
