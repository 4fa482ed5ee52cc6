"""Live servers: one in a thread of this process, one in a process of its own that may be killed."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
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
        """Prepares it, without authentication; any field of `Settings` may be given."""
        self.data_dir = data_dir
        self._settings = load_settings(
            data_dir=data_dir,
            **{"insecure": True, "shutdown_seconds": 5, "min_free_bytes": 0, **settings},
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

    def __exit__(self, *_: object) -> None:
        self.stop()


class ServerProcess:
    """A real server in a process of its own, without authentication unless `GRAPHSTASH_AUTH` or
    `GRAPHSTASH_INSECURE` say otherwise; a context manager.

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
            RuntimeError: when it exits instead, with its output.
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
                env={
                    **inherited,
                    "GRAPHSTASH_INSECURE": "true",
                    "XDG_STATE_HOME": f"{data_dir}.state",  # jobs do not find it by themselves
                    "PYTHONUNBUFFERED": "1",
                    **(environment or {}),
                },
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
        """Kills it at once, as a power cut would, with nothing flushed.

        Args:
            tree: kill its workers, too, as when a container is killed; otherwise they run until
                they notice that it is gone.
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
            if found := re.search(r"\blisten\w* on (https?://\S+)\n", said):
                return found[1]  # other releases say it in other words
            if self.process.poll() is not None:
                raise RuntimeError(f"the server exited with {self.process.returncode}: {said}")
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"the server is not ready after {_START_SECONDS} seconds: {said}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()
