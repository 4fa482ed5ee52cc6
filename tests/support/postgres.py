"""A real PostgreSQL server on a loopback port of its own."""

import functools
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import asyncpg

from graphstash_server.db.migrate import migrate
from support.ports import reserved_port

EMPTY = "template1"
"""Name of a database without tables."""

_START_SECONDS = 60


class Postgres:
    """A running server; a context manager that removes all its files at the end.

    The server loses nothing if its process is killed. It does not wait for the disk, because no
    test cuts its power.

    Args:
        settings: server settings, added to `postgresql.conf`.
    """

    def __init__(self, **settings: object) -> None:
        self._numbers = itertools.count(1)
        self._bin = _directory_of_binaries()
        # pytest's directory is closed to other users, and PostgreSQL refuses to run as root.
        self._directory = Path(tempfile.mkdtemp(prefix="graphstash-postgres-"))
        self._data = self._directory / "data"
        self._user: dict[str, Any] = {"user": _other_user()} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(self._directory, self._user["user"])
        password = self._directory / "password"
        password.write_text("secret")
        password.chmod(0o644)
        self._run(
            *("initdb", "--pgdata", self._data, "--username", "graphstash", "--no-sync"),
            *("--auth", "scram-sha-256", "--pwfile", password, "--encoding", "UTF8"),
            *("--locale", "C"),
        )
        self.port = reserved_port()
        self._options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "shared_buffers": "64MB",
            "max_connections": 200,
            **settings,
        }
        self.start()

    @property
    def url(self) -> str:
        """Return the URL of the database that exists from the start."""
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        return f"postgresql+asyncpg://graphstash:secret@127.0.0.1:{self.port}/{database}"

    def new_database(self, *, template: str = "") -> str:
        """Copy a database without connections, and return the URL of the copy.

        Default: a migrated database, because a migration takes 0.6 s of CPU. `EMPTY` has no tables.
        """
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template or self._migrated}")
        return self.url_of(name)

    @functools.cached_property
    def _migrated(self) -> str:
        url = self.new_database(template=EMPTY)
        migrate(url, lock_path=self._directory / "migrate.lock")
        return url.rpartition("/")[2]

    def execute(self, statement: str, database: str = "postgres") -> list[asyncpg.Record]:
        import asyncio

        async def run() -> list[asyncpg.Record]:
            connection = await asyncpg.connect(
                host="127.0.0.1",
                port=self.port,
                user="graphstash",
                password="secret",
                database=database,
            )
            try:
                return await connection.fetch(statement)
            finally:
                await connection.close()

        return asyncio.run(run())

    def start(self) -> None:
        """Start the server again, and wait until it answers."""
        options = [f"--{name}={value}" for name, value in self._options.items()]
        with (self._directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, *options],
                stdout=log,
                stderr=log,
                cwd=self._directory,
                **self._user,
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.execute("SELECT 1")
            except (OSError, asyncpg.PostgresError):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    said = (self._directory / "log").read_text()
                    raise RuntimeError(f"PostgreSQL did not start: {said}") from None
                time.sleep(0.05)
            else:
                return

    def kill(self) -> None:
        """Kill the server, as an immediate shutdown does. The next start recovers from the log."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(_START_SECONDS)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop every process during the block: connections stay open, and no query is answered."""
        pid = self.process.pid
        os.kill(pid, signal.SIGSTOP)  # first, because it now starts no other process
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        pids = [*map(int, children), pid]
        try:
            for each in pids:
                os.kill(each, signal.SIGSTOP)
            yield
        finally:
            for each in pids:
                os.kill(each, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self._directory)

    def _run(self, command: str, *arguments: str | Path) -> None:
        subprocess.run(
            [self._bin / command, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self._directory,
            **self._user,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _directory_of_binaries() -> Path:
    """Return the directory of PostgreSQL's programs. Debian keeps them out of PATH, by version."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    if found:
        return found[-1].parent
    command = shutil.which("initdb")
    assert command, "PostgreSQL is not installed (Debian: postgresql)"
    return Path(command).resolve().parent


def _other_user() -> str:
    names = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
