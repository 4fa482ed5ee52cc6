"""Live servers: one in a thread of this process, one in a process of its own that may be killed."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from graphstash_server.server import make_server
from graphstash_server.settings import load_settings

__all__ = ["LiveServer", "ServerProcess"]

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class LiveServer:
    """A real server on a free loopback port, in a thread; a context manager.

        with LiveServer(tmp_path) as server:
            httpx.get(server.url + "/healthz")

    Attributes:
        url: where it listens.
        data_dir: where it keeps its data.
    """

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        """Prepares it; any field of `Settings` may be given."""
        self.data_dir = data_dir
        self._settings = load_settings(
            data_dir=data_dir, **{"shutdown_seconds": 5, "min_free_bytes": 0, **settings}
        )
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        scheme = "http" if self._settings.tls_cert_file is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ready = threading.Event()
        self._server = make_server(self._settings, when_ready=self._ready.set)
        self._thread = threading.Thread(target=self._run, name="live-server", daemon=True)

    def start(self) -> Self:
        """Returns when it serves.

        Raises:
            RuntimeError: when it does not within a minute.
        """
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._ready.wait(0.05):
            if not self._thread.is_alive() or time.monotonic() > deadline:
                self._listener.close()
                raise RuntimeError("the server did not start")
        return self

    def stop(self) -> None:
        """Ends it gracefully.

        Raises:
            RuntimeError: when it does not end.
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
            return  # `start` sees that the thread is over

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class ServerProcess:
    """A real server in a process of its own, started as users start it; a context manager.

    Attributes:
        url: where it listens.
        data_dir: where it keeps its data.
        process: the running process; with several workers, their parent.
    """

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        command: tuple[str, ...] = (sys.executable, "-m", "graphstash_server"),
        environment: dict[str, str] | None = None,
    ) -> None:
        """Starts it and returns when it serves.

        Args:
            data_dir: where it keeps its data.
            options: more command-line options.
            command: what to run; it gets the same options.
            environment: added to this process's, without its `GRAPHSTASH_*`.

        Raises:
            RuntimeError: when it ends instead, with what it said.
        """
        self.data_dir = data_dir
        data_dir.mkdir(parents=True, exist_ok=True)
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
                env={**inherited, "PYTHONUNBUFFERED": "1", **(environment or {})},
                start_new_session=True,  # so that its workers can be killed with it
            )
        self.url = self._wait_for_url(start)

    @property
    def log(self) -> str:
        """Everything that was printed."""
        return self._log.read_text(errors="replace")

    @property
    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    @property
    def workers(self) -> set[int]:
        """The processes that it has forked and that are alive."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return {int(child) for child in children}

    def kill(self, *, tree: bool = False) -> None:
        """Ends it as a power cut would: at once, with nothing flushed.

        Args:
            tree: its workers, too, as when a container is killed; else they outlive it for the
                moment that they need to see that it is gone.
        """
        if tree:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(_STOP_SECONDS)

    def kill_worker(self, pid: int) -> None:
        """Kills one of its workers."""
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> int:
        """Ends it gracefully; returns its exit code."""
        self.process.terminate()
        return self.process.wait(_STOP_SECONDS)

    def _wait_for_url(self, start: int) -> str:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            said = self._log.read_bytes()[start:].decode(errors="replace")
            for line in said.splitlines(keepends=True):
                if line.startswith("export GRAPHSTASH_URL=") and line.endswith("\n"):
                    return line.strip().partition("=")[2]
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}: {said}")
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the server is not ready after {_START_SECONDS} seconds: {said}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.stop()
