"""The servers under comparison, each started on loopback with data of its own and stopped again.

All of them get the very same bytes. What is not installed is named with its Debian package.
turborepo-remote-cache (npm) is left out: it needs a Node tool chain.
"""

import base64
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.load import Connection
from support.server import Server

__all__ = ["PEERS", "Graphstash", "Nginx", "Registry", "cpu_seconds", "unique_body"]

NAMESPACE = "bench"
DEVICE_TYPE = "cpu-bench"
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_SECONDS = 20

_tail_bytes = 16


def unique_body(base):
    """Bytes nobody has sent yet, hashed without hashing them all again.

    Args:
        base: the common beginning and a SHA-256 that has taken it.

    Returns:
        The parts to send, and their digest.
    """
    beginning, hashed = base
    tail = secrets.token_bytes(_tail_bytes)
    digest = hashed.copy()
    digest.update(tail)
    return (beginning, tail), digest


def base_of(size):
    """For `unique_body`, bodies of `size` bytes."""
    beginning = secrets.token_bytes(size - _tail_bytes)
    return beginning, hashlib.sha256(beginning)


class Graphstash:
    """`graphstash serve`, as its users start it: SQLite and a disk store."""

    name = "graphstash"

    def __init__(self, directory):
        self._server = Server(directory)
        self.port = self._server.port
        self.pid = self._server.process.pid
        self._paths = {}

    def close(self):
        self._server.stop()

    def publish(self, name, payload):
        """Stores bytes to be read later under `name`."""
        connection = Connection(self.port)
        status, *_ = self.put(connection, (payload,), hashlib.sha256(payload), name)
        assert status == 201, status
        connection.close()

    def path(self, name):
        return artifact_path(self._paths[name])

    def key(self, name):
        """How the lookup call spells the key."""
        return {
            "kind": "torch_xla",
            "device_type": DEVICE_TYPE,
            "fingerprint": self._paths[name],
        }

    def put(self, connection, parts, digest, name=None):
        """Stores a body under a new key."""
        fingerprint = secrets.token_hex(32)
        if name is not None:
            self._paths[name] = fingerprint
        headers = (
            f"Content-Length: {sum(map(len, parts))}\r\n"
            f"Repr-Digest: sha-256=:{base64.b64encode(digest.digest()).decode()}:\r\n"
        )
        return connection.request("PUT", artifact_path(fingerprint), headers, *parts)


def artifact_path(fingerprint):
    return f"/v1/{NAMESPACE}/artifacts/torch_xla/{DEVICE_TYPE}/{fingerprint}"


class Peer:
    """A server from a Debian package, with a generated configuration."""

    name: str
    package: str
    binary: str

    def __init__(self, directory):
        directory.mkdir(parents=True)
        self.port = free_port()
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            self.command(directory.absolute()), stdout=self._log, stderr=self._log
        )
        self.pid = self._process.pid
        deadline = time.monotonic() + START_SECONDS
        while not answers(self.port):
            assert self._process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(0.05)

    @classmethod
    def installed(cls):
        return shutil.which(cls.binary, path=SYSTEM_PATH)

    def close(self):
        self._process.terminate()
        self._process.wait(START_SECONDS)
        self._log.close()


class Nginx(Peer):
    """nginx with one worker per core, sendfile and no access log: the ceiling for static files."""

    name = "nginx"
    package = "nginx-light"
    binary = "nginx"

    def command(self, directory):
        self._root = directory / "files"
        self._root.mkdir()
        for name in ("body", "proxy", "fastcgi", "uwsgi", "scgi"):
            (directory / name).mkdir()
        user = "user root;" if os.geteuid() == 0 else ""
        config = directory / "nginx.conf"
        config.write_text(f"""\
{user}
daemon off;
worker_processes auto;
pid {directory}/pid;
error_log {directory}/error.log;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    tcp_nopush on;
    keepalive_requests 1000000;
    default_type application/octet-stream;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    server {{ listen 127.0.0.1:{self.port}; root {self._root}; }}
}}
""")
        return [self.installed(), "-p", str(directory), "-c", str(config)]

    def publish(self, name, payload):
        (self._root / name).write_bytes(payload)

    def path(self, name):
        return f"/{name}"


class Registry(Peer):
    """Debian's docker-registry with its file system driver; blobs are pushed by its HTTP API."""

    name = "docker-registry"
    package = "docker-registry"
    binary = "docker-registry"

    def command(self, directory):
        self._paths = {}
        config = directory / "config.yml"
        config.write_text(f"""\
version: 0.1
log:
  level: error
  accesslog: {{disabled: true}}
storage:
  cache: {{blobdescriptor: inmemory}}
  filesystem: {{rootdirectory: "{directory}/data"}}
http:
  addr: 127.0.0.1:{self.port}
""")
        return [self.installed(), "serve", str(config)]

    def publish(self, name, payload):
        connection = Connection(self.port)
        digest = hashlib.sha256(payload)
        status, *_ = self.put(connection, (payload,), digest)
        assert status == 201, status
        connection.close()
        self._paths[name] = f"/v2/{NAMESPACE}/blobs/sha256:{digest.hexdigest()}"

    def path(self, name):
        return self._paths[name]

    def put(self, connection, parts, digest):
        """Stores a blob; takes two requests."""
        uploads = f"/v2/{NAMESPACE}/blobs/uploads/"
        status, lines, _ = connection.request("POST", uploads, "Content-Length: 0\r\n")
        assert status == 202, status
        fields = dict(line.split(": ", 1) for line in lines)
        path = "/" + fields["Location"].split("/", 3)[3]
        headers = f"Content-Length: {sum(map(len, parts))}\r\n"
        path += f"{'&' if '?' in path else '?'}digest=sha256:{digest.hexdigest()}"
        return connection.request("PUT", path, headers, *parts)


PEERS = (Nginx, Registry)


def cpu_seconds(pid):
    """CPU time that a process and its children have used."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command, in brackets, may hold spaces; afterwards: state, parent, ...
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if pid in (int(path.parent.name), int(fields[1])):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def fetch_sha256(target, name):
    """The SHA-256 of what a target serves, read by another client than the load's."""
    connection = HTTPConnection("127.0.0.1", target.port, timeout=60)
    connection.request("GET", target.path(name))
    response = connection.getresponse()
    assert response.status == 200, response.status
    digest = hashlib.sha256()
    while chunk := response.read(1 << 20):
        digest.update(chunk)
    connection.close()
    return digest.hexdigest()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
