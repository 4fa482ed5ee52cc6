"""A real nginx with the configuration in docker/, on a loopback port of its own."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx

from graphstash_server.testing import LiveServer, ServerProcess
from support.ports import reserved_port
from support.processes import captured
from support.waiting import until

TEMPLATES = Path(__file__).parents[2] / "docker" / "nginx"

# Headers that differ in every answer, or that the server in front of the client sets.
_OWN_HEADERS = {"date", "server", "connection", "x-request-id"}

_STOP_SECONDS = 30
_VARIABLE = re.compile(r"\$\{(GRAPHSTASH_[A-Z0-9_]+)\}")


class Nginx:
    """A running nginx; a context manager.

    Args:
        directory: directory of all its files.
        variables: variables of the templates. Variables that do not affect a test have defaults.
        tls: also render the TLS part.

    Attributes:
        url: its address.
        command: its command line.
    """

    def __init__(self, directory: Path, *, variables: Mapping[str, str], tls: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)
        self.port = reserved_port()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.variables = {
            "GRAPHSTASH_NGINX_WORKERS": "2",
            "GRAPHSTASH_CONNECTIONS_PER_ADDRESS": "1000",
            "GRAPHSTASH_ACCEL": "1",
            **variables,
            "GRAPHSTASH_NGINX_DIR": str(directory),
            "GRAPHSTASH_NGINX_LISTEN": f"127.0.0.1:{self.port}{' ssl' if tls else ''}",
        }
        for name in ("nginx.conf", "tls.conf") if tls else ("nginx.conf",):
            template = (TEMPLATES / f"{name}.template").read_text()
            (directory / name).write_text(render(template, self.variables))
        self.configuration = directory / "nginx.conf"
        # As root, nginx would read the blobs as another user. In the container, nginx runs as the
        # servers' user from the start.
        user = " user root;" if os.geteuid() == 0 else ""
        self.command = [_nginx(), "-c", str(self.configuration), "-g", f"daemon off;{user}"]
        self._log = directory / "log"
        self._start()

    @property
    def log(self) -> str:
        """Return its log: one JSON line per request, and errors."""
        return self._log.read_text(errors="replace")

    def has_sent(self, request_id: str) -> bool:
        """Return whether nginx itself sent the body of a request without the server."""

        def logged() -> list[Any]:
            lines = self.log.splitlines()
            return [json.loads(line) for line in lines if f'"request":"{request_id}"' in line]

        until(logged)
        (entry,) = logged()
        return bool(entry["status"] < 300 and entry["server_bytes"] == "0")

    def check(self) -> tuple[int, str]:
        """Run `nginx -t`, and return its exit code and output."""
        done = captured([*self.command, "-t"])
        return done.returncode, done.stderr

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(_STOP_SECONDS)

    def _start(self) -> None:
        status, said = self.check()
        if status != 0:
            raise RuntimeError(f"nginx refuses its configuration: {said}")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        until(self._is_listening)

    def _is_listening(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"nginx did not start: {self.log}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_front_of(
    server: LiveServer | ServerProcess, directory: Path, *, tls: bool = False, **variables: str
) -> Nginx:
    """Start an nginx that sends the blobs of one server, which stands for two."""
    address = server.url.removeprefix("http://")
    return Nginx(
        directory,
        tls=tls,
        variables={
            "GRAPHSTASH_SERVER_1": address,
            "GRAPHSTASH_SERVER_2": address,
            "GRAPHSTASH_BLOB_DIR": str(server.data_dir / "blobs"),
            **variables,
        },
    )


def seen(answer: httpx.Response) -> tuple[int, dict[str, str], Any]:
    """Return the parts of an answer on which a client may rely: status, headers and body."""
    pairs = [pair for pair in answer.headers.multi_items() if pair[0] not in _OWN_HEADERS]
    headers = dict(pairs)
    assert len(headers) == len(pairs), f"a header came twice: {pairs}"
    body: Any = answer.content
    if answer.headers.get("content-type") == "application/problem+json":
        problem = answer.json()
        assert problem.pop("instance").endswith(answer.headers["x-request-id"])
        problem["detail"] = re.sub(r"\d{5,}", "<number>", problem["detail"])  # bytes of headers
        body = problem
        headers.pop("content-length")
    return answer.status_code, headers, body


def render(template: str, variables: Mapping[str, str]) -> str:
    """Replace these variables in a template, as the image's envsubst does."""
    return _VARIABLE.sub(lambda match: variables[match.group(1)], template)


def _nginx() -> str:
    command = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    assert command, "nginx is not installed (Debian: nginx-light)"
    return command
