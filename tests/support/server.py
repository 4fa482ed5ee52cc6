"""A real server process, started with the command that users start it with."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

__all__ = ["Server"]


class Server:
    """`graphstash serve` on a free loopback port; the same port again after a restart."""

    def __init__(self, directory: Path, **environment: str) -> None:
        self.directory = directory
        self.log = directory / "server.log"
        self.port = 0
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        port_file = self.directory / "port"
        port_file.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "graphstash", "serve", "--port", str(self.port)),
                    *("--data-dir", self.directory / "data", "--port-file", port_file),
                ],
                env=os.environ | self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + 60
        while not port_file.exists() or not port_file.read_text().strip():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.port = int(port_file.read_text())

    def stop(self):
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None

    def kill(self):
        self._process.kill()
        self._process.wait(30)
        self._process = None

    def stats(self, namespace):
        """What the server counts for a namespace; zeros when it has never heard of it."""
        answer = httpx.get(f"{self.url}/v1/stats", timeout=10).json()
        for row in answer["namespaces"]:
            if row["namespace"] == namespace:
                return row
        return {"artifacts": 0, "hits": 0, "misses": 0, "puts": 0, "conflicts": 0}
