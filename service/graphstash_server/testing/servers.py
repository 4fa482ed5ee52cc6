"""Live servers for tests: in a thread of this process, or in a process that a test may kill.

A new server starts with a copy of a migrated SQLite database, because a migration from nothing
takes half of the CPU time of a start. If a test names the database or sets `auto_migrate`, its
server gets no copy.
"""

import atexit
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from graphstash_server.db.migrate import migrate
from graphstash_server.serving.server import make_server
from graphstash_server.serving.sockets import take_port
from graphstash_server.settings import load_settings

__all__ = ["LiveServer", "ServerProcess", "migrated_database"]

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0

_WITHOUT_COPY = {"GRAPHSTASH_DATABASE_URL", "GRAPHSTASH_AUTO_MIGRATE"}
"""Variables of a server that gets no copy."""


@functools.cache
def migrated_database() -> Path:
    """Return the path of a migrated SQLite database, for copies. It stays until this process ends.

    Raises:
        StartError: the database could not be migrated.
    """
    directory = Path(tempfile.mkdtemp(prefix="graphstash-migrated-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "graphstash.sqlite3"
    with ThreadPoolExecutor(1) as thread:  # `migrate` needs a thread without an event loop
        url = f"sqlite+aiosqlite:///{path}"
        thread.submit(migrate, url, lock_path=directory / "migrate.lock").result()
    return path


def _add_database(data_dir: Path) -> None:
    """Copy the migrated database into a data directory that has none."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = data_dir / migrated_database().name
    if not path.exists():
        shutil.copyfile(migrated_database(), path)
        path.chmod(0o600)  # as the server creates it


class LiveServer:
    """A real server on a free loopback port, in a thread. A context manager.

    with LiveServer(tmp_path) as server:
        httpx.get(server.url + "/healthz")
    """

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        """Prepare the server. `settings` are fields of `Settings`, except host and port. By
        default, the server requires no authentication.
        """
        self.data_dir = data_dir
        self._settings = load_settings(
            data_dir=data_dir,
            **{"insecure": True, "shutdown_seconds": 5, "min_free_bytes": 0, **settings},
        )
        if self._settings.has_default_database and "auto_migrate" not in settings:
            _add_database(data_dir)
        self._listener = socket.socket()
        take_port(self._listener, ("127.0.0.1", 0))
        scheme = "http" if self._settings.tls_cert_file is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ready = threading.Event()
        self._server = make_server(self._settings, when_ready=self._ready.set)
        self._thread = threading.Thread(target=self._run, name="live-server", daemon=True)

    def start(self) -> Self:
        """Return once the server serves.

        Raises:
            RuntimeError: the server failed, or did not start within a minute.
        """
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._ready.wait(0.05):
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._listener.close()
                raise RuntimeError("the server did not start")
        return self

    def stop(self) -> None:
        """Stop the server gracefully.

        Raises:
            RuntimeError: the server did not stop within half a minute.
        """
        self._server.should_exit = True
        self._thread.join(_STOP_SECONDS)
        self._listener.close()
        if self._thread.is_alive():
            raise RuntimeError("the server did not stop")

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except SystemExit:
            return  # `start` detects that the thread has ended

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class ServerProcess:
    """A real server in its own process. A context manager.

    It requires no authentication unless `options` or `environment` ask for it. `process`
    is the server, or the parent of several workers.
    """

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        command: tuple[str, ...] = (sys.executable, "-m", "graphstash_server"),
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start the server, and return once it serves.

        Args:
            data_dir: data directory of the server.
            options: further command-line options.
            command: command to run instead, with the same options. With another Python than this
                process's, the server creates its database itself.
            environment: added to this process's environment without its `GRAPHSTASH_*`.

        Raises:
            RuntimeError: the server exited, or did not serve within a minute. The message has its
                output.
        """
        self.data_dir = data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
        if command[0] == sys.executable and _WITHOUT_COPY.isdisjoint(environment or ()):
            _add_database(data_dir)
        self._log = data_dir.parent / f"{data_dir.name}.log"
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("GRAPHSTASH_")
        }
        with self._log.open("ab") as log:
            start = log.tell()
            self.process = subprocess.Popen(
                [*command, "--port", "0", "--data-dir", str(data_dir), *options],
                stdout=log,
                stderr=log,
                env={
                    **inherited,
                    "GRAPHSTASH_INSECURE": "true",
                    # Keeps the owner's socket from the clients of other tests.
                    "XDG_STATE_HOME": f"{data_dir}.state",
                    "PYTHONUNBUFFERED": "1",
                    **(environment or {}),
                },
                start_new_session=True,  # lets `kill` reach the workers
            )
        self.url = self._wait_for_url(start)

    @property
    def log(self) -> str:
        """Output of this server and of earlier ones with the same data directory."""
        return self._log.read_text(errors="replace")

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process in bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def port(self) -> int:
        """TCP port of the server."""
        return int(self.url.rpartition(":")[2])

    @property
    def workers(self) -> set[int]:
        """IDs of the live processes that the server has forked."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child) for child in children}

    def kill(self, *, tree: bool = False) -> None:
        """Kill the server with SIGKILL, so that it flushes nothing.

        Args:
            tree: also kill the workers, as when a container is killed. Otherwise they run until
                they detect that their parent has exited.
        """
        if tree:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(_STOP_SECONDS)

    def kill_worker(self, pid: int) -> None:
        """Kill a worker with SIGKILL."""
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> int:
        """Stop the server gracefully. Return its exit code."""
        self.process.terminate()
        return self.process.wait(_STOP_SECONDS)

    def _wait_for_url(self, start: int) -> str:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            output = self._log.read_bytes()[start:].decode(errors="replace")
            if found := re.search(r"\blisten\w* on (https?://\S+)\n", output):
                return found[1]  # the words before the URL differ between releases
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with {self.process.returncode}: {output}")
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the server is not ready after {_START_SECONDS} seconds: {output}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()
